//! The messages between the doctor and its process on each host, over standard input and output.
//!
//! One message is one line: a mark and JSON. Lines without the mark are the login's banner.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::cluster::{Measured, Outcome};
use crate::facts::{Facts, Question};

/// Version of the protocol; both sides must have the same.
pub const PROTOCOL: u32 = 1;

/// To a host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request {
    /// Read the clock.
    Clock,
    /// Gather the facts of the host.
    Examine(Question),
    /// Listen on these ports, 0 being any, and answer connections that send the nonce.
    Listen { nonce: String, ports: Vec<u16> },
    /// Connect to these addresses and send the nonce.
    Probe { nonce: String, addresses: Vec<SocketAddr> },
    /// Measure round trips and bandwidth to this address.
    Measure { nonce: String, address: SocketAddr },
    /// Leave a file of that name in that folder.
    Leave { folder: PathBuf, name: String },
    /// Look for a file of that name.
    Look { folder: PathBuf, name: String },
    /// Remove it.
    TakeAway { folder: PathBuf, name: String },
}

/// From a host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    /// Sent first, without a request.
    Hello {
        protocol: u32,
        version: String,
    },
    /// Nanoseconds since 1970.
    Clock(i64),
    Examined(Box<Facts>),
    /// For each port: the one that is open now, or the reason why it is not.
    Listening(Vec<Result<u16, String>>),
    /// For each address.
    Probed(Vec<Outcome>),
    Measured(Measured),
    /// Whether the file was left, exists, or was removed.
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
