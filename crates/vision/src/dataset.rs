//! Datasets of images with labels.

use std::fmt;

use brigade_data::{BatchContext, BatchedDataset, DataError};
use brigade_images::SampleReader;
use brigade_torch::{Result, from_vec};
use parking_lot::Mutex;
use tch::Tensor;

use crate::decode::DecodeOptions;
use crate::labels::Labelled;
use crate::source::ImageSource;
use crate::transforms::{Compose, Phase, ToTensor};
use crate::{CacheOptions, ImageSamples, OnBroken, VisionError};

/// The methods of datasets whose field `samples` is an [`ImageSamples`], written once.
macro_rules! sample_methods {
    () => {
        /// Sets the transforms of each image. Defaults to none. Transforms that move pixels are also applied to masks
        /// and points.
        #[must_use]
        pub fn transforms(mut self, transforms: Compose) -> Self {
            self.samples = self.samples.transforms(transforms);
            self
        }

        /// Sets the phase: random transforms draw their parameters in [`Phase::Train`] (the default), and are
        /// deterministic in [`Phase::Valid`].
        #[must_use]
        pub fn phase(mut self, phase: Phase) -> Self {
            self.samples = self.samples.phase(phase);
            self
        }

        /// Sets the format of the tensor of a batch's images. Defaults to [`ToTensor::f32`].
        #[must_use]
        pub fn to_tensor(mut self, to_tensor: ToTensor) -> Self {
            self.to_tensor = to_tensor;
            self
        }

        /// Sets how to handle images that cannot be read, or whose mask or points cannot be read or transformed.
        /// Defaults to [`OnBroken::Fail`].
        #[must_use]
        pub fn on_broken(mut self, policy: OnBroken) -> Self {
            self.samples = self.samples.on_broken(policy);
            self
        }

        /// Caches decoded images in a file from the first epoch on. Masks are decoded each time. Defaults to no cache.
        #[must_use]
        pub fn cache(mut self, options: CacheOptions) -> Self {
            self.samples = self.samples.cache(options);
            self
        }

        /// Returns the indices of the images that could not be read so far, ascending. Only images that this process
        /// has tried to read are included.
        #[must_use]
        pub fn broken(&self) -> Vec<usize> {
            self.samples.broken()
        }

        /// Returns the number of samples of an epoch that were replaced by another image in this process. The number is
        /// also logged when the next epoch begins or the dataset is dropped.
        #[must_use]
        pub fn skipped(&self, epoch: u64) -> usize {
            self.samples.skipped(epoch)
        }
    };
}
pub(crate) use sample_methods;

/// Dataset of the images of a source with their labels, as batches `([n, 3, h, w], [n])`: images in the format of
/// [`ToTensor`], labels as `i64`.
///
/// A loader's threads read, decode and transform images. A thread writes each image directly into the memory of the
/// batch, in one pass from the bytes of the resized image to the values of the tensor. Random choices in a sample
/// depend only on the loader's seed, the epoch and the sample's index, so that batches are the same with any number of
/// threads and ranks, and after a restart.
///
/// ```
/// use std::borrow::Cow;
///
/// use brigade_data::DataLoader;
/// use brigade_vision::source::ImageSource;
/// use brigade_vision::transforms::{Compose, Normalize, RandomResizedCrop, ToTensor};
/// use brigade_vision::{ImageDataset, ImageError};
///
/// /// The same picture, again and again.
/// struct Repeated(Vec<u8>, usize);
///
/// impl ImageSource for Repeated {
///     fn len(&self) -> usize {
///         self.1
///     }
///
///     fn read(&self, _: usize, buffer: &mut Vec<u8>) -> Result<(), ImageError> {
///         buffer.clone_from(&self.0);
///         Ok(())
///     }
///
///     fn name(&self, index: usize) -> Cow<'_, str> {
///         format!("picture {index}").into()
///     }
/// }
///
/// # let mut bmp = b"BM\x3a\0\0\0\0\0\0\0\x36\0\0\0\x28\0\0\0\x01\0\0\0\x01\0\0\0\x01\0\x18\0".to_vec();
/// # bmp.resize(54, 0);
/// # bmp.extend([1, 2, 3, 0]);
/// let pictures = Repeated(bmp, 100);
/// let dataset = ImageDataset::new(pictures, (0..100).collect())?
///     .transforms(Compose::new().then(RandomResizedCrop::new(32)))
///     .to_tensor(ToTensor::f32().normalize(Normalize::IMAGENET));
/// for batch in &DataLoader::new(dataset).batch_size(20).shuffle(true).threads(2) {
///     let (images, labels) = batch?.into_data();
///     assert_eq!((images.size(), labels.size()), (vec![20, 3, 32, 32], vec![20]));
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ImageDataset<S> {
    pub(crate) samples: ImageSamples<S>,
    pub(crate) to_tensor: ToTensor,
    pub(crate) readers: Readers,
}

/// Memory and decoders of threads that are not making a batch. A loader starts new threads in each epoch, which reuse
/// them.
#[derive(Default)]
pub(crate) struct Readers(Mutex<Vec<SampleReader>>);

impl Readers {
    pub(crate) fn take<S: ImageSource>(&self, samples: &ImageSamples<S>) -> SampleReader {
        let idle = self.0.lock().pop();
        idle.unwrap_or_else(|| samples.reader())
    }

    pub(crate) fn give_back(&self, reader: SampleReader) {
        self.0.lock().push(reader);
    }
}

impl<S: ImageSource> ImageDataset<S> {
    /// Creates a dataset of a source with a label for each image, without transforms, in the training phase, with `f32`
    /// tensors. `From` converts a [`Labelled`] source to a dataset.
    ///
    /// # Errors
    /// Fails if the numbers of labels and images differ.
    pub fn new(source: S, labels: Vec<i64>) -> Result<Self> {
        Ok(ImageSamples::new(source, labels).map_err(VisionError::from)?.into())
    }
}

impl<S: ImageSource> From<Labelled<S>> for ImageDataset<S> {
    fn from(images: Labelled<S>) -> Self {
        ImageSamples::from(images).into()
    }
}

impl<S> From<ImageSamples<S>> for ImageDataset<S> {
    fn from(samples: ImageSamples<S>) -> Self {
        Self { samples, to_tensor: ToTensor::default(), readers: Readers::default() }
    }
}

impl<S> ImageDataset<S> {
    sample_methods!();

    /// Sets the options of the decoder. Defaults to [`DecodeOptions::default`].
    #[must_use]
    pub fn decode(mut self, options: DecodeOptions) -> Self {
        self.samples = self.samples.decode(options);
        self
    }

    /// Allows the decoder to scale images down if a resize follows that makes them smaller, like Pillow's
    /// `reducing_gap` and `draft`: to no less than `gap` times the size after the resize. `gap` is at least 1. With
    /// `None`, the decoder does not scale, and pixels equal Pillow's. Defaults to `None`.
    ///
    /// Only JPEG can be scaled while it is decoded, to 1/2, 1/4 or 1/8, which saves a part of the work after entropy
    /// decoding: useful for photographs of many times the size of the batch's images, and useless for those of 500 x
    /// 375 and crops of 160. The result is a little smoother or sharper than without; by Pillow's documentation, the
    /// difference cannot be seen with a gap of 3, and in most cases not with a gap of 2.
    #[must_use]
    pub fn reducing_gap(mut self, gap: Option<f64>) -> Self {
        self.samples = self.samples.reducing_gap(gap);
        self
    }

    /// Returns the source of the images.
    #[must_use]
    pub fn source(&self) -> &S {
        self.samples.source()
    }

    /// Returns the label of each image.
    #[must_use]
    pub fn labels(&self) -> &[i64] {
        self.samples.labels()
    }
}

impl<S: ImageSource> BatchedDataset for ImageDataset<S> {
    type Batch = (Tensor, Tensor);

    fn num_samples(&self) -> usize {
        self.labels().len()
    }

    fn batch(&self, indices: &[usize], context: &BatchContext) -> Result<Self::Batch> {
        let len = self.labels().len();
        if let Some(&index) = indices.iter().find(|index| **index >= len) {
            return Err(DataError::Index { index, len }.into());
        }
        self.samples.begin_epoch(context.epoch).map_err(VisionError::from)?;
        let mut reader = self.readers.take(&self.samples);
        let mut images = self.to_tensor.batch(indices.len())?;
        let mut labels: Vec<i64> = Vec::with_capacity(indices.len());
        for &index in indices {
            let seed = context.sample_seed(index);
            let read = self
                .samples
                .read(&mut reader, index, context.epoch, seed)
                .map_err(VisionError::from)?;
            let (image, flips) = reader.image();
            images.push(image, flips, &self.source().name(read))?;
            labels.extend(self.labels().get(read).copied());
        }
        // After an error its memory is freed instead.
        self.readers.give_back(reader);
        let rows = labels.len() as i64;
        Ok((images.into_tensor()?, from_vec(labels, &[rows])?))
    }
}

impl<S> fmt::Debug for ImageDataset<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImageDataset")
            .field("samples", &self.samples)
            .field("to_tensor", &self.to_tensor)
            .finish_non_exhaustive()
    }
}
