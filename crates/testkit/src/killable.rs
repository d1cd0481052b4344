//! Ranks that a test kills.

use std::ffi::OsStr;
use std::io;
use std::process::{Child, Command, Stdio};

use brigade_launch::{Interfaces, StorePort};
use brigade_world::{StoreHost, World, WorldSize};

/// Ranks of one group, each this test executable with one of its tests. Those that still run are killed
/// when this is dropped.
#[derive(Debug)]
pub struct KillableRanks {
    ranks: Vec<Child>,
    _port: StorePort,
}

impl KillableRanks {
    /// Starts `world_size` ranks that run the test `name` with these variables. Their stdout is piped.
    /// The test is ignored otherwise (`#[ignore]`): alone it has nothing to check.
    ///
    /// # Errors
    /// When the system refuses, or no world has that size.
    pub fn start(name: &str, world_size: usize, variables: &[(&str, &OsStr)]) -> io::Result<Self> {
        let arguments = [name, "--exact", "--include-ignored", "--nocapture"];
        Self::start_with(&arguments, world_size, variables)
    }

    /// Starts `world_size` ranks of this test executable with these arguments and variables, for a
    /// program without libtest. Their stdout is piped.
    ///
    /// # Errors
    /// When the system refuses, or no world has that size.
    pub fn start_with(
        arguments: &[&str],
        world_size: usize,
        variables: &[(&str, &OsStr)],
    ) -> io::Result<Self> {
        let size = WorldSize::new(world_size).map_err(io::Error::other)?;
        let port = StorePort::reserve(Interfaces::Loopback)?;
        let mut started = Self { ranks: Vec::new(), _port: port };
        for rank in 0..world_size {
            // Rank 0's socket is its stdin, as in `dist_test!`.
            let (host, stdin) = match rank {
                0 => (StoreHost::Rank0Fd(0), Stdio::from(started._port.socket()?)),
                _ => (StoreHost::Rank0, Stdio::null()),
            };
            let world = World::on_one_host(rank, size, started._port.endpoint(host));
            let mut command = Command::new(std::env::current_exe()?);
            command.args(arguments).stdin(stdin).stdout(Stdio::piped());
            world.map_err(io::Error::other)?.describe_to(&mut command);
            command.envs(variables.iter().copied());
            command.env("OMP_NUM_THREADS", "1");
            started.ranks.push(command.spawn()?);
        }
        Ok(started)
    }

    /// The ranks, in order.
    pub fn ranks(&mut self) -> &mut [Child] {
        &mut self.ranks
    }
}

impl Drop for KillableRanks {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            // One that has ended cannot be killed.
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}
