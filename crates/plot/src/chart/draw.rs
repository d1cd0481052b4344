//! A chart as a drawing.

use std::collections::HashSet;
use std::ops::Range;

use super::legend::Legend;
use super::thin::thin;
use super::{Chart, Marker, Series, Style};
use crate::axis::{Span, Tick};
use crate::color::Color;
use crate::scene::{Anchor, Area, Place, Scene, Shape, printable};
use crate::{Size, font};

pub(super) fn scene(chart: &Chart) -> Scene {
    let size = Size::new(chart.size.width.max(160), chart.size.height.max(120));
    let mut scene = Scene::new(size);
    let (width, height) = (scene.width, scene.height);
    let legend = Legend::new(chart, width - 2.0 * EDGE);
    let title = if chart.title.is_empty() { 0.0 } else { 24.0 };
    let top = EDGE + title + legend.height() + 2.0;
    let bottom = height - EDGE - 18.0 - if chart.x.label.is_empty() { 0.0 } else { 18.0 };

    let (across, upwards) = chart.spans();
    let y_ticks = upwards.ticks(((bottom - top) / 32.0) as usize);
    let widest = y_ticks.iter().map(|it| font::width(&it.label, TICK)).fold(0.0, f64::max);
    let left = EDGE + widest + 6.0 + if chart.y.label.is_empty() { 0.0 } else { 20.0 };
    let (x_ticks, right) = x_ticks(&across, left, width - EDGE);
    let plot = Area::new(left, top, right - left, bottom - top);
    let frame = Frame { plot, across, upwards };

    frame.draw_axes(&mut scene, &x_ticks, &y_ticks);
    let first = scene.shapes.len();
    for (index, series) in chart.series.iter().enumerate() {
        frame.draw_series(&mut scene, series, Color::of_series(index));
    }
    let series = first..scene.shapes.len();
    frame.draw_markers(&mut scene, chart, series);
    scene.frame(plot, Color::FRAME);

    let middle = plot.x + plot.width / 2.0;
    let centered = |x, y, size| Place::new(x, y, size).anchor(Anchor::Middle);
    scene.text(centered(width / 2.0, EDGE + 13.0, TITLE), &chart.title, width - 2.0 * EDGE);
    legend.draw(chart, &mut scene, plot.x, EDGE + title);
    scene.text(centered(middle, height - EDGE - 3.0, LABEL), &chart.x.label, width - 2.0 * EDGE);
    let upright = centered(EDGE + 10.0, top + plot.height / 2.0, LABEL).upwards();
    scene.text(upright, &chart.y.label, height - 2.0 * EDGE);
    scene
}

/// Returns as many ticks as fit beside each other, and the right edge of the plot that leaves the last label whole.
fn x_ticks(across: &Span, left: f64, edge: f64) -> (Vec<Tick>, f64) {
    let mut most = ((edge - left) / 50.0) as usize;
    loop {
        let ticks = across.ticks(most);
        let half = |tick: &Tick| font::width(&tick.label, TICK) / 2.0;
        let place = |tick: &Tick, right: f64| {
            left + across.place(tick.value).unwrap_or(0.0) * (right - left)
        };
        let over =
            |tick: &Tick| (place(tick, edge - 6.0) + half(tick) - edge).clamp(0.0, edge - left);
        let right = edge - 6.0 - ticks.last().map_or(0.0, over);
        let fit = ticks.windows(2).all(|pair| {
            let gap = place(&pair[1], right) - place(&pair[0], right);
            gap >= half(&pair[0]) + half(&pair[1]) + 8.0
        });
        if fit || most <= 1 {
            // A single one may be wider than the whole plot.
            let right = right.max(left + (edge - left) / 2.0);
            return (if fit { ticks } else { ticks.into_iter().take(1).collect() }, right);
        }
        most -= 1;
    }
}

/// Plot area without its surroundings.
struct Frame {
    plot: Area,
    across: Span,
    upwards: Span,
}

impl Frame {
    /// Returns the pixel of a point, which may lie outside of the plot area.
    fn pixel(&self, (x, y): (f64, f64)) -> Option<(f64, f64)> {
        let (x, y) = (self.across.place(x)?, self.upwards.place(y)?);
        // Far outside of a given range; clipping only needs finite numbers.
        let near = |place: f64| place.clamp(-1e6, 1e6);
        let Area { width, height, .. } = self.plot;
        Some((self.plot.x + near(x) * width, self.plot.y + (1.0 - near(y)) * height))
    }

    fn draw_axes(&self, scene: &mut Scene, x_ticks: &[Tick], y_ticks: &[Tick]) {
        let (left, top) = (self.plot.x, self.plot.y);
        let (right, bottom) = (self.plot.right(), self.plot.bottom());
        for tick in x_ticks {
            let x = left + self.across.place(tick.value).unwrap_or(0.0) * self.plot.width;
            scene.rule((x, top), (x, bottom), Color::GRID);
            scene.rule((x, bottom), (x, bottom + 4.0), Color::FRAME);
            let place = Place::new(x, bottom + 16.0, TICK).anchor(Anchor::Middle);
            scene.text(place, &tick.label, f64::INFINITY);
        }
        for value in self.across.minor() {
            let x = left + self.across.place(value).unwrap_or(0.0) * self.plot.width;
            scene.rule((x, bottom), (x, bottom + 2.0), Color::FRAME);
        }
        for tick in y_ticks {
            let y = bottom - self.upwards.place(tick.value).unwrap_or(0.0) * self.plot.height;
            scene.rule((left, y), (right, y), Color::GRID);
            scene.rule((left - 4.0, y), (left, y), Color::FRAME);
            let place = Place::new(left - 6.0, y + 4.0, TICK).anchor(Anchor::End);
            scene.text(place, &tick.label, f64::INFINITY);
        }
        for value in self.upwards.minor() {
            let y = bottom - self.upwards.place(value).unwrap_or(0.0) * self.plot.height;
            scene.rule((left - 2.0, y), (left, y), Color::FRAME);
        }
    }

    fn draw_series(&self, scene: &mut Scene, series: &Series, color: Color) {
        let pixels: Vec<Option<(f64, f64)>> =
            series.points.iter().map(|point| self.pixel(*point)).collect();
        if series.style == Style::Points {
            // One dot per pixel, however many points are there.
            let mut drawn = HashSet::new();
            let inside = |at: &(f64, f64)| contains(&self.plot, *at);
            for at in pixels.into_iter().flatten().filter(inside) {
                if drawn.insert((at.0 as i32, at.1 as i32)) {
                    scene.dot(at, 2.5, color);
                }
            }
            return;
        }
        for piece in pixels.split(Option::is_none) {
            let mut piece: Vec<(f64, f64)> = piece.iter().copied().flatten().collect();
            if let [at] = piece[..] {
                // A line through a single point would be invisible.
                if contains(&self.plot, at) {
                    scene.dot(at, 2.5, color);
                }
                continue;
            }
            piece = thin(&piece);
            if series.style == Style::Step {
                let corner = |pair: &[(f64, f64)]| [(pair[1].0, pair[0].1), pair[1]];
                let first = piece.first().copied();
                piece = first.into_iter().chain(piece.windows(2).flat_map(corner)).collect();
            }
            for line in cut(&piece, &self.plot) {
                scene.line(line, color, 1.6);
            }
        }
    }

    /// Draws the markers above the series, whose shapes are the range `series`.
    fn draw_markers(&self, scene: &mut Scene, chart: &Chart, series: Range<usize>) {
        let mut taken: Vec<Area> = Vec::new();
        // Dots first: labels may not cover them.
        for marker in &chart.markers {
            match *marker {
                Marker::Vertical { x, .. } => {
                    if let Some(x) = self.column(x) {
                        let line = vec![(x, self.plot.y), (x, self.plot.bottom())];
                        scene.dashed(line, Color::FRAME, 1.2);
                    }
                }
                Marker::Point { x, y, .. } => {
                    let at = self.pixel((x, y)).filter(|at| contains(&self.plot, *at));
                    if let Some((x, y)) = at {
                        scene.dot((x, y), 5.0, Color::WHITE);
                        scene.dot((x, y), 4.0, Color::WRONG);
                        taken.push(Area::new(x - 4.0, y - 4.0, 8.0, 8.0));
                    }
                }
            }
        }
        for marker in &chart.markers {
            let (at, label) = match marker {
                Marker::Vertical { x, label } => {
                    (self.column(*x).map(|x| (x, self.plot.y + 12.0)), label)
                }
                Marker::Point { x, y, label } => (self.pixel((*x, *y)), label),
            };
            if let Some(at) = at.filter(|at| contains(&self.plot, *at) && !label.is_empty()) {
                let is_point = matches!(marker, Marker::Point { .. });
                self.draw_label(scene, at, label, &mut taken, series.clone(), is_point);
            }
        }
    }

    /// Draws a label beside its position, in the first row without another label and, if possible, without a line.
    fn draw_label(
        &self,
        scene: &mut Scene,
        at: (f64, f64),
        label: &str,
        taken: &mut Vec<Area>,
        series: Range<usize>,
        is_point: bool,
    ) {
        let text = font::fit(&printable(label), TICK, self.plot.width * 0.6);
        let (width, height) = (font::width(&text, TICK) + 6.0, 15.0);
        let rows = (0..8).flat_map(|row| [f64::from(row), -f64::from(row)]);
        let places = rows.flat_map(|row| {
            let y = at.1 - height / 2.0 + row * height;
            [at.0 + 7.0, at.0 - 7.0 - width].map(|x| Area::new(x, y, width, height))
        });
        let free = |area: &Area| {
            let inside = area.x >= self.plot.x
                && area.right() <= self.plot.right()
                && area.y >= self.plot.y
                && area.bottom() <= self.plot.bottom();
            inside && !taken.iter().any(|other| other.overlaps(area))
        };
        let places: Vec<Area> = places.filter(free).collect();
        let hides = |area: &&Area| {
            scene.shapes[series.clone()].iter().any(|shape| match shape {
                Shape::Line { points, .. } => {
                    points.windows(2).any(|it| cut_segment(it[0], it[1], area).is_some())
                }
                Shape::Dot { at, .. } => contains(area, *at),
                _ => false,
            })
        };
        // Moving the label far away to avoid a line is not worth it. Without a free position, the label would be
        // unreadable and is left out.
        let near = |area: &&Area| (area.y + height / 2.0 - at.1).abs() < 2.5 * height;
        let clear = places.iter().take_while(near).find(|area| !hides(area));
        if let Some(area) = clear.or_else(|| places.first()).copied() {
            if is_point && !(area.y..area.bottom()).contains(&at.1) {
                let side = if area.x > at.0 { area.x } else { area.right() };
                scene.line(vec![at, (side, area.y + height / 2.0)], Color::FRAME, 0.8);
            }
            scene.rect(area, Color::WHITE);
            scene.text(Place::new(area.x + 3.0, area.y + 11.5, TICK), &text, f64::INFINITY);
            taken.push(area);
        }
    }

    /// Returns the horizontal pixel of a value inside of the plot area.
    fn column(&self, x: f64) -> Option<f64> {
        let place = self.across.place(x).filter(|place| (0.0..=1.0).contains(place))?;
        Some(self.plot.x + place * self.plot.width)
    }
}

fn contains(area: &Area, (x, y): (f64, f64)) -> bool {
    (area.x - 0.01..=area.right() + 0.01).contains(&x)
        && (area.y - 0.01..=area.bottom() + 0.01).contains(&y)
}

/// Returns the parts of a line inside of an area.
fn cut(line: &[(f64, f64)], area: &Area) -> Vec<Vec<(f64, f64)>> {
    let mut parts: Vec<Vec<(f64, f64)>> = Vec::new();
    for pair in line.windows(2) {
        let Some((from, to)) = cut_segment(pair[0], pair[1], area) else { continue };
        match parts.last_mut().filter(|part| part.last() == Some(&from)) {
            Some(part) => part.push(to),
            None => parts.push(vec![from, to]),
        }
    }
    parts
}

/// Clips a segment to an area, by the algorithm of Liang and Barsky.
pub(super) fn cut_segment(
    from: (f64, f64),
    to: (f64, f64),
    area: &Area,
) -> Option<((f64, f64), (f64, f64))> {
    let (dx, dy) = (to.0 - from.0, to.1 - from.1);
    let (mut enter, mut leave) = (0.0_f64, 1.0_f64);
    for (change, room) in [
        (-dx, from.0 - area.x),
        (dx, area.right() - from.0),
        (-dy, from.1 - area.y),
        (dy, area.bottom() - from.1),
    ] {
        if change == 0.0 {
            if room < -0.01 {
                return None;
            }
        } else if change < 0.0 {
            enter = enter.max(room / change);
        } else {
            leave = leave.min(room / change);
        }
    }
    let at = |part: f64| match part {
        // The exact end point, so that the next segment is recognised as its continuation.
        0.0 => from,
        1.0 => to,
        _ => (from.0 + part * dx, from.1 + part * dy),
    };
    (enter <= leave).then(|| (at(enter), at(leave)))
}

const EDGE: f64 = 10.0;
const TICK: f64 = 11.0;
const LABEL: f64 = 12.0;
const TITLE: f64 = 14.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_at_the_edge() {
        let area = Area::new(0.0, 0.0, 10.0, 10.0);
        let cut = |line: &[(f64, f64)]| cut(line, &area);
        assert_eq!(cut(&[(1.0, 1.0), (9.0, 9.0)]), [[(1.0, 1.0), (9.0, 9.0)]]);
        assert_eq!(cut(&[(-5.0, 5.0), (15.0, 5.0)]), [[(0.0, 5.0), (10.0, 5.0)]]);
        assert!(cut(&[(-5.0, 20.0), (15.0, 20.0)]).is_empty());
        // Leaves at the top and comes back: two parts.
        let parts = cut(&[(2.0, 5.0), (4.0, -5.0), (6.0, 5.0), (7.0, 5.0)]);
        assert_eq!(parts, [vec![(2.0, 5.0), (3.0, 0.0)], vec![(5.0, 0.0), (6.0, 5.0), (7.0, 5.0)]]);
    }
}
