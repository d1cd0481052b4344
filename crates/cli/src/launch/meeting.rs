//! How the hosts of a job come together: what the settings say, and what they cannot say together.

use std::time::Duration;

use brigade_config::value::{Backend, Value as _};
use brigade_config::{ConfigError, Layer, Source, suggest};
use brigade_launch::{Endpoint, Meeting, NodeRange, Patience};

/// What the settings say of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// This command starts the ranks of this host, which meets others or does not.
    Here(Meeting),
    /// This command starts a list of hosts.
    Hosts,
}

/// Decides, and notes which settings change nothing then.
///
/// Errors say which settings contradict each other, or what is missing.
pub(super) fn decide(layers: &mut Layer) -> Result<(Way, Patience), ConfigError> {
    let (waits, serve) = rendezvous_conf(layers)?;
    let way = way(layers, serve)?;
    let idle: (&[&str], &str) = match way {
        Way::Here(Meeting::OneHost) => (
            &[
                "node-rank",
                "master-addr",
                "master-port",
                "local-addr",
                "rdzv-backend",
                "rdzv-endpoint",
                "rdzv-conf",
                "rdzv-secret-file",
            ],
            "there is one host, and each attempt has a free port",
        ),
        Way::Hosts | Way::Here(Meeting::Launcher { .. }) => (
            &[
                "node-rank",
                "master-addr",
                "master-port",
                "local-addr",
                "rdzv-conf",
                "rdzv-secret-file",
            ],
            "the hosts are connected by ssh",
        ),
        Way::Here(Meeting::Static { .. }) => (&["rdzv-conf"], "the hosts are numbered"),
        Way::Here(Meeting::Elastic { .. } | Meeting::Etcd { .. }) => {
            (&["node-rank", "master-addr", "master-port"], "the rendezvous numbers the hosts")
        }
    };
    // With c10d, Accelerate's address of machine 0 is where they meet.
    let is_endpoint = layers.settings.rdzv_endpoint.is_none();
    let (names, reason) = idle;
    for name in names {
        let is_address = matches!(*name, "master-addr" | "master-port");
        let is_used =
            matches!(way, Way::Here(Meeting::Elastic { .. })) && is_address && is_endpoint;
        let is_wait = *name == "rdzv-conf"
            && waits != Patience::default()
            && matches!(way, Way::Here(Meeting::Static { .. }));
        if !is_used && !is_wait {
            idle_note(layers, name, reason);
        }
    }
    if way != Way::Hosts {
        for name in ["sync", "env-pass", "workdir", "ssh-command"] {
            idle_note(
                layers,
                name,
                "it is for hosts that are started from here, with --hosts or --hostfile",
            );
        }
    }
    Ok((way, waits))
}

fn way(layers: &Layer, serve: Option<bool>) -> Result<Way, ConfigError> {
    let settings = &layers.settings;
    let nodes = settings.nnodes.unwrap_or_default();
    if settings.hosts.is_some() || settings.hostfile.is_some() {
        return Ok(Way::Hosts);
    }
    meeting(layers, nodes, serve).map(Way::Here)
}

fn meeting(layers: &Layer, nodes: NodeRange, serve: Option<bool>) -> Result<Meeting, ConfigError> {
    let settings = &layers.settings;
    if let Some(rank) = settings.node_rank
        && rank >= nodes.max
    {
        let (rank, nnodes) = (said(layers, "node-rank"), said(layers, "nnodes"));
        return Err(wrong(if nodes.max == 1 {
            format!("{rank} and {nnodes}: say how many hosts there are with --nnodes")
        } else {
            format!("{rank} and {nnodes}: the hosts have numbers from 0 to {}", nodes.max - 1)
        }));
    }
    if nodes.max == 1 {
        return Ok(Meeting::OneHost);
    }
    let endpoint = settings.rdzv_endpoint.as_deref();
    match (settings.rdzv_backend, endpoint) {
        (Some(Backend::Static), _) | (None, None) => numbered(layers, nodes),
        (Some(Backend::Etcd), None) => Err(wrong(format!(
            "{}: say where etcd is with --rdzv-endpoint HOST:2379",
            said(layers, "rdzv-backend")
        ))),
        (Some(Backend::Etcd), Some(endpoints)) => {
            let endpoint = |it: &str| endpoint_of(layers, it.trim(), ETCD_PORT);
            let endpoints = endpoints.split(',').map(endpoint).collect::<Result<_, _>>()?;
            Ok(Meeting::Etcd { endpoints })
        }
        (Some(Backend::Builtin) | None, _) => {
            let endpoint = match (endpoint, &settings.master_addr) {
                (Some(endpoint), _) => endpoint_of(layers, endpoint, RENDEZVOUS_PORT)?,
                (None, Some(address)) => Endpoint {
                    host: address.clone(),
                    port: settings.master_port.unwrap_or(RENDEZVOUS_PORT),
                },
                (None, None) => {
                    return Err(wrong(format!(
                        "{}: say where the hosts meet with --rdzv-endpoint HOST:PORT, the same on \
                         each",
                        said(layers, "nnodes")
                    )));
                }
            };
            Ok(Meeting::Elastic { endpoint, serve })
        }
    }
}

fn numbered(layers: &Layer, nodes: NodeRange) -> Result<Meeting, ConfigError> {
    let settings = &layers.settings;
    let nnodes = said(layers, "nnodes");
    if nodes.min != nodes.max {
        return Err(wrong(if settings.rdzv_backend.is_some() {
            format!(
                "{nnodes} and {}: numbered hosts cannot join and leave; use --rdzv-backend builtin",
                said(layers, "rdzv-backend")
            )
        } else {
            format!(
                "{nnodes}: say where the hosts meet with --rdzv-endpoint HOST:PORT, the same on each"
            )
        }));
    }
    let Endpoint { host, port } = match (&settings.rdzv_endpoint, &settings.master_addr) {
        (Some(endpoint), _) => endpoint_of(layers, endpoint, MASTER_PORT)?,
        (None, Some(address)) => {
            Endpoint { host: address.clone(), port: settings.master_port.unwrap_or(MASTER_PORT) }
        }
        (None, None) => {
            return Err(wrong(format!(
                "{nnodes}: on each host say --node-rank N and --master-addr HOST, or --rdzv-endpoint \
                 HOST:PORT; or start them all from here with --hosts"
            )));
        }
    };
    if port == 0 {
        return Err(wrong(format!(
            "{}: the hosts cannot meet at a port that none of them knows",
            said(
                layers,
                if settings.rdzv_endpoint.is_some() { "rdzv-endpoint" } else { "master-port" }
            )
        )));
    }
    let Some(node_rank) = settings.node_rank else {
        return Err(wrong(format!(
            "{nnodes}: say which of them this one is with --node-rank, from 0 to {}",
            nodes.max - 1
        )));
    };
    Ok(Meeting::Static { node_rank, master_addr: host, master_port: port })
}

/// torchrun's keys. Those that wait for something say how long; the others are its own affair.
fn rendezvous_conf(layers: &mut Layer) -> Result<(Patience, Option<bool>), ConfigError> {
    let Some(conf) = layers.settings.rdzv_conf.clone() else {
        return Ok((Patience::default(), None));
    };
    let source = layers.source("rdzv-conf").cloned().unwrap_or(Source::Default);
    let bad = |key: &str, value: &str, expected: &str| {
        wrong(format!("{source}: rdzv-conf {key} is `{value}`, expected {expected}"))
    };
    let seconds = |key: &str, value: &str| {
        Duration::parse(value).ok_or_else(|| bad(key, value, Duration::EXPECTED))
    };
    let (mut waits, mut serve, mut idle) = (Patience::default(), None, Vec::new());
    for (key, value) in &conf.0 {
        match key.as_str() {
            "join_timeout" => waits.join = seconds(key, value)?,
            // The static rendezvous has only this one.
            "timeout" if !conf.0.contains_key("join_timeout") => waits.join = seconds(key, value)?,
            "timeout" => {}
            "last_call_timeout" => waits.last_call = seconds(key, value)?,
            "is_host" => {
                serve = Some(bool::parse(value).ok_or_else(|| bad(key, value, bool::EXPECTED))?);
            }
            other if IDLE_CONF.contains(&other) => idle.push(other.to_owned()),
            other => {
                let known = USED_CONF.iter().chain(IDLE_CONF).copied();
                let hint = suggest::closest(other, known)
                    .map_or_else(String::new, |it| format!(": did you mean {it}?"));
                return Err(wrong(format!("{source}: rdzv-conf has no key {other}{hint}")));
            }
        }
    }
    if !idle.is_empty() {
        let text = format!("{} changes nothing: it is for torchrun's own store", idle.join(", "));
        layers.note(source, text);
    }
    Ok((waits, serve))
}

/// `HOST`, `HOST:PORT`, `[IPV6]:PORT`; each rendezvous has a port of its own where none is said.
fn endpoint_of(layers: &Layer, text: &str, default: u16) -> Result<Endpoint, ConfigError> {
    let mut endpoint: Endpoint = text
        .parse()
        .map_err(|reason| wrong(format!("{}: {reason}", said(layers, "rdzv-endpoint"))))?;
    let has_port = text.rsplit(']').next().is_some_and(|it| it.contains(':'));
    if !has_port {
        endpoint.port = default;
    }
    Ok(endpoint)
}

fn idle_note(layers: &mut Layer, name: &str, reason: &str) {
    if !layers.is_given(name) {
        return;
    }
    let text = layers.settings.text(name).unwrap_or_default();
    // Said with the same values by everybody who has one host: worth no word.
    if matches!((name, text.as_str()), ("node-rank", "0") | ("sync", "false")) {
        return;
    }
    let source = layers.source(name).cloned().unwrap_or(Source::Default);
    let text = format!("{name} {text} changes nothing: {reason}");
    layers.note(source, text);
}

/// A setting with its value and where it comes from.
fn said(layers: &Layer, name: &str) -> String {
    let text = layers.settings.text(name).unwrap_or_default();
    match layers.source(name) {
        Some(source) => format!("{name} {text} ({source})"),
        None => format!("no {name}"),
    }
}

fn wrong(words: String) -> ConfigError {
    ConfigError::Contradiction(words)
}

const RENDEZVOUS_PORT: u16 = 29400;
const MASTER_PORT: u16 = 29500;
const ETCD_PORT: u16 = 2379;
const USED_CONF: &[&str] = &["join_timeout", "timeout", "last_call_timeout", "is_host"];
const IDLE_CONF: &[&str] = &[
    "close_timeout",
    "heartbeat_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "read_timeout",
    "store_type",
    "rank",
    "protocol",
    "use_libuv",
];

#[cfg(test)]
mod tests {
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
            (
                &[("nnodes", "1"), ("rdzv-backend", "c10d"), ("rdzv-endpoint", "localhost:0")],
                alone(),
            ),
            (&[("hosts", "a,b")], Way::Hosts),
            (&[("hostfile", "f")], Way::Hosts),
            (&[("nnodes", "2"), ("node-rank", "1"), ("master-addr", "a")], numbered(1, "a", 29500)),
            (
                &[
                    ("nnodes", "2"),
                    ("node-rank", "0"),
                    ("master-addr", "::1"),
                    ("master-port", "7"),
                ],
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
            (
                &[("nnodes", "2"), ("rdzv-endpoint", "a:7"), ("node-rank", "1")],
                elastic("a:7", None),
            ),
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
                &[
                    "flag --node-rank: node-rank 1 changes nothing: the rendezvous numbers the hosts",
                ],
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
        assert_eq!(waits("timeout=5"), Patience { join, ..Patience::default() });
        assert_eq!(
            waits("timeout=7,join_timeout=5,last_call_timeout=1"),
            Patience { join, last_call }
        );
    }
}
