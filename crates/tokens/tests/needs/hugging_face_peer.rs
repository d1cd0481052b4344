//! Python's `tokenizers`, on this machine: random texts have the same encodings, and it reads what is trained here.

use std::collections::HashMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use brigade_test_needs::{Need, needs};
use brigade_tokens::{BpeTrainer, HuggingFaceTokenizer, TextSource};
use serde::Deserialize;

use crate::random_texts::RandomTexts;

#[derive(Deserialize)]
struct Expected {
    ids: Vec<u32>,
    offsets: Vec<[usize; 2]>,
    word_ids: Vec<Option<u32>>,
}

/// What Python makes of texts with each `tokenizer.json` of a folder: encoding and decoded text.
fn python(folder: &Path, texts: &[String]) -> HashMap<String, Vec<(Option<Expected>, String)>> {
    let mut child = Command::new(brigade_test_needs::python(Need::TorchModels).unwrap())
        .arg(own_folder().join("make.py"))
        .arg("--encode")
        .arg(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let json = serde_json::to_vec(texts).unwrap();
    child.stdin.take().unwrap().write_all(&json).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    serde_json::from_slice(&output.stdout).unwrap()
}

fn own_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hugging_face")
}

fn compare(folder: &Path, kinds: usize, texts: &[String]) {
    let answers = python(folder, texts);
    assert_eq!(answers.len(), kinds);
    for (name, answers) in answers {
        let tokenizer = HuggingFaceTokenizer::load(folder.join(format!("{name}.json"))).unwrap();
        for (text, (expected, decoded)) in texts.iter().zip(answers) {
            let encoding = tokenizer.encode(text).unwrap();
            let expected = expected.unwrap();
            let offsets: Vec<[usize; 2]> =
                encoding.offsets.iter().map(|range| [range.start, range.end]).collect();
            assert_eq!(encoding.ids, expected.ids, "{name} {text:?}");
            assert_eq!(offsets, expected.offsets, "{name} {text:?}");
            assert_eq!(encoding.word_ids, expected.word_ids, "{name} {text:?}");
            assert_eq!(tokenizer.decode(&encoding.ids, true).unwrap(), decoded, "{name} {text:?}");
        }
    }
}

fn texts(count: usize) -> Vec<String> {
    let mut random = RandomTexts::new(brigade_test_needs::random());
    (0..count).map(|_| random.text()).collect()
}

#[needs(TorchModels)]
fn random_texts_have_pythons_encodings() {
    compare(&own_folder(), 4, &texts(500));
}

#[needs(TorchModels)]
fn python_reads_what_is_trained_here() {
    let folder = tempfile::tempdir().unwrap();
    let texts = texts(500);
    let source = TextSource::memory(texts.clone()).unwrap();
    let trained = BpeTrainer::new(1000).special_tokens(["<s>", "</s>"]).train(&source).unwrap();
    trained.save(folder.path().join("saved")).unwrap();
    let name = folder.path().join("trained.json");
    std::fs::copy(folder.path().join("saved/tokenizer.json"), name).unwrap();
    compare(folder.path(), 1, &texts);
}
