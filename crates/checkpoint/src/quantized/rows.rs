//! Quantization arithmetic of rows.

use std::num::NonZero;
use std::ops::Range;
use std::thread;

use half::bf16 as Bf16;

use super::{PackedWeight, QuantizedFormat, fp8};

/// An error of quantizing a weight, or of reading a quantized one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QuantizeError {
    /// The format name is unknown.
    #[error("unknown format `{}`; the formats are int8, int4, int4:GROUP and fp8", found.escape_debug())]
    UnknownFormat {
        /// Name that is not a format's.
        found: String,
    },
    /// The group size does not divide the columns, or is odd.
    #[error(
        "groups of {group} columns do not divide {columns} columns; choose an even size that does, or leave the layer \
         as it is"
    )]
    Group {
        /// Group size in columns.
        group: usize,
        /// Number of columns of the weight.
        columns: usize,
    },
    /// The weight has an infinite value or a NaN.
    #[error("row {row} has a value that is infinite or NaN")]
    NotFinite {
        /// First row with such a value.
        row: usize,
    },
    /// A part has another size than format and shape require.
    #[error("`{part}` has {found} values, expected {expected}")]
    Size {
        /// Name of the part, such as `scales`.
        part: &'static str,
        /// Expected number of values.
        expected: usize,
        /// Actual number of values.
        found: usize,
    },
    /// The order of columns is not a permutation.
    #[error("column {column} is out of range or occurs twice in the order of columns")]
    Order {
        /// Column that is out of range or repeated.
        column: u32,
    },
}

/// Number of ranges that are tried. The first is the full one, each next one smaller by [`STEP`] of it.
const TRIED: usize = 32;
const STEP: f32 = 0.02;

/// Minimum number of values at which threads pay off.
const PARALLEL: usize = 1 << 18;

pub(super) fn bf16(value: f32) -> f32 {
    Bf16::from_f32(value).to_f32()
}

pub(super) fn quantize(
    into: &mut PackedWeight,
    values: &[f32],
    is_calibrated: bool,
) -> Result<(), QuantizeError> {
    let PackedWeight { format, columns, rows, .. } = *into;
    if values.is_empty() {
        return Ok(());
    }
    let threads = if values.len() < PARALLEL {
        1
    } else {
        thread::available_parallelism().map_or(1, NonZero::get)
    };
    let rows_each = rows.div_ceil(threads).max(1);
    let groups = format.scales_per_row(columns);
    let mut zeros = into.zeros.chunks_mut(rows_each * groups);
    let parts = values
        .chunks(rows_each * columns)
        .zip(into.packed.chunks_mut(rows_each * format.row_bytes(columns)))
        .zip(into.scales.chunks_mut(rows_each * groups))
        .map(|((values, packed), scales)| {
            (values, packed, scales, zeros.next().unwrap_or_default())
        });
    let run = |part: (&[f32], &mut [u8], &mut [f32], &mut [f32])| {
        quantize_rows((format, columns, is_calibrated), part)
    };
    let found: Vec<Option<usize>> = if threads == 1 {
        parts.map(run).collect()
    } else {
        thread::scope(|scope| {
            let threads: Vec<_> = parts.map(|part| scope.spawn(move || run(part))).collect();
            // A thread only computes and cannot panic.
            threads.into_iter().map(|thread| thread.join().unwrap_or(Some(0))).collect()
        })
    };
    let bad = found.iter().enumerate().find_map(|(part, row)| Some(part * rows_each + (*row)?));
    bad.map_or(Ok(()), |row| Err(QuantizeError::NotFinite { row }))
}

/// Quantizes some rows. Returns the first row with a value that is not finite.
fn quantize_rows(
    (format, columns, is_calibrated): (QuantizedFormat, usize, bool),
    (values, packed, scales, zeros): (&[f32], &mut [u8], &mut [f32], &mut [f32]),
) -> Option<usize> {
    let tried = if is_calibrated { TRIED } else { 1 };
    let group = if let QuantizedFormat::Int4 { group } = format { group } else { columns };
    let bytes = format.row_bytes(group);
    for (place, values) in values.chunks_exact(group).enumerate() {
        if !values.iter().all(|value| value.is_finite()) {
            return Some(place * group / columns);
        }
        let packed = &mut packed[place * bytes..][..bytes];
        match format {
            QuantizedFormat::Int4 { .. } => {
                let (scale, zero) = best_int4(values, tried);
                (scales[place], zeros[place]) = (scale, zero);
                for (byte, pair) in packed.iter_mut().zip(values.chunks_exact(2)) {
                    *byte = int4(pair[0], scale, zero) | int4(pair[1], scale, zero) << 4;
                }
            }
            QuantizedFormat::Int8 => {
                let scale = best_scale(values, 127.0, tried, |value| f32::from(int8(value)));
                scales[place] = scale;
                for (byte, &value) in packed.iter_mut().zip(values) {
                    *byte = int8(value / scale).cast_unsigned();
                }
            }
            QuantizedFormat::Fp8 => {
                let round = |value| fp8::to_f32(fp8::from_f32(value));
                let scale = best_scale(values, fp8::MAX, tried, round);
                scales[place] = scale;
                for (byte, &value) in packed.iter_mut().zip(values) {
                    *byte = fp8::from_f32(value / scale);
                }
            }
        }
    }
    None
}

fn int8(scaled: f32) -> i8 {
    // Casts of floats saturate. -128 is excluded to make the range symmetric.
    scaled.round_ties_even().clamp(-127.0, 127.0) as i8
}

fn int4(value: f32, scale: f32, zero: f32) -> u8 {
    ((value - zero) / scale + 8.0).round_ties_even().clamp(0.0, 15.0) as u8
}

/// Returns the scale as bfloat16, or 1 in place of 0, as for rows of zeros, and of infinity.
fn divisor(scale: f32) -> f32 {
    let scale = bf16(scale);
    if scale > 0.0 && scale.is_finite() { scale } else { 1.0 }
}

fn best_scale(values: &[f32], largest: f32, tried: usize, round: impl Fn(f32) -> f32) -> f32 {
    let range = values.iter().fold(0f32, |range, value| range.max(value.abs()));
    let scales = (0..tried).map(|step| divisor(range * (1.0 - STEP * step as f32) / largest));
    least(scales, |&scale| error(values, |value| round(value / scale) * scale))
}

fn best_int4(values: &[f32], tried: usize) -> (f32, f32) {
    let (low, high) = values
        .iter()
        .fold((f32::MAX, f32::MIN), |(low, high), &value| (low.min(value), high.max(value)));
    let middle = f32::midpoint(low, high);
    let choices = (0..tried).map(|step| {
        let part = 1.0 - STEP * step as f32;
        // Halved first, since the difference could overflow.
        let half = (high / 2.0 - low / 2.0) * part;
        let scale = divisor(half / 7.5);
        // If all values are equal, they are the zero itself.
        (scale, bf16(if half > 0.0 { middle + scale / 2.0 } else { middle }))
    });
    least(choices, |&(scale, zero)| {
        error(values, |value| (f32::from(int4(value, scale, zero)) - 8.0) * scale + zero)
    })
}

/// Returns the choice with the least error, the first one of equal ones.
fn least<T>(mut choices: impl Iterator<Item = T>, error: impl Fn(&T) -> f64) -> T
where
    T: Copy + Default,
{
    let mut best = choices.next().unwrap_or_default();
    let mut least = None;
    for choice in choices {
        let found = error(&choice);
        if found < *least.get_or_insert_with(|| error(&best)) {
            (best, least) = (choice, Some(found));
        }
    }
    best
}

fn error(values: &[f32], quantized: impl Fn(f32) -> f32) -> f64 {
    values.iter().map(|&value| f64::from(quantized(value) - value).powi(2)).sum()
}

pub(super) fn dequantize(from: &PackedWeight, rows: Range<usize>, into: &mut [f32]) {
    let PackedWeight { format, columns, .. } = *from;
    if columns == 0 || rows.is_empty() {
        return;
    }
    let groups = format.scales_per_row(columns);
    let group = columns / groups.max(1);
    let bytes = format.row_bytes(columns);
    let mut sorted = vec![0f32; columns];
    for (row, into) in rows.zip(into.chunks_exact_mut(columns)) {
        let packed = &from.packed[row * bytes..][..bytes];
        let scale = |column: usize| from.scales[row * groups + column / group];
        for (column, value) in sorted.iter_mut().enumerate() {
            *value = match format {
                QuantizedFormat::Int8 => f32::from(packed[column].cast_signed()) * scale(column),
                QuantizedFormat::Fp8 => fp8::to_f32(packed[column]) * scale(column),
                QuantizedFormat::Int4 { .. } => {
                    let number = packed[column / 2] >> (4 * (column % 2)) & 0xf;
                    let zero = from.zeros[row * groups + column / group];
                    (f32::from(number) - 8.0) * scale(column) + zero
                }
            };
        }
        match &from.order {
            Some(order) => {
                order.iter().zip(&sorted).for_each(|(&to, &value)| into[to as usize] = value);
            }
            None => into.copy_from_slice(&sorted),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMATS: [QuantizedFormat; 4] = [
        QuantizedFormat::Int8,
        QuantizedFormat::Int4 { group: 32 },
        QuantizedFormat::Int4 { group: 128 },
        QuantizedFormat::Fp8,
    ];

    fn numbers(count: usize) -> Vec<f32> {
        let mut state = 7u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 40) as f32 / 16_777_216.0 - 0.5
        };
        // A sum of four has tails that a range can clip, like trained weights.
        (0..count).map(|_| next() + next() + next() + next()).collect()
    }

    fn back(packed: &PackedWeight) -> Vec<f32> {
        let mut values = vec![0.0; packed.rows * packed.columns];
        packed.dequantize(0..packed.rows, &mut values).unwrap();
        values
    }

    #[test]
    fn values_are_within_half_a_step() {
        let values = numbers(64 * 256);
        for format in FORMATS {
            let packed = PackedWeight::quantize(&values, 256, format, false).unwrap();
            assert!(packed.has_short_scales());
            assert_eq!(Some(packed.bytes() as u64), format.bytes(64, 256));
            let group = 256 / format.scales_per_row(256);
            for (place, (&value, found)) in values.iter().zip(back(&packed)).enumerate() {
                let scale = packed.scales[place / group];
                let half_step = match format {
                    // The scale is rounded to 8 bits, so the ends of the range may be clipped by that much.
                    QuantizedFormat::Int8 => scale * (0.5 + 127.0 / 256.0),
                    QuantizedFormat::Int4 { .. } => scale * 0.6,
                    QuantizedFormat::Fp8 => (value.abs() / 16.0).max(scale / 1024.0) * 1.01,
                };
                assert!((value - found).abs() <= half_step, "{format}: {value} {found}");
            }
        }
    }

    #[test]
    fn calibrated_scales_have_no_larger_error() {
        let values = numbers(32 * 512);
        for format in [QuantizedFormat::Int8, QuantizedFormat::Int4 { group: 128 }] {
            let errors = [false, true].map(|calibrated| {
                let packed = PackedWeight::quantize(&values, 512, format, calibrated).unwrap();
                let found = back(&packed);
                let errors = values.iter().zip(found).map(|(a, b)| f64::from(a - b).powi(2));
                errors.sum::<f64>()
            });
            // With 8 bits, the full range is often the best.
            let is_better = errors[1] < errors[0];
            assert!(is_better || format == QuantizedFormat::Int8, "{format}: {errors:?}");
            assert!(errors[1] <= errors[0], "{format}: {errors:?}");
        }
    }

    #[test]
    fn rows_do_not_depend_on_each_other_or_on_threads() {
        let values = numbers(1024 * 512);
        for format in FORMATS {
            let all = PackedWeight::quantize(&values, 512, format, false).unwrap();
            let one =
                PackedWeight::quantize(&values[700 * 512..701 * 512], 512, format, false).unwrap();
            let bytes = format.row_bytes(512);
            assert_eq!(all.packed[700 * bytes..701 * bytes], one.packed[..]);
            let mut row = [0.0; 512];
            all.dequantize(700..701, &mut row).unwrap();
            assert_eq!(row[..], back(&one)[..]);
        }
    }

    #[test]
    fn rows_without_spread_are_kept() {
        let values = [vec![0.0; 32], vec![-3.0; 32], vec![1e38; 32]].concat();
        for format in
            [QuantizedFormat::Int8, QuantizedFormat::Int4 { group: 32 }, QuantizedFormat::Fp8]
        {
            let found = back(&PackedWeight::quantize(&values, 32, format, true).unwrap());
            assert_eq!(found[..32], values[..32], "{format}");
            assert!(found[32..64].iter().all(|value| (value + 3.0).abs() < 0.02), "{format}");
            assert!(found[64..].iter().all(|value| value.is_finite()), "{format}");
        }
    }

    #[test]
    fn bad_input_is_named() {
        let quantize = |values: &[f32], columns, format| {
            PackedWeight::quantize(values, columns, format, false).unwrap_err().to_string()
        };
        let group = QuantizedFormat::Int4 { group: 64 };
        let error = quantize(&[0.0; 96], 96, group);
        assert!(error.starts_with("groups of 64 columns do not divide 96 columns"), "{error}");
        let error = quantize(&[0.0, 1.0, f32::NAN, 0.0], 2, QuantizedFormat::Int8);
        assert_eq!(error, "row 1 has a value that is infinite or NaN");
        let mut packed =
            PackedWeight::quantize(&[1.0; 4], 2, QuantizedFormat::Int8, false).unwrap();
        packed.scales.pop();
        let error = packed.dequantize(0..1, &mut [0.0; 2]).unwrap_err().to_string();
        assert_eq!(error, "`scales` has 1 values, expected 2");
        for name in ["int4:0", "int4:", "int5", ""] {
            assert!(name.parse::<QuantizedFormat>().is_err(), "{name}");
        }
    }
}
