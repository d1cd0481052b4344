//! `brigade launch --hosts … --explain`: how each host would be reached, and what it would be told.

use std::io::{self, Write};

use brigade_config::{Layer, Place};
use brigade_launch::hosts::{HostsPlan, PlannedHost};
use brigade_launch::{LaunchOptions, NprocSpec, Program};
use serde_json::{Value, json};

use super::{answer, quoted};
use crate::config::show;

/// What there is to explain. What is where on the hosts is for them to say.
pub(crate) struct Explanation<'a> {
    pub(crate) layers: &'a Layer,
    pub(crate) file: Option<&'a Place>,
    pub(crate) plan: &'a HostsPlan,
    pub(crate) options: &'a LaunchOptions,
}

impl Explanation<'_> {
    /// Answers on `out`. A reader that has seen enough ends the answer, without an error.
    pub(crate) fn write(&self, in_json: bool, out: impl Write) -> io::Result<()> {
        answer(out, |out| if in_json { self.json(out) } else { self.text(out) })
    }

    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        show::text(self.layers, self.file, show::Which::Set, out)?;
        writeln!(
            out,
            "\nhosts: {}, all of which are asked before any starts",
            self.plan.hosts.len()
        )?;
        for host in &self.plan.hosts {
            let from = match host.first_rank {
                Some(first) => format!("from rank {first}"),
                None => "after those before it".to_owned(),
            };
            writeln!(out, "  {}: {} {from}", host.spec, ranks(host.nproc))?;
            if host.is_here {
                writeln!(out, "    is this machine, and needs no ssh")?;
            } else {
                writeln!(out, "    {} (a line that starts brigade)", self.way(host).join(" "))?;
            }
        }
        if self.plan.min_hosts < self.plan.hosts.len() {
            writeln!(out, "  goes on with {} of them", self.plan.min_hosts)?;
        }
        writeln!(out, "  every rank")?;
        writeln!(out, "    {}", self.command().join(" "))?;
        writeln!(out, "    in {}", self.plan.workdir.display())?;
        for (name, value) in &self.options.env {
            writeln!(out, "    {name}={}", quoted(value))?;
        }
        if !self.plan.variables.is_empty() {
            writeln!(out, "    with {} of this environment", self.passed().join(", "))?;
        }
        if self.plan.sync {
            writeln!(out, "  what is missing there is copied")?;
        }
        writeln!(out, "\nnothing was started")
    }

    fn json(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut answer = show::json(self.layers, self.file);
        let host = |host: &PlannedHost| {
            json!({
                "host": host.spec.to_string(),
                "nproc": host.nproc.to_string(),
                "first_rank": host.first_rank,
                "ssh": (!host.is_here).then(|| self.plan.command(host)),
            })
        };
        let hosts: Vec<Value> = self.plan.hosts.iter().map(host).collect();
        answer.insert("hosts".to_owned(), hosts.into());
        answer.insert("min_hosts".to_owned(), self.plan.min_hosts.into());
        answer.insert("command".to_owned(), self.command().into());
        answer.insert("workdir".to_owned(), self.plan.workdir.to_string_lossy().into());
        answer.insert("passed".to_owned(), self.passed().into());
        answer.insert("sync".to_owned(), self.plan.sync.into());
        serde_json::to_writer_pretty(&mut *out, &Value::Object(answer))?;
        writeln!(out)
    }

    /// The command but for its last word, the line for the shell there.
    fn way(&self, host: &PlannedHost) -> Vec<String> {
        let mut words = self.plan.command(host);
        words.pop();
        words
    }

    /// As the user has said it.
    fn command(&self) -> Vec<String> {
        let program = match &self.options.program {
            Program::Auto(name) | Program::Executable(name) => name.to_string_lossy().into_owned(),
            Program::Module(name) => format!("-m {}", name.display()),
            Program::Cargo(target) => format!("(what cargo makes of {})", target.name),
        };
        let arguments = self.options.args.iter().map(|it| it.to_string_lossy().into_owned());
        [program].into_iter().chain(arguments).collect()
    }

    fn passed(&self) -> Vec<String> {
        self.plan.variables.iter().map(|it| it.0.to_string_lossy().into_owned()).collect()
    }
}

fn ranks(nproc: NprocSpec) -> String {
    match nproc {
        NprocSpec::Count(1) => "1 rank".to_owned(),
        NprocSpec::Count(count) => format!("{count} ranks"),
        NprocSpec::Auto => "a rank for each GPU, else for each core,".to_owned(),
        NprocSpec::Gpu => "a rank for each GPU".to_owned(),
        NprocSpec::Cpu => "a rank for each core".to_owned(),
    }
}
