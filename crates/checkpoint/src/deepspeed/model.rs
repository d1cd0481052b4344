//! File of a model's states: names, shapes, and tensors that the optimizer lacks.

use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;

use super::files::TENSOR_PARALLEL;
use super::flat::Flat;
use super::optimizer::{Masters, RankStates};
use crate::error::Error;
use crate::fault::Fault;
use crate::file_tensor::FileTensor;
use crate::pth::{PthFile, StoredTensor, shown};
use crate::value::Value;

type Tree = Value<StoredTensor>;

/// An open file of a model's states.
#[derive(Debug)]
pub(super) struct ModelStates {
    file: Arc<Mutex<PthFile>>,
    tree: Tree,
}

/// Name and shape of a parameter.
#[derive(Debug)]
pub(super) struct Shape {
    pub(super) name: String,
    pub(super) shape: Vec<u64>,
    pub(super) elements: u64,
}

impl ModelStates {
    /// Opens a file of model states.
    ///
    /// # Errors
    /// Fails if the file is damaged, or with [`Error::Unsupported`] for model or expert parallelism.
    pub(super) fn open(path: &Path) -> Result<Self, Error> {
        let file = PthFile::open(path)?;
        let tree = file.value_with_sizes()?;
        let degree = |key: &str| tree.get("checkpoint_parallel_dimensions")?.get(key)?.as_int();
        let refuse =
            |fact: &str| Error::Unsupported { path: path.to_owned(), fact: fact.to_owned() };
        let sizes = [
            tree.get("mp_world_size").and_then(Value::as_int),
            degree("pp_degree"),
            degree("tp_degree"),
        ];
        if sizes.iter().flatten().any(|size| *size > 1) {
            return Err(refuse(TENSOR_PARALLEL));
        }
        for key in ["ds_autoep_layers", "autoep_layers"] {
            if tree.get(key).is_some_and(|layers| !matches!(layers, Value::None)) {
                return Err(refuse(
                    "its experts are spread by DeepSpeed's expert parallelism, which is not read: gather the weights \
                     in the run that saved them",
                ));
            }
        }
        Ok(Self { file: Arc::new(Mutex::new(file)), tree })
    }

    /// Returns the number of steps, skipped ones included.
    pub(super) fn step(&self) -> Option<u64> {
        u64::try_from(self.tree.get("global_steps")?.as_int()?).ok()
    }

    /// Returns the number of steps that were skipped because gradients had overflowed.
    pub(super) fn skipped_steps(&self) -> Option<u64> {
        u64::try_from(self.tree.get("skipped_steps")?.as_int()?).ok()
    }

    /// Returns the state of the engine's scheduler. `None` unless it is a dictionary.
    pub(super) fn scheduler(&self) -> Option<Value<FileTensor>> {
        let state = self.tree.get("lr_scheduler").filter(|state| state.as_dict().is_some())?;
        let stored = |tensor| Ok::<_, Error>(FileTensor::stored(&self.file, tensor));
        state.clone().try_map(&mut |_, tensor| stored(tensor)).ok()
    }

    /// Returns the trained parameters by group, in the optimizer's order.
    pub(super) fn shapes(&self) -> Result<Vec<Vec<Shape>>, Fault> {
        let groups = self.tree.get("param_shapes");
        let groups = match groups {
            Some(Value::List(groups) | Value::Tuple(groups)) => groups.as_slice(),
            Some(group @ Value::Dict(_)) => std::slice::from_ref(group),
            _ => {
                return Err(Fault::unsupported(
                    "it has no `param_shapes`, which DeepSpeed writes with ZeRO; convert this file alone with the key \
                     `module`",
                ));
            }
        };
        groups.iter().map(shapes).collect()
    }

    /// Returns the shapes of the frozen parameters. Empty if they were not saved.
    pub(super) fn frozen(&self) -> Result<Vec<Shape>, Fault> {
        let is_saved = self.tree.get("frozen_param_fragments").and_then(Value::as_dict).is_some();
        match self.tree.get("frozen_param_shapes").filter(|_| is_saved) {
            None | Some(Value::None) => Ok(Vec::new()),
            Some(group) => shapes(group),
        }
    }

    /// Returns this rank's elements of a frozen parameter.
    pub(super) fn fragment(&self, name: &str) -> Result<Flat, Fault> {
        let fragments = self.tree.get("frozen_param_fragments");
        match fragments.and_then(|fragments| fragments.get(name)) {
            Some(Value::Tensor(tensor)) => Flat::of(&self.file.lock(), tensor),
            _ => Err(Fault::damaged("`frozen_param_fragments` does not have it")),
        }
    }

    /// Returns the names of the module's buffers.
    pub(super) fn buffers(&self) -> Vec<&str> {
        let names = self.tree.get("buffer_names").and_then(Value::as_items).unwrap_or_default();
        names.iter().filter_map(Value::as_str).collect()
    }

    /// Iterates over the tensors of the module, as the rank has them.
    pub(super) fn module(&self) -> impl Iterator<Item = (&str, FileTensor)> {
        self.stored().map(|(name, tensor)| (name, FileTensor::stored(&self.file, tensor.clone())))
    }

    /// Iterates over the places of the module's tensors.
    pub(super) fn stored(&self) -> impl Iterator<Item = (&str, &StoredTensor)> {
        let entries = self.tree.get("module").and_then(Value::as_dict).unwrap_or_default();
        entries.iter().filter_map(|(name, value)| match (name, value) {
            (Value::Str(name), Value::Tensor(tensor)) => Some((name.as_str(), tensor)),
            _ => None,
        })
    }

    /// Locates the elements of a tensor of this file.
    pub(super) fn flat(&self, tensor: &StoredTensor) -> Result<Flat, Fault> {
        Flat::of(&self.file.lock(), tensor)
    }

    /// Reads the optimizer of a run without ZeRO. `None` if it is in files of its own.
    pub(super) fn optimizer(&self, path: &Path) -> Result<Option<(RankStates, Masters)>, Fault> {
        match self.tree.get("optimizer").filter(|it| it.as_dict().is_some()) {
            Some(state) => RankStates::whole(path, &self.file, state).map(Some),
            None => Ok(None),
        }
    }

    /// Iterates over tied parameters: the name, and the name of the parameter that it shares.
    pub(super) fn shared(&self) -> impl Iterator<Item = (&str, &str)> {
        let entries = self.tree.get("shared_params").and_then(Value::as_dict).unwrap_or_default();
        entries.iter().filter_map(|(name, other)| Some((name.as_str()?, other.as_str()?)))
    }
}

fn shapes(group: &Tree) -> Result<Vec<Shape>, Fault> {
    let entries = group.as_dict().ok_or_else(|| {
        Fault::damaged("`param_shapes` does not have dictionaries of names and sizes")
    })?;
    let shape = |(name, size): &(Tree, Tree)| {
        let sizes = size.as_items()?.iter().map(|size| u64::try_from(size.as_int()?).ok());
        let shape =
            sizes.collect::<Option<Vec<u64>>>().filter(|sizes| sizes.len() <= MAX_DIMENSIONS)?;
        let elements = shape.iter().try_fold(1u64, |all, size| all.checked_mul(*size))?;
        Some(Shape { name: name.as_str()?.to_owned(), shape, elements })
    };
    let about = |entry: &(Tree, Tree)| {
        let name = shown(entry.0.as_str().unwrap_or_default());
        Fault::damaged(format_args!("`param_shapes` has no size for `{name}`"))
    };
    entries.iter().map(|entry| shape(entry).ok_or_else(|| about(entry))).collect()
}

const MAX_DIMENSIONS: usize = 32;
