//! Reading of single tensors of weights, whole or in part, into memory of the caller.

mod quantized;
mod stamp;

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};

use indexmap::IndexMap;

pub use self::quantized::check_quantization_method;
use self::quantized::{Descriptions, Quantized, described};
pub use self::stamp::FileStamp;
use crate::Region;
use crate::dtype::TensorInfo;
use crate::error::Error;
use crate::fault::Fault;
use crate::file_handle::FileHandle;
use crate::format::OpenWeights;
use crate::place::Place;
use crate::pth::{PthFile, StoragePlace, StoredStateDict, StoredTensor, shown};
use crate::quantized::parts::METADATA;
use crate::safetensors::Header;
use crate::weights_files::{WeightsFile, open_weights};

/// Open weights, in one file or several.
///
/// Opens the same places as [`open_weights`]. A weight that is quantized in Brigade's layout, by GPTQ, AWQ or
/// bitsandbytes is presented as one tensor, which can be read as float32 or by [`TensorReader::read_packed`]. The
/// location of each tensor is checked when the weights are opened. Values are read on demand, from several threads at
/// the same time if needed.
///
/// ```
/// use brigade_checkpoint::{Region, WeightsReader};
///
/// let weights = WeightsReader::open("tests/fixtures/weights/kinds_protocol_4.pth")?;
/// let matrix = weights.get("base").expect("the file has it");
/// assert_eq!(matrix.info().to_string(), "[3, 4] of F32");
/// // The last two rows, as a rank reads its shard.
/// let rows = Region::whole(&matrix.info().shape).narrow(0, 1, 2);
/// let mut bytes = vec![0; 2 * 4 * 4];
/// matrix.read(&rows, &mut bytes)?;
/// assert_eq!(bytes[..4], 5f32.to_le_bytes());
/// # Ok::<(), brigade_checkpoint::Error>(())
/// ```
#[derive(Debug)]
pub struct WeightsReader {
    files: Vec<OpenFile>,
    tensors: IndexMap<String, Held>,
    key: String,
}

#[derive(Debug)]
struct OpenFile {
    path: PathBuf,
    file: FileHandle,
    /// Size of the file when it was opened.
    bytes: u64,
    /// Storages with checksums, each with the name of a tensor in it.
    checked: Vec<(String, StoragePlace)>,
}

/// A tensor in a file.
#[derive(Debug)]
struct Held {
    /// Index of the file.
    file: usize,
    info: TensorInfo,
    /// Location of the elements. `None` for types whose elements are not whole bytes, or need a scale.
    place: Option<Place>,
    /// Parts of a tensor that [`WeightsReader::stack`] made. Empty for others.
    pieces: Vec<Piece>,
    /// Parts of a weight that is stored as several tensors.
    quantized: Option<Box<Quantized>>,
}

/// A tensor that [`WeightsReader::stack`] assembles from several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stack {
    /// Name of the new tensor.
    pub name: String,
    /// Names of the tensors that form each element along the first dimension.
    pub elements: Vec<Vec<String>>,
}

/// A stored tensor that forms some rows of one element of a stack.
#[derive(Debug)]
struct Piece {
    /// Index of the element in the stack.
    element: u64,
    /// First row of the element that is in this tensor.
    row: u64,
    name: String,
    held: Held,
}

/// A tensor of a [`WeightsReader`].
#[derive(Debug, Clone, Copy)]
pub struct TensorReader<'r> {
    name: &'r str,
    held: &'r Held,
    files: &'r [OpenFile],
}

impl WeightsReader {
    /// Opens weights: any place that [`open_weights`] accepts.
    ///
    /// # Errors
    /// Returns the errors of [`open_weights`], and [`Error::Damaged`] if a tensor of a `.pth` file is outside its
    /// storage.
    pub fn open(place: impl AsRef<Path>) -> Result<Self, Error> {
        Self::open_entry(place, None)
    }

    /// Opens weights like [`WeightsReader::open`], with the state dictionary at `key` of a `.pth` file.
    ///
    /// # Errors
    /// Returns the errors of [`WeightsReader::open`], and [`Error::NoSuchKey`].
    pub fn open_entry(place: impl AsRef<Path>, key: Option<&str>) -> Result<Self, Error> {
        Self::new(open_weights(place.as_ref(), key)?)
    }

    /// Creates a reader of open files. If several tensors have the same name, the last counts.
    ///
    /// # Errors
    /// Fails with [`Error::Damaged`] if a tensor of a `.pth` file is outside its storage or a quantized weight is
    /// inconsistent, with [`Error::Unsupported`] for an unknown kind of quantization, or with [`Error::Io`].
    pub fn new(files: Vec<WeightsFile>) -> Result<Self, Error> {
        let mut reader = Self { files: Vec::new(), tensors: IndexMap::new(), key: String::new() };
        let mut weights_of_metadata = Descriptions::default();
        for WeightsFile { path, weights } in files {
            weights.key().clone_into(&mut reader.key);
            if let OpenWeights::Ranges(file, entries) = &weights
                && entries.iter().any(|entry| entry.name.ends_with(".packed"))
                && let Some(text) =
                    Header::read(&path, &*file.open().map_err(Error::io("read", &path))?)?
                        .metadata
                        .get(METADATA)
            {
                let found = described(text);
                let found = found.map_err(|fact| Fault::unsupported(fact).at(&path))?;
                weights_of_metadata.extend(found);
            }
            let opened = reader.add(&path, weights).map_err(|fault| fault.at(&path))?;
            reader.files.push(opened);
        }
        reader.combine(&weights_of_metadata)?;
        Ok(reader)
    }

    fn add(&mut self, path: &Path, weights: OpenWeights) -> Result<OpenFile, Fault> {
        let file = self.files.len();
        let (opened, checked) = match weights {
            OpenWeights::Ranges(opened, entries) => {
                self.tensors.extend(entries.into_iter().map(|entry| {
                    let place = has_whole_bytes(&entry.info).then(|| {
                        let width = entry.info.dtype.bytes();
                        Place::row_major(entry.range.start, width, &entry.info.shape)
                    });
                    (
                        entry.name,
                        Held { file, info: entry.info, place, pieces: Vec::new(), quantized: None },
                    )
                }));
                (opened, Vec::new())
            }
            OpenWeights::Storages(opened, found) => {
                let checked = self.add_stored(file, &opened, found)?;
                (opened.into_file().into(), checked)
            }
        };
        let bytes = opened.open()?.metadata()?.len();
        Ok(OpenFile { path: path.to_owned(), file: opened, bytes, checked })
    }

    /// Adds the tensors of a `.pth` file. Returns its storages with checksums.
    fn add_stored(
        &mut self,
        file: usize,
        opened: &PthFile,
        found: StoredStateDict,
    ) -> Result<Vec<(String, StoragePlace)>, Fault> {
        let mut storages: IndexMap<String, (String, StoredTensor, StoragePlace)> = IndexMap::new();
        for (name, tensor) in found.tensors {
            let key = &tensor.storage.key;
            if !storages.contains_key(key) {
                let place = opened.place(key).map_err(|fault| fault.about(&name))?;
                storages.insert(key.clone(), (name.clone(), tensor.clone(), place));
            }
            let (_, first, storage) = &storages[key];
            if first.storage != tensor.storage {
                let fault =
                    Fault::damaged(format_args!("storage {} is used as two kinds", shown(key)));
                return Err(fault.about(&name));
            }
            let info = tensor.info();
            let place = has_whole_bytes(&info).then(|| {
                let width = info.dtype.bytes();
                let bytes = |elements: i64| elements.unsigned_abs().saturating_mul(width);
                Place {
                    begin: storage.begin + bytes(tensor.offset),
                    width,
                    strides: tensor.stride.iter().copied().map(bytes).collect(),
                }
            });
            self.tensors
                .insert(name, Held { file, info, place, pieces: Vec::new(), quantized: None });
        }
        let storages = storages.into_values();
        let checked = storages.filter(|(_, _, place)| place.checksum.is_some());
        Ok(checked.map(|(name, _, place)| (name, place)).collect())
    }

    /// Returns the key of the state dictionary in its file, see [`StoredStateDict::key`]. Empty if it is the whole
    /// file.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Returns the tensor with this name. `None` if there is none.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<TensorReader<'_>> {
        let (_, name, held) = self.tensors.get_full(name)?;
        Some(TensorReader { name, held, files: &self.files })
    }

    /// Iterates over all tensors, in the order of their files.
    #[must_use]
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorReader<'_>> {
        let tensors = self.tensors.iter();
        tensors.map(|(name, held)| TensorReader { name, held, files: &self.files })
    }

    /// Renames tensors for which `new_name` returns a name. If several tensors get the same name, the last counts.
    pub fn rename(&mut self, new_name: impl Fn(&str) -> Option<String>) {
        let tensors = std::mem::take(&mut self.tensors).into_iter();
        let renamed = tensors.map(|(name, held)| (new_name(&name).unwrap_or(name), held));
        self.tensors = renamed.collect();
    }

    /// Replaces several tensors by a stack of them.
    ///
    /// Element `i` along the first dimension of a stack is the concatenation, along their first dimension, of the
    /// tensors `elements[i]`. A stack is read like any other tensor, from the places of its parts, which are no longer
    /// available under their own names. This serves architectures that have one tensor for what files store separately,
    /// such as the experts of a layer.
    ///
    /// ```
    /// use brigade_checkpoint::{Stack, WeightsReader};
    ///
    /// let mut weights = WeightsReader::open("tests/fixtures/weights/kinds_protocol_4.pth")?;
    /// weights.stack(vec![Stack { name: "all".to_owned(), elements: vec![vec!["base".to_owned()]] }])?;
    /// let all = weights.get("all").expect("it was stacked");
    /// assert_eq!(all.info().to_string(), "[1, 3, 4] of F32");
    /// assert!(weights.get("base").is_none());
    /// # Ok::<(), brigade_checkpoint::Error>(())
    /// ```
    ///
    /// # Errors
    /// Fails with [`Error::Unsupported`] for names that are missing or used twice, and for tensors whose types or
    /// shapes do not fit. Nothing is changed then.
    pub fn stack(&mut self, stacks: Vec<Stack>) -> Result<(), Error> {
        let mut used = HashSet::new();
        let infos = stacks.iter().map(|stack| self.stacked(stack, &mut used));
        let infos = infos.collect::<Result<Vec<_>, _>>()?;
        let parts: HashSet<String> = used.into_iter().map(str::to_owned).collect();
        let mut apart = HashMap::with_capacity(parts.len());
        let mut kept = IndexMap::with_capacity(self.tensors.len() - parts.len() + stacks.len());
        for (name, held) in std::mem::take(&mut self.tensors) {
            if parts.contains(&name) {
                apart.insert(name, held);
            } else {
                kept.insert(name, held);
            }
        }
        for (Stack { name, elements }, info) in stacks.into_iter().zip(infos) {
            let mut pieces = Vec::new();
            for (element, parts) in (0..).zip(elements) {
                let mut row = 0u64;
                for part in parts {
                    let Some(held) = apart.remove(&part) else { continue };
                    let rows = held.info.shape[0];
                    pieces.push(Piece { element, row, name: part, held });
                    row = row.saturating_add(rows);
                }
            }
            let file = pieces.first().map_or(0, |piece| piece.held.file);
            kept.insert(name, Held { file, info, place: None, pieces, quantized: None });
        }
        self.tensors = kept;
        Ok(())
    }

    /// Returns type and shape of a stack, and adds its parts to `used`.
    fn stacked<'s>(
        &self,
        Stack { name, elements }: &'s Stack,
        used: &mut HashSet<&'s str>,
    ) -> Result<TensorInfo, Error> {
        let refused = |fact: String| {
            let path = self.files.first().map(|file| file.path.clone()).unwrap_or_default();
            let fact = format!("`{}` cannot be put together: {fact}", shown(name));
            Error::Unsupported { path, fact }
        };
        if self.tensors.contains_key(name) {
            return Err(refused("the weights have it, too".to_owned()));
        }
        let mut whole: Option<TensorInfo> = None;
        for parts in elements {
            let mut element: Option<TensorInfo> = None;
            for part in parts {
                let Some(held) = self.tensors.get(part).filter(|_| used.insert(part)) else {
                    return Err(refused(format!("`{}` is missing", shown(part))));
                };
                let info = &held.info;
                let fits = |other: &TensorInfo| {
                    other.dtype == info.dtype && other.shape[1..] == info.shape[1..]
                };
                if info.shape.is_empty() || !element.as_ref().is_none_or(fits) {
                    return Err(refused(format!("`{}` is {info}", shown(part))));
                }
                match &mut element {
                    Some(it) => it.shape[0] = it.shape[0].saturating_add(info.shape[0]),
                    None => element = Some(info.clone()),
                }
            }
            if whole.is_some() && element != whole {
                let parts: Vec<_> = parts.iter().map(|part| shown(part)).collect();
                return Err(refused(format!("{} differ from the first ones", parts.join(" and "))));
            }
            whole = element;
        }
        let mut info = whole.ok_or_else(|| refused("it has no parts".to_owned()))?;
        info.shape.insert(0, elements.len() as u64);
        Ok(info)
    }

    /// Verifies the checksums of all storages of `.pth` files, which reads each once, in pieces. Safetensors files and
    /// the `.pth` files before zip archives have none.
    ///
    /// # Errors
    /// Fails with [`Error::Damaged`], naming a tensor of the first damaged storage, or with [`Error::Io`].
    pub fn verify(&self) -> Result<(), Error> {
        for file in &self.files {
            for (name, place) in &file.checked {
                let opened = file.file.open().map_err(Error::io("read", &file.path))?;
                let verified = place.verify(&opened);
                verified.map_err(|fault| fault.about(name).at(&file.path))?;
            }
        }
        Ok(())
    }
}

impl<'r> TensorReader<'r> {
    /// Returns the tensor's name.
    #[must_use]
    pub fn name(&self) -> &'r str {
        self.name
    }

    /// Returns data type and shape of the tensor.
    #[must_use]
    pub fn info(&self) -> &'r TensorInfo {
        &self.held.info
    }

    /// Returns the path of the file that contains the tensor. For a stack of tensors from several files, the first.
    #[must_use]
    pub fn path(&self) -> &'r Path {
        &self.file().path
    }

    fn file(&self) -> &'r OpenFile {
        &self.files[self.held.file]
    }

    /// Reads a region into `into`, in row-major order and little-endian as in the file. The sizes must match.
    ///
    /// Contiguous ranges of the file, such as rows, are read in place. For columns, and for views of a `.pth` file in
    /// another order, windows of at most 4 MB are read and rearranged. For a view that overlaps itself, everything it
    /// covers is read. Checksums are not verified: see [`WeightsReader::verify`].
    ///
    /// # Errors
    /// Fails with [`Error::NoSuchRegion`] if the tensor does not have the region or `into` has another size, with
    /// [`Error::Unsupported`] for PyTorch's quantized types and elements smaller than a byte, with [`Error::Damaged`]
    /// for a file that was truncated meanwhile, or with [`Error::Io`]. In the last two cases `into` may be partly
    /// overwritten.
    pub fn read(&self, region: &Region, into: &mut [u8]) -> Result<(), Error> {
        let Self { name, held: Held { info, place, pieces, .. }, .. } = *self;
        let file = self.file();
        let path = &file.path;
        if !pieces.is_empty() {
            self.check_region(region, into)?;
            return pieces.iter().try_for_each(|piece| self.read_piece(piece, region, into));
        }
        if let Some(quantized) = &self.held.quantized {
            self.check_region(region, into)?;
            return self.read_quantized(quantized, region, into);
        }
        let Some(place) = place else {
            let fact = format!(
                "`{}` is {}, whose elements cannot be read by themselves; save it in another dtype",
                shown(name),
                info.dtype
            );
            return Err(Error::Unsupported { path: path.clone(), fact });
        };
        self.check_region(region, into)?;
        let opened = file.file.open().map_err(Error::io("read", path))?;
        place.read(&opened, region, into).map_err(|error| {
            if error.kind() != io::ErrorKind::UnexpectedEof {
                return Error::io("read", path)(error);
            }
            let found = opened.metadata().map_or(0, |metadata| metadata.len());
            let fact = format!(
                "it was cut short while `{}` was read: expected {} bytes, found {found}",
                shown(name),
                file.bytes
            );
            Error::Damaged { path: path.clone(), fact }
        })
    }

    fn check_region(&self, region: &Region, into: &[u8]) -> Result<(), Error> {
        let info = &self.held.info;
        let bytes = TensorInfo { dtype: info.dtype, shape: region.shape.clone() }.bytes();
        if region.is_within(&info.shape) && bytes == Some(into.len() as u64) {
            return Ok(());
        }
        Err(Error::NoSuchRegion {
            path: self.path().to_owned(),
            name: self.name.to_owned(),
            fact: format!("{region} into {} bytes, of a tensor {info}", into.len()),
        })
    }

    /// Reads the intersection of a piece and a region of its stack.
    fn read_piece(&self, piece: &Piece, region: &Region, into: &mut [u8]) -> Result<(), Error> {
        let (elements, rows) =
            (region.offset[0]..region.offset[0] + region.shape[0], region.shape[1]);
        let first = region.offset[1].max(piece.row);
        let end = (region.offset[1] + rows).min(piece.row.saturating_add(piece.held.info.shape[0]));
        if !elements.contains(&piece.element) || first >= end || into.is_empty() {
            return Ok(());
        }
        let mut wanted =
            Region { offset: region.offset[1..].to_vec(), shape: region.shape[1..].to_vec() };
        wanted.offset[0] = first - piece.row;
        wanted.shape[0] = end - first;
        // The columns of a row are contiguous, in the piece's order.
        let row_bytes = into.len() / (region.shape[0] * rows) as usize;
        let start = (piece.element - elements.start) * rows + (first - region.offset[1]);
        let start = start as usize * row_bytes;
        let bytes = (end - first) as usize * row_bytes;
        let reader = TensorReader { name: &piece.name, held: &piece.held, files: self.files };
        reader.read(&wanted, &mut into[start..start + bytes])
    }
}

/// Returns `true` if elements are whole bytes with a meaning of their own.
fn has_whole_bytes(info: &TensorInfo) -> bool {
    info.dtype.bits().is_multiple_of(8) && !info.dtype.is_quantized()
}
