//! `cargo xtask check`: runs all lints, the fastest first, with warnings as errors.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use brigade_test_needs::installed;
use tempfile::NamedTempFile;

use crate::cargo::{self, Cargo};
use crate::checkout::Checkout;
use crate::docs::{document, document_all};
use crate::semver;
use crate::tidy;
use crate::workspace::Workspace;

/// Runs every lint, also after a failure, and lists those that failed.
pub(crate) fn run(checkout: &Checkout) -> Result<ExitCode> {
    let cargo = Cargo::new(checkout)?;
    let mut lints = Lints::default();
    lints.run(FMT, || Ok(cargo.run(&["fmt", "--all", "--check"])?.success()))?;
    lints.run("tidy", || Ok(tidy::run(checkout, false)? == ExitCode::SUCCESS))?;
    // It waits for the registry for most of its time.
    let package = Background::start(&mut publish_check(&cargo, checkout)?)?;
    let clippy = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
    lints.run("clippy", || Ok(cargo.run(&clippy)?.success()))?;
    lints.run("doc", || {
        Ok(cargo::run(with_clippys_results(&mut document_all(&cargo)))?.success())
    })?;
    lints.run("package (what crates.io would refuse)", || package.finish())?;
    lints.run("semver", || semver::run_if_installed(checkout))?;
    lints.run("schemas", || schemas(checkout))?;
    Ok(lints.conclude())
}

/// Lints some packages: the checks of single files and crates, without those of the whole checkout.
pub(crate) fn run_on(checkout: &Checkout, packages: &[String]) -> Result<ExitCode> {
    let workspace = Workspace::of(checkout)?;
    let names: Option<Vec<&str>> =
        packages.iter().map(|it| workspace.named(it).map(|it| &*it.name)).collect();
    let Some(names) = names else {
        let wrong = packages.iter().find(|it| workspace.named(it).is_none());
        bail!("{} is not a package of this workspace", wrong.map_or("", |it| it));
    };
    let cargo = Cargo::new(checkout)?;
    let options: Vec<&str> = names.iter().flat_map(|it| ["-p", *it]).collect();
    let mut lints = Lints::default();
    let with = |command: &[&str], rest: &[&str]| {
        cargo.run(&[command, &options, rest].concat()).map(|it| it.success())
    };
    lints.run(FMT, || with(&["fmt"], &["--check"]))?;
    lints.run("clippy", || with(&["clippy", "--all-targets"], &["--", "-D", "warnings"]))?;
    let has_library = |name: &&str| workspace.package(name).is_some_and(|it| it.has_library);
    let libraries: Vec<&str> = names.iter().copied().filter(has_library).collect();
    if !libraries.is_empty() {
        let mut document = document(&cargo, &["doc", "--lib", "--no-deps"]);
        document.args(libraries.iter().flat_map(|it| ["-p", *it]));
        lints.run("doc", || Ok(cargo::run(&mut document)?.success()))?;
    }
    Ok(lints.conclude())
}

/// A command that runs beside others; what it prints is shown at its end.
struct Background {
    line: String,
    child: Child,
    output: NamedTempFile,
}

impl Background {
    fn start(command: &mut Command) -> Result<Self> {
        let output = NamedTempFile::new().context("cannot make a temporary file")?;
        let file = |file: &NamedTempFile| file.reopen().context("cannot open a temporary file");
        command.stdin(Stdio::null()).stdout(file(&output)?).stderr(file(&output)?);
        let line = cargo::line(command);
        let child = command.spawn().with_context(|| format!("cannot start {line}"))?;
        Ok(Self { line, child, output })
    }

    fn finish(mut self) -> Result<bool> {
        eprintln!("$ {}", self.line);
        let status = self.child.wait().with_context(|| format!("cannot wait for {}", self.line))?;
        let text = fs::read(self.output.path()).context("cannot read a temporary file")?;
        eprint!("{}", String::from_utf8_lossy(&text));
        Ok(status.success())
    }
}

/// Returns the command that checks what a crate needs to be published, with a target folder of its own, so that neither
/// it nor a compilation waits for the other's lock.
fn publish_check(cargo: &Cargo<'_>, checkout: &Checkout) -> Result<Command> {
    let mut command = cargo.command(&PACKAGE);
    command.arg("--target-dir").arg(Workspace::of(checkout)?.target.join("publish"));
    Ok(command)
}

/// Has `cargo doc` take the crates that `cargo clippy` has checked, instead of checking each of them once more: the variables
/// with which clippy calls the compiler are part of cargo's fingerprints.
fn with_clippys_results(doc: &mut Command) -> &mut Command {
    let sysroot = Command::new("rustc").args(["--print", "sysroot"]).output();
    let sysroot = sysroot.ok().filter(|it| it.status.success());
    let sysroot = sysroot.and_then(|it| String::from_utf8(it.stdout).ok());
    let driver = sysroot.map(|it| Path::new(it.trim()).join("bin/clippy-driver"));
    if let Some(driver) = driver.filter(|it| it.is_file()) {
        let separator = "__CLIPPY_HACKERY__";
        doc.env("RUSTC_WORKSPACE_WRAPPER", driver);
        doc.env("CLIPPY_ARGS", format!("-D{separator}warnings{separator}"));
    }
    doc
}

const FMT: &str = "fmt (run `cargo fmt --all`)";

/// Results of the lints.
#[derive(Default)]
struct Lints {
    failed: Vec<&'static str>,
    /// Names of the lints with their durations in seconds.
    times: Vec<String>,
}

impl Lints {
    fn run(&mut self, name: &'static str, lint: impl FnOnce() -> Result<bool>) -> Result<()> {
        let started = Instant::now();
        if !lint()? {
            self.failed.push(name);
        }
        let word = name.split(' ').next().unwrap_or(name);
        self.times.push(format!("{word} {} s", started.elapsed().as_secs()));
        Ok(())
    }

    fn conclude(&self) -> ExitCode {
        eprintln!("time: {}", self.times.join(", "));
        if self.failed.is_empty() {
            eprintln!("check: all is well");
            return ExitCode::SUCCESS;
        }
        eprintln!("check: failed: {}", self.failed.join(", "));
        ExitCode::FAILURE
    }
}

/// Compares the workflows and the forms of issues with the schemas of the hosting site, where check-jsonschema is
/// installed, which has them with it.
fn schemas(checkout: &Checkout) -> Result<bool> {
    const TOOL: &str = "check-jsonschema";
    if installed(TOOL).is_none() {
        eprintln!(
            "schemas: left out (`pip install {TOOL}` installs what compares .github with them)"
        );
        return Ok(true);
    }
    let files = |folder: &str, is_wanted: &dyn Fn(&str) -> bool| -> Result<Vec<PathBuf>> {
        let folder = checkout.root().join(folder);
        let entries =
            fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
        let mut paths = entries.map(|it| Ok(it?.path())).collect::<Result<Vec<_>>>()?;
        paths.retain(|path| path.file_name().is_some_and(|it| is_wanted(&it.to_string_lossy())));
        paths.sort();
        Ok(paths)
    };
    let (forms, config) = (".github/ISSUE_TEMPLATE", "config.yml");
    let mut all_fit = true;
    for (schema, files) in [
        ("vendor.github-workflows", files(".github/workflows", &|_| true)?),
        ("vendor.github-issue-forms", files(forms, &|name| name != config)?),
        ("vendor.github-issue-config", files(forms, &|name| name == config)?),
    ] {
        let mut command = Command::new(TOOL);
        command.args(["--builtin-schema", schema]).args(files);
        all_fit &= cargo::run(&mut command)?.success();
    }
    Ok(all_fit)
}

/// Checks what a crate needs to be published and packs it. The same command without `--no-verify` also checks that the
/// packed crates compile without files outside of them: another build of everything.
pub(crate) const PACKAGE: [&str; 6] =
    ["publish", "--quiet", "--workspace", "--dry-run", "--no-verify", "--allow-dirty"];
