//! Transforms of a batch of images on its device: one resampling for all geometric transforms, lighting, hue,
//! normalisation, erasing, mixing.
//!
//! A loader's thread draws the random numbers, a row for each sample, from the sample's seed. They are part of the
//! batch as a small tensor, and the transforms are computed on the device of the images. So a batch is the same with
//! any number of threads and ranks and after a restart, whatever the device, and the host does not wait for the device.
//! The transforms run in the training step, by [`Augment::apply`], or in a loader's thread on the GPU, concurrently
//! with the step ([`AugmentedDataset::applied`]).

mod color;
mod dataset;
mod draw;
mod erasing;
mod geometry;
mod homography;
mod mix;
mod points;
mod resample;

use brigade_torch::{Error, Result, channels_last, normalized_images};
use tch::{Kind, TchError, Tensor};

use self::color::Light;
pub use self::color::{Hue, Lighting};
pub use self::dataset::{AppliedDataset, AugmentedDataset};
use self::draw::{CUT, ERASE, HUE, LIGHT, NOISE, PARTNER, SHARE};
pub use self::erasing::RandomErasing;
pub use self::geometry::Geometric;
pub use self::mix::{Mix, MixedLabels, beta};
pub use self::resample::Padding;
use self::resample::Sampling;
use crate::Size;
use crate::transforms::Normalize;

/// Data augmentation of a batch, in fastai's order: geometric transforms, lighting, hue, normalisation, erasing,
/// mixing. Each image is resampled once, whatever the number of geometric transforms.
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
    channels_last: Option<Kind>,
}

impl Augment {
    /// Returns an augmentation without any transform.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns fastai's `aug_transforms()` with its defaults: flip, warp by up to 0.2, rotation by up to 10 degrees,
    /// zoom by up to 1.1, brightness and contrast by up to 0.2, and reflection padding.
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

    /// Adds a geometric transform. fastai's transforms are combined in their order, with warps after all others, as in
    /// fastai; torchvision's are applied one after the other.
    #[must_use]
    pub fn then(mut self, map: Geometric) -> Self {
        self.geometric.push(map);
        self
    }

    /// Adds a lighting transform.
    #[must_use]
    pub fn lighting(mut self, lighting: Lighting) -> Self {
        self.lighting.push(lighting);
        self
    }

    /// Adds a random change of hue.
    #[must_use]
    pub fn hue(mut self, hue: Hue) -> Self {
        self.hue = Some(hue);
        self
    }

    /// Sets the size to which images are resampled. Defaults to their own size.
    #[must_use]
    pub fn size(mut self, size: Size) -> Self {
        self.size = Some(size);
        self
    }

    /// Sets the padding mode: the values of pixels outside of the images. Defaults to [`Padding::Reflection`].
    #[must_use]
    pub fn padding(mut self, padding: Padding) -> Self {
        self.padding = padding;
        self
    }

    /// Adds a normalisation by mean and standard deviation, on the device.
    #[must_use]
    pub fn normalize(mut self, normalize: Normalize) -> Self {
        self.normalize = Some(normalize);
        self
    }

    /// Converts the result to a floating-point kind in channels-last memory format: a 16-bit kind, so that a
    /// convolution under autocast needs no conversion. Defaults to float32, or the kind of floating-point images, in
    /// their memory format.
    ///
    /// Bytes on a GPU that are only cropped, flipped and normalised are converted by one kernel
    /// ([`brigade_torch::normalized_images`]).
    ///
    /// ```
    /// use brigade_vision::augment::Augment;
    /// use brigade_vision::transforms::Normalize;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let augment = Augment::new().normalize(Normalize::IMAGENET).channels_last(Kind::BFloat16);
    /// let images = Tensor::randint(256, [2, 3, 32, 32], (Kind::Uint8, Device::Cpu));
    /// let drawn = augment.draw(&[1, 2], &images)?;
    /// assert_eq!(augment.apply(&images, &drawn)?.kind(), Kind::BFloat16);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[must_use]
    pub fn channels_last(mut self, kind: Kind) -> Self {
        self.channels_last = Some(kind);
        self
    }

    /// Adds random erasing of rectangles.
    #[must_use]
    pub fn erasing(mut self, erasing: RandomErasing) -> Self {
        self.erasing = Some(erasing);
        self
    }

    /// Mixes each image with another one of its batch. [`Augment::targets`] mixes the labels. Defaults to no mixing.
    #[must_use]
    pub fn mix(mut self, mix: Mix) -> Self {
        self.mix = Some(mix);
        self
    }

    /// Returns the augmentation for validation: the same size, padding and normalisation, without random transforms.
    #[must_use]
    pub fn validation(&self) -> Self {
        Self {
            size: self.size,
            padding: self.padding,
            normalize: self.normalize,
            channels_last: self.channels_last,
            ..Self::default()
        }
    }

    /// Returns the size that images are resampled to, if one was set.
    #[must_use]
    pub fn output_size(&self) -> Option<Size> {
        self.size
    }

    /// Returns the padding mode: the values of pixels outside of the images.
    #[must_use]
    pub fn outside(&self) -> Padding {
        self.padding
    }

    /// Returns the normalisation, if one was set.
    #[must_use]
    pub fn normalization(&self) -> Option<Normalize> {
        self.normalize
    }

    /// Returns `true` if images are mixed with others, so that their labels must be mixed, too.
    #[must_use]
    pub fn mixes(&self) -> bool {
        self.mix.is_some()
    }

    /// Returns the transforms before the normalisation, for computing the statistics of a normalisation.
    #[must_use]
    pub fn before_normalization(&self) -> Self {
        Self { normalize: None, erasing: None, mix: None, channels_last: None, ..self.clone() }
    }

    /// Transforms images `[n, c, h, w]`, floating-point in 0 to 1 or `u8`, by the numbers that [`Augment::draw`] drew
    /// for them. Numbers on another device are copied to the device of the images, without waiting for a GPU.
    ///
    /// # Errors
    /// Fails if the shapes of images and numbers do not match, or libtorch fails.
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

    /// Transforms masks of classes `[n, h, w]` like the images of the same batch, by the nearest pixel. Only geometric
    /// transforms are applied. With [`Padding::Zeros`], pixels outside of the image get class 0.
    ///
    /// # Errors
    /// Returns the errors of [`Augment::apply`].
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

    /// Returns the labels of a mixed batch, each `[n]`: the label of each image, the label of its partner, and the
    /// share of the image's own label. Without [`Augment::mix`] the share is 1.
    ///
    /// # Errors
    /// Returns the errors of [`Augment::apply`].
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

    fn transformed(&self, images: &Tensor, drawn: &Tensor) -> Result<Tensor, TchError> {
        let whole = self.moves_whole_pixels(images);
        let mut images = if self.geometric.is_empty() || !whole {
            images.shallow_clone()
        } else {
            // Converted before the images become larger.
            self.moved(images, drawn)?
        };
        let mut normalize = self.normalize;
        if images.kind() == Kind::Uint8 {
            images = match (self.bytes_are_normalized(&images, whole), normalize.take()) {
                (Some(kind), Some(Normalize { mean, std })) => {
                    let channels = images.size()[1] as usize;
                    normalized_images(&images, &mean[..channels], &std[..channels], kind)
                        .map_err(|error| TchError::Torch(error.to_string()))?
                }
                (_, before) => {
                    normalize = before;
                    images.f_to_kind(Kind::Float)?.f_div_scalar(255.0)?
                }
            };
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
        if let Some(Normalize { mean, std }) = &normalize {
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
        if let Some(kind) = self.channels_last {
            images = channels_last(&images.f_to_kind(kind)?)
                .map_err(|error| TchError::Torch(error.to_string()))?;
        }
        Ok(images)
    }

    /// Returns the kind in which bytes are normalised at once, if nothing is computed between.
    fn bytes_are_normalized(&self, images: &Tensor, whole: bool) -> Option<Kind> {
        let is_next = whole && self.lighting.is_empty() && self.hue.is_none();
        let has_constants = images.dim() == 4 && (1..=3).contains(&images.size()[1]);
        let kind = self.channels_last.filter(|_| is_next && has_constants)?;
        // What is computed of the normalised values is computed in float32.
        Some(if self.erasing.is_none() && self.mix.is_none() { kind } else { Kind::Float })
    }

    /// Returns `true` if a change of lighting needs the grey of the images.
    fn saturates(&self) -> bool {
        self.lighting.iter().any(|change| matches!(change, Lighting::Saturation { .. }))
    }
}

/// Returns `true` for each pixel inside its sample's rectangle at these columns: `[n, 1, h, w]`.
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

/// Returns the partner of each row. A part of a batch, as sent by a dispatching rank, has fewer rows.
fn partners(drawn: &Tensor) -> Result<Tensor, TchError> {
    let rows = drawn.size().first().copied().unwrap_or(1).max(1);
    drawn.f_select(1, PARTNER)?.f_to_kind(Kind::Int64)?.f_remainder(rows)
}

#[expect(clippy::needless_pass_by_value, reason = "it is what `map_err` gives")]
fn refused(error: TchError) -> Error {
    Error::invalid_argument(format!("a transform of a batch: {error}"))
}
