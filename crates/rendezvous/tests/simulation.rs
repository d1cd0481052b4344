//! What a loss costs must not depend on how many hosts there are.
#![allow(clippy::unwrap_used)] // A test.

mod simulated;

use std::time::Duration;

use simulated::{Cost, Loss, reform};

#[test]
fn the_cost_of_a_loss_does_not_grow() {
    for (loss, limit) in [(Loss::Broken, 1), (Loss::Silent, 5)] {
        for tenth in [false, true] {
            let costs: Vec<Cost> = [10, 100, 1000]
                .map(|agents| reform(agents, if tenth { agents / 10 } else { 1 }, loss, 7))
                .to_vec();
            for cost in &costs {
                // A stop, its answer, a start.
                assert_eq!(cost.messages, 3, "{loss:?} {costs:?}");
                // Numbers get longer, by a byte or two each; no list does.
                assert!(cost.bytes <= costs[0].bytes + 16, "{loss:?} {costs:?}");
                assert!(cost.time <= Duration::from_secs(limit), "{loss:?} {costs:?}");
                assert_eq!(cost.attempts, 2, "one loss, one restart: {loss:?} {costs:?}");
            }
        }
    }
}

#[test]
fn a_seed_gives_a_run() {
    assert_eq!(reform(50, 5, Loss::Silent, 3), reform(50, 5, Loss::Silent, 3));
    assert_ne!(reform(50, 5, Loss::Silent, 3).time, reform(50, 5, Loss::Silent, 4).time);
}
