//! Callbacks that follow a number from epoch to epoch: early stopping, plateaus, and the best model.

use std::path::PathBuf;

use brigade_torch::{Error, Result};

use crate::callback::{Callback, Level, Step};
use crate::hyper::Hyper;
use crate::state::LearnerState;

/// Direction of a better value: a smaller or a larger number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// Smaller numbers are better, as for a loss.
    Less,
    /// Larger numbers are better, as for an accuracy.
    Greater,
}

/// Best value of a column so far. Columns are equal on all ranks, so all ranks find the same one.
#[derive(Clone, Debug)]
struct Best {
    monitor: String,
    better: Option<Better>,
    min_delta: f64,
    reset_on_fit: bool,
    best: Option<f64>,
    is_new: bool,
    /// Number of epochs since the best one.
    wait: usize,
}

impl Default for Best {
    fn default() -> Self {
        Self {
            monitor: "valid_loss".to_owned(),
            better: None,
            min_delta: 0.0,
            reset_on_fit: true,
            best: None,
            is_new: false,
            wait: 0,
        }
    }
}

impl Best {
    fn better(&self) -> Better {
        self.better.unwrap_or_else(|| {
            if ["loss", "error"].iter().any(|word| self.monitor.contains(word)) {
                Better::Less
            } else {
                Better::Greater
            }
        })
    }

    fn before_fit(&mut self, learner: &LearnerState) -> Step {
        self.wait = 0;
        if self.reset_on_fit {
            self.best = None;
        }
        let names = learner.recorder().names();
        if !names.contains(&self.monitor) {
            return Err(Error::invalid_argument(format!(
                "it monitors `{}`, which is not recorded; there are {}",
                self.monitor,
                names.join(", ")
            ))
            .into());
        }
        Ok(())
    }

    /// Compares the epoch's value with the best one. A missing value or NaN is never better.
    fn look(&mut self, learner: &LearnerState) {
        let value = learner.recorder().last(&self.monitor).unwrap_or(f64::NAN);
        self.is_new = match (self.better(), self.best) {
            (_, None) => !value.is_nan(),
            (Better::Less, Some(best)) => value + self.min_delta < best,
            (Better::Greater, Some(best)) => value - self.min_delta > best,
        };
        self.wait += 1;
        if self.is_new {
            self.best = Some(value);
            self.wait = 0;
        }
    }
}

/// Returns the state of these callbacks in checkpoints: the best value, and a count.
fn kept(state: &serde_json::Value) -> Result<(Option<f64>, usize)> {
    let count = state.get("wait").and_then(serde_json::Value::as_u64);
    let count = count.and_then(|count| usize::try_from(count).ok()).ok_or_else(|| {
        Error::invalid_argument("the checkpoint's state of a tracker has no count `wait`")
    })?;
    Ok((state.get("best").and_then(serde_json::Value::as_f64), count))
}

/// Options that all callbacks of this file have.
macro_rules! monitored {
    ($($callback:ident),+) => {
        $(impl $callback {
            /// Sets the recorder's column that is monitored. Defaults to `valid_loss`.
            #[must_use]
            pub fn monitor(mut self, name: impl Into<String>) -> Self {
                self.best.monitor = name.into();
                self
            }

            /// Sets whether smaller or larger numbers are better. Defaults to smaller ones if the name contains `loss`
            /// or `error`, else larger ones.
            #[must_use]
            pub fn better(mut self, better: Better) -> Self {
                self.best.better = Some(better);
                self
            }

            /// Sets the minimum difference by which a value must be better than the best one. Defaults to 0.
            #[must_use]
            pub fn min_delta(mut self, delta: f64) -> Self {
                self.best.min_delta = delta;
                self
            }

            /// Sets whether each fit begins without a best value. Defaults to `true`.
            #[must_use]
            pub fn reset_on_fit(mut self, reset: bool) -> Self {
                self.best.reset_on_fit = reset;
                self
            }

            /// Returns the best value so far. `None` before the first epoch with a value.
            #[must_use]
            pub fn best(&self) -> Option<f64> {
                self.best.best
            }
        })+
    };
}

monitored!(EarlyStopping, ReduceLrOnPlateau, SaveModel);

/// Ends the fit after `patience` epochs without a new best value (fastai's `EarlyStoppingCallback`).
///
/// ```
/// use brigade_learn::callbacks::EarlyStopping;
///
/// let stop = EarlyStopping::new(3).monitor("accuracy").min_delta(0.001);
/// ```
#[derive(Clone, Debug)]
pub struct EarlyStopping {
    best: Best,
    patience: usize,
}

impl EarlyStopping {
    /// Makes a callback with a patience of this many epochs, at least one.
    #[must_use]
    pub fn new(patience: usize) -> Self {
        Self { best: Best::default(), patience: patience.max(1) }
    }
}

impl Callback for EarlyStopping {
    fn state(&mut self, _learner: &mut LearnerState) -> Result<Option<serde_json::Value>> {
        Ok(Some(serde_json::json!({ "best": self.best.best, "wait": self.best.wait })))
    }

    fn load_state(&mut self, _: &mut LearnerState, state: &serde_json::Value) -> Result<()> {
        (self.best.best, self.best.wait) = kept(state)?;
        Ok(())
    }

    fn order(&self) -> i32 {
        63
    }

    fn in_evaluation(&self) -> bool {
        false
    }

    fn before_fit(&mut self, learner: &mut LearnerState) -> Step {
        self.best.before_fit(learner)
    }

    fn after_epoch(&mut self, learner: &mut LearnerState) -> Step {
        self.best.look(learner);
        if self.best.wait < self.patience {
            return Ok(());
        }
        let since = match learner.epoch().checked_sub(self.best.wait) {
            Some(epoch) => format!("since epoch {epoch}"),
            None => "in this fit".to_owned(),
        };
        learner.println(format!("No improvement {since}: early stopping"));
        Level::Fit.cancel()
    }
}

/// Divides the learning rates after `patience` epochs without a new best value (fastai's `ReduceLROnPlateau`).
#[derive(Clone, Debug)]
pub struct ReduceLrOnPlateau {
    best: Best,
    patience: usize,
    factor: f64,
    min_lr: f64,
}

impl ReduceLrOnPlateau {
    /// Makes a callback with a patience of this many epochs, at least one, that divides the rates by 10.
    #[must_use]
    pub fn new(patience: usize) -> Self {
        let best = Best::default();
        Self { best, patience: patience.max(1), factor: 10.0, min_lr: 0.0 }
    }

    /// Sets the divisor of the learning rates. Defaults to 10.
    #[must_use]
    pub fn factor(mut self, factor: f64) -> Self {
        self.factor = factor;
        self
    }

    /// Sets the minimum learning rate. Defaults to 0.
    #[must_use]
    pub fn min_lr(mut self, lr: f64) -> Self {
        self.min_lr = lr;
        self
    }
}

impl Callback for ReduceLrOnPlateau {
    fn state(&mut self, _learner: &mut LearnerState) -> Result<Option<serde_json::Value>> {
        Ok(Some(serde_json::json!({ "best": self.best.best, "wait": self.best.wait })))
    }

    fn load_state(&mut self, _: &mut LearnerState, state: &serde_json::Value) -> Result<()> {
        (self.best.best, self.best.wait) = kept(state)?;
        Ok(())
    }

    fn order(&self) -> i32 {
        62
    }

    fn in_evaluation(&self) -> bool {
        false
    }

    fn before_fit(&mut self, learner: &mut LearnerState) -> Step {
        self.best.before_fit(learner)
    }

    fn after_epoch(&mut self, learner: &mut LearnerState) -> Step {
        self.best.look(learner);
        if self.best.wait < self.patience {
            return Ok(());
        }
        self.best.wait = 0;
        let before = learner.hypers().last().map_or(0.0, |it| it.lr);
        let rates: Vec<f64> =
            learner.hypers().iter().map(|it| (it.lr / self.factor).max(self.min_lr)).collect();
        learner.set_hyper(Hyper::Lr, &rates)?;
        let after = rates.last().copied().unwrap_or(0.0);
        if after < before {
            learner.println(format!("Epoch {}: reducing lr to {after}", learner.epoch()));
        }
        Ok(())
    }
}

/// Saves the model at each new best value, and loads the best model at the end of the fit (fastai's
/// `SaveModelCallback`). Rank 0 writes and reads; the others get its weights.
#[derive(Clone, Debug)]
pub struct SaveModel {
    best: Best,
    path: PathBuf,
    every_epoch: Option<usize>,
    at_end: bool,
    with_optimizer: bool,
    saved: bool,
}

impl SaveModel {
    /// Makes a callback that saves to this file, such as `models/best.pth`.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            best: Best::default(),
            path: path.into(),
            every_epoch: None,
            at_end: false,
            with_optimizer: false,
            saved: false,
        }
    }

    /// Sets that the model is saved every `epochs` epochs instead, each time to a file of its own with `_EPOCH`
    /// appended to its name, and that none is loaded at the end.
    #[must_use]
    pub fn every(mut self, epochs: usize) -> Self {
        self.every_epoch = Some(epochs.max(1));
        self
    }

    /// Sets whether the model of the last epoch is saved at the end of the fit, instead of loading the best one.
    #[must_use]
    pub fn at_end(mut self, on: bool) -> Self {
        self.at_end = on;
        self
    }

    /// Sets whether the optimizer is saved and loaded as well. Defaults to `false`.
    #[must_use]
    pub fn with_optimizer(mut self, on: bool) -> Self {
        self.with_optimizer = on;
        self
    }

    fn numbered(&self, epoch: usize) -> PathBuf {
        let stem = self.path.file_stem().unwrap_or_default().to_string_lossy();
        let mut name = format!("{stem}_{epoch}");
        if let Some(extension) = self.path.extension() {
            name = format!("{name}.{}", extension.to_string_lossy());
        }
        self.path.with_file_name(name)
    }
}

impl Callback for SaveModel {
    fn state(&mut self, _learner: &mut LearnerState) -> Result<Option<serde_json::Value>> {
        Ok(Some(serde_json::json!({ "best": self.best.best, "wait": usize::from(self.saved) })))
    }

    fn load_state(&mut self, _: &mut LearnerState, state: &serde_json::Value) -> Result<()> {
        let (best, saved) = kept(state)?;
        (self.best.best, self.saved) = (best, saved > 0);
        Ok(())
    }

    fn order(&self) -> i32 {
        61
    }

    fn in_evaluation(&self) -> bool {
        false
    }

    fn before_fit(&mut self, learner: &mut LearnerState) -> Step {
        self.saved = false;
        match self.every_epoch {
            Some(_) => Ok(()),
            None => self.best.before_fit(learner),
        }
    }

    fn after_epoch(&mut self, learner: &mut LearnerState) -> Step {
        if let Some(every) = self.every_epoch {
            if learner.epoch().is_multiple_of(every) {
                learner.save(self.numbered(learner.epoch()), self.with_optimizer)?;
            }
            return Ok(());
        }
        self.best.look(learner);
        if self.best.is_new {
            let value = self.best.best.unwrap_or(f64::NAN);
            learner.println(format!(
                "Better model found at epoch {} with {} value: {value}.",
                learner.epoch(),
                self.best.monitor
            ));
            learner.save(&self.path, self.with_optimizer)?;
            self.saved = true;
            // `brigade report` shows it beside the curves.
            if learner.accelerator().trackers().is_started() {
                let path = self.path.display().to_string();
                learner.accelerator().log([("best_checkpoint", path)], None)?;
            }
        }
        Ok(())
    }

    fn after_fit(&mut self, learner: &mut LearnerState) -> Step {
        if self.at_end {
            learner.save(&self.path, self.with_optimizer)?;
        } else if self.every_epoch.is_none() && self.saved {
            learner.load(&self.path, self.with_optimizer)?;
        }
        Ok(())
    }
}
