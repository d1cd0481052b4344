//! The inputs of the state machine (events) and its outputs (actions).

use super::job_event::Record;
use crate::{FromAgent, JobResult, Join, ToAgent};

/// Identifier of an agent, which the coordinator assigns with the agent's first connection and never reuses. The agent
/// keeps it when it joins again over another connection ([`Action::Adopt`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AgentId(pub u64);

/// Input of the coordinator's state machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A connection to this host is being made. It will join or be closed.
    Expected {
        /// Identifier of the connection.
        agent: AgentId,
        /// Name of the host.
        host: String,
    },
    /// The first message of an agent was received.
    Joined {
        /// Identifier of the connection.
        agent: AgentId,
        /// Content of the message.
        join: Join,
        /// Address that the agent connected from. `None` in one process or over ssh.
        seen: Option<String>,
        /// `true` if a network connects the agent, so that it may become silent.
        remote: bool,
    },
    /// A later message of an agent was received.
    Message {
        /// Identifier of the connection.
        agent: AgentId,
        /// Content of the message.
        message: FromAgent,
    },
    /// Part of a message, or one without further effect, was received: the agent is alive.
    Alive {
        /// Identifier of the connection.
        agent: AgentId,
    },
    /// The connection is closed because the agent's process has ended.
    Closed {
        /// Identifier of the connection.
        agent: AgentId,
        /// Description of how that was detected.
        how: String,
    },
    /// The connection is lost, but the agent may still run and join again.
    Disconnected {
        /// Identifier of the connection.
        agent: AgentId,
        /// Description of how that was detected.
        how: String,
        /// `true` if the connection was reset: a running agent detects that, too, and reconnects at once.
        reset: bool,
    },
    /// The user stops the job with a signal that no agent has received.
    Interrupt {
        /// Number of the signal.
        signal: i32,
    },
    /// Time has passed, and nothing else happened.
    Tick,
}

/// Output of the coordinator's state machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Sends a message to an agent.
    Send(AgentId, ToAgent),
    /// Makes this connection the agent's current one. Its earlier connection is to be closed.
    Adopt {
        /// Identifier of the agent.
        agent: AgentId,
        /// Identifier under which the connection was announced.
        connection: AgentId,
    },
    /// Closes the connection once everything has been sent. It need not be followed by an [`Event::Closed`].
    Close(AgentId),
    /// Shows this line to the user.
    Say(String),
    /// Records an event. Sent only if [`Rules::recorded`](crate::Rules) is set.
    Record(Record),
    /// Ends the job with this result. Earlier actions have informed the agents.
    Finish(JobResult),
}
