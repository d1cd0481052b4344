//! Images in memory, and their sizes and regions.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{ImageError, Result};

/// Width and height in pixels.
///
/// ```
/// use brigade_images::Size;
///
/// assert_eq!(Size::from(160), Size { width: 160, height: 160 });
/// assert_eq!(Size::new(640, 480).to_string(), "640 x 480");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Size {
    /// Number of columns: the width in pixels.
    pub width: u32,
    /// Number of rows: the height in pixels.
    pub height: u32,
}

impl Size {
    /// Creates a size from a width and a height. torchvision has the opposite order.
    #[must_use]
    pub const fn new(width: u32, height: u32) -> Self {
        Self { width, height }
    }

    /// Returns the number of pixels.
    #[must_use]
    pub fn pixels(self) -> u64 {
        u64::from(self.width) * u64::from(self.height)
    }

    /// Returns the number of bytes of an image with three bytes per pixel; `None` if it is too large for memory.
    pub(crate) fn bytes(self) -> Option<usize> {
        usize::try_from(self.pixels()).ok()?.checked_mul(3)
    }

    pub(crate) fn columns(self) -> usize {
        self.width as usize
    }

    pub(crate) fn rows(self) -> usize {
        self.height as usize
    }
}

/// Returns a square size.
impl From<u32> for Size {
    fn from(side: u32) -> Self {
        Self::new(side, side)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {}", self.width, self.height)
    }
}

/// A rectangle of whole pixels in an image.
///
/// ```
/// use brigade_images::{Region, Size};
///
/// let region = Region { left: 20, top: 0, width: 60, height: 40 };
/// assert!(region.lies_in(Size::new(80, 40)));
/// assert_eq!(region.size(), Size::new(60, 40));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Region {
    /// Index of the first column.
    pub left: u32,
    /// Index of the first row.
    pub top: u32,
    /// Number of columns of the region.
    pub width: u32,
    /// Number of rows of the region.
    pub height: u32,
}

impl Region {
    /// Returns the region of a whole image.
    #[must_use]
    pub const fn whole(size: Size) -> Self {
        Self { left: 0, top: 0, width: size.width, height: size.height }
    }

    /// Returns the width and the height of the region.
    #[must_use]
    pub const fn size(self) -> Size {
        Size { width: self.width, height: self.height }
    }

    /// Returns `true` if the region is not empty and is inside of an image of this size.
    #[must_use]
    pub fn lies_in(self, size: Size) -> bool {
        let inside = |start: u32, length: u32, limit: u32| {
            length > 0 && start.checked_add(length).is_some_and(|end| end <= limit)
        };
        inside(self.left, self.width, size.width) && inside(self.top, self.height, size.height)
    }
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {} at column {}, row {}", self.width, self.height, self.left, self.top)
    }
}

/// A rectangle in an image, whose sides may lie within pixels: Pillow's `box`.
///
/// ```
/// use brigade_images::{CropBox, Region};
///
/// let region = Region { left: 20, top: 0, width: 60, height: 40 };
/// let whole = CropBox { left: 20.0, top: 0.0, width: 60.0, height: 40.0 };
/// assert_eq!(CropBox::from(region), whole);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CropBox {
    /// Distance in pixels between the image's left side and the box.
    pub left: f64,
    /// Distance in pixels between the image's top and the box.
    pub top: f64,
    /// Width of the box in pixels.
    pub width: f64,
    /// Height of the box in pixels.
    pub height: f64,
}

impl From<Region> for CropBox {
    fn from(region: Region) -> Self {
        let Region { left, top, width, height } = region;
        Self { left: left.into(), top: top.into(), width: width.into(), height: height.into() }
    }
}

/// An image of `height * width` pixels of three bytes (red, green, blue), row by row from the top.
///
/// ```
/// use brigade_images::Image;
///
/// let image = Image::new(2, 1, vec![255, 0, 0, 0, 0, 255])?;
/// assert_eq!((image.width(), image.height()), (2, 1));
/// assert_eq!(image.pixel(1, 0), Some([0, 0, 255]));
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    size: Size,
    pixels: Vec<u8>,
}

impl Image {
    /// Creates an image from pixels of three bytes each.
    ///
    /// # Errors
    /// Fails if a side is 0 or the number of bytes is not `3 * width * height`.
    pub fn new(width: u32, height: u32, pixels: Vec<u8>) -> Result<Self> {
        let size = checked(Size::new(width, height), pixels.len())?;
        Ok(Self { size, pixels })
    }

    /// Returns the width and the height.
    #[must_use]
    pub fn size(&self) -> Size {
        self.size
    }

    /// Returns the width in pixels.
    #[must_use]
    pub fn width(&self) -> u32 {
        self.size.width
    }

    /// Returns the height in pixels.
    #[must_use]
    pub fn height(&self) -> u32 {
        self.size.height
    }

    /// Returns the pixels as bytes: `[height, width, 3]`, the colours fastest.
    #[must_use]
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    /// Returns the pixels as mutable bytes: `[height, width, 3]`, the colours fastest.
    #[must_use]
    pub fn pixels_mut(&mut self) -> &mut [u8] {
        &mut self.pixels
    }

    /// Converts the image into its pixels, as bytes: `[height, width, 3]`.
    #[must_use]
    pub fn into_pixels(self) -> Vec<u8> {
        self.pixels
    }

    /// Returns the pixel in column `x` and row `y`, or `None` outside of the image.
    #[must_use]
    pub fn pixel(&self, x: u32, y: u32) -> Option<[u8; 3]> {
        self.view().pixel(x, y)
    }

    /// Returns a view of the image.
    #[must_use]
    pub fn view(&self) -> ImageView<'_> {
        ImageView { size: self.size, pixels: &self.pixels }
    }

    /// Returns an image without pixels, whose memory is reused for later images.
    pub(crate) fn scratch() -> Self {
        Self { size: Size::new(0, 0), pixels: Vec::new() }
    }

    /// Changes the size, and returns the pixels, whose values are undefined. The memory is reused.
    pub(crate) fn reset(&mut self, size: Size) -> Result<&mut [u8], NoMemory> {
        let bytes = size.bytes().ok_or(NoMemory(size))?;
        self.pixels
            .try_reserve_exact(bytes.saturating_sub(self.pixels.len()))
            .map_err(|_| NoMemory(size))?;
        self.pixels.resize(bytes, 0);
        self.size = size;
        Ok(&mut self.pixels)
    }

    /// Replaces the image by one of `size` with these pixels. Returns `None` if their number does not match.
    pub(crate) fn replace(&mut self, size: Size, pixels: Vec<u8>) -> Option<()> {
        *self = checked(size, pixels.len()).map(|size| Self { size, pixels }).ok()?;
        Some(())
    }

    /// Replaces the image by a copy of `view`.
    pub(crate) fn copy_from(&mut self, view: ImageView<'_>) -> Result<(), NoMemory> {
        self.reset(view.size)?.copy_from_slice(view.pixels);
        Ok(())
    }
}

/// A view of an image whose bytes are stored elsewhere, such as in a mapped file.
///
/// ```
/// use brigade_images::{ImageView, Size};
///
/// let mapped = [1, 2, 3, 4, 5, 6];
/// let view = ImageView::new(Size::new(1, 2), &mapped)?;
/// assert_eq!(view.pixel(0, 1), Some([4, 5, 6]));
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageView<'a> {
    size: Size,
    pixels: &'a [u8],
}

impl<'a> ImageView<'a> {
    /// Creates a view of bytes of the shape `[height, width, 3]`.
    ///
    /// # Errors
    /// Fails if a side is 0 or the number of bytes is not `3 * width * height`.
    pub fn new(size: Size, pixels: &'a [u8]) -> Result<Self> {
        Ok(Self { size: checked(size, pixels.len())?, pixels })
    }

    /// Returns the width and the height.
    #[must_use]
    pub fn size(self) -> Size {
        self.size
    }

    /// Returns the pixels as bytes: `[height, width, 3]`, the colours fastest.
    #[must_use]
    pub fn pixels(self) -> &'a [u8] {
        self.pixels
    }

    /// Returns the pixel in column `x` and row `y`, or `None` outside of the image.
    #[must_use]
    pub fn pixel(self, x: u32, y: u32) -> Option<[u8; 3]> {
        if x >= self.size.width || y >= self.size.height {
            return None;
        }
        let start = 3 * (y as usize * self.size.columns() + x as usize);
        self.pixels.get(start..start + 3)?.try_into().ok()
    }

    /// Returns the rows of a region, each of `3 * region.width` bytes. The region must be inside of the image.
    pub(crate) fn rows(self, region: Region) -> impl Iterator<Item = &'a [u8]> {
        let stride = 3 * self.size.columns();
        let (left, length) = (3 * region.left as usize, 3 * region.width as usize);
        self.pixels
            .chunks_exact(stride.max(1))
            .skip(region.top as usize)
            .take(region.height as usize)
            .filter_map(move |row| row.get(left..left + length))
    }

    /// Copies a region, which must be inside of the image.
    pub(crate) fn crop_into(self, region: Region, target: &mut Image) -> Result<(), NoMemory> {
        let out = target.reset(region.size())?;
        for (row, out) in
            self.rows(region).zip(out.chunks_exact_mut(3 * region.width.max(1) as usize))
        {
            out.copy_from_slice(row);
        }
        Ok(())
    }
}

/// Error of an image of this size for which there is not enough memory.
#[derive(Debug)]
pub(crate) struct NoMemory(pub(crate) Size);

impl From<NoMemory> for ImageError {
    fn from(NoMemory(size): NoMemory) -> Self {
        Self::InvalidArgument(format!("there is no memory for an image of {size} pixels"))
    }
}

fn checked(size: Size, bytes: usize) -> Result<Size> {
    match size.bytes() {
        Some(expected) if expected > 0 && expected == bytes => Ok(size),
        _ => Err(ImageError::InvalidArgument(format!(
            "an image of {size} pixels has {} bytes, found {bytes}",
            3 * u128::from(size.pixels())
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_no_image_are_refused() {
        let error = Image::new(2, 2, vec![0; 11]).unwrap_err().to_string();
        assert_eq!(error, "an image of 2 x 2 pixels has 12 bytes, found 11");
        assert!(Image::new(0, 4, vec![]).is_err());
        assert!(ImageView::new(Size::new(u32::MAX, u32::MAX), &[]).is_err());
    }

    #[test]
    fn regions_are_copied_row_by_row() {
        let image = Image::new(3, 2, (0..18).collect()).unwrap();
        let mut part = Image::scratch();
        let region = Region { left: 1, top: 1, width: 2, height: 1 };
        image.view().crop_into(region, &mut part).unwrap();
        assert_eq!((part.size(), part.pixels()), (Size::new(2, 1), &[12, 13, 14, 15, 16, 17][..]));
        assert_eq!((part.pixel(1, 0), part.pixel(2, 0)), (Some([15, 16, 17]), None));
    }

    #[test]
    fn regions_that_overflow_lie_in_no_image() {
        let region = Region { left: u32::MAX, top: 0, width: 2, height: 1 };
        assert!(!region.lies_in(Size::new(u32::MAX, 1)));
        assert!(!Region { left: 0, top: 0, width: 0, height: 1 }.lies_in(Size::new(4, 4)));
    }
}
