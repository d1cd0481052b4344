//! Schedules by name with their options: those of the library's table, and those with options other than numbers.

use anyhow::Result;
use brigade_schedule::{
    Anneal, Arguments, FitOneCycle, Mode, NamedSchedule, OneCycle, Parameter, ParameterKind,
    Plateau, Schedule, Threshold,
};
use clap::{
    Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, Subcommand, ValueEnum, value_parser,
};

use super::{Part, ScheduleModifiers};

/// Schedule with its options.
#[derive(Debug, Clone)]
pub(super) enum Named {
    /// Row of the library's table, with its options.
    Row(&'static NamedSchedule, ArgMatches),
    Other(Other),
}

/// Schedule whose options are not only numbers.
#[derive(Debug, Clone, Subcommand)]
#[command(rename_all = "kebab-case")]
pub(super) enum Other {
    /// Rises to a maximum, then falls to nearly 0 (torch's shape)
    ///
    /// The momentum moves in the opposite direction
    #[command(alias = "OneCycleLR")]
    OneCycle(OneCycleArgs),
    /// Rises to a maximum, then falls (fastai's shape)
    FitOneCycle(FitOneCycleArgs),
    /// Several schedules, one after the other
    #[command(alias = "SequentialLR")]
    Sequence(Sequence),
    /// Reduces the rate when a metric stops improving
    #[command(alias = "ReduceLROnPlateau")]
    OnPlateau(OnPlateau),
}

impl Subcommand for Named {
    fn augment_subcommands(command: Command) -> Command {
        Other::augment_subcommands(command.subcommands(NamedSchedule::all().iter().map(row)))
    }

    fn augment_subcommands_for_update(command: Command) -> Command {
        Self::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        row_of(name).is_some() || Other::has_subcommand(name)
    }
}

impl FromArgMatches for Named {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let found = matches.subcommand().and_then(|(name, given)| Some((row_of(name)?, given)));
        match found {
            Some((row, given)) => Ok(Self::Row(row, given.clone())),
            None => Other::from_arg_matches(matches).map(Self::Other),
        }
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

fn row_of(name: &str) -> Option<&'static NamedSchedule> {
    NamedSchedule::all().iter().find(|row| row.name == name)
}

/// Builds the command of a row, with an option for each parameter.
fn row(row: &'static NamedSchedule) -> Command {
    let total = Arg::new(STEPS).long(STEPS).value_name("N").help("Number of optimizer steps");
    Command::new(row.name)
        .aliases(row.aliases)
        .about(row.about)
        .args(row.parameters.iter().map(option))
        .arg(total.required(true).value_parser(steps))
}

fn option(parameter: &'static Parameter) -> Arg {
    let option = Arg::new(parameter.name)
        .long(parameter.name)
        .value_name(parameter.placeholder)
        .help(parameter.about)
        .required(parameter.is_required)
        .default_value(parameter.default);
    match parameter.kind {
        ParameterKind::Number => {
            option.allow_negative_numbers(true).value_parser(value_parser!(f64))
        }
        ParameterKind::Steps => option.value_parser(steps),
        ParameterKind::Factor => option.value_parser(value_parser!(u64)),
        ParameterKind::StepList => {
            option.action(ArgAction::Append).value_delimiter(',').value_parser(value_parser!(u64))
        }
    }
}

const STEPS: &str = "steps";

/// Options of a row, with the warm-up before it.
struct Given<'m>(&'m ArgMatches, Option<u64>);

impl Arguments for Given<'_> {
    fn total_steps(&self) -> u64 {
        self.whole(STEPS).unwrap_or_default()
    }

    fn warmup(&self) -> Option<u64> {
        self.1
    }

    fn number(&self, name: &str) -> Option<f64> {
        self.0.get_one(name).copied()
    }

    fn whole(&self, name: &str) -> Option<u64> {
        self.0.get_one(name).copied()
    }

    fn steps(&self, name: &str) -> Vec<u64> {
        self.0.get_many(name).unwrap_or_default().copied().collect()
    }
}

/// Schedule that was built from a name and its options.
#[derive(Debug)]
pub(super) enum BuiltSchedule {
    Steps { schedule: Schedule, steps: u64 },
    Metrics { plateau: Plateau, metrics: Vec<f64> },
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
    /// Fall to the first rate in as many steps as the rise, then further
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
    /// Metrics, one per evaluation
    #[arg(long, value_name = "X,X,..", value_delimiter = ',', required = true)]
    #[arg(allow_negative_numbers = true)]
    metrics: Vec<f64>,
    /// A higher metric is better, such as an accuracy
    #[arg(long)]
    higher: bool,
    /// Factor by which the rate is multiplied
    #[arg(long, default_value_t = 0.1, allow_negative_numbers = true)]
    factor: f64,
    /// Tolerated number of metrics without improvement
    #[arg(long, value_name = "N", default_value_t = 10)]
    patience: u64,
    /// Minimum improvement, as a fraction of the best
    #[arg(long, value_name = "PART", default_value_t = 1e-4, allow_negative_numbers = true)]
    threshold: f64,
    /// The threshold is an absolute difference, not a fraction
    #[arg(long)]
    absolute: bool,
    /// Number of metrics that are ignored after a reduction
    #[arg(long, value_name = "N", default_value_t = 0)]
    cooldown: u64,
    /// The lowest rate
    #[arg(long, value_name = "LR", default_value_t = 0.0, allow_negative_numbers = true)]
    min_lr: f64,
    /// Minimum reduction: a smaller one is not made
    #[arg(long, default_value_t = 1e-8, allow_negative_numbers = true)]
    eps: f64,
}

impl Named {
    /// Builds the schedule with its modifiers.
    pub(super) fn make(&self, modifiers: &ScheduleModifiers) -> Result<BuiltSchedule> {
        let (schedule, steps) = match self {
            Self::Row(row, given) => {
                let given = Given(given, modifiers.warmup);
                (row.make(&given)?, given.total_steps())
            }
            Self::Other(Other::OneCycle(it)) => (Schedule::one_cycle(it.cycle())?, it.steps),
            Self::Other(Other::FitOneCycle(it)) => (Schedule::fit_one_cycle(it.cycle())?, it.steps),
            Self::Other(Other::Sequence(it)) => it.make()?,
            Self::Other(Other::OnPlateau(it)) => return it.make(modifiers),
        };
        modifiers.put(schedule, steps)
    }

    /// Returns the name on the command line.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Row(row, _) => row.name,
            Self::Other(Other::OneCycle(_)) => "one-cycle",
            Self::Other(Other::FitOneCycle(_)) => "fit-one-cycle",
            Self::Other(Other::Sequence(_)) => "sequence",
            Self::Other(Other::OnPlateau(_)) => "on-plateau",
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
        // clap accepts three values or none.
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

/// Parses a number of steps. It is limited: every step is computed, so a mistyped number would only take time.
pub(super) fn steps(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(0) => Err("it must be at least 1".to_owned()),
        Ok(steps) if steps <= MAX_STEPS => Ok(steps),
        Ok(_) => Err(format!("it must be at most {MAX_STEPS}")),
        Err(_) => Err(format!("it must be a whole number from 1 to {MAX_STEPS}")),
    }
}

const MAX_STEPS: u64 = 1 << 24;
