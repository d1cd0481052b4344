//! The settings of a launch.

mod error;
pub mod file;
mod layer;
mod places;
mod settings;
mod source;
pub mod suggest;
pub mod value;
mod variables;

pub use error::ConfigError;
pub use layer::{Layer, Note};
pub use places::{ChosenBy, Place, to_write};
pub use settings::{Setting, Settings, TABLE, TABLES, Table};
pub use source::Source;
pub use value::{Nodes, Nproc};
pub use variables::Variables;
