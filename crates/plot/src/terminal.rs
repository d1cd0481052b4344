//! Grid of characters, for plots on terminals.

use std::fmt::Write;

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use crate::color::Color;
use crate::scene::printable;

/// Options for rendering a plot as text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TextOptions {
    /// Maximum width in columns.
    pub width: usize,
    /// Height of a chart in lines. Tables have as many as they need.
    pub height: usize,
    /// `true` if colours are written as escape sequences (24 bits), which not every viewer of the text supports.
    pub color: bool,
}

impl TextOptions {
    /// Creates options without colours.
    #[must_use]
    pub const fn new(width: usize, height: usize) -> Self {
        Self { width, height, color: false }
    }

    /// Turns colours on or off.
    #[must_use]
    pub const fn color(mut self, color: bool) -> Self {
        self.color = color;
        self
    }
}

/// Grid of cells for characters, each one column wide.
#[derive(Debug)]
pub(crate) struct Letters {
    width: usize,
    cells: Vec<Cell>,
}

#[derive(Debug, Clone, Copy)]
struct Cell {
    /// Character of the cell; `None` after a character that takes two columns.
    letter: Option<char>,
    color: Option<Color>,
}

impl Letters {
    pub(crate) fn new(width: usize, height: usize) -> Self {
        let cell = Cell { letter: Some(' '), color: None };
        Self { width, cells: vec![cell; width * height] }
    }

    pub(crate) fn is_free(&self, column: usize, row: usize) -> bool {
        let cell = self.cells.get(row * self.width + column);
        column < self.width && cell.is_some_and(|it| it.letter == Some(' '))
    }

    /// Returns `true` if all cells of a text would be free.
    pub(crate) fn has_room(&self, column: usize, row: usize, text: &str) -> bool {
        (column..column + text.width()).all(|column| self.is_free(column, row))
    }

    pub(crate) fn put(&mut self, column: usize, row: usize, letter: char, color: Option<Color>) {
        let width = letter.width().unwrap_or(0);
        if width == 0 || column + width > self.width {
            return;
        }
        let at = row * self.width + column;
        for (index, cell) in self.cells.iter_mut().skip(at).take(width).enumerate() {
            *cell = Cell { letter: (index == 0).then_some(letter), color };
        }
    }

    /// Writes a line as far as it fits.
    pub(crate) fn write(&mut self, column: usize, row: usize, text: &str, color: Option<Color>) {
        let mut at = column;
        for letter in text.chars() {
            self.put(at, row, letter, color);
            at += letter.width().unwrap_or(0);
        }
    }

    /// Returns the lines without trailing spaces.
    pub(crate) fn render(&self, color: bool) -> String {
        let mut text = String::new();
        for row in self.cells.chunks(self.width.max(1)) {
            let end = row.iter().rposition(|cell| cell.letter != Some(' ')).map_or(0, |at| at + 1);
            let mut current = None;
            for cell in &row[..end] {
                let Some(letter) = cell.letter else { continue };
                if color && cell.color != current {
                    current = cell.color;
                    text.push_str(&color_code(current));
                }
                text.push(letter);
            }
            if current.is_some() {
                text.push_str(&color_code(None));
            }
            text.push('\n');
        }
        text
    }
}

/// Returns the escape sequence that switches a terminal to this colour, or back to its default.
pub(crate) fn color_code(color: Option<Color>) -> String {
    match color {
        Some(Color(red, green, blue)) => format!("\x1b[38;2;{red};{green};{blue}m"),
        None => "\x1b[0m".to_owned(),
    }
}

/// Shortens a line to at most this many columns, with an ellipsis at the cut.
pub(crate) fn fit(text: &str, columns: usize) -> String {
    let text = printable(text);
    if text.width() <= columns {
        return text;
    }
    let mut kept = String::new();
    for letter in text.chars() {
        if kept.width() + letter.width().unwrap_or(0) + 1 > columns {
            break;
        }
        kept.push(letter);
    }
    if columns > 0 {
        kept.push('…');
    }
    kept
}

/// Pads the line on the left, so that it ends in this column.
pub(crate) fn right(text: &str, columns: usize) -> String {
    let mut line = " ".repeat(columns.saturating_sub(text.width()));
    let _ = write!(line, "{text}");
    line
}

/// Pads the line on the right.
pub(crate) fn left(text: &str, columns: usize) -> String {
    format!("{text}{}", " ".repeat(columns.saturating_sub(text.width())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_of_two_columns_take_two() {
        let mut letters = Letters::new(6, 2);
        letters.write(1, 0, "漢a", None);
        letters.put(0, 1, 'x', Some(Color(1, 2, 3)));
        assert!(letters.is_free(0, 0) && !letters.is_free(2, 0) && !letters.is_free(6, 0));
        assert_eq!(letters.render(false), " 漢a\nx\n");
        assert_eq!(letters.render(true), " 漢a\n\x1b[38;2;1;2;3mx\x1b[0m\n");
        assert_eq!((fit("漢字漢字", 5).as_str(), fit("ab", 2).as_str()), ("漢字…", "ab"));
        assert_eq!((right("漢", 4).as_str(), left("a", 3).as_str()), ("  漢", "a  "));
        assert_eq!(fit("\x1b[31m", 20), r"\u{1b}[31m");
    }
}
