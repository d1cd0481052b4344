//! Tests of every parser of untrusted bytes, with its corpus and mutations of it.
//!
//! A failure prints the smallest edits that show it, and leaves the input in `target/fuzz/failed-TARGET`. `cargo xtask
//! fuzz` searches for hours where this test searches for seconds.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::process::ExitCode;

use brigade_fuzz_readers::{Allocator, Target, check, corpus, targets};
use libtest_mimic::{Arguments, Trial};
use parking_lot::Mutex;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, TestRunner};

#[global_allocator]
static ALLOCATOR: &Allocator = brigade_fuzz_readers::ALLOCATOR;

/// Change of an input.
#[derive(Debug, Clone)]
enum Edit {
    Set(Index, u8),
    Flip(Index, u8),
    /// An integer of one to eight bytes, in either byte order.
    Number(Index, u64, usize, bool),
    Insert(Index, Vec<u8>),
    /// A word of the format.
    Word(Index, Index),
    Remove(Index, usize),
    /// Repetitions of a range.
    Repeat(Index, usize, usize),
    /// The rest of another input from this position on.
    Splice(Index, Index, Index),
}

fn edit() -> impl Strategy<Value = Edit> {
    let at = any::<Index>;
    // Limits of types, and of the formats.
    let number = prop_oneof![
        (0..64u32).prop_map(|bits| 1 << bits),
        (0..64u32).prop_map(|bits| (1 << bits) - 1),
        Just(u64::MAX),
        any::<u64>(),
    ];
    prop_oneof![
        (at(), any::<u8>()).prop_map(|(at, byte)| Edit::Set(at, byte)),
        (at(), 0..8u8).prop_map(|(at, bit)| Edit::Flip(at, bit)),
        (at(), number, 1..9usize, any::<bool>())
            .prop_map(|(at, number, bytes, big)| Edit::Number(at, number, bytes, big)),
        (at(), prop::collection::vec(any::<u8>(), 1..9)).prop_map(|(at, b)| Edit::Insert(at, b)),
        (at(), at()).prop_map(|(at, word)| Edit::Word(at, word)),
        (at(), 1..40usize).prop_map(|(at, bytes)| Edit::Remove(at, bytes)),
        (at(), 1..40usize, 1..200usize).prop_map(|(at, bytes, n)| Edit::Repeat(at, bytes, n)),
        (at(), at(), at()).prop_map(|(at, other, from)| Edit::Splice(at, other, from)),
    ]
}

impl Edit {
    fn apply(&self, input: &mut Vec<u8>, target: &Target, corpus: &[Vec<u8>]) {
        // One position more than there are bytes: the end.
        let place = |at: &Index| at.index(input.len() + 1);
        match self {
            Self::Set(at, byte) => {
                if let Some(old) = at.checked(input) {
                    input[old] = *byte;
                }
            }
            Self::Flip(at, bit) => {
                if let Some(old) = at.checked(input) {
                    input[old] ^= 1 << bit;
                }
            }
            Self::Number(at, number, bytes, big) => {
                let begin = place(at);
                let digits = number.to_le_bytes();
                let mut digits = digits[..*bytes].to_vec();
                if *big {
                    digits.reverse();
                }
                for (to, from) in input[begin..].iter_mut().zip(digits) {
                    *to = from;
                }
            }
            Self::Insert(at, bytes) => {
                let at = place(at);
                input.splice(at..at, bytes.iter().copied());
            }
            Self::Word(at, word) => {
                let (at, word) = (place(at), word.get(target.words));
                input.splice(at..at, word.bytes());
            }
            Self::Remove(at, bytes) => {
                let at = place(at);
                input.drain(at..(at + bytes).min(input.len()));
            }
            Self::Repeat(at, bytes, times) => {
                let at = place(at);
                let stretch = input[at..(at + bytes).min(input.len())].repeat(*times);
                input.splice(at..at, stretch);
            }
            Self::Splice(at, other, from) => {
                let at = place(at);
                let other = other.get(corpus);
                input.truncate(at);
                input.extend(&other[from.index(other.len() + 1)..]);
            }
        }
    }
}

/// Access to a list by `Index`, which may be empty.
trait Checked {
    fn checked(&self, list: &[u8]) -> Option<usize>;
}

impl Checked for Index {
    fn checked(&self, list: &[u8]) -> Option<usize> {
        (!list.is_empty()).then(|| self.index(list.len()))
    }
}

/// The memory count is per process: one at a time, if tests are threads of one process.
static ONE: Mutex<()> = Mutex::new(());

fn holds(target: &Target) {
    let _one = ONE.lock();
    let name = target.name;
    let corpus = corpus(target).unwrap();
    assert!(!corpus.is_empty(), "{name} has no corpus");
    for (path, input) in &corpus {
        let outcome = catch_unwind(AssertUnwindSafe(|| check(target, input)));
        if let Err(panic) = outcome {
            eprintln!("the input is {}", path.display());
            resume_unwind(panic);
        }
    }
    let corpus: Vec<Vec<u8>> = corpus.into_iter().map(|(_, input)| input).collect();
    let failed = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("failed-{name}"));
    // No file of seeds: an input that fails is added to fuzz/regressions/.
    let config = Config { cases: CASES, failure_persistence: None, ..Config::default() };
    let strategy = (any::<Index>(), prop::collection::vec(edit(), 0..6));
    let outcome = TestRunner::new(config).run(&strategy, |(first, edits)| {
        let mut input = first.get(&corpus).clone();
        edits.iter().for_each(|edit| edit.apply(&mut input, target, &corpus));
        input.truncate(LONGEST);
        let outcome = catch_unwind(AssertUnwindSafe(|| check(target, &input)));
        outcome.map_err(|panic| {
            fs::write(&failed, &input).unwrap();
            let text = panic.downcast_ref::<String>().cloned();
            TestCaseError::fail(text.unwrap_or_else(|| "it panicked".to_owned()))
        })
    });
    if let Err(error) = outcome {
        panic!("{name}: {error}; the input is in {}", failed.display());
    }
}

fn main() -> ExitCode {
    let trial = |target: &'static Target| {
        Trial::test(target.name, || {
            holds(target);
            Ok(())
        })
    };
    libtest_mimic::run(&Arguments::from_args(), targets().iter().map(trial).collect()).exit_code()
}

const CASES: u32 = 400;
const LONGEST: usize = 64 << 10;
