//! Ranks that a test kills.

use std::ffi::OsStr;
use std::io;
use std::process::{Child, Stdio};

use brigade_launch::{Interfaces, StorePort, children};

/// Group of ranks, each a process of this test executable with one of its tests. Ranks that still run are killed when
/// this is dropped.
#[derive(Debug)]
pub struct KillableRanks {
    ranks: Vec<Child>,
    _port: StorePort,
}

impl KillableRanks {
    /// Starts `world_size` ranks that run the test `name` with these environment variables. Their stdout is piped. The
    /// test needs `#[ignore]`, as it has nothing to check without them.
    ///
    /// # Errors
    /// Fails if a process cannot be started, or the world size is not valid.
    pub fn start(name: &str, world_size: usize, variables: &[(&str, &OsStr)]) -> io::Result<Self> {
        let arguments = [name, "--exact", "--include-ignored", "--nocapture"];
        Self::start_with(&arguments, world_size, variables)
    }

    /// Starts `world_size` ranks of this test executable with these arguments and environment variables, for a program
    /// without libtest. Their stdout is piped.
    ///
    /// # Errors
    /// Fails if a process cannot be started, or the world size is not valid.
    pub fn start_with(
        arguments: &[&str],
        world_size: usize,
        variables: &[(&str, &OsStr)],
    ) -> io::Result<Self> {
        let port = StorePort::reserve(Interfaces::Loopback)?;
        let mut started = Self { ranks: Vec::new(), _port: port };
        for rank in 0..world_size {
            let mut command = children::command(rank, world_size, &started._port)?;
            command.args(arguments).stdout(Stdio::piped());
            command.envs(variables.iter().copied());
            command.env("OMP_NUM_THREADS", "1");
            started.ranks.push(command.spawn()?);
        }
        Ok(started)
    }

    /// Returns the processes, in the order of their ranks.
    pub fn ranks(&mut self) -> &mut [Child] {
        &mut self.ranks
    }
}

impl Drop for KillableRanks {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            // Fails only for a process that has ended.
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}
