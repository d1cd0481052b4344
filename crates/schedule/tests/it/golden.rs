//! The schedules against tables made with PyTorch and fastai.

use std::fs;
use std::path::Path;

use brigade_schedule::{Anneal, FitOneCycle, OneCycle, Plateau, Schedule};
use serde_json::Value;

fn table(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn flag(case: &Value, key: &str) -> bool {
    case[key].as_bool().unwrap()
}

#[test]
fn torch_lr_schedulers() {
    let table = table("schedules.json");
    let cases = &table["cases"];
    let close = |name: &str, what: &str, value: &dyn Fn(u64) -> f64| {
        let expected = cases[name][what].as_array().unwrap();
        assert!(expected.len() >= 20);
        for (step, expected) in expected.iter().enumerate() {
            let (value, expected) = (value(step as u64), expected.as_f64().unwrap());
            assert!(
                (value - expected).abs() <= 1e-12 * expected.abs() + 1e-14,
                "{name}, {what} of step {step}: {value} is not {expected}"
            );
        }
    };
    let arg = |name: &str, key: &str| cases[name]["args"][key].as_f64().unwrap();
    let steps = |name: &str, key: &str| cases[name]["args"][key].as_u64().unwrap();

    for name in ["one_cycle", "one_cycle_linear_three_phase"] {
        let mut options = OneCycle::new(arg(name, "max_lr"), steps(name, "total_steps"));
        options.pct_start = arg(name, "pct_start");
        if name == "one_cycle" {
            options.div_factor = arg(name, "div_factor");
            options.final_div_factor = arg(name, "final_div_factor");
        } else {
            assert_eq!(cases[name]["args"]["anneal_strategy"], "linear");
            options.anneal = Anneal::Linear;
            options.three_phase = flag(&cases[name]["args"], "three_phase");
        }
        let schedule = Schedule::one_cycle(options).unwrap();
        close(name, "lr", &|step| schedule.lr(step));
        close(name, "momentum", &|step| schedule.momentum(step).unwrap());
    }

    let name = "cosine_annealing";
    let schedule =
        Schedule::cosine(arg(name, "lr"), arg(name, "eta_min"), steps(name, "T_max")).unwrap();
    close(name, "lr", &|step| schedule.lr(step));

    let name = "step";
    let schedule =
        Schedule::step(arg(name, "lr"), steps(name, "step_size"), arg(name, "gamma")).unwrap();
    close(name, "lr", &|step| schedule.lr(step));

    let name = "exponential";
    let schedule = Schedule::exponential(arg(name, "lr"), arg(name, "gamma")).unwrap();
    close(name, "lr", &|step| schedule.lr(step));

    let name = "linear";
    let lr = arg(name, "lr");
    let (start, end) = (lr * arg(name, "start_factor"), lr * arg(name, "end_factor"));
    let schedule = Schedule::linear(start, end, steps(name, "total_iters")).unwrap();
    close(name, "lr", &|step| schedule.lr(step));

    let name = "linear_warmup_then_cosine";
    let (warmup, total) = (steps(name, "warmup"), steps(name, "total"));
    let schedule = Schedule::cosine(arg(name, "lr"), 0.0, total - warmup).unwrap();
    // The table's LinearLR starts at a thousandth.
    let schedule = schedule.warmup(warmup, 1e-3).unwrap();
    close(name, "lr", &|step| schedule.lr(step));

    let name = "cosine_warm_restarts";
    let schedule =
        Schedule::cosine_restarts(arg(name, "lr"), 0.0, steps(name, "T_0"), steps(name, "T_mult"))
            .unwrap();
    close(name, "lr", &|step| schedule.lr(step));

    let name = "multi_step";
    let milestones: Vec<u64> =
        serde_json::from_value(cases[name]["args"]["milestones"].clone()).unwrap();
    let schedule = Schedule::multi_step(arg(name, "lr"), &milestones, arg(name, "gamma")).unwrap();
    close(name, "lr", &|step| schedule.lr(step));

    let name = "polynomial";
    let (lr, total) = (arg(name, "lr"), steps(name, "total_iters"));
    let schedule = Schedule::polynomial(lr, 0.0, total, arg(name, "power")).unwrap();
    close(name, "lr", &|step| schedule.lr(step));
}

#[test]
fn torch_reduce_on_plateau() {
    let case = &table("schedules.json")["cases"]["reduce_on_plateau"];
    let (metrics, rates) = (numbers(case, "metrics"), numbers(case, "lr"));
    assert_eq!((metrics.len(), rates.len()), (15, 15));
    let args = &case["args"];
    let plateau = Plateau {
        factor: args["factor"].as_f64().unwrap(),
        patience: args["patience"].as_u64().unwrap(),
        cooldown: args["cooldown"].as_u64().unwrap(),
        ..Plateau::new(args["lr"].as_f64().unwrap())
    };
    let mut state = plateau.start();
    for (metric, lr) in metrics.iter().zip(rates) {
        // What a checkpoint would save and load between any two.
        let saved = serde_json::to_string(&state).unwrap();
        state = plateau.after(&serde_json::from_str(&saved).unwrap(), *metric);
        assert_eq!(state.lr, lr, "{state:?}");
    }
}

#[test]
fn fastai_schedules() {
    let table = table("schedules.json");
    let cases = &table["cases"];
    let arg = |name: &str, key: &str| cases[name]["args"][key].as_f64().unwrap();
    let close = |name: &str, what: &str, value: &dyn Fn(u64) -> f64| {
        let (positions, expected) = (numbers(&cases[name], "pos"), numbers(&cases[name], what));
        assert_eq!((positions.len(), expected.len()), (51, 51));
        let largest = expected.iter().copied().fold(0.0, f64::max);
        for (step, (position, expected)) in positions.into_iter().zip(expected).enumerate() {
            assert!((position - step as f64 / 50.0).abs() < 1e-12);
            let value = value(step as u64);
            // fastai finds the place between two values in float32.
            assert!(
                (value - expected).abs() <= 1e-6 * largest,
                "{name}, {what} at {position}: {value} is not {expected}"
            );
        }
    };

    let name = "fastai_flat_cos";
    let (lr, last) = (arg(name, "lr"), arg(name, "lr") / arg(name, "div_final"));
    let schedule = Schedule::flat_cosine(lr, last, 50, arg(name, "pct_start")).unwrap();
    close(name, "lr", &|step| schedule.lr(step));

    let name = "fastai_one_cycle_lr";
    let cycle = FitOneCycle {
        pct_start: arg(name, "pct_start"),
        div: arg(name, "div"),
        div_final: arg(name, "div_final"),
        ..FitOneCycle::new(arg(name, "lr_max"), 50)
    };
    let schedule = Schedule::fit_one_cycle(cycle).unwrap();
    close(name, "lr", &|step| schedule.lr(step));

    let name = "fastai_one_cycle_mom";
    let moms = numbers(&cases[name]["args"], "moms");
    let cycle = FitOneCycle {
        pct_start: arg(name, "pct_start"),
        moms: [moms[0], moms[1], moms[2]],
        ..FitOneCycle::new(1.0, 50)
    };
    let schedule = Schedule::fit_one_cycle(cycle).unwrap();
    close(name, "momentum", &|step| schedule.momentum(step).unwrap());
}

/// A list of numbers in a case.
fn numbers(case: &Value, key: &str) -> Vec<f64> {
    serde_json::from_value(case[key].clone()).unwrap()
}
