//! Fetching of wheels: pip downloads, Python unpacks, and a rename puts the result in place.
//!
//! Everything is built in `partial-<pid>/` in the cache and renamed when it is complete, so an interruption at any
//! moment leaves either the old state or the new one. A lock on the file `lock` of the cache excludes concurrent
//! fetches; its holder may remove any partial folder.

use std::fs::{self, File, TryLockError};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{self, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::install::{self, State};
use crate::pins::{self, Contents, Pin};
use crate::pip_log;
use crate::progress::{Progress, megabytes};
use crate::python::{PYTHON, Preflight, UNPACK, UNPACK_DISK_FULL};

/// Fetches wheels into `place`, a folder below the cache `root`, unless another process does so meanwhile.
pub(crate) fn fetch(root: &Path, place: &Path, contents: &Contents<'_>) -> Result<()> {
    fs::create_dir_all(root).with_context(|| format!("cannot create {}", root.display()))?;
    let lock = lock(root, contents)?;
    match install::state(place, contents)? {
        State::Ready => return Ok(()),
        State::Absent => {}
        State::Stale(reason) => eprintln!("{} is fetched again: {reason}", place.display()),
    }
    remove_leftovers(root)?;
    check_python(root, contents)?;
    let download: u64 = contents.wheels.iter().map(|pin| pin.download_bytes).sum();
    let installed: u64 = contents.wheels.iter().map(|pin| pin.installed_bytes).sum();
    eprintln!(
        "fetching {} into {}: {} to download, {} on disk",
        contents.name,
        root.display(),
        megabytes(download),
        megabytes(installed)
    );

    let partial = Partial::create(root)?;
    let result = partial.fill(contents, &lock).and_then(|()| {
        install::write_stamp(&partial.tree(), contents)?;
        partial.move_into_place(place)
    });
    // Also after a failure: the file has half a gigabyte. If it cannot be removed now, the next fetch removes it.
    let _ = fs::remove_dir_all(&partial.folder);
    result
}

/// Waits until no other process fetches into this cache.
fn lock(root: &Path, contents: &Contents<'_>) -> Result<File> {
    let path = root.join("lock");
    let open = File::options().create(true).write(true).read(true).truncate(false).open(&path);
    let lock = open.with_context(|| format!("cannot open {}", path.display()))?;
    match lock.try_lock() {
        Ok(()) => return Ok(lock),
        Err(TryLockError::WouldBlock) => {
            eprintln!("waiting for another process that fetches {}", contents.product);
        }
        Err(TryLockError::Error(error)) => {
            return Err(error).with_context(|| format!("cannot lock {}", path.display()));
        }
    }
    lock.lock().with_context(|| format!("cannot lock {}", path.display()))?;
    Ok(lock)
}

fn check_python(root: &Path, contents: &Contents<'_>) -> Result<()> {
    let preflight = Preflight::of(root, contents)?;
    let Contents { product, instead, .. } = contents;
    if preflight.pip.is_none() {
        bail!(
            "{} has no pip, which fetches {product}: install it (on Debian and Ubuntu: \
             apt install python3-pip){instead}",
            preflight.executable
        );
    }
    // The C library of the system, not of this program, which may be linked with musl and runs on any.
    let Some(glibc) = preflight.glibc else {
        bail!(
            "this system's C library is not glibc, which the {product} that is fetched needs: use another \
             system{instead}"
        );
    };
    let needed = contents.wheels.iter().filter_map(|pin| pin.glibc()).max();
    if let Some((major, minor)) = needed.filter(|needed| glibc < *needed) {
        bail!(
            "this system's C library is older than glibc {major}.{minor}, which {product} needs: use a newer \
             system{instead}"
        );
    }
    let needed = pins::peak_bytes(&contents.wheels);
    if preflight.free_bytes < needed {
        bail!(
            "fetching {product} needs {} of free disk, and {} has {}: make room and run this again",
            megabytes(needed),
            root.display(),
            megabytes(preflight.free_bytes)
        );
    }
    Ok(())
}

fn remove_leftovers(root: &Path) -> Result<()> {
    for entry in fs::read_dir(root).with_context(|| format!("cannot read {}", root.display()))? {
        let entry = entry.with_context(|| format!("cannot read {}", root.display()))?;
        if entry.file_name().to_string_lossy().starts_with(PARTIAL) {
            fs::remove_dir_all(entry.path())
                .with_context(|| format!("cannot remove {}", entry.path().display()))?;
        }
    }
    Ok(())
}

/// Folder in which an installation is built.
struct Partial {
    folder: PathBuf,
}

impl Partial {
    fn create(root: &Path) -> Result<Self> {
        let folder = root.join(format!("{PARTIAL}{}", process::id()));
        let partial = Self { folder };
        for folder in [partial.tree(), partial.wheels(), partial.temporary()] {
            fs::create_dir_all(&folder)
                .with_context(|| format!("cannot create {}", folder.display()))?;
        }
        Ok(partial)
    }

    fn tree(&self) -> PathBuf {
        self.folder.join("tree")
    }

    fn wheels(&self) -> PathBuf {
        self.folder.join("wheels")
    }

    /// Folder of pip's temporary files: on the same disk as the rest, and removed with it.
    fn temporary(&self) -> PathBuf {
        self.folder.join("temporary")
    }

    fn fill(&self, contents: &Contents<'_>, lock: &File) -> Result<()> {
        for pin in &contents.wheels {
            let wheel = self.download(pin, contents, lock)?;
            self.unpack(pin, &wheel, lock)?;
            fs::remove_file(&wheel)
                .with_context(|| format!("cannot remove {}", wheel.display()))?;
        }
        // The wheel's libtorch.so is an empty library that needs libtorch_cuda.so. Without CUDA a
        // linker script under its name serves programs that link with `-ltorch`.
        let libtorch = self.tree().join("torch/lib/libtorch.so");
        if self.tree().join("torch/lib").is_dir() && !libtorch.exists() {
            fs::write(&libtorch, "INPUT(libtorch_cpu.so)\n")
                .with_context(|| format!("cannot write {}", libtorch.display()))?;
        }
        Ok(())
    }

    /// Downloads one wheel with pip and verifies its checksum.
    ///
    /// One call of pip per wheel costs half a second each, but only one wheel at a time is on the disk.
    fn download(&self, pin: &Pin, contents: &Contents<'_>, lock: &File) -> Result<PathBuf> {
        let requirements = self.folder.join("requirements.txt");
        let line = format!("{} --hash=sha256:{}\n", pin.requirement(), pin.sha256);
        fs::write(&requirements, line)
            .with_context(|| format!("cannot write {}", requirements.display()))?;
        let log_path = self.folder.join("pip.log");
        let log = File::create(&log_path)
            .with_context(|| format!("cannot write {}", log_path.display()))?;

        let mut pip = Command::new(PYTHON);
        pip.args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"])
            // A cache would need the same space again, for wheels that are fetched once.
            .args(["--no-cache-dir", "--no-input", "--disable-pip-version-check"])
            // Verbose: otherwise pip does not always report that there was no connection.
            .args(["-vv", "--progress-bar", "off", "--implementation", "cp"])
            .args(["--python-version", contents.python])
            .args(["--abi", &format!("cp{}", contents.python)])
            .args(["--platform", &pin.platform])
            .arg("-r")
            .arg(&requirements)
            .arg("-d")
            .arg(self.wheels())
            .current_dir(&self.folder)
            .env("TMPDIR", self.temporary())
            .env("PYTHONUNBUFFERED", "1")
            .stdin(keep_locked(lock)?)
            .stdout(log.try_clone().context("cannot share pip's log")?)
            .stderr(log);
        let mut child = pip.spawn().with_context(|| format!("cannot start {PYTHON}"))?;

        let mut progress = Progress::new(&format!("download {}", pin.package), pin.download_bytes);
        let status = loop {
            if let Some(status) = child.try_wait().context("cannot wait for pip")? {
                break status;
            }
            progress.set(folder_bytes(&self.temporary()).max(folder_bytes(&self.wheels())));
            thread::sleep(Duration::from_millis(100));
        };
        progress.finish();
        if !status.success() {
            let log = fs::read(&log_path).unwrap_or_default();
            bail!(pip_log::explain(&String::from_utf8_lossy(&log), pin, contents.instead));
        }
        let downloaded = fs::read_dir(self.wheels()).ok().and_then(|mut entries| entries.next());
        match downloaded {
            Some(Ok(entry)) => Ok(entry.path()),
            _ => bail!("{}: pip succeeded, but there is no wheel", pin.requirement()),
        }
    }

    fn unpack(&self, pin: &Pin, wheel: &Path, lock: &File) -> Result<()> {
        let patterns = serde_json::to_string(&pin.keep)?;
        let mut child = Command::new(PYTHON)
            .args(["-c", UNPACK])
            .arg(wheel)
            .arg(self.tree())
            .arg(patterns)
            .current_dir(&self.folder)
            .stdin(keep_locked(lock)?)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {PYTHON}"))?;
        let mut progress = Progress::new(&format!("unpack {}", pin.package), pin.installed_bytes);
        if let Some(output) = child.stdout.take() {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                progress.set(line.parse().unwrap_or(0));
            }
        }
        // Standard error is one line, which fits the pipe, so reading it last cannot block.
        let output = child.wait_with_output().context("cannot wait for python3")?;
        progress.finish();
        if output.status.success() {
            return Ok(());
        }
        if output.status.code() == Some(UNPACK_DISK_FULL) {
            bail!(pip_log::disk_full(&pin.requirement()));
        }
        let text = String::from_utf8_lossy(&output.stderr);
        let reason = text.lines().last().unwrap_or("no output");
        bail!("{}: cannot unpack its wheel ({}): {reason}", pin.requirement(), output.status)
    }

    fn move_into_place(&self, place: &Path) -> Result<()> {
        if fs::symlink_metadata(place).is_ok() {
            fs::rename(place, self.folder.join("replaced"))
                .with_context(|| format!("cannot move the old {} away", place.display()))?;
        }
        if let Some(parent) = place.parent() {
            fs::create_dir_all(parent)
                .with_context(|| format!("cannot create {}", parent.display()))?;
        }
        fs::rename(self.tree(), place)
            .with_context(|| format!("cannot move the new {} into place", place.display()))
    }
}

/// Passes the lock as a child's standard input: it is held until the child ends, so a child that outlives a killed
/// fetch never writes into a folder that the next fetch removes.
fn keep_locked(lock: &File) -> Result<Stdio> {
    Ok(lock.try_clone().context("cannot share the cache's lock")?.into())
}

/// Returns the size of all files in a folder to which another process writes.
fn folder_bytes(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => folder_bytes(&entry.path()),
            Ok(metadata) => metadata.len(),
            Err(_) => 0,
        })
        .sum()
}

const PARTIAL: &str = "partial-";
