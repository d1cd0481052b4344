//! Items, targets and transforms as batches.

use std::fmt;

use brigade_data::{BatchContext, BatchedDataset};
use brigade_metrics::IGNORED;
use brigade_torch::{Error, Result, from_vec};
use brigade_vision::source::ImageFiles;
use brigade_vision::transforms::{Compose, Phase, ToTensor};
use brigade_vision::{CacheOptions, ImageDataset, OnBroken, PointDataset, SegmentationDataset};
use tch::Tensor;

use super::blocks::Targets;
use super::items::Items;

/// Value of a mask's pixel without a class, and of pixels outside of the mask.
const NO_CLASS: u8 = 255;

/// Options of reading samples.
#[derive(Clone, Debug)]
pub(super) struct Reading {
    pub(super) grey: bool,
    pub(super) transforms: Compose,
    pub(super) on_broken: OnBroken,
    pub(super) cache: Option<CacheOptions>,
}

impl Reading {
    pub(super) fn to_tensor(&self) -> ToTensor {
        // Bytes take a quarter of the memory of floats, until the images are on the device.
        if self.grey { ToTensor::u8().grey() } else { ToTensor::u8() }
    }
}

/// Images `u8` `[n, channels, h, w]` and targets.
pub(super) struct Samples {
    images: Images,
    /// Rows of numbers for an image dataset whose labels are indices of rows, with the number of columns.
    rows: Option<(Vec<f32>, usize)>,
}

enum Images {
    Labelled(ImageDataset<ImageFiles>),
    Masked(SegmentationDataset<ImageFiles, ImageFiles>),
    Pointed(PointDataset<ImageFiles>),
}

impl Samples {
    pub(super) fn new(
        items: &Items,
        targets: Targets,
        classes: usize,
        reading: &Reading,
        phase: Phase,
    ) -> Result<Self> {
        let source = items.source();
        let labelled = |labels| -> Result<Images> {
            let mut images = ImageDataset::new(source.clone(), labels)?
                .transforms(reading.transforms.clone())
                .phase(phase)
                .to_tensor(reading.to_tensor())
                .on_broken(reading.on_broken);
            if let Some(cache) = &reading.cache {
                images = images.cache(cache.clone());
            }
            Ok(Images::Labelled(images))
        };
        Ok(match targets {
            Targets::Classes(classes) => Self { images: labelled(classes)?, rows: None },
            Targets::Rows(rows, width) => {
                let numbers = (0..items.len() as i64).collect();
                Self { images: labelled(numbers)?, rows: Some((rows, width)) }
            }
            Targets::Points(points) => {
                if reading.cache.is_some() {
                    return Err(Error::invalid_argument(
                        "points are given for the size of the file's image, which a cache forgets; leave \
                         out .cache(…)",
                    ));
                }
                let images = PointDataset::new(source, points)?
                    .transforms(reading.transforms.clone())
                    .phase(phase)
                    .to_tensor(reading.to_tensor())
                    .on_broken(reading.on_broken);
                Self { images: Images::Pointed(images), rows: None }
            }
            Targets::Masks(masks) => {
                let masks = ImageFiles::new("", masks);
                let mut images = SegmentationDataset::new(source, masks)?
                    .transforms(reading.transforms.clone())
                    .phase(phase)
                    .to_tensor(reading.to_tensor())
                    .on_broken(reading.on_broken)
                    .ignore_index(NO_CLASS)
                    .classes(u8::try_from(classes).unwrap_or(NO_CLASS));
                if let Some(cache) = &reading.cache {
                    images = images.cache(cache.clone());
                }
                Self { images: Images::Masked(images), rows: None }
            }
        })
    }
}

impl BatchedDataset for Samples {
    type Batch = (Tensor, Tensor);

    fn num_samples(&self) -> usize {
        match &self.images {
            Images::Labelled(images) => images.num_samples(),
            Images::Masked(images) => images.num_samples(),
            Images::Pointed(images) => images.num_samples(),
        }
    }

    fn batch(&self, indices: &[usize], context: &BatchContext) -> Result<Self::Batch> {
        let (images, targets) = match &self.images {
            Images::Labelled(images) => images.batch(indices, context)?,
            Images::Pointed(images) => images.batch(indices, context)?,
            Images::Masked(images) => {
                let (images, masks) = images.batch(indices, context)?;
                let none = masks.f_eq(i64::from(NO_CLASS))?;
                let masks = masks.f_masked_fill(&none, IGNORED)?;
                (images, masks)
            }
        };
        let Some((rows, width)) = &self.rows else { return Ok((images, targets)) };
        // A broken image may have been replaced by another one, which has this row.
        let numbers = Vec::<i64>::try_from(&targets)?;
        let length = (*width).max(1);
        let mut picked = Vec::with_capacity(numbers.len() * length);
        for number in &numbers {
            let start = *number as usize * length;
            picked.extend_from_slice(rows.get(start..start + length).unwrap_or_default());
        }
        let shape = [numbers.len() as i64, *width as i64];
        let shape = if *width == 0 { &shape[..1] } else { &shape[..] };
        Ok((images, from_vec(picked, shape)?))
    }
}

impl fmt::Debug for Samples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Samples").field("samples", &self.num_samples()).finish_non_exhaustive()
    }
}
