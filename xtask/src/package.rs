//! `cargo xtask package`: the files of a release. Builds them; publishes nothing.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use brigade_libtorch_setup::{Cache, Kind, Libtorch, Pins, Wanted};
use clap::Args;

use crate::cargo::{self, plain, plain_cargo};
use crate::checkout::Checkout;
use crate::metadata::Metadata;
use crate::python_environment::Environment;
use crate::sbom::{self, Checksums};
use crate::workspace::Workspace;

#[derive(Debug, Default, Args)]
pub(crate) struct Options {
    /// Target that the programs are for; its standard library must be installed (`rustup target add`) [default:
    /// x86-64 Linux, and aarch64 Linux if its standard library is installed]
    #[arg(long, value_name = "TRIPLE")]
    target: Option<String>,
}

impl Options {
    /// Returns the options for packages that this machine can run.
    pub(crate) fn for_tests() -> Self {
        let own = format!("{}-unknown-linux-gnu", env::consts::ARCH);
        Self { target: Some(own).filter(|it| it != X86_64) }
    }

    fn targets(&self, checkout: &Checkout) -> Result<Vec<&str>> {
        if let Some(target) = &self.target {
            return Ok(vec![target]);
        }
        let has_aarch64 = has_standard_library(checkout, AARCH64)?;
        if !has_aarch64 {
            note_missing("wheel and archive", AARCH64);
        }
        Ok([X86_64].into_iter().chain(has_aarch64.then_some(AARCH64)).collect())
    }
}

/// Builds the compiled C++, the wheel, the source distribution, an archive for each C library, the Debian package, the
/// crates, the lists of components and the checksums.
pub(crate) fn run(checkout: &Checkout, options: &Options) -> Result<ExitCode> {
    let began = Instant::now();
    let targets = options.targets(checkout)?;
    let packages = Packages::new(checkout, &targets)?;
    packages.objects()?;
    for target in &targets {
        packages.wheel(target)?;
    }
    packages.source_distribution()?;
    packages.pages(&targets)?;
    packages.debian(targets[0])?;
    for target in &targets {
        packages.archive(target)?;
        let is_static = target.replace("-gnu", "-musl");
        if has_standard_library(checkout, &is_static)? {
            packages.static_program(&is_static)?;
            packages.archive(&is_static)?;
        } else {
            note_missing("static program", &is_static);
        }
    }
    packages.sboms()?;
    packages.crates()?;
    packages.checksums()?;
    list(checkout, &packages.folder)?;
    eprintln!("package: done after {:.0} s", began.elapsed().as_secs_f64());
    Ok(ExitCode::SUCCESS)
}

/// The folder of the packages, in the folder that cargo builds into.
pub(crate) fn folder(workspace: &Workspace) -> PathBuf {
    workspace.target.join("dist")
}

/// Prints the files of the packages with their sizes.
pub(crate) fn list(checkout: &Checkout, folder: &Path) -> Result<()> {
    for file in files(folder)? {
        let megabytes = fs::metadata(&file)?.len() as f64 / 1e6;
        eprintln!("{}: {megabytes:.1} MB", checkout.relative(&file).display());
    }
    let crates = folder.join(CRATES);
    eprintln!("{}: {} crates", checkout.relative(&crates).display(), files(&crates)?.len());
    Ok(())
}

struct Packages<'a> {
    checkout: &'a Checkout,
    /// What cargo builds into.
    target: PathBuf,
    /// Where the packages go.
    folder: PathBuf,
    /// maturin and zig.
    tools: Environment,
    commit: String,
    /// Crates for the targets.
    metadata: Metadata,
    /// Version in `Cargo.toml`, which may be newer than this program.
    version: String,
}

impl<'a> Packages<'a> {
    /// Installs the tools where they are missing, and empties the folder.
    fn new(checkout: &'a Checkout, targets: &[&str]) -> Result<Self> {
        let tools = Environment::of_packaging(checkout);
        tools.install()?;
        let workspace = Workspace::of(checkout)?;
        let folder = folder(&workspace);
        remove(&folder)?;
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let mut git = Command::new("git");
        git.args(["rev-parse", "HEAD"]).current_dir(checkout.root());
        // A checkout without Git has packages, too; their program does not know its commit.
        let commit = git.output().ok().filter(|it| it.status.success());
        let commit = commit.map(|it| String::from_utf8_lossy(&it.stdout).trim().to_owned());
        let platforms = targets.iter().flat_map(|it| ["--filter-platform", *it]);
        let arguments: Vec<&str> = ["--locked"].into_iter().chain(platforms).collect();
        let metadata = Metadata::of(checkout, &arguments)?;
        Ok(Self {
            checkout,
            version: metadata.member(LAUNCHER)?.version.clone(),
            metadata,
            target: workspace.target,
            folder,
            tools,
            commit: commit.unwrap_or_default(),
        })
    }

    /// Compiles the library's C++ against the fetched libtorch, as the first release build of a project does, for
    /// `brigade setup`. Adds the licence of libtorch, whose headers have functions in it.
    fn objects(&self) -> Result<()> {
        let (cache, pins) = (Cache::of_user()?, Pins::embedded()?);
        let libtorch = Libtorch::find_or_fetch(&Wanted::Fetched(Kind::Cpu), &cache, &pins)?;
        // A folder that no build has seen before: the build script compiles, and stores the archive.
        let cache = tempfile::tempdir_in(&self.target).context("cannot make a folder")?;
        let mut cargo = plain_cargo(self.checkout);
        cargo.args(["check", "--quiet", "--locked", "--release", "--package", BORDER]);
        // Without the C++ of torch-sys, which a check does not need.
        cargo.args(["--features", "tch/doc-only", "--target-dir"]).arg(self.target.join(OBJECTS));
        cargo.env("BRIGADE_OBJECT_CACHE", cache.path()).env("LIBTORCH", libtorch.folder());
        for name in ["LIBTORCH_USE_PYTORCH", "LIBTORCH_LIB", "LIBTORCH_INCLUDE"] {
            cargo.env_remove(name);
        }
        done(&mut cargo)?;

        let stored = files(cache.path())?;
        let [stored] = &stored[..] else { bail!("the build of {BORDER} stored {stored:?}") };
        let archive = fs::read(stored).context("cannot read the compiled C++")?;
        let label = archive.split(|byte| *byte == b'\n').take(5);
        let key = label.filter_map(|line| line.strip_prefix(b"portable ")).next();
        let key = key.context(
            "the compiled C++ fits no other machine: use g++, and set no flags for it (CXXFLAGS)",
        )?;
        let folder = self.folder.join(SHARE).join(OBJECTS);
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let name = format!("{BORDER}-{}.objects", String::from_utf8_lossy(key));
        copy(stored, &folder.join(name))?;
        let info = format!("torch-{}.dist-info/licenses/LICENSE", libtorch.version());
        let installed = libtorch.folder().parent().context("libtorch lies in a folder")?;
        copy(&installed.join(info), &folder.join("LICENSE-libtorch"))
    }

    /// Copies the compiled C++ into `share/brigade` of a folder, in packages for this processor.
    fn add_objects(&self, target: &str, folder: &Path) -> Result<()> {
        if !is_own(target) {
            eprintln!(
                "note: no compiled C++ for {target}: it is compiled for this processor alone"
            );
            return Ok(());
        }
        let to = folder.join("share/brigade");
        fs::create_dir_all(&to).with_context(|| format!("cannot make {}", to.display()))?;
        for file in files(&self.folder.join(SHARE).join(OBJECTS))? {
            copy(&file, &to.join(file.file_name().context("a file has no name")?))?;
        }
        Ok(())
    }

    /// With zig as linker, so that the program runs with older versions of glibc than this machine's. maturin checks
    /// that it needs no newer one, and no library beside it.
    fn wheel(&self, target: &str) -> Result<()> {
        // Where maturin looks for files that pip puts into the folders of the environment.
        let data = self.checkout.root().join("brigade.data");
        remove(&data)?;
        let built = self
            .add_objects(target, &data.join("data"))
            .and_then(|()| self.wheel_with_data(target));
        // Also after a failure: maturin would take it for a wheel of another processor.
        remove(&data)?;
        built
    }

    fn wheel_with_data(&self, target: &str) -> Result<()> {
        let mut maturin = self.tool("maturin")?;
        maturin.args(["build", "--zig", "--locked", "--target", target]);
        maturin.args(["--compatibility", MANYLINUX, "--out"]).arg(&self.folder);
        done(&mut maturin)
    }

    fn source_distribution(&self) -> Result<()> {
        let mut maturin = self.tool("maturin")?;
        done(maturin.args(["sdist", "--out"]).arg(&self.folder))
    }

    fn static_program(&self, target: &str) -> Result<()> {
        let mut zigbuild = self.tool("cargo-zigbuild")?;
        zigbuild.args(["zigbuild", "--locked", "--package", LAUNCHER]);
        done(zigbuild.args(["--profile", PROFILE, "--target", target]))
    }

    /// Writes the completions and manual pages, which are the same for all targets.
    fn pages(&self, targets: &[&str]) -> Result<()> {
        // This machine cannot start another processor's program.
        let own = targets.iter().find(|it| is_own(it));
        let program = self.program(own.unwrap_or(&X86_64));
        let completions = self.folder.join(SHARE).join("completions");
        fs::create_dir_all(&completions)
            .with_context(|| format!("cannot make {}", completions.display()))?;
        for (shell, file) in COMPLETIONS {
            let output = Command::new(&program).args(["completions", shell]).output();
            let output = output.with_context(|| format!("cannot start {}", program.display()))?;
            if !output.status.success() {
                bail!("`brigade completions {shell}` failed");
            }
            fs::write(completions.join(file), output.stdout)
                .with_context(|| format!("cannot write {file}"))?;
        }
        let man = self.folder.join(SHARE).join("man");
        done(Command::new(&program).args(["man", "--out-dir"]).arg(man))
    }

    /// Packs the program for a target with licences, completions and manual pages.
    fn archive(&self, target: &str) -> Result<()> {
        let stem = format!("brigade-{}-{target}", self.version);
        let staging = tempfile::tempdir_in(&self.target).context("cannot make a folder")?;
        let root = staging.path().join(&stem);
        fs::create_dir(&root).with_context(|| format!("cannot make {}", root.display()))?;
        copy(&self.program(target), &root.join("brigade"))?;
        for name in ["LICENSE-APACHE", "LICENSE-MIT"] {
            copy(&self.checkout.root().join(name), &root.join(name))?;
        }
        copy(&self.checkout.root().join("crates/cli/README.md"), &root.join("README.md"))?;
        self.add_objects(target, &root)?;
        for kind in ["completions", "man"] {
            let (from, to) = (self.folder.join(SHARE).join(kind), root.join(kind));
            fs::create_dir(&to).with_context(|| format!("cannot make {}", to.display()))?;
            for file in files(&from)? {
                copy(&file, &to.join(file.file_name().context("a page has no name")?))?;
            }
        }
        let mut tar = Command::new("tar");
        // The same bytes from the same files.
        tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0"]);
        tar.arg("-czf").arg(self.folder.join(format!("{stem}.tar.gz")));
        done(tar.arg("-C").arg(staging.path()).arg(&stem))
    }

    /// Packs the program for a target as a Debian package, which needs no tool of Debian's.
    fn debian(&self, target: &str) -> Result<()> {
        if !is_own(target) {
            eprintln!(
                "note: no Debian package for {target}: it would have this processor's compiled C++"
            );
            return Ok(());
        }
        if self.target != self.checkout.root().join("target") {
            eprintln!(
                "note: no Debian package: its settings name target/ in the checkout, and cargo builds elsewhere"
            );
            return Ok(());
        }
        let tool = self.checkout.root().join("tools").join(format!("cargo-deb-{CARGO_DEB}"));
        let program = tool.join("bin/cargo-deb");
        if !program.is_file() {
            eprintln!("cargo-deb is not here: cargo compiles it once, which takes some minutes");
            let mut install = plain_cargo(self.checkout);
            install.args(["install", "cargo-deb", "--version", CARGO_DEB, "--locked", "--root"]);
            done(install.arg(&tool))?;
        }
        let mut deb = plain(self.checkout, &program);
        deb.args(["deb", "--quiet", "--package", LAUNCHER, "--no-build", "--profile", PROFILE]);
        done(deb.args(["--target", target, "--output"]).arg(&self.folder))
    }

    /// Writes the lists of components of the launcher and the library.
    fn sboms(&self) -> Result<()> {
        let lock = self.checkout.root().join("Cargo.lock");
        let lock =
            fs::read_to_string(&lock).with_context(|| format!("cannot read {}", lock.display()))?;
        let checksums = Checksums::of_lock(&lock)?;
        for (package, kind) in [(LAUNCHER, "application"), (LIBRARY, "library")] {
            let sbom = sbom::of(&self.metadata, &checksums, package, kind)?;
            let name = format!("{package}-{}.cdx.json", self.version);
            fs::write(self.folder.join(&name), format!("{sbom:#}\n"))
                .with_context(|| format!("cannot write {name}"))?;
        }
        Ok(())
    }

    /// Packs the crates that `cargo publish` would upload, for tests that install them. With a target folder of their
    /// own, which has no crates of another version.
    fn crates(&self) -> Result<()> {
        let built = self.target.join(CRATES);
        remove(&built)?;
        let mut cargo = plain_cargo(self.checkout);
        cargo.args(["package", "--quiet", "--no-verify", "--allow-dirty"]);
        cargo.arg("--target-dir").arg(&built);
        let published = self.metadata.members().filter(|it| it.is_published());
        done(cargo.args(published.flat_map(|it| ["--package", it.name.as_str()])))?;
        let folder = self.folder.join(CRATES);
        fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        for file in files(&built.join("package"))? {
            if file.extension().is_some_and(|it| it == "crate") {
                copy(&file, &folder.join(file.file_name().context("a crate has no name")?))?;
            }
        }
        Ok(())
    }

    /// The program as cargo has built it.
    fn program(&self, target: &str) -> PathBuf {
        self.target.join(target).join(PROFILE).join("brigade")
    }

    /// In the form that `sha256sum --check` reads.
    fn checksums(&self) -> Result<()> {
        let mut command = Command::new("sha256sum");
        for file in files(&self.folder)? {
            command.arg(file.file_name().context("a package has no name")?);
        }
        command.current_dir(&self.folder).stderr(Stdio::inherit());
        let output = command.output().context("cannot start sha256sum")?;
        if !output.status.success() {
            bail!("sha256sum failed");
        }
        fs::write(self.folder.join(CHECKSUMS), output.stdout)
            .with_context(|| format!("cannot write {CHECKSUMS}"))
    }

    /// A program of the tools' environment, which finds the others there.
    fn tool(&self, name: &str) -> Result<Command> {
        let mut command = plain(self.checkout, &self.tools.program(name));
        let mut path = vec![self.tools.folder().join("bin")];
        path.extend(env::split_paths(&env::var_os("PATH").unwrap_or_default()));
        command.env("PATH", env::join_paths(path)?).env("BRIGADE_COMMIT", &self.commit);
        Ok(command)
    }
}

fn note_missing(what: &str, target: &str) {
    eprintln!(
        "note: no {what} for {target}: Rust's standard library for it is not installed (`rustup target add {target}`)"
    );
}

/// Returns `true` if the target has this machine's processor.
fn is_own(target: &str) -> bool {
    target.starts_with(env::consts::ARCH)
}

fn has_standard_library(checkout: &Checkout, target: &str) -> Result<bool> {
    let mut rustc = plain(checkout, Path::new("rustc"));
    rustc.args(["--print", "target-libdir", "--target", target]);
    let output = rustc.output().context("cannot start rustc")?;
    Ok(output.status.success()
        && Path::new(String::from_utf8_lossy(&output.stdout).trim()).is_dir())
}

fn done(command: &mut Command) -> Result<()> {
    if !cargo::run(command)?.success() {
        bail!("{} failed: its last lines say why", command.get_program().display());
    }
    Ok(())
}

/// Removes a folder, if it exists.
fn remove(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display())).map(drop)
}

/// The files of a folder, by name.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut files = entries.map(|it| Ok(it?.path())).collect::<Result<Vec<_>>>()?;
    files.retain(|it| it.is_file());
    files.sort();
    Ok(files)
}

/// Packages of the program and of the library.
const LAUNCHER: &str = "brigade-cli";
const LIBRARY: &str = "brigade";
/// Package whose C++ is compiled for a release.
const BORDER: &str = "brigade-torch";
/// Version of cargo-deb.
const CARGO_DEB: &str = "3.8.0";
const X86_64: &str = "x86_64-unknown-linux-gnu";
const AARCH64: &str = "aarch64-unknown-linux-gnu";
/// glibc 2.17, the oldest that Rust's standard library runs with.
const MANYLINUX: &str = "manylinux2014";
/// The profile of `Cargo.toml`, which `pyproject.toml` names, too.
const PROFILE: &str = "shipped";
/// The folder of compiled C++, completions and manual pages, beside the packages.
const SHARE: &str = "share";
/// Folder of the compiled C++, and in the target folder the one in which cargo compiles it.
const OBJECTS: &str = "objects";
/// Folder of the crates, beside the packages, and in the target folder the one in which cargo packs them.
const CRATES: &str = "crates";
const CHECKSUMS: &str = "SHA256SUMS";
/// Shells, and the names that their scripts have.
const COMPLETIONS: [(&str, &str); 3] =
    [("bash", "brigade.bash"), ("fish", "brigade.fish"), ("zsh", "_brigade")];
