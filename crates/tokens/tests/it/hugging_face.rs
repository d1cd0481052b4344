//! Tokenizers of Hugging Face's against what Python's `tokenizers` says (`tests/hugging_face/make.py`).

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use brigade_tokens::{
    BpeTrainer, Encoding, Error, HuggingFaceTokenizer, ParallelOptions, Result, Side, SpecialToken,
    TextSource, TokenCorpus, TokenList, Tokenizer, Truncation, TruncationStrategy,
};
use serde::Deserialize;

#[derive(Deserialize)]
struct Expected {
    name: String,
    vocab_size: usize,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    texts: Vec<String>,
    cut: Option<(usize, String, String)>,
    encoding: Option<ExpectedEncoding>,
    plain_ids: Option<Vec<u32>>,
    decoded: Option<String>,
    decoded_with_special: Option<String>,
}

#[derive(Deserialize)]
struct ExpectedEncoding {
    ids: Vec<u32>,
    type_ids: Vec<u32>,
    attention_mask: Vec<u32>,
    special_tokens_mask: Vec<u32>,
    offsets: Vec<[usize; 2]>,
    word_ids: Vec<Option<u32>>,
    sequence_ids: Vec<Option<usize>>,
    tokens: Vec<String>,
}

impl From<ExpectedEncoding> for Encoding {
    fn from(expected: ExpectedEncoding) -> Self {
        let range = |[start, end]: [usize; 2]| Range { start, end };
        Self {
            ids: expected.ids,
            type_ids: expected.type_ids,
            attention_mask: expected.attention_mask,
            special_tokens_mask: expected.special_tokens_mask,
            offsets: expected.offsets.into_iter().map(range).collect(),
            word_ids: expected.word_ids,
            sequence_ids: expected.sequence_ids,
            tokens: expected.tokens,
        }
    }
}

const KINDS: [&str; 4] = ["byte_level", "byte_fallback", "word_piece", "unigram"];

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hugging_face").join(format!("{name}.json"))
}

fn tokenizer(name: &str) -> HuggingFaceTokenizer {
    HuggingFaceTokenizer::load(file(name)).unwrap()
}

fn expected() -> (Vec<String>, Vec<Expected>) {
    #[derive(Deserialize)]
    struct Corpus {
        corpus: Vec<String>,
    }
    let mut lines = include_str!("../hugging_face/expected/encodings.jsonl").lines();
    let corpus: Corpus = serde_json::from_str(lines.next().unwrap()).unwrap();
    (corpus.corpus, lines.map(|line| serde_json::from_str(line).unwrap()).collect())
}

fn truncation((length, strategy, side): &(usize, String, String)) -> Truncation {
    let strategy = match strategy.as_str() {
        "longest_first" => TruncationStrategy::LongestFirst,
        "only_first" => TruncationStrategy::OnlyFirst,
        _ => TruncationStrategy::OnlySecond,
    };
    let side = if side == "left" { Side::Left } else { Side::Right };
    Truncation::new(*length).strategy(strategy).side(side)
}

#[test]
fn encodings_are_pythons() {
    let mut refused = 0;
    for Expected { name, vocab_size, cases } in expected().1 {
        let whole = tokenizer(&name);
        assert_eq!(whole.vocab_size(), vocab_size);
        for case in cases {
            let cut = case.cut.as_ref().map(truncation);
            let tokenizer = match cut {
                Some(cut) => whole.clone().with_truncation(cut).unwrap(),
                None => whole.clone(),
            };
            let encoding = match case.texts.as_slice() {
                [text] => tokenizer.encode(text),
                [first, second] => tokenizer.encode_pair(first, second),
                _ => unreachable!(),
            };
            let Some(expected) = case.encoding else {
                let error = encoding.unwrap_err();
                assert!(matches!(error, Error::Refused(_)), "{name} {:?}: {error}", case.texts);
                refused += 1;
                continue;
            };
            let expected = Encoding::from(expected);
            assert_eq!(encoding.unwrap(), expected, "{name} {:?} {cut:?}", case.texts);
            if let [text] = case.texts.as_slice() {
                assert_eq!(tokenizer.ids(text).unwrap(), expected.ids);
                let mut tokens = TokenList::new();
                tokenizer.tokenize(text, &mut tokens).unwrap();
                let ids = tokens.iter().map(|token| tokenizer.id(token).unwrap());
                assert_eq!(ids.collect::<Vec<_>>(), expected.ids);
                if let Some(plain) = case.plain_ids {
                    assert_eq!(
                        tokenizer.clone().with_special_tokens(false).ids(text).unwrap(),
                        plain
                    );
                }
            }
            for (decoded, skip) in [(case.decoded, true), (case.decoded_with_special, false)] {
                if let Some(decoded) = decoded {
                    assert_eq!(tokenizer.decode(&expected.ids, skip).unwrap(), decoded);
                }
            }
        }
    }
    assert!(refused > 20, "{refused}");
}

#[test]
fn tokens_of_a_corpus_get_the_ids_of_the_model() {
    let (corpus, _) = expected();
    let source =
        TextSource::memory(corpus.iter().map(|text| format!("{text} \u{1f600}æ"))).unwrap();
    for name in KINDS {
        let tokenizer = tokenizer(name);
        let corpus = TokenCorpus::in_memory(&tokenizer, &source, ParallelOptions::new()).unwrap();
        let ids = corpus.ids(&tokenizer.vocabulary().unwrap()).unwrap();
        for text in 0..source.len() {
            let mut read = Vec::new();
            ids.read(text, 0..ids.length(text).unwrap(), &mut read).unwrap();
            let expected = tokenizer.ids(&source.text(text).unwrap()).unwrap();
            assert_eq!(read, expected.into_iter().map(i64::from).collect::<Vec<_>>(), "{name}");
        }
    }
}

#[test]
fn sources_are_encoded_in_order_with_pairs() {
    let tokenizer = tokenizer("word_piece");
    let pairs: Vec<[String; 2]> =
        (0..3000).map(|n| [format!("film {n}"), format!("the people of {n}")]).collect();
    let source = TextSource::rows(pairs.clone()).unwrap();
    let mut seen = 0;
    tokenizer
        .encode_all(&source, ParallelOptions::new().threads(3), |index, encoding| {
            let [first, second] = &pairs[index];
            assert_eq!(encoding, tokenizer.encode_pair(first, second)?);
            assert_eq!(index, seen);
            seen += 1;
            Ok(())
        })
        .unwrap();
    assert_eq!(seen, 3000);
    let triples = TextSource::rows([["a", "b", "c"]]).unwrap();
    let error = tokenizer.encode_all(&triples, ParallelOptions::new(), |_, _| Ok(())).unwrap_err();
    assert_eq!(
        error.to_string(),
        "text 0: a text of 3 fields cannot be encoded; give one, or two for a pair"
    );
}

#[test]
fn special_tokens_come_from_the_settings_or_their_names() {
    let ids =
        |tokenizer: &HuggingFaceTokenizer| SpecialToken::ALL.map(|it| tokenizer.special_id(it));
    let bert = tokenizer("word_piece");
    assert_eq!(ids(&bert), [None, None, Some(1), Some(3), Some(0), Some(2), Some(4)]);
    assert_eq!(bert.special_ids(), [0, 1, 2, 3, 4]);
    assert_eq!((bert.max_length(), bert.padding_side()), (None, Side::Right));
    let gpt = tokenizer("byte_level");
    assert_eq!(ids(&gpt), [Some(0), Some(0), None, None, None, None, None]);
    let t5 = tokenizer("unigram");
    assert_eq!(ids(&t5), [None, Some(1), Some(2), None, Some(0), None, None]);

    let folder = tempfile::tempdir().unwrap();
    fs::copy(file("word_piece"), folder.path().join("tokenizer.json")).unwrap();
    fs::write(
        folder.path().join("special_tokens_map.json"),
        r#"{"pad_token": "[MASK]", "bos_token": {"content": "[CLS]"}}"#,
    )
    .unwrap();
    let special = HuggingFaceTokenizer::load(folder.path()).unwrap();
    assert_eq!(ids(&special), [Some(2), None, Some(1), Some(3), Some(4), Some(2), Some(4)]);
    let config = r#"{"pad_token": "[NEW]", "eos_token": null, "model_max_length": 512, "padding_side": "left"}"#;
    fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
    let configured = HuggingFaceTokenizer::load(folder.path()).unwrap();
    assert_eq!(configured.special_id(SpecialToken::Padding), Some(267));
    assert_eq!(configured.token(267).unwrap(), "[NEW]");
    assert_eq!((configured.max_length(), configured.padding_side()), (Some(512), Side::Left));
    assert_ne!(configured.describe(), special.describe());
    assert_ne!(configured.describe(), configured.clone().with_special_tokens(false).describe());
    let cut = configured.clone().with_truncation(Truncation::new(10)).unwrap();
    assert_ne!(cut.describe(), configured.describe());

    // A saved tokenizer is the same again, without the settings for truncation.
    let saved = folder.path().join("saved");
    cut.save(&saved).unwrap();
    let again = HuggingFaceTokenizer::load(&saved).unwrap();
    assert_eq!(ids(&again), ids(&configured));
    let text = "a film of many words, which is not cut [NEW]";
    assert_eq!(again.encode(text).unwrap(), configured.encode(text).unwrap());
    assert_eq!((again.max_length(), again.padding_side()), (Some(512), Side::Left));
}

#[test]
fn training_gives_pythons_vocabulary() {
    let (corpus, _) = expected();
    let trainer = BpeTrainer::new(400).special_tokens(["<|endoftext|>"]);
    // The same words in other orders: the order of hash maps must have no effect.
    let mut reversed = corpus.clone();
    reversed.reverse();
    for texts in [corpus, reversed] {
        let trained = trainer.train(&TextSource::memory(texts).unwrap()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        trained.save(folder.path()).unwrap();
        let read = |path: &Path| -> serde_json::Value {
            serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
        };
        assert_eq!(read(&folder.path().join("tokenizer.json")), read(&file("byte_level")));
    }
}

#[test]
fn training_says_what_is_wrong() {
    let source = TextSource::memory(["a"]).unwrap();
    let error = BpeTrainer::new(256).special_tokens(["x"]).train(&source).unwrap_err().to_string();
    assert_eq!(
        error,
        "a vocabulary of 256 tokens has no room for the 256 bytes and 1 special tokens; 257 is the least"
    );
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a.txt"), b"fine\xff").unwrap();
    let source = TextSource::folder(folder.path()).unwrap();
    let error = BpeTrainer::new(300).train(&source).unwrap_err();
    assert!(matches!(error, Error::NotUtf8 { offset: 4, .. }), "{error}");
}

#[test]
fn broken_files_say_what_is_wrong() {
    let whole = fs::read(file("word_piece")).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&whole).unwrap();
    let edited = |pointer: &str, value: serde_json::Value| {
        let mut json = json.clone();
        *json.pointer_mut(pointer).unwrap() = value;
        json.to_string().into_bytes()
    };
    let regex = serde_json::json!({"type": "Replace", "pattern": {"Regex": "("}, "content": ""});
    let table: [(Vec<u8>, &str); 7] = [
        (Vec::new(), "tokenizer.json is empty"),
        (b" \n".to_vec(), "tokenizer.json is empty"),
        (whole[..whole.len() / 2].to_vec(), "tokenizer.json is not JSON: EOF while parsing"),
        (b"{}".to_vec(), "tokenizer.json is broken: "),
        (b"[1]".to_vec(), "tokenizer.json is broken: "),
        (edited("/model/type", "Other".into()), "tokenizer.json is broken: "),
        (edited("/normalizer", regex), "tokenizer.json is broken: "),
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    for (bytes, expected) in table {
        let error = HuggingFaceTokenizer::from_bytes(&bytes).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        fs::write(&path, &bytes).unwrap();
        let error = HuggingFaceTokenizer::load(folder.path()).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("tokenizer.json is damaged"), "{error}");
    }
    fs::write(&path, [&whole[..20], b"\xff", &whole[20..]].concat()).unwrap();
    let error = HuggingFaceTokenizer::load(&path).unwrap_err();
    assert!(
        matches!(&error, Error::NotUtf8 { offset: 20, name } if *name == path.display().to_string()),
        "{error}"
    );
    fs::write(&path, &whole).unwrap();
    fs::write(folder.path().join("tokenizer_config.json"), "{").unwrap();
    let error = HuggingFaceTokenizer::load(&path).unwrap_err().to_string();
    assert!(error.contains("tokenizer_config.json is damaged"), "{error}");
    let error = HuggingFaceTokenizer::load("/nowhere").unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error}");
}

#[test]
fn cuts_that_leave_nothing_are_refused() -> Result<()> {
    let bert = tokenizer("word_piece");
    let error = bert.clone().with_truncation(Truncation::new(3)).unwrap_err().to_string();
    assert_eq!(
        error,
        "texts of at most 3 tokens have no room beside the 3 special tokens around a pair"
    );
    let cut = bert.with_truncation(Truncation::new(4))?;
    assert_eq!(cut.encode("a film of many words")?.len(), 4);
    assert_eq!(cut.encode_pair("a film", "of many words")?.len(), 4);
    let only = Truncation::new(4).strategy(TruncationStrategy::OnlySecond);
    let error = cut.with_truncation(only)?.encode("a film of many words").unwrap_err().to_string();
    assert!(error.contains("Second sequence not provided"), "{error}");
    Ok(())
}

#[test]
fn long_texts_and_long_words_are_split() -> Result<()> {
    let gpt = tokenizer("byte_level");
    // More spaces than a regular expression with lookahead may examine in one step.
    let text = format!("film{}film", " ".repeat(1_200_000));
    let ids = gpt.ids(&text)?;
    assert_eq!(gpt.decode(&ids, false)?, text);
    assert_eq!(ids[ids.len() - gpt.ids(" film")?.len()..], gpt.ids(" film")?);
    Ok(())
}
