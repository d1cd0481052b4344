//! The inputs of the agent's state machine (events) and its outputs (actions).
//!
//! All activity of an agent passes through these two types: code that follows a job (an event log, a progress line)
//! needs nothing else.

use std::time::Duration;

use brigade_hardware::DeviceFault;
use brigade_rendezvous::{Assignment, ExitStatus, FromAgent, ToAgent};
use nix::sys::signal::Signal;

use crate::output::Tail;
use crate::{LaunchError, Outcome};

/// Input of the agent's state machine.
#[derive(Debug)]
pub(in crate::agent) enum Event {
    /// The folder for the job's files has been created, if it has any.
    FolderMade,
    /// A coordinator was found, or started in this process: the agent may join.
    Connected {
        /// `true` if the coordinator runs in this process.
        here: bool,
    },
    /// This host cannot take part: the folder for its logs could not be created, or no coordinator was found.
    Failed(LaunchError),
    /// A new connection to the coordinator was made, after the old one was lost or became silent: the agent may request
    /// its seat.
    Reconnected,
    /// `true`: nothing was received from the coordinator for [`TimeLimits::quiet`](brigade_rendezvous::TimeLimits).
    /// `false`: data was received again after that.
    Quiet(bool),
    /// The connection was lost.
    ConnectionLost {
        /// Description of how that was detected.
        how: String,
        /// `true` if the coordinator may still run, so that reconnecting is useful.
        may_resume: bool,
        /// `true` if the other side has closed it, which is how a coordinator answers a host that leaves.
        closed: bool,
    },
    /// The coordinator no longer runs at its earlier address.
    CoordinatorGone {
        /// Description of how that was detected.
        how: String,
    },
    /// A message from the coordinator was received.
    Received(ToAgent),
    /// A line for the user came from the search for the coordinator, or from a coordinator in this process.
    Line(String),
    /// A coordinator in this process has informed all other agents that the job is over. Sent at once if there is none.
    OthersNotified,
    /// The folder and files of an attempt have been created.
    Prepared {
        /// Number of the attempt.
        attempt: u32,
    },
    /// All ranks of the attempt have been started. Contains their process numbers.
    Started(Vec<i32>),
    /// The attempt's files could not be created, or its ranks could not be started: no rank has run the program.
    StartFailed {
        /// Number of the attempt.
        attempt: u32,
        /// Reason for the failure.
        error: LaunchError,
    },
    /// A rank has ended.
    Exited {
        /// Local rank of the rank.
        local_rank: usize,
        /// Exit status of the rank.
        exit_status: ExitStatus,
    },
    /// The terminal has interrupted a rank that has it for itself (Ctrl-C). Comes before its [`Event::Exited`].
    Typed {
        /// Local rank of the rank.
        local_rank: usize,
        /// Signal that the rank was sent.
        signal: Signal,
    },
    /// The local ranks that have written an error and not ended: the answer to [`Action::FindErrors`].
    Exiting(Vec<usize>),
    /// Faults that drivers have reported for the ranks' devices: the other answer to [`Action::FindErrors`].
    DeviceFaults(Vec<DeviceFault>),
    /// The last output lines of a rank: an answer to [`Action::CollectFailure`].
    Tail {
        /// Local rank of the rank.
        local_rank: usize,
        /// Last output lines of the rank.
        tail: Tail,
    },
    /// Details of a failed rank besides its output: the second answer to [`Action::CollectFailure`].
    FailureDetails {
        /// Local rank of the rank.
        local_rank: usize,
        /// The error that the rank wrote, and how long before its end.
        error: Option<(String, Duration)>,
        /// Hint of the system about the reason.
        hint: Option<String>,
        /// Faults of the ranks' devices.
        device_faults: Vec<DeviceFault>,
    },
    /// No process of the ranks is left: the answer to [`Action::Sweep`].
    Swept,
    /// Ranks that SIGKILL did not end, each with the kernel's letter for its state: the answer to [`Action::Inspect`].
    Inspected(Vec<(usize, char)>),
    /// All output has been written, or sent to the coordinator: the answer to [`Action::Drain`].
    Drained,
    /// The reader of the output has closed it.
    OutputClosed,
    /// This process received a signal.
    Signal(Signal),
    /// Time has passed without another event.
    Tick,
}

/// Output of the agent's state machine.
#[derive(Debug)]
pub(in crate::agent) enum Action {
    /// Makes the folder for the job's files.
    MakeFolder,
    /// Searches for the coordinator.
    Connect,
    /// Searches for the coordinator of the earlier connection, until [`Action::StopReconnecting`].
    Reconnect {
        /// `true` if the coordinator may run although nothing seems to listen.
        patient: bool,
    },
    /// Stops reconnecting: data has arrived over the old connection, or the coordinator is lost.
    StopReconnecting,
    /// Requests from the coordinator to take part in the job.
    Join(JoinRequest),
    /// Sends a message to the coordinator.
    Send(FromAgent),
    /// Reports to the coordinator that the attempt is stopped, with the port for the next one.
    SendStopped {
        /// Number of the attempt.
        attempt: u32,
        /// `true` if ranks had to be killed.
        killed: bool,
        /// Description of the ranks that could not be killed.
        stuck: Option<String>,
    },
    /// Ends the connection to the coordinator.
    Disconnect,
    /// Makes folder and files of an attempt.
    Prepare {
        /// Number of the attempt.
        attempt: u32,
    },
    /// Starts the ranks of the attempt that was prepared.
    Start(Assignment),
    /// Finds the ranks that are about to end because of an error in their own program.
    FindErrors,
    /// Sends ranks a signal that requests their end.
    Ask {
        /// Local ranks of the receivers.
        local_ranks: Vec<usize>,
        /// Signal to send.
        signal: Signal,
    },
    /// Forwards a signal to all ranks and their children, without any other effect.
    Forward(Signal),
    /// Suspends the ranks and this process, and continues the ranks when it is continued.
    Suspend,
    /// Collects details about a failed rank.
    CollectFailure {
        /// Local rank of the rank.
        local_rank: usize,
        /// `true` if the rank was killed, so that the system may have recorded why.
        killed: bool,
    },
    /// Reads the process states of these ranks, which SIGKILL did not end.
    Inspect(Vec<usize>),
    /// Kills what the ranks have left behind.
    Sweep,
    /// Forgets the ranks and what belongs to their attempt.
    Release,
    /// Forgets the ranks, some of which cannot be killed: the reaper continues to wait for them.
    LeaveToReaper,
    /// Writes all that the ranks have printed.
    Drain,
    /// Stops taking output.
    DropOutput,
    /// Shows a line to the user, unless the launch is quiet.
    Say(String),
    /// Shows the result of the job and begins the exit.
    Report(Result<Outcome, LaunchError>),
    /// Exits the agent.
    Exit {
        /// `true` if all output is written.
        written: bool,
    },
}

/// Variable fields of an agent's join request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::agent) struct JoinRequest {
    /// `true` if the host has a part in the job and was only disconnected.
    pub(in crate::agent) resume: bool,
    /// Last attempt in which the host took part, and its node rank there.
    pub(in crate::agent) last: Option<LastPart>,
    /// Number of restarts when that attempt began.
    pub(in crate::agent) restarts: u32,
}

/// An attempt in which this host took part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::agent) struct LastPart {
    pub(in crate::agent) attempt: u32,
    /// Node rank of this host in the attempt.
    pub(in crate::agent) node_rank: usize,
}
