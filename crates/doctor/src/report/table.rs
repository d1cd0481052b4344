//! Table of findings: verdict, subject, hosts and texts, wrapped.

use std::io::{self, Write};

use brigade_rank_env::text::escaped;

use super::Style;
use crate::cluster::Cluster;
use crate::finding::{Finding, Verdict};
use crate::quantity::counted;

pub(super) fn write(
    to: &mut impl Write,
    cluster: &Cluster,
    findings: &[Finding],
    style: Style,
) -> io::Result<()> {
    writeln!(to, "brigade doctor: {}\n", escaped(title(cluster)))?;
    let several = cluster.hosts.len() > 1;
    let rows: Vec<(&Finding, String)> = findings
        .iter()
        .map(|finding| {
            (finding, if several { escaped(place(finding)).to_string() } else { String::new() })
        })
        .collect();
    let widest = |texts: &mut dyn Iterator<Item = usize>| texts.max().unwrap_or_default();
    let verdicts = widest(&mut findings.iter().map(|it| it.verdict.word().len()));
    let subjects = widest(&mut findings.iter().map(|it| it.subject.word().len()));
    let places = widest(&mut rows.iter().map(|(_, place)| place.chars().count()));
    let places = if several { places + GAP.len() } else { 0 };
    let indent = verdicts + GAP.len() + subjects + GAP.len() + places;
    let room = style.width.saturating_sub(indent).max(NARROWEST);
    for (finding, place) in rows {
        let word = finding.verdict.word();
        let padding = " ".repeat(verdicts - word.len());
        let subject = finding.subject.word();
        write!(
            to,
            "{}{padding}{GAP}{subject:subjects$}{GAP}{place:places$}",
            style.paint(finding.verdict, word)
        )?;
        let mut lines = wrapped(&finding.found, room, "");
        lines.extend(wrapped(&finding.means, room, ""));
        lines.extend(wrapped(&finding.remedy, room, "do: "));
        // Not wrapped, so that it can be copied.
        lines.extend(
            (!finding.command.is_empty()).then(|| format!("$ {}", escaped(&finding.command))),
        );
        for (index, line) in lines.iter().enumerate() {
            let before = if index == 0 { 0 } else { indent };
            writeln!(to, "{:before$}{line}", "")?;
        }
    }
    Ok(())
}

fn title(cluster: &Cluster) -> String {
    let names: Vec<String> = cluster
        .hosts
        .iter()
        .map(|host| if host.here { format!("{} (here)", host.name) } else { host.name.clone() })
        .collect();
    match names.len() {
        1 => names.concat(),
        count if count <= MAX_NAMES => {
            format!("{}, {}", counted(count, "host", "hosts"), names.join(", "))
        }
        count => format!(
            "{count} hosts, {} to {}",
            names.first().map_or("", String::as_str),
            names.last().map_or("", String::as_str)
        ),
    }
}

fn place(finding: &Finding) -> String {
    let hosts: Vec<&str> = finding.hosts.iter().map(String::as_str).collect();
    let whole = hosts.join(", ");
    let from = match hosts.len() {
        0 => "all".to_owned(),
        count if count > 2 && whole.len() > LONG_PLACE => {
            format!("{}, {} more", hosts[0], count - 1)
        }
        _ => whole,
    };
    match &finding.towards {
        Some(to) => format!("{from} -> {to}"),
        None => from,
    }
}

fn wrapped(text: &str, width: usize, first: &str) -> Vec<String> {
    if text.is_empty() {
        return Vec::new();
    }
    let text = escaped(text).to_string();
    let later = " ".repeat(first.len());
    let options = textwrap::Options::new(width).initial_indent(first).subsequent_indent(&later);
    textwrap::wrap(&text, options).into_iter().map(std::borrow::Cow::into_owned).collect()
}

impl Style {
    fn paint(self, verdict: Verdict, word: &str) -> String {
        let code = match verdict {
            Verdict::Ok => "32",
            Verdict::Note => "36",
            Verdict::Warning => "1;33",
            Verdict::Fail => "1;31",
        };
        if self.colour { format!("\u{1b}[{code}m{word}\u{1b}[0m") } else { word.to_owned() }
    }
}

const GAP: &str = "  ";
/// Minimum width of texts, even where they then exceed the terminal's.
const NARROWEST: usize = 30;
/// Width from which lists of hosts are shortened: the column is as wide as its longest entry.
const LONG_PLACE: usize = 20;
const MAX_NAMES: usize = 8;
