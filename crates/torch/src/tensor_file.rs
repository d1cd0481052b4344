//! Files of tensors, which are read into existing tensors.
//!
//! Files are read, not mapped. A map would save a copy for a tensor on a device or in another memory format; but a file
//! that is truncated while it is mapped ends the process with SIGBUS, and the pages of a map count as memory of the
//! process in addition to the tensors.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use brigade_checkpoint::Region;
use tch::{Kind, Tensor};

use crate::error::{Error, TorchError};
use crate::read_tensor::fill_converted;

/// A file whose bytes are read into tensors.
///
/// A contiguous CPU tensor of the file's kind is read into directly. For a tensor on a device, of another memory format
/// or of another kind, the file is read in pieces of 16 MB, unless [`TensorFile::piece`] sets another size.
///
/// ```
/// use brigade_torch::TensorFile;
/// use tch::{Device, Kind, Tensor};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("images.bin");
/// std::fs::write(&path, [0u8; 16 + 10 * 28 * 28])?;
/// let mut images = Tensor::empty([10, 28, 28], (Kind::Uint8, Device::Cpu));
/// TensorFile::open(&path)?.read_into(16, &mut images)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: File,
    bytes: u64,
    piece: usize,
}

impl TensorFile {
    /// Opens the file at `path` for reading.
    ///
    /// # Errors
    /// [`crate::TorchError::Read`] if the file cannot be opened.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, Error> {
        let path = path.into();
        match File::open(&path) {
            Ok(file) => Self::from_file(path, file),
            Err(source) => Err(TorchError::Read { path, source }.into()),
        }
    }

    /// Wraps a file that is open for reading. The path is used in errors.
    ///
    /// # Errors
    /// [`crate::TorchError::Read`] when its size cannot be read.
    pub fn from_file(path: impl Into<PathBuf>, file: File) -> Result<Self, Error> {
        let mut opened = Self { path: path.into(), file, bytes: 0, piece: PIECE_BYTES };
        opened.bytes = opened.bytes_now()?;
        Ok(opened)
    }

    /// Sets the number of bytes, at least 4096, that are read at a time into a buffer, for tensors that the file cannot
    /// be read into directly.
    #[must_use]
    pub fn piece(mut self, bytes: usize) -> Self {
        self.piece = bytes.max(LEAST_PIECE_BYTES);
        self
    }

    /// Returns the size of the file in bytes when it was opened.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Fills a tensor with the bytes from `offset` on: its values in row-major order, of its own kind. The tensor may
    /// be on a device, or have another memory layout.
    ///
    /// Autograd does not record the change: use it for leaves and buffers, outside of a forward pass.
    ///
    /// # Errors
    /// [`crate::TorchError::CutShort`] and [`crate::TorchError::Read`], after which the content of the tensor is
    /// undefined; [`crate::TorchError::Tensor`] if libtorch cannot copy.
    pub fn read_into(&self, offset: u64, tensor: &mut Tensor) -> Result<(), Error> {
        let kind = tensor.f_kind()?;
        self.convert_into(offset, kind, tensor)
    }

    /// Fills a tensor as [`TensorFile::read_into`] does, from values of another kind in the file.
    ///
    /// # Errors
    /// Returns the errors of [`TensorFile::read_into`].
    pub fn convert_into(&self, offset: u64, kind: Kind, tensor: &mut Tensor) -> Result<(), Error> {
        self.holds(offset, bytes_of(tensor, kind))?;
        let size = tensor.size().into_iter().map(i64::unsigned_abs).collect::<Vec<_>>();
        let mut at = offset;
        fill_converted(tensor, kind, &Region::whole(&size), self.piece, |_, bytes| {
            self.read(at, bytes)?;
            at += bytes.len() as u64;
            Ok(())
        })
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        let read = self.file.read_exact_at(into, offset);
        read.map_err(|source| {
            match source.kind() {
                std::io::ErrorKind::UnexpectedEof => TorchError::CutShort {
                    path: self.path.clone(),
                    expected: self.bytes,
                    found: self.bytes_now().unwrap_or(0),
                },
                _ => TorchError::Read { path: self.path.clone(), source },
            }
            .into()
        })
    }

    /// Returns an error unless the file had this many bytes when it was opened.
    fn holds(&self, offset: u64, bytes: usize) -> Result<(), TorchError> {
        match offset.checked_add(bytes as u64) {
            Some(end) if end <= self.bytes => Ok(()),
            end => Err(TorchError::CutShort {
                path: self.path.clone(),
                expected: end.unwrap_or(u64::MAX),
                found: self.bytes,
            }),
        }
    }

    fn bytes_now(&self) -> Result<u64, TorchError> {
        let found = self.file.metadata().map(|metadata| metadata.len());
        found.map_err(|source| TorchError::Read { path: self.path.clone(), source })
    }
}

/// Number of bytes of the tensor's values in a kind.
fn bytes_of(tensor: &Tensor, kind: Kind) -> usize {
    tensor.numel() * kind.elt_size_in_bytes()
}

/// Default size of a piece in bytes, which each reading thread allocates while it reads.
const PIECE_BYTES: usize = 16 << 20;
const LEAST_PIECE_BYTES: usize = 4096;

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use tch::Device;
    use tempfile::TempDir;

    use super::*;
    use crate::memory_format::channels_last;

    /// Values without a short period, so that a piece in a wrong place is detected.
    fn bytes(count: usize) -> Vec<u8> {
        (0..count).map(|i| (i * 7 + i / 251 + i / 65_521) as u8).collect()
    }

    fn file(content: &[u8]) -> (TempDir, TensorFile) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, content).unwrap();
        (folder, TensorFile::open(path).unwrap())
    }

    fn plain(file: &TensorFile, offset: u64, kind: Kind, size: &[i64]) -> Tensor {
        let mut tensor = Tensor::f_empty(size, (kind, Device::Cpu)).unwrap();
        file.read_into(offset, &mut tensor).unwrap();
        tensor
    }

    #[test]
    fn every_byte_comes_to_its_place() {
        let content = bytes(3 << 20);
        let (_folder, file) = file(&content);
        for (offset, count) in [(0, content.len()), (1, 300_001), (8191, 1 << 20), (77, 5), (9, 0)]
        {
            let tensor = plain(&file, offset, Kind::Uint8, &[count as i64]);
            let expected = &content[offset as usize..offset as usize + count];
            assert!(Vec::<u8>::try_from(&tensor).unwrap() == expected, "{offset}");
        }
        let mut tensor = Tensor::f_empty([10], (Kind::Uint8, Device::Cpu)).unwrap();
        for offset in [(3 << 20) - 9, u64::MAX] {
            let error = file.read_into(offset, &mut tensor).unwrap_err();
            assert!(
                matches!(error.downcast_ref(), Some(TorchError::CutShort { found, .. }) if *found == 3 << 20),
                "{error}"
            );
        }
    }

    #[test]
    fn tensors_that_are_not_plain_have_the_same_values() {
        let (_folder, file) = file(&bytes(2 << 20));
        let path = file.path().to_owned();
        for piece in [4096, 50_000, 16 << 20] {
            let file = TensorFile::open(&path).unwrap().piece(piece);
            // A row is larger than the smallest piece, or several rows are; also with an odd offset.
            for size in [[2, 64, 32, 32], [64, 3, 5, 7], [1, 1, 1, 1], [3, 0, 2, 2]] {
                for offset in [0, 8, 13] {
                    let expected = plain(&file, offset, Kind::Int, &size);
                    let empty = Tensor::f_zeros(size, (Kind::Int, Device::Cpu)).unwrap();
                    let mut images = channels_last(&empty).unwrap();
                    file.read_into(offset, &mut images).unwrap();
                    assert_eq!(images, expected, "{size:?} at {offset}, pieces of {piece}");
                    let mut wide = Tensor::f_zeros(size, (Kind::Int64, Device::Cpu)).unwrap();
                    file.convert_into(offset, Kind::Int, &mut wide).unwrap();
                    assert_eq!(wide, expected.to_kind(Kind::Int64), "{size:?} at {offset}");
                }
            }
            // Any byte other than 0 means true.
            let mut truths = Tensor::f_zeros([1000, 100], (Kind::Bool, Device::Cpu)).unwrap();
            let mut turned = truths.f_zeros_like().unwrap().transpose(0, 1).contiguous();
            file.read_into(5, &mut truths).unwrap();
            file.read_into(5, &mut turned.f_t_().unwrap()).unwrap();
            let numbers = plain(&file, 5, Kind::Uint8, &[1000, 100]);
            assert_eq!(truths, numbers.ne(0));
            assert_eq!(turned, truths);
        }
    }

    #[test]
    fn a_file_that_is_cut_short_is_an_error() {
        for left in [0, 4096, 700_001, (1 << 20) - 5] {
            let (_folder, file) = file(&bytes(1 << 20));
            OpenOptions::new().write(true).open(file.path()).unwrap().set_len(left).unwrap();
            let mut plain = Tensor::f_empty([1 << 20], (Kind::Uint8, Device::Cpu)).unwrap();
            let mut wide = Tensor::f_zeros([1 << 20], (Kind::Int64, Device::Cpu)).unwrap();
            for error in [
                file.read_into(0, &mut plain).unwrap_err(),
                file.convert_into(0, Kind::Uint8, &mut wide).unwrap_err(),
            ] {
                assert!(
                    matches!(error.downcast_ref(), Some(TorchError::CutShort { expected, found, .. }) if *expected == 1 << 20 && *found == left),
                    "{error}"
                );
                assert!(error.to_string().contains("was cut short while it was read"), "{error}");
            }
        }
    }
}
