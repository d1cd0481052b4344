//! What is refused, and parameters without gradients.

use brigade_nn::{Model, ParamPath};
use brigade_optim::{
    Adafactor, Adam, Group, Lars, Lookahead, Muon, QHAdam, RAdam, RmsProp, Sgd, all_optimizers,
};

use tch::Kind;

use crate::filled::{MATRICES, model, model_of};

#[test]
fn numbers_out_of_range_are_named() {
    let model = model();
    for (outcome, named) in [
        (Sgd::new(-0.1).build(&model), "the learning rate is -0.1"),
        (Sgd::new(f64::NAN).build(&model), "the learning rate is NaN"),
        (Sgd::new(0.1).nesterov(true).build(&model), "Nesterov"),
        (Sgd::new(0.1).momentum(-1.0).build(&model), "the momentum is -1"),
        (Adam::default().betas(0.9, 1.0).build(&model), "the second beta is 1"),
        (Adam::default().betas(f64::NAN, 0.9).build(&model), "the first beta is NaN"),
        (Adam::default().weight_decay(-1.0).build(&model), "the weight decay is -1"),
        (RmsProp::default().alpha(1.5).build(&model), "alpha is 1.5"),
        (QHAdam::default().nus(0.5, 1.5).build(&model), "the second nu is 1.5"),
        (RAdam::default().eps(-1.0).build(&model), "eps is -1"),
        (Lars::new(0.1).trust(f64::INFINITY).build(&model), "the trust is inf"),
        (Adafactor::default().threshold(0.5).build(&model), "the threshold is 0.5"),
        (Muon::default().build(&model), "`p1` has shape [7]"),
        (Sgd::new(0.1).lookahead(Lookahead::default().every(0)).build(&model), "every 0 steps"),
        (
            Sgd::new(0.1).lookahead(Lookahead::default().alpha(1.5)).build(&model),
            "Lookahead's alpha is 1.5",
        ),
        (
            Adam::default().group(Group::matching("p1").lr(-1.0)).build(&model),
            r#"the learning rate of the parameter group ["p1"] is -1"#,
        ),
        (
            Adafactor::default().group(Group::matching("p1").momentum(0.5)).build(&model),
            "Adafactor has no momentum",
        ),
    ] {
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains(named), "{text}");
    }
    let frozen = Model::new(|_: &ParamPath<'_>| ()).unwrap();
    let text = Adam::default().build(&frozen).unwrap_err().to_string();
    assert!(text.contains("this model has none"), "{text}");
}

#[test]
fn muon_takes_chosen_matrices() {
    assert!(Muon::default().only("p0").build(&model()).is_ok());
    assert!(Muon::default().build(&model_of(&MATRICES, Kind::Float)).is_ok());
}

#[test]
fn a_parameter_without_a_gradient_stays_and_a_late_one_starts_afresh() {
    let model = model();
    let mut optimizer = Sgd::new(0.1).momentum(0.9).build(&model).unwrap();
    let parameters = &model.module().0;
    let before = parameters[1].detach().copy();
    for late in [false, true] {
        optimizer.zero_grad().unwrap();
        let mut loss = parameters[0].sum(Kind::Float);
        if late {
            loss += parameters[1].sum(Kind::Float);
        }
        loss.backward();
        optimizer.step().unwrap();
        if !late {
            assert_eq!(parameters[1].detach(), before);
        }
    }
    // Its first step with momentum is a plain one.
    assert!(parameters[1].detach().allclose(&(before - 0.1), 1e-6, 1e-7, false));
    let state = optimizer.state_dict().unwrap();
    assert!(state.parameters[2].tensors.is_empty(), "nothing is kept of what never had a gradient");
}

#[test]
fn the_readme_names_every_optimizer() {
    for (name, _) in all_optimizers() {
        assert!(include_str!("../../README.md").contains(&format!("`{name}`")), "{name}");
    }
}
