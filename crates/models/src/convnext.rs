//! torchvision's ConvNeXt.

use std::borrow::Borrow;

use brigade_nn::{
    Conv2d, Conv2dOptions, Init, LayerNorm, LayerNormOptions, Linear, Module, ParamPath, Stages,
    Unit,
};
use brigade_torch::{Activation, Result};
use tch::Tensor;

use crate::ImageClassifier;
use crate::drop_path::DropPath;
use crate::init::{Redraw, redraw};

/// ConvNeXt: a convolutional network with the design of a transformer (Liu et al., 2022), from images `[n, channels, h,
/// w]` to logits `[n, classes]`.
///
/// Names and initial values (for a seed) are those of
/// [torchvision.models.convnext](https://docs.pytorch.org/vision/stable/models/convnext.html).
///
/// ```
/// use brigade_models::ConvNeXt;
/// use brigade_nn::Model;
///
/// let model = Model::new(|path| ConvNeXt::tiny(path, 1000))?;
/// assert_eq!(model.num_parameters(), 28_589_128);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct ConvNeXt {
    body: ConvNeXtBody,
    norm: LayerNorm,
    head: Linear,
}

/// Options of a [`ConvNeXt`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ConvNeXtOptions {
    /// Number of channels of each of the four stages.
    pub channels: [i64; 4],
    /// Number of blocks of each of the four stages.
    pub blocks: [usize; 4],
    /// Number of channels of the images. Defaults to 3.
    pub in_channels: i64,
    /// Probability that training skips the residual branch of the last block for an image, decreasing linearly for
    /// earlier blocks: stochastic depth.
    pub stochastic_depth: f64,
    /// Initial value of the scale on each residual branch. Defaults to 1e-6.
    pub layer_scale: f64,
}

impl ConvNeXtOptions {
    /// Returns the options of torchvision's `convnext_tiny`.
    #[must_use]
    pub fn tiny() -> Self {
        Self {
            channels: [96, 192, 384, 768],
            blocks: [3, 3, 9, 3],
            in_channels: 3,
            stochastic_depth: 0.1,
            layer_scale: 1e-6,
        }
    }
}

impl ConvNeXt {
    /// Registers all layers below the path.
    pub fn new<'a>(
        path: impl Borrow<ParamPath<'a>>,
        classes: i64,
        options: ConvNeXtOptions,
    ) -> Self {
        let path = path.borrow();
        let body = ConvNeXtBody::undrawn(&(path / "features"), options);
        let classifier = path / "classifier";
        let norm = norm(&classifier / 0, body.outputs);
        let head = Linear::new(&classifier / 2, body.outputs, classes);
        // The layers have been initialised by their defaults before.
        body.redraw(path);
        draw(path, head.weight(), head.bias());
        Self { body, norm, head }
    }
}

/// A [`ConvNeXt`] without its pooling and classifier: torchvision's `features`.
#[derive(Debug)]
pub(crate) struct ConvNeXtBody {
    /// Stem, and the downsampling layers before each other stage.
    reductions: Vec<(Conv2d, LayerNorm)>,
    stages: Vec<Vec<Block>>,
    /// The blocks and the downsampling layers between them, at which a pipeline cuts the network.
    row: Stages,
    /// Number of output channels.
    pub(crate) outputs: i64,
}

impl ConvNeXtBody {
    pub(crate) fn new(path: &ParamPath<'_>, options: ConvNeXtOptions) -> Self {
        let body = Self::undrawn(path, options);
        body.redraw(path);
        body
    }

    /// With the initial values that the layers draw by themselves.
    fn undrawn(features: &ParamPath<'_>, options: ConvNeXtOptions) -> Self {
        let convolution = |path: ParamPath<'_>, channels: [i64; 2], size: i64| {
            let options = Conv2dOptions { stride: [size; 2], ..Conv2dOptions::default() };
            Conv2d::new(path, channels[0], channels[1], [size; 2], options)
        };
        let all: usize = options.blocks.iter().sum();
        let mut depth = 0;
        let (mut reductions, mut stages) = (Vec::with_capacity(4), Vec::with_capacity(4));
        let (mut inputs, mut steps) = (options.in_channels, Vec::new());
        for (number, (&channels, blocks)) in options.channels.iter().zip(options.blocks).enumerate()
        {
            let path = features / (2 * number);
            steps.extend((number > 0).then(|| (2 * number).to_string()));
            steps.extend((0..blocks).map(|index| format!("{}.{index}", 2 * number + 1)));
            reductions.push(if number == 0 {
                let conv = convolution(&path / 0, [inputs, channels], 4);
                (conv, norm(&path / 1, channels))
            } else {
                let norm = norm(&path / 0, inputs);
                (convolution(&path / 1, [inputs, channels], 2), norm)
            });
            inputs = channels;
            let stage = features / (2 * number + 1);
            let blocks = (0..blocks).map(|index| {
                let drop = options.stochastic_depth * depth as f64 / (all - 1).max(1) as f64;
                depth += 1;
                Block::new(&(&stage / index), channels, drop, options.layer_scale)
            });
            stages.push(blocks.collect());
        }
        Self { reductions, stages, row: features.stages(steps), outputs: inputs }
    }

    /// Returns the layers behind the stem in their order.
    fn steps(&self) -> impl Iterator<Item = Step<'_>> {
        let stages = self.reductions.iter().zip(&self.stages).enumerate();
        stages.flat_map(|(number, ((conv, norm), blocks))| {
            let reduction = (number > 0).then_some(Step::Reduction(norm, conv));
            reduction.into_iter().chain(blocks.iter().map(Step::Block))
        })
    }

    /// Draws the weights a second time, in the order of torchvision's modules.
    fn redraw(&self, path: &ParamPath<'_>) {
        let draw = |weight: &Tensor, bias: Option<&Tensor>| draw(path, weight, bias);
        for ((conv, _), blocks) in self.reductions.iter().zip(&self.stages) {
            draw(conv.weight(), conv.bias());
            for block in blocks {
                draw(block.conv.weight(), block.conv.bias());
                draw(block.expand.weight(), block.expand.bias());
                draw(block.reduce.weight(), block.reduce.bias());
            }
        }
    }
}

impl ImageClassifier for ConvNeXt {
    fn classifier(&self) -> String {
        "classifier.2".to_owned()
    }

    fn first_convolution(&self) -> String {
        "features.0.0".to_owned()
    }

    fn renamed(&self, name: &str) -> Option<String> {
        renamed(name)
    }
}

/// Converts timm's name of a parameter.
pub(crate) fn renamed(name: &str) -> Option<String> {
    if let Some(rest) = name.strip_prefix("stem.") {
        return Some(format!("features.0.{rest}"));
    }
    if let Some(rest) = name.strip_prefix("stages.") {
        let (stage, rest) = rest.split_once('.')?;
        let stage: usize = stage.parse().ok()?;
        if let Some(rest) = rest.strip_prefix("downsample.") {
            return Some(format!("features.{}.{rest}", 2 * stage));
        }
        let (block, layer) = rest.strip_prefix("blocks.")?.split_once('.')?;
        let inner = [
            ("conv_dw.", "block.0."),
            ("norm.", "block.2."),
            ("mlp.fc1.", "block.3."),
            ("mlp.fc2.", "block.5."),
            ("gamma", "layer_scale"),
        ];
        let inner = inner
            .iter()
            .find_map(|(theirs, own)| Some(format!("{own}{}", layer.strip_prefix(theirs)?)))?;
        return Some(format!("features.{}.{block}.{inner}", 2 * stage + 1));
    }
    let head = [("head.norm.", "classifier.0."), ("head.fc.", "classifier.2.")];
    head.iter().find_map(|(theirs, own)| Some(format!("{own}{}", name.strip_prefix(theirs)?)))
}

/// torchvision's initial values. Its `trunc_normal_` cuts at ±2, which is 100 deviations away.
fn draw(path: &ParamPath<'_>, weight: &Tensor, bias: Option<&Tensor>) {
    redraw(path, weight, Redraw::Normal(0.02));
    if let Some(bias) = bias {
        redraw(path, bias, Redraw::Constant(0.0));
    }
}

impl Module<&Tensor> for ConvNeXtBody {
    type Output = Tensor;

    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let stem = || match self.reductions.first() {
            Some((conv, norm)) => over_channels(norm, &conv.forward(images)?),
            None => Ok(images.shallow_clone()),
        };
        let steps: Vec<Step<'_>> = self.steps().collect();
        self.row.run(stem, |index, maps| steps[index].forward(maps))
    }
}

impl Module<&Tensor> for ConvNeXt {
    type Output = Tensor;

    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let maps = self.body.forward(images)?;
        let pooled = maps.f_adaptive_avg_pool2d([1, 1])?.f_flatten(1, -1)?;
        self.head.forward(&self.norm.forward(&pooled)?)
    }
}

/// A layer behind the stem.
enum Step<'a> {
    /// Downsampling layer before a stage.
    Reduction(&'a LayerNorm, &'a Conv2d),
    Block(&'a Block),
}

impl Step<'_> {
    fn forward(&self, maps: &Tensor) -> Result<Tensor> {
        match self {
            Self::Reduction(norm, conv) => conv.forward(&over_channels(norm, maps)?),
            Self::Block(block) => block.unit.run_on(maps, |maps| block.forward(maps)),
        }
    }
}

/// Residual block: a 7 x 7 depthwise convolution, then two linear layers per pixel.
#[derive(Debug)]
struct Block {
    unit: Unit,
    layer_scale: Tensor,
    conv: Conv2d,
    norm: LayerNorm,
    expand: Linear,
    reduce: Linear,
    drop_path: DropPath,
}

impl Block {
    fn new(path: &ParamPath<'_>, channels: i64, drop: f64, layer_scale: f64) -> Self {
        let layer_scale =
            path.parameter("layer_scale", &[channels, 1, 1], Init::Constant(layer_scale));
        let block = path / "block";
        let options =
            Conv2dOptions { padding: [3, 3], groups: channels, ..Conv2dOptions::default() };
        Self {
            unit: path.unit(),
            layer_scale,
            conv: Conv2d::new(&block / 0, channels, channels, [7, 7], options),
            norm: norm(&block / 2, channels),
            expand: Linear::new(&block / 3, channels, 4 * channels),
            reduce: Linear::new(&block / 5, 4 * channels, channels),
            drop_path: DropPath::new(path, drop),
        }
    }

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let pixels = self.conv.forward(input)?.f_permute([0, 2, 3, 1])?;
        let hidden = self.expand.forward_pre_activation(&self.norm.forward(&pixels)?)?;
        let branch =
            self.reduce.forward(&hidden.activate(Activation::Gelu)?)?.f_permute([0, 3, 1, 2])?;
        let branch = self.drop_path.apply(&branch.f_mul(&self.layer_scale)?)?;
        Ok(branch.f_add(input)?)
    }
}

fn norm<'a>(path: impl Borrow<ParamPath<'a>>, channels: i64) -> LayerNorm {
    let options = LayerNormOptions { eps: 1e-6, ..LayerNormOptions::default() };
    LayerNorm::with_options(path, &[channels], options)
}

/// Normalises the channels of each pixel of `[n, c, h, w]`.
fn over_channels(norm: &LayerNorm, maps: &Tensor) -> Result<Tensor> {
    Ok(norm.forward(&maps.f_permute([0, 2, 3, 1])?)?.f_permute([0, 3, 1, 2])?)
}
