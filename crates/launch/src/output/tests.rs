//! Tests of the output thread with pipes and a console in memory.

use std::fs;
use std::io::{self, PipeWriter, Write};
use std::sync::Arc;

use brigade_rendezvous::Stream;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::Mutex;
use tempfile::TempDir;

use super::*;

/// Console in memory, which fails on request.
#[derive(Clone, Default)]
struct Screen(Arc<Mutex<ScreenState>>);

#[derive(Default)]
struct ScreenState {
    text: [Vec<u8>; 2],
    failure: [Option<io::ErrorKind>; 2],
}

impl Show for Screen {
    fn show(&mut self, stream: Stream, lines: &[u8]) -> io::Result<()> {
        let mut state = self.0.lock();
        match state.failure[stream.index()] {
            Some(kind) => Err(kind.into()),
            None => {
                state.text[stream.index()].extend_from_slice(lines);
                Ok(())
            }
        }
    }
}

impl Screen {
    fn text(&self, stream: Stream) -> String {
        String::from_utf8(self.0.lock().text[stream.index()].clone()).unwrap()
    }

    fn fail(&self, stream: Stream, kind: io::ErrorKind) {
        self.0.lock().failure[stream.index()] = Some(kind);
    }
}

/// An output thread and a log folder.
struct Bench {
    output: Output,
    screen: Screen,
    plan: OutputPlan,
    run: RunFolder,
    base: TempDir,
}

impl Bench {
    fn new(options: OutputOptions) -> Self {
        let base = tempfile::tempdir().unwrap();
        let options = OutputOptions { log_dir: Some(base.path().to_owned()), ..options };
        let plan = OutputPlan::resolve(&options, &OutputFacts::default(), 2).unwrap();
        let screen = Screen::default();
        let output = Output::start(&plan, Box::new(screen.clone())).unwrap();
        let run = RunFolder::create(&plan, "job", "agent").unwrap();
        Self { output, screen, plan, run, base }
    }

    /// Attaches two ranks and returns the writing ends of their `[stdout, stderr]`.
    fn attach(&mut self, attempt: u32) -> [[PipeWriter; 2]; 2] {
        let files = AttemptFiles::make(&self.plan, &self.run, attempt, 2).unwrap();
        let mut writers = Vec::new();
        let mut streams = Vec::new();
        for local_rank in 0..2 {
            let (stdout, out) = io::pipe().unwrap();
            let (stderr, err) = io::pipe().unwrap();
            writers.push([out, err]);
            streams.push(Streams {
                rank: 10 + local_rank,
                local_rank,
                prefix: format!("{local_rank}> "),
                stdout: Some(stdout.into()),
                stderr: Some(stderr.into()),
                progress: None,
            });
        }
        self.output.attach(streams, files).unwrap();
        writers.try_into().unwrap()
    }

    fn wait(&mut self) -> Notice {
        loop {
            if let Some(notice) = self.output.notice() {
                return notice;
            }
            let mut control = [PollFd::new(self.output.control(), PollFlags::POLLIN)];
            poll(&mut control, PollTimeout::NONE).unwrap();
        }
    }

    fn drain(&mut self) -> Vec<Tail> {
        self.output.drain();
        loop {
            if let Notice::Drained(tails) = self.wait() {
                return tails;
            }
        }
    }

    fn log(&self, name: &str) -> String {
        let run = fs::read_dir(self.base.path()).unwrap().next().unwrap().unwrap().path();
        fs::read_to_string(run.join(name)).unwrap()
    }
}

fn quiet() -> OutputOptions {
    OutputOptions { quiet: true, ..OutputOptions::default() }
}

#[test]
fn attempts_follow_each_other() {
    let mut bench = Bench::new(quiet());
    for attempt in 0..3 {
        let [mut first, mut second] = bench.attach(attempt);
        writeln!(first[0], "attempt {attempt}").unwrap();
        write!(second[1], "open").unwrap();
        // A child that lives on holds one rank's pipe: that must not delay the others.
        drop(first);
        let tails = bench.drain();
        assert_eq!(tails[0].stdout, [format!("attempt {attempt}")]);
        assert_eq!(tails[1], Tail { stdout: vec![], stderr: vec!["open".to_owned()] });
        assert_eq!(
            bench.log(&format!("attempt_{attempt}/0/stdout.log")),
            format!("attempt {attempt}\n")
        );
        assert_eq!(bench.log(&format!("attempt_{attempt}/1/stderr.log")), "open");
    }
    let Bench { output, screen, .. } = bench;
    output.end();
    assert_eq!(screen.text(Stream::Stdout), "0> attempt 0\n0> attempt 1\n0> attempt 2\n");
    assert_eq!(screen.text(Stream::Stderr), "1> open\n".repeat(3));
}

#[test]
fn the_tail_of_one_rank_while_others_go_on() {
    let mut bench = Bench::new(quiet());
    let [mut first, mut second] = bench.attach(0);
    write!(first[0], "whole\nhalf").unwrap();
    writeln!(second[1], "the reason").unwrap();
    bench.output.ask_tail(1);
    let tail = Tail { stdout: vec![], stderr: vec!["the reason".to_owned()] };
    assert_eq!(bench.wait(), Notice::Tail { local_rank: 1, tail });
    bench.output.ask_tail(0);
    let tail = Tail { stdout: vec!["whole".to_owned(), "half".to_owned()], stderr: vec![] };
    assert_eq!(bench.wait(), Notice::Tail { local_rank: 0, tail });
    bench.output.ask_tail(7);
    assert_eq!(bench.wait(), Notice::Tail { local_rank: 7, tail: Tail::default() });

    writeln!(first[0], ", and the rest").unwrap();
    assert_eq!(bench.drain()[0].stdout, ["whole", "half, and the rest"]);
}

#[test]
fn the_tail_of_a_rank_whose_child_never_stops_writing() {
    let mut bench = Bench::new(OutputOptions { redirects: "3".parse().ok(), ..quiet() });
    let [[mut out, _err], _second] = bench.attach(0);
    let child = thread::spawn(move || while out.write_all(&[b'y'; 4096]).is_ok() {});
    bench.output.ask_tail(0);
    let Notice::Tail { local_rank: 0, .. } = bench.wait() else { panic!("no tail") };
    // The thread closes its end of the pipe: the child's next write fails.
    let Bench { output, .. } = bench;
    drop(output);
    child.join().unwrap();
}

#[test]
fn the_launchers_own_lines() {
    let mut bench = Bench::new(OutputOptions::default());
    let _writers = bench.attach(0);
    bench.output.say("one");
    bench.output.warn("two");
    bench.drain();
    let _writers = bench.attach(1);
    let Bench { output, screen, base, .. } = bench;
    output.end();
    let run = fs::read_dir(base.path()).unwrap().next().unwrap().unwrap().path();
    let expected = format!("brigade: logs are in {}\nbrigade: one\nbrigade: two\n", run.display());
    assert_eq!(screen.text(Stream::Stderr), expected);

    let bench = Bench::new(quiet());
    bench.output.say("one");
    bench.output.warn("two");
    let Bench { output, screen, .. } = bench;
    output.end();
    assert_eq!(screen.text(Stream::Stderr), "brigade: two\n");
}

#[test]
fn a_reader_that_leaves_is_noticed_once() {
    let mut bench = Bench::new(quiet());
    bench.screen.fail(Stream::Stdout, io::ErrorKind::BrokenPipe);
    let [mut first, _second] = bench.attach(0);
    for _ in 0..3 {
        writeln!(first[0], "line").unwrap();
        writeln!(first[1], "line").unwrap();
    }
    assert_eq!(bench.wait(), Notice::Closed);
    assert_eq!(bench.drain()[0].stdout, ["line"; 3]);
    assert_eq!(bench.screen.text(Stream::Stderr), "0> line\n".repeat(3));
    assert_eq!(bench.log("attempt_0/0/stdout.log"), "line\n".repeat(3), "the logs go on");
}

#[test]
fn a_console_that_fails_is_said_once() {
    let mut bench = Bench::new(quiet());
    bench.screen.fail(Stream::Stdout, io::ErrorKind::StorageFull);
    let [mut first, mut second] = bench.attach(0);
    for writer in [&mut first, &mut second] {
        writeln!(writer[0], "line").unwrap();
    }
    bench.drain();
    let said = bench.screen.text(Stream::Stderr);
    assert_eq!(said, "brigade: cannot write to stdout, some output is lost: no storage space\n");
}

#[test]
fn files_that_fail_are_said_once() {
    let mut bench = Bench::new(quiet());
    let folder = bench.run.attempt(0, 2).unwrap();
    for rank in 0..2 {
        let path = folder.error_file(rank).unwrap().with_file_name("stdout.log");
        std::os::unix::fs::symlink("/dev/full", path).unwrap();
    }
    let [mut first, mut second] = bench.attach(0);
    writeln!(first[0], "line\nline").unwrap();
    writeln!(second[0], "line").unwrap();
    bench.drain();
    let said = bench.screen.text(Stream::Stderr);
    assert!(said.starts_with("brigade: cannot write to ") && said.lines().count() == 1, "{said}");
    assert!(said.contains("stdout.log: No space left on device"), "{said}");
    assert_eq!(bench.screen.text(Stream::Stdout).lines().count(), 3, "the console goes on");
}
