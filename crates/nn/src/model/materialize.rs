//! Allocation and initialisation of a deferred model's parameters.

use brigade_checkpoint::TensorReader;
use brigade_torch::{Result, TensorId, TensorRead, has_memory, loaded_kind};
use tch::{Device, Tensor};

use super::Model;
use crate::deferred::{DeferredValue, DeferredValues};
use crate::error::ModelError;
use crate::param_registry::Entry;
use crate::quantized::{Quantizable, QuantizeReport, QuantizedSlot, Weights};
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
        values.for_each(|id, value| {
            let Some(entry) = self.distinct().find(|entry| TensorId::of(&entry.tensor) == id)
            else {
                return Ok(());
            };
            let quantizable = self.quantizable.iter().find(|it| it.name == entry.name);
            if let (Some(Quantizable { slot, .. }), DeferredValue::File(from, None)) =
                (quantizable, &value)
                && weights.kind().is_none()
                && from.is_transposed() == slot.is_transposed
                && !self.is_tied(entry)
                && let Some(packed) = from.read_packed()?
            {
                let weight = QuantizedSlot::weight(&packed, &entry.tensor.size(), self.device())?;
                return self.set_quantized(&entry.name, slot, weight);
            }
            if let Some(Quantizable { layer, .. }) = quantizable
                && weights.chooses(layer)
            {
                let values = match value {
                    DeferredValue::Drawn(values) => values,
                    DeferredValue::File(from, _) => whole(from)?,
                };
                return self.quantize_one(&entry.name, &values, weights);
            }
            fill(entry, value)
        })?;
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

/// Allocates a parameter and sets its values.
fn fill(entry: &Entry, value: DeferredValue<'_>) -> Result<()> {
    let mut tensor = entry.tensor.shallow_clone();
    let mut allocate = || {
        if !has_memory(&tensor) {
            let options = (tensor.f_kind()?, tensor.device());
            let (size, strides) = (tensor.size(), tensor.stride());
            tensor.f_set_data(&Tensor::f_empty_strided(size, strides, options)?)?;
        }
        if let DeferredValue::Drawn(values) = &value {
            tensor.f_copy_(values)?;
        }
        Ok(())
    };
    tch::no_grad(&mut allocate)
        .map_err(ModelError::torch(format!("give {} its values", entry.name)))?;
    match value {
        DeferredValue::Drawn(_) => Ok(()),
        DeferredValue::File(from, part) => {
            let path = from.path().to_owned();
            let interrupted = |source| ModelError::Interrupted { path, source };
            let reads = part_reads(from, &tensor, None, part.as_ref())?;
            Ok(reads.into_iter().try_for_each(TensorRead::read).map_err(interrupted)?)
        }
    }
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
