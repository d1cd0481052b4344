//! Threads that work ahead and deliver in order.

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

/// What a worker does with a ticket: makes the batch of that number.
pub(crate) type Work<T> = Arc<dyn Fn(usize) -> Result<T> + Send + Sync>;

/// What a thread has made, and the point in its stream's work behind which it is there; `None` for the CPU.
type Made<T> = Result<(T, Option<StreamEvent>)>;

/// Threads that turn tickets into results, which come back in the order of the tickets.
///
/// At most `ahead` tickets are out at a time, counting results that wait for an earlier one, so
/// memory is bounded however slow the consumer or one ticket is. Neither channel can ever be full,
/// so no worker blocks but for want of tickets.
pub(crate) struct Workers<T> {
    tickets: Option<Sender<usize>>,
    results: Receiver<(usize, Made<T>)>,
    /// Results that came before their turn.
    early: BTreeMap<usize, Made<T>>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    /// The tickets that are out: `due..next`.
    due: usize,
    next: usize,
    end: usize,
    ahead: usize,
}

impl<T: Send + 'static> Workers<T> {
    /// Starts `threads` threads on the tickets `start..end`, with `ahead` of them out at a time, each with a stream of
    /// its own on the device, if that is a GPU.
    pub(crate) fn start(
        threads: usize,
        ahead: usize,
        tickets: std::ops::Range<usize>,
        device: Option<Device>,
        work: &Work<T>,
    ) -> Result<Self> {
        let (start, end) = (tickets.start, tickets.end.max(tickets.start));
        // More threads than tickets would only be started to be stopped.
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

    /// The result of the next ticket, waiting for it; `None` when all are done.
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
    /// Stops the threads and waits for them. A thread that is inside a batch finishes that batch
    /// (there is no safe way to stop it); tickets that wait are not begun.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.tickets = None;
        for thread in self.threads.drain(..) {
            // Its panics were delivered as results.
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
    // Waits for its kernels at the end, before the data set that they read may go.
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

/// Runs user code; its panic becomes an error.
pub(crate) fn guarded<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    // Unwind safety: what the panic may have left half-done is the dataset's own state, which
    // its own locks can protect by poisoning; nothing of the loader's is touched.
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
        // All five tickets are used up: every worker waits for a ticket that nothing has sent.
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
        // Six more tickets wait. Both workers sit in a batch; let them out once the drop has begun.
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
