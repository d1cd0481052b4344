//! Buckets: gradients that a reducer sends in one message.

use tch::{Kind, Tensor};

use crate::error::Error;

/// The gradients of some parameters in one contiguous tensor: the unit that a hook averages over the ranks.
#[derive(Debug)]
pub struct Bucket {
    /// Number of the bucket, in the order of reduction.
    pub index: usize,
    /// `true` if this is the last bucket of the backward.
    pub is_last: bool,
    /// Values of all gradients, in one dimension. A communication hook must write its result into this tensor.
    pub buffer: Tensor,
    /// Gradients as views of the buffer, in its order.
    pub gradients: Vec<Tensor>,
    /// Index of each gradient's parameter in the list that the reducer was made with. Unlike the bucket's number it
    /// stays the same when buckets are rebuilt after the first backward.
    pub parameters: Vec<usize>,
}

impl Bucket {
    /// Returns a copy of the bucket with its buffer and gradients converted to `kind`.
    ///
    /// # Errors
    /// [`crate::TorchError::Tensor`] if memory runs out.
    pub fn to_kind(&self, kind: Kind) -> Result<Self, Error> {
        let buffer = self.buffer.f_to_kind(kind)?;
        let mut start = 0;
        let gradients = self
            .gradients
            .iter()
            .map(|gradient| {
                let length = gradient.numel() as i64;
                let view = buffer.f_narrow(0, start, length)?;
                start += length;
                // The reducer's gradients are contiguous views, whatever the layout of their parameters.
                Ok(view.f_view(&gradient.size()[..])?)
            })
            .collect::<Result<_, Error>>()?;
        let parameters = self.parameters.clone();
        Ok(Self { index: self.index, is_last: self.is_last, buffer, gradients, parameters })
    }
}
