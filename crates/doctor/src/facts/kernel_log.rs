//! Facts from the kernel's log: faults of GPUs, and processes killed for lack of memory.

use std::time::Duration;

use brigade_hardware::KMSG;
use serde::{Deserialize, Serialize};

use brigade_hardware::Sources;

/// Messages of the kernel's log that matter to a job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KernelLog {
    /// `true` if this user may read the log.
    pub readable: bool,
    /// Faults of GPUs, oldest first.
    pub faults: Vec<DeviceMessage>,
    /// Processes killed for lack of memory, oldest first.
    pub kills: Vec<Kill>,
}

/// Fault of a GPU, as the driver reported it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceMessage {
    /// Text of the message.
    pub text: String,
    /// Age of the message in seconds.
    pub seconds_ago: u64,
}

/// Process killed for lack of memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Kill {
    /// Name of the killed program.
    pub program: String,
    /// `true` if the memory limit of a control group was reached, such as a container's.
    pub of_group: bool,
    /// Age of the message in seconds.
    pub seconds_ago: u64,
}

impl KernelLog {
    pub(super) fn gather(sources: &Sources) -> Self {
        let uptime = sources.value("/proc/uptime").unwrap_or_default();
        let uptime: f64 = uptime.split(' ').next().and_then(|it| it.parse().ok()).unwrap_or(0.0);
        let mut log = Self::default();
        let reader = brigade_hardware::KernelLog::open(&sources.path(KMSG));
        let read =
            reader.and_then(|mut it| it.read(|message| log.take(message.at, message.text, uptime)));
        log.readable = read.is_ok();
        log
    }

    fn take(&mut self, at: Duration, text: &str, uptime: f64) {
        let seconds_ago = (uptime - at.as_secs_f64()).max(0.0) as u64;
        if brigade_hardware::fault_in(text).is_some() {
            keep(&mut self.faults, DeviceMessage { text: text.to_owned(), seconds_ago });
        } else if let Some(program) = killed(text) {
            let of_group = text.contains("Memory cgroup");
            keep(&mut self.kills, Kill { program: program.to_owned(), of_group, seconds_ago });
        }
    }
}

/// Keeps only the newest messages: a device that has fallen off the bus repeats its own.
fn keep<T>(list: &mut Vec<T>, newest: T) {
    if list.len() >= MOST {
        list.remove(0);
    }
    list.push(newest);
}

/// Parses `Out of memory: Killed process 1234 (python3) total-vm:...`, also with the prefix `Memory cgroup out of
/// memory`.
fn killed(message: &str) -> Option<&str> {
    let (_, rest) = message.split_once("ut of memory: Killed process ")?;
    Some(rest.split_once('(')?.1.split_once(')')?.0)
}

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
        assert!(log.faults[0].text.contains("79, pid=12"));
        assert_eq!((log.faults.len(), log.faults[0].seconds_ago), (1, 60));
        let kill = Kill { program: "train".to_owned(), of_group: true, seconds_ago: 10 };
        assert_eq!(log.kills, [kill]);
        assert!(!KernelLog::gather(&Sources::under("/nowhere")).readable);
    }
}
