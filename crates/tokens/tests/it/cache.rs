//! Corpora in memory and in files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use brigade_tokens::{
    Error, ParallelOptions, Result, TextSource, TokenCache, TokenCorpus, TokenCounts, TokenList,
    Tokenizer, Vocabulary, VocabularyOptions,
};

/// Splits at spaces, and counts the texts.
#[derive(Debug, Default)]
struct Words {
    rules: &'static str,
    texts: AtomicUsize,
    /// Ends the process at this text.
    dies_at: Option<usize>,
}

impl Words {
    fn calls(&self) -> usize {
        self.texts.load(Ordering::Relaxed)
    }
}

impl Tokenizer for Words {
    fn tokenize(&self, text: &str, tokens: &mut TokenList) -> Result<()> {
        if Some(self.texts.fetch_add(1, Ordering::Relaxed)) == self.dies_at {
            std::process::abort();
        }
        tokens.extend(text.split_whitespace());
        Ok(())
    }

    fn describe(&self) -> serde_json::Value {
        serde_json::json!({ "words": self.rules })
    }
}

/// Texts of different lengths, some of them empty, with `different` words.
fn texts(count: usize, different: usize) -> Vec<String> {
    let word = |text: usize, place: usize| format!("w{}", (text * 31 + place * place) % different);
    let text = |text: usize| (0..text % 11).map(|place| word(text, place)).collect::<Vec<_>>();
    (0..count).map(|number| text(number).join(" ")).collect()
}

fn options() -> ParallelOptions<'static> {
    ParallelOptions::new().threads(2)
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> =
        fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    paths.sort();
    paths
}

fn the_file(folder: &Path) -> PathBuf {
    let mut found = files(folder);
    found.retain(|path| path.extension().is_some_and(|extension| extension == "tokens"));
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

fn all_tokens(corpus: &TokenCorpus) -> Vec<String> {
    let text = |text| corpus.tokens(text).unwrap().iter().collect::<Vec<_>>().join(" ");
    (0..corpus.len()).map(text).collect()
}

#[test]
fn a_corpus_in_a_file_is_that_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let all = texts(3000, 200);
    let source = TextSource::memory(all.clone()).unwrap();
    let memory = TokenCorpus::in_memory(&Words::default(), &source, options()).unwrap();
    let cache = TokenCache::new(folder.path().join("deep/er"));
    let (first, second) = (Words::default(), Words::default());
    let made = cache.corpus(&first, &source, options()).unwrap();
    let found = cache.corpus(&second, &source, options()).unwrap();
    assert_eq!((first.calls(), second.calls()), (3000, 0));

    let mut counts = TokenCounts::new();
    let mut odd = TokenCounts::new();
    for (number, text) in all.iter().enumerate() {
        counts.add(number as u64, text.split_whitespace());
        if number % 2 == 1 {
            odd.add(number as u64, text.split_whitespace());
        }
    }
    let vocabulary = VocabularyOptions::new().max_size(50).build(&odd);
    for corpus in [memory, made, found] {
        assert_eq!(all_tokens(&corpus), all);
        assert_eq!(corpus.counts().most_common(), counts.most_common());
        let some = corpus.counts_of((0..3000).filter(|text| text % 2 == 1)).unwrap();
        assert_eq!(some.most_common(), odd.most_common());
        let ids = corpus.ids(&vocabulary).unwrap();
        assert_eq!(ids.lengths().sum::<usize>() as u64, corpus.token_count());
        for (text, length) in ids.lengths().enumerate() {
            let list: TokenList = all[text].split_whitespace().collect();
            let expected: Vec<i64> =
                vocabulary.ids(&list).unwrap().into_iter().map(i64::from).collect();
            let mut read = Vec::new();
            ids.read(text, 0..length, &mut read).unwrap();
            assert_eq!(read, expected);
            // Appended, from within a text.
            ids.read(text, length / 2..length, &mut read).unwrap();
            assert_eq!(read[length..], expected[length / 2..]);
        }
        let error = ids.read(10, 5..11, &mut Vec::new()).unwrap_err().to_string();
        assert_eq!(error, "text 10 has 10 tokens, but 5 to 11 are needed");
        let error = ids.read(3000, 0..0, &mut Vec::new()).unwrap_err().to_string();
        assert_eq!(error, "text 3000 is out of range: there are 3000, numbered from 0");
        let error = corpus.ids(&Vocabulary::new(["w0"]).unwrap()).unwrap_err();
        assert!(matches!(error, Error::UnknownToken { .. }), "{error}");
    }
}

#[test]
fn numbers_become_wider_where_there_are_many_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let words: Vec<String> = (0..66_000).map(|number| format!("w{number}")).collect();
    let all: Vec<String> = words.chunks(7).map(|words| words.join(" ")).collect();
    let source = TextSource::memory(all.clone()).unwrap();
    let cache = TokenCache::new(folder.path());
    let corpus = cache.corpus(&Words::default(), &source, options()).unwrap();
    assert_eq!(all_tokens(&corpus), all);
    let memory = TokenCorpus::in_memory(&Words::default(), &source, options()).unwrap();
    assert_eq!(all_tokens(&memory), all);
    assert_eq!(files(folder.path()).len(), 2, "the file and its lock: {:?}", files(folder.path()));

    // As many as two bytes can number, and one more.
    for (count, width) in [(65_536, 2), (65_537, 4)] {
        let source = TextSource::memory([words[..count].join(" ")]).unwrap();
        let corpus = TokenCorpus::in_memory(&Words::default(), &source, options()).unwrap();
        let path = folder.path().join(width.to_string());
        corpus.save(&path).unwrap();
        assert_eq!(fs::read(&path).unwrap()[12], width);
        let opened = TokenCorpus::open(&path).unwrap();
        assert_eq!(opened.tokens(0).unwrap(), corpus.tokens(0).unwrap());
        assert_eq!(opened.fingerprint(), corpus.fingerprint());
    }
}

#[test]
fn another_text_or_rule_is_another_file() {
    let folder = tempfile::tempdir().unwrap();
    let cache = TokenCache::new(folder.path());
    let open = |texts: &[&str], rules| {
        let source = TextSource::memory(texts.iter().copied()).unwrap();
        let words = Words { rules, ..Words::default() };
        let corpus = cache.corpus(&words, &source, options()).unwrap();
        (corpus.fingerprint(), words.calls())
    };
    let (first, calls) = open(&["a b", "c"], "");
    assert_eq!(calls, 2);
    for (texts, rules) in [
        (&["a b", "d"][..], ""),
        (&["a b"], ""),
        (&["a bc", ""], ""),
        (&["c", "a b"], ""),
        (&["a b", "c"], "x"),
    ] {
        let (other, calls) = open(texts, rules);
        assert_ne!(other, first);
        assert_eq!(calls, texts.len());
    }
    assert_eq!(open(&["a b", "c"], ""), (first, 0));
}

#[test]
fn damaged_files_are_made_anew() {
    let folder = tempfile::tempdir().unwrap();
    let cache = TokenCache::new(folder.path());
    let all = texts(200, 40);
    let source = TextSource::memory(all.clone()).unwrap();
    cache.corpus(&Words::default(), &source, options()).unwrap();
    let path = the_file(folder.path());
    let whole = fs::read(&path).unwrap();
    let numbers = 4096;
    let flipped = |place: usize| {
        let mut bytes = whole.clone();
        bytes[place] ^= 1;
        bytes
    };
    let table: [(Vec<u8>, &str); 8] = [
        (Vec::new(), "it has 0 bytes, fewer than a header"),
        (whole[..50].to_vec(), "it has 50 bytes, fewer than a header"),
        (whole[..whole.len() - 1].to_vec(), "but its header declares another number"),
        ([&whole[..], b"x"].concat(), "but its header declares another number"),
        (flipped(0), "it does not begin as a corpus does"),
        (flipped(60), "its header is not as it was written"),
        (flipped(numbers + 9), "the numbers of its texts are not as they were written"),
        (flipped(whole.len() - 2), "its tables are not as they were written"),
    ];
    for (bytes, expected) in table {
        fs::write(&path, bytes).unwrap();
        let error = TokenCorpus::open(&path).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        let words = Words::default();
        let corpus = cache.corpus(&words, &source, options()).unwrap();
        assert_eq!((words.calls(), all_tokens(&corpus)), (200, all.clone()));
        assert_eq!(fs::read(&path).unwrap(), whole);
    }
    // Truncated while it is open: an error, not a signal.
    let corpus = TokenCorpus::open(&path).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(4200).unwrap();
    let error = corpus.tokens(199).unwrap_err();
    assert!(matches!(&error, Error::Io { path: named, .. } if *named == path), "{error}");
}

#[test]
fn one_of_several_makes_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let all = texts(4000, 100);
    let words = Words::default();
    // Each has separate handles, between which locks work as between processes.
    let together = Barrier::new(4);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let source = TextSource::memory(all.clone()).unwrap();
                together.wait();
                let corpus =
                    TokenCache::new(folder.path()).corpus(&words, &source, options()).unwrap();
                assert_eq!(all_tokens(&corpus), all);
            });
        }
    });
    assert_eq!(words.calls(), 4000);
}

/// In the process that the next test starts: ends it while it writes.
#[test]
fn a_process_that_dies() {
    let Some(folder) = std::env::var_os(DIES) else { return };
    let source = TextSource::memory(texts(4000, 100)).unwrap();
    let words = Words { dies_at: Some(3900), ..Words::default() };
    let _ = TokenCache::new(folder).corpus(&words, &source, options());
    unreachable!("it lives");
}

const DIES: &str = "BRIGADE_TEST_CACHE_DIES";

#[test]
fn a_killed_writer_leaves_nothing_that_is_taken_for_whole() {
    let folder = tempfile::tempdir().unwrap();
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "cache::a_process_that_dies", "--test-threads=1"])
        .env(DIES, folder.path())
        .output()
        .unwrap()
        .status;
    assert!(!status.success());
    let left = files(folder.path());
    assert!(left.iter().any(|path| path.extension().is_some_and(|e| e == "partial")), "{left:?}");
    assert!(left.iter().all(|path| path.extension().is_some_and(|e| e != "tokens")), "{left:?}");

    let all = texts(4000, 100);
    let source = TextSource::memory(all.clone()).unwrap();
    let words = Words::default();
    let corpus = TokenCache::new(folder.path()).corpus(&words, &source, options()).unwrap();
    assert_eq!((words.calls(), all_tokens(&corpus)), (4000, all));
    assert_eq!(files(folder.path()).len(), 2, "{:?}", files(folder.path()));
}

#[test]
fn a_failed_text_leaves_no_file() {
    #[derive(Debug)]
    struct Refuses;
    impl Tokenizer for Refuses {
        fn tokenize(&self, text: &str, _: &mut TokenList) -> Result<()> {
            Err(Error::InvalidArgument(format!("not {text}")))
        }
        fn describe(&self) -> serde_json::Value {
            "refuses".into()
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let source = TextSource::memory(["x"]).unwrap();
    let error = TokenCache::new(folder.path()).corpus(&Refuses, &source, options()).unwrap_err();
    assert_eq!(error.to_string(), "text 0: not x");
    assert!(files(folder.path()).iter().all(|path| path.extension().is_some_and(|e| e == "lock")));
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let error = TokenCache::new(&file).corpus(&Words::default(), &source, options()).unwrap_err();
    assert!(matches!(&error, Error::Io { path, .. } if *path == file), "{error}");
}

#[test]
fn a_text_of_a_million_tokens_is_one_text() {
    let folder = tempfile::tempdir().unwrap();
    let text: String = (0..1_000_000).map(|number| format!("w{} ", number % 1000)).collect();
    let source = TextSource::memory([text, "end".into()]).unwrap();
    let corpus =
        TokenCache::new(folder.path()).corpus(&Words::default(), &source, options()).unwrap();
    assert_eq!(corpus.lengths().collect::<Vec<_>>(), [1_000_000, 1]);
    let ids = corpus.ids(&VocabularyOptions::new().build(&corpus.counts())).unwrap();
    let mut read = Vec::new();
    ids.read(0, 999_999..1_000_000, &mut read).unwrap();
    ids.read(1, 0..1, &mut read).unwrap();
    // The last of the words that are all equally common; `end` is too rare.
    assert_eq!(read, [9 + 999, 0]);
}
