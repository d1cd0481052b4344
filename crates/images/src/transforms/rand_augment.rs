//! RandAugment: some random operations of one strength.

use serde::{Deserialize, Serialize};

use super::augment::{Kind, Space, affine_options, check_bins};
use super::{Interpolation, Operation, Phase, SampleRng, Transform};
use crate::{Result, Size};

/// Applies random operations of one strength to each image, in training: torchvision's `RandAugment` on PIL images.
///
/// ```
/// use brigade_images::Size;
/// use brigade_images::transforms::{Compose, Phase, RandAugment};
///
/// let augment = Compose::new().then(RandAugment::default().magnitude(7));
/// let plan = augment.plan(Size::from(32), Phase::Train, 4)?;
/// assert!(plan.operations().len() <= 2);
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RandAugment {
    operations: usize,
    magnitude: usize,
    bins: usize,
    #[serde(default)]
    interpolation: Interpolation,
    fill: [u8; 3],
}

impl RandAugment {
    /// Sets the number of operations for each image. Defaults to 2.
    #[must_use]
    pub const fn operations(mut self, count: usize) -> Self {
        self.operations = count;
        self
    }

    /// Sets the strength, which must be below the number of bins. Defaults to 9.
    #[must_use]
    pub const fn magnitude(mut self, magnitude: usize) -> Self {
        self.magnitude = magnitude;
        self
    }

    /// Sets the number of strengths. Defaults to 31.
    #[must_use]
    pub const fn bins(mut self, bins: usize) -> Self {
        self.bins = bins;
        self
    }
}

affine_options!(RandAugment, "the nearest pixel");

/// Creates a RandAugment with 2 operations of strength 9 of 31, like torchvision's.
impl Default for RandAugment {
    fn default() -> Self {
        Self {
            operations: 2,
            magnitude: 9,
            bins: 31,
            interpolation: Interpolation::Nearest,
            fill: [0; 3],
        }
    }
}

impl Transform for RandAugment {
    fn draw(
        &self,
        size: Size,
        phase: Phase,
        random: &mut SampleRng,
        operations: &mut Vec<Operation>,
    ) -> Result<()> {
        check_bins(self.bins, self.magnitude)?;
        if phase == Phase::Valid {
            return Ok(());
        }
        let space = Space::rand_augment(size, self.interpolation, self.fill);
        for _ in 0..self.operations {
            let kind = Kind::draw(&Kind::WIDE, random);
            let negative = kind.is_signed() && random.chance(0.5);
            operations.extend(space.operation(kind, self.magnitude, self.bins, negative, size));
        }
        Ok(())
    }

    fn is_random(&self, phase: Phase) -> bool {
        phase == Phase::Train
    }
}
