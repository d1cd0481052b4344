//! Generated text.

use brigade_torch::Result;

use super::{CausalModel, GeneratedTokens, refused};

/// Decoder of tokens to text.
pub(super) type Decode<'m> = Box<dyn Fn(&[i64]) -> Result<String> + 'm>;

/// Strings that end a text.
pub(super) struct StopStrings<'a> {
    strings: Vec<&'a str>,
    decode: Option<&'a Decode<'a>>,
    /// Number of tokens at the end of a text that are decoded.
    window: usize,
}

impl<'a> StopStrings<'a> {
    pub(super) fn new(
        strings: impl IntoIterator<Item = &'a String>,
        decode: Option<&'a Decode<'_>>,
    ) -> Result<Self> {
        let strings: Vec<&str> = strings.into_iter().map(String::as_str).collect();
        if decode.is_none() && !strings.is_empty() {
            return Err(refused(format!(
                "stop_strings {strings:?} need the text of tokens: give the function with `decoded_by`"
            )));
        }
        // Each token of the string has at least one byte of it; decoders omit a space before the first one.
        let window = strings.iter().map(|stop| stop.len()).max().unwrap_or(0) + 2;
        Ok(Self { strings, decode, window })
    }

    /// Returns `true` if the last of the tokens completes one of the strings.
    pub(super) fn are_met(&self, tokens: &[i64]) -> Result<bool> {
        let Some(decode) = self.decode.filter(|_| !self.strings.is_empty()) else {
            return Ok(false);
        };
        let tail = &tokens[tokens.len().saturating_sub(self.window)..];
        let (now, before) = (decode(tail)?, decode(&tail[..tail.len().saturating_sub(1)])?);
        Ok(self.strings.iter().any(|stop| occurrences(&now, stop) > occurrences(&before, stop)))
    }
}

/// Returns the number of occurrences of a string in a text, including overlapping ones.
fn occurrences(text: &str, string: &str) -> usize {
    text.char_indices().filter(|&(place, _)| text[place..].starts_with(string)).count()
}

/// Iterator over generated text: each item contains, for each text of the batch, the characters that the next token
/// adds. A token that ends within a character adds nothing until the character is complete or the text ends. The pieces
/// of a text that has ended ([`GeneratedTokens::ended`]) are empty.
pub struct GeneratedText<'m, M: CausalModel> {
    tokens: GeneratedTokens<'m, M>,
    texts: Vec<Pieces>,
    ended: bool,
}

impl<'m, M: CausalModel> GeneratedText<'m, M> {
    pub(super) fn new(tokens: GeneratedTokens<'m, M>) -> Self {
        let texts = tokens.rows.iter().map(|row| Pieces::after(row.len())).collect();
        Self { tokens, texts, ended: false }
    }

    /// Returns the tokens so far.
    pub fn tokens(&self) -> &GeneratedTokens<'m, M> {
        &self.tokens
    }

    fn pieces(&mut self) -> Result<Vec<String>> {
        let Some(decode) = &self.tokens.decode else {
            return Err(refused(
                "text needs the text of tokens: give the function with `decoded_by`",
            ));
        };
        let rows = self.texts.iter_mut().zip(&self.tokens.rows).zip(&self.tokens.ended);
        rows.map(|((text, row), has_ended)| text.next(row, self.ended || *has_ended, decode))
            .collect()
    }
}

impl<M: CausalModel> Iterator for GeneratedText<'_, M> {
    type Item = Result<Vec<String>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        match self.tokens.next() {
            Some(Ok(_)) => {
                let pieces = self.pieces();
                self.ended = pieces.is_err();
                Some(pieces)
            }
            Some(Err(error)) => {
                self.ended = true;
                Some(Err(error))
            }
            None => {
                self.ended = true;
                // Bytes of an incomplete character at the end.
                let rest = self.pieces();
                let is_empty = rest.as_ref().is_ok_and(|rest| rest.iter().all(String::is_empty));
                (!is_empty).then_some(rest)
            }
        }
    }
}

impl<M: CausalModel> std::fmt::Debug for GeneratedText<'_, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GeneratedText").field("tokens", &self.tokens).finish_non_exhaustive()
    }
}

/// State of the decoding of one text: tokens before `given` have been decoded. Those from `context` on are decoded
/// again with new ones, whose text can depend on them.
#[derive(Debug)]
struct Pieces {
    context: usize,
    given: usize,
}

impl Pieces {
    fn after(tokens: usize) -> Self {
        Self { context: tokens.saturating_sub(5), given: tokens }
    }

    /// Returns the text that the new tokens add: all of it with `all`, otherwise whole characters.
    fn next(&mut self, tokens: &[i64], all: bool, decode: &Decode<'_>) -> Result<String> {
        if tokens.len() == self.given {
            return Ok(String::new());
        }
        let before = decode(&tokens[self.context..self.given])?;
        let now = decode(&tokens[self.context..])?;
        if !all && now.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        (self.context, self.given) = (self.given, tokens.len());
        Ok(now.get(before.len()..).unwrap_or_default().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes<'a>() -> Decode<'a> {
        Box::new(|ids| {
            let bytes: Vec<u8> = ids.iter().map(|&id| id as u8).collect();
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        })
    }

    #[test]
    fn characters_are_given_whole() {
        let decode = bytes();
        let text: Vec<i64> = "aß€!".bytes().map(i64::from).collect();
        let mut pieces = Pieces::after(1);
        let found: Vec<String> = (2..=text.len())
            .map(|end| pieces.next(&text[..end], false, &decode).unwrap())
            .collect();
        assert_eq!(found, ["", "ß", "", "", "€", "!"]);
        let cut = [i64::from(b'a'), 0xe2];
        let mut pieces = Pieces::after(1);
        assert_eq!(pieces.next(&cut, false, &decode).unwrap(), "");
        assert_eq!(pieces.next(&cut, true, &decode).unwrap(), "\u{fffd}");
    }

    #[test]
    fn a_string_stops_where_its_last_token_is() {
        let (decode, strings) = (bytes(), ["bcb".to_owned()]);
        let stops = StopStrings::new(&strings, Some(&decode)).unwrap();
        let text: Vec<i64> = "abcbcba".bytes().map(i64::from).collect();
        let found: Vec<bool> =
            (1..=text.len()).map(|end| stops.are_met(&text[..end]).unwrap()).collect();
        assert_eq!(found, [false, false, false, true, false, true, false]);
        assert!(StopStrings::new(&strings, None).is_err());
    }
}
