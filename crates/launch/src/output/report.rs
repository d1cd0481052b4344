//! Final report of a job for the user.

use std::fmt::Write as _;

use brigade_rank_env::text::counted;
use brigade_rendezvous::{Cause, ExitStatus, JobResult, RankFailure};
use nix::sys::signal::Signal;

use super::recent::Recent;
use crate::Outcome;

/// Reason why the job did not simply finish.
#[derive(Debug)]
pub(crate) struct Report {
    /// Summary in one sentence.
    sentence: String,
    /// Further lines of the launcher, some of which continue the line before and are indented.
    notes: Vec<String>,
    /// Error or last output of the rank that failed.
    quote: Option<Quote>,
}

/// Quote of a failed rank's error or output.
#[derive(Debug)]
struct Quote {
    rank: usize,
    quoted: Quoted,
}

#[derive(Debug)]
enum Quoted {
    Nothing,
    /// Content of the rank's error file.
    Error(String),
    /// Name of a stream, and its last lines.
    LastLines(&'static str, Vec<String>),
}

impl Report {
    /// Creates the report of a job's outcome. Returns `None` if there is nothing to report.
    pub(crate) fn of(outcome: &Outcome) -> Option<Self> {
        let plain = |sentence: String| Self { sentence, notes: Vec::new(), quote: None };
        let mut report = match outcome {
            Outcome::OutputClosed => plain("stopped: the reader of the output has gone".to_owned()),
            Outcome::Stopped { signal } => plain(format!("stopped by {}", name(*signal))),
            Outcome::Left { signal } => {
                plain(format!("stopped by {}: this host has left the job", name(*signal)))
            }
            Outcome::Stuck { ranks, otherwise } => match otherwise.as_deref().and_then(Self::of) {
                Some(mut other) => {
                    other.notes.push(ranks.clone());
                    other
                }
                None => plain(ranks.clone()),
            },
            Outcome::Lost { coordinator, how, replaceable } => plain(format!(
                "the connection to {coordinator}, where the job is coordinated, is lost: {how}; the \
                 ranks of this host have been stopped; {}",
                if *replaceable {
                    "no restart was left for another host to take over: give more with --max-restarts"
                } else {
                    "a job that is to outlive any of its hosts needs --rdzv-backend etcd and \
                     --max-restarts"
                }
            )),
            Outcome::Over(JobResult { cause, .. }) => match cause.as_ref()? {
                Cause::Failed(failure) => failed(failure),
                Cause::Interrupted { signal, failure: None } => {
                    plain(format!("stopped by {}", name(*signal)))
                }
                Cause::Interrupted { signal, failure: Some(failure) } => plain(format!(
                    "stopped by {}; the first to fail: {}",
                    name(*signal),
                    failure.summary()
                )),
                Cause::HostLost { host, how } => plain(format!("{host} is lost: {how}")),
                Cause::TooFewHosts { have, need, seconds } => plain(format!(
                    "only {have} of {} came within {seconds} s: start the others sooner, or give more \
                     time (--rdzv-conf join_timeout=SECONDS)",
                    counted(need, "host")
                )),
            },
        };
        report.sentence.truncate(report.sentence.trim_end().len());
        Some(report)
    }

    /// Returns lines for the user, without what has been shown a moment ago: the launcher's own sentence, the rank's
    /// last lines or its error. Each line of the launcher's own begins with `brigade: `, except for the very first one.
    /// `None` when nothing is left.
    pub(crate) fn text(&self, recent: &Recent) -> Option<String> {
        let mut lines = Vec::new();
        let is_said = recent.has_sentence(&self.sentence);
        if !is_said {
            lines.push(self.sentence.clone());
        }
        lines.extend(self.notes.iter().cloned());
        if let Some(Quote { rank, quoted }) = &self.quote {
            // With other lines in between, "its" would be unclear.
            let its = if is_said { format!("rank {rank}'s") } else { "its".to_owned() };
            match quoted {
                Quoted::Nothing if is_said => lines.push(format!("rank {rank} printed nothing")),
                Quoted::Nothing => lines.push("it printed nothing".to_owned()),
                Quoted::Error(error)
                    if recent.has_error(error.lines().next().unwrap_or_default()) => {}
                Quoted::Error(error) => {
                    let mut error = error.lines();
                    lines.push(format!("{its} error: {}", error.next().unwrap_or_default()));
                    lines.extend(error.map(indented));
                }
                Quoted::LastLines(_, last) if recent.has_lines(last.iter().map(String::as_str)) => {
                }
                Quoted::LastLines(stream, last) => {
                    lines.push(format!("{its} last lines on {stream}:"));
                    lines.extend(last.iter().map(|line| indented(line)));
                }
            }
        }
        let mut lines = lines.into_iter();
        let mut text = lines.next()?;
        for line in lines {
            let prefix = if line.starts_with(INDENT) { "" } else { "brigade: " };
            let _ = write!(text, "\n{prefix}{line}");
        }
        Some(text)
    }
}

fn failed(failure: &RankFailure) -> Report {
    let hint = failure.hint.clone().or_else(|| meaning(failure.exit_status).map(str::to_owned));
    let mut notes: Vec<String> = hint.into_iter().collect();
    for fault in &failure.device_faults {
        notes.extend([fault.to_string(), indented(&fault.message)]);
    }
    let quoted = match &failure.error {
        Some(error) => Quoted::Error(error.clone()),
        None if failure.last_lines.is_empty() => Quoted::Nothing,
        None => Quoted::LastLines(failure.stream.name(), failure.last_lines.clone()),
    };
    let quote = Some(Quote { rank: failure.rank, quoted });
    Report { sentence: failure.summary(), notes, quote }
}

fn indented(line: &str) -> String {
    format!("{INDENT}{line}")
}

/// Indentation of quoted lines.
const INDENT: &str = "  ";

/// Returns an explanation of an exit status that users may not know.
fn meaning(exit_status: ExitStatus) -> Option<&'static str> {
    match exit_status {
        ExitStatus::Signal(signal) => match Signal::try_from(signal).ok()? {
            Signal::SIGKILL => Some(
                "an unexpected SIGKILL often means that the kernel ran out of memory: see dmesg",
            ),
            Signal::SIGSEGV => {
                Some("SIGSEGV is a segmentation fault: native code accessed invalid memory")
            }
            Signal::SIGABRT => Some(
                "SIGABRT: the process aborted itself, for a failed assertion or an uncaught C++ \
                 exception",
            ),
            Signal::SIGBUS => Some(
                "SIGBUS often is a full /dev/shm (see `df -h /dev/shm`), or a file that was cut \
                 while it was mapped",
            ),
            Signal::SIGILL => Some("SIGILL: it was built for another kind of processor"),
            Signal::SIGTERM => {
                Some("SIGTERM is a request to stop: by hand, or from a scheduler at a time limit")
            }
            _ => None,
        },
        ExitStatus::Code(127) => Some("127 is the shell's code for a command that was not found"),
        ExitStatus::Code(126) => Some("126 is the shell's code for a file that cannot be run"),
        ExitStatus::Code(137) => Some(
            "137 is the shell's code for SIGKILL (128 + 9), which often is the kernel out of \
             memory: see dmesg",
        ),
        ExitStatus::Code(139) => {
            Some("139 is the shell's code for SIGSEGV (128 + 11), a segmentation fault")
        }
        ExitStatus::Code(134) => Some("134 is the shell's code for SIGABRT (128 + 6)"),
        ExitStatus::Code(135) => Some(
            "135 is the shell's code for SIGBUS (128 + 7), often a full /dev/shm: see \
             `df -h /dev/shm`",
        ),
        ExitStatus::Code(_) => None,
    }
}

/// Returns the signal's name, or its number.
fn name(signal: i32) -> String {
    Signal::try_from(signal).map_or_else(|_| format!("signal {signal}"), |known| known.to_string())
}

#[cfg(test)]
mod tests {
    use brigade_hardware::DeviceFault;
    use brigade_rendezvous::Stream;

    use super::*;

    fn failure(exit_status: ExitStatus) -> RankFailure {
        RankFailure {
            attempt: 0,
            rank: 1,
            local_rank: 1,
            host: "node1".to_owned(),
            pid: 42,
            exit_status,
            at: 0,
            last_lines: Vec::new(),
            stream: Stream::Stderr,
            error: None,
            hint: None,
            device_faults: Vec::new(),
        }
    }

    fn over(code: u8, cause: Cause) -> Outcome {
        Outcome::Over(JobResult { code, cause: Some(cause) })
    }

    fn text(outcome: &Outcome) -> Option<String> {
        Report::of(outcome)?.text(&Recent::new())
    }

    fn shown(failure: RankFailure) -> String {
        text(&over(1, Cause::Failed(failure))).unwrap()
    }

    #[test]
    fn a_failed_rank() {
        let last_lines = vec!["a".to_owned(), "b".to_owned()];
        let with_lines = RankFailure { last_lines, ..failure(ExitStatus::Code(3)) };
        assert_eq!(
            shown(with_lines.clone()),
            "rank 1 on node1 (pid 42) failed: exit code 3\nbrigade: its last lines on stderr:\n  a\n  b"
        );
        let crashed = RankFailure {
            exit_status: ExitStatus::Signal(11),
            stream: Stream::Stdout,
            ..with_lines.clone()
        };
        assert_eq!(
            shown(crashed),
            "rank 1 on node1 (pid 42) failed: killed by SIGSEGV\n\
             brigade: SIGSEGV is a segmentation fault: native code accessed invalid memory\n\
             brigade: its last lines on stdout:\n  a\n  b"
        );
        assert!(shown(failure(ExitStatus::Code(1))).ends_with("\nbrigade: it printed nothing"));
        let told =
            RankFailure { error: Some("no disk\n  line 3".to_owned()), ..with_lines.clone() };
        assert_eq!(
            shown(told),
            "rank 1 on node1 (pid 42) failed: exit code 3\nbrigade: its error: no disk\n    line 3"
        );
        let starved = RankFailure {
            exit_status: ExitStatus::Signal(9),
            hint: Some("memory ran out".to_owned()),
            ..with_lines
        };
        assert!(shown(starved).contains("killed by SIGKILL\nbrigade: memory ran out\n"));
        let fault = DeviceFault {
            host: "node2".to_owned(),
            device: "0000:3b:00.0".to_owned(),
            rank: Some(5),
            fault: "Xid 79".to_owned(),
            count: 1,
            is_earlier: false,
            means: "it is gone".to_owned(),
            remedy: "restart the host".to_owned(),
            message: "NVRM: Xid (PCI:0000:3b:00): 79".to_owned(),
        };
        let broken = RankFailure { device_faults: vec![fault], ..failure(ExitStatus::Code(1)) };
        let expected = "exit code 1\n\
            brigade: Xid 79 at PCI 0000:3b:00.0, the GPU of rank 5 on node2: it is gone; restart the host\n  \
            NVRM: Xid (PCI:0000:3b:00): 79\n\
            brigade: it printed nothing";
        assert!(shown(broken.clone()).ends_with(expected), "{}", shown(broken));
    }

    #[test]
    fn what_has_been_shown_is_not_repeated() {
        let lines = ["first".to_owned(), "last".to_owned()];
        let failed = RankFailure { last_lines: lines.to_vec(), ..failure(ExitStatus::Code(3)) };
        let told = RankFailure {
            error: Some("cannot open data: no disk\n  Traceback".to_owned()),
            ..failed.clone()
        };
        let after = |failure: &RankFailure, lines: &[&str]| {
            let mut recent = Recent::new();
            for line in lines {
                recent.note(Stream::Stderr, format!("{line}\n").as_bytes());
            }
            Report::of(&over(1, Cause::Failed(failure.clone()))).unwrap().text(&recent)
        };
        let sentence = "rank 1 on node1 (pid 42) failed: exit code 3";
        let news = format!("brigade: {sentence}; stopping 1 rank");
        assert_eq!(after(&failed, &["[1] first", "[0] x", "[1] last"]).as_deref(), Some(sentence));
        assert_eq!(after(&failed, &["[1] first", "[1] last", &news]), None);
        let expected = "rank 1's last lines on stderr:\n  first\n  last";
        assert_eq!(after(&failed, &["[1] last", &news, "[0] y"]).as_deref(), Some(expected));
        let printed = ["[1] Error: cannot open data", "[1] Caused by:", "[1]     no disk"];
        assert_eq!(after(&told, &printed).as_deref(), Some(sentence));
        let expected = "rank 1's error: cannot open data: no disk\n    Traceback";
        assert_eq!(after(&told, &[&news]).as_deref(), Some(expected));
        let silent = RankFailure { last_lines: Vec::new(), ..failed };
        assert_eq!(after(&silent, &[&news]).as_deref(), Some("rank 1 printed nothing"));
    }

    #[test]
    fn a_stopped_job() {
        let stopped =
            |failure| text(&over(130, Cause::Interrupted { signal: 2, failure })).unwrap();
        assert_eq!(stopped(None), "stopped by SIGINT");
        assert_eq!(
            stopped(Some(failure(ExitStatus::Code(5)))),
            "stopped by SIGINT; the first to fail: rank 1 on node1 (pid 42) failed: exit code 5"
        );
        assert_eq!(text(&Outcome::Over(JobResult { code: 0, cause: None })), None);
        assert_eq!(
            text(&Outcome::OutputClosed).as_deref(),
            Some("stopped: the reader of the output has gone")
        );
    }

    #[test]
    fn hosts() {
        let lost = Cause::HostLost { host: "node2".to_owned(), how: "silent for 4 s".to_owned() };
        assert_eq!(text(&over(1, lost)).unwrap(), "node2 is lost: silent for 4 s");
        let few = Cause::TooFewHosts { have: 1, need: 2, seconds: 600 };
        let few = text(&over(1, few)).unwrap();
        assert!(few.starts_with("only 1 of 2 hosts came within 600 s: "), "{few}");
    }
}
