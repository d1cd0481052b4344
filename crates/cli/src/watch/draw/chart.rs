//! Chart of the curves of one family, in dots of Braille characters.

use brigade_rank_env::text::counted;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis as Scale, Block, Borders, Chart, Dataset, GraphType};

use super::super::curve::{Curve, Point};
use super::super::model::Model;
use super::super::text;
use super::super::view::{Axis, View};

/// Points without a gap.
type Piece = Vec<(f64, f64)>;

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, model: &Model, view: &View, names: &[&str]) {
    let x = positions(model, view.axis);
    let curves: Vec<(&str, &Curve)> =
        names.iter().filter_map(|name| Some((*name, model.curves.get(*name)?))).collect();
    let all = curves.iter().flat_map(|(_, curve)| curve.points().iter().filter_map(&x));
    let whole = bounds(all).unwrap_or((0.0, 1.0));
    // A single point is centred.
    let whole = if whole.0 < whole.1 { whole } else { (whole.0 - 0.5, whole.1 + 0.5) };
    let span = (whole.1 - view.zoom() * (whole.1 - whole.0), whole.1);
    let is_seen = |at: f64| at >= span.0;
    let y = |value: f64| {
        let value = if view.is_log { value.log10() } else { value };
        // The length of an axis must be finite, too.
        (value.abs() <= 1e300).then_some(value)
    };
    let mut raw: Vec<(Style, Vec<Piece>)> = Vec::new();
    let mut smooth: Vec<(Style, Vec<Piece>)> = Vec::new();
    let mut title = Vec::new();
    for (at, (name, curve)) in curves.iter().enumerate() {
        let style = Style::new().fg(COLOURS[at % COLOURS.len()]);
        let seen = curve.points().iter().map(|point| (point, x(point).filter(|it| is_seen(*it))));
        let pieces = pieces(seen.clone().map(|(point, x)| {
            // A point of many values is a stroke from the lowest to the highest one.
            Some([(x?, y(point.low)?), (x?, y(point.high)?)])
        }));
        // Few points, for example one per epoch, are not smoothed.
        if view.smoothing() > 0.0 && curve.points().len() >= FEW {
            raw.push((Style::new().fg(Color::DarkGray), pieces));
            let smoothed = curve.smoothed(view.smoothing());
            let values = seen.zip(&smoothed).map(|((_, x), value)| Some([(x?, y((*value)?)?)]));
            smooth.push((style, self::pieces(values)));
        } else {
            smooth.push((style, pieces));
        }
        title.extend(legend(name, curve, style, at > 0));
    }
    if names.is_empty() {
        return;
    }
    let drawn: Vec<&(Style, Vec<Piece>)> = raw.iter().chain(&smooth).collect();
    let values = drawn.iter().flat_map(|(_, pieces)| pieces.iter().flatten().map(|point| point.1));
    let (low, high) = margin(bounds(values).unwrap_or((0.0, 1.0)), view.is_log);
    let sets = drawn.iter().flat_map(|(style, pieces)| {
        pieces.iter().map(|piece| {
            let kind = if piece.len() > 1 { GraphType::Line } else { GraphType::Scatter };
            Dataset::default().marker(Marker::Braille).graph_type(kind).style(*style).data(piece)
        })
    });
    let block = Block::new().borders(Borders::TOP).border_style(Modifier::DIM);
    let block = block.title(Line::from(title));
    let inside = block.inner(area);
    let mut chart = Chart::new(sets.collect())
        .legend_position(None)
        .x_axis(Scale::default().bounds([span.0, span.1]))
        .y_axis(Scale::default().bounds([low, high]));
    if inside.width >= 16 && inside.height >= 4 {
        let grey = Style::new().add_modifier(Modifier::DIM);
        let value = |at: f64| text::number(round(if view.is_log { 10f64.powf(at) } else { at }));
        let ups = spread(low, high, 2 + usize::from(inside.height) / 8).map(value);
        let along = spread(span.0, span.1, if inside.width < 40 { 2 } else { 3 });
        let along = along.map(|at| position(view.axis, at, span.1 - span.0));
        chart = chart
            .x_axis(
                Scale::default()
                    .bounds([span.0, span.1])
                    .labels(along.collect::<Vec<_>>())
                    .style(grey),
            )
            .y_axis(
                Scale::default().bounds([low, high]).labels(ups.collect::<Vec<_>>()).style(grey),
            );
    }
    if area.height > 0 && inside.width > 0 {
        frame.render_widget(block, area);
    }
    if x_is_unknown(&curves, &x) {
        frame.render_widget(Line::from(unknown(view.axis)).fg(Color::Yellow), inside);
    } else if !inside.is_empty() {
        frame.render_widget(chart, inside);
    }
}

/// Returns the name in its colour with the last value, and the number of values that could not be drawn.
fn legend(name: &str, curve: &Curve, style: Style, is_next: bool) -> Vec<Span<'static>> {
    let last = curve.last().map(text::number).unwrap_or_default();
    let mut spans = vec![
        Span::raw(if is_next { " " } else { "" }),
        Span::styled(format!("━ {name} "), style),
        Span::styled(format!("{last} "), style.add_modifier(Modifier::BOLD)),
    ];
    if curve.non_finite() > 0 {
        let count = counted(curve.non_finite(), "value");
        spans.push(Span::from(format!("({count} not finite) ")).fg(Color::Red));
    }
    spans
}

/// Returns the position of a point along the axis; `None` if it is unknown.
fn positions(model: &Model, axis: Axis) -> impl Fn(&Point) -> Option<f64> {
    let clock = (axis == Axis::Epoch).then(|| model.epochs.clock());
    let began = model.curves.values().filter_map(|curve| curve.points().first());
    let began = began.map(|point| point.time).fold(f64::INFINITY, f64::min);
    move |point| {
        let at = match axis {
            Axis::Step => Some(point.step),
            Axis::Time => Some(point.time - began),
            Axis::Epoch => clock.as_ref().and_then(|clock| clock.at(point.step)),
        };
        at.filter(|at| at.is_finite())
    }
}

fn x_is_unknown(curves: &[(&str, &Curve)], x: &impl Fn(&Point) -> Option<f64>) -> bool {
    curves.iter().all(|(_, curve)| curve.points().iter().all(|point| x(point).is_none()))
}

fn unknown(axis: Axis) -> &'static str {
    match axis {
        Axis::Step => "no steps in this run: press x",
        Axis::Time => "no times in this run: press x",
        Axis::Epoch => "no epochs in this run so far: press x",
    }
}

fn position(axis: Axis, at: f64, span: f64) -> String {
    match axis {
        Axis::Step => format!("{at:.0}"),
        Axis::Time if span < 10.0 => format!("{at:.1} s"),
        Axis::Time => text::duration(at),
        Axis::Epoch => format!("{at:.1}"),
    }
}

/// Splits points at gaps.
fn pieces<const N: usize>(points: impl Iterator<Item = Option<[(f64, f64); N]>>) -> Vec<Piece> {
    let mut pieces = vec![Vec::new()];
    for point in points {
        match (point, pieces.last_mut()) {
            (Some(point), Some(piece)) => {
                piece.extend(point);
                piece.dedup();
            }
            _ => pieces.push(Vec::new()),
        }
    }
    pieces.retain(|piece| !piece.is_empty());
    pieces
}

fn bounds(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |bounds, value| {
        let (low, high) = bounds.unwrap_or((value, value));
        Some((low.min(value), high.max(value)))
    })
}

/// Adds a margin to a range, but not below 0 if no value is. Equal values are centred.
fn margin((low, high): (f64, f64), is_log: bool) -> (f64, f64) {
    let air = (high - low) * 0.05;
    if air > 0.0 {
        let floor = if low >= 0.0 && !is_log { 0.0 } else { f64::MIN };
        ((low - air).max(floor), high + air)
    } else {
        let air = (high.abs() * 0.05).max(1e-9);
        (low - air, high + air)
    }
}

fn spread(low: f64, high: f64, labels: usize) -> impl Iterator<Item = f64> {
    let steps = (labels - 1) as f64;
    (0..labels).map(move |at| {
        let part = at as f64 / steps;
        low * (1.0 - part) + high * part
    })
}

/// Rounds to three significant digits: the ends of the scale are not round numbers.
fn round(value: f64) -> f64 {
    format!("{value:.2e}").parse().unwrap_or(value)
}

const COLOURS: [Color; 6] =
    [Color::Cyan, Color::Yellow, Color::Magenta, Color::Green, Color::Red, Color::Blue];
/// Number of points below which curves are not smoothed.
const FEW: usize = 20;
