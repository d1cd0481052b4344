//! Vocabularies against fastai's, and in files.

use std::fs;
use std::path::Path;

use brigade_tokens::{Error, TokenCounts, TokenList, Vocabulary, VocabularyOptions};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    corpus: Vec<Vec<String>>,
    cases: Vec<Case>,
    padded_length: PaddedLength,
}

#[derive(Deserialize)]
struct Case {
    args: Args,
    vocab: Vec<String>,
    tokens: Vec<String>,
    ids: Vec<u32>,
    decoded: Vec<String>,
    ids_when_vocab_is_given: Vec<u32>,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Args {
    min_freq: Option<u64>,
    max_vocab: Option<usize>,
    special_toks: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct PaddedLength {
    cases: Vec<[usize; 2]>,
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("../golden/vocabulary.json")).unwrap()
}

fn list(tokens: &[String]) -> TokenList {
    tokens.iter().map(String::as_str).collect()
}

fn counted(corpus: &[Vec<String>]) -> TokenCounts {
    let mut counts = TokenCounts::new();
    for (text, tokens) in corpus.iter().enumerate() {
        counts.add(text as u64, list(tokens).iter());
    }
    counts
}

#[test]
fn vocabularies_are_fastais() {
    let golden = golden();
    let counts = counted(&golden.corpus);
    for case in &golden.cases {
        let mut options = VocabularyOptions::new();
        if let Some(times) = case.args.min_freq {
            options = options.min_freq(times);
        }
        if let Some(size) = case.args.max_vocab {
            options = options.max_size(size);
        }
        if let Some(tokens) = &case.args.special_toks {
            options = options.special_tokens(tokens.clone());
        }
        // fastai's unknown token is the first one, whatever it is.
        let first = |vocabulary: Vocabulary| vocabulary.with_unknown(&case.vocab[0]).unwrap();
        let vocabulary = first(options.build(&counts));
        assert_eq!(vocabulary.tokens().collect::<Vec<_>>(), case.vocab);
        let ids = vocabulary.ids(&list(&case.tokens)).unwrap();
        assert_eq!(ids, case.ids, "{:?}", case.vocab);
        assert_eq!(vocabulary.tokens_of(&ids).unwrap().collect::<Vec<_>>(), case.decoded);
        let given = first(Vocabulary::new(case.vocab.iter().map(String::as_str)).unwrap());
        assert_eq!(given.ids(&list(&case.tokens)).unwrap(), case.ids_when_vocab_is_given);
    }
    assert_eq!(golden.cases.len(), 10);
}

#[test]
fn lengths_are_filled_up_as_fastais() {
    for [different, length] in golden().padded_length.cases {
        let words: Vec<String> = (0..different).map(|number| format!("w{number}")).collect();
        let vocabulary = VocabularyOptions::new().min_freq(1).build(&counted(&[words]));
        assert_eq!(vocabulary.len(), length);
    }
}

#[test]
fn counts_do_not_depend_on_who_counted_what() {
    let corpus = golden().corpus;
    let whole = counted(&corpus);
    for parts in 1..5 {
        let mut all = TokenCounts::new();
        // The last part first.
        for part in (0..parts).rev() {
            let mut counts = TokenCounts::new();
            for (text, tokens) in corpus.iter().enumerate().filter(|(text, _)| text % parts == part)
            {
                counts.add(text as u64, tokens.iter().map(String::as_str));
            }
            all.merge(counts);
        }
        assert_eq!(all, whole);
        assert_eq!(all.most_common(), whole.most_common());
    }
    assert_eq!((whole.get("the"), whole.get("nothing"), whole.is_empty()), (6, 0, false));
}

#[test]
fn a_token_without_a_number_is_an_error_or_the_unknown_token() {
    let vocabulary = Vocabulary::new(["a", "b"]).unwrap();
    let error = vocabulary.ids(&["b", "c"].into_iter().collect()).unwrap_err();
    assert!(matches!(&error, Error::UnknownToken { token } if token == "c"), "{error}");
    let error = vocabulary.clone().with_unknown("c").unwrap_err().to_string();
    assert_eq!(error, "\"c\" cannot be the unknown token: the vocabulary does not have it");
    let vocabulary = vocabulary.with_unknown("a").unwrap();
    assert_eq!(vocabulary.ids(&["b", "c"].into_iter().collect()).unwrap(), [1, 0]);
    let error = vocabulary.tokens_of(&[0, 2]).map(|tokens| tokens.count()).unwrap_err();
    assert_eq!(error.to_string(), "the vocabulary of 2 tokens has none with number 2");
}

#[test]
fn a_vocabulary_comes_back_from_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vocabulary.json");
    let made = VocabularyOptions::new().min_freq(1).build(&counted(&golden().corpus));
    let odd = Vocabulary::new(["a\n\"", "", "▁é", "a\n\""]).unwrap().with_unknown("▁é").unwrap();
    for vocabulary in [made, odd, Vocabulary::new::<&str>([]).unwrap()] {
        vocabulary.save(&path).unwrap();
        let read = Vocabulary::load(&path).unwrap();
        assert_eq!(read, vocabulary);
        assert_eq!(read.id("xxfake"), vocabulary.id("xxfake"));
        assert_eq!(read.id("a\n\""), vocabulary.id("a\n\""));
    }
    // Only the file is left, with the permissions of the user's other files.
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    let other = folder.path().join("other");
    fs::write(&other, "").unwrap();
    let permissions = |path| fs::metadata(path).unwrap().permissions();
    assert_eq!(permissions(&path), permissions(&other));
}

#[test]
fn files_that_are_no_vocabulary_say_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("v.json");
    let table: [(&[u8], &str); 8] = [
        (b"", "the vocabulary is empty"),
        (b"[\"a\"", "is not JSON"),
        (b"[1, 2]", "neither a vocabulary nor a list of tokens"),
        (b"{\"tokens\": [\"a\"]}", "neither a vocabulary nor a list of tokens"),
        (b"[\"\xff\"]", "is not JSON"),
        (
            br#"{"format":"x","version":1,"unknown":null,"filled":false,"tokens":[]}"#,
            "its format is \"x\", expected \"brigade-vocabulary\"",
        ),
        (
            br#"{"format":"brigade-vocabulary","version":2,"unknown":null,"filled":false,"tokens":[]}"#,
            "of version 2, this program reads version 1; update Brigade",
        ),
        (
            br#"{"format":"brigade-vocabulary","version":1,"unknown":3,"filled":false,"tokens":["a"]}"#,
            "its unknown token has number 3, and it has 1 token",
        ),
    ];
    for (bytes, expected) in table {
        fs::write(&path, bytes).unwrap();
        let error = Vocabulary::load(&path).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(error.contains("v.json is damaged or in another format"), "{error}");
    }
    fs::write(&path, "[\"xxunk\", \"a\"]").unwrap();
    let plain = Vocabulary::load(&path).unwrap();
    assert_eq!((plain.id("a"), plain.unknown()), (Some(1), Some(0)));
    let error = Vocabulary::load(folder.path().join("none.json")).unwrap_err().to_string();
    assert!(error.ends_with("none.json: No such file or directory (os error 2)"), "{error}");
}

#[test]
fn pickled_lists_are_read_without_being_executed() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pickles");
    let load = |name: &str| Vocabulary::load(folder.join(format!("{name}.pkl")));
    let mut words: Vec<String> =
        ["xxunk", "xxpad", "the", "é", "▁", "xxfake", "xxfake"].map(str::to_owned).into();
    words.extend((0..300).map(|number| format!("w{number}")));
    for name in ["list_2", "list_3", "list_4", "list_5", "fastcore_2", "fastcore_4"] {
        let vocabulary = load(name).unwrap();
        assert_eq!(vocabulary.tokens().collect::<Vec<_>>(), words, "{name}");
        // As fastai with a vocabulary that is passed in: the last of equal tokens.
        assert_eq!((vocabulary.id("xxfake"), vocabulary.unknown()), (Some(6), Some(0)));
    }
    assert_eq!(load("long").unwrap().token(0).unwrap().len(), 300);
    assert_eq!(load("tuple").unwrap().id("b"), Some(1));
    assert!(load("empty").unwrap().is_empty());
    for (name, expected) in [
        ("protocol_0", "its pickle uses instruction 0x"),
        ("numbers", "its pickle is not a list of strings"),
        ("dictionary", "its pickle is not a list of strings"),
        ("runs", "its pickle refers to `posix.system`, which a list of strings does not need"),
    ] {
        let error = load(name).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains(&format!("{name}.pkl")), "{error}");
    }
    let temporary = tempfile::tempdir().unwrap();
    let path = temporary.path().join("cut.pkl");
    let whole = fs::read(folder.join("list_4.pkl")).unwrap();
    fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    let error = Vocabulary::load(&path).unwrap_err().to_string();
    assert!(error.contains("cut.pkl is damaged: a record ends too early"), "{error}");
}
