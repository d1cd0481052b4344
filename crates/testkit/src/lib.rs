//! Tools for tests: [`dist_test!`] runs a test as several ranks.
//!
//! It also has comparisons of numbers, the numbers of golden files, archives for readers of `.pth` files, generated
//! film reviews, and (feature `photos`) generated images with the statistics of photographs.
//!
//! ```no_run
//! use brigade_testkit::{dist_test, step};
//!
//! dist_test!(world = 2, ranks_know_their_place, |world| {
//!     step!("about to look");
//!     assert!(world.rank.as_usize() < 2);
//! });
//! # fn main() {}
//! ```

mod archive;
mod close;
mod dist;
mod golden;
mod killable;
#[cfg(feature = "photos")]
mod photos;
mod reviews;

pub use archive::archive;
pub use close::assert_close;
pub use dist::{BodyResult, DistTest};
pub use golden::{golden_uniform, golden_unit};
pub use killable::KillableRanks;
#[cfg(feature = "photos")]
pub use photos::Photos;
pub use reviews::Reviews;

pub use brigade_launch::children::Report;
#[doc(hidden)]
pub use brigade_launch::children::note_step;
#[doc(hidden)]
pub use brigade_rank_env::World;

/// Defines a test that runs as several processes, each a rank of the same group.
///
/// `dist_test!(world = N, [seconds = S,] NAME, |world| { … })` makes a `#[test]` that starts this
/// test executable N times. Each process runs the body with its own
/// [`World`](brigade_rank_env::World), which is in its environment, too; rank 0 has a bound socket for
/// the store. The body may return `Result<(), E>` (name the type: `|world| -> Result<(), E>`) and
/// fails like a test. Attributes go before `world`, as in `dist_test!(#[ignore] world = 2, …)`.
///
/// The test fails with the output of all ranks, the first that failed first, when one of them fails, or when one hangs
/// for `seconds` (default 60): then the report names the ranks that hang, their last [`step!`] and what their threads
/// wait for. No process survives the test.
#[macro_export]
macro_rules! dist_test {
    ($(#[$attribute:meta])* world = $world:expr, seconds = $seconds:expr, $name:ident, $body:expr $(,)?) => {
        #[test]
        $(#[$attribute])*
        fn $name() {
            let name = ::core::concat!(::core::module_path!(), "::", ::core::stringify!($name));
            $crate::DistTest::new(name, $world)
                .time_limit(::std::time::Duration::from_secs($seconds))
                .run_or_panic($body);
        }
    };
    ($(#[$attribute:meta])* world = $world:expr, $name:ident, $body:expr $(,)?) => {
        $crate::dist_test!($(#[$attribute])* world = $world, seconds = 60, $name, $body);
    };
}

/// Records how far this rank has come, with the arguments of `format!`. The text is shown when the rank hangs or fails.
///
/// Does nothing outside a [`dist_test!`].
#[macro_export]
macro_rules! step {
    ($($arg:tt)*) => {
        $crate::note_step(&::std::format!($($arg)*))
    };
}
