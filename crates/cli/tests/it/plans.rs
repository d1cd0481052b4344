//! Golden files of the output of `brigade launch --explain`: no process is started.
//!
//! After an intended change, `UPDATE_GOLDEN=1 cargo nextest run -p brigade-cli plans::` rewrites the files.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

/// Explains in a folder that has a program, a settings file and a hostfile.
fn explain(args: &[&str]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    write("train", "#!/bin/sh\necho started > started\n");
    fs::set_permissions(folder.path().join("train"), fs::Permissions::from_mode(0o755)).unwrap();
    write(
        "job.toml",
        "version = 1\n\n[ranks]\nnproc = 4\nrole = \"trainer\"\n\n[hosts]\nnnodes = 2\n\
         master-addr = \"node1\"\nmaster-port = 29501\n\n[training]\nmixed-precision = \"bf16\"\n\n\
         [env]\nDATA = \"/data/set one\"\n",
    );
    write(
        "accelerate.yaml",
        "compute_environment: LOCAL_MACHINE\ndebug: true\ndistributed_type: MULTI_CPU\n\
         dynamo_config:\n  dynamo_backend: INDUCTOR\nenable_cpu_affinity: false\n\
         main_training_function: main\nmixed_precision: fp16\nnum_machines: 1\nnum_processes: 2\n\
         tpu_name: pod\nuse_cpu: true\n",
    );
    write("hostfile", "# two hosts\nnode1 slots=4\nnode2 slots=2\n");
    let mut command = Command::new(env!("CARGO_BIN_EXE_brigade"));
    command.env_clear().env("PATH", "/usr/bin:/bin").env("BRIGADE_MAX_RESTARTS", "2");
    // Values that depend on the machine or on chance are set by flags.
    command.args(["launch", "--explain", "--rdzv-id=job", "--threads-per-rank=1"]);
    let output = command.args(args).current_dir(folder.path()).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &*stderr), (Some(0), ""), "{args:?}");
    assert!(!folder.path().join("started").exists());
    // The working folder of the ranks on other hosts is this one.
    let real = folder.path().canonicalize().unwrap();
    let text =
        String::from_utf8(output.stdout).unwrap().replace(&*real.to_string_lossy(), "FOLDER");
    // It depends on the number of cores.
    let lines = text.split_inclusive('\n').filter(|line| !line.contains("OMP_WAIT_POLICY"));
    lines.collect()
}

#[test]
fn plans_are_those_on_file() {
    let plans: [(&str, &[&str]); 7] = [
        ("one-host", &["--config=/dev/null", "--nproc=2", "./train", "--lr", "1"]),
        ("local-rank", &["--config=/dev/null", "--nproc=2", "./train", "--gpu=${local_rank}"]),
        ("static", &["--config=job.toml", "--node-rank=1", "--nproc=2", "./train"]),
        (
            "elastic",
            &[
                "--config=/dev/null",
                "--nproc=1",
                "--nnodes=1:4",
                "--rdzv-endpoint=node1",
                "./train",
            ],
        ),
        ("accelerate", &["--config=accelerate.yaml", "./train"]),
        (
            "hosts",
            &[
                "--config=job.toml",
                "--hostfile=hostfile",
                "--sync",
                "--env-pass=WANDB_*",
                "./train",
            ],
        ),
        ("json", &["--config=job.toml", "--node-rank=0", "--nproc=1", "--json", "./train"]),
    ];
    for (name, args) in plans {
        let found = explain(args);
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/plans").join(name);
        let file = file.with_extension("txt");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(&file, &found).unwrap();
        }
        let expected = fs::read_to_string(&file)
            .unwrap_or_else(|error| panic!("cannot read {}: {error}", file.display()));
        assert!(
            expected == found,
            "{name} changed; if that is intended, `UPDATE_GOLDEN=1 cargo nextest run -p brigade-cli plans::` writes the \
             file anew; it is now:\n{found}"
        );
    }
}

#[test]
fn values_of_secrets_are_not_shown() {
    let flags = ["--env=HF_TOKEN=hf_abcdef", "--env=NCCL_DEBUG=INFO"];
    for last in [&["--nproc=2"][..], &["--nproc=2", "--json"], &["--hosts=node1:1,node2:1"]] {
        let args: Vec<&str> = flags.iter().chain(last).copied().chain(["--", "true"]).collect();
        let found = explain(&args);
        assert!(found.contains("HF_TOKEN") && found.contains("INFO"), "{found}");
        assert!(!found.contains("hf_abcdef"), "{found}");
    }
}
