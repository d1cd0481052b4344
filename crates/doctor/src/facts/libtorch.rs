//! Facts about an installation of libtorch: its folder, version and CUDA.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Project, libraries, loader_cache, project};
use brigade_hardware::{Sources, within};

/// Installation of libtorch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Libtorch {
    /// Folder of the libraries.
    pub folder: PathBuf,
    /// Version, such as `2.13.0`. `None` if no file beside the libraries contains it.
    pub version: Option<String>,
    /// Version of CUDA that it was built for. `None` for a CPU build.
    pub cuda: Option<String>,
    /// Rule by which it is found, such as RUNPATH or LD_LIBRARY_PATH.
    pub found_by: String,
}

impl Libtorch {
    /// Returns the major and minor version: 2 and 13 for `2.13.0+cu130`.
    #[must_use]
    pub fn release(&self) -> Option<(u32, u32)> {
        let mut numbers = self.version.as_deref()?.split(['.', '+']);
        Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    }
}

/// Finds libtorch among a program's libraries.
pub(super) fn among(sources: &Sources, libraries: &[libraries::Library]) -> Option<Libtorch> {
    let library = NAMES.iter().find_map(|name| libraries.iter().find(|it| it.name == *name))?;
    let folder = library.path.parent()?;
    Some(read(sources, folder, library.found_by))
}

/// Finds the libtorch in the PyTorch package that a Python script would import.
pub(super) fn of_python(sources: &Sources) -> Option<Libtorch> {
    let environment = |name| sources.variable(name).map(PathBuf::from);
    let path = sources.variable("PATH").unwrap_or_default();
    let interpreter = std::env::split_paths(path)
        .map(|folder| folder.join("python3"))
        .find(|file| sources.path(file).exists());
    // `bin/python3` of an install leads to its folder; that of a virtual environment does without.
    let install = interpreter.and_then(|file| Some(file.parent()?.parent()?.to_owned()));
    let own = environment("HOME").map(|home| home.join(".local"));
    let prefixes = [environment("VIRTUAL_ENV"), environment("CONDA_PREFIX"), own, install];
    let prefixes = prefixes.into_iter().flatten().chain(["/usr/local".into(), "/usr".into()]);
    let folders = prefixes.flat_map(|prefix| {
        let lib = prefix.join("lib");
        let versions = sources.names(&lib).into_iter().filter(|name| name.starts_with("python3"));
        versions.flat_map(move |version| {
            ["site-packages", "dist-packages"].map(|packages| lib.join(&version).join(packages))
        })
    });
    let mut places = folders.map(|packages| packages.join("torch/lib"));
    let folder = places.find(|folder| sources.path(folder).join(NAMES[0]).exists())?;
    Some(read(sources, &folder, "Python's packages"))
}

/// Search in progress: the folders may be on a file server.
pub(super) struct Pending(JoinHandle<Option<Search>>);

/// Project of the working folder, and the libtorch that was found.
type Search = (Option<Project>, Option<Libtorch>);

/// Starts a search in the places where cargo and programs without a run path look.
pub(super) fn start(sources: &Arc<Sources>, working_folder: &Path) -> Pending {
    let sources = Arc::clone(sources);
    let working_folder = working_folder.to_owned();
    let search = move || {
        let project = project::gather(&sources, &working_folder);
        let given =
            sources.variable("LIBTORCH").map(|it| (PathBuf::from(it).join("lib"), "LIBTORCH"));
        let configured = project.as_ref().and_then(|it| it.libtorch.as_ref());
        let configured = configured.map(|it| (it.join("lib"), ".cargo/libtorch.toml"));
        let listed = sources.variable("LD_LIBRARY_PATH").unwrap_or_default().split(':');
        let listed = listed.filter(|it| !it.is_empty()).map(|it| (it.into(), "LD_LIBRARY_PATH"));
        let cache = loader_cache::read(&sources);
        let cached = NAMES.iter().filter_map(|name| cache.get(*name)?.first()?.parent());
        let cached = cached.map(|it| (it.to_owned(), "the loader's cache"));
        let mut folders = given.into_iter().chain(configured).chain(listed).chain(cached);
        let found = folders.find(|(folder, _)| sources.path(folder).join(NAMES[0]).exists());
        let libtorch = found.map(|(folder, found_by)| read(&sources, &folder, found_by));
        (project, libtorch)
    };
    Pending(std::thread::spawn(move || within(TIMEOUT, search)))
}

impl Pending {
    pub(super) fn wait(self) -> Search {
        self.0.join().ok().flatten().unwrap_or_default()
    }
}

/// Reads the version: the zip file has `build-version` above the libraries, the Python package `version.py`.
fn read(sources: &Sources, folder: &Path, found_by: &str) -> Libtorch {
    let above = folder.parent().unwrap_or(folder);
    let module = sources.read(above.join("version.py")).unwrap_or_default();
    let version =
        sources.value(above.join("build-version")).or_else(|| assigned(&module, "__version__"));
    let has_cuda = sources.path(folder).join("libtorch_cuda.so").exists();
    let cuda = assigned(&module, "cuda").or_else(|| cuda_of(version.as_deref()?));
    Libtorch {
        folder: folder.to_owned(),
        // A Python package for CUDA that was reduced to its CPU libraries still names CUDA in its version.
        cuda: if has_cuda { Some(cuda.unwrap_or_else(|| "?".to_owned())) } else { None },
        version,
        found_by: found_by.to_owned(),
    }
}

/// Returns the text of `NAME = 'text'` or `NAME: Type = 'text'`.
fn assigned(module: &str, name: &str) -> Option<String> {
    module.lines().find_map(|line| {
        let rest = line.strip_prefix(name)?;
        let (between, value) = rest.split_once('=')?;
        if !(between.trim().is_empty() || between.starts_with(':')) {
            return None;
        }
        let value = value.trim();
        let text = value.strip_prefix(['\'', '"'])?.strip_suffix(['\'', '"'])?;
        Some(text.to_owned())
    })
}

/// Returns the version of CUDA: 12.8 for `2.12.0+cu128`.
fn cuda_of(version: &str) -> Option<String> {
    let digits = version.split_once("+cu")?.1;
    let (major, minor) = digits.split_at_checked(digits.len().checked_sub(1)?)?;
    Some(format!("{major}.{minor}"))
}

/// Libraries of libtorch, the most reliable first: `libtorch.so` may be missing or a linker script.
const NAMES: &[&str] = &["libtorch_cpu.so", "libtorch.so", "libc10.so"];
const TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn find(sources: &Sources) -> Option<Libtorch> {
        start(&Arc::new(sources.clone()), Path::new("/")).wait().1
    }

    fn install(files: &[(&str, &str)]) -> (tempfile::TempDir, Libtorch) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join("opt/torch").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let found = read(&Sources::under(root.path()), Path::new("/opt/torch/lib"), "RUNPATH");
        (root, found)
    }

    #[test]
    fn versions() {
        let module = "from typing import Optional\n\n__all__ = ['__version__', 'cuda']\n\
                      __version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n";
        for (files, version, cuda) in [
            (vec![("build-version", "2.12.1+cpu\n")], Some("2.12.1+cpu"), None),
            (
                vec![("build-version", "2.12.0+cu128\n"), ("lib/libtorch_cuda.so", "")],
                Some("2.12.0+cu128"),
                Some("12.8"),
            ),
            (
                vec![("version.py", module), ("lib/libtorch_cuda.so", "")],
                Some("2.13.0+cu130"),
                Some("13.0"),
            ),
            (vec![("version.py", module)], Some("2.13.0+cu130"), None),
            (vec![("lib/libtorch_cuda.so", "")], None, Some("?")),
        ] {
            let (_root, found) = install(&files);
            assert_eq!((found.version.as_deref(), found.cuda.as_deref()), (version, cuda));
        }
    }

    #[test]
    fn releases() {
        for (version, expected) in [
            (Some("2.13.0+cu130"), Some((2, 13))),
            (Some("2.11"), Some((2, 11))),
            (Some("nightly"), None),
            (None, None),
        ] {
            let libtorch = Libtorch { version: version.map(str::to_owned), ..Libtorch::default() };
            assert_eq!(libtorch.release(), expected);
        }
    }

    #[test]
    fn pythons_package() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let sources = Sources::under(root.path()).with_variable("PATH", "/bin:/opt/py/bin");
        assert_eq!(of_python(&sources), None);
        write("usr/lib/python3/dist-packages/torch/lib/libtorch_cpu.so", "");
        write("usr/lib/python3/dist-packages/torch/version.py", "__version__ = '2.11.0'\n");
        assert_eq!(of_python(&sources).unwrap().release(), Some((2, 11)));
        write("opt/py/bin/python3", "");
        write("opt/py/lib/python3.12/site-packages/torch/lib/libtorch_cpu.so", "");
        write("opt/py/lib/python3.12/site-packages/torch/version.py", "__version__ = '2.12.0'\n");
        assert_eq!(of_python(&sources).unwrap().release(), Some((2, 12)));
        write("venv/lib/python3.11/site-packages/torch/lib/libtorch_cpu.so", "");
        write("venv/lib/python3.11/site-packages/torch/version.py", "__version__ = '2.13.0'\n");
        let found = of_python(&sources.with_variable("VIRTUAL_ENV", "/venv")).unwrap();
        assert_eq!(
            (found.release(), found.found_by.as_str()),
            (Some((2, 13)), "Python's packages")
        );
    }

    #[test]
    fn without_a_program_the_variables_tell() {
        let (root, _) = install(&[("build-version", "2.13.0\n"), ("lib/libtorch_cpu.so", "")]);
        assert_eq!(find(&Sources::under(root.path())), None);
        let with =
            Sources::under(root.path()).with_variable("LD_LIBRARY_PATH", "/x:/opt/torch/lib");
        let found = find(&with).unwrap();
        assert_eq!((found.release(), found.found_by.as_str()), (Some((2, 13)), "LD_LIBRARY_PATH"));
        // Cargo's configuration takes precedence over it, and the user's variable over all.
        let project = root.path().join("app");
        fs::create_dir_all(project.join(".cargo")).unwrap();
        fs::write(project.join("Cargo.toml"), "").unwrap();
        let text = "[env]\nLIBTORCH = \"/opt/torch\"\n";
        fs::write(project.join(".cargo/libtorch.toml"), text).unwrap();
        let here = start(&Arc::new(with.clone()), Path::new("/app")).wait().1.unwrap();
        assert_eq!(here.found_by, ".cargo/libtorch.toml");
        let with = with.with_variable("LIBTORCH", "/opt/torch");
        assert_eq!(find(&with).unwrap().found_by, "LIBTORCH");
    }
}
