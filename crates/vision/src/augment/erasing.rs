//! Random erasing of rectangles.

use std::f64::consts::TAU;

use tch::{Kind, TchError, Tensor};

use crate::transforms::SampleRng;

/// Random erasing after normalisation, like torchvision's `RandomErasing`: sets a rectangle of each chosen image to one
/// value, or to noise.
///
/// ```
/// use brigade_vision::augment::{Augment, RandomErasing};
///
/// // torchvision's `value="random"`.
/// let noise = RandomErasing { deviation: 1.0, ..RandomErasing::default() };
/// let augment = Augment::new().erasing(noise);
/// # let _ = augment;
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomErasing {
    /// Probability of the transform. Defaults to 0.5.
    pub p: f64,
    /// Minimum and maximum share of the area. Defaults to 0.02 and 0.33.
    pub scale: [f64; 2],
    /// Minimum and maximum ratio of height to width, log-uniform. Defaults to 0.3 and 3.3.
    pub ratio: [f64; 2],
    /// Value of the erased pixels, or mean of their noise. Defaults to 0, which is the mean of normalised images.
    pub value: f64,
    /// Standard deviation of normal noise around the value, drawn for each element of an image. Defaults to 0: no
    /// noise.
    pub deviation: f64,
}

impl Default for RandomErasing {
    fn default() -> Self {
        Self { p: 0.5, scale: [0.02, 0.33], ratio: [0.3, 3.3], value: 0.0, deviation: 0.0 }
    }
}

impl RandomErasing {
    /// Creates fastai's `RandomErasing`: up to 0.3 of the area, ratios of 0.3 to its inverse, and noise of mean 0 and
    /// standard deviation 1. Each chosen image has its own rectangle; fastai uses the same one for the whole batch.
    #[must_use]
    pub fn fastai() -> Self {
        Self { scale: [0.0, 0.3], ratio: [0.3, 1.0 / 0.3], deviation: 1.0, ..Self::default() }
    }

    /// Draws the parameters for an image of this size: a rectangle (left, top, right, bottom), and two keys of its
    /// noise.
    pub(super) fn draw(&self, [width, height]: [f64; 2], random: &mut SampleRng) -> [f32; 6] {
        if !random.chance(self.p) {
            return [0.0; 6];
        }
        for _ in 0..10 {
            let area = width * height * random.uniform(self.scale[0], self.scale[1]);
            let ratio = random.uniform(self.ratio[0].ln(), self.ratio[1].ln()).exp();
            let tall = (area * ratio).sqrt().round_ties_even();
            let wide = (area / ratio).sqrt().round_ties_even();
            if tall < height && wide < width {
                let top = random.below((height - tall) as u64 + 1) as f64;
                let left = random.below((width - wide) as u64 + 1) as f64;
                let keys = [(); 2].map(|()| random.below(KEYS) as f64);
                return [left, top, left + wide, top + tall, keys[0], keys[1]].map(|it| it as f32);
            }
        }
        [0.0; 6]
    }

    /// Fills the inside of each sample's rectangle, `[n, 1, h, w]`, with the sample's value or noise.
    pub(super) fn fill(
        &self,
        images: &Tensor,
        inside: &Tensor,
        keys: [&Tensor; 2],
    ) -> Result<Tensor, TchError> {
        if self.deviation == 0.0 {
            return images.f_masked_fill(inside, self.value);
        }
        let noise = noise(&images.size(), keys)?;
        let noise = noise.f_mul_scalar(self.deviation)?.f_add_scalar(self.value)?;
        noise.f_to_kind(images.kind())?.f_where_self(inside, images)
    }
}

/// Number of keys, each of which is stored in an `f32`.
const KEYS: u64 = 1 << 24;

/// Returns normal noise with mean 0 and standard deviation 1 for images of this shape: a function of the two keys of
/// each sample, `[n]`, and of an element's position, so that it is the same on every device and in every batch.
fn noise(shape: &[i64], keys: [&Tensor; 2]) -> Result<Tensor, TchError> {
    let [first, second] = keys;
    let numbers: i64 = shape.iter().skip(1).product();
    let places = Tensor::f_arange(numbers, (Kind::Int64, first.device()))?.f_view([1, -1])?;
    // In (0, 1): 32-bit numbers plus one half. The keys are of type f32, so the conversion makes a copy, which is mixed
    // in place.
    let uniform = |keys: &Tensor| {
        let keys = hash(keys.f_to_kind(Kind::Int64)?.f_view([-1, 1])?)?;
        let drawn = hash(places.f_bitwise_xor_tensor(&keys)?)?;
        drawn.f_to_kind(Kind::Float)?.f_add_scalar(0.5)?.f_mul_scalar(2f64.powi(-32))
    };
    // A normal variate, by the Box-Muller method.
    let radius = uniform(first)?.f_log()?.f_mul_scalar(-2.0)?.f_clamp_min(0.0)?.f_sqrt()?;
    let angle = uniform(second)?.f_mul_scalar(TAU)?;
    radius.f_mul(&angle.f_cos()?)?.f_view(shape)
}

/// Mixes the bits of 32-bit numbers in place. They are stored in 64 bits so that no product overflows.
fn hash(mut numbers: Tensor) -> Result<Tensor, TchError> {
    const FACTOR: i64 = 0x045D_9F3B;
    for _ in 0..2 {
        let high = numbers.f_bitwise_right_shift_tensor_scalar(16)?;
        let _ = numbers.f_bitwise_xor_tensor_(&high)?;
        let _ = numbers.f_mul_scalar_(FACTOR)?.f_bitwise_and_(0xFFFF_FFFF_i64)?;
    }
    let high = numbers.f_bitwise_right_shift_tensor_scalar(16)?;
    numbers.f_bitwise_xor_tensor_(&high)
}
