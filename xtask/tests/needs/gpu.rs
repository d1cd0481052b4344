//! Tests that the archive of `cargo xtask gpu --pack`, made of the suite's builds, runs its CPU part in an empty folder
//! with an empty environment.

use std::env;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use brigade_gpu::{Outcome, Report};
use brigade_libtorch_setup::Project;
use brigade_test_needs::needs;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Returns the libtorch with which the suite is built.
fn libtorch() -> PathBuf {
    let named = env::var_os("LIBTORCH").map(PathBuf::from);
    named.or_else(|| Project::at(root()).libtorch().unwrap()).unwrap()
}

/// Returns the interpreter itself: the one on the PATH may be a script that needs other programs.
fn python() -> PathBuf {
    let output = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output();
    PathBuf::from(String::from_utf8(output.unwrap().stdout).unwrap().trim())
}

/// Simulated machine with the archive in a folder, Python, and nothing else in its environment.
struct Machine {
    folder: tempfile::TempDir,
}

impl Machine {
    fn new() -> Self {
        let machine = Self { folder: tempfile::tempdir().unwrap() };
        fs::create_dir(machine.path("bin")).unwrap();
        symlink(python(), machine.path("bin/python3")).unwrap();
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn python(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(self.path("bin/python3"));
        command.args(arguments).current_dir(self.folder.path()).env_clear();
        command.env("PATH", self.path("bin")).env("LIBTORCH", libtorch());
        command.output().unwrap()
    }

    /// Returns the exit code and the report.
    fn run(&self, arguments: &[&str]) -> (Option<i32>, Report) {
        let output = self.python(&[&["brigade-gpu/run.py"], arguments].concat());
        let text = fs::read(self.path("report/report.json")).unwrap_or_else(|error| {
            let printed = [output.stdout.as_slice(), output.stderr.as_slice()].concat();
            panic!("no report: {error}: {}", String::from_utf8_lossy(&printed))
        });
        (output.status.code(), serde_json::from_slice(&text).unwrap())
    }

    /// Replaces a program by a script.
    fn replace(&self, program: &str, script: &str) {
        let builds = fs::read_dir(self.path("brigade-gpu/builds")).unwrap();
        let build = builds.map(|it| it.unwrap().path()).next().unwrap();
        let path = build.join(program);
        assert!(path.is_file(), "no {}", path.display());
        fs::remove_file(&path).unwrap();
        fs::write(&path, format!("#!/bin/sh\n{script}")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
}

fn outcomes(report: &Report, part: &str) -> Vec<(String, Outcome)> {
    let part = report.parts.iter().find(|it| it.name == part).unwrap();
    part.ran.iter().map(|it| (it.name.clone(), it.outcome)).collect()
}

// Builds what the archive contains, if that was not done before.
#[needs(Python, limit = 1150)]
fn the_archive_runs_on_a_machine_without_a_gpu() {
    let machine = Machine::new();
    let archive = machine.path("brigade-gpu.tar");
    let mut pack = Command::new(env!("CARGO_BIN_EXE_xtask"));
    pack.args(["gpu", "--cpu", "--pack"]).arg(&archive).current_dir(root());
    let output = pack.output().unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}");
    let unpacked = machine.python(&["-m", "tarfile", "-e", "brigade-gpu.tar"]);
    assert!(unpacked.status.success(), "{}", String::from_utf8_lossy(&unpacked.stderr));
    // Otherwise the disk would hold it twice.
    fs::remove_file(&archive).unwrap();

    // Far more than the tests need: what a busy machine has no time for is not run, and would fail here.
    let (code, report) = machine.run(&["--budget", "1500s"]);
    assert_eq!(code, Some(0), "{}", report.markdown());
    let names: Vec<&str> = report.parts.iter().map(|it| it.name.as_str()).collect();
    assert_eq!(names, ["facts", "tests", "nccl", "bench"]);
    for part in &report.parts {
        let counts = part.counts();
        assert_eq!((counts.failed, counts.not_run), (0, 0), "{}", report.markdown());
        assert!(counts.passed > 0, "{}", report.markdown());
    }
    let tests = outcomes(&report, "tests");
    assert!(tests.len() > 30, "{} tests", tests.len());
    assert_eq!((report.device.as_str(), report.gpus), ("cpu", 0));
    assert!(report.no_gpu.is_some());
    assert_eq!(report.libtorch, report.built_for);
    assert_eq!(report.bench.len(), 1);
    let self_tests =
        outcomes(&report, "nccl").iter().filter(|it| it.0.starts_with("self-test")).count();
    assert_eq!(self_tests, 2, "{}", report.markdown());

    // Failures are reported.
    machine.replace("tests/nn-numeric", "echo broken >&2; exit 3\n");
    let hangs = "case \"$*\" in *--list*) echo 'one: test' ;; *) exec sleep 600 ;; esac\n";
    // Programs that the scripts call.
    symlink("/bin/sleep", machine.path("bin/sleep")).unwrap();
    machine.replace("tests/optim-numeric", hangs);
    let words = ["--only", "tests", "--filter", "o", "--test-limit", "2s", "--budget", "60s"];
    let (code, report) = machine.run(&words);
    assert_eq!(code, Some(1), "{}", report.markdown());
    let tests = outcomes(&report, "tests");
    assert!(tests.contains(&("nn::numeric --list".to_owned(), Outcome::Failed)), "{tests:?}");
    assert!(tests.contains(&("optim::numeric one".to_owned(), Outcome::TimedOut)), "{tests:?}");
    assert!(report.markdown().contains("exit status: 3 after"), "{}", report.markdown());
    assert!(report.markdown().contains("broken"), "{}", report.markdown());
}
