//! Datasets of texts for language models.

use std::sync::Arc;

use brigade_data::{BatchContext, BatchedDataset, DataError};
use brigade_rank_env::text::counted;
use brigade_sampling::{Sampler, Shuffle};
use brigade_torch::{Result, from_vec};
use parking_lot::Mutex;
use tch::Tensor;

use crate::Documents;
use crate::labels::IGNORED;
use crate::stream::Stream;

/// Dataset of texts for a language model, like fastai's `LMDataLoader`. Batches are `(x, y)` of `i64 [rows, tokens]`,
/// where `y` contains the next token for each one of `x`.
///
/// The texts are concatenated, and the result is cut into `rows` streams of equal length, which are read in parallel:
/// sample `k` of the dataset is row `k % rows` at step `k / rows`, and has `seq_len` tokens, or fewer at the last step.
/// So row `i` of a batch continues row `i` of the batch before, and a model can keep its hidden state. The tokens at
/// the end that do not fill all rows are left out, unless [`every_token`](Self::every_token) is set.
///
/// `rows` is the batch size of all ranks together. With Accelerate's sharding scheme, with or without `split_batches`,
/// rank `r` of `w` has the rows from `r * rows / w` on at every step; a loader whose batches have other samples fails
/// at its first batch. The other schemes, torch's and fastai's, break the streams.
///
/// The loader must not shuffle. With [`shuffle`](Self::shuffle), the dataset itself puts its texts in a new order in
/// each epoch, by the loader's seed. Texts are not copied, and are read when a batch needs them; an order takes 16
/// bytes for each text.
///
/// ```
/// use brigade_data::DataLoader;
/// use brigade_text::LanguageModelData;
///
/// let texts = vec![(0..30).collect::<Vec<i64>>(), (30..50).collect()];
/// let data = LanguageModelData::new(texts, 2, 10)?;
/// let loader = DataLoader::new(data).batch_size(2);
/// let batches = loader.iter().collect::<Result<Vec<_>, _>>()?;
/// let (x, y) = &**batches.get(1).expect("24 tokens of each row are three steps");
/// assert_eq!(i64::try_from(x.get(1).get(0))?, 34);
/// assert_eq!(i64::try_from(y.get(1).get(0))?, 35);
/// assert_eq!(batches.iter().map(|batch| batch.0.size()[1]).collect::<Vec<_>>(), [10, 10, 4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct LanguageModelData<D> {
    documents: D,
    rows: usize,
    seq_len: usize,
    shuffle: bool,
    every_token: bool,
    /// Tokens of all texts.
    tokens: usize,
    /// The streams of the last two epochs that were asked for: threads begin one before the other is over.
    streams: Mutex<Vec<(StreamKey, Arc<Stream>)>>,
}

/// The seed and the epoch that an order follows from; `None` for the texts' own.
type StreamKey = Option<(u64, u64)>;

impl<D: Documents> LanguageModelData<D> {
    /// Creates a dataset that divides the tokens into `rows` streams. A batch has the next `seq_len` tokens of each
    /// stream (fastai: 72).
    ///
    /// # Errors
    /// [`DataError::Unfit`] if `rows` or `seq_len` is 0, or there are too few tokens for one step of one token.
    pub fn new(documents: D, rows: usize, seq_len: usize) -> Result<Self> {
        let unfit = |message| Err(DataError::Unfit { message }.into());
        if rows == 0 || seq_len == 0 {
            return unfit(format!(
                "a batch of a language model cannot have {} of {}: both must be at least 1",
                counted(rows, "row"),
                counted(seq_len, "token")
            ));
        }
        let tokens: usize = (0..documents.len()).map(|document| documents.tokens(document)).sum();
        if tokens <= rows {
            return unfit(format!(
                "a batch of {} takes at least {} tokens, found {} in {}; give more texts, or a smaller batch size \
                 (the rows of all ranks count)",
                counted(rows, "row"),
                rows + 1,
                tokens,
                counted(documents.len(), "text")
            ));
        }
        let streams = Mutex::default();
        Ok(Self { documents, rows, seq_len, shuffle: false, every_token: false, tokens, streams })
    }

    /// Sets whether the texts are put in a new order in each epoch, for training. Defaults to `false`.
    #[must_use]
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.shuffle = shuffle;
        self
    }

    /// Sets whether the tokens at the end that do not fill all rows are included. Defaults to `false`, as in fastai. If
    /// they are, the first rows are one token longer, and the others have the target -100 at the last step, which
    /// losses ignore. The last step may then have few targets: weight its loss by their number.
    #[must_use]
    pub fn every_token(mut self, every: bool) -> Self {
        self.every_token = every;
        self
    }

    /// Returns the number of targets in an epoch, over all rows.
    #[must_use]
    pub fn targets(&self) -> usize {
        if self.every_token { self.tokens - 1 } else { self.targets_of_rows() * self.rows }
    }

    /// Returns the number of steps in an epoch. A step is one batch of all ranks together.
    #[must_use]
    pub fn steps(&self) -> usize {
        self.longest_row().div_ceil(self.seq_len)
    }

    /// Targets that every row has.
    fn targets_of_rows(&self) -> usize {
        (self.tokens - 1) / self.rows
    }

    /// Rows with one target more.
    fn longer_rows(&self) -> usize {
        if self.every_token { (self.tokens - 1) % self.rows } else { 0 }
    }

    fn longest_row(&self) -> usize {
        self.targets_of_rows() + usize::from(self.longer_rows() > 0)
    }

    /// The step of a batch, if its samples are the rows that belong to its rank.
    fn step_of(&self, indices: &[usize], context: &BatchContext) -> Result<usize> {
        let len = self.num_samples();
        if let Some(&index) = indices.iter().find(|index| **index >= len) {
            return Err(DataError::Index { index, len }.into());
        }
        let first = indices.first().copied().ok_or(DataError::EmptyBatch)?;
        let consecutive = indices.iter().enumerate().all(|(row, index)| first + row == *index);
        let (step, row) = (first / self.rows, first % self.rows);
        if !consecutive || row + indices.len() > self.rows {
            return Err(DataError::Options {
                message: format!(
                    "a batch of {} from sample {first} on is not a step of a language model with {}: the loader \
                     must not shuffle, and its batch size must be the rows divided by the number of ranks",
                    counted(indices.len(), "sample"),
                    counted(self.rows, "row")
                ),
            }.into());
        }
        if row != context.rank * indices.len() {
            return Err(DataError::Options {
                message: format!(
                    "rank {} has {} from row {row} on, and the next step would be another stream: make the data \
                     set with as many rows as all ranks have together, which are {} now",
                    context.rank,
                    counted(indices.len(), "row"),
                    self.rows
                ),
            }.into());
        }
        Ok(step)
    }

    fn stream(&self, context: &BatchContext) -> Arc<Stream> {
        let key = self.shuffle.then_some((context.seed, context.epoch));
        let mut streams = self.streams.lock();
        if let Some((_, stream)) = streams.iter().find(|(found, _)| *found == key) {
            return Arc::clone(stream);
        }
        let len = self.documents.len();
        let order = key.map(|(seed, epoch)| Shuffle::new(len, seed).order(epoch));
        let stream = Arc::new(Stream::new(&self.documents, order));
        streams.truncate(1);
        streams.insert(0, (key, Arc::clone(&stream)));
        stream
    }
}

impl<D: Documents> BatchedDataset for LanguageModelData<D> {
    type Batch = (Tensor, Tensor);

    fn num_samples(&self) -> usize {
        self.steps() * self.rows
    }

    fn batch(&self, indices: &[usize], context: &BatchContext) -> Result<Self::Batch> {
        let step = self.step_of(indices, context)?;
        let done = step * self.seq_len;
        let tokens = self.seq_len.min(self.longest_row() - done);
        let stream = self.stream(context);
        let cells = indices.len() * tokens;
        let [mut x, mut y] = [(); 2].map(|()| Vec::<i64>::with_capacity(cells));
        let mut ids = Vec::with_capacity(tokens + 1);
        for index in indices {
            let row = index % self.rows;
            let start = row * self.targets_of_rows() + row.min(self.longer_rows()) + done;
            let end = (start + tokens + 1).min(self.tokens);
            ids.clear();
            stream.read(&self.documents, start..end, &mut ids)?;
            x.extend(ids.iter().take(tokens));
            let targets = self.targets_of_rows() + usize::from(row < self.longer_rows()) - done;
            y.extend(ids.iter().skip(1).take(targets));
            y.resize(x.len(), IGNORED);
        }
        let shape = [indices.len() as i64, tokens as i64];
        Ok((from_vec(x, &shape)?, from_vec(y, &shape)?))
    }
}
