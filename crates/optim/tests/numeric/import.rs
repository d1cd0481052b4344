//! States written by PyTorch: golden/optimizer_*.pt, made by golden/make_optimizers.py. After three steps
//! of PyTorch's and three of ours the parameters are PyTorch's.

use std::path::PathBuf;

use brigade_nn::Model;
use brigade_optim::{
    Adafactor, Adagrad, Adam, AdamW, Group, Optimizer, RAdam, RmsProp, Sgd, StateMismatch,
};
use brigade_torch::Result;

use tch::Tensor;

use crate::filled::{Filled, assert_all_close, model, numbers, take, torch_golden, values};

fn file(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests/golden", &format!("optimizer_{name}.pt")].iter().collect()
}

fn goes_on(name: &str, build: impl Fn(&Model<Filled>) -> Result<Optimizer>) {
    let case = &torch_golden()["cases"][format!("saved_{name}")];
    let model = model();
    for (parameter, halfway) in model.module().0.iter().zip(numbers(&case["halfway"])) {
        let halfway = Tensor::from_slice(&halfway).reshape(parameter.size());
        tch::no_grad(|| parameter.shallow_clone().copy_(&halfway));
    }
    let mut optimizer = build(&model).unwrap();
    optimizer.load_pytorch(file(name)).unwrap();
    take(&model, &mut optimizer, 3..6);
    assert_all_close(&values(&model), &numbers(&case["params"]), 2e-6, 2e-7);
}

#[test]
fn training_goes_on_as_in_pytorch() {
    goes_on("adam", |m| Adam::default().lr(0.01).amsgrad(true).betas(0.8, 0.9).build(m));
    goes_on("sgd", |m| Sgd::new(0.1).momentum(0.9).build(m));
    goes_on("sgd_plain", |m| Sgd::new(0.1).build(m));
    goes_on("rmsprop", |m| RmsProp::default().momentum(0.9).centered(true).build(m));
    goes_on("adagrad", |m| Adagrad::default().lr_decay(0.1).build(m));
    goes_on("radam", |m| RAdam::default().lr(0.01).build(m));
    goes_on("adafactor", |m| Adafactor::default().build(m));
}

#[test]
fn groups_are_matched_by_name_and_bring_their_numbers() {
    // The rates are those of the file, not these.
    let build = |m: &Model<Filled>| {
        let adamw = AdamW::default().lr(0.5).weight_decay(0.3);
        adamw.group(Group::matching("p1").lr(0.05)).build(m)
    };
    goes_on("adamw_groups", build);
    let mut optimizer = build(&model()).unwrap();
    optimizer.load_pytorch(file("adamw_groups")).unwrap();
    let groups = optimizer.groups();
    assert_eq!((groups[0].lr(), groups[0].weight_decay()), (0.01, 0.1));
    assert_eq!((groups[1].lr(), groups[1].weight_decay()), (0.001, 0.0));
    assert_eq!((optimizer.lr(), optimizer.steps()), (0.01, 3));
}

#[test]
fn another_optimizers_state_is_refused() {
    let refused = |name: &str, optimizer: Result<Optimizer>| {
        let mut optimizer = optimizer.unwrap();
        let error = optimizer.load_pytorch(file(name)).unwrap_err();
        assert!(optimizer.state_dict().unwrap().parameters[0].tensors.is_empty());
        error
    };
    let model = model();
    let error = refused("sgd", Adam::default().build(&model));
    assert!(error.to_string().contains("beta1"), "{error}");
    let error = refused("adam", Adam::default().lr(0.01).build(&model));
    assert!(error.to_string().contains("amsgrad = 1"), "{error}");
    let error = refused("adamw_groups", AdamW::default().build(&model));
    assert!(
        matches!(error.downcast_ref(), Some(StateMismatch::Groups { expected: 1, found: 2 })),
        "{error}"
    );
    let groups = AdamW::default().group(Group::matching("p2")).build(&model);
    let error = refused("adamw_groups", groups);
    assert!(error.to_string().contains("parameter 1 of group 0 is `p2`"), "{error}");
    let error = refused("sgd", Sgd::new(0.1).momentum(0.9).only("p0").build(&model));
    assert!(
        matches!(error.downcast_ref(), Some(StateMismatch::Sizes { expected: 1, found: 3, .. })),
        "{error}"
    );
    let error = refused("nowhere", Sgd::new(0.1).build(&model));
    assert!(error.downcast_ref::<brigade_checkpoint::Error>().is_some(), "{error}");
}
