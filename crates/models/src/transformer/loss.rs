//! Losses of language models and classifiers, as sums and counts.

use brigade_nn::{ContextPart, Divided};
use brigade_torch::{
    CrossEntropyOptions, Error, Result, cross_entropy, linear_cross_entropy,
    linear_vocabulary_parallel_cross_entropy,
};
use tch::{Kind, Reduction, Tensor};

/// Label that is ignored by losses, for padding and for tokens that are not to be predicted.
pub const IGNORED_LABEL: i64 = -100;

/// A loss as a sum over labels, with their number.
///
/// Averaging the means of batches with unequal numbers of labels does not give the mean over all labels; adding sums
/// and counts does. [`TokenLoss::mean`] is the loss of transformers. With an Accelerator, `backward_weighted(&model,
/// &loss.sum, &loss.count)` is exact over batches and ranks.
#[derive(Debug)]
pub struct TokenLoss {
    /// Sum of the losses, a scalar tensor.
    pub sum: Tensor,
    /// Number of labels in the sum: an int64 scalar on the sum's device.
    pub count: Tensor,
}

impl TokenLoss {
    /// Returns the mean loss per label, or NaN if there are no labels.
    ///
    /// # Errors
    /// Returns an error of libtorch.
    pub fn mean(&self) -> Result<Tensor> {
        Ok(self.sum.f_div(&self.count)?)
    }

    /// Sums the losses of ranks that have other tokens of the same texts.
    pub(super) fn over(self, part: &ContextPart) -> Result<Self> {
        Ok(Self { sum: part.sum(&self.sum)?, count: part.sum(&self.count)? })
    }
}

/// Computes the cross-entropy of logits `[…, classes]` and labels `[…]`, as for masked language models and token
/// classification. Labels of [`IGNORED_LABEL`] are ignored. The share `smoothing` of each label is spread over all
/// classes.
///
/// ```
/// use brigade_models::token_loss;
/// use tch::{Device, Kind, Tensor};
///
/// let logits = Tensor::zeros([1, 3, 4], (Kind::Float, Device::Cpu));
/// let labels = Tensor::from_slice(&[2i64, -100, 0]).view([1, 3]);
/// let loss = token_loss(&logits, &labels, 0.0)?;
/// assert_eq!(loss.count.int64_value(&[]), 2);
/// assert!((loss.mean()?.double_value(&[]) - 4f64.ln()).abs() < 1e-6);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// Fails for shapes that do not match, and for labels that are not classes.
pub fn token_loss(logits: &Tensor, labels: &Tensor, smoothing: f64) -> Result<TokenLoss> {
    let found = cross_entropy(logits, labels, &summed(smoothing))?;
    Ok(TokenLoss { sum: found.loss, count: found.count })
}

/// Computes the loss of a causal language model from logits `[batch, tokens, classes]` and labels `[batch, tokens]`,
/// which are usually the ids themselves: each position predicts the label of the next.
///
/// ```
/// use brigade_models::causal_lm_loss;
/// use tch::{Device, Kind, Tensor};
///
/// let logits = Tensor::zeros([1, 3, 4], (Kind::Float, Device::Cpu));
/// let ids = Tensor::from_slice(&[2i64, 1, 0]).view([1, 3]);
/// assert_eq!(causal_lm_loss(&logits, &ids, 0.0)?.count.int64_value(&[]), 2);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// Returns the same errors as [`token_loss`].
pub fn causal_lm_loss(logits: &Tensor, labels: &Tensor, smoothing: f64) -> Result<TokenLoss> {
    token_loss(logits, &shifted(labels)?, smoothing)
}

/// Problem type of a text classifier (`problem_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ProblemType {
    /// Regression of numbers: the mean squared error.
    Regression,
    /// Exactly one class of several per text: cross-entropy.
    SingleLabelClassification,
    /// Any number of classes per text: binary cross-entropy of each.
    MultiLabelClassification,
}

impl ProblemType {
    /// Returns the problem type that transformers assumes by default: regression for a single output, otherwise a
    /// single class for integer labels and any number of classes for others.
    #[must_use]
    pub fn of(outputs: i64, labels: Kind) -> Self {
        match (outputs, labels) {
            (1, _) => Self::Regression,
            (_, Kind::Int64 | Kind::Int) => Self::SingleLabelClassification,
            _ => Self::MultiLabelClassification,
        }
    }
}

/// Computes the loss of a text classifier from logits `[batch, outputs]`. Labels are `[batch]` of int64 for a single
/// class, otherwise of the logits' shape, or `[batch]` for one regression target. `smoothing` applies to a single class
/// only.
///
/// ```
/// use brigade_models::{ProblemType, sequence_loss};
/// use tch::Tensor;
///
/// let logits = Tensor::from_slice(&[1f32, 2.0]).view([2, 1]);
/// let labels = Tensor::from_slice(&[1f32, 4.0]);
/// let loss = sequence_loss(&logits, &labels, ProblemType::Regression, 0.0)?;
/// assert_eq!(loss.mean()?.double_value(&[]), 2.0);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// Returns the same errors as [`token_loss`].
pub fn sequence_loss(
    logits: &Tensor,
    labels: &Tensor,
    problem: ProblemType,
    smoothing: f64,
) -> Result<TokenLoss> {
    if problem == ProblemType::SingleLabelClassification {
        let classes = logits.size().last().copied().unwrap_or(0);
        let labels = labels.f_to_kind(Kind::Int64)?.f_reshape([-1])?;
        return token_loss(&logits.f_reshape([-1, classes])?, &labels, smoothing);
    }
    let count = logits.numel();
    if labels.numel() != count {
        return Err(Error::invalid_argument(format!(
            "{problem:?}: expected a label for each of the outputs {:?}, found labels {:?}",
            logits.size(),
            labels.size()
        )));
    }
    // 16 bits are too few for sums.
    let kind = if logits.kind() == Kind::Double { Kind::Double } else { Kind::Float };
    let logits = logits.f_to_kind(kind)?;
    let labels = labels.f_to_kind(kind)?.f_reshape(logits.size())?;
    let sum = match problem {
        ProblemType::Regression => logits.f_mse_loss(&labels, Reduction::Sum)?,
        _ => logits.f_binary_cross_entropy_with_logits::<Tensor>(
            &labels,
            None,
            None,
            Reduction::Sum,
        )?,
    };
    let count = Tensor::f_full([0i64; 0], count as i64, (Kind::Int64, logits.device()))?;
    Ok(TokenLoss { sum, count })
}

/// The loss of a head from hidden states to words, without all of its logits: those of labels that count are computed,
/// some at a time.
pub(super) fn head_loss(
    hidden: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    divided: Option<&Divided>,
    labels: &Tensor,
    smoothing: f64,
) -> Result<TokenLoss> {
    let options = summed(smoothing);
    let divided = divided.and_then(|it| Some((it, it.region.group()?)));
    let found = match divided {
        Some((divided, group)) => {
            let (hidden, part) = (divided.region.enter(hidden)?, divided.vocabulary());
            linear_vocabulary_parallel_cross_entropy(
                group, &hidden, weight, bias, labels, part, &options,
            )?
        }
        None => linear_cross_entropy(hidden, weight, bias, labels, &options)?,
    };
    Ok(TokenLoss { sum: found.loss, count: found.count })
}

/// Returns the label of the next token at each position. Labels are shifted instead of logits, which are larger.
pub(super) fn shifted(labels: &Tensor) -> Result<Tensor> {
    let shifted = labels.f_roll([-1], [-1])?;
    let _ = shifted.f_narrow(-1, -1, 1)?.f_fill_(IGNORED_LABEL)?;
    Ok(shifted)
}

fn summed(smoothing: f64) -> CrossEntropyOptions {
    CrossEntropyOptions {
        ignore_index: IGNORED_LABEL,
        label_smoothing: smoothing,
        reduction: Reduction::Sum,
        ..CrossEntropyOptions::default()
    }
}
