//! fastai's U-Net with a residual network as encoder.

use std::borrow::Borrow;
use std::ops::Range;

use brigade_nn::{BatchNorm2d, Conv2d, Conv2dOptions, LayerGroups, Module, ParamPath, Unit};
use brigade_torch::Result;
use tch::Tensor;

use crate::classifier::is_below;
use crate::init::{Redraw, redraw, redraw_norm};
use crate::resnet::name_in_body;
use crate::{ImageClassifier, InputChannels, ResNetBody, ResNetOptions};

/// U-Net for segmentation: fastai's `DynamicUnet` with the body of a residual network as encoder, as `unet_learner`
/// builds it, from images `[n, channels, h, w]` to logits per pixel `[n, classes, h, w]`. Images may have any size from
/// 32 × 32 on.
///
/// Each block of the decoder doubles the size by a pixel shuffle, concatenates the encoder's feature maps of that size,
/// and has two convolutions; the last block concatenates the image itself. Names are those of
/// [fastai.vision.models.unet](https://docs.fast.ai/vision.models.unet.html), the encoder's below `layers.0`, and
/// initial values have its distributions.
///
/// ```
/// use brigade_models::{ResNetOptions, UNet, UNetOptions};
/// use brigade_nn::Model;
/// use tch::{Kind, Tensor};
///
/// let encoder = ResNetOptions::basic([1, 1, 1, 1]);
/// let model = Model::new(|path| UNet::new(path, encoder, UNetOptions::new(21)))?;
/// let images = Tensor::zeros([1, 3, 40, 56], (Kind::Float, model.device()));
/// assert_eq!(model.forward(&images)?.size(), [1, 21, 40, 56]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct UNet {
    encoder: ResNetBody,
    norm: BatchNorm2d,
    middle: [Conv2d; 2],
    blocks: Vec<Block>,
    shuffle: Shuffle,
    cross: Option<[Conv2d; 2]>,
    head: Conv2d,
    /// Names of the encoder's and the decoder's numbered layers, and of the head.
    names: Names,
}

#[derive(Debug)]
struct Names {
    layers: String,
    first_convolution: String,
    head: String,
}

/// Options of [`UNet`], with fastai's names and defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UNetOptions {
    /// Number of classes of the pixels.
    pub classes: i64,
    /// Smooths each pixel shuffle but the last one by 2 x 2 average pooling (`blur`). Defaults to `false`.
    pub blur: bool,
    /// Concatenates the image to the last feature maps (`last_cross`). Defaults to `true`.
    pub last_cross: bool,
}

impl UNetOptions {
    /// Returns fastai's default options for a number of classes.
    #[must_use]
    pub fn new(classes: i64) -> Self {
        Self { classes, blur: false, last_cross: true }
    }
}

impl UNet {
    /// Registers all layers below the path.
    pub fn new<'a>(
        path: impl Borrow<ParamPath<'a>>,
        encoder: ResNetOptions,
        options: UNetOptions,
    ) -> Self {
        let path = &(path.borrow() / "layers");
        let layers = path.name().to_owned();
        let image_channels = encoder.in_channels;
        let encoder = ResNetBody::new(path / 0, encoder);
        let first_convolution = format!("{}.{}", (path / 0).name(), encoder.first_convolution());
        let channels = encoder.channels();
        let top = channels[4];
        let norm = BatchNorm2d::new(path / 1, top);
        redraw_norm(path, norm.bias());
        let middle = path / 3;
        let middle = [
            conv(&(&middle / 0 / 0), [top, top * 2], 3),
            conv(&(&middle / 1 / 0), [top * 2, top], 3),
        ];
        middle.iter().for_each(|conv| draw_normal(path, conv));

        let mut inputs = top;
        let mut blocks = Vec::with_capacity(4);
        for (number, &side) in channels[..4].iter().rev().enumerate() {
            let is_last = number == 3;
            let block = Block::new(&(path / (4 + number)), [inputs, side], is_last, options.blur);
            inputs = block.outputs;
            blocks.push(block);
        }
        let shuffle = Shuffle::new(&(path / 8), inputs, inputs, false);
        let mut number = 10;
        let cross = options.last_cross.then(|| {
            inputs += image_channels;
            let block = path / 11 / "convpath";
            let cross = [
                conv(&(&block / 0 / 0), [inputs, inputs], 3),
                conv(&(&block / 1 / 0), [inputs, inputs], 3),
            ];
            cross.iter().for_each(|conv| draw_normal(path, conv));
            number = 12;
            cross
        });
        let head = path / number / 0;
        let names = Names { layers, first_convolution, head: head.name().to_owned() };
        let head = conv(&head, [inputs, options.classes], 1);
        if let Some(bias) = head.bias() {
            redraw(path, bias, Redraw::Normal(0.01));
        }
        Self { encoder, norm, middle, blocks, shuffle, cross, head, names }
    }
}

impl ImageClassifier for UNet {
    fn classifier(&self) -> String {
        self.names.head.clone()
    }

    fn first_convolution(&self) -> String {
        self.names.first_convolution.clone()
    }

    /// Returns `true` for all parameters except the encoder's, whose weights may come from a classifier's file.
    fn in_head(&self, name: &str) -> bool {
        let layers = &self.names.layers;
        is_below(layers, name) && !is_below(&format!("{layers}.0"), name)
    }

    fn input_channels(&self) -> InputChannels {
        InputChannels::ZeroPad
    }

    /// Converts torchvision's names of the encoder.
    fn renamed(&self, name: &str) -> Option<String> {
        if is_below("fc", name) {
            return Some(format!("{}.{name}", self.names.head));
        }
        Some(format!("{}.0.{}", self.names.layers, name_in_body(name)?))
    }
}

impl LayerGroups for UNet {
    /// Groups the layers as fastai's `_resnet_split` does: the encoder's stem and first two stages, its last two, and
    /// the decoder.
    fn layer_groups(&self) -> Vec<Vec<String>> {
        let name = |number: usize| format!("{}.{number}", self.names.layers);
        let encoder =
            |numbers: Range<usize>| numbers.map(|number| format!("{}.{number}", name(0))).collect();
        vec![encoder(0..6), encoder(6..8), (1..13).map(name).collect()]
    }
}

impl Module<&Tensor> for UNet {
    type Output = Tensor;

    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let [stem, first, second, third, last] = self.encoder.features(images)?;
        let mut maps = self.norm.forward_relu(&last, None)?;
        for conv in &self.middle {
            maps = conv.forward(&maps)?.f_relu()?;
        }
        for (block, side) in self.blocks.iter().zip([third, second, first, stem]) {
            maps = block
                .unit
                .run_on(&maps, |maps| block.forward(maps, &side.f_to_device(maps.device())?))?;
        }
        maps = resized(&self.shuffle.forward(&maps)?, images)?;
        if let Some([first, second]) = &self.cross {
            // The image may have another type than the feature maps, because of autocast.
            let images = images.f_to_device(maps.device())?.f_to_kind(maps.kind())?;
            let both = [maps.shallow_clone(), images];
            let joined = Tensor::f_cat(&both, 1)?;
            let branch = second.forward(&first.forward(&joined)?.f_relu()?)?;
            maps = branch.f_add(&joined)?.f_relu()?;
        }
        self.head.forward(&maps)
    }
}

/// Decoder block: doubles the size and concatenates the encoder's feature maps.
#[derive(Debug)]
struct Block {
    unit: Unit,
    shuffle: Shuffle,
    norm: BatchNorm2d,
    convs: [Conv2d; 2],
    outputs: i64,
}

impl Block {
    fn new(path: &ParamPath<'_>, [inputs, side]: [i64; 2], is_last: bool, blur: bool) -> Self {
        let shuffle = Shuffle::new(&(path / "shuf"), inputs, inputs / 2, blur);
        let norm = BatchNorm2d::new(path / "bn", side);
        redraw_norm(path, norm.bias());
        let joined = inputs / 2 + side;
        let outputs = if is_last { joined / 2 } else { joined };
        let convs = [
            conv(&(path / "conv1" / 0), [joined, outputs], 3),
            conv(&(path / "conv2" / 0), [outputs, outputs], 3),
        ];
        convs.iter().for_each(|conv| draw_normal(path, conv));
        Self { unit: path.unit(), shuffle, norm, convs, outputs }
    }

    fn forward(&self, input: &Tensor, side: &Tensor) -> Result<Tensor> {
        let larger = resized(&self.shuffle.forward(input)?, side)?;
        let side = self.norm.forward(side)?;
        let mut maps = Tensor::f_cat(&[larger, side], 1)?.f_relu()?;
        for conv in &self.convs {
            maps = conv.forward(&maps)?.f_relu()?;
        }
        Ok(maps)
    }
}

/// fastai's `PixelShuffle_ICNR`: a 1 x 1 convolution to four times the channels, which become 2 x 2 pixels (Shi et al.,
/// 2016). The initial weights of the four are equal, to avoid checkerboard artifacts (Aitken et al., 2017).
#[derive(Debug)]
struct Shuffle {
    conv: Conv2d,
    blur: bool,
}

impl Shuffle {
    fn new(path: &ParamPath<'_>, inputs: i64, outputs: i64, blur: bool) -> Self {
        let conv = conv(&(path / 0 / 0), [inputs, outputs * 4], 1);
        redraw(path, conv.weight(), Redraw::Icnr);
        if let Some(bias) = conv.bias() {
            redraw(path, bias, Redraw::Constant(0.0));
        }
        Self { conv, blur }
    }

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let larger = self.conv.forward(input)?.f_relu()?.f_pixel_shuffle(2)?;
        if !self.blur {
            return Ok(larger);
        }
        // Equal to replication_pad2d with 1 at the left and at the top, whose backward on a GPU is not deterministic.
        let left = Tensor::f_cat(&[&larger.f_narrow(3, 0, 1)?, &larger], 3)?;
        let padded = Tensor::f_cat(&[&left.f_narrow(2, 0, 1)?, &left], 2)?;
        Ok(padded.f_avg_pool2d([2, 2], [1, 1], [0, 0], false, true, None::<i64>)?)
    }
}

/// Resizes maps to the size of `like` by nearest-neighbour interpolation, if the sizes differ.
fn resized(maps: &Tensor, like: &Tensor) -> Result<Tensor> {
    let (wanted, size) = (like.size(), maps.size());
    if wanted[2..] == size[2..] {
        return Ok(maps.shallow_clone());
    }
    Ok(maps.f_upsample_nearest2d(&wanted[2..], None, None)?)
}

/// Creates a convolution with a bias, and the padding that keeps the size. fastai initialises the layers with ReLU
/// again; the caller does that where it matters.
fn conv(path: &ParamPath<'_>, [inputs, outputs]: [i64; 2], kernel: i64) -> Conv2d {
    let options = Conv2dOptions { padding: [kernel / 2; 2], ..Conv2dOptions::default() };
    Conv2d::new(path, inputs, outputs, [kernel; 2], options)
}

fn draw_normal(path: &ParamPath<'_>, conv: &Conv2d) {
    redraw(path, conv.weight(), Redraw::KaimingFanIn);
    if let Some(bias) = conv.bias() {
        redraw(path, bias, Redraw::Constant(0.0));
    }
}
