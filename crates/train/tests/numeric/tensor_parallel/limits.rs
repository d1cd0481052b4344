//! What does not fit a mesh is refused by name before anything has changed; steps that overflow, states and files.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use brigade_models::{Gpt2LmHead, Labelled};
use brigade_nn::{Linear, Model, Module, ParamPath, TensorParallelPlan, weights};
use brigade_optim::{Adafactor, AdamW, Lamb, Muon, Optimizer, OptimizerState, ParameterState, Sgd};
use brigade_sharding::{ContextMethod, Sharding, TensorPlan};
use brigade_testkit::assert_close;
use brigade_torch::{ErrorKind, Result, gradient};
use brigade_train::{
    Accelerator, AcceleratorBuilder, GradScalerOptions, Precision, PreparedModel, PreparedOptimizer,
};
use tch::{Device, Kind, Tensor};

use super::{gpt2, mesh, numbers};
use crate::net::fill;
use crate::sharding::on_ranks;

#[track_caller]
fn text<T>(outcome: Result<T>) -> String {
    outcome.err().expect("an error").to_string()
}

/// The error of each rank's Accelerator.
fn refusals(
    ranks: usize,
    set: impl Fn(AcceleratorBuilder) -> AcceleratorBuilder + Sync,
) -> Vec<String> {
    on_ranks(ranks, |builder, _| text(set(builder.sharding(None)).build()))
}

#[track_caller]
fn assert_all_contain(errors: &[String], expected: &[&str]) {
    for error in errors {
        for part in expected {
            assert!(error.contains(part), "{error}\nhas not\n{part}");
        }
    }
}

fn model(accelerator: &Accelerator) -> Model<Gpt2LmHead> {
    let builder =
        accelerator.parallel().model_builder(Gpt2LmHead::tensor_plan()).kind(Kind::Double);
    builder.without_first_values().build(|path| Gpt2LmHead::new(path, &gpt2())).unwrap()
}

fn whole() -> Model<Gpt2LmHead> {
    let builder = Model::builder().kind(Kind::Double).without_first_values();
    let model = builder.build(|path| Gpt2LmHead::new(path, &gpt2())).unwrap();
    fill(&model);
    model
}

#[test]
fn meshes_of_another_size() {
    let errors = refusals(2, |builder| builder.mesh(mesh(2, 1, 2)));
    assert_all_contain(&errors, &["has 4 ranks and the job has 2", "start 4 ranks", "tp 2"]);
    let errors = refusals(2, |builder| builder.tensor_parallel(3));
    assert_all_contain(&errors, &["tp 3", "2"]);
    let errors = refusals(2, |builder| builder.tensor_parallel(0));
    assert_all_contain(&errors, &["tp", "0"]);
    let both = refusals(2, |builder| builder.mesh(mesh(1, 1, 2)).tensor_parallel(2));
    assert_all_contain(&both, &["`mesh(", "`tensor_parallel(2)` contradict", "set one of them"]);
}

#[test]
fn meshes_that_contradict_the_sharding() {
    let errors = refusals(2, |builder| builder.mesh(mesh(1, 2, 1)));
    assert_all_contain(
        &errors,
        &["over 2 ranks and no sharding was chosen", "zero3", "`replicate(2)`", "`shard(2)`"],
    );
    let errors = refusals(4, |builder| builder.sharding(Sharding::zero2()).mesh(mesh(2, 2, 1)));
    assert_all_contain(&errors, &["over 2 ranks, and zero2 over 4", "`shard(4)`", "zero3"]);
    let errors = refusals(4, |builder| builder.sharding(Sharding::zero3()).mesh(mesh(2, 1, 2)));
    assert_all_contain(&errors, &["over 1 ranks, and zero3 over 2", "`shard(2)`"]);
}

#[test]
fn models_that_were_built_for_other_ranks() {
    on_ranks(2, |builder, _| {
        let accelerator = builder.sharding(None).mesh(mesh(1, 1, 2)).build().unwrap();
        let error = text(accelerator.prepare(whole()));
        assert!(error.contains("was built whole") && error.contains("parallel().model"), "{error}");
        let alone = Accelerator::builder().cpu(true).quiet(true).sharding(None).build().unwrap();
        let error = text(accelerator.prepare(model(&alone)));
        assert!(error.contains("for 1 tensor ranks, and this job has 2"), "{error}");
        let error = text(alone.prepare(model(&accelerator)));
        assert!(error.contains("`transformer.wte.weight`"), "{error}");
        assert!(error.contains("do not divide layers") && error.contains("mesh"), "{error}");
        // An empty plan leaves all of it whole.
        let builder = accelerator.parallel().model_builder(TensorPlan::new()).kind(Kind::Double);
        let model = builder.build(|path: &ParamPath<'_>| Linear::new(path, 4, 2)).unwrap();
        accelerator.prepare(model).unwrap();
    });
}

#[test]
fn models_that_differ_are_an_error_on_every_rank() {
    let plan = || TensorPlan::new().column("weight");
    let new = |path: &ParamPath<'_>| Linear::new(path, 4, 6);
    for case in 0..3 {
        let errors = on_ranks(3, |builder, rank| {
            let accelerator = builder.sharding(None).mesh(mesh(1, 1, 3)).build().unwrap();
            let builder = match (rank, case) {
                (2, 0) => accelerator.parallel().model_builder(TensorPlan::new()),
                // Without tensor parallelism: the others must not wait for this rank.
                (2, 1) => Model::builder(),
                (_, 2) if rank != 2 => accelerator.parallel().model_builder(TensorPlan::new()),
                (2, 2) => Model::builder(),
                _ => accelerator.parallel().model_builder(plan()),
            };
            text(accelerator.prepare(builder.build(new).unwrap()))
        });
        let expected: [&[&str]; 2] = match case {
            0 => [
                &["and 2 differ", "`weight [6, 4] divided along 0` here and `weight [6, 4] whole`"],
                &["ranks 2 and 0 differ", "`weight [6, 4] whole` here"],
            ],
            1 => [&["and 2 differ", "`weight [6, 4] whole` there"], &["was built whole"]],
            _ => [&["and 2 differ", "whole there"], &["was built whole"]],
        };
        assert_all_contain(&errors[..2], expected[0]);
        assert_all_contain(&errors[2..], expected[1]);
    }
}

#[test]
fn rules_that_need_whole_parameters() {
    type Build = fn(&Model<Linear>) -> Optimizer;
    let rules: [(&str, Build); 3] = [
        ("Lamb", |model| Lamb::default().lr(0.01).build(model).unwrap()),
        ("Muon", |model| Muon::default().lr(0.01).build(model).unwrap()),
        ("Adafactor", |model| Adafactor::default().lr(0.01).build(model).unwrap()),
    ];
    on_ranks(2, |builder, _| {
        let accelerator = builder.sharding(None).mesh(mesh(1, 1, 2)).build().unwrap();
        let new = |plan: TensorPlan| {
            let builder = accelerator.parallel().model_builder(plan).without_first_values();
            let options = brigade_nn::LinearOptions { bias: false };
            builder.build(|path| Linear::with_options(path, 4, 6, options)).unwrap()
        };
        for (name, build) in rules {
            let refused = |error: String| {
                assert!(error.contains(name), "{error}");
                assert!(error.contains("needs whole parameters, and each of 2 tensor"), "{error}");
            };
            let model = new(TensorPlan::new().column("weight"));
            let optimizer = build(&model);
            refused(text(accelerator.prepare((model, optimizer))));
            let model = new(TensorPlan::new().column("weight"));
            let optimizer = accelerator.prepare(build(&model)).unwrap();
            refused(text(accelerator.prepare(model)));
            drop(optimizer);
            // It may step what every rank has whole.
            let model = new(TensorPlan::new());
            let optimizer = build(&model);
            accelerator.prepare((model, optimizer)).unwrap();
        }
    });
}

#[test]
fn a_batch_size_cannot_be_searched() {
    let errors = on_ranks(2, |builder, _| {
        let accelerator = builder.sharding(None).mesh(mesh(1, 1, 2)).build().unwrap();
        let body = |_| -> Result<()> { panic!("nothing may run") };
        text(accelerator.find_executable_batch_size(8, body))
    });
    assert_all_contain(&errors, &["find_executable_batch_size", "tp 2", "choose a batch size"]);
}

const CHILD: &str = "BRIGADE_TEST_TENSOR_CHILD";

/// The other process of the test below.
#[test]
fn child() {
    let Ok(expected) = std::env::var(CHILD) else { return };
    let build = || Accelerator::builder().cpu(true).quiet(true).sharding(None);
    if expected.is_empty() {
        build().build().unwrap();
    } else {
        let error = text(build().build());
        assert!(error.contains(&expected), "{error}");
    }
    // A setting of the program takes precedence.
    build().tensor_parallel(1).build().unwrap();
}

#[test]
fn the_environment_says_a_number_of_ranks() {
    for (value, expected) in [
        (" 1 ", ""),
        ("0", "BRIGADE_TENSOR: \"0\" is not a number of tensor ranks: write 1 or more"),
        ("two", "BRIGADE_TENSOR: \"two\" is not a number of tensor ranks"),
        ("3", "tp 3"),
    ] {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "tensor_parallel::limits::child", "--nocapture"])
            .env(CHILD, expected)
            .env("BRIGADE_TENSOR", value)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("1 passed"), "{value}: {text}{error}");
    }
}

const REGIONS_CHILD: &str = "BRIGADE_TEST_REGIONS_CHILD";

/// The other process of the test below.
#[test]
fn child_with_sequence_regions() {
    let Ok(expected) = std::env::var(REGIONS_CHILD) else { return };
    on_ranks(2, |builder, _| {
        let built = builder.sharding(None).tensor_parallel(2).build();
        let Ok(expected) = expected.parse::<bool>() else {
            let error = text(built);
            assert!(error.contains(&expected), "{error}");
            return;
        };
        let has_regions = |accelerator: &Accelerator| {
            model(accelerator).tensor_parallel().unwrap().plan.has_sequence_regions()
        };
        assert_eq!(has_regions(&built.unwrap()), expected);
    });
}

#[test]
fn the_environment_says_whether_there_are_sequence_regions() {
    for (value, expected) in [
        ("true", "true"),
        ("false", "false"),
        ("maybe", "BRIGADE_SEQUENCE_PARALLEL: provided string was not `true` or `false`"),
    ] {
        let output = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "tensor_parallel::limits::child_with_sequence_regions",
                "--nocapture",
            ])
            .env(REGIONS_CHILD, expected)
            .env("BRIGADE_SEQUENCE_PARALLEL", value)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("1 passed"), "{value}: {text}{error}");
    }
}

/// A gradient that is infinite in one rank's part, which no message brings to the others.
#[test]
fn an_overflow_on_one_tensor_rank_skips_the_step_everywhere() {
    on_ranks(4, |builder, rank| {
        let builder = builder.sharding(None).mesh(mesh(2, 1, 2));
        // A scale that does not cause an overflow.
        let scaler = GradScalerOptions { init_scale: 16.0, ..Default::default() };
        let builder = builder.mixed_precision(Precision::Fp16).grad_scaler(scaler);
        let accelerator = builder.build().unwrap();
        let model = accelerator
            .parallel()
            .model_builder(TensorPlan::new().column("weight"))
            .build(|path: &ParamPath<'_>| Linear::new(path, 4, 6))
            .unwrap();
        fill(&model);
        let optimizer = Sgd::new(0.5).build(&model).unwrap();
        let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
        let weight = model.inner().module().weight().shallow_clone();
        for (number, overflows) in [None, Some(1), Some(2), None].into_iter().enumerate() {
            let before = weight.detach().copy();
            let scale = accelerator.grad_scaler().unwrap().scale();
            let input = Tensor::ones([2, 4], tch::kind::FLOAT_CPU);
            let loss = model.forward(&input).unwrap().sum(Kind::Float);
            accelerator.backward(&loss).unwrap();
            if overflows == Some(rank) {
                let _ = gradient(&weight).unwrap().unwrap().fill_(f64::INFINITY);
            }
            optimizer.step().unwrap();
            optimizer.zero_grad().unwrap();
            let skipped = overflows.is_some();
            assert_eq!(accelerator.optimizer_step_was_skipped(), skipped, "{number}");
            assert_eq!(weight.detach().equal(&before), skipped, "{number}");
            let factor = if skipped { 0.5 } else { 1.0 };
            assert_eq!(accelerator.grad_scaler().unwrap().scale(), scale * factor, "{number}");
        }
        assert_eq!(optimizer.steps().unwrap(), 2);
    });
}

/// Replicas, shards and tensor ranks, and how parameters are spread.
type Form = ([usize; 3], Option<fn() -> Sharding>);

const FORMS: [Form; 3] =
    [([1, 1, 2], None), ([1, 2, 2], Some(Sharding::zero1)), ([1, 2, 2], Some(Sharding::zero3))];

fn prepared(
    builder: AcceleratorBuilder,
    ([replicate, shard, tensor], sharding): Form,
) -> (Accelerator, PreparedModel<Gpt2LmHead>, PreparedOptimizer) {
    let builder = builder.sharding(sharding.map(|new| new()));
    let accelerator = builder.mesh(mesh(replicate, shard, tensor)).build().unwrap();
    let model = model(&accelerator);
    let optimizer = AdamW::default().lr(0.01).eps(1e-3).build(&model).unwrap();
    let (model, optimizer) = accelerator.prepare((model, optimizer)).unwrap();
    (accelerator, model, optimizer)
}

/// A step on the same samples on all ranks.
fn step(
    accelerator: &Accelerator,
    model: &PreparedModel<Gpt2LmHead>,
    optimizer: &mut PreparedOptimizer,
) {
    let ids = (Tensor::arange(12, (Kind::Int64, Device::Cpu)) * 7).remainder(23).view([2, 6]);
    let loss = model.forward(Labelled::new(&ids, &ids)).unwrap().mean().unwrap();
    accelerator.backward(&loss).unwrap();
    optimizer.step().unwrap();
    optimizer.zero_grad().unwrap();
}

/// Names, shapes and values of an optimizer's state.
fn slots(state: &OptimizerState) -> Vec<(String, Vec<i64>, Vec<f64>)> {
    let of_one = |(name, tensor): (String, &Tensor)| {
        let values = tensor.detach().to_kind(Kind::Double).reshape([-1]);
        (name, tensor.size(), Vec::try_from(values).unwrap())
    };
    let all = state.parameters.iter().flat_map(|parameter| {
        let named = |(slot, tensor)| (format!("{} {slot}", parameter.name), tensor);
        parameter.tensors.iter().map(|(slot, tensor)| (slot, tensor)).map(named)
    });
    all.map(of_one).collect()
}

#[test]
fn whole_states_of_optimizers_go_there_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let first = folder.path().join("first.safetensors");
    whole().save_weights(&first).unwrap();
    let run = |form: Form, ranks| {
        on_ranks(ranks, |builder, rank| {
            let (accelerator, mut model, mut optimizer) = prepared(builder, form);
            accelerator.load_model(&mut model, &first).unwrap();
            for _ in 0..2 {
                step(&accelerator, &model, &mut optimizer);
            }
            let state = optimizer.full_state_dict().unwrap();
            assert_eq!(state.is_some(), rank == 0);
            let saved = state.as_ref().map(slots);
            let weights = model.full_state_dict().unwrap();
            step(&accelerator, &model, &mut optimizer);
            let after = model.full_state_dict().unwrap().map(|state| numbers(&state));
            // Other moments, until the state is loaded.
            step(&accelerator, &model, &mut optimizer);
            model.load_full_state_dict(weights.as_ref()).unwrap();
            optimizer.load_full_state_dict(state).unwrap();
            assert_eq!(optimizer.steps().unwrap(), 2);
            assert_eq!(optimizer.full_state_dict().unwrap().as_ref().map(slots), saved);
            step(&accelerator, &model, &mut optimizer);
            assert_eq!(model.full_state_dict().unwrap().map(|state| numbers(&state)), after);
            saved.zip(after)
        })
        .remove(0)
        .unwrap()
    };
    let (expected, weights) = run(([1, 1, 1], None), 1);
    assert!(expected.iter().any(|(name, ..)| name.contains("c_attn.weight exp_avg")));
    for form in FORMS {
        let (found, after) = run(form, form.0.iter().product());
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!((&found.0, &found.1), (&expected.0, &expected.1));
            assert_close(&found.2, &expected.2, 1e-10, 1e-13);
        }
        for (found, expected) in after.iter().zip(&weights) {
            assert_close(&found.1, &expected.1, 1e-10, 1e-13);
        }
    }
}

/// A state of other shapes is an error on every rank, and nothing has changed.
#[test]
fn a_part_is_not_taken_for_a_whole_state() {
    on_ranks(2, |builder, _| {
        let (accelerator, model, mut optimizer) = prepared(builder, FORMS[0]);
        step(&accelerator, &model, &mut optimizer);
        let before = optimizer.full_state_dict().unwrap();
        // This rank's part in the place of a whole tensor.
        let mut state = optimizer.full_state_dict().unwrap();
        let slots_of = |state: &mut OptimizerState| {
            let attention = |it: &&mut ParameterState| it.name.contains("c_attn.weight");
            let found = state.parameters.iter_mut().find(attention).unwrap();
            let tensors = found.tensors.iter_mut().filter(|(_, it)| it.dim() == 2);
            tensors.for_each(|(_, tensor)| *tensor = tensor.narrow(1, 0, 18));
        };
        state.iter_mut().for_each(slots_of);
        let error = text(optimizer.load_full_state_dict(state));
        assert!(error.contains("h.0.attn.c_attn.weight.exp_avg"), "{error}");
        assert!(error.contains("[12, 18]") && error.contains("[12, 36]"), "{error}");
        let after = optimizer.full_state_dict().unwrap();
        assert_eq!(after.as_ref().map(slots), before.as_ref().map(slots));
    });
}

fn same_file(found: &Path, expected: &Path) {
    let (found, expected) = (weights::load(found).unwrap(), weights::load(expected).unwrap());
    assert!(!found.is_empty());
    for (name, tensor) in found.iter() {
        assert_eq!(Some(tensor), expected.get(name), "{name}");
    }
    for name in expected.names().filter(|name| !name.starts_with("lm_head")) {
        assert!(found.get(name).is_some(), "{name}");
    }
}

#[test]
fn files_are_those_of_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let first = path("first.safetensors");
    whole().save_weights(&first).unwrap();
    for (number, form) in FORMS.into_iter().enumerate() {
        let [one, parts, again] = ["one.safetensors", "parts", "again.safetensors"]
            .map(|file| path(&format!("{number}-{file}")));
        on_ranks(form.0.iter().product(), |builder, _| {
            let (accelerator, mut model, _optimizer) = prepared(builder, form);
            accelerator.load_model(&mut model, &first).unwrap();
            accelerator.save_model(&model, &one).unwrap();
            accelerator.checkpoints().save_model_in_parts(&model, &parts, 9000).unwrap();
            model
                .load_full_state_dict(Some(&zeros()).filter(|_| accelerator.is_main_process()))
                .unwrap();
            accelerator.load_model(&mut model, &parts).unwrap();
            accelerator.save_model(&model, &again).unwrap();
            let error = text(accelerator.load_model(&mut model, path("nothing.safetensors")));
            assert!(error.contains("nothing.safetensors"), "{error}");
        });
        assert!(parts.join("model.safetensors.index.json").exists());
        for file in [&one, &parts, &again] {
            same_file(file, &first);
        }
    }
}

fn zeros() -> brigade_nn::StateDict {
    let builder = Model::builder().kind(Kind::Double).without_first_values();
    builder.build(|path| Gpt2LmHead::new(path, &gpt2())).unwrap().state_dict()
}

/// In the forward, and in the backward of a forward that all ranks have made.
#[test]
fn a_rank_that_is_gone() {
    let context = |method: ContextMethod| {
        move |builder: AcceleratorBuilder| builder.context_parallel(2).context_method(method)
    };
    let ways: [Box<dyn Fn(AcceleratorBuilder) -> AcceleratorBuilder + Sync>; 3] = [
        Box::new(|builder| builder.tensor_parallel(2).sequence_regions(true)),
        Box::new(context(ContextMethod::Ring)),
        Box::new(context(ContextMethod::Ulysses)),
    ];
    for (divide, forwards) in ways.iter().flat_map(|divide| [(divide, 0), (divide, 1)]) {
        let outcomes = on_ranks(2, |builder, rank| {
            let builder = divide(builder).sharding(None);
            let accelerator = builder.timeout(Duration::from_secs(5)).build().unwrap();
            let model = accelerator.prepare(model(&accelerator)).unwrap();
            let ids = ids();
            let forward = || model.forward(Labelled::new(&ids, &ids))?.mean();
            let losses: Vec<Result<Tensor>> = (0..forwards).map(|_| forward()).collect();
            (rank == 0).then(|| match losses.into_iter().next() {
                Some(loss) => accelerator.backward(&loss.unwrap()).unwrap_err(),
                None => forward().unwrap_err(),
            })
        });
        let error = outcomes[0].as_ref().unwrap();
        assert_eq!(error.kind(), ErrorKind::Communication, "{error}");
    }
}

fn ids() -> Tensor {
    let places = Tensor::arange(12, (Kind::Int64, Device::Cpu));
    (places * 7).remainder(23).view([2, 6])
}

/// A layer that adds random numbers to what all ranks have.
struct Noise(Linear);

impl Module<&Tensor> for Noise {
    type Output = Tensor;
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        // Ranks are threads that share a generator: no two draw the same numbers.
        let noise = Tensor::randn(input.size(), (Kind::Double, Device::Cpu));
        self.0.forward(&(input + noise))
    }
}

#[test]
fn debug_mode_compares_the_ranks_of_a_group() {
    let debug = |builder: AcceleratorBuilder| {
        builder.tensor_parallel(2).sharding(None).debug(true).build().unwrap()
    };
    let errors = on_ranks(2, |builder, rank| {
        let accelerator = debug(builder);
        let model = accelerator.prepare(model(&accelerator)).unwrap();
        let (ids, scale) = (ids(), 1.0 + rank as f64);
        let loss = || model.forward(Labelled::new(&ids, &ids)).unwrap().mean().unwrap();
        accelerator.backward(&loss()).unwrap();
        text(accelerator.backward(&(loss() * scale)))
    });
    assert_all_contain(&errors, &["the loss is", "on tensor rank", "the same samples"]);
    let errors = on_ranks(2, |builder, _| {
        let accelerator = debug(builder);
        let builder = accelerator.parallel().model_builder(TensorPlan::new()).kind(Kind::Double);
        let model = builder.build(|path| Noise(Linear::new(path / "head", 3, 4))).unwrap();
        let optimizer = Sgd::new(0.1).build(&model).unwrap();
        let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
        let input = Tensor::ones([2, 3], (Kind::Double, Device::Cpu));
        let output = model.forward(&input).unwrap();
        // A loss of equal value whose gradient differs.
        let loss = (&output - output.detach()).sum(Kind::Double);
        accelerator.backward(&loss).unwrap();
        text(optimizer.step())
    });
    assert_all_contain(&errors, &["the gradient of `head.weight`", "tensor ranks"]);
}
