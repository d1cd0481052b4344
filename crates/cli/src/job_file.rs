//! Job files: a job as a batch script for Slurm, or as a manifest for Kubernetes.
//!
//! The file starts one `brigade launch` on every host, with the flags of the command line. The number and names of the
//! hosts are not repeated in the flags: the launchers take them from the scheduler ([`Surroundings`]).
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

/// Scheduler that a job file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// A batch script for `sbatch`.
    Slurm,
    /// A manifest for Kubeflow's training operator.
    PyTorchJob,
    /// A manifest for Kubernetes' JobSet.
    JobSet,
}

/// Job to be written to a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct JobFile {
    /// Name of the job. Defaults to the program's name.
    pub(crate) name: Option<String>,
    /// Number of hosts. A range makes the job elastic.
    pub(crate) nodes: RangeInclusive<usize>,
    /// Ranks per host: a number, `auto`, `cpu` or `gpu`. Defaults to one per [`gpus`](Self::gpus), or else to one, as
    /// in `brigade launch`.
    pub(crate) nproc: Option<String>,
    /// Flags of `brigade launch` for the file: all settings except those that the scheduler provides.
    pub(crate) flags: Vec<OsString>,
    /// Program with its arguments.
    pub(crate) command: Vec<OsString>,
    /// Number of cores per host.
    pub(crate) cpus: Option<usize>,
    /// Number of GPUs per host.
    pub(crate) gpus: Option<usize>,
    /// Maximum duration of the job.
    pub(crate) time_limit: Option<Duration>,
    /// Time that ranks have to stop after SIGTERM. The scheduler waits a little longer.
    pub(crate) shutdown_timeout: Duration,
    /// Environment variables of the job. Slurm also passes on the whole environment of `sbatch`.
    pub(crate) env: Vec<(String, String)>,
    /// Slurm partition of the job.
    pub(crate) partition: Option<String>,
    /// Slurm account of the job.
    pub(crate) account: Option<String>,
    /// Container image. Defaults to a placeholder that Kubernetes refuses, and to no container for Slurm.
    pub(crate) image: Option<String>,
    /// Shared secret by which the launchers of several hosts authenticate each other: this one in a manifest for
    /// Kubernetes; Slurm's script generates one for each run.
    pub(crate) secret: Option<Secret>,
}

/// Describes a job of one host and one rank, without a program.
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

/// Error of writing a job file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum EmitError {
    /// The scheduler has no equivalent of an option.
    #[error("--{option} does not apply to {scheduler}: leave it out")]
    NotFor {
        /// Name of the option.
        option: &'static str,
        /// Name of the scheduler.
        scheduler: &'static str,
    },
    /// A text cannot be written into the file.
    #[error("{what} {text:?} {problem}")]
    Unfit {
        /// Meaning of the text.
        what: &'static str,
        /// Text that was given.
        text: String,
        /// Reason, with a valid alternative.
        problem: &'static str,
    },
    /// The scheduler has no elastic jobs.
    #[error(
        "--nnodes {min}:{max}: a JobSet has a fixed number of pods; use --nnodes {max}, or \
         `brigade emit k8s` for an elastic PyTorchJob"
    )]
    NotElastic {
        /// Minimum number of hosts.
        min: usize,
        /// Maximum number of hosts.
        max: usize,
    },
    /// The range of hosts begins with 0.
    #[error("--nnodes {min}:{max} is not possible: a job has at least one host")]
    NoHosts {
        /// Minimum number of hosts.
        min: usize,
        /// Maximum number of hosts.
        max: usize,
    },
}

impl JobFile {
    /// Returns the text of the file.
    ///
    /// # Errors
    /// Fails for options that the scheduler's file cannot express.
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

    /// Returns the number of ranks per host for the scheduler's settings. Without a setting, the scheduler would start
    /// one per core on hosts without GPUs.
    fn nproc(&self) -> String {
        let default = || self.gpus.unwrap_or(1).to_string();
        self.nproc.clone().unwrap_or_else(default)
    }

    /// Returns the secret if there are several launchers, which need it.
    fn guard(&self) -> Option<&Secret> {
        self.secret.as_ref().filter(|_| *self.nodes.end() > 1)
    }

    /// Returns the command `brigade launch FLAGS -- PROGRAM ARGS`.
    fn launch(&self) -> impl Iterator<Item = &OsStr> {
        let words = ["brigade", "launch"].into_iter().map(OsStr::new);
        let end = std::iter::once(OsStr::new("--"));
        let flags = self.flags.iter().map(OsString::as_os_str);
        words.chain(flags).chain(end).chain(self.command.iter().map(OsString::as_os_str))
    }

    /// Returns the given name, or one derived from the program's: lowercase letters, digits and `-`, with a letter
    /// first.
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

    /// Fails for the first of these options that is set: the scheduler has no equivalent.
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

/// Parses `90m`, `2h`, `3d`, `2:30:00` or `1-12:00:00` (days-hours:minutes:seconds).
///
/// Two numbers with a colon, or one without a unit, are refused: their meaning differs between schedulers.
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
/// Maximum length: schedulers derive longer names from it, of at most 63 characters.
const MAX_NAME_LEN: usize = 40;
