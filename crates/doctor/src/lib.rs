//! Finds what would stop a job before it is started: checks of hosts, devices, network and files.
//!
//! A diagnosis has three steps, of which the second contains all rules:
//!
//! - [`examine`] starts a process on every host ([`serve`]), requests the host's [`Facts`], and lets the hosts connect
//!   to each other. It returns a [`Cluster`]: plain data.
//! - [`diagnose`] turns that into [`Finding`]s by pure functions, one file per subject.
//! - [`Report`] writes them as a table, or as JSON.
//!
//! [`Facts::gather`] returns the facts of this host alone, for a bug report.
//!
//! ```
//! use brigade_doctor::{Facts, Question, other_versions};
//! use brigade_hardware::Sources;
//!
//! let facts = Facts::gather(&Sources::system(), &Question::default());
//! assert!(facts.memory.total_bytes > 0);
//! for finding in other_versions(&facts) {
//!     println!("{}: {}", finding.found, finding.remedy);
//! }
//! ```

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

pub use checks::{diagnose, other_versions};
pub use cluster::*;
pub use examine::{Examination, Host as HostToExamine, Interrupted, examine};
pub use facts::*;
pub use finding::{Finding, Subject, Verdict};
pub use protocol::PROTOCOL;
pub use report::{Report, Style};
pub use serve::serve;
