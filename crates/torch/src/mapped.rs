//! Files of tensors that are mapped, and may be cut short meanwhile.
//!
//! A map of a file faults where another process cuts the file short, and the system ends the program by
//! SIGBUS. Here a handler puts zeros in the place of what is not there any more, the copy goes on, and
//! ends in an error. Faults elsewhere go to the handler that was there before.
//!
//! A file is mapped piece by piece: pages of a map count as memory of the process for as long as they are
//! mapped, and all of them would count twice, beside the tensors.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use cxx::UniquePtr;
use tch::{Device, Kind, Tensor};

use crate::bridge::{Blob, ffi, own};
use crate::error::Error;
use crate::memory::{fill_bytes, sealed::Sealed};

/// A file whose bytes go into tensors through a map of it, or are read where the file system cannot map.
///
/// Checksums, tensors on a device, of another order in memory or of another kind take their values straight
/// from the map, without a copy between. A plain tensor of the CPU is read into, which is the faster there.
///
/// A file that becomes shorter while it is read is an error like any other. For that the process has a
/// handler of SIGBUS from the first use on; where the program sets another one later, files are read.
///
/// ```no_run
/// use brigade_torch::{Device, Kind, MappedFile, Tensor};
/// let file = MappedFile::open("images.bin")?;
/// let mut images = Tensor::empty([1000, 28, 28], (Kind::Uint8, Device::Cpu));
/// file.read_into(16, &mut images)?;
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    file: File,
    bytes: u64,
    window: usize,
}

impl MappedFile {
    /// Opens a file; nothing is mapped yet.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, Error> {
        let path = path.into();
        match File::open(&path) {
            Ok(file) => Self::from_file(path, file),
            Err(source) => Err(Error::Read { path, source }),
        }
    }

    /// Of a file that is open for reading; the path is for errors.
    ///
    /// # Errors
    /// [`Error::Read`] when its size cannot be asked for.
    pub fn from_file(path: impl Into<PathBuf>, file: File) -> Result<Self, Error> {
        let mut mapped = Self { path: path.into(), file, bytes: 0, window: WINDOW_BYTES };
        mapped.bytes = mapped.bytes_now()?;
        Ok(mapped)
    }

    /// How much of it is mapped at a time, by each thread that reads: 16 MB unless set, at least 4096
    /// bytes.
    #[must_use]
    pub fn window(mut self, bytes: usize) -> Self {
        self.window = bytes.max(LEAST_WINDOW_BYTES);
        self
    }

    /// Its bytes when it was opened.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where it lies.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Fills a tensor with the bytes from `offset` on: its values in row-major order, of its own kind. The
    /// tensor may lie on a device, or have another order in memory.
    ///
    /// As with [`fill_bytes`], autograd does not notice.
    ///
    /// # Errors
    /// [`Error::CutShort`] and [`Error::Read`]: what is in the tensor is undefined then;
    /// [`Error::Tensor`] when libtorch cannot copy.
    pub fn read_into(&self, offset: u64, tensor: &mut Tensor) -> Result<(), Error> {
        let kind = tensor.f_kind()?;
        self.convert_into(offset, kind, tensor)
    }

    /// As [`MappedFile::read_into`], where the values in the file are of another kind than the tensor's.
    ///
    /// # Errors
    /// Those of [`MappedFile::read_into`].
    pub fn convert_into(&self, offset: u64, kind: Kind, tensor: &mut Tensor) -> Result<(), Error> {
        self.holds(offset, bytes_of(tensor, kind))?;
        let plain =
            tensor.device() == Device::Cpu && tensor.is_contiguous() && tensor.f_kind()? == kind;
        match plain {
            // The system's own copy into memory that is there: 0.096 s for 1 GB on two threads, through
            // the map 0.106 s, of which the page tables take the difference.
            true => fill_bytes(tensor, |bytes| self.read(offset, bytes)),
            false => tch::no_grad(|| self.convert(offset, kind, tensor)),
        }
    }

    /// The checksum of a part, CRC-32.
    ///
    /// # Errors
    /// [`Error::CutShort`] and [`Error::Read`].
    pub fn checksum(&self, range: Range<u64>) -> Result<crc32fast::Hasher, Error> {
        let mut left = usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX);
        self.holds(range.start, left)?;
        let (mut crc, mut at) = (crc32fast::Hasher::new(), range.start);
        let mut buffer = Vec::new();
        while left > 0 {
            let mut now = left.min(self.window);
            match self.map(at, now)? {
                Some(window) => {
                    // SAFETY: the window has `now` bytes, readable until it is dropped, whatever happens
                    // to the file. Another process may write them meanwhile: the checksum looks at
                    // each once, decides nothing by it, and is a wrong one then, as it should be.
                    crc.update(unsafe {
                        std::slice::from_raw_parts(window.address() as *const u8, now)
                    });
                    self.check(&window, at, now)?;
                }
                None => {
                    now = now.min(PIECE_BYTES);
                    buffer.resize(PIECE_BYTES, 0);
                    self.read(at, &mut buffer[..now])?;
                    crc.update(&buffer[..now]);
                }
            }
            (at, left) = (at + now as u64, left - now);
        }
        Ok(crc)
    }

    /// Into memory. `mapped` is called when a window is there and nothing was copied from it yet.
    fn copy(&self, offset: u64, into: &mut [u8], mapped: &dyn Fn()) -> Result<(), Error> {
        let mut at = offset;
        for piece in into.chunks_mut(self.window) {
            match self.map(at, piece.len())? {
                Some(window) => {
                    mapped();
                    // SAFETY: the window has as many bytes as the piece, readable until it is dropped,
                    // and is other memory. What another process writes there meanwhile comes over or
                    // not; every byte is a u8.
                    unsafe {
                        std::ptr::copy_nonoverlapping(
                            window.address() as *const u8,
                            piece.as_mut_ptr(),
                            piece.len(),
                        );
                    }
                    self.check(&window, at, piece.len())?;
                }
                None => self.read(at, piece)?,
            }
            at += piece.len() as u64;
        }
        Ok(())
    }

    /// Into a tensor that is not plain: part by part, along its first dimensions.
    fn convert(&self, offset: u64, kind: Kind, tensor: &Tensor) -> Result<(), Error> {
        let (bytes, size) = (bytes_of(tensor, kind), tensor.size());
        let (true, Some(&rows)) = (bytes > self.window, size.first()) else {
            return self.convert_part(offset, kind, tensor);
        };
        // More than a window, so not empty.
        let row = bytes / rows.unsigned_abs().max(1) as usize;
        let step = (self.window / row.max(1)) as i64;
        for first in (0..rows).step_by(step.max(1) as usize) {
            let at = offset + first.unsigned_abs() * row as u64;
            match step {
                // A row is more than a window.
                0 => self.convert(at, kind, &tensor.f_select(0, first)?)?,
                _ => {
                    let part = tensor.f_narrow(0, first, step.min(rows - first))?;
                    self.convert_part(at, kind, &part)?;
                }
            }
        }
        Ok(())
    }

    fn convert_part(&self, offset: u64, kind: Kind, tensor: &Tensor) -> Result<(), Error> {
        let mut tensor = tensor.shallow_clone();
        let bytes = bytes_of(&tensor, kind);
        // C++ must see no element at an odd address, and no truth value but 0 and 1.
        let in_place = offset.is_multiple_of(kind.elt_size_in_bytes() as u64) && kind != Kind::Bool;
        if in_place && let Some(window) = self.map(offset, bytes)? {
            let blob = Box::new(Blob { address: window.address(), _memory: Box::new(()) });
            let length = [bytes.cast_signed() as i64];
            // SAFETY: the window has that many bytes, aligned for the kind, and outlives this tensor and
            // its views, which are only read from and dropped below.
            let made = unsafe { ffi::tensor_from_blob(blob, &length, u8::SCALAR_TYPE) }
                .map_err(|error| Error::libtorch("read_into", &error))?;
            let values = own(made);
            let values = values.f_view_dtype(kind)?.f_view(&tensor.size()[..])?;
            tensor.f_copy_(&values)?;
            drop(values);
            return self.check(&window, offset, bytes);
        }
        let mut values = Tensor::f_empty(tensor.size(), (kind, Device::Cpu))?;
        fill_bytes(&mut values, |bytes| self.copy(offset, bytes, &|| {}))?;
        Ok(tensor.f_copy_(&values)?)
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        let read = self.file.read_exact_at(into, offset);
        read.map_err(|source| match source.kind() {
            std::io::ErrorKind::UnexpectedEof => self.cut_short(self.bytes_now().unwrap_or(0)),
            _ => Error::Read { path: self.path.clone(), source },
        })
    }

    /// `None` where the bytes are to be read: so few that a map costs more than the copy, or a system
    /// that cannot.
    fn map(&self, offset: u64, bytes: usize) -> Result<Option<Window>, Error> {
        if bytes < SMALL_BYTES.min(self.window) {
            return Ok(None);
        }
        let found = self.bytes_now()?;
        if found < offset + bytes as u64 {
            return Err(self.cut_short(found));
        }
        let window = ffi::map_window(self.file.as_raw_fd(), offset, bytes);
        Ok((!window.is_null()).then_some(Window(window)))
    }

    /// Whether what was copied from the window was the file's. A cut within the last page makes no fault,
    /// only zeros: so the size is asked for again.
    fn check(&self, window: &Window, offset: u64, bytes: usize) -> Result<(), Error> {
        let found = self.bytes_now()?;
        if found < offset + bytes as u64 {
            return Err(self.cut_short(found));
        }
        if window.is_sound() {
            return Ok(());
        }
        let source = std::io::Error::other(
            "a page of it could not be had: it was cut short and written again meanwhile, or the disk \
             failed",
        );
        Err(Error::Read { path: self.path.clone(), source })
    }

    /// Whether the file had so much when it was opened.
    fn holds(&self, offset: u64, bytes: usize) -> Result<(), Error> {
        match offset.checked_add(bytes as u64) {
            Some(end) if end <= self.bytes => Ok(()),
            end => Err(Error::CutShort {
                path: self.path.clone(),
                expected: end.unwrap_or(u64::MAX),
                found: self.bytes,
            }),
        }
    }

    fn bytes_now(&self) -> Result<u64, Error> {
        let found = self.file.metadata().map(|metadata| metadata.len());
        found.map_err(|source| Error::Read { path: self.path.clone(), source })
    }

    fn cut_short(&self, found: u64) -> Error {
        Error::CutShort { path: self.path.clone(), expected: self.bytes, found }
    }
}

/// Bytes of the tensor's values in a kind.
fn bytes_of(tensor: &Tensor, kind: Kind) -> usize {
    tensor.numel() * kind.elt_size_in_bytes()
}

struct Window(UniquePtr<ffi::Window>);

impl Window {
    fn address(&self) -> usize {
        ffi::window_address(&self.0)
    }

    fn is_sound(&self) -> bool {
        ffi::window_is_sound(&self.0)
    }
}

/// Of 4, 8, 16 and 32 MB the larger were the faster, by 10 % from the first to the last; this much counts
/// as memory of each thread.
const WINDOW_BYTES: usize = 16 << 20;
const LEAST_WINDOW_BYTES: usize = 4096;
/// Below this, mapping and unmapping take longer than a read.
const SMALL_BYTES: usize = 256 << 10;
/// Fits the second-level cache.
const PIECE_BYTES: usize = 64 << 10;

#[cfg(test)]
#[path = "mapped/tests.rs"]
mod tests;
