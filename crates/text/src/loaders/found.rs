//! Discovery of texts before batches are made, and the check that all ranks have the same.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use brigade_rank_env::text::counted;
use brigade_sampling::{Sampler, Shuffle};
use brigade_tokens::{TextSource, TokenCorpus, TokenIds, Vocabulary};
use brigade_torch::{Error, Result};
use brigade_train::Accelerator;

use super::{Options, Part, TextTarget};
use crate::Categories;
use crate::error::TextError;

/// Texts as token ids, divided and labelled.
pub(super) struct Found {
    pub(super) ids: TokenIds,
    pub(super) vocabulary: Arc<Vocabulary>,
    pub(super) train: Vec<usize>,
    pub(super) valid: Vec<usize>,
    pub(super) labels: Labels,
    /// Id of the padding token. A language model needs none.
    pub(super) pad_id: Option<i64>,
}

/// Labels of all texts.
pub(super) enum Labels {
    /// No labels: the texts are for a language model.
    None,
    Classes(Categories, Vec<i64>),
    Several(Categories, Vec<Vec<f32>>),
    Numbers(Vec<f32>),
}

impl Found {
    pub(super) fn new(
        source: &TextSource,
        corpus: &TokenCorpus,
        options: &Options,
        seed: u64,
    ) -> Result<Self> {
        let (train, valid) = divide(source, &options.part, seed)?;
        let vocabulary = match &options.vocabulary {
            Some(vocabulary) => Arc::clone(vocabulary),
            None => Arc::new(options.counting.build(&corpus.counts())),
        };
        let labels = if options.language_model {
            Labels::None
        } else {
            labels(source, &options.target, &train, &valid)?
        };
        let pad_id = vocabulary.id(&options.pad_token).map(i64::from);
        if pad_id.is_none() && !options.language_model {
            return Err(Error::invalid_argument(format!(
                "the vocabulary of {} has no token {:?} to fill up texts with: name one that it has by \
                 .pad_token(…)",
                counted(vocabulary.len(), "token"),
                options.pad_token
            )));
        }
        let ids = corpus.ids(&vocabulary).map_err(TextError::from)?;
        Ok(Self { ids, vocabulary, train, valid, labels, pad_id })
    }

    /// Returns a text that is equal on ranks with equal data.
    fn fingerprint(&self) -> String {
        let mut hasher = DefaultHasher::new();
        (&self.train, &self.valid).hash(&mut hasher);
        self.vocabulary.tokens().for_each(|token| token.hash(&mut hasher));
        let bits = |numbers: &[f32]| numbers.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
        match &self.labels {
            Labels::None => {}
            Labels::Classes(classes, labels) => (classes.names(), labels).hash(&mut hasher),
            Labels::Several(classes, rows) => {
                classes.names().hash(&mut hasher);
                rows.iter().for_each(|row| bits(row).hash(&mut hasher));
            }
            Labels::Numbers(numbers) => bits(numbers).hash(&mut hasher),
        }
        format!("{}-{:016x}", self.ids.corpus().fingerprint(), hasher.finish())
    }
}

/// Returns this rank's data if all ranks have the same, or else an error on every rank, so that none waits for one that
/// has failed.
pub(super) fn agreed(accelerator: &Accelerator, local: Result<Found>) -> Result<Found> {
    let told = match &local {
        Ok(found) => Ok(found.fingerprint()),
        Err(error) => Err(error.to_string()),
    };
    let all: Vec<Result<String, String>> = accelerator.processes().gather_object(told)?;
    let found = local?;
    let mut reasons = all.iter().map(|told| told.as_ref().err()).enumerate();
    if let Some((rank, Some(reason))) = reasons.find(|(_, reason)| reason.is_some()) {
        let message = format!("rank {rank} could not prepare its texts: {reason}");
        return Err(Error::invalid_argument(message));
    }
    let first = all.first();
    match all.iter().position(|told| Some(told) != first) {
        None => Ok(found),
        Some(rank) => Err(Error::invalid_argument(format!(
            "rank {rank} sees other texts than rank 0, by their words, labels or order: give every host the same files"
        ))),
    }
}

/// Divides texts into training and validation texts.
fn divide(source: &TextSource, part: &Part, seed: u64) -> Result<(Vec<usize>, Vec<usize>)> {
    let len = source.len();
    let is_valid: Vec<bool> = match (part, source.is_valid()) {
        (Part::None, _) => vec![false; len],
        (Part::Source, Some(is_valid)) => is_valid.to_vec(),
        (Part::Source, None) => share(len, 0.2, seed)?,
        (Part::Share(of_all), _) => share(len, *of_all, seed)?,
        (Part::Indices(indices), _) => {
            let mut is_valid = vec![false; len];
            for index in indices {
                let slot = is_valid.get_mut(*index).ok_or_else(|| {
                    Error::invalid_argument(format!(
                        "text {index} is to validate with, and there are {len} from 0"
                    ))
                })?;
                *slot = true;
            }
            is_valid
        }
    };
    let valid_at = |index: &usize| is_valid.get(*index).copied().unwrap_or_default();
    let (valid, train): (Vec<usize>, Vec<usize>) = (0..len).partition(valid_at);
    let lacks = match (train.is_empty(), valid.is_empty()) {
        (true, _) => "train",
        (false, true) if !matches!(part, Part::None) => "validate",
        _ => return Ok((train, valid)),
    };
    Err(Error::invalid_argument(format!(
        "none of {} is to {lacks} with: look at the folders or the column that divide them, choose by \
         .valid_share(…), or train without validation by .without_validation()",
        counted(len, "text")
    )))
}

/// Draws a share of the texts like fastai's `RandomSplitter`: the first ones of a permutation.
fn share(len: usize, share: f64, seed: u64) -> Result<Vec<bool>> {
    if !(share > 0.0 && share < 1.0) {
        return Err(Error::invalid_argument(format!(
            "a share of {share} of the texts cannot be split off, expected more than 0 and less than 1"
        )));
    }
    let mut is_valid = vec![false; len];
    let drawn = Shuffle::new(len, seed).order(0);
    for index in drawn.into_iter().take((share * len as f64) as usize) {
        if let Some(slot) = is_valid.get_mut(index) {
            *slot = true;
        }
    }
    Ok(is_valid)
}

/// Converts the labels of all used texts to targets. Labels of unused texts are ignored.
fn labels(
    source: &TextSource,
    target: &TextTarget,
    train: &[usize],
    valid: &[usize],
) -> Result<Labels> {
    let Some(labels) = source.labels() else {
        return Err(Error::invalid_argument(format!(
            "the source of {} has no labels: name their column, set them by TextSource::with_labels, or train a \
             language model by .language_model()",
            counted(source.len(), "text")
        )));
    };
    let label = |index: &usize| labels.get(*index).map(String::as_str).unwrap_or_default();
    let named = |index: usize| {
        let name = source.name(index);
        move |error: Error| Error::invalid_argument(format!("{name}: {error}"))
    };
    let used = || train.iter().chain(valid).copied();
    match target {
        TextTarget::Category(given) => {
            let classes = match given {
                Some(classes) => classes.clone(),
                None => Categories::of(train.iter().map(label))?,
            };
            if let [only] = classes.names() {
                return Err(Error::invalid_argument(format!(
                    "the training set ({}) has the single label {only:?}, but a classifier needs at \
                     least two classes: look at the column or the folders of the labels",
                    counted(train.len(), "text")
                )));
            }
            let mut numbers = vec![0; source.len()];
            for index in used() {
                numbers[index] = classes.number(label(&index)).map_err(named(index))?;
            }
            Ok(Labels::Classes(classes, numbers))
        }
        TextTarget::MultiCategory { classes, separator } => {
            let parts = |index: &usize| {
                let parts = label(index).split(separator.as_str()).map(str::trim);
                parts.filter(|part| !part.is_empty()).collect::<Vec<_>>()
            };
            let classes = match classes {
                Some(classes) => classes.clone(),
                None => Categories::of(train.iter().flat_map(parts))?,
            };
            let mut rows = vec![Vec::new(); source.len()];
            for index in used() {
                rows[index] = classes.row(parts(&index)).map_err(named(index))?;
            }
            Ok(Labels::Several(classes, rows))
        }
        TextTarget::Number => {
            let mut numbers = vec![0.0; source.len()];
            for index in used() {
                let text = label(&index);
                let number = text.trim().parse().ok().filter(|number: &f32| number.is_finite());
                numbers[index] = number.ok_or_else(|| {
                    Error::invalid_argument(format!(
                        "{} has the label {text:?}, expected a finite number",
                        source.name(index)
                    ))
                })?;
            }
            Ok(Labels::Numbers(numbers))
        }
    }
}
