//! Tests of the coordinator's thread over real sockets, with agents and strangers.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::*;
use crate::listener::Limits;
use crate::{
    BindAddress, Cause, DiscoveryMethod, FromAgent, Join, LinkError, MAX_FRAME_LEN, OUTPUT_CREDIT,
    Rendezvous, RendezvousNotice, RendezvousPlan, Secret, Stream, TimeLimits, ToAgent, encode,
};

fn rules(nodes: usize) -> Rules {
    Rules { run_id: "j".into(), min_nodes: nodes, max_nodes: nodes, ..Rules::default() }
}

/// Text that is shown to the user.
#[derive(Debug)]
enum Shown {
    Piece(Piece),
    Line(String),
    /// Name of a host, and the number of its ranks that have reported progress.
    Progress(String, usize),
}

impl OutputSink for mpsc::Sender<Shown> {
    fn output(&mut self, piece: Piece) {
        let _ = self.send(Shown::Piece(piece));
    }

    fn say(&mut self, line: &str) {
        let _ = self.send(Shown::Line(line.into()));
    }

    fn progress(&mut self, host: &Arc<str>, ranks: Vec<(usize, String)>) {
        let _ = self.send(Shown::Progress(host.to_string(), ranks.len()));
    }
}

/// Creates a session like one over ssh: two streams of bytes.
fn session(coordinator: &Coordinator, host: &str) -> (SessionId, Link) {
    timed_session(coordinator, host, TimeLimits::default())
}

fn timed_session(coordinator: &Coordinator, host: &str, limits: TimeLimits) -> (SessionId, Link) {
    let (reader, out) = UnixStream::pair().unwrap();
    let (writer, inside) = UnixStream::pair().unwrap();
    let id = coordinator.add(reader.into(), writer.into(), host);
    (id, Link::new(inside.into(), out.into(), Some(limits)).unwrap())
}

/// Creates a session without the thread that sends heartbeats.
fn mute_session(coordinator: &Coordinator, host: &str) -> (UnixStream, UnixStream) {
    let (reader, out) = UnixStream::pair().unwrap();
    let (writer, inside) = UnixStream::pair().unwrap();
    let _ = coordinator.add(reader.into(), writer.into(), host);
    (out, inside)
}

fn send_raw(mut to: &UnixStream, message: &FromAgent) {
    to.write_all(&encode(message)).unwrap();
}

fn join_request(host: &str) -> FromAgent {
    FromAgent::Join(Join { run_id: "j".into(), ..Join::new(host) })
}

fn join(link: &mut Link, host: &str) {
    link.send(&join_request(host));
}

/// Waits for the next message.
fn next(link: &mut Link) -> Result<ToAgent, LinkError> {
    loop {
        link.flush();
        if let Some(message) = link.receive()? {
            return Ok(message);
        }
        let mut fds = vec![PollFd::new(link.read_fd(), PollFlags::POLLIN)];
        if link.needs_write() {
            fds.push(PollFd::new(link.write_fd(), PollFlags::POLLOUT));
        }
        let _ = poll(&mut fds, PollTimeout::NONE);
    }
}

fn start(coordinator: &Coordinator, host: &str) -> (SessionId, Link) {
    let (id, mut link) = session(coordinator, host);
    join(&mut link, host);
    assert!(matches!(next(&mut link).unwrap(), ToAgent::Start(_)));
    (id, link)
}

fn output(size: usize) -> FromAgent {
    FromAgent::Output { stream: Stream::Stdout, bytes: vec![b'x'; size] }
}

#[test]
fn a_host_that_is_gone_makes_no_progress() {
    let (sink, shown) = mpsc::channel();
    let coordinator = Coordinator::start(rules(1), None, Some(Box::new(sink))).unwrap();
    let (_, mut link) = start(&coordinator, "node1");
    link.send(&FromAgent::Progress { ranks: vec![(0, "{}".into()), (1, "{}".into())] });
    let progress = || loop {
        if let Shown::Progress(host, ranks) = shown.recv().unwrap() {
            return (host, ranks);
        }
    };
    assert_eq!(progress(), ("node1".to_owned(), 2));
    drop(link);
    assert_eq!(progress(), ("node1".to_owned(), 0));
}

#[test]
fn output_is_shown_and_credit_comes_back() {
    let (sink, shown) = mpsc::channel();
    let coordinator = Coordinator::start(rules(1), None, Some(Box::new(sink))).unwrap();
    let (_, mut link) = start(&coordinator, "node1");
    link.send(&output(1000));
    link.send(&FromAgent::Say { text: "careful".into() });
    let mut pieces = Vec::new();
    loop {
        match shown.recv().unwrap() {
            Shown::Piece(piece) => pieces.push(piece),
            Shown::Line(line) if line == "node1: careful" => break,
            Shown::Line(_) | Shown::Progress(..) => {}
        }
    }
    assert_eq!((&*pieces[0].host, pieces[0].bytes.len()), ("node1", 1000));
    drop(pieces);
    assert_eq!(next(&mut link).unwrap(), ToAgent::Taken { bytes: 1000 });
    link.send(&FromAgent::Finished { attempt: 0 });
    assert!(matches!(next(&mut link).unwrap(), ToAgent::End(_)));
    // Its last message.
    link.send(&FromAgent::Say { text: "done".into() });
    drop(link);
    assert_eq!(coordinator.wait().code, 0);
    let lines: Vec<_> = shown.iter().filter(|it| !matches!(it, Shown::Progress(..))).collect();
    assert!(matches!(lines.last(), Some(Shown::Line(line)) if line == "node1: done"), "{lines:?}");
}

#[test]
fn a_paused_terminal_stops_nothing_else() {
    let (sink, shown) = mpsc::channel();
    let coordinator = Coordinator::start(rules(1), None, Some(Box::new(sink))).unwrap();
    let (_, mut link) = start(&coordinator, "node1");
    // No output is shown; the agent stops at its credit, and other messages continue.
    for _ in 0..OUTPUT_CREDIT / 1024 {
        link.send(&output(1024));
    }
    link.send(&FromAgent::Interrupted { signal: 15, count: 1 });
    assert!(matches!(next(&mut link).unwrap(), ToAgent::Stop { signal: 15, .. }));
    link.send(&FromAgent::Stopped { attempt: 0, port: 1, killed: true, stuck: None });
    assert!(matches!(next(&mut link).unwrap(), ToAgent::End(_)));
    drop(link);
    assert_eq!(coordinator.wait().code, 143);
    assert!(shown.iter().count() > 200);
}

#[test]
fn an_agent_that_exceeds_its_credit_is_lost() {
    let (sink, _shown) = mpsc::channel();
    let coordinator = Coordinator::start(rules(1), None, Some(Box::new(sink))).unwrap();
    let (_, mut link) = start(&coordinator, "node1");
    let sender = thread::spawn(move || {
        for _ in 0..10 {
            link.send(&output(1 << 20));
            while link.needs_write() {
                let mut fds = [PollFd::new(link.write_fd(), PollFlags::POLLOUT)];
                let _ = poll(&mut fds, PollTimeout::NONE);
                link.flush();
            }
        }
    });
    let how = "it sent more output than it may".into();
    let cause = Cause::HostLost { host: "node1".into(), how };
    assert_eq!(coordinator.wait().cause, Some(cause));
    sender.join().unwrap();
}

#[test]
fn the_end_of_a_session_is_explained() {
    for explained_first in [true, false] {
        let rules = Rules { late_hosts: false, ..rules(2) };
        let coordinator = Coordinator::start(rules, None, None).unwrap();
        let (good, _link) = session(&coordinator, "node1");
        let (bad, link) = session(&coordinator, "node2");
        assert_ne!(good, bad);
        let how = "ssh: Could not resolve hostname node2";
        if explained_first {
            coordinator.explain(bad, how);
            drop(link);
        } else {
            drop(link);
            coordinator.explain(bad, how);
        }
        let cause = Cause::HostLost { host: "node2".into(), how: how.into() };
        assert_eq!(coordinator.wait().cause, Some(cause));
    }
}

#[test]
fn a_session_that_is_explained_and_does_not_end_is_closed() {
    let rules = Rules { late_hosts: false, ..rules(1) };
    let coordinator = Coordinator::start(rules, None, None).unwrap();
    let (id, mut link) = session(&coordinator, "node1");
    coordinator.explain(id, "ssh ended with 255");
    let cause = Cause::HostLost { host: "node1".into(), how: "ssh ended with 255".into() };
    assert_eq!(coordinator.wait().cause, Some(cause));
    assert!(matches!(next(&mut link), Err(LinkError::Closed)));
}

#[test]
fn the_user_of_the_launcher_can_stop_the_job() {
    let coordinator = Coordinator::start(rules(1), None, None).unwrap();
    let (_, mut link) = start(&coordinator, "node1");
    coordinator.interrupt(2);
    assert!(matches!(next(&mut link).unwrap(), ToAgent::Stop { signal: 2, .. }));
    coordinator.interrupt(2);
    assert_eq!(next(&mut link).unwrap(), ToAgent::Kill);
    link.send(&FromAgent::Stopped { attempt: 0, port: 1, killed: true, stuck: None });
    assert!(matches!(next(&mut link).unwrap(), ToAgent::End(_)));
    let mut fds = [PollFd::new(coordinator.over_fd(), PollFlags::POLLIN)];
    drop(link);
    poll(&mut fds, PollTimeout::NONE).unwrap();
    assert_eq!(coordinator.wait().code, 130);
}

#[test]
fn a_dropped_coordinator_is_seen_as_gone() {
    let coordinator = Coordinator::start(rules(2), None, None).unwrap();
    let mut link = coordinator.link().unwrap();
    drop(coordinator);
    assert!(matches!(next(&mut link), Err(LinkError::Closed)));
}

#[test]
fn an_agent_that_does_not_read_is_lost_and_not_waited_for() {
    let hour = Duration::from_secs(3600);
    let rules = Rules { limits: TimeLimits::new(hour, hour), late_hosts: false, ..rules(2) };
    let coordinator = Coordinator::start(rules, None, None).unwrap();
    let (_, mut deaf) = session(&coordinator, "deaf");
    join(&mut deaf, "deaf");
    let (_, mut good) = start(&coordinator, "good");
    // More is sent than the system buffers for a reader that does not read.
    loop {
        coordinator.forward(10);
        match next(&mut good).unwrap() {
            ToAgent::Signal { signal: 10 } => {}
            ToAgent::Stop { signal: 15, .. } => break,
            other => panic!("{other:?}"),
        }
    }
    good.send(&FromAgent::Stopped { attempt: 0, port: 1, killed: false, stuck: None });
    let job_result = loop {
        match next(&mut good).unwrap() {
            ToAgent::End(job_result) => break job_result,
            ToAgent::Signal { .. } => {}
            other => panic!("{other:?}"),
        }
    };
    let Some(Cause::HostLost { host, how }) = &job_result.cause else { panic!("{job_result:?}") };
    assert!(host == "deaf" && how.starts_with("the other side has left "), "{how}");
    drop(good);
    assert_eq!(coordinator.wait(), job_result);
    drop(deaf);
}

fn listening(nodes: usize) -> (Coordinator, u16, mpsc::Receiver<Shown>) {
    listening_within(nodes, Limits::default())
}

fn listening_within(nodes: usize, limits: Limits) -> (Coordinator, u16, mpsc::Receiver<Shown>) {
    let bind_address = BindAddress::Loopback(Ipv4Addr::LOCALHOST.into());
    let secret = Secret::new("known to the job alone").unwrap();
    let mut listener = Listener::bind(0, bind_address, "j", Some(secret)).unwrap();
    listener.limits = limits;
    let port = listener.port();
    let (sink, shown) = mpsc::channel();
    let coordinator = Coordinator::start(rules(nodes), Some(listener), Some(Box::new(sink)));
    (coordinator.unwrap(), port, shown)
}

/// Returns the link of an agent that has the secret.
fn guest(port: u16) -> Link {
    let mut rendezvous = Rendezvous::start(RendezvousPlan {
        method: DiscoveryMethod::Static { node_rank: 1, address: "127.0.0.1".into(), port },
        run_id: "j".into(),
        host: "guest".into(),
        secret: Some(Secret::new("known to the job alone").unwrap()),
        timeout: Duration::from_secs(60),
        limits: TimeLimits::default(),
    })
    .unwrap();
    loop {
        let _ = poll(&mut [PollFd::new(rendezvous.fd(), PollFlags::POLLIN)], PollTimeout::NONE);
        match rendezvous.next() {
            Some(RendezvousNotice::Join(link)) => return link,
            Some(RendezvousNotice::Say(_)) | None => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn strangers_are_closed_and_cost_nothing() {
    let (coordinator, port, shown) = listening(1);
    let open = || TcpStream::connect(("127.0.0.1", port)).unwrap();
    let mut words: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        vec![0xff; 100],
        // A complete message of this protocol before the handshake, and announced messages of excessive length.
        encode(&FromAgent::Join(Join::new("node2"))),
        (MAX_FRAME_LEN as u32).to_be_bytes().to_vec(),
        vec![0xff, 0xff],
        [&[1, 1][..], &[0; 257]].concat(),
        [&[0, 200][..], &[0x91; 200]].concat(),
        [&[0, 8][..], b"brigade\0"].concat(),
        // Of the other side, of an unknown kind, with an excessive version length.
        [&[0, 14][..], b"brigade\0\x10\0\0\0\x02\0"].concat(),
        [&[0, 14][..], b"brigade\0\xff\0\0\0\x02\0"].concat(),
        [&[0, 14][..], b"brigade\0\x01\0\0\0\x02\xff"].concat(),
    ];
    words.extend((0..=255).map(|byte| [&[0, 40][..], &[byte; 40]].concat()));
    for word in words {
        let mut stranger = open();
        stranger.write_all(&word).unwrap();
        let mut answer = Vec::new();
        // Closed, or reset because something was left unread.
        let _ = stranger.read_to_end(&mut answer);
        assert!(answer.is_empty(), "{word:?} got {answer:?}");
    }
    // Silent connections do not keep others out.
    let silent: Vec<_> = (0..50).map(|_| open()).collect();
    let mut link = coordinator.link().unwrap();
    join(&mut link, "node1");
    assert!(matches!(next(&mut link).unwrap(), ToAgent::Start(_)));
    link.send(&FromAgent::Finished { attempt: 0 });
    assert!(matches!(next(&mut link).unwrap(), ToAgent::End(_)));
    drop(link);
    assert_eq!(coordinator.wait().code, 0, "with {} strangers", silent.len());
    assert!(shown.iter().all(|line| !matches!(line, Shown::Piece(_))));
}

#[test]
fn a_giant_message_before_the_join_is_not_waited_for() {
    let (_coordinator, port, shown) = listening(1);
    let mut link = guest(port);
    // The agent has the secret, but has not joined: four megabytes are not buffered for it.
    link.send(&output(MAX_FRAME_LEN - 100));
    while link.needs_write() && link.receive().is_ok() {
        let mut fds = [PollFd::new(link.write_fd(), PollFlags::POLLOUT)];
        let _ = poll(&mut fds, PollTimeout::NONE);
        link.flush();
    }
    let end = next(&mut link).expect_err("it is answered");
    assert!(matches!(end, LinkError::Closed | LinkError::Reset | LinkError::Broken(_)), "{end}");
    assert!(shown.try_recv().is_err(), "it was never a member");
}

/// Waits until the other side has closed this connection. Returns `false` if it stays open.
fn is_closed(connection: &mut TcpStream, limit: Duration) -> bool {
    connection.set_read_timeout(Some(limit)).unwrap();
    match connection.read(&mut [0; 1]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn a_thousand_silent_connections_keep_no_agent_out() {
    let limits =
        Limits { strangers: 8, greeting: Duration::from_secs(3600), grace: Duration::ZERO };
    let (coordinator, port, _shown) = listening_within(2, limits);
    let mut own = coordinator.link().unwrap();
    join(&mut own, "node1");
    let mut held = std::collections::VecDeque::new();
    let mut open = || {
        held.push_back(TcpStream::connect(("127.0.0.1", port)).unwrap());
        // Only this many have a place, so all earlier ones have lost theirs.
        if held.len() > 2 * limits.strangers {
            let mut oldest = held.pop_front().unwrap();
            assert!(is_closed(&mut oldest, Duration::from_secs(60)), "one stays for ever");
        }
    };
    (0..500).for_each(|_| open());
    let mut link = guest(port);
    join(&mut link, "node2");
    (0..500).for_each(|_| open());
    // An agent that has joined keeps its place when others come.
    assert!(matches!(next_but_waiting(&mut link), ToAgent::Start(_)));
    assert!(matches!(next_but_waiting(&mut own), ToAgent::Start(_)));
    for link in [&mut own, &mut link] {
        link.send(&FromAgent::Finished { attempt: 0 });
    }
    for link in [&mut own, &mut link] {
        assert!(matches!(next_but_waiting(link), ToAgent::End(_)));
    }
    drop((own, link));
    assert_eq!(coordinator.wait().code, 0);
}

fn next_but_waiting(link: &mut Link) -> ToAgent {
    loop {
        match next(link).unwrap() {
            ToAgent::Waiting { .. } => {}
            message => return message,
        }
    }
}

#[test]
fn silent_connections_end_by_themselves() {
    let limits = Limits {
        strangers: 8,
        greeting: Duration::from_millis(50),
        grace: Duration::from_secs(3600),
    };
    let (_coordinator, port, _shown) = listening_within(1, limits);
    let mut silent: Vec<_> =
        (0..30).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect();
    for connection in &mut silent {
        assert!(is_closed(connection, Duration::from_secs(60)));
    }
}

#[test]
fn a_full_house_is_waited_for_and_not_emptied() {
    // New connections wait in the system's queue while earlier ones may still join.
    let hour = Duration::from_secs(3600);
    let limits = Limits { strangers: 2, greeting: hour, grace: hour };
    let (coordinator, port, _shown) = listening_within(1, limits);
    let mut first: Vec<_> =
        (0..2).map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap()).collect();
    let mut third = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let shortly = Duration::from_millis(100);
    assert!(!is_closed(&mut first[0], shortly) && !is_closed(&mut third, shortly));
    // Nor does that keep the coordinator from serving others.
    let mut link = coordinator.link().unwrap();
    join(&mut link, "node1");
    assert!(matches!(next(&mut link).unwrap(), ToAgent::Start(_)));
}

#[test]
fn an_agent_that_falls_silent_is_lost_and_one_that_beats_is_not() {
    let limits = TimeLimits::new(Duration::from_secs(2), Duration::from_secs(30));
    let rules = Rules { limits, ..rules(2) };
    let coordinator = Coordinator::start(rules, None, None).unwrap();
    let (silent, _its_streams) = mute_session(&coordinator, "silent");
    let (_, mut alive) = timed_session(&coordinator, "alive", limits);
    send_raw(&silent, &join_request("silent"));
    join(&mut alive, "alive");
    let reason = loop {
        let mut fds = [PollFd::new(alive.read_fd(), PollFlags::POLLIN)];
        let _ = poll(&mut fds, PollTimeout::from(10_u8));
        match alive.receive().unwrap() {
            Some(ToAgent::Stop { reason, .. }) => break reason,
            // The coordinator sends heartbeats, too: otherwise this would end with an error.
            _ => alive.keep_up(std::time::Instant::now()).unwrap(),
        }
    };
    assert_eq!(reason, "silent is lost: no message from it for 2 s");
    alive.send(&FromAgent::Stopped { attempt: 0, port: 1, killed: false, stuck: None });
    assert!(matches!(next(&mut alive).unwrap(), ToAgent::End(_)));
    drop(alive);
    assert_eq!(coordinator.wait().code, 1);
}
