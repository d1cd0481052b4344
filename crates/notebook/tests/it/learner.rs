//! What a cell shows of a Learner.

use std::fs;
use std::path::Path;

use brigade_data::{DataLoader, TensorDataset};
use brigade_learn::interpretation::ClassInterpretation;
use brigade_learn::{Learner, Loaders, LrFindOptions};
use brigade_metrics::Accuracy;
use brigade_nn::{Linear, ParamPath};
use brigade_notebook::display::Content;
use brigade_notebook::prelude::*;
use brigade_rank_env::World;
use brigade_train::Accelerator;
use tch::{Device, Kind, Tensor};

fn learner() -> Learner {
    learner_of(["a", "b", "c", "d"])
}

fn learner_of(classes: [&str; 4]) -> Learner {
    let accelerator =
        Accelerator::builder().world(World::alone()).cpu(true).quiet(true).build().unwrap();
    accelerator.set_seed(1);
    let data = |rows: i64| {
        let inputs = Tensor::rand([rows, 4], (Kind::Float, Device::Cpu));
        let labels = inputs.argmax(-1, false);
        TensorDataset::new((inputs, labels)).unwrap()
    };
    let train = DataLoader::new(data(200)).batch_size(10).shuffle(true).threads(0);
    let valid = DataLoader::new(data(50)).batch_size(10).threads(0);
    let data = Loaders::new(train, valid).unwrap().classes(classes);
    let model = |path: &ParamPath<'_>| Linear::new(path, 4, 4);
    Learner::new(&accelerator, data, model).unwrap().metrics(Accuracy).quiet(true)
}

/// What a notebook's page shows of it. Kept as a file where one wants to look at it.
fn html(name: &str, content: &Content) -> String {
    let mut bytes = Vec::new();
    content.write_to(&mut bytes).unwrap();
    let output = String::from_utf8(bytes).unwrap();
    let begin = "EVCXR_BEGIN_CONTENT text/html\n";
    let html = output.split_once(begin).unwrap().1.split_once("\nEVCXR_END_CONTENT").unwrap().0;
    if let Some(folder) = std::env::var_os("BRIGADE_TEST_PICTURES") {
        fs::write(Path::new(&folder).join(format!("{name}.html")), html).unwrap();
    }
    html.to_owned()
}

#[test]
fn a_learner_shows_its_table_of_epochs() {
    let mut learner = learner();
    assert_eq!(learner.cell_content().plain(), "no epoch was trained yet");
    learner.fit_one_cycle(2, 0.1, ()).unwrap();
    let content = learner.cell_content();
    let recorder = learner.recorder();
    assert_eq!(content, recorder.cell_content());

    let lines: Vec<Vec<&str>> =
        content.plain().lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["epoch", "train_loss", "valid_loss", "accuracy", "time"]);
    let accuracy = recorder.last("accuracy").unwrap();
    assert_eq!(lines[2][0], "1");
    assert_eq!(lines[2][3], format!("{accuracy:.6}"));
    let html = html("table", &content);
    let head = "<tr><th>epoch</th><th>train_loss</th><th>valid_loss</th><th>accuracy</th><th>time</th></tr>";
    assert!(html.contains(head), "{html}");
    assert!(html.contains(&format!("<td>{accuracy:.6}</td>")), "{html}");
    assert_eq!(html.matches("<tr>").count(), 3, "{html}");
}

#[test]
fn the_finder_shows_its_curve_and_what_it_suggests() {
    let mut learner = learner();
    let found =
        learner.lr_find_with(LrFindOptions { steps: 60, ..LrFindOptions::default() }).unwrap();
    let content = found.cell_content();
    let valley = format!("valley {:.2e}", found.valley().unwrap());
    let last = content.plain().lines().last().unwrap().to_owned();
    assert!(last.starts_with(&format!("suggested: {valley}")), "{}", content.plain());
    let html = html("lr_find", &content);
    assert!(html.starts_with("<div><img src=\"data:image/svg+xml;base64,"), "{html}");
    assert!(html.contains(&last), "{html}");
    let wild =
        LrFindOptions { start_lr: 1e30, end_lr: 1e35, steps: 20, ..LrFindOptions::default() };
    let nothing = learner.lr_find_with(wild).unwrap().cell_content();
    assert!(nothing.plain().ends_with("take more steps"), "{}", nothing.plain());
}

#[test]
fn an_interpretation_shows_its_matrix_and_its_report() {
    let mut learner = learner();
    learner.fit(1, 0.05, ()).unwrap();
    let interpretation = ClassInterpretation::from_learner(&mut learner).unwrap();
    let content = interpretation.cell_content();
    let report = interpretation.classification_report();
    assert!(content.plain().starts_with("Confusion matrix\n"), "{}", content.plain());
    assert!(content.plain().ends_with(report.trim_end()), "{}", content.plain());
    let html = html("interpretation", &content);
    assert!(html.contains("data:image/svg+xml;base64,") && html.contains("f1-score"), "{html}");
}

/// Classes are named by folders and tables of data that others have made.
#[test]
fn names_of_classes_cannot_command_a_terminal_or_a_page() {
    let hostile = "<script>\x1b]52;c;cm0gLXJm\x07\r\u{202e}";
    let mut learner = learner_of([hostile, "b", "c", "d"]);
    learner.fit(1, 0.05, ()).unwrap();
    let interpretation = ClassInterpretation::from_learner(&mut learner).unwrap();
    assert_eq!(interpretation.class_names()[0], hostile);
    let content = interpretation.cell_content();
    let escaped = r"<script>\u{1b}]52;c;cm0gLXJm\u{7}\r\u{202e}";
    let line = content.plain().lines().find(|line| line.trim_start().starts_with(escaped));
    assert!(line.is_some(), "{}", content.plain());
    let html = html("hostile", &content);
    assert!(html.contains(&escaped.replace('<', "&lt;").replace('>', "&gt;")), "{html}");
    for shown in [content.plain(), &html] {
        let obeyed = |letter: char| letter.is_control() && letter != '\n' || letter == '\u{202e}';
        assert!(!shown.contains(obeyed), "{shown:?}");
    }
    assert!(!html.contains("<script>"), "{html}");
}
