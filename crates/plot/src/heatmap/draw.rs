//! A heatmap as a drawing.

use std::sync::Arc;

use super::Heatmap;
use crate::axis::{Axis, plain_or_exponent};
use crate::color::Color;
use crate::font;
use crate::scene::{Anchor, Area, Pixels, Place, Scene};
use crate::size::Size;

pub(super) fn scene(map: &Heatmap) -> Scene {
    let layout = Layout::new(map);
    let mut scene = Scene::new(layout.size);
    let cells = layout.cells;
    if layout.numbers {
        draw_numbers(map, &mut scene, cells);
    } else {
        draw_dense(map, &mut scene, cells);
        draw_bar(map, &mut scene, cells);
    }
    scene.frame(cells, Color::FRAME);
    layout.draw_labels(map, &mut scene);
    scene
}

struct Layout {
    size: Size,
    cells: Area,
    numbers: bool,
    /// `true` if the labels of the columns run upwards.
    upright: bool,
    widest_row_label: f64,
}

impl Layout {
    fn new(map: &Heatmap) -> Self {
        let (rows, columns) = (map.rows as f64, map.columns as f64);
        let longest = |labels: &[String]| {
            labels.iter().map(|it| font::width(it, SIZE)).fold(0.0, f64::max).min(LONGEST)
        };
        let (row_label, column_label) = (longest(&map.row_labels), longest(&map.column_labels));
        let title = if map.title.is_empty() { 0.0 } else { 24.0 };
        let ticks_left = if map.y_range.is_some() { 48.0 } else { 6.0 };
        let left =
            EDGE + row_label.max(ticks_left) + if map.y_label.is_empty() { 0.0 } else { 24.0 };
        let top = EDGE + title;
        let below = |upright: bool| {
            let labels = if upright { column_label + 8.0 } else { 20.0 };
            labels + EDGE + if map.x_label.is_empty() { 0.0 } else { 20.0 }
        };

        let widest = || {
            let texts = map.number_texts();
            texts.iter().map(|it| font::width(it, SIZE)).fold(0.0, f64::max) + 8.0
        };
        // So many cells that no numbers are shown: their widths are not needed.
        let few = map.numbers && rows * columns <= MOST_NUMBERS;
        let least = if few { widest().max(22.0) } else { f64::INFINITY };
        let (width, height, numbers) = match map.size {
            Some(size) => {
                let (width, height) = (f64::from(size.width), f64::from(size.height));
                let (across, down) = (width - left - BAR, height - top - below(true));
                let numbers = across / columns >= least && down / rows >= 16.0;
                let across = if numbers { width - left - EDGE } else { across };
                (across.max(20.0), down.max(20.0), numbers)
            }
            None if few && rows.max(columns) * least <= 1600.0 => {
                let side = least.max((280.0 / rows.max(columns)).min(70.0));
                (side * columns, (side * rows).min(side.max(26.0) * rows), true)
            }
            // Square cells for a square matrix; otherwise the proportions of a chart.
            None if map.rows == map.columns => (640.0, 640.0, false),
            None => (520.0, 260.0, false),
        };
        let upright = column_label > width / columns - 4.0;
        let height = match map.size {
            Some(size) => f64::from(size.height) - top - below(upright),
            None => height,
        };
        let cells = Area::new(left, top, width.floor(), height.max(20.0).floor());
        let right = if numbers { EDGE } else { BAR };
        // The title is not cut off above a few cells.
        let wanted = font::width(&map.title, 14.0).min(480.0) + 2.0 * EDGE;
        let size = map.size.unwrap_or_else(|| {
            let width = (cells.right() + right).max(wanted);
            Size::new(width.ceil() as u32, (cells.bottom() + below(upright)).ceil() as u32)
        });
        Self { size, cells, numbers, upright, widest_row_label: row_label.max(ticks_left) }
    }

    fn draw_labels(&self, map: &Heatmap, scene: &mut Scene) {
        let cells = self.cells;
        let (side_x, side_y) = (cells.width / map.columns as f64, cells.height / map.rows as f64);
        let every = |side: f64, room: f64| ((room / side).ceil() as usize).max(1);
        for (index, label) in map.row_labels.iter().enumerate().step_by(every(side_y, 13.0)) {
            let row = if map.upwards { map.rows - 1 - index } else { index };
            let y = cells.y + (row as f64 + 0.5) * side_y + 4.0;
            let place = Place::new(cells.x - 6.0, y, SIZE).anchor(Anchor::End);
            scene.text(place, label, LONGEST);
        }
        let room = if self.upright { 13.0 } else { 1.0 };
        for (index, label) in map.column_labels.iter().enumerate().step_by(every(side_x, room)) {
            let x = cells.x + (index as f64 + 0.5) * side_x;
            let place = if self.upright {
                Place::new(x + 4.0, cells.bottom() + 6.0, SIZE).anchor(Anchor::End).upwards()
            } else {
                Place::new(x, cells.bottom() + 15.0, SIZE).anchor(Anchor::Middle)
            };
            scene.text(place, label, LONGEST);
        }
        if map.column_labels.is_empty() && map.x_range.is_some() {
            let span = Axis { range: map.x_range, ..Axis::default() }.span([].into_iter());
            for tick in span.ticks((cells.width / 70.0) as usize) {
                let x = cells.x + span.place(tick.value).unwrap_or(0.0) * cells.width;
                scene.rule((x, cells.bottom()), (x, cells.bottom() + 4.0), Color::FRAME);
                let place = Place::new(x, cells.bottom() + 16.0, SIZE).anchor(Anchor::Middle);
                scene.text(place, &tick.label, f64::INFINITY);
            }
        }
        if map.row_labels.is_empty() && map.y_range.is_some() {
            let span = Axis { range: map.y_range, ..Axis::default() }.span([].into_iter());
            for tick in span.ticks((cells.height / 32.0) as usize) {
                let y = cells.bottom() - span.place(tick.value).unwrap_or(0.0) * cells.height;
                scene.rule((cells.x - 4.0, y), (cells.x, y), Color::FRAME);
                let place = Place::new(cells.x - 6.0, y + 4.0, SIZE).anchor(Anchor::End);
                scene.text(place, &tick.label, self.widest_row_label);
            }
        }
        let (width, height) = (scene.width, scene.height);
        let centered = |x, y, size| Place::new(x, y, size).anchor(Anchor::Middle);
        let title = centered(width / 2.0, EDGE + 13.0, 14.0);
        scene.text(title, &map.title, width - 2.0 * EDGE);
        let middle = cells.x + cells.width / 2.0;
        scene.text(centered(middle, height - EDGE + 2.0, 12.0), &map.x_label, width - 2.0 * EDGE);
        let upright = centered(EDGE + 10.0, cells.y + cells.height / 2.0, 12.0).upwards();
        scene.text(upright, &map.y_label, height - 2.0 * EDGE);
    }
}

fn draw_numbers(map: &Heatmap, scene: &mut Scene, cells: Area) {
    let (side_x, side_y) = (cells.width / map.columns as f64, cells.height / map.rows as f64);
    let limits = map.limits();
    for (index, (value, text)) in map.values.iter().zip(map.number_texts()).enumerate() {
        let (row, column) = (index / map.columns, index % map.columns);
        let row = if map.upwards { map.rows - 1 - row } else { row };
        // Aligned to whole pixels, so that no white line remains between cells.
        let edge = |at: usize, begin: f64, side: f64| (begin + at as f64 * side).round();
        let (x, y) = (edge(column, cells.x, side_x), edge(row, cells.y, side_y));
        let (right, bottom) = (edge(column + 1, cells.x, side_x), edge(row + 1, cells.y, side_y));
        let color = color(map, *value, limits);
        scene.rect(Area::new(x, y, right - x, bottom - y), color);
        let place = Place::new((x + right) / 2.0, (y + bottom) / 2.0 + 4.0, SIZE);
        let place = place.anchor(Anchor::Middle).color(color.readable());
        scene.text(place, &text, f64::INFINITY);
    }
}

/// Draws the cells as an image with one pixel per cell, and at most as many as there are pixels on screen.
fn draw_dense(map: &Heatmap, scene: &mut Scene, cells: Area) {
    let (rows, columns, values) = map.reduced(cells.height as usize, cells.width as usize);
    let limits = map.limits();
    let bytes = values.iter().flat_map(|value| {
        let Color(red, green, blue) = color(map, *value, limits);
        [red, green, blue]
    });
    let pixels = Pixels { width: columns as u32, height: rows as u32, bytes: bytes.collect() };
    scene.image(cells, Arc::new(pixels));
}

/// Draws the colour scale to the right of the cells.
fn draw_bar(map: &Heatmap, scene: &mut Scene, cells: Area) {
    let bar = Area::new(cells.right() + 14.0, cells.y, 14.0, cells.height);
    let bytes = (0..=255).rev().flat_map(|part| {
        let Color(red, green, blue) = map.colors.color(f64::from(part) / 255.0);
        [red, green, blue]
    });
    let pixels = Pixels { width: 1, height: 256, bytes: bytes.collect() };
    scene.image(bar, Arc::new(pixels));
    scene.frame(bar, Color::FRAME);
    let (low, high) = map.limits();
    for part in [0.0, 0.5, 1.0] {
        let shown = low + part * (high - low);
        let value = if map.log { shown.exp_m1() } else { shown };
        let y = bar.bottom() - part * (bar.height - 8.0);
        let text = plain_or_exponent(value);
        scene.text(Place::new(bar.right() + 5.0, y, SIZE), &text, BAR - 38.0);
    }
}

fn color(map: &Heatmap, value: f64, (low, high): (f64, f64)) -> Color {
    let shown = map.shown(value);
    if value.is_finite() { map.colors.color((shown - low) / (high - low)) } else { Color::MISSING }
}

const EDGE: f64 = 10.0;
const SIZE: f64 = 11.0;
/// Maximum width of a label in pixels.
const LONGEST: f64 = 150.0;
/// Width of the colour scale in pixels.
const BAR: f64 = 84.0;
/// Number of cells above which numbers are unreadable, and would make the file large.
const MOST_NUMBERS: f64 = 2500.0;
