//! The settings of a launch.

pub mod accelerate;
pub mod document;
mod error;
pub mod file;
mod layer;
mod load;
mod machine;
pub mod migrate;
mod places;
pub mod questions;
pub mod rivals;
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
pub use places::{ChosenBy, Place, to_read, to_write};
pub use settings::{Setting, Settings, TABLE, TABLES, Table};
pub use source::Source;
pub use variables::Variables;
