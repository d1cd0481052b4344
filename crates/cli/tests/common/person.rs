//! Terminal with a simulated user.

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};

use nix::pty::{Winsize, openpty};

/// Program on a pseudo-terminal, with its output so far.
pub(crate) struct Person {
    child: Child,
    terminal: File,
    /// Raw output; an escape sequence may arrive in two parts.
    raw: Vec<u8>,
    /// Length of the text that has been matched.
    seen: usize,
}

impl Person {
    pub(crate) fn answering(mut command: Command) -> Self {
        let size = Winsize { ws_row: 40, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };
        let pair = openpty(Some(&size), None).unwrap();
        let end = || Stdio::from(pair.slave.try_clone().unwrap());
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        Self { child, terminal: pair.master.into(), raw: Vec::new(), seen: 0 }
    }

    /// Reads until the output contains these words, and discards the text before them.
    pub(crate) fn expect(&mut self, words: &str) {
        let mut bytes = [0; 4096];
        loop {
            let shown = plain(&String::from_utf8_lossy(&self.raw));
            let unseen = shown.get(self.seen..).unwrap_or_default();
            if let Some(at) = unseen.find(words) {
                self.seen += at + words.len();
                return;
            }
            // At the end of the program the terminal returns an error.
            let count = self.terminal.read(&mut bytes).unwrap_or(0);
            assert!(count > 0, "no {words:?}, but {unseen:?}");
            self.raw.extend_from_slice(&bytes[..count]);
        }
    }

    pub(crate) fn types(&mut self, keys: &str) {
        self.terminal.write_all(keys.as_bytes()).unwrap();
    }

    /// Returns the program's exit code, after all of its output.
    pub(crate) fn ends(mut self) -> i32 {
        let mut rest = Vec::new();
        let _ = self.terminal.read_to_end(&mut rest);
        self.child.wait().unwrap().code().unwrap()
    }
}

#[allow(dead_code)] // not every kind of tests needs it
impl Person {
    /// Returns the program's exit code, and the lines on the screen at its end.
    pub(crate) fn screen(mut self) -> (i32, Vec<String>) {
        let mut rest = Vec::new();
        let _ = self.terminal.read_to_end(&mut rest);
        self.raw.append(&mut rest);
        let mut terminal = vt100::Parser::new(40, 120, 0);
        terminal.process(&self.raw);
        let lines = terminal.screen().contents().lines().map(str::to_owned).collect();
        (self.child.wait().unwrap().code().unwrap(), lines)
    }
}

impl Drop for Person {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Removes escape sequences for the cursor and colours.
fn plain(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text.chars();
    while let Some(character) = rest.next() {
        if character == '\x1b' {
            // `ESC [ parameters letter`, the only kind that is used.
            let _ = rest.by_ref().skip(1).find(char::is_ascii_alphabetic);
        } else {
            plain.push(character);
        }
    }
    plain
}
