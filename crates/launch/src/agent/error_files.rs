//! Error files of failing ranks: reads them, and passes an error on to an outer launcher.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use brigade_rank_env::{ErrorRecord, env};
use brigade_rendezvous::RankFailure;

/// Error that a rank has written.
#[derive(Debug)]
pub(super) struct ErrorFile {
    /// The error, followed by the last lines of its traceback or causes.
    pub(super) text: String,
    /// Age of the file: how long before the end of the process it was written.
    pub(super) age: Duration,
}

impl ErrorFile {
    /// Reads the file. Returns `None` if its content is not an error report.
    pub(super) fn read(path: &Path) -> Option<Self> {
        let error = ErrorRecord::read(path)?;
        let written = fs::metadata(path).and_then(|file| file.modified()).ok()?;
        // If the clock was set back, the age is unknown.
        let age = SystemTime::now().duration_since(written).unwrap_or_default();
        Some(Self { text: text(&error), age })
    }
}

fn text(error: &ErrorRecord) -> String {
    let mut lines = stack(error);
    let cut = lines.len().saturating_sub(SHOWN_LINES);
    lines.drain(..cut);
    lines.insert(0, error.message.trim());
    let mut text = String::new();
    for line in lines {
        text.extend(line.chars().take(MAX_LINE_LEN));
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text.truncate(text.trim_end().len());
    text
}

/// Returns the call stack without the error itself: Python's traceback ends with the error, and the `Debug` text of a
/// Rust error is the error, possibly followed by a stack.
fn stack(error: &ErrorRecord) -> Vec<&str> {
    let message = error.message.trim();
    let callstack = error.callstack.as_deref().unwrap_or_default().trim_end();
    let mut lines: Vec<&str> = callstack.lines().collect();
    if let Some(at) = lines.iter().position(|line| *line == "Stack backtrace:") {
        return lines.split_off(at);
    }
    let first = lines.first().copied().unwrap_or_default().trim();
    if lines.len() == 1 || (!first.is_empty() && message.starts_with(first)) {
        return Vec::new();
    }
    let repeated: Vec<&str> = message.lines().map(str::trim_end).collect();
    let ends = lines.iter().map(|line| line.trim_end()).rev().take(repeated.len());
    if ends.eq(repeated.iter().rev().copied()) {
        lines.truncate(lines.len() - repeated.len());
    }
    lines
}

/// Passes the job's failure on to the launcher that has started this one, if there is one.
///
/// `file` is the failing rank's own file, if it is on this host.
pub(super) fn pass_on(failure: &RankFailure, file: Option<&Path>) {
    let Some(ours) = std::env::var_os(env::TORCHELASTIC_ERROR_FILE).filter(|ours| !ours.is_empty())
    else {
        return;
    };
    let ours = PathBuf::from(ours);
    let mut record = file.and_then(ErrorRecord::read).unwrap_or_else(|| {
        let summary = failure.summary();
        let (message, callstack) = match &failure.error {
            Some(error) => (format!("{summary}: {error}"), None),
            None => (summary, Some(failure.last_lines.join("\n"))),
        };
        ErrorRecord { message, callstack, code: None }
    });
    for fault in &failure.device_faults {
        record.message.push_str(&format!("\n{fault}"));
    }
    // A failed write is ignored: the error is on stderr as well.
    let _ = record.write(&ours);
}

/// Maximum number of shown lines, the same as for a rank's output.
const SHOWN_LINES: usize = 20;
const MAX_LINE_LEN: usize = 2000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shown_text() {
        let plain = ErrorRecord { message: " no disk\n".to_owned(), ..ErrorRecord::default() };
        assert_eq!(text(&plain), "no disk");

        let stack: Vec<String> = (0..100).map(|line| format!("  line {line} ")).collect();
        let long = ErrorRecord { callstack: Some(stack.join("\n")), ..plain };
        let shown = text(&long);
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines.len(), 21);
        assert_eq!((lines[0], lines[1], lines[20]), ("no disk", "  line 80", "  line 99"));

        let of = |message: &str, callstack: &str| {
            let (message, callstack) = (message.to_owned(), Some(callstack.to_owned()));
            text(&ErrorRecord { message, callstack, code: None })
        };
        let traceback = "Traceback (most recent call last):\n  f()\nValueError: a\nb\n";
        let expected = "ValueError: a\nb\nTraceback (most recent call last):\n  f()";
        assert_eq!(of("ValueError: a\nb", traceback), expected);
        // The Debug text of an anyhow error, without and with RUST_BACKTRACE, and of a struct.
        let causes = "cannot open data\n\nCaused by:\n    no disk";
        assert_eq!(of("cannot open data: no disk", causes), "cannot open data: no disk");
        let stack = format!("{causes}\n\nStack backtrace:\n   0: f");
        let expected = "cannot open data: no disk\nStack backtrace:\n   0: f";
        assert_eq!(of("cannot open data: no disk", &stack), expected);
        assert_eq!(of("no disk", "Io { path: \"data\" }"), "no disk");

        let wide = ErrorRecord { message: "é".repeat(5000), ..ErrorRecord::default() };
        assert_eq!(text(&wide).chars().count(), MAX_LINE_LEN);
    }
}
