//! AutoAugment: pairs of operations that were found by a search on a dataset.

use serde::{Deserialize, Serialize};

use super::augment::{
    Kind::{
        self, AutoContrast, Brightness, Color, Contrast, Equalize, Invert, Posterize, Rotate,
        Sharpness, ShearX, ShearY, Solarize, TranslateX, TranslateY,
    },
    Space, affine_options,
};
use super::{Interpolation, Operation, Phase, SampleRng, Transform};
use crate::{Result, Size};

/// The dataset on which the policy of an [`AutoAugment`] was found: torchvision's `AutoAugmentPolicy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AutoAugmentPolicy {
    /// Policy that was found on ImageNet.
    #[default]
    ImageNet,
    /// Policy that was found on CIFAR-10.
    Cifar10,
    /// Policy that was found on Street View House Numbers (SVHN).
    Svhn,
}

impl AutoAugmentPolicy {
    /// All policies, in the order of their names in the table of transforms.
    pub(super) const ALL: [Self; 3] = [Self::ImageNet, Self::Cifar10, Self::Svhn];
}

/// Applies one of 25 pairs of operations to each image, each operation with its probability, in training (Cubuk et al.,
/// 2019): torchvision's `AutoAugment` on PIL images.
///
/// ```
/// use brigade_images::Size;
/// use brigade_images::transforms::{AutoAugment, AutoAugmentPolicy, Compose, Phase};
///
/// let augment = Compose::new().then(AutoAugment::new(AutoAugmentPolicy::Cifar10));
/// let plan = augment.plan(Size::from(32), Phase::Train, 4)?;
/// assert!(plan.operations().len() <= 2);
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AutoAugment {
    policy: AutoAugmentPolicy,
    interpolation: Interpolation,
    fill: [u8; 3],
}

impl AutoAugment {
    /// Creates an AutoAugment of a policy, with nearest interpolation and black outside of the image, like
    /// torchvision's. The policy of `AutoAugment::default()` is ImageNet's.
    #[must_use]
    pub const fn new(policy: AutoAugmentPolicy) -> Self {
        Self { policy, interpolation: Interpolation::Nearest, fill: [0; 3] }
    }

    /// Returns an operation of the policy for an image of `size`, or `None` if it does nothing.
    pub(super) fn operation(
        &self,
        kind: Kind,
        magnitude: usize,
        negative: bool,
        size: Size,
    ) -> Option<Operation> {
        let space = Space::rand_augment(size, self.interpolation, self.fill);
        space.operation(kind, magnitude, BINS, negative, size)
    }
}

affine_options!(AutoAugment, "the nearest pixel");

impl Transform for AutoAugment {
    fn draw(
        &self,
        size: Size,
        phase: Phase,
        random: &mut SampleRng,
        operations: &mut Vec<Operation>,
    ) -> Result<()> {
        if phase == Phase::Valid {
            return Ok(());
        }
        let pairs = self.policy.pairs();
        let pair = pairs.get(random.below(pairs.len() as u64) as usize).into_iter().flatten();
        for (kind, probability, magnitude) in pair {
            let (applied, negative) = (random.chance(*probability), random.chance(0.5));
            if applied {
                operations.extend(self.operation(*kind, *magnitude, negative, size));
            }
        }
        Ok(())
    }

    fn is_random(&self, phase: Phase) -> bool {
        phase == Phase::Train
    }
}

impl AutoAugmentPolicy {
    pub(super) const fn pairs(self) -> &'static [Pair; 25] {
        match self {
            Self::ImageNet => &IMAGENET,
            Self::Cifar10 => &CIFAR10,
            Self::Svhn => &SVHN,
        }
    }
}

/// Number of strengths of each operation.
const BINS: usize = 10;

/// Two operations, each with its probability and its strength, which some operations ignore.
pub(super) type Pair = [(Kind, f64, usize); 2];

const IMAGENET: [Pair; 25] = [
    [(Posterize, 0.4, 8), (Rotate, 0.6, 9)],
    [(Solarize, 0.6, 5), (AutoContrast, 0.6, 0)],
    [(Equalize, 0.8, 0), (Equalize, 0.6, 0)],
    [(Posterize, 0.6, 7), (Posterize, 0.6, 6)],
    [(Equalize, 0.4, 0), (Solarize, 0.2, 4)],
    [(Equalize, 0.4, 0), (Rotate, 0.8, 8)],
    [(Solarize, 0.6, 3), (Equalize, 0.6, 0)],
    [(Posterize, 0.8, 5), (Equalize, 1.0, 0)],
    [(Rotate, 0.2, 3), (Solarize, 0.6, 8)],
    [(Equalize, 0.6, 0), (Posterize, 0.4, 6)],
    [(Rotate, 0.8, 8), (Color, 0.4, 0)],
    [(Rotate, 0.4, 9), (Equalize, 0.6, 0)],
    [(Equalize, 0.0, 0), (Equalize, 0.8, 0)],
    [(Invert, 0.6, 0), (Equalize, 1.0, 0)],
    [(Color, 0.6, 4), (Contrast, 1.0, 8)],
    [(Rotate, 0.8, 8), (Color, 1.0, 2)],
    [(Color, 0.8, 8), (Solarize, 0.8, 7)],
    [(Sharpness, 0.4, 7), (Invert, 0.6, 0)],
    [(ShearX, 0.6, 5), (Equalize, 1.0, 0)],
    [(Color, 0.4, 0), (Equalize, 0.6, 0)],
    [(Equalize, 0.4, 0), (Solarize, 0.2, 4)],
    [(Solarize, 0.6, 5), (AutoContrast, 0.6, 0)],
    [(Invert, 0.6, 0), (Equalize, 1.0, 0)],
    [(Color, 0.6, 4), (Contrast, 1.0, 8)],
    [(Equalize, 0.8, 0), (Equalize, 0.6, 0)],
];

const CIFAR10: [Pair; 25] = [
    [(Invert, 0.1, 0), (Contrast, 0.2, 6)],
    [(Rotate, 0.7, 2), (TranslateX, 0.3, 9)],
    [(Sharpness, 0.8, 1), (Sharpness, 0.9, 3)],
    [(ShearY, 0.5, 8), (TranslateY, 0.7, 9)],
    [(AutoContrast, 0.5, 0), (Equalize, 0.9, 0)],
    [(ShearY, 0.2, 7), (Posterize, 0.3, 7)],
    [(Color, 0.4, 3), (Brightness, 0.6, 7)],
    [(Sharpness, 0.3, 9), (Brightness, 0.7, 9)],
    [(Equalize, 0.6, 0), (Equalize, 0.5, 0)],
    [(Contrast, 0.6, 7), (Sharpness, 0.6, 5)],
    [(Color, 0.7, 7), (TranslateX, 0.5, 8)],
    [(Equalize, 0.3, 0), (AutoContrast, 0.4, 0)],
    [(TranslateY, 0.4, 3), (Sharpness, 0.2, 6)],
    [(Brightness, 0.9, 6), (Color, 0.2, 8)],
    [(Solarize, 0.5, 2), (Invert, 0.0, 0)],
    [(Equalize, 0.2, 0), (AutoContrast, 0.6, 0)],
    [(Equalize, 0.2, 0), (Equalize, 0.6, 0)],
    [(Color, 0.9, 9), (Equalize, 0.6, 0)],
    [(AutoContrast, 0.8, 0), (Solarize, 0.2, 8)],
    [(Brightness, 0.1, 3), (Color, 0.7, 0)],
    [(Solarize, 0.4, 5), (AutoContrast, 0.9, 0)],
    [(TranslateY, 0.9, 9), (TranslateY, 0.7, 9)],
    [(AutoContrast, 0.9, 0), (Solarize, 0.8, 3)],
    [(Equalize, 0.8, 0), (Invert, 0.1, 0)],
    [(TranslateY, 0.7, 9), (AutoContrast, 0.9, 0)],
];

const SVHN: [Pair; 25] = [
    [(ShearX, 0.9, 4), (Invert, 0.2, 0)],
    [(ShearY, 0.9, 8), (Invert, 0.7, 0)],
    [(Equalize, 0.6, 0), (Solarize, 0.6, 6)],
    [(Invert, 0.9, 0), (Equalize, 0.6, 0)],
    [(Equalize, 0.6, 0), (Rotate, 0.9, 3)],
    [(ShearX, 0.9, 4), (AutoContrast, 0.8, 0)],
    [(ShearY, 0.9, 8), (Invert, 0.4, 0)],
    [(ShearY, 0.9, 5), (Solarize, 0.2, 6)],
    [(Invert, 0.9, 0), (AutoContrast, 0.8, 0)],
    [(Equalize, 0.6, 0), (Rotate, 0.9, 3)],
    [(ShearX, 0.9, 4), (Solarize, 0.3, 3)],
    [(ShearY, 0.8, 8), (Invert, 0.7, 0)],
    [(Equalize, 0.9, 0), (TranslateY, 0.6, 6)],
    [(Invert, 0.9, 0), (Equalize, 0.6, 0)],
    [(Contrast, 0.3, 3), (Rotate, 0.8, 4)],
    [(Invert, 0.8, 0), (TranslateY, 0.0, 2)],
    [(ShearY, 0.7, 6), (Solarize, 0.4, 8)],
    [(Invert, 0.6, 0), (Rotate, 0.8, 4)],
    [(ShearY, 0.3, 7), (TranslateX, 0.9, 3)],
    [(ShearX, 0.1, 6), (Invert, 0.6, 0)],
    [(Solarize, 0.7, 2), (TranslateY, 0.6, 7)],
    [(ShearY, 0.8, 4), (Invert, 0.8, 0)],
    [(ShearX, 0.7, 9), (TranslateY, 0.8, 3)],
    [(ShearY, 0.8, 5), (AutoContrast, 0.7, 0)],
    [(ShearX, 0.7, 2), (Invert, 0.1, 0)],
];
