//! Errors about weights files and checkpoints.

use std::path::{Path, PathBuf};

use brigade_rank_env::text::escaped;

use crate::file_name::InvalidFileName;
use crate::pth::shown;

/// An error of reading or writing a weights file or a checkpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operating system call failed.
    #[error("cannot {doing} {}: {source}", escaped(path.display()))]
    Io {
        /// Operation that failed, as a verb: `read`, `write`, …
        doing: &'static str,
        /// Path of the file or folder.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },

    /// The file is neither a safetensors file nor a file of `torch.save`.
    #[error(
        "{} is neither a safetensors file nor a .pth file of torch.save: {fact}",
        escaped(path.display()),
        fact = escaped(fact)
    )]
    UnknownFormat {
        /// Path of the file.
        path: PathBuf,
        /// Description of the first bytes.
        fact: String,
    },

    /// The file is inconsistent: truncated, damaged, or made to deceive.
    #[error("{} is damaged: {fact}", escaped(path.display()), fact = escaped(fact))]
    Damaged {
        /// Path of the file.
        path: PathBuf,
        /// Description of the damage or contradiction.
        fact: String,
    },

    /// The file is well-formed, but uses a feature that is not supported.
    #[error("{}: {fact}", escaped(path.display()), fact = escaped(fact))]
    Unsupported {
        /// Path of the file, or the place where it would have been written.
        path: PathBuf,
        /// Unsupported feature, and what to do about it.
        fact: String,
    },

    /// The file of `torch.save` contains no weights of a model.
    #[error(
        "{} holds {found}; a state dictionary (tensors by name) is not in it",
        escaped(path.display()),
        found = escaped(found)
    )]
    NoStateDict {
        /// Path of the file.
        path: PathBuf,
        /// Description of the file's contents.
        found: String,
    },

    /// The file of `torch.save` contains the weights of several models.
    #[error(
        "{} holds {} state dictionaries: {}; choose one (`--key` on the command line, \
         `weights::load_entry` and `Model::load_entry` in a program)",
        escaped(path.display()),
        keys.len(),
        listed(keys)
    )]
    SeveralStateDicts {
        /// Path of the file.
        path: PathBuf,
        /// Keys of the state dictionaries.
        keys: Vec<String>,
    },

    /// The file has no dictionary under the requested key.
    #[error(
        "{} has no dictionary under `{}`{}",
        escaped(path.display()),
        shown(key),
        other_keys(keys)
    )]
    NoSuchKey {
        /// Path of the file.
        path: PathBuf,
        /// Key that was requested.
        key: String,
        /// Keys of the file's state dictionaries. A single empty key if the whole file is one.
        keys: Vec<String>,
    },

    /// The requested part of a tensor does not exist, or the memory for it has the wrong size.
    #[error("cannot read `{}` of {}: {fact}", shown(name), escaped(path.display()))]
    NoSuchRegion {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        name: String,
        /// Description of the tensor and of the request.
        fact: String,
    },

    /// The folder is not a Brigade checkpoint.
    #[error("{} is not a checkpoint: {fact}", escaped(path.display()), fact = escaped(fact))]
    NotACheckpoint {
        /// Path of the folder.
        path: PathBuf,
        /// Description of the folder, or of what it lacks.
        fact: String,
    },

    /// The checkpoint's manifest has a version that this program does not support.
    #[error(
        "{} is a checkpoint of manifest version {found}, this program reads versions 1 to {known}; update \
         Brigade (the dependency of the program, and the command `brigade`) to the version that wrote it or a \
         newer one",
        escaped(path.display())
    )]
    Version {
        /// Path of the folder.
        path: PathBuf,
        /// Version of the manifest.
        found: u32,
        /// Newest version that this program supports.
        known: u32,
    },

    /// The target of a checkpoint exists and is not a checkpoint.
    #[error(
        "{} cannot become a checkpoint: {fact}; nothing was changed, choose another name",
        escaped(path.display()),
        fact = escaped(fact)
    )]
    Occupied {
        /// Path of the target.
        path: PathBuf,
        /// Description of what occupies the target.
        fact: String,
    },

    /// The foreign state does not fit the checkpoint `like`.
    #[error(
        "{} does not fit {}: {fact}; nothing was written",
        escaped(path.display()),
        escaped(like.display()),
        fact = escaped(fact)
    )]
    Unlike {
        /// Path of the foreign state.
        path: PathBuf,
        /// Path of the checkpoint `like`.
        like: PathBuf,
        /// First difference between the two.
        fact: String,
    },

    /// The source lacks states that would have to be taken from the checkpoint `like`.
    #[error(
        "{} lacks some of the states that {} has, and these would be taken from the latter: {states}. To \
         allow this, pass `--keep-state {kinds}`; nothing was written",
        escaped(path.display()),
        escaped(like.display()),
        states = escaped(states)
    )]
    MissingStates {
        /// Path of the source.
        path: PathBuf,
        /// Path of the checkpoint `like`.
        like: PathBuf,
        /// Missing objects, each with the reason.
        states: String,
        /// Kinds of states to pass to `--keep-state`, separated by commas.
        kinds: String,
    },

    /// The name of a file to write is not a valid file name.
    #[error("{0}")]
    FileName(#[source] InvalidFileName),
}

/// Returns the end of a message about a missing key: the keys that exist.
fn other_keys(keys: &[String]) -> String {
    match keys {
        [] => String::new(),
        [all] if all.is_empty() => {
            "; all of it is one state dictionary, without a key: leave the key out (`--key` on the command line)"
                .to_owned()
        }
        keys => format!("; its state dictionaries are {}", listed(keys)),
    }
}

/// Formats keys of a file for a message, at most 20.
pub(crate) fn listed(keys: &[String]) -> String {
    let mut shown: Vec<String> =
        keys.iter().take(MAX_LISTED).map(|key| format!("`{}`", shown(key))).collect();
    if keys.len() > MAX_LISTED {
        shown.push(format!("{} more", keys.len() - MAX_LISTED));
    }
    shown.join(", ")
}

const MAX_LISTED: usize = 20;

impl From<InvalidFileName> for Error {
    fn from(error: InvalidFileName) -> Self {
        Self::FileName(error)
    }
}

impl Error {
    /// Returns a function that adds operation and path to a system error. An [`std::io::Error`] that wraps an `Error`
    /// gives the wrapped one.
    pub(crate) fn io(
        doing: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| source.downcast().unwrap_or_else(|source| Self::Io { doing, path, source })
    }

    /// Returns a function that converts an error of the temporary file in `folder` from which `to` is made, without the
    /// temporary name.
    pub(crate) fn temporary(to: &Path, folder: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |error| {
            let source = folder.metadata().err().unwrap_or_else(|| error.kind().into());
            Self::Io { doing: "write", path: to.to_owned(), source }
        }
    }

    /// Replaces a path inside the temporary folder `partial` by the corresponding path of the target `to`.
    pub(crate) fn renamed(mut self, partial: &Path, to: &Path) -> Self {
        if let Some(path) = self.path_mut()
            && let Ok(rest) = path.strip_prefix(partial)
        {
            let mut rest = rest.components();
            rest.next();
            *path = match rest.as_path() {
                rest if rest.as_os_str().is_empty() => to.to_owned(),
                rest => to.join(rest),
            };
        }
        self
    }

    fn path_mut(&mut self) -> Option<&mut PathBuf> {
        match self {
            Self::Io { path, .. }
            | Self::UnknownFormat { path, .. }
            | Self::Damaged { path, .. }
            | Self::Unsupported { path, .. }
            | Self::NoStateDict { path, .. }
            | Self::SeveralStateDicts { path, .. }
            | Self::NoSuchKey { path, .. }
            | Self::NoSuchRegion { path, .. }
            | Self::NotACheckpoint { path, .. }
            | Self::Version { path, .. }
            | Self::Occupied { path, .. }
            | Self::Unlike { path, .. }
            | Self::MissingStates { path, .. } => Some(path),
            Self::FileName(_) => None,
        }
    }
}
