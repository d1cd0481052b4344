//! Tensors in memory as a dataset.

use std::sync::{Mutex, PoisonError};

use brigade_torch::{Device, Element, Kind, Tensor, TensorTree, elements, from_vec};

use crate::{BatchContext, BatchedDataset, DataError};

/// Tensors whose first dimension counts the samples, as torch's `TensorDataset`: one tensor, or a
/// tuple, list or map of them. A batch is the same with the rows that were asked for, copied.
///
/// ```no_run
/// use brigade_data::{DataLoader, TensorDataset};
/// use tch::{Device, Kind, Tensor};
///
/// let x = Tensor::randn([1000, 8], (Kind::Float, Device::Cpu));
/// let y = x.sum_dim_intlist(-1, false, Kind::Float);
/// let loader = DataLoader::new(TensorDataset::new((x, y))?).batch_size(32).shuffle(true);
/// # Ok::<(), brigade_data::DataError>(())
/// ```
#[derive(Debug)]
pub struct TensorDataset<T> {
    // tch's Tensor may be sent but not shared; the lock is held only while handles are cloned.
    tensors: Mutex<T>,
    len: usize,
}

impl<T: TensorTree + Send> TensorDataset<T> {
    /// Takes over the tensors.
    ///
    /// # Errors
    /// When there is no tensor, one has no dimension, or they differ in their number of rows.
    pub fn new(tensors: T) -> Result<Self, DataError> {
        match tensors.rows() {
            Ok(len) => Ok(Self { tensors: Mutex::new(tensors), len }),
            Err(error) => Err(DataError::Unfit {
                message: format!("no dataset can be made of these tensors: {error}"),
            }),
        }
    }
}

impl<T> TensorDataset<T> {
    /// Returns the number of samples.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no samples.
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

    fn batch(&self, indices: &[usize], _: &BatchContext) -> Result<T::Owned, DataError> {
        if let Some(&index) = indices.iter().find(|index| **index >= self.len) {
            return Err(DataError::Index { index, len: self.len });
        }
        let mut handles = Vec::new();
        {
            let tensors = self.tensors.lock().unwrap_or_else(PoisonError::into_inner);
            tensors.visit(&mut |tensor| handles.push(tensor.shallow_clone()));
        }
        // Copied outside the lock, so that threads do not wait for each other.
        let mut copied = Vec::with_capacity(handles.len());
        for handle in &handles {
            copied.push(select(handle, indices)?);
        }
        let mut copied = copied.into_iter();
        let tensors = self.tensors.lock().unwrap_or_else(PoisonError::into_inner);
        tensors.try_map(&mut |_| {
            copied.next().ok_or_else(|| DataError::other("a dataset's tensors changed in number"))
        })
    }
}

/// The rows `indices` of a tensor. Plain memory is copied here, on this thread; libtorch's own
/// operator, which may start a team of threads, serves the other kinds and devices.
fn select(tensor: &Tensor, indices: &[usize]) -> Result<Tensor, DataError> {
    match tensor.f_kind()? {
        Kind::Float => rows::<f32>(tensor, indices),
        Kind::Double => rows::<f64>(tensor, indices),
        Kind::Uint8 => rows::<u8>(tensor, indices),
        Kind::Int => rows::<i32>(tensor, indices),
        Kind::Int64 => rows::<i64>(tensor, indices),
        _ => None,
    }
    .unwrap_or_else(|| {
        let indices: Vec<i64> = indices.iter().map(|index| *index as i64).collect();
        let indices = Tensor::f_from_slice(&indices)?.f_to_device(tensor.device())?;
        Ok(tensor.f_index_select(0, &indices)?)
    })
}

fn rows<T: Element>(tensor: &Tensor, indices: &[usize]) -> Option<Result<Tensor, DataError>> {
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
    Some(from_vec(out, &shape).map_err(Into::into))
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
        assert!(matches!(error, DataError::Index { index: 4, len: 4 }));
    }
}
