//! A child of `fork` that goes on without `exec`: everything ends with an error, and nothing hangs.

use std::process::Command;
use std::time::{Duration, Instant};

use brigade_torch::{
    Backend, BatchNormState, GlooDevice, GroupOptions, ProcessGroup, ReduceOp, Reducer,
    ReducerOptions, Store, TcpStore, Work, keep_freed_memory, sync_batch_norm,
};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};
use tch::{Device, Kind, Tensor};

/// Runs `child` in a child of this process; its exit code.
#[expect(clippy::exit, reason = "the child ends here: it must not return into the test runner")]
fn in_a_child(child: impl FnOnce() -> Result<(), String>) -> i32 {
    // SAFETY: the test's other threads hold no lock that the child takes: it uses what is tested here, and
    // ends by `exit`, which is tested as well.
    match unsafe { fork() }.expect("fork") {
        ForkResult::Child => {
            let code = match child() {
                Ok(()) => 0,
                Err(text) => {
                    eprintln!("{text}");
                    1
                }
            };
            std::process::exit(code)
        }
        ForkResult::Parent { child } => {
            let begun = Instant::now();
            loop {
                match waitpid(child, Some(WaitPidFlag::WNOHANG)).expect("waitpid") {
                    WaitStatus::Exited(_, code) => return code,
                    WaitStatus::StillAlive if begun.elapsed() > Duration::from_secs(30) => {
                        kill(child, Signal::SIGKILL).expect("kill");
                        waitpid(child, None).expect("waitpid");
                        panic!("the child hangs");
                    }
                    WaitStatus::StillAlive => std::thread::sleep(Duration::from_millis(5)),
                    other => panic!("the child ended by {other:?}"),
                }
            }
        }
    }
}

fn expect_refusal<T>(what: &str, result: Result<T, impl std::fmt::Display>) -> Result<(), String> {
    match result {
        Err(error) if error.to_string().contains("child of fork") => Ok(()),
        Err(error) => Err(format!("{what}: another error: {error}")),
        Ok(_) => Err(format!("{what}: it was done")),
    }
}

/// What one of two ranks has when a process forks.
struct Rank {
    group: ProcessGroup,
    parameter: Tensor,
    reducer: Reducer,
    loss: Tensor,
    work: Work<Tensor>,
    store: Store,
}

impl Rank {
    fn new(rank: usize, store: Store) -> Self {
        let backend = Backend::Gloo(GlooDevice::Address("127.0.0.1".into()));
        let options = GroupOptions { timeout: LIMIT, ..GroupOptions::default() };
        let group = ProcessGroup::new(&store, rank, 2, backend, options).unwrap();
        let parameter = ones().set_requires_grad(true);
        let named = [("weight".to_owned(), parameter.shallow_clone())];
        let reducer = Reducer::new(&group, &named, &[], ReducerOptions::default()).unwrap();
        reducer.before_forward(true).unwrap();
        let loss = reducer.after_forward(parameter.sum(Kind::Float), true).unwrap();
        let work = group.start_all_reduce(ones(), ReduceOp::Sum).unwrap();
        Self { group, parameter, reducer, loss, work, store }
    }
}

fn ones() -> Tensor {
    Tensor::ones([4, 4], (Kind::Float, Device::Cpu))
}

/// With the allocator that refuses as well, and with the C library's, whatever this test's own environment says.
#[test]
fn everything_is_refused_in_a_child() {
    for kept in ["1", "0"] {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["forked::refused_with_these_settings", "--exact", "--ignored", "--nocapture"])
            .env_remove("MALLOC_TRIM_THRESHOLD_")
            .env_remove("MALLOC_MMAP_THRESHOLD_")
            .env_remove("GLIBC_TUNABLES")
            .env(KEPT, kept)
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr]
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        assert!(output.status.success() && text[0].contains("1 passed"), "{kept}: {text:?}");
    }
}

#[test]
#[ignore = "runs in a process of its own, which the test above starts"]
fn refused_with_these_settings() {
    keep_freed_memory();
    let server = TcpStore::server("127.0.0.1", 0).timeout(LIMIT).open().unwrap();
    let client =
        || TcpStore::client("127.0.0.1", server.port().unwrap()).timeout(LIMIT).open().unwrap();
    // Two ranks on two threads, so that Gloo has connections and threads.
    let (mine, other) = std::thread::scope(|scope| {
        let store = client();
        let other = scope.spawn(move || Rank::new(1, store));
        (Rank::new(0, client()), other.join().unwrap())
    });
    let last = client();
    let memory = std::env::var(KEPT).is_ok_and(|kept| kept == "1");
    let large = Tensor::ones([1 << 20], (Kind::Float, Device::Cpu));
    let input = ones();
    let of_the_server = server.clone();
    let code = in_a_child(|| {
        let Rank { group, mut parameter, reducer, loss, work, store } = mine;
        let state = BatchNormState::default();
        expect_refusal("sync_batch_norm", sync_batch_norm(&group, &input, state, 0.1, 1e-5))?;
        expect_refusal("backward", group.backward(&loss))?;
        expect_refusal("before_forward", reducer.before_forward(true))?;
        expect_refusal("wait", work.wait())?;
        let plain = [&parameter.detach()];
        expect_refusal("broadcast", group.broadcast_coalesced(&plain, 1 << 20, 0))?;
        parameter = parameter.detach();
        expect_refusal("all_reduce", group.all_reduce(&mut parameter, ReduceOp::Sum))?;
        expect_refusal("store", store.set("key", "of the child"))?;
        expect_refusal("store", of_the_server.get("key"))?;
        if memory {
            expect_refusal("memory", Tensor::f_ones([1 << 20], (Kind::Float, Device::Cpu)))?;
        }
        // Objects that the parent made can be dropped.
        drop((large, group, reducer, loss, store, other, of_the_server));
        Ok(())
    });
    assert_eq!(code, 0);
    // The parent's connections still work.
    last.set("key", "of the parent").unwrap();
    assert_eq!(server.get("key").unwrap(), b"of the parent");
}

const LIMIT: Duration = Duration::from_secs(60);
const KEPT: &str = "BRIGADE_KEEP_MEMORY";
