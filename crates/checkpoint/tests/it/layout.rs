//! Checkpoint folders that appear complete or not at all, and errors about incomplete ones.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use brigade_checkpoint::layout::{
    Checkpoint, ChecksumWriter, FORMAT, FileFacts, MANIFEST, Manifest, Object, Staging, VERSION,
    files, keep_newest, latest, numbered, numbered_path, sweep,
};
use brigade_checkpoint::{Error, FileName};

/// Writes a small checkpoint with one object and one file.
fn write(target: &Path, unique: &str, text: &[u8]) -> Result<(), Error> {
    let staging = Staging::create(target, unique)?;
    let mut file = ChecksumWriter::create(staging.path().join("custom.json"))?;
    file.put(text)?;
    let facts = file.finish(true)?;
    staging
        .commit(&manifest(BTreeMap::from([(FileName::new("custom.json").unwrap(), facts)])), true)
}

fn manifest(files: BTreeMap<FileName, FileFacts>) -> Manifest {
    let mut object = Object::new("custom", FileName::new("custom").unwrap());
    object.state = Some(FileName::new("custom.json").unwrap());
    Manifest { step: 7, samples: 56, objects: vec![object], files, ..Manifest::new("a test", 1) }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn the_manifest_is_a_golden_file() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("one");
    write(&target, "a", b"{\"answer\": 42}\n").unwrap();
    let golden = include_str!("../golden/manifest.json");
    assert_eq!(fs::read_to_string(target.join(MANIFEST)).unwrap(), golden);
    assert_eq!(names(&target), ["custom.json", MANIFEST]);
    assert_eq!(files(&target).unwrap().len(), 2);
}

#[test]
fn it_replaces_another_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("best");
    write(&target, "a", b"1").unwrap();
    write(&target, "b", b"2").unwrap();
    assert_eq!(fs::read(target.join("custom.json")).unwrap(), b"2");
    assert_eq!(names(folder.path()), ["best"]);

    let occupied = folder.path().join("mine");
    fs::create_dir(&occupied).unwrap();
    fs::write(occupied.join("thesis.tex"), "").unwrap();
    let error = write(&occupied, "c", b"3").unwrap_err();
    assert!(matches!(error, Error::Occupied { .. }), "{error}");
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(matches!(write(&file, "d", b"4"), Err(Error::Occupied { .. })));
    assert!(matches!(
        write(&file.join("below"), "e", b"5"),
        Err(Error::Io { .. } | Error::Occupied { .. })
    ));
    assert_eq!(names(folder.path()), ["best", "file", "mine"]);
}

#[test]
fn unfinished_checkpoints_are_removed_by_their_owner_or_a_later_save() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("checkpoint_0");
    let staging = Staging::create(&target, "a").unwrap();
    let left = staging.path().to_owned();
    // The owner is alive and holds the lock.
    assert_eq!(sweep(folder.path()).unwrap(), 0);
    assert!(left.is_dir());
    drop(staging);
    assert!(!left.exists());

    // As after SIGKILL: the folder exists and is not locked.
    fs::create_dir(&left).unwrap();
    fs::write(left.join("model.safetensors"), "half").unwrap();
    fs::create_dir(folder.path().join(".git")).unwrap();
    assert_eq!(numbered(folder.path()).unwrap(), Vec::<u64>::new());
    assert_eq!(sweep(folder.path()).unwrap(), 1);
    assert_eq!(names(folder.path()), [".git"]);
}

#[test]
fn the_newest_stay_and_the_latest_is_found() {
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(latest(folder.path()), Err(Error::NotACheckpoint { .. })));
    for number in [2, 10, 9] {
        write(&numbered_path(folder.path(), number), "a", b"x").unwrap();
    }
    fs::create_dir(folder.path().join("checkpoint_11")).unwrap();
    fs::create_dir(folder.path().join("checkpoint_007")).unwrap();
    assert_eq!(numbered(folder.path()).unwrap(), [2, 9, 10, 11]);
    assert_eq!(latest(folder.path()).unwrap(), folder.path().join("checkpoint_10"));
    keep_newest(folder.path(), 2).unwrap();
    assert_eq!(names(folder.path()), ["checkpoint_007", "checkpoint_10", "checkpoint_11"]);
}

#[test]
fn every_fault_has_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("one");
    write(&target, "a", b"{\"answer\": 42}\n").unwrap();
    let good = Checkpoint::open(&target).unwrap();
    assert!(good.verify().is_empty());
    assert_eq!(
        good.state(&good.manifest().objects[0]).unwrap().unwrap().get("answer").unwrap().as_int(),
        Some(42)
    );

    let text = fs::read_to_string(target.join(MANIFEST)).unwrap();
    let with = |from: &str, to: &str| {
        assert!(text.contains(from));
        fs::write(target.join(MANIFEST), text.replacen(from, to, 1)).unwrap();
        let error = Checkpoint::open(&target).unwrap_err();
        fs::write(target.join(MANIFEST), &text).unwrap();
        error
    };
    let error = with("\"version\": 2", "\"version\": 3");
    assert!(matches!(error, Error::Version { found: 3, known: VERSION, .. }), "{error}");
    assert!(error.to_string().contains("update Brigade"), "{error}");
    let error = with("\"version\": 2,", "");
    assert!(matches!(error, Error::Damaged { .. }), "{error}");
    assert!(error.to_string().contains("has no version"), "{error}");
    let error = with(FORMAT, "another-format");
    assert!(matches!(error, Error::NotACheckpoint { .. }), "{error}");
    let error = with("\"step\": 7", "\"step\": 8");
    assert!(matches!(error, Error::Damaged { .. }), "{error}");
    assert!(error.to_string().contains("its checksum is"), "{error}");
    for cut in 0..text.len() - 1 {
        fs::write(target.join(MANIFEST), &text[..cut]).unwrap();
        let error = Checkpoint::open(&target).unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }), "{cut}: {error}");
    }
    fs::write(target.join(MANIFEST), &text).unwrap();

    fs::write(target.join("custom.json"), b"{\"answer\": 43}\n").unwrap();
    let faults = Checkpoint::open(&target).unwrap().verify();
    assert!(
        faults[0].to_string().contains("custom.json is damaged: its checksum is"),
        "{faults:?}"
    );
    let damaged = Checkpoint::open(&target).unwrap();
    assert!(damaged.state(&damaged.manifest().objects[0]).is_err());
    fs::write(target.join("custom.json"), b"{\"ans").unwrap();
    let error = Checkpoint::open(&target).unwrap_err().to_string();
    assert!(error.contains("its custom.json has 5 bytes, but it was written with 15"), "{error}");
    fs::remove_file(target.join("custom.json")).unwrap();
    let error = Checkpoint::open(&target).unwrap_err().to_string();
    assert!(error.contains("its custom.json is missing"), "{error}");
    fs::remove_file(target.join(MANIFEST)).unwrap();
    fs::write(target.join("random_states_0.pkl"), "").unwrap();
    let error = Checkpoint::open(&target).unwrap_err().to_string();
    assert!(error.contains("looks like one of Accelerate's"), "{error}");
    let error = Checkpoint::open(folder.path().join("nothing")).unwrap_err();
    assert!(matches!(error, Error::NotACheckpoint { .. }), "{error}");
}
