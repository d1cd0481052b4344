//! Time limit of this process.

use std::collections::BTreeMap;
use std::fs;
use std::process::{self, Command};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Default limit of a test. Below the limit in `.config/nextest.toml`, so that under cargo-nextest, too, this one
/// reports what hung.
pub(crate) const OF_A_TEST: Duration = Duration::from_secs(225);

/// Time limit that ends this process unless it is dropped in time, and reports what hung: its descendants and their
/// states. They are killed first.
///
/// libtest has no time limit, and a thread that waits for a process cannot be ended; the process of
/// the tests can.
#[derive(Debug)]
pub struct TimeLimit {
    /// Closed when this is dropped, which ends the thread.
    open: Option<Sender<()>>,
    watch: Option<JoinHandle<()>>,
}

impl TimeLimit {
    /// Starts the time limit of the task of this name.
    #[must_use]
    pub fn new(name: &str, limit: Duration) -> Self {
        let (open, closed) = channel();
        let name = name.to_owned();
        let watch = thread::spawn(move || {
            if closed.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                give_up(&name, limit);
            }
        });
        Self { open: Some(open), watch: Some(watch) }
    }
}

impl Drop for TimeLimit {
    fn drop(&mut self) {
        drop(self.open.take());
        if let Some(watch) = self.watch.take() {
            let _ = watch.join();
        }
    }
}

fn give_up(name: &str, limit: Duration) -> ! {
    eprintln!(
        "\n{name} has not ended within {} s; processes that it has started:",
        limit.as_secs()
    );
    let descendants = descendants(process::id());
    for (pid, description) in &descendants {
        eprintln!("  {pid}  {description}");
    }
    let mut kill = Command::new("kill");
    // Some may have ended by now.
    let _ = kill.arg("-KILL").args(descendants.keys().map(u32::to_string)).output();
    #[expect(clippy::exit, reason = "no thread of this process can end another one that hangs")]
    process::exit(101)
}

/// Returns the descendants of a process, each with its state and command line.
#[must_use]
pub fn descendants(of: u32) -> BTreeMap<u32, String> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|it| it.file_name().to_str()?.parse::<u32>().ok());
    let parents: BTreeMap<u32, (u32, char)> = numbers
        .filter_map(|pid| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            // The name in parentheses may contain anything.
            let mut fields = stat.rsplit_once(") ")?.1.split(' ');
            let state = fields.next()?.chars().next()?;
            Some((pid, (fields.next()?.parse().ok()?, state)))
        })
        .collect();
    let mut found = BTreeMap::new();
    let mut open = vec![of];
    while let Some(parent) = open.pop() {
        for (pid, (_, state)) in parents.iter().filter(|it| it.1.0 == parent) {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let words = String::from_utf8_lossy(&line).replace(['\0', '\n'], " ");
            found.insert(*pid, format!("{state}  {:.120}", words.trim()));
            open.push(*pid);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descendants_are_found_and_described() {
        let mut shell = Command::new("sh").args(["-c", "sleep 1000; true"]).spawn().unwrap();
        let sleeps =
            || descendants(process::id()).into_iter().find(|it| it.1.ends_with("sleep 1000"));
        while sleeps().is_none() {
            thread::yield_now();
        }
        let (sleep, _) = sleeps().unwrap();
        assert!(descendants(shell.id()).contains_key(&sleep));
        assert!(!descendants(sleep).contains_key(&shell.id()));
        shell.kill().unwrap();
        shell.wait().unwrap();
        let killed = Command::new("kill").arg(sleep.to_string()).status().unwrap();
        assert!(killed.success());
    }

    #[test]
    fn tests_within_their_limit_are_not_killed() {
        // Returns when the watch has ended, long before the limit.
        drop(TimeLimit::new("this test", Duration::from_secs(1000)));
    }
}
