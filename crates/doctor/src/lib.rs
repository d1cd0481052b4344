//! Finds what would stop a job, before one is started.
//!
//! Three steps, and only the middle one judges:
//!
//! - [`examine`] asks its process on every host ([`serve`]) for its [`Facts`], and lets the hosts
//!   connect to each other. It gives a [`Cluster`]: plain data.
//! - [`diagnose`] turns that into [`Finding`]s by pure functions, one file per subject.
//! - [`Report`] writes them as a table, or as JSON.
//!
//! [`Facts::gather`] alone is what a report of a bug wants to know of a host.

mod checks;
mod cluster;
mod examine;
mod facts;
mod finding;
#[cfg(test)]
#[allow(clippy::unwrap_used)] // fixtures of tests
mod fixtures;
mod interface_choice;
mod probe;
mod protocol;
mod quantity;
mod report;
mod serve;
mod session;

pub use checks::diagnose;
pub use cluster::*;
pub use examine::{Examination, Host as HostToExamine, Interrupted, examine};
pub use facts::*;
pub use finding::{Finding, Subject, Verdict};
pub use protocol::PROTOCOL;
pub use report::{Report, Style};
pub use serve::serve;
