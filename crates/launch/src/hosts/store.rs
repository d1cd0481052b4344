//! Store of files that were copied to this host, each in a folder named by its digest, or by the digest of all files
//! that belong together: `~/.cache/brigade/sync/DIGEST/NAME`.
//!
//! A file with its final name is complete, even after a power failure. Only its owner may use it. Later jobs that need
//! the same contents use it again, and it is removed after a month without use; a running job keeps the files that it
//! uses ([`keep`]).

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};

use nix::sys::signal::{SigSet, SigmaskHow};
use sha2::{Digest, Sha256};

use super::digest;
use super::message::FileMark;

/// File that is being received. An incomplete one is removed when this value is dropped.
pub(crate) struct Store {
    mark: FileMark,
    file: File,
    hasher: Sha256,
    received: u64,
    unfinished: PathBuf,
    place: PathBuf,
}

impl Store {
    /// Returns the places of the files on this host: at the same path with the same contents, or in the store. The
    /// files of a Python program must lie `together`.
    pub(crate) fn find(files: &[FileMark], together: bool) -> Vec<Option<OsString>> {
        let same: Vec<_> = files.iter().map(same_place).collect();
        if together && same.contains(&None) {
            return files.iter().map(stored).collect();
        }
        same.into_iter().zip(files).map(|(same, file)| same.or_else(|| stored(file))).collect()
    }

    /// Begins to receive a file. The error is a message of one line.
    pub(crate) fn begin(mark: FileMark) -> Result<Self, String> {
        let root = folder()?;
        sweep(&root);
        let own_folder = bundle_folder(&root, &mark)
            .ok_or_else(|| format!("{} is not the name of a copied file", mark.name.display()))?;
        let place = own_folder.join(&mark.name);
        // The home folder may be shared: another host's agent may be receiving the same file.
        let host = nix::unistd::gethostname().unwrap_or_default();
        let part = format!("{}.{}.{}", mark.name.display(), host.display(), std::process::id());
        let unfinished = own_folder.join(part);
        let failed =
            |error: std::io::Error| format!("cannot write {}: {error}", unfinished.display());
        let folder = place.parent().unwrap_or(&own_folder);
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
        let file = File::create(&unfinished).map_err(failed)?;
        let hasher = Sha256::new();
        Ok(Self { mark, file, hasher, received: 0, unfinished, place })
    }

    /// Appends the next part, which is empty for an empty file. Returns the file's place when it is complete. The error
    /// is a message of one line.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<Option<OsString>, String> {
        self.file
            .write_all(bytes)
            .map_err(|error| format!("cannot write {}: {error}", self.unfinished.display()))?;
        self.hasher.update(bytes);
        self.received += bytes.len() as u64;
        if self.received < self.mark.size {
            return Ok(None);
        }
        self.finish().map(Some)
    }

    fn finish(&mut self) -> Result<OsString, String> {
        let digest = digest::hex(&self.hasher.clone().finalize());
        if digest != self.mark.digest || self.received != self.mark.size {
            return Err(format!(
                "{} did not arrive as it was sent; try again",
                self.mark.name.display()
            ));
        }
        self.file
            .set_permissions(Permissions::from_mode(0o700))
            .and_then(|()| self.file.sync_all())
            .and_then(|()| fs::rename(&self.unfinished, &self.place))
            .map_err(|error| format!("cannot write {}: {error}", self.place.display()))?;
        Ok(self.place.clone().into())
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // Fails for a file that has its final name.
        let _ = fs::remove_file(&self.unfinished);
    }
}

/// Returns the file's own path, if this host has the same file there.
fn same_place(mark: &FileMark) -> Option<OsString> {
    let same = Path::new(&mark.path);
    let size = same.metadata().ok().filter(fs::Metadata::is_file).map(|it| it.len());
    // The size first: it costs nothing, and a library of torch has half a gigabyte.
    let is_same =
        size == Some(mark.size) && digest::of_file(same).is_ok_and(|it| it == mark.digest);
    is_same.then(|| mark.path.clone())
}

/// Returns the path of the copy of an earlier job.
fn stored(mark: &FileMark) -> Option<OsString> {
    let stored = bundle_folder(&folder().ok()?, mark)?.join(&mark.name);
    let file = File::open(&stored).ok()?;
    if file.metadata().ok()?.len() != mark.size {
        return None;
    }
    // The time of modification records the last use.
    let _ = file.set_modified(SystemTime::now());
    Some(stored.into())
}

/// Returns the folder of a file's bundle, or `None` if one of its names would lead out of the root.
fn bundle_folder(root: &Path, mark: &FileMark) -> Option<PathBuf> {
    let is_inside = |path: &Path| {
        path.components().next().is_some()
            && path.components().all(|part| matches!(part, Component::Normal(_)))
    };
    let bundle_digest = Path::new(&mark.bundle_digest);
    (is_inside(bundle_digest) && is_inside(Path::new(&mark.name))).then(|| root.join(bundle_digest))
}

/// Returns the folder in the user's cache; the shell command that starts agents uses the same one.
fn folder() -> Result<PathBuf, String> {
    let cache = std::env::var_os("XDG_CACHE_HOME").filter(|it| !it.is_empty()).map(PathBuf::from);
    let cache = cache.or_else(|| Some(std::env::home_dir()?.join(".cache")));
    cache.map(|it| it.join("brigade/sync")).ok_or_else(|| "this user has no home folder".to_owned())
}

/// Marks the copies that these files belong to as used: now, and once a day while this process runs, which may be
/// longer than unused copies are kept. The home folder may be shared, so another host's agent could remove them. Files
/// elsewhere are not touched.
pub(crate) fn keep(files: &[PathBuf]) {
    let Ok(root) = folder() else { return };
    let folders: Vec<PathBuf> =
        files.iter().filter_map(|file| bundle_folder_of(&root, file)).collect();
    if folders.is_empty() {
        return;
    }
    // Only the agent's own thread waits for signals.
    let Ok(before) = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK) else { return };
    // Without a thread, the files are kept for a month.
    let _ = thread::Builder::new().name("copies".to_owned()).spawn(move || {
        loop {
            folders.iter().for_each(|folder| mark_used(folder));
            thread::sleep(DAY);
        }
    });
    let _ = before.thread_set_mask();
}

/// Returns the folder of a file's bundle, if the file is a copy.
fn bundle_folder_of(root: &Path, file: &Path) -> Option<PathBuf> {
    let first = file.strip_prefix(root).ok()?.components().next()?;
    Some(root.join(first))
}

fn mark_used(path: &Path) {
    let Ok(entries) = fs::read_dir(path) else { return };
    for entry in entries.filter_map(Result::ok) {
        if entry.file_type().is_ok_and(|it| it.is_dir()) {
            mark_used(&entry.path());
        } else if let Ok(file) = File::open(entry.path()) {
            let _ = file.set_modified(SystemTime::now());
        }
    }
}

/// Removes the copies that have not been used for a month.
fn sweep(root: &Path) {
    let Ok(folders) = fs::read_dir(root) else { return };
    for folder in folders.filter_map(Result::ok) {
        sweep_folder(&folder.path());
    }
}

/// Removes unused copies below a folder. Returns `true` if something was removed.
fn sweep_folder(folder: &Path) -> bool {
    let Ok(entries) = fs::read_dir(folder) else { return false };
    let mut removed = false;
    for entry in entries.filter_map(Result::ok) {
        if entry.file_type().is_ok_and(|it| it.is_dir()) {
            removed |= sweep_folder(&entry.path());
            continue;
        }
        let unused = entry.metadata().and_then(|it| it.modified()).ok();
        if unused.and_then(|it| it.elapsed().ok()).is_some_and(|it| it > UNUSED) {
            removed |= fs::remove_file(entry.path()).is_ok();
        }
    }
    // Another agent may just have created an empty folder. Fails for a folder that has files.
    if removed {
        let _ = fs::remove_dir(folder);
    }
    removed
}

const DAY: Duration = Duration::from_secs(24 * 3600);
const UNUSED: Duration = Duration::from_secs(30 * 24 * 3600);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_inside() {
        let of = |bundle_digest: &str, name: &str| {
            let mark = FileMark {
                path: "/a".into(),
                name: name.into(),
                digest: "00".to_owned(),
                size: 0,
                bundle_digest: bundle_digest.to_owned(),
            };
            bundle_folder(Path::new("/cache"), &mark)
        };
        assert_eq!(of("00", "lib/part.py"), Some("/cache/00".into()));
        for (bundle_digest, name) in
            [("..", "a"), ("/etc", "a"), ("", "a"), ("0", "../a"), ("0", "/a")]
        {
            assert_eq!(of(bundle_digest, name), None, "{bundle_digest} {name}");
        }
    }

    #[test]
    fn what_is_old_goes() {
        let folder = tempfile::tempdir().unwrap();
        let write = |place: &str, age: Duration| {
            let path = folder.path().join(place);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let file = File::create(&path).unwrap();
            file.set_modified(SystemTime::now() - age).unwrap();
            path
        };
        let month = UNUSED + Duration::from_secs(60);
        let (old, new) = (write("0/lib/deep/a.py", month), write("1/lib/a.py", Duration::ZERO));
        let beside = write("1/b.py", month);
        let kept = write("2/lib/deep/a.py", month);
        let root = folder.path();
        for (file, expected) in [
            (kept.as_path(), Some(root.join("2"))),
            (Path::new("/usr/bin/true"), None),
            (root, None),
        ] {
            assert_eq!(bundle_folder_of(root, file), expected);
            expected.iter().for_each(|folder| mark_used(folder));
        }
        sweep(folder.path());
        assert!(kept.exists(), "a job uses it");
        assert!(!old.exists() && !folder.path().join("0").exists());
        assert!(new.exists() && !beside.exists());
    }
}
