//! A call of the notebook's function: its folder with arguments and results, and the side of the rank.

use std::fmt::{Debug, Display};
use std::fs::{self, File};
use std::io::{self, Write};
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};

use brigade_dylib_call::Entry;
use brigade_rank_env::World;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tempfile::TempDir;

use crate::NotebookError;

/// Environment variable with the folder of the call, for its ranks.
pub(crate) const FOLDER: &str = "BRIGADE_NOTEBOOK_CALL";

/// Return type of a function of a notebook.
pub(crate) type Outcome<R, E> = Result<R, E>;

/// The record of a function with these types, in the library that the caller is compiled into.
pub(crate) fn entry<F, A, R, E>() -> &'static Entry
where
    F: Fn(A) -> Outcome<R, E> + Copy + 'static,
    A: DeserializeOwned,
    R: Serialize,
    E: Display + Debug,
{
    const { &Entry::new(rank_main::<F, A, R, E>) }
}

/// Runs a rank: reads its arguments, calls the function, writes the result. Returns the exit code of its process.
extern "C" fn rank_main<F, A, R, E>() -> i32
where
    F: Fn(A) -> Outcome<R, E> + Copy + 'static,
    A: DeserializeOwned,
    R: Serialize,
    E: Display + Debug,
{
    // A panic must not leave an `extern "C"` function; its message is printed by the hook.
    match panic::catch_unwind(AssertUnwindSafe(|| brigade_rank_env::record(run::<F, A, R, E>))) {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => {
            let _ = io::stderr().write_all(format!("Error: {error}\n").as_bytes());
            1
        }
        Err(_) => 101,
    }
}

fn run<F, A, R, E>() -> Result<(), NotebookError>
where
    F: Fn(A) -> Outcome<R, E> + Copy + 'static,
    A: DeserializeOwned,
    R: Serialize,
    E: Display + Debug,
{
    let name = std::any::type_name::<F>();
    let function = brigade_dylib_call::function::<F, A, _>()
        .ok_or(NotebookError::NotAFunction { function: name })?;
    let folder = std::env::var_os(FOLDER).map(PathBuf::from).ok_or_else(|| {
        NotebookError::Setting(format!(
            "{FOLDER} is not set: a notebook's rank is started by its notebook"
        ))
    })?;
    let world = World::from_env().map_err(|error| NotebookError::Setting(error.to_string()))?;
    let local_rank = world.local_rank.as_usize();
    let arguments = read(&arguments_file(&folder), "the arguments")?;
    // `{:#}` shows the whole chain of an anyhow::Error.
    let result =
        function(arguments).map_err(|error| NotebookError::Function(format!("{error:#}")))?;
    write(&result_file(&folder, local_rank), &result, &format!("the result of rank {}", world.rank))
}

/// The folder of a call, with a file that is locked as long as the notebook's process exists: process numbers do not
/// suffice, as containers that share a folder for temporary files do not see each other's.
#[derive(Debug)]
pub(crate) struct Folder {
    folder: TempDir,
    _lock: File,
}

impl Folder {
    /// Makes a folder, and removes those of notebooks that were killed in a call.
    pub(crate) fn new() -> io::Result<Self> {
        let all = fs::read_dir(std::env::temp_dir()).into_iter().flatten().flatten();
        for other in
            all.filter(|it| it.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes()))
        {
            // Another user's folder cannot be opened, and is kept.
            let lock = File::open(other.path().join(LOCK));
            if lock.is_ok_and(|lock| lock.try_lock().is_ok()) {
                let _ = fs::remove_dir_all(other.path());
            }
        }
        let folder = tempfile::Builder::new().prefix(PREFIX).tempdir()?;
        // The folder is locked before it gets its name: otherwise another notebook would consider it abandoned.
        let unlocked = folder.path().join("unlocked");
        let lock = File::create(&unlocked)?;
        lock.lock()?;
        fs::rename(unlocked, folder.path().join(LOCK))?;
        Ok(Self { folder, _lock: lock })
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }
}

/// Prefix of the name of a call's folder.
const PREFIX: &str = "brigade-notebook-";
const LOCK: &str = "lock";

pub(crate) fn arguments_file(folder: &Path) -> PathBuf {
    folder.join("arguments")
}

pub(crate) fn result_file(folder: &Path, local_rank: usize) -> PathBuf {
    folder.join(format!("result-{local_rank}"))
}

pub(crate) fn write<T: Serialize>(file: &Path, value: &T, what: &str) -> Result<(), NotebookError> {
    // With the names of fields, so that values of `serde(default)` and `serde(flatten)` come back.
    let bytes =
        rmp_serde::to_vec_named(value).map_err(|error| NotebookError::message(what, error))?;
    fs::write(file, bytes).map_err(NotebookError::system(format!("write {what}")))
}

pub(crate) fn read<T: DeserializeOwned>(file: &Path, what: &str) -> Result<T, NotebookError> {
    let bytes = fs::read(file).map_err(NotebookError::system(format!("read {what}")))?;
    rmp_serde::from_slice(&bytes).map_err(|error| NotebookError::message(what, error))
}
