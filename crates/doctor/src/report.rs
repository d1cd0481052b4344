//! Reports for people and for programs.

use std::io::{self, Write};

use serde::Serialize;

use crate::cluster::Cluster;
use crate::finding::{Finding, Verdict};

mod matrix;
mod table;

/// Layout of a report for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Style {
    /// Width of the terminal in columns. Longer texts are wrapped.
    pub width: usize,
    /// `true` to use the terminal's colours.
    pub colour: bool,
}

/// Report of an examination: its data and findings.
#[derive(Clone, Copy, Debug)]
pub struct Report<'a> {
    /// Data of the examined hosts.
    pub cluster: &'a Cluster,
    /// Findings, as [`diagnose`](crate::diagnose) returns them.
    pub findings: &'a [Finding],
}

impl Report<'_> {
    /// Returns the worst verdict of the findings.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        self.findings.iter().map(|it| it.verdict).max().unwrap_or(Verdict::Ok)
    }

    /// Writes the table of findings, the speeds between hosts, and the summary.
    ///
    /// # Errors
    /// Returns the errors of the writer.
    pub fn write_table(&self, to: &mut impl Write, style: Style) -> io::Result<()> {
        table::write(to, self.cluster, self.findings, style)?;
        matrix::write(to, self.cluster)?;
        writeln!(to, "\n{}", self.sum())
    }

    /// Writes everything as JSON: facts, routes, findings and the verdict.
    ///
    /// # Errors
    /// Returns the errors of the writer.
    pub fn write_json(&self, to: &mut impl Write) -> io::Result<()> {
        let Cluster { hosts, routes, .. } = self.cluster;
        let whole = Json {
            version: 1,
            brigade: env!("CARGO_PKG_VERSION"),
            verdict: self.verdict(),
            findings: self.findings,
            routes,
            hosts,
        };
        serde_json::to_writer_pretty(&mut *to, &whole)?;
        writeln!(to)
    }

    fn sum(&self) -> String {
        let count = |verdict| self.findings.iter().filter(|it| it.verdict == verdict).count();
        let counts = [
            (count(Verdict::Fail), "failure", "failures"),
            (count(Verdict::Warning), "warning", "warnings"),
            (count(Verdict::Note), "note", "notes"),
        ];
        let parts: Vec<String> = counts
            .iter()
            .filter(|(count, ..)| *count > 0)
            .map(|(count, one, many)| crate::quantity::counted(*count, one, many))
            .collect();
        let place = if self.cluster.hosts.len() > 1 { "these hosts" } else { "this host" };
        let meaning = match self.verdict() {
            Verdict::Fail => format!("a job on {place} would stop or go wrong"),
            Verdict::Warning => format!("a job can run on {place}, perhaps not well"),
            Verdict::Note | Verdict::Ok => format!("nothing on {place} would stop a job"),
        };
        if parts.is_empty() { meaning } else { format!("{}: {meaning}", parts.join(", ")) }
    }
}

#[derive(Serialize)]
struct Json<'a> {
    version: u32,
    brigade: &'static str,
    verdict: Verdict,
    findings: &'a [Finding],
    hosts: &'a [crate::cluster::HostReport],
    routes: &'a [crate::cluster::Route],
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Subject;
    use crate::fixtures;

    fn text(cluster: &Cluster, findings: &[Finding], style: Style) -> String {
        let mut bytes = Vec::new();
        Report { cluster, findings }.write_table(&mut bytes, style).unwrap();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn table() {
        let cluster = fixtures::cluster(2);
        let findings = [
            Finding::fail(Subject::Names, "its own name node2 is 127.0.1.1 (line 2 of /etc/hosts)")
                .on("node2")
                .means("others would connect to themselves")
                .remedy("make the line \"10.0.0.2 node2\"")
                .command("sudo nano /etc/hosts"),
            Finding::warning(Subject::Speed, "900 Mbit/s")
                .on("node1")
                .towards("node2")
                .remedy("look"),
            Finding::ok(Subject::Cpu, "8 cores on each host"),
        ];
        let expected = "\
brigade doctor: 2 hosts, node1 (here), node2

FAIL     names  node2           its own name node2 is 127.0.1.1 (line 2 of
                                /etc/hosts)
                                others would connect to themselves
                                do: make the line \"10.0.0.2 node2\"
                                $ sudo nano /etc/hosts
warning  speed  node1 -> node2  900 Mbit/s
                                do: look
ok       cpu    all             8 cores on each host

round trip and bandwidth from each host (left) to the others
         to node1            to node2
  node1                      0.08 ms 8.9 Gbit/s
  node2  0.08 ms 8.9 Gbit/s

1 failure, 1 warning: a job on these hosts would stop or go wrong
";
        let found = text(&cluster, &findings, Style { width: 76, colour: false });
        assert!(found == expected, "{found}");
        let coloured = text(&cluster, &findings, Style { width: 76, colour: true });
        assert!(coloured.contains("\u{1b}[1;31mFAIL\u{1b}[0m     names"), "{coloured:?}");
    }

    #[test]
    fn a_narrow_terminal_wraps_and_commands_stay_whole() {
        let cluster = fixtures::cluster(1);
        let findings = [Finding::warning(Subject::Disk, "x".repeat(100)).command("y".repeat(100))];
        let found = text(&cluster, &findings, Style { width: 20, colour: false });
        assert!(found.lines().any(|line| line.trim_start() == format!("$ {}", "y".repeat(100))));
        assert!(found.lines().filter(|line| line.contains('x')).count() > 2, "{found}");
    }

    #[test]
    fn one_host_has_no_column_of_hosts() {
        let cluster = fixtures::cluster(1);
        let findings = [Finding::ok(Subject::Cpu, "8 cores")];
        let found = text(&cluster, &findings, Style { width: 80, colour: false });
        let expected = "brigade doctor: node1 (here)\n\nok  cpu  8 cores\n\nnothing on this host would stop a job\n";
        assert!(found == expected, "{found}");
    }

    #[test]
    fn json() {
        let cluster = fixtures::cluster(2);
        let findings = crate::diagnose(&cluster);
        let mut bytes = Vec::new();
        Report { cluster: &cluster, findings: &findings }.write_json(&mut bytes).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        assert_eq!(value["verdict"], "note");
        assert_eq!(value["hosts"][1]["facts"]["host"]["name"], "node2");
        assert_eq!(value["routes"][0]["attempts"][0]["outcome"], "open");
        assert_eq!(value["findings"].as_array().unwrap().len(), findings.len());
    }
}
