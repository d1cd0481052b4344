//! Hyperparameters of the parameter groups: one number for all, or one for each group.

use brigade_rank_env::text::counted;
use brigade_torch::{Error, Result};

/// A hyperparameter that schedules can change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Hyper {
    /// The learning rate of the optimizer.
    Lr,
    /// The momentum of SGD, or the first beta of Adam and related optimizers.
    Momentum,
    /// The weight decay. Norms and biases have none by default.
    WeightDecay,
}

impl Hyper {
    /// Returns the hyperparameter's name in logs and plots.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lr => "lr",
            Self::Momentum => "momentum",
            Self::WeightDecay => "weight_decay",
        }
    }
}

/// Learning rates of the parameter groups (fastai's number, list or `slice`).
///
/// ```
/// use brigade_learn::Rates;
///
/// assert_eq!(Rates::from(1e-3).of_groups(3)?, [1e-3, 1e-3, 1e-3]);
/// assert_eq!(Rates::up_to(1e-2).of_groups(3)?, [1e-3, 1e-3, 1e-2]);
/// let spread = Rates::between(1e-5, 1e-3).of_groups(3)?;
/// assert!((spread[1] - 1e-4).abs() < 1e-12);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum Rates {
    /// The same rate for all groups.
    Same(f64),
    /// Rates from that of the first group to that of the last one, in a geometric sequence (fastai's `slice(a, b)`). A
    /// single group gets the last.
    Between(f64, f64),
    /// A rate for the last group, and a tenth of it for all others (fastai's `slice(b)`).
    UpTo(f64),
    /// A rate for each group.
    Each(Vec<f64>),
}

impl Rates {
    /// Returns rates from the first group's to the last one's, with equal ratios between neighbours: fastai's
    /// `slice(first, last)`.
    #[must_use]
    pub fn between(first: f64, last: f64) -> Self {
        Self::Between(first, last)
    }

    /// Returns this rate for the last group and a tenth of it for all others: fastai's `slice(last)`.
    #[must_use]
    pub fn up_to(last: f64) -> Self {
        Self::UpTo(last)
    }

    /// Returns the rate of each group.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`] if the length of a list differs from the number of groups, or if a
    /// number is not a valid rate.
    pub fn of_groups(&self, groups: usize) -> Result<Vec<f64>> {
        let rates = match *self {
            Self::Same(rate) => vec![rate; groups],
            Self::Between(_, last) if groups == 1 => vec![last],
            Self::Between(first, last) => {
                let ratio = (last / first).powf(1.0 / (groups.max(2) - 1) as f64);
                (0..groups).map(|group| first * ratio.powi(group as i32)).collect()
            }
            Self::UpTo(last) => {
                let mut rates = vec![last / 10.0; groups];
                if let Some(rate) = rates.last_mut() {
                    *rate = last;
                }
                rates
            }
            Self::Each(ref rates) if rates.len() == groups => rates.clone(),
            Self::Each(ref rates) => {
                return Err(Error::invalid_argument(format!(
                    "found {} for {}; give one for each, or one for all",
                    counted(rates.len(), "rate"),
                    counted(groups, "parameter group")
                )));
            }
        };
        match rates.iter().find(|rate| !rate.is_finite() || **rate < 0.0) {
            None => Ok(rates),
            Some(rate) => Err(Error::invalid_argument(format!(
                "a learning rate is {rate}, from {self:?}; expected finite numbers from 0"
            ))),
        }
    }

    /// Returns the rates multiplied by a factor.
    #[must_use]
    pub fn scaled(&self, factor: f64) -> Self {
        match self {
            Self::Same(rate) => Self::Same(rate * factor),
            Self::Between(first, last) => Self::Between(first * factor, last * factor),
            Self::UpTo(last) => Self::UpTo(last * factor),
            Self::Each(rates) => Self::Each(rates.iter().map(|rate| rate * factor).collect()),
        }
    }
}

impl From<f64> for Rates {
    fn from(rate: f64) -> Self {
        Self::Same(rate)
    }
}

impl From<Vec<f64>> for Rates {
    fn from(rates: Vec<f64>) -> Self {
        Self::Each(rates)
    }
}

impl From<std::ops::Range<f64>> for Rates {
    /// Converts `1e-5..1e-3`, as fastai's `slice(1e-5, 1e-3)`.
    fn from(range: std::ops::Range<f64>) -> Self {
        Self::Between(range.start, range.end)
    }
}

impl From<std::ops::RangeTo<f64>> for Rates {
    /// Converts `..1e-3`, as fastai's `slice(1e-3)`.
    fn from(range: std::ops::RangeTo<f64>) -> Self {
        Self::UpTo(range.end)
    }
}

/// The hyperparameters of one parameter group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupHypers {
    /// Learning rate of the group.
    pub lr: f64,
    /// Momentum of the group. 0 if the optimizer has none.
    pub momentum: f64,
    /// Weight decay of the group.
    pub weight_decay: f64,
}

impl GroupHypers {
    pub(crate) fn get(&self, hyper: Hyper) -> f64 {
        match hyper {
            Hyper::Lr => self.lr,
            Hyper::Momentum => self.momentum,
            Hyper::WeightDecay => self.weight_decay,
        }
    }

    pub(crate) fn set(&mut self, hyper: Hyper, value: f64) {
        match hyper {
            Hyper::Lr => self.lr = value,
            Hyper::Momentum => self.momentum = value,
            Hyper::WeightDecay => self.weight_decay = value,
        }
    }
}
