//! Tables by hand, against formulas, as properties, and with ranks as threads.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, prop_assume, proptest};
use proptest::strategy::Strategy as Generator;

use super::*;

fn table(schedule: Schedule, ranks: usize, micro_batches: usize, chunks: usize) -> PipelineTable {
    PipelineTable::new(schedule, ranks, micro_batches, chunks).unwrap()
}

fn fault(schedule: Schedule, ranks: usize, micro_batches: usize, chunks: usize) -> String {
    PipelineTable::new(schedule, ranks, micro_batches, chunks).unwrap_err().to_string()
}

/// Returns the lists of actions of a table, to change them.
fn lists(table: &PipelineTable) -> Vec<Vec<Action>> {
    (0..table.ranks()).map(|rank| table.actions(rank).to_vec()).collect()
}

/// Creates the table again with other lists of actions.
fn again(table: &PipelineTable, actions: Vec<Vec<Action>>) -> Result<PipelineTable, PipelineError> {
    let limits = (0..table.ranks()).map(|rank| table.held_limit(rank)).collect();
    PipelineTable::from_actions(
        table.stage_ranks().to_vec(),
        table.micro_batches(),
        limits,
        actions,
    )
}

/// Formats actions in short: `F0 >0 <0 B0` are passes, sent (`>`) and received (`<`) activations and gradients.
fn in_short(actions: &[Action]) -> String {
    let word = |action: &Action| {
        let kind = match action.kind {
            ActionKind::Unshard => "U",
            ActionKind::Forward => "F",
            ActionKind::Backward => "B",
            ActionKind::BackwardInput => "I",
            ActionKind::BackwardWeight => "W",
            ActionKind::SendActivation => "a>",
            ActionKind::ReceiveActivation => "a<",
            ActionKind::SendGradient => "g>",
            ActionKind::ReceiveGradient => "g<",
            ActionKind::ReduceGradients => "R",
            ActionKind::Reshard => "S",
        };
        format!("{kind}{}", action.micro_batch.map_or_else(String::new, |it| it.to_string()))
    };
    actions.iter().map(word).collect::<Vec<_>>().join(" ")
}

mod schedules {
    use super::*;

    #[test]
    fn two_ranks_with_1f1b_are_as_by_hand() {
        let table = table(Schedule::OneForwardOneBackward, 2, 4, 1);
        assert_eq!(
            in_short(table.actions(0)),
            "U F0 a>0 F1 a>1 g<0 B0 F2 a>2 g<1 B1 F3 a>3 g<2 B2 g<3 B3 R S"
        );
        assert_eq!(
            in_short(table.actions(1)),
            "a<0 U F0 a<1 B0 g>0 F1 B1 a<2 g>1 F2 B2 a<3 g>2 F3 B3 R S g>3"
        );
        assert_eq!(
            table.to_string(),
            "0  F0 F1 .  .  B0 -  F2 B1 -  F3 B2 -  .  B3 - \n\
             1  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  .  . \n"
        );
    }

    #[test]
    fn small_tables_are_as_in_the_papers() {
        assert_eq!(
            table(Schedule::GPipe, 2, 2, 1).to_string(),
            "0  F0 F1 .  .  .  B0 -  B1 - \n1  .  F0 F1 B0 -  B1 -  .  . \n"
        );
        assert_eq!(
            table(Schedule::ZeroBubble, 2, 2, 1).to_string(),
            "0  F0 F1 .  I0 W0 I1 W1\n1  .  F0 I0 F1 I1 W0 W1\n"
        );
        assert_eq!(
            table(Schedule::ZeroBubbleV, 2, 4, 2).to_string(),
            "0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 .  \n\
             1  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3\n"
        );
        assert_eq!(
            table(Schedule::Interleaved, 2, 2, 2).to_string(),
            "0  0F0 0F1 2F0 2F1 .   .   2B0 -   .   2B1 -   0B0 -   0B1 -  \n\
             1  .   1F0 1F1 3F0 3B0 -   3F1 3B1 -   1B0 -   1B1 -   .   .  \n"
        );
    }

    /// Checks equal costs, and all schedules that support the numbers.
    #[test]
    fn bubbles_are_those_of_the_formulas() {
        let mut compared = 0;
        for schedule in Schedule::ALL {
            for ranks in [2, 4, 8] {
                for micro_batches in [4, 8, 32] {
                    let least = schedule.least_chunks();
                    for chunks in [least, 2 * least] {
                        let Ok(table) = PipelineTable::new(schedule, ranks, micro_batches, chunks)
                        else {
                            continue;
                        };
                        let timeline = table.simulate(&Costs::equal(table.stages())).unwrap();
                        let formula = schedule.bubble_formula(ranks, micro_batches, chunks);
                        let bubble = timeline.bubble();
                        assert!(
                            (bubble - formula).abs() < 1e-9,
                            "{schedule} p {ranks} m {micro_batches} v {chunks}: {bubble}, not {formula}"
                        );
                        for rank in &timeline.ranks {
                            assert!((rank.bubble() - formula).abs() < 1e-9);
                        }
                        compared += 1;
                    }
                }
            }
        }
        // gpipe 9, looped-bfs 18; without p 8 and m 4 1f1b and zb-h1 8 each, interleaved 16; zbv with m >= 2 p.
        assert_eq!(compared, 9 + 18 + 2 * 8 + 16 + 6);
    }

    #[test]
    fn the_last_ranks_of_1f1b_hold_less() {
        let held = |schedule, chunks| -> Vec<usize> {
            let table = table(schedule, 4, 8, chunks);
            (0..4).map(|rank| table.held(rank)).collect()
        };
        assert_eq!(held(Schedule::GPipe, 1), [8, 8, 8, 8]);
        assert_eq!(held(Schedule::OneForwardOneBackward, 1), [4, 3, 2, 1]);
        assert_eq!(held(Schedule::Interleaved, 2), [11, 9, 7, 5]);
        assert_eq!(held(Schedule::LoopedBfs, 2), [16, 16, 16, 16]);
        assert_eq!(held(Schedule::ZeroBubble, 1), [4, 4, 4, 4]);
        assert_eq!(held(Schedule::ZeroBubbleV, 2), [8, 8, 8, 8]);
    }

    #[test]
    fn wrong_numbers_come_with_those_that_work() {
        assert_eq!(
            fault(Schedule::OneForwardOneBackward, 4, 3, 1),
            "1f1b on 4 ranks cannot run 3 micro-batches, of which there must be at least as many as ranks: take 4"
        );
        assert_eq!(
            fault(Schedule::Interleaved, 4, 9, 2),
            "interleaved on 4 ranks cannot run 9 micro-batches, which go through a rank's stages in rounds of \
             equal size, each of at least as many as there are ranks: take 8 or 10"
        );
        assert_eq!(fault(Schedule::GPipe, 4, 4, 2), "gpipe has one stage for each rank, not 2");
        assert_eq!(
            fault(Schedule::GPipe, 4, 0, 1),
            "the number of micro-batches is 0: it must be at least 1"
        );
        let fault = fault(Schedule::GPipe, usize::MAX, usize::MAX, 1);
        assert!(fault.ends_with("are more than 1048576 passes: take fewer"), "{fault}");
        assert_eq!(
            "1f1".parse::<Schedule>().unwrap_err().to_string(),
            "`1f1` is not a pipeline schedule: write gpipe, 1f1b, interleaved, looped-bfs, zb-h1 or zbv"
        );
        for schedule in Schedule::ALL {
            assert_eq!(schedule.name().parse(), Ok(schedule));
        }
    }

    #[test]
    fn messages_that_take_time_make_the_bubble_larger() {
        let table = table(Schedule::OneForwardOneBackward, 4, 8, 1);
        let mut costs = Costs::equal(4);
        let without = table.simulate(&costs).unwrap();
        costs.message = 0.25;
        let with = table.simulate(&costs).unwrap();
        assert!(with.total > without.total, "{} and {}", with.total, without.total);
        assert_eq!(with.ranks[2].busy, without.ranks[2].busy);
        for costs in [
            Costs { message: f64::NAN, ..Costs::equal(4) },
            Costs { message: -1.0, ..Costs::equal(4) },
            Costs::equal(3),
        ] {
            assert!(table.simulate(&costs).is_err(), "{costs:?}");
        }
    }
}

/// Runs a table: each rank is a thread, and each direction between two ranks a channel in which a send ends when it is
/// received.
#[test]
fn ranks_with_blocking_messages_come_to_the_end() {
    for schedule in Schedule::ALL {
        for (ranks, micro_batches) in [(2, 4), (3, 6), (4, 12)] {
            let table = table(schedule, ranks, micro_batches, schedule.least_chunks());
            run_with_threads(&table);
        }
    }
}

fn run_with_threads(table: &PipelineTable) {
    let mut senders: Vec<HashMap<usize, SyncSender<Action>>> = vec![HashMap::new(); table.ranks()];
    let mut receivers: Vec<HashMap<usize, Receiver<Action>>> =
        (0..table.ranks()).map(|_| HashMap::new()).collect();
    for (from, senders) in senders.iter_mut().enumerate() {
        for (to, receivers) in receivers.iter_mut().enumerate() {
            let (sender, receiver) = sync_channel(0);
            senders.insert(to, sender);
            receivers.insert(from, receiver);
        }
    }
    thread::scope(|scope| {
        for (rank, (senders, receivers)) in senders.into_iter().zip(receivers).enumerate() {
            scope.spawn(move || {
                for action in table.actions(rank) {
                    let Some(peer) = table.peer(*action) else { continue };
                    match action.kind {
                        ActionKind::SendActivation | ActionKind::SendGradient => {
                            senders[&peer].send(*action).unwrap();
                        }
                        _ => {
                            let sent = receivers[&peer].recv_timeout(Duration::from_secs(60));
                            assert_eq!(sent.ok(), action.counterpart(), "rank {rank}");
                        }
                    }
                }
            });
        }
    });
}

mod faults {
    use super::*;

    #[test]
    fn messages_that_wait_for_each_other_are_named() {
        // 0: U F0 a>0 F1 a>1 g<0 B0 ..., 1: a<0 U F0 a<1 B0 g>0 F1 ...
        let table = table(Schedule::OneForwardOneBackward, 2, 4, 1);
        let mut actions = lists(&table);
        actions[0].swap(4, 5);
        assert_eq!(
            again(&table, actions).unwrap_err().to_string(),
            "rank 0, action 4 (receive_gradient of stage 0, micro-batch 0) and rank 1, action 3 (receive_activation of \
             stage 1, micro-batch 1) wait for each other without end"
        );
        // Both ranks send first, which would only work with buffers.
        let mut actions = lists(&table);
        actions[1][3..=5].rotate_left(1);
        assert_eq!(
            again(&table, actions).unwrap_err().to_string(),
            "rank 0, action 4 (send_activation of stage 0, micro-batch 1) and rank 1, action 4 (send_gradient of \
             stage 1, micro-batch 0) wait for each other without end"
        );
    }

    #[test]
    fn faults_name_the_place() {
        let table = table(Schedule::OneForwardOneBackward, 2, 2, 1);
        let change = |change: &dyn Fn(&mut Vec<Vec<Action>>)| {
            let mut actions = lists(&table);
            change(&mut actions);
            again(&table, actions).unwrap_err().to_string()
        };
        assert_eq!(
            change(&|it| it[1][2].stage = 0),
            "rank 1, action 2 (forward of stage 0, micro-batch 0) belongs to a stage of rank 0"
        );
        assert_eq!(
            change(&|it| it[1][2].stage = 2),
            "rank 1, action 2 (forward of stage 2, micro-batch 0) belongs to a stage that does not exist: there are 2"
        );
        assert_eq!(
            change(&|it| it[1][2].micro_batch = Some(2)),
            "rank 1, action 2 (forward of stage 1, micro-batch 2) must have a micro-batch below 2 if it handles \
             one, and none otherwise"
        );
        assert_eq!(
            change(&|it| it[1][2] = Action::new(ActionKind::SendActivation, 1, 0)),
            "rank 1, action 2 (send_activation of stage 1, micro-batch 0) has no other rank as its peer"
        );
        assert_eq!(
            change(&|it| {
                it[0].remove(2);
            }),
            "rank 1, action 0 (receive_activation of stage 1, micro-batch 0) has no send_activation of stage 0, \
             micro-batch 0 on rank 0"
        );
        assert_eq!(
            change(&|it| {
                it[0].pop();
            }),
            "rank 0 has no reshard of stage 0"
        );
        let limits = PipelineTable::from_actions(vec![0, 1], 2, vec![1, 1], lists(&table));
        assert_eq!(
            limits.unwrap_err().to_string(),
            "rank 0, action 3 (forward of stage 0, micro-batch 1) would hold 2 activations, and the rank's limit is 1"
        );
        let sizes = [
            (vec![], 1, vec![1], vec![vec![]], "the number of stages is 0: it must be at least 1"),
            (vec![0], 1, vec![], vec![], "the number of ranks is 0: it must be at least 1"),
            (vec![1], 1, vec![1], vec![vec![]], "stage 0 is on rank 1, and the table has 1 rank"),
            (vec![0], 1, vec![1, 1], vec![vec![], vec![]], "rank 1 has no stage"),
            (
                vec![0],
                1,
                vec![],
                vec![vec![]],
                "the table has actions for 1 rank and limits of held activations for 0",
            ),
            (vec![0], 1, vec![1], vec![vec![]], "rank 0 has no forward of stage 0, micro-batch 0"),
        ];
        for (stages, micro_batches, limits, actions, expected) in sizes {
            let fault = PipelineTable::from_actions(stages, micro_batches, limits, actions);
            assert_eq!(fault.unwrap_err().to_string(), expected);
        }
    }
}

fn any_numbers() -> impl Generator<Value = (Schedule, usize, usize, usize)> {
    (prop::sample::select(Schedule::ALL.to_vec()), 1..=8usize, 1..=32usize, 1..=4usize)
}

/// Generates tables with messages, and at most `8 x 32 x 4` passes.
fn any_table() -> impl Generator<Value = (Schedule, PipelineTable)> {
    any_numbers().prop_filter_map("the schedule has these numbers", |(schedule, p, m, v)| {
        let v = if schedule.least_chunks() == 1 { 1 } else { v };
        let table = PipelineTable::new(schedule, p, m, v).ok()?;
        (p > 1).then_some((schedule, table))
    })
}

/// Change of a table. Each of them makes any table wrong.
#[derive(Debug, Clone, Copy)]
enum Mutation {
    Drop,
    Duplicate,
    MoveToOtherRank,
    DropSend,
    DropReceive,
    SwapReceives,
    SwapSends,
    BackwardBeforeForward,
    SendBeforePass,
    PassBeforeReceive,
    ReduceEarly,
    ReshardBetween,
    UnshardLate,
    WeightBeforeInput,
    LeaveOutWeight,
    LeaveStage,
}

fn sends(kind: ActionKind) -> bool {
    matches!(kind, ActionKind::SendActivation | ActionKind::SendGradient)
}

fn receives(kind: ActionKind) -> bool {
    matches!(kind, ActionKind::ReceiveActivation | ActionKind::ReceiveGradient)
}

impl Mutation {
    const ALL: [Self; 16] = [
        Self::Drop,
        Self::Duplicate,
        Self::MoveToOtherRank,
        Self::DropSend,
        Self::DropReceive,
        Self::SwapReceives,
        Self::SwapSends,
        Self::BackwardBeforeForward,
        Self::SendBeforePass,
        Self::PassBeforeReceive,
        Self::ReduceEarly,
        Self::ReshardBetween,
        Self::UnshardLate,
        Self::WeightBeforeInput,
        Self::LeaveOutWeight,
        Self::LeaveStage,
    ];

    /// Applies the change to the list of a rank. `None` if the list has no action of that kind.
    fn apply(
        self,
        table: &PipelineTable,
        actions: &mut [Vec<Action>],
        rank: usize,
        pick: usize,
    ) -> Option<()> {
        let list = &mut actions[rank];
        let places = |list: &[Action], is: &dyn Fn(ActionKind) -> bool| -> Vec<usize> {
            (0..list.len()).filter(|&at| is(list[at].kind)).collect()
        };
        let one = |places: Vec<usize>| (!places.is_empty()).then(|| places[pick % places.len()]);
        let place_of = |list: &[Action], action: Action| list.iter().position(|it| *it == action);
        let of_kind = |list: &[Action], kind| one(places(list, &|it| it == kind));
        match self {
            Self::Drop => {
                list.remove(pick % list.len());
            }
            Self::Duplicate => {
                let at = pick % list.len();
                let action = list[at];
                list.insert(list.len() - at / 2, action);
            }
            Self::MoveToOtherRank => {
                let action = list.remove(pick % list.len());
                let other = &mut actions[(rank + 1) % table.ranks()];
                other.insert(pick % other.len(), action);
            }
            Self::DropSend => {
                let at = one(places(list, &sends))?;
                list.remove(at);
            }
            Self::DropReceive => {
                let at = one(places(list, &receives))?;
                list.remove(at);
            }
            Self::SwapReceives | Self::SwapSends => {
                let is = if matches!(self, Self::SwapSends) { sends } else { receives };
                let first = one(places(list, &is))?;
                let peer = table.peer(list[first]);
                let second = (first + 1..list.len())
                    .find(|&at| is(list[at].kind) && table.peer(list[at]) == peer)?;
                list.swap(first, second);
            }
            Self::BackwardBeforeForward => {
                let forward = of_kind(list, ActionKind::Forward)?;
                let action = list[forward];
                let backward = place_of(list, action.as_kind(ActionKind::Backward))
                    .or_else(|| place_of(list, action.as_kind(ActionKind::BackwardInput)))?;
                list.swap(forward, backward);
            }
            Self::SendBeforePass => {
                let send = of_kind(list, ActionKind::SendActivation)?;
                let pass = place_of(list, list[send].as_kind(ActionKind::Forward))?;
                list[pass..=send].rotate_right(1);
            }
            Self::PassBeforeReceive => {
                let receive = of_kind(list, ActionKind::ReceiveActivation)?;
                let pass = place_of(list, list[receive].as_kind(ActionKind::Forward))?;
                list[receive..=pass].rotate_right(1);
            }
            Self::ReduceEarly | Self::ReshardBetween => {
                let kind = match self {
                    Self::ReduceEarly => ActionKind::ReduceGradients,
                    _ => ActionKind::Reshard,
                };
                let end = of_kind(list, kind)?;
                let stage = list[end].stage;
                let last = list.iter().rposition(|it| it.stage == stage && it.kind.computes())?;
                list[last..=end].rotate_right(1);
            }
            Self::UnshardLate => {
                let unshard = of_kind(list, ActionKind::Unshard)?;
                let stage = list[unshard].stage;
                let first = list.iter().position(|it| it.stage == stage && it.kind.computes())?;
                list[unshard..=first].rotate_left(1);
            }
            Self::WeightBeforeInput => {
                let weight = of_kind(list, ActionKind::BackwardWeight)?;
                let input = place_of(list, list[weight].as_kind(ActionKind::BackwardInput))?;
                list.swap(input, weight);
            }
            Self::LeaveOutWeight => {
                let backward = of_kind(list, ActionKind::Backward)?;
                list[backward].kind = ActionKind::BackwardInput;
            }
            Self::LeaveStage => {
                let at = pick % list.len();
                list[at].stage = (list[at].stage + 1) % (table.stages() + 1);
            }
        }
        Some(())
    }
}

#[test]
fn each_kind_of_mutation_is_refused_in_each_schedule_that_has_it() {
    for mutation in Mutation::ALL {
        let mut refused = 0;
        for schedule in Schedule::ALL {
            let table = table(schedule, 3, 6, schedule.least_chunks());
            for rank in 0..3 {
                for pick in 0..20 {
                    let mut actions = lists(&table);
                    if mutation.apply(&table, &mut actions, rank, pick).is_some() {
                        let fault = again(&table, actions);
                        assert!(fault.is_err(), "{mutation:?} {schedule} {rank} {pick}");
                        refused += 1;
                    }
                }
            }
        }
        assert!(refused > 0, "{mutation:?}");
    }
}

proptest! {
    #[test]
    fn numbers_give_a_table_or_numbers_that_do((schedule, p, m, v) in any_numbers()) {
        match PipelineTable::new(schedule, p, m, v) {
            Ok(table) => {
                let bubble = table.simulate(&Costs::equal(table.stages())).unwrap().bubble();
                let formula = schedule.bubble_formula(p, m, v);
                prop_assert!((bubble - formula).abs() < 1e-9, "{} {}", bubble, formula);
                for rank in 0..p {
                    prop_assert!(table.held(rank) <= table.held_limit(rank));
                    prop_assert_eq!(table.held_limit(rank), schedule.held_limit(rank, p, m, v));
                    prop_assert_eq!(table.stages_of(rank).count(), v);
                }
                prop_assert_eq!(again(&table, lists(&table)), Ok(table));
            }
            Err(PipelineError::MicroBatches { near, .. }) => {
                prop_assert!(!near.is_empty());
                for near in near {
                    prop_assert!(PipelineTable::new(schedule, p, near, v).is_ok());
                }
            }
            Err(PipelineError::Chunks { .. }) => {
                let least = schedule.least_chunks();
                prop_assert!(PipelineTable::new(schedule, p, 2 * p * m, least).is_ok());
            }
            Err(other) => prop_assert!(false, "{}", other),
        }
    }

    #[test]
    fn a_wrong_table_is_refused(
        (_, table) in any_table(),
        mutation in prop::sample::select(Mutation::ALL.to_vec()),
        rank in any::<prop::sample::Index>(),
        pick in any::<usize>(),
    ) {
        let mut actions = lists(&table);
        let rank = rank.index(table.ranks());
        prop_assume!(mutation.apply(&table, &mut actions, rank, pick).is_some());
        let fault = again(&table, actions);
        prop_assert!(fault.is_err(), "{:?}\n{}", mutation, table);
    }

    #[test]
    fn any_lists_give_a_table_or_a_fault(
        stage_ranks in vec(0..4usize, 0..5),
        micro_batches in 0..3usize,
        limits in vec(0..3usize, 0..4),
        actions in vec(vec(any_action(), 0..12), 0..4),
    ) {
        let _ = PipelineTable::from_actions(stage_ranks, micro_batches, limits, actions);
    }

    #[test]
    fn cuts_by_cost_are_the_best(costs in vec(0..20u32, 1..9), stages in 1..5usize) {
        let costs: Vec<_> = costs.into_iter().map(f64::from).collect();
        let stages = stages.min(costs.len());
        let slowest = |cuts: &[std::ops::Range<usize>]| {
            let sum = |cut: &std::ops::Range<usize>| costs[cut.clone()].iter().sum::<f64>();
            cuts.iter().map(sum).fold(0.0, f64::max)
        };
        let cut = cut_by_cost(&costs, stages).unwrap();
        prop_assert_eq!(cut.len(), stages);
        prop_assert_eq!((cut[0].start, cut[stages - 1].end), (0, costs.len()));
        prop_assert!(cut.iter().all(|cut| !cut.is_empty()));
        prop_assert!(cut.windows(2).all(|pair| pair[0].end == pair[1].start));
        // All ways to divide the layers.
        let best = (0..1u32 << (costs.len() - 1))
            .filter(|borders| borders.count_ones() as usize == stages - 1)
            .map(|borders| {
                let inner = (1..costs.len()).filter(|at| borders & (1 << (at - 1)) != 0);
                let borders: Vec<_> = [0].into_iter().chain(inner).chain([costs.len()]).collect();
                let cuts: Vec<_> = borders.windows(2).map(|pair| pair[0]..pair[1]).collect();
                slowest(&cuts)
            })
            .fold(f64::INFINITY, f64::min);
        prop_assert_eq!(slowest(&cut), best);
    }
}

fn any_action() -> impl Generator<Value = Action> {
    let kinds = vec![
        ActionKind::Unshard,
        ActionKind::Forward,
        ActionKind::Backward,
        ActionKind::BackwardInput,
        ActionKind::BackwardWeight,
        ActionKind::SendActivation,
        ActionKind::ReceiveActivation,
        ActionKind::SendGradient,
        ActionKind::ReceiveGradient,
        ActionKind::ReduceGradients,
        ActionKind::Reshard,
    ];
    (prop::sample::select(kinds), 0..4usize, 0..3usize).prop_map(|(kind, stage, micro_batch)| {
        if kind.has_micro_batch() {
            Action::new(kind, stage, micro_batch)
        } else {
            Action::of_step(kind, stage)
        }
    })
}

mod cuts {
    use super::*;

    #[test]
    fn wrong_cuts_are_named() {
        let fault = |cut: Result<Vec<_>, PipelineError>| cut.unwrap_err().to_string();
        assert_eq!(
            fault(cut_evenly(2, 3)),
            "2 layers cannot be cut into 3 stages, each with at least one"
        );
        assert_eq!(fault(cut_evenly(2, 0)), "the number of stages is 0: it must be at least 1");
        assert_eq!(
            fault(cut_by_cost(&[1.0, f64::NAN], 2)),
            "the cost of layer 1 is NaN: it must be a finite number and not below 0"
        );
        let layers = ["wte", "h.0", "h.1", "ln_f"];
        assert_eq!(
            fault(cut_at(&layers, &["h.2"])),
            "there is no layer h.2 at which a stage could begin; there are h.0, h.1, wte, ln_f"
        );
        assert!(fault(cut_at(&layers, &["wte"])).contains("begin at wte: it is the first layer"));
        for starts in [["h.1", "h.0"], ["h.1", "h.1"]] {
            let fault = fault(cut_at(&layers, &starts));
            assert!(fault.contains("it does not come after h.1; name the first layers"), "{fault}");
        }
        assert_eq!(fault(cut_at(&["a", "a"], &[])), "two layers have the name a");
    }

    #[test]
    fn a_thousand_layers_are_cut() {
        let costs: Vec<_> = (0..1000).map(|layer| 1.0 + f64::from(layer % 7)).collect();
        let cut = cut_by_cost(&costs, 64).unwrap();
        assert_eq!((cut.len(), cut[63].end), (64, 1000));
    }
}
