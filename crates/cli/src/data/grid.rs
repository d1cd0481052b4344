//! Grid of images in one picture, with a line of text below each.

use brigade_images::{Image, Size};
use embedded_graphics::Drawable;
use embedded_graphics::draw_target::DrawTarget;
use embedded_graphics::geometry::{OriginDimensions, Point};
use embedded_graphics::mono_font::MonoTextStyle;
use embedded_graphics::mono_font::iso_8859_1::FONT_6X13;
use embedded_graphics::pixelcolor::{Rgb888, RgbColor};
use embedded_graphics::prelude::Pixel;
use embedded_graphics::text::{Baseline, Text};

/// Cells in rows and columns on a white background.
pub(super) struct Grid {
    image: Image,
    cell: Size,
}

/// Size of a letter in pixels.
const LETTER: Size = Size::new(6, 13);
const GAP: u32 = 6;
/// Maximum number of pixels of the whole picture: 200 MB.
pub(super) const MAX_PIXELS: u64 = 1 << 26;

impl Grid {
    /// Creates an empty grid of cells of one size. Fails with its size in pixels if that is too large.
    pub(super) fn new(rows: u32, columns: u32, cell: Size) -> Result<Self, Size> {
        let side = |count: u32, cell: u32| count.saturating_mul(cell.saturating_add(GAP));
        let size = Size::new(
            side(columns, cell.width).saturating_add(GAP),
            side(rows, cell.height.saturating_add(LETTER.height + GAP / 2)).saturating_add(GAP),
        );
        if size.pixels() > MAX_PIXELS {
            return Err(size);
        }
        let bytes = 3 * size.pixels() as usize;
        let image = Image::new(size.width, size.height, vec![255; bytes]).map_err(|_| size)?;
        Ok(Self { image, cell })
    }

    /// Draws an image, which is at most as large as a cell, and its label into a cell.
    pub(super) fn put(&mut self, row: u32, column: u32, image: &Image, label: &str) {
        let left = GAP + column * (self.cell.width + GAP);
        let top = GAP + row * (self.cell.height + LETTER.height + GAP / 2 + GAP);
        // Centred in its cell, just above its label.
        let start = left + (self.cell.width - image.width()) / 2;
        let first = top + (self.cell.height - image.height()) / 2;
        let (stride, width) = (3 * self.image.width() as usize, 3 * image.width() as usize);
        let rows = image.pixels().chunks_exact(width.max(1));
        for (line, pixels) in (first as usize..).zip(rows) {
            let at = line * stride + 3 * start as usize;
            if let Some(out) = self.image.pixels_mut().get_mut(at..at + width) {
                out.copy_from_slice(pixels);
            }
        }
        let label = shortened(label, (self.cell.width + GAP - 2) / LETTER.width);
        let place = Point::new(left as i32, (top + self.cell.height + GAP / 2) as i32);
        let style = MonoTextStyle::new(&FONT_6X13, Rgb888::BLACK);
        // Drawing into memory cannot fail.
        let Ok(_end) = Text::with_baseline(&label, place, style, Baseline::Top)
            .draw(&mut Canvas(&mut self.image));
    }

    /// Encodes the grid as PNG.
    pub(super) fn png(&self) -> Result<Vec<u8>, png::EncodingError> {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, self.image.width(), self.image.height());
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        let mut writer = encoder.write_header()?;
        writer.write_image_data(self.image.pixels())?;
        writer.finish()?;
        Ok(bytes)
    }
}

/// Shortens a label to this many letters, with two dots at the cut.
fn shortened(label: &str, letters: u32) -> String {
    let letters = letters.max(1) as usize;
    if label.chars().count() <= letters {
        return label.to_owned();
    }
    let kept: String = label.chars().take(letters.saturating_sub(2)).collect();
    format!("{kept}..")
}

/// Image as a target for drawing text.
struct Canvas<'a>(&'a mut Image);

impl OriginDimensions for Canvas<'_> {
    fn size(&self) -> embedded_graphics::geometry::Size {
        embedded_graphics::geometry::Size::new(self.0.width(), self.0.height())
    }
}

impl DrawTarget for Canvas<'_> {
    type Color = Rgb888;
    type Error = std::convert::Infallible;

    fn draw_iter<I: IntoIterator<Item = Pixel<Rgb888>>>(
        &mut self,
        pixels: I,
    ) -> Result<(), Self::Error> {
        let Size { width, height } = self.0.size();
        for Pixel(Point { x, y }, colour) in pixels {
            let (Ok(x), Ok(y)) = (u32::try_from(x), u32::try_from(y)) else { continue };
            if x >= width || y >= height {
                continue;
            }
            let at = 3 * (y as usize * width as usize + x as usize);
            if let Some(pixel) = self.0.pixels_mut().get_mut(at..at + 3) {
                pixel.copy_from_slice(&[colour.r(), colour.g(), colour.b()]);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_and_labels_lie_in_their_cells() {
        let red = Image::new(30, 20, [200, 0, 0].repeat(600)).unwrap();
        let small = Image::new(10, 20, [0, 0, 200].repeat(200)).unwrap();
        let mut grid = Grid::new(1, 2, Size::new(30, 20)).unwrap();
        grid.put(0, 0, &red, "a label that is too long");
        grid.put(0, 1, &small, "b");
        assert_eq!(grid.image.pixel(6, 6), Some([200, 0, 0]));
        assert_eq!(grid.image.pixel(6 + 36, 6), Some([255; 3]));
        assert_eq!(grid.image.pixel(6 + 36 + 10, 6), Some([0, 0, 200]));
        let below = |columns: std::ops::Range<u32>| {
            columns.filter(|x| (28..42).any(|y| grid.image.pixel(*x, y) == Some([0; 3]))).count()
        };
        assert!(below(6..36) > 10);
        assert!(below(42..48) > 2 && below(48..72) == 0);
        let decoded = png::Decoder::new(std::io::Cursor::new(grid.png().unwrap()));
        let info = decoded.read_info().unwrap();
        assert_eq!((info.info().width, info.info().height), (78, 48));
        assert!(Grid::new(100, 100, Size::new(1000, 1000)).is_err());
    }
}
