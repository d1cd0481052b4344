//! List of hosts: the command that reaches each host, and what is passed to it.

use std::ffi::OsString;
use std::io::{self, Write};

use brigade_launch::hosts::{HostsPlan, PlannedHost};
use brigade_launch::{LaunchOptions, NprocSpec, Program};
use brigade_rank_env::text::{counted, escaped};
use brigade_ssh::VariableFile;
use serde_json::{Map, Value, json};

use super::{built, quoted};
use crate::secrets::shown;

/// Agents on a list of hosts. The facts about a host are only known there.
pub(super) struct OnHosts<'a> {
    pub(super) plan: &'a HostsPlan,
    pub(super) options: &'a LaunchOptions,
}

impl OnHosts<'_> {
    pub(super) fn text(&self, out: &mut impl Write) -> io::Result<()> {
        let hosts = &self.plan.hosts;
        writeln!(out, "\nhosts: {}; all of them are checked before any starts", hosts.len())?;
        for host in hosts {
            let devices = host.spec.devices.as_ref().map(|devices| {
                let numbers: Vec<_> = devices.iter().map(ToString::to_string).collect();
                format!(", on GPUs {}", numbers.join(","))
            });
            writeln!(out, "  {}  {}{}", host.spec, ranks(host), devices.unwrap_or_default())?;
            if host.is_here {
                writeln!(out, "    this machine, without ssh")?;
            } else {
                writeln!(out, "    {} (a line that starts brigade)", self.way(host).join(" "))?;
            }
        }
        if self.plan.min_hosts < hosts.len() {
            writeln!(out, "the job continues while {} of them are left", self.plan.min_hosts)?;
        }
        writeln!(out, "every rank\n  {}", self.command().join(" "))?;
        writeln!(out, "  in {}", self.plan.workdir.display())?;
        for (name, value) in &self.options.env {
            writeln!(out, "  {}={}", escaped(name), quoted(shown(name, value)))?;
        }
        let of_files: Vec<&String> =
            self.plan.variable_files.iter().flat_map(|it| &it.names).collect();
        let mut as_here = self.passed();
        as_here.retain(|it| !of_files.contains(&it));
        if !as_here.is_empty() {
            writeln!(out, "  with {} as here", as_here.join(", "))?;
        }
        for file in &self.plan.variable_files {
            writeln!(out, "  with {} of {}", file.names.join(", "), file.path.display())?;
        }
        if self.plan.sync {
            writeln!(out, "what is missing on a host is copied there")?;
        }
        Ok(())
    }

    pub(super) fn json(&self, answer: &mut Map<String, Value>) {
        let host = |host: &PlannedHost| {
            json!({
                "host": host.spec.to_string(),
                "nproc": host.nproc.to_string(),
                "first_rank": host.first_rank,
                "devices": host.spec.devices,
                "ssh": (!host.is_here).then(|| self.plan.command(host)),
            })
        };
        answer.insert("hosts".to_owned(), self.plan.hosts.iter().map(host).collect());
        answer.insert("min_hosts".to_owned(), self.plan.min_hosts.into());
        answer.insert("command".to_owned(), self.command().into());
        answer.insert("workdir".to_owned(), self.plan.workdir.to_string_lossy().into());
        answer.insert("handed_on".to_owned(), self.passed().into());
        let file =
            |it: &VariableFile| json!({ "path": it.path.display().to_string(), "names": it.names });
        let files: Vec<Value> = self.plan.variable_files.iter().map(file).collect();
        answer.insert("variable_files".to_owned(), files.into());
        answer.insert("sync".to_owned(), self.plan.sync.into());
    }

    /// Returns the command without its last word, the line for the remote shell.
    fn way(&self, host: &PlannedHost) -> Vec<String> {
        let mut words = self.plan.command(host);
        words.pop();
        words
    }

    fn command(&self) -> Vec<String> {
        let words = |word: &OsString| word.to_string_lossy().into_owned();
        let program = match &self.options.program {
            Program::Cargo(target) => built(&target.name),
            Program::Module(name) | Program::ModuleIn { name, .. } => {
                format!("python -u -m {}", words(name))
            }
            Program::Auto(name) | Program::Executable(name) => words(name),
        };
        [program].into_iter().chain(self.options.args.iter().map(words)).collect()
    }

    /// Returns names only: a value may be a secret.
    fn passed(&self) -> Vec<String> {
        self.plan.variables.iter().map(|it| it.0.to_string_lossy().into_owned()).collect()
    }
}

/// Describes the ranks of a host: `4 ranks, numbers 2 to 5`.
fn ranks(host: &PlannedHost) -> String {
    let count = match host.nproc {
        NprocSpec::Count(count) => count,
        NprocSpec::Auto => {
            return "a rank for each GPU, or for each core where there is none".into();
        }
        NprocSpec::Gpu => return "a rank for each GPU".into(),
        NprocSpec::Cpu => return "a rank for each core".into(),
    };
    let ranks = counted(count, "rank");
    match host.first_rank {
        Some(first) if count == 1 => format!("{ranks}, number {first}"),
        Some(first) => format!("{ranks}, numbers {first} to {}", first + count - 1),
        None => ranks,
    }
}
