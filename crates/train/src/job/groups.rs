//! The process groups of a job, replaced when they were aborted.

use std::fmt;
use std::time::Duration;

use brigade_rank_env::World;
use brigade_torch::{Backend, Error, GlooDevice, GroupOptions, ProcessGroup, Result, Store};
use parking_lot::RwLock;

/// The process groups of a job and what makes new ones. A group whose messages were cut off in the middle is
/// unusable, so after an attempt that ran out of memory all ranks reconnect.
pub(crate) struct Groups {
    /// The ranks' rendezvous, for messages beside the collectives.
    pub(crate) store: Store,
    backend: Backend,
    /// Where Gloo listens beside NCCL.
    gloo: GlooDevice,
    timeout: Duration,
    debug: bool,
    current: RwLock<Connected>,
}

/// The groups of the last rendezvous.
struct Connected {
    world: ProcessGroup,
    /// The ranks of this host, when there are several hosts.
    host: Option<ProcessGroup>,
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
        // PyTorch's place in the store for the first group, so that Python ranks can join.
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
        // The old groups end when the last handle of theirs goes, outside of the lock.
        let old = std::mem::replace(&mut *self.current.write(), connected);
        drop(old);
        Ok(())
    }

    pub(crate) fn world(&self) -> ProcessGroup {
        self.current.read().world.clone()
    }

    pub(crate) fn host(&self) -> Option<ProcessGroup> {
        self.current.read().host.clone()
    }
}

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
        Ok(Self { world: group, host })
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
                "no rank runs on host {host}, but GROUP_WORLD_SIZE says there are {} hosts",
                world.num_nodes
            )));
        }
        mine = group.subgroup(&ranks)?.or(mine);
    }
    Ok(mine)
}

impl fmt::Debug for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Groups").field("world", &self.world()).finish_non_exhaustive()
    }
}
