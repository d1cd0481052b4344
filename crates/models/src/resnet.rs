//! Residual networks (ResNet) of torchvision and timm.

use std::borrow::Borrow;
use std::cell::RefCell;

use brigade_nn::{
    BatchNorm2d, Conv2d, Flatten, Linear, MaxPool2d, Module, ParamPath, Stages, Unit,
};
use brigade_torch::{Activation, Error, Result, residual_inputs};
use tch::Tensor;

use crate::ImageClassifier;
use crate::conv_norm::{ConvNorm, average_halves, conv};
use crate::init::{Redraw, redraw};

/// A residual network (He et al., 2016): from images `[n, channels, h, w]` to logits `[n, classes]`. Images may have
/// any size from 32 × 32 on.
///
/// Names, initial values (for a seed) and the position of the stride (the 3 x 3 convolution of a bottleneck, "v1.5")
/// are those of [torchvision.models](https://docs.pytorch.org/vision/stable/models/resnet.html), so that its weights
/// files can be loaded. With [`Stem::Deep`] they are those of [timm](https://huggingface.co/docs/timm/models/resnet-d):
/// [`ResNet::resnet50d`].
///
/// ```
/// use brigade_models::ResNet;
/// use brigade_nn::Model;
/// use tch::{Kind, Tensor};
///
/// let model = Model::new(|path| ResNet::resnet18(path, 1000))?;
/// assert_eq!(model.num_parameters(), 11_689_512);
/// let images = Tensor::zeros([2, 3, 64, 64], (Kind::Float, model.device()));
/// assert_eq!(model.forward(&images)?.size(), [2, 1000]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct ResNet {
    body: ResNetBody,
    fc: Linear,
}

/// Options of a [`ResNet`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResNetOptions {
    /// Number of blocks of each of the four stages.
    pub blocks: [usize; 4],
    /// Uses bottleneck blocks of three convolutions (1 x 1, 3 x 3, 1 x 1 with four times the channels) instead of two.
    pub bottleneck: bool,
    /// Number of groups of the 3 x 3 convolution in a bottleneck. Defaults to 1. ResNeXt has 32.
    pub groups: i64,
    /// Number of channels of the 3 x 3 convolution in a bottleneck, for each group and 64 channels of the stage.
    /// Defaults to 64. Wide networks have 128.
    pub width_per_group: i64,
    /// `true` to initialise the last normalisation of each block with 0, so that blocks are initially the identity
    /// (Goyal et al., 2017). `false` in torchvision, `true` in timm.
    pub zero_init_residual: bool,
    /// Number of channels of the images. Defaults to 3.
    pub in_channels: i64,
    /// Stem: the convolutions before the first stage.
    pub stem: Stem,
    /// Halves the size of a shortcut by 2 x 2 average pooling instead of a stride (timm's `avg_down`). Defaults to
    /// `false`.
    pub average_shortcut: bool,
}

/// Layers before the first stage of a [`ResNet`]. Their output has 64 channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Stem {
    /// A single 7 x 7 convolution with stride 2.
    #[default]
    Conv7,
    /// Three convolutions of 3 x 3, the first with stride 2, with these channels after the first two
    /// (timm's `stem_type="deep"` and `"deep_tiered"`).
    Deep([i64; 2]),
}

impl ResNetOptions {
    /// Returns options with basic blocks, of two convolutions each.
    #[must_use]
    pub fn basic(blocks: [usize; 4]) -> Self {
        Self {
            blocks,
            bottleneck: false,
            groups: 1,
            width_per_group: 64,
            zero_init_residual: false,
            in_channels: 3,
            stem: Stem::Conv7,
            average_shortcut: false,
        }
    }

    /// Returns options with bottleneck blocks, of three convolutions each.
    #[must_use]
    pub fn bottleneck(blocks: [usize; 4]) -> Self {
        Self { bottleneck: true, ..Self::basic(blocks) }
    }

    /// Returns the options of timm's variant "d" (He et al., 2019): a deep stem of 32 channels, average pooling in the
    /// shortcuts, and blocks that are initially the identity.
    ///
    /// ```
    /// use brigade_models::{ResNet, ResNetOptions};
    /// use brigade_nn::Model;
    ///
    /// let resnet26d = ResNetOptions::bottleneck([2, 2, 2, 2]).variant_d();
    /// let model = Model::new(|path| ResNet::new(path, 1000, resnet26d))?;
    /// assert_eq!(model.num_parameters(), 16_014_408);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[must_use]
    pub fn variant_d(self) -> Self {
        let stem = Stem::Deep([32, 32]);
        Self { stem, average_shortcut: true, zero_init_residual: true, ..self }
    }
}

impl ResNet {
    /// Builds torchvision's `wide_resnet50_2`: twice the channels in the 3 x 3 convolutions, 68.9 million parameters
    /// with 1000 classes.
    pub fn wide_resnet50<'a>(path: impl Borrow<ParamPath<'a>>, classes: i64) -> Self {
        let options =
            ResNetOptions { width_per_group: 128, ..ResNetOptions::bottleneck([3, 4, 6, 3]) };
        Self::new(path, classes, options)
    }

    /// Builds torchvision's `resnext50_32x4d`: 32 groups of 4 channels, 25.0 million parameters with 1000 classes.
    pub fn resnext50<'a>(path: impl Borrow<ParamPath<'a>>, classes: i64) -> Self {
        let options = ResNetOptions {
            groups: 32,
            width_per_group: 4,
            ..ResNetOptions::bottleneck([3, 4, 6, 3])
        };
        Self::new(path, classes, options)
    }

    /// Registers all layers below the path.
    pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, classes: i64, options: ResNetOptions) -> Self {
        let path = path.borrow();
        let body = ResNetBody::named(path, &Names::torchvision(path), options);
        let fc = Linear::new(path / "fc", body.channels()[4], classes);
        // The layers have been initialised by their defaults before.
        body.redraw(path, options);
        Self { body, fc }
    }
}

impl ImageClassifier for ResNet {
    fn classifier(&self) -> String {
        "fc".to_owned()
    }

    fn first_convolution(&self) -> String {
        if self.body.deep.is_empty() { "conv1".to_owned() } else { "conv1.0".to_owned() }
    }
}

impl Module<&Tensor> for ResNet {
    type Output = Tensor;

    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let maps = self.body.forward(images)?;
        self.fc.forward(&Flatten.forward(&maps.f_adaptive_avg_pool2d([1, 1])?)?)
    }
}

/// Paths of the parts of a [`ResNetBody`].
struct Names<'a> {
    stem: ParamPath<'a>,
    norm: ParamPath<'a>,
    stages: [ParamPath<'a>; 4],
    /// Names of the stages below the body's path.
    steps: [String; 4],
}

impl<'a> Names<'a> {
    fn torchvision(path: &ParamPath<'a>) -> Self {
        let steps = [1, 2, 3, 4].map(|number| format!("layer{number}"));
        Self::new(path, ["conv1", "bn1"].map(str::to_owned), steps)
    }

    /// Returns the names of fastai's `create_body`.
    fn fastai(path: &ParamPath<'a>) -> Self {
        let name = |step: i32| step.to_string();
        Self::new(path, [0, 1].map(name), [4, 5, 6, 7].map(name))
    }

    fn new(path: &ParamPath<'a>, [stem, norm]: [String; 2], steps: [String; 4]) -> Self {
        let stages = steps.each_ref().map(|step| path / step.as_str());
        Self { stem: path / stem.as_str(), norm: path / norm.as_str(), stages, steps }
    }
}

/// Converts a name of a [`ResNet`] to that in a [`ResNetBody`]. Returns `None` for the classifier's.
pub(crate) fn name_in_body(name: &str) -> Option<String> {
    let (part, rest) = name.split_once('.')?;
    let number = match part {
        "conv1" => 0,
        "bn1" => 1,
        _ => part.strip_prefix("layer")?.parse::<usize>().ok()?.checked_add(3)?,
    };
    Some(format!("{number}.{rest}"))
}

/// A [`ResNet`] without its pooling and classifier: from images `[n, channels, h, w]` to feature maps `[n, c, h / 32, w
/// / 32]`, under the names of fastai's `create_body` (`0` and `1` are the stem, `4` to `7` the stages).
///
/// ```
/// use brigade_models::{ResNetBody, ResNetOptions};
/// use brigade_nn::Model;
/// use tch::{Kind, Tensor};
///
/// let small = ResNetOptions::basic([1, 1, 1, 1]);
/// let model = Model::new(|path| ResNetBody::new(path, small))?;
/// assert_eq!(model.state_dict().names().next(), Some("0.weight"));
/// let images = Tensor::zeros([2, 3, 64, 64], (Kind::Float, model.device()));
/// assert_eq!(model.forward(&images)?.size(), [2, 512, 2, 2]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct ResNetBody {
    /// Layers before the last convolution of the stem.
    deep: Vec<ConvNorm>,
    stem: ConvNorm,
    /// The four stages, `layer1` to `layer4`.
    stages: Vec<Vec<Block>>,
    /// The blocks of all four, at which a pipeline cuts the network.
    row: Stages,
    channels: [i64; 5],
}

impl ResNetBody {
    /// Registers all layers below the path.
    pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, options: ResNetOptions) -> Self {
        let path = path.borrow();
        let body = Self::named(path, &Names::fastai(path), options);
        body.redraw(path, options);
        body
    }

    /// Builds the body with the names of a [`ResNet`]: timm's network without its classifier.
    pub(crate) fn with_torchvisions_names(path: &ParamPath<'_>, options: ResNetOptions) -> Self {
        let body = Self::named(path, &Names::torchvision(path), options);
        body.redraw(path, options);
        body
    }

    /// Returns the number of channels after the stem and after each stage.
    #[must_use]
    pub fn channels(&self) -> [i64; 5] {
        self.channels
    }

    /// Returns the feature maps after the stem (half the size of the images) and after each stage (a quarter, 1/8,
    /// 1/16, 1/32), for a decoder.
    ///
    /// # Errors
    /// Returns the errors of [`Module::forward`]; [`brigade_torch::ErrorKind::InvalidArgument`] for a network whose blocks
    /// are on several ranks of a pipeline.
    pub fn features(&self, images: &Tensor) -> Result<[Tensor; 5]> {
        if self.row.is_cut() {
            return Err(Error::invalid_argument(
                "the feature maps of a network in stages are on several ranks of the pipeline: train models that need \
                 all of them, such as a U-Net, without a pipeline",
            ));
        }
        let mut features = std::array::from_fn(|_| Tensor::new());
        let mut next = features.iter_mut();
        let _ = self.run(
            images,
            Some(&mut |maps: &Tensor| {
                if let Some(feature) = next.next() {
                    *feature = maps.shallow_clone();
                }
            }),
        )?;
        Ok(features)
    }

    /// Runs the network, and passes the feature maps after the stem and after each stage to `keep`. Without it those
    /// after the stem are not written before they are pooled.
    fn run(&self, images: &Tensor, keep: Option<&mut dyn FnMut(&Tensor)>) -> Result<Tensor> {
        let is_kept = keep.is_some();
        let keep = RefCell::new(keep);
        let keep = |maps: &Tensor| {
            if let Some(keep) = &mut *keep.borrow_mut() {
                keep(maps);
            }
        };
        let stem = || {
            let mut maps = images.shallow_clone();
            for layer in &self.deep {
                maps = layer.forward_activated(&maps, None, Activation::Relu)?;
            }
            if !is_kept {
                return self.stem.forward_pooled(&maps, Activation::Relu);
            }
            maps = self.stem.forward_activated(&maps, None, Activation::Relu)?;
            keep(&maps);
            MaxPool2d::STEM.forward(&maps)
        };
        let ends_of_stages = |blocks: &[Block]| {
            let last = blocks.len().saturating_sub(1);
            (0..blocks.len()).map(move |index| index == last)
        };
        let blocks: Vec<(&Block, bool)> = (self.stages.iter())
            .flat_map(|blocks| blocks.iter().zip(ends_of_stages(blocks)))
            .collect();
        self.row.run(stem, |index, maps| {
            let (block, is_end) = blocks[index];
            let maps = block.unit.run_on(maps, |maps| block.forward(maps))?;
            if is_end {
                keep(&maps);
            }
            Ok(maps)
        })
    }

    fn named(path: &ParamPath<'_>, names: &Names<'_>, options: ResNetOptions) -> Self {
        let plain = options.groups == 1 && options.width_per_group == 64;
        if !options.bottleneck && !plain {
            path.reject("groups and width_per_group are for blocks with a bottleneck");
        }
        let (deep, conv1) = match options.stem {
            Stem::Conv7 => (Vec::new(), conv(&names.stem, [options.in_channels, 64], 7, 2, 1)),
            Stem::Deep([first, second]) => {
                let layer = |index: usize, channels: [i64; 2], stride| ConvNorm {
                    conv: conv(&names.stem / index, channels, 3, stride, 1),
                    norm: BatchNorm2d::new(&names.stem / (index + 1), channels[1]),
                };
                let deep =
                    vec![layer(0, [options.in_channels, first], 2), layer(3, [first, second], 1)];
                (deep, conv(&names.stem / 6, [second, 64], 3, 1, 1))
            }
        };
        let stem = ConvNorm { conv: conv1, norm: BatchNorm2d::new(&names.norm, 64) };
        let mut channels = [64; 5];
        let mut inputs = 64;
        let (mut stages, mut steps) = (Vec::with_capacity(4), Vec::new());
        for (number, (stage, blocks)) in names.stages.iter().zip(options.blocks).enumerate() {
            let planes = 64 << number;
            steps.extend((0..blocks).map(|index| format!("{}.{index}", names.steps[number])));
            let blocks = (0..blocks).map(|index| {
                let stride = if index == 0 && number > 0 { 2 } else { 1 };
                let block = Block::new(&(stage / index), inputs, planes, stride, options);
                inputs = block.outputs;
                block
            });
            stages.push(blocks.collect());
            channels[number + 1] = inputs;
        }
        Self { deep, stem, stages, row: path.stages(steps), channels }
    }

    /// Draws the convolutions a second time, as torchvision and timm do after the layers' default initialisation: from
    /// a normal distribution with the fan-out. In their order, a seed gives the same model.
    fn redraw(&self, path: &ParamPath<'_>, options: ResNetOptions) {
        let blocks = || self.stages.iter().flatten();
        let stem = self.deep.iter().chain([&self.stem]).map(|layer| &layer.conv);
        for convolution in stem.chain(blocks().flat_map(Block::convolutions)) {
            redraw(path, convolution.weight(), Redraw::KaimingFanOut);
        }
        if options.zero_init_residual {
            for weight in blocks().filter_map(|block| block.last_norm().weight()) {
                redraw(path, weight, Redraw::Constant(0.0));
            }
        }
    }
}

impl ResNetBody {
    /// Returns the name of the first convolution, below the body's path.
    pub(crate) fn first_convolution(&self) -> &'static str {
        if self.deep.is_empty() { "0" } else { "0.0" }
    }
}

impl Module<&Tensor> for ResNetBody {
    type Output = Tensor;

    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        self.run(images, None)
    }
}

/// Residual block: two or three convolutions, each with its normalisation, and a shortcut.
#[derive(Debug)]
struct Block {
    unit: Unit,
    body: Vec<ConvNorm>,
    /// Projection of the shortcut, if it cannot be the input itself.
    downsample: Option<ConvNorm>,
    /// `true` if the size of the shortcut is halved by average pooling.
    average: bool,
    outputs: i64,
}

impl Block {
    fn new(
        path: &ParamPath<'_>,
        inputs: i64,
        planes: i64,
        stride: i64,
        options: ResNetOptions,
    ) -> Self {
        let layer = |number: usize, channels: [i64; 2], kernel, stride, groups| ConvNorm {
            conv: conv(path / format_args!("conv{number}"), channels, kernel, stride, groups),
            norm: BatchNorm2d::new(path / format_args!("bn{number}"), channels[1]),
        };
        let ResNetOptions { bottleneck, groups, width_per_group, average_shortcut, .. } = options;
        let (body, outputs) = if bottleneck {
            let width = (planes.saturating_mul(width_per_group) / 64).saturating_mul(groups);
            let outputs = planes * 4;
            let body = vec![
                layer(1, [inputs, width], 1, 1, 1),
                layer(2, [width, width], 3, stride, groups),
                layer(3, [width, outputs], 1, 1, 1),
            ];
            (body, outputs)
        } else {
            let body =
                vec![layer(1, [inputs, planes], 3, stride, 1), layer(2, [planes, planes], 3, 1, 1)];
            (body, planes)
        };
        let downsample = (stride != 1 || inputs != outputs).then(|| {
            let path = path / "downsample";
            // In timm, the pooling has an index of its own before the convolution.
            let (index, stride) = if average_shortcut { (1, 1) } else { (0, stride) };
            ConvNorm {
                conv: conv(&path / index, [inputs, outputs], 1, stride, 1),
                norm: BatchNorm2d::new(&path / (index + 1), outputs),
            }
        });
        let average = average_shortcut && stride == 2;
        Self { unit: path.unit(), body, downsample, average, outputs }
    }

    fn convolutions(&self) -> impl Iterator<Item = &Conv2d> {
        self.body.iter().chain(&self.downsample).map(|layer| &layer.conv)
    }

    fn last_norm(&self) -> &BatchNorm2d {
        &self.body[self.body.len() - 1].norm
    }

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let (mut maps, input) = residual_inputs(input)?;
        let shortcut = match &self.downsample {
            Some(layer) if self.average => layer.forward(&average_halves(&input)?)?,
            Some(layer) => layer.forward(&input)?,
            None => input,
        };
        let last = self.body.len() - 1;
        for (index, layer) in self.body.iter().enumerate() {
            let shortcut = (index == last).then_some(&shortcut);
            maps = layer.forward_activated(&maps, shortcut, Activation::Relu)?;
        }
        Ok(maps)
    }
}
