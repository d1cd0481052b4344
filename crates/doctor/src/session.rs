//! The session with the doctor's other process on one host: ssh, or this program on this machine.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use brigade_remote::Child;

use crate::cluster::Lost;
use crate::protocol::{self, Answer, PROTOCOL, Request};

/// A session with a host.
#[derive(Debug)]
pub(crate) struct Session {
    /// `None` only while it is dropped.
    child: Option<Child>,
    /// Closed to end the process.
    stdin: Option<File>,
    answers: Receiver<Line>,
    login_banner: Vec<String>,
}

/// What came on standard output.
#[derive(Debug)]
enum Line {
    Answer(Answer),
    /// A line of the login's, not of this program's.
    Banner(String),
}

/// Until when an answer is waited for, and for how long altogether.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    until: Instant,
    timeout: Duration,
}

impl Limit {
    /// From now on.
    pub(crate) fn after(timeout: Duration) -> Self {
        let now = Instant::now();
        Self { until: now.checked_add(timeout).unwrap_or(now + A_YEAR), timeout }
    }
}

/// Why a question has no answer.
#[derive(Debug)]
pub(crate) enum Broken {
    /// The host is lost.
    Lost(Lost),
    /// The user has interrupted it.
    Interrupted,
}

impl Session {
    /// Starts the process on a host, named for messages; the hello has not come yet.
    pub(crate) fn start(command: Command, name: &str) -> Result<Self, Lost> {
        let program = command.get_program().to_owned();
        let (child, stdin, stdout) = Child::start(command, name).map_err(|error| {
            Lost::NotStarted { reason: format!("cannot run {}: {error}", program.display()) }
        })?;
        let (sender, answers) = mpsc::channel();
        thread::spawn(move || {
            let _ = for_each_line(File::from(stdout), |line| {
                let read = match protocol::read(line) {
                    Some(Ok(answer)) => Line::Answer(answer),
                    Some(Err(error)) => Line::Answer(Answer::NotUnderstood(error.to_string())),
                    None => Line::Banner(text(line)),
                };
                sender.send(read).is_ok()
            });
        });
        let (child, stdin) = (Some(child), Some(File::from(stdin)));
        Ok(Self { child, stdin, answers, login_banner: Vec::new() })
    }

    /// Waits for the hello.
    pub(crate) fn meet(&mut self, limit: Limit, cancelled: &AtomicBool) -> Result<(), Broken> {
        match self.receive("a first word", limit, cancelled)? {
            Answer::Hello { protocol: PROTOCOL, .. } => Ok(()),
            Answer::Hello { version, .. } => Err(Broken::Lost(Lost::Foreign { version })),
            _ => Err(Broken::Lost(Lost::Foreign { version: "?".to_owned() })),
        }
    }

    /// Asks without waiting for the answer. That a host has gone shows when the answer is due.
    pub(crate) fn ask(&mut self, request: &Request) {
        if let Some(stdin) = &mut self.stdin {
            let _ = protocol::write(stdin, request);
        }
    }

    /// Waits for the next answer.
    pub(crate) fn receive(
        &mut self,
        asked: &str,
        limit: Limit,
        cancelled: &AtomicBool,
    ) -> Result<Answer, Broken> {
        loop {
            if cancelled.load(Ordering::Relaxed) {
                return Err(Broken::Interrupted);
            }
            let rest = limit.until.saturating_duration_since(Instant::now());
            match self.answers.recv_timeout(rest.min(INTERRUPT_INTERVAL)) {
                Ok(Line::Answer(Answer::NotUnderstood(_))) => {
                    return Err(Broken::Lost(Lost::Foreign { version: "?".to_owned() }));
                }
                Ok(Line::Answer(answer)) => return Ok(answer),
                Ok(Line::Banner(line)) => {
                    if self.login_banner.len() < MAX_LINES {
                        self.login_banner.push(line);
                    }
                }
                Err(RecvTimeoutError::Timeout) if !rest.is_zero() => {}
                Err(RecvTimeoutError::Timeout) => {
                    let (asked, seconds) = (asked.to_owned(), limit.timeout.as_secs());
                    let stderr = self.stderr();
                    return Err(Broken::Lost(Lost::Silent { asked, seconds, stderr }));
                }
                Err(RecvTimeoutError::Disconnected) => return Err(Broken::Lost(self.ended())),
            }
        }
    }

    /// Returns what the login has printed on stdout.
    pub(crate) fn login_banner(&self) -> &[String] {
        &self.login_banner
    }

    fn ended(&mut self) -> Lost {
        let Some(child) = &mut self.child else {
            return Lost::Ended { code: None, stderr: Vec::new() };
        };
        // Its output has ended; the process follows, unless a child of it still holds on.
        let code = child.exit_status().and_then(|status| status.code());
        Lost::Ended { code, stderr: last_lines(&child.last_stderr()) }
    }

    fn stderr(&self) -> Vec<String> {
        self.child.as_ref().map(|child| last_lines(&child.stderr())).unwrap_or_default()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // The process there ends when its input does, and ssh ends with it.
        drop(self.stdin.take());
        if let Some(child) = self.child.take() {
            child.finish(Instant::now() + END_TIMEOUT);
        }
    }
}

fn last_lines(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(MAX_LINES)..].iter().map(|it| it.trim().to_owned()).collect()
}

/// Until the end, or until `take` returns false. A line that never ends is cut.
fn for_each_line(from: impl Read, mut take: impl FnMut(&[u8]) -> bool) -> std::io::Result<()> {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    while from.by_ref().take(MAX_LINE_LEN).read_until(b'\n', &mut line)? > 0 {
        if !take(&line) {
            break;
        }
        line.clear();
    }
    Ok(())
}

fn text(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(line);
    let text: String = text.chars().filter(|it| !it.is_control()).collect();
    text.trim().to_owned()
}

/// How soon an interrupt is seen.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(50);
const MAX_LINES: usize = 20;
/// For the process to end by itself once its stdin is closed.
const END_TIMEOUT: Duration = Duration::from_millis(300);
const A_YEAR: Duration = Duration::from_secs(365 * 86_400);
/// Facts of a host have some ten kilobytes.
const MAX_LINE_LEN: u64 = 8 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Session {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Session::start(command, "node1").unwrap()
    }

    fn soon() -> Limit {
        Limit::after(Duration::from_secs(30))
    }

    fn lost(broken: Result<(), Broken>) -> Lost {
        match broken {
            Err(Broken::Lost(lost)) => lost,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn greetings_are_told_from_answers() {
        let mut session = sh(
            "echo Welcome; echo; echo 'brigade-doctor: {\"hello\":{\"protocol\":1,\"version\":\"0\"}}'; cat",
        );
        session.meet(soon(), &AtomicBool::new(false)).unwrap();
        assert_eq!(session.login_banner(), ["Welcome", ""]);
    }

    #[test]
    fn the_stderr_of_a_failed_login_is_kept() {
        let mut session = sh("echo 'no such host' >&2; exit 255");
        assert_eq!(
            lost(session.meet(soon(), &AtomicBool::new(false))),
            Lost::Ended { code: Some(255), stderr: vec!["no such host".to_owned()] }
        );
    }

    #[test]
    fn silence_has_an_end() {
        // The child keeps the streams open; it outlives the test by little.
        let mut session = sh("sleep 5 & wait");
        let limit = Limit::after(Duration::from_millis(100));
        let lost = lost(session.meet(limit, &AtomicBool::new(false)));
        assert!(matches!(lost, Lost::Silent { .. }), "{lost:?}");
    }

    #[test]
    fn other_versions_are_strangers() {
        let mut session =
            sh("echo 'brigade-doctor: {\"hello\":{\"protocol\":99,\"version\":\"9.9\"}}'; cat");
        let lost = lost(session.meet(soon(), &AtomicBool::new(false)));
        assert_eq!(lost, Lost::Foreign { version: "9.9".to_owned() });
    }

    #[test]
    fn an_interrupt_ends_the_waiting() {
        let mut session = sh("exec sleep 1000");
        let broken = session.meet(soon(), &AtomicBool::new(true));
        assert!(matches!(broken, Err(Broken::Interrupted)), "{broken:?}");
    }

    #[test]
    fn a_command_that_is_not_there() {
        let lost = Session::start(Command::new("/no/such/ssh"), "node1").unwrap_err();
        assert!(matches!(&lost, Lost::NotStarted { reason } if reason.contains("/no/such/ssh")));
    }
}
