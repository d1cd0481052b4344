//! Execution of one operation on all pixels of an image.

use std::{fmt, mem};

use super::Renderer;
use crate::image::{Image, ImageView, NoMemory, Size};
use crate::transforms::{Operation, Plan, affine, pad, pixels};
use crate::{ImageError, Result};

impl Operation {
    /// Applies an operation that is not a crop, a flip or a resize. `spare` is memory for a second image.
    pub(super) fn apply(&self, image: &mut Image, spare: &mut Image) -> Result<()> {
        match *self {
            Self::Pad { left, top, right, bottom, mode } => {
                let size = self.size_after(image.size())?;
                refuse_above(self, size, MAX_PIXELS)?;
                pad::pad(image.view(), [left, top, right, bottom], mode, spare.reset(size)?);
                mem::swap(image, spare);
            }
            Self::Affine { matrix, interpolation, fill } => {
                let out = spare.reset(image.size())?;
                affine::transform(image.view(), &matrix, interpolation, fill, out);
                mem::swap(image, spare);
            }
            Self::Mix { weight, ref chains } => {
                mix(image.view(), weight, chains, spare)?;
                mem::swap(image, spare);
            }
            Self::Sharpness(factor) => {
                spare.copy_from(image.view())?;
                pixels::sharpness(spare.view(), factor, image.pixels_mut());
            }
            Self::Brightness(factor) => pixels::brightness(image.pixels_mut(), factor),
            Self::Contrast(factor) => pixels::contrast(image.pixels_mut(), factor),
            Self::Saturation(factor) => pixels::saturation(image.pixels_mut(), factor),
            Self::Hue(turn) => pixels::hue(image.pixels_mut(), turn),
            Self::Posterize(bits) => pixels::posterize(image.pixels_mut(), bits),
            Self::Solarize(threshold) => pixels::solarize(image.pixels_mut(), threshold),
            Self::AutoContrast => pixels::auto_contrast(image.pixels_mut()),
            Self::Equalize => pixels::equalize(image.pixels_mut()),
            Self::Invert => image.pixels_mut().iter_mut().for_each(|value| *value = !*value),
            Self::Crop(_) | Self::Resize { .. } | Self::FlipHorizontal | Self::FlipVertical => {}
        }
        Ok(())
    }
}

/// Writes the weighted sum of an image and of the results of chains to `out`.
fn mix(
    image: ImageView<'_>,
    weight: f32,
    chains: &[(f32, Vec<Operation>)],
    out: &mut Image,
) -> Result<()> {
    let size = image.size();
    let mut sums = Vec::new();
    sums.try_reserve_exact(image.pixels().len()).map_err(|_| NoMemory(size))?;
    sums.extend(image.pixels().iter().map(|value| weight * f32::from(*value)));
    let mut renderer = Renderer::new();
    for (weight, chain) in chains {
        renderer.render(image, &Plan::of(size, chain.clone())?)?;
        renderer.swap_image(out);
        for (sum, value) in sums.iter_mut().zip(out.pixels()) {
            *sum += weight * f32::from(*value);
        }
    }
    for (value, sum) in out.reset(size)?.iter_mut().zip(sums) {
        // A cast truncates the fraction.
        *value = sum as u8;
    }
    Ok(())
}

/// Maximum number of pixels of the result of a step: 400 MB. A header can contain a side of 65,535 next to one of 1,
/// and a resize by the shorter side multiplies both.
pub(super) const MAX_PIXELS: u64 = 1 << 27;

/// Fails if the result of a step would have more than `limit` pixels.
pub(super) fn refuse_above(step: &dyn fmt::Display, size: Size, limit: u64) -> Result<()> {
    if size.pixels() <= limit {
        return Ok(());
    }
    Err(ImageError::InvalidArgument(format!(
        "{step} would make an image of {size} pixels, more than {limit} in all"
    )))
}
