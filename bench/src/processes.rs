//! Measurements as processes: this program, a peer's script, the launcher.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

/// One side of a comparison: how to start it.
pub(crate) struct Side {
    program: PathBuf,
    arguments: Vec<String>,
    /// `None` takes a variable away.
    environment: Vec<(&'static str, Option<String>)>,
}

impl Side {
    /// A measurement of this program.
    pub(crate) fn own(name: &str) -> Self {
        let program = std::env::current_exe().unwrap_or_else(|_| "brigade-bench".into());
        Self::command(program, ["--measure".to_owned(), name.to_owned()])
    }

    /// A script of a peer with its arguments, where one is installed.
    pub(crate) fn peer(script: &str, arguments: &[&str]) -> Option<Self> {
        let mut all = vec![script_path(script)];
        all.extend(arguments.iter().map(|&argument| argument.to_owned()));
        Self::of_python(all)
    }

    /// Python, which finds its own libtorch: in the archive for GPU machines, the way to ours is not its.
    fn of_python(arguments: Vec<String>) -> Option<Self> {
        let mut side = Self::command(python()?.into(), arguments);
        if let Ok(path) = std::env::var("BRIGADE_PEER_LIBRARY_PATH") {
            side.environment.push(("LD_LIBRARY_PATH", Some(path)));
        }
        Some(side)
    }

    /// A script under torchrun, on two processes of one thread.
    pub(crate) fn torchrun(script: &str, arguments: &[&str]) -> Option<Self> {
        let launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"];
        let mut all: Vec<String> = launcher.map(str::to_owned).into();
        all.push(script_path(script));
        all.extend(arguments.iter().map(|&argument| argument.to_owned()));
        Self::of_python(all)
    }

    /// Any command.
    pub(crate) fn command(program: PathBuf, arguments: impl IntoIterator<Item = String>) -> Self {
        Self { program, arguments: arguments.into_iter().collect(), environment: Vec::new() }
    }

    /// Sets a variable of its environment.
    pub(crate) fn variable(mut self, name: &'static str, value: &'static str) -> Self {
        self.environment.push((name, Some(value.to_owned())));
        self
    }

    /// Takes a variable out of its environment.
    pub(crate) fn without_variable(mut self, name: &'static str) -> Self {
        self.environment.push((name, None));
        self
    }

    /// The lists of numbers that it prints as JSON in its last line.
    pub(crate) fn lists<const N: usize>(&self) -> Result<[Vec<f64>; N]> {
        let output = self.output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let last = text.lines().last().unwrap_or_default();
        let lists: Vec<Vec<f64>> = serde_json::from_str(last)
            .with_context(|| format!("{} printed {last:?}", self.line()))?;
        let found = lists.len();
        lists.try_into().map_err(|_| anyhow!("{} printed {found} lists, not {N}", self.line()))
    }

    /// Seconds from its start to its end.
    pub(crate) fn seconds_until_end(&self) -> Result<f64> {
        let start = Instant::now();
        self.output()?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Runs it to its end, which fails with what it printed to stderr if the process does.
    fn output(&self) -> Result<Output> {
        let output = self.start().output().with_context(|| self.line())?;
        if !output.status.success() {
            let printed = String::from_utf8_lossy(&output.stderr);
            bail!("{} ended with {}: {}", self.line(), output.status, printed.trim());
        }
        Ok(output)
    }

    fn start(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).stdin(Stdio::null());
        for (name, value) in &self.environment {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    }

    fn line(&self) -> String {
        format!("{} {}", self.program.display(), self.arguments.join(" "))
    }
}

/// Steps of two processes that take turns step by step, as where one process cannot hold both sides:
/// seconds of each side's steps, in order.
pub(crate) fn step_in_turns(sides: &[Side; 2], steps: usize) -> Result<[Vec<f64>; 2]> {
    let mut running = [Stepping::start(&sides[0])?, Stepping::start(&sides[1])?];
    let mut seconds = [Vec::with_capacity(steps), Vec::with_capacity(steps)];
    for number in 0..WARM_UP + steps {
        for turn in 0..2 {
            let side = (number + turn) % 2;
            let took = running[side].step().with_context(|| sides[side].line())?;
            if number >= WARM_UP {
                seconds[side].push(took);
            }
            thread::sleep(PAUSE);
        }
    }
    Ok(seconds)
}

/// Turns that do not count.
const WARM_UP: usize = 3;

/// After a step, OpenMP's threads spin for some milliseconds, which is not to slow down the other side.
const PAUSE: Duration = Duration::from_millis(8);

/// A process that takes a step when it is asked to. Dropped, it ends.
struct Stepping {
    process: Child,
    ask: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Stepping {
    fn start(side: &Side) -> Result<Self> {
        let mut command = side.start();
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().with_context(|| side.line())?;
        let ask = process.stdin.take().context("its input is not a pipe")?;
        let answers = BufReader::new(process.stdout.take().context("its output is not a pipe")?);
        Ok(Self { process, ask, answers })
    }

    /// Seconds of its next step.
    fn step(&mut self) -> Result<f64> {
        self.ask.write_all(b"\n").context("it has ended")?;
        let mut answer = String::new();
        self.answers.read_line(&mut answer)?;
        answer.trim().parse().with_context(|| format!("it answered {answer:?}"))
    }
}

impl Drop for Stepping {
    fn drop(&mut self) {
        // Fails where it has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The binary `brigade`, beside this one.
pub(crate) fn brigade() -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program")?;
    let brigade = own.with_file_name("brigade");
    if !brigade.exists() {
        bail!("{} is not there: cargo build --release -p brigade-cli", brigade.display());
    }
    Ok(brigade)
}

/// The middle value. Sorts.
pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

fn python() -> Option<OsString> {
    std::env::var_os("BRIGADE_PEER_PYTHON")
}

fn script_path(script: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(script).to_string_lossy().into_owned()
}
