//! Maps of the plane: what torchvision and fastai draw, as one homography for each sample.

use crate::transforms::SampleRng;

/// A random map of the plane.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Geometric {
    /// fastai's `Flip`: left and right change places.
    Flip {
        /// The probability; 0.5.
        p: f64,
    },
    /// fastai's `Dihedral`: one of the eight symmetries of the square.
    Dihedral {
        /// The probability; 0.5.
        p: f64,
    },
    /// fastai's `Rotate`: about the centre, uniform up to so many degrees either way.
    Rotate {
        /// The largest angle, in degrees; 10.
        max_degrees: f64,
        /// The probability; 0.5.
        p: f64,
    },
    /// fastai's `Zoom`: a uniform factor, and a part of the image that is uniform among those it leaves.
    Zoom {
        /// The lowest factor; 1.
        min: f64,
        /// The highest factor; 1.1.
        max: f64,
        /// The probability of a factor other than 1; 0.5.
        p: f64,
    },
    /// fastai's `RandomResizedCropGPU` with equal sides: a square part of the image, anywhere in it, whose area
    /// is uniform from a share of the image's up to all of it. fastai draws one for a whole batch, this one for
    /// each image. It belongs after the other maps, and to a square [`Augment::size`](super::Augment::size):
    /// so large images, turned and warped at their size, give crops without borders (presizing).
    Crop {
        /// The lowest share of the area; 0.75.
        min_scale: f64,
    },
    /// torchvision's `RandomCrop` with padding: a part of [`Augment::size`](super::Augment::size), or of the image's
    /// own size, anywhere in the image with so many pixels of [`Padding`](super::Padding) on each side. With flips
    /// alone beside it, pixels are moved and not resampled: they keep their values. fastai's maps are of the part.
    PaddedCrop {
        /// Pixels on each side; 4 for CIFAR-10.
        padding: u32,
    },
    /// torchvision's `RandomResizedCrop`: a part of random area and shape, resampled to
    /// [`Augment::size`](super::Augment::size). Without antialiasing: a part that is more than twice as large loses
    /// detail unevenly, so large images are to be resized before, as
    /// [`ImageDataset::resized_on`](crate::ImageDataset::resized_on) does with antialiasing.
    ResizedCrop {
        /// Lowest and highest share of the area; 0.08 and 1.
        scale: [f64; 2],
        /// Lowest and highest ratio of width to height, log-uniform; 3/4 and 4/3.
        ratio: [f64; 2],
    },
    /// fastai's `Warp`: a change of perspective, uniform up to the magnitude for each axis.
    Warp {
        /// The largest displacement of the corners, in halves of the image; 0.2.
        magnitude: f64,
        /// The probability, for each axis; 0.5.
        p: f64,
    },
    /// torchvision's `RandomAffine`, and with degrees alone its `RandomRotation`, about the centre.
    Affine {
        /// Lowest and highest angle, in degrees, against the clock.
        degrees: [f64; 2],
        /// Largest shift to either side, as shares of width and height.
        translate: [f64; 2],
        /// Lowest and highest factor.
        scale: [f64; 2],
        /// Lowest and highest shear along x and along y, in degrees.
        shear: [[f64; 2]; 2],
    },
    /// torchvision's `RandomPerspective`: each corner moves inwards by a uniform number of pixels.
    Perspective {
        /// The largest displacement, in halves of the image; 0.5.
        distortion: f64,
        /// The probability; 0.5.
        p: f64,
    },
}

impl Geometric {
    /// torchvision's `RandomRotation(degrees)`.
    #[must_use]
    pub fn rotation(degrees: f64) -> Self {
        Self::Affine {
            degrees: [-degrees, degrees],
            translate: [0.0; 2],
            scale: [1.0; 2],
            shear: [[0.0; 2]; 2],
        }
    }

    /// torchvision's `RandomResizedCrop` with its defaults.
    #[must_use]
    pub fn resized_crop() -> Self {
        Self::ResizedCrop { scale: [0.08, 1.0], ratio: [3.0 / 4.0, 4.0 / 3.0] }
    }

    /// Whether what follows sees a part of the output's size in place of the image.
    fn crops(&self) -> bool {
        matches!(self, Self::PaddedCrop { .. } | Self::ResizedCrop { .. })
    }
}

/// Whether maps lead from pixels to pixels, with nothing between two of them, for an image and an output of these
/// widths and heights.
pub(super) fn moves_whole_pixels(maps: &[Geometric], from: [f64; 2], to: [f64; 2]) -> bool {
    let same_size = from == to || maps.iter().any(Geometric::crops);
    same_size
        && maps.iter().all(|map| match map {
            Geometric::Flip { .. } | Geometric::PaddedCrop { .. } => true,
            Geometric::Dihedral { .. } => to[0] == to[1],
            _ => false,
        })
}

/// A map from a pixel of the output to a place in the image, both counted from the centre of the first
/// pixel, in homogeneous coordinates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Homography([[f64; 3]; 3]);

impl Homography {
    const IDENTITY: Self = Self([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]);

    /// Draws the maps one after the other, each from a stream of its own, for an image and an output of
    /// these widths and heights.
    pub(super) fn drawn(
        maps: &[Geometric],
        from: [f64; 2],
        to: [f64; 2],
        next: &mut impl FnMut() -> SampleRng,
    ) -> Self {
        // fastai multiplies its matrices in units of half the output, and warps what they give.
        let (mut affine, mut warp, mut pixels) = (Self::IDENTITY, Self::IDENTITY, Self::IDENTITY);
        // fastai's maps come last. torchvision's see what those before them have left.
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

    /// fastai's affine matrix and then its warp, both in units of half the output and of half the image.
    fn composed(mut affine: Self, warp: Self, from: [f64; 2], to: [f64; 2]) -> Self {
        if affine == Self::IDENTITY && warp == Self::IDENTITY && from == to {
            // Exact: no pixel lies beside itself.
            return Self::IDENTITY;
        }
        // Angles are of pixels, not of an image that is squeezed into a square.
        let [width, height] = from;
        affine.0[0][1] *= height / width;
        affine.0[1][0] *= width / height;
        Self::from_units(from).after(warp).after(affine).after(Self::to_units(to))
    }

    /// Row by row.
    pub(super) fn numbers(self) -> [f64; 9] {
        let [[a, b, c], [d, e, f], [g, h, i]] = self.0;
        [a, b, c, d, e, f, g, h, i]
    }

    /// The map that applies `first` and then this one.
    fn after(self, first: Self) -> Self {
        let sum = |row: usize, column: usize| -> f64 {
            (0..3).map(|inner| self.0[row][inner] * first.0[inner][column]).sum()
        };
        Self([0, 1, 2].map(|row| [0, 1, 2].map(|column| sum(row, column))))
    }

    fn affine([a, b, c]: [f64; 3], [d, e, f]: [f64; 3]) -> Self {
        Self([[a, b, c], [d, e, f], [0.0, 0.0, 1.0]])
    }

    /// From pixels to -1 ..= 1 between the centres of the outer ones.
    fn to_units([width, height]: [f64; 2]) -> Self {
        let [x, y] = [width, height].map(|length| 2.0 / (length - 1.0).max(1.0));
        Self::affine([x, 0.0, -1.0], [0.0, y, -1.0])
    }

    fn from_units([width, height]: [f64; 2]) -> Self {
        let [x, y] = [width, height].map(|length| (length - 1.0) / 2.0);
        Self::affine([x, 0.0, x], [0.0, y, y])
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

    /// A part of an image with a border, of the output's size.
    fn part(padding: f64, from: [f64; 2], to: [f64; 2], random: &mut SampleRng) -> Self {
        let mut start = |axis: usize| {
            let rest = from[axis] + 2.0 * padding - to[axis];
            random.below(rest.max(0.0) as u64 + 1) as f64 - padding
        };
        let (top, left) = (start(1), start(0));
        Self::affine([1.0, 0.0, left], [0.0, 1.0, top])
    }

    /// torchvision's `RandomResizedCrop.get_params`: ten tries, then the largest part of an allowed shape in the
    /// middle.
    fn resized(
        scale: [f64; 2],
        ratio: [f64; 2],
        [width, height]: [f64; 2],
        to: [f64; 2],
        random: &mut SampleRng,
    ) -> Self {
        let of_part = |left: f64, top: f64, wide: f64, tall: f64| {
            let [x, y] = [wide / to[0], tall / to[1]];
            // Pixels are squares: their centres lie half of one from their edges.
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

    /// A square part, by the rule of random resized crops: ten tries, then the largest in the middle.
    fn cropped(min_scale: f64, [width, height]: [f64; 2], random: &mut SampleRng) -> Self {
        // Units lie between the centres of the outer pixels.
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

    /// fastai's `_WarpCoord`, in units of half the image.
    fn warped(magnitude: f64, p: f64, random: &mut SampleRng) -> Self {
        let mut draw = || {
            let drawn = random.uniform(-magnitude, magnitude);
            if random.chance(p) { drawn } else { 0.0 }
        };
        let (x, y) = (draw(), draw());
        Self::warp(x, y)
    }

    fn rotated(degrees: f64) -> Self {
        let (sin, cos) = degrees.to_radians().sin_cos();
        Self::affine([cos, sin, 0.0], [-sin, cos, 0.0])
    }

    fn zoomed(zoom: f64, place: [f64; 2]) -> Self {
        let scale = 1.0 / zoom;
        let [x, y] = place.map(|share| (1.0 - scale) * (2.0 * share - 1.0));
        Self::affine([scale, 0.0, x], [0.0, scale, y])
    }

    fn warp(x: f64, y: f64) -> Self {
        if x == 0.0 && y == 0.0 {
            return Self::IDENTITY;
        }
        let from = [[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]];
        let to =
            [[-1.0 - y, -1.0 - x], [-1.0 + y, 1.0 + x], [1.0 + y, -1.0 + x], [1.0 - y, 1.0 - x]];
        Self::between(to, from)
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
                // torchvision counts angles against the clock, with y downwards.
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

    /// torchvision's corners are of pixels, the centres of which lie half a pixel further.
    fn perspective(to: [[f64; 2]; 4], from: [[f64; 2]; 4]) -> Self {
        let half = |by: f64| Self::affine([1.0, 0.0, by], [0.0, 1.0, by]);
        half(-0.5).after(Self::between(to, from)).after(half(0.5))
    }

    /// torchvision's `_get_inverse_affine_matrix`, about a centre; angles in degrees.
    fn inverse_affine(
        angle: f64,
        [x, y]: [f64; 2],
        scale: f64,
        shear: [f64; 2],
        [cx, cy]: [f64; 2],
    ) -> Self {
        let rotation = angle.to_radians();
        let [sx, sy] = shear.map(f64::to_radians);
        let a = (rotation - sy).cos() / sy.cos();
        let b = -(rotation - sy).cos() * sx.tan() / sy.cos() - rotation.sin();
        let c = (rotation - sy).sin() / sy.cos();
        let d = -(rotation - sy).sin() * sx.tan() / sy.cos() + rotation.cos();
        let linear = Self::affine([d / scale, -b / scale, 0.0], [-c / scale, a / scale, 0.0]);
        let shift = |x: f64, y: f64| Self::affine([1.0, 0.0, x], [0.0, 1.0, y]);
        shift(cx, cy).after(linear).after(shift(-cx - x, -cy - y))
    }

    /// The map that takes four points to four others; the identity where there is none.
    fn between(from: [[f64; 2]; 4], to: [[f64; 2]; 4]) -> Self {
        let mut rows = [[0.0; 9]; 8];
        for (pair, (&[x, y], &[u, v])) in rows.chunks_exact_mut(2).zip(from.iter().zip(&to)) {
            if let [first, second] = pair {
                *first = [x, y, 1.0, 0.0, 0.0, 0.0, -u * x, -u * y, u];
                *second = [0.0, 0.0, 0.0, x, y, 1.0, -v * x, -v * y, v];
            }
        }
        match solved(rows) {
            Some([a, b, c, d, e, f, g, h]) => Self([[a, b, c], [d, e, f], [g, h, 1.0]]),
            None => Self::IDENTITY,
        }
    }
}

/// Solves eight linear equations, whose right sides are the last column, by elimination with pivots.
fn solved(mut rows: [[f64; 9]; 8]) -> Option<[f64; 8]> {
    for column in 0..8 {
        let largest = |row: &usize| rows[*row][column].abs();
        let pivot = (column..8).max_by(|a, b| largest(a).total_cmp(&largest(b)))?;
        if rows[pivot][column].abs() < 1e-12 {
            return None;
        }
        rows.swap(column, pivot);
        let pivot = rows[column];
        for (_, row) in rows.iter_mut().enumerate().filter(|(index, _)| *index != column) {
            let factor = row[column] / pivot[column];
            row.iter_mut().zip(pivot).for_each(|(value, other)| *value -= factor * other);
        }
    }
    let mut solution = [0.0; 8];
    for (index, value) in solution.iter_mut().enumerate() {
        *value = rows[index][8] / rows[index][index];
    }
    Some(solution)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use tch::{Kind, Tensor};

    use super::*;
    use crate::Size;
    use crate::augment::{Augment, Lighting, Padding};

    const FROM: [f64; 2] = [12.0, 9.0];

    fn numbers(value: &Value) -> Vec<f32> {
        serde_json::from_value(value.clone()).unwrap()
    }

    fn golden() -> Value {
        serde_json::from_str(include_str!("../../tests/golden/batch_augment.json")).unwrap()
    }

    /// The golden image by a map and by lighting, against the library's.
    fn agrees(name: &str, augment: &Augment, map: Homography, light: [f32; 2]) {
        let golden = golden();
        let image = Tensor::from_slice(&numbers(&golden["image"])).view([1, 2, 9, 12]);
        let drawn = augment.draw(&[1], &image).unwrap();
        let map = map.numbers().map(|number| number as f32);
        drawn.narrow(1, 0, 9).copy_(&Tensor::from_slice(&map).view([1, 9]));
        drawn.narrow(1, 9, 2).copy_(&Tensor::from_slice(&light).view([1, 2]));
        let found = augment.apply(&image, &drawn).unwrap().flatten(0, -1);
        let wanted = Tensor::from_slice(&numbers(&golden["cases"][name]));
        let difference = (found - wanted).abs().max().double_value(&[]);
        assert!(difference < 2e-5, "{name}: {difference}");
    }

    #[test]
    fn maps_are_torchvisions_and_fastais() {
        let zeros = Augment::new().then(Geometric::rotation(1.0)).padding(Padding::Zeros);
        let centre = FROM.map(|length| (length - 1.0) / 2.0);
        let map = Homography::inverse_affine(20.0, [1.0, -2.0], 1.2, [5.0, -3.0], centre);
        agrees("affine", &zeros, map, [0.0, 1.0]);
        let map = Homography::inverse_affine(-30.0, [0.0; 2], 1.0, [0.0; 2], centre);
        agrees("rotate", &zeros, map, [0.0, 1.0]);
        let from = [[0.0, 0.0], [11.0, 0.0], [11.0, 8.0], [0.0, 8.0]];
        let to = [[1.0, 2.0], [9.0, 1.0], [10.0, 7.0], [2.0, 8.0]];
        agrees("perspective", &zeros, Homography::perspective(to, from), [0.0, 1.0]);

        let flip = Homography::affine([-1.0, 0.0, 0.0], [0.0, 1.0, 0.0]);
        let affine =
            flip.after(Homography::rotated(7.0)).after(Homography::zoomed(1.08, [0.3, 0.8]));
        let warp = Homography::warp(0.1, -0.15);
        let fastai = Augment::new().then(Geometric::Zoom { min: 1.0, max: 1.1, p: 0.5 });
        let map = Homography::composed(affine, warp, FROM, FROM);
        agrees("fastai", &fastai, map, [0.0, 1.0]);
        let map = Homography::composed(affine, warp, FROM, [10.0, 7.0]);
        agrees("fastai_size", &fastai.size(Size::new(10, 7)), map, [0.0, 1.0]);
    }

    #[test]
    fn lighting_is_fastais() {
        let light = Augment::new().lighting(Lighting::Brightness { max: 0.2, p: 0.75 });
        let brightness = (0.55f32 / 0.45).ln();
        agrees("lighting", &light, Homography::IDENTITY, [brightness, 1.1]);
    }

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
        // Each pixel knows its column and its row.
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
        // What no try fits gives the largest square in the middle.
        let all = Augment::new().then(Geometric::Crop { min_scale: 1.0 }).size(Size::from(40));
        let part = all.apply(&image, &all.draw(&[1], &image).unwrap()).unwrap();
        assert!((part - image.narrow(3, 10, 40)).abs().max().double_value(&[]) < 1e-3);
    }
}
