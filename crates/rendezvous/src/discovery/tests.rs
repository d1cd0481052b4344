//! Tests of discovery over the loopback interface, with and without a coordinator.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrIn, bind, getsockname, setsockopt, socket, sockopt,
};

use super::*;
use crate::{Coordinator, FromAgent, Join, Rules, ToAgent};

fn plan(method: DiscoveryMethod) -> RendezvousPlan {
    RendezvousPlan {
        method,
        run_id: "j".into(),
        host: "node2".into(),
        secret: Some(Secret::new("known to the job alone").unwrap()),
        timeout: Duration::from_secs(60),
        limits: TimeLimits::default(),
    }
}

fn at(address: &str, port: u16) -> DiscoveryMethod {
    DiscoveryMethod::Endpoint { address: address.into(), port, serve: None }
}

fn wait(rendezvous: &mut Rendezvous) -> RendezvousNotice {
    loop {
        if let Some(notice) = rendezvous.next() {
            return notice;
        }
        let _ = poll(&mut [PollFd::new(rendezvous.fd(), PollFlags::POLLIN)], PollTimeout::NONE);
    }
}

/// Returns the first notice that is not just a message for the user.
fn outcome(plan: RendezvousPlan) -> RendezvousNotice {
    let mut rendezvous = Rendezvous::start(plan).unwrap();
    loop {
        match wait(&mut rendezvous) {
            RendezvousNotice::Say(_) => {}
            notice => return notice,
        }
    }
}

fn failure(plan: RendezvousPlan) -> RendezvousError {
    match outcome(plan) {
        RendezvousNotice::Failed(error) => error,
        notice => panic!("{notice:?}"),
    }
}

fn serve(method: DiscoveryMethod) -> (Coordinator, u16) {
    let RendezvousNotice::Serve { listener, address } = outcome(plan(method)) else { panic!() };
    let port = listener.port();
    let rules = Rules {
        run_id: "j".into(),
        min_nodes: 2,
        max_nodes: 2,
        address: Some(address),
        ..Rules::default()
    };
    (Coordinator::start(rules, Some(listener), None).unwrap(), port)
}

fn next(link: &mut Link) -> ToAgent {
    loop {
        if let Some(message) = link.receive().unwrap() {
            return message;
        }
        let _ = poll(&mut [PollFd::new(link.read_fd(), PollFlags::POLLIN)], PollTimeout::NONE);
    }
}

/// Runs a job of two agents, one of them with the coordinator.
fn run(coordinator: Coordinator, mut links: [Link; 2], master: &str) {
    for (number, link) in links.iter_mut().enumerate() {
        let host = format!("node{number}");
        link.send(&FromAgent::Join(Join {
            run_id: "j".into(),
            node_rank: Some(number),
            ..Join::new(&host)
        }));
    }
    for link in &mut links {
        let part = loop {
            match next(link) {
                ToAgent::Start(part) => break part,
                ToAgent::Waiting { .. } => {}
                other => panic!("{other:?}"),
            }
        };
        assert_eq!((part.world_size, part.master_addr.as_str()), (2, master));
        link.send(&FromAgent::Finished { attempt: 0 });
    }
    for link in &mut links {
        assert!(matches!(next(link), ToAgent::End(_)));
    }
    drop(links);
    assert_eq!(coordinator.wait().code, 0);
}

#[test]
fn who_has_the_address_serves_and_the_next_agent_joins() {
    for address in ["localhost", "127.0.0.1"] {
        let (coordinator, port) = serve(at(address, 0));
        let RendezvousNotice::Join(link) = outcome(plan(at(address, port))) else { panic!() };
        let own = coordinator.link().unwrap();
        run(coordinator, [own, link], address);
    }
}

#[test]
fn others_wait_for_host_0() {
    let (_held, port) = free_port();
    let first =
        |node_rank| DiscoveryMethod::Static { node_rank, address: "localhost".into(), port };
    let mut rendezvous = Rendezvous::start(plan(first(1))).unwrap();
    let RendezvousNotice::Say(line) = wait(&mut rendezvous) else { panic!() };
    assert_eq!(line, format!("localhost:{port}: connection refused; trying for up to 60 s"));
    let (coordinator, _) = serve(first(0));
    let RendezvousNotice::Join(link) = wait(&mut rendezvous) else { panic!() };
    let own = coordinator.link().unwrap();
    run(coordinator, [own, link], "localhost");
}

#[test]
fn a_name_without_an_address_is_told() {
    let mut plan = plan(at("no-such-host.invalid", 1));
    plan.timeout = Duration::from_millis(10);
    let text = failure(plan).to_string();
    assert!(text.starts_with("no coordinator at no-such-host.invalid:1 after 0 s: "), "{text}");
    assert!(text.contains("no-such-host.invalid has no address: "), "{text}");
}

#[test]
fn another_secret_is_refused() {
    let (coordinator, port) = serve(at("localhost", 0));
    let method =
        DiscoveryMethod::Endpoint { address: "localhost".into(), port, serve: Some(false) };
    let secret = Secret::new("a guess at the secret").unwrap();
    for (secret, reason) in [
        (Some(secret), "its job has another secret: set the same BRIGADE_RDZV_SECRET"),
        (None, "its job has a secret, and this host was given none: set the same"),
    ] {
        let text = failure(RendezvousPlan { secret, ..plan(method.clone()) }).to_string();
        let expected = format!("localhost:{port} refused this host: {reason}");
        assert!(text.starts_with(&expected), "{text}");
    }
    drop(coordinator);
}

/// Peer that sends this answer.
struct Stranger {
    port: u16,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Stranger {
    fn new(answer: &'static [u8]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let over = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&over);
        let thread = thread::spawn(move || {
            while let Ok((mut connection, _)) = listener.accept() {
                if told.load(Ordering::Relaxed) {
                    return;
                }
                let _ = connection.write_all(answer);
                let _ = connection.read(&mut [0; 64]);
            }
        });
        Self { port, over, thread: Some(thread) }
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Returns a port that is not in use and is reserved for this process.
fn free_port() -> (OwnedFd, u16) {
    let fd = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
    setsockopt(&fd, sockopt::ReuseAddr, &true).unwrap();
    bind(fd.as_raw_fd(), &SockaddrIn::new(0, 0, 0, 0, 0)).unwrap();
    let port = getsockname::<SockaddrIn>(fd.as_raw_fd()).unwrap().port();
    (fd, port)
}

#[test]
fn a_port_of_another_program_is_named() {
    let stranger = Stranger::new(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    let port = stranger.port;
    let taken = format!(
        "port {port} on this host is in use by another program: stop it, or choose another port"
    );
    assert_eq!(failure(plan(at("127.0.0.1", port))).to_string(), taken);
    let first = DiscoveryMethod::Static { node_rank: 0, address: "127.0.0.1".into(), port };
    assert_eq!(failure(plan(first)).to_string(), taken);
    let second = DiscoveryMethod::Static { node_rank: 1, address: "127.0.0.1".into(), port };
    let text = failure(plan(second)).to_string();
    let expected = format!("127.0.0.1:{port} is not a Brigade coordinator: a message of ");
    assert!(text.starts_with(&expected), "{text}");
}

#[test]
fn a_port_of_a_silent_program_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let error = failure(plan(at("127.0.0.1", port)));
    assert!(matches!(error, RendezvousError::PortTaken { .. }), "{error}");
}

#[test]
fn giving_up_is_possible_at_any_time() {
    let (_held, port) = free_port();
    let method = DiscoveryMethod::Static { node_rank: 1, address: "localhost".into(), port };
    drop(Rendezvous::start(plan(method)).unwrap());
}

/// A silent connection must not use up the time for which the seat is kept.
#[test]
fn a_way_back_that_is_silent_is_given_up_soon() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let limits = TimeLimits::new(Duration::from_secs(6), Duration::from_secs(30));
    let method = DiscoveryMethod::Resume { address, patient: true, delay: Duration::ZERO };
    let _rendezvous = Rendezvous::start(RendezvousPlan { limits, ..plan(method) }).unwrap();
    // Kept open, and silent. A busy machine may delay this process in one round, but not in all.
    let mut silent = vec![listener.accept().unwrap()];
    let given_up_soon = (0..5).any(|_| {
        let accepted = std::time::Instant::now();
        silent.push(listener.accept().unwrap());
        accepted.elapsed() < TimeLimits::ANSWER
    });
    assert!(given_up_soon, "it waited as long as for a first answer");
}
