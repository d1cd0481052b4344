//! Preparation of loaders from a data block and a folder.

use std::path::Path;

use brigade_data::{BatchContext, BatchedDataset, DataLoader, draw_seed};
use brigade_metrics::Mse;
use brigade_rank_env::text::counted;
use brigade_sampling::Weighted;
use brigade_torch::{Error, Result};
use brigade_train::Accelerator;
use brigade_vision::VisionError;
use brigade_vision::labels::Split;
use brigade_vision::source::{Fingerprint, ImageSource};
use brigade_vision::transforms::{self, Phase};
use tch::{Kind, Tensor};

use super::DataBlock;
use crate::data::agree::agreed;
use crate::data::batch_transforms::BatchPipeline;
use crate::data::blocks::{Encoder, TargetKind, Targets};
use crate::data::codec::ImageCodec;
use crate::data::item_transforms::compose;
use crate::data::items::Items;
use crate::data::labels::Label;
use crate::data::options::Weights;
use crate::data::samples::{Reading, Samples};
use crate::loaders::{BatchSource, Loaders, source};
use crate::loss::{BceWithLogits, CrossEntropy};

/// Items of one part, with their labels.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) items: Items,
    pub(super) labels: Vec<Label>,
    pub(super) targets: Targets,
}

/// Facts about the items, collected before an image is read.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) train: Part,
    pub(super) valid: Part,
    pub(super) encoder: Encoder,
}

impl Found {
    fn fingerprint(&self) -> Result<Fingerprint> {
        let mut fields = Vec::new();
        for part in [&self.train, &self.valid] {
            let files = part.items.source().fingerprint().map_err(VisionError::from)?;
            fields.push(files.to_string());
            fields.extend(part.labels.iter().map(|label| match label {
                // The same path relative to another folder.
                Label::File(path) => {
                    format!("{:?}", path.strip_prefix(part.items.root()).unwrap_or(path))
                }
                label => format!("{label:?}"),
            }));
        }
        fields.extend(self.encoder.classes().unwrap_or_default().iter().cloned());
        Ok(Fingerprint::of("data block", fields))
    }
}

impl DataBlock {
    /// Lists the items of the folder.
    pub(super) fn found_items(&self, path: &Path) -> Result<Items> {
        let items = self.items.items(path)?;
        if items.is_empty() {
            Err(Error::invalid_argument(format!(
                "the getter of items found none below {}; look at the folder and the filters",
                path.display()
            )))
        } else {
            Ok(items)
        }
    }

    pub(super) fn found_labels(&self, items: &Items) -> Result<Vec<Label>> {
        let Some(label) = &self.label else {
            return Err(Error::invalid_argument(
                "the block has no labeller; say how labels are found, as .label(parent_name) or \
                 .label(name_regex(r\"^(.*)_\\d+\"))",
            ));
        };
        let labels = label.labels(items)?;
        if labels.len() != items.len() {
            return Err(Error::invalid_argument(format!(
                "the labeller gave {} for {}",
                counted(labels.len(), "label"),
                counted(items.len(), "item")
            )));
        }
        Ok(labels)
    }

    pub(super) fn found_split(&self, items: &Items, seed: u64) -> Result<Split> {
        let split = self.split.split(items, &|| self.found_labels(items), seed)?;
        let outside = split.train.iter().chain(&split.valid).find(|index| **index >= items.len());
        if let Some(index) = outside {
            return Err(Error::invalid_argument(format!(
                "the split has item {index}, and there are {}",
                items.len()
            )));
        }
        if split.train.is_empty() {
            return Err(Error::invalid_argument(format!(
                "the split leaves none of {} to train with; look at its share and its rule",
                counted(items.len(), "item")
            )));
        }
        if split.valid.is_empty() && !self.split.may_lack_validation() {
            return Err(Error::invalid_argument(format!(
                "the split leaves none of {} to validate with; look at its share and its rule, or \
                 train without validation by .split(no_split())",
                counted(items.len(), "item")
            )));
        }
        Ok(split)
    }

    /// Finds items, labels and targets.
    pub(super) fn find(&self, path: &Path, seed: u64) -> Result<Found> {
        let items = self.found_items(path)?;
        let split = self.found_split(&items, seed)?;
        let part = |indices: &[usize]| {
            let items = items.subset(indices);
            let labels = self.found_labels(&items)?;
            Ok::<_, Error>((items, labels))
        };
        let (train, valid) = (part(&split.train)?, part(&split.valid)?);
        let encoder = self.target.encoder(&train.0, &train.1)?;
        let encoded = |(items, labels): (Items, Vec<Label>)| {
            let targets = encoder.encode(&items, &labels)?;
            Ok::<_, Error>(Part { items, labels, targets })
        };
        Ok(Found { train: encoded(train)?, valid: encoded(valid)?, encoder })
    }

    pub(super) fn reading(&self) -> Reading {
        Reading {
            grey: self.images.grey,
            transforms: compose(&self.options.ordered()),
            on_broken: self.options.on_broken,
            cache: self.options.cache.clone(),
        }
    }
}

/// Maker of the batches of both parts.
struct Maker<'a> {
    block: &'a DataBlock,
    seed: u64,
    batch_size: usize,
    reading: Reading,
    kind: TargetKind,
    classes: usize,
}

impl Maker<'_> {
    fn samples(&self, part: &Part, phase: Phase) -> Result<Samples> {
        Samples::new(&part.items, part.targets.clone(), self.classes, &self.reading, phase)
    }

    fn loader<D: BatchedDataset>(&self, dataset: D) -> DataLoader<D> {
        DataLoader::new(dataset)
            .batch_size(self.batch_size)
            .seed(self.seed)
            .threads(self.block.options.threads)
    }

    fn source(
        &self,
        what: &str,
        part: &Part,
        phase: Phase,
        pipeline: BatchPipeline,
    ) -> Result<Box<dyn BatchSource>> {
        let samples = pipeline.augment.dataset(self.samples(part, phase)?);
        let mut loader = self.loader(samples);
        if what == TRAINING {
            let options = &self.block.options;
            loader = loader
                .shuffle(true)
                .drop_last(options.drop_last)
                .overlap_epochs(options.overlap_epochs);
            if let Some(weights) = weights(&options.weights, part)? {
                let draws = weights.len();
                let sampler =
                    Weighted::with_replacement(weights, draws, self.seed).map_err(|error| {
                        Error::invalid_argument(format!("the weights of items: {error}"))
                    })?;
                loader = loader.sampler(sampler);
            }
            if loader.is_empty() {
                return Err(Error::invalid_argument(format!(
                    "too few for a batch of {1}: {0}; make the batch smaller, or keep smaller batches by \
                     .drop_last(false)",
                    counted(part.items.len(), "training item"),
                    self.batch_size
                )));
            }
        }
        let kind = self.kind;
        source(what, loader, move |(images, targets, drawn): (Tensor, Tensor, Tensor)| {
            let targets = match kind {
                TargetKind::Mask => pipeline.augment.apply_to_masks(&targets, &drawn)?,
                TargetKind::Points => {
                    pipeline.augment.apply_to_points(&targets, &drawn, &images)?
                }
                _ => targets,
            };
            Ok((pipeline.apply(&images, &drawn)?, targets))
        })
    }

    /// Returns mean and standard deviation of each channel of the first training batch.
    fn statistics(&self, part: &Part, pipeline: &BatchPipeline) -> Result<([f32; 3], [f32; 3])> {
        let augment = pipeline.augment.before_normalization();
        let samples = augment.dataset(self.samples(part, Phase::Train)?);
        let loader = self.loader(samples).shuffle(true);
        let first = loader.plan(0)?.batch(0, 0).map(|batch| batch.indices).unwrap_or_default();
        let context = BatchContext { seed: self.seed, ..BatchContext::default() };
        let (images, _, drawn) = loader.dataset().batch(&first, &context)?;
        let images = augment.apply(&images, &drawn)?.f_to_kind(Kind::Double)?;
        let dims: &[i64] = &[0, 2, 3];
        let mean = images.f_mean_dim(dims, false, Kind::Double)?;
        let std = images.f_std_dim(dims, true, false)?.f_add_scalar(1e-7)?;
        let channels = |values: &Tensor| -> Result<[f32; 3]> {
            let values = Vec::<f64>::try_from(values)?;
            let last = values.last().copied().unwrap_or_default();
            Ok([0, 1, 2].map(|channel| *values.get(channel).unwrap_or(&last) as f32))
        };
        Ok((channels(&mean)?, channels(&std)?))
    }
}

const TRAINING: &str = "training";

/// Makes the loaders of a block: the same on all ranks.
pub(super) fn loaders(
    block: &DataBlock,
    accelerator: &Accelerator,
    path: &Path,
    batch_size: usize,
) -> Result<Loaders<Tensor>> {
    let seed = block.options.seed.unwrap_or_else(draw_seed);
    let seed = accelerator.processes().broadcast_object(seed, 0)?;
    let prepared = BatchPipeline::new(&block.options.batch_transforms)
        .and_then(|pipeline| Ok((block.find(path, seed)?, pipeline)));
    let (found, (mut pipeline, by_batch)) =
        agreed(accelerator, prepared, |(found, _)| found.fingerprint())?;

    let kind = found.encoder.kind;
    let maker = Maker {
        block,
        seed,
        batch_size,
        reading: block.reading(),
        kind,
        classes: found.encoder.classes().map_or(0, <[String]>::len),
    };
    if by_batch {
        // Rounding may differ between ranks.
        let local = maker.statistics(&found.train, &pipeline);
        let (mean, std) =
            agreed(accelerator, local, |_| Ok(Fingerprint::of("statistics", [""; 0])))?;
        let (mean, std) = accelerator.processes().broadcast_object((mean, std), 0)?;
        pipeline = pipeline.normalized(transforms::Normalize { mean, std });
    }
    let valid_pipeline = pipeline.validation();
    let codec = ImageCodec {
        grey: block.images.grey,
        transforms: block.options.ordered(),
        batch: valid_pipeline.clone(),
        target: kind,
    };
    let (mut valid, mut augmented) = (None, None);
    if !found.valid.items.is_empty() {
        let part = &found.valid;
        valid = Some(maker.source("validation", part, Phase::Valid, valid_pipeline)?);
        augmented = Some(maker.source("augmented", part, Phase::Train, pipeline.clone())?);
    }
    let train = maker.source(TRAINING, &found.train, Phase::Train, pipeline)?;
    let mut loaders = Loaders::of_sources(train, valid, augmented).codec(codec);
    if let Some(classes) = found.encoder.classes() {
        loaders = loaders.classes(classes);
    }
    Ok(match kind {
        TargetKind::Category | TargetKind::Mask => loaders.loss(CrossEntropy::default()),
        TargetKind::MultiCategory => loaders.loss(BceWithLogits::default()),
        TargetKind::Numbers | TargetKind::Points => loaders.loss(Mse),
    })
}

/// Returns the weight of each training item, or `None` if all are equal.
fn weights(weights: &Weights, part: &Part) -> Result<Option<Vec<f64>>> {
    match weights {
        Weights::Equal => Ok(None),
        Weights::Of(weight) => {
            let paths = (0..part.items.len()).map(|index| part.items.path(index));
            Ok(Some(paths.map(|path| weight(&path)).collect()))
        }
        Weights::Balanced => {
            let Targets::Classes(classes) = &part.targets else {
                return Err(Error::invalid_argument(
                    "only items of one class each can be balanced; give weights by .weighted(…)",
                ));
            };
            let mut counts = std::collections::BTreeMap::new();
            classes.iter().for_each(|class| *counts.entry(*class).or_insert(0.0) += 1.0);
            Ok(Some(classes.iter().map(|class| 1.0 / counts.get(class).unwrap_or(&1.0)).collect()))
        }
    }
}
