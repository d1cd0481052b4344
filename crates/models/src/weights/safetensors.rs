//! The safetensors format: a JSON header and the bytes of the tensors, little-endian.
//!
//! Read through a buffer, not through a memory map: a map would fault where another process
//! truncates the file, and the tensors must be copied out of it anyway.

use std::collections::HashMap;
use std::fs::{File, Permissions};
use std::io::{BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use tch::{Kind, Tensor};

use super::Fault;
use crate::{Error, StateDict};

pub(super) fn load(path: &Path, file: File, length: u64) -> Result<StateDict, Error> {
    let tensors = read(file, length).map_err(|fault| fault.at(path))?;
    let mut state = StateDict::new();
    for (name, tensor) in tensors {
        state.insert(name, tensor)?;
    }
    Ok(state)
}

fn read(mut file: File, length: u64) -> Result<Vec<(String, Tensor)>, Fault> {
    file.seek(SeekFrom::Start(0))?;
    let mut reader = BufReader::with_capacity(IO_BUFFER_BYTES, file);
    let mut header_bytes = [0; LENGTH_BYTES];
    reader.read_exact(&mut header_bytes)?;
    let header_bytes = u64::from_le_bytes(header_bytes);
    let data_bytes = length
        .checked_sub(LENGTH_BYTES as u64)
        .and_then(|rest| rest.checked_sub(header_bytes))
        .filter(|_| header_bytes <= MAX_HEADER_BYTES)
        .ok_or_else(|| {
            Fault::damaged(format_args!(
                "it declares a header of {header_bytes} bytes, the file has {length} and headers \
                 are at most {MAX_HEADER_BYTES}"
            ))
        })?;
    let mut header = vec![0; header_bytes as usize];
    reader.read_exact(&mut header)?;
    // Checks that the tensors follow each other without gaps and are as large as they say.
    let header: Metadata = serde_json::from_slice(&header)
        .map_err(|error| Fault::damaged(format_args!("its header is wrong: {error}")))?;
    if header.data_len() as u64 != data_bytes {
        return Err(Fault::damaged(format_args!(
            "its header promises {} bytes of tensors, the file has {data_bytes}",
            header.data_len()
        )));
    }

    let mut bytes = Vec::new();
    let mut tensors = Vec::new();
    for name in header.offset_keys() {
        let Some(info) = header.info(&name) else { continue };
        let kind = kind(info.dtype)
            .ok_or_else(|| Fault::unsupported(format_args!("`{name}` is {}", info.dtype)))?;
        let shape = info.shape.iter().map(|&size| i64::try_from(size));
        let shape: Vec<i64> = shape.collect::<Result<_, _>>().map_err(Fault::damaged)?;
        bytes.resize(info.data_offsets.1 - info.data_offsets.0, 0);
        reader.read_exact(&mut bytes)?;
        tensors.push((name, tensor(&mut bytes, &shape, kind)?));
    }
    Ok(tensors)
}

/// A tensor with a copy of these bytes, of which there are as many as shape and kind say.
pub(super) fn tensor(bytes: &mut [u8], shape: &[i64], kind: Kind) -> Result<Tensor, Fault> {
    if kind == Kind::Bool {
        // C++ knows only two values of bool; any other byte would be undefined behaviour.
        bytes.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
    }
    Ok(Tensor::f_from_data_size(bytes, shape, kind)?)
}

pub(super) fn save(state: &StateDict, path: &Path) -> Result<(), Error> {
    let unsupported = |fact| Error::Unsupported { path: path.to_owned(), fact };
    let mut tensors = Vec::with_capacity(state.len());
    for (name, tensor) in state.iter() {
        let kind = tensor.f_kind().map_err(Error::torch(format!("read the kind of {name}")))?;
        let dtype = dtype(kind)
            .filter(|_| name != RESERVED_NAME)
            .ok_or_else(|| unsupported(format!("safetensors cannot hold `{name}` of {kind:?}")))?;
        tensors.push((name, tensor, dtype, kind.elt_size_in_bytes()));
    }
    // The widest first, so that every tensor begins at a multiple of its width.
    tensors.sort_by_key(|&(_, _, _, width)| std::cmp::Reverse(width));

    let mut end = 0;
    let infos = tensors.iter().map(|&(name, tensor, dtype, width)| {
        let begin = end;
        end += tensor.numel() * width;
        let shape = tensor.size().iter().map(|&size| size as usize).collect();
        (name.to_owned(), TensorInfo { dtype, shape, data_offsets: (begin, end) })
    });
    // PyTorch's readers ask for this entry.
    let about = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let mut header = Metadata::new(Some(about), infos.collect())
        .and_then(|metadata| Ok(serde_json::to_vec(&metadata)?))
        .map_err(|error| unsupported(format!("safetensors: {error}")))?;
    header.resize(header.len().next_multiple_of(LENGTH_BYTES), b' ');

    write_whole(path, |out| {
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        let mut bytes = Vec::new();
        for (_, tensor, _, width) in &tensors {
            bytes.resize(tensor.numel() * width, 0);
            // Makes a contiguous copy on the CPU first where the tensor is none.
            tensor.f_copy_data_u8(&mut bytes, tensor.numel()).map_err(std::io::Error::other)?;
            out.write_all(&bytes)?;
        }
        Ok(())
    })
    .map_err(|source| Error::Io { doing: "write", path: path.to_owned(), source })
}

/// Writes a file that appears whole or not at all, even when the machine stops.
fn write_whole(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<&File>) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let temporary = tempfile::Builder::new()
        .prefix(".")
        .suffix(".part")
        // Less the umask, as any other file; the default of temporary files is 0600.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder)?;
    let mut out = BufWriter::with_capacity(IO_BUFFER_BYTES, temporary.as_file());
    write(&mut out)?;
    out.into_inner()?.sync_all()?;
    temporary.persist(path)?;
    // The rename is in the folder, which is flushed by itself.
    File::open(folder)?.sync_all()
}

fn kind(dtype: Dtype) -> Option<Kind> {
    KINDS.iter().find(|(_, known)| *known == dtype).map(|(kind, _)| *kind)
}

fn dtype(kind: Kind) -> Option<Dtype> {
    KINDS.iter().find(|(known, _)| *known == kind).map(|(_, dtype)| *dtype)
}

const KINDS: [(Kind, Dtype); 11] = [
    (Kind::Double, Dtype::F64),
    (Kind::Float, Dtype::F32),
    (Kind::Half, Dtype::F16),
    (Kind::BFloat16, Dtype::BF16),
    (Kind::Int64, Dtype::I64),
    (Kind::Int, Dtype::I32),
    (Kind::Int16, Dtype::I16),
    (Kind::Int8, Dtype::I8),
    (Kind::Uint8, Dtype::U8),
    (Kind::Bool, Dtype::BOOL),
    (Kind::ComplexFloat, Dtype::C64),
];

/// The header's length stands before it; the header is padded to a multiple of it.
const LENGTH_BYTES: usize = 8;
/// The format's own limit.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const RESERVED_NAME: &str = "__metadata__";
const IO_BUFFER_BYTES: usize = 1 << 20;
