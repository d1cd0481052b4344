//! `brigade launch --emit`: prints a job file instead of starting the job.

use std::ffi::OsString;
use std::io::{self, Write};
use std::time::Duration;

use brigade_launch::emit::{JobFile, Target, time_limit};
use clap::{Args, ValueEnum};

/// Flags for the file.
#[derive(Debug, Args)]
#[command(next_help_heading = "Job files")]
pub(crate) struct EmitArgs {
    /// Print a file for a scheduler that runs this job, and start nothing
    #[arg(long, value_enum, value_name = "SCHEDULER")]
    pub(crate) emit: Option<TargetArg>,

    /// Name of the job [default: the program's]
    #[arg(long, value_name = "NAME", requires = "emit")]
    job_name: Option<String>,

    /// Cores that each host must have free
    #[arg(long, value_name = "N", requires = "emit")]
    cpus_per_node: Option<usize>,

    /// GPUs that each host must have free
    #[arg(long, value_name = "N", requires = "emit")]
    gpus_per_node: Option<usize>,

    /// How long the job may run: 90m, 2h, 3d, 2:30:00 or 1-12:00:00
    #[arg(long, value_name = "TIME", value_parser = time_limit, requires = "emit")]
    time_limit: Option<Duration>,

    /// Partition, for Slurm
    #[arg(long, value_name = "NAME", requires = "emit")]
    partition: Option<String>,

    /// Account, for Slurm
    #[arg(long, value_name = "NAME", requires = "emit")]
    account: Option<String>,

    /// Image with brigade and the program, for Kubernetes [default: a placeholder]
    #[arg(long, requires = "emit")]
    image: Option<String>,
}

/// For whom the file is.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum TargetArg {
    /// A batch script for sbatch
    Slurm,
    /// A PyTorchJob for Kubeflow's training operator
    #[value(alias = "pytorchjob")]
    K8s,
    /// A JobSet for Kubernetes
    Jobset,
}

impl EmitArgs {
    /// The job of these flags for the launchers and this command, with what the flags here say.
    pub(crate) fn job_file(&self, flags: Vec<OsString>, command: &[OsString]) -> JobFile {
        JobFile {
            name: self.job_name.clone(),
            flags,
            command: command.to_vec(),
            cpus: self.cpus_per_node,
            gpus: self.gpus_per_node,
            time_limit: self.time_limit,
            partition: self.partition.clone(),
            account: self.account.clone(),
            image: self.image.clone(),
            ..JobFile::default()
        }
    }
}

/// Prints the file. A reader that has seen enough (`| head`) is no error.
pub(crate) fn print(job: &JobFile, target: TargetArg, mut out: impl Write) -> anyhow::Result<()> {
    let target = match target {
        TargetArg::Slurm => Target::Slurm,
        TargetArg::K8s => Target::PyTorchJob,
        TargetArg::Jobset => Target::JobSet,
    };
    match out.write_all(job.emit(target)?.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}
