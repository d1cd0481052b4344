//! Assignment of tokens to words.

use brigade_data::DataError;
use brigade_rank_env::text::counted;
use brigade_torch::Result;

use crate::IGNORED;

/// Returns a label for each token from the labels of the words, for token classification. The label is -100 for tokens
/// that belong to no word and, unless `all_tokens` is `true`, for all tokens of a word but its first.
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

/// Returns the word index of each token from the tokens' offsets in the text: a token that begins where the preceding
/// one ends belongs to the same word, so that `don't` is one word. This is Hugging Face's rule for whole-word masking.
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
