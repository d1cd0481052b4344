//! State of a run in bounded memory: a fold over its lines.

mod epochs;

use std::collections::VecDeque;

use brigade_rank_env::text::printable;
use brigade_track::reader::{Line, Logged};
use brigade_track::{Config, Outcome, Table, Value};
use indexmap::IndexMap;

use super::curve::Curve;
pub(super) use epochs::{Epochs, Row};

/// State of a run. All names and texts in it are escaped for a terminal.
#[derive(Debug, Default)]
pub(super) struct Model {
    /// Name of the project, from the run's first line.
    pub(super) project: Option<String>,
    pub(super) config: Vec<(String, String)>,
    pub(super) state: State,
    /// Number of starts of the run: more than 1 if it was resumed.
    pub(super) starts: u32,
    pub(super) curves: IndexMap<String, Curve>,
    pub(super) epochs: Epochs,
    /// Last table of each name.
    pub(super) tables: IndexMap<String, Option<Table>>,
    /// Last text of each name.
    pub(super) texts: IndexMap<String, String>,
    /// Number of lines that could not be read. The reason of the last one is in `broken_reason`.
    pub(super) broken: u64,
    pub(super) broken_reason: String,
    /// `true` if steps were logged; otherwise the lines are counted.
    pub(super) has_steps: bool,
    step: f64,
    lines: u64,
    began: Option<f64>,
    time: Option<f64>,
    /// Steps with their times, for the rate.
    recent: VecDeque<(f64, f64)>,
    /// `true` if the next step decides which earlier values are discarded.
    is_going_on: bool,
    goal: Option<Goal>,
    /// Progress and time soon after the last start.
    pace_from: Option<(f64, f64)>,
    /// Number of names beyond [`MOST_NAMES`].
    pub(super) left_out: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum State {
    /// Nothing was logged so far.
    #[default]
    Empty,
    Running,
    Finished,
    Failed,
}

/// End of the run by its settings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Goal {
    Epochs(f64),
    Steps(f64),
}

impl Model {
    pub(super) fn apply(&mut self, line: &Line) {
        match line {
            Line::Start { time, project, config } => {
                self.start(*time, project.as_deref(), config);
            }
            Line::End { time, outcome } => {
                self.time = time.or(self.time);
                self.state = match outcome {
                    Outcome::Finished => State::Finished,
                    Outcome::Failed => State::Failed,
                };
            }
            Line::Values { step, time, values } => self.log(*step, *time, values),
            Line::Broken { reason } => {
                self.broken += 1;
                self.broken_reason = printable(reason);
            }
            // Kind of line of a later version.
            _ => {}
        }
    }

    fn start(&mut self, time: Option<f64>, project: Option<&str>, config: &Config) {
        self.starts += 1;
        self.is_going_on = self.starts > 1;
        self.state = State::Running;
        self.project = project.map(printable);
        let settings = config.flat();
        self.goal = Goal::of(&settings);
        let shown = |(name, value): (String, Value)| (printable(&name), printable(&value.text()));
        self.config = settings.into_iter().map(shown).collect();
        (self.began, self.time) = (time, time.or(self.time));
        self.recent.clear();
        self.pace_from = None;
    }

    fn log(&mut self, step: Option<u64>, time: Option<f64>, values: &IndexMap<String, Logged>) {
        let number = |names: &[&str]| names.iter().find_map(|name| values.get(*name)?.number());
        let step = step.map(|step| step as f64).or_else(|| number(&STEP_NAMES));
        let time = time.or_else(|| number(&TIME_NAMES)).filter(|time| time.is_finite());
        self.state = State::Running;
        self.lines += 1;
        if let Some(step) = step.filter(|step| step.is_finite()) {
            if self.is_going_on {
                self.rewind(step);
            }
            self.has_steps = true;
            self.step = step;
        } else if !self.has_steps {
            self.step = self.lines as f64;
        }
        if let Some(time) = time {
            self.time = Some(time);
            self.began.get_or_insert(time);
            // Several lines of one step count as one.
            if self.recent.back().is_none_or(|(last, _)| *last < self.step) {
                self.recent.push_back((self.step, time));
                self.recent.drain(..self.recent.len().saturating_sub(RECENT));
            }
        }
        self.epochs.is_open = false;
        if let Some(epoch) = number(&["epoch"]).filter(|epoch| epoch.is_finite()) {
            self.epochs.log(epoch, self.step, self.starts, values);
        }
        for (name, logged) in values {
            if name == "epoch" || STEP_NAMES.contains(&&**name) || TIME_NAMES.contains(&&**name) {
                continue;
            }
            self.keep(name, logged, time.unwrap_or(f64::NAN));
        }
        if self.pace_from.is_none() {
            self.pace_from = if self.step <= 1.0 {
                self.began.map(|began| (0.0, began))
            } else {
                self.fraction().zip(self.time)
            };
        }
    }

    fn keep(&mut self, name: &str, logged: &Logged, time: f64) {
        let step = self.step;
        if let Some(value) = logged.number() {
            if let Some(curve) = slot(&mut self.curves, name, MOST_NAMES, &mut self.left_out) {
                curve.push(step, time, value);
            }
            return;
        }
        match logged {
            Logged::Table(table) => {
                let text = |value: &Value| match value {
                    Value::Text(text) => Value::Text(printable(text)),
                    other => other.clone(),
                };
                let columns = table.columns().iter().take(MOST_COLUMNS).map(|name| printable(name));
                let rows = table.rows().iter().take(MOST_ROWS);
                let rows = rows.map(|row| row.iter().take(MOST_COLUMNS).map(text).collect());
                let Ok(table) = Table::new(columns, rows.collect()) else { return };
                let kept = slot(&mut self.tables, name, MOST_TABLES, &mut self.left_out);
                if let Some(kept) = kept {
                    *kept = Some(table);
                }
            }
            Logged::Json(text) | Logged::Value(Value::Text(text)) => {
                if let Some(kept) = slot(&mut self.texts, name, MOST_NAMES, &mut self.left_out) {
                    *kept = printable(text);
                }
            }
            Logged::Value(_) => {}
        }
    }

    /// Discards values from this step on, which an earlier start has logged: the run was resumed from that step.
    fn rewind(&mut self, step: f64) {
        self.is_going_on = false;
        self.curves.values_mut().for_each(|curve| curve.rewind(step));
        self.epochs.rewind(step);
    }

    /// Returns the last step, or the number of lines if there are no steps.
    pub(super) fn step(&self) -> f64 {
        self.step
    }

    /// Returns the seconds from the last start to the last line.
    pub(super) fn elapsed(&self) -> Option<f64> {
        Some((self.time? - self.began?).max(0.0))
    }

    /// Returns the steps per second over the last lines.
    pub(super) fn steps_per_second(&self) -> Option<f64> {
        let ((from, begin), (to, end)) = (self.recent.front()?, self.recent.back()?);
        (end > begin).then(|| (to - from) / (end - begin))
    }

    pub(super) fn goal(&self) -> Option<Goal> {
        self.goal
    }

    /// Returns the progress of the run, 0 to 1, if its settings contain its length.
    pub(super) fn fraction(&self) -> Option<f64> {
        let fraction = match self.goal? {
            Goal::Steps(steps) => self.step / steps,
            Goal::Epochs(epochs) => self.epochs.clock().at(self.step)? / epochs,
        };
        Some(fraction.clamp(0.0, 1.0))
    }

    /// Returns the seconds until the run's end, at the pace since its last start.
    pub(super) fn remaining(&self) -> Option<f64> {
        let (now, (then, from)) = (self.fraction()?, self.pace_from?);
        let pace = (now - then) / (self.time? - from);
        (pace.is_finite() && pace > 0.0).then(|| (1.0 - now) / pace)
    }
}

/// Returns the entry of a name; `None` if there are too many names.
fn slot<'a, T: Default>(
    map: &'a mut IndexMap<String, T>,
    name: &str,
    most: usize,
    left_out: &mut u64,
) -> Option<&'a mut T> {
    let name = printable(name);
    if map.len() >= most && !map.contains_key(&name) {
        *left_out += 1;
        return None;
    }
    Some(map.entry(name).or_default())
}

impl Goal {
    fn of(settings: &[(String, Value)]) -> Option<Self> {
        let find = |names: &[&str]| {
            let found = settings.iter().find(|(name, _)| {
                let name = name.rsplit('.').next().unwrap_or_default();
                names.contains(&name)
            });
            found
                .and_then(|(_, value)| value.number())
                .filter(|number| number.is_finite() && *number > 0.0)
        };
        let steps = find(&["max_steps", "total_steps", "max_train_steps", "num_steps", "steps"]);
        let epochs = find(&["epochs", "num_epochs", "max_epochs", "num_train_epochs", "n_epoch"]);
        steps.map(Self::Steps).or_else(|| epochs.map(Self::Epochs))
    }
}

/// Names of the step and the time in other programs. `JsonLines` has `_step` and `_time`.
const STEP_NAMES: [&str; 4] = ["step", "global_step", "iteration", "iter"];
const TIME_NAMES: [&str; 2] = ["_timestamp", "timestamp"];
/// Maximum number of curves, and of texts. A curve has at most 100 kB.
const MOST_NAMES: usize = 256;
/// Maximum number of tables, and of columns and rows of one.
const MOST_TABLES: usize = 16;
const MOST_COLUMNS: usize = 32;
const MOST_ROWS: usize = 1024;
/// Number of lines over which the rate is computed.
const RECENT: usize = 128;

#[cfg(test)]
pub(super) mod tests;
