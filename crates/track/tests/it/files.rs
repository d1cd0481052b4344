//! Tests of the files that trackers write, with the parsers of their formats.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use brigade_track::{
    Config, Csv, Image, JsonLines, Outcome, Run, Stamp, Table, TensorBoard, TrackError, Tracker,
    Value, Values,
};
use proptest::prelude::*;

fn at(step: u64) -> Stamp {
    Stamp { step: Some(step), time: UNIX_EPOCH + Duration::from_millis(1_763_757_346_250) }
}

fn values(values: &[(&str, f64)]) -> Values {
    values.iter().map(|(name, value)| ((*name).to_owned(), Value::from(*value))).collect()
}

fn run() -> Run {
    let config = serde_json::json!({ "lr": 0.1, "model": { "width": 8 } });
    let mut run = Run::new("demo").config(Config::of(&config).unwrap());
    run.began = at(0).time;
    run
}

fn lines(path: &Path) -> Vec<serde_json::Value> {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.ends_with('\n'));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn json_lines_keep_the_order_and_say_what_is_not_finite() {
    let folder = tempfile::tempdir().unwrap();
    let mut tracker = JsonLines::new(folder.path().join("runs"));
    tracker.start(&run()).unwrap();
    let mut logged = values(&[("zeta", 0.5), ("alpha", f64::NAN), ("inf", f64::INFINITY)]);
    logged.push(("words".to_owned(), "a \"b\"\n".into()));
    tracker.log(&logged, at(3)).unwrap();
    tracker.log(&values(&[("loss", 0.1)]), Stamp { step: None, ..at(0) }).unwrap();
    // Each line is written when the call returns.
    let path = folder.path().join("runs/demo.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    assert_eq!(
        text,
        concat!(
            r#"{"_event":"start","_time":1763757346.25,"_project":"demo","#,
            r#""_config":{"lr":0.1,"model":{"width":8}}}"#,
            "\n",
            r#"{"_step":3,"_time":1763757346.25,"zeta":0.5,"alpha":"NaN","inf":"Infinity","#,
            r#""words":"a \"b\"\n"}"#,
            "\n",
            r#"{"_time":1763757346.25,"loss":0.1}"#,
            "\n",
        )
    );
    let table = Table::new(["n"], vec![vec![1.into()]]).unwrap();
    tracker.log_table("table", &table, at(4)).unwrap();
    tracker.log_text("note", "hello", at(4)).unwrap();
    let image = Image::new(2, 1, 3, vec![0, 1, 2, 3, 4, 5]).unwrap();
    tracker.log_image("a/b", &image, at(4)).unwrap();
    tracker.finish(Outcome::Finished).unwrap();
    let lines = lines(&path);
    assert_eq!(lines[3]["table"], serde_json::json!({ "columns": ["n"], "data": [[1]] }));
    assert_eq!(lines[4]["note"], "hello");
    assert!(fs::read(lines[5]["a/b"].as_str().unwrap()).unwrap().starts_with(b"\x89PNG"));
    assert_eq!(lines[6]["_event"], "finish");
    let error = tracker.log(&logged, at(5)).unwrap_err();
    assert!(matches!(error, TrackError::NotStarted { .. }), "{error}");
}

#[test]
fn json_lines_of_a_killed_run_go_on_after_the_last_whole_line() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("demo.jsonl");
    for half in ["{\"_step\":1,\"lo".to_owned(), format!("\"{}", "x".repeat(10_000)), String::new()]
    {
        let before = fs::read_to_string(&path).unwrap_or_default();
        let mut tracker = JsonLines::new(folder.path());
        tracker.start(&Run::new("demo")).unwrap();
        tracker.log(&values(&[("loss", 1.0)]), at(1)).unwrap();
        drop(tracker);
        OpenOptions::new().append(true).open(&path).unwrap().write_all(half.as_bytes()).unwrap();
        let mut next = JsonLines::new(folder.path());
        next.start(&Run::new("demo")).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with(&before));
        assert_eq!(lines(&path).len(), before.lines().count() + 3);
    }
}

#[test]
fn names_that_the_tracker_writes_itself_are_refused_and_nothing_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let trackers: [Box<dyn Tracker>; 2] =
        [Box::new(JsonLines::new(folder.path())), Box::new(Csv::new(folder.path()))];
    for mut tracker in trackers {
        tracker.start(&Run::new("demo")).unwrap();
        let error = tracker.log(&values(&[("loss", 1.0), ("_step", 1.0)]), at(1)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "\"_step\" is a column that the tracker writes itself: log the value under another name"
        );
        tracker.log(&values(&[("loss", 2.0)]), at(1)).unwrap();
    }
    assert_eq!(fs::read_to_string(folder.path().join("demo.csv")).unwrap().lines().count(), 2);
    for name in ["", ".", "../x", "a/b", ".hidden"] {
        let error = JsonLines::new(folder.path()).start(&Run::new(name)).unwrap_err();
        assert!(matches!(error, TrackError::Project { .. }), "{error}");
    }
}

#[test]
fn columns_that_come_later_lose_no_row() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("demo.csv");
    let mut tracker = Csv::new(folder.path());
    tracker.start(&run()).unwrap();
    tracker.log(&values(&[("loss", 0.5), ("b", f64::NAN)]), at(1)).unwrap();
    let mut wide = values(&[("accuracy", 0.9), ("loss", f64::NEG_INFINITY)]);
    wide.push(("note, quoted".to_owned(), "a,\"b\"\nc".into()));
    tracker.log(&wide, at(2)).unwrap();
    tracker.log(&values(&[("loss", 0.25)]), Stamp { step: None, ..at(0) }).unwrap();
    let expected = "\
_step,_time,loss,b,accuracy,\"note, quoted\"
1,1763757346.25,0.5,NaN,,
2,1763757346.25,-inf,,0.9,\"a,\"\"b\"\"\\nc\"
,1763757346.25,0.25,,,
";
    assert_eq!(fs::read_to_string(&path).unwrap(), expected);
    assert_eq!(
        fs::read_to_string(folder.path().join("demo.config.csv")).unwrap(),
        "name,value\nlr,0.1\nmodel.width,8\n"
    );
    // A resumed run knows the columns, and can add some.
    drop(tracker);
    let mut next = Csv::new(folder.path());
    next.start(&Run::new("demo")).unwrap();
    next.log(&values(&[("accuracy", 1.0), ("new", 2.0)]), at(3)).unwrap();
    let table = Table::new(["n", "x"], vec![vec![1.into(), "y".into()]]).unwrap();
    next.log_table("t", &table, at(3)).unwrap();
    next.finish(Outcome::Finished).unwrap();
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.starts_with("_step,_time,loss,b,accuracy,\"note, quoted\",new\n"), "{text}");
    assert!(text.ends_with("3,1763757346.25,,,1,,2\n"), "{text}");
    let table = fs::read_to_string(folder.path().join("demo.tables/t-3.csv")).unwrap();
    assert_eq!(table, "n,x\n1,y\n");
    assert!(!folder.path().join("demo.csv.new").exists());
}

/// A run that is killed at any byte of a row, whose cell has line breaks and quotes, leaves the rows before and after
/// it whole.
#[test]
fn a_half_row_is_cut_off_wherever_it_ends() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("demo.csv");
    let note = |text: &str| vec![("note\r\nof two".to_owned(), Value::from(text))];
    let mut tracker = Csv::new(folder.path());
    tracker.start(&Run::new("demo")).unwrap();
    tracker.log(&note("first\nrow"), at(1)).unwrap();
    let before = fs::read(&path).unwrap();
    tracker.log(&note("a \"quoted\",\n\nb\r\nc"), at(2)).unwrap();
    drop(tracker);
    let whole = fs::read(&path).unwrap();
    assert_eq!(whole.iter().filter(|&&byte| byte == b'\n').count(), 3);
    for end in before.len()..whole.len() {
        fs::write(&path, &whole[..end]).unwrap();
        let mut next = Csv::new(folder.path());
        next.start(&Run::new("demo")).unwrap();
        next.log(&note("last"), at(3)).unwrap();
        let mut reader = csv::Reader::from_path(&path).unwrap();
        assert_eq!(reader.headers().unwrap(), ["_step", "_time", "note\\r\\nof two"].as_slice());
        let rows: Vec<csv::StringRecord> = reader.records().map(Result::unwrap).collect();
        let cells: Vec<_> = rows.iter().map(|row| (&row[0], &row[2])).collect();
        assert_eq!(cells, [("1", "first\\nrow"), ("3", "last")], "cut at byte {end}");
    }
}

#[test]
fn another_users_table_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("demo.csv");
    fs::write(&path, "epoch,loss\n1,2\n").unwrap();
    let error = Csv::new(folder.path()).start(&run()).unwrap_err();
    assert!(matches!(error, TrackError::Foreign { .. }), "{error}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "epoch,loss\n1,2\n");
}

#[test]
fn unwritable_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let trackers: [Box<dyn Tracker>; 3] = [
        Box::new(JsonLines::new(&file)),
        Box::new(Csv::new(&file)),
        Box::new(TensorBoard::new(&file)),
    ];
    for mut tracker in trackers {
        let error = tracker.start(&run()).unwrap_err().to_string();
        assert!(error.starts_with("cannot make the folder /"), "{error}");
    }
}

#[test]
fn a_full_disk_is_an_error_of_the_call() {
    // Linux has a device that is always full.
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink("/dev/full", folder.path().join("demo.jsonl")).unwrap();
    let error = JsonLines::new(folder.path()).start(&Run::new("demo")).unwrap_err().to_string();
    assert!(error.contains("demo.jsonl") && error.contains("No space left"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Values that are logged in any order, over any number of runs, are all in the table.
    #[test]
    fn a_csv_holds_all_that_was_logged(
        runs in proptest::collection::vec(
            proptest::collection::vec(
                proptest::collection::btree_map("[a-f]", "[ -~\\n]{1,8}", 0..4),
                0..6,
            ),
            1..4,
        ),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let mut step = 0;
        for rows in &runs {
            let mut tracker = Csv::new(folder.path());
            tracker.start(&Run::new("demo")).unwrap();
            for row in rows {
                let row: Values = row.iter().map(|(k, v)| (k.clone(), v.as_str().into())).collect();
                tracker.log(&row, at(step)).unwrap();
                step += 1;
            }
        }
        let mut reader = csv::Reader::from_path(folder.path().join("demo.csv")).unwrap();
        let names = reader.headers().unwrap().clone();
        let found: Vec<csv::StringRecord> = reader.records().map(Result::unwrap).collect();
        let expected: Vec<_> = runs.iter().flatten().collect();
        prop_assert_eq!(found.len(), expected.len());
        for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
            prop_assert_eq!(&found[0], step.to_string());
            for (name, cell) in names.iter().zip(found).skip(2) {
                let expected = expected.get(name).map_or("", String::as_str);
                prop_assert_eq!(cell, expected.replace('\n', "\\n"));
            }
        }
    }
}
