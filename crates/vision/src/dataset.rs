//! Images and labels as batches.

mod broken;
mod cache;
mod pack;
mod raw;
mod reader;

use std::fmt;
use std::sync::{Mutex, OnceLock, PoisonError};

use brigade_data::{BatchContext, BatchedDataset, DataError, from_vec};
use brigade_torch::Tensor;

use self::broken::Broken;
use self::cache::Cache;
pub use self::cache::CacheOptions;
pub use self::pack::{PackReport, PackedImages, Packer};
use self::reader::Reader;
use crate::decode::DecodeOptions;
use crate::labels::Labelled;
use crate::source::{Hasher, ImageSource};
use crate::transforms::{Compose, Phase, Plan, Presize, ToTensor};
use crate::{Result, Size, VisionError};

/// What a data set does with an image that cannot be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnBroken {
    /// The batch is an error that names the image.
    #[default]
    Fail,
    /// The image's place is taken by the next one in the source that can be read, with its label;
    /// after the last comes the first. The rule knows nothing but the index, so all ranks agree, and
    /// so does a run that goes on.
    Skip,
}

/// Images of a source with their labels, as batches `([n, 3, h, w], [n])`: images as [`ToTensor`]
/// says, labels as `i64`.
///
/// A loader's threads read, decode and transform; a thread writes each image straight into the
/// memory of the batch, in one pass from the bytes of the resized image to the numbers of the
/// tensor. What is random in a sample follows from the loader's seed, the epoch and the sample's
/// index alone, so batches are the same with any number of threads and ranks, and after a restart.
///
/// ```
/// use std::borrow::Cow;
///
/// use brigade_data::DataLoader;
/// use brigade_vision::source::ImageSource;
/// use brigade_vision::transforms::{Compose, Normalize, RandomResizedCrop, ToTensor};
/// use brigade_vision::{ImageDataset, Result};
///
/// /// The same picture, again and again.
/// struct Repeated(Vec<u8>, usize);
///
/// impl ImageSource for Repeated {
///     fn len(&self) -> usize {
///         self.1
///     }
///
///     fn read(&self, _: usize, buffer: &mut Vec<u8>) -> Result<()> {
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
    source: S,
    labels: Vec<i64>,
    transforms: Compose,
    phase: Phase,
    to_tensor: ToTensor,
    decode: DecodeOptions,
    reducing_gap: Option<f64>,
    on_broken: OnBroken,
    broken: Broken,
    cache: Option<CacheOptions>,
    /// The transforms as they are used, known when the first batch is asked for.
    stages: OnceLock<Stages>,
    /// Memory and decoders of threads that make no batch at the moment. A loader starts new threads
    /// in each epoch, which find what the last ones left.
    idle: Mutex<Vec<Reader>>,
}

/// The transforms, and how many of them a cache has the results of.
#[derive(Debug)]
struct Stages {
    transforms: Compose,
    cached: Option<(Cache, usize)>,
}

impl<S: ImageSource> ImageDataset<S> {
    /// Makes a data set of a source with a label for each image: without transforms, for training,
    /// as `f32`. Of a [`Labelled`] source `From` makes one.
    ///
    /// # Errors
    /// When there are not as many labels as images.
    pub fn new(source: S, labels: Vec<i64>) -> Result<Self> {
        if source.len() != labels.len() {
            return Err(VisionError::InvalidArgument(format!(
                "a data set of {} images needs as many labels, found {}",
                source.len(),
                labels.len()
            )));
        }
        Ok(Self::with(source, labels))
    }
}

impl<S: ImageSource> From<Labelled<S>> for ImageDataset<S> {
    fn from(images: Labelled<S>) -> Self {
        let (source, labels, _) = images.into_parts();
        Self::with(source, labels)
    }
}

impl<S> ImageDataset<S> {
    fn with(source: S, labels: Vec<i64>) -> Self {
        Self {
            source,
            labels,
            transforms: Compose::new(),
            phase: Phase::Train,
            to_tensor: ToTensor::default(),
            decode: DecodeOptions::default(),
            reducing_gap: None,
            on_broken: OnBroken::Fail,
            broken: Broken::default(),
            cache: None,
            stages: OnceLock::new(),
            idle: Mutex::new(Vec::new()),
        }
    }

    /// Sets what is done to each image.
    #[must_use]
    pub fn transforms(mut self, transforms: Compose) -> Self {
        self.transforms = transforms;
        self
    }

    /// Sets whether transforms draw, or do the same each time.
    #[must_use]
    pub fn phase(mut self, phase: Phase) -> Self {
        self.phase = phase;
        self
    }

    /// Sets what the images of a batch are as a tensor.
    #[must_use]
    pub fn to_tensor(mut self, to_tensor: ToTensor) -> Self {
        self.to_tensor = to_tensor;
        self
    }

    /// Sets how images are decoded.
    #[must_use]
    pub fn decode(mut self, options: DecodeOptions) -> Self {
        self.decode = options;
        self
    }

    /// Lets the decoder scale images down where a resize follows that makes them smaller, as
    /// Pillow's `reducing_gap` and `draft` do: to no less than `gap` times what the resize makes, at
    /// least 1. `None`, the default, never does, and pixels equal Pillow's.
    ///
    /// Only JPEG can be scaled while it is decoded, to 1/2, 1/4 or 1/8, which leaves out a part of
    /// the work that comes after its entropy decoding: worth it for photographs of many times the
    /// size of the batch's images, and nothing for those of 500 x 375 and crops of 160. The result
    /// is a little smoother or sharper than without; Pillow calls a gap of 2 indistinguishable in
    /// most cases and 3 in all.
    #[must_use]
    pub fn reducing_gap(mut self, gap: Option<f64>) -> Self {
        self.reducing_gap = gap;
        self
    }

    /// Sets what is done about images that cannot be read.
    #[must_use]
    pub fn on_broken(mut self, policy: OnBroken) -> Self {
        self.on_broken = policy;
        self
    }

    /// Keeps decoded images in a file from the first epoch on.
    #[must_use]
    pub fn cache(mut self, options: CacheOptions) -> Self {
        self.cache = Some(options);
        self
    }

    /// Returns the source.
    #[must_use]
    pub fn source(&self) -> &S {
        &self.source
    }

    /// Returns the label of each image.
    #[must_use]
    pub fn labels(&self) -> &[i64] {
        &self.labels
    }

    /// Returns the images that could not be read so far, in their order. Only those that this
    /// process was asked for.
    #[must_use]
    pub fn broken(&self) -> Vec<usize> {
        self.broken.images()
    }

    /// Returns how many samples of an epoch another image took the place of in this process. The
    /// count is also logged once the next epoch begins or the data set is dropped.
    #[must_use]
    pub fn skipped(&self, epoch: u64) -> usize {
        self.broken.skipped(epoch)
    }
}

impl<S: ImageSource> BatchedDataset for ImageDataset<S> {
    type Batch = (Tensor, Tensor);

    fn num_samples(&self) -> usize {
        self.labels.len()
    }

    fn batch(&self, indices: &[usize], context: &BatchContext) -> Result<Self::Batch, DataError> {
        let len = self.labels.len();
        if let Some(&index) = indices.iter().find(|index| **index >= len) {
            return Err(DataError::Index { index, len });
        }
        // Not the fault of an image that might be skipped.
        self.stages()?;
        self.broken.begin(context.epoch);
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut reader = idle.unwrap_or_else(|| Reader::new(&self.decode));
        let mut images = self.to_tensor.batch(indices.len())?;
        let mut labels: Vec<i64> = Vec::with_capacity(indices.len());
        for &index in indices {
            let seed = context.sample_seed(index);
            let read = self.sample(&mut reader, index, context.epoch, seed)?;
            let (image, flips) = reader.image();
            images.push(image, flips, &self.source.name(read))?;
            labels.extend(self.labels.get(read).copied());
        }
        // After an error its memory is given back to the system instead.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(reader);
        let rows = labels.len() as i64;
        Ok((images.into_tensor()?, from_vec(labels, &[rows])?))
    }
}

impl<S: ImageSource> ImageDataset<S> {
    /// Leaves the image of the sample in the reader and returns which one it is.
    fn sample(&self, reader: &mut Reader, index: usize, epoch: u64, seed: u64) -> Result<usize> {
        if self.on_broken == OnBroken::Fail {
            return self.image(reader, index, seed).map(|()| index);
        }
        let mut first_error = None;
        for image in (index..self.labels.len()).chain(0..index) {
            if self.broken.is_known(image) {
                continue;
            }
            match self.image(reader, image, seed) {
                Ok(()) => {
                    if image != index {
                        self.broken.count(epoch);
                    }
                    return Ok(image);
                }
                // Not the image's fault.
                Err(error @ VisionError::Torch(_)) => return Err(error),
                Err(error) => {
                    self.broken.add(image, &self.source.name(image), &error);
                    first_error.get_or_insert(error);
                }
            }
        }
        Err(first_error.unwrap_or_else(|| {
            VisionError::InvalidArgument(format!(
                "none of the {} images can be read; the log names the reason for each",
                self.labels.len()
            ))
        }))
    }

    /// Leaves an image in the reader, transformed.
    fn image(&self, reader: &mut Reader, index: usize, seed: u64) -> Result<()> {
        let Stages { transforms, cached } = self.stages()?;
        let Some((cache, fixed)) = cached else {
            return self.decoded(reader, index, |size| transforms.plan(size, self.phase, seed));
        };
        let rest = |size| transforms.plan_part(*fixed..usize::MAX, size, self.phase, seed);
        if reader.transform_cached(cache, index, rest)? {
            return Ok(());
        }
        self.decoded(reader, index, |size| {
            transforms.plan_part(0..*fixed, size, self.phase, seed)
        })?;
        reader.keep_and_transform(cache, index, rest)
    }

    /// Leaves an image in the reader, decoded and transformed by a plan for its size.
    fn decoded(
        &self,
        reader: &mut Reader,
        index: usize,
        plan: impl FnOnce(Size) -> Result<Plan>,
    ) -> Result<()> {
        self.source.read(index, reader.buffer())?;
        reader.transform(&self.source.name(index), self.reducing_gap, plan)
    }

    /// Returns the transforms, and the cache, which is opened once.
    fn stages(&self) -> Result<&Stages> {
        if let Some(stages) = self.stages.get() {
            return Ok(stages);
        }
        let mut transforms = self.transforms.clone();
        let mut cached = None;
        if let Some(options) = &self.cache {
            if let (0, Some(side)) = (transforms.fixed(self.phase), options.presize_side()) {
                transforms = transforms.before(Presize(side));
            }
            let fixed = transforms.fixed(self.phase);
            let mut key = Hasher::new("cache");
            key.bytes(self.source.fingerprint()?.as_bytes());
            key.bytes(transforms.describe(fixed).as_bytes());
            let rest = format!("{:?} {:?} {:?}", self.phase, self.decode, self.reducing_gap);
            key.bytes(rest.as_bytes());
            let key = key.finish();
            cached = Some((Cache::open(options, key, self.source.len())?, fixed));
        }
        Ok(self.stages.get_or_init(|| Stages { transforms, cached }))
    }
}

impl<S> fmt::Debug for ImageDataset<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImageDataset")
            .field("images", &self.labels.len())
            .field("transforms", &self.transforms)
            .field("phase", &self.phase)
            .field("to_tensor", &self.to_tensor)
            .finish_non_exhaustive()
    }
}
