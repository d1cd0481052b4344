//! The options that data blocks and ready-made loaders share.

use std::path::Path;
use std::sync::Arc;

use brigade_vision::{CacheOptions, OnBroken};

use super::batch_transforms::BatchTransform;
use super::item_transforms::{ItemTransform, in_order};

/// Function that computes the weight of an item from its path.
pub(super) type Weight = Arc<dyn Fn(&Path) -> f64 + Send + Sync>;

#[derive(Clone)]
pub(super) enum Weights {
    Equal,
    /// Weights with which all classes are equally likely.
    Balanced,
    Of(Weight),
}

/// Transforms of items and batches, and options of reading them.
#[derive(Clone)]
pub(super) struct Options {
    pub(super) item_transforms: Vec<ItemTransform>,
    pub(super) in_given_order: bool,
    pub(super) batch_transforms: Vec<BatchTransform>,
    pub(super) seed: Option<u64>,
    pub(super) threads: usize,
    pub(super) drop_last: bool,
    pub(super) overlap_epochs: bool,
    pub(super) cache: Option<CacheOptions>,
    pub(super) on_broken: OnBroken,
    pub(super) weights: Weights,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            item_transforms: Vec::new(),
            in_given_order: false,
            batch_transforms: Vec::new(),
            seed: None,
            threads: 2,
            drop_last: true,
            overlap_epochs: true,
            cache: None,
            on_broken: OnBroken::Fail,
            weights: Weights::Equal,
        }
    }
}

impl Options {
    /// Returns the transforms of items in the order in which they run.
    pub(super) fn ordered(&self) -> Vec<ItemTransform> {
        if self.in_given_order {
            self.item_transforms.clone()
        } else {
            in_order(self.item_transforms.clone())
        }
    }
}

/// Methods of builders whose field `block` contains the block's parts, defined once.
macro_rules! block_methods {
    ($self:ident => $block:expr) => {
        /// Sets the getter of the items. Defaults to [`image_files`](crate::data::image_files).
        #[must_use]
        pub fn items(mut $self, items: impl GetItems + 'static) -> Self {
            $block.items = Arc::new(items);
            $self
        }

        /// Sets the labeller of the items.
        #[must_use]
        pub fn label(mut $self, label: impl LabelItems + 'static) -> Self {
            $block.label = Some(Arc::new(label));
            $self
        }

        /// Sets how items are split into training and validation. Defaults to a random fifth for validation.
        #[must_use]
        pub fn split(mut $self, split: impl SplitItems + 'static) -> Self {
            $block.split = Arc::new(split);
            $self
        }

        /// Sets the transforms of each image: a transform, or a tuple or vector of them. As in fastai they run in a
        /// fixed order, not in that of the list: flips, then crops and resizes, then changes of colour
        /// ([`in_given_order`](Self::in_given_order) keeps the order of the list). Defaults to none.
        #[must_use]
        pub fn item_transforms(mut $self, transforms: impl Parts<ItemTransform>) -> Self {
            $block.options.item_transforms = transforms.parts();
            $self
        }

        /// Runs the item transforms in the order in which they are listed.
        #[must_use]
        pub fn in_given_order(mut $self) -> Self {
            $block.options.in_given_order = true;
            $self
        }

        /// Sets the transforms of each batch, which run on its device: a transform, or a tuple or vector of them. They
        /// run in fastai's order: geometric transforms, lighting, hue, normalisation, erasing. Defaults to none.
        #[must_use]
        pub fn batch_transforms(mut $self, transforms: impl Parts<BatchTransform>) -> Self {
            $block.options.batch_transforms = transforms.parts();
            $self
        }

        /// Sets the seed of random splits, of the order of training samples and of random transforms. Defaults to a
        /// seed drawn by rank 0. All ranks use the seed of rank 0.
        #[must_use]
        pub fn seed(mut $self, seed: u64) -> Self {
            $block.options.seed = Some(seed);
            $self
        }

        /// Sets the number of threads that read and transform samples for each loader. Defaults to 2; 0 makes batches
        /// in the training's thread.
        #[must_use]
        pub fn threads(mut $self, threads: usize) -> Self {
            $block.options.threads = threads;
            $self
        }

        /// Sets whether a smaller last batch of training is left out. Defaults to `true`, as in fastai.
        #[must_use]
        pub fn drop_last(mut $self, drop_last: bool) -> Self {
            $block.options.drop_last = drop_last;
            $self
        }

        /// Sets whether threads begin the next epoch of training before validation. Defaults to `true`.
        #[must_use]
        pub fn overlap_epochs(mut $self, overlap: bool) -> Self {
            $block.options.overlap_epochs = overlap;
            $self
        }

        /// Caches decoded images in a file from the first epoch on. Defaults to no cache.
        #[must_use]
        pub fn cache(mut $self, options: CacheOptions) -> Self {
            $block.options.cache = Some(options);
            $self
        }

        /// Sets what happens with unreadable images: an error (the default), or the next image in their place.
        #[must_use]
        pub fn on_broken(mut $self, policy: OnBroken) -> Self {
            $block.options.on_broken = policy;
            $self
        }

        /// Draws training items in proportion to a weight that a function computes from an item's path, with
        /// replacement, instead of shuffling: fastai's `WeightedDL`.
        #[must_use]
        pub fn weighted(mut $self, weight: impl Fn(&Path) -> f64 + Send + Sync + 'static) -> Self {
            $block.options.weights = Weights::Of(Arc::new(weight));
            $self
        }

        /// Draws training items such that all classes are equally likely, with replacement, instead of shuffling.
        #[must_use]
        pub fn balanced(mut $self) -> Self {
            $block.options.weights = Weights::Balanced;
            $self
        }
    };
}
pub(super) use block_methods;
