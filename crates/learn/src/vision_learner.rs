//! Learners of pretrained bodies with new heads, as fastai's `vision_learner` and `unet_learner` make them.

use std::path::PathBuf;

use brigade_models::{
    Architecture, HeadOptions, Pretrained, ResNetOptions, TransferModel, UNet, UNetOptions,
};
use brigade_nn::Model;
use brigade_torch::{Error, Result};
use brigade_train::Accelerator;

use crate::learner::Learner;
use crate::loaders::Loaders;

/// Options of [`vision_learner`]: pretrained weights and the head.
#[derive(Clone, Debug, Default)]
pub struct VisionOptions {
    /// Path of a weights file of the whole architecture, from torchvision, timm or fastai, of which the body's weights
    /// are loaded. Defaults to `None`: the body keeps its random initial values, and nothing is frozen.
    pub weights: Option<PathBuf>,
    /// Options of the head. Defaults to fastai's head for the data's classes.
    pub head: Option<HeadOptions>,
    /// Number of outputs of the model, for data without classes. Defaults to the number of classes.
    pub outputs: Option<i64>,
}

/// Makes a Learner of an architecture's body with a new head, with parameter groups for discriminative learning rates.
/// With pretrained weights, everything but the head is frozen.
///
/// ```no_run
/// use brigade_learn::data::{ImageLoaders, Resize};
/// use brigade_metrics::ErrorRate;
/// use brigade_learn::{VisionOptions, vision_learner};
/// use brigade_models::Architecture;
/// use brigade_train::Accelerator;
///
/// let accelerator = Accelerator::new()?;
/// let data = ImageLoaders::from_folder("photos").item_transforms(Resize::new(224)).loaders(&accelerator, 64)?;
/// let options = VisionOptions { weights: Some("resnet34.pth".into()), ..Default::default() };
/// let mut learner =
///     vision_learner(&accelerator, data, &Architecture::resnet34(), options)?.metrics(ErrorRate);
/// learner.fine_tune(1, ())?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`brigade_torch::ErrorKind::InvalidArgument`] for data without classes if no number of outputs is given; when
/// the weights do not fit.
pub fn vision_learner(
    accelerator: &Accelerator,
    data: Loaders,
    architecture: &Architecture,
    options: VisionOptions,
) -> Result<Learner> {
    let head = match (options.head, outputs(&data, options.outputs)) {
        (Some(head), _) => head,
        (None, Some(outputs)) => HeadOptions::new(outputs),
        (None, None) => return Err(no_outputs("vision_learner")),
    };
    let mut model = Model::new(|path| TransferModel::new(path, architecture, &head))?;
    let pretrained = options.weights.is_some();
    if let Some(weights) = options.weights {
        Pretrained::new().load(&mut model, weights)?;
    }
    let groups = model.param_groups()?;
    let mut learner = Learner::new(accelerator, data, model)?.split_parameters(groups)?;
    if pretrained {
        learner.freeze()?;
    }
    Ok(learner)
}

/// Makes a Learner of a U-Net for segmentation around an encoder, with fastai's three parameter groups. With weights of
/// the encoder's classifier, the encoder is frozen.
///
/// # Errors
/// Returns the same errors as [`vision_learner`].
pub fn unet_learner(
    accelerator: &Accelerator,
    data: Loaders,
    encoder: &ResNetOptions,
    options: Option<UNetOptions>,
    weights: Option<PathBuf>,
) -> Result<Learner> {
    let options = match (options, outputs(&data, None)) {
        (Some(options), _) => options,
        (None, Some(outputs)) => UNetOptions::new(outputs),
        (None, None) => return Err(no_outputs("unet_learner")),
    };
    let mut model = Model::new(|path| UNet::new(path, *encoder, options))?;
    let pretrained = weights.is_some();
    if let Some(weights) = weights {
        Pretrained::new().load(&mut model, weights)?;
    }
    let groups = model.param_groups()?;
    let mut learner = Learner::new(accelerator, data, model)?.split_parameters(groups)?;
    if pretrained {
        learner.freeze()?;
    }
    Ok(learner)
}

fn outputs(data: &Loaders, given: Option<i64>) -> Option<i64> {
    given.or_else(|| i64::try_from(data.class_names()?.len()).ok())
}

fn no_outputs(what: &str) -> Error {
    Error::invalid_argument(format!(
        "{what}: the number of the model's outputs is unknown, because the data have no classes; give the number"
    ))
}
