//! What holds for every schedule, whatever its numbers.

use brigade_schedule::{FitOneCycle, OneCycle, Plateau, Schedule};
use proptest::prelude::*;

fn curve() -> impl Strategy<Value = Schedule> {
    let rate = || 1e-6..1.0f64;
    let steps = || 1..10_000u64;
    prop_oneof![
        rate().prop_map(|lr| Schedule::constant(lr).unwrap()),
        (rate(), rate(), steps()).prop_map(|(a, b, n)| Schedule::linear(a, b, n).unwrap()),
        (rate(), rate(), steps()).prop_map(|(a, b, n)| Schedule::cosine(a, b, n).unwrap()),
        (rate(), rate(), steps(), 1..4u64)
            .prop_map(|(a, b, n, m)| Schedule::cosine_restarts(a, b, n, m).unwrap()),
        (rate(), rate(), steps(), 0.0..=1.0f64)
            .prop_map(|(a, b, n, p)| Schedule::flat_cosine(a, b, n, p).unwrap()),
        (rate(), rate(), steps(), 0.1..4.0f64)
            .prop_map(|(a, b, n, p)| Schedule::polynomial(a, b, n, p).unwrap()),
        (rate(), steps(), 0.1..1.0f64).prop_map(|(a, n, g)| Schedule::step(a, n, g).unwrap()),
        (rate(), 0.1..1.0f64).prop_map(|(a, g)| Schedule::multi_step(a, &[3, 9, 99], g).unwrap()),
        (rate(), steps()).prop_map(|(a, n)| Schedule::inverse_sqrt(a, n).unwrap()),
        (rate(), 10..10_000u64)
            .prop_map(|(a, n)| Schedule::one_cycle(OneCycle::new(a, n)).unwrap()),
        (rate(), steps(), 0.0..=1.0f64).prop_map(|(a, n, pct_start)| {
            Schedule::fit_one_cycle(FitOneCycle { pct_start, ..FitOneCycle::new(a, n) }).unwrap()
        }),
    ]
}

fn schedule() -> impl Strategy<Value = Schedule> {
    curve().prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            (inner.clone(), 1..500u64, 0.0..=1.0f64)
                .prop_map(|(then, n, factor)| then.warmup(n, factor).unwrap()),
            (inner.clone(), curve()).prop_map(|(rate, momentum)| rate.with_momentum(momentum)),
            (proptest::collection::vec(inner, 1..4), 1..500u64).prop_map(|(parts, every)| {
                let milestones: Vec<u64> = (1..parts.len() as u64).map(|it| it * every).collect();
                Schedule::sequence(parts, &milestones).unwrap()
            }),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Every step of every schedule has a rate and, where there is one, a momentum that can be used.
    #[test]
    fn rates_are_finite_and_not_negative(
        schedule in schedule(),
        steps in proptest::collection::vec(any::<u64>(), 8),
    ) {
        for step in steps.into_iter().flat_map(|step| [step, step % 10_000, step % 50]) {
            let lr = schedule.lr(step);
            prop_assert!(lr.is_finite() && lr >= 0.0, "{lr} at {step} of {schedule:?}");
            let momentum = schedule.momentum(step).unwrap_or(0.0);
            prop_assert!(momentum.is_finite() && (0.0..=1.0).contains(&momentum));
        }
    }

    /// A warm-up rises in equal steps, ends where the schedule begins, and only delays the rest.
    #[test]
    fn a_warmup_is_continuous(
        then in schedule(),
        steps in 1..2_000u64,
        factor in 0.0..=1.0f64,
        later in any::<u64>(),
    ) {
        let warm = then.clone().with_momentum(Schedule::constant(0.5).unwrap());
        let warm = warm.warmup(steps, factor).unwrap();
        let target = then.lr(0);
        let stride = target * (1.0 - factor) / steps as f64;
        prop_assert!((warm.lr(0) - target * factor).abs() <= 1e-15);
        for step in 0..steps {
            let rise = warm.lr(step + 1) - warm.lr(step);
            prop_assert!((rise - stride).abs() <= 1e-12 * target, "{rise} at {step}, not {stride}");
        }
        prop_assert_eq!(warm.lr(steps), target);
        let later = later.min(u64::MAX - steps);
        prop_assert_eq!(warm.lr(later + steps), then.lr(later));
    }

    /// At each step a sequence is its active part, counted from its own beginning.
    #[test]
    fn a_sequence_is_its_parts(
        parts in proptest::collection::vec((schedule(), 1..300u64), 1..6),
        later in any::<u32>(),
    ) {
        let mut milestones = Vec::new();
        let mut begin = 0;
        let mut expected = Vec::new();
        for (place, (part, length)) in parts.iter().enumerate() {
            if place > 0 {
                milestones.push(begin);
            }
            expected.extend((0..*length).map(|step| (part.lr(step), part.momentum(step))));
            begin += length;
        }
        let sequence =
            Schedule::sequence(parts.iter().map(|part| part.0.clone()).collect(), &milestones);
        let sequence = sequence.unwrap();
        for (step, expected) in expected.into_iter().enumerate() {
            let step = step as u64;
            prop_assert_eq!((sequence.lr(step), sequence.momentum(step)), expected);
        }
        let (last, length) = &parts[parts.len() - 1];
        let own = length + u64::from(later);
        prop_assert_eq!(sequence.lr(begin - length + own), last.lr(own));
    }

    /// A plateau's rate never rises and never goes below the lowest; stopping between two metrics
    /// changes nothing.
    #[test]
    fn a_plateau_only_goes_down(
        metrics in proptest::collection::vec(prop_oneof![9 => -1.0..1.0f64, 1 => Just(f64::NAN)], 1..80),
        patience in 0..5u64,
        cooldown in 0..4u64,
        factor in 0.0..0.99f64,
    ) {
        let plateau = Plateau { patience, cooldown, factor, min_lr: 1e-3, ..Plateau::new(0.1) };
        let mut state = plateau.start();
        for metric in metrics {
            let saved: brigade_schedule::PlateauState =
                serde_json::from_str(&serde_json::to_string(&state).unwrap()).unwrap();
            prop_assert_eq!(saved, state);
            let next = plateau.after(&saved, metric);
            prop_assert!(next.lr <= state.lr && next.lr >= 1e-3);
            prop_assert!(next.seen == state.seen + 1 && next.bad <= patience);
            state = next;
        }
    }
}
