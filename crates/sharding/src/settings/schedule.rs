//! Learning rate schedules of DeepSpeed's configuration, with the arithmetic of DeepSpeed 0.19.

use std::f64::consts::PI;

use super::SettingsError;
use super::reader::Reader;

/// Learning rate schedule of a DeepSpeed configuration.
#[derive(Debug, Clone, PartialEq)]
pub enum ScheduleSettings {
    /// `WarmupLR`: warms up to a learning rate, which is kept afterwards.
    Warmup {
        /// Initial learning rate.
        min_lr: f64,
        /// Learning rate after the warm-up. `None` for that of the optimizer.
        max_lr: Option<f64>,
        /// Length and shape of the warm-up.
        warmup: Warmup,
    },
    /// `WarmupDecayLR`: warms up to a learning rate, then decays linearly to the initial one.
    WarmupDecay {
        /// Initial learning rate.
        min_lr: f64,
        /// Maximum learning rate.
        max_lr: f64,
        /// Length and shape of the warm-up.
        warmup: Warmup,
        /// Number of steps after which the decay has ended.
        total_steps: u64,
    },
    /// `WarmupCosineLR`: warms up to the optimizer's learning rate, then decays along a cosine.
    WarmupCosine {
        /// Learning rate at the start of the warm-up, as a fraction of the optimizer's.
        min_ratio: f64,
        /// Final learning rate, as a fraction of the optimizer's.
        cos_min_ratio: f64,
        /// Length and shape of the warm-up.
        warmup: Warmup,
        /// Number of steps after which the final learning rate is reached.
        total_steps: u64,
    },
    /// `LRRangeTest`: increases the learning rate without a limit.
    RangeTest {
        /// Initial learning rate.
        min_lr: f64,
        /// Number of steps in which the learning rate increases by `step_rate * min_lr`.
        step_size: u64,
        /// Increase of the learning rate in `step_size` steps, as a multiple of `min_lr`.
        step_rate: f64,
        /// `true` if the learning rate grows only after each `step_size` steps.
        staircase: bool,
    },
    /// `OneCycle`: raises the learning rate and lowers it again, then decays it slowly towards 0.
    OneCycle {
        /// Learning rate at the start and at the end of the cycle.
        min_lr: f64,
        /// Maximum learning rate.
        max_lr: f64,
        /// Number of steps in which the learning rate rises.
        first_steps: u64,
        /// Number of steps in which the learning rate falls.
        second_steps: u64,
        /// Number of stairs of the rise, and of the fall. 0 for a straight line.
        stairs: (u64, u64),
        /// Length of a decay interval after the cycle, in steps: see `decay_rate`. 0 for no decay.
        decay_steps: u64,
        /// Decay rate after the cycle: `n` steps after it, the learning rate is
        /// `min_lr / (1 + decay_rate · n / decay_steps)`. 0 for no decay.
        decay_rate: f64,
    },
}

/// Length and shape of a warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Warmup {
    /// Number of warm-up steps, at least 2.
    pub steps: u64,
    /// `true` for a linear warm-up, `false` for a logarithmic one.
    pub is_linear: bool,
}

impl Warmup {
    /// Returns the fraction of the warm-up that is done after so many steps. `None` after its end.
    fn progress(self, done: f64) -> Option<f64> {
        let steps = float(self.steps);
        (done < steps).then(|| {
            if self.is_linear { done / steps } else { 1.0 / steps.ln() * (done + 1.0).ln() }
        })
    }
}

impl ScheduleSettings {
    /// Returns the name of the schedule in DeepSpeed: `WarmupLR`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Warmup { .. } => "WarmupLR",
            Self::WarmupDecay { .. } => "WarmupDecayLR",
            Self::WarmupCosine { .. } => "WarmupCosineLR",
            Self::RangeTest { .. } => "LRRangeTest",
            Self::OneCycle { .. } => "OneCycle",
        }
    }

    /// Returns the learning rate of an optimizer step, counted from 0. `own_lr` is the optimizer's own learning rate.
    ///
    /// ```
    /// use brigade_sharding::settings::{ScheduleSettings, Warmup};
    ///
    /// let warmup = Warmup { steps: 4, is_linear: true };
    /// let schedule = ScheduleSettings::Warmup { min_lr: 0.0, max_lr: Some(1.0), warmup };
    /// let rates: Vec<f64> = (0..7).map(|step| schedule.lr(step, 0.1)).collect();
    /// assert_eq!(rates, [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]);
    /// ```
    #[must_use]
    pub fn lr(&self, step: u64, own_lr: f64) -> f64 {
        // DeepSpeed advances its schedule after a step: the first two steps have the initial learning rate.
        let Some(done) = step.checked_sub(1) else { return self.first(own_lr) };
        let done_steps = done;
        let done = float(done);
        match *self {
            Self::Warmup { min_lr, max_lr, warmup } => {
                min_lr + (max_lr.unwrap_or(own_lr) - min_lr) * warmup.progress(done).unwrap_or(1.0)
            }
            Self::WarmupDecay { min_lr, max_lr, warmup, total_steps } => {
                let (total, up) = (float(total_steps), float(warmup.steps));
                let decay = || ((total - done) / (total - up).max(1.0)).max(0.0);
                min_lr + (max_lr - min_lr) * warmup.progress(done).unwrap_or_else(decay)
            }
            Self::WarmupCosine { min_ratio, cos_min_ratio, warmup, total_steps } => {
                let decay = || {
                    let window = (float(total_steps) - float(warmup.steps)).max(1.0);
                    let progress = ((done - float(warmup.steps) + 1.0) / window).min(1.0);
                    (cos_min_ratio + (1.0 - cos_min_ratio) * ((1.0 + (PI * progress).cos()) / 2.0))
                        .max(0.0)
                };
                let up = warmup.progress(done).map(|part| min_ratio + part * (1.0 - min_ratio));
                own_lr * up.unwrap_or_else(decay)
            }
            Self::RangeTest { min_lr, step_size, step_rate, staircase } => {
                let interval = (done + 1.0) / float(step_size);
                let interval = if staircase { interval.floor() } else { interval };
                min_lr * (1.0 + step_rate * interval)
            }
            Self::OneCycle {
                min_lr,
                max_lr,
                first_steps,
                second_steps,
                stairs,
                decay_steps,
                decay_rate,
            } => {
                let total = first_steps.saturating_add(second_steps);
                if done_steps < total {
                    let scale = cycle(done_steps + 1, first_steps, second_steps, stairs);
                    return min_lr + (max_lr - min_lr) * scale;
                }
                if decay_steps == 0 || decay_rate == 0.0 {
                    return min_lr;
                }
                let interval = float(done_steps - total + 1) / float(decay_steps);
                min_lr / (1.0 + decay_rate * interval)
            }
        }
    }

    fn first(&self, own_lr: f64) -> f64 {
        match *self {
            Self::Warmup { min_lr, .. }
            | Self::WarmupDecay { min_lr, .. }
            | Self::RangeTest { min_lr, .. }
            | Self::OneCycle { min_lr, .. } => min_lr,
            Self::WarmupCosine { .. } => own_lr * 0.0,
        }
    }
}

/// Returns the position in a cycle, between 0 for its lowest rate and 1 for its highest.
fn cycle(place: u64, first_steps: u64, second_steps: u64, stairs: (u64, u64)) -> f64 {
    let (first, second) = (float(first_steps), float(second_steps));
    let total = first + second;
    let ratio = first / total;
    let turn = (1.0 + float(place) / total).floor();
    let x = 1.0 + float(place) / total - turn;
    let (scale, stairs) =
        if x <= ratio { (x / ratio, stairs.0) } else { ((x - 1.0) / (ratio - 1.0), stairs.1) };
    if stairs == 0 {
        return scale;
    }
    let place = float(place) % total;
    let position = if place <= first {
        place * float(stairs) / first
    } else {
        (total - place) * float(stairs) / second
    };
    position.floor() / float(stairs)
}

#[expect(clippy::cast_precision_loss, reason = "steps of a training are far below 2^53")]
fn float(count: u64) -> f64 {
    count as f64
}

/// Reads `scheduler`. `None` if it is missing, or if the program decides one of its values.
pub(super) fn read(reader: Reader<'_>) -> Result<Option<ScheduleSettings>, SettingsError> {
    const TYPE: &str = "scheduler.type";
    const WARMUP: [&str; 4] = ["warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"];
    let Some(name) = reader.text(TYPE)? else {
        return match reader.find("scheduler") {
            None => Ok(None),
            Some(_) => Err(SettingsError::Missing {
                origin: reader.origin.to_owned(),
                key: TYPE,
                remedy: "write one, such as \"WarmupLR\"",
            }),
        };
    };
    let at = |key: &str| format!("scheduler.params.{key}");
    let allowed: &[&str] = match name {
        "WarmupLR" => &WARMUP,
        "WarmupDecayLR" => &[WARMUP[0], WARMUP[1], WARMUP[2], WARMUP[3], "total_num_steps"],
        "WarmupCosineLR" => &[
            "warmup_min_ratio",
            "warmup_num_steps",
            "warmup_type",
            "cos_min_ratio",
            "total_num_steps",
        ],
        "LRRangeTest" => &[
            "lr_range_test_min_lr",
            "lr_range_test_step_size",
            "lr_range_test_step_rate",
            "lr_range_test_staircase",
        ],
        "OneCycle" => &[
            "cycle_min_lr",
            "cycle_max_lr",
            "decay_lr_rate",
            "cycle_first_step_size",
            "cycle_second_step_size",
            "cycle_first_stair_count",
            "cycle_second_stair_count",
            "decay_step_size",
            "cycle_momentum",
            "cycle_min_mom",
            "cycle_max_mom",
            "decay_mom_rate",
        ],
        _ => {
            return Err(reader.wrong(
                TYPE,
                "one of WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest",
            ));
        }
    };
    reader.only("scheduler.params", allowed)?;
    if allowed.iter().any(|key| reader.is_auto(&at(key))) {
        return Ok(None);
    }
    let number = |key: &str, usual: f64| Ok(reader.number(&at(key))?.unwrap_or(usual));
    let count = |key: &str, usual: u64| Ok(reader.count(&at(key))?.unwrap_or(usual));
    let positive = |key: &str, usual: u64| match count(key, usual)? {
        0 => Err(reader.wrong(&at(key), "a whole number from 1")),
        steps => Ok(steps),
    };
    let needed = |key: &'static str| {
        let missing = || SettingsError::Missing {
            origin: reader.origin.to_owned(),
            key,
            remedy: "the schedule in scheduler.params needs it",
        };
        reader.number(&at(key))?.ok_or_else(missing)
    };
    let warmup = || -> Result<Warmup, SettingsError> {
        let is_linear = match reader.text(&at("warmup_type"))? {
            None | Some("log") => false,
            Some("linear") => true,
            Some(_) => return Err(reader.wrong(&at("warmup_type"), "log or linear")),
        };
        Ok(Warmup { steps: positive("warmup_num_steps", 1000)?.max(2), is_linear })
    };
    let total_steps = || {
        needed("total_num_steps")?;
        count("total_num_steps", 0)
    };
    let schedule = match name {
        "WarmupLR" => ScheduleSettings::Warmup {
            min_lr: number("warmup_min_lr", 0.0)?,
            max_lr: reader.number(&at("warmup_max_lr"))?,
            warmup: warmup()?,
        },
        "WarmupDecayLR" => ScheduleSettings::WarmupDecay {
            min_lr: number("warmup_min_lr", 0.0)?,
            max_lr: number("warmup_max_lr", 0.001)?,
            warmup: warmup()?,
            total_steps: total_steps()?,
        },
        "WarmupCosineLR" => ScheduleSettings::WarmupCosine {
            min_ratio: number("warmup_min_ratio", 0.0)?,
            cos_min_ratio: number("cos_min_ratio", 0.0001)?,
            warmup: warmup()?,
            total_steps: total_steps()?,
        },
        "LRRangeTest" => ScheduleSettings::RangeTest {
            min_lr: number("lr_range_test_min_lr", 1e-3)?,
            step_size: positive("lr_range_test_step_size", 2000)?,
            step_rate: number("lr_range_test_step_rate", 1.0)?,
            staircase: reader.is_on(&at("lr_range_test_staircase"))?,
        },
        _ => {
            let first_steps = positive("cycle_first_step_size", 2000)?;
            let stairs = count("cycle_first_stair_count", 0)?;
            ScheduleSettings::OneCycle {
                min_lr: needed("cycle_min_lr")?,
                max_lr: needed("cycle_max_lr")?,
                first_steps,
                second_steps: count("cycle_second_step_size", first_steps)?,
                stairs: (stairs, count("cycle_second_stair_count", stairs)?),
                decay_steps: count("decay_step_size", 0)?,
                decay_rate: number("decay_lr_rate", 0.0)?,
            }
        }
    };
    Ok(Some(schedule))
}
