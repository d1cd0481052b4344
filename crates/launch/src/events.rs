//! Event log of a job, one JSON object per line, for operators and notebooks.
//!
//! `docs/events.md` describes the format. The launcher that coordinates the job writes them, from a thread of its own:
//! a slow or closed reader causes lost events, and never delays the job.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, SystemTime};

use brigade_rendezvous::wake;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde::{Deserialize, Serialize};

pub use brigade_rendezvous::{CauseKind, HostPart, JobCause, JobEvent};

use crate::output::write_all;
use crate::{LaunchError, ValueError};

/// Version of the event format. Adding a field or an event keeps the version; removing a field or changing its meaning
/// increases it.
pub const VERSION: u32 = 1;

/// Line of the event log: one event with its job and time.
///
/// ```
/// use brigade_launch::events::{EventLine, JobEvent};
/// let line = r#"{"version":1,"time":"2026-11-22T18:00:00.000Z","job":"night","event":"end","code":0}"#;
/// let line: EventLine = serde_json::from_str(line)?;
/// assert_eq!((line.job.as_str(), line.event), ("night", JobEvent::End { code: 0 }));
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventLine {
    /// Version of the format: [`VERSION`].
    pub version: u32,
    /// Time of the event, in UTC in the format of RFC 3339, by the clock of the launcher that writes it.
    pub time: String,
    /// Name of the job.
    pub job: String,
    /// Event: its kind and fields.
    #[serde(flatten)]
    pub event: JobEvent,
}

/// Destination of a job's events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventsTarget {
    /// Appends to this file, which is created if it does not exist.
    File(PathBuf),
    /// Writes to this descriptor, which the launcher has inherited.
    Descriptor(i32),
}

impl FromStr for EventsTarget {
    type Err = ValueError;

    /// `fd:N`, or the name of a file.
    ///
    /// ```
    /// use brigade_launch::events::EventsTarget;
    /// assert_eq!("fd:3".parse(), Ok(EventsTarget::Descriptor(3)));
    /// assert_eq!("job.jsonl".parse(), Ok(EventsTarget::File("job.jsonl".into())));
    /// assert!("fd:three".parse::<EventsTarget>().is_err());
    /// ```
    fn from_str(text: &str) -> Result<Self, ValueError> {
        let wrong =
            || ValueError::expected("a file, or fd:N with the number of a descriptor", text);
        match text.strip_prefix("fd:") {
            Some(number) => {
                let is_number = number.bytes().all(|byte| byte.is_ascii_digit());
                let number = number.parse().ok().filter(|_| is_number);
                number.map(Self::Descriptor).ok_or_else(wrong)
            }
            None if text.is_empty() => Err(wrong()),
            None => Ok(Self::File(text.into())),
        }
    }
}

impl fmt::Display for EventsTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::Descriptor(number) => write!(f, "fd:{number}"),
        }
    }
}

impl EventsTarget {
    /// Opens the file, or takes over the descriptor: it is closed in this process on `exec`, so that ranks do not
    /// inherit it and keep a reader waiting for its end.
    fn open(&self) -> Result<File, LaunchError> {
        let file = match self {
            // A pipe that is not read must not block the job.
            Self::File(path) => OpenOptions::new()
                .append(true)
                .create(true)
                .custom_flags(OFlag::O_NONBLOCK.bits())
                .open(path)
                .map_err(|error| match error.raw_os_error() {
                    Some(number) if number == Errno::ENXIO as i32 => io::Error::other(
                        "it is a pipe that no process reads: start the reader first",
                    ),
                    _ => error,
                }),
            Self::Descriptor(number) => take_inherited(*number).map(File::from),
        };
        file.map_err(LaunchError::system(format!("write events to {self} (--events)")))
    }
}

/// Takes ownership of a descriptor that this process has inherited.
fn take_inherited(number: i32) -> io::Result<OwnedFd> {
    let other = |reason: String| io::Error::new(io::ErrorKind::InvalidInput, reason);
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{number}"));
    let info = info.map_err(|_| {
        let example = format!("`brigade launch --events fd:{number} ... {number}>FILE`");
        other(format!("descriptor {number} is not open; a shell opens it with {example}"))
    })?;
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|octal| i32::from_str_radix(octal.trim(), 8).ok()).unwrap_or(0);
    // All descriptors that this process has opened itself are closed on exec.
    if flags & OFlag::O_CLOEXEC.bits() != 0 {
        return Err(other(format!("descriptor {number} was not inherited")));
    }
    if flags & OFlag::O_ACCMODE.bits() == OFlag::O_RDONLY.bits() {
        return Err(other(format!("descriptor {number} is open for reading only")));
    }
    // Sent through a socket to this process: the only way without `unsafe` from a number to an owned descriptor that
    // works for files, pipes, terminals and sockets.
    let (near, far) = UnixStream::pair()?;
    let numbers = [number];
    let rights = [ControlMessage::ScmRights(&numbers)];
    let byte = [IoSlice::new(b"e")];
    sendmsg::<()>(far.as_raw_fd(), &byte, &rights, MsgFlags::MSG_NOSIGNAL, None)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut received = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(&near, &mut [IoSliceMut::new(&mut byte)], &mut received, RecvFlags::CMSG_CLOEXEC)?;
    let taken = received.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut taken) => taken.next(),
        _ => None,
    });
    if number > 2 {
        nix::unistd::close(number)?;
    }
    taken.ok_or_else(|| io::Error::other("the system did not hand the descriptor over"))
}

/// The launcher's end of the thread that writes events.
#[derive(Debug)]
pub(crate) struct EventLog {
    orders: Sender<Order>,
    unwritten: Arc<AtomicUsize>,
    job: String,
    /// Error messages for the user.
    troubles: wake::Receiver<String>,
}

/// Handle with which other threads write events.
#[derive(Clone, Debug)]
pub(crate) struct EventSender {
    orders: Sender<Order>,
    unwritten: Arc<AtomicUsize>,
    job: String,
    troubles: wake::Sender<String>,
    target: String,
    /// `true` if the user has been informed that events are lost.
    is_lossy: Arc<AtomicBool>,
}

enum Order {
    Line(String),
    /// Answers when all earlier events are written.
    Flush(Sender<()>),
}

impl fmt::Debug for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Line(_) => "Line",
            Self::Flush(_) => "Flush",
        })
    }
}

impl EventLog {
    /// Opens the target and starts the thread.
    ///
    /// Fails if the target cannot be written to.
    pub(crate) fn start(
        target: &EventsTarget,
        job: &str,
    ) -> Result<(Self, EventSender), LaunchError> {
        let file = target.open()?;
        let start = || LaunchError::system("start a thread");
        let troubles = wake::Receiver::new().map_err(start())?;
        let (orders, inbox) = mpsc::channel();
        let unwritten = Arc::new(AtomicUsize::new(0));
        let sender = EventSender {
            orders: orders.clone(),
            unwritten: Arc::clone(&unwritten),
            job: job.to_owned(),
            troubles: troubles.sender(),
            target: target.to_string(),
            is_lossy: Arc::default(),
        };
        let (trouble, written, name) =
            (troubles.sender(), Arc::clone(&unwritten), target.to_string());
        thread::Builder::new()
            .name("events".to_owned())
            .spawn(move || write_events(file, &inbox, &written, &trouble, &name))
            .map_err(start())?;
        Ok((Self { orders, unwritten, job: job.to_owned(), troubles }, sender))
    }

    /// Returns an error message that was not reported yet, if there is one.
    pub(crate) fn trouble(&self) -> Option<String> {
        self.troubles.try_recv()
    }

    /// Waits until everything is written, but not for long: a thread that still writes then is left alone and ends with
    /// this process. Returns what went wrong.
    pub(crate) fn finish(self) -> Option<String> {
        let (done, is_done) = mpsc::channel();
        let _ = self.orders.send(Order::Flush(done));
        let is_late = is_done.recv_timeout(LAST_EVENTS).is_err();
        let unwritten = self.unwritten.load(Ordering::Relaxed);
        self.trouble().or_else(|| {
            (is_late && unwritten > 0).then(|| {
                format!(
                    "the last {unwritten} events of job {} are lost (--events): the reader \
                     did not take them within {} s",
                    self.job,
                    LAST_EVENTS.as_secs()
                )
            })
        })
    }
}

impl AsFd for EventLog {
    /// Returns a descriptor that is readable when there is [trouble](EventLog::trouble).
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.troubles.as_fd()
    }
}

impl EventSender {
    /// Queues an event to be written, unless the queue is full. Never blocks.
    pub(crate) fn record(&self, at: SystemTime, event: JobEvent) {
        let before = self.unwritten.fetch_add(1, Ordering::Relaxed);
        if before >= MAX_UNWRITTEN {
            self.unwritten.fetch_sub(1, Ordering::Relaxed);
            if !self.is_lossy.swap(true, Ordering::Relaxed) {
                let _ = self.troubles.send(format!(
                    "events are lost: {} takes them too slowly (--events)",
                    self.target
                ));
            }
            return;
        }
        let (job, time) = (self.job.clone(), brigade_rank_env::timestamp(at));
        let line = EventLine { version: VERSION, time, job, event };
        // A line of numbers and texts can always be written as JSON.
        if let Ok(mut line) = serde_json::to_string(&line) {
            line.push('\n');
            let _ = self.orders.send(Order::Line(line));
        }
    }
}

/// Runs the thread: writes whole lines, until one cannot be written.
fn write_events(
    mut file: File,
    inbox: &Receiver<Order>,
    unwritten: &AtomicUsize,
    troubles: &wake::Sender<String>,
    target: &str,
) {
    let mut is_open = true;
    while let Ok(order) = inbox.recv() {
        match order {
            Order::Line(line) => {
                if is_open && let Err(error) = write_all(&mut file, line.as_bytes()) {
                    is_open = false;
                    let _ = troubles.send(format!(
                        "no more events are written to {target} (--events): {error}"
                    ));
                }
                unwritten.fetch_sub(1, Ordering::Relaxed);
            }
            Order::Flush(done) => {
                let _ = done.send(());
            }
        }
    }
}

/// Maximum length of the queue: enough for the start and the end of 16,000 ranks while a reader is blocked.
const MAX_UNWRITTEN: usize = 1 << 15;
/// Time limit at the end of the job for writing the last events.
const LAST_EVENTS: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read};
    use std::time::UNIX_EPOCH;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    fn end(code: u8) -> JobEvent {
        JobEvent::End { code }
    }

    #[test]
    fn a_file_is_appended_to() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        for code in [0, 1] {
            let (log, sender) =
                EventLog::start(&EventsTarget::File(path.clone()), "night").unwrap();
            sender.record(UNIX_EPOCH, end(code));
            assert_eq!(log.finish(), None);
        }
        let line = |code| {
            format!(
                "{{\"version\":1,\"time\":\"1970-01-01T00:00:00.000Z\",\"job\":\"night\",\
                 \"event\":\"end\",\"code\":{code}}}\n"
            )
        };
        assert_eq!(fs::read_to_string(path).unwrap(), line(0) + &line(1));
    }

    #[test]
    fn a_pipe_without_a_reader_is_refused_and_one_that_closes_is_told_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let target = EventsTarget::File(path.clone());
        let refused = EventLog::start(&target, "night").unwrap_err().to_string();
        assert!(refused.contains("start the reader first"), "{refused}");

        let open =
            || OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(&path);
        let reader = open().unwrap();
        let (log, sender) = EventLog::start(&target, "night").unwrap();
        sender.record(UNIX_EPOCH, end(0));
        let mut polled = [PollFd::new(reader.as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut polled, PollTimeout::NONE), Ok(1));
        let mut line = String::new();
        BufReader::new(&reader).read_line(&mut line).unwrap();
        assert!(line.ends_with("\"code\":0}\n"), "{line}");
        drop(reader);
        sender.record(UNIX_EPOCH, end(1));
        sender.record(UNIX_EPOCH, end(2));
        let trouble = log.finish().unwrap();
        assert!(trouble.starts_with("no more events are written to "), "{trouble}");
    }

    #[test]
    fn a_reader_that_sleeps_costs_events_and_no_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let mut reader = OpenOptions::new()
            .read(true)
            .custom_flags(OFlag::O_NONBLOCK.bits())
            .open(&path)
            .unwrap();
        let (log, sender) = EventLog::start(&EventsTarget::File(path), "night").unwrap();
        // More than the pipe and the queue can hold together.
        for _ in 0..2 * MAX_UNWRITTEN {
            sender.record(UNIX_EPOCH, end(0));
        }
        let trouble = log.finish().unwrap();
        assert!(trouble.starts_with("events are lost: "), "{trouble}");
        let mut some = vec![0; 4096];
        assert!(reader.read(&mut some).unwrap() > 0);
    }

    #[test]
    fn what_cannot_be_a_descriptor() {
        let refuse = |number| EventsTarget::Descriptor(number).open().unwrap_err().to_string();
        assert!(refuse(4000).contains("descriptor 4000 is not open; a shell opens it with"));
        let own = File::open("/dev/null").unwrap();
        let refused = refuse(own.as_raw_fd());
        assert!(refused.ends_with("was not inherited"), "{refused}");
    }

    #[test]
    fn lines_of_later_versions_can_be_read() {
        let line = r#"{"version":1,"time":"t","job":"j","event":"eclipse","new":{"a":[1]}}"#;
        let line: EventLine = serde_json::from_str(line).unwrap();
        assert_eq!(line.event, JobEvent::Unknown);
        let line =
            r#"{"version":1,"time":"t","job":"j","event":"cause","cause":"x","message":"m"}"#;
        let line: EventLine = serde_json::from_str(line).unwrap();
        let JobEvent::Cause(cause) = line.event else { panic!("{line:?}") };
        assert_eq!(cause.cause, CauseKind::Unknown);
    }
}
