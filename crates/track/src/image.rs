//! Image to log.

use crate::{Result, TrackError};

/// Image in rows from the top, each pixel with 1 (grey), 3 (red, green, blue) or 4 (with alpha) bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    width: u32,
    height: u32,
    channels: u8,
    pixels: Vec<u8>,
}

impl Image {
    /// Creates an image from `height * width * channels` bytes.
    ///
    /// # Errors
    /// [`TrackError::Image`] for another number of bytes, for no pixels, or if `channels` is not 1, 3 or 4.
    pub fn new(width: u32, height: u32, channels: u8, pixels: Vec<u8>) -> Result<Self> {
        let expected = u64::from(width) * u64::from(height) * u64::from(channels);
        let found = pixels.len() as u64;
        if expected != found || expected == 0 || !matches!(channels, 1 | 3 | 4) {
            return Err(TrackError::Image { width, height, channels, expected, found });
        }
        Ok(Self { width, height, channels, pixels })
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

    /// Returns the number of channels: bytes per pixel.
    #[must_use]
    pub fn channels(&self) -> u8 {
        self.channels
    }

    /// Encodes the image as a PNG file.
    ///
    /// # Errors
    /// [`TrackError::Own`] when the encoder fails.
    pub fn png(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, self.width, self.height);
        encoder.set_color(match self.channels {
            1 => png::ColorType::Grayscale,
            3 => png::ColorType::Rgb,
            _ => png::ColorType::Rgba,
        });
        encoder.set_depth(png::BitDepth::Eight);
        let own = |error: png::EncodingError| TrackError::Own(Box::new(error));
        let mut writer = encoder.write_header().map_err(own)?;
        writer.write_image_data(&self.pixels).map_err(own)?;
        writer.finish().map_err(own)?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_checked() {
        assert!(Image::new(2, 2, 3, vec![0; 12]).unwrap().png().unwrap().starts_with(b"\x89PNG"));
        for (width, height, channels, bytes) in [(2, 2, 3, 11), (2, 2, 2, 8), (0, 2, 1, 0)] {
            let error = Image::new(width, height, channels, vec![0; bytes]).unwrap_err();
            assert!(matches!(error, TrackError::Image { .. }), "{error}");
        }
    }
}
