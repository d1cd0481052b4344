//! Common part of torchvision's automatic augmentations: kinds of operations and their strengths.

use super::{Interpolation, Operation, SampleRng, affine};
use crate::{ImageError, Result, Size};

/// An operation that torchvision's automatic augmentations choose from.
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
    /// The operations of `RandAugment` and `TrivialAugmentWide`, in torchvision's order.
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

    /// Draws one kind of a list, which must not be empty.
    pub(super) fn draw(kinds: &[Self], random: &mut SampleRng) -> Self {
        let index = random.below(kinds.len() as u64) as usize;
        kinds.get(index).copied().unwrap_or(Self::Identity)
    }

    /// Returns `true` if the strength of this kind of operation can be negative.
    pub(super) fn is_signed(self) -> bool {
        use Kind::{AutoContrast, Equalize, Identity, Invert, Posterize, Solarize};

        !matches!(self, Identity | Posterize | Solarize | AutoContrast | Equalize | Invert)
    }
}

/// Maximum strength of each operation, the interpolation, and the colour of pixels from outside of the image.
pub(super) struct Space {
    shear: f32,
    /// Columns and rows of the largest translation.
    translate: (f32, f32),
    rotate: f32,
    colour: f32,
    /// Number of bits that posterizing keeps at its weakest.
    kept_bits: u8,
    /// Number of these bits that posterizing removes at its strongest.
    taken_bits: f32,
    interpolation: Interpolation,
    /// Colour of pixels from outside of the image.
    fill: [u8; 3],
}

impl Space {
    /// Returns the strengths of torchvision's `RandAugment` and `AutoAugment`.
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

    /// Returns the strengths of torchvision's `TrivialAugmentWide`.
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

    /// Returns the strengths of torchvision's `AugMix`.
    pub(super) fn aug_mix(size: Size, interpolation: Interpolation, fill: [u8; 3]) -> Self {
        let across = |side: u32| (f64::from(side) / 3.0) as f32;
        Self {
            translate: (across(size.width), across(size.height)),
            kept_bits: 4,
            ..Self::rand_augment(size, interpolation, fill)
        }
    }

    /// Returns the operation of a kind with a strength; `None` for the identity.
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

/// Returns `torch.linspace(start, end, count)[index]` in single precision, which torch computes from the nearer end
/// with one rounding.
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

pub(super) fn check_bins(bins: usize, magnitude: usize) -> Result<()> {
    if magnitude < bins {
        return Ok(());
    }
    Err(ImageError::InvalidArgument(format!(
        "an augmentation of {bins} strengths has none of number {magnitude}; strengths count from 0"
    )))
}

/// Adds the options of the affine transforms among the operations, for a transform with the fields `interpolation` and
/// `fill`.
macro_rules! affine_options {
    ($transform:ident, $default:literal) => {
        impl $transform {
            #[doc = concat!("Sets how affine maps find values between pixels. Defaults to ", $default, ".")]
            #[must_use]
            pub const fn interpolation(mut self, interpolation: Interpolation) -> Self {
                self.interpolation = interpolation;
                self
            }

            /// Sets the colour of pixels from outside of the image. Defaults to black.
            #[must_use]
            pub const fn fill(mut self, colour: [u8; 3]) -> Self {
                self.fill = colour;
                self
            }
        }
    };
}
pub(super) use affine_options;
