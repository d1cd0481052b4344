//! Many texts on several threads.

use std::sync::atomic::{AtomicUsize, Ordering};

use brigade_tokens::{
    Error, ParallelOptions, Result, TextSource, TokenList, TokenProgress, Tokenizer, tokenize_all,
};

/// Splits at spaces; refuses `bad`, and panics at `panic`.
#[derive(Debug, Default)]
struct Words {
    texts: AtomicUsize,
}

impl Tokenizer for Words {
    fn tokenize(&self, text: &str, tokens: &mut TokenList) -> Result<()> {
        self.texts.fetch_add(1, Ordering::Relaxed);
        match text {
            "bad" => return Err(Error::InvalidArgument("it is bad".into())),
            "panic" => panic!("at {text}"),
            _ => tokens.extend(text.split(' ')),
        }
        Ok(())
    }

    fn describe(&self) -> serde_json::Value {
        "words".into()
    }
}

fn numbered(texts: usize) -> Vec<String> {
    (0..texts).map(|number| format!("text {number} {}", "x ".repeat(number % 7))).collect()
}

#[test]
fn order_is_kept_and_progress_told() {
    let all = numbered(5000);
    let source = TextSource::memory(all.clone()).unwrap();
    for threads in [1, 3, 8] {
        let (mut seen, mut told) = (Vec::new(), Vec::new());
        let options =
            ParallelOptions::new().threads(threads).progress(|progress| told.push(progress));
        tokenize_all(&Words::default(), &source, options, |index, tokens| {
            assert_eq!(index, seen.len());
            seen.push(tokens.iter().collect::<Vec<_>>().join(" "));
            Ok(())
        })
        .unwrap();
        assert_eq!(seen, all);
        let bytes = all.iter().map(|text| text.len() as u64).sum();
        assert_eq!(told.last(), Some(&TokenProgress { texts: 5000, of: 5000, bytes }));
        assert!(told.len() > 2 && told.is_sorted_by_key(|progress| progress.texts), "{told:?}");
    }
}

#[test]
fn the_first_text_that_fails_is_named() {
    for (wrong, expected) in [
        ("bad", "text 3000: it is bad"),
        (
            "panic",
            "text 3000: the tokenizer panicked: at panic; leave the text out and report the tokenizer's fault",
        ),
    ] {
        let mut all = numbered(9000);
        all[3000] = wrong.into();
        all[3001] = "panic".into();
        all[8000] = "bad".into();
        let source = TextSource::memory(all).unwrap();
        for threads in [1, 4] {
            let mut seen = 0;
            let options = ParallelOptions::new().threads(threads);
            let error = tokenize_all(&Words::default(), &source, options, |_, _| {
                seen += 1;
                Ok(())
            });
            assert_eq!(error.unwrap_err().to_string(), expected);
            assert_eq!(seen, 3000);
        }
    }
}

#[test]
fn an_error_of_the_consumer_ends_the_work() {
    let source = TextSource::memory(numbered(100_000)).unwrap();
    let words = Words::default();
    let options = ParallelOptions::new().threads(2);
    let outcome = tokenize_all(&words, &source, options, |index, _| match index {
        10 => Err(Error::InvalidArgument("enough".into())),
        _ => Ok(()),
    });
    assert_eq!(outcome.unwrap_err().to_string(), "enough");
    // Two threads with four pieces each, of 1024 texts, and no more.
    assert!(words.texts.into_inner() <= 2 * 4 * 1024);
}

#[test]
fn a_slow_consumer_holds_the_threads_back() {
    let source = TextSource::memory(numbered(50_000)).unwrap();
    let words = Words::default();
    let options = ParallelOptions::new().threads(2);
    tokenize_all(&words, &source, options, |index, _| {
        let ahead = words.texts.load(Ordering::Relaxed) - index;
        assert!(ahead <= 2 * 4 * 1024, "{ahead} texts ahead");
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_text_that_cannot_be_read_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("0.txt"), "fine").unwrap();
    std::fs::write(path("1.txt"), b"\xff").unwrap();
    let source = TextSource::folder(folder.path()).unwrap();
    let mut seen = 0;
    let error = tokenize_all(&Words::default(), &source, ParallelOptions::new(), |_, _| {
        seen += 1;
        Ok(())
    });
    let error = error.unwrap_err();
    assert!(matches!(&error, Error::NotUtf8 { name, .. } if name.ends_with("1.txt")), "{error}");
    assert_eq!(seen, 1);
}

#[test]
fn a_file_that_lost_rows_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.txt");
    std::fs::write(&path, "a\nb\nc\n").unwrap();
    let source = TextSource::lines(&path).unwrap();
    std::fs::write(&path, "a\nb\n").unwrap();
    let outcome = tokenize_all(&Words::default(), &source, ParallelOptions::new(), |_, _| Ok(()));
    let error = outcome.unwrap_err().to_string();
    assert_eq!(error, "the source gave 2 texts and had 3 before; it was changed meanwhile");
}
