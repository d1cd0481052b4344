//! `brigade explain schedule`: learning rate and momentum of every step, as a table, JSON or a picture.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, Parser};

use named::{Named, steps};
use series::Series;
pub(crate) use series::number;

mod named;
mod picture;
mod series;

/// The question of `brigade explain schedule`.
#[derive(Debug, Args)]
#[command(
    subcommand_value_name = "NAME",
    subcommand_help_heading = "Schedules",
    disable_help_subcommand = true,
    after_help = EXAMPLES
)]
pub(crate) struct ScheduleArgs {
    #[command(subcommand)]
    named: Named,

    #[command(flatten)]
    modifiers: ScheduleModifiers,

    /// Number of steps to show [default: those of the schedule]
    #[arg(long, global = true, value_name = "N", value_parser = steps)]
    show: Option<u64>,

    /// Advance N steps per line, as Accelerate does per call
    #[arg(long, global = true, value_name = "N", value_parser = steps)]
    accelerate_nproc: Option<u64>,

    /// Print JSON
    ///
    /// {"schedule": NAME, "lr": [rate, ...], "momentum": [...]}
    #[arg(long, global = true)]
    json: bool,

    /// File for a plot of the curves
    #[arg(long, global = true, value_name = "FILE.svg", value_parser = svg)]
    plot: Option<PathBuf>,

    /// Show all steps
    #[arg(long, global = true, conflicts_with = "json")]
    all: bool,
}

/// What can be put around any schedule.
#[derive(Debug, Clone, Default, Args)]
struct ScheduleModifiers {
    /// Warm-up: let the rate rise for the first N steps
    #[arg(long, global = true, value_name = "N", value_parser = steps)]
    warmup: Option<u64>,

    /// Factor of the rate at the start of the warm-up
    #[arg(long, global = true, value_name = "PART", default_value_t = 0.0)]
    #[arg(allow_negative_numbers = true)]
    warmup_factor: f64,

    /// Schedule of the momentum
    ///
    /// Such as 'linear --start-lr 0.85 --end-lr 0.95 --steps 100'
    #[arg(long, global = true, value_name = "SCHEDULE", value_parser = part)]
    momentum: Option<Part>,
}

/// A schedule inside another, written as on the command line.
#[derive(Debug, Clone, Parser)]
#[command(no_binary_name = true, disable_help_flag = true, disable_help_subcommand = true)]
struct Part {
    #[command(subcommand)]
    named: Box<Named>,

    #[command(flatten)]
    modifiers: Box<ScheduleModifiers>,
}

/// Writes the answer to `out`.
pub(super) fn run(args: &ScheduleArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let series = Series::of(args)?;
    if let Some(file) = &args.plot {
        fs::write(file, picture::draw(&series))
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    let written = if args.json {
        series.json(out)
    } else if let Some(file) = &args.plot {
        writeln!(out, "{}: drawn in {}", series.title(), file.display())
    } else {
        series.text(args.all, out)
    };
    Ok(written?)
}

fn svg(text: &str) -> Result<PathBuf, String> {
    let path = Path::new(text);
    if path.extension().is_some_and(|it| it.eq_ignore_ascii_case("svg")) {
        return Ok(path.to_owned());
    }
    Err("the diagram is an SVG: use a name that ends in .svg".to_owned())
}

/// Parses a schedule that is written in one argument.
fn part(text: &str) -> Result<Part, String> {
    let words = shlex::split(text).ok_or("a quote is not closed")?;
    Part::try_parse_from(words)
        .map_err(|error| crate::usage::line(&error).unwrap_or_else(|| "no schedule".to_owned()))
}

const EXAMPLES: &str = "\
Examples:
  brigade explain schedule one-cycle --max-lr 0.3 --steps 41
  brigade explain schedule cosine --lr 0.1 --steps 1000 --warmup 100 --plot cosine.svg
  brigade explain schedule sequence \\
    --part 'constant --lr 0.1 --steps 80' --part 'linear --start-lr 0.1 --end-lr 0 --steps 20'";
