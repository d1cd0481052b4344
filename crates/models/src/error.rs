//! What can go wrong in this crate, as facts.

use std::path::PathBuf;

use crate::LoadReport;

/// Why a model could not be built, changed, saved or loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The constructor asked for things that cannot be; every one of them is listed.
    #[error("the model cannot be built: {}", problems.join("; "))]
    Build {
        /// One line for each problem, with the full name of the parameter or layer.
        problems: Vec<String>,
    },

    /// A name or prefix that no parameter has.
    #[error("no parameter is called `{name}` or lies under it; the model has {}", known.join(", "))]
    NoSuchParameter {
        /// What was asked for.
        name: String,
        /// The names at the top of the model.
        known: Vec<String>,
    },

    /// A kind that parameters cannot have.
    #[error("parameters cannot be {kind:?}: only floating-point kinds have gradients")]
    NotFloatingPoint {
        /// The kind that was asked for.
        kind: tch::Kind,
    },

    /// A strict load met a state dictionary that does not fit the model. Nothing was changed.
    #[error("the weights do not fit the model, and nothing was changed: {0}")]
    Mismatch(LoadReport),

    /// libtorch refused a layer's operation.
    #[error("{layer} cannot take an input of {input:?}: {source}")]
    Layer {
        /// The layer's full name.
        layer: String,
        /// The shape of its input.
        input: Vec<i64>,
        /// libtorch's reason.
        source: tch::TchError,
    },

    /// A layer got an input of a shape that it has no result for.
    #[error("{layer}: {expected}, found an input of {input:?}")]
    Input {
        /// The layer's full name.
        layer: String,
        /// What it takes.
        expected: &'static str,
        /// The shape of its input.
        input: Vec<i64>,
    },

    /// A normalisation could not share its statistics with the other ranks.
    #[error(transparent)]
    Ranks(brigade_torch::Error),

    /// Two tensors of one name in a state dictionary.
    #[error("the state dictionary already holds `{name}`")]
    DuplicateName {
        /// The name.
        name: String,
    },

    /// The system refused to open, read or write.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// `read`, `write`, …
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },

    /// Neither safetensors nor a file of `torch.save`.
    #[error(
        "{} is neither a safetensors file nor a .pth file of torch.save: {fact}",
        path.display()
    )]
    UnknownFormat {
        /// The file.
        path: PathBuf,
        /// What its first bytes are.
        fact: String,
    },

    /// The file contradicts itself: truncated, damaged, or made to deceive.
    #[error("{} is damaged: {fact}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What does not hold.
        fact: String,
    },

    /// A well-formed file that uses something this reader does not know.
    #[error("{}: {fact}", path.display())]
    Unsupported {
        /// The file, or the place it would have been written to.
        path: PathBuf,
        /// What it uses, and what to do about it.
        fact: String,
    },

    /// A pickle that wants to call something other than the functions that rebuild tensors.
    #[error(
        "{} refers to `{global}`, which is not among the few names that tensors need; nothing was \
         executed. Save `model.state_dict()` alone, without the objects around it",
        path.display()
    )]
    ForbiddenGlobal {
        /// The file.
        path: PathBuf,
        /// Python's name of the object, as `module.name`.
        global: String,
    },

    /// The format that `torch.save` wrote before PyTorch 1.6.
    #[error(
        "{} is in the format of torch.save before PyTorch 1.6; load it in PyTorch and save it again",
        path.display()
    )]
    LegacyPth {
        /// The file.
        path: PathBuf,
    },

    /// The file holds something other than a dictionary of tensors.
    #[error("{} holds {found}, not a dictionary of tensors{}", path.display(), choices(dictionaries))]
    NotAStateDict {
        /// The file.
        path: PathBuf,
        /// What it holds.
        found: String,
        /// The keys at the top under which dictionaries lie: one of them may be meant.
        dictionaries: Vec<String>,
    },

    /// No such key at the top of the file.
    #[error("{} has no dictionary under `{entry}`{}", path.display(), choices(dictionaries))]
    NoSuchEntry {
        /// The file.
        path: PathBuf,
        /// The key that was asked for.
        entry: String,
        /// The keys under which dictionaries lie.
        dictionaries: Vec<String>,
    },

    /// Another fault of a file, as its own crate tells it.
    #[error(transparent)]
    Checkpoint(brigade_checkpoint::Error),

    /// libtorch refused.
    #[error("libtorch could not {doing}: {source}")]
    Torch {
        /// What was being done.
        doing: String,
        /// libtorch's reason.
        source: tch::TchError,
    },
}

impl From<brigade_checkpoint::Error> for Error {
    fn from(error: brigade_checkpoint::Error) -> Self {
        use brigade_checkpoint::Error as File;
        match error {
            File::Io { doing, path, source } => Self::Io { doing, path, source },
            File::UnknownFormat { path, fact } => Self::UnknownFormat { path, fact },
            File::Damaged { path, fact } => Self::Damaged { path, fact },
            File::Unsupported { path, fact } => Self::Unsupported { path, fact },
            File::ForbiddenGlobal { path, global } => Self::ForbiddenGlobal { path, global },
            File::LegacyPth { path } => Self::LegacyPth { path },
            other => Self::Checkpoint(other),
        }
    }
}

impl Error {
    pub(crate) fn torch(doing: impl Into<String>) -> impl FnOnce(tch::TchError) -> Self {
        let doing = doing.into();
        move |source| Self::Torch { doing, source }
    }
}

fn choices(dictionaries: &[String]) -> String {
    if dictionaries.is_empty() {
        return String::new();
    }
    format!("; choose one of its dictionaries: {}", dictionaries.join(", "))
}
