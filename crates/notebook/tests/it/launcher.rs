//! `notebook_launcher` from a cell: a shared library that a process has loaded, as a kernel loads one.

use std::fmt::Debug;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;
use std::thread::sleep;
use std::time::{Duration, Instant};

use brigade_notebook::debug_launcher;
use brigade_torch::ReduceOp;
use brigade_train::Accelerator;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use object::{Object, ObjectSegment, ObjectSymbol};
use tch::Tensor;

use crate::binary::brigade_beside;

static BRIGADE: LazyLock<PathBuf> =
    LazyLock::new(|| brigade_beside(beside("brigade").to_str().unwrap()));

/// A file of cargo's folder for this profile.
fn beside(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().and_then(Path::parent).unwrap().join(name)
}

/// The example `cell`: cargo builds examples with all tests of a package, not with `--test it` alone.
fn library() -> PathBuf {
    let library = beside("examples/libcell.so");
    assert!(
        library.is_file(),
        "cargo build -p brigade-notebook --examples makes {}",
        library.display()
    );
    library
}

/// Where the library has the entry of its cell.
fn offset(library: &Path) -> u64 {
    let bytes = fs::read(library).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let base = file.segments().map(|segment| segment.address()).min().unwrap();
    let entry = file.symbols().find(|it| it.name().is_ok_and(|name| name.contains("CELL_ENTRY")));
    entry.expect("the cell's entry is in the table of symbols").address() - base
}

/// The kernel's process, with a cell that does this.
fn kernel(cell: &str) -> Command {
    let library = library();
    let mut command = Command::new(&*BRIGADE);
    command.arg("notebook-rank").arg(&library).arg(offset(&library).to_string());
    command.env("CELL", cell).env("BRIGADE_PROGRAM", &*BRIGADE).env("OMP_NUM_THREADS", "1");
    command.env("RUST_BACKTRACE", "0").stdin(Stdio::null());
    command
}

fn text(output: &Output) -> (String, String) {
    let [out, err] =
        [&output.stdout, &output.stderr].map(|it| String::from_utf8_lossy(it).into_owned());
    assert!(output.status.success(), "{out}{err}");
    (out, err)
}

fn run(cell: &str) -> (String, String) {
    text(&kernel(cell).output().unwrap())
}

#[track_caller]
fn has(text: &(impl AsRef<str> + Debug), part: &str) {
    assert!(text.as_ref().contains(part), "{part:?} is missing in\n{}", text.as_ref());
}

#[test]
fn dist_each_ranks_result_comes_back_and_its_output_appears() {
    let (out, err) = run("losses");
    has(&out, "Launching training on 2 processes.");
    // The mean of the squares of 1 and 2; no rank has the notebook's global variable.
    has(&out, "[[2.0, 2.5, 1.6000000000000003, 1.024], [2.0, 2.5, 1.6000000000000003, 1.024]]");
    has(&format!("{out}{err}"), "0 calls before");

    let alone = kernel("losses").env("CELL_RANKS", "1").output().unwrap();
    let (out, _) = text(&alone);
    has(&out, "Launching training on one process.");
    has(&out, "[[1.0, 1.0, 0.64");
    // In the notebook's own process, with its global variable.
    has(&out, "7 calls before");
}

#[test]
fn numbers_that_are_none_and_bytes_come_back_and_tests_have_ranks_too() {
    let (out, _) = run("not_a_number");
    has(&out, "[(NaN, [1, 2]), (NaN, [1, 2])]");
    let (out, _) = run("debug");
    has(&out, "[(2.5, [1, 2]), (2.5, [1, 2])]");
}

#[test]
fn dist_a_rank_that_fails_fails_the_cell_with_its_message() {
    let (out, err) = run("failing");
    has(&out, "error: rank 1 ");
    has(&out, "no such file");
    has(&err, "Error: no such file");
    let (out, err) = run("panicking");
    has(&out, "error: rank 1 ");
    has(&out, "the second rank gives up");
    has(&err, "panicked at");
}

#[test]
fn wrong_use_is_an_error_that_says_what_to_do() {
    let closure = run("closure").0;
    has(&closure, "{{closure}} is not a plain function");
    has(&closure, "write a `fn` and pass what it needs as arguments");
    has(&run("none").0, "error: num_processes is 0, expected at least 1");
    has(&run("node_rank").0, "error: node_rank is 2 of 2 hosts");
    has(&run("missing").0, "error: /no/brigade cannot be started: ");
    has(&run("old").0, "error: /bin/false could not launch the ranks (exit status: 1)");

    // A job of one process does not interfere.
    let inside = kernel("losses").envs([("RANK", "0"), ("WORLD_SIZE", "1")]).output().unwrap();
    has(&text(&inside).0, "[[2.0, 2.5");
    let variables =
        [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "::1"), ("MASTER_PORT", "1")];
    let inside = kernel("losses").envs(variables).output().unwrap();
    has(&text(&inside).0, "error: this process is rank 1 of 2 already");

    let empty = tempfile::tempdir().unwrap();
    let nowhere = kernel("failing")
        .env_remove("BRIGADE_PROGRAM")
        .env("PATH", empty.path())
        .env("CARGO_HOME", empty.path())
        .output()
        .unwrap();
    has(&text(&nowhere).0, "error: cannot find the program `brigade`");
    has(&text(&nowhere).0, "cargo install --path");
    let elsewhere = kernel("failing").env("BRIGADE_PROGRAM", "/no/brigade").output().unwrap();
    has(&text(&elsewhere).0, "at /no/brigade (BRIGADE_PROGRAM)");
}

fn sum_of_ranks(more: i64) -> brigade_torch::Result<(usize, i64)> {
    let accelerator = Accelerator::builder().quiet(true).build()?;
    let mine = Tensor::from(accelerator.processes().process_index() as i64 + more);
    let sum = accelerator.processes().reduce(&mine, ReduceOp::Sum)?.int64_value(&[]);
    Ok((accelerator.processes().process_index(), sum))
}

fn fails(message: String) -> brigade_torch::Result<()> {
    Err(brigade_torch::Error::invalid_argument(message))
}

#[test]
fn dist_a_plain_test_has_ranks_by_the_debug_launcher() {
    assert_eq!(debug_launcher(sum_of_ranks, 10, 2).unwrap(), [(0, 21), (1, 21)]);
}

#[test]
fn dist_a_failing_rank_of_a_plain_test_is_an_error_with_its_output() {
    let error = debug_launcher(fails, "no such layer".to_owned(), 2).unwrap_err().to_string();
    has(&error, "of 2 failed");
    has(&error, "no such layer");
}

/// A kernel interrupts a cell by killing its process; Jupyter's own kernels send SIGINT.
#[test]
fn dist_ranks_end_with_the_notebooks_process() {
    let folder = tempfile::tempdir().unwrap();
    let folders = || fs::read_dir(folder.path()).unwrap().count();
    for signal in [Signal::SIGKILL, Signal::SIGINT] {
        let mut child = kernel("hanging")
            .env("TMPDIR", folder.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut ranks = Vec::new();
        while ranks.len() < 2 {
            let line = lines.next().expect("both ranks say who they are").unwrap();
            if let Some((_, id)) = line.split_once("rank process ") {
                ranks.push(Pid::from_raw(id.trim().parse().unwrap()));
            }
        }
        kill(Pid::from_raw(child.id().cast_signed()), signal).unwrap();
        child.wait().unwrap();
        // Their output ends when all processes that could write it have ended.
        assert!(lines.all(|line| line.is_ok()));
        let limit = Instant::now() + Duration::from_secs(60);
        while ranks.iter().any(|rank| kill(*rank, None).is_ok()) {
            assert!(Instant::now() < limit, "{signal}: the ranks {ranks:?} live on");
            sleep(Duration::from_millis(20));
        }
        assert_eq!(folders(), 1, "that of the call that was killed");
    }
    let next = kernel("not_a_number").env("TMPDIR", folder.path()).output().unwrap();
    has(&text(&next).0, "NaN");
    assert_eq!(folders(), 0, "the next call cleans up");
}

#[test]
fn a_library_that_is_none_or_has_no_entry_is_refused() {
    let refused = |library: &Path, offset: &str| {
        let mut command = Command::new(&*BRIGADE);
        let output = command.arg("notebook-rank").arg(library).arg(offset).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    has(&refused("/no/lib.so".as_ref(), "0"), "cannot open the shared library /no/lib.so");
    let text = tempfile::NamedTempFile::new().unwrap();
    has(&refused(text.path(), "0"), "cannot load the shared library");
    let cell = library();
    let real = offset(&cell);
    for wrong in [0, 1, real + 8, real - 1, 1 << 40, u64::MAX, u64::MAX - 7] {
        has(&refused(&cell, &wrong.to_string()), &format!("has no entry at offset {wrong}"));
    }
}
