//! Schedulers, trackers, log lines and progress, on one rank and on several.

use std::fs;

use brigade_data::{DataLoader, TensorDataset};
use brigade_nn::{Linear, Model, ParamPath};
use brigade_optim::{Optimizer, Scheduler, SchedulerState, Sgd};
use brigade_schedule::{Plateau, Schedule};
use brigade_testkit::{World, dist_test};
use brigade_torch::{ErrorKind, Result};
use brigade_track::{Csv, JsonLines, Outcome, Run, Tracker, Value};
use brigade_train::{Accelerator, LogOptions, TrainError};
use tch::{Kind, Tensor};
use tracing_subscriber::layer::SubscriberExt;

fn linear(path: &ParamPath<'_>) -> Linear {
    Linear::new(path, 3, 2)
}

fn sgd() -> (Model<Linear>, Optimizer) {
    let model = Model::new(linear).unwrap();
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    (model, optimizer)
}

/// A line from 0 to 1 in this many steps: the rate says the step.
fn line(steps: u64) -> Schedule {
    Schedule::linear(0.0, 1.0, steps).unwrap()
}

#[test]
fn a_schedule_resumes() -> Result<()> {
    let (_, optimizer) = sgd();
    let mut scheduler = Scheduler::new(&optimizer, line(10));
    for _ in 0..3 {
        scheduler.step()?;
    }
    let saved = serde_json::to_string(&scheduler.state()).unwrap();
    drop(scheduler);
    let (_, other) = sgd();
    let mut next = Scheduler::new(&other, line(10));
    assert_eq!(other.lr(), 0.0);
    next.load_state(&serde_json::from_str(&saved).unwrap())?;
    assert_eq!((next.position(), next.lr(), other.lr()), (3, 0.3, 0.3));
    next.step()?;
    assert_eq!(other.lr(), 0.4);
    Ok(())
}

#[test]
fn a_plateau_moves_by_metrics_and_nothing_else() -> Result<()> {
    let (_, optimizer) = sgd();
    let plateau = Plateau { factor: 0.5, patience: 0, ..Plateau::new(0.1) };
    let mut scheduler = Scheduler::on_plateau(&optimizer, plateau)?;
    assert_eq!(scheduler.step().unwrap_err().kind(), ErrorKind::InvalidArgument);
    for metric in [1.0, 1.0] {
        scheduler.step_with(metric)?;
    }
    assert_eq!((scheduler.lr(), optimizer.lr()), (0.05, 0.05));
    let mut again = Scheduler::on_plateau(&optimizer, plateau)?;
    assert_eq!(optimizer.lr(), 0.1);
    again.load_state(&scheduler.state())?;
    assert_eq!((again.state(), optimizer.lr()), (scheduler.state(), 0.05));
    // The state of another kind of schedule is refused, and changes nothing.
    let error = again.load_state(&SchedulerState { position: 3, plateau: None }).unwrap_err();
    assert!(error.to_string().contains("is of one that counts steps"), "{error}");
    assert_eq!(again.position(), 2);
    let mut counting = Scheduler::new(&optimizer, line(10));
    assert_eq!(counting.step_with(1.0).unwrap_err().kind(), ErrorKind::InvalidArgument);
    let wrong = Plateau { factor: 2.0, ..plateau };
    let error = Scheduler::on_plateau(&optimizer, wrong).unwrap_err();
    assert!(error.downcast_ref::<brigade_schedule::ScheduleError>().is_some(), "{error}");
    Ok(())
}

dist_test!(
    world = 2,
    dist_steps_are_the_optimizers_or_by_option_accelerates,
    |_: World| -> Result<()> {
        let accelerator = Accelerator::new()?;
        let (_, optimizer) = sgd();
        let schedulers =
            [Scheduler::new(&optimizer, line(10)), Scheduler::new(&optimizer, line(10))];
        let mut positions = Vec::new();
        for (scheduler, per_process) in schedulers.into_iter().zip([false, true]) {
            let mut scheduler = accelerator.prepare(scheduler)?.step_per_process(per_process);
            for _ in 0..3 {
                scheduler.step()?;
            }
            positions.push((scheduler.position()?, scheduler.lr()?));
        }
        assert_eq!(positions, [(3, 0.3), (6, 0.6)]);
        // A loader whose batches are split has as many steps on any number of ranks.
        let splitting = Accelerator::builder().sharing(&accelerator).split_batches(true).build()?;
        let scheduler = splitting.prepare(Scheduler::new(&optimizer, line(10)))?;
        let mut scheduler = scheduler.step_per_process(true);
        scheduler.step()?;
        assert_eq!(scheduler.position()?, 1);
        Ok(())
    }
);

dist_test!(world = 2, dist_a_plateau_stays_the_same_on_all_ranks, |_: World| -> Result<()> {
    let accelerator = Accelerator::new()?;
    let (_, optimizer) = sgd();
    let plateau = Plateau { factor: 0.5, patience: 0, ..Plateau::new(0.1) };
    let mut scheduler = accelerator.prepare(Scheduler::on_plateau(&optimizer, plateau)?)?;
    // Better on one rank, worse on the other: the means are 1.5 and 1.5.
    for metrics in [[1.0, 2.0], [2.0, 1.0]] {
        scheduler.step_with(metrics[accelerator.processes().process_index()])?;
    }
    let state = scheduler.state()?.plateau.unwrap();
    assert_eq!((state.best, state.lr), (Some(1.5), 0.05));
    // Equal numbers must not change: their computed mean may differ by rounding.
    scheduler.step_with(0.1)?;
    assert_eq!(scheduler.state()?.plateau.unwrap().best, Some(0.1));
    Ok(())
});

#[test]
fn a_schedule_stands_still_while_gradients_are_added_up() -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).gradient_accumulation_steps(2).build()?;
    let (model, optimizer) = sgd();
    let by_step = Scheduler::new(&optimizer, line(10));
    let by_call = Scheduler::new(&optimizer, line(10));
    let data = Tensor::ones([5, 3], (Kind::Float, tch::Device::Cpu));
    let loader = DataLoader::new(TensorDataset::new(data).unwrap()).batch_size(1);
    let (model, loader, mut by_step, by_call) =
        accelerator.prepare((model, loader, by_step, by_call))?;
    let mut by_call = by_call.step_with_optimizer(false);
    for batch in &loader {
        let batch = batch?;
        accelerator.accumulate(&model, &batch, || {
            by_step.step()?;
            by_call.step()
        })?;
    }
    assert_eq!((by_step.position()?, by_call.position()?), (3, 5));
    Ok(())
}

dist_test!(world = 2, dist_rank_0_alone_writes, |_: World| -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = Accelerator::builder()
        .log_with(JsonLines::new(folder.path()))
        .log_with(Csv::new(folder.path()))
        .build()?;
    let error = accelerator.log([("loss", 1.0)], 1).unwrap_err();
    assert!(error.to_string().contains("before Trackers::start"), "{error}");
    accelerator.trackers().start("demo", &serde_json::json!({ "lr": 0.1 }))?;
    assert!(
        matches!(accelerator.trackers().start("demo", &()), Err(error) if error.kind() == ErrorKind::InvalidArgument)
    );
    accelerator.log([("loss", 0.5), ("accuracy", 0.9)], 3)?;
    accelerator.log([("stage", Value::from("late")), ("n", Value::from(2))], None)?;
    let jsonl = accelerator.trackers().tracker("jsonl")?;
    jsonl.log_text("note", "hello", 4)?;
    let silent = jsonl.with(|tracker: &mut JsonLines| tracker.name().to_owned()).is_none();
    assert_eq!(silent, !accelerator.is_main_process());
    assert!(jsonl.with(|_: &mut Csv| ()).is_none());
    let error = accelerator.trackers().tracker("tensorboard").unwrap_err().to_string();
    assert_eq!(error, "there is no tracker \"tensorboard\"; there are: jsonl, csv");
    accelerator.trackers().finish()?;
    accelerator.trackers().finish()?;

    let files = fs::read_dir(folder.path()).unwrap().count();
    if !accelerator.is_main_process() {
        assert_eq!(files, 0);
        return Ok(());
    }
    assert_eq!(files, 3); // the settings of the CSV are a file of their own
    let lines = fs::read_to_string(folder.path().join("demo.jsonl")).unwrap();
    let lines: Vec<&str> = lines.lines().collect();
    assert_eq!(lines.len(), 5);
    assert!(lines[0].contains("\"_config\":{\"lr\":0.1}"), "{}", lines[0]);
    assert!(
        lines[1].starts_with("{\"_step\":3,")
            && lines[1].ends_with("\"loss\":0.5,\"accuracy\":0.9}")
    );
    assert!(lines[2].ends_with("\"stage\":\"late\",\"n\":2}") && !lines[2].contains("_step"));
    assert!(lines[3].contains("\"note\":\"hello\"") && lines[4].contains("finish"));
    let table = fs::read_to_string(folder.path().join("demo.csv")).unwrap();
    assert!(table.starts_with("_step,_time,loss,accuracy,stage,n\n3,"), "{table}");
    Ok(())
});

dist_test!(
    world = 2,
    dist_a_tracker_that_cannot_start_is_an_error_on_every_rank,
    |_: World| -> Result<()> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let accelerator = Accelerator::builder().logging_dir(&file).build()?;
        let error = accelerator.trackers().start("demo", &()).unwrap_err();
        if accelerator.is_main_process() {
            assert!(matches!(error.downcast_ref(), Some(TrainError::Track(_))), "{error}");
        }
        assert!(error.to_string().contains("cannot make the folder /"), "{error}");
        // It was not started, so the next attempt is none too many.
        assert!(accelerator.trackers().finish().is_ok());
        Ok(())
    }
);

/// Counts what it is given, and fails at each value.
#[derive(Debug, Default)]
struct Broken(usize);

impl Tracker for Broken {
    fn name(&self) -> &str {
        "broken"
    }

    fn start(&mut self, _: &Run) -> brigade_track::Result<()> {
        Ok(())
    }

    fn log(
        &mut self,
        values: &[(String, Value)],
        _: brigade_track::Stamp,
    ) -> brigade_track::Result<()> {
        self.0 += values.len();
        Err(brigade_track::TrackError::Own("no room".into()))
    }

    fn finish(&mut self, _: Outcome) -> brigade_track::Result<()> {
        Ok(())
    }
}

#[test]
fn a_tracker_of_ones_own_that_fails_keeps_nothing_from_the_others() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = Accelerator::builder()
        .cpu(true)
        .log_with(Broken::default())
        .log_with(JsonLines::new(folder.path()))
        .build()?;
    accelerator.trackers().start("demo", &())?;
    let error = accelerator.log([("loss", 0.5)], 1).unwrap_err();
    assert_eq!(error.to_string(), "no room");
    assert_eq!(accelerator.trackers().tracker("broken")?.with(|it: &mut Broken| it.0), Some(1));
    let lines = fs::read_to_string(folder.path().join("demo.jsonl")).unwrap();
    assert!(lines.contains("\"loss\":0.5"));
    accelerator.trackers().finish()
}

dist_test!(world = 2, dist_log_lines_say_rank_and_step, |_: World| -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("log");
    let accelerator = Accelerator::new()?;
    let rank = accelerator.processes().process_index();
    let options = LogOptions { file: Some(file.clone()), ..LogOptions::default() };
    let subscriber = tracing_subscriber::registry().with(accelerator.logging().layer(&options)?);
    tracing::subscriber::with_default(subscriber, || -> Result<()> {
        let log = accelerator.logging().logger("train");
        log.info("before the first step");
        accelerator.trackers().set_step(12);
        log.info("main only");
        log.debug("too little to say");
        log.everywhere().warn("from everywhere");
        log.in_order(|log| log.info(format_args!("in turn {rank}")))?;
        tracing::info!(loss = 0.5, "of a library");
        Ok(())
    })?;
    let text = fs::read_to_string(&file).unwrap();
    let lines: Vec<&str> = text.lines().map(|line| line.split_once("Z ").unwrap().1).collect();
    if rank == 0 {
        assert_eq!(
            lines,
            [
                "INFO rank=0 train: before the first step",
                "INFO rank=0 step=12 train: main only",
                "WARN rank=0 step=12 train: from everywhere",
                "INFO rank=0 step=12 train: in turn 0",
                "INFO rank=0 step=12 it::watching: of a library loss=0.5",
            ]
        );
    } else {
        assert_eq!(
            lines,
            ["WARN rank=1 step=12 train: from everywhere", "INFO rank=1 step=12 train: in turn 1",]
        );
    }
    Ok(())
});

#[test]
fn loops_within_loops_run_to_their_end_and_lines_can_be_printed_between() -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).build()?;
    let mut seen = 0;
    for outer in accelerator.progress(0..3).label("epoch") {
        for inner in accelerator.progress((0..).take(4)) {
            seen += 10 * outer + inner;
        }
        for _ in accelerator.progress(std::iter::from_fn(|| None::<u8>)) {}
        accelerator.println(format_args!("epoch {outer}"));
    }
    assert_eq!(seen, 4 * (10 + 20) + 3 * 6);
    assert_eq!(accelerator.progress(0..5).size_hint(), (5, Some(5)));
    Ok(())
}

#[test]
fn a_shared_accelerator_logs_to_the_folder_that_it_is_given() -> Result<()> {
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let accelerator = Accelerator::builder().cpu(true).logging_dir(first.path()).build()?;
    let same = Accelerator::builder().sharing(&accelerator).build()?;
    let other = Accelerator::builder().sharing(&accelerator).logging_dir(second.path()).build()?;
    for (accelerator, project) in [(&same, "one"), (&other, "two")] {
        accelerator.trackers().start(project, &())?;
        accelerator.trackers().finish()?;
    }
    assert!(first.path().join("one.jsonl").is_file());
    assert!(second.path().join("two.jsonl").is_file());
    Ok(())
}

#[test]
fn a_meter_gives_values_that_trackers_take() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let accelerator = Accelerator::builder().cpu(true).logging_dir(folder.path()).build()?;
    accelerator.trackers().start("demo", &())?;
    let mut meter = accelerator.processes().meter(8);
    meter.step_with_tokens(4, 400);
    accelerator.log(meter.values(), 0)?;
    accelerator.trackers().finish()?;
    let text = fs::read_to_string(folder.path().join("demo.jsonl")).unwrap();
    for name in ["samples_per_second", "tokens_per_second", "step_ms", "resident_mib", "peak_mib"] {
        assert!(text.contains(&format!("\"{name}\":")), "{text}");
    }
    // libtorch does not count memory on a CPU.
    assert_eq!(brigade_torch::DeviceMemory::of(tch::Device::Cpu)?, None);
    assert!(!text.contains("gpu_"), "{text}");
    Ok(())
}
