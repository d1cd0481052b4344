//! Tensors stored in files.

mod cast;
mod chunks;

use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use self::cast::Cast;
pub(crate) use self::cast::is_float;
pub(crate) use self::chunks::Chunk;
use self::chunks::Chunks;
use crate::dtype::{Dtype, TensorInfo};
use crate::error::Error;
use crate::file_handle::open_regular;
use crate::layout::{self, TensorLocation};
use crate::pth::{PthFile, Quantizer, StoragePlace, StoredTensor, TensorData};
use crate::region::Region;
use crate::torch_optimizer::StateTensor;

/// A tensor in a file of any format. Small ones may be in memory.
#[derive(Debug, Clone)]
pub struct FileTensor(Source);

#[derive(Debug, Clone)]
enum Source {
    Placed(TensorLocation),
    Stored(Arc<Mutex<PthFile>>, StoredTensor),
    /// Parts that cover the tensor, as saved by several ranks.
    Chunks(Arc<Chunks>),
    /// Consecutive parts of its bytes, as DeepSpeed cuts flat tensors.
    Parts(TensorInfo, Vec<TensorLocation>),
    Memory(TensorInfo, Arc<[u8]>),
    /// Another float tensor to be written as this type, and the number of values that became infinite.
    Cast(Box<FileTensor>, Dtype, Arc<AtomicU64>),
}

impl FileTensor {
    pub(crate) fn placed(place: TensorLocation) -> Self {
        Self(Source::Placed(place))
    }

    /// Returns a tensor of a checkpoint, whole or in the parts of several ranks.
    ///
    /// Returns the errors of [`of_chunks`](Self::of_chunks).
    pub(crate) fn of_checkpoint(tensor: layout::StoredTensor) -> Result<Self, String> {
        Self::of_chunks(tensor.info, tensor.chunks)
    }

    /// Joins chunks that cover a tensor exactly once, each in a file.
    ///
    /// Fails for elements smaller than a byte that are cut along another dimension than the first.
    pub(crate) fn of_chunks(
        info: TensorInfo,
        chunks: Vec<(Region, TensorLocation)>,
    ) -> Result<Self, String> {
        Ok(match <[_; 1]>::try_from(chunks) {
            Ok([(_, place)]) => Self::placed(place),
            Err(chunks) => Self(Source::Chunks(Arc::new(Chunks::new(info, chunks)?))),
        })
    }

    /// Joins consecutive parts, whose sizes add up to the tensor's.
    pub(crate) fn of_parts(info: TensorInfo, mut parts: Vec<TensorLocation>) -> Self {
        match (parts.len(), parts.pop()) {
            (1, Some(part)) => Self::placed(TensorLocation { info, ..part }),
            (_, last) => {
                parts.extend(last);
                Self(Source::Parts(info, parts))
            }
        }
    }

    /// Joins chunks like [`of_chunks`](Self::of_chunks), and compares the checksums of their `torch.save` storages
    /// before a byte is copied. A chunk's elements may be in any order in its file.
    ///
    /// Returns the errors of [`of_chunks`](Self::of_chunks).
    pub(crate) fn of_checked_chunks(
        info: TensorInfo,
        chunks: Vec<Chunk>,
        storages: Vec<(PathBuf, StoragePlace)>,
    ) -> Result<Self, String> {
        let chunks = Chunks::of_places(info, chunks)?.checked(storages);
        Ok(Self(Source::Chunks(Arc::new(chunks))))
    }

    pub(crate) fn stored(file: &Arc<Mutex<PthFile>>, tensor: StoredTensor) -> Self {
        Self(Source::Stored(Arc::clone(file), tensor))
    }

    /// Returns a vector of bytes, as PyTorch stores the states of its generators.
    pub(crate) fn bytes(bytes: &[u8]) -> Self {
        let info = TensorInfo { dtype: Dtype::U8, shape: vec![bytes.len() as u64] };
        Self(Source::Memory(info, bytes.into()))
    }

    /// Converts the tensor to another floating-point type. Returns it unchanged unless both types are plain floats.
    pub(crate) fn cast(self, to: Dtype) -> Self {
        let from = self.info().dtype;
        if from == to || !is_float(from) || !is_float(to) {
            return self;
        }
        Self(Source::Cast(Box::new(self), to, Arc::default()))
    }

    /// Returns the number of finite values that became infinite by the conversion. Known after the tensor was written.
    pub(crate) fn overflowed(&self) -> u64 {
        match &self.0 {
            Source::Cast(_, _, count) => count.load(Ordering::Relaxed),
            _ => 0,
        }
    }

    /// Returns all bytes of the tensor.
    pub(crate) fn read(&self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.write_to(&mut bytes)?;
        Ok(bytes)
    }

    /// Returns the value of a tensor with one element. `None` for more elements, for types that are not used for counts
    /// and rates, and if the file cannot be read: copying the tensor reports that error.
    pub(crate) fn scalar(&self) -> Option<f64> {
        let info = self.info();
        if info.elements() != Some(1) {
            return None;
        }
        let bytes = self.read().ok()?;
        Some(match info.dtype {
            Dtype::F32 => f64::from(f32::from_le_bytes(bytes.try_into().ok()?)),
            Dtype::F64 => f64::from_le_bytes(bytes.try_into().ok()?),
            Dtype::I64 => i64::from_le_bytes(bytes.try_into().ok()?) as f64,
            Dtype::I32 => f64::from(i32::from_le_bytes(bytes.try_into().ok()?)),
            _ => return None,
        })
    }
}

impl StateTensor for FileTensor {
    fn scalar(&self) -> Option<f64> {
        Self::scalar(self)
    }

    /// Returns a 32-bit float, as PyTorch counts an optimizer's steps.
    fn from_scalar(number: f64) -> Self {
        let info = TensorInfo { dtype: Dtype::F32, shape: Vec::new() };
        Self(Source::Memory(info, (number as f32).to_le_bytes().as_slice().into()))
    }
}

impl TensorData for FileTensor {
    fn info(&self) -> TensorInfo {
        match &self.0 {
            Source::Placed(place) => place.info.clone(),
            Source::Stored(_, tensor) => tensor.info(),
            Source::Memory(info, _) | Source::Parts(info, _) => info.clone(),
            Source::Chunks(chunks) => chunks.info().clone(),
            Source::Cast(tensor, to, _) => TensorInfo { dtype: *to, ..tensor.info() },
        }
    }

    fn quantizer(&self) -> Option<Quantizer<Self>> {
        let Source::Stored(file, tensor) = &self.0 else { return None };
        let stored = |part| Ok::<_, std::convert::Infallible>(Self::stored(file, part));
        tensor.quantizer.clone()?.try_map(stored).ok()
    }

    fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        match &self.0 {
            Source::Memory(_, bytes) => out.write_all(bytes),
            Source::Cast(tensor, to, overflowed) => {
                let mut cast = Cast::new(tensor.info().dtype, *to, out);
                tensor.write_to(&mut cast)?;
                overflowed.store(cast.overflowed, Ordering::Relaxed);
                Ok(())
            }
            Source::Stored(file, tensor) => {
                let mut file = file.lock();
                file.copy_tensor(tensor, out).map_err(io::Error::other)
            }
            Source::Placed(place) => copy(place, out),
            Source::Chunks(chunks) => chunks.write_to(out),
            Source::Parts(_, places) => places.iter().try_for_each(|place| copy(place, out)),
        }
    }
}

/// Copies the bytes of a location, a piece at a time.
fn copy(place: &TensorLocation, out: &mut dyn Write) -> io::Result<()> {
    let unread = |error| io::Error::other(Error::io("read", &place.path)(error));
    let file = open_regular(&place.path).map_err(unread)?;
    let mut left = place.info.bytes().unwrap_or_default();
    let (mut at, mut piece) = (place.offset, vec![0; PIECE_BYTES.min(left as usize)]);
    while left > 0 {
        let now = left.min(PIECE_BYTES as u64) as usize;
        file.read_exact_at(&mut piece[..now], at).map_err(unread)?;
        out.write_all(&piece[..now])?;
        (at, left) = (at + now as u64, left - now as u64);
    }
    Ok(())
}

const PIECE_BYTES: usize = 1 << 20;

/// Names and tensors of a model, in order.
pub type Weights = Vec<(String, FileTensor)>;
