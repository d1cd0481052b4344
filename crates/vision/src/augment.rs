//! What is done to a batch of images on its device: one resampling for all maps of the plane, lighting,
//! normalisation, erasing, mixing.
//!
//! A loader's thread draws the numbers, a row for each sample, from the sample's seed; they travel with the
//! batch as a small tensor, and the arithmetic runs where the images are. So a batch is the same at any
//! number of threads and ranks and after a restart, whatever the device, and nothing waits for it.

mod geometry;
mod mix;

use brigade_data::{BatchContext, BatchedDataset, DataError, from_vec};
use brigade_torch::{Kind, Tensor};
use serde::{Deserialize, Serialize};
use tch::TchError;

pub use self::geometry::Geometric;
use self::geometry::Homography;
pub use self::mix::{Mix, MixedLabels, beta};
use crate::transforms::{Normalize, SampleRng};
use crate::{Result, Size, VisionError};

/// The transforms of a batch, in the order of fastai: maps of the plane, lighting, normalisation, erasing,
/// mixing. Each image is resampled once, whatever the number of maps.
///
/// ```
/// use brigade_vision::augment::{Augment, Geometric};
/// use brigade_vision::transforms::Normalize;
/// use tch::{Device, Kind, Tensor};
///
/// let augment = Augment::fastai().normalize(Normalize::IMAGENET);
/// let images = Tensor::rand([2, 3, 32, 32], (Kind::Float, Device::Cpu));
/// // One seed for each image; an `AugmentedDataset` takes those of the samples.
/// let drawn = augment.draw(&[1, 2], &images)?;
/// assert_eq!(augment.apply(&images, &drawn)?.size(), [2, 3, 32, 32]);
/// # Ok::<(), brigade_vision::VisionError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Augment {
    geometric: Vec<Geometric>,
    size: Option<Size>,
    padding: Padding,
    lighting: Vec<Lighting>,
    normalize: Option<Normalize>,
    erasing: Option<RandomErasing>,
    mix: Option<Mix>,
}

/// What lies outside of an image that a map of the plane looks at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Padding {
    /// The image mirrored at its outer pixels: fastai's default, `PadMode.Reflection`.
    #[default]
    Reflection,
    /// The nearest pixel: `PadMode.Border`.
    Border,
    /// Zeros: `PadMode.Zeros`, and torchvision's default.
    Zeros,
}

/// A change of lighting in logits, by fastai's rules: `sigmoid(contrast · (logit(x) + brightness))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lighting {
    /// fastai's `Brightness`: the logit of a number uniform in `0.5 · (1 ± max)` is added.
    Brightness {
        /// `max_lighting`; 0.2.
        max: f64,
        /// The probability; 0.75.
        p: f64,
    },
    /// fastai's `Contrast`: multiplies by a number log-uniform from `1 − max` to its inverse.
    Contrast {
        /// `max_lighting`; 0.2.
        max: f64,
        /// The probability; 0.75.
        p: f64,
    },
}

/// torchvision's `RandomErasing`: a rectangle of each chosen image gets one value, after normalisation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomErasing {
    /// The probability; 0.5.
    pub p: f64,
    /// Lowest and highest share of the area; 0.02 and 0.33.
    pub scale: [f64; 2],
    /// Lowest and highest ratio of height to width, log-uniform; 0.3 and 3.3.
    pub ratio: [f64; 2],
    /// The value; 0, which is the mean where images are normalised.
    pub value: f64,
}

impl Default for RandomErasing {
    fn default() -> Self {
        Self { p: 0.5, scale: [0.02, 0.33], ratio: [0.3, 3.3], value: 0.0 }
    }
}

/// Columns of what is drawn for a sample: a map (row by row), brightness, contrast, a rectangle (left, top,
/// right, bottom), the share of the sample itself in a mixture, its partner, the rectangle that is the
/// partner's.
const COLUMNS: usize = 21;
const LIGHT: i64 = 9;
const ERASE: i64 = 11;
const SHARE: i64 = 15;
const PARTNER: i64 = 16;
const CUT: i64 = 17;

impl Augment {
    /// Nothing at all.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// fastai's `aug_transforms()` with its defaults: flip, warp by up to 0.2, rotation by up to 10 degrees,
    /// zoom by up to 1.1, brightness and contrast by up to 0.2; reflection outside.
    #[must_use]
    pub fn fastai() -> Self {
        Self::new()
            .then(Geometric::Flip { p: 0.5 })
            .then(Geometric::Warp { magnitude: 0.2, p: 0.75 })
            .then(Geometric::Rotate { max_degrees: 10.0, p: 0.75 })
            .then(Geometric::Zoom { min: 1.0, max: 1.1, p: 0.75 })
            .lighting(Lighting::Brightness { max: 0.2, p: 0.75 })
            .lighting(Lighting::Contrast { max: 0.2, p: 0.75 })
    }

    /// Adds a map of the plane. fastai's maps are multiplied in their order, warps after all others, as
    /// fastai does it; those of torchvision follow one after the other.
    #[must_use]
    pub fn then(mut self, map: Geometric) -> Self {
        self.geometric.push(map);
        self
    }

    /// Adds a change of lighting.
    #[must_use]
    pub fn lighting(mut self, lighting: Lighting) -> Self {
        self.lighting.push(lighting);
        self
    }

    /// Resamples to this size.
    #[must_use]
    pub fn size(mut self, size: Size) -> Self {
        self.size = Some(size);
        self
    }

    /// Sets what lies outside of the images.
    #[must_use]
    pub fn padding(mut self, padding: Padding) -> Self {
        self.padding = padding;
        self
    }

    /// Normalises on the device.
    #[must_use]
    pub fn normalize(mut self, normalize: Normalize) -> Self {
        self.normalize = Some(normalize);
        self
    }

    /// Erases rectangles.
    #[must_use]
    pub fn erasing(mut self, erasing: RandomErasing) -> Self {
        self.erasing = Some(erasing);
        self
    }

    /// Mixes each image with another one of its batch. [`Augment::targets`] mixes the labels.
    #[must_use]
    pub fn mix(mut self, mix: Mix) -> Self {
        self.mix = Some(mix);
        self
    }

    /// The same for validation, where nothing is random: size and normalisation alone.
    #[must_use]
    pub fn validation(&self) -> Self {
        Self {
            size: self.size,
            padding: self.padding,
            normalize: self.normalize,
            ..Self::default()
        }
    }

    /// Returns the size that images are resampled to, if one was set.
    #[must_use]
    pub fn output_size(&self) -> Option<Size> {
        self.size
    }

    /// Returns what lies outside of the images.
    #[must_use]
    pub fn outside(&self) -> Padding {
        self.padding
    }

    /// Returns the normalisation, if one was set.
    #[must_use]
    pub fn normalization(&self) -> Option<Normalize> {
        self.normalize
    }

    /// Whether images are mixed with others, so that their labels must be, too.
    #[must_use]
    pub fn mixes(&self) -> bool {
        self.mix.is_some()
    }

    /// The same up to where images are normalised, for statistics to normalise by.
    #[must_use]
    pub fn before_normalization(&self) -> Self {
        Self { normalize: None, erasing: None, mix: None, ..self.clone() }
    }

    /// Wraps a data set, so that its batches have a third tensor with the numbers drawn: images, labels,
    /// `[n, 21]`.
    #[must_use]
    pub fn dataset<D>(&self, dataset: D) -> AugmentedDataset<D> {
        AugmentedDataset { dataset, augment: self.clone() }
    }

    /// Draws the numbers of a batch `[n, c, h, w]`, `[n, 21]` in `f32` on the CPU: a row follows from its
    /// sample's seed, but for the numbers of a mixture, which follow from all of them.
    ///
    /// # Errors
    /// When there are not as many seeds as images, or the batch has another shape.
    pub fn draw(&self, seeds: &[u64], images: &Tensor) -> Result<Tensor> {
        let (height, width) = match images.size().as_slice() {
            &[rows, _, height, width] if rows == seeds.len() as i64 => (height, width),
            size => {
                return Err(VisionError::InvalidArgument(format!(
                    "{} seeds are for as many images [n, c, h, w], not for {size:?}",
                    seeds.len()
                )));
            }
        };
        let from = [width as f64, height as f64];
        let to = self.size.map_or(from, |size| [f64::from(size.width), f64::from(size.height)]);
        let mut numbers = Vec::with_capacity(seeds.len() * COLUMNS);
        let mixed = self.mix.map(|mix| mix.draw(seeds, to));
        for (index, &seed) in seeds.iter().enumerate() {
            let mut place = BATCH_PLACE;
            let mut next = || {
                place += 1;
                SampleRng::new(seed, place)
            };
            let map = Homography::drawn(&self.geometric, from, to, &mut next);
            numbers.extend(map.numbers().map(|number| number as f32));
            let (mut brightness, mut contrast) = (0.0, 1.0);
            for lighting in &self.lighting {
                let mut random = next();
                match *lighting {
                    Lighting::Brightness { max, p } => {
                        let change = random.uniform(0.5 * (1.0 - max), 0.5 * (1.0 + max));
                        if random.chance(p) {
                            brightness += (change / (1.0 - change)).ln() / contrast;
                        }
                    }
                    Lighting::Contrast { max, p } => {
                        let change = random.uniform((1.0 - max).ln(), -(1.0 - max).ln()).exp();
                        if random.chance(p) {
                            contrast *= change;
                        }
                    }
                }
            }
            numbers.extend([brightness as f32, contrast as f32]);
            let erased = self.erasing.map(|erasing| erasing.draw(to, &mut next()));
            numbers.extend(erased.unwrap_or_default());
            match mixed.as_ref().and_then(|mixed| mixed.get(index)) {
                Some(mixed) => numbers.extend(mixed),
                None => numbers.extend([1.0, index as f32, 0.0, 0.0, 0.0, 0.0]),
            }
        }
        from_vec(numbers, &[seeds.len() as i64, COLUMNS as i64])
            .map_err(|error| VisionError::InvalidArgument(error.to_string()))
    }

    /// Transforms images `[n, c, h, w]`, floating-point in 0 to 1 or `u8`, by what was drawn for them.
    ///
    /// # Errors
    /// When the two do not belong together, or libtorch refuses.
    pub fn apply(&self, images: &Tensor, drawn: &Tensor) -> Result<Tensor> {
        self.checked(images, drawn)?;
        self.transformed(images, drawn).map_err(refused)
    }

    /// Maps masks of classes `[n, h, w]` as the images of the same batch, by the nearest pixel; lighting
    /// and the rest do not concern them. What lies outside is class 0 with [`Padding::Zeros`].
    ///
    /// # Errors
    /// Those of [`Augment::apply`].
    pub fn apply_to_masks(&self, masks: &Tensor, drawn: &Tensor) -> Result<Tensor> {
        let mapped = || {
            if self.geometric.is_empty() && self.size.is_none() {
                return Ok(masks.shallow_clone());
            }
            let numbers = masks.f_unsqueeze(1)?.f_to_kind(Kind::Double)?;
            let mapped = self.resampled(&numbers, drawn, Sampling::Nearest)?;
            mapped.f_squeeze_dim(1)?.f_to_kind(masks.kind())
        };
        self.checked(masks, drawn)?;
        mapped().map_err(refused)
    }

    /// Maps points `[n, points, 2]`, `(x, y)` of -1 to 1 between the sides of the images, as the images of the
    /// same batch before [`apply`](Self::apply): `images` is read for its size alone.
    ///
    /// # Errors
    /// Those of [`Augment::apply`].
    pub fn apply_to_points(
        &self,
        points: &Tensor,
        drawn: &Tensor,
        images: &Tensor,
    ) -> Result<Tensor> {
        let size = images.size();
        let &[rows, _, height, width] = size.as_slice() else {
            return Err(VisionError::InvalidArgument(format!(
                "points belong to images [n, c, h, w], not to {size:?}"
            )));
        };
        self.checked(points, drawn)?;
        let mapped = || {
            let from = [width as f64, height as f64];
            let to = self.size.map_or(from, |size| [f64::from(size.width), f64::from(size.height)]);
            let lengths = |lengths: &[f64; 2]| -> Result<Tensor, TchError> {
                Tensor::f_from_slice(lengths)?.f_to_device(points.device())
            };
            let pixels =
                points.f_to_kind(Kind::Double)?.f_add_scalar(1.0)?.f_mul(&lengths(&from)?)?;
            let pixels = pixels.f_div_scalar(2.0)?.f_sub_scalar(0.5)?;
            let ones = pixels.f_narrow(2, 0, 1)?.f_ones_like()?;
            let pixels = Tensor::f_cat(&[pixels, ones], 2)?;
            // The maps lead from the output to the image.
            let maps = drawn.f_narrow(1, 0, 9)?.f_to_kind(Kind::Double)?.f_view([rows, 3, 3])?;
            let found = pixels.f_matmul(&maps.f_inverse()?.f_transpose(1, 2)?)?;
            let found = found.f_narrow(2, 0, 2)?.f_div(&found.f_narrow(2, 2, 1)?)?;
            let found = found.f_add_scalar(0.5)?.f_mul_scalar(2.0)?.f_div(&lengths(&to)?)?;
            found.f_sub_scalar(1.0)?.f_to_kind(points.kind())
        };
        mapped().map_err(refused)
    }

    /// Returns the labels `[n]` of a mixed batch: each image's own, its partner's, and the share of its
    /// own. Without [`Augment::mix`] the share is 1.
    ///
    /// # Errors
    /// Those of [`Augment::apply`].
    pub fn targets(&self, labels: &Tensor, drawn: &Tensor) -> Result<MixedLabels> {
        self.checked(labels, drawn)?;
        let targets = || {
            let partner = partners(drawn)?;
            Ok(MixedLabels {
                first: labels.shallow_clone(),
                second: labels.f_index_select(0, &partner)?,
                share: drawn.f_select(1, SHARE)?,
            })
        };
        targets().map_err(refused)
    }

    fn checked(&self, rows: &Tensor, drawn: &Tensor) -> Result<()> {
        let (rows, size) = (rows.size(), drawn.size());
        if size != [rows.first().copied().unwrap_or(-1), COLUMNS as i64] {
            return Err(VisionError::InvalidArgument(format!(
                "numbers of shape {size:?} were not drawn for a batch of shape {rows:?}"
            )));
        }
        Ok(())
    }

    fn transformed(&self, images: &Tensor, drawn: &Tensor) -> Result<Tensor, TchError> {
        let mut images = match images.kind() {
            Kind::Uint8 => images.f_to_kind(Kind::Float)?.f_div_scalar(255.0)?,
            _ => images.shallow_clone(),
        };
        if !self.geometric.is_empty() || self.size.is_some() {
            images = self.resampled(&images, drawn, Sampling::Bilinear)?;
        }
        let column = |index: i64| -> Result<Tensor, TchError> {
            drawn.f_narrow(1, index, 1)?.f_view([-1, 1, 1, 1])?.f_to_kind(images.kind())
        };
        if !self.lighting.is_empty() {
            let (brightness, contrast) = (column(LIGHT)?, column(LIGHT + 1)?);
            let logits = images.f_logit(1e-7)?.f_add(&brightness)?.f_mul(&contrast)?;
            images = logits.f_sigmoid()?;
        }
        if let Some(Normalize { mean, std }) = &self.normalize {
            let constant = |values: &[f32; 3]| -> Result<Tensor, TchError> {
                // A grey image has one channel.
                let channels = images.size().get(1).map_or(3, |channels| (*channels).clamp(1, 3));
                let values = Tensor::f_from_slice(values)?.f_narrow(0, 0, channels)?;
                let values = values.f_view([1, -1, 1, 1])?;
                values.f_to_device(images.device())?.f_to_kind(images.kind())
            };
            images = images.f_sub(&constant(mean)?)?.f_div(&constant(std)?)?;
        }
        if let Some(erasing) = &self.erasing {
            images = images.f_masked_fill(&inside(&images, drawn, ERASE)?, erasing.value)?;
        }
        if let Some(mix) = &self.mix {
            let others = images.f_index_select(0, &partners(drawn)?)?;
            images = match mix {
                Mix::CutMix { .. } => {
                    others.f_where_self(&inside(&images, drawn, CUT)?, &images)?
                }
                Mix::MixUp { .. } | Mix::MixUpBatch { .. } => {
                    let share = drawn.f_narrow(1, SHARE, 1)?.f_view([-1, 1, 1, 1])?;
                    others.f_lerp_tensor(&images, &share.f_to_kind(images.kind())?)?
                }
            };
        }
        Ok(images)
    }

    /// Looks each pixel of the output up in its image.
    fn resampled(&self, images: &Tensor, drawn: &Tensor, by: Sampling) -> Result<Tensor, TchError> {
        let size = images.size();
        let (rows, height, width) = (size[0], size[2], size[3]);
        let (to_height, to_width) = match self.size {
            Some(size) => (i64::from(size.height), i64::from(size.width)),
            None => (height, width),
        };
        // Positions are computed in 32 bits also for images in 16.
        let kind = if images.kind() == Kind::Double { Kind::Double } else { Kind::Float };
        let options = (kind, images.device());
        let xs = Tensor::f_arange(to_width, options)?.f_view([1, -1])?;
        let ys = Tensor::f_arange(to_height, options)?.f_view([-1, 1])?;
        let shape = [to_height, to_width];
        let ones = Tensor::f_ones(shape, options)?;
        let pixels = [xs.f_expand(shape, false)?, ys.f_expand(shape, false)?, ones];
        let pixels = Tensor::f_stack(&pixels, 2)?.f_view([1, -1, 3])?;
        let maps = drawn.f_narrow(1, 0, 9)?.f_view([rows, 3, 3])?.f_to_kind(kind)?;
        let found = pixels.f_matmul(&maps.f_transpose(1, 2)?)?;
        let found = found.f_narrow(2, 0, 2)?.f_div(&found.f_narrow(2, 2, 1)?)?;
        // From pixels to -1 ..= 1 between the centres of the outer ones.
        let scale = [width, height].map(|length| 2.0 / (length - 1).max(1) as f64);
        let scale = Tensor::f_from_slice(&scale)?.f_to_device(images.device())?.f_to_kind(kind)?;
        let grid = found.f_mul(&scale)?.f_sub_scalar(1.0)?;
        let grid = grid.f_view([rows, to_height, to_width, 2])?;
        let padding = match self.padding {
            Padding::Zeros => 0,
            Padding::Border => 1,
            Padding::Reflection => 2,
        };
        let source = images.f_to_kind(kind)?;
        source.f_grid_sampler(&grid, by as i64, padding, true)?.f_to_kind(images.kind())
    }
}

/// libtorch's numbers.
#[derive(Clone, Copy)]
enum Sampling {
    Bilinear = 0,
    Nearest = 1,
}

impl RandomErasing {
    fn draw(&self, [width, height]: [f64; 2], random: &mut SampleRng) -> [f32; 4] {
        if !random.chance(self.p) {
            return [0.0; 4];
        }
        for _ in 0..10 {
            let area = width * height * random.uniform(self.scale[0], self.scale[1]);
            let ratio = random.uniform(self.ratio[0].ln(), self.ratio[1].ln()).exp();
            let tall = (area * ratio).sqrt().round_ties_even();
            let wide = (area / ratio).sqrt().round_ties_even();
            if tall < height && wide < width {
                let top = random.below((height - tall) as u64 + 1) as f64;
                let left = random.below((width - wide) as u64 + 1) as f64;
                return [left, top, left + wide, top + tall].map(|it| it as f32);
            }
        }
        [0.0; 4]
    }
}

/// Whether each pixel lies in its sample's rectangle at these columns: `[n, 1, h, w]`.
fn inside(images: &Tensor, drawn: &Tensor, at: i64) -> Result<Tensor, TchError> {
    let size = images.size();
    let options = (Kind::Float, images.device());
    let bound = |index: i64| drawn.f_narrow(1, at + index, 1)?.f_view([-1, 1, 1, 1]);
    let xs = Tensor::f_arange(size[3], options)?.f_view([1, 1, 1, -1])?;
    let ys = Tensor::f_arange(size[2], options)?.f_view([1, 1, -1, 1])?;
    let across = xs.f_ge_tensor(&bound(0)?)?.f_logical_and(&xs.f_lt_tensor(&bound(2)?)?)?;
    let down = ys.f_ge_tensor(&bound(1)?)?.f_logical_and(&ys.f_lt_tensor(&bound(3)?)?)?;
    across.f_logical_and(&down)
}

/// The partner of each row; a part of a batch, as a dispatching rank gives it out, has fewer rows.
fn partners(drawn: &Tensor) -> Result<Tensor, TchError> {
    let rows = drawn.size().first().copied().unwrap_or(1).max(1);
    drawn.f_select(1, PARTNER)?.f_to_kind(Kind::Int64)?.f_remainder(rows)
}

#[expect(clippy::needless_pass_by_value, reason = "it is what `map_err` gives")]
fn refused(error: TchError) -> VisionError {
    VisionError::InvalidArgument(format!("a transform of a batch: {error}"))
}

/// The first place of a batch's transforms among a sample's streams, behind those of the sample itself.
const BATCH_PLACE: usize = 1 << 20;

/// A data set of images whose batches have the numbers that an [`Augment`] has drawn for them:
/// [`Augment::dataset`].
#[derive(Clone, Debug)]
pub struct AugmentedDataset<D> {
    dataset: D,
    augment: Augment,
}

impl<D> AugmentedDataset<D> {
    /// The data set without the numbers.
    pub fn inner(&self) -> &D {
        &self.dataset
    }
}

impl<D> BatchedDataset for AugmentedDataset<D>
where
    D: BatchedDataset<Batch = (Tensor, Tensor)>,
{
    type Batch = (Tensor, Tensor, Tensor);

    fn num_samples(&self) -> usize {
        self.dataset.num_samples()
    }

    fn batch(&self, indices: &[usize], context: &BatchContext) -> Result<Self::Batch, DataError> {
        let (images, labels) = self.dataset.batch(indices, context)?;
        let seeds: Vec<u64> = indices.iter().map(|&index| context.sample_seed(index)).collect();
        let drawn = self.augment.draw(&seeds, &images)?;
        Ok((images, labels, drawn))
    }
}
