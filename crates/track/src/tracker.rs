//! What every tracker can do.

use std::any::Any;

use crate::{Image, Outcome, Result, Run, Stamp, Table, TrackError, Value};

/// Takes down what a run logs.
///
/// `start` comes first, `finish` last, both once. Calls come from one thread at a time.
///
/// ```
/// use brigade_track::{Stamp, Outcome, Result, Run, Tracker, Value};
///
/// /// Keeps the lowest loss.
/// #[derive(Debug, Default)]
/// struct Lowest(Option<f64>);
///
/// impl Tracker for Lowest {
///     fn name(&self) -> &str {
///         "lowest"
///     }
///
///     fn start(&mut self, _: &Run) -> Result<()> {
///         Ok(())
///     }
///
///     fn log(&mut self, values: &[(String, Value)], _: Stamp) -> Result<()> {
///         let loss = values.iter().find(|(name, _)| name == "loss").and_then(|it| it.1.number());
///         self.0 = self.0.into_iter().chain(loss).reduce(f64::min);
///         Ok(())
///     }
///
///     fn finish(&mut self, _: Outcome) -> Result<()> {
///         Ok(())
///     }
/// }
/// ```
pub trait Tracker: Any + Send {
    /// What a program asks for it by.
    fn name(&self) -> &str;

    /// Begins a run, or goes on with one that was stopped.
    ///
    /// # Errors
    /// When there is no place to write, or no server.
    fn start(&mut self, run: &Run) -> Result<()>;

    /// Takes values down that belong together.
    ///
    /// # Errors
    /// When they cannot be written.
    fn log(&mut self, values: &[(String, Value)], at: Stamp) -> Result<()>;

    /// Takes a text down.
    ///
    /// # Errors
    /// [`TrackError::Unsupported`] unless the tracker has a place for it.
    fn log_text(&mut self, _name: &str, _text: &str, _at: Stamp) -> Result<()> {
        Err(TrackError::Unsupported { tracker: self.name().to_owned(), what: "text" })
    }

    /// Takes a picture down.
    ///
    /// # Errors
    /// [`TrackError::Unsupported`] unless the tracker has a place for it.
    fn log_image(&mut self, _name: &str, _image: &Image, _at: Stamp) -> Result<()> {
        Err(TrackError::Unsupported { tracker: self.name().to_owned(), what: "images" })
    }

    /// Takes a table down.
    ///
    /// # Errors
    /// [`TrackError::Unsupported`] unless the tracker has a place for it.
    fn log_table(&mut self, _name: &str, _table: &Table, _at: Stamp) -> Result<()> {
        Err(TrackError::Unsupported { tracker: self.name().to_owned(), what: "tables" })
    }

    /// Ends the run; everything is written when this returns.
    ///
    /// # Errors
    /// When the last values cannot be written.
    fn finish(&mut self, outcome: Outcome) -> Result<()>;
}
