//! Processors, cores, caches, NUMA nodes and sockets, as the kernel describes them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::CpuSet;

/// Processors that this process may use, with their cores, caches, NUMA nodes and sockets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    /// Logical processors, by number.
    pub cpus: Vec<Cpu>,
}

/// Logical processor: a hardware thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// Number of the processor in the system.
    pub number: usize,
    /// Core of the processor, identified by its lowest processor number. The hardware threads of a core share it.
    pub core: usize,
    /// Last-level cache of the processor, identified by the lowest processor number that uses it.
    pub cache: usize,
    /// Number of the NUMA node.
    pub node: usize,
    /// Number of the socket.
    pub socket: usize,
}

impl Topology {
    /// Reads the topology of these processors from the files under `root`, which stands for `/`.
    ///
    /// Details that the system does not describe (a container without `/sys`, a kernel without NUMA) default to one:
    /// one thread per core, one cache, one node, one socket.
    #[must_use]
    pub fn read(root: &Path, allowed: &CpuSet) -> Self {
        let system = root.join("sys/devices/system");
        let nodes = nodes(&system.join("node"));
        let cpus = allowed.0.iter().map(|&number| {
            let folder = system.join("cpu").join(format!("cpu{number}"));
            let topology = folder.join("topology");
            let lowest = |name: &str| list(&topology.join(name))?.0.first().copied();
            Cpu {
                number,
                // The older name remains available; old kernels do not have the newer one.
                core: lowest("thread_siblings_list").unwrap_or(number),
                cache: last_cache(&folder.join("cache")).unwrap_or(0),
                node: nodes.get(&number).copied().unwrap_or(0),
                socket: read(&topology.join("physical_package_id"))
                    .and_then(|id| id.parse().ok())
                    .unwrap_or(0),
            }
        });
        Self { cpus: cpus.collect() }
    }

    /// Returns the number of cores to which these processors belong.
    pub(crate) fn cores_of(&self, set: &CpuSet) -> usize {
        let on = self.cpus.iter().filter(|cpu| set.0.contains(&cpu.number));
        on.map(|cpu| cpu.core).collect::<BTreeSet<_>>().len()
    }
}

/// Returns the NUMA node of every processor.
fn nodes(folder: &Path) -> BTreeMap<usize, usize> {
    let mut nodes = BTreeMap::new();
    for (number, path) in numbered(folder, "node") {
        if let Some(cpus) = list(&path.join("cpulist")) {
            nodes.extend(cpus.0.into_iter().map(|cpu| (cpu, number)));
        }
    }
    nodes
}

/// Returns the lowest processor that shares the cache of the highest level.
fn last_cache(folder: &Path) -> Option<usize> {
    let level = |path: &Path| -> Option<u32> {
        let holds_data = matches!(read(&path.join("type"))?.as_str(), "Unified" | "Data");
        read(&path.join("level"))?.parse().ok().filter(|_| holds_data)
    };
    let caches = numbered(folder, "index");
    let last = caches.iter().filter_map(|(_, path)| Some((level(path)?, path))).max()?.1;
    list(&last.join("shared_cpu_list"))?.0.first().copied()
}

/// Returns the entries of a folder that are called `name0`, `name1`, ...
fn numbered(folder: &Path, name: &str) -> Vec<(usize, PathBuf)> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<_> = entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let number = entry.file_name().to_str()?.strip_prefix(name)?.parse().ok()?;
            Some((number, entry.path()))
        })
        .collect();
    found.sort_unstable();
    found
}

/// Returns the text of a small file, without blanks around it.
fn read(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn list(path: &Path) -> Option<CpuSet> {
    read(path)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes files that describe a host.
    fn tree(files: &[(String, String)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join("sys/devices/system").join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }
        root
    }

    fn set(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    #[test]
    fn two_sockets_of_two_nodes_with_two_threads_to_a_core() {
        // Cores 0-7; processor n and n + 8 are one core; two cores to a node, two nodes to a socket.
        let mut files = Vec::new();
        for cpu in 0..16 {
            let core = cpu % 8;
            let mut file =
                |name: &str, text: String| files.push((format!("cpu/cpu{cpu}/{name}"), text));
            file("topology/thread_siblings_list", format!("{core},{}", core + 8));
            file("topology/physical_package_id", (core / 4).to_string());
            for (index, level, kind, shared) in [
                (0, 1, "Data", format!("{core},{}", core + 8)),
                (1, 1, "Instruction", format!("{core},{}", core + 8)),
                (
                    2,
                    3,
                    "Unified",
                    format!(
                        "{0}-{1},{2}-{3}",
                        core / 2 * 2,
                        core / 2 * 2 + 1,
                        core / 2 * 2 + 8,
                        core / 2 * 2 + 9
                    ),
                ),
                (3, 9, "Instruction", "0-15".to_owned()),
            ] {
                file(&format!("cache/index{index}/level"), level.to_string());
                file(&format!("cache/index{index}/type"), kind.to_owned());
                file(&format!("cache/index{index}/shared_cpu_list"), shared);
            }
        }
        for node in 0..4 {
            let (a, b) = (2 * node, 2 * node + 1);
            files
                .push((format!("node/node{node}/cpulist"), format!("{a}-{b},{}-{}", a + 8, b + 8)));
        }
        // A node with memory but without processors.
        files.push(("node/node4/cpulist".to_owned(), String::new()));
        let root = tree(&files);
        let topology = Topology::read(root.path(), &set("0-15"));
        for (number, cpu) in topology.cpus.iter().enumerate() {
            let core = number % 8;
            let expected =
                Cpu { number, core, cache: core / 2 * 2, node: core / 2, socket: core / 4 };
            assert_eq!(*cpu, expected);
        }
        assert_eq!(topology.cores_of(&set("0,8,1,15")), 3);

        // If a mask excludes the first thread of a core, the core is still identified by it.
        let masked = Topology::read(root.path(), &set("8,11"));
        let found: Vec<_> =
            masked.cpus.iter().map(|cpu| (cpu.number, cpu.core, cpu.node)).collect();
        assert_eq!(found, [(8, 0, 0), (11, 3, 1)]);
    }

    #[test]
    fn fast_cores_with_two_threads_and_slow_ones_with_one() {
        let mut files = Vec::new();
        for (cpu, siblings) in [(0, "0-1"), (1, "0-1"), (2, "2"), (3, "3")] {
            files
                .push((format!("cpu/cpu{cpu}/topology/thread_siblings_list"), siblings.to_owned()));
        }
        let topology = Topology::read(tree(&files).path(), &set("0-3"));
        let cores: Vec<_> = topology.cpus.iter().map(|cpu| cpu.core).collect();
        assert_eq!(cores, [0, 0, 2, 3]);
        assert_eq!(topology.cores_of(&set("0-3")), 3);
    }

    #[test]
    fn without_a_description_every_processor_is_a_core_of_one_node() {
        for files in [vec![], vec![("node/node0/cpulist".to_owned(), "nonsense".to_owned())]] {
            let topology = Topology::read(tree(&files).path(), &set("3,5"));
            let cpu = |number| Cpu { number, core: number, cache: 0, node: 0, socket: 0 };
            assert_eq!(topology.cpus, [cpu(3), cpu(5)]);
        }
    }

    #[test]
    fn this_host() {
        let allowed = CpuSet::allowed(Path::new("/"));
        let topology = Topology::read(Path::new("/"), &allowed);
        assert_eq!(topology.cpus.len(), allowed.0.len());
        assert!((1..=allowed.0.len()).contains(&topology.cores_of(&allowed)));
    }
}
