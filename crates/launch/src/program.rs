//! Program that the ranks run. It is found before any process is started.

mod cargo;
mod macros;
mod python;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use brigade_ssh::{ExecutableError, executable};
use serde::{Deserialize, Serialize};

pub use cargo::{CargoKind, CargoTarget};
pub(crate) use macros::with_local_rank;

/// Program that the ranks run.
///
/// ```
/// use brigade_launch::Program;
/// assert_eq!(Program::from("train.py"), Program::Auto("train.py".into()));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Program {
    /// A Python script if the file's name ends in `.py`, else an executable.
    ///
    /// A script is started as `python -u script.py`, as torchrun does, whether it is executable or
    /// not; its path is relative to the working folder. A program is a path if it has a slash,
    /// else a name that is looked up in `PATH`.
    Auto(OsString),
    /// An executable, whatever its name (`--no-python`).
    Executable(OsString),
    /// A Python module, started as `python -u -m module`.
    Module(OsString),
    /// A Python module that is looked for in this folder before all others, the current one included.
    ModuleIn {
        /// Name of the module, with dots.
        name: OsString,
        /// Folder of the module.
        folder: PathBuf,
    },
    /// A target of a Cargo package, which is built first.
    Cargo(CargoTarget),
}

impl Default for Program {
    fn default() -> Self {
        Self::Auto(OsString::new())
    }
}

impl<T: Into<OsString>> From<T> for Program {
    fn from(name: T) -> Self {
        Self::Auto(name.into())
    }
}

/// Executable file of a program, and the arguments with which it is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invocation {
    /// Path of the file to run. For a Cargo target that is not built yet, its name.
    pub file: PathBuf,
    /// Name of the program: its `argv[0]`.
    pub name: OsString,
    /// Arguments that precede the user's own.
    pub args: Vec<OsString>,
}

/// Inputs of the search for a program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Search<'a> {
    /// The value of `PATH`.
    pub(crate) path: Option<&'a OsStr>,
    /// The value of `PYTHON_EXEC`, torchrun's variable for the interpreter.
    pub(crate) python: Option<&'a OsStr>,
    /// The value of `VIRTUAL_ENV`, which an active virtual environment of Python sets.
    pub(crate) virtual_env: Option<&'a OsStr>,
    /// The Python environment in which this program is installed.
    pub(crate) own_environment: Option<&'a Path>,
}

/// Finds the Python interpreter that runs scripts: the one that `PYTHON_EXEC` names, else that of the active virtual
/// environment (`VIRTUAL_ENV`), else that of the environment in which this program is installed, else `python3` or
/// `python` of `PATH`.
///
/// # Errors
/// There is none, or `PYTHON_EXEC` does not name an executable file.
pub fn find_python() -> Result<PathBuf, ProgramError> {
    python::interpreter(SearchFacts::gather().search()).map(|(file, _)| file)
}

/// Owner of the values of a [`Search`], read from this process.
#[derive(Debug)]
pub(crate) struct SearchFacts {
    path: Option<OsString>,
    python: Option<OsString>,
    virtual_env: Option<OsString>,
    own_environment: Option<PathBuf>,
}

impl SearchFacts {
    /// Reads the environment variables, and the location of this program.
    pub(crate) fn gather() -> Self {
        let var = |name| std::env::var_os(name);
        let own = std::env::args_os().next();
        Self {
            path: var("PATH"),
            python: var("PYTHON_EXEC"),
            virtual_env: var("VIRTUAL_ENV"),
            own_environment: own.and_then(|it| python::environment_of(&it, var("PATH").as_deref())),
        }
    }

    pub(crate) fn search(&self) -> Search<'_> {
        Search {
            path: self.path.as_deref(),
            python: self.python.as_deref(),
            virtual_env: self.virtual_env.as_deref(),
            own_environment: self.own_environment.as_deref(),
        }
    }
}

impl Program {
    /// Returns `true` for a script that Python runs, unless no such file exists and `PATH` has a program of that name.
    pub(crate) fn is_script(&self) -> bool {
        match self {
            Self::Auto(name) => {
                python::is_script(name)
                    && (name.as_encoded_bytes().contains(&b'/') || Path::new(name).is_file())
            }
            _ => false,
        }
    }

    /// Returns `true` if Python runs the program, or may run it, as found on this host: a script of any interpreter may
    /// start a Python. Returns `None` if the program does not exist on this host.
    #[must_use]
    pub fn is_python_here(&self) -> Option<bool> {
        self.find(SearchFacts::gather().search()).ok().map(|it| self.is_python(&it))
    }

    /// Returns `true` if the program is a Python program by its name: a module, a script `*.py`, or a Python
    /// interpreter.
    #[must_use]
    pub fn is_named_as_python(&self) -> bool {
        match self {
            Self::Module(_) | Self::ModuleIn { .. } => true,
            Self::Cargo(_) => false,
            Self::Auto(name) => python::is_script(name) || python::is_named_so(Path::new(name)),
            Self::Executable(name) => python::is_named_so(Path::new(name)),
        }
    }

    /// Does the same as [`Self::is_python_here`] for a program that was found.
    pub(crate) fn is_python(&self, found: &Invocation) -> bool {
        match self {
            Self::Module(_) | Self::ModuleIn { .. } => true,
            Self::Cargo(_) => false,
            Self::Auto(name) | Self::Executable(name) => {
                let is_given_to_python = found.name != *name;
                is_given_to_python || python::is_interpreter(&found.file)
            }
        }
    }

    /// Finds the executable file of the program. Reads file metadata; starts no process.
    pub(crate) fn find(&self, search: Search<'_>) -> Result<Invocation, ProgramError> {
        let plain = |name: &OsStr| {
            let file = executable::find(name, search.path)?;
            Ok(Invocation { file, name: name.to_owned(), args: Vec::new() })
        };
        match self {
            Self::Auto(name) if python::is_script(name) => match python::script(name, search)? {
                Some(invocation) => Ok(invocation),
                None => plain(name),
            },
            Self::Auto(name) | Self::Executable(name) => plain(name),
            Self::Module(name) => python::module(name, search),
            Self::ModuleIn { name, folder } => python::module_in(name, folder, search),
            Self::Cargo(target) => target.find(search),
        }
    }
}

/// Error for a program that cannot be run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProgramError {
    /// The file does not exist, or it cannot be run.
    #[error(transparent)]
    Executable(#[from] ExecutableError),
    /// The permissions of a script do not allow to read it.
    #[error("{} cannot be read: `chmod +r` it", path.display())]
    NotReadable {
        /// Path of the script.
        path: PathBuf,
    },
    /// No Python interpreter was found.
    #[error(
        "no Python interpreter: neither python3 nor python is in PATH; name one in PYTHON_EXEC"
    )]
    NoPython,
    /// `cargo build` failed, and has printed the reason.
    #[error("cargo build ended with {exit_status}: nothing was started")]
    BuildFailed {
        /// Exit status of `cargo build`.
        exit_status: crate::ExitStatus,
    },
    /// `cargo build` could not be run to its end.
    #[error("cannot run cargo build: {reason}")]
    NoBuild {
        /// Reason for the failure.
        reason: String,
    },
    /// `cargo build` succeeded, but did not produce the executable.
    #[error("cargo build wrote no executable of {target}; please file a bug")]
    NothingBuilt {
        /// Target that was built.
        target: String,
    },
    /// No program was given, and no Cargo project was found whose binary could be run.
    #[error("no program was given, and there is no Cargo project here: {reason}; name a program")]
    NoProject {
        /// Error message of Cargo.
        reason: String,
    },
    /// The Cargo project has no binary, or several and none of them is its `default-run`.
    #[error("no program was given, and the Cargo project here has {}", binaries(names))]
    NoDefaultBinary {
        /// Names of the project's binaries.
        names: Vec<String>,
    },
    /// Several packages have a target of that name.
    #[error("several packages have {target}: choose one with --package {}", packages.join(" or --package "))]
    Ambiguous {
        /// Target that was requested.
        target: String,
        /// Names of the packages.
        packages: Vec<String>,
    },
}

fn binaries(names: &[String]) -> String {
    if names.is_empty() {
        "no binary: name a program, or a package with --package".to_owned()
    } else {
        format!("several binaries: choose one with --bin {}", names.join(" or --bin "))
    }
}

impl ProgramError {
    /// Returns the exit code that a shell or cargo gives for this error.
    ///
    /// ```
    /// use brigade_launch::ProgramError;
    /// assert_eq!(ProgramError::NoPython.exit_code(), 127);
    /// ```
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Executable(error) => error.exit_code(),
            Self::NoPython => 127,
            Self::NoProject { .. } | Self::NoDefaultBinary { .. } => 2,
            Self::BuildFailed { exit_status } => exit_status.exit_code(),
            _ => 126,
        }
    }
}
