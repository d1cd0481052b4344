//! Checks of every collective, with values by which a wrong rank, order or operation is detected.

use anyhow::{Context, Result, ensure};
use brigade::prelude::*;
use brigade_rank_env::text::counted;

use super::Verdict;

const ALONE: &str = "one process has no group";

/// Returns the group, or skips the check in a single process.
macro_rules! group_of {
    ($accelerator:expr) => {
        match $accelerator.processes().group() {
            Some(group) => group,
            None => return Ok(Verdict::Skipped(ALONE)),
        }
    };
}

/// Creates a tensor on the rank's device: NCCL is used on a GPU.
fn tensor(accelerator: &Accelerator, values: &[i64]) -> Result<Tensor> {
    Ok(Tensor::f_from_slice(values)?.f_to_device(accelerator.device())?)
}

fn expect(what: &str, found: &Tensor, expected: &[i64]) -> Result<()> {
    let flat = found.f_to_device(Device::Cpu)?.f_to_kind(Kind::Int64)?.f_reshape([-1])?;
    let found = Vec::<i64>::try_from(&flat)?;
    ensure!(found == expected, "{what}: expected {expected:?}, found {found:?}");
    Ok(())
}

pub(super) fn places(accelerator: &Accelerator) -> Result<Verdict> {
    let world = accelerator.processes().world();
    let place = (world.rank.as_usize(), world.node_rank, world.local_rank.as_usize());
    let all = accelerator.processes().gather_object(place)?;
    ensure!(
        all.len() == accelerator.processes().num_processes(),
        "{} answered",
        counted(all.len(), "rank")
    );
    for (rank, place) in all.iter().enumerate() {
        ensure!(place.0 == rank, "rank {} answered in the place of rank {rank}", place.0);
        let twin = all.iter().filter(|other| (other.1, other.2) == (place.1, place.2)).count();
        ensure!(
            twin == 1,
            "{twin} ranks say that they are local rank {} of host {}",
            place.2,
            place.1
        );
    }
    Ok(Verdict::Passed)
}

pub(super) fn all_reduce(accelerator: &Accelerator) -> Result<Verdict> {
    let group = group_of!(accelerator);
    let (rank, size) = (group.rank() as i64, group.size() as i64);
    let values = |f: &dyn Fn(i64) -> i64| -> Vec<i64> { (0..size).map(f).collect() };
    let bits = values(&|rank| 1 << (rank % 40));
    let table: [(&str, ReduceOp, i64, i64); 7] = [
        ("sum", ReduceOp::Sum, rank + 1, (1..=size).sum()),
        ("product", ReduceOp::Product, 1 + rank % 2, 1 << (size / 2).min(40)),
        ("min", ReduceOp::Min, 5 - rank, 6 - size),
        ("max", ReduceOp::Max, 5 + rank, 4 + size),
        (
            "bitwise and",
            ReduceOp::BitAnd,
            !bits[rank as usize],
            bits.iter().fold(-1, |a, b| a & !b),
        ),
        ("bitwise or", ReduceOp::BitOr, bits[rank as usize], bits.iter().fold(0, |a, b| a | b)),
        ("bitwise xor", ReduceOp::BitXor, bits[rank as usize], bits.iter().fold(0, |a, b| a ^ b)),
    ];
    for (name, op, mine, expected) in table {
        if size > 80 && name == "product" {
            continue; // past 2^40 the arithmetic above would say little
        }
        let mut value = tensor(accelerator, &[mine])?;
        group.all_reduce(&mut value, op).context(name)?;
        expect(name, &value, &[expected])?;
    }
    let mut mean = tensor(accelerator, &[2 * rank])?.f_to_kind(Kind::Double)?;
    group.all_reduce(&mut mean, ReduceOp::Mean).context("mean")?;
    expect("mean", &mean, &[size - 1])?;
    Ok(Verdict::Passed)
}

pub(super) fn broadcast_and_reduce(accelerator: &Accelerator) -> Result<Verdict> {
    let group = group_of!(accelerator);
    let (rank, size) = (group.rank(), group.size());
    for root in [0, size - 1] {
        let mut value = tensor(accelerator, &[7 + rank as i64, -1])?;
        group.broadcast(&mut value, root)?;
        expect("broadcast", &value, &[7 + root as i64, -1])?;

        let mut value = tensor(accelerator, &[rank as i64])?;
        group.reduce(&mut value, ReduceOp::Sum, root)?;
        if rank == root {
            expect("reduce", &value, &[(0..size as i64).sum()])?;
        }
    }
    Ok(Verdict::Passed)
}

pub(super) fn gather_and_scatter(accelerator: &Accelerator) -> Result<Verdict> {
    let group = group_of!(accelerator);
    let (rank, size) = (group.rank() as i64, group.size() as i64);
    let expected: Vec<i64> = (0..size).flat_map(|rank| [rank, 10 * rank]).collect();
    let mine = tensor(accelerator, &[rank, 10 * rank])?;
    let list = group.all_gather(&mine)?;
    expect("all_gather", &Tensor::f_cat(&list, 0)?, &expected)?;
    expect("all_gather, flat", &group.all_gather_flat(&mine)?, &expected)?;
    let root = group.size() - 1;
    if let Some(list) = group.gather(&mine, root)? {
        expect("gather", &Tensor::f_cat(&list, 0)?, &expected)?;
    }
    let parts = (group.rank() == root)
        .then(|| (0..size).map(|to| tensor(accelerator, &[to, -to])).collect::<Result<Vec<_>>>())
        .transpose()?;
    let mut part = tensor(accelerator, &[0, 0])?;
    group.scatter(&mut part, parts.as_deref(), root)?;
    expect("scatter", &part, &[rank, -rank])?;
    Ok(Verdict::Passed)
}

pub(super) fn reduce_scatter(accelerator: &Accelerator) -> Result<Verdict> {
    let group = group_of!(accelerator);
    let (rank, size) = (group.rank() as i64, group.size() as i64);
    let expected = [size * rank * 100 + (0..size).sum::<i64>()];
    let values: Vec<i64> = (0..size).map(|to| 100 * to + rank).collect();
    let parts =
        values.iter().map(|value| tensor(accelerator, &[*value])).collect::<Result<Vec<_>>>()?;
    expect("reduce_scatter", &group.reduce_scatter(&parts, ReduceOp::Sum)?, &expected)?;
    let flat = group.reduce_scatter_flat(&tensor(accelerator, &values)?, ReduceOp::Sum)?;
    expect("reduce_scatter, flat", &flat, &expected)?;
    Ok(Verdict::Passed)
}

pub(super) fn all_to_all(accelerator: &Accelerator) -> Result<Verdict> {
    let group = group_of!(accelerator);
    let (rank, size) = (group.rank() as i64, group.size() as i64);
    let parts =
        (0..size).map(|to| tensor(accelerator, &[100 * rank + to])).collect::<Result<Vec<_>>>()?;
    let expected: Vec<i64> = (0..size).map(|from| 100 * from + rank).collect();
    let even = group.all_to_all(&parts, None)?;
    expect("all_to_all", &Tensor::f_cat(&even, 0)?, &expected)?;

    // Rank r sends i + 1 rows to rank i.
    let send: Vec<i64> = (1..=size).collect();
    let receive = vec![rank + 1; group.size()];
    let rows: Vec<i64> = (0..size).flat_map(|to| vec![100 * rank + to; to as usize + 1]).collect();
    let uneven = group.all_to_all_flat(&tensor(accelerator, &rows)?, &send, &receive)?;
    let expected: Vec<i64> =
        (0..size).flat_map(|from| vec![100 * from + rank; rank as usize + 1]).collect();
    expect("all_to_all, uneven", &uneven, &expected)?;
    Ok(Verdict::Passed)
}

/// Sends around the ring: each rank sends to the next and receives from the previous one.
pub(super) fn send_and_recv(accelerator: &Accelerator) -> Result<Verdict> {
    let group = group_of!(accelerator);
    let (rank, size) = (group.rank(), group.size());
    let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
    let sent = group.start_send(&tensor(accelerator, &[rank as i64, 42])?, next, 1)?;
    let mut received = tensor(accelerator, &[0, 0])?;
    group.recv(&mut received, before, 1)?;
    drop(sent.wait()?);
    expect("recv", &received, &[before as i64, 42])?;
    Ok(Verdict::Passed)
}

pub(super) fn barriers(accelerator: &Accelerator) -> Result<Verdict> {
    let group = group_of!(accelerator);
    group.barrier()?;
    group.monitored_barrier()?;
    Ok(Verdict::Passed)
}

pub(super) fn objects(accelerator: &Accelerator) -> Result<Verdict> {
    let group = group_of!(accelerator);
    let (rank, size) = (group.rank(), group.size());
    let object = |rank: usize| (format!("rank {rank}"), vec![rank; rank]);
    let root = size - 1;
    let mine = object(rank);
    let heard = group.broadcast_object((rank == root).then_some(&mine), root)?;
    ensure!(heard == object(root), "broadcast_object: found {heard:?}");
    let expected: Vec<_> = (0..size).map(object).collect();
    let all = group.all_gather_object(&mine)?;
    ensure!(all == expected, "all_gather_object: found {all:?}");
    if let Some(all) = group.gather_object(&mine, 0)? {
        ensure!(all == expected, "gather_object: found {all:?}");
    }
    Ok(Verdict::Passed)
}

pub(super) fn subgroup(accelerator: &Accelerator) -> Result<Verdict> {
    let group = group_of!(accelerator);
    let members: Vec<usize> = (0..group.size()).step_by(2).collect();
    if let Some(half) = group.subgroup(&members)? {
        let mut value = tensor(accelerator, &[group.rank() as i64])?;
        half.all_reduce(&mut value, ReduceOp::Sum)?;
        expect("the sum over even ranks", &value, &[members.iter().sum::<usize>() as i64])?;
    }
    Ok(Verdict::Passed)
}

/// Sends many packets: a wrong MTU or a firewall that limits connections is noticed here first.
pub(super) fn large(accelerator: &Accelerator) -> Result<Verdict> {
    let group = group_of!(accelerator);
    let mut values = Tensor::f_ones([8 << 20], (Kind::Float, accelerator.device()))?;
    group.all_reduce(&mut values, ReduceOp::Sum)?;
    let (low, high) = (values.f_min()?.f_double_value(&[])?, values.f_max()?.f_double_value(&[])?);
    let size = group.size() as f64;
    ensure!(low == size && high == size, "expected {size} everywhere, found {low} to {high}");
    Ok(Verdict::Passed)
}
