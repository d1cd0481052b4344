//! The group that answers at once, alone and under the reducer.

use std::collections::BTreeMap;

use brigade_torch::{
    AttentionOptions, Backend, CrossEntropyOptions, GroupOptions, ProcessGroup, ReduceOp, Reducer,
    ReducerOptions, Store, VocabularyPart, context_attention,
    linear_vocabulary_parallel_cross_entropy, region_argmax, region_top_k, regions,
    vocabulary_parallel_cross_entropy, vocabulary_parallel_embedding,
};
use tch::{Device, Kind, Tensor};

use crate::rendezvous::values;

fn group(rank: usize, size: usize) -> ProcessGroup {
    let store = Store::hash().unwrap();
    ProcessGroup::new(&store, rank, size, Backend::Fake, GroupOptions::default()).unwrap()
}

#[test]
fn a_thousand_ranks_answer_at_once() {
    let group = group(700, 1000);
    assert_eq!((group.rank(), group.size()), (700, 1000));
    let mut tensor = Tensor::from_slice(&[1.0, 2.0]);
    let same = [1.0, 2.0];
    group.all_reduce(&mut tensor, ReduceOp::Mean).unwrap();
    group.all_reduce(&mut tensor, ReduceOp::Sum).unwrap();
    group.broadcast(&mut tensor, 3).unwrap();
    group.reduce(&mut tensor, ReduceOp::Max, 999).unwrap();
    assert_eq!(values(&tensor), same);
    group.broadcast_coalesced(&[&tensor], 1 << 20, 0).unwrap();
    group.all_reduce_coalesced(&mut [tensor.shallow_clone()], ReduceOp::Mean).unwrap();

    let all = group.all_gather(&tensor).unwrap();
    assert_eq!(all.len(), 1000);
    assert!(all.iter().all(|one| values(one) == same));
    let flat = group.all_gather_flat(&tensor).unwrap();
    assert_eq!((flat.size(), values(&flat.narrow(0, 1998, 2))), (vec![2000], same.to_vec()));
    assert_eq!(group.gather(&tensor, 700).unwrap().unwrap().len(), 1000);
    assert!(group.gather(&tensor, 0).unwrap().is_none());

    let parts: Vec<Tensor> = (0..1000).map(|n| Tensor::from(f64::from(n))).collect();
    let mut place = Tensor::from(-1.0);
    group.scatter(&mut place, Some(&parts), 700).unwrap();
    assert_eq!(values(&place), [700.0]);
    group.scatter(&mut place, None, 0).unwrap();
    assert_eq!(values(&group.reduce_scatter(&parts, ReduceOp::Sum).unwrap()), [700.0]);
    let column = Tensor::arange(2000, (Kind::Double, Device::Cpu));
    let mine = group.reduce_scatter_flat(&column, ReduceOp::Mean).unwrap();
    assert_eq!(values(&mine), [1400.0, 1401.0]);
    let exchanged = group.all_to_all(&parts, None).unwrap();
    assert_eq!(values(&exchanged[700]), [700.0]);
    assert_eq!(group.all_to_all_flat(&column, &[], &[]).unwrap().size(), [2000]);
    let mut receive = vec![0; 1000];
    receive[1] = 5;
    let mut send = vec![0; 1000];
    send[9] = 2000;
    assert_eq!(group.all_to_all_flat(&column, &send, &receive).unwrap().size(), [5]);

    group.send(&tensor, 3, 0).unwrap();
    group.recv(&mut tensor, 3, 0).unwrap();
    assert_ne!(group.recv_any(&mut tensor, 0).unwrap(), 700);
    group.barrier().unwrap();
    assert_eq!(group.all_gather_object(&"text".to_owned()).unwrap().len(), 1000);
    let numbers: Vec<usize> = (600..800).collect();
    assert_eq!(group.subgroup(&numbers).unwrap().unwrap().rank(), 100);
    group.abort().unwrap();
}

#[test]
fn a_reducer_among_a_thousand() {
    let group = group(0, 1000);
    let weight = Tensor::ones([1000, 100], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let bias = Tensor::zeros([1000], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let parameters = [("weight".to_owned(), weight), ("bias".to_owned(), bias)];
    let options = ReducerOptions {
        bucket_bytes: 1000,
        first_bucket_bytes: 1000,
        ..ReducerOptions::default()
    };
    let reducer = Reducer::new(&group, &parameters, &[], options).unwrap();
    for _ in 0..3 {
        for (_, parameter) in &parameters {
            brigade_torch::clear_gradient(parameter).unwrap();
        }
        reducer.before_forward(true).unwrap();
        let input = Tensor::ones([4, 100], (Kind::Float, Device::Cpu));
        let output = input.linear(&parameters[0].1, Some(&parameters[1].1));
        let output = reducer.after_forward(output, true).unwrap();
        output.sum(Kind::Float).f_backward().unwrap();
    }
    // Each gradient was divided by 1000 and reduced with 999 peers that send the same.
    let gradient = brigade_torch::gradient(&parameters[1].1).unwrap().unwrap();
    assert!(values(&gradient).iter().all(|g| (g - 4.0).abs() < 1e-6 || (g - 0.004).abs() < 1e-6));
    assert_eq!(reducer.bucket_bytes().unwrap().iter().sum::<usize>(), 4 * 101_000);
}

/// Bytes as in sharded training's table of volumes: n is the whole, in elements of 4 bytes.
#[test]
fn what_a_rank_would_send_is_counted() {
    for size in [8, 64, 1024] {
        let group = group(3, size);
        assert!(group.traffic().is_empty());
        let parts = size as i64;
        let whole = |rows: i64| Tensor::zeros([rows * parts, 5], (Kind::Float, Device::Cpu));
        let shard = |rows: i64| whole(rows).narrow(0, 0, rows);
        let bytes = |rows: u64| rows * 5 * 4 * (size as u64 - 1);
        drop(group.all_gather_flat(&shard(2)).unwrap());
        group.all_gather_into(&mut [whole(1), whole(3)], &[shard(1), shard(3)]).unwrap();
        drop(group.reduce_scatter_flat(&whole(2), ReduceOp::Sum).unwrap());
        group
            .reduce_scatter_into(&mut [shard(1), shard(4)], &[whole(1), whole(4)], ReduceOp::Mean)
            .unwrap();
        group.all_reduce(&mut whole(7), ReduceOp::Mean).unwrap();
        group.all_reduce_coalesced(&mut [whole(1), whole(1)], ReduceOp::Sum).unwrap();
        group.barrier().unwrap();
        let sent = |operation: &str| {
            let traffic = group.traffic()[operation];
            (traffic.messages, traffic.bytes)
        };
        assert_eq!(sent("all_gather"), (2, bytes(2 + 4)), "{size} ranks");
        assert_eq!(sent("reduce_scatter"), (2, bytes(2 + 5)), "{size} ranks");
        assert_eq!(sent("all_reduce"), (2, 2 * bytes(7 + 2)), "{size} ranks");
        assert_eq!(sent("barrier"), (1, 0));
        // Groups have separate counters.
        let pair = group.subgroup(&[3, 5]).unwrap().unwrap();
        pair.send(&shard(1), 1, 0).unwrap();
        pair.broadcast(&mut shard(1), 0).unwrap();
        assert_eq!(pair.traffic()["send"].bytes, 20);
        assert_eq!(pair.traffic()["broadcast"].bytes, 20);
        group.reset_traffic();
        assert!(group.traffic().is_empty() && !pair.traffic().is_empty());
        let rows: Vec<i64> = (0..parts).collect();
        let input = Tensor::zeros([rows.iter().sum()], (Kind::Float, Device::Cpu));
        drop(group.all_to_all_flat(&input, &rows, &rows).unwrap());
        let traffic = group.traffic()["all_to_all"];
        assert_eq!(traffic.bytes, 4 * (rows.iter().sum::<i64>() as u64 - 3), "its own rows stay");
    }
}

/// Forward and back, `n` being the bytes of the whole: `2 n (size - 1) / size` for a sum, half of it for a gather, a
/// reduce-scatter and an all-to-all.
#[test]
fn edges_of_regions_send_what_the_table_says() {
    struct Case {
        edge: fn(&ProcessGroup, &Tensor) -> brigade_torch::Result<Tensor>,
        /// Whether a rank has a row of the input, and not all of them.
        is_part: bool,
        /// The messages, forward and back.
        operations: &'static [&'static str],
    }
    let edges = [
        Case { edge: regions::copy_to_region, is_part: false, operations: &["all_reduce"] },
        Case { edge: regions::reduce_from_region, is_part: false, operations: &["all_reduce"] },
        Case {
            edge: |group, x| regions::scatter_to_region(group, x, 0),
            is_part: false,
            operations: &["all_gather"],
        },
        Case {
            edge: |group, x| regions::gather_from_region(group, x, 0),
            is_part: true,
            operations: &["all_gather"],
        },
        Case {
            edge: |group, x| regions::gather_from_sequence_region(group, x, 0),
            is_part: true,
            operations: &["all_gather", "reduce_scatter"],
        },
        Case {
            edge: |group, x| regions::reduce_scatter_to_sequence_region(group, x, 0),
            is_part: false,
            operations: &["reduce_scatter", "all_gather"],
        },
        Case {
            edge: |group, x| regions::all_to_all(group, x, 0, 1),
            is_part: false,
            operations: &["all_to_all", "all_to_all"],
        },
        Case {
            edge: |group, x| {
                let rows = vec![1; group.size()];
                regions::all_to_all_rows(group, x, &rows, &rows)
            },
            is_part: false,
            operations: &["all_to_all", "all_to_all"],
        },
    ];
    for size in [8, 64, 1024] {
        for Case { edge, is_part, operations } in &edges {
            let group = group(1, size);
            let rows = if *is_part { 1 } else { size as i64 };
            let input = Tensor::ones([rows, 6], (Kind::Float, Device::Cpu)).set_requires_grad(true);
            edge(&group, &input).unwrap().sum(Kind::Float).f_backward().unwrap();
            let gathered = 6 * 4 * (size as u64 - 1);
            let mut expected: BTreeMap<String, (u64, u64)> = BTreeMap::new();
            for operation in *operations {
                let bytes = if *operation == "all_reduce" { 2 * gathered } else { gathered };
                let (messages, sum) = expected.entry((*operation).to_owned()).or_default();
                (*messages, *sum) = (*messages + 1, *sum + bytes);
            }
            let found =
                group.traffic().into_iter().map(|(name, it)| (name, (it.messages, it.bytes)));
            let found: BTreeMap<String, (u64, u64)> = found.collect();
            assert_eq!(found, expected, "{size} ranks");
        }
    }
}

/// Keys and values of 2 tokens, 3 heads of 4 numbers: gathered in forward and backward, their gradients scattered; or, in a
/// ring, passed on in forward and in backward, where the gradients go all the way round.
#[test]
fn attention_of_parts_of_a_sequence_sends_keys_and_values() {
    let like = (Kind::Float, Device::Cpu);
    let own = || Tensor::ones([1, 3, 2, 4], like).set_requires_grad(true);
    for size in [8, 64, 1024] {
        let group = group(1, size);
        let part = 2 * (3 * 2 * 4) * 4;
        let others = size as u64 - 1;
        let run = |ring: bool| {
            group.reset_traffic();
            let options = AttentionOptions { causal: true, ..Default::default() };
            let output = context_attention(&group, &own(), &own(), &own(), ring, &options).unwrap();
            let of = |group: &ProcessGroup| {
                let sent = group.traffic().into_iter();
                sent.map(|(name, it)| (name, it.messages, it.bytes)).collect::<Vec<_>>()
            };
            let forward = of(&group);
            group.reset_traffic();
            output.sum(Kind::Float).f_backward().unwrap();
            (forward, of(&group))
        };
        let gathered = |name: &str| (name.to_owned(), 1, part * others);
        let (forward, backward) = run(false);
        assert_eq!(forward, [gathered("all_gather")]);
        assert_eq!(backward, [gathered("all_gather"), gathered("reduce_scatter")]);
        let passed = |messages: u64| ("all_to_all".to_owned(), messages, part * messages);
        let (forward, backward) = run(true);
        assert_eq!(forward, [passed(others)]);
        assert_eq!(backward, [passed(others + others + 1)]);
    }
}

/// Three numbers for each row that counts, a fourth one with label smoothing, and no logits.
#[test]
fn a_divided_vocabulary_sends_a_few_numbers_for_each_row() {
    const ROWS: i64 = 300;
    const IGNORED: i64 = 20;
    // A chunk has 256 rows of them: 128 MiB.
    const PART: i64 = 1 << 17;
    const WIDTH: i64 = 2;
    let like = (Kind::Float, Device::Cpu);
    let ids = Tensor::arange(ROWS, (Kind::Int64, Device::Cpu));
    let targets = ids.copy();
    let _ = targets.narrow(0, 7, IGNORED).fill_(-100);
    let hidden = Tensor::ones([ROWS, WIDTH], like).set_requires_grad(true);
    let weight = Tensor::ones([PART, WIDTH], like).set_requires_grad(true);
    let few = Tensor::ones([ROWS, 5], like).set_requires_grad(true);
    for size in [8, 64, 1024] {
        let group = group(1, size);
        let sent = |operation: &str| {
            let all = group.traffic();
            assert!(all.keys().all(|name| name == operation), "{all:?}");
            let traffic = all.get(operation).copied().unwrap_or_default();
            group.reset_traffic();
            (traffic.messages, traffic.bytes)
        };
        let peers = size as u64 - 1;
        let counted = (ROWS - IGNORED) as u64;
        let part = VocabularyPart::even(PART * size as i64, 1, size).unwrap();
        for (label_smoothing, numbers) in [(0.0, 3), (0.1, 4)] {
            let options =
                CrossEntropyOptions { label_smoothing, z_loss: 0.1, ..Default::default() };
            let found = linear_vocabulary_parallel_cross_entropy(
                &group,
                &regions::copy_to_region(&group, &hidden).unwrap(),
                &weight,
                None,
                &targets,
                part,
                &options,
            )
            .unwrap();
            assert_eq!(sent("all_gather"), (2, counted * numbers * 8 * peers), "{size} ranks");
            // Back: the sum of the gradient of `hidden`.
            found.loss.f_backward().unwrap();
            let gradient = (ROWS * WIDTH * 4) as u64;
            assert_eq!(sent("all_reduce"), (1, 2 * gradient * peers / size as u64), "{size} ranks");

            let part = VocabularyPart::even(5 * size as i64, 1, size).unwrap();
            let targets = targets.clamp_max(5 * size as i64 - 1);
            let found =
                vocabulary_parallel_cross_entropy(&group, &few, &targets, part, &options).unwrap();
            assert_eq!(sent("all_gather"), (1, counted * numbers * 8 * peers), "{size} ranks");
            found.loss.f_backward().unwrap();
            assert_eq!(sent("none back"), (0, 0));
        }
        let rows = vocabulary_parallel_embedding(&group, &ids, &weight, part, None).unwrap();
        let bytes = (ROWS * WIDTH * 4) as u64;
        assert_eq!(sent("all_reduce"), (1, 2 * bytes * peers / size as u64), "{size} ranks");
        rows.sum(Kind::Float).f_backward().unwrap();
        assert_eq!(sent("none back"), (0, 0));
        let part = VocabularyPart::even(5 * size as i64, 1, size).unwrap();
        drop(region_argmax(&group, &few, part).unwrap());
        assert_eq!(sent("all_gather"), (1, ROWS as u64 * 16 * peers), "{size} ranks");
        drop(region_top_k(&group, &few, part, 3).unwrap());
        assert_eq!(sent("all_gather"), (1, ROWS as u64 * 48 * peers), "{size} ranks");
    }
}
