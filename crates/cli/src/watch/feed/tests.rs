//! Tests with files that grow, are deleted and created again, and with input in pieces.

use std::fs;
use std::io::Write;

use tempfile::{TempDir, tempdir};

use super::super::model::State;
use super::*;

const LINE: &str = "{\"_step\":1,\"loss\":1}\n";

fn write(folder: &TempDir, name: &str, text: &str) {
    let path = folder.path().join(name);
    let file = fs::OpenOptions::new().append(true).create(true).open(path);
    file.unwrap().write_all(text.as_bytes()).unwrap();
}

fn count(model: &Model) -> u64 {
    model.curves.get("loss").map_or(0, super::super::curve::Curve::count)
}

#[test]
fn a_run_that_is_not_there_yet() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    assert!(RunFile::open(&path, None, false).is_err());
    assert!(RunFile::open(folder.path(), None, false).is_err());
    let mut feed = Feed::File(RunFile::open(folder.path(), None, true).unwrap());
    let mut model = Model::default();
    let found = feed.poll(&mut model).unwrap();
    assert!(found.notice.unwrap().starts_with("waiting for a run in") && !found.is_new);
    write(&folder, "a.jsonl", LINE);
    assert!(feed.poll(&mut model).unwrap().is_new);
    assert_eq!((count(&model), feed.name().as_str()), (1, "a"));
    assert!(!feed.poll(&mut model).unwrap().is_new);

    fs::remove_file(&path).unwrap();
    assert_eq!(feed.poll(&mut model).unwrap().notice.as_deref(), Some("the file is gone"));
    assert_eq!(count(&model), 1, "what was read stays");
    write(&folder, "a.jsonl", "{\"_step\":7,\"loss\":2}\n{\"_step\":8,\"lo");
    assert!(feed.poll(&mut model).unwrap().replaced);
    assert_eq!((count(&model), model.step()), (1, 7.0));
    write(&folder, "a.jsonl", "ss\":3}");
    assert!(!feed.poll(&mut model).unwrap().is_new, "the line's end is missing");
    let Feed::File(file) = &mut feed else { panic!() };
    file.finish(&mut model);
    assert_eq!((count(&model), model.step()), (2, 8.0));
}

#[test]
fn runs_of_a_folder_by_name_and_in_turn() {
    let folder = tempdir().unwrap();
    for (name, step) in [("b", 2), ("c", 3), ("a", 1)] {
        write(&folder, &format!("{name}.jsonl"), &format!("{{\"_step\":{step},\"loss\":1}}\n"));
    }
    write(&folder, "z.csv", "");
    assert!(RunFile::open(folder.path(), Some("z"), false).is_err());
    let mut feed = Feed::File(RunFile::open(folder.path(), Some("b"), false).unwrap());
    let step = |feed: &mut Feed| {
        let mut model = Model::default();
        feed.poll(&mut model).unwrap();
        model.step()
    };
    assert_eq!(step(&mut feed), 2.0);
    for (forward, expected) in [(true, 3.0), (true, 1.0), (false, 3.0), (false, 2.0)] {
        let Feed::File(file) = &mut feed else { panic!() };
        assert!(file.switch(forward));
        assert_eq!(file.siblings().0.len(), 3);
        assert_eq!(step(&mut feed), expected);
    }
}

/// Reader that returns its pieces one by one.
struct Pieces(std::vec::IntoIter<&'static str>);

impl Read for Pieces {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let piece = self.0.next().unwrap_or_default().as_bytes();
        buffer[..piece.len()].copy_from_slice(piece);
        Ok(piece.len())
    }
}

#[test]
fn an_input_comes_in_pieces_and_ends() {
    let pieces = vec![
        "{\"_step\":1,\"loss\":1}\n{\"_st",
        "ep\":2,\"loss\":2}\n\n",
        "nonsense\n",
        "{\"_event\":\"finish\"}",
    ];
    let mut feed = Feed::Input(Input::open(Pieces(pieces.into_iter())).unwrap());
    let mut model = Model::default();
    let mut ended = FeedUpdate::default();
    while !ended.ended {
        ended = feed.poll(&mut model).unwrap();
        thread::yield_now();
    }
    assert_eq!((count(&model), model.broken, model.state), (2, 1, State::Finished));
    assert_eq!(ended.notice.as_deref(), Some("the input has ended"));
}

#[test]
fn a_line_without_end_takes_no_memory() {
    let endless = io::repeat(b'x').take(3 * LONGEST_LINE);
    let mut feed = Feed::Input(Input::open(endless.chain(&b"\n{\"loss\":1}\n"[..])).unwrap());
    let mut model = Model::default();
    while !feed.poll(&mut model).unwrap().ended {
        thread::yield_now();
    }
    assert_eq!((model.broken, count(&model)), (3, 1));
    assert!(model.broken_reason.contains("longer than"));
}
