//! Homographies as matrices.

/// Map from a pixel of the output to a position in the image, both relative to the centre of the first pixel, in
/// homogeneous coordinates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Homography([[f64; 3]; 3]);

impl Homography {
    pub(super) const IDENTITY: Self = Self([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]);

    /// Returns the elements of the matrix, row by row.
    pub(super) fn numbers(self) -> [f64; 9] {
        let [[a, b, c], [d, e, f], [g, h, i]] = self.0;
        [a, b, c, d, e, f, g, h, i]
    }

    /// Returns the map that applies `first` and then this one.
    pub(super) fn after(self, first: Self) -> Self {
        let sum = |row: usize, column: usize| -> f64 {
            (0..3).map(|inner| self.0[row][inner] * first.0[inner][column]).sum()
        };
        Self([0, 1, 2].map(|row| [0, 1, 2].map(|column| sum(row, column))))
    }

    pub(super) fn affine([a, b, c]: [f64; 3], [d, e, f]: [f64; 3]) -> Self {
        Self([[a, b, c], [d, e, f], [0.0, 0.0, 1.0]])
    }

    /// Returns the map from pixels to -1 ..= 1 between the centres of the outer pixels.
    fn to_units([width, height]: [f64; 2]) -> Self {
        let [x, y] = [width, height].map(|length| 2.0 / (length - 1.0).max(1.0));
        Self::affine([x, 0.0, -1.0], [0.0, y, -1.0])
    }

    fn from_units([width, height]: [f64; 2]) -> Self {
        let [x, y] = [width, height].map(|length| (length - 1.0) / 2.0);
        Self::affine([x, 0.0, x], [0.0, y, y])
    }

    /// Returns fastai's affine matrix followed by its warp, both in units of half the output and of half the image.
    pub(super) fn composed(mut affine: Self, warp: Self, from: [f64; 2], to: [f64; 2]) -> Self {
        if affine == Self::IDENTITY && warp == Self::IDENTITY && from == to {
            // Exact: without rounding, each pixel maps to itself.
            return Self::IDENTITY;
        }
        // Angles are those of pixels, not of an image that is squeezed into a square.
        let [width, height] = from;
        affine.0[0][1] *= height / width;
        affine.0[1][0] *= width / height;
        Self::from_units(from).after(warp).after(affine).after(Self::to_units(to))
    }

    pub(super) fn rotated(degrees: f64) -> Self {
        let (sin, cos) = degrees.to_radians().sin_cos();
        Self::affine([cos, sin, 0.0], [-sin, cos, 0.0])
    }

    pub(super) fn zoomed(zoom: f64, place: [f64; 2]) -> Self {
        let scale = 1.0 / zoom;
        let [x, y] = place.map(|share| (1.0 - scale) * (2.0 * share - 1.0));
        Self::affine([scale, 0.0, x], [0.0, scale, y])
    }

    pub(super) fn warp(x: f64, y: f64) -> Self {
        if x == 0.0 && y == 0.0 {
            return Self::IDENTITY;
        }
        let from = [[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]];
        let to =
            [[-1.0 - y, -1.0 - x], [-1.0 + y, 1.0 + x], [1.0 + y, -1.0 + x], [1.0 - y, 1.0 - x]];
        Self::between(to, from)
    }

    /// Returns the map between torchvision's corners, which are those of pixels; the pixels' centres are half a pixel
    /// further.
    pub(super) fn perspective(to: [[f64; 2]; 4], from: [[f64; 2]; 4]) -> Self {
        let half = |by: f64| Self::affine([1.0, 0.0, by], [0.0, 1.0, by]);
        half(-0.5).after(Self::between(to, from)).after(half(0.5))
    }

    /// Returns torchvision's `_get_inverse_affine_matrix` about a centre, with angles in degrees.
    pub(super) fn inverse_affine(
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

    /// Returns the map that takes four points to four others, or the identity if there is none.
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

/// Solves eight linear equations by elimination with pivoting. The right sides are the last column.
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
    use tch::Tensor;

    use super::*;
    use crate::Size;
    use crate::augment::{Augment, Geometric, Lighting, Padding};

    const FROM: [f64; 2] = [12.0, 9.0];

    fn numbers(value: &Value) -> Vec<f32> {
        serde_json::from_value(value.clone()).unwrap()
    }

    fn golden() -> Value {
        serde_json::from_str(include_str!("../../tests/golden/batch_augment.json")).unwrap()
    }

    /// Compares a homography and lighting of the golden image with the library's result.
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
}
