//! Tests of the rendezvous' settings and of their contradictions.

use super::*;

fn layers(flags: &[(&str, &str)]) -> Layer {
    let mut layer = Layer::default();
    for (name, text) in flags {
        layer.set(name, text, Source::Flag((*name).to_owned())).unwrap();
    }
    layer.over(Layer::defaults())
}

fn alone() -> Route {
    Route::Here(RendezvousMode::OneHost)
}

fn elastic(endpoint: &str, serve: Option<bool>) -> Route {
    Route::Here(RendezvousMode::Elastic { endpoint: endpoint.parse().unwrap(), serve })
}

fn numbered(node_rank: usize, address: &str, master_port: u16) -> Route {
    Route::Here(RendezvousMode::Static { node_rank, master_addr: address.to_owned(), master_port })
}

fn etcd(endpoints: &[&str]) -> Route {
    let endpoints = endpoints.iter().map(|it| it.parse().unwrap()).collect();
    Route::Here(RendezvousMode::Etcd { endpoints })
}

#[test]
fn how_hosts_come_together() {
    let table: [(&[(&str, &str)], Route); 17] = [
        (&[], alone()),
        (&[("nnodes", "1"), ("node-rank", "0"), ("master-port", "29501")], alone()),
        // Command line of torchrun's documentation for one host.
        (&[("nnodes", "1"), ("rdzv-backend", "c10d"), ("rdzv-endpoint", "localhost:0")], alone()),
        (&[("hosts", "a,b")], Route::Hosts),
        (&[("hostfile", "f")], Route::Hosts),
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
        assert_eq!(decide(&mut layers(flags)).unwrap().way, expected, "{flags:?}");
    }
}

#[test]
fn contradictions_and_missing_settings_are_errors() {
    let table: [(&[(&str, &str)], &str); 17] = [
        (
            &[("node-rank", "1")],
            "node-rank 1 (flag --node-rank) and nnodes 1 (default): give the number of hosts with --nnodes",
        ),
        (
            &[("nnodes", "2"), ("node-rank", "2"), ("master-addr", "a")],
            "node-rank 2 (flag --node-rank) and nnodes 2 (flag --nnodes): the hosts have numbers from 0 to 1",
        ),
        (
            &[("nnodes", "2")],
            "nnodes 2 (flag --nnodes): on each host give --node-rank N and --master-addr HOST, or --rdzv-endpoint HOST:PORT; or start them all",
        ),
        (
            &[("nnodes", "2"), ("node-rank", "0")],
            "nnodes 2 (flag --nnodes): on each host give --node-rank N and --master-addr HOST",
        ),
        (
            &[("nnodes", "2"), ("master-addr", "a")],
            "nnodes 2 (flag --nnodes): give the number of this host with --node-rank, from 0 to 1",
        ),
        (
            &[("nnodes", "2"), ("master-addr", "a"), ("master-port", "0"), ("node-rank", "0")],
            "master-port 0 (flag --master-port): the hosts need a fixed port",
        ),
        (
            &[("nnodes", "1:2")],
            "nnodes 1:2 (flag --nnodes): give the address where the hosts meet with --rdzv-endpoint HOST:PORT",
        ),
        (
            &[("nnodes", "1:2"), ("master-addr", "a"), ("node-rank", "0")],
            "nnodes 1:2 (flag --nnodes): give the address where the hosts meet with --rdzv-endpoint",
        ),
        (
            &[("nnodes", "1:2"), ("rdzv-backend", "static"), ("rdzv-endpoint", "a:1")],
            "nnodes 1:2 (flag --nnodes) and rdzv-backend static (flag --rdzv-backend): numbered hosts cannot join",
        ),
        (
            &[("nnodes", "2"), ("rdzv-backend", "c10d")],
            "nnodes 2 (flag --nnodes): give the address where the hosts meet",
        ),
        (
            &[("nnodes", "2"), ("rdzv-backend", "etcd")],
            "rdzv-backend etcd (flag --rdzv-backend): give the address of etcd",
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
fn settings_without_effect_are_noted() {
    type Case<'a> = (&'a [(&'a str, &'a str)], &'a [&'a str]);
    let table: [Case<'_>; 10] = [
        (&[], &[]),
        (&[("node-rank", "0")], &[]),
        (&[("master-port", "29501")], &[]),
        (
            &[("master-port", "29501"), ("store-port", "29502")],
            &[
                "flag --master-port: master-port 29501 has no effect: store-port sets the port of the ranks' store",
            ],
        ),
        (
            &[("sync", "true")],
            &[
                "flag --sync: sync true has no effect: it is for hosts that are started from here, with --hosts or --hostfile",
            ],
        ),
        (
            &[("nnodes", "2"), ("rdzv-endpoint", "a:7"), ("node-rank", "1")],
            &["flag --node-rank: node-rank 1 has no effect: the rendezvous numbers the hosts"],
        ),
        (&[("nnodes", "2"), ("rdzv-backend", "c10d"), ("master-addr", "a")], &[]),
        (
            &[
                ("nnodes", "2"),
                ("rdzv-endpoint", "a:7"),
                ("rdzv-conf", "join_timeout=9,read_timeout=60"),
            ],
            &["flag --rdzv-conf: read_timeout has no effect: it is for torchrun's own store"],
        ),
        (
            &[("heartbeat-timeout", "60")],
            &["flag --heartbeat-timeout: heartbeat-timeout 60 has no effect: there is one host"],
        ),
        (
            &[("hosts", "a,b"), ("rdzv-conf", "keep_alive_interval=10")],
            &["flag --rdzv-conf: its keep-alive is heartbeat-timeout 30"],
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
    let waits = |conf| decide(&mut layers(&[("rdzv-conf", conf)])).unwrap().waits;
    let (join, last_call) = (Duration::from_secs(5), Duration::from_secs(1));
    let join_interval = Duration::from_secs(90);
    assert_eq!(waits("timeout=5"), RendezvousTimeouts { join, ..RendezvousTimeouts::default() });
    let conf = "timeout=7,join_timeout=5,last_call_timeout=1,join_interval=90";
    assert_eq!(waits(conf), RendezvousTimeouts { join, last_call, join_interval });
}

#[test]
fn how_long_a_host_may_be_silent() {
    let timeout = |flags: &[(&str, &str)]| {
        let decided = decide(&mut layers(&[&[("hosts", "a,b")], flags].concat()));
        decided.map(|it| it.heartbeat_timeout.as_secs_f64()).map_err(|error| error.to_string())
    };
    let table: [(&[(&str, &str)], f64); 8] = [
        (&[], 30.0),
        (&[("heartbeat-timeout", "2.5")], 2.5),
        (&[("rdzv-conf", "keep_alive_interval=7")], 21.0),
        (&[("rdzv-conf", "keep_alive_max_attempt=4")], 20.0),
        (&[("rdzv-conf", "keep_alive_interval=2,keep_alive_max_attempt=50")], 100.0),
        (&[("rdzv-conf", "heartbeat_timeout=45")], 45.0),
        (&[("rdzv-conf", "heartbeat_timeout=45,keep_alive_interval=20")], 60.0),
        (&[("rdzv-conf", "heartbeat_timeout=45"), ("heartbeat-timeout", "9")], 9.0),
    ];
    for (flags, expected) in table {
        assert_eq!(timeout(flags), Ok(expected), "{flags:?}");
    }
    let error = timeout(&[("heartbeat-timeout", "0.5")]).unwrap_err();
    let expected = "heartbeat-timeout 0.5 (flag --heartbeat-timeout): a busy host may be silent for \
                    that long; give at least 1 s";
    assert_eq!(error, expected);
    let error = timeout(&[("rdzv-conf", "keep_alive_max_attempt=0")]).unwrap_err();
    assert!(
        error.ends_with("keep_alive_max_attempt is `0`, expected a number of attempts"),
        "{error}"
    );
    assert!(timeout(&[("rdzv-conf", "keep_alive_interval=0")]).is_err());
}

/// Returns the connection settings of etcd for these keys of rdzv-conf and these variables.
fn access(
    endpoint: &str,
    conf: &str,
    variables: &[(&'static str, &'static str)],
) -> Result<EtcdAccess, String> {
    let mut flags = vec![("nnodes", "2"), ("rdzv-backend", "etcd"), ("rdzv-endpoint", endpoint)];
    if !conf.is_empty() {
        flags.push(("rdzv-conf", conf));
    }
    let mut layers = layers(&flags);
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let Decided { way, .. } = decide(&mut layers).map_err(|error| text(&error))?;
    let Route::Here(rendezvous) = way else { panic!("{way:?}") };
    let variables = variables.iter().copied().collect();
    etcd_access(&mut layers, &rendezvous, &variables).map_err(|error| text(&error))
}

#[test]
fn how_etcd_is_spoken_to() {
    assert_eq!(access("a", "", &[]), Ok(EtcdAccess::default()));
    let tls = EtcdAccess { tls: true, ..EtcdAccess::default() };
    assert_eq!(access("https://a:1,https://b", "", &[]).as_ref(), Ok(&tls));
    assert_eq!(access("a,b", "protocol=https", &[]).as_ref(), Ok(&tls));
    let all = access(
        "a",
        "protocol=https,cacert=ca.pem,cert=c.pem,key=k.pem,user=ada",
        &[("BRIGADE_ETCD_PASSWORD", "pass word")],
    );
    let expected = EtcdAccess {
        ca_file: Some("ca.pem".into()),
        cert_file: Some("c.pem".into()),
        key_file: Some("k.pem".into()),
        user: Some("ada".to_owned()),
        password: Some("pass word".to_owned()),
        ..tls
    };
    assert_eq!(all.as_ref(), Ok(&expected));
    assert!(!format!("{all:?}").contains("pass word"));

    let wrong = |endpoint: &str, conf: &str| access(endpoint, conf, &[]).unwrap_err();
    assert_eq!(
        wrong("https://a,b", ""),
        "rdzv-endpoint https://a,b (flag --rdzv-endpoint): either all of them begin with https:// or \
         none"
    );
    assert!(wrong("https://a", "protocol=http").ends_with(" and rdzv-conf protocol=http"));
    assert_eq!(
        wrong("a", "protocol=ftp"),
        "flag --rdzv-conf: rdzv-conf protocol is `ftp`, expected http or https"
    );
    assert!(wrong("a", "user=ada,password-file=/no/such").starts_with("cannot read the secret in"));
    assert!(wrong("a", "cacart=x").contains("did you mean cacert?"));
    let no_user = access("a", "", &[("BRIGADE_ETCD_PASSWORD", "x")]).unwrap_err();
    assert!(no_user.contains("add user=NAME to --rdzv-conf"), "{no_user}");
    // Without etcd there is a note that the key has no effect.
    let flags = [("nnodes", "2"), ("rdzv-endpoint", "a:1"), ("rdzv-conf", "cacert=x")];
    let mut layers = layers(&flags);
    let Route::Here(rendezvous) = decide(&mut layers).unwrap().way else { panic!() };
    etcd_access(&mut layers, &rendezvous, &Variables::default()).unwrap();
    assert!(layers.notes.iter().any(|note| note.text == "cacert has no effect: it is for etcd"));
}
