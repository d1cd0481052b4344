//! Cuts a stream of bytes into lines, and keeps the last ones.

use std::collections::VecDeque;

/// Splitter of one stream of one rank into lines for the console.
///
/// Bytes pass unchanged in any encoding; a newline is added only if the stream ends inside a line. A carriage return
/// ends a line, too, so that progress bars are redrawn.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    pending: Vec<u8>,
    tail: Tail,
}

/// Last lines of a stream, including their ends.
#[derive(Debug, Default)]
struct Tail(VecDeque<Vec<u8>>);

impl Lines {
    /// Calls `each` with every line, its end included, that `bytes` completes.
    pub(crate) fn push(&mut self, bytes: &[u8], mut each: impl FnMut(&[u8])) {
        let mut rest = bytes;
        // The last piece ended in a carriage return: it is part of a "\r\n", or a line end by itself.
        if self.pending.last() == Some(&b'\r') {
            match rest.first() {
                Some(b'\n') | None => {}
                Some(_) => self.emit(&[], &mut each),
            }
        }
        while let Some(end) = line_end(rest) {
            let (line, after) = rest.split_at(end);
            self.emit(line, &mut each);
            rest = after;
        }
        self.pending.extend_from_slice(rest);
        // A line without an end must not use all memory: it is cut.
        while self.pending.len() > MAX_LINE_LEN {
            let after = self.pending.split_off(MAX_LINE_LEN);
            self.emit(b"\n", &mut each);
            self.pending = after;
        }
    }

    /// Calls `each` with the remaining bytes once the stream has ended.
    pub(crate) fn finish(&mut self, mut each: impl FnMut(&[u8])) {
        if !self.pending.is_empty() {
            self.emit(b"\n", &mut each);
        }
    }

    /// Returns the incomplete last line.
    pub(crate) fn begun(&self) -> &[u8] {
        &self.pending
    }

    /// Returns the last lines, oldest first, without their ends. The last one may be incomplete.
    pub(crate) fn tail(&self) -> impl Iterator<Item = &[u8]> {
        let pending = (!self.pending.is_empty()).then_some(&self.pending[..]);
        let pending = pending.map(|line| &line[..line.len().min(MAX_TAIL_LINE_LEN)]);
        let whole = self.tail.0.iter().map(Vec::as_slice);
        let skipped = usize::from(pending.is_some() && self.tail.0.len() == TAIL_LINES);
        whole.skip(skipped).chain(pending).map(<[u8]>::trim_ascii_end)
    }

    fn emit(&mut self, end: &[u8], each: &mut impl FnMut(&[u8])) {
        if self.pending.is_empty() {
            self.tail.keep(end);
            each(end);
        } else {
            self.pending.extend_from_slice(end);
            self.tail.keep(&self.pending);
            each(&self.pending);
            self.pending.clear();
        }
    }
}

impl Tail {
    fn keep(&mut self, line: &[u8]) {
        // A redrawn progress bar counts as one line.
        let mut room = if self.0.back().is_some_and(|last| last.ends_with(b"\r")) {
            self.0.pop_back()
        } else if self.0.len() == TAIL_LINES {
            self.0.pop_front()
        } else {
            None
        }
        .unwrap_or_default();
        room.clear();
        room.extend_from_slice(&line[..line.len().min(MAX_TAIL_LINE_LEN)]);
        self.0.push_back(room);
    }
}

/// Returns the length of the first line including its end, if it is complete.
fn line_end(bytes: &[u8]) -> Option<usize> {
    let end = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r'))?;
    match (bytes[end], bytes.get(end + 1)) {
        (b'\n', _) => Some(end + 1),
        (_, Some(b'\n')) => Some(end + 2),
        (_, Some(_)) => Some(end + 1),
        (_, None) => None,
    }
}

/// Maximum length of a line in bytes. A longer one is cut in two.
const MAX_LINE_LEN: usize = 1 << 20;
/// Number of output lines of a rank that a report shows.
const TAIL_LINES: usize = 20;
const MAX_TAIL_LINE_LEN: usize = 2000;

#[cfg(test)]
mod tests {
    use super::*;

    fn run(pieces: &[&[u8]]) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
        let mut lines = Lines::default();
        let mut out = Vec::new();
        for piece in pieces {
            lines.push(piece, |line| out.push(line.to_vec()));
        }
        lines.finish(|line| out.push(line.to_vec()));
        let tail = lines.tail().map(<[u8]>::to_vec).collect();
        (out, tail)
    }

    #[test]
    fn ends() {
        // Pieces of input, and the resulting lines.
        type Case = (&'static [&'static [u8]], &'static [&'static [u8]]);
        let (e, acute) = "é".as_bytes().split_at(1);
        let split = [e, acute, b"\n"];
        assert_eq!(run(&split).0, ["é\n".as_bytes()]);
        let table: [Case; 10] = [
            (&[], &[]),
            (&[b""], &[]),
            (&[b"a\n"], &[b"a\n"]),
            (&[b"a\nb\n"], &[b"a\n", b"b\n"]),
            (&[b"a", b"b", b"\nc"], &[b"ab\n", b"c\n"]),
            (&[b"\n\n"], &[b"\n", b"\n"]),
            (&[b"a\r\nb\r", b"\n"], &[b"a\r\n", b"b\r\n"]),
            (&[b"10%\r20%\r", b"30%\r"], &[b"10%\r", b"20%\r", b"30%\r\n"]),
            (&[b"\xff\xfe\0\n"], &[b"\xff\xfe\0\n"]),
            (&[b"no end"], &[b"no end\n"]),
        ];
        for (pieces, expected) in table {
            assert_eq!(run(pieces).0, expected);
        }
    }

    #[test]
    fn cuts_do_not_matter() {
        let text = b"one\ntwo\r\n\rthree\r\r\n\nfour\xff";
        let whole = run(&[text]);
        for first in 0..text.len() {
            for second in first..text.len() {
                let pieces = [&text[..first], &text[first..second], &text[second..]];
                assert_eq!(run(&pieces), whole, "cut at {first} and {second}");
            }
        }
    }

    #[test]
    fn an_endless_line_is_cut() {
        let long = vec![b'x'; 2 * MAX_LINE_LEN + 5];
        let lengths: Vec<_> = run(&[&long]).0.iter().map(Vec::len).collect();
        assert_eq!(lengths, [MAX_LINE_LEN + 1, MAX_LINE_LEN + 1, 5 + 1]);
    }

    #[test]
    fn the_tail_is_the_last_lines() {
        let text: String = (0..50).map(|i| format!("{i}\n")).collect();
        let expected: Vec<_> = (30..50).map(|i: i32| i.to_string().into_bytes()).collect();
        assert_eq!(run(&[text.as_bytes()]).1, expected);
        assert_eq!(run(&[b"a\n10%\r20%\rdone\n"]).1, [b"a".to_vec(), b"done".to_vec()]);
    }

    #[test]
    fn the_tail_of_a_stream_that_goes_on_has_its_open_line() {
        let mut lines = Lines::default();
        lines.push(b"whole\nhalf", |_| {});
        assert_eq!(lines.tail().collect::<Vec<_>>(), [&b"whole"[..], b"half"]);
        let text: String = (0..50).map(|i| format!("{i}\n")).collect();
        lines.push(text.as_bytes(), |_| {});
        lines.push(b"open", |_| {});
        let tail: Vec<_> = lines.tail().collect();
        assert_eq!((tail.len(), tail[0], tail[19]), (TAIL_LINES, &b"31"[..], &b"open"[..]));
    }
}
