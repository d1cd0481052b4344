//! Tracker that writes TensorBoard's event files.

mod event;
mod proto;
mod record;

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::opened::Opened;
use crate::run::since_1970;
use crate::{Image, Outcome, Result, Run, Stamp, Table, TrackError, Tracker, Value};
use event::Event;

/// Writes `FOLDER/PROJECT/events.out.tfevents.…`, which `tensorboard --logdir FOLDER` shows.
///
/// Numbers become scalars, texts become texts; a value that was logged without a step counts as step 0. The run's
/// settings become hyperparameters, with its numbers as metrics, on TensorBoard's page "HParams". NaN and the
/// infinities are written as they are. Numbers become 32-bit floats: the format has no others for scalars.
///
/// A resumed run writes a new file in the same folder; TensorBoard merges the files.
#[derive(Debug)]
pub struct TensorBoard {
    folder: PathBuf,
    open: Opened<Open>,
}

#[derive(Debug)]
struct Open {
    file: File,
    path: PathBuf,
    has_hparams: bool,
}

impl TensorBoard {
    /// Creates a tracker that writes into this folder, which is created at the start of the run.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), open: Opened::none(NAME) }
    }
}

impl Tracker for TensorBoard {
    fn name(&self) -> &str {
        NAME
    }

    fn start(&mut self, run: &Run) -> Result<()> {
        let folder = self.folder.join(run.file_name()?);
        fs::create_dir_all(&folder).map_err(TrackError::file("cannot make the folder", &folder))?;
        let (file, path) = create(&folder, run.began)?;
        let mut open = Open { file, path, has_hparams: !run.config.is_empty() };
        let at = Stamp { step: None, time: run.began };
        open.write(&[Event::version(at)])?;
        if open.has_hparams {
            open.write(&[Event::session_start(&run.config.flat(), at)])?;
        }
        self.open.set(open);
        Ok(())
    }

    fn log(&mut self, values: &[(String, Value)], at: Stamp) -> Result<()> {
        let events: Vec<Event> = values
            .iter()
            .map(|(name, value)| match value.number() {
                Some(number) => Event::scalar(name, number, at),
                None => Event::text(name, &value.text(), at),
            })
            .collect();
        self.open.get()?.write(&events)
    }

    fn log_text(&mut self, name: &str, text: &str, at: Stamp) -> Result<()> {
        self.open.get()?.write(&[Event::text(name, text, at)])
    }

    fn log_image(&mut self, name: &str, image: &Image, at: Stamp) -> Result<()> {
        let event = Event::image(name, image, &image.png()?, at);
        self.open.get()?.write(&[event])
    }

    fn log_table(&mut self, name: &str, table: &Table, at: Stamp) -> Result<()> {
        self.log_text(name, &table.markdown(), at)
    }

    fn finish(&mut self, outcome: Outcome) -> Result<()> {
        let mut open = self.open.take()?;
        if open.has_hparams {
            open.write(&[Event::session_end(outcome == Outcome::Finished, Stamp::now())])?;
        }
        open.file.sync_all().map_err(TrackError::file("cannot write", &open.path))
    }
}

impl Open {
    /// Writes events with one system call, so that TensorBoard, which may be reading, sees whole records.
    fn write(&mut self, events: &[Event]) -> Result<()> {
        let mut bytes = Vec::new();
        for event in events {
            record::frame(event.bytes(), &mut bytes);
        }
        self.file.write_all(&bytes).map_err(TrackError::file("cannot write", &self.path))
    }
}

/// Creates a file with a new name. TensorBoard reads a folder's files in the order of their names, so the time comes
/// first.
fn create(folder: &Path, began: SystemTime) -> Result<(File, PathBuf)> {
    let seconds = since_1970(began).as_secs();
    let process = std::process::id();
    for number in 0.. {
        let path =
            folder.join(format!("events.out.tfevents.{seconds:010}.brigade.{process}.{number}"));
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(file) => return Ok((file, path)),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(TrackError::file("cannot write", &path)(error)),
        }
    }
    Err(TrackError::file("cannot write", folder)(std::io::ErrorKind::AlreadyExists.into()))
}

const NAME: &str = "tensorboard";
