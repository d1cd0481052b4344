//! A run of Accelerate's, of Hugging Face's Trainer or of Lightning goes on here: `brigade checkpoint convert
//! --like`, and of Accelerate's back.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use brigade_checkpoint::Torch;
use brigade_checkpoint::convert::{AccelerateRun, StateKind, Target, convert, convert_like};
use brigade_nn::{BatchNorm1d, Embedding, Linear, Model, Module, ParamPath};
use brigade_optim::{AdamW, Scheduler};
use brigade_schedule::{Definition, LrSchedule, Plateau};
use brigade_test_needs::{Need, needs};
use brigade_torch::from_vec;
use brigade_train::{Accelerator, PreparedModel, PreparedOptimizer, PreparedScheduler};
use parking_lot::{Mutex, MutexGuard};
use serde_json::Value;
use tch::Tensor;

/// The net of `fixtures/make_accelerate.py`.
struct Net {
    first: Linear,
    norm: BatchNorm1d,
    last: Linear,
}

impl Net {
    fn new(path: &ParamPath<'_>) -> Self {
        Self {
            first: Linear::new(path / 0, 4, 5),
            norm: BatchNorm1d::new(path / 1, 5),
            last: Linear::new(path / 3, 5, 3),
        }
    }
}

impl Module<&Tensor> for Net {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> brigade_torch::Result<Tensor> {
        self.last.forward(&self.norm.forward(&self.first.forward(input)?)?.relu())
    }
}

/// Its loop.
struct Run {
    accelerator: Accelerator,
    model: PreparedModel<Net>,
    optimizer: PreparedOptimizer,
    scheduler: PreparedScheduler,
}

impl Run {
    fn new(seed: i64) -> Self {
        let accelerator = Accelerator::builder().cpu(true).quiet(true).build().unwrap();
        accelerator.set_seed(seed);
        let model = Model::new(Net::new).unwrap();
        let optimizer = AdamW::default().lr(0.02).betas(0.9, 0.99).weight_decay(0.05);
        let optimizer = optimizer.no_decay_on_norms_and_biases(true).build(&model).unwrap();
        let schedule = brigade_schedule::Schedule::step(0.02, 3, 0.5).unwrap();
        let scheduler = Scheduler::new(&optimizer, schedule);
        let (mut model, optimizer, scheduler) =
            accelerator.prepare((model, optimizer, scheduler)).unwrap();
        model.train();
        Self { accelerator, model, optimizer, scheduler }
    }

    fn step(&mut self, number: usize) -> f64 {
        let (inputs, targets) = batch(number);
        let loss = self.model.forward(&inputs).unwrap().cross_entropy_for_logits(&targets);
        self.optimizer.zero_grad().unwrap();
        self.accelerator.backward(&loss).unwrap();
        self.optimizer.step().unwrap();
        self.scheduler.step().unwrap();
        loss.double_value(&[])
    }

    fn save(&self, path: &Path) {
        self.accelerator.save_state(path).unwrap();
        self.accelerator.checkpoints().wait().unwrap();
    }
}

/// A batch of the scripts in `fixtures`.
fn batch(number: usize) -> (Tensor, Tensor) {
    let inputs = (0..24).map(|i| (i as f32 + number as f32).sin()).collect::<Vec<_>>();
    let targets = (0..6).map(|i| ((i + number) % 3) as i64).collect::<Vec<_>>();
    (from_vec(inputs, &[6, 4]).unwrap(), from_vec(targets, &[6]).unwrap())
}

/// libtorch has one generator of random numbers for all threads of a process.
static GENERATOR: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    GENERATOR.lock()
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../checkpoint/tests/fixtures")
}

fn close(found: f64, expected: f64, what: &str) {
    assert!(
        (found - expected).abs() <= 2e-5 * expected.abs().max(0.1),
        "{what}: {found} {expected}"
    );
}

/// Losses and weights of the run that went on in Python.
fn goes_on(converted: &Path, random: bool) {
    let expected = fs::read_to_string(fixtures().join("accelerate.json")).unwrap();
    let expected: Value = serde_json::from_str(&expected).unwrap();
    let mut run = Run::new(2);
    let loaded = run.accelerator.load_state(converted).unwrap();
    assert_eq!(loaded.step, 5);
    let drawn = Tensor::rand([4], (tch::Kind::Float, tch::Device::Cpu));
    for (index, expected) in expected["drawn"].as_array().unwrap().iter().enumerate() {
        let same = drawn.double_value(&[index as i64]) == expected.as_f64().unwrap();
        assert_eq!(same, random, "random number {index}");
    }
    for (number, expected) in expected["losses"].as_array().unwrap().iter().enumerate() {
        close(run.step(5 + number), expected.as_f64().unwrap(), &format!("loss {number}"));
    }
    assert_eq!(run.optimizer.steps().unwrap(), 9);
    close(run.scheduler.lr().unwrap(), expected["lr"][0].as_f64().unwrap(), "rate");
    for (name, values) in expected["weights"].as_object().unwrap() {
        // The normalisation removes the bias before it: its gradient is rounding, and Adam makes a step of full length
        // of any gradient.
        if ["0.bias", "1.running_mean"].contains(&name.as_str()) {
            continue;
        }
        let state = run.model.inner().state_dict();
        let found = state.get(name).unwrap().to_kind(tch::Kind::Double).reshape([-1]);
        for (index, value) in values.as_array().unwrap().iter().enumerate() {
            close(found.double_value(&[index as i64]), value.as_f64().unwrap(), name);
        }
    }
}

#[needs()]
fn a_folder_of_accelerates_goes_on() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let (like, made) = (folder.path().join("like"), folder.path().join("made"));
    Run::new(1).save(&like);
    let report = convert_like(&fixtures().join("accelerate"), &made, &like, &[]).unwrap();
    // This program has no scaler, and runs of Brigade do not have Python's generators.
    let left = report.left_out.join("\n");
    assert!(left.contains("scaler.pt: "), "{left}");
    assert!(left.contains("random_state, numpy_random_seed"), "{left}");
    assert!(left.contains("scheduler.bin: step_size, gamma, base_lrs"), "{left}");
    assert_eq!((report.left_out.len(), report.kept.len()), (3, 0), "{report:?}");
    goes_on(&made, true);
}

#[needs()]
fn pickled_weights_and_unknown_objects() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    Run::new(1).save(&at("like"));
    fs::create_dir(at("theirs")).unwrap();
    let theirs = fixtures().join("accelerate");
    convert(
        &theirs.join("model.safetensors"),
        &at("theirs/pytorch_model.bin"),
        Target::Weights(&Torch),
    )
    .unwrap();
    for name in ["optimizer.bin", "scheduler.bin", "random_states_0.pkl"] {
        fs::copy(theirs.join(name), at("theirs").join(name)).unwrap();
    }
    // A second rank's, of a run of two.
    fs::copy(theirs.join("random_states_0.pkl"), at("theirs/random_states_1.pkl")).unwrap();
    fs::write(at("theirs/sampler.bin"), "a pickle").unwrap();
    fs::write(at("theirs/custom_checkpoint_0.pkl"), "a pickle").unwrap();
    let report = convert_like(&at("theirs"), &at("made"), &at("like"), &[]).unwrap();
    let left = report.left_out.join("\n");
    for name in ["sampler.bin: ", "custom_checkpoint_0.pkl: ", "random_states_1.pkl: "] {
        assert!(left.contains(name), "{left}");
    }
    goes_on(&at("made"), true);
}

#[needs()]
fn two_processes_count_as_one_and_a_tied_weight_comes_back() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build().unwrap();
    let model = Model::new(|path: &ParamPath<'_>| {
        let embed = Embedding::new(path / "embed", 5, 4);
        let head = (path / "head").tie("weight", embed.weight());
        (embed, head)
    })
    .unwrap();
    let optimizer = AdamW::default().lr(0.02).build(&model).unwrap();
    let schedule = brigade_schedule::Schedule::step(0.02, 4, 0.5).unwrap();
    let scheduler = Scheduler::new(&optimizer, schedule);
    let (model, optimizer, scheduler) = accelerator.prepare((model, optimizer, scheduler)).unwrap();
    accelerator.save_state(at("like")).unwrap();
    accelerator.checkpoints().wait().unwrap();

    let theirs = fixtures().join("accelerate_ranks");
    let report = convert_like(&theirs, &at("made"), &at("like"), &[]).unwrap();
    let changed = report.changed.join("\n");
    assert!(changed.contains("`head.weight` from `embed.weight`"), "{changed}");
    assert!(changed.contains("its count 6 became 3 optimizer steps"), "{changed}");
    assert_eq!(report.changed.len(), 2, "{changed}");
    accelerator.load_state(at("made")).unwrap();
    let expected = fs::read_to_string(fixtures().join("accelerate_ranks.json")).unwrap();
    let expected: Value = serde_json::from_str(&expected).unwrap();
    let place = scheduler.position().unwrap();
    assert_eq!(
        (Some(optimizer.steps().unwrap()), Some(place)),
        (expected["steps"].as_u64(), Some(3))
    );
    let state = model.inner().state_dict();
    for name in ["embed.weight", "head.weight"] {
        let found = state.get(name).unwrap().to_kind(tch::Kind::Double).reshape([-1]);
        let expected = expected["weight"].as_array().unwrap().iter();
        for (index, value) in expected.enumerate() {
            assert_eq!(found.double_value(&[index as i64]), value.as_f64().unwrap(), "{name}");
        }
    }

    // Two weights that are not one: what the file lacks stays an error.
    let apart = Accelerator::builder().cpu(true).quiet(true).build().unwrap();
    let model = Model::new(|path: &ParamPath<'_>| {
        (Embedding::new(path / "embed", 5, 4), Embedding::new(path / "head", 5, 4))
    });
    let _model = apart.prepare(model.unwrap()).unwrap();
    apart.save_state(at("apart")).unwrap();
    apart.checkpoints().wait().unwrap();
    let error = convert_like(&theirs, &at("none"), &at("apart"), &[]).unwrap_err();
    assert!(error.to_string().contains("it lacks `head.weight`"), "{error}");
    assert!(!at("none").exists());
}

#[needs()]
fn a_dictionary_goes_on() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let (like, made) = (folder.path().join("like"), folder.path().join("made"));
    let mut run = Run::new(1);
    // Also a program that has trained already may say what goes where.
    run.step(0);
    run.save(&like);
    let dictionary = fixtures().join("dictionary.pth");
    let error = convert_like(&dictionary, &made, &like, &[]).unwrap_err();
    assert!(error.to_string().contains("pass `--keep-state random`"), "{error}");
    let report = convert_like(&dictionary, &made, &like, &[StateKind::Random]).unwrap();
    assert!(
        report
            .left_out
            .contains(&"`epoch`: the integer 2, which has no place in a checkpoint".into())
    );
    assert_eq!(report.kept, ["rank_0: there are no random states for it"]);
    goes_on(&made, false);
}

/// The net of `fixtures/make_trainer.py`, and the schedule of its two runs.
struct Layers(Linear, Linear);

impl Module<&Tensor> for Layers {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> brigade_torch::Result<Tensor> {
        self.1.forward(&self.0.forward(input)?.relu())
    }
}

/// Losses, rate and random numbers of the run `of` that went on in Python.
fn trained_elsewhere_goes_on(theirs: &Path, expected: &Value, first_factor: f64) {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let (like, made) = (folder.path().join("like"), folder.path().join("made"));
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build().unwrap();
    accelerator.set_seed(1);
    let layers =
        |path: &ParamPath<'_>| Layers(Linear::new(path / 0, 4, 5), Linear::new(path / 2, 5, 3));
    let model = Model::new(layers).unwrap();
    let optimizer = AdamW::default().lr(0.02).betas(0.9, 0.99).weight_decay(0.05);
    let optimizer = optimizer.no_decay_on_norms_and_biases(true).build(&model).unwrap();
    let schedule = brigade_schedule::Schedule::cosine(0.02, 0.0, 9).unwrap();
    let scheduler = Scheduler::new(&optimizer, schedule.warmup(3, first_factor).unwrap());
    let (mut model, mut optimizer, mut scheduler) =
        accelerator.prepare((model, optimizer, scheduler)).unwrap();
    model.train();
    accelerator.save_state(&like).unwrap();
    accelerator.checkpoints().wait().unwrap();
    let drawn = expected.get("drawn").and_then(Value::as_array);
    let keep = if drawn.is_some() { &[][..] } else { &[StateKind::Random] };
    convert_like(theirs, &made, &like, keep).unwrap();
    assert_eq!(accelerator.load_state(&made).unwrap().step, 5);
    if let Some(drawn) = drawn {
        let found = Tensor::rand([4], (tch::Kind::Float, tch::Device::Cpu));
        for (index, expected) in drawn.iter().enumerate() {
            assert_eq!(found.double_value(&[index as i64]), expected.as_f64().unwrap());
        }
    }
    for (number, expected) in expected["losses"].as_array().unwrap().iter().enumerate() {
        let (inputs, targets) = batch(5 + number);
        let loss = model.forward(&inputs).unwrap().cross_entropy_for_logits(&targets);
        optimizer.zero_grad().unwrap();
        accelerator.backward(&loss).unwrap();
        optimizer.step().unwrap();
        scheduler.step().unwrap();
        close(loss.double_value(&[]), expected.as_f64().unwrap(), &format!("loss {number}"));
    }
    assert_eq!((optimizer.steps().unwrap(), scheduler.position().unwrap()), (9, 9));
    close(scheduler.lr().unwrap(), expected["lr"].as_f64().unwrap(), "rate");
}

fn expected_of(folder: &Path, run: &str) -> Value {
    let text = fs::read_to_string(folder.join("trainer.json")).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()[run].take()
}

#[needs()]
fn a_folder_of_trainers_goes_on() {
    let expected = expected_of(&fixtures(), "trainer");
    trained_elsewhere_goes_on(&fixtures().join("trainer"), &expected, 0.0);
}

#[needs()]
fn a_dictionary_of_lightnings_goes_on() {
    let expected = expected_of(&fixtures(), "lightning");
    trained_elsewhere_goes_on(&fixtures().join("lightning.ckpt"), &expected, 0.25);
}

#[needs()]
fn a_checkpoint_says_what_its_schedule_is() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = (folder.path().join("ours"), folder.path().join("theirs"));
    let mut run = Run::new(1);
    for number in 0..5 {
        run.step(number);
    }
    run.save(&ours);
    let report = convert(&ours, &theirs, Target::Accelerate(AccelerateRun::default())).unwrap();
    assert_eq!(report.changed, ["scheduler: for StepLR or LambdaLR, at 5 steps"]);

    let model = Model::new(|path: &ParamPath<'_>| Linear::new(path / 0, 2, 2)).unwrap();
    let optimizer = AdamW::default().build(&model).unwrap();
    let groups: Vec<Box<dyn LrSchedule>> = vec![Box::new(|_: u64| 0.1)];
    let schedulers = [
        Scheduler::new(&optimizer, |step: u64| 0.1 / (step + 1) as f64),
        Scheduler::per_group(&optimizer, groups).unwrap(),
        Scheduler::on_plateau(&optimizer, Plateau::new(0.1)).unwrap(),
    ];
    for scheduler in schedulers {
        let state = scheduler.to_value::<()>();
        let said = state.get("definition").unwrap().to_plain::<Definition>();
        assert_eq!(said, Some(scheduler.definition()));
    }
}

/// The same of the versions that this machine has.
#[needs(Trainers)]
fn peer_runs_of_trainer_and_lightning_go_on() {
    let python = brigade_test_needs::python(Need::Trainers).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let script = fixtures().join("make_trainer.py");
    let output = Command::new(python)
        .arg(script)
        .arg(folder.path())
        .env("OMP_NUM_THREADS", "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let expected = expected_of(folder.path(), "trainer");
    trained_elsewhere_goes_on(&folder.path().join("trainer"), &expected, 0.0);
    let expected = expected_of(folder.path(), "lightning");
    trained_elsewhere_goes_on(&folder.path().join("lightning.ckpt"), &expected, 0.25);
}

#[needs()]
fn mismatched_states_are_refused_without_a_trace() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let (like, made) = (folder.path().join("like"), folder.path().join("made"));
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build().unwrap();
    let model = Model::new(|p: &ParamPath<'_>| Linear::new(p / 0, 4, 6)).unwrap();
    let optimizer = AdamW::default().build(&model).unwrap();
    let _prepared = accelerator.prepare((model, optimizer)).unwrap();
    accelerator.save_state(&like).unwrap();
    accelerator.checkpoints().wait().unwrap();
    let error = convert_like(&fixtures().join("accelerate"), &made, &like, &[]).unwrap_err();
    assert!(
        error.to_string().contains("model.safetensors: the program's model has no `"),
        "{error}"
    );
    let error = convert_like(&like, &made, &like, &[]).unwrap_err();
    assert!(error.to_string().contains("checkpoint of Brigade's already"), "{error}");
    let error = convert_like(&fixtures(), &made, &like, &[]).unwrap_err();
    assert!(error.to_string().contains("holds no model.safetensors"), "{error}");
    let names: Vec<_> =
        fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["like"]);
}

/// What is written for Accelerate is read by its own `load_state`, and its run goes on with the numbers
/// of ours.
#[needs(Pytorch)]
fn peer_accelerate_goes_on_with_ours() {
    let _alone = alone();
    let python = brigade_test_needs::python(Need::Pytorch).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (ours, theirs) = (folder.path().join("ours"), folder.path().join("theirs"));
    let mut run = Run::new(1);
    for number in 0..5 {
        run.step(number);
    }
    run.save(&ours);
    convert(&ours, &theirs, Target::Accelerate(AccelerateRun::default())).unwrap();
    let losses: Vec<f64> = (5..9).map(|number| run.step(number)).collect();
    let script = r#"
import json, sys
sys.path.insert(0, sys.argv[1])
import make_accelerate as made
print(json.dumps(made.resumed(sys.argv[2])))
"#;
    let output = Command::new(python)
        .args(["-c", script])
        .arg(fixtures())
        .arg(&theirs)
        .env("OMP_NUM_THREADS", "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let found: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    for (number, loss) in losses.iter().enumerate() {
        close(found["losses"][number].as_f64().unwrap(), *loss, &format!("loss {number}"));
    }
    close(found["lr"].as_f64().unwrap(), run.scheduler.lr().unwrap(), "rate");
    assert_eq!(found["steps"], 9.0);
}
