//! Interface of all trackers.

use std::any::Any;

use crate::{Image, Outcome, Result, Run, Stamp, Table, TrackError, Value};

/// Records what a run logs.
///
/// `start` is called first and `finish` last, each once. Calls come from one thread at a time.
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
    /// Returns the name by which a program selects the tracker.
    fn name(&self) -> &str;

    /// Begins a run, or continues one that was stopped.
    ///
    /// # Errors
    /// Fails when the files cannot be created, or the server cannot be reached.
    fn start(&mut self, run: &Run) -> Result<()>;

    /// Logs scalar values that belong together.
    ///
    /// # Errors
    /// Fails when the values cannot be written.
    fn log(&mut self, values: &[(String, Value)], at: Stamp) -> Result<()>;

    /// Logs a text under a name.
    ///
    /// # Errors
    /// [`TrackError::Unsupported`] unless the tracker can store texts.
    fn log_text(&mut self, _name: &str, _text: &str, _at: Stamp) -> Result<()> {
        Err(TrackError::Unsupported { tracker: self.name().to_owned(), what: "text" })
    }

    /// Logs an image under a name.
    ///
    /// # Errors
    /// [`TrackError::Unsupported`] unless the tracker can store images.
    fn log_image(&mut self, _name: &str, _image: &Image, _at: Stamp) -> Result<()> {
        Err(TrackError::Unsupported { tracker: self.name().to_owned(), what: "images" })
    }

    /// Logs a table under a name.
    ///
    /// # Errors
    /// [`TrackError::Unsupported`] unless the tracker can store tables.
    fn log_table(&mut self, _name: &str, _table: &Table, _at: Stamp) -> Result<()> {
        Err(TrackError::Unsupported { tracker: self.name().to_owned(), what: "tables" })
    }

    /// Ends the run. All values are written when this returns.
    ///
    /// # Errors
    /// Fails when the last values cannot be written.
    fn finish(&mut self, outcome: Outcome) -> Result<()>;
}
