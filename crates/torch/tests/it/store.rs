//! Stores: TCP, file, hash and prefix, and their time limits.

use std::fs::File;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use brigade_testkit::dist_test;
use brigade_torch::{Error, Fault, Store, TcpStore, inherited_socket};
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, getsockname, socket};

use crate::rendezvous::{self, LIMIT, assert_fault};

const SHORT: Duration = Duration::from_millis(100);

/// What every kind of store does.
fn exercise(store: &Store) {
    store.set("text", "value").unwrap();
    store.set("bytes", [0, 255, 0]).unwrap();
    store.set("empty", "").unwrap();
    assert_eq!(store.get("text").unwrap(), b"value");
    assert_eq!(store.get("bytes").unwrap(), [0, 255, 0]);
    assert_eq!(store.get("empty").unwrap(), b"");
    store.set("text", "another").unwrap();
    assert_eq!(store.get("text").unwrap(), b"another");

    assert_eq!(store.add("count", 3).unwrap(), 3);
    assert_eq!(store.add("count", -5).unwrap(), -2);
    assert_eq!(store.get("count").unwrap(), b"-2");

    assert_eq!(store.compare_set("lock", "", "mine").unwrap(), b"mine");
    assert_eq!(store.compare_set("lock", "", "yours").unwrap(), b"mine");
    assert_eq!(store.compare_set("lock", "mine", "yours").unwrap(), b"yours");

    assert!(store.contains(&["text", "lock"]).unwrap());
    assert!(!store.contains(&["text", "never"]).unwrap());
    store.wait(&["text", "lock"], LIMIT).unwrap();
    let before = store.num_keys().unwrap();
    store.set("one more", "").unwrap();
    assert_eq!(store.num_keys().unwrap(), before + 1);
    assert!(store.delete("one more").unwrap());
    assert!(is_file(store) || !store.delete("one more").unwrap());
    assert!(!store.contains(&["one more"]).unwrap());

    let error = assert_fault(store.wait(&["text", "never"], SHORT), Fault::Timeout);
    assert!(error.to_string().contains("never"), "{error}");
    let limit = store.timeout().unwrap();
    store.set_timeout(SHORT).unwrap();
    assert_eq!(store.timeout().unwrap(), SHORT);
    let error = assert_fault(store.get("never"), Fault::Timeout);
    assert!(error.to_string().starts_with("store get of \"never\" failed (timed out)"), "{error}");
    store.set_timeout(limit).unwrap();
}

fn is_file(store: &Store) -> bool {
    format!("{store:?}").starts_with("Store(file")
}

fn two_threads(one: &Store, other: Store) {
    let waiting = thread::spawn(move || {
        other.wait(&["ready"], LIMIT).unwrap();
        other.get("ready").unwrap()
    });
    one.set("ready", "now").unwrap();
    assert_eq!(waiting.join().unwrap(), b"now");
}

#[test]
fn tcp() {
    let server = TcpStore::server("127.0.0.1", 0).open().unwrap();
    exercise(&server);
    let client = TcpStore::client("127.0.0.1", server.port().unwrap()).open().unwrap();
    assert_eq!(client.port(), server.port());
    assert_eq!(client.get("text").unwrap(), b"another");
    exercise(&client.prefix("clean").unwrap());
    two_threads(&server, client);
    assert_eq!(format!("{server:?}"), "Store(tcp://127.0.0.1:0)");
}

#[test]
fn hash() {
    let store = Store::hash().unwrap();
    exercise(&store);
    two_threads(&store, store.clone());
    assert_eq!(store.port(), None);
}

#[test]
fn file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let store = Store::file(&path, 2).unwrap();
    exercise(&store);
    two_threads(&store, Store::file(&path, 2).unwrap());
    let error = Store::file(folder.path().join("no/such/file"), 1).unwrap_err();
    assert!(error.to_string().contains("no/such/file has no folder"), "{error}");
}

#[test]
fn prefixes_keep_keys_apart() {
    let store = Store::hash().unwrap();
    let (a, b) = (store.prefix("a").unwrap(), store.prefix("b").unwrap());
    exercise(&a);
    exercise(&b);
    assert!(!store.contains(&["text"]).unwrap());
    assert_eq!(store.get("a/text").unwrap(), b"another");
    assert_eq!(b.prefix("c").unwrap().add("n", 1).unwrap(), 1);
    assert_eq!(store.get("b/c/n").unwrap(), b"1");
}

dist_test!(world = 3, dist_file, |world| {
    let rendezvous = rendezvous::store(&world);
    let folder = world.is_main().then(|| tempfile::tempdir().unwrap());
    if let Some(folder) = &folder {
        rendezvous.set("folder", folder.path().to_str().unwrap()).unwrap();
    }
    let folder = String::from_utf8(rendezvous.get("folder").unwrap()).unwrap();
    let store = Store::file(format!("{folder}/store"), 3).unwrap();
    let mine = world.rank.as_usize().to_string();
    store.set(&mine, &mine).unwrap();
    store.wait(&["0", "1", "2"], LIMIT).unwrap();
    for rank in ["0", "1", "2"] {
        assert_eq!(store.get(rank).unwrap(), rank.as_bytes());
    }
    store.add("sum", 1).unwrap();
    // The file stays until every rank has read it.
    rendezvous.add("done", 1).unwrap();
    while rendezvous.get("done").unwrap() != b"3" {}
    assert_eq!(store.add("sum", 0).unwrap(), 3);
    // A FileStore writes to its file as it is dropped, and waits until the store's time limit for a file
    // that is missing: rank 0 removes the folder only after all have dropped theirs.
    drop(store);
    rendezvous.add("gone", 1).unwrap();
    while world.is_main() && rendezvous.get("gone").unwrap() != b"3" {}
});

#[test]
fn a_server_on_a_listening_socket() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = TcpStore::server_on(listener).unwrap().open().unwrap();
    assert_eq!(server.port(), Some(port));
    two_threads(&server, TcpStore::client("127.0.0.1", port).open().unwrap());
}

fn on_inherited(fd: i32) -> Result<TcpStore, Error> {
    TcpStore::server_on_socket(inherited_socket(fd)?)
}

/// A bound socket as a rank inherits it, and its port. It has a number for itself: a number is taken over once in a
/// process, and with `cargo test` several tests of this program run in one.
fn inherited() -> (RawFd, u16) {
    static NEXT: AtomicI32 = AtomicI32::new(200);
    let bound = socket(AddressFamily::Inet, SockType::Stream, SockFlag::empty(), None).unwrap();
    bind(bound.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, 0)).unwrap();
    let port = getsockname::<SockaddrIn>(bound.as_raw_fd()).unwrap().port();
    let number = FcntlArg::F_DUPFD(NEXT.fetch_add(1, Ordering::Relaxed));
    (fcntl(&bound, number).unwrap(), port)
}

#[test]
fn a_server_on_a_descriptor() {
    let (descriptor, port) = inherited();
    let server = on_inherited(descriptor).unwrap().open().unwrap();
    assert_eq!(server.port(), Some(port));
    two_threads(&server, TcpStore::client("127.0.0.1", port).open().unwrap());
    drop(server);
    // The port is free again: no copy of the socket is left open. With `cargo test` other tests of this process start
    // ranks meanwhile, which may have inherited one, and end within their time limit.
    let end = Instant::now() + Duration::from_secs(70);
    while let Err(error) = TcpListener::bind(("127.0.0.1", port)) {
        assert!(Instant::now() < end, "{error}");
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_descriptor_without_a_bound_socket_is_refused() {
    let refusal = |fd| on_inherited(fd).unwrap_err().to_string();
    assert!(refusal(-1).contains("descriptor -1"), "{}", refusal(-1));
    assert!(refusal(1_000_000).contains("unset BRIGADE_STORE_FD"), "{}", refusal(1_000_000));
    let file = File::open("/dev/null").unwrap();
    assert!(refusal(file.as_raw_fd()).contains("descriptor"));
    let unbound = socket(AddressFamily::Inet, SockType::Stream, SockFlag::empty(), None).unwrap();
    assert!(
        refusal(unbound.as_raw_fd()).contains("not bound to a port"),
        "{}",
        refusal(unbound.as_raw_fd())
    );
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let connection = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    assert!(refusal(connection.as_raw_fd()).contains("a connection"));
    // A listener of another part of the program is not taken over.
    assert!(refusal(listener.as_raw_fd()).contains("listens already"));
    let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
    assert!(refusal(datagrams.as_raw_fd()).contains("not a TCP socket"));
    // One that this process has made, and would not leave to a program that it starts.
    let own = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
    bind(own.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, 0)).unwrap();
    assert!(refusal(own.as_raw_fd()).contains("not inherited"));
    // A refused descriptor still belongs to its owner.
    assert!(file.metadata().is_ok() && connection.peer_addr().is_ok());
    assert!(datagrams.local_addr().is_ok() && getsockname::<SockaddrIn>(own.as_raw_fd()).is_ok());
}

#[test]
fn a_port_in_use_is_an_error_at_once() {
    let taken = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let error =
        assert_fault(TcpStore::server("127.0.0.1", port).timeout(LIMIT).open(), Fault::Network);
    let text = error.to_string();
    assert!(text.starts_with(&format!("store listen of \"127.0.0.1:{port}\" failed")), "{text}");
    assert!(text.contains("in use"), "{text}");
}

#[test]
fn a_server_that_is_not_there_is_named() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let limit = Duration::from_millis(500);
    let error = TcpStore::client("127.0.0.1", port).timeout(limit).open().unwrap_err();
    assert!(matches!(error.fault(), Some(Fault::Timeout | Fault::Network)), "{error}");
    assert!(error.to_string().contains(&format!("connect of \"127.0.0.1:{port}\"")), "{error}");

    let nowhere = TcpStore::client("no-such-host.invalid", port).timeout(limit).open();
    let error = nowhere.unwrap_err();
    assert!(matches!(error.fault(), Some(Fault::Timeout | Fault::Network)), "{error}");
    assert!(error.to_string().contains("no-such-host.invalid"), "{error}");
}

#[test]
fn the_server_waits_for_its_workers() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = |listener| TcpStore::server_on(listener).unwrap().world_size(2);
    let client = thread::spawn(move || {
        let client = TcpStore::client("127.0.0.1", port).world_size(2).wait_for_workers(true);
        let client = client.open().unwrap();
        client.wait(&["done"], LIMIT).unwrap();
    });
    let store = server(listener).wait_for_workers(true).timeout(LIMIT).open().unwrap();
    store.set("done", "").unwrap();
    client.join().unwrap();

    let alone = TcpListener::bind("127.0.0.1:0").unwrap();
    assert_fault(server(alone).wait_for_workers(true).timeout(SHORT).open(), Fault::Timeout);
}

#[test]
fn a_server_that_has_gone_is_an_error() {
    let server = TcpStore::server("127.0.0.1", 0).open().unwrap();
    let client = TcpStore::client("127.0.0.1", server.port().unwrap()).open().unwrap();
    drop(server);
    // The first write may still reach the closed socket.
    let error = (0..100).find_map(|_| client.get("key").err()).unwrap();
    assert!(matches!(error.fault(), Some(Fault::Network | Fault::PeerLost)), "{error}");
}

#[test]
fn a_client_waits_for_a_server_that_is_late() {
    // Bound and not listening: the state that a rank finds if it is faster than the server.
    let (late, port) = inherited();
    let client = thread::spawn(move || {
        let client = TcpStore::client("localhost", port).timeout(LIMIT).open().unwrap();
        assert_eq!(client.timeout().unwrap(), LIMIT, "the whole of it, for what comes later");
        client.get("said").unwrap()
    });
    // It has been refused when the server begins, most of the time; both orders must work.
    thread::sleep(SHORT);
    let server = on_inherited(late).unwrap().timeout(LIMIT);
    let server = server.open().unwrap();
    server.set("said", "late").unwrap();
    assert_eq!(client.join().unwrap(), b"late");
}
