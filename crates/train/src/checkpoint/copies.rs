//! The memory of a save's copy, kept for the next save.

use std::sync::{Mutex, PoisonError};

use brigade_torch::{Device, Tensor};

use crate::error::Result;

/// Tensors that no save uses now. The pages of new memory cost more than the copy into them: a run that
/// saves again and again copies into the same ones.
#[derive(Default)]
pub(super) struct Copies(Mutex<Vec<Tensor>>);

impl Copies {
    /// A copy with memory of its own, that of an older copy where one fits.
    pub(super) fn copy(&self, tensor: &Tensor) -> Result<Tensor> {
        let (kind, size) = (tensor.f_kind()?, tensor.size());
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |copy: &Tensor| copy.f_kind().is_ok_and(|k| k == kind) && copy.size() == size;
        let found = kept.iter().position(fits).map(|place| kept.swap_remove(place));
        drop(kept);
        let mut copy = match found {
            Some(copy) => copy,
            None => Tensor::f_empty(&size[..], (kind, Device::Cpu))?,
        };
        tch::no_grad(|| copy.f_copy_(tensor))?;
        Ok(copy)
    }

    /// Takes back what was written.
    pub(super) fn keep(&self, copies: impl IntoIterator<Item = Tensor>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(copies);
    }

    /// Frees what is not in use.
    pub(super) fn release(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// How much it keeps.
    pub(super) fn bytes(&self) -> usize {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes =
            |copy: &Tensor| copy.numel() * copy.f_kind().map_or(0, |kind| kind.elt_size_in_bytes());
        kept.iter().map(bytes).sum()
    }
}
