//! One function for each reader of foreign bytes: files from strangers, messages from peers, settings.
//!
//! A reader may refuse an input in any way, but must not panic, run for long, or take memory out of
//! proportion to the input. [`check`] is that property. It is used in two places:
//!
//! - `tests/readers.rs`, in the suite: the corpus, and some hundred mutations of it;
//! - `fuzz/`, in the layout of cargo-fuzz: libFuzzer, guided by coverage. `cargo xtask fuzz` builds and
//!   starts it.
//!
//! `corpus/TARGET/` holds the inputs to begin with: good ones, those that took a way of their own through the
//! code, and each one that once failed.

mod readers;

use std::alloc::System;
use std::path::PathBuf;

use peakmem_alloc::{INSTRUMENTED_SYSTEM, PeakMemAlloc, PeakMemAllocTrait};
use rustix::time::{ClockId, clock_gettime};

/// The system's allocator, with a count.
pub type Allocator = PeakMemAlloc<System>;

/// The allocator that [`check`] asks: a program that calls it makes this its global one.
///
/// ```
/// #[global_allocator]
/// static ALLOCATOR: &brigade_fuzzkit::Allocator = brigade_fuzzkit::ALLOCATOR;
///
/// let target = brigade_fuzzkit::target("hostfile").expect("there is one");
/// brigade_fuzzkit::check(target, b"node1 slots=4");
/// ```
pub static ALLOCATOR: &Allocator = &INSTRUMENTED_SYSTEM;

/// A reader of foreign bytes.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// Its name on the command line, and of its corpus.
    pub name: &'static str,
    /// What it reads.
    pub reads: &'static str,
    /// Words of the format, for mutations.
    pub words: &'static [&'static str],
    /// How many bytes of memory it may have at a time for each byte of the input. Trees of small values take the
    /// most: an empty list is one byte of a pickle, and forty in memory, in a list that doubles as it grows.
    pub bytes_per_byte: usize,
    /// How many more, whatever the input: buffers, and tables that are made once.
    pub free_bytes: usize,
    read: fn(&[u8]),
}

/// All of them.
#[must_use]
pub fn targets() -> &'static [Target] {
    readers::TARGETS
}

/// The target of a name.
#[must_use]
pub fn target(name: &str) -> Option<&'static Target> {
    targets().iter().find(|target| target.name == name)
}

/// Reads one input.
///
/// Counts the memory of the whole process, so nothing else may run in it meanwhile; see [`ALLOCATOR`].
///
/// # Panics
/// When the reader does, when it has more memory at a time than the target allows, and when it takes more than
/// [`MAX_SECONDS_LEN`] of the processor.
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

/// The inputs of a target that are kept, with their names, in order.
///
/// # Panics
/// Where the folder cannot be read.
#[must_use]
pub fn corpus(target: &Target) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
    let listed = std::fs::read_dir(&folder);
    let listed = listed.unwrap_or_else(|error| panic!("cannot read {}: {error}", folder.display()));
    let mut paths: Vec<PathBuf> = listed.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    let read = |path: PathBuf| {
        let bytes = std::fs::read(&path);
        let bytes = bytes.unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
        (path, bytes)
    };
    paths.into_iter().map(read).collect()
}

/// Time of this thread on a processor: on a machine that is busy, the clock on the wall says nothing.
fn processor_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// No input of a megabyte takes so long, also without optimisation; one that does will take hours as a larger
/// one.
pub const MAX_SECONDS_LEN: f64 = 10.0;
