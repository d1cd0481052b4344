//! Tests of how `brigade launch` passes the sharding of the model to a Rust program: `--sharding`, and the settings of
//! FSDP and DeepSpeed. `env` replaces the program: it prints the variables of its rank.

use std::fs;
use std::process::Output;

use serde_json::Value;
use tempfile::TempDir;

use crate::job::brigade;

/// Folder with settings files and a Python script.
struct Work(TempDir);

impl Work {
    fn new() -> Self {
        let work = Self(tempfile::tempdir().unwrap());
        for (name, text) in [
            ("train.py", ""),
            (
                "fsdp.yaml",
                "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 2\nfsdp_config:\n  \
                 fsdp_version: 2\n  fsdp_reshard_after_forward: false\n  \
                 fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_offload_params: true\n  \
                 fsdp_state_dict_type: FULL_STATE_DICT\n",
            ),
            (
                "deepspeed.yaml",
                "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stage: 2\n  \
                 gradient_accumulation_steps: 4\n  gradient_clipping: 0.5\n",
            ),
            (
                "ds.json",
                r#"{"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4,
                    "bf16": {"enabled": true}, "gradient_clipping": 0.5,
                    "zero_optimization": {"stage": 2, "overlap_comm": false}}"#,
            ),
            (
                "job.toml",
                "version = 1\n[training]\nsharding = { strategy = \"zero3\", reshard_after_forward = \"no\" }\n",
            ),
        ] {
            fs::write(work.0.path().join(name), text).unwrap();
        }
        work
    }

    fn launch_with(&self, variable: Option<&str>, words: &[&str]) -> Output {
        let mut command = brigade();
        command.env_remove("BRIGADE_SHARDING").env_remove("ACCELERATE_MIXED_PRECISION");
        command.env_remove("ACCELERATE_GRADIENT_ACCUMULATION_STEPS");
        if let Some(text) = variable {
            command.env("BRIGADE_SHARDING", text);
        }
        command.current_dir(self.0.path()).arg("launch").args(words).output().unwrap()
    }

    /// Returns a variable of the first rank, and the launcher's own lines.
    fn rank(&self, name: &str, variable: Option<&str>, words: &[&str]) -> (Option<String>, String) {
        let words = [words, &["env"]].concat();
        let output = self.launch_with(variable, &words);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{words:?}: {stderr}");
        let stdout = String::from_utf8(output.stdout).unwrap();
        let start = format!("[0] {name}=");
        let value = stdout.lines().find_map(|line| line.strip_prefix(&start));
        (value.map(str::to_owned), stderr)
    }

    fn sharding(&self, variable: Option<&str>, words: &[&str]) -> String {
        self.rank("BRIGADE_SHARDING", variable, words).0.unwrap_or_else(|| "not set".to_owned())
    }

    fn refusal(&self, words: &[&str]) -> String {
        let output = self.launch_with(None, words);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert!(output.stdout.is_empty(), "{words:?}: something was started");
        stderr
    }
}

#[test]
fn the_flag_goes_before_the_variable_and_the_file() {
    let work = Work::new();
    let two = "--nproc=2";
    let of_file = r#"{"reshard_after_forward":"no","strategy":"zero3"}"#;
    assert_eq!(work.sharding(None, &[two]), "not set");
    assert_eq!(work.sharding(None, &[two, "--config=job.toml"]), of_file);
    assert_eq!(work.sharding(Some("zero2"), &[two, "--config=job.toml"]), "zero2");
    let flag = "--sharding=hybrid=2";
    assert_eq!(work.sharding(Some("zero2"), &[two, flag, "--config=job.toml"]), "hybrid=2");
    assert_eq!(work.sharding(None, &[two, "--sharding", of_file]), of_file);
    assert_eq!(work.sharding(None, &[two, "--sharding=none", "--config=job.toml"]), "none");
    assert_eq!(work.sharding(None, &[two, flag, "--env=BRIGADE_SHARDING=zero1"]), "zero1");
}

#[test]
fn settings_of_fsdp_become_a_sharding() {
    let work = Work::new();
    let (text, stderr) = work.rank("BRIGADE_SHARDING", None, &["--config=fsdp.yaml"]);
    let sharding: Value = serde_json::from_str(&text.unwrap()).unwrap();
    assert_eq!(sharding["strategy"], "zero3");
    assert_eq!(sharding["reshard_after_forward"], "no");
    assert_eq!(sharding["offload"]["cpu"]["pin"], true);
    assert_eq!(sharding["mixed"]["param"], "BF16");
    let note =
        "brigade: note: fsdp.yaml:4: fsdp_state_dict_type = FULL_STATE_DICT: checkpoints would";
    assert!(stderr.lines().any(|line| line.starts_with(note)), "{stderr}");
    let (precision, stderr) =
        work.rank("ACCELERATE_MIXED_PRECISION", None, &["--config=fsdp.yaml", "--quiet"]);
    assert_eq!((precision.as_deref(), &*stderr), (Some("bf16"), ""));
    let no_shard = ["--nproc=2", "--use-fsdp", "--fsdp-sharding-strategy=NO_SHARD"];
    assert_eq!(work.sharding(None, &no_shard), "none");
    let hybrid = ["--use-fsdp", "--fsdp-version=2", "--use-parallelism-config", "--nproc=2"];
    let sizes =
        ["--parallelism-config-dp-replicate-size=2", "--parallelism-config-dp-shard-size=1"];
    let said = work.refusal(&[&hybrid[..], &sizes, &["env"]].concat());
    assert!(said.contains("parallelism_config_dp_shard_size 1"), "{said}");
}

#[test]
fn settings_of_deepspeed_become_variables_and_lines() {
    let work = Work::new();
    let words = ["--nproc=2", "--use-deepspeed", "--deepspeed-config-file=ds.json"];
    let (text, stderr) = work.rank("BRIGADE_SHARDING", None, &words);
    let sharding: Value = serde_json::from_str(&text.unwrap()).unwrap();
    assert_eq!(sharding["strategy"], "zero2");
    for expected in [
        "brigade: note: ds.json: zero_optimization.overlap_comm = false: ",
        "brigade: note: DeepSpeed (flag --use-deepspeed): gradient_clipping = 0.5: ",
        "brigade: note: DeepSpeed (flag --use-deepspeed): train_micro_batch_size_per_gpu = 8: ",
    ] {
        assert!(stderr.lines().any(|line| line.starts_with(expected)), "{expected}: {stderr}");
    }
    for (name, expected) in
        [("ACCELERATE_MIXED_PRECISION", "bf16"), ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")]
    {
        assert_eq!(work.rank(name, None, &words).0.as_deref(), Some(expected), "{name}");
    }
    assert_eq!(work.sharding(None, &["--nproc=2", "--use-deepspeed", "--zero-stage=3"]), "zero3");
    // The setting takes precedence over the field of Accelerate's file.
    let steps = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS";
    let file = "--config=deepspeed.yaml";
    assert_eq!(work.rank(steps, None, &[file]).0.as_deref(), Some("4"));
    let flag = "--gradient-accumulation-steps=2";
    assert_eq!(work.rank(steps, None, &[file, flag]).0.as_deref(), Some("2"));
}

#[test]
fn sharding_and_plugins_give_way_by_layer() {
    let work = Work::new();
    assert_eq!(work.sharding(None, &["--config=fsdp.yaml", "--sharding=zero1"]), "zero1");
    assert_eq!(work.sharding(Some("zero1"), &["--config=fsdp.yaml"]), "zero1");
    let words = ["--nproc=2", "--use-deepspeed", "--zero-stage=2"];
    assert_eq!(work.sharding(Some("zero1"), &words), "zero2");
}

#[test]
fn contradictions_start_nothing() {
    let work = Work::new();
    let deepspeed = ["--nproc=2", "--use-deepspeed", "--deepspeed-config-file=ds.json"];
    for (words, expected) in [
        (
            &["--nproc=2", "--sharding=zero4"][..],
            "`zero4` is not a sharding strategy: write none, zero1, zero2, zero3 or hybrid=N",
        ),
        (
            &["--nproc=4", "--sharding=hybrid=3"],
            "flag --sharding: hybrid=3 does not divide the 4 ranks: take one of 1, 2, 4",
        ),
        (
            &["--hosts=a:2,b:3", "--sharding=hybrid=2"],
            "flag --sharding: hybrid=2 does not divide the 5 ranks",
        ),
        (
            &["--nproc=2", "--sharding=zero3", "--use-deepspeed"],
            "sharding zero3 (flag --sharding) and DeepSpeed (flag --use-deepspeed) exclude each other",
        ),
        (
            &[&deepspeed[..], &["--mixed-precision=fp16"]].concat(),
            "bf16.enabled (ds.json) and mixed precision fp16 exclude each other",
        ),
        (
            &[&deepspeed[..], &["--mixed-precision=no"]].concat(),
            "mixed-precision is no (flag --mixed-precision), and bf16 by DeepSpeed (flag --use-deepspeed)",
        ),
        (
            &[&deepspeed[..], &["--gradient-accumulation-steps=2"]].concat(),
            "gradient-accumulation-steps is 2 (flag --gradient-accumulation-steps), and 4 by DeepSpeed",
        ),
        (
            &["--nproc=2", "--use-deepspeed", "--deepspeed-config-file=other.json"],
            "cannot read other.json (flag --deepspeed-config-file)",
        ),
        (&["--nproc=2", "--use-deepspeed", "--offload-optimizer-device=nvme"], "is not supported"),
    ] {
        let said = work.refusal(&[words, &["env"]].concat());
        assert!(said.contains(expected), "{words:?}: {said}");
    }
}

#[test]
fn python_programs_have_their_own_settings() {
    let work = Work::new();
    let said = work.refusal(&["--nproc=2", "--sharding=zero3", "train.py"]);
    let expected =
        "brigade: --sharding zero3 is for Rust programs: use --use-fsdp or --use-deepspeed";
    assert!(said.starts_with(expected), "{said}");
    // A setting for all launches is not an error.
    let output = work.launch_with(Some("zero3"), &["--nproc=1", "--explain", "train.py"]);
    let text = String::from_utf8(output.stdout).unwrap();
    let expected = "environment BRIGADE_SHARDING: sharding zero3 is for Rust programs and not used";
    assert!(output.status.success() && text.contains(expected), "{text}");
    assert!(!text.contains("BRIGADE_SHARDING=zero3"), "{text}");
}

#[test]
fn the_explanation_has_the_sharding() {
    let work = Work::new();
    let output = work.launch_with(None, &["--config=fsdp.yaml", "--explain", "env"]);
    let text = String::from_utf8(output.stdout).unwrap();
    for line in [
        "sharding of a Rust program, from FSDP (fsdp.yaml:1):",
        "  strategy     zero3: each rank has a part of the parameters, the gradients and the optimizer's state",
        "  mesh         dp_shard 2",
    ] {
        assert!(text.lines().any(|it| it == line), "{text}");
    }
    let output = work.launch_with(None, &["--config=fsdp.yaml", "--explain", "--json", "env"]);
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    let setting = answer["sharding"]["setting"].as_str().unwrap();
    assert_eq!(answer["ranks"][0]["env"]["BRIGADE_SHARDING"], setting);
    assert!(answer["sharding"]["notes"].as_array().is_some_and(|notes| !notes.is_empty()));
}

#[test]
fn a_job_file_has_the_sharding() {
    let work = Work::new();
    let emitted = |words: &[&str]| {
        let mut command = brigade();
        command.current_dir(work.0.path()).args(["emit", "slurm", "--nproc=2"]).args(words);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let script = emitted(&["--sharding=hybrid=2", "env"]);
    assert!(script.contains("--sharding 'hybrid=2'"), "{script}");
    let script = emitted(&["--config=fsdp.yaml", "env"]);
    assert!(script.contains("--use-fsdp --fsdp-version 2"), "{script}");
}

#[test]
fn tensor_ranks_are_said_to_rust_programs() {
    let work = Work::new();
    let tensor = |words: &[&str]| work.rank("BRIGADE_TENSOR", None, words).0;
    assert_eq!(tensor(&["--nproc=2"]), None);
    assert_eq!(tensor(&["--nproc=4", "--tensor=2"]).as_deref(), Some("2"));
    let of_accelerate = [
        "--nproc=4",
        "--use-fsdp",
        "--fsdp-version=2",
        "--use-parallelism-config",
        "--parallelism-config-dp-shard-size=2",
        "--parallelism-config-tp-size=2",
    ];
    assert_eq!(tensor(&of_accelerate).as_deref(), Some("2"));
    assert_eq!(work.sharding(None, &of_accelerate), "zero3");
    let said = work.refusal(&["--nproc=3", "--tensor=2", "env"]);
    let expected = "brigade: flag --tensor: 2 tensor ranks do not divide the 3 ranks of the job: start 2 or 4 ranks";
    assert!(said.starts_with(expected), "{said}");
    let said = work.refusal(&["--nproc=4", "--tensor=2", "--sharding=hybrid=4", "env"]);
    assert!(said.contains("hybrid=4 does not divide the 2 ranks"), "{said}");
    let said = work.refusal(&["--nproc=2", "--tensor=2", "train.py"]);
    let expected = "brigade: --tensor 2 is for Rust programs: use --use-parallelism-config with";
    assert!(said.starts_with(expected), "{said}");
}

#[test]
fn context_ranks_are_said_to_rust_programs() {
    let work = Work::new();
    let said = |words: &[&str]| {
        let read = |name: &str| work.rank(name, None, words).0;
        (read("BRIGADE_CONTEXT"), read("BRIGADE_CONTEXT_METHOD"))
    };
    let both = |ranks: &str, method: &str| (Some(ranks.to_owned()), Some(method.to_owned()));
    assert_eq!(said(&["--nproc=2"]), (None, None));
    assert_eq!(said(&["--nproc=4", "--context=2", "--context-method=ring"]), both("2", "ring"));
    let of_fsdp = [
        "--nproc=4",
        "--use-fsdp",
        "--fsdp-version=2",
        "--use-parallelism-config",
        "--parallelism-config-dp-shard-size=2",
        "--parallelism-config-cp-size=2",
    ];
    assert_eq!(said(&of_fsdp), both("2", "gather"));
    assert_eq!(work.sharding(None, &of_fsdp), "zero3");
    let passed = [&of_fsdp[..], &["--parallelism-config-cp-comm-strategy=alltoall"]].concat();
    assert_eq!(said(&passed), both("2", "ring"));
    let exchanged = [&of_fsdp[..5], &["--parallelism-config-sp-size=2"]].concat();
    assert_eq!(said(&exchanged), both("2", "ulysses"));
    for (words, expected) in [
        (
            &["--nproc=3", "--context=2", "env"][..],
            "brigade: flag --context: 2 context ranks do not divide the 3 ranks of the job: start 2 or 4 ranks",
        ),
        (
            &["--nproc=6", "--tensor=2", "--context=2", "env"],
            "brigade: flag --context: 2 context ranks do not divide the 3 groups of 2 tensor ranks in the 6 ranks of \
             the job: start 4 or 8 ranks",
        ),
        (
            &["--nproc=2", "--context-method=rings", "env"],
            "brigade: invalid value 'rings' for '--context-method <METHOD>': expected gather, ring or ulysses",
        ),
        (
            &["--nproc=2", "--context-method=ring", "train.py"],
            "brigade: --context-method ring is for Rust programs: use --use-parallelism-config with \
             --parallelism-config-cp-comm-strategy alltoall",
        ),
    ] {
        let said = work.refusal(words);
        assert!(said.starts_with(expected), "{said}");
    }
}

#[test]
fn expert_ranks_are_said_to_rust_programs() {
    let work = Work::new();
    let said = |words: &[&str]| work.rank("BRIGADE_EXPERT", None, words).0;
    assert_eq!(said(&["--nproc=2"]), None);
    assert_eq!(said(&["--nproc=4", "--expert=2"]), Some("2".to_owned()));
    assert_eq!(said(&["--nproc=6", "--tensor=2", "--expert=2"]), Some("2".to_owned()));
    assert_eq!(said(&["--nproc=4", "--context=2", "--expert=4"]), Some("4".to_owned()));
    let of_megatron = ["--use-megatron-lm", "--megatron-lm-expert-model-parallel-size=2"];
    assert_eq!(said(&[&["--nproc=4"], &of_megatron[..]].concat()), Some("2".to_owned()));
    for (words, expected) in [
        (
            &["--nproc=3", "--expert=2", "env"][..],
            "brigade: flag --expert: 2 expert ranks do not divide the 3 ranks of the job: start 2 or 4 ranks",
        ),
        (
            &["--nproc=6", "--tensor=2", "--expert=4", "env"],
            "brigade: flag --expert: 4 expert ranks do not divide the 6 ranks of the job: start 4 or 8 ranks",
        ),
        (
            &["--nproc=8", "--tensor=4", "--expert=2", "env"],
            "brigade: flag --expert: 2 expert ranks are not whole groups of 4 tensor ranks: take a multiple of 4",
        ),
        (
            &["--nproc=2", "--expert=2", "train.py"],
            "brigade: --expert 2 is for Rust programs: use --use-megatron-lm with \
             --megatron-lm-expert-model-parallel-size 2 for a Python program",
        ),
    ] {
        let said = work.refusal(words);
        assert!(said.starts_with(expected), "{said}");
    }
}

#[test]
fn pipeline_ranks_are_said_to_rust_programs() {
    let work = Work::new();
    let said = |words: &[&str]| work.rank("BRIGADE_PIPELINE", None, words).0;
    assert_eq!(said(&["--nproc=2"]), None);
    assert_eq!(said(&["--nproc=4", "--pipeline=2", "--tensor=2"]), Some("2".to_owned()));
    for (words, expected) in [
        (
            &["--nproc=3", "--pipeline=2", "env"][..],
            "brigade: flag --pipeline: 2 pipeline ranks do not divide the 3 ranks of the job: start 2 or 4 ranks",
        ),
        (
            &["--nproc=6", "--tensor=2", "--pipeline=2", "env"],
            "brigade: flag --pipeline: 2 pipeline ranks do not divide the 3 groups of 2 tensor ranks in the 6 ranks of \
             the job: start 4 or 8 ranks",
        ),
        (
            &["--nproc=12", "--tensor=2", "--context=2", "--pipeline=2", "env"],
            "brigade: flag --pipeline: 2 pipeline ranks do not divide the 3 groups of 4 tensor and context ranks in the \
             12 ranks of the job: start 8 or 16 ranks",
        ),
        (
            &["--nproc=2", "--pipeline=2", "train.py"],
            "brigade: --pipeline 2 is for Rust programs: use --use-megatron-lm with --megatron-lm-pp-degree 2",
        ),
    ] {
        let said = work.refusal(words);
        assert!(said.starts_with(expected), "{said}");
    }
}

/// The micro-batches, the schedule and the stages per rank of a pipeline: by flags, a file and Megatron's settings.
#[test]
fn micro_batches_are_said_to_rust_programs() {
    let work = Work::new();
    let said = |words: &[&str]| {
        ["BRIGADE_MICRO_BATCHES", "BRIGADE_PIPELINE_SCHEDULE", "BRIGADE_PIPELINE_CHUNKS"]
            .map(|name| work.rank(name, None, words).0.unwrap_or_default())
    };
    assert_eq!(said(&["--nproc=2", "--pipeline=2"]), ["", "", ""]);
    let all = ["--nproc=2", "--pipeline=2", "--micro-batches=6", "--pipeline-schedule=interleaved"];
    assert_eq!(said(&[&all[..], &["--pipeline-chunks=3"]].concat()), ["6", "interleaved", "3"]);
    let of_megatron = [
        "--nproc=4",
        "--use-megatron-lm",
        "--megatron-lm-pp-degree=2",
        "--megatron-lm-num-micro-batches=8",
    ];
    assert_eq!(said(&of_megatron), ["8", "", ""]);
    let steps = work.rank("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None, &of_megatron).0;
    assert_eq!(steps, None);
    let with_schedule = [&of_megatron[..], &["--pipeline-schedule=zbv"]].concat();
    assert_eq!(said(&with_schedule), ["8", "zbv", ""]);
    let few = [&of_megatron[..3], &["--megatron-lm-num-micro-batches=1"]].concat();
    let both = [&of_megatron[..], &["--micro-batches=4"]].concat();
    for (words, expected) in [
        (
            vec!["--nproc=2", "--pipeline=2", "--micro-batches=1", "env"],
            "flag --micro-batches: 1f1b on 2 ranks cannot run 1 micro-batches",
        ),
        (
            vec!["--nproc=2", "--pipeline=2", "--pipeline-chunks=2", "env"],
            "flag --pipeline-chunks: 1f1b has one stage for each rank, not 2",
        ),
        (
            vec!["--nproc=2", "--pipeline-schedule=2f2b", "env"],
            "invalid value '2f2b' for '--pipeline-schedule <SCHEDULE>': expected gpipe, 1f1b",
        ),
        ([&few[..], &["env"]].concat(), "1f1b on 2 ranks cannot run 1 micro-batches"),
        (
            [&both[..], &["env"]].concat(),
            "micro-batches is 4 (flag --micro-batches), and 8 by Megatron-LM",
        ),
        (
            vec!["--nproc=2", "--micro-batches=4", "train.py"],
            "--micro-batches 4 is for Rust programs: use --use-megatron-lm with \
             --megatron-lm-num-micro-batches 4 for a Python program",
        ),
        (
            vec!["--nproc=2", "--pipeline-schedule=zbv", "train.py"],
            "--pipeline-schedule zbv is for Rust programs: use `num_layers_per_virtual_pipeline_stage` of \
             `MegatronLMPlugin` for a Python program",
        ),
    ] {
        let said = work.refusal(&words);
        assert!(said.contains(expected), "{said}");
    }
}

/// Sequence parallelism by its setting, and everything in Megatron's settings about the mesh.
#[test]
fn sequence_regions_are_said_to_rust_programs() {
    let work = Work::new();
    let read = |name: &str, words: &[&str]| work.rank(name, None, words).0;
    let regions = |words: &[&str]| read("BRIGADE_SEQUENCE_PARALLEL", words);
    assert_eq!(regions(&["--nproc=2", "--tensor=2"]), None);
    assert_eq!(
        regions(&["--nproc=2", "--tensor=2", "--sequence-parallel"]).as_deref(),
        Some("true")
    );
    let of_megatron = [
        "--nproc=8",
        "--use-megatron-lm",
        "--megatron-lm-tp-degree=2",
        "--megatron-lm-pp-degree=2",
        "--megatron-lm-context-parallel-size=2",
        "--megatron-lm-sequence-parallelism=true",
    ];
    assert_eq!(regions(&of_megatron).as_deref(), Some("true"));
    for axis in ["BRIGADE_TENSOR", "BRIGADE_PIPELINE", "BRIGADE_CONTEXT"] {
        assert_eq!(read(axis, &of_megatron).as_deref(), Some("2"), "{axis}");
    }
    assert_eq!(work.sharding(None, &of_megatron), "zero1");
    let of_samples = [&of_megatron[..3], &["--megatron-lm-num-micro-batches=4"]].concat();
    assert_eq!(work.sharding(None, &of_samples), "zero1");
    let steps = read("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", &of_samples);
    assert_eq!(steps.as_deref(), Some("4"));
    for (words, expected) in [
        (
            &["--nproc=2", "--sequence-parallel", "env"][..],
            "brigade: flag --sequence-parallel: parts of the sequence are those of tensor ranks, of which there is 1",
        ),
        (
            &["--nproc=2", "--tensor=2", "--sequence-parallel", "train.py"],
            "brigade: --tensor 2 is for Rust programs",
        ),
        (
            &["--nproc=2", "--sequence-parallel", "train.py"],
            "brigade: --sequence-parallel true is for Rust programs: use --use-megatron-lm with \
             --megatron-lm-sequence-parallelism true",
        ),
    ] {
        let said = work.refusal(words);
        assert!(said.starts_with(expected), "{said}");
    }
}
