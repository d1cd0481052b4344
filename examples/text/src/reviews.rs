//! Generated film reviews, where no folder was given.

use std::path::PathBuf;

use anyhow::Context;
use brigade::learn::prelude::Accelerator;
use brigade_testkit::Reviews;

use crate::whole;

/// Generates film reviews below `data/`, on one process of each host, in IMDb's layout: `train`, `test` and `unsup`,
/// the first two with `pos` and `neg`.
///
/// # Errors
/// When the folder cannot be written.
pub fn reviews(accelerator: &Accelerator, per_class: usize) -> anyhow::Result<PathBuf> {
    let folder = PathBuf::from(format!("data/reviews-{per_class}"));
    accelerator.processes().local_main_process_first(|| {
        let reviews = Reviews::new(per_class).sentences(4);
        whole(&folder, |folder| reviews.write(folder).context("cannot write the reviews"))
            .map_err(brigade::Error::custom)
    })?;
    Ok(folder)
}
