//! Conversion of Hugging Face Trainer and Lightning runs into checkpoints. States that would come from the `like`
//! checkpoint are refused unless they are requested. `fixtures/make_trainer.py` has made the inputs.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use brigade_checkpoint::convert::{Report, StateKind, convert_like};
use brigade_checkpoint::layout::Checkpoint;
use brigade_checkpoint::pth::{PthFile, TensorData, write};
use brigade_checkpoint::{Dtype, Error, Region, TensorInfo, Value, WeightsReader};
use serde_json::json;

use crate::saved;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Writes the checkpoint of the fixtures' program right after `prepare`, with an optimizer of kind `Adam` or `SGD`.
fn program(folder: &Path, kind: &str, ranks: usize) {
    program_after(0, folder, kind, ranks);
}

/// Writes the same with an optimizer after this many steps, and a schedule that has made as many per rank.
fn program_after(steps: u64, folder: &Path, kind: &str, ranks: usize) {
    let weights = [
        ("0.weight", vec![5, 4]),
        ("0.bias", vec![5]),
        ("2.weight", vec![3, 5]),
        ("2.bias", vec![3]),
    ];
    let numbers = |decay: f64| match kind {
        "SGD" => json!({ "lr": 0.02, "initial_lr": 0.02, "momentum": 0.0, "weight_decay": decay }),
        _ => json!({
            "lr": 0.02, "initial_lr": 0.02, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8,
            "weight_decay": decay, "amsgrad": 0.0
        }),
    };
    let optimizer = json!({
        "kind": kind, "steps": steps, "initial_lr": 0.02, "lr": 0.02,
        "groups": [
            { "numbers": numbers(0.05), "parameters": ["0.weight", "2.weight"] },
            { "numbers": numbers(0.0), "parameters": ["0.bias", "2.bias"] },
        ],
        "parameters": ["0.weight", "0.bias", "2.weight", "2.bias"], "state": {},
    });
    let definition = json!({ "all": { "function": { "momentum": false } } });
    let position = steps * ranks as u64;
    let scheduler =
        json!({ "position": position, "lr": 0.0, "plateau": null, "definition": definition });
    let loader = json!({
        "seed": 7, "epoch": 0, "base": 0, "batches": 0, "samples": 0, "total_samples": 0
    });
    let entries = [
        ("model", "model", None, weights.to_vec()),
        ("optimizer", "optimizer", Some(optimizer), Vec::new()),
        ("scheduler", "scheduler", Some(scheduler), Vec::new()),
        ("loader", "loader", Some(loader), Vec::new()),
    ];
    saved::write(folder, ranks, steps, &entries);
}

struct Made {
    /// Owner of the temporary files.
    folder: tempfile::TempDir,
    report: Report,
}

impl Made {
    fn state(&self, object: &str) -> Value<()> {
        let checkpoint = Checkpoint::open(self.folder.path().join("made")).unwrap();
        let objects = &checkpoint.manifest().objects;
        let object = objects.iter().find(|it| *it.name == *object).unwrap();
        let state = checkpoint.state(object).unwrap().unwrap();
        state.try_map(&mut |_, _| Ok::<_, ()>(())).unwrap()
    }

    fn count(&self, object: &str, key: &str) -> Option<i64> {
        self.state(object).get(key)?.as_int()
    }

    /// Returns names, types and bytes of an object's tensors.
    fn values(&self, object: &str) -> Vec<(String, String, Vec<u8>)> {
        values(&self.folder.path().join(format!("made/{object}.safetensors")))
    }

    fn step(&self) -> u64 {
        Checkpoint::open(self.folder.path().join("made")).unwrap().manifest().step
    }
}

fn values(file: &Path) -> Vec<(String, String, Vec<u8>)> {
    let weights = WeightsReader::open(file).unwrap();
    let mut all: Vec<_> = weights
        .tensors()
        .map(|tensor| {
            let mut bytes = vec![0; tensor.info().bytes().unwrap() as usize];
            tensor.read(&Region::whole(&tensor.info().shape), &mut bytes).unwrap();
            (tensor.name().to_owned(), tensor.info().to_string(), bytes)
        })
        .collect();
    all.sort();
    all
}

fn made(from: &Path, kind: &str, ranks: usize, keep: &[StateKind]) -> Result<Made, Error> {
    let folder = tempfile::tempdir().unwrap();
    let like = folder.path().join("like");
    program(&like, kind, ranks);
    made_like(folder, from, keep)
}

/// Converts for the program that has saved `like` in the folder.
fn made_like(folder: tempfile::TempDir, from: &Path, keep: &[StateKind]) -> Result<Made, Error> {
    let (like, made) = (folder.path().join("like"), folder.path().join("made"));
    match convert_like(from, &made, &like, keep) {
        Ok(report) => Ok(Made { folder, report }),
        Err(error) => {
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "{error}");
            Err(error)
        }
    }
}

/// Returns the states that are refused, and the flag that allows them.
fn refused(from: &Path, keep: &[StateKind]) -> (String, String) {
    let error = made(from, "Adam", 1, keep).err().unwrap();
    let text = error.to_string();
    let Error::MissingStates { states, kinds, .. } = error else { panic!("{text}") };
    assert!(text.contains(&format!("--keep-state {kinds}`; nothing was written")), "{text}");
    (states, kinds)
}

#[test]
fn a_folder_of_trainers_is_read_whole() {
    let from = fixture("trainer");
    let (states, kinds) = refused(&from, &[]);
    assert_eq!(kinds, "loader");
    assert!(states.starts_with("loader: the position in the data"), "{states}");
    let made = made(&from, "Adam", 1, &[StateKind::Loader]).unwrap();
    assert_eq!(made.step(), 5);
    assert_eq!(
        (made.count("optimizer", "steps"), made.count("scheduler", "position")),
        (Some(5), Some(5))
    );
    let optimizer = made.state("optimizer");
    let states = optimizer.get("state").and_then(Value::as_dict).unwrap();
    assert_eq!(states.len(), 4);
    let numbers =
        optimizer.get("groups").and_then(Value::as_items).unwrap()[0].get("numbers").unwrap();
    let rate = numbers.get("lr").and_then(Value::as_float).unwrap();
    assert!((rate - 0.017_660_444_431_189_78).abs() < 1e-15, "{rate}");
    let Some(Value::Bytes(random)) =
        made.state("rank_0").get("random").unwrap().get("cpu").cloned()
    else {
        panic!("no random state")
    };
    assert_eq!(random.len(), 5056);
    let report = &made.report;
    assert_eq!(report.kept.len(), 1, "{report:?}");
    assert!(
        report.changed.contains(&"model: the names of model.safetensors without `net.`".into())
    );
    let left = report.left_out.join("\n");
    assert!(left.contains("trainer_state.json: the epoch 0.41666"), "{left}");
    assert!(left.contains("rng_state.pth: python, numpy, which Brigade does not use"), "{left}");
    assert!(!left.contains("optimizer.pt") && !left.contains("scheduler.pt: not"), "{left}");
}

/// Converts Accelerate's folder of FSDP with SHARDED_STATE_DICT, made by
/// `fixtures/dcp/make_with_accelerates_layout.py`.
#[test]
fn the_parts_of_ranks_and_the_states_of_their_optimizer_are_read() {
    let keep = [StateKind::Loader, StateKind::Random, StateKind::Scheduler];
    let made = made(&fixture("dcp/fsdp"), "Adam", 2, &keep).unwrap();
    assert_eq!((made.step(), made.count("optimizer", "steps")), (3, Some(3)));
    assert_eq!(made.values("model"), values(&fixture("dcp/fsdp.safetensors")));
    let named =
        |(name, info, bytes): (String, String, Vec<u8>)| (format!("state.{name}"), info, bytes);
    let states = values(&fixture("dcp/fsdp_optimizer.safetensors")).into_iter().map(named);
    assert_eq!(made.values("optimizer"), states.collect::<Vec<_>>());
    let optimizer = made.state("optimizer");
    let groups = optimizer.get("groups").and_then(Value::as_items).unwrap();
    let number = |group: usize, key: &str| groups[group].get("numbers")?.get(key)?.as_float();
    assert_eq!([number(0, "weight_decay"), number(1, "weight_decay")], [Some(0.05), Some(0.0)]);
    assert_eq!([number(0, "lr"), number(1, "initial_lr")], [Some(0.005), Some(0.02)]);
    assert_eq!([number(0, "beta1"), number(0, "beta2")], [Some(0.9), Some(0.99)]);
    let report = &made.report;
    assert_eq!(report.left_out, Vec::<String>::new());
}

#[test]
fn damaged_folders_of_ranks_are_errors_and_no_panics() {
    let copy = |to: &Path| {
        for part in ["pytorch_model_fsdp_0", "optimizer_0"] {
            fs::create_dir_all(to.join(part)).unwrap();
            for file in [".metadata", "__0_0.distcp", "__1_0.distcp"] {
                fs::copy(fixture("dcp/fsdp").join(part).join(file), to.join(part).join(file))
                    .unwrap();
            }
        }
    };
    let keep = StateKind::ALL;
    let damaged = |file: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let folder = tempfile::tempdir().unwrap();
        copy(folder.path());
        let path = folder.path().join(file);
        let mut bytes = fs::read(&path).unwrap();
        change(&mut bytes);
        fs::write(&path, bytes).unwrap();
        made(folder.path(), "Adam", 2, &keep).err().map(|error| error.to_string())
    };
    for file in ["optimizer_0/.metadata", "optimizer_0/__0_0.distcp", "optimizer_0/__1_0.distcp"] {
        let length = fs::metadata(fixture("dcp/fsdp").join(file)).unwrap().len() as usize;
        for end in (0..length).step_by(length / 4) {
            let error = damaged(file, &|bytes| bytes.truncate(end)).unwrap();
            assert!(error.contains(file), "{file} of {end}: {error}");
        }
        for at in (0..length).step_by(length / 12) {
            // Either an error or other numbers: not every byte has a checksum.
            let _ = damaged(file, &|bytes| bytes[at] ^= 0x55);
        }
    }
    // A file in place of a number's value: the checkpoint of the other rank.
    let other = fs::read(fixture("dcp/fsdp/optimizer_0/__0_0.distcp")).unwrap();
    let error =
        damaged("optimizer_0/__1_0.distcp", &|bytes| bytes[..other.len()].copy_from_slice(&other));
    assert!(error.unwrap().contains("__1_0.distcp"));
    let folder = tempfile::tempdir().unwrap();
    copy(folder.path());
    fs::remove_file(folder.path().join("optimizer_0/__1_0.distcp")).unwrap();
    let error = made(folder.path(), "Adam", 2, &keep).err().unwrap();
    assert!(matches!(&error, Error::Io { path, .. } if path.ends_with("__1_0.distcp")), "{error}");
}

#[test]
fn a_dictionary_of_lightnings_is_read_whole() {
    let from = fixture("lightning.ckpt");
    // Lightning does not save random states.
    let (states, kinds) = refused(&from, &[StateKind::Custom]);
    assert_eq!(kinds, "custom,loader,random");
    assert!(states.contains("rank_0: there are no random states for it"), "{states}");
    let made = made(&from, "Adam", 1, &[StateKind::Loader, StateKind::Random]).unwrap();
    assert_eq!(made.step(), 5);
    assert_eq!(
        (made.count("optimizer", "steps"), made.count("scheduler", "position")),
        (Some(5), Some(5))
    );
    assert_eq!(made.state("optimizer").get("state").and_then(Value::as_dict).unwrap().len(), 4);
    let report = &made.report;
    assert!(report.changed.contains(&"model: the names of state_dict without `net.`".into()));
    let left = report.left_out.join("\n");
    assert!(left.contains("`loops`: 5 batches of its epoch"), "{left}");
    for key in ["`epoch`: the integer 0", "`callbacks`", "`pytorch-lightning_version`"] {
        assert!(left.contains(key), "{left}");
    }
}

/// Otherwise, weights of one run under the optimizer of another would train on without an error.
#[test]
fn states_that_a_source_lacks_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(fixture("trainer/model.safetensors"), folder.path().join("model.safetensors"))
        .unwrap();
    let (states, kinds) = refused(folder.path(), &[]);
    assert_eq!(kinds, "loader,optimizer,random,scheduler");
    for object in ["optimizer: there is no", "scheduler: there is no", "loader: ", "rank_0: "] {
        assert!(states.contains(object), "{states}");
    }
    let (states, kinds) = refused(folder.path(), &[StateKind::Optimizer, StateKind::Loader]);
    assert_eq!(kinds, "loader,optimizer,random,scheduler");
    assert!(!states.contains("optimizer: ") && states.contains("scheduler: "), "{states}");
    let made = made(folder.path(), "Adam", 1, &StateKind::ALL).unwrap();
    assert_eq!((made.step(), made.report.kept.len()), (0, 4));
    // Accelerate's and plain PyTorch's states give the same result.
    fs::copy(fixture("trainer/optimizer.pt"), folder.path().join("optimizer.bin")).unwrap();
    assert_eq!(refused(folder.path(), &[]).1, "loader,random,scheduler");
}

#[test]
fn several_processes_of_trainers_step_a_schedule_once() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"] {
        fs::copy(fixture("trainer").join(name), folder.path().join(name)).unwrap();
    }
    for rank in 0..2 {
        let name = format!("rng_state_{rank}.pth");
        fs::copy(fixture("trainer/rng_state.pth"), folder.path().join(name)).unwrap();
    }
    let made = made(folder.path(), "Adam", 2, &[StateKind::Loader]).unwrap();
    assert_eq!((made.step(), made.count("scheduler", "position")), (5, Some(5)));
    // One rank has no file.
    fs::remove_file(folder.path().join("rng_state_1.pth")).unwrap();
    let error = self::made(folder.path(), "Adam", 2, &[StateKind::Loader]).err().unwrap();
    assert!(error.to_string().contains("rank_1: there are no random states"), "{error}");
}

#[test]
fn a_damaged_state_of_a_trainer_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["model.safetensors", "optimizer.pt"] {
        fs::copy(fixture("trainer").join(name), folder.path().join(name)).unwrap();
    }
    fs::write(folder.path().join("trainer_state.json"), "{\"epoch\": 1.0").unwrap();
    let error = made(folder.path(), "Adam", 1, &StateKind::ALL).err().unwrap();
    assert!(error.to_string().contains("it is not the state of a Trainer: "), "{error}");
}

struct Zeros(TensorInfo);

impl TensorData for Zeros {
    fn info(&self) -> TensorInfo {
        self.0.clone()
    }

    fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        out.write_all(&vec![0; self.0.bytes().unwrap() as usize])
    }
}

/// Uses `global_step`, since SGD counts no steps.
#[test]
fn steps_are_taken_from_what_tells_them() {
    let folder = tempfile::tempdir().unwrap();
    let from = folder.path().join("run.ckpt");
    let zeros = |shape: &[u64]| {
        Value::Tensor(Zeros(TensorInfo { dtype: Dtype::F32, shape: shape.to_vec() }))
    };
    let dictionary = |more: Vec<(&'static str, Value<Zeros>)>| {
        let model = Value::dict([
            ("module.0.weight", zeros(&[5, 4])),
            ("module.0.bias", zeros(&[5])),
            ("module.2.weight", zeros(&[3, 5])),
            ("module.2.bias", zeros(&[3])),
        ]);
        let group = |decay: f64, params: [i64; 2]| {
            Value::dict([
                ("lr", Value::Float(0.01)),
                ("initial_lr", Value::Float(0.02)),
                ("momentum", Value::Float(0.0)),
                ("weight_decay", Value::Float(decay)),
                ("params", Value::List(params.map(Value::Int).into())),
            ])
        };
        let groups = Value::List(vec![group(0.05, [0, 1]), group(0.0, [2, 3])]);
        let optimizer = Value::dict([("state", Value::Dict(Vec::new())), ("param_groups", groups)]);
        let scheduler =
            Value::dict([("last_epoch", Value::Int(7)), ("_last_lr", Value::List(vec![]))]);
        let states = [
            ("state_dict", model),
            ("optimizer_states", Value::List(vec![optimizer])),
            ("lr_schedulers", Value::List(vec![scheduler])),
            // A disabled scaler.
            ("MixedPrecision", Value::Dict(Vec::new())),
        ];
        Value::dict(states.into_iter().chain(more))
    };
    let put = |value: &Value<Zeros>| {
        let mut bytes = io::Cursor::new(Vec::new());
        write(&mut bytes, value).unwrap();
        File::create(&from).unwrap().write_all(&bytes.into_inner()).unwrap();
        assert!(PthFile::open(&from).is_ok());
    };
    let keep = [StateKind::Loader, StateKind::Random];
    put(&dictionary(vec![("global_step", Value::Int(7))]));
    let told = made(&from, "SGD", 1, &keep).unwrap();
    assert_eq!((told.step(), told.count("optimizer", "steps")), (7, Some(7)));
    let line =
        "optimizer: 7 steps, taken from global_step: optimizer_states[0] has no count of steps";
    assert!(told.report.changed.contains(&line.to_owned()), "{:?}", told.report);
    put(&dictionary(vec![]));
    let untold = made(&from, "SGD", 1, &keep).unwrap();
    assert_eq!((untold.step(), untold.count("scheduler", "position")), (0, Some(7)));
    let said = untold.report.changed.join("\n");
    assert!(
        said.contains("optimizer: its count of steps, which optimizer_states[0] does not have"),
        "{said}"
    );
}

#[test]
fn the_steps_of_an_optimizer_that_is_kept_are_those_of_the_run() {
    let weights = tempfile::tempdir().unwrap();
    fs::copy(fixture("trainer/model.safetensors"), weights.path().join("model.safetensors"))
        .unwrap();
    let folder = tempfile::tempdir().unwrap();
    program_after(6, &folder.path().join("like"), "Adam", 1);
    let made = made_like(folder, weights.path(), &StateKind::ALL).unwrap();
    assert_eq!((made.step(), made.count("optimizer", "steps")), (6, Some(6)));
}

/// Converts Accelerate's folder of two processes whose optimizer has made 5 steps.
#[test]
fn a_schedule_stepped_per_process_needs_a_program_after_its_first_step() {
    let from = tempfile::tempdir().unwrap();
    let to = |name: &str| from.path().join(name);
    fs::copy(fixture("trainer/model.safetensors"), to("model.safetensors")).unwrap();
    fs::copy(fixture("trainer/optimizer.pt"), to("optimizer.bin")).unwrap();
    let state = Value::<Zeros>::dict([
        ("last_epoch", Value::Int(10)),
        ("_last_lr", Value::List(vec![Value::Float(0.01)])),
    ]);
    let mut bytes = io::Cursor::new(Vec::new());
    write(&mut bytes, &state).unwrap();
    fs::write(to("scheduler.bin"), bytes.into_inner()).unwrap();
    for rank in 0..2 {
        fs::copy(fixture("trainer/rng_state.pth"), to(&format!("rng_state_{rank}.pth"))).unwrap();
    }
    let first = made(from.path(), "Adam", 2, &StateKind::ALL).unwrap();
    assert_eq!(first.count("scheduler", "position"), Some(5));
    let said = first.report.changed.join("\n");
    let expected = "once for each of 2 processes; for a program with step_per_process(true), give a --like that \
                    was saved after its first step";
    assert!(said.contains(expected), "{said}");
    // A program whose checkpoint shows how it counts.
    let folder = tempfile::tempdir().unwrap();
    program_after(1, &folder.path().join("like"), "Adam", 2);
    let later = made_like(folder, from.path(), &StateKind::ALL).unwrap();
    assert_eq!(later.count("scheduler", "position"), Some(10));
    let said = later.report.changed.join("\n");
    assert!(!said.contains("step_per_process"), "{said}");
}

/// Leaves out values besides a model's tensors, and around it, like `find_weights`.
#[test]
fn weights_are_found_as_everywhere() {
    let folder = tempfile::tempdir().unwrap();
    let from = folder.path().join("run.ckpt");
    let zeros = |shape: &[u64]| {
        Value::Tensor(Zeros(TensorInfo { dtype: Dtype::F32, shape: shape.to_vec() }))
    };
    let model = |prefix: &str, more: Vec<(&str, Value<Zeros>)>| {
        let names = ["0.weight", "0.bias", "2.weight", "2.bias"];
        let shapes: [&[u64]; 4] = [&[5, 4], &[5], &[3, 5], &[3]];
        let tensors = names.into_iter().zip(shapes);
        let tensors = tensors.map(|(name, shape)| (format!("{prefix}{name}"), zeros(shape)));
        Value::dict(tensors.chain(more.into_iter().map(|(name, value)| (name.to_owned(), value))))
    };
    let converted = |value: &Value<Zeros>| {
        let mut bytes = io::Cursor::new(Vec::new());
        write(&mut bytes, value).unwrap();
        fs::write(&from, bytes.into_inner()).unwrap();
        made(&from, "Adam", 1, &StateKind::ALL)
    };
    let beside = vec![
        ("loss.weight", zeros(&[2])),
        ("model._extra_state", Value::Int(3)),
        ("model.nothing", Value::None),
    ];
    let lightning = Value::dict([
        ("model", Value::Str("resnet50".into())),
        ("state_dict", model("model.", beside)),
    ]);
    let report = converted(&lightning).unwrap().report;
    let stripped = "model: the names of state_dict without `model.`";
    assert!(report.changed.contains(&stripped.to_owned()), "{report:?}");
    for line in [
        "`model`: the text \"resnet50\", which has no place in a checkpoint",
        "state_dict: `loss.weight`: its name does not begin with `model.`",
        "`state_dict.model._extra_state`: the integer 3, which is not among the weights",
        "`state_dict.model.nothing`: None, which is not among the weights",
    ] {
        assert!(report.left_out.contains(&line.to_owned()), "{line}: {report:?}");
    }
    // Nested more deeply, and under the settings of a model.
    let settings = Value::dict([("depth", Value::Int(50))]);
    let inside = Value::dict([("state_dict", model("net.", Vec::new()))]);
    let report = converted(&Value::dict([("model", settings), ("net", inside)])).unwrap().report;
    let line = "`model`: a dictionary, which has no place in a checkpoint";
    assert!(report.left_out.contains(&line.to_owned()), "{report:?}");
    // A part of the model under a prefix is not a model.
    let part = Value::dict([("model.0.weight", zeros(&[5, 4])), ("loss.weight", zeros(&[2]))]);
    let error = converted(&Value::dict([("state_dict", part)])).err().unwrap().to_string();
    assert!(error.contains("state_dict: it lacks `0.bias`"), "{error}");
    // Several models, of which none is chosen.
    let both = Value::dict([("a", model("", Vec::new())), ("b", model("", Vec::new()))]);
    let error = converted(&Value::dict([("model", both)])).err().unwrap().to_string();
    let expected = "it holds 2 state dictionaries where those of one model belong: `model.a`, `model.b`; convert \
                    the one to use on its own first (`brigade checkpoint convert run.ckpt model.safetensors \
                    --key KEY`)";
    assert!(error.contains(expected), "{error}");
}
