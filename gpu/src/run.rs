//! The parts of a run, one after the other within a budget.

use std::collections::{HashMap, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::facts::{Machine, Probe};
use crate::jobs::{Done, Ending, Job, Pool, status_text};
use crate::pack::{Build, Pack, Program, file_name};
use crate::report::{Outcome, Part, Ran, Report, last_lines};
use crate::tests_part::{job, judged, judged_by_status, listed, listing};

/// What is run, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// The folder with `pack.json`.
    pub folder: PathBuf,
    /// What the Python program has found.
    pub supplied: Supplied,
    /// The parts; all of them where it is empty.
    pub only: Vec<PartName>,
    /// The time for all of them.
    pub budget: Duration,
    /// The device of the tests.
    pub device: Device,
    /// Tests at once; by the number of cores where it is not given.
    pub jobs: Option<usize>,
    /// Parts of the names of the tests and benchmarks that run: those whose name contains one of them. All run where it
    /// is empty.
    pub filters: Vec<String>,
    /// The time limit of a test.
    pub test_limit: Duration,
    /// All test programs also where there is no GPU.
    pub all: bool,
    /// Where the reports are written.
    pub report: PathBuf,
}

impl Options {
    fn wants(&self, name: &str) -> bool {
        self.filters.is_empty() || self.filters.iter().any(|text| name.contains(text))
    }
}

/// What the Python program has found.
#[derive(Clone, Debug)]
pub struct Supplied {
    /// The version of libtorch, such as `2.11.0`.
    pub libtorch: String,
    /// That of its CUDA.
    pub cuda: Option<String>,
    /// A Python with PyTorch, to compare with.
    pub python: Option<String>,
}

/// A part of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartName {
    /// The machine, its GPUs, what PyTorch and the doctor say of them.
    Facts,
    /// The test programs, but the tests of NCCL.
    Tests,
    /// The tests of NCCL, and the self-test on as many ranks as there are GPUs.
    Nccl,
    /// The benchmarks.
    Bench,
}

/// What tests compute on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// GPUs where there are some.
    Auto,
    /// The CPU.
    Cpu,
    /// GPUs; it is an error where there are none.
    Cuda,
}

impl PartName {
    const ALL: [Self; 4] = [Self::Facts, Self::Tests, Self::Nccl, Self::Bench];

    fn name(self) -> &'static str {
        match self {
            Self::Facts => "facts",
            Self::Tests => "tests",
            Self::Nccl => "nccl",
            Self::Bench => "bench",
        }
    }

    /// Its share of the budget, against those of the other parts that are still to come.
    fn weight(self) -> f64 {
        match self {
            Self::Facts => 2.0,
            Self::Tests => 9.0,
            Self::Nccl => 3.0,
            Self::Bench => 7.0,
        }
    }
}

/// Runs the parts, writes the reports and returns the exit code.
///
/// # Errors
/// The folder is not an archive's, none of its builds starts with this libtorch, a GPU is wanted where there is
/// none, or the reports cannot be written.
pub fn run(options: &Options) -> Result<u8> {
    let begun = Instant::now();
    let pack = Pack::read(&options.folder)?;
    fs::create_dir_all(&options.report)
        .with_context(|| format!("cannot make {}", options.report.display()))?;
    let report = fs::canonicalize(&options.report).context("cannot find the reports' folder")?;
    let mut pool = Pool::new(&options.folder)?;
    let end = begun + options.budget.saturating_sub(RESERVE);
    let (build, probe) = choose(&mut pool, options, &pack, end)?;
    let is_cuda = match (options.device, probe.gpus > 0) {
        (Device::Cuda, false) => {
            let reason = probe.reason.as_deref().unwrap_or("CUDA finds none");
            bail!("--device cuda: there is no GPU: {reason}");
        }
        (Device::Cpu, _) => false,
        (_, has_gpu) => has_gpu,
    };
    let mut runner = Runner {
        options,
        pack: &pack,
        build,
        gpus: if is_cuda { probe.gpus } else { 0 },
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        bench: report.join("bench.json"),
        lists: HashMap::new(),
    };
    let mut result = Report {
        date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
        commit: pack.commit.clone(),
        machine: Machine::gather(),
        built_for: probe.built_for.clone(),
        libtorch: options.supplied.libtorch.clone(),
        cuda: options.supplied.cuda.clone(),
        device: if is_cuda { "cuda" } else { "cpu" }.to_owned(),
        gpus: probe.gpus,
        no_gpu: probe.reason,
        budget_seconds: options.budget.as_secs_f64(),
        seconds: 0.0,
        interrupted_by: None,
        parts: Vec::new(),
        bench: Vec::new(),
    };
    println!("libtorch {}, device {}, {} GPUs", result.libtorch, result.device, result.gpus);

    let chosen = PartName::ALL.into_iter();
    let mut parts: VecDeque<PartName> =
        chosen.filter(|it| options.only.is_empty() || options.only.contains(it)).collect();
    while let Some(part) = parts.pop_front() {
        if pool.ended_by().is_some() {
            break;
        }
        let share = share(end.saturating_duration_since(Instant::now()), part, &parts);
        let started = Instant::now();
        let (ran, notes) = runner.part(&mut pool, part, started + share)?;
        let part = Part {
            name: part.name().to_owned(),
            share_seconds: share.as_secs_f64(),
            seconds: started.elapsed().as_secs_f64(),
            ran,
            notes,
        };
        let counts = part.counts();
        println!(
            "{}: {} passed, {} failed, {} without time, {} ignored, in {:.0} s",
            part.name, counts.passed, counts.failed, counts.not_run, counts.ignored, part.seconds
        );
        result.parts.push(part);
        // After each part: a machine that is taken away leaves what was there.
        result.bench = rows(&runner.bench);
        result.seconds = begun.elapsed().as_secs_f64();
        result.write(&report)?;
    }
    let signal = pool.ended_by();
    result.interrupted_by = signal.map(|it| it.as_str().to_owned());
    result.seconds = begun.elapsed().as_secs_f64();
    result.write(&report)?;
    println!("{}", report.join("report.md").display());
    Ok(result.exit_code(signal.map(|it| it as i32)))
}

/// Left for the reports, and for processes to end.
const RESERVE: Duration = Duration::from_secs(3);

/// The time that a part may take of what is left; what it does not take is the others'.
fn share(left: Duration, part: PartName, later: &VecDeque<PartName>) -> Duration {
    let others: f64 = later.iter().map(|it| it.weight()).sum();
    left.mul_f64(part.weight() / (part.weight() + others))
}

/// The first build whose self-test starts with this libtorch, and what it says.
fn choose<'a>(
    pool: &mut Pool,
    options: &Options,
    pack: &'a Pack,
    end: Instant,
) -> Result<(&'a Build, Probe)> {
    let version = &options.supplied.libtorch;
    let mut reasons = String::new();
    for build in pack.builds_for(version) {
        let job = Job {
            name: "facts".to_owned(),
            program: options.folder.join(&build.folder).join("brigade-selftest"),
            arguments: vec!["--facts".to_owned()],
            variables: Vec::new(),
            // The first to load libtorch's CUDA libraries, 2 GB that may come from a slow disk.
            limit: Duration::from_secs(240),
        };
        for done in pool.run(vec![job], 1, end, |_| {})? {
            let good = matches!(done.ending, Ending::Ended(status) if status.success());
            let line = done.output.lines().find(|it| it.starts_with('{'));
            if let Some(line) = line.filter(|_| good) {
                let probe = serde_json::from_str(line).context("the self-test's facts")?;
                return Ok((build, probe));
            }
            reasons.push_str(&format!(
                "\n  built for {}: {}: {}",
                build.libtorch,
                describe(done.ending),
                last_lines(&done.output, 5)
            ));
        }
    }
    bail!("no build of this archive starts with libtorch {version}:{reasons}")
}

fn describe(ending: Ending) -> String {
    match ending {
        Ending::Ended(status) => status_text(status),
        Ending::TimedOut => "it did not end".to_owned(),
        Ending::Stopped | Ending::NotRun => "there was no time".to_owned(),
    }
}

/// The rows that the benchmarks have written: one object a line.
fn rows(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

struct Runner<'a> {
    options: &'a Options,
    pack: &'a Pack,
    build: &'a Build,
    /// Those that tests may use: none where they run on the CPU.
    gpus: usize,
    cores: usize,
    /// Where the benchmarks write their rows.
    bench: PathBuf,
    /// The tests of each program that has been asked, by its name.
    lists: HashMap<String, Vec<String>>,
}

type Outcomes = (Vec<Ran>, Vec<String>);

impl Runner<'_> {
    fn part(&mut self, pool: &mut Pool, part: PartName, deadline: Instant) -> Result<Outcomes> {
        match part {
            PartName::Facts => self.facts(pool, deadline),
            PartName::Tests => self.tests(pool, deadline, |name| !is_nccl(name)),
            PartName::Nccl => self.nccl(pool, deadline),
            PartName::Bench => self.bench(pool, deadline),
        }
    }

    fn program(&self, name: &str) -> PathBuf {
        self.options.folder.join(&self.build.folder).join(name)
    }

    fn job(&self, name: &str, program: &str, arguments: &[&str]) -> Job {
        Job {
            name: name.to_owned(),
            program: self.program(program),
            arguments: arguments.iter().map(|&it| it.to_owned()).collect(),
            variables: self.variables(),
            limit: self.options.test_limit,
        }
    }

    fn variables(&self) -> Vec<(String, String)> {
        let device = if self.gpus > 0 { "cuda" } else { "cpu" };
        let mut variables = vec![("BRIGADE_TEST_DEVICE", device)];
        if self.gpus == 0 {
            // The programs would take the GPU where there is one.
            variables.push(("CUDA_VISIBLE_DEVICES", ""));
        }
        if let Some(python) = &self.options.supplied.python {
            variables.push(("BRIGADE_PEER_PYTHON", python));
        }
        variables.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    /// Tests at once.
    fn at_once(&self) -> usize {
        self.options.jobs.unwrap_or_else(|| self.cores.min(MOST_TESTS))
    }

    fn facts(&self, pool: &mut Pool, deadline: Instant) -> Result<Outcomes> {
        let mut jobs = vec![
            Job { program: self.brigade(), ..self.job("brigade doctor", "", &["doctor"]) },
            self.job("self-test's facts", "brigade-selftest", &["--facts"]),
        ];
        if let (Some(python), true) = (&self.options.supplied.python, self.gpus > 0) {
            let script = self.options.folder.join("facts.py").to_string_lossy().into_owned();
            let mut job = self.job("PyTorch's facts", "", &[&script]);
            job.program = PathBuf::from(python);
            if let Ok(path) = std::env::var("BRIGADE_PEER_LIBRARY_PATH") {
                job.variables.push(("LD_LIBRARY_PATH".to_owned(), path));
            }
            jobs.push(job);
        }
        let done = pool.run(jobs, self.at_once(), deadline, |_| {})?;
        let mut notes = Vec::new();
        for one in &done {
            let text = last_lines(&one.output, FACTS_LINES);
            notes.push(format!("{}:\n\n````text\n{text}\n````\n", one.job.name));
        }
        let mut ran: Vec<Ran> = done.iter().map(judged_by_status).collect();
        // The doctor's exit status says whether it has findings, which are facts.
        if let Some(doctor) = ran.first_mut().filter(|it| it.outcome == Outcome::Failed)
            && matches!(done[0].ending, Ending::Ended(status) if status.code() == Some(1))
        {
            doctor.outcome = Outcome::Passed;
        }
        Ok((ran, notes))
    }

    fn brigade(&self) -> PathBuf {
        self.program("brigade")
    }

    fn tests(
        &mut self,
        pool: &mut Pool,
        deadline: Instant,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<Outcomes> {
        let programs = self.pack.programs.iter();
        let programs: Vec<&Program> =
            programs.filter(|it| self.gpus > 0 || self.options.all || it.short).collect();
        let mut notes = Vec::new();
        if programs.len() < self.pack.programs.len() {
            notes.push(format!(
                "{} of {} test programs, because there is no GPU: `--all` runs all of them",
                programs.len(),
                self.pack.programs.len()
            ));
        }
        let programs: Vec<Job> = programs.iter().map(|it| self.test_program(it)).collect();
        let unknown = programs.iter().filter(|it| !self.lists.contains_key(&it.name));
        let lists = unknown.map(listing).collect();
        let mut ran = Vec::new();
        for done in pool.run(lists, self.at_once(), deadline, |_| {})? {
            if matches!(done.ending, Ending::Ended(status) if status.success()) {
                self.lists.insert(done.job.name, listed(&done.output));
            } else {
                let mut failed = judged_by_status(&done);
                failed.name.push_str(" --list");
                ran.push(failed);
            }
        }
        let mut open = Vec::new();
        for program in &programs {
            let tests = self.lists.get(&program.name).into_iter().flatten();
            let jobs = tests.filter(|test| wanted(test));
            let jobs = jobs.map(|test| job(program, test, self.options.test_limit));
            open.extend(jobs.filter(|job| self.options.wants(&job.name)));
        }
        let count = open.len();
        let mut ended = 0;
        let mut told = Instant::now();
        let done = pool.run(open, self.at_once(), deadline, |done| {
            ended += 1;
            let ran = judged(done);
            if !matches!(ran.outcome, Outcome::Passed | Outcome::Ignored | Outcome::NotRun) {
                println!("  {:?}: {} {}", ran.outcome, ran.name, ran.reason);
            }
            if told.elapsed() >= Duration::from_secs(10) {
                told = Instant::now();
                println!("  {ended} of {count} tests have ended");
            }
        })?;
        ran.extend(done.iter().map(judged));
        Ok((ran, notes))
    }

    fn test_program(&self, program: &Program) -> Job {
        let file = format!("tests/{}", file_name(program));
        let mut job = self.job(&program.name(), &file, &[]);
        // Several run at once: threads that spin while they wait take time from the others.
        let threads = (self.cores / self.at_once()).clamp(1, 4).to_string();
        for (name, value) in [("OMP_NUM_THREADS", threads.as_str()), ("OMP_WAIT_POLICY", "PASSIVE")]
        {
            job.variables.push((name.to_owned(), value.to_owned()));
        }
        // An Accelerator that names no device is one of a test of the CPU, and would take the GPU here. This one is about
        // what it takes.
        if program.target != "without_gpu" {
            job.variables.push(("ACCELERATE_USE_CPU".to_owned(), "1".to_owned()));
        }
        job.limit = Duration::from_secs(60);
        job
    }

    /// The tests of NCCL, and the self-test on one rank and on as many as there are GPUs.
    fn nccl(&mut self, pool: &mut Pool, deadline: Instant) -> Result<Outcomes> {
        let (mut ran, mut notes) = self.tests(pool, deadline, is_nccl)?;
        let selftest = self.program("brigade-selftest").to_string_lossy().into_owned();
        let launch = |name: &str, ranks: usize, cpu: bool| {
            let ranks = ranks.to_string();
            let words = ["launch", "--nproc", &ranks, "--", &selftest];
            let mut job = Job { program: self.brigade(), ..self.job(name, "", &words) };
            if cpu {
                job.variables.push(("ACCELERATE_USE_CPU".to_owned(), "1".to_owned()));
            }
            job
        };
        let mut jobs = vec![
            self.job("self-test, 1 rank", "brigade-selftest", &[]),
            launch("self-test, 2 ranks over Gloo on the CPU", 2, true),
        ];
        if self.gpus > 1 {
            let name = format!("self-test, {} ranks over NCCL", self.gpus);
            jobs.push(launch(&name, self.gpus, false));
        } else {
            notes.push(format!(
                "NCCL with several ranks has not run: it needs several GPUs, and there are {}",
                self.gpus
            ));
        }
        jobs.retain(|it| self.options.wants(&it.name));
        // One after the other: their ranks are as many as GPUs.
        let done = pool.run(jobs, 1, deadline, |_| {})?;
        for one in &done {
            let one = judged_by_status(one);
            if one.outcome != Outcome::Passed {
                println!("  {:?}: {} {}", one.outcome, one.name, one.reason);
            }
            ran.push(one);
        }
        Ok((ran, notes))
    }

    /// The comparisons for GPUs, each as a process; without a GPU the smallest of all.
    fn bench(&self, pool: &mut Pool, deadline: Instant) -> Result<Outcomes> {
        // What an earlier run has left is not a row of this one.
        let _ = fs::remove_file(&self.bench);
        let list = self.job("brigade-bench --list", "brigade-bench", &["--list"]);
        let list = pool.run(vec![list], 1, deadline, |_| {})?;
        let Some(Done { ending: Ending::Ended(status), output, .. }) = list.first() else {
            return Ok((list.iter().map(judged_by_status).collect(), Vec::new()));
        };
        if !status.success() {
            return Ok((list.iter().map(judged_by_status).collect(), Vec::new()));
        }
        let wanted = |name: &&str| {
            let of_this_device =
                if self.gpus > 0 { name.starts_with(GPU) } else { *name == SMALLEST };
            of_this_device && self.options.wants(name)
        };
        let names: Vec<&str> = output.lines().filter(wanted).collect();
        let mut notes = Vec::new();
        if names.is_empty() {
            let filters = self.options.filters.join("` or `");
            notes
                .push(format!("no comparison's name begins with `{GPU}` and contains `{filters}`"));
        }
        if self.gpus == 0 {
            notes.push(format!("without a GPU only `{SMALLEST}` runs"));
        }
        let rows = self.bench.to_string_lossy().into_owned();
        let jobs: Vec<Job> = names
            .iter()
            .map(|name| {
                let words = ["--exact", name, "--json", &rows, "--rounds", ROUNDS];
                let mut job = self.job(name, "brigade-bench", &words);
                // The part's share is their limit.
                job.limit = Duration::from_secs(3600);
                job
            })
            .collect();
        let done = pool.run(jobs, 1, deadline, |done| {
            println!("  {} {} after {:.0} s", done.job.name, describe(done.ending), done.seconds);
        })?;
        Ok((done.iter().map(judged_by_status).collect(), notes))
    }
}

/// Whether a test belongs to the part `nccl`.
fn is_nccl(name: &str) -> bool {
    name.contains("nccl")
}

/// A context of CUDA takes half a GiB of a GPU, and a test may have several ranks.
const MOST_TESTS: usize = 8;
const FACTS_LINES: usize = 80;
/// How names of comparisons for GPUs begin.
const GPU: &str = "gpu-";
/// The comparison that needs least: it starts the command line some times.
const SMALLEST: &str = "brigade-help";
const ROUNDS: &str = "3";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_part_leaves_is_the_others() {
        let later = |parts: &[PartName]| parts.iter().copied().collect();
        let all = [PartName::Tests, PartName::Nccl, PartName::Bench];
        let minutes = Duration::from_secs(400);
        assert_eq!(share(minutes, PartName::Facts, &later(&all)).as_secs(), 38);
        assert_eq!(share(minutes, PartName::Nccl, &later(&[PartName::Bench])).as_secs(), 120);
        assert_eq!(share(minutes, PartName::Bench, &later(&[])), minutes);
    }
}
