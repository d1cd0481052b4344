//! TrivialAugment: one operation of random strength.

use serde::{Deserialize, Serialize};

use super::augment::{Kind, Space, affine_options, check_bins};
use super::{Interpolation, Operation, Phase, SampleRng, Transform};
use crate::{Result, Size};

/// Applies one operation of random strength to each image, in training: torchvision's `TrivialAugmentWide` on PIL
/// images.
///
/// ```
/// use brigade_images::Size;
/// use brigade_images::transforms::{Compose, Phase, TrivialAugmentWide};
///
/// let augment = Compose::new().then(TrivialAugmentWide::default());
/// let plan = augment.plan(Size::from(32), Phase::Train, 4)?;
/// assert!(plan.operations().len() <= 1);
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrivialAugmentWide {
    bins: usize,
    #[serde(default)]
    interpolation: Interpolation,
    fill: [u8; 3],
}

impl TrivialAugmentWide {
    /// Sets the number of strengths. Defaults to 31.
    #[must_use]
    pub const fn bins(mut self, bins: usize) -> Self {
        self.bins = bins;
        self
    }
}

affine_options!(TrivialAugmentWide, "the nearest pixel");

/// Creates a TrivialAugmentWide with 31 strengths, like torchvision's.
impl Default for TrivialAugmentWide {
    fn default() -> Self {
        Self { bins: 31, interpolation: Interpolation::Nearest, fill: [0; 3] }
    }
}

impl Transform for TrivialAugmentWide {
    fn draw(
        &self,
        size: Size,
        phase: Phase,
        random: &mut SampleRng,
        operations: &mut Vec<Operation>,
    ) -> Result<()> {
        check_bins(self.bins, 0)?;
        if phase == Phase::Valid {
            return Ok(());
        }
        let space = Space::trivial_augment(self.interpolation, self.fill);
        let kind = Kind::draw(&Kind::WIDE, random);
        let magnitude = random.below(self.bins as u64) as usize;
        let negative = kind.is_signed() && random.chance(0.5);
        operations.extend(space.operation(kind, magnitude, self.bins, negative, size));
        Ok(())
    }

    fn is_random(&self, phase: Phase) -> bool {
        phase == Phase::Train
    }
}
