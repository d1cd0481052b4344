//! The weighted sampler: draws in proportion to a weight per sample.

use crate::stream::{WEIGHTED, stream, unit};
use crate::{PlanError, Sampler};

/// Draws samples in proportion to their weights, like torch's `WeightedRandomSampler`.
///
/// With replacement, each draw takes sample `i` with probability `w[i] / sum(w)`. Without replacement, a sample is
/// drawn at most once, and each draw is among the samples that are left. A sample of weight 0 is never drawn. The
/// weights need not sum to one. All ranks draw the same order, because it depends on the seed and the epoch only; no
/// broadcast is needed. Drawing without replacement compares logarithms: a math library that rounds their last bit
/// differently could swap two samples whose values are almost equal.
///
/// ```
/// use brigade_sampling::{Sampler, Weighted};
///
/// let sampler = Weighted::with_replacement(vec![0.0, 1.0, 3.0], 1000, 42)?;
/// let order = sampler.order(0);
/// assert_eq!(order.len(), 1000);
/// assert!(!order.contains(&0));
/// let often = order.iter().filter(|&&i| i == 2).count();
/// assert!((700..800).contains(&often));
/// # Ok::<(), brigade_sampling::PlanError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Weighted {
    weights: Vec<f64>,
    num_samples: usize,
    replacement: bool,
    seed: u64,
}

impl Weighted {
    /// Creates a sampler that draws `num_samples` samples per epoch from `weights.len()` samples. A sample can be drawn
    /// several times.
    ///
    /// # Errors
    /// Fails if a weight is negative or not finite, no weight is above 0, the sum of the weights is infinite, or
    /// `num_samples` is 0.
    pub fn with_replacement(
        weights: Vec<f64>,
        num_samples: usize,
        seed: u64,
    ) -> Result<Self, PlanError> {
        check(&weights, num_samples)?;
        Ok(Self { weights, num_samples, replacement: true, seed })
    }

    /// Creates a sampler that draws `num_samples` different samples per epoch from `weights.len()` samples.
    ///
    /// # Errors
    /// Returns the same errors as [`with_replacement`](Self::with_replacement), and an error if fewer than
    /// `num_samples` weights are above 0.
    pub fn without_replacement(
        weights: Vec<f64>,
        num_samples: usize,
        seed: u64,
    ) -> Result<Self, PlanError> {
        let available = check(&weights, num_samples)?;
        if available < num_samples {
            let weights = weights.len();
            return Err(PlanError::TooFewWeights { num_samples, available, weights });
        }
        Ok(Self { weights, num_samples, replacement: false, seed })
    }

    /// Draws with replacement: inverts the cumulative sum with a binary search per draw. An alias table would take
    /// constant time per draw; at a million draws the search takes a tenth of a second, once per epoch.
    fn draw(&self, epoch: u64) -> Vec<usize> {
        let mut rng = stream(self.seed, &[WEIGHTED, epoch]);
        let mut total = 0.0;
        let cumulative: Vec<f64> = self
            .weights
            .iter()
            .map(|weight| {
                total += weight;
                total
            })
            .collect();
        // Rounding may bring a draw up to the total itself: it then takes the last sample whose weight is above 0.
        let last = cumulative.partition_point(|&sum| sum < total);
        (0..self.num_samples)
            .map(|_| {
                let at = unit(&mut rng) * total;
                cumulative.partition_point(|&sum| sum <= at).min(last)
            })
            .collect()
    }

    /// Draws without replacement by an exponential race (Efraimidis and Spirakis 2006): sample `i` arrives after an
    /// exponential time of rate `w[i]`, and the first `num_samples` arrivals, in their order, are distributed like
    /// successive draws without replacement. Times are compared as logarithms, because a tiny weight would overflow
    /// otherwise.
    fn race(&self, epoch: u64) -> Vec<usize> {
        let mut rng = stream(self.seed, &[WEIGHTED, epoch]);
        let mut arrivals: Vec<(f64, usize)> = self
            .weights
            .iter()
            .enumerate()
            // A number is drawn for weight 0 too, so that the numbers of a sample do not depend on the other weights.
            .map(|(index, weight)| (index, weight, 1.0 - unit(&mut rng)))
            .filter(|(_, weight, _)| **weight > 0.0)
            .map(|(index, weight, chance)| ((-chance.ln()).ln() - weight.ln(), index))
            .collect();
        let earlier = |a: &(f64, usize), b: &(f64, usize)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1));
        if self.num_samples < arrivals.len() {
            arrivals.select_nth_unstable_by(self.num_samples, earlier);
            arrivals.truncate(self.num_samples);
        }
        arrivals.sort_unstable_by(earlier);
        arrivals.into_iter().map(|(_, index)| index).collect()
    }
}

impl Sampler for Weighted {
    fn len(&self) -> usize {
        self.num_samples
    }

    fn order(&self, epoch: u64) -> Vec<usize> {
        if self.replacement { self.draw(epoch) } else { self.race(epoch) }
    }
}

/// Checks the weights and returns how many of them are above 0.
fn check(weights: &[f64], num_samples: usize) -> Result<usize, PlanError> {
    if num_samples == 0 {
        return Err(PlanError::Zero { what: "number of samples to draw" });
    }
    if let Some((index, &weight)) =
        weights.iter().enumerate().find(|(_, weight)| !(weight.is_finite() && **weight >= 0.0))
    {
        return Err(PlanError::BadWeight { index, weight });
    }
    let available = weights.iter().filter(|weight| **weight > 0.0).count();
    if available == 0 {
        return Err(PlanError::NoWeight { weights: weights.len() });
    }
    if weights.iter().sum::<f64>().is_infinite() {
        return Err(PlanError::WeightOverflow { weights: weights.len() });
    }
    Ok(available)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_the_weights() {
        let sampler = Weighted::with_replacement(vec![1.0, 0.0, 2.0, 5.0, 0.0], 80_000, 5).unwrap();
        let mut counts = [0i32; 5];
        for index in sampler.order(3) {
            counts[index] += 1;
        }
        assert_eq!((counts[1], counts[4]), (0, 0));
        for (index, expected) in [(0, 10_000), (2, 20_000), (3, 50_000)] {
            assert!((counts[index] - expected).abs() < 700, "{counts:?}"); // 5 deviations
        }
    }

    #[test]
    fn the_first_of_a_race_follows_the_weights_and_so_does_the_second() {
        let sampler = Weighted::without_replacement(vec![1.0, 2.0, 3.0], 2, 5).unwrap();
        let (mut first, mut pairs) = ([0i32; 3], 0);
        for epoch in 0..12_000 {
            let order = sampler.order(epoch);
            first[order[0]] += 1;
            pairs += i32::from(order == [2, 1]);
        }
        for (count, expected) in first.into_iter().zip([2_000, 4_000, 6_000]) {
            assert!((count - expected).abs() < 275, "{first:?}");
        }
        // 3/6 for the first draw, then 2 of the remaining 3.
        assert!((pairs - 4_000).abs() < 260, "{pairs}");
    }

    #[test]
    fn extreme_weights_are_drawn_without_overflow() {
        let tiny = f64::from_bits(1);
        let sampler = Weighted::without_replacement(vec![tiny, 1e300, tiny, 0.0], 3, 0).unwrap();
        for epoch in 0..50 {
            let mut order = sampler.order(epoch);
            assert_eq!(order[0], 1);
            order.sort_unstable();
            assert_eq!(order, [0, 1, 2]);
        }
        let sampler = Weighted::with_replacement(vec![0.0, tiny, 0.0], 5, 0).unwrap();
        assert_eq!(sampler.order(0), [1; 5]);
    }

    #[test]
    fn bad_weights_are_named() {
        let new = |weights: &[f64], n| Weighted::with_replacement(weights.to_vec(), n, 0);
        let error = |weights: &[f64], n| new(weights, n).unwrap_err().to_string();
        assert!(error(&[1.0, -0.5], 1).starts_with("the weight of sample 1 is -0.5"));
        assert!(error(&[f64::NAN], 1).starts_with("the weight of sample 0 is NaN"));
        assert!(error(&[f64::INFINITY], 1).starts_with("the weight of sample 0 is inf"));
        assert!(error(&[0.0, 0.0], 1).starts_with("none of the 2 weights is above 0"));
        assert!(error(&[], 1).starts_with("none of the 0 weights"));
        assert!(error(&[1e308, 1e308], 1).contains("infinite"));
        assert!(error(&[1.0], 0).contains("number of samples to draw is 0"));
        let error = Weighted::without_replacement(vec![1.0, 0.0, 1.0], 3, 0).unwrap_err();
        assert_eq!(error, PlanError::TooFewWeights { num_samples: 3, available: 2, weights: 3 });
    }

    // As with the shuffle, a change here breaks checkpoints, and the numbers were made by a second implementation.
    #[test]
    fn the_draws_are_pinned() {
        let weights = vec![1.0, 2.0, 3.0, 4.0, 0.0, 6.0];
        let with = Weighted::with_replacement(weights.clone(), 10, 42).unwrap();
        assert_eq!(with.order(0), [3, 3, 5, 1, 5, 5, 5, 3, 2, 1]);
        let without = Weighted::without_replacement(weights, 5, 42).unwrap();
        assert_eq!(without.order(0), [3, 5, 1, 0, 2]);
    }
}
