//! `brigade explain` as a user runs it.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::estimate::{GPT, write_header};

fn shards(args: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_brigade"));
    command.args(["explain", "shards"]).args(args.split_whitespace());
    command
}

fn answer(args: &str) -> String {
    let Output { status, stdout, stderr } = shards(args).output().unwrap();
    assert!(status.success(), "{args}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}

/// The exit code and what is said about `args`.
fn refusal(args: &str) -> (i32, String) {
    let Output { status, stdout, stderr } = shards(args).output().unwrap();
    assert!(!status.success() && stdout.is_empty(), "{args}");
    (status.code().unwrap(), String::from_utf8(stderr).unwrap())
}

#[test]
fn json_is_the_tables_of_accelerate_torch_and_fastai() {
    // The whole tables are brigade-sampling's tests; a process for each case would take minutes.
    for (table, scheme, every) in [
        ("batch_sampler_shard.json", "accelerate", 29),
        ("distributed_dl.json", "fastai", 5),
        ("distributed_sampler.json", "torch", 5),
    ] {
        let path =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../sampling/tests/golden").join(table);
        let table: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        for case in table["cases"].as_array().unwrap().iter().step_by(every) {
            let (n, world) = (&case["n"], &case["world"]);
            // torch's table is of the sampler alone: one batch that holds all of a rank.
            let batch_size = case.get("batch_size").unwrap_or(n);
            let mut args = format!(
                "--json --scheme {scheme} --samples {n} --batch-size {batch_size} --nproc {world}"
            );
            for (key, value, flag) in [
                ("drop_last", true, " --drop-last"),
                ("split_batches", true, " --split-batches"),
                ("even_batches", false, " --no-even-batches"),
            ] {
                if case.get(key) == Some(&Value::Bool(value)) {
                    args += flag;
                }
            }
            let mut answer: Value = serde_json::from_str(&answer(&args)).unwrap();
            if scheme == "torch" {
                for rank in answer["shards"].as_array_mut().unwrap() {
                    *rank = rank.get(0).cloned().unwrap_or(Value::Array(Vec::new()));
                }
            }
            assert_eq!(answer["shards"], case["shards"], "{args}");
        }
    }
}

#[test]
fn a_table_shows_the_samples_of_each_rank() {
    assert_eq!(
        answer("--samples 50 --batch-size 12 --nproc 4"),
        "\
round  rank 0       rank 1   rank 2   rank 3
0      0-11         12-23    24-35    36-47
1      48-49 (0-9)  (10-21)  (22-33)  (34-45)

(...) repeats samples to fill the batch; metrics leave them out
50 samples: 50 seen, 46 repeated, 0 dropped; 2 batches on each of 4 ranks
"
    );
    assert_eq!(
        answer("--samples 50 --batch-size 12 --nproc 4 --no-even-batches"),
        "\
round  rank 0  rank 1  rank 2  rank 3
0      0-11    12-23   24-35   36-47
1      48-49   -       -       -

not every rank has the last batch: a collective in its step would wait for those that have none
50 samples: 50 seen, 0 repeated, 0 dropped; 2 batches on rank 0, 1 batch on ranks 1-3
"
    );
    assert_eq!(
        answer("--samples 50 --batch-size 12 --nproc 4 --scheme torch"),
        "\
round  rank 0   rank 1   rank 2   rank 3
0      0,4..44  1,5..45  2,6..46  3,7..47
1      48       49       (0)      (1)

(...) repeats samples to fill the batch; metrics leave them out
50 samples: 50 seen, 2 repeated, 0 dropped; 2 batches on each of 4 ranks
"
    );
    assert_eq!(
        answer("--samples 50 --batch-size 12 --nproc 4 --scheme fastai --drop-last"),
        "\
round  rank 0  rank 1  rank 2  rank 3
0      0-11    13-24   26-37   39-49 (0)

(...) repeats samples to fill the batch; metrics leave them out
50 samples: 47 seen, 1 repeated, 3 dropped; 1 batch on each of 4 ranks
"
    );
    assert_eq!(
        answer("--samples 10 --batch-size 20 --nproc 1 --drop-last"),
        "10 samples: 0 seen, 0 repeated, 10 dropped; 0 batches on the one rank\n"
    );
}

#[test]
fn a_long_table_leaves_the_middle_out_unless_asked() {
    let args = "--samples 100000 --batch-size 64 --nproc 4";
    let short = answer(args);
    assert_eq!(short.lines().count(), 1 + 12 + 1 + 4 + 3);
    assert!(short.contains("\n... 375 more rounds\n387    99072-99135"), "{short}");
    assert!(short.contains("\n390    99840-99903  99904-99967  99968-99999 (0-31)  (32-95)\n"));
    let all = answer(&format!("{args} --all"));
    assert_eq!(all.lines().count(), 1 + 391 + 3);
    assert!(!all.contains("more"), "{all}");
}

#[test]
fn many_ranks_go_down_the_page() {
    let args = "--samples 100000 --batch-size 64 --nproc 64";
    let short = answer(args);
    assert!(short.starts_with("rank  round 0    round 1 "), "{short}");
    assert!(short.contains("  ... 19 more  round 24\n"), "{short}");
    assert!(
        short.contains("\n26    1664-1727  ") && short.contains("  99968-99999 (0-31)\n"),
        "{short}"
    );
    assert!(short.lines().all(|line| line.len() <= 100), "{short}");
    // In full, the rounds that do not fit stand below, each rank in each block.
    let all = answer(&format!("{args} --all"));
    let blocks = all.lines().filter(|line| line.starts_with("rank  round")).count();
    let rounds = all.matches("round ").count();
    assert_eq!((rounds, all.matches("\n63    ").count()), (25, blocks));
    assert!(all.lines().all(|line| line.len() <= 100), "{all}");
    // Past a page the ranks are left out as well, but not the one where the samples end.
    let page = answer("--samples 100000 --batch-size 64 --nproc 1000");
    assert!(page.lines().count() < 75, "{page}");
    assert!(page.contains("\n562   35968-36031  99968-99999 (0-31)\n"), "{page}");
}

#[test]
fn impossible_questions_get_one_clear_line() {
    for (args, code, text) in [
        (
            "--samples 0 --batch-size 8 --nproc 2",
            2,
            "'0' for '--samples <N>': it must be at least 1",
        ),
        ("--samples 5 --batch-size 0 --nproc 2", 2, "'0' for '--batch-size <N>': it must be at"),
        ("--samples 5 --batch-size 8 --nproc 0", 2, "'0' for '--nproc <N>': it must be at least 1"),
        (
            "--samples -5 --batch-size 8 --nproc 1",
            2,
            "'-5' for '--samples <N>': it must be a whole",
        ),
        ("--samples 5 --batch-size 8e9 --nproc 1", 2, "'8e9' for '--batch-size <N>'"),
        ("--samples 5 --batch-size 99999999999 --nproc 1", 2, "it must be at most 16777216"),
        ("--samples 5 --batch-size 8 --nproc 99999999999", 2, "it must be at most 1048576"),
        ("--samples 5 --batch-size 8", 2, "--nproc <N>"),
        ("--samples 5 --batch-size 8 --nproc 2 --scheme horovod", 2, "accelerate, torch, fastai"),
        (
            "--samples 5 --batch-size 8 --nproc 3 --split-batches",
            1,
            "8 does not divide by 3 ranks: use 6 or 9",
        ),
        ("--samples 5 --batch-size 8 --nproc 2 --split-batches --scheme torch", 1, "scheme torch"),
        (
            "--samples 5 --batch-size 8 --nproc 2 --no-even-batches --scheme fastai",
            1,
            "scheme fastai",
        ),
        ("--samples 18446744073709551615 --batch-size 8 --nproc 2", 1, "do not fit"),
    ] {
        let (got, said) = refusal(args);
        assert_eq!(got, code, "{args}: {said}");
        assert!(said.contains(text), "{args}: {said}");
        assert!(code == 2 || said.lines().count() == 1, "{args}: {said}");
    }
}

#[test]
fn a_closed_reader_is_not_an_error() {
    let mut child = shards("--samples 1000000 --batch-size 10 --nproc 4 --json")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 16]).unwrap();
    drop(stdout);
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    assert!(status.success() && stderr.is_empty(), "{}", String::from_utf8_lossy(&stderr));
}

/// Returns the output of `brigade explain schedule`.
fn schedule(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_brigade"))
        .args(["explain", "schedule"])
        .args(args)
        .output()
        .unwrap()
}

fn shown(args: &str) -> String {
    let Output { status, stdout, stderr } = schedule(&args.split_whitespace().collect::<Vec<_>>());
    assert!(status.success(), "{args}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}

fn refused(args: &[&str]) -> (i32, String) {
    let Output { status, stdout, stderr } = schedule(args);
    assert!(!status.success() && stdout.is_empty(), "{args:?}");
    (status.code().unwrap(), String::from_utf8(stderr).unwrap())
}

#[test]
fn a_schedule_as_json_is_the_table_of_torch_and_fastai() {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../schedule/tests/golden/schedules.json");
    let table: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    for (case, args) in [
        ("one_cycle", "one-cycle --max-lr 0.3 --steps 41"),
        (
            "one_cycle_linear_three_phase",
            "OneCycleLR --max-lr 0.3 --steps 41 --pct-start 0.4 --anneal linear --three-phase",
        ),
        ("cosine_annealing", "cosine --lr 0.1 --end-lr 0.001 --steps 21 --show 50"),
        ("cosine_warm_restarts", "cosine-restarts --lr 0.1 --first 6 --factor 2 --steps 50"),
        ("step", "step --lr 0.1 --every 8 --gamma 0.5 --steps 40"),
        ("multi_step", "multi-step --lr 0.1 --milestones 5,10,20 --gamma 0.3 --steps 40"),
        ("exponential", "exponential --lr 0.1 --gamma 0.9 --steps 20"),
        ("linear", "linear --start-lr 0.025 --end-lr 0.1 --steps 5 --show 20"),
        ("polynomial", "polynomial --lr 0.1 --power 2 --steps 11 --show 20"),
        (
            "linear_warmup_then_cosine",
            "cosine --lr 0.1 --steps 44 --warmup 6 --warmup-factor 0.001",
        ),
        (
            "reduce_on_plateau",
            "on-plateau --lr 0.1 --factor 0.5 --patience 2 --cooldown 1 \
             --metrics 1,0.9,0.95,0.96,0.97,0.98,0.8,0.8,0.8,0.8,0.8,0.8,0.81,0.79999,0.7",
        ),
        ("fastai_flat_cos", "flat-cosine --lr 0.001 --steps 50 --show 51"),
        ("fastai_one_cycle_lr", "fit-one-cycle --max-lr 0.01 --steps 50 --show 51"),
    ] {
        let answer: Value = serde_json::from_str(&shown(&format!("{args} --json"))).unwrap();
        let expected = table["cases"][case]["lr"].as_array().unwrap();
        assert_eq!(answer["lr"].as_array().unwrap().len(), expected.len(), "{case}");
        for (found, expected) in answer["lr"].as_array().unwrap().iter().zip(expected) {
            let (found, expected) = (found.as_f64().unwrap(), expected.as_f64().unwrap());
            // fastai computes in float32.
            let allowed = if case.starts_with("fastai") { 1e-8 } else { 1e-14 };
            assert!((found - expected).abs() <= allowed, "{case}: {found} is not {expected}");
        }
    }
}

#[test]
fn a_schedule_as_a_table() {
    assert_eq!(
        shown("one-cycle --max-lr 0.3 --steps 5 --pct-start 0.5"),
        "\
step  lr            momentum
0     0.012         0.95
1     0.228         0.875
2     0.271353      0.859549
3     0.103648      0.915451
4     1.2e-6        0.95

one-cycle, 5 steps: highest rate 0.271353 at step 2, lowest 1.2e-6 at step 4
"
    );
    assert_eq!(
        shown("constant --lr 0.1 --steps 1"),
        "step  lr\n0     0.1\n\nconstant, 1 step: the rate is 0.1 throughout\n"
    );
    let long = shown("cosine --lr 0.1 --steps 1000");
    assert_eq!(long.lines().count(), 1 + 51 + 1 + 2, "{long}");
    assert!(long.contains("\n20    "), "{long}");
    assert!(long.contains("\n999   "), "{long}");
    assert!(long.contains("\none step in 20, and the last; --all shows all 1000\n"), "{long}");
    assert_eq!(shown("cosine --lr 0.1 --steps 1000 --all").lines().count(), 1 + 1000 + 2);
    let plateau = shown("on-plateau --lr 0.1 --patience 0 --metrics 1,1,0.5");
    assert!(plateau.starts_with("evaluation  lr            metric\n0           0.1           1\n"));
    // As Accelerate advances it with four processes.
    let fast: Value = serde_json::from_str(&shown(
        "linear --start-lr 0 --end-lr 1 --steps 8 --accelerate-nproc 4 --json",
    ))
    .unwrap();
    assert_eq!(fast["lr"], serde_json::json!([0.0, 0.5]));
}

#[test]
fn schedules_can_be_put_together() {
    let output = schedule(&[
        "sequence",
        "--part",
        "constant --lr 0.1 --steps 2",
        "--part",
        "linear --start-lr 0.1 --end-lr 0 --steps 2 --momentum 'constant --lr 0.9 --steps 1'",
        "--warmup",
        "2",
        "--json",
    ]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["lr"], serde_json::json!([0.0, 0.05, 0.1, 0.1, 0.1, 0.05]));
    assert_eq!(answer["momentum"], serde_json::json!([null, null, null, null, 0.9, 0.9]));
}

#[test]
fn a_picture_is_a_well_formed_svg_with_each_curve() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("curve.svg");
    let path = file.to_str().unwrap();
    for (args, curves) in [
        (vec!["one-cycle", "--max-lr", "0.3", "--steps", "41"], 2),
        (vec!["cosine", "--lr", "0.1", "--steps", "100000"], 1),
        (vec!["constant", "--lr", "0", "--steps", "1"], 1),
        (vec!["on-plateau", "--lr", "0.1", "--metrics", "1,nan,2"], 2),
    ] {
        let output = schedule(&[&args[..], &["--plot", path]].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let svg = fs::read_to_string(&file).unwrap();
        assert!(svg.starts_with("<svg xmlns=") && svg.ends_with("</svg>\n"));
        assert_eq!(svg.matches("stroke-width=\"2\"").count(), curves, "{args:?}");
        assert_eq!(svg.matches('<').count(), svg.matches('>').count());
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{args:?}: {svg}");
        assert!(svg.len() < 200_000, "{args:?}: {}", svg.len());
    }
    let (code, error) = refused(&["constant", "--lr", "0.1", "--steps", "3", "--plot", "x.png"]);
    assert_eq!(code, 2);
    assert!(error.contains("use a name that ends in .svg"), "{error}");
    let nowhere = folder.path().join("no/such.svg");
    let (code, error) =
        refused(&["constant", "--lr", "0.1", "--steps", "3", "--plot", nowhere.to_str().unwrap()]);
    assert_eq!(code, 1);
    assert!(error.starts_with("brigade: cannot write /"), "{error}");
}

#[test]
fn a_schedule_that_cannot_be_says_why() {
    let (code, error) = refused(&["one-cicle", "--max-lr", "0.3"]);
    assert_eq!(code, 2);
    assert_eq!(
        error,
        "brigade: unrecognized subcommand 'one-cicle'; some similar subcommands exist: \
         'fit-one-cycle', 'one-cycle'\n"
    );
    let (code, error) = refused(&["cosine", "--lr", "-1", "--steps", "9"]);
    assert_eq!(code, 1);
    assert_eq!(
        error,
        "brigade: the schedule's start rate is -1: it must be finite and at least 0\n"
    );
    let (code, error) = refused(&["sequence", "--part", "cosin --lr 1 --steps 2"]);
    assert_eq!(code, 2);
    assert!(error.contains("'cosine'"), "{error}");
    let (_, error) = refused(&["sequence", "--part", "on-plateau --lr 1 --metrics 1"]);
    assert!(error.contains("follows a metric, not the step"), "{error}");
    let (_, error) = refused(&["constant", "--lr", "0.1", "--steps", "99999999999"]);
    assert!(error.contains("at most 16777216"), "{error}");
}

/// Returns the output of `brigade explain sharding` for a GPT of two blocks, or its error about the arguments.
fn sharding(args: &str) -> Result<String, String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    write_header(&file, &GPT);
    let mut command = Command::new(env!("CARGO_BIN_EXE_brigade"));
    command.args(["explain", "sharding"]).arg(&file).args(args.split_whitespace());
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    if status.success() { Ok(text(stdout)) } else { Err(text(stderr)) }
}

#[test]
fn sharding_shows_units_and_messages() {
    let expected = "\
zero3 on dp_shard 8: 3 units, the largest the root of 38598144 parameters

unit                                      parameters       whole    rank 0 has  reshard   placements
the root                                    38598144     147 MiB      18.4 MiB  no        S(0)
h.0 to h.1, each                             4129536    15.8 MiB       2.0 MiB  yes       S(0)

messages of a step, in the order in which they start:
phase     operation       ranks               messages       bytes  sent by a rank  of unit
forward   all_gather      8 dp_shard                 3     179 MiB         156 MiB  the root to h.1
backward  all_gather      8 dp_shard                 1    15.8 MiB        13.8 MiB  h.0
backward  reduce_scatter  8 dp_shard                 3     179 MiB         156 MiB  h.1 to the root
a rank sends 327 MiB in a step
";
    assert_eq!(sharding("--nproc 8").unwrap(), expected);
    let hybrid = sharding("--nproc 4 --strategy hybrid=2 --mixed bf16 --all").unwrap();
    assert!(hybrid.contains("  h.1.mlp.c_fc.weight [768, 3072] "), "{hybrid}");
    assert!(hybrid.contains("backward  all_reduce      2 dp_replicate "), "{hybrid}");
    assert!(hybrid.contains("R, S(0)"), "{hybrid}");
    let joined = sharding("--nproc 4 --at-least 5000000 --reshard 2").unwrap();
    assert!(joined.contains("2 units") && joined.contains("7.9 MiB  2 "), "{joined}");
    // The last block is whole when backward begins; the one before is gathered within its part.
    let part = sharding("--nproc 4 --reshard 2").unwrap();
    assert!(part.contains("2 of dp_shard "), "{part}");
    assert!(sharding("--nproc 1").unwrap().ends_with("no messages in a step\n"));
}

#[test]
fn sharding_as_json() {
    let json = |args: &str| -> Value { serde_json::from_str(&sharding(args).unwrap()).unwrap() };
    let answer = json("--nproc 8 --json --micro-batches 3 --reduce-once");
    let units = answer["units"].as_array().unwrap();
    assert_eq!(units.len(), 3);
    assert_eq!(units[1]["parameters"][1]["placements"], serde_json::json!([{"shard": 0}]));
    assert_eq!(units[1]["parameters"][1]["rows_per_rank"], 96);
    let messages = answer["messages"].as_array().unwrap();
    assert_eq!(messages.len(), 3 * (3 + 1) + 3);
    let sent: u64 = messages.iter().map(|message| message["sent_bytes"].as_u64().unwrap()).sum();
    assert_eq!(answer["sent_bytes"], sent);
    assert_eq!(answer["mesh"], serde_json::json!([{"name": "dp_shard", "size": 8}]));
}

#[test]
fn shardings_that_cannot_be_are_named() {
    for (args, expected) in [
        (
            "--nproc 8 --strategy hybrid=3",
            "hybrid=3 does not divide the 8 ranks: take one of 1, 2, 4, 8",
        ),
        ("--nproc 8 --strategy zero4", "write zero1, zero2, zero3 or hybrid=N"),
        (
            "--nproc 8 --units layers.*",
            "the pattern `layers.*` of units matches nothing; there are wte.weight, h.0",
        ),
        ("--nproc 8 --units h.*,h.0", "the patterns `h.*` and `h.0` of units both match h.0."),
        ("--nproc 8 --reshard 3", "divides the 8 ranks"),
        ("--nproc 8 --reshard maybe", "write yes, no, or a number"),
        ("--nproc 0", "it must be at least 1"),
    ] {
        let said = sharding(args).unwrap_err();
        assert!(said.contains(expected) && said.lines().count() == 1, "{args}: {said}");
    }
}

const DEEPSPEED: &str = r#"{
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
    "bf16": {"enabled": true}, "communication_data_type": "fp32",
    "zero_optimization": {"stage": 3, "overlap_comm": false, "offload_optimizer": {"device": "cpu"}}
}"#;

const ACCELERATE: &str = "\
distributed_type: DEEPSPEED
num_machines: 2
num_processes: 8
machine_rank: 0
main_process_ip: 10.0.0.1
main_process_port: 29500
deepspeed_config:
  deepspeed_config_file: ds.json
";

/// Returns the output of `brigade explain sharding` for settings files, in a folder with these two and a GPT of two
/// blocks.
fn settings(args: &str) -> Result<String, String> {
    let folder = tempfile::tempdir().unwrap();
    write_header(&folder.path().join("model.safetensors"), &GPT);
    for (name, text) in [
        ("ds.json", DEEPSPEED),
        ("a.yaml", ACCELERATE),
        ("nvme.json", &DEEPSPEED.replace("cpu", "nvme")),
        ("ddp.yaml", "distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: bf16\n"),
        (
            "fsdp1.yaml",
            "distributed_type: FSDP\nnum_processes: 4\nfsdp_config:\n  fsdp_sharding_strategy: 2\n",
        ),
        (
            "megatron.yaml",
            "distributed_type: MEGATRON_LM\nnum_processes: 4\nmegatron_lm_config:\n  megatron_lm_tp_degree: 2\n  \
             megatron_lm_sequence_parallelism: true\n  megatron_lm_eod_mask_loss: true\n",
        ),
    ] {
        fs::write(folder.path().join(name), text).unwrap();
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_brigade"));
    command.args(["explain", "sharding"]).args(args.split_whitespace()).current_dir(folder.path());
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    if status.success() { Ok(text(stdout)) } else { Err(text(stderr)) }
}

#[test]
fn settings_of_deepspeed_are_told_as_what_they_become() {
    let expected = "\
strategy     zero3: each rank has a part of the parameters, the gradients and the optimizer's state
reshard      parameters are freed after forward, and gathered again in backward
units        the model's blocks
reduce       gradients are reduced in each backward
offload      shards and the optimizer's state are in the host's memory, pinned
mesh         dp_shard 8
precision    bf16, gradients summed in float32
batches      the loader's x 8 ranks x 2 batches in a step
clipping     gradients' norm at most 0.5
note: ds.json: zero_optimization.overlap_comm = false: messages would wait for the computation; they always run beside it
note: ds.json: zero_optimization.offload_optimizer.device = \"cpu\": the optimizer's state alone would lie in the host's memory; the shards of parameters do, too
";
    assert_eq!(settings("--deepspeed-config-file ds.json --nproc 8").unwrap(), expected);
    // Accelerate's file names DeepSpeed's, and the number of ranks.
    assert_eq!(settings("--config a.yaml").unwrap(), expected);
    let planned = settings("model.safetensors --config a.yaml").unwrap();
    let plan = planned.strip_prefix(expected).unwrap();
    assert!(plan.starts_with("\nzero3 on dp_shard 8: 3 units, "), "{plan}");
    assert!(plan.contains("messages of a step of 2 batches"), "{plan}");
}

#[test]
fn settings_of_accelerate_are_told_as_what_they_become() {
    let told = settings("--config ddp.yaml").unwrap();
    assert!(
        told.starts_with(
            "strategy     none: each rank has the whole model\nmesh         dp_replicate 2\n"
        ),
        "{told}"
    );
    let told = settings("--config fsdp1.yaml --nproc 6").unwrap();
    assert!(
        told.contains("reshard      parameters stay whole from forward to backward\n"),
        "{told}"
    );
    assert!(told.contains("mesh         dp_shard 6\n"), "{told}");
    assert!(told.contains("note: fsdp1.yaml:3: fsdp_auto_wrap_policy: is not given"), "{told}");
}

#[test]
fn settings_of_megatron_are_told_as_what_they_become() {
    let told = settings("--config megatron.yaml").unwrap();
    for line in [
        "strategy     zero1: each rank has a part of the optimizer's state",
        "mesh         dp_shard 2 x tp 2",
        "sequence     tensor ranks have parts of it between divided layers",
        "clipping     gradients' norm at most 1",
    ] {
        assert!(told.lines().any(|it| it == line), "{told}");
    }
    let note = "note: megatron.yaml:3: megatron_lm_eod_mask_loss = True: ends of documents would have no loss";
    assert!(told.contains(note), "{told}");
}

#[test]
fn settings_that_cannot_be_honoured_are_refused() {
    for (args, expected) in [
        (
            "--deepspeed-config-file nvme.json --nproc 2",
            "nvme.json: zero_optimization.offload_optimizer.device = \"nvme\" is not supported: ",
        ),
        ("--config megatron.yaml --nproc 3", "the mesh tp 2 has 2 ranks and the job has 3"),
        ("--deepspeed-config-file no.json --nproc 2", "cannot read no.json"),
        ("--deepspeed-config-file ds.json", "--nproc <N>"),
        ("--config a.yaml --strategy zero2", "cannot be used with"),
        ("model.safetensors --config ddp.yaml --json", "the settings divide nothing"),
        ("--config a.yaml --json", "<FILE>"),
    ] {
        let said = settings(args).unwrap_err();
        assert!(said.contains(expected), "{args}: {said}");
    }
}

/// Returns the output of `brigade explain`, or its error about the arguments.
fn explained(args: &str) -> Result<String, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_brigade"));
    command.arg("explain").args(args.split_whitespace());
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    if status.success() { Ok(text(stdout)) } else { Err(text(stderr)) }
}

#[test]
fn a_pipeline_is_shown_slot_by_slot() {
    let expected = "\
1f1b: 3 stages on 3 ranks, 4 micro-batches

0 F0 F1 F2 .  .  .  .  B0 -  F3 B1 -  .  B2 -  .  B3 -
1 .  F0 F1 .  .  B0 -  F2 B1 -  F3 B2 -  .  B3 -  .  .
2 .  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  .  .  .  .

F0: forward of micro-batch 0; B: backward, two slots; -: continued; .: idle

rank  stages       computes    idle  held  sends                 receives
0     0                  12       6     3  4 to 1                4 from 1
1     1                  12       6     2  4 to 0, 4 to 2        4 from 0, 4 from 2
2     2                  12       6     1  4 to 1                4 from 1
held: most activations of the stage at a time
bubble: idle for 0.500 of the time that ranks compute; by the formula 0.500

a rank of a transformer sends, for b texts of s tokens, width h, keys of width k:
pp  each micro-batch: b s h numbers to the next stage, and as many back
";
    assert_eq!(explained("pipeline --stages 3 --micro-batches 4").unwrap(), expected);
    let zbv = explained("pipeline --stages 2 --micro-batches 4 --schedule zbv").unwrap();
    assert!(zbv.contains("\n0 0F0 0F1 0F2 3F0 3I0 3W0 3F1"), "{zbv}");
    assert!(zbv.contains("0     0,3                24       1     4  8 to 1 "), "{zbv}");
    let late = explained("pipeline --stages 3 --micro-batches 4 --message-time 0.5").unwrap();
    assert!(late.contains("messages take no slot here\n"), "{late}");
    assert!(late.contains("by the formula 0.500 without messages\n"), "{late}");
    assert!(!late.contains("idle for 0.500"), "{late}");
}

#[test]
fn a_long_pipeline_is_cut_to_the_width() {
    let args = "pipeline --stages 40 --micro-batches 200 --schedule interleaved --chunks 3";
    let short = explained(args).unwrap();
    assert!(short.contains("... 8 more ranks\n") && short.contains(" ..  "), "{short}");
    assert!(short.lines().all(|line| line.len() <= 100), "{short}");
    let all = explained(&format!("{args} --all")).unwrap();
    assert!(!all.contains("more ranks") && all.contains(" 119F199 "), "{all}");
}

#[test]
fn a_pipeline_as_json() {
    let args = "pipeline --stages 2 --micro-batches 4 --schedule interleaved --json";
    let answer: Value = serde_json::from_str(&explained(args).unwrap()).unwrap();
    assert_eq!(answer["schedule"], "interleaved");
    assert_eq!((&answer["chunks"], &answer["bubble_formula"]), (&2.into(), &0.125.into()));
    assert_eq!(answer["ranks"][1]["stages"], serde_json::json!([1, 3]));
    let actions = answer["ranks"][0]["actions"].as_array().unwrap();
    let kinds: Vec<_> = actions.iter().map(|it| it["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds[..3], ["unshard", "forward", "send_activation"]);
    assert_eq!(actions[2]["peer"], 1);
    assert_eq!(kinds.iter().filter(|kind| **kind == "backward").count(), 8);
    assert_eq!(kinds.iter().filter(|kind| **kind == "reduce_gradients").count(), 2);
}

#[test]
fn a_mesh_is_shown_by_host() {
    let expected = "\
pp 2 x dp_shard 2 x tp 2: 8 ranks on 2 hosts

host  rank    pp            dp_shard      tp
0     0       0             0             0
      1       0             0             1
      2       0             1             0
      3       0             1             1
1     4       1             0             0
      5       1             0             1
      6       1             1             0
      7       1             1             1

pp                                   4 groups of 2: 0,4  1,5  2,6  3,7
dp_shard = dp = dp_shard_cp = dp_cp  4 groups of 2: 0,2  1,3  4,6  5,7
tp                                   4 groups of 2: 0-1  2-3  4-5  6-7

the same samples are read by: 0-1,4-5  2-3,6-7

a rank of a transformer sends, for b texts of s tokens, width h, keys of width k:
tp  each layer: 2 sums forward and 2 back, each 2 x 1/2 b s h numbers
pp  each micro-batch: b s h numbers to the next stage, and as many back
";
    let args = "mesh --nproc 8 --nnodes 2 --pipeline 2 --tensor 2";
    assert_eq!(explained(args).unwrap(), expected);
    let across = explained("mesh --nproc 8 --nnodes 4 --tensor 4 --expert 8").unwrap();
    for expected in [
        "warning: tp: 2 of 2 groups cross hosts (ranks 0-3 are on hosts 0-1), so each layer reduces",
        "make tp a number that divides the 2 ranks of a host\n",
        "warning: ep: 1 of 1 group cross hosts (ranks 0-7 are on hosts 0-3)",
    ] {
        assert!(across.contains(expected), "{across}");
    }
    let context = explained("mesh --nproc 8 --context 4 --sequence 2").unwrap();
    assert!(context.contains("all ranks read the same samples\nalong cp and sp "), "{context}");
    assert!(!context.contains("efsdp") && !context.contains("warning"), "{context}");
    let data = explained("mesh --nproc 100 --replicate 4").unwrap();
    assert!(data.contains("dp_replicate 4 x dp_shard 25: 100 ranks on 1 host\n"), "{data}");
    assert!(data.contains("\n... 68 more ranks\n") && data.contains("... 17 more ..."), "{data}");
    assert!(data.ends_with("each rank reads different samples\n"), "{data}");
}

#[test]
fn a_mesh_as_json() {
    let args = "mesh --nproc 4 --nnodes 2 --tensor 2 --json";
    let answer: Value = serde_json::from_str(&explained(args).unwrap()).unwrap();
    let rank = serde_json::json!({ "rank": 3, "host": 1, "coordinates": {"dp_shard": 1, "tp": 1} });
    assert_eq!(answer["ranks"][3], rank);
    assert_eq!(answer["groups"][1]["axes"], serde_json::json!(["tp"]));
    assert_eq!(answer["groups"][0]["groups"], serde_json::json!([[0, 2], [1, 3]]));
    assert_eq!(answer["same_samples"], serde_json::json!([[0, 1], [2, 3]]));
    assert_eq!(answer["warnings"], serde_json::json!([]));
}

#[test]
fn pipelines_and_meshes_that_cannot_be_are_named() {
    for (args, expected) in [
        ("pipeline --stages 4 --micro-batches 3", "1f1b on 4 ranks cannot run 3 micro-batches"),
        (
            "pipeline --stages 4 --micro-batches 9 --schedule interleaved",
            "at least as many as there are ranks: take 8 or 10",
        ),
        ("pipeline --stages 4 --micro-batches 7 --schedule zbv", "twice as many as ranks: take 8"),
        (
            "pipeline --stages 4 --micro-batches 4 --chunks 2",
            "1f1b has one stage for each rank, not 2",
        ),
        ("pipeline --stages 4 --micro-batches 4 --schedule 2f2b", "write gpipe, 1f1b, "),
        ("pipeline --stages 4 --micro-batches 0", "it must be at least 1"),
        (
            "pipeline --stages 4 --micro-batches 4 --message-time -1",
            "the time of a message is -1: it must be a finite number and not below 0",
        ),
        (
            "pipeline --stages 1000000 --micro-batches 100000000000 --schedule gpipe",
            "are more than 1048576 passes: take fewer",
        ),
        ("mesh --nproc 8 --tensor 2 --shard 3", "make dp_shard 4, or start 6 ranks"),
        ("mesh --nproc 8 --tensor 3", "the mesh tp 3 has 3 ranks and the job has 8: make tp 8, or"),
        ("mesh --nproc 8 --expert 3", "take one of 1, 2, 4, 8"),
        ("mesh --nproc 8 --nnodes 3", "8 ranks cannot be shared out evenly among 3 hosts: "),
        ("mesh --nproc 8 --tensor 0", "it must be at least 1"),
    ] {
        let said = explained(args).unwrap_err();
        assert!(said.contains(expected) && said.lines().count() == 1, "{args}: {said}");
    }
}

/// Creates a transformer of two blocks of 16.5 MB each, with an embedding of 154 MB to which the head is tied.
fn gpt_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_header(&folder.path().join("model.safetensors"), &GPT);
    let config =
        r#"{"architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 2, "n_head": 12}"#;
    fs::write(folder.path().join("config.json"), config).unwrap();
    folder
}

fn device_map(folder: &Path, args: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_brigade"));
    command.args(["explain", "device-map"]).arg(folder).args(args);
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn a_device_map_of_a_folder_shows_layers_bytes_and_what_is_moved() {
    let folder = gpt_folder();
    let limits = "cuda:0=175M,cpu=1G";
    let (code, text, errors) = device_map(folder.path(), &["--max-memory", limits]);
    assert_eq!(code, 0, "{errors}");
    let (_, table) = text.split_once('\n').unwrap();
    assert_eq!(
        table,
        "\
layer                     place        bytes
wte                       cuda:0     147 MiB
h.0-1                     cpu       15.8 MiB each, 31.5 MiB in all
ln_f                      cpu        3.0 KiB
lm_head                   cuda:0         0 B

cuda:0     147 MiB of 175 MiB
cpu       31.5 MiB of 1.0 GiB
disk           0 B
for each token 31.5 MiB from cpu come to cuda:0
"
    );
    let args = ["--max-memory", limits, "--dtype", "bf16", "--json"];
    let (_, text, _) = device_map(folder.path(), &args);
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["map"], serde_json::json!({"": 0}));
    let bytes = 2 * (50_257 * 768 + 2 * (768 + 768 * 2304 + 768 * 3072) + 768);
    assert_eq!(answer["bytes"]["cuda:0"], bytes);
}

#[test]
fn a_device_map_is_read_from_accelerates_json() {
    let folder = gpt_folder();
    let file = folder.path().join("map.json");
    fs::write(&file, r#"{"": 0, "h.1": "disk"}"#).unwrap();
    let map = ["--map", file.to_str().unwrap(), "--json"];
    let (code, text, errors) = device_map(folder.path(), &map);
    assert_eq!(code, 0, "{errors}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["bytes_moved_per_token"]["disk"], 4 * (768 + 768 * 2304 + 768 * 3072));
    fs::write(&file, r#"{"": 0, "h.2": "disk"}"#).unwrap();
    let (code, _, errors) = device_map(folder.path(), &map);
    assert_eq!(code, 1, "{errors}");
    assert!(
        errors.contains("names `h.2`, which the model does not have; near it are h"),
        "{errors}"
    );
}

#[test]
fn limits_without_room_for_the_largest_layer_are_refused_with_the_smallest_that_would_do() {
    let folder = gpt_folder();
    let (code, _, errors) = device_map(folder.path(), &["--max-memory", "cuda:0=100M,cpu=1G"]);
    assert_eq!(code, 1, "{errors}");
    let expected = "cuda:0 is limited to 100 MiB, and wte with its 147 MiB would have to be moved there to be computed: \
                    give cuda:0 at least 147 MiB (154389504 bytes)";
    assert!(errors.contains(expected), "{errors}");
}
