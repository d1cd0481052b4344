//! `cargo xtask test`: the whole suite on whatever runner there is.
//!
//! cargo-nextest runs each test in its own process, limits its time and keeps multi-process tests
//! from crowding each other (.config/nextest.toml); a fresh machine has only `cargo test`.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::{self, Permissions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use brigade_suite::{Missed, Need, REPORT, descendants, required};
use serde::Deserialize;
use tempfile::TempDir;

use crate::cargo::{self, Cargo};
use crate::checkout::Checkout;
use crate::install;

/// Builds every program and test, then runs them; the runner's closing line comes last, and after it
/// what could not run.
pub(crate) fn run(
    checkout: &Checkout,
    runner_arguments: &[String],
    variables: &[(&str, &str)],
    may_install: bool,
) -> Result<ExitCode> {
    // A wrong name is said now, not by each test program.
    required().context("BRIGADE_REQUIRE")?;
    let whole = runner_arguments.is_empty();
    if whole && may_install {
        install::offer();
    }
    let cargo = Cargo::new(checkout)?;
    // Tests start `brigade` and the examples from the target folder.
    let built = cargo.run(&["build", "--workspace", "--bins", "--examples"])?;
    if !built.success() {
        return Ok(cargo::exit_code(built));
    }

    let mut arguments: Vec<&str> = runner_arguments.iter().map(String::as_str).collect();
    if !names_packages(runner_arguments) {
        arguments.insert(0, "--workspace");
    }
    let folder = tempfile::tempdir().context("cannot make a temporary folder")?;
    let report = folder.path().join("report");
    let temporary = Temporary::new()?;
    if has_nextest() {
        // Doc tests, which nextest does not run, go first: its summary is the last word then.
        let documents = whole.then(|| {
            let mut command = cargo.command(&["test", "--workspace", "--doc", "--no-fail-fast"]);
            run_cargo_test(command.env(TMPDIR, temporary.path()))
        });
        let mut command = cargo.command(&["nextest", "run", "--no-fail-fast"]);
        command.envs(variables.iter().copied()).env(TMPDIR, temporary.path());
        let tests = cargo::run(command.args(&arguments).env(REPORT, &report))?;
        let mut missed = Missed::read(&report)?;
        if !whole && !missed.is_empty() {
            let words = ["nextest", "list", "--message-format", "json", "--run-ignored", "only"];
            let mut list = cargo.command(&words);
            // nextest has asked for all tests of the programs, whatever the filter.
            if let Some(wanted) = wanted(list.args(&arguments)) {
                missed.retain(|it| wanted.contains(&(it.program.clone(), it.test.clone())));
            }
        }
        tell(&missed);
        if let Some(documents) = documents.transpose()?
            && !documents.success()
        {
            eprintln!("error: doc tests failed");
            return Ok(cargo::exit_code(documents));
        }
        return temporary.check(tests);
    }
    let mut command = cargo.command(&["test", "--no-fail-fast"]);
    command.envs(variables.iter().copied()).env(TMPDIR, temporary.path());
    let status = run_cargo_test(command.args(&arguments).env(REPORT, &report))?;
    tell(&Missed::read(&report)?);
    temporary.check(status)
}

/// The folder for temporary files of a run of the suite, so that what a test leaves in it is seen.
struct Temporary(TempDir);

impl Temporary {
    fn new() -> Result<Self> {
        // Other users' processes, such as those of sshd, may have to come through it.
        let permissions = Permissions::from_mode(0o1777);
        let mut folder = tempfile::Builder::new();
        let folder = folder.prefix("suite-").permissions(permissions.clone()).tempdir();
        let folder = folder.context("cannot make a temporary folder")?;
        // The user's mask has taken its part.
        fs::set_permissions(folder.path(), permissions)
            .context("cannot open the temporary folder to all")?;
        Ok(Self(folder))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// The exit code: that of the tests, else failure where they have left folders of Brigade's behind.
    fn check(&self, tests: ExitStatus) -> Result<ExitCode> {
        let left = leftovers(self.path())?;
        for name in &left {
            eprintln!("error: tests left {name} in the folder for temporary files");
        }
        let is_clean = left.is_empty() || !tests.success();
        Ok(if is_clean { cargo::exit_code(tests) } else { ExitCode::FAILURE })
    }
}

/// Folders and files of Brigade's: each with what lies in it, which says where it is from.
fn leftovers(folder: &Path) -> Result<Vec<String>> {
    let mut left = Vec::new();
    let entries = fs::read_dir(folder).context("cannot read the folder for temporary files")?;
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with("brigade-") {
            continue;
        }
        let inside = fs::read_dir(entry.path()).into_iter().flatten().flatten();
        let mut inside: Vec<String> =
            inside.map(|it| it.file_name().to_string_lossy().into_owned()).collect();
        inside.sort();
        inside.truncate(5);
        left.push(match inside.as_slice() {
            [] => name,
            inside => format!("{name} (with {})", inside.join(", ")),
        });
    }
    left.sort();
    Ok(left)
}

/// The variable that names the folder for temporary files.
const TMPDIR: &str = "TMPDIR";

/// Processors by their instructions, with the variables by which libtorch, oneDNN and MKL take the kernels for them.
///
/// `MKL_ENABLE_INSTRUCTIONS` has an effect on Intel's processors alone. One without AVX is not among them: libtorch draws
/// other random numbers there.
pub(crate) const PROCESSORS: [(&str, &[(&str, &str)]); 2] = [
    (
        "avx2",
        &[
            ("ATEN_CPU_CAPABILITY", "avx2"),
            ("ONEDNN_MAX_CPU_ISA", "AVX2"),
            ("MKL_ENABLE_INSTRUCTIONS", "AVX2"),
        ],
    ),
    ("avx512", &[("ONEDNN_MAX_CPU_ISA", "AVX512_CORE"), ("MKL_ENABLE_INSTRUCTIONS", "AVX512")]),
];

/// Runs the test programs whose results are numbers with the kernels for one of [`PROCESSORS`].
pub(crate) fn run_as_on(checkout: &Checkout, processor: &str) -> Result<ExitCode> {
    let programs = NUMERIC.iter().flat_map(|program| ["--test".to_owned(), (*program).to_owned()]);
    let variables = PROCESSORS.iter().find(|it| it.0 == processor).map_or(&[][..], |it| it.1);
    run(checkout, &programs.collect::<Vec<_>>(), variables, false)
}

/// Runs the test programs that take their tensors' device from `brigade-gpukit`, on that device.
pub(crate) fn run_on(checkout: &Checkout, device: &str) -> Result<ExitCode> {
    let programs = ON_ANY_DEVICE.iter().flat_map(|it| ["--test".to_owned(), (*it).to_owned()]);
    let mut arguments: Vec<String> = programs.collect();
    // `cargo test` cannot choose by module: it runs those tests, too, and they are the CPU's there.
    if has_nextest() {
        arguments.extend(["-E".to_owned(), not_on_a_device()]);
    }
    run(checkout, &arguments, &[("BRIGADE_TEST_DEVICE", device)], false)
}

/// nextest's filter without the tests of these programs that are about the CPU whatever the variable says, and without
/// networks that consist of the same layers as smaller ones.
fn not_on_a_device() -> String {
    let tests = |program: &str, names: &str| format!("(binary({program}) & test(/{names}/))");
    let dist = "^(cross_entropy|fused|linear|max_pool|norm_relu)::";
    let only = format!("(not binary(dist) | {})", tests("dist", dist));
    let left_out = [
        tests("numerics", "^(batch_size|edges|losses|memory_format)::"),
        tests("golden", "(34|50)"),
        tests("resnet", "torchvisions"),
        "(binary(checkpoint) & package(brigade-cli))".to_owned(),
    ];
    format!("{only} & not ({})", left_out.join(" | "))
}

/// The test programs that ask `brigade_gpukit::device` for their tensors' device, of `models`, `nn`, `optim`, `torch`
/// and `train`.
///
/// `reproducible` is not one of them: it moves the allocations of the CPU, whose kernels take other paths by the address.
/// A GPU's allocations begin at multiples of 512 bytes.
const ON_ANY_DEVICE: [&str; 23] = [
    "accumulate",
    "awd_lstm",
    "checkpoint",
    "cnn",
    "comm_hooks",
    "dist",
    "dropped",
    "golden",
    "layer_groups",
    "layers",
    "lstm",
    "metrics",
    "model",
    "numerics",
    "optimizers",
    "own_models",
    "resnet",
    "seed",
    "sync_batch_norm",
    "transfer",
    "transformers",
    "uneven",
    "weights",
];

/// The test programs that compare numbers, of `learn`, `models`, `nn`, `text`, `torch`, `train` and the examples.
const NUMERIC: [&str; 24] = [
    "accumulate",
    "awd_lstm",
    "checkpoint",
    "cnn",
    "comm_hooks",
    "dist",
    "dropped",
    "example",
    "from_accelerate",
    "golden",
    "layers",
    "learner",
    "learners",
    "losses",
    "lstm",
    "metrics",
    "numerics",
    "optimizers",
    "reproducible",
    "resnet",
    "rounding",
    "seed",
    "sync_batch_norm",
    "uneven",
];

/// Says in one line for each need how many tests did not run for want of it, and what helps.
fn tell(missed: &BTreeSet<Missed>) {
    let mut counts: BTreeMap<Need, usize> = BTreeMap::new();
    for test in missed {
        *counts.entry(test.need).or_default() += 1;
    }
    for (need, count) in counts {
        // Gone by now, if a user has installed it while the tests ran.
        let lack = need.lacking().map_or_else(String::new, |lack| format!(": {lack}"));
        let tests = if count == 1 { "test that needs" } else { "tests that need" };
        eprintln!("not run: {count} {tests} {}{lack}", need.what());
    }
}

/// The ignored tests that a filter of nextest's wants, with their programs; `None` where the arguments
/// are not for a list.
fn wanted(list: &mut Command) -> Option<HashSet<(String, String)>> {
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct List {
        rust_suites: HashMap<String, Suite>,
    }
    #[derive(Deserialize)]
    struct Suite {
        testcases: HashMap<String, Case>,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct Case {
        filter_match: Match,
    }
    #[derive(Deserialize)]
    struct Match {
        status: String,
    }

    let output = list.stderr(Stdio::null()).output().ok().filter(|it| it.status.success())?;
    let list: List = serde_json::from_slice(&output.stdout).ok()?;
    let tests = list.rust_suites.into_iter().flat_map(|(program, suite)| {
        let ignored =
            suite.testcases.into_iter().filter(|it| it.1.filter_match.status == "matches");
        ignored.map(move |(test, _)| (program.clone(), test))
    });
    Some(tests.collect())
}

/// With options such as `-p`, cargo must not be told `--workspace`, which overrules them.
fn names_packages(arguments: &[String]) -> bool {
    arguments.iter().take_while(|it| *it != "--").any(|it| {
        let long = ["--package", "--manifest-path", "--workspace", "--all"];
        (it.starts_with("-p") && !it.starts_with("--")) || long.iter().any(|o| it.starts_with(o))
    })
}

pub(crate) fn has_nextest() -> bool {
    let version = Command::new("cargo-nextest").args(["nextest", "--version"]).output();
    version.is_ok_and(|output| output.status.success())
}

/// Runs `cargo test`, whose many closing lines it adds up to one. A test program in which a test
/// hangs is killed: libtest has no time limit.
fn run_cargo_test(command: &mut Command) -> Result<ExitStatus> {
    eprintln!("$ {}", cargo::line(command));
    // Cargo's own progress is on standard error and stays on the terminal.
    let mut child = command.stdout(Stdio::piped()).spawn().context("cannot start cargo")?;
    let (sender, lines) = channel();
    if let Some(output) = child.stdout.take() {
        thread::spawn(move || {
            for line in BufReader::new(output).split(b'\n') {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
    }
    let (mut totals, mut slow) = (Totals::default(), Slow::default());
    let mut out = io::stdout().lock();
    loop {
        match lines.recv_timeout(Duration::from_secs(1)) {
            Ok(line) => {
                let mut line = line.context("cannot read what cargo prints")?;
                let text = String::from_utf8_lossy(&line);
                totals.add(&text);
                slow.hear(&text, Instant::now());
                line.push(b'\n');
                out.write_all(&line).context("cannot print")?;
            }
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {}
        }
        if let Some(test) = slow.hung(Instant::now()) {
            eprintln!("{test} hangs; its program is killed:");
            // Cargo itself goes on with the next program.
            let processes = descendants(child.id());
            for (pid, description) in &processes {
                eprintln!("  {pid}  {description}");
            }
            let mut kill = Command::new("kill");
            let _ = kill.arg("-KILL").args(processes.keys().map(u32::to_string)).output();
            slow = Slow::default();
        }
    }
    let status = child.wait().context("cannot wait for cargo")?;
    writeln!(out, "{}", totals.closing_line(status.success())).context("cannot print")?;
    Ok(status)
}

/// What libtest says of the program that runs, to find a test that hangs.
#[derive(Debug, Default)]
struct Slow {
    /// Tests of which it says that they take long. It does so with several threads only.
    tests: HashMap<String, Instant>,
    /// When the last line came; `None` between programs, where cargo may build.
    heard: Option<Instant>,
}

impl Slow {
    fn hear(&mut self, line: &str, now: Instant) {
        if self.heard.is_some() || is_start(line) {
            self.heard = Some(now);
        }
        let Some(rest) = line.strip_prefix("test ") else { return };
        if let Some((test, _)) = rest.split_once(" has been running for over ") {
            self.tests.insert(test.to_owned(), now);
        } else if let Some((test, _)) = rest.split_once(" ... ") {
            self.tests.remove(test);
        } else if rest.starts_with("result: ") {
            *self = Self::default();
        }
    }

    /// A test that has been running for as long as cargo-nextest lets it.
    fn hung(&self, now: Instant) -> Option<&str> {
        let hung = self.tests.iter().find(|it| now.duration_since(*it.1) >= LIMIT - A_MINUTE);
        let is_silent = || self.heard.is_some_and(|heard| now.duration_since(heard) >= LIMIT);
        hung.map(|it| it.0.as_str()).or_else(|| is_silent().then_some("a test without a name"))
    }
}

/// `running 3 tests`, the first line of a test program.
fn is_start(line: &str) -> bool {
    let count = line.strip_prefix("running ").and_then(|rest| rest.split_once(" test"));
    count.is_some_and(|(count, _)| count.parse::<u64>().is_ok())
}

/// That of `.config/nextest.toml`.
const LIMIT: Duration = Duration::from_secs(240);
/// After this time libtest names a test.
const A_MINUTE: Duration = Duration::from_secs(60);

/// The sum of libtest's `test result:` lines.
#[derive(Debug, Default, PartialEq, Eq)]
struct Totals {
    runs: u64,
    passed: u64,
    failed: u64,
    ignored: u64,
}

impl Totals {
    /// "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; …"
    fn add(&mut self, line: &str) {
        let Some(rest) = line.strip_prefix("test result: ") else { return };
        self.runs += 1;
        for part in rest.split(['.', ';']) {
            let mut words = part.split_whitespace();
            let (Some(count), Some(what)) = (words.next(), words.next()) else { continue };
            let Ok(count) = count.parse::<u64>() else { continue };
            match what {
                "passed" => self.passed += count,
                "failed" => self.failed += count,
                "ignored" => self.ignored += count,
                _ => {}
            }
        }
    }

    fn closing_line(&self, success: bool) -> String {
        let Self { runs, passed, failed, ignored } = self;
        let result = if success { "ok" } else { "FAILED" };
        format!(
            "total result: {result}. {passed} passed; {failed} failed; {ignored} ignored; \
             in {runs} test programs"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_tests_leave_is_named() {
        let temporary = Temporary::new().unwrap();
        assert_eq!(leftovers(temporary.path()).unwrap(), Vec::<String>::new());
        let folder = temporary.path().join("brigade-1-2");
        fs::create_dir_all(folder.join("attempt_0")).unwrap();
        fs::create_dir(temporary.path().join(".tmpAbc")).unwrap();
        fs::write(temporary.path().join("brigade-x"), "").unwrap();
        let expected = ["brigade-1-2 (with attempt_0)", "brigade-x"];
        assert_eq!(leftovers(temporary.path()).unwrap(), expected);
        let code = |words: &[&str]| Command::new("sh").args(words).status().unwrap();
        let failure = format!("{:?}", ExitCode::FAILURE);
        let checked = |status| format!("{:?}", temporary.check(status).unwrap());
        assert_eq!(checked(code(&["-c", "exit 0"])), failure);
        assert_ne!(checked(code(&["-c", "exit 100"])), failure);
    }

    #[test]
    fn closing_lines_add_up() {
        let mut totals = Totals::default();
        for line in [
            "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.52s",
            "test tests::x ... ok",
            "test result: FAILED. 40 passed; 2 failed; 0 ignored; 0 measured; 7 filtered out; finished in 1s",
        ] {
            totals.add(line);
        }
        assert_eq!(totals, Totals { runs: 2, passed: 43, failed: 2, ignored: 1 });
        assert_eq!(
            totals.closing_line(false),
            "total result: FAILED. 43 passed; 2 failed; 1 ignored; in 2 test programs"
        );
    }

    #[test]
    fn a_test_of_four_minutes_counts_as_hanging() {
        let (mut slow, start) = (Slow::default(), Instant::now());
        let long = start + (LIMIT - A_MINUTE);
        slow.hear("test a::b has been running for over 60 seconds", start);
        assert_eq!(slow.hung(start), None);
        assert_eq!(slow.hung(long), Some("a::b"));
        slow.hear("test a::b ... ok", long);
        assert_eq!(slow.hung(long), None);
        slow.hear("test src/lib.rs - x (line 3) has been running for over 60 seconds", start);
        assert_eq!(slow.hung(long), Some("src/lib.rs - x (line 3)"));
        slow.hear("test result: ok. 3 passed; 0 failed", long);
        assert_eq!(slow.hung(long), None);
    }

    /// With one thread libtest names no test that takes long.
    #[test]
    fn a_program_that_is_silent_for_four_minutes_hangs() {
        let (mut slow, start) = (Slow::default(), Instant::now());
        let half = start + LIMIT / 2;
        assert_eq!(slow.hung(start + LIMIT), None, "cargo builds");
        slow.hear("running 2 tests", start);
        slow.hear("test a ... ok", half);
        assert_eq!(slow.hung(start + LIMIT), None);
        assert!(slow.hung(half + LIMIT).is_some());
        slow.hear("test result: ok. 2 passed; 0 failed", half + LIMIT);
        assert_eq!(slow.hung(half + 2 * LIMIT), None);
    }

    #[test]
    fn package_options_are_seen() {
        let names =
            |text: &str| names_packages(&text.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert!(names("-p brigade-plan"));
        assert!(names("some_test --package=xtask"));
        assert!(!names("some_test"));
        assert!(!names("--profile ci"));
        assert!(!names("some_test -- -p"));
    }
}
