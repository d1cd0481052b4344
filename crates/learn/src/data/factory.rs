//! The usual data blocks, each with its folder.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use brigade_torch::Result;
use brigade_train::Accelerator;
use brigade_vision::{CacheOptions, OnBroken};
use tch::Tensor;

use super::batch_transforms::BatchTransform;
use super::block::DataBlock;
use super::block::Summary;
use super::blocks::{TargetBlock, categories, grey_images, images, masks, multi_categories};
use super::item_transforms::{ItemTransform, Parts};
use super::items::{Csv, Files, GetItems, csv, file_list};
use super::labels::{
    IntoLabel, LabelItems, column, label_list, name_function, name_regex, parent_name, path_regex,
};
use super::options::{Weights, block_methods};
use super::split::{SplitItems, grandparent};
use crate::loaders::Loaders;

/// Loaders of a folder of images, with common defaults: fastai's `ImageDataLoaders`. Every step can be set otherwise,
/// as in a [`DataBlock`].
///
/// ```
/// use brigade_learn::data::{ImageLoaders, Resize, random_split};
/// # use brigade_testkit::Photos;
/// # use brigade_train::Accelerator;
///
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path();
/// # Photos::new(2, 8).size(60, 45).write(path)?;
/// # let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
/// let data = ImageLoaders::from_folder(path)
///     .item_transforms(Resize::new(32))
///     .loaders(&accelerator, 4)?;
/// assert_eq!((data.train_batches(), data.valid_batches()), (4, 1));
/// // All in one folder, a share of them to validate with.
/// let data = ImageLoaders::from_folder(path.join("train"))
///     .split(random_split(0.25))
///     .item_transforms(Resize::new(32))
///     .loaders(&accelerator, 4)?;
/// assert_eq!((data.train_batches(), data.valid_batches()), (3, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct ImageLoaders {
    block: DataBlock,
    path: PathBuf,
}

impl ImageLoaders {
    /// Loads images from a folder for each class below `train`, and below `valid` or `val`.
    pub fn from_folder(path: impl Into<PathBuf>) -> Self {
        Self::new(path).label(parent_name).split(grandparent("train", ["valid", "val"]))
    }

    /// Loads all images below a folder, with the class that a function returns for each file's name.
    pub fn from_name<L: IntoLabel + 'static>(
        path: impl Into<PathBuf>,
        label: impl Fn(&str) -> L + Send + Sync + 'static,
    ) -> Self {
        Self::new(path).label(name_function(label))
    }

    /// Loads all images below a folder, with the class that the first group of a regular expression matches in each
    /// file's name.
    pub fn from_name_regex(path: impl Into<PathBuf>, pattern: impl Into<String>) -> Self {
        Self::new(path).label(name_regex(pattern))
    }

    /// Loads all images below a folder, with the class that a function returns for each path.
    pub fn from_path<L: IntoLabel + 'static>(
        path: impl Into<PathBuf>,
        label: impl Fn(&Path) -> L + Send + Sync + 'static,
    ) -> Self {
        Self::new(path).label(label)
    }

    /// Loads all images below a folder, with the class that the first group of a regular expression matches in each
    /// path.
    pub fn from_path_regex(path: impl Into<PathBuf>, pattern: impl Into<String>) -> Self {
        Self::new(path).label(path_regex(pattern))
    }

    /// Loads the images that a CSV file in the folder lists in its first column, with the classes in its second one.
    /// `table` is a file's name, or a [`Csv`] with options.
    pub fn from_csv(path: impl Into<PathBuf>, table: impl Into<Csv>) -> Self {
        Self::new(path).items(table.into()).label(column(1))
    }

    /// Loads these images below a folder, with a label each.
    pub fn from_lists<P: Into<PathBuf>, L: IntoLabel>(
        path: impl Into<PathBuf>,
        files: impl IntoIterator<Item = P>,
        labels: impl IntoIterator<Item = L>,
    ) -> Self {
        Self::new(path).items(file_list(files)).label(label_list(labels))
    }

    fn new(path: impl Into<PathBuf>) -> Self {
        Self { block: DataBlock::new(images(), categories()), path: path.into() }
    }

    block_methods!(self => self.block);

    /// Sets the block of the target. Defaults to one class.
    #[must_use]
    pub fn target(mut self, target: impl Into<TargetBlock>) -> Self {
        self.block.target = target.into();
        self
    }

    /// Reads several classes for each item from a column of the table, with a separator between them: fastai's
    /// `label_delim`.
    #[must_use]
    pub fn label_separator(self, of_column: impl ToString, separator: impl Into<String>) -> Self {
        self.label(column(of_column).separator(separator)).target(multi_categories())
    }

    /// Converts images to one channel (grayscale).
    #[must_use]
    pub fn grey(mut self) -> Self {
        self.block.images = grey_images();
        self
    }

    /// Makes the loaders, as [`DataBlock::loaders`] does.
    ///
    /// # Errors
    /// Returns the same errors as [`DataBlock::loaders`].
    pub fn loaders(&self, accelerator: &Accelerator, batch_size: usize) -> Result<Loaders<Tensor>> {
        self.block.loaders(accelerator, &self.path, batch_size)
    }

    /// Runs one sample through every step, as [`DataBlock::summary`] does.
    #[must_use]
    pub fn summary(&self) -> Summary {
        self.block.summary(&self.path)
    }
}

impl From<&str> for Csv {
    fn from(file: &str) -> Self {
        csv(file)
    }
}

impl From<PathBuf> for Csv {
    fn from(file: PathBuf) -> Self {
        csv(file)
    }
}

/// Constructors of loaders of images with segmentation masks: fastai's `SegmentationDataLoaders`.
#[derive(Clone, Copy, Debug)]
pub enum SegmentationLoaders {}

impl SegmentationLoaders {
    /// Loads all images below the folder `images` of a data set, with segmentation masks: `mask` returns the mask's
    /// path below the data set's folder for each image's path, and `codes` are the names of the classes (fastai's
    /// `from_label_func`).
    pub fn from_folder(
        path: impl Into<PathBuf>,
        mask: impl Fn(&Path) -> PathBuf + Send + Sync + 'static,
        codes: impl IntoIterator<Item = impl Into<String>>,
    ) -> ImageLoaders {
        ImageLoaders::new(path)
            .items(Files::images().folders(["images"]))
            .label(mask)
            .target(masks(codes))
    }
}

impl fmt::Debug for ImageLoaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImageLoaders")
            .field("block", &self.block)
            .field("path", &self.path)
            .finish()
    }
}
