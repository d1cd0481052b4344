//! The last lines that this launcher has shown, so that its report does not repeat them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;

use brigade_rendezvous::Stream;
use nix::sys::stat::fstat;

/// The last lines on the launcher's own stderr, and on its stdout if that is the same file or terminal.
#[derive(Debug)]
pub(crate) struct Recent {
    lines: VecDeque<String>,
    is_one_file: bool,
}

impl Recent {
    /// Examines this process's stdout and stderr.
    pub(crate) fn new() -> Self {
        let stdout = identity(&io::stdout());
        let is_one_file = stdout.is_some() && stdout == identity(&io::stderr());
        Self { lines: VecDeque::new(), is_one_file }
    }

    /// Records whole lines that have been shown.
    pub(crate) fn note(&mut self, stream: Stream, lines: &[u8]) {
        if stream == Stream::Stdout && !self.is_one_file {
            return;
        }
        let ends = |byte: &u8| matches!(byte, b'\n' | b'\r');
        // Only the end of a large piece matters.
        let last: Vec<&[u8]> =
            lines.rsplit(ends).filter(|line| !line.is_empty()).take(KEPT_LINES).collect();
        for line in last.into_iter().rev() {
            if self.lines.len() == KEPT_LINES {
                self.lines.pop_front();
            }
            let line = &line[..line.len().min(MAX_LINE_LEN)];
            self.lines.push_back(String::from_utf8_lossy(line).trim_end().to_owned());
        }
    }

    /// Returns `true` if the launcher has shown this sentence, alone or as the first one of a line.
    pub(crate) fn has_sentence(&self, sentence: &str) -> bool {
        let rests = self.lines.iter().filter_map(|line| line.strip_prefix("brigade: "));
        rests.filter_map(|line| line.strip_prefix(sentence)).any(|rest| {
            // The report follows the sentence at once, or the sentence contained the consequence.
            rest.is_empty() || rest.starts_with(';')
        })
    }

    /// Returns `true` if these lines of a rank have been shown, in this order. Lines of other ranks may be between
    /// them, and each has the rank's prefix.
    pub(crate) fn has_lines<'a>(&self, lines: impl IntoIterator<Item = &'a str>) -> bool {
        let mut shown = self.lines.iter();
        let mut lines = lines.into_iter().map(str::trim_end).filter(|line| !line.is_empty());
        lines.all(|line| shown.any(|shown| shown.ends_with(line)))
    }

    /// Returns `true` if a program has printed this error: in one line, or each of its causes in a line of its own.
    pub(crate) fn has_error(&self, message: &str) -> bool {
        if self.lines.iter().any(|line| ends_with_words(line, message)) {
            return true;
        }
        let mut shown = self.lines.iter().map(|line| line.trim_end_matches(':'));
        message.split(": ").all(|part| shown.any(|shown| ends_with_words(shown, part)))
    }
}

/// Returns `true` if a line ends with these words, of which the first is not a part of a longer one.
fn ends_with_words(line: &str, words: &str) -> bool {
    let is_of_a_word = |character: char| character.is_alphanumeric() || character == '_';
    !words.is_empty()
        && line.strip_suffix(words).is_some_and(|before| {
            !(before.ends_with(is_of_a_word) && words.starts_with(is_of_a_word))
        })
}

/// Returns the device and inode numbers that identify an open file or terminal.
fn identity(fd: &impl AsFd) -> Option<(u64, u64)> {
    fstat(fd).ok().map(|file| (file.st_dev, file.st_ino))
}

/// Number of lines that are kept. The report repeats a line that is further back.
const KEPT_LINES: usize = 200;
/// Maximum length of a kept line. More than a report shows of a line.
const MAX_LINE_LEN: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    fn recent(lines: &[&str]) -> Recent {
        let mut recent = Recent { lines: VecDeque::new(), is_one_file: false };
        for line in lines {
            recent.note(Stream::Stderr, format!("{line}\n").as_bytes());
        }
        recent.note(Stream::Stdout, b"[1] elsewhere\n");
        recent
    }

    #[test]
    fn lines_of_ranks() {
        let recent = recent(&["[0] a", "\x1b[36m[1]\x1b[0m first", "[0] b", "[1] ", "[1] last\r"]);
        assert!(recent.has_lines(["first", "", "last"]));
        assert!(!recent.has_lines(["last", "first"]));
        assert!(!recent.has_lines(["elsewhere"]));
        assert!(recent.has_lines([]));
    }

    #[test]
    fn only_so_many_are_kept() {
        let mut recent = recent(&["[0] old"]);
        let many: String = (0..10_000).map(|line| format!("[1] {line}\n")).collect();
        recent.note(Stream::Stderr, many.as_bytes());
        assert_eq!(recent.lines.len(), KEPT_LINES);
        assert!(!recent.has_lines(["old"]));
        assert!(recent.has_lines(["9800", "9999"]));
    }

    #[test]
    fn sentences_of_the_launcher() {
        let recent =
            recent(&["brigade: rank 1 failed; stopping 1 rank", "[0] brigade: rank 2 failed"]);
        assert!(recent.has_sentence("rank 1 failed"));
        assert!(!recent.has_sentence("rank 1"));
        assert!(!recent.has_sentence("rank 2 failed"));
    }

    #[test]
    fn errors_as_programs_print_them() {
        let shown = recent(&["[0] ValueError: no such layer"]);
        assert!(shown.has_error("ValueError: no such layer"));
        assert!(!shown.has_error("KeyError: no such layer"));
        assert!(!shown.has_error("Error: no such layer") && !shown.has_error(""));
        assert!(!recent(&["[0] step 11", "[0] "]).has_error("1"));
        assert!(recent(&["[0] Error: 1"]).has_error("1"));
        let causes =
            ["[0] Error: cannot open data", "[0] ", "[0] Caused by:", "[0]     0: no disk"];
        assert!(recent(&causes).has_error("cannot open data: no disk"));
        assert!(!recent(&causes).has_error("no disk: cannot open data"));
        let panic = ["[0] thread 'main' panicked at src/main.rs:2:5:", "[0] no layers"];
        assert!(recent(&panic).has_error("panicked at src/main.rs:2:5: no layers"));
    }
}
