//! One function for each parser of untrusted bytes: files, messages from peers, settings.
//!
//! A parser may refuse an input in any way, but must not panic, run for long, or take memory out of proportion to the
//! input. [`check`] tests that property. It is used in two places:
//!
//! - `tests/readers.rs`, in the suite: the corpus, and some hundred mutations of it;
//! - `fuzz/`, in the layout of cargo-fuzz: libFuzzer, guided by coverage. `cargo xtask fuzz` builds and
//!   starts it.
//!
//! The inputs to begin with are good ones and each one that once failed, in `fuzz/regressions/TARGET/`, and those that
//! took a way of their own through the code, in `fuzz/corpus/TARGET.tar.gz`.
//!
//! # Rules for readers
//!
//! Weights files, checkpoints, datasets, settings, host lists and messages of peers come from elsewhere. A reader of
//! them refuses what it does not understand, and takes memory in proportion to its input: sizes that a file declares
//! are compared with the file before anything is allocated, and anything that a few bytes can request again and again
//! (the memo of a pickle, views of one storage, a gzip stream, a range of host names) has a limit. A counting
//! allocator measures the memory. `docs/fuzzing.md` describes how the fuzzer is run, and what was found.

mod corpus;
mod readers;

use std::alloc::System;

pub use corpus::{corpus, pack, unpack};
use peakmem_alloc::{INSTRUMENTED_SYSTEM, PeakMemAlloc, PeakMemAllocTrait};
use rustix::time::{ClockId, clock_gettime};

/// Allocator of the system that counts bytes.
pub type Allocator = PeakMemAlloc<System>;

/// Allocator that [`check`] reads: a program that calls it must make this its global allocator.
///
/// ```
/// #[global_allocator]
/// static ALLOCATOR: &brigade_fuzz_readers::Allocator = brigade_fuzz_readers::ALLOCATOR;
///
/// let target = brigade_fuzz_readers::target("hostfile").expect("there is one");
/// brigade_fuzz_readers::check(target, b"node1 slots=4");
/// ```
pub static ALLOCATOR: &Allocator = &INSTRUMENTED_SYSTEM;

/// Parser of untrusted bytes.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Name of the target on the command line, and of its corpus.
    pub name: &'static str,
    /// Format that the parser reads.
    pub reads: &'static str,
    /// Words of the format, for mutations.
    pub words: &'static [&'static str],
    /// Maximum memory in bytes at a time per byte of the input. Trees of small values need the most: an empty list is
    /// one byte of a pickle, and forty in memory, in a list that doubles as it grows.
    pub bytes_per_byte: usize,
    /// Additional memory in bytes for any input: buffers, and tables that are built once.
    pub free_bytes: usize,
    read: fn(&[u8]),
}

/// Returns all targets.
#[must_use]
pub fn targets() -> &'static [Target] {
    &readers::TARGETS
}

/// Returns the target of a name, if it exists.
#[must_use]
pub fn target(name: &str) -> Option<&'static Target> {
    targets().iter().find(|target| target.name == name)
}

/// Parses one input and checks the limits.
///
/// Counts the memory of the whole process, so nothing else may run in it meanwhile; see [`ALLOCATOR`].
///
/// # Panics
/// Panics when the parser does, when it has more memory at a time than the target allows, and when it takes more than
/// [`MAX_SECONDS_LEN`] of processor time.
pub fn check(target: &Target, input: &[u8]) {
    let allowed = target.bytes_per_byte * input.len() + target.free_bytes;
    let begun = processor_seconds();
    ALLOCATOR.reset_peak_memory();
    (target.read)(input);
    let taken = ALLOCATOR.get_peak_memory();
    let seconds = processor_seconds() - begun;
    assert!(
        taken <= allowed,
        "{} took {taken} bytes of memory for an input of {} bytes, {allowed} are allowed",
        target.name,
        input.len()
    );
    assert!(
        seconds <= MAX_SECONDS_LEN,
        "{} took {seconds} s of the processor for an input of {} bytes",
        target.name,
        input.len()
    );
}

/// Returns the processor time of this thread: on a busy machine, wall-clock time is not meaningful.
fn processor_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Maximum processor time per input in seconds. No input of a megabyte needs as much, even without optimisation; one
/// that does would take hours if it were larger.
pub const MAX_SECONDS_LEN: f64 = 10.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[global_allocator]
    static COUNTED: &Allocator = ALLOCATOR;

    #[test]
    #[should_panic(expected = "bytes of memory for an input of 1 bytes")]
    fn memory_out_of_proportion_is_a_failure() {
        let mut greedy = *target("hostfile").expect("the target of hostfiles");
        greedy.bytes_per_byte = 0;
        greedy.free_bytes = 0;
        check(&greedy, b"a");
    }
}
