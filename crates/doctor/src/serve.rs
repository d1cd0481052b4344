//! The doctor's process on a host: answers requests until the session ends.

use std::io::{self, BufRead, Write};
use std::path::{Component, Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::facts::Facts;
use crate::probe::{Listeners, measure, probe_ports};
use crate::protocol::{self, Answer, PROTOCOL, Request};
use crate::sources::{Sources, within};

/// Says hello on `output` and answers what `input` asks, until it ends or falls silent.
///
/// This is the role `brigade __doctor`, which `brigade doctor` starts on every host over ssh.
///
/// # Errors
/// The reader of our answers has gone.
pub fn serve(
    input: impl io::Read + Send + 'static,
    mut output: impl Write,
    sources: &Sources,
) -> io::Result<()> {
    let version = env!("CARGO_PKG_VERSION").to_owned();
    protocol::write(&mut output, &Answer::Hello { protocol: PROTOCOL, version })?;
    let lines = read_lines(input);
    let mut addresses = Vec::new();
    // A connection that broke without a nonce must not leave this process behind.
    while let Ok(line) = lines.recv_timeout(MAX_SILENCE) {
        let answer = match protocol::read::<Request>(&line) {
            None => continue,
            Some(Ok(request)) => answer(request, sources, &mut addresses),
            Some(Err(error)) => Answer::NotUnderstood(error.to_string()),
        };
        protocol::write(&mut output, &answer)?;
    }
    Ok(())
}

/// Reading waits in a thread of its own, since it has no time limit.
fn read_lines(input: impl io::Read + Send + 'static) -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut input = io::BufReader::new(input);
        let mut line = Vec::new();
        while io::Read::take(&mut input, MAX_LINE_LEN)
            .read_until(b'\n', &mut line)
            .is_ok_and(|n| n > 0)
        {
            if sender.send(std::mem::take(&mut line)).is_err() {
                return;
            }
        }
    });
    receiver
}

fn answer(request: Request, sources: &Sources, addresses: &mut Vec<Listeners>) -> Answer {
    match request {
        Request::Clock => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            Answer::Clock(i64::try_from(now.as_nanos()).unwrap_or(i64::MAX))
        }
        Request::Examine(question) => Answer::Examined(Box::new(Facts::gather(sources, &question))),
        Request::Listen { nonce, ports } => {
            let (open, ports) = Listeners::open(&nonce, &ports);
            addresses.push(open);
            Answer::Listening(ports)
        }
        Request::Probe { nonce, addresses } => Answer::Probed(probe_ports(&nonce, &addresses)),
        Request::Measure { nonce, address } => Answer::Measured(measure(&nonce, address)),
        Request::Leave { folder, name } => on_file(folder, name, |path| {
            std::fs::OpenOptions::new().write(true).create_new(true).open(path).map(drop)
        }),
        Request::Look { folder, name } => {
            on_file(folder, name, |path| std::fs::metadata(path).map(drop))
        }
        Request::TakeAway { folder, name } => {
            on_file(folder, name, |path| std::fs::remove_file(path))
        }
    }
}

/// Only a file that the doctor may have left, and only as long as its folder answers.
fn on_file(
    folder: PathBuf,
    name: String,
    work: impl FnOnce(&Path) -> io::Result<()> + Send + 'static,
) -> Answer {
    let ours = name.starts_with(OUR_FILE)
        && matches!(Path::new(&name).components().collect::<Vec<_>>()[..], [Component::Normal(_)]);
    let done = ours && within(TIMEOUT, move || work(&folder.join(name)).is_ok()).unwrap_or(false);
    Answer::File(done)
}

/// How the names of our files begin.
pub(crate) const OUR_FILE: &str = ".brigade-doctor-";
const TIMEOUT: Duration = Duration::from_secs(5);
const MAX_SILENCE: Duration = Duration::from_secs(300);
const MAX_LINE_LEN: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn conversation(requests: &[Request]) -> Vec<Answer> {
        let mut input = Vec::new();
        for request in requests {
            protocol::write(&mut input, request).unwrap();
        }
        let mut output = Vec::new();
        serve(io::Cursor::new(input), &mut output, &Sources::system()).unwrap();
        let lines = output.split_inclusive(|byte| *byte == b'\n');
        lines.map(|line| protocol::read(line).unwrap().unwrap()).collect()
    }

    #[test]
    fn files_are_left_seen_and_taken_away() {
        let folder = tempfile::tempdir().unwrap();
        let here = folder.path().to_owned();
        let name = || format!("{OUR_FILE}1");
        let answers = conversation(&[
            Request::Look { folder: here.clone(), name: name() },
            Request::Leave { folder: here.clone(), name: name() },
            Request::Look { folder: here.clone(), name: name() },
            Request::TakeAway { folder: here.clone(), name: name() },
            Request::Look { folder: here, name: name() },
        ]);
        assert!(matches!(answers[0], Answer::Hello { protocol: PROTOCOL, .. }));
        let seen = [false, true, true, true, false].map(Answer::File);
        assert_eq!(answers[1..], seen);
    }

    #[test]
    fn other_files_are_none_of_our_business() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("precious");
        std::fs::write(&file, "").unwrap();
        for name in ["precious", ".brigade-doctor-/../precious", "../x"] {
            let (folder, name) = (folder.path().to_owned(), name.to_owned());
            let answers = conversation(&[Request::TakeAway { folder, name }]);
            assert_eq!(answers[1], Answer::File(false));
        }
        assert!(file.exists());
    }

    #[test]
    fn what_is_not_understood_is_said() {
        let mut output = Vec::new();
        let input = &b"hm\nbrigade-doctor: {\"dance\":null}\n"[..];
        serve(input, &mut output, &Sources::system()).unwrap();
        let last = output.split_inclusive(|byte| *byte == b'\n').nth(1).unwrap();
        assert!(matches!(protocol::read(last), Some(Ok(Answer::NotUnderstood(_)))));
    }
}
