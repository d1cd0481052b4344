//! What settings mean for the hosts of a job, and what they cannot mean.

use super::*;

fn layers(flags: &[(&str, &str)]) -> Layer {
    let mut layer = Layer::default();
    for (name, text) in flags {
        layer.set(name, text, Source::Flag((*name).to_owned())).unwrap();
    }
    layer.over(Layer::defaults())
}

fn alone() -> Way {
    Way::Here(Meeting::OneHost)
}

fn elastic(endpoint: &str, serve: Option<bool>) -> Way {
    Way::Here(Meeting::Elastic { endpoint: endpoint.parse().unwrap(), serve })
}

fn numbered(node_rank: usize, address: &str, master_port: u16) -> Way {
    Way::Here(Meeting::Static { node_rank, master_addr: address.to_owned(), master_port })
}

fn etcd(endpoints: &[&str]) -> Way {
    let endpoints = endpoints.iter().map(|it| it.parse().unwrap()).collect();
    Way::Here(Meeting::Etcd { endpoints })
}

#[test]
fn how_hosts_come_together() {
    let table: [(&[(&str, &str)], Way); 17] = [
        (&[], alone()),
        (&[("nnodes", "1"), ("node-rank", "0"), ("master-port", "29501")], alone()),
        // What torchrun's documentation says for one host.
        (&[("nnodes", "1"), ("rdzv-backend", "c10d"), ("rdzv-endpoint", "localhost:0")], alone()),
        (&[("hosts", "a,b")], Way::Hosts),
        (&[("hostfile", "f")], Way::Hosts),
        (&[("nnodes", "2"), ("node-rank", "1"), ("master-addr", "a")], numbered(1, "a", 29500)),
        (
            &[("nnodes", "2"), ("node-rank", "0"), ("master-addr", "::1"), ("master-port", "7")],
            numbered(0, "::1", 7),
        ),
        (
            &[
                ("nnodes", "2"),
                ("node-rank", "0"),
                ("rdzv-backend", "static"),
                ("rdzv-endpoint", "a:7"),
            ],
            numbered(0, "a", 7),
        ),
        (&[("nnodes", "1:4"), ("rdzv-endpoint", "a:7")], elastic("a:7", None)),
        (&[("nnodes", "1:4"), ("rdzv-endpoint", "a")], elastic("a:29400", None)),
        (&[("nnodes", "1:4"), ("rdzv-endpoint", "[::1]:7")], elastic("[::1]:7", None)),
        (&[("nnodes", "2"), ("rdzv-endpoint", "a:7")], elastic("a:7", None)),
        (
            &[("nnodes", "2"), ("rdzv-endpoint", "a:7"), ("rdzv-conf", "is_host=1")],
            elastic("a:7", Some(true)),
        ),
        (
            &[("nnodes", "2"), ("rdzv-backend", "c10d"), ("master-addr", "a")],
            elastic("a:29400", None),
        ),
        (
            &[
                ("nnodes", "2"),
                ("rdzv-backend", "c10d"),
                ("master-addr", "a"),
                ("master-port", "7"),
                ("node-rank", "1"),
            ],
            elastic("a:7", None),
        ),
        (
            &[("nnodes", "2:3"), ("rdzv-backend", "etcd"), ("rdzv-endpoint", "a:7, b")],
            etcd(&["a:7", "b:2379"]),
        ),
        (&[("nnodes", "2"), ("rdzv-endpoint", "a:7"), ("node-rank", "1")], elastic("a:7", None)),
    ];
    for (flags, expected) in table {
        assert_eq!(decide(&mut layers(flags)).unwrap().0, expected, "{flags:?}");
    }
}

#[test]
fn what_contradicts_or_is_missing() {
    let table: [(&[(&str, &str)], &str); 17] = [
        (
            &[("node-rank", "1")],
            "node-rank 1 (flag --node-rank) and nnodes 1 (default): say how many hosts there are with --nnodes",
        ),
        (
            &[("nnodes", "2"), ("node-rank", "2"), ("master-addr", "a")],
            "node-rank 2 (flag --node-rank) and nnodes 2 (flag --nnodes): the hosts have numbers from 0 to 1",
        ),
        (
            &[("nnodes", "2")],
            "nnodes 2 (flag --nnodes): on each host say --node-rank N and --master-addr HOST, or --rdzv-endpoint HOST:PORT; or start them all",
        ),
        (
            &[("nnodes", "2"), ("node-rank", "0")],
            "nnodes 2 (flag --nnodes): on each host say --node-rank N and --master-addr HOST",
        ),
        (
            &[("nnodes", "2"), ("master-addr", "a")],
            "nnodes 2 (flag --nnodes): say which of them this one is with --node-rank, from 0 to 1",
        ),
        (
            &[("nnodes", "2"), ("master-addr", "a"), ("master-port", "0"), ("node-rank", "0")],
            "master-port 0 (flag --master-port): the hosts cannot meet at a port",
        ),
        (
            &[("nnodes", "1:2")],
            "nnodes 1:2 (flag --nnodes): say where the hosts meet with --rdzv-endpoint HOST:PORT",
        ),
        (
            &[("nnodes", "1:2"), ("master-addr", "a"), ("node-rank", "0")],
            "nnodes 1:2 (flag --nnodes): say where the hosts meet with --rdzv-endpoint",
        ),
        (
            &[("nnodes", "1:2"), ("rdzv-backend", "static"), ("rdzv-endpoint", "a:1")],
            "nnodes 1:2 (flag --nnodes) and rdzv-backend static (flag --rdzv-backend): numbered hosts cannot join",
        ),
        (
            &[("nnodes", "2"), ("rdzv-backend", "c10d")],
            "nnodes 2 (flag --nnodes): say where the hosts meet",
        ),
        (
            &[("nnodes", "2"), ("rdzv-backend", "etcd")],
            "rdzv-backend etcd (flag --rdzv-backend): say where etcd is",
        ),
        (
            &[("nnodes", "2"), ("rdzv-endpoint", "a:b")],
            "rdzv-endpoint a:b (flag --rdzv-endpoint): \"a:b\" is not HOST:PORT",
        ),
        (
            &[("nnodes", "2"), ("rdzv-endpoint", "a:0")],
            "rdzv-endpoint a:0 (flag --rdzv-endpoint): \"a:0\" is not HOST:PORT",
        ),
        (
            &[("nnodes", "2"), ("rdzv-endpoint", "[::1]7")],
            "rdzv-endpoint [::1]7 (flag --rdzv-endpoint): \"[::1]7\" is not HOST:PORT",
        ),
        (
            &[("rdzv-conf", "join_timout=3")],
            "flag --rdzv-conf: rdzv-conf has no key join_timout: did you mean join_timeout?",
        ),
        (
            &[("rdzv-conf", "join_timeout=soon")],
            "flag --rdzv-conf: rdzv-conf join_timeout is `soon`, expected a number of seconds",
        ),
        (
            &[("rdzv-conf", "is_host=perhaps")],
            "flag --rdzv-conf: rdzv-conf is_host is `perhaps`, expected true or false",
        ),
    ];
    for (flags, expected) in table {
        let error = decide(&mut layers(flags)).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{flags:?} gave {error:?}");
    }
}

#[test]
fn what_changes_nothing_is_noted() {
    type Case<'a> = (&'a [(&'a str, &'a str)], &'a [&'a str]);
    let table: [Case<'_>; 7] = [
        (&[], &[]),
        (&[("node-rank", "0")], &[]),
        (
            &[("master-port", "29501")],
            &[
                "flag --master-port: master-port 29501 changes nothing: there is one host, and each attempt has a free port",
            ],
        ),
        (
            &[("sync", "true")],
            &[
                "flag --sync: sync true changes nothing: it is for hosts that are started from here, with --hosts or --hostfile",
            ],
        ),
        (
            &[("nnodes", "2"), ("rdzv-endpoint", "a:7"), ("node-rank", "1")],
            &["flag --node-rank: node-rank 1 changes nothing: the rendezvous numbers the hosts"],
        ),
        (&[("nnodes", "2"), ("rdzv-backend", "c10d"), ("master-addr", "a")], &[]),
        (
            &[
                ("nnodes", "2"),
                ("rdzv-endpoint", "a:7"),
                ("rdzv-conf", "join_timeout=9,read_timeout=60"),
            ],
            &["flag --rdzv-conf: read_timeout changes nothing: it is for torchrun's own store"],
        ),
    ];
    for (flags, expected) in table {
        let mut layers = layers(flags);
        decide(&mut layers).unwrap();
        let notes: Vec<String> = layers.notes.iter().map(ToString::to_string).collect();
        assert_eq!(notes, expected, "{flags:?}");
    }
}

#[test]
fn how_long_hosts_wait() {
    let waits = |conf| decide(&mut layers(&[("rdzv-conf", conf)])).unwrap().1;
    let (join, last_call) = (Duration::from_secs(5), Duration::from_secs(1));
    let join_interval = Duration::from_secs(90);
    assert_eq!(waits("timeout=5"), Patience { join, ..Patience::default() });
    let conf = "timeout=7,join_timeout=5,last_call_timeout=1,join_interval=90";
    assert_eq!(waits(conf), Patience { join, last_call, join_interval });
}
