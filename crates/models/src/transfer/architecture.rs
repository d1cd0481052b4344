//! Architectures whose bodies can be used for transfer learning.

use std::ops::Range;

use brigade_nn::{ParamPath, Sequential};

use crate::classifier::is_below;
use crate::convnext::{self, ConvNeXtBody};
use crate::vit::{self, VisionTransformerBody};
use crate::xresnet::{self, XResNetBody};
use crate::{
    ConvNeXtOptions, ResNetBody, ResNetOptions, Stem, VisionTransformerOptions, XResNetOptions,
    resnet,
};

/// An architecture whose body can be used in a [`crate::TransferModel`]. It can be parsed from its name.
///
/// ```
/// use brigade_models::Architecture;
///
/// let architecture: Architecture = "resnet34".parse()?;
/// assert_eq!(architecture, Architecture::resnet34());
/// let error = "resnet35".parse::<Architecture>().unwrap_err().to_string();
/// assert!(error.starts_with("unknown architecture `resnet35`; expected one of resnet18, resnet34,"));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Architecture {
    /// torchvision's residual networks. The body has the names of fastai's `create_body`, such as `0.4.0.conv1` for
    /// `layer1.0.conv1`.
    ResNet(ResNetOptions),
    /// timm's residual networks: the body has timm's names below `0.model`, as in fastai for the name of a timm
    /// architecture.
    TimmResNet(ResNetOptions),
    /// fastai's own residual networks, with their names below `0`.
    XResNet(XResNetOptions),
    /// torchvision's ConvNeXt, with its `features` below `0.0`.
    ConvNeXt(ConvNeXtOptions),
    /// timm's vision transformers. The body has timm's names below `0.model`. The head has no pooling.
    VisionTransformer(VisionTransformerOptions),
}

/// Body that was built.
pub(super) struct Body {
    pub(super) layers: Sequential,
    /// Number of channels of the body's feature maps, or size of its feature vectors.
    pub(super) features: i64,
    /// `true` if the outputs are feature maps `[n, features, h, w]`, `false` for vectors `[n, features]`.
    pub(super) gives_maps: bool,
}

/// Name below one of the two parts of a transfer model.
pub(super) enum Place {
    Body(String),
    /// Name in the architecture's own classifier, which the body lacks.
    Head(String),
}

impl Architecture {
    /// Sets the number of channels of the images (fastai's `n_in`). [`crate::Pretrained`] computes the first
    /// convolution's weights for it.
    ///
    /// ```
    /// use brigade_models::{Architecture, HeadOptions, TransferModel};
    /// use brigade_nn::Model;
    /// use tch::{Kind, Tensor};
    ///
    /// let grey = Architecture::resnet18().in_channels(1);
    /// let model = Model::new(|path| TransferModel::new(path, &grey, &HeadOptions::new(10)))?;
    /// let images = Tensor::zeros([2, 1, 64, 64], (Kind::Float, model.device()));
    /// assert_eq!(model.forward(&images)?.size(), [2, 10]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[must_use]
    pub fn in_channels(mut self, channels: i64) -> Self {
        match &mut self {
            Self::ResNet(options) | Self::TimmResNet(options) => options.in_channels = channels,
            Self::XResNet(options) => options.in_channels = channels,
            Self::ConvNeXt(options) => options.in_channels = channels,
            Self::VisionTransformer(options) => options.in_channels = channels,
        }
        self
    }

    pub(super) fn is_timms(&self) -> bool {
        matches!(self, Self::TimmResNet(_) | Self::VisionTransformer(_))
    }

    pub(super) fn body(&self, path: &ParamPath<'_>) -> Body {
        let row = Sequential::new();
        let (layers, features) = match self {
            Self::ResNet(options) => {
                let body = ResNetBody::new(path, *options);
                let [.., features] = body.channels();
                (row.add(body), features)
            }
            Self::TimmResNet(options) => {
                let body = ResNetBody::with_torchvisions_names(&(path / "model"), *options);
                let [.., features] = body.channels();
                (row.add(body), features)
            }
            Self::XResNet(options) => {
                let body = XResNetBody::new(path, options);
                let features = body.outputs;
                (row.add(body), features)
            }
            Self::ConvNeXt(options) => {
                let body = ConvNeXtBody::new(&(path / 0), *options);
                let features = body.outputs;
                (row.add(body), features)
            }
            Self::VisionTransformer(options) => {
                let body = VisionTransformerBody::new(&(path / "model"), *options);
                (row.add(body), options.width)
            }
        };
        Body { layers, features, gives_maps: !matches!(self, Self::VisionTransformer(_)) }
    }

    /// Returns the name of the first convolution, below the body.
    pub(super) fn first_convolution(&self) -> &'static str {
        match self {
            Self::ResNet(ResNetOptions { stem: Stem::Conv7, .. }) => "0",
            Self::ResNet(_) | Self::XResNet(_) => "0.0",
            Self::TimmResNet(ResNetOptions { stem: Stem::Conv7, .. }) => "model.conv1",
            Self::TimmResNet(_) => "model.conv1.0",
            Self::ConvNeXt(_) => "0.0.0",
            Self::VisionTransformer(_) => "model.patch_embed.proj",
        }
    }

    /// Returns the place of a parameter of the whole architecture, or `None` if the architecture has no parameter of
    /// that name.
    pub(super) fn place(&self, name: &str) -> Option<Place> {
        match self {
            Self::ResNet(_) | Self::TimmResNet(_) if is_below("fc", name) => {
                Some(Place::Head(name.to_owned()))
            }
            Self::ResNet(_) => resnet::name_in_body(name).map(Place::Body),
            Self::TimmResNet(_) => Some(Place::Body(format!("model.{name}"))),
            Self::XResNet(options) => {
                let head = (options.layers.len() + 7).to_string();
                let name = xresnet::renamed(name, &head).unwrap_or_else(|| name.to_owned());
                Some(if is_below(&head, &name) { Place::Head(name) } else { Place::Body(name) })
            }
            Self::ConvNeXt(_) => {
                let name = convnext::renamed(name).unwrap_or_else(|| name.to_owned());
                Some(match name.strip_prefix("features.") {
                    Some(rest) => Place::Body(format!("0.{rest}")),
                    None => Place::Head(name),
                })
            }
            Self::VisionTransformer(_) => {
                let name = vit::renamed(name).unwrap_or_else(|| name.to_owned());
                let body = format!("model.{name}");
                Some(if is_below("head", &name) { Place::Head(name) } else { Place::Body(body) })
            }
        }
    }

    /// Returns the parameter groups of fastai's `splitter` for the body: names of modules below it; an empty name is
    /// the body itself. fastai defines groups for plain residual networks only; any other body is one group.
    pub(super) fn body_groups(&self) -> Vec<Vec<String>> {
        let layers = |numbers: Range<usize>| numbers.map(|number| number.to_string()).collect();
        match self {
            Self::ResNet(options) if options.groups == 1 && options.width_per_group == 64 => {
                vec![layers(0..6), layers(6..8)]
            }
            Self::XResNet(options)
                if options.groups == 1
                    && options.reduction.is_none()
                    && options.layers.len() == 4 =>
            {
                vec![layers(0..3), layers(3..8)]
            }
            _ => vec![vec![String::new()]],
        }
    }
}
