//! `brigade watch`: follows a run that logs JSON lines, from another terminal or host.
//!
//! It only reads the run's file; the run itself is not affected.

mod curve;
mod draw;
mod feed;
mod model;
mod plain;
mod screen;
mod text;
mod view;

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use brigade_rank_env::text::printable;
use clap::Args;

use crate::config::Usage;
use feed::{Feed, Input, RunFile};

/// Follow a run on the terminal: curves, rates, memory, epochs
///
/// Reads the JSON lines of a run (`runs/PROJECT.jsonl`), and shows them on the terminal, with curves. The command does
/// not affect the run: use it from another terminal, or from another host over ssh or through a shared folder. `?`
/// lists the keys.
///
/// Without a terminal it prints plain lines: epochs, or values if there are none, and changes of the run's state. It
/// then exits when the run ends, with 1 if the run failed.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct WatchArgs {
    /// File of a run, folder of runs, or - for the standard input
    ///
    /// For a folder, shows the run that was written last; `[` and `]` switch to the others.
    #[arg(value_name = "FILE|FOLDER|-", default_value = "runs")]
    run_path: PathBuf,

    /// Show the run with this name in the folder
    #[arg(long, value_name = "NAME")]
    run: Option<String>,

    /// Wait for a run that has not started
    #[arg(long)]
    wait: bool,

    /// Print the current state of the run, and exit
    #[arg(long, conflicts_with = "wait")]
    once: bool,
}

/// Shows the run. The exit code is 1 if it was followed as plain lines and failed.
pub(crate) fn run(args: &WatchArgs, out: impl Write) -> anyhow::Result<u8> {
    let mut out = io::BufWriter::new(out);
    let mut feed = args.feed()?;
    let followed = if args.once {
        plain::once(&mut feed, &mut out).map(|()| 0)
    } else {
        match screen::show(&mut feed)? {
            Some(()) => Ok(0),
            None => plain::follow(&mut feed, &mut out),
        }
    };
    let written = followed.and_then(|code| Ok(out.flush().map(|()| code)?));
    match written {
        Err(error) if is_cut_short(&error) => Ok(0),
        written => written,
    }
}

/// Returns `true` if the reader has closed the pipe.
fn is_cut_short(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|it| it.kind() == io::ErrorKind::BrokenPipe)
}

impl WatchArgs {
    fn feed(&self) -> anyhow::Result<Feed> {
        if self.run_path == Path::new("-") {
            if self.run.is_some() {
                anyhow::bail!(Usage(
                    "--run names a run of a folder, and - has only one".to_owned()
                ));
            }
            let input = Input::open(io::stdin()).context("cannot read the standard input")?;
            return Ok(Feed::Input(input));
        }
        if let Some(run) = &self.run {
            if self.run_path.is_file() {
                let path = self.run_path.display();
                anyhow::bail!(Usage(format!(
                    "--run names a run of a folder, and {path} is a file"
                )));
            }
            if run.is_empty() || run.contains('/') {
                anyhow::bail!(Usage(format!("--run {run:?}: give a name as in NAME.jsonl")));
            }
        }
        let opened = RunFile::open(&self.run_path, self.run.as_deref(), self.wait);
        Ok(Feed::File(opened.with_context(|| self.advice())?))
    }

    /// Returns advice for a run that does not exist.
    fn advice(&self) -> String {
        let path = self.run_path.display();
        match &self.run {
            Some(run) => format!("there is no run {run} in {path}{}", self.names()),
            None => format!("no run to watch in {path}; --wait waits for it"),
        }
    }

    fn names(&self) -> String {
        let folder = RunFile::open(&self.run_path, None, true);
        let runs = folder.map(|file| file.siblings().0).unwrap_or_default();
        let names: Vec<_> = runs
            .iter()
            .filter_map(|run| run.file_stem())
            .map(|stem| printable(&stem.to_string_lossy()))
            .collect();
        if names.is_empty() { String::new() } else { format!(", but {}", names.join(", ")) }
    }
}

const EXAMPLES: &str = "\
Examples:
  brigade watch
  brigade watch runs/digits.jsonl
  brigade watch runs --run digits --wait
  ssh -t host brigade watch project/runs
  ssh host tail -n +1 -F project/runs/digits.jsonl | brigade watch -
  brigade watch runs --once";
