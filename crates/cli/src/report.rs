//! `brigade report`: writes a run's JSON lines as one HTML page.

mod best;
mod charts;
mod epochs;
mod html;
mod page;
mod pictures;
mod record;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use brigade_rank_env::text::escaped;
use brigade_track::reader::find_run;
use clap::{Args, ValueEnum};

use crate::config::Usage;
use record::Record;

/// Write a run's curves, epochs, tables and settings as one page of HTML
///
/// Reads the JSON lines of a run (`runs/PROJECT.jsonl`), which may still be running. The page is self-contained,
/// including pictures: it can be sent by mail and opened without a network.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ReportArgs {
    /// File of a run, or folder of runs
    ///
    /// For a folder, the run that was written last.
    #[arg(value_name = "FILE|FOLDER", default_value = "runs")]
    run: PathBuf,

    /// File to write [default: the run's file, ending in .html]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Value that determines the best epoch
    ///
    /// Defaults to valid_loss, else another loss except the training loss, else the first metric.
    #[arg(long, value_name = "NAME")]
    monitor: Option<String>,

    /// Better direction: lower or higher
    ///
    /// Defaults to min for a value whose name contains "loss" or "err", else to max.
    #[arg(long)]
    mode: Option<Mode>,
}

/// Which of two values is the better one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    Min,
    Max,
}

impl Mode {
    /// Guesses the direction from the name of a value, as fastai's callbacks do.
    fn of(name: &str) -> Self {
        let name = name.to_lowercase();
        if name.contains("loss") || name.contains("err") { Self::Min } else { Self::Max }
    }

    fn is_better(self, value: f64, than: f64) -> bool {
        match self {
            Self::Min => value < than,
            Self::Max => value > than,
        }
    }
}

/// Writes the page, and its path to `out`.
pub(crate) fn run(args: &ReportArgs, mut out: impl Write) -> anyhow::Result<()> {
    let path = find_run(&args.run)?;
    let record = Record::read(&path)?;
    if record.is_empty() {
        return Err(anyhow::Error::msg(match record.broken.first() {
            Some((line, reason)) => format!(
                "{} is not a run: line {line}: {reason}; expected a .jsonl file of the tracker JsonLines",
                path.display()
            ),
            None => format!("{} is empty: the run has logged nothing yet", path.display()),
        }));
    }
    let output = args.output.clone().unwrap_or_else(|| path.with_extension("html"));
    if is_same(&output, &path) {
        let message = format!("{} is the run itself: name another --output", output.display());
        return Err(Usage(message).into());
    }
    let choice = record.best(args.monitor.as_deref(), args.mode).map_err(Usage)?;
    let page = page::page(&record, &choice, &pictures::of_run(&path, &record));
    fs::write(&output, page).with_context(|| format!("cannot write {}", output.display()))?;
    writeln!(out, "{}", escaped(output.display()))?;
    Ok(())
}

/// Returns `true` if two paths are the same file, of which the first may not exist.
fn is_same(path: &Path, other: &Path) -> bool {
    match (fs::canonicalize(path), fs::canonicalize(other)) {
        (Ok(path), Ok(other)) => path == other,
        _ => false,
    }
}

const EXAMPLES: &str = "\
Examples:
  brigade report
  brigade report runs/digits.jsonl --output digits.html
  brigade report runs/digits.jsonl --monitor accuracy";
