//! How numbers of ours are compared with the golden file's: within what the rounding of each run can change, which
//! runs with perturbed weights show on the processor of the test.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::path::Path;

use brigade_learn::{GroupHypers, Learner, Suggestion};
use brigade_test_device::changes;
use serde_json::Value;
use tch::{Kind, Tensor};

use super::noter::FitNotes;
use super::perturbed::{PERTURBED_RUNS, perturbed};
use super::recipe::{number, numbers};
use super::runs::{Found, Outcome};

/// How close two numbers must be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tolerance {
    pub(crate) absolute: f64,
    pub(crate) relative: f64,
}

/// Numbers of schedules. fastai computes the place within a part of a schedule in `f32`, of which the smallest
/// numbers of a curve have less than the largest.
pub(crate) fn of_schedule(largest: f64) -> Tolerance {
    Tolerance { absolute: 3e-7 * largest, relative: 1e-6 }
}

/// A list of losses or norms of a fit.
type List = fn(&FitNotes) -> &[f64];

/// Metrics, which fastai keeps in `f32`.
const METRIC: Tolerance = Tolerance { absolute: 2e-7, relative: 1e-6 };
/// How many times the change in perturbed runs is allowed: the golden run was rounded otherwise, and so is ours.
const TIMES: f64 = 5.0;

/// Collects what differs, so that a failure shows all of it.
pub(crate) struct Check {
    pub(crate) name: String,
    perturbed: Vec<Outcome>,
    /// The largest changes in the perturbed runs: of a loss, and of a final sum relative to its sum of absolute values.
    noise: [f64; 2],
    /// The largest share of a number that its allowance may be.
    most: f64,
    pub(crate) wrong: Vec<String>,
    /// The largest deviation, in units of the noise, of losses and of final sums.
    pub(crate) largest: [f64; 2],
}

/// The sum and the sum of absolute values of each parameter and buffer.
fn sums_of(learner: &Learner) -> BTreeMap<String, [f64; 2]> {
    let sums = |tensor: &Tensor| {
        let tensor = tensor.to_kind(Kind::Double);
        [tensor.sum(None), tensor.abs().sum(None)].map(|it| it.double_value(&[]))
    };
    learner.state_dict().iter().map(|(name, tensor)| (name.to_owned(), sums(tensor))).collect()
}

impl Check {
    /// A check of `ours`, the outcome of `run`, which is made again with perturbed weights.
    pub(crate) fn new(run: &Value, ours: &Outcome) -> Self {
        let perturbed: Vec<Outcome> =
            (1..=PERTURBED_RUNS).map(|seed| perturbed(run, seed)).collect();
        let mut noise = [0.0_f64; 2];
        for (at, fit) in ours.fits.iter().enumerate() {
            for list in [FitNotes::loss, FitNotes::valid_batch_loss] {
                let others = perturbed.iter().filter_map(|it| it.fits.get(at)).map(list);
                let changes = changes(list(fit), &others.collect::<Vec<_>>());
                noise[0] = noise[0].max(changes.last().copied().unwrap_or(0.0));
            }
        }
        for (at, validation) in ours.validations.iter().enumerate() {
            for other in perturbed.iter().filter_map(|it| it.validations.get(at)) {
                noise[0] = noise[0].max((validation.loss - other.loss).abs());
            }
        }
        let sums = sums_of(&ours.learner);
        for other in &perturbed {
            for (name, [sum, absolute]) in sums_of(&other.learner) {
                let [expected, magnitude] = sums[&name];
                let apart = (sum - expected).abs().max((absolute - magnitude).abs()) / magnitude;
                if apart.is_finite() {
                    noise[1] = noise[1].max(apart);
                }
            }
        }
        let is_search = !run["lr_find"].is_null();
        let most = if is_search { 1e-2 } else { 1e-4 };
        let mut wrong = Vec::new();
        if noise[1] > most {
            wrong.push(format!("perturbed runs end too far apart to compare: {:e}", noise[1]));
        }
        Self {
            name: run["name"].as_str().unwrap_or_default().to_owned(),
            perturbed,
            noise,
            most,
            wrong,
            largest: [0.0; 2],
        }
    }

    /// What a loss may differ by where perturbed runs are `change` apart; never more than 1e-4 of it, and than 1e-2 in
    /// a search, whose losses explode at its end, and rounding with them.
    fn allowed(&self, change: f64, theirs: f64) -> Tolerance {
        let rounding = 2.0 * f64::from(f32::EPSILON) * theirs.abs();
        let absolute = (TIMES * change + rounding).min(self.most * theirs.abs());
        Tolerance { absolute, relative: 0.0 }
    }

    pub(crate) fn near(&mut self, what: impl fmt::Display, ours: f64, theirs: f64, by: Tolerance) {
        let apart = (ours - theirs).abs();
        let same = ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan());
        if !same && (apart.is_nan() || apart > by.absolute + by.relative * theirs.abs()) {
            self.wrong.push(format!("{what}: {ours} instead of {theirs}, {apart:e} apart"));
        }
    }

    pub(crate) fn equal<T: PartialEq + fmt::Debug>(
        &mut self,
        what: impl fmt::Display,
        ours: &T,
        theirs: &T,
    ) {
        if ours != theirs {
            self.wrong.push(format!("{what}: {ours:?} instead of {theirs:?}"));
        }
    }

    /// Compares a list of losses of the fit with this number.
    pub(crate) fn losses(
        &mut self,
        what: &str,
        fit: usize,
        list: List,
        ours: &[f64],
        theirs: &Value,
    ) {
        let theirs = numbers(theirs);
        self.equal(format_args!("{what}: how many"), &ours.len(), &theirs.len());
        let others = self.perturbed.iter().filter_map(|it| it.fits.get(fit)).map(list);
        let changes = changes(ours, &others.collect::<Vec<_>>());
        for (at, ((ours, theirs), change)) in ours.iter().zip(theirs).zip(changes).enumerate() {
            if change > 0.0 {
                self.largest[0] = self.largest[0].max((ours - theirs).abs() / change);
            }
            let by = self.allowed(change, theirs);
            self.near(format_args!("{what}[{at}]"), *ours, theirs, by);
        }
    }

    /// Compares losses that fastai has averaged in `f32`.
    fn smooth(&mut self, what: impl fmt::Display, ours: f64, theirs: f64) {
        let by = Tolerance { relative: 3e-6, ..self.allowed(self.noise[0], theirs) };
        self.near(what, ours, theirs, by);
    }

    fn names(&mut self, what: impl fmt::Display, ours: &[String], theirs: &Value) {
        let theirs: HashSet<String> = serde_json::from_value(theirs.clone()).unwrap();
        self.equal(what, &ours.iter().cloned().collect(), &theirs);
    }

    /// Compares everything that the golden run has noted.
    pub(crate) fn outcome(&mut self, run: &Value, ours: &Outcome) {
        if let Err(error) = &ours.result {
            self.wrong.push(format!("it failed: {error}"));
        }
        let fits = run["fits"].as_array().unwrap();
        self.equal("fits", &ours.fits.len(), &fits.len());
        for (at, (ours, theirs)) in ours.fits.iter().zip(fits).enumerate() {
            self.fit(at, ours, theirs);
        }
        self.found(&ours.found, &run["lr_find"]);
        self.passes(ours, run);
        let last = ours.fits.last().into_iter().flat_map(|fit| &fit.hypers).flatten();
        let by = of_schedule(last.map(|it| it.lr).fold(0.0, f64::max));
        // A search alone leaves no optimizer, while fastai keeps the one that it has made.
        if !ours.learner.hypers().is_empty() || ours.found.is_empty() {
            self.hypers("hypers_after", ours.learner.hypers(), &run["hypers_after"], by);
        }
        self.sums(&ours.learner, &run["final"]);
        self.files(ours.folder.path(), &run["files"]);
        if let Some(hps) = run.get("hps") {
            self.schedules(ours.fits.last().unwrap(), hps);
        }
    }

    pub(crate) fn fit(&mut self, fit: usize, ours: &FitNotes, theirs: &Value) {
        let at = &format!("fit {fit}, ");
        let field = |name: &str| format!("{at}{name}");
        self.batches(fit, at, ours, theirs);
        self.names(field("trainable"), &ours.trainable, &theirs["trainable"]);
        if let Some(first) = ours.hypers.first() {
            let exact = of_schedule(0.0);
            self.hypers(
                &field("hypers_at_first_batch"),
                first,
                &theirs["hypers_at_first_batch"],
                exact,
            );
        }
        if let Some(changed) = theirs["changed"].as_array() {
            self.equal(field("changed epochs"), &ours.changed.len(), &changed.len());
            for (epoch, (ours, theirs)) in ours.changed.iter().zip(changed).enumerate() {
                self.names(format_args!("{at}changed[{epoch}]"), ours, theirs);
            }
        }
        let norms: [(&str, List); 2] = [
            ("grad_norm_before", |notes| &notes.norm_before),
            ("grad_norm_after", |notes| &notes.norm_after),
        ];
        for (name, list) in norms {
            if let Some(theirs) = theirs.get(name) {
                self.losses(&field(name), fit, list, list(ours), theirs);
            }
        }
        self.recorder(at, ours, theirs);
    }

    /// Compares what is noted of each batch.
    fn batches(&mut self, fit: usize, at: &str, ours: &FitNotes, theirs: &Value) {
        let field = |name: &str| format!("{at}{name}");
        for (name, of) in [("lr", 0), ("mom", 1)] {
            let theirs = theirs[name].as_array().unwrap();
            self.equal(format_args!("{at}{name}: batches"), &ours.hypers.len(), &theirs.len());
            let largest = theirs.iter().map(numbers).fold(Vec::new(), larger);
            for (batch, (ours, theirs)) in ours.hypers.iter().zip(theirs).enumerate() {
                for (group, (ours, theirs)) in ours.iter().zip(numbers(theirs)).enumerate() {
                    let ours = [ours.lr, ours.momentum][of];
                    let by = of_schedule(largest[group]);
                    self.near(format_args!("{at}{name}[{batch}][{group}]"), ours, theirs, by);
                }
            }
        }
        self.losses(&field("loss"), fit, FitNotes::loss, &ours.loss, &theirs["loss"]);
        let backward = theirs.get("backward_loss").unwrap_or_else(|| &theirs["loss"]);
        let list: List = |notes| &notes.backward_loss;
        self.losses(&field("backward_loss"), fit, list, &ours.backward_loss, backward);
        let stepped = match theirs.get("stepped") {
            Some(stepped) => serde_json::from_value(stepped.clone()).unwrap(),
            None => (0..ours.loss.len()).collect::<Vec<usize>>(),
        };
        self.equal(field("stepped"), &ours.stepped, &stepped);
        let (valid, list) = (field("valid_batch_loss"), FitNotes::valid_batch_loss);
        self.losses(&valid, fit, list, &ours.valid_batch_loss, &theirs["valid_batch_loss"]);
    }

    pub(crate) fn recorder(&mut self, at: &str, ours: &FitNotes, theirs: &Value) {
        let recorder = &ours.recorder;
        let smooth = numbers(&theirs["smooth_loss"]);
        self.equal(format_args!("{at}recorded"), &recorder.smooth_losses().len(), &smooth.len());
        for (batch, (ours, theirs)) in recorder.smooth_losses().iter().zip(smooth).enumerate() {
            self.smooth(format_args!("{at}smooth_loss[{batch}]"), *ours, theirs);
        }
        let last = |batch: &Value| number(batch.as_array().unwrap().last().unwrap());
        let lrs: Vec<f64> = match theirs.get("recorder_lrs") {
            Some(lrs) => numbers(lrs),
            None => theirs["lr"].as_array().unwrap().iter().map(last).collect(),
        };
        self.equal(format_args!("{at}recorder_lrs"), &recorder.lrs().len(), &lrs.len());
        let by = of_schedule(lrs.iter().copied().fold(0.0, f64::max));
        for (ours, theirs) in recorder.lrs().iter().zip(lrs) {
            self.near(format_args!("{at}recorder_lrs"), *ours, theirs, by);
        }
        let iters: Vec<usize> = serde_json::from_value(theirs["iters"].clone()).unwrap();
        self.equal(format_args!("{at}iters"), &recorder.iters().to_vec(), &iters);
        // A search has no validation, and records none.
        let searching = recorder.names() == ["train_loss"];
        if !searching {
            self.columns(at, recorder.names(), &theirs["metric_names"]);
        }
        let rows = theirs["epochs"].as_array().unwrap();
        self.equal(format_args!("{at}epochs"), &recorder.rows().len(), &rows.len());
        for (epoch, (ours, theirs)) in recorder.rows().iter().zip(rows).enumerate() {
            let theirs = numbers(theirs);
            // An epoch that was cancelled as a whole, or in both of its parts.
            if theirs.is_empty() {
                let nothing = vec![None; recorder.names().len()];
                self.equal(format_args!("{at}epochs[{epoch}]"), &ours.values, &nothing);
                continue;
            }
            // One whose training was cancelled has no training loss: fastai leaves it out.
            let cut = recorder.names().len() - theirs.len();
            let names = &recorder.names()[cut..];
            let (missing, values) = ours.values.split_at(cut);
            self.equal(format_args!("{at}epochs[{epoch}]"), &missing, &vec![None; cut].as_slice());
            self.row(&format!("{at}epochs[{epoch}]"), names, values, &theirs);
        }
    }

    /// Compares a row of the epochs' table.
    pub(crate) fn row(&mut self, at: &str, names: &[String], ours: &[Option<f64>], theirs: &[f64]) {
        self.equal(format_args!("{at} width"), &ours.len(), &theirs.len());
        for ((name, ours), theirs) in names.iter().zip(ours).zip(theirs) {
            let Some(ours) = *ours else {
                self.wrong.push(format!("{at} {name}: missing instead of {theirs}"));
                continue;
            };
            if name.ends_with("_loss") && name != "my_loss" {
                self.smooth(format_args!("{at} {name}"), ours, *theirs);
            } else {
                self.near(format_args!("{at} {name}"), ours, *theirs, METRIC);
            }
        }
    }

    /// Compares the names of the columns, which in fastai begin with the epoch's number.
    fn columns(&mut self, at: &str, ours: &[String], theirs: &Value) {
        let theirs: Vec<String> = serde_json::from_value(theirs.clone()).unwrap();
        self.equal(format_args!("{at}metric_names"), &ours, &&theirs[1..]);
    }

    pub(crate) fn hypers(
        &mut self,
        what: &str,
        ours: &[GroupHypers],
        theirs: &Value,
        by: Tolerance,
    ) {
        // A run without a fit has none.
        let theirs = theirs.as_array().map(Vec::as_slice).unwrap_or_default();
        self.equal(format_args!("{what}: groups"), &ours.len(), &theirs.len());
        for (group, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
            for (name, ours) in [("lr", ours.lr), ("mom", ours.momentum), ("wd", ours.weight_decay)]
            {
                let theirs = theirs.get(name).map_or(0.0, number);
                self.near(format_args!("{what}[{group}] {name}"), ours, theirs, by);
            }
        }
    }

    pub(crate) fn sums(&mut self, learner: &Learner, theirs: &Value) {
        let Some(theirs) = theirs.as_object() else { return };
        let state = learner.state_dict();
        let mut names: Vec<&str> = state.names().collect();
        names.sort_unstable();
        let mut expected: Vec<&str> = theirs.keys().map(String::as_str).collect();
        expected.sort_unstable();
        self.equal("names of parameters and buffers", &names, &expected);
        for (name, ours) in sums_of(learner) {
            let Some(theirs) = theirs.get(&name) else { continue };
            let theirs: [f64; 2] = numbers(theirs).try_into().unwrap();
            let magnitude = theirs[1];
            let allowed = (TIMES * self.noise[1] + f64::from(f32::EPSILON)) * magnitude;
            let by = Tolerance { absolute: allowed, relative: 0.0 };
            for ((what, ours), theirs) in ["sum", "absolute sum"].iter().zip(ours).zip(theirs) {
                if self.noise[1] > 0.0 && magnitude > 0.0 {
                    let apart = (ours - theirs).abs() / magnitude / self.noise[1];
                    self.largest[1] = self.largest[1].max(apart);
                }
                self.near(format_args!("final {what} of {name}"), ours, theirs, by);
            }
        }
    }

    /// Compares searches for a learning rate.
    fn found(&mut self, ours: &[Found], theirs: &Value) {
        let theirs = theirs.as_array().map(Vec::as_slice).unwrap_or_default();
        self.equal("searches", &ours.len(), &theirs.len());
        for (ours, theirs) in ours.iter().zip(theirs) {
            let iterations = theirs["iterations"].as_u64().unwrap() as usize;
            self.equal("iterations", &ours.curve.lrs().len(), &iterations);
            self.equal("restored", &ours.restored, &theirs["restored"].as_bool().unwrap());
            // fastai leaves the rate that the Learner has for fits without one; ours the one that was there.
            self.equal("hyperparameters", &ours.hypers[1], &ours.hypers[0]);
            for rule in Suggestion::ALL {
                let theirs = number(&theirs["returned"][rule.name()]);
                let by = Tolerance { absolute: 0.0, relative: 1e-6 };
                match ours.curve.suggest(rule) {
                    Ok(ours) => self.near(rule.name(), ours, theirs, by),
                    Err(error) => self.wrong.push(error.to_string()),
                }
            }
        }
    }

    /// Compares validations and predictions.
    fn passes(&mut self, ours: &Outcome, run: &Value) {
        let list = |name: &str| run[name].as_array().map(Vec::as_slice).unwrap_or_default();
        let metrics = run["metrics"].as_array().unwrap();
        self.equal("validations", &ours.validations.len(), &list("validate").len());
        for (ours, theirs) in ours.validations.iter().zip(list("validate")) {
            let theirs = numbers(theirs);
            self.equal("metrics", &ours.metrics.len(), &metrics.len());
            self.smooth("validate: loss", ours.loss, theirs[0]);
            for ((name, ours), theirs) in ours.metrics.iter().zip(&theirs[1..]) {
                self.near(format_args!("validate: {name}"), *ours, *theirs, METRIC);
            }
        }
        self.equal("predictions", &ours.predictions.len(), &list("get_preds").len());
        let calls = run["calls"].as_array().unwrap().iter().filter(|it| it[0] == "get_preds");
        for (at, (call, theirs)) in calls.zip(list("get_preds")).enumerate() {
            // Inputs come first if they are requested, and decisions are included only if they are.
            let theirs = theirs.as_array().unwrap().as_slice();
            let theirs = if call[1]["with_input"] == true { &theirs[1..] } else { theirs };
            let parts = |outcome: &Outcome| -> Vec<Vec<f64>> {
                let Some(all) = outcome.predictions.get(at) else { return Vec::new() };
                let decoded = (call[1]["with_decoded"] == true).then_some(&all.decoded);
                let tensors =
                    [Some(&all.predictions), all.targets.as_ref(), decoded, all.losses.as_ref()];
                let doubles = |it: &Tensor| it.to_kind(Kind::Double).flatten(0, -1);
                let tensors = tensors.into_iter().flatten().map(doubles);
                tensors.map(|it| Vec::try_from(&it).unwrap()).collect()
            };
            let ours = parts(ours);
            let others: Vec<Vec<Vec<f64>>> = self.perturbed.iter().map(parts).collect();
            self.equal("parts of the predictions", &ours.len(), &theirs.len());
            for (part, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
                let theirs = flat(theirs);
                self.equal(format_args!("predictions {part}"), &ours.len(), &theirs.len());
                let others: Vec<&Vec<f64>> = others.iter().filter_map(|it| it.get(part)).collect();
                let change = changes(ours, &others).last().copied().unwrap_or(0.0);
                if change > self.most {
                    self.wrong.push(format!("perturbed predictions are {change:e} apart"));
                }
                let by =
                    Tolerance { absolute: TIMES * change, relative: 2.0 * f64::from(f32::EPSILON) };
                for (ours, theirs) in ours.iter().zip(theirs) {
                    self.near(format_args!("predictions {part}"), *ours, theirs, by);
                }
            }
        }
    }

    fn files(&mut self, folder: &Path, theirs: &Value) {
        let theirs: Vec<String> = serde_json::from_value(theirs.clone()).unwrap_or_default();
        let mut ours = Vec::new();
        let mut folders = vec![folder.to_owned()];
        while let Some(inside) = folders.pop() {
            for entry in std::fs::read_dir(inside).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    let path = path.strip_prefix(folder).unwrap();
                    ours.push(path.to_str().unwrap().replace('\\', "/"));
                }
            }
        }
        ours.sort_unstable();
        self.equal("files", &ours, &theirs);
    }

    /// Compares what a scheduler has set at each batch.
    fn schedules(&mut self, ours: &FitNotes, theirs: &Value) {
        for (name, values) in theirs.as_object().unwrap() {
            let values = numbers(values);
            let by = of_schedule(values.iter().copied().fold(0.0, f64::max));
            for (batch, (ours, theirs)) in ours.hypers.iter().zip(values).enumerate() {
                let last = ours.last().unwrap();
                let ours = match name.as_str() {
                    "lr" => last.lr,
                    "mom" => last.momentum,
                    "wd" => last.weight_decay,
                    other => panic!("hyperparameter {other}"),
                };
                self.near(format_args!("hps {name}[{batch}]"), ours, theirs, by);
            }
        }
    }

    /// Returns what is wrong, with the run's name, and prints the largest deviations.
    pub(crate) fn finish(self) -> Vec<String> {
        println!(
            "{}: {:.2} and {:.2} times the noise",
            self.name, self.largest[0], self.largest[1]
        );
        let few = self.wrong.len().min(12);
        let more = self.wrong.len() - few;
        let mut lines: Vec<String> =
            self.wrong[..few].iter().map(|it| format!("{}: {it}", self.name)).collect();
        if more > 0 {
            lines.push(format!("{}: and {more} more", self.name));
        }
        lines
    }
}

/// All numbers of nested lists.
fn flat(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(parts) => parts.iter().flat_map(flat).collect(),
        value => vec![number(value)],
    }
}

/// The larger of each pair; the first list may be empty.
fn larger(mut largest: Vec<f64>, values: Vec<f64>) -> Vec<f64> {
    largest.resize(values.len(), 0.0);
    largest.iter().zip(values).map(|(largest, value)| largest.max(value)).collect()
}
