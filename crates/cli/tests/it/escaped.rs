//! Tests that names and values in files never reach a terminal unescaped: each command that reads files gets some that
//! would move the cursor, set the clipboard, forge a line of Brigade's, or show text backwards.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use brigade_checkpoint::layout::{ChecksumWriter, Manifest, Object, Placement, Staging};
use brigade_checkpoint::safetensors::layout;
use brigade_checkpoint::{Dtype, FileName, TensorInfo};
use serde_json::json;
use tempfile::TempDir;

/// Name with characters that a file name can contain: all except a zero byte and a slash.
const NAME: &str = "a\x1b]52;c;AA==\x07\x1b[2J\r\nbrigade: forged\u{9b}2J\u{202e}\u{2028}\x7f";
/// Text with characters that a file can contain.
const TEXT: &str = "a\0\x1b]52;c;AA==\x07\x1b[2J\r\nbrigade: forged\u{9b}2J\u{202e}\u{2028}\x7f";

struct Case {
    folder: TempDir,
}

impl Case {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn file(&self, name: &str, bytes: impl AsRef<[u8]>) {
        let path = self.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    /// Checks that the output contains no control characters for a terminal, and contains `expected`.
    fn says(&self, words: &[&str], expected: &str) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_brigade"));
        command.args(words).current_dir(self.path()).stdin(Stdio::null());
        command.env("HOME", self.path()).env_remove("XDG_CONFIG_HOME").env_remove("HF_HOME");
        let output = command.output().unwrap();
        let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        assert!(said.contains(expected), "{words:?}: {said:?}");
        for line in said.split('\n') {
            assert!(!line.starts_with("brigade: forged"), "{words:?}: {said:?}");
            let obeyed = |letter: char| {
                letter.is_control()
                    || matches!(letter, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}')
            };
            assert!(!line.contains(obeyed), "{words:?}: {line:?}");
        }
    }
}

/// A file of safetensors with one tensor.
fn safetensors(name: &str, dtype: &str) -> Vec<u8> {
    let header = json!({
        "__metadata__": { name: name },
        name: { "dtype": dtype, "shape": [1], "data_offsets": [0, 4] },
    });
    let header = header.to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend([0; 4]);
    bytes
}

/// The name as it is shown.
const SHOWN: &str =
    r"\u{1b}]52;c;AA==\u{7}\u{1b}[2J\r\nbrigade: forged\u{9b}2J\u{202e}\u{2028}\u{7f}";

#[test]
fn weights() {
    let case = Case::new();
    case.file("evil.safetensors", safetensors(TEXT, "F32"));
    case.says(&["checkpoint", "inspect", "evil.safetensors"], SHOWN);
    case.says(&["checkpoint", "inspect", "evil.safetensors", "--json"], r"\u001b]52;c;AA==\u0007");
    case.says(&["estimate", "evil.safetensors"], "1 tensor");
    case.says(&["estimate", "evil.safetensors", "--nproc", "2"], "zero3+cpu");
    let sharding = ["explain", "sharding", "evil.safetensors", "--nproc", "2"];
    case.says(&[&sharding[..], &["--all"]].concat(), SHOWN);
    case.says(&[&sharding[..], &["--json"]].concat(), r"\u001b]52;c;AA==\u0007");
    case.says(&[&sharding[..], &["--units", "layers"]].concat(), SHOWN);
    case.says(&["checkpoint", "convert", "evil.safetensors", "evil.pth"], "wrote evil.pth");
    case.says(&["checkpoint", "inspect", "evil.pth"], SHOWN);
    case.says(&["checkpoint", "inspect", "evil.pth", "--json"], r"\u001b]52;c;AA==\u0007");
    case.says(
        &["checkpoint", "convert", "evil.pth", "folder", "--to", "accelerate"],
        "evil.pth is",
    );

    case.file(&format!("{NAME}.safetensors"), safetensors("a", "F32"));
    let named = format!("{NAME}.safetensors");
    case.says(&["checkpoint", "inspect", &named], SHOWN);
    case.says(&["checkpoint", "convert", &named, &format!("{NAME}.pth")], SHOWN);
    case.says(&["checkpoint", "convert", &named, &format!("a.{NAME}")], SHOWN);
    case.says(&["checkpoint", "verify", &named], SHOWN);
    case.says(&["estimate", &named], SHOWN);
    case.says(&["estimate", TEXT.trim_start_matches("a\0")], r"\u{1b}]52");

    case.file("dtype.safetensors", safetensors("a", TEXT));
    case.says(&["checkpoint", "inspect", "dtype.safetensors"], "dtype.safetensors");
    case.says(&["estimate", "dtype.safetensors"], SHOWN);
    let index = json!({ "metadata": { TEXT: TEXT }, "weight_map": { TEXT: TEXT } }).to_string();
    case.file("shards/model.safetensors.index.json", &index);
    case.says(&["checkpoint", "inspect", "shards"], SHOWN);
    case.says(&["estimate", "shards"], SHOWN);
    case.file("broken.safetensors", TEXT);
    case.says(&["checkpoint", "inspect", "broken.safetensors"], "brigade: ");
}

#[test]
fn checkpoints() {
    let case = Case::new();
    let path = case.path().join("checkpoint_0");
    let staging = Staging::create(&path, "test").unwrap();
    let mut file = ChecksumWriter::create(staging.path().join("model.safetensors")).unwrap();
    let info = TensorInfo { dtype: Dtype::F32, shape: vec![1] };
    let infos = [(TEXT, info)];
    let mut bytes = layout(Path::new("model.safetensors"), &infos).unwrap().header;
    bytes.extend([0; 4]);
    file.put(&bytes).unwrap();
    let mut files = std::collections::BTreeMap::new();
    files.insert(FileName::new("model.safetensors").unwrap(), file.finish(false).unwrap());
    let mut state = ChecksumWriter::create(staging.path().join("model.json")).unwrap();
    state.put(json!({ TEXT: TEXT, "list": [TEXT] }).to_string().as_bytes()).unwrap();
    files.insert(FileName::new("model.json").unwrap(), state.finish(false).unwrap());
    let mut object = Object::new("model", FileName::new("model").unwrap());
    object.state = Some(FileName::new("model.json").unwrap());
    object.add_file(
        &FileName::new("model.safetensors").unwrap(),
        infos.to_vec(),
        &[Placement::Replicate],
    );
    let manifest = Manifest { objects: vec![object], files, ..Manifest::new(TEXT, 1) };
    staging.commit(&manifest, false).unwrap();
    case.says(&["checkpoint", "inspect", "checkpoint_0"], SHOWN);
    case.says(&["checkpoint", "inspect", "checkpoint_0", "--json"], r"\u001b]52;c;AA==\u0007");
    case.says(&["checkpoint", "verify", "checkpoint_0"], "2 files");
    case.says(&["checkpoint", "convert", "checkpoint_0", "a.pth"], "wrote a.pth");

    case.file("damaged/manifest.json", json!({ "format": TEXT, "version": TEXT }).to_string());
    case.says(&["checkpoint", "verify", "damaged"], "damaged");
    case.says(&["checkpoint", "inspect", "damaged"], "damaged");
}

/// One white pixel.
const PNG: &[u8] = &[
    0x89, 0x50, 0x4e, 0x47, 0xd, 0xa, 0x1a, 0xa, 0x0, 0x0, 0x0, 0xd, 0x49, 0x48, 0x44, 0x52, 0x0,
    0x0, 0x0, 0x1, 0x0, 0x0, 0x0, 0x1, 0x8, 0x0, 0x0, 0x0, 0x0, 0x3a, 0x7e, 0x9b, 0x55, 0x0, 0x0,
    0x0, 0xa, 0x49, 0x44, 0x41, 0x54, 0x78, 0x9c, 0x63, 0xf8, 0xf, 0x0, 0x1, 0x1, 0x1, 0x0, 0xb1,
    0x38, 0xf6, 0x14, 0x0, 0x0, 0x0, 0x0, 0x49, 0x45, 0x4e, 0x44, 0xae, 0x42, 0x60, 0x82,
];

#[test]
fn images() {
    let case = Case::new();
    case.file(&format!("photos/{NAME}/{NAME}.png"), PNG);
    case.file(&format!("photos/{NAME}/{NAME}-broken.png"), TEXT);
    case.file("photos/other/a.png", PNG);
    case.says(&["data", "stats", "photos"], SHOWN);
    case.says(&["data", "stats", "photos", "--json"], r"\u001b]52;c;AA==\u0007");
    case.says(&["data", "show", "photos"], "samples.png");
    case.says(&["data", "pack", "photos"], SHOWN);
    case.says(&["data", "pack", "photos", "--skip-broken", "-o", &format!("{NAME}.pack")], SHOWN);
    case.says(&["data", "stats", &format!("{NAME}.pack")], SHOWN);
    case.says(&["data", "stats", "photos", "--label", "^(b)"], SHOWN);
    case.says(&["data", "stats", &format!("{NAME}.tar")], SHOWN);
}

#[test]
fn settings() {
    let case = Case::new();
    let text = serde_json::to_string(TEXT).unwrap().replace("\u{7f}", "\\u007f");
    let role = text.replace("\\u0000", "");
    case.file("job.toml", format!("version = 1\n[ranks]\nrole = {role}\n[env]\nA = {role}\n"));
    case.says(&["config", "show", "--config", "job.toml"], SHOWN);
    case.says(&["config", "show", "--config", "job.toml", "--json"], r"\u001b]52");
    // One value alone: its line ends stay, but for these it is escaped.
    case.says(&["config", "get", "nproc", "--config", &format!("{NAME}.toml")], SHOWN);
    let explain = ["launch", "--config", "job.toml", "--nproc", "1", "--explain", "true"];
    case.says(&explain, SHOWN);
    case.says(&[&explain[..6], &["--json", "true"]].concat(), r"\u001b]52");
    case.file("env.toml", format!("version = 1\n[env]\nA = {text}\n"));
    case.says(&["config", "show", "--config", "env.toml"], "A has a value with a zero byte");
    case.file("key.toml", format!("version = 1\n[ranks]\n{text} = 1\n"));
    case.says(&["config", "show", "--config", "key.toml"], SHOWN);
    case.file("value.toml", format!("version = 1\n[ranks]\nnproc = {text}\n"));
    case.says(&["config", "show", "--config", "value.toml"], "nproc is");
    case.file("broken.toml", format!("version = 1\n[ranks\n{TEXT}"));
    case.says(&["config", "show", "--config", "broken.toml"], "this is not TOML");
    case.says(&["config", "set", "nproc", "1", "--config", "broken.toml"], "this is not TOML");
    case.file(&format!("{NAME}.toml"), "version = 1\n[ranks]\nnproc = 0\n");
    case.says(&["config", "show", "--config", &format!("{NAME}.toml")], SHOWN);
    for (name, text) in [
        ("a.yaml", format!("{text}: {text}\ndistributed_type: {text}\n")),
        ("b.yaml", format!("a: {TEXT}\n")),
        ("c.json", format!("{{{text}: {text}}}")),
    ] {
        case.file(name, text);
        case.says(&["config", "show", "--config", name], name);
        case.says(&["config", "update", "--config", name], name);
        case.says(&["launch", "--config", name, "--explain", "true"], name);
    }
    case.file("hosts", format!("node1 slots={TEXT}\n"));
    case.says(&["launch", "--hostfile", "hosts", "true"], r"\u{1b}]52");
    case.says(&["doctor", "--hostfile", "hosts"], r"\u{1b}]52");
    case.says(&["launch", "--hostfile", NAME, "true"], SHOWN);
    case.says(&["launch", &format!("./{NAME}")], SHOWN);
    // The table wraps its lines.
    case.says(&["doctor", "--program", &format!("./{NAME}")], r"\u{1b}]52;c;AA==");
}

#[test]
fn runs() {
    let case = Case::new();
    let line = |it: serde_json::Value| format!("{it}\n");
    let run = [
        line(json!({ "project": TEXT, "config": { TEXT: TEXT }, "time": 1.0 })),
        line(json!({ "step": 1, "time": 2.0, "values": { TEXT: 1.0, "text": TEXT } })),
        format!("{TEXT}\n"),
    ];
    case.file("runs/a.jsonl", run.concat());
    case.says(&["watch", "runs/a.jsonl", "--once"], "a");
    case.says(&["report", "runs/a.jsonl"], "a.html");
    case.file("runs/none.jsonl", TEXT);
    case.says(&["report", "runs/none.jsonl"], "is not a run: line 1");
    let named = format!("runs/{NAME}.jsonl");
    case.file(&named, run.concat());
    case.says(&["report", &named], SHOWN);
    case.says(&["watch", &named, "--once"], "forged");
    case.says(&["report", &named, "--output", &named], SHOWN);
    case.says(&["watch", NAME, "--once"], SHOWN);
}
