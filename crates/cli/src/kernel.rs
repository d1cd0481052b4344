//! `brigade kernel`: evcxr as a Jupyter kernel that finds libtorch and keeps compiled cells.

use std::env;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use brigade_libtorch_setup::{Cache, Project};
use clap::{Args, Subcommand};
use rustix::io::FdFlags;

/// Run Rust in Jupyter notebooks
///
/// The kernel is evcxr (cargo install --locked evcxr_jupyter), with the variables that compile and link cells with
/// libtorch, and with a folder for compiled dependencies.
#[derive(Debug, Subcommand)]
pub(crate) enum Kernel {
    Install(InstallArgs),
    /// Start a kernel, as Jupyter does
    #[command(hide = true)]
    Run(RunArgs),
}

/// Register the kernel "Rust (Brigade)" with Jupyter
///
/// Cells use the libtorch of the Cargo project in this folder (`brigade setup`). Dependencies are compiled once for
/// each kernel that runs at the same time, into a folder below ~/.cache/brigade/notebooks (XDG_CACHE_HOME).
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct InstallArgs {
    /// Register for this environment of Jupyter only [default: for this user]
    #[arg(long, value_name = "DIR")]
    prefix: Option<PathBuf>,

    /// Path of evcxr_jupyter [default: found in PATH or in cargo's folder]
    #[arg(long, value_name = "FILE")]
    evcxr: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[arg(long)]
    evcxr: PathBuf,

    #[arg(long)]
    libtorch: PathBuf,

    /// Jupyter's file with the addresses of the kernel
    connection: PathBuf,
}

pub(crate) fn run(kernel: &Kernel, out: impl Write) -> anyhow::Result<()> {
    match kernel {
        Kernel::Install(args) => install(args, out),
        Kernel::Run(args) => start(args),
    }
}

fn install(args: &InstallArgs, mut out: impl Write) -> anyhow::Result<()> {
    let here = env::current_dir().context("there is no working folder")?;
    let project = Project::find(&here)?;
    let libtorch = match env::var_os("LIBTORCH").filter(|it| !it.is_empty()) {
        Some(folder) => PathBuf::from(folder),
        None => project.libtorch()?.with_context(|| {
            format!("{} has no libtorch yet: run `brigade setup` there", project.root().display())
        })?,
    };
    let evcxr = match &args.evcxr {
        Some(program) => fs::canonicalize(program)
            .with_context(|| format!("cannot find evcxr at {}", program.display()))?,
        None => find_evcxr().context(
            "evcxr_jupyter is missing: install it with `cargo install --locked evcxr_jupyter`, or name it \
             with --evcxr",
        )?,
    };
    let program = env::current_exe().context("cannot find the path of this program")?;
    let folder = data_folder(args.prefix.as_deref())?.join("kernels/brigade");
    fs::create_dir_all(&folder)
        .with_context(|| format!("cannot make the folder {}", folder.display()))?;
    let spec = serde_json::json!({
        "display_name": "Rust (Brigade)",
        "language": "rust",
        "argv": [
            program, "kernel", "run", "--evcxr", evcxr, "--libtorch", libtorch, "{connection_file}",
        ],
        // evcxr reads messages on the control channel, and handles no signal.
        "interrupt_mode": "message",
    });
    let file = folder.join("kernel.json");
    fs::write(&file, format!("{spec:#}\n"))
        .with_context(|| format!("cannot write {}", file.display()))?;
    writeln!(out, "registered the kernel \"Rust (Brigade)\" in {}", folder.display())?;
    writeln!(out, "with libtorch in {} and {}", libtorch.display(), evcxr.display())?;
    Ok(())
}

fn find_evcxr() -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let cargo = env::var_os("CARGO_HOME").map(PathBuf::from);
    let cargo = cargo.or_else(|| env::home_dir().map(|home| home.join(".cargo")));
    let mut folders = env::split_paths(&path).chain(cargo.map(|it| it.join("bin")));
    folders.find_map(|it| fs::canonicalize(it.join("evcxr_jupyter")).ok())
}

/// Returns the folder in which Jupyter looks for the kernels of an environment, or of this user.
fn data_folder(prefix: Option<&Path>) -> anyhow::Result<PathBuf> {
    let absolute = |path: &Path| std::path::absolute(path).context("there is no working folder");
    if let Some(prefix) = prefix {
        return absolute(&prefix.join("share/jupyter"));
    }
    let named = |name: &str| env::var_os(name).filter(|it| !it.is_empty()).map(PathBuf::from);
    if let Some(folder) = named("JUPYTER_DATA_DIR") {
        return absolute(&folder);
    }
    let data = named("XDG_DATA_HOME")
        .or_else(|| env::home_dir().map(|home| home.join(".local/share")))
        .context("there is no home folder: give the folder of Jupyter's environment (--prefix)")?;
    Ok(data.join("jupyter"))
}

/// Replaces this process by evcxr.
fn start(args: &RunArgs) -> anyhow::Result<()> {
    // Beside the fetched libtorch installations.
    let builds = Cache::of_user()?.root().with_file_name("notebooks");
    let (folder, lock) = free_folder(&builds)
        .with_context(|| format!("cannot find a folder to compile in, in {}", builds.display()))?;
    // Inherited by evcxr and its children: the folder is in use as long as one of them runs.
    rustix::io::fcntl_setfd(&lock, FdFlags::empty()).context("cannot keep the folder's lock")?;

    let mut evcxr = Command::new(&args.evcxr);
    evcxr.arg("--control_file").arg(&args.connection);
    evcxr.env("LIBTORCH", &args.libtorch).env("EVCXR_TMPDIR", &folder);
    // `brigade setup` has checked the version; otherwise tch only accepts its own.
    evcxr.env("LIBTORCH_BYPASS_VERSION_CHECK", "1");
    // evcxr replaces the flags by which programs of a project find libtorch, and moves cells to another folder than the
    // one for which their run path to Rust's own library is set.
    let mut folders = vec![args.libtorch.join("lib")];
    folders.extend(rust_libraries());
    folders.extend(env::split_paths(&env::var_os("LD_LIBRARY_PATH").unwrap_or_default()));
    evcxr.env("LD_LIBRARY_PATH", env::join_paths(folders)?);
    evcxr.env("BRIGADE_PROGRAM", env::current_exe()?);
    let error = evcxr.exec();
    bail!("cannot start {}: {error}", args.evcxr.display())
}

/// Returns the folder of Rust's `libstd`, against which evcxr links cells.
fn rust_libraries() -> Option<PathBuf> {
    let output = Command::new("rustc").arg("--print=target-libdir").output().ok()?;
    let folder = String::from_utf8(output.stdout).ok().filter(|_| output.status.success())?;
    Some(PathBuf::from(folder.trim_end()))
}

/// Returns the first folder that no other kernel uses, with its lock.
fn free_folder(builds: &Path) -> io::Result<(PathBuf, File)> {
    fs::create_dir_all(builds)?;
    for number in 0.. {
        let lock = File::create(builds.join(format!("{number}.lock")))?;
        match lock.try_lock() {
            Ok(()) => {
                let folder = builds.join(number.to_string());
                fs::create_dir_all(&folder)?;
                return Ok((folder, lock));
            }
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Err(io::Error::other("all folders are in use"))
}

const EXAMPLES: &str = "\
Examples:
  brigade kernel install
  brigade kernel install --prefix notebooks --evcxr notebooks/bin/evcxr_jupyter";
