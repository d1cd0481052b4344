//! The loader for streams: shards, look-ahead, errors, shutdown.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use brigade_data::{IterableDataset, StreamLoader, stream_from_fn};
use brigade_sampling::{Scheme, ShardOptions};
use brigade_torch::{Error, Result, elements};
use crossbeam_channel::unbounded;
use proptest::prelude::*;
use tch::Tensor;

fn numbers(len: i64) -> impl IterableDataset<Sample = i64> + 'static {
    stream_from_fn(move |epoch, _| (0..len).map(move |number| Ok(number + 1000 * epoch as i64)))
}

fn values(batch: &Tensor) -> Vec<i64> {
    elements::<i64>(batch).unwrap().to_vec()
}

#[test]
fn a_stream_becomes_batches_and_the_last_is_known() {
    for prefetch in [0, 1, 5] {
        let loader = StreamLoader::new(numbers(7)).batch_size(3).prefetch(prefetch);
        for epoch in 0..2 {
            let facts: Vec<_> = loader
                .iter()
                .map(Result::unwrap)
                .map(|batch| (batch.index(), batch.valid(), batch.is_last(), values(&batch)))
                .collect();
            let row = |values: &[i64]| values.iter().map(|value| value + 1000 * epoch).collect();
            let expected: Vec<(usize, usize, bool, Vec<i64>)> = vec![
                (0, 3, false, row(&[0, 1, 2])),
                (1, 3, false, row(&[3, 4, 5])),
                (2, 1, true, row(&[6])),
            ];
            assert_eq!(facts, expected, "{prefetch} ahead");
        }
        let loader = loader.drop_last(true).skip_batches(1);
        let left: Vec<_> = loader.iter().map(Result::unwrap).collect();
        assert_eq!((left.len(), left[0].index(), left[0].is_last()), (1, 1, true));
        assert_eq!(StreamLoader::new(numbers(0)).prefetch(prefetch).iter().count(), 0);
    }
}

#[test]
fn ranks_share_a_stream_and_complete_its_end() {
    let rank = |rank| {
        let loader = StreamLoader::new(numbers(9)).batch_size(2);
        let loader = loader.shard(rank, 2, ShardOptions::default()).unwrap();
        loader.iter().map(Result::unwrap).map(|b| (values(&b), b.valid())).collect::<Vec<_>>()
    };
    assert_eq!(rank(0), [(vec![0, 1], 2), (vec![4, 5], 2), (vec![8, 0], 1)]);
    assert_eq!(rank(1), [(vec![2, 3], 2), (vec![6, 7], 2), (vec![1, 2], 0)]);
}

#[test]
fn options_that_do_not_fit_a_stream_are_errors() {
    let shard = |options| {
        let loader = StreamLoader::new(numbers(9)).batch_size(3);
        loader.shard(0, 2, options).unwrap_err().to_string()
    };
    let torch = ShardOptions { scheme: Scheme::Torch, ..Default::default() };
    assert!(shard(torch).contains("not streams"));
    let split = ShardOptions { split_batches: true, ..Default::default() };
    assert!(shard(split).contains("does not divide"));
    let mut epoch = StreamLoader::new(numbers(9)).batch_size(0).iter();
    assert!(epoch.next().unwrap().unwrap_err().to_string().starts_with("the batch size is 0"));
    assert!(epoch.next().is_none());
}

#[test]
fn an_error_ends_the_epoch_at_its_batch() {
    for prefetch in [0, 1, 4] {
        for panics in [false, true] {
            let stream = stream_from_fn(move |_, _| {
                (0..10).map(move |number| match number {
                    5 if panics => panic!("torn"),
                    5 => Err(Error::custom("torn")),
                    _ => Ok(number as i64),
                })
            });
            let loader = StreamLoader::new(stream).batch_size(2).prefetch(prefetch);
            let results: Vec<_> = loader
                .iter()
                .map(|batch| batch.map(|b| values(&b)).map_err(|error| error.to_string()))
                .collect();
            let text = if panics { "the dataset panicked: torn" } else { "torn" };
            let expected =
                [Ok(vec![0, 1]), Ok(vec![2, 3]), Err(format!("epoch 0, batch 2: {text}"))];
            assert_eq!(results, expected);
        }
    }
    // A stream that cannot be opened.
    let closed = stream_from_fn(|_, _| -> std::iter::Empty<Result<i64>> { panic!("no such tape") });
    let error = StreamLoader::new(closed).iter().next().unwrap().unwrap_err().to_string();
    assert!(error.ends_with("no such tape"), "{error}");
}

#[test]
fn a_batch_that_cannot_be_collated_is_an_error() {
    let ragged = stream_from_fn(|_, _| [1usize, 1, 1, 2].into_iter().map(|n| Ok(vec![0f32; n])));
    let loader = StreamLoader::new(ragged).batch_size(2);
    let results: Vec<_> = loader.iter().collect();
    assert!(results[0].is_ok() && results.len() == 2);
    let error = results[1].as_ref().unwrap_err().to_string();
    assert!(error.starts_with("epoch 0, batch 1: sample 1 of the batch has 2"), "{error}");
}

#[test]
fn an_early_break_wakes_the_reader_and_ends_it() {
    let read = Arc::new(AtomicUsize::new(0));
    let (sent, notice) = unbounded::<usize>();
    let counter = Arc::clone(&read);
    // An endless stream: only a stop ends it.
    let stream = stream_from_fn(move |_, _| {
        let (counter, sent) = (Arc::clone(&counter), sent.clone());
        (0i64..).map(move |number| {
            sent.send(counter.fetch_add(1, Ordering::SeqCst)).unwrap();
            Ok(number)
        })
    });
    let loader = StreamLoader::new(stream).batch_size(2).prefetch(3);
    let mut batches = loader.iter();
    assert_eq!(values(&batches.next().unwrap().unwrap()), [0, 1]);
    // Returned: 1. In the channel: 2. Held by the reader: 1, and 1 more to detect the last. Ten samples, then the
    // reader waits for room.
    for expected in 0..10 {
        assert_eq!(notice.recv().unwrap(), expected);
    }
    drop(batches);
    drop(loader);
    // All senders are dropped, so the thread has ended; and it read almost nothing more.
    let more = notice.iter().count();
    assert!(more <= 1, "{more} samples were read after the stop");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn a_stream_is_dealt_out_exactly_once_and_the_dispatcher_agrees(
        len in 0i64..50,
        world in 1usize..5,
        per_rank in 1usize..5,
        prefetch in 0usize..3,
        [split, even, drop] in any::<[bool; 3]>(),
    ) {
        let options = ShardOptions {
            split_batches: split,
            even_batches: even,
            drop_last: drop,
            ..Default::default()
        };
        let batch_size = if split { per_rank * world } else { per_rank };
        let loader = || StreamLoader::new(numbers(len)).batch_size(batch_size).prefetch(prefetch);
        let rounds: Vec<_> =
            loader().dispatch(world, options).unwrap().iter().map(Result::unwrap).collect();
        let mut seen = Vec::new();
        for rank in 0..world {
            let own = loader().shard(rank, world, options).unwrap();
            let batches: Vec<_> = own.iter().map(Result::unwrap).collect();
            for batch in &batches {
                let round = &rounds[batch.index()];
                prop_assert_eq!(values(batch), values(&round.part(rank).unwrap()));
                prop_assert_eq!(batch.round(), round.round());
                prop_assert_eq!(batch.rows(), values(batch).len());
                seen.extend_from_slice(&values(batch)[..batch.valid()]);
            }
            prop_assert!(batches.last().is_none_or(|batch| batch.is_last()));
            prop_assert!(batches.iter().rev().skip(1).all(|batch| !batch.is_last()));
        }
        seen.sort_unstable();
        let kept = if drop { len - len % (per_rank * world) as i64 } else { len };
        prop_assert_eq!(seen, (0..kept).collect::<Vec<_>>());
    }
}
