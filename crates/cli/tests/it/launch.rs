//! Tests of `brigade launch` as a process: the environment of its ranks, its output, and what it leaves behind.

use std::collections::HashMap;
use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};

use crate::job::{self, Job, brigade};

/// Script of a rank that creates a file and then waits.
const STAY: &str = "touch $DIR/$RANK; sleep 1000 & wait";

#[test]
fn variables() {
    let run = Job::new(3).sh("env").run();
    assert_eq!(run.code, 0);
    let mut ports = Vec::new();
    let mut ids = Vec::new();
    for rank in 0..3 {
        let vars: HashMap<&str, &str> =
            run.lines_of(rank).into_iter().filter_map(|line| line.split_once('=')).collect();
        let number = rank.to_string();
        for (name, value) in [
            ("RANK", number.as_str()),
            ("LOCAL_RANK", &number),
            ("ROLE_RANK", &number),
            ("WORLD_SIZE", "3"),
            ("LOCAL_WORLD_SIZE", "3"),
            ("ROLE_WORLD_SIZE", "3"),
            ("GROUP_RANK", "0"),
            ("GROUP_WORLD_SIZE", "1"),
            ("ROLE_NAME", "default"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("TORCHELASTIC_MAX_RESTARTS", "0"),
            ("TORCHELASTIC_USE_AGENT_STORE", "False"),
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        ] {
            assert_eq!(vars.get(name), Some(&value), "{name} of rank {rank}");
        }
        assert_eq!(vars.contains_key("BRIGADE_STORE_FD"), rank == 0);
        ports.push(vars["MASTER_PORT"].parse::<u16>().unwrap());
        ids.push(vars["TORCHELASTIC_RUN_ID"].to_owned());
    }
    assert!(ports[0] > 0 && ports.iter().all(|port| *port == ports[0]), "{ports:?}");
    assert!(ids.iter().all(|id| *id == ids[0] && id.len() > 10), "{ids:?}");
}

#[test]
fn variables_of_an_outer_job_are_not_inherited() {
    let mut job = Job::new(2).sh("env");
    job.command.env("BRIGADE_STORE_FD", "99").env("TORCHELASTIC_ERROR_FILE", "/nowhere");
    job.command.env("RANK", "7").env("WORLD_SIZE", "8").env("MASTER_PORT", "1");
    let run = job.run();
    assert!(!run.stdout.contains("=99\n") && !run.stdout.contains("/nowhere"), "{}", run.stdout);
    assert!(run.stdout.contains("[1] RANK=1\n"), "{}", run.stdout);
    assert!(!run.stdout.contains("MASTER_PORT=1\n"));
}

/// A launcher that a rank starts must not get the settings of the launcher around it.
#[test]
fn variables_of_the_launcher_stay_with_it() {
    let mut job = Job::new(1).flag("--env=BRIGADE_ROLE=x").sh("env");
    for (name, value) in [
        ("BRIGADE_MAX_RESTARTS", "1"),
        ("BRIGADE_CONFIG", "/dev/null"),
        ("BRIGADE_ROLE", "actor"),
        ("BRIGADE_SSH", "ssh"),
        ("BRIGADE_SHARED_MEMORY", "0"),
        ("BRIGADE_OF_MINE", "1"),
    ] {
        job.command.env(name, value);
    }
    let run = job.run();
    let lines = run.lines_of(0);
    let mut of_brigade: Vec<&str> = lines
        .into_iter()
        .filter(|variable| {
            variable.starts_with("BRIGADE_") && !variable.starts_with("BRIGADE_AGENT=")
        })
        // Variables with which these tests themselves may be run.
        .filter(|variable| {
            !["BRIGADE_REQUIRE=", "BRIGADE_TEST_"].iter().any(|own| variable.starts_with(own))
        })
        .collect();
    of_brigade.sort_unstable();
    let expected = [
        "BRIGADE_OF_MINE=1",
        "BRIGADE_PROGRESS_FD=",
        "BRIGADE_ROLE=x",
        "BRIGADE_SHARED_MEMORY=0",
        "BRIGADE_STORE_FD",
    ];
    for (found, expected) in of_brigade.iter().zip(expected) {
        assert!(found.starts_with(expected), "{of_brigade:?}");
    }
    assert_eq!(of_brigade.len(), expected.len(), "{of_brigade:?}");
}

#[test]
fn the_store_has_the_port_that_a_firewall_lets_through() {
    let port = |flag: &str, more: &[&str], script: &str| {
        let job = Job::new(2).flag(&format!("--store-port={flag}"));
        more.iter().fold(job, |job, flag| job.flag(flag)).sh(script).run()
    };
    // Adjacent ports that were free a moment ago, and that are outside of the ephemeral range.
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
    let given: u16 = range.split_whitespace().next().unwrap().parse().unwrap();
    let (first, _second) = loop {
        let port = fastrand::u16(20_000..given.max(30_000));
        let listen = |port: u16| TcpListener::bind(("127.0.0.1", port));
        if let (Ok(_), Ok(second)) = (listen(port), listen(port + 1)) {
            break (port, second);
        }
    };
    // The same port for each attempt: the previous one has released it.
    let script = "echo $MASTER_PORT; exit $((1 - TORCHELASTIC_RESTART_COUNT))";
    let run = port(&first.to_string(), &["--max-restarts=1"], script);
    assert_eq!(run.code, 0, "{}", run.stderr);
    for rank in 0..2 {
        let lines = run.lines_of(rank);
        assert!(!lines.is_empty() && lines.iter().all(|it| *it == first.to_string()), "{lines:?}");
    }
    // A port that is in use is skipped if there are others.
    let taken = first + 1;
    let run = port(&format!("{taken}-{}", taken + 40), &[], "echo $MASTER_PORT");
    assert_eq!(run.code, 0, "{}", run.stderr);
    let chosen: u16 = run.lines_of(0)[0].parse().unwrap();
    assert!((taken + 1..=taken + 40).contains(&chosen), "{chosen}");
    let run = port(&taken.to_string(), &[], "echo started");
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    let said =
        format!("brigade: cannot use port {taken} for the ranks' store (flag --store-port): ");
    assert!(run.stderr.contains(&said), "{}", run.stderr);
    let run = port("0", &[], "echo started");
    assert_eq!(run.code, 2);
}

#[test]
fn the_store_of_one_host_has_the_port_that_torchrun_would_give_it() {
    let held = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let taken = held.local_addr().unwrap().port().to_string();
    // A port outside of the ephemeral range, which lies higher.
    let free = loop {
        let port = fastrand::u16(20_000..30_000);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            break port.to_string();
        }
    };
    let script = "echo $MASTER_PORT; exit $((1 - TORCHELASTIC_RESTART_COUNT))";
    let run = |port: Option<&str>, variables: &[(&str, &str)], more: &[&str]| {
        let mut job = Job::new(2).flag("--max-restarts=1");
        job = port.iter().fold(job, |job, port| job.flag(&format!("--master-port={port}")));
        job = more.iter().fold(job, |job, flag| job.flag(flag)).sh(script);
        job.command.envs(variables.iter().copied());
        job.run()
    };
    let file = tempfile::NamedTempFile::with_suffix(".yaml").unwrap();
    fs::write(&file, format!("distributed_type: MULTI_CPU\nmain_process_port: {free}\n")).unwrap();
    let config = format!("--config={}", file.path().display());
    for (port, variables, more) in [
        (Some(&*free), &[][..], &[][..]),
        (None, &[("MASTER_PORT", &*free)], &[]),
        (None, &[("PET_MASTER_PORT", &*free)], &[]),
        (Some(&*free), &[("MASTER_PORT", &*taken)], &[]),
        (None, &[], &[&*config]),
    ] {
        let run = run(port, variables, more);
        assert_eq!(run.code, 0, "{}", run.stderr);
        for rank in 0..2 {
            let lines = run.lines_of(rank);
            assert!(!lines.is_empty() && lines.iter().all(|it| *it == free), "{lines:?}");
        }
    }
    for (port, variables, source) in [
        (Some(&*taken), &[][..], "flag --master-port"),
        (None, &[("MASTER_PORT", &*taken)], "environment MASTER_PORT"),
        (None, &[("PET_MASTER_PORT", &*taken)], "environment PET_MASTER_PORT"),
    ] {
        let run = run(port, variables, &[]);
        assert_eq!((run.code, run.stdout.as_str()), (1, ""));
        let said = format!("brigade: cannot use port {taken} for the ranks' store ({source}): ");
        assert!(run.stderr.contains(&said), "{}", run.stderr);
        assert!(
            run.stderr.contains("without one, each attempt uses a free port"),
            "{}",
            run.stderr
        );
    }
    // The port of a job around the launcher belongs to that job, and these use any port.
    for (port, variables, more) in [
        (None, &[("MASTER_PORT", &*taken), ("RANK", "0"), ("WORLD_SIZE", "1")][..], &[][..]),
        (Some("0"), &[], &[]),
        (Some(&*taken), &[], &["--standalone"]),
        (None, &[("PET_MASTER_PORT", &*taken), ("PET_STANDALONE", "1")], &[]),
    ] {
        let run = run(port, variables, more);
        assert_eq!(run.code, 0, "{}", run.stderr);
        let lines = run.lines_of(0);
        assert!(
            !lines.is_empty() && lines.iter().all(|it| **it != *taken && **it != *free),
            "{lines:?}"
        );
    }
    let mut job = Job::new(1).sh("true");
    job.command.env("MASTER_PORT", "none");
    let run = job.run();
    let said = "brigade: environment MASTER_PORT: master-port is `none`, expected a port";
    assert_eq!(run.code, 2);
    assert!(run.stderr.starts_with(said), "{}", run.stderr);
}

#[test]
fn rank_0_inherits_a_bound_socket_and_the_others_do_not() {
    let run = Job::new(2)
        .sh("if [ -n \"$BRIGADE_STORE_FD\" ]; then readlink /proc/self/fd/$BRIGADE_STORE_FD; \
             else ls -l /proc/self/fd | grep -c socket: || true; fi")
        .run();
    assert!(run.stdout.contains("[0] socket:["), "{}", run.stdout);
    assert!(run.stdout.contains("[1] 0\n"), "{}", run.stdout);
}

#[test]
fn threads() {
    let cores = thread::available_parallelism().unwrap().get();
    let threads = |job: Job| job.sh("echo $OMP_NUM_THREADS").run().stdout;

    assert_eq!(threads(Job::new(1)), format!("[0] {cores}\n"));
    assert_eq!(threads(Job::new(1).flag("--threads-per-rank=3")), "[0] 3\n");
    let many = threads(Job::new(2 * cores));
    assert!(many.lines().all(|line| line.ends_with("] 1")), "{many}");

    let mut by_user = Job::new(1);
    by_user.command.env("OMP_NUM_THREADS", "5").env("OMP_WAIT_POLICY", "ACTIVE");
    let run = by_user.sh("echo $OMP_NUM_THREADS $OMP_WAIT_POLICY").run();
    assert_eq!(run.stdout, "[0] 5 ACTIVE\n");
}

#[test]
fn arguments_are_passed_on_as_they_are() {
    let hard = ["--flag", "two words", "", "--nproc", "-x", "--", "$RANK", "a\nb", "--help"];
    let program = ["printf", "<%s>"];
    for dashes in [&[][..], &["--"]] {
        let words = dashes.iter().chain(&program).chain(&hard).copied();
        let run = Job::new(1).words(words).run();
        let expected: String = hard.iter().map(|word| format!("<{word}>")).collect();
        assert_eq!(run.stdout, format!("[0] {}\n", expected.replace('\n', "\n[0] ")));
    }
}

#[test]
fn lines_are_prefixed_where_they_belong() {
    let run = Job::new(1).sh("printf 'a\\nb'; printf 'c\\n' >&2; printf '\\377\\n\\nend'").run();
    assert_eq!(run.raw_stdout, b"[0] a\n[0] b\xff\n[0] \n[0] end\n");
    assert_eq!(run.stderr, "[0] c\n");
    assert_eq!(run.code, 0);
}

#[test]
fn lines_of_ranks_do_not_mix() {
    // 4 x 2 MB, more than any pipe holds, in lines of every length up to 200 bytes.
    let script = "awk -v r=$RANK 'BEGIN { for (i = 0; i < 20000; i++) { \
                  s = sprintf(\"%*s\", i % 200, \"\"); gsub(/ /, r, s); print i \":\" s } }'";
    let run = Job::new(4).sh(script).run();
    assert_eq!(run.code, 0);
    for rank in 0..4 {
        let lines = run.lines_of(rank);
        assert_eq!(lines.len(), 20_000);
        for (i, line) in lines.iter().enumerate() {
            let expected = format!("{i}:{}", rank.to_string().repeat(i % 200));
            assert_eq!(*line, expected);
        }
    }
}

#[test]
fn standard_input_is_empty() {
    assert_eq!(Job::new(2).sh("cat; echo $?").run().stdout.matches("] 0\n").count(), 2);
}

#[test]
fn sixty_four_ranks() {
    let run = Job::new(64).sh("echo $RANK of $WORLD_SIZE").run();
    assert_eq!(run.code, 0);
    for rank in 0..64 {
        assert_eq!(run.lines_of(rank), [format!("{rank} of 64")]);
    }
}

#[test]
fn the_first_failing_rank_decides() {
    let script = format!(
        "if [ $RANK = 1 ]; then {}; echo so far; echo the reason >&2; exit 7; else {STAY}; fi",
        "until [ -e $DIR/0 ] && [ -e $DIR/2 ]; do :; done"
    );
    let job = Job::new(3).sh(&script);
    let run = job.run();
    assert_eq!(run.code, 7);
    assert!(run.stdout.contains("[1] so far\n"));
    let report = &run.stderr[run.stderr.find("failed").unwrap()..];
    assert!(run.stderr.contains("brigade: rank 1 on "), "{}", run.stderr);
    assert!(report.contains("failed: exit code 7; stopping 2 ranks\n"), "{report}");
    for once in ["the reason\n", "failed: exit code 7"] {
        assert_eq!(run.stderr.matches(once).count(), 1, "{once}: {}", run.stderr);
    }
}

#[test]
fn ranks_that_do_not_stop_are_killed() {
    let script = "trap '' TERM; touch $DIR/$RANK; \
                  if [ $RANK = 0 ]; then until [ -e $DIR/1 ]; do :; done; exit 3; fi; \
                  while :; do sleep 1000; done";
    let run = Job::new(2).flag("--shutdown-timeout=0.2").sh(script).run();
    assert_eq!(run.code, 3);
    assert!(run.stderr.contains("1 rank did not stop within 0.2 s: killed"), "{}", run.stderr);
}

#[test]
fn a_signal_that_kills_a_rank_is_named() {
    let run = Job::new(2).sh("[ $RANK = 1 ] || exec sleep 1000; printf half; kill -KILL $$").run();
    assert_eq!(run.code, 128 + 9);
    assert_eq!(run.stdout, "[1] half\n");
    assert!(run.stderr.contains("failed: killed by SIGKILL"), "{}", run.stderr);
    assert!(run.stderr.ends_with(" last lines on stdout:\n  half\n"), "{}", run.stderr);

    let run = Job::new(1).sh("kill -SEGV $$").run();
    assert_eq!(run.code, 128 + 11);
    assert!(run.stderr.contains("killed by SIGSEGV"), "{}", run.stderr);
}

#[test]
fn signals_are_forwarded() {
    for (signal, number) in [(Signal::SIGTERM, 15), (Signal::SIGINT, 2), (Signal::SIGHUP, 1)] {
        // The caller of the tests may ignore some signals.
        let job = started_with("exec env --default-signal=HUP,INT").sh(STAY).start();
        job.wait_for_files(2);
        job.send(signal);
        let run = job.finish();
        assert_eq!(run.code, 128 + number);
        assert!(run.stderr.contains(&format!("brigade: stopped by {signal}\n")), "{}", run.stderr);
    }
}

/// Starts two ranks, from a shell line that becomes the launcher.
fn started_with(line: &str) -> Job {
    let mut command = Command::new("sh");
    let line = format!("{line} \"$0\" \"$@\"");
    command.args(["-c", &line, job::BRIGADE, "launch", "--nproc", "2"]);
    command.env("BRIGADE_CONFIG", "/dev/null");
    Job::of(command)
}

#[test]
fn under_nohup_a_job_outlives_its_terminal() {
    let script = "touch $DIR/$RANK; until [ -e $DIR/go ]; do sleep 0.05; done";
    let job = started_with("trap '' HUP; exec").sh(script);
    let go = job.folder().join("go");
    let job = job.start();
    job.wait_for_files(2);
    job.send(Signal::SIGHUP);
    fs::write(go, "").unwrap();
    let run = job.finish();
    assert_eq!(run.code, 0);
    assert!(!run.stderr.contains("SIGHUP"), "{}", run.stderr);
}

/// Ranks of a job that a script starts in the background ignore SIGINT.
#[test]
fn ranks_that_ignore_an_interrupt_are_ended_otherwise() {
    let job = started_with("trap '' INT; exec").sh(STAY).start();
    job.wait_for_files(2);
    job.send(Signal::SIGINT);
    let run = job.finish();
    assert_eq!(run.code, 130);
    assert!(!run.stderr.contains("killed"), "{}", run.stderr);
}

#[test]
fn a_program_may_handle_a_signal_and_decide() {
    for code in [0, 5] {
        let script = format!("trap 'echo saved; exit {code}' TERM; {STAY}");
        let job = Job::new(2).sh(&script).start();
        job.wait_for_files(2);
        job.send(Signal::SIGTERM);
        let run = job.finish();
        assert_eq!(run.code, code);
        assert_eq!(run.stdout.matches("saved\n").count(), 2);
    }
}

#[test]
fn signals_for_the_program_do_not_stop_the_job() {
    let script = format!("trap 'touch $DIR/usr1-$RANK; exit 0' USR1; {STAY}");
    let job = Job::new(2).sh(&script).start();
    job.wait_for_files(2);
    job.send(Signal::SIGUSR1);
    assert_eq!(job.finish().code, 0);
}

#[test]
fn a_second_interrupt_kills() {
    let job = Job::new(2).sh("trap '' INT TERM; touch $DIR/$RANK; while :; do sleep 1000; done");
    let mut job = job.start();
    job.wait_for_files(2);
    job.send(Signal::SIGINT);
    // The second signal is sent when the first has been handled: two at once would be one.
    job.wait_for_stderr("SIGINT: waiting up to 30 s for 2 ranks to stop");
    job.send(Signal::SIGINT);
    assert_eq!(job.finish().code, 130);
}

#[test]
fn ranks_are_suspended_with_the_launcher() {
    let job = Job::new(2).sh(&format!("echo $$ > $DIR/pid$RANK; {STAY}")).start();
    job.wait_for_files(4);
    let pids = job.read_files("pid");
    job.send(Signal::SIGTSTP);
    for pid in pids.iter().chain([&job.pid()]) {
        job::wait_until(|| job::state_of(*pid) == Some('T'));
    }
    job.send(Signal::SIGCONT);
    for pid in &pids {
        job::wait_until(|| job::state_of(*pid).is_some_and(|state| state != 'T'));
    }
    job.send(Signal::SIGTERM);
    assert_eq!(job.finish().code, 143);
}

#[test]
fn children_of_a_finished_rank_do_not_stay() {
    // `run` checks that nothing is left, inside or outside of the rank's session.
    let script = "sleep 1000 & setsid sleep 1000 & (setsid sh -c 'sleep 1000 & wait' &); exit 0";
    assert_eq!(Job::new(2).sh(script).run().code, 0);
}

/// The kernel closes an agent's descriptors before it gives its children another parent: a reaper that finds no
/// processes in between must not conclude that nothing is left.
#[test]
fn a_reaper_stays_until_its_agent_has_ended() {
    let folder = tempfile::tempdir().unwrap();
    mkfifo(&folder.path().join("go"), Mode::S_IRWXU).unwrap();
    // Instead of an agent: the reaper's pipe is closed while it runs. One process of it becomes an orphan only when it
    // ends; others are started one after the other.
    let agent = "export NAME=brigade-test-$$; exec 3<&0; $BRIGADE __reaper $$ $NAME <&3 & \
                 sh -c 'BRIGADE_AGENT=$NAME setsid sleep 1000 & echo $! >$$.part; \
                        mv $$.part orphan; echo $$ >$$.part; mv $$.part parent; wait' & \
                 while :; do read -r n <go || continue; BRIGADE_AGENT=$NAME setsid sleep 1000 & \
                 echo $! >part; mv part child$n; done";
    let mut command = Command::new("sh");
    command.args(["-c", agent]).current_dir(folder.path()).env("BRIGADE", job::BRIGADE);
    // Its remaining processes may end a moment after this test, and must not hold its output.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut agent = command.stdin(Stdio::piped()).spawn().unwrap();
    let number = |name: &str| -> i32 {
        let path = folder.path().join(name);
        job::wait_until(|| path.exists());
        fs::read_to_string(path).unwrap().trim().parse().unwrap()
    };
    let (orphan, parent) = (number("orphan"), number("parent"));
    let has_ended = |pid: i32| matches!(job::state_of(pid), None | Some('Z' | 'X'));
    drop(agent.stdin.take());
    for n in 0..5 {
        // Time for several polls in which there is nothing to kill; a reaper that remains would remain for any.
        thread::sleep(Duration::from_millis(30));
        fs::write(folder.path().join("go"), format!("{n}\n")).unwrap();
        let child = number(&format!("child{n}"));
        job::wait_until(|| has_ended(child));
    }
    assert!(!has_ended(orphan), "it has a parent that lives");
    for pid in [parent, agent.id().cast_signed()] {
        kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    }
    agent.wait().unwrap();
    job::wait_until(|| has_ended(orphan));
    job::wait_until(|| job::reapers_of(agent.id().cast_signed()).is_empty());
}

/// `sbatch`, a running `tmux` and `systemd-run` do so: a process that does not descend from the rank starts what the
/// rank requests, with the rank's environment.
#[test]
fn processes_started_by_a_service_for_a_rank_live_on() {
    for killed in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let [requests, served] = ["requests", "served"].map(|name| folder.path().join(name));
        mkfifo(&requests, Mode::S_IRWXU).unwrap();
        let service = "read -r agent <requests; BRIGADE_AGENT=$agent setsid sleep 1000 & \
                       echo $! >part; mv part served; wait";
        let mut service =
            Command::new("sh").args(["-c", service]).current_dir(folder.path()).spawn().unwrap();
        let script = format!(
            "echo $BRIGADE_AGENT >{}; until [ -e {} ]; do sleep 0.01; done; touch $DIR/there; \
             [ -e $DIR/stay ] && sleep 1000; exit 0",
            requests.display(),
            served.display(),
        );
        let job = Job::new(1).sh(&script);
        if killed {
            fs::write(job.folder().join("stay"), "").unwrap();
        }
        let job = job.start();
        job.wait_for("there");
        if killed {
            job.send(Signal::SIGKILL);
        }
        assert_eq!(job.finish().code, if killed { 137 } else { 0 });
        let served: i32 = fs::read_to_string(served).unwrap().trim().parse().unwrap();
        let lives = job::state_of(served).is_some_and(|state| state != 'Z');
        let _ = kill(Pid::from_raw(served), Signal::SIGKILL);
        service.wait().unwrap();
        assert!(lives, "{}", if killed { "the reaper killed it" } else { "the agent killed it" });
    }
}

#[test]
fn a_reader_that_leaves_ends_the_job() {
    let mut job = Job::new(2).sh("while :; do echo line; done").start();
    let mut stdout = job.take_stdout();
    stdout.read_exact(&mut [0; 100]).unwrap();
    drop(stdout);
    let run = job.finish();
    assert_eq!(run.code, 141);
    assert!(
        run.stderr.ends_with("brigade: stopped: the reader of the output has gone\n"),
        "{}",
        run.stderr
    );
}

#[test]
fn a_paused_reader_does_not_hold_up_a_signal() {
    let (reader, writer) = std::io::pipe().unwrap();
    let mut job = Job::new(1).sh("while :; do echo line; done");
    job.command.stdout(writer.try_clone().unwrap());
    let job = job.start();
    // Full: the next writer blocks until something reads.
    job::wait_until(|| {
        let mut room = [PollFd::new(writer.as_fd(), PollFlags::POLLOUT)];
        poll(&mut room, PollTimeout::ZERO).unwrap() == 0
    });
    job.send(Signal::SIGTERM);
    // The rank is stopped; its output cannot be written, and a second signal discards it, whether it is sent before or
    // after the launcher has noticed the rank's end.
    job.wait_until_no_rank();
    job.send(Signal::SIGTERM);
    assert_eq!(job.finish().code, 143);
    drop(reader);
}

#[test]
fn a_paused_reader_does_not_keep_the_others_running_when_a_rank_fails() {
    let (reader, writer) = std::io::pipe().unwrap();
    let script = "if [ $RANK = 0 ]; then while :; do echo line; done; fi; \
                  until [ -e $DIR/paused ]; do sleep 0.01; done; exit 3";
    let mut job = Job::new(2).sh(script);
    job.command.stdout(writer.try_clone().unwrap());
    let paused = job.folder().join("paused");
    let job = job.start();
    job::wait_until(|| {
        let mut room = [PollFd::new(writer.as_fd(), PollFlags::POLLOUT)];
        poll(&mut room, PollTimeout::ZERO).unwrap() == 0
    });
    fs::write(paused, "").unwrap();
    job.wait_until_no_rank();
    // A reader that continues gets the outcome.
    drop(writer);
    let reads = thread::spawn(move || std::io::copy(&mut { reader }, &mut std::io::sink()));
    let run = job.finish();
    reads.join().unwrap().unwrap();
    assert_eq!(run.code, 3, "{}", run.stderr);
    assert!(run.stderr.contains("brigade: rank 1 on "), "{}", run.stderr);
}

#[test]
fn a_full_disk_under_the_log_does_not_end_the_job() {
    let mut job = Job::new(1).sh("echo one; echo two; echo alive >&2");
    job.command.stdout(fs::OpenOptions::new().write(true).open("/dev/full").unwrap());
    let run = job.run();
    assert_eq!(run.code, 0);
    assert!(run.stderr.contains("[0] alive\n"), "{}", run.stderr);
    assert_eq!(run.stderr.matches("cannot write to stdout, some output is lost").count(), 1);
}

#[test]
fn a_killed_launcher_leaves_nothing() {
    let mut random = brigade_test_needs::random();
    // Each rank has a child in its session, one in a group of its own, and one that has left.
    let script = "touch $DIR/$RANK; sleep 1000 & setsid sleep 1000 & \
                  sh -mc 'sleep 1000 & wait' & touch $DIR/children-$RANK; wait";
    for _ in 0..20 {
        let nproc = random.usize(1..=4);
        let files = random.usize(..=2 * nproc);
        let spin = random.u64(..200_000);
        println!("{nproc} ranks, killed after {files} files and {spin} turns");
        let job = Job::new(nproc).sh(script).start();
        job.wait_for_files(files);
        (0..spin).for_each(|turn| {
            std::hint::black_box(turn);
        });
        job.send(Signal::SIGKILL);
        assert_eq!(job.finish().code, 128 + 9);
    }
}

/// A scheduler or service manager that ends a job sends a signal to all of its processes first, including the reaper.
#[test]
fn a_launcher_that_is_killed_after_all_were_asked_leaves_nothing() {
    let job =
        Job::new(2).sh("trap '' TERM; touch $DIR/$RANK; while :; do sleep 1000; done").start();
    job.wait_for_files(2);
    let watch = job.watch();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT] {
        kill(Pid::from_raw(watch), signal).unwrap();
    }
    job.send(Signal::SIGKILL);
    assert_eq!(job.finish().code, 128 + 9);
}

#[test]
fn a_launcher_inside_a_launcher() {
    let inner = format!("{} launch --nproc 2 sh -c 'echo $RANK of $WORLD_SIZE'", job::BRIGADE);
    let run = Job::new(2).sh(&inner).run();
    assert_eq!(run.code, 0);
    let mut lines: Vec<&str> = run.stdout.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["[0] [0] 0 of 2", "[0] [1] 1 of 2", "[1] [0] 0 of 2", "[1] [1] 1 of 2"]);

    let inner = format!(
        "{} launch --nproc 2 sh -c 'touch $DIR/$$; setsid sleep 1000 & wait'",
        job::BRIGADE
    );
    let job = Job::new(2).sh(&inner).start();
    job.wait_for_files(4);
    job.send(Signal::SIGKILL);
    assert_eq!(job.finish().code, 137);
}

#[test]
fn programs_that_cannot_run_are_refused_before_a_start() {
    let folder = tempfile::tempdir().unwrap();
    let locked = folder.path().join("locked");
    fs::write(&locked, "#!/bin/sh\n").unwrap();
    let (locked, folder) = (locked.to_str().unwrap(), folder.path().to_str().unwrap());
    let nothing = format!("{folder}/nothing");
    // Arguments, code, and text on stderr.
    let table: [(&[&str], i32, &str); 11] = [
        (&["--nproc", "1", "no-such-program"], 127, "no-such-program not found in PATH"),
        (&["--nproc", "1", &nothing], 127, "not found"),
        (&["--nproc", "1", locked], 126, "is not executable: `chmod +x` it"),
        (&["--nproc", "1", folder], 126, "is a directory, not a program"),
        (&["--nproc", "1", ""], 127, "not found"),
        (&["--nproc", "0", "true"], 2, "expected a whole number from 1, or auto, gpu or cpu"),
        (&["--nproc", "two", "true"], 2, "expected a whole number from 1, or auto, gpu or cpu"),
        (&["--nproc", "-1", "true"], 2, "--nproc"),
        (&["--nprocs", "2", "true"], 2, "a similar argument exists: '--nproc'"),
        (&["--nproc", "2", "-m"], 2, "required arguments were not provided"),
        (
            &["--nproc", "1", "--shutdown-timeout=-3", "true"],
            2,
            "invalid value '-3' for '--shutdown-timeout",
        ),
    ];
    for (args, code, message) in table {
        let output = brigade().arg("launch").args(args).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {stderr}");
        assert!(stderr.contains(message), "{args:?}: {stderr}");
        assert!(output.stdout.is_empty());
        assert_eq!(stderr.lines().count(), 1, "{args:?}: {stderr}");
    }
}

#[test]
fn an_interpreter_that_is_missing_is_the_ranks_failure() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("script");
    fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let run = Job::new(1).words([script.to_str().unwrap()]).run();
    assert_eq!(run.code, 127);
    assert!(run.stderr.contains("[0] brigade: cannot run "), "{}", run.stderr);
}

#[test]
fn help_and_version_are_answers() {
    for args in [&["--help"][..], &["launch", "--help"], &["launch", "-h"], &["--version"]] {
        let output = brigade().args(args).stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{args:?}");
        assert!(output.stdout.starts_with(b"brigade") || output.stdout.len() > 300, "{args:?}");
    }
    assert_eq!(brigade().output().unwrap().status.code(), Some(2));
}

/// Schedulers send SIGTERM to a job more than once. The last one may arrive when the ranks have ended.
#[test]
fn signals_that_come_too_late_do_not_change_the_exit_code() {
    for _ in 0..5 {
        let job = Job::new(2).sh("trap 'exit 0' TERM; touch $DIR/$RANK; sleep 1000 & wait").start();
        job.wait_for_files(2);
        while !job.has_ended() {
            job.send(Signal::SIGTERM);
        }
        assert_eq!(job.finish().code, 0);
    }
}
