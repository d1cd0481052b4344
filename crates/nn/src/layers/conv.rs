//! Two-dimensional convolution.

use std::borrow::Borrow;

use brigade_torch::{Result, channels_last, convolution2d, is_channels_last};
use tch::Tensor;

use crate::init::fan_in;
use crate::layer_context::LayerContext;
use crate::{Init, Module, ParamPath};

/// Two-dimensional convolution (cross-correlation), from `[n, in, h, w]` to `[n, out, h', w']` with `h' = ⌊(h +
/// 2·padding − dilation·(kernel − 1) − 1) / stride⌋ + 1`, and `w'` likewise.
///
/// Parameters: `weight` `[out, in / groups, kernel…]` and `bias` `[out]`, both uniform in
/// `±1/√(in / groups · kernel…)`
/// ([torch.nn.Conv2d](https://docs.pytorch.org/docs/stable/generated/torch.nn.Conv2d.html)).
///
/// ```
/// use brigade_nn::{Conv2d, Conv2dOptions, Model};
/// use tch::{Kind, Tensor};
///
/// let options = Conv2dOptions { padding: [2, 2], ..Conv2dOptions::default() };
/// let model = Model::new(|p| Conv2d::new(p, 1, 32, [5, 5], options))?;
/// let images = Tensor::zeros([8, 1, 28, 28], (Kind::Float, model.device()));
/// assert_eq!(model.forward(&images)?.size(), [8, 32, 28, 28]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct Conv2d {
    weight: Tensor,
    bias: Option<Tensor>,
    options: Conv2dOptions,
    context: LayerContext,
}

/// Options of [`Conv2d`]; pairs are `[vertical, horizontal]`.
#[derive(Debug, Clone, Copy)]
pub struct Conv2dOptions {
    /// Stride `[height, width]` of the convolution. Defaults to 1.
    pub stride: [i64; 2],
    /// Zero padding `[height, width]` on each side. Defaults to 0.
    pub padding: [i64; 2],
    /// Dilation: spacing `[height, width]` between elements of the kernel. Defaults to 1.
    pub dilation: [i64; 2],
    /// Number of channel groups that are convolved separately, a divisor of `in` and `out`. Defaults to 1.
    pub groups: i64,
    /// Adds a bias per output channel. Defaults to `true`.
    pub bias: bool,
}

impl Default for Conv2dOptions {
    fn default() -> Self {
        Self { stride: [1, 1], padding: [0, 0], dilation: [1, 1], groups: 1, bias: true }
    }
}

impl Conv2d {
    /// Registers the parameters at the path: `weight` `[outputs, inputs / groups, height, width]` and, if the options
    /// enable it, `bias` `[outputs]`. `kernel` is `[height, width]`.
    pub fn new<'a>(
        path: impl Borrow<ParamPath<'a>>,
        inputs: i64,
        outputs: i64,
        kernel: [i64; 2],
        options: Conv2dOptions,
    ) -> Self {
        let path = path.borrow();
        let Conv2dOptions { stride, padding, dilation, groups, bias } = options;
        if groups < 1 || inputs % groups != 0 || outputs % groups != 0 {
            path.reject(format_args!(
                "{groups} groups do not divide {inputs} input and {outputs} output channels"
            ));
        }
        if kernel.iter().chain(&stride).chain(&dilation).any(|&size| size < 1)
            || padding.iter().any(|&size| size < 0)
        {
            path.reject(format_args!(
                "kernel {kernel:?}, stride {stride:?} and dilation {dilation:?} must be positive, \
                 padding {padding:?} not negative"
            ));
        }
        let shape = [outputs, inputs / groups.max(1), kernel[0], kernel[1]];
        Self {
            weight: path.parameter("weight", &shape, Init::KaimingUniform),
            bias: bias
                .then(|| path.parameter("bias", &[outputs], Init::fan_in_bias(fan_in(&shape)))),
            options,
            context: path.layer(),
        }
    }

    /// Returns the weight `[out, in / groups, kernel…]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the bias `[out]`, if the layer has one.
    #[must_use]
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Conv2d {
    /// Converts the input to the weight's memory format, which the kernels would otherwise do in the forward and again
    /// in the backward.
    fn in_the_weights_order(&self, input: &Tensor) -> Tensor {
        let follows = is_channels_last(&self.weight).unwrap_or(false) && input.dim() == 4;
        match follows.then(|| channels_last(input)) {
            Some(Ok(converted)) => converted,
            // Slower, but with the same values.
            _ => input.shallow_clone(),
        }
    }
}

impl Module<&Tensor> for Conv2d {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let Conv2dOptions { stride, padding, dilation, groups, .. } = self.options;
        self.context.weights.run(input, |input| {
            let input = &self.in_the_weights_order(input);
            let (weight, bias) = (&self.weight, self.bias.as_ref());
            let output = convolution2d(input, weight, bias, stride, padding, dilation, groups);
            self.context.finish_border(output, input)
        })
    }
}
