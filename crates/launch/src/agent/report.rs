//! What the user reads last.

use std::fmt::Write as _;
use std::io::{self, Write as _};

use nix::sys::signal::Signal;

use super::{Cause, Ending, Failure};
use crate::output::Tail;

/// `1 rank`, `3 ranks`
pub(super) fn count(ranks: usize) -> String {
    format!("{ranks} rank{}", if ranks == 1 { "" } else { "s" })
}

/// Prints why the job failed, if it did.
pub(super) fn print(failure: Option<&Failure>, cause: Option<Cause>, tail: Option<&Tail>) {
    let nothing = Tail::default();
    // One write: another process may share the terminal. When it fails there is no one to tell.
    let _ = io::stderr().write_all(text(failure, cause, tail.unwrap_or(&nothing)).as_bytes());
}

fn text(failure: Option<&Failure>, cause: Option<Cause>, tail: &Tail) -> String {
    let mut text = String::new();
    match (cause, failure) {
        (Some(Cause::Signal(signal)), Some(failure)) if !is_plain_end(failure.ending, signal) => {
            line(&mut text, &format!("stopped by {signal}; the first to fail: {failure}"));
        }
        (Some(Cause::Signal(signal)), _) => line(&mut text, &format!("stopped by {signal}")),
        (Some(Cause::OutputClosed), _) => line(&mut text, "stopped: nobody reads the output"),
        (_, None) => {}
        (_, Some(failure)) => {
            line(&mut text, &failure.to_string());
            match failure.ending {
                Ending::Signal(signal) if signal == Signal::SIGKILL as i32 => line(
                    &mut text,
                    "SIGKILL that nobody sent by hand often is the kernel out of memory: see dmesg",
                ),
                _ => {}
            }
            let (name, lines) = if tail.stderr.is_empty() {
                ("stdout", &tail.stdout)
            } else {
                ("stderr", &tail.stderr)
            };
            if lines.is_empty() {
                line(&mut text, "it printed nothing");
            } else {
                line(&mut text, &format!("its last lines on {name}:"));
                for shown in lines {
                    let _ = writeln!(text, "  {shown}");
                }
            }
        }
    }
    text
}

fn line(text: &mut String, content: &str) {
    let _ = writeln!(text, "brigade: {content}");
}

/// The rank ended as one does that gets this signal.
fn is_plain_end(ending: Ending, signal: Signal) -> bool {
    ending.exit_code() == Ending::Signal(signal as i32).exit_code()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(ending: Ending) -> Failure {
        Failure { rank: 1, pid: 42, ending }
    }

    #[test]
    fn a_failed_rank() {
        let tail =
            Tail { stdout: vec!["out".to_owned()], stderr: vec!["a".to_owned(), "b".to_owned()] };
        let shown = text(Some(&failure(Ending::Code(3))), Some(Cause::RankFailed), &tail);
        assert_eq!(
            shown,
            "brigade: rank 1 (pid 42) failed: exit code 3\n\
             brigade: its last lines on stderr:\n  a\n  b\n"
        );
        let tail = Tail { stderr: Vec::new(), ..tail };
        let shown = text(Some(&failure(Ending::Signal(11))), Some(Cause::RankFailed), &tail);
        assert_eq!(
            shown,
            "brigade: rank 1 (pid 42) failed: killed by SIGSEGV\n\
             brigade: its last lines on stdout:\n  out\n"
        );
        let shown = text(Some(&failure(Ending::Code(1))), None, &Tail::default());
        assert!(shown.ends_with("brigade: it printed nothing\n"), "{shown}");
    }

    #[test]
    fn a_stopped_job() {
        let by_int = Some(Cause::Signal(Signal::SIGINT));
        let quiet = "brigade: stopped by SIGINT\n";
        assert_eq!(text(None, by_int, &Tail::default()), quiet);
        assert_eq!(text(Some(&failure(Ending::Signal(2))), by_int, &Tail::default()), quiet);
        assert_eq!(text(Some(&failure(Ending::Code(130))), by_int, &Tail::default()), quiet);
        assert_eq!(
            text(Some(&failure(Ending::Code(5))), by_int, &Tail::default()),
            "brigade: stopped by SIGINT; the first to fail: rank 1 (pid 42) failed: exit code 5\n"
        );
        assert_eq!(text(None, None, &Tail::default()), "");
    }
}
