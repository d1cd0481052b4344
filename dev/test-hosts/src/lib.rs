//! A small network of hosts on one machine, for tests of what happens between hosts.
//!
//! A host is a set of Linux namespaces (network, mounts, processes, host name) with a real sshd, a
//! home folder and an `/etc/hosts` of its own. All hosts of a [`Network`] hang on one switch, a
//! bridge in a network namespace that nothing else uses, so the same addresses serve every network
//! and networks in parallel do not see each other or the machine's own.
//!
//! Nothing outlives the test, however it ends: each host's first process waits on a pipe whose
//! other end only the test holds, and with that process the kernel ends all others of the host and
//! takes its namespaces down. Only files of a killed test stay, until the next network is made.
//!
//! For development only: it panics where the system refuses something that it needs. A test program
//! names `brigade_test_needs::Need::Hosts` for its tests with networks, so that they are ignored there.
//!
//! ```no_run
//! use brigade_test_hosts::Network;
//!
//! let network = Network::new(2);
//! let mut ssh = network.host(0).command("ssh");
//! ssh.arg("-F").arg(network.ssh_config()).args(["node2", "hostname"]);
//! assert_eq!(ssh.output().unwrap().stdout, b"node2\n");
//!
//! network.host(1).cut(); // and now node2 falls silent
//! ```

mod authority;
mod commands;
mod disk;
mod etcd;
mod faults;
mod folder;
mod host;
mod keys;
mod memory;
mod network;
mod process;

pub use authority::Authority;
pub use disk::Disk;
pub use etcd::Etcd;
pub use host::Host;
pub use memory::MemoryGroup;
pub use network::Network;
pub use process::{Process, inner_process};
