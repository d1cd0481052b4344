//! Datasets of texts with labels.

use std::fmt;

use brigade_data::{BatchContext, BatchedDataset, Collate, DataError};
use brigade_rank_env::text::counted;
use brigade_torch::{Result, TensorTree};
use tch::Tensor;

use crate::documents::read_whole;
use crate::{Documents, Padding};

/// Dataset of texts with a label each, for a text classifier. Batches are `(ids, labels)`, where ids are `i64 [rows,
/// longest]`.
///
/// The labels of a batch are collated by [`Collate`]: `i64` for a class becomes `i64 [rows]`, `Vec<f32>` for several
/// classes or numbers becomes `f32 [rows, n]`, and an `Option<i64>` of `None` becomes a batch without labels.
///
/// Rows are padded to the longest text of their batch, so that texts of similar length should be in one batch: see
/// [`SortedSampler`](crate::SortedSampler).
///
/// ```
/// use brigade_data::DataLoader;
/// use brigade_text::{LabelledTexts, Padding, SortedSampler};
///
/// let texts = vec![vec![2i64, 9], vec![2, 8, 7, 6, 5], vec![2], vec![2, 4, 3]];
/// let data = LabelledTexts::new(texts, vec![0i64, 1, 1, 0], Padding::chunks(2))?;
/// let sampler = SortedSampler::longest_first(data.lengths());
/// let loader = DataLoader::new(data).batch_size(2).sampler(sampler);
/// let batches = loader.iter().collect::<Result<Vec<_>, _>>()?;
/// assert_eq!(batches[0].0, tch::Tensor::from_slice2(&[[2i64, 8, 7, 6, 5], [1, 1, 2, 4, 3]]));
/// assert_eq!(batches[1].1, tch::Tensor::from_slice(&[0i64, 1]));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub struct LabelledTexts<D, L> {
    documents: D,
    labels: Vec<L>,
    padding: Padding,
}

/// Dataset of texts without labels, for prediction.
pub type UnlabelledTexts = LabelledTexts<Box<dyn Documents>, Option<i64>>;

impl<D: Documents, L> LabelledTexts<D, L> {
    /// Creates a dataset of texts with a label for each.
    ///
    /// # Errors
    /// [`DataError::Unfit`] if the numbers of labels and texts differ, or a text has no tokens.
    pub fn new(documents: D, labels: Vec<L>, padding: Padding) -> Result<Self> {
        let texts = documents.len();
        if labels.len() != texts {
            let message = format!(
                "found {} for {}; give one for each",
                counted(labels.len(), "label"),
                counted(texts, "text")
            );
            return Err(DataError::Unfit { message }.into());
        }
        if let Some(empty) = (0..texts).find(|text| documents.tokens(*text) == 0) {
            let message = format!(
                "text {empty} of {texts} has no token, and a row of padding alone cannot be classified: \
                 leave it out, or have the tokenizer mark the beginning of each text"
            );
            return Err(DataError::Unfit { message }.into());
        }
        Ok(Self { documents, labels, padding })
    }

    /// Returns the number of tokens of each text, for [`SortedSampler`](crate::SortedSampler) and
    /// [`LengthGrouped`](crate::LengthGrouped).
    #[must_use]
    pub fn lengths(&self) -> Vec<usize> {
        (0..self.documents.len()).map(|text| self.documents.tokens(text)).collect()
    }

    /// Returns the label of each text.
    #[must_use]
    pub fn labels(&self) -> &[L] {
        &self.labels
    }
}

impl<D, L> BatchedDataset for LabelledTexts<D, L>
where
    D: Documents,
    L: Collate + Send + Sync,
    (Tensor, L::Batch): TensorTree + Send + 'static,
{
    type Batch = (Tensor, L::Batch);

    fn num_samples(&self) -> usize {
        self.labels.len()
    }

    fn batch(&self, indices: &[usize], _: &BatchContext) -> Result<Self::Batch> {
        let mut texts = Vec::with_capacity(indices.len());
        let mut labels = Vec::with_capacity(indices.len());
        for &index in indices {
            let mut ids = Vec::new();
            read_whole(&self.documents, index, &mut ids)?;
            texts.push(ids);
            labels.extend(self.labels.get(index));
        }
        Ok((self.padding.tensor(&texts)?, L::collate(&labels)?))
    }
}

impl<D: fmt::Debug, L> fmt::Debug for LabelledTexts<D, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LabelledTexts")
            .field("documents", &self.documents)
            .field("labels", &self.labels.len())
            .field("padding", &self.padding)
            .finish()
    }
}
