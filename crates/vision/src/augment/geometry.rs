//! Geometric transforms: the random transforms of torchvision and fastai, combined to one homography for each sample.

use super::homography::Homography;
use crate::transforms::SampleRng;

/// A random geometric transform.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Geometric {
    /// fastai's `Flip`: mirrors left and right.
    Flip {
        /// Probability of the transform. Defaults to 0.5.
        p: f64,
    },
    /// fastai's `Dihedral`: one of the eight symmetries of the square.
    Dihedral {
        /// Probability of the transform. Defaults to 0.5.
        p: f64,
    },
    /// fastai's `Rotate`: rotates about the centre by an angle that is uniform up to `max_degrees` in either direction.
    Rotate {
        /// Maximum angle in degrees. Defaults to 10.
        max_degrees: f64,
        /// Probability of the transform. Defaults to 0.5.
        p: f64,
    },
    /// fastai's `Zoom`: enlarges by a uniform factor, at a uniform position of the visible part.
    Zoom {
        /// Minimum zoom factor. Defaults to 1.
        min: f64,
        /// Maximum zoom factor. Defaults to 1.1.
        max: f64,
        /// Probability of a factor other than 1. Defaults to 0.5.
        p: f64,
    },
    /// fastai's `RandomResizedCropGPU` with equal sides: crops a square region at a random position, whose area is
    /// uniform from `min_scale` of the image's area to all of it. fastai draws one region for a whole batch; here each
    /// image has its own. Use it after the other geometric transforms, with a square
    /// [`Augment::size`](super::Augment::size): large images that are rotated and warped at their full size then give
    /// crops without borders (presizing).
    Crop {
        /// Minimum share of the area. Defaults to 0.75.
        min_scale: f64,
    },
    /// torchvision's `RandomCrop` with padding: crops a region of [`Augment::size`](super::Augment::size), or of the
    /// image's own size, at a random position in the image extended by `padding` pixels of [`Padding`](super::Padding)
    /// on each side. If only flips are combined with it, pixels are moved and not resampled, so that they keep their
    /// values. fastai's transforms apply to the cropped region.
    PaddedCrop {
        /// Number of padding pixels on each side. CIFAR-10 is usually trained with 4.
        padding: u32,
    },
    /// torchvision's `RandomResizedCrop`: crops a region of random area and aspect ratio, and resamples it to
    /// [`Augment::size`](super::Augment::size). There is no antialiasing: aliasing is visible if the region is more
    /// than twice as large as the result. Resize large images before, for example by
    /// [`ImageDataset::resized_on`](crate::ImageDataset::resized_on), which has antialiasing.
    ResizedCrop {
        /// Minimum and maximum share of the area. Defaults to 0.08 and 1.
        scale: [f64; 2],
        /// Minimum and maximum ratio of width to height, log-uniform. Defaults to 3/4 and 4/3.
        ratio: [f64; 2],
    },
    /// fastai's `Warp`: changes the perspective by an amount that is uniform up to `magnitude` for each axis.
    Warp {
        /// Maximum displacement of the corners, in halves of the image. Defaults to 0.2.
        magnitude: f64,
        /// Probability of the transform, for each axis. Defaults to 0.5.
        p: f64,
    },
    /// torchvision's `RandomAffine` about the centre. If only `degrees` are set, its `RandomRotation`.
    Affine {
        /// Minimum and maximum angle in degrees, counter-clockwise.
        degrees: [f64; 2],
        /// Maximum shift to either side, as shares of width and height.
        translate: [f64; 2],
        /// Minimum and maximum scale factor.
        scale: [f64; 2],
        /// Minimum and maximum shear along x and along y, in degrees.
        shear: [[f64; 2]; 2],
    },
    /// torchvision's `RandomPerspective`: each corner moves inwards by a uniform number of pixels.
    Perspective {
        /// Maximum displacement of the corners, in halves of the image. Defaults to 0.5.
        distortion: f64,
        /// Probability of the transform. Defaults to 0.5.
        p: f64,
    },
}

impl Geometric {
    /// Returns torchvision's `RandomRotation(degrees)`.
    #[must_use]
    pub fn rotation(degrees: f64) -> Self {
        Self::Affine {
            degrees: [-degrees, degrees],
            translate: [0.0; 2],
            scale: [1.0; 2],
            shear: [[0.0; 2]; 2],
        }
    }

    /// Returns torchvision's `RandomResizedCrop` with its defaults.
    #[must_use]
    pub fn resized_crop() -> Self {
        Self::ResizedCrop { scale: [0.08, 1.0], ratio: [3.0 / 4.0, 4.0 / 3.0] }
    }

    /// Returns `true` if what follows sees a part of the output's size in place of the image.
    fn crops(&self) -> bool {
        matches!(self, Self::PaddedCrop { .. } | Self::ResizedCrop { .. })
    }
}

/// Returns `true` if maps lead from pixels to pixels, with nothing between two of them, for an image and an output of
/// these widths and heights.
pub(super) fn moves_whole_pixels(maps: &[Geometric], from: [f64; 2], to: [f64; 2]) -> bool {
    let same_size = from == to || maps.iter().any(Geometric::crops);
    same_size
        && maps.iter().all(|map| match map {
            Geometric::Flip { .. } | Geometric::PaddedCrop { .. } => true,
            Geometric::Dihedral { .. } => to[0] == to[1],
            _ => false,
        })
}

impl Homography {
    /// Draws the transforms in order, each from a stream of its own, for an image and an output of these widths and
    /// heights.
    pub(super) fn drawn(
        maps: &[Geometric],
        from: [f64; 2],
        to: [f64; 2],
        next: &mut impl FnMut() -> SampleRng,
    ) -> Self {
        // fastai multiplies its matrices in units of half the output, and warps the result.
        let (mut affine, mut warp, mut pixels) = (Self::IDENTITY, Self::IDENTITY, Self::IDENTITY);
        // fastai's transforms come last. torchvision's see the result of those before them.
        let (from, mut seen) = (if maps.iter().any(Geometric::crops) { to } else { from }, from);
        for map in maps {
            let mut random = next();
            match *map {
                Geometric::Affine { .. } | Geometric::Perspective { .. } => {
                    pixels = pixels.after(Self::of_torchvision(map, seen, &mut random));
                }
                Geometric::PaddedCrop { padding } => {
                    pixels = pixels.after(Self::part(f64::from(padding), seen, to, &mut random));
                    seen = to;
                }
                Geometric::ResizedCrop { scale, ratio } => {
                    pixels = pixels.after(Self::resized(scale, ratio, seen, to, &mut random));
                    seen = to;
                }
                Geometric::Warp { magnitude, p } => {
                    warp = Self::warped(magnitude, p, &mut random).after(warp);
                }
                Geometric::Crop { min_scale } => {
                    affine = affine.after(Self::cropped(min_scale, from, &mut random));
                }
                _ => affine = affine.after(Self::of_fastai(map, &mut random)),
            }
        }
        pixels.after(Self::composed(affine, warp, from, to))
    }

    fn of_fastai(map: &Geometric, random: &mut SampleRng) -> Self {
        match *map {
            Geometric::Flip { p } if random.chance(p) => {
                Self::affine([-1.0, 0.0, 0.0], [0.0, 1.0, 0.0])
            }
            Geometric::Dihedral { p } => {
                let index = random.below(8);
                if !random.chance(p) {
                    return Self::IDENTITY;
                }
                let sign = |bit: u64| if index & bit == 0 { 1.0 } else { -1.0 };
                let (x, y) = (sign(1), sign(2));
                if index < 4 {
                    Self::affine([x, 0.0, 0.0], [0.0, y, 0.0])
                } else {
                    Self::affine([0.0, x, 0.0], [y, 0.0, 0.0])
                }
            }
            Geometric::Rotate { max_degrees, p } => {
                let degrees = random.uniform(-max_degrees, max_degrees);
                if random.chance(p) { Self::rotated(degrees) } else { Self::IDENTITY }
            }
            Geometric::Zoom { min, max, p } => {
                let zoom = random.uniform(min, max);
                let place = [(); 2].map(|()| random.uniform(0.0, 1.0));
                if random.chance(p) { Self::zoomed(zoom, place) } else { Self::IDENTITY }
            }
            _ => Self::IDENTITY,
        }
    }

    /// Returns a part of an image with a border, of the output's size.
    fn part(padding: f64, from: [f64; 2], to: [f64; 2], random: &mut SampleRng) -> Self {
        let mut start = |axis: usize| {
            let rest = from[axis] + 2.0 * padding - to[axis];
            random.below(rest.max(0.0) as u64 + 1) as f64 - padding
        };
        let (top, left) = (start(1), start(0));
        Self::affine([1.0, 0.0, left], [0.0, 1.0, top])
    }

    /// Draws a part as torchvision's `RandomResizedCrop.get_params` does: ten tries, then the largest part of an
    /// allowed shape in the middle.
    fn resized(
        scale: [f64; 2],
        ratio: [f64; 2],
        [width, height]: [f64; 2],
        to: [f64; 2],
        random: &mut SampleRng,
    ) -> Self {
        let of_part = |left: f64, top: f64, wide: f64, tall: f64| {
            let [x, y] = [wide / to[0], tall / to[1]];
            // Pixels are squares: their centres are half a pixel from their edges.
            let centre = |start: f64, scale: f64| start + 0.5 * scale - 0.5;
            Self::affine([x, 0.0, centre(left, x)], [0.0, y, centre(top, y)])
        };
        for _ in 0..10 {
            let area = width * height * random.uniform(scale[0], scale[1]);
            let ratio = random.uniform(ratio[0].ln(), ratio[1].ln()).exp();
            let wide = (area * ratio).sqrt().round_ties_even();
            let tall = (area / ratio).sqrt().round_ties_even();
            if (1.0..=width).contains(&wide) && (1.0..=height).contains(&tall) {
                let mut place = |rest: f64| random.below(rest as u64 + 1) as f64;
                let (left, top) = (place(width - wide), place(height - tall));
                return of_part(left, top, wide, tall);
            }
        }
        let whole = width / height;
        let (mut wide, mut tall) = (width, height);
        if whole < ratio[0] {
            tall = (width / ratio[0]).round_ties_even().clamp(1.0, height);
        } else if whole > ratio[1] {
            wide = (height * ratio[1]).round_ties_even().clamp(1.0, width);
        }
        of_part(((width - wide) / 2.0).floor(), ((height - tall) / 2.0).floor(), wide, tall)
    }

    /// Draws a square part, by the rule of random resized crops: ten tries, then the largest one in the middle.
    fn cropped(min_scale: f64, [width, height]: [f64; 2], random: &mut SampleRng) -> Self {
        // Units are measured between the centres of the outer pixels.
        let along = |side: f64, start: f64, length: f64| {
            let length = (length - 1.0).max(1.0);
            [(side - 1.0) / length, (2.0 * start + side - 1.0) / length - 1.0]
        };
        let part = |side: f64, left: f64, top: f64| {
            let ([x, right], [y, down]) = (along(side, left, width), along(side, top, height));
            Self::affine([x, 0.0, right], [0.0, y, down])
        };
        for _ in 0..10 {
            let side = (random.uniform(min_scale, 1.0) * width * height).sqrt().round_ties_even();
            if side >= 1.0 && side <= width && side <= height {
                let mut place = |rest: f64| random.below(rest as u64 + 1) as f64;
                let (left, top) = (place(width - side), place(height - side));
                return part(side, left, top);
            }
        }
        let side = width.min(height);
        part(side, ((width - side) / 2.0).floor(), ((height - side) / 2.0).floor())
    }

    /// Draws fastai's `_WarpCoord`, in units of half the image.
    fn warped(magnitude: f64, p: f64, random: &mut SampleRng) -> Self {
        let mut draw = || {
            let drawn = random.uniform(-magnitude, magnitude);
            if random.chance(p) { drawn } else { 0.0 }
        };
        let (x, y) = (draw(), draw());
        Self::warp(x, y)
    }

    fn of_torchvision(map: &Geometric, [width, height]: [f64; 2], random: &mut SampleRng) -> Self {
        match *map {
            Geometric::Affine { degrees, translate, scale, shear } => {
                let angle = random.uniform(degrees[0], degrees[1]);
                let mut shift = |share: f64, length: f64| {
                    random.uniform(-share * length, share * length).round_ties_even()
                };
                let shift = [shift(translate[0], width), shift(translate[1], height)];
                let scale = random.uniform(scale[0], scale[1]);
                let shear = shear.map(|[low, high]| random.uniform(low, high));
                let centre = [(width - 1.0) / 2.0, (height - 1.0) / 2.0];
                // torchvision counts angles counter-clockwise, with y downwards.
                Self::inverse_affine(-angle, shift, scale, shear, centre)
            }
            Geometric::Perspective { distortion, p } => {
                let reach = [width, height].map(|it| (distortion * (it / 2.0).floor()).floor());
                let mut corner = |right: bool, below: bool| {
                    let mut along = |far: bool, reach: f64, length: f64| {
                        let moved = random.below(reach as u64 + 1) as f64;
                        if far { length - 1.0 - moved } else { moved }
                    };
                    [along(right, reach[0], width), along(below, reach[1], height)]
                };
                let to = [
                    corner(false, false),
                    corner(true, false),
                    corner(true, true),
                    corner(false, true),
                ];
                if !random.chance(p) {
                    return Self::IDENTITY;
                }
                let (right, bottom) = (width - 1.0, height - 1.0);
                let from = [[0.0, 0.0], [right, 0.0], [right, bottom], [0.0, bottom]];
                Self::perspective(to, from)
            }
            _ => Self::IDENTITY,
        }
    }
}

#[cfg(test)]
mod tests {
    use tch::{Kind, Tensor};

    use super::*;
    use crate::Size;
    use crate::augment::Augment;

    #[test]
    fn symmetries_are_exact() {
        let image = Tensor::arange(50, (Kind::Float, tch::Device::Cpu)).view([1, 2, 5, 5]);
        let flips = Augment::new().then(Geometric::Flip { p: 1.0 });
        let drawn = flips.draw(&[3], &image).unwrap();
        let flipped = flips.apply(&image, &drawn).unwrap();
        assert!((flipped - image.flip([3])).abs().max().double_value(&[]) < 1e-4);

        let turned = Augment::new().then(Geometric::Affine {
            degrees: [90.0, 90.0],
            translate: [0.0; 2],
            scale: [1.0; 2],
            shear: [[0.0; 2]; 2],
        });
        let drawn = turned.draw(&[3], &image).unwrap();
        let found = turned.apply(&image, &drawn).unwrap();
        assert!((found - image.rot90(1, [2, 3])).abs().max().double_value(&[]) < 1e-4);

        let nothing = Augment::new().then(Geometric::Flip { p: 0.0 });
        let drawn = nothing.draw(&[3], &image).unwrap();
        assert_eq!(nothing.apply(&image, &drawn).unwrap(), image);
    }

    #[test]
    fn crops_are_squares_of_whole_pixels_inside_of_the_image() {
        // The values of each pixel are its column and its row.
        let column = Tensor::arange(60, (Kind::Float, tch::Device::Cpu)).view([1, 1, 1, 60]);
        let row = Tensor::arange(40, (Kind::Float, tch::Device::Cpu)).view([1, 1, 40, 1]);
        let image = Tensor::cat(
            &[column.expand([1, 1, 40, 60], false), row.expand([1, 1, 40, 60], false)],
            1,
        );
        let crop = Augment::new().then(Geometric::Crop { min_scale: 0.3 }).size(Size::from(9));
        let mut lefts = std::collections::BTreeSet::new();
        for seed in 0..200 {
            let drawn = crop.draw(&[seed], &image).unwrap();
            let part = crop.apply(&image, &drawn).unwrap();
            assert_eq!(part.size(), [1, 2, 9, 9]);
            let at = |channel, y, x| part.double_value(&[0, channel, y, x]);
            let side = at(0, 0, 8) - at(0, 0, 0) + 1.0;
            assert!((at(1, 8, 0) - at(1, 0, 0) + 1.0 - side).abs() < 1e-3, "not a square");
            assert!((side - side.round()).abs() < 1e-3, "{side}");
            let least = (0.3f64 * 2400.0).sqrt().floor();
            assert!((least..=40.0).contains(&side.round()), "{side}");
            assert!(at(0, 0, 0) > -1e-3 && at(0, 0, 8) < 59.001 && at(1, 8, 0) < 39.001);
            lefts.insert(at(0, 0, 0).round() as i64);
        }
        assert!(lefts.len() > 15 && lefts.contains(&0), "{lefts:?}");
        // If no try fits, the result is the largest square in the middle.
        let all = Augment::new().then(Geometric::Crop { min_scale: 1.0 }).size(Size::from(40));
        let part = all.apply(&image, &all.draw(&[1], &image).unwrap()).unwrap();
        assert!((part - image.narrow(3, 10, 40)).abs().max().double_value(&[]) < 1e-3);
    }
}
