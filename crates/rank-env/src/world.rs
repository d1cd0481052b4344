//! One process's place in the job: read from the environment, or written to a child's.

use std::ffi::OsString;
use std::fmt;
use std::process::Command;

use crate::scheduler::{self, Names, Place};
use crate::store::is_loopback;
use crate::vars::{Vars, below};
use crate::{LocalRank, Rank, StoreEndpoint, StoreHost, WorldError, WorldSize, env};

/// Place of one process in the job: its rank, the world size and the store. Consistent by construction.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct World {
    /// Rank of this process in the job.
    pub rank: Rank,
    /// Number of processes (ranks) in the job.
    pub world_size: WorldSize,
    /// Local rank: the number of this process on its host.
    pub local_rank: LocalRank,
    /// Number of processes of the job on this host.
    pub local_world_size: WorldSize,
    /// Number of this host in the job, from 0.
    pub node_rank: usize,
    /// Number of hosts in the job.
    pub num_nodes: usize,
    /// Endpoint of the store, through which the ranks meet.
    pub store: StoreEndpoint,
    /// Number of restarts of the job so far.
    pub restart_count: u32,
    /// Maximum number of restarts.
    pub max_restarts: u32,
    /// Name of the job, if the launcher gave it one.
    pub run_id: Option<String>,
    /// Role of this process. All processes of a Brigade job have the same role, so its rank and size within the role
    /// are those in the job.
    pub role: String,
}

impl World {
    /// Returns the world of a single process without a launcher.
    ///
    /// ```
    /// let world = brigade_rank_env::World::alone();
    /// assert!(world.is_alone() && world.is_main());
    /// ```
    #[must_use]
    pub fn alone() -> Self {
        Self {
            rank: Rank::ZERO,
            world_size: WorldSize::ONE,
            local_rank: LocalRank::ZERO,
            local_world_size: WorldSize::ONE,
            node_rank: 0,
            num_nodes: 1,
            store: StoreEndpoint::alone(),
            restart_count: 0,
            max_restarts: 0,
            run_id: None,
            role: DEFAULT_ROLE.to_owned(),
        }
    }

    /// Returns the world of rank `rank` of `world_size`, with all ranks on this host.
    ///
    /// # Errors
    /// [`WorldError::RankOutOfRange`] if `rank` is not below `world_size`.
    pub fn on_one_host(
        rank: usize,
        world_size: WorldSize,
        store: StoreEndpoint,
    ) -> Result<Self, WorldError> {
        Ok(Self {
            rank: Rank::new(rank, world_size)?,
            world_size,
            local_rank: LocalRank::new(rank, world_size)?,
            local_world_size: world_size,
            store,
            ..Self::alone()
        })
    }

    /// Returns this process's place in a smaller group, whose ranks count as those of one host: for example the ranks
    /// that read different samples, where other ranks divide layers between them. Store and name of the job stay.
    ///
    /// ```
    /// use brigade_rank_env::{StoreEndpoint, World, WorldSize};
    ///
    /// // Ranks 1 and 3 of 4.
    /// let world = World::on_one_host(3, WorldSize::new(4)?, StoreEndpoint::alone())?;
    /// let second = world.among(1, WorldSize::new(2)?)?;
    /// assert_eq!((second.rank.as_usize(), second.local_rank.as_usize()), (1, 1));
    /// # Ok::<(), brigade_rank_env::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// [`WorldError::RankOutOfRange`] if `rank` is not below `world_size`.
    pub fn among(&self, rank: usize, world_size: WorldSize) -> Result<Self, WorldError> {
        Ok(Self {
            rank: Rank::new(rank, world_size)?,
            world_size,
            local_rank: LocalRank::new(rank, world_size)?,
            local_world_size: world_size,
            node_rank: 0,
            num_nodes: 1,
            ..self.clone()
        })
    }

    /// Reads the world from this process's environment. Returns [`World::alone`] if no launcher has set it.
    ///
    /// # Errors
    /// Returns the same errors as [`World::from_vars`].
    pub fn from_env() -> Result<Self, WorldError> {
        // Bytes that are not Unicode turn up in the error message as a value that is not a number.
        let vars = |name: &str| std::env::var_os(name).map(into_text);
        Self::read(Vars(&vars), Some(std::process::id()))
    }

    /// Reads the world from any source of variables, independent of the real environment.
    ///
    /// - `RANK` and `WORLD_SIZE` come together, and more than one rank needs `MASTER_ADDR` and
    ///   `MASTER_PORT`.
    /// - Without both of them, the process may have a place from a [`scheduler`].
    /// - Else, with none of `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, it runs alone,
    ///   whatever else is set.
    /// - Without `LOCAL_WORLD_SIZE`, ranks that meet on the loopback are all on this host; others
    ///   are taken to be spread evenly over `GROUP_WORLD_SIZE` hosts, or one to a host (as
    ///   Kubeflow starts them) if that is not set either. `LOCAL_RANK` and `GROUP_RANK` follow.
    ///
    /// # Errors
    /// The variables do not describe a valid world. The error names the variable and its value.
    pub fn from_vars(vars: impl Fn(&str) -> Option<String>) -> Result<Self, WorldError> {
        Self::read(Vars(&vars), None)
    }

    fn read(vars: Vars<'_>, pid: Option<u32>) -> Result<Self, WorldError> {
        let complete = vars.text(env::RANK).is_some() && vars.text(env::WORLD_SIZE).is_some();
        if !complete && let Some(place) = scheduler::place(vars, pid)? {
            return Self::scheduled(place, vars);
        }
        let Some((rank, world_size)) = vars.rank_and_world_size()? else {
            return Ok(Self::alone());
        };
        scheduler::contradiction(vars, rank, world_size)?;
        let world = WorldSize::new(world_size)?;
        let store = vars.store(rank, world)?;

        let nodes = vars.number(env::GROUP_WORLD_SIZE)?;
        if nodes == Some(0) {
            return Err(vars.not_a_number(env::GROUP_WORLD_SIZE, "a number of hosts, at least 1"));
        }
        let local_size = match (vars.number(env::LOCAL_WORLD_SIZE)?, nodes) {
            (Some(size), _) => size,
            (None, _) if is_loopback(&store.addr) => world_size,
            (None, Some(nodes)) => world_size.div_ceil(nodes),
            (None, None) => 1,
        };
        if local_size > world_size || local_size == 0 {
            return Err(WorldError::Contradiction {
                name: env::LOCAL_WORLD_SIZE,
                value: local_size,
                other: env::WORLD_SIZE,
                other_value: world_size,
                rule: "a host has at least one rank and at most all of them",
            });
        }
        let local_rank = vars.number(env::LOCAL_RANK)?.unwrap_or(rank % local_size);
        // A custom launcher may set LOCAL_RANK alone, which gives a lower bound of the number.
        let (local_size, bound) = match vars.number(env::LOCAL_WORLD_SIZE)? {
            Some(size) => (size, (env::LOCAL_WORLD_SIZE, size)),
            None => (local_size.max(local_rank.saturating_add(1)), (env::WORLD_SIZE, world_size)),
        };
        below((env::LOCAL_RANK, local_rank), bound)?;

        let num_nodes = nodes.unwrap_or_else(|| world_size.div_ceil(local_size));
        let node_rank =
            vars.number(env::GROUP_RANK)?.unwrap_or_else(|| (rank / local_size).min(num_nodes - 1));
        let (num_nodes, bound) = match nodes {
            Some(nodes) => (nodes, (env::GROUP_WORLD_SIZE, nodes)),
            None => (num_nodes.max(node_rank.saturating_add(1)), (env::WORLD_SIZE, world_size)),
        };
        below((env::GROUP_RANK, node_rank), bound)?;

        let local_world_size = WorldSize::new(local_size)?;
        Ok(Self {
            rank: Rank::new(rank, world)?,
            world_size: world,
            local_rank: LocalRank::new(local_rank, local_world_size)?,
            local_world_size,
            node_rank,
            num_nodes,
            store,
            restart_count: vars.count(env::TORCHELASTIC_RESTART_COUNT)?,
            max_restarts: vars.count(env::TORCHELASTIC_MAX_RESTARTS)?,
            run_id: vars.text(env::TORCHELASTIC_RUN_ID),
            role: vars.text(env::ROLE_NAME).unwrap_or_else(|| DEFAULT_ROLE.to_owned()),
        })
    }

    /// Checks a scheduler's place, and that torchrun's variables, as far as they are set, agree with it.
    fn scheduled(place: Place, vars: Vars<'_>) -> Result<Self, WorldError> {
        let Names { rank, size, local_rank, local_size } = place.names;
        for (name, other, value) in [
            (env::RANK, rank, place.rank),
            (env::WORLD_SIZE, size, place.size),
            (env::LOCAL_RANK, local_rank, place.local_rank),
            (env::LOCAL_WORLD_SIZE, local_size, place.local_size),
        ] {
            match vars.number(name)? {
                Some(set) if set != value => {
                    return Err(WorldError::Contradiction {
                        name,
                        value: set,
                        other,
                        other_value: value,
                        rule: "both mean the same; unset the first",
                    });
                }
                _ => {}
            }
        }
        below((rank, place.rank), (size, place.size))?;
        below((local_rank, place.local_rank), (local_size, place.local_size))?;
        if place.size == 1 {
            return Ok(Self::alone());
        }
        let world_size = WorldSize::new(place.size)?;
        let local_world_size = WorldSize::new(place.local_size)?;
        Ok(Self {
            rank: Rank::new(place.rank, world_size)?,
            world_size,
            local_rank: LocalRank::new(place.local_rank, local_world_size)?,
            local_world_size,
            node_rank: place.node,
            num_nodes: place.nodes,
            store: StoreEndpoint { addr: place.addr, port: place.port, host: StoreHost::Rank0 },
            run_id: place.run_id,
            ..Self::alone()
        })
    }

    /// Returns the environment variables that describe this place: [`World::from_vars`] reads the same world from them.
    #[must_use]
    pub fn to_env(&self) -> Vec<(&'static str, String)> {
        let agent_store = if self.store.host == StoreHost::Agent { "True" } else { "False" };
        let mut vars = vec![
            (env::RANK, self.rank.to_string()),
            (env::WORLD_SIZE, self.world_size.to_string()),
            (env::LOCAL_RANK, self.local_rank.to_string()),
            (env::LOCAL_WORLD_SIZE, self.local_world_size.to_string()),
            (env::GROUP_RANK, self.node_rank.to_string()),
            (env::GROUP_WORLD_SIZE, self.num_nodes.to_string()),
            (env::ROLE_NAME, self.role.clone()),
            (env::ROLE_RANK, self.rank.to_string()),
            (env::ROLE_WORLD_SIZE, self.world_size.to_string()),
            (env::MASTER_ADDR, self.store.addr.clone()),
            (env::MASTER_PORT, self.store.port.to_string()),
            (env::TORCHELASTIC_RESTART_COUNT, self.restart_count.to_string()),
            (env::TORCHELASTIC_MAX_RESTARTS, self.max_restarts.to_string()),
            (env::TORCHELASTIC_USE_AGENT_STORE, agent_store.to_owned()),
        ];
        if let Some(id) = &self.run_id {
            vars.push((env::TORCHELASTIC_RUN_ID, id.clone()));
        }
        if let StoreHost::Rank0Fd(fd) = self.store.host {
            vars.push((env::BRIGADE_STORE_FD, fd.to_string()));
        }
        vars
    }

    /// Sets the environment variables of a child process to this place. Inherited variables of the launcher's contract
    /// are removed first, so that a job started from inside another job does not inherit its settings.
    pub fn describe_to(&self, child: &mut Command) {
        for variable in env::TABLE {
            child.env_remove(variable.name);
        }
        child.envs(self.to_env());
    }

    /// Returns `true` for a job of one process.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.world_size == WorldSize::ONE
    }

    /// Returns `true` for rank 0.
    #[must_use]
    pub fn is_main(&self) -> bool {
        self.rank == Rank::ZERO
    }
}

/// `rank 1 of 2`
impl fmt::Display for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.world_size)
    }
}

/// Reads of torchrun's variables alone.
impl Vars<'_> {
    fn rank_and_world_size(&self) -> Result<Option<(usize, usize)>, WorldError> {
        let (rank, size) = match (self.number(env::RANK)?, self.number(env::WORLD_SIZE)?) {
            (Some(rank), Some(size)) => (rank, size),
            (None, None) => {
                for present in [env::LOCAL_RANK, env::LOCAL_WORLD_SIZE] {
                    if self.text(present).is_some() {
                        return Err(self.missing(present, env::RANK, START_OR_UNSET));
                    }
                }
                return Ok(None);
            }
            (Some(_), None) => {
                return Err(self.missing(env::RANK, env::WORLD_SIZE, START_OR_UNSET));
            }
            (None, Some(_)) => {
                return Err(self.missing(env::WORLD_SIZE, env::RANK, START_OR_UNSET));
            }
        };
        below((env::RANK, rank), (env::WORLD_SIZE, size))?;
        Ok(Some((rank, size)))
    }

    fn store(&self, rank: usize, world: WorldSize) -> Result<StoreEndpoint, WorldError> {
        let (addr, port) = match (self.text(env::MASTER_ADDR), self.text(env::MASTER_PORT)) {
            (Some(addr), Some(_)) => (addr, self.port(env::MASTER_PORT)?.unwrap_or_default()),
            _ if world == WorldSize::ONE => return Ok(StoreEndpoint::alone()),
            (None, _) => {
                return Err(self.missing(env::WORLD_SIZE, env::MASTER_ADDR, SET_MASTER));
            }
            (_, None) => {
                return Err(self.missing(env::WORLD_SIZE, env::MASTER_PORT, SET_MASTER));
            }
        };
        // A torchrun started inside a rank of `brigade launch` passes our descriptor's number on
        // but not the descriptor, so the launcher's own store comes first.
        let host = if self.flag(env::TORCHELASTIC_USE_AGENT_STORE)? {
            StoreHost::Agent
        } else {
            match self.parse::<u16>(env::BRIGADE_STORE_FD, "the number of an open descriptor")? {
                Some(fd) if rank == 0 => StoreHost::Rank0Fd(i32::from(fd)),
                _ => StoreHost::Rank0,
            }
        };
        Ok(StoreEndpoint { addr, port, host })
    }
}

fn into_text(value: OsString) -> String {
    value.into_string().unwrap_or_else(|raw| raw.to_string_lossy().into_owned())
}

/// Default role, as in torchrun.
const DEFAULT_ROLE: &str = "default";
const START_OR_UNSET: &str =
    "start the program with `brigade launch` or torchrun, or unset the first to run it alone";
const SET_MASTER: &str = "the ranks cannot find each other; start them with `brigade launch` or \
                          torchrun, or set MASTER_ADDR and MASTER_PORT to where rank 0 listens";
