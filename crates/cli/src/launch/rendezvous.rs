//! Resolution of the rendezvous from the settings, with its contradictions.

use std::path::{Path, PathBuf};
use std::time::Duration;

use brigade_config::value::{Backend, Value as _};
use brigade_config::{ConfigError, Layer, Source, Variables, suggest};
use brigade_launch::{
    Endpoint, EtcdAccess, LaunchOptions, NodeRange, RendezvousMode, RendezvousTimeouts, TimeLimits,
    private_text,
};
use brigade_rank_env::env;

/// Way in which the hosts are started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// This command starts the ranks of this host, which may join others.
    Here(RendezvousMode),
    /// This command starts a list of hosts.
    Hosts,
}

/// Resolved settings of the rendezvous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Decided {
    pub(super) way: Route,
    /// Time limits of the rendezvous.
    pub(super) waits: RendezvousTimeouts,
    /// Time without a heartbeat after which a host is lost.
    pub(super) heartbeat_timeout: Duration,
}

/// Resolves the settings, and adds notes about settings without effect.
///
/// # Errors
/// Fails if settings contradict each other, or one is missing.
pub(super) fn decide(layers: &mut Layer) -> Result<Decided, ConfigError> {
    let conf = rendezvous_conf(layers)?;
    let Conf { waits, serve, .. } = conf;
    let way = way(layers, serve)?;
    let heartbeat_timeout = heartbeat_timeout(layers, &conf)?;
    let idle: (&[&str], &str) = match way {
        Route::Here(RendezvousMode::OneHost) => (
            &[
                "node-rank",
                "master-addr",
                "local-addr",
                "rdzv-backend",
                "rdzv-endpoint",
                "rdzv-conf",
                "rdzv-secret-file",
                "heartbeat-timeout",
            ],
            "there is one host",
        ),
        Route::Hosts | Route::Here(RendezvousMode::Launcher { .. }) => (
            &["node-rank", "master-port", "rdzv-conf", "rdzv-secret-file"],
            "the hosts are connected by ssh, and each attempt has a free port",
        ),
        Route::Here(RendezvousMode::Static { .. }) => (&["rdzv-conf"], "the hosts are numbered"),
        Route::Here(RendezvousMode::Elastic { .. } | RendezvousMode::Etcd { .. }) => {
            (&["node-rank", "master-addr", "master-port"], "the rendezvous numbers the hosts")
        }
    };
    // With c10d, Accelerate's address of machine 0 is the endpoint.
    let is_endpoint = layers.settings.rdzv_endpoint.is_none();
    let (names, reason) = idle;
    for name in names {
        let is_address = matches!(*name, "master-addr" | "master-port");
        let is_used =
            matches!(way, Route::Here(RendezvousMode::Elastic { .. })) && is_address && is_endpoint;
        let is_wait = *name == "rdzv-conf"
            && (waits != RendezvousTimeouts::default()
                && matches!(way, Route::Here(RendezvousMode::Static { .. }))
                || conf.heartbeat.is_some() && way != Route::Here(RendezvousMode::OneHost));
        if !is_used && !is_wait {
            idle_note(layers, name, reason);
        }
    }
    if way == Route::Here(RendezvousMode::OneHost) && layers.settings.store_port.is_some() {
        idle_note(layers, "master-port", "store-port sets the port of the ranks' store");
    }
    if way != Route::Hosts {
        for name in OF_A_LIST {
            idle_note(
                layers,
                name,
                "it is for hosts that are started from here, with --hosts or --hostfile",
            );
        }
    }
    Ok(Decided { way, waits, heartbeat_timeout })
}

/// Brigade's own setting takes precedence over torchrun's.
fn heartbeat_timeout(layers: &mut Layer, conf: &Conf) -> Result<Duration, ConfigError> {
    let by_user =
        layers.settings.heartbeat_timeout.filter(|_| layers.is_given("heartbeat-timeout"));
    let (timeout, setting) = match (by_user, conf.heartbeat) {
        (Some(timeout), _) => (timeout, setting(layers, "heartbeat-timeout")),
        (None, Some(timeout)) => {
            let source = layers.source("rdzv-conf").cloned().unwrap_or(Source::Default);
            let seconds = timeout.as_secs_f64();
            let setting = format!("rdzv-conf ({source}): heartbeat-timeout {seconds}");
            layers.note(source, format!("its keep-alive is heartbeat-timeout {seconds}"));
            (timeout, setting)
        }
        (None, None) => return Ok(LaunchOptions::default().heartbeat_timeout),
    };
    if timeout < TimeLimits::SHORTEST_HEARTBEAT_TIMEOUT {
        return Err(wrong(format!(
            "{setting}: a busy host may be silent for that long; give at least {} s",
            TimeLimits::SHORTEST_HEARTBEAT_TIMEOUT.as_secs()
        )));
    }
    Ok(timeout)
}

fn way(layers: &Layer, serve: Option<bool>) -> Result<Route, ConfigError> {
    let settings = &layers.settings;
    let nodes = settings.nnodes.unwrap_or_default();
    if settings.hosts.is_some() || settings.hostfile.is_some() {
        return Ok(Route::Hosts);
    }
    rendezvous(layers, nodes, serve).map(Route::Here)
}

fn rendezvous(
    layers: &Layer,
    nodes: NodeRange,
    serve: Option<bool>,
) -> Result<RendezvousMode, ConfigError> {
    let settings = &layers.settings;
    if let Some(rank) = settings.node_rank
        && rank >= nodes.max
    {
        let (rank, nnodes) = (setting(layers, "node-rank"), setting(layers, "nnodes"));
        return Err(wrong(if nodes.max == 1 {
            format!("{rank} and {nnodes}: give the number of hosts with --nnodes")
        } else {
            format!("{rank} and {nnodes}: the hosts have numbers from 0 to {}", nodes.max - 1)
        }));
    }
    if nodes.max == 1 {
        return Ok(RendezvousMode::OneHost);
    }
    let endpoint = settings.rdzv_endpoint.as_deref();
    match (settings.rdzv_backend, endpoint) {
        (Some(Backend::Static), _) | (None, None) => numbered(layers, nodes),
        (Some(Backend::Etcd), None) => Err(wrong(format!(
            "{}: give the address of etcd with --rdzv-endpoint HOST:2379",
            setting(layers, "rdzv-backend")
        ))),
        (Some(Backend::Etcd), Some(endpoints)) => {
            let all = endpoints.split(',').map(str::trim);
            let secure = all.clone().filter(|it| it.starts_with("https://")).count();
            if secure != 0 && secure != all.count() {
                return Err(wrong(format!(
                    "{}: either all of them begin with https:// or none",
                    setting(layers, "rdzv-endpoint")
                )));
            }
            let plain = |endpoint: &'_ str| {
                let rest = endpoint.split_once("://").map_or(endpoint, |(_, rest)| rest);
                rest.trim_end_matches('/').to_owned()
            };
            let endpoint = |it: &str| endpoint_of(layers, &plain(it.trim()), ETCD_PORT);
            let endpoints = endpoints.split(',').map(endpoint).collect::<Result<_, _>>()?;
            Ok(RendezvousMode::Etcd { endpoints })
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
                        "{}: give the address where the hosts meet with --rdzv-endpoint HOST:PORT, the \
                         same on each",
                        setting(layers, "nnodes")
                    )));
                }
            };
            Ok(RendezvousMode::Elastic { endpoint, serve })
        }
    }
}

fn numbered(layers: &Layer, nodes: NodeRange) -> Result<RendezvousMode, ConfigError> {
    let settings = &layers.settings;
    let nnodes = setting(layers, "nnodes");
    if nodes.min != nodes.max {
        return Err(wrong(if settings.rdzv_backend.is_some() {
            format!(
                "{nnodes} and {}: numbered hosts cannot join and leave; use --rdzv-backend builtin",
                setting(layers, "rdzv-backend")
            )
        } else {
            format!(
                "{nnodes}: give the address where the hosts meet with --rdzv-endpoint HOST:PORT, the same on each"
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
                "{nnodes}: on each host give --node-rank N and --master-addr HOST, or --rdzv-endpoint \
                 HOST:PORT; or start them all from here with --hosts"
            )));
        }
    };
    if port == 0 {
        return Err(wrong(format!(
            "{}: the hosts need a fixed port to meet at, not 0",
            setting(
                layers,
                if settings.rdzv_endpoint.is_some() { "rdzv-endpoint" } else { "master-port" }
            )
        )));
    }
    let Some(node_rank) = settings.node_rank else {
        return Err(wrong(format!(
            "{nnodes}: give the number of this host with --node-rank, from 0 to {}",
            nodes.max - 1
        )));
    };
    Ok(RendezvousMode::Static { node_rank, master_addr: host, master_port: port })
}

/// Values of torchrun's keys in `--rdzv-conf`.
#[derive(Clone, Copy, Debug, Default)]
struct Conf {
    waits: RendezvousTimeouts,
    /// `true` if this host serves the rendezvous.
    serve: Option<bool>,
    /// Time without a heartbeat after which a host is lost.
    heartbeat: Option<Duration>,
}

/// Parses torchrun's keys. Keys with time limits have equivalents here; the others concern only torchrun's
/// implementation.
///
/// torchrun drops a host after `keep_alive_max_attempt` missed heartbeats of `keep_alive_interval` seconds (3 times 5
/// s); `heartbeat_timeout` is the limit of a single one. The longer of both is used as the limit here.
fn rendezvous_conf(layers: &mut Layer) -> Result<Conf, ConfigError> {
    let Some(conf) = layers.settings.rdzv_conf.clone() else {
        return Ok(Conf::default());
    };
    let source = layers.source("rdzv-conf").cloned().unwrap_or(Source::Default);
    let bad = |key: &str, value: &str, expected: &str| {
        wrong(format!("{source}: rdzv-conf {key} is `{value}`, expected {expected}"))
    };
    let seconds = |key: &str, value: &str| {
        Duration::parse(value).ok_or_else(|| bad(key, value, Duration::EXPECTED))
    };
    let (mut waits, mut serve, mut idle) = (RendezvousTimeouts::default(), None, Vec::new());
    let (mut interval, mut attempts, mut beat) = (None, None, None);
    for (key, value) in &conf.0 {
        match key.as_str() {
            "join_timeout" => waits.join = seconds(key, value)?,
            // The static rendezvous has only this key.
            "timeout" if !conf.0.contains_key("join_timeout") => waits.join = seconds(key, value)?,
            "timeout" => {}
            "last_call_timeout" => waits.last_call = seconds(key, value)?,
            "join_interval" => waits.join_interval = seconds(key, value)?,
            "is_host" => {
                serve = Some(bool::parse(value).ok_or_else(|| bad(key, value, bool::EXPECTED))?);
            }
            "keep_alive_interval" => interval = Some(seconds(key, value)?),
            "keep_alive_max_attempt" => {
                let number = value.parse::<u32>().ok().filter(|number| *number > 0);
                attempts = Some(number.ok_or_else(|| bad(key, value, "a number of attempts"))?);
            }
            "heartbeat_timeout" => beat = Some(seconds(key, value)?),
            other if ETCD_CONF.contains(&other) => {}
            other if IDLE_CONF.contains(&other) => idle.push(other.to_owned()),
            other => {
                let known = USED_CONF.iter().chain(ETCD_CONF).chain(IDLE_CONF).copied();
                let hint = suggest::closest(other, known).map_or_else(
                    || format!("; it has {}", USED_CONF.join(", ")),
                    |it| format!(": did you mean {it}?"),
                );
                return Err(wrong(format!("{source}: rdzv-conf has no key {other}{hint}")));
            }
        }
    }
    if !idle.is_empty() {
        let text = format!("{} has no effect: it is for torchrun's own store", idle.join(", "));
        layers.note(source, text);
    }
    let kept_alive = (interval.is_some() || attempts.is_some()).then(|| {
        let interval = interval.unwrap_or(TORCHRUNS_INTERVAL);
        interval.saturating_mul(attempts.unwrap_or(TORCHRUNS_ATTEMPTS))
    });
    Ok(Conf { waits, serve, heartbeat: kept_alive.into_iter().chain(beat).max() })
}

/// Parses `HOST`, `HOST:PORT`, `[IPV6]:PORT`; the default port depends on the rendezvous.
fn endpoint_of(layers: &Layer, text: &str, default: u16) -> Result<Endpoint, ConfigError> {
    let mut endpoint: Endpoint = text
        .parse()
        .map_err(|reason| wrong(format!("{}: {reason}", setting(layers, "rdzv-endpoint"))))?;
    let has_port = text.rsplit(']').next().is_some_and(|it| it.contains(':'));
    if !has_port {
        endpoint.port = default;
    }
    Ok(endpoint)
}

/// Returns the connection settings of etcd: torchrun's keys of `--rdzv-conf`, the scheme of the endpoints, and the
/// password, which is never on the command line.
///
/// # Errors
/// Names the key that is wrong, or the reason why the password file cannot be used.
pub(super) fn etcd_access(
    layers: &mut Layer,
    rendezvous: &RendezvousMode,
    variables: &Variables,
) -> anyhow::Result<EtcdAccess> {
    let conf = layers.settings.rdzv_conf.clone().map(|it| it.0).unwrap_or_default();
    let source = layers.source("rdzv-conf").cloned().unwrap_or(Source::Default);
    let given = |key: &str| conf.get(key).cloned();
    if !matches!(rendezvous, RendezvousMode::Etcd { .. }) {
        let idle: Vec<&str> =
            ETCD_CONF.iter().copied().filter(|key| conf.contains_key(*key)).collect();
        if !idle.is_empty() {
            layers.note(source, format!("{} has no effect: it is for etcd", idle.join(", ")));
        }
        return Ok(EtcdAccess::default());
    }
    let by_scheme = layers.settings.rdzv_endpoint.as_deref().is_some_and(is_https);
    let tls = match given("protocol").as_deref() {
        Some("https") => true,
        Some("http") if by_scheme => {
            let endpoint = setting(layers, "rdzv-endpoint");
            return Err(wrong(format!("{endpoint} and rdzv-conf protocol=http")).into());
        }
        Some("http") => false,
        Some(other) => {
            let text = format!("rdzv-conf protocol is `{other}`, expected http or https");
            return Err(wrong(format!("{source}: {text}")).into());
        }
        None => by_scheme,
    };
    let password = match (given("password-file"), variables.value(env::BRIGADE_ETCD_PASSWORD)) {
        (Some(path), _) => Some(private_text(Path::new(&path))?),
        (None, Some(value)) => Some(value.to_string_lossy().into_owned()),
        (None, None) => None,
    };
    let user = given("user");
    if user.is_none() && password.is_some() {
        let text = "a password for etcd was given without a user: add user=NAME to --rdzv-conf";
        return Err(wrong(text.to_owned()).into());
    }
    let file = |key: &str| given(key).map(PathBuf::from);
    Ok(EtcdAccess {
        tls,
        ca_file: file("cacert"),
        cert_file: file("cert"),
        key_file: file("key"),
        user,
        password,
    })
}

fn is_https(endpoints: &str) -> bool {
    endpoints.split(',').any(|it| it.trim().starts_with("https://"))
}

fn idle_note(layers: &mut Layer, name: &str, reason: &str) {
    if !layers.is_given(name) {
        return;
    }
    let text = layers.settings.text(name).unwrap_or_default();
    // These values are the defaults of a single host: no note is needed.
    if matches!((name, text.as_str()), ("node-rank", "0") | ("sync", "false")) {
        return;
    }
    let source = layers.source(name).cloned().unwrap_or(Source::Default);
    let text = format!("{name} {text} has no effect: {reason}");
    layers.note(source, text);
}

/// Formats a setting with its value and source.
fn setting(layers: &Layer, name: &str) -> String {
    let text = layers.settings.text(name).unwrap_or_default();
    match layers.source(name) {
        Some(source) => format!("{name} {text} ({source})"),
        None => format!("no {name}"),
    }
}

fn wrong(words: String) -> ConfigError {
    ConfigError::Contradiction(words)
}

/// Settings of a job whose hosts are started from here.
pub(super) const OF_A_LIST: [&str; 7] =
    ["sync", "env-pass", "workdir", "ssh-command", "connect-timeout", "include", "exclude"];
const RENDEZVOUS_PORT: u16 = 29400;
const MASTER_PORT: u16 = 29500;
const ETCD_PORT: u16 = 2379;
/// torchrun's defaults for `keep_alive_interval` and `keep_alive_max_attempt`.
const TORCHRUNS_INTERVAL: Duration = Duration::from_secs(5);
const TORCHRUNS_ATTEMPTS: u32 = 3;
const USED_CONF: &[&str] = &[
    "join_timeout",
    "timeout",
    "last_call_timeout",
    "join_interval",
    "is_host",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "heartbeat_timeout",
];
const IDLE_CONF: &[&str] = &["close_timeout", "read_timeout", "store_type", "rank", "use_libuv"];
/// Keys of etcd; all but the last two are torchrun's names.
const ETCD_CONF: &[&str] = &["protocol", "cacert", "cert", "key", "user", "password-file"];

#[cfg(test)]
mod tests;
