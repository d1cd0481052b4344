//! Content of a run's file.

use std::path::{Path, PathBuf};

use brigade_track::reader::{Line, Logged, RunReader};
use brigade_track::{Config, Outcome, Result, Table, Value};
use indexmap::IndexMap;

use super::epochs::Epochs;

/// Content of a run's file, sorted for the page.
#[derive(Debug, Default)]
pub(super) struct Record {
    pub(super) path: PathBuf,
    pub(super) starts: Vec<Start>,
    pub(super) ends: Vec<End>,
    /// `true` if the run's last start has no end yet.
    pub(super) is_open: bool,
    /// Times of the first and of the last line.
    pub(super) times: Option<(f64, f64)>,
    pub(super) last_step: Option<u64>,
    /// Number of lines with values.
    pub(super) lines: u64,
    /// Logged numbers by name.
    pub(super) series: IndexMap<String, Series>,
    /// Numbers of lines with an epoch. The end of the file decides if there is one such line per epoch.
    by_epoch: IndexMap<String, Series>,
    /// Number of lines with an epoch.
    epoch_lines: usize,
    pub(super) epochs: Epochs,
    /// Last table of each name, and the number of tables.
    pub(super) tables: IndexMap<String, Repeated<Table>>,
    /// Last text of each name.
    pub(super) texts: IndexMap<String, Repeated<String>>,
    /// File names of images by name, in the folder beside the run's file.
    pub(super) pictures: IndexMap<String, Vec<(Option<u64>, String)>>,
    /// First lines that could not be read, with the reasons.
    pub(super) broken: Vec<(u64, String)>,
    pub(super) broken_count: u64,
    /// `true` if the last line is incomplete and cannot be read.
    pub(super) is_cut: bool,
    /// Number of values whose names exceed the page's limit.
    pub(super) left_out: u64,
}

/// Start of a run, or of its continuation.
#[derive(Debug)]
pub(super) struct Start {
    pub(super) time: Option<f64>,
    pub(super) project: Option<String>,
    pub(super) config: Config,
    /// First step after the start.
    pub(super) step: Option<u64>,
}

/// End of a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct End {
    pub(super) time: Option<f64>,
    pub(super) outcome: Outcome,
}

/// Numbers of one name.
#[derive(Debug, Default)]
pub(super) struct Series {
    /// Steps and values. A point that is not finite marks a new start of the run.
    pub(super) points: Vec<(f64, f64)>,
    /// `true` if each value had a step; otherwise they are counted from 1.
    pub(super) has_steps: bool,
    start: usize,
}

/// Value that was logged under one name more than once.
#[derive(Debug)]
pub(super) struct Repeated<T> {
    pub(super) count: u64,
    pub(super) step: Option<u64>,
    pub(super) last: T,
}

impl Record {
    /// Reads the file's current content.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let mut reader = RunReader::open(path)?;
        loop {
            let mut record = Self { path: path.to_owned(), ..Self::default() };
            if let Some(unfinished) = record.read_all(&mut reader)? {
                record.end(&unfinished);
                return Ok(record);
            }
        }
    }

    /// Returns the bytes after the last line, or `None` if the file was replaced in the meantime.
    fn read_all(&mut self, reader: &mut RunReader) -> Result<Option<Vec<u8>>> {
        let mut first = true;
        loop {
            let update = reader.poll()?;
            if update.replaced && !first {
                // The new file begins with the lines of this update.
                *reader = RunReader::open(reader.path().to_owned())?;
                return Ok(None);
            }
            first = false;
            for line in &update.lines {
                self.add(line.number, &line.content);
            }
            if !update.more {
                return Ok(Some(update.unfinished));
            }
        }
    }

    /// A last line without a line break counts if it is complete: other programs may leave it so.
    fn end(&mut self, unfinished: &[u8]) {
        if !unfinished.trim_ascii().is_empty() {
            match Line::parse(unfinished) {
                Line::Broken { .. } => self.is_cut = true,
                line => self.add(0, &line),
            }
        }
        // If the run logs the epoch at each step, its values are curves over the steps.
        if self.epoch_lines > STEPS_OF_EPOCH * self.epochs.len() {
            for (name, series) in std::mem::take(&mut self.by_epoch) {
                let place = self.series.entry(name).or_default();
                place.has_steps |= series.has_steps;
                place.points.extend(series.points);
            }
        }
    }

    /// Returns `true` if no line could be read.
    pub(super) fn is_empty(&self) -> bool {
        self.lines == 0 && self.starts.is_empty() && self.ends.is_empty()
    }

    /// Returns the name of the run's project, or that of its file.
    pub(super) fn project(&self) -> String {
        let named = self.starts.iter().rev().find_map(|start| start.project.clone());
        let file = || self.path.file_stem().map(|it| it.to_string_lossy().into_owned());
        named.or_else(file).unwrap_or_default()
    }

    fn add(&mut self, number: u64, line: &Line) {
        match line {
            Line::Start { time, project, config } => {
                self.saw(*time);
                let (project, config) = (project.clone(), config.clone());
                self.starts.push(Start { time: *time, project, config, step: None });
                self.is_open = true;
            }
            Line::End { time, outcome } => {
                self.saw(*time);
                self.ends.push(End { time: *time, outcome: *outcome });
                self.is_open = false;
            }
            Line::Values { step, time, values } => {
                self.saw(*time);
                self.log(*step, values);
            }
            Line::Broken { reason } => {
                self.broken_count += 1;
                if self.broken.len() < MOST_BROKEN {
                    self.broken.push((number, reason.clone()));
                }
            }
            // Kinds of lines of later versions.
            _ => {}
        }
    }

    fn saw(&mut self, time: Option<f64>) {
        if let Some(time) = time.filter(|it| it.is_finite()) {
            let (first, _) = *self.times.get_or_insert((time, time));
            self.times = Some((first, time));
        }
    }

    fn log(&mut self, step: Option<u64>, values: &IndexMap<String, Logged>) {
        self.lines += 1;
        if let Some(step) = step {
            self.last_step = Some(step);
            if let Some(start) = self.starts.last_mut() {
                start.step.get_or_insert(step);
            }
        }
        let epoch = values.get("epoch").and_then(Logged::number);
        let epoch = epoch.filter(|epoch| epoch.is_finite() && epoch.fract() == 0.0);
        if let Some(epoch) = epoch {
            self.epoch_lines += 1;
            self.epochs.log(epoch, step, values);
        }
        for (name, logged) in values {
            match logged {
                Logged::Value(Value::Text(text)) => match picture(text) {
                    Some(file) => {
                        if let Some(files) = entry(&mut self.pictures, name, &mut self.left_out) {
                            files.push((step, file));
                        }
                    }
                    None => keep(&mut self.texts, name, text.clone(), step, &mut self.left_out),
                },
                Logged::Json(text) => {
                    keep(&mut self.texts, name, text.clone(), step, &mut self.left_out);
                }
                Logged::Table(table) => {
                    keep(&mut self.tables, name, table.clone(), step, &mut self.left_out);
                }
                Logged::Value(value) => {
                    let value = value.number().unwrap_or(f64::NAN);
                    let start = self.starts.len();
                    let all = if epoch.is_some() { &mut self.by_epoch } else { &mut self.series };
                    if (epoch.is_none() || name != "epoch")
                        && let Some(series) = entry(all, name, &mut self.left_out)
                    {
                        series.add(step, value, start);
                    }
                }
            }
        }
    }
}

impl Series {
    fn add(&mut self, step: Option<u64>, value: f64, start: usize) {
        if self.points.is_empty() {
            self.has_steps = step.is_some();
        } else if self.start != start {
            self.points.push((f64::NAN, f64::NAN));
        }
        self.start = start;
        let next = self.points.len() as f64 + 1.0;
        self.points.push((step.map_or(next, |step| step as f64), value));
    }
}

/// Returns the entry of this name, unless there are too many names.
fn entry<'a, T: Default>(
    all: &'a mut IndexMap<String, T>,
    name: &str,
    left_out: &mut u64,
) -> Option<&'a mut T> {
    if !all.contains_key(name) {
        if all.len() >= MOST_NAMES {
            *left_out += 1;
            return None;
        }
        all.insert(name.to_owned(), T::default());
    }
    all.get_mut(name)
}

fn keep<T>(
    all: &mut IndexMap<String, Repeated<T>>,
    name: &str,
    last: T,
    step: Option<u64>,
    left_out: &mut u64,
) {
    if let Some(place) = all.get_mut(name) {
        *place = Repeated { count: place.count + 1, step, last };
    } else if all.len() < MOST_NAMES {
        all.insert(name.to_owned(), Repeated { count: 1, step, last });
    } else {
        *left_out += 1;
    }
}

/// Returns the file name of an image, if a text is the path of one. The folder in the path does not matter: images are
/// in the folder beside the run's file.
fn picture(text: &str) -> Option<String> {
    let file = Path::new(text).file_name()?.to_str()?;
    (text.ends_with(".png") && text.len() > ".png".len()).then(|| file.to_owned())
}

/// Maximum number of names of one kind on a page.
const MOST_NAMES: usize = 300;
const MOST_BROKEN: usize = 10;
/// Number of lines per epoch above which they are treated as steps.
const STEPS_OF_EPOCH: usize = 3;
