//! Allocation and initialisation of a deferred model's parameters.

use brigade_checkpoint::TensorReader;
use brigade_torch::{
    QuantizedWeight, Result, TensorId, TensorRead, has_memory, loaded_kind, read_tensors,
    release_memory,
};
use tch::{Device, Tensor};

use super::Model;
use crate::deferred::{DeferredValues, FileValues, ValueSource};
use crate::error::ModelError;
use crate::param_registry::Entry;
use crate::quantized::{QuantizeReport, Weights};
use crate::tensor_parallel::part_reads;

impl<M> Model<M> {
    /// Returns `true` if parameters have no memory yet; see [`Model::deferred`].
    #[must_use]
    pub fn is_deferred(&self) -> bool {
        self.deferred.is_some()
    }

    /// Allocates the parameters of a [deferred](Model::deferred) model and sets their values, all of them on this rank.
    /// Does nothing for other models. Needs memory for at most one parameter in addition to the model.
    ///
    /// # Errors
    /// [`ModelError::Torch`] if memory runs out; the errors of [`Model::load_weights`] for values that are read from a
    /// file. Only some parameters have values then, so build the model again.
    pub fn materialize(&mut self) -> Result<()> {
        self.materialize_as(&Weights::default()).map(drop)
    }

    /// Does the same as [`Model::materialize`], and quantises the selected weights. Weights that files have in a format
    /// of the kernels are kept as they are.
    pub(super) fn materialize_as(&mut self, weights: &Weights) -> Result<QuantizeReport> {
        let Some(values) = self.take_deferred_values() else {
            return Ok(QuantizeReport::default());
        };
        let mut filling = Filling::default();
        let device = self.device();
        values.for_each_source(|id, source| {
            let Some(entry) = self.distinct().find(|entry| TensorId::of(&entry.tensor) == id)
            else {
                return Ok(());
            };
            if let Some((slot, weight)) = self.quantized_value(entry, &source, device, weights)? {
                filling.packed(&weight)?;
                return self.set_quantized(&entry.name, slot, weight);
            }
            filling.set(&entry.name, allocated(entry, device)?, source)
        })?;
        filling.finish()?;
        self.freeze_quantized()
    }

    /// Takes the sources of the values of a [deferred](Model::deferred) model, for code that allocates the parameters
    /// itself, such as sharded training. `None` for other models.
    pub fn take_deferred_values(&mut self) -> Option<DeferredValues> {
        self.deferred.take()
    }

    /// Returns the values of parameters that have no memory yet.
    pub(crate) fn deferred_values(&mut self) -> Option<&mut DeferredValues> {
        self.deferred.as_mut()
    }

    /// Fails if parameters have no memory yet.
    pub(crate) fn check_values(&self, action: &'static str) -> Result<()> {
        match self.deferred {
            Some(_) => Err(ModelError::Deferred { action }.into()),
            None => Ok(()),
        }
    }
}

/// Values that tensors of a model get while it is loaded.
#[derive(Default)]
pub(super) struct Filling {
    /// Tensors that are read from files as they are, all together.
    files: Vec<(Tensor, FileValues)>,
    /// Number of bytes of quantised weights since unused memory was returned to the system.
    packed_bytes: usize,
}

/// Number of bytes of quantised weights after which unused memory is returned to the system.
const RELEASED_BYTES: usize = 4 << 20;

impl Filling {
    /// Sets a tensor's values, those of files in [`Filling::finish`].
    pub(super) fn set(&mut self, name: &str, tensor: Tensor, source: ValueSource) -> Result<()> {
        match source {
            ValueSource::Drawn(values) => {
                tch::no_grad(|| tensor.shallow_clone().f_copy_(&values))
                    .map_err(ModelError::torch(format!("give {name} its values")))?;
            }
            ValueSource::File(file) => self.files.push((tensor, file)),
        }
        Ok(())
    }

    /// Records that a weight was quantised or packed. The memory in which that was done lies between weights that stay,
    /// where the C library keeps it: it is returned to the system now and then.
    pub(super) fn packed(&mut self, weight: &QuantizedWeight) -> Result<()> {
        self.packed_bytes += weight.bytes();
        if self.packed_bytes >= RELEASED_BYTES { self.release() } else { Ok(()) }
    }

    fn release(&mut self) -> Result<()> {
        if std::mem::take(&mut self.packed_bytes) > 0 {
            release_memory(false)?;
        }
        Ok(())
    }

    /// Reads the values of files.
    pub(super) fn finish(mut self) -> Result<()> {
        self.release()?;
        let reads = self
            .files
            .iter()
            .map(|(tensor, file)| part_reads(file.reader()?, tensor, None, file.part.as_ref()));
        let reads = reads.collect::<Result<Vec<_>>>()?.into_iter().flatten();
        read_tensors(reads.collect(), ModelError::interrupted)
    }
}

/// Returns a parameter's tensor, with memory on a device.
pub(super) fn allocated(entry: &Entry, device: Device) -> Result<Tensor> {
    let mut tensor = entry.tensor.shallow_clone();
    if !has_memory(&tensor) {
        let mut allocate = || {
            let form = (tensor.f_kind()?, device);
            let memory = Tensor::f_empty_strided(tensor.size(), tensor.stride(), form)?;
            tensor.f_set_data(&memory)
        };
        tch::no_grad(&mut allocate)
            .map_err(ModelError::torch(format!("make room for {} on {device:?}", entry.name)))?;
    }
    Ok(tensor)
}

/// Reads a tensor of a file, in the file's type.
pub(super) fn whole(from: TensorReader<'_>) -> Result<Tensor> {
    let path = from.path().to_owned();
    let kind = loaded_kind(from.name(), from.info().dtype)
        .map_err(|fact| brigade_checkpoint::Error::Unsupported { path, fact })?;
    let shape: Vec<i64> = from.info().shape.iter().map(|size| size.cast_signed()).collect();
    let values = Tensor::f_empty(shape, (kind, Device::Cpu))?;
    TensorRead::whole(from, values.shallow_clone()).read()?;
    Ok(values)
}
