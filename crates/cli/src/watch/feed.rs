//! Sources of a run's lines: a file that grows, or the standard input. Nothing here blocks.

use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use brigade_rank_env::text::printable;
use brigade_track::TrackError;
use brigade_track::reader::{Line, RunReader, find_run};

use super::model::Model;

/// Lines of one run.
#[derive(Debug)]
pub(super) enum Feed {
    File(RunFile),
    Input(Input),
}

/// Result of a poll.
#[derive(Debug, Default, PartialEq)]
pub(super) struct FeedUpdate {
    /// `true` if there was new content.
    pub(super) is_new: bool,
    /// `true` if more may be available at once.
    pub(super) more: bool,
    /// `true` if the file was replaced.
    pub(super) replaced: bool,
    /// `true` if no line will follow.
    pub(super) ended: bool,
    /// Notice about the file.
    pub(super) notice: Option<String>,
}

impl Feed {
    /// Adds new lines to the model.
    ///
    /// # Errors
    /// Fails if the file cannot be read. A later call may succeed.
    pub(super) fn poll(&mut self, model: &mut Model) -> Result<FeedUpdate, TrackError> {
        match self {
            Self::File(file) => file.poll(model),
            Self::Input(input) => Ok(input.poll(model)),
        }
    }

    /// Returns the run's name, escaped for a terminal.
    pub(super) fn name(&self) -> String {
        match self {
            Self::File(file) => {
                let path = file.path().unwrap_or(&file.asked);
                printable(&path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy())
            }
            Self::Input(_) => "standard input".to_owned(),
        }
    }

    /// Returns the time since the last write.
    pub(super) fn silent(&self) -> Option<Duration> {
        match self {
            Self::File(file) => {
                let written = file.path()?.metadata().ok()?.modified().ok()?;
                // Another host's clock may be ahead.
                Some(SystemTime::now().duration_since(written).unwrap_or_default())
            }
            Self::Input(input) => Some(input.last.elapsed()),
        }
    }
}

/// File by its path, or the newest one of a folder, or one of the folder by its name.
#[derive(Debug)]
pub(super) struct RunFile {
    asked: PathBuf,
    run: Option<String>,
    wait: bool,
    reader: Option<RunReader>,
    /// Line without a line break. It is complete if the program that wrote it has ended.
    unfinished: Vec<u8>,
}

impl RunFile {
    /// Opens the file. With `wait`, a missing run is not an error.
    ///
    /// # Errors
    /// Fails if the run does not exist, or cannot be read.
    pub(super) fn open(path: &Path, run: Option<&str>, wait: bool) -> Result<Self, TrackError> {
        let mut file = Self {
            asked: path.to_owned(),
            run: run.map(str::to_owned),
            wait,
            reader: None,
            unfinished: Vec::new(),
        };
        match file.find() {
            Err(error) if !wait || !is_absent(&error) => Err(error),
            _ => Ok(file),
        }
    }

    fn find(&mut self) -> Result<(), TrackError> {
        let path = match &self.run {
            Some(run) => self.asked.join(format!("{run}.jsonl")),
            None => find_run(&self.asked)?,
        };
        self.reader = Some(RunReader::open(path)?);
        Ok(())
    }

    fn path(&self) -> Option<&Path> {
        self.reader.as_ref().map(RunReader::path)
    }

    fn poll(&mut self, model: &mut Model) -> Result<FeedUpdate, TrackError> {
        if self.reader.is_none() {
            match self.find() {
                Err(error) if self.wait && is_absent(&error) => {
                    let path = printable(&self.asked.to_string_lossy());
                    let notice = Some(format!("waiting for a run in {path}"));
                    return Ok(FeedUpdate { notice, ..FeedUpdate::default() });
                }
                found => found?,
            }
        }
        let Some(reader) = &mut self.reader else { return Ok(FeedUpdate::default()) };
        let update = match reader.poll() {
            Err(error) if self.wait && is_absent(&error) => {
                let notice = Some("the file is gone".to_owned());
                return Ok(FeedUpdate { notice, ..FeedUpdate::default() });
            }
            update => update?,
        };
        if update.replaced {
            *model = Model::default();
        }
        update.lines.iter().for_each(|line| model.apply(&line.content));
        self.unfinished = update.unfinished;
        Ok(FeedUpdate {
            is_new: update.replaced || !update.lines.is_empty(),
            more: update.more,
            replaced: update.replaced,
            ended: false,
            notice: update.more.then(|| "reading".to_owned()),
        })
    }

    /// Adds a complete last line without a line break, to show the file as it is.
    pub(super) fn finish(&mut self, model: &mut Model) {
        let line = Line::parse(&std::mem::take(&mut self.unfinished));
        if !matches!(line, Line::Broken { .. }) {
            model.apply(&line);
        }
    }

    /// Returns the runs of the folder by name, and the index of this one.
    pub(super) fn siblings(&self) -> (Vec<PathBuf>, Option<usize>) {
        let folder = if self.asked.is_dir() { Some(&*self.asked) } else { self.asked.parent() };
        // The parent of `a.jsonl` is the empty path.
        let folder =
            folder.filter(|it| !it.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
        let entries = folder.read_dir().into_iter().flatten().flatten().map(|entry| entry.path());
        let mut runs: Vec<PathBuf> = entries
            .filter(|path| {
                path.extension().is_some_and(|extension| extension == "jsonl") && path.is_file()
            })
            .collect();
        runs.sort_unstable();
        let own = self.path().and_then(Path::file_name);
        let at = runs.iter().position(|run| run.file_name() == own);
        (runs, at)
    }

    /// Switches to another run of the folder. Returns `false` if there is none, or it cannot be read.
    pub(super) fn switch(&mut self, forward: bool) -> bool {
        let (runs, at) = self.siblings();
        if runs.len() < 2 && at.is_some() || runs.is_empty() {
            return false;
        }
        let step = if forward { 1 } else { runs.len() - 1 };
        let to = at.map_or(0, |at| (at + step) % runs.len());
        let Ok(reader) = RunReader::open(&runs[to]) else { return false };
        self.reader = Some(reader);
        self.unfinished.clear();
        true
    }
}

fn is_absent(error: &TrackError) -> bool {
    match error {
        TrackError::NoRun { .. } => true,
        TrackError::File { source, .. } => source.kind() == io::ErrorKind::NotFound,
        _ => false,
    }
}

/// Standard input, which a thread reads.
#[derive(Debug)]
pub(super) struct Input {
    lines: Receiver<Vec<Line>>,
    last: Instant,
    ended: bool,
}

impl Input {
    /// # Errors
    /// Fails if no thread can be started.
    pub(super) fn open(input: impl Read + Send + 'static) -> io::Result<Self> {
        // Bounded: if the screen is too slow, the writer waits.
        let (send, lines) = sync_channel(4);
        thread::Builder::new().name("input".to_owned()).spawn(move || read_lines(input, &send))?;
        Ok(Self { lines, last: Instant::now(), ended: false })
    }

    fn poll(&mut self, model: &mut Model) -> FeedUpdate {
        let mut found = FeedUpdate { ended: self.ended, ..FeedUpdate::default() };
        match self.lines.try_recv() {
            Ok(lines) => {
                self.last = Instant::now();
                lines.iter().for_each(|line| model.apply(line));
                (found.is_new, found.more) = (!lines.is_empty(), true);
            }
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => {
                found.is_new = !self.ended;
                (self.ended, found.ended) = (true, true);
            }
        }
        found.notice = found.ended.then(|| "the input has ended".to_owned());
        found
    }
}

/// Sends lines in batches as they arrive, until the input or the receiver ends.
fn read_lines(input: impl Read, send: &SyncSender<Vec<Line>>) {
    let mut input = BufReader::with_capacity(64 << 10, input);
    let mut lines = Vec::new();
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = input.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line);
        let is_end = !matches!(read, Ok(1..));
        if line.len() as u64 == LONGEST_LINE && !line.ends_with(b"\n") {
            let reason = format!("it is longer than {LONGEST_LINE} bytes");
            lines.push(Line::Broken { reason });
        } else if !line.trim_ascii().is_empty() {
            lines.push(Line::parse(&line));
        }
        // A part of the next line may be in the buffer, and its rest may come late.
        let is_last = !input.buffer().contains(&b'\n');
        if (is_end || is_last || lines.len() >= TOGETHER)
            && send.send(std::mem::take(&mut lines)).is_err()
            || is_end
        {
            return;
        }
    }
}

/// Maximum length of a line of the standard input, in bytes.
const LONGEST_LINE: u64 = 16 << 20;
/// Maximum number of lines in a batch.
const TOGETHER: usize = 1000;

#[cfg(test)]
mod tests;
