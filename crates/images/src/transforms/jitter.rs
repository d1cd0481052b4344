//! Random changes of colour.

use serde::{Deserialize, Serialize};

use super::{Operation, Phase, SampleRng, Transform};
use crate::{Result, Size};

/// Changes brightness, contrast, saturation and hue by random factors in random order, in training: torchvision's
/// `ColorJitter`, with the arithmetic of Pillow.
///
/// For each amount `x` of the first three, the factor is drawn from `max(0, 1 - x)..1 + x`; for the hue, a rotation is
/// drawn from `-x..x` of the full circle.
///
/// ```
/// use brigade_images::Size;
/// use brigade_images::transforms::{ColorJitter, Compose, Phase};
///
/// let jitter = ColorJitter::new().brightness(0.4).contrast(0.4).saturation(0.4).hue(0.1);
/// let plan = Compose::new().then(jitter).plan(Size::from(8), Phase::Train, 5)?;
/// assert_eq!(plan.operations().len(), 4);
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ColorJitter {
    brightness: f64,
    contrast: f64,
    saturation: f64,
    hue: f64,
}

impl ColorJitter {
    /// Creates a jitter that changes nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the amount of brightness. Values below 0 count as 0. Defaults to 0.
    #[must_use]
    pub fn brightness(mut self, amount: f64) -> Self {
        self.brightness = amount.max(0.0);
        self
    }

    /// Sets the amount of contrast. Values below 0 count as 0. Defaults to 0.
    #[must_use]
    pub fn contrast(mut self, amount: f64) -> Self {
        self.contrast = amount.max(0.0);
        self
    }

    /// Sets the amount of saturation. Values below 0 count as 0. Defaults to 0.
    #[must_use]
    pub fn saturation(mut self, amount: f64) -> Self {
        self.saturation = amount.max(0.0);
        self
    }

    /// Sets the amount of hue, clamped to 0 to 0.5. Defaults to 0.
    #[must_use]
    pub fn hue(mut self, amount: f64) -> Self {
        self.hue = amount.clamp(0.0, 0.5);
        self
    }
}

impl Transform for ColorJitter {
    fn draw(
        &self,
        _: Size,
        phase: Phase,
        random: &mut SampleRng,
        operations: &mut Vec<Operation>,
    ) -> Result<()> {
        if phase == Phase::Valid {
            return Ok(());
        }
        let mut factor = |amount: f64| random.uniform((1.0 - amount).max(0.0), 1.0 + amount) as f32;
        let factors = [factor(self.brightness), factor(self.contrast), factor(self.saturation)];
        let turn = random.uniform(-self.hue, self.hue);
        let mut drawn = [
            (self.brightness > 0.0).then_some(Operation::Brightness(factors[0])),
            (self.contrast > 0.0).then_some(Operation::Contrast(factors[1])),
            (self.saturation > 0.0).then_some(Operation::Saturation(factors[2])),
            (self.hue > 0.0).then_some(Operation::Hue(turn)),
        ];
        // Fisher-Yates shuffle.
        for last in (1..drawn.len()).rev() {
            drawn.swap(last, random.below(last as u64 + 1) as usize);
        }
        operations.extend(drawn.into_iter().flatten());
        Ok(())
    }

    fn is_random(&self, phase: Phase) -> bool {
        phase == Phase::Train && *self != Self::default()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::transforms::Compose;

    #[test]
    fn factors_stay_in_range_and_orders_vary() {
        let jitter = ColorJitter::new().brightness(0.4).contrast(2.0).saturation(0.1).hue(0.2);
        let transforms = Compose::new().then(jitter);
        let mut orders = BTreeSet::new();
        for seed in 0..300 {
            let plan = transforms.plan(Size::from(4), Phase::Train, seed).unwrap();
            let mut order = Vec::new();
            for operation in plan.operations() {
                let (name, inside) = match *operation {
                    Operation::Brightness(factor) => ('b', (0.6..1.4).contains(&factor)),
                    Operation::Contrast(factor) => ('c', (0.0..3.0).contains(&factor)),
                    Operation::Saturation(factor) => ('s', (0.9..1.1).contains(&factor)),
                    Operation::Hue(turn) => ('h', (-0.2..0.2).contains(&turn)),
                    _ => ('?', false),
                };
                assert!(inside, "{operation:?}");
                order.push(name);
            }
            orders.insert(String::from_iter(order));
        }
        assert_eq!(orders.len(), 24);
        assert!(transforms.plan(Size::from(4), Phase::Valid, 1).unwrap().operations().is_empty());
    }
}
