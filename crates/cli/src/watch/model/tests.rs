//! Tests of the model with the lines of runs.

use super::*;

pub(in crate::watch) fn model(lines: &str) -> Model {
    let mut model = Model::default();
    lines.lines().for_each(|line| model.apply(&Line::parse(line.as_bytes())));
    model
}

/// Returns the lines of a Learner: `steps` steps in each of the `epochs` that were done of 4.
pub(in crate::watch) fn learner(epochs: u32, steps: u32) -> String {
    let mut text = String::from(
        "{\"_event\":\"start\",\"_time\":1000,\"_project\":\"digits\",\"_config\":{\"epochs\":4,\"opt\":{\"lr\":0.01}}}\n",
    );
    for step in 1..=epochs * steps {
        let (time, loss) = (1000 + step, 1.0 / f64::from(step));
        text += &format!("{{\"_step\":{step},\"_time\":{time},\"loss\":{loss},\"lr\":0.01}}\n");
        if step % steps == 0 {
            let epoch = step / steps - 1;
            text += &format!(
                "{{\"_step\":{step},\"_time\":{time},\"epoch\":{epoch},\"train_loss\":0.5,\"valid_loss\":0.25,\"time\":65.4}}\n"
            );
        }
    }
    text
}

fn means(model: &Model, name: &str) -> Vec<(f64, f64)> {
    let points = model.curves[name].points().iter();
    points.map(|point| (point.step, point.mean().unwrap_or(f64::NAN))).collect()
}

#[test]
fn a_learners_run() {
    let model = model(&learner(2, 3));
    assert_eq!(model.project.as_deref(), Some("digits"));
    assert_eq!(model.config[1], ("opt.lr".to_owned(), "0.01".to_owned()));
    assert_eq!((model.state, model.starts, model.step()), (State::Running, 1, 6.0));
    let names: Vec<&String> = model.curves.keys().collect();
    assert_eq!(names, ["loss", "lr", "train_loss", "valid_loss", "time"]);
    assert_eq!(means(&model, "loss")[3], (4.0, 0.25));
    assert_eq!(model.epochs.columns(), ["train_loss", "valid_loss", "time"]);
    let epochs: Vec<f64> = model.epochs.rows().iter().map(|row| row.epoch).collect();
    assert_eq!(epochs, [0.0, 1.0]);
    assert_eq!(model.fraction(), Some(0.5));
    assert_eq!((model.elapsed(), model.remaining()), (Some(6.0), Some(6.0)));
    assert_eq!(model.steps_per_second(), Some(1.0));
}

#[test]
fn epochs_between_lines_are_fractions() {
    let clock = model(&learner(2, 10)).epochs.clock();
    for (step, epoch) in [(0.0, 0.0), (5.0, 0.5), (10.0, 1.0), (20.0, 2.0), (25.0, 2.5)] {
        assert_eq!(clock.at(step), Some(epoch), "{step}");
    }
    // Counted from 1, on each line, and as fractions.
    let summary = "{\"_step\":10,\"epoch\":1}\n{\"_step\":20,\"epoch\":2}";
    assert_eq!(model(summary).epochs.clock().at(15.0), Some(1.5));
    let on_each: String =
        (0..30).map(|it| format!("{{\"_step\":{it},\"epoch\":{},\"a\":1}}\n", it / 10)).collect();
    assert_eq!(model(&on_each).epochs.clock().at(15.0), Some(1.5));
    assert_eq!(model(&on_each).epochs.rows().len(), 3);
    let fractions: String = (1..99_999)
        .map(|step| format!("{{\"_step\":{step},\"epoch\":{}}}\n", f64::from(step) / 7.0))
        .collect();
    let epoch = model(&fractions).epochs.clock().at(70_000.0).unwrap();
    assert!((epoch - 10_000.0).abs() < 1e-6, "{epoch}");
    assert_eq!(model("{\"_step\":1,\"epoch\":0.5}").epochs.clock().at(1.0), None);
}

#[test]
fn a_run_that_goes_on_replaces_the_steps_it_repeats() {
    let mut text = learner(3, 3);
    text += "{\"_event\":\"start\",\"_time\":2000,\"_project\":\"digits\"}\n";
    let between = model(&text);
    assert_eq!((between.starts, between.curves["loss"].count()), (2, 9));
    text += "{\"_step\":5,\"_time\":2001,\"loss\":7}\n{\"_step\":6,\"_time\":2002,\"loss\":8}\n";
    let model = model(&text);
    let loss = means(&model, "loss");
    assert_eq!(loss.len(), 6);
    assert_eq!(loss[3..], [(4.0, 0.25), (5.0, 7.0), (6.0, 8.0)]);
    assert_eq!(model.epochs.rows().len(), 1, "the epochs that ended later");
    assert_eq!(model.elapsed(), Some(2.0));
}

#[test]
fn lines_of_other_programs() {
    let model = model(
        "{\"global_step\":10,\"timestamp\":5,\"acc\":0.5,\"note\":\"a\\u001b[2Jb\"}\n\
         {\"global_step\":20,\"timestamp\":6,\"acc\":\"NaN\",\"\\u0007\":true,\"list\":[1,2]}\n\
         nonsense\n\
         {\"ranks\":{\"columns\":[\"rank\",\"host\"],\"data\":[[0,\"\\u001b]0;x\"],[1,\"b\"]]}}\n\
         {\"_event\":\"failed\",\"_time\":9}",
    );
    assert_eq!(model.state, State::Failed);
    assert_eq!(model.curves["acc"].points()[0].step, 10.0);
    assert_eq!((model.curves["acc"].count(), model.curves["acc"].non_finite()), (2, 1));
    assert_eq!(model.curves[r"\u{7}"].last(), Some(1.0));
    assert_eq!(model.texts["note"], r"a\u{1b}[2Jb");
    assert_eq!(model.texts["list"], "[1,2]");
    assert_eq!(model.broken, 1);
    let ranks = model.tables["ranks"].as_ref().unwrap();
    assert_eq!(ranks.rows()[0][1], Value::from(r"\u{1b}]0;x"));
    assert_eq!(model.elapsed(), Some(4.0));
}

#[test]
fn lines_without_steps_are_counted() {
    let model = model("{\"a\":1}\n{\"b\":1}\n{\"a\":2}");
    assert_eq!(means(&model, "a"), [(1.0, 1.0), (3.0, 2.0)]);
    assert!(!model.has_steps);
    assert_eq!((model.elapsed(), model.steps_per_second(), model.fraction()), (None, None, None));
}

#[test]
fn too_many_names_take_no_memory() {
    let line: String =
        (0..3 * MOST_NAMES).map(|it| format!("\"n{it}\":{it},\"t{it}\":\"\",")).collect();
    let model = model(&format!("{{\"epoch\":1,{}}}", line.trim_end_matches(',')));
    assert_eq!((model.curves.len(), model.texts.len()), (MOST_NAMES, MOST_NAMES));
    assert_eq!(model.left_out, 4 * MOST_NAMES as u64);
    assert!(model.epochs.columns().len() < MOST_NAMES);
}
