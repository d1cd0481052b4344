//! Pooling.

use brigade_torch::{Result, max_pool2d};
use tch::{TchError, Tensor};

use crate::Module;
use crate::error::ModelError;

/// Max pooling: the largest value of each window, from `[n, c, h, w]` to `[n, c, h', w']` with `h' = ⌊(h + 2·padding −
/// kernel) / stride⌋ + 1`
/// ([torch.nn.MaxPool2d](https://docs.pytorch.org/docs/stable/generated/torch.nn.MaxPool2d.html)).
///
/// ```
/// use brigade_nn::{MaxPool2d, Module};
/// use tch::{Kind, Tensor};
/// let image = Tensor::arange(16, (Kind::Float, tch::Device::Cpu)).view([1, 1, 4, 4]);
/// let corners = Tensor::from_slice(&[5f32, 7.0, 13.0, 15.0]).view([1, 1, 2, 2]);
/// assert_eq!(MaxPool2d::new(2).forward(&image)?, corners);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct MaxPool2d {
    /// Size `[height, width]` of the window.
    pub kernel: [i64; 2],
    /// Stride `[height, width]` from one window to the next.
    pub stride: [i64; 2],
    /// Padding `[height, width]` on each side, whose values are never the largest. At most half the kernel.
    pub padding: [i64; 2],
}

impl MaxPool2d {
    /// Max pooling at the end of the stem of a residual network: windows of 3 x 3, a stride of 2 and a padding of 1.
    ///
    /// ```
    /// use brigade_nn::{MaxPool2d, Module};
    /// use tch::{Kind, Tensor};
    /// let maps = Tensor::zeros([2, 64, 112, 112], (Kind::Float, tch::Device::Cpu));
    /// assert_eq!(MaxPool2d::STEM.forward(&maps)?.size(), [2, 64, 56, 56]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    pub const STEM: Self = Self { kernel: [3, 3], stride: [2, 2], padding: [1, 1] };

    /// Creates a pooling with adjacent square windows: the stride is the kernel size.
    #[must_use]
    pub fn new(kernel: i64) -> Self {
        Self { kernel: [kernel; 2], stride: [kernel; 2], padding: [0, 0] }
    }
}

impl Module<&Tensor> for MaxPool2d {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        Ok(max_pool2d(input, self.kernel, self.stride, self.padding).map_err(|error| {
            ModelError::layer("MaxPool2d", input, TchError::Torch(error.to_string()))
        })?)
    }
}
