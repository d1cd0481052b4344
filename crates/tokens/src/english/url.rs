//! spaCy's rules for URLs.

use super::characters::{ALPHA_LOWER, CHARACTERS, DECIMAL, WORD};

/// Returns `true` if a text without spaces is an address: spaCy's `URL_MATCH`.
///
/// An optional scheme, an optional part up to an `@`, a public IPv4 address or a host whose last part is in lowercase
/// letters, an optional port, an optional path. The next character decides each of the pattern's choices, so the time
/// is linear in the length of the text.
pub(super) fn is_url(text: &str) -> bool {
    if !text.contains('.') {
        return false;
    }
    if is_host_and_path(text) {
        return true;
    }
    if let Some((scheme, rest)) = text.split_once("://")
        && is_scheme(scheme)
        && is_host_and_path(rest)
    {
        return true;
    }
    // The part before an `@` may be a name and a password, with at least one character.
    let first = text.chars().next().map_or(0, char::len_utf8);
    text[first..].match_indices('@').any(|(at, _)| is_host_and_path(&text[first + at + 1..]))
}

fn is_scheme(text: &str) -> bool {
    text.chars().nth(1).is_some()
        && text
            .chars()
            .all(|letter| CHARACTERS.is(letter, WORD) || matches!(letter, '+' | '-' | '.'))
}

fn is_host_and_path(text: &str) -> bool {
    after_host(text).is_some_and(is_port_and_path)
        || after_address(text).is_some_and(is_port_and_path)
}

/// Matches `(?::\d{2,5})?(?:[/?#]\S*)?$`.
fn is_port_and_path(text: &str) -> bool {
    let text = match text.strip_prefix(':') {
        Some(port) => {
            let (digits, rest) = split_run(port, |it| CHARACTERS.is(it, DECIMAL));
            if !(2..=5).contains(&digits.chars().count()) {
                return false;
            }
            rest
        }
        None => text,
    };
    text.is_empty() || text.starts_with(['/', '?', '#'])
}

/// Returns the text after a host: labels, each followed by a period, and a last part of 2 to 63 lowercase letters.
fn after_host(text: &str) -> Option<&str> {
    let mut rest = text;
    while let Some(next) = after_label(rest) {
        rest = next;
    }
    if rest.len() == text.len() {
        return None;
    }
    let (domain, rest) = split_run(rest, |it| CHARACTERS.is(it, ALPHA_LOWER));
    (2..=63).contains(&domain.chars().take(64).count()).then_some(rest)
}

/// Returns the text after a label: `(?:X[X_-]{0,62})?X\.` with X a letter or digit, or a character from U+00A1 to
/// U+FFFF.
fn after_label(text: &str) -> Option<&str> {
    let (label, rest) =
        split_run(text, |letter| is_in_label(letter) || matches!(letter, '_' | '-'));
    let rest = rest.strip_prefix('.')?;
    let ends = label.starts_with(is_in_label) && label.ends_with(is_in_label);
    (ends && label.chars().take(65).count() <= 64).then_some(rest)
}

fn is_in_label(character: char) -> bool {
    character.is_ascii_alphanumeric() || ('\u{a1}'..='\u{ffff}').contains(&character)
}

/// Returns the text after an IPv4 address, unless the address belongs to a private network.
fn after_address(text: &str) -> Option<&str> {
    let mut rest = text;
    let mut parts = [""; 4];
    for (place, part) in parts.iter_mut().enumerate() {
        if place > 0 {
            rest = rest.strip_prefix('.')?;
        }
        (*part, rest) = split_run(rest, |it| CHARACTERS.is(it, DECIMAL));
    }
    let [first, second, third, last] = parts;
    let private = match first {
        "10" | "127" => true,
        "169" => second == "254",
        "192" => second == "168",
        "172" => {
            matches!(second, "16" | "17" | "18" | "19" | "30" | "31")
                || matches!(digits(second), Some((['2', _], 2)))
        }
        _ => false,
    };
    let fits = is_first(first) && is_middle(second) && is_middle(third) && is_last(last);
    (fits && !private).then_some(rest)
}

/// Returns the first two of up to three characters, and their number.
fn digits(text: &str) -> Option<([char; 2], usize)> {
    let mut characters = text.chars();
    let first = characters.next()?;
    let second = characters.next().unwrap_or_default();
    let more = characters.take(2).count();
    let length = if second == char::default() { 1 } else { 2 + more };
    (length <= 3).then_some(([first, second], length))
}

/// Matches the first number of an address: `[1-9]\d?|1\d\d|2[01]\d|22[0-3]`.
fn is_first(text: &str) -> bool {
    match digits(text) {
        Some((['1', _], 3) | (['2', '0' | '1'], 3)) => true,
        Some((['2', '2'], 3)) => text.ends_with(['0', '1', '2', '3']),
        Some((['1'..='9', _], 1 | 2)) => true,
        _ => false,
    }
}

/// Matches a middle number of an address: `1?\d{1,2}|2[0-4]\d|25[0-5]`.
fn is_middle(text: &str) -> bool {
    match digits(text) {
        Some((['1', _], 3) | (['2', '0'..='4'], 3)) => true,
        Some((['2', '5'], 3)) => text.ends_with(['0', '1', '2', '3', '4', '5']),
        Some((_, length)) => length < 3,
        None => false,
    }
}

/// Matches the last number of an address: `[1-9]\d?|1\d\d|2[0-4]\d|25[0-4]`.
fn is_last(text: &str) -> bool {
    match digits(text) {
        Some((['1', _], 3) | (['2', '0'..='4'], 3)) => true,
        Some((['2', '5'], 3)) => text.ends_with(['0', '1', '2', '3', '4']),
        Some((['1'..='9', _], 1 | 2)) => true,
        _ => false,
    }
}

/// Splits a text after the longest run of such characters at its beginning.
fn split_run(text: &str, is: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(|it| !is(it)).unwrap_or(text.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_told_from_words() {
        for url in [
            "example.com",
            "http://www.example.com:8080/a?b=c#d",
            "mailto:ann@example.org",
            "a@b@c.de",
            "8.8.8.8",
            "223.255.255.254/x",
            "172.32.0.1",
            "1.٣.1.1",
            "ab://é.fr",
            "x--y.a_b.co.uk?q",
            "中.中国",
        ] {
            assert!(is_url(url), "{url}");
        }
        for word in [
            "",
            ".",
            "word",
            "word.",
            "e.g.",
            "A.B",
            "example.c",
            "-a.com",
            "a-.com",
            "a..com",
            "10.0.0.1",
            "127.0.0.1",
            "169.254.1.1",
            "192.168.0.1",
            "172.16.0.1",
            "172.2٣.0.1",
            "224.0.0.1",
            "1.1.1.255",
            "1.256.1.1",
            "8.8.8.8x",
            "example.com:1",
            "example.com:123456",
            "@example.org/",
            "a://example,com",
            "http://",
            "example.COM",
        ] {
            assert!(!is_url(word), "{word}");
        }
        assert!(is_url(&format!("{}.com", "a".repeat(64))));
        assert!(!is_url(&format!("{}.com", "a".repeat(65))));
    }
}
