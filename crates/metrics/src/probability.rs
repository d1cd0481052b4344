//! Metrics of predicted probabilities.

use brigade_torch::Result;
use tch::{Kind, Reduction, Tensor};

use crate::read::{self, IGNORED, Scored};
use crate::{Fold, Folded, Metric};

/// Perplexity: the exponential of the mean cross-entropy per token.
///
/// Predictions `[n, classes, …]`, targets `[n, …]`; for a language model's `[n, tokens, classes]` use
/// [`ClassesLast`](crate::ClassesLast).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Perplexity;

impl Metric for Perplexity {
    type Value = f64;

    fn name(&self) -> String {
        "perplexity".to_owned()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        let scored = Scored::of(&self.name(), predictions, targets)?;
        let scores = match scored.scores.kind() {
            Kind::Double => scored.scores.shallow_clone(),
            _ => scored.scores.f_to_kind(Kind::Float)?,
        };
        // A target outside of the classes would abort a CUDA kernel, so it is counted, and refused at the end.
        let ignored = Tensor::f_full([], IGNORED, (Kind::Int64, scores.device()))?;
        let targets = scored.targets.f_where_self(&scored.inside()?, &ignored)?;
        let entropy = scores.f_cross_entropy_loss::<&Tensor>(
            &targets,
            None,
            Reduction::None,
            IGNORED,
            0.0,
        )?;
        let sums =
            [entropy.f_sum(Kind::Double)?, scored.kept()?.f_sum(Kind::Double)?, scored.outside()?];
        Fold::sums(&sums)
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        let [entropy, tokens, outside] = read::numbers(&self.name(), folded)?;
        read::refuse_outside(&self.name(), outside)?;
        Ok((entropy / tokens).exp())
    }
}

/// Brier score: the mean over samples of `Σ (probability - target)²` over the classes; for two classes half of it,
/// which is `(p - y)²` of the second class.
///
/// Predictions `[n, classes, …]`, of which a softmax makes probabilities, targets `[n, …]`. Like scikit-learn's, it is
/// computed from probabilities; fastai computes it from predicted classes, which makes it the error rate.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Brier;

impl Metric for Brier {
    type Value = f64;

    fn name(&self) -> String {
        "brier_score_loss".to_owned()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        let scored = Scored::of(&self.name(), predictions, targets)?;
        let outside = scored.outside()?;
        let (scores, targets) = scored.rows()?;
        let classes = Tensor::f_arange(scored.classes, (Kind::Int64, scores.device()))?;
        let there = targets.f_unsqueeze(1)?.f_eq_tensor(&classes)?.f_to_kind(Kind::Double)?;
        let errors = scores.f_softmax(1, Kind::Double)?.f_sub(&there)?.f_square()?;
        let errors = errors.f_sum_dim_intlist([1].as_slice(), false, Kind::Double)?;
        let left_out = targets.f_eq(IGNORED)?;
        let errors = errors.f_masked_fill(&left_out, 0.0)?.f_sum(Kind::Double)?;
        let errors = errors.f_mul_scalar(if scored.classes == 2 { 0.5 } else { 1.0 })?;
        let all = left_out.f_logical_not()?.f_sum(Kind::Double)?;
        Fold::sums(&[errors, all, outside])
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        let [errors, all, outside] = read::numbers(&self.name(), folded)?;
        read::refuse_outside(&self.name(), outside)?;
        Ok(errors / all)
    }
}
