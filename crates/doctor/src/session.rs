//! The line to the doctor's counterpart on one host: a process, mostly ssh.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::cluster::Lost;
use crate::protocol::{self, Answer, PROTOCOL, Request};

/// A running counterpart.
#[derive(Debug)]
pub(crate) struct Session {
    child: Child,
    /// Dropped to say that this is the end.
    stdin: Option<ChildStdin>,
    answers: Receiver<Line>,
    noise: Vec<String>,
    words: Arc<Mutex<VecDeque<String>>>,
    /// Disconnected when its standard error has ended.
    words_end: Receiver<()>,
}

/// What came on standard output.
#[derive(Debug)]
enum Line {
    Answer(Answer),
    /// Something that our program did not write.
    Noise(String),
}

/// Until when an answer is waited for, and for how long altogether.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    until: Instant,
    patience: Duration,
}

impl Limit {
    /// From now on.
    pub(crate) fn after(patience: Duration) -> Self {
        let now = Instant::now();
        Self { until: now.checked_add(patience).unwrap_or(now + A_YEAR), patience }
    }
}

/// Why a question has no answer.
#[derive(Debug)]
pub(crate) enum Broken {
    /// The host is lost.
    Lost(Lost),
    /// The user has had enough.
    Interrupted,
}

impl Session {
    /// Starts the process; the hello has not come yet.
    pub(crate) fn start(mut command: Command) -> Result<Self, Lost> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(|error| Lost::NotStarted {
            reason: format!("cannot run {}: {error}", command.get_program().display()),
        })?;
        let words = Arc::new(Mutex::new(VecDeque::new()));
        let (sender, answers) = mpsc::channel();
        let (last_word, words_end) = mpsc::channel();
        if let Some(stdout) = child.stdout.take() {
            thread::spawn(move || {
                let _ = for_each_line(stdout, |line| {
                    let read = match protocol::read(line) {
                        Some(Ok(answer)) => Line::Answer(answer),
                        Some(Err(error)) => Line::Answer(Answer::NotUnderstood(error.to_string())),
                        None => Line::Noise(text(line)),
                    };
                    sender.send(read).is_ok()
                });
            });
        }
        if let Some(stderr) = child.stderr.take() {
            let words = Arc::clone(&words);
            thread::spawn(move || {
                let _last_word: mpsc::Sender<()> = last_word;
                let _ = for_each_line(stderr, |line| {
                    let mut words = words.lock().unwrap_or_else(PoisonError::into_inner);
                    words.push_back(text(line));
                    if words.len() > MOST_WORDS {
                        words.pop_front();
                    }
                    true
                });
            });
        }
        let stdin = child.stdin.take();
        Ok(Self { child, stdin, answers, noise: Vec::new(), words, words_end })
    }

    /// Waits for the hello.
    pub(crate) fn meet(&mut self, limit: Limit, enough: &AtomicBool) -> Result<(), Broken> {
        match self.receive("a first word", limit, enough)? {
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
        enough: &AtomicBool,
    ) -> Result<Answer, Broken> {
        loop {
            if enough.load(Ordering::Relaxed) {
                return Err(Broken::Interrupted);
            }
            let rest = limit.until.saturating_duration_since(Instant::now());
            match self.answers.recv_timeout(rest.min(GLANCE)) {
                Ok(Line::Answer(Answer::NotUnderstood(_))) => {
                    return Err(Broken::Lost(Lost::Foreign { version: "?".to_owned() }));
                }
                Ok(Line::Answer(answer)) => return Ok(answer),
                Ok(Line::Noise(line)) => {
                    if self.noise.len() < MOST_WORDS {
                        self.noise.push(line);
                    }
                }
                Err(RecvTimeoutError::Timeout) if !rest.is_zero() => {}
                Err(RecvTimeoutError::Timeout) => {
                    let (asked, seconds) = (asked.to_owned(), limit.patience.as_secs());
                    let words = self.words();
                    return Err(Broken::Lost(Lost::Silent { asked, seconds, words }));
                }
                Err(RecvTimeoutError::Disconnected) => return Err(Broken::Lost(self.ended())),
            }
        }
    }

    /// What the login has printed.
    pub(crate) fn noise(&self) -> &[String] {
        &self.noise
    }

    fn ended(&mut self) -> Lost {
        // Its output has ended; the process follows, unless a child of it still holds on.
        let code = wait(&mut self.child, LAST_WORDS);
        let _ = self.words_end.recv_timeout(LAST_WORDS);
        Lost::Ended { code, words: self.words() }
    }

    fn words(&self) -> Vec<String> {
        self.words.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Our counterpart ends when its input does; ssh ends with it. Who hangs is ended.
        drop(self.stdin.take());
        if wait(&mut self.child, Duration::from_millis(300)).is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// The exit code, if it comes in time and is not a signal.
fn wait(child: &mut Child, patience: Duration) -> Option<i32> {
    let end = Instant::now() + patience;
    let mut pause = Duration::from_micros(200);
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return status.code(),
            Ok(None) if Instant::now() < end => thread::sleep(pause),
            _ => return None,
        }
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// Until the end, or until `take` has had enough. A line that never ends is cut.
fn for_each_line(from: impl Read, mut take: impl FnMut(&[u8]) -> bool) -> std::io::Result<()> {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    while from.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line)? > 0 {
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
const GLANCE: Duration = Duration::from_millis(50);
const MOST_WORDS: usize = 20;
const LAST_WORDS: Duration = Duration::from_secs(2);
const A_YEAR: Duration = Duration::from_secs(365 * 86_400);
/// Facts of a host have some ten kilobytes.
const LONGEST_LINE: u64 = 8 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Session {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Session::start(command).unwrap()
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
        assert_eq!(session.noise(), ["Welcome", ""]);
    }

    #[test]
    fn the_last_words_of_a_failed_login_are_kept() {
        let mut session = sh("echo 'no such host' >&2; exit 255");
        assert_eq!(
            lost(session.meet(soon(), &AtomicBool::new(false))),
            Lost::Ended { code: Some(255), words: vec!["no such host".to_owned()] }
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
        let lost = Session::start(Command::new("/no/such/ssh")).unwrap_err();
        assert!(matches!(&lost, Lost::NotStarted { reason } if reason.contains("/no/such/ssh")));
    }
}
