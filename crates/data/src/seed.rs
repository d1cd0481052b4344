//! Seeds of loaders to which none is given.

use std::cell::RefCell;

use brigade_sampling::stream;
use rand_pcg::Pcg64;
use rand_pcg::rand_core::Rng;

/// The first part of the stream's path, which separates these numbers from those of a loader with the same seed.
const DRAWN: u64 = 5;

thread_local! {
    static SEEDS: RefCell<Option<Pcg64>> = const { RefCell::new(None) };
}

/// Seeds the numbers that [`draw_seed`] returns in this thread: loaders that are made in this thread from then on
/// without a seed have the same seeds in each run that makes them in the same order.
///
/// `Accelerator::set_seed` calls it. The setting belongs to the thread, since ranks may be threads of one process.
///
/// ```
/// use brigade_data::{DataLoader, dataset_from_fn, set_thread_seed};
/// let seeds = || {
///     set_thread_seed(42);
///     [(); 2].map(|()| DataLoader::new(dataset_from_fn(8, |index, _| Ok(index as f32))).current_seed())
/// };
/// let [train, valid] = seeds();
/// assert_ne!(train, valid);
/// assert_eq!(seeds(), [train, valid]);
/// ```
pub fn set_thread_seed(seed: u64) {
    SEEDS.set(Some(stream(seed, &[DRAWN])));
}

/// Draws a seed: the next one of the sequence that [`set_thread_seed`] has begun in this thread, or a random one.
#[must_use]
pub fn draw_seed() -> u64 {
    SEEDS.with_borrow_mut(|seeds| seeds.as_mut().map_or_else(rand::random, Pcg64::next_u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_has_seeds_of_its_own_and_random_ones_until_it_is_given_some() {
        set_thread_seed(7);
        let first = draw_seed();
        let (one, other) = std::thread::spawn(|| (draw_seed(), draw_seed())).join().unwrap();
        assert_ne!(one, other);
        let second = draw_seed();
        assert_ne!(first, second);
        set_thread_seed(7);
        assert_eq!([draw_seed(), draw_seed()], [first, second]);
        set_thread_seed(8);
        assert_ne!(draw_seed(), first);
    }
}
