//! Discovery: the agent of a host finds the coordinator, or becomes the host of one.

mod backoff;
mod election;
mod notices;
mod resume;
mod tcp;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use crate::etcd::{EtcdAccess, EtcdError};
use crate::wake::{self, Flag, Receiver};
use crate::{Link, Listener, Secret, TimeLimits, masked_thread};

pub(crate) use election::coordinator_record;
use notices::Notices;

/// Settings with which an agent finds the other agents of its job.
#[derive(Clone, Debug)]
pub struct RendezvousPlan {
    /// Method by which the agents meet.
    pub method: DiscoveryMethod,
    /// Name of the job.
    pub run_id: String,
    /// Name of this host, for messages.
    pub host: String,
    /// Secret that only the job's agents have. With `None`, any process that reaches the port can join.
    pub secret: Option<Secret>,
    /// Time limit of the attempt to meet.
    pub timeout: Duration,
    /// Time limits of the connection.
    pub limits: TimeLimits,
}

/// Method by which the agents of several hosts meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiscoveryMethod {
    /// Host 0 runs the coordinator, and the other hosts connect to it.
    Static {
        /// Number of this host.
        node_rank: usize,
        /// Name or address of host 0.
        address: String,
        /// Port of the coordinator on host 0.
        port: u16,
    },
    /// The host with this name or address runs the coordinator, and the others connect to it. Of several agents on that
    /// host, the first one runs it.
    Endpoint {
        /// Name or address of the coordinator's host.
        address: String,
        /// Port of the coordinator.
        port: u16,
        /// Overrides whether this agent runs the coordinator, where its own addresses do not decide it: behind a load
        /// balancer or a translated address.
        serve: Option<bool>,
    },
    /// Reconnects to the coordinator of an earlier connection, at its earlier address, without a time limit.
    Resume {
        /// Address of the coordinator.
        address: SocketAddr,
        /// `true` if the coordinator may still run although nothing listens: its connection has only become silent.
        patient: bool,
        /// Delay before the first attempt.
        delay: Duration,
    },
    /// The agent that is elected through etcd runs the coordinator, and the others connect to it. When its host is
    /// lost, the agents that still try to meet elect another one.
    Etcd {
        /// Members of the etcd cluster, such as "etcd1:2379,etcd2:2379".
        endpoints: String,
        /// Access to etcd: TLS, certificates and user.
        access: EtcdAccess,
        /// Name or address under which other hosts reach this one. With `None`, the address from which it reaches etcd.
        address: Option<String>,
    },
}

/// Progress or result of an attempt to meet.
#[derive(Debug)]
pub enum RendezvousNotice {
    /// A line for the user: no coordinator was found yet. The search continues.
    Say(String),
    /// The coordinator is to be [started](crate::Coordinator::start) here.
    Serve {
        /// Listener for the coordinator.
        listener: Listener,
        /// Name or address under which other hosts reach this one, for [`Rules::address`](crate::Rules).
        address: String,
    },
    /// The job's coordinator was found. The agent joins over this link.
    Join(Link),
    /// The attempt failed: no coordinator was found, or it is not this job's.
    Failed(RendezvousError),
    /// The coordinator of the earlier connection does not run any more.
    Gone {
        /// Description of how that was detected.
        how: String,
    },
}

/// Error of an agent that cannot meet the others.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// Another program listens on the port.
    #[error(
        "port {port} on this host is in use by another program: stop it, or choose another port"
    )]
    PortTaken {
        /// Port that is in use.
        port: u16,
    },
    /// The operating system refuses to listen on the port.
    #[error("cannot listen on port {port}: {source}")]
    CannotListen {
        /// Port that was to be bound.
        port: u16,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The coordinator refuses this host.
    #[error("{endpoint} refused this host: {reason}")]
    Denied {
        /// Address of the coordinator.
        endpoint: String,
        /// Reason that the coordinator gives.
        reason: String,
    },
    /// The peer is not the job's coordinator, or a host on the way changes its messages.
    #[error(
        "{endpoint} does not prove that it is this job's coordinator: another program answers \
         there, or something on the way changes the connection"
    )]
    Impostor {
        /// Address of the peer.
        endpoint: String,
    },
    /// A program that is not a Brigade coordinator answers.
    #[error("{endpoint} is not a Brigade coordinator: {how}")]
    NotACoordinator {
        /// Address of that program.
        endpoint: String,
        /// Description of its answer.
        how: String,
    },
    /// No coordinator has answered in time.
    #[error("no coordinator at {endpoint} after {seconds} s: {last}")]
    NoCoordinator {
        /// Address at which the coordinator was expected.
        endpoint: String,
        /// Duration of the attempts, in seconds.
        seconds: u64,
        /// Result of the last attempt.
        last: String,
    },
    /// etcd cannot be used because of its address, its certificate, the client's certificate, or the user's
    /// permissions.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    /// The job was already over when this host joined.
    #[error("the job `{run_id}` is over (exit code {code}): give a new job another --rdzv-id")]
    Over {
        /// Name of the job.
        run_id: String,
        /// Exit code of the job.
        code: String,
    },
    /// The operating system reports an error.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// A running attempt to meet the other agents, in a thread of its own so that the agent still handles signals. Dropping
/// it ends the attempt.
///
/// ```
/// use std::time::Duration;
/// use brigade_rendezvous::{RendezvousNotice, RendezvousPlan, Rendezvous, Secret, TimeLimits, DiscoveryMethod};
/// use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
///
/// let mut rendezvous = Rendezvous::start(RendezvousPlan {
///     method: DiscoveryMethod::Static { node_rank: 0, address: "localhost".into(), port: 0 },
///     run_id: "night".into(),
///     host: "node1".into(),
///     secret: Some(Secret::generate()?),
///     timeout: Duration::from_secs(600),
///     limits: TimeLimits::default(),
/// })?;
/// poll(&mut [PollFd::new(rendezvous.fd(), PollFlags::POLLIN)], PollTimeout::NONE)?;
/// let Some(RendezvousNotice::Serve { listener, address }) = rendezvous.next() else { panic!() };
/// assert_ne!(listener.port(), 0);
/// assert_eq!(address, "localhost");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Rendezvous {
    notices: Receiver<RendezvousNotice>,
    given_up: Arc<Flag>,
}

impl Rendezvous {
    /// Starts the attempt to meet the other agents.
    ///
    /// # Errors
    /// The system has no thread or descriptor left.
    pub fn start(plan: RendezvousPlan) -> io::Result<Self> {
        let (sender, notices) = wake::channel()?;
        let given_up = Arc::new(Flag::new()?);
        let told = Notices { sender, given_up: Arc::clone(&given_up) };
        // Not joined: the thread may be in the system's resolver, which cannot be interrupted.
        masked_thread::spawn("rendezvous", move || {
            let last = meet(&plan, &told).unwrap_or_else(RendezvousNotice::Failed);
            told.tell(last);
        })?;
        Ok(Self { notices, given_up })
    }

    /// Returns a descriptor that is readable, in the sense of `poll`, while there is a notice.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.notices.as_fd()
    }

    /// Returns the next notice, if there is one. [`RendezvousNotice::Say`] is followed by further notices; any other
    /// notice is the last one.
    #[expect(
        clippy::should_implement_trait,
        reason = "an iterator that ends for now and goes on later surprises"
    )]
    pub fn next(&mut self) -> Option<RendezvousNotice> {
        self.notices.try_recv()
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        self.given_up.set();
    }
}

fn meet(plan: &RendezvousPlan, notices: &Notices) -> Result<RendezvousNotice, RendezvousError> {
    match &plan.method {
        DiscoveryMethod::Static { node_rank: 0, address, port } => tcp::serve(plan, address, *port),
        DiscoveryMethod::Static { address, port, .. } => {
            tcp::meet(plan, address, *port, Some(false), notices)
        }
        DiscoveryMethod::Endpoint { address, port, serve } => {
            tcp::meet(plan, address, *port, *serve, notices)
        }
        DiscoveryMethod::Resume { address, patient, delay } => {
            resume::meet(plan, *address, *patient, *delay, notices)
        }
        DiscoveryMethod::Etcd { endpoints, access, address } => {
            election::meet(plan, endpoints, access, address.as_deref(), notices)
        }
    }
}

#[cfg(test)]
mod tests;
