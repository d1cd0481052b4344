//! `brigade launch --explain`: shows what would be started, and the source of each value.

use std::io::{self, Write};

use brigade_config::{Layer, SettingsPath};
use brigade_launch::LaunchOptions;
use brigade_rank_env::text::escaped;
use serde_json::{Value, json};

use here::Here;
use on_hosts::OnHosts;

use super::Job;
use super::sharding::FromPlugins;
use crate::config::show;

mod here;
mod on_hosts;

/// Data of an explanation.
pub(super) struct Explanation<'a> {
    pub(super) layers: &'a Layer,
    pub(super) file: Option<&'a SettingsPath>,
    pub(super) options: &'a LaunchOptions,
    pub(super) job: &'a Job,
    pub(super) sharding: Option<&'a FromPlugins>,
}

impl Explanation<'_> {
    /// Writes the answer to `out`. A reader that closes the pipe ends the answer without an error.
    pub(super) fn write(&self, in_json: bool, out: impl Write) -> io::Result<()> {
        let mut out = io::BufWriter::new(out);
        let written = if in_json { self.json(&mut out) } else { self.text(&mut out) };
        match written.and_then(|()| out.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            written => written,
        }
    }

    fn text(&self, out: &mut impl Write) -> io::Result<()> {
        show::text(self.layers, self.file, show::Which::Set, out)?;
        if let Some(sharding) = self.sharding {
            writeln!(out, "\nsharding of a Rust program, from {}:", escaped(&sharding.what))?;
            for line in sharding.text().lines() {
                writeln!(out, "  {line}")?;
            }
        }
        match self.job {
            Job::Here(plan) => Here { plan }.text(out)?,
            Job::OnHosts(plan) => OnHosts { plan, options: self.options }.text(out)?,
        }
        writeln!(out, "\nnothing was started")
    }

    fn json(&self, out: &mut impl Write) -> io::Result<()> {
        let mut answer = show::json(self.layers, self.file);
        if let Some(sharding) = self.sharding {
            let notes: Vec<String> = sharding.notes.iter().map(ToString::to_string).collect();
            let object =
                json!({"setting": sharding.setting(), "from": sharding.what, "notes": notes});
            answer.insert("sharding".to_owned(), object);
        }
        match self.job {
            Job::Here(plan) => Here { plan }.json(&mut answer),
            Job::OnHosts(plan) => OnHosts { plan, options: self.options }.json(&mut answer),
        }
        serde_json::to_writer_pretty(&mut *out, &Value::Object(answer))?;
        writeln!(out)
    }
}

fn built(name: &str) -> String {
    format!("(what cargo makes of {name})")
}

/// Quotes a value with blanks, so that its beginning and end are visible.
fn quoted(value: &str) -> String {
    let is_words_of_ours = value.starts_with('(') && value.ends_with(')');
    if (value.contains(char::is_whitespace) && !is_words_of_ours) || value.is_empty() {
        format!("{value:?}")
    } else {
        escaped(value).to_string()
    }
}
