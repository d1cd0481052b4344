//! Transforms, and lists of them.

use std::fmt;
use std::sync::Arc;

use super::{Operation, Plan, SampleRng};
use crate::{Result, Size};

/// What an image is read for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Training: transforms draw.
    #[default]
    Train,
    /// Validation and inference: transforms do the same each time, as fastai's on the validation
    /// set.
    Valid,
}

/// Decides what is done to an image of a known size.
///
/// An implementation for one's own use is a few lines:
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
    /// Appends the operations for an image of `size`. All that is random in them must come from
    /// `random`.
    ///
    /// # Errors
    /// When an image of that size cannot be transformed.
    fn draw(
        &self,
        size: Size,
        phase: Phase,
        random: &mut SampleRng,
        operations: &mut Vec<Operation>,
    ) -> Result<()>;

    /// Whether the operations depend on more than the size. A cache keeps what the transforms
    /// before the first random one make; it knows a transform by its `Debug` output, which must
    /// name all parameters.
    fn is_random(&self, phase: Phase) -> bool {
        let _ = phase;
        true
    }
}

/// Transforms one after another: torchvision's `Compose`.
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
    /// Makes a list of no transforms, which leaves images as they are.
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

    /// Draws for an image of `size` with a sample's seed.
    ///
    /// # Errors
    /// When a transform or an operation cannot be applied to the size that it meets.
    pub fn plan(&self, size: Size, phase: Phase, seed: u64) -> Result<Plan> {
        self.plan_part(0..self.transforms.len(), size, phase, seed)
    }

    /// Returns how many transforms stand before the first random one.
    pub(crate) fn fixed(&self, phase: Phase) -> usize {
        let random = self.transforms.iter().position(|transform| transform.is_random(phase));
        random.unwrap_or(self.transforms.len())
    }

    /// Draws with some of the transforms, each with the stream of its place in the whole list.
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

    /// Puts a transform before all others.
    pub(crate) fn before(mut self, transform: impl Transform + 'static) -> Self {
        self.transforms.insert(0, Arc::new(transform));
        self
    }

    /// Returns the `Debug` output of the first transforms.
    pub(crate) fn describe(&self, count: usize) -> String {
        format!("{:?}", self.transforms.get(..count).unwrap_or(&self.transforms))
    }
}
