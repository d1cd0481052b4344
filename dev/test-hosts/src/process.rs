//! Processes of a host, seen from outside.

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

/// Process on a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Process ID outside of the host, for `kill`.
    pub pid: i32,
    /// Process ID of the parent, outside of the host.
    pub parent: i32,
    /// Process ID on the host.
    pub inner_pid: i32,
    /// Arguments of the command line.
    pub command: Vec<String>,
    /// Initial environment, in the form `NAME=value`.
    pub environment: Vec<String>,
}

/// Waits until an `nsenter` of [`Host::command`](crate::Host::command) has started its program, and returns the
/// program's process ID. Returns `None` when the parent has ended.
#[must_use]
pub fn inner_process(parent: i32) -> Option<i32> {
    loop {
        let child = all().into_iter().find(|pid| stat(*pid).is_some_and(|it| it.parent == parent));
        // Between `fork` and `exec`, the child still is the parent's program.
        let program = |pid: i32| fs::read_link(format!("/proc/{pid}/exe")).ok();
        if let Some(child) = child
            && !is_transit(program(child))
        {
            return Some(child);
        }
        if stat(parent).is_none_or(|it| matches!(it.state, 'Z' | 'X')) {
            return None;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Returns `true` for a program that will start the requested one.
fn is_transit(program: Option<PathBuf>) -> bool {
    let Some(program) = program else { return true };
    program.file_name().is_none_or(|name| name == "nsenter" || name == "unshare" || name == "env")
}

/// Returns the running processes in the process namespace of `init`.
pub(crate) fn processes_of(init: i32) -> Vec<Process> {
    let namespace = |pid: i32| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let Some(wanted) = namespace(init) else { return Vec::new() };
    all()
        .into_iter()
        .filter(|pid| namespace(*pid).as_ref() == Some(&wanted))
        .filter_map(read)
        .collect()
}

fn read(pid: i32) -> Option<Process> {
    let Stat { state, parent } = stat(pid)?;
    // The first thread of a killed process may end before the others, which hold its sockets.
    let threads = || fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    if state == 'X' || state == 'Z' && threads() <= 1 {
        return None;
    }
    let words = |file: &str| -> Vec<String> {
        let bytes = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let words = bytes.split(|byte| *byte == 0).filter(|word| !word.is_empty());
        words.map(|word| String::from_utf8_lossy(word).into_owned()).collect()
    };
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    let inner_pid = numbers.split_whitespace().next_back()?.parse().ok()?;
    let (command, environment) = (words("cmdline"), words("environ"));
    Some(Process { pid, parent, inner_pid, command, environment })
}

struct Stat {
    state: char,
    parent: i32,
}

fn stat(pid: i32) -> Option<Stat> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command in parentheses may contain anything, parentheses and blanks included.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    Some(Stat { state: fields.next()?.chars().next()?, parent: fields.next()?.parse().ok()? })
}

fn all() -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}
