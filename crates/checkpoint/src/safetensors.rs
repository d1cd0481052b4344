//! The safetensors format: a JSON header and the bytes of the tensors, little-endian.
//!
//! This module handles only headers. The caller reads and writes the tensors' bytes at the offsets in the header.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use safetensors::tensor::{Metadata, TensorInfo as SafeInfo};

use crate::dtype::{Dtype, TensorInfo};
use crate::error::Error;
use crate::fault::Fault;

/// Header of a safetensors file.
#[derive(Debug, Clone)]
pub struct Header {
    /// Tensors in the order of their bytes.
    pub tensors: Vec<Entry>,
    /// User-defined metadata of the file.
    pub metadata: HashMap<String, String>,
}

/// A tensor of a safetensors file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Name of the tensor.
    pub name: String,
    /// Data type and shape of the tensor.
    pub info: TensorInfo,
    /// Byte range of the elements, counted from the beginning of the file.
    pub range: Range<u64>,
}

impl Header {
    /// Reads and checks the header of an open file: the tensors must follow each other without gaps, have the sizes of
    /// their types and shapes, and fill the file.
    ///
    /// # Errors
    /// Fails with [`Error::Io`], with [`Error::Damaged`], or with [`Error::Unsupported`] for an unknown data type.
    pub fn read(path: &Path, file: &File) -> Result<Self, Error> {
        let length = file.metadata().map_err(Error::io("read", path))?.len();
        read(file, length).map_err(|fault| fault.at(path))
    }

    /// Returns the tensor with this name. `None` if there is none.
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
    // Deserialization checks that the tensors follow each other without gaps and have the right sizes.
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

/// The layout of a new file: its header, and the order of the tensors after it.
#[derive(Debug)]
pub struct Layout {
    /// First bytes of the file: the length of the JSON header, and the header.
    pub header: Vec<u8>,
    /// Indices of the given tensors, in the order of their bytes.
    pub order: Vec<usize>,
    /// Size of the whole file in bytes.
    pub bytes: u64,
}

/// Lays out a file of these tensors like [`layout_with`], without user-defined metadata.
///
/// # Errors
/// Returns the same errors as [`layout_with`].
pub fn layout(path: &Path, tensors: &[(&str, TensorInfo)]) -> Result<Layout, Error> {
    layout_with(path, tensors, &HashMap::new())
}

/// Lays out a file of these tensors and of user-defined metadata. The widest elements come first, so that every tensor
/// begins at a multiple of its element size.
///
/// # Errors
/// Fails with [`Error::Unsupported`] for `path` if a data type is missing from safetensors, or a name is reserved.
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
    // PyTorch's readers require this entry.
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

/// Size of the length before the header. The header is padded to a multiple of it.
const LENGTH_BYTES: usize = 8;
/// Maximum size of a header, as in the format's specification.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const RESERVED_NAME: &str = "__metadata__";
