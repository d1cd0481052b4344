//! Trackers: writers of a run's metrics, to JSON lines, CSV, TensorBoard or MLflow.
//!
//! - [`JsonLines`] (the default): one file per project, one line per call, flushed.
//! - [`Csv`]: one table per project, to which columns can be added later.
//! - [`TensorBoard`]: event files for TensorBoard.
//! - [`Mlflow`]: a run on an MLflow server, sent by a thread of its own.
//! - Anything else: implement [`Tracker`].
//!
//! [`reader`] reads what [`JsonLines`] writes, also while it grows.
//!
//! This crate does not depend on libtorch, and trackers have no ranks: `brigade-train` calls a tracker on rank 0 only.
//! The time of a point is an argument, so that the output is a function of the input.
//!
//! ```
//! use brigade_track::{Stamp, JsonLines, Run, Tracker, Value};
//!
//! let folder = std::env::temp_dir().join(format!("brigade-track-{}", std::process::id()));
//! let mut tracker = JsonLines::new(&folder);
//! tracker.start(&Run::new("demo"))?;
//! tracker.log(&[("loss".to_owned(), Value::from(0.5))], Stamp::step(1))?;
//! tracker.finish(brigade_track::Outcome::Finished)?;
//! let text = std::fs::read_to_string(folder.join("demo.jsonl")).unwrap_or_default();
//! assert!(text.lines().nth(1).is_some_and(|line| line.contains("\"loss\":0.5")));
//! # std::fs::remove_dir_all(folder).ok();
//! # Ok::<(), brigade_track::TrackError>(())
//! ```

mod config;
mod csv_table;
mod error;
mod files;
mod image;
mod json_lines;
mod mlflow;
mod opened;
pub mod reader;
mod run;
mod table;
mod tensorboard;
mod tracker;
mod value;

pub use config::Config;
pub use csv_table::Csv;
pub use error::TrackError;
pub use image::Image;
pub use json_lines::JsonLines;
pub use mlflow::{Credentials, Mlflow};
pub use run::{Outcome, Run, Stamp};
pub use table::Table;
pub use tensorboard::TensorBoard;
pub use tracker::Tracker;
pub use value::{Value, Values};

/// The result of this crate's functions.
pub type Result<T, E = TrackError> = std::result::Result<T, E>;
