//! Process of one rank.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Stdio};

use brigade_rank_env::{World, env};
use brigade_rendezvous::{ExitStatus, Stream};
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;

use super::rank_role::rank_command;
use super::signal_disposition;
use crate::output::Streams;
use crate::start_gate::{self, Gate};
use crate::{LaunchPlan, PrefixFacts};

/// Rank that has been started and not been reaped.
#[derive(Debug)]
pub(super) struct RankProcess {
    child: Child,
    exit_status: Option<ExitStatus>,
}

impl RankProcess {
    /// Starts the rank's process, which waits at its gate; also returns the pipe that it is to inherit, and its output.
    pub(super) fn start(
        plan: &LaunchPlan,
        world: &World,
        error_file: Option<&Path>,
    ) -> io::Result<(Self, Gate, Option<OwnedFd>, Streams)> {
        let (gate, far) = Gate::new()?;
        let local_rank = world.local_rank.as_usize();
        let setup = &plan.ranks[local_rank];
        let (program, args) = (plan.program.as_os_str(), plan.args_for(local_rank));
        // A rank with the terminal has it as its stdin; otherwise stdin is the gate.
        let raw = plan.output.raw;
        let gate_at = raw.then(|| start_gate::inheritable(&far)).transpose()?;
        let cpus = setup.cpus.as_ref();
        let mut command = rank_command(program, &plan.name, &args, cpus, gate_at);
        for name in &plan.options.withheld {
            command.env_remove(name);
        }
        command.envs(plan.user_env.iter().map(|(name, value)| (name, value)));
        plan.world_of_program(world.clone()).describe_to(&mut command);
        command.env(env::BRIGADE_AGENT, &plan.agent_id);
        // A launcher around this one may have set it.
        command.env_remove(env::BRIGADE_PROGRESS_FD);
        if let Some(path) = error_file {
            command.env(env::TORCHELASTIC_ERROR_FILE, path);
        }
        command.envs(plan.env.iter().chain(&setup.env).map(|(name, value)| (name, value)));
        let shared = |stream| {
            if plan.output.passes_through(local_rank, stream) {
                Stdio::inherit()
            } else {
                Stdio::piped()
            }
        };
        command.stdout(shared(Stream::Stdout)).stderr(shared(Stream::Stderr));
        // Kept open until the rank has inherited it.
        let _far = if raw {
            command.stdin(Stdio::inherit());
            Some(far)
        } else {
            command.stdin(far);
            None
        };
        let mut child = command.spawn()?;
        let (rank, local_rank) = (world.rank.as_usize(), world.local_rank.as_usize());
        let prefix = plan.output.prefix.of(&PrefixFacts {
            role: &plan.options.role,
            rank,
            local_rank,
            node_rank: world.node_rank,
            restart_count: world.restart_count,
            host: &plan.host,
        });
        let stdout = child.stdout.take().map(OwnedFd::from);
        let stderr = child.stderr.take().map(OwnedFd::from);
        // A rank with the terminal shows its own progress.
        let (progress, tells) = if raw {
            (None, None)
        } else {
            let (reader, writer) = io::pipe()?;
            (Some(reader.into()), Some(writer.into()))
        };
        let streams = Streams { rank, local_rank, prefix, stdout, stderr, progress };
        Ok((Self { child, exit_status: None }, gate, tells, streams))
    }

    pub(super) fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// Returns the rank's exit status the first time that it is available. Does not reap the process.
    pub(super) fn look(&mut self) -> Option<ExitStatus> {
        if self.exit_status.is_some() {
            return None;
        }
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        self.exit_status = match waitid(Id::Pid(self.pid()), flags) {
            Ok(WaitStatus::Exited(_, code)) => Some(ExitStatus::Code(code)),
            Ok(WaitStatus::Signaled(_, signal, _)) => Some(ExitStatus::Signal(signal as i32)),
            Ok(_) => None,
            // A real-time signal, for which nix has no name. Such a process is reaped early.
            Err(_) => self.child.wait().ok().map(ExitStatus::from),
        };
        self.exit_status
    }

    /// Returns `true` if the rank was stopped since the last call, by Ctrl-Z or a signal, and still is.
    pub(super) fn is_stopped(&self) -> bool {
        let flags = WaitPidFlag::WSTOPPED | WaitPidFlag::WNOHANG;
        self.exit_status.is_none()
            && matches!(waitid(Id::Pid(self.pid()), flags), Ok(WaitStatus::Stopped(..)))
    }

    /// Sends the rank and its children a signal to stop. If they ignore SIGINT, as ranks of a launcher that a shell has
    /// started in the background do, they get SIGTERM instead.
    pub(super) fn ask(&self, signal: Signal) {
        let pid = self.pid().as_raw();
        let deaf = signal == Signal::SIGINT && signal_disposition::ignored_by(pid, signal);
        self.send(if deaf { Signal::SIGTERM } else { signal });
    }

    /// Sends a signal to the rank and its children.
    pub(super) fn send(&self, signal: Signal) {
        // A rank that does not lead its own group yet is signalled alone. Both calls fail for a rank that has ended and
        // left no children, which is harmless.
        if killpg(self.pid(), signal).is_err() && self.exit_status.is_none() {
            let _ = kill(self.pid(), signal);
        }
    }

    /// Reaps the rank, which has ended.
    pub(super) fn reap(&mut self) {
        let _ = self.child.wait();
    }
}
