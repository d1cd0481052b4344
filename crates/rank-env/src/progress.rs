//! Progress reports of a rank to its launcher, which shows one line for all ranks.
//!
//! A launcher that shows progress gives each rank a pipe, by its number in [`env::BRIGADE_PROGRESS_FD`]. A rank writes
//! [`ProgressReport`]s into it, one JSON object a line, of at most [`MAX_REPORT_LEN`] bytes, which the system writes in
//! one piece. Reports may be lost, and a rank never waits for a launcher that does not read.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use crate::env;
use crate::text::printable_within;

/// Maximum length of a report in bytes, with its line end: a pipe takes that much in one piece.
pub const MAX_REPORT_LEN: usize = 4096;

/// Progress of a rank in a loop.
///
/// ```
/// use brigade_rank_env::ProgressReport;
/// let report = ProgressReport {
///     label: "epoch 3".into(), position: 120, length: Some(938), rate: 12.5, ..Default::default()
/// };
/// assert_eq!(ProgressReport::decode(&report.encode()), Some(report));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProgressReport {
    /// Label of the loop, such as `epoch 3`.
    pub label: String,
    /// Number of completed iterations.
    pub position: u64,
    /// Total number of iterations, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub length: Option<u64>,
    /// Recent iterations per second. 0 while the rate is not known.
    pub rate: f64,
    /// Throughput per second and its unit, where the unit is not iterations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub throughput: Option<(f64, String)>,
    /// Further values to show, by name, such as `loss`, `0.532`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub values: Vec<(String, String)>,
    /// `true` once the loop has ended.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub done: bool,
}

impl ProgressReport {
    /// Encodes the report as a line, with its line end. Text that exceeds [`MAX_REPORT_LEN`] is cut.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        // Numbers and texts always are JSON. Within these limits it is never too long.
        let mut line = serde_json::to_vec(&self.clone().within_limits()).unwrap_or_default();
        line.push(b'\n');
        line
    }

    /// Decodes a line. Returns `None` if it is not a report. Control characters are left out, and text that is too long
    /// is cut, because the line may come from any process.
    #[must_use]
    pub fn decode(line: &[u8]) -> Option<Self> {
        // serde would take a list for an object, too.
        if line.len() > MAX_REPORT_LEN || line.trim_ascii_start().first() != Some(&b'{') {
            return None;
        }
        serde_json::from_slice(line).ok().map(Self::within_limits)
    }

    /// Parses a progress bar as Python's tqdm writes it. Returns `None` if the text is not such a bar.
    ///
    /// ```
    /// use brigade_rank_env::ProgressReport;
    /// let bar = "train:  13%|█▎        | 120/938 [00:10<01:05, 12.50it/s, loss=0.532]";
    /// let report = ProgressReport::from_tqdm(bar).unwrap();
    /// assert_eq!((report.label.as_str(), report.position, report.length), ("train", 120, Some(938)));
    /// assert_eq!((report.rate, &report.values[0].1[..]), (12.5, "0.532"));
    /// assert_eq!(ProgressReport::from_tqdm("50% of it"), None);
    /// ```
    #[must_use]
    pub fn from_tqdm(text: &str) -> Option<Self> {
        let text = text.trim();
        if text.len() > MAX_REPORT_LEN {
            return None;
        }
        // `label: 13%|bar| 120/938 [00:10<01:05, 12.50it/s, loss=0.532]`, or without a length
        // `label: 120it [00:10, 12.50it/s]`.
        let (counts, times) = text.strip_suffix(']')?.rsplit_once('[')?;
        let (label, counts) = match counts.find("%|") {
            Some(percent) => {
                let label = counts[..percent].trim_end_matches(|it: char| it.is_ascii_digit());
                (label, counts.rsplit_once('|')?.1)
            }
            None => counts.trim_end().rsplit_once(' ').unwrap_or(("", counts)),
        };
        let (position, length) = match counts.trim().split_once('/') {
            Some((position, length)) => (scaled(position)?, Some(scaled(length)?)),
            None => (scaled(counts.trim().strip_suffix("it")?)?, None),
        };
        let mut parts = times.split(", ");
        // The first part is the elapsed time.
        parts.next()?.starts_with(|it: char| it.is_ascii_digit()).then_some(())?;
        let rate = parts.next().map_or(0.0, |rate| {
            let number = |text: &str| text.trim().parse::<f64>().ok().filter(|rate| *rate > 0.0);
            match rate.split_once('/') {
                Some((seconds, unit)) if unit != "s" => {
                    seconds.strip_suffix('s').and_then(number).map_or(0.0, |it| 1.0 / it)
                }
                Some((rate, _)) => {
                    let digits = rate.trim_end_matches(|it: char| it.is_alphabetic());
                    number(digits).unwrap_or(0.0)
                }
                None => 0.0,
            }
        });
        let value = |part: &str| {
            let (name, value) = part.split_once('=')?;
            Some((name.to_owned(), value.to_owned()))
        };
        Some(
            Self {
                label: label.trim().trim_end_matches(':').to_owned(),
                position,
                length,
                rate,
                values: parts.filter_map(value).collect(),
                ..Self::default()
            }
            .within_limits(),
        )
    }

    /// Returns the completed fraction of the loop, from 0 to 1. `None` if its length is not known.
    #[must_use]
    pub fn fraction(&self) -> Option<f64> {
        let length = self.length.filter(|length| *length > 0)?;
        Some((self.position as f64 / length as f64).min(1.0))
    }

    /// Returns the throughput per second and its unit.
    #[must_use]
    pub fn throughput(&self) -> (f64, &str) {
        match &self.throughput {
            Some((rate, unit)) => (*rate, unit),
            None => (self.rate, "it"),
        }
    }

    /// Formats the report for people, as in `epoch 3: 120/938 (13 %), 12.5 it/s, 01:05 left, loss 0.532`.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        if !self.label.is_empty() {
            let _ = write!(text, "{}: ", self.label);
        }
        let _ = match (self.length, self.fraction()) {
            (Some(length), Some(done)) => {
                write!(text, "{}/{length} ({:.0} %)", self.position, 100.0 * done)
            }
            _ => write!(text, "{}", self.position),
        };
        let (rate, unit) = self.throughput();
        if rate > 0.0 {
            let _ = write!(text, ", {} {unit}/s", number(rate));
        }
        if let Some(length) = self.length.filter(|_| self.rate > 0.0) {
            let left = length.saturating_sub(self.position) as f64 / self.rate;
            let _ = write!(text, ", {} left", clock(left));
        }
        for (name, value) in &self.values {
            let _ = write!(text, ", {name} {value}");
        }
        text
    }

    fn within_limits(mut self) -> Self {
        self.label = cut(&self.label, MAX_LABEL_LEN);
        self.values.truncate(MAX_VALUES);
        for (name, value) in &mut self.values {
            (*name, *value) = (cut(name, MAX_VALUE_LEN), cut(value, MAX_VALUE_LEN));
        }
        let sound = |rate: f64| if rate.is_finite() { rate.clamp(0.0, 1e15) } else { 0.0 };
        self.rate = sound(self.rate);
        if let Some((rate, unit)) = &mut self.throughput {
            (*rate, *unit) = (sound(*rate), cut(unit, MAX_VALUE_LEN));
        }
        self
    }
}

/// The rank's end of the pipe for progress reports to its launcher.
#[derive(Debug)]
pub struct ProgressPipe(File);

impl ProgressPipe {
    /// Opens the pipe that the launcher has given this process. Returns `None` if the launcher takes no reports.
    #[must_use]
    pub fn from_env() -> Option<Self> {
        Self::open(std::env::var(env::BRIGADE_PROGRESS_FD).ok()?.trim().parse().ok()?)
    }

    fn open(number: u32) -> Option<Self> {
        // Opened anew, so that it does not block here whatever others do with theirs.
        let path = format!("/proc/self/fd/{number}");
        if !std::fs::metadata(&path).ok()?.file_type().is_fifo() {
            return None;
        }
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        OpenOptions::new().write(true).custom_flags(flags).open(path).ok().map(Self)
    }

    /// Sends a report to the launcher without blocking. A report that does not fit into the pipe is dropped.
    pub fn send(&self, report: &ProgressReport) {
        let _ = (&self.0).write(&report.encode());
    }
}

/// Schedule of plain progress lines, for output without a terminal. A line is due 10 s after the previous one; later in
/// a run the interval is a tenth of the elapsed time, and at most 5 minutes. A day gives some 300 lines.
#[derive(Debug)]
pub struct Pace {
    began: Instant,
    last: Instant,
}

impl Pace {
    /// Creates a schedule that starts at `now`, without any line so far.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { began: now, last: now }
    }

    /// Returns `true` if a line is due. The interval to the next line then starts at `now`.
    pub fn due(&mut self, now: Instant) -> bool {
        let apart = (now.duration_since(self.began) / 10).clamp(SHORTEST, LONGEST);
        let due = now.duration_since(self.last) >= apart;
        if due {
            self.last = now;
        }
        due
    }
}

/// `938`, or tqdm's `1.2k`.
fn scaled(text: &str) -> Option<u64> {
    let text = text.trim();
    let unit = text.chars().last()?;
    let (digits, factor) = match "kMGTPE".find(unit) {
        Some(power) => (&text[..text.len() - 1], 1000_f64.powi(i32::try_from(power).ok()? + 1)),
        None => (text, 1.0),
    };
    let is_number = digits.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    digits.parse::<f64>().ok().filter(|_| is_number).map(|number| (number * factor) as u64)
}

/// Four digits that count, or so.
fn number(number: f64) -> String {
    match number {
        _ if number >= 1e6 => format!("{number:.3e}"),
        _ if number >= 100.0 => format!("{number:.0}"),
        _ if number >= 10.0 => format!("{number:.1}"),
        _ => format!("{number:.2}"),
    }
}

/// `1:02:03`, or `02:03`.
fn clock(seconds: f64) -> String {
    let seconds = seconds.min(1e9) as u64;
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    if hours > 0 {
        format!("{hours}:{minutes:02}:{seconds:02}")
    } else {
        format!("{minutes:02}:{seconds:02}")
    }
}

fn cut(text: &str, longest: usize) -> String {
    printable_within(text, longest)
}

/// Characters; with the escapes of JSON all of them together stay below [`MAX_REPORT_LEN`].
const MAX_LABEL_LEN: usize = 80;
const MAX_VALUE_LEN: usize = 24;
const MAX_VALUES: usize = 8;
const SHORTEST: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn bars_of_tqdm() {
        // text; label, position, length, rate, values
        type Case<'a> = (&'a str, &'a str, u64, Option<u64>, f64, &'a [(&'a str, &'a str)]);
        let table: [Case<'_>; 7] = [
            ("  0%|          | 0/10 [00:00<?, ?it/s]", "", 0, Some(10), 0.0, &[]),
            (
                "epoch 3:  50%|#####     | 5/10 [00:05<00:05,  2.00s/it]",
                "epoch 3",
                5,
                Some(10),
                0.5,
                &[],
            ),
            (
                "100%|██████████| 10/10 [00:01<00:00, 9.80it/s, loss=1.5e-03, acc=0.9]",
                "",
                10,
                Some(10),
                9.8,
                &[("loss", "1.5e-03"), ("acc", "0.9")],
            ),
            (
                "a 5%: 10%|\u{1b}[32m#\u{1b}[0m  | 1.2k/12k [00:01<1:00:00, 120batch/s]",
                "a 5%",
                1200,
                Some(12_000),
                120.0,
                &[],
            ),
            ("7it [00:00, 66.2it/s]", "", 7, None, 66.2, &[]),
            ("read: 7it [00:00, 66.2it/s]", "read", 7, None, 66.2, &[]),
            ("0it [00:00, ?it/s]", "", 0, None, 0.0, &[]),
        ];
        for (text, label, position, length, rate, values) in table {
            let report = ProgressReport::from_tqdm(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!((report.label.as_str(), report.position), (label, position), "{text}");
            assert_eq!(report.length, length, "{text}");
            assert!((report.rate - rate).abs() < 1e-9, "{text}: {}", report.rate);
            let found: Vec<(&str, &str)> =
                report.values.iter().map(|(name, value)| (&name[..], &value[..])).collect();
            assert_eq!(found, values, "{text}");
        }
        for text in
            ["", "]", "[", "[]", "10%|", "%|| [", "a [b]", "50%|#| 1/2", "x/y [0]", "|| 1/2 [a]"]
        {
            assert_eq!(ProgressReport::from_tqdm(text), None, "{text}");
        }
    }

    #[test]
    fn reports_fit_into_a_pipe_whatever_they_say() {
        let text = "\"\u{1b}\\é\n".repeat(1000);
        let report = ProgressReport {
            label: text.clone(),
            position: u64::MAX,
            length: Some(u64::MAX),
            rate: f64::NAN,
            throughput: Some((f64::INFINITY, text.clone())),
            values: vec![(text.clone(), text); 100],
            done: true,
        };
        let line = report.encode();
        assert!(line.len() <= MAX_REPORT_LEN, "{}", line.len());
        let read = ProgressReport::decode(&line).unwrap();
        assert!(!read.text().contains(|it: char| it.is_control()), "{}", read.text());
        assert_eq!((read.rate, read.values.len()), (0.0, MAX_VALUES));
        assert_eq!(ProgressReport::decode(&[b'1'; MAX_REPORT_LEN + 1]), None);
        assert_eq!(ProgressReport::decode(b"[]"), None);
    }

    #[test]
    fn text() {
        let report = ProgressReport {
            label: "train".into(),
            position: 120,
            length: Some(938),
            rate: 2.0,
            ..Default::default()
        };
        assert_eq!(report.text(), "train: 120/938 (13 %), 2.00 it/s, 06:49 left");
        let begun = ProgressReport { position: 1, rate: 0.0, ..report.clone() };
        assert_eq!(begun.text(), "train: 1/938 (0 %)");
        let more = ProgressReport {
            throughput: Some((1234.0, "samples".into())),
            values: vec![("loss".into(), "0.5".into())],
            length: None,
            label: String::new(),
            ..report
        };
        assert_eq!(more.text(), "120, 1234 samples/s, loss 0.5");
    }

    #[test]
    fn a_full_pipe_does_not_block_the_writer() {
        let (reader, writer) = std::io::pipe().unwrap();
        let pipe = ProgressPipe::open(writer.as_raw_fd().cast_unsigned()).unwrap();
        let report = ProgressReport { label: "x".repeat(80), ..Default::default() };
        // More than it holds.
        for _ in 0..2000 {
            pipe.send(&report);
        }
        drop(reader);
        pipe.send(&report);
        assert!(ProgressPipe::open(4000).is_none());
        let file = File::open("/dev/null").unwrap();
        assert!(ProgressPipe::open(file.as_raw_fd().cast_unsigned()).is_none());
    }

    #[test]
    fn lines_come_more_and_more_rarely() {
        let began = Instant::now();
        let mut pace = Pace::new(began);
        let due: Vec<u64> = (0..200_000_u64)
            .filter(|second| pace.due(began + Duration::from_secs(*second)))
            .collect();
        assert_eq!(due[..4], [10, 20, 30, 40]);
        assert!(due.windows(2).all(|pair| (10..=301).contains(&(pair[1] - pair[0]))));
        assert_eq!(due[due.len() - 1] - due[due.len() - 2], 300);
        assert!(due.len() < 720, "{}", due.len());
    }
}
