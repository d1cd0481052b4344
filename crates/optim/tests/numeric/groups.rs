//! Parameter groups: which parameter is where, and what schedules do to them.

use brigade_nn::{BatchNorm2d, Conv2d, Conv2dOptions, LayerNorm, Linear, Model, ParamPath};
use brigade_optim::{Adam, AdamW, Group, ParameterGroup, Scheduler, Sgd};
use brigade_schedule::Schedule;
use brigade_testkit::assert_close;

use crate::filled::model;

struct Layers;

impl Layers {
    fn new(path: &ParamPath<'_>) -> Self {
        let _ = Conv2d::new(path / "conv", 1, 2, [3, 3], Conv2dOptions::default());
        let _ = BatchNorm2d::new(path / "bn", 2);
        let _ = LayerNorm::new(path / "norm", &[2, 3]);
        let _ = Linear::new(path / "head" / "0", 4, 1);
        Self
    }
}

fn layers() -> Model<Layers> {
    Model::new(Layers::new).unwrap()
}

fn names(group: &ParameterGroup) -> Vec<&str> {
    group.names().iter().map(String::as_str).collect()
}

#[test]
fn the_first_group_that_matches_takes_a_parameter() {
    let optimizer = Adam::default()
        .lr(0.1)
        .group(Group::matching("*.bias").or("bn.*").lr(0.2))
        .group(Group::matching("head.?.*").weight_decay(0.5).momentum(0.8))
        .build(&layers())
        .unwrap();
    let groups = optimizer.groups();
    assert_eq!(groups.len(), 3);
    assert_eq!(names(&groups[0]), ["conv.weight", "norm.weight"]);
    assert_eq!(
        names(&groups[1]),
        ["conv.bias", "bn.weight", "bn.bias", "norm.bias", "head.0.bias"]
    );
    assert_eq!(names(&groups[2]), ["head.0.weight"]);
    let numbers = |g: &ParameterGroup| (g.lr(), g.weight_decay(), g.momentum());
    assert_eq!(numbers(&groups[0]), (0.1, 0.0, 0.9));
    assert_eq!(numbers(&groups[1]), (0.2, 0.0, 0.9));
    assert_eq!(numbers(&groups[2]), (0.1, 0.5, 0.8));
}

#[test]
fn norms_and_biases_do_not_decay() {
    let optimizer = AdamW::default()
        .group(Group::matching("head.*").weight_decay(0.3))
        .no_decay_on_norms_and_biases(true)
        .build(&layers())
        .unwrap();
    let groups = optimizer.groups();
    let decays: Vec<f64> = groups.iter().map(ParameterGroup::weight_decay).collect();
    assert_eq!(decays, [0.01, 0.0, 0.3, 0.0]);
    assert_eq!(names(&groups[0]), ["conv.weight"]);
    // The norm over two dimensions is known by its bias.
    assert_eq!(
        names(&groups[1]),
        ["conv.bias", "bn.weight", "bn.bias", "norm.weight", "norm.bias"]
    );
    assert_eq!(names(&groups[2]), ["head.0.weight"]);
    assert_eq!(names(&groups[3]), ["head.0.bias"]);
}

#[test]
fn only_and_except_choose_parameters() {
    let all = |optimizer: brigade_optim::Optimizer| -> Vec<String> {
        optimizer.groups().iter().flat_map(|group| group.names().to_vec()).collect()
    };
    let only = Sgd::new(0.1).only("conv.*").only("head.*").except("*.bias").build(&layers());
    assert_eq!(all(only.unwrap()), ["conv.weight", "head.0.weight"]);
    let except = Sgd::new(0.1).except("*.bias").except("norm.*").build(&layers());
    assert_eq!(all(except.unwrap()), ["conv.weight", "bn.weight", "head.0.weight"]);
}

#[test]
fn a_pattern_that_matches_nothing_is_named() {
    let refused = |sgd: Sgd| sgd.build(&layers()).unwrap_err().to_string();
    let text = refused(Sgd::new(0.1).group(Group::matching("conv.*").or("backbone.*")));
    assert!(text.contains("`backbone.*`") && text.contains("conv.weight"), "{text}");
    let text = refused(Sgd::new(0.1).only("decoder"));
    assert!(text.contains("`decoder`"), "{text}");
    let text = refused(
        Sgd::new(0.1).group(Group::matching("head.*")).group(Group::matching("head.0.bias")),
    );
    assert!(text.contains("head.0.bias") && text.contains("before it"), "{text}");
    let text = refused(Sgd::new(0.1).except("*"));
    assert!(text.contains("leaves out every"), "{text}");
}

#[test]
fn a_schedule_keeps_the_ratio_of_learning_rates() {
    let model = model();
    let optimizer = Sgd::new(0.1).group(Group::matching("p1").lr(0.02)).build(&model).unwrap();
    let mut scheduler = Scheduler::new(&optimizer, Schedule::linear(0.1, 0.0, 4).unwrap());
    let rates = || -> Vec<f64> { optimizer.groups().iter().map(ParameterGroup::lr).collect() };
    assert_eq!(rates(), [0.1, 0.02]);
    scheduler.step().unwrap();
    assert_close(&rates(), &[0.1 * 0.75, 0.02 * 0.75], 1e-15, 0.0);
    for _ in 0..3 {
        scheduler.step().unwrap();
    }
    assert_eq!(rates(), [0.0, 0.0]);
}

#[test]
fn rates_are_set_for_all_or_for_one_group() {
    let model = model();
    let mut optimizer = Sgd::new(0.1).group(Group::matching("p1").lr(0.2)).build(&model).unwrap();
    optimizer.set_lr(0.05).unwrap();
    optimizer.set_group_lr(1, 0.4).unwrap();
    let rates = |optimizer: &brigade_optim::Optimizer| -> Vec<f64> {
        optimizer.groups().iter().map(ParameterGroup::lr).collect()
    };
    assert_eq!((optimizer.lr(), rates(&optimizer)), (0.05, vec![0.05, 0.4]));
    optimizer.set_lr(0.1).unwrap();
    assert_eq!(rates(&optimizer), [0.1, 0.8]);
    assert!(optimizer.set_lr(f64::NAN).is_err());
    let text = optimizer.set_group_lr(2, 0.1).unwrap_err().to_string();
    assert!(text.contains("no parameter group 2"), "{text}");
}
