//! Freezing of parameter groups.

use super::Learner;
use crate::error::{Error, Result};

impl Learner {
    /// Freezes all parameter groups before the one with this number, and trains the others. Negative numbers count
    /// from the end: -1 trains the last group alone. Normalisations stay trained unless
    /// [`Learner::train_norms`] is off. The optimizer's state begins anew; its hyperparameters stay.
    ///
    /// # Errors
    /// When there is no such group, or libtorch refuses.
    pub fn freeze_to(&mut self, group: isize) -> Result<()> {
        let groups = self.state.grouped.len();
        let first = match usize::try_from(group) {
            Ok(first) => Some(first),
            Err(_) => groups.checked_sub(group.unsigned_abs()),
        };
        let Some(first) = first.filter(|first| *first <= groups) else {
            return Err(Error::InvalidArgument(format!(
                "freeze_to({group}): the model has {groups} parameter groups; give 0 to {groups}, or -1 to \
                 -{groups} from the end"
            )));
        };
        if groups == 1 && first > 0 {
            tracing::warn!(
                "freeze_to({group}) on a model with a single parameter group; split the parameters first"
            );
        }
        let entered = self.is_distributed();
        if entered {
            self.state.model.detach();
        }
        self.state.grouped.freeze_to(first);
        let trained = self.state.grouped.trained();
        self.state.model.train_only(&trained)?;
        if entered {
            let accelerator = self.state.accelerator.clone();
            self.state.model.prepare(&accelerator)?;
        }
        Ok(())
    }

    /// Freezes all parameter groups but the last.
    ///
    /// # Errors
    /// As [`Learner::freeze_to`].
    pub fn freeze(&mut self) -> Result<()> {
        self.freeze_to(-1)
    }

    /// Trains all parameter groups.
    ///
    /// # Errors
    /// As [`Learner::freeze_to`].
    pub fn unfreeze(&mut self) -> Result<()> {
        self.freeze_to(0)
    }
}
