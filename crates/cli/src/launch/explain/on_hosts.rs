//! A list of hosts, and how many ranks each is to start.

use std::ffi::OsString;
use std::io::{self, Write};

use brigade_launch::hosts::{HostSpec, HostsOptions};
use brigade_launch::{LaunchOptions, NprocSpec, Program};
use serde_json::{Map, Value, json};

use super::{built, quoted};

/// Agents on a list of hosts. What they find there is for them to say.
pub(super) struct OnHosts<'a> {
    pub(super) hosts: &'a HostsOptions,
    pub(super) options: &'a LaunchOptions,
}

impl OnHosts<'_> {
    pub(super) fn text(&self, out: &mut impl Write) -> io::Result<()> {
        let hosts = &self.hosts.hosts;
        writeln!(out, "\nhosts: {}, each by {}", hosts.len(), self.client())?;
        let mut first = Some(0);
        for host in hosts {
            let (count, last) = self.count(host.slots, first);
            let numbers = match (first, last) {
                (Some(first), Some(last)) if first == last => format!(", number {first}"),
                (Some(first), Some(last)) => format!(", numbers {first} to {last}"),
                _ => String::new(),
            };
            writeln!(out, "  {}  {count}{numbers}", host.destination())?;
            first = last.map(|last| last + 1);
        }
        if let Some(min) = self.hosts.min_hosts {
            writeln!(out, "the job goes on while {min} of them are left")?;
        }
        if let Some(folder) = &self.hosts.workdir {
            writeln!(out, "in {}", folder.display())?;
        }
        writeln!(out, "every rank\n  {}", self.command().join(" "))?;
        for (name, value) in &self.options.env {
            writeln!(out, "  {name}={}", quoted(value))?;
        }
        Ok(())
    }

    pub(super) fn json(&self, answer: &mut Map<String, Value>) {
        let host = |it: &HostSpec| {
            let (count, _) = self.count(it.slots, None);
            json!({ "host": it.destination(), "ranks": count })
        };
        answer.insert("ssh".to_owned(), self.client().into());
        answer.insert("hosts".to_owned(), self.hosts.hosts.iter().map(host).collect());
        answer.insert("min_hosts".to_owned(), self.hosts.min_hosts.into());
        answer.insert("command".to_owned(), self.command().into());
    }

    fn client(&self) -> &str {
        self.hosts.ssh_command.as_deref().unwrap_or("ssh")
    }

    /// How many ranks a host has, and the number of its last one where that is known.
    fn count(&self, slots: Option<usize>, first: Option<usize>) -> (String, Option<usize>) {
        let count = match (slots, self.options.nproc) {
            (Some(count), _) | (None, NprocSpec::Count(count)) => count,
            (None, other) => return (format!("{other} ranks"), None),
        };
        let ranks = if count == 1 { "rank" } else { "ranks" };
        (format!("{count} {ranks}"), first.map(|first| (first + count).saturating_sub(1)))
    }

    fn command(&self) -> Vec<String> {
        let words = |word: &OsString| word.to_string_lossy().into_owned();
        let program = match &self.options.program {
            Program::Cargo(target) => built(&target.name),
            Program::Module(name) => format!("python -u -m {}", words(name)),
            Program::Auto(name) | Program::Executable(name) => words(name),
        };
        [program].into_iter().chain(self.options.args.iter().map(words)).collect()
    }
}
