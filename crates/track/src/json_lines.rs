//! Tracker that writes one line of JSON per call: the default.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;

use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::files::{append, write_image};
use crate::opened::Opened;
use crate::run::seconds;
use crate::{Config, Image, Outcome, Result, Run, Stamp, Table, TrackError, Tracker, Value};

/// Writes one line of JSON per call to `FOLDER/PROJECT.jsonl`.
///
/// A line has the values under their names, in their order, with the step as `_step` and the time in
/// seconds since 1970 as `_time`:
///
/// ```json
/// {"_step":10,"_time":1763757346.25,"loss":0.5,"lr":0.01}
/// ```
///
/// A run begins with a line `{"_event":"start","_time":…,"_project":…,"_config":{…}}` and ends with one whose event is
/// `"finish"`, or `"failed"`. A resumed run appends to the file, after the incomplete last line of a killed run is cut
/// off. A non-finite number becomes a string, as JSON has none: `"NaN"`, `"Infinity"`, `"-Infinity"`. Each line is
/// passed to the operating system before the call returns.
///
/// Texts and tables are lines; images are PNG files in `FOLDER/PROJECT.images`, and a line holds the path.
#[derive(Debug)]
pub struct JsonLines {
    folder: PathBuf,
    open: Opened<Open>,
}

#[derive(Debug)]
struct Open {
    file: File,
    path: PathBuf,
    images: PathBuf,
}

impl JsonLines {
    /// Creates a tracker that writes into this folder, which is created at the start of the run.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), open: Opened::none(NAME) }
    }
}

impl Tracker for JsonLines {
    fn name(&self) -> &str {
        NAME
    }

    fn start(&mut self, run: &Run) -> Result<()> {
        let name = run.file_name()?;
        let path = self.folder.join(format!("{name}.jsonl"));
        let images = self.folder.join(format!("{name}.images"));
        fs::create_dir_all(&self.folder)
            .map_err(TrackError::file("cannot make the folder", &self.folder))?;
        let file = append(&path)?;
        let mut open = Open { file, path, images };
        open.write(&Start {
            began: seconds(run.began),
            project: &run.project,
            config: &run.config,
        })?;
        self.open.set(open);
        Ok(())
    }

    fn log(&mut self, values: &[(String, Value)], at: Stamp) -> Result<()> {
        if let Some((name, _)) = values.iter().find(|(name, _)| RESERVED.contains(&name.as_str())) {
            return Err(TrackError::Reserved { name: name.clone() });
        }
        self.open.get()?.write(&Line { values, at })
    }

    fn log_text(&mut self, name: &str, text: &str, at: Stamp) -> Result<()> {
        self.log(&[(name.to_owned(), text.into())], at)
    }

    fn log_image(&mut self, name: &str, image: &Image, at: Stamp) -> Result<()> {
        let open = self.open.get()?;
        let file = write_image(&open.images, name, image, at)?;
        self.log(&[(name.to_owned(), file.display().to_string().into())], at)
    }

    fn log_table(&mut self, name: &str, table: &Table, at: Stamp) -> Result<()> {
        let table = table.json();
        self.open.get()?.write(&TableLine { name, table: &table, at })
    }

    fn finish(&mut self, outcome: Outcome) -> Result<()> {
        let mut open = self.open.take()?;
        open.write(&serde_json::json!({
            "_event": match outcome { Outcome::Finished => "finish", Outcome::Failed => "failed" },
            "_time": Stamp::now().seconds(),
        }))?;
        // Here, not at each line: a sync takes milliseconds, and only a crash of the machine needs it.
        open.file.sync_all().map_err(TrackError::file("cannot write", &open.path))
    }
}

impl Open {
    /// Writes a line with one system call, so that a reader never sees an incomplete line.
    fn write(&mut self, line: &impl Serialize) -> Result<()> {
        let mut bytes = serde_json::to_vec(line)
            .map_err(|error| TrackError::Config { reason: error.to_string() })?;
        bytes.push(b'\n');
        self.file.write_all(&bytes).map_err(TrackError::file("cannot write", &self.path))
    }
}

struct Start<'a> {
    began: f64,
    project: &'a str,
    config: &'a Config,
}

impl Serialize for Start<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut line = serializer.serialize_map(None)?;
        line.serialize_entry("_event", "start")?;
        line.serialize_entry("_time", &self.began)?;
        line.serialize_entry("_project", self.project)?;
        if !self.config.is_empty() {
            line.serialize_entry("_config", self.config)?;
        }
        line.end()
    }
}

struct Line<'a> {
    values: &'a [(String, Value)],
    at: Stamp,
}

impl Serialize for Line<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut line = serializer.serialize_map(None)?;
        begin(&mut line, self.at)?;
        for (name, value) in self.values {
            line.serialize_entry(name, &value.json())?;
        }
        line.end()
    }
}

struct TableLine<'a> {
    name: &'a str,
    table: &'a serde_json::Value,
    at: Stamp,
}

impl Serialize for TableLine<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        let mut line = serializer.serialize_map(None)?;
        begin(&mut line, self.at)?;
        line.serialize_entry(self.name, self.table)?;
        line.end()
    }
}

fn begin<M: SerializeMap>(line: &mut M, at: Stamp) -> std::result::Result<(), M::Error> {
    if let Some(step) = at.step {
        line.serialize_entry("_step", &step)?;
    }
    line.serialize_entry("_time", &at.seconds())
}

const NAME: &str = "jsonl";
const RESERVED: [&str; 5] = ["_step", "_time", "_event", "_project", "_config"];
