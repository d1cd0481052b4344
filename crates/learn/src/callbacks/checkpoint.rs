//! Checkpoints within a fit, from which it can be resumed.

use std::path::PathBuf;

use brigade_rank_env::text::counted;
use brigade_torch::Error;

use crate::callback::{Callback, Step};
use crate::fit_progress::FitProgress;
use crate::state::LearnerState;

/// Saves the whole state of a fit into a folder, after each epoch and optionally after every few batches, and resumes
/// from it when the program is started again: at the same batch, with the same bits.
///
/// The state is the Accelerator's checkpoint (model, optimizer, loss scale, random states of all ranks, position in the
/// data) with the recorder and the states of the callbacks. The folder appears whole or not at all, and training waits
/// only for a copy. A finished fit is not started again, and one that a callback has cancelled counts as finished:
/// remove the folder to start from the beginning.
///
/// Metrics of training batches (`Learner::train_metrics`) of a resumed epoch cover only the batches after the
/// resumption.
///
/// A program of several fits, such as one that calls `fine_tune`, resumes in the fit that was interrupted, and skips
/// the fits before it. The program must run the same fits with the same callbacks again. A Learner has at most one such
/// callback at a time.
///
/// ```no_run
/// use brigade_learn::callbacks::Checkpoint;
/// # fn f(mut learner: brigade_learn::Learner) -> brigade_torch::Result<()> {
/// learner.add(Checkpoint::new("runs/last").every(500));
/// learner.fit_one_cycle(10, 1e-3, ())?; // killed, and started again: it goes on
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    every: Option<usize>,
    resume: bool,
    /// Index of this fit, from 0.
    fit: usize,
    /// `true` if a save waits for the end of the accumulation window.
    due: bool,
    /// `true` if this fit is skipped because a later one was interrupted.
    passed: bool,
}

impl Checkpoint {
    /// Makes a callback that saves into this folder, after each epoch.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), every: None, resume: true, fit: 0, due: false, passed: false }
    }

    /// Also saves a checkpoint after every `batches` training batches, at least 1. Defaults to one after each epoch
    /// only.
    #[must_use]
    pub fn every(mut self, batches: usize) -> Self {
        self.every = Some(batches.max(1));
        self
    }

    /// Sets whether a fit resumes from an existing checkpoint. Defaults to `true`.
    #[must_use]
    pub fn resume(mut self, on: bool) -> Self {
        self.resume = on;
        self
    }
}

impl Callback for Checkpoint {
    fn order(&self) -> i32 {
        // Last of all callbacks, so that it saves their effects on the batch.
        100
    }

    fn in_evaluation(&self) -> bool {
        false
    }

    fn before_fit(&mut self, learner: &mut LearnerState) -> Step {
        (self.due, self.passed) = (false, false);
        if self.resume
            && let Some(progress) = FitProgress::read(learner.accelerator(), &self.folder)?
        {
            if progress.fit == self.fit && progress.epochs != learner.epochs() {
                return Err(Error::invalid_argument(format!(
                    "the checkpoint in {} is of a fit of {}, and this one has {}; remove the folder to \
                     start again",
                    self.folder.display(),
                    counted(progress.epochs, "epoch"),
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
        // The end of the epoch is saved separately, after its validation.
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
            // Accumulated gradients are not part of a checkpoint: save after the next step instead.
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
