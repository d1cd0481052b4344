//! What the user reads last.

use std::fmt::Write as _;

use brigade_rendezvous::{Cause, ExitStatus, JobResult, RankFailure};
use nix::sys::signal::Signal;

use super::Outcome;

/// `1 rank`, `3 ranks`
pub(super) fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Why the job did not simply finish: lines for the user, of which the launcher's own begin with
/// `brigade: `, except for the very first one. `None` when there is nothing to say.
#[must_use]
pub fn text(outcome: &Outcome) -> Option<String> {
    let mut said = match outcome {
        Outcome::OutputClosed => "stopped: the reader of the output has gone".to_owned(),
        Outcome::Stopped { signal } => format!("stopped by {}", name(*signal)),
        Outcome::Left { signal } => {
            format!("stopped by {}: this host has left the job", name(*signal))
        }
        Outcome::Stuck { ranks, otherwise } => match otherwise.as_deref().and_then(text) {
            Some(other) => format!("{other}\nbrigade: {ranks}"),
            None => ranks.clone(),
        },
        Outcome::Lost { coordinator, how, replaceable } => format!(
            "the connection to {coordinator}, where the job is coordinated, is lost: {how}; the \
             ranks of this host have been stopped; {}",
            if *replaceable {
                "no restart was left for another host to take over: give more with --max-restarts"
            } else {
                "a job that is to outlive any of its hosts needs --rdzv-backend etcd and \
                 --max-restarts"
            }
        ),
        Outcome::Over(JobResult { cause, .. }) => match cause.as_ref()? {
            Cause::Failed(failure) => return Some(failed(failure)),
            Cause::Interrupted { signal, failure: None } => format!("stopped by {}", name(*signal)),
            Cause::Interrupted { signal, failure: Some(failure) } => {
                format!("stopped by {}; the first to fail: {}", name(*signal), failure.summary())
            }
            Cause::HostLost { host, how } => format!("{host} is lost: {how}"),
            Cause::TooFewHosts { have, need, seconds } => format!(
                "only {have} of {} came within {seconds} s: start the others sooner, or give more \
                 time (--rdzv-conf join_timeout=SECONDS)",
                count(*need, "host")
            ),
        },
    };
    said.truncate(said.trim_end().len());
    Some(said)
}

fn failed(failure: &RankFailure) -> String {
    let mut text = failure.summary();
    let hint = failure.hint.clone().or_else(|| meaning(failure.exit_status).map(str::to_owned));
    if let Some(hint) = hint {
        let _ = write!(text, "\nbrigade: {hint}");
    }
    for fault in &failure.device_faults {
        let _ = write!(text, "\nbrigade: {fault}");
        indent(&mut text, &fault.message);
    }
    match &failure.error {
        Some(error) => {
            let mut lines = error.lines();
            let _ = write!(text, "\nbrigade: its error: {}", lines.next().unwrap_or_default());
            lines.for_each(|line| indent(&mut text, line));
        }
        None if failure.last_lines.is_empty() => text.push_str("\nbrigade: it printed nothing"),
        None => {
            let name = failure.stream.name();
            let _ = write!(text, "\nbrigade: its last lines on {name}:");
            failure.last_lines.iter().for_each(|line| indent(&mut text, line));
        }
    }
    text
}

fn indent(text: &mut String, line: &str) {
    let _ = write!(text, "\n  {line}");
}

/// What people do not know by heart.
fn meaning(exit_status: ExitStatus) -> Option<&'static str> {
    match exit_status {
        ExitStatus::Signal(signal) => match Signal::try_from(signal).ok()? {
            Signal::SIGKILL => Some(
                "an unexpected SIGKILL often means that the kernel ran out of memory: see dmesg",
            ),
            Signal::SIGSEGV => {
                Some("SIGSEGV is a segmentation fault: native code used memory that is not its own")
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
            Signal::SIGTERM => Some(
                "SIGTERM is a request to stop: by hand, or from a scheduler at a limit of its own",
            ),
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

/// Its name, or its number.
fn name(signal: i32) -> String {
    Signal::try_from(signal).map_or_else(|_| format!("signal {signal}"), |known| known.to_string())
}

#[cfg(test)]
mod tests {
    use brigade_rendezvous::Stream;
    use brigade_world::devices::DeviceFault;

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
             brigade: SIGSEGV is a segmentation fault: native code used memory that is not its own\n\
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
