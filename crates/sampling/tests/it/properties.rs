//! Properties of every plan, whatever the numbers.

use brigade_sampling::{
    Order, Sampler, Scheme, ShardOptions, Shards, Shuffle, StreamShard, Totals, Weighted,
};
use proptest::prelude::*;

/// Sizes and options that a plan accepts.
#[derive(Debug, Clone)]
struct Case {
    samples: usize,
    batch_size: usize,
    world: usize,
    seed: u64,
    options: ShardOptions,
}

impl Case {
    fn order(&self) -> Vec<usize> {
        Shuffle::new(self.samples, self.seed).order(0)
    }

    fn shards(&self) -> Shards {
        Shards::new(self.order(), self.batch_size, self.world, self.options).unwrap()
    }
}

fn case() -> impl Strategy<Value = Case> {
    case_of(prop_oneof![
        3 => Just(Scheme::Accelerate),
        1 => Just(Scheme::Torch),
        1 => Just(Scheme::Fastai),
    ])
}

fn case_of(scheme: impl Strategy<Value = Scheme>) -> impl Strategy<Value = Case> {
    (scheme, 0..200usize, 1..9usize, 1..9usize, any::<(u64, bool, bool, bool, bool)>()).prop_map(
        |(scheme, samples, rows, world, (seed, split, even, drop_last, drop_tail))| {
            let accelerate = scheme == Scheme::Accelerate;
            let options = ShardOptions {
                scheme,
                split_batches: split && accelerate,
                even_batches: even || !accelerate,
                drop_last,
                drop_tail: drop_tail && scheme == Scheme::Torch,
            };
            let batch_size = if options.split_batches { rows * world } else { rows };
            Case { samples, batch_size, world, seed, options }
        },
    )
}

/// The valid samples in the order of a gather: round by round, rank by rank.
fn gathered(shards: &Shards) -> Vec<usize> {
    (0..shards.rounds())
        .flat_map(|round| (0..shards.world()).filter_map(move |rank| shards.batch(rank, round)))
        .flat_map(|batch| batch.valid_indices().to_vec())
        .collect()
}

fn sorted(mut indices: Vec<usize>) -> Vec<usize> {
    indices.sort_unstable();
    indices
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Valid samples are disjoint between ranks and rounds, and without drops they are all samples.
    #[test]
    fn valid_samples_are_a_partition(case in case()) {
        let shards = case.shards();
        let valid = gathered(&shards);
        let totals = shards.totals();
        prop_assert_eq!(totals.seen, valid.len());
        prop_assert_eq!(totals.seen + totals.dropped, case.samples);
        let mut distinct = sorted(valid);
        distinct.dedup();
        prop_assert_eq!(distinct.len(), totals.seen);
        if case.options.drop_last || case.options.drop_tail {
            prop_assert!(distinct.iter().all(|&index| index < case.samples));
        } else {
            prop_assert_eq!(distinct, (0..case.samples).collect::<Vec<_>>());
        }
    }

    /// In Accelerate's scheme, a gather without the duplicates has the order of the epoch.
    #[test]
    fn accelerate_gathers_in_order(case in case_of(Just(Scheme::Accelerate))) {
        let shards = case.shards();
        let order = case.order();
        prop_assert_eq!(gathered(&shards), &order[..shards.totals().seen]);
    }

    /// A sample is dropped only if not every rank has a full batch, or the same number of samples.
    #[test]
    fn no_more_is_dropped_than_must_be(case in case()) {
        let Totals { duplicated, dropped, .. } = case.shards().totals();
        let rows_of_a_round = if case.options.split_batches { 1 } else { case.world } * case.batch_size;
        if case.options.drop_last {
            prop_assert!(dropped < rows_of_a_round + case.world);
        } else if case.options.drop_tail {
            prop_assert!(dropped < case.world);
        } else {
            prop_assert_eq!(dropped, 0);
        }
        prop_assert!(duplicated < rows_of_a_round);
        prop_assert!(case.options.even_batches || duplicated == 0);
    }

    /// Every rank computes the sizes of all ranks: they are those of the batches.
    #[test]
    fn rounds_describe_the_batches(case in case()) {
        let shards = case.shards();
        let mut rows = 0;
        for index in 0..shards.rounds() {
            let round = shards.round(index);
            let mut concatenated = Vec::new();
            let mut valid = Vec::new();
            for rank in 0..case.world {
                match shards.batch(rank, index) {
                    Some(batch) => {
                        prop_assert!(!batch.indices.is_empty());
                        prop_assert_eq!((round.rows[rank], round.valid[rank]), (batch.indices.len(), batch.valid));
                        valid.extend_from_slice(batch.valid_indices());
                        concatenated.extend(batch.indices);
                    }
                    None => prop_assert_eq!((round.rows[rank], round.valid[rank]), (0, 0)),
                }
            }
            let kept: Vec<usize> =
                round.valid_ranges().into_iter().flat_map(|range| concatenated[range].to_vec()).collect();
            prop_assert_eq!(kept, valid);
            prop_assert_eq!(round.is_all_valid(), round.total_valid() == concatenated.len());
            rows += concatenated.len();
        }
        let totals = shards.totals();
        prop_assert_eq!(rows, totals.seen + totals.duplicated);
    }

    /// With even batches all ranks have the same number of batches, of one size in each round; with Accelerate's even
    /// batches, of one size throughout.
    #[test]
    fn even_means_equal(case in case()) {
        prop_assume!(case.options.even_batches);
        let shards = case.shards();
        prop_assert!((0..case.world).all(|rank| shards.num_batches(rank) == shards.rounds()));
        for index in 0..shards.rounds() {
            let round = shards.round(index);
            prop_assert!(round.is_even());
            if case.options.scheme == Scheme::Accelerate || case.options.drop_last {
                let rows = case.batch_size / if case.options.split_batches { case.world } else { 1 };
                prop_assert_eq!(round.rows[0], rows);
            }
        }
    }

    /// Uneven ranks differ by at most one batch, and lower ranks have more.
    #[test]
    fn uneven_lacks_batches_only_at_the_end(case in case()) {
        let shards = case.shards();
        let counts: Vec<usize> = (0..case.world).map(|rank| shards.num_batches(rank)).collect();
        prop_assert!(counts.windows(2).all(|pair| pair[0] >= pair[1]));
        prop_assert!(counts[0] - counts[case.world - 1] <= 1);
        for (rank, &count) in counts.iter().enumerate() {
            prop_assert_eq!(shards.rank(rank).count(), count);
            prop_assert_eq!(shards.batch(rank, count), None);
        }
    }

    /// Resuming at a round gives the rest of the whole epoch from that round on.
    #[test]
    fn resuming_is_skipping(case in case(), skipped in 0..30usize) {
        let shards = case.shards();
        for rank in 0..case.world {
            let whole: Vec<_> = shards.rank(rank).collect();
            let rest: Vec<_> = case.shards().rank(rank).skip(skipped).collect();
            prop_assert_eq!(&rest[..], &whole[skipped.min(whole.len())..]);
        }
    }

    /// Duplicates are samples of this epoch.
    #[test]
    fn duplicates_come_from_the_epoch(case in case()) {
        let order = case.order();
        let shards = case.shards();
        for rank in 0..case.world {
            for batch in shards.rank(rank) {
                prop_assert!(batch.duplicates().iter().all(|index| order.contains(index)));
            }
        }
    }

    /// Batches without a declared size are distributed whole, each once.
    #[test]
    fn listed_batches_are_a_partition(
        sizes in prop::collection::vec(1..6usize, 0..20),
        world in 1..6usize,
        even_batches in any::<bool>(),
        drop_last in any::<bool>(),
    ) {
        let mut next = 0..;
        let batches: Vec<Vec<usize>> =
            sizes.iter().map(|&size| next.by_ref().take(size).collect()).collect();
        let samples: usize = sizes.iter().sum();
        let options = ShardOptions { even_batches, drop_last, ..Default::default() };
        let shards = Shards::from_batches(batches, None, world, options).unwrap();
        let valid = gathered(&shards);
        let totals = shards.totals();
        prop_assert_eq!(&valid, &(0..totals.seen).collect::<Vec<_>>());
        prop_assert_eq!(totals.seen + totals.dropped, samples);
        prop_assert!(drop_last || totals.dropped == 0);
        if even_batches || drop_last {
            prop_assert!((0..world).all(|rank| shards.num_batches(rank) == shards.rounds()));
        }
    }

    /// A stream is sharded like the same samples in an order.
    #[test]
    fn a_stream_is_an_order_that_ends(case in case_of(Just(Scheme::Accelerate))) {
        let order = case.order();
        let shards = case.shards();
        for rank in 0..case.world {
            let mut stream =
                StreamShard::new(case.batch_size, rank, case.world, case.options).unwrap();
            let mut batches: Vec<_> = order.iter().filter_map(|&item| stream.push(item)).collect();
            batches.extend(stream.finish());
            prop_assert_eq!(batches.len(), shards.num_batches(rank));
            for (round, (streamed, planned)) in batches.into_iter().zip(shards.rank(rank)).enumerate() {
                prop_assert_eq!((streamed.items, streamed.valid), (planned.indices, planned.valid));
                prop_assert_eq!(streamed.round, shards.round(round));
            }
        }
    }

    #[test]
    fn a_shuffle_is_a_permutation_that_seed_and_epoch_decide(
        len in 0..500usize, seed in any::<u64>(), epoch in any::<u64>(),
    ) {
        let sampler = Shuffle::new(len, seed);
        let order = sampler.order(epoch);
        prop_assert_eq!(&order, &Shuffle::new(len, seed).order(epoch));
        if len >= 50 {
            // Equal by chance once in 50!.
            prop_assert_ne!(&order, &sampler.order(epoch.wrapping_add(1)));
            prop_assert_ne!(&order, &Shuffle::new(len, seed.wrapping_add(1)).order(epoch));
            prop_assert_ne!(&order, &Shuffle::new(len, seed.wrapping_add(1)).order(epoch.wrapping_sub(1)));
        }
        prop_assert_eq!(sorted(order), (0..len).collect::<Vec<_>>());
    }

    #[test]
    fn weighted_draws_have_weight_and_come_once_without_replacement(
        weights in prop::collection::vec(prop_oneof![Just(0.0), 1e-3..1e3f64], 1..60),
        draws in 1..60usize, seed in any::<u64>(), epoch in any::<u64>(),
    ) {
        let available = weights.iter().filter(|weight| **weight > 0.0).count();
        prop_assume!(available > 0);
        let with = Weighted::with_replacement(weights.clone(), draws, seed).unwrap();
        let order = with.order(epoch);
        prop_assert_eq!(order.len(), draws);
        prop_assert!(order.iter().all(|&index| weights[index] > 0.0));
        prop_assert_eq!(order, with.order(epoch));

        let without = Weighted::without_replacement(weights.clone(), draws, seed);
        prop_assert_eq!(without.is_ok(), draws <= available);
        if let Ok(without) = without {
            let order = without.order(epoch);
            prop_assert!(order.iter().all(|&index| weights[index] > 0.0));
            prop_assert_eq!(&order, &without.order(epoch));
            let mut distinct = sorted(order);
            distinct.dedup();
            prop_assert_eq!(distinct.len(), draws);
        }
    }

    #[test]
    fn a_counted_order_is_the_listed_one(case in case()) {
        let options = case.options;
        let counted =
            Shards::new(Order::Sequential(case.samples), case.batch_size, case.world, options).unwrap();
        let listed: Vec<usize> = (0..case.samples).collect();
        let listed = Shards::new(listed, case.batch_size, case.world, options).unwrap();
        for rank in 0..case.world {
            prop_assert!(counted.rank(rank).eq(listed.rank(rank)));
        }
    }
}
