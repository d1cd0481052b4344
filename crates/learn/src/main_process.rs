//! What rank 0 does for all.

use brigade_train::Accelerator;

use crate::error::Result;

/// Runs `body` on rank 0; all ranks learn how it went.
pub(crate) fn on_main(accelerator: &Accelerator, body: impl FnOnce() -> Result<()>) -> Result<()> {
    let mut own = None;
    let outcome = accelerator.processes().on_main_process(|| {
        body().map_err(|error| {
            let text = error.to_string();
            own = Some(error);
            brigade_train::Error::InvalidArgument(text)
        })
    });
    match (own, outcome) {
        // Rank 0 keeps its own error, with its type.
        (Some(error), _) => Err(error),
        (None, outcome) => Ok(outcome.map(drop)?),
    }
}
