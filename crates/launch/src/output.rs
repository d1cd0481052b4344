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

use crate::lines::Lines;

/// The agent's side of the thread.
#[derive(Debug)]
pub(crate) struct Output {
    thread: JoinHandle<Vec<Tail>>,
    messages: Sender<String>,
    control: UnixStream,
}

/// A rank's last lines, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Tail {
    pub(crate) stdout: Vec<String>,
    pub(crate) stderr: Vec<String>,
}

/// What the thread has to say when [`Output::control`] is readable.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// Nothing new.
    Nothing,
    /// Whoever read our output has gone away.
    Closed,
    /// All output is written.
    Finished,
}

impl Output {
    /// Starts to carry `(stdout, stderr)` of each rank to this process's own.
    pub(crate) fn start(ranks: Vec<(OwnedFd, OwnedFd)>) -> io::Result<Self> {
        let (control, far) = UnixStream::pair()?;
        control.set_nonblocking(true)?;
        far.set_nonblocking(true)?;
        let (messages, inbox) = mpsc::channel();
        let carrier = Carrier::new(ranks, far, inbox)?;
        let thread = thread::Builder::new().name("output".to_owned()).spawn(|| carrier.run())?;
        Ok(Self { thread, messages, control })
    }

    /// Puts a line of the launcher's own among those of the ranks, on stderr.
    pub(crate) fn say(&self, text: &str) {
        let _ = self.messages.send(format!("brigade: {text}\n"));
        self.order(SAY);
    }

    /// Readable when there is a notice.
    pub(crate) fn control(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }

    /// The next notice.
    pub(crate) fn notice(&mut self) -> Notice {
        let mut byte = [0];
        match self.control.read(&mut byte) {
            Ok(0) => Notice::Finished,
            Ok(_) => Notice::Closed,
            Err(error) if is_not_yet(&error) => Notice::Nothing,
            Err(_) => Notice::Finished,
        }
    }

    /// Asks the thread to write what the ranks, which have all ended, have left in their pipes.
    pub(crate) fn finish(&self) {
        self.order(FINISH);
    }

    /// The last lines of each rank, after [`Notice::Finished`].
    pub(crate) fn into_tails(self) -> Vec<Tail> {
        self.thread.join().unwrap_or_default()
    }

    fn order(&self, byte: u8) {
        // A thread that has ended takes no orders, and one with a full socket has been woken.
        let _ = (&self.control).write(&[byte]);
    }
}

struct Carrier {
    streams: Vec<Stream>,
    /// Stdout and stderr of this process.
    sinks: [Sink; 2],
    control: UnixStream,
    inbox: Receiver<String>,
    buffer: Vec<u8>,
    written: Vec<u8>,
}

struct Stream {
    pipe: Option<File>,
    lines: Lines,
    sink: usize,
}

struct Sink {
    file: File,
    state: SinkState,
}

#[derive(PartialEq, Eq)]
enum SinkState {
    Open,
    /// Some of the output could not be written, and that has been said.
    Lossy,
    /// Nobody reads any more.
    Closed,
}

impl Carrier {
    fn new(
        ranks: Vec<(OwnedFd, OwnedFd)>,
        control: UnixStream,
        inbox: Receiver<String>,
    ) -> io::Result<Self> {
        let mut streams = Vec::with_capacity(2 * ranks.len());
        for (rank, (stdout, stderr)) in ranks.into_iter().enumerate() {
            for (sink, pipe) in [(OUT, stdout), (ERR, stderr)] {
                fcntl(&pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
                streams.push(Stream { pipe: Some(pipe.into()), lines: Lines::new(rank), sink });
            }
        }
        // The descriptors themselves: std's own stdout buffers and locks.
        let sink = |fd: BorrowedFd<'_>| -> io::Result<Sink> {
            Ok(Sink { file: fd.try_clone_to_owned()?.into(), state: SinkState::Open })
        };
        let sinks = [sink(io::stdout().as_fd())?, sink(io::stderr().as_fd())?];
        let buffer = vec![0; READ_SIZE];
        Ok(Self { streams, sinks, control, inbox, buffer, written: Vec::new() })
    }

    fn run(mut self) -> Vec<Tail> {
        while !self.wait_and_carry() {}
        for stream in 0..self.streams.len() {
            while self.carry(stream) {}
        }
        for stream in 0..self.streams.len() {
            self.end(stream);
        }
        self.say_all();
        self.streams
            .chunks(2)
            .map(|pair| Tail { stdout: pair[OUT].tail(), stderr: pair[ERR].tail() })
            .collect()
    }

    /// Waits for anything to do and does it. True when it is time to finish.
    fn wait_and_carry(&mut self) -> bool {
        let open: Vec<usize> =
            (0..self.streams.len()).filter(|&i| self.streams[i].pipe.is_some()).collect();
        let mut polled = vec![PollFd::new(self.control.as_fd(), PollFlags::POLLIN)];
        polled.extend(open.iter().filter_map(|&i| {
            Some(PollFd::new(self.streams[i].pipe.as_ref()?.as_fd(), PollFlags::POLLIN))
        }));
        if poll(&mut polled, PollTimeout::NONE).is_err() {
            return false;
        }
        let ready: Vec<bool> = polled.iter().map(|fd| fd.any().unwrap_or(true)).collect();
        for (&stream, _) in open.iter().zip(&ready[1..]).filter(|(_, ready)| **ready) {
            self.carry(stream);
        }
        ready[0] && self.obey()
    }

    fn obey(&mut self) -> bool {
        let mut orders = [0; 64];
        let orders = match self.control.read(&mut orders) {
            Ok(n) => &orders[..n],
            Err(error) if is_not_yet(&error) => return false,
            Err(_) => &[],
        };
        self.say_all();
        orders.is_empty() || orders.contains(&FINISH)
    }

    fn say_all(&mut self) {
        while let Ok(text) = self.inbox.try_recv() {
            self.write(ERR, text.as_bytes());
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
                let sink = stream.sink;
                self.write(sink, &out);
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
            let sink = stream.sink;
            self.write(sink, &out);
        }
    }

    /// Whole lines, all at once. What cannot be written is lost: a full disk under the log must
    /// not end a training run, but nobody reading it any more does, as with any program in a pipe.
    fn write(&mut self, index: usize, bytes: &[u8]) {
        let sink = &mut self.sinks[index];
        if sink.state == SinkState::Closed || bytes.is_empty() {
            return;
        }
        let Err(error) = write_all(&mut sink.file, bytes) else { return };
        if error.kind() == io::ErrorKind::BrokenPipe {
            sink.state = SinkState::Closed;
            let _ = self.control.write(&[CLOSED]);
        } else if sink.state == SinkState::Open {
            sink.state = SinkState::Lossy;
            let name = ["stdout", "stderr"][index];
            let text = format!("brigade: cannot write to {name}, some output is lost: {error}\n");
            let _ = write_all(&mut self.sinks[ERR].file, text.as_bytes());
        }
    }
}

impl Stream {
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
const SAY: u8 = b's';
const FINISH: u8 = b'f';
const CLOSED: u8 = b'c';
const READ_SIZE: usize = 1 << 16;
