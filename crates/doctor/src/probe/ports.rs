//! Whether doors of other hosts can be reached from here.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use super::dial::dial;
use super::door::is_timeout;
use super::{Errand, WELCOME};
use crate::cluster::Outcome;

/// Knocks at all doors at the same time: a firewall that drops packets costs the whole patience.
pub(crate) fn knock(word: &str, doors: &[SocketAddr]) -> Vec<Outcome> {
    thread::scope(|scope| {
        let mut outcomes = Vec::with_capacity(doors.len());
        for some in doors.chunks(AT_ONCE) {
            let threads: Vec<_> =
                some.iter().map(|door| scope.spawn(move || at_one(word, *door))).collect();
            outcomes.extend(threads.into_iter().map(|thread| {
                thread.join().unwrap_or_else(|_| Outcome::Failed("a thread failed".to_owned()))
            }));
        }
        outcomes
    })
}

fn at_one(word: &str, door: SocketAddr) -> Outcome {
    match dial(door, PATIENCE, None).and_then(|mut stream| enter(&mut stream, word, Errand::Greet))
    {
        Ok(true) => Outcome::Open,
        Ok(false) => Outcome::Stranger,
        Err(error) => match error.kind() {
            ErrorKind::ConnectionRefused => Outcome::Refused,
            ErrorKind::TimedOut | ErrorKind::WouldBlock => Outcome::Silent,
            ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => Outcome::NoRoute,
            // It accepts and hangs up: a proxy whose other end is closed.
            ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => Outcome::Stranger,
            _ => Outcome::Failed(error.to_string()),
        },
    }
}

/// Says the word and the errand; whether the door knows it.
pub(super) fn enter(stream: &mut TcpStream, word: &str, errand: Errand) -> io::Result<bool> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut said = word.as_bytes().to_vec();
    said.push(errand.letter());
    stream.write_all(&said)?;
    let mut answer = [0];
    match stream.read(&mut answer) {
        Ok(1) => Ok(answer[0] == WELCOME),
        Ok(_) => Ok(false),
        Err(error) if is_timeout(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The kernel sends a second and a third packet after 1 s and 3 s.
pub(super) const PATIENCE: Duration = Duration::from_millis(3500);
const AT_ONCE: usize = 64;
