//! What can be wrong with a file or a checkpoint, as facts.

use std::path::PathBuf;

use brigade_world::text::escaped;

use crate::file_name::InvalidFileName;

/// Why a file could not be read or written, or a checkpoint is none.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system refused.
    #[error("cannot {doing} {}: {source}", escaped(path.display()))]
    Io {
        /// `read`, `write`, …
        doing: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },

    /// Neither safetensors nor a file of `torch.save`.
    #[error(
        "{} is neither a safetensors file nor a .pth file of torch.save: {fact}",
        escaped(path.display()),
        fact = escaped(fact)
    )]
    UnknownFormat {
        /// The file.
        path: PathBuf,
        /// What its first bytes are.
        fact: String,
    },

    /// The file contradicts itself: truncated, damaged, or made to deceive.
    #[error("{} is damaged: {fact}", escaped(path.display()), fact = escaped(fact))]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What does not hold.
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

    /// A pickle that names something other than what tensors need.
    #[error(
        "{} refers to `{global}`, which is not among the few names that tensors need; nothing was \
         executed. Save the `state_dict()` alone, without the objects around it",
        escaped(path.display()),
        global = escaped(global)
    )]
    ForbiddenGlobal {
        /// The file.
        path: PathBuf,
        /// Python's name of the object, as `module.name`.
        global: String,
    },

    /// A folder that is not a checkpoint of Brigade's.
    #[error("{} is not a checkpoint: {fact}", escaped(path.display()), fact = escaped(fact))]
    NotACheckpoint {
        /// The folder.
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
        /// The folder.
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
        /// The checkpoint.
        like: PathBuf,
        /// The first difference.
        fact: String,
    },

    /// States that a source lacks would come from the checkpoint that says what goes where.
    #[error(
        "{} has no state for all that {} holds, and these would come from the latter: {states}. Where that is \
         meant, give `--keep-state {kinds}`; nothing was written",
        path.display(),
        like.display()
    )]
    MissingStates {
        /// The source.
        path: PathBuf,
        /// The checkpoint.
        like: PathBuf,
        /// The objects, each with the reason.
        states: String,
        /// The kinds of states to keep, separated by commas.
        kinds: String,
    },

    /// A file was to be written under something that is not a file's name.
    #[error("{0}")]
    FileName(#[source] InvalidFileName),

    /// The format that `torch.save` wrote before PyTorch 1.6.
    #[error(
        "{} is in the format of torch.save before PyTorch 1.6; load it in PyTorch and save it again",
        escaped(path.display())
    )]
    LegacyPth {
        /// The file.
        path: PathBuf,
    },
}

impl From<InvalidFileName> for Error {
    fn from(error: InvalidFileName) -> Self {
        Self::FileName(error)
    }
}

impl Error {
    pub(crate) fn io(
        doing: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { doing, path, source }
    }
}
