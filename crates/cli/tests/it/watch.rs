//! Tests of `brigade watch` on a pseudo-terminal, whose output is parsed, and in pipes.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use brigade_test_needs::TimeLimit;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use portable_pty::{Child, CommandBuilder, ExitStatus, MasterPty, PtySize, native_pty_system};
use tempfile::tempdir;

use crate::job::BRIGADE;

const LIMIT: Duration = Duration::from_secs(120);

fn size(rows: u16, cols: u16) -> PtySize {
    PtySize { rows, cols, pixel_width: 0, pixel_height: 0 }
}

/// Program on a terminal of its own.
struct Watched {
    master: Box<dyn MasterPty + Send>,
    child: Box<dyn Child + Send + Sync>,
    keys: Box<dyn Write + Send>,
    output: Box<dyn Read + Send>,
    screen: vt100::Parser,
    /// Modes of the terminal as text: the terminal library's type for them is its own.
    modes: String,
    _limit: TimeLimit,
}

impl Watched {
    fn new(words: &[&str]) -> Self {
        let pair = native_pty_system().openpty(size(30, 100)).unwrap();
        let mut command = CommandBuilder::new(words[0]);
        command.args(&words[1..]);
        command.env("TERM", "xterm-256color");
        let modes = modes(&*pair.master);
        let child = pair.slave.spawn_command(command).unwrap();
        drop(pair.slave);
        let output = pair.master.try_clone_reader().unwrap();
        let keys = pair.master.take_writer().unwrap();
        let screen = vt100::Parser::new(30, 100, 0);
        let limit = TimeLimit::new(&words.join(" "), LIMIT);
        Self { master: pair.master, child, keys, output, screen, modes, _limit: limit }
    }

    fn until(&mut self, what: &str) {
        self.wait(what, |shown| shown.contains(what));
    }

    /// Waits for a condition. Output arrives in pieces: one condition for everything that must be shown together.
    fn wait(&mut self, what: &str, seen: impl Fn(&str) -> bool) {
        self.wait_with("", what, seen);
    }

    /// Makes the screen redraw until it shows a text. Keys that arrive together with a change of the size are read with
    /// the next key alone: the library that reads them polls only one of the two.
    fn until_drawn_anew(&mut self, what: &str) {
        self.press("\x0c");
        self.wait_with("\x0c", what, |shown| shown.contains(what));
    }

    /// Presses keys after each piece of output that does not meet the condition.
    fn wait_with(&mut self, keys: &str, what: &str, seen: impl Fn(&str) -> bool) {
        loop {
            let shown = self.screen.screen().contents();
            if seen(&shown) {
                return;
            }
            let mut block = [0; 4096];
            // At the end of the program the terminal returns an error.
            match self.output.read(&mut block) {
                Ok(count @ 1..) => {
                    self.screen.process(&block[..count]);
                    self.press(keys);
                }
                _ => panic!("it has ended without showing {what:?}:\n{shown}"),
            }
        }
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits for the exit status, and checks that the terminal is restored.
    fn ends(mut self) -> ExitStatus {
        let status = self.child.wait().unwrap();
        assert_eq!(modes(&*self.master), self.modes);
        let mut rest = Vec::new();
        let _ = self.output.read_to_end(&mut rest);
        self.screen.process(&rest);
        let screen = self.screen.screen();
        assert!(!screen.alternate_screen() && !screen.hide_cursor(), "{}", screen.contents());
        status
    }
}

fn modes(master: &dyn MasterPty) -> String {
    format!("{:?}", master.get_termios().unwrap())
}

fn append(path: &Path, text: &str) {
    let file = OpenOptions::new().append(true).create(true).open(path);
    file.unwrap().write_all(text.as_bytes()).unwrap();
}

fn step(step: u32, loss: f64) -> String {
    format!("{{\"_step\":{step},\"_time\":{step},\"loss\":{loss}}}\n")
}

const START: &str =
    "{\"_event\":\"start\",\"_time\":0,\"_project\":\"digits\",\"_config\":{\"epochs\":2}}\n";

#[test]
fn a_run_that_grows_on_a_terminal() {
    let folder = tempdir().unwrap();
    let runs = folder.path().to_str().unwrap();
    let mut watched = Watched::new(&[BRIGADE, "watch", runs, "--wait"]);
    watched.until("waiting for a run in");
    let path = folder.path().join("digits.jsonl");
    append(&path, &(START.to_owned() + &step(1, 0.75)));
    watched.until("digits  running");
    watched.until("loss 0.75");
    append(&path, "{\"_step\":2,\"_time\":2,\"lo");
    append(&path, "ss\":0.625}\n");
    watched.until("loss 0.625");
    append(&path, "{\"_step\":2,\"epoch\":0,\"valid_loss\":0.875,\"accuracy\":0.5}\n");
    watched.wait("an epoch", |shown| {
        ["50 %", "valid_loss 0.875", "epoch  valid_loss  accuracy"]
            .iter()
            .all(|word| shown.contains(word))
    });
    watched.press("\x1b[B\x1b[B");
    watched.until("━ accuracy 0.5");
    watched.press("s");
    watched.until("smooth 0.6");

    // A terminal of another size, then another file at the same path.
    watched.master.resize(size(5, 20)).unwrap();
    watched.screen.screen_mut().set_size(5, 20);
    watched.until_drawn_anew("digits  running · ep");
    watched.master.resize(size(30, 100)).unwrap();
    watched.screen.screen_mut().set_size(30, 100);
    watched.until_drawn_anew("accuracy  ");
    fs::write(folder.path().join("new"), step(1, 0.25)).unwrap();
    fs::rename(folder.path().join("new"), &path).unwrap();
    watched
        .wait("the other file", |shown| shown.contains("loss 0.25") && !shown.contains("accuracy"));
    append(&path, "{\"_event\":\"finish\",\"_time\":5}\n");
    watched.until("digits  finished");
    watched.press("q");
    assert_eq!(watched.ends().exit_code(), 0);
}

#[test]
fn signals_and_keys_give_the_terminal_back() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    append(&path, &step(1, 0.75));
    let words = [BRIGADE, "watch", path.to_str().unwrap()];
    for keys in ["q", "\x03", "\x1b"] {
        let mut watched = Watched::new(&words);
        watched.until("loss 0.75");
        watched.press(keys);
        assert_eq!(watched.ends().exit_code(), 0, "{keys:?}");
    }
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let mut watched = Watched::new(&words);
        watched.until("loss 0.75");
        let pid = Pid::from_raw(watched.child.process_id().unwrap().try_into().unwrap());
        kill(pid, signal).unwrap();
        let status = watched.ends();
        assert!(status.signal().is_some(), "{signal}: {status:?}");
    }
}

#[test]
fn a_terminal_that_is_closed_ends_it() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    append(&path, &step(1, 0.75));
    // In a session without a terminal no signal reports the end.
    for setsid in [false, true] {
        let mut words = vec![BRIGADE, "watch", path.to_str().unwrap()];
        if setsid {
            words.splice(0..0, ["setsid", "--wait"]);
        }
        let mut watched = Watched::new(&words);
        watched.until("loss 0.75");
        let Watched { master, mut child, keys, output, _limit, .. } = watched;
        drop((master, keys, output));
        child.wait().unwrap();
    }
}

#[test]
fn the_standard_input_with_keys_from_the_terminal() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    append(&path, &step(1, 0.75));
    let shell = format!("tail -n +1 -f {} | {BRIGADE} watch -", path.display());
    let mut watched = Watched::new(&["sh", "-c", &shell]);
    watched.until("standard input  running");
    watched.until("loss 0.75");
    append(&path, &step(2, 0.5));
    watched.until("loss 0.5");
    watched.press("?");
    watched.until("quit");
    watched.press("??q");
    // The shell waits for `tail`, which ends at its next line.
    append(&path, &step(3, 0.5));
    let end = thread::spawn(move || watched.ends());
    while !end.is_finished() {
        append(&path, &step(3, 0.5));
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(end.join().unwrap().exit_code(), 0);
}

fn ask(arguments: &[&str], input: &str) -> (i32, String, String) {
    let mut brigade = Command::new(BRIGADE);
    brigade.arg("watch").args(arguments).stdin(Stdio::piped());
    let mut child = brigade.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn plain_lines_for_scripts() {
    let folder = tempdir().unwrap();
    let runs = folder.path().to_str().unwrap();
    let (code, _, error) = ask(&[runs], "");
    assert_eq!(code, 1);
    assert!(error.contains("--wait waits for it"), "{error}");
    assert_eq!(error.lines().count(), 1);

    append(&folder.path().join("a.jsonl"), &(START.to_owned() + &step(1, 0.75)));
    append(&folder.path().join("b\x1b.jsonl"), "{\"_event\":\"failed\"}\n");
    let (code, _, error) = ask(&[runs, "--run", "c"], "");
    assert_eq!(code, 1);
    assert!(error.contains(r"but a, b\u{1b}"), "{error:?}");
    let (code, shown, error) = ask(&[runs, "--run", "a", "--once"], "");
    assert_eq!((code, error.as_str()), (0, ""));
    assert!(shown.starts_with("digits: running, step 1, 1 s\n"), "{shown}");
    assert_eq!(ask(&[runs, "--run", "b\x1b"], "").0, 1, "it has failed");

    let finished = START.to_owned() + &step(1, 0.75) + "{\"_event\":\"finish\",\"_time\":3}\n";
    let (code, shown, _) = ask(&["-"], &finished);
    assert_eq!((code, shown.as_str()), (0, "step 1  loss 0.75\ndigits: finished, step 1, 3 s\n"));
    assert_eq!(ask(&["-", "--run", "a"], "").0, 2);
    assert_eq!(ask(&[runs, "--run", "../a"], "").0, 2);
}

#[test]
fn lines_come_while_the_run_goes_on_and_a_reader_may_leave() {
    let _limit = TimeLimit::new("plain lines of a run that goes on", LIMIT);
    let folder = tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    let mut brigade = Command::new(BRIGADE);
    brigade.args(["watch", "--wait"]).arg(&path).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = brigade.spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut seen = String::new();
    let mut until = |what: &str, seen: &mut String| {
        while !seen.contains(what) {
            let mut bytes = [0; 1000];
            let count = stdout.read(&mut bytes).unwrap();
            assert!(count > 0, "{seen}");
            seen.push_str(std::str::from_utf8(&bytes[..count]).unwrap());
        }
    };
    until("waiting for a run in", &mut seen);
    append(&path, START);
    until("digits: running\n", &mut seen);
    append(&path, "{\"_step\":3,\"epoch\":0,\"valid_loss\":0.5}\n");
    until("    0         0.5\n", &mut seen);
    drop(stdout);
    // A line that cannot be written to the closed pipe ends it, without an error.
    append(&path, "{\"_step\":6,\"epoch\":1,\"valid_loss\":0.25}\n");
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_large_file_takes_little_memory() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    let mut file = std::io::BufWriter::new(File::create(&path).unwrap());
    for at in 1..=400_000 {
        file.write_all(step(at, f64::from(at % 100)).as_bytes()).unwrap();
    }
    drop(file);
    assert!(fs::metadata(&path).unwrap().len() > 16_000_000);
    // The limit is on the whole address space, threads and code included.
    let shell = format!("ulimit -v 400000; exec {BRIGADE} watch --once {}", path.display());
    let output = Command::new("sh").args(["-c", &shell]).output().unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(shown.contains("loss     0       0       99  400000"), "{shown}{error}");
}
