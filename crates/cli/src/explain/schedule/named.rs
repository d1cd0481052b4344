//! The schedules by name, with their options. Names and defaults are the library's.

use anyhow::Result;
use brigade_schedule::{Anneal, FitOneCycle, Mode, OneCycle, Plateau, Schedule, Threshold};
use clap::{Args, Subcommand, ValueEnum};

use super::{Part, ScheduleModifiers};

/// One schedule.
#[derive(Debug, Clone, Subcommand)]
#[command(rename_all = "kebab-case")]
pub(super) enum Named {
    /// The same rate in every step
    #[command(alias = "ConstantLR")]
    Constant(Constant),
    /// In a straight line from one rate to another
    #[command(alias = "LinearLR")]
    Linear(Linear),
    /// Down by half a cosine
    #[command(alias = "CosineAnnealingLR")]
    Cosine(Down),
    /// Down by half a cosine, over and over
    #[command(alias = "CosineAnnealingWarmRestarts", alias = "sgdr")]
    CosineRestarts(Restarts),
    /// Up to a highest rate and down to nearly nothing (torch's)
    ///
    /// The momentum goes the other way round
    #[command(alias = "OneCycleLR")]
    OneCycle(OneCycleArgs),
    /// The same in fastai's shape
    FitOneCycle(FitOneCycleArgs),
    /// The same rate, then down by half a cosine (fastai's fit_flat_cos)
    #[command(alias = "flat-cos", alias = "fit-flat-cos")]
    FlatCosine(FlatCosine),
    /// Down by a power of the steps that are left
    #[command(alias = "PolynomialLR")]
    Polynomial(Polynomial),
    /// Multiplied by the same factor in every step
    #[command(alias = "ExponentialLR")]
    Exponential(Exponential),
    /// Multiplied by a factor every so many steps
    #[command(alias = "StepLR")]
    Step(Step),
    /// Multiplied by a factor at chosen steps
    #[command(alias = "MultiStepLR")]
    MultiStep(MultiStep),
    /// Down with the square root of the steps
    InverseSqrt(InverseSqrt),
    /// One schedule after the other
    #[command(alias = "SequentialLR")]
    Sequence(Sequence),
    /// Down when a metric stops getting better
    #[command(alias = "ReduceLROnPlateau")]
    OnPlateau(OnPlateau),
}

/// What a name and its options make.
#[derive(Debug)]
pub(super) enum BuiltSchedule {
    Steps { schedule: Schedule, steps: u64 },
    Metrics { plateau: Plateau, metrics: Vec<f64> },
}

#[derive(Debug, Clone, Args)]
pub(super) struct Constant {
    /// The rate
    #[arg(long, allow_negative_numbers = true)]
    lr: f64,
    /// Number of optimizer steps
    #[arg(long, value_name = "N", value_parser = steps)]
    steps: u64,
}

#[derive(Debug, Clone, Args)]
pub(super) struct Linear {
    /// The first rate
    #[arg(long, value_name = "LR", allow_negative_numbers = true)]
    start_lr: f64,
    /// The rate after the last step
    #[arg(long, value_name = "LR", allow_negative_numbers = true)]
    end_lr: f64,
    /// Number of optimizer steps
    #[arg(long, value_name = "N", value_parser = steps)]
    steps: u64,
}

#[derive(Debug, Clone, Args)]
pub(super) struct Down {
    /// The first rate
    #[arg(long, allow_negative_numbers = true)]
    lr: f64,
    /// The rate after the last step
    #[arg(long, value_name = "LR", default_value_t = 0.0, allow_negative_numbers = true)]
    end_lr: f64,
    /// Number of optimizer steps
    #[arg(long, value_name = "N", value_parser = steps)]
    steps: u64,
}

#[derive(Debug, Clone, Args)]
pub(super) struct Restarts {
    /// The first rate of each period
    #[arg(long, allow_negative_numbers = true)]
    lr: f64,
    /// The rate that each period goes down to
    #[arg(long, value_name = "LR", default_value_t = 0.0, allow_negative_numbers = true)]
    end_lr: f64,
    /// Steps of the first period
    #[arg(long, value_name = "N", value_parser = steps)]
    first: u64,
    /// Each period is as many times as long as the one before
    #[arg(long, value_name = "N", default_value_t = 1)]
    factor: u64,
    /// Number of optimizer steps
    #[arg(long, value_name = "N", value_parser = steps)]
    steps: u64,
}

#[derive(Debug, Clone, Args)]
pub(super) struct OneCycleArgs {
    /// The highest rate
    #[arg(long, value_name = "LR", allow_negative_numbers = true)]
    max_lr: f64,
    /// Number of optimizer steps
    #[arg(long, value_name = "N", value_parser = steps)]
    steps: u64,
    /// The part of the steps in which the rate rises
    #[arg(long, value_name = "PART", default_value_t = 0.3, allow_negative_numbers = true)]
    pct_start: f64,
    /// Highest rate divided by the first
    #[arg(long, value_name = "BY", default_value_t = 25.0, allow_negative_numbers = true)]
    div_factor: f64,
    /// First rate divided by the last
    #[arg(long, value_name = "BY", default_value_t = 1e4, allow_negative_numbers = true)]
    final_div_factor: f64,
    /// The momentum at the highest rate
    #[arg(long, value_name = "MOMENTUM", default_value_t = 0.85, allow_negative_numbers = true)]
    base_momentum: f64,
    /// The momentum at the first and the last rate
    #[arg(long, value_name = "MOMENTUM", default_value_t = 0.95, allow_negative_numbers = true)]
    max_momentum: f64,
    /// Shape
    #[arg(long, value_enum, default_value_t)]
    anneal: AnnealArg,
    /// Go down to the first rate in as many steps as up, then on
    #[arg(long)]
    three_phase: bool,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum AnnealArg {
    /// Half a cosine
    #[default]
    Cosine,
    /// A straight line
    Linear,
}

#[derive(Debug, Clone, Args)]
pub(super) struct FitOneCycleArgs {
    /// The highest rate
    #[arg(long, value_name = "LR", allow_negative_numbers = true)]
    max_lr: f64,
    /// Number of optimizer steps
    #[arg(long, value_name = "N", value_parser = steps)]
    steps: u64,
    /// The part of the steps in which the rate rises
    #[arg(long, value_name = "PART", default_value_t = 0.25, allow_negative_numbers = true)]
    pct_start: f64,
    /// Highest rate divided by the first
    #[arg(long, value_name = "BY", default_value_t = 25.0, allow_negative_numbers = true)]
    div: f64,
    /// Highest rate divided by the last
    #[arg(long, value_name = "BY", default_value_t = 1e5, allow_negative_numbers = true)]
    div_final: f64,
    /// Momentum at these three rates
    #[arg(long, value_names = ["FIRST", "HIGHEST", "LAST"], num_args = 3)]
    #[arg(default_values_t = [0.95, 0.85, 0.95], allow_negative_numbers = true)]
    moms: Vec<f64>,
}

#[derive(Debug, Clone, Args)]
pub(super) struct FlatCosine {
    /// The first rate
    #[arg(long, allow_negative_numbers = true)]
    lr: f64,
    /// The rate after the last step [default: a hundred-thousandth of --lr]
    #[arg(long, value_name = "LR", allow_negative_numbers = true)]
    end_lr: Option<f64>,
    /// The part of the steps with the first rate
    #[arg(long, value_name = "PART", default_value_t = 0.75, allow_negative_numbers = true)]
    pct_start: f64,
    /// Number of optimizer steps
    #[arg(long, value_name = "N", value_parser = steps)]
    steps: u64,
}

#[derive(Debug, Clone, Args)]
pub(super) struct Polynomial {
    /// The first rate
    #[arg(long, allow_negative_numbers = true)]
    lr: f64,
    /// The rate after the last step
    #[arg(long, value_name = "LR", default_value_t = 0.0, allow_negative_numbers = true)]
    end_lr: f64,
    /// The power
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    power: f64,
    /// Number of optimizer steps
    #[arg(long, value_name = "N", value_parser = steps)]
    steps: u64,
}

#[derive(Debug, Clone, Args)]
pub(super) struct Exponential {
    /// The first rate
    #[arg(long, allow_negative_numbers = true)]
    lr: f64,
    /// What the rate is multiplied by
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true)]
    gamma: f64,
    /// Number of optimizer steps
    #[arg(long, value_name = "N", value_parser = steps)]
    steps: u64,
}

#[derive(Debug, Clone, Args)]
pub(super) struct Step {
    /// The first rate
    #[arg(long, allow_negative_numbers = true)]
    lr: f64,
    /// Steps between changes
    #[arg(long, value_name = "N", value_parser = steps)]
    every: u64,
    /// What the rate is multiplied by
    #[arg(long, value_name = "FACTOR", default_value_t = 0.1, allow_negative_numbers = true)]
    gamma: f64,
    /// Number of optimizer steps
    #[arg(long, value_name = "N", value_parser = steps)]
    steps: u64,
}

#[derive(Debug, Clone, Args)]
pub(super) struct MultiStep {
    /// The first rate
    #[arg(long, allow_negative_numbers = true)]
    lr: f64,
    /// The steps at which the rate changes
    #[arg(long, value_name = "N,N,..", value_delimiter = ',', required = true)]
    milestones: Vec<u64>,
    /// What the rate is multiplied by
    #[arg(long, value_name = "FACTOR", default_value_t = 0.1, allow_negative_numbers = true)]
    gamma: f64,
    /// Number of optimizer steps
    #[arg(long, value_name = "N", value_parser = steps)]
    steps: u64,
}

#[derive(Debug, Clone, Args)]
pub(super) struct InverseSqrt {
    /// The first rate
    #[arg(long, allow_negative_numbers = true)]
    lr: f64,
    /// Timescale in steps [default: the warm-up's, or 10000]
    ///
    /// After three times as many steps the rate is half
    #[arg(long, value_name = "N", value_parser = steps)]
    timescale: Option<u64>,
    /// Number of optimizer steps
    #[arg(long, value_name = "N", value_parser = steps)]
    steps: u64,
}

#[derive(Debug, Clone, Args)]
pub(super) struct Sequence {
    /// A schedule with its options, in quotes; again for the next one
    #[arg(long, value_name = "SCHEDULE", required = true, value_parser = super::part)]
    part: Vec<Part>,
}

#[derive(Debug, Clone, Args)]
pub(super) struct OnPlateau {
    /// The first rate
    #[arg(long, allow_negative_numbers = true)]
    lr: f64,
    /// The metrics, one after each evaluation
    #[arg(long, value_name = "X,X,..", value_delimiter = ',', required = true)]
    #[arg(allow_negative_numbers = true)]
    metrics: Vec<f64>,
    /// The higher metric is better: an accuracy
    #[arg(long)]
    higher: bool,
    /// What the rate is multiplied by
    #[arg(long, default_value_t = 0.1, allow_negative_numbers = true)]
    factor: f64,
    /// Metrics in a row that may be no better
    #[arg(long, value_name = "N", default_value_t = 10)]
    patience: u64,
    /// Part of the best by which a metric must be better
    #[arg(long, value_name = "PART", default_value_t = 1e-4, allow_negative_numbers = true)]
    threshold: f64,
    /// The threshold is a difference, not a part
    #[arg(long)]
    absolute: bool,
    /// Metrics that are not counted after a reduction
    #[arg(long, value_name = "N", default_value_t = 0)]
    cooldown: u64,
    /// The lowest rate
    #[arg(long, value_name = "LR", default_value_t = 0.0, allow_negative_numbers = true)]
    min_lr: f64,
    /// Leave out a reduction by no more than this
    #[arg(long, default_value_t = 1e-8, allow_negative_numbers = true)]
    eps: f64,
}

impl Named {
    /// What was asked for, with what is around it.
    pub(super) fn make(&self, modifiers: &ScheduleModifiers) -> Result<BuiltSchedule> {
        let (schedule, steps) = match self {
            Self::Constant(it) => (Schedule::constant(it.lr)?, it.steps),
            Self::Linear(it) => (Schedule::linear(it.start_lr, it.end_lr, it.steps)?, it.steps),
            Self::Cosine(it) => (Schedule::cosine(it.lr, it.end_lr, it.steps)?, it.steps),
            Self::CosineRestarts(it) => {
                (Schedule::cosine_restarts(it.lr, it.end_lr, it.first, it.factor)?, it.steps)
            }
            Self::OneCycle(it) => (Schedule::one_cycle(it.cycle())?, it.steps),
            Self::FitOneCycle(it) => (Schedule::fit_one_cycle(it.cycle())?, it.steps),
            Self::FlatCosine(it) => {
                let end = it.end_lr.unwrap_or(it.lr / 1e5);
                (Schedule::flat_cosine(it.lr, end, it.steps, it.pct_start)?, it.steps)
            }
            Self::Polynomial(it) => {
                (Schedule::polynomial(it.lr, it.end_lr, it.steps, it.power)?, it.steps)
            }
            Self::Exponential(it) => (Schedule::exponential(it.lr, it.gamma)?, it.steps),
            Self::Step(it) => (Schedule::step(it.lr, it.every, it.gamma)?, it.steps),
            Self::MultiStep(it) => {
                (Schedule::multi_step(it.lr, &it.milestones, it.gamma)?, it.steps)
            }
            Self::InverseSqrt(it) => {
                let timescale = it.timescale.or(modifiers.warmup).unwrap_or(10_000);
                (Schedule::inverse_sqrt(it.lr, timescale)?, it.steps)
            }
            Self::Sequence(it) => it.make()?,
            Self::OnPlateau(it) => return it.make(modifiers),
        };
        modifiers.put(schedule, steps)
    }

    /// The name that the command line has for it.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Constant(_) => "constant",
            Self::Linear(_) => "linear",
            Self::Cosine(_) => "cosine",
            Self::CosineRestarts(_) => "cosine-restarts",
            Self::OneCycle(_) => "one-cycle",
            Self::FitOneCycle(_) => "fit-one-cycle",
            Self::FlatCosine(_) => "flat-cosine",
            Self::Polynomial(_) => "polynomial",
            Self::Exponential(_) => "exponential",
            Self::Step(_) => "step",
            Self::MultiStep(_) => "multi-step",
            Self::InverseSqrt(_) => "inverse-sqrt",
            Self::Sequence(_) => "sequence",
            Self::OnPlateau(_) => "on-plateau",
        }
    }
}

impl ScheduleModifiers {
    fn put(&self, schedule: Schedule, steps: u64) -> Result<BuiltSchedule> {
        let schedule = match &self.momentum {
            Some(part) => schedule.with_momentum(part.schedule()?.0),
            None => schedule,
        };
        Ok(match self.warmup {
            Some(warmup) => BuiltSchedule::Steps {
                schedule: schedule.warmup(warmup, self.warmup_factor)?,
                steps: warmup + steps,
            },
            None => BuiltSchedule::Steps { schedule, steps },
        })
    }
}

impl Part {
    fn schedule(&self) -> Result<(Schedule, u64)> {
        match self.named.make(&self.modifiers)? {
            BuiltSchedule::Steps { schedule, steps } => Ok((schedule, steps)),
            BuiltSchedule::Metrics { .. } => anyhow::bail!(
                "on-plateau follows a metric, not the step, so it cannot be a part of a schedule"
            ),
        }
    }
}

impl OneCycleArgs {
    fn cycle(&self) -> OneCycle {
        OneCycle {
            max_lr: self.max_lr,
            total_steps: self.steps,
            pct_start: self.pct_start,
            div_factor: self.div_factor,
            final_div_factor: self.final_div_factor,
            base_momentum: self.base_momentum,
            max_momentum: self.max_momentum,
            anneal: match self.anneal {
                AnnealArg::Cosine => Anneal::Cosine,
                AnnealArg::Linear => Anneal::Linear,
            },
            three_phase: self.three_phase,
        }
    }
}

impl FitOneCycleArgs {
    fn cycle(&self) -> FitOneCycle {
        let mut moms = [0.0; 3];
        // clap takes three of them or none.
        moms.iter_mut().zip(&self.moms).for_each(|(place, momentum)| *place = *momentum);
        FitOneCycle {
            max_lr: self.max_lr,
            total_steps: self.steps,
            pct_start: self.pct_start,
            div: self.div,
            div_final: self.div_final,
            moms,
        }
    }
}

impl Sequence {
    fn make(&self) -> Result<(Schedule, u64)> {
        let mut schedules = Vec::with_capacity(self.part.len());
        let mut begins = Vec::with_capacity(self.part.len());
        let mut begin = 0;
        for part in &self.part {
            let (schedule, steps) = part.schedule()?;
            schedules.push(schedule);
            begins.push(begin);
            begin += steps;
        }
        Ok((Schedule::sequence(schedules, &begins[1..])?, begin))
    }
}

impl OnPlateau {
    fn make(&self, modifiers: &ScheduleModifiers) -> Result<BuiltSchedule> {
        if modifiers.warmup.is_some() || modifiers.momentum.is_some() {
            anyhow::bail!(
                "on-plateau follows a metric, not the step, so it takes no --warmup and no --momentum"
            );
        }
        let plateau = Plateau {
            lr: self.lr,
            mode: if self.higher { Mode::Max } else { Mode::Min },
            factor: self.factor,
            patience: self.patience,
            threshold: if self.absolute {
                Threshold::Absolute(self.threshold)
            } else {
                Threshold::Relative(self.threshold)
            },
            cooldown: self.cooldown,
            min_lr: self.min_lr,
            eps: self.eps,
        };
        plateau.check()?;
        Ok(BuiltSchedule::Metrics { plateau, metrics: self.metrics.clone() })
    }
}

/// A number of steps: every one of them is looked at, so a mistyped one would only take time.
pub(super) fn steps(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(0) => Err("it must be at least 1".to_owned()),
        Ok(steps) if steps <= MAX_STEPS => Ok(steps),
        Ok(_) => Err(format!("it must be at most {MAX_STEPS}")),
        Err(_) => Err(format!("it must be a whole number from 1 to {MAX_STEPS}")),
    }
}

const MAX_STEPS: u64 = 1 << 24;
