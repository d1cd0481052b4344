//! The output of all hosts on this process's stdout and stderr.
//!
//! Whole lines come from the agents, prefixed with host and rank. A thread of its own writes them, because a paused
//! terminal blocks its writers; unwritten output counts against the agents' credit, so the ranks wait as they would for
//! a terminal of their own.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use brigade_rank_env::ProgressReport;
use brigade_rendezvous::wake::{self, Flag};
use brigade_rendezvous::{JobEvent, OutputSink, Piece, Stream};
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::Signal;
use nix::sys::signalfd::SignalFd;

use crate::agent::next_signal;
use crate::events::EventSender;
use crate::output::{BETWEEN_DRAWS, LiveLine, Recent, Report, Reports, write_all};

/// The launcher's end of the output thread.
pub(crate) struct Output {
    sender: Sender<Order>,
    /// Set when the reader of this process's output has closed it.
    closed: Arc<Flag>,
    /// Set when the thread has ended.
    ended: Arc<Flag>,
    thread: JoinHandle<()>,
}

enum Order {
    Piece(Piece),
    /// Progress reports of a host's ranks.
    Progress(Arc<str>, Vec<(usize, String)>),
    /// Message line, which is not shown with `--quiet`.
    Line(String),
    Report(Report),
}

/// Incomplete last lines of each host, by stream.
type Begun = HashMap<Arc<str>, [Vec<u8>; 2]>;

impl Output {
    /// Starts the output thread.
    pub(crate) fn start(quiet: bool) -> io::Result<Self> {
        let (closed, ended) = (Arc::new(Flag::new()?), Arc::new(Flag::new()?));
        let sink = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().map(File::from);
        // Uses the descriptors directly: std's stdout has a buffer and a lock.
        let sinks = [sink(io::stdout().as_fd())?, sink(io::stderr().as_fd())?];
        let (sender, inbox) = mpsc::channel();
        let writer = Writer::new(sinks, Arc::clone(&closed), quiet);
        let end = SetAtEnd(Arc::clone(&ended));
        let thread = thread::Builder::new().name("output".to_owned()).spawn(move || {
            let _end = end;
            writer.run(&inbox);
        })?;
        Ok(Self { sender, closed, ended, thread })
    }

    /// Returns the coordinator's sink for output.
    pub(crate) fn sink(&self, events: Option<EventSender>) -> Box<dyn OutputSink> {
        Box::new(Sink { orders: self.sender.clone(), events })
    }

    /// Shows a line of the launcher among those of the ranks.
    pub(crate) fn say(&self, line: &str) {
        let _ = self.sender.send(Order::Line(line.to_owned()));
    }

    /// Shows the result of the job, without text that has been shown just before.
    pub(crate) fn report(&self, report: Report) {
        let _ = self.sender.send(Order::Report(report));
    }

    /// Returns a descriptor that is readable when the reader of this process's output has closed it.
    pub(crate) fn notices(&self) -> BorrowedFd<'_> {
        self.closed.as_fd()
    }

    /// Returns `true` if the reader of this process's output has closed it since the last call.
    pub(crate) fn is_closed(&self) -> bool {
        let is_closed = self.closed.wait(Duration::ZERO);
        self.closed.clear();
        is_closed
    }

    /// Writes the remaining output. Gives up after another signal of the user, before or during the call; then the
    /// thread is left running. All other senders must be dropped.
    pub(crate) fn finish(self, signals: &SignalFd, impatient: bool) {
        drop(self.sender);
        let mut deadline = impatient.then(|| Instant::now() + LAST_LINES);
        while deadline.is_none_or(|at| Instant::now() < at) {
            let mut fds = [
                PollFd::new(self.ended.as_fd(), PollFlags::POLLIN),
                PollFd::new(signals.as_fd(), PollFlags::POLLIN),
            ];
            let _ = poll(&mut fds, wake::until(deadline));
            if self.ended.wait(Duration::ZERO) {
                let _ = self.thread.join();
                return;
            }
            while let Some(signal) = next_signal(signals) {
                if matches!(signal, Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP) {
                    deadline = deadline.or_else(|| Some(Instant::now() + LAST_LINES));
                }
            }
        }
    }
}

/// Guard in the thread that reports its end, even if it panics.
struct SetAtEnd(Arc<Flag>);

impl Drop for SetAtEnd {
    fn drop(&mut self) {
        self.0.set();
    }
}

struct Sink {
    orders: Sender<Order>,
    events: Option<EventSender>,
}

impl OutputSink for Sink {
    fn output(&mut self, piece: Piece) {
        let _ = self.orders.send(Order::Piece(piece));
    }

    fn say(&mut self, line: &str) {
        let _ = self.orders.send(Order::Line(line.to_owned()));
    }

    fn progress(&mut self, host: &Arc<str>, ranks: Vec<(usize, String)>) {
        let _ = self.orders.send(Order::Progress(Arc::clone(host), ranks));
    }

    fn record(&mut self, at: SystemTime, event: JobEvent) {
        if let Some(events) = &self.events {
            events.record(at, event);
        }
    }
}

struct Writer {
    /// Stdout and stderr of this process.
    sinks: [File; 2],
    recent: Recent,
    lossy: [bool; 2],
    closed: [bool; 2],
    begun: Begun,
    /// Last progress reports of the ranks, by host.
    reports: HashMap<Arc<str>, Reports>,
    /// Time at which the line was last drawn.
    drawn: Option<Instant>,
    /// Time of the next redraw, if reports have come since then.
    next_draw: Option<Instant>,
    live: LiveLine,
    quiet: bool,
    reader_gone: Arc<Flag>,
}

impl Writer {
    fn new(sinks: [File; 2], reader_gone: Arc<Flag>, quiet: bool) -> Self {
        Self {
            sinks,
            recent: Recent::new(),
            lossy: [false; 2],
            closed: [false; 2],
            begun: Begun::new(),
            reports: HashMap::new(),
            drawn: None,
            next_draw: None,
            live: LiveLine::new(quiet),
            quiet,
            reader_gone,
        }
    }

    fn run(mut self, inbox: &Receiver<Order>) {
        loop {
            let order = match self.next_draw {
                None => inbox.recv().map_err(RecvTimeoutError::from),
                Some(at) => inbox.recv_timeout(at.saturating_duration_since(Instant::now())),
            };
            let order = match order {
                Ok(order) => order,
                Err(RecvTimeoutError::Timeout) => {
                    self.draw(Instant::now());
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => break,
            };
            match order {
                Order::Piece(piece) => self.show(&piece),
                Order::Progress(host, ranks) => self.progress(host, ranks, Instant::now()),
                Order::Line(_) if self.quiet => {}
                Order::Line(line) => {
                    self.write(Stream::Stderr, format!("brigade: {line}\n").as_bytes());
                }
                Order::Report(report) => {
                    self.live.clear();
                    if let Some(text) = report.text(&self.recent) {
                        self.write(Stream::Stderr, format!("brigade: {text}\n").as_bytes());
                    }
                }
            }
        }
        self.live.clear();
        // Incomplete lines of a host that is lost.
        for mut begun in std::mem::take(&mut self.begun).into_values() {
            let begun = Stream::BOTH.into_iter().zip(&mut begun);
            for (stream, bytes) in begun.filter(|it| !it.1.is_empty()) {
                bytes.push(b'\n');
                self.write(stream, bytes);
            }
        }
    }

    /// Shows a piece of output. Pieces of several hosts alternate, so only whole lines are written; but a line without
    /// an end must not use all memory.
    fn show(&mut self, piece: &Piece) {
        let index = piece.stream.index();
        let begun = self.begun.entry(Arc::clone(&piece.host)).or_default();
        let mut bytes = std::mem::take(&mut begun[index]);
        bytes.extend_from_slice(&piece.bytes);
        let end = bytes.iter().rposition(|byte| matches!(byte, b'\n' | b'\r'));
        let mut rest = bytes.split_off(end.map_or(0, |end| end + 1));
        if rest.len() > MAX_LINE_LEN {
            rest.push(b'\n');
            bytes.append(&mut rest);
        }
        begun[index] = rest;
        self.write(piece.stream, &bytes);
    }

    /// Records the progress reports of a host's ranks; an empty list for a lost host. A job of a thousand hosts reports
    /// two thousand times a second, and drawing the line costs time in proportion to the ranks.
    fn progress(&mut self, host: Arc<str>, ranks: Vec<(usize, String)>, now: Instant) {
        let report =
            |(rank, text): (usize, String)| Some((rank, ProgressReport::decode(text.as_bytes())?));
        let reports: Reports = ranks.into_iter().filter_map(report).collect();
        if reports.is_empty() {
            self.reports.remove(&host);
        } else {
            self.reports.insert(host, reports);
        }
        match self.next_draw.or_else(|| Some(self.drawn? + BETWEEN_DRAWS)) {
            Some(due) if due > now => self.next_draw = Some(due),
            _ => self.draw(now),
        }
    }

    /// Shows the progress of the ranks of all hosts.
    fn draw(&mut self, now: Instant) {
        (self.drawn, self.next_draw) = (Some(now), None);
        let all = self.reports.values().flatten();
        let all: Reports = all.map(|(rank, report)| (*rank, report.clone())).collect();
        if let Some(line) = self.live.show(&all) {
            self.write(Stream::Stderr, line.as_bytes());
        }
    }

    /// Writes bytes and discards what cannot be written: a full disk under the log must not end a training run. A
    /// reader that has closed the stream ends it, as with any program in a pipe.
    fn write(&mut self, stream: Stream, bytes: &[u8]) {
        let index = stream.index();
        if self.closed[index] || bytes.is_empty() {
            return;
        }
        let Self { sinks, live, recent, .. } = self;
        recent.note(stream, bytes);
        let written = live.around(|| write_all(&mut sinks[index], bytes));
        let Err(error) = written else { return };
        if error.kind() == io::ErrorKind::BrokenPipe {
            self.closed[index] = true;
            self.reader_gone.set();
        } else if !std::mem::replace(&mut self.lossy[index], true) {
            let name = stream.name();
            let text = format!("brigade: cannot write to {name}, some output is lost: {error}\n");
            let _ = write_all(&mut self.sinks[Stream::Stderr.index()], text.as_bytes());
        }
    }
}

/// Maximum length of a line. More than the agents let through without a line end.
const MAX_LINE_LEN: usize = 2 << 20;
/// Time limit for writing the last lines of a stopped job after the user has interrupted the wait.
const LAST_LINES: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_drawn_a_few_times_a_second_and_forgets_hosts_that_are_gone() {
        let sink = || File::options().write(true).open("/dev/null").unwrap();
        let reader_gone = Arc::new(Flag::new().unwrap());
        let mut writer = Writer::new([sink(), sink()], reader_gone, true);
        let start = Instant::now();
        let mut report = |host: usize, ranks: &[usize], millis: u64| {
            let now = start + Duration::from_millis(millis);
            let text = r#"{"label":"epoch","position":1,"rate":1.0}"#;
            let ranks = ranks.iter().map(|rank| (*rank, text.to_owned())).collect();
            writer.progress(format!("node{host}").into(), ranks, now);
            let since = |at: Instant| (at - start).as_millis();
            (writer.reports.len(), writer.drawn.map(since), writer.next_draw.map(since))
        };
        assert_eq!(report(0, &[0, 1], 0), (1, Some(0), None));
        for host in 1..500 {
            assert_eq!(report(host, &[2 * host], 100), (host + 1, Some(0), Some(250)));
        }
        assert_eq!(report(0, &[], 200), (499, Some(0), Some(250)));
        assert_eq!(report(1, &[2], 260), (499, Some(260), None));
    }
}
