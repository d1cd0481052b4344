//! Reproducible random numbers of tests.

use std::env;

/// Variable with the seed. Set it to repeat a run.
pub const SEED: &str = "BRIGADE_TEST_SEED";

/// Creates a generator from the seed in `BRIGADE_TEST_SEED`, or from a new one, and prints the seed.
///
/// # Panics
/// Panics when the variable is not a number: the run would not be the requested one.
#[must_use]
pub fn random() -> fastrand::Rng {
    let seed = match env::var(SEED) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{SEED}={text}: expected a number")),
        Err(_) => fastrand::u64(..),
    };
    eprintln!("{SEED}={seed}");
    fastrand::Rng::with_seed(seed)
}
