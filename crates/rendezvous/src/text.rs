//! Text that came from another host, on its way to a terminal or a log.

/// Most characters that are shown of one text from a peer.
pub const MAX_SHOWN: usize = 200;

/// Makes text from a peer fit for one line of a terminal or a log: control characters, line ends and
/// characters that change the direction of text are escaped, and what is longer than [`MAX_SHOWN`]
/// characters is cut.
///
/// Every name, reason and version that another host sends goes through this before it is shown or
/// stored. A peer could otherwise forge lines of Brigade's own, set the clipboard (OSC 52), or move
/// the cursor. Output of ranks does not go through it: a program may colour its own lines.
///
/// ```
/// use brigade_rendezvous::printable;
/// assert_eq!(printable("node-7 (größer)"), "node-7 (größer)");
/// assert_eq!(printable("a\nbrigade: b"), r"a\nbrigade: b");
/// assert_eq!(printable("\x1b]52;c;cm0gLXJm\x07"), r"\u{1b}]52;c;cm0gLXJm\u{7}");
/// assert_eq!(printable(&"x".repeat(1000)).chars().count(), 201);
/// ```
#[must_use]
pub fn printable(text: &str) -> String {
    printable_within(text, MAX_SHOWN)
}

/// Makes text fit to be shown as [`printable`] does, with another limit: for lines of programs that this
/// user has chosen, such as ssh.
#[must_use]
pub fn printable_within(text: &str, limit: usize) -> String {
    let mut shown = String::new();
    let mut room = limit;
    for character in text.chars() {
        let width = escaped(character).map_or(1, |escape| escape.chars().count());
        if width > room {
            shown.push('…');
            break;
        }
        room -= width;
        match escaped(character) {
            Some(escape) => shown.push_str(&escape),
            None => shown.push(character),
        }
    }
    shown
}

/// Makes a text of several lines fit to be shown, each line as [`printable`] does: tabs become blanks, and
/// a line is cut after [`MAX_LINE`] characters. For what a rank wrote into its error file.
pub(crate) fn printable_lines(text: &str) -> String {
    let lines: Vec<String> =
        text.lines().map(|line| printable_within(&line.replace('\t', "    "), MAX_LINE)).collect();
    lines.join("\n")
}

/// Most characters of one line of an error: a message may hold a path or an expression.
const MAX_LINE: usize = 4000;

/// What stands for a character that is not shown as itself.
fn escaped(character: char) -> Option<String> {
    // A quote or a backslash changes nothing by being shown, and Windows' names have some.
    if matches!(character, '\'' | '"' | '\\') {
        return None;
    }
    let escape = character.escape_debug();
    // Control characters, white space but the blank, marks without a base, formats, private use.
    (escape.len() > 1).then(|| escape.collect())
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
            ("", ""),
        ];
        for (text, expected) in table {
            assert_eq!(printable(text), expected, "{text:?}");
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
    }
}
