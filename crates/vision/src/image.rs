//! An image in memory.

use crate::{Result, VisionError};

/// An image: `height * width` pixels of three bytes (red, green, blue), row by row from the top.
///
/// ```
/// use brigade_vision::Image;
///
/// let image = Image::new(2, 1, vec![255, 0, 0, 0, 0, 255])?;
/// assert_eq!((image.width(), image.height()), (2, 1));
/// assert_eq!(image.pixel(1, 0), Some([0, 0, 255]));
/// # Ok::<(), brigade_vision::VisionError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    width: u32,
    height: u32,
    pixels: Vec<u8>,
}

impl Image {
    /// Takes over pixels of three bytes each.
    ///
    /// # Errors
    /// When a side is 0 or there are not `3 * width * height` bytes.
    pub fn new(width: u32, height: u32, pixels: Vec<u8>) -> Result<Self> {
        let expected = 3 * u64::from(width) * u64::from(height);
        if expected == 0 || expected != pixels.len() as u64 {
            return Err(VisionError::InvalidArgument(format!(
                "an image of {width} x {height} pixels has {expected} bytes, found {}",
                pixels.len()
            )));
        }
        Ok(Self { width, height, pixels })
    }

    /// Returns the width in pixels.
    #[must_use]
    pub fn width(&self) -> u32 {
        self.width
    }

    /// Returns the height in pixels.
    #[must_use]
    pub fn height(&self) -> u32 {
        self.height
    }

    /// Returns the bytes: `[height, width, 3]`, the colours fastest.
    #[must_use]
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    /// Gives up the bytes.
    #[must_use]
    pub fn into_pixels(self) -> Vec<u8> {
        self.pixels
    }

    /// Returns the pixel in column `x` and row `y`, if there is one.
    #[must_use]
    pub fn pixel(&self, x: u32, y: u32) -> Option<[u8; 3]> {
        if x >= self.width || y >= self.height {
            return None;
        }
        let start = 3 * (y as usize * self.width as usize + x as usize);
        self.pixels.get(start..start + 3)?.try_into().ok()
    }
}
