//! Processes of measurements: this program, a peer's script, the launcher.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

/// Command of one side of a comparison.
pub(crate) struct Side {
    program: PathBuf,
    arguments: Vec<String>,
    /// Environment variables. `None` removes a variable.
    environment: Vec<(&'static str, Option<&'static str>)>,
    compiles: bool,
}

impl Side {
    /// Returns a measurement of this program.
    pub(crate) fn own(name: &str) -> Self {
        let program = std::env::current_exe().unwrap_or_else(|_| "brigade-bench".into());
        Self::command(program, ["--measure".to_owned(), name.to_owned()])
    }

    /// Returns a script of a peer with its arguments, if the peer is installed.
    pub(crate) fn peer(script: &str, arguments: &[&str]) -> Option<Self> {
        let mut all = vec![script_path(script)];
        all.extend(arguments.iter().map(|&argument| argument.to_owned()));
        Some(Self::command(python()?.into(), all))
    }

    /// Returns a script under torchrun, on two processes of one thread.
    pub(crate) fn torchrun(script: &str, arguments: &[&str]) -> Option<Self> {
        let launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"];
        let mut all: Vec<String> = launcher.map(str::to_owned).into();
        all.push(script_path(script));
        all.extend(arguments.iter().map(|&argument| argument.to_owned()));
        Some(Self::command(python()?.into(), all))
    }

    /// Returns any command.
    pub(crate) fn command(program: PathBuf, arguments: impl IntoIterator<Item = String>) -> Self {
        let arguments = arguments.into_iter().collect();
        Self { program, arguments, environment: Vec::new(), compiles: false }
    }

    /// Sets an environment variable.
    pub(crate) fn variable(mut self, name: &'static str, value: &'static str) -> Self {
        self.environment.push((name, Some(value)));
        self
    }

    /// Removes an environment variable.
    pub(crate) fn without_variable(mut self, name: &'static str) -> Self {
        self.environment.push((name, None));
        self
    }

    /// Marks a side whose first block compiles for a long time: [`blocks_in_turns`] warms up the others meanwhile.
    pub(crate) fn compiles(mut self) -> Self {
        self.compiles = true;
        self
    }

    /// Runs the command and returns the lists of numbers in its last line, which is JSON.
    pub(crate) fn lists<const N: usize>(&self) -> Result<[Vec<f64>; N]> {
        let lists: Vec<Vec<f64>> = serde_json::from_value(self.json()?)
            .with_context(|| format!("{} printed no lists of numbers", self.line()))?;
        let found = lists.len();
        lists.try_into().map_err(|_| anyhow!("{} printed {found} lists, not {N}", self.line()))
    }

    /// Runs the command and returns its last line, which is JSON.
    pub(crate) fn json(&self) -> Result<serde_json::Value> {
        let output = self.output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let last = text.lines().last().unwrap_or_default();
        serde_json::from_str(last).with_context(|| format!("{} printed {last:?}", self.line()))
    }

    /// Measures the seconds from its start to its end.
    pub(crate) fn seconds_until_end(&self) -> Result<f64> {
        let start = Instant::now();
        self.output()?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Measures the seconds from its start to its first line on stdout. It then ends by itself.
    pub(crate) fn seconds_until_line(&self) -> Result<f64> {
        let mut command = self.start();
        command.stdout(Stdio::piped());
        let start = Instant::now();
        let mut process = command.spawn().with_context(|| self.line())?;
        let stdout = process.stdout.take().context("its output is not a pipe")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        let seconds = start.elapsed().as_secs_f64();
        let status = process.wait()?;
        if !status.success() || line.is_empty() {
            bail!("{} ended with {status} after printing {line:?}", self.line());
        }
        Ok(seconds)
    }

    /// Runs the command to its end. Fails with its stderr if the process does.
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

/// Runs two processes that take turns step by step, if one process cannot contain both sides. Returns the seconds of
/// each side's steps, in order.
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

/// Number of turns that do not count.
const WARM_UP: usize = 3;

/// Pause after a step, for which OpenMP's threads spin for some milliseconds: it must not slow down the other side.
const PAUSE: Duration = Duration::from_millis(8);

/// Process that takes a step on request. It is ended when dropped.
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

    /// Returns the seconds of its next step.
    fn step(&mut self) -> Result<f64> {
        self.ask()?;
        let answer = self.answer()?;
        answer.trim().parse().with_context(|| format!("it answered {answer:?}"))
    }

    fn ask(&mut self) -> Result<()> {
        self.ask.write_all(b"\n").context("it has ended")
    }

    fn answer(&mut self) -> Result<String> {
        let mut answer = String::new();
        self.answers.read_line(&mut answer)?;
        Ok(answer)
    }

    /// Returns the answer to [`Stepping::ask`] for a block of steps.
    fn block(&mut self) -> Result<Block> {
        let answer = self.answer()?;
        let numbers: [f64; 2] = serde_json::from_str(&answer)
            .with_context(|| format!("it answered {answer:?} where two numbers were expected"))?;
        Ok(Block { seconds: numbers[0], peak: numbers[1] })
    }
}

/// Consecutive steps of one side, without synchronisation with the device in between.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Block {
    /// Mean duration of a step in seconds.
    pub(crate) seconds: f64,
    /// Peak device memory of tensors of the process until then, in bytes; 0 on a CPU.
    pub(crate) peak: f64,
}

/// Outcome of a side of [`blocks_in_turns`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Outcome {
    /// Median of its blocks' seconds, with the peak memory.
    Measured(Block),
    /// It ended early, or its answer was not valid; its messages are on stderr.
    Failed,
    /// A program that it needs is not installed.
    NotInstalled,
}

/// Runs blocks of steps of processes in turns. All of them start at once and stay, so that imports and compilation are
/// paid once and not in every round. A side that fails does not end the others.
///
/// The sides warm up one after the other, so that none chooses its kernels while another one computes; one that
/// [compiles](Side::compiles) begins before the others, since compiling uses the processor.
pub(crate) fn blocks_in_turns<const N: usize>(
    rounds: usize,
    sides: &[Option<Side>; N],
) -> [Outcome; N] {
    let mut turns = sides.each_ref().map(|side| Turns::start(side.as_ref()));
    let (mut beside, mut others): (Vec<_>, Vec<_>) =
        turns.iter_mut().partition(|turn| turn.side.is_some_and(|side| side.compiles));
    beside.iter_mut().for_each(|turn| turn.ask());
    for turn in &mut others {
        turn.ask();
        turn.answer();
    }
    beside.iter_mut().for_each(|turn| turn.answer());
    for turn in &mut turns {
        turn.blocks.clear();
    }
    for round in 0..rounds {
        for number in 0..N {
            let turn = &mut turns[(round + number) % N];
            turn.ask();
            turn.answer();
        }
    }
    turns.map(Turns::outcome)
}

/// Side of [`blocks_in_turns`], without a process once it has failed.
struct Turns<'a> {
    side: Option<&'a Side>,
    process: Option<Stepping>,
    blocks: Vec<Block>,
}

impl<'a> Turns<'a> {
    fn start(side: Option<&'a Side>) -> Self {
        let mut turns = Self { side, process: None, blocks: Vec::new() };
        match side.map(Stepping::start).transpose() {
            Ok(process) => turns.process = process,
            Err(error) => turns.fail(&error),
        }
        turns
    }

    fn ask(&mut self) {
        if let Some(Err(error)) = self.process.as_mut().map(Stepping::ask) {
            self.fail(&error);
        }
    }

    fn answer(&mut self) {
        match self.process.as_mut().map(Stepping::block).transpose() {
            Ok(block) => self.blocks.extend(block),
            Err(error) => self.fail(&error),
        }
    }

    fn fail(&mut self, error: &anyhow::Error) {
        let line = self.side.map(Side::line).unwrap_or_default();
        eprintln!("  failed: {line}: {error:#}");
        // Ends the process.
        self.process = None;
    }

    fn outcome(self) -> Outcome {
        match (self.side, self.process) {
            (None, _) => Outcome::NotInstalled,
            (Some(_), None) => Outcome::Failed,
            (Some(_), Some(_)) => {
                let mut seconds: Vec<f64> = self.blocks.iter().map(|it| it.seconds).collect();
                let peak = self.blocks.iter().map(|it| it.peak).fold(0.0, f64::max);
                Outcome::Measured(Block { seconds: median(&mut seconds), peak })
            }
        }
    }
}

impl Drop for Stepping {
    fn drop(&mut self) {
        // Fails if it has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns the binary `brigade`, beside this one.
pub(crate) fn brigade() -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program")?;
    let brigade = own.with_file_name("brigade");
    if !brigade.exists() {
        bail!("{} is not there: cargo build --release -p brigade-cli", brigade.display());
    }
    Ok(brigade)
}

/// Returns the median. Sorts the values.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Side {
        Side::command("sh".into(), ["-c".to_owned(), script.to_owned()])
    }

    #[test]
    fn blocks_are_medians_of_the_rounds_after_the_warm_up() {
        // 9 s in the warm-up, then 1, 2 and 3, in the order of its turns.
        let counting =
            "read line; echo '[9, 50]'; for n in 2 1 3; do read line; echo \"[$n, $n]\"; done";
        let compiling = shell("while read line; do echo '[0.5, 7]'; done").compiles();
        let found = blocks_in_turns(3, &[Some(compiling), Some(shell(counting))]);
        let expected = [Block { seconds: 0.5, peak: 7.0 }, Block { seconds: 2.0, peak: 3.0 }];
        assert_eq!(found, expected.map(Outcome::Measured));
    }

    #[test]
    fn a_side_that_fails_does_not_end_the_others() {
        let found = blocks_in_turns(
            2,
            &[
                Some(shell("exit 3")),
                Some(shell("read line; echo '[1, 0]'; exit 3")),
                Some(shell("while read line; do echo nothing; done")),
                Some(Side::command("/nowhere/a-program".into(), [])),
                None,
                Some(shell("while read line; do echo '[1, 0]'; done")),
            ],
        );
        let measured = Outcome::Measured(Block { seconds: 1.0, peak: 0.0 });
        let failed = Outcome::Failed;
        assert_eq!(found, [failed, failed, failed, failed, Outcome::NotInstalled, measured]);
    }

    #[test]
    fn the_first_line_is_what_is_waited_for() {
        let seconds = shell("echo done; sleep 2").seconds_until_line();
        assert!(seconds.is_ok_and(|seconds| seconds < 2.0));
        assert!(shell("echo done; exit 3").seconds_until_line().is_err());
        assert!(shell("true").seconds_until_line().is_err());
    }
}
