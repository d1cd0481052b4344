//! Facts about other installations of Brigade on a host, found without a network.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Build;
use brigade_hardware::{Sources, within};

/// Installation of Brigade besides the running program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Installed {
    /// Form of the installation.
    pub kind: InstalledAs,
    /// Version of Brigade.
    pub version: String,
    /// Path of the program, of the environment's folder, or of the lock file.
    pub path: PathBuf,
}

/// Form of an installation of Brigade.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InstalledAs {
    /// A program `brigade` in a folder of `PATH`.
    #[default]
    Program,
    /// The Python package `brigade` in the active virtual or Conda environment.
    Wheel,
    /// The crate `brigade` in the lock file of the working folder's Cargo project.
    Crate,
}

/// Search in progress: folders may be on a file server, and other programs are started.
pub(super) struct Pending(JoinHandle<Option<Vec<Installed>>>);

pub(super) fn start(sources: &Arc<Sources>, working_folder: &Path) -> Pending {
    let sources = Arc::clone(sources);
    let working_folder = working_folder.to_owned();
    let search = move || gather(&sources, &working_folder, &Build::this().path);
    Pending(std::thread::spawn(move || within(TIMEOUT, search)))
}

impl Pending {
    pub(super) fn wait(self) -> Vec<Installed> {
        self.0.join().ok().flatten().unwrap_or_default()
    }
}

/// Finds all installations except for the running program.
fn gather(sources: &Sources, working_folder: &Path, running: &Path) -> Vec<Installed> {
    let mut found = programs(sources, running);
    // The wheel's program is in the environment, and counts once.
    let wheel = wheel(sources).filter(|wheel| {
        let is_own = |program: &Path| program.starts_with(wheel.path.join("bin"));
        !is_own(running) && !found.iter().any(|it| is_own(&it.path))
    });
    found.extend(wheel);
    found.extend(locked(sources, working_folder));
    found
}

/// Asks each `brigade` of `PATH` for its version. One that prints another name is a different program.
fn programs(sources: &Sources, running: &Path) -> Vec<Installed> {
    let mut known: Vec<PathBuf> = running.canonicalize().into_iter().collect();
    let mut programs = Vec::new();
    for folder in std::env::split_paths(sources.variable("PATH").unwrap_or_default()) {
        let path = folder.join("brigade");
        let Ok(file) = sources.path(&path).canonicalize() else { continue };
        if !folder.is_absolute() || !file.is_file() || known.contains(&file) {
            continue;
        }
        known.push(file);
        if known.len() > MAX_PROGRAMS {
            break;
        }
        let said = path.to_str().and_then(|path| sources.output(path, &["--version"]));
        let version = said.as_deref().and_then(|said| said.strip_prefix("brigade "));
        if let Some(version) = version.and_then(|it| it.split_whitespace().next()) {
            programs.push(Installed {
                kind: InstalledAs::Program,
                version: version.to_owned(),
                path,
            });
        }
    }
    programs
}

/// Reads the version from the name of the package's folder, such as `brigade-0.2.0.dist-info`.
fn wheel(sources: &Sources) -> Option<Installed> {
    let active = |name| sources.variable(name).map(PathBuf::from);
    let environment = active("VIRTUAL_ENV").or_else(|| active("CONDA_PREFIX"))?;
    let lib = environment.join("lib");
    let packages = sources.names(&lib).into_iter().filter(|name| name.starts_with("python3"));
    let mut names = packages.flat_map(|name| sources.names(lib.join(name).join("site-packages")));
    let version = names.find_map(|name| {
        let version = name.strip_prefix("brigade-")?.strip_suffix(".dist-info")?;
        Some(version.to_owned())
    })?;
    Some(Installed { kind: InstalledAs::Wheel, version, path: environment })
}

/// Reads the version of the crate from the first lock file that is beside a manifest, upwards from the folder.
fn locked(sources: &Sources, folder: &Path) -> Option<Installed> {
    let manifest = |folder: &&Path| sources.path(folder.join("Cargo.toml")).is_file();
    let project = folder.ancestors().find(manifest)?;
    let files = project.ancestors().map(|it| it.join("Cargo.lock"));
    let (path, text) =
        files.filter_map(|path| sources.read(&path).map(|text| (path, text))).next()?;
    let version = locked_version(&text)?;
    Some(Installed { kind: InstalledAs::Crate, version: version.to_owned(), path })
}

/// Returns the version of the crate `brigade` in the text of a lock file; the first one if there are several.
fn locked_version(lock: &str) -> Option<&str> {
    let mut lines = lock.lines();
    lines.find(|line| *line == "name = \"brigade\"")?;
    lines.next()?.strip_prefix("version = \"")?.strip_suffix('"')
}

/// Time for all programs to print their versions.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of different programs, the running one included.
const MAX_PROGRAMS: usize = 8;

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn write(root: &Path, name: &str, text: &str) {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn installed(kind: InstalledAs, version: &str, path: &str) -> Installed {
        Installed { kind, version: version.to_owned(), path: path.into() }
    }

    #[test]
    fn programs_packages_and_projects_are_found_and_the_running_program_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let says = |text: &str| format!("#!/bin/sh\necho '{text}'\n");
        write(root, "usr/bin/brigade", &says("brigade 0.1.0 (commit abc, x86_64)"));
        write(root, "opt/new/brigade", &says("brigade 0.2.0 (commit def, x86_64)"));
        write(root, "opt/other/brigade", &says("a program of the same name, 7.0"));
        write(root, "opt/broken/brigade", "#!/bin/sh\nexit 1\n");
        fs::create_dir_all(root.join("opt/link")).unwrap();
        std::os::unix::fs::symlink("../new/brigade", root.join("opt/link/brigade")).unwrap();
        write(root, "venv/lib/python3.11/site-packages/brigade-0.3.0.dist-info/METADATA", "");
        write(root, "code/app/Cargo.toml", "");
        let lock = "[[package]]\nname = \"brigade-nn\"\nversion = \"9.0.0\"\n\n[[package]]\nname = \"brigade\"\nversion = \"0.4.0\"\n";
        write(root, "code/Cargo.lock", lock);
        let path = "/usr/bin:/opt/new:/opt/link:/opt/other:/opt/broken:/opt/missing:relative:";
        let sources =
            Sources::under(root).with_variable("PATH", path).with_variable("VIRTUAL_ENV", "/venv");
        let found = gather(&sources, Path::new("/code/app/src"), &root.join("usr/bin/brigade"));
        let expected = [
            installed(InstalledAs::Program, "0.2.0", "/opt/new/brigade"),
            installed(InstalledAs::Wheel, "0.3.0", "/venv"),
            installed(InstalledAs::Crate, "0.4.0", "/code/Cargo.lock"),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn the_program_of_an_environment_and_its_package_count_once() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        write(root, "venv/bin/brigade", "#!/bin/sh\necho brigade 0.2.0\n");
        write(root, "venv/lib/python3.11/site-packages/brigade-0.2.0.dist-info/METADATA", "");
        let sources = Sources::under(root)
            .with_variable("PATH", "/venv/bin:/usr/bin")
            .with_variable("VIRTUAL_ENV", "/venv");
        let found = gather(&sources, Path::new("/"), Path::new("/usr/bin/brigade"));
        assert_eq!(found, [installed(InstalledAs::Program, "0.2.0", "/venv/bin/brigade")]);
    }

    #[test]
    fn a_folder_without_a_project_has_no_crate() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "code/Cargo.lock", "");
        assert_eq!(gather(&Sources::under(folder.path()), Path::new("/code"), Path::new("/x")), []);
        assert_eq!(locked_version("[[package]]\nname = \"brigade\"\n"), None);
    }
}
