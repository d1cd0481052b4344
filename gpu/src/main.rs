//! `brigade-gpu`: the runner in the archive of `cargo xtask gpu --pack`, which `run.py` starts.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use brigade_gpu::{Device, Options, PartName, Supplied};
use clap::{Parser, Subcommand, ValueEnum};

/// Tests and measures Brigade on this machine's GPU.
#[derive(Debug, Parser)]
#[command(name = "run.py", bin_name = "run.py", disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Tests and measures Brigade on this machine's GPU, and writes report.md and report.json
    ///
    /// Without a GPU it runs a part of the tests on the CPU. The exit status is 0 where all ran and passed, 1 where
    /// something failed, 3 where nothing failed but not all ran, 2 where it could not begin.
    #[command(override_usage = "run.py [OPTIONS]", bin_name = "run.py")]
    Run(Run),
}

#[derive(Debug, clap::Args)]
struct Run {
    /// Run this part alone; repeat it for several
    #[arg(long, value_name = "PART")]
    only: Vec<PartArgument>,
    /// The time for everything, such as 480s or 8m; each part has a share of it
    #[arg(long, value_name = "TIME", default_value = "480s", value_parser = humantime::parse_duration)]
    budget: Duration,
    /// What tests compute on
    #[arg(long, value_enum, default_value = "auto")]
    device: DeviceArgument,
    /// Tests at once [default: the number of cores, 12 at most]
    #[arg(long, value_name = "NUMBER")]
    jobs: Option<usize>,
    /// Only tests and comparisons with this text in their names; repeat it for several
    #[arg(long = "filter", value_name = "TEXT")]
    filters: Vec<String>,
    /// The time limit of each test
    #[arg(long, value_name = "TIME", default_value = "90s", value_parser = humantime::parse_duration)]
    test_limit: Duration,
    /// Without a GPU, too, run all test programs
    #[arg(long)]
    all: bool,
    /// The folder for the reports
    #[arg(long, value_name = "FOLDER", default_value = "report")]
    report: PathBuf,
    /// The archive's folder
    #[arg(long, hide = true)]
    folder: PathBuf,
    /// The version of libtorch
    #[arg(long, hide = true)]
    libtorch: String,
    /// The version of its CUDA
    #[arg(long, hide = true)]
    cuda: Option<String>,
    /// A Python with PyTorch
    #[arg(long, hide = true)]
    python: Option<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PartArgument {
    /// The machine, its GPUs, what PyTorch and the doctor say of them
    Facts,
    /// The test programs, but the tests of NCCL
    Tests,
    /// The tests of NCCL, and the self-test on as many ranks as there are GPUs
    Nccl,
    /// The benchmarks
    Bench,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum DeviceArgument {
    /// GPUs where there are some
    Auto,
    /// The CPU
    Cpu,
    /// GPUs; without any it is an error
    Cuda,
}

fn main() -> ExitCode {
    let words: Vec<String> =
        std::env::args_os().skip(1).map(|it| it.to_string_lossy().into_owned()).collect();
    if words.first().is_some_and(|it| it == brigade_gpu::EXECUTE) {
        let result = brigade_gpu::execute(&words[1..]);
        return failed(result.err());
    }
    let Command::Run(run) = Arguments::parse().command;
    let options = Options {
        folder: run.folder,
        supplied: Supplied { libtorch: run.libtorch, cuda: run.cuda, python: run.python },
        only: run.only.into_iter().map(PartName::from).collect(),
        budget: run.budget,
        device: run.device.into(),
        jobs: run.jobs,
        filters: run.filters,
        test_limit: run.test_limit,
        all: run.all,
        report: run.report,
    };
    match brigade_gpu::run(&options) {
        Ok(code) => ExitCode::from(code),
        Err(error) => failed(Some(error)),
    }
}

fn failed(error: Option<anyhow::Error>) -> ExitCode {
    if let Some(error) = error {
        eprintln!("error: {error:#}");
    }
    ExitCode::from(2)
}

impl From<PartArgument> for PartName {
    fn from(part: PartArgument) -> Self {
        match part {
            PartArgument::Facts => Self::Facts,
            PartArgument::Tests => Self::Tests,
            PartArgument::Nccl => Self::Nccl,
            PartArgument::Bench => Self::Bench,
        }
    }
}

impl From<DeviceArgument> for Device {
    fn from(device: DeviceArgument) -> Self {
        match device {
            DeviceArgument::Auto => Self::Auto,
            DeviceArgument::Cpu => Self::Cpu,
            DeviceArgument::Cuda => Self::Cuda,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_options_of_the_page_are_understood() {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/gpus.md");
        let page = std::fs::read_to_string(page).unwrap();
        let lines = page.lines().filter_map(|it| it.strip_prefix("python3 brigade-gpu/run.py"));
        // Which is an error of the parser's.
        let lines = lines.filter(|it| !it.contains("--help"));
        let found = ["--folder", "x", "--libtorch", "2.13.0"];
        let mut commands = 0;
        for line in lines {
            let words = line.split('#').next().unwrap_or(line).split_whitespace();
            let words = ["run.py", "run"].into_iter().chain(found).chain(words);
            if let Err(error) = Arguments::try_parse_from(words) {
                panic!("{line}: {error}");
            }
            commands += 1;
        }
        assert!(commands >= 3, "{commands} commands");
    }
}
