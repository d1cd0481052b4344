//! The Learner against fastai: every run of the golden file made again and compared number by number, its events and
//! cancellations, and its tables of freezing, rates and schedules.

#![allow(clippy::print_stdout, reason = "how close runs come is shown with --nocapture")]

mod check;
mod differences;
mod events;
mod noter;
mod perturbed;
pub(crate) mod recipe;
mod runs;
mod tables;
mod written;

use std::collections::BTreeMap;

use runs::{agree, all};

const FIT: &[&str] = &[
    "fit_adam",
    "fit_default_lr",
    "fit_learner_lr",
    "fit_conv_adam",
    "fit_sgd",
    "fit_sgd_momentum",
    "fit_opt_func_with_lr",
    "fit_twice",
    "fit_twice_reset_opt",
    "fit_slice_max",
    "fit_slice",
    "fit_slice_conv_two",
    "fit_slice_one_group",
    "fit_train_metrics",
    "fit_start_epoch",
    "fit_regression",
    "fit_nn_loss",
];

const ONE_CYCLE: &[&str] = &[
    "one_cycle",
    "one_cycle_custom",
    "one_cycle_learner_values",
    "one_cycle_slice",
    "one_cycle_slice_max",
    "one_cycle_slice_two",
    "one_cycle_sgd_no_momentum",
    "one_cycle_sgd_momentum",
    "one_cycle_then_fit",
    "one_cycle_start_epoch",
    "one_cycle_uneven",
];

const FLAT_COS: &[&str] = &["flat_cos", "flat_cos_custom"];

const SGDR: &[&str] = &["sgdr", "sgdr_len_two"];

const FREEZING: &[&str] = &[
    "fine_tune_two",
    "fine_tune_three",
    "fine_tune_custom",
    "fine_tune_train_bn_false",
    "freeze_fit",
    "freeze_fit_train_bn_false",
    "freeze_fit_bn_freeze",
    "freeze_to_1",
    "freeze_to_minus_2",
    "frozen_sgd_momentum",
];

const WEIGHT_DECAY: &[&str] = &[
    "wd_learner",
    "wd_fit",
    "wd_bn_bias",
    "wd_zero",
    "wd_coupled_adam",
    "wd_sgd",
    "wd_coupled_sgd",
    "wd_one_cycle",
];

const OPTIMIZERS: &[&str] = &[
    "opt_rmsprop",
    "opt_rmsprop_momentum",
    "opt_radam",
    "opt_larc",
    "opt_lamb",
    "opt_ranger",
    "opt_qhadam",
    "optim_wrapper_adamw",
    "optim_wrapper_adamw_wd",
    "optim_wrapper_sgd",
    "optim_wrapper_freeze",
];

const ACCUMULATION: &[&str] = &["accumulate_two", "accumulate_uneven", "accumulate_sgd"];

const CLIPPING: &[&str] = &["clip", "clip_l1", "clip_and_accumulate"];

const TRACKERS: &[&str] = &[
    "early_stopping",
    "early_stopping_patience",
    "early_stopping_min_delta",
    "early_stopping_error_name",
    "early_stopping_valid_loss",
    "early_stopping_two_fits",
    "reduce_lr",
    "reduce_lr_min",
    "save_model",
    "save_model_valid_loss",
    "save_model_with_opt",
    "save_model_at_end",
    "save_model_every_epoch",
    "trackers_together",
];

const LOSSES: &[&str] = &["label_smoothing", "label_smoothing_module", "focal_loss"];

const LR_FIND: &[&str] =
    &["lr_find", "lr_find_stops", "lr_find_no_stop", "lr_find_groups_then_train"];

const MIXTURES: &[&str] =
    &["mixup", "mixup_conv", "mixup_targets", "mixup_label_smoothing", "cutmix"];

const TABLES: &[&str] = &["csv_logger", "csv_logger_append"];

const SHORT_EPOCH: &[&str] = &["short_epoch", "short_epoch_train_only"];

const PASSES: &[&str] = &["validate_and_predict", "predict_regression"];

const PARAM_SCHEDULER: &[&str] = &["param_scheduler", "param_scheduler_poly_no"];

#[test]
fn every_run_of_the_file_is_looked_at_once() {
    let groups = [
        FIT,
        ONE_CYCLE,
        FLAT_COS,
        SGDR,
        FREEZING,
        WEIGHT_DECAY,
        OPTIMIZERS,
        LR_FIND,
        ACCUMULATION,
        CLIPPING,
        TRACKERS,
        LOSSES,
        MIXTURES,
        TABLES,
        SHORT_EPOCH,
        PASSES,
        PARAM_SCHEDULER,
        differences::DIFFERENT,
    ];
    let mut times: BTreeMap<&str, usize> = BTreeMap::new();
    for name in groups.iter().copied().flatten() {
        *times.entry(name).or_default() += 1;
    }
    let expected: BTreeMap<&str, usize> =
        all().iter().map(|run| (run["name"].as_str().unwrap(), 1)).collect();
    assert_eq!(times, expected);
}

#[test]
fn fit() {
    agree(FIT);
}

#[test]
fn one_cycle() {
    agree(ONE_CYCLE);
}

#[test]
fn flat_cos() {
    agree(FLAT_COS);
}

#[test]
fn sgdr() {
    agree(SGDR);
}

#[test]
fn fine_tuning_and_freezing() {
    agree(FREEZING);
}

#[test]
fn weight_decay() {
    agree(WEIGHT_DECAY);
}

#[test]
fn optimizers() {
    agree(OPTIMIZERS);
}

#[test]
fn accumulation() {
    agree(ACCUMULATION);
}

#[test]
fn clipping() {
    agree(CLIPPING);
}

#[test]
fn trackers() {
    agree(TRACKERS);
}

#[test]
fn losses() {
    agree(LOSSES);
}

#[test]
fn param_scheduler() {
    agree(PARAM_SCHEDULER);
}

#[test]
fn learning_rate_finder() {
    agree(LR_FIND);
}

#[test]
fn mixtures() {
    agree(MIXTURES);
}

#[test]
fn csv() {
    agree(TABLES);
}

#[test]
fn short_epochs() {
    agree(SHORT_EPOCH);
}

#[test]
fn validation_and_predictions() {
    agree(PASSES);
}
