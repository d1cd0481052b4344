//! Quantized weights: several tensors of a file, read as one.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use indexmap::IndexMap;
use serde::Deserialize;

use super::{Held, OpenFile, Stack, TensorReader, WeightsReader};
use crate::Region;
use crate::dtype::{Dtype, TensorInfo};
use crate::error::Error;
use crate::pth::shown;
use crate::quantized::parts::{Numbers, PARTS, QuantizedDescription, unpack};
use crate::quantized::{PackedWeight, QuantizeError, QuantizedFormat};

/// A weight `[rows, columns]` that is stored as several tensors.
#[derive(Debug)]
pub(super) struct Quantized {
    scheme: Scheme,
    rows: u64,
    columns: u64,
    /// `true` if the parameter has the shape `[columns, rows]`.
    is_transposed: bool,
    parts: IndexMap<&'static str, Held>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Scheme {
    Own(QuantizedFormat),
    /// GPTQ: `qweight` `[in · bits / 32, out]`. Stored zeros are too small by `offset`.
    Gptq {
        bits: u32,
        offset: u8,
    },
    /// AWQ: `qweight` `[in, out · 4 / 32]`, in the order of [`AWQ_ORDER`].
    Awq,
    /// bitsandbytes: blocks of 4-bit numbers that are indices into a table.
    Table {
        block: u64,
        nested: Option<(u64, f32)>,
    },
    /// bitsandbytes: signed bytes with the largest value of each row.
    Int8Rows,
}

/// Column among eight for each four bits of a word, from the lowest on.
const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
/// Factor by which bitsandbytes multiplies instead of dividing by 127.
const ONE_OF_127: f32 = 7.874_016e-3;
/// Number of values that are dequantized at a time, to bound the memory.
const PART_VALUES: u64 = 1 << 20;

/// Quantization settings in `config.json`.
#[derive(Debug, Clone, Deserialize)]
struct Config {
    quant_method: Option<String>,
    #[serde(default)]
    bits: Option<u32>,
    #[serde(default, alias = "w_bit")]
    w_bit: Option<u32>,
    #[serde(default)]
    checkpoint_format: Option<String>,
    #[serde(default)]
    version: Option<serde_json::Value>,
}

/// Checks that the quantization method in a folder's `config.json` is supported. Folders without the file or without
/// such an entry pass.
///
/// # Errors
/// Fails with [`Error::Unsupported`] for a method other than `gptq`, `awq` or `bitsandbytes`, and with
/// [`Error::Damaged`] for a file that is not JSON.
pub fn check_quantization_method(folder: &Path) -> Result<(), Error> {
    let Some((path, config)) = config_of(folder)? else { return Ok(()) };
    match config.quant_method.as_deref() {
        None | Some("gptq" | "awq" | "bitsandbytes") => Ok(()),
        Some(other) => Err(Error::Unsupported {
            path,
            fact: format!(
                "its weights are quantised by `{}`; gptq, awq and bitsandbytes can be read: take the original weights, and \
                 quantise them with `brigade checkpoint convert --weights`",
                shown(other)
            ),
        }),
    }
}

/// Returns the quantization settings of a folder, with the path of their file.
fn config_of(folder: &Path) -> Result<Option<(PathBuf, Config)>, Error> {
    for (name, key) in [
        ("config.json", Some("quantization_config")),
        ("quantize_config.json", None),
        ("quant_config.json", None),
    ] {
        let path = folder.join(name);
        let Ok(text) = fs::read(&path) else { continue };
        let damaged = |error: serde_json::Error| Error::Damaged {
            path: path.clone(),
            fact: format!("its JSON is wrong: {error}"),
        };
        let mut value: serde_json::Value = serde_json::from_slice(&text).map_err(damaged)?;
        let value = match key {
            Some(key) => value.get_mut(key).map(serde_json::Value::take),
            None => Some(value),
        };
        if let Some(value) = value.filter(|value| !value.is_null()) {
            return Ok(Some((path.clone(), serde_json::from_value(value).map_err(damaged)?)));
        }
    }
    Ok(None)
}

impl WeightsReader {
    /// Replaces the tensors of each quantized weight by one.
    pub(super) fn combine(&mut self, described: &Descriptions) -> Result<(), Error> {
        let mut found: Vec<(String, Quantized)> = Vec::new();
        for (name, &(format, [rows, columns], is_transposed)) in &described.weights {
            let parts = self.taken(|part| format!("{name}.{part}"), &PARTS);
            let scheme = Scheme::Own(format);
            found.push((name.clone(), Quantized { scheme, rows, columns, is_transposed, parts }));
        }
        let with = |ending: &str| -> Vec<String> {
            let names = self.tensors.keys().filter_map(|name| name.strip_suffix(ending));
            names.map(str::to_owned).collect()
        };
        let (packed, rows) = (with(".qweight"), with(".SCB"));
        let states: Vec<(String, &str)> = ["nf4", "fp4"]
            .into_iter()
            .flat_map(|kind| {
                with(&format!(".quant_state.bitsandbytes__{kind}"))
                    .into_iter()
                    .map(move |name| (name, kind))
            })
            .collect();
        if !packed.is_empty() {
            let scheme = self.packed_scheme(&packed[0])?;
            for layer in packed {
                let parts = self.taken(|part| format!("{layer}.{part}"), &GPTQ_PARTS);
                let shape = parts.get("qweight").map_or(&[][..], |held| &held.info.shape);
                let (rows, columns) = match (shape, scheme) {
                    (&[words, rows], Scheme::Gptq { bits, .. }) => {
                        (rows, words.saturating_mul(u64::from(32 / bits)))
                    }
                    (&[columns, words], _) => (words.saturating_mul(8), columns),
                    _ => (0, 0),
                };
                let name = format!("{layer}.weight");
                found
                    .push((name, Quantized { scheme, rows, columns, is_transposed: false, parts }));
            }
        }
        for layer in rows {
            let name = format!("{layer}.weight");
            let part =
                |part: &str| if part == "SCB" { format!("{layer}.SCB") } else { name.clone() };
            let parts = self.taken(part, &["weight", "SCB"]);
            self.tensors.shift_remove(&format!("{layer}.weight_format"));
            let shape = parts.get("weight").map_or(&[][..], |held| &held.info.shape);
            let &[rows, columns] = shape else { continue };
            let scheme = Scheme::Int8Rows;
            found.push((name, Quantized { scheme, rows, columns, is_transposed: false, parts }));
        }
        for (name, kind) in states {
            let state = format!("quant_state.bitsandbytes__{kind}");
            let part = |part: &str| match part {
                "packed" => name.clone(),
                "state" => format!("{name}.{state}"),
                other => format!("{name}.{other}"),
            };
            let parts = self.taken(part, &TABLE_PARTS);
            let quantized = self.of_state(&name, parts)?;
            found.push((name, quantized));
        }
        for (name, quantized) in found {
            quantized.check(&name, &self.files)?;
            let file = quantized.parts.first().map_or(0, |(_, held)| held.file);
            let Quantized { rows, columns, is_transposed, .. } = quantized;
            let shape = if is_transposed { vec![columns, rows] } else { vec![rows, columns] };
            let info = TensorInfo { dtype: Dtype::F32, shape };
            let quantized = Some(Box::new(quantized));
            self.tensors
                .insert(name, Held { file, info, place: None, pieces: Vec::new(), quantized });
        }
        // More matrices than tensors: one of them is missing, which `stack` reports.
        let most = self.tensors.len() as u64 + 1;
        let stacks = described.stacks.iter().map(|(name, &matrices)| {
            let matrices = 0..matrices.min(most);
            let elements = matrices.map(|index| vec![format!("{name}.{index}")]).collect();
            Stack { name: name.clone(), elements }
        });
        self.stack(stacks.collect())
    }

    /// Removes and returns the parts of a weight that exist, under the names that `name_of` returns.
    fn taken(
        &mut self,
        name_of: impl Fn(&str) -> String,
        parts: &[&'static str],
    ) -> IndexMap<&'static str, Held> {
        let found = parts
            .iter()
            .filter_map(|&part| Some((part, self.tensors.shift_remove(&name_of(part))?)));
        found.collect()
    }

    /// Returns the scheme, GPTQ or AWQ, by the configuration next to a layer's file.
    fn packed_scheme(&self, layer: &str) -> Result<Scheme, Error> {
        let held = &self.tensors[&format!("{layer}.qweight")];
        let path = &self.files[held.file].path;
        let folder = path.parent().unwrap_or_else(|| Path::new(""));
        let unsupported =
            |path: &Path, fact: String| Error::Unsupported { path: path.to_owned(), fact };
        let Some((path, config)) = config_of(folder)? else {
            return Err(unsupported(
                path,
                format!(
                    "`{}.qweight` is quantised, and the quantization method is unknown: there is no \
                     config.json beside the file; put the config.json of the model there",
                    shown(layer)
                ),
            ));
        };
        let bits = config.bits.or(config.w_bit).unwrap_or(4);
        let version = match &config.version {
            Some(serde_json::Value::String(text)) => text.to_ascii_lowercase(),
            Some(other) => other.to_string(),
            None => "gemm".to_owned(),
        };
        let method = config.quant_method.as_deref().unwrap_or("gptq");
        match (method, bits) {
            ("gptq", 4 | 8) => match config.checkpoint_format.as_deref().unwrap_or("gptq") {
                "gptq" => Ok(Scheme::Gptq { bits, offset: 1 }),
                "gptq_v2" => Ok(Scheme::Gptq { bits, offset: 0 }),
                other => Err(unsupported(
                    &path,
                    format!(
                        "unknown `checkpoint_format` `{}` of GPTQ; gptq and gptq_v2 can be read",
                        shown(other)
                    ),
                )),
            },
            ("awq", 4) if version == "gemm" => Ok(Scheme::Awq),
            ("awq", 4) => Err(unsupported(
                &path,
                format!("unknown `version` `{}` of AWQ; gemm can be read", shown(&version)),
            )),
            ("gptq" | "awq", _) => Err(unsupported(
                &path,
                format!(
                    "{method} with {bits} bits; gptq with 4 and 8 bits and awq with 4 bits can be read"
                ),
            )),
            (other, _) => Err(unsupported(
                &path,
                format!(
                    "its weights are quantised by `{}`, and the files have packed tensors (`{}.qweight`); gptq and awq can be \
                 read",
                    shown(other),
                    shown(layer)
                ),
            )),
        }
    }

    /// Returns a weight of bitsandbytes, by the description in its own tensor.
    fn of_state(
        &self,
        name: &str,
        parts: IndexMap<&'static str, Held>,
    ) -> Result<Quantized, Error> {
        #[derive(Deserialize)]
        struct State {
            blocksize: u64,
            shape: Vec<u64>,
            nested_blocksize: Option<u64>,
            nested_offset: Option<f32>,
        }
        let held = &parts["state"];
        let path = self.files[held.file].path.clone();
        let damaged = |fact: String| Error::Damaged {
            path: path.clone(),
            fact: format!("`{}`: {fact}", shown(name)),
        };
        let reader = TensorReader { name, held, files: &self.files };
        if held.info.bytes().is_none_or(|bytes| bytes > MOST_STATE_BYTES) {
            return Err(damaged(format!("its quant_state is {}", held.info)));
        }
        let bytes = reader.bytes(&Region::whole(&held.info.shape))?;
        let state: State = serde_json::from_slice(&bytes)
            .map_err(|error| damaged(format!("its quant_state is wrong: {error}")))?;
        let (&[rows, columns], 1..) = (&state.shape[..], state.blocksize) else {
            return Err(damaged(format!(
                "its quant_state has the shape {:?} and blocks of {}",
                state.shape, state.blocksize
            )));
        };
        let nested = match (state.nested_blocksize, state.nested_offset) {
            (Some(0), _) => {
                return Err(damaged("its quant_state has nested blocks of 0".to_owned()));
            }
            (Some(block), offset) => Some((block, offset.unwrap_or(0.0))),
            (None, _) => None,
        };
        let scheme = Scheme::Table { block: state.blocksize, nested };
        Ok(Quantized { scheme, rows, columns, is_transposed: false, parts })
    }
}

/// Maximum size of a description, which has about 200 bytes.
const MOST_STATE_BYTES: u64 = 1 << 16;
const GPTQ_PARTS: [&str; 4] = ["qweight", "qzeros", "scales", "g_idx"];
const TABLE_PARTS: [&str; 6] =
    ["packed", "state", "absmax", "quant_map", "nested_absmax", "nested_quant_map"];

impl Quantized {
    /// Checks types and shapes of all parts.
    fn check(&self, name: &str, files: &[OpenFile]) -> Result<(), Error> {
        use Dtype::{BF16, F8E4M3, F16, F32, I8, I32, U8, U32};
        let &Self { rows, columns, .. } = self;
        let path = self.parts.first().map_or(0, |(_, held)| held.file);
        let path = files.get(path).map(|file| file.path.clone()).unwrap_or_default();
        let damaged = |fact: String| Error::Damaged {
            path: path.clone(),
            fact: format!("`{}`: {fact}", shown(name)),
        };
        let values =
            rows.checked_mul(columns).filter(|&values| values <= i64::MAX.unsigned_abs() / 8);
        let Some(values) = values.filter(|&values| values > 0) else {
            return Err(damaged(format!("a weight of {rows} x {columns}")));
        };
        let words: &[Dtype] = &[I32, U32];
        let floats: &[Dtype] = &[F16, BF16, F32];
        let mut expected: Vec<(&str, &[Dtype], Vec<u64>)> = Vec::new();
        match self.scheme {
            Scheme::Own(format) => {
                let size = usize::try_from(columns).unwrap_or(usize::MAX);
                format.check(size).map_err(|error| damaged(error.to_string()))?;
                let groups = format.scales_per_row(size) as u64;
                let width = format.row_bytes(size) as u64;
                let dtype: &[Dtype] = match format {
                    QuantizedFormat::Int8 => &[I8],
                    QuantizedFormat::Int4 { .. } => &[U8],
                    QuantizedFormat::Fp8 => &[F8E4M3],
                };
                expected.push(("packed", dtype, vec![rows, width]));
                let shape = if format.has_zeros() { vec![rows, groups] } else { vec![rows] };
                expected.push(("scales", floats, shape.clone()));
                if format.has_zeros() {
                    expected.push(("zeros", floats, shape));
                }
                if self.parts.contains_key("order") {
                    expected.push(("order", words, vec![columns]));
                }
            }
            Scheme::Gptq { .. } | Scheme::Awq => {
                let bits = if let Scheme::Gptq { bits, .. } = self.scheme { bits } else { 4 };
                let each = u64::from(32 / bits);
                let groups =
                    self.parts.get("scales").and_then(|held| held.info.shape.first().copied());
                let groups = groups.unwrap_or(0);
                if groups == 0 || columns % groups != 0 && !self.parts.contains_key("g_idx") {
                    return Err(damaged(format!(
                        "{groups} groups do not divide {columns} columns"
                    )));
                }
                if rows % each != 0 || columns % each != 0 {
                    return Err(damaged(format!(
                        "{rows} x {columns} values do not fill words of {each}"
                    )));
                }
                let shape = if self.scheme == Scheme::Awq {
                    vec![columns, rows / each]
                } else {
                    vec![columns / each, rows]
                };
                expected.push(("qweight", words, shape));
                expected.push(("qzeros", words, vec![groups, rows / each]));
                expected.push(("scales", floats, vec![groups, rows]));
                if self.parts.contains_key("g_idx") {
                    expected.push(("g_idx", words, vec![columns]));
                }
            }
            Scheme::Int8Rows => {
                expected.push(("weight", &[I8], vec![rows, columns]));
                expected.push(("SCB", floats, vec![rows]));
            }
            Scheme::Table { block, nested } => {
                let blocks = values.div_ceil(block);
                let absmax: &[Dtype] = if nested.is_some() { &[U8] } else { floats };
                expected.push(("packed", &[U8], vec![values.div_ceil(2), 1]));
                expected.push(("absmax", absmax, vec![blocks]));
                expected.push(("quant_map", floats, vec![16]));
                if let Some((block, _)) = nested {
                    expected.push(("nested_absmax", floats, vec![blocks.div_ceil(block)]));
                    expected.push(("nested_quant_map", floats, vec![256]));
                }
            }
        }
        for (part, dtypes, shape) in expected {
            let Some(held) = self.parts.get(part) else {
                return Err(damaged(format!("its tensor `{part}` is missing")));
            };
            if !dtypes.contains(&held.info.dtype) || held.info.shape != shape {
                let expected = TensorInfo { dtype: dtypes[0], shape };
                return Err(damaged(format!("its `{part}` is {}, expected {expected}", held.info)));
            }
        }
        Ok(())
    }
}

impl<'r> TensorReader<'r> {
    /// Reads a quantized weight without dequantizing it, in a format of libtorch's kernels.
    ///
    /// Returns weights in Brigade's layout, weights of GPTQ and AWQ in 4 bits with groups of equal size, and in 8 bits
    /// with one symmetric group. Returns `None` for others, which [`TensorReader::read`] dequantizes. The weight always
    /// has the shape `[out, in]`, even if the parameter is `[in, out]`; the weights of a
    /// [stack](WeightsReader::stack) follow each other, `[elements · out, in]`.
    ///
    /// # Errors
    /// Returns the errors of [`TensorReader::read`], and [`Error::Damaged`] for inconsistent numbers.
    pub fn read_packed(&self) -> Result<Option<PackedWeight>, Error> {
        if let Some(quantized) = &self.held.quantized {
            return self.packed_rows(quantized, 0..quantized.rows);
        }
        if !self.is_quantized() || self.is_transposed() {
            return Ok(None);
        }
        let mut parts = Vec::with_capacity(self.held.pieces.len());
        for piece in &self.held.pieces {
            let part = TensorReader { name: &piece.name, held: &piece.held, files: self.files };
            match part.read_packed()? {
                Some(packed) => parts.push(packed),
                None => return Ok(None),
            }
        }
        Ok(PackedWeight::stacked(parts))
    }

    /// Returns `true` if the tensor is a quantized weight whose parameter has the shape `[in, out]`.
    #[must_use]
    pub fn is_transposed(&self) -> bool {
        let is_transposed =
            |held: &Held| held.quantized.as_ref().is_some_and(|it| it.is_transposed);
        is_transposed(self.held) || self.held.pieces.iter().any(|piece| is_transposed(&piece.held))
    }

    /// Returns `true` if the tensor is stored quantized.
    #[must_use]
    pub fn is_quantized(&self) -> bool {
        let pieces = &self.held.pieces;
        self.held.quantized.is_some()
            || (!pieces.is_empty() && pieces.iter().all(|piece| piece.held.quantized.is_some()))
    }

    fn packed_rows(
        &self,
        quantized: &'r Quantized,
        rows: Range<u64>,
    ) -> Result<Option<PackedWeight>, Error> {
        let made = match quantized.scheme {
            Scheme::Own(format) => {
                let columns = quantized.columns as usize;
                let has = |part| quantized.parts.contains_key(part);
                let floats = |part| self.part(part)?.floats(0, &rows);
                let order = if has("order") {
                    Some(self.part("order")?.words(&Region::whole(&[quantized.columns]))?)
                } else {
                    None
                };
                let packed = PackedWeight {
                    format,
                    rows: (rows.end - rows.start) as usize,
                    columns,
                    packed: self.part("packed")?.rows(&rows)?,
                    scales: floats("scales")?,
                    zeros: if format.has_zeros() { floats("zeros")? } else { Vec::new() },
                    order,
                };
                packed.check().map(|()| Some(packed))
            }
            Scheme::Gptq { .. } | Scheme::Awq => self.numbers(quantized, &rows)?.pack(),
            Scheme::Table { .. } | Scheme::Int8Rows => Ok(None),
        };
        made.map_err(|error| self.contradiction(&error))
    }

    fn contradiction(&self, error: &QuantizeError) -> Error {
        Error::Damaged {
            path: self.path().to_owned(),
            fact: format!("`{}`: {error}", shown(self.name)),
        }
    }

    /// Reads a region of a quantized weight as float32.
    pub(super) fn read_quantized(
        &self,
        quantized: &'r Quantized,
        region: &Region,
        into: &mut [u8],
    ) -> Result<(), Error> {
        let dim = usize::from(quantized.is_transposed);
        let (first, count) = (region.offset[dim], region.shape[dim]);
        let (column, columns) = (region.offset[1 - dim] as usize, region.shape[1 - dim] as usize);
        let step = (PART_VALUES / quantized.columns.max(1)).max(8);
        let all = quantized.columns as usize;
        for start in (0..count).step_by(step as usize) {
            let rows = first + start..first + (start + step).min(count);
            let mut values = vec![0f32; (rows.end - rows.start) as usize * all];
            self.values(quantized, &rows, &mut values)?;
            for (row, values) in (start as usize..).zip(values.chunks_exact(all.max(1))) {
                for (place, value) in values[column..column + columns].iter().enumerate() {
                    let at = if quantized.is_transposed {
                        place * count as usize + row
                    } else {
                        row * columns + place
                    };
                    into[4 * at..4 * at + 4].copy_from_slice(&value.to_le_bytes());
                }
            }
        }
        Ok(())
    }

    fn values(
        &self,
        quantized: &'r Quantized,
        rows: &Range<u64>,
        into: &mut [f32],
    ) -> Result<(), Error> {
        match quantized.scheme {
            Scheme::Own(_) => {
                let Some(packed) = self.packed_rows(quantized, rows.clone())? else {
                    return Ok(());
                };
                packed.dequantize(0..packed.rows, into).map_err(|error| self.contradiction(&error))
            }
            Scheme::Gptq { .. } | Scheme::Awq => {
                self.numbers(quantized, rows)?.dequantize(into);
                Ok(())
            }
            Scheme::Int8Rows => {
                let numbers = self.part("weight")?.rows(rows)?;
                let largest = self.part("SCB")?.floats(0, rows)?;
                let columns = quantized.columns as usize;
                for ((value, number), place) in into.iter_mut().zip(numbers).zip(0..) {
                    *value =
                        f32::from(number.cast_signed()) * largest[place / columns] * ONE_OF_127;
                }
                Ok(())
            }
            Scheme::Table { block, nested } => {
                let columns = quantized.columns;
                let (first, end) = (rows.start * columns, rows.end * columns);
                if first == end {
                    return Ok(());
                }
                let packed = self.part("packed")?.rows(&(first / 2..end.div_ceil(2)))?;
                let table = self.part("quant_map")?.floats(0, &(0..16))?;
                let blocks = first / block..end.div_ceil(block);
                let largest = match nested {
                    None => self.part("absmax")?.floats(0, &blocks)?,
                    Some((outer, offset)) => {
                        let places = self.part("absmax")?.rows(&blocks)?;
                        let table = self.part("nested_quant_map")?.floats(0, &(0..256))?;
                        let outers = blocks.start / outer..blocks.end.div_ceil(outer);
                        let scales = self.part("nested_absmax")?.floats(0, &outers)?;
                        let at = |block: u64| scales[(block / outer - outers.start) as usize];
                        let values = places.iter().zip(blocks.clone());
                        values
                            .map(|(&place, block)| table[usize::from(place)] * at(block) + offset)
                            .collect()
                    }
                };
                for (value, place) in into.iter_mut().zip(first..end) {
                    let byte = packed[(place / 2 - first / 2) as usize];
                    // The first of two numbers is in the high bits.
                    let number = if place % 2 == 0 { byte >> 4 } else { byte & 0xf };
                    *value = table[usize::from(number)]
                        * largest[(place / block - blocks.start) as usize];
                }
                Ok(())
            }
        }
    }

    /// Reads some rows in GPTQ's or AWQ's layout.
    fn numbers(&self, quantized: &'r Quantized, rows: &Range<u64>) -> Result<Numbers, Error> {
        let (bits, offset) = match quantized.scheme {
            Scheme::Gptq { bits, offset } => (bits, offset),
            _ => (4, 0),
        };
        let each = u64::from(32 / bits);
        let order: &[usize] =
            if quantized.scheme == Scheme::Awq { &AWQ_ORDER } else { &[0, 1, 2, 3, 4, 5, 6, 7] };
        let (columns, count) = (quantized.columns as usize, (rows.end - rows.start) as usize);
        let groups = quantized.parts["scales"].info.shape[0];
        // Words contain several rows: take those that cover the range.
        let words = rows.start / each..rows.end.div_ceil(each);
        let skipped = (rows.start - words.start * each) as usize;
        let covering = |part, lines: u64| -> Result<Vec<u8>, Error> {
            let width = words.end - words.start;
            let region = Region { offset: vec![0, words.start], shape: vec![lines, width] };
            let found = self.part(part)?.words(&region)?;
            // Transposes `[lines, rows]` to `[rows, lines]`.
            let mut numbers = vec![0; count * lines as usize];
            for (place, &word) in found.iter().enumerate() {
                let (line, first) =
                    (place / width as usize, place % width as usize * each as usize);
                for (at, number) in unpack(word, bits).enumerate() {
                    let row = first + order[at];
                    if let Some(row) = row.checked_sub(skipped).filter(|&row| row < count) {
                        numbers[row * lines as usize + line] = number;
                    }
                }
            }
            Ok(numbers)
        };
        let numbers = if quantized.scheme == Scheme::Awq {
            covering("qweight", quantized.columns)?
        } else {
            let lines = quantized.columns / each;
            let region =
                Region { offset: vec![0, rows.start], shape: vec![lines, rows.end - rows.start] };
            let found = self.part("qweight")?.words(&region)?;
            let mut numbers = vec![0; count * columns];
            for (place, &word) in found.iter().enumerate() {
                let (line, row) = (place / count.max(1), place % count.max(1));
                for (at, number) in unpack(word, bits).enumerate() {
                    numbers[row * columns + line * each as usize + at] = number;
                }
            }
            numbers
        };
        let zeros = covering("qzeros", groups)?;
        let zeros = zeros.into_iter().map(|zero| f32::from(zero) + f32::from(offset)).collect();
        let found = self.part("scales")?.floats(1, rows)?;
        let mut scales = vec![0f32; found.len()];
        for (place, &scale) in found.iter().enumerate() {
            scales[place % count.max(1) * groups as usize + place / count.max(1)] = scale;
        }
        let group_of = if quantized.parts.contains_key("g_idx") {
            self.part("g_idx")?.words(&Region::whole(&[quantized.columns]))?
        } else {
            let group = quantized.columns / groups;
            (0..quantized.columns).map(|column| (column / group) as u32).collect()
        };
        if let Some(group) = group_of.iter().find(|&&group| u64::from(group) >= groups) {
            let fact =
                format!("`{}`: its `g_idx` names the group {group} of {groups}", shown(self.name));
            return Err(Error::Damaged { path: self.path().to_owned(), fact });
        }
        Ok(Numbers { bits, rows: count, numbers, scales, zeros, group_of })
    }

    /// Returns a part of the weight.
    fn part(&self, part: &'static str) -> Result<Self, Error> {
        let held = self.held.quantized.as_ref().and_then(|it| it.parts.get(part));
        let held = held.ok_or_else(|| Error::Damaged {
            path: self.path().to_owned(),
            fact: format!("`{}`: its tensor `{part}` is missing", shown(self.name)),
        })?;
        Ok(Self { name: self.name, held, files: self.files })
    }

    fn bytes(&self, region: &Region) -> Result<Vec<u8>, Error> {
        let info = TensorInfo { dtype: self.held.info.dtype, shape: region.shape.clone() };
        let mut bytes = vec![0; info.bytes().unwrap_or(0) as usize];
        self.read(region, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads rows of a part as stored.
    fn rows(&self, rows: &Range<u64>) -> Result<Vec<u8>, Error> {
        self.bytes(&Region::whole(&self.held.info.shape).narrow(
            0,
            rows.start,
            rows.end - rows.start,
        ))
    }

    fn words(&self, region: &Region) -> Result<Vec<u32>, Error> {
        let bytes = self.bytes(region)?;
        Ok(bytes.as_chunks().0.iter().map(|&word| u32::from_le_bytes(word)).collect())
    }

    /// Reads a range along a dimension as float32.
    fn floats(&self, dim: usize, range: &Range<u64>) -> Result<Vec<f32>, Error> {
        let whole = Region::whole(&self.held.info.shape);
        let bytes = self.bytes(&whole.narrow(dim, range.start, range.end - range.start))?;
        Ok(match self.held.info.dtype {
            Dtype::F16 => {
                bytes.as_chunks().0.iter().map(|&it| f16::from_le_bytes(it).to_f32()).collect()
            }
            Dtype::BF16 => {
                bytes.as_chunks().0.iter().map(|&it| bf16::from_le_bytes(it).to_f32()).collect()
            }
            _ => bytes.as_chunks().0.iter().map(|&it| f32::from_le_bytes(it)).collect(),
        })
    }
}

/// Quantized weights that the metadata of files describe.
#[derive(Default)]
pub(super) struct Descriptions {
    /// Format, shape `[out, in]`, and `true` if the parameter is `[in, out]`, by the parameter's name.
    weights: IndexMap<String, (QuantizedFormat, [u64; 2], bool)>,
    /// Number of matrices of each stack.
    stacks: IndexMap<String, u64>,
}

impl Descriptions {
    pub(super) fn extend(&mut self, other: Self) {
        self.weights.extend(other.weights);
        self.stacks.extend(other.stacks);
    }
}

/// Parses the quantized weights in the metadata of a file.
pub(super) fn described(text: &str) -> Result<Descriptions, String> {
    let description = QuantizedDescription::read(text)?;
    let weights = description.weights.into_iter().map(|(name, weight)| {
        let format =
            weight.format.parse().map_err(|error| format!("`{}`: {error}", shown(&name)))?;
        Ok((name, (format, weight.shape, weight.transposed)))
    });
    let weights = weights.collect::<Result<_, String>>()?;
    Ok(Descriptions { weights, stacks: description.stacks.into_iter().collect() })
}
