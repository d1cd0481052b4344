//! Formats in which weights are held for inference.

use std::fmt;
use std::str::FromStr;

use brigade_checkpoint::{DEFAULT_GROUP, Dtype, QuantizedFormat, TensorInfo};

/// Format in which the weights of a model are held for inference.
///
/// Quantised formats apply to the matrices of units: parameters with two dimensions. Embeddings, norms, biases and
/// heads are held in 16 bits in all of them. Integers keep their type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightFormat {
    /// 32-bit floats (float32).
    Fp32,
    /// 16-bit floats (float16).
    Fp16,
    /// 16-bit floats with the exponent of 32-bit ones (bfloat16).
    Bf16,
    /// 8 or 4 bits, in a format that this library computes with.
    Quantized(QuantizedFormat),
    /// 4-bit normal floats of bitsandbytes (NF4), with a 32-bit scale for each 64 weights.
    Nf4,
}

impl WeightFormat {
    /// Returns the bytes of a tensor that is held in this format. It is quantised if it is a matrix of a unit. `own` is
    /// its type in the model. `None` if the number of bytes overflows.
    #[must_use]
    pub fn tensor_bytes(self, shape: &[u64], own: Dtype, is_in_unit: bool) -> Option<u64> {
        match shape {
            _ if is_integer(own) => bytes_as(shape, own),
            [rows, row] if is_in_unit => self.matrix_bytes(*rows, *row),
            _ => bytes_as(shape, self.float()),
        }
    }

    /// Returns the bytes of a matrix of a unit in this format, with the scales of quantised formats. `None` if the
    /// number of bytes overflows.
    ///
    /// ```
    /// use brigade_checkpoint::QuantizedFormat;
    /// use brigade_sharding::WeightFormat;
    ///
    /// let bytes = |format: QuantizedFormat| WeightFormat::from(format).matrix_bytes(4096, 4096);
    /// assert_eq!(bytes(QuantizedFormat::Int8), Some(4096 * 4096 + 4096 * 2));
    /// // A scale and a zero of 16 bits for each 128 weights: 4.25 bits a weight.
    /// assert_eq!(bytes(QuantizedFormat::Int4 { group: 128 }), Some(4096 * 4096 / 8 * 17 / 4));
    /// ```
    #[must_use]
    pub fn matrix_bytes(self, rows: u64, row: u64) -> Option<u64> {
        let weights = rows.checked_mul(row)?;
        match self {
            Self::Fp32 => weights.checked_mul(4),
            Self::Fp16 | Self::Bf16 => weights.checked_mul(2),
            Self::Quantized(format) => format.bytes(rows, row),
            Self::Nf4 => weights.div_ceil(2).checked_add(weights.div_ceil(64).checked_mul(4)?),
        }
    }

    /// Returns the type of weights that are not quantised, and of activations and caches.
    #[must_use]
    pub fn float(self) -> Dtype {
        match self {
            Self::Fp32 => Dtype::F32,
            Self::Fp16 => Dtype::F16,
            Self::Bf16 | Self::Quantized(_) | Self::Nf4 => Dtype::BF16,
        }
    }
}

/// Writes `fp32`, `fp16`, `bf16`, `fp8`, `int8`, `nf4`, or `int4`, with the group size if it is not 128 (`int4:64`).
impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fp32 => f.pad("fp32"),
            Self::Fp16 => f.pad("fp16"),
            Self::Bf16 => f.pad("bf16"),
            Self::Quantized(QuantizedFormat::Int4 { group: DEFAULT_GROUP }) => f.pad("int4"),
            Self::Quantized(format) => f.pad(&format.to_string()),
            Self::Nf4 => f.pad("nf4"),
        }
    }
}

impl FromStr for WeightFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "fp32" => Self::Fp32,
            "fp16" => Self::Fp16,
            "bf16" => Self::Bf16,
            "nf4" => Self::Nf4,
            _ => {
                let is_known = |format: &QuantizedFormat| match format {
                    QuantizedFormat::Int4 { group } => GROUPS.contains(group),
                    QuantizedFormat::Int8 | QuantizedFormat::Fp8 => true,
                };
                let known = "write bf16, fp16, fp32, fp8, int8, int4, int4:GROUP with groups of 32, 64, 128 or 256, or nf4";
                let format = text.parse().ok().filter(is_known);
                Self::Quantized(format.ok_or_else(|| format!("not a weights format: {known}"))?)
            }
        })
    }
}

impl From<QuantizedFormat> for WeightFormat {
    fn from(format: QuantizedFormat) -> Self {
        Self::Quantized(format)
    }
}

/// Group sizes of `int4` for which there are kernels.
const GROUPS: [usize; 4] = [32, 64, 128, 256];

pub(crate) fn is_integer(dtype: Dtype) -> bool {
    matches!(
        dtype,
        Dtype::I64
            | Dtype::I32
            | Dtype::I16
            | Dtype::I8
            | Dtype::U8
            | Dtype::U16
            | Dtype::U32
            | Dtype::U64
            | Dtype::Bool
    )
}

/// Returns the bytes of a tensor of the given type. `None` if their number overflows.
pub(crate) fn bytes_as(shape: &[u64], dtype: Dtype) -> Option<u64> {
    TensorInfo { dtype, shape: shape.to_vec() }.bytes()
}
