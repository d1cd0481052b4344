//! The memory of a save's copy, kept for the next save.

use std::collections::HashMap;

use brigade_torch::{Result, copy_to_host, is_pinned};
use parking_lot::Mutex;
use tch::{Device, Kind, Tensor};

/// Tensors that no save currently uses: pinned ones for copies of GPU tensors. New memory pages cost more than the copy
/// into them, so repeated saves reuse the same tensors.
#[derive(Default)]
pub(super) struct BufferPool(Mutex<HashMap<Form, Vec<Tensor>>>);

/// Kind and shape of a buffer, and whether it is pinned.
type Form = (Kind, Vec<i64>, bool);

impl BufferPool {
    /// Returns a copy of a tensor in memory of its own, reusing a free buffer that fits. The copy of a GPU tensor is
    /// complete once the device has been synchronised.
    pub(super) fn copy(&self, tensor: &Tensor) -> Result<Tensor> {
        let on_gpu = tensor.device() != Device::Cpu;
        let form = (tensor.f_kind()?, tensor.size(), on_gpu);
        let mut kept = self.0.lock();
        let found = kept.get_mut(&form).and_then(Vec::pop);
        drop(kept);
        if on_gpu {
            return copy_to_host(tensor, found.as_ref());
        }
        let mut copy = match found {
            Some(copy) => copy,
            None => Tensor::f_empty(&form.1[..], (form.0, Device::Cpu))?,
        };
        tch::no_grad(|| copy.f_copy_(tensor))?;
        Ok(copy)
    }

    /// Returns written buffers to the pool.
    pub(super) fn keep(&self, copies: impl IntoIterator<Item = Tensor>) {
        let mut kept = self.0.lock();
        for copy in copies {
            // A buffer whose state cannot be read is freed.
            if let Ok(form) = form(&copy) {
                kept.entry(form).or_default().push(copy);
            }
        }
    }

    /// Frees the buffers that are not in use, and returns their size in bytes.
    pub(super) fn release(&self) -> usize {
        let mut kept = self.0.lock();
        let freed = std::mem::take(&mut *kept);
        drop(kept);
        let bytes = |(kind, size, _): &Form, count: usize| {
            let elements: i64 = size.iter().product();
            kind.elt_size_in_bytes() * elements.unsigned_abs() as usize * count
        };
        freed.iter().map(|(form, copies)| bytes(form, copies.len())).sum()
    }
}

fn form(tensor: &Tensor) -> Result<Form> {
    Ok((tensor.f_kind()?, tensor.size(), is_pinned(tensor)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_copy_lies_where_the_first_one_lay() {
        let copies = BufferPool::default();
        let values = Tensor::from_slice(&[1f32, 2.0, 3.0]);
        let first = copies.copy(&values).unwrap();
        let place = first.data_ptr();
        assert_ne!(place, values.data_ptr());
        copies.keep([first]);
        let other_form = copies.copy(&Tensor::from_slice(&[1f64, 2.0, 3.0])).unwrap();
        assert_ne!(other_form.data_ptr(), place);
        let second = copies.copy(&(values * 2.0)).unwrap();
        assert_eq!(second.data_ptr(), place);
        assert_eq!(Vec::<f32>::try_from(&second).unwrap(), [2.0, 4.0, 6.0]);
        assert_eq!(copies.release(), 0);
        copies.keep([second, other_form]);
        assert_eq!(copies.release(), 3 * 4 + 3 * 8);
        assert_eq!(copies.release(), 0);
    }
}
