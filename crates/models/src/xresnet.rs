//! fastai's residual networks (XResNet).

mod block;

use std::borrow::Borrow;

use brigade_nn::{Dropout, Flatten, Linear, Module, ParamPath, Stages};
use brigade_rank_env::text::counted;
use brigade_torch::{Activation, Result};
use tch::Tensor;

use self::block::{Block, Shape, conv_norm};
use crate::ImageClassifier;
use crate::conv_norm::ConvNorm;
use crate::init::{Redraw, redraw};

/// fastai's `XResNet` (He et al., 2019, "Bag of tricks"): from images `[n, channels, h, w]` to logits
/// `[n, classes]`.
///
/// It differs from a [`ResNet`](crate::ResNet) by three 3 x 3 convolutions instead of one of 7 x 7, average pooling in
/// the shortcuts, and blocks that are initially the identity. Names and the distributions of the initial values are
/// those of [fastai.vision.models.xresnet](https://docs.fast.ai/vision.models.xresnet.html): files of
/// `learn.model.state_dict()` can be loaded.
///
/// ```
/// use brigade_models::XResNet;
/// use brigade_nn::Model;
/// use tch::{Kind, Tensor};
///
/// let model = Model::new(|path| XResNet::xresnet50(path, 10))?;
/// assert_eq!(model.num_parameters(), 23_547_754);
/// let images = Tensor::zeros([2, 3, 64, 64], (Kind::Float, model.device()));
/// assert_eq!(model.forward(&images)?.size(), [2, 10]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct XResNet {
    body: XResNetBody,
    dropout: Option<Dropout>,
    head: Linear,
    head_name: String,
}

/// Options of an [`XResNet`], under fastai's names.
#[derive(Debug, Clone, PartialEq)]
pub struct XResNetOptions {
    /// Number of blocks of each stage. Stages after the fourth have 256 channels (times the expansion).
    pub layers: Vec<usize>,
    /// Expansion of the channels in a block: 1 for blocks of two convolutions, 4 for bottlenecks.
    pub expansion: i64,
    /// Number of channels of the images (`c_in`). Defaults to 3.
    pub in_channels: i64,
    /// Number of channels after each of the stem's three convolutions (`stem_szs`). Defaults to 32, 32 and 64.
    pub stem: [i64; 3],
    /// Factor of the number of channels of all stages (`widen`). Defaults to 1.
    pub widen: f64,
    /// Dropout probability before the classifier (`p`). Defaults to 0.
    pub dropout: f64,
    /// Activation after the normalisations (`act_cls`). Defaults to ReLU.
    pub activation: Activation,
    /// Adds simple self-attention to the last block of the fourth stage from the end (`sa`). Defaults to `false`.
    pub self_attention: bool,
    /// Makes the attention's weights symmetric (`sym`). Defaults to `false`.
    pub symmetric: bool,
    /// Number of groups of the 3 x 3 convolution (`groups`). Defaults to 1.
    pub groups: i64,
    /// Divisor of the number of channels inside a squeeze-and-excitation module (`reduction`). Defaults to none: no
    /// such modules.
    pub reduction: Option<i64>,
    /// Rule for the number of channels inside a block. Defaults to [`BlockWidth::Stage`].
    pub width: BlockWidth,
}

/// Number of channels inside a block of an [`XResNet`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum BlockWidth {
    /// Equal to the stage's number of channels: fastai's `ResBlock`.
    #[default]
    Stage,
    /// Twice the stage's number of channels, and the stage's output channels at the 3 x 3 convolution: fastai's
    /// `SEBlock`.
    Squeeze,
    /// `floor(channels · base / 64) · groups` channels: fastai's `SEResNeXtBlock`, whose base is 4.
    Grouped {
        /// Base width: channels per group and 64 channels of the stage (`base_width`).
        base: i64,
    },
}

impl XResNetOptions {
    /// Returns options with basic blocks, of two convolutions each.
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

    /// Returns options with bottleneck blocks, of three convolutions each.
    #[must_use]
    pub fn bottleneck(layers: impl Into<Vec<usize>>) -> Self {
        Self { expansion: 4, ..Self::basic(layers) }
    }

    /// Adds squeeze-and-excitation modules that divide the channels by 16: fastai's `xse_resnet`.
    #[must_use]
    pub fn squeeze_excitation(self) -> Self {
        Self { reduction: Some(16), width: BlockWidth::Squeeze, ..self }
    }

    /// Divides the channels of the 3 x 3 convolutions into 32 groups: fastai's `xresnext`, or its `xse_resnext` with a
    /// `reduction` of 16.
    #[must_use]
    pub fn grouped(self) -> Self {
        Self { groups: 32, width: BlockWidth::Grouped { base: 4 }, ..self }
    }
}

impl XResNet {
    /// Registers all layers below the path.
    pub fn new<'a>(
        path: impl Borrow<ParamPath<'a>>,
        classes: i64,
        options: impl Borrow<XResNetOptions>,
    ) -> Self {
        let (path, options) = (path.borrow(), options.borrow());
        let body = XResNetBody::undrawn(path, options);
        // Pooling, Flatten and Dropout have numbers too.
        let number = options.layers.len() + 7;
        let dropout =
            (options.dropout != 0.0).then(|| Dropout::new(path / (number - 1), options.dropout));
        let head = Linear::new(path / number, body.outputs, classes);
        // The layers have been initialised by their defaults before.
        body.redraw(path);
        redraw(path, head.weight(), Redraw::KaimingFanIn);
        if let Some(bias) = head.bias() {
            redraw(path, bias, Redraw::Constant(0.0));
        }
        let head_name = (path / number).name().to_owned();
        Self { body, dropout, head, head_name }
    }
}

/// An [`XResNet`] without its pooling and classifier.
#[derive(Debug)]
pub(crate) struct XResNetBody {
    stem: Vec<ConvNorm>,
    stages: Vec<Vec<Block>>,
    /// The blocks of all stages, at which a pipeline cuts the network.
    row: Stages,
    activation: Activation,
    /// Number of output channels.
    pub(crate) outputs: i64,
}

impl XResNetBody {
    pub(crate) fn new(path: &ParamPath<'_>, options: &XResNetOptions) -> Self {
        let body = Self::undrawn(path, options);
        body.redraw(path);
        body
    }

    /// With the initial values that the layers draw by themselves.
    fn undrawn(path: &ParamPath<'_>, options: &XResNetOptions) -> Self {
        if options.expansion < 1 || options.layers.is_empty() {
            path.reject(format_args!(
                "{} of expansion {}: at least one stage, and 1 or 4",
                counted(options.layers.len(), "stage"),
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
        let (mut stages, mut steps) = (Vec::with_capacity(options.layers.len()), Vec::new());
        for (number, &count) in options.layers.iter().enumerate() {
            let wide = [64.0, 128.0, 256.0, 512.0].get(number).copied().unwrap_or(256.0);
            let channels = (wide * options.widen) as i64;
            steps.extend((0..count).map(|index| format!("{}.{index}", number + 4)));
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
        let row = path.stages(steps);
        Self { stem, stages, row, activation: options.activation, outputs: inputs }
    }

    /// Initialises as fastai's `init_cnn` does: weights are normal with their fan-in, biases are 0; the last
    /// normalisation of a block has the weight 0.
    fn redraw(&self, path: &ParamPath<'_>) {
        for layer in &self.stem {
            redraw(path, layer.conv.weight(), Redraw::KaimingFanIn);
        }
        self.stages.iter().flatten().for_each(|block| block.redraw(path));
    }
}

impl ImageClassifier for XResNet {
    fn classifier(&self) -> String {
        self.head_name.clone()
    }

    fn first_convolution(&self) -> String {
        "0.0".to_owned()
    }

    fn renamed(&self, name: &str) -> Option<String> {
        renamed(name, &self.head_name)
    }
}

/// Converts timm's name of a parameter (`resnet50d` and similar networks), or fastai's name of 2019 (`convs` and
/// `idconv`), to that in an [`XResNet`] whose classifier has the name `head_name`.
pub(crate) fn renamed(name: &str, head_name: &str) -> Option<String> {
    let (part, rest) = name.split_once('.')?;
    let shortcut = |stage: usize, block: &str| {
        // The pooling before it has a number, if the size changes.
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
        "fc" => Some(format!("{head_name}.{rest}")),
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

impl Module<&Tensor> for XResNetBody {
    type Output = Tensor;

    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let stem = || {
            let mut maps = images.shallow_clone();
            let Some((last, first)) = self.stem.split_last() else { return Ok(maps) };
            for layer in first {
                maps = layer.forward_activated(&maps, None, self.activation)?;
            }
            last.forward_pooled(&maps, self.activation)
        };
        let blocks: Vec<&Block> = self.stages.iter().flatten().collect();
        self.row.run(stem, |index, maps| {
            let block = blocks[index];
            block.unit.run_on(maps, |maps| block.forward(maps))
        })
    }
}

impl Module<&Tensor> for XResNet {
    type Output = Tensor;

    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let maps = self.body.forward(images)?;
        let mut pooled = Flatten.forward(&maps.f_adaptive_avg_pool2d([1, 1])?)?;
        if let Some(dropout) = &self.dropout {
            pooled = dropout.forward(&pooled)?;
        }
        self.head.forward(&pooled)
    }
}
