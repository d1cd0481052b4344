//! Groups of some ranks.

use brigade_testkit::dist_test;
use brigade_torch::{ErrorKind, ProcessGroup, ReduceOp};
use tch::Tensor;

use crate::rendezvous::{self, values};

fn sum_of_ranks(group: &ProcessGroup, rank: usize) -> f64 {
    let mut number = Tensor::from(rank as f64);
    group.all_reduce(&mut number, ReduceOp::Sum).unwrap();
    values(&number)[0]
}

dist_test!(world = 4, dist_subgroups, |world| {
    let all = rendezvous::group(&world);
    let me = all.rank();

    // Disjoint.
    let even = all.subgroup(&[0, 2]).unwrap();
    let odd = all.subgroup(&[3, 1]).unwrap();
    assert_eq!((even.is_some(), odd.is_some()), ([0, 2].contains(&me), [1, 3].contains(&me)));
    if let Some(even) = &even {
        assert_eq!((sum_of_ranks(even, me), even.size(), even.rank()), (2.0, 2, me / 2));
        assert_eq!((even.name(), even.global_ranks()), ("world.0", &[0, 2][..]));
    }
    if let Some(odd) = &odd {
        // Numbered in the order given.
        assert_eq!((sum_of_ranks(odd, me), odd.rank()), (4.0, usize::from(me == 1)));
    }

    // Overlapping.
    let front = all.subgroup(&[0, 1, 2]).unwrap();
    let back = all.subgroup(&[1, 2, 3]).unwrap();
    let sums = [&front, &back].map(|g| g.as_ref().map(|g| sum_of_ranks(g, me)));
    assert_eq!(sums, [(me < 3).then_some(3.0), (me > 0).then_some(6.0)]);

    // Of a subgroup: numbers are the subgroup's, global ranks the first group's.
    if let Some(back) = &back {
        let pair = back.subgroup(&[2, 0]).unwrap();
        assert_eq!(pair.is_some(), me != 2);
        if let Some(pair) = pair {
            assert_eq!((pair.global_ranks(), sum_of_ranks(&pair, me)), (&[3, 1][..], 4.0));
            assert_eq!(pair.name(), "world.3.0");
        }
    }
    // Alone, and all of them the other way round.
    let alone = all.subgroup(&[me]).unwrap().unwrap();
    assert_eq!(sum_of_ranks(&alone, me), me as f64);
    let reversed = all.subgroup(&[3, 2, 1, 0]).unwrap().unwrap();
    assert_eq!((sum_of_ranks(&reversed, me), reversed.rank()), (6.0, 3 - me));
    all.barrier().unwrap();
});

dist_test!(world = 2, dist_subgroups_that_cannot_be, |world| {
    let all = rendezvous::group(&world);
    let refusal = |ranks: &[usize]| match all.subgroup(ranks) {
        Err(error) if error.kind() == ErrorKind::InvalidArgument => error.to_string(),
        other => panic!("{ranks:?} gave {other:?}"),
    };
    assert!(refusal(&[]).contains("no ranks"));
    assert!(refusal(&[0, 2]).contains("rank 2 does not exist among 2 ranks"));
    assert!(refusal(&[1, 1]).contains("named twice"));
    // The next one still has the same number on all ranks.
    assert_eq!(all.subgroup(&[0, 1]).unwrap().unwrap().size(), 2);
    all.barrier().unwrap();
});
