//! The progress bar on a real terminal (a pseudo-terminal, and a parser of what is drawn on it), and
//! where there is none.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use brigade_models::Cnn;
use brigade_nn::Model;
use brigade_rank_env::{ProgressReport, env};
use brigade_train::Accelerator;
use portable_pty::{Child, CommandBuilder, ExitStatus, MasterPty, PtySize, native_pty_system};

/// Names what the child does.
const PART: &str = "BRIGADE_TEST_TERMINAL";
const STEPS: u64 = 40;
const ROWS: u16 = 24;

/// The other process of each test here: this executable again.
#[test]
#[ignore = "is what the tests below start"]
fn child() {
    let part = std::env::var(PART).unwrap();
    if let Some(channels_last) = part.strip_prefix("start ") {
        let builder = Accelerator::builder().cpu(true).channels_last(channels_last == "true");
        let accelerator = builder.build().unwrap();
        for _ in 0..2 {
            accelerator.prepare(Model::new(Cnn::new).unwrap()).unwrap();
        }
        return;
    }
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build().unwrap();
    let rank = accelerator.processes().process_index();
    // Ends the line that the test harness has begun, on every rank before it got here.
    accelerator.println("");
    let steps = if part == "endless" { u64::MAX } else { STEPS };
    let bar = accelerator.progress(0..steps).label(format!("train{rank}"));
    let values = bar.values();
    for step in bar {
        values.set("loss", 1.0 / (step + 1) as f64);
        values.rate(640.0, "samples");
        if step == STEPS / 2 {
            accelerator.println("half of it");
        }
        thread::sleep(Duration::from_millis(25));
    }
    accelerator.println("the end");
    // Output of the test harness when a rank has ended must not appear in the bar of another.
    accelerator.processes().wait_for_everyone().unwrap();
}

fn arguments() -> [&'static str; 5] {
    ["--exact", "terminal::child", "--include-ignored", "--nocapture", "--test-threads=1"]
}

/// A terminal with everything that was written to it so far.
struct Terminal {
    master: Box<dyn MasterPty + Send>,
    children: Vec<Box<dyn Child + Send + Sync>>,
    output: Receiver<Vec<u8>>,
    /// What has come and is not on the screen yet.
    unread: VecDeque<u8>,
    screen: vt100::Parser,
}

impl Terminal {
    /// Ranks of one job that share it.
    fn running(part: &str, ranks: usize) -> Self {
        let size = PtySize { rows: ROWS, cols: 100, pixel_width: 0, pixel_height: 0 };
        let pair = native_pty_system().openpty(size).unwrap();
        // Free now; rank 0 binds it again at once.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let children = (0..ranks).map(|rank| {
            let mut command = CommandBuilder::new(std::env::current_exe().unwrap());
            command.args(arguments());
            for (name, value) in [(PART, part), ("MASTER_ADDR", "127.0.0.1"), ("TERM", "xterm")] {
                command.env(name, value);
            }
            for (name, value) in [
                ("RANK", rank),
                ("LOCAL_RANK", rank),
                ("WORLD_SIZE", ranks),
                ("LOCAL_WORLD_SIZE", ranks),
                ("MASTER_PORT", port.into()),
            ] {
                command.env(name, value.to_string());
            }
            // A terminal controls one session: what is typed reaches rank 0.
            command.set_controlling_tty(rank == 0);
            pair.slave.spawn_command(command).unwrap()
        });
        let children = children.collect();
        drop(pair.slave);
        let (tell, output) = channel();
        let mut reader = pair.master.try_clone_reader().unwrap();
        thread::spawn(move || {
            let mut block = [0; 4096];
            while let Ok(read @ 1..) = reader.read(&mut block) {
                if tell.send(block[..read].to_vec()).is_err() {
                    return;
                }
            }
        });
        let (screen, unread) = (vt100::Parser::new(ROWS, 100, 1000), VecDeque::new());
        Self { master: pair.master, children, output, unread, screen }
    }

    /// Reads on until the screen shows it, and no further: what was drawn meanwhile is looked at by the next
    /// call, however late this one comes to read it.
    fn until(&mut self, what: &str, seen: impl Fn(&vt100::Screen) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !seen(self.screen.screen()) {
            if let Some(byte) = self.unread.pop_front() {
                self.screen.process(&[byte]);
                // To a reader a screen changes when the next line, or the same one again, begins.
                while let Some(byte) =
                    self.unread.pop_front_if(|byte| !matches!(byte, b'\r' | b'\n'))
                {
                    self.screen.process(&[byte]);
                }
                continue;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.output.recv_timeout(left) {
                Ok(bytes) => self.unread.extend(bytes),
                Err(_) => panic!("{what}: the screen is\n{}", self.screen.screen().contents()),
            }
        }
    }

    /// The children's ends, with all they wrote.
    fn ended(&mut self) -> Vec<ExitStatus> {
        let ends = self.children.iter_mut().map(|child| child.wait().unwrap()).collect();
        let unread: Vec<u8> = self.unread.drain(..).collect();
        self.screen.process(&unread);
        while let Ok(bytes) = self.output.recv_timeout(Duration::from_secs(1)) {
            self.screen.process(&bytes);
        }
        ends
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Lines with a bar of this rank.
fn bars(screen: &vt100::Screen, rank: usize) -> usize {
    let label = format!("train{rank} ");
    screen.contents().lines().filter(|line| line.contains(&label)).count()
}

#[test]
fn a_terminal_shows_one_bar_in_place_on_the_main_process() {
    one_bar_in_place(Terminal::running("finite", 2));
}

/// This test's own process may get no time while the bar moves.
#[test]
fn a_reader_that_comes_late_sees_the_same() {
    let mut terminal = Terminal::running("finite", 2);
    for child in &mut terminal.children {
        assert!(child.wait().unwrap().success());
    }
    one_bar_in_place(terminal);
}

fn one_bar_in_place(mut terminal: Terminal) {
    for position in [1, 10, 30] {
        let reached = |screen: &vt100::Screen| {
            let text = screen.contents();
            let bar = text.lines().find(|line| line.contains("train0 "));
            let counted = bar.and_then(|line| line.split_once("/40 ")?.0.rsplit(' ').next());
            counted.and_then(|count| count.parse().ok()).is_some_and(|count: u64| count >= position)
        };
        terminal.until("the bar moves", reached);
        let screen = terminal.screen.screen();
        assert_eq!((bars(screen, 0), bars(screen, 1)), (1, 0), "{}", screen.contents());
    }
    // A line of output moves the bar down and is not split.
    let screen = terminal.screen.screen();
    let text = screen.contents();
    let half = text.lines().position(|line| line.trim_end() == "half of it");
    let bar = text.lines().position(|line| line.contains("train0 "));
    assert!(half.is_some() && half < bar, "{text}");

    assert!(terminal.ended().iter().all(ExitStatus::success));
    let screen = terminal.screen.screen();
    let text = screen.contents();
    assert_eq!((bars(screen, 0), bars(screen, 1)), (0, 0), "gone at the end:\n{text}");
    assert!(text.contains("the end"), "{text}");
    assert!(!screen.hide_cursor(), "the cursor is hidden");
}

#[test]
fn an_interrupt_leaves_a_usable_terminal() {
    let mut terminal = Terminal::running("endless", 1);
    terminal.until("a bar", |screen| bars(screen, 0) == 1);
    let mut keyboard = terminal.master.take_writer().unwrap();
    keyboard.write_all(b"\x03").unwrap();
    keyboard.flush().unwrap();
    let ends = terminal.ended();
    assert!(ends[0].signal().is_some(), "ended by the signal: {ends:?}");
    let screen = terminal.screen.screen();
    assert!(!screen.hide_cursor(), "the cursor is hidden");
    assert!(!screen.alternate_screen());
}

#[test]
fn the_start_line_says_once_what_was_decided() {
    for (channels_last, format) in [(true, "channels last"), (false, "contiguous")] {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(arguments())
            .env(PART, format!("start {channels_last}"))
            .env("OMP_NUM_THREADS", "1")
            .env_remove("MKL_CBWR")
            .env("ACCELERATE_MIXED_PRECISION", "bf16")
            .env("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        let said: Vec<&str> = error.lines().filter(|line| line.starts_with("brigade: ")).collect();
        let expected = format!(
            "brigade: 1 process, cpu with 1 thread, bf16, {format}, gradients of 3 batches"
        );
        assert_eq!(said.first(), Some(&&*expected), "{error}");
        // A second line, on a CPU that is slow at bf16. Matrix products are reproducible everywhere.
        assert!(said[1..].iter().all(|line| line.contains("bf16 is slower")), "{error}");
        assert!(said.len() <= 2, "{error}");
    }
}

#[test]
fn without_a_terminal_no_bar_is_drawn() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(arguments())
        .env(PART, "finite")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success());
    let (out, error) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(out.contains("half of it\n") && out.contains("the end\n"), "{out}");
    for text in [out, error] {
        assert!(!text.contains(['\r', '\x1b']), "only plain lines: {text:?}");
    }
}

#[test]
fn a_launcher_gets_reports_and_shows_the_bar() {
    let (mut reader, writer) = std::io::pipe().unwrap();
    // It is inherited as descriptor 0.
    let output = Command::new(std::env::current_exe().unwrap())
        .args(arguments())
        .env(PART, "finite")
        .env(env::BRIGADE_PROGRESS_FD, "0")
        .stdin(Stdio::from(writer))
        .output()
        .unwrap();
    assert!(output.status.success());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!error.contains("train0"), "{error}");
    let mut told = Vec::new();
    reader.read_to_end(&mut told).unwrap();
    let lines = told.split_inclusive(|byte| *byte == b'\n');
    let reports: Vec<ProgressReport> =
        lines.map(|line| ProgressReport::decode(line).unwrap()).collect();
    let (last, before) = reports.split_last().unwrap();
    assert!(last.done && last.position == STEPS, "{last:?}");
    assert!(!before.is_empty() && before.iter().all(|report| !report.done), "{before:?}");
    assert_eq!((last.label.as_str(), last.length), ("train0", Some(STEPS)));
    assert_eq!(last.values, [("loss".to_owned(), "0.0250".to_owned())]);
    assert_eq!(last.throughput(), (640.0, "samples"));
}
