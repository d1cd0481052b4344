//! Datasets of images with points as targets.

use std::fmt;

use brigade_data::{BatchContext, BatchedDataset, DataError};
use brigade_images::ImageError;
use brigade_rank_env::text::counted;
use brigade_torch::{Error, Result, from_vec};
use tch::Tensor;

use crate::dataset::{Readers, sample_methods};
use crate::source::ImageSource;
use crate::transforms::{Compose, Phase, ToTensor};
use crate::{CacheOptions, ImageSamples, OnBroken, VisionError};

/// Dataset of images with the same number of points each, such as the corners of an eye. Batches are `([n, 3, h, w],
/// [n, points, 2])`: images in the format of [`ToTensor`], points as `f32` `(x, y)` from -1 at the left and upper side
/// of the transformed image to 1 at the right and lower one, as in fastai's `PointScaler`.
///
/// Every transform that moves pixels is also applied to the points. Points outside of the transformed image are outside
/// of -1 to 1. A [`cache`](Self::cache) is an error at the first batch, because it does not contain the original size
/// of an image, to which the points refer.
///
/// ```
/// use brigade_data::BatchedDataset;
/// use brigade_vision::PointDataset;
/// use brigade_vision::source::ImageFiles;
/// use brigade_vision::transforms::{Compose, RandomHorizontalFlip, Resize};
/// # let folder = tempfile::tempdir()?;
/// # let mut bmp = b"BM\x3a\0\0\0\0\0\0\0\x36\0\0\0\x28\0\0\0\x01\0\0\0\x01\0\0\0\x01\0\x18\0".to_vec();
/// # bmp.resize(58, 0);
/// # std::fs::write(folder.path().join("face.bmp"), bmp)?;
/// let files = ImageFiles::find(folder.path())?; // one image of one pixel
/// let faces = PointDataset::new(files, vec![vec![[0.25, 1.0]]])?
///     .transforms(Compose::new().then(Resize::squish(8)).then(RandomHorizontalFlip::new(1.0)));
/// let (images, points) = faces.batch(&[0], &Default::default())?;
/// assert_eq!((images.size(), points.size()), (vec![1, 3, 8, 8], vec![1, 1, 2]));
/// assert_eq!(Vec::<f32>::try_from(points.flatten(0, 2))?, [0.5, 1.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct PointDataset<S> {
    samples: ImageSamples<S>,
    points: Vec<Vec<[f64; 2]>>,
    to_tensor: ToTensor,
    readers: Readers,
}

impl<S: ImageSource> PointDataset<S> {
    /// Creates a dataset of images and the points of each, as `[x, y]` in pixels from the upper left corner of the
    /// file's image.
    ///
    /// # Errors
    /// Fails if the numbers of lists and images differ, or the lists differ in their number of points.
    pub fn new(images: S, points: Vec<Vec<[f64; 2]>>) -> Result<Self> {
        let count = points.first().map_or(0, Vec::len);
        if let Some(index) = points.iter().position(|list| list.len() != count) {
            return Err(Error::invalid_argument(format!(
                "{} has {}, the first image {count}; each needs as many",
                images.name(index),
                counted(points[index].len(), "point")
            )));
        }
        if points.len() != images.len() {
            return Err(Error::invalid_argument(format!(
                "found {} of points for {}; give one for each",
                counted(points.len(), "list"),
                counted(images.len(), "image")
            )));
        }
        let labels = vec![0; images.len()];
        Ok(Self {
            samples: ImageSamples::new(images, labels).map_err(VisionError::from)?,
            points,
            to_tensor: ToTensor::default(),
            readers: Readers::default(),
        })
    }
}

impl<S> PointDataset<S> {
    sample_methods!();
}

impl<S: ImageSource> BatchedDataset for PointDataset<S> {
    type Batch = (Tensor, Tensor);

    fn num_samples(&self) -> usize {
        self.points.len()
    }

    fn batch(&self, indices: &[usize], context: &BatchContext) -> Result<Self::Batch> {
        let len = self.points.len();
        if let Some(&index) = indices.iter().find(|index| **index >= len) {
            return Err(DataError::Index { index, len }.into());
        }
        self.samples.begin_epoch(context.epoch).map_err(VisionError::from)?;
        let mut reader = self.readers.take(&self.samples);
        let mut images = self.to_tensor.batch(indices.len())?;
        let mut points: Vec<f32> = Vec::new();
        for &index in indices {
            let seed = context.sample_seed(index);
            let mut plan = None;
            let also = |_, size: Option<_>| {
                let size = size.ok_or_else(|| {
                    ImageError::InvalidArgument(
                        "an image from a cache has lost the size that its points are given for; leave \
                         out the cache"
                            .into(),
                    )
                })?;
                plan = Some(self.samples.plan(size, seed)?);
                Ok(())
            };
            let read = self
                .samples
                .read_with(&mut reader, index, context.epoch, seed, also)
                .map_err(VisionError::from)?;
            let (image, flips) = reader.image();
            images.push(image, flips, &self.samples.source().name(read))?;
            let Some(plan) = plan else { continue };
            let size = plan.output_size();
            for &point in &self.points[read] {
                let [x, y] = plan.map_point(point);
                points.push((2.0 * x / f64::from(size.width) - 1.0) as f32);
                points.push((2.0 * y / f64::from(size.height) - 1.0) as f32);
            }
        }
        self.readers.give_back(reader);
        let count = self.points.first().map_or(0, Vec::len);
        Ok((images.into_tensor()?, from_vec(points, &[indices.len() as i64, count as i64, 2])?))
    }
}

impl<S> fmt::Debug for PointDataset<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PointDataset")
            .field("samples", &self.samples)
            .field("to_tensor", &self.to_tensor)
            .finish_non_exhaustive()
    }
}
