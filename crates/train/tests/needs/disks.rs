//! Checkpoints on disks that are too small or read-only, which only a mount namespace has.

use std::fs;
use std::path::PathBuf;

use brigade_nn::{Linear, Model};
use brigade_test_needs::{needs, part, with_mounts};
use brigade_testkit::KillableRanks;
use brigade_train::{Accelerator, ProjectConfiguration};

use crate::resume::Run;

const DISK: &str = "BRIGADE_TEST_DISK";
const PART: &str = "BRIGADE_TEST_DISK_PART";

#[needs(Mounts)]
fn a_full_disk_is_an_error_on_every_rank_and_leaves_nothing() {
    on_a_disk("size=9m", "disks::rank_on_a_full_disk");
}

#[needs(Mounts)]
fn a_read_only_disk_is_an_error_on_every_rank_and_training_goes_on() {
    on_a_disk("ro", "disks::rank_on_a_read_only_disk");
}

/// Runs two ranks in a mount namespace with a disk that was mounted with this option.
fn on_a_disk(option: &str, part: &str) {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let script = "mount -t tmpfs -o \"$1\" none \"$2\"\nexec \"$3\" --part disks::ranks";
    let mut command = with_mounts(script);
    command.arg(option).arg(&disk).arg(std::env::current_exe().unwrap());
    let output = command.env(DISK, &disk).env(PART, part).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[part]
fn ranks() {
    let part = std::env::var(PART).unwrap();
    let mut ranks = KillableRanks::start_with(&["--part", &part], 2, &[]).unwrap();
    for rank in ranks.ranks() {
        assert!(rank.wait().unwrap().success());
    }
}

fn disk() -> PathBuf {
    std::env::var_os(DISK).map(PathBuf::from).unwrap()
}

#[part]
fn rank_on_a_full_disk() {
    let (first, disk) = (Accelerator::new().unwrap(), disk());
    for background in [true, false] {
        let project = ProjectConfiguration::default().background(background);
        let accelerator = Accelerator::builder().sharing(&first).project(project).build().unwrap();
        let large = Model::new(|path| Linear::new(path / "large", 2048, 2048)).unwrap();
        let _large = accelerator.prepare(large).unwrap();
        let outcome = accelerator
            .save_state(disk.join("checkpoint"))
            .and_then(|_| accelerator.checkpoints().wait());
        let error = outcome.unwrap_err();
        assert!(error.to_string().contains("No space left on device"), "{error}");
        accelerator.processes().wait_for_everyone().unwrap();
        let names: Vec<_> = fs::read_dir(&disk).unwrap().collect();
        assert!(names.is_empty(), "{names:?}");
        accelerator.processes().wait_for_everyone().unwrap();
    }
}

#[part]
fn rank_on_a_read_only_disk() {
    let (first, disk) = (Accelerator::new().unwrap(), disk());
    let mut run = Run::new(&first, 1);
    for background in [true, false] {
        let project = ProjectConfiguration::new(disk.join("run")).background(background);
        let accelerator = Accelerator::builder().sharing(&first).project(project).build().unwrap();
        let model = Model::new(|path| Linear::new(path / "hidden", 6, 8)).unwrap();
        let _model = accelerator.prepare(model).unwrap();
        let saved =
            accelerator.save_state(disk.join("one")).and_then(|_| accelerator.checkpoints().wait());
        let numbered = accelerator
            .checkpoints()
            .save_numbered()
            .and_then(|_| accelerator.checkpoints().wait());
        for outcome in [saved, numbered] {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("Read-only file system") && error.contains("disk"), "{error}");
        }
    }
    // Training continues, and is saved on another disk.
    run.go(&first, |_, batches| batches < 2);
    let before = run.weights();
    let path = first.save_state(disk.with_file_name("elsewhere")).unwrap();
    first.checkpoints().wait().unwrap();
    run.go(&first, |_, batches| batches < 4);
    first.load_state(&path).unwrap();
    // Buffers are taken from rank 0.
    assert!(!first.is_main_process() || run.weights() == before);
    first.processes().wait_for_everyone().unwrap();
}
