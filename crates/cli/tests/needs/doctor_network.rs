//! Tests of `brigade doctor --hosts` with faults of the network between hosts.

use brigade_test_needs::needs;

use crate::doctor_cluster::{Cluster, examined};

/// Returns a hosts file with these lines after that of the loopback interface.
fn table(lines: &[&str]) -> String {
    format!("127.0.0.1 localhost\n{}\n", lines.join("\n"))
}

const NODE1: &str = "10.213.0.1 node1";
const NODE2: &str = "10.213.0.2 node2";
const NODE3: &str = "10.213.0.3 node3";

#[needs(Hosts)]
fn own_names_that_lead_to_the_loopback() {
    let cluster = Cluster::new(2);
    // As Debian's installer writes it.
    cluster.host(1).set_hosts_file(&table(&["127.0.1.1 node2", NODE1]));
    let examined = cluster.examine(&[]);
    let finding =
        examined.says("fail", "names", "node2", "its own name node2 is 127.0.1.1 (line 2");
    // The remedy is executed, and works.
    let command = finding["command"].as_str().unwrap();
    let command =
        command.replace("sudo sed -i", "sed").replace(" /etc/hosts", " /etc/hosts >/run/hosts");
    cluster.host(1).sh(&format!("{command}; cat /run/hosts >/etc/hosts"));
    cluster.examine(&[]).is_well("names");

    cluster.host(1).set_hosts_file(&table(&["127.0.1.1 node2", NODE1]));
    cluster.host(1).set_login_variable("GLOO_SOCKET_IFNAME", "eth0");
    cluster.examine(&[]).is_well("names");
}

#[needs(Hosts)]
fn names_that_mean_nothing_or_something_else() {
    let cluster = Cluster::new(3);
    cluster.host(1).set_hosts_file(&table(&[NODE1, NODE2]));
    cluster.host(2).set_hosts_file(&table(&["10.213.0.77 node1", NODE2, NODE3]));
    let examined = cluster.examine(&[]);
    examined.says("warning", "names", "node2", "node3 cannot be resolved there");
    examined.says("fail", "names", "node3", "node1 is 10.213.0.77 there (line 2");
    examined.says("fail", "ports", "node3->node1", "none of the ports");

    cluster.host(1).set_hosts_file(&table(&[NODE1, NODE3]));
    cluster.examine(&[]).says(
        "fail",
        "names",
        "node2",
        "its own name node2 cannot be resolved there",
    );
    cluster.host(1).set_hosts_file(&table(&["fd00::2 node2", NODE1, NODE3]));
    cluster.host(1).sh("ip address add fd00::2/64 dev eth0 nodad");
    cluster.examine(&[]).says("warning", "names", "node2", "only an IPv6 address");
    cluster.host(1).set_hosts_file(&table(&["127.0.0.1 node3", NODE1, NODE2]));
    cluster.examine(&[]).says("fail", "names", "node2", "node3 is 127.0.0.1 there");
}

#[needs(Hosts)]
fn a_name_server_that_is_silent() {
    let cluster = Cluster::new(2);
    cluster.host(0).filter("udp dport 53 drop");
    cluster.host(1).set_hosts_file(&table(&[NODE2]));
    cluster.host(1).sh("echo 'hosts: files dns' >/etc/nsswitch.conf
         echo 'nameserver 10.213.0.1' >/run/resolv.conf
         mount --bind /run/resolv.conf $(readlink -f /etc/resolv.conf)");
    let examined = cluster.examine(&[]);
    examined.says(
        "warning",
        "names",
        "node2",
        "node1 cannot be resolved there: no answer within 5 s",
    );
    // Checks that do not need the name are run nevertheless.
    examined.is_well("ports");
}

#[needs(Hosts)]
fn a_second_network() {
    let cluster = Cluster::new(2);
    // The same cable; ssh uses the first address, and names resolve to the second.
    for (host, address) in [(0, "10.99.0.1"), (1, "10.99.0.2")] {
        cluster.host(host).sh(&format!(
            "ip link add link eth0 name fast0 type macvlan mode bridge
             ip address add {address}/24 dev fast0; ip link set fast0 up"
        ));
    }
    for host in 0..2 {
        cluster.host(host).set_hosts_file(&table(&["10.99.0.1 node1", "10.99.0.2 node2"]));
    }
    let mut config = std::fs::read_to_string(cluster.network.ssh_config()).unwrap();
    config = format!("Host node2\n    HostName 10.213.0.2\n    HostKeyAlias node2\n{config}");
    let mut cluster = cluster;
    cluster.ssh_config = cluster.network.folder().join("my_config");
    std::fs::write(&cluster.ssh_config, config).unwrap();
    let examined = cluster.examine(&[]);
    examined.says("note", "interfaces", "node2", "Gloo would take fast0 (10.99.0.2)");
    examined.is_well("names");
    examined.is_well("ports");
}

#[needs(Hosts)]
fn interfaces_that_others_cannot_reach() {
    let cluster = Cluster::new(2);
    cluster.host(1).sh(
        "ip link add docker0 type bridge; ip address add 172.17.0.1/16 dev docker0; ip link set docker0 up",
    );
    cluster.host(1).set_hosts_file(&table(&["172.17.0.1 node2", NODE1]));
    let examined = cluster.examine(&[]);
    let finding =
        examined.says("fail", "interfaces", "node2", "Gloo would take docker0 (172.17.0.1)");
    assert_eq!(finding["command"], "export GLOO_SOCKET_IFNAME=eth0");
    // The remedy works.
    cluster.host(1).set_login_variable("GLOO_SOCKET_IFNAME", "eth0");
    cluster.examine(&[]).is_well("interfaces");
}

#[needs(Hosts)]
fn firewalls() {
    let cluster = Cluster::new(3);
    cluster.host(1).drop_ports(1024, 65535);
    cluster.host(2).filter("tcp dport 1024-65535 ip saddr 10.213.0.1 reject with tcp reset");
    let examined = cluster.examine(&[]);
    examined.says("fail", "ports", "node1,node3->node2", "connections get no answer: none of");
    // One direction, from one host.
    examined.says("fail", "ports", "node1->node3", "connections are refused");
}

#[needs(Hosts)]
fn a_single_port() {
    let cluster = Cluster::new(2);
    cluster.host(1).drop_port(20050);
    let examined = cluster.examine(&["--port-range", "20000-20100"]);
    examined.says("fail", "ports", "node1->node2", "connections get no answer: not 20050");
    // If only that range is open, ports of the range work, and the ports that the system chooses, which are others, do
    // not.
    cluster.host(1).clear_filters();
    cluster.host(1).filter("tcp dport != { 22, 20000-20100 } tcp flags syn / syn,ack drop");
    cluster.examine(&["--port-range", "20000-20100"]).is_well("ports");
    cluster.examine(&[]).says("fail", "ports", "node1->node2", "none of the ports");
}

#[needs(Hosts)]
fn no_route_and_a_stranger() {
    let cluster = Cluster::new(3);
    cluster.host(1).sh("ip route add unreachable 10.213.0.3/32");
    let redirect = "add table ip away; add chain ip away in { type nat hook prerouting priority -100; }; \
                    add rule ip away in ip saddr 10.213.0.2 tcp dport 1024-65535 redirect to :22";
    cluster.host(0).sh(&format!("nft '{redirect}'"));
    let examined = cluster.examine(&[]);
    examined.says("fail", "ports", "node2->node3", "there is no route");
    examined.says("fail", "ports", "node2->node1", "something else answers");
}

#[needs(Hosts)]
fn the_rendezvous_port_is_taken() {
    let cluster = Cluster::new(2);
    let examined = cluster.examine(&["--master-port", "22"]);
    examined.says(
        "fail",
        "ports",
        "node1",
        "port 22 cannot be listened on: address already in use",
    );
}

#[needs(Hosts)]
fn sizes_of_packets() {
    let cluster = Cluster::new(3);
    cluster.host(1).set_mtu(1400);
    cluster.examine(&[]).says("warning", "mtu", "", "1500 on node1, node3; 1400 on node2");
    cluster.host(1).set_mtu(1500);

    // A tunnel on the route from node3 to node2, without the ICMP error for it.
    cluster.host(1).filter("ip saddr 10.213.0.3 ip length > 1300 drop");
    // Packets as on a wire, without segmentation in the network card.
    cluster.host(2).sh("ip link set eth0 gso_max_segs 1");
    let examined = examined(&mut cluster.doctor_for("node1,node2,node3"));
    examined.says(
        "fail",
        "mtu",
        "node3->node2",
        "large packets are lost; those of 1240 bytes arrive",
    );
}

#[needs(Hosts)]
fn lossy_ways() {
    let cluster = Cluster::new(2);
    // Packets as on a wire: of those that the network card divides, too few are sent for the doctor to judge the loss.
    cluster.host(0).sh("ip link set eth0 gso_max_segs 1");
    cluster.host(1).lose(10);
    let lossy = examined(&mut cluster.doctor_for("node1,node2"));
    lossy.says("warning", "speed", "node1->node2", "lost and sent again");
}

#[needs(Hosts, Shaping)]
fn slow_ways() {
    let cluster = Cluster::new(2);
    cluster.host(1).limit_rate(20_000);
    let slow = examined(&mut cluster.doctor_for("node1,node2"));
    slow.says("warning", "speed", "node2->node1", "Mbit/s");
    cluster.host(1).clear_shaping();

    cluster.host(1).delay(40);
    let far = examined(&mut cluster.doctor_for("node1,node2"));
    far.says("warning", "speed", "node1->node2", "a round trip takes");
}

#[needs(Hosts)]
fn a_host_that_falls_silent() {
    let cluster = Cluster::new(3);
    cluster.host(1).cut();
    let examined = cluster.examine(&["--timeout", "3"]);
    examined.says("fail", "ssh", "node2", "");
    // The other two can connect to each other.
    examined.says("ok", "ports", "", "all 2 ways are open");
}
