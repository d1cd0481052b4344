//! The inputs of the decision (events) and its outputs (actions).

use super::job_event::Record;
use crate::{FromAgent, JobResult, Join, ToAgent};

/// An agent, numbered by the coordinator with its first connection; never used twice. It keeps its
/// number when it joins again over another connection ([`Action::Adopt`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AgentId(pub u64);

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A connection to this host is being made; it will join or be closed.
    Expected {
        /// Its connection.
        agent: AgentId,
        /// Host name.
        host: String,
    },
    /// An agent's first message came.
    Joined {
        /// Its connection.
        agent: AgentId,
        /// What it said.
        join: Join,
        /// The address it came from; `None` in one process or over ssh.
        seen: Option<String>,
        /// It can fall silent: there is a network in between.
        remote: bool,
    },
    /// An agent's later message.
    Message {
        /// Its connection.
        agent: AgentId,
        /// The message.
        message: FromAgent,
    },
    /// A part of a message, or one that does not matter here: the agent is alive.
    Alive {
        /// Its connection.
        agent: AgentId,
    },
    /// The connection is no more, and the agent neither: its process has ended.
    Closed {
        /// Which one.
        agent: AgentId,
        /// How that was seen.
        how: String,
    },
    /// The connection is no more, but the agent may still be there, and join again.
    Disconnected {
        /// Its connection.
        agent: AgentId,
        /// How that was seen.
        how: String,
        /// It was reset: a living agent sees that, too, and comes back at once.
        reset: bool,
    },
    /// The user wants the job to stop, where no agent has heard it.
    Interrupt {
        /// The signal's number.
        signal: i32,
    },
    /// Time has passed.
    Tick,
}

/// Something to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send this.
    Send(AgentId, ToAgent),
    /// The agent speaks over this connection from now on; the one that it had is to be closed.
    Adopt {
        /// Its number.
        agent: AgentId,
        /// The number under which the connection was announced.
        connection: AgentId,
    },
    /// Close the connection once everything has been sent. No [`Event::Closed`] need follow.
    Close(AgentId),
    /// Show this line to the user.
    Say(String),
    /// Write this down. Only where [`Rules::recorded`](crate::Rules) asks for it.
    Record(Record),
    /// The job is over; agents have been told by earlier actions.
    Finish(JobResult),
}
