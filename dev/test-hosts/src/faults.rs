//! Simulated faults of and between hosts.

use std::process::Command;

use brigade_test_needs::SYSTEM_PATH;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::commands::{ip, must};
use crate::host::Host;

impl Host {
    /// Disconnects this host silently: its own interface stays up, and packets are lost without an error.
    ///
    /// # Panics
    /// Panics if a command fails.
    pub fn cut(&self) {
        ip(self.wiring().switch, &format!("link set {} nomaster", self.wiring().port));
    }

    /// Reverts the effect of [`Host::cut`].
    ///
    /// # Panics
    /// Panics if a command fails.
    pub fn restore(&self) {
        ip(self.wiring().switch, &format!("link set {} master br0", self.wiring().port));
    }

    /// Unplugs the cable: this host's interface loses its carrier, too.
    ///
    /// # Panics
    /// Panics if a command fails.
    pub fn unplug(&self) {
        ip(self.wiring().switch, &format!("link set {} down", self.wiring().port));
    }

    /// Reverts the effect of [`Host::unplug`].
    ///
    /// # Panics
    /// Panics if a command fails.
    pub fn plug_in_again(&self) {
        ip(self.wiring().switch, &format!("link set {} up", self.wiring().port));
    }

    /// Kills, with SIGKILL, the sshd processes that serve sessions; the one that listens is kept. Returns their number.
    ///
    /// Nothing is notified: the input of programs in the sessions ends, and the connection of the other side is closed.
    #[must_use]
    pub fn kill_sshd_sessions(&self) -> usize {
        let sessions = self.processes().into_iter().filter(|process| {
            process.command.first().is_some_and(|argument| argument.starts_with("sshd: "))
        });
        let killed = sessions.map(|it| kill(Pid::from_raw(it.pid), Signal::SIGKILL).is_ok());
        killed.filter(|killed| *killed).count()
    }

    /// Drops, silently, packets to a TCP port of this host.
    ///
    /// # Panics
    /// Panics if a command fails.
    pub fn drop_port(&self, port: u16) {
        self.filter(&format!("tcp dport {port} drop"));
    }

    /// Drops packets to TCP ports of this host in a range, both ends included.
    ///
    /// # Panics
    /// Panics if a command fails.
    pub fn drop_ports(&self, first: u16, last: u16) {
        self.filter(&format!("tcp dport {first}-{last} drop"));
    }

    /// Rejects packets to a TCP port of this host, like a firewall that sends an error.
    ///
    /// # Panics
    /// Panics if a command fails.
    pub fn reject_port(&self, port: u16) {
        self.filter(&format!("tcp dport {port} reject"));
    }

    /// Drops, silently, all packets from another host. The other direction is unaffected.
    ///
    /// # Panics
    /// Panics if a command fails.
    pub fn drop_from(&self, other: &Self) {
        self.filter(&format!("ip saddr {} drop", other.address()));
    }

    /// Drops a random share of the packets to this host, 1 to 100 %.
    ///
    /// # Panics
    /// Panics for another share, or if a command fails.
    pub fn lose(&self, percent: u8) {
        assert!((1..=100).contains(&percent), "{percent} % cannot be lost");
        self.filter(&format!("numgen random mod 100 >= {} drop", 100 - percent));
    }

    /// Drops packets larger than this, like a tunnel on the route when the ICMP errors are filtered: small packets
    /// pass, a transfer hangs.
    ///
    /// # Panics
    /// Panics if a command fails.
    pub fn drop_larger_than(&self, bytes: u16) {
        self.filter(&format!("ip length > {bytes} drop"));
    }

    /// Adds a rule of nftables for packets from the network.
    ///
    /// # Panics
    /// Panics if the rule is wrong.
    pub fn filter(&self, rule: &str) {
        let text = format!(
            "add table inet brigade_test_hosts\n\
             add chain inet brigade_test_hosts input {{ type filter hook input priority 0; policy accept; }}\n\
             add rule inet brigade_test_hosts input iifname \"eth0\" {rule}\n"
        );
        let mut command = self.command("nft");
        must(command.arg(text).env("PATH", SYSTEM_PATH));
    }

    /// Removes all rules.
    ///
    /// # Panics
    /// Panics if a command fails.
    pub fn clear_filters(&self) {
        self.sh("nft add table inet brigade_test_hosts; nft delete table inet brigade_test_hosts");
    }

    /// Sets the MTU of this host's interface.
    ///
    /// # Panics
    /// Panics if a command fails.
    pub fn set_mtu(&self, bytes: u16) {
        ip(self.init(), &format!("link set eth0 mtu {bytes}"));
    }

    /// Limits the rate of packets from this host, in kilobits per second.
    ///
    /// # Panics
    /// Panics if the kernel lacks `sch_tbf`: tests that use it name `brigade_test_needs::Need::Shaping`.
    pub fn limit_rate(&self, kilobits: u32) {
        // As large as one packet before segmentation in the network card, which would otherwise never pass.
        self.shape(&format!("tbf rate {kilobits}kbit burst 70000 latency 200ms"));
    }

    /// Delays packets from this host.
    ///
    /// # Panics
    /// Panics if the kernel lacks `sch_netem`: tests that use it name `brigade_test_needs::Need::Shaping`.
    pub fn delay(&self, milliseconds: u32) {
        self.shape(&format!("netem delay {milliseconds}ms"));
    }

    /// Reverts the effects of [`Host::limit_rate`] and [`Host::delay`].
    pub fn clear_shaping(&self) {
        // Fails if there was none.
        let _ = self.traffic_control("qdisc del dev eth0 root").output();
    }

    fn shape(&self, discipline: &str) {
        must(&mut self.traffic_control(&format!("qdisc replace dev eth0 root {discipline}")));
    }

    fn traffic_control(&self, arguments: &str) -> Command {
        let mut command = self.command("tc");
        command.args(arguments.split(' ')).env("PATH", SYSTEM_PATH);
        command
    }
}
