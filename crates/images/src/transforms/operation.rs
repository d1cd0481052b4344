//! Operations on an image, as data.

use std::fmt;

use super::affine::Interpolation;
use super::pad::PadMode;
use crate::image::{Region, Size};
use crate::resize::Filter;
use crate::{ImageError, Result};

/// An operation on an image, with all values that were chosen at random.
///
/// ```
/// use brigade_images::transforms::Operation;
/// use brigade_images::{Region, Size};
///
/// let crop = Operation::Crop(Region { left: 8, top: 0, width: 24, height: 24 });
/// assert!(crop.is_geometric());
/// assert_eq!(crop.size_after(Size::new(64, 48))?, Size::from(24));
/// assert!(crop.size_after(Size::new(16, 16)).is_err());
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Operation {
    /// Crops to a region. If the region of a transform exceeds the right or the lower edge, [`Compose`](super::Compose)
    /// adds black pixels first.
    Crop(Region),
    /// Adds pixels on the four sides.
    Pad {
        /// Number of columns before the first.
        left: u32,
        /// Number of rows before the first.
        top: u32,
        /// Number of columns after the last.
        right: u32,
        /// Number of rows after the last.
        bottom: u32,
        /// Content of the added pixels.
        mode: PadMode,
    },
    /// Resizes, with antialiasing; see [`Resizer`](crate::Resizer).
    Resize {
        /// Size of the result.
        size: Size,
        /// Resampling filter of the resize.
        filter: Filter,
    },
    /// Mirrors left and right.
    FlipHorizontal,
    /// Mirrors top and bottom.
    FlipVertical,
    /// Applies an affine transform: Pillow's `Image.transform(AFFINE)`. The pixel in column `i` and row `j` of the
    /// result has the value of the image at `(a x + b y + c, d x + e y + f)`, where `(x, y)` is the centre of the
    /// pixel, `(i + 0.5, j + 0.5)`.
    Affine {
        /// Coefficients `[a, b, c, d, e, f]`.
        matrix: [f64; 6],
        /// Interpolation between pixels.
        interpolation: Interpolation,
        /// Colour of pixels from outside of the image.
        fill: [u8; 3],
    },
    /// Multiplies by a factor: Pillow's `ImageEnhance.Brightness`.
    Brightness(f32),
    /// Scales the difference from the mean grey: Pillow's `ImageEnhance.Contrast`.
    Contrast(f32),
    /// Scales the difference from the pixel's own grey: Pillow's `ImageEnhance.Color`.
    Saturation(f32),
    /// Rotates the hue by a fraction of the full circle, -0.5 to 0.5: torchvision's `adjust_hue`.
    Hue(f64),
    /// Scales the difference from the smoothed image: Pillow's `ImageEnhance.Sharpness`.
    Sharpness(f32),
    /// Keeps the upper bits of each value, 0 to 8: Pillow's `ImageOps.posterize`.
    Posterize(u8),
    /// Inverts the values from a threshold on: Pillow's `ImageOps.solarize`.
    Solarize(f32),
    /// Stretches each channel to the range 0 to 255: Pillow's `ImageOps.autocontrast`.
    AutoContrast,
    /// Equalizes the histogram of each channel: Pillow's `ImageOps.equalize`.
    Equalize,
    /// Inverts all values: Pillow's `ImageOps.invert`.
    Invert,
    /// Computes the weighted sum of the image and of the results of chains of operations, in `f32`, and truncates the
    /// fraction: the mixture of AugMix. A chain must keep the size.
    Mix {
        /// Weight of the image itself.
        weight: f32,
        /// Weight of each chain's result, and the operations of the chain.
        chains: Vec<(f32, Vec<Self>)>,
    },
}

impl Operation {
    /// Returns `true` if the operation moves pixels, so that it must also be applied to a mask.
    #[must_use]
    pub fn is_geometric(&self) -> bool {
        matches!(
            self,
            Self::Crop(_)
                | Self::Pad { .. }
                | Self::Resize { .. }
                | Self::FlipHorizontal
                | Self::FlipVertical
                | Self::Affine { .. }
        )
    }

    /// Returns `true` if the operation does not commute with mirroring.
    pub(super) fn depends_on_orientation(&self) -> bool {
        self.is_geometric() || matches!(self, Self::Mix { .. })
    }

    /// Returns the position of a point of an image of `size` after the operation, in pixels from the upper left corner.
    /// An affine transform without an inverse leaves the point where it is.
    #[must_use]
    pub fn map_point(&self, [x, y]: [f64; 2], size: Size) -> [f64; 2] {
        let (width, height) = (f64::from(size.width), f64::from(size.height));
        match self {
            Self::Crop(region) => [x - f64::from(region.left), y - f64::from(region.top)],
            Self::Pad { left, top, .. } => [x + f64::from(*left), y + f64::from(*top)],
            Self::Resize { size: to, .. } => {
                [x * f64::from(to.width) / width, y * f64::from(to.height) / height]
            }
            Self::FlipHorizontal => [width - x, y],
            Self::FlipVertical => [x, height - y],
            Self::Affine { matrix: [a, b, c, d, e, f], .. } => {
                let determinant = a * e - b * d;
                if determinant == 0.0 {
                    return [x, y];
                }
                let (x, y) = (x - c, y - f);
                [(e * x - b * y) / determinant, (a * y - d * x) / determinant]
            }
            _ => [x, y],
        }
    }

    /// Returns the size of an image of `size` after the operation.
    ///
    /// # Errors
    /// Fails if the operation cannot be applied to an image of that size, or the result would be larger than any image
    /// that is decoded.
    pub fn size_after(&self, size: Size) -> Result<Size> {
        let keeps_size = |(_, chain): &(f32, Vec<Self>)| {
            let after = chain.iter().try_fold(size, |size, next| next.size_after(size));
            after.is_ok_and(|after| after == size)
        };
        let after = match *self {
            Self::Mix { ref chains, .. } if !chains.iter().all(keeps_size) => Size::new(0, 0),
            Self::Crop(region) if region.lies_in(size) => region.size(),
            Self::Pad { left, top, right, bottom, .. } => {
                let length = |before: u32, length: u32, after: u32| {
                    length.checked_add(before).and_then(|length| length.checked_add(after))
                };
                let width = length(left, size.width, right).unwrap_or(0);
                Size::new(width, length(top, size.height, bottom).unwrap_or(0))
            }
            Self::Resize { size, .. } => size,
            Self::Crop(_) => Size::new(0, 0),
            _ => size,
        };
        if after.pixels() == 0 {
            return Err(ImageError::InvalidArgument(format!(
                "{self} does not fit an image of {size} pixels"
            )));
        }
        Ok(after)
    }

    /// Returns the operation for a mask; `None` if masks are not changed.
    pub(super) fn for_masks(&self, outside: u8) -> Option<Self> {
        let fill = [outside; 3];
        match *self {
            Self::Resize { size, .. } => Some(Self::Resize { size, filter: Filter::Nearest }),
            Self::Affine { matrix, .. } => {
                Some(Self::Affine { matrix, interpolation: Interpolation::Nearest, fill })
            }
            Self::Pad { left, top, right, bottom, mode: PadMode::Constant(_) } => {
                Some(Self::Pad { left, top, right, bottom, mode: PadMode::Constant(fill) })
            }
            _ => self.is_geometric().then(|| self.clone()),
        }
    }
}

impl Region {
    /// Returns the black border that an image of `size` needs to contain the region, if one is needed.
    pub(super) fn padding(self, size: Size) -> Option<Operation> {
        let over =
            |start: u32, length: u32, side: u32| start.saturating_add(length).saturating_sub(side);
        let right = over(self.left, self.width, size.width);
        let bottom = over(self.top, self.height, size.height);
        let pad = Operation::Pad { left: 0, top: 0, right, bottom, mode: PadMode::ZEROS };
        (right > 0 || bottom > 0).then_some(pad)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Crop(region) => write!(f, "a crop of {region}"),
            Self::Pad { left, top, right, bottom, .. } => {
                write!(f, "padding by {left}, {top}, {right} and {bottom}")
            }
            Self::Resize { size, .. } => write!(f, "a resize to {size}"),
            Self::Mix { chains, .. } => write!(f, "a mixture of {} chains", chains.len()),
            other => write!(f, "{other:?}"),
        }
    }
}
