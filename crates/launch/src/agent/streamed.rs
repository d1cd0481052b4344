//! Output that is shown where the coordinator is: no more of it on the way than that side has
//! allowed.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver, SyncSender};

use brigade_rendezvous::{FromAgent, OUTPUT_CREDIT, Stream as Theirs};

use crate::Stream;
use crate::output::Show;

/// The agent's end.
#[derive(Debug)]
pub(super) struct Streamed {
    pieces: Receiver<(Stream, Vec<u8>)>,
    wake: UnixStream,
    pending: VecDeque<(Stream, Vec<u8>)>,
    credit: u64,
}

/// The output thread's end.
#[derive(Debug)]
struct Pieces {
    pieces: SyncSender<(Stream, Vec<u8>)>,
    wake: UnixStream,
}

impl Streamed {
    /// Both ends.
    pub(super) fn new() -> io::Result<(Self, Box<dyn Show>)> {
        let (near, far) = UnixStream::pair()?;
        near.set_nonblocking(true)?;
        far.set_nonblocking(true)?;
        let (sender, pieces) = mpsc::sync_channel(PIECES);
        let this = Self { pieces, wake: near, pending: VecDeque::new(), credit: OUTPUT_CREDIT };
        Ok((this, Box::new(Pieces { pieces: sender, wake: far })))
    }

    /// Readable when there is more.
    pub(super) fn control(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// The other side has shown this much.
    pub(super) fn taken(&mut self, bytes: u64) {
        self.credit = self.credit.saturating_add(bytes);
    }

    /// The next message to send, if there is something to show and it may be sent.
    pub(super) fn next(&mut self) -> Option<FromAgent> {
        // The wake-ups first: one that comes after this makes the socket readable again.
        while matches!((&self.wake).read(&mut [0; 64]), Ok(n) if n > 0) {}
        if self.pending.is_empty() {
            self.pending.extend(self.pieces.try_recv().ok());
        }
        let (stream, bytes) = self.pending.front_mut()?;
        let length = bytes.len().min(LONGEST_MESSAGE);
        if self.credit < length as u64 {
            return None;
        }
        // Whole lines where that is possible: others are shown between this message and the next.
        let end = bytes[..length].iter().rposition(|byte| matches!(byte, b'\n' | b'\r'));
        let length = end.map_or(length, |end| end + 1);
        let rest = bytes.split_off(length);
        let stream = match stream {
            Stream::Stdout => Theirs::Stdout,
            Stream::Stderr => Theirs::Stderr,
        };
        let message = FromAgent::Output { stream, bytes: std::mem::replace(bytes, rest) };
        if bytes.is_empty() {
            self.pending.pop_front();
        }
        self.credit -= length as u64;
        Some(message)
    }

    /// Nobody takes any more: the output thread must not wait for that.
    pub(super) fn abandon(&mut self) {
        self.pending.clear();
        self.pieces = mpsc::sync_channel(0).1;
    }

    /// There is nothing more to send, as far as the output thread has come.
    pub(super) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }
}

impl Show for Pieces {
    fn show(&mut self, stream: Stream, lines: &[u8]) -> io::Result<()> {
        let gone = |_| io::ErrorKind::BrokenPipe;
        self.pieces.send((stream, lines.to_vec())).map_err(gone)?;
        // A full socket has woken the agent already.
        let _ = self.wake.write(b"w");
        Ok(())
    }
}

/// A piece is what one read from a rank has given: some 64 KiB at most.
const PIECES: usize = 4;
const LONGEST_MESSAGE: usize = 64 * 1024;

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// What can be sent now.
    fn sent(streamed: &mut Streamed) -> Vec<usize> {
        let messages = std::iter::from_fn(|| streamed.next());
        messages
            .map(|message| match message {
                FromAgent::Output { bytes, .. } => bytes.len(),
                other => panic!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn no_more_than_allowed() {
        let (mut streamed, mut show) = Streamed::new().unwrap();
        let line = [&[b'x'; 999][..], b"\n"].concat();
        let large = line.repeat(100);
        let writer = thread::spawn(move || {
            for _ in 0..10 {
                show.show(Stream::Stdout, &large).unwrap();
            }
        });
        let mut total = 0;
        let mut allowed = OUTPUT_CREDIT;
        while total < 1_000_000 {
            for length in sent(&mut streamed) {
                assert_eq!(length % 1000, 0, "a line was cut");
                total += length as u64;
            }
            assert!(total <= allowed, "{total} of {allowed}");
            if allowed - total < LONGEST_MESSAGE as u64 {
                streamed.taken(100_000);
                allowed += 100_000;
            }
        }
        writer.join().unwrap();
        assert!(streamed.is_empty() && streamed.next().is_none());
    }

    #[test]
    fn an_endless_line_is_cut() {
        let (mut streamed, mut show) = Streamed::new().unwrap();
        show.show(Stream::Stderr, &vec![b'x'; LONGEST_MESSAGE + 1]).unwrap();
        assert_eq!(sent(&mut streamed), [LONGEST_MESSAGE, 1]);
        streamed.abandon();
        let gone = show.show(Stream::Stderr, b"x\n").unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::BrokenPipe);
    }
}
