//! The side of the rank: a test executable that was started again to run one body.

use std::fmt::Debug;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use brigade_launch::die_with_parent;
use brigade_world::World;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// What a body may return: nothing, or a result.
pub trait Verdict {
    /// Panics on an error.
    fn accept(self);
}

impl Verdict for () {
    fn accept(self) {}
}

impl<E: Debug> Verdict for Result<(), E> {
    fn accept(self) {
        if let Err(error) = self {
            panic!("the rank failed: {error:?}");
        }
    }
}

/// Is this process a rank of the test `name`?
pub(crate) fn is_rank_of(name: &str) -> bool {
    std::env::var_os(TEST).is_some_and(|test| test == name)
}

/// Runs the body, in a process that has been started for it.
pub(crate) fn run<V: Verdict>(body: impl FnOnce(World) -> V) {
    let parent = std::env::var(PARENT).ok().and_then(|parent| parent.parse().ok());
    let tied = die_with_parent(parent.expect("a rank knows the pid of its parent"));
    assert!(tied.expect("Linux has parent-death signals"), "the test has ended");
    let world = World::from_env().expect("the test describes a possible world");
    body(world).accept();
    note_step(FINISHED);
}

/// Notes how far this rank has come: the function behind [`step!`](crate::step).
pub fn note_step(text: &str) {
    let Some(path) = std::env::var_os(STEPS).map(PathBuf::from) else { return };
    let line = format!("{}\n", text.replace('\n', " "));
    // One write: several threads may note at once. A note that is lost must not fail a test.
    if let Ok(mut file) = OpenOptions::new().append(true).create(true).open(path) {
        let _ = file.write_all(line.as_bytes());
    }
}

/// Leaves what the body has returned, for the test.
pub(crate) fn leave<R: Serialize>(result: &R) {
    let Some(steps) = std::env::var_os(STEPS).map(PathBuf::from) else { return };
    let bytes = rmp_serde::to_vec_named(result).expect("the result can be sent to another process");
    fs::write(result_file(&steps), bytes).expect("the test's folder is there");
}

/// What the rank with these steps has left.
pub(crate) fn result_of<R: DeserializeOwned>(steps: &Path) -> Result<R, String> {
    let bytes = fs::read(result_file(steps)).map_err(|error| error.to_string())?;
    rmp_serde::from_slice(&bytes).map_err(|error| error.to_string())
}

fn result_file(steps: &Path) -> PathBuf {
    steps.with_extension("result")
}

/// Ends this process: what comes after the call is the test's.
pub(crate) fn end() -> ! {
    #[expect(clippy::exit, reason = "a rank is a process that was started for the body alone")]
    std::process::exit(0)
}

/// Variables by which the parent tells a process that it is a rank: of which test, whose child,
/// and where to note its steps.
pub(crate) const TEST: &str = "BRIGADE_TEST_RANK_OF";
pub(crate) const PARENT: &str = "BRIGADE_TEST_PARENT";
pub(crate) const STEPS: &str = "BRIGADE_TEST_STEPS";

/// The last note of a rank whose body came to its end. Without it an exit code of 0 means nothing:
/// a harness that finds no test of that name succeeds as well.
pub(crate) const FINISHED: &str = "(the body has finished)";
