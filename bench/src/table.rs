//! Markdown table of the results.

use std::fmt;

use brigade_torch::DEVICE_KINDS;

/// Result of one comparison, ready to print.
pub(crate) struct Row {
    pub(crate) what: &'static str,
    pub(crate) ours: String,
    pub(crate) other: String,
    pub(crate) ratio: String,
    pub(crate) goal: String,
    pub(crate) reached: bool,
}

impl Row {
    /// Returns the row as an object, with the comparison's name.
    pub(crate) fn json(&self, comparison: &str) -> serde_json::Value {
        let Self { what, ours, other, ratio, goal, reached } = self;
        serde_json::json!({
            "comparison": comparison,
            "what": what,
            "ours": ours,
            "other": other,
            "ratio": ratio,
            "goal": goal,
            "reached": reached,
        })
    }
}

/// First two lines of the table.
pub(crate) const HEAD: &str =
    "\n| what | Brigade | other | ratio | goal | reached |\n|---|---|---|---|---|---|";

/// Formats a line of the table.
impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reached = if self.reached { "yes" } else { "no" };
        let Self { what, ours, other, ratio, goal, .. } = self;
        write!(f, "| {what} | {ours} | {other} | {ratio} | {goal} | {reached} |")
    }
}

/// Describes what the figures depend on: processor, cores, GPU, libtorch.
pub(crate) fn machine() -> String {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map_or("unknown processor", |rest| rest.trim_start_matches([' ', '\t', ':']));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let gpu = DEVICE_KINDS.iter().find_map(|kind| {
        let devices = kind.devices().ok()?;
        Some(format!("{devices} x {}, ", kind.hardware(0).ok()?))
    });
    let gpu = gpu.unwrap_or_default();
    format!("{model}, {cores} cores, {gpu}libtorch {}", brigade_torch::libtorch_version())
}
