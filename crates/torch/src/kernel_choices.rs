//! Choices between ways to compute the same on a GPU, which C++ measures and the user's cache keeps.

use brigade_kernels::{Cache, KeptChoice};

use crate::bridge::ffi;

/// Returns the choices that were kept for a GPU with versions of libraries.
pub(crate) fn kept_choices(identity: &str) -> ffi::KeptChoices {
    let kept = Cache::of_user().choices(identity);
    // A number beyond what C++ has is not one of its choices.
    let row = |KeptChoice { key, candidates, chosen }| {
        let (candidates, chosen) = (i32::try_from(candidates).ok()?, i32::try_from(chosen).ok()?);
        Some(ffi::KeptChoice { key, candidates, chosen })
    };
    let choices = kept.choices.into_iter().filter_map(row).collect();
    ffi::KeptChoices { choices, remark: kept.remark.unwrap_or_default() }
}

/// Keeps choices in place of all that were kept before. Returns a message for the user, or an empty text.
pub(crate) fn keep_choices(identity: &str, choices: Vec<ffi::KeptChoice>) -> String {
    let row = |ffi::KeptChoice { key, candidates, chosen }| KeptChoice {
        key,
        candidates: candidates.unsigned_abs(),
        chosen: chosen.unsigned_abs(),
    };
    let choices: Vec<_> = choices.into_iter().map(row).collect();
    let kept = Cache::of_user().keep_choices(identity, &choices);
    kept.err().map(|error| error.to_string()).unwrap_or_default()
}
