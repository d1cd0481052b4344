//! What the kernel complains about: faults of GPUs, and processes it has killed for memory.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;

use nix::fcntl::OFlag;
use serde::{Deserialize, Serialize};

use crate::sources::Sources;

/// The kernel's messages that matter to a job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KernelLog {
    /// Whether this user may read it.
    pub readable: bool,
    /// Faults of NVIDIA's GPUs, oldest first.
    pub xids: Vec<XidMessage>,
    /// Processes killed because memory had run out, oldest first.
    pub kills: Vec<Kill>,
}

/// A fault of a GPU, in the driver's words.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct XidMessage {
    /// NVIDIA's number for the kind of fault.
    pub code: u32,
    /// The whole message.
    pub text: String,
    /// How long ago.
    pub seconds_ago: u64,
}

/// A process killed for memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Kill {
    /// Its name.
    pub program: String,
    /// It was the memory of a control group that had run out, such as a container's.
    pub of_group: bool,
    /// How long ago.
    pub seconds_ago: u64,
}

impl KernelLog {
    pub(super) fn gather(sources: &Sources) -> Self {
        let uptime = sources.value("/proc/uptime").unwrap_or_default();
        let uptime: f64 = uptime.split(' ').next().and_then(|it| it.parse().ok()).unwrap_or(0.0);
        let mut log = Self::default();
        log.readable = for_each_line(sources, |line| log.take(line, uptime)).is_ok();
        log
    }

    /// Priority, number, microseconds since the start, flags; the message.
    fn take(&mut self, line: &str, uptime: f64) {
        let Some((header, message)) = line.split_once(';') else { return };
        let micros = header.split(',').nth(2).and_then(|it| it.parse::<f64>().ok());
        let seconds_ago = (uptime - micros.unwrap_or_default() / 1e6).max(0.0) as u64;
        if let Some(code) = xid(message) {
            keep(&mut self.xids, XidMessage { code, text: message.to_owned(), seconds_ago });
        } else if let Some(program) = killed(message) {
            let of_group = message.contains("Memory cgroup");
            keep(&mut self.kills, Kill { program: program.to_owned(), of_group, seconds_ago });
        }
    }
}

/// Only the newest: a device that has fallen off the bus repeats itself.
fn keep<T>(list: &mut Vec<T>, newest: T) {
    if list.len() >= MOST {
        list.remove(0);
    }
    list.push(newest);
}

/// The device gives one message per read, and an error when there are no more for now.
fn for_each_line(sources: &Sources, mut take: impl FnMut(&str)) -> io::Result<()> {
    let mut file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(sources.path("/dev/kmsg"))?;
    let mut buffer = [0; 8192];
    let mut pending = Vec::new();
    let mut total = 0;
    while total < MAX_LOG_LEN {
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => {
                total += length;
                pending.extend_from_slice(&buffer[..length]);
                let end = pending.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
                String::from_utf8_lossy(&pending[..end]).lines().for_each(&mut take);
                pending.drain(..end);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            // A message was overwritten before we had read it.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// `NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.`
fn xid(message: &str) -> Option<u32> {
    let rest = &message[message.find("Xid (")?..];
    let number = rest.split_once("): ")?.1;
    number.split(|it: char| !it.is_ascii_digit()).next()?.parse().ok()
}

/// `Out of memory: Killed process 1234 (python3) total-vm:...`, and the same with the prefix
/// `Memory cgroup out of memory`.
fn killed(message: &str) -> Option<&str> {
    let (_, rest) = message.split_once("ut of memory: Killed process ")?;
    Some(rest.split_once('(')?.1.split_once(')')?.0)
}

/// More than the kernel keeps; a flood of new messages must not hold us.
const MAX_LOG_LEN: usize = 64 << 20;
const MOST: usize = 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_and_kills_are_found() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("dev")).unwrap();
        std::fs::create_dir_all(root.path().join("proc")).unwrap();
        std::fs::write(root.path().join("proc/uptime"), "100.50 12.0\n").unwrap();
        std::fs::write(
            root.path().join("dev/kmsg"),
            "6,1,500000,-;Linux version 6\n\
             4,2,40500000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=12, GPU has fallen off the bus.\n\
             3,3,90500000,-;Memory cgroup out of memory: Killed process 7 (train) total-vm:1kB\n\
              SUBSYSTEM=memory\n",
        )
        .unwrap();
        let log = KernelLog::gather(&Sources::under(root.path()));
        assert!(log.readable);
        assert_eq!((log.xids[0].code, log.xids[0].seconds_ago), (79, 60));
        let kill = Kill { program: "train".to_owned(), of_group: true, seconds_ago: 10 };
        assert_eq!(log.kills, [kill]);
        assert!(!KernelLog::gather(&Sources::under("/nowhere")).readable);
    }
}
