//! Packing: texts in rows of one length, with little or no padding.

use std::cmp::Reverse;

use brigade_data::{Batch, BatchContext, BatchedDataset, DataError};
use brigade_rank_env::text::counted;
use brigade_torch::{Result, from_vec};
use tch::Tensor;

use crate::collate::block_mask;
use crate::stream::Stream;
use crate::{Documents, IGNORED, Sequence, Sequences};

/// Concatenated texts, cut into sequences of one length, like `group_texts` of Hugging Face's examples. An incomplete
/// sequence at the end is left out. A [`SequenceCollator`](crate::SequenceCollator) adds labels.
///
/// ```
/// use brigade_text::{Blocks, Sequences};
///
/// let blocks = Blocks::new(vec![vec![1i64, 2, 3], vec![4, 5, 6, 7]], 2)?;
/// assert_eq!((blocks.len(), blocks.get(1)?.ids), (3, vec![3, 4]));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct Blocks<D> {
    documents: D,
    stream: Stream,
    tokens: usize,
    blocks: usize,
}

impl<D: Documents> Blocks<D> {
    /// Cuts texts into sequences of `tokens` tokens.
    ///
    /// # Errors
    /// [`DataError::Unfit`] if `tokens` is 0, or the texts have fewer tokens.
    pub fn new(documents: D, tokens: usize) -> Result<Self> {
        let all: usize = (0..documents.len()).map(|document| documents.tokens(document)).sum();
        if tokens == 0 || all < tokens {
            return Err(DataError::Unfit {
                message: format!(
                    "{} of {} in all cannot be cut into sequences of {tokens}: give more texts, or shorter \
                     sequences of at least 1 token",
                    counted(documents.len(), "text"),
                    counted(all, "token")
                ),
            }.into());
        }
        let stream = Stream::new(&documents, None);
        Ok(Self { documents, stream, tokens, blocks: all / tokens })
    }
}

impl<D: Documents> Sequences for Blocks<D> {
    fn len(&self) -> usize {
        self.blocks
    }

    fn lengths(&self) -> Vec<usize> {
        vec![self.tokens; self.blocks]
    }

    fn get(&self, index: usize) -> Result<Sequence> {
        if index >= self.blocks {
            return Err(DataError::Index { index, len: self.blocks }.into());
        }
        let mut ids = Vec::with_capacity(self.tokens);
        let range = index * self.tokens..(index + 1) * self.tokens;
        self.stream.read(&self.documents, range, &mut ids)?;
        Ok(Sequence::new(ids))
    }
}

/// Dataset of packed texts for a causal language model: several whole texts in a row, with little padding, where no
/// text attends to another.
///
/// Rows are filled by first-fit decreasing: the longest texts first, each into the first row that has room. Texts that
/// are longer than a row are cut into pieces, which count as texts. The rows are the same on every rank and in every
/// epoch; a loader may shuffle them.
///
/// ```
/// use brigade_data::DataLoader;
/// use brigade_text::PackedTexts;
///
/// let texts = vec![vec![7i64, 7], vec![8, 8, 8, 8], vec![9, 9, 9]];
/// let packed = PackedTexts::new(texts, 6, 0)?;
/// assert!(packed.padding() < 0.26);
/// let loader = DataLoader::new(packed).batch_size(2);
/// let batch = loader.iter().next().expect("two rows")?;
/// assert_eq!(batch.input_ids, tch::Tensor::from_slice2(&[[8i64, 8, 8, 8, 7, 7], [9, 9, 9, 0, 0, 0]]));
/// assert_eq!(batch.position_ids, tch::Tensor::from_slice2(&[[0i64, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 0]]));
/// assert_eq!(batch.sequence_ids, tch::Tensor::from_slice2(&[[1i64, 1, 1, 1, 2, 2], [1, 1, 1, 0, 0, 0]]));
/// assert_eq!(batch.attention_mask(true)?.size(), [2, 1, 6, 6]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct PackedTexts<D> {
    documents: D,
    rows: Vec<Vec<Piece>>,
    tokens: usize,
    pad_id: i64,
}

/// Text, or a part of one that is longer than a row.
#[derive(Clone, Copy, Debug)]
struct Piece {
    document: usize,
    start: usize,
    tokens: usize,
}

/// A batch of packed rows.
#[derive(Batch, Debug)]
#[batch(crate = "brigade_data")]
pub struct PackedBatch {
    /// Token ids `i64 [rows, tokens]`.
    pub input_ids: Tensor,
    /// Position ids `i64 [rows, tokens]`: the position of each token in its text.
    pub position_ids: Tensor,
    /// Sequence ids `i64 [rows, tokens]`: the number of the text in its row, from 1, and 0 for padding.
    pub sequence_ids: Tensor,
    /// Labels `i64 [rows, tokens]`: the token ids, not shifted, with -100 for padding and for the first token of each
    /// text, which must not be predicted from the text before it, like `DataCollatorWithFlattening`.
    pub labels: Tensor,
}

impl PackedBatch {
    /// Returns the attention mask `bool [rows, 1, tokens, tokens]` on the batch's device, by which tokens attend only
    /// to their own text, and with `causal` only to themselves and earlier tokens. Pass it with `position_ids` in the
    /// `Tokens` of a transformer of `brigade_models`; the outputs are then those of each text alone.
    ///
    /// # Errors
    /// Fails if libtorch fails.
    pub fn attention_mask(&self, causal: bool) -> Result<Tensor> {
        block_mask(&self.sequence_ids, causal)
    }
}

impl<D: Documents> PackedTexts<D> {
    /// Packs texts into rows of `tokens` tokens, padded with `pad_id`. It takes 24 bytes of memory for each text.
    ///
    /// # Errors
    /// [`DataError::Unfit`] if `tokens` is 0 or all texts are empty.
    pub fn new(documents: D, tokens: usize, pad_id: i64) -> Result<Self> {
        if tokens == 0 {
            let message = "rows of 0 tokens hold no text: give at least 1".to_owned();
            return Err(DataError::Unfit { message }.into());
        }
        let mut pieces = Vec::new();
        for document in 0..documents.len() {
            let length = documents.tokens(document);
            let parts = (0..length).step_by(tokens);
            pieces.extend(parts.map(|start| Piece {
                document,
                start,
                tokens: tokens.min(length - start),
            }));
        }
        if pieces.is_empty() {
            let message =
                format!("none of {} has a token to pack", counted(documents.len(), "text"));
            return Err(DataError::Unfit { message }.into());
        }
        pieces.sort_by_key(|piece| Reverse(piece.tokens));
        let rows = first_fit(&pieces, tokens);
        Ok(Self { documents, rows, tokens, pad_id })
    }

    /// Returns the share of padding in the rows, from 0 to 1.
    #[must_use]
    pub fn padding(&self) -> f64 {
        let filled: usize = self.rows.iter().flatten().map(|piece| piece.tokens).sum();
        1.0 - filled as f64 / (self.rows.len() * self.tokens) as f64
    }
}

/// Puts each piece into the first row that has room for it, in their order.
fn first_fit(pieces: &[Piece], tokens: usize) -> Vec<Vec<Piece>> {
    // A tree of the free space in rows: a node has the maximum of its two halves, so that finding the first row with
    // enough room takes as many steps as the tree is deep.
    let leaves = pieces.len().next_power_of_two();
    let mut room = vec![tokens; 2 * leaves];
    let mut rows: Vec<Vec<Piece>> = Vec::new();
    for piece in pieces {
        let mut node = 1;
        while node < leaves {
            node = if room[2 * node] >= piece.tokens { 2 * node } else { 2 * node + 1 };
        }
        room[node] -= piece.tokens;
        let row = node - leaves;
        if row == rows.len() {
            rows.push(Vec::new());
        }
        rows[row].push(*piece);
        while node > 1 {
            node /= 2;
            room[node] = room[2 * node].max(room[2 * node + 1]);
        }
    }
    rows
}

impl<D: Documents> BatchedDataset for PackedTexts<D> {
    type Batch = PackedBatch;

    fn num_samples(&self) -> usize {
        self.rows.len()
    }

    fn batch(&self, indices: &[usize], _: &BatchContext) -> Result<PackedBatch> {
        let cells = indices.len() * self.tokens;
        let mut ids = Vec::with_capacity(cells);
        let [mut positions, mut sequences, mut labels] =
            [(); 3].map(|()| Vec::<i64>::with_capacity(cells));
        for (row, &index) in indices.iter().enumerate() {
            let len = self.rows.len();
            let pieces = self.rows.get(index).ok_or(DataError::Index { index, len })?;
            for (piece, number) in pieces.iter().zip(1..) {
                let from = ids.len();
                let range = piece.start..piece.start + piece.tokens;
                self.documents.read(piece.document, range, &mut ids)?;
                labels.push(IGNORED);
                labels.extend(ids.iter().skip(from + 1));
                positions.extend(0..piece.tokens as i64);
                sequences.resize(positions.len(), number);
            }
            let end = (row + 1) * self.tokens;
            ids.resize(end, self.pad_id);
            positions.resize(end, 0);
            sequences.resize(end, 0);
            labels.resize(end, IGNORED);
        }
        let shape = [indices.len() as i64, self.tokens as i64];
        Ok(PackedBatch {
            input_ids: from_vec(ids, &shape)?,
            position_ids: from_vec(positions, &shape)?,
            sequence_ids: from_vec(sequences, &shape)?,
            labels: from_vec(labels, &shape)?,
        })
    }
}
