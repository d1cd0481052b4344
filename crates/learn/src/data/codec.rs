//! Codec of single images: converts them to the model's input, shows batches as pictures, and can be serialized.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use brigade_data::{BatchContext, BatchedDataset};
use brigade_torch::{Error, Result};
use brigade_vision::augment::{Augment, Padding};
use brigade_vision::source::{ImageFiles, ImageSource};
use brigade_vision::transforms::{Compose, Normalize, Phase};
use brigade_vision::{ImageDataset, ImageError, OnBroken, Size};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::batch_transforms::BatchPipeline;
use super::blocks::TargetKind;
use super::item_transforms::{ItemTransform, Known, compose, written};
use super::pictures;
use super::samples::Reading;
use crate::loaders::{Item, ItemCodec, Picture};

/// Name of [`ImageCodec`] in an exported file.
const KIND: &str = "image";

/// The codec of single images: converts them to a model's input, as in validation, and shows batches.
#[derive(Clone)]
pub(super) struct ImageCodec {
    pub(super) grey: bool,
    pub(super) transforms: Vec<ItemTransform>,
    /// Transforms of validation batches.
    pub(super) batch: BatchPipeline,
    pub(super) target: TargetKind,
}

/// Serialized form of a codec.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    grey: bool,
    transforms: Vec<Known>,
    size: Option<Size>,
    padding: Padding,
    normalize: Option<Normalize>,
    target: TargetKind,
}

/// Makes a codec from its kind and its settings, as [`ItemCodec::describe`] returned them.
///
/// ```
/// use brigade_learn::data::{DataBlock, Normalize, Resize, categories, codec_from, images, parent_name};
/// # use brigade_learn::Item;
/// # use brigade_testkit::Photos;
/// # use brigade_train::Accelerator;
/// # let folder = tempfile::tempdir()?;
/// # Photos::new(2, 6).size(60, 45).write(folder.path())?;
/// # let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
/// let data = DataBlock::new(images(), categories())
///     .label(parent_name)
///     .item_transforms(Resize::new(32))
///     .batch_transforms(Normalize::imagenet())
///     .loaders(&accelerator, folder.path(), 4)?;
/// let (kind, settings) = data.item_codec().expect("a block of images has one").describe()?;
/// let codec = codec_from(kind, &settings)?; // in another process
/// let input = codec.encode(&Item::File(folder.path().join("val/disc/0000.jpg")))?;
/// assert_eq!(input[0].size(), [1, 3, 32, 32]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Fails when the kind is unknown, or the settings are invalid, such as those of a later version.
pub fn codec_from(kind: &str, settings: &serde_json::Value) -> Result<Arc<dyn ItemCodec>> {
    if kind != KIND {
        return Err(Error::invalid_argument(format!(
            "there is no codec of the kind {kind:?}; this version supports {KIND:?}"
        )));
    }
    let settings = Settings::deserialize(settings).map_err(|error| {
        Error::invalid_argument(format!(
            "the settings of a codec of images cannot be read: {error}"
        ))
    })?;
    let mut augment = Augment::new().padding(settings.padding);
    if let Some(size) = settings.size {
        augment = augment.size(size);
    }
    if let Some(normalize) = settings.normalize {
        augment = augment.normalize(normalize);
    }
    Ok(Arc::new(ImageCodec {
        grey: settings.grey,
        transforms: settings.transforms.into_iter().map(ItemTransform::from).collect(),
        batch: BatchPipeline { augment, functions: Vec::new() },
        target: settings.target,
    }))
}

impl ImageCodec {
    pub(super) fn compose(&self) -> Compose {
        compose(&self.transforms)
    }

    fn read<S: ImageSource>(&self, source: S) -> Result<Tensor> {
        let reading = Reading {
            grey: self.grey,
            transforms: self.compose(),
            on_broken: OnBroken::Fail,
            cache: None,
        };
        let images = ImageDataset::new(source, vec![0])?
            .transforms(reading.transforms.clone())
            .phase(Phase::Valid)
            .to_tensor(reading.to_tensor());
        let (images, _) = images.batch(&[0], &BatchContext::default())?;
        let drawn = self.batch.augment.draw(&[0], &images)?;
        self.batch.apply(&images, &drawn)
    }

    /// Returns a row without normalisation: `[channels, h, w]` with values from 0 to 1, on the CPU.
    fn image_of(&self, inputs: &[Tensor], row: i64) -> Result<Tensor> {
        let [images] = inputs else {
            return Err(Error::invalid_argument(format!(
                "a batch of images is one tensor, found {}",
                inputs.len()
            )));
        };
        let size = images.size();
        match size.as_slice() {
            &[rows, channels, _, _] if row < rows && matches!(channels, 1 | 3) => {}
            _ => {
                return Err(Error::invalid_argument(format!(
                    "row {row} of a tensor of shape {size:?} is not an image: expected [n, 1 or 3, h, w]"
                )));
            }
        }
        let image = images.f_select(0, row)?.f_detach()?.f_to_device(tch::Device::Cpu)?;
        let mut image = image.f_to_kind(Kind::Float)?;
        if let Some(Normalize { mean, std }) = self.batch.augment.normalization() {
            let constant = |values: &[f32; 3]| -> Result<Tensor> {
                let values = Tensor::f_from_slice(values)?.f_narrow(0, 0, image.size()[0])?;
                Ok(values.f_view([-1, 1, 1])?)
            };
            image = image.f_mul(&constant(&std)?)?.f_add(&constant(&mean)?)?;
        }
        Ok(image)
    }
}

impl ItemCodec for ImageCodec {
    fn encode(&self, item: &Item) -> Result<Vec<Tensor>> {
        let input = match item {
            Item::File(path) => self.read(ImageFiles::new("", [path]))?,
            Item::Bytes(bytes) => self.read(InMemory(bytes))?,
            Item::Text(_) => {
                return Err(Error::invalid_argument(
                    "these data are images: predict a file, its bytes or a tensor, not a text",
                ));
            }
            Item::Tensors(tensors) => {
                return tensors.iter().map(|tensor| Ok(tensor.f_unsqueeze(0)?)).collect();
            }
        };
        Ok(vec![input])
    }

    fn picture(&self, inputs: &[Tensor], row: i64) -> Result<Option<Picture>> {
        Ok(Some(pictures::of_image(&self.image_of(inputs, row)?)?))
    }

    fn show(
        &self,
        inputs: &[Tensor],
        target: Option<&Tensor>,
        row: i64,
        classes: Option<&[String]>,
    ) -> Result<Option<(Picture, String)>> {
        let mut picture = pictures::of_image(&self.image_of(inputs, row)?)?;
        let Some(target) = target else { return Ok(Some((picture, String::new()))) };
        let target = target.f_select(0, row)?.f_detach()?.f_to_device(tch::Device::Cpu)?;
        let text = match self.target {
            TargetKind::Mask => {
                pictures::blend(&mut picture, &target)?;
                String::new()
            }
            TargetKind::Points => {
                pictures::mark(&mut picture, &target)?;
                String::new()
            }
            kind => pictures::text(kind, &target, classes.unwrap_or_default())?,
        };
        Ok(Some((picture, text)))
    }

    fn describe(&self) -> Result<(&'static str, serde_json::Value)> {
        if !self.batch.functions.is_empty() {
            return Err(Error::invalid_argument(
                "a function among the batch transforms cannot be exported; use the transforms of \
                 brigade_vision, or make it a part of the model",
            ));
        }
        let augment = &self.batch.augment;
        let settings = Settings {
            grey: self.grey,
            transforms: written(&self.transforms)?,
            size: augment.output_size(),
            padding: augment.outside(),
            normalize: augment.normalization(),
            target: self.target,
        };
        let settings = serde_json::to_value(settings).map_err(Error::custom)?;
        Ok((KIND, settings))
    }
}

impl fmt::Debug for ImageCodec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImageCodec")
            .field("grey", &self.grey)
            .field("transforms", &self.transforms)
            .field("batch", &self.batch)
            .field("target", &self.target)
            .finish()
    }
}

/// An encoded image in memory.
struct InMemory<'a>(&'a [u8]);

impl ImageSource for InMemory<'_> {
    fn len(&self) -> usize {
        1
    }

    fn read(&self, _: usize, buffer: &mut Vec<u8>) -> Result<(), ImageError> {
        buffer.clear();
        buffer.extend_from_slice(self.0);
        Ok(())
    }

    fn name(&self, _: usize) -> Cow<'_, str> {
        "the image that was given".into()
    }
}
