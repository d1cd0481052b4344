//! Mixtures of two images and of their labels.

use brigade_torch::Result;
use tch::{Kind, TchError, Tensor};

use super::refused;
use crate::transforms::SampleRng;

/// Method by which each image is mixed with another one of its batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mix {
    /// fastai's `MixUp` (Zhang et al., 2017): `share · own + (1 − share) · partner`, with a share for each sample,
    /// `max(λ, 1 − λ)` with λ drawn from Beta(α, α), and a random partner.
    MixUp {
        /// Parameter α of the beta distribution. fastai's default is 0.4.
        alpha: f64,
    },
    /// torchvision's `v2.MixUp`: one share for the batch, with the preceding sample as partner.
    MixUpBatch {
        /// Parameter α of the beta distribution. torchvision's default is 1.
        alpha: f64,
    },
    /// torchvision's `v2.CutMix` (Yun et al., 2019): replaces one rectangle, the same for the whole batch, by the
    /// partner's pixels, where the partner is the preceding sample. The share is that of the area.
    CutMix {
        /// Parameter α of the beta distribution. torchvision's default is 1.
        alpha: f64,
    },
}

impl Mix {
    /// Draws a row for each sample: share, partner, rectangle.
    pub(super) fn draw(self, seeds: &[u64], [width, height]: [f64; 2]) -> Vec<[f32; 6]> {
        // One stream for the batch, from the seeds of all its samples in order.
        let seed = seeds.iter().fold(MIX, |sum, seed| sum.rotate_left(5).wrapping_mul(MIX) ^ seed);
        let mut random = SampleRng::new(seed, 0);
        let rows = seeds.len();
        let before = |index: usize| (index + rows.max(1) - 1) % rows.max(1);
        match self {
            Self::MixUp { alpha } => {
                let mut partners: Vec<usize> = (0..rows).collect();
                for index in (1..rows).rev() {
                    partners.swap(index, random.below(index as u64 + 1) as usize);
                }
                let row = |partner| {
                    let share = beta(alpha, &mut random);
                    [share.max(1.0 - share) as f32, partner as f32, 0.0, 0.0, 0.0, 0.0]
                };
                partners.into_iter().map(row).collect()
            }
            Self::MixUpBatch { alpha } => {
                let share = beta(alpha, &mut random) as f32;
                let row = |index| [share, before(index) as f32, 0.0, 0.0, 0.0, 0.0];
                (0..rows).map(row).collect()
            }
            Self::CutMix { alpha } => {
                let half = 0.5 * (1.0 - beta(alpha, &mut random)).sqrt();
                let (x, y) =
                    (random.below(width as u64) as f64, random.below(height as u64) as f64);
                let (wide, tall) = ((half * width).floor(), (half * height).floor());
                let (left, right) = ((x - wide).max(0.0), (x + wide).min(width));
                let (top, bottom) = ((y - tall).max(0.0), (y + tall).min(height));
                let share = 1.0 - (right - left) * (bottom - top) / (width * height);
                let row = |index| {
                    let partner = before(index) as f64;
                    [share, partner, left, top, right, bottom].map(|it| it as f32)
                };
                (0..rows).map(row).collect()
            }
        }
    }
}

/// Labels of a mixed batch.
///
/// ```
/// use brigade_vision::augment::MixedLabels;
/// use tch::Tensor;
///
/// let mixed = MixedLabels {
///     first: Tensor::from_slice(&[0i64, 1]),
///     second: Tensor::from_slice(&[1i64, 1]),
///     share: Tensor::from_slice(&[0.75f32, 1.0]),
/// };
/// let shares = Vec::<Vec<f32>>::try_from(mixed.one_hot(2)?)?;
/// assert_eq!(shares, [[0.75, 0.25], [0.0, 1.0]]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct MixedLabels {
    /// Each image's own label, `[n]`.
    pub first: Tensor,
    /// Label of each image's partner, `[n]`.
    pub second: Tensor,
    /// Share of the image's own label, `[n]` in `f32`.
    pub share: Tensor,
}

impl MixedLabels {
    /// Returns the mean over the batch of `share · loss(first) + (1 − share) · loss(second)`, for a loss that returns
    /// one value for each sample, `[n]`.
    ///
    /// # Errors
    /// Returns the errors of the loss, and libtorch's.
    pub fn loss(
        &self,
        loss: impl Fn(&Tensor) -> std::result::Result<Tensor, TchError>,
    ) -> Result<Tensor> {
        let mixed = || {
            let (first, second) = (loss(&self.first)?, loss(&self.second)?);
            let share = self.share.f_to_kind(first.kind())?;
            second.f_lerp_tensor(&first, &share)?.f_mean(None::<Kind>)
        };
        mixed().map_err(refused)
    }

    /// Returns the shares of the classes, `[n, classes]` in `f32`: the form in which torchvision returns labels.
    ///
    /// # Errors
    /// Fails for a label that is not below `classes`.
    pub fn one_hot(&self, classes: i64) -> Result<Tensor> {
        let shares = || {
            let hot = |labels: &Tensor| labels.f_one_hot(classes)?.f_to_kind(Kind::Float);
            hot(&self.second)?.f_lerp_tensor(&hot(&self.first)?, &self.share.f_unsqueeze(1)?)
        };
        shares().map_err(refused)
    }
}

/// Draws a number from Beta(α, α), or returns 1 if α is not positive.
///
/// For an α up to 1 it uses Jöhnk's method, in logarithms, because powers of 1/α underflow for a small α. For a larger
/// α it divides draws from two gamma distributions, because Jöhnk's method would reject nearly all draws.
pub fn beta(alpha: f64, random: &mut SampleRng) -> f64 {
    if alpha.is_nan() || alpha <= 0.0 {
        return 1.0;
    }
    if alpha > 1.0 {
        return random.dirichlet(alpha, 2)[0];
    }
    loop {
        // In (0, 1], so that the logarithm is finite.
        let [left, right] = [(); 2].map(|()| (1.0 - random.uniform(0.0, 1.0)).ln() / alpha);
        let largest = left.max(right);
        let sum = largest + ((left - largest).exp() + (right - largest).exp()).ln();
        if sum <= 0.0 {
            return (left - sum).exp();
        }
    }
}

/// Odd number near 2^64 divided by the golden ratio, to spread the bits of seeds.
const MIX: u64 = 0x9E37_79B9_7F4A_7C15;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beta_has_its_mean_and_variance() {
        for alpha in [0.1, 0.4, 1.0, 4.0, 50.0, 1e6] {
            let mut random = SampleRng::new(3, 0);
            let draws: Vec<f64> = (0..20_000).map(|_| beta(alpha, &mut random)).collect();
            let mean = draws.iter().sum::<f64>() / draws.len() as f64;
            let variance =
                draws.iter().map(|it| (it - mean).powi(2)).sum::<f64>() / draws.len() as f64;
            let exact = 1.0 / (4.0 * (2.0 * alpha + 1.0));
            assert!((mean - 0.5).abs() < 0.02, "{alpha}: {mean}");
            assert!((variance - exact).abs() < 0.03 * exact, "{alpha}: {variance}, not {exact}");
        }
        let mut random = SampleRng::new(3, 0);
        assert_eq!(beta(f64::INFINITY, &mut random), 0.5);
        assert_eq!(beta(f64::NAN, &mut random), 1.0);
    }
}
