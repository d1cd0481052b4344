//! Tests that every flag of torchrun and of `accelerate launch` is accepted, or refused with a reason.

use std::process::{Command, Output};

/// Explains a launch with these flags.
fn explain(flags: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_brigade"));
    command.env_clear().env("PATH", "/usr/bin:/bin").env("BRIGADE_CONFIG", "/dev/null");
    command.args(["launch", "--explain"]).args(flags).args(["true", "--lr", "1"]);
    command.output().unwrap()
}

fn stdout(flags: &[&str]) -> String {
    let output = explain(flags);
    assert!(output.status.success(), "{flags:?}: {}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty());
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the row of a setting: its value and its source.
fn row(shown: &str, name: &str) -> String {
    let line = shown.lines().find(|line| line.split_whitespace().next() == Some(name));
    let words: Vec<&str> = line.unwrap_or_default().split_whitespace().skip(1).collect();
    words.join(" ")
}

/// Returns the other spelling of a flag.
fn other_dashes(flag: &str) -> String {
    match flag.strip_prefix("--") {
        Some(name) => format!("--{}", name.replace('_', "-")),
        None => flag.to_owned(),
    }
}

#[test]
fn all_flags_of_torchrun() {
    // Except those that need other flags, which are below.
    let table = "\
        --nnodes=1 --nproc_per_node=2 --rdzv_backend=c10d --rdzv_endpoint=localhost:0 --rdzv_id=1 \
        --rdzv_conf=timeout=900 --standalone --max_restarts=3 --monitor_interval=0.1 \
        --start_method=spawn --event_log_handler=null --role=trainer --no_python --run_path \
        --log_dir=logs -r=3 -t=0:1,1:2 --redirects=0 --tee=0 --local_ranks_filter=0 \
        --duplicate_stdout_filters=a,b --duplicate_stderr_filters=a --node_rank=0 \
        --master_addr=localhost --master_port=29501 --local_addr=localhost --logs_specs=x \
        --numa_binding=exclusive --signals_to_handle=SIGTERM,SIGINT --shutdown_timeout=5";
    for flag in table.split_whitespace() {
        for flag in [flag.to_owned(), other_dashes(flag)] {
            // Fast, without detecting the machine's resources.
            let nproc: &[&str] = if flag.starts_with("--nproc") { &[] } else { &["--nproc=1"] };
            stdout(&[nproc, &[flag.as_str()]].concat());
        }
    }
    // A module is not a path to a program: Python is the program.
    let module = explain(&["--nproc=1", "-m"]);
    let found =
        module.status.success() || String::from_utf8_lossy(&module.stderr).contains("python");
    assert!(found);
}

#[test]
fn all_flags_of_accelerate() {
    let taken = "\
        --config_file=/dev/null --quiet -q --cpu --multi_gpu --mixed_precision=fp16 \
        --num_machines=1 --num_cpu_threads_per_process=2 --enable_cpu_affinity \
        --dynamo_backend=inductor --dynamo_mode=max-autotune --dynamo_use_fullgraph \
        --dynamo_use_dynamic --dynamo_use_regional_compilation --same_network --machine_rank=0 \
        --main_process_ip=localhost --main_process_port=29501 -t=3 --log_dir=logs --role=trainer \
        --rdzv_backend=static --rdzv_conf=timeout=900 --max_restarts=1 --monitor_interval=5 \
        --no_python --no_tpu_cluster --env=A=b --main_training_function=main --debug \
        --gradient_accumulation_steps=4 --tpu --downcast_bf16";
    for flag in taken.split_whitespace() {
        for flag in [flag.to_owned(), other_dashes(flag)] {
            stdout(&["--nproc=1", &flag]);
        }
    }
    assert_eq!(row(&stdout(&["--num_processes=3"]), "nproc"), "3 flag --num-processes");

    // Their combinations are tested in tests/plugins.rs.
    let of_plugins = "\
        --deepspeed_config_file=a --zero_stage=3 --offload_optimizer_device=cpu \
        --offload_param_device=cpu --offload_optimizer_nvme_path=a --offload_param_nvme_path=a \
        --gradient_clipping=1 --zero3_init_flag=true --zero3_save_16bit_model=true \
        --deepspeed_multinode_launcher=pdsh --deepspeed_moe_layer_cls_names=A --fsdp_version=2 \
        --fsdp_offload_params=true --fsdp_min_num_params=1 --fsdp_sharding_strategy=FULL_SHARD \
        --fsdp_reshard_after_forward=true --fsdp_auto_wrap_policy=NO_WRAP \
        --fsdp_transformer_layer_cls_to_wrap=A --fsdp_backward_prefetch=NO_PREFETCH \
        --fsdp_state_dict_type=FULL_STATE_DICT --fsdp_forward_prefetch=true \
        --fsdp_use_orig_params=true --fsdp_cpu_ram_efficient_loading=true \
        --fsdp_sync_module_states=true --fsdp_activation_checkpointing=true \
        --fsdp_activation_checkpointing_offload=true --parallelism_config_dp_replicate_size=2 \
        --parallelism_config_tp_size=2 --parallelism_config_sp_attn_implementation=sdpa \
        --megatron_lm_tp_degree=2 --megatron_lm_use_custom_fsdp=true --megatron_lm_pp_degree=2 \
        --megatron_lm_num_micro_batches=2 --megatron_lm_gradient_clipping=1 --fp8_backend=te \
        --fp8_use_autocast_during_eval --fp8_margin=1 --fp8_interval=1 --fp8_format=E4M3 \
        --fp8_amax_history_len=16 --fp8_amax_compute_algo=max --fp8_opt_level=O1 \
        --fp8_override_linear_precision=true,false,false --fp8_pad_inner_dim=true \
        --fp8_enable_fsdp_float8_all_gather=false";
    for flag in of_plugins.split_whitespace() {
        for flag in [flag.to_owned(), other_dashes(flag)] {
            let shown = stdout(&["--nproc=1", &flag]);
            let name = flag.split('=').next().unwrap().replace('_', "-");
            let without =
                if name.starts_with("--fp8") { "--mixed-precision fp8" } else { "--use-" };
            let expected = format!("flag {name}: has no effect without {without}");
            assert!(shown.contains(&expected), "{shown}");
        }
    }
    let gpus = explain(&["--nproc=1", "--gpu_ids=all"]);
    assert!(gpus.status.success());

    let refused = "\
        --tpu_cluster --tpu_use_sudo --vm --aws_access_key_id --aws_secret_access_key";
    for flag in refused.split_whitespace() {
        for flag in [format!("{flag}=x"), other_dashes(flag)] {
            let output = explain(&[&flag]);
            let stderr = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(2), "{flag}: {stderr}");
            let name = flag.trim_end_matches("=x");
            assert!(stderr.starts_with(&format!("brigade: {name} is not possible: ")), "{stderr}");
            assert_eq!(stderr.lines().count(), 1, "{stderr}");
        }
    }
}

#[test]
fn pasted_command_lines() {
    // Flags, and rows of the table.
    let table: [(&str, &[(&str, &str)]); 4] = [
        (
            "--nproc_per_node=2 --nnodes=1:4 --rdzv-backend c10d --rdzv-endpoint h:29400 \
             --max-restarts 3",
            &[
                ("nproc", "2 flag --nproc"),
                ("nnodes", "1:4 flag --nnodes"),
                ("rdzv-backend", "builtin flag --rdzv-backend"),
                ("rdzv-endpoint", "h:29400 flag --rdzv-endpoint"),
                ("max-restarts", "3 flag --max-restarts"),
            ],
        ),
        (
            "--num_processes 4 --num_machines 2 --machine_rank 0 --main_process_ip A \
             --main_process_port 5000 --mixed_precision bf16",
            &[
                ("nproc", "2 flag --num-processes"),
                ("nnodes", "2 flag --nnodes"),
                ("node-rank", "0 flag --node-rank"),
                ("master-addr", "A flag --master-addr"),
                ("master-port", "5000 flag --master-port"),
                ("mixed-precision", "bf16 flag --mixed-precision"),
            ],
        ),
        (
            "--standalone --nproc-per-node 3",
            &[("nproc", "3 flag --nproc"), ("nnodes", "1 default")],
        ),
        (
            "--cpu --num_processes 4 --enable_cpu_affinity --num_cpu_threads_per_process 2",
            &[
                ("nproc", "4 flag --num-processes"),
                ("cpu", "true flag --cpu"),
                ("bind", "numa flag --enable-cpu-affinity"),
                ("threads-per-rank", "2 flag --threads-per-rank"),
            ],
        ),
    ];
    for (flags, rows) in table {
        let flags: Vec<&str> = flags.split_whitespace().collect();
        let shown = stdout(&flags);
        for (name, expected) in rows {
            assert_eq!(row(&shown, name), *expected, "{flags:?}: {shown}");
        }
        // Arguments after the program belong to the program.
        assert!(shown.contains(" --lr 1\n"), "{shown}");
    }
}

#[test]
fn flags_that_change_nothing_say_so() {
    let shown = stdout(&["--nproc=1", "--monitor_interval=5", "--signals_to_handle=SIGTERM"]);
    assert!(shown.contains(
        "\n  flag --monitor-interval: has no effect: the end of a rank is noticed at once\n"
    ));
    assert!(shown.contains("\n  flag --signals-to-handle: has no effect: "), "{shown}");
    let shown = stdout(&["--nproc=1", "--standalone", "--master-port=29501"]);
    assert!(
        shown.contains(
            "\n  flag --standalone: each attempt has a free port, whatever the values of --master-port \
             and MASTER_PORT\n"
        ),
        "{shown}"
    );
    assert!(!shown.contains("has no effect"), "{shown}");
    assert!(shown.contains("MASTER_PORT=(a free port for each attempt)"), "{shown}");
    let shown = stdout(&["--nproc=1", "--signals_to_handle=SIGTERM,SIGALRM"]);
    assert!(shown.contains("\n  flag --signals-to-handle: SIGALRM is not honoured"), "{shown}");
}

#[test]
fn totals_that_cannot_be_shared_out() {
    let table: [(&str, &str); 4] = [
        (
            "--num_processes=3 --num_machines=2 --node-rank=0 --master-addr=a",
            "--num-processes 3 cannot be shared out among 2 hosts",
        ),
        (
            "--num_processes=4 --nnodes=1:2 --rdzv-endpoint=a",
            "--num-processes counts the ranks of all hosts, of which there may be 1 to 2",
        ),
        ("--num_processes=4 --nproc=2", "--nproc and --num-processes exclude each other"),
        (
            "--num_processes=4 --hosts=a,b",
            "--num-processes counts the ranks of all hosts: with a list of hosts",
        ),
    ];
    for (flags, expected) in table {
        let flags: Vec<&str> = flags.split_whitespace().collect();
        let output = explain(&flags);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {stderr}");
        assert!(stderr.starts_with(&format!("brigade: {expected}")), "{flags:?}: {stderr}");
    }
}
