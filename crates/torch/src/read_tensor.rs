//! Reading of tensors from weights files.

use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::thread;

use brigade_checkpoint::{Error as FileError, Region, TensorReader};
use parking_lot::Mutex;
use tch::{Device, Kind, Tensor};

use crate::dtype::loaded_kind;
use crate::error::Error;
use crate::memory::fill_bytes;

/// Operation that reads a region of a tensor in weights files into a tensor of the same shape. Kind, device and memory
/// layout of the tensor may differ from those in the file.
///
/// ```
/// use brigade_checkpoint::{Region, WeightsReader};
/// use brigade_torch::TensorRead;
/// use tch::{Device, Kind, Tensor};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// # let header = br#"{"weight":{"dtype":"F32","shape":[4,2],"data_offsets":[0,32]}} "#;
/// # let values = [0f32, 1., 2., 3., 4., 5., 6., 7.].map(f32::to_le_bytes);
/// # std::fs::write(&path, [&(header.len() as u64).to_le_bytes(), &header[..], values.as_flattened()].concat())?;
/// let weights = WeightsReader::open(path)?;
/// let from = weights.get("weight").expect("the file has it");
/// // The second half of the rows, as doubles.
/// let region = Region::whole(&from.info().shape).narrow(0, 2, 2);
/// let shard = Tensor::zeros([2, 2], (Kind::Double, Device::Cpu));
/// TensorRead { from, region, into: shard.shallow_clone() }.read()?;
/// assert_eq!(shard.double_value(&[0, 1]), 5.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TensorRead<'r> {
    /// Tensor in the files.
    pub from: TensorReader<'r>,
    /// Region of the tensor that is read.
    pub region: Region,
    /// Tensor that the values are read into.
    pub into: Tensor,
}

impl<'r> TensorRead<'r> {
    /// Returns an operation that reads the whole tensor `from` into `into`.
    #[must_use]
    pub fn whole(from: TensorReader<'r>, into: Tensor) -> Self {
        Self { from, region: Region::whole(&from.info().shape), into }
    }

    /// Checks the region, the shapes and the type in the file, without reading the file.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] if `into` has another shape than the region, or if the region
    /// exceeds the file's tensor; [`FileError::Unsupported`] if the file's type is not a type of tensors.
    pub fn check(&self) -> Result<(), Error> {
        let Self { from, region, into } = self;
        let shape = region.shape.iter().map(|&size| i64::try_from(size).ok());
        let fits = shape.eq(into.size().into_iter().map(Some));
        if !fits || !region.is_within(&from.info().shape) {
            return Err(Error::invalid_argument(format!(
                "cannot read {region} of `{}`, {} in {}, into a tensor of shape {:?}",
                from.name(),
                from.info(),
                from.path().display(),
                into.size()
            )));
        }
        Ok(self.kind().map(drop)?)
    }

    /// Reads the values, in up to four threads if there are many. A contiguous CPU tensor of the file's kind is read
    /// into directly, with the extra memory of [`TensorReader::read`] per thread, 4 MB at most except for views that
    /// overlap themselves. Other tensors are read in pieces that fit into a processor's cache, and copied.
    ///
    /// Autograd does not record the change: use it for leaves and buffers, outside of a forward pass.
    ///
    /// # Errors
    /// Returns the errors of [`TensorRead::check`], with nothing changed; those of [`TensorReader::read`], and
    /// [`crate::TorchError::Tensor`] if libtorch cannot copy. The content of the tensor is then undefined.
    pub fn read(self) -> Result<(), Error> {
        self.read_with(readers())
    }

    /// Reads the values as [`TensorRead::read`] does, in the calling thread alone: for programs that read several
    /// tensors at the same time.
    ///
    /// # Errors
    /// Returns the same errors as [`TensorRead::read`].
    pub fn read_in_this_thread(self) -> Result<(), Error> {
        self.read_with(1)
    }

    fn read_with(self, threads: usize) -> Result<(), Error> {
        read_with(vec![self], threads, &|_, error| error)
    }

    /// Divides the read into parts of at most some bytes.
    fn tasks(&self, bytes: usize) -> Result<Vec<Task<'r>>, Error> {
        let (from, kind) = (self.from, self.kind()?);
        let parts = self.region.parts(bytes.div_ceil(kind.elt_size_in_bytes()) as u64);
        let task = |region: Region| {
            let into = narrowed(&self.into, &self.region, &region)?;
            Ok(Task { from, kind, region, into })
        };
        parts.into_iter().map(task).collect()
    }

    fn kind(&self) -> Result<Kind, FileError> {
        let path = self.from.path();
        let kind = loaded_kind(self.from.name(), self.from.info().dtype);
        kind.map_err(|fact| FileError::Unsupported { path: path.to_owned(), fact })
    }
}

/// Reads several tensors, in up to four threads in all; see [`TensorRead::read`]. `failed` adds to an error what the
/// caller knows of the tensor that could not be read.
///
/// ```
/// use brigade_checkpoint::WeightsReader;
/// use brigade_torch::{TensorRead, read_tensors};
/// use tch::{Device, Kind, Tensor};
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// # let header = br#"{"weight":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
/// # std::fs::write(&path, [&(header.len() as u64).to_le_bytes(), &header[..], &2f32.to_le_bytes()].concat())?;
/// let weights = WeightsReader::open(path)?;
/// let values: Vec<Tensor> =
///     weights.tensors().map(|_| Tensor::zeros([1], (Kind::BFloat16, Device::Cpu))).collect();
/// let reads = weights.tensors().zip(&values);
/// let reads = reads.map(|(from, into)| TensorRead::whole(from, into.shallow_clone())).collect();
/// read_tensors(reads, |_, error| error)?;
/// assert_eq!(values[0].double_value(&[0]), 2.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Returns the errors of [`TensorRead::check`], with nothing changed, and those of [`TensorRead::read`]. The content of
/// all tensors is then undefined.
pub fn read_tensors<'r>(
    reads: Vec<TensorRead<'r>>,
    failed: impl Fn(TensorReader<'r>, Error) -> Error + Sync,
) -> Result<(), Error> {
    read_with(reads, readers(), &failed)
}

/// Part of a tensor that one thread reads.
struct Task<'r> {
    from: TensorReader<'r>,
    kind: Kind,
    region: Region,
    into: Tensor,
}

fn read_with<'r>(
    reads: Vec<TensorRead<'r>>,
    threads: usize,
    failed: &(impl Fn(TensorReader<'r>, Error) -> Error + Sync),
) -> Result<(), Error> {
    let bytes = |read: &TensorRead<'r>| -> Result<usize, Error> {
        read.check()?;
        Ok(read.into.numel() * read.kind()?.elt_size_in_bytes())
    };
    let bytes = reads.iter().map(|read| bytes(read).map_err(|error| failed(read.from, error)));
    let bytes: usize = bytes.sum::<Result<_, _>>()?;
    let threads = threads.min(bytes / SMALLEST_SHARE).max(1);
    let task_bytes = if threads == 1 { usize::MAX } else { (bytes / threads).min(TASK_BYTES) };
    let mut tasks = VecDeque::new();
    for read in reads {
        let of_read = read.tasks(task_bytes).map_err(|error| failed(read.from, error))?;
        tasks.extend(of_read);
    }
    let tasks = Mutex::new(tasks);
    // Each thread reads neighbouring parts: the system reads ahead, and keeps the file in large pages.
    let fill = |from_the_front: bool| {
        loop {
            let mut left = tasks.lock();
            let task = if from_the_front { left.pop_front() } else { left.pop_back() };
            drop(left);
            let Some(Task { from, kind, region, mut into }) = task else { return Ok(()) };
            let read = |part: &Region, bytes: &mut [u8]| Ok(from.read(part, bytes)?);
            let filled = fill_converted(&mut into, kind, &region, PART_BYTES, read);
            if let Err(error) = filled {
                tasks.lock().clear();
                return Err(failed(from, error));
            }
        }
    };
    thread::scope(|scope| {
        // Where the system has no thread left, fewer threads read everything.
        let others: Vec<_> = (1..threads)
            .filter_map(|thread| {
                let fill = &fill;
                let fill = move || fill(thread.is_multiple_of(2));
                thread::Builder::new().spawn_scoped(scope, fill).ok()
            })
            .collect();
        let own = fill(true);
        others
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
            .fold(own, Result::and)
    })
}

/// Returns the number of threads that read tensors.
fn readers() -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(READERS)
}

/// Fills a tensor with a region of values of `kind`, which `read` returns. A plain tensor of that kind is read in one
/// piece, any other in parts of limited size, in row-major order.
pub(crate) fn fill_converted(
    into: &mut Tensor,
    kind: Kind,
    region: &Region,
    part_bytes: usize,
    mut read: impl FnMut(&Region, &mut [u8]) -> Result<(), Error>,
) -> Result<(), Error> {
    if into.device() == Device::Cpu && into.is_contiguous() && into.f_kind()? == kind {
        return fill_bytes(into, |bytes| read(region, bytes));
    }
    tch::no_grad(|| {
        let parts = region.parts((part_bytes / kind.elt_size_in_bytes()) as u64);
        // One buffer for all parts: fresh memory costs a page fault for each 4 kB.
        let longest = parts.iter().map(|part| elements(&part.shape)).max().unwrap_or(0);
        let buffer = Tensor::f_empty([longest], (kind, Device::Cpu))?;
        for part in parts {
            let mut target = narrowed(into, region, &part)?;
            let values = buffer.f_narrow(0, 0, elements(&part.shape))?;
            let mut values = values.f_view(&target.size()[..])?;
            fill_bytes(&mut values, |bytes| read(&part, bytes))?;
            target.f_copy_(&values)?;
        }
        Ok(())
    })
}

fn elements(shape: &[u64]) -> i64 {
    shape.iter().product::<u64>().cast_signed()
}

/// Returns the part of a tensor, which has the values of `region`.
fn narrowed(tensor: &Tensor, region: &Region, part: &Region) -> Result<Tensor, Error> {
    let mut narrowed = tensor.shallow_clone();
    for dim in 0..part.shape.len() {
        let (start, size) = (part.offset[dim] - region.offset[dim], part.shape[dim]);
        if size != region.shape[dim] {
            // The numbers are sizes of the tensor, so they fit into an i64.
            narrowed = tch::no_grad(|| narrowed.f_narrow(dim as i64, start as i64, size as i64))?;
        }
    }
    Ok(narrowed)
}

/// Size of a piece in bytes. Small enough for a processor's second-level cache, and for libtorch to convert it without
/// threads of its own.
const PART_BYTES: usize = 128 << 10;

/// Maximum number of bytes that a thread reads before it takes the next part.
const TASK_BYTES: usize = 16 << 20;

/// Maximum number of threads that read tensors.
const READERS: usize = 4;

/// Minimum number of bytes per thread: starting a thread costs about as much as reading a tenth of them.
const SMALLEST_SHARE: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use brigade_checkpoint::safetensors::layout;
    use brigade_checkpoint::{Dtype, TensorInfo, WeightsReader};

    use super::*;
    use crate::memory_format::channels_last;

    fn open(path: &Path, shape: &[u64], values: &[f32]) -> WeightsReader {
        let info = TensorInfo { dtype: Dtype::F32, shape: shape.to_vec() };
        let mut bytes = layout(path, &[("t", info)]).unwrap().header;
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        std::fs::write(path, bytes).unwrap();
        WeightsReader::open(path).unwrap()
    }

    fn read(from: TensorReader<'_>, region: &Region, into: &Tensor) -> Result<(), Error> {
        TensorRead { from, region: region.clone(), into: into.shallow_clone() }.read()
    }

    #[test]
    fn regions_have_the_values_of_narrowing() {
        let folder = tempfile::tempdir().unwrap();
        // Read in two parts or more.
        let shape = [96i64, 64, 32, 16];
        let expected =
            Tensor::arange(shape.iter().product::<i64>(), (Kind::Float, Device::Cpu)).view(shape);
        let values = Vec::<f32>::try_from(expected.flatten(0, -1)).unwrap();
        let weights = open(&folder.path().join("w"), &[96, 64, 32, 16], &values);
        let tensor = weights.get("t").unwrap();
        let whole = Region::whole(&tensor.info().shape);
        for region in
            [whole.clone(), whole.narrow(0, 5, 91), whole.narrow(1, 3, 60), whole.narrow(3, 2, 3)]
        {
            let mut expected = expected.shallow_clone();
            for dim in 0..4 {
                expected = expected.narrow(
                    dim as i64,
                    region.offset[dim] as i64,
                    region.shape[dim] as i64,
                );
            }
            for kind in [Kind::Float, Kind::Double, Kind::BFloat16] {
                let plain = Tensor::zeros(expected.size(), (kind, Device::Cpu));
                read(tensor, &region, &plain).unwrap();
                assert_eq!(plain, expected.to_kind(kind), "{region} as {kind:?}");
                let images = channels_last(&plain.zeros_like()).unwrap();
                read(tensor, &region, &images).unwrap();
                assert_eq!(images, plain, "{region} as {kind:?}, channels last");
            }
        }
        let other = Tensor::zeros([96, 64, 32], (Kind::Float, Device::Cpu));
        for region in [whole.clone(), whole.narrow(3, 0, 17)] {
            let error = read(tensor, &region, &other).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("cannot read {region} of `t`, [96, 64, 32, 16] of F32")),
                "{error}"
            );
        }
    }

    #[test]
    fn large_tensors_are_read_in_any_number_of_threads() {
        let folder = tempfile::tempdir().unwrap();
        // Rows of 4 bytes less than the unit of a cache; few rows, so that threads divide them, too.
        for shape in [[1023i64, 1025], [3, 350_001], [1, 1_050_000]] {
            let count = shape[0] * shape[1];
            let expected = Tensor::arange(count, (Kind::Float, Device::Cpu)).view(shape);
            let values = Vec::<f32>::try_from(expected.flatten(0, -1)).unwrap();
            let weights = open(&folder.path().join("w"), &shape.map(i64::unsigned_abs), &values);
            for kind in [Kind::Float, Kind::BFloat16] {
                for threads in 1..=4 {
                    let into = Tensor::zeros(shape, (kind, Device::Cpu)).set_requires_grad(true);
                    let read = TensorRead::whole(weights.get("t").unwrap(), into.shallow_clone());
                    read.read_with(threads).unwrap();
                    assert!(into.requires_grad());
                    assert_eq!(into.detach(), expected.to_kind(kind), "{shape:?} {threads}");
                }
            }
        }
    }

    #[test]
    fn a_file_that_is_cut_short_fails_in_any_thread() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("w");
        let weights = open(&path, &[4, 1 << 18], &[0.5; 1 << 20]);
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        // Each length ends the file in another thread's part.
        for length in [1 << 20, 2 << 20, 3 << 20, (4 << 20) - 1] {
            file.set_len(length).unwrap();
            let into = Tensor::zeros([4, 1 << 18], (Kind::BFloat16, Device::Cpu));
            let read = TensorRead::whole(weights.get("t").unwrap(), into);
            let error = read.read_with(4).unwrap_err().to_string();
            assert!(error.contains("cut short while `t` was read"), "{length}: {error}");
        }
    }

    #[test]
    fn scalars_and_empty_tensors_are_read() {
        let folder = tempfile::tempdir().unwrap();
        for (shape, values) in [(&[][..], &[2.5f32][..]), (&[0, 3], &[])] {
            let weights = open(&folder.path().join("w"), shape, values);
            let tensor = weights.get("t").unwrap();
            for kind in [Kind::Float, Kind::Double] {
                let sizes: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
                let into = Tensor::zeros(sizes, (kind, Device::Cpu));
                TensorRead::whole(tensor, into.shallow_clone()).read().unwrap();
                assert_eq!(
                    into.sum(Kind::Double).double_value(&[]),
                    f64::from(values.iter().sum::<f32>())
                );
            }
        }
    }
}
