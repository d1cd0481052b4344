//! `brigade doctor`: flags in, an examination out.

use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use brigade_doctor::{Examination, HostToExamine, Question, Report, Sources, Style, Verdict};
use clap::Args;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Find what would stop a job, on this host or on several
///
/// Looks at libtorch and the program, GPUs and their driver, clocks, names, interfaces, ports, packet
/// sizes, speeds between hosts, folders, disks, memory, limits and variables. Says for each whether it
/// is well, what it means if not, and what to do.
///
/// Other hosts are reached with the system's ssh and need `brigade` there. Nothing is changed on any
/// host; a file is left in the working folder for a moment, to see whether the hosts share it.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, after_long_help = LONG_EXAMPLES)]
pub(crate) struct DoctorArgs {
    /// Hosts of the job, as for `brigade launch` [default: this one]
    #[arg(long, value_name = "HOST[:N],...", conflicts_with = "hostfile")]
    hosts: Option<String>,

    /// A file with one host on each line
    #[arg(long, value_name = "FILE")]
    hostfile: Option<PathBuf>,

    /// The program of the job: it is compared between hosts, with the libraries that it loads
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,

    /// The folder that the job starts in, on every host [default: this one]
    #[arg(long, value_name = "FOLDER")]
    workdir: Option<PathBuf>,

    /// The folder for the output of ranks: is there room?
    #[arg(long, value_name = "FOLDER")]
    log_dir: Option<PathBuf>,

    /// The port that the hosts of the job will meet at, on the first of them
    #[arg(long, value_name = "PORT")]
    master_port: Option<u16>,

    /// Try ports of this range between hosts [default: three that the system chooses]
    #[arg(long, value_name = "FIRST-LAST", value_parser = range)]
    port_range: Option<(u16, u16)>,

    /// Measure neither round trips nor bandwidths: half a second less for each pair of hosts
    #[arg(long)]
    no_speed: bool,

    /// How long a host may take to log in to
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "20")]
    timeout: Duration,

    /// The client of ssh with options, such as 'ssh -F my_config'
    #[arg(long, value_name = "COMMAND")]
    ssh_command: Option<String>,

    /// Print everything that was found out, for programs to read
    #[arg(long)]
    json: bool,
}

/// Examines, prints, and gives the exit code.
pub(crate) fn run(args: &DoctorArgs) -> anyhow::Result<u8> {
    let enough = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&enough))
            .context("cannot watch for signals")?;
    }
    let hosts = args.hosts_to_examine()?;
    let what = args.examination();
    let mut progress = Progress::new();
    let cluster = brigade_doctor::examine(hosts, &what, &enough, &mut |text| progress.show(text));
    progress.clear();
    let Ok(cluster) = cluster else { return Ok(INTERRUPTED) };
    let findings = brigade_doctor::diagnose(&cluster);
    let report = Report { cluster: &cluster, findings: &findings };

    let stdout = io::stdout();
    let style = style(&stdout);
    let mut out = io::BufWriter::new(stdout.lock());
    let written =
        if args.json { report.write_json(&mut out) } else { report.write_table(&mut out, style) };
    match written.and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        written => written?,
    }
    Ok(u8::from(report.verdict() == Verdict::Fail))
}

/// The counterpart on each host: `brigade __doctor`.
pub(crate) fn play() -> anyhow::Result<u8> {
    let (sender, ended) = mpsc::channel();
    let input = UntilEnd { input: io::stdin(), ended: sender.clone() };
    thread::spawn(move || {
        // Whoever asked has gone when this fails.
        let _ = brigade_doctor::serve(input, io::stdout(), &Sources::system());
        let _ = sender.send(Event::Answered);
    });
    // When whoever asks has gone, what has been asked is still done if that is soon: taking a file
    // away is. But nobody waits for a measurement any more.
    if let Ok(Event::NoMoreQuestions) = ended.recv() {
        let _ = ended.recv_timeout(LAST_ANSWERS);
    }
    Ok(0)
}

enum Event {
    NoMoreQuestions,
    Answered,
}

/// Standard input, which tells when it has ended.
struct UntilEnd {
    input: io::Stdin,
    ended: mpsc::Sender<Event>,
}

impl Read for UntilEnd {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.input.read(buffer);
        if !matches!(read, Ok(length) if length > 0) {
            let _ = self.ended.send(Event::NoMoreQuestions);
        }
        read
    }
}

impl DoctorArgs {
    fn examination(&self) -> Examination {
        let ports = self.port_range.map(|(first, last)| {
            let mut ports = vec![first, first + (last - first) / 2, last];
            ports.dedup();
            ports
        });
        Examination {
            question: Question {
                program: self.program.clone(),
                working_folder: working_folder(self.workdir.as_deref()),
                log_folder: self.log_dir.clone(),
                ..Question::default()
            },
            master_port: self.master_port,
            ports: ports.unwrap_or_default(),
            measure: !self.no_speed,
            patience: self.timeout,
        }
    }

    fn hosts_to_examine(&self) -> anyhow::Result<Vec<HostToExamine>> {
        let Some(list) = &self.hosts else {
            let mut command = Command::new("/proc/self/exe");
            command.arg(ROLE);
            return Ok(vec![HostToExamine { name: own_name(), here: true, command }]);
        };
        let ssh = self.ssh_command.clone().unwrap_or_else(|| "ssh".to_owned());
        let mut words = ssh.split(' ');
        let program = words.next().unwrap_or_default().to_owned();
        let words: Vec<&str> = words.collect();
        Ok(list
            .split(',')
            .map(|name| {
                let name = name.split(':').next().unwrap_or(name);
                let here = name == own_name();
                let command = if here {
                    let mut command = Command::new("/proc/self/exe");
                    command.arg(ROLE);
                    command
                } else {
                    let mut command = Command::new(&program);
                    command.args(&words).args([
                        "-T",
                        "-o",
                        "BatchMode=yes",
                        "-o",
                        "ConnectTimeout=10",
                        name,
                    ]);
                    command.arg(std::env::current_exe().unwrap_or_default()).arg(ROLE);
                    command
                };
                HostToExamine { name: name.to_owned(), here, command }
            })
            .collect())
    }
}

/// The same path on every host.
fn working_folder(given: Option<&Path>) -> Option<PathBuf> {
    let here = std::env::current_dir().ok();
    match (here, given) {
        (Some(here), Some(given)) => Some(here.join(given)),
        (here, given) => given.map(Path::to_owned).or(here),
    }
}

fn own_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "localhost".to_owned() } else { name.to_owned() }
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
    let terminal = stdout.is_terminal();
    let columns = terminal_size::terminal_size_of(stdout).map(|(width, _)| usize::from(width.0));
    let no_colour = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    Style { width: columns.unwrap_or(WIDTH).min(WIDTH), colour: terminal && !no_colour }
}

/// One line on a terminal, which what follows replaces.
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

/// Hidden: not for users.
pub(crate) const ROLE: &str = "__doctor";
/// Longer lines are hard to read.
const WIDTH: usize = 110;
const LAST_ANSWERS: Duration = Duration::from_secs(2);
/// As the shell has it for SIGINT.
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
  0    nothing that was found would stop a job
  1    something would: a line with FAIL
  2    a wrong argument
  130  interrupted";
