//! Tests of `dist_test!` itself: passing, failing and hanging tests, and what they leave behind.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use brigade_rank_env::{StoreHost, World};
use brigade_testkit::{DistTest, dist_test, step};
use nix::sys::socket::{Backlog, listen};

dist_test!(world = 3, every_rank_knows_its_place, |world| {
    assert_eq!(world.world_size.as_usize(), 3);
    assert_eq!(world, World::from_env().unwrap());
    step!("rank {} was here", world.rank);
});

dist_test!(world = 2, rank_0_serves_on_the_socket_it_was_given, |world| {
    let address = (world.store.addr.as_str(), world.store.port);
    if world.is_main() {
        assert_eq!(world.store.host, StoreHost::Rank0Fd(0));
        let socket = io::stdin().as_fd().try_clone_to_owned().unwrap();
        listen(&socket, Backlog::new(8).unwrap()).unwrap();
        let (mut peer, _) = TcpListener::from(socket).accept().unwrap();
        peer.write_all(b"hello").unwrap();
    } else {
        let mut peer = loop {
            match TcpStream::connect(address) {
                Ok(peer) => break peer,
                Err(_) => std::thread::yield_now(),
            }
        };
        let mut text = String::new();
        peer.read_to_string(&mut text).unwrap();
        assert_eq!(text, "hello");
    }
});

mod inner {
    use super::dist_test;

    dist_test!(world = 2, seconds = 30, a_test_in_a_module, |world| -> Result<(), String> {
        if world.world_size.as_usize() == 2 { Ok(()) } else { Err("no".to_owned()) }
    });
}

/// Returns the report of a test that must fail; `None` in one of its ranks.
macro_rules! failing {
    ($test:expr, $body:expr) => {
        match DistTest::run(&$test, $body) {
            None => return,
            Some(result) => result.expect_err("it should have failed").to_string(),
        }
    };
}

fn test(name: &str, world: usize) -> DistTest {
    DistTest::new(&format!("dist::{name}"), world)
}

fn forever() {
    loop {
        std::thread::park();
    }
}

#[test]
fn a_rank_that_panics_fails_the_test() {
    let report = failing!(test("a_rank_that_panics_fails_the_test", 3), |world: World| {
        step!("at the fork");
        println!("said by {}", world.rank);
        assert_ne!(world.rank.as_usize(), 1, "the reason");
        forever();
    });
    assert!(report.starts_with("rank 1 of 3 failed: exit status: 101\n---- rank 1:"), "{report}");
    let (first, others) = report.split_once("---- rank 0").unwrap();
    for expected in ["last step: at the fork", "the reason", "said by 1"] {
        assert!(first.contains(expected), "{expected} is not in {report}");
    }
    assert!(others.starts_with(" was killed"), "{report}");
}

#[test]
fn a_rank_that_returns_an_error_fails_the_test() {
    let report = failing!(test("a_rank_that_returns_an_error_fails_the_test", 1), |_world| {
        Err::<(), _>("an error of the body")
    });
    assert!(report.starts_with("rank 0 of 1 failed: exit status: 101\n"), "{report}");
    assert!(report.contains("an error of the body"), "{report}");
}

#[test]
fn a_rank_that_is_killed_fails_the_test() {
    let report = failing!(test("a_rank_that_is_killed_fails_the_test", 1), |_world| {
        let own = nix::unistd::getpid();
        nix::sys::signal::kill(own, nix::sys::signal::Signal::SIGABRT).unwrap();
        forever();
    });
    assert!(report.starts_with("rank 0 of 1 failed: killed by SIGABRT\n"), "{report}");
}

#[test]
fn a_rank_that_hangs_is_named_and_killed() {
    let body = |world: World| {
        step!("before");
        if world.rank.as_usize() == 1 {
            return;
        }
        println!("a last word");
        step!("into the dark");
        forever();
    };
    // The time that a busy machine needs to bring the ranks that far is unknown.
    for seconds in [1, 4, 16, 64] {
        let name = "a_rank_that_hangs_is_named_and_killed";
        let report = failing!(test(name, 3).time_limit(Duration::from_secs(seconds)), body);
        let there =
            report.matches("into the dark").count() + report.matches("had finished").count();
        if there < 3 && seconds < 64 {
            continue;
        }
        let headline =
            format!("the time limit of {seconds} s is over and 2 of 3 ranks had not ended: 0, 2\n");
        assert!(report.starts_with(&headline), "{report}");
        let rank_0 = report.split("---- rank ").nth(1).unwrap();
        for expected in
            ["0 hung and was killed, last step: into the dark", "thread ", "a last word"]
        {
            assert!(rank_0.contains(expected), "{expected} is not in {report}");
        }
        #[cfg(target_arch = "x86_64")]
        assert!(rank_0.contains("in futex("), "{report}");
        assert!(report.contains("---- rank 1: exit status: 0, its body had finished"), "{report}");
        return;
    }
}

#[test]
fn a_rank_that_runs_nothing_fails_the_test() {
    // The harness has no test of that name, runs none and succeeds.
    let report = failing!(test("no_test_of_this_name", 1), |_world| ());
    assert!(report.contains("exited with 0 before the body had finished"), "{report}");
}

#[test]
#[allow(clippy::zombie_processes)] // that is what the test is about
fn a_child_of_a_rank_does_not_hold_up_the_test() {
    let report = failing!(test("a_child_of_a_rank_does_not_hold_up_the_test", 1), |_world| {
        let _child = Command::new("sleep").arg("1000").spawn().unwrap();
        let alone = World::from_env().unwrap().world_size.as_usize() != 1;
        assert!(alone, "with a child");
    });
    assert!(report.contains("with a child"), "{report}");
}

// Killed from outside by the test below; never run otherwise.
dist_test!(
    #[ignore = "part of the next test"]
    world = 2,
    hangs_until_killed,
    |world| {
        // The parent-death signal is set before the body is entered.
        let folder = std::env::var(PIDS).unwrap();
        let file = Path::new(&folder).join(world.rank.to_string());
        fs::write(&file, std::process::id().to_string()).unwrap();
        // stdout belongs to the harness; the test's own end of this pipe shows that both run.
        let mut ready =
            fs::OpenOptions::new().write(true).open(Path::new(&folder).join("ready")).unwrap();
        writeln!(ready, "{}", world.rank).unwrap();
        forever();
    }
);

#[test]
fn a_test_that_is_killed_leaves_no_rank() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("ready");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let mut run = Command::new(std::env::current_exe().unwrap())
        .args(["hangs_until_killed", "--exact", "--include-ignored"])
        .env(PIDS, folder.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // Open for both, or it would end when the first rank has written and closed it.
    let ready = fs::OpenOptions::new().read(true).write(true).open(&fifo).unwrap();
    assert_eq!(BufReader::new(ready).lines().take(2).count(), 2);
    let pids = ["0", "1"].map(|rank| fs::read_to_string(folder.path().join(rank)).unwrap());
    run.kill().unwrap();
    run.wait().unwrap();
    for pid in pids {
        // A zombie has no command line; it waits for another process to reap it.
        while fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty()) {
            std::thread::yield_now();
        }
    }
}

const PIDS: &str = "BRIGADE_TESTKIT_PIDS";
