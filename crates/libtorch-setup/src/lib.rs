//! Finds libtorch for a project, or fetches it once for the user, and writes its place into the project's cargo
//! configuration.
//!
//! `brigade setup`, `brigade new` and `cargo xtask setup` are thin around this crate.
//!
//! - [`Libtorch::find_or_fetch`] looks at the libtorch that the user names, or fetches the pinned
//!   one into the [`Cache`], verified by digest, whole or not at all.
//! - [`Project::configure`] writes `.cargo/libtorch.toml`, which tells plain cargo commands where it
//!   is (`LIBTORCH`) and programs where to load it from (the run path), and
//!   [`Project::remove`] undoes that.
//!
//! Errors are texts for the user, in one line, that say what to do.

mod cache;
mod fetch;
mod install;
mod libtorch;
mod pins;
mod pip_log;
mod progress;
mod project;
mod python;

pub use cache::Cache;
pub use libtorch::{Libtorch, Origin, TCH_VERSION, Wanted};
pub use pins::{Kind, Pins};
pub use project::{Change, Project, RunPath, configured};
