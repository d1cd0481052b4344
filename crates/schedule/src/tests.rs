//! Tests of the curves at their ends, and of invalid arguments.

use super::*;

#[test]
fn values_past_the_end_stay() {
    let linear = Schedule::linear(0.2, 0.1, 4).unwrap();
    assert_eq!((linear.lr(2), linear.lr(4), linear.lr(u64::MAX)), (0.15000000000000002, 0.1, 0.1));
    let one_cycle = Schedule::one_cycle(OneCycle::new(0.3, 41)).unwrap();
    assert_eq!(one_cycle.lr(41), one_cycle.lr(40));
    assert_eq!(one_cycle.momentum(1_000), one_cycle.momentum(40));
    let only_up = OneCycle { pct_start: 1.0, ..OneCycle::new(0.3, 41) };
    assert_eq!(Schedule::one_cycle(only_up).unwrap().lr(99), 0.3);
}

#[test]
fn only_one_cycle_sets_a_momentum_and_a_warmup_holds_its_first() {
    assert_eq!(Schedule::constant(0.1).unwrap().momentum(3), None);
    let one_cycle = Schedule::one_cycle(OneCycle::new(0.3, 41)).unwrap();
    let warm = one_cycle.clone().warmup(5, 0.0).unwrap();
    assert_eq!((warm.lr(0), warm.momentum(3)), (0.0, Some(0.95)));
    assert_eq!((warm.lr(5), warm.momentum(17)), (one_cycle.lr(0), one_cycle.momentum(12)));
}

#[test]
fn impossible_schedules_are_errors() {
    let text = |schedule: Result<Schedule, ScheduleError>| schedule.unwrap_err().to_string();
    assert_eq!(
        text(Schedule::constant(-1.0)),
        "the schedule's rate is -1: it must be finite and at least 0"
    );
    assert!(text(Schedule::constant(f64::NAN)).contains("NaN"));
    assert!(text(Schedule::cosine(0.1, 0.0, 0)).starts_with("the number of steps is 0"));
    assert!(text(Schedule::step(0.1, 0, 0.5)).starts_with("the number of steps between"));
    assert!(text(Schedule::exponential(0.1, f64::INFINITY)).contains("factor is inf"));
    assert!(text(Schedule::constant(0.1).unwrap().warmup(0, 0.1)).contains("warm-up steps"));
    assert!(text(Schedule::constant(0.1).unwrap().warmup(3, 1.5)).contains("from 0 to 1"));
    let one_cycle = |edit: fn(&mut OneCycle)| {
        let mut options = OneCycle::new(0.3, 41);
        edit(&mut options);
        text(Schedule::one_cycle(options))
    };
    assert!(one_cycle(|o| o.total_steps = 0).starts_with("the number of steps is 0"));
    assert!(one_cycle(|o| o.total_steps = 3).contains("each phase"));
    assert!(one_cycle(|o| o.pct_start = 1.1).contains("from 0 to 1"));
    assert!(one_cycle(|o| o.pct_start = 0.0).contains("each phase"));
    assert!(one_cycle(|o| o.div_factor = 0.0).contains("finite and above 0"));
    assert!(
        one_cycle(|o| {
            o.three_phase = true;
            o.pct_start = 0.9;
        })
        .contains("each phase")
    );
}

#[test]
fn curves_hold_their_last_value_or_begin_anew() {
    let polynomial = Schedule::polynomial(0.2, 0.1, 4, 2.0).unwrap();
    assert_eq!((polynomial.lr(0), polynomial.lr(4), polynomial.lr(u64::MAX)), (0.2, 0.1, 0.1));
    let flat = Schedule::flat_cosine(0.2, 0.1, 8, 0.75).unwrap();
    assert_eq!((flat.lr(6), flat.lr(8), flat.lr(u64::MAX)), (0.2, 0.1, 0.1));
    assert!((flat.lr(7) - 0.15).abs() < 1e-15);
    let never = Schedule::flat_cosine(0.2, 0.1, 8, 1.0).unwrap();
    assert_eq!(never.lr(8), 0.2);
    let restarts = Schedule::cosine_restarts(0.1, 0.0, 5, 1).unwrap();
    assert_eq!(restarts.lr(5 * 1_000_000_007), 0.1);
    // The longest possible period does not overflow.
    assert!(Schedule::cosine_restarts(0.1, 0.0, u64::MAX, 3).unwrap().lr(u64::MAX) <= 0.1);
    let inverse = Schedule::inverse_sqrt(0.1, 100).unwrap();
    assert_eq!((inverse.lr(0), inverse.lr(300)), (0.1, 0.05));
}

#[test]
fn a_momentum_can_be_put_on_any_schedule_and_replaces_its_own() {
    let momentum = Schedule::linear(0.85, 0.95, 10).unwrap();
    let cosine = Schedule::cosine(0.1, 0.0, 10).unwrap().with_momentum(momentum.clone());
    assert_eq!((cosine.lr(0), cosine.momentum(0)), (0.1, Some(0.85)));
    let one_cycle = Schedule::one_cycle(OneCycle::new(0.3, 41)).unwrap();
    let with = one_cycle.clone().with_momentum(momentum);
    assert_eq!((with.lr(17), with.momentum(40)), (one_cycle.lr(17), Some(0.95)));
    // During a warm-up it holds its first value as a schedule's own does.
    assert_eq!(with.warmup(5, 0.0).unwrap().momentum(4), Some(0.85));
}

#[test]
fn a_second_warmup_replaces_the_first() {
    let cosine = Schedule::cosine(0.1, 0.0, 10).unwrap();
    let twice = cosine.clone().warmup(3, 0.5).unwrap().warmup(4, 0.0).unwrap();
    assert_eq!(twice, cosine.warmup(4, 0.0).unwrap());
}

#[test]
fn impossible_sequences_and_milestones_are_errors() {
    let text = |schedule: Result<Schedule, ScheduleError>| schedule.unwrap_err().to_string();
    let constant = || Schedule::constant(0.1).unwrap();
    assert_eq!(
        text(Schedule::sequence(vec![constant(), constant()], &[])),
        "a sequence of 2 schedules needs 1 milestones, the step at which each but the first begins, \
         and has 0"
    );
    assert!(text(Schedule::sequence(vec![], &[])).contains("schedules in the sequence is 0"));
    assert!(
        text(Schedule::sequence(vec![constant(), constant()], &[0])).contains("milestone is 0")
    );
    assert_eq!(
        text(Schedule::multi_step(0.1, &[5, 5], 0.5)),
        "the schedule's milestones must rise: 5 does not come after 5"
    );
    assert!(text(Schedule::polynomial(0.1, 0.0, 4, 0.0)).contains("power is 0"));
    assert!(text(Schedule::flat_cosine(0.1, 0.0, 4, 1.5)).contains("from 0 to 1"));
    assert!(text(Schedule::cosine_restarts(0.1, 0.0, 4, 0)).contains("factor between periods"));
    assert!(text(Schedule::inverse_sqrt(0.1, 0)).contains("timescale is 0"));
    let cycle = FitOneCycle { div_final: 0.0, ..FitOneCycle::new(0.1, 10) };
    assert!(text(Schedule::fit_one_cycle(cycle)).contains("final divisor"));
}

#[test]
fn a_plateau_counts_as_torch_does() {
    let plateau = Plateau { factor: 0.5, patience: 0, eps: 0.0, ..Plateau::new(0.1) };
    let after = |plateau: &Plateau, metrics: &[f64]| {
        metrics.iter().fold(plateau.start(), |state, &metric| plateau.after(&state, metric))
    };
    // NaN is never better, nor is a first infinity.
    assert_eq!(after(&plateau, &[1.0, f64::NAN]).lr, 0.05);
    assert_eq!(after(&plateau, &[f64::INFINITY]).lr, 0.05);
    let higher = Plateau { mode: Mode::Max, threshold: Threshold::Absolute(0.1), ..plateau };
    assert_eq!(after(&higher, &[0.5, 0.7, 0.75]).lr, 0.05);
    assert_eq!(after(&higher, &[0.5, 0.7, 0.85]).lr, 0.1);
    let floor = Plateau { min_lr: 0.08, ..plateau };
    assert_eq!(after(&floor, &[1.0, 1.0, 1.0]).lr, 0.08);
    let text = |plateau: Plateau| plateau.check().unwrap_err().to_string();
    assert!(text(Plateau { factor: 1.0, ..plateau }).contains("factor is 1"));
    assert!(text(Plateau { lr: f64::NAN, ..plateau }).contains("rate is NaN"));
    assert!(plateau.check().is_ok());
}

#[test]
fn a_definition_is_read_back_and_checked() {
    let cosine = || Schedule::cosine(0.1, 0.01, 9).unwrap();
    let cycle = OneCycle { anneal: Anneal::Linear, three_phase: true, ..OneCycle::new(0.3, 41) };
    let schedules = [
        Schedule::constant(0.1).unwrap(),
        Schedule::linear(0.0, 0.1, 3).unwrap(),
        cosine(),
        Schedule::cosine_restarts(0.1, 0.0, 5, 2).unwrap(),
        Schedule::flat_cosine(0.1, 0.0, 8, 0.75).unwrap(),
        Schedule::polynomial(0.1, 0.01, 8, 2.0).unwrap(),
        Schedule::exponential(0.1, 0.9).unwrap(),
        Schedule::step(0.1, 3, 0.5).unwrap(),
        Schedule::multi_step(0.1, &[3, 7], 0.5).unwrap(),
        Schedule::inverse_sqrt(0.1, 10).unwrap(),
        Schedule::one_cycle(cycle).unwrap(),
        Schedule::fit_one_cycle(FitOneCycle::new(0.1, 8)).unwrap(),
        Schedule::sequence(vec![cosine(), Schedule::constant(0.2).unwrap()], &[4]).unwrap(),
        cosine().with_momentum(Schedule::linear(0.8, 0.9, 5).unwrap()).warmup(4, 0.1).unwrap(),
    ];
    for schedule in schedules {
        let definition = Definition::All(Described::of(&schedule));
        let text = serde_json::to_string(&definition).unwrap();
        assert_eq!(serde_json::from_str::<Definition>(&text).unwrap(), definition, "{text}");
        assert_eq!(definition, Definition::All(Described::Known(schedule)));
    }
    assert_eq!(Described::of(&|_: u64| 0.1), Described::Function { momentum: false });
    // Numbers that would divide by zero, or that no constructor takes.
    for text in [
        r#"{"cosine":{"start":0.1,"end":0.0,"steps":0}}"#,
        r#"{"restarts":{"start":0.1,"end":0.0,"first":3,"factor":0}}"#,
        r#"{"sequence":[]}"#,
        r#"{"warmup":{"steps":3,"factor":2.0,"then":{"constant":{"lr":0.1}}}}"#,
        r#"{"constant":{"lr":-1.0}}"#,
        r#"{"nothing":{}}"#,
    ] {
        assert!(serde_json::from_str::<Schedule>(text).is_err(), "{text}");
    }
}
