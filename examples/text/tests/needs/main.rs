//! `text_generate` with less memory than its model has, which the kernel enforces.

#![allow(clippy::unwrap_used)] // clippy knows only functions marked as tests

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use brigade::checkpoint::TensorInfo;
use brigade::checkpoint::safetensors::layout;
use brigade::models::{Gpt2LmHead, Gpt2Options, Transformer};
use brigade::nn::Model;
use brigade::nn::weights::info_of;
use brigade_test_hosts::MemoryGroup;
use brigade_test_needs::needs;

brigade_test_needs::main!();

/// Writes a GPT-2 of 2 GB as a folder of Hugging Face's, with the tokenizer of a model that `text_gpt` has trained. Its
/// weights are zeros in a file without blocks on the disk: they take memory once they are read.
fn write_model(folder: &Path, vocab_size: i64) {
    let options = Gpt2Options {
        vocab_size,
        n_positions: 32,
        n_embd: 1024,
        n_head: 16,
        n_layer: 40,
        ..Default::default()
    };
    let model = Model::deferred(|path| Gpt2LmHead::new(path, &options)).unwrap();
    Gpt2LmHead::save_config(&model, folder).unwrap();
    let path = folder.join("model.safetensors");
    let infos: Vec<(String, TensorInfo)> = model
        .parameters()
        .into_iter()
        .map(|it| (it.name.clone(), info_of(&it.name, &it.tensor, &path).unwrap()))
        .collect();
    let infos: Vec<_> = infos.iter().map(|(name, info)| (name.as_str(), info.clone())).collect();
    let layout = layout(&path, &infos).unwrap();
    assert!(layout.bytes > 2_000_000_000, "{} bytes", layout.bytes);
    let mut file = File::create(&path).unwrap();
    file.write_all(&layout.header).unwrap();
    file.set_len(layout.bytes).unwrap();
}

/// Runs a program in a control group with this much memory, if one is given.
fn run(program: &str, arguments: &str, folder: &Path, memory: Option<u64>) -> Output {
    let group = memory.map(|bytes| {
        let group = MemoryGroup::new();
        group.cap(bytes);
        group
    });
    let mut command = match &group {
        Some(group) => {
            let mut shell = Command::new("sh");
            shell.args(["-c", &group.script(), program]);
            shell
        }
        None => Command::new(program),
    };
    command.args(arguments.split(' ')).current_dir(folder).stdin(Stdio::null());
    command.env("OMP_NUM_THREADS", "2").env("RUST_BACKTRACE", "0");
    command.output().unwrap()
}

#[needs(MemoryGroups)]
fn a_model_of_2_gb_writes_text_with_600_mb() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let train = "--generate 12 --vocabulary 300 --block-size 32 --layers 1 --heads 2 --width 16 --epochs 1 --save small";
    let trained = run(env!("CARGO_BIN_EXE_text_gpt"), train, folder, None);
    assert!(trained.status.success(), "{}", String::from_utf8_lossy(&trained.stderr));
    let small = Gpt2LmHead::from_pretrained(folder.join("small")).unwrap();
    let large = folder.join("large");
    write_model(&large, small.module().options().vocab_size);
    fs::copy(folder.join("small/tokenizer.json"), large.join("tokenizer.json")).unwrap();

    let generate = |limits: &str| {
        let arguments = format!("large --cpu --prompt a --max-new-tokens 2 --max-memory {limits}");
        run(env!("CARGO_BIN_EXE_text_generate"), &arguments, folder, Some(600_000_000))
    };
    let written = generate("cpu=200M,disk=");
    let said = String::from_utf8_lossy(&written.stderr);
    let text = String::from_utf8_lossy(&written.stdout);
    assert!(written.status.success(), "{}\n{text}\n{said}", written.status);
    assert!(text.contains(" tokens in "), "{text}");
    // With a device map that claims the memory of the machine, the kernel kills it.
    let killed = generate("cpu=3G");
    assert_eq!(killed.status.signal(), Some(9), "{}", String::from_utf8_lossy(&killed.stdout));
}
