//! A child of `fork` that goes on without `exec`: everything ends with an error, and nothing hangs.

use std::time::{Duration, Instant};

use brigade_torch::{
    Backend, Device, GlooDevice, GroupOptions, Kind, ProcessGroup, ReduceOp, Store, Tensor,
    keep_freed_memory,
};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};

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

fn expect_refusal<T>(result: Result<T, impl std::fmt::Display>) -> Result<(), String> {
    match result {
        Err(error) if error.to_string().contains("child of fork") => Ok(()),
        Err(error) => Err(format!("another error: {error}")),
        Ok(_) => Err("it was done".into()),
    }
}

#[test]
fn tensors_and_groups_are_refused_in_a_child() {
    keep_freed_memory();
    let store = Store::hash().unwrap();
    let gloo = || Backend::Gloo(GlooDevice::Address("127.0.0.1".into()));
    // Two ranks on two threads, so that Gloo has connections and threads.
    let other = {
        let store = store.prefix("group").unwrap();
        std::thread::spawn(move || {
            let backend = Backend::Gloo(GlooDevice::Address("127.0.0.1".into()));
            ProcessGroup::new(&store, 1, 2, backend, GroupOptions::default()).unwrap()
        })
    };
    let meeting = store.prefix("group").unwrap();
    let group = ProcessGroup::new(&meeting, 0, 2, gloo(), GroupOptions::default()).unwrap();
    let other = other.join().unwrap();
    let mut tensor = Tensor::ones([4], (Kind::Float, Device::Cpu));
    let large = Tensor::ones([1 << 20], (Kind::Float, Device::Cpu));
    let code = in_a_child(|| {
        expect_refusal(group.all_reduce(&mut tensor, ReduceOp::Sum))?;
        expect_refusal(Tensor::f_ones([1 << 20], (Kind::Float, Device::Cpu)))?;
        // What the parent made can be dropped, and the group too.
        drop((large, group, other, meeting));
        Ok(())
    });
    assert_eq!(code, 0);
}
