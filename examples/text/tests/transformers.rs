//! GPT-2 and BERT as a user starts them: alone, again, on two processes, wrongly, and after they were killed.

#![allow(clippy::unwrap_used)]

#[path = "../../launcher.rs"]
mod launcher;

use std::ffi::OsStr;
use std::fs;
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::Duration;

const GPT: &str = env!("CARGO_BIN_EXE_text_gpt");
const GLUE: &str = env!("CARGO_BIN_EXE_text_glue");

/// Without dropout, which each process draws by itself.
const SMALL_GPT: &str = "--generate 12 --vocabulary 300 --block-size 16 --layers 1 --heads 2 --width 16 --dropout 0 \
                         --warmup 5 --lr 1e-2 --log-losses";
const SMALL_GLUE: &str = "--generate 90 --vocabulary 300 --layers 1 --heads 2 --width 16 --dropout 0 --warmup 5 \
                          --lr 1e-2 --log-losses";

fn command(program: impl AsRef<OsStr>, arguments: &str, folder: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(arguments.split_whitespace()).current_dir(folder);
    command.env("OMP_NUM_THREADS", "1").env("RUST_BACKTRACE", "0").stdin(Stdio::null());
    command
}

fn run(program: impl AsRef<OsStr>, arguments: &str, folder: &Path) -> String {
    let output = command(program, arguments, folder).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}\n{text}\n{}", output.status, said(&output));
    text
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What a program says when it refuses.
fn refused(program: &str, arguments: &str, folder: &Path) -> String {
    let output = command(program, arguments, folder).output().unwrap();
    let said = said(&output);
    assert_eq!(output.status.code(), Some(1), "{arguments}: {said}");
    assert!(!said.contains("panicked"), "{said}");
    said
}

/// The losses of each step.
fn losses(text: &str) -> Vec<f64> {
    let list = text.lines().find_map(|line| line.split_once("losses [")?.1.strip_suffix(']'));
    list.unwrap_or_else(|| panic!("{text}")).split(", ").map(|loss| loss.parse().unwrap()).collect()
}

/// The numbers of the last validation.
fn validation(text: &str) -> Vec<f64> {
    let line = text.lines().rfind(|line| line.contains("validation loss = ")).unwrap();
    line.split([' ', ',']).filter_map(|word| word.parse().ok()).collect()
}

#[track_caller]
fn near(found: &[f64], expected: &[f64], tolerance: f64, text: &str) {
    assert_eq!(found.len(), expected.len(), "{text}");
    for (found, expected) in found.iter().zip(expected) {
        let limit = tolerance * expected.abs().max(1.0);
        assert!((found - expected).abs() <= limit, "{found} {expected}\n{text}");
    }
}

/// Losses compared with those of the golden files.
mod numeric {
    use super::*;

    /// A program alone, again with other threads and what the first run has kept, with two batches for one, and on two
    /// processes: the same losses, those of the golden curve among them. Gives what it printed alone.
    fn check(program: &str, options: &str, folder: &Path, golden: &str) -> String {
        let options = format!("{options} --epochs 2");
        let alone = format!("{options} --batch-size 8");
        let kept = "--plots plots --save saved --log small";
        let first = run(program, &format!("{alone} --threads 1 {kept}"), folder);
        let one = losses(&first);
        let again = run(program, &format!("{alone} --threads 3"), folder);
        assert_eq!(losses(&again), one, "{first}{again}");
        assert_eq!(again.lines().last(), first.lines().last());

        let golden: Vec<f64> = serde_json::from_str(golden).unwrap();
        // Sums in another order, as of batches of 1 to 4, change these losses by 5e-7 at most. Processors differ in such
        // orders and in the rounding of exp and tanh.
        near(&one, &golden, 1e-4, &first);

        // What is left over at the end of an epoch is no whole batch, nor the same number of tokens or pairs for each
        // process: every one counts once all the same.
        let parts = run(program, &format!("{options} --batch-size 4 --accumulate 2"), folder);
        near(&losses(&parts), &one, 1e-5, &parts);
        near(&validation(&parts), &validation(&first), 1e-3, &parts);
        let launched = format!("launch --nproc 2 {program} {options} --batch-size 4");
        let two = run(launcher::brigade_beside(program), &launched, folder);
        near(&losses(&two), &one, 1e-5, &two);
        near(&validation(&two), &validation(&first), 1e-3, &two);
        assert_eq!(two.matches("[1]").count(), 0, "rank 0 alone prints: {two}");

        // Processes that divide each layer, each sequence, or both; of four processes two pairs, each of which has half of
        // the pairs' rows, or one group of all.
        for (ranks, batch, axes) in [
            (2, 8, "--tensor 2"),
            (4, 4, "--tensor 2 --sharding zero3"),
            (2, 8, "--context 2"),
            (4, 4, "--context 2 --sharding zero3"),
            (4, 8, "--context 2 --tensor 2"),
            (2, 8, "--context 2 --context-method ulysses"),
        ] {
            let launched = format!(
                "launch --nproc {ranks} {axes} {program} {options} --batch-size {batch} --save divided"
            );
            let divided = run(launcher::brigade_beside(program), &launched, folder);
            near(&losses(&divided), &one, 1e-5, &divided);
            near(&validation(&divided), &validation(&first), 1e-3, &divided);
            let size =
                |of: &str| fs::metadata(folder.join(of).join("model.safetensors")).unwrap().len();
            assert_eq!(size("divided"), size("saved"));
        }

        let picture = fs::read(folder.join("plots/loss.png")).unwrap();
        assert_eq!(picture[..8], *b"\x89PNG\r\n\x1a\n");
        for file in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
        {
            assert!(folder.join("saved").join(file).is_file(), "{file}");
        }
        let log = fs::read_to_string(folder.join("runs/small.jsonl")).unwrap();
        assert_eq!(log.matches("\"loss\":").count(), one.len());
        assert_eq!(log.matches("\"valid_loss\":").count(), 2);
        first
    }

    #[test]
    fn dist_gpt_alone_again_and_on_two_processes() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let text = check(GPT, SMALL_GPT, folder, include_str!("golden/gpt.json"));
        let [_, perplexity] = validation(&text)[..] else { panic!("{text}") };
        assert!((1.0..150.0).contains(&perplexity), "of 300 tokens fewer are likely: {text}");
        assert!(text.lines().last().unwrap().starts_with("The story"), "{text}");
        // The vocabulary and the tokens of all runs.
        let kept = fs::read_dir(folder.join("data/gpt")).unwrap();
        let tokens = kept
            .filter(|entry| entry.as_ref().unwrap().path().extension() == Some("tokens".as_ref()));
        assert_eq!(tokens.count(), 1);
    }

    /// Stages of two processes, with replicas, divided layers and shards: the losses, the file and the text of one process; and a
    /// run that goes on from their checkpoint alone.
    #[test]
    fn dist_stages_have_the_losses_of_one_process() {
        for (program, options) in [(GPT, SMALL_GPT), (GLUE, SMALL_GLUE)] {
            let folder = tempfile::tempdir().unwrap();
            let folder = folder.path();
            let options = options.replace("--layers 1", "--layers 2");
            let options = format!("{options} --epochs 2");
            let first = run(program, &format!("{options} --batch-size 8 --save saved"), folder);
            let one = losses(&first);
            let meshes = [
                (4, 4, "--pipeline 2"),
                (4, 8, "--pipeline 2 --tensor 2"),
                (2, 8, "--pipeline 2"),
                (4, 4, "--pipeline 2 --sharding zero3"),
                (4, 8, "--pipeline 2 --context 2"),
            ];
            // The programs differ in their models, not in the meshes that they take.
            let meshes = if program == GPT { &meshes[..] } else { &meshes[..2] };
            for (ranks, batch, axes) in meshes {
                let launched = format!(
                    "launch --nproc {ranks} {axes} {program} {options} --batch-size {batch} --save stages"
                );
                let stages = run(launcher::brigade_beside(program), &launched, folder);
                near(&losses(&stages), &one, 1e-5, &stages);
                near(&validation(&stages), &validation(&first), 1e-3, &stages);
                if program == GPT {
                    let written = stages.lines().last().unwrap();
                    assert_eq!(written.strip_prefix("[0] "), first.lines().last());
                }
                let size = |of: &str| {
                    fs::metadata(folder.join(of).join("model.safetensors")).unwrap().len()
                };
                assert_eq!(size("stages"), size("saved"));
            }
            let launched = format!(
                "launch --nproc 2 --pipeline 2 {program} {options} --batch-size 4 --accumulate 2"
            );
            let windows = run(launcher::brigade_beside(program), &launched, folder);
            near(&losses(&windows), &one, 1e-5, &windows);
            let kept = "--checkpoint kept --checkpoint-every 2";
            let launched =
                format!("launch --nproc 2 {program} {options} --pipeline 2 --batch-size 8 {kept}");
            run(launcher::brigade_beside(program), &launched, folder);
            let kept = fs::read_dir(folder.join("kept/checkpoints")).unwrap();
            let mut kept: Vec<_> = kept.map(|entry| entry.unwrap().path()).collect();
            kept.sort();
            fs::remove_dir_all(kept.pop().unwrap()).unwrap();
            assert!(!kept.is_empty());
            let alone = format!("{options} --batch-size 8 --checkpoint kept");
            let text = run(program, &alone, folder);
            assert!(text.contains("Going on after step"), "{text}");
            near(&losses(&text), &one, 1e-5, &text);
        }
    }

    /// Each strategy has the losses of whole models, is killed and goes on with other ranks and another strategy, and saves
    /// the same weights.
    #[test]
    fn dist_gpt_sharded() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let weights = |saved: &str| fs::read(folder.join(saved).join("model.safetensors")).unwrap();
        let run_two = |arguments: &str| {
            let two = format!("--nproc 2 {GPT} {SMALL_GPT} --epochs 2 --batch-size 8 {arguments}");
            run(launcher::brigade_beside(GPT), &format!("launch {two}"), folder)
        };
        let whole = run_two("--sharding none --save whole");
        for strategy in ["zero1", "zero2", "zero3", "hybrid=1"] {
            let text = run_two(&format!("--sharding {strategy} --save {strategy}"));
            near(&losses(&text), &losses(&whole), 1e-6, &text);
            near(&validation(&text), &validation(&whole), 1e-3, &text);
        }
        // The same bits: the strategies have the same shards, and norms of them.
        assert_eq!(weights("zero1"), weights("zero3"));
        assert_eq!(weights("zero2"), weights("zero3"));

        run_two("--sharding zero3 --checkpoint kept --checkpoint-every 2 --save last");
        let merge = "checkpoint merge kept merged.safetensors";
        let text = run(launcher::brigade_beside(GPT), merge, folder);
        assert!(text.contains("2 ranks as dp_shard 2"), "{text}");
        let load = |file: &str| brigade::nn::weights::load(folder.join(file)).unwrap();
        let (merged, last) = (load("merged.safetensors"), load("last/model.safetensors"));
        for (name, tensor) in last.iter() {
            assert_eq!(merged.get(name), Some(tensor), "{name}");
        }
        // Without the newest it goes on in the middle.
        let kept = fs::read_dir(folder.join("kept/checkpoints")).unwrap();
        let mut kept: Vec<_> = kept.map(|entry| entry.unwrap().path()).collect();
        kept.sort();
        fs::remove_dir_all(kept.pop().unwrap()).unwrap();
        assert!(!kept.is_empty());
        let one = "--epochs 2 --batch-size 16 --checkpoint kept --sharding zero2";
        let text = run(GPT, &format!("{SMALL_GPT} {one}"), folder);
        assert!(text.contains("Going on after step"), "{text}");
        near(&losses(&text), &losses(&whole), 1e-5, &text);
    }

    #[test]
    fn dist_glue_alone_again_and_on_two_processes() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let text = check(GLUE, SMALL_GLUE, folder, include_str!("golden/glue.json"));
        let [_, accuracy, f1] = validation(&text)[..] else { panic!("{text}") };
        assert!((0.0..=100.0).contains(&accuracy) && (0.0..=1.0).contains(&f1), "{text}");

        // What was saved is a model to begin with, for a table with classes of other names.
        fs::create_dir(folder.join("table")).unwrap();
        let rows = "sentence1,sentence2,label\nIt rains.,Rain falls.,equivalent\n\"It is dry, here.\",It \
                    rains.,not_equivalent\n";
        for file in ["train.csv", "validation.csv"] {
            fs::write(folder.join("table").join(file), rows).unwrap();
        }
        let tuned = "--data table --model saved --epochs 1 --save tuned --log-losses";
        let text = run(GLUE, tuned, folder);
        assert_eq!(losses(&text).len(), 1, "{text}");
        let config = fs::read_to_string(folder.join("tuned/config.json")).unwrap();
        assert!(config.contains("\"1\": \"equivalent\""), "{config}");

        // The corpus itself begins with a byte order mark, and has quotation marks that are the texts' own.
        fs::create_dir(folder.join("mrpc")).unwrap();
        let rows = "\u{feff}Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tHe said \"so.\tSo \
                    he said.\n0\t9\t10\tA 5\" nail.\tA \"screw\".\n";
        for file in ["msr_paraphrase_train.txt", "msr_paraphrase_test.txt"] {
            fs::write(folder.join("mrpc").join(file), rows).unwrap();
        }
        let text = run(GLUE, "--data mrpc --model tuned --epochs 1 --log-losses", folder);
        assert_eq!(losses(&text).len(), 1, "{text}");
    }
}

#[test]
fn mixed_precision_and_dropout_train() {
    let folder = tempfile::tempdir().unwrap();
    for (program, options) in [(GPT, SMALL_GPT), (GLUE, SMALL_GLUE)] {
        let options = options.replace("--dropout 0", "--dropout 0.1");
        let options = format!("{options} --epochs 1 --precision bf16");
        let [first, again] = [(); 2].map(|()| run(program, &options, folder.path()));
        assert!(losses(&first).iter().all(|loss| loss.is_finite()), "{first}");
        assert_eq!(losses(&first), losses(&again));
    }
}

#[test]
fn a_killed_run_goes_on_to_the_same_losses() {
    for (program, options) in [(GPT, SMALL_GPT), (GLUE, SMALL_GLUE)] {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let options = options.replace("--dropout 0", "--dropout 0.1");
        let options = format!("{options} --epochs 12 --batch-size 4 --accumulate 2 --save weights");
        let whole = run(program, &options, folder);
        let weights = || fs::read(folder.join("weights/model.safetensors")).unwrap();
        let unbroken = weights();

        // A checkpoint in the middle of the first epoch.
        let options = format!("{options} --checkpoint run --checkpoint-every 3");
        let mut child = command(program, &options, folder).stdout(Stdio::null()).spawn().unwrap();
        let checkpoints = folder.join("run/checkpoints");
        let complete = || {
            let mut entries = fs::read_dir(&checkpoints).into_iter().flatten().flatten();
            entries.any(|entry| entry.file_name().to_string_lossy().starts_with("checkpoint_"))
        };
        while !complete() {
            assert_eq!(child.try_wait().unwrap(), None, "it ended before its first checkpoint");
            sleep(Duration::from_millis(2));
        }
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().code(), None, "it ended before it was killed");
        let resumed = run(program, &options, folder);
        assert!(resumed.contains("Going on after step "), "{resumed}");
        assert_eq!(losses(&resumed), losses(&whole));
        assert_eq!(validation(&resumed), validation(&whole));
        assert!(weights() == unbroken, "bit for bit");

        // One that is done is not begun again.
        let done = run(program, &options, folder);
        assert!(!done.contains("validation loss"), "{done}");
        assert_eq!(losses(&done), losses(&whole));
    }
}

/// A host of two is lost: the other starts its ranks again, which go on from the shards of all four.
#[test]
fn a_sharded_job_goes_on_with_the_hosts_that_are_left() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let port = brigade_launch::StorePort::reserve(brigade_launch::Interfaces::Loopback).unwrap();
    let launch = format!(
        "launch --nnodes 1:2 --nproc 2 --rdzv-endpoint 127.0.0.1:{} --rdzv-conf last_call_timeout=0.2,join_interval=0 --max-restarts 3 \
         {GPT} {SMALL_GPT} --epochs 5 --batch-size 2 --sharding zero3 --checkpoint kept --checkpoint-every 3 --save last",
        port.number()
    );
    let start = || {
        let mut command = command(launcher::brigade_beside(GPT), &launch, folder);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    // The vocabulary and the tokens, which one process of each host makes: here both hosts have one folder.
    run(GPT, &format!("{SMALL_GPT} --epochs 1 --batch-size 16"), folder);
    let first = start();
    // The first serves the rendezvous, and the job ends with the host that serves it.
    while TcpStream::connect(("127.0.0.1", port.number())).is_err() {
        sleep(Duration::from_millis(2));
    }
    let mut second = start();
    // Of all four ranks, since the first host may have begun alone, and in its place.
    let complete = || {
        let entries = fs::read_dir(folder.join("kept/checkpoints")).into_iter().flatten().flatten();
        let whole = entries
            .filter(|entry| entry.file_name().to_string_lossy().starts_with("checkpoint_"))
            .map(|entry| fs::read(entry.path().join("manifest.json")).unwrap_or_default());
        let mut manifests = whole.map(|text| serde_json::from_slice::<serde_json::Value>(&text));
        manifests.any(|manifest| manifest.is_ok_and(|manifest| manifest["world_size"] == 4))
    };
    while !complete() {
        assert_eq!(second.try_wait().unwrap(), None, "it ended before its first checkpoint");
        sleep(Duration::from_millis(2));
    }
    second.kill().unwrap();
    second.wait().unwrap();
    let output = first.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}\n{}", said(&output));
    assert!(text.contains("Going on after step "), "{text}\n{}", said(&output));
    let losses = losses(&text);
    assert!(losses.iter().all(|loss| loss.is_finite()), "{text}");
    assert!(losses[losses.len() - 1] < losses[0], "{text}");
    let text =
        run(launcher::brigade_beside(GPT), "checkpoint merge kept merged.safetensors", folder);
    assert!(text.contains("2 ranks as dp_shard 2"), "{text}");
    let load = |file: &str| brigade::nn::weights::load(folder.join(file)).unwrap();
    let (merged, last) = (load("merged.safetensors"), load("last/model.safetensors"));
    for (name, tensor) in last.iter() {
        assert_eq!(merged.get(name), Some(tensor), "{name}");
    }
}

#[test]
fn wrong_use_is_answered_with_a_line() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for program in [GPT, GLUE] {
        assert!(refused(program, "--data absent", folder).contains("absent"));
        let wrong = command(program, "--epochs 0", folder).output().unwrap();
        assert_eq!(wrong.status.code(), Some(2), "{program}");
    }
    let gpt = |arguments: &str| refused(GPT, &format!("--generate 12 {arguments}"), folder);
    assert!(gpt("--vocabulary 100").contains("no room for the 256 bytes"));
    assert!(gpt("--vocabulary 300 --heads 3").contains("n_head 3 does not divide n_embd 128"));
    assert!(gpt("--vocabulary 300 --valid 2").contains("--valid 2 is not in [0, 1)"));
    let little = gpt("--vocabulary 300 --block-size 4000");
    assert!(little.contains("reviews-12.txt: too little text to"), "{little}");
    fs::write(folder.join("latin.txt"), b"Gr\xfc\xdfe\n").unwrap();
    assert!(refused(GPT, "--data latin.txt", folder).contains("latin.txt"));

    fs::create_dir(folder.join("pairs")).unwrap();
    let glue = || refused(GLUE, "--data pairs", folder);
    assert!(glue().contains("pairs has no train.tsv, .csv or .parquet"));
    fs::write(folder.join("pairs/train.csv"), "text,label\nIt rains.,1\n").unwrap();
    assert!(glue().contains("sentence1"));
    let table = |rows: &str| format!("sentence1,sentence2,label\n{rows}");
    fs::write(folder.join("pairs/train.csv"), table("a,b,1\nc,d,1\n")).unwrap();
    fs::write(folder.join("pairs/dev.csv"), table("a,b,2\n")).unwrap();
    assert!(glue().contains("are of one class"));
    fs::write(folder.join("pairs/train.csv"), table("a,b,1\nc,d,0\n")).unwrap();
    assert!(glue().contains("the class 2 is none of 0, 1"));
    assert!(refused(GLUE, "--generate 9 --model absent", folder).contains("absent"));
}
