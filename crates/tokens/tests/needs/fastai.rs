//! fastai and spaCy themselves, on this machine: random texts give the same tokens, and the tables are theirs.
//!
//! `cargo test -p brigade-tokens --test needs -- --part fastai::full` takes many more texts.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use brigade_test_needs::{Need, needs};
use brigade_tokens::rules::{Rule, decode_special_tokens};
use brigade_tokens::{English, FastaiTokenizer, Result, TokenList, Tokenizer};
use serde::{Deserialize, Serialize};

use crate::random_texts::RandomTexts;

#[needs(Fastai)]
fn random_texts_have_fastais_tokens() {
    compare(2_000);
}

#[brigade_test_needs::part]
fn full() {
    compare(200_000);
}

/// Special cases of one's own: with spaces, with affixes, in place of another.
const SPECIAL_CASES: [&[&str]; 7] = [
    &["foo bar"],
    &["foo", "  ", "bar"],
    &["(", "x)"],
    &["a-", "b."],
    &["don't"],
    &["no", " ", "no"],
    &["gim", "me"],
];

/// The version of Python's tables, as the answers begin with it.
const UNICODE: &str = "14.0.0";

#[derive(Serialize)]
struct Task<'a> {
    special_cases: &'a [&'a [&'a str]],
    texts: &'a [String],
}

#[derive(Deserialize)]
struct Answer {
    rules: Vec<String>,
    english: Vec<String>,
    with_special_cases: Vec<String>,
    tokens: Vec<String>,
    decoded: Vec<String>,
}

fn compare(count: usize) {
    let mut random = RandomTexts::new(brigade_test_needs::random());
    let texts: Vec<String> = (0..count).map(|_| random.text()).collect();
    let folder = tempfile::tempdir().unwrap();
    let task = folder.path().join("task.json");
    let task_text =
        serde_json::to_string(&Task { special_cases: &SPECIAL_CASES, texts: &texts }).unwrap();
    fs::write(&task, task_text).unwrap();
    python("tokenize_texts.py", &task);

    let english = English::new();
    let with_special_cases =
        English::new().with_special_cases(SPECIAL_CASES.map(|it| it.iter().copied())).unwrap();
    let fastai = FastaiTokenizer::new();
    let mut rules = Rule::defaults();
    rules.extend(Rule::post_defaults());
    rules.push(Rule::Lowercase { add_bos: false, add_eos: true });
    let answers = fs::read_to_string(folder.path().join("answers.jsonl")).unwrap();
    let mut differences = 0;
    let mut answers = answers.lines();
    let same_unicode = answers.next() == Some(UNICODE);
    let answers: Vec<&str> = answers.collect();
    assert_eq!(answers.len(), texts.len());
    for (text, answer) in texts.iter().zip(answers) {
        // Another version of Python has other characters in its tables.
        if !same_unicode && !random.is_known(text) {
            continue;
        }
        let answer: Answer = serde_json::from_str(answer).unwrap();
        for (rule, theirs) in rules.iter().zip(&answer.rules) {
            let ours = rule.apply(text);
            if ours != *theirs {
                differences += 1;
                eprintln!("{rule:?} of {text:?}:\n  ours   {ours:?}\n  theirs {theirs:?}");
            }
        }
        let mut equal = |what: &str, ours: Result<TokenList>, theirs: &[String]| {
            let ours = ours.unwrap();
            if !ours.iter().eq(theirs) {
                differences += 1;
                eprintln!("{what} of {text:?}:\n  ours   {ours:?}\n  theirs {theirs:?}");
            }
        };
        equal("English", tokens(&english, text), &answer.english);
        equal(
            "English with special cases",
            tokens(&with_special_cases, text),
            &answer.with_special_cases,
        );
        equal("fastai", tokens(&fastai, text), &answer.tokens);
        let decoded = tokens(&fastai, text).and_then(|it| decode_special_tokens(&it));
        equal("decoded", decoded, &answer.decoded);
        assert_eq!(answer.rules.len(), rules.len());
        assert!(differences < 20, "more than these are different");
    }
    assert_eq!(differences, 0, "of {count} texts");
}

fn tokens(tokenizer: &dyn Tokenizer, text: &str) -> Result<TokenList> {
    let mut tokens = TokenList::new();
    tokenizer.tokenize(text, &mut tokens)?;
    Ok(tokens)
}

#[needs(Fastai)]
fn the_tables_are_spacys() {
    let folder = tempfile::tempdir().unwrap();
    python("tables.py", folder.path());
    let own = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src");
    for file in ["english/characters.txt", "english/exceptions.txt", "rules/entities.txt"] {
        let [ours, theirs] =
            [&own, folder.path()].map(|it| fs::read_to_string(it.join(file)).unwrap());
        // The comments name versions. Python's own classes come first, and depend on its version.
        let same_python =
            [&ours, &theirs].map(|it| it.lines().find(|line| line.contains(", Unicode ")));
        let first = if same_python[0] == same_python[1] { "" } else { "alpha:" };
        let [ours, theirs] = [&ours, &theirs].map(|text| {
            let lines = text.lines().filter(|line| !line.starts_with('#'));
            lines.skip_while(|line| !line.starts_with(first)).collect::<Vec<_>>()
        });
        let different = ours.iter().zip(&theirs).find(|(ours, theirs)| ours != theirs);
        assert_eq!(different, None, "{file}");
        assert_eq!(ours.len(), theirs.len(), "{file}");
        assert!(ours.len() > 100, "{file}");
    }
}

fn python(script: &str, argument: &Path) {
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fastai").join(script);
    let python = brigade_test_needs::python(Need::Fastai).unwrap();
    let output = Command::new(python).arg(script).arg(argument).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
