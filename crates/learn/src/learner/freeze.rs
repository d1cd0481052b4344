//! Freezing of parameter groups.

use brigade_rank_env::text::counted;
use brigade_torch::{Error, Result};

use super::Learner;
use crate::state::LearnerState;

impl LearnerState {
    /// Freezes parameter groups, also during a fit; see [`Learner::freeze_to`]. Every rank calls it.
    ///
    /// # Errors
    /// Returns the same errors as [`Learner::freeze_to`].
    pub fn freeze_to(&mut self, group: isize) -> Result<()> {
        let groups = self.grouped.len();
        let first = match usize::try_from(group) {
            Ok(first) => Some(first),
            Err(_) => groups.checked_sub(group.unsigned_abs()),
        };
        let Some(first) = first.filter(|first| *first <= groups) else {
            return Err(Error::invalid_argument(format!(
                "freeze_to({group}): the model has {}; give 0 to {groups}, or -1 to -{groups} from the end",
                counted(groups, "parameter group")
            )));
        };
        if groups == 1 && group != 0 {
            tracing::warn!(
                "freeze_to({group}) changes nothing but the optimizer's state: the model has a single parameter \
                 group; split the parameters first"
            );
        }
        let built = self.grouped.is_built();
        self.grouped.freeze_to(first);
        // During a fit the optimizer is needed at the next step.
        if self.model.is_prepared() && built {
            return self.build_optimizer(0.0);
        }
        self.replacing_model(|state| state.model.train_only(&state.grouped.trained()))
    }

    /// Makes the optimizer of the parameters that are trained. `lr` is the rate of groups that have none yet.
    pub(crate) fn build_optimizer(&mut self, lr: f64) -> Result<()> {
        self.replacing_model(|state| {
            state.model.train_only(&state.grouped.trained())?;
            state.grouped.build(&state.model.local_parameters(), lr)
        })
    }

    /// Prepares the optimizer of a model that is divided among ranks, outside of a fit as well.
    pub(crate) fn prepare_optimizer(&mut self) -> Result<()> {
        if self.is_in_parts() {
            let accelerator = self.accelerator.clone();
            self.grouped.prepare(&accelerator)?;
        }
        Ok(())
    }

    /// Runs `body` with the plain model, or the sharded one: the reducer of any other prepared model keeps the
    /// parameters that were trained when it was made.
    fn replacing_model(&mut self, body: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let prepared = self.model.is_prepared();
        if prepared {
            self.model.detach();
        }
        let outcome = body(self);
        if prepared {
            let accelerator = self.accelerator.clone();
            self.model.prepare(&accelerator)?;
            self.grouped.prepare(&accelerator)?;
        }
        outcome
    }
}

impl Learner {
    /// Freezes all parameter groups before the one with this number, and unfreezes the others. Negative numbers count
    /// from the end: -1 trains only the last group. Normalisations stay trained unless [`Learner::train_norms`] is off.
    /// The optimizer's state is reset; its hyperparameters are kept.
    ///
    /// # Errors
    /// Fails when no group has this number, or libtorch fails.
    pub fn freeze_to(&mut self, group: isize) -> Result<()> {
        self.state.freeze_to(group)
    }

    /// Freezes all parameter groups but the last.
    ///
    /// # Errors
    /// Returns the same errors as [`Learner::freeze_to`].
    pub fn freeze(&mut self) -> Result<()> {
        self.freeze_to(-1)
    }

    /// Unfreezes all parameter groups.
    ///
    /// # Errors
    /// Returns the same errors as [`Learner::freeze_to`].
    pub fn unfreeze(&mut self) -> Result<()> {
        self.freeze_to(0)
    }
}
