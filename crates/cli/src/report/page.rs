//! Sections of the HTML page.

use std::fmt::Write;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use brigade_plot::{Chart, Plot, escape_markup};
use brigade_rank_env::text::counted;
use brigade_track::Outcome;

use super::Mode;
use super::best::Best;
use super::charts;
use super::epochs::TIME;
use super::html::{Cell, LONGEST, Table, clock, date, short, shortened};
use super::pictures::Pictures;
use super::record::{Record, Series};

/// Returns the whole page. It refers to nothing outside, and forbids a browser to load or run anything.
pub(super) fn page(record: &Record, best: &Option<Best>, pictures: &[Pictures]) -> String {
    let best = best.as_ref();
    let title = escape_markup(&record.project());
    let (training, machine) = charts::of_steps(record);
    let body = [
        header(record, best),
        section("Epochs", &(charts_html(&charts::of_epochs(record, best)) + &epochs(record, best))),
        section("Curves", &charts_html(&training)),
        section("Speed and memory", &charts_html(&machine)),
        section("Values", &values(record)),
        section("Tables", &tables(record)),
        section("Pictures", &pictures_html(pictures)),
        section("Texts", &texts(record)),
        section("Configuration", &settings(record, false)),
        section("Environment", &settings(record, true)),
        section("Notes", &notes(record)),
    ];
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; img-src data:; \
         style-src 'unsafe-inline'\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{}</body>\n</html>\n",
        body.concat()
    )
}

fn section(title: &str, content: &str) -> String {
    if content.is_empty() {
        return String::new();
    }
    format!("<section>\n<h2>{title}</h2>\n{content}</section>\n")
}

fn header(record: &Record, best: Option<&Best>) -> String {
    let (class, state) = match record.ends.last() {
        _ if record.is_open => ("running", "running, or ended without an end record"),
        Some(end) if end.outcome == Outcome::Finished => ("finished", "finished"),
        Some(_) => ("failed", "failed"),
        None => ("running", "without a start or an end"),
    };
    let mut facts = Table::new([]);
    let mut fact = |name: &str, value: String| {
        facts.row([Cell::text(name), Cell::text(value)], false);
    };
    fact("file", record.path.display().to_string());
    if let Some((first, last)) = record.times {
        fact("first line", date(first));
        fact("last line", format!("{}, {} later", date(last), clock(last - first)));
    }
    if let Some(step) = record.last_step {
        fact("last step", step.to_string());
    }
    if record.starts.len() > 1 {
        for (index, start) in record.starts.iter().enumerate() {
            let time = start.time.map_or_else(|| "at an unknown time".to_owned(), date);
            let step = start.step.map_or_else(String::new, |step| format!(", from step {step}"));
            fact(&format!("start {}", index + 1), format!("{time}{step}"));
        }
    }
    for end in record.ends.iter().filter(|_| record.ends.len() > 1) {
        let time = end.time.map_or_else(|| "at an unknown time".to_owned(), date);
        let how = if end.outcome == Outcome::Finished { "finished" } else { "failed" };
        fact(how, time);
    }
    if let Some(best) = best {
        let which = match (best.epoch, best.step) {
            (Some(epoch), _) => format!("best epoch {}", short(epoch)),
            (None, step) => format!("best step {}", short(step.unwrap_or(0.0))),
        };
        let mode = if best.mode == Mode::Min { "least" } else { "greatest" };
        fact(&which, format!("{} = {}, the {mode}", best.monitor, short(best.value)));
    }
    // Logged by the Learner's `SaveModel`.
    if let Some(saved) = record.texts.get("best_checkpoint") {
        fact("best checkpoint", saved.last.clone());
    }
    let project = escape_markup(&record.project());
    format!("<h1>{project} <span class=\"state {class}\">{state}</span></h1>\n{}", facts.html())
}

fn charts_html(charts: &[Chart]) -> String {
    if charts.is_empty() {
        return String::new();
    }
    let shown: String = charts.iter().take(MOST_CHARTS).map(Plot::to_svg).collect();
    let mut html = format!("<div class=\"charts\">\n{shown}</div>\n");
    if charts.len() > MOST_CHARTS {
        html += &note(&format!("{} more curves are left out.", charts.len() - MOST_CHARTS));
    }
    html
}

fn epochs(record: &Record, best: Option<&Best>) -> String {
    let epochs = &record.epochs;
    if epochs.len() == 0 {
        return String::new();
    }
    let columns = epochs.columns.iter().map(String::as_str);
    let mut table = Table::new(["epoch"].into_iter().chain(columns));
    let earlier = epochs.len().saturating_sub(MOST_ROWS);
    for (epoch, row) in epochs.rows().skip(earlier) {
        let cells = epochs.columns.iter().map(|name| match row.values.get(name) {
            Some(value) if name == TIME && value.number().is_some() => {
                Cell::seconds(value.number().unwrap_or(f64::NAN))
            }
            Some(value) => Cell::value(value),
            None => Cell::text(""),
        });
        let is_best = best.is_some_and(|best| best.epoch == Some(epoch));
        table.row([Cell::number(epoch)].into_iter().chain(cells), is_best);
    }
    let mut html = table.html();
    if earlier > 0 {
        html += &note(&format!("{earlier} earlier epochs are left out."));
    }
    html
}

/// Returns the last, least and greatest value of every number.
fn values(record: &Record) -> String {
    if record.series.is_empty() {
        return String::new();
    }
    let mut table = Table::new(["name", "values", "last", "least", "at", "greatest", "at"]);
    for (name, series) in &record.series {
        let at = |place: f64| Cell::number(place);
        let finite = || series.points.iter().filter(|point| point.1.is_finite());
        let least = finite().min_by(|one, other| one.1.total_cmp(&other.1));
        let greatest = finite().max_by(|one, other| one.1.total_cmp(&other.1));
        let (least, greatest) = (least.copied(), greatest.copied());
        let nothing = (f64::NAN, f64::NAN);
        let last = series.points.last().copied().unwrap_or(nothing);
        let (least, greatest) = (least.unwrap_or(nothing), greatest.unwrap_or(nothing));
        table.row(
            [
                Cell::text(name),
                Cell::number(count(series)),
                Cell::number(last.1),
                Cell::number(least.1),
                at(least.0),
                Cell::number(greatest.1),
                at(greatest.0),
            ],
            false,
        );
    }
    table.html()
}

/// Counts the values without the gaps between starts.
fn count(series: &Series) -> f64 {
    series.points.iter().filter(|point| !point.0.is_nan()).count() as f64
}

fn tables(record: &Record) -> String {
    let mut html = String::new();
    for (name, logged) in &record.tables {
        let (rows, columns) = (logged.last.rows(), logged.last.columns());
        let times = match logged.count {
            1 => String::new(),
            count => format!(", the last of {count}"),
        };
        let step = logged.step.map_or_else(String::new, |step| format!(", step {step}"));
        let _ = writeln!(html, "<h3>{}{times}{step}</h3>", escape_markup(name));
        let mut table = Table::new(columns.iter().take(MOST_COLUMNS).map(String::as_str));
        for row in rows.iter().take(MOST_ROWS) {
            table.row(row.iter().take(MOST_COLUMNS).map(Cell::value), false);
        }
        html += &table.html();
        if rows.len() > MOST_ROWS || columns.len() > MOST_COLUMNS {
            let (rows, columns) = (rows.len(), columns.len());
            html += &note(&format!(
                "The first of {} and {}.",
                counted(rows, "row"),
                counted(columns, "column")
            ));
        }
    }
    html
}

fn pictures_html(pictures: &[Pictures]) -> String {
    let mut html = String::new();
    for named in pictures {
        let name = escape_markup(&named.name);
        let _ = writeln!(html, "<h3>{name}</h3>\n<div class=\"pictures\">");
        for picture in &named.shown {
            let step = picture.step.map_or_else(String::new, |step| format!("step {step}"));
            let _ = write!(html, "<figure><img alt=\"{name}\" src=\"data:image/png;base64,");
            STANDARD.encode_string(&picture.bytes, &mut html);
            let _ = writeln!(html, "\"><figcaption>{step}</figcaption></figure>");
        }
        html.push_str("</div>\n");
        for reason in &named.notes {
            html += &note(reason);
        }
    }
    html
}

fn texts(record: &Record) -> String {
    if record.texts.is_empty() {
        return String::new();
    }
    let mut table = Table::new(["name", "step", "last text"]);
    for (name, logged) in &record.texts {
        let step = logged.step.map_or_else(String::new, |step| step.to_string());
        let text = shortened(&logged.last, LONGEST);
        table.row([Cell::text(name), Cell::text(step), Cell::text(text)], false);
    }
    table.html()
}

/// Returns the settings of each start. The key `brigade` contains the environment.
fn settings(record: &Record, environment: bool) -> String {
    let mut html = String::new();
    let mut before = Vec::new();
    for (index, start) in record.starts.iter().enumerate() {
        let mut settings = start.config.flat();
        settings.retain(|(name, _)| name.starts_with("brigade.") == environment);
        if settings.is_empty() || settings == before {
            continue;
        }
        if index > 0 {
            let _ = writeln!(html, "<h3>From start {}</h3>", index + 1);
        }
        let mut table = Table::new([]);
        for (name, value) in settings.iter().take(MOST_ROWS) {
            let name = if environment { name.trim_start_matches("brigade.") } else { name };
            table.row([Cell::text(name), Cell::value(value)], false);
        }
        html += &table.html();
        if settings.len() > MOST_ROWS {
            html += &note(&format!("The first of {} settings.", settings.len()));
        }
        before = settings;
    }
    html
}

fn notes(record: &Record) -> String {
    let mut html = String::new();
    if record.is_cut {
        html += &note("The last line is not whole: it was being written, or the run was killed.");
    }
    for (line, reason) in &record.broken {
        html += &note(&format!("Line {line} cannot be read: {}", shortened(reason, 300)));
    }
    let more = record.broken_count - record.broken.len() as u64;
    if more > 0 {
        html += &note(&format!("{} cannot be read.", counted(more, "more line")));
    }
    if record.left_out > 0 {
        let count = record.left_out;
        html += &note(&format!(
            "{} under further names: left out, because there are too many names.",
            counted(count, "value")
        ));
    }
    html
}

fn note(text: &str) -> String {
    format!("<p class=\"note\">{}</p>\n", escape_markup(text))
}

const MOST_CHARTS: usize = 100;
const MOST_ROWS: usize = 200;
const MOST_COLUMNS: usize = 30;
const STYLE: &str = include_str!("style.css");
