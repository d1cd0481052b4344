//! `brigade`: starts training programs on one process or many, and answers questions about them.
//!
//! Only parses arguments, prints a library's answer, and decides about exit codes.

use std::io;
use std::process::ExitCode;

use brigade_config::ConfigError;
use brigade_launch::{LaunchError, ProgramError, SecretError, role};
use brigade_rank_env::with_causes;
use brigade_ssh::{HostListError, RemoteError};
use clap::{CommandFactory, Parser, Subcommand};

use job_file::EmitError;
use output::Answer;

#[cfg(test)]
mod book;
mod checkpoint;
mod config;
mod data;
mod doctor;
mod emit;
mod env;
mod estimate;
mod explain;
mod job_file;
mod kernel;
mod kernels;
mod launch;
mod new;
mod notebook;
mod output;
mod pages;
mod report;
mod secrets;
mod selftest;
mod setup;
mod sharding;
mod source;
mod usage;
mod watch;

/// Write the training loop once; run it on one process or many
#[derive(Debug, Parser)]
#[command(name = "brigade", version, long_version = pages::VERSION, max_term_width = 100)]
#[command(arg_required_else_help = true, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Launch(Box<launch::LaunchArgs>),
    /// Print a job file for Slurm or Kubernetes
    #[command(subcommand)]
    Emit(emit::Emit),
    New(new::NewArgs),
    Init(new::InitArgs),
    Setup(setup::SetupArgs),
    Config(Box<config::ConfigArgs>),
    Doctor(doctor::DoctorArgs),
    Env(env::EnvArgs),
    Test(selftest::TestArgs),
    #[command(name = doctor::ROLE, hide = true)]
    DoctorsRole,
    #[command(hide = true)]
    NotebookAgent(Box<notebook::AgentArgs>),
    #[command(hide = true)]
    NotebookRank(notebook::RankArgs),
    /// Show what a run would do, without one
    #[command(subcommand)]
    Explain(explain::Explain),
    Estimate(estimate::EstimateArgs),
    /// Look into checkpoints and weights files, check and convert them
    #[command(subcommand)]
    Checkpoint(checkpoint::Checkpoint),
    /// Look at folders of images, and pack them into one file
    #[command(subcommand)]
    Data(data::Data),
    #[command(subcommand)]
    Kernel(kernel::Kernel),
    Kernels(kernels::KernelsArgs),
    Watch(watch::WatchArgs),
    Report(report::ReportArgs),
    Completions(pages::CompletionsArgs),
    Man(pages::ManArgs),
    /// Print the version, as --version does
    Version,
}

fn main() -> ExitCode {
    // Before the arguments: the agent starts this executable in roles that are not for users.
    if let Some(code) = role::run_helper_if_requested() {
        return ExitCode::from(code);
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(answer) => {
            if let Some(line) = launch::refusal(&answer, std::env::args_os().skip(1))
                .or_else(|| usage::line(&answer))
            {
                output::say(&line);
                return ExitCode::from(USAGE);
            }
            // Help and versions are answers, too; `| head` may close the pipe.
            let _ = answer.print();
            return ExitCode::from(if answer.use_stderr() { USAGE } else { 0 });
        }
    };
    let out = || Answer::new(io::stdout().lock());
    let result = match &cli.command {
        Command::Launch(args) => launch::run(args),
        Command::Emit(scheduler) => emit::run(scheduler, io::stdout().lock()).map(|()| 0),
        Command::New(args) => new::run(args, out()).map(|()| 0),
        Command::Init(args) => new::init(args, out()).map(|()| 0),
        Command::Setup(args) => setup::run(args, out()).map(|()| 0),
        Command::Config(args) => config::run(args),
        Command::Estimate(args) => estimate::run(args, out()).map(|()| 0),
        Command::Checkpoint(question) => checkpoint::run(question, out()),
        Command::Data(question) => data::run(question, out()).map(|()| 0),
        Command::Report(args) => report::run(args, out()).map(|()| 0),
        Command::Kernel(kernel) => kernel::run(kernel, out()).map(|()| 0),
        Command::Kernels(args) => kernels::run(args, out()).map(|()| 0),
        Command::Watch(args) => watch::run(args, io::stdout()),
        Command::Completions(args) => pages::completions(&Cli::command(), args),
        Command::Man(args) => pages::man(Cli::command(), args),
        Command::Version => pages::version(&Cli::command()),
        Command::Doctor(args) => doctor::run(args),
        Command::Test(args) => selftest::run(args),
        Command::Env(args) => env::run(args, out()).map(|()| 0),
        Command::DoctorsRole => doctor::play(),
        Command::NotebookAgent(args) => notebook::launch(args),
        Command::NotebookRank(args) => notebook::call(args),
        Command::Explain(question) => explain::run(question, out()).map(|()| 0),
    };
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            match error.downcast_ref() {
                // One line per host.
                Some(LaunchError::Hosts(_)) => output::say_lines(&with_causes(error.as_ref())),
                _ => output::say(&with_causes(error.as_ref())),
            }
            ExitCode::from(exit_code(&error))
        }
    }
}

/// Returns the shell's codes for errors that a user can fix, and 1 for others. A job that was started exits with the
/// code of its first failing rank instead.
fn exit_code(error: &anyhow::Error) -> u8 {
    if error.is::<config::Usage>()
        || error.is::<SecretError>()
        || error.is::<HostListError>()
        || error.downcast_ref().is_some_and(ConfigError::is_for_user)
    {
        return USAGE;
    }
    if let Some(error) = error.downcast_ref::<RemoteError>() {
        return error.exit_code();
    }
    match error.downcast_ref() {
        Some(
            LaunchError::OptionOutOfRange { .. }
            | LaunchError::NoSuchLocalRank { .. }
            | LaunchError::Rendezvous { .. }
            | LaunchError::ForPython { .. }
            | LaunchError::Raw { .. }
            | LaunchError::Scheduler(_)
            | LaunchError::Device(_)
            | LaunchError::Bind(_),
        ) => USAGE,
        None if error.is::<EmitError>() => USAGE,
        Some(LaunchError::Hosts(error)) => error.exit_code(),
        Some(LaunchError::Program(error)) => error.exit_code(),
        _ => error.downcast_ref().map_or(1, ProgramError::exit_code),
    }
}

const USAGE: u8 = 2;
const EXAMPLES: &str = "\
Examples:
  brigade new my-project
  brigade launch --nproc 2 ./train --epochs 4
  brigade launch --nproc 4 train.py
  brigade config default
  brigade explain shards --samples 50 --batch-size 12 --nproc 4
  brigade explain schedule one-cycle --max-lr 0.3 --steps 41";
