//! Needs of tests on a machine, and a harness that distinguishes tests that cannot run here from tests that passed. For
//! development only.
//!
//! libtest cannot skip a test at run time: one that finds its program missing can only return, and
//! is counted as passed. Tests that need more than Rust and a C compiler are therefore in a test program with
//! `harness = false` in `Cargo.toml`, by custom `tests/needs/`, with [`main!`] in its root and the attribute
//! [`needs`] at each test. A test whose [`Need`]s are not met is reported as ignored, by `cargo test` and by
//! cargo-nextest alike, and the reason is printed; where `BRIGADE_REQUIRE` names the need, the test fails instead.
//!
//! ```no_run
//! mod faults {
//!     use brigade_test_needs::needs;
//!
//!     #[needs(Hosts)]
//!     fn a_cut_cable_is_noticed() {}
//!
//!     #[needs(Hosts, Etcd)]
//!     fn a_stopped_coordinator_gives_way() {}
//!
//!     #[needs()]
//!     fn arguments_are_checked() {}
//! }
//!
//! brigade_test_needs::main!();
//! ```

mod harness;
mod limit;
mod need;
mod report;
mod seed;

pub use brigade_test_needs_macros::{needs, part};
pub use harness::{Part, Test, main, run};
pub use limit::{TimeLimit, descendants};
pub use need::{
    Lack, Need, PACKAGES, PUBLISHED_WEIGHTS, Package, Remedy, SEMVER_CHECKS_VERSION, SYSTEM_PATH,
    UnknownNeed, arm64_package, evcxr, installed, is_root, needs_named, packages, python, required,
    semver_checks, static_package, with_mounts,
};
pub use report::{Missed, REPORT, is_missed};
pub use seed::{SEED, random};

#[doc(hidden)]
pub mod __private {
    pub use inventory;
}
