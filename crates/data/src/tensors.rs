//! Tensors in memory as a dataset.

use brigade_rank_env::text::counted;
use brigade_torch::{Element, Result, TensorTree, TorchError, copy_to_device, elements, from_vec};
use parking_lot::Mutex;
use tch::{Device, Kind, Tensor};

use crate::{BatchContext, BatchedDataset, DataError, DataLoader};

/// A dataset of tensors whose first dimension counts the samples, like torch's `TensorDataset`: one tensor, or a tuple,
/// list or map of tensors. A batch has the same structure, with copies of the requested rows.
///
/// Tensors on a GPU ([`to_device`](Self::to_device)) are gathered on it, into batches on that GPU.
///
/// ```
/// use brigade_data::{DataLoader, TensorDataset};
/// use tch::{Device, Kind, Tensor};
///
/// let x = Tensor::randn([1000, 8], (Kind::Float, Device::Cpu));
/// let y = x.sum_dim_intlist(-1, false, Kind::Float);
/// let loader = DataLoader::new(TensorDataset::new((x, y))?).batch_size(32).shuffle(true);
/// assert_eq!(loader.iter().count(), 32);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct TensorDataset<T> {
    // tch's Tensor may be sent but not shared; the lock is held only while handles are cloned.
    tensors: Mutex<T>,
    len: usize,
}

impl<T: TensorTree + Send> TensorDataset<T> {
    /// Creates a dataset of the tensors.
    ///
    /// # Errors
    /// Fails if there are no tensors, one has no dimensions, or they differ in their number of rows.
    pub fn new(tensors: T) -> Result<Self> {
        match tensors.rows() {
            Ok(len) => Ok(Self { tensors: Mutex::new(tensors), len }),
            Err(error) => Err(DataError::Unfit {
                message: format!("no dataset can be made of these tensors: {error}"),
            }
            .into()),
        }
    }

    /// Returns the size of all values in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let mut bytes = 0;
        self.tensors.lock().visit(&mut |tensor| {
            bytes += (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
        });
        bytes
    }

    /// Returns the device of the first tensor.
    #[must_use]
    pub fn device(&self) -> Device {
        let mut device = None;
        self.tensors.lock().visit(&mut |tensor| _ = device.get_or_insert_with(|| tensor.device()));
        device.unwrap_or(Device::Cpu)
    }
}

impl<T> TensorDataset<T>
where
    T: TensorTree<Owned = T> + Send + 'static,
{
    /// Copies the dataset to a device. On a GPU, batches are gathered on the device, and only their indices are sent,
    /// without synchronizing. The loader decides order, shuffling and sharding, so that batches hold the same values on
    /// every device. `Processes::place_dataset` does this if the memory of the GPU suffices.
    ///
    /// ```
    /// use brigade_data::TensorDataset;
    /// use tch::{Device, Tensor};
    ///
    /// let data = TensorDataset::new(Tensor::from_slice(&[1f32, 2.]))?.to_device(Device::Cpu)?;
    /// assert_eq!((data.device(), data.bytes()), (Device::Cpu, 8));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::OutOfMemory`] if the memory of the device is full.
    pub fn to_device(&self, device: Device) -> Result<Self> {
        let tensors = self.tensors.lock().to_device(device)?;
        Ok(Self { tensors: Mutex::new(tensors), len: self.len })
    }

    /// Reads a whole dataset into tensors, on `threads` threads (0: on this thread), so that samples are decoded only
    /// once and can be copied to a GPU. Images should be bytes, which take a quarter of the memory of `f32`.
    ///
    /// Each sample is read as in epoch 0 with seed 0, so that random augmentations of the dataset are fixed: apply them
    /// to the batches instead. All samples must have one shape.
    ///
    /// ```
    /// use brigade_data::{TensorDataset, dataset_from_fn};
    ///
    /// let squares = dataset_from_fn(300, |index, _seed| Ok(([index as u8; 4], index)));
    /// let data = TensorDataset::read_all(squares, 2)?;
    /// assert_eq!((data.len(), data.bytes()), (300, 300 * (4 + 8)));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of the dataset; [`DataError::Unfit`] for samples of several shapes and for a dataset without
    /// samples; [`brigade_torch::ErrorKind::OutOfMemory`] if memory is full.
    pub fn read_all<D>(dataset: D, threads: usize) -> Result<Self>
    where
        D: BatchedDataset<Batch = T> + 'static,
    {
        let len = dataset.num_samples();
        let loader = DataLoader::new(dataset).batch_size(READ_AT_ONCE).seed(0).threads(threads);
        let mut all: Option<T> = None;
        let mut filled = 0;
        for batch in &loader {
            let batch = batch?.into_data();
            let rows = batch.rows()?;
            if all.is_none() {
                all = Some(batch.try_map(&mut |tensor| {
                    let mut shape = tensor.size();
                    shape[0] = len as i64;
                    Tensor::f_empty(shape, (tensor.f_kind()?, tensor.device()))
                })?);
            }
            if let Some(all) = &all {
                fill(all, &batch, filled, rows)?;
            }
            filled += rows;
        }
        match all {
            Some(all) if filled == len => Self::new(all),
            Some(_) => Err(DataError::Unfit {
                message: format!(
                    "a dataset of {} gave {}",
                    counted(len, "sample"),
                    counted(filled, "row")
                ),
            }
            .into()),
            None => Err(DataError::Unfit {
                message: "a dataset without samples has no shape that tensors could have".into(),
            }
            .into()),
        }
    }
}

/// Number of samples that are read at once: few enough that threads end at about the same time, and that they take
/// little memory besides the whole.
const READ_AT_ONCE: usize = 64;

/// Writes a batch into the rows from `start` on.
fn fill<T: TensorTree>(all: &T, batch: &T, start: usize, rows: usize) -> Result<()> {
    let (mut places, mut parts) = (Vec::new(), Vec::new());
    all.visit(&mut |tensor| places.push(tensor));
    batch.visit(&mut |tensor| parts.push(tensor));
    for (place, part) in places.iter().zip(&parts) {
        let (expected, found) = (place.size(), part.size());
        let fits = expected.get(1..) == found.get(1..) && place.f_kind()? == part.f_kind()?;
        if !fits || places.len() != parts.len() || start + rows > expected[0] as usize {
            return Err(DataError::Unfit {
                message: format!(
                    "samples {start} to {} have {:?} of {:?}, the first have {:?} of {:?}: tensors of a whole dataset \
                     need one shape; bring samples to one size before they are read",
                    start + rows,
                    found.get(1..).unwrap_or_default(),
                    part.f_kind()?,
                    expected.get(1..).unwrap_or_default(),
                    place.f_kind()?,
                ),
            }.into());
        }
        place.f_narrow(0, start as i64, rows as i64)?.f_copy_(part)?;
    }
    Ok(())
}

impl<T> TensorDataset<T> {
    /// Returns the number of samples.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if there are no samples.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl<T> BatchedDataset for TensorDataset<T>
where
    T: TensorTree + Send,
    T::Owned: TensorTree + Send + 'static,
{
    type Batch = T::Owned;

    fn num_samples(&self) -> usize {
        self.len
    }

    fn batch(&self, indices: &[usize], _: &BatchContext) -> Result<T::Owned> {
        if let Some(&index) = indices.iter().find(|index| **index >= self.len) {
            return Err(DataError::Index { index, len: self.len }.into());
        }
        let mut handles = Vec::new();
        {
            let tensors = self.tensors.lock();
            tensors.visit(&mut |tensor| handles.push(tensor.shallow_clone()));
        }
        // Copied outside of the lock, so that threads do not wait for each other.
        let mut copied = Vec::with_capacity(handles.len());
        let mut sent = Sent::default();
        for handle in &handles {
            copied.push(select(handle, indices, &mut sent)?);
        }
        let mut copied = copied.into_iter();
        let tensors = self.tensors.lock();
        tensors.try_map(&mut |_| {
            copied.next().ok_or_else(|| {
                TorchError::Internal("a dataset's tensors changed in number".into()).into()
            })
        })
    }
}

/// Returns the rows `indices` of a tensor. Contiguous CPU memory of the usual types is copied on this thread;
/// libtorch's own operator, which may start a team of threads, handles the other types and devices.
fn select(tensor: &Tensor, indices: &[usize], sent: &mut Sent) -> Result<Tensor> {
    match tensor.f_kind()? {
        Kind::Float => rows::<f32>(tensor, indices),
        Kind::Double => rows::<f64>(tensor, indices),
        Kind::Uint8 => rows::<u8>(tensor, indices),
        Kind::Int => rows::<i32>(tensor, indices),
        Kind::Int64 => rows::<i64>(tensor, indices),
        _ => None,
    }
    .unwrap_or_else(|| Ok(tensor.f_index_select(0, sent.on(tensor.device(), indices)?)?))
}

/// A batch's indices as a tensor, on the device of the last tensor that needed them on a device: the tensors of a
/// dataset usually share one device, so that the indices are sent once.
#[derive(Default)]
struct Sent(Option<Tensor>);

impl Sent {
    fn on(&mut self, device: Device, indices: &[usize]) -> Result<&Tensor> {
        let sent = match self.0.take().filter(|sent| sent.device() == device) {
            Some(sent) => sent,
            None => {
                let indices: Vec<i64> = indices.iter().map(|index| *index as i64).collect();
                copy_to_device(&Tensor::f_from_slice(&indices)?, device)?
            }
        };
        Ok(self.0.insert(sent))
    }
}

fn rows<T: Element>(tensor: &Tensor, indices: &[usize]) -> Option<Result<Tensor>> {
    if tensor.requires_grad() || tensor.device() != Device::Cpu {
        return None;
    }
    let values = elements::<T>(tensor).ok()?;
    let mut shape = tensor.size();
    let width: usize = shape[1..].iter().map(|side| *side as usize).product();
    shape[0] = indices.len() as i64;
    let mut out = Vec::with_capacity(indices.len() * width);
    for &index in indices {
        let end = (index + 1) * width;
        (end <= values.len()).then(|| values.append(index * width..end, &mut out))?;
    }
    Some(from_vec(out, &shape))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_copied_for_every_kind_and_layout() {
        let plain = Tensor::arange(12, (Kind::Float, Device::Cpu)).reshape([4, 3]);
        let turned = plain.reshape([3, 4]).transpose(0, 1);
        let half = plain.to_kind(Kind::Half);
        let flags = Tensor::from_slice(&[true, false, true, false]);
        let dataset = TensorDataset::new((plain, vec![turned, half], flags)).unwrap();
        assert_eq!(dataset.len(), 4);
        let (plain, rest, flags) = dataset.batch(&[3, 0, 3], &BatchContext::default()).unwrap();
        let values = |tensor: &Tensor| Vec::<f32>::try_from(tensor.reshape(-1)).unwrap();
        assert_eq!(plain.size(), [3, 3]);
        assert_eq!(values(&plain), [9., 10., 11., 0., 1., 2., 9., 10., 11.]);
        assert_eq!(values(&rest[0]), [3., 7., 11., 0., 4., 8., 3., 7., 11.]);
        assert_eq!(values(&rest[1].to_kind(Kind::Float)), values(&plain));
        assert_eq!(Vec::<bool>::try_from(flags).unwrap(), [false, true, false]);
    }

    #[test]
    fn tensors_that_make_no_dataset_are_refused() {
        let zeros = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu));
        let error = TensorDataset::new((zeros(&[4, 2]), zeros(&[5]))).unwrap_err().to_string();
        assert!(
            error.contains("tensors of shapes [[4, 2], [5]] have no common number of rows"),
            "{error}"
        );
        assert!(TensorDataset::new(zeros(&[])).is_err());
        assert!(TensorDataset::new(Vec::<Tensor>::new()).is_err());
        let dataset = TensorDataset::new(zeros(&[4])).unwrap();
        let error = dataset.batch(&[1, 4], &BatchContext::default()).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(DataError::Index { index: 4, len: 4 })));
    }
}
