//! Doctor process on a host: answers requests until the session ends.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use brigade_ssh::wire::{self, WireError};

use crate::facts::Facts;
use crate::probe::{Listeners, measure, probe_ports};
use crate::protocol::{Answer, GREETING, PROTOCOL, Request};
use brigade_hardware::{Sources, within};

/// Sends the greeting on `output` and answers the requests from `input`, until `input` ends or sends nothing for five
/// minutes.
///
/// This is the hidden command `brigade __doctor`, which `brigade doctor` starts on every host over ssh.
///
/// # Errors
/// Fails when `output` was closed by its reader.
pub fn serve(input: &mut File, output: &mut File, sources: &Sources) -> io::Result<()> {
    output.write_all(GREETING.as_bytes())?;
    let version = env!("CARGO_PKG_VERSION").to_owned();
    wire::send(output, &Answer::Hello { protocol: PROTOCOL, version })?;
    let mut addresses = Vec::new();
    loop {
        // A connection that broke without notice must not leave this process running.
        match wire::receive(input, MAX_SILENCE) {
            Ok(request) => wire::send(output, &answer(request, sources, &mut addresses))?,
            Err(WireError::Frame(error)) => {
                return wire::send(output, &Answer::NotUnderstood(error.to_string()));
            }
            Err(_) => return Ok(()),
        }
    }
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

/// Works only on a file name of the doctor's own, and only while its folder answers.
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

/// Prefix of the names of the doctor's files.
pub(crate) const OUR_FILE: &str = ".brigade-doctor-";
const TIMEOUT: Duration = Duration::from_secs(5);
const MAX_SILENCE: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use std::io::Seek;

    use serde::Serialize;

    use super::*;

    fn conversation<T: Serialize>(requests: &[T]) -> Vec<Answer> {
        let (mut input, mut output) =
            (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        for request in requests {
            wire::send(&mut input, request).unwrap();
        }
        input.rewind().unwrap();
        serve(&mut input, &mut output, &Sources::system()).unwrap();
        output.rewind().unwrap();
        let soon = Duration::from_secs(60);
        wire::skip_to(&mut output, &[GREETING], soon, &mut Vec::new()).unwrap();
        std::iter::from_fn(|| match wire::receive(&mut output, soon) {
            Ok(answer) => Some(answer),
            Err(WireError::Closed) => None,
            Err(error) => panic!("{error}"),
        })
        .collect()
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
        let answers = conversation(&[serde_json::json!({"dance": null})]);
        assert!(matches!(&answers[1..], [Answer::NotUnderstood(_)]), "{answers:?}");
    }
}
