//! Fits with schedules: one cycle, flat and cosine, restarts, and fine-tuning.

use brigade_rank_env::text::counted;
use brigade_schedule::Annealing;
use brigade_torch::{Error, Result};

use super::Learner;
use super::fit::FitOptions;
use crate::callback::IntoCallbacks;
use crate::callbacks::ParamScheduler;
use crate::hyper::{Hyper, Rates};

/// Options of the one-cycle policy (Smith, 2018), fastai's `fit_one_cycle`: the learning rate rises along a cosine and
/// falls along another, the momentum moves inversely.
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct OneCycleOptions {
    epochs: usize,
    rates: Option<Rates>,
    div: f64,
    div_final: f64,
    pct_start: f64,
    momenta: Option<[f64; 3]>,
    options: FitOptions,
}

impl OneCycleOptions {
    /// Returns the options of a cycle over a number of epochs with these maximum rates.
    pub fn new(epochs: usize, rates: impl Into<Rates>) -> Self {
        Self { rates: Some(rates.into()), ..Self::of(epochs) }
    }

    /// Returns the options of a cycle whose maximum is the Learner's learning rate.
    pub fn of(epochs: usize) -> Self {
        Self {
            epochs,
            rates: None,
            div: 25.0,
            div_final: 1e5,
            pct_start: 0.25,
            momenta: None,
            options: FitOptions::default(),
        }
    }

    /// Sets the ratio of the highest rate to the initial rate. Defaults to 25.
    pub fn div_initial(mut self, div: f64) -> Self {
        self.div = div;
        self
    }

    /// Sets the ratio of the highest rate to the final rate. Defaults to 1e5.
    pub fn div_final(mut self, div: f64) -> Self {
        self.div_final = div;
        self
    }

    /// Sets the share of the fit in which the rate rises. Defaults to 0.25.
    pub fn pct_start(mut self, share: f64) -> Self {
        self.pct_start = share;
        self
    }

    /// Sets the momentum at the beginning, at the highest rate and at the end. Defaults to the Learner's.
    pub fn momenta(mut self, momenta: [f64; 3]) -> Self {
        self.momenta = Some(momenta);
        self
    }
}

/// Options of a fit at a constant rate that ends with a cosine (fastai's `fit_flat_cos`). The momentum is not
/// scheduled.
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct FlatCosOptions {
    epochs: usize,
    rates: Option<Rates>,
    div_final: f64,
    pct_start: f64,
    options: FitOptions,
}

impl FlatCosOptions {
    /// Returns the options of a fit over a number of epochs at these rates.
    pub fn new(epochs: usize, rates: impl Into<Rates>) -> Self {
        Self {
            epochs,
            rates: Some(rates.into()),
            div_final: 1e5,
            pct_start: 0.75,
            options: FitOptions::default(),
        }
    }

    /// Sets the ratio of the initial rate to the final rate. Defaults to 1e5.
    pub fn div_final(mut self, div: f64) -> Self {
        self.div_final = div;
        self
    }

    /// Sets the share of the fit at the initial rate. Defaults to 0.75.
    pub fn pct_start(mut self, share: f64) -> Self {
        self.pct_start = share;
        self
    }
}

/// Options of cosine annealing with warm restarts (SGDR, Loshchilov and Hutter, 2017), fastai's `fit_sgdr`.
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct SgdrOptions {
    cycles: usize,
    cycle_len: usize,
    cycle_mult: usize,
    rates: Option<Rates>,
    options: FitOptions,
}

impl SgdrOptions {
    /// Returns the options of a number of cycles, the first of `cycle_len` epochs, each twice as long as the one
    /// before.
    pub fn new(cycles: usize, cycle_len: usize, rates: impl Into<Rates>) -> Self {
        Self {
            cycles,
            cycle_len,
            cycle_mult: 2,
            rates: Some(rates.into()),
            options: FitOptions::default(),
        }
    }

    /// Sets the ratio of the lengths of consecutive cycles. Defaults to 2.
    pub fn cycle_mult(mut self, factor: usize) -> Self {
        self.cycle_mult = factor;
        self
    }
}

/// Options of fine-tuning: an epoch with only the last group trained, then epochs with all groups (fastai's
/// `fine_tune`).
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct FineTuneOptions {
    epochs: usize,
    base_lr: f64,
    freeze_epochs: usize,
    lr_mult: f64,
    pct_start: f64,
    div: f64,
    options: FitOptions,
}

impl FineTuneOptions {
    /// Returns the options of a number of epochs with all groups, after one epoch with only the last group.
    pub fn new(epochs: usize) -> Self {
        Self {
            epochs,
            base_lr: 2e-3,
            freeze_epochs: 1,
            lr_mult: 100.0,
            pct_start: 0.3,
            div: 5.0,
            options: FitOptions::default(),
        }
    }

    /// Sets the learning rate of the last group in the frozen epochs. The following epochs use half of it. Defaults to
    /// 2e-3.
    pub fn base_lr(mut self, lr: f64) -> Self {
        self.base_lr = lr;
        self
    }

    /// Sets the number of epochs with only the last group trained. Defaults to 1.
    pub fn freeze_epochs(mut self, epochs: usize) -> Self {
        self.freeze_epochs = epochs;
        self
    }

    /// Sets the ratio of the last group's rate to the first one's. Defaults to 100.
    pub fn lr_mult(mut self, factor: f64) -> Self {
        self.lr_mult = factor;
        self
    }

    /// Sets the share of the second cycle in which the rate rises. Defaults to 0.3.
    pub fn pct_start(mut self, share: f64) -> Self {
        self.pct_start = share;
        self
    }

    /// Sets the ratio of the highest rate to the initial rate of the second cycle. Defaults to 5.
    pub fn div_initial(mut self, div: f64) -> Self {
        self.div = div;
        self
    }
}

/// Options that all schedules have.
macro_rules! common {
    ($($schedule:ident),+) => {
        $(impl $schedule {
            /// Sets the weight decay. Defaults to its current value.
            pub fn weight_decay(mut self, weight_decay: f64) -> Self {
                self.options.weight_decay = Some(weight_decay);
                self
            }

            /// Sets whether the fit begins with a new optimizer. Defaults to `false`.
            pub fn reset_optimizer(mut self, reset: bool) -> Self {
                self.options.reset_optimizer = reset;
                self
            }

            /// Sets the number of the first epoch: those before it are left out, and the schedule begins at its
            /// position. Defaults to 0.
            pub fn start_epoch(mut self, epoch: usize) -> Self {
                self.options.start_epoch = epoch;
                self
            }
        })+
    };
}

common!(OneCycleOptions, FlatCosOptions, SgdrOptions);

impl FineTuneOptions {
    /// Sets the weight decay. Defaults to its current value.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.options.weight_decay = Some(weight_decay);
        self
    }
}

impl Learner {
    /// Trains by the one-cycle policy with these maximum rates. [`Learner::fit_cycle`] takes further options.
    ///
    /// # Errors
    /// Returns the same errors as [`Learner::fit`].
    pub fn fit_one_cycle(
        &mut self,
        epochs: usize,
        rates: impl Into<Rates>,
        callbacks: impl IntoCallbacks,
    ) -> Result<()> {
        self.fit_cycle(OneCycleOptions::new(epochs, rates), callbacks)
    }

    /// Trains by the one-cycle policy with options.
    ///
    /// ```no_run
    /// # use brigade_learn::OneCycleOptions;
    /// # fn f(mut learner: brigade_learn::Learner) -> brigade_torch::Result<()> {
    /// learner.fit_cycle(OneCycleOptions::new(5, 1e-5..1e-3).pct_start(0.3).weight_decay(0.1), ())?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Returns the same errors as [`Learner::fit`].
    pub fn fit_cycle(
        &mut self,
        cycle: OneCycleOptions,
        callbacks: impl IntoCallbacks,
    ) -> Result<()> {
        let OneCycleOptions { epochs, rates, div, div_final, pct_start, momenta, options } = cycle;
        let rates = self.rates(rates)?;
        let each = rates
            .iter()
            .map(|rate| Annealing::two_cosines(pct_start, [rate / div, *rate, rate / div_final]))
            .collect::<std::result::Result<_, _>>()?;
        let momentum = Annealing::two_cosines(pct_start, momenta.unwrap_or(self.momenta))?;
        let scheduler = ParamScheduler::each_group(Hyper::Lr, each).and(Hyper::Momentum, momentum);
        self.scheduled(epochs, options, scheduler, callbacks)
    }

    /// Trains at these rates, which fall along a cosine in the last quarter.
    ///
    /// # Errors
    /// Returns the same errors as [`Learner::fit`].
    pub fn fit_flat_cos(
        &mut self,
        epochs: usize,
        rates: impl Into<Rates>,
        callbacks: impl IntoCallbacks,
    ) -> Result<()> {
        self.fit_flat(FlatCosOptions::new(epochs, rates), callbacks)
    }

    /// Trains at constant rates that end with a cosine, with options.
    ///
    /// # Errors
    /// Returns the same errors as [`Learner::fit`].
    pub fn fit_flat(&mut self, flat: FlatCosOptions, callbacks: impl IntoCallbacks) -> Result<()> {
        let FlatCosOptions { epochs, rates, div_final, pct_start, options } = flat;
        let rates = self.rates(rates)?;
        let each = rates
            .iter()
            .map(|rate| Annealing::two_cosines(pct_start, [*rate, *rate, rate / div_final]))
            .collect::<std::result::Result<_, _>>()?;
        self.scheduled(epochs, options, ParamScheduler::each_group(Hyper::Lr, each), callbacks)
    }

    /// Trains by cosine annealing with warm restarts.
    ///
    /// # Errors
    /// Returns the same errors as [`Learner::fit`].
    pub fn fit_sgdr(&mut self, sgdr: SgdrOptions, callbacks: impl IntoCallbacks) -> Result<()> {
        let SgdrOptions { cycles, cycle_len, cycle_mult, rates, options } = sgdr;
        let rates = self.rates(rates)?;
        let too_long = || {
            Error::invalid_argument(format!(
                "fit_sgdr: {} of {}, each {cycle_mult} times as long as the one before, are not a number of \
                 epochs; give each at least 1 and fewer cycles",
                counted(cycles, "cycle"),
                counted(cycle_len, "epoch")
            ))
        };
        let length = |cycle: usize| {
            let factor = cycle_mult.checked_pow(u32::try_from(cycle).ok()?)?;
            cycle_len.checked_mul(factor)
        };
        let lengths: Vec<usize> =
            (0..cycles).map(length).collect::<Option<_>>().ok_or_else(too_long)?;
        let epochs = lengths
            .iter()
            .try_fold(0usize, |sum, length| sum.checked_add(*length))
            .filter(|epochs| *epochs > 0)
            .ok_or_else(too_long)?;
        let of_group = |rate: &f64| {
            let part =
                |length: &usize| (*length as f64 / epochs as f64, Annealing::cosine(*rate, 0.0));
            Annealing::combined(lengths.iter().map(part))
        };
        let each = rates.iter().map(of_group).collect::<std::result::Result<_, _>>()?;
        self.scheduled(epochs, options, ParamScheduler::each_group(Hyper::Lr, each), callbacks)
    }

    /// Trains the last parameter group in one cycle, then all of them in another, the first groups at the smallest
    /// rates. The callbacks are called in both fits.
    ///
    /// # Errors
    /// Returns the same errors as [`Learner::fit`].
    pub fn fine_tune(&mut self, epochs: usize, callbacks: impl IntoCallbacks) -> Result<()> {
        self.fine_tune_with(FineTuneOptions::new(epochs), callbacks)
    }

    /// Fine-tunes the model as [`Learner::fine_tune`] does, with options.
    ///
    /// # Errors
    /// Returns the same errors as [`Learner::fit`].
    pub fn fine_tune_with(
        &mut self,
        tune: FineTuneOptions,
        callbacks: impl IntoCallbacks,
    ) -> Result<()> {
        let FineTuneOptions { epochs, base_lr, freeze_epochs, lr_mult, pct_start, div, options } =
            tune;
        let lasting = self.callbacks.len();
        self.callbacks.extend(callbacks.into_callbacks());
        let outcome = self.freeze().and_then(|()| {
            let head = OneCycleOptions::new(freeze_epochs, ..base_lr).pct_start(0.99);
            self.fit_cycle(OneCycleOptions { options: options.clone(), ..head }, ())?;
            self.unfreeze()?;
            let lr = base_lr / 2.0;
            let all = OneCycleOptions::new(epochs, lr / lr_mult..lr)
                .pct_start(pct_start)
                .div_initial(div);
            self.fit_cycle(OneCycleOptions { options, ..all }, ())
        });
        self.callbacks.truncate(lasting);
        outcome
    }

    fn rates(&self, rates: Option<Rates>) -> Result<Vec<f64>> {
        rates.unwrap_or_else(|| self.default_rates()).of_groups(self.state.grouped.len())
    }

    fn scheduled(
        &mut self,
        epochs: usize,
        options: FitOptions,
        scheduler: ParamScheduler,
        callbacks: impl IntoCallbacks,
    ) -> Result<()> {
        let mut all = callbacks.into_callbacks();
        all.push(Box::new(scheduler));
        self.fit_with(epochs, options, all)
    }
}
