//! Resampling with the same results as Pillow.

use std::fmt;

use fast_image_resize as fir;
use fir::images::{TypedCroppedImage, TypedImage, TypedImageRef};
use fir::pixels::U8x3;
use serde::{Deserialize, Serialize};

use crate::image::{CropBox, Image, ImageView, Region, Size};
use crate::{ImageError, Result};

/// The resampling filter of a resize: Pillow's `Resampling`.
///
/// All filters but `Nearest` are antialiased: the filter is widened when the image shrinks, as in Pillow and in
/// torchvision with `antialias=True`.
///
/// ```
/// use brigade_images::Filter;
///
/// assert_eq!(Filter::default(), Filter::Bilinear);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Filter {
    /// Nearest pixel, for segmentation masks.
    Nearest,
    /// Box filter: the mean of the pixels that a new one covers.
    Box,
    /// Triangle filter of radius 1.
    #[default]
    Bilinear,
    /// Sinc filter of radius 1 with a Hamming window.
    Hamming,
    /// Cubic filter of Catmull and Rom, of radius 2.
    Bicubic,
    /// Sinc filter of radius 3 with a Lanczos window.
    Lanczos,
}

impl Filter {
    fn convolution(self) -> Option<fir::FilterType> {
        use fir::FilterType::Custom;

        match self {
            Self::Nearest => None,
            Self::Box => Some(fir::FilterType::Box),
            Self::Bilinear => Some(fir::FilterType::Bilinear),
            Self::Hamming => Some(fir::FilterType::Hamming),
            // The support of 2 is valid, so that this cannot fail.
            Self::Bicubic => fir::Filter::new("bicubic", bicubic, 2.0).ok().map(Custom),
            Self::Lanczos => Some(fir::FilterType::Lanczos3),
        }
    }

    /// Returns the radius of the filter in pixels if the image is not made smaller.
    pub(crate) fn radius(self) -> f64 {
        match self {
            Self::Nearest | Self::Box => 0.5,
            Self::Bilinear | Self::Hamming => 1.0,
            Self::Bicubic => 2.0,
            Self::Lanczos => 3.0,
        }
    }
}

/// The cubic of Catmull and Rom, whose zeros at a distance of 1 are replaced by a number that rounds to the weight 0.
/// fast_image_resize (6.1) leaves out zeros at the ends of a pixel's window and takes the first window for the leftmost
/// one. With a zero within the support that is wrong where the image's edge cuts windows, and pixels outside of its
/// memory would be read.
fn bicubic(distance: f64) -> f64 {
    const A: f64 = -0.5;
    let x = distance.abs();
    let weight = if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        return 0.0;
    };
    if weight == 0.0 { f64::MIN_POSITIVE } else { weight }
}

/// Resizes images. It reuses the memory of its steps.
///
/// The result equals that of Pillow's `Image.resize` within one grey level.
///
/// ```
/// use brigade_images::{Filter, Image, Resizer, Size};
///
/// let image = Image::new(2, 1, vec![0, 0, 0, 200, 100, 50])?;
/// let mut half = Image::new(1, 1, vec![0; 3])?;
/// Resizer::new().resize(image.view(), Size::from(1), Filter::Bilinear, &mut half)?;
/// assert_eq!(half.pixel(0, 0), Some([100, 50, 25]));
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Default)]
pub struct Resizer {
    inner: fir::Resizer,
}

impl Resizer {
    /// Creates a resizer, which allocates memory at the first image.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Resizes `image` to `size` into `target`.
    ///
    /// # Errors
    /// Fails if a side of `size` is 0 or there is not enough memory.
    pub fn resize(
        &mut self,
        image: ImageView<'_>,
        size: Size,
        filter: Filter,
        target: &mut Image,
    ) -> Result<()> {
        let whole = Region::whole(image.size());
        self.resize_part(image, whole, whole.into(), size, filter, target)
    }

    /// Resizes the part of an image in the box `part` to `size` into `target`: Pillow's `box`.
    ///
    /// The sides of the box may lie within pixels. The filter reads pixels outside of the box, but none outside of
    /// `edge`, so that an image that was cropped to `edge` before gives the same result.
    ///
    /// # Errors
    /// Fails if the box is not inside of `edge`, `edge` is not inside of the image, a side of `size` is 0, or there is
    /// not enough memory.
    pub fn resize_part(
        &mut self,
        image: ImageView<'_>,
        edge: Region,
        part: CropBox,
        size: Size,
        filter: Filter,
        target: &mut Image,
    ) -> Result<()> {
        if size.pixels() == 0 {
            return Err(ImageError::InvalidArgument(format!(
                "an image cannot be resized to {size} pixels"
            )));
        }
        if !edge.lies_in(image.size()) {
            return Err(ImageError::InvalidArgument(format!(
                "the region {edge} does not lie in an image of {}",
                image.size()
            )));
        }
        let (left, width) = within(part.left - f64::from(edge.left), part.width, edge.width)
            .ok_or_else(|| outside(part, edge))?;
        let (top, height) = within(part.top - f64::from(edge.top), part.height, edge.height)
            .ok_or_else(|| outside(part, edge))?;
        let Some(convolution) = filter.convolution() else {
            return nearest(image, edge, [left, top, width, height], size, target);
        };
        let source = image.size();
        let options = fir::ResizeOptions::new()
            .resize_alg(fir::ResizeAlg::Convolution(convolution))
            .crop(left, top, width, height)
            .use_alpha(false);
        let refused = |what: &dyn fmt::Display| {
            ImageError::InvalidArgument(format!(
                "an image of {source} pixels cannot be resized to {size}: {what}"
            ))
        };
        let pixels =
            TypedImageRef::<U8x3>::from_buffer(source.width, source.height, image.pixels())
                .map_err(|error| refused(&error))?;
        let pixels = TypedCroppedImage::new(pixels, edge.left, edge.top, edge.width, edge.height)
            .map_err(|error| refused(&error))?;
        let mut out = TypedImage::<U8x3>::from_buffer(size.width, size.height, target.reset(size)?)
            .map_err(|error| refused(&error))?;
        self.inner.resize_typed(&pixels, &mut out, &options).map_err(|error| refused(&error))
    }
}

impl fmt::Debug for Resizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resizer").finish_non_exhaustive()
    }
}

/// Clamps to `0..limit` what is outside of it by rounding only; `None` if the excess is larger.
fn within(start: f64, length: f64, limit: u32) -> Option<(f64, f64)> {
    const ROUNDING: f64 = 1e-6;
    let (limit, end) = (f64::from(limit), start + length);
    if !(length > 0.0 && start >= -ROUNDING && end <= limit + ROUNDING) {
        return None;
    }
    let start = start.max(0.0);
    // Start plus length, computed again later, must not exceed the limit by a last bit.
    let mut length = end.min(limit) - start;
    while start + length > limit {
        length = length.next_down();
    }
    (length > 0.0).then_some((start, length))
}

fn outside(part: CropBox, edge: Region) -> ImageError {
    ImageError::InvalidArgument(format!(
        "the box {} x {} at column {}, row {} does not lie in the region {edge}",
        part.width, part.height, part.left, part.top
    ))
}

/// Takes the pixel under the centre of each new one.
fn nearest(
    image: ImageView<'_>,
    edge: Region,
    [left, top, width, height]: [f64; 4],
    size: Size,
    target: &mut Image,
) -> Result<()> {
    let columns = nearest_places(left, width, size.width, edge.width);
    let rows = nearest_places(top, height, size.height, edge.height);
    let pixels: Vec<&[u8]> = image.rows(edge).collect();
    let out = target.reset(size)?;
    for (y, out) in rows.into_iter().zip(out.chunks_exact_mut(3 * size.columns())) {
        let row = pixels.get(y).map_or(&[][..], |row| row.as_chunks::<3>().0);
        for (x, out) in columns.iter().zip(out.as_chunks_mut::<3>().0) {
            *out = row.get(*x).copied().unwrap_or_default();
        }
    }
    Ok(())
}

/// Returns the index under the centre of each of `count` pixels. The centres are summed up in the same way as in
/// Pillow: if one falls on the border between two pixels, the last bit decides.
fn nearest_places(start: f64, length: f64, count: u32, limit: u32) -> Vec<usize> {
    let scale = length / f64::from(count);
    let mut centre = start + scale * 0.5;
    let next = |_| {
        let place = (centre as u32).min(limit - 1) as usize;
        centre += scale;
        place
    };
    (0..count).map(next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Boxes for which a filter has a zero at the image's edge, in one pixel's window and not in the next.
    #[test]
    fn zeros_of_a_filter_at_the_edge_stay_in_its_window() {
        let size = Size::new(9, 7);
        let image =
            Image::new(size.width, size.height, (0..189).map(|n| (n * 37 % 251) as u8).collect());
        let image = image.unwrap();
        let mut out = Image::scratch();
        for filter in
            [Filter::Box, Filter::Bilinear, Filter::Hamming, Filter::Bicubic, Filter::Lanczos]
        {
            // The first centre is 1.5, one pixel from the centre of the first column.
            for (start, scale) in [(1.1, 0.8), (1.25, 0.5), (0.0, 3.0), (1.0, 1.0), (0.75, 1.5)] {
                let count = ((7.0 - start) / scale) as u32;
                let length = f64::from(count) * scale;
                let part = CropBox { left: start, top: start, width: length, height: length };
                let part = CropBox { height: length.min(7.0 - start), ..part };
                let edge = Region::whole(size);
                let mut resizer = Resizer::new();
                let target = Size::from(count.max(1));
                resizer.resize_part(image.view(), edge, part, target, filter, &mut out).unwrap();
                assert_eq!(out.size(), target);
            }
        }
        assert_eq!(bicubic(1.0).to_bits(), f64::MIN_POSITIVE.to_bits());
        assert_eq!((bicubic(0.0), bicubic(2.0), bicubic(-1.5)), (1.0, 0.0, -0.0625));
    }
}
