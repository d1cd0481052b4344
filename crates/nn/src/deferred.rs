//! Deferred models: models whose parameters have no memory yet.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use brigade_checkpoint::{FileStamp, PackedWeight, TensorReader, WeightsReader};
use brigade_sharding::TensorPart;
use brigade_torch::{Error, Result, TensorId, WeightSource, rng_state, set_rng_state};
use indexmap::IndexMap;
use parking_lot::Mutex;
use tch::{Device, Kind, TchError, Tensor};

use crate::error::ModelError;
use crate::tensor_parallel::{part_reads, taken};

/// Sets the initial values of a tensor, all of them.
pub(crate) type FirstValues = Box<dyn FnOnce(&mut Tensor) -> Result<(), TchError> + Send>;

/// Initial values that are still to be drawn.
pub(crate) struct Draw {
    target: TensorId,
    /// Shape of the whole parameter.
    shape: Vec<i64>,
    /// Part of the parameter that this rank of a tensor group has.
    part: Option<TensorPart>,
    first_values: FirstValues,
}

/// Sources of the values of a [deferred](crate::Model::deferred) model's parameters. Created by
/// [`crate::Model::take_deferred_values`].
pub struct DeferredValues {
    /// Draws in the order in which the constructor requested them.
    draws: Vec<Draw>,
    /// State of libtorch's CPU generator at the end of the constructor.
    generator: Vec<u8>,
    /// Tensors that are not drawn: their place in a file, or `None` if they have their values.
    read: IndexMap<TensorId, Option<FileValues>>,
}

/// Tensor of open weights.
pub(crate) struct FileValues {
    pub(crate) weights: Arc<WeightsReader>,
    pub(crate) name: String,
    /// Part of the parameter that this rank of a tensor group has.
    pub(crate) part: Option<TensorPart>,
}

/// Source of the values of one tensor of a deferred model.
#[derive(Debug)]
pub enum DeferredValue<'a> {
    /// Random initial values: a float32 tensor on the CPU, of the parameter's shape. The function that gets it may keep
    /// or change it.
    Drawn(Tensor),
    /// Tensor of a weights file, of the parameter's shape. If the parameter is divided over the ranks of a tensor
    /// group, the tensor is that of the whole parameter, and the second field is this rank's part.
    File(TensorReader<'a>, Option<TensorPart>),
}

/// Source of the values of one tensor, which may be kept; see [`DeferredValue`].
pub(crate) enum ValueSource {
    Drawn(Tensor),
    File(FileValues),
}

impl DeferredValues {
    pub(crate) fn new(draws: Vec<Draw>) -> Result<Self> {
        Ok(Self { draws, generator: rng_state(Device::Cpu)?, read: IndexMap::new() })
    }

    /// Records that tensors are read from open weights, by the tensors' names in the weights.
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

    /// Records that a tensor has its values.
    pub(crate) fn keep(&mut self, tensor: TensorId) {
        self.read.insert(tensor, None);
    }

    /// Removes a tensor that is in a file from those that get values. Returns `None` for one that is drawn, or has its
    /// values.
    pub(crate) fn take_file(&mut self, tensor: TensorId) -> Option<FileValues> {
        self.read.get_mut(&tensor)?.take()
    }

    /// Calls a function with each tensor's values, one tensor at a time: first those that are drawn at random, in the
    /// order in which an undeferred model draws them, then those of files. Values are drawn from the state that
    /// libtorch's CPU generator had when the constructor returned. If the generator is still in that state, it
    /// advances, as with an undeferred model; otherwise its present state is restored afterwards. Nothing is drawn if
    /// all values come from files.
    ///
    /// # Errors
    /// Returns the first error of `set`; [`brigade_torch::ErrorKind::Tensor`] if there is not enough memory for a whole
    /// tensor.
    pub fn for_each(
        self,
        mut set: impl FnMut(TensorId, DeferredValue<'_>) -> Result<()>,
    ) -> Result<()> {
        self.for_each_source(|id, source| match source {
            ValueSource::Drawn(values) => set(id, DeferredValue::Drawn(values)),
            ValueSource::File(file) => {
                let part = file.part.clone();
                set(id, DeferredValue::File(file.reader()?, part))
            }
        })
    }

    /// Calls a function as [`DeferredValues::for_each`] does, with sources of files that can be kept.
    pub(crate) fn for_each_source(
        self,
        mut set: impl FnMut(TensorId, ValueSource) -> Result<()>,
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
                    // A value that is drawn again later, or read, takes its numbers from the generator all the same.
                    let Some(left) = draws_left.get_mut(&target) else { return Ok(()) };
                    *left -= 1;
                    if *left == 0 { set(target, ValueSource::Drawn(values)) } else { Ok(()) }
                });
            if moved {
                set_rng_state(Device::Cpu, &now)?;
            }
            drawn?;
        }
        let files = read.into_iter().filter_map(|(id, file)| Some((id, file?)));
        for (id, file) in files {
            set(id, ValueSource::File(file))?;
        }
        Ok(())
    }
}

/// First read of a tensor that may be read again.
struct FirstRead {
    stamp: FileStamp,
    /// CRC-32 of the values.
    checksum: u32,
}

impl FileValues {
    /// Returns a source that reads the values from the file each time. If the file has changed since the first read, so
    /// that the tensor has other values, the read fails.
    pub(crate) fn into_source(self) -> WeightSource {
        let first = Mutex::new(None);
        WeightSource::Read(Arc::new(move |into| self.read(into, &mut first.lock())))
    }

    /// Returns the same as [`FileValues::into_source`], for a weight that is quantised in the file.
    pub(crate) fn into_packed_source(self) -> impl FnMut() -> Result<PackedWeight> + Send + use<> {
        let mut first = None;
        move || {
            let from = self.reader()?;
            let failed = |source| weight_read(from, source);
            let stamp = from.stamp().map_err(|error| failed(error.into()))?;
            let packed = from.read_packed().map_err(|error| failed(error.into()))?;
            let packed = packed.ok_or_else(|| no_tensor(&self.name))?;
            compare(&mut first, stamp, from, || {
                let mut hasher = crc32fast::Hasher::new();
                hasher.update(&packed.packed);
                packed.scales.iter().for_each(|scale| hasher.update(&scale.to_le_bytes()));
                Ok(hasher.finalize())
            })?;
            Ok(packed)
        }
    }

    /// Returns the reader of the tensor in its file.
    pub(crate) fn reader(&self) -> Result<TensorReader<'_>> {
        self.weights.get(&self.name).ok_or_else(|| no_tensor(&self.name))
    }

    fn read(&self, into: &Tensor, first: &mut Option<FirstRead>) -> Result<()> {
        let from = self.reader()?;
        let failed = |source| weight_read(from, source);
        let stamp = from.stamp().map_err(|error| failed(error.into()))?;
        for read in part_reads(from, into, None, self.part.as_ref())? {
            // The ring of weights reads several tensors at the same time.
            read.read_in_this_thread().map_err(failed)?;
        }
        compare(first, stamp, from, || checksum(into))
    }
}

fn weight_read(from: TensorReader<'_>, source: Error) -> ModelError {
    ModelError::WeightRead { name: from.name().to_owned(), path: from.path().to_owned(), source }
}

/// Fails if a tensor has other values than at its first read. They are compared only if its file has changed since.
fn compare(
    first: &mut Option<FirstRead>,
    stamp: FileStamp,
    from: TensorReader<'_>,
    checksum: impl FnOnce() -> Result<u32>,
) -> Result<()> {
    match first {
        Some(first) if first.stamp == stamp => {}
        Some(first) => {
            if checksum()? != first.checksum {
                let name = from.name();
                let fact = format!(
                    "`{name}` was changed while the model was in use: load the model again"
                );
                let path = from.path().to_owned();
                return Err(brigade_checkpoint::Error::Damaged { path, fact }.into());
            }
            first.stamp = stamp;
        }
        None => *first = Some(FirstRead { stamp, checksum: checksum()? }),
    }
    Ok(())
}

fn checksum(tensor: &Tensor) -> Result<u32> {
    let bytes = brigade_torch::bytes(tensor)?;
    let mut hasher = crc32fast::Hasher::new();
    bytes.try_chunks(CHECKED_BYTES, |chunk| {
        hasher.update(chunk);
        Ok::<_, Error>(())
    })?;
    Ok(hasher.finalize())
}

/// Bytes of which a checksum is taken at a time: few enough for the processor's cache.
const CHECKED_BYTES: usize = 1 << 16;

fn no_tensor(name: &str) -> Error {
    Error::invalid_argument(format!("the open weights have no tensor `{name}`"))
}

impl Draw {
    /// Creates a draw. `part` is the tensor's part of the whole parameter that the function sets.
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

/// Initial values, as float32 on the CPU: one seed gives one model on every device and in every kind.
pub(crate) fn filled(shape: &[i64], first_values: FirstValues) -> Result<Tensor, TchError> {
    let mut values = Tensor::f_empty(shape, (Kind::Float, Device::Cpu))?;
    first_values(&mut values)?;
    Ok(values)
}

/// Returns the error message for reads of a parameter before it has its values.
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
