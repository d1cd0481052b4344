//! State dictionaries of programs saved by `torch.export.save`: `.pt2`.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::archive::Archive;
use super::{MAX_DIMENSIONS, StorageKey, StoredTensor};
use crate::dtype::Dtype;
use crate::fault::Fault;
use crate::value::Value;

/// Tensors of a program, as listed in `data/weights/NAME_weights_config.json`.
#[derive(Debug, Deserialize)]
pub(super) struct Config {
    /// Tensors sorted by name: the order in JSON has no meaning.
    config: BTreeMap<String, Weight>,
}

#[derive(Debug, Deserialize)]
struct Weight {
    /// File in the folder of the config.
    path_name: String,
    /// `true` if the file is one of `torch.save`.
    use_pickle: bool,
    tensor_meta: Meta,
}

#[derive(Debug, Deserialize)]
struct Meta {
    /// Number of a `ScalarType` in PyTorch's schema of exported programs.
    dtype: u64,
    sizes: Vec<Int>,
    strides: Vec<Int>,
    storage_offset: Int,
}

#[derive(Debug, Clone, Copy, Deserialize)]
enum Int {
    #[serde(rename = "as_int")]
    Number(i64),
}

/// Returns the `torch.save` file with the state dictionary in an archive of PyTorch before 2.8. `None` for any other
/// archive.
pub(super) fn saved_state_dict(archive: &Archive) -> Result<Option<Archive>, Fault> {
    if archive.has(STATE_DICT) { archive.open_inner(STATE_DICT).map(Some) } else { Ok(None) }
}

/// Reads the lists of weights in an archive. Empty unless it is one of `torch.export`.
pub(super) fn configs(archive: &Archive, folder: &str) -> Result<Vec<Config>, Fault> {
    let begin = format!("{folder}/{WEIGHTS}");
    let is_config = |name: &&str| name.starts_with(&begin) && name.ends_with(CONFIG);
    let mut names: Vec<String> = archive.names().filter(is_config).map(ToOwned::to_owned).collect();
    names.sort();
    let read = |name: &String| {
        let text = archive.read(name)?;
        serde_json::from_slice(&text).map_err(|error| {
            Fault::damaged(format_args!("the entry {name} is not a list of weights: {error}"))
        })
    };
    names.iter().map(read).collect()
}

/// Returns the state dictionary of an archive with these lists. If several programs have a name, the first counts.
pub(super) fn state_dict(
    archive: &Archive,
    folder: &str,
    configs: &[Config],
) -> Result<Value<StoredTensor>, Fault> {
    let mut weights = BTreeMap::new();
    for (name, weight) in configs.iter().flat_map(|config| &config.config) {
        weights.entry(name).or_insert(weight);
    }
    let tensor = |(name, weight): (&String, &Weight)| {
        let tensor = weight.tensor(archive, folder).map_err(|fault| fault.about(name))?;
        Ok((Value::Str(name.clone()), Value::Tensor(tensor)))
    };
    Ok(Value::Dict(weights.into_iter().map(tensor).collect::<Result<_, Fault>>()?))
}

impl Weight {
    fn tensor(&self, archive: &Archive, folder: &str) -> Result<StoredTensor, Fault> {
        if self.use_pickle {
            return Err(Fault::unsupported(
                "it is pickled within the exported program; save the program's `state_dict` with torch.save",
            ));
        }
        let Meta { dtype, sizes, strides, storage_offset } = &self.tensor_meta;
        let row = SCALAR_TYPES.iter().find(|(number, _)| number == dtype);
        let (_, dtype) = row.copied().ok_or_else(|| {
            Fault::unsupported(format_args!(
                "its dtype has the number {dtype} in PyTorch's schema, which this version of Brigade does not know"
            ))
        })?;
        if sizes.len() > MAX_DIMENSIONS {
            return Err(Fault::damaged(format_args!("it has {} dimensions", sizes.len())));
        }
        let key = format!("{}{}", &WEIGHTS["data/".len()..], self.path_name);
        let bytes = archive.bytes(&format!("{folder}/data/{key}"))?;
        let elements = i64::try_from(bytes / dtype.bytes()).unwrap_or(i64::MAX);
        let numbers = |ints: &[Int]| ints.iter().map(|Int::Number(number)| *number).collect();
        let Int::Number(offset) = *storage_offset;
        Ok(StoredTensor {
            storage: StorageKey { key, dtype, elements },
            offset,
            size: numbers(sizes),
            stride: numbers(strides),
            quantizer: None,
        })
    }
}

const STATE_DICT: &str = "serialized_state_dict.pt";
const WEIGHTS: &str = "data/weights/";
const CONFIG: &str = "_weights_config.json";
/// Numbers of `torch._export.serde.schema.ScalarType`.
const SCALAR_TYPES: [(u64, Dtype); 21] = [
    (1, Dtype::U8),
    (2, Dtype::I8),
    (3, Dtype::I16),
    (4, Dtype::I32),
    (5, Dtype::I64),
    (6, Dtype::F16),
    (7, Dtype::F32),
    (8, Dtype::F64),
    (9, Dtype::C32),
    (10, Dtype::C64),
    (11, Dtype::C128),
    (12, Dtype::Bool),
    (13, Dtype::BF16),
    (28, Dtype::U16),
    (29, Dtype::F8E4M3),
    (30, Dtype::F8E5M2),
    (31, Dtype::F8E4M3Fnuz),
    (32, Dtype::F8E5M2Fnuz),
    (33, Dtype::F8E8M0),
    (34, Dtype::U32),
    (35, Dtype::U64),
];
