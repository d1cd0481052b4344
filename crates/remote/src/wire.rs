//! Messages over blocking streams, one at a time and with a time limit.
//!
//! A reader takes not one byte more than its message: what follows the last of them belongs to the
//! coordinator.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use brigade_rendezvous::{Decoder, FrameError, MAX_FRAME_LEN, encode};
use nix::poll::{PollFd, PollFlags, poll};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Why no message was received.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The other side closed the stream.
    #[error("the connection was closed")]
    Closed,
    /// The time limit is over.
    #[error("no answer within {} s", .0.as_secs())]
    Silent(Duration),
    /// What came is not a message.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The stream cannot be read.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// Receives the next message.
///
/// # Errors
/// It did not come whole within the limit, or it is not one.
pub fn receive<T: DeserializeOwned>(from: &mut File, limit: Duration) -> Result<T, WireError> {
    let deadline = Instant::now() + limit;
    let mut frame = vec![0; PREFIX];
    read_exactly(from, &mut frame, deadline, limit)?;
    let length = frame.iter().fold(0_usize, |length, byte| length << 8 | usize::from(*byte));
    if length > MAX_FRAME_LEN {
        return Err(FrameError::TooLong { length, longest: MAX_FRAME_LEN }.into());
    }
    frame.resize(PREFIX + length, 0);
    read_exactly(from, &mut frame[PREFIX..], deadline, limit)?;
    let mut decoder = Decoder::default();
    decoder.push(&frame);
    // A whole frame was pushed, so there is a message or an error.
    decoder.next()?.ok_or(WireError::Closed)
}

/// Sends one message; blocks while the other side does not read.
///
/// # Errors
/// The stream is closed.
pub fn send(to: &mut File, message: &impl Serialize) -> io::Result<()> {
    to.write_all(&encode(message))
}

/// Reads up to the first of several texts and drops what was before it; returns the number of the text.
/// Like [`receive`], takes nothing that comes after.
///
/// # Errors
/// None came within the limit, or after too much else.
pub fn skip_to(from: &mut File, texts: &[&str], limit: Duration) -> Result<usize, WireError> {
    let deadline = Instant::now() + limit;
    // Every text begins with an end of line; there may be none before the first.
    let mut seen = vec![b'\n'];
    let mut dropped = 0_usize;
    loop {
        if let Some(found) = texts.iter().position(|text| seen.ends_with(text.as_bytes())) {
            return Ok(found);
        }
        let mut byte = [0];
        read_exactly(from, &mut byte, deadline, limit)?;
        seen.push(byte[0]);
        if seen.len() > 2 * MAX_TEXT_LEN {
            seen.drain(..MAX_TEXT_LEN);
            dropped += MAX_TEXT_LEN;
        }
        if dropped > MAX_BANNER_LEN {
            return Err(
                FrameError::Malformed("too much output before the agent's".to_owned()).into()
            );
        }
    }
}

fn read_exactly(
    from: &mut File,
    mut into: &mut [u8],
    deadline: Instant,
    limit: Duration,
) -> Result<(), WireError> {
    while !into.is_empty() {
        let mut fds = [PollFd::new(from.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, brigade_wake::until(Some(deadline))) {
            Ok(0) if Instant::now() >= deadline => return Err(WireError::Silent(limit)),
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
const MAX_TEXT_LEN: usize = 64;
/// What a login shell may print before the agent speaks.
const MAX_BANNER_LEN: usize = 1 << 20;

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
        let found = skip_to(&mut reader, &["\nno\n", "\nbrigade-agent\n"], limit).unwrap();
        assert_eq!(found, 1);
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
        assert_eq!(skip_to(&mut reader, &["\nhello\n"], limit).unwrap(), 0);
        writer.write_all(&vec![b'x'; 60_000]).unwrap();
        drop(writer);
        let none = skip_to(&mut reader, &["\nhello\n"], limit);
        assert!(matches!(none, Err(WireError::Closed)));
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
