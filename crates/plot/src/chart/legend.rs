//! Legend of a chart: the names of the series, in rows above the plot area, where they cover no data.

use super::{Chart, Style};
use crate::color::Color;
use crate::font;
use crate::scene::{Place, Scene, printable};

/// Rows of the legend.
pub(super) struct Legend {
    rows: Vec<Vec<Entry>>,
}

struct Entry {
    text: String,
    width: f64,
    /// Index of the series; `None` for the text with the number of names that are left out.
    series: Option<usize>,
}

impl Legend {
    /// Arranges names in rows of this width. The legend is empty where the axis already has the series' name as its
    /// label.
    pub(super) fn new(chart: &Chart, width: f64) -> Self {
        let mut rows = vec![Vec::new()];
        let says_axis = chart.series.len() == 1 && chart.series[0].name == chart.y.label;
        let named = |(_, series): &(usize, &super::Series)| !series.name.is_empty() && !says_axis;
        let entries: Vec<Entry> = chart
            .series
            .iter()
            .enumerate()
            .filter(named)
            .map(|(index, series)| Entry::new(&series.name, Some(index)))
            .collect();
        let count = entries.len();
        let mut used = 0.0;
        for (index, entry) in entries.into_iter().enumerate() {
            if used > 0.0 && used + entry.width > width {
                if rows.len() == MOST_ROWS {
                    let last = rows.last_mut();
                    let more = Entry::new(&format!("and {} more", count - index), None);
                    // Replaces the last name if there is no space for both.
                    if let Some(row) = last {
                        if used + more.width > width {
                            row.pop();
                            row.push(Entry::new(&format!("and {} more", count - index + 1), None));
                        } else {
                            row.push(more);
                        }
                    }
                    break;
                }
                rows.push(Vec::new());
                used = 0.0;
            }
            used += entry.width;
            if let Some(row) = rows.last_mut() {
                row.push(entry);
            }
        }
        rows.retain(|row| !row.is_empty());
        Self { rows }
    }

    pub(super) fn height(&self) -> f64 {
        ROW * self.rows.len() as f64
    }

    /// Draws the legend with its upper left corner at this position.
    pub(super) fn draw(&self, chart: &Chart, scene: &mut Scene, x: f64, y: f64) {
        for (row, top) in self.rows.iter().zip(0..) {
            let middle = y + ROW * f64::from(top) + ROW / 2.0;
            let mut at = x;
            for entry in row {
                let mut begin = at;
                if let Some(index) = entry.series {
                    swatch(scene, chart.series[index].style, index, (at, middle));
                    begin += SWATCH + 5.0;
                }
                scene.text(Place::new(begin, middle + 4.0, SIZE), &entry.text, LONGEST);
                at += entry.width;
            }
        }
    }
}

impl Entry {
    fn new(name: &str, series: Option<usize>) -> Self {
        let text = font::fit(&printable(name), SIZE, LONGEST);
        let swatch = if series.is_some() { SWATCH + 5.0 } else { 0.0 };
        Self { width: swatch + font::width(&text, SIZE) + GAP, text, series }
    }
}

fn swatch(scene: &mut Scene, style: Style, index: usize, (x, y): (f64, f64)) {
    let color = Color::of_series(index);
    if style == Style::Points {
        scene.dot((x + SWATCH / 2.0, y), 3.0, color);
    } else {
        scene.line(vec![(x, y), (x + SWATCH, y)], color, 2.0);
    }
}

const SIZE: f64 = 11.0;
const ROW: f64 = 18.0;
const SWATCH: f64 = 18.0;
const GAP: f64 = 16.0;
const LONGEST: f64 = 220.0;
const MOST_ROWS: usize = 3;
