//! The watch: a process that outlives an agent that was killed, and clears up after it.

use std::io::{self, Read, Write};
use std::process::{Child, Stdio};

use nix::unistd::setsid;

use crate::role;
use crate::survivors::Survivors;

/// The agent's side: a running watch.
#[derive(Debug)]
pub(crate) struct Watch(Child);

impl Watch {
    /// Starts the watch over these processes.
    pub(crate) fn start(survivors: &Survivors) -> io::Result<Self> {
        let mut command = role::watch_command(survivors);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        // Its working directory would keep a file system from being unmounted.
        command.current_dir("/").spawn().map(Self)
    }

    /// Ends the watch: the agent has cleared up itself.
    pub(crate) fn dismiss(mut self) {
        if let Some(mut stdin) = self.0.stdin.take() {
            // Fails when somebody has killed the watch: then there is nothing to dismiss.
            let _ = stdin.write_all(DISMISSED);
        }
        let _ = self.0.wait();
    }
}

/// The watch itself: waits on its stdin, a pipe whose other end only the agent holds.
pub(crate) fn stand(survivors: &Survivors) {
    // Out of reach of what is sent to the agent's process group or typed at its terminal. Fails
    // only for the leader of a group, which is out of reach already.
    let _ = setsid();
    let mut words = Vec::new();
    let _ = io::stdin().read_to_end(&mut words);
    if words != DISMISSED {
        survivors.kill();
    }
}

const DISMISSED: &[u8] = b"all clear\n";
