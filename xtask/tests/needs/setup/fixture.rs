//! Checkout in a temporary folder, with wheels beside it, in which xtask is run.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use brigade_test_needs::with_mounts;
use tempfile::TempDir;

/// Checkout with its surroundings.
pub(crate) struct Fixture {
    folder: TempDir,
    real_python: String,
}

/// Step at which the fake Python stops until it is released.
#[derive(Clone, Copy)]
pub(crate) enum Block {
    Download,
    Unpack,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        Self::with_version("2.13.0")
    }

    pub(crate) fn with_version(version: &str) -> Self {
        let script = "import sys, pip; print(sys.executable)";
        let python = Command::new("python3").args(["-c", script]).output().unwrap();
        assert!(python.status.success(), "{python:?}");
        let real_python = String::from_utf8(python.stdout).unwrap().trim().to_owned();
        let fixture = Self { folder: TempDir::new().unwrap(), real_python };
        // Files by which cargo recognises a checkout, and the line that includes the written configuration.
        fs::create_dir_all(fixture.root().join(".cargo")).unwrap();
        let include = "include = [{ path = \"libtorch.toml\", optional = true }]\n";
        fs::write(fixture.root().join(".cargo/config.toml"), include).unwrap();
        fixture.fake_python("exec \"$REAL_PYTHON\" \"$@\"");
        fixture.make_wheels(version);
        fixture
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.folder.path().join("checkout")
    }

    /// Returns the cache of libtorch installations.
    pub(crate) fn cache(&self) -> PathBuf {
        self.folder.path().join("cache/brigade/libtorch")
    }

    /// Returns a libtorch in the cache.
    pub(crate) fn fetched(&self, name: &str) -> PathBuf {
        self.cache().join(name)
    }

    pub(crate) fn pins(&self) -> PathBuf {
        self.folder.path().join("pins.json")
    }

    fn wheels(&self) -> PathBuf {
        self.folder.path().join("wheels")
    }

    fn programs(&self) -> PathBuf {
        self.folder.path().join("programs")
    }

    pub(crate) fn make_wheels(&self, version: &str) {
        let pins = Command::new(&self.real_python)
            .args(["-c", include_str!("wheels.py")])
            .arg(self.wheels())
            .arg(version)
            .arg(concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/../crates/libtorch-setup/src/pins/x86_64.json"
            ))
            .output()
            .unwrap();
        assert!(pins.status.success(), "{}", String::from_utf8_lossy(&pins.stderr));
        fs::write(self.pins(), pins.stdout).unwrap();
    }

    /// Makes `python3` on the PATH this shell script.
    pub(crate) fn fake_python(&self, body: &str) {
        fs::create_dir_all(self.programs()).unwrap();
        let script = self.programs().join("python3");
        fs::write(&script, format!("#!/bin/sh\n{body}\n")).unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Creates a folder for LIBTORCH.
    pub(crate) fn users_libtorch(&self, version: &str) -> PathBuf {
        let folder = self.folder.path().join(format!("libtorch-{version}"));
        fill_libtorch(&folder);
        fs::write(folder.join("build-version"), format!("{version}\n")).unwrap();
        folder
    }

    /// Creates a folder for PYTHONPATH with a package torch.
    pub(crate) fn users_pytorch(&self, version: &str) -> PathBuf {
        let packages = self.folder.path().join("packages");
        fill_libtorch(&packages.join("torch"));
        fs::write(packages.join("torch/__init__.py"), "raise ImportError('slow')").unwrap();
        let text = format!("__version__ = '{version}'\n");
        fs::write(packages.join("torch/version.py"), text).unwrap();
        packages
    }

    pub(crate) fn setup(&self) -> Setup<'_> {
        self.xtask(&["setup"])
    }

    /// Returns the command `cargo xtask install tpu` for a libtorch of the user's.
    pub(crate) fn install_tpu(&self, libtorch: &Path) -> Setup<'_> {
        self.xtask(&["install", "tpu"]).env("LIBTORCH", libtorch)
    }

    fn xtask(&self, arguments: &[&str]) -> Setup<'_> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
        command
            .args(arguments)
            .arg("--pins")
            .arg(self.pins())
            .env("XDG_CACHE_HOME", self.folder.path().join("cache"))
            .env("CARGO_MANIFEST_DIR", self.root().join("xtask"))
            .env("PATH", format!("{}:/usr/bin:/bin", self.programs().display()))
            .env("REAL_PYTHON", &self.real_python)
            .env("PIP_CONFIG_FILE", "/dev/null")
            .env("PIP_NO_INDEX", "1")
            .env("PIP_FIND_LINKS", self.wheels())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        for name in OUTER_VARIABLES {
            command.env_remove(name);
        }
        Setup { fixture: self, command, gate: None }
    }

    pub(crate) fn read(&self, path: &str) -> String {
        fs::read_to_string(self.root().join(path)).unwrap()
    }

    /// Returns all files of a libtorch in the cache, sorted.
    pub(crate) fn files(&self, name: &str) -> Vec<String> {
        let base = self.fetched(name);
        let mut folders = vec![base.clone()];
        let mut files = Vec::new();
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    files.push(path.strip_prefix(&base).unwrap().to_str().unwrap().to_owned());
                }
            }
        }
        files.sort();
        files
    }

    /// Returns the pinned version of TorchTPU.
    pub(crate) fn torch_tpu_version(&self) -> String {
        let text = fs::read_to_string(self.pins()).unwrap();
        let backend = &text[text.find("\"backend\"").unwrap()..];
        let version = backend.split("\"version\": \"").nth(1).unwrap();
        version.split('"').next().unwrap().to_owned()
    }

    /// Returns the folder of TorchTPU in the cache.
    pub(crate) fn torch_tpu(&self) -> PathBuf {
        self.folder.path().join("cache/brigade/tpu").join(self.torch_tpu_version())
    }

    /// Returns the content of TorchTPU's cache without its lock, sorted.
    pub(crate) fn in_tpu_cache(&self) -> Vec<String> {
        names_in(&self.folder.path().join("cache/brigade/tpu"))
    }

    /// Returns the content of the cache without its lock, sorted.
    pub(crate) fn in_cache(&self) -> Vec<String> {
        names_in(&self.cache())
    }

    pub(crate) fn installs_nothing(&self) {
        assert_eq!(self.in_cache(), Vec::<String>::new());
    }
}

fn names_in(cache: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(cache) else { return Vec::new() };
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|it| it != "lock").collect();
    names.sort();
    names
}

fn fill_libtorch(folder: &Path) {
    fs::create_dir_all(folder.join("lib")).unwrap();
    fs::create_dir_all(folder.join("include")).unwrap();
    fs::write(folder.join("lib/libtorch_cpu.so"), "").unwrap();
}

/// Call of `cargo xtask setup`.
pub(crate) struct Setup<'a> {
    fixture: &'a Fixture,
    command: Command,
    gate: Option<PathBuf>,
}

impl Setup<'_> {
    pub(crate) fn cuda(mut self) -> Self {
        self.command.arg("--cuda");
        self
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Sets the folders of programs.
    pub(crate) fn path(self, path: &str) -> Self {
        self.env("PATH", path)
    }

    pub(crate) fn without_wheels(mut self) -> Self {
        self.command.env_remove("PIP_FIND_LINKS").env_remove("PIP_NO_INDEX");
        self
    }

    /// Makes Python stop at that step, the first time: it writes `reached`, then waits until `gate` is opened.
    pub(crate) fn block_in(mut self, block: Block) -> Self {
        let pattern = match block {
            Block::Download => "*' pip download '*",
            Block::Unpack => "*'Unpacks the chosen files'*",
        };
        self.fixture.fake_python(&format!(
            "case \" $* \" in {pattern}) \
             if [ -n \"$GATE\" ] && [ ! -e \"$GATE.reached\" ]; then echo $$ > \"$GATE.reached\"; read answer < \"$GATE\"; fi;; \
             esac\nexec \"$REAL_PYTHON\" \"$@\""
        ));
        let gate = self.fixture.folder.path().join("gate");
        assert!(Command::new("mkfifo").arg(&gate).status().unwrap().success());
        self.command.env("GATE", &gate);
        self.gate = Some(gate);
        self
    }

    pub(crate) fn run(self) -> Outcome {
        self.start().finish()
    }

    pub(crate) fn start(mut self) -> Running {
        let mut child = self.command.spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap());
        Running { child, lines, text: String::new(), gate: self.gate }
    }

    /// Runs with the cache on a disk of that size.
    pub(crate) fn on_small_disk(self, bytes: u64) -> Outcome {
        let cache = self.fixture.cache();
        fs::create_dir_all(&cache).unwrap();
        let script =
            format!("mount -t tmpfs -o size={bytes} tmpfs '{}'; exec \"$@\"", cache.display());
        let mut command = with_mounts(&script);
        command.arg(self.command.get_program()).args(self.command.get_args());
        for (name, value) in self.command.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        let path = self.command.get_envs().find(|it| it.0 == "PATH").and_then(|it| it.1).unwrap();
        command.env("PATH", format!("{}:/usr/sbin:/sbin", path.display()));
        let output = command.stdin(Stdio::null()).output().unwrap();
        Outcome {
            code: output.status.code(),
            text: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// Setup that has not ended yet.
pub(crate) struct Running {
    child: Child,
    lines: BufReader<std::process::ChildStderr>,
    text: String,
    gate: Option<PathBuf>,
}

impl Running {
    /// Waits until Python has stopped at the gate.
    pub(crate) fn wait_until_blocked(&mut self) {
        let mut reached = self.gate.clone().unwrap().into_os_string();
        reached.push(".reached");
        while fs::read_to_string(&reached).unwrap_or_default().is_empty() {
            assert!(self.child.try_wait().unwrap().is_none(), "setup ended before the gate");
            thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn wait_for_line(&mut self, part: &str) {
        while !self.text.contains(part) {
            let read = self.lines.read_line(&mut self.text).unwrap();
            assert!(read > 0, "setup ended without saying {part:?}: {}", self.text);
        }
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn unblock(&mut self) {
        // Opening waits for the reader at the gate; closing releases it.
        if let Some(gate) = self.gate.take() {
            File::options().write(true).open(gate).unwrap();
        }
    }

    pub(crate) fn finish(mut self) -> Outcome {
        self.lines.read_to_string(&mut self.text).unwrap();
        let code = self.child.wait().unwrap().code();
        Outcome { code, text: std::mem::take(&mut self.text) }
    }
}

impl Drop for Running {
    /// A failed test must not leave a Python process that never ends.
    fn drop(&mut self) {
        if self.gate.is_some() {
            self.unblock();
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Outcome of a setup with all of its output.
#[derive(Debug)]
pub(crate) struct Outcome {
    code: Option<i32>,
    pub(crate) text: String,
}

impl Outcome {
    pub(crate) fn succeeds_saying(&self, part: &str) {
        assert_eq!(self.code, Some(0), "{}", self.text);
        assert!(self.text.contains(part), "expected {part:?} in: {}", self.text);
    }

    /// Checks that the last line begins with `error:`.
    pub(crate) fn fails_saying(&self, part: &str) {
        assert_eq!(self.code, Some(1), "{}", self.text);
        let errors: Vec<&str> = self.text.lines().filter(|it| it.starts_with("error: ")).collect();
        assert_eq!(errors.len(), 1, "{}", self.text);
        assert_eq!(self.text.lines().last(), Some(errors[0]), "{}", self.text);
        assert!(errors[0].contains(part), "expected {part:?} in: {}", errors[0]);
    }
}

/// Variables that the machine running the tests may have set.
const OUTER_VARIABLES: &[&str] = &[
    "LIBTORCH",
    "LIBTORCH_USE_PYTORCH",
    "PIP_EXTRA_INDEX_URL",
    "PIP_INDEX_URL",
    "PYTHONPATH",
    "RUSTDOCFLAGS",
    "TPU_LIBRARY_PATH",
    "VIRTUAL_ENV",
];
