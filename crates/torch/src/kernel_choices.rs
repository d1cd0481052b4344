//! Choices between ways to compute the same on a GPU, which C++ measures and the user's cache keeps.

use brigade_kernels::{Cache, KeptChoice};

/// Returns the choices that were kept for a GPU with versions of libraries, as key, number of candidates and number of
/// the chosen one, and a message for the user, which may be empty.
pub(crate) fn kept(identity: &str) -> (Vec<(String, i32, i32)>, String) {
    let kept = Cache::of_user().choices(identity);
    // A number beyond what C++ has is not one of its choices.
    let row = |KeptChoice { key, candidates, chosen }| {
        Some((key, i32::try_from(candidates).ok()?, i32::try_from(chosen).ok()?))
    };
    (kept.choices.into_iter().filter_map(row).collect(), kept.remark.unwrap_or_default())
}

/// Keeps choices in place of all that were kept before. Returns a message for the user, which may be empty.
pub(crate) fn keep(identity: &str, choices: impl Iterator<Item = (String, i32, i32)>) -> String {
    let row = |(key, candidates, chosen): (String, i32, i32)| KeptChoice {
        key,
        candidates: candidates.unsigned_abs(),
        chosen: chosen.unsigned_abs(),
    };
    let choices: Vec<_> = choices.map(row).collect();
    let kept = Cache::of_user().keep_choices(identity, &choices);
    kept.err().map(|error| error.to_string()).unwrap_or_default()
}
