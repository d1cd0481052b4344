//! A non-blocking stream of messages over one or two file descriptors.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{Shutdown, shutdown};
use nix::unistd::{read, write};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::channel::{Channel, MAX_RECORD, RecordTooLong, Records, record};
use crate::{Decoder, FrameError, encode};

/// Error that makes a connection unusable.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// The other side has ended, or has closed the connection.
    #[error("the connection was closed")]
    Closed,
    /// The other side has ended in the middle of a message.
    #[error("the connection was closed in the middle of a message")]
    CutOff,
    /// The connection was reset: the other side has ended without reading all data, or a gateway has dropped the
    /// connection.
    #[error("the connection was reset")]
    Reset,
    /// The operating system reports that the other side cannot be reached.
    #[error("the connection broke: {}", crate::plain_text(.0))]
    Broken(io::Error),
    /// No data was received for too long: the other side or the network has failed.
    #[error("no message from the other side for {seconds} s")]
    Silent {
        /// Time without received data, in seconds.
        seconds: f64,
    },
    /// The other side does not read the data that is sent to it.
    #[error("the other side has left {bytes} bytes unread")]
    Stuck {
        /// Number of bytes that wait to be sent.
        bytes: usize,
    },
    /// A message failed authentication: it is not from the other side, or was changed on the way.
    #[error("a message was changed or forged on its way")]
    Forged,
    /// The other side has a different protocol.
    #[error(transparent)]
    Protocol(#[from] FrameError),
}

/// Connection that both ends use. It does not depend on the kind of its messages.
#[derive(Debug)]
pub(crate) struct Connection {
    /// Shared with the thread that polls it.
    reader: Arc<OwnedFd>,
    /// Writing descriptor; `None` if one socket carries both directions.
    writer: Option<Arc<OwnedFd>>,
    /// Over TCP: data that was read and is not decrypted yet.
    records: Option<Records>,
    /// Encrypted channel. Set over TCP after the handshake.
    channel: Option<Box<Channel>>,
    decoder: Decoder,
    outbox: Vec<u8>,
    /// Number of bytes of `outbox` that have been sent.
    sent: usize,
    /// Maximum number of unsent bytes. More means that the other side does not read.
    most: usize,
    /// Error after which nothing can be sent any more. Data that the other side has sent before can still be read.
    write_error: Option<WriteError>,
    /// `true` if nothing will be sent any more.
    finished: bool,
    last_received: Instant,
    last_sent: Instant,
}

#[derive(Clone, Copy, Debug)]
enum WriteError {
    Broken(Errno),
    Stuck(usize),
}

impl Connection {
    pub(crate) fn new(reader: OwnedFd, writer: Option<OwnedFd>, most: usize) -> io::Result<Self> {
        for fd in [Some(&reader), writer.as_ref()].into_iter().flatten() {
            let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
            fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        }
        let now = Instant::now();
        Ok(Self {
            reader: Arc::new(reader),
            writer: writer.map(Arc::new),
            records: None,
            channel: None,
            decoder: Decoder::default(),
            outbox: Vec::new(),
            sent: 0,
            most,
            write_error: None,
            finished: false,
            last_received: now,
            last_sent: now,
        })
    }

    /// Expects the records of a handshake, and then, until [`Connection::lift_limit`], only short messages.
    pub(crate) fn limit_frames(&mut self, longest: usize) {
        self.decoder = Decoder::limited(longest);
        self.records = Some(Records::default());
    }

    /// Encrypts all further data.
    pub(crate) fn secure(&mut self, channel: Box<Channel>) {
        self.channel = Some(channel);
    }

    /// Returns the value that represents the name of a job on this connection, if it is encrypted.
    pub(crate) fn job_tag(&self, run_id: &str) -> Option<String> {
        self.channel.as_ref().map(|channel| channel.job_tag(run_id))
    }

    pub(crate) fn lift_limit(&mut self) {
        self.decoder.lift_limit();
    }

    pub(crate) fn read_fd(&self) -> BorrowedFd<'_> {
        self.reader.as_fd()
    }

    pub(crate) fn write_fd(&self) -> BorrowedFd<'_> {
        self.writer.as_ref().unwrap_or(&self.reader).as_fd()
    }

    /// The descriptors of both directions, to be polled while another thread uses the stream.
    pub(crate) fn ends(&self) -> [Arc<OwnedFd>; 2] {
        let writer = self.writer.as_ref().unwrap_or(&self.reader);
        [Arc::clone(&self.reader), Arc::clone(writer)]
    }

    pub(crate) fn is_one_socket(&self) -> bool {
        self.writer.is_none()
    }

    pub(crate) fn needs_write(&self) -> bool {
        !self.finished && self.write_error.is_none() && self.sent < self.outbox.len()
    }

    /// Returns the time at which the last byte was received.
    pub(crate) fn last_received(&self) -> Instant {
        self.last_received
    }

    /// Returns the time at which the last message was passed on to be sent.
    pub(crate) fn last_sent(&self) -> Instant {
        self.last_sent
    }

    pub(crate) fn send(&mut self, message: &impl Serialize) {
        let frame = encode(message);
        self.send_bytes(&frame);
    }

    /// Sends a record of the handshake.
    pub(crate) fn send_record(&mut self, body: &[u8]) {
        self.send_bytes(&record(body));
    }

    fn send_bytes(&mut self, bytes: &[u8]) {
        self.last_sent = Instant::now();
        if self.write_error.is_some() || self.finished {
            return;
        }
        let unsent = self.outbox.len() - self.sent;
        // Checked before this message is added, so that a single long message is allowed.
        if unsent > self.most {
            self.write_error = Some(WriteError::Stuck(unsent));
            return;
        }
        self.outbox.drain(..self.sent);
        self.sent = 0;
        match &mut self.channel {
            Some(channel) => channel.seal(bytes, &mut self.outbox),
            None => self.outbox.extend_from_slice(bytes),
        }
        self.flush();
    }

    pub(crate) fn flush(&mut self) {
        while self.needs_write() {
            let writer = self.writer.as_ref().unwrap_or(&self.reader);
            match write(writer, &self.outbox[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return,
                Err(error) => self.write_error = Some(WriteError::Broken(error)),
            }
        }
        self.sent = 0;
        self.outbox.clear();
        self.outbox.shrink_to(KEPT);
    }

    /// Returns the next message, if it was received completely.
    pub(crate) fn receive<T: DeserializeOwned>(&mut self) -> Result<Option<T>, LinkError> {
        loop {
            if let Some(message) = self.decoder.next()? {
                return Ok(Some(message));
            }
            if !self.open_record()? && !self.read()? {
                return Ok(None);
            }
        }
    }

    /// Returns the next record of the handshake, if it was received completely.
    pub(crate) fn receive_record(&mut self, longest: usize) -> Result<Option<Vec<u8>>, LinkError> {
        loop {
            let records = self.records.get_or_insert_default();
            if let Some(record) = records.next(longest).map_err(too_long)? {
                return Ok(Some(record.to_vec()));
            }
            if !self.read()? {
                return Ok(None);
            }
        }
    }

    /// Decrypts one record, if it was received completely.
    fn open_record(&mut self) -> Result<bool, LinkError> {
        let (Some(records), Some(channel)) = (&mut self.records, &mut self.channel) else {
            return Ok(false);
        };
        let Some(record) = records.next(MAX_RECORD).map_err(too_long)? else { return Ok(false) };
        self.decoder.push(&channel.open(record).map_err(|_| LinkError::Forged)?);
        Ok(true)
    }

    /// Reads the available data. Returns `false` if there is none.
    fn read(&mut self) -> Result<bool, LinkError> {
        let mut buffer = [0; 16 << 10];
        loop {
            match read(&self.reader, &mut buffer) {
                // The system reports an error only to the first call after it, which may have been a write.
                Ok(0) if let Some(error) = self.broken() => return Err(error),
                Ok(0) if self.has_partial() => return Err(LinkError::CutOff),
                Ok(0) => return Err(LinkError::Closed),
                Ok(count) => {
                    self.last_received = Instant::now();
                    match &mut self.records {
                        Some(records) => records.push(&buffer[..count]),
                        None => self.decoder.push(&buffer[..count]),
                    }
                    return Ok(true);
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return self.write_error().map_or(Ok(false), Err),
                Err(Errno::ECONNRESET) => return Err(LinkError::Reset),
                Err(error) => return Err(LinkError::Broken(error.into())),
            }
        }
    }

    fn has_partial(&self) -> bool {
        self.decoder.has_partial() || self.records.as_ref().is_some_and(Records::has_partial)
    }

    /// Returns the reason why nothing can be sent any more.
    pub(crate) fn write_error(&self) -> Option<LinkError> {
        Some(match self.write_error? {
            // The other side has ended, and has sent nothing since.
            WriteError::Broken(Errno::EPIPE) => LinkError::Closed,
            WriteError::Broken(Errno::ECONNRESET) => LinkError::Reset,
            WriteError::Broken(error) => LinkError::Broken(error.into()),
            WriteError::Stuck(bytes) => LinkError::Stuck { bytes },
        })
    }

    /// Returns an error of the connection that an earlier write has met, if there is one.
    fn broken(&self) -> Option<LinkError> {
        match self.write_error()? {
            error @ (LinkError::Reset | LinkError::Broken(_)) => Some(error),
            _ => None,
        }
    }

    /// Closes the sending direction. Data that the other side still sends can be read.
    pub(crate) fn finish(&mut self) {
        match self.writer.take() {
            Some(writer) => drop(writer),
            None => drop(shutdown(self.reader.as_raw_fd(), Shutdown::Write)),
        }
        self.finished = true;
    }
}

fn too_long(RecordTooLong { length, longest }: RecordTooLong) -> LinkError {
    FrameError::TooLong { length, longest }.into()
}

/// Capacity that the outbox keeps when it is empty, in bytes.
const KEPT: usize = 16 << 10;
