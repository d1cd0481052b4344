//! The watch: a process that outlives an agent that was killed, and clears up after it.

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};

use nix::unistd::setsid;

use crate::role;
use crate::survivors::Survivors;

/// The agent's side: a running watch, one for all attempts.
#[derive(Debug)]
pub(crate) struct Watch {
    child: Child,
    orders: Option<ChildStdin>,
}

impl Watch {
    /// Starts a watch for this agent, which also removes a folder.
    pub(crate) fn start(agent: &str, folder: Option<&Path>) -> io::Result<Self> {
        let mut command = role::watch_command(agent, folder);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // Its working directory would keep a file system from being unmounted.
        let mut child = command.current_dir("/").spawn()?;
        let orders = child.stdin.take();
        Ok(Self { child, orders })
    }

    /// From now on these are the sessions of living ranks, and no others.
    pub(crate) fn guard(&mut self, sessions: &[i32]) {
        let numbers: Vec<String> = sessions.iter().map(ToString::to_string).collect();
        self.order(&numbers.join(" "));
    }

    /// Ends the watch: the agent has cleared up itself.
    pub(crate) fn dismiss(mut self) {
        self.order(DISMISSED);
        self.orders = None;
        let _ = self.child.wait();
    }

    fn order(&mut self, line: &str) {
        if let Some(orders) = &mut self.orders {
            // Fails when somebody has killed the watch, whom nobody watches.
            let _ = orders.write_all(format!("{line}\n").as_bytes());
        }
    }
}

/// The watch itself: waits on its stdin, a pipe whose other end only the agent holds.
pub(crate) fn stand(agent: String, folder: Option<PathBuf>) {
    // Out of reach of what is sent to the agent's process group or typed at its terminal. Fails
    // only for the leader of a group, which is out of reach already.
    let _ = setsid();
    // What schedulers and service managers send to each process of a job is blocked since before
    // this process was started: the agent waits for it, and the mask is inherited.
    let mut orders = Vec::new();
    let _ = io::stdin().read_to_end(&mut orders);
    if let Some(sessions) = last_order(&orders) {
        Survivors { agent, sessions }.kill();
        if let Some(folder) = folder {
            let _ = fs::remove_dir_all(folder);
        }
    }
}

/// The sessions to look after; `None` when there is nothing to do any more.
fn last_order(orders: &[u8]) -> Option<Vec<i32>> {
    let orders = String::from_utf8_lossy(orders);
    // A line that was cut short by the agent's end was not acted on by it either.
    let last =
        orders.rsplit_once('\n').map_or("", |(whole, _)| whole.rsplit('\n').next().unwrap_or(""));
    (last != DISMISSED).then(|| last.split(' ').filter_map(|number| number.parse().ok()).collect())
}

const DISMISSED: &str = "all clear";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders() {
        let table: [(&str, Option<&[i32]>); 8] = [
            ("", Some(&[])),
            ("12 34\n", Some(&[12, 34])),
            ("12 34\n\n", Some(&[])),
            ("12 34\n\n56\n", Some(&[56])),
            ("12 34\n\n56", Some(&[])),
            ("12\nall clear\n", None),
            ("12\nall cle", Some(&[12])),
            ("all clear\n", None),
        ];
        for (orders, expected) in table {
            assert_eq!(last_order(orders.as_bytes()).as_deref(), expected, "{orders:?}");
        }
    }
}
