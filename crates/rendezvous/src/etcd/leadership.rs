//! Leadership of the elected coordinator: a lease that is kept alive, and a mark when the job is over.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicI16, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::client::{Client, ClientError, Created, Lease};
use super::keys::Keys;
use crate::masked_thread;
use crate::wake::Flag;

/// Lease of the elected coordinator. Dropping it lets another process be elected.
#[derive(Debug)]
pub(crate) struct LeaderLease {
    shared: Arc<Shared>,
    time: Duration,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    /// Set when another process has been elected.
    lost: Flag,
    leave: Flag,
    /// Exit code of the job, once it is over.
    code: AtomicI16,
    /// Start of the last request that renewed the lease.
    confirmed: Mutex<Instant>,
}

impl Shared {
    fn is_confirmed(&self, time: Duration) -> bool {
        self.confirmed.lock().elapsed() < time
    }
}

/// State of the thread that keeps the lease.
struct Hold {
    client: Client,
    keys: Keys,
    value: Vec<u8>,
    lease: Lease,
    time: Duration,
    shared: Arc<Shared>,
}

impl LeaderLease {
    /// Keeps the leadership, with a lease that was requested at `asked`.
    pub(crate) fn hold(
        client: Client,
        keys: Keys,
        value: Vec<u8>,
        lease: Lease,
        time: Duration,
        asked: Instant,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            lost: Flag::new()?,
            leave: Flag::new()?,
            code: AtomicI16::new(NOT_OVER),
            confirmed: Mutex::new(asked),
        });
        let hold = Hold { client, keys, value, lease, time, shared: Arc::clone(&shared) };
        let thread = masked_thread::spawn("etcd", move || hold.run())?;
        Ok(Self { shared, time, thread: Some(thread) })
    }

    /// Returns `true` if no other process can have been elected, because the lease has not expired. Without this check,
    /// a host that is cut off would begin an attempt in parallel to that of the others.
    pub(crate) fn is_held(&self) -> bool {
        self.shared.is_confirmed(self.time)
    }

    /// Returns a descriptor that is readable when the lease has ended and another process has been elected.
    pub(crate) fn lost(&self) -> BorrowedFd<'_> {
        self.shared.lost.as_fd()
    }

    /// Publishes for late hosts that the job is over. Does not block.
    pub(crate) fn finish(&self, code: u8) {
        self.shared.code.store(code.into(), Ordering::Release);
        self.shared.leave.set();
    }
}

impl Drop for LeaderLease {
    fn drop(&mut self) {
        self.shared.leave.set();
        if let Some(thread) = self.thread.take() {
            // It ends after one request at most, which has a time limit.
            let _ = thread.join();
        }
    }
}

impl Hold {
    fn run(mut self) {
        let mut pause = self.time / 3;
        while !self.shared.leave.wait(pause) {
            pause = match self.keep() {
                Ok(true) => self.time / 3,
                Ok(false) => {
                    self.shared.lost.set();
                    // No key of this process is left in etcd.
                    return;
                }
                // A running attempt does not need etcd. An agent that loses the coordinator does, and so does the
                // coordinator before it begins an attempt.
                Err(_) => RETRY,
            };
        }
        if !self.shared.is_confirmed(self.time) {
            // etcd did not answer before and probably would not now, and another thread waits for this one. The lease
            // ends by itself.
            return;
        }
        let code = self.shared.code.load(Ordering::Acquire);
        if code != NOT_OVER {
            let _ = self.mark(code);
        }
        let _ = self.client.revoke(&self.lease);
    }

    /// Returns `false` when another process has been elected.
    fn keep(&mut self) -> Result<bool, ClientError> {
        let mut asked = Instant::now();
        if !self.client.keep_alive(&self.lease)? {
            // The lease has expired: etcd was not reachable, or this host was suspended.
            asked = Instant::now();
            self.lease = self.client.grant(self.time)?;
            match self.client.create(self.keys.both(), &self.value, &self.lease)? {
                Created::Now => {}
                Created::Not([there, over]) => {
                    // The key is this process's earlier one, whose lease may end at any moment. The next call confirms
                    // it.
                    return Ok(over.is_none() && there.as_ref() == Some(&self.value));
                }
            }
        }
        *self.shared.confirmed.lock() = asked;
        Ok(true)
    }

    fn mark(&mut self, code: i16) -> Result<(), ClientError> {
        let mark = self.client.grant(MARK)?;
        let [key, over] = self.keys.both();
        self.client.replace((key, &self.lease), over, code.to_string().as_bytes(), &mark)
    }
}

const NOT_OVER: i16 = -1;
const RETRY: Duration = Duration::from_millis(300);
/// Time for which late hosts are informed that the job is over. After that its name may be used again.
const MARK: Duration = Duration::from_secs(600);
