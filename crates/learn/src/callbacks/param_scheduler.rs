//! Hyperparameters that follow the progress of a fit.

use brigade_schedule::Annealing;

use crate::callback::{Callback, Phases, Step};
use crate::hyper::Hyper;
use crate::state::LearnerState;

/// Sets hyperparameters before each batch of training, by the fit's progress (fastai's `ParamScheduler`).
///
/// ```
/// use brigade_learn::Hyper;
/// use brigade_learn::callbacks::ParamScheduler;
/// use brigade_schedule::Annealing;
///
/// let scheduler = ParamScheduler::new(Hyper::Lr, Annealing::linear(1e-4, 1e-2))
///     .and(Hyper::WeightDecay, Annealing::cosine(0.1, 0.0));
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct ParamScheduler {
    schedules: Vec<(Hyper, Vec<Annealing>)>,
}

impl ParamScheduler {
    /// Makes a schedule of a hyperparameter for all parameter groups.
    pub fn new(hyper: Hyper, schedule: Annealing) -> Self {
        Self { schedules: vec![(hyper, vec![schedule])] }
    }

    /// Makes a schedule of a hyperparameter for each parameter group.
    pub fn each_group(hyper: Hyper, schedules: Vec<Annealing>) -> Self {
        Self { schedules: vec![(hyper, schedules)] }
    }

    /// Adds a schedule of another hyperparameter.
    pub fn and(mut self, hyper: Hyper, schedule: Annealing) -> Self {
        self.schedules.push((hyper, vec![schedule]));
        self
    }
}

impl Callback for ParamScheduler {
    fn order(&self) -> i32 {
        60
    }

    fn phases(&self) -> Phases {
        Phases::Train
    }

    fn in_evaluation(&self) -> bool {
        false
    }

    fn before_batch(&mut self, learner: &mut LearnerState) -> Step {
        let groups = learner.parameter_groups().len();
        let progress = learner.progress();
        for (hyper, schedules) in &self.schedules {
            let values: Vec<f64> = match schedules.as_slice() {
                [one] => vec![one.at(progress); groups],
                each => each.iter().map(|schedule| schedule.at(progress)).collect(),
            };
            learner.set_hyper(*hyper, &values)?;
        }
        Ok(())
    }
}
