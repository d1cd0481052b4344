//! Tests of FSDP, DeepSpeed, Megatron-LM and fp8 in `brigade launch`: a Python program gets the variables that
//! `accelerate launch` sets, and other programs are refused the unsupported ones (`sharding.rs` has the rest).

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

/// Output of Accelerate itself, generated with `made.py` beside it.
const GOLDEN: &str = include_str!("../../../config/tests/accelerate/1.15.0.json");

/// Folder with a script, a program, and a Python that is not started.
struct Work(TempDir);

impl Work {
    fn new() -> Self {
        let work = Self(tempfile::tempdir().unwrap());
        fs::create_dir(work.path().join("bin")).unwrap();
        for name in ["bin/python3", "bin/cargo", "script.sh"] {
            fs::write(work.path().join(name), "#!/bin/sh\n").unwrap();
            fs::set_permissions(work.path().join(name), fs::Permissions::from_mode(0o755)).unwrap();
        }
        fs::write(work.path().join("train.py"), "").unwrap();
        work
    }

    /// Returns the path as a process in this folder sees it.
    fn path(&self) -> PathBuf {
        self.0.path().canonicalize().unwrap()
    }

    fn launch(&self, words: &[&str]) -> Output {
        self.brigade(&["launch"], words)
    }

    fn brigade(&self, command_words: &[&str], words: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_brigade"));
        command.current_dir(self.path()).env_clear();
        command.env("PATH", self.path().join("bin")).env("HOME", self.path());
        command.args(command_words).args(words).output().unwrap()
    }

    /// Returns the variables of the first rank, which is not started.
    fn variables(&self, words: &[&str]) -> BTreeMap<String, String> {
        let output = self.launch(&[&["--explain", "--json"], words].concat());
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {stderr}");
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        let env = answer["ranks"][0]["env"].as_object().unwrap();
        env.iter().map(|(name, value)| (name.clone(), value.as_str().unwrap().to_owned())).collect()
    }

    fn refusal(&self, words: &[&str]) -> String {
        let output = self.launch(words);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        stderr
    }
}

/// Returns `true` for variables that only a launch with plugins has.
fn is_of_plugins(name: &str) -> bool {
    const BEGINNINGS: [&str; 8] = [
        "FSDP_",
        "MEGATRON_LM_",
        "PARALLELISM_CONFIG_",
        "ACCELERATE_FP8_",
        "ACCELERATE_USE_",
        "ACCELERATE_DEEPSPEED_",
        "ACCELERATE_CONFIG_",
        "ACCELERATE_GRADIENT_",
    ];
    name != "ACCELERATE_USE_CPU"
        && (name == "PYTHONPATH" || BEGINNINGS.iter().any(|it| name.starts_with(it)))
}

/// Returns `true` if Accelerate uses this value when the variable is unset.
fn is_default(name: &str, value: &str) -> bool {
    const DEFAULTS: [(&str, &str); 8] = [
        ("ACCELERATE_USE_CPU", "False"),
        ("ACCELERATE_DEBUG_MODE", "false"),
        ("ACCELERATE_MIXED_PRECISION", "no"),
        ("ACCELERATE_DYNAMO_BACKEND", "NO"),
        ("ACCELERATE_DYNAMO_MODE", "default"),
        ("ACCELERATE_DYNAMO_USE_DYNAMIC", "False"),
        ("ACCELERATE_DYNAMO_USE_FULLGRAPH", "False"),
        ("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "False"),
    ];
    DEFAULTS.contains(&(name, value))
}

/// Compares a rank's variables with those of `accelerate launch`. A variable of an option that was not given may be
/// unset if the value is also the program's default.
fn compare(mut found: BTreeMap<String, String>, expected: &Value, folder: &str, case: &str) {
    if let Some(path) = found.get_mut("PYTHONPATH") {
        *path = path.replace(folder, "FOLDER");
    }
    let expected = expected.as_object().unwrap();
    let has_plugins = expected.keys().any(|it| is_of_plugins(it));
    for (name, value) in expected {
        let value = value.as_str().unwrap();
        match found.get(name) {
            // Its text in YAML is `(false, false, false)`, from which Accelerate makes these, which none of its own
            // programs accepts.
            Some(ours) if ["(", "f", "a"].contains(&value) => {
                assert_eq!(ours, "False", "{case}: {name}");
            }
            Some(ours) => assert_eq!(ours, value, "{case}: {name}"),
            None => {
                let may_be_unset = !has_plugins || name == "ACCELERATE_USE_CPU";
                assert!(may_be_unset && is_default(name, value), "{case}: {name} is not set");
            }
        }
    }
    let is_accelerates = |name: &str| is_of_plugins(name) || name.starts_with("ACCELERATE_");
    let more = found.iter().find(|(name, value)| {
        is_accelerates(name) && !expected.contains_key(*name) && !is_default(name, value)
    });
    assert_eq!(more, None, "{case}");
}

#[test]
fn python_programs_get_what_accelerate_sets() {
    let work = Work::new();
    let golden: Value = serde_json::from_str(GOLDEN).unwrap();
    let launches = golden["launches"].as_array().unwrap();
    assert!(launches.len() > 60);
    for launch in launches {
        let arguments = launch["arguments"].as_str().unwrap();
        let mut words: Vec<&str> = arguments.split_whitespace().collect();
        let file = work.path().join("config.yaml");
        // JSON is YAML.
        fs::write(&file, launch["file"].to_string()).unwrap();
        if !launch["file"].is_null() {
            words.extend(["--config", file.to_str().unwrap()]);
        }
        if !words.contains(&"--cpu") {
            words.push("--nproc=2");
        }
        let found = work.variables(&[&words, &["train.py"][..]].concat());
        let case = format!("{arguments}, {}", launch["file"]);
        compare(found, &launch["variables"], work.path().to_str().unwrap(), &case);
    }
}

/// Tests every settings file of Accelerate's repository.
#[test]
fn accelerates_own_files_set_what_accelerate_sets() {
    let work = Work::new();
    let golden: Value = serde_json::from_str(GOLDEN).unwrap();
    let files = golden["files"].as_array().unwrap();
    assert!(files.len() > 20);
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../config/tests/accelerate/files");
    for row in files {
        let file = format!("{folder}/{}", row["file"].as_str().unwrap());
        let mut words: Vec<&str> = row["arguments"].as_str().unwrap().split_whitespace().collect();
        // Some files are for several machines, which do not exist here.
        words.extend(["--config", &file, "--nnodes=1"]);
        if !words.contains(&"--num_processes") {
            words.push("--nproc=2");
        }
        words.push("train.py");
        if row["variables"].is_null() {
            let said = work.refusal(&words);
            let reasons = ["unknown key `invalid_key`", "does not start jobs on Amazon SageMaker"];
            assert!(reasons.iter().any(|it| said.contains(it)), "{said}");
        } else {
            let found = work.variables(&words);
            compare(found, &row["variables"], work.path().to_str().unwrap(), &file);
        }
    }
}

#[test]
fn variables_that_are_given_by_name_go_first() {
    let work = Work::new();
    let words = ["--use-fsdp", "--env", "FSDP_VERSION=2", "--env", "FSDP_OTHER=x", "train.py"];
    let found = work.variables(&words);
    assert_eq!((found["FSDP_VERSION"].as_str(), found["FSDP_OTHER"].as_str()), ("2", "x"));
}

#[test]
fn another_program_is_refused() {
    let work = Work::new();
    let brigade = env!("CARGO_BIN_EXE_brigade");
    for (flags, what) in [
        (&["--mixed_precision=fp8", "--fp8_backend=te"][..], "fp8 (flag --mixed-precision)"),
        (&["--use_fsdp", "--mixed-precision=fp8"], "fp8 (flag --mixed-precision)"),
    ] {
        let said = work.refusal(&[flags, &[brigade]].concat());
        let expected = format!("brigade: {what} needs a Python program that uses Accelerate, and ");
        assert!(said.starts_with(&expected), "{said}");
        let remedy = "use --mixed-precision bf16: Brigade has no kernels for fp8";
        assert!(said.trim_end().ends_with(remedy), "{said}");
    }
    let file = work.path().join("config.yaml");
    fs::write(
        &file,
        "distributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_tp_degree: 2}\n",
    )
    .unwrap();
    let config = ["--config", file.to_str().unwrap(), "--nproc=4", "--bin", "train"];
    let found = work.variables(&config);
    assert_eq!((&*found["BRIGADE_SHARDING"], &*found["BRIGADE_TENSOR"]), ("zero1", "2"));
    assert!(!found.contains_key("ACCELERATE_USE_MEGATRON_LM"), "{found:?}");
    let found = work.variables(&["--use-fsdp", "--nproc=2", "--bin", "train"]);
    assert_eq!(found["BRIGADE_SHARDING"], "zero3");
    assert!(!found.contains_key("ACCELERATE_USE_FSDP"), "{found:?}");
    // A script may start a Python, and so may a program with such a name.
    for program in [&["./script.sh"][..], &["python3", "-c", "pass"], &["-m", "pkg.train"]] {
        let found = work.variables(&[&["--use-fsdp"], program].concat());
        assert_eq!(found["ACCELERATE_USE_FSDP"], "true");
        assert!(!found.contains_key("BRIGADE_SHARDING"), "{found:?}");
    }
}

#[test]
fn exclusive_flags_are_refused() {
    let work = Work::new();
    let fsdp = work.path().join("fsdp.yaml");
    fs::write(&fsdp, "distributed_type: FSDP\nuse_cpu: false\n").unwrap();
    for (words, expected) in [
        (
            &["--use-fsdp", "--use-deepspeed"][..],
            "--use-fsdp and --use-deepspeed exclude each other",
        ),
        (&["--multi-gpu", "--use-deepspeed"], "--use-deepspeed and --multi-gpu exclude each other"),
        (
            &["--cpu", "--use-fsdp"],
            "FSDP (flag --use-fsdp) and cpu (flag --cpu) exclude each other",
        ),
        (
            &["--use-parallelism-config"],
            "the parallelism config (flag --use-parallelism-config) needs",
        ),
        (&["--use-fsdp", "--fsdp-version", "3"], "--fsdp-version <"),
        (&["--use-deepspeed", "--zero-stage", "x"], "--zero-stage <"),
        (&["--mixed-precision=fp8", "--fp8-backend", "cuda"], "--fp8-backend <"),
        (
            &["--mixed-precision=fp8", "--fp8-override-linear-precision", "true"],
            "expected true or false three times",
        ),
    ] {
        let said = work.refusal(&[words, &["train.py"]].concat());
        assert!(said.contains(expected), "{words:?}: {said}");
    }
    let explained = |words: &[&str]| {
        let output = work.launch(&[&["--explain", "--nproc=1"], words, &["train.py"]].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let config = ["--cpu", "--config", fsdp.to_str().unwrap()];
    assert!(explained(&config).contains("fsdp.yaml:1: FSDP is overridden by flag --cpu"));
    let idle = explained(&["--fsdp-version=2"]);
    assert!(idle.contains("flag --fsdp-version: has no effect without --use-fsdp"), "{idle}");
    let idle = explained(&["--fp8-margin=2", "--megatron-lm-tp-degree=2"]);
    let expected = "flag --fp8-margin: has no effect without --mixed-precision fp8";
    assert!(idle.contains(expected), "{idle}");
    let expected = "flag --megatron-lm-tp-degree: has no effect without --use-megatron-lm";
    assert!(idle.contains(expected), "{idle}");
}

/// A file at Accelerate's default location is read without being requested.
#[test]
fn accelerates_own_file_is_named_and_turns_nothing_on_for_others() {
    let work = Work::new();
    let folder = work.path().join(".cache/huggingface/accelerate");
    fs::create_dir_all(&folder).unwrap();
    let file = folder.join("default_config.yaml");
    fs::write(&file, "distributed_type: FSDP\nmixed_precision: bf16\n").unwrap();
    assert_eq!(work.variables(&["train.py"])["ACCELERATE_USE_FSDP"], "true");

    let answer = |output: Output| {
        assert!(output.status.success(), "{output:?}");
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let started = |words: &[&str]| answer(work.launch(words));
    let emitted = |words: &[&str]| answer(work.brigade(&["emit", "slurm"], words));
    let (out, err) = started(&["--nproc=1", "/usr/bin/env"]);
    assert!(out.contains("ACCELERATE_MIXED_PRECISION=bf16"), "{out}");
    assert!(!out.contains("ACCELERATE_USE_FSDP"), "{out}");
    let line = format!(
        "brigade: settings are from {} (Accelerate's default, because there is no Brigade settings file); \
         its FSDP is for Python programs and not used\n",
        file.display()
    );
    assert_eq!(err, line);
    let (_, err) = started(&["--nproc=1", "--quiet", "/usr/bin/env"]);
    assert_eq!(err, "");
    // Its effect on a job file is reported, too.
    let (_, err) = emitted(&["--nproc=1", "/usr/bin/env"]);
    assert_eq!(err, line);
    let (_, err) = emitted(&["--nproc=1", "--quiet", "/usr/bin/env"]);
    assert_eq!(err, "");
    // fp8 is not a precision of other programs, neither here nor in the launchers of a job file.
    fs::write(&file, "distributed_type: 'NO'\nmixed_precision: fp8\n").unwrap();
    assert_eq!(work.variables(&["train.py"])["ACCELERATE_MIXED_PRECISION"], "fp8");
    let line = line.replace("its FSDP is", "its fp8 is");
    let (out, err) = started(&["--nproc=1", "/usr/bin/env"]);
    assert!(!out.contains("ACCELERATE_MIXED_PRECISION"), "{out}");
    assert_eq!(err, line);
    let (out, err) = emitted(&["--nproc=1", "/usr/bin/env"]);
    assert!(!out.contains("fp8"), "{out}");
    assert_eq!(err, line);
    let (out, _) = emitted(&["--nproc=1", "--fp8-backend=te", "train.py"]);
    assert!(out.contains("--mixed-precision fp8") && out.contains("--fp8-backend te"), "{out}");
    // If it is named on the command line, it need not be reported.
    fs::write(&file, "distributed_type: 'NO'\nmixed_precision: bf16\n").unwrap();
    let (_, err) = started(&["--nproc=1", "--config", file.to_str().unwrap(), "/usr/bin/env"]);
    assert_eq!(err, "");
}
