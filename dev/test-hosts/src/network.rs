//! Network of hosts on one switch.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use brigade_test_needs::SYSTEM_PATH;

use crate::commands::read_line;
use crate::folder::{self, Folder};
use crate::host::{Host, Wiring};
use crate::keys;
use crate::process::inner_process;

/// Hosts `node1`, `node2`, … with the addresses 10.213.0.1, 10.213.0.2, … on one switch.
///
/// Dropping it ends every process in its hosts and removes its files.
#[derive(Debug)]
pub struct Network {
    // Fields are dropped in this order: the files last.
    hosts: Vec<Host>,
    _switch: Switch,
    ssh_config: PathBuf,
    folder: Folder,
}

impl Network {
    /// Creates a network of that many hosts, at most 200, and waits until all of them accept ssh.
    ///
    /// # Panics
    /// Panics when this machine does not support it, or a command fails.
    #[must_use]
    pub fn new(hosts: usize) -> Self {
        folder::sweep();
        let folder = Folder::new().expect("a folder for the network's files");
        keys::make(&folder.path().join("user_key"), "the user of a brigade-test-hosts network");
        let switch = Switch::start();

        let names: Vec<_> = (1..=hosts).map(|i| (format!("node{i}"), address(i))).collect();
        let mut table = "127.0.0.1 localhost\n::1 localhost ip6-localhost\n".to_owned();
        for (name, address) in &names {
            let _ = writeln!(table, "{address} {name}");
        }
        let user_key = folder.path().join("user_key.pub");
        let mut started: Vec<Host> = names
            .iter()
            .enumerate()
            .map(|(i, (name, address))| {
                let wiring = Wiring { switch: switch.inside, port: format!("port{}", i + 1) };
                Host::start(&folder.path().join(name), name, address, &table, &user_key, wiring)
            })
            .collect();
        // The hosts boot in parallel; the slow part is in their own processes.
        for host in &mut started {
            host.plug_in();
        }
        for host in &mut started {
            host.wait_until_up();
        }
        let known: Vec<_> = started
            .iter()
            .map(|host| (host.name().to_owned(), host.address().to_owned(), host.host_key()))
            .collect();
        let ssh_config = keys::write_client_files(folder.path(), &known);
        Self { hosts: started, _switch: switch, ssh_config, folder }
    }

    /// Returns a host by its index from 0: `host(0)` is `node1`.
    ///
    /// # Panics
    /// Panics if the index is out of range.
    #[must_use]
    pub fn host(&self, index: usize) -> &Host {
        &self.hosts[index]
    }

    /// Returns all hosts in order.
    #[must_use]
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// Returns settings for `ssh -F`, with which every host of the network can log in to every other.
    #[must_use]
    pub fn ssh_config(&self) -> &Path {
        &self.ssh_config
    }

    /// Returns a folder that all hosts see under the same path, like every file of this machine that was not hidden
    /// from them.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

fn address(number: usize) -> String {
    assert!((1..=200).contains(&number), "a network has at most 200 hosts");
    format!("10.213.0.{number}")
}

/// Bridge in a network namespace that exists as long as a process waits on a pipe of this one.
#[derive(Debug)]
struct Switch {
    process: Child,
    /// Process ID of the process inside, outside of the namespace.
    inside: i32,
}

impl Switch {
    fn start() -> Self {
        let script = "ip link add br0 type bridge && ip link set br0 up && echo up && cat";
        let mut command = Command::new("unshare");
        command.args(["--net", "--fork", "--kill-child", "sh", "-c", script]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).env_clear().env("PATH", SYSTEM_PATH);
        let mut process = command.spawn().expect("start the switch");
        let line = read_line(process.stdout.as_mut().expect("its stdout"));
        assert_eq!(line, "up", "the switch did not start");
        let inside = inner_process(process.id().cast_signed()).expect("the switch's process");
        Self { process, inside }
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}
