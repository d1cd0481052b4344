//! Choices of the user: changed by keys, read by the drawing.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::model::Model;

#[derive(Debug, Default)]
pub(super) struct View {
    /// Name of the selected curve; `None` until the user selects one.
    chosen: Option<String>,
    /// Further curves with charts of their own.
    pub(super) pinned: Vec<String>,
    pub(super) is_log: bool,
    smoothing: usize,
    pub(super) axis: Axis,
    zoom: usize,
    pub(super) page: Page,
    /// Number of epochs at the end of their table that are scrolled out of sight.
    pub(super) scroll: usize,
    /// Index of the table that is shown.
    pub(super) table: usize,
}

/// Unit of the charts' horizontal axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Axis {
    #[default]
    Step,
    Time,
    Epoch,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Page {
    #[default]
    Charts,
    Settings,
    Help,
}

/// Action that a key requests from the program around the view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeyAction {
    Quit,
    Suspend,
    /// Clear the terminal and draw again.
    Clear,
    NextRun,
    PreviousRun,
    Draw,
    Nothing,
}

impl View {
    pub(super) fn key(&mut self, key: KeyEvent, model: &Model) -> KeyAction {
        if key.kind == KeyEventKind::Release {
            return KeyAction::Nothing;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                KeyCode::Char('c') => KeyAction::Quit,
                KeyCode::Char('z') => KeyAction::Suspend,
                KeyCode::Char('l') => KeyAction::Clear,
                _ => KeyAction::Nothing,
            };
        }
        let goes_to = |page: &mut Page, to| *page = if *page == to { Page::Charts } else { to };
        match key.code {
            KeyCode::Esc if self.page != Page::Charts => self.page = Page::Charts,
            KeyCode::Char('q') | KeyCode::Esc => return KeyAction::Quit,
            KeyCode::Char('?' | 'h') => goes_to(&mut self.page, Page::Help),
            KeyCode::Char('c') => goes_to(&mut self.page, Page::Settings),
            KeyCode::Down | KeyCode::Right | KeyCode::Tab | KeyCode::Char('j') => {
                self.choose(model, 1);
            }
            KeyCode::Up | KeyCode::Left | KeyCode::BackTab | KeyCode::Char('k') => {
                self.choose(model, -1);
            }
            KeyCode::Char(' ' | '\n') | KeyCode::Enter => self.pin(model),
            KeyCode::Char('l') => self.is_log = !self.is_log,
            KeyCode::Char('s') => self.smoothing = (self.smoothing + 1) % SMOOTHING.len(),
            KeyCode::Char('z') => self.zoom = (self.zoom + 1) % ZOOM.len(),
            KeyCode::Char('x') => {
                self.axis = match self.axis {
                    Axis::Step => Axis::Time,
                    Axis::Time => Axis::Epoch,
                    Axis::Epoch => Axis::Step,
                }
            }
            KeyCode::Char('t') => self.table = self.table.wrapping_add(1),
            KeyCode::PageUp => {
                self.scroll = (self.scroll + PAGE).min(model.epochs.rows().len().saturating_sub(1));
            }
            KeyCode::PageDown => self.scroll = self.scroll.saturating_sub(PAGE),
            KeyCode::Char(']' | 'n') => return KeyAction::NextRun,
            KeyCode::Char('[' | 'p') => return KeyAction::PreviousRun,
            _ => return KeyAction::Nothing,
        }
        KeyAction::Draw
    }

    /// Returns the name of the selected curve. Defaults to the loss.
    pub(super) fn chosen<'a>(&self, model: &'a Model) -> Option<&'a str> {
        let mut names = shown(model);
        let chosen = self.chosen.as_deref();
        let by_user = names.clone().find(|name| Some(*name) == chosen);
        by_user
            .or_else(|| names.clone().find(|name| *name == "loss"))
            .or_else(|| names.clone().find(|name| family(name) == "loss"))
            .or_else(|| names.next())
    }

    fn choose(&mut self, model: &Model, by: isize) {
        let names: Vec<&str> = shown(model).collect();
        let Some(chosen) = self.chosen(model) else { return };
        let at = names.iter().position(|name| *name == chosen).unwrap_or(0);
        let to = (at as isize + by).rem_euclid(names.len() as isize);
        self.chosen = Some(names[to as usize].to_owned());
    }

    fn pin(&mut self, model: &Model) {
        let Some(chosen) = self.chosen(model) else { return };
        match self.pinned.iter().position(|name| name == chosen) {
            Some(at) => {
                self.pinned.remove(at);
            }
            None => self.pinned.push(chosen.to_owned()),
        }
    }

    /// Returns the charts: one for each family of curves among the pinned ones and the selected one.
    pub(super) fn charts<'a>(&self, model: &'a Model) -> Vec<Vec<&'a str>> {
        let mut charts: Vec<Vec<&str>> = Vec::new();
        let pinned = self.pinned.iter().filter_map(|name| shown(model).find(|it| it == name));
        for name in pinned.chain(self.chosen(model)) {
            if !charts.iter().any(|chart| chart.contains(&name)) {
                let mut chart: Vec<&str> =
                    shown(model).filter(|it| family(it) == family(name)).collect();
                chart.truncate(CURVES);
                if !chart.contains(&name) {
                    chart.insert(0, name);
                }
                charts.push(chart);
            }
        }
        charts
    }

    /// Returns the weight of earlier values, 0 to 1.
    pub(super) fn smoothing(&self) -> f64 {
        SMOOTHING[self.smoothing]
    }

    /// Returns the part of the run, from its end, that the charts show.
    pub(super) fn zoom(&self) -> f64 {
        ZOOM[self.zoom]
    }
}

/// Returns the names of curves with values.
pub(super) fn shown(model: &Model) -> impl Iterator<Item = &str> + Clone {
    model.curves.iter().filter(|(_, curve)| curve.count() > 0).map(|(name, _)| name.as_str())
}

/// Returns the common part of the names of curves in one chart: `loss`, `train_loss` and `valid/loss` belong to one
/// family, as do `lr_0` and `lr_1`.
fn family(name: &str) -> &str {
    let mut name = name.trim_end_matches(|it: char| it.is_ascii_digit());
    name = name.strip_suffix(['_', '.', '/']).unwrap_or(name);
    for part in ["train", "valid", "val", "eval", "test"] {
        let rest = name.strip_prefix(part).and_then(|rest| rest.strip_prefix(['_', '/', '.']));
        name = rest.filter(|rest| !rest.is_empty()).unwrap_or(name);
    }
    name
}

const SMOOTHING: [f64; 4] = [0.0, 0.6, 0.9, 0.99];
const ZOOM: [f64; 3] = [1.0, 0.5, 0.1];
/// Maximum number of curves in one chart.
const CURVES: usize = 6;
/// Number of epochs that a key scrolls by.
const PAGE: usize = 5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_share_a_chart() {
        for (name, expected) in [
            ("loss", "loss"),
            ("train_loss", "loss"),
            ("valid/loss", "loss"),
            ("val_loss", "loss"),
            ("value_loss", "value_loss"),
            ("lr_0", "lr"),
            ("lr_12", "lr"),
            ("lr", "lr"),
            ("train_", "train"),
            ("42", ""),
        ] {
            assert_eq!(family(name), expected, "{name}");
        }
    }
}
