//! Execution of a plan in as few steps as possible.

mod apply;

use std::mem;

use self::apply::{MAX_PIXELS, refuse_above};
use super::{Operation, Plan};
use crate::image::{CropBox, Image, ImageView, Region, Size};
use crate::resize::{Filter, Resizer};
use crate::{ImageError, Result};

/// Source of the pixels of an image.
pub(crate) enum Pixels<'a> {
    /// An image in memory.
    View(ImageView<'a>),
    /// A reader that returns only the pixels of the requested region.
    Reader(&'a mut dyn RegionReader),
}

/// Reads or decodes a region of an image.
pub(crate) trait RegionReader {
    /// Returns the size of the whole image.
    fn size(&self) -> Size;

    /// Reads the region into `target`, and returns its position in `target`. The image may be scaled down as long as
    /// the region has at least the size `at_least`; with `None` it is not scaled.
    fn read(
        &mut self,
        region: Region,
        at_least: Option<Size>,
        target: &mut Image,
    ) -> Result<CropBox>;
}

impl<'a> From<ImageView<'a>> for Pixels<'a> {
    fn from(view: ImageView<'a>) -> Self {
        Self::View(view)
    }
}

/// Mirroring that is still to be applied to an image.
///
/// ```
/// use brigade_images::transforms::Flips;
///
/// assert!(!Flips::default().horizontal);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flips {
    /// `true` if left and right are to be exchanged.
    pub horizontal: bool,
    /// `true` if top and bottom are to be exchanged.
    pub vertical: bool,
}

impl Flips {
    /// Returns the position in the image of a region of the mirrored image.
    fn unflip(self, region: Region, size: Size) -> Region {
        let mirrored = |start: u32, length: u32, side: u32| side - start - length;
        let Region { mut left, mut top, width, height } = region;
        if self.horizontal {
            left = mirrored(left, width, size.width);
        }
        if self.vertical {
            top = mirrored(top, height, size.height);
        }
        Region { left, top, width, height }
    }

    /// Mirrors the image in place.
    fn apply(self, image: &mut Image) {
        let stride = 3 * image.size().columns();
        if self.horizontal {
            for row in image.pixels_mut().chunks_exact_mut(stride) {
                row.as_chunks_mut::<3>().0.reverse();
            }
        }
        if self.vertical {
            let rows = image.size().rows();
            let mut rest = image.pixels_mut();
            for _ in 0..rows / 2 {
                let Some((first, others)) = mem::take(&mut rest).split_at_mut_checked(stride)
                else {
                    break;
                };
                let Some(start) = others.len().checked_sub(stride) else { break };
                let (middle, last) = others.split_at_mut(start);
                first.swap_with_slice(last);
                rest = middle;
            }
        }
    }
}

/// Executes plans. It reuses the memory of its steps.
pub(crate) struct Renderer {
    image: Image,
    spare: Image,
    resizer: Resizer,
    flips: Flips,
    /// Factor like Pillow's `reducing_gap`: an image may be scaled down while it is decoded to no less than this many
    /// times the size of the result. With `None` it is not scaled.
    pub(crate) reducing_gap: Option<f64>,
}

impl Renderer {
    pub(crate) fn new() -> Self {
        Self {
            image: Image::scratch(),
            spare: Image::scratch(),
            resizer: Resizer::new(),
            flips: Flips::default(),
            reducing_gap: None,
        }
    }

    /// Executes a plan, and keeps the result in this renderer.
    ///
    /// Mirroring is postponed to the end, where it costs nothing, so that crops are mirrored instead. Operations that
    /// only depend on values, or symmetrically on neighbours, are not affected.
    pub(crate) fn render<'a>(&mut self, pixels: impl Into<Pixels<'a>>, plan: &Plan) -> Result<()> {
        self.flips = Flips::default();
        let pixels = pixels.into();
        let size = match &pixels {
            Pixels::View(view) => view.size(),
            Pixels::Reader(reader) => reader.size(),
        };
        if size != plan.input_size() {
            return Err(ImageError::InvalidArgument(format!(
                "an image of {size} pixels does not fit a plan for {}",
                plan.input_size()
            )));
        }
        let (stage, mut rest) = Stage::gather(size, plan.operations(), &mut self.flips);
        match pixels {
            Pixels::View(view) => {
                let place = stage.region.into();
                stage.run(view, place, &mut self.resizer, &mut self.image)?;
            }
            Pixels::Reader(reader) => self.first(&stage, reader)?,
        }
        while let Some((operation, others)) = rest.split_first() {
            if is_staged(operation) {
                let (stage, others) = Stage::gather(self.image.size(), rest, &mut self.flips);
                if stage.changes(self.image.size()) {
                    let place = stage.region.into();
                    stage.run(self.image.view(), place, &mut self.resizer, &mut self.spare)?;
                    mem::swap(&mut self.image, &mut self.spare);
                }
                rest = others;
                continue;
            }
            if operation.depends_on_orientation() {
                mem::take(&mut self.flips).apply(&mut self.image);
            }
            operation.apply(&mut self.image, &mut self.spare)?;
            rest = others;
        }
        Ok(())
    }

    fn first(&mut self, stage: &Stage, reader: &mut dyn RegionReader) -> Result<()> {
        let needed = stage.needed();
        let at_least = stage.at_least(needed, self.reducing_gap);
        let target = if stage.resized.is_none() { &mut self.image } else { &mut self.spare };
        let place = reader.read(needed, at_least, target)?;
        if stage.resized.is_none() {
            let whole = self.image.size();
            if whole == needed.size() && outline(place, whole) == Region::whole(whole) {
                return Ok(());
            }
            mem::swap(&mut self.image, &mut self.spare);
        }
        let stretch = |start: f64, length: f64, region: (u32, u32), needed: (u32, u32)| {
            let scale = length / f64::from(needed.1);
            let before = f64::from(needed.0) - f64::from(region.0);
            (start - before * scale, f64::from(region.1) * scale)
        };
        let region = stage.region;
        let (left, width) = stretch(
            place.left,
            place.width,
            (region.left, region.width),
            (needed.left, needed.width),
        );
        let (top, height) = stretch(
            place.top,
            place.height,
            (region.top, region.height),
            (needed.top, needed.height),
        );
        let place = CropBox { left, top, width, height };
        stage.run(self.spare.view(), place, &mut self.resizer, &mut self.image)
    }

    /// Exchanges the mirrored image for the memory of another.
    pub(crate) fn swap_image(&mut self, image: &mut Image) {
        mem::take(&mut self.flips).apply(&mut self.image);
        mem::swap(&mut self.image, image);
    }

    /// Returns a view of the image, and the mirroring that is still to be applied.
    pub(crate) fn image(&self) -> (ImageView<'_>, Flips) {
        (self.image.view(), self.flips)
    }

    /// Returns the mirrored image.
    pub(crate) fn into_image(mut self) -> Result<Image> {
        self.flips.apply(&mut self.image);
        let Size { width, height } = self.image.size();
        Image::new(width, height, self.image.into_pixels())
    }
}

impl Plan {
    /// Applies the operations to an image.
    ///
    /// # Errors
    /// Fails if the image does not have the size of the plan, or there is not enough memory.
    pub fn apply(&self, image: &Image) -> Result<Image> {
        let mut renderer = Renderer::new();
        renderer.render(image.view(), self)?;
        renderer.into_image()
    }
}

/// A resize with the crops before and after it.
#[derive(Clone, Copy, Debug)]
struct Stage {
    /// Region of the image that is kept before the resize.
    region: Region,
    resized: Option<Resized>,
}

#[derive(Clone, Copy, Debug)]
struct Resized {
    /// Size to which the region is resized.
    full: Size,
    /// Region of the resized image that is kept.
    part: Region,
    filter: Filter,
}

/// Returns `true` if an operation can be part of a stage.
fn is_staged(operation: &Operation) -> bool {
    use Operation::{Crop, FlipHorizontal, FlipVertical, Resize};

    matches!(operation, Crop(_) | Resize { .. } | FlipHorizontal | FlipVertical)
}

impl Stage {
    /// Combines the first operations on an image of `size`, for which mirroring is still to be applied, into a stage.
    /// Returns the stage and the remaining operations.
    fn gather<'p>(
        size: Size,
        operations: &'p [Operation],
        flips: &mut Flips,
    ) -> (Self, &'p [Operation]) {
        let mut stage = Self { region: Region::whole(size), resized: None };
        let mut rest = operations;
        while let Some((operation, others)) = rest.split_first() {
            match *operation {
                Operation::FlipHorizontal => flips.horizontal ^= true,
                Operation::FlipVertical => flips.vertical ^= true,
                Operation::Crop(crop) if crop.lies_in(stage.output()) => {
                    let crop = flips.unflip(crop, stage.output());
                    let kept = match &mut stage.resized {
                        None => &mut stage.region,
                        Some(resized) => &mut resized.part,
                    };
                    *kept =
                        Region { left: kept.left + crop.left, top: kept.top + crop.top, ..crop };
                }
                Operation::Resize { size, .. } if size == stage.output() => {}
                Operation::Resize { size, filter } if stage.resized.is_none() => {
                    let part = Region::whole(size);
                    stage.resized = Some(Resized { full: size, part, filter });
                }
                _ => break,
            }
            rest = others;
        }
        (stage, rest)
    }

    fn output(&self) -> Size {
        self.resized.map_or_else(|| self.region.size(), |resized| resized.part.size())
    }

    fn changes(&self, size: Size) -> bool {
        self.resized.is_some() || self.region != Region::whole(size)
    }

    /// Returns the region of the image on which the result depends.
    fn needed(&self) -> Region {
        let Some(Resized { full, part, filter }) = self.resized else { return self.region };
        let along = |start: u32, length: u32, full: u32, part: (u32, u32)| {
            if part == (0, full) {
                return (start, length);
            }
            let scale = f64::from(length) / f64::from(full);
            let reach = filter.radius() * scale.max(1.0) + 1.0;
            let first = (f64::from(part.0) * scale - reach).floor().max(0.0);
            let end = (f64::from(part.0 + part.1) * scale + reach).ceil().min(f64::from(length));
            (start + first as u32, (end - first) as u32)
        };
        let Region { left, top, width, height } = self.region;
        let (left, width) = along(left, width, full.width, (part.left, part.width));
        let (top, height) = along(top, height, full.height, (part.top, part.height));
        Region { left, top, width, height }
    }

    /// Returns the minimum size to which the decoder may scale the needed region.
    fn at_least(&self, needed: Region, gap: Option<f64>) -> Option<Size> {
        let (Resized { full, .. }, gap) = (self.resized?, gap?);
        let side = |full: u32, needed: u32, region: u32| {
            let part = f64::from(needed) / f64::from(region);
            (f64::from(full) * part * gap.max(1.0)).ceil() as u32
        };
        Some(Size::new(
            side(full.width, needed.width, self.region.width),
            side(full.height, needed.height, self.region.height),
        ))
    }

    /// Executes the stage on an image in which `place` is the stage's region.
    fn run(
        &self,
        image: ImageView<'_>,
        place: CropBox,
        resizer: &mut Resizer,
        target: &mut Image,
    ) -> Result<()> {
        let edge = outline(place, image.size());
        let Some(Resized { full, part, filter }) = self.resized else {
            if edge.size() != self.region.size() || !edge.lies_in(image.size()) {
                return Err(ImageError::InvalidArgument(format!(
                    "the region {} was decoded as {edge}",
                    self.region
                )));
            }
            image.crop_into(edge, target)?;
            return Ok(());
        };
        refuse_above(&"a resize", part.size(), MAX_PIXELS)?;
        let across = place.width / f64::from(full.width);
        let down = place.height / f64::from(full.height);
        let part_box = CropBox {
            left: place.left + f64::from(part.left) * across,
            top: place.top + f64::from(part.top) * down,
            width: f64::from(part.width) * across,
            height: f64::from(part.height) * down,
        };
        resizer.resize_part(image, edge, part_box, part.size(), filter, target)
    }
}

/// Returns the whole pixels of an image that a box touches.
fn outline(place: CropBox, size: Size) -> Region {
    // A smaller overlap is caused by rounding.
    const ROUNDING: f64 = 1e-6;
    let along = |start: f64, length: f64, side: u32| {
        let first = (start + ROUNDING).floor().clamp(0.0, f64::from(side)) as u32;
        let end = (start + length - ROUNDING).ceil().clamp(0.0, f64::from(side)) as u32;
        (first, end.saturating_sub(first))
    };
    let (left, width) = along(place.left, place.width, size.width);
    let (top, height) = along(place.top, place.height, size.height);
    Region { left, top, width, height }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transforms::{Interpolation, PadMode};

    /// Returns an image in which all columns and rows differ, with waves that survive a resize.
    fn picture(width: u32, height: u32) -> Image {
        let value = |x: u32, y: u32, channel: u32| {
            let wave = (f64::from(x) / 3.0).sin() + (f64::from(y * (channel + 1)) / 5.0).cos();
            (127.0 + 60.0 * wave) as u8
        };
        let pixels = (0..height)
            .flat_map(|y| (0..width).flat_map(move |x| (0..3).map(move |c| value(x, y, c))))
            .collect();
        Image::new(width, height, pixels).unwrap()
    }

    /// Applies each operation as a plan of its own.
    fn stepwise(image: &Image, operations: &[Operation]) -> Image {
        operations.iter().fold(image.clone(), |image, operation| {
            let plan = Plan::of(image.size(), vec![operation.clone()]).unwrap();
            plan.apply(&image).unwrap()
        })
    }

    /// Reads regions of an image in memory like a decoder that works on blocks of 8, and records the requests.
    struct Blocks {
        image: Image,
        asked: Vec<(Region, Option<Size>)>,
        halved: bool,
    }

    impl RegionReader for Blocks {
        fn size(&self) -> Size {
            self.image.size()
        }

        fn read(
            &mut self,
            region: Region,
            at_least: Option<Size>,
            target: &mut Image,
        ) -> Result<CropBox> {
            self.asked.push((region, at_least));
            let left = region.left / 8 * 8;
            let block = Region { left, width: region.width + region.left - left, ..region };
            self.image.view().crop_into(block, target)?;
            let mut place = CropBox {
                left: f64::from(region.left - left),
                top: 0.0,
                width: f64::from(region.width),
                height: f64::from(region.height),
            };
            if self.halved && at_least.is_some() {
                let whole = target.clone();
                let half = Size::new(whole.width().div_ceil(2), whole.height().div_ceil(2));
                Resizer::new().resize(whole.view(), half, Filter::Box, target)?;
                let across = f64::from(half.width) / f64::from(whole.width());
                let down = f64::from(half.height) / f64::from(whole.height());
                place.left *= across;
                place.width *= across;
                place.height *= down;
            }
            Ok(place)
        }
    }

    fn crop(left: u32, top: u32, width: u32, height: u32) -> Operation {
        Operation::Crop(Region { left, top, width, height })
    }

    fn resize(width: u32, height: u32) -> Operation {
        Operation::Resize { size: Size::new(width, height), filter: Filter::Bilinear }
    }

    fn lists() -> Vec<Vec<Operation>> {
        use Operation::{Affine, Contrast, FlipHorizontal, FlipVertical, Pad};

        let shift = Affine {
            matrix: [1.0, 0.0, -3.0, 0.0, 1.0, 5.0],
            interpolation: Interpolation::Nearest,
            fill: [9; 3],
        };
        let mix = Operation::Mix {
            weight: 0.5,
            chains: vec![(0.25, vec![shift.clone(), FlipVertical]), (0.25, vec![Contrast(1.5)])],
        };
        let pad = Pad { left: 3, top: 0, right: 1, bottom: 2, mode: PadMode::Reflect };
        vec![
            vec![],
            vec![FlipHorizontal, crop(5, 3, 20, 30), resize(16, 12), FlipVertical],
            vec![crop(5, 3, 40, 30), crop(1, 2, 30, 20), FlipVertical, crop(0, 3, 17, 11)],
            vec![FlipVertical, resize(32, 24), FlipHorizontal, crop(2, 1, 9, 14)],
            vec![resize(20, 20), crop(3, 4, 11, 9), resize(30, 7)],
            vec![FlipHorizontal, shift, FlipVertical, crop(4, 4, 20, 20)],
            vec![crop(0, 1, 33, 29), FlipHorizontal, pad, resize(15, 15), Contrast(1.5)],
            vec![crop(9, 2, 24, 24), resize(24, 24), FlipHorizontal, FlipHorizontal],
            vec![FlipHorizontal, mix, crop(4, 4, 20, 20)],
        ]
    }

    #[test]
    fn steps_that_are_merged_give_what_each_gives_alone() {
        let image = picture(61, 47);
        for operations in lists() {
            let expected = stepwise(&image, &operations);
            let plan = Plan::of(image.size(), operations.clone()).unwrap();
            let mut reader = Blocks { image: image.clone(), asked: Vec::new(), halved: false };
            let mut renderer = Renderer::new();
            renderer.render(Pixels::Reader(&mut reader), &plan).unwrap();
            let read = renderer.into_image().unwrap();
            for found in [plan.apply(&image).unwrap(), read] {
                assert_eq!(found.size(), expected.size(), "{operations:?}");
                let difference = found
                    .pixels()
                    .iter()
                    .zip(expected.pixels())
                    .map(|(found, expected)| found.abs_diff(*expected))
                    .max();
                // A mirrored image is resized before it is mirrored, which gives other roundings.
                let resized = operations.iter().any(|o| matches!(o, Operation::Resize { .. }));
                assert!(difference <= Some(u8::from(resized) * 2), "{difference:?} {operations:?}");
            }
        }
    }

    #[test]
    fn only_what_is_needed_is_decoded() {
        let mut reader = Blocks { image: picture(61, 47), asked: Vec::new(), halved: false };
        let mut asked = |operations: Vec<Operation>, gap| {
            let mut renderer = Renderer { reducing_gap: gap, ..Renderer::new() };
            let plan = Plan::of(reader.size(), operations).unwrap();
            renderer.render(Pixels::Reader(&mut reader), &plan).unwrap();
            reader.asked.pop().unwrap()
        };
        let region = Region { left: 5, top: 3, width: 20, height: 30 };
        let cropped = vec![crop(5, 3, 20, 30), resize(10, 10)];
        assert_eq!(asked(cropped.clone(), None), (region, None));
        assert_eq!(asked(cropped.clone(), Some(1.0)), (region, Some(Size::new(10, 10))));
        assert_eq!(asked(cropped, Some(1.5)), (region, Some(Size::new(15, 15))));
        let mirrored = vec![Operation::FlipHorizontal, crop(5, 3, 20, 30)];
        assert_eq!(asked(mirrored, Some(1.0)), (Region { left: 36, ..region }, None));
        // The middle third of the columns, and the reach of the filter.
        let (region, at_least) = asked(vec![resize(30, 47), crop(10, 0, 10, 47)], Some(1.0));
        assert_eq!((region.top, region.height), (0, 47));
        assert_eq!((region.left, region.width), (17, 27));
        assert_eq!(at_least, Some(Size::new(14, 47)));
    }

    #[test]
    fn images_that_were_scaled_while_they_were_decoded_fit_their_place() {
        let ramps = (0..80).flat_map(|y| (0..96).flat_map(move |x| [2 * x, 3 * y, 255 - 2 * x]));
        let image = Image::new(96, 80, ramps.collect()).unwrap();
        let plan = vec![crop(13, 10, 64, 60), resize(24, 20), crop(4, 2, 12, 12)];
        let plan = Plan::of(image.size(), plan).unwrap();
        let exact = plan.apply(&image).unwrap();
        let mut reader = Blocks { image, asked: Vec::new(), halved: true };
        let mut renderer = Renderer { reducing_gap: Some(1.0), ..Renderer::new() };
        renderer.render(Pixels::Reader(&mut reader), &plan).unwrap();
        let scaled = renderer.into_image().unwrap();
        let difference = exact
            .pixels()
            .iter()
            .zip(scaled.pixels())
            .map(|(exact, scaled)| exact.abs_diff(*scaled))
            .max();
        // A shift by half a pixel of the decoded image would give 2 and 3.
        assert!(difference <= Some(1), "{difference:?}");
    }

    #[test]
    fn sizes_that_no_memory_could_hold_are_refused() {
        let image = Image::new(1, 2000, vec![7; 6000]).unwrap();
        let tall = Plan::of(image.size(), vec![resize(400, 800_000)]).unwrap();
        let error = tall.apply(&image).unwrap_err().to_string();
        assert!(error.starts_with("a resize would make an image of 400 x 800000"), "{error}");
        let middle = vec![resize(400, 800_000), crop(100, 5000, 30, 40)];
        let middle = Plan::of(image.size(), middle).unwrap().apply(&image).unwrap();
        assert_eq!((middle.size(), middle.pixel(3, 3)), (Size::new(30, 40), Some([7; 3])));
        let wide = Operation::Pad {
            left: 1 << 20,
            top: 0,
            right: 1 << 20,
            bottom: 0,
            mode: PadMode::ZEROS,
        };
        let wide = Plan::of(image.size(), vec![wide]).unwrap();
        assert!(wide.apply(&image).is_err());
        let other = Plan::of(Size::from(3), vec![]).unwrap();
        let error = other.apply(&image).unwrap_err().to_string();
        assert_eq!(error, "an image of 1 x 2000 pixels does not fit a plan for 3 x 3");
    }
}
