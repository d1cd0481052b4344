//! Binding of each rank to processors.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{Cpu, CpuSet, Topology};
use crate::ValueError;

/// Binding mode: the processors that each rank is bound to.
///
/// A rank belongs to the NUMA node of its GPU; ranks without one are spread over the nodes by their
/// numbers of cores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum BindMode {
    /// Ranks are not bound to processors.
    #[default]
    None,
    /// Each rank has its own cores: an equal share of the cores of its NUMA node (torchrun's `exclusive`).
    Cores,
    /// Each rank is bound to all processors of its NUMA node (torchrun's `node`).
    Numa,
    /// Each rank is bound to all processors of its socket.
    Socket,
    /// Each rank is bound to the processors that share one last-level cache of its NUMA node.
    CoreComplex,
}

impl FromStr for BindMode {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        match text {
            "none" => Ok(Self::None),
            "cores" | "exclusive" => Ok(Self::Cores),
            "numa" | "node" => Ok(Self::Numa),
            "socket" => Ok(Self::Socket),
            "core-complex" => Ok(Self::CoreComplex),
            _ => Err(ValueError::expected("none, cores, numa, socket or core-complex", text)),
        }
    }
}

impl fmt::Display for BindMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Cores => "cores",
            Self::Numa => "numa",
            Self::Socket => "socket",
            Self::CoreComplex => "core-complex",
        })
    }
}

/// Error for ranks that cannot be bound as requested.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// The host has fewer cores than ranks.
    #[error(
        "--bind cores needs a core for each rank: {ranks} ranks need {ranks} cores, but this process may \
         use {cores}"
    )]
    TooFewCores {
        /// Number of ranks on this host.
        ranks: usize,
        /// Number of cores that this process may use.
        cores: usize,
    },
    /// A NUMA node has fewer cores than ranks whose GPUs are attached to it.
    #[error(
        "--bind cores needs a core for each rank: {ranks} ranks have their GPUs at NUMA node {node}, \
         where this process may use {cores} cores"
    )]
    TooFewCoresAtNode {
        /// Number of the NUMA node.
        node: usize,
        /// Number of ranks with a GPU at the node.
        ranks: usize,
        /// Number of cores of the node that this process may use.
        cores: usize,
    },
    /// This process may use none of the processors near a GPU.
    #[error(
        "the GPU of local rank {local_rank} is at NUMA node {node}, where this process may use no core; \
         check its affinity mask (taskset -p) or leave out --bind"
    )]
    NoProcessorAtNode {
        /// Local rank of the GPU.
        local_rank: usize,
        /// Number of the NUMA node.
        node: usize,
    },
}

/// Returns one set of processors for each local rank, or `None` if ranks are not bound. A pure function.
///
/// `nodes` has the NUMA node of each local rank's GPU, if it has one and that is known.
pub(super) fn bind(
    mode: BindMode,
    topology: &Topology,
    nodes: &[Option<usize>],
) -> Result<Option<Vec<CpuSet>>, BindError> {
    if mode == BindMode::None {
        return Ok(None);
    }
    let cores = Cores::of(topology);
    let ranks = nodes.len();
    if mode == BindMode::Cores && ranks > cores.0.len() {
        return Err(BindError::TooFewCores { ranks, cores: cores.0.len() });
    }
    let homes = homes(&cores, nodes)?;
    let at_node = |node| homes.iter().filter(move |home| home.node == node);
    let set = |local_rank: usize| {
        let home = homes[local_rank];
        let place = at_node(home.node).position(|other| other.local_rank == local_rank);
        let (place, ranks) = (place.unwrap_or(0), at_node(home.node).count());
        let cpus = |wanted: &dyn Fn(&Cpu) -> bool| {
            topology.cpus.iter().filter(|cpu| wanted(cpu)).map(|cpu| cpu.number).collect()
        };
        match mode {
            BindMode::None | BindMode::Numa => Ok(cpus(&|cpu| cpu.node == home.node)),
            BindMode::Socket => Ok(cpus(&|cpu| cpu.socket == home.socket)),
            BindMode::CoreComplex => {
                let mut complexes = complexes(topology, home.node);
                let place = place % complexes.len();
                Ok(complexes.swap_remove(place))
            }
            BindMode::Cores => {
                let own = cores.at(home.node);
                if ranks > own.len() {
                    let (node, cores) = (home.node, own.len());
                    return Err(BindError::TooFewCoresAtNode { node, ranks, cores });
                }
                // With a remainder, the first ranks get one core more.
                let start =
                    |place: usize| place * (own.len() / ranks) + place.min(own.len() % ranks);
                let mine: BTreeSet<_> =
                    own[start(place)..start(place + 1)].iter().map(|cpu| cpu.core).collect();
                Ok(cpus(&|cpu| cpu.node == home.node && mine.contains(&cpu.core)))
            }
        }
    };
    (0..ranks).map(set).collect::<Result<_, _>>().map(Some)
}

/// NUMA node and socket that a rank belongs to.
#[derive(Clone, Copy)]
struct Home {
    local_rank: usize,
    node: usize,
    socket: usize,
}

/// Cores, each represented by one processor, by node and then by number.
struct Cores(Vec<Cpu>);

impl Cores {
    fn of(topology: &Topology) -> Self {
        let mut cores = BTreeMap::new();
        for cpu in &topology.cpus {
            cores.entry((cpu.node, cpu.core)).or_insert(*cpu);
        }
        Self(cores.into_values().collect())
    }

    fn at(&self, node: usize) -> Vec<Cpu> {
        self.0.iter().filter(|cpu| cpu.node == node).copied().collect()
    }
}

fn homes(cores: &Cores, nodes: &[Option<usize>]) -> Result<Vec<Home>, BindError> {
    let home = |(local_rank, node): (usize, &Option<usize>)| {
        let ranks = nodes.len();
        let core = match *node {
            Some(node) => {
                let there = cores.0.iter().find(|cpu| cpu.node == node);
                there.ok_or(BindError::NoProcessorAtNode { local_rank, node })?
            }
            // Ranks without a GPU are spaced evenly over the cores.
            None => {
                let core = cores.0.get(local_rank * cores.0.len() / ranks);
                core.ok_or(BindError::TooFewCores { ranks, cores: 0 })?
            }
        };
        Ok(Home { local_rank, node: core.node, socket: core.socket })
    };
    nodes.iter().enumerate().map(home).collect()
}

/// Returns the processors of each last-level cache of a node. The largest come first, so that the few small ones of a
/// mixed processor come last.
fn complexes(topology: &Topology, node: usize) -> Vec<CpuSet> {
    let mut complexes: BTreeMap<usize, CpuSet> = BTreeMap::new();
    for cpu in topology.cpus.iter().filter(|cpu| cpu.node == node) {
        complexes.entry(cpu.cache).or_default().0.insert(cpu.number);
    }
    let mut complexes: Vec<_> = complexes.into_values().collect();
    complexes.sort_by_key(|set| std::cmp::Reverse(set.0.len()));
    complexes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a topology with `cores` of `threads` on each of `nodes`, two nodes to a socket and two cores to a cache;
    /// the second threads come after all first ones, as on most hosts.
    fn host(nodes: usize, cores: usize, threads: usize) -> Topology {
        let all = nodes * cores;
        let cpu = |number: usize| {
            let core = number % all;
            let node = core / cores;
            Cpu { number, core, cache: core / 2 * 2, node, socket: node / 2 }
        };
        Topology { cpus: (0..all * threads).map(cpu).collect() }
    }

    fn sets(mode: &str, topology: &Topology, nodes: &[Option<usize>]) -> Vec<String> {
        let sets = bind(mode.parse().unwrap(), topology, nodes).unwrap().unwrap();
        sets.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn ranks_without_gpus() {
        let (plain, smt) = (host(4, 4, 1), host(4, 4, 2));
        let table: [(&str, &Topology, usize, &[&str]); 15] = [
            ("numa", &plain, 1, &["0-3"]),
            ("numa", &plain, 2, &["0-3", "8-11"]),
            ("numa", &plain, 4, &["0-3", "4-7", "8-11", "12-15"]),
            ("numa", &plain, 5, &["0-3", "0-3", "4-7", "8-11", "12-15"]),
            ("numa", &smt, 2, &["0-3,16-19", "8-11,24-27"]),
            ("socket", &plain, 3, &["0-7", "0-7", "8-15"]),
            ("socket", &smt, 2, &["0-7,16-23", "8-15,24-31"]),
            ("cores", &plain, 2, &["0-3", "8-11"]),
            ("cores", &plain, 3, &["0-3", "4-7", "8-11"]),
            ("cores", &plain, 6, &["0-1", "2-3", "4-7", "8-9", "10-11", "12-15"]),
            (
                "cores",
                &smt,
                8,
                &[
                    "0-1,16-17",
                    "2-3,18-19",
                    "4-5,20-21",
                    "6-7,22-23",
                    "8-9,24-25",
                    "10-11,26-27",
                    "12-13,28-29",
                    "14-15,30-31",
                ],
            ),
            ("core-complex", &plain, 4, &["0-1", "4-5", "8-9", "12-13"]),
            ("core-complex", &plain, 5, &["0-1", "2-3", "4-5", "8-9", "12-13"]),
            ("core-complex", &smt, 1, &["0-1,16-17"]),
            ("core-complex", &host(1, 2, 1), 3, &["0-1", "0-1", "0-1"]),
        ];
        for (mode, topology, ranks, expected) in table {
            assert_eq!(sets(mode, topology, &vec![None; ranks]), expected, "{mode}, {ranks} ranks");
        }
    }

    #[test]
    fn ranks_near_their_gpus() {
        let plain = host(4, 4, 1);
        // Example of torchrun: 16 cores at node 1 with GPUs 2 and 3.
        let wide = host(2, 16, 1);
        let at = |nodes: &[usize]| -> Vec<_> { nodes.iter().map(|node| Some(*node)).collect() };
        // Mode, host, nodes of the GPUs, expected processors.
        type Case<'a> = (&'a str, &'a Topology, Vec<Option<usize>>, &'a [&'a str]);
        let table: [Case<'_>; 7] = [
            ("numa", &plain, at(&[3, 0]), &["12-15", "0-3"]),
            ("socket", &plain, at(&[3, 0]), &["8-15", "0-7"]),
            ("cores", &plain, at(&[3, 3, 3]), &["12-13", "14", "15"]),
            ("cores", &plain, at(&[3, 0, 3]), &["12-13", "0-3", "14-15"]),
            ("exclusive", &wide, at(&[0, 0, 1, 1]), &["0-7", "8-15", "16-23", "24-31"]),
            ("core-complex", &plain, at(&[1, 1, 1]), &["4-5", "6-7", "4-5"]),
            ("node", &plain, vec![Some(3), None], &["12-15", "8-11"]),
        ];
        for (mode, topology, nodes, expected) in table {
            assert_eq!(sets(mode, topology, &nodes), expected, "{mode}, {nodes:?}");
        }
    }

    #[test]
    fn a_mask_leaves_cores_out() {
        // Node 0 lacks a whole core and one thread of another.
        let mut masked = host(2, 2, 2);
        masked.cpus.retain(|cpu| ![0, 4, 5].contains(&cpu.number));
        assert_eq!(sets("numa", &masked, &[None, None]), ["1", "2-3,6-7"]);
        assert_eq!(sets("cores", &masked, &[None, None, None]), ["1", "2,6", "3,7"]);
    }

    #[test]
    fn large_caches_come_first() {
        // Four fast processors share one cache, followed by pairs of slow ones.
        let cpu = |number: usize| {
            let cache = if number < 4 { number / 2 * 2 } else { 4 };
            Cpu { number, core: number, cache, node: 0, socket: 0 }
        };
        let mixed = Topology { cpus: (0..8).map(cpu).collect() };
        assert_eq!(sets("core-complex", &mixed, &[None; 3]), ["4-7", "0-1", "2-3"]);
    }

    #[test]
    fn no_two_ranks_share_a_core() {
        for (nodes, cores, threads) in [(1, 1, 1), (1, 7, 2), (2, 3, 1), (4, 4, 2), (3, 5, 1)] {
            let topology = host(nodes, cores, threads);
            for ranks in 1..=nodes * cores {
                let sets = bind(BindMode::Cores, &topology, &vec![None; ranks]).unwrap().unwrap();
                let of = |set: &CpuSet| -> BTreeSet<_> {
                    set.0.iter().map(|cpu| topology.cpus[*cpu].core).collect()
                };
                let all: usize = sets.iter().map(|set| of(set).len()).sum();
                let together: BTreeSet<_> = sets.iter().flat_map(of).collect();
                assert!(sets.iter().all(|set| !set.0.is_empty()), "{ranks} ranks");
                assert_eq!(all, together.len(), "{ranks} ranks on {nodes} x {cores}");
            }
        }
    }

    #[test]
    fn what_cannot_be_is_said_with_the_numbers() {
        let refuse = |mode: &str, topology: &Topology, nodes: &[Option<usize>]| {
            bind(mode.parse().unwrap(), topology, nodes).unwrap_err().to_string()
        };
        assert_eq!(
            refuse("cores", &host(1, 4, 2), &[None; 8]),
            "--bind cores needs a core for each rank: 8 ranks need 8 cores, but this process \
             may use 4"
        );
        assert_eq!(
            refuse("cores", &host(2, 2, 1), &[Some(1); 3]),
            "--bind cores needs a core for each rank: 3 ranks have their GPUs at NUMA node \
             1, where this process may use 2 cores"
        );
        let mut masked = host(2, 2, 1);
        masked.cpus.retain(|cpu| cpu.node == 0);
        assert_eq!(
            refuse("numa", &masked, &[Some(0), Some(1)]),
            "the GPU of local rank 1 is at NUMA node 1, where this process may use no core; check its \
             affinity mask (taskset -p) or leave out --bind"
        );
        assert!(refuse("numa", &Topology::default(), &[None]).contains("this process may use 0"));
        assert_eq!(bind(BindMode::None, &Topology::default(), &[None]), Ok(None));
    }

    #[test]
    fn modes_come_back_as_they_were_written() {
        for (text, shown) in [
            ("none", "none"),
            ("cores", "cores"),
            ("exclusive", "cores"),
            ("numa", "numa"),
            ("node", "numa"),
            ("socket", "socket"),
            ("core-complex", "core-complex"),
        ] {
            assert_eq!(text.parse::<BindMode>().unwrap().to_string(), shown);
        }
        assert!("".parse::<BindMode>().is_err());
    }
}
