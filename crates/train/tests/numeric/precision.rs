//! Autocast: around a prepared model's forward, and as a scope.

use std::panic::{AssertUnwindSafe, catch_unwind};

use brigade_nn::{Linear, Model, Module, ParamPath};
use brigade_test_device::{numeric_device, on_device};
use brigade_train::{Accelerator, AutocastOptions, Precision};
use tch::{Kind, Tensor};

use crate::{device, net};

fn accelerator(precision: Precision) -> Accelerator {
    device::builder().mixed_precision(precision).build().unwrap()
}

/// Tells the kinds inside and gives structured outputs.
struct Outputs(Linear);

impl Module<&Tensor> for Outputs {
    type Output = (Tensor, Vec<Tensor>, Option<Tensor>);

    fn forward(&self, input: &Tensor) -> brigade_torch::Result<Self::Output> {
        let product = self.0.forward(input)?;
        let classes = product.argmax(-1, false);
        Ok((product.shallow_clone(), vec![product.to_kind(Kind::Double), classes], Some(product)))
    }
}

#[test]
fn a_prepared_model_computes_in_16_bits_and_answers_in_32() {
    let input = on_device(&Tensor::arange(10, tch::kind::FLOAT_CPU).sin().view([2, 5]));
    let build = |path: &ParamPath<'_>| Outputs(Linear::new(path, 5, 3));
    for (precision, inside) in [
        (Precision::No, Kind::Float),
        (Precision::Bf16, Kind::BFloat16),
        (Precision::Fp16, Kind::Half),
    ] {
        let model = Model::builder().device(numeric_device()).build(build).unwrap();
        net::fill(&model);
        let exact = model.forward(&input).unwrap().0;
        let prepared = accelerator(precision).prepare(model).unwrap();
        let (product, list, maybe) = prepared.forward(&input).unwrap();
        assert_eq!(product.kind(), Kind::Float);
        assert_eq!((list[0].kind(), list[1].kind()), (Kind::Double, Kind::Int64));
        assert_eq!(maybe.unwrap().kind(), Kind::Float);
        let error = (&product - &exact).abs().max().double_value(&[]);
        assert!(error < 0.02, "{precision}: {error}");
        assert_eq!(error == 0.0, precision == Precision::No, "{precision}");

        let raw =
            device::builder().mixed_precision(precision).float32_outputs(false).build().unwrap();
        let model = Model::builder().device(numeric_device()).build(build).unwrap();
        net::fill(&model);
        let prepared = raw.prepare(model).unwrap();
        assert_eq!(prepared.forward(&input).unwrap().0.kind(), inside);
        // Outside of the forward nothing is cast, and the weights keep their type.
        assert_eq!(input.matmul(&input.tr()).kind(), Kind::Float);
        assert_eq!(prepared.inner().parameters()[0].tensor.kind(), Kind::Float);
    }
}

#[test]
fn gradients_have_the_weights_type() {
    let accelerator = accelerator(Precision::Bf16);
    let model = accelerator.prepare(net::model(Kind::Float)).unwrap();
    let input = Tensor::ones([4, 5], (Kind::Float, numeric_device()));
    let loss = model.forward(&input).unwrap().square().mean(Kind::Float);
    assert_eq!(loss.kind(), Kind::Float);
    accelerator.backward(&loss).unwrap();
    for parameter in model.inner().parameters() {
        assert_eq!(parameter.tensor.grad().kind(), Kind::Float, "{}", parameter.name);
    }
}

#[test]
fn scopes_nest_and_end_with_a_panic() {
    let accelerator = accelerator(Precision::Bf16);
    let one = Tensor::ones([2, 2], (Kind::Float, numeric_device()));
    let kind = || one.matmul(&one).kind();
    let off = AutocastOptions { precision: Precision::No, cache: true };
    let half = AutocastOptions { precision: Precision::Fp16, cache: false };
    accelerator
        .autocast(|| {
            assert_eq!(kind(), Kind::BFloat16);
            off.run(accelerator.device(), || {
                assert_eq!(kind(), Kind::Float);
                half.run(accelerator.device(), || assert_eq!(kind(), Kind::Half)).unwrap();
                assert_eq!(kind(), Kind::Float);
            })
            .unwrap();
            assert_eq!(kind(), Kind::BFloat16);
            let other_thread = std::thread::scope(|scope| {
                scope
                    .spawn(|| {
                        let one = Tensor::ones([2, 2], (Kind::Float, numeric_device()));
                        one.matmul(&one).kind()
                    })
                    .join()
            });
            assert_eq!(other_thread.unwrap(), Kind::Float, "a scope belongs to its thread");
        })
        .unwrap();
    let broken = catch_unwind(AssertUnwindSafe(|| accelerator.autocast(|| panic!("on purpose"))));
    assert!(broken.is_err());
    assert_eq!(kind(), Kind::Float);
}

#[test]
fn changed_weights_are_cast_anew_in_the_next_forward() {
    let accelerator = accelerator(Precision::Bf16);
    let model = accelerator.prepare(net::model(Kind::Float)).unwrap();
    let input = Tensor::ones([1, 5], (Kind::Float, numeric_device()));
    let before = model.forward(&input).unwrap();
    for parameter in model.inner().parameters() {
        let _ = tch::no_grad(|| parameter.tensor.shallow_clone().zero_());
    }
    let after = model.forward(&input).unwrap();
    assert!(before.abs().max().double_value(&[]) > 0.0);
    assert_eq!(after.abs().max().double_value(&[]), 0.0);
}

#[test]
fn the_environment_chooses_where_the_builder_does_not() {
    // A separate process: environment variables would affect all tests of this one.
    let name = "precision::the_environment_chooses_where_the_builder_does_not";
    if std::env::var("BRIGADE_TEST_CHILD").is_ok() {
        let chosen = Accelerator::builder().build().unwrap();
        assert_eq!(chosen.device(), tch::Device::Cpu);
        assert_eq!(chosen.mixed_precision(), Precision::Bf16);
        assert_eq!(chosen.gradient_accumulator().settings().steps, 4);
        let by_hand = Accelerator::builder()
            .cpu(true)
            .mixed_precision(Precision::No)
            .gradient_accumulation_steps(2)
            .build()
            .unwrap();
        assert_eq!(by_hand.mixed_precision(), Precision::No);
        assert_eq!(by_hand.gradient_accumulator().settings().steps, 2);
        return;
    }
    let child = |precision: &str, steps: &str| {
        std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env("BRIGADE_TEST_CHILD", "1")
            .env("ACCELERATE_USE_CPU", "true")
            .env("ACCELERATE_MIXED_PRECISION", precision)
            .env("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", steps)
            .output()
            .unwrap()
    };
    let good = child("bf16", "4");
    assert!(good.status.success(), "{}", String::from_utf8_lossy(&good.stdout));
    let bad = String::from_utf8(child("bf61", "4").stdout).unwrap();
    assert!(bad.contains("ACCELERATE_MIXED_PRECISION") && bad.contains("bf61"), "{bad}");
    let bad = String::from_utf8(child("bf16", "none").stdout).unwrap();
    assert!(bad.contains("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"), "{bad}");
}
