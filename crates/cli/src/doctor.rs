//! `brigade doctor`: runs an examination and prints its report.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use brigade_doctor::{Examination, HostToExamine, Question, Report, Style, Verdict};
use brigade_hardware::Sources;
use brigade_launch::{Color, ColorFacts};
use brigade_ssh::{
    HostAccess, HostListError, HostSpec, LocalFacts, RemoteError, TimeLimits, forwarded_variables,
};
use clap::Args;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::output::Answer;

/// Find what would stop a job, on this host or on several
///
/// Looks at libtorch and the program, GPUs and their driver, clocks, names, interfaces, ports, packet
/// sizes, speeds between hosts, folders, disks, memory, limits and variables. Reports each check as ok,
/// warning or failure, with a remedy.
///
/// Other hosts are reached with the system's ssh and need `brigade` there. Nothing is changed on any
/// host; a file is left in the working folder for a moment, to see whether the hosts share it.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, after_long_help = LONG_EXAMPLES)]
pub(crate) struct DoctorArgs {
    /// Hosts of the job, as for `brigade launch` [default: this one]
    #[arg(long, value_name = "HOST[:N],..", conflicts_with = "hostfile")]
    hosts: Option<String>,

    /// A file of hosts, as DeepSpeed and MPI have them
    #[arg(long, value_name = "FILE")]
    hostfile: Option<PathBuf>,

    /// Program of the job
    ///
    /// It is compared between hosts, with the libraries that it loads
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,

    /// Folder that the job starts in, on every host [default: this one]
    #[arg(long, value_name = "DIR")]
    workdir: Option<PathBuf>,

    /// Folder for log files, to check the room on its disk
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,

    /// Port on the first host where the launchers meet
    #[arg(long, value_name = "PORT")]
    master_port: Option<u16>,

    /// Ports to try between hosts [default: three free ones]
    #[arg(long, value_name = "FIRST-LAST", value_parser = range)]
    port_range: Option<(u16, u16)>,

    /// Do not measure round trips and bandwidths
    ///
    /// Saves half a second for each pair of hosts
    #[arg(long)]
    no_speed: bool,

    /// SSH login timeout per host
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "20")]
    timeout: Duration,

    /// ssh client and its options [env: BRIGADE_SSH]
    ///
    /// As in 'ssh -p 2222'
    #[arg(long, value_name = "COMMAND")]
    ssh_command: Option<String>,

    /// Print all facts and findings as JSON
    #[arg(long)]
    json: bool,
}

/// Examines the hosts, prints the report, and returns the exit code.
pub(crate) fn run(args: &DoctorArgs) -> anyhow::Result<u8> {
    let cancelled = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&cancelled))
            .context("cannot watch for signals")?;
    }
    let facts = LocalFacts::gather()?;
    let what = args.examination(&facts)?;
    let hosts = args.hosts_to_examine(&facts)?;
    let mut progress = Progress::new();
    let cluster =
        brigade_doctor::examine(hosts, &what, &cancelled, &mut |text| progress.show(text));
    progress.clear();
    let Ok(cluster) = cluster else { return Ok(INTERRUPTED) };
    let findings = brigade_doctor::diagnose(&cluster);
    let report = Report { cluster: &cluster, findings: &findings };

    let stdout = io::stdout();
    let style = style(&stdout);
    let mut out = io::BufWriter::new(stdout.lock());
    let written = if args.json {
        report.write_json(&mut Answer::new(&mut out))
    } else {
        report.write_table(&mut out, style)
    };
    match written.and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        written => written?,
    }
    Ok(u8::from(report.verdict() == Verdict::Fail))
}

/// Runs the doctor's process on one host: `brigade __doctor`.
pub(crate) fn play() -> anyhow::Result<u8> {
    let copy = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().map(File::from);
    let (mut input, mut output) = (copy(io::stdin().as_fd())?, copy(io::stdout().as_fd())?);
    let (answered, end) = mpsc::channel();
    let hung_up = answered.clone();
    thread::spawn(move || {
        // Fails when the session has ended.
        let _ = brigade_doctor::serve(&mut input, &mut output, &Sources::system());
        let _ = answered.send(());
    });
    thread::spawn(move || {
        if has_hung_up(io::stdin().as_fd()) {
            // A short request, such as the removal of a file, is still carried out. A measurement is not waited for.
            thread::sleep(LAST_ANSWERS);
            let _ = hung_up.send(());
        }
    });
    // Fails when both threads have ended.
    let _ = end.recv();
    Ok(0)
}

/// Waits until the other side closes a stream. Unread data in it does not matter.
fn has_hung_up(stream: BorrowedFd<'_>) -> bool {
    loop {
        // sshd uses pipes or socket pairs.
        let mut fds = [PollFd::new(&stream, PollFlags::RDHUP)];
        match poll(&mut fds, None) {
            Err(Errno::INTR) => {}
            Err(_) => return false,
            Ok(_) => return fds[0].revents().intersects(PollFlags::HUP | PollFlags::RDHUP),
        }
    }
}

impl DoctorArgs {
    fn hosts(&self) -> Result<Vec<HostSpec>, HostListError> {
        match (&self.hosts, &self.hostfile) {
            (Some(list), _) => HostSpec::parse_list(list),
            (None, Some(file)) => HostSpec::read_file(file),
            (None, None) => HostSpec::parse_list("localhost"),
        }
    }

    /// Uses names that other hosts also resolve to the same hosts.
    fn hosts_to_examine(&self, facts: &LocalFacts) -> anyhow::Result<Vec<HostToExamine>> {
        let (client, limits) = (self.ssh_command.as_deref(), TimeLimits::default());
        let access = HostAccess::resolve(client, self.timeout, limits, facts)?;
        let host = |spec: HostSpec| {
            let here = access.local.is(&spec);
            let command = access.command(&spec, ROLE)?;
            let loopback = spec.name.parse().is_ok_and(|it: IpAddr| it.is_loopback());
            let is_nameless = here && (loopback || spec.name == "localhost");
            let name = if is_nameless { own_name(facts) } else { spec.name };
            Ok(HostToExamine { name, here, ranks: spec.slots, command })
        };
        self.hosts()?.into_iter().map(host).collect()
    }

    fn examination(&self, facts: &LocalFacts) -> Result<Examination, RemoteError> {
        let ports = self.port_range.map(|(first, last)| {
            let mut ports = vec![first, first + (last - first) / 2, last];
            ports.dedup();
            ports
        });
        let text = |text: OsString| text.to_string_lossy().into_owned();
        let variables = forwarded_variables(&[], facts)?.variables.into_iter();
        Ok(Examination {
            question: Question {
                program: self.program.clone(),
                working_folder: Some(facts.workdir(self.workdir.clone())?),
                log_folder: self.log_dir.clone(),
                names: Vec::new(),
                variables: variables.map(|(name, value)| (text(name), text(value))).collect(),
            },
            master_port: self.master_port,
            ports: ports.unwrap_or_default(),
            measure: !self.no_speed,
            timeout: self.timeout,
        })
    }
}

fn own_name(facts: &LocalFacts) -> String {
    let name = &facts.host.name;
    if name.is_empty() { "localhost".to_owned() } else { name.clone() }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

fn range(text: &str) -> Result<(u16, u16), String> {
    let numbers = text
        .split_once('-')
        .and_then(|(first, last)| Some((first.trim().parse().ok()?, last.trim().parse().ok()?)));
    match numbers {
        Some((first, last)) if 0 < first && first <= last => Ok((first, last)),
        _ => Err("expected two ports, the smaller one first, as in 40000-40100".to_owned()),
    }
}

fn style(stdout: &io::Stdout) -> Style {
    let columns = terminal_size::terminal_size_of(stdout).map(|(width, _)| usize::from(width.0));
    let [colour, _] = Color::Auto.resolve(ColorFacts::gather());
    Style { width: columns.unwrap_or(WIDTH).min(WIDTH), colour }
}

/// Progress line on a terminal, which the following output replaces.
struct Progress {
    shown: bool,
}

impl Progress {
    fn new() -> Self {
        Self { shown: io::stderr().is_terminal() }
    }

    fn show(&mut self, text: &str) {
        if self.shown {
            let _ = write!(io::stderr(), "\r\u{1b}[K{text} ...");
        }
    }

    fn clear(&mut self) {
        if self.shown {
            let _ = write!(io::stderr(), "\r\u{1b}[K");
        }
    }
}

/// Hidden command, not for users.
pub(crate) const ROLE: &str = "__doctor";
/// Maximum width: longer lines are hard to read.
const WIDTH: usize = 110;
const LAST_ANSWERS: Duration = Duration::from_secs(2);
/// Exit code of a shell after SIGINT.
const INTERRUPTED: u8 = 130;

const EXAMPLES: &str = "\
Examples:
  brigade doctor
  brigade doctor --program ./train
  brigade doctor --hosts node1,node2 --program ./train";

const LONG_EXAMPLES: &str = "\
Examples:
  brigade doctor
  brigade doctor --program ./train --log-dir runs
  brigade doctor --hosts node1,node2 --program ./train
  brigade doctor --hostfile hosts.txt --master-port 29500
  brigade doctor --hosts node1,node2 --json | jq '.findings[] | select(.verdict == \"fail\")'

Exit codes:
  0    no blocking problem found
  1    a blocking problem: a line with FAIL
  2    a wrong argument
  130  interrupted";
