//! How the agent of a host finds the coordinator, or becomes the host of one.

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

/// What an agent needs to know to meet the others.
#[derive(Clone, Debug)]
pub struct RendezvousPlan {
    /// How they meet.
    pub method: DiscoveryMethod,
    /// Name of the job.
    pub run_id: String,
    /// Name of this host, for messages.
    pub host: String,
    /// What only the job's agents know; `None`: any process that reaches the port can join.
    pub secret: Option<Secret>,
    /// How long to try.
    pub timeout: Duration,
    /// Of the connection.
    pub limits: TimeLimits,
}

/// How the agents of several hosts meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiscoveryMethod {
    /// Host 0 serves, the others come to it.
    Static {
        /// The place of this host.
        node_rank: usize,
        /// Name or address of host 0.
        address: String,
        /// The port there.
        port: u16,
    },
    /// The host with this name or address serves, the others connect to it. Of several agents there the
    /// first one serves.
    Endpoint {
        /// Name or address.
        address: String,
        /// The port there.
        port: u16,
        /// Whether this agent serves, where its own addresses do not tell: behind a balancer or a
        /// translated address.
        serve: Option<bool>,
    },
    /// The coordinator that was met before, at the address where it was. It is looked for without
    /// end.
    Resume {
        /// Where it was.
        address: SocketAddr,
        /// It may still be there although nothing listens: its connection has only fallen silent.
        patient: bool,
        /// How long to wait before the first try.
        delay: Duration,
    },
    /// The agent that an etcd elects serves, the others come to it. When its host is lost, those
    /// that still try to meet elect another one.
    Etcd {
        /// Its members, like "etcd1:2379,etcd2:2379".
        endpoints: String,
        /// How it is spoken to.
        access: EtcdAccess,
        /// Name or address under which other hosts reach this one; `None`: the address with which
        /// it reaches etcd.
        address: Option<String>,
    },
}

/// What has become of the attempt to meet.
#[derive(Debug)]
pub enum RendezvousNotice {
    /// A line for the user: there is no coordinator yet. The search goes on.
    Say(String),
    /// The coordinator is to be [started](crate::Coordinator::start) here.
    Serve {
        /// For the coordinator.
        listener: Listener,
        /// For [`Rules::address`](crate::Rules): how other hosts reach this one.
        address: String,
    },
    /// The coordinator is there, and is the right one; join.
    Join(Link),
    /// There is no coordinator, or not this job's.
    Failed(RendezvousError),
    /// The coordinator that was met before is not there any more.
    Gone {
        /// How that was seen.
        how: String,
    },
}

/// Why an agent does not meet the others.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RendezvousError {
    /// Something else listens here.
    #[error(
        "port {port} on this host is in use by another program: end that, or give another port"
    )]
    PortTaken {
        /// The port.
        port: u16,
    },
    /// The system does not let us listen.
    #[error("cannot listen at port {port}: {source}")]
    CannotListen {
        /// The port.
        port: u16,
        /// Why.
        source: io::Error,
    },
    /// The coordinator does not want this host.
    #[error("{endpoint} refused this host: {reason}")]
    Denied {
        /// Where.
        endpoint: String,
        /// Its words.
        reason: String,
    },
    /// The peer is not the job's coordinator, or a host on the way changes what it says.
    #[error(
        "{endpoint} does not prove that it is this job's coordinator: another program answers \
         there, or something on the way changes the connection"
    )]
    Impostor {
        /// Where.
        endpoint: String,
    },
    /// Something else answers.
    #[error("{endpoint} is not a Brigade coordinator: {how}")]
    NotACoordinator {
        /// Where.
        endpoint: String,
        /// What it said.
        how: String,
    },
    /// No coordinator has answered in time.
    #[error("no coordinator at {endpoint} after {seconds} s: {last}")]
    NoCoordinator {
        /// Where.
        endpoint: String,
        /// For how long it was tried.
        seconds: u64,
        /// What happened last.
        last: String,
    },
    /// The etcd is not to be used: its address, its certificate, ours, or the user's rights.
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    /// This host comes too late.
    #[error("the job `{run_id}` is over (exit code {code}): give a new job another --rdzv-id")]
    Over {
        /// Name of the job.
        run_id: String,
        /// How it ended.
        code: String,
    },
    /// The system refuses something.
    #[error(transparent)]
    System(#[from] io::Error),
}

/// An attempt to meet, in a thread of its own, so that the agent still hears signals. Dropping it
/// gives up.
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
    /// Starts to look for the others.
    ///
    /// # Errors
    /// The system has no thread or descriptor left.
    pub fn start(plan: RendezvousPlan) -> io::Result<Self> {
        let (sender, notices) = wake::channel()?;
        let given_up = Arc::new(Flag::new()?);
        let told = Notices { sender, given_up: Arc::clone(&given_up) };
        // Not joined: it may be in the system's resolver, which cannot be interrupted.
        masked_thread::spawn("rendezvous", move || {
            let last = meet(&plan, &told).unwrap_or_else(RendezvousNotice::Failed);
            told.tell(last);
        })?;
        Ok(Self { notices, given_up })
    }

    /// Can be read from, as poll says, while there is a notice.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.notices.as_fd()
    }

    /// The next notice, if there is one. After anything but [`RendezvousNotice::Say`] comes nothing.
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
