//! Frozen parts of a model in the middle of a fit.

use brigade_torch::Error;

use crate::callback::{Callback, Step};
use crate::state::LearnerState;

/// Freezes and unfreezes parameter groups at the beginning of epochs: gradual unfreezing in one fit.
///
/// The optimizer's state is reset at each change, as after [`Learner::freeze_to`](crate::Learner::freeze_to).
///
/// ```
/// use brigade_learn::callbacks::FreezeSchedule;
///
/// // The head alone, from epoch 1 on the last two groups, from epoch 3 on all of them.
/// let schedule = FreezeSchedule::new([(0, -1), (1, -2), (3, 0)]);
/// ```
#[derive(Clone, Debug)]
pub struct FreezeSchedule {
    changes: Vec<(usize, isize)>,
    applied: Option<usize>,
}

impl FreezeSchedule {
    /// Makes a schedule from pairs of an epoch and the first group that is trained from it on.
    #[must_use]
    pub fn new(changes: impl IntoIterator<Item = (usize, isize)>) -> Self {
        Self { changes: changes.into_iter().collect(), applied: None }
    }
}

impl Callback for FreezeSchedule {
    fn in_evaluation(&self) -> bool {
        false
    }

    fn before_fit(&mut self, _learner: &mut LearnerState) -> Step {
        self.applied = None;
        self.changes.sort_by_key(|(epoch, _)| *epoch);
        Ok(())
    }

    fn before_epoch(&mut self, learner: &mut LearnerState) -> Step {
        // The last change up to this epoch, which may be an earlier one: a resumed fit has skipped the others.
        let due = self.changes.iter().rposition(|(epoch, _)| *epoch <= learner.epoch());
        if due != self.applied
            && let Some((_, group)) = due.and_then(|due| self.changes.get(due))
        {
            learner.freeze_to(*group)?;
        }
        self.applied = due;
        Ok(())
    }
}

/// Keeps normalisations with frozen weights in evaluation mode, so that their running statistics do not change
/// (fastai's `BnFreeze`).
#[derive(Clone, Debug, Default)]
pub struct NormFreeze {
    held: Vec<String>,
}

impl NormFreeze {
    /// Makes the callback, which has no options.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn release(&mut self, learner: &mut LearnerState) {
        for layer in self.held.drain(..) {
            if let Err(error) = learner.hold_in_eval(&layer, false) {
                tracing::error!("the layer {layer} stays in evaluation: {error}");
            }
        }
    }
}

impl Callback for NormFreeze {
    fn before_train(&mut self, learner: &mut LearnerState) -> Step {
        self.release(learner);
        let frozen = learner.local_parameters();
        let frozen = frozen.iter().filter(|it| !it.tensor.requires_grad());
        let norms = learner.model.norm_parameters();
        let layers: Vec<String> = frozen
            .filter(|parameter| norms.contains(&parameter.name))
            .filter_map(|parameter| parameter.name.strip_suffix(".weight").map(str::to_owned))
            .collect();
        let statistics = learner.buffers();
        for layer in layers {
            // A layer norm has no statistics, and computes the same in training and evaluation.
            if statistics.iter().any(|it| it.name == format!("{layer}.running_mean")) {
                learner.hold_in_eval(&layer, true)?;
                self.held.push(layer);
            }
        }
        Ok(())
    }

    fn ended(&mut self, learner: &mut LearnerState) {
        self.release(learner);
    }
}

/// Ends each epoch's training, and its validation, after a share of the batches: to try a program out (fastai's
/// `ShortEpochCallback`).
#[derive(Clone, Copy, Debug)]
pub struct ShortEpoch {
    share: f64,
    validation: bool,
}

impl ShortEpoch {
    /// Makes a callback that ends training and validation after this share of their batches, 0 to 1.
    #[must_use]
    pub fn new(share: f64) -> Self {
        Self { share, validation: true }
    }

    /// Sets whether validation is shortened as well. Defaults to `true`.
    #[must_use]
    pub fn validation(mut self, short: bool) -> Self {
        self.validation = short;
        self
    }
}

impl Callback for ShortEpoch {
    fn in_evaluation(&self) -> bool {
        false
    }

    fn before_fit(&mut self, _learner: &mut LearnerState) -> Step {
        if (0.0..=1.0).contains(&self.share) {
            Ok(())
        } else {
            Err(Error::invalid_argument(format!(
                "the share of an epoch is {}, expected a number from 0 to 1",
                self.share
            ))
            .into())
        }
    }

    fn after_batch(&mut self, learner: &mut LearnerState) -> Step {
        // Ranks with fewer validation batches end by themselves; all ranks have the same number of training batches.
        if (learner.iter() as f64) < self.share * learner.batches() as f64 {
            return Ok(());
        }
        if learner.is_training() {
            crate::callback::Level::Train.cancel()
        } else if self.validation {
            crate::callback::Level::Validate.cancel()
        } else {
            Ok(())
        }
    }
}
