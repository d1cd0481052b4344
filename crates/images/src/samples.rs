//! Labelled images of a source, decoded and transformed one at a time.

mod broken;
mod cache;
pub(crate) mod raw;
mod reader;

use std::cell::RefCell;
use std::fmt;
use std::sync::OnceLock;

use brigade_rank_env::text::counted;

use self::broken::Broken;
use self::cache::Cache;
pub use self::cache::CacheOptions;
pub use self::reader::SampleReader;
use crate::decode::DecodeOptions;
use crate::image_source::{Hasher, ImageSource};
use crate::labels::Labelled;
use crate::transforms::{Compose, Operation, Phase, Plan, Presize};
use crate::{ImageError, Result, Size};

/// Policy for images that cannot be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum OnBroken {
    /// The batch is an error that names the image.
    #[default]
    Fail,
    /// The image is replaced by the next one in the source that can be read, with its label; after the last image comes
    /// the first. The rule depends on the index only, so that all ranks agree, and so does a resumed run.
    Skip,
}

/// Labelled images of a source with their transforms, from which datasets read their samples. `brigade-vision` converts
/// them to tensors.
///
/// Random choices in a sample follow from its seed alone.
///
/// ```
/// use brigade_images::source::ImageFolder;
/// use brigade_images::transforms::{Compose, Resize};
/// use brigade_images::{ImageSamples, Size};
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// # let mut bmp = b"BM\x3a\0\0\0\0\0\0\0\x36\0\0\0\x28\0\0\0\x01\0\0\0\x01\0\0\0\x01\0\x18\0".to_vec();
/// # bmp.resize(58, 0);
/// # std::fs::create_dir(folder.join("dogs"))?;
/// # std::fs::write(folder.join("dogs/one.bmp"), bmp)?;
///
/// let samples = ImageSamples::from(ImageFolder::open(folder)?)
///     .transforms(Compose::new().then(Resize::shorter(8)));
/// samples.begin_epoch(0)?;
/// let mut reader = samples.reader();
/// samples.read(&mut reader, 0, 0, 1)?;
/// let (image, _still_to_mirror) = reader.image();
/// assert_eq!((image.size(), samples.labels()), (Size::from(8), &[0][..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct ImageSamples<S> {
    source: S,
    labels: Vec<i64>,
    transforms: Compose,
    phase: Phase,
    decode: DecodeOptions,
    reducing_gap: Option<f64>,
    on_broken: OnBroken,
    broken: Broken,
    cache: Option<CacheOptions>,
    /// The transforms in use, determined when the first sample is requested.
    stages: OnceLock<Stages>,
}

/// The transforms, the cache, and the number of transforms whose result it contains.
#[derive(Debug)]
struct Stages {
    transforms: Compose,
    cached: Option<(Cache, usize)>,
}

impl<S: ImageSource> ImageSamples<S> {
    /// Creates samples of a source with a label for each image, without transforms, in the training phase. `From`
    /// creates them from a [`Labelled`] source.
    ///
    /// # Errors
    /// Fails if the numbers of labels and images differ.
    pub fn new(source: S, labels: Vec<i64>) -> Result<Self> {
        if source.len() != labels.len() {
            return Err(ImageError::InvalidArgument(format!(
                "a data set of {} needs as many labels, found {}",
                counted(source.len(), "image"),
                labels.len()
            )));
        }
        Ok(Self::with(source, labels))
    }
}

impl<S: ImageSource> From<Labelled<S>> for ImageSamples<S> {
    fn from(images: Labelled<S>) -> Self {
        let (source, labels, _) = images.into_parts();
        Self::with(source, labels)
    }
}

impl<S> ImageSamples<S> {
    fn with(source: S, labels: Vec<i64>) -> Self {
        Self {
            source,
            labels,
            transforms: Compose::new(),
            phase: Phase::Train,
            decode: DecodeOptions::default(),
            reducing_gap: None,
            on_broken: OnBroken::Fail,
            broken: Broken::default(),
            cache: None,
            stages: OnceLock::new(),
        }
    }

    /// Sets the transforms of each image. Defaults to none.
    #[must_use]
    pub fn transforms(mut self, transforms: Compose) -> Self {
        self.transforms = transforms;
        self
    }

    /// Sets whether transforms choose at random ([`Phase::Train`], the default) or do the same each time
    /// ([`Phase::Valid`]).
    #[must_use]
    pub fn phase(mut self, phase: Phase) -> Self {
        self.phase = phase;
        self
    }

    /// Sets the options of the decoder.
    #[must_use]
    pub fn decode(mut self, options: DecodeOptions) -> Self {
        self.decode = options;
        self
    }

    /// Allows the decoder to scale images down if a resize follows that makes them smaller, like Pillow's
    /// `reducing_gap` and `draft`: to no less than `gap` times the size after the resize. `gap` is at least 1. With
    /// `None`, the decoder does not scale, and pixels equal Pillow's. Defaults to `None`.
    ///
    /// Only JPEG can be scaled while it is decoded, to 1/2, 1/4 or 1/8, which saves a part of the work after entropy
    /// decoding: useful for photographs of many times the size of the batch's images, and useless for those of 500 x
    /// 375 and crops of 160. The result is a little smoother or sharper than without; Pillow calls a gap of 2
    /// indistinguishable in most cases and 3 in all.
    #[must_use]
    pub fn reducing_gap(mut self, gap: Option<f64>) -> Self {
        self.reducing_gap = gap;
        self
    }

    /// Sets how to handle images that cannot be read. Defaults to [`OnBroken::Fail`].
    #[must_use]
    pub fn on_broken(mut self, policy: OnBroken) -> Self {
        self.on_broken = policy;
        self
    }

    /// Caches decoded images in a file from the first epoch on. Defaults to no cache.
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

    /// Returns the indices of the images that could not be read so far, ascending. Only images that this process has
    /// tried to read are included.
    #[must_use]
    pub fn broken(&self) -> Vec<usize> {
        self.broken.images()
    }

    /// Returns the indices of the images that are damaged and were read nevertheless so far, ascending: JPEG files that
    /// libjpeg reads with a warning, some of whose pixels are wrong. Only images that this process decoded are
    /// included. Each is also logged once.
    #[must_use]
    pub fn damaged(&self) -> Vec<usize> {
        self.broken.damaged()
    }

    /// Returns the number of samples of an epoch that were replaced by another image in this process. The number is
    /// also logged when the next epoch begins or the samples are dropped.
    #[must_use]
    pub fn skipped(&self, epoch: u64) -> usize {
        self.broken.skipped(epoch)
    }
}

impl<S: ImageSource> ImageSamples<S> {
    /// Opens the cache, if there is one, and logs how many samples of the epoch before were replaced. Must be called
    /// before an epoch's samples are read; repeated calls are harmless.
    ///
    /// Fails if the file of the cache cannot be created.
    pub fn begin_epoch(&self, epoch: u64) -> Result<()> {
        self.stages()?;
        self.broken.begin(epoch);
        Ok(())
    }

    /// Creates the memory that a thread needs to read samples.
    #[must_use]
    pub fn reader(&self) -> SampleReader {
        SampleReader::new(&self.decode)
    }

    /// Reads and transforms a sample into the reader, and returns the index of its image: another one than `index` if
    /// that image is broken and skipped.
    ///
    /// # Errors
    /// Fails if the image cannot be read and is not skipped, or if no image can be read.
    pub fn read(
        &self,
        reader: &mut SampleReader,
        index: usize,
        epoch: u64,
        seed: u64,
    ) -> Result<usize> {
        self.read_with(reader, index, epoch, seed, |_, _| Ok(()))
    }

    /// Reads a sample like [`read`](Self::read), together with data that belong to its image, such as a mask: `also` is
    /// called with the image's index and, unless it comes from a cache, its size before all transforms. An error of
    /// `also` is handled like an error of the image.
    ///
    /// # Errors
    /// Returns the same errors as `read`.
    pub fn read_with(
        &self,
        reader: &mut SampleReader,
        index: usize,
        epoch: u64,
        seed: u64,
        mut also: impl FnMut(usize, Option<Size>) -> Result<()>,
    ) -> Result<usize> {
        self.read_by(index, epoch, |image| {
            self.image(reader, image, seed, None)?;
            also(image, reader.decoded_size())
        })
    }

    /// Reads a sample like [`read`](Self::read), but applies its transforms only up to the first resize, and also
    /// returns the remaining operations, for a device that resizes. A crop before the resize is applied, so that only
    /// its rows are decoded.
    ///
    /// # Errors
    /// Returns the same errors as `read`.
    pub fn read_before_resize(
        &self,
        reader: &mut SampleReader,
        index: usize,
        epoch: u64,
        seed: u64,
    ) -> Result<(usize, Vec<Operation>)> {
        let left = RefCell::default();
        let read =
            self.read_by(index, epoch, |image| self.image(reader, image, seed, Some(&left)))?;
        Ok((read, left.into_inner()))
    }

    /// Reads a sample's image, or the one that replaces it, and returns the index of the image.
    fn read_by(
        &self,
        index: usize,
        epoch: u64,
        mut whole: impl FnMut(usize) -> Result<()>,
    ) -> Result<usize> {
        if index >= self.labels.len() {
            return Err(ImageError::InvalidArgument(format!(
                "sample {index} is out of range: there are {}",
                self.labels.len()
            )));
        }
        if self.on_broken == OnBroken::Fail {
            return whole(index).map(|()| index);
        }
        let mut first_error = None;
        for image in (index..self.labels.len()).chain(0..index) {
            if self.broken.is_known(image) {
                continue;
            }
            match whole(image) {
                Ok(()) => {
                    if image != index {
                        self.broken.count(epoch);
                    }
                    return Ok(image);
                }
                Err(error) => {
                    self.broken.add(image, &self.source.name(image), &error);
                    first_error.get_or_insert(error);
                }
            }
        }
        Err(first_error.unwrap_or_else(|| {
            ImageError::InvalidArgument(format!(
                "none of the {} can be read; the log names the reason for each",
                counted(self.labels.len(), "image")
            ))
        }))
    }

    /// Returns the operations that are applied to an image of this size with this seed.
    ///
    /// # Errors
    /// Fails if a transform cannot be applied to an image of this size.
    pub fn plan(&self, size: Size, seed: u64) -> Result<Plan> {
        self.stages()?.transforms.plan(size, self.phase, seed)
    }

    /// Reads and transforms an image into the reader. If `left` is set, transforms up to the first resize only, and
    /// stores the remaining operations in `left`.
    fn image(
        &self,
        reader: &mut SampleReader,
        index: usize,
        seed: u64,
        left: Option<&RefCell<Vec<Operation>>>,
    ) -> Result<()> {
        let part = |plan: Plan| -> Result<Plan> {
            let Some(left) = left else { return Ok(plan) };
            let (before, rest) = plan.split_at_resize()?;
            left.replace(rest);
            Ok(before)
        };
        let Stages { transforms, cached } = self.stages()?;
        let Some((cache, fixed)) = cached else {
            return self.decoded(reader, index, |size| {
                transforms.plan(size, self.phase, seed).and_then(part)
            });
        };
        let rest =
            |size| transforms.plan_part(*fixed..usize::MAX, size, self.phase, seed).and_then(part);
        if reader.transform_cached(cache, index, rest)? {
            return Ok(());
        }
        self.decoded(reader, index, |size| {
            transforms.plan_part(0..*fixed, size, self.phase, seed)
        })?;
        reader.keep_and_transform(cache, index, rest)
    }

    /// Reads an image into the reader, decoded and transformed by a plan for its size.
    fn decoded(
        &self,
        reader: &mut SampleReader,
        index: usize,
        plan: impl FnOnce(Size) -> Result<Plan>,
    ) -> Result<()> {
        self.source.read(index, reader.buffer())?;
        let name = self.source.name(index);
        reader.transform(&name, self.reducing_gap, plan)?;
        if let Some(warning) = reader.warning() {
            self.broken.add_damaged(index, &name, warning);
        }
        Ok(())
    }

    /// Returns the transforms and the cache, which is opened once.
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
            let versions: Vec<u64> =
                (0..self.source.len()).map(|image| self.source.version(image)).collect();
            cached = Some((Cache::open(options, key, &versions)?, fixed));
        }
        Ok(self.stages.get_or_init(|| Stages { transforms, cached }))
    }
}

impl<S> fmt::Debug for ImageSamples<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImageSamples")
            .field("images", &self.labels.len())
            .field("transforms", &self.transforms)
            .field("phase", &self.phase)
            .finish_non_exhaustive()
    }
}
