//! Random mirroring.

use serde::{Deserialize, Serialize};

use super::{Operation, Phase, SampleRng, Transform};
use crate::{Result, Size};

/// Mirrors left and right with a probability, in training: torchvision's `RandomHorizontalFlip`, fastai's `FlipItem`.
///
/// ```
/// use brigade_images::transforms::{Compose, Operation, Phase, RandomHorizontalFlip};
///
/// let flips = Compose::new().then(RandomHorizontalFlip::new(1.0));
/// let size = brigade_images::Size::new(4, 4);
/// assert_eq!(flips.plan(size, Phase::Train, 0)?.operations(), [Operation::FlipHorizontal]);
/// assert_eq!(flips.plan(size, Phase::Valid, 0)?.operations(), []);
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RandomHorizontalFlip {
    p: f64,
}

/// Mirrors top and bottom with a probability, in training: torchvision's `RandomVerticalFlip`.
///
/// ```
/// use brigade_images::transforms::{Compose, Operation, Phase, RandomVerticalFlip};
///
/// let flips = Compose::new().then(RandomVerticalFlip::new(1.0));
/// let size = brigade_images::Size::new(4, 4);
/// assert_eq!(flips.plan(size, Phase::Train, 0)?.operations(), [Operation::FlipVertical]);
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RandomVerticalFlip {
    p: f64,
}

macro_rules! flips {
    ($($flip:ident => $operation:ident),+) => { $(
        impl $flip {
            /// Sets the probability of mirroring, from 0 to 1.
            #[must_use]
            pub const fn new(p: f64) -> Self {
                Self { p }
            }
        }

        /// Mirrors with probability 0.5, as in torchvision and fastai.
        impl Default for $flip {
            fn default() -> Self {
                Self::new(0.5)
            }
        }

        impl Transform for $flip {
            fn draw(
                &self,
                _: Size,
                phase: Phase,
                random: &mut SampleRng,
                operations: &mut Vec<Operation>,
            ) -> Result<()> {
                if phase == Phase::Train && random.chance(self.p) {
                    operations.push(Operation::$operation);
                }
                Ok(())
            }

            fn is_random(&self, phase: Phase) -> bool {
                phase == Phase::Train
            }
        }
    )+ };
}

flips!(RandomHorizontalFlip => FlipHorizontal, RandomVerticalFlip => FlipVertical);
