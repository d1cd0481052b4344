//! The data block.

mod prepare;
mod summary;

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use brigade_torch::Result;
use brigade_train::Accelerator;
use brigade_vision::{CacheOptions, OnBroken};
use tch::Tensor;

use super::batch_transforms::BatchTransform;
use super::blocks::{ImageBlock, TargetBlock};
use super::item_transforms::{ItemTransform, Parts};
use super::items::{GetItems, image_files};
use super::labels::LabelItems;
use super::options::{Options, Weights, block_methods};
use super::split::{SplitItems, random_split};
use crate::loaders::Loaders;

pub use summary::{Step, Summary};

/// A description of how files become batches: fastai's `DataBlock`.
///
/// ```
/// use brigade_learn::data::{
///     DataBlock, Flip, Normalize, RandomResizedCrop, categories, grandparent, image_files, images,
///     parent_name,
/// };
/// # use brigade_testkit::Photos;
/// # use brigade_train::Accelerator;
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path();
/// # Photos::new(2, 8).size(60, 45).write(path)?;
/// # let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
/// let data = DataBlock::new(images(), categories())
///     .items(image_files)
///     .label(parent_name)
///     .split(grandparent("train", "val"))
///     .item_transforms((RandomResizedCrop::new(32), Flip::new(0.5)))
///     .batch_transforms(Normalize::imagenet())
///     .loaders(&accelerator, path, 4)?;
/// assert_eq!(data.class_names().unwrap(), ["disc", "square"]);
/// assert_eq!((data.train_batches(), data.valid_batches()), (4, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct DataBlock {
    pub(super) images: ImageBlock,
    pub(super) target: TargetBlock,
    pub(super) items: Arc<dyn GetItems>,
    pub(super) label: Option<Arc<dyn LabelItems>>,
    pub(super) split: Arc<dyn SplitItems>,
    pub(super) options: Options,
}

impl DataBlock {
    /// Makes a data block from the blocks of the model's input and of the target.
    #[must_use]
    pub fn new(images: ImageBlock, target: impl Into<TargetBlock>) -> Self {
        Self {
            images,
            target: target.into(),
            items: Arc::new(image_files),
            label: None,
            split: Arc::new(random_split(0.2)),
            options: Options::default(),
        }
    }

    block_methods!(self => self);

    /// Makes the loaders of a folder, with batches of `batch_size` samples on each rank (fastai's default is 64).
    ///
    /// Training data are shuffled, and a smaller last batch is left out; validation has the same batch size and all
    /// items in their order. Every rank calls it: all ranks use rank 0's seed, and compare the items that they have
    /// found. The result contains the loss, the names of the classes, and the codec that a saved Learner needs to
    /// predict.
    ///
    /// # Errors
    /// Fails on every rank if one rank cannot find items or labels or split them, if the training set lacks a label of
    /// the validation set, or if the ranks find different items. The message contains what to do.
    pub fn loaders(
        &self,
        accelerator: &Accelerator,
        path: impl AsRef<Path>,
        batch_size: usize,
    ) -> Result<Loaders<Tensor>> {
        prepare::loaders(self, accelerator, path.as_ref(), batch_size)
    }

    /// Runs one training sample, and a batch of up to four, through every step, and describes the results: fastai's
    /// `summary`. A failure is part of the result, with its step and its item.
    ///
    /// ```
    /// use brigade_learn::data::{DataBlock, Resize, categories, images, name_regex};
    /// # use brigade_testkit::Photos;
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # Photos::new(2, 3).size(60, 45).write(folder.path())?;
    /// let block = DataBlock::new(images(), categories())
    ///     .label(name_regex(r"^(.+)_\d+\.jpg$")) // the names are 0000.jpg and so on
    ///     .item_transforms(Resize::new(32));
    /// let summary = block.summary(folder.path());
    /// assert_eq!(summary.failed().unwrap().name, "labels");
    /// assert!(summary.to_string().contains("its name does not match"), "{summary}");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn summary(&self, path: impl AsRef<Path>) -> Summary {
        summary::of(self, path.as_ref())
    }
}

impl fmt::Debug for DataBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataBlock")
            .field("images", &self.images)
            .field("target", &self.target)
            .field("item_transforms", &self.options.item_transforms)
            .field("batch_transforms", &self.options.batch_transforms)
            .finish_non_exhaustive()
    }
}
