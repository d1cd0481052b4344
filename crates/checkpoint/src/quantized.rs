//! Weights of linear layers in 8 or 4 bits: their arithmetic, and the file layouts that store them.
//!
//! Values are stored row by row. With `q` the stored number, a weight is
//!
//! | Format | Stored | Weight |
//! |---|---|---|
//! | `int8` | signed byte in ±127, a scale for each row | `q · scale` |
//! | `int4:GROUP` | 0 to 15, two in a byte, the even column in the low bits; a scale and a zero for each `GROUP` columns of a row | `(q - 8) · scale + zero` |
//! | `fp8` | `float8_e4m3fn`, a scale for each row | `q · scale` |
//!
//! Scales and zeros chosen by this library are bfloat16, which libtorch's kernels multiply by. Numbers are rounded for
//! the scale as it is stored.

mod fp8;
pub(crate) mod parts;
mod rows;

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

pub use parts::{PackedPart, QuantizedDescription};
pub use rows::QuantizeError;

/// Format of a quantized weight.
///
/// ```
/// use brigade_checkpoint::QuantizedFormat;
///
/// let format: QuantizedFormat = "int4:64".parse()?;
/// assert_eq!(format, QuantizedFormat::Int4 { group: 64 });
/// assert_eq!(format.to_string(), "int4:64");
/// assert_eq!("int4".parse(), Ok(QuantizedFormat::Int4 { group: 128 }));
/// # Ok::<(), brigade_checkpoint::QuantizeError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QuantizedFormat {
    /// Signed bytes with one scale per row.
    Int8,
    /// Four bits with a scale and a zero per group of columns.
    Int4 {
        /// Group size in columns: an even number that divides the number of columns of the weight.
        group: usize,
    },
    /// `float8_e4m3fn` with one scale per row.
    Fp8,
}

/// Group size of `int4` in columns where none is given.
pub const DEFAULT_GROUP: usize = 128;

impl fmt::Display for QuantizedFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Int8 => f.write_str("int8"),
            Self::Int4 { group } => write!(f, "int4:{group}"),
            Self::Fp8 => f.write_str("fp8"),
        }
    }
}

impl FromStr for QuantizedFormat {
    type Err = QuantizeError;

    fn from_str(text: &str) -> Result<Self, QuantizeError> {
        let unknown = || QuantizeError::UnknownFormat { found: text.to_owned() };
        Ok(match text {
            "int8" => Self::Int8,
            "fp8" => Self::Fp8,
            "int4" => Self::Int4 { group: DEFAULT_GROUP },
            _ => {
                let group = text.strip_prefix("int4:").and_then(|group| group.parse().ok());
                Self::Int4 { group: group.filter(|&group| group > 0).ok_or_else(unknown)? }
            }
        })
    }
}

impl QuantizedFormat {
    /// Checks that the format can hold weights with this number of columns.
    ///
    /// # Errors
    /// Fails with [`QuantizeError::Group`] if groups do not divide the columns.
    pub fn check(self, columns: usize) -> Result<(), QuantizeError> {
        match self {
            Self::Int4 { group }
                if group == 0 || !group.is_multiple_of(2) || !columns.is_multiple_of(group) =>
            {
                Err(QuantizeError::Group { group, columns })
            }
            _ => Ok(()),
        }
    }

    /// Returns the number of bytes for `columns` numbers of a row.
    #[must_use]
    pub fn row_bytes(self, columns: usize) -> usize {
        if matches!(self, Self::Int4 { .. }) { columns / 2 } else { columns }
    }

    /// Returns the number of scales per row.
    #[must_use]
    pub fn scales_per_row(self, columns: usize) -> usize {
        if let Self::Int4 { group } = self { columns / group.max(1) } else { 1 }
    }

    /// Returns `true` if the format has a zero for each scale.
    #[must_use]
    pub fn has_zeros(self) -> bool {
        matches!(self, Self::Int4 { .. })
    }

    /// Returns the size in bytes of a weight quantized by this library: numbers, scales and zeros. `None` if the number
    /// of bytes overflows. `brigade estimate` uses it.
    #[must_use]
    pub fn bytes(self, rows: u64, columns: u64) -> Option<u64> {
        let (width, groups) = match self {
            Self::Int4 { group } => {
                (columns.div_ceil(2), columns.div_ceil(group.max(1) as u64).checked_mul(2)?)
            }
            Self::Int8 | Self::Fp8 => (columns, 1),
        };
        rows.checked_mul(width.checked_add(groups.checked_mul(2)?)?)
    }
}

/// A quantized weight of shape `[rows, columns]`.
#[derive(Debug, Clone, PartialEq)]
pub struct PackedWeight {
    /// Format of the stored numbers.
    pub format: QuantizedFormat,
    /// Number of rows: output features.
    pub rows: usize,
    /// Number of columns: input features.
    pub columns: usize,
    /// Stored numbers, row after row.
    pub packed: Vec<u8>,
    /// Scales, row by row.
    pub scales: Vec<f32>,
    /// Zeros, as many as scales. Empty for formats without zeros.
    pub zeros: Vec<f32>,
    /// Input feature of each column, if columns are sorted by group (GPTQ's `desc_act`). `None` for the natural order.
    pub order: Option<Vec<u32>>,
}

impl PackedWeight {
    /// Quantizes a weight, given row by row.
    ///
    /// Numbers are rounded to nearest, ties to even. The scale of a row or group is that of its largest value. With
    /// `is_calibrated`, it is the best of 32 ranges (the full one down to 0.38 of it) by the sum of squared errors,
    /// which clips few large values and keeps the others more exact.
    ///
    /// ```
    /// use brigade_checkpoint::{PackedWeight, QuantizedFormat};
    ///
    /// let weight = [1.0, -0.5, 0.25, 127.0, 64.0, -32.0];
    /// let packed = PackedWeight::quantize(&weight, 3, QuantizedFormat::Int8, false)?;
    /// assert_eq!((packed.rows, packed.bytes()), (2, 10));
    /// let mut row = [0.0; 3];
    /// packed.dequantize(1..2, &mut row)?;
    /// assert_eq!(row, [127.0, 64.0, -32.0]);
    /// # Ok::<(), brigade_checkpoint::QuantizeError>(())
    /// ```
    ///
    /// # Errors
    /// Fails with [`QuantizeError::Group`] if groups do not divide the columns, or with [`QuantizeError::NotFinite`]
    /// for infinite values and NaN.
    pub fn quantize(
        values: &[f32],
        columns: usize,
        format: QuantizedFormat,
        is_calibrated: bool,
    ) -> Result<Self, QuantizeError> {
        format.check(columns)?;
        let rows = values.len().checked_div(columns).unwrap_or(0);
        let mut made = Self {
            format,
            rows,
            columns,
            packed: vec![0; rows * format.row_bytes(columns)],
            scales: vec![0.0; rows * format.scales_per_row(columns)],
            zeros: Vec::new(),
            order: None,
        };
        if format.has_zeros() {
            made.zeros = vec![0.0; made.scales.len()];
        }
        rows::quantize(&mut made, values, is_calibrated)?;
        Ok(made)
    }

    /// Computes the weights of some rows, in float32.
    ///
    /// # Errors
    /// Fails with [`QuantizeError::Size`] if `into` or a part of the weight has the wrong size, or with another error
    /// of [`check`](Self::check).
    pub fn dequantize(&self, rows: Range<usize>, into: &mut [f32]) -> Result<(), QuantizeError> {
        self.check()?;
        let expected = rows.len().saturating_mul(self.columns);
        if rows.end > self.rows || rows.start > rows.end || into.len() != expected {
            return Err(QuantizeError::Size { part: "rows", expected, found: into.len() });
        }
        rows::dequantize(self, rows, into);
        Ok(())
    }

    /// Divides the rows into a number of weights with the same number of rows: the matrices of a stack.
    ///
    /// ```
    /// use brigade_checkpoint::{PackedWeight, QuantizedFormat};
    ///
    /// let both = PackedWeight::quantize(&[1.0, 2.0, 3.0, 4.0], 1, QuantizedFormat::Int8, false)?;
    /// let parts = both.matrices(2)?;
    /// assert_eq!((parts.len(), parts[1].rows), (2, 2));
    /// assert_eq!(PackedWeight::stacked(parts), Some(both));
    /// # Ok::<(), brigade_checkpoint::QuantizeError>(())
    /// ```
    ///
    /// # Errors
    /// Fails with [`QuantizeError::Size`] if the number does not divide the rows, or with another error of
    /// [`check`](Self::check).
    pub fn matrices(&self, count: usize) -> Result<Vec<Self>, QuantizeError> {
        self.check()?;
        if count == 0 || !self.rows.is_multiple_of(count) {
            return Err(QuantizeError::Size { part: "rows", expected: count, found: self.rows });
        }
        let part = |index: usize| {
            let numbers = self.packed.len() / count;
            let scales = self.scales.len() / count;
            let zeros = self.zeros.len() / count;
            Self {
                rows: self.rows / count,
                packed: self.packed[index * numbers..][..numbers].to_vec(),
                scales: self.scales[index * scales..][..scales].to_vec(),
                zeros: self.zeros[index * zeros..][..zeros].to_vec(),
                order: self.order.clone(),
                ..*self
            }
        };
        Ok((0..count).map(part).collect())
    }

    /// Concatenates the rows of weights. `None` if formats, numbers of columns or their orders differ, or if there are
    /// no weights.
    #[must_use]
    pub fn stacked(weights: impl IntoIterator<Item = Self>) -> Option<Self> {
        let mut weights = weights.into_iter();
        let mut whole = weights.next()?;
        for weight in weights {
            let Self { format, columns, .. } = whole;
            if (weight.format, weight.columns) != (format, columns) || weight.order != whole.order {
                return None;
            }
            whole.rows += weight.rows;
            whole.packed.extend(weight.packed);
            whole.scales.extend(weight.scales);
            whole.zeros.extend(weight.zeros);
        }
        Some(whole)
    }

    /// Checks that the parts have the sizes required by format and shape.
    ///
    /// # Errors
    /// Fails with [`QuantizeError::Group`], [`QuantizeError::Size`] or [`QuantizeError::Order`].
    pub fn check(&self) -> Result<(), QuantizeError> {
        self.format.check(self.columns)?;
        let scales = self.rows.saturating_mul(self.format.scales_per_row(self.columns));
        let zeros = if self.format.has_zeros() { scales } else { 0 };
        let packed = self.rows.saturating_mul(self.format.row_bytes(self.columns));
        let order = self.order.as_ref().map_or(self.columns, Vec::len);
        let sizes = [
            ("packed", packed, self.packed.len()),
            ("scales", scales, self.scales.len()),
            ("zeros", zeros, self.zeros.len()),
            ("order", self.columns, order),
        ];
        for (part, expected, found) in sizes {
            if expected != found {
                return Err(QuantizeError::Size { part, expected, found });
            }
        }
        let mut is_seen = vec![false; self.order.as_ref().map_or(0, Vec::len)];
        for &column in self.order.iter().flatten() {
            match is_seen.get_mut(column as usize) {
                Some(seen) if !*seen => *seen = true,
                _ => return Err(QuantizeError::Order { column }),
            }
        }
        Ok(())
    }

    /// Returns `true` if all scales and zeros are exact in bfloat16, as those chosen by this library.
    #[must_use]
    pub fn has_short_scales(&self) -> bool {
        self.scales.iter().chain(&self.zeros).all(|&value| rows::bf16(value) == value)
    }

    /// Returns the size in bytes in memory and in files, with scales in their shortest exact type.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let width = if self.has_short_scales() { 2 } else { 4 };
        let order = self.order.as_ref().map_or(0, |order| 4 * order.len());
        self.packed.len() + width * (self.scales.len() + self.zeros.len()) + order
    }
}

/// Returns `true` if a layer is a head, which computes a model's outputs from its last hidden states: `lm_head`,
/// `embed_out`, `head`, `score`, `classifier`, `qa_outputs` or `decoder`, or one below `cls`. Heads are quantized only
/// on request.
#[must_use]
pub fn is_head_layer(layer: &str) -> bool {
    const HEADS: [&str; 7] =
        ["lm_head", "embed_out", "head", "score", "classifier", "qa_outputs", "decoder"];
    let last = layer.rsplit('.').next().unwrap_or_default();
    HEADS.contains(&last) || layer.split('.').next() == Some("cls")
}
