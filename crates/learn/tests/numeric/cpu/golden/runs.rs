//! Runs of the golden file, made again by this crate's Learner.

use std::rc::Rc;
use std::sync::{Arc, LazyLock};

use brigade_learn::{
    FineTuneOptions, FitOptions, FlatCosOptions, GroupHypers, Learner, LrFindOptions, LrFinding,
    OneCycleOptions, Part, Predictions, SgdrOptions, Validation,
};
use brigade_torch::Result;
use brigade_train::TrainError;
use serde_json::Value;

use super::check::Check;
use super::noter::{FitNotes, Norm, Noter, Notes};
use super::perturbed::Perturbation;
use super::recipe::{learner, numbers, rates};

static FILE: LazyLock<Value> =
    LazyLock::new(|| serde_json::from_str(include_str!("../../../golden/runs.json")).unwrap());

pub(crate) fn all() -> &'static [Value] {
    FILE["runs"].as_array().unwrap()
}

pub(crate) fn run(name: &str) -> &'static Value {
    all().iter().find(|run| run["name"] == name).unwrap_or_else(|| panic!("run `{name}`"))
}

/// What came of a run of ours.
pub(crate) struct Outcome {
    pub(crate) learner: Learner,
    pub(crate) fits: Vec<FitNotes>,
    pub(crate) found: Vec<Found>,
    pub(crate) validations: Vec<Validation>,
    pub(crate) predictions: Vec<Predictions>,
    pub(crate) result: Result<()>,
    pub(crate) folder: tempfile::TempDir,
}

/// What a search for a learning rate has found, and left.
pub(crate) struct Found {
    pub(crate) curve: LrFinding,
    /// Weights and buffers are bit for bit as before.
    pub(crate) restored: bool,
    /// The hyperparameters before and after it.
    pub(crate) hypers: [Vec<GroupHypers>; 2],
}

/// Makes all calls of a run.
pub(crate) fn make(run: &Value) -> Outcome {
    make_with(run, true)
}

/// Makes all calls of a run with perturbed weights.
pub(crate) fn make_perturbed(run: &Value, perturbation: Perturbation) -> Outcome {
    make_of(run, true, Some(perturbation))
}

pub(crate) fn make_with(run: &Value, quiet: bool) -> Outcome {
    make_of(run, quiet, None)
}

fn make_of(run: &Value, quiet: bool, perturbation: Option<Perturbation>) -> Outcome {
    // So small that threads only wait for each other; fastai's runs had one thread, too.
    tch::set_num_threads(1);
    let folder = tempfile::tempdir().unwrap();
    let (notes, epoch) = (Notes::default(), Arc::default());
    let mut learner = learner(run, folder.path(), &epoch).quiet(quiet);
    if let Some(perturbation) = perturbation {
        perturbation.begin(&mut learner);
    }
    learner.add(Noter::new(&notes, &epoch));
    if run["flags"].as_array().is_some_and(|flags| flags.iter().any(|flag| flag == "norms")) {
        learner.add((
            Norm { notes: Rc::clone(&notes), order: -1 },
            Norm { notes: Rc::clone(&notes), order: 12 },
        ));
    }
    let (found, validations, predictions) = (Vec::new(), Vec::new(), Vec::new());
    let mut outcome = Outcome {
        learner,
        fits: Vec::new(),
        found,
        validations,
        predictions,
        result: Ok(()),
        folder,
    };
    let calls = run["calls"].as_array().unwrap();
    outcome.result = calls.iter().try_for_each(|it| call(&mut outcome, it));
    outcome.fits = notes.take();
    outcome
}

fn call(outcome: &mut Outcome, call: &Value) -> Result<()> {
    let learner = &mut outcome.learner;
    let args = &call[1];
    let whole = |name: &str| args[name].as_u64().map(|it| it as usize);
    let real = |name: &str| args[name].as_f64();
    let epochs = whole("n_epoch").unwrap_or_default();
    let lr = rates(args.get("lr").unwrap_or_else(|| &args["lr_max"]));
    let start_epoch = whole("start_epoch").unwrap_or(0);
    match call[0].as_str().unwrap() {
        "fit" => {
            let reset_optimizer = args["reset_opt"] == true;
            let weight_decay = real("wd");
            let options = FitOptions { rates: lr, weight_decay, reset_optimizer, start_epoch };
            learner.fit_with(epochs, options, ())
        }
        "fit_one_cycle" => {
            let mut cycle = match lr {
                Some(lr) => OneCycleOptions::new(epochs, lr),
                None => OneCycleOptions::of(epochs),
            }
            .start_epoch(start_epoch);
            cycle = real("pct_start").into_iter().fold(cycle, OneCycleOptions::pct_start);
            cycle = real("div").into_iter().fold(cycle, OneCycleOptions::div_initial);
            cycle = real("div_final").into_iter().fold(cycle, OneCycleOptions::div_final);
            cycle = real("wd").into_iter().fold(cycle, OneCycleOptions::weight_decay);
            if !args["moms"].is_null() {
                cycle = cycle.momenta(numbers(&args["moms"]).try_into().unwrap());
            }
            learner.fit_cycle(cycle, ())
        }
        "fit_flat_cos" => {
            let mut flat = FlatCosOptions::new(epochs, lr.unwrap()).start_epoch(start_epoch);
            flat = real("div_final").into_iter().fold(flat, FlatCosOptions::div_final);
            flat = real("pct_start").into_iter().fold(flat, FlatCosOptions::pct_start);
            learner.fit_flat(flat, ())
        }
        "fit_sgdr" => {
            let (cycles, length) = (whole("n_cycles").unwrap(), whole("cycle_len").unwrap());
            let sgdr = SgdrOptions::new(cycles, length, lr.unwrap());
            learner
                .fit_sgdr(whole("cycle_mult").into_iter().fold(sgdr, SgdrOptions::cycle_mult), ())
        }
        "fine_tune" => {
            let mut tune = FineTuneOptions::new(whole("epochs").unwrap());
            tune = real("base_lr").into_iter().fold(tune, FineTuneOptions::base_lr);
            tune = whole("freeze_epochs").into_iter().fold(tune, FineTuneOptions::freeze_epochs);
            tune = real("lr_mult").into_iter().fold(tune, FineTuneOptions::lr_mult);
            tune = real("pct_start").into_iter().fold(tune, FineTuneOptions::pct_start);
            tune = real("div").into_iter().fold(tune, FineTuneOptions::div_initial);
            tune = real("wd").into_iter().fold(tune, FineTuneOptions::weight_decay);
            learner.fine_tune_with(tune, ())
        }
        "freeze" => learner.freeze(),
        "freeze_to" => learner.freeze_to(args["n"].as_i64().unwrap() as isize),
        "lr_find" => {
            let mut options = LrFindOptions::default();
            options.start_lr = real("start_lr").unwrap_or(options.start_lr);
            options.end_lr = real("end_lr").unwrap_or(options.end_lr);
            options.steps = whole("num_it").unwrap_or(options.steps);
            options.stop_div = args["stop_div"].as_bool().unwrap_or(options.stop_div);
            let state = learner.state_dict().deep_clone()?;
            let before = learner.hypers().to_vec();
            let curve = learner.lr_find_with(options)?;
            let after = learner.state_dict();
            let restored = state.iter().all(|(name, old)| after.get(name) == Some(old));
            let hypers = [before, learner.hypers().to_vec()];
            outcome.found.push(Found { curve, restored, hypers });
            Ok(())
        }
        "validate" => {
            let part = if args["ds_idx"] == 0 { Part::Train } else { Part::Valid };
            outcome.validations.push(learner.validate_on(part)?);
            Ok(())
        }
        "get_preds" => {
            outcome.predictions.push(learner.predictions()?);
            Ok(())
        }
        other => panic!("call {other}"),
    }
}

/// Makes these runs, and fails with all that differs.
pub(crate) fn agree(names: &[&str]) {
    let wrong: Vec<String> = names
        .iter()
        .flat_map(|name| {
            let run = run(name);
            let ours = make(run);
            let mut check = Check::new(run, &ours);
            check.outcome(run, &ours);
            check.finish()
        })
        .collect();
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// Whether a fit ended with a loss that is not finite.
pub(crate) fn is_not_finite(result: &Result<()>) -> bool {
    matches!(
        result.as_ref().err().and_then(|error| error.downcast_ref()),
        Some(TrainError::LossNotFinite { .. } | TrainError::NotFinite { .. })
    )
}
