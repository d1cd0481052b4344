//! Images of a source with their labels, decoded and transformed one at a time.

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

/// Images of a source with their labels and what is done to each: what data sets of batches are
/// made of. `brigade-vision` makes tensors of them.
///
/// What is random in a sample follows from its seed alone.
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
    /// The transforms as they are used, known when the first sample is asked for.
    stages: OnceLock<Stages>,
}

/// The transforms, and how many of them a cache has the results of.
#[derive(Debug)]
struct Stages {
    transforms: Compose,
    cached: Option<(Cache, usize)>,
}

impl<S: ImageSource> ImageSamples<S> {
    /// Makes samples of a source with a label for each image: without transforms, for training. Of a
    /// [`Labelled`] source `From` makes them.
    ///
    /// # Errors
    /// When there are not as many labels as images.
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

    /// Returns the images that are damaged and were read nonetheless so far, in their order: JPEG files that libjpeg
    /// reads with a warning, whose pixels are wrong in part. Only those that this process decoded. Each is also logged
    /// once.
    #[must_use]
    pub fn damaged(&self) -> Vec<usize> {
        self.broken.damaged()
    }

    /// Returns how many samples of an epoch another image took the place of in this process. The
    /// count is also logged once the next epoch begins or the data set is dropped.
    #[must_use]
    pub fn skipped(&self, epoch: u64) -> usize {
        self.broken.skipped(epoch)
    }
}

impl<S: ImageSource> ImageSamples<S> {
    /// Opens the cache where there is one, and logs how many samples of the epoch before were
    /// replaced. To be called before an epoch's samples are read, as often as one likes.
    ///
    /// # Errors
    /// When the cache's file cannot be made.
    pub fn begin_epoch(&self, epoch: u64) -> Result<()> {
        self.stages()?;
        self.broken.begin(epoch);
        Ok(())
    }

    /// Makes the memory that a thread needs to read samples.
    #[must_use]
    pub fn reader(&self) -> SampleReader {
        SampleReader::new(&self.decode)
    }

    /// Reads a sample, transformed, into the reader, and returns which image it is: another one than
    /// `index` where that is broken and skipped.
    ///
    /// # Errors
    /// When the image cannot be read and is not skipped; when none can.
    pub fn read(
        &self,
        reader: &mut SampleReader,
        index: usize,
        epoch: u64,
        seed: u64,
    ) -> Result<usize> {
        self.read_with(reader, index, epoch, seed, |_, _| Ok(()))
    }

    /// Reads a sample as [`read`](Self::read) does, with what belongs to its image, such as a mask:
    /// `also` is called with the image's index and, unless it comes from a cache, its size before all
    /// transforms. Its error is one of the image.
    ///
    /// # Errors
    /// As `read`.
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

    /// Reads a sample as [`read`](Self::read) does, up to the first resize of its transforms, and returns the
    /// operations from there on besides: for a device that resizes. A crop before it is done, so that only its
    /// rows are decoded.
    ///
    /// # Errors
    /// As `read`.
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

    /// Reads a sample's image, or the one that takes its place, and returns which it is.
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

    /// Returns what is done to the image of a sample, if it has this size.
    ///
    /// # Errors
    /// When an image of this size does not allow it.
    pub fn plan(&self, size: Size, seed: u64) -> Result<Plan> {
        self.stages()?.transforms.plan(size, self.phase, seed)
    }

    /// Leaves an image in the reader, transformed: up to the first resize where `left` takes the rest.
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

    /// Leaves an image in the reader, decoded and transformed by a plan for its size.
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
