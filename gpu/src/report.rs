//! What ran and how it went, as JSON and as Markdown.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::facts::Machine;

/// All of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// When it began, in UTC.
    pub date: String,
    /// The commit that the programs were built from.
    pub commit: String,
    /// What it ran on.
    pub machine: Machine,
    /// The libtorch that the programs were built for.
    pub built_for: String,
    /// The libtorch that they ran with.
    pub libtorch: String,
    /// The CUDA that this libtorch was made for.
    pub cuda: Option<String>,
    /// The device of the tests: `cuda` or `cpu`.
    pub device: String,
    /// GPUs that CUDA could use.
    pub gpus: usize,
    /// Why there were none.
    pub no_gpu: Option<String>,
    /// The budget.
    pub budget_seconds: f64,
    /// What the run took.
    pub seconds: f64,
    /// The signal that ended it.
    pub interrupted_by: Option<String>,
    /// The parts, in their order.
    pub parts: Vec<Part>,
    /// The rows of the benchmarks, as `brigade-bench --json` writes them.
    pub bench: Vec<Value>,
}

/// A part of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Part {
    /// `facts`, `tests`, `nccl` or `bench`.
    pub name: String,
    /// The time that it could take.
    pub share_seconds: f64,
    /// The time that it took.
    pub seconds: f64,
    /// What ran, and what did not.
    pub ran: Vec<Ran>,
    /// What the reader should know besides.
    pub notes: Vec<String>,
}

/// A test, a program or a benchmark.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ran {
    /// Its name.
    pub name: String,
    /// How it went.
    pub outcome: Outcome,
    /// How long.
    pub seconds: f64,
    /// The reason of a failure, or of why it did not run.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The end of its output, where it did not pass.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub output: String,
}

/// How a test, a program or a benchmark went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// As it should.
    Passed,
    /// It failed.
    Failed,
    /// Its own time limit was over.
    TimedOut,
    /// It ran when the part's time was over.
    Stopped,
    /// There was no time for it.
    NotRun,
    /// It says itself that it cannot run here.
    Ignored,
}

/// How many there are of each outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Passed.
    pub passed: usize,
    /// Failed or over its own time limit.
    pub failed: usize,
    /// Stopped or not run for want of time.
    pub not_run: usize,
    /// Ignored.
    pub ignored: usize,
}

impl Part {
    /// Counts the outcomes.
    #[must_use]
    pub fn counts(&self) -> Counts {
        Counts::of(&self.ran)
    }
}

impl Counts {
    fn of(ran: &[Ran]) -> Self {
        let mut counts = Self::default();
        for one in ran {
            match one.outcome {
                Outcome::Passed => counts.passed += 1,
                Outcome::Failed | Outcome::TimedOut => counts.failed += 1,
                Outcome::Stopped | Outcome::NotRun => counts.not_run += 1,
                Outcome::Ignored => counts.ignored += 1,
            }
        }
        counts
    }
}

impl Report {
    /// 0 where all ran and passed, 1 where something failed, 3 where nothing failed but not all ran, and
    /// 128 + its number after a signal.
    #[must_use]
    pub fn exit_code(&self, signal: Option<i32>) -> u8 {
        let counts = self.parts.iter().map(Part::counts);
        let (failed, not_run) =
            counts.fold((0, 0), |sum, it| (sum.0 + it.failed, sum.1 + it.not_run));
        match signal {
            Some(signal) => 128_u8.saturating_add(u8::try_from(signal).unwrap_or(0)),
            None if failed > 0 => 1,
            None if not_run > 0 => 3,
            None => 0,
        }
    }

    /// Writes `report.json` and `report.md` into a folder.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let json = serde_json::to_string_pretty(self).context("cannot write the report as JSON")?;
        for (name, text) in [("report.json", json + "\n"), ("report.md", self.markdown())] {
            let path = folder.join(name);
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }

    /// The report for readers.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = self.write_markdown(&mut text);
        text
    }

    fn write_markdown(&self, out: &mut String) -> std::fmt::Result {
        let machine = &self.machine;
        let hardware = match machine.gpus.as_slice() {
            [] => machine.processor.clone(),
            [gpu] => gpu.name.clone(),
            [gpu, ..] => format!("{} x {}", machine.gpus.len(), gpu.name),
        };
        writeln!(out, "# Brigade on {hardware}\n")?;
        writeln!(out, "- {}, commit {}", self.date, self.commit)?;
        let memory = machine.gpus.first().and_then(|it| it.memory_mib);
        let memory = memory.map_or_else(String::new, |it| format!(", {} GiB each", it / 1024));
        match &self.no_gpu {
            None => writeln!(
                out,
                "- GPUs that CUDA can use: {}{memory}, driver {}",
                self.gpus,
                machine.driver.as_deref().unwrap_or("unknown")
            )?,
            Some(reason) => writeln!(out, "- no GPU: {reason}; tests ran on the CPU")?,
        }
        writeln!(
            out,
            "- {}, {} cores, {} GiB, Linux {}",
            machine.processor, machine.cores, machine.memory_gib, machine.kernel
        )?;
        let cuda = self.cuda.as_deref().map_or_else(String::new, |it| format!(", CUDA {it}"));
        writeln!(
            out,
            "- libtorch {}{cuda}; the programs were built for {}",
            self.libtorch, self.built_for
        )?;
        writeln!(
            out,
            "- device of the tests: {}; {:.0} s of at most {:.0} s",
            self.device, self.seconds, self.budget_seconds
        )?;
        if let Some(signal) = &self.interrupted_by {
            writeln!(out, "- ended by {signal} before its end")?;
        }
        writeln!(out, "\n| part | passed | failed | no time for | ignored | seconds | share |")?;
        writeln!(out, "|---|---|---|---|---|---|---|")?;
        for part in &self.parts {
            let Counts { passed, failed, not_run, ignored } = part.counts();
            writeln!(
                out,
                "| {} | {passed} | {failed} | {not_run} | {ignored} | {:.0} | {:.0} |",
                part.name, part.seconds, part.share_seconds
            )?;
        }
        for part in &self.parts {
            part.write_markdown(out)?;
        }
        if !self.bench.is_empty() {
            writeln!(out, "\n## Measurements\n")?;
            writeln!(
                out,
                "| what | Brigade | other | ratio | goal | reached |\n|---|---|---|---|---|---|"
            )?;
            for row in &self.bench {
                let cell = |name: &str| row[name].as_str().unwrap_or("-").to_owned();
                let reached = if row["reached"] == Value::Bool(true) { "yes" } else { "no" };
                writeln!(
                    out,
                    "| {} | {} | {} | {} | {} | {reached} |",
                    cell("what"),
                    cell("ours"),
                    cell("other"),
                    cell("ratio"),
                    cell("goal")
                )?;
            }
        }
        Ok(())
    }
}

impl Part {
    fn write_markdown(&self, out: &mut String) -> std::fmt::Result {
        let with = |outcomes: &[Outcome]| -> Vec<&Ran> {
            self.ran.iter().filter(|it| outcomes.contains(&it.outcome)).collect()
        };
        let failed = with(&[Outcome::Failed, Outcome::TimedOut]);
        let stopped = with(&[Outcome::Stopped]);
        let not_run = with(&[Outcome::NotRun]);
        if self.notes.is_empty() && failed.is_empty() && stopped.is_empty() && not_run.is_empty() {
            return Ok(());
        }
        writeln!(out, "\n## {}\n", self.name)?;
        for note in &self.notes {
            writeln!(out, "- {note}")?;
        }
        for one in failed {
            let what = if one.outcome == Outcome::TimedOut { "timed out" } else { "failed" };
            writeln!(
                out,
                "\n### {what}: {}\n\n{} after {:.1} s",
                one.name, one.reason, one.seconds
            )?;
            let lines = one.output.trim_end();
            if !lines.is_empty() {
                writeln!(out, "\n````text\n{lines}\n````")?;
            }
        }
        for one in stopped {
            writeln!(
                out,
                "- running when the part's time was over: {} (for {:.1} s)",
                one.name, one.seconds
            )?;
        }
        if !not_run.is_empty() {
            writeln!(out, "\nNo time was left for {}:\n", not_run.len())?;
            for one in not_run {
                writeln!(out, "- {}", one.name)?;
            }
        }
        Ok(())
    }
}

/// The last lines of a text, with the number of those before.
pub(crate) fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let before = lines.len().saturating_sub(count);
    let shown = lines[before..].join("\n");
    if before == 0 { shown } else { format!("({before} lines before)\n{shown}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ran(name: &str, outcome: Outcome) -> Ran {
        let (reason, output) = ("exit status: 101".to_owned(), "panicked\n".to_owned());
        Ran { name: name.to_owned(), outcome, seconds: 1.0, reason, output }
    }

    fn report(ran: Vec<Ran>) -> Report {
        Report {
            date: "2026-01-02T03:04:05Z".to_owned(),
            commit: "abc".to_owned(),
            machine: Machine { processor: "a processor".to_owned(), ..Machine::default() },
            built_for: "2.11.0".to_owned(),
            libtorch: "2.11.0".to_owned(),
            cuda: Some("13.0".to_owned()),
            device: "cpu".to_owned(),
            gpus: 0,
            no_gpu: Some("there is no NVIDIA driver".to_owned()),
            budget_seconds: 480.0,
            seconds: 12.0,
            interrupted_by: None,
            parts: vec![Part {
                name: "tests".to_owned(),
                share_seconds: 200.0,
                seconds: 10.0,
                ran,
                notes: Vec::new(),
            }],
            bench: Vec::new(),
        }
    }

    #[test]
    fn exit_codes() {
        let code = |outcomes: &[Outcome]| {
            report(outcomes.iter().map(|it| ran("a", *it)).collect()).exit_code(None)
        };
        assert_eq!(code(&[Outcome::Passed, Outcome::Ignored]), 0);
        assert_eq!(code(&[Outcome::Passed, Outcome::NotRun]), 3);
        assert_eq!(code(&[Outcome::Stopped]), 3);
        assert_eq!(code(&[Outcome::NotRun, Outcome::Failed]), 1);
        assert_eq!(code(&[Outcome::TimedOut]), 1);
        assert_eq!(report(Vec::new()).exit_code(Some(2)), 130);
    }

    #[test]
    fn failures_and_what_did_not_run_are_named() {
        let text = report(vec![
            ran("torch::dist a", Outcome::Passed),
            ran("torch::dist b", Outcome::Failed),
            ran("torch::dist c", Outcome::Stopped),
            ran("torch::dist d", Outcome::NotRun),
        ])
        .markdown();
        assert!(text.starts_with("# Brigade on a processor\n"), "{text}");
        assert!(
            text.contains("- no GPU: there is no NVIDIA driver; tests ran on the CPU"),
            "{text}"
        );
        assert!(text.contains("| tests | 1 | 1 | 2 | 0 | 10 | 200 |"), "{text}");
        assert!(
            text.contains("### failed: torch::dist b\n\nexit status: 101 after 1.0 s"),
            "{text}"
        );
        assert!(text.contains("````text\npanicked\n````"), "{text}");
        assert!(text.contains("time was over: torch::dist c (for 1.0 s)"), "{text}");
        assert!(text.contains("No time was left for 1:\n\n- torch::dist d\n"), "{text}");
        assert!(!text.contains("dist a\n"), "{text}");
    }

    #[test]
    fn output_is_cut_to_its_last_lines() {
        assert_eq!(last_lines("a\nb\nc\n", 2), "(1 lines before)\nb\nc");
        assert_eq!(last_lines("a\nb\n", 2), "a\nb");
    }
}
