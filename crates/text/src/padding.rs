//! Padding of texts to one length.

use brigade_data::DataError;
use brigade_tokens::Side;
use brigade_torch::{Result, from_vec};
use tch::Tensor;

/// Rule by which texts are padded to one length.
///
/// ```
/// use brigade_text::Padding;
/// use brigade_tokens::Side;
///
/// assert_eq!(Padding::at(Side::Right).pad(&[7, 8], 5), [7, 8, 1, 1, 1]); // fastai's pad_input
/// assert_eq!(Padding::chunks(2).pad(&[7, 8], 5), [1, 1, 7, 8, 1]); // fastai's pad_chunk
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Padding {
    side: Side,
    chunk: Option<usize>,
    id: i64,
}

impl Padding {
    /// Creates a padding on one side, with the token id 1: fastai's `pad_input`.
    #[must_use]
    pub fn at(side: Side) -> Self {
        Self { side, chunk: None, id: 1 }
    }

    /// Creates a padding in chunks, with the token id 1: whole chunks of `seq_len` tokens (fastai: 72) before a text,
    /// and the rest after it, like fastai's `pad_chunk` and `Pad_Chunk`. A classifier that reads `seq_len` tokens at a
    /// time needs it, so that all texts end in the same chunk and no chunk begins with padding and continues with a
    /// text.
    #[must_use]
    pub fn chunks(seq_len: usize) -> Self {
        Self { side: Side::Left, chunk: Some(seq_len.max(1)), id: 1 }
    }

    /// Sets the id of the padding token. Defaults to 1.
    #[must_use]
    pub fn id(mut self, id: i64) -> Self {
        self.id = id;
        self
    }

    /// Returns the id of the padding token.
    #[must_use]
    pub fn pad_id(&self) -> i64 {
        self.id
    }

    /// Returns a text padded to `length` tokens. A longer text stays as it is.
    #[must_use]
    pub fn pad(&self, ids: &[i64], length: usize) -> Vec<i64> {
        let mut row = Vec::with_capacity(length);
        self.append(ids, length, &mut row);
        row
    }

    fn append(&self, ids: &[i64], length: usize, rows: &mut Vec<i64>) {
        let (start, missing) = (rows.len(), length.saturating_sub(ids.len()));
        let before = match (self.side, self.chunk) {
            (Side::Right, _) => 0,
            (Side::Left, None) => missing,
            (Side::Left, Some(chunk)) => missing / chunk * chunk,
        };
        rows.resize(start + before, self.id);
        rows.extend_from_slice(ids);
        rows.resize(start + ids.len() + missing, self.id);
    }

    /// Returns the texts as a padded tensor `i64 [texts, longest]`.
    ///
    /// # Errors
    /// [`DataError::EmptyBatch`] if there are no texts.
    pub fn tensor<T: AsRef<[i64]>>(&self, texts: &[T]) -> Result<Tensor> {
        let longest = texts.iter().map(|text| text.as_ref().len()).max();
        let longest = longest.ok_or(DataError::EmptyBatch)?;
        let mut rows = Vec::with_capacity(texts.len() * longest);
        texts.iter().for_each(|text| self.append(text.as_ref(), longest, &mut rows));
        from_vec(rows, &[texts.len() as i64, longest as i64])
    }
}
