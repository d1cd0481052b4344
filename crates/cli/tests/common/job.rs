//! Run of `brigade launch` under test, which must leave nothing behind.

#![allow(dead_code)] // each kind of tests uses a part of this

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use brigade_test_needs::TimeLimit;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

pub(crate) const BRIGADE: &str = env!("CARGO_BIN_EXE_brigade");

/// Returns the program, without variables of the test's environment that it would read.
pub(crate) fn brigade() -> Command {
    let mut command = Command::new(BRIGADE);
    for name in [
        "OMP_NUM_THREADS",
        "OMP_WAIT_POLICY",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "TORCHELASTIC_ERROR_FILE",
    ] {
        command.env_remove(name);
    }
    // Settings of the caller must not be read either.
    command.env("BRIGADE_CONFIG", "/dev/null");
    command
}

/// Job that has not been started: `brigade launch --nproc N`, and a folder for its ranks' files.
pub(crate) struct Job {
    pub(crate) command: Command,
    folder: TempDir,
    /// Folder for temporary files, of which none may remain.
    scratch: TempDir,
}

impl Job {
    pub(crate) fn new(nproc: usize) -> Self {
        let mut command = brigade();
        command.args(["launch", "--nproc", &nproc.to_string()]);
        Self::of(command)
    }

    /// Creates a job from a command that already has the flags.
    pub(crate) fn of(mut command: Command) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let scratch = tempfile::tempdir().unwrap();
        command.env("DIR", folder.path()).env("TMPDIR", scratch.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self { command, folder, scratch }
    }

    /// Returns the folder of the ranks' files.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn flag(mut self, flag: &str) -> Self {
        self.command.arg(flag);
        self
    }

    pub(crate) fn words<'a>(mut self, words: impl IntoIterator<Item = &'a str>) -> Self {
        self.command.args(words);
        self
    }

    pub(crate) fn sh(self, script: &str) -> Self {
        self.words(["sh", "-c", script])
    }

    pub(crate) fn start(mut self) -> Running {
        let mut child = self.command.spawn().unwrap();
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take().map(BufReader::new));
        let Self { folder, scratch, .. } = self;
        // Reads from the launcher and waits for its end have no limit of their own.
        let limit = TimeLimit::new(&format!("{:?}", self.command), 2 * LIMIT);
        Running {
            child: Launcher(child),
            folder,
            scratch,
            stdout,
            stderr,
            read: Vec::new(),
            _limit: limit,
        }
    }

    pub(crate) fn run(self) -> Run {
        self.start().finish()
    }
}

/// Job that has been started.
pub(crate) struct Running {
    child: Launcher,
    folder: TempDir,
    scratch: TempDir,
    stdout: Option<ChildStdout>,
    stderr: Option<BufReader<ChildStderr>>,
    /// Part of stderr that has been read.
    read: Vec<u8>,
    _limit: TimeLimit,
}

impl Running {
    pub(crate) fn pid(&self) -> i32 {
        self.child.0.id().cast_signed()
    }

    pub(crate) fn send(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).unwrap();
    }

    /// Returns `true` if the launcher has ended. It was not waited for yet, so its process ID is not reused.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(state_of(self.pid()), None | Some('Z' | 'X'))
    }

    /// Waits until the ranks have created this many files.
    #[track_caller]
    pub(crate) fn wait_for_files(&self, count: usize) {
        wait_until(|| fs::read_dir(self.folder.path()).unwrap().count() >= count);
    }

    /// Waits until a rank has created this file.
    #[track_caller]
    pub(crate) fn wait_for(&self, name: &str) {
        wait_until(|| self.folder.path().join(name).exists());
    }

    /// Returns the numbers in the files with this prefix, once they exist.
    pub(crate) fn read_files(&self, prefix: &str) -> Vec<i32> {
        let mut numbers = Vec::new();
        for file in fs::read_dir(self.folder.path()).unwrap().map(Result::unwrap) {
            if file.file_name().to_str().unwrap().starts_with(prefix) {
                numbers.push(fs::read_to_string(file.path()).unwrap().trim().parse().unwrap());
            }
        }
        numbers
    }

    pub(crate) fn wait_for_stderr(&mut self, text: &str) {
        let stderr = self.stderr.as_mut().unwrap();
        loop {
            let start = self.read.len();
            assert_ne!(stderr.read_until(b'\n', &mut self.read).unwrap(), 0, "{text} never came");
            if String::from_utf8_lossy(&self.read[start..]).contains(text) {
                return;
            }
        }
    }

    pub(crate) fn take_stdout(&mut self) -> ChildStdout {
        self.stdout.take().unwrap()
    }

    /// Waits until no rank is running, while the launcher may be.
    #[track_caller]
    pub(crate) fn wait_until_no_rank(&self) {
        let watch = 1;
        wait_until(|| self.left().iter().filter(|pid| **pid != self.pid()).count() <= watch);
    }

    /// Reads the remaining output, waits for the end, and checks that no process of the job is left.
    #[track_caller]
    pub(crate) fn finish(mut self) -> Run {
        let stdout = self.stdout.take().map(|mut pipe| {
            thread::spawn(move || {
                let mut bytes = Vec::new();
                pipe.read_to_end(&mut bytes).unwrap();
                bytes
            })
        });
        let mut stderr = std::mem::take(&mut self.read);
        self.stderr.take().unwrap().read_to_end(&mut stderr).unwrap();
        let raw_stdout = stdout.map(|thread| thread.join().unwrap()).unwrap_or_default();
        let status = self.child.0.wait().unwrap();
        let killed = status.signal() == Some(Signal::SIGKILL as i32);
        if killed {
            // The reaper needs a moment; a launcher that ends by itself has already cleaned up.
            wait_until(|| self.left().is_empty());
        }
        assert_eq!(self.left(), [0; 0], "processes are left");
        let is_clean = || fs::read_dir(self.scratch.path()).unwrap().next().is_none();
        if killed {
            wait_until(is_clean);
        }
        assert!(is_clean(), "temporary files are left");
        Run {
            code: status.code().unwrap_or_else(|| 128 + status.signal().unwrap()),
            stdout: String::from_utf8_lossy(&raw_stdout).into_owned(),
            raw_stdout,
            folder: self.folder,
            stderr: String::from_utf8(stderr).unwrap(),
        }
    }

    /// Reads the remaining output and waits for the end. Processes may be left.
    pub(crate) fn outcome(mut self) -> Outcome {
        let pid = self.pid();
        let mut stderr = std::mem::take(&mut self.read);
        self.stderr.take().unwrap().read_to_end(&mut stderr).unwrap();
        let code = self.child.0.wait().unwrap().code().unwrap();
        let stderr = String::from_utf8(stderr).unwrap();
        Outcome { pid, code, stderr, _folders: (self.folder, self.scratch) }
    }

    /// Returns the process ID of the reaper, which cleans up after a launcher that is killed.
    pub(crate) fn watch(&self) -> i32 {
        *reapers_of(self.pid()).first().expect("a launcher has a reaper")
    }

    /// Returns running processes that have this job's folder in their environment, and the reaper, which has no
    /// environment.
    fn left(&self) -> Vec<i32> {
        let mut left = processes_with(&format!("DIR={}", self.folder.path().display()));
        left.extend(reapers_of(self.pid()));
        left
    }
}

/// Process that is killed if the test fails.
struct Launcher(Child);

impl Drop for Launcher {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Job whose launcher has ended.
pub(crate) struct Outcome {
    pub(crate) pid: i32,
    pub(crate) code: i32,
    pub(crate) stderr: String,
    _folders: (TempDir, TempDir),
}

/// Returns running processes with this text in their environment.
pub(crate) fn processes_with(variable: &str) -> Vec<i32> {
    all_processes()
        .filter(|pid| {
            let environ = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environ.split(|byte| *byte == 0).any(|var| var == variable.as_bytes())
                && !matches!(state_of(*pid), None | Some('Z' | 'X'))
        })
        .collect()
}

/// Returns processes that clean up after this launcher.
pub(crate) fn reapers_of(launcher: i32) -> Vec<i32> {
    let mark = format!("brigade\0__reaper\0{launcher}\0");
    all_processes()
        .filter(|pid| {
            let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            command.starts_with(mark.as_bytes())
        })
        .collect()
}

fn all_processes() -> impl Iterator<Item = i32> {
    let processes = fs::read_dir("/proc").unwrap().map(Result::unwrap);
    processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Job that has ended.
pub(crate) struct Run {
    /// Exit code, or 128 + the signal that killed the launcher.
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) raw_stdout: Vec<u8>,
    /// Folder with the ranks' files.
    pub(crate) folder: TempDir,
    pub(crate) stderr: String,
}

impl Run {
    /// Returns a rank's lines on stdout, without the prefix.
    pub(crate) fn lines_of(&self, rank: usize) -> Vec<&str> {
        let prefix = format!("[{rank}] ");
        self.stdout.lines().filter_map(|line| line.strip_prefix(&prefix)).collect()
    }
}

/// Waits for a condition that another process causes.
#[track_caller]
pub(crate) fn wait_until(mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < deadline, "not within {} s", LIMIT.as_secs());
        thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the kernel's letter for a process's state; `None` if the process does not exist.
pub(crate) fn state_of(pid: i32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// Limit that is only exceeded by something that never happens.
const LIMIT: Duration = Duration::from_secs(90);
