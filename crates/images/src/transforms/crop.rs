//! Crops at a given position.

use serde::{Deserialize, Serialize};

use super::{Operation, PadMode, Phase, SampleRng, Transform};
use crate::{Region, Result, Size};

/// Crops an image at a column and a row, which may be negative; pixels outside of the image are black: torchvision's
/// `functional.crop`, fastai's `crop_pad`.
///
/// ```
/// use brigade_images::transforms::{Compose, Crop, Phase};
/// use brigade_images::{Image, Size};
///
/// let image = Image::new(2, 1, vec![1, 2, 3, 4, 5, 6])?;
/// let plan = Compose::new().then(Crop::new(-1, 0, Size::new(2, 1))).plan(image.size(), Phase::Train, 0)?;
/// assert_eq!(plan.apply(&image)?.pixels(), [0, 0, 0, 1, 2, 3]);
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Crop {
    left: i32,
    top: i32,
    size: Size,
}

impl Crop {
    /// Sets the first column, the first row, and the size of the crop.
    #[must_use]
    pub fn new(left: i32, top: i32, size: impl Into<Size>) -> Self {
        Self { left, top, size: size.into() }
    }
}

impl Transform for Crop {
    fn draw(
        &self,
        size: Size,
        _: Phase,
        _: &mut SampleRng,
        operations: &mut Vec<Operation>,
    ) -> Result<()> {
        crop_at(size, (self.left.into(), self.top.into()), self.size, PadMode::ZEROS, operations);
        Ok(())
    }

    fn is_random(&self, _: Phase) -> bool {
        false
    }
}

/// Appends the crop of `to` at a column and a row, with a border where it exceeds an edge.
pub(super) fn crop_at(
    size: Size,
    (left, top): (i64, i64),
    to: Size,
    mode: PadMode,
    operations: &mut Vec<Operation>,
) {
    let side = |start: i64, length: u32, side: u32| {
        let before = u32::try_from(start.saturating_neg()).unwrap_or(0);
        let end = start.saturating_add(length.into());
        let after = u32::try_from(end.saturating_sub(side.into())).unwrap_or(0);
        (before, u32::try_from(start).unwrap_or(0), after)
    };
    let (before, left, right) = side(left, to.width, size.width);
    let (above, top, bottom) = side(top, to.height, size.height);
    if before > 0 || right > 0 || above > 0 || bottom > 0 {
        operations.push(Operation::Pad { left: before, top: above, right, bottom, mode });
    }
    let padded =
        |side: u32, before: u32, after: u32| side.saturating_add(before).saturating_add(after);
    let padded = Size::new(padded(size.width, before, right), padded(size.height, above, bottom));
    crop(padded, Region { left, top, width: to.width, height: to.height }, operations);
}

/// Appends the crop of a region, unless it is the whole image.
pub(super) fn crop(size: Size, region: Region, operations: &mut Vec<Operation>) {
    if region != Region::whole(size) {
        operations.push(Operation::Crop(region));
    }
}

/// Draws a random number in `0..=free`.
pub(super) fn place(random: &mut SampleRng, free: u32) -> u32 {
    random.below(u64::from(free) + 1) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Image;
    use crate::transforms::{CenterCrop, Compose, RandomCrop};

    /// Expected values: the results of torchvision's `functional.crop` and `CenterCrop` for a grey image of 3 x 2
    /// pixels with the values 10 to 60. Those of fastai's `crop_pad` are the same, except for the region that is
    /// entirely outside.
    #[test]
    fn what_lies_outside_is_black() {
        let pixels = (1..7).flat_map(|value| [10 * value; 3]).collect();
        let image = Image::new(3, 2, pixels).unwrap();
        let apply = |compose: Compose, phase, seed| {
            let plan = compose.plan(image.size(), phase, seed).unwrap();
            let made = plan.apply(&image).unwrap();
            made.pixels().iter().step_by(3).copied().collect::<Vec<u8>>()
        };
        for (left, top, size, expected) in [
            (-1, -1, Size::new(3, 2), &[0, 0, 0, 0, 10, 20][..]),
            (2, 1, Size::new(3, 2), &[60, 0, 0, 0, 0, 0]),
            (1, -1, Size::new(1, 4), &[0, 20, 50, 0]),
            (5, 5, Size::new(2, 2), &[0, 0, 0, 0]),
            (1, 0, Size::new(2, 2), &[20, 30, 50, 60]),
        ] {
            let crop = Compose::new().then(Crop::new(left, top, size));
            assert_eq!(apply(crop, Phase::Train, 0), expected, "{left}, {top}");
            // A custom transform that requests a region over the edge.
            if let (Ok(left), Ok(top)) = (left.try_into(), top.try_into()) {
                let region = Region { left, top, width: size.width, height: size.height };
                let own = Compose::new().then(Own(region));
                assert_eq!(apply(own, Phase::Train, 0), expected, "{left}, {top}");
            }
        }
        let centre = Compose::new().then(CenterCrop::new(Size::new(2, 4)));
        assert_eq!(apply(centre, Phase::Train, 0), [0, 0, 10, 20, 40, 50, 0, 0]);

        // fastai's RandomCrop of a size that is higher and narrower.
        let random = Compose::new().then(RandomCrop::fastai(Size::new(1, 6)));
        assert_eq!(apply(random.clone(), Phase::Valid, 0), [0, 0, 20, 50, 0, 0]);
        let places: std::collections::BTreeSet<_> = (0..200)
            .map(|seed| apply(random.clone(), Phase::Train, seed))
            .map(|pixels| {
                let first = pixels.iter().position(|value| *value > 0).unwrap();
                assert_eq!(pixels[first + 1], pixels[first] + 30);
                (first, pixels[first])
            })
            .collect();
        let expected = [1, 2, 3, 4].into_iter().flat_map(|y| [10, 20, 30].map(|x| (y, x)));
        assert_eq!(places, expected.collect());

        let far = Compose::new().then(Crop::new(i32::MAX, i32::MIN, 7));
        assert!(
            far.plan(image.size(), Phase::Train, 0).and_then(|plan| plan.apply(&image)).is_err()
        );
    }

    #[derive(Debug)]
    struct Own(Region);

    impl Transform for Own {
        fn draw(
            &self,
            _: Size,
            _: Phase,
            _: &mut SampleRng,
            operations: &mut Vec<Operation>,
        ) -> Result<()> {
            operations.push(Operation::Crop(self.0));
            Ok(())
        }
    }
}
