//! Helper roles in which the agent starts its own executable, at a cost of about a millisecond per rank.
//!
//! [`brigade_ssh::reexec`] explains why. Each role is in the module that starts it; this module dispatches to them.

use brigade_ssh::reexec;
use brigade_ssh::remote_command::AGENT;

use crate::agent::rank_role::{self, RANK};
use crate::hosts::{self, agent_side};
use crate::reaper::{self, REAPER};

/// Runs the helper role that this process was started for, if any, and returns its exit code.
///
/// A program that calls [`crate::agent::run`] calls this first in `main`, before it reads its
/// arguments. In the role of a rank it does not return: the process becomes the program.
#[must_use]
pub fn run_helper_if_requested() -> Option<u8> {
    let mut args = std::env::args_os().skip(1);
    let role = args.next()?;
    if role == RANK {
        Some(rank_role::become_rank(args).unwrap_or(MALFORMED))
    } else if role == REAPER {
        Some(reaper::become_reaper(args).unwrap_or(MALFORMED))
    } else if role == reexec::SESSION {
        Some(reexec::become_session(args).unwrap_or(MALFORMED))
    } else if role == AGENT {
        Some(agent_side::serve(args.next().is_some_and(|part| part == hosts::ENTERED)))
    } else {
        None
    }
}

/// Exit code of a role that was started by hand, with malformed arguments.
const MALFORMED: u8 = 2;
