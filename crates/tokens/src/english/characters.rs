//! The character classes of spaCy's patterns and of Python's regular expressions.
//!
//! Rust's own classes follow a newer Unicode and differ from Python's (`\x1c` to `\x1f` are spaces there), and spaCy's
//! letters are ranges of its own.

use std::collections::HashSet;
use std::sync::LazyLock;

/// Properties of a character: a set of the constants below.
pub(crate) type Class = u16;

/// Space as in Python's `str.isspace` and `\s`.
pub(crate) const SPACE: Class = 1;
/// Word character as in Python's `\w`.
pub(crate) const WORD: Class = 1 << 1;
/// Decimal digit as in Python's `\d`.
pub(crate) const DECIMAL: Class = 1 << 2;
/// Assigned character in the version of Unicode that Python uses.
pub(crate) const ASSIGNED: Class = 1 << 3;
/// Letter of spaCy's `ALPHA`.
pub(crate) const ALPHA: Class = 1 << 4;
/// Lowercase letter, or a letter of a script without capitals.
pub(crate) const ALPHA_LOWER: Class = 1 << 5;
/// Uppercase letter, or a letter of a script without capitals.
pub(crate) const ALPHA_UPPER: Class = 1 << 6;
/// Quotation mark of spaCy's patterns.
pub(crate) const QUOTE: Class = 1 << 7;
/// Pictogram of spaCy's patterns.
pub(crate) const ICON: Class = 1 << 8;
/// Character that is a prefix by itself.
pub(crate) const PREFIX: Class = 1 << 9;
/// Character that is a suffix by itself.
pub(crate) const SUFFIX: Class = 1 << 10;
/// Character after which a period is a suffix.
pub(crate) const BEFORE_PERIOD: Class = 1 << 11;
/// Last character of a suffix that follows a digit: a unit or a currency.
pub(crate) const ENDS_AFTER_DIGIT: Class = 1 << 12;
/// Character that splits: a text without such characters has neither prefix, suffix nor infix and is not a URL.
pub(crate) const SPLITS: Class = 1 << 13;

const NAMES: [(&str, Class); 12] = [
    ("space", SPACE),
    ("word", WORD),
    ("decimal", DECIMAL),
    ("assigned", ASSIGNED),
    ("alpha", ALPHA),
    ("alpha-lower", ALPHA_LOWER),
    ("alpha-upper", ALPHA_UPPER),
    ("quote", QUOTE),
    ("icon", ICON | SPLITS),
    ("prefix", PREFIX | SPLITS),
    ("suffix", SUFFIX | SPLITS),
    ("before-period", BEFORE_PERIOD),
];
/// Characters of patterns with several characters: each such pattern has one of these, or one with [`SPLITS`] from its
/// class. Digits precede units, and every URL has a period.
const IN_PATTERNS: &str = "0123456789.+-*^,–—~:<>=/$'’";
const PAGE: usize = 256;

/// Class of each character, and the suffixes that may follow a digit.
#[derive(Debug)]
pub(crate) struct Characters {
    /// Index of the page for each 256 code points. Equal pages are stored once.
    index: Box<[u8]>,
    pages: Vec<[Class; PAGE]>,
    after_digit: HashSet<&'static str>,
    longest_after_digit: usize,
}

/// Table of the English tokenizer.
pub(crate) static CHARACTERS: LazyLock<Characters> =
    LazyLock::new(|| Characters::parse(include_str!("characters.txt")));

impl Characters {
    fn parse(text: &'static str) -> Self {
        let mut classes = vec![0; char::MAX as usize + 1];
        let mut after_digit = HashSet::new();
        let mut section = "";
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            if let Some(name) = line.strip_suffix(':') {
                section = name;
            } else if section == "after-digit" {
                after_digit.extend(line.split_whitespace());
            } else if let Some((_, class)) = NAMES.iter().find(|(name, _)| *name == section) {
                for (first, last) in line.split_whitespace().filter_map(range) {
                    classes[first..=last].iter_mut().for_each(|it| *it |= class);
                }
            }
        }
        for character in IN_PATTERNS.chars() {
            classes[character as usize] |= SPLITS;
        }
        for character in after_digit.iter().filter_map(|it| it.chars().next_back()) {
            classes[character as usize] |= ENDS_AFTER_DIGIT;
        }
        let mut pages: Vec<[Class; PAGE]> = Vec::new();
        let index = classes.as_chunks().0.iter().map(|page| {
            let known = pages.iter().position(|it| it == page);
            let number = known.unwrap_or_else(|| {
                pages.push(*page);
                pages.len() - 1
            });
            u8::try_from(number).unwrap_or_default()
        });
        let index = index.collect();
        let longest_after_digit = after_digit.iter().map(|it| it.len()).max().unwrap_or_default();
        Self { index, pages, after_digit, longest_after_digit }
    }

    /// Returns the class of a character.
    #[inline]
    pub(crate) fn of(&self, character: char) -> Class {
        let point = character as usize;
        self.pages[usize::from(self.index[point / PAGE])][point % PAGE]
    }

    /// Returns `true` if a character has one of these properties.
    #[inline]
    pub(crate) fn is(&self, character: char, class: Class) -> bool {
        self.of(character) & class != 0
    }

    /// Returns `true` if a text is a suffix where it stands after a digit.
    pub(crate) fn is_after_digit(&self, text: &str) -> bool {
        text.len() <= self.longest_after_digit && self.after_digit.contains(text)
    }

    /// Returns the length of the longest suffix after a digit, in bytes.
    pub(crate) fn longest_after_digit(&self) -> usize {
        self.longest_after_digit
    }
}

/// Parses an inclusive range of code points, such as `41-5a` or `5f`.
fn range(text: &str) -> Option<(usize, usize)> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    Some((usize::from_str_radix(first, 16).ok()?, usize::from_str_radix(last, 16).ok()?))
}

/// Returns `true` if a character is a space for Python.
#[inline]
pub(crate) fn is_space(character: char) -> bool {
    match character {
        '!'..='\x7f' => false,
        _ => CHARACTERS.is(character, SPACE),
    }
}

/// Returns the start and end of the next space at or after this byte.
#[inline]
pub(crate) fn next_space(text: &str, from: usize) -> Option<(usize, usize)> {
    let mut from = from;
    loop {
        // Most bytes are letters.
        let ahead = text.as_bytes()[from..].iter().position(|it| !(b'!'..=b'\x7f').contains(it))?;
        let character = text[from + ahead..].chars().next()?;
        let (start, end) = (from + ahead, from + ahead + character.len_utf8());
        if is_space(character) {
            return Some((start, end));
        }
        from = end;
    }
}

/// Returns the value of a decimal digit of any script, as Python's `int` does.
pub(crate) fn decimal(character: char) -> Option<u32> {
    let characters = &*CHARACTERS;
    if !characters.is(character, DECIMAL) {
        return None;
    }
    // Digits are in groups of ten, and some scripts' groups are adjacent.
    let point = character as u32;
    let before = (0..point).rev().map_while(char::from_u32);
    let before = before.take_while(|it| characters.is(*it, DECIMAL)).count();
    u32::try_from(before % 10).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_pythons_and_spacys() {
        let has = |character, class| CHARACTERS.is(character, class);
        assert!("\x1c\x1f \u{85}\u{3000}".chars().all(is_space));
        assert!(!"\u{200b}\u{180e}a\x7f".chars().any(is_space));
        assert!(has('_', WORD) && has('½', WORD) && !has('½', DECIMAL) && has('٣', DECIMAL));
        assert!(has('é', ALPHA) && has('é', ALPHA_LOWER) && !has('é', ALPHA_UPPER));
        assert!(has('中', ALPHA_LOWER) && has('中', ALPHA_UPPER));
        assert!(has('☃', ICON) && has('☃', SPLITS) && !has('a', SPLITS));
        assert!(has('%', PREFIX) && !has('%', SUFFIX) && has('|', BEFORE_PERIOD));
        assert!(has('\u{10ffff}', 0) || CHARACTERS.of('\u{10ffff}') == 0);
        assert!(CHARACTERS.is_after_digit("km²") && !CHARACTERS.is_after_digit("mile"));
    }

    #[test]
    fn digits_of_all_scripts_have_values() {
        assert_eq!(
            "7٣９𝟠𝟗".chars().map(decimal).collect::<Option<Vec<_>>>(),
            Some(vec![7, 3, 9, 8, 9])
        );
        assert_eq!(decimal('½'), None);
    }

    #[test]
    fn every_page_has_a_number() {
        assert!(CHARACTERS.pages.len() <= usize::from(u8::MAX), "{}", CHARACTERS.pages.len());
    }
}
