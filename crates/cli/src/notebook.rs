//! Hidden commands that a notebook starts: the agent of its ranks, and a rank.

use std::path::PathBuf;

use anyhow::Context;
use brigade_dylib_call::Address;
use brigade_ssh::die_with_parent;
use clap::Args;

use crate::launch::{self, LaunchArgs};

/// `brigade launch`, for a notebook: it ends with the notebook's process.
#[derive(Debug, Args)]
pub(crate) struct AgentArgs {
    /// The notebook's process
    #[arg(long)]
    parent: u32,

    #[command(flatten)]
    launch: LaunchArgs,
}

/// A function of a shared library, as a rank.
#[derive(Debug, Args)]
pub(crate) struct RankArgs {
    /// The library
    library: PathBuf,

    /// Where it has the entry of the function
    offset: u64,
}

/// Launches the ranks of a notebook. A kernel interrupts a cell by killing this process.
pub(crate) fn launch(args: &AgentArgs) -> anyhow::Result<u8> {
    let is_there = die_with_parent(args.parent).context("cannot tie this process to its parent")?;
    anyhow::ensure!(is_there, "the notebook (process {}) has ended", args.parent);
    launch::run(&args.launch)
}

/// Calls the function, and returns its exit code.
pub(crate) fn call(args: &RankArgs) -> anyhow::Result<u8> {
    let entry = Address { object: args.library.clone(), offset: args.offset };
    Ok(u8::try_from(entry.call()?).unwrap_or(1))
}
