//! Models whose parameters have no memory yet.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use brigade_checkpoint::{TensorReader, WeightsReader};
use brigade_sharding::TensorPart;
use brigade_torch::{Error, Result, TensorId, rng_state, set_rng_state};
use indexmap::IndexMap;
use tch::{Device, Kind, TchError, Tensor};

use crate::tensor_parallel::taken;

/// Sets the first values of a tensor, all of them.
pub(crate) type FirstValues = Box<dyn FnOnce(&mut Tensor) -> Result<(), TchError> + Send>;

/// First values that are still to be drawn.
pub(crate) struct Draw {
    target: TensorId,
    /// Of the whole parameter.
    shape: Vec<i64>,
    /// What this rank of a tensor group has of it.
    part: Option<TensorPart>,
    first_values: FirstValues,
}

/// The values that the parameters of a [deferred](crate::Model::deferred) model are to have. Made by
/// [`crate::Model::take_deferred_values`].
pub struct DeferredValues {
    /// In the order in which the constructor asked for them.
    draws: Vec<Draw>,
    /// The state of libtorch's CPU generator when the constructor had returned.
    generator: Vec<u8>,
    /// Tensors that are not drawn: where they are read, or `None` where they have their values.
    read: IndexMap<TensorId, Option<FileValues>>,
}

/// A tensor of open weights.
struct FileValues {
    weights: Arc<WeightsReader>,
    name: String,
    /// What this rank of a tensor group has of it.
    part: Option<TensorPart>,
}

/// The values of one tensor of a deferred model.
#[derive(Debug)]
pub enum DeferredValue<'a> {
    /// As drawn: float32, on the CPU, of the parameter's shape. The function that gets it may keep it, or change it.
    Drawn(Tensor),
    /// In a file, whose tensor has the parameter's shape; the whole parameter's where ranks of a tensor group divide it, with
    /// this rank's part.
    File(TensorReader<'a>, Option<TensorPart>),
}

impl DeferredValues {
    pub(crate) fn new(draws: Vec<Draw>) -> Result<Self> {
        Ok(Self { draws, generator: rng_state(Device::Cpu)?, read: IndexMap::new() })
    }

    /// Notes that tensors are read from open weights, by the tensors' names there.
    pub(crate) fn read_later(
        &mut self,
        weights: WeightsReader,
        tensors: impl Iterator<Item = (String, TensorId, Option<TensorPart>)>,
    ) {
        let weights = Arc::new(weights);
        self.read.extend(tensors.map(|(name, id, part)| {
            (id, Some(FileValues { weights: Arc::clone(&weights), name, part }))
        }));
    }

    /// Notes that a tensor has its values.
    pub(crate) fn keep(&mut self, tensor: TensorId) {
        self.read.insert(tensor, None);
    }

    /// Passes each tensor's values to a function, one tensor at a time: first those that are drawn, in the order in which an
    /// undeferred model draws them, then those of files. Values are drawn from the state that libtorch's CPU generator had
    /// when the constructor had returned. Where the generator is still in that state it goes on from there, as with an
    /// undeferred model; else it is put back into the state that it has now. Nothing is drawn where all values come from
    /// files.
    ///
    /// # Errors
    /// Those of `set`, which ends with the first; [`brigade_torch::ErrorKind::Tensor`] when memory for one whole tensor runs
    /// out.
    pub fn for_each(
        self,
        mut set: impl FnMut(TensorId, DeferredValue<'_>) -> Result<()>,
    ) -> Result<()> {
        let Self { draws, generator, read } = self;
        let mut draws_left: HashMap<TensorId, usize> = HashMap::new();
        for draw in draws.iter().filter(|draw| !read.contains_key(&draw.target)) {
            *draws_left.entry(draw.target).or_default() += 1;
        }
        if !draws_left.is_empty() {
            let now = rng_state(Device::Cpu)?;
            let moved = now != generator;
            if moved {
                set_rng_state(Device::Cpu, &generator)?;
            }
            let drawn =
                draws.into_iter().try_for_each(|Draw { target, shape, part, first_values }| {
                    let values = tch::no_grad(|| {
                        let whole = filled(&shape, first_values)?;
                        part.as_ref().map_or(Ok(whole.shallow_clone()), |part| taken(&whole, part))
                    })?;
                    // What is drawn again later, or read, takes its numbers from the generator all the same.
                    let Some(left) = draws_left.get_mut(&target) else { return Ok(()) };
                    *left -= 1;
                    if *left == 0 { set(target, DeferredValue::Drawn(values)) } else { Ok(()) }
                });
            if moved {
                set_rng_state(Device::Cpu, &now)?;
            }
            drawn?;
        }
        let files = read.into_iter().filter_map(|(id, file)| Some((id, file?)));
        for (id, FileValues { weights, name, part }) in files {
            let reader = weights.get(&name).ok_or_else(|| {
                Error::invalid_argument(format!("the open weights have no tensor `{name}`"))
            })?;
            set(id, DeferredValue::File(reader, part))?;
        }
        Ok(())
    }
}

impl Draw {
    /// `part` is what the tensor is of the whole parameter that the function sets.
    pub(crate) fn new(
        tensor: &Tensor,
        part: Option<TensorPart>,
        first_values: FirstValues,
    ) -> Self {
        let whole =
            |part: &TensorPart| part.shape().iter().map(|size| size.cast_signed()).collect();
        let shape = part.as_ref().map_or_else(|| tensor.size(), whole);
        Self { target: TensorId::of(tensor), shape, part, first_values }
    }
}

/// First values, as float32 on the CPU: one seed gives one model on every device and in every kind.
pub(crate) fn filled(shape: &[i64], first_values: FirstValues) -> Result<Tensor, TchError> {
    let mut values = Tensor::f_empty(shape, (Kind::Float, Device::Cpu))?;
    first_values(&mut values)?;
    Ok(values)
}

/// The text of errors for reads of a parameter before it has its values.
pub(crate) fn no_memory(name: &str) -> String {
    format!(
        "parameter `{name}` has no memory yet, since its model was built by `Model::deferred`: give the model to \
         `Accelerator::prepare`, or call `materialize`, before its values are used"
    )
}

impl fmt::Debug for Draw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Draw").field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl fmt::Debug for DeferredValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeferredValues")
            .field("draws", &self.draws.len())
            .field("read", &self.read.len())
            .finish_non_exhaustive()
    }
}
