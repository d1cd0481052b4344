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

    /// What is wrong with a file.
    #[error(transparent)]
    File(#[from] brigade_checkpoint::Error),

    /// A file was sound when it was looked at, and could not be read to its end afterwards.
    #[error(
        "{} was sound and could not be read to its end, so the model is partly changed; load it or \
         another one again, or start anew: {source}",
        path.display()
    )]
    Interrupted {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        source: Box<Self>,
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

    /// libtorch refused.
    #[error("libtorch could not {doing}: {source}")]
    Torch {
        /// What was being done.
        doing: String,
        /// libtorch's reason.
        source: tch::TchError,
    },
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
