//! Galleries: images with lines of text.

use std::sync::Arc;

use serde::Serialize;

use crate::color::Color;
use crate::plot::Draw;
use crate::scene::{Anchor, Area, Pixels, Place, Scene};
use crate::size::Size;
use crate::terminal::{TextOptions, color_code, fit};
use crate::{PlotError, Result};

/// Images in rows, each with lines of text above it.
///
/// ```
/// use brigade_plot::{Gallery, Picture, Plot};
///
/// let digit = Picture::grey(8, 8, vec![128; 64])?.wrong("3 / 5").caption("loss 2.31");
/// let gallery = Gallery::new("Prediction / Actual").picture(digit);
/// assert!(gallery.to_svg().contains("3 / 5"));
/// # Ok::<(), brigade_plot::PlotError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Gallery {
    /// Title above the gallery.
    pub title: String,
    /// Images, row by row.
    pub pictures: Vec<Picture>,
    /// Number of images per row. 0 makes about as many columns as rows.
    pub columns: usize,
    /// Side of the square, in pixels, into which each image is fitted.
    pub cell: u32,
}

/// Image of a [`Gallery`] with its captions.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Picture {
    width: u32,
    height: u32,
    pixels: Vec<u8>,
    /// Lines of text above the image.
    pub captions: Vec<Caption>,
}

/// Line of text above a [`Picture`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Caption {
    /// Text of the line.
    pub text: String,
    /// `true` if the text reports something wrong, such as a false prediction. It is then red.
    pub wrong: bool,
}

impl Picture {
    /// Creates an image from rows of pixels from the top, with three bytes (red, green, blue) per pixel.
    ///
    /// # Errors
    /// [`PlotError::Image`] unless there are `3 * width * height` bytes, and at least one pixel.
    pub fn rgb(width: u32, height: u32, pixels: Vec<u8>) -> Result<Self> {
        let expected = (u64::from(width) * u64::from(height)).saturating_mul(3);
        let found = pixels.len() as u64;
        if expected != found || expected == 0 {
            return Err(PlotError::Image { width, height, expected, found });
        }
        Ok(Self { width, height, pixels, captions: Vec::new() })
    }

    /// Creates a grey image from rows of pixels from the top, with one byte per pixel.
    ///
    /// # Errors
    /// [`PlotError::Image`] unless there are `width * height` bytes, and at least one pixel.
    pub fn grey(width: u32, height: u32, pixels: Vec<u8>) -> Result<Self> {
        let (expected, found) = (u64::from(width) * u64::from(height), pixels.len() as u64);
        if expected != found {
            return Err(PlotError::Image { width, height, expected, found });
        }
        Self::rgb(width, height, pixels.into_iter().flat_map(|it| [it; 3]).collect())
    }

    /// Adds a line of text above the image.
    #[must_use]
    pub fn caption(self, text: impl Into<String>) -> Self {
        self.with(text.into(), false)
    }

    /// Adds a red line of text above the image, which reports something wrong.
    #[must_use]
    pub fn wrong(self, text: impl Into<String>) -> Self {
        self.with(text.into(), true)
    }

    /// Returns the size of the image in pixels.
    #[must_use]
    pub fn size(&self) -> Size {
        Size::new(self.width, self.height)
    }

    /// Returns the bytes of the pixels (red, green, blue), in rows from the top.
    #[must_use]
    pub fn pixels(&self) -> &[u8] {
        &self.pixels
    }

    fn with(mut self, text: String, wrong: bool) -> Self {
        self.captions.push(Caption { text, wrong });
        self
    }

    /// Scales the image down by averaging, if it is larger than its cell.
    fn reduced(&self, width: u32, height: u32) -> Pixels {
        if width >= self.width && height >= self.height {
            let bytes = self.pixels.clone();
            return Pixels { width: self.width, height: self.height, bytes };
        }
        let (width, height) = (width.clamp(1, self.width), height.clamp(1, self.height));
        let part = |at: u32, of: u32, side: u32| {
            let edge = |at: u32| (u64::from(at) * u64::from(side) / u64::from(of)) as usize;
            edge(at)..edge(at + 1)
        };
        let mut bytes = Vec::with_capacity(3 * width as usize * height as usize);
        for row in 0..height {
            let rows = part(row, height, self.height);
            for column in 0..width {
                let columns = part(column, width, self.width);
                let mut sums = [0_u64; 3];
                for y in rows.clone() {
                    let begin = 3 * (y * self.width as usize + columns.start);
                    for pixel in self.pixels[begin..begin + 3 * columns.len()].chunks_exact(3) {
                        for (sum, value) in sums.iter_mut().zip(pixel) {
                            *sum += u64::from(*value);
                        }
                    }
                }
                let count = (rows.len() * columns.len()).max(1) as u64;
                bytes.extend(sums.map(|sum| ((sum + count / 2) / count) as u8));
            }
        }
        Pixels { width, height, bytes }
    }
}

impl Gallery {
    /// Creates an empty gallery with cells of 160 pixels.
    #[must_use]
    pub fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), pictures: Vec::new(), columns: 0, cell: 160 }
    }

    /// Adds an image to the gallery.
    #[must_use]
    pub fn picture(mut self, picture: Picture) -> Self {
        self.pictures.push(picture);
        self
    }

    /// Sets the number of images per row.
    #[must_use]
    pub fn columns(mut self, columns: usize) -> Self {
        self.columns = columns;
        self
    }

    /// Sets the side of the square for each image, in pixels. It is at least 16.
    #[must_use]
    pub fn cell(mut self, side: u32) -> Self {
        self.cell = side;
        self
    }
}

impl Draw for Gallery {
    fn scene(&self) -> Scene {
        let cell = f64::from(self.cell.max(16));
        let columns = match self.columns {
            0 => (self.pictures.len() as f64).sqrt().ceil().max(1.0) as usize,
            columns => columns.min(self.pictures.len().max(1)),
        };
        let title = if self.title.is_empty() { 0.0 } else { 24.0 };
        let rows: Vec<&[Picture]> = self.pictures.chunks(columns).collect();
        let captions = |row: &[Picture]| {
            let most = row.iter().map(|it| it.captions.len()).max().unwrap_or(0);
            LINE * most as f64
        };
        let height: f64 = rows.iter().map(|row| captions(row) + cell + 2.0 * GAP).sum();
        // Width of the longest line, up to a limit.
        let lines = self.pictures.iter().flat_map(|it| &it.captions);
        let longest = lines.map(|it| crate::font::width(&it.text, 11.0)).fold(0.0, f64::max);
        let pitch = cell.max(longest.min(2.0 * cell).ceil()) + GAP;
        let width = columns as f64 * pitch + GAP;
        // A title is not cut off above a few images.
        let wanted = crate::font::width(&self.title, 14.0).min(480.0) + 2.0 * GAP;
        let size = Size::new(width.max(wanted) as u32, (title + height + GAP) as u32);
        let mut scene = Scene::new(size);
        let middle = f64::from(size.width) / 2.0;
        let place = Place::new(middle, GAP + 14.0, 14.0).anchor(Anchor::Middle);
        scene.text(place, &self.title, f64::from(size.width) - 2.0 * GAP);
        let left = (f64::from(size.width) - width) / 2.0 + GAP;
        let mut top = title + GAP;
        for row in rows {
            let below = top + captions(row);
            for (index, picture) in row.iter().enumerate() {
                let x = left + index as f64 * pitch + (pitch - GAP - cell) / 2.0;
                // The lowest line is directly above its image.
                let first = below - LINE * picture.captions.len() as f64;
                for (line, caption) in picture.captions.iter().enumerate() {
                    let baseline = first + LINE * line as f64 + 11.0;
                    let color = if caption.wrong { Color::WRONG } else { Color::TEXT };
                    let place = Place::new(x + cell / 2.0, baseline, 11.0);
                    let place = place.anchor(Anchor::Middle).color(color);
                    scene.text(place, &caption.text, pitch - 4.0);
                }
                let side = f64::from(picture.width.max(picture.height));
                let shown = |of: u32| (f64::from(of) * cell / side).round().max(1.0);
                let (width, height) = (shown(picture.width), shown(picture.height));
                let (x, y) = (x + (cell - width) / 2.0, below + (cell - height) / 2.0);
                let area = Area::new(x.floor(), y.floor(), width, height);
                scene.image(area, Arc::new(picture.reduced(width as u32, height as u32)));
            }
            top = below + cell + 2.0 * GAP;
        }
        scene
    }

    fn text(&self, options: &TextOptions) -> String {
        let mut text = fit(&self.title, options.width);
        if !text.is_empty() {
            text.push('\n');
        }
        for (index, picture) in self.pictures.iter().enumerate() {
            let lines: Vec<&str> = picture.captions.iter().map(|it| it.text.as_str()).collect();
            let Size { width, height } = picture.size();
            let line = format!("{}. {} ({width} x {height})", index + 1, lines.join(", "));
            let line = fit(&line, options.width);
            if options.color && picture.captions.iter().any(|it| it.wrong) {
                text += &format!("{}{line}{}\n", color_code(Some(Color::WRONG)), color_code(None));
            } else {
                text += &line;
                text.push('\n');
            }
        }
        text
    }
}

const GAP: f64 = 10.0;
const LINE: f64 = 14.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_images_are_averaged() {
        let pixels = (0..16).map(|at| if at % 4 < 2 { 10 } else { 201 }).collect();
        let picture = Picture::grey(4, 4, pixels).unwrap();
        assert_eq!(picture.reduced(2, 1).bytes, [10, 10, 10, 201, 201, 201]);
        assert_eq!(picture.reduced(1, 1).bytes, [106; 3]);
        assert_eq!(picture.reduced(9, 9).bytes, picture.pixels);
        let wide = Picture::rgb(5, 1, vec![7; 15]).unwrap();
        assert_eq!(wide.reduced(3, 1), Pixels { width: 3, height: 1, bytes: vec![7; 9] });
    }

    #[test]
    fn bytes_fit_their_size() {
        for (width, height, bytes) in [(2, 2, 11), (0, 0, 0), (u32::MAX, u32::MAX, 3)] {
            let error = Picture::rgb(width, height, vec![0; bytes]).unwrap_err();
            assert!(matches!(error, PlotError::Image { .. }), "{error}");
        }
        assert!(Picture::grey(0, 3, vec![]).is_err());
    }
}
