//! Time limits, lost peers and aborts: errors that name operation, place and ranks, and no hang.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use brigade_testkit::{dist_test, step};
use brigade_torch::{
    Backend, CrossEntropyOptions, Error, ErrorKind, Fault, GlooDevice, GroupOptions, ProcessGroup,
    ReduceOp, Store, VocabularyPart, linear_vocabulary_parallel_cross_entropy, region_argmax,
    vocabulary_parallel_cross_entropy, vocabulary_parallel_embedding,
};
use tch::{Device, Kind, Tensor};

use crate::rendezvous::{self, LIMIT, assert_fault, meet, missing};

const SHORT: Duration = Duration::from_millis(400);

fn reduce(group: &ProcessGroup) -> Result<(), Error> {
    group.all_reduce(&mut Tensor::from(1.0), ReduceOp::Sum)
}

dist_test!(world = 3, dist_a_rank_that_does_not_come_is_named, |world| {
    let group = rendezvous::group(&world);
    reduce(&group).unwrap();
    group.set_timeout(SHORT).unwrap();
    if group.rank() == 1 {
        // Busy elsewhere until both have timed out.
        meet(&group, "given up", 3);
        return;
    }
    let error = reduce(&group).unwrap_err();
    // The first rank to time out closes the connections of the other.
    assert!(matches!(error.fault(), Some(Fault::Timeout | Fault::PeerLost)), "{error}");
    assert_eq!(missing(&error), [1], "{error}");
    let text = error.to_string();
    let rank = group.rank();
    assert!(
        text.starts_with(&format!("all_reduce on group \"world\" failed on rank {rank} of 3 ("))
    );
    assert!(text.contains("; rank 1 had not arrived: "), "{text}");

    // From here on every operation fails at once, and reports no missing rank.
    let later = group.within(LIMIT).barrier().unwrap_err();
    assert_eq!(missing(&later), [0usize; 0], "{later}");
    meet(&group, "given up", 3);
});

dist_test!(world = 2, dist_a_limit_of_one_call, |world| {
    let group = rendezvous::group(&world);
    let hasty = group.within(SHORT);
    assert_eq!(hasty.timeout(), SHORT);
    if group.rank() == 0 {
        let begun = Instant::now();
        let error = assert_fault(hasty.barrier(), Fault::Timeout);
        assert!(begun.elapsed() >= SHORT);
        assert_eq!(missing(&error), [1], "{error}");
    }
    meet(&group, "done", 2);
});

/// Every operation ends in time when the peer does not take part.
fn gives_up(
    group: &ProcessGroup,
    name: &str,
    operation: impl FnOnce(&ProcessGroup) -> Result<(), Error>,
) {
    if group.rank() == 0 {
        let error = operation(group).unwrap_err();
        assert_eq!(error.fault(), Some(Fault::Timeout), "{error}");
        assert!(error.to_string().starts_with(&format!("{name} on group \"{}\"", group.name())));
    }
    meet(group, "done", 2);
}

dist_test!(world = 2, seconds = 120, dist_each_operation_has_a_limit, |world| {
    let all = rendezvous::group(&world);
    let tensor = || Tensor::from_slice(&[1.0, 2.0]);
    type Operation = fn(&ProcessGroup, Tensor) -> Result<(), Error>;
    let operations: [(&str, Operation); 11] = [
        ("broadcast", |g, mut t| g.broadcast(&mut t, 1)),
        ("reduce", |g, mut t| g.reduce(&mut t, ReduceOp::Sum, 0)),
        ("all_gather", |g, t| g.all_gather(&t).map(drop)),
        ("all_gather_flat", |g, t| g.all_gather_flat(&t).map(drop)),
        ("gather", |g, t| g.gather(&t, 0).map(drop)),
        ("scatter", |g, mut t| g.scatter(&mut t, None, 1)),
        ("reduce_scatter_flat", |g, t| g.reduce_scatter_flat(&t, ReduceOp::Sum).map(drop)),
        ("all_to_all_flat", |g, t| g.all_to_all_flat(&t, &[], &[]).map(drop)),
        ("recv", |g, mut t| g.recv(&mut t, 1, 0)),
        ("recv_any", |g, mut t| g.recv_any(&mut t, 0).map(drop)),
        ("barrier", |g, _| g.barrier()),
    ];
    for (name, operation) in operations {
        step!("{name}");
        // A group of its own for each: a failure ends a group.
        let group = all.subgroup(&[0, 1]).unwrap().unwrap();
        gives_up(&group, name, |group| operation(&group.within(SHORT), tensor()));
        if !["recv", "barrier"].contains(&name) {
            continue;
        }
        step!("{name} by the group's limit");
        let group = all.subgroup(&[0, 1]).unwrap().unwrap();
        group.set_timeout(SHORT).unwrap();
        gives_up(&group, name, |group| operation(group, tensor()));
    }
});

dist_test!(world = 4, dist_the_monitored_barrier_names_missing_ranks, |world| {
    let group = rendezvous::group(&world);
    group.monitored_barrier().unwrap();
    let part = group.subgroup(&[0, 1, 2, 3]).unwrap().unwrap();
    match group.rank() {
        0 => {
            let error = assert_fault(part.within(SHORT).monitored_barrier(), Fault::Timeout);
            assert_eq!(missing(&error), [1, 3], "{error}");
            assert!(error.to_string().contains("ranks 1, 3 had not arrived"), "{error}");
        }
        2 => {
            part.within(SHORT * 4).monitored_barrier().unwrap_err();
        }
        _ => {}
    }
    meet(&group, "done", 4);
});

dist_test!(world = 3, dist_a_killed_peer_is_noticed_at_once, |world| {
    if world.rank.as_usize() == 1 {
        rendezvous::by_a_child_that_dies(|| {
            let group = rendezvous::group(&world);
            reduce(&group).unwrap();
            meet(&group, "before", 3);
            rendezvous::die();
        });
        return;
    }
    let group = rendezvous::group(&world);
    reduce(&group).unwrap();
    meet(&group, "before", 3);
    let begun = Instant::now();
    let error = assert_fault(reduce(&group), Fault::PeerLost);
    assert_eq!(missing(&error), [1], "{error}");
    drop(group);
    assert!(begun.elapsed() < LIMIT, "long before the limit");
});

dist_test!(world = 3, dist_a_peer_that_has_a_part_of_the_vocabulary_is_killed, |world| {
    let part = VocabularyPart::even(9, world.rank.as_usize(), 3).unwrap();
    let rows = Tensor::ones([part.size, part.size], (Kind::Float, Device::Cpu));
    let ids = Tensor::from_slice(&[0_i64, 5, 8]);
    let options = CrossEntropyOptions::default();
    let loss = |group: &ProcessGroup| {
        let found = linear_vocabulary_parallel_cross_entropy(
            group, &rows, &rows, None, &ids, part, &options,
        );
        found.map(drop)
    };
    if world.rank.as_usize() == 1 {
        rendezvous::by_a_child_that_dies(|| {
            let group = rendezvous::group(&world);
            loss(&group).unwrap();
            meet(&group, "before", 3);
            rendezvous::die();
        });
        return;
    }
    let group = rendezvous::group(&world);
    loss(&group).unwrap();
    meet(&group, "before", 3);
    let begun = Instant::now();
    let error = assert_fault(loss(&group), Fault::PeerLost);
    assert_eq!((error.kind(), missing(&error)), (ErrorKind::Communication, vec![1]), "{error}");
    let text = error.to_string();
    assert!(text.starts_with("linear_vocabulary_parallel_cross_entropy on group"), "{text}");
    let later = [
        vocabulary_parallel_cross_entropy(&group, &rows, &ids, part, &options).map(drop),
        vocabulary_parallel_embedding(&group, &ids, &rows, part, None).map(drop),
        region_argmax(&group, &rows, part).map(drop),
    ];
    for outcome in later {
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Communication);
    }
    drop(group);
    assert!(begun.elapsed() < LIMIT, "long before the limit");
});

dist_test!(world = 2, dist_a_peer_killed_inside_a_collective, |world| {
    // Too much data to have been received when the peer dies.
    let large = || Tensor::zeros([64 << 20], (Kind::Uint8, Device::Cpu));
    if world.rank.as_usize() == 1 {
        rendezvous::by_a_child_that_dies(|| {
            let group = rendezvous::group(&world);
            let _work = group.start_send(&large(), 0, 0).unwrap();
            meet(&group, "started", 2);
            rendezvous::die();
        });
        return;
    }
    let group = rendezvous::group(&world);
    meet(&group, "started", 2);
    let begun = Instant::now();
    let error = match group.recv(&mut large(), 1, 0) {
        Err(error) => Err::<(), _>(error),
        // It was completed before; then the next operation fails.
        Ok(()) => group.barrier(),
    };
    assert_fault(error, Fault::PeerLost);
    drop(group);
    assert!(begun.elapsed() < LIMIT);
});

dist_test!(world = 2, dist_work_of_a_device_has_a_limit, |world| {
    let group = rendezvous::group(&world);
    let others = group.subgroup(&[0, 1]).unwrap().unwrap();
    // Both have connected before one leaves.
    group.barrier().unwrap();
    if group.rank() == 0 {
        let asked = Arc::new(AtomicUsize::new(0));
        let hasty = others.within(SHORT);
        for until in [1, 2, usize::MAX] {
            let asked = Arc::clone(&asked);
            let mut times = 0;
            let is_done = move || {
                asked.fetch_add(1, Ordering::Relaxed);
                times += 1;
                Ok(times == until)
            };
            hasty.watch("replay", is_done).unwrap();
        }
        let error = loop {
            match others.watched() {
                Ok(()) => thread::sleep(Duration::from_millis(10)),
                Err(error) => break error,
            }
        };
        assert_eq!((error.fault(), missing(&error)), (Some(Fault::Timeout), vec![1]), "{error}");
        assert!(error.to_string().starts_with("replay on group"), "{error}");
        assert!(asked.load(Ordering::Relaxed) > 3, "one, two and some questions");
        while Arc::strong_count(&asked) > 1 {
            thread::sleep(Duration::from_millis(10));
        }
        assert_fault(others.watched(), Fault::Aborted);
        assert_fault(others.watch("replay", || Ok(true)), Fault::Aborted);
        assert_fault(others.barrier(), Fault::Aborted);
        meet(&group, "given up", 2);
    } else {
        meet(&group, "given up", 2);
        assert_fault(others.barrier(), Fault::PeerLost);
    }
    group.barrier().unwrap();
});

#[test]
fn work_of_a_device_is_watched_until_its_group_ends() {
    let group = || {
        let gloo = Backend::Gloo(GlooDevice::default());
        ProcessGroup::new(&Store::hash().unwrap(), 0, 1, gloo, GroupOptions::default()).unwrap()
    };
    let failed = group();
    failed.watch("replay", || Err(Error::invalid_argument("the device is gone"))).unwrap();
    let error = loop {
        match failed.watched() {
            Ok(()) => thread::sleep(Duration::from_millis(10)),
            Err(error) => break error,
        }
    };
    assert!(error.to_string().contains("the device is gone"), "{error}");
    failed.barrier().unwrap();

    let (ends, token) = (group(), Arc::new(()));
    for _ in 0..2 {
        let token = Arc::clone(&token);
        ends.watch("replay", move || Ok(Arc::strong_count(&token) == 0)).unwrap();
    }
    assert_eq!(Arc::strong_count(&token), 3);
    drop(ends);
    while Arc::strong_count(&token) > 1 {
        thread::sleep(Duration::from_millis(10));
    }
}

dist_test!(world = 2, dist_abort_ends_waiting_operations, |world| {
    let group = rendezvous::group(&world);
    let others = group.subgroup(&[0, 1]).unwrap().unwrap();
    // Both have connected before one leaves.
    group.barrier().unwrap();
    if group.rank() == 0 {
        let (tell, told) = mpsc::channel();
        let waiting = others.clone();
        let waiter = thread::spawn(move || {
            let work = waiting.start_all_reduce(Tensor::from(1.0), ReduceOp::Sum).unwrap();
            tell.send(()).unwrap();
            work.wait()
        });
        told.recv().unwrap();
        others.abort().unwrap();
        let error = assert_fault(waiter.join().unwrap(), Fault::Aborted);
        assert!(error.to_string().contains("(aborted)"), "{error}");
        assert_fault(others.barrier(), Fault::Aborted);
        meet(&group, "aborted", 2);
    } else {
        // Does not take part. Operations that it starts afterwards fail as well.
        meet(&group, "aborted", 2);
        assert_fault(others.barrier(), Fault::PeerLost);
    }
    // Other groups of the same ranks continue.
    group.barrier().unwrap();
});

dist_test!(world = 2, dist_abort_wakes_messages, |world| {
    let group = rendezvous::group(&world);
    let others = group.subgroup(&[0, 1]).unwrap().unwrap();
    // Both have connected before one leaves.
    group.barrier().unwrap();
    if group.rank() == 0 {
        let place = || Tensor::from(0.0);
        let works = [
            others.start_recv(place(), 1, 1).unwrap(),
            others.start_recv_any(place(), 2).unwrap(),
            others.start_send(&place(), 1, 3).unwrap(),
        ];
        let waiters = works.map(|work| thread::spawn(move || work.wait()));
        others.abort().unwrap();
        for waiter in waiters {
            assert_fault(waiter.join().unwrap(), Fault::Aborted);
        }
    }
    group.barrier().unwrap();
});

dist_test!(world = 2, dist_a_group_with_a_failure_is_dropped_quickly, |world| {
    let group = rendezvous::group(&world);
    let others = group.subgroup(&[0, 1]).unwrap().unwrap();
    // Both have connected before one leaves.
    group.barrier().unwrap();
    if group.rank() == 0 {
        // The peer never takes part in any of these.
        let works: Vec<_> = (0..4)
            .map(|_| others.start_all_reduce(Tensor::from(1.0), ReduceOp::Sum).unwrap())
            .collect();
        assert_fault(reduce(&others.within(SHORT)), Fault::Timeout);
        drop(works);
        let begun = Instant::now();
        drop(others);
        assert!(begun.elapsed() < LIMIT);
    }
    group.barrier().unwrap();
});
