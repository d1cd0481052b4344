//! What the decision is told, and what it asks to be done.

use crate::{FromAgent, Join, ToAgent, Verdict};

/// A connection to an agent, numbered by the coordinator; never used twice.
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
    Said {
        /// Its connection.
        agent: AgentId,
        /// The message.
        message: FromAgent,
    },
    /// A part of a message, or one that does not matter here: the agent is alive.
    Heard {
        /// Its connection.
        agent: AgentId,
    },
    /// The connection is no more.
    Closed {
        /// Which one.
        agent: AgentId,
        /// How that was seen.
        how: String,
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
    /// Close the connection once everything has been sent. No [`Event::Closed`] need follow.
    Close(AgentId),
    /// Show this line to the user.
    Say(String),
    /// The job is over; agents have been told by earlier actions.
    Finish(Verdict),
}
