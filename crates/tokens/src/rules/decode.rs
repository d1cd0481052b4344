//! Decoding of fastai's special tokens.

use super::case::{push_lowercase, push_uppercase};
use crate::english::characters::{decimal, is_space};
use crate::{Error, Result, TokenList};

/// Restores the capitals and repetitions that the rules have replaced by special tokens, like fastai's
/// `decode_spec_tokens`.
///
/// As in fastai, after the first `xxrep` or `xxwrep` every token is repeated, until the next `xxup` or `xxmaj`.
///
/// ```
/// use brigade_tokens::TokenList;
/// use brigade_tokens::rules::decode_special_tokens;
///
/// let tokens: TokenList = ["xxmaj", "hello", "xxup", "world", "xxrep", "3", "!"].into_iter().collect();
/// assert_eq!(decode_special_tokens(&tokens)?.iter().collect::<Vec<_>>(), ["Hello", "WORLD", "!!!"]);
/// # Ok::<(), brigade_tokens::Error>(())
/// ```
///
/// # Errors
/// Fails if repetitions make a text of more than 1 GiB, because a count may be any number.
pub fn decode_special_tokens(tokens: &TokenList) -> Result<TokenList> {
    let mut decoded = TokenList::new();
    let (mut rule, mut count) = (None, None);
    let mut bytes = 0_usize;
    for token in tokens.iter() {
        match (rule, token) {
            (_, "xxmaj" | "xxup" | "xxrep" | "xxwrep") => rule = Some(token),
            (None, _) => decoded.push(token),
            (Some("xxmaj"), _) => {
                let first = token.chars().next().map_or(0, char::len_utf8);
                let mut word = String::new();
                push_uppercase(&mut word, &token[..first]);
                push_lowercase(&mut word, &token[first..]);
                decoded.push(&word);
                rule = None;
            }
            (Some("xxup"), _) => {
                let mut word = String::new();
                push_uppercase(&mut word, token);
                decoded.push(&word);
                rule = None;
            }
            (Some(repeat), _) => {
                let Some(times) = count else {
                    count = integer(token);
                    rule = rule.filter(|_| count.is_some());
                    continue;
                };
                // An empty token in a list costs memory as well.
                bytes = bytes.saturating_add(token.len().max(1).saturating_mul(times));
                if bytes > MOST_REPEATED {
                    let message = format!(
                        "{repeat} {times} {token:?} makes a text of more than 1 GiB: leave such counts out before \
                         decoding"
                    );
                    return Err(Error::InvalidArgument(message));
                }
                if repeat == "xxrep" {
                    decoded.push_pieces(std::iter::repeat_n(token, times));
                } else {
                    decoded.extend(std::iter::repeat_n(token, times));
                }
            }
        }
    }
    Ok(decoded)
}

const MOST_REPEATED: usize = 1 << 30;

/// Parses a number as Python's `int` does: spaces around it, a sign, digits of any script, `_` between them. A negative
/// number counts as 0, and one that is too large as the largest number.
fn integer(text: &str) -> Option<usize> {
    let text = text.trim_matches(is_space);
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let mut number = Some(0_usize);
    for part in digits.split('_') {
        number = number.filter(|_| !part.is_empty());
        for character in part.chars() {
            let digit = decimal(character)? as usize;
            number = number.map(|it| it.saturating_mul(10).saturating_add(digit));
        }
    }
    number.map(|it| if text.starts_with('-') { 0 } else { it })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_pythons() {
        let numbers = [
            ("12", 12),
            (" ٣_4\n", 34),
            ("+7", 7),
            ("-7", 0),
            ("99999999999999999999999", usize::MAX),
        ];
        for (text, number) in numbers {
            assert_eq!(integer(text), Some(number), "{text}");
        }
        for text in ["", "-", "_1", "1_", "1__2", "x", "½", "1 2", "+-1"] {
            assert_eq!(integer(text), None, "{text}");
        }
    }

    #[test]
    fn large_counts_are_refused() {
        let tokens: TokenList = ["xxrep", "9999999999", "a"].into_iter().collect();
        let error = decode_special_tokens(&tokens).unwrap_err().to_string();
        assert!(error.contains("xxrep 9999999999 \"a\""), "{error}");
    }
}
