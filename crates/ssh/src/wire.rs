//! Messages over blocking streams, one at a time and with a time limit.
//!
//! A reader takes not one byte more than its message: what follows the last of them belongs to the
//! coordinator.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use brigade_rendezvous::{Decoder, FrameError, MAX_FRAME_LEN, encode, wake};
use nix::poll::{PollFd, PollFlags, poll};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Error of a receive: no message was received.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The other side closed the stream.
    #[error("the connection was closed")]
    Closed,
    /// The time limit has passed.
    #[error("no answer within {} s", .0.as_secs())]
    Silent(Duration),
    /// The user has interrupted the wait.
    #[error("interrupted")]
    Interrupted,
    /// The received bytes are not a message.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The stream cannot be read.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Time limit of a wait for a message.
#[derive(Clone, Copy, Debug)]
pub struct Limit<'a> {
    deadline: Instant,
    timeout: Duration,
    cancelled: Option<&'a AtomicBool>,
}

impl<'a> Limit<'a> {
    /// Creates a time limit that starts now.
    #[must_use]
    pub fn after(timeout: Duration) -> Self {
        let now = Instant::now();
        Self {
            deadline: now.checked_add(timeout).unwrap_or(now + A_YEAR),
            timeout,
            cancelled: None,
        }
    }

    /// Ends the wait soon after the flag is set, too.
    #[must_use]
    pub fn unless(self, cancelled: &'a AtomicBool) -> Self {
        Self { cancelled: Some(cancelled), ..self }
    }

    /// Extends the limit, if needed, to this much time from now on.
    #[must_use]
    pub fn at_least(self, rest: Duration) -> Self {
        Self { deadline: self.deadline.max(Instant::now() + rest), ..self }
    }

    /// Fails when the wait is over, else returns until when to look for input.
    fn check(&self) -> Result<Instant, WireError> {
        match self.cancelled {
            Some(flag) if flag.load(Ordering::Relaxed) => Err(WireError::Interrupted),
            Some(_) => Ok(self.deadline.min(Instant::now() + INTERRUPT_INTERVAL)),
            None => Ok(self.deadline),
        }
    }
}

impl From<Duration> for Limit<'_> {
    fn from(timeout: Duration) -> Self {
        Self::after(timeout)
    }
}

/// Receives the next message.
///
/// # Errors
/// No complete message was received within the limit, or the bytes are not a message.
pub fn receive<'a, T: DeserializeOwned>(
    from: &mut File,
    limit: impl Into<Limit<'a>>,
) -> Result<T, WireError> {
    let limit = limit.into();
    let mut frame = vec![0; PREFIX];
    read_exactly(from, &mut frame, limit)?;
    let length = frame.iter().fold(0_usize, |length, byte| length << 8 | usize::from(*byte));
    if length > MAX_FRAME_LEN {
        return Err(FrameError::TooLong { length, longest: MAX_FRAME_LEN }.into());
    }
    frame.resize(PREFIX + length, 0);
    read_exactly(from, &mut frame[PREFIX..], limit)?;
    let mut decoder = Decoder::default();
    decoder.push(&frame);
    // A whole frame was pushed, so there is a message or an error.
    decoder.next()?.ok_or(WireError::Closed)
}

/// Sends one message. Blocks while the other side does not read.
///
/// # Errors
/// The other side has closed the stream.
pub fn send(to: &mut File, message: &impl Serialize) -> io::Result<()> {
    to.write_all(&encode(message))
}

/// Reads up to the first of several texts, each of which begins with a line end, and returns its number. Like
/// [`receive`], it does not read beyond the text. `banner` receives the bytes before the text; on an error, all bytes
/// received so far.
///
/// # Errors
/// None of the texts was received within the limit, or too much other text came first.
pub fn skip_to<'a>(
    from: &mut File,
    texts: &[&str],
    limit: impl Into<Limit<'a>>,
    banner: &mut Vec<u8>,
) -> Result<usize, WireError> {
    let limit = limit.into();
    // The first text may come without the end of line that a banner before it would have left open.
    let ends_with = |seen: &[u8], text: &str| {
        seen.ends_with(text.as_bytes()) || seen == text.trim_start_matches('\n').as_bytes()
    };
    loop {
        if let Some(found) = texts.iter().position(|text| ends_with(banner, text)) {
            banner.truncate(banner.len().saturating_sub(texts[found].len()));
            return Ok(found);
        }
        if banner.len() > MAX_BANNER_LEN {
            let reason = "too much output before the first message";
            return Err(FrameError::Malformed(reason.to_owned()).into());
        }
        let mut byte = [0];
        read_exactly(from, &mut byte, limit)?;
        banner.push(byte[0]);
    }
}

fn read_exactly(from: &mut File, mut into: &mut [u8], limit: Limit<'_>) -> Result<(), WireError> {
    while !into.is_empty() {
        let mut fds = [PollFd::new(from.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, wake::until(Some(limit.check()?))) {
            Ok(0) if Instant::now() >= limit.deadline => {
                return Err(WireError::Silent(limit.timeout));
            }
            Ok(0) | Err(nix::Error::EINTR) => continue,
            Ok(_) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
        match from.read(into) {
            Ok(0) => return Err(WireError::Closed),
            Ok(n) => into = &mut into[n..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

const PREFIX: usize = 4;
/// Maximum number of bytes that a login shell may print before the first message.
const MAX_BANNER_LEN: usize = 1 << 20;
/// Interval at which the wait checks for an interrupt.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(50);
const A_YEAR: Duration = Duration::from_secs(365 * 86_400);

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use brigade_rendezvous::ToAgent;

    use super::*;

    fn pipe() -> (File, File) {
        let (reader, writer) = io::pipe().unwrap();
        (File::from(OwnedFd::from(reader)), File::from(OwnedFd::from(writer)))
    }

    #[test]
    fn nothing_is_taken_that_follows() {
        let (mut reader, mut writer) = pipe();
        writer.write_all(b"Welcome to node1!\nLast login: never\nbrigade-agent\n").unwrap();
        send(&mut writer, &ToAgent::Kill).unwrap();
        send(&mut writer, &ToAgent::Beat).unwrap();
        writer.write_all(b"rest").unwrap();
        drop(writer);
        let limit = Duration::from_secs(60);
        let mut banner = Vec::new();
        let texts = ["\nno\n", "\nbrigade-agent\n"];
        assert_eq!(skip_to(&mut reader, &texts, limit, &mut banner).unwrap(), 1);
        assert_eq!(banner, b"Welcome to node1!\nLast login: never");
        assert_eq!(receive::<ToAgent>(&mut reader, limit).unwrap(), ToAgent::Kill);
        assert_eq!(receive::<ToAgent>(&mut reader, limit).unwrap(), ToAgent::Beat);
        let mut rest = String::new();
        reader.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "rest");
        assert!(matches!(receive::<ToAgent>(&mut reader, limit), Err(WireError::Closed)));
    }

    #[test]
    fn a_greeting_may_come_first_and_never() {
        let (mut reader, mut writer) = pipe();
        writer.write_all(b"\nhello\n").unwrap();
        let limit = Duration::from_secs(60);
        let mut banner = Vec::new();
        assert_eq!(skip_to(&mut reader, &["\nhello\n"], limit, &mut banner).unwrap(), 0);
        assert_eq!(banner, b"");
        writer.write_all(b"hello\n").unwrap();
        assert_eq!(skip_to(&mut reader, &["\nhello\n"], limit, &mut banner).unwrap(), 0);
        assert_eq!(banner, b"");
        writer.write_all(&vec![b'x'; 60_000]).unwrap();
        drop(writer);
        let none = skip_to(&mut reader, &["\nhello\n"], limit, &mut banner);
        assert!(matches!(none, Err(WireError::Closed)));
        assert_eq!(banner.len(), 60_000);
    }

    #[test]
    fn a_banner_has_a_longest_length() {
        let (mut reader, mut writer) = pipe();
        let writing = std::thread::spawn(move || {
            // Fails once the reader has given up.
            let _ = writer.write_all(&vec![b'x'; 2 * MAX_BANNER_LEN]);
        });
        let limit = Duration::from_secs(60);
        let endless = skip_to(&mut reader, &["\nhello\n"], limit, &mut Vec::new());
        assert!(matches!(endless, Err(WireError::Frame(_))), "{endless:?}");
        drop(reader);
        writing.join().unwrap();
    }

    #[test]
    fn an_interrupt_ends_a_wait() {
        let (mut reader, _writer) = pipe();
        let cancelled = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let limit = Limit::after(Duration::from_secs(1000)).unless(&cancelled);
            let waiting = scope.spawn(move || receive::<ToAgent>(&mut reader, limit));
            cancelled.store(true, Ordering::Relaxed);
            let ended = waiting.join().unwrap();
            assert!(matches!(ended, Err(WireError::Interrupted)), "{ended:?}");
        });
    }

    #[test]
    fn a_time_limit_is_one() {
        let (mut reader, mut writer) = pipe();
        writer.write_all(&[0, 0]).unwrap();
        let limit = Duration::from_millis(10);
        let late = receive::<ToAgent>(&mut reader, limit);
        assert!(matches!(late, Err(WireError::Silent(_))), "{late:?}");
        let (mut reader, mut writer) = pipe();
        writer.write_all(b"GET /").unwrap();
        let strange = receive::<ToAgent>(&mut reader, Duration::from_secs(60));
        assert!(matches!(strange, Err(WireError::Frame(_))), "{strange:?}");
    }
}
