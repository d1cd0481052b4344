//! Lookahead, an option of every optimizer.

use brigade_torch::{Error, Result};

use crate::check::check;

/// Lookahead (Zhang et al., 2019): every few steps slow weights move part of the way to the optimizer's weights, and
/// the optimizer continues from the slow weights. Pass it to any optimizer's `lookahead`.
///
/// ```
/// use brigade_optim::{Lookahead, Sgd};
/// # let model = tch::nn::VarStore::new(tch::Device::Cpu);
/// # let _ = tch::nn::linear(model.root() / "module1" / "hidden1", 2, 2, Default::default());
/// let optimizer = Sgd::new(0.1).lookahead(Lookahead::default().every(5)).build(&model)?;
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[must_use]
pub struct Lookahead {
    pub(crate) every: u64,
    pub(crate) alpha: f64,
}

impl Default for Lookahead {
    fn default() -> Self {
        Self { every: 6, alpha: 0.5 }
    }
}

impl Lookahead {
    /// Sets the number of steps between two synchronisations of the slow weights. Defaults to 6.
    #[doc(alias = "k")]
    pub fn every(mut self, steps: u64) -> Self {
        self.every = steps;
        self
    }

    /// Sets the fraction, from 0 to 1, by which the slow weights move to the optimizer's. Defaults to 0.5.
    pub fn alpha(mut self, alpha: f64) -> Self {
        self.alpha = alpha;
        self
    }

    pub(crate) fn check(self) -> Result<()> {
        if self.every == 0 {
            return Err(Error::invalid_argument("Lookahead every 0 steps; expected at least 1"));
        }
        check("Lookahead's alpha", self.alpha, 0.0..1.0 + f64::EPSILON)
    }
}

/// Name of the slow weights in states. fastai does not save them, so the name is Brigade's.
pub(crate) const SLOW: &str = "slow_weight";
