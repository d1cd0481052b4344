//! Logits that are divided along the vocabulary over the ranks of a tensor group.

use brigade_nn::Divided;
use brigade_torch::{Result, VocabularyPart, region_argmax, region_top_k};
use tch::Tensor;

/// Logits `[…, vocabulary]`, which may be divided along the vocabulary over the ranks of a tensor group.
///
/// Predictions and metrics need only a few values of each row, which [`VocabularyLogits::argmax`] and
/// [`VocabularyLogits::top_k`] exchange. Every rank of a tensor group calls the same methods, and gets the same values.
///
/// ```
/// use brigade_models::{Gpt2LmHead, Gpt2Options};
/// use brigade_nn::Model;
/// use tch::Tensor;
///
/// let options = Gpt2Options { vocab_size: 50, n_embd: 32, n_head: 4, n_layer: 1, ..Default::default() };
/// let mut model = Model::new(|path| Gpt2LmHead::new(path, &options))?;
/// model.eval();
/// let ids = Tensor::from_slice(&[7i64, 1, 4]).view([1, 3]);
/// let logits = model.module().vocabulary_logits(&ids)?;
/// let predicted = logits.argmax()?; // the accuracy is that of `predicted` and the next tokens
/// let (values, tokens) = logits.top_k(5)?;
/// assert_eq!((predicted.size(), tokens.size()), (vec![1, 3], vec![1, 3, 5]));
/// assert_eq!(predicted, logits.whole()?.argmax(-1, false));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug)]
pub struct VocabularyLogits {
    /// Logits of this rank's part of the vocabulary.
    own: Tensor,
    divided: Option<Divided>,
}

impl VocabularyLogits {
    pub(super) fn new(own: Tensor, divided: Option<&Divided>) -> Self {
        Self { own, divided: divided.filter(|it| it.region.group().is_some()).cloned() }
    }

    /// Returns `true` if the logits are divided over ranks.
    #[must_use]
    pub fn is_divided(&self) -> bool {
        self.divided.is_some()
    }

    /// Returns the vocabulary size.
    #[must_use]
    pub fn vocabulary(&self) -> i64 {
        let own = self.own.size().last().copied().unwrap_or(0);
        self.divided.as_ref().map_or(own, |divided| divided.vocabulary().vocabulary)
    }

    /// Returns the logits of these rows of the first dimension, in their order.
    pub(super) fn select_rows(&self, rows: &Tensor) -> Result<Self> {
        // A device map may compute on another device than that of the prompt.
        let rows = rows.f_to_device(self.own.device())?;
        Ok(Self { own: self.own.f_index_select(0, &rows)?, divided: self.divided.clone() })
    }

    /// Gathers and returns the logits of the whole vocabulary.
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::Communication`] if a peer was lost; [`brigade_torch::ErrorKind::Tensor`] if memory
    /// runs out.
    pub fn whole(&self) -> Result<Tensor> {
        match &self.divided {
            Some(divided) => divided.region.gather(&self.own, &divided.part),
            None => Ok(self.own.shallow_clone()),
        }
    }

    /// Returns the token with the largest logit of each row, `[…]` of int64, as [`region_argmax`] does.
    ///
    /// # Errors
    /// Returns the same errors as [`VocabularyLogits::whole`].
    pub fn argmax(&self) -> Result<Tensor> {
        match self.region() {
            Some((group, part)) => region_argmax(group, &self.own, part),
            None => Ok(self.own.f_argmax(-1, false)?),
        }
    }

    /// Returns the `k` largest logits of each row and their tokens, both `[…, k]` in descending order, as
    /// [`region_top_k`] does.
    ///
    /// # Errors
    /// Returns the same errors as [`VocabularyLogits::whole`]; [`brigade_torch::ErrorKind::InvalidArgument`] or
    /// [`brigade_torch::ErrorKind::Tensor`] for a `k` that is not between 1 and the size of the vocabulary.
    pub fn top_k(&self, k: i64) -> Result<(Tensor, Tensor)> {
        match self.region() {
            Some((group, part)) => region_top_k(group, &self.own, part, k),
            None => Ok(self.own.f_topk(k, -1, true, true)?),
        }
    }

    /// Returns logits whose own part is the result of `f` for this rank's part and its first token. Columns that pad the
    /// part are removed.
    pub(super) fn map_own(&self, f: impl FnOnce(&Tensor, i64) -> Result<Tensor>) -> Result<Self> {
        let divided = self.divided.clone();
        let Some(part) = divided.as_ref().map(Divided::vocabulary) else {
            return Ok(Self { own: f(&self.own, 0)?, divided });
        };
        let tokens = part.size.min((part.vocabulary - part.start).max(0));
        Ok(Self { own: f(&self.own.f_narrow(-1, 0, tokens)?, part.start)?, divided })
    }

    /// Returns this rank's part of the logits, and the tensor group whose ranks have the other parts.
    pub(super) fn own(&self) -> (&Tensor, Option<&brigade_torch::ProcessGroup>) {
        (&self.own, self.divided.as_ref().and_then(|divided| divided.region.group()))
    }

    fn region(&self) -> Option<(&brigade_torch::ProcessGroup, VocabularyPart)> {
        let divided = self.divided.as_ref()?;
        Some((divided.region.group()?, divided.vocabulary()))
    }
}

impl From<Tensor> for VocabularyLogits {
    /// Wraps the logits of a whole vocabulary.
    fn from(logits: Tensor) -> Self {
        Self { own: logits, divided: None }
    }
}
