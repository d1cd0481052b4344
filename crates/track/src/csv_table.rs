//! Tracker that writes one CSV file, to which columns can be added during the run.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use csv::{ReaderBuilder, StringRecord, WriterBuilder};

use crate::files::{append, write_image};
use crate::opened::Opened;
use crate::{Image, Outcome, Result, Run, Stamp, Table, TrackError, Tracker, Value};

/// Writes `FOLDER/PROJECT.csv`, with the columns `_step` and `_time` (seconds since 1970) first, then one column per
/// value in the order of first use. A row is passed to the operating system before the call returns.
///
/// A new name adds a column: the file is rewritten beside the old one and then replaces it, so no row is lost, whenever
/// the run is killed. That costs a copy of the file; log all names from the start if the file is large. A cell without
/// a value is empty; NaN and the infinities are `NaN`, `inf` and `-inf`. A resumed run appends, after the incomplete
/// last row of a killed run is cut off. A row is one line: line breaks in texts and names are written as `\n` and `\r`.
///
/// Tables are written to files of their own, `FOLDER/PROJECT.tables/NAME-STEP.csv`; images are PNG files in
/// `FOLDER/PROJECT.images`, whose paths are in a column. The run's settings are in `FOLDER/PROJECT.config.csv`.
#[derive(Debug)]
pub struct Csv {
    folder: PathBuf,
    open: Opened<Open>,
}

#[derive(Debug)]
struct Open {
    file: File,
    path: PathBuf,
    /// Path prefix of the files beside the table: the folder and the project's name.
    beside: PathBuf,
    columns: Vec<String>,
    places: HashMap<String, usize>,
}

impl Csv {
    /// Creates a tracker that writes into this folder, which is created at the start of the run.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), open: Opened::none(NAME) }
    }
}

impl Tracker for Csv {
    fn name(&self) -> &str {
        NAME
    }

    fn start(&mut self, run: &Run) -> Result<()> {
        let name = run.file_name()?;
        fs::create_dir_all(&self.folder)
            .map_err(TrackError::file("cannot make the folder", &self.folder))?;
        let path = self.folder.join(format!("{name}.csv"));
        let beside = self.folder.join(name);
        let file = append(&path)?;
        let mut open = Open { file, path, beside, columns: Vec::new(), places: HashMap::new() };
        open.header()?;
        if !run.config.is_empty() {
            let rows = run.config.flat().into_iter().map(|(name, value)| vec![name, value.text()]);
            write_table(&open.near("config.csv"), &["name", "value"].map(str::to_owned), rows)?;
        }
        self.open.set(open);
        Ok(())
    }

    fn log(&mut self, values: &[(String, Value)], at: Stamp) -> Result<()> {
        if let Some((name, _)) = values.iter().find(|(name, _)| FIRST.contains(&name.as_str())) {
            return Err(TrackError::Reserved { name: name.clone() });
        }
        self.open.get()?.row(values, at)
    }

    fn log_text(&mut self, name: &str, text: &str, at: Stamp) -> Result<()> {
        self.log(&[(name.to_owned(), text.into())], at)
    }

    fn log_image(&mut self, name: &str, image: &Image, at: Stamp) -> Result<()> {
        let file = write_image(&self.open.get()?.near("images"), name, image, at)?;
        self.log(&[(name.to_owned(), file.display().to_string().into())], at)
    }

    fn log_table(&mut self, name: &str, table: &Table, at: Stamp) -> Result<()> {
        let folder = self.open.get()?.near("tables");
        fs::create_dir_all(&folder).map_err(TrackError::file("cannot make the folder", &folder))?;
        let step = at.step.map_or_else(|| format!("{:.6}", at.seconds()), |step| step.to_string());
        let path = folder.join(format!("{}-{step}.csv", name.replace(['/', '\\'], "_")));
        let rows = table.rows().iter().map(|row| row.iter().map(Value::text).collect());
        write_table(&path, table.columns(), rows)
    }

    fn finish(&mut self, _: Outcome) -> Result<()> {
        let open = self.open.take()?;
        open.file.sync_all().map_err(TrackError::file("cannot write", &open.path))
    }
}

impl Open {
    /// Reads the columns of a resumed run, or writes the first two columns of a new one.
    fn header(&mut self) -> Result<()> {
        let mut reader = ReaderBuilder::new()
            .from_path(&self.path)
            .map_err(|error| in_csv("cannot read", &self.path, error))?;
        let found = reader.headers().map_err(|error| in_csv("cannot read", &self.path, error))?;
        if found.is_empty() {
            self.name(FIRST.map(str::to_owned).to_vec());
            return self.write(&self.columns.clone());
        }
        if !found.iter().take(2).eq(FIRST) {
            return Err(TrackError::Foreign {
                path: self.path.clone(),
                reason: format!("its first line is {}", found.iter().collect::<Vec<_>>().join(",")),
            });
        }
        let found = found.iter().map(str::to_owned).collect();
        self.name(found);
        Ok(())
    }

    fn row(&mut self, values: &[(String, Value)], at: Stamp) -> Result<()> {
        let values: Vec<(Cow<'_, str>, String)> = values
            .iter()
            .map(|(name, value)| (on_one_line(name), on_one_line(&value.text()).into_owned()))
            .collect();
        let mut columns = self.columns.clone();
        for (name, _) in &values {
            if !self.places.contains_key(&**name) && !columns.iter().any(|known| known == name) {
                columns.push(name.clone().into_owned());
            }
        }
        if columns.len() > self.columns.len() {
            self.widen(columns)?;
        }
        let mut cells = vec![String::new(); self.columns.len()];
        cells[0] = at.step.map_or_else(String::new, |step| step.to_string());
        cells[1] = at.seconds().to_string();
        for (name, value) in values {
            cells[self.places[&*name]] = value;
        }
        self.write(&cells)
    }

    /// Adds columns: copies the rows to a new file, which then replaces the old one.
    fn widen(&mut self, columns: Vec<String>) -> Result<()> {
        let beside = self.near("csv.new");
        let failed = |error| in_csv("cannot write", &beside, error);
        let mut reader = ReaderBuilder::new()
            .has_headers(false)
            .flexible(true)
            .from_path(&self.path)
            .map_err(|error| in_csv("cannot read", &self.path, error))?;
        let mut writer = WriterBuilder::new().from_path(&beside).map_err(failed)?;
        let mut row = StringRecord::new();
        writer.write_record(&columns).map_err(failed)?;
        let mut header = true;
        while reader
            .read_record(&mut row)
            .map_err(|error| in_csv("cannot read", &self.path, error))?
        {
            if std::mem::take(&mut header) {
                continue;
            }
            let blank = std::iter::repeat_n("", columns.len().saturating_sub(row.len()));
            writer.write_record(row.iter().chain(blank)).map_err(failed)?;
        }
        let file = writer.into_inner().map_err(|error| {
            TrackError::file("cannot write", &beside)(std::io::Error::other(error.to_string()))
        })?;
        file.sync_all().map_err(TrackError::file("cannot write", &beside))?;
        fs::rename(&beside, &self.path).map_err(TrackError::file("cannot replace", &self.path))?;
        self.file = append(&self.path)?;
        self.name(columns);
        Ok(())
    }

    fn name(&mut self, columns: Vec<String>) {
        self.places = columns.iter().cloned().zip(0..).collect();
        self.columns = columns;
    }

    /// Writes a row with one system call, so that a killed run leaves only whole rows.
    fn write(&mut self, cells: &[String]) -> Result<()> {
        let mut writer = WriterBuilder::new().from_writer(Vec::new());
        writer.write_record(cells).map_err(|error| in_csv("cannot write", &self.path, error))?;
        let row = writer.into_inner().map_err(|error| {
            TrackError::file("cannot write", &self.path)(std::io::Error::other(error.to_string()))
        })?;
        self.file.write_all(&row).map_err(TrackError::file("cannot write", &self.path))
    }

    fn near(&self, ending: &str) -> PathBuf {
        let mut path = self.beside.clone().into_os_string();
        path.push(".");
        path.push(ending);
        path.into()
    }
}

/// Escapes line breaks. An incomplete row is cut off at the last line break, so a row may contain no other.
fn on_one_line(text: &str) -> Cow<'_, str> {
    if text.contains(['\n', '\r']) {
        text.replace('\n', "\\n").replace('\r', "\\r").into()
    } else {
        text.into()
    }
}

fn write_table(
    path: &Path,
    columns: &[String],
    rows: impl Iterator<Item = Vec<String>>,
) -> Result<()> {
    let failed = |error| in_csv("cannot write", path, error);
    let mut writer = WriterBuilder::new().from_path(path).map_err(failed)?;
    writer.write_record(columns).map_err(failed)?;
    for row in rows {
        writer.write_record(row).map_err(failed)?;
    }
    writer.flush().map_err(TrackError::file("cannot write", path))
}

fn in_csv(action: &'static str, path: &Path, error: csv::Error) -> TrackError {
    let reason = error.to_string();
    match error.into_kind() {
        csv::ErrorKind::Io(source) => TrackError::file(action, path)(source),
        _ => TrackError::Foreign { path: path.to_owned(), reason },
    }
}

const NAME: &str = "csv";
const FIRST: [&str; 2] = ["_step", "_time"];
