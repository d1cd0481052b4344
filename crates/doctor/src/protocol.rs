//! Messages between the doctor and its process on each host, over standard input and output.
//!
//! A process on a host first writes [`GREETING`] and [`Answer::Hello`]; all messages are the frames of
//! [`brigade_ssh::wire`].

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::cluster::{Measured, Outcome};
use crate::facts::{Facts, Question};

/// Version of the protocol. Both sides must have the same.
pub const PROTOCOL: u32 = 2;

/// Message to a host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Request {
    /// Reads the clock.
    Clock,
    /// Gathers the facts of the host.
    Examine(Question),
    /// Listens on these ports, 0 being any, and answers connections that send the nonce.
    Listen { nonce: String, ports: Vec<u16> },
    /// Connects to these addresses and sends the nonce.
    Probe { nonce: String, addresses: Vec<SocketAddr> },
    /// Measures round trips and bandwidth to this address.
    Measure { nonce: String, address: SocketAddr },
    /// Creates a file of that name in that folder.
    Leave { folder: PathBuf, name: String },
    /// Checks whether a file of that name exists.
    Look { folder: PathBuf, name: String },
    /// Removes the file.
    TakeAway { folder: PathBuf, name: String },
}

/// Message from a host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    /// Sent first, without a request. Every version must be able to read it.
    Hello {
        protocol: u32,
        version: String,
    },
    /// Clock reading in nanoseconds since 1970.
    Clock(i64),
    Examined(Box<Facts>),
    /// Result per port: the port that is now open, or the reason why it is not.
    Listening(Vec<Result<u16, String>>),
    /// Outcome for each address.
    Probed(Vec<Outcome>),
    Measured(Measured),
    /// `true` if the file was created, exists, or was removed.
    File(bool),
    /// The request could not be read.
    NotUnderstood(String),
}

/// Line on stdout before the first frame. A login banner may precede it.
pub(crate) const GREETING: &str = "\nbrigade-doctor\n";

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};
    use std::time::Duration;

    use brigade_ssh::wire;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_host_with_another_version_is_understood() {
        let newer = json!({"examined": {"version": 9, "host": {"name": "a", "mood": "good"}}});
        let mut file = tempfile::tempfile().unwrap();
        wire::send(&mut file, &newer).unwrap();
        file.rewind().unwrap();
        let answer = wire::receive(&mut file, Duration::from_secs(60)).unwrap();
        let Answer::Examined(facts) = answer else { panic!("{answer:?}") };
        assert_eq!((facts.version, facts.host.name.as_str()), (9, "a"));
        assert_eq!(facts.memory, brigade_hardware::Memory::default());
    }

    #[test]
    fn the_first_frame_stays_the_same() {
        let mut file = tempfile::tempfile().unwrap();
        let hello = Answer::Hello { protocol: 1, version: "2".to_owned() };
        wire::send(&mut file, &hello).unwrap();
        file.rewind().unwrap();
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes, b"\0\0\0\x1c\x81\xa5hello\x82\xa8protocol\x01\xa7version\xa12");
    }
}
