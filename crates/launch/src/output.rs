//! Output thread: writes the output of all ranks, so that lines never run into each other.
//!
//! It is a separate thread because a paused terminal blocks its writers, and the agent must handle signals meanwhile.
//! It lives as long as the job; the ranks of every attempt are attached to it anew.

mod color;
mod folder;
mod lines;
mod live;
mod plan;
mod prefix;
mod pump;
mod recent;
mod report;
mod show;
mod streams;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread::{self, JoinHandle};

pub use color::{Color, ColorFacts};
pub(crate) use folder::{AttemptFiles, AttemptFolder, RunFolder};
pub(crate) use live::{BETWEEN_DRAWS, LiveLine, Reports};
pub use plan::{LogFolder, OutputFacts, OutputOptions, OutputPlan};
pub use prefix::{Prefix, PrefixFacts};
use pump::{Attempt, Order, Pump};
pub(crate) use recent::Recent;
pub(crate) use report::Report;
pub(crate) use show::{Show, Terminal, write_all};
pub use streams::{LineFilter, LocalRanks, StreamMode, StreamModes};

use crate::LaunchError;
use brigade_rendezvous::wake;

/// The agent's end of the output thread. Dropping it discards output that is not written yet; [`Output::end`] does not.
#[derive(Debug)]
pub(crate) struct Output {
    thread: JoinHandle<()>,
    plan: OutputPlan,
    orders: Orders,
    notices: wake::Receiver<Notice>,
    folder_is_known: bool,
}

/// Output streams of one rank, and how they are shown.
#[derive(Debug)]
pub(crate) struct Streams {
    /// Rank in the job, which determines the colour.
    pub(crate) rank: usize,
    /// Local rank, which determines the destinations of its output.
    pub(crate) local_rank: usize,
    /// Prefix of the rank's lines.
    pub(crate) prefix: String,
    /// Reading ends of the pipes. `None` if the rank has this process's own stream.
    pub(crate) stdout: Option<OwnedFd>,
    pub(crate) stderr: Option<OwnedFd>,
    /// Pipe to which the rank writes progress reports.
    pub(crate) progress: Option<OwnedFd>,
}

/// Last lines of a rank, oldest first.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Tail {
    pub(crate) stdout: Vec<String>,
    pub(crate) stderr: Vec<String>,
}

/// Notice of the output thread, when [`Output::control`] is readable.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// The reader of this process's output has closed it.
    Closed,
    /// Last lines of a rank: the answer to [`Output::ask_tail`].
    Tail { local_rank: usize, tail: Tail },
    /// Last lines of the attempt's ranks: the answer to [`Output::drain`].
    Drained(Vec<Tail>),
    /// The thread has ended by itself, which is a bug: no more notices will come.
    Gone,
}

impl Output {
    /// Starts the thread, without any ranks.
    pub(crate) fn start(plan: &OutputPlan, show: Box<dyn Show>) -> io::Result<Self> {
        let (orders, inbox) = wake::channel()?;
        let (outbox, notices) = wake::channel()?;
        let end = NoticeOfEnd(outbox.clone());
        let pump = Pump::new(plan, show, inbox, outbox);
        let thread = thread::Builder::new().name("output".to_owned()).spawn(move || {
            let _end = end;
            pump.run();
        })?;
        let plan = plan.clone();
        Ok(Self { thread, plan, orders: Orders(orders), notices, folder_is_known: false })
    }

    /// Handles these ranks' output from now on, in order of local rank.
    ///
    /// Fails if the ranks' pipes cannot be prepared.
    pub(crate) fn attach(
        &mut self,
        ranks: Vec<Streams>,
        files: AttemptFiles,
    ) -> Result<(), LaunchError> {
        let folder = files.folder.clone();
        let attempt = Attempt::new(&self.plan, ranks, files)?;
        self.order(Order::Attach(attempt));
        if let Some(path) = folder.run().filter(|_| !self.folder_is_known) {
            self.say(&format!("logs are in {}", path.display()));
            self.folder_is_known = true;
        }
        Ok(())
    }

    /// Writes a line of the launcher among those of the ranks, on stderr, unless the launch is quiet.
    pub(crate) fn say(&self, text: &str) {
        if !self.plan.quiet {
            self.warn(text);
        }
    }

    /// Writes a line of the launcher on stderr, even if the launch is quiet.
    pub(crate) fn warn(&self, text: &str) {
        self.order(Order::Say(format!("brigade: {text}\n")));
    }

    /// Shows the result of the job, even with `--quiet`.
    pub(crate) fn report(&self, report: Report) {
        self.order(Order::Report(report));
    }

    /// Returns a descriptor that is readable when there is a notice.
    pub(crate) fn control(&self) -> BorrowedFd<'_> {
        self.notices.as_fd()
    }

    /// Returns the next notice, if there is one.
    pub(crate) fn notice(&self) -> Option<Notice> {
        self.notices.try_recv()
    }

    /// Requests the last lines of a rank that has ended while others still run.
    pub(crate) fn ask_tail(&self, local_rank: usize) {
        self.order(Order::Tail(local_rank));
    }

    /// Requests that all remaining output of the ranks, which have all ended, is written, and their log files are
    /// closed.
    pub(crate) fn drain(&self) {
        self.order(Order::Drain);
    }

    /// Waits until everything is written, and ends the thread.
    pub(crate) fn end(self) {
        let Self { thread, orders, .. } = self;
        drop(orders);
        // The thread cannot panic, and a panic could not be handled here.
        let _ = thread.join();
    }

    fn order(&self, order: Order) {
        // Fails when the thread has ended, which its last notice reports.
        let _ = self.orders.0.send(order);
    }
}

/// Sender of orders. Ends the thread when it is dropped.
#[derive(Debug)]
struct Orders(wake::Sender<Order>);

impl Drop for Orders {
    fn drop(&mut self) {
        let _ = self.0.send(Order::End);
    }
}

/// Guard in the thread that sends its last notice, even if the thread panics.
struct NoticeOfEnd(wake::Sender<Notice>);

impl Drop for NoticeOfEnd {
    fn drop(&mut self) {
        let _ = self.0.send(Notice::Gone);
    }
}
