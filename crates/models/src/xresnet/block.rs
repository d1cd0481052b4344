//! The blocks of fastai's residual networks (XResNet).

use brigade_nn::{BatchNorm2d, Conv2d, Conv2dOptions, Init, Module, ParamPath, Training, Unit};
use brigade_torch::{Activation, Result, residual_inputs};
use tch::{Device, Kind, Tensor};

use super::{BlockWidth, XResNetOptions};
use crate::conv_norm::{ConvNorm, average_halves, conv};
use crate::init::{Redraw, redraw};

/// Options that differ from block to block.
pub(super) struct Shape {
    pub(super) inputs: i64,
    /// Number of channels of the stage. The block's output has `expansion` times as many.
    pub(super) channels: i64,
    pub(super) stride: i64,
    pub(super) attends: bool,
}

#[derive(Debug)]
pub(super) struct Block {
    pub(super) unit: Unit,
    body: Vec<ConvNorm>,
    squeeze: Option<SqueezeExcitation>,
    attention: Option<SimpleSelfAttention>,
    shortcut: Option<ConvNorm>,
    average: bool,
    activation: Activation,
}

impl Block {
    pub(super) fn new(path: &ParamPath<'_>, shape: &Shape, options: &XResNetOptions) -> Self {
        let &Shape { inputs, channels, stride, attends } = shape;
        let XResNetOptions { expansion, groups, .. } = *options;
        let outputs = channels * expansion;
        let (width1, width2) = match options.width {
            BlockWidth::Stage => (channels, channels),
            BlockWidth::Squeeze => (channels * 2, outputs),
            BlockWidth::Grouped { base } => {
                let width = (channels * base).div_euclid(64) * groups;
                (width, width)
            }
        };
        let inner = path / "convpath";
        let body = if expansion == 1 {
            vec![
                conv_norm(&(&inner / 0), [inputs, width2], 3, stride, groups),
                conv_norm(&(&inner / 1), [width2, outputs], 3, 1, 1),
            ]
        } else {
            vec![
                conv_norm(&(&inner / 0), [inputs, width1], 1, 1, 1),
                conv_norm(&(&inner / 1), [width1, width2], 3, stride, groups),
                conv_norm(&(&inner / 2), [width2, outputs], 1, 1, 1),
            ]
        };
        let mut next = body.len();
        let squeeze = options.reduction.map(|reduction| {
            next += 1;
            let squeeze = &inner / (next - 1);
            SqueezeExcitation::new(&squeeze, outputs, reduction, options.activation)
        });
        let attention =
            attends.then(|| SimpleSelfAttention::new(&(&inner / next), outputs, options.symmetric));
        let average = stride != 1;
        let shortcut = (inputs != outputs).then(|| {
            // The pooling before it has a number.
            let index = usize::from(average);
            conv_norm(&(path / "idpath" / index), [inputs, outputs], 1, 1, 1)
        });
        let (unit, activation) = (path.unit(), options.activation);
        Self { unit, body, squeeze, attention, shortcut, average, activation }
    }

    /// Draws the weights as `init_cnn` does: the last normalisation starts at 0.
    pub(super) fn redraw(&self, path: &ParamPath<'_>) {
        let draw = |conv: &Conv2d| redraw(path, conv.weight(), Redraw::KaimingFanIn);
        self.body.iter().for_each(|layer| draw(&layer.conv));
        if let Some(squeeze) = &self.squeeze {
            for conv in [&squeeze.reduce, &squeeze.expand] {
                draw(conv);
                if let Some(bias) = conv.bias() {
                    redraw(path, bias, Redraw::Constant(0.0));
                }
            }
        }
        if let Some(layer) = &self.shortcut {
            draw(&layer.conv);
        }
        if let Some(weight) = self.body.last().and_then(|layer| layer.norm.weight()) {
            redraw(path, weight, Redraw::Constant(0.0));
        }
    }

    pub(super) fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let (mut maps, input) = residual_inputs(input)?;
        let mut shortcut = if self.average { average_halves(&input)? } else { input };
        if let Some(layer) = &self.shortcut {
            shortcut = layer.forward(&shortcut)?;
        }
        let Some((last, first)) = self.body.split_last() else { return Ok(shortcut) };
        for layer in first {
            maps = layer.forward_activated(&maps, None, self.activation)?;
        }
        if self.squeeze.is_none() && self.attention.is_none() {
            return last.forward_activated(&maps, Some(&shortcut), self.activation);
        }
        maps = last.forward(&maps)?;
        if let Some(squeeze) = &self.squeeze {
            maps = squeeze.forward(&maps)?;
        }
        if let Some(attention) = &self.attention {
            maps = attention.forward(&maps)?;
        }
        self.activation.apply(&maps.f_add(&shortcut)?)
    }
}

/// Squeeze and excitation: weights channels by a function of their means (Hu et al., 2017).
#[derive(Debug)]
struct SqueezeExcitation {
    reduce: Conv2d,
    expand: Conv2d,
    activation: Activation,
}

impl SqueezeExcitation {
    fn new(path: &ParamPath<'_>, channels: i64, reduction: i64, activation: Activation) -> Self {
        if reduction < 1 {
            path.reject(format_args!("the reduction {reduction} is not positive"));
        }
        // fastai rounds up to a multiple of 8 after the division by the reduction.
        let inner = (channels / reduction.max(1) + 7) / 8 * 8;
        let options = Conv2dOptions::default();
        Self {
            reduce: Conv2d::new(path / "layers" / 1 / 0, channels, inner, [1, 1], options),
            expand: Conv2d::new(path / "layers" / 2 / 0, inner, channels, [1, 1], options),
            activation,
        }
    }

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let means = input.f_adaptive_avg_pool2d([1, 1])?;
        let inner = self.activation.apply(&self.reduce.forward(&means)?)?;
        Ok(input.f_mul(&self.expand.forward(&inner)?.f_sigmoid()?)?)
    }
}

/// Simple self-attention: `γ · (X Xᵀ)(W X) + X` over the positions. The weight `W` is divided by its largest singular
/// value, which is estimated with one step of the power method in each forward
/// ([torch.nn.utils.spectral_norm](https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.spectral_norm.html)).
#[derive(Debug)]
struct SimpleSelfAttention {
    gamma: Tensor,
    weight: Tensor,
    left: Tensor,
    right: Tensor,
    symmetric: bool,
    training: Training,
}

impl SimpleSelfAttention {
    fn new(path: &ParamPath<'_>, channels: i64, symmetric: bool) -> Self {
        let conv = path / "conv";
        let gamma = path.parameter("gamma", &[1], Init::Zeros);
        let weight = conv.parameter("weight_orig", &[channels, channels, 1], Init::KaimingUniform);
        let unit = |name| {
            let zeros = Tensor::zeros([channels.max(0)], (Kind::Float, Device::Cpu));
            let vector = conv.buffer(name, &zeros);
            conv.redraw(&vector, |values| {
                let norm = values.f_normal_(0.0, 1.0)?.f_norm()?;
                values.f_div_(&norm).map(drop)
            });
            vector
        };
        Self {
            gamma,
            weight,
            left: unit("weight_u"),
            right: unit("weight_v"),
            symmetric,
            training: path.training(),
        }
    }

    fn normalised(&self) -> Result<Tensor> {
        const EPS: f64 = 1e-12;
        let matrix = self.weight.f_flatten(1, -1)?;
        if self.training.is_on() {
            tch::no_grad(|| {
                let unit = |vector: Tensor| -> std::result::Result<Tensor, tch::TchError> {
                    let norm = vector.f_norm()?.f_clamp_min(EPS)?;
                    vector.f_div(&norm)
                };
                let right = unit(matrix.f_tr()?.f_mv(&self.left)?)?;
                self.right.shallow_clone().f_copy_(&right)?;
                self.left.shallow_clone().f_copy_(&unit(matrix.f_mv(&right)?)?)
            })?;
        }
        // Copies: the next forward changes the vectors in place, and the backward needs these.
        let (left, right) = (self.left.f_detach_copy()?, self.right.f_detach_copy()?);
        let largest = left.f_dot(&matrix.f_mv(&right)?)?;
        Ok(matrix.f_div(&largest)?)
    }

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let size = input.size();
        let mut weight = self.normalised()?;
        if self.symmetric {
            weight = weight.f_add(&weight.f_tr()?)?.f_div_scalar(2.0)?;
        }
        let maps = input.f_flatten(2, -1)?;
        let convolved = weight.f_matmul(&maps)?;
        let products = maps.f_bmm(&maps.f_transpose(1, 2)?)?;
        let attended = products.f_bmm(&convolved)?;
        Ok(attended.f_mul(&self.gamma)?.f_add(&maps)?.f_view(size.as_slice())?)
    }
}

pub(super) fn conv_norm(
    path: &ParamPath<'_>,
    channels: [i64; 2],
    kernel: i64,
    stride: i64,
    groups: i64,
) -> ConvNorm {
    ConvNorm {
        conv: conv(path / 0, channels, kernel, stride, groups),
        norm: BatchNorm2d::new(path / 1, channels[1]),
    }
}
