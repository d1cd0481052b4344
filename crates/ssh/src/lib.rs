//! Starts the running program on other hosts over the user's own ssh, and speaks with it over the
//! session's standard streams. The launcher and the doctor both reach hosts in this way.
//!
//! - [`HostSpec`] reads lists of hosts and hostfiles; [`Selection`] takes some of them.
//! - [`HostAccess`] makes the command that starts the program on a host, in a role such as `__agent`;
//!   [`remote_command`] is the line of `sh` that it runs there.
//! - [`Child`] is the local end of a session: a process with its stderr.
//! - [`wire`] sends and receives messages over its two other streams.
//! - [`forwarded_variables`] chooses the variables that other hosts get.
//!
//! A session ends with the process that started it: [`reexec`] starts every client of ssh through a
//! role of this executable that asks the kernel for that.

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
