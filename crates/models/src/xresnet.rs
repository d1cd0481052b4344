//! fastai's residual networks.

use std::borrow::Borrow;

use brigade_nn::{
    BatchNorm2d, Conv2d, Conv2dOptions, Dropout, Flatten, Init, Linear, MaxPool2d, Module,
    ParamPath, Result, Training,
};
use tch::{Device, Kind, Tensor};

use crate::conv_norm::{ConvNorm, average_halves, conv};
use crate::init::{Redraw, redraw};
use crate::{Activation, ImageClassifier};

/// fastai's `XResNet` (He et al., 2019, "Bag of tricks"): from images `[n, channels, h, w]` to logits
/// `[n, classes]`.
///
/// Three 3 x 3 convolutions instead of one of 7 x 7, means of 2 x 2 pixels in the shortcuts, and blocks that
/// start as the identity. Names and the distributions of the first values are those of
/// [fastai.vision.models.xresnet](https://docs.fast.ai/vision.models.xresnet.html): a file of
/// `learn.model.state_dict()` loads.
///
/// ```
/// use brigade_models::XResNet;
/// use brigade_nn::{Kind, Model, Tensor};
///
/// let model = Model::new(|path| XResNet::xresnet50(path, 10))?;
/// assert_eq!(model.num_parameters(), 23_547_754);
/// let images = Tensor::zeros([2, 3, 64, 64], (Kind::Float, model.device()));
/// assert_eq!(model.forward(&images)?.size(), [2, 10]);
/// # Ok::<(), brigade_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct XResNet {
    stem: Vec<ConvNorm>,
    stages: Vec<Vec<Block>>,
    dropout: Option<Dropout>,
    head: Linear,
    head_name: String,
    activation: Activation,
}

/// The size and the parts of an [`XResNet`], by the names that fastai gives them.
#[derive(Debug, Clone, PartialEq)]
pub struct XResNetOptions {
    /// Blocks of each stage: four stages, or more of 256 channels (times the expansion) after them.
    pub layers: Vec<usize>,
    /// 1 for blocks of two convolutions, 4 for bottlenecks.
    pub expansion: i64,
    /// Channels of the images (`c_in`); 3.
    pub in_channels: i64,
    /// Channels after the three convolutions of the stem (`stem_szs`); 32, 32, 64.
    pub stem: [i64; 3],
    /// Factor of the channels of all stages (`widen`); 1.
    pub widen: f64,
    /// The probability of dropout before the classifier (`p`); 0.
    pub dropout: f64,
    /// The function after normalisations (`act_cls`); ReLU.
    pub activation: Activation,
    /// Adds simple self-attention to the last block of the fourth stage from the end (`sa`); false.
    pub self_attention: bool,
    /// Makes the attention's weights symmetric (`sym`); false.
    pub symmetric: bool,
    /// Groups of the 3 x 3 convolution (`groups`); 1.
    pub groups: i64,
    /// Divides the channels inside of a squeeze-and-excitation module (`reduction`); none.
    pub reduction: Option<i64>,
    /// Channels inside of a block by another rule than the stage's channels; none.
    pub width: BlockWidth,
}

/// The channels inside of a block of an [`XResNet`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum BlockWidth {
    /// Those of the stage: fastai's `ResBlock`.
    #[default]
    Stage,
    /// Twice those of the stage, and the stage's output at the 3 x 3 convolution: fastai's `SEBlock`.
    Squeeze,
    /// `floor(channels · base / 64) · groups`: fastai's `SEResNeXtBlock`, whose base is 4.
    Grouped {
        /// `base_width`.
        base: i64,
    },
}

impl XResNetOptions {
    /// Blocks of two convolutions.
    #[must_use]
    pub fn basic(layers: impl Into<Vec<usize>>) -> Self {
        Self {
            layers: layers.into(),
            expansion: 1,
            in_channels: 3,
            stem: [32, 32, 64],
            widen: 1.0,
            dropout: 0.0,
            activation: Activation::Relu,
            self_attention: false,
            symmetric: false,
            groups: 1,
            reduction: None,
            width: BlockWidth::Stage,
        }
    }

    /// Blocks of three convolutions.
    #[must_use]
    pub fn bottleneck(layers: impl Into<Vec<usize>>) -> Self {
        Self { expansion: 4, ..Self::basic(layers) }
    }

    /// With squeeze-and-excitation modules that divide the channels by 16: fastai's `xse_resnet`.
    #[must_use]
    pub fn squeeze_excitation(self) -> Self {
        Self { reduction: Some(16), width: BlockWidth::Squeeze, ..self }
    }

    /// With 32 groups of channels: fastai's `xresnext`; with a `reduction` of 16 its `xse_resnext`.
    #[must_use]
    pub fn grouped(self) -> Self {
        Self { groups: 32, width: BlockWidth::Grouped { base: 4 }, ..self }
    }
}

impl XResNet {
    /// 11.2 million parameters with 10 classes.
    pub fn xresnet18<'a>(path: impl Borrow<ParamPath<'a>>, classes: i64) -> Self {
        Self::new(path, classes, &XResNetOptions::basic([2, 2, 2, 2]))
    }

    /// 21.3 million parameters with 10 classes.
    pub fn xresnet34<'a>(path: impl Borrow<ParamPath<'a>>, classes: i64) -> Self {
        Self::new(path, classes, &XResNetOptions::basic([3, 4, 6, 3]))
    }

    /// 23.5 million parameters with 10 classes.
    pub fn xresnet50<'a>(path: impl Borrow<ParamPath<'a>>, classes: i64) -> Self {
        Self::new(path, classes, &XResNetOptions::bottleneck([3, 4, 6, 3]))
    }

    /// 42.5 million parameters with 10 classes.
    pub fn xresnet101<'a>(path: impl Borrow<ParamPath<'a>>, classes: i64) -> Self {
        Self::new(path, classes, &XResNetOptions::bottleneck([3, 4, 23, 3]))
    }

    /// Registers all layers below the path.
    pub fn new<'a>(
        path: impl Borrow<ParamPath<'a>>,
        classes: i64,
        options: &XResNetOptions,
    ) -> Self {
        let path = path.borrow();
        if options.expansion < 1 || options.layers.is_empty() {
            path.reject(format_args!(
                "{} stages of expansion {}: at least one stage, and 1 or 4",
                options.layers.len(),
                options.expansion
            ));
        }
        let [first, second, third] = options.stem;
        let stem = [[options.in_channels, first], [first, second], [second, third]];
        let stem = stem.into_iter().enumerate().map(|(index, channels)| {
            let stride = if index == 0 { 2 } else { 1 };
            conv_norm(&(path / index), channels, 3, stride, 1)
        });
        let stem = stem.collect();

        let expansion = options.expansion.max(1);
        let attended = options.layers.len().checked_sub(4).filter(|_| options.self_attention);
        let mut inputs = 64 / expansion * expansion;
        let mut stages = Vec::with_capacity(options.layers.len());
        for (number, &count) in options.layers.iter().enumerate() {
            let wide = [64.0, 128.0, 256.0, 512.0].get(number).copied().unwrap_or(256.0);
            let channels = (wide * options.widen) as i64;
            let blocks = (0..count).map(|index| {
                let shape = Shape {
                    inputs,
                    channels,
                    stride: if index == 0 && number > 0 { 2 } else { 1 },
                    attends: attended == Some(number) && index + 1 == count,
                };
                inputs = channels * expansion;
                Block::new(&(path / (number + 4) / index), &shape, options)
            });
            stages.push(blocks.collect());
        }
        // Pooling, Flatten and Dropout have numbers too.
        let head = options.layers.len() + 7;
        let dropout = (options.dropout != 0.0)
            .then(|| Dropout::new(path / (options.layers.len() + 6), options.dropout));
        let model = Self {
            stem,
            stages,
            dropout,
            head: Linear::new(path / head, inputs, classes),
            head_name: (path / head).name().to_owned(),
            activation: options.activation,
        };
        model.redraw(path);
        model
    }

    /// fastai's `init_cnn`: weights normal by their fan-in, biases 0; the last normalisation of a block has
    /// the weight 0.
    fn redraw(&self, path: &ParamPath<'_>) {
        let draw = |conv: &Conv2d| redraw(path, conv.weight(), Redraw::KaimingFanIn);
        self.stem.iter().for_each(|layer| draw(&layer.conv));
        for block in self.stages.iter().flatten() {
            for layer in block.body.iter() {
                draw(&layer.conv);
            }
            if let Some(squeeze) = &block.squeeze {
                for conv in [&squeeze.reduce, &squeeze.expand] {
                    draw(conv);
                    if let Some(bias) = conv.bias() {
                        redraw(path, bias, Redraw::Constant(0.0));
                    }
                }
            }
            if let Some(layer) = &block.shortcut {
                draw(&layer.conv);
            }
            if let Some(weight) = block.body.last().and_then(|layer| layer.norm.weight()) {
                redraw(path, weight, Redraw::Constant(0.0));
            }
        }
        redraw(path, self.head.weight(), Redraw::KaimingFanIn);
        if let Some(bias) = self.head.bias() {
            redraw(path, bias, Redraw::Constant(0.0));
        }
    }
}

impl ImageClassifier for XResNet {
    fn classifier(&self) -> String {
        self.head_name.clone()
    }

    fn first_convolution(&self) -> String {
        "0.0".to_owned()
    }

    /// timm's names of the same network (`resnet50d` and its like), and fastai's of 2019 (`convs` and
    /// `idconv`).
    fn renamed(&self, name: &str) -> Option<String> {
        let (part, rest) = name.split_once('.')?;
        let shortcut = |stage: usize, block: &str| {
            // The pooling before it has a number, where the size changes.
            usize::from(stage > 0 && block == "0")
        };
        if let Some(number) = part.strip_prefix("layer") {
            let stage = number.parse::<usize>().ok()?.checked_sub(1)?;
            let (block, layer) = rest.split_once('.')?;
            let (layer, leaf) = layer.split_once('.')?;
            let inner = match layer.split_at_checked(layer.len().checked_sub(1)?)? {
                ("conv", number) => {
                    format!("convpath.{}.0.{leaf}", number.parse::<usize>().ok()?.checked_sub(1)?)
                }
                ("bn", number) => {
                    format!("convpath.{}.1.{leaf}", number.parse::<usize>().ok()?.checked_sub(1)?)
                }
                _ if layer == "downsample" => {
                    let (index, leaf) = leaf.split_once('.')?;
                    let index = index.parse::<usize>().ok()?.checked_sub(1)?;
                    format!("idpath.{}.{index}.{leaf}", shortcut(stage, block))
                }
                _ => return None,
            };
            return Some(format!("{}.{block}.{inner}", stage + 4));
        }
        match part {
            "conv1" => {
                let (index, leaf) = rest.split_once('.')?;
                let index: usize = index.parse().ok()?;
                // Three convolutions and two normalisations, with activations between.
                Some(format!("{}.{}.{leaf}", index / 3, index % 3))
            }
            "bn1" => Some(format!("2.1.{rest}")),
            "fc" => Some(format!("{}.{rest}", self.head_name)),
            _ => {
                let stage = part.parse::<usize>().ok()?.checked_sub(4)?;
                let (block, layer) = rest.split_once('.')?;
                let inner = if let Some(leaf) = layer.strip_prefix("convs.") {
                    format!("convpath.{leaf}")
                } else {
                    let leaf = layer.strip_prefix("idconv.")?;
                    format!("idpath.{}.{leaf}", shortcut(stage, block))
                };
                Some(format!("{part}.{block}.{inner}"))
            }
        }
    }
}

impl Module<&Tensor> for XResNet {
    type Output = Tensor;

    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let mut maps = images.shallow_clone();
        for layer in &self.stem {
            maps = layer.forward_activated(&maps, None, self.activation)?;
        }
        maps = MaxPool2d { kernel: [3, 3], stride: [2, 2], padding: [1, 1] }.forward(&maps)?;
        for block in self.stages.iter().flatten() {
            maps = block.forward(&maps)?;
        }
        let mut pooled = Flatten.forward(&maps.f_adaptive_avg_pool2d([1, 1])?)?;
        if let Some(dropout) = &self.dropout {
            pooled = dropout.forward(&pooled)?;
        }
        self.head.forward(&pooled)
    }
}

/// What differs from block to block.
struct Shape {
    inputs: i64,
    /// Of the stage; the block's output has `expansion` times as many.
    channels: i64,
    stride: i64,
    attends: bool,
}

#[derive(Debug)]
struct Block {
    body: Vec<ConvNorm>,
    squeeze: Option<SqueezeExcitation>,
    attention: Option<SimpleSelfAttention>,
    shortcut: Option<ConvNorm>,
    average: bool,
    activation: Activation,
}

impl Block {
    fn new(path: &ParamPath<'_>, shape: &Shape, options: &XResNetOptions) -> Self {
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
        Self { body, squeeze, attention, shortcut, average, activation: options.activation }
    }

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let mut shortcut =
            if self.average { average_halves(input)? } else { input.shallow_clone() };
        if let Some(layer) = &self.shortcut {
            shortcut = layer.forward(&shortcut)?;
        }
        let Some((last, first)) = self.body.split_last() else { return Ok(shortcut) };
        let mut maps = input.shallow_clone();
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

/// Weights channels by what their means say (Hu et al., 2017).
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

/// `γ · (X Xᵀ)(W X) + X` over the positions, with a weight `W` that is divided by its largest singular
/// value, which one step of the power method a forward follows
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
        let float = (Kind::Float, Device::Cpu);
        let unit = || {
            let drawn = Tensor::f_empty([channels.max(0)], float)?.f_normal_(0.0, 1.0)?;
            let norm = drawn.f_norm()?;
            drawn.f_div(&norm)
        };
        let unit = || {
            tch::no_grad(unit).unwrap_or_else(|error: tch::TchError| {
                conv.reject(error);
                Tensor::from_slice::<f32>(&[])
            })
        };
        Self {
            gamma: path.parameter("gamma", &[1], Init::Zeros),
            weight: conv.parameter("weight_orig", &[channels, channels, 1], Init::KaimingUniform),
            left: conv.buffer("weight_u", &unit()),
            right: conv.buffer("weight_v", &unit()),
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

fn conv_norm(
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
