//! Datasets of images with a mask of classes each.

use std::fmt;
use std::path::{Path, PathBuf};

use brigade_data::{BatchContext, BatchedDataset, DataError};
use brigade_images::decode::Decoder;
use brigade_images::{ImageError, Size};
use brigade_rank_env::text::counted;
use brigade_torch::{Error, Result, from_vec};
use tch::Tensor;

use crate::dataset::{Readers, sample_methods};
use crate::decode::DecodeOptions;
use crate::source::{ImageFiles, ImageSource};
use crate::transforms::{Compose, Phase, ToTensor};
use crate::{CacheOptions, Image, ImageSamples, OnBroken, VisionError};

/// Dataset of images with a mask each, for segmentation. Batches are `([n, 3, h, w], [n, h, w])`: images in the format
/// of [`ToTensor`], masks as the `i64` class of each pixel.
///
/// A mask is an image file whose pixels are the numbers of classes: grey, or with a palette, whose colours do not
/// matter (`Decoder::decode_mask`). Every transform that moves pixels is also applied to the mask, by the nearest
/// pixel; other transforms do not change it. Pixels from outside of the image get the class
/// [`ignore_index`](Self::ignore_index), which a loss ignores.
///
/// ```
/// use brigade_data::BatchedDataset;
/// use brigade_vision::source::ImageFiles;
/// use brigade_vision::transforms::{Compose, RandomHorizontalFlip, Resize};
/// use brigade_vision::{SegmentationDataset, Size};
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// # let mut bmp = b"BM\x3a\0\0\0\0\0\0\0\x36\0\0\0\x28\0\0\0\x01\0\0\0\x01\0\0\0\x01\0\x18\0".to_vec();
/// # bmp.resize(54, 0);
/// # for part in ["images", "labels"] { std::fs::create_dir(folder.join(part))?; }
/// # std::fs::write(folder.join("images/street.bmp"), [&bmp[..], &[90, 80, 70, 0]].concat())?;
/// # std::fs::write(folder.join("labels/street_P.bmp"), [&bmp[..], &[5, 5, 5, 0]].concat())?;
///
/// // As CamVid has them: images/street.png with labels/street_P.png.
/// let images = ImageFiles::find(folder.join("images"))?;
/// let streets = SegmentationDataset::open(images, folder.join("labels"), |image| {
///     let name = image.file_stem().unwrap_or_default().to_string_lossy();
///     format!("{name}_P.bmp").into()
/// })?
/// .transforms(Compose::new().then(Resize::squish(8)).then(RandomHorizontalFlip::new(0.5)))
/// .classes(32);
/// let (images, masks) = streets.batch(&[0], &Default::default())?;
/// assert_eq!((images.size(), masks.size()), (vec![1, 3, 8, 8], vec![1, 8, 8]));
/// assert_eq!(masks.int64_value(&[0, 0, 0]), 5);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct SegmentationDataset<S, M> {
    samples: ImageSamples<S>,
    masks: M,
    to_tensor: ToTensor,
    decode: DecodeOptions,
    ignore_index: u8,
    classes: Option<u8>,
    readers: Readers,
}

impl<S: ImageSource, M: ImageSource> SegmentationDataset<S, M> {
    /// Creates a dataset of images and their masks, which have the same index in two sources.
    ///
    /// # Errors
    /// Fails if the numbers of masks and images differ.
    pub fn new(images: S, masks: M) -> Result<Self> {
        if images.len() != masks.len() {
            return Err(Error::invalid_argument(format!(
                "found {} for {}; give one for each",
                counted(masks.len(), "mask"),
                counted(images.len(), "image")
            )));
        }
        let labels = vec![0; images.len()];
        Ok(Self {
            samples: ImageSamples::new(images, labels).map_err(VisionError::from)?,
            masks,
            to_tensor: ToTensor::default(),
            decode: DecodeOptions::default(),
            ignore_index: 255,
            classes: None,
            readers: Readers::default(),
        })
    }
}

impl SegmentationDataset<ImageFiles, ImageFiles> {
    /// Creates a dataset of image files and the masks below the folder `masks`. The closure `path` maps the path of an
    /// image below its folder to the path of its mask below `masks`.
    ///
    /// # Errors
    /// Fails if a mask does not exist.
    pub fn open(
        images: ImageFiles,
        masks: impl AsRef<Path>,
        path: impl Fn(&Path) -> PathBuf,
    ) -> Result<Self> {
        let paths: Vec<PathBuf> = images.relative_paths().map(path).collect();
        let missing = paths.iter().position(|path| !masks.as_ref().join(path).is_file());
        if let Some(index) = missing {
            return Err(Error::invalid_argument(format!(
                "{} has no mask: {} is not there",
                images.name(index),
                masks.as_ref().join(&paths[index]).display()
            )));
        }
        Self::new(images, ImageFiles::new(masks.as_ref(), paths))
    }
}

impl<S, M> SegmentationDataset<S, M> {
    sample_methods!();

    /// Sets the options with which images and masks are decoded. Defaults to [`DecodeOptions::default`].
    #[must_use]
    pub fn decode(mut self, options: DecodeOptions) -> Self {
        self.samples = self.samples.decode(options.clone());
        self.decode = options;
        self
    }

    /// Sets the class of the mask's pixels that transforms add outside of the image, such as padding. Defaults to 255,
    /// which is also the class of borders in the masks of Pascal VOC. Pass it to the loss as `ignore_index`.
    #[must_use]
    pub fn ignore_index(mut self, class: u8) -> Self {
        self.ignore_index = class;
        self
    }

    /// Sets the number of classes, to check the masks: a mask with a pixel whose class is neither below this number nor
    /// [`ignore_index`](Self::ignore_index) is an error that names the mask. Defaults to no check.
    #[must_use]
    pub fn classes(mut self, count: u8) -> Self {
        self.classes = Some(count);
        self
    }

    /// Returns the source of the images.
    #[must_use]
    pub fn images(&self) -> &S {
        self.samples.source()
    }

    /// Returns the source of the masks.
    #[must_use]
    pub fn masks(&self) -> &M {
        &self.masks
    }
}

impl<S: ImageSource, M: ImageSource> BatchedDataset for SegmentationDataset<S, M> {
    type Batch = (Tensor, Tensor);

    fn num_samples(&self) -> usize {
        self.masks.len()
    }

    fn batch(&self, indices: &[usize], context: &BatchContext) -> Result<Self::Batch> {
        let len = self.masks.len();
        if let Some(&index) = indices.iter().find(|index| **index >= len) {
            return Err(DataError::Index { index, len }.into());
        }
        self.samples.begin_epoch(context.epoch).map_err(VisionError::from)?;
        let mut reader = self.readers.take(&self.samples);
        let mut images = self.to_tensor.batch(indices.len())?;
        let mut classes: Vec<i64> = Vec::new();
        let mut size = Size::new(0, 0);
        for &index in indices {
            let seed = context.sample_seed(index);
            let mut mask = None;
            let also = |image, size| {
                mask = Some(self.mask(image, size, seed)?);
                Ok(())
            };
            let read = self
                .samples
                .read_with(&mut reader, index, context.epoch, seed, also)
                .map_err(VisionError::from)?;
            let (image, flips) = reader.image();
            images.push(image, flips, &self.images().name(read))?;
            let mask = mask.ok_or_else(|| {
                Error::invalid_argument(format!(
                    "{} was read without its mask",
                    self.images().name(read)
                ))
            })?;
            if mask.size() != image.size() {
                return Err(
                    VisionError::from(self.sizes_differ(read, mask.size(), image.size())).into()
                );
            }
            size = mask.size();
            classes.extend(
                mask.pixels().as_chunks::<3>().0.iter().map(|[class, ..]| i64::from(*class)),
            );
        }
        self.readers.give_back(reader);
        let shape = [indices.len() as i64, size.height.into(), size.width.into()];
        Ok((images.into_tensor()?, from_vec(classes, &shape)?))
    }
}

impl<S: ImageSource, M: ImageSource> SegmentationDataset<S, M> {
    /// Decodes the mask of an image, whose size is given if it is known, and moves its pixels in the same way.
    fn mask(&self, index: usize, image: Option<Size>, seed: u64) -> Result<Image, ImageError> {
        let mut bytes = Vec::new();
        self.masks.read(index, &mut bytes)?;
        let name = self.masks.name(index);
        let mask = Decoder::new(self.decode.clone()).decode_mask(&name, &bytes)?;
        if let Some(count) = self.classes {
            let known = |class: u8| class < count || class == self.ignore_index;
            let wrong = mask.pixels().iter().position(|class| !known(*class));
            if let Some(place) = wrong {
                let (pixel, width) = (place / 3, mask.width() as usize);
                return Err(ImageError::InvalidArgument(format!(
                    "{name} has the class {} in column {}, row {}; announced were {} and {} for pixels without one",
                    mask.pixels()[place],
                    pixel % width,
                    pixel / width,
                    counted(count, "class"),
                    self.ignore_index
                )));
            }
        }
        if let Some(image) = image.filter(|image| *image != mask.size()) {
            return Err(self.sizes_differ(index, mask.size(), image));
        }
        self.samples.plan(mask.size(), seed)?.for_masks(self.ignore_index).apply(&mask)
    }

    fn sizes_differ(&self, index: usize, mask: Size, image: Size) -> ImageError {
        ImageError::InvalidArgument(format!(
            "the mask {} has {mask} pixels, its image {} has {image}",
            self.masks.name(index),
            self.images().name(index)
        ))
    }
}

impl<S, M> fmt::Debug for SegmentationDataset<S, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SegmentationDataset")
            .field("samples", &self.samples)
            .field("to_tensor", &self.to_tensor)
            .field("ignore_index", &self.ignore_index)
            .field("classes", &self.classes)
            .finish_non_exhaustive()
    }
}
