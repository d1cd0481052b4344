//! Test of several ranks, as [`dist_test!`](crate::dist_test) creates it.

use std::env;
use std::fmt::Debug;
use std::time::Duration;

use brigade_launch::children::{ChildRanks, Report};
use brigade_rank_env::World;

/// Test of several ranks, as [`dist_test!`](crate::dist_test) creates it.
#[derive(Debug)]
pub struct DistTest(ChildRanks);

impl DistTest {
    /// Creates the test `path`, a module path with the crate's name and the function's, of `world_size` ranks. The test
    /// harness must have a test of that path that calls [`DistTest::run`].
    #[must_use]
    pub fn new(path: &str, world_size: usize) -> Self {
        Self(ChildRanks::of_test(path, world_size)).time_limit(Duration::from_secs(60))
    }

    /// Sets the time limit of all ranks together. Defaults to 60 s. With `BRIGADE_TEST_DEVICE=tpu` the ranks have eight
    /// times as long: each compiles all operations for itself.
    #[must_use]
    pub fn time_limit(self, limit: Duration) -> Self {
        let compiles = env::var_os("BRIGADE_TEST_DEVICE").is_some_and(|device| device == "tpu");
        Self(self.0.time_limit(if compiles { limit * 8 } else { limit }))
    }

    /// Sets an environment variable of the ranks.
    #[must_use]
    pub fn variable(self, name: &'static str, value: &'static str) -> Self {
        Self(self.0.variable(name, value))
    }

    /// Runs the test; in a process that is one of its ranks, runs the body.
    ///
    /// # Panics
    ///
    /// Panics when the test fails.
    #[track_caller]
    pub fn run_or_panic<R: BodyResult>(&self, body: impl FnOnce(World) -> R) {
        if let Some(Err(report)) = self.run(body) {
            panic!("{report}");
        }
    }

    /// Runs the test like [`run_or_panic`](Self::run_or_panic), but returns the result, for a test that expects a
    /// failure. Returns `None` in a rank.
    ///
    /// # Panics
    ///
    /// Panics in a rank if the body does.
    pub fn run<R: BodyResult>(&self, body: impl FnOnce(World) -> R) -> Option<Result<(), Report>> {
        self.0.run(|world| body(world).assert_ok())
    }
}

/// Return type of a test's body: nothing, or a result.
pub trait BodyResult {
    /// Panics if the value is an error.
    fn assert_ok(self);
}

impl BodyResult for () {
    fn assert_ok(self) {}
}

impl<E: Debug> BodyResult for Result<(), E> {
    fn assert_ok(self) {
        if let Err(error) = self {
            panic!("the rank failed: {error:?}");
        }
    }
}
