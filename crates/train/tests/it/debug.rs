//! Debug mode: ranks that run different operations are named, instead of being waited for.

use std::time::{Duration, Instant};

use brigade_nn::{Linear, Model, ParamPath};
use brigade_testkit::{World, dist_test};
use brigade_torch::{Error, ReduceOp, Result, TorchError};
use brigade_train::Accelerator;
use tch::{Device, Kind, Tensor};

const LIMIT: Duration = Duration::from_secs(3);

fn debugged() -> Result<Accelerator> {
    Accelerator::builder().timeout(LIMIT).debug(true).build()
}

fn numbers(shape: &[i64]) -> Tensor {
    Tensor::ones(shape, (Kind::Float, Device::Cpu))
}

fn text<T>(outcome: Result<T>) -> String {
    match outcome {
        Err(error) if matches!(error.downcast_ref(), Some(TorchError::Desync(_))) => {
            error.to_string()
        }
        Err(other) => panic!("another error: {other}"),
        Ok(_) => panic!("no error"),
    }
}

fn has(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "no {word:?} in: {text}");
    }
}

dist_test!(world = 3, dist_another_operation, |_world: World| -> Result<()> {
    let accelerator = debugged()?;
    let gathered = accelerator.processes().gather(&numbers(&[2]))?;
    assert_eq!(gathered.size(), [6]);
    accelerator.processes().wait_for_everyone()?;
    accelerator.processes().on_main_process(|| Ok::<_, Error>(()))?;
    let outcome = match accelerator.processes().process_index() {
        1 => accelerator.processes().broadcast(&numbers(&[4]), 0),
        _ => accelerator.processes().reduce(&numbers(&[2, 3]), ReduceOp::Sum),
    };
    has(
        &text(outcome),
        &[
            "ranks 0, 2 are in all_reduce Sum of float32 [2, 3] at crates/train/tests/it/debug.rs:",
            "; rank 1 is in broadcast 0 of float32 [4] at crates/train/tests/it/debug.rs:",
        ],
    );
    Ok(())
});

dist_test!(world = 2, dist_another_shape_kind_or_place, |_world: World| -> Result<()> {
    let accelerator = debugged()?;
    let first = accelerator.processes().process_index() == 0;
    let shape: &[i64] = if first { &[2] } else { &[3] };
    has(
        &text(accelerator.processes().gather(&numbers(shape))),
        &["float32 [2] at", "rank 1", "float32 [3] at"],
    );
    let kind = if first { Kind::Float } else { Kind::Double };
    let outcome = accelerator.processes().gather(&numbers(&[2]).to_kind(kind));
    has(&text(outcome), &["float32 [2]", "float64 [2]"]);
    // The same operation from two lines of the program: probably sums of different values.
    let outcome = match accelerator.processes().process_index() {
        0 => accelerator.processes().reduce(&numbers(&[2]), ReduceOp::Mean),
        _ => accelerator.processes().reduce(&numbers(&[1 + 1]), ReduceOp::Mean),
    };
    let text = text(outcome);
    let lines: Vec<&str> =
        text.match_indices("debug.rs:").map(|(at, _)| &text[at..at + 12]).collect();
    assert!(lines.len() == 2 && lines[0] != lines[1], "{text}");
    // No rank has started an operation: the group can still be used.
    assert!(accelerator.processes().check_trigger().is_ok());
    Ok(())
});

dist_test!(world = 2, dist_a_rank_that_does_not_come, |_world: World| -> Result<()> {
    let accelerator = debugged()?;
    accelerator.processes().wait_for_everyone()?;
    let begun = Instant::now();
    if accelerator.processes().process_index() == 0 {
        let text = text(accelerator.processes().gather(&numbers(&[2])));
        has(
            &text,
            &[
                "rank 0 is in all_gather_flat",
                "rank 1 reached no operation within 3s",
                "its last was barrier at crates/train/tests/it/debug.rs:",
            ],
        );
        assert!(begun.elapsed() >= LIMIT);
        // Rank 1 may end.
        accelerator.processes().group().unwrap().store().set("done", b"1").unwrap();
    } else {
        accelerator
            .processes()
            .group()
            .unwrap()
            .store()
            .wait(&["done"], Duration::from_secs(60))
            .unwrap();
    }
    Ok(())
});

dist_test!(world = 2, dist_training, |_world: World| -> Result<()> {
    let accelerator = debugged()?;
    let model = accelerator.prepare(Model::new(|p: &ParamPath<'_>| Linear::new(p, 4, 10))?)?;
    let images = numbers(&[2, 4]);
    let labels = Tensor::zeros([2], (Kind::Int64, Device::Cpu));
    for step in 0..4 {
        let loss = model.forward(&images)?.cross_entropy_for_logits(&labels);
        accelerator.backward(&loss)?;
        let _ = accelerator.processes().reduce(&loss, ReduceOp::Mean)?;
        accelerator.no_sync(&model, || {
            // Not the same number of times, and nothing is sent, once the order of the buckets is.
            for _ in 0..(step / 2) * accelerator.processes().process_index() {
                let loss = model.forward(&images)?.cross_entropy_for_logits(&labels);
                accelerator.backward(&loss)?;
            }
            Ok(())
        })?;
    }
    let loss = model.forward(&images)?.cross_entropy_for_logits(&labels);
    let outcome = match accelerator.processes().process_index() {
        0 => accelerator.backward(&loss),
        _ => accelerator.processes().gather(&loss).map(drop),
    };
    has(
        &text(outcome),
        &["rank 0 is in backward at", "rank 1 is in all_gather_flat of float32 [1]"],
    );
    Ok(())
});
