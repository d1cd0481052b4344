//! Random number streams by name: a seed and a path of numbers give the same stream on every machine.

use rand_pcg::Pcg64;
use rand_pcg::rand_core::{Rng, SeedableRng};

/// Returns the random number stream of `seed` and a `path` such as `[epoch, sample]`.
///
/// The stream is a [`Pcg64`] whose 256-bit seed is made with SplitMix64's mixing function: the seed and then each
/// number of the path are folded into one 64-bit key, and the key is expanded into four words. Both the value and the
/// position of each number matter: `stream(1, &[0])` and `stream(0, &[1])` are independent, whereas adding seed and
/// epoch would make them equal.
///
/// The stream is part of the interface: a checkpoint relies on it to rebuild the order of an epoch, so it does not
/// change between versions or machines.
///
/// ```
/// use brigade_sampling::stream;
/// use rand_pcg::rand_core::Rng;
///
/// assert_eq!(stream(7, &[0, 3]).next_u64(), stream(7, &[0, 3]).next_u64());
/// assert_ne!(stream(7, &[0, 3]).next_u64(), stream(7, &[3, 0]).next_u64());
/// ```
#[must_use]
pub fn stream(seed: u64, path: &[u64]) -> Pcg64 {
    let mut key = mix(seed);
    for part in path {
        key = mix(key ^ mix(part.wrapping_add(GOLDEN)));
    }
    let mut bytes = [0; 32];
    for word in bytes.chunks_exact_mut(8) {
        key = key.wrapping_add(GOLDEN);
        word.copy_from_slice(&mix(key).to_le_bytes());
    }
    Pcg64::from_seed(bytes)
}

/// Returns a uniform number below `bound` (not 0), without bias: Lemire's method, "Fast Random Integer Generation in an
/// Interval" (2019). Written out because an order that checkpoints rely on must not change when a library changes its
/// own method.
pub(crate) fn below(rng: &mut Pcg64, bound: u64) -> u64 {
    let mut product = u128::from(rng.next_u64()) * u128::from(bound);
    if (product as u64) < bound {
        let reject = bound.wrapping_neg() % bound;
        while (product as u64) < reject {
            product = u128::from(rng.next_u64()) * u128::from(bound);
        }
    }
    (product >> 64) as u64
}

/// Returns a uniform number in [0, 1) with 53 random bits.
pub(crate) fn unit(rng: &mut Pcg64) -> f64 {
    (rng.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// First numbers of the paths that this crate itself uses, so that a shuffle and a weighted draw with the same seed do
/// not share their numbers.
pub(crate) const SHUFFLE: u64 = 1;
pub(crate) const WEIGHTED: u64 = 2;

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64's output function (Steele, Lea, Flood 2014, with Stafford's constants).
fn mix(key: u64) -> u64 {
    let key = (key ^ (key >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let key = (key ^ (key >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    key ^ (key >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounded_numbers_cover_the_interval_evenly() {
        let mut rng = stream(1, &[2]);
        let mut counts = [0u32; 7];
        for _ in 0..70_000 {
            counts[below(&mut rng, 7) as usize] += 1;
        }
        // Five standard deviations of a binomial with p = 1/7.
        assert!(counts.iter().all(|&c| (c as i32 - 10_000).abs() < 470), "{counts:?}");
    }

    #[test]
    fn a_zero_seed_and_an_empty_path_are_streams_like_any_other() {
        let words: Vec<u64> =
            [(0, &[][..]), (0, &[0]), (0, &[0, 0]), (1, &[]), (1, &[0]), (0, &[1])]
                .map(|(seed, path)| stream(seed, path).next_u64())
                .to_vec();
        for (i, word) in words.iter().enumerate() {
            assert!(!words[..i].contains(word), "{words:?}");
        }
    }
}
