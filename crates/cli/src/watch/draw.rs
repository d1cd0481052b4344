//! Drawing of the screen from the run, the user's choices, and the size of the terminal.

mod chart;

use std::time::Duration;

use brigade_rank_env::text::counted;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, LineGauge, Paragraph};

use super::model::{Model, State};
use super::text;
use super::view::{Axis, Page, View, shown};

/// State of the file besides its lines.
#[derive(Debug, Default)]
pub(super) struct Status {
    /// Name of the file, or of the standard input.
    pub(super) name: String,
    /// Index of the run among those of its folder, from 1, and their number.
    pub(super) place: Option<(usize, usize)>,
    /// Time since the last new line.
    pub(super) silent: Option<Duration>,
    /// Notice about the file: it is being read, or was deleted.
    pub(super) notice: Option<String>,
}

pub(super) fn draw(frame: &mut Frame<'_>, model: &Model, view: &View, status: &Status) {
    let area = frame.area();
    let has_footer = area.height >= 10;
    let has_rates = area.height >= 14;
    let progress = text::progress(model).filter(|_| area.height >= 12);
    let [title, rates, gauge, body, footer] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(u16::from(has_rates)),
        Constraint::Length(u16::from(progress.is_some())),
        Constraint::Min(0),
        Constraint::Length(u16::from(has_footer)),
    ])
    .areas(area);
    frame.render_widget(headline(model, status), title);
    frame.render_widget(Line::from(text::rates(model).join(" · ")).dim(), rates);
    if let Some(progress) = progress {
        let bar = LineGauge::default().ratio(model.fraction().unwrap_or(0.0)).label(progress);
        frame.render_widget(bar.filled_style(Style::new().fg(Color::Green)), gauge);
    }
    frame.render_widget(keys(view), footer);
    match view.page {
        Page::Charts => charts_and_tables(frame, body, model, view),
        Page::Settings => settings(frame, body, model),
        Page::Help => page(frame, body, "keys", HELP.lines().map(Line::from).collect()),
    }
}

fn headline<'a>(model: &'a Model, status: &'a Status) -> Line<'a> {
    let name = model.project.as_deref().unwrap_or(&status.name);
    let colour = match model.state {
        State::Empty => Color::Reset,
        State::Running => Color::Cyan,
        State::Finished => Color::Green,
        State::Failed => Color::Red,
    };
    let mut spans = vec![name.bold(), "  ".into(), text::state(model).fg(colour)];
    let warnings = text::silence(model, status.silent).into_iter().chain(status.notice.clone());
    for warning in warnings {
        spans.extend([" · ".into(), warning.fg(Color::Yellow)]);
    }
    for part in text::place(model) {
        spans.extend([" · ".into(), Span::raw(part)]);
    }
    if let Some((at, all)) = status.place.filter(|(_, all)| *all > 1) {
        spans.extend([" · ".into(), format!("run {at} of {all}").into()]);
    }
    Line::from(spans)
}

fn keys(view: &View) -> Line<'static> {
    let axis = match view.axis {
        Axis::Step => "step",
        Axis::Time => "time",
        Axis::Epoch => "epoch",
    };
    let smoothing = view.smoothing();
    let is_log = if view.is_log { "log" } else { "linear" };
    let zoom = format!("{:.0} %", view.zoom() * 100.0);
    let pairs = [
        ("q", "quit".to_owned()),
        ("?", "help".to_owned()),
        ("↑↓", "series".to_owned()),
        ("l", is_log.to_owned()),
        ("s", format!("smooth {smoothing}")),
        ("x", axis.to_owned()),
        ("z", zoom),
        ("space", "pin".to_owned()),
        ("c", "settings".to_owned()),
    ];
    let spans = pairs.into_iter().flat_map(|(key, meaning)| {
        [key.bold(), Span::raw(" "), Span::from(meaning).dim(), Span::raw("  ")]
    });
    Line::from_iter(spans)
}

fn charts_and_tables(frame: &mut Frame<'_>, area: Rect, model: &Model, view: &View) {
    let tables = tables(model, view, area.width);
    let rows = tables.iter().map(|(_, rows)| rows.len() + 1).max().unwrap_or(0);
    // The charts get most of the height.
    let rows = if area.height < 12 { 0 } else { rows.min(usize::from(area.height) * 2 / 5) as u16 };
    let [above, below] =
        Layout::vertical([Constraint::Min(0), Constraint::Length(rows)]).areas(area);
    let list = names_width(model, area.width);
    let [charts, list] =
        Layout::horizontal([Constraint::Min(0), Constraint::Length(list.unwrap_or(0))])
            .areas(above);
    names(frame, list, model, view);
    let panels = view.charts(model);
    for (panel, area) in panels.iter().rev().zip(places(charts, panels.len()).into_iter().rev()) {
        chart::draw(frame, area, model, view, panel);
    }
    if panels.is_empty() && model.state == State::Empty {
        frame.render_widget(Paragraph::new("waiting for the run's first values").dim(), charts);
    }
    let half = usize::from(below.width) / 2;
    let columns = match tables.as_slice() {
        // Each table has its width where halves are too narrow for one of them.
        [(_, first), (_, second)] if widest(first).max(widest(second)) > half => {
            let first = (widest(first) + GAP) as u16;
            vec![Constraint::Length(first), Constraint::Min(0)]
        }
        tables => vec![Constraint::Fill(1); tables.len()],
    };
    let columns = Layout::horizontal(columns).split(below);
    for ((title, lines), area) in tables.into_iter().zip(columns.iter()) {
        let room = usize::from(area.width);
        page(
            frame,
            *area,
            &title,
            lines.into_iter().map(|line| Line::from(begin(line, room))).collect(),
        );
    }
}

/// Returns the width of the widest line.
fn widest(lines: &[String]) -> usize {
    lines.iter().map(|line| text::width(line)).max().unwrap_or(0)
}

/// Cuts off the end of a line that does not fit, and marks the cut.
fn begin(line: String, room: usize) -> String {
    if text::width(&line) <= room {
        return line;
    }
    line.chars().take(room.saturating_sub(1)).chain(['…']).collect()
}

/// Returns the areas of charts: as many as fit with a sufficient height, the last ones first.
fn places(area: Rect, charts: usize) -> Vec<Rect> {
    let across = if area.width >= 100 && charts > 1 { 2 } else { 1 };
    let down = charts.div_ceil(across).min((usize::from(area.height) / CHART).max(1));
    let lines = Layout::vertical(vec![Constraint::Fill(1); down]).split(area);
    let mut places: Vec<Rect> = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let left = charts.min(across * down).saturating_sub(at * across).min(across);
        places.extend(Layout::horizontal(vec![Constraint::Fill(1); left]).split(*line).iter());
    }
    places
}

/// Returns the tables to show, with their titles: epochs and another one beside them if the width suffices, otherwise
/// one after the other.
fn tables(model: &Model, view: &View, width: u16) -> Vec<(String, Vec<String>)> {
    let epochs = (!model.epochs.rows().is_empty()).then(|| {
        let rows = text::epoch_rows(model, view.scroll, MOST_ROWS);
        let mut lines = text::aligned(&rows);
        // The last rows matter, below the names of the columns.
        let shown = lines.split_off(1);
        let title = match view.scroll {
            0 => "epochs".to_owned(),
            scroll => format!("epochs, {scroll} more below"),
        };
        (title, lines.into_iter().chain(shown.into_iter().rev()).collect())
    });
    let others = model.tables.iter().filter_map(|(name, table)| {
        let rows = text::table_rows(table.as_ref()?);
        Some((name.clone(), text::aligned(&rows)))
    });
    let others: Vec<_> = others.collect();
    let at = |tables: &[(String, Vec<String>)]| {
        view.table.checked_rem(tables.len()).map(|at| tables[at].clone())
    };
    let beside: Vec<_> = epochs.iter().cloned().chain(at(&others)).collect();
    let needed = beside.iter().map(|(_, lines)| widest(lines) + GAP).sum::<usize>();
    if usize::from(width) + GAP >= needed {
        beside
    } else {
        let all: Vec<_> = epochs.into_iter().chain(others).collect();
        at(&all).into_iter().collect()
    }
}

/// Returns a width of at most a third of the screen; `None` if that is not enough.
fn names_width(model: &Model, screen: u16) -> Option<u16> {
    let longest = shown(model).map(text::width).max()?;
    let most = usize::from(screen) / 3;
    (most >= NUMBER * 2).then(|| (longest + NUMBER + 3).min(most) as u16)
}

/// Draws the list of the curves with their last values; the selected one is highlighted, and pinned ones have a mark.
fn names(frame: &mut Frame<'_>, area: Rect, model: &Model, view: &View) {
    if area.width == 0 {
        return;
    }
    let block = Block::new().borders(Borders::TOP | Borders::LEFT).title(" series ").dim();
    let inside = block.inner(area);
    frame.render_widget(block, area);
    let chosen = view.chosen(model);
    let all: Vec<&str> = shown(model).collect();
    let at = all.iter().position(|name| Some(*name) == chosen).unwrap_or(0);
    let height = usize::from(inside.height);
    let first =
        (at + 1).saturating_sub(height.max(1) * 2 / 3).min(all.len().saturating_sub(height));
    let room = usize::from(inside.width).saturating_sub(NUMBER + 2);
    let lines = all.iter().skip(first).take(height).map(|name| {
        let last = model.curves.get(*name).and_then(|curve| curve.last()).map(text::number);
        let mark = if view.pinned.iter().any(|it| it == name) { '•' } else { ' ' };
        let line = format!("{mark}{:room$} {:>NUMBER$}", cut(name, room), last.unwrap_or_default());
        let style = if Some(*name) == chosen { Modifier::REVERSED } else { Modifier::empty() };
        Line::styled(line, style)
    });
    frame.render_widget(Paragraph::new(lines.collect::<Vec<_>>()), inside);
}

/// Cuts off the beginning: the end of a name is more distinctive.
fn cut(name: &str, room: usize) -> String {
    let count = name.chars().count();
    if count <= room {
        return name.to_owned();
    }
    let kept = name.chars().skip(count + 1 - room.max(1));
    std::iter::once('…').chain(kept).collect()
}

fn settings(frame: &mut Frame<'_>, area: Rect, model: &Model) {
    let heading = |text: &'static str| Line::from(text).bold();
    let row = |(name, value): (&String, &String)| Line::from(format!("  {name} = {value}"));
    let mut lines = vec![heading("settings")];
    lines.extend(model.config.iter().map(|(name, value)| row((name, value))));
    if !model.texts.is_empty() {
        lines.push(heading("texts"));
        lines.extend(model.texts.iter().map(row));
    }
    if model.broken > 0 {
        lines.push(heading("unreadable lines"));
        lines
            .push(Line::from(format!("  {}, the last one: {}", model.broken, model.broken_reason)));
    }
    if model.left_out > 0 {
        lines.push(Line::from(format!(
            "{} of too many names left out",
            counted(model.left_out, "value")
        )));
    }
    page(frame, area, "settings", lines);
}

fn page(frame: &mut Frame<'_>, area: Rect, title: &str, lines: Vec<Line<'_>>) {
    let block =
        Block::new().borders(Borders::TOP).title(format!(" {title} ")).border_style(Modifier::DIM);
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

/// Width of a number: `-1.23457e-12`.
const NUMBER: usize = 12;
/// Minimum space between two tables.
const GAP: usize = 3;
/// Height of a small chart in lines.
const CHART: usize = 7;
/// Maximum number of epochs that are drawn: more than any terminal has lines.
const MOST_ROWS: usize = 400;
const HELP: &str = "\
q, Esc, Ctrl-C   quit
arrows, Tab      choose a series; those of one family (loss, train_loss, valid_loss) share a chart
space            pin the series: it keeps a chart of its own
l                logarithmic or linear values
s                smoothing: exponential moving average, 0, 0.6, 0.9 or 0.99, as in TensorBoard
x                steps, time or epochs along the axis
z                the whole run, its last half, or its last tenth
t                next table
PgUp, PgDn       scroll the table of epochs
[, ]             previous or next run of the folder
c                settings, texts and unreadable lines
Ctrl-Z, Ctrl-L   suspend; draw again";

#[cfg(test)]
mod tests;
