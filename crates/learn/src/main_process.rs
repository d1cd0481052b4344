//! Work that rank 0 does for all ranks.

use brigade_torch::Result;
use brigade_train::Accelerator;

/// Runs `body` on rank 0, and returns its error on all ranks.
pub(crate) fn on_main(accelerator: &Accelerator, body: impl FnOnce() -> Result<()>) -> Result<()> {
    accelerator.processes().on_main_process(body).map(drop)
}
