//! One thread that carries the output of all ranks, so that lines never run into each other.
//!
//! It is a thread of its own because a terminal that is paused blocks whoever writes to it, and
//! the agent has signals to answer meanwhile.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use brigade_rendezvous::Stream;

use crate::LaunchError;
use crate::lines::Lines;

/// The agent's side of the thread, which lives as long as the agent: attempts come and go.
#[derive(Debug)]
pub(crate) struct Output {
    thread: JoinHandle<()>,
    orders: Sender<Order>,
    notices: Receiver<Notice>,
    control: UnixStream,
}

/// The output of a rank.
#[derive(Debug)]
pub(crate) struct Streams {
    /// What is written before its lines.
    pub(crate) prefix: String,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
}

/// Where the lines go. Called from the output thread only.
pub(crate) trait Show: Send {
    /// Shows whole lines. May wait; the ranks then wait, too, once their pipes are full.
    ///
    /// `BrokenPipe` says that nobody reads any more; any other error that some lines are lost.
    fn show(&mut self, stream: Stream, lines: &[u8]) -> io::Result<()>;
}

/// This process's own stdout and stderr.
#[derive(Debug)]
pub(crate) struct Terminal([File; 2]);

/// A rank's last lines, oldest first.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Tail {
    pub(crate) stdout: Vec<String>,
    pub(crate) stderr: Vec<String>,
}

/// What the thread has to say when [`Output::control`] is readable.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// Whoever read our output has gone away.
    Closed,
    /// The answer to [`Output::ask_tail`].
    Tail {
        /// Whose, counted on this host.
        local_rank: usize,
        /// The lines.
        tail: Tail,
    },
    /// The answer to [`Output::drain`].
    Drained,
    /// The thread has ended, which only a bug of ours can do.
    Gone,
}

#[derive(Debug)]
enum Order {
    Attach(Vec<Streams>),
    Say(String),
    Tail(usize),
    Drain,
}

impl Output {
    /// Starts the thread.
    pub(crate) fn start(show: Box<dyn Show>) -> io::Result<Self> {
        let (control, far) = UnixStream::pair()?;
        control.set_nonblocking(true)?;
        far.set_nonblocking(true)?;
        let (orders, inbox) = mpsc::channel();
        let (outbox, notices) = mpsc::channel();
        let carrier = Carrier {
            streams: Vec::new(),
            show,
            states: [State::Open, State::Open],
            control: far,
            inbox,
            outbox,
            buffer: vec![0; READ_SIZE],
            written: Vec::new(),
        };
        let thread = thread::Builder::new().name("output".to_owned()).spawn(|| carrier.run())?;
        Ok(Self { thread, orders, notices, control })
    }

    /// Carries the output of an attempt's ranks, in order of local rank, from now on.
    pub(crate) fn attach(&self, ranks: Vec<Streams>) -> Result<(), LaunchError> {
        for pipe in ranks.iter().flat_map(|rank| [&rank.stdout, &rank.stderr]) {
            fcntl(pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))
                .map_err(LaunchError::system("carry the ranks' output"))?;
        }
        self.order(Order::Attach(ranks));
        Ok(())
    }

    /// Puts a line of the launcher's own among those of the ranks, on stderr.
    pub(crate) fn say(&self, text: &str) {
        self.order(Order::Say(format!("brigade: {text}\n")));
    }

    /// Asks for the last lines of a rank that has ended. The answer comes as a notice, late where
    /// whoever reads our output has paused.
    pub(crate) fn ask_tail(&self, local_rank: usize) {
        self.order(Order::Tail(local_rank));
    }

    /// Has written what the attempt's ranks, which have all ended, have left in their pipes, and
    /// what was said before.
    pub(crate) fn drain(&self) {
        self.order(Order::Drain);
    }

    /// Readable when there is a notice.
    pub(crate) fn control(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }

    /// The next notice.
    pub(crate) fn notice(&mut self) -> Option<Notice> {
        // The wake-ups first: one that comes after this makes the socket readable again.
        let ended = match self.control.read(&mut [0; 64]) {
            Ok(n) => n == 0,
            Err(error) => !is_not_yet(&error),
        };
        match self.notices.try_recv() {
            Ok(notice) => Some(notice),
            Err(_) if ended => Some(Notice::Gone),
            Err(_) => None,
        }
    }

    /// Ends the thread. One that cannot write what it has is left alone.
    pub(crate) fn end(self, all_written: bool) {
        drop(self.control);
        if all_written {
            let _ = self.thread.join();
        }
    }

    fn order(&self, order: Order) {
        // A thread that has ended takes no orders, and one with a full socket has been woken.
        let _ = self.orders.send(order);
        let _ = (&self.control).write(&[WAKE]);
    }
}

struct Carrier {
    /// Stdout and stderr of each rank of the attempt, in turn.
    streams: Vec<Carried>,
    show: Box<dyn Show>,
    /// Of stdout and stderr.
    states: [State; 2],
    control: UnixStream,
    inbox: Receiver<Order>,
    outbox: Sender<Notice>,
    buffer: Vec<u8>,
    written: Vec<u8>,
}

struct Carried {
    pipe: Option<File>,
    lines: Lines,
    of: Stream,
}

#[derive(PartialEq, Eq)]
enum State {
    Open,
    /// Some of the output could not be written, and that has been said.
    Lossy,
    /// Nobody reads any more.
    Closed,
}

impl Carrier {
    fn run(mut self) {
        while self.wait_and_carry() {}
    }

    /// Waits for anything to do and does it. False when the agent wants no more of it.
    fn wait_and_carry(&mut self) -> bool {
        let open: Vec<usize> =
            (0..self.streams.len()).filter(|&i| self.streams[i].pipe.is_some()).collect();
        let mut polled = vec![PollFd::new(self.control.as_fd(), PollFlags::POLLIN)];
        polled.extend(open.iter().filter_map(|&i| {
            Some(PollFd::new(self.streams[i].pipe.as_ref()?.as_fd(), PollFlags::POLLIN))
        }));
        if poll(&mut polled, PollTimeout::NONE).is_err() {
            return true;
        }
        let ready: Vec<bool> = polled.iter().map(|fd| fd.any().unwrap_or(true)).collect();
        for (&stream, _) in open.iter().zip(&ready[1..]).filter(|(_, ready)| **ready) {
            self.carry(stream);
        }
        !ready[0] || self.obey()
    }

    fn obey(&mut self) -> bool {
        let agent_lives = match self.control.read(&mut [0; 64]) {
            Ok(n) => n > 0,
            Err(error) => is_not_yet(&error),
        };
        while let Ok(order) = self.inbox.try_recv() {
            match order {
                Order::Attach(ranks) => {
                    self.end_attempt();
                    self.streams = ranks.into_iter().flat_map(Carried::pair).collect();
                }
                Order::Say(text) => self.write(Stream::Stderr, text.as_bytes()),
                Order::Tail(local_rank) => self.tell_tail(local_rank),
                Order::Drain => {
                    self.end_attempt();
                    self.tell(Notice::Drained);
                }
            }
        }
        agent_lives
    }

    /// Writes what is left of ranks that have ended.
    fn end_attempt(&mut self) {
        for stream in 0..self.streams.len() {
            self.drain(stream);
        }
        for stream in 0..self.streams.len() {
            self.end(stream);
        }
        self.streams.clear();
    }

    fn tell_tail(&mut self, local_rank: usize) {
        let first = 2 * local_rank;
        self.drain(first + OUT);
        self.drain(first + ERR);
        let tail = match self.streams.get(first..first + 2) {
            Some(pair) => Tail { stdout: pair[OUT].tail(), stderr: pair[ERR].tail() },
            None => Tail::default(),
        };
        self.tell(Notice::Tail { local_rank, tail });
    }

    fn tell(&mut self, notice: Notice) {
        let _ = self.outbox.send(notice);
        let _ = self.control.write(&[WAKE]);
    }

    /// Carries what a process that has ended has left. No more than a pipe holds: somebody else
    /// may have it, too, and write without end.
    fn drain(&mut self, stream: usize) {
        for _ in 0..LARGEST_PIPE / READ_SIZE {
            if stream >= self.streams.len() || !self.carry(stream) {
                return;
            }
        }
    }

    /// Carries one piece. False when there is none for now, or none any more.
    fn carry(&mut self, index: usize) -> bool {
        let stream = &mut self.streams[index];
        let Some(pipe) = &mut stream.pipe else { return false };
        match pipe.read(&mut self.buffer) {
            Ok(0) => {
                self.end(index);
                false
            }
            Ok(n) => {
                let mut out = std::mem::take(&mut self.written);
                stream.lines.push(&self.buffer[..n], &mut out);
                let of = stream.of;
                self.write(of, &out);
                out.clear();
                self.written = out;
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
        let stream = &mut self.streams[index];
        if stream.pipe.take().is_some() {
            let mut out = Vec::new();
            stream.lines.finish(&mut out);
            let of = stream.of;
            self.write(of, &out);
        }
    }

    /// Whole lines, all at once. What cannot be written is lost: a full disk under the log must
    /// not end a training run, but nobody reading it any more does, as with any program in a pipe.
    fn write(&mut self, stream: Stream, bytes: &[u8]) {
        let state = &mut self.states[stream as usize];
        if *state == State::Closed || bytes.is_empty() {
            return;
        }
        let Err(error) = self.show.show(stream, bytes) else { return };
        if error.kind() == io::ErrorKind::BrokenPipe {
            *state = State::Closed;
            self.tell(Notice::Closed);
        } else if *state == State::Open {
            *state = State::Lossy;
            let name = ["stdout", "stderr"][stream as usize];
            let text = format!("brigade: cannot write to {name}, some output is lost: {error}\n");
            let _ = self.show.show(Stream::Stderr, text.as_bytes());
        }
    }
}

impl Terminal {
    /// The descriptors themselves: std's own stdout buffers and locks.
    pub(crate) fn new() -> io::Result<Self> {
        let file = |fd: BorrowedFd<'_>| Ok(fd.try_clone_to_owned()?.into());
        file(io::stdout().as_fd()).and_then(|out| Ok(Self([out, file(io::stderr().as_fd())?])))
    }
}

impl Show for Terminal {
    fn show(&mut self, stream: Stream, lines: &[u8]) -> io::Result<()> {
        write_all(&mut self.0[stream as usize], lines)
    }
}

impl Carried {
    fn pair(rank: Streams) -> [Self; 2] {
        let carried = |of: Stream, pipe: OwnedFd| Self {
            pipe: Some(pipe.into()),
            lines: Lines::new(&rank.prefix),
            of,
        };
        [carried(Stream::Stdout, rank.stdout), carried(Stream::Stderr, rank.stderr)]
    }

    fn tail(&self) -> Vec<String> {
        self.lines.tail().map(|line| String::from_utf8_lossy(line).into_owned()).collect()
    }
}

/// `write_all` for a descriptor that may have been made non-blocking by whoever shares it.
fn write_all(file: &mut File, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match file.write(bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let mut writable = [PollFd::new(file.as_fd(), PollFlags::POLLOUT)];
                poll(&mut writable, PollTimeout::NONE)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn is_not_yet(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

const OUT: usize = 0;
const ERR: usize = 1;
const WAKE: u8 = b'w';
const READ_SIZE: usize = 1 << 16;
/// What the system allows an ordinary user to make of a pipe.
const LARGEST_PIPE: usize = 1 << 20;
