//! Measurements for the README, as ratios: both sides in one run, in turns, medians.
//!
//! The parent starts each measurement as a process of its own (this program again, or a peer's), so that
//! neither side inherits the other's memory or threads.

mod comparisons;
mod kernel_kinds;
mod launcher;
mod measurements;
mod newcomer;
mod notebook;
mod processes;
#[expect(dead_code, reason = "the simulation's own tests disturb a job in more ways")]
#[path = "../../crates/rendezvous/tests/it/simulated.rs"]
mod simulated;
mod table;
#[path = "../../crates/train/tests/numeric/cpu/transformer.rs"]
mod transformer;

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Parser;

/// Measures Brigade against PyTorch and against its own parts.
#[derive(Debug, Parser)]
struct Options {
    /// Only the comparisons whose name contains one of these texts.
    filters: Vec<String>,
    /// Only the comparison of exactly this name.
    #[arg(long, value_name = "NAME", conflicts_with = "filters")]
    exact: Option<String>,
    /// Print the comparisons' names.
    #[arg(long)]
    list: bool,
    /// Also append each row to this file, as one line of JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Rounds: each side runs once in every round [default: 5, of comparisons on a GPU 3]
    #[arg(long)]
    rounds: Option<usize>,
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

impl Options {
    fn wants(&self, name: &str) -> bool {
        self.exact.as_ref().is_none_or(|it| it == name)
            && (self.filters.is_empty() || self.filters.iter().any(|text| name.contains(text)))
    }

    fn rounds_of(&self, name: &str) -> usize {
        let default = if comparisons::gpu::needs_gpu(name) { 3 } else { 5 };
        self.rounds.unwrap_or(default)
    }

    /// Opens the file of rows, to append to those of earlier runs.
    fn rows(&self) -> Result<Option<File>> {
        let Some(path) = &self.json else { return Ok(None) };
        let file = OpenOptions::new().create(true).append(true).open(path);
        file.map(Some).with_context(|| format!("cannot write {}", path.display()))
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    let mut out = io::stdout().lock();
    if let Some(name) = &options.measure {
        let lists = measurements::run(name)?;
        // Without lists: another rank of this job prints them.
        if !lists.is_empty() {
            writeln!(out, "{}", serde_json::to_string(&lists)?)?;
        }
        return Ok(());
    }
    let wanted: Vec<_> = all_comparisons().filter(|it| options.wants(it.name)).collect();
    if options.list {
        wanted.iter().try_for_each(|it| writeln!(out, "{}", it.name))?;
        return Ok(());
    }
    if let Some(name) = &options.exact {
        ensure!(!wanted.is_empty(), "there is no comparison {name:?}; `--list` prints the names");
    }
    let mut file = options.rows()?;
    writeln!(out, "{}\n{}", table::machine(), table::HEAD)?;
    let mut failed = 0;
    for comparison in wanted {
        eprintln!("measuring {} …", comparison.name);
        let reason = comparisons::gpu::cannot_run(comparison.name)
            .or_else(|| comparisons::tpu::cannot_run(comparison.name));
        if let Some(reason) = reason {
            eprintln!("  skipped: {reason}");
            continue;
        }
        match (comparison.run)(options.rounds_of(comparison.name)) {
            Ok(rows) if rows.is_empty() => {
                eprintln!("  skipped: PyTorch is not installed (cargo xtask bench --peers)");
            }
            // Written at once: all comparisons take an hour, and one that fails must not lose the others.
            Ok(rows) => {
                for row in &rows {
                    writeln!(out, "{row}")?;
                    if let Some(file) = &mut file {
                        writeln!(file, "{}", row.json(comparison.name))?;
                    }
                }
            }
            Err(error) => {
                eprintln!("  failed: {error:#}");
                failed += 1;
            }
        }
    }
    ensure!(failed == 0, "{failed} of the comparisons failed");
    Ok(())
}
