//! Joining the job: store, device, process group.
//!
//! Joining makes the rank's device current and gives its thread a stream of its own: autograd's nodes and the hooks
//! of the reducer stay on the stream on which they were made, and the default stream cannot be recorded in a graph.

use std::net::TcpListener;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use brigade_rank_env::{StoreEndpoint, StoreHost, World, own_address};
use brigade_torch::{
    Backend, DEFAULT_GROUP_TIMEOUT, DEVICE_KINDS, DeviceExt, DeviceUnavailable, Error, GlooDevice,
    Result, Store, TcpStore, inherited_socket, join_tpu_slice, make_products_reproducible,
};
use parking_lot::Mutex;
use tch::Device;

use crate::error::TrainError;
use crate::job::Job;
use crate::job::attempt::Attempt;
use crate::job::groups::Groups;
use crate::recorder::Recorder;

/// Options for joining a job with [`crate::Processes::join`]. Options that are not set are taken from the environment.
/// [`crate::AcceleratorBuilder`] has an option of the same name for each field.
#[derive(Debug, Default)]
pub struct ConnectOptions {
    /// `true` if the CPU is used even if there is a GPU. Defaults to `false`.
    pub cpu: bool,
    /// Rank, world size and hosts of the job. Defaults to the values of the environment.
    pub world: Option<World>,
    /// The store where the ranks rendezvous. Defaults to the store whose address `world` has.
    pub store: Option<Store>,
    /// The device of this rank. Defaults to the GPU whose index is the local rank modulo the number of GPUs, or to the
    /// CPU if there is no GPU.
    pub device: Option<Device>,
    /// Backend of the collectives. Defaults to NCCL for GPUs and Gloo for CPUs.
    pub backend: Option<Backend>,
    /// Time limit of joining and of every collective. Defaults to 30 minutes.
    pub timeout: Option<Duration>,
    /// Network interface or address that Gloo listens on. Defaults to the loopback address if all ranks are on one host
    /// and `GLOO_SOCKET_IFNAME` is not set, else to [`GlooDevice::Default`].
    pub gloo: Option<GlooDevice>,
}

/// Connects to the other ranks. Does nothing with one rank.
pub(crate) fn join(options: ConnectOptions, debug: bool) -> Result<Job> {
    let ConnectOptions { cpu, world, store, device, backend, timeout, gloo } = options;
    let timeout = timeout.unwrap_or(DEFAULT_GROUP_TIMEOUT);
    let world = world.map_or_else(World::from_env, Ok)?;
    if backend == Some(Backend::Tpu) && !world.is_alone() {
        // Before TorchTPU is loaded.
        join_tpu_slice()?;
    }
    let (device, missing_gpu) = match device {
        Some(device) if cpu && device != Device::Cpu => {
            return Err(Error::invalid_argument(format!(
                "the options `cpu(true)` and `device({})` contradict each other",
                device.label()
            )));
        }
        Some(device) => (device, None),
        None if cpu || cpu_is_requested()? => (Device::Cpu, None),
        None => choose_device(&world),
    };
    device.load()?;
    // Must precede everything that uses the current device: threads start with device 0.
    device.make_current()?;
    // Autograd's nodes and the reducer's hooks stay on the stream on which they were made, and a step can only be
    // recorded (`Accelerator::capture`) if none of them is on the default stream.
    device.use_own_stream()?;
    let products = make_products_reproducible();
    let groups = if world.is_alone() {
        None
    } else {
        let listens = gloo.clone().unwrap_or_else(|| gloo_device(&world));
        let backend = match (backend, gloo, device.device_kind()) {
            (Some(Backend::Gloo(_)), Some(gloo), _) => Backend::Gloo(gloo),
            (Some(backend @ Backend::Fake), Some(_), _) => {
                return Err(Error::invalid_argument(format!(
                    "the options `gloo_device` and `backend({backend:?})` contradict each other"
                )));
            }
            (Some(backend), ..) => backend,
            (None, _, Some((kind, _))) => match kind.default_backend() {
                Backend::Gloo(_) => Backend::Gloo(listens.clone()),
                backend => backend,
            },
            (None, _, None) => Backend::Gloo(listens.clone()),
        };
        let (attempt, store) = match store {
            Some(store) => (None, store),
            None if world.store.port == 0 => {
                return Err(Error::invalid_argument(format!(
                    "a world size of {} was given without a store and without the port of one: give \
                     all ranks handles of one store (`AcceleratorBuilder::store`)",
                    world.world_size.as_usize()
                )));
            }
            // A simulated rank has no peers with which to agree.
            None if world.store.host == StoreHost::Agent && backend != Backend::Fake => {
                let (attempt, store) =
                    Attempt::enter(open_store(&world, timeout)?, &world, timeout)?;
                (Some(attempt), store)
            }
            None => (None, open_store(&world, timeout)?),
        };
        let groups = Groups::connect(store, &world, backend, listens, timeout, debug)?;
        attempt.iter().try_for_each(Attempt::connected)?;
        Some(groups)
    };
    Ok(Job {
        world,
        groups,
        device,
        missing_gpu,
        products,
        timeout,
        debug,
        saves: AtomicU64::new(0),
        tries: AtomicU64::new(0),
        loss_checks: AtomicU64::new(0),
        memory_plan: Mutex::default(),
        recorder: Recorder::default(),
    })
}

/// Returns `true` if the launcher's `--debug-collectives` is set.
pub(crate) fn debug_is_requested() -> bool {
    std::env::var("ACCELERATE_DEBUG_MODE").is_ok_and(|value| {
        ["1", "true", "yes", "on", "y", "t"].contains(&value.to_ascii_lowercase().as_str())
    })
}

/// Returns `true` if the environment requires the CPU.
pub(crate) fn cpu_is_requested() -> Result<bool> {
    use brigade_rank_env::env::ACCELERATE_USE_CPU as NAME;
    let text = std::env::var(NAME).unwrap_or_default();
    match text.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "t" | "yes" | "y" | "on" => Ok(true),
        "" | "0" | "false" | "f" | "no" | "n" | "off" => Ok(false),
        _ => Err(Error::invalid_argument(format!("{NAME} is {text:?}, expected true or false"))),
    }
}

/// Returns a GPU or TPU if there is one, else the CPU, with the reason why a program that was built for one has none.
fn choose_device(world: &World) -> (Device, Option<DeviceUnavailable>) {
    let mut missing = None;
    for kind in DEVICE_KINDS {
        match kind.devices() {
            Ok(devices) => return (kind.device(world.local_rank.as_usize() % devices), None),
            Err(reason) if reason.is_not_compiled() => {}
            Err(reason) => missing = missing.or(Some(reason)),
        }
    }
    (Device::Cpu, missing)
}

/// Returns Gloo's interface. On one host it is the loopback, which always works, since the host's own name may resolve
/// to any address.
fn gloo_device(world: &World) -> GlooDevice {
    let loopback = world.store.addr.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
    if world.num_nodes == 1 && loopback && std::env::var_os("GLOO_SOCKET_IFNAME").is_none() {
        GlooDevice::Address(world.store.addr.clone())
    } else {
        GlooDevice::Default
    }
}

/// Serves the store of a program that Brigade's launcher did not start: at the job's address if that certainly belongs
/// to this host, else at all addresses.
fn served(endpoint: &StoreEndpoint) -> Result<TcpStore> {
    let listener = own_address(&endpoint.addr)
        .and_then(|address| TcpListener::bind((address, endpoint.port)).ok());
    Ok(match listener {
        Some(listener) => TcpStore::server_on(listener)?,
        // Explains the error if the port is in use.
        None => TcpStore::server(endpoint.addr.clone(), endpoint.port),
    })
}

fn open_store(world: &World, timeout: Duration) -> Result<Store> {
    let endpoint = &world.store;
    let serves = world.rank.as_usize() == 0;
    let store = match endpoint.host {
        StoreHost::Rank0Fd(fd) if serves => TcpStore::server_on_socket(inherited_socket(fd)?)?,
        StoreHost::Rank0 if serves => served(endpoint)?,
        _ => TcpStore::client(endpoint.addr.clone(), endpoint.port),
    };
    let store = match endpoint.host {
        StoreHost::Rank0Fd(_) | StoreHost::Rank0 => store.hosted_by(0),
        _ => store,
    };
    let store = store.world_size(world.world_size.as_usize()).timeout(timeout).open();
    // No launcher has reserved the port: it was computed from a scheduler's job ID, or chosen by the user.
    if serves && endpoint.host == StoreHost::Rank0 {
        return Ok(store.map_err(|source| TrainError::StorePort { port: endpoint.port, source })?);
    }
    store
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use brigade_rank_env::{Rank, WorldSize};

    use super::*;

    #[test]
    fn a_simulated_rank_waits_for_no_other_in_a_later_attempt() {
        let server = TcpStore::server("127.0.0.1", 0).open().unwrap();
        let world_size = WorldSize::new(2).unwrap();
        let mut world = World::alone();
        (world.rank, world.world_size) = (Rank::new(1, world_size).unwrap(), world_size);
        world.restart_count = 1;
        world.store.port = server.port().unwrap();
        world.store.host = StoreHost::Agent;
        let options = ConnectOptions {
            cpu: true,
            world: Some(world),
            backend: Some(Backend::Fake),
            timeout: Some(Duration::from_secs(1)),
            ..ConnectOptions::default()
        };
        assert!(join(options, false).unwrap().groups.is_some());
    }

    #[test]
    fn a_store_without_a_launcher_is_served_at_its_address_alone() {
        let endpoint =
            |addr: &str| StoreEndpoint { addr: addr.to_owned(), ..StoreEndpoint::alone() };
        // All of 127/8 are addresses of this host.
        let store = served(&endpoint("127.0.0.2")).unwrap().open().unwrap();
        let port = store.port().unwrap();
        assert!(TcpStream::connect(("127.0.0.2", port)).is_ok());
        assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
        store.set("a", b"b").unwrap();
        assert_eq!(store.get("a").unwrap(), b"b");
    }
}
