//! A kernel that runs cells one by one, by Jupyter's client.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use brigade_test_hosts::Host;
use brigade_test_needs::{Need, evcxr, python};
use serde_json::Value;
use tempfile::TempDir;

/// The kernel, registered for the tests alone.
pub(crate) struct Setup {
    prefix: TempDir,
    brigade: PathBuf,
}

impl Setup {
    pub(crate) fn new(brigade: PathBuf) -> Self {
        let prefix = TempDir::new().unwrap();
        let mut install = Command::new(&brigade);
        install.args(["kernel", "install", "--prefix"]).arg(prefix.path());
        install.arg("--evcxr").arg(evcxr());
        let output = install.current_dir(checkout()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Self { prefix, brigade }
    }

    pub(crate) fn brigade(&self) -> &Path {
        &self.brigade
    }

    /// A program of Jupyter's that finds the kernel.
    pub(crate) fn with_kernel<'c>(&self, command: &'c mut Command) -> &'c mut Command {
        command.env("JUPYTER_PATH", self.prefix.path().join("share/jupyter"))
    }

    /// Starts a kernel in this folder.
    pub(crate) fn kernel(&self, folder: &Path) -> Kernel {
        self.start(Command::new(python(Need::RustKernel).unwrap()), folder)
    }

    /// Starts a kernel in this folder on a host, with this user's programs and builds.
    pub(crate) fn kernel_on(&self, host: &Host, folder: &Path) -> Kernel {
        let mut command = host.command(python(Need::RustKernel).unwrap());
        let home = std::env::home_dir().unwrap();
        let folder_of = |variable: &str, name: &str| {
            std::env::var_os(variable).map_or_else(|| home.join(name), PathBuf::from)
        };
        for (variable, name) in
            [("CARGO_HOME", ".cargo"), ("RUSTUP_HOME", ".rustup"), ("XDG_CACHE_HOME", ".cache")]
        {
            command.env(variable, folder_of(variable, name));
        }
        // The host cannot reach a registry.
        command.env("CARGO_NET_OFFLINE", "true");
        self.start(command, folder)
    }

    fn start(&self, mut python: Command, folder: &Path) -> Kernel {
        let driver = checkout().join("crates/notebook/tests/jupyter/kernel.py");
        python.arg(driver).arg(folder).arg("brigade");
        python.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut child = self.with_kernel(&mut python).spawn().unwrap();
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let mut kernel = Kernel { child, stdin, stdout, cell: Cell::default() };
        assert_eq!(kernel.answer()[0], "ready");
        kernel
    }
}

/// What a cell has given so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cell {
    pub(crate) out: String,
    pub(crate) err: String,
    /// The types of what it has displayed.
    pub(crate) mimes: Vec<String>,
    /// The first 10,000 characters of what it has displayed.
    shown: String,
    /// Jupyter's message for a cell that failed.
    pub(crate) error: String,
}

impl Cell {
    #[track_caller]
    pub(crate) fn succeeds(self) -> Self {
        assert!(self.error.is_empty(), "{}\n{}\n{}", self.out, self.err, self.error);
        self
    }

    pub(crate) fn shown(&self) -> &str {
        &self.shown
    }
}

/// Ends its kernel when it is dropped.
pub(crate) struct Kernel {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    cell: Cell,
}

impl Kernel {
    /// Runs a cell to its end.
    pub(crate) fn run(&mut self, source: &str) -> Cell {
        self.start(source);
        self.finish()
    }

    pub(crate) fn start(&mut self, source: &str) {
        self.cell = Cell::default();
        self.send(&Value::from(source).to_string());
    }

    pub(crate) fn interrupt(&mut self) {
        self.send("interrupt");
    }

    /// Waits for the end of the cell.
    pub(crate) fn finish(&mut self) -> Cell {
        while self.step() {}
        std::mem::take(&mut self.cell)
    }

    /// Waits until the running cell has given what is looked for; its standard output.
    #[track_caller]
    pub(crate) fn wait_for(&mut self, is_there: impl Fn(&Cell) -> bool) -> String {
        while !is_there(&self.cell) {
            assert!(self.step(), "the cell has ended: {:?}", self.cell);
        }
        self.cell.out.clone()
    }

    fn send(&mut self, line: &str) {
        let stdin = self.stdin.as_mut().unwrap();
        stdin.write_all(format!("{line}\n").as_bytes()).unwrap();
        stdin.flush().unwrap();
    }

    /// Reads an answer; `false` at the end of the cell.
    fn step(&mut self) -> bool {
        let answer = self.answer();
        let text = |index: usize| answer[index].as_str().unwrap();
        match text(0) {
            "stdout" => self.cell.out.push_str(text(1)),
            "stderr" => self.cell.err.push_str(text(1)),
            "error" => self.cell.error.push_str(text(1)),
            "display" => {
                let mimes = answer[1].as_array().unwrap();
                self.cell.mimes.extend(mimes.iter().map(|it| it.as_str().unwrap().to_owned()));
                self.cell.shown.extend(text(2).chars().take(10_000));
            }
            "done" => return false,
            other => panic!("the driver says {other}"),
        }
        true
    }

    fn answer(&mut self) -> Value {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        serde_json::from_str(&line).expect("the driver answers in JSON until its end")
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        // The end of its input ends the driver, which then ends its kernel.
        drop(self.stdin.take());
        let _ = self.child.wait();
    }
}

/// The folder of the workspace, of whichever package this file is compiled with.
pub(crate) fn checkout() -> PathBuf {
    let mut folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    folders.find(|it| it.join("Cargo.lock").is_file()).unwrap().to_owned()
}
