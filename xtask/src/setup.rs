//! `cargo xtask setup`: selects the libtorch with which this checkout is built, and fetches one if necessary.
//!
//! After it, a plain `cargo build`, `cargo test` or `cargo run` finds libtorch without environment variables: the
//! folder is in .cargo/libtorch.toml, which .cargo/config.toml includes.

use std::env;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use brigade_libtorch_setup::{Cache, Kind, Libtorch, Origin, Pins, Project, RunPath, Wanted};

use crate::checkout::Checkout;

/// Runs the command: sets the checkout up and prints the result.
pub(crate) fn run(checkout: &Checkout, cuda: bool, pins: Option<&Path>) -> Result<ExitCode> {
    let pins = pins.map_or_else(Pins::embedded, Pins::read)?;
    let kind = if cuda { Kind::Cuda } else { Kind::Cpu };
    let libtorch = set_up(checkout, kind, &pins)?;
    eprintln!("{}", libtorch.description());
    Ok(ExitCode::SUCCESS)
}

/// Sets the checkout up for commands that need libtorch. Prints nothing if nothing has to be done.
pub(crate) fn ensure(checkout: &Checkout) -> Result<Libtorch> {
    let libtorch = set_up(checkout, Kind::Cpu, &Pins::embedded()?)?;
    if let Origin::Named(_) = libtorch.origin() {
        eprintln!("{}", libtorch.description());
    }
    Ok(libtorch)
}

/// Returns the libtorch with CUDA for `check --cuda`: the one that the user names in the environment, or else the
/// fetched one. Fetches and configures nothing: the checkout's own libtorch is kept.
pub(crate) fn for_cuda(checkout: &Checkout) -> Result<Libtorch> {
    let (cache, pins) = (Cache::of_user()?, Pins::embedded()?);
    let libtorch = match by_user(checkout, &cache)? {
        Some(wanted) => Libtorch::find_or_fetch(&wanted, &cache, &pins)?,
        None => Libtorch::find_fetched(Kind::Cuda, &cache, &pins)?.context(
            "libtorch for CUDA is not set up: run `cargo xtask setup --cuda` (2.5 GB to download, 3.6 GB on \
             disk), or name one in LIBTORCH, or a Python's by LIBTORCH_USE_PYTORCH=1",
        )?,
    };
    has_cuda(libtorch)
}

fn has_cuda(libtorch: Libtorch) -> Result<Libtorch> {
    let library = libtorch.folder().join("lib/libtorch_cuda.so");
    anyhow::ensure!(
        library.exists(),
        "{} is not there: the libtorch in {} is one for CPUs; name one for CUDA, or run `cargo xtask setup \
         --cuda`",
        library.display(),
        libtorch.folder().display()
    );
    Ok(libtorch)
}

/// Returns the libtorch with CUDA of this version, such as `2.11`, for programs that run on GPUs: the one that the user
/// names if it has that version, or else the pinned one, fetched if it is missing.
pub(crate) fn for_gpus(checkout: &Checkout, version: &str) -> Result<Libtorch> {
    let cache = Cache::of_user()?;
    let pins = if version == "2.11" { Pins::embedded_older() } else { Pins::embedded() }?;
    if let Some(wanted) = by_user(checkout, &cache)? {
        let libtorch = Libtorch::find_or_fetch(&wanted, &cache, &pins)?;
        if libtorch.version().starts_with(version) {
            return has_cuda(libtorch);
        }
    }
    Libtorch::find_or_fetch(&Wanted::Fetched(Kind::Cuda), &cache, &pins)
}

/// Returns the user's choice. `cargo run`, which started this program, sets the variables of .cargo/libtorch.toml in
/// its environment: these are not the user's.
fn by_user(checkout: &Checkout, cache: &Cache) -> Result<Option<Wanted>> {
    let configured = Project::at(checkout.root()).libtorch()?;
    Ok(Wanted::by_environment().filter(|wanted| match wanted {
        Wanted::Folder { path, .. } => configured.as_ref() != Some(path) && !cache.contains(path),
        _ => true,
    }))
}

fn set_up(checkout: &Checkout, kind: Kind, pins: &Pins) -> Result<Libtorch> {
    let cache = Cache::of_user()?;
    let project = Project::at(checkout.root());
    let configured = project.libtorch()?;
    if let Some(wanted) = by_user(checkout, &cache)? {
        let libtorch = Libtorch::find_or_fetch(&wanted, &cache, pins)?;
        project.configure_doc_tests(&libtorch)?;
        return Ok(libtorch);
    }
    let wanted = match configured {
        // `brigade setup --libtorch` was run in this checkout.
        Some(path) if !cache.contains(&path) => {
            Wanted::Folder { path, named: ".cargo/libtorch.toml".to_owned() }
        }
        _ => Wanted::Fetched(kind),
    };
    let libtorch = Libtorch::find_or_fetch(&wanted, &cache, pins)?;
    // The packages' build scripts set the run path of everything but doc tests. With flags for rustc, cargo would
    // rebuild this program.
    project.configure(&libtorch, RunPath::DocTests)?;
    Ok(libtorch)
}

/// Returns `true` if `LIBTORCH` comes from .cargo/libtorch.toml, and must not be passed to a child. If cargo finds it
/// in both places, it detects a change and rebuilds tch, which takes minutes.
pub(crate) fn is_repeated(checkout: &Checkout) -> bool {
    let configured = Project::at(checkout.root()).libtorch().ok().flatten();
    configured.is_some() && configured == env::var_os("LIBTORCH").map(PathBuf::from)
}
