//! The operations that transforms chose for one image.

use super::Operation;
use crate::{Result, Size};

/// The operations on one image, which transforms chose for its size.
///
/// ```
/// use brigade_images::transforms::{CenterCrop, Compose, Phase};
/// use brigade_images::{Image, Size};
///
/// let image = Image::new(4, 2, (0..24).collect())?;
/// let plan = Compose::new().then(CenterCrop::new(2)).plan(image.size(), Phase::Valid, 0)?;
/// let crop = plan.apply(&image)?;
/// assert_eq!(crop.pixel(0, 0), image.pixel(1, 0));
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    input: Size,
    output: Size,
    operations: Vec<Operation>,
}

impl Plan {
    /// Creates a plan without operations.
    pub(crate) fn new(size: Size) -> Self {
        Self { input: size, output: size, operations: Vec::new() }
    }

    /// Creates a plan of some operations.
    pub(crate) fn of(size: Size, operations: Vec<Operation>) -> Result<Self> {
        let output = operations.iter().try_fold(size, |size, next| next.size_after(size))?;
        Ok(Self { input: size, output, operations })
    }

    /// Adds an operation at the end.
    pub(super) fn push(&mut self, operation: Operation) -> Result<()> {
        // Pixels outside of the image are black, as with torchvision's and fastai's crops.
        if let Operation::Crop(region) = operation
            && let Some(pad) = region.padding(self.output)
        {
            self.output = pad.size_after(self.output)?;
            self.operations.push(pad);
        }
        self.output = operation.size_after(self.output)?;
        self.operations.push(operation);
        Ok(())
    }

    /// Returns the plan before the first resize, and the operations from that resize on.
    pub(crate) fn split_at_resize(mut self) -> Result<(Self, Vec<Operation>)> {
        let resize = |next: &Operation| matches!(next, Operation::Resize { .. });
        let Some(at) = self.operations.iter().position(resize) else {
            return Ok((self, Vec::new()));
        };
        let rest = self.operations.split_off(at);
        self.output =
            self.operations.iter().try_fold(self.input, |size, next| next.size_after(size))?;
        Ok((self, rest))
    }

    /// Returns the operations, in their order.
    #[must_use]
    pub fn operations(&self) -> &[Operation] {
        &self.operations
    }

    /// Returns the size that the image must have.
    #[must_use]
    pub fn input_size(&self) -> Size {
        self.input
    }

    /// Returns the size of the image after all operations.
    #[must_use]
    pub fn output_size(&self) -> Size {
        self.output
    }

    /// Returns the plan for masks of the image: only the operations that move pixels, and resizes with the nearest
    /// pixel, like fastai's transforms of a `PILMask`. A mask is an image whose three channels all contain the class;
    /// `outside` is the class of pixels from outside of the image.
    ///
    /// ```
    /// use brigade_images::transforms::{ColorJitter, Compose, Operation, Phase, Resize};
    /// use brigade_images::{Filter, Size};
    ///
    /// let transforms = Compose::new().then(Resize::squish(8)).then(ColorJitter::new().hue(0.1));
    /// let plan = transforms.plan(Size::new(16, 12), Phase::Train, 1)?;
    /// let nearest = Operation::Resize { size: Size::from(8), filter: Filter::Nearest };
    /// assert_eq!(plan.for_masks(255).operations(), [nearest]);
    /// # Ok::<(), brigade_images::ImageError>(())
    /// ```
    #[must_use]
    pub fn for_masks(&self, outside: u8) -> Self {
        let operations = self.operations.iter().filter_map(|next| next.for_masks(outside));
        Self { operations: operations.collect(), ..*self }
    }

    /// Returns the position of a point of the image after all operations, in pixels from the upper left corner: the
    /// centre of the first pixel is `[0.5, 0.5]`. It may be outside of the image.
    ///
    /// ```
    /// use brigade_images::Size;
    /// use brigade_images::transforms::{CenterCrop, Compose, Phase, RandomHorizontalFlip};
    ///
    /// let transforms = Compose::new().then(CenterCrop::new(24)).then(RandomHorizontalFlip::new(1.0));
    /// let plan = transforms.plan(Size::new(64, 48), Phase::Train, 1)?;
    /// assert_eq!(plan.map_point([20.0, 12.0]), [24.0, 0.0]);
    /// # Ok::<(), brigade_images::ImageError>(())
    /// ```
    #[must_use]
    pub fn map_point(&self, mut point: [f64; 2]) -> [f64; 2] {
        let mut size = self.input;
        for operation in &self.operations {
            point = operation.map_point(point, size);
            // The error was returned when the plan was made.
            size = operation.size_after(size).unwrap_or(size);
        }
        point
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Image;
    use crate::transforms::{
        Compose, PadMode, Phase, RandAugment, RandomCrop, RandomHorizontalFlip, Resize,
    };

    #[test]
    fn points_follow_their_image() {
        let transforms = Compose::new()
            .then(Resize::crop(Size::new(96, 80)))
            .then(RandomHorizontalFlip::new(0.5))
            .then(RandomCrop::new(88).padding(12, PadMode::ZEROS))
            .then(RandAugment::default());
        let mut seen = 0;
        for seed in 0..60 {
            // One white block of 7 x 7 pixels around the point.
            let (x, y) = (30 + seed as u32 % 30, 20 + seed as u32 % 25);
            let block = |at: u32, centre: u32| at.abs_diff(centre) <= 3;
            let pixel = |h: u32, v: u32| [if block(h, x) && block(v, y) { 255 } else { 0 }; 3];
            let pixels = (0..64).flat_map(|v| (0..96).flat_map(move |h| pixel(h, v))).collect();
            let image = Image::new(96, 64, pixels).unwrap();
            let plan = transforms.plan(image.size(), Phase::Train, seed).unwrap();
            let geometry = plan.operations().iter().filter(|next| next.is_geometric()).cloned();
            let moved =
                Plan { operations: geometry.collect(), ..plan.clone() }.apply(&image).unwrap();
            let [at_x, at_y] = plan.map_point([f64::from(x) + 0.5, f64::from(y) + 0.5]);
            let size = f64::from(moved.width());
            if [at_x, at_y].iter().any(|place| !(8.0..size - 8.0).contains(place)) {
                continue;
            }
            seen += 1;
            let (mut sum, mut mass) = ([0.0; 2], 0.0);
            for v in 0..moved.height() {
                for h in 0..moved.width() {
                    let weight = f64::from(moved.pixel(h, v).unwrap()[0]);
                    sum = [
                        sum[0] + weight * (f64::from(h) + 0.5),
                        sum[1] + weight * (f64::from(v) + 0.5),
                    ];
                    mass += weight;
                }
            }
            let off = [sum[0] / mass - at_x, sum[1] / mass - at_y].map(f64::abs);
            assert!(off[0] < 0.7 && off[1] < 0.7, "{off:?} for {seed}: {:?}", plan.operations());
        }
        assert!(seen > 20, "{seen}");
    }

    #[test]
    fn masks_follow_their_image() {
        // Blocks of 16 pixels in one of two colours: the mask is the image's own red channel.
        let block =
            |x: u32, y: u32| if (x / 16 + y / 16).is_multiple_of(2) { [200; 3] } else { [30; 3] };
        let pixels = (0..64).flat_map(|y| (0..96).flat_map(move |x| block(x, y))).collect();
        let image = Image::new(96, 64, pixels).unwrap();
        let transforms = Compose::new()
            .then(Resize::crop(Size::new(48, 40)))
            .then(RandomHorizontalFlip::new(1.0))
            .then(RandomCrop::new(44).padding(6, PadMode::Constant([30; 3])))
            .then(RandAugment::default().fill([30; 3]));
        for seed in 0..40 {
            let plan = transforms.plan(image.size(), Phase::Train, seed).unwrap();
            let geometry: Vec<Operation> =
                plan.operations().iter().filter(|next| next.is_geometric()).cloned().collect();
            let moved = Plan { operations: geometry, ..plan.clone() }.apply(&image).unwrap();
            let mask = plan.for_masks(30).apply(&image).unwrap();
            assert_eq!((mask.size(), moved.size()), (Size::from(44), plan.output_size()));
            assert!(mask.pixels().iter().all(|class| [30, 200].contains(class)));
            let same = mask.pixels().iter().zip(moved.pixels());
            let same = same.filter(|(mask, image)| mask.abs_diff(**image) < 86).count();
            // All pixels except those on the borders of blocks, where the image is between the two colours.
            assert!(same * 100 > mask.pixels().len() * 97, "{same} for {seed}");
        }
    }
}
