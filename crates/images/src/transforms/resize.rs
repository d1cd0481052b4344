//! Resizing of images.

use serde::{Deserialize, Serialize};

use super::{Operation, PadMode, Phase, SampleRng, Transform};
use crate::{Filter, ImageError, Region, Result, Size};

/// Resizes images, by one of the rules of torchvision's and fastai's `Resize`, bilinearly with antialiasing unless
/// another [`filter`](Resize::filter) is set.
///
/// ```
/// use brigade_images::Size;
/// use brigade_images::transforms::{Compose, PadMode, Phase, Resize};
///
/// let photograph = Size::new(500, 375);
/// let after = |resize: Resize| {
///     Compose::new().then(resize).plan(photograph, Phase::Valid, 0).map(|plan| plan.output_size())
/// };
/// assert_eq!(after(Resize::shorter(256))?, Size::new(341, 256));
/// assert_eq!(after(Resize::longer(250))?, Size::new(250, 187));
/// assert_eq!(after(Resize::squish(224))?, Size::from(224));
/// assert_eq!(after(Resize::crop(224))?, Size::from(224));
/// assert_eq!(after(Resize::pad(224, PadMode::Reflect))?, Size::from(224));
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Resize {
    rule: Rule,
    filter: Filter,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
enum Rule {
    Shorter { side: u32, longer_at_most: Option<u32> },
    Longer(u32),
    Squish(Size),
    Crop(Size),
    Pad(Size, PadMode),
}

impl Resize {
    const fn new(rule: Rule) -> Self {
        Self { rule, filter: Filter::Bilinear }
    }

    /// Resizes the shorter side to `side` pixels and keeps the aspect ratio, the longer side rounded down:
    /// torchvision's `Resize(int)`.
    #[must_use]
    pub const fn shorter(side: u32) -> Self {
        Self::new(Rule::Shorter { side, longer_at_most: None })
    }

    /// Resizes the longer side to `side` pixels and keeps the aspect ratio, the shorter side rounded down: fastai's
    /// `RatioResize`.
    #[must_use]
    pub const fn longer(side: u32) -> Self {
        Self::new(Rule::Longer(side))
    }

    /// Resizes both sides, whatever the aspect ratio: torchvision's `Resize((h, w))`, fastai's `ResizeMethod.Squish`.
    #[must_use]
    pub fn squish(size: impl Into<Size>) -> Self {
        Self::new(Rule::Squish(size.into()))
    }

    /// Crops the largest region of the new aspect ratio and resizes it: fastai's `ResizeMethod.Crop`. The region has a
    /// random position in training and is at the centre in validation.
    #[must_use]
    pub fn crop(size: impl Into<Size>) -> Self {
        Self::new(Rule::Crop(size.into()))
    }

    /// Resizes the whole image to fit into `size` and pads the rest: fastai's `ResizeMethod.Pad`. The image has a
    /// random position in training and is at the centre in validation.
    ///
    /// fastai pads first, to the new aspect ratio, and resizes the result; here the image is resized and then padded,
    /// so that the pixels next to the seam can differ.
    #[must_use]
    pub fn pad(size: impl Into<Size>, mode: PadMode) -> Self {
        Self::new(Rule::Pad(size.into(), mode))
    }

    /// Limits the longer side of [`shorter`](Resize::shorter): torchvision's `max_size`. The shorter side becomes
    /// smaller if the limit is reached. Has no effect on the other rules. Defaults to no limit.
    #[must_use]
    pub const fn longer_at_most(mut self, side: u32) -> Self {
        if let Rule::Shorter { longer_at_most, .. } = &mut self.rule {
            *longer_at_most = Some(side);
        }
        self
    }

    /// Sets the resampling filter. Defaults to [`Filter::Bilinear`].
    #[must_use]
    pub const fn filter(mut self, filter: Filter) -> Self {
        self.filter = filter;
        self
    }

    fn to(self, size: Size) -> Operation {
        Operation::Resize { size, filter: self.filter }
    }
}

impl Transform for Resize {
    fn draw(
        &self,
        size: Size,
        phase: Phase,
        random: &mut SampleRng,
        operations: &mut Vec<Operation>,
    ) -> Result<()> {
        let mut place = || match phase {
            Phase::Train => random.uniform(0.0, 1.0),
            Phase::Valid => 0.5,
        };
        match self.rule {
            Rule::Shorter { side, longer_at_most } => {
                operations.push(self.to(shorter_side(size, side, longer_at_most)?));
            }
            Rule::Longer(side) => {
                let shorter = scaled(side, size.width.min(size.height), longest(size));
                operations.push(self.to(along(size, shorter, side)));
            }
            Rule::Squish(to) => operations.push(self.to(to)),
            Rule::Crop(to) => {
                let [across, down] = [place(), place()];
                let scale = ratio(size.width, to.width).min(ratio(size.height, to.height));
                let kept = |to: u32, side: u32| ((scale * f64::from(to)) as u32).clamp(1, side);
                let (width, height) = (kept(to.width, size.width), kept(to.height, size.height));
                let left = (across * f64::from(size.width - width)) as u32;
                let top = (down * f64::from(size.height - height)) as u32;
                operations.push(Operation::Crop(Region { left, top, width, height }));
                operations.push(self.to(to));
            }
            Rule::Pad(to, mode) => {
                let [across, down] = [place(), place()];
                let scale = ratio(size.width, to.width).max(ratio(size.height, to.height));
                let kept = |side: u32, to: u32| {
                    ((f64::from(side) / scale).round() as u32).clamp(1, to.max(1))
                };
                let inner = Size::new(kept(size.width, to.width), kept(size.height, to.height));
                operations.push(self.to(inner));
                let left = (across * f64::from(to.width.saturating_sub(inner.width))) as u32;
                let top = (down * f64::from(to.height.saturating_sub(inner.height))) as u32;
                if inner != to {
                    operations.push(Operation::Pad {
                        left,
                        top,
                        right: to.width.saturating_sub(inner.width) - left,
                        bottom: to.height.saturating_sub(inner.height) - top,
                        mode,
                    });
                }
            }
        }
        Ok(())
    }

    fn is_random(&self, phase: Phase) -> bool {
        phase == Phase::Train && matches!(self.rule, Rule::Crop(_) | Rule::Pad(..))
    }
}

/// Resizes larger images to a shorter side, and leaves smaller ones unchanged. A cache inserts it before all other
/// transforms.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Presize(pub(crate) u32);

impl Transform for Presize {
    fn draw(
        &self,
        size: Size,
        _: Phase,
        _: &mut SampleRng,
        operations: &mut Vec<Operation>,
    ) -> Result<()> {
        if size.width.min(size.height) > self.0 {
            let size = shorter_side(size, self.0, None)?;
            operations.push(Operation::Resize { size, filter: Filter::Bilinear });
        }
        Ok(())
    }

    fn is_random(&self, _: Phase) -> bool {
        false
    }
}

/// Returns the size whose shorter side is `side`, the longer one rounded down as in torchvision.
pub(super) fn shorter_side(size: Size, side: u32, longer_at_most: Option<u32>) -> Result<Size> {
    let (short, long) = (size.width.min(size.height), longest(size));
    let (mut shorter, mut longer) = (side, scaled(side, long, short));
    if let Some(limit) = longer_at_most {
        if limit <= side {
            return Err(ImageError::InvalidArgument(format!(
                "the longer side cannot be at most {limit} pixels where the shorter one is {side}; \
                 give a larger limit"
            )));
        }
        if longer > limit {
            (shorter, longer) = (scaled(limit, shorter, longer).max(1), limit);
        }
    }
    Ok(along(size, shorter, longer))
}

/// Returns a size with the same orientation (portrait or landscape) as `size`.
fn along(size: Size, shorter: u32, longer: u32) -> Size {
    if size.width <= size.height { Size::new(shorter, longer) } else { Size::new(longer, shorter) }
}

fn longest(size: Size) -> u32 {
    size.width.max(size.height)
}

/// Returns `side * of / to`, rounded down, at least 1.
fn scaled(side: u32, of: u32, to: u32) -> u32 {
    let scaled = u64::from(side) * u64::from(of) / u64::from(to.max(1));
    u32::try_from(scaled).unwrap_or(u32::MAX).max(1)
}

fn ratio(side: u32, to: u32) -> f64 {
    f64::from(side) / f64::from(to.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transforms::Compose;

    fn output(resize: Resize, size: Size, phase: Phase) -> Size {
        Compose::new().then(resize).plan(size, phase, 11).unwrap().output_size()
    }

    #[test]
    fn shorter_sides_follow_torchvision() {
        let after = |width, height, resize| output(resize, Size::new(width, height), Phase::Train);
        assert_eq!(after(64, 48, Resize::shorter(32)), Size::new(42, 32));
        assert_eq!(after(48, 64, Resize::shorter(32)), Size::new(32, 42));
        assert_eq!(after(640, 48, Resize::shorter(32).longer_at_most(100)), Size::new(100, 7));
        assert_eq!(after(1, 30_000, Resize::shorter(2).longer_at_most(100)), Size::new(1, 100));
        let both = Compose::new().then(Resize::shorter(32).longer_at_most(32));
        let error = both.plan(Size::from(64), Phase::Train, 0).unwrap_err().to_string();
        assert!(error.starts_with("the longer side cannot be at most 32 pixels"), "{error}");
    }

    #[test]
    fn crops_and_pads_have_the_size_that_was_asked_for() {
        let odd =
            [Size::new(1, 1), Size::new(1, 30_000), Size::new(30_000, 1), Size::new(333, 500)];
        for size in odd {
            for phase in [Phase::Train, Phase::Valid] {
                for to in [Size::new(24, 16), Size::new(1, 7)] {
                    assert_eq!(output(Resize::crop(to), size, phase), to);
                    assert_eq!(output(Resize::pad(to, PadMode::Reflect), size, phase), to);
                }
            }
        }
    }

    #[test]
    fn fastai_crops_the_middle_in_validation() {
        let crop = Compose::new().then(Resize::crop(Size::new(30, 20)));
        let plan = crop.plan(Size::new(100, 100), Phase::Valid, 0).unwrap();
        let middle = Region { left: 0, top: 17, width: 100, height: 66 };
        assert_eq!(plan.operations().first(), Some(&Operation::Crop(middle)));
        let places: std::collections::BTreeSet<String> = (0..20)
            .map(|seed| format!("{:?}", crop.plan(Size::from(100), Phase::Train, seed).unwrap()))
            .collect();
        assert!(places.len() > 10, "{places:?}");
    }

    #[test]
    fn presizes_never_enlarge() {
        let presize = Compose::new().then(Presize(100));
        let after = |size| presize.plan(size, Phase::Train, 0).unwrap().output_size();
        assert_eq!(after(Size::new(200, 300)), Size::new(100, 150));
        assert_eq!(after(Size::new(80, 300)), Size::new(80, 300));
    }
}
