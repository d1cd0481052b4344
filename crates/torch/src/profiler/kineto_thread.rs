//! The thread that Kineto, libtorch's profiler, starts at the first recording.
//!
//! Kineto stops it when the process exits: it notifies a condition variable once and joins the thread. A notification
//! before the thread waits is lost, and the wait takes five minutes. A process that exits between the thread's start
//! and its wait would hang for five minutes, so the first recording begins only when the thread waits.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::sync::Once;
use std::thread;
use std::time::{Duration, Instant};

static STARTED: Once = Once::new();

/// Runs `start`. If it is the first start in the process, returns only when the threads that it has started are
/// waiting.
pub(super) fn around_first_start<T, E>(start: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    if STARTED.is_completed() {
        return start();
    }
    let before = threads();
    let started = start()?;
    STARTED.call_once(|| {
        let deadline = Instant::now() + LIMIT;
        while !new_threads_wait(&before) && Instant::now() < deadline {
            thread::sleep(PAUSE);
        }
    });
    Ok(started)
}

/// Time limit of the wait, after which the program continues if the system does not report the state of threads.
const LIMIT: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_micros(200);

fn threads() -> HashSet<String> {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    tasks.filter_map(|task| task.file_name().into_string().ok()).collect()
}

/// Returns `true` if all threads that this one has started since then sleep. A thread has the name of the one that
/// started it.
fn new_threads_wait(before: &HashSet<String>) -> bool {
    let name = fs::read("/proc/thread-self/comm").unwrap_or_default();
    threads().difference(before).all(|thread| {
        let task = Path::new("/proc/self/task").join(thread);
        fs::read(task.join("comm")).map_or(true, |other| other != name)
            || fs::read_to_string(task.join("stat")).map_or(true, |stat| is_sleeping(&stat))
    })
}

/// Reads the state out of a thread's line: `123 (name) S 1 …`, where the name may have any characters.
fn is_sleeping(stat: &str) -> bool {
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('S'))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn the_state_follows_the_name() {
        assert!(is_sleeping("123 (brigade) S 1 2"));
        assert!(is_sleeping("123 (a) R (b) S 1 2"));
        assert!(!is_sleeping("123 (S) R 1 2"));
    }

    #[test]
    fn a_thread_that_waits_is_seen() {
        let before = threads();
        let (end, wait) = mpsc::channel::<()>();
        let waiting = thread::spawn(move || wait.recv());
        while !new_threads_wait(&before) {
            thread::sleep(PAUSE);
        }
        assert!(threads().len() > before.len() || waiting.is_finished());
        drop(end);
        assert!(waiting.join().unwrap().is_err());
    }
}
