//! Creation of loaders from the texts that were found.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread;

use brigade_data::{BatchedDataset, Collate, DataLoader, draw_seed};
use brigade_rank_env::text::counted;
use brigade_tokens::{ParallelOptions, TextSource, TokenCorpus};
use brigade_torch::{Error, Result};
use brigade_train::Accelerator;
use tch::Tensor;

use super::found::{Found, Labels, agreed};
use super::{Options, Origin, TextBatches, TextDataLoaders};
use crate::codec::TextCodec;
use crate::error::TextError;
use crate::{
    Backwards, Documents, LabelledTexts, LanguageModelData, Padding, SortedSampler, Subset,
};

/// Creates the loaders, which are the same on all ranks.
pub(super) fn loaders(
    origin: Origin,
    options: Options,
    accelerator: &Accelerator,
    batch_size: usize,
) -> Result<TextDataLoaders> {
    let seed = options.seed.unwrap_or_else(draw_seed);
    let seed = accelerator.processes().broadcast_object(seed, 0)?;
    // From here on ranks synchronise before the first error is returned.
    let source = origin.open(&options.part).map_err(|error| TextError::from(error).into());
    let corpus = corpus(source.as_ref().ok(), &options, accelerator)?;
    let local = source.and_then(|source| match corpus {
        Some(corpus) => Found::new(&source, &corpus?, &options, seed),
        None => Err(Error::invalid_argument("the source has gone")),
    });
    let found = agreed(accelerator, local)?;
    let split_batches = accelerator.data_loader_configuration().split_batches;
    let world = accelerator.data_processes().num_processes();
    Maker { found, options, seed, batch_size, world, split_batches }.data()
}

/// Tokenizes the texts, or reads their tokens from the cache. Returns `None` without a source. The outer error is that
/// of ranks that cannot reach each other.
fn corpus(
    source: Option<&TextSource>,
    options: &Options,
    accelerator: &Accelerator,
) -> Result<Option<Result<TokenCorpus>>> {
    let available = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let on_host = accelerator.processes().world().local_world_size.as_usize();
    let share = (available / on_host).max(1);
    let tokenizer = &*options.tokenizer;
    let Some(cache) = &options.cache else {
        let split = |source| {
            TokenCorpus::in_memory(tokenizer, source, ParallelOptions::new().threads(share))
        };
        return Ok(source.map(|source| Ok(split(source).map_err(TextError::from)?)));
    };
    let threads = if accelerator.processes().is_local_main_process() { available } else { share };
    let split = |source| cache.corpus(tokenizer, source, ParallelOptions::new().threads(threads));
    // The first rank's failure need not be that of the others, which may succeed: the results are compared later.
    let made =
        accelerator.processes().local_main_process_first(|| Ok::<_, Error>(source.map(split)))?;
    Ok(made.map(|corpus| Ok(corpus.map_err(TextError::from)?)))
}

/// Data from which loaders are created.
struct Maker {
    found: Found,
    options: Options,
    seed: u64,
    batch_size: usize,
    /// Number of ranks that read other texts.
    world: usize,
    split_batches: bool,
}

impl Maker {
    fn data(self) -> Result<TextDataLoaders> {
        let Found { vocabulary, labels, pad_id, .. } = &self.found;
        let padding = Padding::chunks(self.options.seq_len).id(pad_id.unwrap_or(1));
        let (train, valid) = match labels {
            Labels::None => self.language_model()?,
            Labels::Classes(_, labels) => self.labelled(labels, padding)?,
            Labels::Several(_, rows) => self.labelled(rows, padding)?,
            Labels::Numbers(numbers) => self.labelled(numbers, padding)?,
        };
        let classes = match labels {
            Labels::Classes(classes, _) | Labels::Several(classes, _) => Some(classes.clone()),
            Labels::None | Labels::Numbers(_) => None,
        };
        let (tokenizer, vocabulary) = (self.options.tokenizer, Arc::clone(vocabulary));
        let codec = TextCodec::new(Arc::clone(&tokenizer), Arc::clone(&vocabulary))
            .backwards(self.options.backwards)
            .pad_id(*pad_id);
        Ok(TextDataLoaders { train, valid, vocabulary, tokenizer, classes, codec })
    }

    /// Returns the batch size of all ranks together: of training, or of validation, whose batches the Learner never
    /// splits.
    fn rows(&self, training: bool) -> usize {
        let split = training && self.split_batches;
        if split { self.batch_size } else { self.batch_size.saturating_mul(self.world) }
    }

    fn documents(&self, indices: &[usize]) -> Result<Box<dyn Documents>> {
        let part = Subset::new(self.found.ids.clone(), indices.to_vec())?;
        Ok(if self.options.backwards { Box::new(Backwards(part)) } else { Box::new(part) })
    }

    fn loader(
        &self,
        dataset: impl BatchedDataset<Batch = (Tensor, Tensor)> + 'static,
        training: bool,
    ) -> DataLoader<TextBatches> {
        DataLoader::new(Arc::new(dataset) as TextBatches)
            .batch_size(self.batch_size)
            .seed(self.seed)
            .threads(self.options.threads)
            .overlap_epochs(training)
    }

    fn language_model(&self) -> Result<Parts> {
        self.both(|indices, training| {
            let (documents, rows) = (self.documents(indices)?, self.rows(training));
            let data = LanguageModelData::new(documents, rows, self.options.seq_len)?
                .shuffle(training && self.options.shuffle)
                .every_token(!training && self.options.every_token);
            Ok(self.loader(data, training))
        })
    }

    fn labelled<L>(&self, labels: &[L], padding: Padding) -> Result<Parts>
    where
        L: Collate<Batch = Tensor> + Clone + Send + Sync + 'static,
    {
        let (mut train, valid) = self.both(|indices, training| {
            let labels = indices.iter().filter_map(|index| labels.get(*index).cloned()).collect();
            let data = LabelledTexts::new(self.documents(indices)?, labels, padding)?;
            let lengths = data.lengths();
            let sampler = if training && self.options.shuffle {
                SortedSampler::shuffled(lengths, self.rows(true), self.seed)
            } else {
                SortedSampler::longest_first(lengths)
            };
            Ok(self.loader(data, training).sampler(sampler))
        })?;
        train = train.drop_last(self.options.drop_last);
        if train.is_empty() {
            return Err(Error::invalid_argument(format!(
                "too few to train with for a batch of {1}: {0}; make the batch smaller, or keep smaller batches by \
                 .drop_last(false)",
                counted(self.found.train.len(), "text"),
                self.batch_size
            )));
        }
        Ok((train, valid))
    }

    /// Creates the training loader, and the validation loader if there are validation texts.
    fn both(
        &self,
        loader: impl Fn(&[usize], bool) -> Result<DataLoader<TextBatches>>,
    ) -> Result<Parts> {
        let Found { train, valid, .. } = &self.found;
        let valid = (!valid.is_empty()).then(|| loader(valid, false));
        Ok((loader(train, true)?, valid.transpose()?))
    }
}

type Parts = (DataLoader<TextBatches>, Option<DataLoader<TextBatches>>);
