//! The end of an agent: the report, the last lines, and what has to be gone before it goes.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::{Agent, Outcome, error_files, report};
use crate::LaunchError;
use crate::survivors::Survivors;

impl Agent<'_> {
    /// Says how it went and leaves nothing behind.
    pub(super) fn finish(
        mut self,
        result: Result<Outcome, LaunchError>,
    ) -> Result<Outcome, LaunchError> {
        while let Some(line) = self.peers.line() {
            self.pass_line(&line);
        }
        match &result {
            Ok(outcome) => self.report(outcome),
            // Ranks that were not all started end by themselves; this waits for it.
            Err(_) => Survivors { agent: self.plan.agent_id.clone(), sessions: vec![] }.kill(),
        }
        if let Some(streamed) = &mut self.streamed {
            streamed.abandon();
        }
        self.output.drain();
        self.draining += 1;
        let all_written = self.write_the_rest(result.is_ok());
        // The watch goes last: until then it clears up after an agent that is killed.
        drop(self.folder);
        self.watch.dismiss();
        // A thread that still writes is left alone; it ends with this process.
        if all_written {
            self.output.end();
        }
        result
    }

    fn report(&mut self, outcome: &Outcome) {
        let told_elsewhere = self.streamed.is_some();
        if !told_elsewhere && let Some(text) = report::text(outcome) {
            self.output.warn(&text);
        }
        if let Some(failure) = outcome.failure() {
            let ended = self.ended.as_ref().filter(|ended| ended.is_of(failure));
            let file = ended.and_then(|ended| ended.folder.error_file(failure.local_rank));
            error_files::pass_on(failure, file.as_deref());
        }
    }

    /// Waits for the output thread, and for a coordinator in this process to tell the others that
    /// the job is over. False when the output is given up: whoever reads it has stopped reading,
    /// and a second signal to stop came before this or comes now.
    fn write_the_rest(&mut self, is_farewell: bool) -> bool {
        let mut deadline = self.impatient.then(|| Instant::now() + LAST_LINES);
        // Else the others have still to stop their ranks.
        let farewell = is_farewell.then(|| Instant::now() + FAREWELL_TAKES);
        loop {
            self.take_notices();
            let told = self.peers.is_over() || farewell.is_some_and(|at| at <= Instant::now());
            if self.draining == 0 && told {
                return true;
            }
            if deadline.is_some_and(|at| at <= Instant::now()) {
                return self.draining == 0;
            }
            self.wait(deadline.into_iter().chain(farewell.filter(|_| !told)).min());
            while let Some((signal, _)) = self.next_signal() {
                if matches!(signal, Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP) {
                    deadline = deadline.or_else(|| Some(Instant::now() + LAST_LINES));
                }
            }
        }
    }
}

/// How long the last lines of stopped ranks may take to be written once the user has lost patience.
const LAST_LINES: Duration = Duration::from_millis(500);
/// How long the other hosts may take to be told that the job is over.
const FAREWELL_TAKES: Duration = Duration::from_secs(5);
