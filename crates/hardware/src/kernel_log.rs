//! The kernel's log, read message by message without waiting.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use rustix::fs::OFlags;

/// Path of the kernel log.
pub const KMSG: &str = "/dev/kmsg";

/// A reader of the kernel log that never blocks. Starts at the oldest message, or at the next one.
#[derive(Debug)]
pub struct KernelLog {
    file: File,
    /// Beginning of a line whose end has not been read yet.
    pending: Vec<u8>,
}

/// A message of the kernel log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelMessage<'a> {
    /// Time since boot, by the clock of the kernel log.
    pub at: Duration,
    /// Text of the message, in which the kernel has escaped control characters.
    pub text: &'a str,
}

impl KernelLog {
    /// Opens the log at its oldest message.
    ///
    /// # Errors
    /// Fails if the file is missing or this user may not read it.
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
        Ok(Self { file, pending: Vec::new() })
    }

    /// Opens the log at its end, to read only messages logged from now on. The position is exact, whereas the log's
    /// clock may differ from the system's by seconds.
    ///
    /// # Errors
    /// Returns the same errors as [`KernelLog::open`], and fails if the log can be opened but not read.
    pub fn open_at_end(path: &Path) -> io::Result<Self> {
        let mut this = Self::open(path)?;
        this.file.seek(SeekFrom::End(0))?;
        // The kernel may allow opening its log but not reading it.
        this.read(|_| {})?;
        Ok(this)
    }

    /// Reads all messages logged so far and passes each to `take`. Never waits. Stops after 64 MiB, more than the
    /// kernel keeps, so that a flood of messages cannot block the caller.
    ///
    /// # Errors
    /// Fails if the log cannot be read. Messages passed to `take` before that are valid.
    pub fn read(&mut self, mut take: impl FnMut(KernelMessage<'_>)) -> io::Result<()> {
        // The device returns one message per read, and an error when there are no more for now.
        let mut buffer = [0; 8192];
        let mut total = 0;
        while total < MAX_READ {
            let length = match self.file.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // A message was overwritten before it was read: continue with the oldest one left.
                Err(error)
                    if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::Interrupted) =>
                {
                    continue;
                }
                Err(error) => return Err(error),
            };
            total += length;
            self.pending.extend_from_slice(&buffer[..length]);
            let Some(end) = self.pending.iter().rposition(|byte| *byte == b'\n') else {
                // The kernel writes no line this long: not a kernel log.
                if self.pending.len() > MAX_LINE {
                    self.pending.clear();
                }
                continue;
            };
            let lines = String::from_utf8_lossy(&self.pending[..=end]).into_owned();
            lines.lines().filter_map(message).for_each(&mut take);
            self.pending.drain(..=end);
        }
        Ok(())
    }
}

/// Parses a line of `/dev/kmsg`: priority, number, microseconds since boot and flags, a semicolon, the message. Lines
/// that begin with a space continue the message before and give `None`.
fn message(line: &str) -> Option<KernelMessage<'_>> {
    let (header, text) = line.split_once(';').filter(|_| !line.starts_with(' '))?;
    let micros = header.split(',').nth(2)?.parse().ok()?;
    Some(KernelMessage { at: Duration::from_micros(micros), text })
}

const MAX_READ: usize = 64 << 20;
const MAX_LINE: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use super::*;

    fn read(log: &mut KernelLog) -> Vec<(u64, String)> {
        let mut found = Vec::new();
        log.read(|it| found.push((it.at.as_secs(), it.text.to_owned()))).unwrap();
        found
    }

    #[test]
    fn messages_that_are_there_and_those_that_come() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kmsg");
        fs::write(&path, "6,1,500000,-;Linux version 6\n4,2,40500000,-;a;b\n SUBSYSTEM=x;y\nhalf")
            .unwrap();
        let mut all = KernelLog::open(&path).unwrap();
        assert_eq!(read(&mut all), [(0, "Linux version 6".to_owned()), (40, "a;b".to_owned())]);
        let mut new = KernelLog::open_at_end(&path).unwrap();
        assert_eq!(read(&mut new), []);
        let mut writer = OpenOptions::new().append(true).open(&path).unwrap();
        writer.write_all(b"\n3,3,90000000,-;c\n3,4,x,-;d\n3,5,91000000,-;\xff\ne").unwrap();
        assert_eq!(read(&mut new), [(90, "c".to_owned()), (91, "\u{fffd}".to_owned())]);
        assert_eq!(read(&mut new), []);
        assert!(KernelLog::open(&folder.path().join("none")).is_err());
    }

    #[test]
    fn this_hosts_log_where_it_may_be_read() {
        let Ok(mut all) = KernelLog::open(Path::new(KMSG)) else { return };
        let mut times = Vec::new();
        if all.read(|message| times.push(message.at)).is_err() {
            return;
        }
        assert!(!times.is_empty());
        // Messages from before are not read again.
        let newest = times.into_iter().max().unwrap();
        let mut new = KernelLog::open_at_end(Path::new(KMSG)).unwrap();
        // Clocks differ slightly between processors.
        let is_new = |at: Duration| at + Duration::from_secs(1) >= newest;
        new.read(|message| assert!(is_new(message.at), "{message:?}")).unwrap();
    }

    #[test]
    fn a_line_without_an_end_takes_no_memory() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kmsg");
        fs::write(&path, vec![b'x'; 1 << 20]).unwrap();
        let mut log = KernelLog::open(&path).unwrap();
        assert_eq!(read(&mut log), []);
        assert!(log.pending.capacity() < 4 * MAX_LINE);
    }
}
