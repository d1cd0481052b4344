//! Tests of failing ranks in `brigade launch`: the report, the error files, the restarts.

use std::fs;

use brigade_launch::events::{CauseKind, EventLine, JobEvent};
use brigade_rank_env::ErrorRecord;
use nix::sys::signal::Signal;

use crate::job::{self, Job};

#[test]
fn a_job_starts_again_until_it_succeeds() {
    // Rank 1 fails in the first two attempts, after rank 0 has printed its line.
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
    assert!(run.stderr.ends_with("failed: exit code 5\n"), "{}", run.stderr);
    assert_eq!(run.stderr.matches("attempt 2\n").count(), 1, "{}", run.stderr);
}

#[test]
fn an_attempt_begins_when_nothing_of_the_one_before_is_left() {
    // Each rank leaves a child in its session and one outside of it; the next attempt looks for them.
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
fn a_job_stopped_by_its_user_is_not_restarted() {
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
    let mut random = brigade_test_needs::random();
    // Attempts begin and end as fast as possible.
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

/// Error file of a Python program that has torchelastic's `@record` around its `main`.
const RECORD: &str = r#"{"message": {"message": "ValueError: no such layer", "extraInfo": {"py_callstack": "Traceback (most recent call last):\n  File \"train.py\", line 7\nValueError: no such layer\n", "timestamp": "1700000000"}}}"#;
/// Writes the error file.
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
            " error: ValueError: no such layer\n  \
             Traceback (most recent call last):\n    \
             File \"train.py\", line 7\n"
        ),
        "{}",
        run.stderr
    );
    assert_eq!(run.stderr.matches("failed: exit code 1").count(), 1, "{}", run.stderr);
    let plain = r#"printf '{"message": "out of layers"}' > $TORCHELASTIC_ERROR_FILE; exit 1"#;
    let run = Job::new(1).sh(plain).run();
    assert!(run.stderr.ends_with("brigade: its error: out of layers\n"), "{}", run.stderr);
}

/// Programs may print their errors themselves before they record them.
#[test]
fn an_error_that_the_program_has_printed_is_not_repeated() {
    let traceback = "printf 'Traceback (most recent call last):\\n  File \"train.py\", line 7\\n\
                     ValueError: no such layer\\n' >&2";
    let script = format!("[ $RANK = 1 ] || exec sleep 1000; {traceback}; {LEAVE}; exit 1");
    let run = recorded(2, &script).run();
    assert_eq!(run.code, 1);
    for once in ["Traceback", "no such layer", "failed: exit code 1"] {
        assert_eq!(run.stderr.matches(once).count(), 1, "{once}: {}", run.stderr);
    }
    // Message as anyhow prints it, and as `brigade_rank_env::record` records it.
    let message = "cannot open data: no disk (os error 5)";
    let debug = "cannot open data\\n\\nCaused by:\\n    no disk (os error 5)";
    let record = format!(
        r#"{{"message": {{"message": "{message}", "extraInfo": {{"py_callstack": "{debug}"}}}}}}"#
    );
    for printed in [&format!("Error: {message}"), &format!("Error: {debug}")] {
        let mut job = Job::new(1).sh(&format!("printf '{printed}\\n' >&2; {LEAVE}; exit 1"));
        job.command.env("RECORD", &record);
        let run = job.run();
        assert_eq!(run.code, 1);
        for once in ["cannot open data", "no disk", "failed: exit code 1"] {
            assert_eq!(run.stderr.matches(once).count(), 1, "{once}: {}", run.stderr);
        }
    }
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
        assert!(run.stderr.ends_with("failed: exit code 7\n"), "{broken}: {}", run.stderr);
        assert_eq!(run.stderr.matches("the reason\n").count(), 1, "{broken}: {}", run.stderr);
    }
}

#[test]
fn the_cause_is_the_error_that_was_written_first() {
    // Rank 0 only notices that rank 1 is ending, but is the first to end.
    let script = format!(
        "if [ $RANK = 1 ]; then trap 'exit 3' TERM; {LEAVE}; touch $DIR/going; sleep 1000 & wait; \
         fi; until [ -e $DIR/going ]; do :; done; exit 9"
    );
    let run = recorded(2, &script).run();
    assert_eq!(run.code, 3, "{}", run.stderr);
    assert!(run.stderr.contains("brigade: rank 1 on "), "{}", run.stderr);
    assert!(run.stderr.contains(" error: ValueError: no such layer\n"), "{}", run.stderr);
}

#[test]
fn a_rank_on_its_way_out_is_left_to_end() {
    // Like the test above, but it would not survive a signal; and one that does not end by itself is stopped.
    for (end, code, cause) in [("exit 3", 3, 1), ("exec sleep 1000", 9, 0)] {
        let script = format!(
            "[ $RANK = 1 ] && {LEAVE} && touch $DIR/going; \
             until [ -e $DIR/going ]; do :; done; [ $RANK = 0 ] && exit 9; \
             until grep -q 'State:.[ZX]' /proc/$(cat $DIR/first)/status; do :; done; {end}"
        );
        let script = format!("[ $RANK = 0 ] && echo $$ > $DIR/first; {script}");
        let run = recorded(2, &script).run();
        assert_eq!(run.code, code, "{}", run.stderr);
        // The report; on a busy machine no rank has been stopped before it.
        let report = run
            .stderr
            .lines()
            .rfind(|line| line.starts_with("brigade: rank ") && line.contains(" failed: "));
        let report = report.unwrap();
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

    // One launcher inside another: the cause is passed through both.
    let inner = format!("{} launch --nproc 1 sh -c \"$INNER\"", job::BRIGADE);
    let mut job = recorded(1, &inner);
    job.command.env("INNER", format!("{LEAVE}; exit 3"));
    let run = job.run();
    assert_eq!(run.code, 3);
    // The inner launcher has printed it.
    assert!(run.stderr.contains("error: ValueError: no such layer\n"), "{}", run.stderr);
    assert_eq!(run.stderr.matches("ValueError").count(), 1, "{}", run.stderr);
}

#[test]
fn exit_codes_and_signals_are_reported() {
    let table = [
        ("kill -KILL $$", 137, "SIGKILL"),
        ("kill -ABRT $$", 134, "the process aborted itself"),
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

/// Returns the events in a file of a job's folder.
fn events(run: &job::Run, name: &str) -> Vec<JobEvent> {
    let text = fs::read_to_string(run.folder.path().join(name)).unwrap();
    let lines: Vec<EventLine> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines.iter().all(|line| line.version == 1 && line.job == lines[0].job), "{text}");
    lines.into_iter().map(|line| line.event).collect()
}

/// Returns what `which` extracts from the events (attempt, rank and exit code), sorted.
fn told(
    events: &[JobEvent],
    which: impl Fn(&JobEvent) -> Option<(u32, usize, Option<i32>)>,
) -> Vec<(u32, usize, Option<i32>)> {
    let mut told: Vec<_> = events.iter().filter_map(which).collect();
    told.sort_unstable();
    told
}

#[test]
fn events_tell_of_each_rank_of_causes_and_of_restarts() {
    let script = "touch $DIR/$TORCHELASTIC_RESTART_COUNT-$RANK; \
                  until [ -e $DIR/$TORCHELASTIC_RESTART_COUNT-0 ]; do :; done; \
                  [ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; \
                  [ $RANK = 1 ] && echo no luck >&2 && exit 3; exec sleep 1000";
    let job = Job::new(2).flag("--max-restarts=1");
    let path = job.folder().join("job.jsonl");
    let run = job.flag("--events").flag(path.to_str().unwrap()).sh(script).run();
    assert_eq!(run.code, 0, "{}", run.stderr);
    let events = events(&run, "job.jsonl");
    let kinds: Vec<&str> = events
        .iter()
        .map(|event| match event {
            JobEvent::Join { nproc: 2, .. } => "join",
            JobEvent::Attempt { world_size: 2, hosts, .. } if hosts.len() == 1 => "attempt",
            JobEvent::Start { pid: 2.., .. } => "start",
            JobEvent::Exit { .. } => "exit",
            JobEvent::Cause(_) => "cause",
            JobEvent::Restart { attempt: 0, restarts: 1, max_restarts: 1 } => "restart",
            JobEvent::End { code: 0 } => "end",
            other => panic!("{other:?}"),
        })
        .collect();
    let first = ["join", "attempt", "start", "start", "exit", "exit", "cause", "restart"];
    let second = ["attempt", "start", "start", "exit", "exit", "end"];
    assert_eq!(kinds, [&first[..], &second].concat());
    let started = told(&events, |event| match event {
        JobEvent::Start { attempt, rank, .. } => Some((*attempt, *rank, None)),
        _ => None,
    });
    assert_eq!(started, [(0, 0, None), (0, 1, None), (1, 0, None), (1, 1, None)]);
    let ended = told(&events, |event| match event {
        JobEvent::Exit { attempt, rank, code, signal, .. } => {
            assert_eq!(code.is_none(), signal.as_deref() == Some("SIGTERM"));
            Some((*attempt, *rank, *code))
        }
        _ => None,
    });
    assert_eq!(ended, [(0, 0, None), (0, 1, Some(3)), (1, 0, Some(0)), (1, 1, Some(0))]);
    let cause = events.iter().find_map(|event| match event {
        JobEvent::Cause(cause) => Some(cause),
        _ => None,
    });
    let cause = cause.unwrap();
    assert_eq!((cause.cause, cause.attempt), (CauseKind::RankFailed, Some(0)));
    assert_eq!((cause.rank, cause.code), (Some(1), Some(3)));
    assert!(cause.message.ends_with("failed: exit code 3"), "{}", cause.message);
    assert_eq!(cause.last_lines, ["no luck"]);
}

#[test]
fn events_of_a_descriptor_stay_with_the_launcher() {
    // The shell opens it; ranks must not inherit it, or a reader would wait for their end.
    for hosts in ["--nproc 2", "--hosts localhost:2"] {
        let script = format!(
            "exec '{}' launch {hosts} --events fd:7 sh -c '[ ! -e /proc/self/fd/7 ]' \
             7>$DIR/job.jsonl",
            job::BRIGADE
        );
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", &script]).env("BRIGADE_CONFIG", "/dev/null");
        let run = Job::of(shell).run();
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{hosts}");
        let events = events(&run, "job.jsonl");
        assert!(matches!(events.last(), Some(JobEvent::End { code: 0 })), "{events:?}");
    }

    let run = Job::new(1).flag("--events=fd:93").words(["true"]).run();
    assert_eq!(run.code, 1);
    assert!(
        run.stderr.starts_with(
            "brigade: cannot write events to fd:93 (--events): descriptor 93 is not open"
        ),
        "{}",
        run.stderr
    );
}

#[test]
fn a_reader_of_events_that_is_gone_does_not_end_the_job() {
    let script = format!(
        "'{}' launch --nproc 2 --events fd:7 sh -c 'until [ -e $DIR/go ]; do :; done' \
         7>&1 >$DIR/out 2>$DIR/err | {{ read -r line; echo \"$line\" > $DIR/first; exec 0<&-; touch $DIR/go; }}",
        job::BRIGADE
    );
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", &script]).env("BRIGADE_CONFIG", "/dev/null");
    let run = Job::of(shell).run();
    assert_eq!(run.code, 0, "{}", run.stderr);
    let read = |name: &str| fs::read_to_string(run.folder.path().join(name)).unwrap();
    assert!(read("first").contains("\"event\":\"join\""), "{}", read("first"));
    let said = read("err");
    assert_eq!(
        said.matches("no more events are written to fd:7 (--events): ").count(),
        1,
        "{said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");
}
