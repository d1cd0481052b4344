//! Rules for capital letters.

use std::borrow::Cow;

use crate::english::characters::{ASSIGNED, CHARACTERS, is_space, next_space};

/// Converts words in capitals to lower case, with `xxup` before those of two characters or more.
///
/// A word extends from space to space. It is in capitals if it begins with `A` to `Z` and contains no `a` to `z`.
///
/// ```
/// use brigade_tokens::rules::replace_all_caps;
/// assert_eq!(replace_all_caps("I SAW it"), "i xxup saw it");
/// ```
#[must_use]
pub fn replace_all_caps(text: &str) -> Cow<'_, str> {
    replace_words(text, "xxup ", |after_first| {
        !after_first.bytes().any(|it| it.is_ascii_lowercase())
    })
}

/// Converts capitalised words to lower case, with `xxmaj` before those of two characters or more.
///
/// A word extends from space to space. It is capitalised if it begins with `A` to `Z` and contains no other of these
/// letters.
///
/// ```
/// use brigade_tokens::rules::replace_maj;
/// assert_eq!(replace_maj("Hello McKay"), "xxmaj hello McKay");
/// ```
#[must_use]
pub fn replace_maj(text: &str) -> Cow<'_, str> {
    replace_words(text, "xxmaj ", |after_first| {
        !after_first.bytes().any(|it| it.is_ascii_uppercase())
    })
}

/// Converts words with a capital first letter to lowercase, with a token before them, if `is` returns `true` for the
/// rest of the word.
fn replace_words<'a>(text: &'a str, token: &str, is: impl Fn(&str) -> bool) -> Cow<'a, str> {
    let mut out = String::new();
    let (mut from, mut done) = (0, 0);
    while let Some(ahead) = text.as_bytes()[from..].iter().position(u8::is_ascii_uppercase) {
        let start = from + ahead;
        from = start + 1;
        if !text[..start].chars().next_back().is_none_or(is_space) {
            continue;
        }
        from = next_space(text, from).map_or(text.len(), |(space, _)| space);
        let word = &text[start..from];
        if is(&word[1..]) {
            out.push_str(&text[done..start]);
            if word.len() > 1 {
                out.push_str(token);
            }
            push_lowercase(&mut out, word);
            done = from;
        }
    }
    if done == 0 {
        return Cow::Borrowed(text);
    }
    out.push_str(&text[done..]);
    Cow::Owned(out)
}

/// Converts a text to lower case and removes spaces at its ends. Adds `xxbos ` before it if `add_bos` is `true`, and `
/// xxeos` after it if `add_eos` is `true`.
///
/// ```
/// use brigade_tokens::rules::lowercase;
/// assert_eq!(lowercase(" The End ", true, false), "xxbos the end");
/// ```
#[must_use]
pub fn lowercase(text: &str, add_bos: bool, add_eos: bool) -> String {
    let mut out = String::with_capacity(text.len() + 16);
    if add_bos {
        out.push_str("xxbos ");
    }
    // Trimming first is safe: no space has a lowercase form, and none is the lowercase form of another character.
    push_lowercase(&mut out, text.trim_matches(is_space));
    if add_eos {
        out.push_str(" xxeos");
    }
    out
}

/// Appends a text in lowercase: Python's `lower`.
pub(super) fn push_lowercase(out: &mut String, text: &str) {
    if text.is_ascii() {
        let start = out.len();
        out.push_str(text);
        out[start..].make_ascii_lowercase();
        return;
    }
    let keeps = |it: char| !it.is_ascii() && !is_mapped(it, it.to_lowercase());
    let mut done = 0;
    for (at, kept) in text.match_indices(keeps) {
        out.push_str(&text[done..at].to_lowercase());
        out.push_str(kept);
        done = at + kept.len();
    }
    out.push_str(&text[done..].to_lowercase());
}

/// Appends a text in uppercase: Python's `upper`.
pub(super) fn push_uppercase(out: &mut String, text: &str) {
    for character in text.chars() {
        if is_mapped(character, character.to_uppercase()) {
            out.extend(character.to_uppercase());
        } else {
            out.push(character);
        }
    }
}

/// Returns `true` if the pair is also in Python's tables; Rust's tables follow a newer Unicode.
fn is_mapped(character: char, mut other: impl Iterator<Item = char>) -> bool {
    CHARACTERS.is(character, ASSIGNED) && other.all(|it| CHARACTERS.is(it, ASSIGNED))
}
