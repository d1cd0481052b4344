//! `brigade checkpoint verify`: compares a checkpoint with its checksums.

use std::path::Path;

use brigade_checkpoint::Error;
use brigade_checkpoint::layout::Checkpoint;
use brigade_rank_env::text::{counted, escaped};

use super::bytes;

/// Returns the exit code and the text. The code is 1 if the checkpoint is damaged.
pub(super) fn answer(path: &Path) -> anyhow::Result<(u8, String)> {
    let checkpoint = match Checkpoint::open(path) {
        Ok(checkpoint) => checkpoint,
        // This is the answer to the question, not a failure to answer it.
        Err(error @ Error::Damaged { .. }) => return Ok((1, format!("{error}\n"))),
        Err(error) => return Err(error.into()),
    };
    let faults = checkpoint.verify();
    if faults.is_empty() {
        let manifest = checkpoint.manifest();
        let (files, size) = (counted(manifest.files.len(), "file"), bytes(manifest.bytes()));
        return Ok((0, format!("{}: {files}, {size}, all as written\n", escaped(path.display()))));
    }
    let mut lines: Vec<String> =
        faults.iter().map(|fault| format!("{}\n", escaped(fault))).collect();
    lines.sort();
    Ok((1, lines.concat()))
}
