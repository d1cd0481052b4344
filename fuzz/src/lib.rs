//! What the programs of `fuzz_targets/` have in common.

pub use brigade_fuzzkit;
pub use libfuzzer_sys;

/// A program that gives libFuzzer's inputs to the target of this name.
#[macro_export]
macro_rules! fuzz {
    ($name:literal) => {
        #[global_allocator]
        static ALLOCATOR: &$crate::brigade_fuzzkit::Allocator = $crate::brigade_fuzzkit::ALLOCATOR;

        $crate::libfuzzer_sys::fuzz_target!(|input: &[u8]| {
            let target = $crate::brigade_fuzzkit::target($name).expect("it is a target");
            $crate::brigade_fuzzkit::check(target, input);
        });
    };
}
