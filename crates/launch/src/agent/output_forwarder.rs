//! Forwarding of output to the coordinator's host, with flow control: no more is in transit than that side has allowed.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::time::{Duration, Instant};

use brigade_rank_env::ProgressReport;
use brigade_rendezvous::wake::Flag;
use brigade_rendezvous::{FromAgent, OUTPUT_CREDIT, Stream};

use crate::output::{Reports, Show};

/// The agent's end of the forwarder.
#[derive(Debug)]
pub(super) struct OutputForwarder {
    pieces: Receiver<Piece>,
    /// Set when a piece of output is available.
    wake: Arc<Flag>,
    pending: VecDeque<(Stream, Vec<u8>)>,
    credit: u64,
    drained: Drained,
}

/// Item from the output thread.
#[derive(Debug)]
enum Piece {
    Lines(Stream, Vec<u8>),
    /// Progress reports of the ranks.
    Progress(Vec<(usize, String)>),
    /// The output of an attempt has ended.
    Drained,
}

/// Number of attempts whose output has ended.
#[derive(Debug, Default)]
struct Drained {
    /// Number of attempts whose output has all been passed on to be sent.
    sent: usize,
    /// Number as counted in the output thread.
    written: usize,
    /// Number that the agent has received.
    reported: usize,
    /// `true` if output is discarded instead of being sent.
    dropped: bool,
}

/// The output thread's end.
#[derive(Debug)]
struct Pieces {
    pieces: SyncSender<Piece>,
    wake: Arc<Flag>,
    last_report: Option<Instant>,
}

impl OutputForwarder {
    /// Creates both ends of the forwarder.
    pub(super) fn new() -> io::Result<(Self, Box<dyn Show>)> {
        let wake = Arc::new(Flag::new()?);
        let (sender, pieces) = mpsc::sync_channel(PIECES);
        let this = Self {
            pieces,
            wake: Arc::clone(&wake),
            pending: VecDeque::new(),
            credit: OUTPUT_CREDIT,
            drained: Drained::default(),
        };
        Ok((this, Box::new(Pieces { pieces: sender, wake, last_report: None })))
    }

    /// Returns a descriptor that is readable when there is more to send.
    pub(super) fn control(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Adds to the credit: the coordinator has shown this many bytes.
    pub(super) fn taken(&mut self, bytes: u64) {
        self.credit = self.credit.saturating_add(bytes);
    }

    /// Returns the next message to send, if there is something to show and it may be sent.
    pub(super) fn next(&mut self) -> Option<FromAgent> {
        // Before reading the pieces: a piece that arrives later sets it again.
        self.wake.clear();
        while self.pending.is_empty() {
            match self.pieces.try_recv().ok()? {
                Piece::Lines(stream, bytes) => self.pending.push_back((stream, bytes)),
                Piece::Progress(ranks) => return Some(FromAgent::Progress { ranks }),
                Piece::Drained => self.drained.sent += 1,
            }
        }
        let (stream, bytes) = self.pending.front_mut()?;
        let length = bytes.len().min(MAX_MESSAGE_LEN);
        if self.credit < length as u64 {
            return None;
        }
        // Whole lines if possible: other output is shown between this message and the next.
        let end = bytes[..length].iter().rposition(|byte| matches!(byte, b'\n' | b'\r'));
        let length = end.map_or(length, |end| end + 1);
        let rest = bytes.split_off(length);
        let message = FromAgent::Output { stream: *stream, bytes: std::mem::replace(bytes, rest) };
        if bytes.is_empty() {
            self.pending.pop_front();
        }
        self.credit -= length as u64;
        Some(message)
    }

    /// Counts an attempt whose output the output thread has written completely.
    pub(super) fn written(&mut self) {
        self.drained.written += 1;
    }

    /// Returns `true` once for each attempt whose output has all been sent, or is not sent any more.
    pub(super) fn is_drained(&mut self) -> bool {
        let Drained { sent, written, reported, dropped } = &mut self.drained;
        let ended = if *dropped { *written } else { *sent.min(written) };
        let is_new = *reported < ended;
        *reported += usize::from(is_new);
        is_new
    }

    /// Stops taking output: the output thread must not wait for this side.
    pub(super) fn abandon(&mut self) {
        self.pending.clear();
        self.pieces = mpsc::sync_channel(0).1;
        self.drained.dropped = true;
    }
}

impl Show for Pieces {
    fn show(&mut self, stream: Stream, lines: &[u8]) -> io::Result<()> {
        let gone = |_| io::ErrorKind::BrokenPipe;
        self.pieces.send(Piece::Lines(stream, lines.to_vec())).map_err(gone)?;
        self.wake.set();
        Ok(())
    }

    fn progress(&mut self, reports: &Reports) -> bool {
        let is_early = self.last_report.is_some_and(|last| last.elapsed() < BETWEEN_REPORTS);
        if is_early && !reports.is_empty() {
            return false;
        }
        self.last_report = Some(Instant::now());
        let text = |report: &ProgressReport| String::from_utf8(report.encode()).unwrap_or_default();
        let ranks = reports.iter().map(|(rank, report)| (*rank, text(report))).collect();
        let piece = Piece::Progress(ranks);
        let is_taken = if reports.is_empty() {
            // Must not be lost, or the launcher would show stale progress for ever. The agent, if it still runs, waits
            // for the end of the ranks' output anyway.
            let _ = self.pieces.send(piece);
            true
        } else {
            // While output waits to be sent, a progress report would be out of date before its turn.
            self.pieces.try_send(piece).is_ok()
        };
        self.wake.set();
        is_taken
    }

    fn drained(&mut self) {
        // An agent that has stopped reading needs no notice.
        let _ = self.pieces.send(Piece::Drained);
        self.wake.set();
    }
}

/// Capacity of the channel, in pieces. A piece is the result of one read from a rank: up to about 64 KiB.
const PIECES: usize = 4;
/// Minimum interval between progress reports of a host.
const BETWEEN_REPORTS: Duration = Duration::from_millis(500);
const MAX_MESSAGE_LEN: usize = 64 * 1024;

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Returns the sizes of the pieces that can be sent now.
    fn sent(forwarder: &mut OutputForwarder) -> Vec<usize> {
        let messages = std::iter::from_fn(|| forwarder.next());
        messages
            .map(|message| match message {
                FromAgent::Output { bytes, .. } => bytes.len(),
                other => panic!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn no_more_than_allowed() {
        let (mut forwarder, mut show) = OutputForwarder::new().unwrap();
        let line = [&[b'x'; 999][..], b"\n"].concat();
        let large = line.repeat(100);
        let writer = thread::spawn(move || {
            for _ in 0..10 {
                show.show(Stream::Stdout, &large).unwrap();
            }
            show.drained();
        });
        forwarder.written();
        let mut total = 0;
        let mut allowed = OUTPUT_CREDIT;
        while total < 1_000_000 {
            for length in sent(&mut forwarder) {
                assert_eq!(length % 1000, 0, "a line was cut");
                total += length as u64;
            }
            assert!(total <= allowed, "{total} of {allowed}");
            assert!(total == 1_000_000 || !forwarder.is_drained(), "drained at {total}");
            if allowed - total < MAX_MESSAGE_LEN as u64 {
                forwarder.taken(100_000);
                allowed += 100_000;
            }
        }
        writer.join().unwrap();
        assert!(forwarder.next().is_none() && forwarder.is_drained());
        assert!(!forwarder.is_drained(), "reported once");
    }

    #[test]
    fn an_endless_line_is_cut() {
        let (mut forwarder, mut show) = OutputForwarder::new().unwrap();
        show.show(Stream::Stderr, &vec![b'x'; MAX_MESSAGE_LEN + 1]).unwrap();
        assert_eq!(sent(&mut forwarder), [MAX_MESSAGE_LEN, 1]);
        forwarder.abandon();
        let gone = show.show(Stream::Stderr, b"x\n").unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::BrokenPipe);
    }
}
