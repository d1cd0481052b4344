//! TorchScript files: modules that Python saved.

use std::fmt;
use std::path::Path;

use cxx::UniquePtr;
use tch::Tensor;

use crate::bridge::{borrow_all, ffi, own};
use crate::error::{Error, TorchError};
use crate::tensor_tree::{TensorTree, TreeSpec};

/// A TorchScript module, as `save` of `torch.jit.script` or `torch.jit.trace` wrote it. `brigade_nn` creates models
/// from it.
///
/// A TorchScript file is a program that runs with the rights of this process. Load only files from sources that you
/// trust.
pub struct Script(UniquePtr<ffi::Script>);

// SAFETY: a counted pointer to a torch::jit::Module, which only this value holds and which belongs to no
// thread; `Script` is not `Sync`, so that one thread at a time uses it.
unsafe impl Send for Script {}

impl Script {
    /// Loads a module from a file, to the CPU.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] when it cannot be read or is not TorchScript;
    /// [`crate::ErrorKind::InvalidArgument`] for a path that is not UTF-8.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let text = path.to_str().ok_or_else(|| {
            Error::invalid_argument(format!(
                "libtorch takes paths in UTF-8 only: {}",
                path.display()
            ))
        })?;
        ffi::script_load(text)
            .map(Self)
            .map_err(|error| Error::libtorch("load TorchScript", &error))
    }

    /// Returns the parameters with their names, each name once; a tied parameter has several. The tensors are the
    /// module's own.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if libtorch fails.
    pub fn parameters(&self) -> Result<Vec<(String, Tensor)>, Error> {
        self.tensors(false)
    }

    /// Returns the buffers with their names, including those with `persistent=False`, which a file does not
    /// distinguish.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] if libtorch fails.
    pub fn buffers(&self) -> Result<Vec<(String, Tensor)>, Error> {
        self.tensors(true)
    }

    fn tensors(&self, buffers: bool) -> Result<Vec<(String, Tensor)>, Error> {
        let failed = |error: cxx::Exception| Error::libtorch("list TorchScript's tensors", &error);
        let names = ffi::script_names(&self.0, buffers).map_err(failed)?;
        let tensors = ffi::script_tensors(&self.0, buffers).map_err(failed)?;
        let tensors = tensors.iter().map(|tensor| own(ffi::copy_handle(tensor)));
        Ok(names.into_iter().zip(tensors).collect())
    }

    /// Sets the attribute `training` of all submodules. It affects only modules made by `torch.jit.script`: the
    /// operations that `torch.jit.trace` recorded do not change.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] for a module without the attribute (`torch.jit.freeze`).
    pub fn set_training(&self, on: bool) -> Result<(), Error> {
        ffi::script_train(&self.0, on)
            .map_err(|error| Error::libtorch("train or evaluate TorchScript", &error))
    }

    /// Runs `forward` of the module. If there are `names`, the last inputs are passed as keyword arguments with these
    /// names.
    ///
    /// Operations run one by one, without TorchScript's graph optimizer, which would change the last digits of results
    /// from the second or third run on.
    ///
    /// # Errors
    /// [`crate::TorchError::Libtorch`] with TorchScript's message.
    pub fn forward(&self, inputs: &[&Tensor], names: &[String]) -> Result<ScriptValue, Error> {
        let failed = |error: cxx::Exception| Error::libtorch("run TorchScript", &error);
        let output = ffi::script_forward(&self.0, &borrow_all(inputs), names).map_err(failed)?;
        let nodes = ffi::script_nodes(&output).map_err(failed)?;
        let tensors = ffi::script_output_tensors(&output);
        let tensors: Vec<Tensor> =
            tensors.iter().map(|tensor| own(ffi::copy_handle(tensor))).collect();
        ScriptValue::read(&mut nodes.into_iter(), &tensors)
    }
}

impl fmt::Debug for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Script")
    }
}

/// A value that a TorchScript module returned. As [`TensorTree`], a dictionary's values are visited in the module's
/// order.
#[derive(Debug)]
pub enum ScriptValue {
    /// The value `None`.
    None,
    /// A tensor of the module.
    Tensor(Tensor),
    /// A `bool` of Python.
    Bool(bool),
    /// An `int` of Python.
    Int(i64),
    /// A `float` of Python.
    Float(f64),
    /// A `str` of Python.
    Text(String),
    /// A tuple. TorchScript does not keep the names of its elements.
    Tuple(Vec<Self>),
    /// A list of values.
    List(Vec<Self>),
    /// A dictionary with keys of type `str`, in its order.
    Dict(Vec<(String, Self)>),
}

impl ScriptValue {
    /// Returns the name of the value's type in Python.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Tensor(_) => "a tensor",
            Self::Bool(_) => "a bool",
            Self::Int(_) => "an int",
            Self::Float(_) => "a float",
            Self::Text(_) => "a str",
            Self::Tuple(_) => "a tuple",
            Self::List(_) => "a list",
            Self::Dict(_) => "a dict",
        }
    }

    fn read(
        nodes: &mut impl Iterator<Item = ffi::ScriptNode>,
        tensors: &[Tensor],
    ) -> Result<Self, Error> {
        let short = || TorchError::Internal("a value of TorchScript ends early".into());
        let node = nodes.next().ok_or_else(short)?;
        let elements = |nodes: &mut _| {
            (0..node.count).map(|_| Self::read(nodes, tensors)).collect::<Result<Vec<_>, Error>>()
        };
        Ok(match node.kind {
            ffi::ScriptKind::Tensor => {
                Self::Tensor(tensors.get(node.count).ok_or_else(short)?.shallow_clone())
            }
            ffi::ScriptKind::Bool => Self::Bool(node.integer != 0),
            ffi::ScriptKind::Int => Self::Int(node.integer),
            ffi::ScriptKind::Float => Self::Float(node.number),
            ffi::ScriptKind::Text => Self::Text(node.text),
            ffi::ScriptKind::Tuple => Self::Tuple(elements(nodes)?),
            ffi::ScriptKind::List => Self::List(elements(nodes)?),
            ffi::ScriptKind::Dict => {
                let mut pairs = Vec::new();
                for _ in 0..node.count {
                    let key = nodes.next().ok_or_else(short)?.text;
                    pairs.push((key, Self::read(nodes, tensors)?));
                }
                Self::Dict(pairs)
            }
            _ => Self::None,
        })
    }
}

impl TensorTree for ScriptValue {
    type Owned = Self;

    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        match self {
            Self::Tensor(tensor) => f(tensor),
            Self::Tuple(values) | Self::List(values) => values.visit(f),
            Self::Dict(pairs) => pairs.iter().for_each(|(_, value)| value.visit(f)),
            Self::None | Self::Bool(_) | Self::Int(_) | Self::Float(_) | Self::Text(_) => {}
        }
    }

    fn try_map<E>(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
        Ok(match self {
            Self::None => Self::None,
            Self::Tensor(tensor) => Self::Tensor(f(tensor)?),
            Self::Bool(value) => Self::Bool(*value),
            Self::Int(value) => Self::Int(*value),
            Self::Float(value) => Self::Float(*value),
            Self::Text(value) => Self::Text(value.clone()),
            Self::Tuple(values) => Self::Tuple(values.try_map(f)?),
            Self::List(values) => Self::List(values.try_map(f)?),
            Self::Dict(pairs) => {
                let mapped = pairs.iter().map(|(key, value)| Ok((key.clone(), value.try_map(f)?)));
                Self::Dict(mapped.collect::<Result<_, E>>()?)
            }
        })
    }

    fn spec(&self) -> TreeSpec {
        match self {
            Self::None => TreeSpec::None,
            Self::Tensor(_) => TreeSpec::Tensor,
            Self::Bool(value) => TreeSpec::Bool(*value),
            Self::Int(value) => TreeSpec::Int(*value),
            Self::Float(value) => TreeSpec::Float(*value),
            Self::Text(value) => TreeSpec::Text(value.clone()),
            Self::Tuple(values) => TreeSpec::Tuple(values.iter().map(Self::spec).collect()),
            Self::List(values) => TreeSpec::List(values.iter().map(Self::spec).collect()),
            Self::Dict(pairs) => TreeSpec::Map(
                pairs.iter().map(|(key, value)| (key.clone(), value.spec())).collect(),
            ),
        }
    }

    fn from_spec(
        spec: &TreeSpec,
        tensors: &mut dyn Iterator<Item = Tensor>,
    ) -> Result<Self, Error> {
        let mut all = |parts: &[TreeSpec]| {
            parts.iter().map(|part| Self::from_spec(part, tensors)).collect::<Result<Vec<_>, _>>()
        };
        Ok(match spec {
            TreeSpec::None => Self::None,
            TreeSpec::Tensor => Self::Tensor(Tensor::from_spec(spec, tensors)?),
            TreeSpec::Bool(value) => Self::Bool(*value),
            TreeSpec::Int(value) => Self::Int(*value),
            TreeSpec::Float(value) => Self::Float(*value),
            TreeSpec::Text(value) => Self::Text(value.clone()),
            TreeSpec::Tuple(parts) => Self::Tuple(all(parts)?),
            TreeSpec::List(parts) => Self::List(all(parts)?),
            TreeSpec::Map(parts) => Self::Dict(
                parts
                    .iter()
                    .map(|(key, part)| Ok((key.clone(), Self::from_spec(part, tensors)?)))
                    .collect::<Result<_, Error>>()?,
            ),
        })
    }
}
