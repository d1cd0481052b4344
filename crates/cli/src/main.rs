//! `brigade`: starts training programs on one process or many, and answers questions about them.
//!
//! Thin on purpose: arguments in, a library's answer out, and the one place where exit codes are
//! decided.

use std::io::{self, Write};
use std::process::ExitCode;

use brigade_launch::{LaunchError, role};
use clap::{Parser, Subcommand};

mod doctor;
mod explain;
mod hosts;
mod launch;

/// Write the training loop once; run it on one process or many
#[derive(Debug, Parser)]
#[command(name = "brigade", version, max_term_width = 100)]
#[command(propagate_version = true, arg_required_else_help = true, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Launch(Box<launch::LaunchArgs>),
    Doctor(doctor::DoctorArgs),
    #[command(name = doctor::ROLE, hide = true)]
    DoctorsRole,
    /// Show what a run would do, without one
    #[command(subcommand)]
    Explain(explain::Explain),
}

fn main() -> ExitCode {
    // Before the arguments: the agent starts this executable in roles that are not for users.
    if let Some(code) = role::play_if_asked() {
        return ExitCode::from(code);
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(answer) => {
            // Help and versions are answers, too; `| head` may cut them short.
            let _ = answer.print();
            return ExitCode::from(if answer.use_stderr() { USAGE } else { 0 });
        }
    };
    let result = match &cli.command {
        Command::Launch(args) => launch::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::DoctorsRole => doctor::play(),
        Command::Explain(question) => explain::run(question, io::stdout().lock()).map(|()| 0),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            // One write, whole: several commands may share a terminal.
            let _ = io::stderr().write_all(format!("brigade: {error:#}\n").as_bytes());
            ExitCode::from(exit_code(&error))
        }
    }
}

/// The shell's codes for what a user can mend, 1 for the rest. A job that was started exits with
/// the code of its first failing rank instead.
fn exit_code(error: &anyhow::Error) -> u8 {
    match error.downcast_ref() {
        Some(
            LaunchError::OptionOutOfRange { .. }
            | LaunchError::NoSuchLocalRank { .. }
            | LaunchError::Meeting { .. }
            | LaunchError::Device(_)
            | LaunchError::Bind(_),
        ) => USAGE,
        Some(LaunchError::Hosts(error)) => error.exit_code(),
        Some(LaunchError::Program(error)) => error.exit_code(),
        _ => 1,
    }
}

const USAGE: u8 = 2;
const EXAMPLES: &str = "\
Examples:
  brigade launch --nproc 2 ./train --epochs 4
  brigade launch --nproc 4 python3 train.py
  brigade explain shards --samples 50 --batch-size 12 --nproc 4";
