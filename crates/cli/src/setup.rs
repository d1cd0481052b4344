//! `brigade setup`: configures libtorch for a cargo project.

use std::env;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use brigade_libtorch_setup::{
    Cache, Kind, Libtorch, ObjectCache, Pins, Project, RunPath, TpuFiles, TpuPlugin, Wanted,
};
use clap::Args;

/// Find or fetch libtorch for the Cargo project here
///
/// Afterwards plain cargo commands build the project without environment variables, and its programs find libtorch when
/// they start. A fetched libtorch is stored once for all projects in ~/.cache/brigade (XDG_CACHE_HOME): pip downloads
/// 540 MB from its package index, and the checksum is verified. .cargo/libtorch.toml contains its path;
/// .cargo/config.toml includes that file, and git ignores it, since the path is valid on this machine only.
///
/// Brigade's compiled C++, which wheels, archives and Debian packages bring, is copied into ~/.cache/brigade, too. It
/// saves the first build a minute; where it does not fit, that build compiles it.
///
/// With --tpu, TorchTPU, the backend of libtorch for Google's TPUs (experimental), is stored in ~/.cache/brigade/tpu, too.
/// Programs built with `--features brigade/tpu` use it. To uninstall it, remove that folder.
///
/// LIBTORCH=DIR and LIBTORCH_USE_PYTORCH=1 in the environment have the same effect as --libtorch and --pytorch.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct SetupArgs {
    #[command(flatten)]
    source: SourceArgs,

    /// Also fetch TorchTPU (experimental): tpu, or cpu to try it
    ///
    /// tpu: with Google's libtpu, 301 MB to download, 847 MB on disk; cpu: with a plug-in that computes on the CPU, 159 MB
    /// and 473 MB. Linux on x86-64 only
    #[arg(
        long,
        value_name = "PLUGIN",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "tpu",
        value_parser = plugin
    )]
    tpu: Option<TpuPlugin>,

    /// Remove libtorch from the project's cargo configuration
    ///
    /// The cache is kept for other projects
    #[arg(long, conflicts_with_all = ["cuda", "libtorch", "pytorch", "tpu"])]
    remove: bool,
}

/// Which libtorch.
#[derive(Debug, Args)]
pub(crate) struct SourceArgs {
    /// Fetch libtorch for CUDA: 2.5 GB to download, 3.6 GB on disk
    #[arg(long, conflicts_with_all = ["libtorch", "pytorch"])]
    cuda: bool,

    /// Use the libtorch in this folder, which has lib/ and include/
    #[arg(long, value_name = "DIR", conflicts_with = "pytorch")]
    libtorch: Option<PathBuf>,

    /// Use the libtorch of the PyTorch that python3 imports
    #[arg(long)]
    pytorch: bool,
}

/// Sets up the project of the working folder, or reverts that, and prints the changes.
pub(crate) fn run(args: &SetupArgs, mut out: impl Write) -> anyhow::Result<()> {
    let project = Project::find(&env::current_dir().context("there is no working folder")?)?;
    if !args.remove {
        if let Some(plugin) = args.tpu {
            fetch_torch_tpu(plugin, &args.source, &mut out)?;
        }
        return set_up(&project, &args.source, out);
    }
    let changes = project.remove()?;
    if changes.is_empty() {
        writeln!(out, "{} is not set up: nothing to remove", project.root().display())?;
    }
    for change in changes {
        writeln!(out, "{change}")?;
    }
    Ok(())
}

/// Fetches TorchTPU for the libtorch of the flags.
fn fetch_torch_tpu(
    plugin: TpuPlugin,
    source: &SourceArgs,
    mut out: impl Write,
) -> anyhow::Result<()> {
    let pins = Pins::embedded()?;
    let libtorch = Libtorch::find_or_fetch(&source.wanted(), &Cache::of_user()?, &pins)?;
    let files = TpuFiles::find_or_fetch(plugin, libtorch.version(), &pins)?;
    writeln!(
        out,
        "TorchTPU {} (experimental) is in {}: `cargo build --features brigade/tpu` builds programs that use it",
        files.version(),
        files.folder().display()
    )?;
    let has_tpu =
        || brigade_hardware::find(&brigade_hardware::host_root()).0.device_word() == "TPU";
    if plugin == TpuPlugin::Tpu && !has_tpu() {
        writeln!(
            out,
            "note: no TPU was found on this host; `brigade setup --tpu=cpu` fetches a plug-in to try programs on the CPU"
        )?;
    }
    Ok(())
}

fn plugin(text: &str) -> Result<TpuPlugin, String> {
    let all = [TpuPlugin::Tpu, TpuPlugin::Cpu];
    all.into_iter().find(|it| it.name() == text).ok_or_else(|| "expected tpu or cpu".to_owned())
}

/// Sets up this project.
pub(crate) fn set_up(
    project: &Project,
    source: &SourceArgs,
    mut out: impl Write,
) -> anyhow::Result<()> {
    let libtorch =
        Libtorch::find_or_fetch(&source.wanted(), &Cache::of_user()?, &Pins::embedded()?)?;
    writeln!(out, "{}", libtorch.description())?;
    install_objects(&mut out)?;
    for change in project.configure(&libtorch, RunPath::All)? {
        writeln!(out, "{change}")?;
    }
    for place in project.overriding_flags()? {
        writeln!(
            out,
            "note: {place} wins over the flags in .cargo/libtorch.toml, so programs will not find \
             libtorch: add `-C link-arg=-Wl,-rpath,{}` there",
            libtorch.folder().join("lib").display()
        )?;
    }
    let root = project.root().display();
    writeln!(out, "ready: cargo builds {root} with it, and nothing has to be exported")?;
    Ok(())
}

/// Copies the compiled C++ of this program's package into the user's cache. A failure costs only the time of a build.
fn install_objects(mut out: impl Write) -> anyhow::Result<()> {
    let Some(cache) = ObjectCache::of_user() else { return Ok(()) };
    let shown = cache.folder().display();
    match env::current_exe().and_then(|program| cache.install_from(&program)) {
        Ok(true) => writeln!(out, "copied Brigade's compiled C++ into {shown}")?,
        Ok(false) => {}
        Err(error) => writeln!(
            out,
            "note: cannot copy Brigade's compiled C++ into {shown}: {error}; the first build compiles it"
        )?,
    }
    Ok(())
}

impl SourceArgs {
    /// Returns the libtorch of the flags, or else of the environment, or else the fetched one.
    pub(crate) fn wanted(&self) -> Wanted {
        self.named().unwrap_or(Wanted::Fetched(Kind::Cpu))
    }

    /// Returns `true` if a flag selects one.
    pub(crate) fn is_given(&self) -> bool {
        self.cuda || self.pytorch || self.libtorch.is_some()
    }

    /// Returns the libtorch of the flags, or else of the environment.
    pub(crate) fn named(&self) -> Option<Wanted> {
        if let Some(folder) = &self.libtorch {
            let named = format!("--libtorch {}", folder.display());
            // `absolute` fails for an empty path, for which `Libtorch` has a better message.
            let path = std::path::absolute(folder).unwrap_or_else(|_| Path::new("").to_owned());
            return Some(Wanted::Folder { path, named });
        }
        if self.pytorch {
            // Without any, the library's own search has the message.
            let python = brigade_launch::find_python().ok();
            return Some(Wanted::PyTorch { named: "--pytorch".to_owned(), python });
        }
        if self.cuda {
            return Some(Wanted::Fetched(Kind::Cuda));
        }
        Wanted::by_environment()
    }
}

const EXAMPLES: &str = "\
Examples:
  brigade setup
  brigade setup --cuda
  brigade setup --tpu=cpu
  brigade setup --libtorch /opt/libtorch
  brigade setup --remove";
