//! Layers without parameters, for rows of layers.

use brigade_torch::max_pool2d;
use tch::Tensor;

use crate::Module;

/// `max(x, 0)`, any shape.
///
/// ```no_run
/// use brigade_nn::{Module, Relu, Tensor};
/// assert_eq!(Relu.forward(&Tensor::from_slice(&[-1f32, 2.0])), Tensor::from_slice(&[0f32, 2.0]));
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Relu;

impl Module<&Tensor> for Relu {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Tensor {
        input.relu()
    }
}

/// The largest value of each window: from `[n, c, h, w]` to `[n, c, h', w']` with
/// `h' = ⌊(h + 2·padding − kernel) / stride⌋ + 1`
/// ([torch.nn.MaxPool2d](https://docs.pytorch.org/docs/stable/generated/torch.nn.MaxPool2d.html)).
///
/// ```no_run
/// use brigade_nn::{Kind, MaxPool2d, Module, Tensor};
/// let image = Tensor::arange(16, (Kind::Float, tch::Device::Cpu)).view([1, 1, 4, 4]);
/// let corners = Tensor::from_slice(&[5f32, 7.0, 13.0, 15.0]).view([1, 1, 2, 2]);
/// assert_eq!(MaxPool2d::new(2).forward(&image), corners);
/// ```
#[derive(Debug, Clone, Copy)]
pub struct MaxPool2d {
    /// The window's `[height, width]`.
    pub kernel: [i64; 2],
    /// From one window to the next.
    pub stride: [i64; 2],
    /// Put on each side, never the largest; at most half the kernel.
    pub padding: [i64; 2],
}

impl MaxPool2d {
    /// Square windows that touch: the stride is the kernel.
    #[must_use]
    pub fn new(kernel: i64) -> Self {
        Self { kernel: [kernel; 2], stride: [kernel; 2], padding: [0, 0] }
    }
}

impl Module<&Tensor> for MaxPool2d {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Tensor {
        // tch's operator ends the forward with the message that a model's forward returns as its error.
        max_pool2d(input, self.kernel, self.stride, self.padding).unwrap_or_else(|_| {
            input.max_pool2d(self.kernel, self.stride, self.padding, [1, 1], false)
        })
    }
}

/// From `[n, a, b, …]` to `[n, a·b·…]`.
///
/// ```no_run
/// use brigade_nn::{Flatten, Kind, Module, Tensor};
/// let maps = Tensor::zeros([8, 64, 7, 7], (Kind::Float, tch::Device::Cpu));
/// assert_eq!(Flatten.forward(&maps).size(), [8, 3136]);
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Flatten;

impl Module<&Tensor> for Flatten {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Tensor {
        input.flatten(1, -1)
    }
}
