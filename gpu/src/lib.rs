//! What runs on a machine with a GPU: the archive of `cargo xtask gpu --pack`, or the same folder on this machine.
//!
//! `run.py` in the folder finds libtorch and starts the program `brigade-gpu`, which runs the parts one after the
//! other within a time budget and writes `report.md` and `report.json`. Nothing here links libtorch.

#![allow(clippy::print_stdout)] // the runner's progress

mod facts;
mod jobs;
mod pack;
mod report;
mod run;
mod tests_part;

pub use facts::{Gpu, Machine};
pub use jobs::{EXECUTE, execute};
pub use pack::{Build, FACTS_SCRIPT, FILE, Pack, Program, SCRIPT, file_name};
pub use report::{Counts, Outcome, Part, Ran, Report};
pub use run::{Device, Options, PartName, Supplied, run};
