//! Helpers of tests: a server with canned answers, and a process whose files cannot grow.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::Command;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::Download;

/// A server that accepts as many requests as it has answers.
pub(crate) struct Server {
    /// Address of a folder on the server, with a slash at the end.
    pub(crate) url: String,
    thread: JoinHandle<Vec<String>>,
}

impl Server {
    /// Answers one connection after another with these bytes, and closes each.
    pub(crate) fn new(answers: Vec<Vec<u8>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/data/", listener.local_addr().unwrap());
        let reply = move |answer: Vec<u8>| {
            let (mut stream, _) = listener.accept().unwrap();
            let lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let head = lines.map(|line| line.unwrap()).take_while(|line| !line.is_empty());
            let head = head.collect::<Vec<_>>().join("\n");
            // The client may already have closed the connection.
            let _ = stream.write_all(&answer);
            head
        };
        let thread = thread::spawn(move || answers.into_iter().map(reply).collect());
        Self { url, thread }
    }

    /// Returns the heads of the requests, after all answers were sent.
    pub(crate) fn requests(self) -> Vec<String> {
        self.thread.join().unwrap()
    }
}

/// Returns an answer with this status and these headers, each with `\r\n` at its end.
pub(crate) fn answer(status: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!("HTTP/1.1 {status}\r\nconnection: close\r\n{headers}\r\n");
    [head.as_bytes(), body].concat()
}

/// Returns an answer with `body` as the beginning of a file of `length` bytes.
pub(crate) fn ok(length: usize, body: &[u8]) -> Vec<u8> {
    answer("200 OK", &format!("content-length: {length}\r\n"), body)
}

pub(crate) fn status(status: &str) -> Vec<u8> {
    answer(status, "content-length: 0\r\n", b"")
}

/// Returns options without pauses and without the machine's proxies.
pub(crate) fn options(urls: &[&str]) -> Download {
    Download {
        base_urls: urls.iter().map(|url| (*url).to_owned()).collect(),
        pause: Duration::ZERO,
        proxy_from_environment: false,
        ..Download::default()
    }
}

/// Returns `true` in the process that [`passes_with_small_files`] has started.
pub(crate) fn has_small_files() -> bool {
    std::env::var_os(SMALL_FILES).is_some()
}

/// Runs a test in a second process, in which no file can grow beyond 16 kB, as on a full disk.
pub(crate) fn passes_with_small_files(test: &str) {
    let limited = r#"trap "" XFSZ && ulimit -f 32 && exec "$0" "$@""#;
    let done = Command::new("sh")
        .args(["-c", limited])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test])
        .env(SMALL_FILES, "1")
        .output()
        .unwrap();
    let output = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && output.contains("1 passed"), "{output}");
}

const SMALL_FILES: &str = "BRIGADE_TEST_SMALL_FILES";
