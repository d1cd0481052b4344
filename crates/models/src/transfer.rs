//! Transfer learning: a pretrained body with a new head.

mod architecture;

use std::borrow::Borrow;

use brigade_nn::{LayerGroups, Module, Named, ParamPath, Sequential};
use brigade_torch::Result;
use tch::Tensor;

pub use self::architecture::Architecture;
use self::architecture::Place;
use crate::classifier::is_below;
use crate::{Head, HeadOptions, ImageClassifier, InputChannels, vit};

/// The body of an architecture with a new [`Head`], as fastai's `vision_learner` builds it: from images
/// `[n, channels, h, w]` to `[n, classes]`.
///
/// The body is below `0` and the head below `1`, under the names of fastai's `learn.model.state_dict()`.
/// [`Pretrained`](crate::Pretrained) loads such files, and the weights of the whole architecture from torchvision, timm
/// or fastai. Both parts have forward hooks under their names; that of `0` gets the feature maps of the body.
/// [`LayerGroups`] returns fastai's groups, for freezing and learning rates.
///
/// ```
/// use brigade_models::{Architecture, HeadOptions, Pretrained, TransferModel};
/// use brigade_nn::Model;
///
/// # let folder = tempfile::tempdir()?;
/// # std::env::set_current_dir(&folder)?;
/// # Model::new(brigade_models::resnet18(1000))?.save_weights("resnet18.safetensors")?;
/// let head = HeadOptions::new(37);
/// let mut model = Model::new(|path| TransferModel::new(path, &Architecture::resnet18(), &head))?;
/// let report = Pretrained::new().load(&mut model, "resnet18.safetensors")?;
/// assert_eq!(report.loaded, 120);
/// let groups = model.param_groups()?;
/// assert_eq!(groups[2], ["1.2.weight", "1.2.bias", "1.4.weight", "1.6.weight", "1.6.bias", "1.8.weight"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TransferModel {
    layers: Sequential,
    architecture: Architecture,
    /// Full names of the two parts.
    body: String,
    head: String,
}

impl TransferModel {
    /// Registers all layers below the path.
    pub fn new<'a>(
        path: impl Borrow<ParamPath<'a>>,
        architecture: &Architecture,
        head: &HeadOptions,
    ) -> Self {
        let (body_path, head_path) = (path.borrow() / 0, path.borrow() / 1);
        let body = architecture.body(&body_path);
        let options = HeadOptions { pool: head.pool && body.gives_maps, ..head.clone() };
        let head = Head::new(&head_path, body.features, &options);
        Self {
            layers: Sequential::new()
                .add(Named::new(&body_path, body.layers))
                .add(Named::new(&head_path, head)),
            architecture: architecture.clone(),
            body: body_path.name().to_owned(),
            head: head_path.name().to_owned(),
        }
    }
}

impl ImageClassifier for TransferModel {
    fn classifier(&self) -> String {
        self.head.clone()
    }

    fn first_convolution(&self) -> String {
        format!("{}.{}", self.body, self.architecture.first_convolution())
    }

    /// Returns fastai's rule, or timm's for architectures of timm, for which fastai uses timm.
    fn input_channels(&self) -> InputChannels {
        if self.architecture.is_timms() { InputChannels::Repeat } else { InputChannels::ZeroPad }
    }

    /// Converts the names of the whole architecture.
    fn renamed(&self, name: &str) -> Option<String> {
        Some(match self.architecture.place(name)? {
            Place::Body(name) => format!("{}.{name}", self.body),
            Place::Head(name) => format!("{}.{name}", self.head),
        })
    }

    fn adapted(&self, name: &str, values: &Tensor, shape: &[i64]) -> Result<Option<Tensor>> {
        let positions = matches!(self.architecture, Architecture::VisionTransformer(_))
            && is_below(&self.body, name)
            && name.ends_with(".pos_embed");
        if positions { vit::resized_positions(values, shape) } else { Ok(None) }
    }
}

impl LayerGroups for TransferModel {
    /// Returns fastai's groups: the body and the head, and for plain [`crate::ResNet`]s and [`crate::XResNet`]s the
    /// body in two groups.
    fn layer_groups(&self) -> Vec<Vec<String>> {
        let parts = self.architecture.body_groups();
        let body = parts.into_iter().map(|group| {
            let full = |name: String| match name.as_str() {
                "" => self.body.clone(),
                name => format!("{}.{name}", self.body),
            };
            group.into_iter().map(full).collect()
        });
        body.chain([vec![self.head.clone()]]).collect()
    }
}

impl Module<&Tensor> for TransferModel {
    type Output = Tensor;

    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        self.layers.forward(images)
    }
}
