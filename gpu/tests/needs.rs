//! The runner on programs that pass, fail, hang and leave processes behind.

#![allow(clippy::unwrap_used)] // a fixture that cannot be made fails its test

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use brigade_gpu::{Build, Outcome, Pack, Part, Program, Report, SCRIPT};
use brigade_test_needs::needs;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// A folder as the archive is unpacked to.
struct Fixture {
    folder: TempDir,
}

impl Fixture {
    /// With a test program that answers as libtest does, and a number of GPUs.
    fn new(gpus: usize) -> Self {
        let fixture = Self { folder: tempfile::tempdir().unwrap() };
        let root = fixture.root();
        let program = |name: &str, script: &str| {
            let path = root.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, format!("#!/bin/sh\n{script}")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        };
        program("builds/2.13.0/tests/torch-dist", &TEST.replace("98431", &fixture.mark()));
        program("builds/2.13.0/tests/torch-long", LONG);
        let reason = if gpus == 0 { r#""there is no NVIDIA driver""# } else { "null" };
        let facts = format!(r#"{{"built_for": "2.13.0", "gpus": {gpus}, "reason": {reason}}}"#);
        program("builds/2.13.0/brigade-selftest", &format!("echo '{facts}'\n"));
        program("builds/2.13.0/brigade", BRIGADE);
        program("builds/2.13.0/brigade-bench", BENCH);
        fs::create_dir_all(root.join("bin")).unwrap();
        symlink(env!("CARGO_BIN_EXE_brigade-gpu"), root.join("bin/brigade-gpu")).unwrap();
        fs::write(root.join("run.py"), SCRIPT).unwrap();
        let program = |target: &str, short| Program {
            package: "crates/torch".to_owned(),
            target: target.to_owned(),
            short,
        };
        let pack = Pack {
            commit: "abc".to_owned(),
            builds: vec![Build {
                libtorch: "2.13.0".to_owned(),
                folder: "builds/2.13.0".to_owned(),
                cuda: true,
            }],
            programs: vec![program("dist", true), program("long", false)],
        };
        fs::write(root.join("pack.json"), serde_json::to_string(&pack).unwrap()).unwrap();
        let torch = root.join("libtorch");
        fs::create_dir_all(torch.join("lib")).unwrap();
        fs::write(torch.join("version.py"), "__version__ = '2.13.0+cu130'\ncuda: str = '13.0'\n")
            .unwrap();
        fixture
    }

    fn root(&self) -> PathBuf {
        self.folder.path().to_path_buf()
    }

    /// Seconds that no other test's `sleep` has.
    fn mark(&self) -> String {
        let name = self.folder.path().file_name().unwrap().to_string_lossy().into_owned();
        let sum: u32 = name.bytes().map(u32::from).fold(7, |sum, it| (31 * sum + it) % 90_000);
        (10_000 + sum).to_string()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("python3");
        command.arg(self.root().join("run.py")).args(arguments).arg("--report").arg(self.report());
        command.env("LIBTORCH", self.root().join("libtorch"));
        command
    }

    fn report(&self) -> PathBuf {
        self.root().join("report")
    }

    fn run(&self, arguments: &[&str]) -> (Output, Report) {
        let output = self.command(arguments).output().unwrap();
        (output, read(&self.report()))
    }

    /// Processes that a test has left.
    fn left(&self) -> usize {
        let wanted = format!("sleep\0{}\0", self.mark());
        let processes = fs::read_dir("/proc").unwrap().flatten();
        processes
            .filter(|process| {
                fs::read(process.path().join("cmdline")).is_ok_and(|line| line == wanted.as_bytes())
            })
            .count()
    }
}

fn read(folder: &Path) -> Report {
    serde_json::from_slice(&fs::read(folder.join("report.json")).unwrap()).unwrap()
}

fn part<'a>(report: &'a Report, name: &str) -> &'a Part {
    report.parts.iter().find(|it| it.name == name).unwrap()
}

fn outcome(report: &Report, part_name: &str, name: &str) -> Outcome {
    let part = part(report, part_name);
    let found = part.ran.iter().find(|it| it.name == name);
    found.unwrap_or_else(|| panic!("no {name} among {:?}", part.ran)).outcome
}

/// As libtest answers.
const TEST: &str = r#"
case "$*" in
*--list*) printf 'good: test\nbad: test\nhangs: test\nskipped: test\ngone: test\na::nccl_one: test\n' ;;
good*|a::nccl*) echo "device $BRIGADE_TEST_DEVICE"; echo "test result: ok. 1 passed; 0 failed; 0 ignored;" ;;
skipped*) echo "test result: ok. 0 passed; 0 failed; 1 ignored;" ;;
bad*) sleep 98431 & echo "this is wrong"; exit 101 ;;
hangs*) sh -c 'sleep 98431 & sleep 98431' & sleep 98431 ;;
*) echo "test result: ok. 0 passed; 0 failed; 0 ignored;" ;;
esac
"#;

const LONG: &str = r#"
case "$*" in
*--list*) echo "more: test" ;;
*) test "$BRIGADE_TEST_DEVICE" = cuda || exit 1; echo "test result: ok. 1 passed; 0 failed;" ;;
esac
"#;

const BRIGADE: &str = r#"
case "$1" in
doctor) echo "a finding"; exit 1 ;;
launch) echo "ranks: $3, CPU: $ACCELERATE_USE_CPU" ;;
esac
"#;

const BENCH: &str = r#"
case "$*" in
--list) printf 'brigade-help\ngpu-products\n' ;;
*) echo "{\"comparison\": \"$2\", \"what\": \"a row\", \"ours\": \"1 ms\", \"reached\": true}" >> "$4" ;;
esac
"#;

#[needs(Python)]
fn a_run_tells_what_passed_failed_and_hung() {
    let fixture = Fixture::new(0);
    let (output, report) = fixture.run(&["--test-limit", "2s", "--jobs", "2"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(fixture.left(), 0, "processes were left behind");
    let test = |name: &str| outcome(&report, "tests", &format!("torch::dist {name}"));
    assert_eq!(test("good"), Outcome::Passed);
    assert_eq!(test("bad"), Outcome::Failed);
    assert_eq!(test("hangs"), Outcome::TimedOut);
    assert_eq!(test("skipped"), Outcome::Ignored);
    assert_eq!(test("gone"), Outcome::Failed, "no test of that name ran");
    assert_eq!(outcome(&report, "nccl", "torch::dist a::nccl_one"), Outcome::Passed);
    let names: Vec<&str> = report.parts.iter().map(|it| it.name.as_str()).collect();
    assert_eq!(names, ["facts", "tests", "nccl", "bench"]);
    assert_eq!(outcome(&report, "facts", "brigade doctor"), Outcome::Passed);
    assert_eq!((report.device.as_str(), report.gpus), ("cpu", 0));
    assert_eq!((report.cuda.as_deref(), report.commit.as_str()), (Some("13.0"), "abc"));
    assert_eq!(report.bench.len(), 1);
    assert_eq!(report.bench[0]["comparison"], "brigade-help");
    let markdown = fs::read_to_string(fixture.report().join("report.md")).unwrap();
    assert!(markdown.contains("no GPU: there is no NVIDIA driver"), "{markdown}");
    assert!(markdown.contains("1 of 2 test programs, because there is no GPU"), "{markdown}");
    assert!(markdown.contains("### failed: torch::dist bad\n"), "{markdown}");
    assert!(markdown.contains("this is wrong"), "{markdown}");
    assert!(markdown.contains("### timed out: torch::dist hangs\n"), "{markdown}");
    assert!(markdown.contains("| a row | 1 ms | - | - | - | yes |"), "{markdown}");
}

#[needs(Python)]
fn a_part_that_exceeds_its_share_is_ended() {
    let fixture = Fixture::new(0);
    let started = Instant::now();
    let words = ["--budget", "9s", "--jobs", "1", "--only", "tests", "--only", "bench"];
    let (output, report) = fixture.run(&words);
    assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert_eq!(fixture.left(), 0, "processes were left behind");
    assert_eq!(outcome(&report, "tests", "torch::dist hangs"), Outcome::Stopped);
    assert_eq!(outcome(&report, "tests", "torch::dist gone"), Outcome::NotRun);
    assert_eq!(outcome(&report, "bench", "brigade-help"), Outcome::Passed, "its share is its own");
    let markdown = fs::read_to_string(fixture.report().join("report.md")).unwrap();
    assert!(markdown.contains("time was over: torch::dist hangs"), "{markdown}");
    let not_run = "No time was left for 2:\n\n- torch::dist skipped\n- torch::dist gone\n";
    assert!(markdown.contains(not_run), "{markdown}");
}

#[needs(Python)]
fn a_signal_ends_everything() {
    let fixture = Fixture::new(0);
    let mut command = fixture.command(&["--only", "tests", "--jobs", "1"]);
    let mut runner = command.stdout(Stdio::null()).spawn().unwrap();
    // Three processes of the test that hangs.
    while fixture.left() < 3 {
        thread::sleep(Duration::from_millis(20));
    }
    kill(Pid::from_raw(runner.id().cast_signed()), Signal::SIGINT).unwrap();
    assert_eq!(runner.wait().unwrap().code(), Some(130));
    assert_eq!(fixture.left(), 0, "processes were left behind");
    let report = read(&fixture.report());
    assert_eq!(report.interrupted_by.as_deref(), Some("SIGINT"));
    assert_eq!(outcome(&report, "tests", "torch::dist hangs"), Outcome::Stopped);
}

#[needs(Python)]
fn one_part_alone() {
    let fixture = Fixture::new(0);
    let (output, report) = fixture.run(&["--only", "nccl"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(report.parts.len(), 1);
    let names: Vec<&str> = report.parts[0].ran.iter().map(|it| it.name.as_str()).collect();
    assert_eq!(
        names,
        ["torch::dist a::nccl_one", "self-test, 1 rank", "self-test, 2 ranks over Gloo on the CPU"]
    );
    let notes = report.parts[0].notes.join("\n");
    assert!(notes.contains("it needs several GPUs, and there are 0"), "{notes}");
    let wrong = fixture.command(&["--only", "nothing"]).output().unwrap();
    assert_eq!(wrong.status.code(), Some(2));
}

#[needs(Python)]
fn with_gpus_the_tests_get_the_device() {
    let fixture = Fixture::new(4);
    let words = ["--test-limit", "2s", "--only", "tests", "--only", "nccl", "--only", "bench"];
    let (_, report) = fixture.run(&words);
    assert_eq!((report.device.as_str(), report.gpus), ("cuda", 4));
    assert_eq!(outcome(&report, "tests", "torch::long more"), Outcome::Passed);
    assert_eq!(outcome(&report, "nccl", "self-test, 4 ranks over NCCL"), Outcome::Passed);
    assert_eq!(report.bench.len(), 1);
    assert_eq!(report.bench[0]["comparison"], "gpu-products");
    let (_, report) = fixture.run(&["--device", "cpu", "--only", "tests", "--filter", "good"]);
    assert_eq!(report.device, "cpu");
    assert_eq!(part(&report, "tests").ran.len(), 1);
}

/// The runner's LD_LIBRARY_PATH leads to the libtorch of our programs, which may be another than Python's.
#[needs(Python)]
fn python_finds_its_own_libraries() {
    let fixture = Fixture::new(1);
    let python = fixture.root().join("python");
    fs::write(&python, "#!/bin/sh\necho \"path [$LD_LIBRARY_PATH] for ${1##*/}\"\n").unwrap();
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
    let before = fixture.root().join("before");
    let mut command = fixture.command(&["--only", "facts", "--python", python.to_str().unwrap()]);
    let output = command.env("LD_LIBRARY_PATH", &before).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let notes = part(&read(&fixture.report()), "facts").notes.join("\n");
    assert!(notes.contains(&format!("path [{}] for facts.py", before.display())), "{notes}");
}

#[needs(Python)]
fn a_libtorch_with_which_nothing_starts() {
    let fixture = Fixture::new(0);
    let selftest = fixture.root().join("builds/2.13.0/brigade-selftest");
    fs::write(selftest, "#!/bin/sh\necho undefined symbol >&2; exit 127\n").unwrap();
    let output = fixture.command(&[]).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(error.contains("no build of this archive starts with libtorch 2.13.0"), "{error}");
    assert!(error.contains("built for 2.13.0: exit status: 127: undefined symbol"), "{error}");
}

#[needs(Python)]
fn a_folder_that_is_not_a_libtorch() {
    let fixture = Fixture::new(0);
    fs::remove_file(fixture.root().join("libtorch/version.py")).unwrap();
    let output = fixture.command(&[]).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(error.contains("it has neither version.py nor build-version"), "{error}");
}

brigade_test_needs::main!();
