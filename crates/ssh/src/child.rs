//! The local process of a session: ssh, or the program itself on this machine; and its stderr.

use std::fmt;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{ChildStderr, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use brigade_rank_env::text::printable_within;
use brigade_rendezvous::wake;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use parking_lot::Mutex;
use rustix::process::{PidfdFlags, pidfd_open};

/// Child process that leads its own process group, with a thread that reads its stderr. Killed when dropped.
pub struct Child {
    process: std::process::Child,
    /// `true` while the process number is still the child's: it has not been reaped.
    alive: Arc<Mutex<bool>>,
    shared: Arc<Mutex<Shared>>,
    /// Disconnected at the end of its stderr.
    ended: Receiver<()>,
}

/// Callback that receives each line of a stderr, and `None` at its end.
pub type Listener = Box<dyn Fn(Option<&str>) + Send>;

#[derive(Default)]
struct Shared {
    /// The end of its stderr.
    stderr: String,
    /// The stderr has ended.
    ended: bool,
    /// Receives the lines from now on.
    listener: Option<Listener>,
}

impl fmt::Debug for Child {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Child").field("pid", &self.pid()).finish_non_exhaustive()
    }
}

impl Child {
    /// Starts the process. Also returns its stdin and stdout. `host` is for the name of the thread.
    ///
    /// The process leads a process group of its own, which does not receive the terminal's signals: the caller decides
    /// when it ends.
    ///
    /// # Errors
    /// The process or the thread cannot be started.
    pub fn start(mut command: Command, host: &str) -> std::io::Result<(Self, OwnedFd, OwnedFd)> {
        command.process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn()?;
        let (Some(to), Some(from), Some(stderr)) =
            (process.stdin.take(), process.stdout.take(), process.stderr.take())
        else {
            return Err(std::io::Error::other("a piped stream is missing; please file a bug"));
        };
        let shared = Arc::new(Mutex::new(Shared::default()));
        let (sender, ended) = mpsc::channel();
        let reader = Arc::clone(&shared);
        thread::Builder::new().name(format!("stderr of {host}")).spawn(move || {
            read_stderr(stderr, &reader);
            drop(sender);
        })?;
        let alive = Arc::new(Mutex::new(true));
        Ok((Self { process, alive, shared, ended }, to.into(), from.into()))
    }

    /// Returns a handle with which another thread can kill the session.
    #[must_use]
    pub fn process_group(&self) -> ProcessGroup {
        ProcessGroup { pid: self.pid(), alive: Arc::clone(&self.alive) }
    }

    /// Returns the process number of the child.
    #[must_use]
    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.process.id().cast_signed())
    }

    /// Returns the end of the child's stderr so far, 64 kB at most, with control characters escaped.
    #[must_use]
    pub fn stderr(&self) -> String {
        self.shared.lock().stderr.clone()
    }

    /// Returns the end of the child's stderr once its stdout has ended. Waits half a second at most for the stderr's
    /// end, too.
    #[must_use]
    pub fn last_stderr(&self) -> String {
        // A process that it has left behind may hold the stream open.
        let _ = self.ended.recv_timeout(END_TIMEOUT);
        self.stderr()
    }

    /// Passes the lines of stderr that follow to a listener.
    pub fn listen(&self, listener: Listener) {
        let mut shared = self.shared.lock();
        if shared.ended {
            listener(None);
        } else {
            shared.listener = Some(listener);
        }
    }

    /// Returns the child's exit status. Waits half a second at most for its end.
    pub fn exit_status(&mut self) -> Option<ExitStatus> {
        self.wait_until(Instant::now() + END_TIMEOUT);
        self.try_wait()
    }

    /// Waits for the child's end until the deadline, and then kills it.
    pub fn finish(self, deadline: Instant) {
        self.wait_until(deadline);
    }

    /// Returns when it has ended, at the deadline, or at once if the system cannot report it.
    fn wait_until(&self, deadline: Instant) {
        let Some(pid) = rustix::process::Pid::from_raw(self.pid().as_raw()) else { return };
        // The process has not been reaped, so the number still belongs to it.
        let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else { return };
        loop {
            let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, wake::until(Some(deadline))) {
                Err(nix::errno::Errno::EINTR) => {}
                _ => return,
            }
        }
    }

    /// Returns its exit status if it has ended, and reaps it then.
    fn try_wait(&mut self) -> Option<ExitStatus> {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        match waitid(Id::Pid(self.pid()), flags) {
            Ok(WaitStatus::StillAlive) => None,
            // Reaped already, or to be reaped now.
            _ => self.end(),
        }
    }

    /// Kills what it has started, a `ProxyCommand` for instance, and itself, and reaps it.
    fn end(&mut self) -> Option<ExitStatus> {
        let mut alive = self.alive.lock();
        if std::mem::take(&mut *alive) {
            let _ = killpg(self.pid(), Signal::SIGKILL);
        }
        drop(alive);
        self.process.wait().ok()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.end();
        // A process that has left the group may hold its stderr open.
        self.shared.lock().listener = None;
    }
}

/// Process group of a session. It may safely outlive the [`Child`].
#[derive(Debug)]
pub struct ProcessGroup {
    pid: Pid,
    /// `true` while the process number is still the leader's: it has not been reaped.
    alive: Arc<Mutex<bool>>,
}

impl ProcessGroup {
    /// Kills all processes of the group.
    pub fn kill(&self) {
        let alive = self.alive.lock();
        if *alive {
            let _ = killpg(self.pid, Signal::SIGKILL);
        }
    }
}

fn read_stderr(stderr: ChildStderr, shared: &Mutex<Shared>) {
    let mut lines = BufReader::new(stderr);
    loop {
        let mut line = Vec::new();
        // A line without an end must not take all memory.
        match lines.by_ref().take(MAX_LINE_LEN).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
        // Output of ssh, of the login shell there, and of agents: some of it is meant for a terminal.
        let line = printable_within(String::from_utf8_lossy(&line).trim_end(), MAX_SHOWN_LEN);
        let mut shared = shared.lock();
        if let Some(listener) = &shared.listener {
            listener(Some(&line));
        }
        shared.stderr.push_str(&line);
        shared.stderr.push('\n');
        if shared.stderr.len() > MAX_STDERR {
            let cut = shared.stderr.len() - MAX_STDERR;
            let cut = shared.stderr[cut..].find('\n').map_or(0, |at| cut + at + 1);
            shared.stderr.drain(..cut);
        }
    }
    let mut shared = shared.lock();
    shared.ended = true;
    if let Some(listener) = shared.listener.take() {
        listener(None);
    }
}

/// Characters of one line.
const MAX_SHOWN_LEN: usize = 1000;
const END_TIMEOUT: Duration = Duration::from_millis(500);
const MAX_LINE_LEN: u64 = 1 << 16;
const MAX_STDERR: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_login_prints_is_fit_to_be_shown() {
        let mut command = Command::new("sh");
        command.args(["-c", r"printf 'a\033]52;c;cm0=\007\033[2J\rbrigade: job finished\n' >&2"]);
        let (child, _to, _from) = Child::start(command, "node1").unwrap();
        let expected = "a\\u{1b}]52;c;cm0=\\u{7}\\u{1b}[2J\\rbrigade: job finished\n";
        // Waits for its end, half a second at most each time.
        while child.stderr().is_empty() {
            let _ = child.last_stderr();
        }
        assert_eq!(child.stderr(), expected);
    }

    #[test]
    fn an_end_is_waited_for_and_a_running_child_is_killed() {
        let sh = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            Child::start(command, "node1").unwrap()
        };
        let (mut child, stdin, _stdout) = sh("read line; exit 7");
        assert_eq!(child.try_wait(), None);
        drop(stdin);
        // Half a second at most each time.
        let status = std::iter::repeat_with(|| child.exit_status()).flatten().next();
        assert_eq!(status.unwrap().code(), Some(7));

        let (child, _stdin, mut stdout) = {
            let (child, stdin, stdout) = sh("exec sleep 1000");
            (child, stdin, std::fs::File::from(stdout))
        };
        child.finish(Instant::now());
        // Ends with the process.
        assert_eq!(stdout.read(&mut [0]).unwrap(), 0);
    }
}
