//! Words and their tokens.

use brigade_data::DataError;
use brigade_rank_env::text::counted;
use brigade_torch::Result;

use crate::IGNORED;

/// Returns the label of each token's word, for token classification. It is -100 for tokens outside of words, and unless
/// `all_tokens` for all tokens of a word except the first.
///
/// ```
/// use brigade_text::align_labels;
///
/// let words = [None, Some(0), Some(1), Some(1), None]; // [CLS] Hugging Fa ##ce [SEP]
/// assert_eq!(align_labels(&words, &[3, 4], false)?, [-100, 3, 4, -100, -100]);
/// assert_eq!(align_labels(&words, &[3, 4], true)?, [-100, 3, 4, 4, -100]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// [`DataError::Unfit`] for a word without a label.
pub fn align_labels(words: &[Option<u32>], labels: &[i64], all_tokens: bool) -> Result<Vec<i64>> {
    let mut previous = None;
    let label = |word: &Option<u32>| {
        let first = *word != previous;
        previous = *word;
        let Some(word) = word else { return Ok(IGNORED) };
        let label = labels.get(*word as usize).ok_or_else(|| DataError::Unfit {
            message: format!(
                "word {word} has no label, found {}: give one for each word of the text",
                counted(labels.len(), "label")
            ),
        })?;
        Ok(if first || all_tokens { *label } else { IGNORED })
    };
    words.iter().map(label).collect()
}

/// Finds words by the offsets of tokens in their text: a token that begins where the previous one ends belongs to the
/// same word, so that `don't` is one word regardless of its tokens. Hugging Face masks whole words by the same rule.
/// Special tokens belong to no word.
///
/// ```
/// use brigade_text::words_of_offsets;
///
/// let offsets = [(0, 0), (0, 2), (2, 5), (6, 7), (0, 0)]; // [CLS] un ##der a [SEP]
/// let special = [true, false, false, false, true];
/// let words = words_of_offsets(&offsets, &special);
/// assert_eq!(words, [None, Some(0), Some(0), Some(1), None]);
/// ```
#[must_use]
pub fn words_of_offsets(offsets: &[(usize, usize)], special: &[bool]) -> Vec<Option<u32>> {
    let mut words = Vec::with_capacity(offsets.len());
    let mut count = 0;
    let mut end_of_word = None;
    for (&(start, end), &special) in offsets.iter().zip(special) {
        if special {
            end_of_word = None;
            words.push(None);
            continue;
        }
        if end_of_word != Some(start) {
            count += 1;
        }
        end_of_word = Some(end);
        words.push(Some(count - 1));
    }
    words
}
