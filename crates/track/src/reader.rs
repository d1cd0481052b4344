//! Reads runs that [`JsonLines`](crate::JsonLines) writes, while they grow and afterwards.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use indexmap::IndexMap;
use serde::Deserialize;

use crate::{Config, Outcome, Result, Table, TrackError, Value};

/// Follows a run's file: each [`poll`](RunReader::poll) returns the new lines.
///
/// The file may grow, be truncated, or be replaced by another one at the same path. A line counts once its line break
/// is written. Any file with one JSON object per line can be read, whichever program wrote it; any other line becomes
/// [`Line::Broken`], and is not an error.
///
/// ```
/// use brigade_track::reader::{Line, Logged, RunReader};
/// use brigade_track::{JsonLines, Run, Stamp, Tracker, Value};
///
/// let folder = std::env::temp_dir().join(format!("brigade-reader-{}", std::process::id()));
/// let mut tracker = JsonLines::new(&folder);
/// tracker.start(&Run::new("demo"))?;
/// let mut reader = RunReader::open(folder.join("demo.jsonl"))?;
/// assert!(matches!(reader.poll()?.lines[0].content, Line::Start { .. }));
///
/// tracker.log(&[("loss".to_owned(), Value::from(0.5))], Stamp::step(1))?;
/// let update = reader.poll()?;
/// let Line::Values { step, values, .. } = &update.lines[0].content else { panic!("{update:?}") };
/// assert_eq!(*step, Some(1));
/// assert_eq!(values["loss"], Logged::Value(Value::Float(0.5)));
/// assert!(reader.poll()?.lines.is_empty());
/// # std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), brigade_track::TrackError>(())
/// ```
#[derive(Debug)]
pub struct RunReader {
    path: PathBuf,
    /// Offset behind the lines that were returned.
    consumed: u64,
    /// Last bytes before that offset, by which a replaced file is detected.
    tail: Vec<u8>,
    lines: u64,
    /// `true` if the next bytes belong to a line that is too long, and was returned as broken.
    in_long_line: bool,
}

/// Result of [`RunReader::poll`].
#[derive(Debug, Clone, PartialEq, Default)]
#[non_exhaustive]
pub struct Update {
    /// `true` if the file does not continue what was read before: the lines of earlier updates are no longer valid, and
    /// `lines` begin with the first line of the file.
    pub replaced: bool,
    /// New lines, without empty ones.
    pub lines: Vec<RunLine>,
    /// `true` if more data may be available at once: a poll reads only some megabytes.
    pub more: bool,
    /// Bytes behind the last line break: a line that is being written, or the incomplete line of a killed run.
    /// [`Line::parse`] reads them where a whole line is expected.
    pub unfinished: Vec<u8>,
}

/// Line of a run's file, with its number.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct RunLine {
    /// Line number in the file, from 1.
    pub number: u64,
    /// Parsed content of the line.
    pub content: Line,
}

/// Content of a line of a run's file.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Line {
    /// Start of a run, or of its continuation.
    Start {
        /// Time in seconds since 1970.
        time: Option<f64>,
        /// Name of the project.
        project: Option<String>,
        /// Settings of the run; empty where the line has none that can be read.
        config: Config,
    },
    /// End of a run.
    End {
        /// Time in seconds since 1970.
        time: Option<f64>,
        /// Outcome of the run.
        outcome: Outcome,
    },
    /// Values, texts and tables by name, in the order of the line.
    Values {
        /// Training step, if the line has one.
        step: Option<u64>,
        /// Time in seconds since 1970.
        time: Option<f64>,
        /// Logged values by name.
        values: IndexMap<String, Logged>,
    },
    /// A line that is not a JSON object, is too long, or has an unknown event.
    Broken {
        /// Reason why the line cannot be read.
        reason: String,
    },
}

/// Value that was logged under a name.
#[derive(Debug, Clone, PartialEq)]
pub enum Logged {
    /// A number, a Boolean or a text. The strings `NaN`, `Infinity` and `-Infinity` become numbers; an image is the
    /// path of its file as a text.
    Value(Value),
    /// A table of values.
    Table(Table),
    /// Other JSON, as its text: null, a list or an object.
    Json(String),
}

impl Logged {
    /// Returns the value as a number, with `true` as 1 and `false` as 0; `None` if it is not a number.
    #[must_use]
    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Value(value) => value.number(),
            Self::Table(_) | Self::Json(_) => None,
        }
    }
}

impl RunReader {
    /// Opens a run's file. [`poll`](RunReader::poll) reads it.
    ///
    /// # Errors
    /// [`TrackError::File`] when the file does not exist or cannot be read, or is a folder.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        File::open(&path)
            .and_then(|mut file| file.read(&mut [0]))
            .map_err(TrackError::file("cannot read the run", &path))?;
        Ok(Self { path, consumed: 0, tail: Vec::new(), lines: 0, in_long_line: false })
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the lines that were written since the last call, at most about 8 MB of them. [`Update::more`] is set if
    /// there may be more.
    ///
    /// # Errors
    /// [`TrackError::File`] when the file does not exist any more or cannot be read. A later call may succeed, and
    /// continues at the same offset.
    pub fn poll(&mut self) -> Result<Update> {
        let mut update = Update::default();
        let bytes =
            self.read(&mut update).map_err(TrackError::file("cannot read the run", &self.path))?;
        let end = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        let (whole, rest) = bytes.split_at(end);
        for line in whole.split_inclusive(|&byte| byte == b'\n') {
            self.lines += 1;
            let is_rest = std::mem::take(&mut self.in_long_line);
            if !is_rest && !line.trim_ascii().is_empty() {
                update.lines.push(RunLine { number: self.lines, content: Line::parse(line) });
            }
        }
        self.consumed += end as u64;
        if rest.len() as u64 >= LONGEST_LINE {
            if !std::mem::replace(&mut self.in_long_line, true) {
                let reason = format!("it is longer than {LONGEST_LINE} bytes");
                let content = Line::Broken { reason };
                update.lines.push(RunLine { number: self.lines + 1, content });
            }
            self.consumed += rest.len() as u64;
            self.keep_tail(rest);
            update.more = true;
        } else {
            self.keep_tail(whole);
            update.unfinished = rest.to_vec();
        }
        Ok(update)
    }

    /// Reads the bytes behind `consumed`, until they contain a line break.
    fn read(&mut self, update: &mut Update) -> std::io::Result<Vec<u8>> {
        let mut file = File::open(&self.path)?;
        let mut before = Vec::new();
        file.seek(SeekFrom::Start(self.consumed - self.tail.len() as u64))?;
        file.by_ref().take(self.tail.len() as u64).read_to_end(&mut before)?;
        if before != self.tail {
            update.replaced = true;
            (self.consumed, self.lines, self.in_long_line) = (0, 0, false);
            self.tail.clear();
            file.seek(SeekFrom::Start(0))?;
        }
        let mut bytes = Vec::new();
        loop {
            let found = file.by_ref().take(AT_ONCE).read_to_end(&mut bytes)? as u64;
            let begin = bytes.len() - found as usize;
            update.more = found == AT_ONCE;
            let has_end = bytes[begin..].contains(&b'\n');
            if has_end || !update.more || bytes.len() as u64 >= LONGEST_LINE {
                return Ok(bytes);
            }
        }
    }

    fn keep_tail(&mut self, bytes: &[u8]) {
        self.tail.extend_from_slice(&bytes[bytes.len().saturating_sub(TAIL)..]);
        self.tail.drain(..self.tail.len().saturating_sub(TAIL));
    }
}

impl Line {
    /// Parses one line, with or without its line break.
    #[must_use]
    pub fn parse(line: &[u8]) -> Self {
        let mut values: IndexMap<String, serde_json::Value> = match serde_json::from_slice(line) {
            Ok(values) => values,
            Err(error) => return Self::Broken { reason: error.to_string() },
        };
        let time = values.shift_remove("_time").and_then(|time| time.as_f64());
        match values.get("_event").map(|event| event.as_str().unwrap_or_default()) {
            Some("start") => {
                let text = |value: serde_json::Value| value.as_str().map(str::to_owned);
                let project = values.shift_remove("_project").and_then(text);
                // Parsed a second time, because serde_json's own tree loses the order of the settings.
                let settings: Option<Settings> = serde_json::from_slice(line).ok();
                let config = settings.map(|settings| settings.config).unwrap_or_default();
                Self::Start { time, project, config }
            }
            Some("finish") => Self::End { time, outcome: Outcome::Finished },
            Some("failed") => Self::End { time, outcome: Outcome::Failed },
            Some(_) => {
                let event = &values["_event"];
                Self::Broken { reason: format!("its event {event} is not start, finish or failed") }
            }
            None => {
                let step = values.shift_remove("_step").as_ref().and_then(whole_number);
                let logged = |(name, value)| (name, Logged::from(value));
                Self::Values { step, time, values: values.into_iter().map(logged).collect() }
            }
        }
    }
}

impl From<serde_json::Value> for Logged {
    fn from(value: serde_json::Value) -> Self {
        use serde_json::Value as Json;
        match value {
            Json::Bool(value) => Self::Value(value.into()),
            Json::Number(value) => Self::Value(number(&value)),
            Json::String(value) => Self::Value(match value.as_str() {
                "NaN" => f64::NAN.into(),
                "Infinity" => f64::INFINITY.into(),
                "-Infinity" => f64::NEG_INFINITY.into(),
                _ => value.into(),
            }),
            Json::Object(ref fields) if fields.len() == 2 => {
                table(fields).map_or_else(|| Self::Json(value.to_string()), Self::Table)
            }
            Json::Null | Json::Array(_) | Json::Object(_) => Self::Json(value.to_string()),
        }
    }
}

/// Finds the file of a run: the path itself if it is a file, or else the `.jsonl` file in that folder
/// that was written last.
///
/// # Errors
/// [`TrackError::File`] when the path does not exist or cannot be read, [`TrackError::NoRun`] for a folder
/// without such a file.
pub fn find_run(path: &Path) -> Result<PathBuf> {
    let failed = || TrackError::file("cannot read the run", path);
    if !fs::metadata(path).map_err(failed())?.is_dir() {
        return Ok(path.to_owned());
    }
    let mut runs = Vec::new();
    for entry in fs::read_dir(path).map_err(failed())? {
        let path = entry.map_err(failed())?.path();
        let is_run = path.extension().is_some_and(|it| it == "jsonl");
        if let Some(facts) = fs::metadata(&path).ok().filter(|it| is_run && it.is_file()) {
            runs.push((facts.modified().ok(), path));
        }
    }
    let latest = runs.into_iter().max();
    latest.map(|(_, path)| path).ok_or_else(|| TrackError::NoRun { folder: path.to_owned() })
}

#[derive(Deserialize)]
struct Settings {
    #[serde(default, rename = "_config")]
    config: Config,
}

fn whole_number(value: &serde_json::Value) -> Option<u64> {
    let float = || value.as_f64().filter(|it| it.fract() == 0.0 && (0.0..9e15).contains(it));
    value.as_u64().or_else(|| float().map(|it| it as u64))
}

fn number(number: &serde_json::Number) -> Value {
    number.as_i64().map_or_else(|| number.as_f64().unwrap_or(f64::NAN).into(), Value::Int)
}

/// Parses a table in the form of [`Table::json`].
fn table(fields: &serde_json::Map<String, serde_json::Value>) -> Option<Table> {
    let columns = fields.get("columns")?.as_array()?.iter().map(|name| name.as_str());
    let columns: Vec<&str> = columns.collect::<Option<_>>()?;
    let cell = |value: &serde_json::Value| match Logged::from(value.clone()) {
        Logged::Value(value) => value,
        Logged::Table(_) | Logged::Json(_) => value.to_string().into(),
    };
    let row = |row: &serde_json::Value| Some(row.as_array()?.iter().map(cell).collect());
    let rows = fields.get("data")?.as_array()?.iter().map(row).collect::<Option<_>>()?;
    Table::new(columns, rows).ok()
}

/// Number of bytes that a poll reads at once.
const AT_ONCE: u64 = 8 << 20;
/// Maximum number of bytes of a line: long tables and texts are legitimate.
const LONGEST_LINE: u64 = 64 << 20;
/// Number of bytes that are compared. Lines contain their times, so two runs differ within fewer.
const TAIL: usize = 256;

#[cfg(test)]
mod tests {
    use std::io::Write;

    use tempfile::tempdir;

    use super::*;
    use crate::{JsonLines, Run, Stamp, Tracker};

    fn values(line: &str) -> Vec<(String, Logged)> {
        match Line::parse(line.as_bytes()) {
            Line::Values { values, .. } => values.into_iter().collect(),
            other => panic!("{line}: {other:?}"),
        }
    }

    fn numbers(update: &Update) -> Vec<u64> {
        update.lines.iter().map(|line| line.number).collect()
    }

    fn append(path: &Path, text: &str) {
        let file = File::options().append(true).create(true).open(path);
        file.unwrap().write_all(text.as_bytes()).unwrap();
    }

    #[test]
    fn what_a_tracker_writes_is_read_back() {
        let folder = tempdir().unwrap();
        let mut tracker = JsonLines::new(folder.path());
        let config = Config::of(&serde_json::json!({ "z": 1, "a": { "lr": 0.1 } })).unwrap();
        tracker.start(&Run::new("p").config(config.clone())).unwrap();
        let logged =
            [("z", Value::from(0.1)), ("a", 3.into()), ("n", f64::NAN.into()), ("t", "x".into())];
        let logged = logged.map(|(name, value)| (name.to_owned(), value));
        tracker.log(&logged, Stamp::step(7)).unwrap();
        let table = Table::new(["a"], vec![vec![1.into()], vec![f64::INFINITY.into()]]).unwrap();
        tracker.log_table("table", &table, Stamp::now()).unwrap();
        tracker.finish(Outcome::Failed).unwrap();

        let mut reader = RunReader::open(find_run(folder.path()).unwrap()).unwrap();
        let lines = reader.poll().unwrap().lines;
        assert_eq!(lines.len(), 4);
        let Line::Start { project, config: found, .. } = &lines[0].content else { panic!() };
        assert_eq!((project.as_deref(), found), (Some("p"), &config));
        let Line::Values { step: Some(7), time: Some(_), values } = &lines[1].content else {
            panic!("{lines:?}")
        };
        let names: Vec<&str> = values.keys().map(String::as_str).collect();
        assert_eq!(names, ["z", "a", "n", "t"]);
        assert_eq!(values["a"], Logged::Value(Value::Int(3)));
        assert!(values["n"].number().is_some_and(f64::is_nan));
        let Line::Values { step: None, values, .. } = &lines[2].content else { panic!() };
        assert_eq!(values["table"], Logged::Table(table));
        assert!(matches!(lines[3].content, Line::End { outcome: Outcome::Failed, .. }));
    }

    #[test]
    fn lines_of_other_programs_are_read_as_far_as_possible() {
        assert_eq!(
            values(r#"{"b":null,"a":[1,2],"c":{"columns":["x"],"data":[[1,2]]}}"#),
            [("b", "null"), ("a", "[1,2]"), ("c", r#"{"columns":["x"],"data":[[1,2]]}"#)]
                .map(|(name, json)| (name.to_owned(), Logged::Json(json.to_owned())))
        );
        for (step, found) in
            [("3", Some(3)), ("3.0", Some(3)), ("-1", None), ("0.5", None), ("\"3\"", None)]
        {
            let line = Line::parse(format!("{{\"_step\":{step},\"_time\":[]}}").as_bytes());
            let Line::Values { step, time, .. } = line else { panic!() };
            assert_eq!((step, time), (found, None));
        }
        let start = Line::parse(br#"{"_event":"start","_project":3,"_time":1}"#);
        let config = Config::default();
        assert_eq!(start, Line::Start { time: Some(1.0), project: None, config });
        for broken in ["", "3", "[]", "{", "{}x", "{\"a\":1e999}", "{\"_event\":\"pause\"}", "\0\0"]
        {
            assert!(matches!(Line::parse(broken.as_bytes()), Line::Broken { .. }), "{broken}");
        }
        assert!(matches!(Line::parse(b"{\"a\":\"\xff\"}"), Line::Broken { .. }));
        let deep = "[".repeat(100_000);
        assert!(matches!(Line::parse(deep.as_bytes()), Line::Broken { .. }));
    }

    #[test]
    fn a_growing_file_gives_each_line_once() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("a.jsonl");
        append(&path, "");
        let mut reader = RunReader::open(&path).unwrap();
        assert_eq!(reader.poll().unwrap(), Update::default());
        append(&path, "{\"a\":1}\n\n{\"a\":");
        let update = reader.poll().unwrap();
        assert_eq!((numbers(&update), update.unfinished.as_slice()), (vec![1], &b"{\"a\":"[..]));
        append(&path, "2}\r\n{\"a\":3}\n");
        let update = reader.poll().unwrap();
        assert_eq!(numbers(&update), [3, 4]);
        assert!(!update.replaced && update.unfinished.is_empty());

        // As JsonLines does when a run continues: it removes the incomplete line, and appends others.
        append(&path, "{\"half");
        assert!(reader.poll().unwrap().lines.is_empty());
        let length = fs::metadata(&path).unwrap().len();
        File::options().write(true).open(&path).unwrap().set_len(length - 6).unwrap();
        append(&path, "{\"b\":4}\n{\"b\":5}\n");
        let update = reader.poll().unwrap();
        assert_eq!((numbers(&update), update.replaced), (vec![5, 6], false));
    }

    #[test]
    fn a_file_that_is_cut_or_replaced_begins_anew() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("a.jsonl");
        append(&path, "{\"a\":1}\n{\"a\":2}\n");
        let mut reader = RunReader::open(&path).unwrap();
        assert_eq!(numbers(&reader.poll().unwrap()), [1, 2]);
        // Longer than what was read, so that the length alone does not reveal the change.
        for text in ["{\"a\":9}\n", "", "{\"b\":\"other\"}\n{\"c\":\"and longer\"}\n"] {
            let other = folder.path().join("other");
            append(&other, text);
            fs::rename(&other, &path).unwrap();
            let update = reader.poll().unwrap();
            // Nothing was consumed of an empty file, so that what follows it is a continuation.
            assert_eq!(update.replaced, !text.contains("other"), "{text}");
            assert_eq!(update.lines.len(), text.lines().count());
        }
        fs::remove_file(&path).unwrap();
        assert!(reader.poll().unwrap_err().to_string().contains("a.jsonl"));
        append(&path, "{\"d\":1}\n");
        assert!(reader.poll().unwrap().replaced);
    }

    #[test]
    fn much_is_read_in_pieces_and_a_line_that_is_too_long_is_left_out() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("a.jsonl");
        let line = format!("{{\"t\":\"{}\"}}\n", "x".repeat(3 << 20));
        append(&path, &line.repeat(7));
        let mut reader = RunReader::open(&path).unwrap();
        let mut found = Vec::new();
        loop {
            let update = reader.poll().unwrap();
            assert!(update.lines.len() < 4 && !update.replaced);
            found.extend(numbers(&update));
            if !update.more {
                break;
            }
        }
        assert_eq!(found, [1, 2, 3, 4, 5, 6, 7]);

        // A file of holes: it has a length and no content.
        append(&path, "{\"a\":1}\n");
        let length = fs::metadata(&path).unwrap().len();
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(length + 2 * LONGEST_LINE + 5).unwrap();
        append(&path, "\n{\"a\":1}\n");
        let mut lines = Vec::new();
        loop {
            let update = reader.poll().unwrap();
            lines.extend(update.lines);
            if !update.more {
                break;
            }
        }
        let found: Vec<_> = lines
            .iter()
            .map(|line| (line.number, matches!(line.content, Line::Broken { .. })))
            .collect();
        assert_eq!(found, [(8, false), (9, true), (10, false)]);
    }

    #[test]
    fn the_newest_run_of_a_folder_is_found() {
        let folder = tempdir().unwrap();
        let error = find_run(folder.path()).unwrap_err();
        assert!(matches!(error, TrackError::NoRun { .. }), "{error}");
        let gone = folder.path().join("gone.jsonl");
        assert!(find_run(&gone).is_err() && RunReader::open(&gone).is_err());
        assert!(RunReader::open(folder.path()).is_err());
        for (name, age) in [("old.jsonl", 20), ("new.jsonl", 10), ("other.csv", 0)] {
            let path = folder.path().join(name);
            append(&path, "");
            let time = std::time::SystemTime::now() - std::time::Duration::from_secs(age);
            File::options().write(true).open(&path).unwrap().set_modified(time).unwrap();
        }
        assert_eq!(find_run(folder.path()).unwrap(), folder.path().join("new.jsonl"));
        assert_eq!(
            find_run(&gone.with_file_name("other.csv")).unwrap().file_name().unwrap(),
            "other.csv"
        );
    }
}
