//! Quantisation of a model's weights to 8 or 4 bits.

use brigade_torch::{Error, QuantizedWeight, Result, unallocated};
use tch::{Device, Kind, TchError, Tensor};

use super::Model;
use super::conversion::Conversion;
use super::materialize::whole;
use crate::deferred::ValueSource;
use crate::error::ModelError;
use crate::param_registry::{Entry, Role};
use crate::quantized::{Quantizable, QuantizeReport, QuantizedSlot, Weights};

impl<M> Model<M> {
    /// Quantises the weights of linear layers to 8 or 4 bits, or converts all weights to another floating-point kind.
    /// The parameters of a deferred model are allocated, as by [`Model::materialize`]: each weight is read or drawn,
    /// quantised and freed, so that at most one whole weight is in memory beside the result.
    ///
    /// Weights that are quantised in their files keep that format, except with [`Weights::float`].
    ///
    /// From then on the model is for inference: it is in evaluation mode, parameters are frozen, and a quantised weight
    /// has a name and a shape but no floating-point values. Layers compute by [`QuantizedWeight::linear`].
    /// [`Model::save_quantized`] writes the quantised weights.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model, ParamPath, Relu, Sequential, Weights};
    /// use tch::{Kind, Tensor};
    ///
    /// let mut model = Model::new(|path: &ParamPath| {
    ///     Sequential::new().add(Linear::new(path / 0, 64, 32)).add(Relu).add(Linear::new(path / "head", 32, 10))
    /// })?;
    /// let report = model.quantize(&Weights::int8())?;
    /// assert_eq!(report.layers, ["0"]); // the head stays as it is
    /// assert_eq!(report.bytes, 32 * 64 + 32 * 2);
    /// let input = Tensor::ones([2, 64], (Kind::Float, model.device()));
    /// assert_eq!(model.forward(&input)?.size(), [2, 10]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`], with nothing changed, for layers whose number of input features
    /// is not divisible by the group size, a pattern that matches no layer, a head that shares the embedding's weight,
    /// and a model that is divided over ranks or sharded. Fails for a weight with values that are infinite or NaN, and
    /// if memory runs out; some weights are quantised then.
    pub fn quantize(&mut self, weights: &Weights) -> Result<QuantizeReport> {
        self.check_quantizable(weights)?;
        if let Some(kind) = weights.kind() {
            self.to_kind(kind)?;
        }
        if self.is_deferred() {
            return self.materialize_as(weights);
        }
        let chosen: Vec<Quantizable> = self.chosen(weights).map(|(it, _)| it.clone()).collect();
        for Quantizable { name, slot, .. } in chosen {
            if !slot.is_set()
                && let Some(tensor) = self.tensor(&name)
            {
                let weight = quantized(&name, &slot, &tensor.detach(), self.device, weights)?;
                if let Some(weight) = weight {
                    self.set_quantized(&name, &slot, weight)?;
                }
            }
        }
        self.freeze_quantized()
    }

    /// Returns `true` if weights are quantised.
    #[must_use]
    pub fn is_quantized(&self) -> bool {
        self.quantizable.iter().any(|it| it.slot.is_set())
    }

    /// Returns the quantised weight `[out, in]` of a parameter, or `None` if it is not quantised.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model, Weights};
    ///
    /// let mut model = Model::new(|path| Linear::new(path / "fc", 32, 8))?;
    /// assert!(model.quantized_weight("fc.weight").is_none());
    /// model.quantize(&Weights::int8())?;
    /// assert_eq!(model.quantized_weight("fc.weight").unwrap().size(), [8, 32]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[must_use]
    pub fn quantized_weight(&self, parameter: &str) -> Option<QuantizedWeight> {
        self.slot(parameter)?.get()
    }

    /// Returns an error if weights are quantised, for an action that needs floating-point values.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`].
    pub fn check_not_quantized(&self, action: &str) -> Result<()> {
        let Some(first) = self.quantizable.iter().find(|it| it.slot.is_set()) else {
            return Ok(());
        };
        Err(Error::invalid_argument(format!(
            "{action}: `{}` is quantised, and a quantised model is for inference: train and save the model before it is \
             quantised; `save_quantized` writes it as it is",
            first.name
        )))
    }

    /// Returns the slot of a parameter's quantised weight, if it is quantised.
    pub(crate) fn quantized_slot(&self, parameter: &str) -> Option<&QuantizedSlot> {
        self.slot(parameter).filter(|slot| slot.is_set())
    }

    /// Returns the slot of a parameter's quantised weight, if its layer can compute with one.
    pub(crate) fn slot(&self, parameter: &str) -> Option<&QuantizedSlot> {
        Some(&self.quantizable.iter().find(|it| it.name == parameter)?.slot)
    }

    /// Returns a value as a quantised weight, if it is one in its file or is to become one.
    pub(super) fn quantized_value(
        &self,
        entry: &Entry,
        source: &ValueSource,
        device: Device,
        weights: &Weights,
    ) -> Result<Option<(&QuantizedSlot, QuantizedWeight)>> {
        let Some((layer, slot)) = self.quantizable(entry) else { return Ok(None) };
        if let ValueSource::File(file) = source
            && file.part.is_none()
            && weights.kind().is_none()
            && let from = file.reader()?
            && from.is_transposed() == slot.is_transposed
            && let Some(packed) = from.read_packed()?
        {
            let weight = QuantizedSlot::weight(&packed, &entry.tensor.size(), device)?;
            return Ok(Some((slot, weight)));
        }
        if !weights.chooses(layer) {
            return Ok(None);
        }
        let values = match source {
            ValueSource::Drawn(values) => values.shallow_clone(),
            ValueSource::File(file) => whole(file.reader()?)?,
        };
        let weight = quantized(&entry.name, slot, &values, device, weights)?;
        Ok(weight.map(|weight| (slot, weight)))
    }

    /// Returns the layer and the slot of a parameter that can be quantised, and that no other layer has.
    pub(super) fn quantizable(&self, entry: &Entry) -> Option<(&str, &QuantizedSlot)> {
        let found = self.quantizable.iter().find(|it| it.name == entry.name)?;
        (!self.is_tied(entry)).then_some((&found.layer, &found.slot))
    }

    /// Sets a layer's quantised weight, and frees the memory of the parameter.
    pub(super) fn set_quantized(
        &self,
        name: &str,
        slot: &QuantizedSlot,
        weight: QuantizedWeight,
    ) -> Result<()> {
        if let Some(mut tensor) = self.tensor(name) {
            let place = (tensor.f_kind()?, tensor.device());
            let empty = unallocated(&tensor.size(), None, place, &no_values(name))?;
            tch::no_grad(|| tensor.f_set_data(&empty))
                .map_err(ModelError::torch(format!("take the memory of {name}")))?;
        }
        slot.set(weight);
        Ok(())
    }

    /// Returns the report of the quantised layers, and of those of them without a kernel for inputs of the type that
    /// their parameters had. Its `Display` text is one line for the start of a program's log. Autocast gives the layers
    /// other inputs.
    #[must_use]
    pub fn quantize_report(&self) -> QuantizeReport {
        let mut report = QuantizeReport::default();
        for Quantizable { name, layer, slot } in &self.quantizable {
            if let Some(weight) = slot.get() {
                let kind = self.tensor(name).map_or(Kind::Float, |it| it.kind());
                report.add(layer, &weight, kind);
            }
        }
        report
    }

    /// Switches a model with quantised weights to evaluation mode, without gradients.
    pub(super) fn freeze_quantized(&mut self) -> Result<QuantizeReport> {
        let report = self.quantize_report();
        if !report.layers.is_empty() {
            self.requires_grad(false)?;
            self.eval();
        }
        Ok(report)
    }

    /// Returns the parameters that are to be quantised.
    fn chosen<'m>(
        &'m self,
        weights: &'m Weights,
    ) -> impl Iterator<Item = (&'m Quantizable, &'m Entry)> {
        let chosen = self.quantizable.iter().filter(|it| weights.chooses(&it.layer));
        chosen.filter_map(|it| Some((it, self.entries.iter().find(|entry| entry.name == it.name)?)))
    }

    /// Returns `true` if another layer has the parameter, too.
    pub(super) fn is_tied(&self, entry: &Entry) -> bool {
        let place = self.entries.iter().position(|other| other.name == entry.name);
        matches!(entry.role, Role::SameAs(_))
            || self
                .entries
                .iter()
                .any(|other| matches!(other.role, Role::SameAs(first) if Some(first) == place))
    }

    pub(super) fn check_quantizable(&self, weights: &Weights) -> Result<()> {
        let layers: Vec<&str> = self.quantizable.iter().map(|it| it.layer.as_str()).collect();
        if let [pattern, ..] = weights.unmatched(&layers)[..] {
            return Err(Error::invalid_argument(format!(
                "quantize: `{pattern}` matches no linear layer with an untied weight; the layers are {}",
                some_of(&layers)
            )));
        }
        let Some(format) = weights.format() else { return Ok(()) };
        if self.is_sharded {
            return Err(Error::invalid_argument(
                "quantize: the parameters are spread over ranks; quantise a model of one process",
            ));
        }
        self.check_undivided("quantize")?;
        for (Quantizable { name, slot, .. }, entry) in self.chosen(weights) {
            if self.is_tied(entry) {
                return Err(Error::invalid_argument(format!(
                    "quantize: `{name}` is also the weight of another layer, such as the embedding, which needs its \
                     values; leave it out"
                )));
            }
            let size = entry.tensor.size();
            let inputs = if slot.is_transposed { size.first() } else { size.last() };
            let columns = inputs.map_or(0, |size| size.unsigned_abs());
            format.check(columns as usize).map_err(|error| named(name, &error.into()))?;
        }
        Ok(())
    }
}

impl QuantizedSlot {
    /// Moves a quantised weight to another device; its numbers have no other types or memory formats. `tensor` is the
    /// parameter, which has no memory.
    pub(super) fn convert(
        &self,
        to: Conversion,
        tensor: &mut Tensor,
        name: &str,
    ) -> std::result::Result<(), TchError> {
        let refused = |error: Error| TchError::Torch(error.to_string());
        let (kind, mut device): (Kind, _) = (tensor.f_kind()?, tensor.device());
        if let (Conversion::Device(to), Some(weight)) = (to, self.get()) {
            self.set(weight.to_device(to).map_err(refused)?);
            device = to;
        }
        let kind = if let Conversion::Kind(to) = to { to } else { kind };
        let empty = unallocated(&tensor.size(), None, (kind, device), &no_values(name));
        tensor.f_set_data(&empty.map_err(refused)?)
    }
}

/// Quantises the values of a parameter, which are `[in, out]` if the layer has them transposed, for a device. Returns
/// `None` if `weights` have no quantised format.
fn quantized(
    name: &str,
    slot: &QuantizedSlot,
    values: &Tensor,
    device: Device,
    weights: &Weights,
) -> Result<Option<QuantizedWeight>> {
    let Some(format) = weights.format() else { return Ok(None) };
    let values =
        if slot.is_transposed { values.f_transpose(0, 1)? } else { values.shallow_clone() };
    let weight = QuantizedWeight::new(&values, format, weights.is_calibrated());
    let on_device = weight.and_then(|weight| {
        if weight.device() == device { Ok(weight) } else { weight.to_device(device) }
    });
    on_device.map(Some).map_err(|error| named(name, &error))
}

fn named(name: &str, error: &Error) -> Error {
    Error::invalid_argument(format!("quantize: `{name}`: {error}"))
}

/// Returns the error message for reads of a quantised parameter.
fn no_values(name: &str) -> String {
    format!(
        "parameter `{name}` is quantised and has no floating-point values: a quantised model is for inference, and \
         `save_quantized` writes it; load the original weights for anything else"
    )
}

fn some_of(layers: &[&str]) -> String {
    const SHOWN: usize = 12;
    let more = if layers.len() > SHOWN { ", …" } else { "" };
    format!("{}{more}", layers[..layers.len().min(SHOWN)].join(", "))
}
