//! Transforms of a batch of images on its device.

use std::fmt;
use std::sync::Arc;

use brigade_torch::{Error, Result};
use brigade_vision::Size;
use brigade_vision::augment::{Augment, Geometric, Hue, Lighting, Padding, RandomErasing};
use brigade_vision::transforms as images;
use tch::Tensor;

use super::item_transforms::Part;

/// Normalisation of a batch: fastai's `Normalize`. Grayscale images use the numbers of the first channel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normalize(Option<images::Normalize>);

impl Normalize {
    /// Normalises with the statistics of ImageNet, which pretrained weights expect.
    #[must_use]
    pub fn imagenet() -> Self {
        Self(Some(images::Normalize::IMAGENET))
    }

    /// Normalises with this mean and standard deviation of each channel, for values from 0 to 1: fastai's `from_stats`.
    #[must_use]
    pub fn new(mean: [f32; 3], std: [f32; 3]) -> Self {
        Self(Some(images::Normalize { mean, std }))
    }

    /// Normalises with the statistics of the first training batch on rank 0, for all ranks: fastai's `Normalize()`.
    #[must_use]
    pub fn from_batch() -> Self {
        Self(None)
    }
}

/// Returns fastai's `aug_transforms()`: flips, warps, rotations, zooms, brightness and contrast, by one resampling of
/// each image.
#[must_use]
pub fn aug_transforms() -> AugTransforms {
    AugTransforms {
        mult: 1.0,
        flip: true,
        flip_vertical: false,
        max_rotate: 10.0,
        min_zoom: 1.0,
        max_zoom: 1.1,
        max_lighting: 0.2,
        max_warp: 0.2,
        p_affine: 0.75,
        p_lighting: 0.75,
        size: None,
        min_scale: 1.0,
        padding: Padding::Reflection,
    }
}

/// Options of the image augmentations of fastai's `aug_transforms()`. Made by [`aug_transforms`].
///
/// ```
/// use brigade_learn::data::{DataBlock, Resize, aug_transforms, categories, images};
///
/// // Presizing: large crops that are turned and warped at their size, and then cropped to the model's.
/// let pets = DataBlock::new(images(), categories())
///     .item_transforms(Resize::new(460))
///     .batch_transforms(aug_transforms().size(224).min_scale(0.75));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AugTransforms {
    mult: f64,
    flip: bool,
    flip_vertical: bool,
    max_rotate: f64,
    min_zoom: f64,
    max_zoom: f64,
    max_lighting: f64,
    max_warp: f64,
    p_affine: f64,
    p_lighting: f64,
    size: Option<Size>,
    min_scale: f64,
    padding: Padding,
}

macro_rules! options {
    ($($(#[$docs:meta])* $name:ident: $kind:ty;)+) => {
        $($(#[$docs])*
        #[must_use]
        pub fn $name(mut self, $name: $kind) -> Self {
            self.$name = $name;
            self
        })+
    };
}

impl AugTransforms {
    options! {
        /// Sets a factor for rotation, warp and lighting. Defaults to 1.
        mult: f64;
        /// Sets whether images are mirrored at random (fastai's `do_flip`). Defaults to `true`.
        flip: bool;
        /// Sets whether flips are any of the eight symmetries of the square (fastai's `flip_vert`). Defaults to
        /// `false`.
        flip_vertical: bool;
        /// Sets the maximum rotation in degrees. Defaults to 10.
        max_rotate: f64;
        /// Sets the minimum zoom factor. Defaults to 1.
        min_zoom: f64;
        /// Sets the maximum zoom factor. Defaults to 1.1.
        max_zoom: f64;
        /// Sets the maximum change of brightness and contrast. Defaults to 0.2.
        max_lighting: f64;
        /// Sets the maximum perspective warp. Defaults to 0.2.
        max_warp: f64;
        /// Sets the probability of each geometric transform except flips, whose probability is 0.5. Defaults to 0.75.
        p_affine: f64;
        /// Sets the probability of each change of lighting. Defaults to 0.75.
        p_lighting: f64;
        /// Sets the minimum share of the area that crops to [`size`](Self::size) keep. Defaults to 1: no crop.
        min_scale: f64;
        /// Sets the padding outside of a transformed image (fastai's `pad_mode`). Defaults to its mirror image.
        padding: Padding;
    }

    /// Sets the size to which the batch's images are resampled, for validation as well. Defaults to their own size.
    #[must_use]
    pub fn size(mut self, size: impl Into<Size>) -> Self {
        self.size = Some(size.into());
        self
    }

    fn add_to(&self, mut augment: Augment) -> Result<Augment> {
        if self.min_scale < 1.0 && self.size.is_none() {
            return Err(Error::invalid_argument(
                "aug_transforms().min_scale(…) crops, and needs .size(…) to bring the crops to one size",
            ));
        }
        let [rotate, lighting, warp] =
            [self.max_rotate, self.max_lighting, self.max_warp].map(|most| most * self.mult);
        let p = self.p_affine;
        if self.flip {
            augment = augment.then(if self.flip_vertical {
                Geometric::Dihedral { p: 0.5 }
            } else {
                Geometric::Flip { p: 0.5 }
            });
        }
        if warp > 0.0 {
            augment = augment.then(Geometric::Warp { magnitude: warp, p });
        }
        if rotate > 0.0 {
            augment = augment.then(Geometric::Rotate { max_degrees: rotate, p });
        }
        if self.min_zoom < 1.0 || self.max_zoom > 1.0 {
            let (min, max) = (self.min_zoom, self.max_zoom);
            augment = augment.then(Geometric::Zoom { min, max, p });
        }
        if self.min_scale < 1.0 {
            augment = augment.then(Geometric::Crop { min_scale: self.min_scale });
        }
        if lighting > 0.0 {
            let (max, p) = (lighting, self.p_lighting);
            augment = augment.lighting(Lighting::Brightness { max, p });
            augment = augment.lighting(Lighting::Contrast { max, p });
        }
        if let Some(size) = self.size {
            augment = augment.size(size);
        }
        Ok(augment.padding(self.padding))
    }
}

/// Erases a rectangle of the batch's images in training, each with probability `p`, and fills it with noise of mean 0
/// and standard deviation 1 after normalisation: fastai's `RandomErasing`. `RandomErasing::default()` has torchvision's
/// options.
#[must_use]
pub fn random_erasing(p: f64) -> RandomErasing {
    RandomErasing { p, ..RandomErasing::fastai() }
}

/// Changes the saturation of the batch's images in training by up to `max`, 0.2 in fastai, with a probability of 0.75:
/// fastai's `Saturation`. [`Lighting`] has the probability as an option.
#[must_use]
pub fn saturation(max: f64) -> Lighting {
    Lighting::Saturation { max, p: 0.75 }
}

/// Shifts the hue of the batch's images in training by up to `max`, 0.1 in fastai, with a probability of 0.75: fastai's
/// `Hue`.
#[must_use]
pub fn hue(max: f64) -> Hue {
    Hue { max, ..Hue::default() }
}

type Function = dyn Fn(&Tensor) -> Result<Tensor> + Send + Sync;

/// A transform of batches: [`Normalize`], [`AugTransforms`], a custom [`Augment`], a [`Lighting`] or [`Hue`], a
/// [`RandomErasing`], a [function](Self::function).
#[derive(Clone)]
pub struct BatchTransform(Kind);

#[derive(Clone)]
enum Kind {
    Normalize(Normalize),
    AugTransforms(AugTransforms),
    Augment(Augment),
    Lighting(Lighting),
    Hue(Hue),
    Erasing(RandomErasing),
    Function(Arc<Function>),
}

impl BatchTransform {
    /// Makes a transform from a function of images `[n, channels, h, w]`. It runs after all other transforms,
    /// normalisation included, in training and in validation. A Learner with such a transform cannot be exported.
    pub fn function(function: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static) -> Self {
        Self(Kind::Function(Arc::new(function)))
    }
}

impl fmt::Debug for BatchTransform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Normalize(part) => part.fmt(f),
            Kind::AugTransforms(part) => part.fmt(f),
            Kind::Augment(part) => part.fmt(f),
            Kind::Lighting(part) => part.fmt(f),
            Kind::Hue(part) => part.fmt(f),
            Kind::Erasing(part) => part.fmt(f),
            Kind::Function(_) => f.write_str("a function"),
        }
    }
}

macro_rules! parts {
    ($($part:ty => $kind:ident;)+) => {
        $(impl Part for $part {
            type Transform = BatchTransform;

            fn part(self) -> BatchTransform {
                BatchTransform(Kind::$kind(self))
            }
        })+
    };
}

parts! {
    Normalize => Normalize;
    AugTransforms => AugTransforms;
    Augment => Augment;
    Lighting => Lighting;
    Hue => Hue;
    RandomErasing => Erasing;
}

impl Part for BatchTransform {
    type Transform = Self;

    fn part(self) -> Self {
        self
    }
}

/// Combined transforms of batches, in fastai's order: one resampling, then lighting, hue, normalisation and erasing,
/// then functions.
#[derive(Clone, Default)]
pub(super) struct BatchPipeline {
    pub(super) augment: Augment,
    pub(super) functions: Vec<Arc<Function>>,
}

impl BatchPipeline {
    /// Combines transforms, and returns `true` if the statistics of the first batch are needed. If two are of the same
    /// kind the last one is used, as in fastai.
    pub(super) fn new(transforms: &[BatchTransform]) -> Result<(Self, bool)> {
        let mut augment = Augment::new();
        for transform in transforms {
            if let Kind::Augment(own) = &transform.0 {
                if own.mixes() {
                    return Err(Error::invalid_argument(
                        "a mixture of images mixes their targets, too, which a data block does not; use the \
                         Learner's MixUp or CutMix",
                    ));
                }
                augment = own.clone();
            }
        }
        let (mut functions, mut by_batch) = (Vec::new(), false);
        for transform in transforms {
            match &transform.0 {
                Kind::AugTransforms(part) => augment = part.add_to(augment)?,
                Kind::Lighting(part) => augment = augment.lighting(*part),
                Kind::Hue(part) => augment = augment.hue(*part),
                Kind::Erasing(part) => augment = augment.erasing(*part),
                Kind::Normalize(Normalize(Some(statistics))) => {
                    (augment, by_batch) = (augment.normalize(*statistics), false);
                }
                Kind::Normalize(Normalize(None)) => by_batch = true,
                Kind::Function(function) => functions.push(Arc::clone(function)),
                Kind::Augment(_) => {}
            }
        }
        Ok((Self { augment, functions }, by_batch))
    }

    /// Normalises with these statistics.
    pub(super) fn normalized(self, by: images::Normalize) -> Self {
        Self { augment: self.augment.normalize(by), ..self }
    }

    /// Returns the transforms of validation.
    pub(super) fn validation(&self) -> Self {
        Self { augment: self.augment.validation(), functions: self.functions.clone() }
    }

    /// Transforms images with the numbers that were drawn for them.
    pub(super) fn apply(&self, images: &Tensor, drawn: &Tensor) -> Result<Tensor> {
        let images = self.augment.apply(images, drawn)?;
        self.functions.iter().try_fold(images, |images, function| function(&images))
    }
}

impl fmt::Debug for BatchPipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BatchPipeline")
            .field("augment", &self.augment)
            .field("functions", &self.functions.len())
            .finish()
    }
}
