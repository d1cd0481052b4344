//! `brigade launch` when ranks fail: the report, the error files, the restarts.

#![allow(clippy::unwrap_used)] // as in job: clippy knows only functions marked as tests

mod job;

use brigade_world::ErrorRecord;
use job::Job;
use nix::sys::signal::Signal;

#[test]
fn a_job_starts_again_until_it_succeeds() {
    // Rank 1 fails in the first two attempts, once rank 0 has spoken.
    let script = "n=$TORCHELASTIC_RESTART_COUNT; \
                  echo attempt $n of $TORCHELASTIC_MAX_RESTARTS at $MASTER_PORT \
                  with ${BRIGADE_STORE_FD:-none}; touch $DIR/$n-$RANK; \
                  if [ $n -lt 2 ]; then until [ -e $DIR/$n-0 ]; do :; done; \
                  [ $RANK = 1 ] && exit 4; sleep 1000; fi; echo done";
    let run = Job::new(2).flag("--max-restarts=3").sh(script).run();
    assert_eq!(run.code, 0, "{}", run.stderr);
    for restart in [1, 2] {
        let line = format!("failed: exit code 4; restart {restart} of 3; stopping 1 rank\n");
        assert_eq!(run.stderr.matches(&line).count(), 1, "{}", run.stderr);
    }
    assert_eq!(run.stderr.lines().count(), 2, "one line for each restart:\n{}", run.stderr);
    let mut ports = Vec::new();
    for rank in 0..2 {
        let lines = run.lines_of(rank);
        assert_eq!(lines.len(), 4, "{lines:?}");
        for (attempt, line) in lines[..3].iter().enumerate() {
            let words: Vec<&str> = line.split(' ').collect();
            assert_eq!(words[..4], ["attempt", &attempt.to_string(), "of", "3"]);
            assert_eq!(words[7] == "none", rank != 0, "{line}");
            ports.push(words[5].to_owned());
        }
        assert_eq!(lines[3], "done");
    }
    assert_eq!(ports[..3], ports[3..], "all ranks meet at the same port");
    assert!(ports[0] != ports[1] && ports[1] != ports[2], "each attempt has its own: {ports:?}");
}

#[test]
fn restarts_come_to_an_end() {
    let script =
        "echo attempt $TORCHELASTIC_RESTART_COUNT >&2; exit $((3 + TORCHELASTIC_RESTART_COUNT))";
    let run = Job::new(1).flag("--max-restarts=2").sh(script).run();
    assert_eq!(run.code, 5, "the last attempt decides");
    assert!(run.stderr.contains("failed: exit code 3; restart 1 of 2\n"), "{}", run.stderr);
    assert!(run.stderr.contains("failed: exit code 4; restart 2 of 2\n"), "{}", run.stderr);
    assert!(
        run.stderr
            .ends_with("failed: exit code 5\nbrigade: its last lines on stderr:\n  attempt 2\n"),
        "{}",
        run.stderr
    );
}

#[test]
fn an_attempt_begins_when_nothing_of_the_one_before_is_left() {
    // Each rank leaves a child in its session and one out of it; the next attempt looks for them.
    let script = "if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then \
                  sleep 1000 & echo $! > $DIR/near-$RANK; \
                  setsid sleep 1000 & echo $! > $DIR/far-$RANK; \
                  until [ -s $DIR/near-0 ] && [ -s $DIR/far-0 ] && [ -s $DIR/near-1 ] && [ -s $DIR/far-1 ]; do :; done; \
                  [ $RANK = 0 ] && exit 1; wait; fi; \
                  for pid in $(cat $DIR/near-* $DIR/far-*); do \
                  if grep -q 'State:.[^ZX]' /proc/$pid/status 2>/dev/null; then echo $pid is left; fi; done; echo looked";
    let run = Job::new(2).flag("--max-restarts=1").sh(script).run();
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(run.stdout.matches("looked\n").count(), 2);
    assert!(!run.stdout.contains("is left"), "{}", run.stdout);
}

#[test]
fn ranks_that_do_not_stop_are_killed_before_a_restart() {
    let script = "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; trap '' TERM; touch $DIR/$RANK; \
                  if [ $RANK = 1 ]; then until [ -e $DIR/0 ]; do :; done; exit 4; fi; \
                  while :; do sleep 1000; done";
    let run = Job::new(2).flag("--max-restarts=1").flag("--shutdown-timeout=0.2").sh(script).run();
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(run.stderr.contains("1 rank did not stop within 0.2 s: killed"), "{}", run.stderr);
}

#[test]
fn a_user_who_stops_the_job_gets_no_restart() {
    let script = "touch $DIR/$TORCHELASTIC_RESTART_COUNT-$RANK; \
                  if [ $TORCHELASTIC_RESTART_COUNT$RANK = 00 ]; then exit 1; fi; sleep 1000 & wait";
    let job = Job::new(2).flag("--max-restarts=9").sh(script).start();
    job.wait_for("1-0");
    job.wait_for("1-1");
    job.send(Signal::SIGTERM);
    let run = job.finish();
    assert_eq!(run.code, 143);
    assert!(run.stderr.ends_with("brigade: stopped by SIGTERM\n"), "{}", run.stderr);
    assert!(!run.stderr.contains("restart 2"), "{}", run.stderr);
}

#[test]
fn a_launcher_killed_at_any_moment_of_a_restart_leaves_nothing() {
    let mut random = brigade_suite::random();
    // Attempts come and go as fast as they can.
    let script = "touch $DIR/$TORCHELASTIC_RESTART_COUNT-$RANK; setsid sleep 1000 & \
                  [ $RANK = 0 ] && exit 1; sleep 1000";
    for _ in 0..20 {
        let attempt = random.usize(..8);
        let spin = random.u64(..2_000_000);
        println!("killed after {spin} turns in attempt {attempt}");
        let job = Job::new(2).flag("--max-restarts=100000").sh(script).start();
        job.wait_for(&format!("{attempt}-0"));
        (0..spin).for_each(|turn| {
            std::hint::black_box(turn);
        });
        job.send(Signal::SIGKILL);
        assert_eq!(job.finish().code, 137);
    }
}

/// What a Python program leaves that has torchelastic's `@record` around its `main`.
const RECORD: &str = r#"{"message": {"message": "ValueError: no such layer", "extraInfo": {"py_callstack": "Traceback (most recent call last):\n  File \"train.py\", line 7\nValueError: no such layer\n", "timestamp": "1700000000"}}}"#;
/// Leaves it.
const LEAVE: &str = "printf %s \"$RECORD\" > $TORCHELASTIC_ERROR_FILE";

fn recorded(nproc: usize, script: &str) -> Job {
    let mut job = Job::new(nproc).sh(script);
    job.command.env("RECORD", RECORD);
    job
}

#[test]
fn an_error_file_is_shown() {
    let script = format!("[ $RANK = 1 ] || exec sleep 1000; echo noise >&2; {LEAVE}; exit 1");
    let run = recorded(2, &script).run();
    assert_eq!(run.code, 1);
    assert!(
        run.stderr.ends_with(
            "failed: exit code 1\n\
             brigade: its error: ValueError: no such layer\n  \
             Traceback (most recent call last):\n    \
             File \"train.py\", line 7\n  \
             ValueError: no such layer\n"
        ),
        "{}",
        run.stderr
    );
    let plain = r#"printf '{"message": "out of layers"}' > $TORCHELASTIC_ERROR_FILE; exit 1"#;
    let run = Job::new(1).sh(plain).run();
    assert!(run.stderr.ends_with("brigade: its error: out of layers\n"), "{}", run.stderr);
}

#[test]
fn a_broken_error_file_changes_nothing() {
    for broken in [
        "printf '{\"message\": {\"mess' > $TORCHELASTIC_ERROR_FILE",
        ": > $TORCHELASTIC_ERROR_FILE",
        "mkfifo $TORCHELASTIC_ERROR_FILE",
        "mkdir $TORCHELASTIC_ERROR_FILE",
        "ln -s /dev/zero $TORCHELASTIC_ERROR_FILE",
        "rm -r $(dirname $TORCHELASTIC_ERROR_FILE)",
        "head -c 3000000 /dev/zero | tr '\\0' '[' > $TORCHELASTIC_ERROR_FILE",
    ] {
        let run = Job::new(1).sh(&format!("echo the reason >&2; {broken}; exit 7")).run();
        assert_eq!(run.code, 7, "{broken}");
        assert!(run.stderr.ends_with("on stderr:\n  the reason\n"), "{broken}: {}", run.stderr);
    }
}

#[test]
fn the_cause_is_the_error_that_was_written_first() {
    // Rank 0 only sees that rank 1 is going, but is the first to end.
    let script = format!(
        "if [ $RANK = 1 ]; then trap 'exit 3' TERM; {LEAVE}; touch $DIR/going; sleep 1000 & wait; \
         fi; until [ -e $DIR/going ]; do :; done; exit 9"
    );
    let run = recorded(2, &script).run();
    assert_eq!(run.code, 3, "{}", run.stderr);
    assert!(run.stderr.contains("brigade: rank 1 on "), "{}", run.stderr);
    assert!(run.stderr.contains("its error: ValueError: no such layer\n"), "{}", run.stderr);
}

#[test]
fn a_rank_on_its_way_out_is_left_to_end() {
    // As above, but it would not survive a signal; and one that does not end after all is stopped.
    for (end, code, cause) in [("exit 3", 3, 1), ("exec sleep 1000", 9, 0)] {
        let script = format!(
            "[ $RANK = 1 ] && {LEAVE} && touch $DIR/going; \
             until [ -e $DIR/going ]; do :; done; [ $RANK = 0 ] && exit 9; \
             until grep -q 'State:.[ZX]' /proc/$(cat $DIR/first)/status; do :; done; {end}"
        );
        let script = format!("[ $RANK = 0 ] && echo $$ > $DIR/first; {script}");
        let run = recorded(2, &script).run();
        assert_eq!(run.code, code, "{}", run.stderr);
        // The report; on a busy machine nobody has been stopped before it.
        let report = run.stderr.lines().rfind(|line| line.starts_with("brigade: rank ")).unwrap();
        assert!(report.starts_with(&format!("brigade: rank {cause} on ")), "{}", run.stderr);
    }
}

#[test]
fn an_outer_launcher_is_told_the_cause() {
    let told = |script: &str| {
        let mut job = recorded(2, script);
        let file = job.folder().join("outer.json");
        job.command.env("TORCHELASTIC_ERROR_FILE", &file);
        let run = job.run();
        assert_eq!(run.code, 3);
        let error = ErrorRecord::read(&run.folder.path().join("outer.json")).unwrap();
        (error.message, error.callstack.unwrap_or_default())
    };
    let (message, callstack) = told(&format!("[ $RANK = 1 ] || exec sleep 1000; {LEAVE}; exit 3"));
    assert_eq!(message, "ValueError: no such layer");
    assert!(callstack.starts_with("Traceback"), "{callstack}");

    let (message, callstack) = told("[ $RANK = 1 ] || exec sleep 1000; echo why; exit 3");
    assert!(message.starts_with("rank 1 on ") && message.ends_with("exit code 3"), "{message}");
    assert_eq!(callstack, "why");

    // One launcher inside another: the cause comes through both.
    let inner = format!("{} launch --nproc 1 sh -c \"$INNER\"", job::BRIGADE);
    let mut job = recorded(1, &inner);
    job.command.env("INNER", format!("{LEAVE}; exit 3"));
    let run = job.run();
    assert_eq!(run.code, 3);
    assert!(
        run.stderr.contains("\nbrigade: its error: ValueError: no such layer\n"),
        "{}",
        run.stderr
    );
}

#[test]
fn what_codes_and_signals_mean() {
    let table = [
        ("kill -KILL $$", 137, "SIGKILL"),
        ("kill -ABRT $$", 134, "it has aborted itself"),
        ("kill -BUS $$", 135, "df -h /dev/shm"),
        ("kill -SEGV $$", 139, "a segmentation fault"),
        ("kill -TERM $$", 143, "SIGTERM is a request to stop"),
        ("exit 127", 127, "a command that was not found"),
        ("sh -c 'kill -KILL $$'; exit $?", 137, "137 is the shell's code for SIGKILL (128 + 9)"),
    ];
    for (script, code, meaning) in table {
        let run = Job::new(1).sh(script).run();
        assert_eq!(run.code, code, "{script}");
        assert!(run.stderr.contains(meaning), "{script}: {}", run.stderr);
    }
}
