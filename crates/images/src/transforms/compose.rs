//! Transforms, and lists of them.

use std::fmt;
use std::sync::Arc;

use super::{Operation, Plan, SampleRng};
use crate::{Result, Size};

/// Phase in which an image is read: training or validation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Training: transforms choose at random.
    #[default]
    Train,
    /// Validation and inference: transforms do the same each time, like fastai's on the validation set.
    Valid,
}

/// A transform: chooses operations for an image of a known size.
///
/// A custom implementation takes a few lines:
///
/// ```
/// use brigade_images::transforms::{Compose, Operation, Phase, SampleRng, Transform};
/// use brigade_images::{Result, Size};
///
/// /// Darkens every second image.
/// #[derive(Debug)]
/// struct Dusk;
///
/// impl Transform for Dusk {
///     fn draw(
///         &self,
///         _: Size,
///         phase: Phase,
///         random: &mut SampleRng,
///         operations: &mut Vec<Operation>,
///     ) -> Result<()> {
///         if phase == Phase::Train && random.chance(0.5) {
///             operations.push(Operation::Brightness(0.4));
///         }
///         Ok(())
///     }
/// }
///
/// let plan = Compose::new().then(Dusk).plan(Size::from(8), Phase::Valid, 3)?;
/// assert!(plan.operations().is_empty());
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
pub trait Transform: fmt::Debug + Send + Sync {
    /// Appends the operations for an image of `size`. All random choices must come from `random`.
    ///
    /// # Errors
    /// Fails if an image of that size cannot be transformed.
    fn draw(
        &self,
        size: Size,
        phase: Phase,
        random: &mut SampleRng,
        operations: &mut Vec<Operation>,
    ) -> Result<()>;

    /// Returns `true` if the operations depend on more than the size. A cache contains the results of the transforms
    /// before the first random one, and identifies a transform by its `Debug` output, which must contain all
    /// parameters. Defaults to `true`.
    fn is_random(&self, phase: Phase) -> bool {
        let _ = phase;
        true
    }
}

/// A list of transforms, applied one after another: torchvision's `Compose`.
///
/// ```
/// use brigade_images::Size;
/// use brigade_images::transforms::{
///     ColorJitter, Compose, Phase, RandomHorizontalFlip, RandomResizedCrop,
/// };
///
/// let transforms = Compose::new()
///     .then(RandomResizedCrop::new(160))
///     .then(RandomHorizontalFlip::default())
///     .then(ColorJitter::new().brightness(0.2));
/// let plan = transforms.plan(Size::new(500, 375), Phase::Train, 7)?;
/// assert_eq!(plan, transforms.plan(Size::new(500, 375), Phase::Train, 7)?);
/// assert_eq!(plan.output_size(), Size::from(160));
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Compose {
    transforms: Vec<Arc<dyn Transform>>,
}

impl Compose {
    /// Creates an empty list of transforms, which leaves images as they are.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a transform at the end.
    #[must_use]
    pub fn then(mut self, transform: impl Transform + 'static) -> Self {
        self.transforms.push(Arc::new(transform));
        self
    }

    /// Chooses the operations for an image of `size` with a sample's seed.
    ///
    /// # Errors
    /// Fails if a transform or an operation cannot be applied to an image of the size that it gets.
    pub fn plan(&self, size: Size, phase: Phase, seed: u64) -> Result<Plan> {
        self.plan_part(0..self.transforms.len(), size, phase, seed)
    }

    /// Returns the number of transforms before the first random one.
    pub(crate) fn fixed(&self, phase: Phase) -> usize {
        let random = self.transforms.iter().position(|transform| transform.is_random(phase));
        random.unwrap_or(self.transforms.len())
    }

    /// Chooses the operations of some of the transforms, each with the random stream of its position in the whole list.
    pub(crate) fn plan_part(
        &self,
        places: std::ops::Range<usize>,
        size: Size,
        phase: Phase,
        seed: u64,
    ) -> Result<Plan> {
        let mut plan = Plan::new(size);
        let count = places.end.saturating_sub(places.start);
        let transforms = self.transforms.iter().enumerate().skip(places.start).take(count);
        for (place, transform) in transforms {
            let mut random = SampleRng::new(seed, place);
            let mut drawn = Vec::new();
            transform.draw(plan.output_size(), phase, &mut random, &mut drawn)?;
            for operation in drawn {
                plan.push(operation)?;
            }
        }
        Ok(plan)
    }

    /// Inserts a transform before all others.
    pub(crate) fn before(mut self, transform: impl Transform + 'static) -> Self {
        self.transforms.insert(0, Arc::new(transform));
        self
    }

    /// Returns the `Debug` output of the first `count` transforms.
    pub(crate) fn describe(&self, count: usize) -> String {
        format!("{:?}", self.transforms.get(..count).unwrap_or(&self.transforms))
    }
}
