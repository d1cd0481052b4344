//! Files of a Python program that `--sync` copies: those that it could import from the folder it starts in.
//!
//! For `script.py` these are the script, the modules beside it and the packages beside it; for `-m pkg.part` the
//! package or module of that name below the working folder. Python finds everything else in the installation of the
//! host. The program may import only some of these files; only running it would show which.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::{fs, io};

use sha2::{Digest, Sha256};

use super::bundle::{self, Bundle, Contents};
use super::digest;
use super::error::HostsError;
use super::message::FileMark;

impl Bundle {
    /// Collects a script, and the modules and packages beside it.
    ///
    /// # Errors
    /// The script cannot be read.
    pub(crate) fn of_script(script: &Path) -> Result<Self, HostsError> {
        let script = std::path::absolute(script).map_err(bundle::wrong(script))?;
        let (root, name) = (script.parent().unwrap_or(&script), bundle::name_of(&script));
        let mut walk = Walk { root, places: vec![PathBuf::from(&name)], bytes: 0 };
        walk.bytes += script.metadata().map_err(bundle::wrong(&script))?.len();
        walk.beside(&name).map_err(|error| walk.wrong(&error))?;
        walk.bundle(Contents::Script)
    }

    /// Collects a module and the package that it is part of, if they are below `folder`.
    ///
    /// # Errors
    /// They cannot be read.
    pub(crate) fn of_module(module: &OsStr, folder: &Path) -> Result<Option<Self>, HostsError> {
        let Some(first) = module.to_str().and_then(|it| it.split('.').next()) else {
            return Ok(None);
        };
        let mut walk = Walk { root: folder, places: Vec::new(), bytes: 0 };
        let alone = format!("{first}.py");
        // In Python's order: a package hides a module of the same name.
        if first.is_empty() {
            return Ok(None);
        } else if folder.join(first).is_dir() {
            walk.package(Path::new(first), 0).map_err(|error| walk.wrong(&error))?;
        } else if folder.join(&alone).is_file() {
            walk.add(alone.into()).map_err(|error| walk.wrong(&error))?;
        }
        if walk.places.is_empty() {
            return Ok(None);
        }
        walk.bundle(Contents::Module(module.to_owned())).map(Some)
    }
}

/// Walk over the files below a folder that belong to a program.
struct Walk<'a> {
    root: &'a Path,
    /// Paths relative to the root.
    places: Vec<PathBuf>,
    bytes: u64,
}

impl Walk<'_> {
    /// Adds the modules and packages of the root, except for the script itself. The order is the same everywhere,
    /// because they have one digest together.
    fn beside(&mut self, script: &OsStr) -> io::Result<()> {
        for name in self.entries(Path::new(""))? {
            let (path, place) = (self.root.join(&name), PathBuf::from(&name));
            if path.join("__init__.py").is_file() {
                self.package(&place, 0)?;
            } else if name != script && path.extension() == Some("py".as_ref()) && path.is_file() {
                self.add(place)?;
            }
        }
        Ok(())
    }

    /// Adds all files in a package: there may be data files between its modules.
    fn package(&mut self, place: &Path, depth: usize) -> io::Result<()> {
        // A symbolic link may lead to one of its own parents.
        if depth > DEPTH {
            return Err(io::Error::other(format!("it is more than {DEPTH} folders deep")));
        }
        for name in self.entries(place)? {
            let inner = place.join(&name);
            let path = self.root.join(&inner);
            if path.is_dir() {
                self.package(&inner, depth + 1)?;
            } else if path.is_file() {
                self.add(inner)?;
            }
        }
        Ok(())
    }

    fn entries(&self, place: &Path) -> io::Result<Vec<OsString>> {
        let entries = fs::read_dir(self.root.join(place))?;
        let names = entries.map(|entry| entry.map(|it| it.file_name()));
        let mut names = names.collect::<io::Result<Vec<_>>>()?;
        names.retain(|name| !name.as_encoded_bytes().starts_with(b".") && name != "__pycache__");
        names.sort_unstable();
        Ok(names)
    }

    fn add(&mut self, place: PathBuf) -> io::Result<()> {
        self.bytes += self.root.join(&place).metadata()?.len();
        self.places.push(place);
        if self.places.len() > FILES || self.bytes > BYTES {
            let reason = format!(
                "more than {FILES} files or {} MB: put the program into a separate folder, or into one \
                 that all hosts share and leave --sync out",
                BYTES / 1_000_000
            );
            return Err(io::Error::other(reason));
        }
        Ok(())
    }

    fn bundle(&self, contents: Contents) -> Result<Bundle, HostsError> {
        let mark = |place: &PathBuf| bundle::mark(&self.root.join(place), place.as_os_str());
        let mut files = self.places.iter().map(mark).collect::<Result<Vec<_>, _>>()?;
        let bundle_digest = together(&files);
        for file in &mut files {
            file.bundle_digest.clone_from(&bundle_digest);
        }
        Ok(Bundle { files, contents })
    }

    fn wrong(&self, error: &io::Error) -> HostsError {
        HostsError::Sync {
            what: format!("the Python files in {}", self.root.display()),
            reason: error.to_string(),
        }
    }
}

/// Returns one digest of many files: the files of a program are copied into one folder, without files of other
/// versions.
fn together(files: &[FileMark]) -> String {
    let mut hasher = Sha256::new();
    for file in files {
        let name = file.name.as_encoded_bytes();
        hasher.update((name.len() as u64).to_le_bytes());
        hasher.update(name);
        hasher.update(&file.digest);
    }
    digest::hex(&hasher.finalize())
}

const DEPTH: usize = 32;
const FILES: usize = 2000;
const BYTES: u64 = 100_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for file in files {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, file).unwrap();
        }
        folder
    }

    fn names(bundle: &Bundle) -> Vec<&str> {
        bundle.files.iter().map(|it| it.name.to_str().unwrap()).collect()
    }

    const FILES: [&str; 10] = [
        "train.py",
        "model.py",
        "notes.txt",
        "data/a.py",
        "lib/__init__.py",
        "lib/deep/part.py",
        "lib/table.json",
        "lib/__pycache__/__init__.cpython-313.pyc",
        ".hidden/__init__.py",
        "single.py",
    ];

    #[test]
    fn a_script_and_what_it_can_import() {
        let folder = tree(&FILES);
        let bundle = Bundle::of_script(&folder.path().join("train.py")).unwrap();
        let expected = [
            "train.py",
            "lib/__init__.py",
            "lib/deep/part.py",
            "lib/table.json",
            "model.py",
            "single.py",
        ];
        assert_eq!(names(&bundle), expected);
        assert_eq!(bundle.contents, Contents::Script);
        let bundle_digest = bundle.files[0].bundle_digest.clone();
        assert!(
            bundle.files.iter().all(
                |file| file.bundle_digest == bundle_digest && file.path.len() > file.name.len()
            )
        );
        // The same files have the same path, other files another one.
        assert_eq!(
            Bundle::of_script(&folder.path().join("train.py")).unwrap().files[0].bundle_digest,
            bundle_digest
        );
        fs::write(folder.path().join("model.py"), "new").unwrap();
        let other = Bundle::of_script(&folder.path().join("train.py")).unwrap();
        assert_ne!(other.files[0].bundle_digest, bundle_digest);
        let error = Bundle::of_script(&folder.path().join("none.py")).unwrap_err().to_string();
        assert!(error.contains("none.py: No such file"), "{error}");
    }

    #[test]
    fn a_module_and_its_package() {
        let folder = tree(&FILES);
        let module = |name: &str| Bundle::of_module(name.as_ref(), folder.path()).unwrap();
        let package = module("lib.deep.part").unwrap();
        assert_eq!(names(&package), ["lib/__init__.py", "lib/deep/part.py", "lib/table.json"]);
        assert_eq!(package.contents, Contents::Module("lib.deep.part".into()));
        assert_eq!(names(&module("single").unwrap()), ["single.py"]);
        for none in ["torch.distributed.run", "", ".lib"] {
            assert_eq!(module(none), None, "{none}");
        }
    }

    #[test]
    fn what_is_too_much() {
        let folder = tree(&["train.py", "lib/__init__.py"]);
        std::os::unix::fs::symlink(".", folder.path().join("lib/again")).unwrap();
        let error = Bundle::of_script(&folder.path().join("train.py")).unwrap_err().to_string();
        assert!(error.ends_with("it is more than 32 folders deep"), "{error}");
        fs::remove_file(folder.path().join("lib/again")).unwrap();
        for i in 0..super::FILES {
            fs::write(folder.path().join(format!("m{i}.py")), "").unwrap();
        }
        let error = Bundle::of_script(&folder.path().join("train.py")).unwrap_err().to_string();
        assert!(error.contains("more than 2000 files or 100 MB: put the program"), "{error}");
    }
}
