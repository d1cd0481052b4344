//! Folders of `torch.distributed.checkpoint` (DCP), as PyTorch's FSDP and Accelerate save them.

mod tree;
mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use self::tree::Tree;
pub(crate) use self::write::write_folder;
use crate::dtype::TensorInfo;
use crate::error::Error;
use crate::fault::Fault;
use crate::file_name::FileName;
use crate::file_tensor::{Chunk, FileTensor, Weights};
use crate::layout::TensorLocation;
use crate::pth::{DcpKey, DcpMetadata, DcpTensor, PthFile, StoragePlace, dcp_metadata, shown};
use crate::region::{Region, check_cover};
use crate::value::Value;

/// Name of the metadata file, which is written last: a folder with it is complete.
const METADATA: &str = ".metadata";
/// Name of Accelerate's folder of a model, without its number.
const OF_ACCELERATE: &str = "pytorch_model_fsdp_";
/// Key of the model in the dictionary that most programs save.
const MODEL: &str = "model";
/// Keys of states other than a model.
const STATES: [&str; 7] =
    ["optim", "optimizer", "optimizers", "lr_scheduler", "scheduler", "dataloader", "train_state"];

/// Weights of a folder, with a report of how they were found.
pub(crate) struct DcpWeights {
    pub(crate) tensors: Weights,
    /// Key of the weights in the saved dictionary. Empty if the weights are the whole dictionary.
    pub(crate) key: String,
    /// Description of what was read, in one line.
    pub(crate) read: String,
    pub(crate) left_out: Vec<String>,
}

/// Returns the folder of `torch.distributed.checkpoint` with a model: `folder` itself, or the only model's folder in a
/// folder of Accelerate's `save_state` with FSDP. `None` if there is none.
///
/// # Errors
/// Fails with [`Error::Unsupported`] for a folder of Accelerate with several models.
pub fn dcp_folder(folder: &Path) -> Result<Option<PathBuf>, Error> {
    if is_dcp_folder(folder) {
        return Ok(Some(folder.to_owned()));
    }
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut models: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(OF_ACCELERATE))
        .map(|entry| entry.path())
        .filter(|path| is_dcp_folder(path))
        .collect();
    models.sort();
    if models.len() < 2 {
        return Ok(models.pop());
    }
    let names: Vec<String> = models.iter().map(|it| shown(&it.display().to_string())).collect();
    let fact = format!("it has several models: give one of {}", names.join(", "));
    Err(Error::Unsupported { path: folder.to_owned(), fact })
}

/// Returns `true` if `torch.distributed.checkpoint` has written this folder itself.
pub(crate) fn is_dcp_folder(folder: &Path) -> bool {
    folder.join(METADATA).is_file()
}

/// Finds the weights of a folder with DCP's metadata. No pickle is executed. `key` selects the weights in the saved
/// dictionary. Defaults to `model`, or to the only key that is not a known state's.
///
/// # Errors
/// Fails with [`Error::Damaged`] or [`Error::Unsupported`] for a file that does not match the metadata, with
/// [`Error::Io`] for a missing file, or with [`Error::NoSuchKey`] or [`Error::SeveralStateDicts`].
pub(crate) fn dcp_weights(folder: &Path, key: Option<&str>) -> Result<DcpWeights, Error> {
    DcpFolder::open(folder)?.weights(key)
}

/// An open folder, whose tensors and values are located one at a time.
pub(crate) struct DcpFolder {
    folder: PathBuf,
    /// Path of the metadata file.
    path: PathBuf,
    /// Metadata, with places sorted by name and offset.
    metadata: DcpMetadata,
    /// Number of keys around everything saved: 1 for the `app` of a program that saves an object with its model and its
    /// optimizer.
    depth: usize,
    /// Bytes of each file that have not been read yet. Parts do not overlap, so reading is bounded by the lengths of
    /// the files.
    left: BTreeMap<String, u64>,
    /// The file that was read last.
    last: Option<(String, File)>,
}

/// Byte range of a part or a value.
struct Range {
    path: PathBuf,
    file: File,
    start: u64,
    length: u64,
}

impl DcpFolder {
    /// Reads the metadata, and no other file.
    pub(crate) fn open(folder: &Path) -> Result<Self, Error> {
        let path = folder.join(METADATA);
        let bytes = fs::read(&path).map_err(Error::io("read", &path))?;
        let mut metadata = dcp_metadata(&path, &bytes)?;
        metadata.places.sort_by(|a, b| (&a.name, &a.offset).cmp(&(&b.name, &b.offset)));
        let (left, last) = (BTreeMap::new(), None);
        let mut folder = Self { folder: folder.to_owned(), path, metadata, depth: 0, left, last };
        folder.depth = folder.wrappers();
        Ok(folder)
    }

    /// Finds the weights, see [`dcp_weights`].
    pub(crate) fn weights(&mut self, key: Option<&str>) -> Result<DcpWeights, Error> {
        let tops: BTreeSet<String> =
            self.metadata.tensors.keys().map(|name| self.top(name)).collect();
        let key = chosen(&self.path, &tops, key)?;
        let names: Vec<String> =
            self.metadata.tensors.keys().filter(|name| self.top(name) == key).cloned().collect();
        let (mut tensors, mut count) = (Weights::new(), 0);
        let mut files = BTreeSet::new();
        for name in names {
            let (tensor, parts) = self.tensor(&name)?;
            count += parts.len();
            files.extend(parts);
            tensors.push((self.inner_name(&name), tensor));
        }
        let read = format!(
            "a checkpoint of torch.distributed.checkpoint: {} tensors in {count} parts in {} files",
            tensors.len(),
            files.len()
        );
        let others = tops.iter().filter(|top| **top != key);
        let others = others
            .map(|top| format!("{}: a weights file holds one model and nothing else", shown(top)));
        let beside = self.metadata.values.iter();
        let beside = beside.filter(|name| !key.is_empty() && self.top(name) == key);
        let beside = beside.map(|name| format!("`{}`: not a tensor", shown(name)));
        let left_out = others.chain(beside).collect();
        Ok(DcpWeights { tensors, key, read, left_out })
    }

    /// Returns `true` if there are tensors under this key.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.metadata.tensors.keys().any(|name| self.top(name) == key)
    }

    /// Reads everything except the weights under the keys `models`, by outermost key.
    pub(crate) fn states(
        &mut self,
        models: &[String],
    ) -> Result<Vec<(String, Value<FileTensor>)>, Error> {
        let DcpMetadata { tensors, values, .. } = &self.metadata;
        let of_model = |name: &String| models.contains(&self.top(name));
        let tensors: Vec<String> = tensors.keys().filter(|name| !of_model(name)).cloned().collect();
        // Includes numbers saved together with weights that have no key.
        let is_state = |name: &&String| self.top(name).is_empty() || !of_model(name);
        let values: Vec<String> = values.iter().filter(is_state).cloned().collect();
        let mut tree = Tree::default();
        for name in tensors {
            let value = Value::Tensor(self.tensor(&name)?.0);
            self.put(&mut tree, &name, value)?;
        }
        for name in values {
            let value = self.value(&name)?;
            self.put(&mut tree, &name, value)?;
        }
        let tree = tree.into_value().map_err(|fact| self.damaged(fact))?;
        let Value::Dict(entries) = tree else { return Ok(Vec::new()) };
        let named = |(key, value): (Value<FileTensor>, _)| Some((key.as_str()?.to_owned(), value));
        Ok(entries.into_iter().filter_map(named).collect())
    }

    fn put(&self, tree: &mut Tree, name: &str, value: Value<FileTensor>) -> Result<(), Error> {
        let keys = self.keys(name);
        let keys = keys.get(self.depth..).filter(|keys| !keys.is_empty()).unwrap_or(&keys);
        tree.insert(keys, value).map_err(|fact| self.damaged(format!("`{}`: {fact}", shown(name))))
    }

    /// Returns the keys of a tensor or value, outermost first.
    fn keys(&self, name: &str) -> Vec<DcpKey> {
        match self.metadata.keys.get(name) {
            Some(keys) => keys.clone(),
            None => vec![DcpKey::Name(name.to_owned())],
        }
    }

    /// Returns 1 if everything is under one key that is not a model's, and a model is in it.
    fn wrappers(&self) -> usize {
        let mut first = None;
        let mut has_model = false;
        for keys in self.metadata.keys.values() {
            let [key, second, _, ..] = &keys[..] else { return 0 };
            if *first.get_or_insert(key) != key {
                return 0;
            }
            has_model |= matches!(second, DcpKey::Name(name) if name == MODEL);
        }
        usize::from(has_model && first.is_some_and(|it| it.to_string() != MODEL))
    }

    /// Returns the key of the dictionary that a tensor or value is in. Empty outside of dictionaries.
    fn top(&self, name: &str) -> String {
        match self.metadata.keys.get(name).and_then(|keys| keys.get(self.depth..)) {
            Some([first, _, ..]) => first.to_string(),
            _ => String::new(),
        }
    }

    /// Returns a tensor's name in its state dictionary.
    fn inner_name(&self, name: &str) -> String {
        match self.metadata.keys.get(name).and_then(|keys| keys.get(self.depth..)) {
            Some([_, rest @ ..]) if !rest.is_empty() => {
                rest.iter().map(ToString::to_string).collect::<Vec<_>>().join(".")
            }
            _ => name.to_owned(),
        }
    }

    fn damaged(&self, fact: String) -> Error {
        Error::Damaged { path: self.path.clone(), fact }
    }

    /// Joins a tensor from its parts. Returns it with the file of each part.
    fn tensor(&mut self, name: &str) -> Result<(FileTensor, Vec<String>), Error> {
        let about = |fact: String| format!("`{}`: {fact}", shown(name));
        let Some(tensor) = self.metadata.tensors.get(name).cloned() else {
            return Err(self.damaged(about("it is not a tensor".into())));
        };
        let chunks: Vec<&Region> =
            tensor.chunks.iter().filter(|region| region.elements() > 0).collect();
        let boxes = chunks.iter().map(|it| (it.offset.as_slice(), it.shape.as_slice()));
        check_cover(&tensor.shape, boxes).map_err(|fact| self.damaged(about(fact)))?;
        let (mut parts, mut storages, mut files) = (Vec::new(), Vec::new(), Vec::new());
        for region in chunks {
            let found = self.place(name, Some(&region.offset)).ok_or_else(|| {
                self.damaged(about(format!("it does not say where the part {region} lies")))
            })?;
            files.push(self.metadata.places[found].file.clone());
            let range = self.range(found)?;
            let (part, storage) = located(&range, name, &tensor, region)?;
            parts.push(part);
            storages.push((range.path, storage));
        }
        let info = TensorInfo { dtype: tensor.dtype, shape: tensor.shape };
        let joined = FileTensor::of_checked_chunks(info, parts, storages)
            .map_err(|fact| Error::Unsupported { path: self.path.clone(), fact: about(fact) })?;
        Ok((joined, files))
    }

    /// Reads a value that is not a tensor, saved by `torch.save`.
    fn value(&mut self, name: &str) -> Result<Value<FileTensor>, Error> {
        let found = self.place(name, None).ok_or_else(|| {
            self.damaged(format!("it does not say where the value `{}` lies", shown(name)))
        })?;
        let Range { path, file, start, length } = self.range(found)?;
        let read = || -> Result<_, Fault> {
            let saved = PthFile::from_range(&path, &file, start, length)?;
            let value = saved.value().map_err(|error| Fault::damaged(error.to_string()))?;
            Ok((saved, value))
        };
        let (saved, value) = read().map_err(|fault| fault.about(&shown(name)).at(&path))?;
        let saved = Arc::new(Mutex::new(saved));
        value.try_map(&mut |_, tensor| Ok(FileTensor::stored(&saved, tensor)))
    }

    /// Returns the index of the place of a part, or of a value.
    fn place(&self, name: &str, offset: Option<&[u64]>) -> Option<usize> {
        let places = &self.metadata.places;
        let wanted = (name, offset);
        places.binary_search_by(|it| (it.name.as_str(), it.offset.as_deref()).cmp(&wanted)).ok()
    }

    /// Opens the file of a place. Fails if the places in a file together exceed its length, because some overlap then.
    fn range(&mut self, place: usize) -> Result<Range, Error> {
        let place = &self.metadata.places[place];
        let name = FileName::new(place.file.as_str())
            .map_err(|error| self.damaged(format!("{}: {error}", shown(&place.file))))?;
        let path = self.folder.join(&*name);
        let file = match self.last.take() {
            Some((last, file)) if last == place.file => file,
            _ => File::open(&path).map_err(Error::io("read", &path))?,
        };
        let bytes = file.metadata().map_err(Error::io("read", &path))?.len();
        let (start, length) = (place.start, place.length);
        let damaged = |fact: String| Error::Damaged {
            path: path.clone(),
            fact: format!("`{}`: {fact}", shown(&place.name)),
        };
        if start.checked_add(length).is_none_or(|end| end > bytes) {
            let fact = format!("its {length} bytes at {start} are not in a file of {bytes}");
            return Err(damaged(fact));
        }
        let left = self.left.entry(place.file.clone()).or_insert(bytes);
        *left = left.checked_sub(length).ok_or_else(|| {
            damaged(format!("its {length} bytes at {start} are those of another part, too"))
        })?;
        let copy = file.try_clone().map_err(Error::io("read", &path))?;
        self.last = Some((place.file.clone(), copy));
        Ok(Range { path, file, start, length })
    }
}

/// Returns the key of the weights in the outermost dictionary. Empty for tensors that are in it directly.
fn chosen(path: &Path, tops: &BTreeSet<String>, key: Option<&str>) -> Result<String, Error> {
    let keys = || tops.iter().cloned().collect::<Vec<_>>();
    if let Some(key) = key {
        if tops.contains(key) {
            return Ok(key.to_owned());
        }
        return Err(Error::NoSuchKey { path: path.to_owned(), key: key.to_owned(), keys: keys() });
    }
    if tops.contains(MODEL) {
        return Ok(MODEL.to_owned());
    }
    let mut models = tops.iter().filter(|top| !STATES.contains(&top.as_str()));
    match (models.next(), models.next()) {
        (Some(model), None) => Ok(model.clone()),
        (None, _) if tops.len() <= 1 => Ok(tops.first().cloned().unwrap_or_default()),
        _ => Err(Error::SeveralStateDicts { path: path.to_owned(), keys: keys() }),
    }
}

/// Locates a part of a tensor in its file, an archive of `torch.save` with one tensor, which may have any strides.
/// Returns the part and its storage.
fn located(
    range: &Range,
    name: &str,
    tensor: &DcpTensor,
    region: &Region,
) -> Result<(Chunk, StoragePlace), Error> {
    let Range { path, file, start, length } = range;
    let read = || -> Result<_, Fault> {
        let about = |fact: String| format!("`{}` at {region}: {fact}", shown(name));
        let saved = PthFile::from_range(path, file, *start, *length)?;
        let found = match saved.value().map_err(|error| Fault::damaged(about(error.to_string())))? {
            Value::Tensor(found) => found,
            other => {
                let fact = format!("expected a tensor, found {}", other.describe());
                return Err(Fault::damaged(about(fact)));
            }
        };
        let info = TensorInfo { dtype: tensor.dtype, shape: region.shape.clone() };
        if found.info() != info {
            let fact = format!("expected {info}, found {}", found.info());
            return Err(Fault::damaged(about(fact)));
        }
        let (mut next, mut is_row_major) = (1, true);
        for (&size, &stride) in found.size.iter().zip(&found.stride).rev() {
            is_row_major &= size == 1 || stride == next;
            next *= size.max(1);
        }
        let strides = found.stride.iter().map(|stride| stride.unsigned_abs());
        let strides = (!is_row_major).then(|| strides.collect());
        let storage = saved.place(&found.storage.key)?;
        let offset = storage.begin + found.offset.unsigned_abs() * tensor.dtype.bytes();
        let location = TensorLocation { path: path.clone(), offset, info };
        Ok((Chunk { region: region.clone(), location, strides }, storage))
    };
    read().map_err(|fault| fault.at(path))
}
