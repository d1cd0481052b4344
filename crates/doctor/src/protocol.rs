//! What the doctor says to its counterpart on each host, over standard input and output.
//!
//! One message is one line: a mark and JSON. A login may print greetings before our program speaks;
//! lines without the mark are those.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::cluster::{Measured, Outcome};
use crate::facts::{Facts, Question};

/// Changes when one side would not understand the other.
pub const PROTOCOL: u32 = 1;

/// To a host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request {
    /// What time is it?
    Clock,
    /// Look at yourself.
    Examine(Question),
    /// Listen on these ports, 0 being any, and answer whoever knows the word.
    Listen { nonce: String, ports: Vec<u16> },
    /// Say the word at these addresses.
    Probe { nonce: String, addresses: Vec<SocketAddr> },
    /// Measure the way to this address.
    Measure { nonce: String, address: SocketAddr },
    /// Leave a file of that name in that folder.
    Leave { folder: PathBuf, name: String },
    /// Is there a file of that name?
    Look { folder: PathBuf, name: String },
    /// Take it away.
    TakeAway { folder: PathBuf, name: String },
}

/// From a host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    /// Said first, unasked.
    Hello {
        protocol: u32,
        version: String,
    },
    /// Nanoseconds since 1970.
    Clock(i64),
    Examined(Box<Facts>),
    /// For each port: the one that is open now, or why none is.
    Listening(Vec<Result<u16, String>>),
    /// For each address.
    Probed(Vec<Outcome>),
    Measured(Measured),
    /// Whether it was left, was there, or was taken away.
    File(bool),
    /// The request could not be read.
    NotUnderstood(String),
}

/// One message as a line.
pub(crate) fn write(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = MARK.as_bytes().to_vec();
    serde_json::to_writer(&mut line, message)?;
    line.push(b'\n');
    // In one piece, so that nothing else that is printed comes between.
    to.write_all(&line)?;
    to.flush()
}

/// The message in a line: `None` when it carries no mark.
pub(crate) fn read<T: DeserializeOwned>(line: &[u8]) -> Option<serde_json::Result<T>> {
    // A greeting without an end of line may stand before our mark.
    let at = line.windows(MARK.len()).position(|window| window == MARK.as_bytes())?;
    Some(serde_json::from_slice(&line[at + MARK.len()..]))
}

const MARK: &str = "brigade-doctor: ";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        let mut line = b"Welcome! ".to_vec();
        let hello = Answer::Hello { protocol: 1, version: "0.1.0".to_owned() };
        write(&mut line, &hello).unwrap();
        assert_eq!(read::<Answer>(&line).unwrap().unwrap(), hello);
        assert!(read::<Answer>(b"Last login: yesterday\n").is_none());
        assert!(read::<Answer>(b"brigade-doctor: {\"dance\":1}\n").unwrap().is_err());
    }

    #[test]
    fn a_host_with_another_version_is_understood() {
        let newer =
            br#"brigade-doctor: {"examined":{"version":9,"host":{"name":"a","mood":"good"}}}"#;
        let Some(Ok(Answer::Examined(facts))) = read(newer) else { panic!() };
        assert_eq!((facts.version, facts.host.name.as_str()), (9, "a"));
        assert_eq!(facts.memory, crate::facts::Memory::default());
    }
}
