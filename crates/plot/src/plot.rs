//! What all plots can do.

use std::fs;
use std::path::Path;

use crate::scene::Scene;
use crate::terminal::TextOptions;
use crate::{PlotError, Result, raster, svg};

/// Renders a plot: [`Chart`](crate::Chart), [`Heatmap`](crate::Heatmap), [`Gallery`](crate::Gallery) and
/// [`Grid`](crate::Grid) implement it.
pub trait Plot: Draw {
    /// Renders as an SVG document of its own: UTF-8, without a declaration, so that it can also stand in HTML.
    /// Texts are escaped; images are inside.
    #[must_use]
    fn to_svg(&self) -> String {
        svg::render(&self.scene())
    }

    /// Renders as a PNG file, red, green and blue.
    ///
    /// # Errors
    /// [`PlotError::TooLarge`] for a picture of more than 2^26 pixels, [`PlotError::Encode`] when the encoder
    /// refuses.
    fn to_png(&self) -> Result<Vec<u8>> {
        raster::render(&self.scene())
    }

    /// Renders as lines of text of at most this many columns and, for charts, this many lines, without colours.
    #[must_use]
    fn to_text(&self, width: usize, height: usize) -> String {
        self.to_text_with(&TextOptions::new(width, height))
    }

    /// Renders as lines of text, with options.
    #[must_use]
    fn to_text_with(&self, options: &TextOptions) -> String {
        self.text(options)
    }

    /// Writes a file of the kind that its name ends in: `.png`, `.svg` or `.txt` (100 x 30 letters).
    ///
    /// # Errors
    /// [`PlotError::Extension`] for another ending, [`PlotError::File`] when the file cannot be written, and
    /// those of [`Plot::to_png`].
    fn save(&self, path: impl AsRef<Path>) -> Result<()>
    where
        Self: Sized,
    {
        let path = path.as_ref();
        let extension = path.extension().map(|it| it.to_string_lossy().to_ascii_lowercase());
        let bytes = match extension.as_deref() {
            Some("png") => self.to_png()?,
            Some("svg") => self.to_svg().into_bytes(),
            Some("txt") => self.to_text(100, 30).into_bytes(),
            _ => return Err(PlotError::Extension { path: path.to_owned() }),
        };
        fs::write(path, bytes).map_err(|source| PlotError::File { path: path.to_owned(), source })
    }
}

impl<T: Draw> Plot for T {}

/// How a plot becomes a drawing and text. It is not exported, so that plots can gain ways to be rendered.
pub trait Draw {
    #[doc(hidden)]
    fn scene(&self) -> Scene;
    #[doc(hidden)]
    fn text(&self, options: &TextOptions) -> String;
}
