//! Signals that an agent, or a launcher of hosts, waits for.

use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::signal_disposition;
use crate::LaunchError;

/// Runs `run` with a descriptor for the signals, which are blocked meanwhile.
pub(crate) fn with_signals<T>(
    run: impl FnOnce(SignalFd) -> Result<T, LaunchError>,
) -> Result<T, LaunchError> {
    let watched = watched();
    let mut blocked = watched;
    // A terminal stops a background process that writes to it, or gives it to another group.
    blocked.add(Signal::SIGTTOU);
    let before = blocked
        .thread_swap_mask(SigmaskHow::SIG_BLOCK)
        .map_err(LaunchError::system("block signals"))?;
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    let signals = SignalFd::with_flags(&watched, flags);
    let result = signals.map_err(LaunchError::system("wait for signals")).and_then(run);
    if result.is_err() {
        // Nothing has run. Restoring the earlier mask cannot fail.
        let _ = SigSet::thread_set_mask(&before);
    }
    result
}

/// Returns the next received signal.
pub(crate) fn next_signal(signals: &SignalFd) -> Option<Signal> {
    let info = signals.read_signal().ok().flatten()?;
    Signal::try_from(info.ssi_signo.cast_signed()).ok()
}

/// Returns the signals to wait for. Under `nohup` SIGHUP is not among them: waiting for a signal receives it although
/// it is ignored.
fn watched() -> SigSet {
    let mut watched: SigSet = [
        Signal::SIGCHLD,
        Signal::SIGINT,
        Signal::SIGTERM,
        Signal::SIGHUP,
        Signal::SIGQUIT,
        Signal::SIGUSR1,
        Signal::SIGUSR2,
        Signal::SIGTSTP,
        Signal::SIGCONT,
    ]
    .into_iter()
    .collect();
    if signal_disposition::ignored_by_us(Signal::SIGHUP) {
        watched.remove(Signal::SIGHUP);
    }
    watched
}
