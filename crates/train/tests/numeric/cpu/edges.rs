//! Data that are empty or too few, and non-finite losses: no hang, and the same on every rank.

use brigade_data::{DataLoader, TensorDataset};
use brigade_nn::{BatchNorm1d, Model, ModelError, ParamPath};
use brigade_optim::Sgd;
use brigade_testkit::{World, dist_test, step};
use brigade_torch::Result;
use brigade_train::{Accelerator, ClipNorm, Precision, TrainError};
use tch::{Kind, Tensor};

use crate::net;

fn rows(samples: i64) -> TensorDataset<Tensor> {
    let rows = Tensor::arange(samples * 5, (Kind::Double, tch::Device::Cpu)).sin();
    TensorDataset::new(rows.view([samples, 5])).unwrap()
}

dist_test!(world = 4, dist_data_that_are_empty_or_too_few, |_world: World| -> Result<()> {
    let first = Accelerator::builder().cpu(true).quiet(true).build()?;
    for (samples, precision) in [(1, Precision::No), (3, Precision::Fp16)] {
        for even in [true, false] {
            step!("{samples} samples, even: {even}");
            let accelerator = Accelerator::builder()
                .sharing(&first)
                .quiet(true)
                .mixed_precision(precision)
                .even_batches(even)
                .gradient_accumulation_steps(3)
                .build()?;
            let model = net::model(Kind::Float);
            let optimizer = Sgd::new(0.1).build(&model)?;
            let loader = DataLoader::new(rows(samples)).batch_size(2);
            let (model, mut optimizer, loader) = accelerator.prepare((model, optimizer, loader))?;
            let mut seen = 0;
            for batch in &loader {
                let batch = batch?;
                let input = batch.to_kind(Kind::Float);
                // Ranks without a batch would wait forever in a reduction that others enter.
                if even {
                    accelerator.accumulate(&model, &batch, || {
                        let loss = model.forward(&input)?.square().mean(Kind::Float);
                        accelerator.backward(&loss)?;
                        accelerator.clip_grad_norm(&model, 1.0)?;
                        optimizer.step()?;
                        optimizer.zero_grad()
                    })?;
                    let counted = accelerator.gather_for_metrics(&batch, &input)?;
                    seen += counted.size()[0];
                } else {
                    seen += batch.size()[0];
                }
            }
            if even {
                assert_eq!(seen, samples, "every sample counts once on every rank");
                assert_eq!(optimizer.steps()?, 1);
            } else {
                let all = accelerator
                    .processes()
                    .reduce(&Tensor::from_slice(&[seen]), brigade_torch::ReduceOp::Sum)?;
                assert_eq!(all.int64_value(&[0]), samples);
            }
        }
    }
    Ok(())
});

dist_test!(
    world = 2,
    dist_a_loader_without_a_batch_is_an_error_on_every_rank,
    |_world: World| -> Result<()> {
        let first = Accelerator::builder().cpu(true).quiet(true).build()?;
        for dispatch in [false, true] {
            let accelerator = Accelerator::builder()
                .sharing(&first)
                .quiet(true)
                .dispatch_batches(dispatch)
                .build()?;
            let empty = DataLoader::new(rows(0)).batch_size(2);
            let error = accelerator.prepare(empty).err().map(|error| error.to_string());
            let expected =
                "the loader has no batch: expected samples, found 0 with a batch size of 2; ";
            assert!(error.as_ref().is_some_and(|text| text.starts_with(expected)), "{error:?}");
            let short = DataLoader::new(rows(3)).batch_size(4).drop_last(true);
            let error = accelerator.prepare(short).err().map(|error| error.to_string());
            let expected = "the loader has no batch: expected samples, found 3 with a batch size of 4 and \
                        `drop_last`; ";
            assert!(error.as_ref().is_some_and(|text| text.starts_with(expected)), "{error:?}");
        }
        Ok(())
    }
);

dist_test!(world = 2, dist_debug_mode_looks_at_the_loss, |world: World| -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).quiet(true).debug(true).build()?;
    let model = net::model(Kind::Float);
    let model = accelerator.prepare(model)?;
    let input = |value: f64| Tensor::full([2, 5], value, tch::kind::FLOAT_CPU);
    let value = if world.rank.as_usize() == 1 { f64::NAN } else { 1.0 };
    let loss = model.forward(&input(value))?.mean(Kind::Float);
    let error = accelerator.backward(&loss).unwrap_err().to_string();
    let found = "rank 1 is in backward of a loss that is not finite";
    assert!(error.contains(found), "{error}");
    // Everywhere, and between the reductions of a window.
    for _ in 0..2 {
        let loss = model.forward(&input(f64::NAN))?.mean(Kind::Float);
        let error = accelerator.no_sync(&model, || accelerator.backward(&loss)).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(TrainError::LossNotFinite { .. })), "{error}");
    }
    Ok(())
});

dist_test!(world = 2, dist_a_non_finite_loss_on_one_rank, |world: World| -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    let model = net::model(Kind::Float);
    let optimizer = Sgd::new(0.1).build(&model)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let value = if world.rank.as_usize() == 1 { f64::NAN } else { 1.0 };
    let input = Tensor::full([2, 5], value, tch::kind::FLOAT_CPU);
    let before = net::weights(model.inner());
    let error = accelerator.backward(&model.forward(&input)?.mean(Kind::Float)).unwrap_err();
    assert!(
        matches!(error.downcast_ref(), Some(TrainError::LossNotFinite { rank: Some(1), .. })),
        "{error}"
    );
    let strict = ClipNorm { max_norm: 1.0, norm_type: 2.0, error_if_nonfinite: true };
    let error = accelerator.clip_grad_norm(&model, strict).unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(TrainError::GradientNorm { .. })), "{error}");
    optimizer.zero_grad()?;
    optimizer.step()?;
    assert_eq!(net::weights(model.inner()), before, "the batch can be left out");
    Ok(())
});

dist_test!(
    world = 2,
    dist_a_batch_that_cannot_be_normalised_is_an_error,
    |world: World| -> Result<()> {
        let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
        let model = Model::new(|p: &ParamPath<'_>| BatchNorm1d::new(p / "norm", 5))?;
        let mut model = accelerator.prepare(model)?;
        model.train();
        // On one rank a whole batch, on the other one row.
        let rows = if world.rank.as_usize() == 1 { 1 } else { 4 };
        let input = Tensor::ones([rows, 5], tch::kind::FLOAT_CPU);
        let output = model.forward(&input);
        if world.rank.as_usize() == 1 {
            let error = output.unwrap_err();
            assert!(matches!(error.downcast_ref(), Some(ModelError::Input { .. })), "{error}");
            assert!(error.to_string().contains("norm: a batch normalisation"), "{error}");
        } else {
            assert_eq!(output?.size(), [4, 5]);
        }
        Ok(())
    }
);
