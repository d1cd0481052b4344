//! `brigade emit`: prints a job file, which starts `brigade launch` on every host of the job.

use std::io::{self, Write};
use std::time::Duration;

use clap::{Arg, Args, Subcommand};

use crate::job_file::{JobFile, Target, time_limit};
use crate::launch::{JobArgs, settings_as_flags};

/// The scheduler.
#[derive(Debug, Subcommand)]
pub(crate) enum Emit {
    Slurm(Box<SlurmArgs>),
    #[command(alias = "pytorchjob")]
    K8s(Box<PyTorchJobArgs>),
    Jobset(Box<JobSetArgs>),
}

/// Print a batch script for Slurm's sbatch
///
/// The script runs one `brigade launch` on each node, with every setting of this command line, of the
/// environment and of the settings file. Slurm sets the number of nodes and their addresses.
#[derive(Debug, Args)]
#[command(mut_args(shown), override_usage = SLURM_USAGE, after_help = SLURM_EXAMPLES)]
pub(crate) struct SlurmArgs {
    #[command(flatten)]
    resources: ResourceArgs,

    /// Slurm's partition
    #[arg(long, value_name = "NAME", help_heading = JOB_FILE)]
    partition: Option<String>,

    /// Slurm's account
    #[arg(long, value_name = "NAME", help_heading = JOB_FILE)]
    account: Option<String>,

    /// Image with brigade and the program, for Pyxis [default: none]
    #[arg(long, help_heading = JOB_FILE)]
    image: Option<String>,

    #[command(flatten)]
    job: JobArgs,
}

/// Print a PyTorchJob for Kubeflow's training operator
///
/// Each pod runs one `brigade launch`, with every setting of this command line, of the environment and
/// of the settings file. The operator sets the number of pods and their addresses.
#[derive(Debug, Args)]
#[command(mut_args(shown), override_usage = K8S_USAGE, after_help = K8S_EXAMPLES)]
pub(crate) struct PyTorchJobArgs {
    #[command(flatten)]
    manifest: ManifestArgs,
}

/// Print a JobSet for Kubernetes
///
/// Each pod runs one `brigade launch`, with every setting of this command line, of the environment and
/// of the settings file. The number of pods is fixed (--nnodes N).
#[derive(Debug, Args)]
#[command(mut_args(shown), override_usage = JOBSET_USAGE, after_help = JOBSET_EXAMPLES)]
pub(crate) struct JobSetArgs {
    #[command(flatten)]
    manifest: ManifestArgs,
}

// Flattened fields have no doc comments, because these would become the help's first paragraph.
#[derive(Debug, Args)]
struct ManifestArgs {
    #[command(flatten)]
    resources: ResourceArgs,

    /// Image with brigade and the program [default: a placeholder]
    #[arg(long, help_heading = JOB_FILE)]
    image: Option<String>,

    #[command(flatten)]
    job: JobArgs,
}

#[derive(Debug, Args)]
struct ResourceArgs {
    /// Name of the job [default: the program's]
    #[arg(long, value_name = "NAME", help_heading = JOB_FILE)]
    job_name: Option<String>,

    /// Cores that each host must have free
    #[arg(long, value_name = "N", help_heading = JOB_FILE)]
    cpus_per_node: Option<usize>,

    /// GPUs that each host must have free
    #[arg(long, value_name = "N", help_heading = JOB_FILE)]
    gpus_per_node: Option<usize>,

    /// Time limit of the job: 90m, 2h, 3d, 2:30:00 or 1-12:00:00
    #[arg(long, value_name = "TIME", value_parser = time_limit, help_heading = JOB_FILE)]
    time_limit: Option<Duration>,
}

/// Prints the job file.
pub(crate) fn run(scheduler: &Emit, out: impl Write) -> anyhow::Result<()> {
    let (target, job) = match scheduler {
        Emit::Slurm(args) => {
            let job = args.resources.add_to(args.job.job_file()?);
            let (partition, account) = (args.partition.clone(), args.account.clone());
            let image = args.image.clone();
            (Target::Slurm, JobFile { partition, account, image, ..job })
        }
        Emit::K8s(args) => (Target::PyTorchJob, args.manifest.job_file()?),
        Emit::Jobset(args) => (Target::JobSet, args.manifest.job_file()?),
    };
    print(&job.emit(target)?, out)
}

impl ManifestArgs {
    fn job_file(&self) -> anyhow::Result<JobFile> {
        let job = self.resources.add_to(self.job.job_file()?);
        Ok(JobFile { image: self.image.clone(), ..job })
    }
}

impl ResourceArgs {
    fn add_to(&self, job: JobFile) -> JobFile {
        JobFile {
            name: self.job_name.clone(),
            cpus: self.cpus_per_node,
            gpus: self.gpus_per_node,
            time_limit: self.time_limit,
            ..job
        }
    }
}

/// Prints the text. A closed pipe (`| head`) is not an error.
fn print(text: &str, mut out: impl Write) -> anyhow::Result<()> {
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}

/// Hides options that a job file cannot contain, and those about building: the program must be built already.
fn shown(arg: Arg) -> Arg {
    if arg.get_id() == "command" {
        let help = "Program or Python script, as the hosts have it, and its arguments";
        return arg.help(help).long_help(help);
    }
    let is_hidden = !settings_as_flags::can_be_given(arg.get_id().as_str());
    if is_hidden { arg.hide(true) } else { arg }
}

const JOB_FILE: &str = "Job file";

const SLURM_USAGE: &str = "brigade emit slurm [OPTIONS] [--] <PROGRAM> [ARGS]...";
const SLURM_EXAMPLES: &str = "\
Examples:
  brigade emit slurm --nnodes 2 --nproc 4 ./train > train.sbatch
  brigade emit slurm --nnodes 2 --gpus-per-node 8 --time-limit 12h ./train | sbatch
  brigade emit slurm --nnodes 2 --image registry#repo/train:1 train > train.sbatch";

const K8S_USAGE: &str = "brigade emit k8s [OPTIONS] [--] <PROGRAM> [ARGS]...";
const K8S_EXAMPLES: &str = "\
Examples:
  brigade emit k8s --nnodes 2 --gpus-per-node 8 --image repo/train:1 ./train > train.yaml
  brigade emit k8s --nnodes 1:4 --max-restarts 3 --image repo/train:1 ./train > train.yaml";

const JOBSET_USAGE: &str = "brigade emit jobset [OPTIONS] [--] <PROGRAM> [ARGS]...";
const JOBSET_EXAMPLES: &str = "\
Examples:
  brigade emit jobset --nnodes 2 --gpus-per-node 8 --image repo/train:1 ./train > train.yaml";
