//! `cargo xtask test`: the whole suite, or a part of it.
//!
//! cargo-nextest runs each test in its own process, limits its time and the number of concurrent tests that compute
//! (.config/nextest.toml); `cargo test` runs the doc tests.

mod changed;
mod documents;
mod forks;
mod missed;
mod preload;
mod temporary;
pub(crate) mod timings;

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use brigade_test_needs::{Missed, Need, PACKAGES, REPORT, required};
use tempfile::TempDir;

use crate::cargo::{self, Cargo};
use crate::checkout::Checkout;
use crate::install;
use crate::nextest::Nextest;
use crate::package;
use crate::workspace::{Package, Workspace};

use documents::Documents;
use preload::Preload;
use temporary::{TMPDIR, Temporary};

/// Selection of the tests to run.
#[derive(Debug)]
pub(crate) enum Selection {
    /// All tests, including doc tests.
    All,
    /// The tests that arguments for cargo-nextest select.
    Chosen(Vec<String>),
    /// The tests of packages that differ from a commit, then those of packages that depend on them.
    Changed(Option<String>),
    /// The numeric tests, with the kernels for one of [`PROCESSORS`].
    OnProcessor(String),
    /// Those that install the packages, after the packages are built.
    Slow,
    /// The tests that take their tensors' device from `brigade-test-device`, on that device.
    OnDevice(String),
}

/// Builds the programs and tests that are needed, then runs the tests. cargo-nextest's summary is followed by the
/// durations and the tests that could not run.
pub(crate) fn run(
    checkout: &Checkout,
    selection: &Selection,
    may_install: bool,
    writes_timings: bool,
) -> Result<ExitCode> {
    // A wrong name is reported now, not by each test program.
    required().context("BRIGADE_REQUIRE")?;
    if may_install && matches!(selection, Selection::All) {
        install::offer();
    }
    if matches!(selection, Selection::Slow) {
        package::run(checkout, &package::Options::for_tests())?;
    }
    let mut run = Run::new(checkout)?;
    let code = run.tests(selection)?;
    run.tell(selection, writes_timings)?;
    let failed = code != ExitCode::SUCCESS || !run.temporary.is_clean()?;
    Ok(if failed && code == ExitCode::SUCCESS { ExitCode::FAILURE } else { code })
}

struct Run<'a> {
    checkout: &'a Checkout,
    cargo: Cargo<'a>,
    workspace: Workspace,
    nextest: Nextest,
    temporary: Temporary,
    /// Folder for reports of the tests.
    reports: TempDir,
    /// Program that starts and measures each test.
    measuring: PathBuf,
    preload: Preload,
    /// Stages with their durations.
    stages: Vec<(&'static str, Duration)>,
    /// Arguments that selected the tests of the last run.
    chosen: Vec<String>,
}

impl<'a> Run<'a> {
    fn new(checkout: &'a Checkout) -> Result<Self> {
        let reports = tempfile::tempdir().context("cannot make a temporary folder")?;
        Ok(Self {
            checkout,
            measuring: timings::copy_of_this_program(reports.path())?,
            cargo: Cargo::new(checkout)?,
            workspace: Workspace::of(checkout)?,
            nextest: Nextest::find_or_install(checkout)?,
            temporary: Temporary::new()?,
            preload: Preload::compile(reports.path()),
            reports,
            stages: Vec::new(),
            chosen: Vec::new(),
        })
    }

    fn tests(&mut self, selection: &Selection) -> Result<ExitCode> {
        let mut variables: Vec<(&str, &str)> = Vec::new();
        let (targets, filter) = match selection {
            Selection::Changed(commit) => return self.changed(commit.as_deref()),
            Selection::All => (BTreeSet::new(), None),
            Selection::Chosen(arguments) => {
                let packages = packages(arguments);
                let built = match packages.as_slice() {
                    [] => self.build_programs(&[])?,
                    some => self.build_started(some)?,
                };
                if !built.success() {
                    return Ok(cargo::exit_code(built));
                }
                let mut arguments = arguments.clone();
                if packages.is_empty() && !names_a_manifest(&arguments) {
                    arguments.insert(0, "--workspace".to_owned());
                }
                return Ok(cargo::exit_code(self.run_tests(arguments, &[])?));
            }
            Selection::Slow => {
                let folder = package::folder(&self.workspace);
                let folder = folder.to_str().context("the target folder's path is not UTF-8")?;
                let variables = [(PACKAGES, folder), ("BRIGADE_REQUIRE", "packages,python")];
                let arguments = ["-p", "brigade-cli", "-E", "test(/^packages::/)"];
                let arguments = arguments.map(str::to_owned).to_vec();
                return Ok(cargo::exit_code(self.run_tests(arguments, &variables)?));
            }
            Selection::OnProcessor(processor) => {
                let processor = PROCESSORS.iter().find(|it| it.name == processor);
                let processor = processor.with_context(|| format!("no processor {processor:?}"))?;
                variables.extend(processor.variables);
                let filter = format!("({NUMERIC}) & {}", processor.filter);
                (self.workspace.with_numeric_tests(self.checkout), Some(filter))
            }
            Selection::OnDevice(device) if device == "tpu" => {
                let lack = Need::Tpu.lacking();
                let arguments = on_tpu(&self.workspace, lack.is_none());
                let tests = self.run_tests(arguments, &[("BRIGADE_TEST_DEVICE", device)])?;
                match lack {
                    Some(lack) => eprintln!("numeric tests were not run: {lack}"),
                    None => eprint!("{}", left_out_on_tpu(&self.workspace)),
                }
                return Ok(cargo::exit_code(tests));
            }
            Selection::OnDevice(device) => {
                variables.push(("BRIGADE_TEST_DEVICE", device));
                (["numeric".to_owned()].into(), Some(on_any_device(&self.workspace)))
            }
        };
        // nextest lists the tests of each built program, which takes 0.2 s with libtorch.
        let mut targets: Vec<&str> = targets.iter().flat_map(|it| ["--test", it]).collect();
        let tests = if targets.is_empty() { &["--tests"] } else { targets.as_slice() };
        let built = self.build_all(tests)?;
        if !built.success() {
            return Ok(cargo::exit_code(built));
        }
        targets.insert(0, "--workspace");
        let documents = if matches!(selection, Selection::All) {
            Some(Documents::start(self.documents_beside_tests())?)
        } else {
            None
        };
        let filter = filter.map(|it| ["-E".to_owned(), it]);
        let targets = targets.into_iter().map(str::to_owned);
        let arguments = targets.chain(filter.into_iter().flatten()).collect();
        let tests = self.run_tests(arguments, &variables)?;
        if let Some(documents) = documents {
            let (status, time) = documents.finish()?;
            self.stages.push(("doc tests beside them", time));
            if !status.success() {
                eprintln!("error: doc tests failed");
                return Ok(cargo::exit_code(status));
            }
        }
        Ok(cargo::exit_code(tests))
    }

    /// Returns the command that runs all doc tests with lower priority: they compute while other tests wait.
    fn documents_beside_tests(&self) -> Command {
        let cargo = self.cargo.command(&["test", "--doc", "--no-fail-fast", "--workspace"]);
        let mut command = self.cargo.like(Path::new("nice"));
        command.args(["-n", "10"]).arg(cargo.get_program()).args(cargo.get_args());
        self.preload.of_documents(&mut command);
        self.for_tests(&mut command);
        command
    }

    /// Stops at the first distance at which a test fails: nearer packages are fixed first.
    fn changed(&mut self, commit: Option<&str>) -> Result<ExitCode> {
        let commit = commit.map_or_else(|| changed::default_commit(self.checkout), str::to_owned);
        let files = changed::files(self.checkout, &commit)?;
        let (levels, unknown) = changed::levels(&self.workspace, &files);
        eprintln!("{} changed since {commit}", count(files.len(), "file"));
        for file in &unknown {
            eprintln!("{}: no package's tests read it", file.display());
        }
        for (packages, reason) in levels.iter().flatten() {
            eprintln!("{packages}: {reason}");
        }
        for (distance, level) in levels.iter().enumerate() {
            let names: Vec<&str> = level.keys().map(String::as_str).collect();
            let mut status = self.build_started(&names)?;
            // Cargo refuses doc tests of a package without a library.
            let libraries: Vec<&str> = names
                .iter()
                .filter(|name| {
                    self.workspace.package(name).is_some_and(|package| package.has_library)
                })
                .flat_map(|package| ["-p", *package])
                .collect();
            if status.success() && distance == 0 && !libraries.is_empty() {
                status = self.documents(&libraries)?;
            }
            if status.success() {
                // A package may have no library.
                let packages: Vec<&str> = names.iter().flat_map(|it| ["-p", *it]).collect();
                status = self.build_tests(&packages)?;
                if status.success() {
                    let packages = packages.into_iter().map(str::to_owned).collect();
                    status = self.run_tests(packages, &[("NEXTEST_NO_TESTS", "pass")])?;
                }
            }
            if !status.success() {
                let left: usize = levels[distance + 1..].iter().map(|it| it.len()).sum();
                if left > 0 {
                    eprintln!(
                        "not run: the tests of {} that depend on these",
                        count(left, "package")
                    );
                }
                return Ok(cargo::exit_code(status));
            }
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Builds programs of the workspace, by default all of them and all examples: tests start them from the target
    /// folder. With the workspace's features, so that nothing is compiled twice.
    fn build_programs(&mut self, names: &[&str]) -> Result<ExitStatus> {
        let mut arguments = vec!["build", "--workspace"];
        match names {
            [] => arguments.extend(["--bins", "--examples"]),
            names => arguments.extend(names.iter().flat_map(|it| ["--bin", *it])),
        }
        self.stage("programs", |run| run.cargo.run(&arguments))
    }

    /// Builds all programs and examples, and the tests of `targets`, arguments for cargo. As one build, in which no
    /// processor waits for the last programs before the tests begin.
    fn build_all(&mut self, targets: &[&str]) -> Result<ExitStatus> {
        let build = [&["build", "--workspace", "--bins", "--examples"], targets].concat();
        self.stage("building", |run| run.cargo.run(&build))
    }

    fn build_started(&mut self, packages: &[&str]) -> Result<ExitStatus> {
        let programs = self.workspace.started_by(packages);
        if programs.is_empty() {
            return Ok(ExitStatus::default());
        }
        self.build_programs(&programs.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn documents(&mut self, packages: &[&str]) -> Result<ExitStatus> {
        self.stage("doc tests", |run| {
            let mut command = run.cargo.command(&["test", "--doc", "--no-fail-fast"]);
            run.preload.of_documents(&mut command);
            documents::run(run.for_tests(command.args(packages)))
        })
    }

    /// Builds the tests of `targets`, arguments for cargo.
    fn build_tests(&mut self, targets: &[&str]) -> Result<ExitStatus> {
        let build = [&["test", "--quiet", "--no-run"], targets].concat();
        self.stage("building tests", |run| run.cargo.run(&build))
    }

    /// Runs the tests that `arguments` for nextest select.
    fn run_tests(
        &mut self,
        arguments: Vec<String>,
        variables: &[(&str, &str)],
    ) -> Result<ExitStatus> {
        self.stage("tests", |run| {
            let mut command = run.nextest.command(&run.cargo, &["run", "--no-fail-fast"]);
            run.for_tests(&mut command).envs(variables.iter().copied());
            command.env(REPORT, run.reports.path().join("missed")).env(PROGRAMS_ARE_BUILT, "1");
            // An option of the command line would take precedence over the variable.
            if env::var_os(THREADS).is_none() {
                command.env(THREADS, threads().to_string());
            }
            if run.preload.of_tests(&mut command) {
                forks::enable(&mut command, &run.reports.path().join("forks"))?;
            }
            timings::measure_tests(
                &mut command,
                &run.measuring,
                &run.reports.path().join("times"),
            )?;
            cargo::run(command.args(&arguments))
        })
        .inspect(|_| self.chosen = arguments)
    }

    /// Sets the environment variables of all tests.
    fn for_tests<'b>(&self, command: &'b mut Command) -> &'b mut Command {
        command.env(TMPDIR, self.temporary.path());
        if env::var_os(WAIT_POLICY).is_none() {
            command.env(WAIT_POLICY, "PASSIVE");
        }
        command
    }

    fn stage<T>(&mut self, name: &'static str, body: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        let started = Instant::now();
        let result = body(self);
        self.stages.push((name, started.elapsed()));
        result
    }

    /// Reports, after the tests, the durations and the tests that could not run.
    fn tell(&self, selection: &Selection, writes_timings: bool) -> Result<()> {
        let times = timings::read(&self.reports.path().join("times"))?;
        if times.len() >= MANY {
            eprint!("\n{}", timings::summary(&times));
        }
        let stages = self.stages.iter().map(|it| format!("{} {} s", it.0, it.1.as_secs()));
        eprintln!("time: {}", stages.collect::<Vec<_>>().join(", "));
        let of_last_run = self.workspace.target.join(TIMINGS);
        if matches!(selection, Selection::All) && !times.is_empty() {
            fs::copy(self.reports.path().join("times"), &of_last_run)
                .with_context(|| format!("cannot write {}", of_last_run.display()))?;
        }
        if writes_timings {
            let table = of_last_run.with_extension("md");
            fs::write(&table, timings::table(&times))
                .with_context(|| format!("cannot write {}", table.display()))?;
            eprintln!("{}: all tests and programs", self.checkout.relative(&table).display());
        }
        let mut missed = Missed::read(&self.reports.path().join("missed"))?;
        let is_filtered = !matches!(selection, Selection::All | Selection::Changed(_));
        if is_filtered && !missed.is_empty() {
            let words = ["list", "--message-format", "json", "--run-ignored", "only"];
            let mut list = self.nextest.command(&self.cargo, &words);
            // nextest has listed all tests of the programs, whatever the filter.
            if let Some(wanted) = missed::wanted(list.args(&self.chosen)) {
                missed.retain(|it| wanted.contains(&(it.program.clone(), it.test.clone())));
            }
        }
        missed::tell(&missed);
        Ok(())
    }
}

/// File with the durations of the last run of the whole suite, in the target folder.
pub(crate) const TIMINGS: &str = "timings.tsv";

/// Variable by which tests can rely on the programs of other packages, such as `brigade`, being up to date in the
/// target folder.
const PROGRAMS_ARE_BUILT: &str = "BRIGADE_TEST_PROGRAMS_ARE_BUILT";

/// Variable of OpenMP: how its threads wait for the next parallel region. By default they keep their processor busy,
/// which another test needs: two networks' golden tests at once take 30 s so, and 11 s if threads sleep.
const WAIT_POLICY: &str = "OMP_WAIT_POLICY";

/// Variable of cargo-nextest: number of tests that run at once.
const THREADS: &str = "NEXTEST_TEST_THREADS";

/// Returns the number of processors, for tests that compute, plus the number of the group `waiting` for those that wait
/// (.config/nextest.toml), plus one: at first tests whose ranks are threads run beside those that wait, and leave half of
/// the processors' time to a test that computes.
fn threads() -> usize {
    thread::available_parallelism().map_or(2, usize::from) + WAITING + 1
}

/// Value of `max-threads` of the group `waiting`.
const WAITING: usize = 4;

/// Number of tests from which on the slowest are listed.
const MANY: usize = 20;

/// A processor by its instructions, whose kernels are taken on one that has more.
#[derive(Debug)]
pub(crate) struct Processor {
    pub(crate) name: &'static str,
    /// Variables by which libtorch, oneDNN and MKL take the kernels for it. `MKL_ENABLE_INSTRUCTIONS` has an effect on
    /// Intel's processors alone.
    variables: &'static [(&'static str, &'static str)],
    /// nextest's filter for those of the tests of numbers that take other kernels there.
    filter: &'static str,
}

/// The processors of `--processor`. One without AVX is not among them: libtorch draws other random numbers there.
pub(crate) const PROCESSORS: [Processor; 2] = [
    Processor {
        name: "avx2",
        variables: &[
            ("ATEN_CPU_CAPABILITY", "avx2"),
            ("ONEDNN_MAX_CPU_ISA", "AVX2"),
            ("MKL_ENABLE_INSTRUCTIONS", "AVX2"),
        ],
        filter: "all()",
    },
    // In 32 and 64 bits oneDNN has one kernel for all processors with AVX-512 (by ONEDNN_VERBOSE, over all tests).
    Processor {
        name: "avx512",
        variables: &[("ONEDNN_MAX_CPU_ISA", "AVX512_CORE"), ("MKL_ENABLE_INSTRUCTIONS", "AVX512")],
        filter: "test(/16_bits|sixteen_bits|bf16|bfloat16|fp16|precision|autocast/)",
    },
];

/// Filter of nextest for numeric tests: those of programs of that name, and of modules of that name in others below
/// `tests/`.
const NUMERIC: &str = "binary(numeric) | test(/(^|::)numeric::/)";

/// Returns nextest's filter for tests that take their tensors' device from `brigade-test-device`: the numeric tests of
/// packages that depend on it, without modules that are about the CPU.
fn on_any_device(workspace: &Workspace) -> String {
    let packages = workspace.packages.iter().filter(|it| takes_any_device(it));
    let packages: Vec<_> = packages.map(|it| format!("package({})", it.name)).collect();
    format!("({}) & not test(/(^|::)cpu::/)", packages.join(" | "))
}

fn takes_any_device(package: &Package) -> bool {
    package.dependencies.contains("brigade-test-device")
}

/// Returns arguments for cargo-nextest that select the tests on a TPU: the test programs `tpu`, and with `numeric` the
/// tests of [`on_any_device`] without those that their packages leave out.
fn on_tpu(workspace: &Workspace, numeric: bool) -> Vec<String> {
    let packages = workspace.packages.iter();
    let own = |it: &&Package| it.tests.contains("tpu");
    let features: Vec<_> =
        packages.clone().filter(own).map(|it| format!("{}/tpu", it.name)).collect();
    let mut arguments =
        ["--profile", "tpu", "--features", &features.join(",")].map(str::to_owned).to_vec();
    let mut filter = "binary(tpu)".to_owned();
    let mut programs = vec!["tpu"];
    if numeric {
        let left_out = packages.clone().flat_map(|it| {
            let starts = it.settings.not_on_tpu.keys();
            starts.map(move |start| {
                let start = if start == "*" { "" } else { start };
                format!(" & not (package({}) & binary(numeric) & test(/^{start}/))", it.name)
            })
        });
        let on_any_device = on_any_device(workspace);
        filter.push_str(&format!(" | (binary(numeric) & {on_any_device}"));
        filter.extend(left_out);
        filter.push(')');
        programs.push("numeric");
    }
    let has_some = |it: &&Package| {
        let left_out = it.settings.not_on_tpu.contains_key("*");
        own(it) || numeric && it.tests.contains("numeric") && takes_any_device(it) && !left_out
    };
    arguments.extend(packages.filter(has_some).flat_map(|it| ["-p".to_owned(), it.name.clone()]));
    arguments.extend(programs.into_iter().flat_map(|it| ["--test", it]).map(str::to_owned));
    arguments.extend(["-E".to_owned(), filter]);
    arguments
}

/// Returns a line for each beginning of names of tests that do not run on TPUs.
fn left_out_on_tpu(workspace: &Workspace) -> String {
    let all = workspace.packages.iter().flat_map(|package| {
        let entries = package.settings.not_on_tpu.iter();
        entries.map(move |(start, why)| format!("not on TPUs: {} {start}: {why}\n", package.name))
    });
    all.collect()
}

/// Returns the packages in arguments for cargo.
fn packages(arguments: &[String]) -> Vec<&str> {
    let mut packages = Vec::new();
    let mut words = arguments.iter().take_while(|it| *it != "--").map(String::as_str);
    while let Some(word) = words.next() {
        if word == "-p" || word == "--package" {
            packages.extend(words.next());
        } else if let Some(name) = word.strip_prefix("--package=") {
            packages.push(name);
        } else if let Some(name) = word.strip_prefix("-p").filter(|_| !word.starts_with("--")) {
            packages.push(name.trim_start_matches('='));
        }
    }
    packages
}

/// Returns `true` for options with which cargo must not get `--workspace`, which overrides them.
fn names_a_manifest(arguments: &[String]) -> bool {
    let options = ["--manifest-path", "--workspace", "--all"];
    let mut words = arguments.iter().take_while(|it| *it != "--");
    words.any(|it| options.iter().any(|option| it.starts_with(option)))
}

fn count(number: usize, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn package_options_are_seen() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let names = |text: &str| packages(&words(text)).join(" ");
        assert_eq!(names("-p brigade-sampling"), "brigade-sampling");
        assert_eq!(
            names("some_test --package=xtask -pbrigade -p=a --package b"),
            "xtask brigade a b"
        );
        for none in ["some_test", "--profile ci", "some_test -- -p x", "--no-capture"] {
            assert_eq!(names(none), "");
        }
        assert!(names_a_manifest(&words("--manifest-path x")));
        assert!(!names_a_manifest(&words("some_test -- --all")));
    }

    #[test]
    fn programs_with_numeric_modules_are_found_beside_those_of_that_name() {
        let checkout = Checkout::find().unwrap();
        let names = Workspace::of(&checkout).unwrap().with_numeric_tests(&checkout);
        // `crates/*/tests/numeric`, a module of `train`'s `needs`, and one of `examples/text/tests/example.rs`.
        for name in ["numeric", "needs", "example"] {
            assert!(names.contains(name), "{names:?}");
        }
        assert!(!names.contains("it"), "{names:?}");
    }

    #[test]
    fn tests_that_are_left_out_on_tpus_are_there() {
        let checkout = Checkout::find().unwrap();
        let workspace = Workspace::of(&checkout).unwrap();
        for package in &workspace.packages {
            for (start, reason) in &package.settings.not_on_tpu {
                assert!(!reason.is_empty(), "{}: {start}", package.name);
                if start == "*" {
                    continue;
                }
                let numeric = checkout.root().join(&package.folder).join("tests/numeric");
                let mut parts: Vec<&str> = start.split("::").collect();
                let last = parts.pop().unwrap();
                let module = parts.iter().fold(numeric, |folder, part| folder.join(part));
                let text = fs::read_to_string(module.with_extension("rs"));
                let known = text.is_ok_and(|text| {
                    text.contains(&format!("fn {last}")) || text.contains(&format!(", {last}"))
                });
                assert!(known, "{}: {start}", package.name);
            }
        }
        let arguments = on_tpu(&workspace, true).join(" ");
        assert!(arguments.contains("-p brigade-nn ") && arguments.contains("brigade-train/tpu"));
        assert!(!on_tpu(&workspace, false).join(" ").contains("numeric"));
    }

    #[test]
    fn tests_of_every_device_are_those_of_packages_that_ask_for_it() {
        let filter = on_any_device(&Workspace::of(&Checkout::find().unwrap()).unwrap());
        assert!(
            filter.contains("package(brigade-nn)") && !filter.contains("package(brigade-sampling)")
        );
    }
}
