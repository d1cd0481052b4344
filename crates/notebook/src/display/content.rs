//! The forms of a cell's content, and the format in which evcxr reads them.

use std::fmt::Write as _;
use std::io::{self, Write};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use brigade_plot::escape_markup;

/// The content of a cell, as text and in other representations (MIME types). Jupyter displays the best one that it
/// supports: HTML, SVG, PNG, text.
///
/// ```
/// use brigade_notebook::display::Content;
///
/// let content = Content::new("1 < 2").html("<b>1 &lt; 2</b>");
/// let mut bytes = Vec::new();
/// content.write_to(&mut bytes)?;
/// let text = "EVCXR_BEGIN_CONTENT text/plain\n1 < 2\nEVCXR_END_CONTENT\n";
/// let html = "EVCXR_BEGIN_CONTENT text/html\n<b>1 &lt; 2</b>\nEVCXR_END_CONTENT\n";
/// assert_eq!(String::from_utf8_lossy(&bytes), format!("{text}{html}"));
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    plain: String,
    html: Option<String>,
    svg: Option<String>,
    png: Option<Vec<u8>>,
}

impl Content {
    /// Makes content from a text.
    #[must_use]
    pub fn new(plain: impl Into<String>) -> Self {
        Self { plain: plain.into(), ..Self::default() }
    }

    /// Adds the HTML representation: a part of a page, whose texts must be escaped.
    #[must_use]
    pub fn html(mut self, html: impl Into<String>) -> Self {
        self.html = Some(html.into());
        self
    }

    /// Adds the SVG representation: a document without an XML declaration.
    #[must_use]
    pub fn svg(mut self, svg: impl Into<String>) -> Self {
        self.svg = Some(svg.into());
        self
    }

    /// Adds the PNG representation: the bytes of a file. Viewers that do not trust the notebook display it.
    #[must_use]
    pub fn png(mut self, png: impl Into<Vec<u8>>) -> Self {
        self.png = Some(png.into());
        self
    }

    /// Returns the text representation.
    #[must_use]
    pub fn plain(&self) -> &str {
        &self.plain
    }

    /// Stacks contents vertically.
    #[must_use]
    pub fn stacked(contents: impl IntoIterator<Item = Self>) -> Self {
        let mut all = Self::default();
        let mut html = String::new();
        for content in contents.into_iter().filter(|it| *it != Self::default()) {
            if !all.plain.is_empty() {
                all.plain.push_str("\n\n");
            }
            all.plain.push_str(content.plain.trim_end_matches('\n'));
            html.push_str("<div>");
            html.push_str(&content.as_html());
            html.push_str("</div>\n");
        }
        if html.is_empty() { all } else { all.html(html) }
    }

    /// The best form as a part of a page. A picture is an `<img>`, because a viewer that does not trust the notebook
    /// takes `<svg>` out.
    pub(super) fn as_html(&self) -> String {
        let image = |kind: &str, bytes: &[u8]| {
            format!(r#"<img src="data:{kind};base64,{}">"#, STANDARD.encode(bytes))
        };
        match self {
            Self { html: Some(html), .. } => html.clone(),
            Self { svg: Some(svg), .. } => image("image/svg+xml", svg.as_bytes()),
            Self { png: Some(png), .. } => image("image/png", png),
            Self { plain, .. } => format!("<pre>{}</pre>", escape_markup(plain)),
        }
    }

    /// Writes all representations in the format that evcxr reads from a process's standard output. Writes nothing for
    /// empty content.
    ///
    /// # Errors
    /// Fails if the output cannot be written to.
    pub fn write_to(&self, out: &mut impl Write) -> io::Result<()> {
        if *self == Self::default() {
            return Ok(());
        }
        let png = self.png.as_ref().map(|bytes| STANDARD.encode(bytes));
        let forms = [
            ("text/plain", Some(&self.plain)),
            ("text/html", self.html.as_ref()),
            ("image/svg+xml", self.svg.as_ref()),
            ("image/png", png.as_ref()),
        ];
        let mut blocks = String::new();
        for (kind, form) in forms {
            let Some(form) = form else { continue };
            let _ = writeln!(blocks, "EVCXR_BEGIN_CONTENT {kind}");
            for line in form.trim_end_matches('\n').split('\n') {
                // Such a line would end the block.
                let space = if line == END { " " } else { "" };
                let _ = writeln!(blocks, "{line}{space}");
            }
            let _ = writeln!(blocks, "{END}");
        }
        // At once, so that no line of another thread comes between.
        out.write_all(blocks.as_bytes())
    }

    /// Writes the text with an end of line. Writes nothing for empty content.
    ///
    /// # Errors
    /// Fails if the output cannot be written to.
    pub fn write_plain(&self, out: &mut impl Write) -> io::Result<()> {
        match self.plain.trim_end_matches('\n') {
            "" => Ok(()),
            plain => out.write_all(format!("{plain}\n").as_bytes()),
        }
    }
}

const END: &str = "EVCXR_END_CONTENT";

#[cfg(test)]
mod tests {
    use super::*;

    fn written(content: &Content) -> String {
        let mut bytes = Vec::new();
        content.write_to(&mut bytes).unwrap();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn each_form_is_a_block() {
        let content = Content::new("a\nb\n\n").svg("<svg/>\n").png(*b"\x89PNG");
        let expected = "EVCXR_BEGIN_CONTENT text/plain\na\nb\nEVCXR_END_CONTENT\n\
                        EVCXR_BEGIN_CONTENT image/svg+xml\n<svg/>\nEVCXR_END_CONTENT\n\
                        EVCXR_BEGIN_CONTENT image/png\niVBORw==\nEVCXR_END_CONTENT\n";
        assert_eq!(written(&content), expected);
        assert_eq!(written(&Content::default()), "");
    }

    #[test]
    fn a_text_does_not_end_its_block() {
        let content = Content::new("before\nEVCXR_END_CONTENT\nafter");
        let lines: Vec<String> = written(&content).lines().map(str::to_owned).collect();
        assert_eq!(lines.iter().position(|line| line == END), Some(lines.len() - 1));
        assert_eq!(lines[2].trim_end(), END);
    }

    #[test]
    fn contents_are_stacked_in_html_and_in_text() {
        let texts = [Content::new("1 < 2\n"), Content::default(), Content::new("").html("<hr>")];
        let both = Content::stacked(texts);
        assert_eq!(both.plain(), "1 < 2\n\n");
        assert_eq!(both.as_html(), "<div><pre>1 &lt; 2\n</pre></div>\n<div><hr></div>\n");
        let pictures = [Content::new("").svg("<svg/>"), Content::new("").png(*b"\x89PNG")];
        assert_eq!(
            Content::stacked(pictures).as_html(),
            "<div><img src=\"data:image/svg+xml;base64,PHN2Zy8+\"></div>\n\
             <div><img src=\"data:image/png;base64,iVBORw==\"></div>\n"
        );
        assert_eq!(Content::stacked([]), Content::default());
    }

    #[test]
    fn plain_text_ends_with_its_line() {
        let plain = |content: Content| {
            let mut bytes = Vec::new();
            content.write_plain(&mut bytes).unwrap();
            String::from_utf8(bytes).unwrap()
        };
        assert_eq!(plain(Content::new("a\n\n").html("<b>a</b>")), "a\n");
        assert_eq!(plain(Content::default()), "");
    }
}
