//! The learning-rate finder, and its suggestions.

use brigade_rank_env::text::counted;
use brigade_schedule::Annealing;
use brigade_torch::{Error, Result};

use super::Learner;
use super::fit::FitOptions;
use crate::callback::{Callback, Level, Step};
use crate::hyper::Hyper;
use crate::recording::RecorderOptions;
use crate::state::LearnerState;

/// Options of the learning-rate finder (Smith, 2017), fastai's `lr_find`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LrFindOptions {
    /// First learning rate. Defaults to 1e-7.
    pub start_lr: f64,
    /// Last learning rate. Defaults to 10.
    pub end_lr: f64,
    /// Number of batches, at least 6. Defaults to 100.
    pub steps: usize,
    /// `true` if the finder stops once the smoothed loss is more than four times its minimum. Defaults to `true`.
    pub stop_div: bool,
}

impl Default for LrFindOptions {
    fn default() -> Self {
        Self { start_lr: 1e-7, end_lr: 10.0, steps: 100, stop_div: true }
    }
}

/// A rule that suggests a learning rate from the curve of losses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suggestion {
    /// The rate a third of the way into the longest descent: fastai's default.
    Valley,
    /// The rate at which the slope stops changing before the loss diverges.
    Slide,
    /// A tenth of the rate with the minimum loss.
    Minimum,
    /// The rate of the steepest descent.
    Steep,
}

impl Suggestion {
    /// All rules, in fastai's order.
    pub const ALL: [Self; 4] = [Self::Valley, Self::Slide, Self::Minimum, Self::Steep];

    /// Returns the rule's name in fastai.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Valley => "valley",
            Self::Slide => "slide",
            Self::Minimum => "minimum",
            Self::Steep => "steep",
        }
    }

    /// Returns the rate that the rule suggests for a curve of rates and losses. `None` if the curve is too short, or
    /// not finite at the rule's point.
    #[must_use]
    pub fn of(self, lrs: &[f64], losses: &[f64]) -> Option<f64> {
        let rate = match self {
            Self::Valley => valley(lrs, losses)?,
            Self::Slide => slide(lrs, losses)?,
            Self::Minimum => lrs.get(least(losses)?)? / 10.0,
            Self::Steep => {
                let slopes: Vec<f64> = losses
                    .windows(2)
                    .zip(lrs.windows(2))
                    .map(|(loss, lr)| (loss[1] - loss[0]) / (lr[1].ln() - lr[0].ln()))
                    .collect();
                *lrs.get(least(&slopes)?)?
            }
        };
        rate.is_finite().then_some(rate)
    }
}

/// The curve that the finder measured: learning rates and smoothed losses of its batches.
#[derive(Clone, Debug, PartialEq)]
pub struct LrFinding {
    lrs: Vec<f64>,
    losses: Vec<f64>,
    steps: usize,
}

impl LrFinding {
    /// Returns the learning rates of the batches.
    #[must_use]
    pub fn lrs(&self) -> &[f64] {
        &self.lrs
    }

    /// Returns the smoothed losses of the batches.
    #[must_use]
    pub fn losses(&self) -> &[f64] {
        &self.losses
    }

    /// Returns the part of the curve that suggestions use: without the first tenth, the last five batches, and
    /// everything from a NaN loss on.
    #[must_use]
    pub fn curve(&self) -> (&[f64], &[f64]) {
        let end = self.lrs.len().saturating_sub(5);
        let begin = (self.steps / 10).min(end);
        let losses = &self.losses[begin..end];
        let sound = losses.iter().position(|loss| loss.is_nan()).unwrap_or(losses.len());
        (&self.lrs[begin..begin + sound], &losses[..sound])
    }

    /// Suggests a learning rate by a rule.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] where the finder ended too early for it.
    pub fn suggest(&self, rule: Suggestion) -> Result<f64> {
        let (lrs, losses) = self.curve();
        rule.of(lrs, losses).ok_or_else(|| {
            Error::invalid_argument(format!(
                "lr_find cannot suggest a rate by `{}`: the curve has {}; begin at a smaller rate, or take \
                 more steps",
                rule.name(),
                counted(lrs.len(), "point")
            ))
        })
    }

    /// Suggests a learning rate by fastai's default rule, [`Suggestion::Valley`].
    ///
    /// # Errors
    /// Returns the same errors as [`LrFinding::suggest`].
    pub fn valley(&self) -> Result<f64> {
        self.suggest(Suggestion::Valley)
    }
}

/// Returns the rates a third and a sixth into the longest descent, which is found as the longest decreasing
/// subsequence.
fn valley(lrs: &[f64], losses: &[f64]) -> Option<f64> {
    let mut lengths = vec![1usize; losses.len()];
    let (mut start, mut end) = (0isize, 0usize);
    for index in 1..losses.len() {
        for before in 0..index {
            if losses[index] < losses[before] && lengths[index] < lengths[before] + 1 {
                lengths[index] = lengths[before] + 1;
            }
            if lengths[end] < lengths[index] {
                end = index;
                start = end as isize - lengths[end] as isize;
            }
        }
    }
    let section = (end as isize - start) as f64 / 3.0;
    let index = start + section as isize + (section / 2.0) as isize;
    // Counted from the end if the descent is the whole curve.
    let index = if index < 0 { index + lrs.len() as isize } else { index };
    lrs.get(usize::try_from(index).ok()?).copied()
}

/// Returns the first rate from the right whose slope is similar to that of the rate 15 positions before.
fn slide(lrs: &[f64], losses: &[f64]) -> Option<f64> {
    const APART: usize = 15;
    const CHANGE: f64 = 0.005;
    if losses.len() <= APART {
        return None;
    }
    let slopes = gradient(losses);
    let mut right = losses.len() - 1;
    let mut found = lrs[right - APART];
    while right >= APART && (slopes[right] - slopes[right - APART]).abs() > CHANGE {
        found = lrs[right - APART];
        right -= 1;
    }
    Some(found)
}

/// Returns central differences, one-sided at the ends.
fn gradient(values: &[f64]) -> Vec<f64> {
    let last = values.len() - 1;
    let slope = |index: usize| match index {
        0 => values[1] - values[0],
        index if index == last => values[last] - values[last - 1],
        index => (values[index + 1] - values[index - 1]) / 2.0,
    };
    (0..values.len()).map(slope).collect()
}

/// Returns the index of the minimum.
fn least(values: &[f64]) -> Option<usize> {
    let places = 0..values.len();
    places.filter(|index| !values[*index].is_nan()).min_by(|a, b| values[*a].total_cmp(&values[*b]))
}

/// Raises the rate with every batch, until it ends the fit.
#[derive(Debug)]
struct Finder {
    options: LrFindOptions,
    schedule: Annealing,
    best: f64,
}

impl Callback for Finder {
    fn order(&self) -> i32 {
        60
    }

    fn before_fit(&mut self, learner: &mut LearnerState) -> Step {
        // A rate that is too high makes the loss infinite, which ends the curve and is not an error.
        learner.ends_on_nan = true;
        Ok(())
    }

    fn before_batch(&mut self, learner: &mut LearnerState) -> Step {
        if learner.is_training() {
            let progress = learner.train_iter() as f64 / self.options.steps as f64;
            let rates = vec![self.schedule.at(progress); learner.parameter_groups().len()];
            learner.set_hyper(Hyper::Lr, &rates)?;
        }
        Ok(())
    }

    fn after_batch(&mut self, learner: &mut LearnerState) -> Step {
        let Some(smooth) = learner.recorder().smooth_losses().last().copied() else {
            return Ok(());
        };
        self.best = self.best.min(smooth);
        let diverges = self.options.stop_div && smooth > 4.0 * self.best;
        if diverges || learner.train_iter() >= self.options.steps {
            return Level::Fit.cancel();
        }
        Ok(())
    }

    fn before_validate(&mut self, _learner: &mut LearnerState) -> Step {
        Level::Validate.cancel()
    }

    fn ended(&mut self, learner: &mut LearnerState) {
        learner.ends_on_nan = false;
    }
}

impl Learner {
    /// Trains with a learning rate that rises with every batch, and restores everything afterwards: weights, optimizer,
    /// recorder, and the position in the data. Callbacks that save, log or stop are left out.
    ///
    /// ```no_run
    /// # fn f(mut learner: brigade_learn::Learner) -> brigade_torch::Result<()> {
    /// let found = learner.lr_find()?;
    /// learner.fit_one_cycle(5, found.valley()?, ())?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Returns the same errors as [`Learner::fit`].
    pub fn lr_find(&mut self) -> Result<LrFinding> {
        self.lr_find_with(LrFindOptions::default())
    }

    /// Runs the learning-rate finder as [`Learner::lr_find`] does, with options.
    ///
    /// # Errors
    /// Returns the same errors as [`Learner::lr_find`], and [`brigade_torch::ErrorKind::InvalidArgument`] unless the
    /// first rate is above 0, and the last rate is finite and above the first.
    pub fn lr_find_with(&mut self, options: LrFindOptions) -> Result<LrFinding> {
        let options = LrFindOptions { steps: options.steps.max(6), ..options };
        let LrFindOptions { start_lr, end_lr, steps, .. } = options;
        if !(start_lr > 0.0 && end_lr > start_lr && end_lr.is_finite()) {
            return Err(Error::invalid_argument(format!(
                "lr_find goes from {start_lr} to {end_lr}; give rates that rise from above 0"
            )));
        }
        let (built, hypers) = (self.state.grouped.is_built(), self.state.hypers().to_vec());
        self.place_model()?;
        let values = self.state.copied_values()?;
        let optimizer = match self.state.optimizer()? {
            Some(optimizer) => Some(optimizer.state_dict()?.deep_clone()?),
            None => None,
        };
        let recorder = self.state.recorder.clone();
        let (epoch, quiet) = (self.train.epoch(), self.state.quiet);
        let lasting = std::mem::take(&mut self.callbacks);
        let (taking_part, left_out): (Vec<_>, Vec<_>) =
            lasting.into_iter().enumerate().partition(|(_, callback)| callback.in_evaluation());
        let places: Vec<usize> = taking_part.iter().map(|(place, _)| *place).collect();
        self.callbacks = taking_part.into_iter().map(|(_, callback)| callback).collect();

        self.state.quiet = true;
        let outcome = self.find(options);
        self.state.quiet = quiet;

        let taken_part = std::mem::take(&mut self.callbacks);
        let mut all: Vec<(usize, Box<dyn Callback>)> =
            places.into_iter().zip(taken_part).chain(left_out).collect();
        all.sort_by_key(|(place, _)| *place);
        self.callbacks = all.into_iter().map(|(_, callback)| callback).collect();
        let found = std::mem::replace(&mut self.state.recorder, recorder);
        self.train.set_epoch(epoch);
        self.state.put_back(&values)?;
        match (built, optimizer, self.state.optimizer()?) {
            (true, Some(state), Some(mut optimizer)) => {
                optimizer.load_state_dict(&state)?;
                for hyper in [Hyper::Lr, Hyper::Momentum, Hyper::WeightDecay] {
                    let values: Vec<f64> = hypers.iter().map(|it| it.get(hyper)).collect();
                    self.state.set_hyper(hyper, &values)?;
                }
            }
            _ => self.state.grouped.forget(hypers),
        }
        outcome?;
        Ok(LrFinding { lrs: found.lrs, losses: found.smooth_losses, steps })
    }

    fn find(&mut self, options: LrFindOptions) -> Result<()> {
        self.distributed(|learner| {
            let batches = learner.prepared.as_ref().map_or(1, |it| it.train.batches());
            let epochs = options.steps / batches.max(1) + 1;
            let schedule = Annealing::exponential(options.start_lr, options.end_lr);
            let finder = Finder { options, schedule, best: f64::INFINITY };
            let losses_alone =
                RecorderOptions { train_metrics: false, valid_metrics: false, at_once: true };
            let recorded = std::mem::replace(&mut learner.recording, losses_alone);
            let outcome = learner.fit_with(epochs, FitOptions::default(), finder);
            learner.recording = recorded;
            outcome
        })
    }
}
