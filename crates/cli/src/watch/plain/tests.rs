//! Tests of the output without a terminal.

use super::super::feed::Input;
use super::super::model::tests::{learner, model};
use super::*;

fn followed(text: &str) -> (u8, String) {
    let input = io::Cursor::new(text.to_owned().into_bytes());
    let mut out = Vec::new();
    let code = follow(&mut Feed::Input(Input::open(input).unwrap()), &mut out).unwrap();
    (code, String::from_utf8(out).unwrap())
}

/// Returns the output when the model is polled after each of these texts.
fn printed(texts: &[&str]) -> String {
    let (mut lines, mut out, mut all) = (Lines::default(), Vec::new(), String::new());
    for text in texts {
        all += text;
        let found = FeedUpdate { is_new: !text.is_empty(), ..FeedUpdate::default() };
        lines.print(&model(&all), "run", &found, &mut out).unwrap();
    }
    String::from_utf8(out).unwrap()
}

#[test]
fn a_finished_run_as_lines() {
    let text = learner(2, 3) + "{\"_event\":\"finish\",\"_time\":1010}\n";
    let expected = "\
epoch  train_loss  valid_loss        time
    0         0.5        0.25   1 min 5 s
    1         0.5        0.25   1 min 5 s
digits: finished, epoch 2.0/4, step 6, 10 s
";
    assert_eq!(followed(&text), (0, expected.to_owned()));
    let (code, found) = followed("{\"a\":1}\n{\"_event\":\"failed\"}\n");
    assert_eq!(code, 1);
    assert!(found.contains("line 1  a 1\n") && found.contains("standard input: failed"), "{found}");
}

#[test]
fn lines_as_a_run_goes_on() {
    let row = |epoch: u32| format!("{{\"_step\":{epoch}0,\"epoch\":{epoch},\"valid_loss\":0.5}}\n");
    let step = |step: u32| format!("{{\"_step\":{step},\"loss\":1}}\n");
    let start = "{\"_event\":\"start\",\"_project\":\"p\"}\n";
    let found = printed(&[
        start,
        &step(9),
        &row(1),
        // Another line follows the epoch's.
        &step(11),
        &(step(12) + &row(2)),
        // No line follows.
        "",
        "",
        start,
        &(step(15) + &row(2)),
        "{\"_event\":\"finish\"}\n",
        "",
    ]);
    let expected = "\
p: running
step 9  loss 1
epoch  valid_loss
    1         0.5
    2         0.5
p: running, epoch 2.0, step 20, start 2
    2         0.5
p: finished, epoch 2.0, step 20, start 2
";
    assert_eq!(found, expected, "\n{found}");
}

#[test]
fn an_epoch_on_each_line_is_printed_when_it_is_over() {
    let line = |step: u32| format!("{{\"_step\":{step},\"epoch\":{},\"loss\":{step}}}\n", step / 5);
    let lines: Vec<String> = (0..12).map(line).collect();
    let together: Vec<String> = lines.chunks(4).map(<[String]>::concat).collect();
    let texts: Vec<&str> = together.iter().map(String::as_str).collect();
    let found = printed(&texts);
    let rows: Vec<&str> = found.lines().filter(|line| line.starts_with("   ")).collect();
    assert_eq!(rows, ["    0           4", "    1           9"], "{found}");
}

#[test]
fn a_snapshot_has_everything() {
    let ranks = "{\"_step\":6,\"ranks\":{\"columns\":[\"rank\",\"host\"],\"data\":[[0,\"node0\"]]}}\n\
                 {\"_step\":6,\"samples_per_second\":800.5,\"bad\":\"NaN\"}\n";
    let found = snapshot(&model(&(learner(2, 3) + ranks)), "run");
    let expected = "\
digits: running, epoch 2.0/4, step 6, 6 s
50 %, 6 s left
800.5 samples/s

values
  name                    last    lowest  highest  values
  loss                0.166667  0.166667        1       6
  lr                      0.01      0.01     0.01       6
  train_loss               0.5       0.5      0.5       2
  valid_loss              0.25      0.25     0.25       2
  time                    65.4      65.4     65.4       2
  samples_per_second     800.5     800.5    800.5       1
  bad                      NaN       NaN      NaN       1

epochs
  epoch  train_loss  valid_loss       time
      0         0.5        0.25  1 min 5 s
      1         0.5        0.25  1 min 5 s

ranks
  rank  host
     0  node0
";
    assert_eq!(found, expected, "\n{found}");
    assert_eq!(snapshot(&Model::default(), "run"), "run: nothing logged so far\n");
}
