//! Buckets of gradients: what a reducer sends in one message.

use tch::{Kind, Tensor};

use crate::error::Error;

/// The gradients of some parameters, in one piece of memory: what a hook averages over the ranks.
#[derive(Debug)]
pub struct Bucket {
    /// The bucket's number, in the order of reduction.
    pub index: usize,
    /// Whether it is the last one of this backward.
    pub is_last: bool,
    /// All values, in one dimension. What a hook leaves here is the result.
    pub buffer: Tensor,
    /// The gradients, as views of the buffer, one after another in its order.
    pub gradients: Vec<Tensor>,
    /// The place of each gradient's parameter in the list that the reducer was made with. Unlike the
    /// bucket's number it stays the same when buckets are put together anew after the first backward.
    pub parameters: Vec<usize>,
}

impl Bucket {
    /// The same bucket in another type: a copy.
    ///
    /// # Errors
    /// [`crate::TorchError::Tensor`] when memory runs out.
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
                // The reducer gives its gradients contiguous views, whatever their parameters' layout.
                Ok(view.f_view(&gradient.size()[..])?)
            })
            .collect::<Result<_, Error>>()?;
        let parameters = self.parameters.clone();
        Ok(Self { index: self.index, is_last: self.is_last, buffer, gradients, parameters })
    }
}
