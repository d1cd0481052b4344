//! A log whose lines contain the rank and the step.

use std::fmt::{self, Write as _};
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use brigade_torch::{Error, Result};
use parking_lot::Mutex;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};

use crate::error::TrainError;
use crate::processes::Processes;
use crate::watch::Watch;

/// The log of a run, whose lines contain the rank and the step. Returned by [`crate::Accelerator::logging`].
#[derive(Debug, Clone, Copy)]
pub struct Logging<'a> {
    pub(crate) watch: &'a Arc<Watch>,
    pub(crate) processes: &'a Processes,
}

impl Logging<'_> {
    /// Starts writing log lines of this process: its own and those of all crates that use `tracing`. A line has the
    /// time, the level, the rank, and the step that was last passed to [`Trackers::log`](crate::Trackers::log) or
    /// [`Trackers::set_step`](crate::Trackers::set_step):
    ///
    /// ```text
    /// 2026-11-21T20:35:46.250Z INFO rank=0 step=12 train: loss is 0.5
    /// ```
    ///
    /// Installs `tracing`'s subscriber of the whole process. A program that has one adds [`Logging::layer`] to it
    /// instead.
    ///
    /// # Errors
    /// [`crate::TrainError::File`] when the file cannot be opened; [`brigade_torch::ErrorKind::InvalidArgument`] when
    /// the process has a subscriber.
    pub fn init(&self, options: &LogOptions) -> Result<()> {
        self.layer(options)?.install()
    }

    /// Returns the `tracing` layer that [`Logging::init`] installs, for a program with a subscriber of its own.
    ///
    /// # Errors
    /// [`crate::TrainError::File`] when the file cannot be opened.
    pub fn layer(&self, options: &LogOptions) -> Result<LogLayer> {
        LogLayer::new(self.watch, options)
    }

    /// Returns a logger of this name. Its lines come from rank 0 only, unless [`Logger::everywhere`] or
    /// [`Logger::in_order`] is used.
    ///
    /// ```
    /// # let accelerator = brigade_train::Accelerator::builder().cpu(true).build()?;
    /// let log = accelerator.logging().logger("train");
    /// log.info("written once, by rank 0");
    /// log.everywhere().warn("written by every rank");
    /// log.in_order(|log| log.info("written by every rank, in order"))?;
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    #[must_use]
    pub fn logger(&self, name: impl Into<String>) -> Logger {
        Logger::new(name.into(), self.processes)
    }
}

/// Options of log lines: level, ranks, format and destination.
#[derive(Debug, Clone)]
pub struct LogOptions {
    /// Minimum level of the lines that are written. Defaults to INFO.
    pub level: Level,
    /// `true` if ranks other than 0 write lines, too. A [`Logger`] can enable it for single lines. Defaults to `false`.
    pub all_ranks: bool,
    /// `true` if each line is a JSON object instead of text. Defaults to `false`.
    pub json: bool,
    /// Path of the file to which lines are appended. Defaults to `None`, which writes to standard error.
    pub file: Option<PathBuf>,
}

impl Default for LogOptions {
    /// Returns options for text on standard error, of rank 0, from level INFO on.
    fn default() -> Self {
        Self { level: Level::INFO, all_ranks: false, json: false, file: None }
    }
}

/// A `tracing` layer that writes events with the fields `rank` and `step`. Made by [`Logging::layer`].
#[derive(Debug)]
pub struct LogLayer {
    watch: Arc<Watch>,
    level: Level,
    all_ranks: bool,
    json: bool,
    file: Option<Mutex<File>>,
}

/// A logger that writes lines on the main process only, unless configured otherwise. Made by [`Logging::logger`].
#[derive(Debug, Clone)]
pub struct Logger {
    name: String,
    processes: Processes,
    everywhere: bool,
}

impl LogLayer {
    pub(crate) fn new(watch: &Arc<Watch>, options: &LogOptions) -> Result<Self> {
        let file = options.file.as_deref().map(open).transpose()?;
        Ok(Self {
            watch: Arc::clone(watch),
            level: options.level,
            all_ranks: options.all_ranks,
            json: options.json,
            file: file.map(Mutex::new),
        })
    }

    /// Installs the logger as the subscriber of the process.
    pub(crate) fn install(self) -> Result<()> {
        let subscriber = tracing_subscriber::registry().with(self);
        tracing::subscriber::set_global_default(subscriber).map_err(|_| {
            Error::invalid_argument(
                "logging: this process has a subscriber of `tracing` already; add Logging::layer to it instead",
            )
        })
    }
}

impl Logger {
    pub(crate) fn new(name: String, processes: &Processes) -> Self {
        Self { name, processes: processes.clone(), everywhere: false }
    }

    /// Returns the same logger with lines of all ranks.
    #[must_use]
    pub fn everywhere(&self) -> Self {
        Self { everywhere: true, ..self.clone() }
    }

    /// Runs the body on each rank in turn, with a logger of all ranks, so that their lines come in the
    /// ranks' order. Every rank calls it.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] when a peer is gone.
    pub fn in_order(&self, body: impl FnOnce(&Self)) -> Result<()> {
        let logger = self.everywhere();
        let mut body = Some(body);
        for rank in 0..self.processes.num_processes() {
            if rank == self.processes.process_index()
                && let Some(body) = body.take()
            {
                body(&logger);
            }
            self.processes.wait_for_everyone()?;
        }
        Ok(())
    }

    /// Logs a line at level DEBUG.
    pub fn debug(&self, message: impl fmt::Display) {
        if self.is_enabled() {
            tracing::debug!(logger = self.name, everywhere = self.everywhere, "{message}");
        }
    }

    /// Logs a line at level INFO.
    pub fn info(&self, message: impl fmt::Display) {
        if self.is_enabled() {
            tracing::info!(logger = self.name, everywhere = self.everywhere, "{message}");
        }
    }

    /// Logs a line at level WARN.
    pub fn warn(&self, message: impl fmt::Display) {
        if self.is_enabled() {
            tracing::warn!(logger = self.name, everywhere = self.everywhere, "{message}");
        }
    }

    /// Logs a line at level ERROR.
    pub fn error(&self, message: impl fmt::Display) {
        if self.is_enabled() {
            tracing::error!(logger = self.name, everywhere = self.everywhere, "{message}");
        }
    }

    fn is_enabled(&self) -> bool {
        self.everywhere || self.processes.is_main_process()
    }
}

impl<S: Subscriber> Layer<S> for LogLayer {
    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        // tracing orders levels by verbosity: ERROR is the lowest.
        *metadata.level() <= self.level
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        if self.watch.rank != 0 && !self.all_ranks && !fields.everywhere {
            return;
        }
        let line = Line {
            time: SystemTime::now(),
            level: *event.metadata().level(),
            rank: self.watch.rank,
            step: self.watch.trackers.step(),
            from: fields.logger.as_deref().unwrap_or_else(|| event.metadata().target()),
            message: &fields.message,
            others: &fields.others,
        };
        let line = if self.json { line.json() } else { line.text() };
        match &self.file {
            None => self.watch.print_line(&line),
            Some(file) => {
                let mut file = file.lock();
                // A failure of the log itself cannot be reported.
                let _ = file.write_all(format!("{line}\n").as_bytes());
            }
        }
    }
}

/// A log line before it is formatted.
struct Line<'a> {
    time: SystemTime,
    level: Level,
    rank: usize,
    step: Option<u64>,
    from: &'a str,
    message: &'a str,
    others: &'a [(&'static str, Value)],
}

impl Line<'_> {
    fn text(&self) -> String {
        let mut line =
            format!("{} {} rank={}", brigade_rank_env::timestamp(self.time), self.level, self.rank);
        if let Some(step) = self.step {
            let _ = write!(line, " step={step}");
        }
        // One line per event: a second line would have no rank.
        let _ = write!(line, " {}: {}", self.from, self.message.replace('\n', "\\n"));
        for (name, value) in self.others {
            let _ = write!(line, " {name}={value}");
        }
        line
    }

    fn json(&self) -> String {
        let mut line = Map::new();
        line.insert("time".into(), brigade_rank_env::timestamp(self.time).into());
        line.insert("level".into(), self.level.as_str().into());
        line.insert("rank".into(), self.rank.into());
        if let Some(step) = self.step {
            line.insert("step".into(), step.into());
        }
        line.insert("logger".into(), self.from.into());
        line.insert("message".into(), self.message.into());
        if !self.others.is_empty() {
            let others = self.others.iter().map(|(name, value)| ((*name).into(), value.clone()));
            line.insert("fields".into(), Value::Object(others.collect()));
        }
        Value::Object(line).to_string()
    }
}

/// Fields of an event.
#[derive(Default)]
struct Fields {
    message: String,
    logger: Option<String>,
    everywhere: bool,
    others: Vec<(&'static str, Value)>,
}

impl Fields {
    fn other(&mut self, field: &Field, value: impl Into<Value>) {
        self.others.push((field.name(), value.into()));
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.message = format!("{value:?}");
        } else {
            self.other(field, format!("{value:?}"));
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.message = value.to_owned(),
            "logger" => self.logger = Some(value.to_owned()),
            _ => self.other(field, value),
        }
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        if field.name() == "everywhere" {
            self.everywhere = value;
        } else {
            self.other(field, value);
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.other(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.other(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.other(field, value);
    }
}

fn open(path: &Path) -> Result<File> {
    Ok(OpenOptions::new().create(true).append(true).open(path).map_err(|source| {
        TrainError::File { action: "cannot open", path: path.to_owned(), source }
    })?)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    #[test]
    fn a_line_as_text_and_as_json() {
        let mut line = Line {
            time: UNIX_EPOCH + Duration::from_millis(1_763_757_346_250),
            level: Level::WARN,
            rank: 3,
            step: Some(12),
            from: "train",
            message: "two\nlines",
            others: &[("loss", Value::from(0.5))],
        };
        assert_eq!(
            line.text(),
            "2025-11-21T20:35:46.250Z WARN rank=3 step=12 train: two\\nlines loss=0.5"
        );
        let json: Value = serde_json::from_str(&line.json()).unwrap();
        assert_eq!((&json["rank"], &json["step"]), (&3.into(), &12.into()));
        assert_eq!(
            (&json["message"], &json["fields"]["loss"]),
            (&"two\nlines".into(), &0.5.into())
        );
        line.step = None;
        assert!(!line.text().contains("step") && !line.json().contains("step"));
    }
}
