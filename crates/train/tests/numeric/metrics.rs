//! Every sample counts exactly once, whatever the sizes, the mode and the loop around it.

use brigade_data::{DataLoader, StreamLoader, TensorDataset, stream_from_fn};
use brigade_test_device::numeric_device;
use brigade_testkit::{World, dist_test};
use brigade_torch::Result;
use brigade_train::Accelerator;
use tch::{Kind, Tensor};

use crate::device::builder;

/// The numbers 0..n as a data set.
fn numbers(n: i64) -> TensorDataset<Tensor> {
    TensorDataset::new(Tensor::arange(n, (Kind::Int64, tch::Device::Cpu))).unwrap()
}

fn values(tensor: &Tensor) -> Vec<i64> {
    Vec::try_from(tensor).unwrap()
}

/// Gathers an epoch and checks that each number came once, in order when unshuffled.
fn each_once(accelerator: &Accelerator, n: i64, batch_size: usize, shuffle: bool) -> Result<()> {
    let loader = DataLoader::new(numbers(n)).batch_size(batch_size).shuffle(shuffle).threads(1);
    let loader = accelerator.prepare(loader)?;
    for _epoch in 0..2 {
        let mut seen = Vec::new();
        for batch in &loader {
            let batch = batch?;
            let gathered = accelerator.gather_for_metrics(&batch, &*batch)?;
            seen.extend(values(&gathered));
        }
        if shuffle {
            seen.sort_unstable();
        }
        let expected: Vec<i64> = (0..n).collect();
        assert_eq!(seen, expected, "n {n}, batch size {batch_size}, {accelerator:?}");
    }
    Ok(())
}

fn sweep(accelerator: &Accelerator, batch_sizes: &[usize]) -> Result<()> {
    for n in [1, 2, 3, 5, 8, 12, 13, 31] {
        for &batch_size in batch_sizes {
            for shuffle in [false, true] {
                each_once(accelerator, n, batch_size, shuffle)?;
            }
        }
    }
    Ok(())
}

#[test]
fn alone() {
    sweep(&builder().build().unwrap(), &[1, 3, 4]).unwrap();
}

dist_test!(world = 2, dist_two_ranks, |_world: World| -> Result<()> {
    let plain = builder().build()?;
    sweep(&plain, &[1, 3, 4])?;
    let split = Accelerator::builder().sharing(&plain).split_batches(true).build()?;
    sweep(&split, &[2, 4])?;
    let dispatched = Accelerator::builder().sharing(&plain).dispatch_batches(true).build()?;
    sweep(&dispatched, &[1, 3, 4])
});

dist_test!(world = 3, dist_three_ranks, |_world: World| -> Result<()> {
    let plain = builder().build()?;
    sweep(&plain, &[1, 2, 5])?;
    let dispatched = Accelerator::builder().sharing(&plain).dispatch_batches(true).build()?;
    sweep(&dispatched, &[1, 2, 5])
});

dist_test!(
    world = 2,
    dist_uneven_batches_count_once_or_say_why_not,
    |world: World| -> Result<()> {
        let accelerator = builder().even_batches(false).build()?;
        // 7 in batches of 3 on two ranks: 3 + 3, then 1 on rank 0 and none on rank 1.
        let loader = accelerator.prepare(DataLoader::new(numbers(7)).batch_size(3))?;
        let mut rounds = 0;
        for batch in &loader {
            let batch = batch?;
            rounds += 1;
            let outcome = accelerator.gather_for_metrics(&batch, &*batch);
            match batch.index() {
                0 => assert_eq!(values(&outcome?), [0, 1, 2, 3, 4, 5]),
                _ => {
                    let text = outcome.unwrap_err().to_string();
                    assert!(text.contains("rank 1 has no batch"), "{text}");
                }
            }
        }
        assert_eq!(rounds, if world.rank.as_usize() == 0 { 2 } else { 1 });
        // 5 in batches of 3: 3 and 2, of unequal length, but both there.
        let loader = accelerator.prepare(DataLoader::new(numbers(5)).batch_size(3))?;
        for batch in &loader {
            let batch = batch?;
            let gathered = accelerator.gather_for_metrics(&batch, &*batch)?;
            assert_eq!(values(&gathered), [0, 1, 2, 3, 4]);
        }
        Ok(())
    }
);

dist_test!(
    world = 2,
    dist_nested_loops_breaks_and_skips_change_nothing,
    |_world: World| -> Result<()> {
        let accelerator = builder().build()?;
        let outer = accelerator.prepare(DataLoader::new(numbers(9)).batch_size(2))?;
        let inner = accelerator.prepare(DataLoader::new(numbers(5)).batch_size(2))?;
        let mut seen = Vec::new();
        for batch in &outer {
            let batch = batch?;
            // One batch of the inner loop, then a break.
            if let Some(evaluated) = inner.iter().next() {
                let evaluated = evaluated?;
                let gathered = accelerator.gather_for_metrics(&evaluated, &*evaluated)?;
                assert_eq!(gathered.numel(), evaluated.round().total_valid());
            }
            seen.extend(values(&accelerator.gather_for_metrics(&batch, &*batch)?));
        }
        assert_eq!(seen, (0..9).collect::<Vec<_>>());

        outer.skip_first_batches(1);
        let mut seen = Vec::new();
        for batch in &outer {
            let batch = batch?;
            seen.extend(values(&accelerator.gather_for_metrics(&batch, &*batch)?));
        }
        assert_eq!(seen, (4..9).collect::<Vec<_>>());
        Ok(())
    }
);

dist_test!(world = 2, dist_objects_count_once, |_world: World| -> Result<()> {
    let accelerator = builder().build()?;
    let loader = accelerator.prepare(DataLoader::new(numbers(5)).batch_size(2))?;
    let mut seen = Vec::new();
    for batch in &loader {
        let batch = batch?;
        let names: Vec<String> = values(&batch).iter().map(|n| format!("sample {n}")).collect();
        seen.extend(accelerator.processes().gather_objects_for_metrics(&batch, names)?);
    }
    assert_eq!(seen, (0..5).map(|n| format!("sample {n}")).collect::<Vec<_>>());
    Ok(())
});

#[test]
fn a_value_that_is_not_per_sample_is_refused() {
    let accelerator = builder().build().unwrap();
    let loader = accelerator.prepare(DataLoader::new(numbers(4)).batch_size(4)).unwrap();
    let batch = loader.iter().next().unwrap().unwrap();
    let scalar = accelerator
        .gather_for_metrics(&batch, &Tensor::from(1.0).to_device(numeric_device()))
        .unwrap_err();
    assert!(scalar.to_string().contains("one row for each of the batch's 4 samples"), "{scalar}");
    let longer = Tensor::zeros([5, 2], (Kind::Float, numeric_device()));
    assert!(accelerator.gather_for_metrics(&batch, &longer).is_err());
}

/// The numbers 0..n as a stream, whose length is not known before its end.
fn stream_each_once(accelerator: &Accelerator, n: i64, batch_size: usize) -> Result<()> {
    let stream = stream_from_fn(move |_epoch, _seed| (0..n).map(Ok));
    let loader = accelerator.prepare(StreamLoader::new(stream).batch_size(batch_size))?;
    for _epoch in 0..2 {
        let mut seen = Vec::new();
        for batch in &loader {
            let batch = batch?;
            seen.extend(values(&accelerator.gather_for_metrics(&batch, &*batch)?));
        }
        assert_eq!(seen, (0..n).collect::<Vec<i64>>(), "n {n}, batch size {batch_size}");
    }
    Ok(())
}

dist_test!(world = 2, dist_streams_count_once, |_world: World| -> Result<()> {
    let plain = builder().build()?;
    let dispatched = Accelerator::builder().sharing(&plain).dispatch_batches(true).build()?;
    for accelerator in [&plain, &dispatched] {
        for n in [1, 4, 7, 13] {
            stream_each_once(accelerator, n, 3)?;
        }
    }
    Ok(())
});
