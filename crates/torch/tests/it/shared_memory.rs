//! Collectives in the memory of the one host: what they give, and that nothing hangs where they fail.

use std::time::{Duration, Instant};

use brigade_testkit::{World, dist_test, step};
use brigade_torch::{Error, Fault, GroupOptions, ProcessGroup, ReduceOp, Store, Work};
use tch::{Device, Kind, Tensor};

use crate::rendezvous::{self, LIMIT, assert_fault, meet, missing};

fn group(store: &Store, world: &World, name: &str, share_memory: bool) -> ProcessGroup {
    let name = name.to_owned();
    let options = GroupOptions { name, timeout: LIMIT, share_memory, ..GroupOptions::default() };
    let (rank, size) = (world.rank.as_usize(), world.world_size.as_usize());
    ProcessGroup::new(store, rank, size, rendezvous::gloo(), options).unwrap()
}

fn group_over_tcp(world: &World) -> ProcessGroup {
    group(&rendezvous::store(world), world, "tcp", false)
}

dist_test!(world = 3, dist_the_ranks_of_one_host_share_memory, |world| {
    let group = rendezvous::group(&world);
    assert!(group.shares_memory());
    let pair = group.subgroup(&[2, 0]).unwrap();
    assert!(pair.is_none_or(|pair| pair.shares_memory()));
    let alone = group.subgroup(&[1]).unwrap();
    assert!(alone.is_none_or(|alone| !alone.shares_memory()), "there is no rank to share it with");
});

dist_test!(world = 3, dist_one_rank_that_does_not_share_is_enough, |world| {
    let (rank, store) = (world.rank.as_usize(), rendezvous::store(&world));
    for unwilling in 0..3 {
        let group = group(&store, &world, &format!("without {unwilling}"), rank != unwilling);
        assert!(!group.shares_memory());
        let mut tensor = Tensor::from(rank as i64);
        group.all_reduce(&mut tensor, ReduceOp::Sum).unwrap();
        assert_eq!(tensor.int64_value(&[]), 3);
        meet(&group, "done", 3);
    }
});

/// Sums of all sizes: none, one, those around a block, a piece and several pieces.
fn sums_are_those_in_the_order_of_the_ranks(world: &World, shared: bool) {
    let group = if shared { rendezvous::group(world) } else { group_over_tcp(world) };
    assert_eq!(group.shares_memory(), shared);
    tch::manual_seed(world.rank.as_usize() as i64);
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half] {
        for count in [0, 1, 2, 1023, 1025, 65_535, 262_144, 262_145, 1_000_003] {
            step!("{count} numbers of {kind:?}");
            let mut tensor = Tensor::randn([count], (Kind::Float, Device::Cpu)).to_kind(kind);
            let all = group.all_gather(&tensor).unwrap();
            group.all_reduce(&mut tensor, ReduceOp::Sum).unwrap();
            // 16 bits are added in 32, and rounded once.
            let wide = if kind == Kind::Double { Kind::Double } else { Kind::Float };
            let sum = all.iter().map(|t| t.to_kind(wide)).reduce(|a, b| a + b).unwrap();
            assert!(tensor.equal(&sum.to_kind(kind)), "{count} numbers of {kind:?}");
        }
    }
}

dist_test!(world = 2, dist_two_ranks_add_in_shared_memory, |world| {
    sums_are_those_in_the_order_of_the_ranks(&world, true);
});

dist_test!(world = 5, dist_five_ranks_add_in_shared_memory, |world| {
    sums_are_those_in_the_order_of_the_ranks(&world, true);
});

dist_test!(world = 3, dist_three_ranks_add_over_tcp, |world| {
    sums_are_those_in_the_order_of_the_ranks(&world, false);
});

dist_test!(world = 5, dist_five_ranks_add_over_tcp, |world| {
    sums_are_those_in_the_order_of_the_ranks(&world, false);
});

dist_test!(world = 2, dist_two_ranks_get_the_bits_of_gloo, |world| {
    let store = rendezvous::store(&world);
    let [shared, tcp] = [true, false].map(|share| group(&store, &world, &share.to_string(), share));
    assert!(shared.shares_memory() && !tcp.shares_memory());
    tch::manual_seed(world.rank.as_usize() as i64);
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half, Kind::Int, Kind::Int64] {
        for op in [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max] {
            let mut one = (Tensor::randn([70_001], (Kind::Float, Device::Cpu)) * 9.0).to_kind(kind);
            let mut other = one.copy();
            shared.all_reduce(&mut one, op).unwrap();
            tcp.all_reduce(&mut other, op).unwrap();
            assert!(one.equal(&other), "{op:?} of {kind:?}");
        }
    }
});

fn many_in_flight(group: &ProcessGroup) {
    let rank = group.rank() as f64;
    for round in 0..20 {
        let works: Vec<_> = (0..12i64)
            .map(|number| {
                let count = [1, 300_000, 17][(number % 3) as usize];
                let value = rank + number as f64;
                let tensor = Tensor::full([count], value, (Kind::Double, Device::Cpu));
                group.start_all_reduce(tensor, ReduceOp::Sum).unwrap()
            })
            .collect();
        // One of Gloo's own between them, and others of ours.
        let mut root = Tensor::from(rank);
        group.broadcast(&mut root, 3).unwrap();
        assert_eq!(root.double_value(&[]), 3.0);
        let gathered = group.start_all_gather_flat(&Tensor::from(rank)).unwrap();
        let rows = Tensor::full([400_000], rank, (Kind::Double, Device::Cpu));
        let scattered = group.start_reduce_scatter_flat(&rows, ReduceOp::Sum).unwrap();
        assert_eq!(rendezvous::values(&gathered.wait().unwrap()), [0.0, 1.0, 2.0, 3.0]);
        let sum = scattered.wait().unwrap();
        assert_eq!((sum.size(), sum.min().double_value(&[])), (vec![100_000], 6.0));
        for (number, work) in works.into_iter().enumerate().rev() {
            let sum = work.wait().unwrap();
            let expected = 6.0 + 4.0 * number as f64;
            assert!(sum.eq(expected).all().int64_value(&[]) != 0, "round {round}, {number}");
        }
    }
}

dist_test!(world = 4, dist_many_all_reduces_in_flight, |world| {
    many_in_flight(&rendezvous::group(&world));
});

fn different_sizes_are_an_error(group: &ProcessGroup) {
    for part in 0..2 {
        let group = group.subgroup(&[0, 1, 2]).unwrap().unwrap();
        let (kind, count) = match (part, group.rank()) {
            (0, 1) => (Kind::Float, 4),
            (1, 2) => (Kind::Double, 3),
            _ => (Kind::Float, 3),
        };
        let mut tensor = Tensor::zeros([count], (kind, Device::Cpu));
        let error = group.all_reduce(&mut tensor, ReduceOp::Sum).unwrap_err();
        // The first rank that detects it closes the connections of the others.
        assert!(matches!(error.fault(), Some(Fault::Invalid | Fault::PeerLost)), "{error}");
        if error.fault() == Some(Fault::Invalid) {
            let text = error.to_string();
            let odd = ["4 numbers of type Float", "3 numbers of type Double"][part];
            assert!(text.contains("of the same on all ranks") && text.contains(odd), "{text}");
        }
        meet(&group, "done", 3);
    }
}

dist_test!(world = 3, dist_different_sizes_are_an_error_in_shared_memory, |world| {
    different_sizes_are_an_error(&rendezvous::group(&world));
});

dist_test!(world = 3, dist_different_sizes_are_an_error_over_tcp, |world| {
    different_sizes_are_an_error(&group_over_tcp(&world));
});

dist_test!(world = 4, dist_many_all_reduces_in_flight_over_tcp, |world| {
    many_in_flight(&group_over_tcp(&world));
});

/// Asks for a collective: for another one where the rank is the odd one.
type Ask = fn(&ProcessGroup, bool) -> Result<(), Error>;

fn rows(count: i64, kind: Kind) -> Tensor {
    Tensor::zeros([count], (kind, Device::Cpu))
}

fn gather(group: &ProcessGroup, lengths: &[(i64, Kind)]) -> Result<(), Error> {
    let tensors: Vec<Tensor> = lengths.iter().map(|&(count, kind)| rows(count, kind)).collect();
    group.all_gather_flat_coalesced(&tensors).map(drop)
}

fn scatter(group: &ProcessGroup, count: i64, op: ReduceOp) -> Result<(), Error> {
    group.reduce_scatter_flat(&rows(count, Kind::Float), op).map(drop)
}

/// Each with words of the error.
const MISMATCHES: [(Ask, &[&str]); 5] = [
    (
        |group, odd| {
            if odd {
                return gather(group, &[(3, Kind::Float)]);
            }
            group.all_reduce(&mut rows(3, Kind::Float), ReduceOp::Sum)
        },
        &[
            "an all-gather of 9 numbers of type Float",
            "an all-reduce of 3 numbers of type Float, sum",
        ],
    ),
    (
        |group, odd| {
            if odd { gather(group, &[(3, Kind::Float)]) } else { scatter(group, 9, ReduceOp::Sum) }
        },
        &["an all-gather of 9 numbers", "a reduce-scatter of 9 numbers of type Float, sum"],
    ),
    (
        |group, odd| scatter(group, 600_000, if odd { ReduceOp::Max } else { ReduceOp::Sum }),
        &["a reduce-scatter of 600000 numbers of type Float, largest", "Float, sum"],
    ),
    (
        |group, odd| gather(group, &[(500_000, if odd { Kind::Int } else { Kind::Float })]),
        &["an all-gather of 1500000 numbers of type Int", "of type Float"],
    ),
    (
        |group, odd| {
            let (first, second) = if odd { (4, 2) } else { (2, 4) };
            gather(group, &[(first, Kind::Float), (second, Kind::Float)])
        },
        &["an all-gather of 2 tensors with 18 numbers", "with tensors of other types or lengths"],
    ),
];

fn different_collectives_are_an_error(group: &ProcessGroup) {
    for (number, (ask, words)) in MISMATCHES.into_iter().enumerate() {
        step!("mismatch {number}");
        let group = group.subgroup(&[0, 1, 2]).unwrap().unwrap();
        let error = ask(&group, group.rank() == 1).unwrap_err();
        // The first rank that detects it closes the connections of the others.
        assert!(matches!(error.fault(), Some(Fault::Invalid | Fault::PeerLost)), "{error}");
        let text = error.to_string();
        if error.fault() == Some(Fault::Invalid) {
            let words = words.iter().chain(&["of the same on all ranks"]);
            assert!(words.clone().all(|it| text.contains(it)), "{number}: {text}");
        }
        meet(&group, "done", 3);
    }
}

dist_test!(world = 3, dist_different_collectives_are_an_error_in_shared_memory, |world| {
    different_collectives_are_an_error(&rendezvous::group(&world));
});

dist_test!(world = 3, dist_different_collectives_are_an_error_over_tcp, |world| {
    different_collectives_are_an_error(&group_over_tcp(&world));
});

/// Starts a collective of as many numbers on each rank.
type Start = fn(&ProcessGroup, i64) -> Result<Work<Tensor>, Error>;

const STARTS: [(&str, Start); 3] = [
    ("an all-reduce", |group, count| {
        group.start_all_reduce(rows(count, Kind::Float), ReduceOp::Sum)
    }),
    ("an all-gather", |group, count| group.start_all_gather_flat(&rows(count / 2, Kind::Float))),
    ("a reduce-scatter", |group, count| {
        group.start_reduce_scatter_flat(&rows(count, Kind::Float), ReduceOp::Sum)
    }),
];

/// More than goes through before a peer dies.
const LONG: i64 = 64 << 20;
/// Several slots.
const SHORT: i64 = 4 << 20;

fn a_peer_is_killed_inside(world: &World, (name, start): (&str, Start)) {
    if world.rank.as_usize() == 1 {
        rendezvous::by_a_child_that_dies(|| {
            let group = rendezvous::group(world);
            assert!(group.shares_memory());
            let _work = start(&group, LONG).unwrap();
            meet(&group, "started", 2);
            rendezvous::die();
        });
        return;
    }
    let group = rendezvous::group(world);
    let begun = Instant::now();
    let work = start(&group, LONG).unwrap();
    meet(&group, "started", 2);
    let error = match work.wait() {
        Err(error) => Err::<(), _>(error),
        // It was completed before; then the next one fails.
        Ok(_) => start(&group, 1).and_then(Work::wait).map(drop),
    };
    let error = assert_fault(error, Fault::PeerLost);
    assert!(error.to_string().contains("rank 1 has left the group"), "{name}: {error}");
    assert!(begun.elapsed() < LIMIT);
}

dist_test!(world = 2, dist_a_peer_killed_inside_an_all_reduce, |world| {
    a_peer_is_killed_inside(&world, STARTS[0]);
});

dist_test!(world = 2, dist_a_peer_killed_inside_an_all_gather, |world| {
    a_peer_is_killed_inside(&world, STARTS[1]);
});

dist_test!(world = 2, dist_a_peer_killed_inside_a_reduce_scatter, |world| {
    a_peer_is_killed_inside(&world, STARTS[2]);
});

dist_test!(world = 2, dist_a_late_rank_is_waited_for, |world| {
    let group = rendezvous::group(&world);
    for (name, start) in STARTS {
        step!("{name}");
        let early = (group.rank() == 0).then(|| start(&group, SHORT));
        meet(&group, &format!("rank 0 has started {name}"), 2);
        let sum = early.unwrap_or_else(|| start(&group, SHORT)).unwrap().wait().unwrap();
        assert_eq!(sum.max().double_value(&[]), 0.0);
    }
});

dist_test!(world = 2, dist_who_does_not_come_is_named_with_the_operation, |world| {
    let all = rendezvous::group(&world);
    for (name, start) in STARTS {
        step!("{name}");
        let group = all.subgroup(&[0, 1]).unwrap().unwrap();
        if group.rank() == 0 {
            let hasty = group.within(Duration::from_millis(300));
            let error = assert_fault(start(&hasty, 2).unwrap().wait(), Fault::Timeout);
            let text = format!("Timed out waiting 300ms for rank 1 in {name}");
            assert!(error.to_string().contains(&text), "{error}");
            assert_eq!(missing(&error), [1], "{error}");
        }
        meet(&group, "given up", 2);
    }
});

dist_test!(world = 2, dist_an_abort_ends_what_has_begun, |world| {
    let all = rendezvous::group(&world);
    for (name, start) in STARTS {
        step!("{name}");
        let group = all.subgroup(&[0, 1]).unwrap().unwrap();
        let works: Vec<_> = (0..16).map(|_| start(&group, SHORT).unwrap()).collect();
        meet(&group, "started", 2);
        if group.rank() == 0 {
            group.abort().unwrap();
        }
        // Ranks that had finished have no error.
        let fault = if group.rank() == 0 { Fault::Aborted } else { Fault::PeerLost };
        for error in works.into_iter().filter_map(|work| work.wait().err()) {
            assert_eq!(error.fault(), Some(fault), "{error}");
        }
        assert_fault(start(&group, SHORT).and_then(Work::wait), fault);
        meet(&group, "ended", 2);
    }
});

/// What `failure.rs` says of the shared memory, over TCP. Of three ranks: two leave it to Gloo.
mod over_tcp {
    use super::*;

    const SHORT: Duration = Duration::from_millis(400);

    fn reduce(group: &ProcessGroup) -> Result<(), Error> {
        reduce_elements(group, 1)
    }

    fn reduce_elements(group: &ProcessGroup, count: i64) -> Result<(), Error> {
        let mut tensor = Tensor::ones([count], (Kind::Float, Device::Cpu));
        group.all_reduce(&mut tensor, ReduceOp::Sum)
    }

    /// More than 16 kB: each rank adds up a part.
    const IN_PARTS: i64 = 1 << 16;

    dist_test!(world = 3, dist_a_limit_of_one_call, |world| {
        let group = group_over_tcp(&world);
        assert!(!group.shares_memory());
        if group.rank() == 0 {
            let error = assert_fault(reduce(&group.within(SHORT)), Fault::Timeout);
            assert_eq!(missing(&error), [1, 2], "{error}");
        }
        meet(&group, "done", 3);
    });

    dist_test!(world = 3, dist_a_limit_of_one_call_in_parts, |world| {
        let group = group_over_tcp(&world);
        if group.rank() == 0 {
            let outcome = reduce_elements(&group.within(SHORT), IN_PARTS);
            let error = assert_fault(outcome, Fault::Timeout);
            assert_eq!(missing(&error), [1, 2], "{error}");
        }
        meet(&group, "done", 3);
    });

    dist_test!(world = 3, dist_a_killed_peer_is_noticed_at_once, |world| {
        without_a_killed_peer(&world, 1);
    });

    dist_test!(world = 3, dist_a_killed_peer_is_noticed_at_once_in_parts, |world| {
        without_a_killed_peer(&world, IN_PARTS);
    });

    fn without_a_killed_peer(world: &World, count: i64) {
        if world.rank.as_usize() == 1 {
            rendezvous::by_a_child_that_dies(|| {
                let group = group_over_tcp(world);
                reduce_elements(&group, count).unwrap();
                meet(&group, "before", 3);
                rendezvous::die();
            });
            return;
        }
        let group = group_over_tcp(world);
        reduce_elements(&group, count).unwrap();
        meet(&group, "before", 3);
        let error = assert_fault(reduce_elements(&group, count), Fault::PeerLost);
        assert_eq!(missing(&error), [1], "{error}");
    }

    dist_test!(world = 3, dist_abort_ends_waiting_operations, |world| {
        let group = group_over_tcp(&world);
        let others = group.subgroup(&[0, 1, 2]).unwrap().unwrap();
        assert!(!others.shares_memory());
        // An abort closes connections; the others would still be waiting for them.
        group.barrier().unwrap();
        if group.rank() == 0 {
            let work = others.start_all_reduce(Tensor::from(1.0), ReduceOp::Sum).unwrap();
            others.abort().unwrap();
            assert_fault(work.wait(), Fault::Aborted);
        }
        group.barrier().unwrap();
    });
}
