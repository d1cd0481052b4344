//! What goes wrong between hosts, made to order.

use std::process::Command;

use brigade_test_needs::SYSTEM_PATH;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::commands::{ip, must};
use crate::host::Host;

impl Host {
    /// Cuts this host off, silently: its own interface stays up, packets go nowhere and nothing is
    /// told.
    ///
    /// # Panics
    /// The system refuses.
    pub fn cut(&self) {
        ip(self.wiring().switch, &format!("link set {} nomaster", self.wiring().port));
    }

    /// Undoes [`Host::cut`].
    ///
    /// # Panics
    /// The system refuses.
    pub fn restore(&self) {
        ip(self.wiring().switch, &format!("link set {} master br0", self.wiring().port));
    }

    /// Pulls the plug: this host's interface loses its carrier, too.
    ///
    /// # Panics
    /// The system refuses.
    pub fn unplug(&self) {
        ip(self.wiring().switch, &format!("link set {} down", self.wiring().port));
    }

    /// Undoes [`Host::unplug`].
    ///
    /// # Panics
    /// The system refuses.
    pub fn plug_in_again(&self) {
        ip(self.wiring().switch, &format!("link set {} up", self.wiring().port));
    }

    /// Kills, with SIGKILL, the sshd processes that serve sessions; the one that listens stays.
    /// Gives how many there were.
    ///
    /// Without a word to anyone: what ran in the sessions finds its input at an end, and the other
    /// side a closed connection.
    #[must_use]
    pub fn kill_sshd_sessions(&self) -> usize {
        let sessions = self.processes().into_iter().filter(|process| {
            process.command.first().is_some_and(|argument| argument.starts_with("sshd: "))
        });
        let killed = sessions.map(|it| kill(Pid::from_raw(it.pid), Signal::SIGKILL).is_ok());
        killed.filter(|killed| *killed).count()
    }

    /// Drops, silently, what comes to this host for a TCP port.
    ///
    /// # Panics
    /// The system refuses.
    pub fn drop_port(&self, port: u16) {
        self.filter(&format!("tcp dport {port} drop"));
    }

    /// Drops what comes to this host for TCP ports of a range, both ends included.
    ///
    /// # Panics
    /// The system refuses.
    pub fn drop_ports(&self, first: u16, last: u16) {
        self.filter(&format!("tcp dport {first}-{last} drop"));
    }

    /// Answers what comes to this host for a TCP port as a firewall does that says no.
    ///
    /// # Panics
    /// The system refuses.
    pub fn reject_port(&self, port: u16) {
        self.filter(&format!("tcp dport {port} reject"));
    }

    /// Drops, silently, all that comes from another host. The other direction stays.
    ///
    /// # Panics
    /// The system refuses.
    pub fn drop_from(&self, other: &Self) {
        self.filter(&format!("ip saddr {} drop", other.address()));
    }

    /// Loses that part of what comes to this host, 1 to 100 %, at random.
    ///
    /// # Panics
    /// Another part, or the system refuses.
    pub fn lose(&self, percent: u8) {
        assert!((1..=100).contains(&percent), "{percent} % cannot be lost");
        self.filter(&format!("numgen random mod 100 >= {} drop", 100 - percent));
    }

    /// Drops packets of more bytes, as a tunnel on the way does when the messages that would say so
    /// are filtered: small ones pass, a transfer hangs.
    ///
    /// # Panics
    /// The system refuses.
    pub fn drop_larger_than(&self, bytes: u16) {
        self.filter(&format!("ip length > {bytes} drop"));
    }

    /// Adds a rule of nftables for what comes in from the network.
    ///
    /// # Panics
    /// The rule is wrong.
    pub fn filter(&self, rule: &str) {
        let text = format!(
            "add table inet brigade_test_hosts\n\
             add chain inet brigade_test_hosts input {{ type filter hook input priority 0; policy accept; }}\n\
             add rule inet brigade_test_hosts input iifname \"eth0\" {rule}\n"
        );
        let mut command = self.command("nft");
        must(command.arg(text).env("PATH", SYSTEM_PATH));
    }

    /// Takes back all rules.
    ///
    /// # Panics
    /// The system refuses.
    pub fn clear_filters(&self) {
        self.sh("nft add table inet brigade_test_hosts; nft delete table inet brigade_test_hosts");
    }

    /// The largest packet that this host's interface sends and takes.
    ///
    /// # Panics
    /// The system refuses.
    pub fn set_mtu(&self, bytes: u16) {
        ip(self.init(), &format!("link set eth0 mtu {bytes}"));
    }

    /// Limits what this host sends, in kilobits in a second.
    ///
    /// # Panics
    /// The kernel cannot (`sch_tbf`): tests that use it name `brigade_test_needs::Need::Shaping`.
    pub fn limit_rate(&self, kilobits: u32) {
        // As much as one packet of the network card's own cutting, or it would never pass.
        self.shape(&format!("tbf rate {kilobits}kbit burst 70000 latency 200ms"));
    }

    /// Delays what this host sends.
    ///
    /// # Panics
    /// The kernel cannot (`sch_netem`): tests that use it name `brigade_test_needs::Need::Shaping`.
    pub fn delay(&self, milliseconds: u32) {
        self.shape(&format!("netem delay {milliseconds}ms"));
    }

    /// Undoes [`Host::limit_rate`] and [`Host::delay`].
    pub fn clear_shaping(&self) {
        // Fails where there was none.
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
