//! Random numbers of a batch: a row for each sample.

use brigade_rank_env::text::counted;
use brigade_torch::{Error, Result, copy_to_device, from_vec};
use tch::Tensor;

use super::Augment;
use super::color::Light;
use super::geometry::Geometric;
use super::homography::Homography;
use crate::transforms::SampleRng;

/// Number of random parameters per sample: a homography (row by row), brightness, contrast, the weight of its grey, the
/// rotation of its hue, a rectangle (left, top, right, bottom), the keys of its noise, the share of the sample itself
/// in a mixture, its partner, the rectangle of the partner.
const COLUMNS: usize = 25;
pub(super) const LIGHT: i64 = 9;
pub(super) const HUE: i64 = 12;
pub(super) const ERASE: i64 = 13;
pub(super) const NOISE: i64 = 17;
pub(super) const SHARE: i64 = 19;
pub(super) const PARTNER: i64 = 20;
pub(super) const CUT: i64 = 21;

/// Index of the first of a batch's transforms among a sample's streams, after those of the sample's own transforms.
const BATCH_PLACE: usize = 1 << 20;

impl Augment {
    /// Draws the random numbers for a batch of images `[n, c, h, w]`: a tensor `[n, 25]` in `f32` on the CPU. Each row
    /// depends on its sample's seed alone, except the numbers of a mixture, which depend on all seeds.
    ///
    /// # Errors
    /// Fails if the numbers of seeds and images differ, or if the batch does not have this shape.
    pub fn draw(&self, seeds: &[u64], images: &Tensor) -> Result<Tensor> {
        let (height, width) = match images.size().as_slice() {
            &[rows, _, height, width] if rows == seeds.len() as i64 => (height, width),
            size => {
                return Err(Error::invalid_argument(format!(
                    "found {} for images of shape {size:?}; give one for each of [n, c, h, w]",
                    counted(seeds.len(), "seed")
                )));
            }
        };
        let from = [width as f64, height as f64];
        let to = self.size.map_or(from, |size| [f64::from(size.width), f64::from(size.height)]);
        for map in &self.geometric {
            if let Geometric::PaddedCrop { padding } = map
                && (0..2).any(|axis| from[axis] + 2.0 * f64::from(*padding) < to[axis])
            {
                return Err(Error::invalid_argument(format!(
                    "images of {width} x {height} pixels with a border of {padding} have no part of {} x {}",
                    to[0], to[1]
                )));
            }
        }
        let mut numbers = Vec::with_capacity(seeds.len() * COLUMNS);
        let mixed = self.mix.map(|mix| mix.draw(seeds, to));
        for (index, &seed) in seeds.iter().enumerate() {
            let mut place = BATCH_PLACE;
            let mut next = || {
                place += 1;
                SampleRng::new(seed, place)
            };
            let map = Homography::drawn(&self.geometric, from, to, &mut next);
            numbers.extend(map.numbers().map(|number| number as f32));
            let Light { brightness, contrast, grey } = Light::drawn(&self.lighting, &mut next);
            let erased = self.erasing.map(|erasing| erasing.draw(to, &mut next()));
            let turn = self.hue.map_or(0.0, |hue| hue.drawn(&mut next()));
            numbers.extend([brightness, contrast, grey, turn].map(|number| number as f32));
            numbers.extend(erased.unwrap_or_default());
            match mixed.as_ref().and_then(|mixed| mixed.get(index)) {
                Some(mixed) => numbers.extend(mixed),
                None => numbers.extend([1.0, index as f32, 0.0, 0.0, 0.0, 0.0]),
            }
        }
        from_vec(numbers, &[seeds.len() as i64, COLUMNS as i64])
            .map_err(|error| Error::invalid_argument(error.to_string()))
    }

    /// Returns the parameters on the device of the rows for which they were drawn.
    pub(super) fn checked(&self, rows: &Tensor, drawn: &Tensor) -> Result<Tensor> {
        let (shape, size) = (rows.size(), drawn.size());
        if size != [shape.first().copied().unwrap_or(-1), COLUMNS as i64] {
            return Err(Error::invalid_argument(format!(
                "numbers of shape {size:?} were not drawn for a batch of shape {shape:?}"
            )));
        }
        let device = rows.device();
        if drawn.device() == device {
            return Ok(drawn.shallow_clone());
        }
        copy_to_device(drawn, device)
    }
}
