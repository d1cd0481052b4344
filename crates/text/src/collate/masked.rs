//! Masked language modelling.

use brigade_data::DataError;
use brigade_sampling::stream;
use brigade_torch::Result;
use rand_pcg::rand_core::Rng;

use super::{Sequence, SequenceLabel};
use crate::IGNORED;

/// Masking of tokens for masked language modelling, as in BERT: each token that is not special is chosen with a
/// probability of 15 %. Of the chosen tokens, 80 % are replaced by the mask token and 10 % by a random token, and 10 %
/// stay unchanged. Labels are the original ids of the chosen tokens, and -100 for the others.
///
/// The choice depends on the loader's seed, the epoch and the sample, so that it is new in each epoch and the same with
/// any number of threads and ranks.
#[derive(Clone, Debug)]
pub struct MaskedTokens {
    mask_id: i64,
    vocabulary: usize,
    special: Vec<i64>,
    probability: f64,
    masked: f64,
    random: f64,
    whole_words: bool,
}

impl MaskedTokens {
    /// Creates a masking from the id of the mask token, the vocabulary size and the ids of the special tokens, which
    /// are used for sequences without a special-token mask of their own.
    ///
    /// # Errors
    /// [`DataError::Options`] for an empty vocabulary.
    pub fn new(mask_id: i64, vocabulary: usize, special: impl Into<Vec<i64>>) -> Result<Self> {
        if vocabulary == 0 {
            let message =
                "an empty vocabulary has no tokens that could replace hidden ones".to_owned();
            return Err(DataError::Options { message }.into());
        }
        let (special, probability, masked, random) = (special.into(), 0.15, 0.8, 0.1);
        Ok(Self { mask_id, vocabulary, special, probability, masked, random, whole_words: false })
    }

    /// Sets the probability with which a token is chosen. Defaults to 0.15.
    ///
    /// # Errors
    /// [`DataError::Options`] if the probability is not from 0 to 1.
    pub fn probability(mut self, probability: f64) -> Result<Self> {
        if !(0.0..=1.0).contains(&probability) {
            let message = format!(
                "tokens cannot be hidden with a probability of {probability}, expected 0 to 1"
            );
            return Err(DataError::Options { message }.into());
        }
        self.probability = probability;
        Ok(self)
    }

    /// Sets the shares of the chosen tokens that become the mask token (by default 0.8) and a random token (by default
    /// 0.1). The others stay unchanged.
    ///
    /// # Errors
    /// [`DataError::Options`] if a share is below 0, or their sum is above 1.
    pub fn shares(mut self, masked: f64, random: f64) -> Result<Self> {
        if !(masked >= 0.0 && random >= 0.0 && masked + random <= 1.0) {
            let message = format!(
                "shares of {masked} and {random} of the chosen tokens cannot be replaced, expected 0 to 1 together"
            );
            return Err(DataError::Options { message }.into());
        }
        (self.masked, self.random) = (masked, random);
        Ok(self)
    }

    /// Masks whole words instead of single tokens, like `DataCollatorForWholeWordMask`: all tokens of a chosen word
    /// become the mask token. Sequences must have their [`words`](Sequence::words). See also
    /// [`words_of_offsets`](super::words_of_offsets).
    #[must_use]
    pub fn whole_words(mut self, whole: bool) -> Self {
        self.whole_words = whole;
        self
    }

    /// Masks tokens of a sequence, and sets its labels.
    pub(super) fn hide(&self, sequence: &Sequence, seed: u64) -> Result<Sequence> {
        let mut random = Draw(stream(seed, &[]));
        let mut hidden = sequence.clone();
        let mut labels = vec![IGNORED; sequence.ids.len()];
        let mut word = None;
        let mut word_is_chosen = false;
        for (place, (id, label)) in hidden.ids.iter_mut().zip(&mut labels).enumerate() {
            let special = match &sequence.special {
                Some(special) => special.get(place).copied().unwrap_or_default(),
                None => self.special.contains(id),
            };
            let chosen = if self.whole_words {
                let Some(words) = &sequence.words else {
                    return Err(DataError::Unfit {
                        message:
                            "whole words are to be hidden, but a sequence has no word numbers: set \
                                  them, for example by words_of_offsets"
                                .to_owned(),
                    }
                    .into());
                };
                let of = words.get(place).copied().flatten().filter(|_| !special);
                if of != word {
                    word = of;
                    word_is_chosen = of.is_some() && random.chance(self.probability);
                }
                word_is_chosen && of.is_some()
            } else {
                !special && random.chance(self.probability)
            };
            if !chosen {
                continue;
            }
            *label = *id;
            let share = if self.whole_words { 0.0 } else { random.share() };
            if self.whole_words || share < self.masked {
                *id = self.mask_id;
            } else if share < self.masked + self.random {
                *id = random.below(self.vocabulary);
            }
        }
        hidden.label = Some(SequenceLabel::Tokens(labels));
        Ok(hidden)
    }
}

/// Random numbers of one sample.
struct Draw<R>(R);

impl<R: Rng> Draw<R> {
    /// Returns a number from 0 up to 1.
    fn share(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn chance(&mut self, probability: f64) -> bool {
        self.share() < probability
    }

    /// Returns a number below a bound. All are equally likely, except for a bias of less than 2^-40.
    fn below(&mut self, bound: usize) -> i64 {
        ((u128::from(self.0.next_u64()) * bound as u128) >> 64) as i64
    }
}
