//! Signals that a process ignores.

use std::fs;

use nix::sys::signal::Signal;

/// Returns `true` if this process was started with the signal ignored, as `nohup` does with SIGHUP.
pub(super) fn ignored_by_us(signal: Signal) -> bool {
    by("self", signal)
}

/// Returns `true` if that process ignores the signal, and `false` if its state cannot be read.
pub(super) fn ignored_by(pid: i32, signal: Signal) -> bool {
    by(&pid.to_string(), signal)
}

fn by(process: &str, signal: Signal) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    is_in(&status, signal)
}

/// Parses `SigIgn`, a mask in hexadecimal whose lowest bit is signal 1.
fn is_in(status: &str, signal: Signal) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal as i32 - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_of_the_system() {
        let status =
            "Name:\tsh\nSigBlk:\t0000000000000003\nSigIgn:\t0000000080001002\nSigCgt:\t1\n";
        assert!(is_in(status, Signal::SIGINT));
        assert!(is_in(status, Signal::SIGPIPE));
        assert!(!is_in(status, Signal::SIGHUP));
        assert!(!is_in(status, Signal::SIGTERM));
        assert!(!is_in("", Signal::SIGINT));
        // Rust programs ignore it from the start.
        assert!(ignored_by_us(Signal::SIGPIPE));
    }
}
