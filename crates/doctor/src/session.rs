//! Session with the doctor's process on one host: through ssh, or as a child process on this machine.

use std::fs::File;
use std::process::Command;
use std::time::{Duration, Instant};

use brigade_rank_env::text::printable;
use brigade_ssh::Child;
use brigade_ssh::wire::{self, Limit, WireError};

use crate::cluster::Lost;
use crate::protocol::{Answer, GREETING, PROTOCOL, Request};

/// Session with a host.
#[derive(Debug)]
pub(crate) struct Session {
    /// `None` only while the session is dropped.
    child: Option<Child>,
    /// Input of the process, which is closed to end it.
    to: Option<File>,
    from: File,
    login_banner: Vec<String>,
}

/// Reason why a request has no answer.
#[derive(Debug)]
pub(crate) enum Broken {
    /// The host is lost.
    Lost(Lost),
    /// The user has interrupted the examination.
    Interrupted,
}

impl Session {
    /// Starts the process on a host, whose name is for messages. Does not wait for the greeting.
    pub(crate) fn start(command: Command, name: &str) -> Result<Self, Lost> {
        let program = command.get_program().to_owned();
        let (child, to, from) = Child::start(command, name).map_err(|error| Lost::NotStarted {
            reason: format!("cannot run {}: {error}", program.display()),
        })?;
        let (child, to, from) = (Some(child), Some(to.into()), from.into());
        Ok(Self { child, to, from, login_banner: Vec::new() })
    }

    /// Waits for the greeting.
    pub(crate) fn meet(&mut self, limit: Limit<'_>) -> Result<(), Broken> {
        let mut banner = Vec::new();
        let limit = limit.at_least(BACKLOG);
        let greeted = wire::skip_to(&mut self.from, &[GREETING], limit, &mut banner);
        let banner = String::from_utf8_lossy(&banner);
        self.login_banner = banner.lines().take(MAX_LINES).map(text).collect();
        greeted.map_err(|error| self.broken(&error, FIRST_WORD))?;
        match self.receive(FIRST_WORD, limit)? {
            Answer::Hello { protocol: PROTOCOL, .. } => Ok(()),
            Answer::Hello { version, .. } => Err(Broken::Lost(Lost::Foreign { version })),
            _ => Err(foreign()),
        }
    }

    /// Sends a request without waiting for the answer. A lost host is noticed when the answer is due.
    pub(crate) fn ask(&mut self, request: &Request) {
        if let Some(to) = &mut self.to {
            let _ = wire::send(to, request);
        }
    }

    /// Waits for the next answer.
    pub(crate) fn receive(&mut self, asked: &str, limit: Limit<'_>) -> Result<Answer, Broken> {
        match wire::receive(&mut self.from, limit.at_least(BACKLOG)) {
            Ok(Answer::NotUnderstood(_)) => Err(foreign()),
            Ok(answer) => Ok(answer),
            Err(error) => Err(self.broken(&error, asked)),
        }
    }

    fn broken(&mut self, error: &WireError, asked: &str) -> Broken {
        match error {
            WireError::Interrupted => Broken::Interrupted,
            WireError::Silent(limit) => {
                let (asked, seconds) = (asked.to_owned(), limit.as_secs());
                Broken::Lost(Lost::Silent { asked, seconds, stderr: self.stderr() })
            }
            WireError::Frame(_) => foreign(),
            WireError::Closed | WireError::System(_) => Broken::Lost(self.ended()),
        }
    }

    /// Returns the lines that the login printed on stdout.
    pub(crate) fn login_banner(&self) -> &[String] {
        &self.login_banner
    }

    fn ended(&mut self) -> Lost {
        let Some(child) = &mut self.child else {
            return Lost::Ended { code: None, stderr: Vec::new() };
        };
        // The output has ended; the process exits soon, unless a child process holds the pipe.
        let code = child.exit_status().and_then(|status| status.code());
        Lost::Ended { code, stderr: last_lines(&child.last_stderr()) }
    }

    fn stderr(&self) -> Vec<String> {
        self.child.as_ref().map(|child| last_lines(&child.stderr())).unwrap_or_default()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // The process there exits when its input ends, and ssh with it.
        drop(self.to.take());
        if let Some(child) = self.child.take() {
            child.finish(Instant::now() + END_TIMEOUT);
        }
    }
}

fn last_lines(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(MAX_LINES)..].iter().map(|it| it.trim().to_owned()).collect()
}

fn text(line: &str) -> String {
    printable(line.trim())
}

fn foreign() -> Broken {
    Broken::Lost(Lost::Foreign { version: "?".to_owned() })
}

const FIRST_WORD: &str = "a first word";
/// Additional time. If the time limit was used up by a host that hung, a long answer of the next one is partly in the
/// pipe, and partly in ssh.
const BACKLOG: Duration = Duration::from_millis(500);
const MAX_LINES: usize = 20;
/// Time for the process to exit by itself after its stdin is closed.
const END_TIMEOUT: Duration = Duration::from_millis(300);

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::sync::atomic::AtomicBool;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    fn sh(script: &str) -> Session {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Session::start(command, "node1").unwrap()
    }

    fn soon() -> Limit<'static> {
        Limit::after(Duration::from_secs(30))
    }

    /// Session with a host whose login prints a banner before the greeting.
    fn greeting(banner: &str, protocol: u32, version: &str) -> Session {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let file_of = file.path().display().to_string();
        let file = file.as_file_mut();
        file.write_all(format!("{banner}{GREETING}").as_bytes()).unwrap();
        let version = version.to_owned();
        wire::send(file, &Answer::Hello { protocol, version }).unwrap();
        let session = sh(&format!("cat {file_of}; echo >&2; cat"));
        // It is read before the file is removed.
        while session.stderr().is_empty() {
            std::thread::sleep(Duration::from_millis(5));
        }
        session
    }

    fn lost(broken: Result<(), Broken>) -> Lost {
        match broken {
            Err(Broken::Lost(lost)) => lost,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn greetings_are_told_from_answers() {
        let mut session = greeting("Welcome\n\n", PROTOCOL, "0");
        session.meet(soon()).unwrap();
        assert_eq!(session.login_banner(), ["Welcome", ""]);
    }

    #[test]
    fn the_stderr_of_a_failed_login_is_kept() {
        let mut session = sh("echo 'no such host' >&2; exit 255");
        assert_eq!(
            lost(session.meet(soon())),
            Lost::Ended { code: Some(255), stderr: vec!["no such host".to_owned()] }
        );
    }

    #[test]
    fn silence_has_an_end() {
        // The child keeps the streams open; it outlives the test by little.
        let mut session = sh("sleep 5 & wait");
        let limit = Limit::after(Duration::from_millis(100));
        let lost = lost(session.meet(limit));
        assert!(matches!(lost, Lost::Silent { .. }), "{lost:?}");
    }

    #[test]
    fn other_versions_are_strangers() {
        let lost_to = |mut session: Session| lost(session.meet(soon()));
        let foreign = |version: &str| Lost::Foreign { version: version.to_owned() };
        assert_eq!(lost_to(greeting("", 99, "9.9")), foreign("9.9"));
        assert_eq!(lost_to(sh(r"printf '\nbrigade-doctor\nhello, world'; cat")), foreign("?"));
    }

    #[test]
    fn an_answer_that_waited_behind_a_host_that_hung_is_received_whole() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        // Several times what a pipe holds.
        let answer = Answer::Listening(vec![Err("x".repeat(500_000))]);
        wire::send(file.as_file_mut(), &answer).unwrap();
        let mut session = sh(&format!("cat {}; cat", file.path().display()));
        // Until the pipe has something.
        let mut fds = [PollFd::new(session.from.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::NONE).unwrap();
        assert_eq!(session.receive("ports", Limit::after(Duration::ZERO)).unwrap(), answer);
    }

    #[test]
    fn an_interrupt_ends_the_waiting() {
        let mut session = sh("exec sleep 1000");
        let cancelled = AtomicBool::new(true);
        let broken = session.meet(soon().unless(&cancelled));
        assert!(matches!(broken, Err(Broken::Interrupted)), "{broken:?}");
    }

    #[test]
    fn a_command_that_is_not_there() {
        let lost = Session::start(Command::new("/no/such/ssh"), "node1").unwrap_err();
        assert!(matches!(&lost, Lost::NotStarted { reason } if reason.contains("/no/such/ssh")));
    }
}
