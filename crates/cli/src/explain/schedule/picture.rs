//! Curves as SVG, with one panel each, one below the other.
//!
//! Written without a plotting library, which would be a large part of this binary, for two lines and their axes.

use std::fmt::Write;

use super::series::{Column, Series, number};

/// Returns the text of the SVG file.
pub(super) fn draw(series: &Series) -> String {
    let panels = series.columns.len();
    let height = TOP + panels as f64 * (PANEL + GAP) + BOTTOM;
    let mut svg = String::new();
    let _ = writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\" fill=\"#333\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"22\" font-size=\"15\">{}</text>",
        series.title()
    );
    for (place, column) in series.columns.iter().enumerate() {
        let top = TOP + place as f64 * (PANEL + GAP);
        panel(&mut svg, column, COLOURS[place % COLOURS.len()], top, place + 1 == panels);
    }
    let _ = writeln!(
        svg,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n</svg>",
        LEFT + (WIDTH - LEFT - RIGHT) / 2.0,
        height - 10.0,
        series.row
    );
    svg
}

fn panel(svg: &mut String, column: &Column, colour: &str, top: f64, last: bool) {
    let finite = || column.values.iter().copied().filter(|value| value.is_finite());
    let (low, high) = range(finite().fold(f64::NAN, f64::min), finite().fold(f64::NAN, f64::max));
    let ups = ticks(low, high);
    let steps = (column.values.len() - 1).max(1) as f64;
    let x = |step: f64| LEFT + step / steps * (WIDTH - LEFT - RIGHT);
    let y = |value: f64| top + (high - value) / (high - low) * PANEL;
    for tick in ups {
        let _ = writeln!(
            svg,
            "<path d=\"M{LEFT} {0:.1}H{1}\" stroke=\"#ddd\"/>\
             <text x=\"{2}\" y=\"{3:.1}\" text-anchor=\"end\">{4}</text>",
            y(tick),
            WIDTH - RIGHT,
            LEFT - 8.0,
            y(tick) + 4.0,
            number(tick),
        );
    }
    for tick in ticks(0.0, steps).into_iter().filter(|tick| tick.fract() == 0.0) {
        let _ = writeln!(svg, "<path d=\"M{0:.1} {1}v5\" stroke=\"#888\"/>", x(tick), top + PANEL);
        if last {
            let _ = writeln!(
                svg,
                "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                x(tick),
                top + PANEL + 20.0,
                tick
            );
        }
    }
    let _ = write!(
        svg,
        "<path d=\"M{LEFT} {top}V{0}H{1}\" fill=\"none\" stroke=\"#888\"/>\n\
         <text x=\"{LEFT}\" y=\"{2}\" fill=\"{colour}\">{3}</text>\n\
         <path fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\" stroke-linejoin=\"round\" d=\"",
        top + PANEL,
        WIDTH - RIGHT,
        top - 8.0,
        column.name,
    );
    let mut pen = 'M';
    for (step, value) in thinned(&column.values) {
        if !value.is_finite() {
            pen = 'M'; // a gap
            continue;
        }
        let _ = write!(svg, "{pen}{:.2} {:.2}", x(step as f64), y(value));
        pen = 'L';
    }
    let _ = svg.write_str("\"/>\n");
}

/// Reduces the points to the number of pixels, with the lowest and the highest of each group: a spike stays visible.
fn thinned(values: &[f64]) -> Vec<(usize, f64)> {
    let stride = values.len().div_ceil(POINTS).max(1);
    let mut points = Vec::with_capacity(2 * values.len() / stride + 2);
    for (place, chunk) in values.chunks(stride).enumerate() {
        let at = |offset: usize| (place * stride + offset, chunk[offset]);
        let extreme = |better: fn(f64, f64) -> bool| {
            (1..chunk.len())
                .fold(0, |best, it| if better(chunk[it], chunk[best]) { it } else { best })
        };
        let mut kept = [0, extreme(|a, b| a < b), extreme(|a, b| a > b), chunk.len() - 1];
        kept.sort_unstable();
        points.extend(kept.into_iter().map(at));
    }
    points.dedup_by_key(|point| point.0);
    points
}

/// Returns the range of a panel with a margin; from 0 if that is near.
fn range(low: f64, high: f64) -> (f64, f64) {
    if !(low.is_finite() && high.is_finite()) {
        return (0.0, 1.0);
    }
    let low = if low >= 0.0 && low < high / 2.0 { 0.0 } else { low };
    let air = if high > low { (high - low) * 0.05 } else { high.abs().max(1e-12) * 0.5 };
    (if low == 0.0 { 0.0 } else { low - air }, high + air)
}

/// Returns round numbers in a range: multiples of 1, 2 or 5 times a power of ten.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 5.0, 10.0].into_iter().find(|it| it * power >= rough).unwrap_or(10.0);
    let apart = factor * power;
    let first = (low / apart).ceil() as i64;
    (first..first + 12)
        .map(|place| place as f64 * apart)
        .take_while(|tick| *tick <= high * (1.0 + 1e-12))
        .collect()
}

const WIDTH: f64 = 720.0;
const LEFT: f64 = 90.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 60.0;
const PANEL: f64 = 200.0;
/// Gap between panels, for the name of the next one.
const GAP: f64 = 36.0;
const BOTTOM: f64 = 20.0;
const POINTS: usize = 1200;
const COLOURS: [&str; 2] = ["#1f6fb2", "#c2571a"];
