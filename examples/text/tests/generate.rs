//! `text_generate` as a user starts it: with a model that `text_gpt` has saved.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const GPT: &str = env!("CARGO_BIN_EXE_text_gpt");
const GENERATE: &str = env!("CARGO_BIN_EXE_text_generate");

fn output(program: &str, arguments: &[&str], folder: &Path) -> Output {
    let mut command = Command::new(program);
    command.args(arguments).current_dir(folder);
    command.env("OMP_NUM_THREADS", "1").env("RUST_BACKTRACE", "0").stdin(Stdio::null());
    command.output().unwrap()
}

#[track_caller]
fn run(program: &str, arguments: &[&str], folder: &Path) -> String {
    let output = output(program, arguments, folder);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}\n{said}", output.status);
    text
}

/// The lines of texts, and the number of tokens that the last line tells.
fn texts(printed: &str) -> (Vec<&str>, usize) {
    let mut lines: Vec<&str> = printed.lines().collect();
    let last = lines.pop().unwrap();
    assert!(last.ends_with("tokens/s"), "{printed}");
    (lines, last.split(' ').next().unwrap().parse().unwrap())
}

#[test]
fn text_goes_on_from_prompts() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let train = "--generate 12 --vocabulary 300 --block-size 64 --layers 1 --heads 2 --width 16 --dropout 0 --epochs 1 \
                 --lr 1e-2 --save saved";
    run(GPT, &train.split(' ').collect::<Vec<_>>(), folder);
    let generate = |arguments: &[&str]| {
        run(GENERATE, &[&["saved", "--cpu", "--max-new-tokens", "12"], arguments].concat(), folder)
    };

    let alone = generate(&["--prompt", "The story"]);
    let (_, written) = texts(&alone);
    assert!(alone.starts_with("The story"), "{alone}");
    assert!((1..=12).contains(&written), "{alone}");
    let text = alone.rsplit_once('\n').unwrap().0.rsplit_once('\n').unwrap().0.to_owned();

    // Among others of other lengths, and from a file; with a prompt in pieces.
    fs::write(folder.join("prompts"), "It was a good film, and a long one.\n\nThe story\n")
        .unwrap();
    let several = generate(&["--prompts", "prompts", "--prefill-chunk", "3"]);
    assert!(several.contains(&format!("\n{text}\n")), "{several}\n{text}");
    assert!(several.starts_with("It was a good film, and a long one."), "{several}");

    // Two of four beams, the best one first.
    let beams = generate(&["--prompt", "The story", "--beams", "4", "--texts", "2"]);
    let scores: Vec<f64> = beams
        .lines()
        .filter_map(|line| line.strip_prefix('[')?.split_once("] The story")?.0.parse().ok())
        .collect();
    assert!(scores.len() == 2 && scores[0] >= scores[1], "{beams}");

    let sampled = ["--prompt", "The story", "--sample", "--top-k", "40", "--seed", "7"];
    let [first, again] = [(); 2].map(|()| generate(&sampled));
    assert_eq!(
        first.rsplit_once(" tokens in").unwrap().0,
        again.rsplit_once(" tokens in").unwrap().0
    );
    let [bf16] = [generate(&["--prompt", "The story", "--dtype", "bf16"])];
    assert!(bf16.starts_with("The story"), "{bf16}");

    // The first characters that are written end the text.
    let stop: String = text["The story".len()..].chars().take(2).collect();
    let stopped = generate(&["--prompt", "The story", "--stop", &stop]);
    let (_, fewer) = texts(&stopped);
    assert!(fewer <= 2 && stopped.contains(&stop), "{stop:?}: {stopped}");

    // With the block on the disk the same text, and the map behind it.
    let of_file = ["--prompt", "The story", "--dtype", "fp32"];
    let mapped = generate(&[&of_file[..], &["--max-memory", "cpu=34K"]].concat());
    assert!(mapped.starts_with(&text), "{mapped}\n{text}");
    assert!(mapped.contains("disk") && mapped.contains("for each token"), "{mapped}");
    let roomy =
        generate(&[&of_file[..], &["--max-memory", "cpu=1G,disk=", "--rule", "fill"]].concat());
    assert!(roomy.starts_with(&text) && !roomy.contains("for each token"), "{roomy}");
    let int8 = generate(&["--prompt", "The story", "--weights", "int8"]);
    assert!(int8.starts_with("The story"), "{int8}");

    // The loss of a text in windows of any length, the last of which is shorter.
    fs::write(folder.join("text"), "It was a good film, and a long one.\n".repeat(9)).unwrap();
    let loss = |arguments: &[&str]| {
        let printed = run(
            GENERATE,
            &[&["saved", "--cpu", "--perplexity", "text"], arguments].concat(),
            folder,
        );
        let (_, loss) = printed.split_once("loss = ").unwrap();
        loss.split_once(',').unwrap().0.parse::<f64>().unwrap()
    };
    let whole = loss(&[]);
    assert!((1.0..8.0).contains(&whole), "{whole}");
    assert!((loss(&["--weights", "int8"]) - whole).abs() < 0.1, "{whole}");
    assert!((loss(&["--max-memory", "cpu=34K"]) - whole).abs() < 0.001, "{whole}");
    assert!(loss(&["--context", "5"]) != whole);

    let refused = |arguments: &[&str]| {
        let output = output(GENERATE, arguments, folder);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && !said.contains("panicked"), "{said}");
        said
    };
    let long = "a story ".repeat(80);
    assert!(refused(&["saved", "--cpu", "--prompt", &long]).contains("64 positions, found"));
    assert!(refused(&["nowhere", "--prompt", "a"]).contains("nowhere/config.json"));
    assert!(refused(&["saved"]).contains("--prompt"));
    let limited = |limits: &str| refused(&["saved", "--prompt", "a", "--max-memory", limits]);
    assert!(limited("cpu").contains("is not DEVICE=BYTES"), "{}", limited("cpu"));
    assert!(limited("cpu=1K").contains("at least"), "{}", limited("cpu=1K"));
    assert!(limited("tpu=1G").contains("tpu"), "{}", limited("tpu=1G"));
    let int3 = refused(&["saved", "--prompt", "a", "--weights", "int3"]);
    assert!(int3.contains("int3"), "{int3}");
    fs::write(folder.join("prompts"), "\n").unwrap();
    assert!(refused(&["saved", "--cpu", "--prompts", "prompts"]).contains("no line with a prompt"));
    fs::create_dir(folder.join("bert")).unwrap();
    fs::write(folder.join("bert/config.json"), r#"{"model_type":"bert"}"#).unwrap();
    assert!(refused(&["bert", "--prompt", "a"]).contains("model_type bert"));
}
