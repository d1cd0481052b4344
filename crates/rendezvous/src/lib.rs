//! How the agents of several hosts become one job, and stay one while hosts come and go.
//!
//! Every host has one agent, which starts and watches the ranks of that host. One coordinator, in
//! the process of one of the agents or of the launcher, decides which hosts take part and with which
//! ranks. They speak [`FromAgent`] and [`ToAgent`] over anything that carries bytes: a socket pair
//! in one process, TCP, or the standard streams of an ssh session.
//!
//! - [`Formation`] decides. It is told what happens and when, and says what to do; it has neither
//!   clock nor network, so that a thousand hosts fit into a test.
//! - [`Coordinator`] is a thread that does what it says.
//! - [`Link`] is the agent's end of the connection.
//! - [`Rendezvous`] finds the coordinator, or makes this host the one that has it: at an address that
//!   all know, or elected by an etcd.
//! - [`Secret`] is the pre-shared key of connections over TCP, which are encrypted.
//! - [`wake`] has what wakes a thread that waits in `poll`: a channel and a flag with a descriptor.
//! - Text from a peer goes through [`printable`](brigade_rank_env::text::printable) before it is shown.
//!
//! A failure, a lost host or a new one costs each agent the same few messages however many there
//! are: a stop, its answer, a start. No message lists the hosts. The example `reforming` prints it.

mod channel;
mod connection;
mod coordinator;
#[doc(hidden)]
pub mod decode;
mod discovery;
mod etcd;
mod formation;
mod frame;
mod handshake;
mod limits;
mod link;
mod listener;
mod masked_thread;
mod message;
mod secret;
pub mod wake;

pub use connection::LinkError;
pub use coordinator::{Coordinator, OutputSink, Piece, SessionId};
pub use discovery::{
    DiscoveryMethod, Rendezvous, RendezvousError, RendezvousNotice, RendezvousPlan,
};
pub use etcd::{EtcdAccess, EtcdError};
pub use formation::{
    Action, AgentId, CauseKind, Event, Formation, HostPart, JobCause, JobEvent, Record, Rules,
};
pub use frame::{Decoder, FrameError, MAX_FRAME_LEN, encode};
pub use limits::TimeLimits;
pub use link::{Link, OUTPUT_CREDIT};
pub use listener::{BindAddress, Listener};
pub use message::{
    Assignment, Cause, ExitStatus, FromAgent, JobResult, Join, Millis, PROTOCOL, RankFailure,
    Stream, ToAgent,
};
pub use secret::{Secret, SecretError, private_text, random_name};

/// Returns the system's text of an error, without its number, as in "connection refused".
fn plain_text(error: &std::io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or_default().to_lowercase()
}
