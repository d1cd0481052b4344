//! From texts to loaders: fastai's batches, bad input, ranks that fail or differ, and exported codecs.

mod ranks;

use std::fs;
use std::path::Path;

use brigade_data::{Batch, DataLoader};
use brigade_learn::{Item, ItemCodec};
use brigade_text::{Categories, TextBatches, TextCodec, TextLoaders, TextTarget, codec_from};
use brigade_tokens::{CsvOptions, TextSource, Vocabulary};
use brigade_torch::Error;
use brigade_train::Accelerator;
use serde_json::Value;
use tch::{Kind, Tensor};

fn alone() -> Accelerator {
    Accelerator::builder()
        .world(brigade_testkit::World::alone())
        .cpu(true)
        .quiet(true)
        .build()
        .unwrap()
}

fn golden() -> Value {
    let text = include_str!("../golden/text.json");
    serde_json::from_str::<Value>(text).unwrap()["pipeline"].take()
}

/// The golden file's rows as a table.
fn table(folder: &Path) -> std::path::PathBuf {
    let mut rows = "text,title,label,is_valid\n".to_owned();
    for row in golden()["rows"].as_array().unwrap() {
        let [text, title, label] = [0, 1, 2].map(|column| row[column].as_str().unwrap());
        rows.push_str(&format!("\"{text}\",\"{title}\",{label},{}\n", row[3]));
    }
    let path = folder.join("reviews.csv");
    fs::write(&path, rows).unwrap();
    path
}

fn lists(tensor: &Tensor) -> Value {
    match tensor.dim() {
        1 => serde_json::json!(Vec::<i64>::try_from(tensor).unwrap()),
        _ => serde_json::json!(Vec::<Vec<i64>>::try_from(tensor).unwrap()),
    }
}

/// All batches of an epoch of one process.
fn batches(loader: &DataLoader<TextBatches>) -> Vec<Value> {
    let batch = |batch: Result<Batch<(Tensor, Tensor)>, _>| {
        let (x, y) = batch.unwrap().into_data();
        serde_json::json!([lists(&x), lists(&y)])
    };
    loader.iter().map(batch).collect()
}

#[test]
fn a_table_becomes_fastais_batches() {
    let folder = tempfile::tempdir().unwrap();
    let path = table(folder.path());
    for case in golden()["cases"].as_array().unwrap() {
        let size = |key: &str| case[key].as_u64().unwrap() as usize;
        let list = |key: &str| -> Vec<Value> { case[key].as_array().unwrap().clone() };
        let texts = || {
            TextLoaders::from_csv(&path)
                .seq_len(size("seq_len"))
                .min_freq(case["min_freq"].as_u64().unwrap())
                .shuffle(false)
                .drop_last(false)
        };
        let data = texts().data_loaders(&alone(), size("bs")).unwrap();
        assert_eq!(data.vocabulary.tokens().collect::<Vec<_>>(), list("vocab"));
        assert_eq!(data.classes.as_ref().unwrap().names(), list("classes"));
        assert_eq!(batches(&data.train), list("train"));
        assert_eq!(batches(data.valid.as_ref().unwrap()), list("valid"));

        let data = texts().language_model().data_loaders(&alone(), size("lm_bs")).unwrap();
        assert_eq!(data.vocabulary.tokens().collect::<Vec<_>>(), list("lm_vocab"));
        assert_eq!(batches(&data.train), list("lm_train"));
        assert_eq!(batches(data.valid.as_ref().unwrap()), list("lm_valid"));
    }
}

/// `PART/CLASS/0.txt` and so on.
fn files(folder: &Path) {
    for (part, count) in [("train", 6), ("valid", 3)] {
        for class in ["neg", "pos"] {
            fs::create_dir_all(folder.join(part).join(class)).unwrap();
            for number in 0..count {
                let text = format!("This {part} film is {class}. ").repeat(number + 1);
                fs::write(folder.join(part).join(class).join(format!("{number}.txt")), text)
                    .unwrap();
            }
        }
    }
}

#[test]
fn a_folder_is_divided_by_its_folders_or_by_a_share() {
    let folder = tempfile::tempdir().unwrap();
    files(folder.path());
    let texts = || TextLoaders::from_folder(folder.path()).min_freq(1).seed(3);
    let data = texts().loaders(&alone(), 4).unwrap();
    assert_eq!((data.loaders.train_batches(), data.loaders.valid_batches()), (3, 2));
    assert_eq!(data.loaders.class_names().unwrap(), ["neg", "pos"]);
    let data = texts().valid_share(0.5).loaders(&alone(), 4).unwrap();
    assert_eq!((data.loaders.train_batches(), data.loaders.valid_batches()), (2, 3));
    let data = texts().valid_indices([0, 17]).loaders(&alone(), 4).unwrap();
    assert_eq!((data.loaders.train_batches(), data.loaders.valid_batches()), (4, 1));
    let data = texts().without_validation().loaders(&alone(), 4).unwrap();
    assert_eq!((data.loaders.train_batches(), data.loaders.valid_batches()), (4, 0));
    let data = texts().folders("valid", "train").loaders(&alone(), 6).unwrap();
    assert_eq!((data.loaders.train_batches(), data.loaders.valid_batches()), (1, 2));
    // The same seed gives the same batches.
    let first =
        |seed| texts().seed(seed).loaders(&alone(), 4).unwrap().loaders.one_batch(4).unwrap().0;
    assert_eq!(first(5), first(5));
    let shown = data.loaders.show_texts(1).unwrap();
    assert!(shown[0].0.starts_with("xxbos xxmaj this valid film is"), "{shown:?}");
    assert!(["neg", "pos"].contains(&shown[0].1.as_str()));
}

#[test]
fn tokens_are_read_from_the_cache_on_the_next_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = table(folder.path());
    let cache = folder.path().join("cache");
    let found = |texts: TextLoaders| {
        let data = texts.min_freq(1).data_loaders(&alone(), 4).unwrap();
        batches(&data.valid.unwrap())
    };
    let data = || found(TextLoaders::from_csv(&path).cache(&cache));
    let first = data();
    assert_eq!(first, found(TextLoaders::from_csv(&path)));
    let kept = || {
        let files = fs::read_dir(&cache).unwrap().map(|file| file.unwrap().metadata().unwrap());
        files.map(|file| (file.len(), file.modified().unwrap())).max().unwrap()
    };
    let before = kept();
    assert_eq!(data(), first);
    assert_eq!(kept(), before);
}

#[test]
fn targets_are_classes_several_of_them_or_numbers() {
    let rows = |labels: [&'static str; 4]| {
        let texts = ["a fine film", "a bad film", "a film", "bad"];
        TextLoaders::from_texts(texts.into_iter().zip(labels)).min_freq(1).valid_indices([3])
    };
    let target = |texts: TextLoaders| {
        let data = texts.drop_last(false).shuffle(false).loaders(&alone(), 4)?;
        Ok::<_, Error>(data.loaders.one_batch(4)?.1.unwrap())
    };
    let several = |classes| TextTarget::MultiCategory { classes, separator: ";".to_owned() };
    let found = target(rows(["good;short", "", "short", "good"]).target(several(None))).unwrap();
    assert_eq!(Vec::<Vec<f32>>::try_from(&found).unwrap(), [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]);
    let found = target(rows(["0.5", "-1", "3e1", "2"]).target(TextTarget::Number)).unwrap();
    assert_eq!(
        (found.kind(), Vec::<f32>::try_from(&found).unwrap()),
        (Kind::Float, vec![0.5, -1.0, 30.0])
    );
    let given = Categories::new(["pos", "neg"]).unwrap();
    let category = TextTarget::Category(Some(given));
    let found = target(rows(["neg", "pos", "neg", "pos"]).target(category.clone())).unwrap();
    assert_eq!(Vec::<i64>::try_from(&found).unwrap(), [1, 0, 1]);

    let message = |texts| target(texts).unwrap_err().to_string();
    let unknown = message(rows(["neg", "pos", "neg", "odd"]));
    assert!(
        unknown.starts_with("text 3: the label \"odd\" is not among the classes neg, pos"),
        "{unknown}"
    );
    assert!(
        message(rows(["neg", "odd", "neg", "pos"]).target(category))
            .contains("text 1: the label \"odd\"")
    );
    assert!(
        message(rows(["neg"; 4]))
            .contains("the training set (3 texts) has the single label \"neg\"")
    );
    let number = message(rows(["1", "two", "3", "4"]).target(TextTarget::Number));
    assert_eq!(number, "text 1 has the label \"two\", expected a finite number");
    assert!(message(rows(["", "", "", "a"]).target(several(None))).contains("there is no class"));
}

#[test]
fn data_that_make_no_loaders_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let message = |texts: TextLoaders, batch_size| {
        texts.loaders(&alone(), batch_size).unwrap_err().to_string()
    };
    assert!(message(TextLoaders::from_folder(folder.path()), 4).contains("has no texts"));
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let bad = write("bad.csv", b"text,label,is_valid\nfine,a,False\nb\xffd,b,True\n");
    assert!(message(TextLoaders::from_csv(bad), 1).contains("is not UTF-8"));
    let empty = write("empty.csv", b"");
    let error = message(TextLoaders::from_csv(&empty), 1);
    assert!(error.contains("empty.csv"), "{error}");
    let lines = write("lines.txt", b"one\ntwo\nthree\nfour\nfive\n");
    let texts = || {
        let lines = lines.clone();
        TextLoaders::from_source(move || TextSource::lines(lines)).min_freq(1)
    };
    assert!(message(texts(), 1).contains("has no labels"));
    assert!(
        message(texts().valid_share(0.1).language_model(), 1)
            .contains("none of 5 texts is to validate with")
    );
    assert!(message(texts().valid_share(1.0).language_model(), 1).contains("a share of 1"));
    assert!(
        message(texts().valid_indices([5]).language_model(), 1)
            .contains("text 5 is to validate with")
    );
    assert!(
        message(texts().valid_indices([0]).language_model(), 64)
            .contains("a batch of 64 rows takes at least 65 tokens")
    );
    let missing = folder.path().join("missing.csv");
    assert!(
        message(TextLoaders::from_csv_with(missing, CsvOptions::new()), 1).contains("missing.csv")
    );
    let labelled = || {
        TextLoaders::from_texts([("a", "x"), ("b", "y"), ("c", "x")]).min_freq(1).valid_indices([2])
    };
    assert!(message(labelled(), 64).contains("too few to train with for a batch of 64: 2 texts"));
    let without_padding = Vocabulary::new(["xxunk", "a"]).unwrap();
    let error = message(labelled().vocabulary(without_padding), 1);
    assert!(error.contains("the vocabulary of 2 tokens has no token \"xxpad\""), "{error}");
    let without_unknown = Vocabulary::new(["xxpad", "a"]).unwrap();
    assert!(message(labelled().vocabulary(without_unknown), 1).contains("no unknown token"));
}

#[test]
fn a_text_of_a_million_tokens_is_a_row() {
    let long = "film ".repeat(1_000_000);
    let texts = [(long.as_str(), "long"), ("a film", "short"), ("short", "short")];
    let data =
        TextLoaders::from_texts(texts).min_freq(1).valid_indices([2]).loaders(&alone(), 2).unwrap();
    let (inputs, _) = data.loaders.one_batch(2).unwrap();
    let (rows, tokens) = (inputs[0].size()[0], inputs[0].size()[1]);
    // Repeated words become one of fastai's marks.
    assert!(rows == 2 && tokens >= 3, "{:?}", inputs[0].size());
    let letters = |of: &str, number: usize| of.as_bytes()[number % of.len()] as char;
    let syllable = |number| [letters("bdfgkpv", number), letters("aeiou", number / 7)];
    let word = |number: usize| [syllable(number), syllable(number / 35), [' '; 2]].concat();
    let long: String = (0..1_000_000).flat_map(|number| word(number % 1225)).collect();
    let texts = [(long.as_str(), "long"), ("a film", "short"), ("short", "short")];
    let data = TextLoaders::from_texts(texts).valid_indices([2]).loaders(&alone(), 2).unwrap();
    let (inputs, _) = data.loaders.one_batch(2).unwrap();
    assert_eq!(inputs[0].size(), [2, 1_000_001]);
    let ids = inputs[0].get(0);
    assert_eq!(ids.eq(0).sum(Kind::Int64).int64_value(&[]), 0, "every word has a number");
}

#[test]
fn a_codec_is_written_down_and_made_again() {
    let folder = tempfile::tempdir().unwrap();
    let texts = TextLoaders::from_csv(table(folder.path())).min_freq(1).backwards(true);
    let data = texts.loaders(&alone(), 4).unwrap();
    let codec = TextCodec::of(&data.loaders).unwrap();
    assert_eq!(**codec.vocabulary(), *data.vocabulary);
    let (kind, settings) = codec.describe().unwrap();
    let again = codec_from(kind, &settings).unwrap();
    let item = Item::Text("What a great film!".to_owned());
    let input = codec.encode(&item).unwrap();
    assert_eq!(again.encode(&item).unwrap(), input);
    assert_eq!(again.text(&input, 0).unwrap().unwrap(), "! film great a what xxmaj xxbos");
    let file = folder.path().join("one.txt");
    fs::write(&file, "What a great film!").unwrap();
    assert_eq!(again.encode(&Item::File(file)).unwrap(), input);
    assert!(again.encode(&Item::Bytes(vec![0xff])).unwrap_err().to_string().contains("not UTF-8"));
    assert!(again.text(&input, 1).is_err());
    assert!(again.picture(&input, 0).unwrap().is_none());
    let mut other = settings.clone();
    other["tokenizer"]["kind"] = "hugging_face".into();
    assert!(codec_from(kind, &other).unwrap_err().to_string().contains("TextCodec::from_settings"));
    assert!(TextCodec::from_settings(&other, codec.tokenizer().clone()).is_err());
    assert!(codec_from("image", &settings).is_err() && codec_from("sound", &settings).is_err());
    other["later"] = true.into();
    assert!(
        TextCodec::from_settings(&other, codec.tokenizer().clone())
            .unwrap_err()
            .to_string()
            .contains("later")
    );
}
