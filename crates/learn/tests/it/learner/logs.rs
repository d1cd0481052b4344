//! What is written down: the recorder, a CSV file, trackers, and files of weights, from rank 0 alone.

use std::fs;
use std::path::Path;

use brigade_learn::callbacks::{
    CsvLog, GradientAccumulation, ParamScheduler, SaveModel, TrackerLog,
};
use brigade_learn::{Hyper, Learner};
use brigade_metrics::Accuracy;
use brigade_schedule::Annealing;
use brigade_testkit::{World, dist_test, step};
use brigade_track::reader::{Line, Logged, RunReader};
use brigade_track::{Csv, JsonLines, TensorBoard};
use brigade_train::Accelerator;

use crate::setup::*;

fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).unwrap().next().is_none()
}

fn records(accelerator: &Accelerator) {
    step!("recorder");
    let mut learner = learner(accelerator).metrics(Accuracy).train_metrics(true);
    let schedule = ParamScheduler::new(Hyper::Lr, Annealing::linear(0.2, 0.1));
    learner.fit(2, 0.1, (schedule, GradientAccumulation::new(16))).unwrap();
    let recorder = learner.recorder();
    let names = ["train_loss", "train_accuracy", "valid_loss", "valid_accuracy"];
    assert_eq!(recorder.names(), names);
    assert_eq!((recorder.losses().len(), recorder.smooth_losses().len()), (12, 12));
    assert_eq!(recorder.iters(), [6, 12]);
    let rates: Vec<f64> = (0..12).map(|batch| 0.2 - 0.1 * f64::from(batch) / 12.0).collect();
    close(recorder.lrs(), &rates, 1e-12);
    assert!(recorder.rows().iter().all(|row| row.values.iter().all(Option::is_some)));
    ranks_agree(&learner);
}

fn writes(accelerator: &Accelerator) {
    step!("CSV");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sub/history.csv");
    let mut learner = learner(accelerator).metrics(Accuracy);
    learner.fit(3, 0.1, CsvLog::new(&path)).unwrap();
    assert_eq!(path.exists(), accelerator.is_main_process());
    if accelerator.is_main_process() {
        let text = fs::read_to_string(&path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!((lines[0], lines.len()), ("epoch,train_loss,valid_loss,accuracy,time", 4));
        for (line, row) in lines[1..].iter().zip(learner.recorder().rows()) {
            let cells: Vec<f64> = line.split(',').map(|cell| cell.parse().unwrap()).collect();
            assert_eq!(cells[0], row.epoch as f64);
            assert_eq!(cells[1..4].iter().copied().map(Some).collect::<Vec<_>>(), row.values);
        }
    } else {
        assert!(is_empty(folder.path()));
    }

    step!("the best model and every epoch's");
    let folder = tempfile::tempdir().unwrap();
    let best = folder.path().join("best.pth");
    let mut learner = crate::setup::learner(accelerator).metrics(Accuracy);
    let last = SaveModel::new(folder.path().join("end.pth")).at_end(true).with_optimizer(true);
    let every = SaveModel::new(folder.path().join("epoch.pth")).every(2);
    learner.fit(4, 1.0, (SaveModel::new(&best), every, last)).unwrap();
    ranks_agree(&learner);
    let mut files: Vec<String> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    if accelerator.is_main_process() {
        assert_eq!(files, ["best.pth", "end.pth", "epoch_0.pth", "epoch_2.pth"]);
    } else {
        assert_eq!(files, [""; 0]);
    }
    // Only rank 0 has the file, and all ranks get its weights.
    let expected = weights(&learner);
    let mut fresh = crate::setup::learner(accelerator);
    fresh.load(&best, false).unwrap();
    assert_eq!(weights(&fresh), expected);
    let error = fresh.load(&best, true).unwrap_err().to_string();
    assert!(error.contains("saved without one"), "{error}");
    let saved = folder.path().join("with.pth");
    learner.save(&saved, true).unwrap();
    fresh.load(&saved, true).unwrap();
    learner.fit(1, 0.1, ()).unwrap();
    // The other Learner begins with its own order of the data: its first epoch.
    fresh.fit(1, 0.1, ()).unwrap();
    ranks_agree(&fresh);
}

fn tracks(accelerator: &Accelerator) {
    step!("trackers");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let builder = Accelerator::builder().sharing(accelerator).quiet(true);
    let builder = builder.log_with(JsonLines::new(path)).log_with(Csv::new(path));
    let tracked = builder.log_with(TensorBoard::new(path)).build().unwrap();
    let mut learner = learner(&tracked).metrics(Accuracy);
    let learner: &mut Learner = &mut learner;
    learner.add(TrackerLog::new("woof").every(3));
    learner.fit(2, 0.1, ()).unwrap();
    learner.fit(1, 0.1, ()).unwrap();
    tracked.trackers().finish().unwrap();
    if !accelerator.is_main_process() {
        assert!(is_empty(path), "rank 0 alone writes");
        return;
    }
    let mut reader = RunReader::open(path.join("woof.jsonl")).unwrap();
    let lines: Vec<Line> = reader.poll().unwrap().lines.into_iter().map(|it| it.content).collect();
    let Line::Start { project, config, .. } = &lines[0] else { panic!("{:?}", lines[0]) };
    assert_eq!(project.as_deref(), Some("woof"));
    let config: Vec<String> = config.flat().into_iter().map(|(name, _)| name).collect();
    assert!(config.contains(&"world_size".to_owned()), "{config:?}");
    assert!(matches!(lines.last().unwrap(), Line::End { .. }));
    let (mut steps, mut epochs, mut tables) = (Vec::new(), Vec::new(), 0);
    for line in &lines {
        let Line::Values { step, values, .. } = line else { continue };
        let number = |name: &str| values.get(name).and_then(Logged::number);
        if let Some(Logged::Table(table)) = values.get("ranks") {
            let columns = ["rank", "host", "samples_per_second", "step_ms", "resident_mib"];
            assert_eq!(table.columns(), columns);
            assert_eq!(table.rows().len(), accelerator.processes().num_processes());
            tables += 1;
        } else if let Some(epoch) = number("epoch") {
            let last = ["train_loss", "valid_loss", "accuracy", "time"].map(number);
            assert!(last.iter().all(Option::is_some), "{values:?}");
            epochs.push((epoch, step.unwrap()));
        } else {
            assert_eq!(number("lr"), Some(0.1));
            assert!(number("loss").is_some() && number("momentum").is_some(), "{values:?}");
            steps.push(step.unwrap());
        }
    }
    assert_eq!(steps, [3, 6, 9, 12, 15, 18]);
    assert_eq!(epochs, [(0.0, 6), (1.0, 12), (2.0, 18)]);
    assert_eq!(tables, 3);
    let table = fs::read_to_string(path.join("woof.csv")).unwrap();
    let header = table.lines().next().unwrap();
    for name in ["loss", "lr", "momentum", "epoch", "valid_loss", "accuracy", "time"] {
        assert!(header.split(',').any(|column| column == name), "{name} is not in {header}");
    }
    assert_eq!(table.lines().count(), 1 + steps.len() + epochs.len());
    let is_events = |name: &str| name.contains("tfevents");
    let found = walk(path).into_iter().filter(|name| is_events(name)).count();
    assert_eq!(found, 1);
}

/// The names of all files below.
fn walk(folder: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            names.extend(walk(&path));
        } else {
            names.push(path.file_name().unwrap().to_string_lossy().into_owned());
        }
    }
    names
}

#[test]
fn logs_alone() {
    records(&alone());
    writes(&alone());
    tracks(&alone());
}

dist_test!(world = 2, dist_logs, |_world: World| {
    let accelerator = joined();
    records(&accelerator);
    writes(&accelerator);
    tracks(&accelerator);
});

dist_test!(world = 2, dist_a_log_that_rank_0_cannot_write_ends_both, |_world: World| {
    let accelerator = joined();
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), b"").unwrap();
    let log = CsvLog::new(folder.path().join("file/log.csv"));
    let error = learner(&accelerator).fit(1, 0.1, log).unwrap_err().to_string();
    let expected = error.starts_with("CsvLog failed at before_fit: cannot make the folder");
    assert_eq!(expected, accelerator.is_main_process(), "{error}");
});
