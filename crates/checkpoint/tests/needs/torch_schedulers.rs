//! Conversion of every schedule for Accelerate: the file, the run that `load_state` continues, and refusals of
//! schedules that PyTorch has no counterpart of.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use brigade_checkpoint::convert::{AccelerateRun, Report, Target, convert};
use brigade_checkpoint::pth::{PthFile, StoredTensor};
use brigade_checkpoint::{Error, Value};
use brigade_schedule::{
    Anneal, Definition, Described, FitOneCycle, LrSchedule, OneCycle, Plateau, PlateauState,
    Schedule,
};
use brigade_test_needs::{Need, needs};
use serde_json::json;

use crate::saved;

/// Learning rates that the optimizer was built with: its own, equal to the first group's, and the second group's.
const BUILT: [f64; 2] = [0.1, 0.05];

/// A checkpoint of a linear layer, an Adam in two groups and a schedule.
struct Saved<'a> {
    ranks: usize,
    /// Number of optimizer steps.
    steps: u64,
    position: u64,
    definition: Option<&'a Definition>,
    rates: [f64; 2],
    momentum: f64,
    plateau: Option<PlateauState>,
}

impl Saved<'_> {
    fn write(&self, folder: &Path) {
        let group = |parameter: &str, index: usize| {
            json!({
                "numbers": {
                    "lr": self.rates[index], "initial_lr": BUILT[index], "beta1": self.momentum,
                    "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "amsgrad": 0.0
                },
                "parameters": [parameter],
            })
        };
        let optimizer = json!({
            "kind": "Adam", "steps": self.steps, "initial_lr": BUILT[0], "lr": self.rates[0],
            "groups": [group("weight", 0), group("bias", 1)],
            "parameters": ["weight", "bias"], "state": {},
        });
        let definition = self
            .definition
            .map_or(Value::None, |definition| Value::<String>::from_plain(definition).unwrap());
        let scheduler = json!({
            "position": self.position, "lr": self.rates[0], "plateau": self.plateau,
            "definition": definition.to_json(),
        });
        let entries = [
            ("model", "model", None, vec![("bias", vec![2]), ("weight", vec![2, 3])]),
            ("optimizer", "optimizer", Some(optimizer), Vec::new()),
            ("scheduler", "scheduler", Some(scheduler), Vec::new()),
        ];
        saved::write(folder, self.ranks, self.steps, &entries);
    }
}

/// A schedule, and the program of Accelerate that continues it.
struct Case {
    name: &'static str,
    definition: Definition,
    /// Learning rate of each group and the momentum, by step.
    values: Box<dyn Fn(u64) -> ([f64; 2], f64)>,
    position: u64,
    /// Python expression of the scheduler, with optimizer `o` and number of processes `n`.
    scheduler: String,
}

fn scaled(lr: f64) -> [f64; 2] {
    [lr, BUILT[1] * (lr / BUILT[0])]
}

fn case(name: &'static str, schedule: Schedule, position: u64, scheduler: &str) -> Case {
    let definition = Definition::All(Described::of(&schedule));
    let values = move |step| (scaled(schedule.lr(step)), schedule.momentum(step).unwrap_or(0.9));
    Case { name, definition, values: Box::new(values), position, scheduler: scheduler.into() }
}

fn function(name: &'static str, function: fn(u64) -> f64, position: u64, scheduler: &str) -> Case {
    let definition = Definition::All(Described::of(&function));
    let values = move |step| (scaled(function(step)), 0.9);
    Case { name, definition, values: Box::new(values), position, scheduler: scheduler.into() }
}

fn triangle(step: u64) -> f64 {
    let place = (step % 6) as f64 / 3.0;
    0.1 + 0.3 * (1.0 - (1.0 - place).abs())
}

/// Returns every schedule, with a `SequentialLR` before, at and after its milestones.
fn cases() -> Vec<Case> {
    let constant = |lr| Schedule::constant(lr).unwrap();
    let linear = |start, end, steps| Schedule::linear(start, end, steps).unwrap();
    let cosine = |end, steps| Schedule::cosine(0.1, end, steps).unwrap();
    let restarts = |steps, factor| Schedule::cosine_restarts(0.1, 0.0, steps, factor).unwrap();
    let step = |lr| Schedule::step(lr, 3, 0.5).unwrap();
    let cycle = || Schedule::one_cycle(OneCycle::new(0.1, 30)).unwrap();
    let phases = OneCycle {
        three_phase: true,
        anneal: Anneal::Linear,
        base_momentum: 0.7,
        ..OneCycle::new(0.1, 30)
    };
    let polynomial = |end| Schedule::polynomial(0.1, end, 12, 2.0).unwrap();
    let inverse = Schedule::inverse_sqrt(0.1, 3).unwrap().warmup(3, 0.0).unwrap();
    let flat = Schedule::flat_cosine(0.1, 0.0, 16, 0.5).unwrap();
    let warm = || cosine(0.0, 12).warmup(4, 0.25).unwrap();
    let sequential =
        "SequentialLR(o, [LinearLR(o, 0.25, 1.0, 4 * n), CosineAnnealingLR(o, 12 * n)], [4 * n])";
    let with_warmup = "get_cosine_schedule_with_warmup(o, 4 * n, 16 * n, num_cycles=0.5)";
    let parts = || {
        let parts = vec![linear(0.02, 0.1, 4), constant(0.1), step(0.05)];
        Schedule::sequence(parts, &[4, 8]).unwrap()
    };
    let in_parts = "SequentialLR(o, [LinearLR(o, 0.2, 1.0, 4 * n), ConstantLR(o, 1.0), \
                    StepLR(o, 3 * n, 0.5)], [4 * n, 8 * n])";
    let mut cases = vec![
        case("constant", constant(0.1), 5, "ConstantLR(o, 1.0, 5)"),
        case("constant of transformers", constant(0.1), 5, "get_constant_schedule(o)"),
        case("linear", linear(0.1, 0.01, 12), 5, "LinearLR(o, 1.0, 0.1, 12 * n)"),
        case("linear upwards", linear(0.01, 0.1, 7), 5, "LinearLR(o, 0.1, 1.0, 7 * n)"),
        case(
            "linear of transformers",
            linear(0.1, 0.0, 12).warmup(4, 0.0).unwrap(),
            2,
            "get_linear_schedule_with_warmup(o, 4 * n, 16 * n)",
        ),
        // Past the minimum rate.
        case("cosine", cosine(0.0, 8), 5, "CosineAnnealingLR(o, 8 * n)"),
        case("cosine at its end", cosine(0.0, 5), 5, "CosineAnnealingLR(o, 5 * n)"),
        case(
            "cosine of transformers",
            cosine(0.0, 16),
            5,
            "get_cosine_schedule_with_warmup(o, 0, 16 * n)",
        ),
        case(
            "cosine with a lowest rate",
            cosine(0.01, 16),
            5,
            "get_cosine_with_min_lr_schedule_with_warmup(o, 0, 16 * n, min_lr=0.01)",
        ),
        case("restarts", restarts(4, 2), 5, "CosineAnnealingWarmRestarts(o, 4 * n, 2)"),
        case("restarts of one length", restarts(3, 1), 5, "CosineAnnealingWarmRestarts(o, 3 * n)"),
        case("polynomial", polynomial(0.0), 5, "PolynomialLR(o, 12 * n, 2.0)"),
        case(
            "polynomial of transformers",
            polynomial(0.01),
            5,
            "get_polynomial_decay_schedule_with_warmup(o, 0, 12 * n, lr_end=0.01, power=2.0)",
        ),
        case(
            "exponential",
            Schedule::exponential(0.1, 0.9).unwrap(),
            5,
            "ExponentialLR(o, 0.9 ** (1 / n))",
        ),
        case("step", step(0.1), 5, "StepLR(o, 3 * n, 0.5)"),
        case(
            "multi-step",
            Schedule::multi_step(0.1, &[3, 7, 9], 0.5).unwrap(),
            5,
            "MultiStepLR(o, [3 * n, 7 * n, 9 * n], 0.5)",
        ),
        case("inverse square root", inverse, 5, "get_inverse_sqrt_schedule(o, 3 * n)"),
        case(
            "flat and cosine",
            flat,
            5,
            "LambdaLR(o, lambda s: 1.0 if s < 8 * n else (1 + math.cos(math.pi * \
             (min(s / n, 16) - 8) / 8)) / 2)",
        ),
        case("one cycle", cycle(), 5, "OneCycleLR(o, [0.1, 0.05], total_steps=30 * n)"),
        case(
            "one cycle in three phases",
            Schedule::one_cycle(phases).unwrap(),
            12,
            "OneCycleLR(o, [0.1, 0.05], total_steps=30 * n, three_phase=True, anneal_strategy='linear', \
             base_momentum=0.7)",
        ),
        case(
            "one cycle after a warm-up",
            cycle().warmup(4, 0.5).unwrap(),
            2,
            "SequentialLR(o, [LinearLR(o, 0.5, 1.0, 4 * n), OneCycleLR(o, [0.1, 0.05], \
             total_steps=30 * n)], [4 * n])",
        ),
        case("sequence", parts(), 2, in_parts),
        case("sequence at a milestone", parts(), 8, in_parts),
        case(
            "a sequence after a warm-up",
            Schedule::sequence(vec![cosine(0.0, 12), restarts(4, 2)], &[5])
                .unwrap()
                .warmup(3, 0.5)
                .unwrap(),
            2,
            "SequentialLR(o, [LinearLR(o, 0.5, 1.0, 3 * n), CosineAnnealingLR(o, 12 * n), \
             CosineAnnealingWarmRestarts(o, 4 * n, 2)], [3 * n, 8 * n])",
        ),
        function(
            "a function",
            |step| 0.1 / (1.0 + step as f64),
            5,
            "LambdaLR(o, lambda s: 1 / (1 + s / n))",
        ),
        function(
            "triangles",
            triangle,
            5,
            "CyclicLR(o, [0.1, 0.05], [0.4, 0.2], step_size_up=3 * n, cycle_momentum=False)",
        ),
    ];
    for (name, position) in [("warm-up", 2), ("warm-up, at its end", 4), ("warm-up, over", 6)] {
        cases.push(case(name, warm(), position, sequential));
    }
    for (name, position) in [("transformers' warm-up", 2), ("transformers' warm-up, over", 6)] {
        cases.push(case(name, cosine(0.0, 12).warmup(4, 0.0).unwrap(), position, with_warmup));
    }
    let groups: [fn(u64) -> f64; 2] =
        [|step| 0.1 / (1.0 + step as f64), |step| 0.05 * 0.5f64.powi(step as i32)];
    cases.push(Case {
        name: "a function for each group",
        definition: Definition::Groups(groups.iter().map(|group| Described::of(group)).collect()),
        values: Box::new(move |step| (groups.map(|group| group(step)), 0.9)),
        position: 5,
        scheduler: "LambdaLR(o, [lambda s: 1 / (1 + s / n), lambda s: 0.5 ** (s / n)])".into(),
    });
    cases
}

#[needs(Trainers)]
fn peer_rates_of_one_process_go_on() {
    rates_go_on(1);
}

#[needs(Trainers)]
fn peer_rates_of_two_processes_go_on() {
    rates_go_on(2);
}

fn rates_go_on(ranks: usize) {
    let folder = tempfile::tempdir().unwrap();
    let (mut asked, mut expected) = (Vec::new(), Vec::new());
    for (index, case) in cases().into_iter().enumerate() {
        let (rates, momentum) = (case.values)(case.position);
        let saved = Saved {
            ranks,
            steps: case.position,
            position: case.position,
            definition: Some(&case.definition),
            rates,
            momentum,
            plateau: None,
        };
        let (theirs, report) =
            converted(&saved, folder.path(), index, AccelerateRun::default()).unwrap();
        assert_eq!(report.changed.len(), 1, "{}: {report:?}", case.name);
        asked.push(json!({
            "name": case.name, "folder": theirs, "scheduler": case.scheduler, "metrics": null,
            "split_batches": false,
        }));
        let rows = (1..=10).map(|step| {
            let (rates, momentum) = (case.values)(case.position + step);
            vec![rates[0], rates[1], momentum]
        });
        expected.push((case.name, rows.collect::<Vec<_>>()));
    }

    // A schedule that counts like Accelerate's with split batches, and one that follows a metric.
    let plateau = Plateau { factor: 0.5, patience: 1, cooldown: 1, ..Plateau::new(0.1) };
    let metrics = [0.9, 0.95, 0.96, 0.97, 0.98, 0.5, 0.6, 0.6, 0.6, 0.6];
    let mut state =
        [1.0, 0.9, 0.95].iter().fold(plateau.start(), |state, it| plateau.after(&state, *it));
    let definition = Definition::Plateau(plateau);
    let saved = Saved {
        ranks,
        steps: 30,
        position: 3,
        definition: Some(&definition),
        rates: scaled(state.lr),
        momentum: 0.9,
        plateau: Some(state),
    };
    let split = AccelerateRun { split_batches: true, num_processes: None };
    let (theirs, _) = converted(&saved, folder.path(), asked.len(), split).unwrap();
    asked.push(json!({
        "name": "plateau", "folder": theirs, "metrics": metrics, "split_batches": true,
        "scheduler": "ReduceLROnPlateau(o, factor=0.5, patience=1, cooldown=1)",
    }));
    let rows = metrics.map(|metric| {
        state = plateau.after(&state, metric);
        let [first, second] = scaled(state.lr);
        vec![first, second, 0.9]
    });
    expected.push(("plateau", rows.to_vec()));

    let found = accelerate_goes_on(ranks, folder.path(), &json!(asked));
    for (name, rows) in expected {
        for (step, row) in rows.iter().enumerate() {
            for (index, expected) in row.iter().enumerate() {
                let found = found[name][step][index].as_f64().unwrap();
                let close = (found - expected).abs() <= 1e-9 * expected.abs() + 1e-13;
                assert!(close, "{name}, step {step}, value {index}: {found} {expected}");
            }
        }
    }
}

fn accelerate_goes_on(ranks: usize, folder: &Path, cases: &serde_json::Value) -> serde_json::Value {
    let asked = folder.join("cases.json");
    fs::write(&asked, cases.to_string()).unwrap();
    let python = brigade_test_needs::python(Need::Trainers).unwrap();
    let mut command = Command::new(python);
    if ranks > 1 {
        command.args(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]);
        command.arg(ranks.to_string());
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/torch_schedulers.py");
    let output = command.arg(script).arg(asked).env("OMP_NUM_THREADS", "1").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    serde_json::from_str(text.lines().last().unwrap()).unwrap()
}

fn converted(
    saved: &Saved<'_>,
    folder: &Path,
    index: usize,
    run: AccelerateRun,
) -> Result<(PathBuf, Report), Error> {
    let (ours, theirs) =
        (folder.join(format!("ours_{index}")), folder.join(format!("theirs_{index}")));
    saved.write(&ours);
    let report = convert(&ours, &theirs, Target::Accelerate(run))?;
    Ok((theirs, report))
}

fn state(file: &Path) -> Value<StoredTensor> {
    PthFile::open(file).unwrap().value().unwrap()
}

fn ints<'v>(state: &'v Value<StoredTensor>, keys: &[&'v str]) -> Vec<Option<i64>> {
    keys.iter().map(|key| state.get(key).and_then(Value::as_int)).collect()
}

fn at(definition: &Definition, ranks: usize, position: u64, steps: u64) -> Saved<'_> {
    let plateau = matches!(definition, Definition::Plateau(_));
    let plateau =
        plateau.then_some(PlateauState { lr: 0.1, best: None, bad: 0, cooling: 0, seen: 2 });
    let definition = Some(definition);
    Saved { ranks, steps, position, definition, rates: [0.08, 0.04], momentum: 0.9, plateau }
}

#[needs()]
fn a_state_says_the_whole_schedule() {
    let folder = tempfile::tempdir().unwrap();
    let run = AccelerateRun::default();
    let cosine = Schedule::cosine(0.1, 0.0, 8).unwrap();
    let definition = Definition::All(Described::of(&cosine.warmup(3, 0.25).unwrap()));
    let (theirs, report) = converted(&at(&definition, 2, 5, 5), folder.path(), 0, run).unwrap();
    assert_eq!(
        report.changed,
        [
            "scheduler: for SequentialLR of LinearLR, CosineAnnealingLR, or LambdaLR, at 10 steps: 5 optimizer \
          steps, and Accelerate steps it once for each of 2 processes"
        ]
    );
    let scheduler = state(&theirs.join("scheduler.bin"));
    assert_eq!(ints(&scheduler, &["last_epoch", "_step_count"]), [Some(10), Some(11)]);
    let rates = [0.08, 0.04].map(Value::Float).to_vec();
    assert_eq!(scheduler.get("_last_lr"), Some(&Value::List(rates)));
    assert_eq!(scheduler.get("_milestones"), Some(&Value::List(vec![Value::Int(6)])));
    assert_eq!(scheduler.get("lr_lambdas"), Some(&Value::List(vec![Value::None; 2])));
    let parts = scheduler.get("_schedulers").and_then(Value::as_items).unwrap();
    assert_eq!(ints(&parts[0], &["last_epoch", "total_iters"]), [Some(5), Some(6)]);
    assert_eq!(ints(&parts[1], &["last_epoch", "T_max"]), [Some(4), Some(16)]);
    let rates = [0.1, 0.05].map(Value::Float).to_vec();
    assert_eq!(parts[1].get("base_lrs"), Some(&Value::List(rates)));

    let cycle = Schedule::one_cycle(OneCycle::new(0.3, 41)).unwrap();
    let definition = Definition::All(Described::of(&cycle));
    let (theirs, _) = converted(&at(&definition, 1, 5, 5), folder.path(), 1, run).unwrap();
    let scheduler = state(&theirs.join("scheduler.bin"));
    assert_eq!(ints(&scheduler, &["last_epoch", "total_steps"]), [Some(5), Some(41)]);
    let optimizer = state(&theirs.join("optimizer.bin"));
    let groups = optimizer.get("param_groups").and_then(Value::as_items).unwrap();
    for (group, rate) in groups.iter().zip([0.3, 0.15]) {
        let number = |key: &str| group.get(key).and_then(Value::as_float).unwrap();
        let found = ["max_lr", "initial_lr", "min_lr", "base_momentum", "max_momentum"].map(number);
        let expected = [rate, rate / 25.0, rate / 25e4, 0.85, 0.95];
        for (found, expected) in found.into_iter().zip(expected) {
            assert!((found - expected).abs() < 1e-15, "{found} {expected}");
        }
    }
}

#[needs()]
fn a_count_of_each_rank_or_of_epochs_stays() {
    let folder = tempfile::tempdir().unwrap();
    let definition = Definition::All(Described::of(&Schedule::step(0.1, 3, 0.5).unwrap()));
    let split = AccelerateRun { split_batches: true, num_processes: None };
    let four = AccelerateRun { split_batches: false, num_processes: Some(4) };
    let [one, two] = [1, 2]
        .map(|processes| AccelerateRun { split_batches: false, num_processes: Some(processes) });
    let usual = AccelerateRun::default();
    // Ranks, position, optimizer steps, the run, then its count and its `step_size`.
    let table = [
        (2, 5, 5, usual, (10, 6)),
        (2, 5, 5, split, (5, 3)),
        (2, 5, 5, four, (20, 12)),
        (1, 5, 5, usual, (5, 3)),
        // With `step_per_process`, and a schedule of epochs.
        (2, 10, 5, usual, (10, 3)),
        (2, 10, 5, two, (10, 3)),
        (2, 2, 50, split, (2, 3)),
        (2, 2, 50, one, (2, 3)),
        (1, 2, 50, usual, (2, 3)),
    ];
    for (index, (ranks, position, steps, run, (count, size))) in table.into_iter().enumerate() {
        let saved = at(&definition, ranks, position, steps);
        let (theirs, report) = converted(&saved, folder.path(), index, run).unwrap();
        let scheduler = state(&theirs.join("scheduler.bin"));
        let found = ints(&scheduler, &["last_epoch", "step_size"]);
        assert_eq!(found, [Some(count), Some(size)], "{index}: {report:?}");
    }
    // Schedules that Accelerate would step at another pace.
    let folder = tempfile::tempdir().unwrap();
    let leave_out = "Leave out --num-processes and --split-batches, and go on with 2 processes";
    let refused = [
        (2, 10, 5, split, leave_out),
        (2, 10, 5, four, leave_out),
        (2, 10, 5, one, leave_out),
        (2, 2, 50, usual, "Give --split-batches where"),
        (1, 2, 50, four, "Give --split-batches where"),
        (2, 0, 50, usual, "its count of 0 is not that of the 50 optimizer steps"),
    ];
    for (index, (ranks, position, steps, run, expected)) in refused.into_iter().enumerate() {
        let saved = at(&definition, ranks, position, steps);
        let error = converted(&saved, folder.path(), index, run).unwrap_err().to_string();
        assert!(error.contains(expected), "{index}: {error}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), index + 1, "{error}");
    }
}

#[needs()]
fn what_pytorch_has_no_counterpart_of_is_named() {
    struct Moving;
    impl LrSchedule for Moving {
        fn lr(&self, _: u64) -> f64 {
            0.1
        }

        fn momentum(&self, _: u64) -> Option<f64> {
            Some(0.9)
        }
    }
    let all = |schedule: Schedule| Definition::All(Described::of(&schedule));
    let cycle = || Schedule::one_cycle(OneCycle::new(0.1, 41)).unwrap();
    let constant = Schedule::constant(0.1).unwrap();
    let table = [
        (all(Schedule::fit_one_cycle(FitOneCycle::new(0.1, 8)).unwrap()), 1, "fit_one_cycle"),
        (all(constant.clone().with_momentum(constant)), 1, "with_momentum"),
        (all(Schedule::sequence(vec![cycle(), cycle()], &[41]).unwrap()), 1, "several one-cycle"),
        (
            Definition::All(Described::of(&Moving)),
            1,
            "a function of the program that sets a momentum",
        ),
        (
            Definition::Groups(vec![Described::of(&cycle())]),
            1,
            "its groups have separate schedules",
        ),
        (Definition::Plateau(Plateau::new(0.1)), 2, "--split-batches"),
    ];
    let folder = tempfile::tempdir().unwrap();
    for (index, (definition, ranks, expected)) in table.into_iter().enumerate() {
        let saved = at(&definition, ranks, 5, 5);
        let error = converted(&saved, folder.path(), index, AccelerateRun::default()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("scheduler has no counterpart") && text.contains(expected), "{text}");
        let left = fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(left, index + 1, "{text}");
    }
}
