//! A convolution followed by a batch normalisation.

use std::borrow::Borrow;

use brigade_nn::{BatchNorm2d, Conv2d, Conv2dOptions, MaxPool2d, Module, ParamPath};
use brigade_torch::{Activation, Result};
use tch::Tensor;

/// Convolution followed by a normalisation. It has no bias, which the normalisation would cancel.
#[derive(Debug)]
pub(crate) struct ConvNorm {
    pub(crate) conv: Conv2d,
    pub(crate) norm: BatchNorm2d,
}

impl ConvNorm {
    pub(crate) fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.norm.forward(&self.conv.forward(input)?)
    }

    /// Computes convolution, normalisation and activation; the shortcut is added before the activation.
    pub(crate) fn forward_activated(
        &self,
        input: &Tensor,
        shortcut: Option<&Tensor>,
        activation: Activation,
    ) -> Result<Tensor> {
        let maps = self.conv.forward(input)?;
        if activation == Activation::Relu {
            return self.norm.forward_relu(&maps, shortcut);
        }
        let maps = self.norm.forward(&maps)?;
        match shortcut {
            Some(shortcut) => activation.apply(&maps.f_add(shortcut)?),
            None => activation.apply(&maps),
        }
    }

    /// Computes convolution, normalisation, activation and [`MaxPool2d::STEM`].
    pub(crate) fn forward_pooled(&self, input: &Tensor, activation: Activation) -> Result<Tensor> {
        if activation == Activation::Relu {
            return self.norm.forward_relu_max_pool(&self.conv.forward(input)?);
        }
        MaxPool2d::STEM.forward(&self.forward_activated(input, None, activation)?)
    }
}

/// Creates a convolution with a square kernel, the padding that keeps the size at stride 1, and no bias.
pub(crate) fn conv<'a>(
    path: impl Borrow<ParamPath<'a>>,
    [inputs, outputs]: [i64; 2],
    kernel: i64,
    stride: i64,
    groups: i64,
) -> Conv2d {
    let options = Conv2dOptions {
        stride: [stride; 2],
        padding: [kernel / 2; 2],
        groups,
        bias: false,
        ..Conv2dOptions::default()
    };
    Conv2d::new(path, inputs, outputs, [kernel; 2], options)
}

/// Averages 2 x 2 pixels at stride 2. At odd sizes the last row and column are means of fewer pixels.
pub(crate) fn average_halves(input: &Tensor) -> Result<Tensor> {
    Ok(input.f_avg_pool2d([2, 2], [2, 2], [0, 0], true, false, None::<i64>)?)
}
