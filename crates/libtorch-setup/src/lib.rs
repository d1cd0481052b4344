//! Finds libtorch for a project, or downloads it once for the user, and writes its location into the project's cargo
//! configuration.
//!
//! `brigade setup`, `brigade new` and `cargo xtask setup` are thin wrappers of this crate.
//!
//! - [`Libtorch::find_or_fetch`] validates the libtorch that the user names, or downloads the pinned one into the
//!   [`Cache`], verified by digest, whole or not at all.
//! - [`Project::configure`] writes `.cargo/libtorch.toml`, which sets the location of libtorch for plain cargo commands
//!   (`LIBTORCH`) and for the dynamic loader of programs (the run path). [`Project::remove`] undoes that.
//! - [`TpuFiles::find_or_fetch`] downloads TorchTPU, the backend of libtorch for TPUs, in the same way.
//! - [`ObjectCache::install_from`] copies the compiled C++ that a release brings to where builds look for it.
//!
//! ```
//! use brigade_libtorch_setup::{Cache, Kind, Libtorch, Pins};
//!
//! let (cache, pins) = (Cache::of_user()?, Pins::embedded()?);
//! match Libtorch::find_fetched(Kind::Cpu, &cache, &pins)? {
//!     Some(libtorch) => println!("{} in {}", libtorch.version(), libtorch.folder().display()),
//!     None => println!("`brigade setup` fetches libtorch into {}", cache.root().display()),
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//! Error messages are for the user: one line each, with what to do.

mod cache;
mod fetch;
mod install;
mod libtorch;
mod objects;
mod pins;
mod pip_log;
mod progress;
mod project;
mod python;
mod tpu;

pub use cache::Cache;
pub use libtorch::{Libtorch, Origin, TCH_VERSION, Wanted, nvrtc_of};
pub use objects::ObjectCache;
pub use pins::{Kind, Pins};
pub use project::{Change, Project, RunPath, configured};
pub use tpu::{TpuFiles, TpuPlugin};
