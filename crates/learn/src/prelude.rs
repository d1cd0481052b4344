//! Re-exports for programs that use a Learner: `use brigade::learn::prelude::*`.
//!
//! Goes together with `brigade::prelude`: a name means the same in both. [`Precision`] is the format of numbers; the
//! metric of that name is `metrics::Precision`.

pub use brigade_datasets::{Urls, untar_data};
pub use brigade_metrics::{self as metrics, *};
pub use brigade_models::zoo::*;
pub use brigade_models::{Architecture, HeadOptions};
pub use brigade_optim::{AdamW, Sgd};
pub use brigade_plot::Plot;
pub use brigade_rank_env::MainResult;
pub use brigade_schedule::Annealing;
pub use brigade_torch::{Error, ErrorKind, Result};
pub use brigade_train::Precision::{Bf16, Fp16};
pub use brigade_train::{Accelerator, Precision};
pub use brigade_vision::augment::{Augment, Hue, Lighting, Padding, RandomErasing};
pub use brigade_vision::labels::Split;
pub use brigade_vision::transforms::AutoAugmentPolicy;
pub use brigade_vision::transforms::types::*;
pub use brigade_vision::{CacheOptions, OnBroken, Size};
pub use tch::{Device, Kind, Tensor};

pub use crate::callbacks::*;
pub use crate::data::{
    AugTransforms, BatchTransform, CategoryBlock, Column, Csv, DataBlock, FileList, Files, Flip,
    FolderNames, GetItems, ImageBlock, ImageLoaders, IntoLabel, ItemTransform, Items, Label,
    LabelItems, LabelList, MaskBlock, MultiCategoryBlock, Normalize, NumberBlock, Part, Parts,
    Pattern, PointBlock, RandomResizedCrop, Resize, SegmentationLoaders, SplitItems, Splitter,
    Step, Summary, TargetBlock, Unlabelled, aug_transforms, categories, codec_from, column,
    column_split, column_values_split, columns, csv, end_split, file_list, file_split,
    function_split, grandparent, grey_images, hue, image_files, images, index_split, label_list,
    mask_split, masks, multi_categories, name_function, name_regex, no_split, numbers, parent_name,
    path_regex, points, random_erasing, random_split, saturation, stratified_split, subset_split,
};
pub use crate::interpretation::{ClassInterpretation, Interpretation};
pub use crate::loss::{
    BceWithLogits, CrossEntropy, Focal, L1, LabelSmoothingCrossEntropy, Loss, loss_from,
};
pub use crate::{
    Callback, FineTuneOptions, FlatCosOptions, Hyper, Item, Learner, LearnerState, Loaders,
    LrFindOptions, OneCycleOptions, Predictor, Rates, SgdrOptions, Suggestion, VisionOptions,
    unet_learner, vision_learner,
};
