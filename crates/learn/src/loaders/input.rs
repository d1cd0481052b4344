//! Contents of the loaders' batches: the model's input, and the target.

use tch::Tensor;

/// The argument of a model's forward: a tensor, or a tuple of two or three.
pub trait ModelInput: Sized + 'static {
    /// Borrowed form of the input: the argument of a model's forward.
    type Ref<'a>;

    /// Returns the tensors of the input, in order.
    fn into_tensors(self) -> Vec<Tensor>;

    /// Returns the borrowed input made of these tensors. `None` if their number is wrong.
    fn borrowed(tensors: &[Tensor]) -> Option<Self::Ref<'_>>;
}

impl ModelInput for Tensor {
    type Ref<'a> = &'a Self;

    fn into_tensors(self) -> Vec<Tensor> {
        vec![self]
    }

    fn borrowed(tensors: &[Tensor]) -> Option<&Self> {
        match tensors {
            [tensor] => Some(tensor),
            _ => None,
        }
    }
}

impl ModelInput for (Tensor, Tensor) {
    type Ref<'a> = (&'a Tensor, &'a Tensor);

    fn into_tensors(self) -> Vec<Tensor> {
        vec![self.0, self.1]
    }

    fn borrowed(tensors: &[Tensor]) -> Option<Self::Ref<'_>> {
        match tensors {
            [first, second] => Some((first, second)),
            _ => None,
        }
    }
}

impl ModelInput for (Tensor, Tensor, Tensor) {
    type Ref<'a> = (&'a Tensor, &'a Tensor, &'a Tensor);

    fn into_tensors(self) -> Vec<Tensor> {
        vec![self.0, self.1, self.2]
    }

    fn borrowed(tensors: &[Tensor]) -> Option<Self::Ref<'_>> {
        match tensors {
            [first, second, third] => Some((first, second, third)),
            _ => None,
        }
    }
}

/// The target of a batch: a tensor, or an `Option` of one, which is `None` where a model only predicts.
pub trait Target: Sized + 'static {
    /// Returns the tensor of the target.
    fn into_target(self) -> Option<Tensor>;
}

impl Target for Tensor {
    fn into_target(self) -> Option<Tensor> {
        Some(self)
    }
}

impl Target for Option<Tensor> {
    fn into_target(self) -> Option<Tensor> {
        self
    }
}

/// A batch without its Rust type, as callbacks see it.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) inputs: Vec<Tensor>,
    pub(crate) target: Option<Tensor>,
}
