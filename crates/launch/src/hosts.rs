//! Several hosts with one command: `brigade launch --hosts node1:4,node2:4 -- PROGRAM`.
//!
//! The launcher starts an agent on every host, over the system's ssh with the user's own settings
//! (`localhost` and this machine's own name need none), and coordinates them over the sessions'
//! standard streams: no port is opened for it, and a session's end is noticed at once on both
//! sides. First all hosts connect and answer: version, working folder, program. Only when all of
//! them could start does any of them.
//!
//! When the launcher ends, however it ends, the agents find their input closed and stop their
//! ranks.

pub(crate) mod agent_side;
mod bundle;
mod connect_all;
mod digest;
mod error;
mod message;
mod output;
mod plan;
mod python_files;
mod run;
mod session;
mod store;

use std::path::PathBuf;
use std::time::Duration;

use brigade_ssh::{EnvRequest, HostSpec};

pub use error::{HostFailure, HostsError};
#[doc(hidden)]
pub use message::read_messages;
pub use plan::{HostsPlan, PlannedHost};
pub use run::run;

/// What a user can ask of a launch on several hosts, besides [`LaunchOptions`](crate::LaunchOptions).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostsOptions {
    /// The hosts. Ranks are numbered in this order.
    pub hosts: Vec<HostSpec>,
    /// The client of ssh with options, in the form of a line of the shell. Default: what
    /// `BRIGADE_SSH` says, else `ssh`.
    pub ssh_command: Option<String>,
    /// How long ssh may take to connect to a host.
    pub connect_timeout: Duration,
    /// The folder in which the ranks run, on every host. Default: the current one of this process.
    pub workdir: Option<PathBuf>,
    /// Variables of this environment for the hosts, besides those of [`FORWARDED`](brigade_ssh::FORWARDED).
    pub env: Vec<EnvRequest>,
    /// Name or address under which the others reach the first host. Default: the address at which
    /// its sshd was reached.
    pub master_addr: Option<String>,
    /// The job goes on, restarted, while it has this many hosts left. Default: all of them.
    pub min_hosts: Option<usize>,
    /// Copy this executable, the program and the libraries that it is linked to, or a Python script
    /// or module and what it may import from its own folder, where they are missing or differ.
    pub sync: bool,
}

/// No host; 10 s to connect.
impl Default for HostsOptions {
    fn default() -> Self {
        Self {
            hosts: Vec::new(),
            ssh_command: None,
            connect_timeout: Duration::from_secs(10),
            workdir: None,
            env: Vec::new(),
            master_addr: None,
            min_hosts: None,
            sync: false,
        }
    }
}

/// The second part of the role `__agent`.
pub(crate) const ENTERED: &str = "entered";
