//! Comparison of the plans with tables made with PyTorch, Accelerate and fastai.

use std::fs;
use std::path::Path;

use brigade_sampling::{Order, Scheme, ShardOptions, Shards, StreamShard};
use serde_json::Value;

fn table(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Returns the cases of a table of shards, whose number is checked.
fn cases(name: &str, count: usize) -> Vec<Value> {
    let cases = table(name)["cases"].as_array().unwrap().clone();
    assert_eq!(cases.len(), count);
    cases
}

fn number(case: &Value, key: &str) -> usize {
    case[key].as_u64().unwrap() as usize
}

fn flag(case: &Value, key: &str) -> bool {
    case[key].as_bool().unwrap()
}

fn deal(case: &Value, batch_size: usize, options: ShardOptions) -> Shards {
    let order = Order::Sequential(number(case, "n"));
    Shards::new(order, batch_size, number(case, "world"), options).unwrap()
}

/// Batches by rank and position.
fn indices(shards: &Shards) -> Vec<Vec<Vec<usize>>> {
    (0..shards.world()).map(|rank| shards.rank(rank).map(|batch| batch.indices).collect()).collect()
}

#[test]
fn accelerate_batch_sampler_shard() {
    for case in cases("batch_sampler_shard.json", 800) {
        let options = ShardOptions {
            split_batches: flag(&case, "split_batches"),
            even_batches: flag(&case, "even_batches"),
            drop_last: flag(&case, "drop_last"),
            ..Default::default()
        };
        let shards = deal(&case, number(&case, "batch_size"), options);
        assert_eq!(serde_json::to_value(indices(&shards)).unwrap(), case["shards"], "{case}");
    }
}

#[test]
fn torch_distributed_sampler() {
    for case in cases("distributed_sampler.json", 64) {
        // The sampler does not depend on batches: whatever their size, together they are its samples.
        for batch_size in [1, 3, 64] {
            let options = ShardOptions {
                scheme: Scheme::Torch,
                drop_tail: flag(&case, "drop_last"),
                ..Default::default()
            };
            let shards = indices(&deal(&case, batch_size, options));
            let flat: Vec<Vec<usize>> = shards.iter().map(|rank| rank.concat()).collect();
            assert_eq!(serde_json::to_value(flat).unwrap(), case["shards"], "{case}");
            assert!(
                shards.iter().all(|rank| rank.iter().rev().skip(1).all(|b| b.len() == batch_size))
            );
        }
    }
}

#[test]
fn fastai_distributed_dl() {
    for case in cases("distributed_dl.json", 48) {
        let options = ShardOptions {
            scheme: Scheme::Fastai,
            drop_last: flag(&case, "drop_last"),
            ..Default::default()
        };
        let shards = deal(&case, number(&case, "batch_size"), options);
        assert_eq!(serde_json::to_value(indices(&shards)).unwrap(), case["shards"], "{case}");
    }
}

#[test]
fn accelerate_iterable_dataset_shard() {
    for case in cases("iterable_dataset_shard.json", 400) {
        let options = ShardOptions {
            split_batches: flag(&case, "split_batches"),
            drop_last: flag(&case, "drop_last"),
            ..Default::default()
        };
        let (batch_size, world) = (number(&case, "batch_size"), number(&case, "world"));
        let shards: Vec<Vec<usize>> = (0..world)
            .map(|rank| {
                let mut shard = StreamShard::new(batch_size, rank, world, options).unwrap();
                let mut items = Vec::new();
                for item in 0..number(&case, "n") {
                    items.extend(shard.push(item).into_iter().flat_map(|batch| batch.items));
                }
                items.extend(shard.finish().into_iter().flat_map(|batch| batch.items));
                items
            })
            .collect();
        assert_eq!(serde_json::to_value(shards).unwrap(), case["shards"], "{case}");
    }
}
