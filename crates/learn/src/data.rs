//! Data blocks: from files to loaders for training and validation, in fastai's steps.
//!
//! A [`DataBlock`] describes the model's input and target ([`images`], [`categories`], …), where items are found
//! ([`image_files`], [`csv()`], …), how their labels are found ([`parent_name`], [`name_regex`], …), which of them are
//! the validation set ([`grandparent`], [`random_split`], …) and what is done to images and batches. Its
//! [`loaders`](DataBlock::loaders) are what a Learner takes. [`ImageLoaders`] has the usual combinations.
//!
//! In fastai, ranks may have different data. Here all have the same: items are sorted, the seed of a random split is
//! rank 0's, and the items found by all ranks are compared before the first step.

mod agree;
mod batch_transforms;
mod block;
mod blocks;
mod codec;
mod factory;
mod item_transforms;
mod items;
mod labels;
mod options;
mod pictures;
mod samples;
mod split;
#[cfg(test)]
mod tests;
mod unlabelled;

pub use batch_transforms::{
    AugTransforms, BatchTransform, Normalize, aug_transforms, hue, random_erasing, saturation,
};
pub use block::{DataBlock, Step, Summary};
pub use blocks::{
    CategoryBlock, ImageBlock, MaskBlock, MultiCategoryBlock, NumberBlock, PointBlock, TargetBlock,
    categories, grey_images, images, masks, multi_categories, numbers, points,
};
pub use codec::codec_from;
pub use factory::{ImageLoaders, SegmentationLoaders};
pub use item_transforms::{Flip, ItemTransform, Part, Parts, RandomResizedCrop, Resize};
pub use items::{Csv, FileList, Files, GetItems, Items, csv, file_list, image_files};
pub use labels::{
    Column, IntoLabel, Label, LabelItems, LabelList, Pattern, column, columns, label_list,
    name_function, name_regex, parent_name, path_regex,
};
pub use split::{
    FolderNames, SplitItems, Splitter, column_split, column_values_split, end_split, file_split,
    function_split, grandparent, index_split, mask_split, no_split, random_split, stratified_split,
    subset_split,
};

pub use unlabelled::Unlabelled;
