//! The `.metadata` file of `torch.distributed.checkpoint`.

mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

pub use self::write::write_dcp_metadata;
use super::pickle::{Dialect, Global, Node, Pickle, Value};
use super::{MAX_DIMENSIONS, shown};
use crate::fault::Fault;
use crate::{Dtype, Error, Region};

/// Metadata of a `torch.distributed.checkpoint` folder: its tensors, and the places of their parts.
#[derive(Debug, Clone, PartialEq)]
pub struct DcpMetadata {
    /// Tensors of the checkpoint, by name.
    pub tensors: BTreeMap<String, DcpTensor>,
    /// Names of the values that are not tensors, each saved by `torch.save`.
    pub values: BTreeSet<String>,
    /// Places of all parts of tensors, and of the other values.
    pub places: Vec<DcpPlace>,
    /// Keys of each tensor or value in the saved dictionaries and lists, outermost first. A missing name is itself a
    /// key of the outermost dictionary.
    pub keys: BTreeMap<String, Vec<DcpKey>>,
}

/// A key of a dictionary, or an index of a list.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum DcpKey {
    /// Key of a dictionary.
    Name(String),
    /// Index of a list.
    Index(u64),
}

impl fmt::Display for DcpKey {
    /// Writes the name or the index.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Index(index) => write!(f, "{index}"),
        }
    }
}

/// Data type, shape and parts of a tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct DcpTensor {
    /// Data type of the elements.
    pub dtype: Dtype,
    /// Shape of the whole tensor.
    pub shape: Vec<u64>,
    /// Regions that the ranks have saved.
    pub chunks: Vec<Region>,
}

/// Location of one part or value, in a file of the folder.
#[derive(Debug, Clone, PartialEq)]
pub struct DcpPlace {
    /// Name of the tensor or value.
    pub name: String,
    /// Index of the part's first element, one number per dimension. `None` for a value that is not a tensor.
    pub offset: Option<Vec<u64>>,
    /// Name of the file, as in the pickle. Not checked.
    pub file: String,
    /// Offset of the first byte in the file.
    pub start: u64,
    /// Length of the part in bytes.
    pub length: u64,
}

/// Parses the bytes of a `.metadata` file. Nothing in it is executed.
///
/// `path` is the file that the bytes are from, used in errors.
///
/// # Errors
/// Fails with [`Error::Damaged`], or with [`Error::Unsupported`] for a pickle of anything else.
pub fn dcp_metadata(path: &Path, bytes: &[u8]) -> Result<DcpMetadata, Error> {
    let read = || {
        let pickle = Pickle::read(bytes, Dialect::Torch)?;
        Walk { pickle, left: bytes.len() }.metadata()
    };
    read().map_err(|fault| fault.at(path))
}

struct Walk<'a> {
    pickle: Pickle<'a>,
    /// Remaining bytes of names, and parts: sharing in the pickle must not multiply them.
    left: usize,
}

impl<'a> Walk<'a> {
    fn metadata(mut self) -> Result<DcpMetadata, Fault> {
        let root = self.pickle.root();
        self.class(root, "Metadata")?;
        let (mut tensors, mut values) = (BTreeMap::new(), BTreeSet::new());
        for (name, entry) in self.dict(self.attribute(root, "state_dict_metadata")?)?.to_vec() {
            let Value::Str(name) = name else { return Err(unknown("a name")) };
            self.count(name.len())?;
            if self.class(entry, "BytesStorageMetadata").is_ok() {
                values.insert(name.to_owned());
                continue;
            }
            let tensor = self.tensor(entry).map_err(|fault| fault.about(&shown(name)))?;
            tensors.insert(name.to_owned(), tensor);
        }
        let mut places = Vec::new();
        for (index, info) in self.dict(self.attribute(root, "storage_data")?)?.to_vec() {
            self.count(PART_BYTES * MAX_COPIES)?;
            places.push(self.place(index, info)?);
        }
        let keys = self.keys(root, |name| tensors.contains_key(name) || values.contains(name))?;
        Ok(DcpMetadata { tensors, values, places, keys })
    }

    fn keys(
        &mut self,
        root: Value<'a>,
        is_known: impl Fn(&str) -> bool,
    ) -> Result<BTreeMap<String, Vec<DcpKey>>, Fault> {
        let mut keys = BTreeMap::new();
        let planned = match self.attribute(root, "planner_data")? {
            Value::None => return Ok(keys),
            planned => self.dict(planned)?.to_vec(),
        };
        for (name, path) in planned {
            let Value::Str(name) = name else { return Err(unknown("a name")) };
            if !is_known(name) {
                continue;
            }
            let path = self.items(path)?.to_vec();
            if path.is_empty() || path.len() > MAX_KEYS {
                return Err(unknown("the keys of a value"));
            }
            self.count(name.len() + path.len())?;
            let mut of_value = Vec::with_capacity(path.len());
            for key in path {
                of_value.push(match key {
                    Value::Int(_) => DcpKey::Index(natural(key)?),
                    key => DcpKey::Name(self.text(key)?),
                });
            }
            keys.insert(name.to_owned(), of_value);
        }
        Ok(keys)
    }

    fn tensor(&mut self, entry: Value<'a>) -> Result<DcpTensor, Fault> {
        self.class(entry, "TensorStorageMetadata")?;
        let properties = self.attribute(entry, "properties")?;
        let dtype = match self.items(self.state(properties)?)?.first() {
            Some(Value::Global(Global::Dtype(dtype))) => Some(*dtype),
            Some(Value::Global(Global::Foreign("torch", name))) => Dtype::from_torch_name(name),
            _ => None,
        };
        let dtype = dtype.ok_or_else(|| unknown("the type of a tensor"))?;
        let shape = self.size(self.attribute(entry, "size")?)?;
        let list = self.items(self.attribute(entry, "chunks")?)?.to_vec();
        self.count(list.len().saturating_mul(PART_BYTES * MAX_COPIES))?;
        let mut chunks = Vec::with_capacity(list.len());
        for chunk in list {
            self.class(chunk, "ChunkStorageMetadata")?;
            let offset = self.size(self.attribute(chunk, "offsets")?)?;
            let part = self.size(self.attribute(chunk, "sizes")?)?;
            let inside = |dim: usize| {
                let end = offset[dim].checked_add(part[dim]);
                end.is_some_and(|end| end <= shape[dim])
            };
            if offset.len() != shape.len()
                || part.len() != shape.len()
                || !(0..shape.len()).all(inside)
            {
                return Err(Fault::damaged(format_args!(
                    "a part of shape {part:?} at {offset:?} reaches outside of shape {shape:?}"
                )));
            }
            chunks.push(Region { offset, shape: part });
        }
        Ok(DcpTensor { dtype, shape, chunks })
    }

    fn place(&mut self, index: Value<'a>, info: Value<'a>) -> Result<DcpPlace, Fault> {
        self.class(index, "MetadataIndex")?;
        self.class(info, "_StorageInfo")?;
        let name = self.text(self.attribute(index, "fqn")?)?;
        // The index of a value that is not a tensor lacks the attribute, for which its class has `None`.
        let offset = match self.attribute(index, "offset").unwrap_or(Value::None) {
            Value::None => None,
            offset => Some(self.size(offset)?),
        };
        match self.attribute(info, "transform_descriptors").unwrap_or(Value::None) {
            Value::None => {}
            transforms if self.items(transforms)?.is_empty() => {}
            _ => {
                return Err(Fault::unsupported(format_args!(
                    "`{}` was compressed or changed by an extension when it was saved; load the checkpoint in PyTorch \
                     and save it without extensions",
                    shown(&name)
                )));
            }
        }
        let file = self.text(self.attribute(info, "relative_path")?)?;
        let start = natural(self.attribute(info, "offset")?)?;
        let length = natural(self.attribute(info, "length")?)?;
        Ok(DcpPlace { name, offset, file, start, length })
    }

    fn class(&self, value: Value<'a>, class: &str) -> Result<(), Fault> {
        let found = match value {
            Value::Node(index) => self.pickle.node(index),
            _ => None,
        };
        match found {
            Some(Node::Foreign(module, name))
                if module.starts_with("torch.distributed.checkpoint.") && *name == class =>
            {
                Ok(())
            }
            Some(Node::Foreign(module, name)) => Err(Fault::unsupported(format_args!(
                "its pickle has a {} where torch.distributed.checkpoint has a {class}",
                shown(&format!("{module}.{name}"))
            ))),
            _ => Err(unknown(class)),
        }
    }

    fn state(&self, value: Value<'a>) -> Result<Value<'a>, Fault> {
        let Value::Node(index) = value else { return Err(unknown("an object")) };
        self.pickle.state(index).ok_or_else(|| unknown("an object's attributes"))
    }

    fn attribute(&self, value: Value<'a>, name: &str) -> Result<Value<'a>, Fault> {
        let entries = self.dict(self.state(value)?)?;
        if entries.len() > MAX_ATTRIBUTES {
            return Err(unknown("an object's attributes"));
        }
        let found = entries.iter().find(|(key, _)| *key == Value::Str(name));
        found.map(|(_, value)| *value).ok_or_else(|| unknown(name))
    }

    fn dict(&self, value: Value<'a>) -> Result<&[(Value<'a>, Value<'a>)], Fault> {
        match value {
            Value::Node(index) => match self.pickle.node(index) {
                Some(Node::Dict(entries)) => Ok(entries),
                _ => Err(unknown("a dictionary")),
            },
            _ => Err(unknown("a dictionary")),
        }
    }

    fn items(&self, value: Value<'a>) -> Result<&[Value<'a>], Fault> {
        match value {
            Value::Node(index) => match self.pickle.node(index) {
                Some(Node::List(items) | Node::Tuple(items)) => Ok(items),
                _ => Err(unknown("a list")),
            },
            _ => Err(unknown("a list")),
        }
    }

    /// Reads a `torch.Size`: a call with a tuple.
    fn size(&self, value: Value<'a>) -> Result<Vec<u64>, Fault> {
        let call = match value {
            Value::Node(index) => self.pickle.arguments(index),
            _ => None,
        };
        let items = match call {
            Some(arguments) => match self.items(arguments)? {
                [size] => self.items(*size)?,
                _ => return Err(unknown("a size")),
            },
            None => self.items(value)?,
        };
        if items.len() > MAX_DIMENSIONS {
            return Err(unknown("a size"));
        }
        items.iter().map(|item| natural(*item)).collect()
    }

    fn text(&mut self, value: Value<'a>) -> Result<String, Fault> {
        let Value::Str(text) = value else { return Err(unknown("a name")) };
        self.count(text.len())?;
        Ok(text.to_owned())
    }

    fn count(&mut self, amount: usize) -> Result<(), Fault> {
        let amount = amount.div_ceil(MAX_COPIES);
        self.left = self.left.checked_sub(amount).ok_or_else(|| {
            Fault::unsupported("its pickle repeats values until they are many times its size")
        })?;
        Ok(())
    }
}

fn natural(value: Value<'_>) -> Result<u64, Fault> {
    match value {
        Value::Int(number) => u64::try_from(number).map_err(|_| unknown("a size")),
        _ => Err(unknown("a size")),
    }
}

fn unknown(what: &str) -> Fault {
    Fault::unsupported(format_args!(
        "its pickle does not have {what} where torch.distributed.checkpoint writes it"
    ))
}

/// Maximum number of uses of stored data: a file name is stored once and recalled for each part.
const MAX_COPIES: usize = 16;
/// Minimum bytes of the pickle for each part of a tensor, and for each place.
const PART_BYTES: usize = 16;
/// Maximum depth of nested dictionaries.
const MAX_KEYS: usize = 32;
/// Maximum number of attributes of an object. One dictionary may be that of many objects.
const MAX_ATTRIBUTES: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    const PICKLE: &[u8] = include_bytes!("../../tests/fixtures/dcp/metadata.pkl");

    fn read(bytes: &[u8]) -> Result<DcpMetadata, Error> {
        dcp_metadata(Path::new(".metadata"), bytes)
    }

    #[test]
    fn parts_of_a_tensor_and_their_files_are_read() {
        let metadata = read(PICKLE).unwrap();
        let whole = Region::whole(&[5, 4]);
        let chunks = vec![whole.narrow(0, 0, 3), whole.narrow(0, 3, 2)];
        let tensor = DcpTensor { dtype: Dtype::F32, shape: vec![5, 4], chunks };
        assert_eq!(metadata.values, BTreeSet::from(["step".to_owned()]));
        assert_eq!(metadata.tensors, BTreeMap::from([("model.w".to_owned(), tensor)]));
        let places: Vec<_> = metadata
            .places
            .iter()
            .map(|place| (place.offset.clone(), place.file.as_str(), place.start, place.length))
            .collect();
        let expected = [
            (Some(vec![0, 0]), "__0_0.distcp", 0, 1700),
            (Some(vec![3, 0]), "__1_0.distcp", 0, 1701),
            (None, "__1_0.distcp", 1701, 40),
        ];
        assert_eq!(places, expected);
    }

    #[test]
    fn metadata_of_torch_are_read() {
        let metadata =
            read(include_bytes!("../../tests/fixtures/dcp/torch_2_13/.metadata")).unwrap();
        let weight = &metadata.tensors["model.0.weight"];
        assert_eq!((weight.dtype, weight.shape.as_slice()), (Dtype::F32, &[7, 4][..]));
        // Shards of fully_shard: ceil(7 / 2) rows, and the rest.
        let whole = Region::whole(&[7, 4]);
        assert_eq!(weight.chunks, [whole.narrow(0, 0, 4), whole.narrow(0, 4, 3)]);
        assert_eq!(metadata.tensors["model.1.bias"].dtype, Dtype::BF16);
        let moment = &metadata.tensors["optim.state.0.weight.exp_avg"];
        assert_eq!((moment.shape.as_slice(), moment.chunks.len()), (&[7, 4][..], 2));
        for (name, tensor) in &metadata.tensors {
            let parts = metadata.places.iter().filter(|place| place.name == *name).count();
            assert_eq!(parts, tensor.chunks.len(), "{name}");
        }
        let keys =
            |name: &str| metadata.keys[name].iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(keys("model.0.weight"), ["model", "0.weight"]);
        assert_eq!(keys("optim.state.0.weight.exp_avg")[..2], ["optim", "state"]);
        assert!(metadata.values.contains("optim.param_groups.0.lr"));
        assert_eq!(metadata.keys["optim.param_groups.0.lr"][2], DcpKey::Index(0));
        assert!(
            metadata.places.iter().all(|it| it.file == "__0_0.distcp" || it.file == "__1_0.distcp")
        );
    }

    #[test]
    fn cut_and_changed_bytes_are_errors_or_other_metadata() {
        for end in 0..PICKLE.len() {
            assert!(read(&PICKLE[..end]).is_err(), "cut at {end}");
        }
        for at in 0..PICKLE.len() {
            for byte in [0, b'.', 0x80, 0xff] {
                let mut bytes = PICKLE.to_vec();
                bytes[at] = byte;
                // Must not panic.
                let _ = read(&bytes);
            }
        }
    }

    /// Repeats one chunk, which takes five bytes each time.
    #[test]
    fn chunks_that_are_repeated_out_of_proportion_are_refused() {
        let whole = Region::whole(&[5, 4]);
        let tensor = DcpTensor { dtype: Dtype::F32, shape: vec![5, 4], chunks: vec![whole] };
        let metadata = DcpMetadata {
            tensors: [("w".to_owned(), tensor)].into(),
            values: BTreeSet::new(),
            places: Vec::new(),
            keys: BTreeMap::new(),
        };
        let bytes = write_dcp_metadata(&metadata).unwrap();
        assert_eq!(read(&bytes).unwrap(), metadata);
        let end = bytes.windows(3).position(|it| it == b"eub").unwrap();
        let repeated = [b"r\xff\xff\0\0".to_vec(), b"j\xff\xff\0\0".repeat(200_000)].concat();
        let bytes = [&bytes[..end], &repeated, &bytes[end..]].concat();
        let error = read(&bytes).unwrap_err().to_string();
        assert!(error.contains("many times its size"), "{error}");
    }
}
