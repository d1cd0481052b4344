//! Progress of a fit, as its checkpoint stores it.

use std::path::Path;

use brigade_torch::Result;
use brigade_train::Accelerator;
use serde::{Deserialize, Serialize};

use crate::error::LearnError;
use crate::main_process::on_main;
use crate::recorder::Recorder;

/// Name of the file in the checkpoint's folder.
pub(crate) const FILE: &str = "learner.msgpack";

/// State of the Learner itself in a checkpoint.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct FitProgress {
    pub(crate) fit: usize,
    pub(crate) epochs: usize,
    /// Epoch in which the fit continues.
    pub(crate) epoch: usize,
    pub(crate) batch: usize,
    /// Number of batches of an epoch on a rank.
    pub(crate) batches: usize,
    pub(crate) train_iter: usize,
    pub(crate) progress: f64,
    pub(crate) recorder: Recorder,
    /// Names and states of the callbacks that have one.
    pub(crate) callbacks: Vec<(String, String)>,
}

impl FitProgress {
    /// Reads the file of a checkpoint on rank 0, for all ranks. `None` without a checkpoint.
    pub(crate) fn read(accelerator: &Accelerator, folder: &Path) -> Result<Option<Self>> {
        let mut found = None;
        on_main(accelerator, || {
            let path = folder.join(FILE);
            found = match std::fs::read(&path) {
                Ok(bytes) => Some(bytes),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    // Checked here so that the first save does not fail.
                    if std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some()) {
                        return Err(LearnError::Format {
                            path: folder.to_owned(),
                            reason: format!(
                                "not a Learner checkpoint: {FILE} is missing; pass another folder"
                            ),
                        }
                        .into());
                    }
                    None
                }
                Err(error) => return Err(LearnError::file("cannot read", &path)(error).into()),
            };
            Ok(())
        })?;
        let bytes = accelerator.processes().broadcast_object(found, 0)?;
        let parse = |bytes: Vec<u8>| {
            rmp_serde::from_slice(&bytes).map_err(|error| LearnError::Format {
                path: folder.join(FILE),
                reason: error.to_string(),
            })
        };
        Ok(bytes.map(parse).transpose()?)
    }
}
