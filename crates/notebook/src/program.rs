//! The program `brigade`, whose agent starts a notebook's ranks.

use std::env;
use std::path::{Path, PathBuf};

use crate::NotebookError;

/// Environment variable with the path of the program, for notebooks that do not find it in `PATH`.
const VARIABLE: &str = "BRIGADE_PROGRAM";

/// Finds the program: the variable's, else in `PATH`, else where cargo installs programs.
pub(crate) fn find() -> Result<PathBuf, NotebookError> {
    if let Some(program) = env::var_os(VARIABLE).filter(|it| !it.is_empty()).map(PathBuf::from) {
        return if program.is_file() {
            Ok(program)
        } else {
            let looked = format!("at {} ({VARIABLE})", program.display());
            Err(NotebookError::NoProgram { looked })
        };
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let cargo = env::var_os("CARGO_HOME").map(PathBuf::from);
    let cargo = cargo.or_else(|| env::home_dir().map(|home| home.join(".cargo")));
    let folders = env::split_paths(&path).chain(cargo.map(|cargo| cargo.join("bin")));
    let found = folders.map(|folder| folder.join("brigade")).find(|program| is_program(program));
    found.ok_or_else(|| NotebookError::NoProgram {
        looked: format!(
            "in PATH, nor in cargo's folder of programs ({VARIABLE} names it elsewhere)"
        ),
    })
}

fn is_program(path: &Path) -> bool {
    path.is_file()
}
