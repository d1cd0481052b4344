//! Job files: the same job as a batch script for Slurm, or as a manifest for Kubernetes.
//!
//! The file starts one `brigade launch` on every host, with the flags that were given here. Number
//! and names of the hosts are not in it twice: the launchers find them ([`Surroundings`]).
//!
//! [`Surroundings`]: brigade_launch::Surroundings

mod kubernetes;
mod slurm;
#[cfg(test)]
mod tests;
mod yaml;

use std::ffi::{OsStr, OsString};
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use brigade_launch::Secret;

/// Which scheduler a job file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// A batch script for `sbatch`.
    Slurm,
    /// A manifest for Kubeflow's training operator.
    PyTorchJob,
    /// A manifest for Kubernetes' JobSet.
    JobSet,
}

/// A job to be written down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct JobFile {
    /// Name of the job. Default: the program's.
    pub(crate) name: Option<String>,
    /// Number of hosts; a real range makes the job elastic.
    pub(crate) nodes: RangeInclusive<usize>,
    /// Ranks on each host: a number, `auto`, `cpu` or `gpu`. Default: one for each of
    /// [`gpus`](Self::gpus), else one, as `brigade launch` itself would start them.
    pub(crate) nproc: Option<String>,
    /// Flags of `brigade launch` that go into the file: every setting but those that the scheduler
    /// says.
    pub(crate) flags: Vec<OsString>,
    /// The program and its arguments.
    pub(crate) command: Vec<OsString>,
    /// Cores on each host.
    pub(crate) cpus: Option<usize>,
    /// GPUs on each host.
    pub(crate) gpus: Option<usize>,
    /// How long the job may run.
    pub(crate) time_limit: Option<Duration>,
    /// How long ranks may take to stop after SIGTERM: the scheduler waits a little longer.
    pub(crate) shutdown_timeout: Duration,
    /// Variables for the job. Slurm passes on the whole environment of `sbatch` besides.
    pub(crate) env: Vec<(String, String)>,
    /// Slurm's partition.
    pub(crate) partition: Option<String>,
    /// Slurm's account.
    pub(crate) account: Option<String>,
    /// Kubernetes' image. Default: a placeholder that Kubernetes refuses.
    pub(crate) image: Option<String>,
    /// The launchers of a job with several hosts prove to each other that they know a secret: this one,
    /// in a manifest for Kubernetes; one that Slurm's script makes for each run.
    pub(crate) secret: Option<Secret>,
}

/// One host, one rank, nothing to run.
impl Default for JobFile {
    fn default() -> Self {
        Self {
            name: None,
            nodes: 1..=1,
            nproc: None,
            flags: Vec::new(),
            command: Vec::new(),
            cpus: None,
            gpus: None,
            time_limit: None,
            shutdown_timeout: Duration::from_secs(30),
            env: Vec::new(),
            partition: None,
            account: None,
            image: None,
            secret: None,
        }
    }
}

/// Why a job cannot be written down.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum EmitError {
    /// An option that the scheduler has nothing for.
    #[error("--{option} means nothing to {scheduler}: leave it out")]
    NotFor {
        /// The option's name.
        option: &'static str,
        /// The scheduler.
        scheduler: &'static str,
    },
    /// A text that does not fit into the file.
    #[error("{what} {text:?} {problem}")]
    Unfit {
        /// Which text.
        what: &'static str,
        /// The text.
        text: String,
        /// Why it does not fit, and what would.
        problem: &'static str,
    },
    /// An elastic job where there are none.
    #[error(
        "--nnodes {min}:{max}: a JobSet has a fixed number of pods; use --nnodes {max}, or \
         `brigade emit k8s` for an elastic PyTorchJob"
    )]
    NotElastic {
        /// Fewest hosts.
        min: usize,
        /// Most hosts.
        max: usize,
    },
    /// A range of hosts that begins with none.
    #[error("--nnodes {min}:{max} is not possible: a job has at least one host")]
    NoHosts {
        /// Fewest hosts.
        min: usize,
        /// Most hosts.
        max: usize,
    },
}

impl JobFile {
    /// The file's text.
    ///
    /// Errors: what the scheduler's file cannot express.
    pub(crate) fn emit(&self, target: Target) -> Result<String, EmitError> {
        let (min, max) = (*self.nodes.start(), *self.nodes.end());
        if min == 0 || min > max {
            return Err(EmitError::NoHosts { min, max });
        }
        for (name, _) in &self.env {
            let unfit = |problem| EmitError::Unfit { what: "--env", text: name.clone(), problem };
            let starts = |c: char| c.is_ascii_alphabetic() || c == '_';
            if !name.starts_with(starts) || !name.chars().all(|c| starts(c) || c.is_ascii_digit()) {
                return Err(unfit("is not a variable's name: use letters, digits and `_`"));
            }
        }
        match target {
            Target::Slurm => slurm::script(self),
            Target::PyTorchJob => kubernetes::pytorch_job(self),
            Target::JobSet => kubernetes::job_set(self),
        }
    }

    /// What the scheduler is told of the ranks on each host. Left to itself it would start one for each
    /// core where there is no GPU.
    fn nproc(&self) -> String {
        let default = || self.gpus.unwrap_or(1).to_string();
        self.nproc.clone().unwrap_or_else(default)
    }

    /// The secret, where there are launchers to prove that they know it.
    fn guard(&self) -> Option<&Secret> {
        self.secret.as_ref().filter(|_| *self.nodes.end() > 1)
    }

    /// `brigade launch FLAGS -- PROGRAM ARGS`
    fn launch(&self) -> impl Iterator<Item = &OsStr> {
        let words = ["brigade", "launch"].into_iter().map(OsStr::new);
        let end = std::iter::once(OsStr::new("--"));
        let flags = self.flags.iter().map(OsString::as_os_str);
        words.chain(flags).chain(end).chain(self.command.iter().map(OsString::as_os_str))
    }

    /// The given name, or one from the program's: lowercase letters, digits and `-`, with a letter first.
    fn name(&self) -> Result<String, EmitError> {
        if let Some(name) = &self.name {
            let fits = name.starts_with(|c: char| c.is_ascii_lowercase())
                && name.ends_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
                && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
                && name.len() <= MAX_NAME_LEN;
            let problem = "is not a valid job name: use up to 40 lowercase letters, digits and `-`, \
                           with a letter first and no `-` last";
            return if fits {
                Ok(name.clone())
            } else {
                Err(EmitError::Unfit { what: "--job-name", text: name.clone(), problem })
            };
        }
        let interpreted = |word: &&OsString| {
            let name = Path::new(word).file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("python")
        };
        let program = match self.command.as_slice() {
            [program, script, ..] if interpreted(&program) => script,
            [program, ..] => program,
            [] => return Ok(NAMELESS.to_owned()),
        };
        let stem = Path::new(program).file_stem().unwrap_or_default().to_string_lossy();
        let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
        let name: String = stem.chars().map(plain).take(MAX_NAME_LEN).collect();
        let name = name.trim_matches('-');
        Ok(if name.starts_with(|c: char| c.is_ascii_lowercase()) {
            name.to_owned()
        } else {
            format!("{NAMELESS}-{name}").trim_matches('-').to_owned()
        })
    }

    /// The first of these options that is set: for a scheduler that has nothing for it.
    fn refuse<const N: usize>(
        scheduler: &'static str,
        options: [(&'static str, bool); N],
    ) -> Result<(), EmitError> {
        match options.iter().find(|(_, is_set)| *is_set) {
            Some((option, _)) => Err(EmitError::NotFor { option, scheduler }),
            None => Ok(()),
        }
    }
}

/// `90m`, `2h`, `3d`, `2:30:00` or `1-12:00:00` (days-hours:minutes:seconds).
///
/// Two numbers with a colon, or one without a unit, are refused: schedulers disagree on what they
/// mean.
pub(crate) fn time_limit(text: &str) -> Result<Duration, String> {
    let seconds = || {
        if let Some((at, unit)) = text.char_indices().next_back().filter(|(_, c)| c.is_alphabetic())
        {
            let seconds: u64 = match unit {
                's' => 1,
                'm' => 60,
                'h' => 3600,
                'd' => 86_400,
                _ => return None,
            };
            return text[..at].parse::<u64>().ok()?.checked_mul(seconds);
        }
        let (days, clock) = text.split_once('-').unwrap_or(("0", text));
        let parts: Vec<u64> = clock.split(':').map_while(|part| part.parse().ok()).collect();
        let [hours, minutes, seconds] = parts[..] else { return None };
        let days = days.parse::<u64>().ok()?;
        let hours = days.checked_mul(24)?.checked_add(hours)?;
        let in_range = minutes < 60 && seconds < 60 && clock.split(':').count() == 3;
        hours.checked_mul(3600)?.checked_add(minutes * 60 + seconds).filter(|_| in_range)
    };
    match seconds() {
        Some(seconds) if seconds > 0 => Ok(Duration::from_secs(seconds)),
        _ => Err("write it as 90m, 2h, 3d, 2:30:00 or 1-12:00:00".to_owned()),
    }
}

const NAMELESS: &str = "job";
/// Schedulers make longer names from it, of at most 63 characters.
const MAX_NAME_LEN: usize = 40;
