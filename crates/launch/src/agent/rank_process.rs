//! One rank's process.

use std::io;
use std::path::Path;
use std::process::{Child, Stdio};

use brigade_rendezvous::Ending;
use brigade_world::{World, env};
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;

use super::signal_disposition;
use crate::gate::Gate;
use crate::output::Streams;
use crate::role;
use crate::{LaunchPlan, PrefixFacts};

/// A rank that has been started and not been reaped.
#[derive(Debug)]
pub(super) struct RankProcess {
    child: Child,
    ending: Option<Ending>,
}

impl RankProcess {
    /// Starts the rank's process, which waits at its gate; also gives its output.
    pub(super) fn start(
        plan: &LaunchPlan,
        world: &World,
        error_file: Option<&Path>,
    ) -> io::Result<(Self, Gate, Streams)> {
        let (gate, far) = Gate::new()?;
        let local_rank = world.local_rank.as_usize();
        let setup = &plan.ranks[local_rank];
        let (program, args) = (plan.program.as_os_str(), plan.args_for(local_rank));
        let mut command = role::rank_command(program, &plan.name, &args, setup.cpus.as_ref());
        for name in &plan.withheld {
            command.env_remove(name);
        }
        command.envs(plan.user_env.iter().map(|(name, value)| (name, value)));
        plan.told(world.clone()).describe_to(&mut command);
        command.env(env::BRIGADE_AGENT, &plan.agent_id);
        if let Some(path) = error_file {
            command.env(env::TORCHELASTIC_ERROR_FILE, path);
        }
        command.envs(plan.env.iter().chain(&setup.env).map(|(name, value)| (name, value)));
        command.stdin(far).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
            return Err(io::Error::other("a piped stream is not there; please file a bug"));
        };
        let (rank, local_rank) = (world.rank.as_usize(), world.local_rank.as_usize());
        let prefix = plan.output.prefix.of(&PrefixFacts {
            role: &plan.role,
            rank,
            local_rank,
            node_rank: world.node_rank,
            restart_count: world.restart_count,
            host: &plan.host,
        });
        let (stdout, stderr) = (stdout.into(), stderr.into());
        let streams = Streams { rank, local_rank, prefix, stdout, stderr };
        Ok((Self { child, ending: None }, gate, streams))
    }

    pub(super) fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    /// How the rank ended, the first time that is known. Does not reap it.
    pub(super) fn look(&mut self) -> Option<Ending> {
        if self.ending.is_some() {
            return None;
        }
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        self.ending = match waitid(Id::Pid(self.pid()), flags) {
            Ok(WaitStatus::Exited(_, code)) => Some(Ending::Code(code)),
            Ok(WaitStatus::Signaled(_, signal, _)) => Some(Ending::Signal(signal as i32)),
            Ok(_) => None,
            // A real-time signal, which nix has no name for. This one is reaped early.
            Err(_) => self.child.wait().ok().map(Ending::from),
        };
        self.ending
    }

    /// Signals the rank and its children, so that they stop. A shell starts what it runs in the background
    /// with SIGINT ignored, and ranks inherit that: they get SIGTERM instead.
    pub(super) fn ask(&self, signal: Signal) {
        let pid = self.pid().as_raw();
        let deaf = signal == Signal::SIGINT && signal_disposition::ignored_by(pid, signal);
        self.send(if deaf { Signal::SIGTERM } else { signal });
    }

    /// Signals the rank and its children.
    pub(super) fn send(&self, signal: Signal) {
        // A rank that has not come to lead its own group yet is signalled alone. Both fail for a
        // rank that has ended and left no children, which is as well.
        if killpg(self.pid(), signal).is_err() && self.ending.is_none() {
            let _ = kill(self.pid(), signal);
        }
    }

    /// Lets the system forget the rank, which has ended.
    pub(super) fn reap(&mut self) {
        let _ = self.child.wait();
    }
}
