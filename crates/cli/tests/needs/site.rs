//! `brigade launch --hosts` under test, on a network of hosts that must be empty afterwards.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use brigade_test_hosts::{Host, Network, inner_process};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::job::BRIGADE;

/// Creates a network of hosts, with a working folder.
pub(crate) fn site(hosts: usize) -> Site {
    let network = Network::new(hosts);
    let work = network.folder().join("work");
    fs::create_dir(&work).unwrap();
    Site { network, work }
}

pub(crate) struct Site {
    pub(crate) network: Network,
    /// Folder that all hosts share, in which the launcher is started.
    pub(crate) work: PathBuf,
}

impl Site {
    pub(crate) fn host(&self, index: usize) -> &Host {
        self.network.host(index)
    }

    /// Returns `brigade launch --hosts LIST` on node1, with the network's ssh.
    pub(crate) fn launch(&self, hosts: &str) -> Launch<'_> {
        self.launch_with(&["--hosts", hosts])
    }

    pub(crate) fn launch_with(&self, arguments: &[&str]) -> Launch<'_> {
        self.launch_on(0, arguments)
    }

    /// Returns `brigade launch` on one of the hosts.
    pub(crate) fn launch_on(&self, host: usize, arguments: &[&str]) -> Launch<'_> {
        let mut command = self.host(host).command_in(&self.work, BRIGADE);
        for (name, _) in std::env::vars() {
            // Variables of the test's environment that might be passed on.
            let passed = ["OMP_", "TORCH", "NCCL_", "GLOO_", "RUST_", "LD_LIBRARY", "BRIGADE_"];
            if passed.iter().any(|it| name.starts_with(it)) {
                command.env_remove(name);
            }
        }
        command.env("PWD", &self.work).arg("launch").args(arguments);
        command.env("BRIGADE_SSH", self.ssh(""));
        Launch { site: self, command }
    }

    /// Returns ssh with the network's settings and additional ones.
    pub(crate) fn ssh(&self, more: &str) -> String {
        format!("ssh -F {} {more}", self.network.ssh_config().display())
    }

    /// Waits until the ranks have created this many files in the working folder.
    pub(crate) fn wait_for_files(&self, count: usize) {
        wait_until("the ranks' files", || fs::read_dir(&self.work).unwrap().count() >= count);
    }

    /// Waits until no host has a process any more.
    pub(crate) fn wait_until_empty(&self) {
        for host in self.network.hosts() {
            let empty = || host.processes().is_empty();
            if !within(LIMIT, empty) {
                panic!("left on {}: {:#?}", host.name(), host.processes());
            }
        }
    }
}

/// Job that has not been started.
pub(crate) struct Launch<'s> {
    site: &'s Site,
    pub(crate) command: Command,
}

impl<'s> Launch<'s> {
    pub(crate) fn args<'a>(mut self, words: impl IntoIterator<Item = &'a str>) -> Self {
        self.command.args(words);
        self
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    pub(crate) fn sh(self, script: &str) -> Self {
        self.args(["--", "sh", "-c", script])
    }

    pub(crate) fn start(mut self) -> Running<'s> {
        self.command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = self.command.spawn().unwrap();
        let mut stdout = child.stdout.take().unwrap();
        let stdout = thread::spawn(move || {
            let mut bytes = Vec::new();
            stdout.read_to_end(&mut bytes).unwrap();
            String::from_utf8_lossy(&bytes).into_owned()
        });
        let stderr = BufReader::new(child.stderr.take().unwrap());
        Running { site: self.site, child, stdout, stderr, read: Vec::new() }
    }

    pub(crate) fn run(self) -> Run {
        self.start().finish()
    }
}

/// Job that has been started.
pub(crate) struct Running<'s> {
    site: &'s Site,
    child: Child,
    stdout: JoinHandle<String>,
    stderr: BufReader<ChildStderr>,
    read: Vec<u8>,
}

impl Running<'_> {
    /// Returns the process ID of the launcher, which `nsenter` has started.
    pub(crate) fn pid(&self) -> i32 {
        inner_process(self.child.id().cast_signed()).unwrap()
    }

    /// Returns the process ID of the launcher or, if it has ended, that of its `nsenter`.
    pub(crate) fn pid_if_there(&self) -> i32 {
        inner_process(self.outer_pid()).unwrap_or_else(|| self.outer_pid())
    }

    /// Returns the process ID of `nsenter`, which stops when the launcher does.
    pub(crate) fn outer_pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// Stops the launcher until it is continued; `nsenter` stops with its child.
    pub(crate) fn freeze(&self) -> Frozen {
        let pids = [self.pid(), self.child.id().cast_signed()];
        kill(Pid::from_raw(pids[0]), Signal::SIGSTOP).unwrap();
        Frozen(pids)
    }

    pub(crate) fn send(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).unwrap();
    }

    pub(crate) fn wait_for_stderr(&mut self, text: &str) {
        loop {
            let start = self.read.len();
            let n = self.stderr.read_until(b'\n', &mut self.read).unwrap();
            let read = String::from_utf8_lossy(&self.read);
            assert_ne!(n, 0, "{text} never came: {read}");
            if String::from_utf8_lossy(&self.read[start..]).contains(text) {
                return;
            }
        }
    }

    /// Returns `true` if it has ended. It was not waited for yet, so its process ID is not reused.
    pub(crate) fn has_ended(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        stat.rsplit_once(") ").unwrap().1.starts_with(['Z', 'X'])
    }

    /// Reads the remaining output, waits for the end, and checks that no host has a process left.
    pub(crate) fn finish(self) -> Run {
        let site = self.site;
        let run = self.outcome();
        site.wait_until_empty();
        run
    }

    /// Reads the remaining output and waits for the end.
    pub(crate) fn outcome(mut self) -> Run {
        let mut stderr = std::mem::take(&mut self.read);
        self.stderr.read_to_end(&mut stderr).unwrap();
        let status = self.child.wait().unwrap();
        Run {
            code: status.code().unwrap_or_else(|| 128 + status.signal().unwrap()),
            stdout: self.stdout.join().unwrap(),
            stderr: String::from_utf8(stderr).unwrap(),
        }
    }
}

/// Launcher that is stopped.
pub(crate) struct Frozen([i32; 2]);

impl Frozen {
    pub(crate) fn thaw(self) {
        for pid in self.0 {
            kill(Pid::from_raw(pid), Signal::SIGCONT).unwrap();
        }
    }
}

/// Job that has ended.
#[derive(Debug)]
pub(crate) struct Run {
    /// Exit code, or 128 + the signal that killed the launcher.
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    /// Returns the lines of stdout, sorted.
    pub(crate) fn lines(&self) -> Vec<&str> {
        let mut lines: Vec<&str> = self.stdout.lines().collect();
        lines.sort_unstable();
        lines
    }
}

/// Waits for a condition that another process causes.
pub(crate) fn wait_until(what: &str, condition: impl Fn() -> bool) {
    assert!(within(LIMIT, condition), "{what}: never");
}

/// Returns `true` if a condition that another process causes is met within this time.
pub(crate) fn within(limit: Duration, condition: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    while !condition() {
        if Instant::now() > deadline {
            return false;
        }
        thread::sleep(Duration::from_millis(2));
    }
    true
}

/// Returns the listening TCP ports of a host.
pub(crate) fn listening(host: &Host) -> Vec<u16> {
    let sockets = host.sh("cat /proc/net/tcp /proc/net/tcp6 2>/dev/null || true");
    let port = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (_, port) = fields.get(1)?.rsplit_once(':')?;
        (fields.get(3) == Some(&"0A")).then(|| u16::from_str_radix(port, 16).unwrap())
    };
    sockets.lines().filter_map(port).collect()
}

/// Writes an executable shell script.
pub(crate) fn write_script(path: &Path, text: &str) {
    use std::os::unix::fs::PermissionsExt;

    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Removes files of ranks in their working folder.
pub(crate) fn empty(folder: &Path) {
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        fs::remove_file(entry.path()).unwrap();
    }
}

/// Limit that is only exceeded by something that never happens.
const LIMIT: Duration = Duration::from_secs(90);
