//! Threads that make batches ahead and return them in order.

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use brigade_torch::{Error, Result, StreamEvent};
use crossbeam_channel::{Receiver, Sender, bounded};
use tch::Device;

use crate::DataError;
use crate::beside::Beside;

/// Work of a worker thread: makes the batch with the given number.
pub(crate) type Work<T> = Arc<dyn Fn(usize) -> Result<T> + Send + Sync>;

/// The result of a worker, and the event of its GPU stream after which the values are complete. The event is `None` on
/// the CPU.
type Made<T> = Result<(T, Option<StreamEvent>)>;

/// Threads that process tickets (batch numbers). Results are returned in the order of the tickets.
///
/// At most `ahead` tickets are in progress at a time, including results that wait for an earlier one, so that memory is
/// bounded however slow the consumer or one ticket is. Neither channel can ever be full, so that a worker blocks only
/// when there are no tickets.
pub(crate) struct Workers<T> {
    tickets: Option<Sender<usize>>,
    results: Receiver<(usize, Made<T>)>,
    /// Results that came before an earlier ticket's result.
    early: BTreeMap<usize, Made<T>>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    /// The tickets in progress are `due..next`.
    due: usize,
    next: usize,
    end: usize,
    ahead: usize,
}

impl<T: Send + 'static> Workers<T> {
    /// Starts `threads` threads on the tickets `start..end`, with at most `ahead` of them in progress at a time. Each
    /// thread has a GPU stream of its own if the device is a GPU.
    pub(crate) fn start(
        threads: usize,
        ahead: usize,
        tickets: std::ops::Range<usize>,
        device: Option<Device>,
        work: &Work<T>,
    ) -> Result<Self> {
        let (start, end) = (tickets.start, tickets.end.max(tickets.start));
        // More threads than tickets would be started only to be stopped.
        let ahead = ahead.max(1).min(end - start).max(1);
        let threads = threads.min(ahead);
        let (ticket_sender, ticket_receiver) = bounded(ahead);
        let (result_sender, results) = bounded(ahead);
        let mut workers = Self {
            tickets: Some(ticket_sender),
            results,
            early: BTreeMap::new(),
            stop: Arc::new(AtomicBool::new(false)),
            threads: Vec::with_capacity(threads),
            due: start,
            next: start,
            end,
            ahead,
        };
        for thread in 1..=threads {
            let (tickets, results) = (ticket_receiver.clone(), result_sender.clone());
            let (stop, work) = (Arc::clone(&workers.stop), Arc::clone(work));
            let beside = Beside::new(device)?;
            let handle = thread::Builder::new()
                .name(format!("brigade-data-{thread}"))
                .spawn(move || serve(&tickets, &results, &stop, beside, &work))
                .map_err(|cause| DataError::Spawn { thread, threads, cause })?;
            workers.threads.push(handle);
        }
        workers.hand_out();
        Ok(workers)
    }

    /// Returns the result of the next ticket, and waits for it; `None` after the last.
    pub(crate) fn next(&mut self) -> Option<Made<T>> {
        if self.due == self.end {
            return None;
        }
        let result = loop {
            if let Some(result) = self.early.remove(&self.due) {
                break result;
            }
            let Ok((ticket, result)) = self.results.recv() else {
                // Cannot happen: workers catch panics and outlive the ticket channel.
                let message = "every loader thread is gone".into();
                self.due = self.end;
                return Some(Err(DataError::Panicked { message }.into()));
            };
            self.early.insert(ticket, result);
        };
        self.due += 1;
        self.hand_out();
        Some(result)
    }

    fn hand_out(&mut self) {
        let Some(tickets) = &self.tickets else { return };
        while self.next < self.end && self.next - self.due < self.ahead {
            if tickets.send(self.next).is_err() {
                return;
            }
            self.next += 1;
        }
    }
}

impl<T> Drop for Workers<T> {
    /// Stops the threads and joins them. A thread that is making a batch finishes it, because a thread cannot be
    /// stopped safely; tickets that wait are not begun.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.tickets = None;
        for thread in self.threads.drain(..) {
            // Its panics were returned as results.
            let _ = thread.join();
        }
    }
}

fn serve<T>(
    tickets: &Receiver<usize>,
    results: &Sender<(usize, Made<T>)>,
    stop: &AtomicBool,
    beside: Beside,
    work: &Work<T>,
) {
    // When this is dropped, it waits for its kernels, before the dataset that they read may be dropped.
    let mut stream = beside.enter();
    for ticket in tickets {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let made = stream.run(|| guarded(|| work(ticket)));
        if results.send((ticket, made)).is_err() {
            return;
        }
    }
}

/// Runs user code, and returns its panic as an error.
pub(crate) fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    // Unwind safety: the panic can leave only the dataset's own state inconsistent, which its own locks can protect by
    // poisoning; no state of the loader is touched.
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(panicked(&*panic)))
}

fn panicked(panic: &(dyn Any + Send)) -> Error {
    let message = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into());
    DataError::Panicked { message }.into()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use parking_lot::Mutex;

    use super::*;

    fn collect<T: Send + 'static>(workers: &mut Workers<T>) -> Vec<Result<T, String>> {
        std::iter::from_fn(|| workers.next())
            .map(|result| result.map(|(made, _)| made).map_err(|error| error.to_string()))
            .collect()
    }

    #[test]
    fn results_come_in_order_whatever_is_first() {
        // Ticket 0 waits until tickets 1 to 3 are done.
        let (done, wait) = bounded::<()>(8);
        let work: Work<usize> = Arc::new(move |ticket| {
            match ticket {
                0 => (0..3).for_each(|_| wait.recv().unwrap()),
                1..=3 => done.send(()).unwrap(),
                _ => {}
            }
            Ok(ticket)
        });
        let mut workers = Workers::start(2, 4, 0..20, None, &work).unwrap();
        assert_eq!(collect(&mut workers), (0..20).map(Ok).collect::<Vec<_>>());
        assert!(workers.next().is_none());
    }

    #[test]
    fn no_more_than_the_bound_is_begun_before_the_consumer_asks() {
        let begun = Arc::new(AtomicUsize::new(0));
        let (reached, notice) = bounded::<usize>(100);
        let counter = Arc::clone(&begun);
        let work: Work<usize> = Arc::new(move |ticket| {
            reached.send(counter.fetch_add(1, Ordering::SeqCst)).unwrap();
            Ok(ticket)
        });
        let mut workers = Workers::start(3, 5, 0..100, None, &work).unwrap();
        for _ in 0..5 {
            notice.recv().unwrap();
        }
        // All five tickets are used up: every worker waits for a ticket that is never sent.
        assert_eq!((begun.load(Ordering::SeqCst), workers.next), (5, 5));
        workers.next().unwrap().unwrap();
        notice.recv().unwrap();
        assert_eq!((begun.load(Ordering::SeqCst), workers.next), (6, 6));
    }

    #[test]
    fn an_error_or_panic_stays_at_its_ticket() {
        let work: Work<usize> = Arc::new(|ticket| match ticket {
            2 => Err(Error::custom("sour")),
            4 => panic!("burnt at {ticket}"),
            _ => Ok(ticket),
        });
        for threads in [1, 3] {
            let mut workers = Workers::start(threads, 3, 0..6, None, &work).unwrap();
            let burnt = "the dataset panicked: burnt at 4".to_owned();
            let expected = [Ok(0), Ok(1), Err("sour".into()), Ok(3), Err(burnt), Ok(5)];
            assert_eq!(collect(&mut workers), expected);
        }
    }

    #[test]
    fn dropping_stops_everything_and_waits_for_the_threads() {
        let (entered, notice) = bounded::<usize>(16);
        let (release, gate) = bounded::<()>(16);
        let begun = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&begun);
        let work: Work<usize> = Arc::new(move |ticket| {
            log.lock().push(ticket);
            entered.send(ticket).unwrap();
            gate.recv().unwrap();
            Ok(ticket)
        });
        let workers = Workers::start(2, 8, 0..1000, None, &work).unwrap();
        let mut first = [notice.recv().unwrap(), notice.recv().unwrap()];
        first.sort_unstable();
        assert_eq!(first, [0, 1]);
        // Six more tickets wait. Both workers are inside a batch; release them once the drop has begun.
        let stop = Arc::clone(&workers.stop);
        let releaser = thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                thread::yield_now();
            }
            release.send(()).unwrap();
            release.send(()).unwrap();
        });
        drop(workers);
        releaser.join().unwrap();
        assert_eq!(begun.lock().len(), 2);
        // No thread is left that could hold the closure.
        assert_eq!(Arc::strong_count(&work), 1);
    }

    #[test]
    fn an_empty_range_ends_at_once() {
        let work: Work<usize> = Arc::new(Ok);
        assert!(Workers::start(4, 8, 3..3, None, &work).unwrap().next().is_none());
    }
}
