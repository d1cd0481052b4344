//! Errors of models.

use std::path::PathBuf;

use brigade_checkpoint::TensorReader;
use brigade_torch::{Error, ErrorKind, is_out_of_memory_message};
use tch::{TchError, Tensor};

use crate::LoadReport;

/// Reason why a model could not be built, changed, saved or loaded, or why its forward failed: the detail of an
/// [`Error`].
///
/// ```
/// use brigade_nn::{Linear, Model, ModelError};
///
/// let model = Model::new(|path| Linear::new(path, 4, 2))?;
/// let error = model.parameters_under("head").unwrap_err();
/// assert!(matches!(error.downcast_ref(), Some(ModelError::NoSuchParameter { .. })), "{error}");
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The model's constructor made invalid requests, all of which are listed.
    #[error("the model cannot be built: {}", problems.join("; "))]
    Build {
        /// List of problems, one line each, with the full name of the parameter or layer.
        problems: Vec<String>,
    },

    /// The model has no parameter of this name or prefix.
    #[error("no parameter is called `{name}` or lies under it; the model has {}", known.join(", "))]
    NoSuchParameter {
        /// Name or prefix that was requested.
        name: String,
        /// Names of the model's top-level modules and parameters.
        known: Vec<String>,
    },

    /// The model has no buffer of this name.
    #[error("no buffer is called `{name}`; the model has {}", known.join(", "))]
    NoSuchBuffer {
        /// Name of the buffer that was requested.
        name: String,
        /// Names of the model's buffers.
        known: Vec<String>,
    },

    /// The model has no layer with hooks of this name.
    #[error("no layer is called `{layer}`; those that take hooks are {}", known.join(", "))]
    NoSuchLayer {
        /// Name of the layer that was requested.
        layer: String,
        /// Names of the layers that accept hooks.
        known: Vec<String>,
    },

    /// The groups do not contain every parameter exactly once.
    #[error(
        "parameter `{parameter}` is in {}; every parameter belongs to exactly one group",
        if groups.is_empty() { "no group".to_owned() } else { format!("the groups {}", groups.join(", ")) }
    )]
    Groups {
        /// Full name of the parameter.
        parameter: String,
        /// Names of the groups that contain the parameter.
        groups: Vec<String>,
    },

    /// A TorchScript file could not be loaded as a model.
    #[error("{} cannot be read as TorchScript: {source}", path.display())]
    Script {
        /// Path of the TorchScript file.
        path: PathBuf,
        /// Error from libtorch.
        source: Error,
    },

    /// A TorchScript module returned a value whose type differs from the model's output type.
    #[error("the TorchScript module gave {found}, expected {expected}")]
    ScriptOutput {
        /// Description of the expected type.
        expected: &'static str,
        /// Description of the type that the module returned.
        found: &'static str,
    },

    /// An operation needs the values of parameters, but the model is deferred and has no values yet.
    #[error(
        "{action} needs the parameters' values, and the model has none yet, since it was built by `Model::deferred`: \
         first give it to `Accelerator::prepare`, or call `materialize`"
    )]
    Deferred {
        /// Name of the operation, such as `forward`.
        action: &'static str,
    },

    /// An operation does not work on a model whose weights a device map has placed on several devices, in the host's
    /// memory or on the disk.
    #[error(
        "cannot {action}: a device map has the weights on several devices or on the disk, for inference alone; to train a model \
         that does not fit a device, leave the map out and use sharding with offload (`Sharding::zero3().offload(…)`)"
    )]
    Dispatched {
        /// Description of the operation, such as `prepare the model`.
        action: String,
    },

    /// The requested kind is not possible for parameters.
    #[error("parameters cannot be {kind:?}: only floating-point kinds have gradients")]
    NotFloatingPoint {
        /// Kind that was requested.
        kind: tch::Kind,
    },

    /// The names or shapes of a state dictionary do not match the model. Nothing was changed.
    #[error("the weights do not fit the model, and nothing was changed: {0}")]
    Mismatch(Box<LoadReport>),

    /// A layer's operation failed in libtorch.
    #[error("{layer} cannot take an input of {input:?}: {reason}")]
    Layer {
        /// Full name of the layer.
        layer: String,
        /// Shape of the layer's input.
        input: Vec<i64>,
        /// Error message of libtorch.
        reason: String,
    },

    /// The shape of a layer's input is invalid.
    #[error("{layer}: {expected}, found an input of {input:?}")]
    Input {
        /// Full name of the layer.
        layer: String,
        /// Description of the accepted inputs.
        expected: &'static str,
        /// Shape of the layer's input.
        input: Vec<i64>,
    },

    /// An embedding has no row for an id, for example because a token is not in the vocabulary.
    #[error(
        "{layer}: id {id} at {position:?} is beyond its table, which has the ids 0 to {} (of tokens, vocab_size \
         is {rows}); take the tokenizer that belongs to the model, or a model of a larger vocabulary",
        rows - 1
    )]
    OutsideTable {
        /// Full name of the layer.
        layer: String,
        /// First id that has no row.
        id: i64,
        /// Position of the id in the input: one index per dimension.
        position: Vec<i64>,
        /// Number of rows of the table.
        rows: i64,
    },

    /// The forward panicked. tch's operators without the prefix `f_` panic on errors.
    #[error("the forward panicked: {message}")]
    Panicked {
        /// Message of the panic. For an operator of libtorch it contains libtorch's reason.
        message: String,
    },

    /// Two tensors of a state dictionary have the same name.
    #[error("the state dictionary already holds `{name}`")]
    DuplicateName {
        /// Name of the duplicate tensor.
        name: String,
    },

    /// A weight that is read from its file for each use could not be read.
    #[error(
        "`{name}` could not be read from {} for the forward: {source}; the next forward reads it again",
        path.display()
    )]
    WeightRead {
        /// Name of the tensor in the file.
        name: String,
        /// Path of the weights file.
        path: PathBuf,
        /// Error of the read.
        source: Error,
    },

    /// A file that passed its checks could not be read to its end.
    #[error(
        "{} passed validation but could not be read completely, so the model is partly changed; load it \
         or another file again, or restart the program: {source}",
        path.display()
    )]
    Interrupted {
        /// Path of the weights file.
        path: PathBuf,
        /// Error of the read.
        source: Error,
    },

    /// An operation of libtorch failed.
    #[error("libtorch could not {doing}: {source}")]
    Torch {
        /// Description of the failed operation.
        doing: String,
        /// Error from libtorch.
        source: TchError,
    },
}

impl From<ModelError> for Error {
    fn from(error: ModelError) -> Self {
        use ModelError as M;
        let by_text = |text: &str| {
            if is_out_of_memory_message(text) { ErrorKind::OutOfMemory } else { ErrorKind::Model }
        };
        let kind = match &error {
            M::NoSuchParameter { .. }
            | M::NoSuchBuffer { .. }
            | M::NoSuchLayer { .. }
            | M::NotFloatingPoint { .. }
            | M::Deferred { .. }
            | M::Dispatched { .. }
            | M::DuplicateName { .. } => ErrorKind::InvalidArgument,
            M::Groups { .. }
            | M::ScriptOutput { .. }
            | M::Input { .. }
            | M::OutsideTable { .. } => ErrorKind::Model,
            M::Build { problems } => by_text(&problems.join("; ")),
            M::Layer { reason, .. } => by_text(reason),
            M::Panicked { message } => by_text(message),
            M::Torch { source, .. } => by_text(&source.to_string()),
            M::Mismatch(_) => ErrorKind::Checkpoint,
            M::Script { source, .. }
            | M::Interrupted { source, .. }
            | M::WeightRead { source, .. } => match source.kind() {
                ErrorKind::OutOfMemory => ErrorKind::OutOfMemory,
                _ => ErrorKind::Checkpoint,
            },
        };
        Self::new(kind, error)
    }
}

impl ModelError {
    /// Creates the error of a layer's operation that libtorch refused for this input.
    pub(crate) fn layer(layer: impl Into<String>, input: &Tensor, source: TchError) -> Self {
        Self::Layer { layer: layer.into(), input: input.size(), reason: reason(source) }
    }

    /// Returns the error for a tensor of a file that could not be read while a model was loaded.
    pub(crate) fn interrupted(from: TensorReader<'_>, source: Error) -> Error {
        Self::Interrupted { path: from.path().to_owned(), source }.into()
    }

    pub(crate) fn torch(doing: impl Into<String>) -> impl FnOnce(TchError) -> Self {
        let doing = doing.into();
        move |source| Self::Torch { doing, source }
    }
}

/// Returns libtorch's reason: the lines after it list C++ functions.
pub(crate) fn first_line(error: TchError) -> TchError {
    match error {
        TchError::Torch(text) => {
            TchError::Torch(text.lines().next().unwrap_or_default().to_owned())
        }
        other => other,
    }
}

/// Returns libtorch's reason, without tch's prefix "Internal torch error".
fn reason(error: TchError) -> String {
    match first_line(error) {
        TchError::Torch(text) => text,
        other => other.to_string(),
    }
}
