//! The golden file's tables: the callbacks' places, freezing, rates of groups, and schedules.

use std::sync::LazyLock;

use brigade_learn::callback::{Callback, Phases};
use brigade_learn::callbacks::{
    ActivationStats, CsvLog, CutMix, EarlyStopping, GradientAccumulation, GradientClip, MixUp,
    NormFreeze, ParamScheduler, Progress, ReduceLrOnPlateau, SaveModel, ShortEpoch, ShowGraph,
    TerminateOnNan,
};
use brigade_learn::{Hyper, Learner, Suggestion};
use brigade_schedule::Annealing;
use brigade_torch::ErrorKind;
use serde_json::Value;

use super::recipe::{annealing, data, learner_of, loaders, number, numbers, rates};

static FILE: LazyLock<Value> =
    LazyLock::new(|| serde_json::from_str(include_str!("../../../golden/learner.json")).unwrap());

fn strings(value: &Value) -> Vec<String> {
    serde_json::from_value(value.clone()).unwrap()
}

#[test]
fn callbacks_have_fastais_places() {
    let ours: Vec<(&str, Box<dyn Callback>)> = vec![
        ("TerminateOnNaNCallback", Box::new(TerminateOnNan::new())),
        ("GradientAccumulation", Box::new(GradientAccumulation::new(1))),
        ("GradientClip", Box::new(GradientClip::new(1.0))),
        ("MixUp", Box::new(MixUp::new(0.4))),
        ("CutMix", Box::new(CutMix::new(1.0))),
        ("BnFreeze", Box::new(NormFreeze::new())),
        ("ShortEpochCallback", Box::new(ShortEpoch::new(0.1))),
        ("ActivationStats", Box::new(ActivationStats::new(["0"]))),
        ("CSVLogger", Box::new(CsvLog::new("history.csv"))),
        ("ParamScheduler", Box::new(ParamScheduler::new(Hyper::Lr, Annealing::Constant(1.0)))),
        ("ProgressCallback", Box::new(Progress::new())),
        ("ShowGraphCallback", Box::new(ShowGraph::new())),
        ("SaveModelCallback", Box::new(SaveModel::new("model.pth"))),
        ("ReduceLROnPlateau", Box::new(ReduceLrOnPlateau::new(1))),
        ("EarlyStoppingCallback", Box::new(EarlyStopping::new(1))),
    ];
    let orders = &FILE["callback_orders"]["order_run_train_run_valid"];
    for (name, callback) in ours {
        let [order, train, valid] = orders[name].as_array().unwrap().as_slice() else {
            panic!("{name}")
        };
        assert_eq!(i64::from(callback.order()), order.as_i64().unwrap(), "{name}");
        // Callbacks that get only training events in fastai do so here, and so does clipping, which has no work
        // elsewhere.
        assert_eq!(*train, true, "{name}");
        if *valid == false {
            assert_eq!(callback.phases(), Phases::Train, "{name}");
        }
    }
}

/// A Learner with these parameter groups.
fn grouped(model: &str, groups: &Value) -> Learner {
    let kind = if model == "conv" { "image" } else { "class" };
    let groups = groups.as_array().unwrap().iter().map(strings).collect();
    learner_of(model, loaders(data(kind, true), data(kind, false), 8))
        .split_parameters(groups)
        .unwrap()
}

#[test]
fn freezing() {
    let cases = FILE["freezing"].as_array().unwrap();
    assert_eq!(cases.len(), 20);
    for case in cases {
        let groups = case["groups"].as_array().unwrap().len();
        let mut learner = grouped(case["model"].as_str().unwrap(), &case["groups"]);
        learner = learner.train_norms(case["train_bn"].as_bool().unwrap());
        for step in case["freeze_to"].as_array().unwrap() {
            let group = step["n"].as_i64().unwrap() as isize;
            let what = format!("{} of {groups} groups, freeze_to({group})", case["model"]);
            let frozen = learner.freeze_to(group);
            if group > groups as isize {
                // fastai freezes all groups and warns; ours has no such group.
                assert!(
                    matches!(frozen, Err(error) if error.kind() == ErrorKind::InvalidArgument),
                    "{what}"
                );
                continue;
            }
            frozen.unwrap();
            assert_eq!(
                learner.frozen_groups() as u64,
                step["frozen_idx"].as_u64().unwrap(),
                "{what}"
            );
            let trained = learner.parameters().into_iter().filter(|it| it.tensor.requires_grad());
            let trained: Vec<String> = trained.map(|it| it.name).collect();
            assert_eq!(trained, strings(&step["trainable"]), "{what}");
        }
        let mut exempt = Vec::new();
        learner.unfreeze().unwrap();
        learner.fit(0, 1e-3, ()).unwrap();
        for group in learner.state().optimizer().unwrap().unwrap().groups() {
            if group.is_exempt_from_decay() {
                exempt.extend(group.names().iter().cloned());
            }
        }
        let mut expected = strings(&case["no_weight_decay"]);
        exempt.sort_unstable();
        expected.sort_unstable();
        assert_eq!(exempt, expected, "{case}");
        // Normalisations of frozen groups are trained, all others are not.
        learner.freeze_to(groups as isize).unwrap();
        let trained = learner.parameters().into_iter().filter(|it| it.tensor.requires_grad());
        let trained: Vec<String> = trained.map(|it| it.name).collect();
        assert_eq!(trained, strings(&case["always_trained"]), "{case}");
    }
}

#[test]
fn rates_of_groups() {
    for case in FILE["set_hyper"].as_array().unwrap() {
        let groups = case["groups"].as_u64().unwrap() as usize;
        let found = rates(&case["lr"]).unwrap().of_groups(groups);
        if case["result"].is_string() {
            assert!(
                matches!(found, Err(error) if error.kind() == ErrorKind::InvalidArgument),
                "{case}"
            );
            continue;
        }
        let (found, expected) = (found.unwrap(), numbers(&case["result"]));
        assert_eq!(found.len(), expected.len(), "{case}");
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() <= 1e-14 * expected, "{case}: {found}");
        }
    }
}

#[test]
fn schedules() {
    let places = numbers(&FILE["schedulers"]["pos"]);
    for case in FILE["schedulers"]["cases"].as_array().unwrap() {
        let curve = annealing(&case["sched"]);
        if case["values"].is_string() {
            // fastai requires shares with a sum of exactly 1; ours accepts rounding errors.
            assert!((curve.at(0.0) - 0.3).abs() < 1e-12, "{case}");
            assert!((curve.at(0.7) - 0.1).abs() < 1e-12, "{case}");
            assert!((curve.at(0.95) - 0.9).abs() < 1e-12, "{case}");
            continue;
        }
        // A combined curve's place within a part is an f32 in fastai.
        let (alone, combined) = (1e-14, 3e-7);
        let by =
            if case["sched"][0].as_str().unwrap().starts_with("Sched") { alone } else { combined };
        for (place, expected) in places.iter().zip(numbers(&case["values"])) {
            let found = curve.at(*place);
            assert!(
                (found - expected).abs() <= by,
                "{}: {found} and {expected} at {place}",
                case["sched"]
            );
        }
    }
}

#[test]
fn suggestions_of_learning_rates() {
    let cases = FILE["suggestions"].as_array().unwrap();
    assert_eq!(cases.len(), 8);
    for case in cases {
        let (lrs, losses) = (numbers(&case["lrs"]), numbers(&case["losses"]));
        for rule in Suggestion::ALL {
            let expected = number(&case["suggestions"][rule.name()]["lr"]);
            let found = rule.of(&lrs, &losses).unwrap();
            let what = format!("{} of {} points of {}", rule.name(), lrs.len(), case["curve"]);
            let near = (found - expected).abs() <= 1e-6 * expected;
            if rule == Suggestion::Steep && !near {
                // Slopes that are equal but for the rounding of fastai's f32.
                let slope = |rate: f64| {
                    let at = lrs.iter().position(|lr| (lr - rate).abs() <= 1e-6 * rate).unwrap();
                    (losses[at + 1] - losses[at]) / (lrs[at + 1] / lrs[at]).ln()
                };
                let (found, expected) = (slope(found), slope(expected));
                assert!(
                    (found - expected).abs() <= 1e-5 * expected.abs(),
                    "{what}: slope {found}, not {expected}"
                );
                continue;
            }
            assert!(near, "{what}: {found}, not {expected}");
        }
    }
}
