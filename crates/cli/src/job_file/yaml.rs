//! Texts in YAML, always in double quotes, so that they cannot be parsed as another type.

use std::fmt::Write as _;

/// Returns the text in double quotes.
pub(super) fn quoted(text: &str) -> String {
    let mut quoted = "\"".to_owned();
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            '\n' => quoted.push_str("\\n"),
            '\t' => quoted.push_str("\\t"),
            // YAML's own line breaks, and characters that it does not allow unescaped.
            '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}' => {
                escape(&mut quoted, character);
            }
            _ if character.is_control() => escape(&mut quoted, character),
            _ => quoted.push(character),
        }
    }
    quoted.push('"');
    quoted
}

fn escape(text: &mut String, character: char) {
    // Writing to a string cannot fail.
    let _ = write!(text, "\\u{:04x}", u32::from(character));
}

/// Returns a list on one line.
pub(super) fn list<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    let texts: Vec<String> = texts.into_iter().map(quoted).collect();
    format!("[{}]", texts.join(", "))
}
