//! Identity of the tensor behind a handle.

use tch::Tensor;

use crate::bridge::{borrow, ffi};

/// The identity of a tensor, which all its handles share. Tensors with equal values, views and detached handles have
/// other identities, even with the same memory.
///
/// A tensor without memory, such as a parameter of a sharded model, has an identity, too, and keeps it when its data
/// are replaced (`set_data`, [`resize`](Tensor::resize)). Another tensor may get the same identity after the last
/// handle is dropped.
///
/// ```
/// use brigade_torch::TensorId;
/// use tch::{Kind, Tensor};
///
/// let weight = Tensor::from(3.0);
/// assert_eq!(TensorId::of(&weight), TensorId::of(&weight.shallow_clone()));
/// assert_ne!(TensorId::of(&weight), TensorId::of(&weight.detach()));
/// let empty = || Tensor::zeros([0], (Kind::Float, tch::Device::Cpu));
/// assert_ne!(TensorId::of(&empty()), TensorId::of(&weight));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorId(usize);

impl TensorId {
    /// Returns the identity of the tensor behind this handle.
    #[must_use]
    pub fn of(tensor: &Tensor) -> Self {
        Self(ffi::tensor_identity(borrow(tensor)))
    }
}
