//! Cutting parts out.

use serde::{Deserialize, Serialize};

use super::resize::shorter_side;
use super::{Operation, PadMode, Phase, SampleRng, Transform};
use crate::{Filter, ImageError, Region, Result, Size};

/// Keeps the middle of an image; one that is smaller gets a black border first: torchvision's
/// `CenterCrop`.
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
    /// Sets the size to keep.
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
fn centre_crop(size: Size, to: Size, operations: &mut Vec<Operation>) {
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
    // Python's `round`: halves go to the even number.
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

/// Keeps the region of an image that begins at a column and a row, which may be negative; what lies outside of
/// the image is black: torchvision's `functional.crop`, fastai's `crop_pad`.
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
    /// Sets the first column, the first row, and the size to keep.
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

/// Appends the crop of `to` at a column and a row, with a border where it goes over an edge.
fn crop_at(
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

fn crop(size: Size, region: Region, operations: &mut Vec<Operation>) {
    if region != Region::whole(size) {
        operations.push(Operation::Crop(region));
    }
}

/// Keeps a part of a given size: anywhere in training, torchvision's `RandomCrop`; in the middle in
/// validation, fastai's.
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
    /// Sets the size to keep; an image that is smaller is an error, as for torchvision.
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

    /// Sets the size to keep, by the rules of fastai's `RandomCrop`: an image that is smaller lies
    /// anywhere on black in training, in the middle in validation.
    #[must_use]
    pub fn fastai(size: impl Into<Size>) -> Self {
        Self { over_edges: true, ..Self::new(size) }
    }

    /// Adds `pixels` on each side first, in training.
    #[must_use]
    pub const fn padding(mut self, pixels: u32, mode: PadMode) -> Self {
        self.padding = pixels;
        self.mode = mode;
        self
    }

    /// Adds what is missing to the size on both sides of images that are smaller, as torchvision's
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
        // torchvision adds all that is missing on both sides, not half of it.
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

/// Draws one of `0..=free`.
fn place(random: &mut SampleRng, free: u32) -> u32 {
    random.below(u64::from(free) + 1) as u32
}

/// Resizes a part of random area and aspect ratio to a size, in training; the rules of torchvision
/// and of fastai differ in little there and in all of validation.
///
/// In training both try ten times: the area is uniform in `scale` times the image's, the aspect ratio
/// log-uniform in `ratio`, the sides are rounded and the place is uniform. When no try fits into the
/// image, the largest part in the middle whose aspect ratio is in range is taken; torchvision rounds
/// its sides, fastai rounds them down.
///
/// In validation
/// - [`new`](RandomResizedCrop::new) resizes the shorter side to 8/7 of the size and takes the
///   middle, as torchvision's reference programs do with 256 and 224;
/// - [`fastai`](RandomResizedCrop::fastai) resizes the whole image, whatever its aspect ratio, to the
///   size and 14% more, rounded up to a multiple of 8 (160 to 184, 224 to 256), and takes the middle.
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
    /// Follows torchvision's `RandomResizedCrop`: areas of 8% to 100%, aspect ratios of 3/4 to 4/3.
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

    /// Follows fastai's `RandomResizedCrop`, with the same ranges.
    #[must_use]
    pub fn fastai(size: impl Into<Size>) -> Self {
        Self { rule: Library::Fastai { valid_extra: 0.14 }, ..Self::new(size) }
    }

    /// Sets the range of the area, as a part of the image's: fastai's `min_scale` and `max_scale`.
    #[must_use]
    pub const fn scale(mut self, least: f64, most: f64) -> Self {
        self.scale = (least, most);
        self
    }

    /// Sets the range of width divided by height.
    #[must_use]
    pub const fn ratio(mut self, least: f64, most: f64) -> Self {
        self.ratio = (least, most);
        self
    }

    /// Sets the filter.
    #[must_use]
    pub const fn filter(mut self, filter: Filter) -> Self {
        self.filter = filter;
        self
    }

    /// Sets how much larger than the size an image of the validation set is before the middle is
    /// taken: fastai's `val_xtra`. No effect on torchvision's rule.
    #[must_use]
    pub const fn valid_extra(mut self, part: f64) -> Self {
        if let Library::Fastai { valid_extra } = &mut self.rule {
            *valid_extra = part;
        }
        self
    }

    /// Draws the part of an image of `size`.
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
    use crate::Image;
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

    /// What torchvision's `functional.crop` and `CenterCrop` and, but for the region that lies outside altogether,
    /// fastai's `crop_pad` make of a grey image of 3 x 2 pixels with the values 10 to 60.
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
            // A transform of one's own that asks for a region over the edge.
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

    #[test]
    fn crops_of_small_images_are_padded_or_refused() {
        let size = Size::new(10, 30);
        let plan = Compose::new().then(CenterCrop::new(17)).plan(size, Phase::Train, 0).unwrap();
        let pad = Operation::Pad { left: 3, top: 0, right: 4, bottom: 0, mode: PadMode::ZEROS };
        // (30 - 17) / 2 = 6.5, which Python rounds to 6.
        let crop = Operation::Crop(Region { left: 0, top: 6, width: 17, height: 17 });
        assert_eq!(plan.operations(), [pad, crop]);

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
