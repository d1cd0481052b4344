//! The notebook's side: settings, the agent's process, and what its ranks have returned.

use std::any::type_name;
use std::env;
use std::ffi::OsString;
use std::fmt::{Debug, Display};
use std::fs;
use std::io::{self, Write};
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use brigade_launch::children::ChildRanks;
use brigade_rank_env::World;
use brigade_rank_env::env::ACCELERATE_USE_CPU;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::{NotebookError, call, program};

/// Calls a function of the notebook on `num_processes` ranks of this host, and returns the result of each, by rank.
///
/// Corresponds to [Accelerate's
/// `notebook_launcher`](https://huggingface.co/docs/accelerate/package_reference/launchers): with one process it calls
/// the function in the notebook's own process. Several arguments are passed as a tuple. [`NotebookLauncher`] has
/// further settings, such as those for several hosts.
///
/// # Errors
/// Returns the errors of [`NotebookLauncher::launch`].
pub fn notebook_launcher<F, A, R, E>(
    function: F,
    arguments: A,
    num_processes: usize,
) -> Result<Vec<R>, NotebookError>
where
    F: Fn(A) -> Result<R, E> + Copy + 'static,
    A: Serialize + DeserializeOwned,
    R: Serialize + DeserializeOwned,
    E: Display + Debug,
{
    NotebookLauncher::new(num_processes).launch(function, arguments)
}

/// Calls a function on `num_processes` ranks on CPUs, for a test of a training function, and returns the result of
/// each, by rank.
///
/// It works in a notebook and in a plain test or program, as [Accelerate's
/// `debug_launcher`](https://huggingface.co/docs/accelerate/package_reference/launchers) does. The ranks of a test are
/// started as the same test, and those of a program as the program with its arguments: each rank runs to this call,
/// takes part in it, and exits at its end. Code before the call therefore runs in each rank, too.
///
/// ```
/// use brigade_notebook::debug_launcher;
///
/// fn train(rate: f64) -> Result<f64, std::fmt::Error> {
///     Ok(2.0 * rate)
/// }
///
/// assert_eq!(debug_launcher(train, 0.5, 2)?, [1.0, 1.0]);
/// # Ok::<(), brigade_notebook::NotebookError>(())
/// ```
///
/// # Errors
/// Returns the errors of [`NotebookLauncher::launch`]. In a test or program, [`NotebookError::Failed`] also when a rank
/// has not ended after 60 s; its message shows where each rank hangs.
#[track_caller]
pub fn debug_launcher<F, A, R, E>(
    function: F,
    arguments: A,
    num_processes: usize,
) -> Result<Vec<R>, NotebookError>
where
    F: Fn(A) -> Result<R, E> + Copy + 'static,
    A: Serialize + DeserializeOwned,
    R: Serialize + DeserializeOwned,
    E: Display + Debug,
{
    let launcher = NotebookLauncher::new(num_processes).cpu(true);
    let address = call::entry::<F, A, R, E>().address()?;
    if !is_program(&address.object) {
        return launcher.launch(function, arguments);
    }
    launcher.check()?;
    let ranks =
        ChildRanks::at(Location::caller(), num_processes).variable(ACCELERATE_USE_CPU, "true");
    ranks
        .call(|_| function(arguments))
        .map_err(|report| NotebookError::Failed { message: report.to_string(), rank: None })
}

/// A launch of ranks with settings, whose names are those of Accelerate's arguments.
///
/// Example for two hosts, each with a notebook of its own:
///
/// ```no_run
/// use brigade_notebook::NotebookLauncher;
///
/// # fn train(_: ()) -> Result<(), std::fmt::Error> { Ok(()) }
/// let launcher = NotebookLauncher::new(8).num_nodes(2).node_rank(0).master_addr("10.0.0.1");
/// launcher.launch(train, ())?;
/// # Ok::<(), brigade_notebook::NotebookError>(())
/// ```
#[derive(Clone, Debug)]
pub struct NotebookLauncher {
    num_processes: usize,
    num_nodes: usize,
    node_rank: usize,
    master_addr: String,
    use_port: u16,
    mixed_precision: Option<String>,
    cpu: bool,
    max_restarts: u32,
    arguments: Vec<OsString>,
    program: Option<PathBuf>,
}

impl NotebookLauncher {
    /// Makes a launch of `num_processes` ranks on this host.
    #[must_use]
    pub fn new(num_processes: usize) -> Self {
        Self {
            num_processes,
            num_nodes: 1,
            node_rank: 0,
            master_addr: "127.0.0.1".to_owned(),
            use_port: 29500,
            mixed_precision: None,
            cpu: false,
            max_restarts: 0,
            arguments: Vec::new(),
            program: None,
        }
    }

    /// Sets the number of hosts, each of which has a notebook that launches. Defaults to 1.
    #[must_use]
    pub fn num_nodes(mut self, hosts: usize) -> Self {
        self.num_nodes = hosts;
        self
    }

    /// Sets the number of this host, from 0.
    #[must_use]
    pub fn node_rank(mut self, rank: usize) -> Self {
        self.node_rank = rank;
        self
    }

    /// Sets the name or address of the host with number 0, for several hosts.
    #[must_use]
    pub fn master_addr(mut self, host: impl Into<String>) -> Self {
        self.master_addr = host.into();
        self
    }

    /// Sets the TCP port of the rendezvous of several hosts. Defaults to 29500. A single host uses any free port.
    #[must_use]
    pub fn use_port(mut self, port: u16) -> Self {
        self.use_port = port;
        self
    }

    /// Sets the mixed precision that `Accelerator::new` uses in the ranks: `no`, `fp16` or `bf16`.
    #[must_use]
    pub fn mixed_precision(mut self, precision: impl Into<String>) -> Self {
        self.mixed_precision = Some(precision.into());
        self
    }

    /// Sets whether the ranks run on CPUs even if there are GPUs.
    #[must_use]
    pub fn cpu(mut self, cpu: bool) -> Self {
        self.cpu = cpu;
        self
    }

    /// Sets the maximum number of restarts of the ranks after a failure. Defaults to 0.
    #[must_use]
    pub fn max_restarts(mut self, restarts: u32) -> Self {
        self.max_restarts = restarts;
        self
    }

    /// Adds an argument of `brigade launch`, for settings without a method of their own: `--log-dir`, `--bind`.
    #[must_use]
    pub fn argument(mut self, argument: impl Into<OsString>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// Sets the path of the program `brigade`, which starts the ranks. Defaults to the variable `BRIGADE_PROGRAM`, else
    /// to the first one in `PATH`, else to the one in cargo's folder of programs.
    #[must_use]
    pub fn program(mut self, program: impl Into<PathBuf>) -> Self {
        self.program = Some(program.into());
        self
    }

    /// Calls the function on the ranks, waits for them, and returns the results of this host's ranks, by rank. Their
    /// output appears in the cell as they print it; interrupting the cell stops them.
    ///
    /// The function must be a `fn` of the notebook: a closure would capture variables that other processes do not have.
    ///
    /// # Errors
    /// [`NotebookError::NotAFunction`] for a closure; [`NotebookError::Failed`] with the message of the rank that
    /// failed first; [`NotebookError::Setting`] for settings that contradict each other; [`NotebookError::NoProgram`]
    /// and [`NotebookError::Program`] when `brigade` is missing or of another version; [`NotebookError::Message`] when
    /// an argument or a result cannot be serialized; [`NotebookError::InsideARank`] in a process that is a rank.
    pub fn launch<F, A, R, E>(&self, function: F, arguments: A) -> Result<Vec<R>, NotebookError>
    where
        F: Fn(A) -> Result<R, E> + Copy + 'static,
        A: Serialize + DeserializeOwned,
        R: Serialize + DeserializeOwned,
        E: Display + Debug,
    {
        self.check()?;
        let world = World::from_env().map_err(|error| NotebookError::Setting(error.to_string()))?;
        if !world.is_alone() {
            return Err(NotebookError::InsideARank { world: world.to_string() });
        }
        if self.num_processes == 1 && self.num_nodes == 1 {
            say("Launching training on one process.");
            let result = function(arguments);
            let result = result.map_err(|error| NotebookError::Function(format!("{error:#}")))?;
            return Ok(vec![result]);
        }
        if brigade_dylib_call::function::<F, A, _>().is_none() {
            return Err(NotebookError::NotAFunction { function: type_name::<F>() });
        }
        let address = call::entry::<F, A, R, E>().address()?;
        if is_program(&address.object) {
            return Err(NotebookError::InAProgram { program: address.object });
        }

        let folder =
            call::Folder::new().map_err(NotebookError::system("make a folder for the call"))?;
        call::write(&call::arguments_file(folder.path()), &arguments, "the arguments")?;
        drop(arguments);
        let program = self.program.clone().map_or_else(program::find, Ok)?;
        say(&format!("Launching training on {} processes.", self.num_processes * self.num_nodes));
        let mut command = Command::new(&program);
        command.arg("notebook-agent").arg("--parent").arg(std::process::id().to_string());
        command.args(self.launch_arguments(&events_file(folder.path())));
        command.arg("--").arg(&program).arg("notebook-rank");
        command.arg(&address.object).arg(address.offset.to_string());
        command.env(call::FOLDER, folder.path()).stdin(Stdio::null());
        let status = command.status().map_err(|error| NotebookError::Program {
            program: program.clone(),
            reason: format!("cannot be started: {error}"),
        })?;
        if !status.success() {
            return Err(failure(folder.path(), &program, status));
        }
        let results = (0..self.num_processes).map(|rank| {
            call::read(
                &call::result_file(folder.path(), rank),
                &format!("the result of local rank {rank}"),
            )
        });
        results.collect()
    }

    fn check(&self) -> Result<(), NotebookError> {
        let wrong = |reason: String| Err(NotebookError::Setting(reason));
        if self.num_processes == 0 {
            return wrong("num_processes is 0, expected at least 1".to_owned());
        }
        if self.node_rank >= self.num_nodes {
            return wrong(format!(
                "node_rank is {} of {} hosts, expected a number from 0 to num_nodes - 1",
                self.node_rank, self.num_nodes
            ));
        }
        Ok(())
    }

    fn launch_arguments(&self, events: &Path) -> Vec<OsString> {
        let mut all: Vec<OsString> = Vec::new();
        let mut option = |name: &str, value: &str| all.extend([name.into(), value.into()]);
        option("--nproc", &self.num_processes.to_string());
        option("--max-restarts", &self.max_restarts.to_string());
        if let Some(precision) = &self.mixed_precision {
            option("--mixed-precision", precision);
        }
        if self.num_nodes > 1 {
            option("--nnodes", &self.num_nodes.to_string());
            option("--node-rank", &self.node_rank.to_string());
            option("--master-addr", &self.master_addr);
            option("--master-port", &self.use_port.to_string());
        }
        if self.cpu {
            all.push("--cpu".into());
        }
        all.extend(["--events".into(), events.into()]);
        all.extend(self.arguments.iter().cloned());
        all
    }
}

/// Returns `true` for the running program, and `false` for a library that it has loaded.
fn is_program(object: &Path) -> bool {
    env::current_exe().is_ok_and(|program| program == object)
}

/// Prints a line into the cell, before the ranks print theirs.
fn say(line: &str) {
    let mut out = io::stdout().lock();
    let _ = out.write_all(format!("{line}\n").as_bytes()).and_then(|()| out.flush());
}

fn events_file(folder: &Path) -> PathBuf {
    folder.join("events.jsonl")
}

/// The parts that are read of a `cause` of docs/events.md.
#[derive(Debug, Deserialize)]
struct Cause {
    message: String,
    rank: Option<usize>,
    error: Option<String>,
    #[serde(default)]
    last_lines: Vec<String>,
}

/// The last cause among the job's events, else the exit code.
fn failure(folder: &Path, program: &Path, status: std::process::ExitStatus) -> NotebookError {
    let events = fs::read_to_string(events_file(folder)).unwrap_or_default();
    let mut causes = events.lines().filter_map(|line| {
        let event: serde_json::Value = serde_json::from_str(line).ok()?;
        (event["event"] == "cause").then(|| serde_json::from_value::<Cause>(event).ok()).flatten()
    });
    let Some(cause) = causes.next_back() else {
        // The agent has printed the reason to standard error, which appears in the cell.
        return NotebookError::Program {
            program: program.to_owned(),
            reason: format!("could not launch the ranks ({status}); its message is above"),
        };
    };
    let detail = cause.error.unwrap_or_else(|| cause.last_lines.join("\n"));
    let message = match detail.trim() {
        "" => cause.message,
        detail => format!("{}: {detail}", cause.message),
    };
    NotebookError::Failed { message, rank: cause.rank }
}
