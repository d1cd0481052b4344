//! Tests of Accelerate's files and the settings that they become.

use std::collections::BTreeSet;

use super::keys::Keys;
use super::*;
use crate::settings::TABLE;

fn import(text: &str) -> Result<Import, ConfigError> {
    read("a.yaml".as_ref(), text)
}

/// Returns `name=value` for each setting that is set, in the order of the table.
fn settings(import: &Import) -> Vec<String> {
    let of = |name: &str| Some(format!("{name}={}", import.layer.settings.text(name)?));
    let env = import.layer.settings.env.iter().map(|(name, value)| format!("env.{name}={value}"));
    TABLE.iter().filter_map(|it| of(it.name)).chain(env).collect()
}

/// Output of the questionnaire for two machines with four GPUs, in version 1.9.
const TWO_MACHINES: &str = "\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: all
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29500
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
";

#[test]
fn a_whole_file() {
    let import = import(TWO_MACHINES).unwrap();
    assert_eq!(
        settings(&import),
        [
            "nproc=4",
            "cpu=false",
            "nnodes=2",
            "node-rank=1",
            "master-addr=10.0.0.1",
            "master-port=29500",
            "rdzv-backend=static",
            "mixed-precision=bf16",
            "debug-collectives=false",
        ]
    );
    assert_eq!(import.layer.source("nproc").unwrap().to_string(), "a.yaml:13");
    assert_eq!(import.layer.notes, []);
    assert_eq!(import.rows.len(), 19, "every key has a row");
}

#[test]
fn the_same_in_json() {
    let text = r#"{
  "compute_environment": "LOCAL_MACHINE",
  "distributed_type": "MULTI_CPU",
  "num_machines": 1,
  "num_processes": 4,
  "use_cpu": true
}
"#;
    let import = read("a.json".as_ref(), text).unwrap();
    assert_eq!(settings(&import), ["nproc=4", "cpu=true"]);
    assert_eq!(import.layer.source("nproc").unwrap().to_string(), "a.json:5");
}

#[test]
fn keys_become_settings() {
    let table: [(&str, &[&str]); 20] = [
        ("num_processes: -1", &[]),
        ("main_process_port: 29501", &["master-port=29501"]),
        (
            "num_processes: 6\nnum_machines: 3\nmain_process_ip: a",
            &["nproc=2", "nnodes=3", "master-addr=a"],
        ),
        ("gpu_ids: 0,2", &["devices=0,2"]),
        ("gpu_ids: 1", &["devices=1"]),
        ("gpu_ids: all", &[]),
        ("mixed_precision: no", &["mixed-precision=no"]),
        ("fp16: true", &["mixed-precision=fp16"]),
        ("fp16: true\nmixed_precision: bf16", &["mixed-precision=bf16"]),
        ("enable_cpu_affinity: true", &["bind=numa"]),
        ("dynamo_backend: INDUCTOR", &["dynamo-backend=inductor"]),
        ("dynamo_backend: 'NO'", &["dynamo-backend=no"]),
        (
            "dynamo_config:\n  dynamo_backend: INDUCTOR\n  dynamo_mode: max-autotune\n  dynamo_use_dynamic: true",
            &["dynamo-backend=inductor", "dynamo-mode=max-autotune", "dynamo-use-dynamic=true"],
        ),
        ("dynamo_config: {backend: eager}", &["dynamo-backend=eager"]),
        (
            "num_machines: 2\nnum_processes: 4\nrdzv_backend: c10d\nmain_process_ip: a\nmain_process_port: 29400",
            &["nproc=2", "nnodes=2", "rdzv-backend=builtin", "rdzv-endpoint=a:29400"],
        ),
        (
            "num_machines: 2\nnum_processes: 4\nmpirun_config: {mpirun_hostfile: /h, mpirun_ccl: '1'}",
            &["nproc=2", "hostfile=/h", "env.CCL_WORKER_COUNT=1"],
        ),
        ("num_machines: 1\nmachine_rank: 0\nrdzv_backend: static", &[]),
        ("use_cpu: yes", &["cpu=true"]),
        ("fsdp_config: {}\nfp8_config: null\nparallelism_config: {}\ncommands: []", &[]),
        (
            "parallelism_config:\n  parallelism_config_dp_replicate_size: 4\n  parallelism_config_tp_size: 1",
            &[],
        ),
    ];
    for (text, expected) in table {
        let import = import(&format!("distributed_type: MULTI_GPU\n{text}\n")).unwrap();
        assert_eq!(settings(&import), expected, "{text}");
        let warnings = import.layer.notes.iter().filter(|it| it.is_warning);
        assert_eq!(warnings.count(), 0, "{text}");
    }
}

#[test]
fn unsupported_values_are_named() {
    let table = [
        (
            "distributed_type: XLA\ntpu_use_cluster: true\ntpu_name: pod",
            "a.yaml cannot be used: line 2: tpu_use_cluster: Brigade does not start jobs by gcloud: set it to false, and \
             name the hosts with --hosts",
        ),
        (
            "distributed_type: XLA\ntpu_env: [A]",
            "a.yaml:2: tpu_env is \"A\", expected a list of NAME=VALUE",
        ),
        (
            "distributed_type: XLA\ntpu_env: A=1",
            "a.yaml:2: tpu_env is \"A=1\", expected a list of NAME=VALUE",
        ),
        (
            "compute_environment: AMAZON_SAGEMAKER\nec2_instance_type: ml.p3.2xlarge",
            "a.yaml cannot be used: line 1: compute_environment: Brigade does not start jobs on Amazon SageMaker",
        ),
        (
            "distributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_tp_degre: 2}",
            "a.yaml:2: unknown key `megatron_lm_tp_degre` in megatron_lm_config: did you mean `megatron_lm_tp_degree`?",
        ),
        (
            "distributed_type: 'NO'\nmixed_precision: fp8\nfp8_config: {margn: 2}",
            "a.yaml:3: unknown key `margn` in fp8_config: did you mean `fp8_margin`?",
        ),
        (
            "distributed_type: 'NO'\nfp8_config: {override_linear_precision: [true, false]}",
            "a.yaml:2: fp8_config is true,false, expected true or false three times",
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_versoin: 2}",
            "a.yaml:2: unknown key `fsdp_versoin` in fsdp_config: did you mean `fsdp_version`?",
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: [2]}",
            "a.yaml:2: fsdp_config is a list, expected texts and numbers",
        ),
        ("distributed_type: FSDP\nfsdp_config: 2", "a.yaml:2: fsdp_config is 2, expected keys"),
        (
            "distributed_type: 'NO'\nnum_proceses: 2",
            "a.yaml:2: unknown key `num_proceses`: did you mean `num_processes`?",
        ),
        ("distributed_type: 'NO'\nlearning_rate: 2", "a.yaml:2: unknown key `learning_rate`"),
        (
            "distributed_type: 'NO'\ndynamo_config: {dynamo_backends: eager}",
            "a.yaml:2: unknown key `dynamo_backends` in dynamo_config",
        ),
        (
            "distributed_type: 'NO'\nnum_processes: two",
            "a.yaml:2: num_processes is \"two\", expected a whole number",
        ),
        (
            "distributed_type: 'NO'\nnum_processes: 5\nnum_machines: 2",
            "a.yaml:2: num_processes is 5, expected a multiple of num_machines, which is 2",
        ),
        (
            "distributed_type: 'NO'\nnum_machines: 0",
            "a.yaml:2: num_machines is 0, expected a whole number from 1",
        ),
        (
            "distributed_type: 'NO'\nmain_process_port: 70000",
            "a.yaml:2: main_process_port is 70000, expected a port, from 0 to 65535",
        ),
        (
            "distributed_type: 'NO'\nmixed_precision: fp61",
            "a.yaml:2: mixed_precision is fp61, expected no, fp16, bf16 or fp8",
        ),
        ("distributed_type: MULTI", "a.yaml:1: distributed_type is MULTI, expected one of"),
        (
            "num_processes: 2",
            "a.yaml:1: this is not an Accelerate settings file: the key distributed_type is missing",
        ),
        ("distributed_type: [", "a.yaml:1: this is not YAML: "),
        ("distributed_type: 'NO'\n  num_machines: 1", "a.yaml:2: this is not YAML: "),
        ("- 1", "a.yaml:1: this is not YAML: "),
        ("", "a.yaml:1: this is not an Accelerate settings file: "),
    ];
    for (text, expected) in table {
        let error = import(text).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{text:?} gave {error:?}");
    }
    let error = read("a.json".as_ref(), "{\n \"debug\": none\n}").unwrap_err().to_string();
    assert!(error.starts_with("a.json:2: this is not JSON: expected ident, in "), "{error}");
}

#[test]
fn ignored_keys_are_named() {
    // Text, the note, and whether it is a warning at each launch.
    let table = [
        (
            "distributed_type: 'NO'\ndebug: true\ndebug: false",
            "a.yaml:2: debug has no effect: line 3 sets it again, and the last value is used",
            false,
        ),
        (
            "distributed_type: MULTI_XPU",
            "a.yaml:1: distributed_type is not honoured: Brigade supports CPUs",
            true,
        ),
        (
            "distributed_type: 'NO'\nipex_config: {ipex: true}",
            "a.yaml:2: ipex_config is not honoured: ",
            true,
        ),
        (
            "distributed_type: 'NO'\ntpu_name: my-pod",
            "a.yaml:2: tpu_name has no effect: it is for TPUs only",
            false,
        ),
        (
            "distributed_type: 'NO'\ndowncast_bf16: true",
            "a.yaml:2: downcast_bf16 has no effect: it is for TPUs only",
            false,
        ),
        (
            "distributed_type: 'NO'\nmain_training_function: train",
            "a.yaml:2: main_training_function has no effect: ",
            false,
        ),
        (
            "distributed_type: XLA\nmain_training_function: train",
            "a.yaml:2: main_training_function is not honoured: each rank runs the whole program",
            true,
        ),
        (
            "distributed_type: XLA\ntpu_zone: us-central1-a",
            "a.yaml:2: tpu_zone has no effect: hosts are reached over ssh, not by gcloud",
            false,
        ),
        (
            "distributed_type: XLA\ncommands: [ls]",
            "a.yaml:2: commands has no effect: it is for `accelerate tpu-config`",
            false,
        ),
        (
            "distributed_type: 'NO'\nmain_process_ip: 10.0.0.1",
            "a.yaml:2: main_process_ip has no effect: it is for several machines",
            false,
        ),
    ];
    for (text, expected, is_warning) in table {
        let notes = import(text).unwrap().layer.notes;
        assert_eq!(notes.len(), 1, "{text:?} gave {notes:?}");
        assert!(notes[0].to_string().starts_with(expected), "{text:?} gave {}", notes[0]);
        assert_eq!(notes[0].is_warning, is_warning, "{text:?}");
    }
}

#[test]
fn a_file_for_tpus() {
    // As the questionnaire writes it for one host with eight chips.
    let text = "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: XLA\ndowncast_bf16: true\n\
                enable_cpu_affinity: false\nmachine_rank: 0\nmain_training_function: main\nmixed_precision: bf16\n\
                num_machines: 1\nnum_processes: 8\nrdzv_backend: static\nsame_network: true\n\
                tpu_env: [LIBTPU_INIT_ARGS=--a=1, B=2]\ntpu_use_cluster: false\ntpu_use_sudo: false\nuse_cpu: false\n";
    let import = import(text).unwrap();
    assert_eq!(
        settings(&import),
        [
            "nproc=8",
            "cpu=false",
            "mixed-precision=bf16",
            "debug-collectives=false",
            "env.ACCELERATE_DOWNCAST_BF16=True",
            "env.B=2",
            "env.LIBTPU_INIT_ARGS=--a=1",
        ]
    );
    assert_eq!(import.layer.notes, []);
}

/// Compares with the fields of the real `ClusterConfig`: the file was generated by Accelerate itself, and a test of
/// brigade-cli compares it with an installed one.
#[test]
fn every_field_of_accelerate_has_an_outcome() {
    let golden = include_str!("../../tests/accelerate/1.15.0.json");
    let golden: serde_json::Value = serde_json::from_str(golden).unwrap();
    let fields: BTreeSet<&str> =
        golden["fields"].as_array().unwrap().iter().map(|it| it.as_str().unwrap()).collect();
    let known: BTreeSet<String> = Keys::dashed().map(|key| key.replace('-', "_")).collect();
    assert_eq!(fields, known.iter().map(String::as_str).collect());
    let path = Path::new("a.yaml");
    for key in fields {
        for value in [Raw::Null, Raw::Bool(true), Raw::Integer(1), Raw::Text("x".to_owned())] {
            let entries = [Entry { key: key.to_owned(), line: 1, value }];
            let outcome = Keys::new(path, &entries).outcome(&entries[0]);
            assert!(!matches!(outcome, Ok(None)), "{key}");
        }
    }
}
