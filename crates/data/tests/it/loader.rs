//! The loader for data of known length: order, shards, threads, errors, shutdown.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use brigade_data::{
    BatchContext, BatchSampler, BatchedDataset, DataLoader, TensorDataset, batches_from_fn,
    dataset_from_fn,
};
use brigade_sampling::{Scheme, ShardOptions, Shuffle};
use brigade_torch::{Error, Result, elements, from_vec};
use crossbeam_channel::{bounded, unbounded};
use proptest::prelude::*;
use tch::Tensor;

fn tensor(values: Vec<i64>) -> Result<Tensor> {
    let count = values.len() as i64;
    from_vec(values, &[count])
}

/// A dataset whose batches are the requested indices.
fn indices(len: usize) -> impl BatchedDataset<Batch = Tensor> + 'static {
    batches_from_fn(len, |indices, _| tensor(indices.iter().map(|index| *index as i64).collect()))
}

fn values(batch: &Tensor) -> Vec<i64> {
    elements::<i64>(batch).unwrap().to_vec()
}

fn epoch<D: BatchedDataset<Batch = Tensor> + 'static>(loader: &DataLoader<D>) -> Vec<Vec<i64>> {
    loader.iter().map(|batch| values(&batch.unwrap())).collect()
}

#[test]
fn the_plain_loader_goes_through_the_data_in_order() {
    let loader = DataLoader::new(indices(10)).batch_size(4);
    assert_eq!(epoch(&loader), [vec![0, 1, 2, 3], vec![4, 5, 6, 7], vec![8, 9]]);
    assert_eq!(loader.len(), 3);
    let loader = loader.drop_last(true);
    assert_eq!((loader.len(), epoch(&loader).len()), (2, 2));
    assert!(epoch(&DataLoader::new(indices(0)).batch_size(4)).is_empty());
    assert_eq!(epoch(&DataLoader::new(indices(2))), [[0], [1]]);
}

#[test]
fn an_epoch_is_the_same_at_any_number_of_threads() {
    // The random numbers of a sample are part of the batch.
    let dataset = || {
        batches_from_fn(103, |indices, context: &BatchContext| {
            let mut values = vec![context.batch_seed() as i64];
            values.extend(indices.iter().map(|index| context.sample_seed(*index) as i64));
            tensor(values)
        })
    };
    let run = |threads, prefetch| {
        let loader = DataLoader::new(dataset())
            .batch_size(8)
            .shuffle(true)
            .seed(7)
            .threads(threads)
            .prefetch(prefetch);
        [epoch(&loader), epoch(&loader)]
    };
    let expected = run(0, 0);
    assert_ne!(expected[0], expected[1]);
    for (threads, prefetch) in [(1, 1), (1, 9), (4, 1), (4, 3), (4, 100), (9, 0)] {
        assert_eq!(run(threads, prefetch), expected, "{threads} threads, {prefetch} ahead");
    }
}

#[test]
fn epochs_differ_and_can_be_repeated() {
    let loader = DataLoader::new(indices(20)).batch_size(20).shuffle(true).seed(3);
    let (first, second) = (epoch(&loader), epoch(&loader));
    assert_ne!(first, second);
    assert_eq!(loader.epoch(), 2);
    loader.set_epoch(0);
    assert_eq!((epoch(&loader), epoch(&loader)), (first.clone(), second));
    let mut sorted = first[0].clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..20).collect::<Vec<_>>());

    let (one, other) = (DataLoader::new(indices(1)), DataLoader::new(indices(1)));
    assert_ne!(one.options().seed, other.options().seed, "each loader draws its own seed");
    let agreed = DataLoader::new(indices(20)).batch_size(20).shuffle(true).seed(3);
    assert_eq!(epoch(&agreed), first);
}

#[test]
fn a_batch_knows_its_place() {
    let loader = DataLoader::new(indices(10)).batch_size(4).threads(2);
    let mut batches = loader.iter();
    assert_eq!((batches.number(), batches.remaining()), (0, Some(3)));
    let facts: Vec<_> = batches
        .by_ref()
        .map(|batch| batch.unwrap())
        .map(|batch| (batch.index(), batch.rows(), batch.valid(), batch.is_last()))
        .collect();
    assert_eq!(facts, [(0, 4, 4, false), (1, 4, 4, false), (2, 2, 2, true)]);
    assert_eq!(batches.remaining(), Some(0));
    assert!(batches.next().is_none());
}

type Facts = (usize, usize, bool, Vec<i64>);

fn facts<D: BatchedDataset<Batch = Tensor> + 'static>(loader: &DataLoader<D>) -> Vec<Facts> {
    let batches = loader.iter().map(Result::unwrap);
    batches.map(|b| (b.index(), b.valid(), b.is_last(), values(&b))).collect()
}

#[test]
fn skipping_leaves_the_rest_of_one_epoch_unchanged() {
    for threads in [0, 2] {
        let whole = || {
            let loader = DataLoader::new(indices(23)).batch_size(3).shuffle(true).seed(1);
            loader.threads(threads).shard(1, 2, ShardOptions::default()).unwrap()
        };
        let reference = whole();
        let (first, second) = (facts(&reference), facts(&reference));
        let skipped = whole().skip_batches(3);
        assert_eq!(skipped.len(), 4);
        assert_eq!((facts(&skipped), facts(&skipped)), (first[3..].to_vec(), second));
        assert!(facts(&whole().skip_batches(99)).is_empty());
    }
}

#[test]
fn the_last_round_of_four_ranks_counts_each_sample_once() {
    // 50 samples, 12 per batch, 4 ranks: the case that users ask about most.
    let last = |rank| {
        let loader = DataLoader::new(indices(50)).batch_size(12);
        let loader = loader.shard(rank, 4, ShardOptions::default()).unwrap();
        assert_eq!(loader.len(), 2);
        loader.iter().last().unwrap().unwrap()
    };
    assert_eq!(values(&last(0)), [48, 49, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    let valid: Vec<usize> = (0..4).map(|rank| last(rank).valid()).collect();
    assert_eq!(valid, [2, 0, 0, 0]);
    assert_eq!(last(3).round().rows, [12; 4]);
    assert_eq!(last(3).round().valid, [2, 0, 0, 0]);
}

#[test]
fn samplers_and_lists_set_the_order() {
    let loader = DataLoader::new(indices(6)).batch_size(4).sampler(Shuffle::new(6, 5));
    assert!(!loader.depends_on_seed());
    let order: Vec<i64> = epoch(&loader).concat();
    let expected = brigade_sampling::Sampler::order(&Shuffle::new(6, 5), 0);
    assert_eq!(order, expected.iter().map(|index| *index as i64).collect::<Vec<_>>());

    #[derive(Debug)]
    struct ByLength;
    impl BatchSampler for ByLength {
        fn batches(&self, epoch: u64) -> Vec<Vec<usize>> {
            vec![vec![5], vec![1, 2, 3], vec![epoch as usize, 4]]
        }
    }
    let loader = DataLoader::new(indices(6)).batch_sampler(ByLength).threads(2);
    assert_eq!(loader.len(), 3);
    assert_eq!(epoch(&loader), [vec![5], vec![1, 2, 3], vec![0, 4]]);
    assert_eq!(epoch(&loader)[2], [1, 4]);
    let rank = DataLoader::new(indices(6)).batch_sampler(ByLength);
    let rank = rank.shard(1, 2, ShardOptions::default()).unwrap();
    let valid: Vec<_> = rank.iter().map(|batch| batch.unwrap().valid()).collect();
    assert_eq!((rank.len(), valid), (2, vec![3, 0]));
}

#[test]
fn a_dispatcher_reads_what_all_ranks_would() {
    let options = ShardOptions::default();
    let loader = || DataLoader::new(indices(29)).batch_size(4).shuffle(true).seed(2);
    let dispatcher = loader().threads(2).dispatch(3, options).unwrap();
    let rounds: Vec<_> = dispatcher.iter().map(Result::unwrap).collect();
    assert_eq!((dispatcher.len(), rounds.len()), (3, 3));
    for rank in 0..3 {
        let own = loader().shard(rank, 3, options).unwrap();
        for (batch, round) in own.iter().map(Result::unwrap).zip(&rounds) {
            assert_eq!(values(&round.part(rank).unwrap()), values(&batch));
            assert_eq!(round.round(), batch.round());
            assert_eq!(round.is_last(), batch.is_last());
        }
    }
    assert_eq!((rounds[2].rows(), rounds[2].valid()), (12, 5));
    assert!(rounds[0].part(3).unwrap_err().to_string().contains("rank 3 does not exist"));
    let own = loader().shard(1, 3, options).unwrap().iter().next().unwrap().unwrap();
    assert!(own.part(1).unwrap_err().to_string().contains("belongs to rank 1 alone"));
}

#[test]
fn options_that_do_not_work_are_errors_not_panics() {
    let loader = DataLoader::new(indices(6)).batch_size(0);
    assert_eq!(loader.len(), 0);
    let mut batches = loader.iter();
    assert!(batches.next().unwrap().unwrap_err().to_string().starts_with("the batch size is 0"));
    assert!(batches.next().is_none());

    let shard = |rank, world, options| {
        let loader = DataLoader::new(indices(6)).batch_size(3);
        loader.shard(rank, world, options).unwrap_err().to_string()
    };
    let split = ShardOptions { split_batches: true, ..Default::default() };
    assert!(shard(0, 2, split).contains("a batch size of 3 does not divide by 2 ranks"));
    assert!(shard(2, 2, ShardOptions::default()).contains("rank 2 does not exist"));
    assert!(shard(0, 0, ShardOptions::default()).contains("rank 0 does not exist among 0 ranks"));
    let fastai = ShardOptions { scheme: Scheme::Fastai, ..split };
    assert!(shard(0, 3, fastai).contains("split_batches has no meaning"));
}

#[test]
fn an_error_or_panic_is_delivered_at_its_batch_and_the_next_one_follows() {
    for threads in [0, 1, 3] {
        let dataset = dataset_from_fn(12, |index, _| match index {
            5 => Err(Error::custom("page 5 is missing")),
            9 => panic!("page 9 is on fire"),
            _ => Ok(index),
        });
        let loader = DataLoader::new(dataset).batch_size(2).threads(threads);
        for epoch in 0..2 {
            let results: Vec<_> = loader
                .iter()
                .map(|batch| batch.map(|b| values(&b)).map_err(|error| error.to_string()))
                .collect();
            let expected = [
                Ok(vec![0, 1]),
                Ok(vec![2, 3]),
                Err(format!("epoch {epoch}, batch 2: page 5 is missing")),
                Ok(vec![6, 7]),
                Err(format!("epoch {epoch}, batch 4: the dataset panicked: page 9 is on fire")),
                Ok(vec![10, 11]),
            ];
            assert_eq!(results, expected, "{threads} threads");
        }
    }
}

#[test]
fn an_early_break_stops_the_threads_at_once() {
    // Batch 0 is returned; every later one waits at the gate until the test opens it.
    let begun = Arc::new(AtomicUsize::new(0));
    let (entered, notice) = unbounded::<()>();
    let (gate_keeper, gate) = bounded::<()>(0);
    let counter = Arc::clone(&begun);
    let dataset = batches_from_fn(1000, move |indices, _| {
        counter.fetch_add(1, Ordering::SeqCst);
        if indices[0] > 0 {
            entered.send(()).unwrap();
            // An error means that the sender was dropped: the gate is open.
            let _ = gate.recv();
        }
        tensor(vec![indices[0] as i64])
    });
    let loader = DataLoader::new(dataset).threads(3).prefetch(20);
    let mut batches = loader.iter();
    assert_eq!(values(&batches.next().unwrap().unwrap()), [0]);
    for _ in 0..3 {
        notice.recv().unwrap();
    }
    // All three threads are inside a batch. The gate opens only when the drop is in progress or about to begin: it has
    // to wait for them.
    let opener = std::thread::spawn(move || drop(gate_keeper));
    drop(batches);
    opener.join().unwrap();
    let after_drop = begun.load(Ordering::SeqCst);
    assert!(after_drop <= 21, "{after_drop} batches were begun, but 1 + 20 tickets were out");
    // The loader is the last owner of the dataset and its sender: all threads have ended.
    drop(loader);
    assert_eq!(notice.iter().count(), after_drop - 1 - 3);
    assert_eq!(begun.load(Ordering::SeqCst), after_drop);
}

#[test]
fn a_slow_consumer_blocks_nothing_and_memory_stays_bounded() {
    let begun = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&begun);
    let dataset = batches_from_fn(200, move |indices, _| {
        counter.fetch_add(1, Ordering::SeqCst);
        tensor(vec![indices[0] as i64])
    });
    let loader = DataLoader::new(dataset).threads(4).prefetch(6);
    for (position, batch) in loader.iter().enumerate() {
        assert_eq!(values(&batch.unwrap()), [position as i64]);
        std::thread::yield_now();
        // This batch and those before are out of the window; at most six more are in it.
        assert!(begun.load(Ordering::SeqCst) <= position + 1 + 6);
    }
    assert_eq!(begun.load(Ordering::SeqCst), 200);
}

#[test]
fn threads_have_names() {
    let dataset = batches_from_fn(3, |_, _| {
        let name = std::thread::current().name().unwrap_or_default().to_owned();
        tensor(vec![i64::from(name.starts_with("brigade-data-"))])
    });
    let loader = DataLoader::new(dataset).threads(2);
    assert_eq!(epoch(&loader).concat(), [1, 1, 1]);
    assert_eq!(epoch(&loader.threads(0)).concat(), [0, 0, 0]);
}

#[test]
fn pairs_arrive_whole() {
    let pairs =
        TensorDataset::new((Tensor::from_slice(&[1i64, 2, 3]), Tensor::from_slice(&[4i64, 5, 6])));
    let (x, y) =
        DataLoader::new(pairs.unwrap()).batch_size(3).iter().next().unwrap().unwrap().into_data();
    assert_eq!((values(&x), values(&y)), (vec![1, 2, 3], vec![4, 5, 6]));
}

fn any_options() -> impl Strategy<Value = ShardOptions> {
    (0..3usize, any::<[bool; 3]>()).prop_map(|(scheme, [split, even, drop])| {
        let scheme = [Scheme::Accelerate, Scheme::Torch, Scheme::Fastai][scheme];
        let own = scheme == Scheme::Accelerate;
        ShardOptions {
            scheme,
            split_batches: split && own,
            even_batches: even || !own,
            drop_last: drop,
            drop_tail: false,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// The valid rows of all ranks are the data, each sample once; with `drop_last` at most once.
    #[test]
    fn valid_rows_of_all_ranks_are_a_partition(
        len in 0usize..60,
        world in 1usize..5,
        per_rank in 1usize..5,
        threads in 0usize..3,
        options in any_options(),
        seed: u64,
    ) {
        let batch_size = if options.split_batches { per_rank * world } else { per_rank };
        let mut counts = BTreeMap::new();
        let mut lengths = Vec::new();
        for rank in 0..world {
            let loader = DataLoader::new(indices(len))
                .batch_size(batch_size)
                .shuffle(true)
                .seed(seed)
                .threads(threads)
                .shard(rank, world, options)
                .unwrap();
            let batches: Vec<_> = loader.iter().map(Result::unwrap).collect();
            prop_assert_eq!(loader.len(), batches.len());
            prop_assert!(batches.iter().rev().skip(1).all(|batch| !batch.is_last()));
            prop_assert!(batches.last().is_none_or(|batch| batch.is_last()));
            for batch in &batches {
                let rows = values(batch);
                prop_assert_eq!(rows.len(), batch.rows());
                prop_assert_eq!(batch.round().valid[rank], batch.valid());
                for value in &rows[..batch.valid()] {
                    *counts.entry(*value).or_insert(0) += 1;
                }
            }
            lengths.push(batches.len());
        }
        prop_assert!(counts.values().all(|count| *count == 1), "{:?}", counts);
        if !options.drop_last {
            prop_assert_eq!(counts.len(), len);
        }
        if options.even_batches {
            prop_assert!(lengths.windows(2).all(|pair| pair[0] == pair[1]), "{:?}", lengths);
        }
    }
}

/// A dataset whose batches are the indices and random numbers, with a count of the batches that were made, and a flag
/// that is set when the last thread and the loader have dropped the data.
struct Watched {
    made: Arc<AtomicUsize>,
    gone: Arc<AtomicUsize>,
}

impl BatchedDataset for Watched {
    type Batch = Tensor;

    fn num_samples(&self) -> usize {
        23
    }

    fn batch(&self, indices: &[usize], context: &BatchContext) -> Result<Tensor> {
        self.made.fetch_add(1, Ordering::SeqCst);
        let mut values = vec![context.batch_seed() as i64];
        values.extend(indices.iter().map(|index| *index as i64));
        tensor(values)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.gone.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn the_next_epoch_is_begun_early_and_is_the_same() {
    let (made, gone) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let watched = || Watched { made: Arc::clone(&made), gone: Arc::clone(&gone) };
    let loader = |overlap| {
        let loader = DataLoader::new(watched()).batch_size(4).shuffle(true).seed(3);
        loader.threads(2).overlap_epochs(overlap)
    };
    let (plain, overlapping) = (loader(false), loader(true));
    for _ in 0..3 {
        assert_eq!(epoch(&overlapping), epoch(&plain));
    }
    // Four batches of the fourth epoch are made before it is requested.
    while made.load(Ordering::SeqCst) < 2 * 3 * 6 + 4 {
        std::thread::yield_now();
    }
    // If another position is set in between, the loader begins again.
    type Change = fn(&DataLoader<Watched>);
    let changes: [Change; 4] = [
        |loader| loader.set_epoch(9),
        |loader| loader.set_seed(5),
        |loader| loader.set_skip_batches(2),
        |loader| loader.set_skip_samples(6),
    ];
    for change in changes {
        change(&plain);
        change(&overlapping);
        assert_eq!(epoch(&overlapping), epoch(&plain));
        assert_eq!(overlapping.epoch(), plain.epoch());
        assert_eq!(epoch(&overlapping), epoch(&plain));
    }
    let (plain, overlapping) = (plain.batch_size(7), overlapping.batch_size(7));
    assert_eq!(epoch(&overlapping), epoch(&plain));

    // An iteration that ends early does not begin the next epoch; the threads of an epoch that was begun end with the
    // loader.
    let mut part = overlapping.iter();
    part.next().unwrap().unwrap();
    drop(part);
    assert_eq!(epoch(&overlapping).len(), 4);
    drop((plain, overlapping));
    assert_eq!(gone.load(Ordering::SeqCst), 2);
}
