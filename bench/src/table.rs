//! The result as a Markdown table.

use std::fmt::Write;

/// One comparison's result, ready to print.
pub(crate) struct Row {
    pub(crate) what: &'static str,
    pub(crate) ours: String,
    pub(crate) other: String,
    pub(crate) ratio: String,
    pub(crate) goal: String,
    pub(crate) reached: bool,
}

pub(crate) fn markdown(rows: &[Row]) -> String {
    let mut text = String::from(
        "\n| what | Brigade | other | ratio | goal | reached |\n|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let reached = if row.reached { "yes" } else { "no" };
        let Row { what, ours, other, ratio, goal, .. } = row;
        // Writing to a String cannot fail.
        let _ = writeln!(text, "| {what} | {ours} | {other} | {ratio} | {goal} | {reached} |");
    }
    text
}

/// Processor, cores, libtorch: what the figures depend on.
pub(crate) fn machine() -> String {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .map_or("unknown processor", |rest| rest.trim_start_matches([' ', '\t', ':']));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{model}, {cores} cores, libtorch {}", brigade_torch::libtorch_version())
}
