//! The kernels that brigade-torch compiles on a GPU, compiled for the CPU.

use std::{array, ptr};

use tch::Tensor;

use crate::error::FakeError;
use crate::ffi;

/// A batch normalisation in training, and what its backward is given. The tensors are the CPU's: `input`, `shortcut`
/// and `upstream` `[n, channels, h, w]` of bfloat16 or float16 in channels_last, the rest float32 `[channels]`.
#[derive(Debug)]
pub struct NormRelu<'a> {
    /// What is normalised.
    pub input: &'a Tensor,
    /// What is added before ReLU.
    pub shortcut: Option<&'a Tensor>,
    /// What the normalised values are multiplied with.
    pub weight: &'a Tensor,
    /// What is added then.
    pub bias: &'a Tensor,
    /// Changed in place.
    pub running_mean: &'a Tensor,
    /// Changed in place.
    pub running_var: &'a Tensor,
    /// The gradient of the output.
    pub upstream: &'a Tensor,
    /// The weight of this batch in the running statistics.
    pub momentum: f64,
    /// Added to the variance.
    pub eps: f64,
    /// With ReLU, which a shortcut demands.
    pub relu: bool,
}

impl NormRelu<'_> {
    /// Runs forward and backward: the output, and the gradients of input, weight, bias and (where there is one)
    /// shortcut.
    ///
    /// # Errors
    /// Where the kernels do not take the input.
    pub fn run(&self) -> Result<Vec<Tensor>, FakeError> {
        let handle = |tensor: &Tensor| tensor.as_ptr().cast();
        let inputs = [
            handle(self.input),
            self.shortcut.map_or(ptr::null(), handle),
            handle(self.weight),
            handle(self.bias),
            handle(self.running_mean),
            handle(self.running_var),
            handle(self.upstream),
        ];
        let mut outputs: [Tensor; 5] = array::from_fn(|_| Tensor::new());
        let places = outputs.each_mut().map(|tensor| tensor.as_mut_ptr().cast());
        // SAFETY: all are handles of tensors that live here, as many as the function takes, and it keeps none.
        let message = unsafe {
            ffi::fake_gpu_norm_relu(
                inputs.as_ptr(),
                places.as_ptr(),
                self.momentum,
                self.eps,
                self.relu,
            )
        };
        ffi::result(message)?;
        Ok(outputs.into_iter().filter(Tensor::defined).collect())
    }
}
