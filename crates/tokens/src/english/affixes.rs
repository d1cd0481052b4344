//! Prefixes, suffixes and infixes of spaCy's patterns.
//!
//! The patterns' alternatives begin with different characters or end in different ones, so each function examines a few
//! characters at one position; `tests/fastai/tables.py` checks that the patterns still have this form.

use super::characters::{
    ALPHA, ALPHA_LOWER, ALPHA_UPPER, BEFORE_PERIOD, CHARACTERS, Class, ENDS_AFTER_DIGIT, ICON,
    PREFIX, QUOTE, SPLITS, SUFFIX,
};

/// Returns the length of the prefix in bytes, or 0 without one.
pub(super) fn prefix(text: &str) -> usize {
    let mut characters = text.chars();
    let Some(first) = characters.next() else { return 0 };
    if CHARACTERS.is(first, PREFIX) {
        return first.len_utf8();
    }
    match first {
        '.' => Some(run(text.bytes(), b'.')).filter(|it| *it > 1).unwrap_or_default(),
        '+' => usize::from(!characters.next().is_some_and(|it| it.is_ascii_digit())),
        'A' | 'C' | 'U' => {
            let currency = ["US$", "C$", "A$"].into_iter().find(|it| text.starts_with(it));
            currency.map_or(0, str::len)
        }
        _ => 0,
    }
}

/// Returns the length of the suffix in bytes, or 0 without one. It is the longest one, because the pattern is searched
/// from the left.
pub(super) fn suffix(text: &str) -> usize {
    let mut backwards = text.chars().rev();
    let Some(last) = backwards.next() else { return 0 };
    let before = backwards.next();
    let class = CHARACTERS.of(last);
    let alone = if class & SUFFIX != 0 { last.len_utf8() } else { 0 };
    let found = match (before, last) {
        (_, '.') => match run(text.bytes().rev(), b'.') {
            1 => usize::from(is_period_apart(before, backwards.next())),
            dots => dots,
        },
        (Some('…'), '…') => 2 * '…'.len_utf8(),
        (Some(mark @ ('\'' | '’')), 's' | 'S') => mark.len_utf8() + 1,
        (Some('0'..='9'), '+') => 1,
        _ => 0,
    };
    let after_digit = if class & ENDS_AFTER_DIGIT != 0 { after_digit(text) } else { 0 };
    alone.max(found).max(after_digit)
}

/// Returns `true` if a period at the end is a suffix, by the two characters before it.
fn is_period_apart(before: Option<char>, second: Option<char>) -> bool {
    let Some(before) = before else { return false };
    let class = CHARACTERS.of(before);
    class & BEFORE_PERIOD != 0
        || (second == Some('°') && matches!(before, 'F' | 'f' | 'C' | 'c' | 'K' | 'k'))
        || (class & ALPHA_UPPER != 0 && is(second, ALPHA_UPPER))
}

/// Returns the length in bytes of a unit or a currency after the last digit. Units and currencies contain no digits.
fn after_digit(text: &str) -> usize {
    let window = text.len().saturating_sub(CHARACTERS.longest_after_digit() + 1);
    let digit = text.as_bytes()[window..].iter().rposition(u8::is_ascii_digit);
    let rest = digit.map_or("", |at| &text[window + at + 1..]);
    if CHARACTERS.is_after_digit(rest) { rest.len() } else { 0 }
}

/// Returns the first infix that begins at this byte or later, as its beginning and its end.
pub(super) fn infix(text: &str, from: usize) -> Option<(usize, usize)> {
    let mut before = text[..from].chars().next_back();
    for (at, character) in text[from..].char_indices() {
        let class = CHARACTERS.of(character);
        if class & SPLITS != 0 {
            let rest = &text[from + at..];
            let length = infix_at(before, character, class, rest);
            if length > 0 {
                return Some((from + at, from + at + length));
            }
        }
        before = Some(character);
    }
    None
}

/// Returns the length in bytes of the infix at the beginning of `rest`, which begins with `character`.
fn infix_at(before: Option<char>, character: char, class: Class, rest: &str) -> usize {
    let is_digit = |it: Option<char>| it.is_some_and(|it| it.is_ascii_digit());
    let after = |bytes: usize| rest[bytes..].chars().next();
    // In a run of hyphens, either the whole run is an infix or nothing.
    let between = |bytes: usize| {
        let fits = (is(before, ALPHA) || is_digit(before)) && is(after(bytes), ALPHA);
        if fits { bytes } else { 0 }
    };
    match character {
        '.' => match run(rest.bytes(), b'.') {
            1 => usize::from(is(before, ALPHA_LOWER | QUOTE) && is(after(1), ALPHA_UPPER | QUOTE)),
            dots => dots,
        },
        '…' => '…'.len_utf8(),
        _ if class & ICON != 0 => character.len_utf8(),
        '+' | '-' | '*' | '^'
            if is_digit(before) && (is_digit(after(1)) || after(1) == Some('-')) =>
        {
            1
        }
        ',' => usize::from(is(before, ALPHA) && is(after(1), ALPHA)),
        '-' => match run(rest.bytes().take(4), b'-') {
            hyphens @ 1..=3 => between(hyphens),
            _ => 0,
        },
        '—' => {
            let two = rest[character.len_utf8()..].starts_with('—');
            between(character.len_utf8() * if two { 2 } else { 1 })
        }
        '–' | '~' | ':' | '<' | '>' | '=' | '/' => between(character.len_utf8()),
        _ => 0,
    }
}

fn is(character: Option<char>, class: Class) -> bool {
    character.is_some_and(|it| CHARACTERS.is(it, class))
}

fn run(bytes: impl Iterator<Item = u8>, wanted: u8) -> usize {
    bytes.take_while(|it| *it == wanted).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_taken_off() {
        let prefixes = [
            ("(a", 1),
            ("...a", 3),
            (".a", 0),
            ("+1", 0),
            ("+a", 1),
            ("+", 1),
            ("US$1", 3),
            ("UK", 0),
        ];
        for (text, length) in [("", 0), ("……", 3), ("a", 0), ("☃a", 3)].into_iter().chain(prefixes)
        {
            assert_eq!(prefix(text), length, "{text}");
        }
        let suffixes = [
            ("", 0),
            ("a", 0),
            ("a,", 1),
            ("a...", 3),
            ("a.", 1),
            ("A.", 0),
            ("AB.", 1),
            ("1°C.", 1),
            ("°A.", 0),
            ("a…", 3),
            ("a……", 6),
            ("a's", 2),
            ("a’S", 4),
            ("as", 0),
            ("1+", 1),
            ("a+", 0),
            ("5km", 2),
            ("km", 0),
            ("5km²", 4),
            ("1$", 1),
            ("1US$", 3),
            ("a$", 0),
            ("5.", 1),
            ("|.", 1),
            ("5km/h", 4),
            ("5a", 0),
        ];
        for (text, length) in suffixes {
            assert_eq!(suffix(text), length, "{text}");
        }
    }

    #[test]
    fn infixes_are_found() {
        let cases: [(&str, &[&str]); 16] = [
            ("a-b", &["-"]),
            ("a---b", &["---"]),
            ("a----b", &[]),
            ("a——b", &["——"]),
            ("a———b", &[]),
            ("a~b", &["~"]),
            ("5--3", &["-"]),
            ("5--a", &["-"]),
            ("5-a", &["-"]),
            ("a,b,1", &[","]),
            ("a..b.C", &["..", "."]),
            ("a.b", &[]),
            ("a/b:c=1", &["/", ":"]),
            ("1*-2", &["*"]),
            ("a☃b…", &["☃", "…"]),
            ("-a", &[]),
        ];
        for (text, expected) in cases {
            let mut found = Vec::new();
            let mut from = 0;
            while let Some((start, end)) = infix(text, from) {
                found.push(&text[start..end]);
                from = end;
            }
            assert_eq!(found, expected, "{text}");
        }
    }
}
