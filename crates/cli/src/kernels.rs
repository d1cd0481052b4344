//! `brigade kernels`: compiles Brigade's GPU kernels ahead of time.

use std::collections::BTreeSet;
use std::env;
use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use brigade_dylib_call::Nvrtc;
use brigade_kernels::{Cache, FILES, MIN_CAPABILITY, Origin, Variant};
use brigade_libtorch_setup as libtorch;
use clap::Args;
use libtorch::{Libtorch, Pins, Project, Wanted};

/// Compile the GPU kernels of training programs ahead of time
///
/// A program compiles them at its first start on a GPU, in a few seconds, and keeps the code in
/// ~/.cache/brigade/kernels (XDG_CACHE_HOME). --build fills that folder on a machine without a GPU, for
/// images and packages. The code is for one version of NVRTC, that of the program's libtorch for CUDA:
/// the one of LIBTORCH or LIBTORCH_USE_PYTORCH=1, of the project here, or of `brigade setup --cuda`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct KernelsArgs {
    /// Compile the kernels
    #[arg(long, required = true)]
    build: bool,

    /// Compute capability of the GPUs, as in 80, 90 or 9.0; several by commas
    #[arg(long, value_name = "NUMBER", required = true, value_delimiter = ',')]
    arch: Vec<String>,

    /// Write to this folder instead of the user's cache
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,

    /// Compile with this NVRTC (libnvrtc.so)
    #[arg(long, value_name = "FILE")]
    nvrtc: Option<PathBuf>,
}

/// Compiles what the cache lacks, and prints a line for each file.
pub(crate) fn run(args: &KernelsArgs, mut out: impl Write) -> anyhow::Result<()> {
    let capabilities =
        args.arch.iter().map(|it| capability(it)).collect::<anyhow::Result<BTreeSet<u32>>>()?;
    let library = args.nvrtc.clone().map_or_else(nvrtc, Ok)?;
    let compiler = Nvrtc::load(&library)?;
    let cache = args.folder.clone().map_or_else(Cache::of_user, Cache::at);
    let folder = cache.folder().context(
        "there is no folder for compiled kernels: this user has no home folder; pass --folder",
    )?;
    for &capability in &capabilities {
        for (file, &element) in
            FILES.iter().flat_map(|file| file.elements.iter().map(move |element| (file, element)))
        {
            let variant = Variant { file, element, capability };
            let code = cache.code(&variant, &compiler)?;
            // Here a folder that cannot be written is an error.
            let path = folder.join(variant.file_name(compiler.version()));
            if let Some(remark) = code.remark.filter(|_| !path.exists()) {
                bail!(remark);
            }
            let verb = match code.origin {
                Origin::Cached => "already compiled",
                Origin::Compiled => "compiled",
            };
            let (name, element) = (file.name, element.name());
            writeln!(out, "{name} {element} sm_{capability}: {verb}")?;
        }
    }
    let (major, minor) = compiler.version();
    writeln!(out, "kernels by NVRTC {major}.{minor} are in {}", folder.display())?;
    Ok(())
}

/// Parses `90` or `9.0`.
fn capability(text: &str) -> anyhow::Result<u32> {
    let number = match text.split_once('.') {
        Some((major, minor)) if minor.len() == 1 => format!("{major}{minor}").parse().ok(),
        Some(_) => None,
        None => text.parse().ok(),
    };
    let number: u32 = number
        .with_context(|| format!("--arch {text} is not a compute capability, such as 90 or 9.0"))?;
    ensure!(
        number >= MIN_CAPABILITY,
        "--arch {text}: the kernels need compute capability {}.{} or more",
        MIN_CAPABILITY / 10,
        MIN_CAPABILITY % 10
    );
    Ok(number)
}

/// Returns the NVRTC of the libtorch that a program built here uses.
fn nvrtc() -> anyhow::Result<PathBuf> {
    let (cache, pins) = (libtorch::Cache::of_user()?, Pins::embedded()?);
    if let Some(wanted) = Wanted::by_environment() {
        return Libtorch::find_or_fetch(&wanted, &cache, &pins)?.nvrtc();
    }
    let here = env::current_dir().context("there is no working folder")?;
    let configured =
        Project::find(&here).ok().and_then(|project| project.libtorch().ok().flatten());
    if let Some(library) = configured.as_deref().and_then(libtorch::nvrtc_of) {
        return Ok(library);
    }
    let fetched = Libtorch::find_fetched(libtorch::Kind::Cuda, &cache, &pins)?.context(
        "there is no libtorch for CUDA: run `brigade setup --cuda`, set LIBTORCH, or pass --nvrtc with the path of \
         libnvrtc.so",
    )?;
    fetched.nvrtc()
}

const EXAMPLES: &str = "\
Examples:
  brigade kernels --build --arch 90
  brigade kernels --build --arch 80,9.0 --folder image/root/.cache/brigade/kernels";
