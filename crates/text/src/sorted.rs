//! Samplers by which texts of similar length are in one batch.

use std::cmp::Reverse;
use std::sync::Arc;

use brigade_sampling::stream;
use brigade_sampling::{Sampler, Shuffle};
use rand_pcg::rand_core::Rng;

/// Sampler that sorts texts by length, so that batches have little padding: fastai's `SortedDL`.
///
/// It orders samples and not batches, so that a loader distributes batches to the ranks by the usual rules. On several
/// ranks a round of batches is a contiguous piece of the order, so that all ranks have texts of similar length and no
/// rank waits for one with the longest texts, unlike with fastai's blocks. Pass the batch size of all ranks together:
/// they then train on the same batches as one process with that batch size.
///
/// ```
/// use brigade_sampling::Sampler;
/// use brigade_text::SortedSampler;
///
/// assert_eq!(SortedSampler::longest_first([3, 1, 4, 1, 5]).order(0), [4, 2, 0, 1, 3]);
/// let training = SortedSampler::shuffled([3, 1, 4, 1, 5], 2, 42);
/// assert_eq!(training.order(7)[0], 4); // the longest text is in the first batch
/// ```
#[derive(Clone, Debug)]
pub struct SortedSampler {
    lengths: Arc<[usize]>,
    shuffled: Option<Shuffled>,
}

/// Parameters of a random order.
#[derive(Clone, Copy, Debug)]
struct Shuffled {
    batch_size: usize,
    seed: u64,
}

impl SortedSampler {
    /// Creates a sampler that visits the longest text first, and texts of equal length in their original order, for
    /// validation and prediction.
    #[must_use]
    pub fn longest_first(lengths: impl Into<Arc<[usize]>>) -> Self {
        Self { lengths: lengths.into(), shuffled: None }
    }

    /// Creates a sampler whose order is new in each epoch: texts are shuffled, pieces of 50 batches are sorted by
    /// length, and all batches but the first and the last are then shuffled. The longest text comes first, so that a
    /// run that would exhaust the memory fails at its first batch. The seed must be the same on all ranks.
    #[must_use]
    pub fn shuffled(lengths: impl Into<Arc<[usize]>>, batch_size: usize, seed: u64) -> Self {
        let shuffled = Some(Shuffled { batch_size: batch_size.max(1), seed });
        Self { lengths: lengths.into(), shuffled }
    }
}

impl Sampler for SortedSampler {
    fn len(&self) -> usize {
        self.lengths.len()
    }

    fn order(&self, epoch: u64) -> Vec<usize> {
        let len = self.lengths.len();
        match self.shuffled {
            None => {
                let mut order: Vec<usize> = (0..len).collect();
                sort(&mut order, &self.lengths);
                order
            }
            Some(Shuffled { batch_size, seed }) => {
                let order = Shuffle::new(len, seed).order(epoch);
                let of_batches = stream(seed, &[BATCHES]).next_u64();
                let permutation = |batches| Shuffle::new(batches, of_batches).order(epoch);
                sorted_in_pieces(&self.lengths, batch_size, order, permutation)
            }
        }
    }
}

/// First number of the random stream of batches; `brigade-sampling` uses 1 and 2, `brigade-data` 3 and 4.
const BATCHES: u64 = 5;

/// Computes fastai's order with the given shuffles.
fn sorted_in_pieces(
    lengths: &[usize],
    batch_size: usize,
    mut order: Vec<usize>,
    permutation: impl FnOnce(usize) -> Vec<usize>,
) -> Vec<usize> {
    let first_longest = (0..lengths.len()).rev().max_by_key(|index| lengths.get(*index));
    if let Some(place) = order.iter().position(|index| Some(*index) == first_longest) {
        order.swap(0, place);
    }
    for piece in order.chunks_mut(batch_size.saturating_mul(50)) {
        sort(piece, lengths);
    }
    let batches: Vec<&[usize]> = order.chunks(batch_size).collect();
    match batches.as_slice() {
        [first, inner @ .., last] => {
            let mut result = first.to_vec();
            permutation(inner.len()).into_iter().for_each(|batch| result.extend(inner[batch]));
            result.extend(*last);
            result
        }
        _ => order,
    }
}

/// Sorts texts by length, longest first. Texts of equal length keep their order.
fn sort(texts: &mut [usize], lengths: &[usize]) {
    texts.sort_by_key(|text| Reverse(lengths.get(*text)));
}

/// Sampler by which texts of similar length are in one batch, in an order that is new in each epoch: `group_by_length`
/// of transformers' `Trainer`, its `LengthGroupedSampler`.
///
/// Texts are shuffled, and pieces of 50 batches (fewer if there would be less than four pieces) are sorted by length.
/// Unlike with [`SortedSampler::shuffled`], batches are not shuffled afterwards: within a piece, texts go from the
/// longest to the shortest. The batch size is that of all ranks together, and the seed must be the same on all.
///
/// ```
/// use brigade_sampling::Sampler;
/// use brigade_text::LengthGrouped;
///
/// let sampler = LengthGrouped::new((0..100).collect::<Vec<usize>>(), 5, 42);
/// assert_eq!(sampler.order(0)[0], 99);
/// ```
#[derive(Clone, Debug)]
pub struct LengthGrouped {
    lengths: Arc<[usize]>,
    batch_size: usize,
    seed: u64,
}

impl LengthGrouped {
    /// Creates a sampler from the number of tokens of each text.
    #[must_use]
    pub fn new(lengths: impl Into<Arc<[usize]>>, batch_size: usize, seed: u64) -> Self {
        Self { lengths: lengths.into(), batch_size: batch_size.max(1), seed }
    }
}

impl Sampler for LengthGrouped {
    fn len(&self) -> usize {
        self.lengths.len()
    }

    fn order(&self, epoch: u64) -> Vec<usize> {
        let order = Shuffle::new(self.lengths.len(), self.seed).order(epoch);
        grouped(&self.lengths, self.batch_size, order)
    }
}

/// Computes the order of transformers' `get_length_grouped_indices` with the given shuffle.
fn grouped(lengths: &[usize], batch_size: usize, mut order: Vec<usize>) -> Vec<usize> {
    let batches = (lengths.len() / batch_size.saturating_mul(4)).clamp(1, 50);
    let size = batches.saturating_mul(batch_size);
    order.chunks_mut(size).for_each(|piece| sort(piece, lengths));
    let starts = (0..order.len()).step_by(size);
    let longest = starts.rev().max_by_key(|start| lengths.get(order[*start]));
    if let Some(longest) = longest {
        order.swap(0, longest);
    }
    order
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn golden() -> Value {
        serde_json::from_str(include_str!("../tests/golden/text.json")).unwrap()
    }

    fn numbers(value: &Value) -> Vec<usize> {
        serde_json::from_value(value.clone()).unwrap()
    }

    #[test]
    fn the_longest_texts_come_first_as_in_fastai() {
        for case in golden()["sorting"]["cases"].as_array().unwrap() {
            let order = SortedSampler::longest_first(numbers(&case["lens"])).order(3);
            assert_eq!(order, numbers(&case["order"]));
        }
    }

    #[test]
    fn given_fastais_shuffles_the_order_of_training_is_fastais() {
        for case in golden()["sorting"]["shuffled"]["cases"].as_array().unwrap() {
            let [n, batch_size] = ["n", "bs"].map(|key| case[key].as_u64().unwrap() as usize);
            let lengths: Vec<usize> = (0..n).map(|text| 1 + 11 * text % 37).collect();
            let order = (0..n).map(|place| (7 * place + 3) % n).collect();
            let reversed = |batches| (0..batches).rev().collect();
            assert_eq!(
                sorted_in_pieces(&lengths, batch_size, order, reversed),
                numbers(&case["order"]),
                "{n} texts in batches of {batch_size}"
            );
        }
    }

    #[test]
    fn orders_of_training_are_new_in_each_epoch_and_have_every_text_once() {
        let lengths: Vec<usize> = (0..1234).map(|text| 1 + 31 * text % 211).collect();
        let samplers: [Box<dyn Sampler>; 2] = [
            Box::new(SortedSampler::shuffled(lengths.clone(), 8, 3)),
            Box::new(LengthGrouped::new(lengths.clone(), 8, 3)),
        ];
        for sampler in samplers {
            let orders = [0, 0, 1].map(|epoch| sampler.order(epoch));
            assert_eq!(orders[0], orders[1]);
            assert_ne!(orders[0], orders[2]);
            for mut order in orders {
                assert_eq!(lengths[order[0]], 211);
                // Little padding: a random permutation has about 100 times as much.
                let padding = order.chunks(8).map(|batch| {
                    let of = |text: &usize| lengths[*text];
                    let longest = batch.iter().map(of).max().unwrap();
                    batch.iter().map(|text| longest - of(text)).sum::<usize>()
                });
                assert!(padding.sum::<usize>() < 1234 * 8);
                order.sort_unstable();
                assert!(order.into_iter().eq(0..1234));
            }
        }
        assert!(SortedSampler::shuffled([], 4, 1).order(0).is_empty());
        assert!(LengthGrouped::new([], 4, 1).order(0).is_empty());
    }
}
