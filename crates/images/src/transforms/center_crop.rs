//! Centre crops.

use serde::{Deserialize, Serialize};

use super::crop::crop;
use super::{Operation, PadMode, Phase, SampleRng, Transform};
use crate::{Region, Result, Size};

/// Crops the centre of an image; an image that is smaller gets a black border first: torchvision's `CenterCrop`.
///
/// ```
/// use brigade_images::transforms::{CenterCrop, Compose, Operation, Phase};
/// use brigade_images::{Region, Size};
///
/// let plan = Compose::new().then(CenterCrop::new(24)).plan(Size::new(64, 48), Phase::Train, 0)?;
/// let middle = Region { left: 20, top: 12, width: 24, height: 24 };
/// assert_eq!(plan.operations(), [Operation::Crop(middle)]);
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CenterCrop {
    size: Size,
}

impl CenterCrop {
    /// Sets the size of the crop.
    #[must_use]
    pub fn new(size: impl Into<Size>) -> Self {
        Self { size: size.into() }
    }
}

impl Transform for CenterCrop {
    fn draw(
        &self,
        size: Size,
        _: Phase,
        _: &mut SampleRng,
        operations: &mut Vec<Operation>,
    ) -> Result<()> {
        centre_crop(size, self.size, operations);
        Ok(())
    }

    fn is_random(&self, _: Phase) -> bool {
        false
    }
}

/// Appends torchvision's centre crop.
pub(super) fn centre_crop(size: Size, to: Size, operations: &mut Vec<Operation>) {
    let (missing_x, missing_y) =
        (to.width.saturating_sub(size.width), to.height.saturating_sub(size.height));
    if missing_x > 0 || missing_y > 0 {
        operations.push(Operation::Pad {
            left: missing_x / 2,
            top: missing_y / 2,
            right: missing_x - missing_x / 2,
            bottom: missing_y - missing_y / 2,
            mode: PadMode::ZEROS,
        });
    }
    // Python's `round`: halves are rounded to the even number.
    let start =
        |side: u32, to: u32| (f64::from(side.saturating_sub(to)) / 2.0).round_ties_even() as u32;
    crop(
        Size::new(size.width + missing_x, size.height + missing_y),
        Region {
            left: start(size.width, to.width),
            top: start(size.height, to.height),
            width: to.width,
            height: to.height,
        },
        operations,
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transforms::Compose;

    #[test]
    fn a_small_image_gets_a_border() {
        let size = Size::new(10, 30);
        let plan = Compose::new().then(CenterCrop::new(17)).plan(size, Phase::Train, 0).unwrap();
        let pad = Operation::Pad { left: 3, top: 0, right: 4, bottom: 0, mode: PadMode::ZEROS };
        // (30 - 17) / 2 = 6.5, which Python rounds to 6.
        let crop = Operation::Crop(Region { left: 0, top: 6, width: 17, height: 17 });
        assert_eq!(plan.operations(), [pad, crop]);
    }
}
