//! Text from strangers (files, peers, other programs) on its way to a terminal or a log.
//!
//! Text from a peer, ssh or etcd goes through `printable` where it is decoded. Text from a file goes through
//! `escaped` where a sentence quotes it: in the `Display` of the errors of crates that read files, and in the output
//! of `crates/cli`, whose `output.rs` writes all of it and escapes what was missed, except line ends.
//! `crates/cli/tests/it/escaped.rs` gives each command files with hostile names.

use std::borrow::Cow;
use std::fmt::{self, Display, Write};

/// Maximum number of characters that [`printable`] shows of one text.
pub const MAX_SHOWN: usize = 200;

/// Escapes untrusted text for display on one line of a terminal or a log: control characters, line ends and characters
/// that change the direction of text are escaped, and text that is longer than [`MAX_SHOWN`] characters is cut.
/// [`escaped`] does the same without a limit.
///
/// Every name, reason and version that another host sends, and every name and value that a file holds,
/// goes through this before it is shown. It could otherwise forge lines of Brigade's own, set the
/// clipboard (OSC 52), or move the cursor. Output of ranks does not go through it: a program may colour
/// its own lines.
///
/// ```
/// use brigade_rank_env::text::printable;
/// assert_eq!(printable("node-7 (größer)"), "node-7 (größer)");
/// assert_eq!(printable("a\nbrigade: b"), r"a\nbrigade: b");
/// assert_eq!(printable("\x1b]52;c;cm0gLXJm\x07"), r"\u{1b}]52;c;cm0gLXJm\u{7}");
/// assert_eq!(printable(&"x".repeat(1000)).chars().count(), 201);
/// ```
#[must_use]
pub fn printable(text: &str) -> String {
    printable_within(text, MAX_SHOWN)
}

/// Escapes text as [`printable`] does, with another limit.
#[must_use]
pub fn printable_within(text: &str, limit: usize) -> String {
    let mut shown = String::new();
    let mut room = limit;
    for character in text.chars() {
        let escape = escape(character, shown.is_empty());
        let width = escape.as_ref().map_or(1, |escape| escape.chars().count());
        if width > room {
            shown.push('…');
            break;
        }
        room -= width;
        match escape {
            Some(escape) => shown.push_str(&escape),
            None => shown.push(character),
        }
    }
    shown
}

/// Escapes a text of several lines for display, each line as [`printable`] does: tabs become blanks, and a line is cut
/// after 4000 characters. Used for the content of a rank's error file.
#[must_use]
pub fn printable_lines(text: &str) -> String {
    let lines: Vec<String> =
        text.lines().map(|line| printable_within(&line.replace('\t', "    "), MAX_LINE)).collect();
    lines.join("\n")
}

/// Displays a value as [`printable`] does, with all of its characters: for parts of a sentence or a
/// table, and for the errors of a library. The width of a format has no effect.
///
/// ```
/// use brigade_rank_env::text::escaped;
/// let name = "weights\r\x1b[2K";
/// assert_eq!(format!("no tensor {}", escaped(name)), r"no tensor weights\r\u{1b}[2K");
/// ```
#[must_use]
pub fn escaped<T: Display>(value: T) -> Escaped<T> {
    Escaped(value)
}

/// The value that [`escaped`] displays.
#[derive(Clone, Copy, Debug)]
pub struct Escaped<T>(T);

impl<T: Display> Display for Escaped<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(Escaping { to: f, is_first: true }, "{}", self.0)
    }
}

struct Escaping<'a, 'b> {
    to: &'a mut fmt::Formatter<'b>,
    is_first: bool,
}

impl Write for Escaping<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars() {
            match escape(character, self.is_first) {
                Some(escape) => self.to.write_str(&escape)?,
                None => self.to.write_char(character)?,
            }
            self.is_first = false;
        }
        Ok(())
    }
}

/// Escapes a finished output text, which has several lines or is JSON: line ends stay, and other control characters are
/// written as in JSON, so that JSON keeps its meaning. It cannot distinguish a line end within a name from those of the
/// output: names must be [`escaped`] before they are inserted.
///
/// ```
/// use brigade_rank_env::text::escaped_answer;
/// assert_eq!(escaped_answer("{\n  \"a\": \"\u{202e}\"\n}"), "{\n  \"a\": \"\\u202e\"\n}");
/// ```
#[must_use]
pub fn escaped_answer(text: &str) -> Cow<'_, str> {
    let stays = |character: char| character == '\n' || escape(character, false).is_none();
    if text.bytes().all(|byte| byte == b'\n' || (b' '..=b'~').contains(&byte))
        || text.chars().all(stays)
    {
        return text.into();
    }
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        if stays(character) {
            shown.push(character);
            continue;
        }
        for unit in character.encode_utf16(&mut [0; 2]) {
            // Writing to a string does not fail.
            let _ = write!(shown, "\\u{unit:04x}");
        }
    }
    shown.into()
}

/// Returns a number with its noun: "1 tensor", "2 tensors", "0 classes", "3 entries".
///
/// ```
/// use brigade_rank_env::text::counted;
/// assert_eq!(counted(1, "batch"), "1 batch");
/// assert_eq!(counted(2_u64, "batch"), "2 batches");
/// ```
#[must_use]
pub fn counted(count: impl Display, noun: &str) -> String {
    let count = count.to_string();
    if count == "1" {
        return format!("{count} {noun}");
    }
    let stem = noun.strip_suffix('y').filter(|stem| !stem.ends_with(['a', 'e', 'o', 'u']));
    match stem {
        Some(stem) => format!("{count} {stem}ies"),
        // "ch" as in "batch", not as in "epoch".
        None if ["s", "x", "ch", "sh"].iter().any(|ending| noun.ends_with(ending))
            && !noun.ends_with("epoch") =>
        {
            format!("{count} {noun}es")
        }
        None => format!("{count} {noun}s"),
    }
}

/// Maximum number of characters of one line of an error, which may contain a path or an expression.
const MAX_LINE: usize = 4000;

/// Returns the escape of a character that is not shown as itself. A combining mark is shown as itself if it has a
/// base.
fn escape(character: char, is_first: bool) -> Option<String> {
    // A quote or a backslash changes nothing by being shown, and Windows' names have some.
    if matches!(character, ' '..='~') {
        return None;
    }
    let escape: String = if is_first {
        character.escape_debug().collect()
    } else {
        // Of a text, only the first character can be a mark without a base.
        let mut text = [b'a'; 5];
        let len = character.encode_utf8(&mut text[1..]).len() + 1;
        let text = std::str::from_utf8(&text[..len]).unwrap_or_default();
        text.escape_debug().skip(1).collect()
    };
    // Control characters, white space but the blank, formats, private use.
    (!escape.chars().eq([character])).then_some(escape)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_escaped() {
        let table = [
            ("node1\r\nbrigade: job finished", r"node1\r\nbrigade: job finished"),
            ("\x1b]0;title\x07", r"\u{1b}]0;title\u{7}"),
            ("\x1b[2J\x1b[H", r"\u{1b}[2J\u{1b}[H"),
            ("\u{9b}2J", r"\u{9b}2J"),
            ("a\tb\0c\x7f\x08", r"a\tb\0c\u{7f}\u{8}"),
            // Text that would be shown backwards, and a line end of Unicode's.
            ("\u{202e}txt.exe", r"\u{202e}txt.exe"),
            ("a\u{2028}b", r"a\u{2028}b"),
            (r#"C:\new "it's""#, r#"C:\new "it's""#),
            // As macOS writes names of files.
            ("a\u{308}pfel", "a\u{308}pfel"),
            ("\u{308}pfel", r"\u{308}pfel"),
            ("", ""),
        ];
        for (text, expected) in table {
            assert_eq!(printable(text), expected, "{text:?}");
            assert_eq!(escaped(text).to_string(), expected, "{text:?}");
        }
    }

    #[test]
    fn one_and_several() {
        let table = [
            ("tensor", "tensors"),
            ("class", "classes"),
            ("good entry", "good entries"),
            ("key", "keys"),
            ("batch", "batches"),
            ("epoch", "epochs"),
        ];
        for (one, several) in table {
            assert_eq!(counted(1, one), format!("1 {one}"));
            assert_eq!(counted(0, one), format!("0 {several}"));
            assert_eq!(counted(11, one), format!("11 {several}"));
        }
    }

    #[test]
    fn long_text_is_cut_between_characters() {
        assert_eq!(printable(&"ä".repeat(200)), "ä".repeat(200));
        assert_eq!(printable(&"ä".repeat(201)), "ä".repeat(200) + "…");
        let cut = printable(&"\x1b".repeat(100));
        assert_eq!(cut, r"\u{1b}".repeat(33) + "…");
    }

    #[test]
    fn an_error_keeps_its_lines() {
        let traceback = "Traceback:\r\n\tFile \"größe.py\", line 3\n\nValueError: \x1b]0;x\x07\r";
        let expected = "Traceback:\n    File \"größe.py\", line 3\n\nValueError: \\u{1b}]0;x\\u{7}";
        // A return that ends no line would let the rest overwrite it.
        assert_eq!(printable_lines(traceback), format!("{expected}\\r"));
        let long = "x".repeat(MAX_LINE + 1);
        assert_eq!(printable_lines(&long).chars().count(), MAX_LINE + 1);
        assert_eq!(printable_lines(""), "");
    }

    proptest! {
        #[test]
        fn nothing_but_one_short_line_comes_out(text in any::<String>()) {
            let shown = printable(&text);
            prop_assert!(shown.chars().count() <= MAX_SHOWN + 1);
            prop_assert!(!shown.chars().any(char::is_control), "{:?}", shown);
            prop_assert_eq!(printable(&shown).chars().count(), shown.chars().count().min(201));
        }

        #[test]
        fn json_keeps_its_meaning(text in any::<String>()) {
            let json = serde_json::to_string(&text).unwrap();
            let shown = escaped_answer(&json);
            prop_assert!(!shown.chars().any(char::is_control), "{:?}", shown);
            prop_assert_eq!(serde_json::from_str::<String>(&shown).unwrap(), text);
        }
    }
}
