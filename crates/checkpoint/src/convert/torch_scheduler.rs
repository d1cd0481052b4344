//! Conversion of a schedule into the state of PyTorch's scheduler that continues it.
//!
//! A scheduler's `load_state_dict` replaces its numbers by those of the state, so the state contains the whole
//! schedule, under the names of the corresponding class. It contains no functions: a `LambdaLR` keeps the one that its
//! program has given it. Every state also has the entries of a `LambdaLR`, which all schedules of transformers are.

use std::collections::BTreeMap;

use brigade_schedule::{
    Anneal, Curve, Definition, Described, Mode, OneCycle, Plateau, Schedule, Threshold,
};

use super::FileTensor;
use crate::value::Value;

/// State of a PyTorch scheduler, with the optimizer's entries that belong to it.
#[derive(Debug)]
pub(super) struct TorchScheduler {
    pub(super) state: Value<FileTensor>,
    /// Numbers that the scheduler reads from each of the optimizer's parameter groups.
    pub(super) groups: Vec<BTreeMap<&'static str, f64>>,
    /// Names of the classes that can load the state, for messages.
    pub(super) class: String,
    /// Description of the converted step count, for messages.
    pub(super) count: String,
}

/// Step counts of the run that was saved and of the Accelerate run that will load the state.
#[derive(Debug, Clone, Copy)]
pub(super) struct Steps {
    /// Number of optimizer steps of the saved run.
    pub(super) run: u64,
    /// World size of the saved run.
    pub(super) ranks: u64,
    /// Number of steps that Accelerate's scheduler makes at each optimizer step.
    pub(super) stride: u64,
}

/// Converts a schedule's state into that of a PyTorch scheduler.
///
/// # Errors
/// Returns the reason why no PyTorch scheduler can continue the schedule.
pub(super) fn to_torch(
    ours: &Value<FileTensor>,
    optimizer: Option<&Value<FileTensor>>,
    steps: Steps,
) -> Result<TorchScheduler, String> {
    let position = ours.get("position").and_then(Value::as_int);
    let position = position.and_then(|position| u64::try_from(position).ok());
    let position = position.ok_or("its state has no count `position`")?;
    let rates = Rates::of(ours, optimizer);
    let definition = match ours.get("definition") {
        None | Some(Value::None) => None,
        Some(definition) => Some(
            definition
                .to_plain()
                .ok_or("the description of its schedule in its checkpoint cannot be read")?,
        ),
    };
    let watches = !matches!(ours.get("plateau"), None | Some(Value::None));
    if watches || matches!(definition, Some(Definition::Plateau(_))) {
        let plateau = match &definition {
            Some(Definition::Plateau(plateau)) => Some(plateau),
            _ => None,
        };
        return on_plateau(ours, plateau, &rates, steps);
    }

    // The program counts optimizer steps, or as Accelerate does, or something else such as epochs. The last works only
    // if Accelerate steps the scheduler once per call.
    let counts_theirs =
        steps.ranks > 1 && position > 0 && Some(position) == steps.run.checked_mul(steps.ranks);
    let scale = match (counts_theirs, position == steps.run) {
        (true, _) if steps.stride != steps.ranks => return Err(other_processes(position, steps)),
        (true, _) => 1,
        (false, true) => steps.stride,
        (false, false) if steps.stride > 1 => return Err(other_count(position, steps)),
        (false, false) => 1,
    };
    let at = Position { ours: position, scale };
    let last = at.theirs(position)?;
    let count = match (scale, counts_theirs) {
        (1, true) => format!("{last} steps, which the program counted once for each rank"),
        (1, false) => format!("{last} steps"),
        (scale, _) => format!(
            "{last} steps: {position} optimizer steps, and Accelerate steps it once for each of {scale} \
             processes"
        ),
    };
    let mut torch = TorchScheduler {
        state: Value::None,
        groups: vec![BTreeMap::new(); rates.now.len()],
        class: "a scheduler whose state has only the number of steps".into(),
        count,
    };
    let mut entries = place(last, &rates.now);
    match &definition {
        None => {}
        Some(Definition::All(Described::Known(schedule))) => {
            let made = schedule_of(schedule, at, &rates, &mut torch.groups)?;
            torch.class = made.class();
            entries.extend(made.top(&rates));
        }
        Some(Definition::All(Described::Function { momentum: true })) => {
            return Err(
                "its schedule is a function of the program that sets a momentum, which LambdaLR cannot \
                        do"
                    .into(),
            );
        }
        Some(Definition::All(Described::Function { momentum: false })) => {
            torch.class = "LambdaLR".into();
        }
        Some(Definition::Groups(schedules)) => {
            for schedule in schedules {
                let moves = match schedule {
                    Described::Known(schedule) => schedule.momentum(0).is_some(),
                    Described::Function { momentum } => *momentum,
                    _ => true,
                };
                if moves {
                    return Err(
                        "its groups have separate schedules that set a momentum, which LambdaLR cannot \
                                do"
                            .into(),
                    );
                }
            }
            torch.class = "LambdaLR with a function for each group".into();
        }
        Some(_) => return Err("its schedule is not supported by this version of Brigade".into()),
    }
    torch.state = Value::dict(entries);
    Ok(torch)
}

/// Learning rates of the optimizer's parameter groups.
struct Rates {
    /// Current rates.
    now: Vec<f64>,
    /// Initial rate of each group, and of the optimizer. Their ratio is constant.
    built: Vec<(f64, f64)>,
}

impl Rates {
    fn of(scheduler: &Value<FileTensor>, optimizer: Option<&Value<FileTensor>>) -> Self {
        let own = scheduler.get("lr").and_then(Value::as_float);
        let groups = optimizer.and_then(|optimizer| optimizer.get("groups")?.as_items());
        let number =
            |group: &Value<FileTensor>, key: &str| group.get("numbers")?.get(key)?.as_float();
        let base = optimizer.and_then(|optimizer| optimizer.get("initial_lr")?.as_float());
        let Some(groups) = groups else {
            let now: Vec<f64> = own.into_iter().collect();
            return Self { built: vec![(1.0, 1.0); now.len()], now };
        };
        let built = groups.iter().map(|group| {
            let base = base.unwrap_or(1.0);
            (number(group, "initial_lr").unwrap_or(base), base)
        });
        let now = groups.iter().filter_map(|group| number(group, "lr").or(own));
        Self { now: now.collect(), built: built.collect() }
    }

    /// Returns the rate of each group for a rate of the schedule, as the optimizer sets it.
    fn of_groups(&self, rate: f64) -> Vec<f64> {
        let scaled = |&(own, base): &(f64, f64)| {
            if own == base {
                rate
            } else if base == 0.0 {
                own
            } else {
                own * (rate / base)
            }
        };
        self.built.iter().map(scaled).collect()
    }

    fn equal(&self) -> bool {
        self.built.iter().all(|(own, base)| own == base)
    }
}

/// A position in the checkpoint's schedule, and the number of Accelerate's steps per step of the schedule.
#[derive(Debug, Clone, Copy)]
struct Position {
    ours: u64,
    scale: u64,
}

impl Position {
    fn theirs(self, steps: u64) -> Result<i64, String> {
        let scaled = steps.checked_mul(self.scale).and_then(|steps| i64::try_from(steps).ok());
        scaled.ok_or_else(|| format!("its {steps} steps are too many for PyTorch"))
    }

    /// Returns the same position, counted from a later step.
    fn after(self, begin: u64) -> Self {
        Self { ours: self.ours.saturating_sub(begin), ..self }
    }
}

type Entries = Vec<(&'static str, Value<FileTensor>)>;

/// Returns the entries of every scheduler, including those for `LambdaLR` and `CyclicLR`.
fn place(last: i64, rates: &[f64]) -> Entries {
    vec![
        ("last_epoch", Value::Int(last)),
        // A nested scheduler has been stepped once before its first step.
        ("_step_count", Value::Int(last.saturating_add(1).max(1))),
        ("_last_lr", floats(rates)),
        ("lr_lambdas", Value::List(rates.iter().map(|_| Value::None).collect())),
        ("_scale_fn_custom", Value::None),
    ]
}

fn floats(numbers: &[f64]) -> Value<FileTensor> {
    Value::List(numbers.iter().copied().map(Value::Float).collect())
}

/// PyTorch's counterpart of a Brigade schedule.
enum Counterpart {
    /// A single scheduler, with its numbers.
    One {
        class: &'static str,
        numbers: Entries,
        /// Rate from which PyTorch derives the others. `None` if a function of the program sets the rates.
        base: Option<f64>,
        /// `true` if steps after the first also derive from the base rate.
        base_counts: bool,
    },
    /// A `SequentialLR`: its schedulers with their positions, and the milestones between them.
    Sequence { parts: Vec<(Self, i64)>, milestones: Vec<i64> },
}

fn lambda() -> Counterpart {
    Counterpart::One { class: "LambdaLR", numbers: Vec::new(), base: None, base_counts: false }
}

impl Counterpart {
    fn class(&self) -> String {
        match self {
            Self::One { class: "LambdaLR", .. } => "LambdaLR".into(),
            Self::One { class, .. } => format!("{class} or LambdaLR"),
            Self::Sequence { parts, .. } => {
                let parts = parts.iter().map(|(part, _)| match part {
                    Self::One { class, .. } => *class,
                    Self::Sequence { .. } => "SequentialLR",
                });
                let parts: Vec<&str> = parts.collect();
                format!("SequentialLR of {}, or LambdaLR", parts.join(", "))
            }
        }
    }

    /// Returns the entries of the program's outermost scheduler. Base rates are left to the program unless a later step
    /// depends on them: a `LambdaLR` multiplies them.
    fn top(self, rates: &Rates) -> Entries {
        match self {
            Self::One { mut numbers, base, base_counts, .. } => {
                if let (Some(base), true) = (base, base_counts) {
                    numbers.push(("base_lrs", floats(&rates.of_groups(base))));
                }
                numbers
            }
            Self::Sequence { parts, milestones } => {
                let parts = parts.into_iter().map(|(part, last)| part.nested(last, rates));
                let milestones = milestones.into_iter().map(Value::Int);
                vec![
                    ("_schedulers", Value::List(parts.collect())),
                    ("_milestones", Value::List(milestones.collect())),
                ]
            }
        }
    }

    /// Returns the state of a nested scheduler, which has base rates of its own.
    fn nested(self, last: i64, rates: &Rates) -> Value<FileTensor> {
        let base = match &self {
            Self::One { base, .. } => *base,
            Self::Sequence { .. } => None,
        };
        let mut entries = place(last, &rates.now);
        if let Some(base) = base {
            entries.push(("base_lrs", floats(&rates.of_groups(base))));
        }
        let known = |entry: &(&str, _)| entry.0 != "base_lrs";
        entries.extend(self.top(rates).into_iter().filter(known));
        Value::dict(entries)
    }
}

fn one(class: &'static str, base: f64, base_counts: bool, numbers: Entries) -> Counterpart {
    Counterpart::One { class, numbers, base: Some(base), base_counts }
}

fn schedule_of(
    schedule: &Schedule,
    at: Position,
    rates: &Rates,
    groups: &mut [BTreeMap<&'static str, f64>],
) -> Result<Counterpart, String> {
    let mut parts = Vec::new();
    flatten(schedule, 0, &mut parts);
    let first = base_rate(schedule);
    for (group, rate) in groups.iter_mut().zip(rates.of_groups(first)) {
        group.insert("initial_lr", rate);
    }
    if let [(0, Part::Curve(curve))] = parts.as_slice() {
        return curve_of(curve, at, rates, groups);
    }
    let cycles = |part: &&(u64, Part<'_>)| matches!(part.1, Part::Curve(Curve::OneCycle(_)));
    if parts.iter().filter(cycles).count() > 1 {
        return Err(
            "its schedule has several one-cycle schedules one after the other: the groups of \
                    PyTorch's optimizer hold the rates of one"
                .into(),
        );
    }
    let (mut made, mut milestones) = (Vec::new(), Vec::new());
    for (index, (begin, part)) in parts.iter().enumerate() {
        let inside = at.after(*begin);
        let part = match part {
            Part::Curve(curve) => curve_of(curve, inside, rates, groups)?,
            Part::Rise { steps, factor, base } => rise(*factor, 1.0, *steps, *base, at)?,
        };
        let ends = parts.get(index + 1).map(|(next, _)| *next);
        let last = match ends {
            _ if at.ours < *begin => -1,
            Some(next) if at.ours >= next => at.theirs(next - begin)? - 1,
            _ => at.theirs(inside.ours)?,
        };
        made.push((part, last));
        if *begin > 0 {
            milestones.push(at.theirs(*begin)?);
        }
    }
    Ok(Counterpart::Sequence { parts: made, milestones })
}

/// One of the consecutive schedules of a `SequentialLR`, which cannot be nested in PyTorch.
enum Part<'s> {
    Curve(&'s Curve),
    Rise { steps: u64, factor: f64, base: f64 },
}

fn flatten<'s>(schedule: &'s Schedule, begin: u64, parts: &mut Vec<(u64, Part<'s>)>) {
    match schedule.curve() {
        Curve::Warmup { steps, factor, then } => {
            let base = then.lr(0);
            parts.push((begin, Part::Rise { steps: *steps, factor: *factor, base }));
            flatten(then, begin.saturating_add(*steps), parts);
        }
        Curve::Sequence(schedules) => {
            for (index, (own, schedule)) in schedules.iter().enumerate() {
                flatten(schedule, begin.saturating_add(*own), parts);
                // A part that would begin after the next one is never reached.
                if let Some((next, _)) = schedules.get(index + 1) {
                    let next = begin.saturating_add(*next);
                    parts.retain(|(start, _)| *start < next);
                }
            }
        }
        curve => parts.push((begin, Part::Curve(curve))),
    }
}

/// Returns the rate from which PyTorch derives a schedule's others: `initial_lr` of the groups.
fn base_rate(schedule: &Schedule) -> f64 {
    match schedule.curve() {
        Curve::Linear { start, end, .. } => start.max(*end),
        Curve::Warmup { then, .. } => base_rate(then),
        Curve::Sequence(parts) => {
            parts.first().map_or_else(|| schedule.lr(0), |(_, first)| base_rate(first))
        }
        _ => schedule.lr(0),
    }
}

/// Returns the counterpart of a line between two factors.
fn rise(start: f64, end: f64, steps: u64, base: f64, at: Position) -> Result<Counterpart, String> {
    // A LinearLR multiplies the current rate, which stays 0 after a factor of 0.
    if start == 0.0 {
        return Ok(lambda());
    }
    let numbers = vec![
        ("start_factor", Value::Float(start)),
        ("end_factor", Value::Float(end)),
        ("total_iters", Value::Int(at.theirs(steps)?)),
    ];
    Ok(one("LinearLR", base, false, numbers))
}

/// Returns the counterpart of a schedule that is not composed of others.
fn curve_of(
    curve: &Curve,
    at: Position,
    rates: &Rates,
    groups: &mut [BTreeMap<&'static str, f64>],
) -> Result<Counterpart, String> {
    let float = Value::Float;
    Ok(match curve {
        Curve::Constant { lr } => one("ConstantLR", *lr, false, vec![("factor", float(1.0))]),
        Curve::Linear { start, end, steps } => match start.max(*end) {
            0.0 => rise(1.0, 1.0, *steps, 0.0, at)?,
            base => rise(start / base, end / base, *steps, base, at)?,
        },
        // PyTorch has one minimum rate for all groups: only a function can keep the groups in proportion.
        Curve::Cosine { end, .. } | Curve::Restarts { end, .. } if *end > 0.0 && !rates.equal() => {
            lambda()
        }
        Curve::Cosine { start, end, steps } => {
            let steps = Value::Int(at.theirs(*steps)?);
            one("CosineAnnealingLR", *start, true, vec![("T_max", steps), ("eta_min", float(*end))])
        }
        Curve::Restarts { start, end, first, factor } => {
            let (inside, period) = curve.period(at.ours).unwrap_or((0, *first));
            let mult =
                i64::try_from(*factor).map_err(|_| format!("its periods grow by {factor}"))?;
            let numbers = vec![
                ("T_0", Value::Int(at.theirs(*first)?)),
                ("T_i", Value::Int(at.theirs(period)?)),
                ("T_cur", Value::Int(at.theirs(inside)?)),
                ("T_mult", Value::Int(mult)),
                ("eta_min", float(*end)),
            ];
            one("CosineAnnealingWarmRestarts", *start, true, numbers)
        }
        Curve::Polynomial { start, end: 0.0, steps, power } => {
            let steps = Value::Int(at.theirs(*steps)?);
            one(
                "PolynomialLR",
                *start,
                false,
                vec![("total_iters", steps), ("power", float(*power))],
            )
        }
        Curve::Exponential { lr, gamma } => {
            let gamma = gamma.powf(1.0 / at.scale as f64);
            one("ExponentialLR", *lr, false, vec![("gamma", float(gamma))])
        }
        Curve::Step { lr, every, gamma } => {
            let every = Value::Int(at.theirs(*every)?);
            one("StepLR", *lr, false, vec![("step_size", every), ("gamma", float(*gamma))])
        }
        // The milestones are a `collections.Counter`, which the program has created.
        Curve::MultiStep { lr, gamma, .. } => {
            one("MultiStepLR", *lr, false, vec![("gamma", float(*gamma))])
        }
        Curve::Polynomial { .. } | Curve::FlatCosine { .. } | Curve::InverseSqrt { .. } => lambda(),
        Curve::OneCycle(cycle) => one_cycle(cycle, at, rates, groups)?,
        Curve::FitOneCycle(_) => {
            return Err(
                "its schedule is fit_one_cycle, fastai's: OneCycleLR has the highest rate at \
                        another step, and LambdaLR cannot set its momentum"
                    .into(),
            );
        }
        Curve::Momentum { .. } => {
            return Err(
                "its schedule sets a momentum by with_momentum; in PyTorch only OneCycleLR and CyclicLR \
                        set one, with other curves"
                    .into(),
            );
        }
        _ => return Err("its schedule is not supported by this version of Brigade".into()),
    })
}

fn one_cycle(
    cycle: &OneCycle,
    at: Position,
    rates: &Rates,
    groups: &mut [BTreeMap<&'static str, f64>],
) -> Result<Counterpart, String> {
    let first = cycle.max_lr / cycle.div_factor;
    let of_groups = [
        ("initial_lr", first),
        ("max_lr", cycle.max_lr),
        ("min_lr", first / cycle.final_div_factor),
    ];
    for (key, rate) in of_groups {
        for (group, rate) in groups.iter_mut().zip(rates.of_groups(rate)) {
            group.insert(key, rate);
        }
    }
    for group in groups {
        group.insert("max_momentum", cycle.max_momentum);
        group.insert("base_momentum", cycle.base_momentum);
    }
    let total = cycle.total_steps as f64;
    let phase = |end: f64, [start_lr, end_lr]: [&str; 2], [start, last]: [&str; 2]| {
        Value::dict([
            ("end_step", Value::Float(end * at.scale as f64)),
            ("start_lr", Value::Str(start_lr.into())),
            ("end_lr", Value::Str(end_lr.into())),
            ("start_momentum", Value::Str(start.into())),
            ("end_momentum", Value::Str(last.into())),
        ])
    };
    let (low, high) = ("base_momentum", "max_momentum");
    let mut phases =
        vec![phase(cycle.pct_start * total - 1.0, ["initial_lr", "max_lr"], [high, low])];
    if cycle.three_phase {
        let end = 2.0 * cycle.pct_start * total - 2.0;
        phases.push(phase(end, ["max_lr", "initial_lr"], [low, high]));
        phases.push(phase(total - 1.0, ["initial_lr", "min_lr"], [high, high]));
    } else {
        phases.push(phase(total - 1.0, ["max_lr", "min_lr"], [low, high]));
    }
    let anneal = match cycle.anneal {
        Anneal::Cosine => "cos",
        Anneal::Linear => "linear",
    };
    let numbers = vec![
        ("total_steps", Value::Int(at.theirs(cycle.total_steps)?)),
        ("_schedule_phases", Value::List(phases)),
        ("_anneal_func_type", Value::Str(anneal.into())),
        ("cycle_momentum", Value::Bool(true)),
    ];
    // The rates are stored in the groups.
    Ok(Counterpart::One { class: "OneCycleLR", numbers, base: Some(first), base_counts: false })
}

/// Returns the reason why a schedule of a program with `step_per_process(true)` cannot continue with another number of
/// processes: its length is in steps of the old number of ranks.
fn other_processes(position: u64, Steps { run, ranks, stride }: Steps) -> String {
    format!(
        "its count of {position} is that of {ranks} ranks at each of {run} optimizer steps \
         (step_per_process), and Accelerate would step it {stride} at a time. Leave out --num-processes and \
         --split-batches, and go on with {ranks} processes"
    )
}

/// Returns the reason why a schedule that is not stepped with the optimizer, such as one of epochs, cannot continue.
fn other_count(position: u64, Steps { run, stride, .. }: Steps) -> String {
    format!(
        "its count of {position} is not that of the {run} optimizer steps, and Accelerate steps a scheduler \
         once for each of {stride} processes at every call, so that it would run ahead. {SPLIT_BATCHES}"
    )
}

/// Returns the state of a `ReduceLROnPlateau`. Checkpoints of older versions lack the plateau's numbers, and the
/// program's own stay.
fn on_plateau(
    ours: &Value<FileTensor>,
    plateau: Option<&Plateau>,
    rates: &Rates,
    steps: Steps,
) -> Result<TorchScheduler, String> {
    if steps.stride > 1 {
        return Err(format!(
            "it follows a metric, and Accelerate steps a ReduceLROnPlateau once for each of {} processes \
             at every metric, so that its patience ends early. {SPLIT_BATCHES}",
            steps.stride
        ));
    }
    let state = ours.get("plateau").ok_or("it follows a metric and has no state of it")?;
    let count = |key: &str| {
        let count = state.get(key).and_then(Value::as_int);
        count.map(Value::Int).ok_or_else(|| format!("its state has no count `{key}`"))
    };
    let mut entries = vec![
        ("last_epoch", count("seen")?),
        ("_last_lr", floats(&rates.now)),
        ("num_bad_epochs", count("bad")?),
        ("cooldown_counter", count("cooling")?),
    ];
    let mut best = state.get("best").and_then(Value::as_float);
    if let Some(plateau) = plateau {
        let (mode, worst) = match plateau.mode {
            Mode::Min => ("min", f64::INFINITY),
            Mode::Max => ("max", f64::NEG_INFINITY),
        };
        best = best.or(Some(worst));
        let (threshold_mode, threshold) = match plateau.threshold {
            Threshold::Relative(part) => ("rel", part),
            Threshold::Absolute(by) => ("abs", by),
        };
        let signed = |count: u64| Value::Int(i64::try_from(count).unwrap_or(i64::MAX));
        entries.extend([
            ("factor", Value::Float(plateau.factor)),
            ("patience", signed(plateau.patience)),
            ("cooldown", signed(plateau.cooldown)),
            ("min_lrs", floats(&rates.of_groups(plateau.min_lr))),
            ("eps", Value::Float(plateau.eps)),
            ("mode", Value::Str(mode.into())),
            ("mode_worse", Value::Float(worst)),
            ("threshold", Value::Float(threshold)),
            ("threshold_mode", Value::Str(threshold_mode.into())),
        ]);
    }
    entries.extend(best.map(|best| ("best", Value::Float(best))));
    Ok(TorchScheduler {
        state: Value::dict(entries),
        groups: vec![BTreeMap::new(); rates.now.len()],
        class: "ReduceLROnPlateau".into(),
        count: "the metrics seen".into(),
    })
}

const SPLIT_BATCHES: &str = "Give --split-batches where the program has split_batches=True or \
                             step_scheduler_with_optimizer=False";
