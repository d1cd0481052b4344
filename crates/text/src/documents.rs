//! Texts as token ids, in memory or in a file.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use brigade_data::DataError;
use brigade_tokens::TokenIds;
use brigade_torch::Result;

use crate::error::TextError;

/// A list of tokenised texts, whose token ids are read in ranges: from memory, or from a file that is not loaded as a
/// whole.
///
/// Loaders call [`read`](Self::read) from several threads at the same time.
pub trait Documents: fmt::Debug + Send + Sync {
    /// Returns the number of texts.
    fn len(&self) -> usize;

    /// Returns `true` if there are no texts.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of tokens of a text, or 0 if `document` is out of range.
    fn tokens(&self, document: usize) -> usize;

    /// Appends the ids of a range of a text's tokens to `ids`.
    ///
    /// # Errors
    /// Fails if the range is not inside of the text, or the text cannot be read.
    fn read(&self, document: usize, range: Range<usize>, ids: &mut Vec<i64>) -> Result<()>;
}

/// Reads all tokens of a text in place of what `ids` holds.
pub(crate) fn read_whole<D: Documents + ?Sized>(
    documents: &D,
    document: usize,
    ids: &mut Vec<i64>,
) -> Result<()> {
    let len = documents.len();
    if document >= len {
        return Err(DataError::Index { index: document, len }.into());
    }
    ids.clear();
    documents.read(document, 0..documents.tokens(document), ids)
}

macro_rules! lists {
    ($($number:ty),+) => { $(
        impl Documents for Vec<Vec<$number>> {
            fn len(&self) -> usize {
                self.as_slice().len()
            }

            fn tokens(&self, document: usize) -> usize {
                self.get(document).map_or(0, Vec::len)
            }

            fn read(
                &self,
                document: usize,
                range: Range<usize>,
                ids: &mut Vec<i64>,
            ) -> Result<()> {
                let found = self.get(document).and_then(|text| text.get(range.clone()));
                let found = found.ok_or_else(|| outside(document, &range, self.tokens(document)))?;
                ids.extend(found.iter().map(|id| i64::from(*id)));
                Ok(())
            }
        }
    )+ };
}

lists!(i64, u32);

/// Texts of a corpus, with the ids of a vocabulary: in memory, or in a file of the cache.
impl Documents for TokenIds {
    fn len(&self) -> usize {
        self.len()
    }

    fn tokens(&self, document: usize) -> usize {
        self.length(document).unwrap_or_default()
    }

    fn read(&self, document: usize, range: Range<usize>, ids: &mut Vec<i64>) -> Result<()> {
        Ok(self.read(document, range, ids).map_err(TextError::from)?)
    }
}

fn outside(document: usize, range: &Range<usize>, tokens: usize) -> DataError {
    DataError::Unfit {
        message: format!(
            "tokens {} to {} are out of range: text {document} has {tokens}",
            range.start, range.end
        ),
    }
}

macro_rules! through {
    ($($pointer:ident),+) => { $(
        impl<D: Documents + ?Sized> Documents for $pointer<D> {
            fn len(&self) -> usize {
                (**self).len()
            }

            fn tokens(&self, document: usize) -> usize {
                (**self).tokens(document)
            }

            fn read(
                &self,
                document: usize,
                range: Range<usize>,
                ids: &mut Vec<i64>,
            ) -> Result<()> {
                (**self).read(document, range, ids)
            }
        }
    )+ };
}

through!(Arc, Box);

/// Some of the texts, in an order of their own, such as the training or the validation texts.
///
/// ```
/// use brigade_text::{Documents, Subset};
///
/// let texts = vec![vec![2i64, 9], vec![2, 8, 7], vec![2]];
/// let valid = Subset::new(texts, vec![2, 1])?;
/// assert_eq!((valid.len(), valid.tokens(1)), (2, 3));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Subset<D> {
    documents: D,
    indices: Vec<usize>,
}

impl<D: Documents> Subset<D> {
    /// Selects the texts with these indices.
    ///
    /// # Errors
    /// [`DataError::Index`] for an index that is not below the number of texts.
    pub fn new(documents: D, indices: Vec<usize>) -> Result<Self> {
        let len = documents.len();
        match indices.iter().find(|index| **index >= len) {
            Some(&index) => Err(DataError::Index { index, len }.into()),
            None => Ok(Self { documents, indices }),
        }
    }
}

impl<D: Documents> Documents for Subset<D> {
    fn len(&self) -> usize {
        self.indices.len()
    }

    fn tokens(&self, document: usize) -> usize {
        self.indices.get(document).map_or(0, |index| self.documents.tokens(*index))
    }

    fn read(&self, document: usize, range: Range<usize>, ids: &mut Vec<i64>) -> Result<()> {
        let len = self.indices.len();
        let index = self.indices.get(document);
        let index = *index.ok_or(DataError::Index { index: document, len })?;
        self.documents.read(index, range, ids)
    }
}

/// The texts with their tokens in reverse order: fastai's `backwards`.
#[derive(Clone, Debug)]
pub struct Backwards<D>(pub D);

impl<D: Documents> Documents for Backwards<D> {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn tokens(&self, document: usize) -> usize {
        self.0.tokens(document)
    }

    fn read(&self, document: usize, range: Range<usize>, ids: &mut Vec<i64>) -> Result<()> {
        let tokens = self.tokens(document);
        if range.end > tokens {
            return Err(outside(document, &range, tokens).into());
        }
        let before = ids.len();
        self.0.read(document, tokens - range.end..tokens - range.start, ids)?;
        if let Some(read) = ids.get_mut(before..) {
            read.reverse();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(documents: &dyn Documents, document: usize, range: Range<usize>) -> Vec<i64> {
        let mut ids = Vec::new();
        documents.read(document, range, &mut ids).unwrap();
        ids
    }

    #[test]
    fn parts_and_directions_are_views() {
        let texts = Arc::new(vec![vec![1u32, 2, 3, 4], vec![], vec![5, 6]]);
        let part = Subset::new(Arc::clone(&texts), vec![2, 0]).unwrap();
        assert_eq!((read(&part, 0, 0..2), read(&part, 1, 1..3)), (vec![5, 6], vec![2, 3]));
        let backwards = Backwards(part);
        assert_eq!(read(&backwards, 1, 0..4), [4, 3, 2, 1]);
        assert_eq!(read(&backwards, 1, 1..3), [3, 2]);
        assert_eq!((backwards.tokens(0), backwards.tokens(9)), (2, 0));
    }

    #[test]
    fn ranges_that_are_not_there_are_named() {
        let texts = vec![vec![1i64, 2]];
        let error = texts.read(0, 1..3, &mut Vec::new()).unwrap_err().to_string();
        assert_eq!(error, "tokens 1 to 3 are out of range: text 0 has 2");
        let error = Backwards(texts.clone()).read(0, 1..3, &mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains("text 0 has 2"), "{error}");
        assert!(Subset::new(texts.clone(), vec![1]).is_err());
        let part = Subset::new(texts, vec![0]).unwrap();
        assert!(part.read(1, 0..1, &mut Vec::new()).is_err());
    }
}
