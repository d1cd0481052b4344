//! What can be wrong with a file or a checkpoint, as facts.

use std::path::{Path, PathBuf};

use brigade_rank_env::text::escaped;

use crate::file_name::InvalidFileName;
use crate::pth::shown;

/// Why a file could not be read or written, or a checkpoint is none.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operating system call failed.
    #[error("cannot {doing} {}: {source}", escaped(path.display()))]
    Io {
        /// `read`, `write`, …
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },

    /// Neither safetensors nor a file of `torch.save`.
    #[error(
        "{} is neither a safetensors file nor a .pth file of torch.save: {fact}",
        escaped(path.display()),
        fact = escaped(fact)
    )]
    UnknownFormat {
        /// Path of the file.
        path: PathBuf,
        /// What its first bytes are.
        fact: String,
    },

    /// The file contradicts itself: truncated, damaged, or made to deceive.
    #[error("{} is damaged: {fact}", escaped(path.display()), fact = escaped(fact))]
    Damaged {
        /// Path of the file.
        path: PathBuf,
        /// Description of the damage or contradiction.
        fact: String,
    },

    /// A well-formed file that uses something this reader does not know.
    #[error("{}: {fact}", escaped(path.display()), fact = escaped(fact))]
    Unsupported {
        /// The file, or the place it would have been written to.
        path: PathBuf,
        /// What it uses, and what to do about it.
        fact: String,
    },

    /// A file of `torch.save` without the weights of a model.
    #[error(
        "{} holds {found}; a state dictionary (tensors by name) is not in it",
        escaped(path.display()),
        found = escaped(found)
    )]
    NoStateDict {
        /// Path of the file.
        path: PathBuf,
        /// What it holds.
        found: String,
    },

    /// A file of `torch.save` with the weights of several models.
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
        /// Their keys.
        keys: Vec<String>,
    },

    /// No dictionary lies under a key.
    #[error(
        "{} has no dictionary under `{}`{}",
        escaped(path.display()),
        shown(key),
        other_keys(keys)
    )]
    NoSuchKey {
        /// Path of the file.
        path: PathBuf,
        /// The key that was asked for.
        key: String,
        /// The keys of its state dictionaries; one that is empty where all of the file is one.
        keys: Vec<String>,
    },

    /// A part of a tensor was asked for that the tensor does not have, or in memory of another size.
    #[error("cannot read `{}` of {}: {fact}", shown(name), escaped(path.display()))]
    NoSuchRegion {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        name: String,
        /// What it is, and what was asked for.
        fact: String,
    },

    /// A folder that is not a checkpoint of Brigade's.
    #[error("{} is not a checkpoint: {fact}", escaped(path.display()), fact = escaped(fact))]
    NotACheckpoint {
        /// Path of the folder.
        path: PathBuf,
        /// What it is or lacks.
        fact: String,
    },

    /// A checkpoint whose manifest is of a version that this program does not know.
    #[error(
        "{} is a checkpoint of manifest version {found}, this program reads versions 1 to {known}; update \
         Brigade (the dependency of the program, and the command `brigade`) to the version that wrote it or a \
         newer one",
        escaped(path.display())
    )]
    Version {
        /// Path of the folder.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The newest that is known.
        known: u32,
    },

    /// A checkpoint would replace something else.
    #[error(
        "{} cannot become a checkpoint: {fact}; nothing was changed, choose another name",
        escaped(path.display()),
        fact = escaped(fact)
    )]
    Occupied {
        /// The place.
        path: PathBuf,
        /// What is there.
        fact: String,
    },

    /// A state from elsewhere does not fit the checkpoint that it was to be put into.
    #[error(
        "{} does not fit {}: {fact}; nothing was written",
        escaped(path.display()),
        escaped(like.display()),
        fact = escaped(fact)
    )]
    Unlike {
        /// The state.
        path: PathBuf,
        /// Path of the checkpoint.
        like: PathBuf,
        /// The first difference.
        fact: String,
    },

    /// States that a source lacks would come from the checkpoint that says what goes where.
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
        /// Path of the checkpoint.
        like: PathBuf,
        /// The objects, each with the reason.
        states: String,
        /// The kinds of states to keep, separated by commas.
        kinds: String,
    },

    /// A file was to be written under something that is not a file's name.
    #[error("{0}")]
    FileName(#[source] InvalidFileName),
}

/// What there is instead of a key, for a message.
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

/// Keys of a file, for a message.
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
    /// The error of the system about a path; what an [`std::io::Error`] is around where it is one of these.
    pub(crate) fn io(
        doing: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| source.downcast().unwrap_or_else(|source| Self::Io { doing, path, source })
    }

    /// The error of a temporary file in `folder`, from which `to` was to be made, without its name.
    pub(crate) fn temporary(to: &Path, folder: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |error| {
            let source = folder.metadata().err().unwrap_or_else(|| error.kind().into());
            Self::Io { doing: "write", path: to.to_owned(), source }
        }
    }

    /// Names `to`, and what is to be in it, where the path is that of a folder in the temporary folder `partial`.
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
