//! Heatmaps: matrices as coloured cells.

mod draw;
mod text;

use serde::Serialize;

use crate::axis::plain_or_exponent;
use crate::color::ColorMap;
use crate::plot::Draw;
use crate::scene::Scene;
use crate::size::Size;
use crate::terminal::TextOptions;
use crate::{PlotError, Result};

/// Heatmap: a matrix as coloured cells, with or without numbers.
///
/// ```
/// use brigade_plot::{Heatmap, Plot};
///
/// let matrix = Heatmap::confusion(&["cat", "dog"], vec![8, 2, 1, 9])?;
/// assert!(matrix.to_text(40, 10).contains("8"));
/// assert_eq!(matrix.by_row().values(), [0.8, 0.2, 0.1, 0.9]);
/// # Ok::<(), brigade_plot::PlotError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Heatmap {
    /// Title above the heatmap.
    pub title: String,
    /// Label of the horizontal axis, along the columns.
    pub x_label: String,
    /// Label of the vertical axis, along the rows.
    pub y_label: String,
    rows: usize,
    columns: usize,
    values: Vec<f64>,
    row_labels: Vec<String>,
    column_labels: Vec<String>,
    /// `true` if each cell shows its number, where the cell is large enough.
    pub numbers: bool,
    /// Colour scale of the cells.
    pub colors: ColorMap,
    /// `true` if colours follow the logarithm of 1 + value, so that small counts stay visible beside large ones.
    pub log: bool,
    /// `true` if the first row is the lowest one.
    pub upwards: bool,
    /// Range of the horizontal axis: the values at its left and right edges.
    pub x_range: Option<(f64, f64)>,
    /// Range of the vertical axis: the values at its lower and upper edges.
    pub y_range: Option<(f64, f64)>,
    /// Size of the image in pixels. Defaults to the size that the cells need.
    pub size: Option<Size>,
}

impl Heatmap {
    /// Creates a heatmap of a matrix, row by row, without numbers or labels. A value that is not finite is grey.
    ///
    /// # Errors
    /// [`PlotError::Matrix`] unless there are `rows * columns` values, and at least one.
    pub fn new(rows: usize, columns: usize, values: Vec<f64>) -> Result<Self> {
        if values.is_empty() || rows.checked_mul(columns) != Some(values.len()) {
            return Err(PlotError::Matrix { rows, columns, found: values.len() });
        }
        Ok(Self {
            title: String::new(),
            x_label: String::new(),
            y_label: String::new(),
            rows,
            columns,
            values,
            row_labels: Vec::new(),
            column_labels: Vec::new(),
            numbers: false,
            colors: ColorMap::default(),
            log: false,
            upwards: false,
            x_range: None,
            y_range: None,
            size: None,
        })
    }

    /// Creates a confusion matrix from counts, row by row: rows are the actual classes, columns the predicted ones.
    ///
    /// # Errors
    /// [`PlotError::Matrix`] unless there is one count for each pair of classes, and at least one class.
    pub fn confusion(classes: &[impl AsRef<str>], counts: Vec<u64>) -> Result<Self> {
        let count = classes.len();
        let values = counts.into_iter().map(|it| it as f64).collect();
        let matrix = Self::new(count, count, values)?.title("Confusion matrix").numbers(true);
        let labels = || classes.iter().map(|it| it.as_ref().to_owned());
        matrix.x("Predicted").y("Actual").row_labels(labels())?.column_labels(labels())
    }

    /// Divides each row by its sum, so that a cell contains the fraction of an actual class's samples that have that
    /// prediction. Rows of zeros stay unchanged.
    #[must_use]
    pub fn by_row(mut self) -> Self {
        for row in self.values.chunks_mut(self.columns) {
            let sum: f64 = row.iter().sum();
            if sum != 0.0 {
                row.iter_mut().for_each(|value| *value /= sum);
            }
        }
        self
    }

    /// Sets the title above the heatmap.
    #[must_use]
    pub fn title(mut self, title: impl Into<String>) -> Self {
        self.title = title.into();
        self
    }

    /// Sets the label of the horizontal axis.
    #[must_use]
    pub fn x(mut self, label: impl Into<String>) -> Self {
        self.x_label = label.into();
        self
    }

    /// Sets the label of the vertical axis.
    #[must_use]
    pub fn y(mut self, label: impl Into<String>) -> Self {
        self.y_label = label.into();
        self
    }

    /// Sets one label per row. An empty list removes the labels.
    ///
    /// # Errors
    /// [`PlotError::Labels`] if the number of labels is neither 0 nor the number of rows.
    pub fn row_labels<L: Into<String>>(
        mut self,
        labels: impl IntoIterator<Item = L>,
    ) -> Result<Self> {
        self.row_labels = checked(labels, "rows", self.rows)?;
        Ok(self)
    }

    /// Sets one label per column. An empty list removes the labels.
    ///
    /// # Errors
    /// [`PlotError::Labels`] if the number of labels is neither 0 nor the number of columns.
    pub fn column_labels<L: Into<String>>(
        mut self,
        labels: impl IntoIterator<Item = L>,
    ) -> Result<Self> {
        self.column_labels = checked(labels, "columns", self.columns)?;
        Ok(self)
    }

    /// Shows or hides numbers in the cells that are large enough.
    #[must_use]
    pub fn numbers(mut self, numbers: bool) -> Self {
        self.numbers = numbers;
        self
    }

    /// Sets the colour scale.
    #[must_use]
    pub fn colors(mut self, colors: ColorMap) -> Self {
        self.colors = colors;
        self
    }

    /// Colours by the logarithm of 1 + value. Negative values count as 0.
    #[must_use]
    pub fn log(mut self) -> Self {
        self.log = true;
        self
    }

    /// Puts the first row at the bottom.
    #[must_use]
    pub fn upwards(mut self) -> Self {
        self.upwards = true;
        self
    }

    /// Sets the range of the horizontal axis, for its ticks.
    #[must_use]
    pub fn x_range(mut self, left: f64, right: f64) -> Self {
        self.x_range = Some((left, right));
        self
    }

    /// Sets the range of the vertical axis, for its ticks.
    #[must_use]
    pub fn y_range(mut self, lower: f64, upper: f64) -> Self {
        self.y_range = Some((lower, upper));
        self
    }

    /// Sets the size of the image in pixels.
    #[must_use]
    pub fn size(mut self, width: u32, height: u32) -> Self {
        self.size = Some(Size::new(width, height));
        self
    }

    /// Returns the number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of columns.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Returns the values, row by row.
    #[must_use]
    pub fn values(&self) -> &[f64] {
        &self.values
    }

    /// Returns the least and the greatest value of the colour scale. The least is 0 unless a value is below.
    fn limits(&self) -> (f64, f64) {
        let shown = self.values.iter().map(|value| self.shown(*value));
        let (low, high) = shown
            .filter(|value| value.is_finite())
            .fold((0.0_f64, f64::NEG_INFINITY), |(low, high), it| (low.min(it), high.max(it)));
        if high > low { (low, high) } else { (low, low + 1.0) }
    }

    /// Returns the value that decides the colour.
    fn shown(&self, value: f64) -> f64 {
        if self.log { value.max(0.0).ln_1p() } else { value }
    }

    /// Reduces the matrix to at most this many rows and columns, from the top. Of merged cells the greatest value
    /// counts, so that a single mistake among many classes stays visible.
    fn reduced(&self, rows: usize, columns: usize) -> (usize, usize, Vec<f64>) {
        let (rows, columns) = (rows.clamp(1, self.rows), columns.clamp(1, self.columns));
        let mut values = vec![f64::NAN; rows * columns];
        for (index, value) in self.values.iter().enumerate() {
            let (row, column) = (index / self.columns, index % self.columns);
            let row = if self.upwards { self.rows - 1 - row } else { row };
            let at = row * rows / self.rows * columns + column * columns / self.columns;
            // Any number replaces NaN.
            values[at] = values[at].max(*value);
        }
        (rows, columns, values)
    }

    /// Formats the numbers of the cells, row by row: whole numbers as they are, otherwise all with two decimals where
    /// these suffice.
    fn number_texts(&self) -> Vec<String> {
        let finite = || self.values.iter().filter(|value| value.is_finite());
        let greatest = finite().fold(0.0_f64, |greatest, value| greatest.max(value.abs()));
        let is_whole = finite().all(|value| value.fract() == 0.0);
        let text = |value: &f64| {
            if !value.is_finite() || !(0.1..1e4).contains(&greatest) {
                plain_or_exponent(*value)
            } else if is_whole {
                value.to_string()
            } else {
                format!("{value:.2}")
            }
        };
        self.values.iter().map(text).collect()
    }
}

impl Draw for Heatmap {
    fn scene(&self) -> Scene {
        draw::scene(self)
    }

    fn text(&self, options: &TextOptions) -> String {
        text::render(self, options)
    }
}

fn checked<L: Into<String>>(
    labels: impl IntoIterator<Item = L>,
    of: &'static str,
    expected: usize,
) -> Result<Vec<String>> {
    let labels: Vec<String> = labels.into_iter().map(Into::into).collect();
    match labels.len() {
        found if found == expected || found == 0 => Ok(labels),
        found => Err(PlotError::Labels { of, expected, found }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_checked() {
        for (rows, columns, values) in [(2, 2, 3), (0, 0, 0), (usize::MAX, 2, 4)] {
            let error = Heatmap::new(rows, columns, vec![0.0; values]).unwrap_err();
            assert!(matches!(error, PlotError::Matrix { .. }), "{error}");
        }
        assert!(Heatmap::confusion(&["a"], vec![1, 2]).is_err());
        let error = Heatmap::new(1, 2, vec![0.0; 2]).unwrap().column_labels(["a"]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "1 label given for 2 columns of the matrix: one each, or none"
        );
    }

    #[test]
    fn rows_are_normalised_each() {
        let matrix = Heatmap::new(2, 2, vec![1.0, 3.0, 0.0, 0.0]).unwrap().by_row();
        assert_eq!(matrix.values(), [0.25, 0.75, 0.0, 0.0]);
    }

    #[test]
    fn a_single_mistake_stays_in_a_smaller_matrix() {
        let mut values = vec![0.0; 1_000_000];
        values[765_432] = 1.0;
        let matrix = Heatmap::new(1000, 1000, values).unwrap();
        let (rows, columns, small) = matrix.reduced(10, 10);
        assert_eq!((rows, columns), (10, 10));
        assert_eq!(small.iter().position(|value| *value == 1.0), Some(74));
        let (_, _, turned) = matrix.upwards().reduced(10, 10);
        assert_eq!(turned.iter().position(|value| *value == 1.0), Some(24));
    }

    #[test]
    fn numbers_in_cells_are_short() {
        for (values, texts) in [
            ([12.0, 0.0, 1234.0], ["12", "0", "1234"]),
            ([0.8125, 0.001, f64::NAN], ["0.81", "0.00", "NaN"]),
            ([1e9, 5.0, -2.5], ["1e9", "5", "-2.5"]),
            ([0.001, 2e-7, 0.0], ["0.001", "2e-7", "0"]),
        ] {
            let map = Heatmap::new(1, 3, values.to_vec()).unwrap();
            assert_eq!(map.number_texts(), texts);
        }
    }
}
