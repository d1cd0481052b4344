//! What tests need of a machine, and a harness that tells tests that cannot run here from tests that
//! passed. For development only.
//!
//! libtest cannot skip a test at run time: one that finds its program missing can only return, and
//! is counted as passed. Test programs whose tests need more than Rust and a C compiler therefore
//! have `harness = false` in their `Cargo.toml` and list their tests with [`suite!`]. A test whose
//! [`Need`]s are not met is reported as ignored, by `cargo test` and by cargo-nextest alike, and the
//! reason is printed; where `BRIGADE_REQUIRE` names the need, the test fails instead.
//!
//! ```no_run
//! mod faults {
//!     pub(crate) fn a_cut_cable_is_noticed() {}
//!     pub(crate) fn a_stopped_coordinator_gives_way() {}
//! }
//! fn arguments_are_checked() {}
//!
//! brigade_suite::suite! {
//!     always: arguments_are_checked;
//!     needs Hosts: faults::a_cut_cable_is_noticed;
//!     needs Hosts Etcd: faults::a_stopped_coordinator_gives_way;
//! }
//! ```

mod harness;
mod limit;
mod need;
mod report;
mod seed;

pub use harness::{Group, Part, run};
pub use limit::{TimeLimit, descendants};
pub use need::{
    Lack, Need, PUBLISHED_WEIGHTS, Package, Remedy, SYSTEM_PATH, UnknownNeed, evcxr, installed,
    is_root, needs, python, required, with_mounts,
};
pub use report::{Missed, REPORT, is_missed};
pub use seed::{SEED, random};
