//! What does not go together with sharding is refused by name before anything starts.

use std::time::Duration;

use brigade_nn::Model;
use brigade_optim::{Optimizer, Step};
use brigade_sharding::{MixedPrecision, ReduceGradients, Reshard, Sharding};
use brigade_torch::{ErrorKind, Result};
use brigade_train::{
    Accelerator, AcceleratorBuilder, CommHook, JoinInputs, PowerSgd, Precision, TrainError,
};
use tch::{Kind, Tensor};

use super::{Rule, net, on_ranks, samples};

fn alone() -> AcceleratorBuilder {
    Accelerator::builder().cpu(true).quiet(true)
}

fn text<T>(outcome: Result<T>) -> String {
    outcome.err().expect("an error").to_string()
}

#[test]
fn methods_that_need_whole_gradients() -> Result<()> {
    let sharded = || alone().sharding(Sharding::zero2());
    let error = text(sharded().comm_hook(CommHook::PowerSgd(PowerSgd::default())).build());
    assert!(error.contains("communication hook") && error.contains("zero2"), "{error}");

    let accelerator = sharded().build()?;
    let model = accelerator.prepare(net())?;
    let error = text(accelerator.join_uneven_inputs(&model, JoinInputs::default(), || Ok(())));
    assert!(error.contains("join_uneven_inputs") && error.contains("zero2"), "{error}");
    let error = text(accelerator.local_sgd(&model, 4, true));
    assert!(error.contains("local_sgd"), "{error}");
    Ok(())
}

/// A rule that says nothing of shards.
#[derive(Debug)]
struct Centered;

impl brigade_optim::Rule for Centered {
    fn name(&self) -> &'static str {
        "Centered"
    }

    fn slots(&self) -> &'static [&'static str] {
        &[]
    }

    fn step(&self, step: &mut Step<'_>) -> Result<()> {
        let lr = step.lr();
        step.each(|parameter, gradient, _| {
            let centered = gradient.f_sub(&gradient.f_mean(gradient.f_kind()?)?)?;
            let _ = parameter.shallow_clone().f_sub_(&centered.f_mul_scalar(lr)?)?;
            Ok(())
        })
    }
}

#[test]
fn rules_that_need_whole_parameters() -> Result<()> {
    let accelerator = alone().sharding(Sharding::zero2()).build()?;
    accelerator.prepare(Optimizer::with_rule(Centered, 0.1).build(&net())?)?;
    let model = net();
    let optimizer = Optimizer::with_rule(Centered, 0.1).build(&model)?;
    let error = text(accelerator.prepare((model, optimizer)));
    assert!(error.contains("Centered") && error.contains("step_shards"), "{error}");
    Ok(())
}

#[test]
fn settings_that_cannot_be() -> Result<()> {
    let outcomes = on_ranks(2, |builder, _| text(builder.sharding(Sharding::hybrid(3)).build()));
    assert!(
        outcomes.iter().all(|it| it == "hybrid=3 does not divide the 2 ranks: take one of 1, 2")
    );
    let prepared = |sharding: Sharding| alone().sharding(sharding).build()?.prepare(net());
    let error = text(prepared(Sharding::zero3().reshard_after_forward(Reshard::To(2))));
    assert!(error.contains('2'), "{error}");
    let mixed = Sharding::zero3().mixed(MixedPrecision::bf16());
    let error = text(alone().sharding(mixed).mixed_precision(Precision::Fp16).build());
    assert!(error.contains("fp16") && error.contains("BF16"), "{error}");
    Ok(())
}

#[test]
fn models_that_differ() {
    let outcomes = on_ranks(2, |builder, rank| {
        let accelerator = builder.sharding(Sharding::zero3()).build().unwrap();
        let rows = 4 + rank as i64;
        let model = Model::new(|path| brigade_nn::Linear::new(path / "head", 3, rows)).unwrap();
        text(accelerator.prepare(model))
    });
    for text in outcomes {
        assert!(
            text.contains("ranks 0 and 1 differ") || text.contains("ranks 1 and 0 differ"),
            "{text}"
        );
        assert!(text.contains("`head.weight`: [4, 3]") && text.contains("[5, 3]"), "{text}");
    }
}

/// Steps of whole parameters leave states that shards have no part of.
#[test]
fn an_optimizer_that_has_stepped() -> Result<()> {
    let accelerator = alone().sharding(Sharding::zero3()).build()?;
    let model = net();
    let mut optimizer = Rule::AdamW.build(&model);
    model.forward(&samples(0, 0).0)?.sum(Kind::Double).backward();
    optimizer.step()?;
    let error = text(accelerator.prepare((model, optimizer)));
    assert!(error.contains("1 steps") && error.contains("prepare it before"), "{error}");
    Ok(())
}

/// All ranks get the error of the one whose loss is not finite, before a gradient changes, and can leave the batch out.
#[test]
fn a_loss_that_is_not_finite_on_one_rank() {
    for sharding in [Sharding::zero3(), Sharding::zero2().reduce(ReduceGradients::Window)] {
        let found = on_ranks(2, |builder, rank| {
            let accelerator = builder.sharding(sharding.clone()).build().unwrap();
            let model = net();
            let optimizer = Rule::AdamW.build(&model);
            let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
            let before = super::values(&model);
            let inputs = samples(rank, 0).0;
            let inputs = if rank == 1 { inputs * f64::INFINITY } else { inputs };
            let loss = model.forward(&inputs).unwrap().sum(Kind::Double);
            let error = accelerator.backward(&loss).unwrap_err();
            let Some(TrainError::LossNotFinite { rank, weights_corrupted, .. }) =
                error.downcast_ref()
            else {
                panic!("{error}");
            };
            assert_eq!((*rank, *weights_corrupted), (Some(1), false));
            optimizer.zero_grad().unwrap();
            assert_eq!(super::values(&model), before);
            let loss = model.forward(&samples(0, 1).0).unwrap().sum(Kind::Double);
            accelerator.backward(&loss).unwrap();
            optimizer.step().unwrap();
            super::values(&model)
        });
        assert!(found[0].iter().all(|value| value.is_finite()));
        assert_eq!(found[0], found[1]);
    }
}

#[test]
fn reads_outside_of_the_forward() -> Result<()> {
    let accelerator = alone().sharding(Sharding::zero3()).build()?;
    let mut model = accelerator.prepare(net())?;
    let parameter = |model: &brigade_train::PreparedModel<super::Net>| {
        model.inner().parameters()[0].tensor.shallow_clone()
    };
    let error = parameter(&model).f_sum(Kind::Double).unwrap_err().to_string();
    assert!(
        error.contains("the root") && error.contains("`stem.weight`") && error.contains("gathered"),
        "{error}"
    );
    let error = text(model.gathered(|_| model.gathered(|_| Ok(()))));
    assert!(error.contains("inside of `gathered`"), "{error}");
    let error = text(model.inner_mut().to_kind(Kind::Float));
    assert!(error.contains("convert it before `prepare`"), "{error}");
    model.gathered_mut(|model| {
        let stem = model.parameters()[0].tensor.detach();
        stem.shallow_clone().f_fill_(0.25).map(drop).map_err(Into::into)
    })?;
    let filled = model.gathered(|model| Ok(model.parameters()[0].tensor.double_value(&[0, 0])))?;
    assert_eq!(filled, 0.25);
    // An error of the body leaves the shards as they were, also where a forward without a backward has left the root
    // whole.
    drop(model.forward(&samples(0, 0).0)?);
    let failed: Result<Tensor> = model.gathered_mut(|model| {
        let stem = model.parameters()[0].tensor.detach();
        let _ = stem.shallow_clone().f_fill_(9.0)?;
        Err(brigade_torch::Error::custom("the body's own"))
    });
    assert!(failed.is_err());
    let filled = model.gathered(|model| Ok(model.parameters()[0].tensor.double_value(&[0, 0])))?;
    assert_eq!(filled, 0.25);
    Ok(())
}

/// A rank that leaves is an error of the others within the time limit, with the unit whose parameters it lacks.
#[test]
fn a_rank_that_is_gone() {
    let outcomes = on_ranks(2, |builder, rank| {
        let builder = builder.sharding(Sharding::zero3()).timeout(Duration::from_secs(3));
        let accelerator = builder.build().unwrap();
        // Without buffers, which are sent first.
        let model = Model::new(|path| brigade_nn::Linear::new(path / "head", 3, 4)).unwrap();
        let model = accelerator.prepare(model).unwrap();
        let input = Tensor::ones([2, 3], tch::kind::FLOAT_CPU);
        (rank == 0).then(|| model.forward(&input).unwrap_err())
    });
    let error = outcomes[0].as_ref().unwrap();
    assert_eq!(error.kind(), ErrorKind::Communication, "{error}");
    assert!(error.to_string().contains("the root"), "{error}");
}
