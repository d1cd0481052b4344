//! Layers whose weights are quantised.
//!
//! A layer that can compute with a quantised weight has a `QuantizedSlot` from its path. `Model::quantize` fills the
//! slots and frees the parameters' memory.

use std::sync::Arc;

use brigade_checkpoint::{PackedWeight, QuantizedFormat, is_head_layer, matches_pattern};
use brigade_torch::{QuantizedWeight, Result};
use parking_lot::Mutex;
use tch::{Device, Kind};

/// Settings of the weights of a model's linear layers for inference: the format, and the layers to which it applies.
///
/// Embeddings, norms, biases and heads stay as they are; heads are layers named `lm_head`, `embed_out`, `head`,
/// `score`, `classifier`, `qa_outputs`, `decoder` or below `cls`. [`Weights::also`] and [`Weights::skip`] change the
/// choice. In a pattern `*` stands for any characters; it is compared with the layer's whole name, such as
/// `model.layers.0.mlp.up_proj`.
///
/// ```
/// use brigade_nn::Weights;
///
/// let weights = Weights::int4(128).calibrated().also("lm_head").skip("*.mlp.down_proj");
/// assert!(weights.chooses("model.layers.0.mlp.up_proj") && weights.chooses("lm_head"));
/// assert!(!weights.chooses("model.layers.0.mlp.down_proj"));
/// assert!(!Weights::default().chooses("model.layers.0.mlp.up_proj"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use = "give it to `Model::quantize`"]
pub struct Weights {
    format: Option<QuantizedFormat>,
    kind: Option<Kind>,
    is_calibrated: bool,
    also: Vec<String>,
    skipped: Vec<String>,
}

impl Weights {
    /// Returns the format of floating-point weights. By default they keep the kind that the model was built with.
    pub fn float(kind: Kind) -> Self {
        Self { kind: Some(kind), ..Self::default() }
    }

    /// Returns the format of 8-bit integers with a scale for each output feature: 8 bits per weight and 16 per row.
    pub fn int8() -> Self {
        Self::quantized(QuantizedFormat::Int8)
    }

    /// Returns the format of 4-bit integers with a scale and a zero point for each `group` of input features.
    /// libtorch's kernels support groups of 32, 64 or 128, which take 5.0, 4.5 or 4.25 bits per weight.
    pub fn int4(group: usize) -> Self {
        Self::quantized(QuantizedFormat::Int4 { group })
    }

    /// Returns the format of 8-bit floats (`float8_e4m3fn`) with a scale for each output feature.
    pub fn fp8() -> Self {
        Self::quantized(QuantizedFormat::Fp8)
    }

    /// Returns the settings for a quantised format.
    pub fn quantized(format: QuantizedFormat) -> Self {
        Self { format: Some(format), ..Self::default() }
    }

    /// Chooses the ranges with the least squared error instead of those of the largest values; see
    /// [`PackedWeight::quantize`](brigade_checkpoint::PackedWeight::quantize).
    pub fn calibrated(mut self) -> Self {
        self.is_calibrated = true;
        self
    }

    /// Also quantises the layers that match a pattern, such as `lm_head`.
    pub fn also(mut self, pattern: impl Into<String>) -> Self {
        self.also.push(pattern.into());
        self
    }

    /// Excludes the layers that match a pattern. Takes precedence over [`Weights::also`].
    pub fn skip(mut self, pattern: impl Into<String>) -> Self {
        self.skipped.push(pattern.into());
        self
    }

    /// Returns the quantised format, or `None` if weights stay floating-point numbers.
    #[must_use]
    pub fn format(&self) -> Option<QuantizedFormat> {
        self.format
    }

    /// Returns the kind that was passed to [`Weights::float`]. `None` if none was set.
    #[must_use]
    pub fn kind(&self) -> Option<Kind> {
        self.kind
    }

    /// Returns `true` if ranges are chosen by the least squared error ([`Weights::calibrated`]).
    #[must_use]
    pub fn is_calibrated(&self) -> bool {
        self.is_calibrated
    }

    /// Returns `true` if the weight of a linear layer of this name is to be quantised.
    #[must_use]
    pub fn chooses(&self, layer: &str) -> bool {
        let has = |patterns: &[String]| patterns.iter().any(|it| matches_pattern(it, layer));
        self.format.is_some() && !has(&self.skipped) && (has(&self.also) || !is_head_layer(layer))
    }

    /// Returns the patterns that match none of these layers.
    pub(crate) fn unmatched(&self, layers: &[&str]) -> Vec<&str> {
        let patterns = self.also.iter().chain(&self.skipped).map(String::as_str);
        patterns.filter(|pattern| !layers.iter().any(|it| matches_pattern(pattern, it))).collect()
    }
}

/// Shared slot from which a layer reads its weight once it is quantised, from [`crate::ParamPath::quantizable`]. Clones
/// share the slot.
///
/// ```
/// use brigade_nn::{Init, Model, Module, ParamPath, QuantizedSlot, Weights};
/// use brigade_torch::{Result, linear};
/// use tch::{Kind, Tensor};
///
/// struct Product { weight: Tensor, quantized: QuantizedSlot }
///
/// impl Module<&Tensor> for Product {
///     type Output = Tensor;
///     fn forward(&self, input: &Tensor) -> Result<Tensor> {
///         match self.quantized.get() {
///             Some(weight) => weight.linear(input, None),
///             None => linear(input, &self.weight, None),
///         }
///     }
/// }
///
/// let mut model = Model::new(|path: &ParamPath| Product {
///     weight: path.parameter("weight", &[8, 32], Init::KaimingUniform),
///     quantized: path.quantizable("weight", false),
/// })?;
/// assert_eq!(model.quantize(&Weights::int8())?.layers, [""]);
/// assert_eq!(model.forward(&Tensor::ones([2, 32], (Kind::Float, model.device())))?.size(), [2, 8]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct QuantizedSlot {
    /// Tensors cannot be shared by threads: each caller gets handles of its own.
    weight: Arc<Mutex<Option<QuantizedWeight>>>,
    pub(crate) is_transposed: bool,
}

impl QuantizedSlot {
    pub(crate) fn new(is_transposed: bool) -> Self {
        Self { is_transposed, ..Self::default() }
    }

    /// Returns the quantised weight `[out, in]`, or the stack of weights, or `None` if it is not quantised.
    #[must_use]
    pub fn get(&self) -> Option<QuantizedWeight> {
        self.weight.lock().as_ref().map(QuantizedWeight::shallow_clone)
    }

    /// Returns `true` if the weight is quantised.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.weight.lock().is_some()
    }

    /// Copies a quantised weight of a parameter of this size to a device.
    pub(crate) fn weight(
        packed: &PackedWeight,
        size: &[i64],
        device: Device,
    ) -> Result<QuantizedWeight> {
        let matrices = if let [matrices, _, _] = *size { matrices } else { 1 };
        QuantizedWeight::from_packed_stack(packed, matrices, device)
    }

    pub(crate) fn set(&self, weight: QuantizedWeight) {
        *self.weight.lock() = Some(weight);
    }
}

/// Parameter that can be quantised.
#[derive(Debug, Clone)]
pub(crate) struct Quantizable {
    /// Name of the parameter.
    pub(crate) name: String,
    /// Name of the layer.
    pub(crate) layer: String,
    pub(crate) slot: QuantizedSlot,
}

/// Report of [`crate::Model::quantize`]. Its `Display` text is one line for the start of a program's log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QuantizeReport {
    /// Names of the layers whose weights are quantised.
    pub layers: Vec<String>,
    /// Size of the quantised weights in bytes.
    pub bytes: usize,
    /// Number of values of the quantised weights.
    pub values: usize,
    /// Reasons why products dequantise the weight first, with the number of layers for each reason.
    pub dequantized: Vec<(String, usize)>,
}

impl QuantizeReport {
    pub(crate) fn add(&mut self, layer: &str, weight: &QuantizedWeight, input: Kind) {
        self.layers.push(layer.to_owned());
        self.bytes += weight.bytes();
        self.values += weight.size().iter().product::<i64>().unsigned_abs() as usize;
        let Err(reason) = weight.kernel(input) else { return };
        match self.dequantized.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, count)) => *count += 1,
            None => self.dequantized.push((reason, 1)),
        }
    }
}

impl std::fmt::Display for QuantizeReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let bits = 8.0 * self.bytes as f64 / self.values.max(1) as f64;
        write!(f, "{} layers quantised, {bits:.2} bits a weight", self.layers.len())?;
        for (reason, count) in &self.dequantized {
            write!(f, "; {count} are dequantised for each product: {reason}")?;
        }
        Ok(())
    }
}

impl std::str::FromStr for Weights {
    type Err = brigade_checkpoint::QuantizeError;

    /// Reads `int8`, `int4`, `int4:GROUP` or `fp8`.
    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        text.parse().map(Self::quantized)
    }
}
