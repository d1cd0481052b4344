//! Crops of random area and aspect ratio, resized.

use serde::{Deserialize, Serialize};

use super::center_crop::centre_crop;
use super::crop::{crop, place};
use super::resize::shorter_side;
use super::{Operation, Phase, SampleRng, Transform};
use crate::{Filter, ImageError, Region, Result, Size};

/// Crops a region of random area and aspect ratio, and resizes it, in training. The rules of torchvision and of fastai
/// differ slightly in training and entirely in validation.
///
/// In training both try ten times: the area is uniform in `scale` times the image's, the aspect ratio log-uniform in
/// `ratio`, the sides are rounded and the position is uniform. If no try fits into the image, the largest central
/// region whose aspect ratio is in range is taken; torchvision rounds its sides, fastai rounds them down.
///
/// In validation
/// - [`new`](RandomResizedCrop::new) resizes the shorter side to 8/7 of the size and crops the centre, like
///   torchvision's reference programs with 256 and 224;
/// - [`fastai`](RandomResizedCrop::fastai) resizes the whole image, whatever its aspect ratio, to the size plus 14%,
///   where the addition is rounded up to a multiple of 8 (160 to 184, 224 to 256), and crops the centre.
///
/// ```
/// use brigade_images::transforms::{Compose, Operation, Phase, RandomResizedCrop};
/// use brigade_images::{Filter, Region, Size};
///
/// let crop = Compose::new().then(RandomResizedCrop::fastai(160).scale(0.35, 1.0));
/// let plan = crop.plan(Size::new(500, 375), Phase::Valid, 0)?;
/// assert_eq!(
///     plan.operations(),
///     [
///         Operation::Resize { size: Size::from(184), filter: Filter::Bilinear },
///         Operation::Crop(Region { left: 12, top: 12, width: 160, height: 160 }),
///     ]
/// );
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RandomResizedCrop {
    size: Size,
    scale: (f64, f64),
    ratio: (f64, f64),
    filter: Filter,
    rule: Library,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
enum Library {
    Torchvision,
    Fastai { valid_extra: f64 },
}

impl RandomResizedCrop {
    /// Creates a crop by the rules of torchvision's `RandomResizedCrop`: areas of 8% to 100%, aspect ratios of 3/4 to
    /// 4/3.
    #[must_use]
    pub fn new(size: impl Into<Size>) -> Self {
        Self {
            size: size.into(),
            scale: (0.08, 1.0),
            ratio: (3.0 / 4.0, 4.0 / 3.0),
            filter: Filter::Bilinear,
            rule: Library::Torchvision,
        }
    }

    /// Creates a crop by the rules of fastai's `RandomResizedCrop`, with areas of 8% to 100% and aspect ratios of 3/4
    /// to 4/3.
    #[must_use]
    pub fn fastai(size: impl Into<Size>) -> Self {
        Self { rule: Library::Fastai { valid_extra: 0.14 }, ..Self::new(size) }
    }

    /// Sets the range of the area, as a fraction of the image's area: fastai's `min_scale` and `max_scale`. Defaults to
    /// 0.08 to 1.
    #[must_use]
    pub const fn scale(mut self, least: f64, most: f64) -> Self {
        self.scale = (least, most);
        self
    }

    /// Sets the range of the aspect ratio: width divided by height. Defaults to 3/4 to 4/3.
    #[must_use]
    pub const fn ratio(mut self, least: f64, most: f64) -> Self {
        self.ratio = (least, most);
        self
    }

    /// Sets the resampling filter. Defaults to [`Filter::Bilinear`].
    #[must_use]
    pub const fn filter(mut self, filter: Filter) -> Self {
        self.filter = filter;
        self
    }

    /// Sets the fraction by which an image of the validation set is larger than the size before its centre is cropped:
    /// fastai's `val_xtra`. Has no effect on torchvision's rule. Defaults to 0.14.
    #[must_use]
    pub const fn valid_extra(mut self, part: f64) -> Self {
        if let Library::Fastai { valid_extra } = &mut self.rule {
            *valid_extra = part;
        }
        self
    }

    /// Chooses the region of an image of `size`.
    fn part(&self, size: Size, random: &mut SampleRng) -> Region {
        let area = f64::from(size.width) * f64::from(size.height);
        let logs = (self.ratio.0.ln(), self.ratio.1.ln());
        for _ in 0..10 {
            let area = area * random.uniform(self.scale.0, self.scale.1);
            let ratio = random.uniform(logs.0, logs.1).exp();
            let width = (area * ratio).sqrt().round_ties_even() as u32;
            let height = (area / ratio).sqrt().round_ties_even() as u32;
            let region = Region { left: 0, top: 0, width, height };
            if region.lies_in(size) {
                let left = place(random, size.width - width);
                return Region { left, top: place(random, size.height - height), ..region };
            }
        }
        let round = |side: f64, limit: u32| {
            let whole = match self.rule {
                Library::Torchvision => side.round_ties_even(),
                Library::Fastai { .. } => side.floor(),
            };
            (whole as u32).clamp(1, limit)
        };
        let ratio = f64::from(size.width) / f64::from(size.height);
        let (mut width, mut height) = (size.width, size.height);
        if ratio < self.ratio.0 {
            height = round(f64::from(width) / self.ratio.0, height);
        } else if ratio > self.ratio.1 {
            width = round(f64::from(height) * self.ratio.1, width);
        }
        let (left, top) = ((size.width - width) / 2, (size.height - height) / 2);
        Region { left, top, width, height }
    }
}

impl Transform for RandomResizedCrop {
    fn draw(
        &self,
        size: Size,
        phase: Phase,
        random: &mut SampleRng,
        operations: &mut Vec<Operation>,
    ) -> Result<()> {
        let (least, most) = (self.scale, self.ratio);
        if !(0.0 < least.0 && least.0 <= least.1 && 0.0 < most.0 && most.0 <= most.1) {
            return Err(ImageError::InvalidArgument(format!(
                "a random crop needs positive ranges from small to large, found areas of {:?} and \
                 aspect ratios of {:?}",
                self.scale, self.ratio
            )));
        }
        let resize = |size| Operation::Resize { size, filter: self.filter };
        let longest = self.size.width.max(self.size.height);
        match (phase, self.rule) {
            (Phase::Train, _) => {
                crop(size, self.part(size, random), operations);
                operations.push(resize(self.size));
            }
            (Phase::Valid, Library::Torchvision) => {
                let side = (f64::from(longest) * 8.0 / 7.0).round() as u32;
                let resized = shorter_side(size, side, None)?;
                operations.push(resize(resized));
                centre_crop(resized, self.size, operations);
            }
            (Phase::Valid, Library::Fastai { valid_extra }) => {
                let extra = (f64::from(longest) * valid_extra / 8.0).ceil() as u32;
                let extra = extra.saturating_mul(8);
                let larger = |side: u32| side.saturating_add(extra);
                let resized = Size::new(larger(self.size.width), larger(self.size.height));
                operations.push(resize(resized));
                let Size { width, height } = self.size;
                let region = Region { left: extra / 2, top: extra / 2, width, height };
                crop(resized, region, operations);
            }
        }
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

    fn region(transform: impl Transform + 'static, size: Size, seed: u64) -> Region {
        let plan = Compose::new().then(transform).plan(size, Phase::Train, seed).unwrap();
        match plan.operations().first() {
            Some(Operation::Crop(region)) => *region,
            _ => Region::whole(size),
        }
    }

    #[test]
    fn random_crops_stay_in_their_ranges_and_reach_the_borders() {
        let size = Size::new(500, 375);
        let (mut least, mut most, mut ratios) = (1.0f64, 0.0f64, (10.0f64, 0.0f64));
        let (mut left, mut right) = (u32::MAX, 0);
        for seed in 0..2000 {
            let region = region(RandomResizedCrop::new(160), size, seed);
            assert!(region.lies_in(size), "{region}");
            let area = region.size().pixels() as f64 / size.pixels() as f64;
            let ratio = f64::from(region.width) / f64::from(region.height);
            (least, most) = (least.min(area), most.max(area));
            ratios = (ratios.0.min(ratio), ratios.1.max(ratio));
            (left, right) = (left.min(region.left), right.max(region.left + region.width));
        }
        assert!((0.079..0.09).contains(&least) && (0.95..=1.0).contains(&most), "{least} {most}");
        assert!(ratios.0 > 0.74 && ratios.0 < 0.76, "{ratios:?}");
        assert!(ratios.1 > 1.31 && ratios.1 < 1.35, "{ratios:?}");
        assert_eq!((left, right), (0, 500));
    }

    #[test]
    fn images_that_no_try_fits_give_the_middle() {
        let tall = Size::new(9, 3000);
        let middle = |height| Region { left: 0, top: (3000 - height) / 2, width: 9, height };
        assert_eq!(region(RandomResizedCrop::new(8).scale(0.9, 1.0), tall, 0), middle(12));
        let ratio = |crop: RandomResizedCrop| crop.scale(0.9, 1.0).ratio(0.72, 1.3);
        // 9 / 0.72 = 12.5: torchvision rounds to the even number, fastai down.
        assert_eq!(region(ratio(RandomResizedCrop::new(8)), tall, 0), middle(12));
        assert_eq!(region(ratio(RandomResizedCrop::fastai(8)), tall, 0), middle(12));
        let wide = Size::new(3000, 11);
        // 11 * 1.3 = 14.3 and 11 * 1.6 = 17.6.
        let wider = |crop: RandomResizedCrop| crop.scale(0.9, 1.0).ratio(0.72, 1.6);
        assert_eq!(region(wider(RandomResizedCrop::new(8)), wide, 0).width, 18);
        assert_eq!(region(wider(RandomResizedCrop::fastai(8)), wide, 0).width, 17);
        for size in [Size::from(1), Size::new(1, 30_000), Size::new(30_000, 1)] {
            assert!(region(RandomResizedCrop::new(8), size, 3).lies_in(size));
            assert!(region(RandomResizedCrop::fastai(8), size, 3).lies_in(size));
        }
    }

    #[test]
    fn validation_follows_each_library() {
        let valid = |crop: RandomResizedCrop| {
            let plan = Compose::new().then(crop);
            plan.plan(Size::new(500, 375), Phase::Valid, 9).unwrap().operations().to_vec()
        };
        let resize = |width, height| Operation::Resize {
            size: Size::new(width, height),
            filter: Filter::Bilinear,
        };
        let middle =
            |left, top, side| Operation::Crop(Region { left, top, width: side, height: side });
        assert_eq!(valid(RandomResizedCrop::new(224)), [resize(341, 256), middle(58, 16, 224)]);
        assert_eq!(valid(RandomResizedCrop::fastai(224)), [resize(256, 256), middle(16, 16, 224)]);
        assert_eq!(valid(RandomResizedCrop::fastai(160).valid_extra(0.0)), [resize(160, 160)]);
    }
}
