//! The book's sessions in a project of `brigade new`: its programs print what the pages show.
//!
//! The templates stand for the projects, so nothing is built. Errors come first in an answer. `...` stands for any
//! lines, `…` for any part of a line, and fractions may differ by a fifth: a loader without a seed has another order in
//! each run, and other processors round in another way.

#[path = "../../launcher.rs"]
mod launcher;
#[path = "../../../crates/cli/tests/it/book/pages.rs"]
mod pages;
#[path = "../../../crates/cli/tests/it/book/session.rs"]
mod session;

use std::path::Path;
use std::process::{Command, Stdio};

use pages::{Page, pages};
use session::{fits, steps};

const LOOP: &str = env!("CARGO_BIN_EXE_template_loop");

/// The program of the project `name`, by the page's command that makes it.
fn program(page: &Page, name: &str) -> &'static str {
    let mut lines = page.blocks("sh").flat_map(str::lines);
    let made = lines.find_map(|line| line.strip_prefix(&format!("brigade new {name}")));
    match made.unwrap_or_else(|| panic!("the page does not make the project {name}")).trim() {
        "" => LOOP,
        "--template complete" => env!("CARGO_BIN_EXE_template_complete"),
        "--template single" => env!("CARGO_BIN_EXE_template_single"),
        other => panic!("brigade new {name} {other}"),
    }
}

/// What a command in the project's folder prints.
fn run(command: &str, brigade: &Path, program: &str, folder: &Path) -> String {
    let words: Vec<&str> = command.split_whitespace().collect();
    let mut process = match words[..] {
        ["cargo", "run"] => Command::new(program),
        ["brigade", "launch", ref rest @ ..] => {
            let at = rest.iter().position(|it| *it == "--").unwrap_or(rest.len());
            let mut process = Command::new(brigade);
            process.arg("launch").args(&rest[..at]);
            process.args(["--", program]).args(rest.iter().skip(at + 1));
            process
        }
        _ => {
            let mut process = Command::new("sh");
            process.args(["-c", command]);
            process
        }
    };
    process.current_dir(folder).stdin(Stdio::null());
    process.env("OMP_NUM_THREADS", "2").env("CUDA_VISIBLE_DEVICES", "");
    let output = process.output().unwrap();
    let text = [output.stderr, output.stdout].map(|bytes| String::from_utf8(bytes).unwrap());
    assert!(output.status.success(), "{command}: {}", text.concat());
    text.concat()
}

/// Whether a line is the one wanted.
fn line_fits(wanted: &str, found: &str) -> bool {
    let Some(first) = wanted.chars().next() else { return found.is_empty() };
    if first == '…' {
        let rest = &wanted[first.len_utf8()..];
        let mut ends = found.char_indices().map(|(at, _)| at).chain([found.len()]);
        return ends.any(|at| line_fits(rest, &found[at..]));
    }
    if first.is_ascii_digit() {
        let number = |text: &str| {
            text.find(|it: char| !it.is_ascii_digit() && it != '.').unwrap_or(text.len())
        };
        let ((one, wanted), (other, found)) =
            (wanted.split_at(number(wanted)), found.split_at(number(found)));
        return numbers_fit(one, other) && line_fits(wanted, found);
    }
    found.strip_prefix(first).is_some_and(|found| line_fits(&wanted[first.len_utf8()..], found))
}

fn numbers_fit(wanted: &str, found: &str) -> bool {
    let fraction = |text: &str| text.contains('.').then(|| text.parse::<f64>().ok())?;
    match (fraction(wanted), fraction(found)) {
        (Some(wanted), Some(found)) => (wanted - found).abs() <= 0.2 * wanted.abs(),
        _ => wanted == found,
    }
}

#[test]
fn projects_print_what_the_book_shows() {
    let brigade = launcher::brigade_beside(LOOP);
    let mut compared = 0;
    for page in pages() {
        for session in page.blocks("console") {
            let mut session = steps(session).into_iter();
            let first = session.next().expect("a session has a command");
            let Some(name) = first.command.strip_prefix("cd ") else { continue };
            let program = program(&page, name);
            let folder = tempfile::tempdir().unwrap();
            for step in session {
                let found = run(step.command, &brigade, program, folder.path());
                // A slow machine prints some on the way.
                let is_progress = |line: &str| line.contains(" it/s, ") && line.ends_with(" left");
                let lines: Vec<&str> = found.lines().filter(|it| !is_progress(it)).collect();
                let fit = fits(&step.answer, &lines, line_fits);
                assert!(fit, "{}: $ {}\n{found}", page.name, step.command);
                compared += 1;
            }
        }
    }
    assert!(compared > 3, "{compared} commands");
}

#[test]
fn lines_are_compared() {
    assert!(line_fits("epoch 1/10, accuracy = 91.92 %", "epoch 1/10, accuracy = 92.30 %"));
    assert!(line_fits("{\"_time\":…,\"lr\":0.5}", "{\"_time\":1795464683.8,\"lr\":0.5}"));
    for other in ["epoch 2/10, accuracy = 91.92 %", "epoch 1/10, accuracy = 71.92 %", "epoch 1/10"]
    {
        assert!(!line_fits("epoch 1/10, accuracy = 91.92 %", other), "{other}");
    }
    assert!(fits(&["a", "...", "d"], &["a", "b", "c", "d"], line_fits));
    assert!(!fits(&["a", "..."], &["b"], line_fits));
}
