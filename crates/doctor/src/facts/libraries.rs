//! Search for the files that the dynamic loader would load for a program. The program is not run: it may take minutes
//! to start, or be for another architecture.

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::elf::Elf;
use super::loader_cache;
use brigade_hardware::Sources;

/// Library or symbol version that the dynamic loader would not find.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missing {
    /// Name of the library, or of the symbol version.
    pub what: String,
    /// File that needs it.
    pub needed_by: PathBuf,
    /// Path of the library if it was found but lacks the version.
    pub in_library: Option<PathBuf>,
}

/// Libraries of a program.
#[derive(Debug, Default)]
pub(super) struct Libraries {
    /// Libraries that were found, in the loader's order.
    pub(super) found: Vec<Library>,
    /// Libraries and versions that were not found.
    pub(super) missing: Vec<Missing>,
}

/// Library that the loader would load.
#[derive(Debug)]
pub(super) struct Library {
    pub(super) name: String,
    /// Path on the host.
    pub(super) path: PathBuf,
    /// Rule by which it was found, for messages.
    pub(super) found_by: &'static str,
    elf: Elf,
}

/// Resolves the libraries of a program and of those libraries, breadth first, as the loader does.
pub(super) fn of(sources: &Sources, path: &Path, program: &Elf) -> Libraries {
    let finder = Finder {
        sources,
        cache: loader_cache::read(sources),
        from_environment: sources.variable("LD_LIBRARY_PATH").unwrap_or_default().to_owned(),
        program_rpath: match (&program.rpath, &program.runpath) {
            (Some(rpath), None) => expand(rpath, path),
            _ => Vec::new(),
        },
    };
    let mut libraries = Libraries::default();
    let mut asked = HashMap::new();
    let mut queue = VecDeque::new();
    queue.push_back((path.to_owned(), program.clone()));
    while let Some((path, elf)) = queue.pop_front() {
        for name in &elf.needed {
            if asked.insert(name.clone(), ()).is_some() {
                continue;
            }
            match finder.find(name, &path, &elf) {
                Some(library) => {
                    queue.push_back((library.path.clone(), library.elf.clone()));
                    libraries.found.push(library);
                }
                None => libraries.missing.push(Missing {
                    what: name.clone(),
                    needed_by: path.clone(),
                    in_library: None,
                }),
            }
        }
    }
    let mut all = vec![(path.to_owned(), program)];
    all.extend(libraries.found.iter().map(|it| (it.path.clone(), &it.elf)));
    libraries.missing.extend(missing_versions(&all, &libraries.found));
    libraries
}

/// Finds missing symbol versions: a program built on a newer system needs versions of the C library that an older one
/// lacks.
fn missing_versions(all: &[(PathBuf, &Elf)], found: &[Library]) -> Vec<Missing> {
    let mut missing: Vec<Missing> = Vec::new();
    for (path, elf) in all {
        for (file, versions) in &elf.needed_versions {
            let Some(library) = found.iter().find(|it| it.name == *file) else { continue };
            // A library without versions satisfies all of them.
            if library.elf.versions.is_empty() {
                continue;
            }
            for version in versions.iter().filter(|it| !library.elf.versions.contains(it)) {
                if !missing.iter().any(|it| it.what == *version) {
                    missing.push(Missing {
                        what: version.clone(),
                        needed_by: path.clone(),
                        in_library: Some(library.path.clone()),
                    });
                }
            }
        }
    }
    missing
}

struct Finder<'a> {
    sources: &'a Sources,
    cache: HashMap<String, Vec<PathBuf>>,
    from_environment: String,
    program_rpath: Vec<PathBuf>,
}

impl Finder<'_> {
    /// Searches in the loader's order: RPATH if there is no RUNPATH, LD_LIBRARY_PATH, RUNPATH, the cache, the
    /// system's folders.
    fn find(&self, name: &str, needed_by: &Path, elf: &Elf) -> Option<Library> {
        if name.contains('/') {
            return self.try_file(name, PathBuf::from(name), "its path");
        }
        let in_folders = |folders: Vec<PathBuf>, found_by| {
            folders.into_iter().find_map(|it| self.try_file(name, it.join(name), found_by))
        };
        let rpath = if elf.runpath.is_none() {
            let own = elf.rpath.as_deref().map(|it| expand(it, needed_by)).unwrap_or_default();
            in_folders(own, "RPATH")
                .or_else(|| in_folders(self.program_rpath.clone(), "the program's RPATH"))
        } else {
            None
        };
        let runpath = || {
            let folders = elf.runpath.as_deref().map(|it| expand(it, needed_by));
            in_folders(folders.unwrap_or_default(), "RUNPATH")
        };
        let cached = || {
            let files = self.cache.get(name).into_iter().flatten();
            files.cloned().find_map(|it| self.try_file(name, it, "the loader's cache"))
        };
        let system = || {
            let folders = SYSTEM_FOLDERS.iter().map(PathBuf::from).collect();
            in_folders(folders, "the system's folders")
        };
        rpath
            .or_else(|| in_folders(expand(&self.from_environment, needed_by), "LD_LIBRARY_PATH"))
            .or_else(runpath)
            .or_else(cached)
            .or_else(system)
    }

    /// Skips a file for another architecture, as the loader does.
    fn try_file(&self, name: &str, path: PathBuf, found_by: &'static str) -> Option<Library> {
        let elf = Elf::read(&self.sources.path(&path)).ok()?;
        elf.fits_this_machine().then(|| Library { name: name.to_owned(), path, found_by, elf })
    }
}

/// Splits a colon-separated list of folders; `$ORIGIN` is the folder of the file that contains the list.
fn expand(list: &str, file: &Path) -> Vec<PathBuf> {
    let origin = file.parent().unwrap_or_else(|| Path::new("/")).to_string_lossy();
    let folders = list.split([':', ';']).filter(|it| !it.is_empty());
    folders
        .map(|folder| {
            PathBuf::from(folder.replace("${ORIGIN}", &origin).replace("$ORIGIN", &origin))
        })
        .collect()
}

const SYSTEM_FOLDERS: &[&str] = &["/lib64", "/usr/lib64", "/lib", "/usr/lib"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_expanded() {
        let file = Path::new("/opt/train/bin/train");
        let expected = ["/opt/train/bin/../lib", "/usr/local/lib", "/opt/train/bin"];
        let folders = expand("$ORIGIN/../lib:/usr/local/lib::${ORIGIN}", file);
        assert_eq!(folders, expected.map(PathBuf::from));
    }

    #[test]
    fn this_test_has_all_its_libraries() {
        let path = std::env::current_exe().unwrap();
        let elf = Elf::read(&path).unwrap();
        let libraries = of(&Sources::system(), &path, &elf);
        assert_eq!(libraries.missing, []);
        assert!(libraries.found.iter().any(|it| it.name.starts_with("libc.")));
    }
}
