//! AugMix: a weighted mixture of an image and of the results of chains of operations.

use serde::{Deserialize, Serialize};

use super::augment::{Kind, Space, affine_options};
use super::{Interpolation, Operation, Phase, SampleRng, Transform};
use crate::{ImageError, Result, Size};

/// Mixes each image with the results of random chains of operations, in training (Hendrycks et al., 2020):
/// torchvision's `AugMix`, with the operations of PIL images.
///
/// torchvision computes these on tensors, also for PIL images, so that its affine transforms differ from Pillow's at
/// the edges; here they are those of [`RandAugment`](super::RandAugment).
///
/// A mask is not changed, as in torchvision.
///
/// ```
/// use brigade_images::Size;
/// use brigade_images::transforms::{AugMix, Compose, Operation, Phase};
///
/// let mixing = Compose::new().then(AugMix::default().mixture_width(2).chain_depth(1));
/// let plan = mixing.plan(Size::from(32), Phase::Train, 4)?;
/// let [Operation::Mix { weight, chains }] = plan.operations() else { panic!("{plan:?}") };
/// let sum = weight + chains.iter().map(|(weight, _)| weight).sum::<f32>();
/// assert!((sum - 1.0).abs() < 1e-6);
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AugMix {
    severity: usize,
    mixture_width: usize,
    chain_depth: Option<usize>,
    alpha: f64,
    all_operations: bool,
    interpolation: Interpolation,
    fill: [u8; 3],
}

impl AugMix {
    /// Sets how many of the ten strengths of each operation are chosen from, the weakest first: 1 to 10. Defaults to 3.
    #[must_use]
    pub const fn severity(mut self, severity: usize) -> Self {
        self.severity = severity;
        self
    }

    /// Sets the number of chains. Defaults to 3.
    #[must_use]
    pub const fn mixture_width(mut self, chains: usize) -> Self {
        self.mixture_width = chains;
        self
    }

    /// Sets the number of operations in a chain. Defaults to a random number from 1 to 3 for each chain.
    #[must_use]
    pub const fn chain_depth(mut self, operations: usize) -> Self {
        self.chain_depth = Some(operations);
        self
    }

    /// Sets the concentration parameter of the Dirichlet distributions from which the weights are drawn. Defaults to 1.
    #[must_use]
    pub const fn alpha(mut self, alpha: f64) -> Self {
        self.alpha = alpha;
        self
    }

    /// Sets whether brightness, colour, contrast and sharpness are among the operations: torchvision's `all_ops`.
    /// Defaults to `true`.
    #[must_use]
    pub const fn all_operations(mut self, all: bool) -> Self {
        self.all_operations = all;
        self
    }

    /// Returns the operations to choose from.
    pub(super) fn kinds(&self) -> &'static [Kind] {
        if self.all_operations { &KINDS } else { &KINDS[..WITHOUT_COLOURS] }
    }

    /// Returns an operation for an image of `size`, or `None` if it does nothing.
    pub(super) fn operation(
        &self,
        kind: Kind,
        magnitude: usize,
        negative: bool,
        size: Size,
    ) -> Option<Operation> {
        let space = Space::aug_mix(size, self.interpolation, self.fill);
        space.operation(kind, magnitude, BINS, negative, size)
    }

    fn check(&self) -> Result<()> {
        let wrong = |what: String| Err(ImageError::InvalidArgument(format!("AugMix: {what}")));
        if !(1..=BINS).contains(&self.severity) {
            return wrong(format!("the severity is {}, expected 1 to {BINS}", self.severity));
        }
        if !self.alpha.is_finite() || self.alpha <= 0.0 {
            return wrong(format!("alpha is {}, expected a number above 0", self.alpha));
        }
        if self.mixture_width == 0 || self.chain_depth == Some(0) {
            return wrong("there must be at least one chain of at least one operation".into());
        }
        Ok(())
    }
}

affine_options!(AugMix, "[`Interpolation::Bilinear`]");

/// Creates an AugMix with torchvision's defaults.
impl Default for AugMix {
    fn default() -> Self {
        Self {
            severity: 3,
            mixture_width: 3,
            chain_depth: None,
            alpha: 1.0,
            all_operations: true,
            interpolation: Interpolation::Bilinear,
            fill: [0; 3],
        }
    }
}

/// Number of strengths of each operation.
const BINS: usize = 10;

/// The operations in torchvision's order, those of colour last.
const KINDS: [Kind; 13] = [
    Kind::ShearX,
    Kind::ShearY,
    Kind::TranslateX,
    Kind::TranslateY,
    Kind::Rotate,
    Kind::Posterize,
    Kind::Solarize,
    Kind::AutoContrast,
    Kind::Equalize,
    Kind::Brightness,
    Kind::Color,
    Kind::Contrast,
    Kind::Sharpness,
];
const WITHOUT_COLOURS: usize = 9;

impl Transform for AugMix {
    fn draw(
        &self,
        size: Size,
        phase: Phase,
        random: &mut SampleRng,
        operations: &mut Vec<Operation>,
    ) -> Result<()> {
        self.check()?;
        if phase == Phase::Valid {
            return Ok(());
        }
        let shares = random.dirichlet(self.alpha, 2);
        let [weight, rest] = [0, 1].map(|index| shares.get(index).copied().unwrap_or_default());
        let weights = random.dirichlet(self.alpha, self.mixture_width);
        let mut chain = |weight: f64| {
            let depth = self.chain_depth.unwrap_or_else(|| 1 + random.below(3) as usize);
            let drawn = (0..depth).filter_map(|_| {
                let kind = Kind::draw(self.kinds(), random);
                let magnitude = random.below(self.severity as u64) as usize;
                let negative = kind.is_signed() && random.chance(0.5);
                self.operation(kind, magnitude, negative, size)
            });
            ((weight * rest) as f32, drawn.collect())
        };
        let chains = weights.into_iter().map(&mut chain).collect();
        operations.push(Operation::Mix { weight: weight as f32, chains });
        Ok(())
    }

    fn is_random(&self, phase: Phase) -> bool {
        phase == Phase::Train
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Image;
    use crate::transforms::Compose;

    #[test]
    fn weights_have_the_moments_of_the_dirichlet_distribution() {
        for (alpha, count) in [(0.001, 3), (0.3, 3), (1.0, 2), (1.0, 3), (20.0, 4)] {
            let mut random = SampleRng::new(3, 0);
            let draws: Vec<f64> = (0..20_000)
                .map(|_| {
                    let shares = random.dirichlet(alpha, count);
                    assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-12, "{shares:?}");
                    shares[0]
                })
                .collect();
            let mean = draws.iter().sum::<f64>() / draws.len() as f64;
            let variance =
                draws.iter().map(|it| (it - mean).powi(2)).sum::<f64>() / draws.len() as f64;
            let share = 1.0 / count as f64;
            let exact = share * (1.0 - share) / (alpha * count as f64 + 1.0);
            assert!((mean - share).abs() < 0.02, "{alpha}: {mean}");
            assert!((variance - exact).abs() < 0.05 * exact, "{alpha}: {variance}, not {exact}");
        }
    }

    #[test]
    fn images_are_a_function_of_the_seed() {
        let image = Image::new(9, 7, (0..189).collect()).unwrap();
        let transforms = Compose::new().then(AugMix::default().severity(10));
        let made = |seed| {
            let plan = transforms.plan(image.size(), Phase::Train, seed).unwrap();
            plan.apply(&image).unwrap()
        };
        assert_eq!(made(3), made(3));
        assert_ne!(made(3), made(4));
        let valid = transforms.plan(image.size(), Phase::Valid, 3).unwrap();
        assert!(valid.operations().is_empty());
    }

    #[test]
    fn parameters_out_of_range_are_errors() {
        let drawn = |transform: AugMix| {
            let plan = Compose::new().then(transform).plan(Size::from(8), Phase::Train, 1);
            plan.unwrap_err().to_string()
        };
        assert_eq!(
            drawn(AugMix::default().severity(11)),
            "AugMix: the severity is 11, expected 1 to 10"
        );
        assert!(drawn(AugMix::default().alpha(0.0)).contains("alpha is 0"));
        assert!(drawn(AugMix::default().chain_depth(0)).contains("at least one operation"));
    }
}
