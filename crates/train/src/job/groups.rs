//! The process groups of a job, replaced when they were aborted.

use std::fmt;
use std::time::Duration;

use brigade_rank_env::World;
use brigade_sharding::{Axis, Mesh};
use brigade_torch::{
    Backend, Error, ExpertGroups, ExpertShardGroups, GlooDevice, GroupOptions, ProcessGroup,
    Result, ShardingGroups, Store,
};
use parking_lot::{Mutex, RwLock};
use tch::Device;

/// The process groups of a job, and what is needed to make new ones. A group whose messages were interrupted is
/// unusable, so after an attempt that ran out of memory all ranks reconnect.
pub(crate) struct Groups {
    /// Store of the ranks, for messages besides the collectives.
    pub(crate) store: Store,
    backend: Backend,
    /// Gloo's network interface or address, used beside NCCL.
    gloo: GlooDevice,
    timeout: Duration,
    debug: bool,
    current: RwLock<Connected>,
}

/// The groups of the last rendezvous.
struct Connected {
    world: ProcessGroup,
    /// Group of this host's ranks, if there are several hosts.
    host: Option<ProcessGroup>,
    /// Groups of sharded models, made for the first of them.
    sharding: Mutex<Option<(ShardingKey, ShardingGroups)>>,
}

impl Groups {
    pub(crate) fn connect(
        store: Store,
        world: &World,
        backend: Backend,
        gloo: GlooDevice,
        timeout: Duration,
        debug: bool,
    ) -> Result<Self> {
        // Prefix that PyTorch uses for the first group, so that Python ranks can join.
        let options = GroupOptions {
            name: "world".into(),
            store_key: Some("0".into()),
            timeout,
            gloo: gloo.clone(),
            debug,
            ..GroupOptions::default()
        };
        let connected = Connected::connect(&store, world, backend.clone(), options)?;
        let current = RwLock::new(connected);
        Ok(Self { store, backend, gloo, timeout, debug, current })
    }

    /// Makes new groups on all ranks, for the `number`th time.
    pub(crate) fn reconnect(&self, world: &World, number: u64) -> Result<()> {
        let options = GroupOptions {
            name: "world".into(),
            store_key: Some(format!("brigade_again_{number}")),
            timeout: self.timeout,
            gloo: self.gloo.clone(),
            debug: self.debug,
            ..GroupOptions::default()
        };
        let connected = Connected::connect(&self.store, world, self.backend.clone(), options)?;
        // The old groups end when their last handle is dropped, outside of the lock.
        let old = std::mem::replace(&mut *self.current.write(), connected);
        drop(old);
        Ok(())
    }

    /// Returns the groups of the ranks that differ from this one along an axis of a mesh alone; `None` if there are no
    /// others. All ranks take part.
    pub(crate) fn along(&self, mesh: &Mesh, axis: Axis) -> Result<Option<Self>> {
        let world = self.world();
        let group = along(&world, mesh, axis)?;
        if group.size() == 1 {
            return Ok(None);
        }
        let first = mesh.group(world.rank(), axis)?.first().copied().unwrap_or_default();
        let store = self.store.prefix(&format!("{axis}_of_rank_{first}"))?;
        let connected = Connected { world: group, host: None, sharding: Mutex::default() };
        Ok(Some(Self {
            store,
            backend: self.backend.clone(),
            gloo: self.gloo.clone(),
            timeout: self.timeout,
            debug: self.debug,
            current: RwLock::new(connected),
        }))
    }

    /// Returns the group of the ranks that differ from this one along an axis of a mesh alone. All ranks take part.
    pub(crate) fn group_along(&self, mesh: &Mesh, axis: Axis) -> Result<ProcessGroup> {
        along(&self.world(), mesh, axis)
    }

    pub(crate) fn world(&self) -> ProcessGroup {
        self.current.read().world.clone()
    }

    pub(crate) fn host(&self) -> Option<ProcessGroup> {
        self.current.read().host.clone()
    }

    /// Returns the groups of a mesh with parts of `part` ranks, and those of experts if there are some. They are made at
    /// the first call. All ranks take part.
    pub(crate) fn sharding(
        &self,
        mesh: &Mesh,
        part: Option<usize>,
        has_experts: bool,
    ) -> Result<ShardingGroups> {
        let current = self.current.read();
        let mut known = current.sharding.lock();
        let wanted = (mesh.clone(), part, has_experts);
        if let Some((_, groups)) = known.as_ref().filter(|(known, _)| *known == wanted) {
            return Ok(groups.clone());
        }
        let groups = sharding_groups(&current.world, mesh, part, has_experts)?;
        *known = Some((wanted, groups.clone()));
        Ok(groups)
    }
}

/// The mesh of sharded models, the number of ranks of a part, and `true` if there are experts.
type ShardingKey = (Mesh, Option<usize>, bool);

impl Connected {
    fn connect(
        store: &Store,
        world: &World,
        backend: Backend,
        options: GroupOptions,
    ) -> Result<Self> {
        let store = store.prefix("default_pg")?;
        let (rank, size) = (world.rank.as_usize(), world.world_size.as_usize());
        let group = ProcessGroup::new(&store, rank, size, backend, options)?;
        let host = match world.num_nodes {
            1 => None,
            _ => host_group(&group, world)?,
        };
        Ok(Self { world: group, host, sharding: Mutex::default() })
    }
}

/// The group of this host's ranks. Hosts may have different numbers of ranks, so every rank sends its host's number.
fn host_group(group: &ProcessGroup, world: &World) -> Result<Option<ProcessGroup>> {
    let hosts: Vec<usize> = group.all_gather_object(&world.node_rank)?;
    let mut mine = None;
    for host in 0..world.num_nodes {
        let ranks: Vec<usize> = (0..hosts.len()).filter(|&rank| hosts[rank] == host).collect();
        if ranks.is_empty() {
            return Err(Error::invalid_argument(format!(
                "no rank runs on host {host}, but GROUP_WORLD_SIZE is {}",
                world.num_nodes
            )));
        }
        mine = group.subgroup(&ranks)?.or(mine);
    }
    Ok(mine)
}

/// Makes the groups of a mesh, in the same order on all ranks.
fn sharding_groups(
    world: &ProcessGroup,
    mesh: &Mesh,
    part: Option<usize>,
    has_experts: bool,
) -> Result<ShardingGroups> {
    let own = |axis: Axis| along(world, mesh, axis);
    let axis = Axis::ShardContext;
    Ok(ShardingGroups {
        gather: own(Axis::ShardContext)?,
        reduce: own(Axis::ShardContext)?,
        replicas: (mesh.size(Axis::Replicate) > 1).then(|| own(Axis::Replicate)).transpose()?,
        parts: part.map(|size| one_of(world, mesh, axis, mesh.parts(axis, size)?)).transpose()?,
        experts: (has_experts && mesh.size(Axis::ExpertData) > 1)
            .then(|| expert_groups(own, mesh.size(Axis::ExpertShard)))
            .transpose()?,
    })
}

/// Makes the groups of the ranks with the same experts, of which `shards` share one copy.
fn expert_groups(
    own: impl Fn(Axis) -> Result<ProcessGroup>,
    shards: usize,
) -> Result<ExpertGroups> {
    let shard_groups = || -> Result<_> {
        let axis = Axis::ExpertShard;
        Ok(ExpertShardGroups { gather: own(axis)?, reduce: own(axis)? })
    };
    let same = own(Axis::ExpertData)?;
    Ok(ExpertGroups { same, shards: (shards > 1).then(shard_groups).transpose()? })
}

/// Makes all groups of an axis, and returns the one that contains this rank. All ranks take part.
fn along(world: &ProcessGroup, mesh: &Mesh, axis: Axis) -> Result<ProcessGroup> {
    one_of(world, mesh, axis, mesh.groups(axis))
}

fn one_of(
    world: &ProcessGroup,
    mesh: &Mesh,
    axis: Axis,
    groups: Vec<Vec<usize>>,
) -> Result<ProcessGroup> {
    let mut mine = None;
    for ranks in groups {
        mine = world.subgroup(&ranks)?.or(mine);
    }
    mine.ok_or_else(|| {
        let rank = world.rank();
        Error::invalid_argument(format!("rank {rank} is in no group of {axis} in mesh {mesh}"))
    })
}

/// Returns groups of one rank, whose messages are copies.
pub(super) fn alone(device: Device) -> Result<ShardingGroups> {
    let store = Store::hash()?;
    let group = |name: &str| {
        let options =
            GroupOptions { name: name.to_owned(), device: Some(device), ..GroupOptions::default() };
        ProcessGroup::new(&store, 0, 1, Backend::Fake, options)
    };
    Ok(ShardingGroups {
        gather: group("gather")?,
        reduce: group("reduce")?,
        replicas: None,
        parts: None,
        experts: None,
    })
}

impl fmt::Debug for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Groups").field("world", &self.world()).finish_non_exhaustive()
    }
}
