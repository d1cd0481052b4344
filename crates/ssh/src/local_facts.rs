//! Facts of this machine and this process that a plan for other hosts is made from.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

use crate::{LocalHost, RemoteError};

/// Facts about this machine and this process that a plan for other hosts depends on, gathered once.
#[derive(Clone, Debug, Default)]
pub struct LocalFacts {
    /// Names and addresses of this machine.
    pub host: LocalHost,
    /// Working folder of this process, as the user names it.
    pub working_folder: PathBuf,
    /// Environment variables of this process.
    pub variables: Vec<(OsString, OsString)>,
    /// DeepSpeed's environment files, with their contents.
    pub deepspeed_files: Vec<(PathBuf, String)>,
    /// Path of this executable.
    pub brigade: PathBuf,
}

impl LocalFacts {
    /// Gathers the facts about this machine and this process.
    ///
    /// # Errors
    /// The system does not return the path of the working folder or of this executable.
    pub fn gather() -> Result<Self, RemoteError> {
        let files = deepspeed_files().into_iter();
        Ok(Self {
            host: LocalHost::gather(),
            working_folder: working_folder()
                .map_err(RemoteError::system("find the working folder"))?,
            variables: std::env::vars_os().collect(),
            deepspeed_files: files
                .filter_map(|path| Some((path.clone(), fs::read_to_string(&path).ok()?)))
                .collect(),
            brigade: std::env::current_exe()
                .map_err(RemoteError::system("find this executable"))?,
        })
    }

    /// Chooses the working folder on every host: the given one, else this process's.
    ///
    /// # Errors
    /// The path of the folder is not absolute: on another host it would be relative to the home folder on that host.
    pub fn workdir(&self, given: Option<PathBuf>) -> Result<PathBuf, RemoteError> {
        let workdir = given.unwrap_or_else(|| self.working_folder.clone());
        if workdir.is_absolute() {
            Ok(workdir)
        } else {
            Err(RemoteError::Workdir { path: workdir })
        }
    }
}

/// Returns the paths where DeepSpeed looks for variables: a file of that name in the home folder and in this folder.
fn deepspeed_files() -> Vec<PathBuf> {
    let name = std::env::var_os("DS_ENV_FILE").filter(|it| !it.is_empty());
    let name = name.unwrap_or_else(|| ".deepspeed_env".into());
    let home = std::env::home_dir().map(|home| home.join(&name));
    let mut paths: Vec<PathBuf> = home.into_iter().chain([PathBuf::from(&name)]).collect();
    paths.dedup();
    paths
}

/// Returns the working folder as a shell shows it, links included: on another host the link may be the only name.
fn working_folder() -> std::io::Result<PathBuf> {
    let real = std::env::current_dir()?;
    let shown = std::env::var_os("PWD").map(PathBuf::from).filter(|it| it.is_absolute());
    let same = |it: &PathBuf| it.canonicalize().is_ok_and(|it| it == real);
    Ok(shown.filter(same).unwrap_or(real))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_working_folder_is_refused() {
        let facts = LocalFacts { working_folder: "/work".into(), ..LocalFacts::default() };
        assert_eq!(facts.workdir(None).unwrap(), PathBuf::from("/work"));
        let error = facts.workdir(Some("here".into())).unwrap_err().to_string();
        assert_eq!(
            error,
            "the working folder here is not an absolute path: give one with --workdir"
        );
    }
}
