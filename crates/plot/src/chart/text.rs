//! Chart as text: lines are drawn with braille characters, which have 2 x 4 dots.

use unicode_width::UnicodeWidthStr;

use super::draw::cut_segment;
use super::{Chart, Marker, Series, Style};
use crate::axis::{Span, Tick};
use crate::color::Color;
use crate::scene::Area;
use crate::terminal::{Letters, TextOptions, fit};

pub(super) fn render(chart: &Chart, options: &TextOptions) -> String {
    let (width, height) = (options.width.max(20), options.height.max(8));
    let mut letters = Letters::new(width, height);
    let mut top = 0;
    if !chart.title.is_empty() {
        let title = fit(&chart.title, width);
        letters.write((width - title.width()) / 2, 0, &title, None);
        top += 1;
    }
    let legend = legend(chart, options);
    if !legend.is_empty() {
        let mut at = 0;
        for (text, index) in &legend {
            letters.write(at, top, &fit(text, width.saturating_sub(at)), Some(color_of(*index)));
            at += text.width() + 2;
        }
        top += 1;
    }
    // Tick labels of the horizontal axis, and the axis' label.
    let rows = height - top - 2 - usize::from(!chart.x.label.is_empty());
    let (across, upwards) = chart.spans();
    let y_ticks = upwards.ticks((rows / 3).max(2));
    let gutter = y_ticks.iter().map(|tick| tick.label.width()).max().unwrap_or(0).min(width / 3);
    let plot = Plot { left: gutter + 2, top, columns: width - gutter - 2, rows, across, upwards };
    plot.axes(&mut letters, &y_ticks);
    if !chart.x.label.is_empty() {
        let label = fit(&chart.x.label, plot.columns);
        letters.write(plot.left + (plot.columns - label.width()) / 2, height - 1, &label, None);
    }
    // The y axis' label is above the axis, unless it would cover a name.
    if !chart.y.label.is_empty() && legend.is_empty() && top > 0 {
        let label = fit(&chart.y.label, width / 2);
        if letters.has_room(0, top - 1, &label) {
            letters.write(0, top - 1, &label, None);
        }
    }
    plot.draw(&mut letters, chart, !options.color && chart.series.len() > 1);
    plot.mark(&mut letters, &chart.markers);
    letters.render(options.color)
}

/// Returns the names of the series, with the character that marks each where there are no colours.
fn legend(chart: &Chart, options: &TextOptions) -> Vec<(String, usize)> {
    if chart.series.len() == 1 && chart.series[0].name == chart.y.label {
        return Vec::new();
    }
    let named = chart.series.iter().enumerate().filter(|(_, series)| !series.name.is_empty());
    let text = |(index, series): (usize, &Series)| {
        let mark = match chart.series.len() {
            1 => String::new(),
            _ if options.color => "— ".to_owned(),
            _ => format!("{}: ", mark_of(index)),
        };
        (format!("{mark}{}", fit(&series.name, 30)), index)
    };
    named.map(text).collect()
}

struct Plot {
    left: usize,
    top: usize,
    columns: usize,
    rows: usize,
    across: Span,
    upwards: Span,
}

impl Plot {
    fn area(&self) -> Area {
        Area::new(0.0, 0.0, (2 * self.columns - 1) as f64, (4 * self.rows - 1) as f64)
    }

    /// Returns the dot of a point, counted from the top left of the plot.
    fn dot(&self, (x, y): (f64, f64)) -> Option<(f64, f64)> {
        let (x, y) = (self.across.place(x)?, self.upwards.place(y)?);
        let area = self.area();
        Some((x.clamp(-1e6, 1e6) * area.width, (1.0 - y.clamp(-1e6, 1e6)) * area.height))
    }

    fn row_of(&self, y: f64) -> Option<usize> {
        let place = self.upwards.place(y).filter(|it| (0.0..=1.0).contains(it))?;
        Some(self.top + (((1.0 - place) * self.area().height) as usize / 4))
    }

    fn column_of(&self, x: f64) -> Option<usize> {
        let place = self.across.place(x).filter(|it| (0.0..=1.0).contains(it))?;
        Some(self.left + ((place * self.area().width) as usize / 2))
    }

    fn axes(&self, letters: &mut Letters, y_ticks: &[Tick]) {
        let bottom = self.top + self.rows;
        for row in self.top..bottom {
            letters.put(self.left - 1, row, '│', None);
        }
        for tick in y_ticks {
            if let Some(row) = self.row_of(tick.value) {
                let label = fit(&tick.label, self.left - 2);
                letters.write(self.left - 2 - label.width(), row, &label, None);
                letters.put(self.left - 1, row, '┤', None);
            }
        }
        letters.put(self.left - 1, bottom, '└', None);
        for column in self.left..self.left + self.columns {
            letters.put(column, bottom, '─', None);
        }
        let right = self.left + self.columns;
        let mut most = (self.columns / 9).max(1);
        loop {
            let ticks = self.across.ticks(most);
            let place = |tick: &Tick| {
                let middle = self.column_of(tick.value).unwrap_or(self.left);
                let width = tick.label.width();
                (middle, middle.saturating_sub(width / 2).min(right.saturating_sub(width)))
            };
            let ends = |tick: &Tick| place(tick).1 + tick.label.width();
            let fit = ticks.windows(2).all(|pair| ends(&pair[0]) < place(&pair[1]).1);
            if fit || most == 1 {
                for tick in ticks.iter().take(if fit { ticks.len() } else { 1 }) {
                    let (middle, begin) = place(tick);
                    letters.put(middle, bottom, '┬', None);
                    letters.write(begin, bottom + 1, &tick.label, None);
                }
                return;
            }
            most -= 1;
        }
    }

    fn draw(&self, letters: &mut Letters, chart: &Chart, marked: bool) {
        let mut dots = Dots::new(self.columns, self.rows);
        let mut ends = Vec::new();
        for (index, series) in chart.series.iter().enumerate() {
            let places: Vec<Option<(f64, f64)>> =
                series.points.iter().map(|point| self.dot(*point)).collect();
            for piece in places.split(Option::is_none) {
                let piece: Vec<(f64, f64)> = piece.iter().copied().flatten().collect();
                self.draw_piece(&mut dots, series.style, &piece, index);
            }
            ends.push(places.into_iter().flatten().collect::<Vec<_>>());
        }
        dots.put(letters, self.left, self.top);
        if !marked {
            return;
        }
        // At the last position of the piece without another mark, and preferably without another series.
        let mut taken = Vec::new();
        for (index, places) in ends.iter().enumerate() {
            let cell = |(x, y): &(f64, f64)| {
                let inside = *x >= 0.0 && *y >= 0.0;
                let (column, row) = (x.round() as usize / 2, y.round() as usize / 4);
                (inside && column < self.columns && row < self.rows).then_some((column, row))
            };
            let free = |it: &(usize, usize)| !taken.contains(it);
            if let Some((column, row)) = places.iter().rev().filter_map(cell).find(free) {
                taken.push((column, row));
                let color = Some(color_of(index));
                letters.put(self.left + column, self.top + row, mark_of(index), color);
            }
        }
    }

    fn draw_piece(&self, dots: &mut Dots, style: Style, piece: &[(f64, f64)], index: usize) {
        let area = self.area();
        if style == Style::Points || piece.len() == 1 {
            for &(x, y) in piece {
                if (0.0..=area.width).contains(&x) && (0.0..=area.height).contains(&y) {
                    dots.set(x.round() as usize, y.round() as usize, index);
                }
            }
            return;
        }
        for pair in piece.windows(2) {
            let corner = (pair[1].0, pair[0].1);
            let segments = match style {
                Style::Step => vec![(pair[0], corner), (corner, pair[1])],
                Style::Line | Style::Points => vec![(pair[0], pair[1])],
            };
            for (from, to) in segments {
                if let Some((from, to)) = cut_segment(from, to, &area) {
                    let steps = (to.0 - from.0).abs().max((to.1 - from.1).abs()).ceil().max(1.0);
                    for step in 0..=steps as usize {
                        let part = step as f64 / steps;
                        let x = from.0 + part * (to.0 - from.0);
                        let y = from.1 + part * (to.1 - from.1);
                        dots.set(x.round() as usize, y.round() as usize, index);
                    }
                }
            }
        }
    }

    fn mark(&self, letters: &mut Letters, markers: &[Marker]) {
        for marker in markers {
            let (place, label) = match marker {
                Marker::Vertical { x, label } => {
                    let column = self.column_of(*x);
                    for (row, column) in
                        (self.top..self.top + self.rows).zip(column.into_iter().cycle())
                    {
                        if letters.is_free(column, row) {
                            letters.put(column, row, '┊', None);
                        }
                    }
                    (column.map(|column| (column, self.top)), label)
                }
                Marker::Point { x, y, label } => {
                    let place = self.column_of(*x).zip(self.row_of(*y));
                    if let Some((column, row)) = place {
                        letters.put(column, row, '◆', Some(Color::WRONG));
                    }
                    (place, label)
                }
            };
            let Some((column, row)) = place else { continue };
            let label = fit(label, self.columns / 2);
            let before = column.checked_sub(label.width() + 1).filter(|it| *it >= self.left);
            let rows = (0..self.rows).flat_map(|off| [Some(row + off), row.checked_sub(off)]);
            let rows = rows.flatten().filter(|row| (self.top..self.top + self.rows).contains(row));
            let places = rows.flat_map(|row| {
                [Some(column + 2), before].into_iter().flatten().map(move |column| (column, row))
            });
            let mut places = places.filter(|(column, row)| letters.has_room(*column, *row, &label));
            if let Some((column, row)) = places.next() {
                letters.write(column, row, &label, None);
            }
        }
    }
}

/// Dots, 2 x 4 per character, and for each character the last series that has set one.
struct Dots {
    columns: usize,
    cells: Vec<(u8, usize)>,
}

impl Dots {
    fn new(columns: usize, rows: usize) -> Self {
        Self { columns, cells: vec![(0, 0); columns * rows] }
    }

    fn set(&mut self, x: usize, y: usize, series: usize) {
        const BITS: [[u8; 2]; 4] = [[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]];
        if x < 2 * self.columns
            && let Some(cell) = self.cells.get_mut((y / 4) * self.columns + x / 2)
        {
            *cell = (cell.0 | BITS[y % 4][x % 2], series);
        }
    }

    fn put(&self, letters: &mut Letters, left: usize, top: usize) {
        for (index, (bits, series)) in self.cells.iter().enumerate() {
            if *bits != 0
                && let Some(letter) = char::from_u32(0x2800 + u32::from(*bits))
            {
                let (column, row) = (index % self.columns, index / self.columns);
                letters.put(left + column, top + row, letter, Some(color_of(*series)));
            }
        }
    }
}

fn color_of(series: usize) -> Color {
    Color::of_series(series)
}

fn mark_of(series: usize) -> char {
    char::from(b'a' + (series % 26) as u8)
}
