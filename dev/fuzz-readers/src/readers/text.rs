//! Parsers of tokenizers and of tokenized texts.

use std::path::Path;

use super::{FREE, TREE, file, path_of};
use crate::Target;

pub(super) const TARGETS: &[Target] = &[
    Target {
        name: "tokenizer",
        reads: "a `tokenizer.json` of Hugging Face's, and what it makes of a text",
        words: &[
            "\"type\":\"BPE\"",
            "\"type\":\"WordPiece\"",
            "\"type\":\"Unigram\"",
            "{\"type\":\"ByteLevel\",\"add_prefix_space\":true,\"trim_offsets\":true}",
            "{\"Regex\":\"",
            "\"added_tokens\":[",
            "\"vocab\":{",
            "\"merges\":[",
            "\"single\":[",
            "4294967295",
        ],
        bytes_per_byte: TREE,
        // Maximum memory of a regular expression, and the names in a caught panic's backtrace.
        free_bytes: FREE + (192 << 20),
        read: tokenizer,
    },
    Target {
        name: "vocabulary",
        reads: "a vocabulary, as JSON and as a pickled list",
        words: &[
            "{\"format\":\"brigade-vocabulary\",\"version\":1,\"unknown\":0,\"filled\":true,\"tokens\":[",
            "]}\n",
            "cfastcore.foundation\nL\n",
            "X\x05\0\0\0items",
            "X\x05\0\0\0xxunk",
            "h\x01",
            "(",
            "e.",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: vocabulary,
    },
    Target {
        name: "tokens",
        reads: "a file of texts as tokens, also under its right checksums",
        words: &["BRIGTOKS\x01\0\0\0", "\x02\0\0\0", "\x04\0\0\0"],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: tokens,
    },
];

fn tokenizer(input: &[u8]) {
    use brigade_tokens::{HuggingFaceTokenizer, Truncation};

    let Ok(tokenizer) = HuggingFaceTokenizer::from_bytes(input) else { return };
    let text = "A text, with 12 words that aren't  long \u{e9}\u{1f600}\n";
    let cut = tokenizer.clone().with_truncation(Truncation::new(8));
    for tokenizer in [Ok(tokenizer), cut].into_iter().flatten() {
        let single = tokenizer.encode(text);
        let pair = tokenizer.encode_pair(text, "[CLS] <s>");
        for encoding in [single, pair].into_iter().flatten() {
            assert_eq!(encoding.ids.len(), encoding.offsets.len());
            let _ = tokenizer.decode(&encoding.ids, true);
        }
        let _ = tokenizer.vocabulary();
    }
}

fn vocabulary(input: &[u8]) {
    use brigade_tokens::Vocabulary;

    if let Ok(vocabulary) = Vocabulary::from_json(input) {
        // A parsed vocabulary can be written, and parsed again.
        let again = Vocabulary::from_json(vocabulary.to_json().as_bytes());
        assert_eq!(again.expect("our own form is known"), vocabulary);
    }
    if let Ok(tokens) = brigade_checkpoint::pth::strings(Path::new("a.pkl"), input) {
        let bytes: usize = tokens.iter().map(|token| token.len()).sum();
        assert!(bytes <= 16 * input.len() + (64 << 10), "{bytes} bytes");
    }
}

fn tokens(input: &[u8]) {
    use brigade_tokens::{TokenCorpus, Vocabulary};

    for input in [input.to_vec(), corpus_with_checksums(input)] {
        let file = file(&input);
        let Ok(corpus) = TokenCorpus::open(path_of(&file)) else { continue };
        let unknown = Vocabulary::new(["xxunk"]).expect("one token");
        let ids = corpus.ids(&unknown).expect("it has an unknown token");
        let mut read = Vec::new();
        for (text, length) in corpus.lengths().enumerate() {
            if let Ok(tokens) = corpus.tokens(text) {
                assert_eq!(tokens.len(), length);
                ids.read(text, 0..length, &mut read).expect("its tokens are there");
                read.clear();
            }
        }
        let _ = corpus.counts_of(0..corpus.len());
    }
}

/// Corrects the checksums of a corpus, so that the bytes behind them are parsed.
fn corpus_with_checksums(input: &[u8]) -> Vec<u8> {
    let mut bytes = input.to_vec();
    let numbers = 4096;
    if bytes.len() < numbers {
        return bytes;
    }
    let long = |place: usize| {
        bytes[place..place + 8]
            .iter()
            .rev()
            .fold(0_u64, |number, byte| number << 8 | u64::from(*byte))
    };
    let tables = (long(56).saturating_mul(long(12) & 0xffff_ffff)).saturating_add(numbers as u64);
    let tables = usize::try_from(tables).unwrap_or(usize::MAX).min(bytes.len());
    for (place, part) in [(80, numbers..tables), (84, tables..bytes.len()), (88, 0..88)] {
        let checksum = crc32fast::hash(&bytes[part]);
        bytes[place..place + 4].copy_from_slice(&checksum.to_le_bytes());
    }
    bytes
}
