//! From a rank's place in the world to a store and a group; numbers of tensors.

use std::process::{Command, Stdio};
use std::time::Duration;

use brigade_rank_env::StoreHost;
use brigade_testkit::World;
use brigade_torch::{
    Backend, Error, Fault, GlooDevice, GroupOptions, ProcessGroup, Store, TcpStore, TorchError,
    inherited_socket,
};
use tch::{Kind, Tensor};

pub(crate) fn store(world: &World) -> Store {
    let server = match world.store.host {
        StoreHost::Rank0Fd(fd) => {
            TcpStore::server_on_socket(inherited_socket(fd).unwrap()).unwrap()
        }
        _ => TcpStore::client(&world.store.addr, world.store.port),
    };
    server.timeout(LIMIT).open().unwrap()
}

/// Gloo on the loopback, with a generous limit.
pub(crate) fn group(world: &World) -> ProcessGroup {
    let (rank, size) = (world.rank.as_usize(), world.world_size.as_usize());
    let options = GroupOptions { timeout: LIMIT, ..GroupOptions::default() };
    ProcessGroup::new(&store(world), rank, size, gloo(), options).unwrap()
}

pub(crate) fn gloo() -> Backend {
    Backend::Gloo(GlooDevice::Address("127.0.0.1".into()))
}

/// The elements in row-major order.
pub(crate) fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().to_kind(Kind::Double).flatten(0, -1)).unwrap()
}

/// Waits, without a message of the group, until `ranks` ranks have called it. Rank 0, which serves the
/// store, leaves last.
pub(crate) fn meet(group: &ProcessGroup, name: &str, ranks: usize) {
    let store = group.store().prefix(&format!("rendezvous {name}")).unwrap();
    let counted = |key: &str, all: usize| {
        if store.add(key, 1).unwrap() == all as i64 {
            store.set(&format!("all {key}"), "").unwrap();
        }
    };
    counted("here", ranks);
    store.wait(&["all here"], LIMIT).unwrap();
    if group.rank() == 0 {
        store.wait(&["all gone"], LIMIT).unwrap();
    } else {
        counted("gone", ranks - 1);
    }
}

#[track_caller]
pub(crate) fn assert_fault<T: std::fmt::Debug>(result: Result<T, Error>, fault: Fault) -> Error {
    let error = result.expect_err("this must fail");
    assert_eq!(error.fault(), Some(fault), "{error}");
    error
}

/// The ranks that the error says had not arrived.
pub(crate) fn missing(error: &Error) -> Vec<usize> {
    match error.downcast_ref() {
        Some(TorchError::Collective(error)) => error.missing.clone(),
        _ => panic!("not the error of a collective: {error}"),
    }
}

/// Lets a child process take this rank's place and die in it by SIGKILL, so that the rank itself can
/// end well. In the child, `act` is to kill the process ([`die`]); in the rank, nothing is left to do.
pub(crate) fn by_a_child_that_dies(act: impl FnOnce()) {
    if std::env::var_os(VICTIM).is_some() {
        act();
        panic!("the victim has outlived its act");
    }
    let status = Command::new(std::env::current_exe().unwrap())
        .args(std::env::args_os().skip(1))
        .env(VICTIM, "1")
        .env("BRIGADE_TEST_PARENT", std::process::id().to_string())
        .stdin(Stdio::null())
        .status()
        .unwrap();
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(status.signal(), Some(9), "{status}");
}

pub(crate) fn die() -> ! {
    nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL).unwrap();
    unreachable!("SIGKILL cannot be ignored")
}

pub(crate) const LIMIT: Duration = Duration::from_secs(45);
const VICTIM: &str = "BRIGADE_TEST_VICTIM";
