//! Check that all ranks have the same data.

use brigade_torch::{Error, Result};
use brigade_train::Accelerator;
use brigade_vision::check_ranks_agree;
use brigade_vision::source::Fingerprint;

/// Returns this rank's value if the values of all ranks have the same fingerprint, else an error on every rank, so that
/// no rank waits for one that has failed.
pub(super) fn agreed<T>(
    accelerator: &Accelerator,
    local: Result<T>,
    fingerprint: impl FnOnce(&T) -> Result<Fingerprint>,
) -> Result<T> {
    let local = local.and_then(|found| Ok((fingerprint(&found)?, found)));
    let failure = local.as_ref().err().map(ToString::to_string);
    let failures: Vec<Option<String>> = accelerator.processes().gather_object(failure)?;
    let (fingerprint, found) = local?;
    for (rank, failure) in failures.into_iter().enumerate() {
        if let Some(reason) = failure {
            return Err(Error::invalid_argument(format!(
                "rank {rank} could not prepare its data: {reason}"
            )));
        }
    }
    check_ranks_agree(&fingerprint, accelerator.processes().group().as_ref())?;
    Ok(found)
}
