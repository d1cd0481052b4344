//! Attacks on a rendezvous over TCP: by hosts that do not know the secret, and from the middle.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Duration;

use brigade_rendezvous::{
    BindAddress, Coordinator, DiscoveryMethod, FromAgent, Join, Link, LinkError, Listener,
    OutputSink, Piece, Rendezvous, RendezvousError, RendezvousNotice, RendezvousPlan, Rules,
    Secret, TimeLimits, ToAgent, encode,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::Mutex;

const RUN_ID: &str = "topsecret";

/// Lines for the user of the coordinator's host.
struct Lines(mpsc::Sender<String>);

impl OutputSink for Lines {
    fn output(&mut self, _: Piece) {}

    fn say(&mut self, line: &str) {
        let _ = self.0.send(line.to_owned());
    }
}

/// A job of two hosts, one of which has joined.
struct Served {
    coordinator: Coordinator,
    own: Link,
    port: u16,
    said: Receiver<String>,
}

fn secret() -> Secret {
    Secret::new("known to the job alone").unwrap()
}

fn serve(secret: Option<Secret>) -> Served {
    let bind_address = BindAddress::Loopback(Ipv4Addr::LOCALHOST.into());
    let listener = Listener::bind(0, bind_address, RUN_ID, secret).unwrap();
    let port = listener.port();
    // So long that a test would hang if the end of the job waited for a host that was refused or lost.
    let limits = TimeLimits::new(Duration::from_secs(3600), Duration::from_secs(30));
    let rules =
        Rules { run_id: RUN_ID.into(), min_nodes: 2, max_nodes: 2, limits, ..Rules::default() };
    let (sender, said) = mpsc::channel();
    let sink = Box::new(Lines(sender));
    let coordinator = Coordinator::start(rules, Some(listener), Some(sink)).unwrap();
    let mut own = coordinator.link().unwrap();
    own.send(&FromAgent::Join(Join { run_id: RUN_ID.into(), ..Join::new("node1") }));
    Served { coordinator, own, port, said }
}

impl Served {
    /// The same with a second host that meets the coordinator now.
    fn end_with(self, secret: Option<Secret>) -> Vec<String> {
        let link = joined(self.port, secret, RUN_ID);
        self.end(link)
    }

    /// The job starts with a second host, runs and ends; returns what the user was told.
    fn end(mut self, mut link: Link) -> Vec<String> {
        for link in [&mut self.own, &mut link] {
            assert!(matches!(next(link).unwrap(), ToAgent::Start(_)));
            link.send(&FromAgent::Finished { attempt: 0 });
        }
        for link in [&mut self.own, &mut link] {
            assert!(matches!(next(link).unwrap(), ToAgent::End(_)));
        }
        drop((self.own, link));
        assert_eq!(self.coordinator.wait().code, 0);
        self.said.iter().collect()
    }
}

/// Meets the coordinator at this port.
fn meet(port: u16, secret: Option<Secret>) -> Result<Link, RendezvousError> {
    let mut rendezvous = Rendezvous::start(RendezvousPlan {
        method: DiscoveryMethod::Static { node_rank: 1, address: "127.0.0.1".into(), port },
        run_id: RUN_ID.into(),
        host: "node2".into(),
        secret,
        timeout: Duration::from_secs(60),
        limits: TimeLimits::default(),
    })
    .unwrap();
    loop {
        let _ = poll(&mut [PollFd::new(rendezvous.fd(), PollFlags::POLLIN)], PollTimeout::NONE);
        match rendezvous.next() {
            Some(RendezvousNotice::Join(link)) => return Ok(link),
            Some(RendezvousNotice::Failed(error)) => return Err(error),
            Some(RendezvousNotice::Say(_)) | None => {}
            Some(other) => panic!("{other:?}"),
        }
    }
}

fn joined(port: u16, secret: Option<Secret>, run_id: &str) -> Link {
    let mut link = meet(port, secret).unwrap();
    link.send(&FromAgent::Join(Join { run_id: run_id.into(), ..Join::new("node2") }));
    link
}

/// The next message that says something.
fn next(link: &mut Link) -> Result<ToAgent, LinkError> {
    loop {
        link.flush();
        match link.receive()? {
            Some(ToAgent::Waiting { .. }) => {}
            Some(message) => return Ok(message),
            None => {
                let _ =
                    poll(&mut [PollFd::new(link.read_fd(), PollFlags::POLLIN)], PollTimeout::NONE);
            }
        }
    }
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    ToCoordinator,
    ToAgent,
}

/// What the relay makes of the bytes that it has read; `None`: it closes both connections.
type Change = dyn Fn(Direction, Vec<u8>) -> Option<Vec<u8>> + Send + Sync;

/// A host in the middle, at a port of its own, for one connection.
struct Relay {
    port: u16,
    /// Both of its sockets: to the agent and to the coordinator.
    sockets: Receiver<[TcpStream; 2]>,
}

impl Relay {
    fn start(coordinator: u16, change: Box<Change>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (sender, sockets) = mpsc::channel();
        thread::spawn(move || {
            let agent = listener.accept().unwrap().0;
            let coordinator = TcpStream::connect(("127.0.0.1", coordinator)).unwrap();
            let copies = [agent.try_clone().unwrap(), coordinator.try_clone().unwrap()];
            let _ = sender.send(copies);
            let change: Arc<Change> = change.into();
            let (near, far) = (agent.try_clone().unwrap(), coordinator.try_clone().unwrap());
            let other = Arc::clone(&change);
            thread::spawn(move || pass(agent, coordinator, Direction::ToCoordinator, &*other));
            pass(far, near, Direction::ToAgent, &*change);
        });
        Self { port, sockets }
    }
}

/// Until one side closes. The time that a record of this size takes does not matter on the loopback: it
/// comes in one piece.
fn pass(mut from: TcpStream, mut to: TcpStream, direction: Direction, change: &Change) {
    let mut buffer = [0; 1 << 16];
    while let Ok(count) = from.read(&mut buffer) {
        let changed = if count == 0 { None } else { change(direction, buffer[..count].to_vec()) };
        let Some(bytes) = changed else { break };
        if to.write_all(&bytes).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

#[test]
fn a_relay_that_changes_nothing_is_a_network() {
    let served = serve(Some(secret()));
    let heard = Arc::new(Mutex::new(Vec::new()));
    let ears = Arc::clone(&heard);
    let change = move |_, bytes: Vec<u8>| {
        ears.lock().extend_from_slice(&bytes);
        Some(bytes)
    };
    let relay = Relay::start(served.port, Box::new(change));
    let link = joined(relay.port, Some(secret()), RUN_ID);
    served.end(link);
    // It gets nothing but the version: no name of a host, of the job, or of a message.
    let heard = heard.lock();
    for word in ["node1", "node2", RUN_ID, "Join", "Start", "Finished", "known to the job"] {
        let found = heard.windows(word.len()).any(|piece| piece == word.as_bytes());
        assert!(!found, "{word} went over the network");
    }
}

#[test]
fn a_relay_that_flips_a_bit_after_the_handshake_is_noticed() {
    for direction in [Direction::ToCoordinator, Direction::ToAgent] {
        let served = serve(Some(secret()));
        let number = Mutex::new(0);
        let change = move |way, mut bytes: Vec<u8>| {
            if way == direction {
                let mut number = number.lock();
                *number += 1;
                // The first is the handshake.
                if *number > 1 {
                    *bytes.last_mut().unwrap() ^= 1;
                }
            }
            Some(bytes)
        };
        let relay = Relay::start(served.port, Box::new(change));
        let mut link = joined(relay.port, Some(secret()), RUN_ID);
        let error = loop {
            match next(&mut link) {
                Ok(ToAgent::Start(_)) if direction == Direction::ToCoordinator => {
                    panic!("its join was changed")
                }
                Ok(_) => {}
                Err(error) => break error,
            }
        };
        match direction {
            // The coordinator closes the connection without a message.
            Direction::ToCoordinator => assert!(!matches!(error, LinkError::Forged), "{error}"),
            Direction::ToAgent => assert!(matches!(error, LinkError::Forged), "{error}"),
        }
    }
}

#[test]
fn a_relay_cannot_take_over() {
    let mut served = serve(Some(secret()));
    let relay = Relay::start(served.port, Box::new(|_, bytes| Some(bytes)));
    let mut link = joined(relay.port, Some(secret()), RUN_ID);
    for link in [&mut served.own, &mut link] {
        assert!(matches!(next(link).unwrap(), ToAgent::Start(_)));
    }
    // The agent is authenticated; now the relay sends messages in its name, and in the coordinator's.
    let [mut agent, mut coordinator] = relay.sockets.recv().unwrap();
    let job_result = brigade_rendezvous::JobResult { code: 0, cause: None };
    for message in [encode(&ToAgent::End(job_result)), encode(&ToAgent::Kill)] {
        agent.write_all(&message).unwrap();
    }
    coordinator.write_all(&encode(&FromAgent::Interrupted { signal: 9, count: 1 })).unwrap();
    let error = next(&mut link).expect_err("the agent believes what the relay says");
    assert!(matches!(error, LinkError::Forged | LinkError::CutOff), "{error}");
    let ToAgent::Stop { signal, reason, .. } = next(&mut served.own).unwrap() else { panic!() };
    assert_eq!(signal, 15, "SIGTERM for a lost host, and not the relay's SIGKILL");
    assert!(reason.starts_with("node2 is lost: "), "{reason}");
}

#[test]
fn a_recorded_conversation_cannot_be_played_again() {
    let served = serve(Some(secret()));
    let heard = Arc::new(Mutex::new(Vec::new()));
    let ears = Arc::clone(&heard);
    let change = move |direction, bytes: Vec<u8>| {
        if direction == Direction::ToCoordinator {
            ears.lock().extend_from_slice(&bytes);
        }
        Some(bytes)
    };
    let relay = Relay::start(served.port, Box::new(change));
    let link = joined(relay.port, Some(secret()), RUN_ID);
    served.end(link);
    // All messages of an honest agent, replayed to a coordinator of the same secret and the same job.
    let recorded = heard.lock().clone();
    let served = serve(Some(secret()));
    let mut attacker = TcpStream::connect(("127.0.0.1", served.port)).unwrap();
    attacker.write_all(&recorded).unwrap();
    let mut answer = Vec::new();
    // Closed with unread data, so it may be reset.
    match attacker.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
    }
    let said = served.end_with(Some(secret()));
    let joins = said.iter().filter(|line| line.contains("node2 joined")).count();
    assert_eq!(joins, 1, "{said:?}");
}

#[test]
fn a_wrong_secret_is_refused_on_both_sides() {
    let served = serve(Some(secret()));
    let wrong = || Some(Secret::new("a guess at the secret").unwrap());
    let error = meet(served.port, wrong()).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, RendezvousError::Denied { .. }), "{text}");
    assert!(text.contains("its job has another secret") && !text.contains(RUN_ID), "{text}");
    assert!(matches!(meet(served.port, None).unwrap_err(), RendezvousError::Denied { .. }));
    let said = served.end_with(Some(secret()));
    let refused: Vec<_> = said.iter().filter(|line| line.starts_with("refused ")).collect();
    // Once for each address.
    assert_eq!(refused, ["refused 127.0.0.1: it does not have the secret of this job"]);
}

#[test]
fn a_false_coordinator_learns_nothing_and_is_found_out() {
    // It accepts every agent, with its own message.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = thread::spawn(move || {
        let mut agent = listener.accept().unwrap().0;
        let mut heard = vec![0; 1000];
        let count = agent.read(&mut heard).unwrap();
        heard.truncate(count);
        let mut answer = [b"brigade\0\x10".as_slice(), &2_u32.to_be_bytes(), &[1, b'1']].concat();
        answer.extend([7; 48]);
        agent.write_all(&(answer.len() as u16).to_be_bytes()).unwrap();
        agent.write_all(&answer).unwrap();
        let _ = agent.read_to_end(&mut heard);
        heard
    });
    let error = meet(port, Some(secret())).unwrap_err();
    assert!(matches!(error, RendezvousError::Impostor { .. }), "{error}");
    let heard = server.join().unwrap();
    for word in ["node2", RUN_ID] {
        assert!(!heard.windows(word.len()).any(|piece| piece == word.as_bytes()), "{word}");
    }
}

#[test]
fn the_name_of_the_job_is_never_told() {
    for secret in [None, Some(secret())] {
        let served = serve(secret.clone());
        let mut link = joined(served.port, secret.clone(), "guess");
        let ToAgent::Refused { reason } = next(&mut link).unwrap() else { panic!() };
        assert_eq!(
            reason,
            "node2 takes part in another job: give the same --rdzv-id on all hosts, or another \
             endpoint to one of the jobs"
        );
        let end = next(&mut link).unwrap_err();
        assert!(matches!(end, LinkError::Closed), "{end}");
        served.end_with(secret);
    }
}

#[test]
fn control_characters_of_peers_are_escaped() {
    // Any program may join a job without a secret: sets the clipboard (OSC 52), clears the screen, and adds
    // a line that looks like one of ours.
    let served = serve(None);
    let evil = "\x1b]52;c;cm0gLXJm\x07\x1b[2J\nbrigade: job finished\u{202e}".to_owned();
    let mut link = meet(served.port, None).unwrap();
    link.send(&FromAgent::Join(Join {
        run_id: RUN_ID.into(),
        address: Some("127.0.0.1".into()),
        ..Join::new(&evil)
    }));
    let mut served = served;
    for link in [&mut served.own, &mut link] {
        assert!(matches!(next(link).unwrap(), ToAgent::Start(_)));
    }
    link.send(&FromAgent::Say { text: evil.clone() });
    link.send(&FromAgent::Unable { reason: evil.repeat(100) });
    let ToAgent::Stop { reason, .. } = next(&mut served.own).unwrap() else { panic!() };
    served.own.send(&FromAgent::Stopped { attempt: 0, port: 1, killed: false, stuck: None });
    served.coordinator.interrupt(15);
    let lines = [reason].into_iter().chain(served.said.iter()).collect::<Vec<_>>();
    let shown = r"\u{1b}]52;c;cm0gLXJm\u{7}\u{1b}[2J\nbrigade: job finished\u{202e}";
    for line in &lines {
        assert!(!line.contains(char::is_control) && !line.contains('\u{202e}'), "{line:?}");
        assert!(line.chars().count() < 500, "{line}");
    }
    for expected in
        [format!("{shown} joined"), format!("{shown}: {shown}"), format!("{shown} is lost")]
    {
        assert!(lines.iter().any(|line| line.starts_with(&expected)), "{expected} in {lines:#?}");
    }
}
