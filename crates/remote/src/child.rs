//! The process that carries a session: ssh, or an agent on this machine; and what it has to say on
//! its stderr.

use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::process::{ChildStderr, Command, ExitStatus};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use brigade_rendezvous::printable_within;
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;

use super::hostfile::HostSpec;

/// A process that leads its own group. Killed when dropped.
pub(crate) struct Child {
    process: std::process::Child,
    /// Not reaped: its number is its own.
    alive: Arc<Mutex<bool>>,
    shared: Arc<Mutex<Shared>>,
    /// Closed when its stderr has come to an end.
    ended: Receiver<()>,
}

/// Is told each line, and `None` at the end.
pub(crate) type Listener = Box<dyn Fn(Option<&str>) + Send>;

#[derive(Default)]
struct Shared {
    /// The last of its words.
    words: String,
    /// There are no more.
    over: bool,
    /// Who shows the lines from now on.
    listener: Option<Listener>,
}

impl Child {
    /// Starts it; also gives its stdin and stdout.
    pub(crate) fn start(
        mut command: Command,
        host: &HostSpec,
    ) -> std::io::Result<(Self, OwnedFd, OwnedFd)> {
        let mut process = command.spawn()?;
        let (Some(to), Some(from), Some(stderr)) =
            (process.stdin.take(), process.stdout.take(), process.stderr.take())
        else {
            return Err(std::io::Error::other("a piped stream is not there; please file a bug"));
        };
        let shared = Arc::new(Mutex::new(Shared::default()));
        let (sender, ended) = mpsc::channel();
        let reader = Arc::clone(&shared);
        thread::Builder::new().name(format!("stderr of {host}")).spawn(move || {
            read_words(stderr, &reader);
            drop(sender);
        })?;
        let alive = Arc::new(Mutex::new(true));
        Ok((Self { process, alive, shared, ended }, to.into(), from.into()))
    }

    /// For whoever gives the session up while another thread has it.
    pub(crate) fn process_group(&self) -> ProcessGroup {
        ProcessGroup { pid: self.pid(), alive: Arc::clone(&self.alive) }
    }

    /// Its process number.
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(self.process.id().cast_signed())
    }

    /// What it has said so far.
    pub(crate) fn words(&self) -> String {
        lock(&self.shared).words.clone()
    }

    /// What it has said when its output has ended: waits a moment for its end and its last words.
    pub(crate) fn last_words(&self) -> String {
        // A process that it has left behind may hold the stream open.
        let _ = self.ended.recv_timeout(LAST_WORDS);
        self.words()
    }

    /// Has its lines shown from now on.
    pub(crate) fn listen(&self, listener: Listener) {
        let mut shared = lock(&self.shared);
        if shared.over {
            listener(None);
        } else {
            shared.listener = Some(listener);
        }
    }

    /// How it ended: waits a moment for that.
    pub(crate) fn ending(&mut self) -> Option<ExitStatus> {
        let deadline = Instant::now() + LAST_WORDS;
        loop {
            let ending = self.look();
            if ending.is_some() || Instant::now() >= deadline {
                return ending;
            }
            thread::sleep(LOOK_AGAIN);
        }
    }

    /// Waits for its end, at most so long, and then kills it.
    pub(crate) fn finish(mut self, deadline: Instant) {
        while self.look().is_none() {
            if Instant::now() >= deadline {
                break;
            }
            thread::sleep(LOOK_AGAIN);
        }
    }

    /// How it ended, if it has.
    fn look(&mut self) -> Option<ExitStatus> {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        match waitid(Id::Pid(self.pid()), flags) {
            Ok(WaitStatus::StillAlive) => None,
            // Reaped already, or to be reaped now.
            _ => self.end(),
        }
    }

    /// Kills what it has started, a `ProxyCommand` for instance, and itself, and reaps it.
    fn end(&mut self) -> Option<ExitStatus> {
        let mut alive = lock(&self.alive);
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
        lock(&self.shared).listener = None;
    }
}

/// The processes of a session.
pub(crate) struct ProcessGroup {
    pid: Pid,
    /// Not reaped yet: the number still is its own.
    alive: Arc<Mutex<bool>>,
}

impl ProcessGroup {
    /// Kills them.
    pub(crate) fn kill(&self) {
        let alive = lock(&self.alive);
        if *alive {
            let _ = killpg(self.pid, Signal::SIGKILL);
        }
    }
}

fn read_words(stderr: ChildStderr, shared: &Mutex<Shared>) {
    let mut lines = BufReader::new(stderr);
    loop {
        let mut line = Vec::new();
        // A line without an end must not take all memory.
        match lines.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
        // Of ssh, of the login there, and of agents: some of it is for a terminal of their own.
        let line = printable_within(String::from_utf8_lossy(&line).trim_end(), LONGEST_SHOWN);
        let mut shared = lock(shared);
        if let Some(listener) = &shared.listener {
            listener(Some(&line));
        }
        shared.words.push_str(&line);
        shared.words.push('\n');
        if shared.words.len() > MOST_WORDS {
            let cut = shared.words.len() - MOST_WORDS;
            let cut = shared.words[cut..].find('\n').map_or(0, |at| cut + at + 1);
            shared.words.drain(..cut);
        }
    }
    let mut shared = lock(shared);
    shared.over = true;
    if let Some(listener) = shared.listener.take() {
        listener(None);
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Characters of one line.
const LONGEST_SHOWN: usize = 1000;
const LAST_WORDS: Duration = Duration::from_millis(500);
const LOOK_AGAIN: Duration = Duration::from_millis(5);
const LONGEST_LINE: u64 = 1 << 16;
const MOST_WORDS: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::Stdio;

    use super::*;

    #[test]
    fn what_a_login_prints_is_fit_to_be_shown() {
        let mut command = Command::new("sh");
        command.args(["-c", r"printf 'a\033]52;c;cm0=\007\033[2J\rbrigade: job finished\n' >&2"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.process_group(0);
        let host = HostSpec::parse_list("node1").unwrap().remove(0);
        let (child, _to, _from) = Child::start(command, &host).unwrap();
        let expected = "a\\u{1b}]52;c;cm0=\\u{7}\\u{1b}[2J\\rbrigade: job finished\n";
        // Waits for its end, half a second at most each time.
        while child.words().is_empty() {
            child.last_words();
        }
        assert_eq!(child.words(), expected);
    }
}
