//! Cuts a stream of bytes into lines and writes a prefix before each.

use std::collections::VecDeque;

/// One stream of one rank, on its way to the terminal.
///
/// Bytes pass unchanged, whatever their encoding; only prefixes are added, and a newline where a
/// stream ends inside a line. A carriage return ends a line, too, so that progress bars move.
#[derive(Debug)]
pub(crate) struct Lines {
    prefix: Vec<u8>,
    pending: Vec<u8>,
    tail: VecDeque<Vec<u8>>,
}

impl Lines {
    pub(crate) fn new(prefix: &str) -> Self {
        Self { prefix: prefix.as_bytes().to_vec(), pending: Vec::new(), tail: VecDeque::new() }
    }

    /// Appends to `out` the lines that `bytes` completes.
    pub(crate) fn push(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        let mut rest = bytes;
        // A return at the end of the last piece: part of a "\r\n", or an end of its own?
        if self.pending.last() == Some(&b'\r') {
            match rest.first() {
                Some(b'\n') | None => {}
                Some(_) => self.emit(&[], out),
            }
        }
        while let Some(end) = line_end(rest) {
            let (line, after) = rest.split_at(end);
            self.emit(line, out);
            rest = after;
        }
        self.pending.extend_from_slice(rest);
        // A line that never ends must not take all memory: it is cut.
        while self.pending.len() > LONGEST_LINE {
            let after = self.pending.split_off(LONGEST_LINE);
            self.pending.push(b'\n');
            self.emit(&[], out);
            self.pending = after;
        }
    }

    /// Appends what is left when the stream has ended.
    pub(crate) fn finish(&mut self, out: &mut Vec<u8>) {
        if !self.pending.is_empty() {
            self.emit(b"\n", out);
        }
    }

    /// The last lines, oldest first, without their ends.
    pub(crate) fn tail(&self) -> impl Iterator<Item = &[u8]> {
        self.tail.iter().map(|line| line.trim_ascii_end())
    }

    fn emit(&mut self, end: &[u8], out: &mut Vec<u8>) {
        out.extend_from_slice(&self.prefix);
        out.extend_from_slice(&self.pending);
        out.extend_from_slice(end);

        self.pending.extend_from_slice(end);
        let line = &self.pending[..self.pending.len().min(LONGEST_TAIL_LINE)];
        // A progress bar that is drawn over is one line.
        if self.tail.back().is_some_and(|last| last.ends_with(b"\r")) {
            self.tail.pop_back();
        } else if self.tail.len() == TAIL_LINES {
            self.tail.pop_front();
        }
        self.tail.push_back(line.to_vec());
        self.pending.clear();
    }
}

/// The length of the first line with its end, if it is complete.
fn line_end(bytes: &[u8]) -> Option<usize> {
    let end = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r'))?;
    match (bytes[end], bytes.get(end + 1)) {
        (b'\n', _) => Some(end + 1),
        (_, Some(b'\n')) => Some(end + 2),
        (_, Some(_)) => Some(end + 1),
        (_, None) => None,
    }
}

/// Past this, a line is cut in two.
const LONGEST_LINE: usize = 1 << 20;
/// How much a report shows of a rank's output.
const TAIL_LINES: usize = 20;
const LONGEST_TAIL_LINE: usize = 2000;

#[cfg(test)]
mod tests {
    use super::*;

    fn run(pieces: &[&[u8]]) -> (Vec<u8>, Vec<Vec<u8>>) {
        let mut lines = Lines::new("[7] ");
        let mut out = Vec::new();
        for piece in pieces {
            lines.push(piece, &mut out);
        }
        lines.finish(&mut out);
        let tail = lines.tail().map(<[u8]>::to_vec).collect();
        (out, tail)
    }

    #[test]
    fn prefixes() {
        let table: [(&[&[u8]], &[u8]); 11] = [
            (&[], b""),
            (&[b""], b""),
            (&[b"a\n"], b"[7] a\n"),
            (&[b"a\nb\n"], b"[7] a\n[7] b\n"),
            (&[b"a", b"b", b"\nc"], b"[7] ab\n[7] c\n"),
            (&[b"\n\n"], b"[7] \n[7] \n"),
            (&[b"a\r\nb\r", b"\n"], b"[7] a\r\n[7] b\r\n"),
            (&[b"10%\r20%\r", b"30%\r"], b"[7] 10%\r[7] 20%\r[7] 30%\r\n"),
            (&[b"\xff\xfe\0\n"], b"[7] \xff\xfe\0\n"),
            (
                &["é".as_bytes().split_at(1).0, "é".as_bytes().split_at(1).1, b"\n"],
                "[7] é\n".as_bytes(),
            ),
            (&[b"no end"], b"[7] no end\n"),
        ];
        for (pieces, expected) in table {
            assert_eq!(
                run(pieces).0.escape_ascii().to_string(),
                expected.escape_ascii().to_string()
            );
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
        let long = vec![b'x'; 2 * LONGEST_LINE + 5];
        let out = run(&[&long]).0;
        let lengths: Vec<_> = out.split(|byte| *byte == b'\n').map(<[u8]>::len).collect();
        assert_eq!(lengths, [LONGEST_LINE + 4, LONGEST_LINE + 4, 5 + 4, 0]);
    }

    #[test]
    fn the_tail_is_the_last_lines() {
        let text: String = (0..50).map(|i| format!("{i}\n")).collect();
        let expected: Vec<_> = (30..50).map(|i: i32| i.to_string().into_bytes()).collect();
        assert_eq!(run(&[text.as_bytes()]).1, expected);
        assert_eq!(run(&[b"a\n10%\r20%\rdone\n"]).1, [b"a".to_vec(), b"done".to_vec()]);
    }
}
