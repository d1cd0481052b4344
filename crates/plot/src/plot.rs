//! Rendering methods of all plots.

use std::fs;
use std::path::Path;

use crate::scene::Scene;
use crate::terminal::TextOptions;
use crate::{PlotError, Result, raster, svg};

/// Renders a plot: [`Chart`](crate::Chart), [`Bars`](crate::Bars), [`Heatmap`](crate::Heatmap),
/// [`Gallery`](crate::Gallery) and [`Grid`](crate::Grid) implement it.
pub trait Plot: Draw {
    /// Renders an SVG document: UTF-8, without an XML declaration, so that it can also be embedded in HTML. Texts are
    /// escaped, and images are embedded.
    #[must_use]
    fn to_svg(&self) -> String {
        svg::render(&self.scene())
    }

    /// Renders a PNG file with three channels: red, green and blue.
    ///
    /// # Errors
    /// [`PlotError::TooLarge`] for an image of more than 2^26 pixels, [`PlotError::Encode`] when the encoder fails.
    fn to_png(&self) -> Result<Vec<u8>> {
        raster::render(&self.scene())
    }

    /// Renders lines of text without colours, of at most `width` columns and, for charts, `height` lines.
    #[must_use]
    fn to_text(&self, width: usize, height: usize) -> String {
        self.to_text_with(&TextOptions::new(width, height))
    }

    /// Renders lines of text with options.
    #[must_use]
    fn to_text_with(&self, options: &TextOptions) -> String {
        self.text(options)
    }

    /// Writes a file in the format of its extension: `.png`, `.svg` or `.txt` (100 x 30 characters).
    ///
    /// # Errors
    /// [`PlotError::Extension`] for another extension, [`PlotError::File`] when the file cannot be written, and the
    /// errors of [`Plot::to_png`].
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

/// Conversion of a plot into a drawing and into text. It is not exported, so that render methods can be added without a
/// breaking change.
pub trait Draw {
    #[doc(hidden)]
    fn scene(&self) -> Scene;
    #[doc(hidden)]
    fn text(&self, options: &TextOptions) -> String;
}
