//! Measurements for the README, as ratios: both sides in one run, in turns, medians.
//!
//! The parent starts each measurement as a process of its own (this program again, or a peer's), so that
//! neither side inherits the other's memory or threads.

mod comparisons;
mod launcher;
mod measurements;
mod newcomer;
mod notebook;
mod processes;
#[expect(dead_code, reason = "the simulation's own tests disturb a job in more ways")]
#[path = "../../crates/rendezvous/tests/simulated/mod.rs"]
mod simulated;
mod table;
#[path = "../../crates/train/tests/transformer/mod.rs"]
mod transformer;

use std::io::{self, Write};

use anyhow::{Result, ensure};
use clap::Parser;

/// Measures Brigade against PyTorch and against its own parts.
#[derive(Debug, Parser)]
struct Options {
    /// Only the comparisons whose name contains this text.
    filter: Option<String>,
    /// Rounds: each side runs once in every round.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Run one measurement in this process and print its numbers as JSON.
    #[arg(long, hide = true, value_name = "NAME")]
    measure: Option<String>,
}

fn all_comparisons() -> impl Iterator<Item = comparisons::Comparison> {
    comparisons::all()
        .into_iter()
        .chain(launcher::all())
        .chain(newcomer::all())
        .chain(notebook::all())
}

fn main() -> Result<()> {
    let options = Options::parse();
    let mut out = io::stdout().lock();
    if let Some(name) = &options.measure {
        let lists = measurements::run(name)?;
        // No list: another rank of this job speaks.
        if !lists.is_empty() {
            writeln!(out, "{}", serde_json::to_string(&lists)?)?;
        }
        return Ok(());
    }
    writeln!(out, "{}\n{}", table::machine(), table::HEAD)?;
    let mut failed = 0;
    for comparison in all_comparisons() {
        if options.filter.as_ref().is_some_and(|text| !comparison.name.contains(text)) {
            continue;
        }
        eprintln!("measuring {} …", comparison.name);
        match (comparison.run)(options.rounds) {
            Ok(rows) if rows.is_empty() => {
                eprintln!("  skipped: PyTorch is not installed (cargo xtask bench --peers)");
            }
            // At once: all of them take an hour, and one that fails must not cost the others.
            Ok(rows) => rows.iter().try_for_each(|row| writeln!(out, "{row}"))?,
            Err(error) => {
                eprintln!("  failed: {error:#}");
                failed += 1;
            }
        }
    }
    ensure!(failed == 0, "{failed} of the comparisons failed");
    Ok(())
}
