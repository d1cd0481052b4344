//! What a loss costs must not depend on how many hosts there are.

use std::time::Duration;

use crate::simulated::{Cost, Disturbance, Loss, disturb, reform};

#[test]
fn the_cost_of_a_loss_does_not_grow() {
    for (loss, limit) in [(Loss::Broken, 1), (Loss::Silent, 31)] {
        for tenth in [false, true] {
            let costs: Vec<Cost> = [10, 100, 1000]
                .map(|agents| reform(agents, if tenth { agents / 10 } else { 1 }, loss, 7))
                .to_vec();
            for cost in &costs {
                // A stop, its answer, a start.
                assert_eq!(cost.messages, 3, "{loss:?} {costs:?}");
                // Numbers get longer by a byte or two each; lists keep their length.
                assert!(cost.bytes <= costs[0].bytes + 16, "{loss:?} {costs:?}");
                assert!(cost.time <= Duration::from_secs(limit), "{loss:?} {costs:?}");
                assert_eq!(cost.attempts, 2, "one loss, one restart: {loss:?} {costs:?}");
            }
        }
    }
}

#[test]
fn coming_back_after_a_cut_takes_one_round_trip() {
    for seconds in [10, 25] {
        let time = Duration::from_secs(seconds);
        for all in [false, true] {
            let costs = [10, 100, 1000].map(|agents| {
                disturb(agents, if all { agents } else { 1 }, Disturbance::Cut, time, 7)
            });
            for cost in &costs {
                // A request, its answer, and nothing stops.
                assert_eq!((cost.messages, cost.attempts, cost.refused), (2, 1, 0), "{costs:?}");
                assert!(cost.bytes <= costs[0].bytes + 16, "{costs:?}");
                // An attempt to connect that began before the end of the cut, and a pause.
                assert!(cost.time <= Duration::from_secs(3), "{costs:?}");
            }
        }
    }
}

#[test]
fn a_short_cut_costs_nothing() {
    let cost = disturb(100, 100, Disturbance::Cut, Duration::from_secs(3), 7);
    assert_eq!((cost.messages, cost.attempts), (0, 1), "{cost:?}");
}

#[test]
fn an_agent_stopped_for_a_while_is_not_lost() {
    for agents in [10, 1000] {
        for seconds in [3, 10, 25] {
            let time = Duration::from_secs(seconds);
            for disturbance in [Disturbance::PausedAgents, Disturbance::PausedCoordinator] {
                let cost = disturb(agents, agents / 2, disturbance, time, 7);
                assert_eq!((cost.messages, cost.attempts), (0, 1), "{disturbance:?} {cost:?}");
            }
        }
    }
}

#[test]
fn a_cut_that_is_too_long_loses_hosts() {
    let cost = disturb(10, 3, Disturbance::Cut, Duration::from_secs(40), 7);
    assert_eq!((cost.refused, cost.attempts), (3, 1), "{cost:?}");
}

#[test]
fn a_seed_gives_a_run() {
    assert_eq!(reform(50, 5, Loss::Silent, 3), reform(50, 5, Loss::Silent, 3));
    assert_ne!(reform(50, 5, Loss::Silent, 3).time, reform(50, 5, Loss::Silent, 4).time);
}
