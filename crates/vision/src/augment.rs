//! What is done to a batch of images on its device: one resampling for all maps of the plane, lighting, hue,
//! normalisation, erasing, mixing.
//!
//! A loader's thread draws the numbers, a row for each sample, from the sample's seed; they travel with the
//! batch as a small tensor, and the arithmetic runs where the images are. So a batch is the same at any
//! number of threads and ranks and after a restart, whatever the device, and nothing waits for it. The
//! arithmetic is the step's, by [`Augment::apply`], or a loader's thread does it on the GPU beside the step
//! ([`AugmentedDataset::applied`]).

mod color;
mod erasing;
mod geometry;
mod mix;

use brigade_data::{BatchContext, BatchedDataset, from_vec};
use brigade_torch::{Error, Kind, Result, Tensor, copy_to_device};
use serde::{Deserialize, Serialize};
use tch::TchError;

use self::color::Light;
pub use self::color::{Hue, Lighting};
pub use self::erasing::RandomErasing;
pub use self::geometry::Geometric;
use self::geometry::{Homography, moves_whole_pixels};
pub use self::mix::{Mix, MixedLabels, beta};
use crate::Size;
use crate::transforms::{Normalize, SampleRng};

/// The transforms of a batch, in the order of fastai: maps of the plane, lighting, hue, normalisation, erasing,
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
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Augment {
    geometric: Vec<Geometric>,
    size: Option<Size>,
    padding: Padding,
    lighting: Vec<Lighting>,
    hue: Option<Hue>,
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

/// Columns of what is drawn for a sample: a map (row by row), brightness, contrast, the part of its grey, the turn of
/// its hue, a rectangle (left, top, right, bottom), the keys of its noise, the share of the sample itself in a
/// mixture, its partner, the rectangle that is the partner's.
const COLUMNS: usize = 25;
const LIGHT: i64 = 9;
const HUE: i64 = 12;
const ERASE: i64 = 13;
const NOISE: i64 = 17;
const SHARE: i64 = 19;
const PARTNER: i64 = 20;
const CUT: i64 = 21;

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

    /// Turns hues.
    #[must_use]
    pub fn hue(mut self, hue: Hue) -> Self {
        self.hue = Some(hue);
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
    /// `[n, 25]`.
    #[must_use]
    pub fn dataset<D>(&self, dataset: D) -> AugmentedDataset<D> {
        AugmentedDataset { dataset, augment: self.clone() }
    }

    /// Draws the numbers of a batch `[n, c, h, w]`, `[n, 25]` in `f32` on the CPU: a row follows from its
    /// sample's seed, but for the numbers of a mixture, which follow from all of them.
    ///
    /// # Errors
    /// When there are not as many seeds as images, or the batch has another shape.
    pub fn draw(&self, seeds: &[u64], images: &Tensor) -> Result<Tensor> {
        let (height, width) = match images.size().as_slice() {
            &[rows, _, height, width] if rows == seeds.len() as i64 => (height, width),
            size => {
                return Err(Error::invalid_argument(format!(
                    "{} seeds are for as many images [n, c, h, w], not for {size:?}",
                    seeds.len()
                )));
            }
        };
        let from = [width as f64, height as f64];
        let to = self.size.map_or(from, |size| [f64::from(size.width), f64::from(size.height)]);
        for map in &self.geometric {
            if let Geometric::PaddedCrop { padding } = map
                && (0..2).any(|axis| from[axis] + 2.0 * f64::from(*padding) < to[axis])
            {
                return Err(Error::invalid_argument(format!(
                    "images of {width} x {height} pixels with a border of {padding} have no part of {} x {}",
                    to[0], to[1]
                )));
            }
        }
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
            let Light { brightness, contrast, grey } = Light::drawn(&self.lighting, &mut next);
            let erased = self.erasing.map(|erasing| erasing.draw(to, &mut next()));
            let turn = self.hue.map_or(0.0, |hue| hue.drawn(&mut next()));
            numbers.extend([brightness, contrast, grey, turn].map(|number| number as f32));
            numbers.extend(erased.unwrap_or_default());
            match mixed.as_ref().and_then(|mixed| mixed.get(index)) {
                Some(mixed) => numbers.extend(mixed),
                None => numbers.extend([1.0, index as f32, 0.0, 0.0, 0.0, 0.0]),
            }
        }
        from_vec(numbers, &[seeds.len() as i64, COLUMNS as i64])
            .map_err(|error| Error::invalid_argument(error.to_string()))
    }

    /// Transforms images `[n, c, h, w]`, floating-point in 0 to 1 or `u8`, by what was drawn for them. Numbers that
    /// lie on another device than the images are sent to theirs; nothing waits for a GPU.
    ///
    /// # Errors
    /// When the two do not belong together, or libtorch refuses.
    pub fn apply(&self, images: &Tensor, drawn: &Tensor) -> Result<Tensor> {
        let drawn = self.checked(images, drawn)?;
        let size = images.size();
        if (self.saturates() || self.hue.is_some()) && ![Some(&1), Some(&3)].contains(&size.get(1))
        {
            return Err(Error::invalid_argument(format!(
                "saturation and hue are of images [n, c, h, w] with 3 channels, or 1, not of {size:?}"
            )));
        }
        self.transformed(images, &drawn).map_err(refused)
    }

    /// Maps masks of classes `[n, h, w]` as the images of the same batch, by the nearest pixel; lighting
    /// and the rest do not concern them. What lies outside is class 0 with [`Padding::Zeros`].
    ///
    /// # Errors
    /// Those of [`Augment::apply`].
    pub fn apply_to_masks(&self, masks: &Tensor, drawn: &Tensor) -> Result<Tensor> {
        let drawn = self.checked(masks, drawn)?;
        let mapped = || {
            if self.geometric.is_empty() && self.size.is_none() {
                return Ok(masks.shallow_clone());
            }
            let planes = masks.f_unsqueeze(1)?;
            if self.moves_whole_pixels(&planes) {
                return self.moved(&planes, &drawn)?.f_squeeze_dim(1);
            }
            let numbers = planes.f_to_kind(Kind::Double)?;
            let mapped = self.resampled(&numbers, &drawn, Sampling::Nearest)?;
            mapped.f_squeeze_dim(1)?.f_to_kind(masks.kind())
        };
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
        let &[_, _, height, width] = size.as_slice() else {
            return Err(Error::invalid_argument(format!(
                "points belong to images [n, c, h, w], not to {size:?}"
            )));
        };
        let drawn = self.checked(points, drawn)?;
        let mapped = || {
            let from = [width as f64, height as f64];
            let to = self.size.map_or(from, |size| [f64::from(size.width), f64::from(size.height)]);
            let points_of = points.f_to_kind(Kind::Double)?;
            let axis = |index: usize| -> Result<Tensor, TchError> {
                let along = points_of.f_select(2, index as i64)?.f_add_scalar(1.0)?;
                along.f_mul_scalar(from[index] / 2.0)?.f_sub_scalar(0.5)
            };
            let (x, y) = (axis(0)?, axis(1)?);
            // The maps lead from the output to the image. Their inverses but for a factor, which a homography does
            // not see: libtorch's own inverse has the host wait for a GPU.
            let map = |index: i64| -> Result<Tensor, TchError> {
                drawn.f_narrow(1, index, 1)?.f_to_kind(Kind::Double)
            };
            let m = (0..9).map(map).collect::<Result<Vec<_>, _>>()?;
            let minor = |[a, b, c, d]: [usize; 4]| m[a].f_mul(&m[d])?.f_sub(&m[b].f_mul(&m[c])?);
            let row = |of_x: [usize; 4], of_y: [usize; 4], of_one: [usize; 4]| {
                let (a, b, c) = (minor(of_x)?, minor(of_y)?, minor(of_one)?);
                x.f_mul(&a)?.f_add(&y.f_mul(&b)?)?.f_add(&c)
            };
            let across = row([4, 5, 7, 8], [2, 1, 8, 7], [1, 2, 4, 5])?;
            let down = row([5, 3, 8, 6], [0, 2, 6, 8], [2, 0, 5, 3])?;
            let depth = row([3, 4, 6, 7], [1, 0, 7, 6], [0, 1, 3, 4])?;
            let place = |along: &Tensor, length: f64| {
                let along = along.f_div(&depth)?.f_add_scalar(0.5)?;
                along.f_mul_scalar(2.0 / length)?.f_sub_scalar(1.0)
            };
            let found = Tensor::f_stack(&[place(&across, to[0])?, place(&down, to[1])?], 2)?;
            found.f_to_kind(points.kind())
        };
        mapped().map_err(refused)
    }

    /// Returns the labels `[n]` of a mixed batch: each image's own, its partner's, and the share of its
    /// own. Without [`Augment::mix`] the share is 1.
    ///
    /// # Errors
    /// Those of [`Augment::apply`].
    pub fn targets(&self, labels: &Tensor, drawn: &Tensor) -> Result<MixedLabels> {
        let drawn = self.checked(labels, drawn)?;
        let targets = || {
            let partner = partners(&drawn)?;
            Ok(MixedLabels {
                first: labels.shallow_clone(),
                second: labels.f_index_select(0, &partner)?,
                share: drawn.f_select(1, SHARE)?,
            })
        };
        targets().map_err(refused)
    }

    /// The numbers on the device of the rows that they were drawn for.
    fn checked(&self, rows: &Tensor, drawn: &Tensor) -> Result<Tensor> {
        let (shape, size) = (rows.size(), drawn.size());
        if size != [shape.first().copied().unwrap_or(-1), COLUMNS as i64] {
            return Err(Error::invalid_argument(format!(
                "numbers of shape {size:?} were not drawn for a batch of shape {shape:?}"
            )));
        }
        let device = rows.device();
        if drawn.device() == device {
            return Ok(drawn.shallow_clone());
        }
        copy_to_device(drawn, device)
    }

    fn transformed(&self, images: &Tensor, drawn: &Tensor) -> Result<Tensor, TchError> {
        let whole = self.moves_whole_pixels(images);
        let mut images = if self.geometric.is_empty() || !whole {
            images.shallow_clone()
        } else {
            // Before they become larger.
            self.moved(images, drawn)?
        };
        if images.kind() == Kind::Uint8 {
            images = images.f_to_kind(Kind::Float)?.f_div_scalar(255.0)?;
        }
        if !whole {
            images = self.resampled(&images, drawn, Sampling::Bilinear)?;
        }
        let kind = images.kind();
        let column = |index: i64| -> Result<Tensor, TchError> {
            drawn.f_narrow(1, index, 1)?.f_view([-1, 1, 1, 1])?.f_to_kind(kind)
        };
        if !self.lighting.is_empty() {
            let (brightness, contrast) = (column(LIGHT)?, column(LIGHT + 1)?);
            let grey = if self.saturates() { Some(column(LIGHT + 2)?) } else { None };
            images = Light::apply(&images, &brightness, &contrast, grey.as_ref())?;
        }
        if self.hue.is_some() {
            images = Hue::apply(&images, &column(HUE)?)?;
        }
        if let Some(Normalize { mean, std }) = &self.normalize {
            // Written by kernels: a copy from the host would be waited for, and a recorded step would not repeat it.
            let constant = |values: &[f32; 3]| -> Result<Tensor, TchError> {
                // A grey image has one channel.
                let channels = images.size().get(1).map_or(3, |channels| (*channels).clamp(1, 3));
                let options = (images.kind(), images.device());
                let constant = Tensor::f_empty([1, channels, 1, 1], options)?;
                for (channel, value) in (0..channels).zip(values) {
                    let _ = constant.f_narrow(1, channel, 1)?.f_fill_(f64::from(*value))?;
                }
                Ok(constant)
            };
            images = images.f_sub(&constant(mean)?)?.f_div(&constant(std)?)?;
        }
        if let Some(erasing) = &self.erasing {
            let keys = [drawn.f_select(1, NOISE)?, drawn.f_select(1, NOISE + 1)?];
            let erased = inside(&images, drawn, ERASE)?;
            images = erasing.fill(&images, &erased, keys.each_ref())?;
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

    /// Whether a change of lighting needs the grey of the images.
    fn saturates(&self) -> bool {
        self.lighting.iter().any(|change| matches!(change, Lighting::Saturation { .. }))
    }

    /// Whether every pixel of the output is one of the image's, or lies outside of it.
    fn moves_whole_pixels(&self, images: &Tensor) -> bool {
        let size = images.size();
        let (from, to) = (Size2::of(&size), self.to(&size));
        moves_whole_pixels(&self.geometric, from.lengths(), to.lengths())
    }

    /// The output's size for images of this shape.
    fn to(&self, shape: &[i64]) -> Size2 {
        let set = |Size { width, height }| Size2 { width: width.into(), height: height.into() };
        self.size.map_or_else(|| Size2::of(shape), set)
    }

    /// Takes each pixel of the output from where its map leads, which is a pixel: values stay what they are.
    fn moved(&self, images: &Tensor, drawn: &Tensor) -> Result<Tensor, TchError> {
        let size = images.size();
        let (rows, channels) = (size[0], size[1]);
        let (from, to) = (Size2::of(&size), self.to(&size));
        let [xs, ys] = places(drawn, to, Kind::Float)?;
        let mut outside: Option<Tensor> = None;
        let mut index = |places: &Tensor, length: i64| -> Result<Tensor, TchError> {
            let places = places.f_round()?.f_to_kind(Kind::Int64)?;
            let last = length - 1;
            match self.padding {
                Padding::Zeros => {
                    let inside = places.f_clamp(0, last)?;
                    let beyond = places.f_ne_tensor(&inside)?;
                    outside = Some(match &outside {
                        Some(outside) => outside.f_logical_or(&beyond)?,
                        None => beyond,
                    });
                    Ok(inside)
                }
                Padding::Border => places.f_clamp(0, last),
                // As often as it takes; one pixel is its own mirror.
                Padding::Reflection => {
                    let turned = places.f_remainder((2 * last).max(1))?.f_sub_scalar(last)?;
                    turned.f_abs()?.f_neg()?.f_add_scalar(last)
                }
            }
        };
        let (columns, lines) = (index(&xs, from.width)?, index(&ys, from.height)?);
        let flat = lines.f_mul_scalar(from.width)?.f_add(&columns)?;
        let flat = flat.f_view([rows, 1, -1])?.f_expand([rows, channels, -1], false)?;
        let pixels = images.f_reshape([rows, channels, -1])?.f_gather(2, &flat, false)?;
        let pixels = pixels.f_view([rows, channels, to.height, to.width])?;
        match outside {
            Some(outside) => pixels.f_masked_fill(&outside.f_unsqueeze(1)?, 0),
            None => Ok(pixels),
        }
    }

    /// Looks each pixel of the output up in its image.
    fn resampled(&self, images: &Tensor, drawn: &Tensor, by: Sampling) -> Result<Tensor, TchError> {
        let size = images.size();
        let (from, to) = (Size2::of(&size), self.to(&size));
        // Positions are computed in 32 bits also for images in 16.
        let kind = if images.kind() == Kind::Double { Kind::Double } else { Kind::Float };
        let [xs, ys] = places(drawn, to, kind)?;
        // From pixels to -1 ..= 1 between the centres of the outer ones.
        let unit = |places: &Tensor, length: i64| {
            places.f_mul_scalar(2.0 / (length - 1).max(1) as f64)?.f_sub_scalar(1.0)
        };
        let grid = Tensor::f_stack(&[unit(&xs, from.width)?, unit(&ys, from.height)?], 3)?;
        let padding = match self.padding {
            Padding::Zeros => 0,
            Padding::Border => 1,
            Padding::Reflection => 2,
        };
        let source = images.f_to_kind(kind)?;
        source.f_grid_sampler(&grid, by as i64, padding, true)?.f_to_kind(images.kind())
    }
}

/// Width and height as libtorch counts them.
#[derive(Clone, Copy)]
struct Size2 {
    width: i64,
    height: i64,
}

impl Size2 {
    /// Of a batch `[n, c, h, w]`.
    fn of(shape: &[i64]) -> Self {
        let side = |at: usize| shape.get(at).copied().unwrap_or_default();
        Self { width: side(3), height: side(2) }
    }

    fn lengths(self) -> [f64; 2] {
        [self.width as f64, self.height as f64]
    }
}

/// Where the map of each sample takes the pixels of the output: columns and rows of the image, `[n, h, w]` each. By
/// elementwise operations: a product of matrices is rounded to 10 bits by GPUs that compute in TF32, and to 8 under
/// autocast, which would move pixels.
fn places(drawn: &Tensor, to: Size2, kind: Kind) -> Result<[Tensor; 2], TchError> {
    let options = (kind, drawn.device());
    let xs = Tensor::f_arange(to.width, options)?.f_view([1, 1, -1])?;
    let ys = Tensor::f_arange(to.height, options)?.f_view([1, -1, 1])?;
    let row = |index: i64| -> Result<Tensor, TchError> {
        let number = |column: i64| {
            drawn.f_narrow(1, 3 * index + column, 1)?.f_view([-1, 1, 1])?.f_to_kind(kind)
        };
        let along = xs.f_mul(&number(0)?)?.f_add(&ys.f_mul(&number(1)?)?)?;
        along.f_add(&number(2)?)
    };
    let depth = row(2)?;
    Ok([row(0)?.f_div(&depth)?, row(1)?.f_div(&depth)?])
}

/// libtorch's numbers.
#[derive(Clone, Copy)]
enum Sampling {
    Bilinear = 0,
    Nearest = 1,
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
fn refused(error: TchError) -> Error {
    Error::invalid_argument(format!("a transform of a batch: {error}"))
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

    /// Has the thread that makes a batch transform its images, too, where they lie: a GPU whose
    /// [data set is there](brigade_data::TensorDataset::to_device) computes that beside the training step. Batches
    /// are images, labels as they were, and the numbers, for [`Augment::targets`].
    ///
    /// ```
    /// use brigade_data::{DataLoader, TensorDataset};
    /// use brigade_vision::augment::{Augment, Geometric, Padding};
    /// use brigade_vision::transforms::Normalize;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let device = Device::cuda_if_available();
    /// let images = Tensor::randint(256, [50, 3, 32, 32], (Kind::Uint8, Device::Cpu));
    /// let labels = Tensor::randint(10, [50], (Kind::Int64, Device::Cpu));
    /// let data = TensorDataset::new((images, labels))?.to_device(device)?;
    /// // The usual recipe for CIFAR-10.
    /// let augment = Augment::new()
    ///     .then(Geometric::PaddedCrop { padding: 4 })
    ///     .then(Geometric::Flip { p: 0.5 })
    ///     .padding(Padding::Zeros)
    ///     .normalize(Normalize { mean: [0.491, 0.482, 0.447], std: [0.247, 0.243, 0.262] });
    /// let data = augment.dataset(data).applied();
    /// let loader = DataLoader::new(data).batch_size(25).shuffle(true).threads(1).device(device);
    /// for batch in &loader {
    ///     let (images, labels, _drawn) = batch?.into_data();
    ///     assert_eq!((images.kind(), images.device()), (Kind::Float, device));
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn applied(self) -> AppliedDataset<D> {
        AppliedDataset(self)
    }
}

/// A data set of images whose batches are transformed: [`AugmentedDataset::applied`].
#[derive(Clone, Debug)]
pub struct AppliedDataset<D>(AugmentedDataset<D>);

impl<D> BatchedDataset for AppliedDataset<D>
where
    D: BatchedDataset<Batch = (Tensor, Tensor)>,
{
    type Batch = (Tensor, Tensor, Tensor);

    fn num_samples(&self) -> usize {
        self.0.num_samples()
    }

    fn batch(&self, indices: &[usize], context: &BatchContext) -> Result<Self::Batch> {
        let (images, labels, drawn) = self.0.batch(indices, context)?;
        let augment = &self.0.augment;
        // Once, for what comes later as well.
        let drawn = augment.checked(&images, &drawn)?;
        Ok((augment.apply(&images, &drawn)?, labels, drawn))
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

    fn batch(&self, indices: &[usize], context: &BatchContext) -> Result<Self::Batch> {
        let (images, labels) = self.dataset.batch(indices, context)?;
        let seeds: Vec<u64> = indices.iter().map(|&index| context.sample_seed(index)).collect();
        let drawn = self.augment.draw(&seeds, &images)?;
        Ok((images, labels, drawn))
    }
}
