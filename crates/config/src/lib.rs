//! The settings of a launch: files, environment and flags as layers, with the source of each value.
//!
//! [`TABLE`] has a row for each setting. A settings file, the environment and the flags of `brigade
//! launch` fill the same [`Settings`], one layer over the other, and a [`Layer`] remembers for each
//! value where it comes from:
//!
//! ```
//! use brigade_config::{Layer, Source, Variables, file, conflicts};
//!
//! let text = "version = 1\n[ranks]\nnproc = 2\n[hosts]\nnnodes = 2\n";
//! let lower = file::read("job.toml".as_ref(), text)?.over(Layer::defaults());
//! let variables = Variables::from_iter([("PET_MAX_RESTARTS", "3")]).layer()?;
//! let mut flags = Layer::default();
//! flags.set("nproc", "4", Source::Flag("nproc".into()))?;
//!
//! let layers = conflicts::resolve(flags.over(variables.over(lower)))?;
//! let said = |name| layers.source(name).map(ToString::to_string).unwrap_or_default();
//! assert_eq!((layers.settings.text("nproc").unwrap().as_str(), said("nproc").as_str()), ("4", "flag --nproc"));
//! assert_eq!(said("max-restarts"), "environment PET_MAX_RESTARTS");
//! assert_eq!(said("nnodes"), "job.toml:5");
//! assert_eq!(said("role"), "default");
//! # Ok::<(), brigade_config::ConfigError>(())
//! ```
//!
//! [`load`] reads files and the environment, [`accelerate`] parses the files of Hugging Face's Accelerate, and
//! [`migrate`], [`document`], [`edit`], [`store`] and [`questions`] create files. All of them except `load` and `store`
//! are pure functions.

pub mod accelerate;
pub mod conflicts;
pub mod document;
pub mod edit;
mod error;
pub mod file;
mod layer;
mod load;
mod machine;
pub mod migrate;
mod paths;
pub mod plugin_arguments;
pub mod plugins;
pub mod questions;
mod settings;
mod source;
pub mod store;
pub mod suggest;
pub mod value;
mod variables;

pub use error::ConfigError;
pub use layer::{Layer, Note};
pub use load::{Loaded, is_accelerates, load, read_layer, read_text};
pub use machine::Machine;
pub use paths::{ChosenBy, SettingsPath, is_accelerates_default, to_read, to_write};
pub use settings::{Setting, Settings, TABLE, TABLES, Table};
pub use source::Source;
pub use variables::{Variables, of_the_launcher};
