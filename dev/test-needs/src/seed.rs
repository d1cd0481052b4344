//! Random numbers of tests, which can be repeated.

use std::env;

/// The variable with the seed: set it to repeat a run.
pub const SEED: &str = "BRIGADE_TEST_SEED";

/// Makes a generator from the seed in `BRIGADE_TEST_SEED`, or from a new one, and prints the seed.
///
/// # Panics
/// When the variable holds something else than a number: the run would not be the one that was asked
/// for.
#[must_use]
pub fn random() -> fastrand::Rng {
    let seed = match env::var(SEED) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{SEED}={text}: expected a number")),
        Err(_) => fastrand::u64(..),
    };
    eprintln!("{SEED}={seed}");
    fastrand::Rng::with_seed(seed)
}
