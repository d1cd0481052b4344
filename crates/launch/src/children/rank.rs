//! Rank side: a program that was started again to run one body.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use brigade_rank_env::World;
use brigade_ssh::die_with_parent;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Returns `true` if this process is one of the ranks called `name`.
pub(super) fn is_rank_of(name: &str) -> bool {
    std::env::var_os(RANK_OF).is_some_and(|ranks| ranks == name)
}

/// Runs the body, in a process that was started for it.
pub(super) fn run(body: impl FnOnce(World)) {
    let parent = std::env::var(PARENT).ok().and_then(|parent| parent.parse().ok());
    let tied = die_with_parent(parent.expect("a rank knows the pid of its parent"));
    assert!(tied.expect("Linux has parent-death signals"), "the parent has ended");
    let world = World::from_env().expect("the parent describes a possible world");
    body(world);
    note_step(FINISHED);
}

/// Records the current step of this rank: a [`Report`](super::Report) shows its last step. Does nothing in a process
/// that is not a rank of [`ChildRanks`](super::ChildRanks).
pub fn note_step(text: &str) {
    let Some(path) = std::env::var_os(STEPS).map(PathBuf::from) else { return };
    let line = format!("{}\n", text.replace('\n', " "));
    // A single write, because several threads may write notes at the same time. A lost note must not fail a test.
    if let Ok(mut file) = OpenOptions::new().append(true).create(true).open(path) {
        let _ = file.write_all(line.as_bytes());
    }
}

/// Writes the value that the body has returned, for the parent.
pub(super) fn leave<R: Serialize>(result: &R) {
    let Some(steps) = std::env::var_os(STEPS).map(PathBuf::from) else { return };
    let bytes = rmp_serde::to_vec_named(result).expect("the result can be sent to another process");
    fs::write(result_file(&steps), bytes).expect("the parent's folder is there");
}

/// Returns the result that the rank with these steps has left.
pub(super) fn result_of<R: DeserializeOwned>(steps: &Path) -> Result<R, String> {
    let bytes = fs::read(result_file(steps)).map_err(|error| error.to_string())?;
    rmp_serde::from_slice(&bytes).map_err(|error| error.to_string())
}

fn result_file(steps: &Path) -> PathBuf {
    steps.with_extension("result")
}

/// Ends this process: the code after the call runs in the parent only.
pub(super) fn end() -> ! {
    #[expect(clippy::exit, reason = "a rank is a process that was started for the body alone")]
    std::process::exit(0)
}

/// Variables that mark a process as a rank: the name of the call, the parent's process number, and the file for its
/// steps.
pub(super) const RANK_OF: &str = "BRIGADE_TEST_RANK_OF";
pub(super) const PARENT: &str = "BRIGADE_TEST_PARENT";
pub(super) const STEPS: &str = "BRIGADE_TEST_STEPS";

/// Last note of a rank whose body has returned. Without it an exit code of 0 proves nothing: a test harness that finds
/// no test of that name succeeds as well.
pub(super) const FINISHED: &str = "(the body has finished)";
