//! Kernels that brigade-torch compiles on a GPU, compiled for the CPU.

use std::{array, ptr};

use tch::Tensor;

use crate::error::FakeError;
use crate::ffi;

/// Batch normalisation in training, with the inputs of its backward pass. The tensors are on the CPU: `input`,
/// `shortcut` and `upstream` are `[n, channels, h, w]` of bfloat16 or float16 in channels_last, the rest float32
/// `[channels]`.
#[derive(Debug)]
pub struct NormRelu<'a> {
    /// Input of the normalisation.
    pub input: &'a Tensor,
    /// Residual branch that is added before ReLU, if any.
    pub shortcut: Option<&'a Tensor>,
    /// Weight that multiplies the normalised values.
    pub weight: &'a Tensor,
    /// Bias that is added after the weight.
    pub bias: &'a Tensor,
    /// Running mean, which is updated in place.
    pub running_mean: &'a Tensor,
    /// Running variance, which is updated in place.
    pub running_var: &'a Tensor,
    /// Gradient of the output.
    pub upstream: &'a Tensor,
    /// Weight of this batch in the running statistics.
    pub momentum: f64,
    /// Constant that is added to the variance.
    pub eps: f64,
    /// `true` for a ReLU, which a shortcut requires.
    pub relu: bool,
}

impl NormRelu<'_> {
    /// Runs forward and backward. Returns the output, and the gradients of input, weight, bias and (if there is one)
    /// shortcut.
    ///
    /// # Errors
    /// Fails if the kernels do not support the input.
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
