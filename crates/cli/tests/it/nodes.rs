//! Tests of several `brigade launch` that form one job: each acts as a host, all on the loopback interface.

mod chaos;
mod elastic;
mod ended;
mod refused;

use std::collections::{BTreeMap, HashSet};
use std::fs;

use brigade_launch::events::{EventLine, JobEvent};

use crate::job::Run;
use crate::launchers::{Hosts, finish};

/// Script of a rank that creates a file and then waits.
const STAY: &str = "echo $$ > $ALL/$TORCHELASTIC_RESTART_COUNT-$RANK; sleep 1000 & wait";

#[test]
fn numbered_hosts_share_out_the_ranks() {
    // Hosts of different sizes, the first one last.
    let hosts = Hosts::new();
    let sizes = [2, 1, 3];
    let start = |node| hosts.numbered(node, 3, sizes[node]).sh("env").start();
    let launchers = vec![start(1), start(2), start(0)];
    let runs = finish(launchers);
    for run in &runs {
        assert_eq!(run.code, 0, "{}", run.stderr);
    }
    let ranks = variables(&runs);
    assert_eq!(ranks.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    let places = [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)];
    for (rank, (node, local_rank)) in places.into_iter().enumerate() {
        let vars = &ranks[&rank];
        for (name, value) in [
            ("RANK", rank),
            ("WORLD_SIZE", 6),
            ("LOCAL_RANK", local_rank),
            ("LOCAL_WORLD_SIZE", sizes[node]),
            ("GROUP_RANK", node),
            ("GROUP_WORLD_SIZE", 3),
            ("ROLE_RANK", rank),
            ("ROLE_WORLD_SIZE", 6),
        ] {
            assert_eq!(vars[name], value.to_string(), "{name} of rank {rank}");
        }
        assert_eq!(vars["MASTER_ADDR"], "127.0.0.1");
        assert_eq!(vars["TORCHELASTIC_RUN_ID"], "none");
        assert_eq!(vars.contains_key("BRIGADE_STORE_FD"), rank == 0);
        assert_ne!(vars["MASTER_PORT"], hosts.port.number().to_string(), "the agents' own port");
    }
    let ports: HashSet<&String> = ranks.values().map(|vars| &vars["MASTER_PORT"]).collect();
    assert_eq!(ports.len(), 1);
}

/// Returns the variables that ranks have printed with `env`, by rank.
fn variables(runs: &[Run]) -> BTreeMap<usize, BTreeMap<String, String>> {
    let mut ranks: BTreeMap<usize, BTreeMap<String, String>> = BTreeMap::new();
    for line in runs.iter().flat_map(|run| run.stdout.lines()) {
        let (rank, rest) = line.strip_prefix('[').unwrap().split_once("] ").unwrap();
        if let Some((name, value)) = rest.split_once('=') {
            let vars = ranks.entry(rank.parse().unwrap()).or_default();
            vars.insert(name.to_owned(), value.to_owned());
        }
    }
    ranks
}

#[test]
fn all_hosts_start_again() {
    let hosts = Hosts::new();
    let script = "echo $TORCHELASTIC_RESTART_COUNT at $MASTER_PORT; \
                  touch $ALL/$TORCHELASTIC_RESTART_COUNT-$RANK; \
                  if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then \
                  until [ -e $ALL/0-0 ] && [ -e $ALL/0-1 ]; do :; done; \
                  [ $RANK = 1 ] && exit 9; sleep 1000; fi; echo done";
    let start = |node| hosts.numbered(node, 2, 1).flag("--max-restarts=1").sh(script).start();
    let runs = finish(vec![start(0), start(1)]);
    let mut ports = Vec::new();
    for (rank, run) in runs.iter().enumerate() {
        assert_eq!(run.code, 0, "{}", run.stderr);
        assert!(run.stderr.contains("failed: exit code 9; restart 1 of 1"), "{}", run.stderr);
        let lines = run.lines_of(rank);
        assert_eq!((lines.len(), lines[2]), (3, "done"));
        assert!(lines[0].starts_with("0 at ") && lines[1].starts_with("1 at "), "{lines:?}");
        ports.push((lines[0][5..].to_owned(), lines[1][5..].to_owned()));
    }
    assert_eq!(ports[0], ports[1], "the hosts agree");
    assert_ne!(ports[0].0, ports[0].1, "each attempt has a port of its own");
}

#[test]
fn the_launcher_that_coordinates_writes_the_events_of_all_hosts() {
    let hosts = Hosts::new();
    let events = |node| hosts.all.path().join(format!("{node}.jsonl"));
    let start = |node| {
        let job = hosts.numbered(node, 2, 2).flag("--events");
        job.flag(events(node).to_str().unwrap()).sh("[ $RANK != 3 ] || exit 5; exec sleep 1000")
    };
    let launchers = vec![start(1).start(), start(0).start()];
    let runs = finish(launchers);
    assert!(runs.iter().all(|run| run.code == 5), "{}", runs[0].stderr);
    assert_eq!(fs::read_to_string(events(1)).unwrap(), "", "only one launcher writes");
    let text = fs::read_to_string(events(0)).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<EventLine>(line).unwrap().event);
    let (mut started, mut ended, mut code) = (BTreeMap::new(), BTreeMap::new(), None);
    for event in lines {
        match event {
            JobEvent::Start { rank, local_rank, pid, .. } => {
                assert_eq!(started.insert(rank, (local_rank, pid)), None);
            }
            JobEvent::Exit { rank, local_rank, pid, code, .. } => {
                assert_eq!(started.get(&rank), Some(&(local_rank, pid)));
                assert_eq!(ended.insert(rank, code), None);
            }
            JobEvent::Cause(cause) => assert_eq!(cause.rank, Some(3)),
            JobEvent::End { code: last } => code = Some(last),
            _ => {}
        }
    }
    assert_eq!(started.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3], "{text}");
    assert_eq!(ended.get(&3), Some(&Some(5)), "{text}");
    assert_eq!((ended.len(), code), (4, Some(5)), "{text}");
}
