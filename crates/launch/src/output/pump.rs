//! Main loop of the output thread: copies data from the ranks' pipes to the console and the log files.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use brigade_rank_env::{MAX_REPORT_LEN, ProgressReport};
use brigade_rendezvous::{Stream, wake};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, poll};

use super::color::paint;
use super::folder::{AttemptFiles, LogFile};
use super::lines::Lines;
use super::live::{BETWEEN_DRAWS, Reports};
use super::plan::OutputPlan;
use super::recent::Recent;
use super::report::Report;
use super::show::Show;
use super::streams::LineFilter;
use super::{Notice, Streams, Tail};
use crate::LaunchError;

/// Order of the agent to the output thread.
#[derive(Debug)]
pub(super) enum Order {
    Attach(Attempt),
    /// Shows a whole line on stderr.
    Say(String),
    /// Shows the result of the job on stderr.
    Report(Report),
    Tail(usize),
    Drain,
    /// Writes the remaining output and ends the thread.
    End,
}

/// Streams of an attempt's ranks, and the files they are written to.
#[derive(Debug, Default)]
pub(super) struct Attempt {
    /// Streams of the ranks: stdout and stderr of each.
    streams: Vec<Carried>,
    progress_pipes: Vec<RankProgress>,
    /// Files of the lines that are collected from all ranks, by stream.
    filtered: [Option<LogFile>; 2],
}

/// Source of a rank's progress reports.
#[derive(Debug)]
struct RankProgress {
    rank: usize,
    /// Pipe of the reports. `None` when it has ended.
    pipe: Option<File>,
    /// Incomplete last report.
    begun: Vec<u8>,
}

/// One stream of one rank.
#[derive(Debug)]
struct Carried {
    stream: Stream,
    rank: usize,
    local_rank: usize,
    /// `true` if the stream is read here; otherwise it is the terminal itself.
    is_seen: bool,
    /// Pipe of the stream. `None` when it has ended.
    pipe: Option<File>,
    lines: Lines,
    /// Prefix of its lines on the console. `None` if they are not shown.
    shown: Option<String>,
    file: Option<LogFile>,
    /// Prefix of its lines among the collected ones. `None` if they are not collected.
    collected: Option<String>,
}

impl Attempt {
    pub(super) fn new(
        plan: &OutputPlan,
        ranks: Vec<Streams>,
        files: AttemptFiles,
    ) -> Result<Self, LaunchError> {
        let AttemptFiles { mut logs, filtered, .. } = files;
        let mut streams = Vec::with_capacity(2 * ranks.len());
        let mut progress_pipes = Vec::new();
        for Streams { rank, local_rank, prefix, stdout, stderr, progress } in ranks {
            if let Some(pipe) = progress {
                make_nonblocking(&pipe)?;
                progress_pipes.push(RankProgress {
                    rank,
                    pipe: Some(pipe.into()),
                    begun: Vec::new(),
                });
            }
            for (stream, pipe) in [(Stream::Stdout, stdout), (Stream::Stderr, stderr)] {
                if let Some(pipe) = &pipe {
                    make_nonblocking(pipe)?;
                }
                let route = plan.route(local_rank, stream);
                let painted = || {
                    if plan.color[stream.index()] { paint(&prefix, rank) } else { prefix.clone() }
                };
                let collected = route.duplicate && filtered[stream.index()].is_some();
                streams.push(Carried {
                    stream,
                    rank,
                    local_rank,
                    is_seen: pipe.is_some(),
                    pipe: pipe.map(File::from),
                    lines: Lines::default(),
                    shown: route.console.then(painted),
                    file: logs.get_mut(local_rank).and_then(|logs| logs[stream.index()].take()),
                    collected: collected.then(|| prefix.clone()),
                });
            }
        }
        Ok(Self { streams, progress_pipes, filtered })
    }
}

pub(super) struct Pump {
    attempt: Attempt,
    filters: [Option<LineFilter>; 2],
    console: Console,
    recent: Recent,
    /// Last progress reports of the ranks.
    reports: Reports,
    /// `true` if bars of Python's tqdm are read as progress reports.
    reads_bars: bool,
    /// Time at which changed reports are shown.
    show_at: Option<Instant>,
    shown_at: Option<Instant>,
    /// `true` if a log file could not be written and the user has been informed.
    logs_are_lossy: bool,
    inbox: wake::Receiver<Order>,
    outbox: wake::Sender<Notice>,
    buffer: Vec<u8>,
    room: Buffers,
}

/// Buffers for one piece of output.
#[derive(Default)]
struct Buffers {
    shown: Vec<u8>,
    collected: Vec<u8>,
}

struct Console {
    show: Box<dyn Show>,
    state: [State; 2],
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    /// Some of the output could not be written, and the user has been informed.
    Lossy,
    /// The reader has closed the stream.
    Closed,
}

/// Response to a failure to show output.
enum WriteFailure {
    Nothing,
    Message(String),
    Closed,
}

impl Pump {
    pub(super) fn new(
        plan: &OutputPlan,
        show: Box<dyn Show>,
        inbox: wake::Receiver<Order>,
        outbox: wake::Sender<Notice>,
    ) -> Self {
        Self {
            attempt: Attempt::default(),
            filters: plan.duplicate.clone(),
            console: Console { show, state: [State::Open; 2] },
            recent: Recent::new(),
            reports: Reports::new(),
            reads_bars: !plan.quiet,
            show_at: None,
            shown_at: None,
            logs_are_lossy: false,
            inbox,
            outbox,
            buffer: vec![0; READ_SIZE],
            room: Buffers::default(),
        }
    }

    pub(super) fn run(mut self) {
        while self.wait_and_carry() {}
        self.drain();
    }

    /// Waits for an event and handles it. Returns `false` after the agent's order to end.
    fn wait_and_carry(&mut self) -> bool {
        let streams = &self.attempt.streams;
        let open: Vec<usize> = (0..streams.len()).filter(|&i| streams[i].pipe.is_some()).collect();
        let mut polled = vec![PollFd::new(self.inbox.as_fd(), PollFlags::POLLIN)];
        polled.extend(open.iter().filter_map(|&i| {
            Some(PollFd::new(streams[i].pipe.as_ref()?.as_fd(), PollFlags::POLLIN))
        }));
        let pipes = &self.attempt.progress_pipes;
        let telling: Vec<usize> = (0..pipes.len()).filter(|&i| pipes[i].pipe.is_some()).collect();
        polled.extend(telling.iter().filter_map(|&i| {
            Some(PollFd::new(pipes[i].pipe.as_ref()?.as_fd(), PollFlags::POLLIN))
        }));
        if poll(&mut polled, wake::until(self.show_at)).is_err() {
            return true;
        }
        let ready: Vec<bool> = polled.iter().map(|fd| fd.any().unwrap_or(true)).collect();
        let (streams, telling_ready) = ready[1..].split_at(open.len());
        for (&stream, _) in open.iter().zip(streams).filter(|(_, ready)| **ready) {
            self.carry(stream);
        }
        for (&index, _) in telling.iter().zip(telling_ready).filter(|(_, ready)| **ready) {
            self.hear_report(index);
        }
        self.show_reports();
        !ready[0] || self.on_orders()
    }

    /// Carries out the received orders. Returns `false` after the agent's order to end.
    fn on_orders(&mut self) -> bool {
        while let Some(order) = self.inbox.try_recv() {
            match order {
                Order::Attach(attempt) => {
                    self.drain();
                    self.attempt = attempt;
                }
                Order::Say(text) => self.show(Stream::Stderr, text.as_bytes()),
                Order::Report(report) => {
                    if let Some(text) = report.text(&self.recent) {
                        self.show(Stream::Stderr, format!("brigade: {text}\n").as_bytes());
                    }
                }
                Order::Tail(local_rank) => self.answer_tail(local_rank),
                Order::Drain => {
                    let tails = self.drain();
                    self.console.show.drained();
                    self.notify(Notice::Drained(tails));
                }
                Order::End => return false,
            }
        }
        true
    }

    /// Reads the progress reports of a rank.
    fn hear_report(&mut self, index: usize) {
        let progress = &mut self.attempt.progress_pipes[index];
        let Some(pipe) = &mut progress.pipe else { return };
        match pipe.read(&mut self.buffer) {
            Ok(0) => progress.pipe = None,
            Ok(n) => {
                progress.begun.extend_from_slice(&self.buffer[..n]);
                let end =
                    progress.begun.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
                let rest = progress.begun.split_off(end);
                let lines = std::mem::replace(&mut progress.begun, rest);
                // A line without an end is not a report.
                progress.begun.truncate(MAX_REPORT_LEN);
                let rank = progress.rank;
                let reports = lines.split(|byte| *byte == b'\n').rev();
                if let Some(report) = reports.filter_map(ProgressReport::decode).next() {
                    self.note(rank, report);
                }
            }
            Err(error) if is_not_yet(&error) => {}
            Err(_) => progress.pipe = None,
        }
    }

    fn note(&mut self, rank: usize, report: ProgressReport) {
        if report.done {
            // Removes only the end of the loop that is shown: an inner loop may end while the outer one continues.
            if self.reports.get(&rank).is_none_or(|known| known.label != report.label) {
                return;
            }
            self.reports.remove(&rank);
        } else {
            self.reports.insert(rank, report);
        }
        let next = self.shown_at.map_or_else(Instant::now, |at| at + BETWEEN_DRAWS);
        self.show_at.get_or_insert(next);
    }

    fn show_reports(&mut self) {
        let now = Instant::now();
        if self.show_at.is_some_and(|at| at <= now) {
            (self.show_at, self.shown_at) = (None, Some(now));
            if !self.console.show.progress(&self.reports) {
                self.show_at = Some(now + BETWEEN_DRAWS);
            }
        }
    }

    /// Removes the progress reports at the end of an attempt.
    fn forget_reports(&mut self) {
        (self.show_at, self.shown_at) = (None, None);
        if !std::mem::take(&mut self.reports).is_empty() {
            self.console.show.progress(&self.reports);
        }
    }

    fn answer_tail(&mut self, local_rank: usize) {
        for stream in 0..self.attempt.streams.len() {
            if self.attempt.streams[stream].local_rank == local_rank {
                self.carry_the_rest(stream);
            }
        }
        let tail = self
            .attempt
            .streams
            .chunks(2)
            .find(|pair| pair[0].local_rank == local_rank)
            .map(tail_of)
            .unwrap_or_default();
        self.notify(Notice::Tail { local_rank, tail });
    }

    /// Writes the remaining output of the attempt. Returns the last lines of the streams.
    fn drain(&mut self) -> Vec<Tail> {
        for stream in 0..self.attempt.streams.len() {
            self.carry_the_rest(stream);
        }
        for stream in 0..self.attempt.streams.len() {
            self.end(stream);
        }
        self.forget_reports();
        std::mem::take(&mut self.attempt).streams.chunks(2).map(tail_of).collect()
    }

    /// Copies what a rank wrote before its end: no more than its pipe holds, because a child of the rank may continue
    /// to write for ever.
    fn carry_the_rest(&mut self, stream: usize) {
        let pieces = LARGEST_PIPE / READ_SIZE;
        (0..pieces).take_while(|_| self.carry(stream)).for_each(drop);
    }

    /// Carries one piece. Returns `false` when there is none for now, or none any more.
    fn carry(&mut self, index: usize) -> bool {
        let carried = &mut self.attempt.streams[index];
        let Some(pipe) = &mut carried.pipe else { return false };
        match pipe.read(&mut self.buffer) {
            Ok(0) => {
                self.end(index);
                false
            }
            Ok(n) => {
                let piece = &self.buffer[..n];
                let lost = carried.file.as_mut().and_then(|file| file.write(piece).err());
                let filter = self.filters[carried.stream.index()].as_ref();
                let mut bar = None;
                let bars = self.reads_bars.then_some(&mut bar);
                let (lines, each) = carried.route(filter, &mut self.room, bars);
                lines.push(piece, each);
                let rank = carried.rank;
                if self.reads_bars && carried.stream == Stream::Stderr {
                    bar = tqdm(carried.lines.begun()).or(bar);
                }
                if let Some(report) = bar {
                    self.note(rank, report);
                }
                self.report_lost(lost);
                self.pass_on(index);
                true
            }
            Err(error) if is_not_yet(&error) => false,
            Err(_) => {
                self.end(index);
                false
            }
        }
    }

    fn end(&mut self, index: usize) {
        let carried = &mut self.attempt.streams[index];
        if carried.pipe.take().is_some() {
            let filter = self.filters[carried.stream.index()].as_ref();
            let (lines, each) = carried.route(filter, &mut self.room, None);
            lines.finish(each);
            self.pass_on(index);
        }
    }

    /// Writes the processed piece of a stream.
    fn pass_on(&mut self, index: usize) {
        let stream = self.attempt.streams[index].stream;
        if !self.room.shown.is_empty() {
            let mut shown = std::mem::take(&mut self.room.shown);
            self.show(stream, &shown);
            shown.clear();
            self.room.shown = shown;
        }
        if !self.room.collected.is_empty() {
            let file = self.attempt.filtered[stream.index()].as_mut();
            let lost = file.and_then(|file| file.write(&self.room.collected).err());
            self.room.collected.clear();
            self.report_lost(lost);
        }
    }

    fn show(&mut self, stream: Stream, lines: &[u8]) {
        self.recent.note(stream, lines);
        match self.console.show(stream, lines) {
            WriteFailure::Nothing => {}
            WriteFailure::Closed => self.notify(Notice::Closed),
            WriteFailure::Message(text) => self.show(Stream::Stderr, text.as_bytes()),
        }
    }

    /// Reports lost log output: a full disk under the logs must not end a training run.
    fn report_lost(&mut self, lost: Option<String>) {
        if let Some(what) = lost.filter(|_| !self.logs_are_lossy) {
            self.logs_are_lossy = true;
            let text = format!("brigade: cannot write to {what}; some output is missing there\n");
            self.show(Stream::Stderr, text.as_bytes());
        }
    }

    fn notify(&mut self, notice: Notice) {
        // Fails when the agent has ended.
        let _ = self.outbox.send(notice);
    }
}

impl Carried {
    /// Returns the line splitter, and the function that processes each line. A progress bar that is about to be redrawn
    /// is stored in `bar`, if given, instead of being shown.
    fn route<'a>(
        &'a mut self,
        filter: Option<&'a LineFilter>,
        room: &'a mut Buffers,
        mut bar: Option<&'a mut Option<ProgressReport>>,
    ) -> (&'a mut Lines, impl FnMut(&[u8]) + 'a) {
        let Self { lines, shown, collected, stream, .. } = self;
        let each = move |line: &[u8]| {
            if let Some(bar) = bar.as_deref_mut().filter(|_| *stream == Stream::Stderr) {
                let report = tqdm(line);
                // The last state of a progress bar is a line, and the bar has ended.
                let done = line.ends_with(b"\n");
                let is_drawn_over = report.is_some() || line.trim_ascii().is_empty();
                *bar = report.map(|it| ProgressReport { done, ..it }).or_else(|| bar.take());
                if is_drawn_over && line.ends_with(b"\r") {
                    return;
                }
            }
            if let Some(prefix) = shown {
                room.shown.extend_from_slice(prefix.as_bytes());
                room.shown.extend_from_slice(line);
            }
            if let Some(prefix) =
                collected.as_ref().filter(|_| filter.is_some_and(|filter| filter.matches(line)))
            {
                room.collected.extend_from_slice(prefix.as_bytes());
                room.collected.extend_from_slice(line);
            }
        };
        (lines, each)
    }
}

impl Console {
    /// Writes whole lines at once and discards what cannot be written: a full disk under the output must not end a
    /// training run. A reader that has closed the stream ends it, as with any program in a pipe.
    fn show(&mut self, stream: Stream, lines: &[u8]) -> WriteFailure {
        let state = &mut self.state[stream.index()];
        if *state == State::Closed {
            return WriteFailure::Nothing;
        }
        match self.show.show(stream, lines) {
            Ok(()) => WriteFailure::Nothing,
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                *state = State::Closed;
                WriteFailure::Closed
            }
            Err(error) if *state == State::Open => {
                *state = State::Lossy;
                let name = stream.name();
                WriteFailure::Message(format!(
                    "brigade: cannot write to {name}, some output is lost: {error}\n"
                ))
            }
            Err(_) => WriteFailure::Nothing,
        }
    }
}

impl LogFile {
    /// Writes bytes, or returns a message with what could not be written and why.
    fn write(&mut self, bytes: &[u8]) -> Result<(), String> {
        let written = self.file.write_all(bytes);
        written.map_err(|error| format!("{}: {error}", self.path.display()))
    }
}

fn tail_of(pair: &[Carried]) -> Tail {
    let lines = |carried: &Carried| -> Vec<String> {
        carried.lines.tail().map(|line| String::from_utf8_lossy(line).into_owned()).collect()
    };
    let (stdout, mut stderr) = (lines(&pair[0]), lines(&pair[1]));
    if !pair[1].is_seen {
        stderr.push(UNSEEN_TAIL.to_owned());
    }
    Tail { stdout, stderr }
}

fn tqdm(line: &[u8]) -> Option<ProgressReport> {
    ProgressReport::from_tqdm(std::str::from_utf8(line).ok()?)
}

fn make_nonblocking(pipe: &OwnedFd) -> Result<(), LaunchError> {
    fcntl(pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))
        .map_err(LaunchError::system("prepare the ranks' pipes"))?;
    Ok(())
}

fn is_not_yet(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

const UNSEEN_TAIL: &str = "(it wrote to the terminal itself)";
const READ_SIZE: usize = 1 << 16;
/// Maximum capacity of a pipe without privileges, in bytes.
const LARGEST_PIPE: usize = 1 << 20;
