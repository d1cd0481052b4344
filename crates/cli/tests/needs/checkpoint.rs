//! Tests of `brigade checkpoint` on a checkpoint of one linear layer and its Adam.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use brigade_checkpoint::layout::{ChecksumWriter, FileFacts, Manifest, Object, Placement, Staging};
use brigade_checkpoint::safetensors::layout;
use brigade_checkpoint::{Dtype, FileName, TensorInfo};
use brigade_test_needs::{Need, needs};
use serde_json::{Value, json};

fn brigade(arguments: &[&str], folder: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_brigade"))
        .arg("checkpoint")
        .args(arguments)
        .current_dir(folder)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

struct Maker {
    staging: Staging,
    files: BTreeMap<FileName, FileFacts>,
    objects: Vec<Object>,
}

impl Maker {
    fn object(
        &mut self,
        kind: &str,
        name: &str,
        state: Option<Value>,
        tensors: &[(&str, &[u64], &[f32])],
    ) {
        let named = FileName::new(name).unwrap();
        let mut object = Object::new(kind, named);
        if let Some(state) = state {
            let file = format!("{name}.json");
            self.file(&file, format!("{state:#}\n").as_bytes());
            object.state = Some(FileName::new(file).unwrap());
        }
        if !tensors.is_empty() {
            let file = format!("{name}.safetensors");
            let infos: Vec<_> = tensors
                .iter()
                .map(|(name, shape, _)| {
                    (*name, TensorInfo { dtype: Dtype::F32, shape: shape.to_vec() })
                })
                .collect();
            let laid = layout(Path::new(&file), &infos).unwrap();
            let mut bytes = laid.header;
            for place in laid.order {
                bytes.extend(tensors[place].2.iter().flat_map(|value| value.to_le_bytes()));
            }
            self.file(&file, &bytes);
            object.add_file(&FileName::new(file).unwrap(), infos, &[Placement::Replicate]);
        }
        self.objects.push(object);
    }

    fn file(&mut self, name: &str, bytes: &[u8]) {
        let mut file = ChecksumWriter::create(self.staging.path().join(name)).unwrap();
        file.put(bytes).unwrap();
        self.files.insert(FileName::new(name).unwrap(), file.finish(false).unwrap());
    }
}

/// Writes the checkpoint as the Accelerator does.
fn make(folder: &Path) -> PathBuf {
    let path = folder.join("checkpoint_3");
    let staging = Staging::create(&path, "test").unwrap();
    let mut maker = Maker { staging, files: BTreeMap::new(), objects: vec![] };
    let (weight, bias) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [0.5, -0.5]);
    maker.object("model", "model", None, &[("bias", &[2], &bias), ("weight", &[2, 3], &weight)]);
    let slots = |name: &str| {
        json!({
            "exp_avg": { "$tensor": format!("state.{name}.exp_avg") },
            "exp_avg_sq": { "$tensor": format!("state.{name}.exp_avg_sq") },
            "step": { "$tensor": format!("state.{name}.step") },
        })
    };
    let numbers = json!({
        "lr": 0.01, "initial_lr": 0.02, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8,
        "weight_decay": 0.0, "amsgrad": 0.0
    });
    maker.object(
        "optimizer",
        "optimizer",
        Some(json!({
            "kind": "Adam", "steps": 3, "initial_lr": 0.02, "lr": 0.01,
            "groups": [{ "numbers": numbers, "parameters": ["weight", "bias"] }],
            "parameters": ["weight", "bias"],
            "state": { "weight": slots("weight"), "bias": slots("bias") },
        })),
        &[
            ("state.weight.exp_avg", &[2, 3], &[0.25; 6]),
            ("state.weight.exp_avg_sq", &[2, 3], &[0.5; 6]),
            ("state.weight.step", &[], &[3.0]),
            ("state.bias.exp_avg", &[2], &[0.75; 2]),
            ("state.bias.exp_avg_sq", &[2], &[0.125; 2]),
            ("state.bias.step", &[], &[3.0]),
        ],
    );
    maker.object(
        "scheduler",
        "scheduler",
        Some(json!({ "position": 3, "lr": 0.01, "plateau": null })),
        &[],
    );
    maker.object(
        "loader",
        "loader",
        Some(json!({ "seed": 7, "epoch": 1, "base": 0, "batches": 2, "samples": 16, "total_samples": 48 })),
        &[],
    );
    maker.object("run", "run", Some(json!({ "accumulation_position": 0 })), &[]);
    let random = json!({ "random": { "cpu": { "$bytes": "AAECAwQF" } }, "gradients": {} });
    maker.object("rank", "rank_0", Some(random), &[]);
    maker.file("notes.txt", b"of a hook\n");
    let manifest = Manifest {
        step: 3,
        samples: 48,
        objects: maker.objects,
        files: maker.files,
        ..Manifest::new("a test", 1)
    };
    maker.staging.commit(&manifest, false).unwrap();
    path
}

#[needs()]
fn inspect_shows_what_is_there() {
    let folder = tempfile::tempdir().unwrap();
    make(folder.path());
    let output = brigade(&["inspect", "checkpoint_3"], folder.path());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/checkpoint-table.txt");
    let found = text(&output.stdout);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&golden, &found).unwrap();
    }
    assert_eq!(found, fs::read_to_string(golden).unwrap());

    let output = brigade(&["inspect", "--json", "checkpoint_3"], folder.path());
    let all: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&all["step"], &all["samples"]), (&json!(3), &json!(48)));
    let weight = &all["objects"][0]["tensors"][1];
    assert_eq!(weight["shape"], json!([2, 3]));
    assert_eq!(weight["placements"], json!(["replicate"]));
    assert_eq!(weight["chunks"][0]["offset"], json!([0, 0]));
    assert_eq!(all["mesh"], json!([{ "name": "data", "size": 1 }]));
    let output = brigade(&["inspect", "checkpoint_3/model.safetensors"], folder.path());
    assert!(text(&output.stdout).contains("weight  [2, 3]  F32"), "{}", text(&output.stdout));
    let output = brigade(&["inspect", "nothing"], folder.path());
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("nothing"), "{}", text(&output.stderr));
}

#[needs()]
fn inspect_shows_what_pytorch_has_saved() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../checkpoint/tests/fixtures");
    let shown = |name: &str| {
        let output = brigade(&["inspect", name], &fixtures);
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let said = shown("accelerate/optimizer.bin");
    for expected in ["weight_decay: 0.05", "state.0.exp_avg ", "[5, 4]  F32"] {
        assert!(said.contains(expected), "{said}");
    }
    let said = shown("dictionary.pth");
    assert!(said.contains("epoch: 2") && said.contains("model_state_dict.0.weight"), "{said}");
    // Python's and NumPy's generators are named, but not interpreted.
    let said = shown("accelerate/random_states_0.pkl");
    assert!(said.contains("torch_manual_seed  [5056]  U8"), "{said}");
}

#[needs()]
fn inspect_has_a_short_form() {
    let folder = tempfile::tempdir().unwrap();
    make(folder.path());
    let shown = |path: &str| {
        let output = brigade(&["inspect", "--short", path], folder.path());
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let said = shown("checkpoint_3");
    let rows: Vec<Vec<&str>> =
        said.lines().skip(2).map(|row| row.split_whitespace().collect()).collect();
    assert_eq!(rows[0][..3], ["model", "2", "tensors"], "{said}");
    assert_eq!(rows[1][..3], ["optimizer", "6", "tensors"], "{said}");
    assert_eq!(rows.len(), 6, "{said}");
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../checkpoint/tests/fixtures");
    let said = shown(fixtures.join("formats/bin").to_str().unwrap());
    assert!(
        said.contains("  embed   1 tensor       24 B\n  head   2 tensors       12 B\n"),
        "{said}"
    );
    assert!(said.ends_with("  3 tensors, 36 B\n"), "{said}");
}

#[needs()]
fn inspect_shows_the_newest_checkpoint_of_a_project() {
    let folder = tempfile::tempdir().unwrap();
    let made = make(folder.path());
    let checkpoints = folder.path().join("run/checkpoints");
    fs::create_dir_all(&checkpoints).unwrap();
    for number in [1, 2] {
        let copy = checkpoints.join(format!("checkpoint_{number}"));
        fs::create_dir(&copy).unwrap();
        for file in fs::read_dir(&made).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), copy.join(file.file_name())).unwrap();
        }
    }
    fs::rename(&made, checkpoints.join("checkpoint_10")).unwrap();
    for path in ["run", "run/checkpoints"] {
        let output = brigade(&["inspect", path], folder.path());
        let said = text(&output.stdout);
        let heading = "run/checkpoints: 3 checkpoints, the newest is shown; the others: checkpoint_1, checkpoint_2\n\n\
                       run/checkpoints/checkpoint_10: manifest version";
        assert!(said.starts_with(heading), "{said}{}", text(&output.stderr));
        let output = brigade(&["inspect", path, "--json"], folder.path());
        let all: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(all["path"], "run/checkpoints/checkpoint_10");
        assert_eq!(
            all["others"],
            json!(["run/checkpoints/checkpoint_1", "run/checkpoints/checkpoint_2"])
        );
    }
    // The newest checkpoint is used, even if it is damaged.
    fs::remove_file(checkpoints.join("checkpoint_10/model.safetensors")).unwrap();
    let output = brigade(&["inspect", "run"], folder.path());
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(
        said.contains("checkpoint_10 is damaged") && said.contains("checkpoint_1, checkpoint_2"),
        "{said}"
    );
}

#[needs()]
fn inspect_shows_every_dtype_and_the_metadata() {
    let formats =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../checkpoint/tests/fixtures/formats");
    let shown = |name: &str| {
        let output = brigade(&["inspect", name], &formats);
        assert!(output.status.success(), "{name}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    let said = shown("dtypes.safetensors");
    assert!(said.contains("  metadata:\n    format: pt\n    made by: make_formats.py\n"), "{said}");
    let row = |said: &str, name: &str| -> String {
        let row = said.lines().find(|line| line.trim_start().starts_with(&format!("{name} ")));
        row.unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(row(&said, "float8_e4m3fn"), "float8_e4m3fn [2, 3] F8_E4M3 6 B");
    assert_eq!(row(&said, "float4_e2m1fn_x2"), "float4_e2m1fn_x2 [2, 6] F4 6 B");
    assert_eq!(row(&shown("dtypes.pth"), "uint64"), "uint64 [2, 3] U64 48 B");
    assert_eq!(row(&shown("quantized.pth"), "quint4x2"), "quint4x2 [3, 5] quint4x2 9 B");
    assert_eq!(row(&shown("script.jit"), "inner.mean"), "inner.mean [2] F32 8 B");
    assert_eq!(row(&shown("exported.pt2"), "tied.bias"), "tied.bias [2] F32 8 B");
    assert_eq!(row(&shown("bin"), "head.weight"), "head.weight [1, 2] F32 8 B");
    let output = brigade(&["inspect", "--json", "dtypes.safetensors"], &formats);
    let all: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(all["metadata"], json!({ "format": "pt", "made by": "make_formats.py" }));
}

#[needs()]
fn files_that_are_something_else_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1\n\
                   size 497774208\n";
    let formats =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../checkpoint/tests/fixtures/formats");
    let mut cut = fs::read(formats.join("dtypes.safetensors")).unwrap();
    cut.pop();
    for (name, content, expected) in [
        ("pointer", pointer.as_bytes(), "a Git LFS pointer to 497774208 bytes; run `git lfs pull`"),
        ("page", b"<!doctype html>\n<title>404</title>", "a page of HTML"),
        ("gzip", b"\x1f\x8b\x08\0\0\0\0\0", "compressed with gzip; unpack it first (`gunzip`"),
        ("empty", b"", "it is empty; download or copy it again"),
        ("cut", &cut, "the file has 365: it was cut short, as by a download that ended early"),
    ] {
        for ending in ["safetensors", "pth"] {
            let name = format!("{name}.{ending}");
            fs::write(folder.path().join(&name), content).unwrap();
            for arguments in [&["inspect", &name][..], &["convert", &name, "out.safetensors"]] {
                let output = brigade(arguments, folder.path());
                assert_eq!(output.status.code(), Some(1));
                let said = text(&output.stderr);
                assert!(said.contains(&name) && said.contains(expected), "{said}");
                assert!(!said.contains(".partial"), "{said}");
                assert_eq!(said.lines().count(), 1, "{said}");
            }
        }
    }
}

/// A checkpoint whose model has tensors of types that a program cannot compute with.
#[needs()]
fn a_checkpoint_of_every_dtype_is_verified_and_copied() {
    let folder = tempfile::tempdir().unwrap();
    let formats =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../checkpoint/tests/fixtures/formats");
    let from = fs::read(formats.join("dtypes.safetensors")).unwrap();
    let path = folder.path().join("checkpoint_0");
    let staging = Staging::create(&path, "test").unwrap();
    let mut maker = Maker { staging, files: BTreeMap::new(), objects: vec![] };
    maker.file("model.safetensors", &from);
    let file = fs::File::open(formats.join("dtypes.safetensors")).unwrap();
    let header = brigade_checkpoint::safetensors::Header::read(Path::new("it"), &file).unwrap();
    let infos = header.tensors.iter().map(|entry| (entry.name.as_str(), entry.info.clone()));
    let mut object = Object::new("model", FileName::new("model").unwrap());
    object.add_file(&FileName::new("model.safetensors").unwrap(), infos, &[Placement::Replicate]);
    let manifest =
        Manifest { objects: vec![object], files: maker.files, ..Manifest::new("a test", 1) };
    maker.staging.commit(&manifest, false).unwrap();
    for arguments in [
        &["verify", "checkpoint_0"][..],
        &["inspect", "checkpoint_0"],
        &["convert", "checkpoint_0", "copy.safetensors"],
        &["convert", "checkpoint_0", "copy.pth"],
        &["convert", "copy.pth", "back.safetensors"],
    ] {
        let output = brigade(arguments, folder.path());
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    }
    let bytes = |name: &str| fs::read(folder.path().join(name)).unwrap();
    assert_eq!(bytes("copy.safetensors"), bytes("back.safetensors"));
}

#[needs()]
fn accelerates_states_need_a_checkpoint_to_go_into() {
    let folder = tempfile::tempdir().unwrap();
    let theirs =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../checkpoint/tests/fixtures/accelerate");
    let theirs = theirs.to_str().unwrap();
    let failed = |arguments: &[&str]| {
        let output = brigade(arguments, folder.path());
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
        text(&output.stderr)
    };
    assert!(failed(&["convert", theirs, "out"]).contains("give --like"));
    assert!(failed(&["verify", theirs]).contains("`brigade checkpoint convert --like`"));
    make(folder.path());
    let said = failed(&["convert", theirs, "out", "--like", "checkpoint_3"]);
    assert!(said.contains("does not fit checkpoint_3: model.safetensors: "), "{said}");
    assert!(!folder.path().join("out").exists());
}

#[needs()]
fn states_of_another_run_are_kept_only_when_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let ours = make(folder.path());
    let theirs = folder.path().join("theirs");
    fs::create_dir(&theirs).unwrap();
    fs::copy(ours.join("model.safetensors"), theirs.join("model.safetensors")).unwrap();
    let run = |arguments: &[&str]| {
        let like = ["convert", "theirs", "out", "--like", "checkpoint_3"];
        brigade(&[&like[..], arguments].concat(), folder.path())
    };
    let output = run(&["--keep-state", "optimizer"]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("theirs lacks some of the states that checkpoint_3 has"), "{said}");
    assert!(said.contains("scheduler: there is no schedule for it; "), "{said}");
    let flag = "--keep-state files,loader,optimizer,random,scheduler";
    assert!(said.contains(&format!("pass `{flag}`")), "{said}");
    assert!(!folder.path().join("out").exists());
    let output = run(&flag.split(' ').collect::<Vec<_>>());
    let said = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    for kept in ["optimizer: ", "scheduler: ", "loader: ", "rank_0: ", "notes.txt: "] {
        assert!(said.contains(&format!("kept {kept}")), "{said}");
    }
    let output = run(&["--keep-state", "nothing"]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    let output = brigade(&["convert", "checkpoint_3", "a.pth", "--split-batches"], folder.path());
    assert!(
        text(&output.stderr).contains("apply only to --to accelerate"),
        "{}",
        text(&output.stderr)
    );
}

#[needs()]
fn verify_says_what_is_wrong_and_exits_with_1() {
    let folder = tempfile::tempdir().unwrap();
    let path = make(folder.path());
    let output = brigade(&["verify", "checkpoint_3"], folder.path());
    assert!(output.status.success());
    assert!(text(&output.stdout).contains("all as written"), "{}", text(&output.stdout));
    let file = path.join("optimizer.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 4;
    fs::write(&file, &bytes).unwrap();
    fs::write(path.join("notes.txt"), b"of no one\n").unwrap();
    let output = brigade(&["verify", "checkpoint_3"], folder.path());
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stdout);
    assert!(said.contains("optimizer.safetensors is damaged: its checksum is"), "{said}");
    assert_eq!(said.lines().count(), 2, "{said}");
    fs::remove_file(file).unwrap();
    let output = brigade(&["verify", "checkpoint_3"], folder.path());
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("its optimizer.safetensors is missing"));
}

#[needs()]
fn weights_go_to_pytorch_and_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = make(folder.path());
    let run = |arguments: &[&str]| {
        let output = brigade(&[&["convert"], arguments].concat(), folder.path());
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let said = run(&["checkpoint_3", "model.pth"]);
    assert!(said.starts_with("wrote model.pth\nleft out optimizer: "), "{said}");
    run(&["model.pth", "back.safetensors"]);
    assert_eq!(
        fs::read(folder.path().join("back.safetensors")).unwrap(),
        fs::read(path.join("model.safetensors")).unwrap()
    );
    let output = brigade(&["convert", "model.pth", "back.safetensors"], folder.path());
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("it already exists"), "{}", text(&output.stderr));
    let output = brigade(&["convert", "model.pth", "other.onnx"], folder.path());
    assert!(text(&output.stderr).contains("is not that of a layout"), "{}", text(&output.stderr));
}

#[needs()]
fn accelerates_layout_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let said = text(&to_accelerate(folder.path()).stdout);
    for name in ["model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"] {
        assert!(said.contains(&format!("wrote theirs/{name}\n")), "{said}");
    }
    assert!(said.contains("left out loader: Accelerate keeps no position"), "{said}");
}

fn to_accelerate(folder: &Path) -> Output {
    make(folder);
    let output = brigade(&["convert", "checkpoint_3", "theirs"], folder);
    assert!(output.status.success(), "{}", text(&output.stderr));
    output
}

#[needs(Pytorch)]
fn peer_accelerates_layout_is_loaded_by_pytorch() {
    let folder = tempfile::tempdir().unwrap();
    to_accelerate(folder.path());
    let python = brigade_test_needs::python(Need::Pytorch).unwrap();
    let script = r#"
import torch
from safetensors.torch import load_file
model = torch.nn.Linear(3, 2)
model.load_state_dict(load_file("theirs/model.safetensors"))
assert model.weight.tolist() == [[1, 2, 3], [4, 5, 6]] and model.bias.tolist() == [0.5, -0.5]
optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
optimizer.load_state_dict(torch.load("theirs/optimizer.bin", weights_only=True))
group = optimizer.param_groups[0]
assert group["lr"] == 0.01 and group["betas"] == (0.9, 0.99) and group["amsgrad"] is False
state = optimizer.state[model.bias]
assert state["step"].item() == 3 and state["exp_avg"].tolist() == [0.75, 0.75]
model(torch.ones(1, 3)).sum().backward()
optimizer.step()
assert optimizer.state[model.weight]["step"].item() == 4
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
scheduler.load_state_dict(torch.load("theirs/scheduler.bin", weights_only=True) | {"lr_lambdas": [None]})
assert scheduler.last_epoch == 3
states = torch.load("theirs/random_states_0.pkl", weights_only=True)
assert states["step"] == 0 and states["torch_manual_seed"].tolist() == [0, 1, 2, 3, 4, 5]
"#;
    let output =
        Command::new(python).args(["-c", script]).current_dir(folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[needs()]
fn convert_says_which_state_dictionary_it_took() {
    let folder = tempfile::tempdir().unwrap();
    let fixtures =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../checkpoint/tests/fixtures/weights");
    let fixture = |name: &str| fixtures.join(name).to_str().unwrap().to_owned();
    let said = |arguments: &[&str]| {
        let output = brigade(arguments, folder.path());
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let refused = |arguments: &[&str], code: i32| {
        let output = brigade(arguments, folder.path());
        assert_eq!(output.status.code(), Some(code), "{}", text(&output.stdout));
        text(&output.stderr)
    };
    let lightning = fixture("lightning.ckpt");
    let answer =
        said(&["convert", &lightning, "a.safetensors", "--prefix", "model", "--dtype", "bf16"]);
    for line in [
        "read the state dictionary under `state_dict`",
        "read 2 names, without the prefix `model.`",
        "left out `epoch`: the integer 1, which is not among the weights",
        "left out `loss.weight`: its name does not begin with `model.`",
        "wrote a.safetensors",
    ] {
        assert!(answer.lines().any(|it| it == line), "{line}: {answer}");
    }
    assert!(said(&["inspect", "a.safetensors"]).contains("weight  [2, 2]  BF16"));
    // The whole file is shown, not only its state dictionary.
    let answer = said(&["inspect", &lightning]);
    assert!(
        answer.contains("global_step: 7") && answer.contains("state_dict.model.weight"),
        "{answer}"
    );

    let several = fixture("several.pth");
    let error = refused(&["convert", &several, "b.pth"], 1);
    assert!(
        error.contains("2 state dictionaries: `model`, `model_ema`; choose one (`--key`"),
        "{error}"
    );
    let answer = said(&["convert", &several, "b.pth", "--key", "model_ema"]);
    assert!(answer.starts_with("read the state dictionary under `model_ema`\n"), "{answer}");
    let error = refused(&["convert", &several, "c.pth", "--key", "ema"], 1);
    assert!(
        error.contains("no dictionary under `ema`; its state dictionaries are `model`"),
        "{error}"
    );

    // A checkpoint contains models by name.
    make(folder.path());
    said(&["convert", "checkpoint_3", "d.safetensors", "--key", "model", "--dtype", "float16"]);
    let error = refused(&["convert", "checkpoint_3", "e.safetensors", "--key", "other"], 1);
    assert!(
        error.contains("no dictionary under `other`; its state dictionaries are `model`"),
        "{error}"
    );
    let error = refused(&["convert", "checkpoint_3", "e", "--key", "model"], 1);
    assert!(error.contains("are for one file of weights"), "{error}");
    let error = refused(&["convert", &several, "e", "--key", "model", "--like", "checkpoint_3"], 2);
    assert!(error.contains("cannot be used with"), "{error}");
    for name in ["c.pth", "e", "e.safetensors"] {
        assert!(!folder.path().join(name).exists(), "{name}");
    }
}

/// The weights of an index are shown, whatever else a shard contains.
#[needs()]
fn inspect_says_what_was_read_of_shards() {
    let folder = tempfile::tempdir().unwrap();
    let shard = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../checkpoint/tests/fixtures/weights/lightning.ckpt");
    fs::copy(shard, folder.path().join("pytorch_model-00001-of-00001.bin")).unwrap();
    let names = ["model.weight", "model.bias", "loss.weight"];
    let map: BTreeMap<&str, &str> =
        names.into_iter().map(|name| (name, "pytorch_model-00001-of-00001.bin")).collect();
    let index = "pytorch_model.bin.index.json";
    fs::write(folder.path().join(index), json!({ "weight_map": map }).to_string()).unwrap();
    let said = |arguments: &[&str]| {
        let output = brigade(arguments, folder.path());
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    for path in [index, "."] {
        let answer = said(&["inspect", path]);
        for line in [
            "  read the state dictionary under `state_dict`",
            "  left out `epoch`: the integer 1, which is not among the weights",
        ] {
            assert!(answer.lines().any(|it| it == line), "{line}: {answer}");
        }
        assert!(answer.contains("model.weight  [2, 2]"), "{answer}");
        let all: Value = serde_json::from_str(&said(&["inspect", path, "--json"])).unwrap();
        assert_eq!(all["read"], json!(["the state dictionary under `state_dict`"]));
        assert_eq!(all["tensors"].as_array().unwrap().len(), 3);
    }
    let estimate = Command::new(env!("CARGO_BIN_EXE_brigade"))
        .args(["estimate", index, "--json"])
        .current_dir(folder.path())
        .output()
        .unwrap();
    assert!(estimate.status.success(), "{}", text(&estimate.stderr));
    let all: Value = serde_json::from_slice(&estimate.stdout).unwrap();
    assert_eq!(all["read"], json!(["the state dictionary under `state_dict`"]));
}

/// `torch.save({"w": torch.as_strided(torch.rand(1), (100000, 100000), (0, 0))}, "stride_0.pth")`: 1.5 kB that
/// would be 40 GB.
#[needs()]
fn a_small_file_does_not_fill_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let fixture = "../checkpoint/tests/fixtures/stride_0.pth";
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join(fixture);
    fs::copy(fixture, folder.path().join("stride_0.pth")).unwrap();
    for arguments in [
        vec!["convert", "stride_0.pth", "out.safetensors"],
        vec!["convert", "stride_0.pth", "out.bin"],
        vec!["convert", "stride_0.pth", "out", "--like", "stride_0.pth"],
        vec!["inspect", "stride_0.pth"],
    ] {
        let output = brigade(&arguments, folder.path());
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        let like = arguments.contains(&"--like");
        assert!(like || said.contains("`w`: a tensor of size [100000, 100000]"), "{said}");
        let left: Vec<_> = fs::read_dir(folder.path()).unwrap().collect();
        assert_eq!(left.len(), 1, "{left:?}");
    }
}
