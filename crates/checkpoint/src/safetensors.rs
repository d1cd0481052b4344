//! The safetensors format: a JSON header and the bytes of the tensors, little-endian.
//!
//! Only headers are handled here; the caller writes and reads the tensors' bytes at the offsets
//! that a header gives.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use safetensors::tensor::{Metadata, TensorInfo as SafeInfo};

use crate::dtype::{Dtype, TensorInfo};
use crate::error::Error;
use crate::fault::Fault;

/// What a file says of itself.
#[derive(Debug, Clone)]
pub struct Header {
    /// The tensors in the order of their bytes.
    pub tensors: Vec<Entry>,
    /// The user's own texts.
    pub metadata: HashMap<String, String>,
}

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Its type and shape.
    pub info: TensorInfo,
    /// Where its bytes lie in the file, from the file's first byte on.
    pub range: Range<u64>,
}

impl Header {
    /// Reads and checks the header of an open file: the tensors follow each other without gaps, are
    /// as large as they say, and fill the file.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Damaged`], [`Error::Unsupported`] for other types of elements.
    pub fn read(path: &Path, file: &File) -> Result<Self, Error> {
        let length = file.metadata().map_err(Error::io("read", path))?.len();
        read(file, length).map_err(|fault| fault.at(path))
    }

    /// The entry of a name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Entry> {
        self.tensors.iter().find(|entry| entry.name == name)
    }
}

fn read(file: &File, length: u64) -> Result<Header, Fault> {
    let mut bytes = [0; LENGTH_BYTES];
    file.read_exact_at(&mut bytes, 0)?;
    let header_bytes = u64::from_le_bytes(bytes);
    let data_bytes = length
        .checked_sub(LENGTH_BYTES as u64)
        .and_then(|rest| rest.checked_sub(header_bytes))
        .filter(|_| header_bytes <= MAX_HEADER_BYTES)
        .ok_or_else(|| if header_bytes <= MAX_HEADER_BYTES { cut_short(format_args!(
                "it declares a header of {header_bytes} bytes, the file has {length}"
            )) } else { Fault::damaged(format_args!(
                "it declares a header of {header_bytes} bytes, the file has {length} and headers \
                     are at most {MAX_HEADER_BYTES}"
            )) })?;
    let mut header = vec![0; header_bytes as usize];
    file.read_exact_at(&mut header, LENGTH_BYTES as u64)?;
    // Checks that the tensors follow each other without gaps and are as large as they say.
    let header: Metadata = serde_json::from_slice(&header)
        .map_err(|error| Fault::damaged(format_args!("its header is wrong: {error}")))?;
    let promised = header.data_len() as u64;
    if promised != data_bytes {
        let fact =
            format!("its header promises {promised} bytes of tensors, the file has {data_bytes}");
        return Err(if data_bytes < promised { cut_short(fact) } else { Fault::damaged(fact) });
    }
    let begin = LENGTH_BYTES as u64 + header_bytes;
    let mut tensors = Vec::new();
    for name in header.offset_keys() {
        let Some(info) = header.info(&name) else { continue };
        let dtype = Dtype::from_safetensors(info.dtype)
            .ok_or_else(|| Fault::unsupported(format_args!("`{name}` is {}", info.dtype)))?;
        let shape = info.shape.iter().map(|&size| size as u64).collect();
        let (from, to) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
        let range = begin + from..begin + to;
        tensors.push(Entry { name, info: TensorInfo { dtype, shape }, range });
    }
    Ok(Header { tensors, metadata: header.metadata().clone().unwrap_or_default() })
}

fn cut_short(fact: impl std::fmt::Display) -> Fault {
    Fault::damaged(format_args!(
        "{fact}: it was cut short, as by a download that ended early; download or copy it again"
    ))
}

/// A header to write, and in which order the tensors follow it.
#[derive(Debug)]
pub struct Layout {
    /// The file's first bytes.
    pub header: Vec<u8>,
    /// Places in the list that was given, in the order in which their bytes follow.
    pub order: Vec<usize>,
    /// The size of the whole file.
    pub bytes: u64,
}

/// Lays out a file of these tensors, see [`layout_with`], without texts of its own.
///
/// # Errors
/// As [`layout_with`].
pub fn layout(path: &Path, tensors: &[(&str, TensorInfo)]) -> Result<Layout, Error> {
    layout_with(path, tensors, &HashMap::new())
}

/// Lays out a file of these tensors, and of texts for its metadata: the widest elements first, so that every tensor begins at a
/// multiple of its elements' width.
///
/// # Errors
/// [`Error::Unsupported`] with `path` for a type that safetensors lacks, or a reserved name.
pub fn layout_with(
    path: &Path,
    tensors: &[(&str, TensorInfo)],
    metadata: &HashMap<String, String>,
) -> Result<Layout, Error> {
    let unsupported = |fact| Error::Unsupported { path: path.to_owned(), fact };
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&place| std::cmp::Reverse(tensors[place].1.dtype.bits()));
    let mut end = 0usize;
    let mut infos = Vec::with_capacity(tensors.len());
    for &place in &order {
        let (name, info) = &tensors[place];
        let refuse = || unsupported(format!("safetensors cannot hold `{name}` of {}", info.dtype));
        if *name == RESERVED_NAME {
            return Err(refuse());
        }
        let dtype = info.dtype.to_safetensors().ok_or_else(|| {
            let remedy = if info.dtype.is_quantized() {
                "write a .pth file, or call `dequantize()` on it in PyTorch"
            } else {
                "write a .pth file"
            };
            unsupported(format!("safetensors cannot hold `{name}` of {}; {remedy}", info.dtype))
        })?;
        let begin = end;
        let bytes = info.bytes().and_then(|bytes| usize::try_from(bytes).ok());
        end = bytes.and_then(|bytes| end.checked_add(bytes)).ok_or_else(refuse)?;
        let shape = info.shape.iter().map(|&size| size as usize).collect();
        infos.push(((*name).to_owned(), SafeInfo { dtype, shape, data_offsets: (begin, end) }));
    }
    // PyTorch's readers ask for this entry.
    let mut about = metadata.clone();
    about.insert("format".to_owned(), "pt".to_owned());
    let mut text = Metadata::new(Some(about), infos)
        .and_then(|metadata| Ok(serde_json::to_vec(&metadata)?))
        .map_err(|error| unsupported(format!("safetensors: {error}")))?;
    text.resize(text.len().next_multiple_of(LENGTH_BYTES), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    let bytes = (header.len() + end) as u64;
    Ok(Layout { header, order, bytes })
}

/// The header's length stands before it; the header is padded to a multiple of it.
const LENGTH_BYTES: usize = 8;
/// The format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const RESERVED_NAME: &str = "__metadata__";
