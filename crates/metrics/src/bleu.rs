//! BLEU: n-grams that translations share with their references.

use std::collections::HashMap;

use brigade_torch::Result;
use tch::{Device, Kind, Tensor};

use crate::read::{self, IGNORED};
use crate::{Fold, Folded, Metric};

/// BLEU score of a corpus (Papineni et al., 2002; fastai's `CorpusBLEUMetric`): the geometric mean of the precisions of
/// n-grams of one to four tokens, times the brevity penalty `exp(1 - targets / predictions)` if predictions have fewer
/// tokens in total.
///
/// Predictions are scores `[n, vocabulary, length]`, of which the largest in dimension 1 is the predicted token;
/// targets are `[n, target length]`, where the two lengths may differ. For outputs `[n, length, vocabulary]`, as
/// fastai's default axis of -1 expects, use [`ClassesLast`](crate::ClassesLast). If a sample has no n-gram of some
/// length in common with its target, half an n-gram is counted for the first such length, a quarter for the next, and
/// so on (Chen and Cherry, 2014, method 3). The value is NaN if no prediction has four tokens; fastai's metric divides
/// by zero then.
///
/// N-grams are counted exactly, so that fastai's `vocab_sz`, the base of its hash, is not needed. Positions whose
/// target is [`IGNORED`] are left out of predictions and targets. Each update waits for the device, because n-grams are
/// counted on the CPU.
///
/// ```
/// use brigade_metrics::{ClassesLast, CorpusBleu, Metric};
///
/// assert_eq!(ClassesLast(CorpusBleu).name(), "corpus_bleu");
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[doc(alias = "CorpusBLEUMetric")]
pub struct CorpusBleu;

/// The longest runs that are counted.
const LONGEST: usize = 4;

/// Number of sums of batches: tokens of predictions and of targets, then for each length of n-grams the common ones and
/// those of predictions.
const SUMS: usize = 2 + 2 * LONGEST;

impl Metric for CorpusBleu {
    type Value = f64;

    fn name(&self) -> String {
        "corpus_bleu".to_owned()
    }

    fn fold(&self, predictions: &Tensor, targets: &Tensor) -> Result<Fold> {
        let (shape, found) = (predictions.size(), targets.size());
        let (&[rows, _, predicted_tokens], &[samples, target_tokens]) = (&shape[..], &found[..])
        else {
            return Err(unfit(&shape, &found));
        };
        if rows != samples {
            return Err(unfit(&shape, &found));
        }
        let mut sums = [0.0; SUMS];
        // With no predicted tokens there is no argmax; the targets are counted all the same.
        let predicted = match predicted_tokens {
            0 => Vec::new(),
            _ => tokens(&predictions.f_detach()?.f_argmax(1, false)?)?,
        };
        let targets = tokens(targets)?;
        let part = |of: &[i64], index: usize, length: i64| -> Vec<i64> {
            let length = length as usize;
            of.get(index * length..(index + 1) * length).unwrap_or_default().to_vec()
        };
        for index in 0..rows as usize {
            let predicted = part(&predicted, index, predicted_tokens);
            add_sample(&predicted, &part(&targets, index, target_tokens), &mut sums);
        }
        Ok(Fold::Sums(Tensor::from_slice(&sums).f_to_device(predictions.device())?))
    }

    fn value(&self, folded: &Folded) -> Result<f64> {
        let sums: [f64; SUMS] = read::numbers(&self.name(), folded)?;
        let ([predicted, targets], runs) = ([sums[0], sums[1]], &sums[2..]);
        let (common, all) = runs.split_at(LONGEST);
        let shares: f64 = common.iter().zip(all).map(|(common, all)| common / all).product();
        let penalty = if predicted < targets { (1.0 - targets / predicted).exp() } else { 1.0 };
        Ok(if all.contains(&0.0) { f64::NAN } else { penalty * shares.powf(1.0 / LONGEST as f64) })
    }
}

fn unfit(shape: &[i64], found: &[i64]) -> brigade_torch::Error {
    read::failed(
        "corpus_bleu",
        format!(
            "predictions have shape {shape:?} and targets {found:?}; expected [n, classes, tokens] and [n, tokens]; \
             `ClassesLast` reads classes in the last dimension"
        ),
    )
}

fn tokens(tensor: &Tensor) -> Result<Vec<i64>> {
    let tensor = tensor.f_detach()?.f_to_kind(Kind::Int64)?.f_to_device(Device::Cpu)?;
    Ok(Vec::try_from(&tensor.f_reshape([-1])?)?)
}

/// Adds what one sample has.
fn add_sample(predicted: &[i64], targets: &[i64], sums: &mut [f64; SUMS]) {
    let kept = |place: usize| targets.get(place) != Some(&IGNORED);
    let [predicted, targets] = [predicted, targets].map(|tokens| -> Vec<i64> {
        let kept = tokens.iter().enumerate().filter(|(place, _)| kept(*place));
        kept.map(|(_, token)| *token).collect()
    });
    if predicted.is_empty() {
        sums[1] += targets.len() as f64;
        return;
    }
    sums[0] += predicted.len() as f64;
    sums[1] += targets.len() as f64;
    let mut smoothed = 1.0;
    for length in 1..=LONGEST {
        let mut there: HashMap<&[i64], usize> = HashMap::new();
        for run in targets.windows(length) {
            *there.entry(run).or_default() += 1;
        }
        let mut common = 0.0;
        for run in predicted.windows(length) {
            if let Some(left) = there.get_mut(run).filter(|left| **left > 0) {
                *left -= 1;
                common += 1.0;
            }
        }
        if common == 0.0 {
            smoothed /= 2.0;
            common = smoothed;
        }
        sums[1 + length] += common;
        sums[1 + LONGEST + length] += predicted.windows(length).len() as f64;
    }
}
