//! Files of `torch.save`: a pickle and the storages of its tensors, in a zip archive since PyTorch 1.6, and one after
//! the other before. Also state dictionaries in the archives of TorchScript (`torch.jit.save`) and of
//! `torch.export.save`.
//!
//! Nothing in a file is ever executed, and no file, however made, takes memory or disk out of proportion to its size: a
//! tensor may be a view of a storage, but not of many times more elements than the storage has (stride 0, as `expand`
//! makes it), and all tensors together may not be many times the file.

mod archive;
mod dcp_metadata;
mod exported;
mod legacy;
mod pickle;
mod quantizer;
mod script;
mod state_dict;
mod strings;
mod write;

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

pub(crate) use archive::StoragePlace;
pub use dcp_metadata::{
    DcpKey, DcpMetadata, DcpPlace, DcpTensor, dcp_metadata, write_dcp_metadata,
};
pub(crate) use legacy::begins_legacy;
pub use quantizer::Quantizer;
pub use state_dict::StoredStateDict;
pub(crate) use state_dict::weights_under;
pub use strings::strings;
pub(crate) use write::refusal;
pub use write::{TensorData, write};

use crate::dtype::{Dtype, TensorInfo};
use crate::error::Error;
use crate::fault::Fault;
use crate::value::Value;
use archive::{Archive, read_at};
use legacy::Legacy;
use pickle::{Dialect, Node, Pickle, Storage, TensorSpec, Value as Raw};

/// An open file of `torch.save`.
///
/// ```
/// let optimizer = "tests/fixtures/accelerate/optimizer.bin"; // written by Accelerate
/// let mut file = brigade_checkpoint::pth::PthFile::open(optimizer)?;
/// let state = file.value()?;
/// let groups = state.get("param_groups").and_then(|groups| groups.as_items()).expect("a list");
/// assert!(groups[0].get("lr").is_some());
/// # Ok::<(), brigade_checkpoint::Error>(())
/// ```
#[derive(Debug)]
pub struct PthFile {
    path: PathBuf,
    container: Container,
    content: Content,
    /// Storages whose checksum was verified. Parts of these are read without reading the whole storage again.
    verified: HashSet<String>,
    /// Key and bytes of the last storage from which a non-contiguous view was gathered.
    last: Option<(String, Vec<u8>)>,
}

/// Contents of a file.
#[derive(Debug)]
enum Content {
    /// A pickle of `torch.save`.
    Pickle(Vec<u8>),
    /// A TorchScript module, of which the state dictionary is read.
    Script(script::Script),
    /// A program of `torch.export`, of which the state dictionary is read.
    Exported(Vec<exported::Config>),
}

/// Container of a file's storages.
#[derive(Debug)]
enum Container {
    /// Entries of an archive, in a folder of this name.
    Zip(Archive, String),
    Legacy(Legacy),
}

impl Container {
    /// Returns the size of the whole file in bytes.
    fn length(&self) -> u64 {
        match self {
            Self::Zip(archive, _) => archive.length(),
            Self::Legacy(legacy) => legacy.length(),
        }
    }

    /// Returns the size of a storage in bytes.
    fn bytes(&self, key: &str) -> Result<u64, Fault> {
        match self {
            Self::Zip(archive, folder) => archive.bytes(&entry(folder, key)),
            Self::Legacy(legacy) => legacy.bytes(key),
        }
    }

    /// Returns the location of a storage in the file.
    fn place(&self, key: &str) -> Result<StoragePlace, Fault> {
        match self {
            Self::Zip(archive, folder) => archive.place(&entry(folder, key)),
            Self::Legacy(legacy) => {
                let (begin, bytes) = legacy.place(key)?;
                Ok(StoragePlace { begin, bytes, checksum: None })
            }
        }
    }

    fn into_file(self) -> File {
        match self {
            Self::Zip(archive, _) => archive.into_file(),
            Self::Legacy(legacy) => legacy.into_file(),
        }
    }

    /// Reads a storage and verifies its checksum, if it has one.
    fn read(&self, key: &str) -> Result<Vec<u8>, Fault> {
        match self {
            Self::Zip(archive, folder) => archive.read(&entry(folder, key)),
            Self::Legacy(legacy) => legacy.read(key),
        }
    }

    /// Copies `bytes` of a storage from `first` on to `out`, in pieces. With `verify`, first verifies the checksum of
    /// the whole storage, if it has one.
    fn copy(
        &self,
        key: &str,
        verify: bool,
        first: u64,
        bytes: u64,
        out: &mut dyn Write,
    ) -> Result<(), Fault> {
        match self {
            Self::Zip(archive, folder) => {
                archive.copy(&entry(folder, key), verify, first, bytes, out)
            }
            Self::Legacy(legacy) => legacy.copy(key, first, bytes, out),
        }
    }
}

fn entry(folder: &str, key: &str) -> String {
    if key.starts_with(script::CONSTANTS) {
        format!("{folder}/{key}")
    } else {
        format!("{folder}/data/{key}")
    }
}

/// A tensor in a file: a view of a storage. Offset and strides count elements, or pairs of them for `float4_e2m1fn_x2`,
/// as in PyTorch.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredTensor {
    /// Storage that contains the elements.
    pub storage: StorageKey,
    /// Index of the tensor's first element in the storage.
    pub offset: i64,
    /// Shape of the tensor.
    pub size: Vec<i64>,
    /// Strides of the tensor, one per dimension.
    pub stride: Vec<i64>,
    /// Scales and zero points of a quantized tensor. `None` for other types.
    pub quantizer: Option<Box<Quantizer<Self>>>,
}

/// A storage of a file, as its pickle declares it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StorageKey {
    /// Name of the storage in the file.
    pub key: String,
    /// Data type of the elements.
    pub dtype: Dtype,
    /// Number of elements, or of bytes for types smaller than a byte, as in PyTorch.
    pub elements: i64,
}

impl PthFile {
    /// Opens a file like [`PthFile::open`], given a handle whose format was recognized before as one of `torch.save`.
    ///
    /// # Errors
    /// Returns the same errors as [`PthFile::open`].
    pub fn from_file(path: &Path, file: File) -> Result<Self, Error> {
        let length = file.metadata().map_err(Error::io("read", path))?.len();
        Self::read(path, file, length).map_err(|fault| fault.at(path))
    }

    /// Opens an archive of `torch.save` in a byte range of a file.
    pub(crate) fn from_range(
        path: &Path,
        file: &File,
        begin: u64,
        length: u64,
    ) -> Result<Self, Fault> {
        let archive = Archive::open_at(file.try_clone()?, begin, length)?;
        let (container, content) = Self::read_zip(archive)?;
        let path = path.to_owned();
        Ok(Self { path, container, content, verified: HashSet::new(), last: None })
    }

    fn read(path: &Path, file: File, length: u64) -> Result<Self, Fault> {
        let mut start = [0];
        read_at(&file, 0, &mut start)?;
        let (container, content) = if start == *b"P" {
            Self::read_zip(Archive::open(file, length)?)?
        } else {
            let (legacy, code) = Legacy::open(file, length)?;
            (Container::Legacy(legacy), Content::Pickle(code))
        };
        let path = path.to_owned();
        Ok(Self { path, container, content, verified: HashSet::new(), last: None })
    }

    fn read_zip(mut archive: Archive) -> Result<(Container, Content), Fault> {
        if let Some(inner) = exported::saved_state_dict(&archive)? {
            archive = inner;
        }
        let folder = archive.folder().to_owned();
        let order = format!("{folder}/byteorder");
        if archive.has(&order) && archive.read(&order)? != b"little" {
            return Err(Fault::unsupported(
                "its bytes are in big-endian order; save it again on a little-endian machine",
            ));
        }
        let pickle = format!("{folder}/data.pkl");
        let content = if !archive.has(&pickle) {
            let configs = exported::configs(&archive, &folder)?;
            if configs.is_empty() {
                return Err(other_archive(&archive));
            }
            Content::Exported(configs)
        } else if archive.has(&format!("{folder}/constants.pkl")) {
            Content::Script(script::Script::read(&archive, &folder)?)
        } else {
            Content::Pickle(archive.read(&pickle)?)
        };
        Ok((Container::Zip(archive, folder), content))
    }

    /// Reads the saved value. For a TorchScript module or an exported program, reads its state dictionary. Nothing is
    /// executed: objects other than tensors and plain values are reduced to their names, as [`Value::Foreign`].
    ///
    /// # Errors
    /// Fails with [`Error::Damaged`], also for a tensor outside its storage, or with [`Error::Unsupported`], also for
    /// tensors that would take many times the file's size.
    pub fn value(&self) -> Result<Value<StoredTensor>, Error> {
        self.tree(false)
    }

    /// Reads the saved value like [`PthFile::value`], but returns a `torch.Size` as a tuple, the stage of DeepSpeed's
    /// ZeRO as an integer, and DeepSpeed's loss scaler as a dictionary of its attributes.
    pub(crate) fn value_with_sizes(&self) -> Result<Value<StoredTensor>, Error> {
        self.tree(true)
    }

    fn tree(&self, with_sizes: bool) -> Result<Value<StoredTensor>, Error> {
        let tree = || {
            let tree = match (&self.content, &self.container) {
                (Content::Pickle(code), _) => {
                    let pickle = Pickle::read(code, Dialect::Torch)?;
                    let mut builder = TreeBuilder::new(&pickle, code.len());
                    builder.with_sizes = with_sizes;
                    builder.plant(pickle.root(), 0)?
                }
                (Content::Script(script), _) => script.state_dict()?,
                (Content::Exported(configs), Container::Zip(archive, folder)) => {
                    exported::state_dict(archive, folder, configs)?
                }
                // Unreachable: exported programs are always archives.
                (Content::Exported(_), Container::Legacy(_)) => Value::None,
            };
            let mut left = MAX_COPIES * self.container.length() + FREE_BYTES;
            tree.try_map(&mut |place, tensor| {
                self.check_tensor(&tensor, &mut left).map_err(|fault| fault.about(place))?;
                Ok(tensor)
            })
        };
        tree().map_err(|fault: Fault| fault.at(&self.path))
    }

    /// Checks that a tensor is within its storage, and that it and those before it may be copied out of the file.
    /// `left` is the number of bytes that they may still take.
    fn check_tensor(&self, tensor: &StoredTensor, left: &mut u64) -> Result<(), Fault> {
        self.check_storage(&tensor.storage)?;
        tensor.check()?;
        tensor.check_cost()?;
        if let Some(quantizer) = &tensor.quantizer
            && let Quantizer::PerChannel { scales, zero_points, .. } = &**quantizer
        {
            self.check_tensor(scales, left)?;
            self.check_tensor(zero_points, left)?;
        }
        let rest = tensor.info().bytes().and_then(|bytes| left.checked_sub(bytes));
        *left = rest.ok_or_else(|| {
            Fault::unsupported(format_args!(
                "the tensors to here share storages, and would take over {MAX_COPIES} times the file's size \
                 by themselves; load it in PyTorch and save what is needed of it"
            ))
        })?;
        Ok(())
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the location of a storage in the file.
    pub(crate) fn place(&self, key: &str) -> Result<StoragePlace, Fault> {
        self.container.place(key)
    }

    pub(crate) fn into_file(self) -> File {
        self.container.into_file()
    }

    /// Reads the bytes of a storage and verifies their checksum, if the format has one.
    ///
    /// # Errors
    /// Fails with [`Error::Damaged`] if the checksum or the declared size does not match, or with [`Error::Io`].
    pub fn storage(&mut self, storage: &StorageKey) -> Result<Vec<u8>, Error> {
        let read = || {
            self.check_storage(storage)?;
            self.container.read(&storage.key)
        };
        let bytes = read().map_err(|fault| fault.at(&self.path))?;
        self.verified.insert(storage.key.clone());
        Ok(bytes)
    }

    /// Reads the elements of a tensor in row-major order, regardless of its strides.
    ///
    /// # Errors
    /// Returns the same errors as [`PthFile::copy_tensor`].
    pub fn read_tensor(&mut self, tensor: &StoredTensor) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::new();
        self.copy_tensor(tensor, &mut bytes)?;
        Ok(bytes)
    }

    /// Copies the elements of a tensor to `out` in row-major order, regardless of its strides.
    ///
    /// A contiguous tensor is copied in pieces of 1 MB. For a non-contiguous one the whole storage is read and kept
    /// until a tensor of another storage is requested. The first tensor of a storage also reads all of it once, to
    /// verify its checksum.
    ///
    /// # Errors
    /// Fails with [`Error::Damaged`] like [`PthFile::storage`] and if the tensor extends outside its storage, with
    /// [`Error::Unsupported`] if it has many times the elements of its storage, or with [`Error::Io`], also for errors
    /// of the writer.
    pub fn copy_tensor(&mut self, tensor: &StoredTensor, out: &mut dyn Write) -> Result<(), Error> {
        let mut copy = || -> Result<(), Fault> {
            tensor.check()?;
            tensor.check_cost()?;
            self.check_storage(&tensor.storage)?;
            let key = &tensor.storage.key;
            let width = tensor.storage.dtype.bytes();
            let bytes = tensor.info().bytes().unwrap_or_default();
            if bytes == 0 {
                return Ok(());
            }
            if tensor.is_contiguous() {
                let first = tensor.offset.unsigned_abs() * width;
                let verify = !self.verified.contains(key);
                self.container.copy(key, verify, first, bytes, out)?;
                self.verified.insert(key.clone());
                return Ok(());
            }
            if tensor.is_packed() {
                return Err(Fault::unsupported(format_args!(
                    "a {} tensor of size {:?} has the strides {:?}; save it again with `.contiguous()` tensors",
                    tensor.storage.dtype, tensor.size, tensor.stride
                )));
            }
            if self.last.as_ref().is_none_or(|(last, _)| last != key) {
                self.last = None;
                self.last = Some((key.clone(), self.container.read(key)?));
            }
            match &self.last {
                Some((_, storage)) => tensor.gather(storage, out).map_err(Fault::Write),
                None => Ok(()),
            }
        };
        copy().map_err(|fault| fault.at(&self.path))
    }

    /// Checks that the file has the storage, with as many bytes as the pickle declares.
    fn check_storage(&self, storage: &StorageKey) -> Result<(), Fault> {
        let StorageKey { key, dtype, elements } = storage;
        let bytes = self.container.bytes(key)?;
        let declared = u64::try_from(*elements).ok();
        let declared = declared.and_then(|n| n.checked_mul(dtype.bytes()));
        // An untyped storage may end in the middle of an element.
        let fits = |declared: u64| declared <= bytes && bytes - declared < dtype.bytes();
        if !declared.is_some_and(fits) {
            return Err(Fault::damaged(format_args!(
                "storage {key} is declared as {elements} elements of {dtype} but has {bytes} bytes"
            )));
        }
        Ok(())
    }
}

impl StoredTensor {
    /// Returns data type and shape.
    #[must_use]
    pub fn info(&self) -> TensorInfo {
        let mut shape: Vec<u64> = self.size.iter().map(|size| size.unsigned_abs()).collect();
        if self.storage.dtype == Dtype::F4 {
            match shape.last_mut() {
                Some(row) => *row = row.saturating_mul(2),
                None => shape.push(2),
            }
        }
        TensorInfo { dtype: self.storage.dtype, shape }
    }

    /// Returns `true` for types smaller than a byte whose elements PyTorch counts one by one, so that strides have no
    /// meaning in bytes.
    fn is_packed(&self) -> bool {
        self.storage.dtype.is_quantized() && self.storage.dtype.bits() < 8
    }

    /// Checks that every element is inside the storage, and that shape and strides are valid.
    ///
    /// # Errors
    /// Fails with [`Error::Damaged`] for `path` otherwise.
    pub fn check_bounds(&self, path: &Path) -> Result<(), Error> {
        self.check().map_err(|fault| fault.at(path))
    }

    fn check(&self) -> Result<(), Fault> {
        let Self { storage, offset, size, stride, .. } = self;
        let outside = || {
            Fault::damaged(format_args!(
                "size {size:?}, stride {stride:?} and offset {offset} reach outside its storage of \
                 {} elements",
                storage.elements
            ))
        };
        let negative = size.iter().chain(stride).chain([offset]).any(|&number| number < 0);
        let numel = size.iter().try_fold(1i64, |product, &size| product.checked_mul(size.max(1)));
        if negative || size.len() != stride.len() || size.len() > MAX_DIMENSIONS || numel.is_none()
        {
            return Err(outside());
        }
        if size.contains(&0) {
            return if *offset <= storage.elements { Ok(()) } else { Err(outside()) };
        }
        if self.is_packed() {
            let bytes = self.info().bytes().and_then(|bytes| i64::try_from(bytes).ok());
            return match bytes {
                Some(bytes) if bytes <= storage.elements && *offset == 0 => Ok(()),
                _ => Err(outside()),
            };
        }
        let last = size.iter().zip(stride).try_fold(*offset, |last, (&size, &stride)| {
            (size - 1).checked_mul(stride).and_then(|step| last.checked_add(step))
        });
        if last.is_some_and(|last| last < storage.elements) { Ok(()) } else { Err(outside()) }
    }

    /// Returns `true` if the elements are contiguous, in row-major order.
    pub(crate) fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.size.iter().zip(&self.stride).rev().all(|(&size, &stride)| {
            let fits = size <= 1 || stride == expected;
            expected *= size.max(1);
            fits
        })
    }

    /// Fails for a view that repeats the elements of its storage out of proportion.
    fn check_cost(&self) -> Result<(), Fault> {
        let bytes = self.info().bytes();
        let whole = self.storage.elements.unsigned_abs().saturating_mul(self.storage.dtype.bytes());
        if bytes.is_none_or(|bytes| bytes > whole && bytes > FREE_BYTES) {
            return Err(Fault::unsupported(format_args!(
                "a tensor of size {:?} and stride {:?} repeats the {} elements of its storage; load the \
                 file in PyTorch and save it again with `.contiguous()` tensors, if that size is meant",
                self.size, self.stride, self.storage.elements
            )));
        }
        Ok(())
    }

    /// Writes the elements in row-major order, from the bytes of the storage. The bounds must have been checked.
    fn gather(&self, storage: &[u8], out: &mut dyn Write) -> io::Result<()> {
        let width = self.storage.dtype.bytes() as usize;
        let elements = self.size.iter().product::<i64>().max(0) as usize;
        let first = self.offset as usize * width;
        let mut piece = Vec::with_capacity(PIECE_BYTES.min(elements * width));
        let mut index = vec![0i64; self.size.len()];
        for _ in 0..elements {
            let place: i64 = index.iter().zip(&self.stride).map(|(i, s)| i * s).sum();
            let at = first + place as usize * width;
            piece.extend_from_slice(&storage[at..at + width]);
            if piece.len() + width > PIECE_BYTES {
                out.write_all(&piece)?;
                piece.clear();
            }
            for (i, size) in index.iter_mut().zip(&self.size).rev() {
                *i += 1;
                if *i < *size {
                    break;
                }
                *i = 0;
            }
        }
        out.write_all(&piece)
    }
}

/// Builds a tree from a pickle, whose containers may be shared and may contain themselves.
///
/// Shared containers are copied into the tree wherever they are used, so the size of the result is limited in
/// proportion to the pickle.
struct TreeBuilder<'p, 'a> {
    pickle: &'p Pickle<'a>,
    /// Remaining number of values. A shared container counts for each use. Each use takes at least a byte of the
    /// pickle, so only nested sharing needs more values than bytes.
    values: usize,
    /// Remaining bytes of strings.
    text_bytes: u64,
    /// Remaining bytes for the places of containers and tensors, which consist of all keys above them: a reader of the
    /// tree joins these for each ([`Value::try_map`]).
    place_bytes: u64,
    /// `true` to read the values of sizes, stages and loss scalers, not only their names.
    with_sizes: bool,
}

impl<'p, 'a> TreeBuilder<'p, 'a> {
    /// Creates a builder with limits for a pickle of this many bytes.
    fn new(pickle: &'p Pickle<'a>, bytes: usize) -> Self {
        Self {
            pickle,
            values: 2 * bytes + 1024,
            text_bytes: MAX_COPIES * bytes as u64 + FREE_BYTES,
            place_bytes: MAX_PLACES * bytes as u64 + FREE_BYTES,
            with_sizes: false,
        }
    }

    /// Counts values that are about to be read at this depth.
    fn visit(&mut self, values: usize, depth: usize) -> Result<(), Fault> {
        self.values = self.values.saturating_sub(values);
        if depth > MAX_DEPTH || self.values == 0 {
            return Err(Fault::unsupported(format_args!(
                "its values lie over {MAX_DEPTH} deep, contain themselves, or are more than its size \
                 allows"
            )));
        }
        Ok(())
    }

    fn plant(&mut self, value: Raw<'_>, depth: usize) -> Result<Value<StoredTensor>, Fault> {
        self.plant_at(value, depth, 0)
    }

    /// Builds a value. `place` is the length in bytes of its place.
    fn plant_at(
        &mut self,
        value: Raw<'_>,
        depth: usize,
        place: usize,
    ) -> Result<Value<StoredTensor>, Fault> {
        self.visit(1, depth)?;
        let index = match value {
            Raw::None => return Ok(Value::None),
            Raw::Bool(truth) => return Ok(Value::Bool(truth)),
            Raw::Int(number) => return Ok(Value::Int(number)),
            Raw::Float(number) => return Ok(Value::Float(number)),
            Raw::Str(text) => return Ok(Value::Str(self.text(text)?)),
            Raw::Bytes(bytes) => {
                self.count(bytes.len())?;
                return Ok(Value::Bytes(bytes.to_owned()));
            }
            Raw::Global(global) => return Ok(Value::Foreign(self.text(&global.to_string())?)),
            Raw::Node(index) => index,
        };
        let pickle = self.pickle;
        let Some(node) = pickle.node(index) else {
            return Err(Fault::damaged("its pickle refers to a container that is not there"));
        };
        let left = self.place_bytes.checked_sub(place as u64);
        self.place_bytes = left.ok_or_else(|| {
            Fault::unsupported(
                "the keys of its dictionaries, each with those of the dictionaries around it, are many times \
                 its size",
            )
        })?;
        let mut items = |items: &[Raw<'_>]| -> Result<Vec<_>, Fault> {
            let place = place + INDEX_BYTES;
            items.iter().map(|&item| self.plant_at(item, depth + 1, place)).collect()
        };
        Ok(match node {
            Node::List(list) => Value::List(items(list)?),
            Node::Tuple(tuple) => Value::Tuple(items(tuple)?),
            Node::Storage(_) => Value::Foreign("torch.storage".into()),
            Node::Foreign("torch", "Size") if self.with_sizes => match self.argument(index) {
                Some(size) => self.plant_at(size, depth + 1, place)?,
                None => Value::Foreign(self.text("torch.Size")?),
            },
            Node::Foreign(module, "ZeroStageEnum")
                if self.with_sizes && module.starts_with("deepspeed.") =>
            {
                match self.argument(index) {
                    Some(Raw::Int(stage)) => Value::Int(stage),
                    _ => Value::Foreign(self.text("deepspeed.ZeroStageEnum")?),
                }
            }
            Node::Foreign(module, "DynamicLossScaler" | "LossScaler")
                if self.with_sizes && module.starts_with("deepspeed.") =>
            {
                match pickle.state(index) {
                    Some(attributes) => self.plant_at(attributes, depth + 1, place)?,
                    None => Value::Foreign(self.text("deepspeed.LossScaler")?),
                }
            }
            Node::Foreign(module, name) => Value::Foreign(self.text(&format!("{module}.{name}"))?),
            Node::Pairs(list) => {
                let pairs = pickle.pairs(*list).ok_or_else(|| {
                    Fault::damaged("a dictionary of its pickle is not made of pairs")
                })?;
                self.dict(&pairs, depth, place)?
            }
            Node::Dict(entries) => self.dict(entries, depth, place)?,
            Node::Tensor(tensor) => Value::Tensor(self.tensor(tensor)?),
        })
    }

    /// Returns the only argument of the call that would create an object.
    fn argument(&self, object: usize) -> Option<Raw<'a>> {
        let Some(Raw::Node(arguments)) = self.pickle.arguments(object) else { return None };
        match self.pickle.node(arguments) {
            Some(Node::Tuple(arguments)) => match arguments[..] {
                [argument] => Some(argument),
                _ => None,
            },
            _ => None,
        }
    }

    fn dict(
        &mut self,
        entries: &[(Raw<'_>, Raw<'_>)],
        depth: usize,
        place: usize,
    ) -> Result<Value<StoredTensor>, Fault> {
        // As in Python, the last of equal keys counts, in the position of the first.
        let mut places = HashMap::new();
        let mut dict: Vec<(Value<StoredTensor>, _)> = Vec::with_capacity(entries.len());
        for &(key, value) in entries {
            let inside = match key {
                Raw::Str(name) => name.len() + 1,
                _ => INDEX_BYTES,
            };
            let value = self.plant_at(value, depth + 1, place + inside)?;
            if let Raw::Str(name) = key
                && let Some(first) = places.insert(name, dict.len())
            {
                places.insert(name, first);
                dict[first].1 = value;
                continue;
            }
            dict.push((self.plant_at(key, depth + 1, place + INDEX_BYTES)?, value));
        }
        Ok(Value::Dict(dict))
    }

    fn text(&mut self, text: &str) -> Result<String, Fault> {
        self.count(text.len())?;
        Ok(text.to_owned())
    }

    fn count(&mut self, bytes: usize) -> Result<(), Fault> {
        let left = self.text_bytes.checked_sub(bytes as u64);
        self.text_bytes = left.ok_or_else(|| {
            Fault::unsupported("its pickle repeats long strings until they are many times its size")
        })?;
        Ok(())
    }

    fn tensor(&mut self, tensor: &TensorSpec<'_>) -> Result<StoredTensor, Fault> {
        let Storage { key, dtype: typed, numel, view } = tensor.storage;
        let pickle = self.pickle;
        let quantizer = tensor.quantizer.clone().map(|quantizer| {
            quantizer.try_map(|index| match pickle.node(index) {
                // Must not be a quantized tensor: that could be this one.
                Some(Node::Tensor(part)) if part.quantizer.is_none() => self.tensor(part),
                _ => Err(Fault::damaged("a quantizer of its pickle has no tensor of scales")),
            })
        });
        let dtype = tensor.dtype;
        let width = dtype.bytes().cast_signed();
        // An untyped storage counts bytes.
        let elements = if typed.is_some() { numel } else { numel / width };
        let mut stored = StoredTensor {
            quantizer: quantizer.transpose()?.map(Box::new),
            storage: StorageKey { key: self.text(key)?, dtype, elements },
            offset: tensor.offset,
            size: tensor.size.clone(),
            stride: tensor.stride.clone(),
        };
        let Some((first, elements)) = view else { return Ok(stored) };
        let end = first.checked_add(elements);
        if first < 0 || elements < 0 || end.is_none_or(|end| end > numel) {
            return Err(Fault::damaged(format_args!(
                "a view of {elements} elements from {first} on reaches outside its storage of {numel}"
            )));
        }
        // Checks the tensor against the view, which is inside the storage.
        stored.storage.elements = elements;
        stored.check()?;
        stored.storage.elements = numel;
        stored.offset += first;
        Ok(stored)
    }
}

/// Formats a name from a file for a message: escaped, and truncated to a line or two.
pub(crate) fn shown(name: &str) -> String {
    match name.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{}…", name[..end].escape_debug()),
        None => name.escape_debug().to_string(),
    }
}

/// Returns the error for an archive that PyTorch has not written.
fn other_archive(archive: &Archive) -> Fault {
    let weights = archive.names().filter(|name| {
        let ending = name.rsplit_once('.').map_or("", |(_, ending)| ending);
        WEIGHTS_ENDINGS.contains(&ending)
    });
    match weights.min() {
        Some(name) => Fault::unsupported(format_args!(
            "it is a zip archive around weights; unpack it (`unzip`) and take the file `{}` in it",
            shown(name)
        )),
        None => Fault::unsupported("it is a zip archive, but not one of torch.save"),
    }
}

/// Maximum number of dimensions, more than any tensor of a model has: some of libtorch's loops are exponential in it.
const MAX_DIMENSIONS: usize = 32;
const MAX_DEPTH: usize = 64;
/// Maximum number of uses of stored data. Tied weights use a storage twice or four times, and layers that are the same
/// module under several names use it once per layer.
const MAX_COPIES: u64 = 16;
/// Maximum bytes of places per byte of a pickle: a small list in a list takes 5 bytes, and has the keys of all
/// dictionaries around it.
const MAX_PLACES: u64 = 64;
/// Approximate length of an index in a place.
const INDEX_BYTES: usize = 8;
/// Bytes allowed in addition for every file, since they cost nothing.
const FREE_BYTES: u64 = 1 << 20;
const PIECE_BYTES: usize = 1 << 20;
const MAX_SHOWN: usize = 120;
/// File extensions of weights.
const WEIGHTS_ENDINGS: [&str; 6] = ["safetensors", "pth", "pt", "bin", "ckpt", "pt2"];
