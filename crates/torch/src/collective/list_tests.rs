//! Tests of features of c10d beyond the safe functions: parts of several lengths, tensors in any memory format. Ranks
//! are threads.

use std::thread;
use std::time::Duration;

use tch::{Device, Kind, Tensor};

use super::Begun;
use crate::backend::{Backend, GlooDevice};
use crate::bridge::{borrow, borrow_all, ffi};
use crate::group::{GroupOptions, ProcessGroup};
use crate::store::Store;

const SIZE: usize = 3;

/// Runs `act` on each rank, with or without shared memory of the ranks.
fn on_all_ranks(act: impl Fn(&ProcessGroup) + Sync) {
    for share_memory in [true, false] {
        let store = Store::hash().expect("a store in memory");
        let run = |rank| {
            let options = GroupOptions {
                timeout: Duration::from_secs(45),
                share_memory,
                ..GroupOptions::default()
            };
            let gloo = Backend::Gloo(GlooDevice::Address("127.0.0.1".into()));
            let group = ProcessGroup::new(&store, rank, SIZE, gloo, options).expect("a group");
            assert_eq!(group.shares_memory(), share_memory);
            act(&group);
            group.barrier().expect("all ranks are there");
        };
        thread::scope(|scope| {
            for rank in 0..SIZE {
                scope.spawn(move || run(rank));
            }
        });
    }
}

fn finish(group: &ProcessGroup, start: impl FnOnce(&ffi::Group, i64) -> Begun) {
    let pending = group.collective("test", String::new, start).expect("it starts");
    pending.giving(()).wait().expect("it ends");
}

/// Rows of `columns` numbers that differ on each rank.
fn numbers(rank: usize, rows: i64, columns: i64) -> Tensor {
    let places = Tensor::arange(rows * columns, (Kind::Float, Device::Cpu));
    (places * 0.37 + rank as f64).sin().view([rows, columns])
}

const ROWS: [i64; SIZE] = [70_001, 0, 5];

#[test]
fn parts_may_be_of_several_lengths() {
    on_all_ranks(|group| {
        let rank = group.rank();
        let outputs = ROWS.map(|rows| Tensor::zeros([rows, 7], (Kind::Float, Device::Cpu)));
        let mine = numbers(rank, ROWS[rank], 7);
        finish(group, |group, limit| {
            ffi::all_gather(group, &borrow_all(&outputs), borrow(&mine), limit)
        });
        for (from, output) in outputs.iter().enumerate() {
            assert!(output.equal(&numbers(from, ROWS[from], 7)), "rank {from}'s");
        }

        let inputs = ROWS.map(|rows| numbers(rank, rows, 7));
        let sum = (0..SIZE).map(|from| numbers(from, ROWS[rank], 7)).reduce(|a, b| a + b);
        let mine = inputs[rank].zeros_like();
        finish(group, |group, limit| {
            let op = ffi::Reduction::Sum;
            ffi::reduce_scatter(group, borrow(&mine), &borrow_all(&inputs), op, limit)
        });
        assert!(mine.equal(&sum.expect("there are ranks")));
    });
}

#[test]
fn tensors_may_lie_in_any_order() {
    on_all_ranks(|group| {
        let rank = group.rank();
        let rows = 40_000;
        let whole = Tensor::zeros([7, rows * SIZE as i64], (Kind::Float, Device::Cpu)).tr();
        let mine = numbers(rank, rows, 7).tr().contiguous().tr();
        assert!(!whole.is_contiguous() && !mine.is_contiguous());
        finish(group, |group, limit| {
            ffi::all_gather_flat(group, borrow(&whole), borrow(&mine), limit)
        });
        let parts: Vec<Tensor> = (0..SIZE).map(|from| numbers(from, rows, 7)).collect();
        assert!(whole.equal(&Tensor::cat(&parts, 0)));
        finish(group, |group, limit| {
            ffi::reduce_scatter_flat(
                group,
                borrow(&mine),
                borrow(&whole),
                ffi::Reduction::Sum,
                limit,
            )
        });
        let sum = [&parts[rank]; SIZE].into_iter().map(Tensor::shallow_clone).reduce(|a, b| a + b);
        assert!(mine.equal(&sum.expect("there are ranks")));
    });
}

#[test]
fn what_does_not_fit_is_named() {
    on_all_ranks(|group| {
        let zeros = |rows| Tensor::zeros([rows], (Kind::Float, Device::Cpu));
        let (whole, part, double) = (zeros(7), zeros(2), zeros(6).to_kind(Kind::Double));
        let starts = |start: &dyn Fn(&ffi::Group, i64) -> Begun| {
            let outcome = group.collective("test", String::new, start);
            outcome.err().expect("it must not start").to_string()
        };
        let text = starts(&|group, limit| {
            ffi::all_gather_flat(group, borrow(&whole), borrow(&part), limit)
        });
        assert!(text.contains("a tensor of 7 numbers does not fit a part of 2"), "{text}");
        let op = ffi::Reduction::Sum;
        let text = starts(&|group, limit| {
            ffi::reduce_scatter_flat(group, borrow(&part), borrow(&double), op, limit)
        });
        assert!(text.contains("found Double and Float"), "{text}");
        let text = starts(&|group, limit| {
            ffi::all_gather(group, &borrow_all(&[&part, &part]), borrow(&part), limit)
        });
        assert!(text.contains("one tensor for each, found 2"), "{text}");
    });
}
