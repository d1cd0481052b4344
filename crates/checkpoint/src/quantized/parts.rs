//! Quantized weights stored as several tensors: numbers, scales and zeros.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{PackedWeight, QuantizeError, QuantizedFormat};
use crate::dtype::{Dtype, TensorInfo};

/// Key of the description in the metadata of safetensors.
pub(crate) const METADATA: &str = "brigade.quantized";
const VERSION: u32 = 1;

/// Suffixes of the tensors of a weight, after its name.
pub(crate) const PARTS: [&str; 4] = ["packed", "scales", "zeros", "order"];

/// Description of the quantized weights in a file, stored as an entry of the header's metadata.
///
/// ```
/// use brigade_checkpoint::{QuantizedDescription, QuantizedFormat};
///
/// let mut description = QuantizedDescription::default();
/// description.add("fc.weight", QuantizedFormat::Int8, [8, 32], false);
/// let (key, text) = description.to_metadata();
/// assert_eq!(key, "brigade.quantized");
/// assert_eq!(text, r#"{"version":1,"weights":{"fc.weight":{"format":"int8","shape":[8,32],"transposed":false}}}"#);
/// ```
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct QuantizedDescription {
    pub(crate) version: u32,
    pub(crate) weights: BTreeMap<String, Described>,
    /// Number of matrices of each stack, whose matrix `i` is the weight `NAME.i`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) stacks: BTreeMap<String, u64>,
}

impl Default for QuantizedDescription {
    fn default() -> Self {
        Self { version: VERSION, weights: BTreeMap::new(), stacks: BTreeMap::new() }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Described {
    pub(crate) format: String,
    /// Shape `[out, in]`.
    pub(crate) shape: [u64; 2],
    /// `true` if the parameter has the shape `[in, out]`.
    #[serde(default)]
    pub(crate) transposed: bool,
}

impl QuantizedDescription {
    /// Adds a weight of shape `[out, in]`. `transposed` means that its parameter has the shape `[in, out]`.
    pub fn add(&mut self, name: &str, format: QuantizedFormat, shape: [u64; 2], transposed: bool) {
        let described = Described { format: format.to_string(), shape, transposed };
        self.weights.insert(name.to_owned(), described);
    }

    /// Adds a stack of weights of shape `[out, in]`, and returns the names of the weights.
    pub(crate) fn add_stack(
        &mut self,
        name: &str,
        format: QuantizedFormat,
        matrices: u64,
        shape: [u64; 2],
    ) -> Vec<String> {
        self.stacks.insert(name.to_owned(), matrices);
        let names: Vec<_> = (0..matrices).map(|index| format!("{name}.{index}")).collect();
        names.iter().for_each(|name| self.add(name, format, shape, false));
        names
    }

    /// Adds a weight, and returns the names and contents of its tensors. With `matrices`, the rows are those of a stack
    /// of this many weights, such as the experts of a layer: they are written as `NAME.0`, `NAME.1` and so on, and read
    /// as one tensor `[matrices, out, in]`.
    ///
    /// # Errors
    /// Returns the errors of [`PackedWeight::matrices`].
    pub fn add_packed(
        &mut self,
        name: &str,
        weight: &PackedWeight,
        transposed: bool,
        matrices: Option<u64>,
    ) -> Result<Vec<(String, PackedPart)>, QuantizeError> {
        let weights = match matrices {
            None => vec![(name.to_owned(), weight.clone())],
            Some(count) => {
                self.stacks.insert(name.to_owned(), count);
                let matrices = weight.matrices(usize::try_from(count).unwrap_or(usize::MAX))?;
                let named = matrices.into_iter().enumerate();
                named.map(|(index, matrix)| (format!("{name}.{index}"), matrix)).collect()
            }
        };
        let parts = weights.into_iter().flat_map(|(name, weight)| {
            self.add(&name, weight.format, [weight.rows as u64, weight.columns as u64], transposed);
            let named = move |part: PackedPart| (format!("{name}{}", part.suffix), part);
            weight.to_parts().into_iter().map(named)
        });
        Ok(parts.collect())
    }

    /// Returns the entry of the header's metadata, as key and value.
    #[must_use]
    pub fn to_metadata(&self) -> (String, String) {
        // Cannot fail: a map with names as keys is always valid JSON.
        (METADATA.to_owned(), serde_json::to_string(self).unwrap_or_default())
    }

    pub(crate) fn read(text: &str) -> Result<Self, String> {
        let read: Self = serde_json::from_str(text)
            .map_err(|error| format!("its metadata `{METADATA}` is wrong: {error}"))?;
        if read.version == VERSION {
            Ok(read)
        } else {
            Err(format!(
                "its weights are quantised in version {} of the layout, this program reads version {VERSION}; update \
                 Brigade to the version that wrote it",
                read.version
            ))
        }
    }
}

/// A part of a quantized weight, stored as a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedPart {
    /// Suffix of the tensor's name after the weight's: `.packed`, `.scales`, `.zeros` or `.order`.
    pub suffix: &'static str,
    /// Data type and shape of the tensor.
    pub info: TensorInfo,
    /// Elements of the tensor in row-major order, little-endian.
    pub bytes: Vec<u8>,
}

impl PackedWeight {
    /// Returns the tensors of the weight in Brigade's layout of safetensors: `NAME.packed`, `NAME.scales`, and if
    /// present `NAME.zeros` and `NAME.order`. Scales are bfloat16 if that is exact, and float32 otherwise.
    #[must_use]
    pub fn to_parts(&self) -> Vec<PackedPart> {
        let is_short = self.has_short_scales();
        let groups = self.format.scales_per_row(self.columns);
        let part = |suffix, dtype, shape: &[usize], bytes| {
            let shape = shape.iter().map(|&size| size as u64).collect();
            PackedPart { suffix, info: TensorInfo { dtype, shape }, bytes }
        };
        let shape: &[usize] =
            if self.format.has_zeros() { &[self.rows, groups] } else { &[self.rows] };
        let floats = |suffix, values: &[f32]| {
            let (dtype, bytes) = if is_short {
                let short = values.iter().map(|&value| half::bf16::from_f32(value).to_le_bytes());
                (Dtype::BF16, short.flatten().collect())
            } else {
                (Dtype::F32, values.iter().flat_map(|value| value.to_le_bytes()).collect())
            };
            part(suffix, dtype, shape, bytes)
        };
        let width = self.format.row_bytes(self.columns);
        let mut parts = vec![
            part(".packed", self.format.dtype(), &[self.rows, width], self.packed.clone()),
            floats(".scales", &self.scales),
        ];
        if self.format.has_zeros() {
            parts.push(floats(".zeros", &self.zeros));
        }
        if let Some(order) = &self.order {
            let bytes = order.iter().flat_map(|column| column.to_le_bytes()).collect();
            parts.push(part(".order", Dtype::U32, &[self.columns], bytes));
        }
        parts
    }
}

impl QuantizedFormat {
    /// Returns the data type of the stored numbers in files.
    #[must_use]
    pub fn dtype(self) -> Dtype {
        match self {
            Self::Int8 => Dtype::I8,
            Self::Int4 { .. } => Dtype::U8,
            Self::Fp8 => Dtype::F8E4M3,
        }
    }
}

/// Rows of a weight as other programs store them: the weight of column `c` is `(q - zero) · scale`, with scale and zero
/// of the group of `c`.
#[derive(Debug)]
pub(crate) struct Numbers {
    pub(crate) bits: u32,
    pub(crate) rows: usize,
    /// Stored numbers, `[rows, columns]`.
    pub(crate) numbers: Vec<u8>,
    /// Scales, `[rows, groups]`.
    pub(crate) scales: Vec<f32>,
    /// Zeros, `[rows, groups]`.
    pub(crate) zeros: Vec<f32>,
    /// Group of each column.
    pub(crate) group_of: Vec<u32>,
}

impl Numbers {
    fn groups(&self) -> usize {
        self.scales.len() / self.rows.max(1)
    }

    /// Computes the weights in float32. Exact: the product of a float16 scale and a number of at most 9 bits fits.
    pub(crate) fn dequantize(&self, into: &mut [f32]) {
        let columns = self.group_of.len();
        let groups = self.groups();
        for (row, into) in into.chunks_exact_mut(columns.max(1)).enumerate() {
            let scales = &self.scales[row * groups..][..groups];
            let zeros = &self.zeros[row * groups..][..groups];
            let numbers = &self.numbers[row * columns..][..columns];
            for ((value, &number), &group) in into.iter_mut().zip(numbers).zip(&self.group_of) {
                let group = group as usize;
                *value = (f32::from(number) - zeros[group]) * scales[group];
            }
        }
    }

    /// Converts the weight to a format of libtorch's kernels. `None` if no format fits.
    pub(crate) fn pack(&self) -> Result<Option<PackedWeight>, QuantizeError> {
        let (columns, groups) = (self.group_of.len(), self.groups());
        if groups == 0 || !columns.is_multiple_of(groups) {
            return Ok(None);
        }
        let group = columns / groups;
        let mut order: Vec<u32> = (0..columns as u32).collect();
        order.sort_by_key(|&column| self.group_of[column as usize]);
        let is_even = order
            .iter()
            .enumerate()
            .all(|(place, &column)| self.group_of[column as usize] as usize == place / group);
        let is_sorted = order.iter().enumerate().all(|(place, &column)| column as usize == place);
        let is_signed = self.zeros.iter().all(|&zero| zero == 128.0);
        let (format, packed, zeros) = match self.bits {
            4 if is_even && group.is_multiple_of(2) => {
                let mut packed = Vec::with_capacity(self.numbers.len() / 2);
                for row in self.numbers.chunks_exact(columns) {
                    packed.extend(
                        order
                            .chunks_exact(2)
                            .map(|pair| row[pair[0] as usize] & 0xf | row[pair[1] as usize] << 4),
                    );
                }
                let zeros = self.zeros.iter().zip(&self.scales);
                let zeros = zeros.map(|(zero, scale)| (8.0 - zero) * scale).collect();
                (QuantizedFormat::Int4 { group }, packed, zeros)
            }
            8 if groups == 1 && is_signed => {
                let packed = self.numbers.iter().map(|number| number ^ 0x80).collect();
                (QuantizedFormat::Int8, packed, Vec::new())
            }
            _ => return Ok(None),
        };
        let made = PackedWeight {
            format,
            rows: self.rows,
            columns,
            packed,
            scales: self.scales.clone(),
            zeros,
            order: (!is_sorted).then_some(order),
        };
        made.check()?;
        Ok(Some(made))
    }
}

/// Unpacks numbers of `bits` bits from a 32-bit word, from the lowest bits on.
pub(crate) fn unpack(word: u32, bits: u32) -> impl Iterator<Item = u8> {
    let mask = (1u32 << bits) - 1;
    (0..32 / bits).map(move |place| (word >> (place * bits) & mask) as u8)
}
