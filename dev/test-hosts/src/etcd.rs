//! Real etcd server that ends with its test.

use std::io;
use std::net::{Ipv4Addr, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrIn, bind, getsockname, setsockopt, socket, sockopt,
};
use tempfile::TempDir;

use crate::Host;

/// Single member of etcd, with its data in memory if possible.
#[derive(Debug)]
pub struct Etcd {
    process: Child,
    endpoint: String,
    /// Bound but not listening: etcd can bind them too, and no other process gets them.
    _ports: Vec<OwnedFd>,
    _data: TempDir,
}

impl Etcd {
    /// Starts etcd on this machine's loopback interface, at ports of its own.
    ///
    /// # Panics
    /// Panics when etcd does not start: tests that use it name `brigade_test_needs::Need::Etcd`.
    #[must_use]
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts etcd on this machine's loopback interface with additional flags.
    ///
    /// # Panics
    /// Panics when etcd does not start.
    #[must_use]
    pub fn start_with(flags: &[String]) -> Self {
        let mut command = Command::new("etcd");
        command.args(flags);
        Self::on_loopback(command, "http")
    }

    /// Starts etcd over TLS with these files. With an `authority`, it requires a client certificate that the authority
    /// has signed.
    ///
    /// # Panics
    /// Panics when etcd does not start.
    #[must_use]
    pub fn start_over_tls(certificate: &Path, key: &Path, authority: Option<&Path>) -> Self {
        let mut command = Command::new("etcd");
        command.arg("--cert-file").arg(certificate).arg("--key-file").arg(key);
        if let Some(authority) = authority {
            command.arg("--client-cert-auth").arg("--trusted-ca-file").arg(authority);
        }
        Self::on_loopback(command, "https")
    }

    fn on_loopback(command: Command, scheme: &str) -> Self {
        let ports = [(); 2].map(|()| free_port().expect("two free ports"));
        let places = [0, 1].map(|i: usize| format!("127.0.0.1:{}", ports[i].1));
        let ports = ports.into_iter().map(|it| it.0).collect();
        let etcd = Self::spawn(command, places, ports, scheme);
        etcd.wait(|| TcpStream::connect(&etcd.endpoint).is_ok());
        etcd
    }

    /// Starts etcd on a host of a network, at etcd's usual ports.
    ///
    /// # Panics
    /// Panics when etcd does not start.
    #[must_use]
    pub fn start_on(host: &Host) -> Self {
        let places = [CLIENTS, PEERS].map(|port| format!("{}:{port}", host.address()));
        let etcd = Self::spawn(host.command("etcd"), places, Vec::new(), "http");
        // Format of the kernel's table, where 0A is the state of a listening socket.
        let port = format!(":{CLIENTS:04X} ");
        let listens = |line: &str| line.contains(&port) && line.contains(" 0A ");
        etcd.wait(|| host.sh("cat /proc/net/tcp").lines().any(listens));
        etcd
    }

    /// Returns the address for clients as `HOST:PORT`.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    fn spawn(mut command: Command, places: [String; 2], ports: Vec<OwnedFd>, scheme: &str) -> Self {
        let data = tempfile::tempdir().expect("a temporary folder");
        let client = format!("{scheme}://{}", places[0]);
        let peer = format!("http://{}", places[1]);
        command
            .args(["--unsafe-no-fsync", "--name", "test", "--data-dir"])
            .arg(data.path())
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("test={peer}")])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let [endpoint, _] = places;
        let process = command.spawn().expect("start etcd");
        Self { process, endpoint, _ports: ports, _data: data }
    }

    fn wait(&self, is_up: impl Fn() -> bool) {
        let stat = format!("/proc/{}/stat", self.process.id());
        while !is_up() {
            let text = std::fs::read_to_string(&stat).unwrap_or_default();
            let state = text.rsplit_once(") ").map_or("X", |it| it.1);
            assert!(!state.starts_with(['Z', 'X']), "etcd has ended at {}", self.endpoint);
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// On a host only `nsenter` is ended here; etcd itself ends with its host.
impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn free_port() -> io::Result<(OwnedFd, u16)> {
    let fd = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&fd, sockopt::ReuseAddr, &true)?;
    let [a, b, c, d] = Ipv4Addr::LOCALHOST.octets();
    bind(fd.as_raw_fd(), &SockaddrIn::new(a, b, c, d, 0))?;
    let port = getsockname::<SockaddrIn>(fd.as_raw_fd())?.port();
    Ok((fd, port))
}

const CLIENTS: u16 = 2379;
const PEERS: u16 = 2380;
