//! Summary of the steps of one sample through a data block.

use std::fmt;
use std::path::Path;

use brigade_data::{BatchContext, BatchedDataset};
use brigade_rank_env::text::{counted, escaped};
use brigade_torch::{Error, Result};
use brigade_vision::decode::{DecodeOptions, Decoder};
use brigade_vision::source::ImageSource;
use brigade_vision::transforms::Phase;
use brigade_vision::{Image, VisionError};
use tch::{Kind, Tensor};

use super::DataBlock;
use crate::data::batch_transforms::BatchPipeline;
use crate::data::blocks::Targets;
use crate::data::item_transforms::compose;
use crate::data::samples::Samples;

/// A step of a [`Summary`] with its result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Name of the step: `items`, `split`, `labels`, `targets`, `decode`, a transform, `batch`, or `batch transforms`.
    pub name: String,
    /// Description of the step's output, or the error message with the item.
    pub result: Result<String, String>,
}

/// The steps of one training sample and a batch through a [`DataBlock`], up to the first failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Steps in their order. Only the last one can have failed.
    pub steps: Vec<Step>,
}

impl Summary {
    /// Returns the step that failed, if any.
    #[must_use]
    pub fn failed(&self) -> Option<&Step> {
        self.steps.last().filter(|step| step.result.is_err())
    }

    /// Records the result of a step. `None` after a failure.
    fn step<T>(
        &mut self,
        name: impl Into<String>,
        made: Result<T>,
        describe: impl FnOnce(&T) -> Result<String>,
    ) -> Option<T> {
        let described = made.and_then(|made| Ok((describe(&made)?, made)));
        let (result, made) = match described {
            Ok((text, made)) => (Ok(text), Some(made)),
            Err(error) => (Err(error.to_string()), None),
        };
        self.steps.push(Step { name: name.into(), result });
        made
    }
}

/// Formats one line per step. Control characters in the names of files and labels are escaped.
impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Step { name, result } in &self.steps {
            match result {
                Ok(text) => writeln!(f, "{name}: {}", escaped(text))?,
                Err(reason) => writeln!(f, "{name} FAILED: {}", escaped(reason))?,
            }
        }
        Ok(())
    }
}

/// Number of samples of the batch.
const BATCH: usize = 4;

pub(super) fn of(block: &DataBlock, path: &Path) -> Summary {
    let mut summary = Summary { steps: Vec::new() };
    // A failed step ends the summary, which contains its error.
    let _ = follow(block, path, &mut summary);
    summary
}

fn follow(block: &DataBlock, path: &Path, summary: &mut Summary) -> Option<()> {
    let seed = block.options.seed.unwrap_or_default();
    let items = summary.step("items", block.found_items(path), |items| {
        Ok(format!("{} below {}, the first {}", items.len(), path.display(), items.name(0)))
    })?;
    let split = summary.step("split", block.found_split(&items, seed), |split| {
        Ok(format!("{} to train with, {} to validate with", split.train.len(), split.valid.len()))
    })?;
    let part = |indices: &[usize]| {
        let items = items.subset(indices);
        Ok::<_, Error>((block.found_labels(&items)?, items))
    };
    let parts = part(&split.train).and_then(|train| Ok((train, part(&split.valid)?)));
    let (train, valid) = summary.step("labels", parts, |((labels, items), _)| {
        let first = labels.first().map(|label| format!("{label:?}")).unwrap_or_default();
        Ok(format!("{} has {first}", items.name(0)))
    })?;
    let encoder = block.target.encoder(&train.1, &train.0);
    let targets = encoder.and_then(|encoder| {
        encoder.encode(&valid.1, &valid.0)?;
        Ok((encoder.encode(&train.1, &train.0)?, encoder))
    });
    let (targets, encoder) = summary.step("targets", targets, |(targets, encoder)| {
        let classes = encoder.classes().map(|names| {
            let some: Vec<&str> = names.iter().take(10).map(String::as_str).collect();
            let more = if names.len() > some.len() { ", …" } else { "" };
            format!(" of {}: {}{more}", counted(names.len(), "class"), some.join(", "))
        });
        let first = match targets {
            Targets::Classes(classes) => format!("class {}", classes.first().unwrap_or(&0)),
            Targets::Rows(rows, width) => {
                format!("{:?}", rows.get(..(*width).max(1)).unwrap_or_default())
            }
            Targets::Points(points) => format!("{:?}", points.first().cloned().unwrap_or_default()),
            Targets::Masks(masks) => {
                format!("{}", masks.first().cloned().unwrap_or_default().display())
            }
        };
        Ok(format!("{first}{}", classes.unwrap_or_default()))
    })?;

    let (_, items) = train;
    let source = items.source();
    let mut bytes = Vec::new();
    let image = source
        .read(0, &mut bytes)
        .and_then(|()| Decoder::new(DecodeOptions::default()).decode_new(&source.name(0), &bytes));
    let image = image.map_err(|error| VisionError::from(error).into());
    let first = summary.step("decode", image, |image| Ok(describe_image(image)))?;
    let transforms = block.options.ordered();
    let context = BatchContext { seed, ..BatchContext::default() };
    for count in 1..=transforms.len() {
        let list = compose(&transforms[..count]);
        let made = list.plan(first.size(), Phase::Train, context.sample_seed(0));
        let made = made
            .and_then(|plan| plan.apply(&first))
            .map_err(|error| Error::invalid_argument(format!("{error}, in {}", items.name(0))));
        summary.step(format!("{:?}", transforms[count - 1]), made, |image| {
            Ok(describe_image(image))
        })?;
    }

    let classes = encoder.classes().map_or(0, <[String]>::len);
    let (pipeline, by_batch) = summary.step(
        "join batch transforms",
        BatchPipeline::new(&block.options.batch_transforms),
        |(pipeline, _)| Ok(format!("{:?}", pipeline.augment)),
    )?;
    let samples = Samples::new(&items, targets, classes, &block.reading(), Phase::Train);
    let indices: Vec<usize> = (0..items.len().min(BATCH)).collect();
    let dataset = samples.map(|samples| pipeline.augment.dataset(samples));
    let batch = dataset.and_then(|dataset| dataset.batch(&indices, &context));
    let (images, _, drawn) =
        summary.step(format!("batch of {}", indices.len()), batch, |(images, targets, _)| {
            Ok(format!("images {}; targets {}", range(images)?, range(targets)?))
        })?;
    let note = if by_batch { ", before the normalisation by the first batch" } else { "" };
    summary
        .step("batch transforms", pipeline.apply(&images, &drawn), |images| {
            Ok(format!("images {}{note}", range(images)?))
        })
        .map(|_| ())
}

fn describe_image(image: &Image) -> String {
    let (low, high) = (image.pixels().iter().min(), image.pixels().iter().max());
    format!(
        "image of {} pixels, {} to {}",
        image.size(),
        low.copied().unwrap_or_default(),
        high.copied().unwrap_or_default()
    )
}

fn range(tensor: &Tensor) -> Result<String> {
    let numbers = tensor.f_to_kind(Kind::Double)?;
    let (low, high) = (numbers.f_min()?, numbers.f_max()?);
    Ok(format!(
        "{:?} {:?}, {:.4} to {:.4}",
        tensor.kind(),
        tensor.size(),
        f64::try_from(&low)?,
        f64::try_from(&high)?
    ))
}
