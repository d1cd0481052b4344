//! Datasets of token sequences.

use std::fmt;
use std::sync::Arc;

use brigade_data::{BatchContext, BatchedDataset, DataError};
use brigade_torch::Result;

use crate::{Sequence, SequenceBatch, SequenceCollator};

/// A list of token sequences, in memory or made on demand.
pub trait Sequences: fmt::Debug + Send + Sync {
    /// Returns the number of sequences.
    fn len(&self) -> usize;

    /// Returns `true` if there are no sequences.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of tokens of each sequence, for samplers that group by length.
    fn lengths(&self) -> Vec<usize>;

    /// Returns the sequence at an index.
    ///
    /// # Errors
    /// Fails if the index is out of range, or the sequence cannot be read.
    fn get(&self, index: usize) -> Result<Sequence>;
}

impl Sequences for Vec<Sequence> {
    fn len(&self) -> usize {
        self.as_slice().len()
    }

    fn lengths(&self) -> Vec<usize> {
        self.iter().map(|sequence| sequence.ids.len()).collect()
    }

    fn get(&self, index: usize) -> Result<Sequence> {
        let len = self.as_slice().len();
        self.as_slice().get(index).cloned().ok_or(DataError::Index { index, len }.into())
    }
}

impl<S: Sequences + ?Sized> Sequences for Arc<S> {
    fn len(&self) -> usize {
        (**self).len()
    }

    fn lengths(&self) -> Vec<usize> {
        (**self).lengths()
    }

    fn get(&self, index: usize) -> Result<Sequence> {
        (**self).get(index)
    }
}

/// Dataset of sequences with a collator. Batches are [`SequenceBatch`]es.
///
/// ```
/// use brigade_data::{BatchedDataset, DataLoader};
/// use brigade_text::{LengthGrouped, Sequence, SequenceCollator, SequenceData, Sequences};
///
/// let texts: Vec<Sequence> = (1..40).map(|n| Sequence::new(vec![7; n])).collect();
/// let sampler = LengthGrouped::new(texts.lengths(), 8, 42);
/// let data = SequenceData::new(texts, SequenceCollator::new(0).causal());
/// for batch in &DataLoader::new(data).batch_size(8).sampler(sampler).threads(1) {
///     let batch = batch?;
///     assert_eq!(batch.input_ids.size(), batch.attention_mask.size());
/// }
/// // For a Learner whose model takes tokens and mask:
/// let texts = vec![Sequence::new(vec![1, 2]), Sequence::new(vec![3])];
/// let data = SequenceData::new(texts, SequenceCollator::new(0).causal()).map(|batch, _| Ok(batch.masked()));
/// # let _ = DataLoader::new(data);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SequenceData<S> {
    sequences: S,
    collator: SequenceCollator,
}

impl<S: Sequences> SequenceData<S> {
    /// Creates a dataset of sequences and a collator.
    #[must_use]
    pub fn new(sequences: S, collator: SequenceCollator) -> Self {
        Self { sequences, collator }
    }
}

impl<S: Sequences> BatchedDataset for SequenceData<S> {
    type Batch = SequenceBatch;

    fn num_samples(&self) -> usize {
        self.sequences.len()
    }

    fn batch(&self, indices: &[usize], context: &BatchContext) -> Result<SequenceBatch> {
        let sequences = indices.iter().map(|index| self.sequences.get(*index));
        let sequences = sequences.collect::<Result<Vec<_>, _>>()?;
        let seeds: Vec<u64> = indices.iter().map(|index| context.sample_seed(*index)).collect();
        self.collator.collate(&sequences, &seeds)
    }
}
