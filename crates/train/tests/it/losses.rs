//! Losses that are infinite or not a number: an error on every rank, before a weight changes.

use brigade_checkpoint::Value;
use brigade_nn::Model;
use brigade_optim::Sgd;
use brigade_testkit::{World, dist_test, step};
use brigade_torch::{ReducerOptions, Result};
use brigade_train::{
    Accelerator, AcceleratorBuilder, CommHook, GradientAccumulationOptions, JoinInputs, PowerSgd,
    Precision, PreparedModel, PreparedOptimizer, TrainError,
};
use tch::{Kind, Tensor};

use brigade_data::{DataLoader, TensorDataset};

use crate::net::{self, Net, weights};

const NAN: f64 = f64::NAN;

fn builder() -> AcceleratorBuilder {
    Accelerator::builder().cpu(true).quiet(true)
}

fn objects(accelerator: &Accelerator) -> Result<(PreparedModel<Net>, PreparedOptimizer)> {
    let model = net::model(Kind::Float);
    let optimizer = Sgd::new(0.1).momentum(0.9).build(&model)?;
    accelerator.prepare((model, optimizer))
}

/// The loss of a batch whose values are all the same.
fn loss(model: &PreparedModel<Net>, value: f64) -> Result<Tensor> {
    let input = Tensor::full([2, 5], value, tch::kind::FLOAT_CPU);
    Ok(model.forward(&input)?.square().mean(Kind::Float))
}

fn train(
    accelerator: &Accelerator,
    model: &PreparedModel<Net>,
    optimizer: &mut PreparedOptimizer,
    value: f64,
) -> Result<()> {
    accelerator.backward(&loss(model, value)?)?;
    optimizer.step()?;
    optimizer.zero_grad()
}

/// Rank, step, and whether weights are corrupted.
fn found(outcome: Result<()>) -> Option<(usize, Option<u64>, bool)> {
    let error = outcome.err()?;
    match error.downcast_ref() {
        Some(TrainError::LossNotFinite { rank, step, weights_corrupted }) => {
            Some((rank.expect("a rank has reported it"), *step, *weights_corrupted))
        }
        _ => panic!("another error: {error}"),
    }
}

fn finite<M>(model: &Model<M>) -> bool {
    weights(model).iter().all(|weight| weight.is_finite())
}

#[test]
fn alone_it_is_seen_before_the_backward() {
    for precision in [Precision::No, Precision::Bf16] {
        let accelerator = builder().mixed_precision(precision).build().unwrap();
        let (model, mut optimizer) = objects(&accelerator).unwrap();
        train(&accelerator, &model, &mut optimizer, 1.0).unwrap();
        let before = weights(model.inner());
        for value in [NAN, f64::INFINITY] {
            // The hidden layer would turn an infinity into a finite number.
            let wrong = loss(&model, 1.0).unwrap() * value;
            assert_eq!(found(accelerator.backward(&wrong)), Some((0, Some(2), false)));
            let parameter = &model.inner().parameters()[0].tensor;
            assert!(brigade_torch::gradient(parameter).unwrap().is_none());
        }
        let text = accelerator.backward(&loss(&model, NAN).unwrap()).unwrap_err().to_string();
        let expected = "the loss of optimizer step 2 was infinite or NaN on rank 0, and no weight was \
                        changed; look at";
        assert!(text.starts_with(expected), "{text}");
        optimizer.step().unwrap();
        assert_eq!(weights(model.inner()), before, "there was no gradient");
        train(&accelerator, &model, &mut optimizer, 1.0).unwrap();
        assert_ne!(weights(model.inner()), before);
        let two = Tensor::ones([2], tch::kind::FLOAT_CPU).set_requires_grad(true);
        let error = accelerator.backward(&two).unwrap_err().to_string();
        assert!(error.contains("scalar"), "no loss: {error}");
    }
}

#[test]
fn corrupted_weights_are_reported_as_such() {
    let accelerator = builder().build().unwrap();
    let (model, mut optimizer) = objects(&accelerator).unwrap();
    // A finite loss with a gradient that is not finite.
    let sound = (loss(&model, 1.0).unwrap() * 0.0).sqrt();
    accelerator.backward(&sound).unwrap();
    optimizer.step().unwrap();
    optimizer.zero_grad().unwrap();
    let error = accelerator.backward(&loss(&model, 1.0).unwrap()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("and so are weights by now; load an earlier checkpoint"), "{text}");
    assert_eq!(found(Err(error)), Some((0, Some(2), true)));
}

#[test]
fn it_can_be_turned_off_and_a_loss_scaler_has_its_own_way() {
    for builder in [builder().check_loss(false), builder().mixed_precision(Precision::Fp16)] {
        let accelerator = builder.build().unwrap();
        let (model, mut optimizer) = objects(&accelerator).unwrap();
        train(&accelerator, &model, &mut optimizer, NAN).unwrap();
        assert_eq!(finite(model.inner()), accelerator.grad_scaler().is_some());
    }
}

#[test]
fn a_deferred_check_reports_one_step_later() {
    let accelerator = builder().check_loss_later(true).build().unwrap();
    let (model, mut optimizer) = objects(&accelerator).unwrap();
    let mut told = Vec::new();
    for value in [1.0, NAN, 1.0] {
        told.push(found(train(&accelerator, &model, &mut optimizer, value)));
    }
    assert_eq!(told, [None, None, Some((0, Some(2), true))]);
}

dist_test!(world = 2, dist_every_rank_gets_the_same_error, |world: World| -> Result<()> {
    let first = builder().build()?;
    let rank = world.rank.as_usize();
    let sharing = || builder().sharing(&first);
    let graph = |static_graph, find_unused_parameters| ReducerOptions {
        static_graph,
        find_unused_parameters,
        ..ReducerOptions::default()
    };
    let builders = [
        sharing(),
        sharing().mixed_precision(Precision::Bf16),
        sharing().reducer(graph(true, false)),
        sharing().reducer(graph(false, true)),
    ];
    for (number, builder) in builders.into_iter().enumerate() {
        step!("builder {number}");
        let accelerator = builder.build()?;
        let (model, mut optimizer) = objects(&accelerator)?;
        train(&accelerator, &model, &mut optimizer, 0.5)?;
        let before = weights(model.inner());
        for (wrong, named) in [([1.0, NAN], Some(1)), ([NAN, 1.0], Some(0)), ([NAN, NAN], None)] {
            let outcome = train(&accelerator, &model, &mut optimizer, wrong[rank]);
            let outcome = found(outcome);
            // Of several ranks, the first that reported it, and the same one on all ranks.
            let all = accelerator.processes().gather_object(outcome)?;
            assert_eq!(all[0], all[1]);
            let named = named.or_else(|| outcome.map(|(rank, ..)| rank)).unwrap();
            assert_eq!(outcome, Some((named, Some(2), false)));
            assert!(accelerator.optimizer_step_was_skipped(), "a schedule stays");
            assert_eq!(found(optimizer.step()), Some((named, Some(2), false)), "still there");
            optimizer.zero_grad()?;
        }
        assert_eq!(weights(model.inner()), before);
        // The batches can be skipped.
        train(&accelerator, &model, &mut optimizer, 0.7)?;
        assert!(!accelerator.optimizer_step_was_skipped());
        let (other, mut others) = objects(&accelerator)?;
        for value in [0.5, 0.7] {
            train(&accelerator, &other, &mut others, value)?;
        }
        assert_eq!(weights(model.inner()), weights(other.inner()));
        assert_eq!(optimizer.steps()?, 2);
    }
    Ok(())
});

dist_test!(world = 2, dist_a_batch_that_is_not_reduced_counts, |world: World| -> Result<()> {
    let first = builder().build()?;
    let rank = world.rank.as_usize();
    for sync_each_batch in [false, true] {
        let settings = GradientAccumulationOptions {
            steps: 2,
            sync_each_batch,
            ..GradientAccumulationOptions::default()
        };
        let accelerator = builder().sharing(&first).gradient_accumulation(settings).build()?;
        let (model, mut optimizer) = objects(&accelerator)?;
        let rows = Tensor::arange(16 * 5, tch::kind::FLOAT_CPU).sin().view([16, 5]);
        // Rank 1's first row of the second window: batches of 2 rows in turn.
        let _ = rows.get(8 + 2).fill_(NAN);
        let loader = DataLoader::new(TensorDataset::new(rows).unwrap()).batch_size(2);
        let loader = accelerator.prepare(loader)?;
        let mut seen = Vec::new();
        for batch in &loader {
            let batch = batch?;
            let holds = batch.isnan().any().int64_value(&[]) != 0;
            let before = weights(model.inner());
            let outcome = accelerator.accumulate(&model, &batch, || {
                let loss = model.forward(&batch)?.square().mean(Kind::Float);
                accelerator.backward(&loss)?;
                optimizer.step()?;
                optimizer.zero_grad()
            });
            let found = found(outcome);
            if found.is_some() {
                assert_eq!(weights(model.inner()), before);
                optimizer.zero_grad()?;
            }
            seen.push((holds, found));
        }
        let error = Some((1, Some(2), false));
        // All ranks get the error with the next reduction.
        let first = if sync_each_batch { error } else { None };
        assert_eq!(seen, [(false, None), (false, None), (rank == 1, first), (false, error)]);
        assert_eq!(optimizer.steps()?, 1);
        assert!(finite(model.inner()));
    }
    Ok(())
});

dist_test!(world = 2, dist_without_the_check_training_continues, |world: World| -> Result<()> {
    let accelerator = builder().check_loss(false).build()?;
    let (model, mut optimizer) = objects(&accelerator)?;
    let value = if world.rank.as_usize() == 1 { NAN } else { 1.0 };
    train(&accelerator, &model, &mut optimizer, value)?;
    assert!(!finite(model.inner()));
    Ok(())
});

dist_test!(world = 2, dist_two_models_and_two_optimizers, |world: World| -> Result<()> {
    let accelerator = builder().build()?;
    let (one, mut first) = objects(&accelerator)?;
    let (two, mut second) = objects(&accelerator)?;
    let wrong = if world.rank.as_usize() == 1 { NAN } else { 1.0 };
    let before = weights(one.inner());
    // Both forwards, then both backwards; the second optimizer's gradients are cleared between them.
    let (a, b) = (loss(&one, wrong)?, loss(&two, 1.0)?);
    assert_eq!(found(accelerator.backward(&a)), Some((1, Some(1), false)));
    second.zero_grad()?;
    accelerator.backward(&b)?;
    assert_eq!(found(first.step()), Some((1, Some(1), false)));
    assert_eq!(found(second.step()), None);
    assert_eq!(weights(one.inner()), before);
    assert_ne!(weights(two.inner()), before);
    first.zero_grad()?;
    second.zero_grad()?;
    // One loss of both, and a finite one after it.
    let both = loss(&one, wrong)? + loss(&two, 1.0)?;
    assert_eq!(found(accelerator.backward(&both)), Some((1, Some(2), false)));
    let sound = loss(&two, 1.0)?;
    assert_eq!(found(accelerator.backward(&sound)), Some((1, Some(2), false)), "still there");
    assert_eq!(found(second.step()), Some((1, Some(2), false)));
    assert_eq!(found(first.step()), Some((1, Some(1), false)));
    first.zero_grad()?;
    second.zero_grad()?;
    // The model that no loss has reached yet in the backward's place.
    accelerator.backward(&loss(&two, 1.0)?)?;
    second.step()?;
    first.step()?;
    assert!(finite(one.inner()) && finite(two.inner()));
    Ok(())
});

dist_test!(world = 2, dist_an_optimizer_that_is_not_prepared, |world: World| -> Result<()> {
    let accelerator = builder().build()?;
    let model = net::model(Kind::Float);
    let _optimizer = Sgd::new(0.1).build(&model)?;
    let model = accelerator.prepare(model)?;
    let wrong = if world.rank.as_usize() == 1 { NAN } else { 1.0 };
    let first = loss(&model, wrong)?;
    assert_eq!(found(accelerator.backward(&first)), Some((1, None, false)));
    // A model that is not prepared concerns only its own rank.
    drop((first, model));
    let alone = Tensor::from(1f32).set_requires_grad(true);
    let outcome = accelerator.backward(&(&alone * wrong));
    assert_eq!(found(outcome).is_some(), world.rank.as_usize() == 1);
    Ok(())
});

dist_test!(world = 2, dist_a_gradient_that_overflows_alone, |world: World| -> Result<()> {
    // The loss is finite, its gradient is not: as on a rank whose program does not check losses.
    let accelerator = builder().build()?;
    let (model, mut optimizer) = objects(&accelerator)?;
    train(&accelerator, &model, &mut optimizer, 0.5)?;
    let before = weights(model.inner());
    let mut sound = loss(&model, 1.0)?;
    if world.rank.as_usize() == 1 {
        // 0, with the slope of a root there.
        sound = (sound * 0.0).sqrt();
    }
    let error = accelerator.backward(&sound).unwrap_err();
    match error.downcast_ref() {
        Some(TrainError::LossNotFinite { rank: None, step: Some(2), weights_corrupted: false }) => {
        }
        _ => panic!("{error}"),
    }
    assert_eq!(weights(model.inner()), before);
    let text = accelerator.backward(&loss(&model, 1.0)?).unwrap_err().to_string();
    assert!(text.contains("although no rank has reported"), "{text}");
    optimizer.zero_grad()?;
    train(&accelerator, &model, &mut optimizer, 0.5)?;
    assert!(finite_weights(&model));
    Ok(())
});

dist_test!(world = 2, dist_a_batch_is_left_out_under_every_hook, |world: World| -> Result<()> {
    let first = builder().build()?;
    let rank = world.rank.as_usize();
    let power = PowerSgd { start_iteration: 2, min_compression_rate: 0.1, ..PowerSgd::default() };
    for hook in [CommHook::Fp16, CommHook::Bf16, CommHook::PowerSgd(power)] {
        step!("{hook:?}");
        let accelerator = builder().sharing(&first).comm_hook(hook).build()?;
        let (model, mut optimizer) = objects(&accelerator)?;
        for value in [0.5, 0.6, 0.7] {
            train(&accelerator, &model, &mut optimizer, value)?;
        }
        let before = weights(model.inner());
        let outcome = train(&accelerator, &model, &mut optimizer, [1.0, NAN][rank]);
        assert_eq!(found(outcome), Some((1, Some(4), false)));
        optimizer.zero_grad()?;
        assert_eq!(weights(model.inner()), before);
        // The hook's state is finite again.
        for value in [0.5, 0.6] {
            train(&accelerator, &model, &mut optimizer, value)?;
        }
        assert!(finite_weights(&model));
        assert_ne!(weights(model.inner()), before);
    }
    Ok(())
});

fn finite_weights(model: &PreparedModel<Net>) -> bool {
    finite(model.inner())
}

dist_test!(world = 2, dist_in_a_join, |world: World| -> Result<()> {
    let accelerator = builder().build()?;
    let (model, mut optimizer) = objects(&accelerator)?;
    let rank = world.rank.as_usize();
    // Rank 0 has one batch. Rank 1 skips a bad one and continues: rank 0 shadows it to the end.
    let mine: &[f64] = if rank == 0 { &[0.5] } else { &[0.5, NAN, 0.7] };
    let mut left_out = 0;
    accelerator.join_uneven_inputs(&model, JoinInputs::default(), || {
        for &value in mine {
            if found(train(&accelerator, &model, &mut optimizer, value)).is_some() {
                left_out += 1;
                optimizer.zero_grad()?;
            }
        }
        Ok(())
    })?;
    assert_eq!(left_out, rank);
    assert!(finite(model.inner()));
    step!("rank 1 stops");
    let outcome = accelerator.join_uneven_inputs(&model, JoinInputs::default(), || {
        mine.iter().try_for_each(|&value| train(&accelerator, &model, &mut optimizer, value))
    });
    let (named, step, corrupted) = found(outcome).unwrap();
    assert_eq!((named, corrupted), (1, false));
    assert_eq!(step.is_some(), rank == 1, "rank 0 makes no such step");
    Ok(())
});

dist_test!(world = 2, dist_in_a_join_with_windows, |world: World| -> Result<()> {
    let accelerator = builder().build()?;
    let (model, mut optimizer) = objects(&accelerator)?;
    // Rank 0 has the first window, and passes the others' batches that are not reduced.
    let all = [0.5, 0.6, 0.7, 0.8, 0.9, NAN];
    let mine = if world.rank.as_usize() == 0 { &all[..2] } else { &all[..] };
    let outcome = accelerator.join_uneven_inputs(&model, JoinInputs::default(), || {
        mine.chunks(2).try_for_each(|window| {
            let unreduced = || accelerator.backward(&loss(&model, window[0])?);
            accelerator.no_sync(&model, unreduced)?;
            train(&accelerator, &model, &mut optimizer, window[1])
        })
    });
    let (named, _, corrupted) = found(outcome).unwrap();
    assert_eq!((named, corrupted), (1, false));
    Ok(())
});

dist_test!(world = 2, dist_in_a_join_of_several_models, |world: World| -> Result<()> {
    let first = builder().build()?;
    let power = PowerSgd { start_iteration: 2, min_compression_rate: 0.1, ..PowerSgd::default() };
    for (number, hook) in [CommHook::None, CommHook::PowerSgd(power)].into_iter().enumerate() {
        step!("{hook:?}");
        let accelerator = builder().sharing(&first).comm_hook(hook).build()?;
        let (a, mut of_a) = objects(&accelerator)?;
        let (b, mut of_b) = objects(&accelerator)?;
        // Rank 0 has three batches. Rank 1 continues when one of its own is skipped for the second model.
        let all = [0.5, 0.6, 0.7, 0.8, NAN, 0.9, 1.0];
        let mine = if world.rank.as_usize() == 0 { &all[..3] } else { &all[..] };
        accelerator.join_uneven_inputs(&(&a, &b), JoinInputs::default(), || {
            for &value in mine {
                let sound = if value.is_nan() { 0.5 } else { value };
                train(&accelerator, &a, &mut of_a, sound)?;
                let outcome = found(train(&accelerator, &b, &mut of_b, value));
                assert_eq!(outcome.map(|(rank, ..)| rank), value.is_nan().then_some(1));
                of_b.zero_grad()?;
            }
            Ok(())
        })?;
        for model in [&a, &b] {
            assert!(finite_weights(model));
            // The hook's state is finite, and equal where it has to be: a batch that was skipped for one model does not
            // reset another model's state.
            let Some(state) = model.comm_hook_state()? else { continue };
            let factors = state.get("factor").and_then(Value::as_dict).unwrap().iter();
            let factors: Vec<Vec<f32>> = factors
                .map(|(_, factor)| {
                    Vec::try_from(factor.as_tensor().unwrap().reshape([-1])).unwrap()
                })
                .collect();
            assert!(!factors.is_empty() && factors.iter().flatten().all(|value| value.is_finite()));
            let all = accelerator.processes().gather_object(factors)?;
            assert_eq!(all[0], all[1]);
        }
        if number == 0 {
            continue;
        }
        step!("rank 1 stops, and its group with it");
        let outcome = accelerator.join_uneven_inputs(&(&a, &b), JoinInputs::default(), || {
            mine.iter().try_for_each(|&value| {
                train(&accelerator, &a, &mut of_a, 0.5)?;
                train(&accelerator, &b, &mut of_b, value)
            })
        });
        assert_eq!(found(outcome).unwrap().0, 1);
    }
    Ok(())
});

dist_test!(world = 2, dist_under_local_sgd_it_is_the_ranks_own, |world: World| -> Result<()> {
    let accelerator = builder().build()?;
    let (model, mut optimizer) = objects(&accelerator)?;
    let rank = world.rank.as_usize();
    let mut local = accelerator.local_sgd(&model, 2, true)?;
    for value in [[0.5, 0.7], [0.6, NAN], [0.7, 0.5], [0.8, 0.6]] {
        let outcome = found(train(&accelerator, &model, &mut optimizer, value[rank]));
        assert_eq!(outcome.is_some(), value[rank].is_nan());
        if outcome.is_some() {
            optimizer.zero_grad()?;
        }
        local.step()?;
    }
    local.finish()?;
    assert!(finite(model.inner()));
    assert_eq!(optimizer.steps()?, 4 - rank as u64);
    Ok(())
});

dist_test!(
    world = 2,
    dist_read_later_all_are_told_in_the_same_step,
    |world: World| -> Result<()> {
        let accelerator = builder().check_loss_later(true).build()?;
        let (model, mut optimizer) = objects(&accelerator)?;
        let rank = world.rank.as_usize();
        let mut told = Vec::new();
        for value in [[1.0, 1.0], [1.0, NAN], [1.0, 1.0]] {
            told.push(found(train(&accelerator, &model, &mut optimizer, value[rank])));
        }
        assert_eq!(told, [None, None, Some((1, Some(2), true))]);
        // Corrupted weights are not saved, even if no step followed.
        let folder = tempfile::tempdir().unwrap();
        let place = accelerator.processes().broadcast_object(folder.path().to_owned(), 0)?;
        let (model, mut optimizer) = objects(&accelerator)?;
        train(&accelerator, &model, &mut optimizer, 0.5)?;
        let _ = accelerator.save_state(place.join("sound"))?;
        accelerator.checkpoints().wait()?;
        train(&accelerator, &model, &mut optimizer, [1.0, NAN][rank])?;
        let outcome = accelerator.save_state(place.join("corrupted")).map(drop);
        assert_eq!(found(outcome), Some((1, Some(2), true)));
        train(&accelerator, &model, &mut optimizer, [1.0, NAN][rank])?;
        let outcome = accelerator.save_model(&model, place.join("corrupted.safetensors"));
        // By now rank 0's losses are NaN, too.
        assert!(matches!(found(outcome), Some((_, Some(3), true))));
        assert_eq!(std::fs::read_dir(&place).unwrap().count(), 1);
        let _ = accelerator.load_state(place.join("sound"))?;
        for value in [0.5, 0.7] {
            train(&accelerator, &model, &mut optimizer, value)?;
        }
        assert!(finite(model.inner()));
        accelerator.processes().wait_for_everyone()?;
        Ok(())
    }
);
