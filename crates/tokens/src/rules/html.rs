//! Remnants of HTML in texts.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::LazyLock;

/// Replaces remnants of HTML and of WikiText, like fastai's `fix_html`: broken and complete character references, `<br
/// />`, `\n` and `\"` in two characters, ` @-@ ` of WikiText, and `...` by ` …`.
///
/// Named character references are those of HTML 5, with and without their `;`, like in Python's `html.unescape`.
///
/// ```
/// use brigade_tokens::rules::fix_html;
/// assert_eq!(fix_html("it#39;s 5 &lt; 6<br />well &eacute; la carte..."), "it's 5 < 6\nwell é la carte …");
/// ```
#[must_use]
pub fn fix_html(text: &str) -> Cow<'_, str> {
    let mut text = Cow::Borrowed(text);
    for (rare, from, to) in REPLACEMENTS {
        // Few texts have any of these bytes.
        if memchr::memchr(*rare, text.as_bytes()).is_some()
            && memchr::memmem::find(text.as_bytes(), from.as_bytes()).is_some()
        {
            text = Cow::Owned(text.replace(from, to));
        }
    }
    match unescape(&text) {
        Some(unescaped) => Cow::Owned(unescaped),
        None => text,
    }
}

/// Replacements, in the order in which they are applied, each with a rare byte of the text to replace.
const REPLACEMENTS: &[(u8, &str, &str)] = &[
    (b';', "#39;", "'"),
    (b';', "amp;", "&"),
    (b';', "#146;", "'"),
    (b';', "nbsp;", " "),
    (b';', "#36;", "$"),
    (b'\\', "\\n", "\n"),
    (b';', "quot;", "'"),
    (b'<', "<br />", "\n"),
    (b'\\', "\\\"", "\""),
    (b'<', "<unk>", "xxunk"),
    (b'@', " @.@ ", "."),
    (b'@', " @-@ ", "-"),
    (b'.', "...", " …"),
];

/// Replaces character references. Returns `None` if there are none.
fn unescape(text: &str) -> Option<String> {
    let mut next = memchr::memchr(b'&', text.as_bytes())?;
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    loop {
        let (before, reference) = rest.split_at(next);
        out.push_str(before);
        rest = match reference[1..].strip_prefix('#') {
            Some(number) => push_number(&mut out, number),
            None => push_name(&mut out, &reference[1..]),
        };
        match memchr::memchr(b'&', rest.as_bytes()) {
            Some(at) => next = at,
            None => break,
        }
    }
    out.push_str(rest);
    Some(out)
}

/// Appends the character of the number after `&#`, and returns the rest.
fn push_number<'a>(out: &mut String, text: &'a str) -> &'a str {
    let (digits, radix) = match text.strip_prefix(['x', 'X']) {
        Some(digits) => (digits, 16),
        None => (text, 10),
    };
    let length = digits.bytes().take_while(|it| char::from(*it).is_digit(radix)).count();
    if length == 0 {
        out.push_str("&#");
        return text;
    }
    let (digits, rest) = digits.split_at(length);
    let number = digits.chars().fold(0_u32, |number, digit| {
        number.saturating_mul(radix).saturating_add(digit.to_digit(radix).unwrap_or_default())
    });
    match number {
        0 => out.push(char::REPLACEMENT_CHARACTER),
        0x80..=0x9f => out.extend(WINDOWS_1252.chars().nth(number as usize - 0x80)),
        // Control characters and code points that are never assigned.
        0x1..=0x8 | 0xb | 0xe..=0x1f | 0x7f | 0xfdd0..=0xfdef => {}
        _ => match char::from_u32(number) {
            Some(_) if number & 0xfffe == 0xfffe => {}
            Some(character) => out.push(character),
            None => out.push(char::REPLACEMENT_CHARACTER),
        },
    }
    rest.strip_prefix(';').unwrap_or(rest)
}

/// Characters of `&#128;` and the following numbers.
const WINDOWS_1252: &str = "€\u{81}‚ƒ„…†‡ˆ‰Š‹Œ\u{8d}Ž\u{8f}\u{90}‘’“”•–—˜™š›œ\u{9d}žŸ";

/// Appends the characters of the name after `&`, and returns the rest. For an unknown name, its longest prefix that is
/// a name is used.
fn push_name<'a>(out: &mut String, text: &'a str) -> &'a str {
    let names = &*NAMES;
    let ends = |it: char| matches!(it, '\t' | '\n' | '\x0c' | ' ' | '<' | '&' | '#' | ';');
    let end = text.char_indices().take(LONGEST_NAME).take_while(|(_, it)| !ends(*it)).last();
    let end = end.map_or(0, |(at, last)| at + last.len_utf8());
    if end > 0
        && text[end..].starts_with(';')
        && let Some(value) = names.get(&text[..=end])
    {
        out.push_str(value);
        return &text[end + 1..];
    }
    // A prefix has at least two characters; no name in HTML is shorter.
    let mut lengths = (2..=end).rev().filter(|it| text.is_char_boundary(*it));
    match lengths.find_map(|length| Some((length, names.get(&text[..length])?))) {
        Some((length, value)) => {
            out.push_str(value);
            &text[length..]
        }
        None => {
            out.push('&');
            text
        }
    }
}

/// Maximum number of characters of a name in Python's pattern.
const LONGEST_NAME: usize = 32;

/// Names in HTML 5, some with their `;` and some without.
static NAMES: LazyLock<HashMap<&str, String>> = LazyLock::new(|| {
    let lines = include_str!("entities.txt").lines();
    let value = |codes: &str| -> Option<String> {
        codes.split(' ').map(|it| char::from_u32(u32::from_str_radix(it, 16).ok()?)).collect()
    };
    lines
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split_once(' '))
        .filter_map(|(name, codes)| Some((name, value(codes)?)))
        .collect()
});
