//! Residual networks, as torchvision has them.

use std::borrow::Borrow;

use brigade_nn::{
    BatchNorm2d, Conv2d, Conv2dOptions, Flatten, Linear, MaxPool2d, Module, ParamPath, Result,
};
use tch::{Device, Kind, Tensor};

/// A residual network (He et al., 2016): from images `[n, 3, h, w]` to logits `[n, classes]`. Any size
/// of image will do from 32 × 32 on.
///
/// Names, first values (for a seed) and the place of the stride (the 3 x 3 convolution of a
/// bottleneck, "v1.5") are those of
/// [torchvision.models](https://docs.pytorch.org/vision/stable/models/resnet.html), so its weights files
/// load.
///
/// ```
/// use brigade_models::ResNet;
/// use brigade_nn::{Kind, Model, Tensor};
///
/// let model = Model::new(|path| ResNet::resnet18(path, 1000))?;
/// assert_eq!(model.num_parameters(), 11_689_512);
/// let images = Tensor::zeros([2, 3, 64, 64], (Kind::Float, model.device()));
/// assert_eq!(model.forward(&images)?.size(), [2, 1000]);
/// # Ok::<(), brigade_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct ResNet {
    conv1: Conv2d,
    bn1: BatchNorm2d,
    /// `layer1` to `layer4`.
    stages: Vec<Vec<Block>>,
    fc: Linear,
}

/// The size of a [`ResNet`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResNetOptions {
    /// Blocks of each of the four stages.
    pub blocks: [usize; 4],
    /// Blocks of three convolutions (1 x 1, 3 x 3, 1 x 1 with four times the channels) instead of two.
    pub bottleneck: bool,
    /// Groups of the 3 x 3 convolution in a bottleneck; 1. ResNeXt has 32.
    pub groups: i64,
    /// Channels of the 3 x 3 convolution in a bottleneck, for each group and 64 channels of the stage;
    /// 64. Wide networks have 128.
    pub width_per_group: i64,
    /// The last normalisation of each block starts at 0, so that blocks start as the identity
    /// (Goyal et al., 2017); false.
    pub zero_init_residual: bool,
}

impl ResNetOptions {
    /// With blocks of two convolutions.
    #[must_use]
    pub fn basic(blocks: [usize; 4]) -> Self {
        Self {
            blocks,
            bottleneck: false,
            groups: 1,
            width_per_group: 64,
            zero_init_residual: false,
        }
    }

    /// With blocks of three convolutions.
    #[must_use]
    pub fn bottleneck(blocks: [usize; 4]) -> Self {
        Self { bottleneck: true, ..Self::basic(blocks) }
    }
}

impl ResNet {
    /// 18 layers: 11.7 million parameters with 1000 classes.
    pub fn resnet18<'a>(path: impl Borrow<ParamPath<'a>>, classes: i64) -> Self {
        Self::new(path, classes, ResNetOptions::basic([2, 2, 2, 2]))
    }

    /// 34 layers: 21.8 million parameters with 1000 classes.
    pub fn resnet34<'a>(path: impl Borrow<ParamPath<'a>>, classes: i64) -> Self {
        Self::new(path, classes, ResNetOptions::basic([3, 4, 6, 3]))
    }

    /// 50 layers: 25.6 million parameters with 1000 classes.
    pub fn resnet50<'a>(path: impl Borrow<ParamPath<'a>>, classes: i64) -> Self {
        Self::new(path, classes, ResNetOptions::bottleneck([3, 4, 6, 3]))
    }

    /// 101 layers: 44.5 million parameters with 1000 classes.
    pub fn resnet101<'a>(path: impl Borrow<ParamPath<'a>>, classes: i64) -> Self {
        Self::new(path, classes, ResNetOptions::bottleneck([3, 4, 23, 3]))
    }

    /// 152 layers: 60.2 million parameters with 1000 classes.
    pub fn resnet152<'a>(path: impl Borrow<ParamPath<'a>>, classes: i64) -> Self {
        Self::new(path, classes, ResNetOptions::bottleneck([3, 8, 36, 3]))
    }

    /// Registers all layers below the path.
    pub fn new<'a>(path: impl Borrow<ParamPath<'a>>, classes: i64, options: ResNetOptions) -> Self {
        let path = path.borrow();
        let plain = options.groups == 1 && options.width_per_group == 64;
        if !options.bottleneck && !plain {
            path.reject("groups and width_per_group are for blocks with a bottleneck");
        }
        let conv1 = conv(&(path / "conv1"), [3, 64], 7, 2, 1);
        let bn1 = BatchNorm2d::new(path / "bn1", 64);
        let mut channels = 64;
        let mut stages = Vec::with_capacity(4);
        for (number, blocks) in (1..).zip(options.blocks) {
            let stage = path / format_args!("layer{number}");
            let planes = 32 << number;
            let blocks = (0..blocks).map(|index| {
                let stride = if index == 0 && number > 1 { 2 } else { 1 };
                let block = Block::new(&(&stage / index), channels, planes, stride, options);
                channels = block.outputs;
                block
            });
            stages.push(blocks.collect());
        }
        let fc = Linear::new(path / "fc", channels, classes);
        let model = Self { conv1, bn1, stages, fc };
        model.draw(path, options);
        model
    }

    /// torchvision draws the convolutions a second time, after all layers have been drawn by their
    /// defaults, from a normal distribution with the fan-out. In its order, a seed gives its model.
    fn draw(&self, path: &ParamPath<'_>, options: ResNetOptions) {
        let blocks = || self.stages.iter().flatten();
        let convolutions =
            std::iter::once(&self.conv1).chain(blocks().flat_map(Block::convolutions));
        for convolution in convolutions {
            if let Err(error) = tch::no_grad(|| kaiming_normal(convolution.weight())) {
                path.reject(format_args!("the first values of a convolution: {error}"));
            }
        }
        if options.zero_init_residual {
            for weight in blocks().filter_map(|block| block.last_norm().weight()) {
                if let Err(error) = tch::no_grad(|| weight.shallow_clone().f_zero_()) {
                    path.reject(format_args!("the first values of a normalisation: {error}"));
                }
            }
        }
    }
}

impl Module<&Tensor> for ResNet {
    type Output = Tensor;

    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let mut maps = self.bn1.forward_relu(&self.conv1.forward(images)?, None)?;
        maps = MaxPool2d { kernel: [3, 3], stride: [2, 2], padding: [1, 1] }.forward(&maps)?;
        for block in self.stages.iter().flatten() {
            maps = block.forward(&maps)?;
        }
        self.fc.forward(&Flatten.forward(&maps.f_adaptive_avg_pool2d([1, 1])?)?)
    }
}

/// Two or three convolutions, each with its normalisation, beside a shortcut.
#[derive(Debug)]
struct Block {
    body: Vec<(Conv2d, BatchNorm2d)>,
    /// Where the shortcut cannot be the input itself.
    downsample: Option<(Conv2d, BatchNorm2d)>,
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
        let layer = |number: usize, channels, kernel, stride, groups| {
            let name = format!("conv{number}");
            let convolution = conv(&(path / name), channels, kernel, stride, groups);
            (convolution, BatchNorm2d::new(path / format_args!("bn{number}"), channels[1]))
        };
        let ResNetOptions { bottleneck, groups, width_per_group, .. } = options;
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
            let convolution = conv(&(&path / 0), [inputs, outputs], 1, stride, 1);
            (convolution, BatchNorm2d::new(path / 1, outputs))
        });
        Self { body, downsample, outputs }
    }

    fn convolutions(&self) -> impl Iterator<Item = &Conv2d> {
        self.body.iter().chain(&self.downsample).map(|(convolution, _)| convolution)
    }

    fn last_norm(&self) -> &BatchNorm2d {
        &self.body[self.body.len() - 1].1
    }

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let shortcut = match &self.downsample {
            Some((convolution, norm)) => norm.forward(&convolution.forward(input)?)?,
            None => input.shallow_clone(),
        };
        let last = self.body.len() - 1;
        let mut maps = input.shallow_clone();
        for (index, (convolution, norm)) in self.body.iter().enumerate() {
            let shortcut = (index == last).then_some(&shortcut);
            maps = norm.forward_relu(&convolution.forward(&maps)?, shortcut)?;
        }
        Ok(maps)
    }
}

/// Without a bias, which the normalisation after it would take away, and with the padding that keeps the
/// size at stride 1.
fn conv(
    path: &ParamPath<'_>,
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

/// `kaiming_normal_(mode="fan_out", nonlinearity="relu")`: mean 0, deviation √2 / √(out · kernel…).
fn kaiming_normal(weight: &Tensor) -> Result<(), tch::TchError> {
    if !weight.defined() {
        // The path has refused the parameter, and the model will say so.
        return Ok(());
    }
    let shape = weight.size();
    let fan_out = shape[0] * shape[2..].iter().product::<i64>();
    let std = 2f64.sqrt() / (fan_out as f64).sqrt();
    // Drawn in 32 bits on the CPU, as `Init` draws, so that a seed gives one model in every kind.
    let drawn = Tensor::f_empty(&shape, (Kind::Float, Device::Cpu))?.f_normal_(0.0, std)?;
    weight.shallow_clone().f_copy_(&drawn)
}
