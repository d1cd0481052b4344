//! The files in which failing ranks leave their errors, and what is made of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use brigade_rendezvous::RankFailure;
use brigade_world::{ErrorRecord, env};

/// The error that a rank has written.
#[derive(Debug)]
pub(super) struct ErrorFile {
    /// The error, and below it the last lines of what led to it.
    pub(super) text: String,
    /// How long ago it was written, which is before the process ended.
    pub(super) age: Duration,
}

impl ErrorFile {
    /// What is in the file, if anything can be made of it.
    pub(super) fn read(path: &Path) -> Option<Self> {
        let error = ErrorRecord::read(path)?;
        let written = fs::metadata(path).and_then(|file| file.modified()).ok()?;
        // A clock that has been set back says nothing.
        let age = SystemTime::now().duration_since(written).unwrap_or_default();
        Some(Self { text: text(&error), age })
    }
}

fn text(error: &ErrorRecord) -> String {
    let callstack = error.callstack.as_deref().unwrap_or_default();
    let mut lines: Vec<&str> = callstack.lines().collect();
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

/// Passes the job's failure on to the launcher that has started this one, if one has.
///
/// `file` is the failing rank's own file, where it is on this host.
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
    // What cannot be written is lost: the same is on stderr.
    let _ = record.write(&ours);
}

/// As many as of a rank's output.
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

        let wide = ErrorRecord { message: "é".repeat(5000), ..ErrorRecord::default() };
        assert_eq!(text(&wide).chars().count(), MAX_LINE_LEN);
    }
}
