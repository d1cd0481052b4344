//! Access to other hosts over the user's own ssh client: hostfiles, starting this program on them, and messages over
//! the session's standard streams.
//!
//! The launcher and the doctor both reach hosts in this way.
//!
//! - [`HostSpec`] reads lists of hosts and hostfiles; [`Selection`] selects some of the hosts.
//! - [`HostAccess`] makes the command that starts the program on a host, in a role such as `__agent`;
//!   [`remote_command`] makes the line of `sh` that runs on the host.
//! - [`Child`] is the local end of a session: a process with its stderr.
//! - [`wire`] sends and receives messages over its two other streams.
//! - [`forwarded_variables`] chooses the variables that other hosts get.
//!
//! A session ends with the process that started it: [`reexec`] starts every ssh client through a role of this
//! executable that asks the kernel for that.
//!
//! ```
//! use brigade_ssh::HostSpec;
//!
//! let hosts = HostSpec::parse_list("node1:4,ada@node2")?;
//! assert_eq!((hosts[0].name.as_str(), hosts[0].slots), ("node1", Some(4)));
//! assert_eq!(hosts[1].user.as_deref(), Some("ada"));
//! # Ok::<(), brigade_ssh::HostListError>(())
//! ```
//! # How a job starts over ssh
//!
//! `brigade launch --hosts` opens no port. The launcher starts `brigade __agent` on each host through one line of
//! `sh`, which every login shell accepts, and everything else goes over that session. The line (`remote_command.rs`)
//! does not run a file that other users of that host could replace. A line before the first frame separates the
//! messages from a login banner (`wire.rs`).
//!
//! The launcher sends each host a series of requests: report its facts, list the files of `--sync` that it lacks,
//! change to the job's folder and variables, and check that it can start the ranks. The job starts only when all hosts
//! are ready. From then on the same streams carry the coordinator's messages, and the ranks' output within a credit
//! limit (flow control).
//!
//! The remote agent runs in two parts: the first receives the job's folder and variables and replaces itself by the
//! second (`exec`), so no code of the second depends on how they were sent. The files of a Python program (`--sync`)
//! are written together: all at their own paths, or all in one folder named by their common digest.
//!
//! Both sides notice the end of a session: at once when it is closed, or after the heartbeat timeout
//! (`--heartbeat-timeout`, 30 s) without a message. So no rank is left when the launcher is killed, the cable is cut,
//! or the process of sshd is killed.

mod access;
mod child;
mod environment;
mod error;
pub mod executable;
mod hostfile;
mod local_facts;
mod local_host;
mod parent_death;
pub mod reexec;
pub mod remote_command;
mod selection;
pub mod ssh;
pub mod wire;

pub use access::HostAccess;
pub use brigade_rendezvous::TimeLimits;
pub use child::{Child, Listener, ProcessGroup};
pub use environment::{
    EnvRequest, FORWARDED, ForwardedVariables, VariableFile, forwarded_variables,
};
pub use error::RemoteError;
pub use executable::ExecutableError;
pub use hostfile::{HostListError, HostSpec, Place};
pub use local_facts::LocalFacts;
pub use local_host::LocalHost;
pub use parent_death::die_with_parent;
pub use selection::Selection;
