//! Rules for repeated characters and words.

use std::borrow::Cow;
use std::fmt::Write as _;

use crate::english::characters::{CHARACTERS, WORD, is_space, next_space};

/// Replaces a character that occurs three times or more in a row by ` xxrep COUNT CHARACTER `.
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

/// Returns the next character that occurs three times or more in a row: its offset, the character, and the count.
fn next_run(text: &str, from: usize) -> Option<(usize, char, usize)> {
    let bytes = text.as_bytes();
    let mut at = from;
    while at < bytes.len() {
        let width = width(bytes[at]);
        if bytes.get(at + width) == Some(&bytes[at]) {
            let (character, rest) = text[at..].split_at(width);
            let more = (rest.len() - rest.trim_start_matches(character).len()) / width;
            if more >= 2 {
                return Some((at, character.chars().next()?, more + 1));
            }
        }
        at += width;
    }
    None
}

/// Returns the length in bytes of the character that begins with this byte.
fn width(first: u8) -> usize {
    match first {
        0..0x80 => 1,
        0x80..0xe0 => 2,
        0xe0..0xf0 => 3,
        0xf0.. => 4,
    }
}

fn push_repeated(out: &mut String, token: &str, count: usize, what: &str) {
    // Writing into a string does not fail.
    let _ = write!(out, " {token} {count} {what} ");
}

/// Replaces a word that occurs three times or more in a row by ` xxwrep COUNT WORD `.
///
/// ```
/// use brigade_tokens::rules::replace_wrep;
/// assert_eq!(replace_wrep("no no no, no"), " xxwrep 3 no , no");
/// ```
#[must_use]
pub fn replace_wrep(text: &str) -> Cow<'_, str> {
    let mut out = String::new();
    let mut done = 0;
    // Start of a word, and of the space before it: the beginning of the text, or the position after a space that the
    // previous match has not consumed.
    let mut word = Some((0, 0));
    let mut from = 0;
    loop {
        let space = next_space(text, from);
        if let Some((before, start)) = word
            && let Some((_, next)) = space
            && may_be_repeated(text.as_bytes(), start, next)
            && let Some(repeated) = repeated_word(&text[start..])
        {
            out.push_str(&text[done..before]);
            push_repeated(&mut out, "xxwrep", repeated.count, repeated.word);
            done = start + repeated.after;
            out.push_str(&text[start + repeated.end..done]);
            (word, from) = (None, done);
            continue;
        }
        let Some((space, next)) = space else { break };
        (word, from) = (Some((space, next)), next);
    }
    if done == 0 {
        return Cow::Borrowed(text);
    }
    out.push_str(&text[done..]);
    Cow::Owned(out)
}

/// Returns `true` if the word at `start` may be the one at `next`, or a second space stands there: most are told apart
/// by their first letters.
fn may_be_repeated(text: &[u8], start: usize, next: usize) -> bool {
    let ascii = |it: &u8| (b'!'..=b'\x7f').contains(it);
    text.get(next).is_some_and(|letter| *letter == text[start] || !ascii(letter))
}

/// Word that occurs several times, separated by spaces.
struct Repeated<'a> {
    word: &'a str,
    count: usize,
    /// Offset after the last occurrence of the word.
    end: usize,
    /// Offset after the following character.
    after: usize,
}

/// Matches `(\w+)\s+((?:\1\s+)+)\1(\s|\W|$)` at the beginning.
fn repeated_word(text: &str) -> Option<Repeated<'_>> {
    let is_word = |letter: char| match letter {
        '\0'..='\x7f' => letter.is_ascii_alphanumeric() || letter == '_',
        _ => CHARACTERS.is(letter, WORD),
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
