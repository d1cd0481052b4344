//! Lookahead, which any optimizer can have.

use super::options::check;
use crate::error::{Error, Result};

/// Lookahead (Zhang et al., 2019): slow weights go part of the way to the optimizer's every few steps,
/// and the optimizer goes on from there. Given to any optimizer's `lookahead`.
///
/// ```no_run
/// # use brigade_models::{Cnn, Model};
/// # use brigade_train::{Lookahead, Result, Sgd};
/// # fn f(model: &Model<Cnn>) -> Result<()> {
/// let optimizer = Sgd::new(0.1).lookahead(Lookahead::default().every(5)).build(model)?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[must_use]
pub struct Lookahead {
    pub(super) every: u64,
    pub(super) alpha: f64,
}

impl Default for Lookahead {
    fn default() -> Self {
        Self { every: 6, alpha: 0.5 }
    }
}

impl Lookahead {
    /// Steps between two looks; 6 unless set.
    #[doc(alias = "k")]
    pub fn every(mut self, steps: u64) -> Self {
        self.every = steps;
        self
    }

    /// The part of the way, from 0 to 1; 0.5 unless set.
    pub fn alpha(mut self, alpha: f64) -> Self {
        self.alpha = alpha;
        self
    }

    pub(super) fn check(self) -> Result<()> {
        if self.every == 0 {
            return Err(Error::Misuse("Lookahead every 0 steps; expected at least 1".into()));
        }
        check("Lookahead's alpha", self.alpha, 0.0..1.0 + f64::EPSILON)
    }
}

/// fastai keeps the slow weights outside the state; the name is ours.
pub(super) const SLOW: &str = "slow_weight";
