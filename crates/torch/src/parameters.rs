//! Named tensors, and the trait of objects with parameters.

use tch::Tensor;
use tch::nn::VarStore;

use crate::error::Error;

/// A tensor with its full name, such as `module1.0.weight`.
///
/// The tensor is the model's own, not a copy: changing it in place changes the model.
#[derive(Debug)]
pub struct NamedTensor {
    /// Name of the tensor, as in PyTorch.
    pub name: String,
    /// Handle of the tensor.
    pub tensor: Tensor,
}

/// An object with parameters to train: a model, a list of named tensors, a [`VarStore`] of tch.
///
/// ```
/// use brigade_torch::{NamedTensor, Trainable};
/// use tch::{Kind, Tensor};
///
/// let weight = Tensor::zeros([2, 2], (Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
/// let frozen = Tensor::zeros([2], (Kind::Float, tch::Device::Cpu));
/// let named = [("weight", &weight), ("bias", &frozen)]
///     .map(|(name, tensor)| NamedTensor { name: name.to_owned(), tensor: tensor.shallow_clone() });
/// let trained = named.trainable_parameters();
/// assert_eq!((trained.len(), trained[0].name.as_str()), (1, "weight"));
/// ```
pub trait Trainable {
    /// Returns every parameter that is not frozen, once, in the same order on every rank.
    fn trainable_parameters(&self) -> Vec<NamedTensor>;

    /// Returns an error with the reason if nothing can be trained, such as for a model that is for inference only.
    /// Optimizers call it. Defaults to `Ok`.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`].
    fn check_trainable(&self) -> Result<(), Error> {
        Ok(())
    }
}

impl Trainable for [NamedTensor] {
    fn trainable_parameters(&self) -> Vec<NamedTensor> {
        let trained = self.iter().filter(|parameter| parameter.tensor.requires_grad());
        trained
            .map(|NamedTensor { name, tensor }| NamedTensor {
                name: name.clone(),
                tensor: tensor.shallow_clone(),
            })
            .collect()
    }
}

impl<const N: usize> Trainable for [NamedTensor; N] {
    fn trainable_parameters(&self) -> Vec<NamedTensor> {
        self.as_slice().trainable_parameters()
    }
}

impl Trainable for Vec<NamedTensor> {
    fn trainable_parameters(&self) -> Vec<NamedTensor> {
        self.as_slice().trainable_parameters()
    }
}

/// Returns the parameters in the order of their names, because a `VarStore` has no order.
impl Trainable for VarStore {
    fn trainable_parameters(&self) -> Vec<NamedTensor> {
        let variables = self.variables().into_iter();
        let mut named: Vec<NamedTensor> = variables
            .filter(|(_, tensor)| tensor.requires_grad())
            .map(|(name, tensor)| NamedTensor { name, tensor })
            .collect();
        named.sort_by(|a, b| a.name.cmp(&b.name));
        named
    }
}
