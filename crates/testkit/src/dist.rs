//! What [`dist_test!`](crate::dist_test) makes.

use std::fmt::Debug;
use std::time::Duration;

use brigade_launch::children::{ChildRanks, Report};
use brigade_rank_env::World;

/// A test of several ranks: what [`dist_test!`](crate::dist_test) makes.
#[derive(Debug)]
pub struct DistTest(ChildRanks);

impl DistTest {
    /// The test `path`, a module path with the crate's name and the function's, of `world_size`
    /// ranks. The harness must know a test of that path that ends up in [`DistTest::run`].
    #[must_use]
    pub fn new(path: &str, world_size: usize) -> Self {
        Self(ChildRanks::of_test(path, world_size))
    }

    /// How long the ranks may take, all together.
    #[must_use]
    pub fn time_limit(self, limit: Duration) -> Self {
        Self(self.0.time_limit(limit))
    }

    /// A variable of the ranks' environment.
    #[must_use]
    pub fn variable(self, name: &'static str, value: &'static str) -> Self {
        Self(self.0.variable(name, value))
    }

    /// Runs the test, or the body where this process is one of its ranks.
    ///
    /// # Panics
    ///
    /// When the test fails.
    #[track_caller]
    pub fn run_or_panic<V: Verdict>(&self, body: impl FnOnce(World) -> V) {
        if let Some(Err(report)) = self.run(body) {
            panic!("{report}");
        }
    }

    /// The same, for a test that expects a failure. `None` in a rank.
    ///
    /// # Panics
    ///
    /// In a rank, as the body does.
    pub fn run<V: Verdict>(&self, body: impl FnOnce(World) -> V) -> Option<Result<(), Report>> {
        self.0.run(|world| body(world).accept())
    }
}

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
