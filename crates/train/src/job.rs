//! The process's place among the ranks, and its connections.

mod attempt;
pub(crate) mod connect;
mod groups;
mod memory;

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use brigade_rank_env::{World, WorldSize};
use brigade_sharding::{Axis, Mesh};
use brigade_torch::{
    DeviceUnavailable, Error, ProcessGroup, Products, Result, ShardingGroups, Store,
};
use parking_lot::Mutex;
use tch::Device;

use crate::error::MemoryPlan;
use crate::job::groups::Groups;
use crate::recorder::Recorder;

/// The process's rank and its connections, shared by everything that was prepared.
pub(crate) struct Job {
    pub(crate) world: World,
    /// Process groups. `None` with one rank.
    groups: Option<Groups>,
    pub(crate) device: Device,
    /// Reason why a program that was built for GPUs runs on the CPU. `None` if the CPU was requested.
    pub(crate) missing_gpu: Option<DeviceUnavailable>,
    /// Reproducibility of matrix products on the CPU.
    pub(crate) products: Products,
    /// Time limit of joining and of every collective.
    pub(crate) timeout: Duration,
    /// `true` if ranks compare their collectives and check losses.
    pub(crate) debug: bool,
    /// Number of saves begun: the same on all ranks, which save together.
    pub(crate) saves: AtomicU64,
    /// Number of attempts with a batch size: the same on all ranks.
    pub(crate) tries: AtomicU64,
    /// Number of Accelerators that check losses: the same on all ranks.
    pub(crate) loss_checks: AtomicU64,
    /// Memory plan of the last sharded model, for errors.
    pub(crate) memory_plan: Mutex<Option<MemoryPlan>>,
    /// Host work of a recorded step at each replay.
    pub(crate) recorder: Recorder,
}

impl Job {
    /// Returns the group of all ranks. `None` with one rank.
    pub(crate) fn group(&self) -> Option<ProcessGroup> {
        self.groups.as_ref().map(Groups::world)
    }

    /// Returns the group of the ranks of this host. `None` with one host.
    pub(crate) fn host_group(&self) -> Option<ProcessGroup> {
        self.groups.as_ref().and_then(Groups::host)
    }

    /// Returns the store for messages besides the collectives. `None` with one rank.
    pub(crate) fn store(&self) -> Option<&Store> {
        self.groups.as_ref().map(|groups| &groups.store)
    }

    /// Returns the groups of a mesh with parts of `part` ranks, and those of experts if there are some. All ranks take
    /// part.
    pub(crate) fn sharding_groups(
        &self,
        mesh: &Mesh,
        part: Option<usize>,
        has_experts: bool,
    ) -> Result<ShardingGroups> {
        match &self.groups {
            Some(groups) => groups.sharding(mesh, part, has_experts),
            None => groups::alone(self.device),
        }
    }

    /// Returns the ranks that differ from this one only along an axis of a mesh, as a job of their own. All ranks take
    /// part.
    pub(crate) fn along(&self, mesh: &Mesh, axis: Axis) -> Result<Self> {
        let groups = match &self.groups {
            Some(groups) => groups.along(mesh, axis)?,
            None => None,
        };
        let (rank, size) = (mesh.coordinate(self.rank(), axis)?, mesh.size(axis));
        Ok(Self {
            world: self.world.among(rank, WorldSize::new(size)?)?,
            groups,
            device: self.device,
            missing_gpu: self.missing_gpu.clone(),
            products: self.products,
            timeout: self.timeout,
            debug: self.debug,
            saves: AtomicU64::new(0),
            tries: AtomicU64::new(0),
            loss_checks: AtomicU64::new(0),
            memory_plan: Mutex::default(),
            recorder: Recorder::default(),
        })
    }

    /// Returns the group of the ranks that differ from this one along an axis of a mesh alone. All ranks take part.
    pub(crate) fn group_along(&self, mesh: &Mesh, axis: Axis) -> Result<ProcessGroup> {
        match &self.groups {
            Some(groups) => groups.group_along(mesh, axis),
            None => Err(Error::invalid_argument(format!(
                "the mesh {mesh} has several ranks along {axis}, and this job has one rank"
            ))),
        }
    }

    /// Makes a new group of all ranks, in place of an unusable one.
    pub(crate) fn reconnect(&self, number: u64) -> Result<()> {
        match &self.groups {
            Some(groups) => groups.reconnect(&self.world, number),
            None => Ok(()),
        }
    }

    pub(crate) fn rank(&self) -> usize {
        self.world.rank.as_usize()
    }

    pub(crate) fn size(&self) -> usize {
        self.world.world_size.as_usize()
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").field("world", &self.world).finish_non_exhaustive()
    }
}
