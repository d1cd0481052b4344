//! The process groups of a job: new ones when the old were given up.

use std::fmt;
use std::sync::OnceLock;
use std::time::Duration;

use brigade_torch::{Backend, Device, GroupOptions, ProcessGroup, Store};
use brigade_world::World;

use crate::error::{Error, Result};

/// What the ranks of a job meet with. A group whose messages were cut off in the middle cannot go on, so
/// after a try that ran out of memory all ranks meet again.
pub(crate) struct Groups {
    /// Where the ranks met, for messages beside the collectives.
    pub(crate) store: Store,
    backend: Backend,
    device: Device,
    timeout: Duration,
    debug: bool,
    first: Link,
}

/// A generation of groups. Older ones stay where they are: `Accelerator::group` gives references.
struct Link {
    world: ProcessGroup,
    /// The ranks of this host, when there are several hosts.
    host: Option<ProcessGroup>,
    next: OnceLock<Box<Self>>,
}

impl Groups {
    pub(crate) fn meet(
        meeting: Store,
        world: &World,
        backend: Backend,
        device: Device,
        timeout: Duration,
        debug: bool,
    ) -> Result<Self> {
        // PyTorch's place in the store for the first group, so that Python ranks can join.
        let options = GroupOptions {
            name: "world".into(),
            store_key: Some("0".into()),
            timeout,
            device: Some(device),
            debug,
            ..GroupOptions::default()
        };
        let first = Link::meet(&meeting, world, backend.clone(), options)?;
        Ok(Self { store: meeting, backend, device, timeout, debug, first })
    }

    /// All ranks meet again, for the `number`th time.
    pub(crate) fn meet_again(&self, world: &World, number: u64) -> Result<()> {
        let options = GroupOptions {
            name: "world".into(),
            store_key: Some(format!("brigade_again_{number}")),
            timeout: self.timeout,
            device: Some(self.device),
            debug: self.debug,
            ..GroupOptions::default()
        };
        let link = Link::meet(&self.store, world, self.backend.clone(), options)?;
        // Only one thread makes groups: the one that trains.
        let _ = self.newest().next.set(Box::new(link));
        Ok(())
    }

    pub(crate) fn world(&self) -> &ProcessGroup {
        &self.newest().world
    }

    pub(crate) fn host(&self) -> Option<&ProcessGroup> {
        self.newest().host.as_ref()
    }

    fn newest(&self) -> &Link {
        let mut link = &self.first;
        while let Some(next) = link.next.get() {
            link = next;
        }
        link
    }
}

impl Link {
    fn meet(
        meeting: &Store,
        world: &World,
        backend: Backend,
        options: GroupOptions,
    ) -> Result<Self> {
        let store = meeting.prefix("default_pg")?;
        let (rank, size) = (world.rank.as_usize(), world.world_size.as_usize());
        let group = ProcessGroup::new(&store, rank, size, backend, options)?;
        let host = match world.num_nodes {
            1 => None,
            _ => host_group(&group, world)?,
        };
        Ok(Self { world: group, host, next: OnceLock::new() })
    }
}

/// The group of this host's ranks. Hosts may have different numbers of ranks: all tell theirs.
fn host_group(group: &ProcessGroup, world: &World) -> Result<Option<ProcessGroup>> {
    let hosts: Vec<usize> = group.all_gather_object(&world.node_rank)?;
    let mut mine = None;
    for host in 0..world.num_nodes {
        let ranks: Vec<usize> = (0..hosts.len()).filter(|&rank| hosts[rank] == host).collect();
        if ranks.is_empty() {
            return Err(Error::Misuse(format!(
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
        f.debug_struct("Groups").field("world", self.world()).finish_non_exhaustive()
    }
}
