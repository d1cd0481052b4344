//! The folder of a job: log files and error files, in torchrun's layout.
//!
//! `<log dir>/<run id>_<random>/attempt_<n>/<local rank>/{stdout.log,stderr.log,error.json}`, and
//! beside the ranks' folders `filtered_stdout.log` and `filtered_stderr.log`.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use brigade_rendezvous::Stream;
use nix::unistd::mkdtemp;

use super::plan::{LogFolder, OutputPlan};
use crate::LaunchError;

/// Folder of a job. A temporary one is removed when this value is dropped.
#[derive(Debug, Default)]
pub(crate) struct RunFolder {
    path: Option<PathBuf>,
    stays: bool,
}

/// Folder of one attempt, with a subfolder for each local rank.
#[derive(Clone, Debug, Default)]
pub(crate) struct AttemptFolder {
    path: Option<PathBuf>,
    /// Path of the job's folder, if it is reported to the user.
    run: Option<PathBuf>,
}

impl RunFolder {
    /// Returns the path of the temporary folder that is removed with the job, if the plan has one. It is determined
    /// before the folder is created, so that the reaper can remove it even if this process is killed.
    pub(crate) fn passing(plan: &OutputPlan, agent_id: &str) -> Option<PathBuf> {
        let here = std::path::absolute(std::env::temp_dir().join(agent_id)).ok();
        here.filter(|_| matches!(plan.folder, LogFolder::Ephemeral))
    }

    /// Creates the job's folder. `agent_id` is unique to this process.
    ///
    /// Fails if the folder that the user asked for cannot be written to.
    pub(crate) fn create(
        plan: &OutputPlan,
        run_id: &str,
        agent_id: &str,
    ) -> Result<Self, LaunchError> {
        let temporary = std::env::temp_dir();
        let under = match &plan.folder {
            LogFolder::Under(path) => path,
            LogFolder::Temporary => &temporary,
            LogFolder::Ephemeral => {
                // The user did not ask for error files: the job can run without them.
                let made = |path: &PathBuf| DirBuilder::new().mode(0o700).create(path).is_ok();
                return Ok(Self { path: Self::passing(plan, agent_id).filter(made), stays: false });
            }
            LogFolder::Discard => return Ok(Self { path: None, stays: false }),
        };
        // The system's folder for temporary files is not created here.
        let made = if under == &temporary { Ok(()) } else { fs::create_dir_all(under) };
        match made.and_then(|()| unique(under, run_id)) {
            Ok(path) => Ok(Self { path: Some(path), stays: true }),
            Err(cause) => Err(LaunchError::LogFolder { path: under.clone(), cause }),
        }
    }

    /// Creates the folder of an attempt, with a subfolder for each rank of this host.
    pub(crate) fn attempt(&self, number: u32, nproc: usize) -> Result<AttemptFolder, LaunchError> {
        let Some(run) = &self.path else { return Ok(AttemptFolder::default()) };
        let path = run.join(format!("attempt_{number}"));
        for local_rank in 0..nproc {
            if let Err(cause) = fs::create_dir_all(path.join(local_rank.to_string())) {
                if !self.stays {
                    return Ok(AttemptFolder::default());
                }
                return Err(LaunchError::LogFolder { path, cause });
            }
        }
        Ok(AttemptFolder { path: Some(path), run: self.stays.then(|| run.clone()) })
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        if let Some(path) = self.path.take().filter(|_| !self.stays) {
            // Temporary files that cannot be removed are not a reason to fail a job.
            let _ = fs::remove_dir_all(path);
        }
    }
}

impl AttemptFolder {
    /// Returns the path of a local rank's error file, if it has one.
    pub(crate) fn error_file(&self, local_rank: usize) -> Option<PathBuf> {
        Some(self.path.as_ref()?.join(local_rank.to_string()).join("error.json"))
    }

    /// Returns the job's folder, if it is permanent.
    pub(crate) fn run(&self) -> Option<&Path> {
        self.run.as_deref()
    }

    /// Creates the log file of one stream of one rank. Returns `None` if logs are not kept.
    pub(crate) fn log(
        &self,
        local_rank: usize,
        stream: Stream,
    ) -> Result<Option<LogFile>, LaunchError> {
        self.open(|path| path.join(local_rank.to_string()).join(format!("{}.log", stream.name())))
    }

    /// Creates the file for the collected lines of one stream of all ranks.
    pub(crate) fn filtered(&self, stream: Stream) -> Result<Option<LogFile>, LaunchError> {
        self.open(|path| path.join(format!("filtered_{}.log", stream.name())))
    }

    fn open(&self, name: impl FnOnce(&Path) -> PathBuf) -> Result<Option<LogFile>, LaunchError> {
        let Some(path) = self.path.as_deref().map(name) else { return Ok(None) };
        match File::create(&path) {
            Ok(file) => Ok(Some(LogFile { file, path })),
            Err(cause) if cause.raw_os_error() == Some(nix::Error::EMFILE as i32) => {
                let action = format!("open {} (`ulimit -n` is too low)", path.display());
                Err(LaunchError::System { action, cause })
            }
            Err(cause) => Err(LaunchError::LogFolder { path, cause }),
        }
    }
}

/// Folder of an attempt, and the files in it that are written from its start on.
///
/// Creating them may take long on a file system that does not answer.
#[derive(Debug, Default)]
pub(crate) struct AttemptFiles {
    pub(crate) folder: AttemptFolder,
    /// Log files, by local rank and stream.
    pub(super) logs: Vec<[Option<LogFile>; 2]>,
    /// Files of the lines that are collected from all ranks, by stream.
    pub(super) filtered: [Option<LogFile>; 2],
}

impl AttemptFiles {
    /// Creates the log folder and its files.
    ///
    /// Fails if the user has asked for files, and they cannot be created.
    pub(crate) fn make(
        plan: &OutputPlan,
        run: &RunFolder,
        attempt: u32,
        nproc: usize,
    ) -> Result<Self, LaunchError> {
        let folder = run.attempt(attempt, nproc)?;
        let mut this = Self { folder, ..Self::default() };
        for stream in Stream::BOTH {
            if plan.duplicate[stream.index()].is_some() {
                this.filtered[stream.index()] = this.folder.filtered(stream)?;
            }
        }
        for local_rank in 0..nproc {
            let mut logs = [None, None];
            for stream in Stream::BOTH {
                if plan.route(local_rank, stream).file {
                    logs[stream.index()] = this.folder.log(local_rank, stream)?;
                }
            }
            this.logs.push(logs);
        }
        Ok(this)
    }
}

/// Log file that is being written.
#[derive(Debug)]
pub(crate) struct LogFile {
    pub(crate) file: File,
    pub(crate) path: PathBuf,
}

fn unique(under: &Path, run_id: &str) -> io::Result<PathBuf> {
    // The name may be chosen by the user.
    let name: String =
        run_id.chars().map(|c| if c == '/' || c == '\0' { '_' } else { c }).collect();
    let path = mkdtemp(&under.join(format!("{name}_XXXXXX")))?;
    // The ranks' environment contains the paths of error files, and a rank may change its working folder.
    std::path::absolute(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::{OutputFacts, OutputOptions};

    fn plan(log_dir: &Path) -> OutputPlan {
        let options = OutputOptions { log_dir: Some(log_dir.to_owned()), ..Default::default() };
        OutputPlan::resolve(&options, &OutputFacts::default(), 2).unwrap()
    }

    #[test]
    fn the_layout_is_torchruns() {
        let base = tempfile::tempdir().unwrap();
        let plan = plan(&base.path().join("deep/logs"));
        let run = RunFolder::create(&plan, "../job", "agent").unwrap();
        let attempt = run.attempt(3, 2).unwrap();
        let folder = attempt.run().unwrap().to_owned();
        assert_eq!(folder.parent().unwrap(), base.path().join("deep/logs"));
        assert!(folder.file_name().unwrap().to_str().unwrap().starts_with(".._job_"));
        assert_eq!(attempt.error_file(1), Some(folder.join("attempt_3/1/error.json")));
        let log = attempt.log(1, Stream::Stderr).unwrap().unwrap();
        assert_eq!(log.path, folder.join("attempt_3/1/stderr.log"));
        let filtered = attempt.filtered(Stream::Stdout).unwrap().unwrap();
        assert_eq!(filtered.path, folder.join("attempt_3/filtered_stdout.log"));

        let other = RunFolder::create(&plan, "../job", "agent").unwrap();
        assert_ne!(other.path, run.path, "two jobs of one name");
        drop((run, other));
        assert!(folder.exists(), "logs stay");
    }

    #[test]
    fn a_passing_folder_goes_with_the_job() {
        let options = OutputOptions::default();
        let plan = OutputPlan::resolve(&options, &OutputFacts::default(), 1).unwrap();
        let agent_id = format!("brigade-folder-test-{}", std::process::id());
        let run = RunFolder::create(&plan, "job", &agent_id).unwrap();
        let attempt = run.attempt(0, 1).unwrap();
        let error = attempt.error_file(0).unwrap();
        assert!(error.starts_with(RunFolder::passing(&plan, &agent_id).unwrap()));
        // An existing folder of that name is not touched, and the job runs without one.
        let other = RunFolder::create(&plan, "job", &agent_id).unwrap();
        assert_eq!(other.attempt(0, 1).unwrap().error_file(0), None);
        drop(other);
        assert!(error.parent().unwrap().is_dir() && attempt.run().is_none());
        fs::write(&error, "{}").unwrap();
        drop(run);
        assert!(!error.exists() && !error.ancestors().nth(3).unwrap().exists());
    }

    #[test]
    fn dev_null_keeps_nothing() {
        let run = RunFolder::create(&plan(Path::new("/dev/null")), "job", "agent").unwrap();
        let attempt = run.attempt(0, 2).unwrap();
        assert!(attempt.error_file(0).is_none() && attempt.run().is_none());
        assert!(attempt.log(0, Stream::Stdout).unwrap().is_none());
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_refused() {
        let base = tempfile::tempdir().unwrap();
        let file = base.path().join("file");
        fs::write(&file, "").unwrap();
        let error = RunFolder::create(&plan(&file), "job", "agent").unwrap_err().to_string();
        let expected = format!("cannot keep logs in {}: ", file.display());
        assert!(error.starts_with(&expected), "{error}");
        assert!(error.ends_with("choose another folder with --log-dir"), "{error}");
    }
}
