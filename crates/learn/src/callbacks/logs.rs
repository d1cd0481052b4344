//! Logs of a fit: a CSV file, and the Accelerator's trackers.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;

use brigade_torch::Result;
use brigade_track::{Table, Value, Values};
use brigade_train::{Meter, ProcessMemory, TrainError};

use crate::callback::{Callback, Ranks, Step};
use crate::error::LearnError;
use crate::state::LearnerState;

/// Writes a row for each epoch to a CSV file, from rank 0 (fastai's `CSVLogger`).
#[derive(Debug)]
pub struct CsvLog {
    path: PathBuf,
    append: bool,
    file: Option<File>,
    /// Number of rows of the recorder that are in the file.
    written: usize,
}

impl CsvLog {
    /// Writes to this file, replacing an existing one at the beginning of each fit. A fit that resumes from a
    /// checkpoint writes the rows of its earlier epochs again, so that the file is complete.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), append: false, file: None, written: 0 }
    }

    /// Sets whether fits append to the file. Defaults to `false`.
    #[must_use]
    pub fn append(mut self, on: bool) -> Self {
        self.append = on;
        self
    }

    fn line(&mut self, cells: impl IntoIterator<Item = String>) -> Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        let quoted = |cell: String| {
            if cell.contains([',', '"', '\n', '\r']) {
                format!("\"{}\"", cell.replace('"', "\"\""))
            } else {
                cell
            }
        };
        let cells: Vec<String> = cells.into_iter().map(quoted).collect();
        let line = cells.join(",") + "\n";
        Ok(file.write_all(line.as_bytes()).map_err(LearnError::file("cannot write", &self.path))?)
    }

    /// Writes the recorder's rows that the file does not have yet.
    fn rows(&mut self, learner: &LearnerState) -> Result<()> {
        let rows = learner.recorder().rows();
        for row in rows.iter().skip(self.written) {
            let values =
                row.values.iter().map(|value| value.map_or_else(String::new, |it| it.to_string()));
            let time = format!("{:.3}", row.time.as_secs_f64());
            self.line(std::iter::once(row.epoch.to_string()).chain(values).chain([time]))?;
        }
        self.written = rows.len();
        Ok(())
    }
}

impl Callback for CsvLog {
    fn order(&self) -> i32 {
        60
    }

    fn ranks(&self) -> Ranks {
        Ranks::Main
    }

    fn in_evaluation(&self) -> bool {
        false
    }

    fn before_fit(&mut self, learner: &mut LearnerState) -> Step {
        if let Some(folder) = self.path.parent().filter(|it| !it.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder)
                .map_err(LearnError::file("cannot make the folder", folder))?;
        }
        let mut options = OpenOptions::new();
        options.create(true).write(true).append(self.append).truncate(!self.append);
        self.file =
            Some(options.open(&self.path).map_err(LearnError::file("cannot open", &self.path))?);
        self.written = 0;
        let names = learner.recorder().names().to_vec();
        Ok(self.line(std::iter::once("epoch".to_owned()).chain(names).chain(["time".to_owned()]))?)
    }

    fn state(&mut self, _learner: &mut LearnerState) -> Result<Option<serde_json::Value>> {
        Ok(Some(serde_json::json!({ "append": self.append })))
    }

    fn load_state(&mut self, learner: &mut LearnerState, _state: &serde_json::Value) -> Result<()> {
        // A file that was replaced contains none of the rows.
        self.written = if self.append { learner.recorder().rows().len() } else { 0 };
        Ok(())
    }

    fn after_epoch(&mut self, learner: &mut LearnerState) -> Step {
        Ok(self.rows(learner)?)
    }

    fn after_fit(&mut self, learner: &mut LearnerState) -> Step {
        Ok(self.rows(learner)?)
    }

    fn ended(&mut self, _learner: &mut LearnerState) {
        self.file = None;
    }
}

/// Logs a fit to the Accelerator's trackers (JSON lines unless the Accelerator has others, CSV, TensorBoard, MLflow):
/// every few steps `loss`, `lr` (`lr_0`, `lr_1` … with several parameter groups), `momentum`, throughput and memory;
/// after each epoch `epoch`, the recorder's columns and `time` in seconds, and a table `ranks` with each rank's host,
/// throughput and memory. `brigade watch` and `brigade report` read the JSON lines.
///
/// It begins the run of the project, unless the program has done so (`Trackers::start`), and counts steps consecutively
/// over several fits. `Trackers::finish` ends the run.
#[derive(Debug)]
pub struct TrackerLog {
    project: String,
    every: usize,
    started: bool,
    steps: u64,
    epochs: i64,
    meter: Option<Meter>,
}

impl TrackerLog {
    /// Makes a callback that logs to a project: the name of the run's file or experiment.
    #[must_use]
    pub fn new(project: impl Into<String>) -> Self {
        Self {
            project: project.into(),
            every: 10,
            started: false,
            steps: 0,
            epochs: 0,
            meter: None,
        }
    }

    /// Sets the number of steps between logged lines. Defaults to 10. Each line reads the loss, which waits for the
    /// device.
    #[must_use]
    pub fn every(mut self, steps: usize) -> Self {
        self.every = steps.max(1);
        self
    }

    fn start(&mut self, learner: &LearnerState) -> Result<()> {
        if std::mem::replace(&mut self.started, true) {
            return Ok(());
        }
        let accelerator = learner.accelerator();
        if accelerator.trackers().is_started() {
            return Ok(());
        }
        let parameters: usize = learner.parameters().iter().map(|it| it.tensor.numel()).sum();
        let metrics: Vec<String> = learner.metric_list().iter().map(|it| it.name()).collect();
        let config = serde_json::json!({
            "epochs": learner.epochs(),
            "batches": learner.batches(),
            "max_steps": learner.epochs() * learner.batches(),
            "loss": learner.loss_function().name(),
            "metrics": metrics,
            "parameters": parameters,
            "parameter_groups": learner.parameter_groups().len(),
            "precision": accelerator.mixed_precision().to_string(),
            "device": format!("{:?}", accelerator.device()),
            "world_size": accelerator.processes().num_processes(),
            "seed": learner.seed(),
            "brigade.version": env!("CARGO_PKG_VERSION"),
            "brigade.host": hostname(),
            "brigade.threads": tch::get_num_threads(),
        });
        accelerator.trackers().start(&self.project, &config)
    }

    fn step_values(&self, learner: &LearnerState) -> Result<Values> {
        let mut values: Values = Vec::new();
        let mut put = |name: String, value: f64| values.push((name, Value::from(value)));
        if let Some(loss) = learner.batch_loss() {
            put("loss".to_owned(), loss.f_double_value(&[])?);
        }
        let hypers = learner.hypers();
        match hypers {
            [one] => put("lr".to_owned(), one.lr),
            several => {
                for (group, hypers) in several.iter().enumerate() {
                    put(format!("lr_{group}"), hypers.lr);
                }
            }
        }
        if let Some(last) = hypers.last() {
            put("momentum".to_owned(), last.momentum);
        }
        if let Some(meter) = &self.meter {
            values.extend(meter.values());
        }
        Ok(values)
    }

    /// Gathers the facts of all ranks. Every rank takes part.
    fn ranks(&self, learner: &LearnerState) -> Result<Option<Table>> {
        let rates = self.meter.as_ref().and_then(Meter::rates);
        let accelerator = learner.accelerator();
        let ranks = accelerator.data_processes().num_processes() as f64;
        let memory = ProcessMemory::now().map(|memory| memory.resident as f64 / 1024.0 / 1024.0);
        let mine = (
            hostname(),
            rates.map(|rates| rates.samples_per_second / ranks),
            rates.map(|rates| rates.step.as_secs_f64() * 1e3),
            memory,
        );
        let all = accelerator.processes().gather_object(mine)?;
        let number = |value: Option<f64>| Value::from(value.unwrap_or(f64::NAN));
        let row = |(rank, (host, samples, step, memory)): (usize, RankFacts)| {
            vec![
                Value::from(rank as i64),
                Value::from(host),
                number(samples),
                number(step),
                number(memory),
            ]
        };
        let columns = ["rank", "host", "samples_per_second", "step_ms", "resident_mib"];
        Ok(Some(
            Table::new(columns, all.into_iter().enumerate().map(row).collect())
                .map_err(TrainError::from)?,
        ))
    }
}

/// Host, samples per second, milliseconds per step, resident memory in MiB.
type RankFacts = (String, Option<f64>, Option<f64>, Option<f64>);

impl Callback for TrackerLog {
    fn order(&self) -> i32 {
        // fastai's TensorBoardCallback is at 51: after the recorder.
        51
    }

    fn in_evaluation(&self) -> bool {
        false
    }

    fn state(&mut self, _learner: &mut LearnerState) -> Result<Option<serde_json::Value>> {
        Ok(Some(serde_json::json!({ "steps": self.steps, "epochs": self.epochs })))
    }

    fn load_state(&mut self, _: &mut LearnerState, state: &serde_json::Value) -> Result<()> {
        self.steps = state.get("steps").and_then(serde_json::Value::as_u64).unwrap_or(self.steps);
        self.epochs =
            state.get("epochs").and_then(serde_json::Value::as_i64).unwrap_or(self.epochs);
        Ok(())
    }

    fn before_train(&mut self, learner: &mut LearnerState) -> Step {
        self.start(learner)?;
        self.meter = Some(learner.accelerator().data_processes().meter(50));
        Ok(())
    }

    fn after_batch(&mut self, learner: &mut LearnerState) -> Step {
        if !learner.is_training() {
            return Ok(());
        }
        if let Some(meter) = &mut self.meter {
            meter.step(learner.batch_rows());
        }
        self.steps += 1;
        if self.steps.is_multiple_of(self.every as u64) && learner.accelerator().is_main_process() {
            let values = self.step_values(learner)?;
            learner.accelerator().log(values, self.steps)?;
        }
        Ok(())
    }

    fn after_epoch(&mut self, learner: &mut LearnerState) -> Step {
        if !self.started {
            return Ok(());
        }
        let Some(row) = learner.recorder().rows().last().cloned() else { return Ok(()) };
        let mut values: Values = vec![("epoch".to_owned(), Value::from(self.epochs))];
        for (name, value) in learner.recorder().names().iter().zip(&row.values) {
            if let Some(value) = value {
                values.push((name.clone(), Value::from(*value)));
            }
        }
        values.push(("time".to_owned(), Value::from(row.time.as_secs_f64())));
        self.epochs += 1;
        learner.accelerator().log(values, self.steps)?;
        if let (Some(table), Ok(tracker)) =
            (self.ranks(learner)?, learner.accelerator().trackers().tracker("jsonl"))
        {
            tracker.log_table("ranks", &table, self.steps)?;
        }
        Ok(())
    }
}

fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "unknown".to_owned(), |name| name.trim().to_owned())
}
