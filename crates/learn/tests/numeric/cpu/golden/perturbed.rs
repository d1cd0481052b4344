//! Runs whose weights are perturbed by about one unit in the last place: how far their results move is how far rounding
//! alone can move those of a run, on this processor and on any other.

use brigade_learn::callback::{Callback, Phases, Step};
use brigade_learn::{Learner, LearnerState};
use brigade_test_device::perturb;
use serde_json::Value;

use super::runs::{Outcome, make_perturbed};

/// How many runs are made; one alone may move little by chance.
pub(crate) const PERTURBED_RUNS: u64 = 2;

/// Makes all calls of a run with weights that are perturbed before the first call and before each batch of a training.
pub(crate) fn perturbed(run: &Value, seed: u64) -> Outcome {
    make_perturbed(run, Perturbation { seed: seed * 10_000 })
}

/// Perturbs all weights before each batch of a training, each time by other factors.
#[derive(Debug)]
pub(crate) struct Perturbation {
    seed: u64,
}

impl Perturbation {
    /// Perturbs the weights that a Learner begins with, and adds the callback.
    pub(crate) fn begin(self, learner: &mut Learner) {
        perturb(learner.parameters().into_iter().map(|it| it.tensor), self.seed);
        learner.add(self);
    }
}

impl Callback for Perturbation {
    fn order(&self) -> i32 {
        -2000
    }

    fn phases(&self) -> Phases {
        Phases::Train
    }

    fn before_batch(&mut self, learner: &mut LearnerState) -> Step {
        self.seed += 1;
        perturb(learner.parameters().into_iter().map(|it| it.tensor), self.seed);
        Ok(())
    }
}
