//! Collation of token sequences to batches for transformers, like Hugging Face's collators.

use brigade_data::{Batch, DataError};
use brigade_rank_env::text::counted;
use brigade_tokens::{Encoding, Side};
use brigade_torch::{Result, from_vec};
use tch::{Kind, Tensor};

use crate::IGNORED;

mod masked;
mod words;

pub use masked::MaskedTokens;
pub use words::{align_labels, words_of_offsets};

/// Tokens of a text, or of a pair of texts, in the form that a transformer takes.
///
/// ```
/// use brigade_text::{Sequence, SequenceLabel};
///
/// let pair = Sequence::new(vec![101, 7592, 102, 2088, 102])
///     .type_ids(vec![0, 0, 0, 1, 1])
///     .special(vec![true, false, true, false, true])
///     .label(SequenceLabel::Class(1));
/// assert_eq!(pair.ids.len(), 5);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Sequence {
    /// Ids of the tokens.
    pub ids: Vec<i64>,
    /// Token type ids: for a pair of texts, 0 for each token of the first text and 1 for each token of the second.
    pub type_ids: Option<Vec<i64>>,
    /// Special-token mask: `true` for each token that the tokenizer has added, such as `[CLS]`.
    pub special: Option<Vec<bool>>,
    /// Index of the word that each token is a part of, or `None` for a token that belongs to no word.
    pub words: Option<Vec<Option<u32>>>,
    /// Label of the sequence.
    pub label: Option<SequenceLabel>,
}

/// Label of a sequence.
#[derive(Clone, Debug, PartialEq)]
pub enum SequenceLabel {
    /// Class index of the sequence: `i64 [rows]` in a batch.
    Class(i64),
    /// Regression target: `f32 [rows]` in a batch.
    Number(f32),
    /// Several regression targets, or a 0 or 1 for each of several classes: `f32 [rows, n]` in a batch.
    Numbers(Vec<f32>),
    /// A class for each token: `i64 [rows, tokens]` in a batch, with -100 for padding. See [`align_labels`].
    Tokens(Vec<i64>),
}

impl Sequence {
    /// Creates a sequence from token ids.
    #[must_use]
    pub fn new(ids: Vec<i64>) -> Self {
        Self { ids, ..Self::default() }
    }

    /// Sets the token type ids: for a pair of texts, 0 for each token of the first text and 1 for each token of the
    /// second.
    #[must_use]
    pub fn type_ids(mut self, type_ids: Vec<i64>) -> Self {
        self.type_ids = Some(type_ids);
        self
    }

    /// Sets the special-token mask: `true` for each token that the tokenizer has added.
    #[must_use]
    pub fn special(mut self, special: Vec<bool>) -> Self {
        self.special = Some(special);
        self
    }

    /// Sets the index of the word that each token is a part of, or `None` for a token that belongs to no word.
    #[must_use]
    pub fn words(mut self, words: Vec<Option<u32>>) -> Self {
        self.words = Some(words);
        self
    }

    /// Sets the label of the sequence.
    #[must_use]
    pub fn label(mut self, label: SequenceLabel) -> Self {
        self.label = Some(label);
        self
    }

    /// Refuses lists whose length differs from the number of tokens.
    fn check(&self, position: usize) -> Result<()> {
        let tokens = self.ids.len();
        let lengths = [
            ("type id", self.type_ids.as_ref().map(Vec::len)),
            ("special token mark", self.special.as_ref().map(Vec::len)),
            ("word", self.words.as_ref().map(Vec::len)),
            (
                "label",
                match &self.label {
                    Some(SequenceLabel::Tokens(labels)) => Some(labels.len()),
                    _ => None,
                },
            ),
        ];
        match lengths.into_iter().find(|(_, len)| len.is_some_and(|len| len != tokens)) {
            None => Ok(()),
            Some((what, len)) => Err(DataError::Unfit {
                message: format!(
                    "sequence {position} of the batch has {} and {}: give one for each token",
                    counted(tokens, "token"),
                    counted(len.unwrap_or_default(), what)
                ),
            }
            .into()),
        }
    }
}

/// Converts a text or pair that a Hugging Face tokenizer has encoded, with ids, type ids, special tokens and words, as
/// the tokenizer splits words. For other words use [`words_of_offsets`].
impl From<&Encoding> for Sequence {
    fn from(encoding: &Encoding) -> Self {
        let numbers = |list: &[u32]| list.iter().map(|id| i64::from(*id)).collect();
        Self::new(numbers(&encoding.ids))
            .type_ids(numbers(&encoding.type_ids))
            .special(encoding.special_tokens_mask.iter().map(|mask| *mask == 1).collect())
            .words(encoding.word_ids.clone())
    }
}

/// A batch of sequences, as a struct for user-defined loops. For a Learner, [`masked`](Self::masked) and
/// [`typed`](Self::typed) convert it to the tuples that its models take.
#[derive(Batch, Debug)]
#[batch(crate = "brigade_data")]
pub struct SequenceBatch {
    /// Token ids `i64 [rows, tokens]`.
    pub input_ids: Tensor,
    /// Attention mask `i64 [rows, tokens]`: 1 for a token and 0 for padding.
    pub attention_mask: Tensor,
    /// Token type ids, `i64 [rows, tokens]`: for a pair of texts, 0 for each token of the first text and 1 for each
    /// token of the second. `None` if the sequences have none.
    pub token_type_ids: Option<Tensor>,
    /// Labels of the sequences, see [`SequenceLabel`].
    pub labels: Option<Tensor>,
}

impl SequenceBatch {
    /// Returns `((input_ids, attention_mask), labels)`.
    pub fn masked(self) -> ((Tensor, Tensor), Option<Tensor>) {
        ((self.input_ids, self.attention_mask), self.labels)
    }

    /// Returns `((input_ids, attention_mask, token_type_ids), labels)`, with type ids of 0 if the sequences have none.
    ///
    /// # Errors
    /// Fails if libtorch fails.
    #[allow(clippy::type_complexity, reason = "the tuple is what a Learner takes")]
    pub fn typed(self) -> Result<((Tensor, Tensor, Tensor), Option<Tensor>)> {
        let types = match self.token_type_ids {
            Some(types) => types,
            None => self.input_ids.f_zeros_like()?,
        };
        Ok(((self.input_ids, self.attention_mask, types), self.labels))
    }
}

/// Collates sequences to batches: pads them to one length and, for language models, uses their tokens as labels.
///
/// ```
/// use brigade_text::{Sequence, SequenceCollator};
///
/// let sequences = [Sequence::new(vec![5, 6, 7]), Sequence::new(vec![8])];
/// let batch = SequenceCollator::new(0).multiple_of(4).causal().collate(&sequences, &[])?;
/// assert_eq!(batch.input_ids, tch::Tensor::from_slice2(&[[5i64, 6, 7, 0], [8, 0, 0, 0]]));
/// assert_eq!(batch.attention_mask, tch::Tensor::from_slice2(&[[1i64, 1, 1, 0], [1, 0, 0, 0]]));
/// let labels = tch::Tensor::from_slice2(&[[5i64, 6, 7, -100], [8, -100, -100, -100]]);
/// assert_eq!(batch.labels, Some(labels));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct SequenceCollator {
    pad_id: i64,
    pad_type_id: i64,
    side: Side,
    length: Option<usize>,
    multiple_of: usize,
    vocab_size: Option<i64>,
    objective: Objective,
}

/// Source of the labels.
#[derive(Clone, Debug)]
enum Objective {
    Given,
    Causal,
    Masked(MaskedTokens),
}

impl SequenceCollator {
    /// Creates a collator that pads sequences on the right with the token `pad_id`, to the length of the longest one in
    /// the batch: `DataCollatorWithPadding`, or with [`SequenceLabel::Tokens`] `DataCollatorForTokenClassification`.
    #[must_use]
    pub fn new(pad_id: i64) -> Self {
        Self {
            pad_id,
            pad_type_id: 0,
            side: Side::Right,
            length: None,
            multiple_of: 1,
            vocab_size: None,
            objective: Objective::Given,
        }
    }

    /// Sets the side of the padding. Defaults to the right.
    #[must_use]
    pub fn side(mut self, side: Side) -> Self {
        self.side = side;
        self
    }

    /// Sets the token type id of padding. Defaults to 0.
    #[must_use]
    pub fn pad_type_id(mut self, id: i64) -> Self {
        self.pad_type_id = id;
        self
    }

    /// Sets the length to which all sequences are padded, instead of that of the longest one: `padding="max_length"`. A
    /// longer sequence is an error.
    #[must_use]
    pub fn max_length(mut self, tokens: usize) -> Self {
        self.length = Some(tokens);
        self
    }

    /// Rounds the padded length up to a multiple of `tokens`, for tensor cores (8) or for fewer different shapes:
    /// `pad_to_multiple_of`. Defaults to 1.
    #[must_use]
    pub fn multiple_of(mut self, tokens: usize) -> Self {
        self.multiple_of = tokens.max(1);
        self
    }

    /// Sets the model's vocabulary size, so that a token id that is not below it is an error that names the token.
    /// Defaults to no check. On the CPU a model reports such an id itself; on a GPU the kernel fails and ends the
    /// program. The check runs on the host, where batches are made.
    ///
    /// ```
    /// use brigade_text::{Sequence, SequenceCollator};
    ///
    /// let sequences = [Sequence::new(vec![5, 6]), Sequence::new(vec![8, 50257])];
    /// let error = SequenceCollator::new(0).vocab_size(50257).collate(&sequences, &[]).unwrap_err();
    /// assert!(error.to_string().starts_with("token 50257 at place 1 of sequence 1 of the batch is beyond"));
    /// ```
    #[must_use]
    pub fn vocab_size(mut self, tokens: i64) -> Self {
        self.vocab_size = Some(tokens);
        self
    }

    /// Uses the tokens themselves as labels, and -100 for padding, like `DataCollatorForLanguageModeling(mlm=False)`.
    /// As in transformers, labels are not shifted: the loss compares a prediction with the next label. Unlike in
    /// transformers, only padding is ignored and not every token with the id of the padding token, so that a model
    /// whose padding token is the end-of-text token learns to end a text.
    #[must_use]
    pub fn causal(mut self) -> Self {
        self.objective = Objective::Causal;
        self
    }

    /// Masks tokens, and uses the original tokens as labels: `DataCollatorForLanguageModeling`.
    #[must_use]
    pub fn masked(mut self, masked: MaskedTokens) -> Self {
        self.objective = Objective::Masked(masked);
        self
    }

    /// Collates sequences into a batch. If tokens are masked ([`masked`](Self::masked)), `seeds` must have one seed for
    /// each sequence; otherwise it is not used.
    ///
    /// # Errors
    /// [`DataError::EmptyBatch`] if there are no sequences; [`DataError::Collate`] if only some have type ids,
    /// or their labels are of different kinds; [`DataError::Unfit`] for a sequence that is too long, or whose lists
    /// differ in length.
    pub fn collate(&self, sequences: &[Sequence], seeds: &[u64]) -> Result<SequenceBatch> {
        for (position, sequence) in sequences.iter().enumerate() {
            sequence.check(position)?;
        }
        match &self.objective {
            Objective::Given => self.join(sequences),
            Objective::Causal => {
                let label = |sequence: &Sequence| {
                    let label = Some(SequenceLabel::Tokens(sequence.ids.clone()));
                    Sequence { label, ..sequence.clone() }
                };
                self.join(&sequences.iter().map(label).collect::<Vec<_>>())
            }
            Objective::Masked(masked) => {
                if seeds.len() != sequences.len() {
                    let message = format!(
                        "found {} for {} whose tokens are to be hidden: give one for each",
                        counted(seeds.len(), "seed"),
                        counted(sequences.len(), "sequence")
                    );
                    return Err(DataError::Unfit { message }.into());
                }
                let pairs = sequences.iter().zip(seeds);
                let hidden = pairs.map(|(sequence, seed)| masked.hide(sequence, *seed));
                self.join(&hidden.collect::<Result<Vec<_>, _>>()?)
            }
        }
    }

    fn join(&self, sequences: &[Sequence]) -> Result<SequenceBatch> {
        let longest = sequences.iter().map(|sequence| sequence.ids.len()).max();
        let longest = longest.ok_or(DataError::EmptyBatch)?;
        let width = self.length.unwrap_or(longest).next_multiple_of(self.multiple_of);
        if longest > width {
            return Err(DataError::Unfit {
                message: format!(
                    "a sequence of {} does not fit in {width}: truncate texts in the tokenizer, or raise max_length",
                    counted(longest, "token")
                ),
            }.into());
        }
        self.check_vocabulary(sequences)?;
        let table = |pad: i64, row: &dyn Fn(&Sequence) -> Option<Vec<i64>>| -> Result<Tensor> {
            let mut cells = Vec::with_capacity(sequences.len() * width);
            for (position, sequence) in sequences.iter().enumerate() {
                let Some(row) = row(sequence) else {
                    let (expected, found) = ("type ids or labels".to_owned(), "none".to_owned());
                    return Err(DataError::Collate { position, expected, found }.into());
                };
                let padding = width - row.len();
                if self.side == Side::Left {
                    cells.extend(std::iter::repeat_n(pad, padding));
                }
                cells.extend(row);
                if self.side == Side::Right {
                    cells.extend(std::iter::repeat_n(pad, padding));
                }
            }
            from_vec(cells, &[sequences.len() as i64, width as i64])
        };
        let typed = sequences.iter().any(|sequence| sequence.type_ids.is_some());
        let types = typed.then(|| table(self.pad_type_id, &|sequence| sequence.type_ids.clone()));
        let of_tokens = |sequence: &Sequence| match &sequence.label {
            Some(SequenceLabel::Tokens(labels)) => Some(labels.clone()),
            _ => None,
        };
        let labels = match sequences.first().and_then(|first| first.label.as_ref()) {
            Some(SequenceLabel::Tokens(_)) => Some(table(IGNORED, &of_tokens)?),
            _ => labels(sequences)?,
        };
        Ok(SequenceBatch {
            input_ids: table(self.pad_id, &|sequence| Some(sequence.ids.clone()))?,
            attention_mask: table(0, &|sequence| Some(vec![1; sequence.ids.len()]))?,
            token_type_ids: types.transpose()?,
            labels,
        })
    }
}

impl SequenceCollator {
    /// Refuses token ids beyond the model's vocabulary.
    fn check_vocabulary(&self, sequences: &[Sequence]) -> Result<()> {
        let Some(tokens) = self.vocab_size else { return Ok(()) };
        let beyond = |id: &i64| !(0..tokens).contains(id);
        let refuse = |what: String| {
            let message = format!(
                "{what} is beyond the model's vocabulary of {} (vocab_size), 0 to {}: take the tokenizer that \
                 belongs to the model, or a model of a larger vocabulary",
                counted(tokens, "token"),
                tokens - 1
            );
            Err(DataError::Unfit { message }.into())
        };
        for (index, sequence) in sequences.iter().enumerate() {
            if let Some(place) = sequence.ids.iter().position(beyond) {
                let id = sequence.ids[place];
                return refuse(format!(
                    "token {id} at place {place} of sequence {index} of the batch"
                ));
            }
        }
        if beyond(&self.pad_id) {
            return refuse(format!("the padding's token {}", self.pad_id));
        }
        Ok(())
    }
}

/// Joins labels of whole sequences.
fn labels(sequences: &[Sequence]) -> Result<Option<Tensor>> {
    let rows = sequences.len() as i64;
    let (mut classes, mut numbers, mut widths) = (Vec::new(), Vec::new(), Vec::new());
    let mut kinds = Vec::with_capacity(sequences.len());
    for sequence in sequences {
        kinds.push(match &sequence.label {
            None => "no label",
            Some(SequenceLabel::Class(class)) => {
                classes.push(*class);
                "a class"
            }
            Some(SequenceLabel::Number(number)) => {
                numbers.push(*number);
                "a number"
            }
            Some(SequenceLabel::Numbers(row)) => {
                numbers.extend_from_slice(row);
                widths.push(row.len());
                "several numbers"
            }
            Some(SequenceLabel::Tokens(_)) => "a class for each token",
        });
    }
    let first = kinds.first().copied().unwrap_or_default();
    if let Some(position) = kinds.iter().position(|kind| *kind != first) {
        let (expected, found) = (first.to_owned(), kinds[position].to_owned());
        return Err(DataError::Collate { position, expected, found }.into());
    }
    let width = widths.first().copied().unwrap_or_default();
    if let Some(position) = widths.iter().position(|other| *other != width) {
        let (expected, found) = (counted(width, "number"), counted(widths[position], "number"));
        return Err(DataError::Collate { position, expected, found }.into());
    }
    Ok(match first {
        "a class" => Some(from_vec(classes, &[rows])?),
        "a number" => Some(from_vec(numbers, &[rows])?),
        "several numbers" => Some(from_vec(numbers, &[rows, width as i64])?),
        _ => None,
    })
}

/// Returns the attention mask of packed rows: `bool [rows, 1, tokens, tokens]`, `true` if the token of the third
/// dimension attends to that of the last one. Tokens attend to those of their own sequence, and with `causal` to none
/// after them. Padding, whose sequence id is 0, attends to padding, so that no row of a softmax is empty.
pub(crate) fn block_mask(sequence_ids: &Tensor, causal: bool) -> Result<Tensor> {
    let (of_rows, of_columns) = (sequence_ids.f_unsqueeze(-1)?, sequence_ids.f_unsqueeze(1)?);
    let mut same = of_rows.f_eq_tensor(&of_columns)?.f_logical_and(&of_rows.f_ne(0)?)?;
    if causal {
        same = same.f_tril(0)?;
    }
    let tokens = sequence_ids.size().last().copied().unwrap_or_default();
    let itself = Tensor::f_eye(tokens, (Kind::Bool, sequence_ids.device()))?;
    Ok(same.f_logical_or(&itself)?.f_unsqueeze(1)?)
}
