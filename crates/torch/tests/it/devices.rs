//! Where Gloo listens: addresses, interfaces, and names that do not exist.

use std::time::Duration;

use brigade_testkit::dist_test;
use brigade_torch::{
    Backend, DeviceKind, Error, ErrorKind, Fault, GlooDevice, GroupOptions, ProcessGroup, ReduceOp,
    Store, Tpu,
};
use tch::{Device, Tensor};

use crate::rendezvous::{self, LIMIT, assert_fault, missing, values};

fn works(group: &ProcessGroup) {
    let mut one = Tensor::from(1.0);
    group.all_reduce(&mut one, ReduceOp::Sum).unwrap();
    assert_eq!(values(&one), [group.size() as f64]);
}

dist_test!(world = 2, dist_gloo_listens_where_it_is_told, |world| {
    let store = rendezvous::store(&world);
    let devices = [
        GlooDevice::Address("127.0.0.1".into()),
        GlooDevice::Interfaces(vec!["lo".into()]),
        GlooDevice::Interfaces(vec!["lo".into(), "lo".into()]),
    ];
    for (number, device) in devices.into_iter().enumerate() {
        let options = GroupOptions {
            name: format!("device {number}"),
            timeout: LIMIT,
            ..GroupOptions::default()
        };
        let backend = Backend::Gloo(device);
        let group =
            ProcessGroup::new(&store, world.rank.as_usize(), 2, backend.clone(), options).unwrap();
        for _ in 0..3 {
            works(&group);
        }
        assert_eq!((group.backend(), group.device()), (&backend, Device::Cpu));
        group.barrier().unwrap();
    }
    assert_ne!(store.timeout().unwrap(), Duration::ZERO);
    store.add("done", 1).unwrap();
    while world.is_main() && store.get("done").unwrap() != b"2" {}
});

fn alone(backend: Backend) -> Result<ProcessGroup, Error> {
    let options = GroupOptions { timeout: Duration::from_secs(5), ..GroupOptions::default() };
    ProcessGroup::new(&Store::hash().unwrap(), 0, 1, backend, options)
}

#[test]
fn an_interface_that_is_not_there_is_named() {
    let error = alone(Backend::Gloo(GlooDevice::Interfaces(vec!["no-such0".into()]))).unwrap_err();
    assert!(error.to_string().starts_with("new_group on group \"world\" failed"), "{error}");
    assert!(error.to_string().contains("no-such0"), "{error}");
    let error =
        alone(Backend::Gloo(GlooDevice::Address("no-such-host.invalid".into()))).unwrap_err();
    assert!(error.to_string().contains("no-such-host.invalid"), "{error}");
    let error = alone(Backend::Gloo(GlooDevice::Interfaces(Vec::new()))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
}

#[test]
fn a_group_of_one() {
    let store = Store::hash().unwrap();
    store.set_timeout(Duration::from_secs(7)).unwrap();
    let options = GroupOptions { timeout: LIMIT, ..GroupOptions::default() };
    let group = ProcessGroup::new(&store, 0, 1, rendezvous::gloo(), options).unwrap();
    assert_eq!(store.timeout().unwrap(), Duration::from_secs(7), "the caller's limit comes back");
    works(&group);
    assert_eq!(group.timeout(), LIMIT);
    group.set_timeout(Duration::from_secs(9)).unwrap();
    assert_eq!(group.clone().timeout(), Duration::from_secs(9));
    assert_eq!(group.within(LIMIT).timeout(), LIMIT);
    // The longest limit does not overflow.
    works(&group.within(Duration::MAX));
    assert_eq!(group.store().get("joined/0").unwrap(), b"1");
}

#[test]
fn numbers_that_cannot_be() {
    let store = Store::hash().unwrap();
    let make = |rank, size| {
        let options = GroupOptions::default();
        ProcessGroup::new(&store, rank, size, rendezvous::gloo(), options).unwrap_err()
    };
    assert!(make(2, 2).to_string().contains("rank 2 does not exist among 2 ranks"));
    assert_eq!(make(0, 0).kind(), ErrorKind::InvalidArgument);
}

#[test]
fn missing_ranks_are_named() {
    let store = Store::hash().unwrap();
    let options = GroupOptions { timeout: Duration::from_millis(300), ..GroupOptions::default() };
    let made = ProcessGroup::new(&store, 1, 3, rendezvous::gloo(), options);
    let error = assert_fault(made, Fault::Timeout);
    assert_eq!(missing(&error), [0, 2], "{error}");
}

#[test]
fn torchtpus_group_says_what_it_needs() {
    // With a TPU there is no reason to report.
    let Err(reason) = Tpu.devices() else { return };
    let error = assert_fault(alone(Backend::Tpu), Fault::Unsupported);
    assert!(error.to_string().contains(&reason.to_string()), "{error}");
    assert!(error.to_string().contains("TorchTPU's process group needs a TPU"), "{error}");
}

#[test]
fn nccl_says_what_it_needs() {
    // With a GPU there is no reason to report.
    let Err(reason) = brigade_torch::cuda_devices() else { return };
    let error = assert_fault(alone(Backend::Nccl), Fault::Unsupported);
    assert!(error.to_string().contains(&reason.to_string()), "{error}");
    assert!(error.to_string().contains("NCCL needs a GPU"), "{error}");
}
