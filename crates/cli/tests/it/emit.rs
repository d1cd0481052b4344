//! Tests of `brigade emit`: the launchers in the job get every setting, whichever layer it is from.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

/// Creates a home with these settings, and a program.
fn home(settings: &str) -> TempDir {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join(".config/brigade");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("config.toml"), settings).unwrap();
    fs::write(home.path().join("train.py"), "").unwrap();
    home
}

fn brigade(home: &Path, variables: &[(&str, &str)], words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_brigade"));
    command.current_dir(home).env_clear().env("HOME", home).env("PATH", "/usr/bin:/bin");
    command.envs(variables.iter().copied()).args(words).output().unwrap()
}

fn emitted(home: &Path, variables: &[(&str, &str)], words: &[&str]) -> (String, String) {
    let output = brigade(home, variables, &[&["emit"], words].concat());
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{words:?}: {stderr}");
    (String::from_utf8(output.stdout).unwrap(), stderr)
}

/// Returns the arguments after `brigade launch` in a script for Slurm.
fn flags(script: &str) -> Vec<String> {
    let line = script.lines().find(|line| line.starts_with("srun ")).unwrap();
    let words = shlex::split(line).unwrap();
    let at = words.windows(2).position(|pair| pair == ["brigade", "launch"]).unwrap();
    words[at + 2..].to_vec()
}

/// A value other than the default for each setting that a job file can contain.
const VALUES: &[(&str, &str)] = &[
    ("nproc", "3"),
    ("cpu", "true"),
    ("virtual-local-rank", "true"),
    ("threads-per-rank", "5"),
    ("bind", "numa"),
    ("role", "actor"),
    ("local-addr", "here"),
    ("store-port", "29500-29510"),
    ("rdzv-backend", "builtin"),
    ("rdzv-id", "the job"),
    ("rdzv-conf", "join_timeout=60"),
    ("rdzv-secret-file", "/run/secret"),
    ("max-restarts", "4"),
    ("shutdown-timeout", "2.5"),
    ("heartbeat-timeout", "45"),
    ("log-dir", "logs of mine"),
    ("tee", "3"),
    ("redirects", "1"),
    ("local-ranks-filter", "0,1"),
    ("duplicate-stdout-filters", "loss,epoch"),
    ("duplicate-stderr-filters", "error"),
    ("prefix", "[${rank}] $"),
    ("color", "never"),
    ("events", "job events.jsonl"),
    ("raw", "true"),
    ("quiet", "true"),
    ("mixed-precision", "bf16"),
    ("gradient-accumulation-steps", "4"),
    ("dynamo-backend", "inductor"),
    ("dynamo-mode", "max-autotune"),
    ("dynamo-use-fullgraph", "true"),
    ("dynamo-use-dynamic", "true"),
    ("dynamo-use-regional-compilation", "true"),
    ("debug-collectives", "true"),
];
/// Settings that the scheduler provides, or that are for a list of hosts, or excluded by `cpu`, or not for Python
/// programs.
const WITHOUT: &[&str] = &[
    "devices",
    "hosts",
    "hostfile",
    "include",
    "exclude",
    "ssh-command",
    "connect-timeout",
    "workdir",
    "sync",
    "env-pass",
    "nnodes",
    "node-rank",
    "master-addr",
    "master-port",
    "rdzv-endpoint",
    "sharding",
    "sequence-parallel",
    "tensor",
    "context",
    "context-method",
    "expert",
    "pipeline",
    "micro-batches",
    "pipeline-schedule",
    "pipeline-chunks",
];

#[test]
fn every_setting_of_every_layer_is_in_the_file() {
    // A new setting needs a row here.
    let of_tests: Vec<&str> = VALUES.iter().map(|it| it.0).chain(WITHOUT.iter().copied()).collect();
    let empty = home("");
    let answer = brigade(empty.path(), &[], &["launch", "--explain", "--json", "true"]);
    let answer: Value = serde_json::from_slice(&answer.stdout).unwrap();
    let all = answer["settings"].as_object().unwrap();
    let untried: Vec<&String> = all.keys().filter(|it| !of_tests.contains(&it.as_str())).collect();
    assert!(untried.is_empty(), "{untried:?}");

    // From variables, then from flags: the same job.
    let variables: Vec<(String, &str)> = VALUES
        .iter()
        .map(|(name, value)| (format!("BRIGADE_{}", name.to_uppercase().replace('-', "_")), *value))
        .collect();
    let variables: Vec<(&str, &str)> =
        variables.iter().map(|(name, value)| (name.as_str(), *value)).collect();
    let emit = ["--nnodes", "2", "train.py"];
    let (script, _) = emitted(empty.path(), &variables, &[&["slurm"], &emit[..]].concat());
    let words = flags(&script);
    for (name, value) in VALUES {
        let at = words.iter().position(|it| *it == format!("--{name}"));
        let at = at.unwrap_or_else(|| panic!("{name} is not in {words:?}"));
        assert!(*value == "true" || words[at + 1] == *value, "{name}: {words:?}");
    }
    // As flags they are accepted, with the same meaning.
    let end = words.iter().position(|it| it == "--").unwrap();
    let as_flags: Vec<&str> = words[..end].iter().map(String::as_str).collect();
    let (again, _) = emitted(empty.path(), &[], &[&["slurm"], &as_flags[..], &emit[..]].concat());
    assert_eq!(again, script);
    // A settings file has the same effect as a variable.
    let file = home(
        "version = 1\n[training]\nmixed-precision = \"bf16\"\n[output]\nquiet = true\n[failure]\nmax-restarts = 2\n[env]\nSEED = 7\n",
    );
    for target in ["slurm", "k8s", "jobset"] {
        let (text, _) = emitted(file.path(), &[], &[target, "train.py"]);
        for said in ["--mixed-precision", "bf16", "--quiet", "--max-restarts", "SEED"] {
            assert!(text.contains(said), "{target}: {said} is not in {text}");
        }
    }
    // A switch that is off, while a file in the job may turn it on.
    let (script, _) = emitted(file.path(), &[], &["slurm", "--no-quiet", "train.py"]);
    assert!(flags(&script).contains(&"--no-quiet".to_owned()), "{script}");
}

#[test]
fn settings_of_the_scheduler_are_left_out_with_a_note() {
    let home = home("version = 1\n[hosts]\nhosts = [\"a:2\", \"b:2\"]\n");
    let (script, said) = emitted(home.path(), &[], &["slurm", "train.py"]);
    assert!(!script.contains("a:2"), "{script}");
    let expected =
        "config.toml:3: hosts a:2,b:2 is not in the job file: the scheduler has the hosts\n";
    assert!(said.ends_with(expected), "{said}");
    let output = brigade(home.path(), &[], &["emit", "slurm", "--hosts", "a:2", "train.py"]);
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said, "brigade: --hosts cannot be used in a job file: the scheduler sets it\n");
}

#[test]
fn modules_and_plugins_are_in_the_file() {
    let home = home("");
    let (script, _) = emitted(home.path(), &[], &["slurm", "-m", "pkg.train", "--lr", "1"]);
    assert_eq!(flags(&script), ["--module", "--", "pkg.train", "--lr", "1"]);

    let yaml = home.path().join("zero.yaml");
    let text = "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n  \
                zero_stage: 3\n  gradient_accumulation_steps: 4\n";
    fs::write(&yaml, text).unwrap();
    let config = ["--config", yaml.to_str().unwrap()];
    let explained = |words: &[&str]| -> Value {
        let output = brigade(
            home.path(),
            &[],
            &[&["launch", "--explain", "--json"], words, &["train.py"]].concat(),
        );
        assert!(output.status.success(), "{output:?}");
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        answer["ranks"][0]["env"].clone()
    };
    let (script, _) = emitted(home.path(), &[], &[&["slurm"], &config[..], &["train.py"]].concat());
    let words = flags(&script);
    let end = words.iter().position(|it| it == "--").unwrap();
    let as_flags: Vec<&str> = words[..end].iter().map(String::as_str).collect();
    let (file, mut job) = (explained(&config), explained(&as_flags));
    assert_eq!(file["ACCELERATE_DEEPSPEED_ZERO_STAGE"], "3");
    // Each launch has its own ID.
    job["TORCHELASTIC_RUN_ID"] = file["TORCHELASTIC_RUN_ID"].clone();
    assert_eq!(job, file);
}

#[test]
fn options_that_a_scheduler_does_not_know_are_refused() {
    let home = home("");
    let table: [(&[&str], &str); 4] = [
        (&["k8s", "--partition", "x", "train.py"], "unexpected argument '--partition' found"),
        (
            &["jobset", "--nnodes", "1:2", "train.py"],
            "`brigade emit k8s` for an elastic PyTorchJob",
        ),
        (&["slurm"], "a job file needs a program that is built already"),
        (&["slurm", "--release"], "a job file needs a program that is built already"),
    ];
    for (words, message) in table {
        let output = brigade(home.path(), &[], &[&["emit"], words].concat());
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}: {said}");
        assert!(said.contains(message) && said.lines().count() == 1, "{words:?}: {said}");
    }
    // `brigade launch` does not have these flags any more.
    let output = brigade(home.path(), &[], &["launch", "--emit", "slurm", "train.py"]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn options_of_job_files_name_the_command_that_prints_them() {
    let home = home("");
    let table: [(&[&str], &str); 6] = [
        (
            &["--nproc", "2", "--emit", "slurm", "train.py"],
            "--emit is not an option of `brigade launch`: `brigade emit slurm` prints",
        ),
        (
            &["--emit=k8s", "train.py"],
            "--emit is not an option of `brigade launch`: `brigade emit k8s` prints",
        ),
        (
            &["--emit", "pytorchjob", "train.py"],
            "`brigade emit k8s` prints a job file, with the same options for the job\n",
        ),
        (
            &["--time-limit", "2h", "--emit", "jobset", "train.py"],
            "--time-limit is not an option of `brigade launch`: `brigade emit jobset` prints",
        ),
        (
            &["--image", "train:1", "train.py"],
            "`brigade emit slurm`, `brigade emit k8s` or `brigade emit jobset` prints",
        ),
        (&["--emit"], "`brigade emit slurm`, `brigade emit k8s` or `brigade emit jobset` prints"),
    ];
    for (words, expected) in table {
        let output = brigade(home.path(), &[], &[&["launch"], words].concat());
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}: {stderr}");
        assert!(
            stderr.starts_with("brigade: --") && stderr.contains(expected),
            "{words:?}: {stderr}"
        );
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
}
