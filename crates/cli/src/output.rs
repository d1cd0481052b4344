//! Output of the command line, without control characters that a terminal would interpret.

use std::io::{self, Write};

use brigade_rank_env::text::{escaped, escaped_answer};

/// Writes one line of the command's own to stderr with a single call: several commands may share a terminal.
pub(crate) fn say(text: &str) {
    say_lines(&escaped(text).to_string());
}

/// Writes lines of the command's own to stderr. Each text in them must be one line already.
pub(crate) fn say_lines(text: &str) {
    let _ = io::stderr().write_all(format!("brigade: {}\n", escaped_answer(text)).as_bytes());
}

/// Writer of answers to `W`. Texts from files are [`escaped`] where they are inserted; this escapes what was missed,
/// except for line breaks, and keeps the meaning of JSON.
#[derive(Debug)]
pub(crate) struct Answer<W: Write> {
    to: W,
    /// First bytes of a character that is not complete yet.
    begun: Vec<u8>,
}

impl<W: Write> Answer<W> {
    pub(crate) const fn new(to: W) -> Self {
        Self { to, begun: Vec::new() }
    }
}

impl<W: Write> Write for Answer<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.begun.extend_from_slice(bytes);
        let text = std::mem::take(&mut self.begun);
        for chunk in text.utf8_chunks() {
            self.to.write_all(escaped_answer(chunk.valid()).as_bytes())?;
            let invalid = chunk.invalid();
            if text.ends_with(invalid) && is_begin(invalid) {
                self.begun = invalid.to_vec();
            } else if !invalid.is_empty() {
                self.to.write_all("\u{fffd}".as_bytes())?;
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Returns `true` if the bytes may be the beginning of a character.
fn is_begin(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

/// Returns `true` if a write failed because its reader has closed the pipe (`| head`).
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|it| it.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(pieces: &[&[u8]]) -> String {
        let mut bytes = Vec::new();
        let mut answer = Answer::new(&mut bytes);
        for piece in pieces {
            answer.write_all(piece).unwrap();
        }
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn characters_may_come_in_pieces() {
        assert_eq!(written(&[b"a\xc3", b"\xa4\n"]), "aä\n");
        assert_eq!(written(&[b"\xe2", b"\x80", b"\xae!"]), "\\u202e!");
        assert_eq!(written(&[b"\xff\xc3", b"b\xff"]), "\u{fffd}\u{fffd}b\u{fffd}");
    }

    #[test]
    fn nothing_is_left_that_a_terminal_would_obey() {
        assert_eq!(written(&[b"a\x1b]52;c;x\x07\r\n\0"]), "a\\u001b]52;c;x\\u0007\\u000d\n\\u0000");
        let json = serde_json::json!({ "a\u{9b}": "\u{202e}\t" }).to_string();
        let shown = written(&[json.as_bytes()]);
        assert!(shown.is_ascii(), "{shown}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap().to_string(), json);
    }
}
