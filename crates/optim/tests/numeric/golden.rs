//! golden/optimizers.json (torch.optim, six steps; fastai, twelve) and golden/torch_optimizers.json.

use brigade_nn::Model;
use brigade_optim::{
    Adafactor, Adagrad, Adam, AdamW, Group, Lamb, Lars, Lookahead, Muon, MuonRate, Optimizer,
    QHAdam, RAdam, RmsProp, Sgd,
};
use brigade_torch::Result;
use serde_json::Value;

use tch::Kind;

use crate::filled::{
    Filled, MATRICES, SHAPES, assert_all_close, model, model_of, numbers, take, torch_golden,
    values,
};

fn follows(case: &str, build: impl Fn(&Model<Filled>) -> Result<Optimizer>) {
    follows_in(include_str!("../golden/optimizers.json"), case, build);
}

fn follows_in(file: &str, case: &str, build: impl Fn(&Model<Filled>) -> Result<Optimizer>) {
    let golden: Value = serde_json::from_str(file).unwrap();
    let case = &golden["cases"][case];
    let model = model();
    let mut optimizer = build(&model).unwrap();
    take(&model, &mut optimizer, 0..case["steps"].as_i64().unwrap_or(6));
    assert_all_close(&values(&model), &numbers(&case["params"]), 2e-6, 2e-7);
}

/// In float64 the arithmetic is the same but for the order of additions.
fn follows_torch(case: &str, build: impl Fn(&Model<Filled>) -> Result<Optimizer>) {
    let case = &torch_golden()["cases"][case];
    let double = case["kind"] == "torch.float64";
    let (kind, relative, absolute) =
        if double { (Kind::Double, 1e-12, 1e-13) } else { (Kind::Float, 2e-6, 2e-7) };
    let model = model_of(&SHAPES, kind);
    let mut optimizer = build(&model).unwrap();
    take(&model, &mut optimizer, 0..6);
    assert_all_close(&values(&model), &numbers(&case["params"]), relative, absolute);
}

#[test]
fn sgd() {
    follows("sgd", |model| Sgd::new(0.1).build(model));
    follows("sgd_momentum_wd", |model| {
        Sgd::new(0.1).momentum(0.9).weight_decay(0.0005).build(model)
    });
    follows("sgd_nesterov", |model| Sgd::new(0.1).momentum(0.9).nesterov(true).build(model));
    follows("sgd_dampening", |model| Sgd::new(0.1).momentum(0.9).dampening(0.1).build(model));
    follows("fastai_sgd", |model| {
        let sgd = Sgd::new(0.01).momentum(0.9).weight_decay(0.01);
        sgd.decoupled_weight_decay(true).build(model)
    });
    follows_torch("sgd_f64", |model| {
        let sgd = Sgd::new(0.1).momentum(0.9).nesterov(true).weight_decay(0.01);
        sgd.maximize(true).build(model)
    });
}

#[test]
fn adam() {
    follows("adam", |model| Adam::default().lr(0.005).build(model));
    follows("adam_wd_amsgrad", |model| {
        Adam::default().lr(0.005).weight_decay(0.01).amsgrad(true).build(model)
    });
    follows_torch("adam_f64", |model| {
        let adam = Adam::default().lr(0.01).weight_decay(0.01).amsgrad(true);
        adam.maximize(true).build(model)
    });
}

#[test]
fn adamw() {
    follows("adamw", |model| {
        AdamW::default().lr(0.005).betas(0.9, 0.95).eps(1e-7).weight_decay(0.1).build(model)
    });
    follows("fastai_adam", |model| {
        AdamW::default().lr(0.01).betas(0.9, 0.99).eps(1e-5).weight_decay(0.01).build(model)
    });
    follows_torch("adamw_f64", |model| AdamW::default().lr(0.01).build(model));
}

#[test]
fn rmsprop() {
    follows("rmsprop", |model| {
        RmsProp::default().lr(0.01).alpha(0.95).momentum(0.9).centered(true).build(model)
    });
    follows("fastai_rmsprop", |model| {
        RmsProp::default().lr(0.01).momentum(0.9).momentum_of_gradient(true).build(model)
    });
    follows_torch("rmsprop_wd_f64", |model| {
        RmsProp::default().weight_decay(0.1).momentum(0.5).maximize(true).build(model)
    });
    follows_torch("rmsprop_centered_f64", |model| {
        RmsProp::default().centered(true).alpha(0.9).build(model)
    });
}

#[test]
fn adagrad() {
    follows("adagrad", |model| Adagrad::default().lr(0.05).lr_decay(0.01).build(model));
    follows_torch("adagrad_f64", |model| {
        let adagrad = Adagrad::default().lr(0.05).lr_decay(0.1).weight_decay(0.1);
        adagrad.initial_accumulator_value(0.2).maximize(true).build(model)
    });
}

#[test]
fn lamb() {
    follows("fastai_lamb", |model| Lamb::default().lr(0.01).build(model));
}

#[test]
fn radam() {
    follows("fastai_radam", |model| RAdam::fastai().lr(0.01).build(model));
    follows_torch("radam", |model| RAdam::default().lr(0.01).weight_decay(0.1).build(model));
    follows_torch("radam_f64", |model| {
        let radam = RAdam::default().lr(0.01).betas(0.9, 0.9).weight_decay(0.1);
        radam.decoupled_weight_decay(true).maximize(true).build(model)
    });
}

#[test]
fn ranger() {
    follows("fastai_ranger", |model| RAdam::ranger().lr(0.01).build(model));
}

#[test]
fn qhadam() {
    let follows = |case, build: fn(&Model<Filled>) -> Result<Optimizer>| {
        follows_in(include_str!("../golden/fastai_optimizers.json"), case, build);
    };
    follows("qhadam", |model| QHAdam::default().lr(0.01).build(model));
    follows("qhadam_options", |model| {
        let qhadam = QHAdam::default().lr(0.02).betas(0.9, 0.99).nus(0.4, 0.6).eps(1e-5);
        qhadam.weight_decay(0.1).build(model)
    });
    follows("qhadam_l2", |model| {
        let qhadam = QHAdam::default().lr(0.01).weight_decay(0.1);
        qhadam.decoupled_weight_decay(false).build(model)
    });
}

#[test]
fn qhadam_without_the_gradients_own_share_is_adam() {
    let (ours, adam) = (model(), model());
    let qhadam = QHAdam::default().lr(0.01).betas(0.9, 0.999).nus(1.0, 1.0);
    take(&ours, &mut qhadam.build(&ours).unwrap(), 0..6);
    take(&adam, &mut Adam::default().lr(0.01).build(&adam).unwrap(), 0..6);
    assert_all_close(&values(&ours), &values(&adam), 2e-6, 2e-7);
}

#[test]
fn lookahead_goes_part_of_the_way() {
    let (plain, looking) = (model(), model());
    let start = values(&plain);
    take(&plain, &mut Sgd::new(0.1).build(&plain).unwrap(), 0..3);
    let lookahead = Lookahead::default().every(3).alpha(0.25);
    take(&looking, &mut Sgd::new(0.1).lookahead(lookahead).build(&looking).unwrap(), 0..3);
    let expected: Vec<Vec<f64>> = start
        .iter()
        .zip(values(&plain))
        .map(|(start, end)| start.iter().zip(end).map(|(s, e)| s + 0.25 * (e - s)).collect())
        .collect();
    assert_all_close(&values(&looking), &expected, 1e-6, 1e-7);
}

#[test]
fn larc() {
    follows("fastai_larc", |model| Lars::larc(0.01).build(model));
}

#[test]
fn lars_is_larc_without_the_clip() {
    // With this trust LARC's rates are clipped, and LARS's are not.
    let run = |lars: Lars| {
        let model = model();
        take(&model, &mut lars.trust(20.0).build(&model).unwrap(), 0..1);
        values(&model)
    };
    let (lars, larc) = (run(Lars::new(0.01).momentum(0.0)), run(Lars::larc(0.01).momentum(0.0)));
    let sgd = {
        let model = model();
        take(&model, &mut Sgd::new(0.01).build(&model).unwrap(), 0..1);
        values(&model)
    };
    assert_all_close(&larc, &sgd, 1e-6, 1e-7);
    assert_ne!(lars, larc);
}

#[test]
fn adafactor() {
    follows_torch("adafactor", |model| Adafactor::default().build(model));
    follows_torch("adafactor_wd", |model| {
        let adafactor = Adafactor::default().lr(0.5).weight_decay(0.1).threshold(1.5);
        adafactor.eps1(1e-3).eps2(1e-2).build(model)
    });
    follows_torch("adafactor_f64", |model| Adafactor::default().maximize(true).build(model));
}

#[test]
fn muon() {
    let follows = |case: &str, muon: Muon| {
        let model = model_of(&MATRICES, Kind::Float);
        take(&model, &mut muon.lr(0.02).build(&model).unwrap(), 0..6);
        let expected = numbers(&torch_golden()["cases"][case]["params"]);
        // Both orthogonalize in bfloat16, whose products differ from one CPU to another.
        assert_all_close(&values(&model), &expected, 1e-3, 1e-3);
    };
    follows("muon", Muon::default());
    let muon = Muon::default().nesterov(false).weight_decay(0.0).iterations(3);
    follows("muon_rms", muon.rate(MuonRate::MatchRmsAdamw));
}

#[test]
fn groups_have_numbers_of_their_own() {
    follows_torch("groups", |model| {
        let adamw = AdamW::default().lr(0.01).weight_decay(0.1);
        adamw
            .group(Group::matching("p1").lr(0.001).weight_decay(0.0))
            .group(Group::matching("p2").lr(0.1))
            .build(model)
    });
    follows_torch("sgd_groups", |model| {
        Sgd::new(0.1).momentum(0.9).group(Group::matching("p1").momentum(0.5)).build(model)
    });
}
