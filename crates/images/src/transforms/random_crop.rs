//! Crops of a given size at a random position.

use serde::{Deserialize, Serialize};

use super::crop::{crop, crop_at, place};
use super::{Operation, PadMode, Phase, SampleRng, Transform};
use crate::{ImageError, Region, Result, Size};

/// Crops to a given size: at a random position in training, like torchvision's `RandomCrop`; at the centre in
/// validation, like fastai's.
///
/// ```
/// use brigade_images::Size;
/// use brigade_images::transforms::{Compose, PadMode, Phase, RandomCrop};
///
/// // As for CIFAR-10: four pixels on each side, then a part of the old size.
/// let crop = RandomCrop::new(32).padding(4, PadMode::ZEROS);
/// let plan = Compose::new().then(crop).plan(Size::from(32), Phase::Train, 1)?;
/// assert_eq!(plan.output_size(), Size::from(32));
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RandomCrop {
    size: Size,
    padding: u32,
    pad_if_needed: bool,
    mode: PadMode,
    #[serde(default)]
    over_edges: bool,
}

impl RandomCrop {
    /// Sets the size of the crop. An image that is smaller is an error, as in torchvision.
    #[must_use]
    pub fn new(size: impl Into<Size>) -> Self {
        Self {
            size: size.into(),
            padding: 0,
            pad_if_needed: false,
            mode: PadMode::ZEROS,
            over_edges: false,
        }
    }

    /// Sets the size of the crop, by the rules of fastai's `RandomCrop`: an image that is smaller is placed on black,
    /// at a random position in training, at the centre in validation.
    #[must_use]
    pub fn fastai(size: impl Into<Size>) -> Self {
        Self { over_edges: true, ..Self::new(size) }
    }

    /// Adds `pixels` pixels on each side before the crop, in training. Defaults to 0.
    #[must_use]
    pub const fn padding(mut self, pixels: u32, mode: PadMode) -> Self {
        self.padding = pixels;
        self.mode = mode;
        self
    }

    /// Pads images that are smaller than the crop, on both sides by the whole difference, like torchvision's
    /// `pad_if_needed`.
    #[must_use]
    pub const fn pad_if_needed(mut self, mode: PadMode) -> Self {
        self.pad_if_needed = true;
        self.mode = mode;
        self
    }
}

impl Transform for RandomCrop {
    fn draw(
        &self,
        size: Size,
        phase: Phase,
        random: &mut SampleRng,
        operations: &mut Vec<Operation>,
    ) -> Result<()> {
        let border = if phase == Phase::Train { self.padding } else { 0 };
        // torchvision adds the whole difference on both sides, not half of it.
        let pad = |side: u32, to: u32| {
            let padded = side.saturating_add(2u32.saturating_mul(border));
            let missing = if self.pad_if_needed { to.saturating_sub(padded) } else { 0 };
            border.saturating_add(missing)
        };
        let (x, y) = (pad(size.width, self.size.width), pad(size.height, self.size.height));
        let mut padded = size;
        if x > 0 || y > 0 {
            let pad = Operation::Pad { left: x, top: y, right: x, bottom: y, mode: self.mode };
            padded = pad.size_after(size)?;
            operations.push(pad);
        }
        if self.over_edges {
            let mut start = |side: u32, to: u32| {
                let free = i64::from(side) - i64::from(to);
                match (phase, u64::try_from(-free)) {
                    (Phase::Valid, _) => free.div_euclid(2),
                    (Phase::Train, Ok(missing @ 1..)) => free + random.below(missing) as i64,
                    (Phase::Train, _) => place(random, free as u32).into(),
                }
            };
            let left = start(padded.width, self.size.width);
            let top = start(padded.height, self.size.height);
            crop_at(padded, (left, top), self.size, self.mode, operations);
            return Ok(());
        }
        if padded.width < self.size.width || padded.height < self.size.height {
            return Err(ImageError::InvalidArgument(format!(
                "an image of {padded} pixels is smaller than the crop of {}; resize it first, or \
                 use `pad_if_needed`",
                self.size
            )));
        }
        let (free_x, free_y) = (padded.width - self.size.width, padded.height - self.size.height);
        let (left, top) = match phase {
            Phase::Train => (place(random, free_x), place(random, free_y)),
            Phase::Valid => (free_x / 2, free_y / 2),
        };
        let region = Region { left, top, width: self.size.width, height: self.size.height };
        crop(padded, region, operations);
        Ok(())
    }

    fn is_random(&self, phase: Phase) -> bool {
        phase == Phase::Train
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transforms::Compose;

    #[test]
    fn crops_of_small_images_are_padded_or_refused() {
        let size = Size::new(10, 30);
        let random = Compose::new().then(RandomCrop::new(17));
        let error = random.plan(size, Phase::Train, 0).unwrap_err().to_string();
        assert!(
            error.starts_with("an image of 10 x 30 pixels is smaller than the crop of 17 x 17")
        );
        let padded = Compose::new().then(RandomCrop::new(17).pad_if_needed(PadMode::Edge));
        let plan = padded.plan(size, Phase::Train, 0).unwrap();
        let pad = Operation::Pad { left: 7, top: 0, right: 7, bottom: 0, mode: PadMode::Edge };
        assert_eq!(plan.operations().first(), Some(&pad));
        assert_eq!(plan.output_size(), Size::from(17));
    }
}
