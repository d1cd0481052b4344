//! Checkpoints in the middle of a fit, and going on from them.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::callback::{Callback, Step};
use crate::error::{Error, Result};
use crate::learner::on_main;
use crate::recorder::Recorder;
use crate::state::LearnerState;

/// Saves the whole state of a fit into a folder, after each epoch and after every so many batches where that is
/// asked for, and goes on from there when the program is started again: at the same batch, with the same bits.
///
/// The state is the Accelerator's checkpoint (model, optimizer, loss scale, random states of all ranks, position in
/// the data) with the recorder and what the callbacks keep. The folder is there whole or not at all, and training
/// waits for a copy alone. A fit that was finished is not begun again, and one that a callback has cancelled is
/// finished: remove the folder to begin anew.
///
/// Metrics of training batches (`Learner::train_metrics`) of an epoch that goes on are those of the batches that were
/// left.
///
/// A program of several fits, as `fine_tune` is one, goes on in the fit that was interrupted, and passes over those
/// before it. The program must make the same fits with the same callbacks again; a Learner has one of these at a
/// time.
///
/// ```no_run
/// use brigade_learn::callbacks::Checkpoint;
/// # fn f(mut learner: brigade_learn::Learner) -> brigade_learn::Result<()> {
/// learner.add(Checkpoint::new("runs/last").every(500));
/// learner.fit_one_cycle(10, 1e-3, ())?; // killed, and started again: it goes on
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    every: Option<usize>,
    resume: bool,
    /// The number of this fit, from 0.
    fit: usize,
    /// A save that waits for the end of a window of accumulation.
    due: bool,
    /// This fit is passed over: a later one was interrupted.
    passed: bool,
}

/// What a checkpoint holds of the Learner itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Progress {
    pub(crate) fit: usize,
    pub(crate) epochs: usize,
    /// The epoch that goes on, and its batches that were trained.
    pub(crate) epoch: usize,
    pub(crate) batch: usize,
    /// Batches of an epoch on a rank.
    pub(crate) batches: usize,
    pub(crate) train_iter: usize,
    pub(crate) progress: f64,
    pub(crate) recorder: Recorder,
    /// Of each callback that keeps something: its name and what.
    pub(crate) callbacks: Vec<(String, String)>,
}

/// The file's name in the checkpoint's folder.
pub(crate) const FILE: &str = "learner.msgpack";

impl Checkpoint {
    /// Saves into this folder, after each epoch.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), every: None, resume: true, fit: 0, due: false, passed: false }
    }

    /// Saves after every so many trained batches as well.
    #[must_use]
    pub fn every(mut self, batches: usize) -> Self {
        self.every = Some(batches.max(1));
        self
    }

    /// Whether it goes on from a checkpoint that is there; true unless set.
    #[must_use]
    pub fn resume(mut self, on: bool) -> Self {
        self.resume = on;
        self
    }
}

impl Progress {
    /// Reads the file of a checkpoint on rank 0, for all ranks; `None` where there is no checkpoint.
    fn read(learner: &LearnerState, folder: &Path) -> Result<Option<Self>> {
        let mut found = None;
        on_main(learner.accelerator(), || {
            let path = folder.join(FILE);
            found = match std::fs::read(&path) {
                Ok(bytes) => Some(bytes),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    // Not to be found out at the first save.
                    if std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some()) {
                        return Err(Error::Format {
                            path: folder.to_owned(),
                            reason: format!(
                                "it has files, but no {FILE}: it is no checkpoint of a Learner; give another folder"
                            ),
                        });
                    }
                    None
                }
                Err(error) => return Err(Error::file("cannot read", &path)(error)),
            };
            Ok(())
        })?;
        let bytes = learner.accelerator().processes().broadcast_object(found, 0)?;
        let parse = |bytes: Vec<u8>| {
            rmp_serde::from_slice(&bytes).map_err(|error| Error::Format {
                path: folder.join(FILE),
                reason: error.to_string(),
            })
        };
        bytes.map(parse).transpose()
    }
}

impl Callback for Checkpoint {
    fn order(&self) -> i32 {
        // After all others, so that it saves what they have made of the batch.
        100
    }

    fn in_evaluation(&self) -> bool {
        false
    }

    fn before_fit(&mut self, learner: &mut LearnerState) -> Step {
        (self.due, self.passed) = (false, false);
        if self.resume
            && let Some(progress) = Progress::read(learner, &self.folder)?
        {
            if progress.fit == self.fit && progress.epochs != learner.epochs() {
                return Err(Error::InvalidArgument(format!(
                    "the checkpoint in {} is of a fit of {} epochs, and this one has {}; remove the folder to \
                     begin anew",
                    self.folder.display(),
                    progress.epochs,
                    learner.epochs()
                ))
                .into());
            }
            self.passed = progress.fit > self.fit;
            if progress.fit >= self.fit {
                learner.resume = Some((self.folder.clone(), progress.fit == self.fit, progress));
            }
        }
        self.fit += 1;
        Ok(())
    }

    fn after_batch(&mut self, learner: &mut LearnerState) -> Step {
        if !learner.is_training() {
            return Ok(());
        }
        self.due |= self.every.is_some_and(|every| learner.train_iter().is_multiple_of(every));
        // The end of the epoch is saved by itself, after its validation.
        let last = learner.iter() + 1 == learner.batches();
        if self.due && !learner.window_open && !last {
            self.due = false;
            learner.save = Some((self.folder.clone(), self.fit - 1));
        }
        Ok(())
    }

    fn after_epoch(&mut self, learner: &mut LearnerState) -> Step {
        let last = learner.epoch() + 1 == learner.epochs();
        if learner.window_open && !last {
            // Gradients that were added up are in no checkpoint: the next step is saved instead.
            self.due = true;
        } else {
            self.due = false;
            learner.save = Some((self.folder.clone(), self.fit - 1));
        }
        Ok(())
    }

    fn after_cancel_fit(&mut self, learner: &mut LearnerState) -> Step {
        if !self.passed {
            learner.save = Some((self.folder.clone(), self.fit - 1));
        }
        Ok(())
    }

    fn after_fit(&mut self, learner: &mut LearnerState) -> Step {
        Ok(learner.accelerator().checkpoints().wait()?)
    }
}
