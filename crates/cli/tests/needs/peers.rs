//! Tests of Python's own distributed programs, started by `brigade launch`: Accelerate's test scripts, and a script
//! like that of torchrun's documentation.
//!
//! The Python is that in BRIGADE_PEER_PYTHON, or that of `cargo xtask install pytorch`.

use std::path::{Path, PathBuf};
use std::process::Command;

use brigade_test_needs::{Need, needs};
use nix::sys::signal::Signal;

use crate::job::{self, Job, Run};

/// Returns a Python that can import both.
fn peer_python() -> PathBuf {
    brigade_test_needs::python(Need::Pytorch).unwrap()
}

/// Returns two ranks on the CPU that run a script with this Python.
fn job(python: &Path, flags: &[&str], script: &Path) -> Job {
    let job = Job::new(2).words(["--cpu"]).words(flags.iter().copied());
    let mut job = job.words([script.to_str().unwrap()]);
    job.command.env("PYTHON_EXEC", python).env("OMP_NUM_THREADS", "1");
    job.command.env("CUDA_VISIBLE_DEVICES", "");
    // PyTorch writes a cache there.
    let folder = job.folder().to_owned();
    job.command.env("TMPDIR", folder);
    job
}

fn accelerates(python: &Path, name: &str) -> PathBuf {
    let ask = "import accelerate.test_utils as it; print(it.__path__[0])";
    let output = Command::new(python).args(["-c", ask]).output().unwrap();
    let folder = String::from_utf8(output.stdout).unwrap();
    Path::new(folder.trim()).join("scripts").join(name)
}

/// Runs a script of Accelerate's. While Python exits, the threads of PyTorch's process group may abort it, which is not
/// the launcher's fault: then it is run again.
fn run_of(job: impl Fn() -> Job) -> Run {
    let mut run = job().run();
    for _ in 0..2 {
        if run.code == 128 + Signal::SIGABRT as i32 {
            eprintln!("aborted: {}", run.stderr);
            run = job().run();
        }
    }
    run
}

#[needs(Pytorch)]
fn the_script_of_accelerate_test() {
    let python = peer_python();
    let script = accelerates(&python, "test_script.py");
    let run = run_of(|| job(&python, &[], &script));
    assert_eq!(run.code, 0, "{}{}", run.stdout, run.stderr);
    for said in [
        "[0] **Initialization**",
        "[0] Distributed environment: DistributedType.MULTI_CPU  Backend: gloo",
        "[1] Num processes: 2",
        "[0] **DataLoader integration test**",
        "[0] **Training integration test**",
        "Training yielded the same results on one CPU or distributed setup with batch split.",
        "[0] **Breakpoint trigger test**",
    ] {
        assert!(run.stdout.contains(said), "{said}: {}{}", run.stdout, run.stderr);
    }
}

#[needs(Pytorch)]
fn accelerates_operations() {
    let python = peer_python();
    // Its checks of shapes are only made with ACCELERATE_DEBUG_MODE.
    let script = accelerates(&python, "test_ops.py");
    let run = run_of(|| job(&python, &["--debug"], &script));
    assert_eq!(run.code, 0, "{}{}", run.stdout, run.stderr);
    for said in ["testing gather_object", "testing pad_across_processes", "testing op_checker"] {
        assert!(run.stdout.contains(said), "{said}: {}{}", run.stdout, run.stderr);
    }
}

#[needs(Pytorch)]
fn accelerates_accumulation() {
    let python = peer_python();
    let script = accelerates(&python, "test_sync.py");
    let run = run_of(|| job(&python, &[], &script));
    assert_eq!(run.code, 0, "{}{}", run.stdout, run.stderr);
    assert!(
        run.stdout.contains("**Test Distributed `no_sync` context manager**"),
        "{}",
        run.stdout
    );
}

/// Compares what a script of Accelerate's reads with the flags of the launch.
#[needs(Pytorch)]
fn accelerate_reads_the_flags() {
    let python = peer_python();
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("flags.py");
    let text = "from accelerate import Accelerator\n\
                it = Accelerator()\n\
                print(it.num_processes, it.mixed_precision, it.gradient_accumulation_steps, \
                it.device, it.state.debug, flush=True)\n";
    std::fs::write(&script, text).unwrap();
    let flags = ["--mixed-precision", "bf16", "--gradient-accumulation-steps", "4", "--debug"];
    let run = job(&python, &flags, &script).run();
    assert_eq!(run.code, 0, "{}{}", run.stdout, run.stderr);
    for rank in 0..2 {
        assert_eq!(run.lines_of(rank), ["2 bf16 4 cpu:0 True"], "{}", run.stderr);
    }
}

/// Compares what its own plugins read from the variables with the flags.
#[needs(Pytorch)]
fn accelerates_plugins_read_the_flags() {
    let python = peer_python();
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("plugins.py");
    let text = "from accelerate.utils import FullyShardedDataParallelPlugin\n\
                import os\n\
                it = FullyShardedDataParallelPlugin()\n\
                print(os.environ['ACCELERATE_USE_FSDP'], it.fsdp_version, it.reshard_after_forward, \
                it.state_dict_type.name, it.transformer_cls_names_to_wrap, \
                it.cpu_ram_efficient_loading, it.activation_checkpointing, flush=True)\n";
    std::fs::write(&script, text).unwrap();
    let expected = ["true 2 False SHARDED_STATE_DICT ['BertLayer'] False True"];
    let flags = "--use_fsdp --fsdp_version 2 --fsdp_reshard_after_forward false \
                 --fsdp_state_dict_type SHARDED_STATE_DICT \
                 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \
                 --fsdp_transformer_layer_cls_to_wrap BertLayer \
                 --fsdp_cpu_ram_efficient_loading false --fsdp_activation_checkpointing true";
    let file = folder.path().join("fsdp.yaml");
    let text = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n  \
                fsdp_reshard_after_forward: false\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n  \
                fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  \
                fsdp_transformer_layer_cls_to_wrap: BertLayer\n  \
                fsdp_cpu_ram_efficient_loading: false\n  fsdp_activation_checkpointing: true\n";
    std::fs::write(&file, text).unwrap();
    let config = ["--config", file.to_str().unwrap()];
    for flags in [flags.split_whitespace().collect::<Vec<_>>(), config.to_vec()] {
        let job = Job::new(2).words(flags.iter().copied());
        let mut job = job.words([script.to_str().unwrap()]);
        job.command.env("PYTHON_EXEC", &python).env("CUDA_VISIBLE_DEVICES", "");
        // PyTorch writes a cache there.
        let folder = job.folder().to_owned();
        job.command.env("TMPDIR", folder);
        let run = job.run();
        assert_eq!(run.code, 0, "{}{}", run.stdout, run.stderr);
        for rank in 0..2 {
            assert_eq!(run.lines_of(rank), expected, "{flags:?}: {}", run.stderr);
        }
    }
}

/// Compares the fields and variables of Accelerate in other tests with those of the real one.
#[needs(Pytorch)]
fn accelerate_is_the_one_that_we_know() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/tests/accelerate");
    let output = Command::new(peer_python()).arg(folder.join("made.py")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let made: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let kept = std::fs::read(folder.join("1.15.0.json")).unwrap();
    let kept: serde_json::Value = serde_json::from_slice(&kept).unwrap();
    assert_eq!(made["fields"], kept["fields"]);
    for table in ["launches", "files"] {
        let rows = |it: &serde_json::Value| it[table].as_array().unwrap().clone();
        for (made, kept) in rows(&made).iter().zip(&rows(&kept)) {
            assert_eq!(made, kept);
        }
        assert_eq!(rows(&made).len(), rows(&kept).len());
    }
}

/// Compares Accelerate's results for keys of sharded training with those of the readers.
#[needs(Pytorch)]
fn accelerates_plugins_are_those_that_we_know() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sharding/tests/settings");
    let output = Command::new(peer_python()).arg(folder.join("made.py")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let made: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let kept = std::fs::read(folder.join("accelerate-1.15.0.json")).unwrap();
    let kept: serde_json::Value = serde_json::from_slice(&kept).unwrap();
    for table in ["accelerate", "fsdp", "axes"] {
        assert_eq!(made[table], kept[table], "{table}");
    }
}

/// 64 samples in batches of 4, 4 times, divided among two ranks.
#[needs(Trainers)]
fn trainers_of_other_libraries_find_their_ranks() {
    let python = brigade_test_needs::python(Need::Trainers).unwrap();
    for name in ["hugging_face_trainer.py", "lightning_trainer.py"] {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers").join(name);
        let run = run_of(|| {
            let job = job(&python, &[], &script);
            let folder = job.folder().to_str().unwrap().to_owned();
            job.words([folder.as_str()])
        });
        assert_eq!(run.code, 0, "{name}: {}{}", run.stdout, run.stderr);
        let said = |rank: usize| {
            run.lines_of(rank).into_iter().find(|it| it.starts_with("2 ranks, 32 steps, weights "))
        };
        assert!(said(0).is_some() && said(0) == said(1), "{name}: {}{}", run.stdout, run.stderr);
    }
}

#[needs(Pytorch)]
fn a_script_for_torchrun() {
    let python = peer_python();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers/record.py");
    let run = job(&python, &[], &script).run();
    assert_eq!(run.code, 0, "{}{}", run.stdout, run.stderr);
    for rank in 0..2 {
        assert_eq!(run.lines_of(rank), [format!("rank {rank} of 2, attempt 0: 3")]);
    }

    // A rank fails, its error is recorded, and all ranks restart.
    let run = job(&python, &["--max-restarts=1"], &script).words(["fail"]).run();
    assert_eq!(run.code, 0, "{}{}", run.stdout, run.stderr);
    assert!(run.stderr.contains("; restart 1 of 1"), "{}", run.stderr);
    for rank in 0..2 {
        let attempts = [0, 1].map(|it| format!("rank {rank} of 2, attempt {it}: 3"));
        assert_eq!(run.lines_of(rank), attempts);
    }
    let run = job(&python, &[], &script).words(["fail"]).run();
    assert_eq!(run.code, 1, "{}{}", run.stdout, run.stderr);
    assert!(run.stderr.contains("brigade: rank 1 "), "{}", run.stderr);
    // From the file that `record` writes, in torchelastic's JSON.
    assert!(run.stderr.contains("ValueError: no more data"), "{}", run.stderr);
}

/// Returns the flags and keys of the installed packages: `{"torchrun": [flags], "accelerate": [flags], "cluster":
/// {keys}, …}`.
fn arguments(python: &Path) -> serde_json::Value {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/peers/arguments.py");
    let output = Command::new(python).arg(script).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Runs `brigade launch --explain` with these arguments.
fn explain(words: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(job::BRIGADE);
    command.env_clear().env("PATH", "/usr/bin:/bin").env("BRIGADE_CONFIG", "/dev/null");
    let output = command.args(["launch", "--explain"]).args(words).arg("true").output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// Each flag of their parsers is used, named with its outcome, or refused.
#[needs(Pytorch)]
fn no_flag_is_dropped_in_silence() {
    let python = peer_python();
    let arguments = arguments(&python);
    let mut count = 0;
    for program in ["torchrun", "accelerate"] {
        for flag in arguments[program].as_array().unwrap() {
            let value = match (&flag["choice"], flag["number"].as_bool().unwrap()) {
                (serde_json::Value::String(choice), _) => choice.as_str(),
                (_, true) => "2",
                _ => "x",
            };
            for name in flag["names"].as_array().unwrap() {
                let name = name.as_str().unwrap();
                let word = if !flag["takes_value"].as_bool().unwrap() {
                    name.to_owned()
                } else if name.starts_with("--") {
                    format!("{name}={value}")
                } else {
                    format!("{name}{value}")
                };
                let (code, stdout, stderr) = explain(&[&word]);
                count += 1;
                if code == Some(0) {
                    // These two change the program, which has no row of its own.
                    let changes = ["-m", "--module", "--no-python", "--no_python"].contains(&name);
                    let named = stdout.contains("flag --") || changes;
                    assert!(named, "{program} {word}: {stdout}");
                } else {
                    assert_eq!(stderr.lines().count(), 1, "{program} {word}: {stderr}");
                    assert!(!stderr.contains("unexpected argument"), "{program} {word}: {stderr}");
                }
            }
        }
    }
    eprintln!("{count} spellings of flags");
    assert!(count > 250);
}

/// Each key of Accelerate's file, with another value than its default, is a source in the explanation, or is named.
#[needs(Pytorch)]
fn no_key_is_dropped_in_silence() {
    let python = peer_python();
    let arguments = arguments(&python);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.yaml");
    let config = format!("--config={}", path.display());
    for (kind, environment) in [("cluster", "LOCAL_MACHINE"), ("sagemaker", "AMAZON_SAGEMAKER")] {
        let keys = arguments[kind].as_object().unwrap();
        assert!(keys.len() > 20);
        for (key, value) in keys {
            if ["compute_environment", "distributed_type"].contains(&key.as_str()) {
                continue;
            }
            // JSON is YAML. With one rank on a CPU no property of the machine matters.
            let text = format!(
                "compute_environment: {environment}\ndistributed_type: MULTI_CPU\n{key}: {value}\n"
            );
            std::fs::write(&path, &text).unwrap();
            let (code, stdout, stderr) = explain(&[&config]);
            if kind == "sagemaker" {
                assert_eq!(code, Some(2), "{text}");
                assert!(stderr.contains("does not start jobs on Amazon SageMaker"), "{stderr}");
            } else if key == "same_network" {
                // Either way the hosts meet at the address in the file.
                assert_eq!(code, Some(0), "{text}{stderr}");
            } else {
                let place = format!("{}:3", path.display());
                assert!((stdout + &stderr).contains(&place), "{text}{stderr}");
            }
        }
    }
    // Also the keys of its tables.
    for text in [
        "parallelism_config: {some_key: 1}",
        "fsdp_config: {some_key: 1}",
        "deepspeed_config: {some_key: 1}",
        "megatron_lm_config: {some_key: 1}",
        "fp8_config: {some_key: 1}",
        "mpirun_config: {some_key: 1}",
        "dynamo_config: {some_key: 1}",
    ] {
        std::fs::write(&path, text).unwrap();
        let (_, stdout, stderr) = explain(&["--nproc=1", &config]);
        assert!((stdout + &stderr).contains(&format!("{}:1", path.display())), "{text}");
    }
}
