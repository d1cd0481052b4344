//! A channel whose receiver can be polled.

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::SendError;

use parking_lot::Mutex;

use super::Flag;

/// Creates a channel without a capacity limit.
///
/// # Errors
/// The process has no descriptor left.
pub fn channel<T>() -> io::Result<(Sender<T>, Receiver<T>)> {
    let receiver = Receiver::new()?;
    Ok((receiver.sender(), receiver))
}

/// Sending end of a channel. Clones send to the same receiver.
///
/// ```
/// let (sender, receiver) = brigade_rendezvous::wake::channel()?;
/// let other = sender.clone();
/// drop(receiver);
/// assert_eq!(other.send(7).unwrap_err().0, 7);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Sender<T> {
    shared: Arc<Shared<T>>,
}

/// Receiving end of a channel. Its descriptor is readable exactly while there is a value. The end of all senders does
/// not make it readable, so a loop can poll it longer than its threads live.
///
/// ```
/// let receiver = brigade_rendezvous::wake::Receiver::new()?;
/// let sender = receiver.sender();
/// assert_eq!(receiver.try_recv(), None);
/// sender.send(7)?;
/// assert_eq!(receiver.try_recv(), Some(7));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Receiver<T> {
    shared: Arc<Shared<T>>,
}

#[derive(Debug)]
struct Shared<T> {
    state: Mutex<State<T>>,
    /// Set while there are items. Changed only under the lock.
    ready: Flag,
}

#[derive(Debug)]
struct State<T> {
    items: VecDeque<T>,
    /// `true` if the receiver was dropped.
    is_closed: bool,
}

impl<T> Sender<T> {
    /// Sends a value and wakes the receiver.
    ///
    /// # Errors
    /// The receiver was dropped. The error contains the value.
    pub fn send(&self, value: T) -> Result<(), SendError<T>> {
        let mut state = self.shared.state.lock();
        if state.is_closed {
            return Err(SendError(value));
        }
        if state.items.is_empty() {
            self.shared.ready.set();
        }
        state.items.push_back(value);
        Ok(())
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<T> Receiver<T> {
    /// Creates the receiving end of a channel, without a sender so far.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn new() -> io::Result<Self> {
        let state = State { items: VecDeque::new(), is_closed: false };
        Ok(Self { shared: Arc::new(Shared { state: Mutex::new(state), ready: Flag::new()? }) })
    }

    /// Creates a sender for this receiver.
    #[must_use]
    pub fn sender(&self) -> Sender<T> {
        Sender { shared: Arc::clone(&self.shared) }
    }

    /// Takes the oldest value, if there is one. Does not block.
    #[must_use]
    pub fn try_recv(&self) -> Option<T> {
        let mut state = self.shared.state.lock();
        let value = state.items.pop_front()?;
        if state.items.is_empty() {
            self.shared.ready.clear();
        }
        Some(value)
    }
}

impl<T> AsFd for Receiver<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.ready.as_fd()
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.is_closed = true;
        let items = mem::take(&mut state.items);
        // Dropping a value may run any code, which may even send to this channel.
        drop(state);
        drop(items);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    fn is_readable(receiver: &Receiver<usize>) -> bool {
        let mut fds = [PollFd::new(receiver.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).unwrap() == 1
    }

    #[test]
    fn readable_while_there_is_a_value() {
        let (sender, receiver) = channel().unwrap();
        assert!(!is_readable(&receiver));
        sender.send(1).unwrap();
        sender.send(2).unwrap();
        assert_eq!(receiver.try_recv(), Some(1));
        assert!(is_readable(&receiver));
        assert_eq!(receiver.try_recv(), Some(2));
        assert!(!is_readable(&receiver));
        drop(sender);
        assert!(!is_readable(&receiver));
        assert_eq!(receiver.try_recv(), None);
    }

    #[test]
    fn no_wake_up_is_lost() {
        let (sender, receiver) = channel().unwrap();
        let senders = (0..4).map(|part| {
            let sender = sender.clone();
            thread::spawn(move || (0..10_000).for_each(|i| sender.send(4 * i + part).unwrap()))
        });
        let senders: Vec<_> = senders.collect();
        let mut seen = vec![false; 40_000];
        for _ in 0..seen.len() {
            poll(&mut [PollFd::new(receiver.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE)
                .unwrap();
            // Receives one value per poll, because the descriptor must remain readable for the others.
            let value = receiver.try_recv().unwrap();
            assert!(!mem::replace(&mut seen[value], true));
        }
        assert!(!is_readable(&receiver));
        assert!(seen.into_iter().all(|it| it));
        senders.into_iter().for_each(|it| it.join().unwrap());
    }

    #[test]
    fn values_that_no_receiver_takes_are_dropped() {
        let (sender, receiver) = channel().unwrap();
        let value = Arc::new(());
        sender.send(Arc::clone(&value)).unwrap();
        drop(receiver);
        assert_eq!(Arc::strong_count(&value), 1);
        assert!(sender.send(value).is_err());
    }
}
