//! Python scripts and modules.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

use super::{Invocation, ProgramError, Search};
use brigade_ssh::ExecutableError;
use brigade_ssh::executable::{self, Kind, kind_of};

pub(super) fn is_script(name: &OsStr) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "py")
}

/// Returns `true` for a Python interpreter by its name, and for a script with an interpreter line.
pub(super) fn is_interpreter(file: &Path) -> bool {
    let is_script = || {
        let mut start = [0; 2];
        let read = File::open(file).and_then(|mut it| it.read_exact(&mut start));
        read.is_ok() && start == *b"#!"
    };
    is_named_so(file) || is_script()
}

pub(super) fn is_named_so(file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().as_bytes();
    [b"python".as_slice(), b"pypy"].iter().any(|it| name.starts_with(it))
}

/// Returns the invocation of a script. `None` if no such file exists, but `PATH` may have a program of that name.
pub(super) fn script(name: &OsStr, search: Search<'_>) -> Result<Option<Invocation>, ProgramError> {
    let file = Path::new(name);
    match kind_of(file) {
        Kind::Directory => Err(ExecutableError::Directory { path: file.to_owned() }.into()),
        Kind::Nothing if name.as_bytes().contains(&b'/') => {
            Err(ExecutableError::NotFound { name: name.to_owned(), hint: String::new() }.into())
        }
        Kind::Nothing => match executable::find(name, search.path) {
            Err(ExecutableError::NotFound { name, .. }) => {
                let hint = " in this folder or in PATH".to_owned();
                Err(ExecutableError::NotFound { name, hint }.into())
            }
            _ => Ok(None),
        },
        Kind::Program | Kind::Locked if access(file, AccessFlags::R_OK).is_err() => {
            Err(ProgramError::NotReadable { path: file.to_owned() })
        }
        Kind::Program | Kind::Locked => python([name.to_owned()], search).map(Some),
    }
}

/// Returns the invocation of a module. It is not checked, because only Python itself can determine its search path.
pub(super) fn module(name: &OsStr, search: Search<'_>) -> Result<Invocation, ProgramError> {
    if name.is_empty() {
        let hint = ": -m needs the name of a Python module".to_owned();
        return Err(ExecutableError::NotFound { name: name.to_owned(), hint }.into());
    }
    python(["-m".into(), name.to_owned()], search)
}

/// Does the same as [`module`] with a folder that comes before the current one in Python's search path. `PYTHONPATH`
/// would come after it, and the option that leaves the current one out exists since Python 3.11 only.
pub(super) fn module_in(
    name: &OsStr,
    folder: &Path,
    search: Search<'_>,
) -> Result<Invocation, ProgramError> {
    python(["-c".into(), RUN_MODULE.into(), folder.into(), name.to_owned()], search)
}

/// Code that runs a module as `-m` does, after removing its own two arguments.
const RUN_MODULE: &str = "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); \
                          runpy.run_module(sys.argv.pop(1), None, '__main__', True)";

/// Returns an invocation with unbuffered output, as torchrun does: lines are shown when they are printed, and none is
/// lost when the rank is killed.
fn python(
    what: impl IntoIterator<Item = OsString>,
    search: Search<'_>,
) -> Result<Invocation, ProgramError> {
    let (file, name) = interpreter(search)?;
    let args = std::iter::once("-u".into()).chain(what).collect();
    Ok(Invocation { file, name, args })
}

/// Returns the interpreter: `PYTHON_EXEC`, else that of the active virtual environment (`VIRTUAL_ENV`), else that of
/// the environment in which this program is installed, else the first of `python3` and `python` in `PATH`.
pub(super) fn interpreter(search: Search<'_>) -> Result<(PathBuf, OsString), ProgramError> {
    if let Some(named) = search.python.filter(|named| !named.is_empty()) {
        let file = executable::find(named, search.path)
            .map_err(|error| error.with_hint(": PYTHON_EXEC names it"))?;
        return Ok((file, named.to_owned()));
    }
    let active = search.virtual_env.filter(|folder| !folder.is_empty()).map(Path::new);
    for environment in [active, search.own_environment].into_iter().flatten() {
        for name in NAMES {
            let file = environment.join("bin").join(name);
            if matches!(kind_of(&file), Kind::Program) {
                // Python searches for its environment from the path in its `argv[0]`.
                return Ok((file.clone(), file.into_os_string()));
            }
        }
    }
    NAMES
        .into_iter()
        .find_map(|name| Some((executable::find(name.as_ref(), search.path).ok()?, name.into())))
        .ok_or(ProgramError::NoPython)
}

/// Returns the virtual or Conda environment whose `bin` folder contains the program with this `argv[0]`.
///
/// Symbolic links to the program are not followed: pipx and uv install a tool in an environment of its own, without the
/// modules that the user's script imports, and put a link to it into a folder of `PATH`.
pub(super) fn environment_of(called: &OsStr, path: Option<&OsStr>) -> Option<PathBuf> {
    let file = executable::find(called, path).ok()?;
    let environment = std::path::absolute(file).ok()?.parent()?.parent()?.to_owned();
    let is_one = ["pyvenv.cfg", "conda-meta"].iter().any(|it| environment.join(it).exists());
    is_one.then_some(environment)
}

/// Names of Python's interpreter, in the order in which they are tried.
const NAMES: [&str; 2] = ["python3", "python"];

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::super::Program;
    use super::*;

    fn write(path: &Path, mode: u32) {
        fs::write(path, "#!/bin/sh\n").unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn what_is_python_and_which_python() {
        let folder = tempfile::tempdir().unwrap();
        let (bin, old, none) =
            (folder.path().join("bin"), folder.path().join("old"), folder.path().join("none"));
        for folder in [&bin, &old, &none] {
            fs::create_dir(folder).unwrap();
        }
        write(&bin.join("python3"), 0o755);
        write(&bin.join("python"), 0o755);
        write(&old.join("python"), 0o755);
        write(&bin.join("tool.py"), 0o755);
        let (script, executable) = (folder.path().join("a.py"), folder.path().join("b.py"));
        write(&script, 0o644);
        write(&executable, 0o755);
        fs::create_dir(folder.path().join("d.py")).unwrap();

        let find = |program: Program, path: &Path, python: Option<&Path>| {
            let python = python.map(Path::as_os_str);
            let path = Some(path.as_os_str());
            program.find(Search { path, python, virtual_env: None, own_environment: None })
        };
        let text = |path: &Path| path.as_os_str().to_owned();
        let started = |file: &Path, name: OsString, args: Vec<OsString>| {
            Ok(Invocation { file: file.to_owned(), name, args })
        };
        let auto = |path: &Path| Program::Auto(text(path));

        for script in [&script, &executable] {
            assert_eq!(
                find(auto(script), &bin, None),
                started(&bin.join("python3"), "python3".into(), vec!["-u".into(), text(script)])
            );
        }
        assert_eq!(
            find(auto(&script), &old, None),
            started(&old.join("python"), "python".into(), vec!["-u".into(), text(&script)])
        );
        assert_eq!(
            find(Program::Module("pkg.train".into()), &bin, Some(&old.join("python"))),
            started(
                &old.join("python"),
                text(&old.join("python")),
                vec!["-u".into(), "-m".into(), "pkg.train".into()]
            )
        );
        assert_eq!(
            find(Program::Executable(text(&executable)), &none, None),
            started(&executable, text(&executable), vec![])
        );
        assert_eq!(
            find(Program::Auto("tool.py".into()), &bin, None),
            started(&bin.join("tool.py"), "tool.py".into(), vec![]),
            "a program in PATH and not in this folder"
        );

        let refuse = |program: Program, path: &Path, python: Option<&Path>| {
            find(program, path, python).unwrap_err().to_string()
        };
        assert_eq!(
            refuse(auto(&script), &none, None),
            "no Python interpreter: neither python3 nor python is in PATH; name one in PYTHON_EXEC"
        );
        assert!(
            refuse(auto(&script), &bin, Some(&none.join("python")))
                .ends_with("not found: PYTHON_EXEC names it")
        );
        assert_eq!(
            refuse(Program::Auto("nothing.py".into()), &bin, None),
            "program nothing.py not found in this folder or in PATH"
        );
        assert!(refuse(auto(&folder.path().join("c.py")), &bin, None).ends_with("c.py not found"));
        assert!(refuse(auto(&folder.path().join("d.py")), &bin, None).contains("is a directory"));
        assert!(
            refuse(Program::Executable(text(&script)), &bin, None).contains("is not executable")
        );
        assert!(refuse(Program::Module("".into()), &bin, None).contains("-m needs the name"));
    }

    #[test]
    fn environments_come_before_path_and_after_python_exec() {
        let folder = tempfile::tempdir().unwrap();
        let interpreter_of = |environment: &str, name: &str| {
            let bin = folder.path().join(environment).join("bin");
            fs::create_dir_all(&bin).unwrap();
            write(&bin.join(name), 0o755);
            bin.join(name)
        };
        let active = interpreter_of("active", "python");
        let own = interpreter_of("own", "python3");
        let system = interpreter_of("system", "python3");
        let (active_folder, own_folder) = (folder.path().join("active"), folder.path().join("own"));
        let empty = folder.path().join("empty");
        let bin = folder.path().join("system/bin");
        let found = |python: Option<&Path>, virtual_env: Option<&Path>, own: Option<&Path>| {
            let search = Search {
                path: Some(bin.as_os_str()),
                python: python.map(Path::as_os_str),
                virtual_env: virtual_env.map(Path::as_os_str),
                own_environment: own,
            };
            let (file, name) = interpreter(search).unwrap();
            let by_path = name == "python3";
            assert!(by_path || file == Path::new(&name), "{name:?}, and not where it is");
            file
        };
        assert_eq!(found(Some(&system), Some(&active_folder), Some(&own_folder)), system);
        assert_eq!(found(None, Some(&active_folder), Some(&own_folder)), active);
        assert_eq!(found(None, None, Some(&own_folder)), own);
        assert_eq!(found(None, Some(Path::new("")), Some(&own_folder)), own);
        assert_eq!(found(None, Some(&empty), None), system, "an environment that was removed");
        assert_eq!(found(None, None, None), system);
    }

    #[test]
    fn a_program_belongs_to_the_environment_that_it_is_called_from() {
        let folder = tempfile::tempdir().unwrap();
        let bins = ["venv/bin", "conda/bin", "usr/bin", "links"].map(|it| folder.path().join(it));
        for bin in &bins {
            fs::create_dir_all(bin).unwrap();
        }
        let [venv, conda, usr, links] = &bins;
        fs::write(folder.path().join("venv/pyvenv.cfg"), "").unwrap();
        fs::create_dir(folder.path().join("conda/conda-meta")).unwrap();
        for bin in [venv, conda, usr] {
            write(&bin.join("brigade"), 0o755);
        }
        std::os::unix::fs::symlink(venv.join("brigade"), links.join("brigade")).unwrap();

        let by_name = |bin: &Path| environment_of("brigade".as_ref(), Some(bin.as_os_str()));
        let by_path = |bin: &Path| environment_of(bin.join("brigade").as_os_str(), None);
        for find in [&by_name as &dyn Fn(&Path) -> Option<PathBuf>, &by_path] {
            assert_eq!(find(venv), Some(folder.path().join("venv")));
            assert_eq!(find(conda), Some(folder.path().join("conda")));
            assert_eq!(find(usr), None, "Debian's package beside Debian's Python");
            assert_eq!(find(links), None, "a tool of pipx or uv");
        }
    }
}
