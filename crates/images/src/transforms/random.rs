//! The random numbers of one sample.

use std::f64::consts::TAU;

use brigade_sampling::stream;
use rand_pcg::Pcg64;
use rand_pcg::rand_core::Rng;

/// The random generator of a transform. Each sample and each position in the list of transforms has a stream of its
/// own, so that a transform that is added at the end does not change the numbers of those before it.
///
/// ```
/// use brigade_images::transforms::SampleRng;
///
/// let mut random = SampleRng::new(7, 0);
/// let shift = random.uniform(-1.0, 1.0);
/// assert!((-1.0..1.0).contains(&shift));
/// assert!(random.below(10) < 10);
/// assert_eq!(SampleRng::new(7, 0).uniform(-1.0, 1.0), shift);
/// ```
#[derive(Clone, Debug)]
pub struct SampleRng(Pcg64);

impl SampleRng {
    /// Creates the stream of the transform at position `place` for a sample's seed.
    #[must_use]
    pub fn new(seed: u64, place: usize) -> Self {
        Self(stream(seed, &[TRANSFORM, place as u64]))
    }

    /// Draws a uniform number in `low..high`, or `low` if the range is empty.
    pub fn uniform(&mut self, low: f64, high: f64) -> f64 {
        // 53 bits: each multiple of 2^-53 in 0..1 has the same probability.
        let unit = (self.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
        low + (high - low) * unit
    }

    /// Draws a uniform whole number below `bound`; 0 if `bound` is 0.
    ///
    /// Written out, like the order of an epoch: a number that a resumed run draws again must not change when a library
    /// changes its own method. The bias is below `bound / 2^64`.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.0.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// Returns `true` with probability `p`.
    pub fn chance(&mut self, p: f64) -> bool {
        self.uniform(0.0, 1.0) < p
    }

    /// Draws `count` weights, whose sum is 1, from the symmetric Dirichlet distribution with the concentration
    /// parameter `alpha`, which must be positive. Two weights are a number of Beta(α, α) and its complement.
    #[must_use]
    pub fn dirichlet(&mut self, alpha: f64, count: usize) -> Vec<f64> {
        if alpha == f64::INFINITY {
            return vec![1.0 / count as f64; count];
        }
        let logarithms: Vec<f64> = (0..count).map(|_| log_gamma_variate(alpha, self)).collect();
        // In logarithms, because all variates of a small alpha may underflow.
        let most = logarithms.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let shares = logarithms.iter().map(|logarithm| (logarithm - most).exp());
        let sum: f64 = shares.clone().sum();
        shares.map(|share| share / sum).collect()
    }
}

/// Draws the logarithm of a gamma variate of scale 1, by the method of Marsaglia and Tsang (2000).
fn log_gamma_variate(alpha: f64, random: &mut SampleRng) -> f64 {
    // In (0, 1], so that the logarithm is finite.
    let unit = |random: &mut SampleRng| 1.0 - random.uniform(0.0, 1.0);
    if alpha < 1.0 {
        let boost = unit(random).ln() / alpha;
        return log_gamma_variate(alpha + 1.0, random) + boost;
    }
    let d = alpha - 1.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        // A normal variate, by the method of Box and Muller.
        let normal = (-2.0 * unit(random).ln()).sqrt() * (TAU * random.uniform(0.0, 1.0)).cos();
        let root = 1.0 + c * normal;
        if root <= 0.0 {
            continue;
        }
        let cube = root.powi(3);
        if unit(random).ln() < 0.5 * normal * normal + d * (1.0 - cube + cube.ln()) {
            return (d * cube).ln();
        }
    }
}

/// First number of the path of a transform's stream.
const TRANSFORM: u64 = 5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_uniform() {
        let mut random = SampleRng::new(1, 0);
        let mut counts = [0; 5];
        for _ in 0..10_000 {
            counts[random.below(5) as usize] += 1;
        }
        assert!(counts.iter().all(|count| (1850..2150).contains(count)), "{counts:?}");
        let mean = (0..10_000).map(|_| random.uniform(2.0, 4.0)).sum::<f64>() / 10_000.0;
        assert!((mean - 3.0).abs() < 0.03, "{mean}");
        let heads = (0..10_000).filter(|_| random.chance(0.25)).count();
        assert!((2350..2650).contains(&heads), "{heads}");
    }

    #[test]
    fn streams_differ_by_seed_and_place() {
        let first = |seed, place| SampleRng::new(seed, place).below(u64::MAX);
        assert_eq!(first(3, 1), first(3, 1));
        assert_ne!(first(3, 1), first(3, 2));
        assert_ne!(first(3, 1), first(4, 1));
    }
}
