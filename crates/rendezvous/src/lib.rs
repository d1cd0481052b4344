//! How the agents of several hosts become one job, and stay one while hosts come and go.
//!
//! Every host has one agent, which starts and watches the ranks of that host. One coordinator, in
//! the process of one of the agents or of the launcher, decides who takes part and with which
//! ranks. They speak [`FromAgent`] and [`ToAgent`] over anything that carries bytes: a socket pair
//! in one process, TCP, or the standard streams of an ssh session.

mod coordinator;
mod formation;
mod frame;
mod handshake;
mod link;
mod listener;
mod meet;
mod message;
mod quiet;
mod secret;
mod wire;

pub use coordinator::{Coordinator, OutputSink, Piece, SessionId};
pub use formation::{Action, AgentId, Event, Formation, Rules};
pub use frame::{Decoder, FrameError, LONGEST_FRAME, encode};
pub use link::{Link, OUTPUT_CREDIT, Timing};
pub use listener::{Listener, Reach};
pub use meet::{MeetError, MeetNotice, MeetPlan, Meeting, Way};
pub use message::{
    Assignment, Cause, Ending, FromAgent, Join, Millis, PROTOCOL, RankFailure, Stream, ToAgent,
    Verdict,
};
pub use secret::{Secret, SecretError};
pub use wire::LinkError;
