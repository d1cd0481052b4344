//! Build of the self-test with cargo, once for each libtorch: it links libtorch, which `brigade` does not.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use brigade_libtorch_setup::{Cache, Libtorch, Pins, Project, Wanted};

use super::NAME;
use crate::output;
use crate::setup::SourceArgs;
use crate::source::Source;

/// Returns the self-test for the requested libtorch, or else for that of the Cargo project in the working folder, or
/// else for the fetched one. It is built if it is missing, or was built by another `brigade` or for a libtorch that was
/// replaced since.
///
/// # Errors
/// Fails if there is no libtorch and none can be fetched, without cargo or disk space, or if the build fails.
pub(super) fn built(libtorch: &SourceArgs, source: &Source) -> anyhow::Result<PathBuf> {
    let cache = Cache::of_user()?;
    let libtorch = find_libtorch(libtorch, &cache)?;
    let folder = cache.root().with_file_name("selftest").join(name_of(libtorch.folder()));
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    // Another `brigade test` may be building it. Closing the file ends the lock.
    let lock = folder.join("lock");
    let _lock = File::create(&lock)
        .and_then(|file| file.lock().map(|()| file))
        .with_context(|| format!("cannot lock {}", lock.display()))?;
    let program = folder.join("bin").join(NAME);
    let stamp = folder.join("built-by");
    let words = words(source, &libtorch);
    let identity = identity(&words, libtorch.folder())?;
    if program.is_file() && fs::read_to_string(&stamp).is_ok_and(|it| it == identity) {
        return Ok(program);
    }
    // For some versions there is a note on a second line.
    libtorch.description().lines().for_each(output::say);
    output::say(&format!(
        "cargo builds the self-test for it, which takes some minutes, once: into {}",
        folder.display()
    ));
    install(&words, &libtorch, &folder)?;
    fs::write(&stamp, identity).with_context(|| format!("cannot write {}", stamp.display()))?;
    Ok(program)
}

fn find_libtorch(asked: &SourceArgs, cache: &Cache) -> anyhow::Result<Libtorch> {
    let of_project = || {
        let project = Project::find(&env::current_dir().ok()?).ok()?;
        let path = project.libtorch().ok()??;
        let named = format!("{} of this project", path.display());
        Some(Wanted::Folder { path, named })
    };
    let wanted = asked.named().or_else(of_project).unwrap_or_else(|| asked.wanted());
    Libtorch::find_or_fetch(&wanted, cache, &Pins::embedded()?)
}

/// Returns the arguments of `cargo install`: the source and the features.
fn words(source: &Source, libtorch: &Libtorch) -> Vec<OsString> {
    let mut words = source.install_arguments();
    words.extend(["--bin".into(), NAME.into()]);
    if libtorch.folder().join("lib/libtorch_cuda.so").exists() {
        words.extend(["--features".into(), "cuda".into()]);
    }
    words
}

/// Returns the identity of the builder and the target: if this program was reinstalled, or another libtorch is at that
/// path, the self-test is rebuilt.
fn identity(words: &[OsString], libtorch: &Path) -> anyhow::Result<String> {
    let this = env::current_exe().context("cannot find this program's own file")?;
    let [this, library] = [this, libtorch.join("lib/libtorch_cpu.so")].map(|path| {
        let file =
            fs::metadata(&path).with_context(|| format!("cannot read {}", path.display()))?;
        anyhow::Ok((file.modified().ok(), file.len()))
    });
    Ok(format!("{:?} {:?} {words:?}\n", this?, library?))
}

/// Runs `cargo install`, whose messages go to the terminal. Build files are removed afterwards: they are ten times as
/// large as the program.
fn install(words: &[OsString], libtorch: &Libtorch, folder: &Path) -> anyhow::Result<()> {
    let target = folder.join("target");
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["install", "--locked", "--force", "--no-track", "--root"]).arg(folder);
    cargo.arg("--target-dir").arg(&target).args(words);
    // Optimised only as far as it shortens the build: the test's time is spent in libtorch.
    cargo.args(["--config", "profile.release.opt-level=1"]);
    cargo.env("LIBTORCH", libtorch.folder()).env_remove("LIBTORCH_USE_PYTORCH");
    // Otherwise cargo warns that the folder is not in the PATH.
    let path = env::var_os("PATH").unwrap_or_default();
    if let Ok(path) = env::join_paths(env::split_paths(&path).chain([folder.join("bin")])) {
        cargo.env("PATH", path);
    }
    if libtorch.bypasses_version_check() {
        cargo.env("LIBTORCH_BYPASS_VERSION_CHECK", "1");
    }
    let status = match cargo.stdin(Stdio::null()).stdout(Stdio::null()).status() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!(
                "cargo is missing, which builds the self-test: install Rust (https://rustup.rs), or name \
                 a self-test that is built already with --program"
            )
        }
        other => other.context("cannot start cargo")?,
    };
    if !status.success() {
        bail!("the self-test could not be built: cargo's messages are above");
    }
    fs::remove_dir_all(&target).or_else(|error| match error.kind() {
        ErrorKind::NotFound => Ok(()),
        _ => Err(error),
    })?;
    Ok(())
}

/// Returns the folder's name for a libtorch: its path, in characters that a file name may contain.
fn name_of(libtorch: &Path) -> String {
    let plain = |letter: char| {
        if letter.is_ascii_alphanumeric() || ".-".contains(letter) { letter } else { '_' }
    };
    let name: String = libtorch.to_string_lossy().chars().map(plain).collect();
    // A name has at most 255 bytes; the end of a path is more distinctive than its beginning.
    name[name.len().saturating_sub(200)..].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_libtorch_has_a_folder_of_its_own() {
        assert_eq!(name_of(Path::new("/opt/libtorch 2.13/é")), "_opt_libtorch_2.13__");
        let long = format!("/{}/end", "a".repeat(300));
        let name = name_of(Path::new(&long));
        assert!(name.len() == 200 && name.ends_with("a_end"), "{name}");
    }
}
