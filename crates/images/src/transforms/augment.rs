//! Augmentations of which each image gets some at random.

use serde::{Deserialize, Serialize};

use super::{Interpolation, Operation, Phase, SampleRng, Transform, affine};
use crate::{ImageError, Result, Size};

/// Applies some operations of one strength, drawn anew for each image, in training: torchvision's
/// `RandAugment` on PIL images.
///
/// ```
/// use brigade_images::Size;
/// use brigade_images::transforms::{Compose, Phase, RandAugment};
///
/// let augment = Compose::new().then(RandAugment::default().magnitude(7));
/// let plan = augment.plan(Size::from(32), Phase::Train, 4)?;
/// assert!(plan.operations().len() <= 2);
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RandAugment {
    operations: usize,
    magnitude: usize,
    bins: usize,
    #[serde(default)]
    interpolation: Interpolation,
    fill: [u8; 3],
}

impl RandAugment {
    /// Sets how many operations an image gets.
    #[must_use]
    pub const fn operations(mut self, count: usize) -> Self {
        self.operations = count;
        self
    }

    /// Sets the strength, below the number of bins.
    #[must_use]
    pub const fn magnitude(mut self, magnitude: usize) -> Self {
        self.magnitude = magnitude;
        self
    }

    /// Sets how many strengths there are.
    #[must_use]
    pub const fn bins(mut self, bins: usize) -> Self {
        self.bins = bins;
        self
    }

    /// Sets how affine maps find values between pixels. Defaults to the nearest pixel.
    #[must_use]
    pub const fn interpolation(mut self, interpolation: Interpolation) -> Self {
        self.interpolation = interpolation;
        self
    }

    /// Sets the colour of what comes from outside of the image; black unless set.
    #[must_use]
    pub const fn fill(mut self, colour: [u8; 3]) -> Self {
        self.fill = colour;
        self
    }
}

/// With 2 operations of strength 9 of 31, as torchvision's.
impl Default for RandAugment {
    fn default() -> Self {
        Self {
            operations: 2,
            magnitude: 9,
            bins: 31,
            interpolation: Interpolation::Nearest,
            fill: [0; 3],
        }
    }
}

/// Applies one operation of random strength to each image, in training: torchvision's
/// `TrivialAugmentWide` on PIL images.
///
/// ```
/// use brigade_images::Size;
/// use brigade_images::transforms::{Compose, Phase, TrivialAugmentWide};
///
/// let augment = Compose::new().then(TrivialAugmentWide::default());
/// let plan = augment.plan(Size::from(32), Phase::Train, 4)?;
/// assert!(plan.operations().len() <= 1);
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrivialAugmentWide {
    bins: usize,
    #[serde(default)]
    interpolation: Interpolation,
    fill: [u8; 3],
}

impl TrivialAugmentWide {
    /// Sets how many strengths there are.
    #[must_use]
    pub const fn bins(mut self, bins: usize) -> Self {
        self.bins = bins;
        self
    }

    /// Sets how affine maps find values between pixels. Defaults to the nearest pixel.
    #[must_use]
    pub const fn interpolation(mut self, interpolation: Interpolation) -> Self {
        self.interpolation = interpolation;
        self
    }

    /// Sets the colour of what comes from outside of the image; black unless set.
    #[must_use]
    pub const fn fill(mut self, colour: [u8; 3]) -> Self {
        self.fill = colour;
        self
    }
}

/// With 31 strengths, as torchvision's.
impl Default for TrivialAugmentWide {
    fn default() -> Self {
        Self { bins: 31, interpolation: Interpolation::Nearest, fill: [0; 3] }
    }
}

/// An operation that torchvision's automatic augmentations choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Identity,
    ShearX,
    ShearY,
    TranslateX,
    TranslateY,
    Rotate,
    Brightness,
    Color,
    Contrast,
    Sharpness,
    Posterize,
    Solarize,
    AutoContrast,
    Equalize,
    Invert,
}

impl Kind {
    /// Those of `RandAugment` and `TrivialAugmentWide`, in torchvision's order.
    pub(super) const WIDE: [Self; 14] = [
        Self::Identity,
        Self::ShearX,
        Self::ShearY,
        Self::TranslateX,
        Self::TranslateY,
        Self::Rotate,
        Self::Brightness,
        Self::Color,
        Self::Contrast,
        Self::Sharpness,
        Self::Posterize,
        Self::Solarize,
        Self::AutoContrast,
        Self::Equalize,
    ];

    /// Draws one of a list, which must not be empty.
    pub(super) fn draw(kinds: &[Self], random: &mut SampleRng) -> Self {
        let index = random.below(kinds.len() as u64) as usize;
        kinds.get(index).copied().unwrap_or(Self::Identity)
    }

    /// Whether an operation of this kind goes either way.
    pub(super) fn is_signed(self) -> bool {
        use Kind::{AutoContrast, Equalize, Identity, Invert, Posterize, Solarize};

        !matches!(self, Identity | Posterize | Solarize | AutoContrast | Equalize | Invert)
    }
}

/// How strong each operation is at its strongest, and what its pixels are taken from.
pub(super) struct Space {
    shear: f32,
    /// Pixels across and down.
    translate: (f32, f32),
    rotate: f32,
    colour: f32,
    /// Bits that posterizing leaves at its weakest.
    kept_bits: u8,
    /// Bits that posterizing takes of these at its strongest.
    taken_bits: f32,
    interpolation: Interpolation,
    /// What comes from outside of the image.
    fill: [u8; 3],
}

impl Space {
    /// The strengths of torchvision's `RandAugment` and `AutoAugment`.
    pub(super) fn rand_augment(size: Size, interpolation: Interpolation, fill: [u8; 3]) -> Self {
        let across = |side: u32| (150.0 / 331.0 * f64::from(side)) as f32;
        Self {
            shear: 0.3,
            translate: (across(size.width), across(size.height)),
            rotate: 30.0,
            colour: 0.9,
            kept_bits: 8,
            taken_bits: 4.0,
            interpolation,
            fill,
        }
    }

    /// The strengths of torchvision's `TrivialAugmentWide`.
    pub(super) fn trivial_augment(interpolation: Interpolation, fill: [u8; 3]) -> Self {
        Self {
            shear: 0.99,
            translate: (32.0, 32.0),
            rotate: 135.0,
            colour: 0.99,
            kept_bits: 8,
            taken_bits: 6.0,
            interpolation,
            fill,
        }
    }

    /// The strengths of torchvision's `AugMix`.
    pub(super) fn aug_mix(size: Size, interpolation: Interpolation, fill: [u8; 3]) -> Self {
        let across = |side: u32| (f64::from(side) / 3.0) as f32;
        Self {
            translate: (across(size.width), across(size.height)),
            kept_bits: 4,
            ..Self::rand_augment(size, interpolation, fill)
        }
    }

    /// Returns the operation of a kind at a strength; `None` for the one that does nothing.
    pub(super) fn operation(
        &self,
        kind: Kind,
        magnitude: usize,
        bins: usize,
        negative: bool,
        size: Size,
    ) -> Option<Operation> {
        let signed = |most: f32| {
            let value = f64::from(linspace(0.0, most, bins, magnitude));
            if negative { -value } else { value }
        };
        let factor = || (1.0 + signed(self.colour)) as f32;
        let centre = (f64::from(size.width) * 0.5, f64::from(size.height) * 0.5);
        let affine = |matrix| Operation::Affine {
            matrix,
            interpolation: self.interpolation,
            fill: self.fill,
        };
        Some(match kind {
            Kind::Identity => return None,
            Kind::ShearX => affine(affine::shear(signed(self.shear), 0.0)),
            Kind::ShearY => affine(affine::shear(0.0, signed(self.shear))),
            Kind::TranslateX => {
                affine(affine::translate(signed(self.translate.0).trunc(), 0.0, centre))
            }
            Kind::TranslateY => {
                affine(affine::translate(0.0, signed(self.translate.1).trunc(), centre))
            }
            Kind::Rotate => affine(affine::rotate(signed(self.rotate), centre)),
            Kind::Brightness => Operation::Brightness(factor()),
            Kind::Color => Operation::Saturation(factor()),
            Kind::Contrast => Operation::Contrast(factor()),
            Kind::Sharpness => Operation::Sharpness(factor()),
            Kind::Posterize => {
                let taken = magnitude as f32 / ((bins.max(2) - 1) as f32 / self.taken_bits);
                let taken = (taken.round_ties_even() as u8).min(self.kept_bits);
                Operation::Posterize(self.kept_bits - taken)
            }
            Kind::Solarize => Operation::Solarize(linspace(255.0, 0.0, bins, magnitude)),
            Kind::AutoContrast => Operation::AutoContrast,
            Kind::Equalize => Operation::Equalize,
            Kind::Invert => Operation::Invert,
        })
    }
}

/// Returns `torch.linspace(start, end, count)[index]` in single precision, which torch counts from
/// the nearer end with one rounding.
fn linspace(start: f32, end: f32, count: usize, index: usize) -> f32 {
    if count < 2 {
        return start;
    }
    let step = (end - start) / (count - 1) as f32;
    if index < count / 2 {
        step.mul_add(index as f32, start)
    } else {
        (-step).mul_add(count.saturating_sub(index + 1) as f32, end)
    }
}

fn check_bins(bins: usize, magnitude: usize) -> Result<()> {
    if magnitude < bins {
        return Ok(());
    }
    Err(ImageError::InvalidArgument(format!(
        "an augmentation of {bins} strengths has none of number {magnitude}; strengths count from 0"
    )))
}

impl Transform for RandAugment {
    fn draw(
        &self,
        size: Size,
        phase: Phase,
        random: &mut SampleRng,
        operations: &mut Vec<Operation>,
    ) -> Result<()> {
        check_bins(self.bins, self.magnitude)?;
        if phase == Phase::Valid {
            return Ok(());
        }
        let space = Space::rand_augment(size, self.interpolation, self.fill);
        for _ in 0..self.operations {
            let kind = Kind::draw(&Kind::WIDE, random);
            let negative = kind.is_signed() && random.chance(0.5);
            operations.extend(space.operation(kind, self.magnitude, self.bins, negative, size));
        }
        Ok(())
    }

    fn is_random(&self, phase: Phase) -> bool {
        phase == Phase::Train
    }
}

impl Transform for TrivialAugmentWide {
    fn draw(
        &self,
        size: Size,
        phase: Phase,
        random: &mut SampleRng,
        operations: &mut Vec<Operation>,
    ) -> Result<()> {
        check_bins(self.bins, 0)?;
        if phase == Phase::Valid {
            return Ok(());
        }
        let space = Space::trivial_augment(self.interpolation, self.fill);
        let kind = Kind::draw(&Kind::WIDE, random);
        let magnitude = random.below(self.bins as u64) as usize;
        let negative = kind.is_signed() && random.chance(0.5);
        operations.extend(space.operation(kind, magnitude, self.bins, negative, size));
        Ok(())
    }

    fn is_random(&self, phase: Phase) -> bool {
        phase == Phase::Train
    }
}
