//! Tests of `brigade report`: the page contains everything from a run's file.

use std::fs;
use std::path::Path;
use std::process::Command;

use brigade_track::{Config, Image, JsonLines, Outcome, Run, Stamp, Table, Tracker, Value};
use tempfile::{TempDir, tempdir};

fn ask(folder: &Path, arguments: &[&str]) -> (i32, String, String) {
    let mut brigade = Command::new(env!("CARGO_BIN_EXE_brigade"));
    let output = brigade.current_dir(folder).arg("report").args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// Returns the page of a run with these lines.
fn page(lines: &str) -> String {
    let folder = tempdir().unwrap();
    fs::write(folder.path().join("a.jsonl"), lines).unwrap();
    let (code, stdout, stderr) = ask(folder.path(), &["a.jsonl"]);
    assert_eq!((code, stdout.as_str()), (0, "a.html\n"), "{stderr}");
    fs::read_to_string(folder.path().join("a.html")).unwrap()
}

/// Returns the error for a run with these lines.
fn refusal(lines: &str, arguments: &[&str]) -> (i32, String) {
    let folder = tempdir().unwrap();
    fs::write(folder.path().join("a.jsonl"), lines).unwrap();
    let (code, _, stderr) = ask(folder.path(), &[&["a.jsonl"], arguments].concat());
    assert!(!folder.path().join("a.html").exists());
    (code, stderr)
}

fn values(all: &[(&str, Value)]) -> Vec<(String, Value)> {
    all.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect()
}

/// Writes a run as the Learner logs it, which stopped after an epoch and was resumed.
fn learner() -> TempDir {
    let folder = tempdir().unwrap();
    let mut tracker = JsonLines::new(folder.path().join("runs"));
    let config = serde_json::json!({
        "model": "resnet18", "augment": { "size": 224 }, "brigade": { "world_size": 2 }
    });
    let run = Run::new("pets").config(Config::of(&config).unwrap());
    for (start, losses) in [[0.9, 0.5], [0.6, 0.7]].iter().enumerate() {
        tracker.start(&run).unwrap();
        for (index, loss) in losses.iter().enumerate() {
            let epoch = 2 * start + index;
            for step in 10 * epoch..10 * (epoch + 1) {
                let step_values = values(&[
                    ("loss", (1.0 / (step + 1) as f64).into()),
                    ("lr_0", 1e-4.into()),
                    ("lr_1", 1e-3.into()),
                    ("samples_per_second", 500.into()),
                    ("resident_mib", 800.0.into()),
                ]);
                tracker.log(&step_values, Stamp::step(step as u64)).unwrap();
            }
            let line = values(&[
                ("epoch", epoch.into()),
                ("train_loss", (*loss).into()),
                ("valid_loss", (loss + 0.125).into()),
                ("accuracy", (1.0 - loss / 2.0 + if epoch == 3 { 0.5 } else { 0.0 }).into()),
                ("time", 61.7.into()),
            ]);
            tracker.log(&line, Stamp::step(10 * epoch as u64 + 9)).unwrap();
        }
        tracker.log_text("best_checkpoint", "models/best.pth", Stamp::now()).unwrap();
        let image = Image::new(2, 1, 3, vec![9; 6]).unwrap();
        tracker.log_image("samples", &image, Stamp::step(19 + 20 * start as u64)).unwrap();
        let rows = vec![vec![0.into(), "node-1".into(), 290.5.into()]];
        let table = Table::new(["rank", "host", "samples_per_second"], rows).unwrap();
        tracker.log_table("ranks", &table, Stamp::now()).unwrap();
        let outcome = if start == 0 { Outcome::Failed } else { Outcome::Finished };
        tracker.finish(outcome).unwrap();
    }
    folder
}

#[test]
fn a_run_of_the_learner_is_a_page() {
    let folder = learner();
    let (code, stdout, stderr) = ask(folder.path(), &[]);
    assert_eq!((code, stdout.as_str()), (0, "runs/pets.html\n"), "{stderr}");
    let page = fs::read_to_string(folder.path().join("runs/pets.html")).unwrap();
    for part in [
        "<title>pets</title>",
        "<span class=\"state finished\">finished</span>",
        "<td>start 2</td>",
        "from step 20",
        // 0.5 + 0.125 of epoch 1 is the least.
        "<td>best epoch 1</td><td>valid_loss = 0.625, the least</td>",
        "<td>best checkpoint</td><td>models/best.pth</td>",
        "<tr class=\"best\"><td class=\"n\">1</td><td class=\"n\">0.5</td><td class=\"n\">0.625</td>",
        "<td class=\"n\">1:02</td>",
        "<td>augment.size</td><td class=\"n\">224</td>",
        "<h2>Environment</h2>",
        "<td>world_size</td><td class=\"n\">2</td>",
        "<h3>ranks, the last of 2</h3>",
        "<th>host</th>",
        "<figcaption>step 19</figcaption>",
        "<h2>Speed and memory</h2>",
        // The losses are in one chart, and the rates of the groups of parameters in another.
        ">train_loss</text>",
        ">valid_loss</text>",
        ">lr_1</text>",
        ">start 2</text>",
        ">best</text>",
    ] {
        assert!(page.contains(part), "{part} is not in the page");
    }
    assert_eq!(page.matches("src=\"data:image/png;base64,iVBORw0KGgo").count(), 2);
    // Both starts have the same settings, which are shown once.
    assert!(!page.contains("From start 2"));
    assert!(!page.contains("<h2>Notes</h2>"));
}

#[test]
fn a_page_refers_to_nothing_outside() {
    let folder = learner();
    ask(folder.path(), &[]);
    let page = fs::read_to_string(folder.path().join("runs/pets.html")).unwrap();
    // The name of SVG's namespace is not a reference.
    let page = page.replace("http://www.w3.org/2000/svg", "");
    for reference in ["http:", "https:", "//cdn", "<script", "<link", "<iframe", "@import", "url("]
    {
        assert!(!page.contains(reference), "{reference}");
    }
    let sources = page.matches(" src=\"").count() + page.matches(" href=\"").count();
    assert_eq!(sources, page.matches("=\"data:image/png;base64,").count());
    assert!(page.contains("default-src 'none'"));
}

#[test]
fn the_monitored_value_is_a_choice() {
    let folder = learner();
    let best = |arguments: &[&str]| {
        let all = [&["runs/pets.jsonl", "--output", "other.html"], arguments].concat();
        let (code, stdout, stderr) = ask(folder.path(), &all);
        assert_eq!((code, stdout.as_str()), (0, "other.html\n"), "{stderr}");
        let page = fs::read_to_string(folder.path().join("other.html")).unwrap();
        let begin = page.find("<td>best ").unwrap();
        page[begin..].split("</tr>").next().unwrap().replace("</td><td>", ": ")
    };
    assert_eq!(
        best(&["--monitor", "accuracy"]),
        "<td>best epoch 3: accuracy = 1.15, the greatest</td>"
    );
    assert_eq!(
        best(&["--monitor", "accuracy", "--mode", "min"]),
        "<td>best epoch 0: accuracy = 0.55, the least</td>"
    );
    assert_eq!(best(&["--monitor", "loss"]), "<td>best step 39: loss = 0.025, the least</td>");
    let (code, _, stderr) = ask(folder.path(), &["--monitor", "acuracy"]);
    assert_eq!(code, 2);
    assert!(
        stderr.contains("no \"acuracy\" to monitor: it has train_loss, valid_loss, accuracy"),
        "{stderr}"
    );
    let (code, _, stderr) =
        ask(folder.path(), &["runs/pets.jsonl", "--output", "./runs/../runs/pets.jsonl"]);
    assert_eq!(code, 2);
    assert!(stderr.contains("is the run itself"), "{stderr}");
}

#[test]
fn lines_of_any_program_make_a_page() {
    let steps: String =
        (0..50).map(|step| format!("{{\"_step\":{step},\"a\":{step}}}\n")).collect();
    let any = page(&steps);
    assert!(any.contains("<title>a</title>") && any.contains("without a start or an end"));
    assert!(any.contains(
        "<td>a</td><td class=\"n\">50</td><td class=\"n\">49</td><td class=\"n\">0</td>"
    ));
    // Without steps the lines are counted, and the last line needs no line break.
    let counted = page("{\"x\":3,\"on\":true}\n{\"x\":4,\"on\":false}");
    assert!(
        counted.contains(">line</text>") && counted.contains("<td>x</td><td class=\"n\">2</td>")
    );
    // A program that logs the epoch at each step has curves over the steps.
    let named: String = (0..50)
        .map(|step| format!("{{\"_step\":{step},\"epoch\":{},\"loss\":{step}}}\n", step / 25))
        .collect();
    let named = page(&named);
    assert!(
        named.contains("<h2>Curves</h2>") && named.contains("<td>loss</td><td class=\"n\">50</td>")
    );
    assert!(named.contains("<td>best epoch 0</td><td>loss = 24, the least</td>"));
    // Only a start: the run has begun.
    let begun = page("{\"_event\":\"start\",\"_time\":1,\"_project\":\"p\"}\n");
    assert!(begun.contains("<title>p</title>") && begun.contains("class=\"state running\""));
}

#[test]
fn what_cannot_be_read_is_a_note() {
    let page = page(
        "{\"a\":1}\nnonsense\n[1]\n{\"_event\":\"pause\"}\n{\"a\":\"NaN\",\"b\":[1,null],\"_time\":\"x\"}\n\
         {\"a\":1e400}\n{\"_time\":1e300,\"a\":2}\n{\"p\":\"gone.png\"}\n{\"half",
    );
    for part in [
        "Line 2 cannot be read: ",
        "Line 3 cannot be read: ",
        "Line 4 cannot be read: its event &quot;pause&quot;",
        "Line 6 cannot be read: ",
        "The last line is not whole",
        "<td>[1,null]</td>",
        "gone.png is left out: ",
    ] {
        assert!(page.contains(part), "{part} is not in {page}");
    }
    let many = format!("{{\"a\":1}}\n{}", "x\n".repeat(5000));
    let many = self::page(&many);
    assert!(many.len() < 20_000 && many.contains("4990 more lines cannot be read"));
}

#[test]
fn foreign_text_is_never_markup() {
    let hostile = "</title></style><script>alert(1)</script><img src=x onerror=alert(1)>\\\"'&";
    let text = serde_json::to_string(hostile).unwrap();
    let lines = format!(
        "{{\"_event\":\"start\",\"_project\":{text},\"_config\":{{{text}:{text},\"brigade\":{{{text}:1}}}}}}\n\
         {{\"epoch\":0,{text}:1,\"valid_loss\":2}}\n{{\"epoch\":1,{text}:2,\"valid_loss\":1}}\n\
         {{\"_step\":1,{text}:1}}\n{{\"_step\":2,{text}:2}}\n{{\"t\":{text}}}\n\
         {{\"table\":{{\"columns\":[{text}],\"data\":[[{text}]]}}}}\n{{\"b{hostile}\n"
    );
    let page = page(&lines);
    assert_eq!(page.matches("<script").count() + page.matches("<img").count(), 0);
    assert_eq!((page.matches("</title>").count(), page.matches("</style>").count()), (1, 1));
    assert!(page.matches("&lt;script&gt;").count() > 10);
}

#[test]
fn only_pictures_of_the_run_are_in_the_page() {
    let folder = learner();
    let runs = folder.path().join("runs");
    fs::write(folder.path().join("outside.png"), b"\x89PNG\r\n\x1a\nsecret").unwrap();
    std::os::unix::fs::symlink(
        folder.path().join("outside.png"),
        runs.join("pets.images/link.png"),
    )
    .unwrap();
    fs::write(runs.join("pets.images/text.png"), "a text").unwrap();
    let mut lines = fs::read_to_string(runs.join("pets.jsonl")).unwrap();
    for path in
        ["../outside.png", "pets.images/link.png", "pets.images/text.png", "/etc/passwd.png"]
    {
        lines += &format!("{{\"p\":\"{path}\"}}\n");
    }
    fs::write(runs.join("pets.jsonl"), lines).unwrap();
    let (code, _, stderr) = ask(folder.path(), &[]);
    assert_eq!(code, 0, "{stderr}");
    let page = fs::read_to_string(runs.join("pets.html")).unwrap();
    assert_eq!(page.matches("data:image/png").count(), 2);
    for note in [
        "outside.png is left out",
        "link.png is left out: it is not a plain file",
        "text.png is left out: it is not a PNG file",
        "passwd.png is left out",
    ] {
        assert!(page.contains(note), "{note}");
    }
}

#[test]
fn a_large_run_is_a_small_page() {
    let mut lines = String::new();
    for step in 0..200_000 {
        let spike = if step == 123_456 { 777.0 } else { 1.0 };
        lines += &format!("{{\"_step\":{step},\"a\":{spike},\"b\":{}}}\n", step % 97);
    }
    lines.extend((0..400).map(|index| format!("{{\"_step\":1,\"name{index}x\":1}}\n")));
    let page = page(&lines);
    assert!(page.len() < 1_000_000, "{} bytes", page.len());
    assert!(page.contains("<td class=\"n\">777</td><td class=\"n\">123456</td>"));
    assert!(page.contains("102 values under further names: left out"));
}

#[test]
fn what_is_no_run_is_an_error() {
    let (code, stderr) = refusal("", &[]);
    assert_eq!(
        (code, stderr.as_str()),
        (1, "brigade: a.jsonl is empty: the run has logged nothing yet\n")
    );
    let (code, stderr) = refusal("text\nmore\n", &[]);
    assert!(code == 1 && stderr.contains("a.jsonl is not a run: line 1: "), "{stderr}");
    let (code, stderr) = refusal("{\"a\":\"b\"}\n", &["--monitor", "a"]);
    assert!(code == 2 && stderr.contains("it has logged no numbers"), "{stderr}");

    let folder = tempdir().unwrap();
    let (code, _, stderr) = ask(folder.path(), &["gone.jsonl"]);
    assert!(code == 1 && stderr.contains("cannot read the run gone.jsonl: "), "{stderr}");
    let (code, _, stderr) = ask(folder.path(), &["."]);
    assert!(code == 1 && stderr.contains(". contains no run: expected a .jsonl file"), "{stderr}");
    fs::write(folder.path().join("a.jsonl"), "{\"a\":1}\n").unwrap();
    let (code, _, stderr) = ask(folder.path(), &["a.jsonl", "--output", "none/a.html"]);
    assert!(code == 1 && stderr.contains("cannot write none/a.html"), "{stderr}");
}
