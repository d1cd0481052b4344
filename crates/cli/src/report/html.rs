//! Parts of HTML pages. All text from outside goes through [`escape_markup`].

use std::time::{Duration, UNIX_EPOCH};

use brigade_plot::escape_markup;
use brigade_track::Value;

/// Table of texts, which are escaped here. A column of numbers is aligned right.
pub(super) struct Table {
    head: String,
    body: String,
}

impl Table {
    pub(super) fn new<'a>(columns: impl IntoIterator<Item = &'a str>) -> Self {
        let head = columns.into_iter().map(|name| format!("<th>{}</th>", escape_markup(name)));
        Self { head: head.collect(), body: String::new() }
    }

    pub(super) fn row(&mut self, cells: impl IntoIterator<Item = Cell>, is_marked: bool) {
        self.body.push_str(if is_marked { "<tr class=\"best\">" } else { "<tr>" });
        for cell in cells {
            let class = if cell.is_number { " class=\"n\"" } else { "" };
            self.body += &format!("<td{class}>{}</td>", escape_markup(&cell.text));
        }
        self.body.push_str("</tr>\n");
    }

    pub(super) fn html(&self) -> String {
        let head = if self.head.is_empty() {
            String::new()
        } else {
            format!("<thead><tr>{}</tr></thead>", self.head)
        };
        let body = &self.body;
        format!("<div class=\"wide\"><table>{head}<tbody>\n{body}</tbody></table></div>\n")
    }
}

/// Content of a cell.
pub(super) struct Cell {
    text: String,
    is_number: bool,
}

impl Cell {
    pub(super) fn text(text: impl Into<String>) -> Self {
        Self { text: text.into(), is_number: false }
    }

    pub(super) fn number(value: f64) -> Self {
        Self { text: short(value), is_number: true }
    }

    pub(super) fn value(value: &Value) -> Self {
        match value {
            Value::Float(value) => Self::number(*value),
            Value::Int(value) => Self { text: value.to_string(), is_number: true },
            Value::Bool(_) | Value::Text(_) => Self::text(shortened(&value.text(), LONGEST)),
        }
    }

    /// Formats seconds as in fastai's tables.
    pub(super) fn seconds(value: f64) -> Self {
        if !(0.0..1e9).contains(&value) {
            return Self::number(value);
        }
        Self { text: clock(value), is_number: true }
    }
}

/// Formats a number with about six significant digits.
pub(super) fn short(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return Value::Float(value).text();
    }
    let exponent = value.abs().log10().floor();
    if !(-4.0..9.0).contains(&exponent) {
        let text = format!("{value:.4e}");
        let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        return format!("{}e{exponent}", mantissa.trim_end_matches('0').trim_end_matches('.'));
    }
    let text = format!("{value:.*}", (5.0 - exponent).clamp(0.0, 8.0) as usize);
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

/// Formats a duration: `1:02`, `1:02:03`.
pub(super) fn clock(seconds: f64) -> String {
    let all = seconds.round().max(0.0) as u64;
    let (hours, minutes, seconds) = (all / 3600, all / 60 % 60, all % 60);
    match hours {
        0 => format!("{minutes}:{seconds:02}"),
        _ => format!("{hours}:{minutes:02}:{seconds:02}"),
    }
}

/// Formats seconds since 1970 as a date in UTC.
pub(super) fn date(seconds: f64) -> String {
    // The year 10000 has another form.
    let known = (0.0..253_402_300_800.0).contains(&seconds);
    match Duration::try_from_secs_f64(seconds) {
        Ok(since) if known => {
            humantime::format_rfc3339_seconds(UNIX_EPOCH + since).to_string().replace('T', " ")
        }
        _ => short(seconds),
    }
}

/// Shortens a text to this many letters.
pub(super) fn shortened(text: &str, letters: usize) -> String {
    match text.char_indices().nth(letters) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Maximum number of letters of a text in a table.
pub(super) const LONGEST: usize = 2000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_times_and_dates_are_short() {
        for (value, text) in [
            (0.0, "0"),
            (0.123_456_789, "0.123457"),
            (1234.5, "1234.5"),
            (1e-7, "1e-7"),
            (3e-5, "3e-5"),
            (123_456_789.0, "123456789"),
            (1.5e12, "1.5e12"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(short(value), text);
        }
        assert_eq!((clock(3.7).as_str(), clock(3723.0).as_str()), ("0:04", "1:02:03"));
        assert_eq!(date(1_763_757_346.25), "2025-11-21 20:35:46Z");
        for odd in [-1.0, 1e300, f64::NAN, 253_402_300_800.0] {
            assert_eq!(date(odd), short(odd));
        }
        assert_eq!(shortened("äöü", 2), "äö…");
    }

    #[test]
    fn foreign_text_is_escaped() {
        assert_eq!(
            escape_markup("<a href=\"x\">'&\0"),
            "&lt;a href=&quot;x&quot;&gt;&#39;&amp;\u{fffd}"
        );
    }
}
