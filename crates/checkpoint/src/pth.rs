//! The files of `torch.save` since PyTorch 1.6: a zip archive of a pickle and of storages.
//!
//! Nothing in a file is ever executed, and no file, however made, costs memory or disk out of proportion to
//! its size: a tensor may be a view of a storage, but not of many times more elements than the storage has
//! (stride 0, as `expand` makes it), and all tensors together may not be many times the file.

mod archive;
mod pickle;
mod strings;
mod write;

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

pub use strings::strings;
pub use write::{TensorData, write};

use crate::dtype::{Dtype, TensorInfo};
use crate::error::Error;
use crate::fault::Fault;
use crate::value::Value;
use archive::Archive;
use pickle::{Dialect, Node, Pickle, TensorSpec, Value as Raw};

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
    archive: Archive,
    folder: String,
    code: Vec<u8>,
    /// Storages whose checksum was verified: parts of these are read without reading all of them again.
    verified: HashSet<String>,
    /// The storage that a view with gaps or in another order was last gathered from.
    last: Option<(String, Vec<u8>)>,
}

/// A tensor in a file: a view of a storage. Offset and strides count elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredTensor {
    /// The storage that holds its elements.
    pub storage: StorageKey,
    /// Its first element in the storage.
    pub offset: i64,
    /// Its shape.
    pub size: Vec<i64>,
    /// Its strides, as many as sizes.
    pub stride: Vec<i64>,
}

/// A storage of a file.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StorageKey {
    /// Its name in the file.
    pub key: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Their number.
    pub elements: i64,
}

impl PthFile {
    /// Opens a file and reads its directory; no tensor yet.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::UnknownFormat`], [`Error::LegacyPth`], [`Error::Damaged`];
    /// [`Error::Unsupported`] for TorchScript and other archives.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let file = File::open(path).map_err(Error::io("read", path))?;
        match crate::Format::of(path, &file)? {
            crate::Format::Pth => {}
            crate::Format::Safetensors => {
                return Err(Error::UnknownFormat {
                    path: path.to_owned(),
                    fact: "it is a safetensors file".into(),
                });
            }
        }
        Self::from_file(path, file)
    }

    /// As [`PthFile::open`], of a file whose format is known.
    ///
    /// # Errors
    /// As there.
    pub fn from_file(path: &Path, file: File) -> Result<Self, Error> {
        let length = file.metadata().map_err(Error::io("read", path))?.len();
        Self::read(path, file, length).map_err(|fault| fault.at(path))
    }

    fn read(path: &Path, file: File, length: u64) -> Result<Self, Fault> {
        let mut archive = Archive::open(file, length)?;
        let folder = archive.folder().to_owned();
        if archive.has(&format!("{folder}/constants.pkl")) {
            return Err(Fault::unsupported(
                "it is a TorchScript archive; load it in PyTorch and save its state_dict()",
            ));
        }
        if !archive.has(&format!("{folder}/data.pkl")) {
            return Err(Fault::unsupported("it is a zip archive, but not one of torch.save"));
        }
        let order = format!("{folder}/byteorder");
        if archive.has(&order) && archive.read(&order)? != b"little" {
            return Err(Fault::unsupported(
                "its bytes are in big-endian order; save it again on a little-endian machine",
            ));
        }
        let code = archive.read(&format!("{folder}/data.pkl"))?;
        Ok(Self {
            path: path.to_owned(),
            archive,
            folder,
            code,
            verified: HashSet::new(),
            last: None,
        })
    }

    /// Reads all that was saved. A pickle that names objects other than tensors and plain values is refused.
    ///
    /// # Errors
    /// [`Error::Damaged`], also for a tensor outside its storage; [`Error::Unsupported`], also for tensors
    /// that would take many times the file's size; [`Error::ForbiddenGlobal`].
    pub fn value(&self) -> Result<Value<StoredTensor>, Error> {
        self.tree(false)
    }

    /// As [`PthFile::value`], with [`Value::Foreign`] in place of every other object. Nothing is
    /// executed here either: of such an object nothing but the name is known.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Unsupported`].
    pub fn value_with_foreign(&self) -> Result<Value<StoredTensor>, Error> {
        self.tree(true)
    }

    fn tree(&self, foreign: bool) -> Result<Value<StoredTensor>, Error> {
        let tree = || {
            let dialect = if foreign { Dialect::Foreign } else { Dialect::Tensors };
            let pickle = Pickle::read(&self.code, dialect)?;
            let mut builder = TreeBuilder {
                pickle: &pickle,
                values: 2 * self.code.len() + 1024,
                text_bytes: MAX_COPIES * self.code.len() as u64 + FREE_BYTES,
            };
            let tree = builder.plant(pickle.root(), 0)?;
            let mut left = MAX_COPIES * self.archive.length() + FREE_BYTES;
            tree.try_map(&mut |place, tensor| {
                self.check_tensor(&tensor, &mut left).map_err(|fault| fault.about(place))?;
                Ok(tensor)
            })
        };
        tree().map_err(|fault: Fault| fault.at(&self.path))
    }

    /// Whether a tensor lies in its storage, and whether it and those before it may be copied out of the file:
    /// `left` is how many bytes they may take.
    fn check_tensor(&self, tensor: &StoredTensor, left: &mut u64) -> Result<(), Fault> {
        self.check_storage(&tensor.storage)?;
        tensor.check()?;
        tensor.check_cost()?;
        let rest = tensor.info().bytes().and_then(|bytes| left.checked_sub(bytes));
        *left = rest.ok_or_else(|| {
            Fault::unsupported(format_args!(
                "the tensors to here share storages, and would take over {MAX_COPIES} times the file's size \
                 by themselves; load it in PyTorch and save what is needed of it"
            ))
        })?;
        Ok(())
    }

    /// The file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the bytes of a storage and verifies their checksum.
    ///
    /// # Errors
    /// [`Error::Damaged`] when they are not those that were written, or not as many as declared.
    pub fn storage(&mut self, storage: &StorageKey) -> Result<Vec<u8>, Error> {
        let mut read = || {
            self.check_storage(storage)?;
            self.archive.read(&self.entry(storage))
        };
        let bytes = read().map_err(|fault| fault.at(&self.path))?;
        self.verified.insert(storage.key.clone());
        Ok(bytes)
    }

    /// Reads the elements of a tensor in row-major order, whatever its strides.
    ///
    /// # Errors
    /// As [`PthFile::copy_tensor`].
    pub fn read_tensor(&mut self, tensor: &StoredTensor) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::new();
        self.copy_tensor(tensor, &mut bytes)?;
        Ok(bytes)
    }

    /// Copies the elements of a tensor in row-major order, whatever its strides, to `out`.
    ///
    /// A contiguous tensor is copied in pieces of 1 MB; for another one its whole storage is read, and kept
    /// until a tensor of another storage is asked for. The first tensor of a storage also reads all of it
    /// once, to verify its checksum.
    ///
    /// # Errors
    /// [`Error::Damaged`], as [`PthFile::storage`], and when the tensor reaches outside its storage;
    /// [`Error::Unsupported`] when it has many times the elements of its storage; [`Error::Io`], also with
    /// the writer's error.
    pub fn copy_tensor(&mut self, tensor: &StoredTensor, out: &mut dyn Write) -> Result<(), Error> {
        let mut copy = || -> Result<(), Fault> {
            tensor.check()?;
            tensor.check_cost()?;
            self.check_storage(&tensor.storage)?;
            let name = self.entry(&tensor.storage);
            let width = tensor.storage.dtype.bytes();
            let bytes = tensor.info().bytes().unwrap_or_default();
            if bytes == 0 {
                return Ok(());
            }
            if tensor.is_contiguous() {
                let first = tensor.offset.unsigned_abs() * width;
                let verify = !self.verified.contains(&tensor.storage.key);
                self.archive.copy(&name, verify, first, bytes, out)?;
                self.verified.insert(tensor.storage.key.clone());
                return Ok(());
            }
            if self.last.as_ref().is_none_or(|(key, _)| *key != tensor.storage.key) {
                self.last = None;
                self.last = Some((tensor.storage.key.clone(), self.archive.read(&name)?));
            }
            match &self.last {
                Some((_, storage)) => tensor.gather(storage, out).map_err(Fault::Write),
                None => Ok(()),
            }
        };
        copy().map_err(|fault| fault.at(&self.path))
    }

    fn entry(&self, storage: &StorageKey) -> String {
        format!("{}/data/{}", self.folder, storage.key)
    }

    /// Whether the file has the storage, with as many bytes as the pickle declares.
    fn check_storage(&self, storage: &StorageKey) -> Result<(), Fault> {
        let StorageKey { key, dtype, elements } = storage;
        let bytes = self.archive.bytes(&self.entry(storage))?;
        let declared = u64::try_from(*elements).ok();
        let declared = declared.and_then(|n| n.checked_mul(dtype.bytes()));
        if declared != Some(bytes) {
            return Err(Fault::damaged(format_args!(
                "storage {key} is declared as {elements} elements of {dtype} but has {bytes} bytes"
            )));
        }
        Ok(())
    }
}

impl StoredTensor {
    /// Type and shape.
    #[must_use]
    pub fn info(&self) -> TensorInfo {
        let shape = self.size.iter().map(|size| size.unsigned_abs()).collect();
        TensorInfo { dtype: self.storage.dtype, shape }
    }

    /// Says whether every element lies in the storage, and shape and strides make sense.
    ///
    /// # Errors
    /// [`Error::Damaged`] with `path` when they do not.
    pub fn check_bounds(&self, path: &Path) -> Result<(), Error> {
        self.check().map_err(|fault| fault.at(path))
    }

    fn check(&self) -> Result<(), Fault> {
        let Self { storage, offset, size, stride } = self;
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
        let last = size.iter().zip(stride).try_fold(*offset, |last, (&size, &stride)| {
            (size - 1).checked_mul(stride).and_then(|step| last.checked_add(step))
        });
        if last.is_some_and(|last| last < storage.elements) { Ok(()) } else { Err(outside()) }
    }

    /// Whether its elements follow each other in row-major order.
    fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.size.iter().zip(&self.stride).rev().all(|(&size, &stride)| {
            let fits = size <= 1 || stride == expected;
            expected *= size.max(1);
            fits
        })
    }

    /// Refuses a view that repeats the elements of its storage until they are out of proportion to it.
    fn check_cost(&self) -> Result<(), Fault> {
        let info = self.info();
        let repeats = info.elements().is_none_or(|n| n > self.storage.elements.unsigned_abs());
        if repeats && info.bytes().is_none_or(|bytes| bytes > FREE_BYTES) {
            return Err(Fault::unsupported(format_args!(
                "a tensor of size {:?} and stride {:?} repeats the {} elements of its storage; load the \
                 file in PyTorch and save it again with `.contiguous()` tensors, if that size is meant",
                self.size, self.stride, self.storage.elements
            )));
        }
        Ok(())
    }

    /// Writes the elements in row-major order, from the bytes of the storage. The bounds were checked.
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

/// Makes a tree of a pickle, whose containers may be shared and may lie in themselves.
///
/// What is shared is copied into the tree wherever it is used, so what a few bytes of the pickle ask for is
/// counted.
struct TreeBuilder<'p, 'a> {
    pickle: &'p Pickle<'a>,
    /// Values to come at most. A shared container counts wherever it is used; each use takes a byte of
    /// the pickle or more, so only sharing within sharing needs more values than bytes.
    values: usize,
    /// Bytes of strings to come at most.
    text_bytes: u64,
}

impl TreeBuilder<'_, '_> {
    fn plant(&mut self, value: Raw<'_>, depth: usize) -> Result<Value<StoredTensor>, Fault> {
        self.values = self.values.saturating_sub(1);
        if depth > MAX_DEPTH || self.values == 0 {
            return Err(Fault::unsupported(format_args!(
                "its values lie over {MAX_DEPTH} deep, contain themselves, or are more than its size \
                 allows"
            )));
        }
        let index = match value {
            Raw::None => return Ok(Value::None),
            Raw::Bool(truth) => return Ok(Value::Bool(truth)),
            Raw::Int(number) => return Ok(Value::Int(number)),
            Raw::Float(number) => return Ok(Value::Float(number)),
            Raw::Str(text) => return Ok(Value::Str(self.text(text)?)),
            Raw::Global(global) => return Ok(Value::Foreign(self.text(&global.to_string())?)),
            Raw::Node(index) => index,
        };
        let pickle = self.pickle;
        let Some(node) = pickle.node(index) else {
            return Err(Fault::damaged("its pickle refers to a container that is not there"));
        };
        let mut items = |items: &[Raw<'_>]| -> Result<Vec<_>, Fault> {
            items.iter().map(|&item| self.plant(item, depth + 1)).collect()
        };
        Ok(match node {
            Node::List(list) => Value::List(items(list)?),
            Node::Tuple(tuple) => Value::Tuple(items(tuple)?),
            Node::Storage(_) => Value::Foreign("torch.storage".into()),
            Node::Foreign(module, name) => Value::Foreign(self.text(&format!("{module}.{name}"))?),
            Node::Dict(entries) => {
                // Of equal keys the last counts, in the place of the first, as in Python.
                let mut places = HashMap::new();
                let mut dict: Vec<(Value<StoredTensor>, _)> = Vec::with_capacity(entries.len());
                for &(key, value) in entries {
                    let value = self.plant(value, depth + 1)?;
                    if let Raw::Str(name) = key
                        && let Some(place) = places.insert(name, dict.len())
                    {
                        places.insert(name, place);
                        dict[place].1 = value;
                        continue;
                    }
                    dict.push((self.plant(key, depth + 1)?, value));
                }
                Value::Dict(dict)
            }
            Node::Tensor(tensor) => Value::Tensor(self.tensor(tensor)?),
        })
    }

    fn text(&mut self, text: &str) -> Result<String, Fault> {
        let left = self.text_bytes.checked_sub(text.len() as u64);
        self.text_bytes = left.ok_or_else(|| {
            Fault::unsupported("its pickle repeats long strings until they are many times its size")
        })?;
        Ok(text.to_owned())
    }

    fn tensor(&mut self, tensor: &TensorSpec<'_>) -> Result<StoredTensor, Fault> {
        Ok(StoredTensor {
            storage: StorageKey {
                key: self.text(tensor.storage.key)?,
                dtype: tensor.storage.dtype,
                elements: tensor.storage.numel,
            },
            offset: tensor.offset,
            size: tensor.size.clone(),
            stride: tensor.stride.clone(),
        })
    }
}

/// More than any tensor of a model has; some of libtorch's loops are exponential in them.
const MAX_DIMENSIONS: usize = 32;
const MAX_DEPTH: usize = 64;
/// How often what is stored once may be used. Tied weights use a storage twice or four times, and layers
/// that are the same module under several names as often as there are layers.
const MAX_COPIES: u64 = 16;
/// What is not counted: so much costs nothing, whatever the size of the file is.
const FREE_BYTES: u64 = 1 << 20;
const PIECE_BYTES: usize = 1 << 20;
