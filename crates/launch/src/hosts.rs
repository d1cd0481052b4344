//! Several hosts with one command: `brigade launch --hosts node1:4,node2:4 -- PROGRAM`.
//!
//! The launcher starts an agent on every host, over the system's ssh with the user's own settings (`localhost` and this
//! machine's own name need none), and coordinates them over the sessions' standard streams: no port is opened for that,
//! and the end of a session is detected at once on both sides. First all hosts connect and are checked: version,
//! working folder, program. None starts unless all of them can.
//!
//! When the launcher ends for any reason, the agents' input is closed and they stop their ranks.

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

/// Options of a launch on several hosts, besides [`LaunchOptions`](crate::LaunchOptions).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostsOptions {
    /// Hosts of the job. Ranks are numbered in this order.
    pub hosts: Vec<HostSpec>,
    /// Command of the ssh client with options, in shell syntax. Defaults to the value of `BRIGADE_SSH`, else `ssh`.
    pub ssh_command: Option<String>,
    /// Time limit of ssh for connecting to a host. Defaults to 10 s.
    pub connect_timeout: Duration,
    /// Working folder of the ranks, on every host. Defaults to the current folder of this process.
    pub workdir: Option<PathBuf>,
    /// Environment variables that are passed to the hosts, besides those of [`FORWARDED`](brigade_ssh::FORWARDED).
    pub env: Vec<EnvRequest>,
    /// Name or address under which the others reach the first host. Defaults to the address at which its sshd was
    /// reached.
    pub master_addr: Option<String>,
    /// Minimum number of hosts: the job continues, with a restart, while it has this many hosts left. Defaults to all
    /// of them.
    pub min_hosts: Option<usize>,
    /// `true` to copy this executable, the program and the libraries that it is linked to, or a Python script or module
    /// and what it may import from its own folder, where they are missing or differ.
    pub sync: bool,
}

/// Returns the defaults: no host, and 10 s to connect.
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

/// Argument for the second part of the role `__agent`.
pub(crate) const ENTERED: &str = "entered";
