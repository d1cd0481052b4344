//! Repeated characters and words.

use std::borrow::Cow;
use std::fmt::Write as _;

use crate::english::characters::{CHARACTERS, WORD, is_space};

/// Writes a character that occurs three times or more in a row as ` xxrep COUNT CHARACTER `.
///
/// ```
/// use brigade_tokens::rules::replace_rep;
/// assert_eq!(replace_rep("sooo good"), "s xxrep 3 o  good");
/// ```
#[must_use]
pub fn replace_rep(text: &str) -> Cow<'_, str> {
    let mut out = String::new();
    let mut done = 0;
    let mut from = 0;
    while let Some((start, character, count)) = next_run(text, from) {
        from = start + count * character.len_utf8();
        if !is_space(character) {
            out.push_str(&text[done..start]);
            push_repeated(&mut out, "xxrep", count, character.encode_utf8(&mut [0; 4]));
            done = from;
        }
    }
    if done == 0 {
        return Cow::Borrowed(text);
    }
    out.push_str(&text[done..]);
    Cow::Owned(out)
}

/// The next character that occurs three times or more in a row: where, which, how often.
fn next_run(text: &str, from: usize) -> Option<(usize, char, usize)> {
    let mut characters = text[from..].char_indices();
    let (mut start, mut run) = characters.next()?;
    let mut count = 1;
    for (at, character) in characters {
        if character == run {
            count += 1;
        } else if count >= 3 {
            break;
        } else {
            (start, run, count) = (at, character, 1);
        }
    }
    (count >= 3).then_some((from + start, run, count))
}

fn push_repeated(out: &mut String, token: &str, count: usize, what: &str) {
    // Writing into a string does not fail.
    let _ = write!(out, " {token} {count} {what} ");
}

/// Writes a word that occurs three times or more in a row as ` xxwrep COUNT WORD `.
///
/// ```
/// use brigade_tokens::rules::replace_wrep;
/// assert_eq!(replace_wrep("no no no, no"), " xxwrep 3 no , no");
/// ```
#[must_use]
pub fn replace_wrep(text: &str) -> Cow<'_, str> {
    let mut out = String::new();
    let mut done = 0;
    // A word begins the text or stands after a space that the match before has not used up.
    let mut at = 0;
    let mut begins = true;
    while at < text.len() {
        let rest = &text[at..];
        let repeated = if begins { repeated_word(rest) } else { None };
        if let Some(Repeated { word, count, end, after }) = repeated {
            let start = text[..at].char_indices().next_back().map_or(0, |(space, _)| space);
            out.push_str(&text[done..start]);
            push_repeated(&mut out, "xxwrep", count, word);
            out.push_str(&rest[end..after]);
            done = at + after;
            at = done;
            begins = false;
            continue;
        }
        // The next place behind a space.
        let Some((space, character)) = rest.char_indices().find(|(_, it)| is_space(*it)) else {
            break;
        };
        at += space + character.len_utf8();
        begins = true;
    }
    if done == 0 {
        return Cow::Borrowed(text);
    }
    out.push_str(&text[done..]);
    Cow::Owned(out)
}

/// A word that occurs several times, with spaces between.
struct Repeated<'a> {
    word: &'a str,
    count: usize,
    /// The byte behind its last occurrence.
    end: usize,
    /// The byte behind the character that follows.
    after: usize,
}

/// `(\w+)\s+((?:\1\s+)+)\1(\s|\W|$)` at the beginning.
fn repeated_word(text: &str) -> Option<Repeated<'_>> {
    let is_word = |it: char| match it {
        '\0'..='\x7f' => it.is_ascii_alphanumeric() || it == '_',
        _ => CHARACTERS.is(it, WORD),
    };
    let length = text.find(|it| !is_word(it)).unwrap_or(text.len());
    let word = &text[..length];
    let mut found = None;
    // Each word is compared with the next one only, so the time is linear.
    let (mut end, mut count) = (length, 1);
    while !word.is_empty() {
        let rest = &text[end..];
        let trimmed = rest.trim_start_matches(is_space);
        let next = trimmed.strip_prefix(word).filter(|_| trimmed.len() < rest.len());
        let Some(next) = next.filter(|it| !it.starts_with(is_word)) else { break };
        end = text.len() - next.len();
        count += 1;
        if count >= 3 {
            let after = end + next.chars().next().map_or(0, char::len_utf8);
            found = Some(Repeated { word, count, end, after });
        }
    }
    found
}
