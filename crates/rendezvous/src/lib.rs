//! Rendezvous of the agents of a job: membership, ranks and attempts, while hosts join and leave.
//!
//! Every host has one agent, which starts and watches the ranks of that host. One coordinator, in the process of one of
//! the agents or of the launcher, decides which hosts take part, with which ranks, and what happens when a rank fails
//! or a host joins or leaves. They exchange [`FromAgent`] and [`ToAgent`] over anything that carries bytes: a socket
//! pair in one process, TCP, or the standard streams of an ssh session. A job on one host takes the same path.
//!
//! - [`Formation`] makes the decisions, as a pure function of events and time, without clock and network, so that a
//!   test can simulate a thousand hosts.
//! - [`Coordinator`] is the thread that passes events to it and carries out its actions.
//! - [`Link`] is the agent's end of the connection.
//! - [`Rendezvous`] finds the coordinator, or runs it on this host: at an address that all agents are given, or by an
//!   election through etcd.
//! - [`Secret`] is the pre-shared key of connections over TCP, which are encrypted.
//! - [`wake`] has a channel and a flag with a descriptor, for threads that wait in `poll`.
//! - Text from a peer goes through [`printable`](brigade_rank_env::text::printable) where it is decoded: control
//!   characters escaped, at most 200 characters.
//!
//! ```
//! use std::time::Duration;
//! use brigade_rendezvous::{Action, AgentId, Event, Formation, Join, Rules, ToAgent};
//!
//! // One host with four ranks joins a job that needs no other one.
//! let mut formation = Formation::new(Rules { run_id: "night".into(), ..Rules::default() });
//! let join = Join { run_id: "night".into(), nproc: 4, port: 29_500, ..Join::new("node1") };
//! let joined = Event::Joined { agent: AgentId(1), join, seen: None, remote: false };
//! let actions = formation.handle(Duration::ZERO, joined);
//! let Some(Action::Send(AgentId(1), ToAgent::Start(part))) = actions.last() else { panic!() };
//! assert_eq!((part.world_size, part.num_nodes), (4, 1));
//! ```
//! # Attempts
//!
//! An agent stops an attempt and begins the next one only on a message of the coordinator. After a failure, a lost host
//! or a new one, each agent exchanges the same three messages with the coordinator, however many agents there are: a
//! stop, its answer, a start. No message lists the hosts. The example `reforming` measures this.
//!
//! A host that joins a running job causes one restart of the others. Further hosts are admitted together, at the
//! earliest 30 s after that (`--rdzv-conf join_interval=`), then after twice as long each time, up to ten minutes, or
//! at a restart after a failure (`formation/admission.rs`).
//!
//! `MASTER_PORT` is a port that host 0 has reserved for the attempt, among those of `--store-port` if that is given.
//! `--master-port` is where the agents meet; on one host it is also the ranks' `MASTER_PORT`.
//!
//! When a rank was killed and others failed because of it, the killed rank is reported. Its connections are closed
//! before its agent detects its end, so the time of such an end counts as 1 s earlier.
//!
//! # Lost connections
//!
//! Every time limit between launchers, agents and the coordinator derives from `--heartbeat-timeout` and
//! `--shutdown-timeout` (`limits.rs`); tests check that each limit is longer than those that it includes.
//!
//! When a connection over TCP breaks or no longer carries data, the ranks go on, and the agent requests its place over
//! a new connection, with its name and attempt: one request and one answer, after the round trips of TCP and Noise. The
//! coordinator keeps the place for the heartbeat timeout, or for 1 s if the connection was reset. Both sides then
//! repeat messages that the other may have missed, among them those of a host that leaves or cannot start its ranks. A
//! host that has not seen an attempt counts as new if its first request was lost. Tests run the agent's state machine
//! and [`Formation`] against each other over connections that break at any moment (`agent/state/tests/cut_off.rs` in
//! `brigade-launch`). An ssh session cannot be opened anew by the other side, so its TCP connection has that time to
//! recover.
//!
//! When the host of a built-in rendezvous is lost, no other host takes over: in a network that is cut in two, both
//! halves would train. With etcd another host takes over, because etcd requires a majority.
//!
//! # Encryption
//!
//! A connection over TCP begins with a Noise handshake of one record from each side (`handshake.rs` explains the
//! pattern). Then every byte is encrypted and authenticated (`channel.rs`), and the keys change every 65,536 records.
//! Socket pairs and ssh sessions carry the same frames without encryption of their own.
//!
//! The name of a job is not a key. Over TCP the name itself is never sent, only a hash of the name and of the
//! handshake. An agent joins by its first message on the encrypted channel, which also shows that its first record was
//! not a replay.
//!
//! Before the handshake is complete a connection may send 256 bytes, then 4 kB, within ten seconds. Their number is
//! limited to a quarter of the process's limit of open files; at the limit, the oldest connection of the address that
//! has most of them is closed.
//!
//! `decode.rs` exposes all decoders of bytes from peers as pure functions, for fuzzing.

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
