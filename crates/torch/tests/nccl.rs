//! NCCL: on one GPU with one rank, and with two ranks where there are two GPUs.

#![allow(clippy::unwrap_used)] // also in what the tests share

use std::time::Duration;

use brigade_rank_env::{StoreHost, World};
use brigade_test_needs::needs;
use brigade_testkit::DistTest;
use brigade_torch::{
    Backend, DeviceExt, Error, Fault, Graph, GroupOptions, ProcessGroup, ReduceOp, Store,
    StreamEvent, TcpStore, TorchError, inherited_socket,
};
use tch::{Device, Kind, Tensor};

const LIMIT: Duration = Duration::from_secs(60);

fn join(store: &Store, rank: usize, size: usize, timeout: Duration) -> ProcessGroup {
    Device::Cuda(rank).make_current().unwrap();
    Device::Cuda(rank).use_own_stream().unwrap();
    let options = GroupOptions { timeout, ..GroupOptions::default() };
    ProcessGroup::new(store, rank, size, Backend::Nccl, options).unwrap()
}

fn alone() -> ProcessGroup {
    join(&Store::hash().unwrap(), 0, 1, LIMIT)
}

fn of(world: &World, timeout: Duration) -> ProcessGroup {
    let endpoint = &world.store;
    let store = match endpoint.host {
        StoreHost::Rank0Fd(fd) if world.is_main() => {
            TcpStore::server_on_socket(inherited_socket(fd).unwrap()).unwrap()
        }
        _ => TcpStore::client(endpoint.addr.clone(), endpoint.port),
    };
    let store = store.world_size(2).timeout(LIMIT).open().unwrap();
    join(&store, world.rank.as_usize(), 2, timeout)
}

/// Two ranks with a GPU each.
fn two(name: &'static str, body: impl FnOnce(World)) {
    DistTest::new(name, 2).time_limit(Duration::from_secs(120)).run_or_panic(body);
}

fn tensor(group: &ProcessGroup, values: &[f64]) -> Tensor {
    Tensor::from_slice(values).to_kind(Kind::Float).to_device(Device::Cuda(group.rank()))
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.to_device(Device::Cpu).to_kind(Kind::Double).flatten(0, -1)).unwrap()
}

/// Each collective, with values that tell the ranks apart.
fn every_collective(group: &ProcessGroup) {
    let (rank, size) = (group.rank(), group.size());
    let (mine, sum) = (rank as f64 + 1.0, (size * (size + 1)) as f64 / 2.0);
    let reduced = |op| {
        let mut tensor = tensor(group, &[mine, 2.0 * mine]);
        group.all_reduce(&mut tensor, op).unwrap();
        assert_eq!(tensor.device(), Device::Cuda(rank));
        values(&tensor)
    };
    assert_eq!(reduced(ReduceOp::Sum), [sum, 2.0 * sum]);
    assert_eq!(reduced(ReduceOp::Mean), [sum / size as f64, 2.0 * sum / size as f64]);
    assert_eq!(reduced(ReduceOp::Max), [size as f64, 2.0 * size as f64]);
    let mut sent = tensor(group, &[mine]);
    group.broadcast(&mut sent, size - 1).unwrap();
    assert_eq!(values(&sent), [size as f64]);
    let ranks: Vec<f64> = (1..=size).map(|it| it as f64).collect();
    let all = group.all_gather(&tensor(group, &[mine])).unwrap();
    assert_eq!(all.iter().flat_map(values).collect::<Vec<_>>(), ranks);
    assert_eq!(values(&group.all_gather_flat(&tensor(group, &[mine])).unwrap()), ranks);
    coalesced(group, mine, sum);
    let parts: Vec<Tensor> =
        (0..size).map(|to| tensor(group, &[mine * 10.0 + to as f64])).collect();
    let scattered = group.reduce_scatter(&parts, ReduceOp::Sum).unwrap();
    assert_eq!(values(&scattered), [10.0 * sum + (size * rank) as f64]);
    let exchanged = group.all_to_all(&parts, None).unwrap();
    let expected: Vec<f64> = ranks.iter().map(|from| from * 10.0 + rank as f64).collect();
    assert_eq!(exchanged.iter().flat_map(values).collect::<Vec<_>>(), expected);
    group.barrier().unwrap();
}

/// Several tensors of two types in one operation, and more while it is in flight.
fn coalesced(group: &ProcessGroup, mine: f64, sum: f64) {
    let size = group.size();
    let list =
        || vec![tensor(group, &[mine]), tensor(group, &[2.0 * mine; 5]).to_kind(Kind::Double)];
    let mut reduced = list();
    group.all_reduce_coalesced(&mut reduced, ReduceOp::Mean).unwrap();
    let mean = sum / size as f64;
    assert_eq!((values(&reduced[0]), values(&reduced[1])), (vec![mean], vec![2.0 * mean; 5]));
    let works: Vec<_> =
        (0..4).map(|_| group.start_all_reduce_coalesced(list(), ReduceOp::Sum).unwrap()).collect();
    let gathered = group.all_gather_flat_coalesced(&list()).unwrap();
    assert_eq!(values(&gathered[0]), (1..=size).map(|it| it as f64).collect::<Vec<_>>());
    assert_eq!(gathered[1].size(), [5 * size as i64]);
    for work in works.into_iter().rev() {
        let reduced = work.wait().unwrap();
        assert_eq!((values(&reduced[0]), values(&reduced[1])), (vec![sum], vec![2.0 * sum; 5]));
    }
    let rows = |factor: f64| tensor(group, &vec![factor * mine; 2 * size]);
    let scattered =
        group.reduce_scatter_flat_coalesced(&[rows(1.0), rows(3.0)], ReduceOp::Sum).unwrap();
    assert_eq!(values(&scattered[0]), [sum; 2]);
    assert_eq!(values(&scattered[1]), [3.0 * sum; 2]);
    group.all_reduce_coalesced(&mut [], ReduceOp::Sum).unwrap();
    // With its own limit, the host waits.
    group.within(LIMIT).all_reduce_coalesced(&mut reduced, ReduceOp::Max).unwrap();
    assert_eq!(values(&reduced[0]), [mean]);
}

#[needs(Gpu)]
fn nccl_one_rank_moves_values() {
    every_collective(&alone());
}

#[needs(Gpu)]
fn nccl_cpu_tensors_and_objects_go_by_gloo() {
    let group = alone();
    assert_eq!(group.device(), Device::Cpu, "the group's own messages need no GPU");
    let mut on_cpu = Tensor::from_slice(&[1.5f64]);
    group.all_reduce(&mut on_cpu, ReduceOp::Mean).unwrap();
    assert_eq!((on_cpu.device(), values(&on_cpu)), (Device::Cpu, vec![1.5]));
    assert_eq!(group.all_gather_object(&7u8).unwrap(), [7]);
    group.monitored_barrier().unwrap();
}

#[needs(Gpu)]
fn nccl_several_operations_are_in_flight() {
    let group = alone();
    let works: Vec<_> = (0..8)
        .map(|number| {
            group.start_all_reduce(tensor(&group, &[f64::from(number)]), ReduceOp::Sum).unwrap()
        })
        .collect();
    for (it, work) in works.into_iter().enumerate().rev() {
        assert_eq!(values(&work.wait().unwrap()), [it as f64]);
    }
    // With its own limit, the host waits for the operation, until the limit.
    let mut one = tensor(&group, &[1.0]);
    group.within(LIMIT).all_reduce(&mut one, ReduceOp::Sum).unwrap();
    assert_eq!(values(&one), [1.0]);
}

#[needs(Gpus)]
fn nccl_two_ranks_move_values() {
    two("nccl_two_ranks_move_values", |world| every_collective(&of(&world, LIMIT)));
}

#[needs(Gpus)]
fn nccl_two_ranks_split_into_groups() {
    two("nccl_two_ranks_split_into_groups", |world| {
        let group = of(&world, LIMIT);
        let swapped = group.subgroup(&[1, 0]).unwrap().unwrap();
        assert_eq!(swapped.rank(), 1 - group.rank());
        let mut mine = tensor(&group, &[group.rank() as f64]);
        swapped.broadcast(&mut mine, 0).unwrap();
        assert_eq!(values(&mine), [1.0]);
        let own = group.subgroup(&[0]).unwrap();
        assert_eq!(own.is_some(), group.rank() == 0);
        group.barrier().unwrap();
    });
}

#[needs(Gpus)]
fn nccl_a_hang_ends_at_the_time_limit() {
    two("nccl_a_hang_ends_at_the_time_limit", |world| {
        let group = of(&world, Duration::from_secs(5));
        let mut warm = tensor(&group, &[1.0]);
        group.all_reduce(&mut warm, ReduceOp::Sum).unwrap();
        if group.rank() == 1 {
            // It does not take part until the other has its error.
            group.store().wait(&["has ended"], LIMIT).unwrap();
            return;
        }
        // The first operation hangs on the GPU; the watchdog ends it, and a later operation returns the error.
        let error = loop {
            let outcome = group
                .all_reduce(&mut warm, ReduceOp::Sum)
                .and_then(|()| Device::Cuda(0).synchronize());
            if let Err(error) = outcome {
                break error;
            }
        };
        group.store().set("has ended", b"1").unwrap();
        assert!(error.to_string().contains("all_reduce"), "{error}");
        let Some(TorchError::Collective(error)) = error.downcast_ref() else { panic!("{error}") };
        assert!(matches!(error.fault, Fault::Timeout | Fault::Aborted), "{error}");
    });
}

#[needs(Gpus)]
fn nccl_a_replay_that_hangs_ends_at_the_time_limit() {
    two("nccl_a_replay_that_hangs_ends_at_the_time_limit", |world| {
        let group = of(&world, Duration::from_secs(5));
        let device = Device::Cuda(group.rank());
        let mut numbers = tensor(&group, &[1.0]);
        group.all_reduce(&mut numbers, ReduceOp::Max).unwrap();
        let step = || group.all_reduce(&mut numbers, ReduceOp::Sum);
        let (mut graph, ()) = Graph::record(device, None, step).unwrap();
        let replay = |graph: &mut Graph| {
            graph.replay()?;
            let done = StreamEvent::record(device)?.unwrap();
            group.watch("replay", move || done.is_done())
        };
        replay(&mut graph).unwrap();
        assert_eq!(values(&numbers), [2.0]);
        if group.rank() == 1 {
            group.store().wait(&["has ended"], LIMIT).unwrap();
            return;
        }
        let mut outcome = replay(&mut graph);
        while outcome.is_ok() {
            std::thread::sleep(Duration::from_millis(50));
            outcome = group.watched();
        }
        group.store().set("has ended", b"1").unwrap();
        let error = outcome.unwrap_err();
        let Some(TorchError::Collective(error)) = error.downcast_ref() else { panic!("{error}") };
        assert_eq!((error.operation, error.fault), ("replay", Fault::Timeout), "{error}");
        assert_eq!(error.missing, [1], "{error}");
        // The abort has ended its kernel.
        device.synchronize().unwrap();
    });
}

#[needs(Gpus)]
fn nccl_an_abort_ends_what_is_in_flight() {
    two("nccl_an_abort_ends_what_is_in_flight", |world| {
        let group = of(&world, LIMIT);
        let mut warm = tensor(&group, &[1.0]);
        group.all_reduce(&mut warm, ReduceOp::Sum).unwrap();
        if group.rank() == 0 {
            let work = group.start_all_reduce(tensor(&group, &[1.0]), ReduceOp::Sum).unwrap();
            group.abort().unwrap();
            drop(work);
            Device::Cuda(0).synchronize().unwrap();
            assert!(group.all_reduce(&mut warm, ReduceOp::Sum).is_err());
            group.store().set("has ended", b"1").unwrap();
        } else {
            group.store().wait(&["has ended"], LIMIT).unwrap();
        }
    });
}

brigade_test_needs::main!();
