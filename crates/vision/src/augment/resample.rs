//! Resampling of images.

use serde::{Deserialize, Serialize};
use tch::{Kind, TchError, Tensor};

use super::Augment;
use super::geometry::moves_whole_pixels;
use crate::Size;

/// Padding mode: values of the pixels outside the image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Padding {
    /// Reflection: the image is mirrored at its outer pixels. fastai's default, `PadMode.Reflection`.
    #[default]
    Reflection,
    /// Border: the value of the nearest pixel of the image. fastai's `PadMode.Border`.
    Border,
    /// Zeros: fastai's `PadMode.Zeros`, and torchvision's default.
    Zeros,
}

impl Augment {
    /// Returns `true` if every pixel of the output is one of the image's, or lies outside of it.
    pub(super) fn moves_whole_pixels(&self, images: &Tensor) -> bool {
        let size = images.size();
        let (from, to) = (Size2::of(&size), self.to(&size));
        moves_whole_pixels(&self.geometric, from.lengths(), to.lengths())
    }

    /// Returns the output's size for images of this shape.
    fn to(&self, shape: &[i64]) -> Size2 {
        let set = |Size { width, height }| Size2 { width: width.into(), height: height.into() };
        self.size.map_or_else(|| Size2::of(shape), set)
    }

    /// Copies each pixel of the output from the pixel to which its map leads: values are unchanged.
    pub(super) fn moved(&self, images: &Tensor, drawn: &Tensor) -> Result<Tensor, TchError> {
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
                // Reflected as often as necessary; a single pixel is its own mirror image.
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

    /// Interpolates each pixel of the output in its image.
    pub(super) fn resampled(
        &self,
        images: &Tensor,
        drawn: &Tensor,
        by: Sampling,
    ) -> Result<Tensor, TchError> {
        let size = images.size();
        let (from, to) = (Size2::of(&size), self.to(&size));
        // Positions are computed in float32 also for 16-bit images.
        let kind = if images.kind() == Kind::Double { Kind::Double } else { Kind::Float };
        let [xs, ys] = places(drawn, to, kind)?;
        // From pixels to -1 ..= 1 between the centres of the outer pixels.
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

/// Width and height as int64, for libtorch.
#[derive(Clone, Copy)]
struct Size2 {
    width: i64,
    height: i64,
}

impl Size2 {
    /// Returns the size of the images of a batch `[n, c, h, w]`.
    fn of(shape: &[i64]) -> Self {
        let side = |at: usize| shape.get(at).copied().unwrap_or_default();
        Self { width: side(3), height: side(2) }
    }

    fn lengths(self) -> [f64; 2] {
        [self.width as f64, self.height as f64]
    }
}

/// Returns the positions to which the map of each sample takes the pixels of the output: columns and rows of the image,
/// `[n, h, w]` each. Computed with elementwise operations: a matrix product is rounded to 10 bits by GPUs that compute
/// in TF32, and to 8 under autocast, which would move pixels.
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

/// Interpolation mode, with libtorch's numbers.
#[derive(Clone, Copy)]
pub(super) enum Sampling {
    Bilinear = 0,
    Nearest = 1,
}
