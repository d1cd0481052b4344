//! Two hosts in namespaces, with or without a real Slurm, which end with the test.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// Cluster of `node1` and `node2`, with 4 cores each. It has process, network and mount namespaces of its own, so any
/// number of them can exist in parallel, and nothing survives it: its first process ends with this value, with this
/// thread and with this process.
pub(crate) struct Cluster {
    unshare: Child,
    /// Process ID of the cluster's first process, outside of it.
    first: u32,
    folder: TempDir,
}

/// Result of a command in the cluster.
pub(crate) struct Run {
    /// Exit code, or 128 + the signal's number.
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    /// Returns the lines of stdout, sorted: tasks print in any order.
    pub(crate) fn lines(&self) -> Vec<&str> {
        let mut lines: Vec<&str> = self.stdout.lines().collect();
        lines.sort_unstable();
        lines
    }
}

impl Cluster {
    /// Creates hosts without Slurm.
    pub(crate) fn bare() -> Self {
        Self::start("")
    }

    /// Creates hosts with Slurm, ready for jobs.
    pub(crate) fn slurm() -> Self {
        let mut cluster = Self::start("slurm");
        cluster.wait_until("its hosts are idle", |cluster| {
            let hosts = cluster.run(&["sinfo", "--noheader", "--Node", "--format=%T"]);
            hosts.lines() == ["idle", "idle"]
        });
        cluster
    }

    fn start(with: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        // Slurm's daemons and munge check the permissions of their files.
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
        for name in ["state", "spool.node1", "spool.node2"] {
            fs::create_dir(path.join(name)).unwrap();
        }
        fs::write(path.join("hosts"), "127.0.0.1 localhost\n10.77.0.1 node1\n10.77.0.2 node2\n")
            .unwrap();
        let conf = include_str!("cluster/slurm.conf").replace("FOLDER", path.to_str().unwrap());
        fs::write(path.join("slurm.conf"), conf).unwrap();
        // No other process can reach the cluster's munge, so the key need not be secret.
        let key = path.join("munge.key");
        fs::write(&key, [7; 128]).unwrap();
        fs::set_permissions(&key, fs::Permissions::from_mode(0o400)).unwrap();
        let ssh = path.join("ssh");
        fs::write(&ssh, include_str!("cluster/ssh.sh")).unwrap();
        fs::set_permissions(&ssh, fs::Permissions::from_mode(0o755)).unwrap();
        let script = path.join("hosts.sh");
        fs::write(&script, include_str!("cluster/hosts.sh")).unwrap();

        let mut command = clean_command("setpriv", path);
        command.args(["--pdeathsig", "KILL", "unshare", "--net", "--pid", "--mount", "--uts"]);
        command.args(["--ipc", "--fork", "--kill-child", "--mount-proc", "sh"]);
        command.arg(&script).arg(path).arg(with).stdin(Stdio::null());
        let output = fs::File::create(path.join(LOG)).unwrap();
        command.stdout(output.try_clone().unwrap()).stderr(output);
        let mut cluster = Self { unshare: command.spawn().unwrap(), first: 0, folder };
        cluster
            .wait_until("its hosts are up", |cluster| cluster.folder.path().join("ready").exists());
        let pid = cluster.unshare.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        cluster.first = children.trim().parse().unwrap();
        cluster
    }

    pub(crate) fn wait_until(&mut self, what: &str, condition: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !condition(self) {
            let ended = self.unshare.try_wait().unwrap();
            assert!(ended.is_none(), "the cluster ended before {what}");
            assert!(start.elapsed() < LIMIT, "not within {} s: {what}", LIMIT.as_secs());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns a folder that all hosts share.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Runs a command on node1, in the shared folder.
    pub(crate) fn run(&self, words: &[&str]) -> Run {
        let mut command = clean_command("nsenter", self.folder());
        command.args(["--target", &self.first.to_string(), "--all"]);
        command.arg(format!("--wd={}", self.folder().display()));
        let output = command.args(words).stdin(Stdio::null()).output().unwrap();
        let status = output.status;
        Run {
            code: status.code().unwrap_or_else(|| 128 + status.signal().unwrap()),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// Submits a batch script to Slurm, and returns the job's ID.
    pub(crate) fn submit(&self, script: &str, flags: &str) -> String {
        fs::write(self.folder().join("script"), script).unwrap();
        let submit = format!("sbatch --parsable --output=batch.%j {flags} script");
        let run = self.run(&submit.split_whitespace().collect::<Vec<_>>());
        assert_eq!(run.code, 0, "{}", run.stderr);
        run.stdout.trim().to_owned()
    }

    /// Waits for the end of a job, and returns its exit code and its output.
    pub(crate) fn outcome(&self, job: &str) -> (i32, String) {
        // `sbatch --wait` polls only every few seconds.
        let start = Instant::now();
        let code = loop {
            assert!(start.elapsed() < LIMIT, "job {job} has not ended in {} s", LIMIT.as_secs());
            let facts = self.run(&["scontrol", "show", "job", "--oneliner", job]).stdout;
            let fact = |name: &str| {
                let fact = facts.split_whitespace().find_map(|fact| fact.strip_prefix(name));
                fact.unwrap_or_default().to_owned()
            };
            match fact("JobState=").as_str() {
                "PENDING" | "CONFIGURING" | "RUNNING" | "COMPLETING" => {
                    thread::sleep(Duration::from_millis(50));
                }
                "COMPLETED" | "FAILED" => {
                    let (code, signal) = fact("ExitCode=").split_once(':').map(number).unwrap();
                    break if signal > 0 { 128 + signal } else { code };
                }
                state => panic!("job {job} is {state}"),
            }
        };
        let output = fs::read_to_string(self.folder().join(format!("batch.{job}")));
        (code, output.unwrap())
    }

    /// Submits a batch script and waits for its end.
    pub(crate) fn batch(&self, script: &str, flags: &str) -> (i32, String) {
        self.outcome(&self.submit(script, flags))
    }

    /// Returns the daemons' logs.
    pub(crate) fn log(&self) -> String {
        let text = fs::read(self.folder().join(LOG)).unwrap_or_default();
        String::from_utf8_lossy(&text).into_owned()
    }
}

fn number((code, signal): (&str, &str)) -> (i32, i32) {
    (code.parse().unwrap(), signal.parse().unwrap())
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("{}", self.log());
        }
        // When the first process ends, the kernel ends all others, before `unshare` notices.
        let first = i32::try_from(self.first).ok().filter(|first| *first > 0);
        match first {
            Some(first) => drop(kill(Pid::from_raw(first), Signal::SIGKILL)),
            None => drop(self.unshare.kill()),
        }
        let _ = self.unshare.wait();
    }
}

/// Returns a command without the test's variables of schedulers, with the programs under test in PATH.
fn clean_command(program: &str, folder: &Path) -> Command {
    let mut command = Command::new(program);
    let prefixes = ["SLURM", "SBATCH", "SALLOC", "SRUN", "OMPI", "PMI", "MPI", "MV2", "PET", "JOB"];
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if prefixes.iter().any(|prefix| text.starts_with(prefix)) {
            command.env_remove(&name);
        }
    }
    for variable in brigade_rank_env::env::TABLE {
        command.env_remove(variable.name);
    }
    // Tests of other packages start other programs.
    let brigade = Path::new(option_env!("CARGO_BIN_EXE_brigade").unwrap_or_default());
    let brigade = brigade.parent().unwrap_or_else(|| Path::new("/usr/bin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::iter::once(brigade.to_owned())
        .chain(std::env::split_paths(&path))
        .chain([SBIN.into(), "/sbin".into()]);
    command
        .env("PATH", std::env::join_paths(folders).unwrap())
        .env("SLURM_CONF", folder.join("slurm.conf"))
        .env("FOLDER", folder)
        .env("TMPDIR", folder)
        // Open MPI runs as root only with both variables.
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command
}

const LOG: &str = "log";
/// Limit that is only exceeded by something that never happens.
const LIMIT: Duration = Duration::from_secs(90);
/// Folder of Debian's daemons, which is not in every user's PATH.
const SBIN: &str = "/usr/sbin";
