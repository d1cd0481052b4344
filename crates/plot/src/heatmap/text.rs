//! Heatmap as text: a table, or shades where it is too wide for one.

use unicode_width::UnicodeWidthStr;

use super::Heatmap;
use crate::color::Color;
use crate::terminal::{TextOptions, color_code, fit, left, right};

pub(super) fn render(map: &Heatmap, options: &TextOptions) -> String {
    let mut text = String::new();
    for line in [map.title.clone(), axes(map)] {
        if !line.is_empty() {
            text += &fit(&line, options.width);
            text.push('\n');
        }
    }
    let table =
        map.numbers.then(|| table(map, options, false).or_else(|| table(map, options, true)));
    text + &table.flatten().unwrap_or_else(|| shades(map, options))
}

fn axes(map: &Heatmap) -> String {
    match (map.y_label.as_str(), map.x_label.as_str()) {
        ("", "") => String::new(),
        (rows, "") => format!("rows: {rows}"),
        ("", columns) => format!("columns: {columns}"),
        (rows, columns) => format!("rows: {rows}, columns: {columns}"),
    }
}

/// Returns the labels and the numbers of the rows, from the top.
fn rows(map: &Heatmap, numbered: bool) -> Vec<(String, Vec<String>)> {
    let label = |index: usize| {
        let label = map.row_labels.get(index).map_or("", String::as_str);
        if numbered { format!("{} {label}", index + 1) } else { label.to_owned() }
    };
    let texts = map.number_texts();
    let rows = texts.chunks(map.columns).enumerate();
    let mut rows: Vec<_> = rows.map(|(index, row)| (label(index), row.to_vec())).collect();
    if map.upwards {
        rows.reverse();
    }
    rows
}

/// Renders a table; `None` where the width does not suffice. If `numbered`, the columns have numbers instead of labels,
/// and the rows have both.
fn table(map: &Heatmap, options: &TextOptions, numbered: bool) -> Option<String> {
    if map.columns > options.width {
        return None;
    }
    // Numbered columns only make sense if the rows have the same labels.
    if numbered && map.row_labels != map.column_labels {
        return None;
    }
    let column_labels: Vec<String> = if numbered {
        (1..=map.columns).map(|it| it.to_string()).collect()
    } else {
        map.column_labels.iter().map(|it| fit(it, LONGEST)).collect()
    };
    let rows = rows(map, numbered);
    let labels = rows.iter().map(|(label, _)| fit(label, LONGEST).width()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..map.columns)
        .map(|column| {
            let numbers = rows.iter().map(|(_, row)| row[column].width());
            let label = column_labels.get(column).map_or(0, |it| it.width());
            numbers.max().unwrap_or(0).max(label)
        })
        .collect();
    let width = labels + widths.iter().map(|width| width + 2).sum::<usize>();
    if width > options.width {
        return None;
    }
    let line = |label: &str, cells: Vec<String>| {
        let cells: String =
            cells.iter().zip(&widths).map(|(cell, width)| right(cell, width + 2)).collect();
        format!("{}{cells}", left(&fit(label, LONGEST), labels)).trim_end().to_owned() + "\n"
    };
    let mut text = String::new();
    if !column_labels.is_empty() {
        text += &line("", column_labels);
    }
    for (label, row) in rows {
        text += &line(&label, row);
    }
    Some(text)
}

/// Renders one shaded character per cell, or per group of cells.
fn shades(map: &Heatmap, options: &TextOptions) -> String {
    let lines = options.height.saturating_sub(4).max(4);
    let (_, columns, values) = map.reduced(lines, options.width.saturating_sub(2).max(8));
    let (low, high) = map.limits();
    let mut text = format!("┌{}┐\n", "─".repeat(columns));
    for row in values.chunks(columns) {
        text.push('│');
        for value in row {
            let part = (map.shown(*value) - low) / (high - low);
            let finite = value.is_finite();
            if options.color {
                let color = if finite { map.colors.color(part) } else { Color::MISSING };
                text += &color_code(Some(color));
                text.push('█');
            } else {
                let shade = (part * (SHADES.len() - 1) as f64).round() as usize;
                text.push(if finite { SHADES[shade.min(SHADES.len() - 1)] } else { '?' });
            }
        }
        if options.color {
            text += &color_code(None);
        }
        text += "│\n";
    }
    text + &format!("└{}┘\n", "─".repeat(columns))
}

const SHADES: [char; 5] = [' ', '░', '▒', '▓', '█'];
const LONGEST: usize = 20;
