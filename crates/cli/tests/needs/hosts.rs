//! Tests of `brigade launch --hosts` on several hosts with real sshd: the output for the user, the environment of the
//! ranks, and that nothing is left on any host, whatever is killed or disconnected.

mod copied;
mod ended;
mod guarded;
mod refused;
mod stand_ins;

use std::fs;
use std::time::Instant;

use brigade_test_needs::needs;

use crate::site::{empty, site, wait_until, write_script};

#[needs(Hosts)]
fn ranks_are_numbered_over_the_hosts() {
    let site = site(3);
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE \
                  $GROUP_RANK/$GROUP_WORLD_SIZE $MASTER_ADDR $(hostname) $(pwd)";
    // The launcher's own host is the second: no ssh is used for it.
    let run = site.launch("node2:2,node1:1,node3:2").sh(script).run();
    assert_eq!(run.code, 0, "{}", run.stderr);
    let work = site.work.display();
    let expected = [
        format!("[node1:2] 2/5 0/1 1/3 10.213.0.2 node1 {work}"),
        format!("[node2:0] 0/5 0/2 0/3 10.213.0.2 node2 {work}"),
        format!("[node2:1] 1/5 1/2 0/3 10.213.0.2 node2 {work}"),
        format!("[node3:3] 3/5 0/2 2/3 10.213.0.2 node3 {work}"),
        format!("[node3:4] 4/5 1/2 2/3 10.213.0.2 node3 {work}"),
    ];
    assert_eq!(run.lines(), expected);
    assert_eq!(run.stderr, "");

    // On the first host itself: the others get an address at which they reach it.
    let run = site.launch("localhost,node2").args(["--nproc", "1"]).sh("echo $MASTER_ADDR").run();
    let expected = ["[localhost:0] 10.213.0.1", "[node2:1]     10.213.0.1"];
    assert_eq!(run.lines(), expected, "{}", run.stderr);
}

#[needs(Hosts)]
fn a_hostfile() {
    let site = site(2);
    let file = site.work.join("hosts");
    fs::write(&file, "# two\nnode1 slots=1\nnode2 slots=2 max-slots=4\n").unwrap();
    let run = site.launch_with(&["--hostfile", "hosts"]).sh("echo $RANK").run();
    assert_eq!(run.lines(), ["[node1:0] 0", "[node2:1] 1", "[node2:2] 2"], "{}", run.stderr);

    fs::write(&file, "node1 slots=1\n\nnode2 slot=2\n").unwrap();
    let run = site.launch_with(&["--hostfile", "hosts"]).sh("touch started").run();
    assert_eq!(run.code, 2);
    assert_eq!(run.stderr, "brigade: hosts, line 3: `slot=2`: expected `slots=N`\n");
    assert!(!site.work.join("started").exists());
}

#[needs(Hosts)]
fn variables_are_passed_by_a_list() {
    let site = site(2);
    fs::write(site.work.join(".deepspeed_env"), "FROM_FILE=a b\n").unwrap();
    let run = site
        .launch("node2:1")
        .args(["--env-pass", "OWN,FAMILY_*", "--env", "NEW=it's \"$HOME\"\n;"])
        .env("OWN", "1")
        .env("FAMILY_A", "2")
        .env("NCCL_DEBUG", "INFO")
        .env("SECRET", "3")
        .env("CUDA_VISIBLE_DEVICES", "0")
        .env("CUDA_HOME", "/usr/local/cuda")
        .env("PYTHONHOME", "/opt/python")
        .env("BRIGADE_SHARED_MEMORY", "0")
        .env("BRIGADE_ROLE", "actor")
        .sh("env -0 | tr '\\n' '_' | tr '\\0' '\\n'")
        .run();
    assert_eq!(run.code, 0, "{}", run.stderr);
    let value = |name: &str| {
        let start = format!("[node2:0] {name}=");
        run.stdout.lines().find_map(|line| line.strip_prefix(&start))
    };
    assert_eq!(value("OWN"), Some("1"));
    assert_eq!(value("NEW"), Some("it's \"$HOME\"_;"));
    assert_eq!(value("FAMILY_A"), Some("2"));
    assert_eq!(value("NCCL_DEBUG"), Some("INFO"));
    assert_eq!(value("FROM_FILE"), Some("a b"));
    assert_eq!(value("SECRET"), None);
    for name in ["CUDA_VISIBLE_DEVICES", "CUDA_HOME", "PYTHONHOME"] {
        assert_eq!(value(name), None);
    }
    // Variables for programs are passed on, those that configure the launcher are not, on any host.
    assert_eq!(value("BRIGADE_SHARED_MEMORY"), Some("0"));
    assert_eq!((value("BRIGADE_ROLE"), value("ROLE_NAME")), (None, Some("actor")));
    assert_eq!(value("BRIGADE_SSH"), None);
    assert_eq!(value("HOME"), site.host(1).home().to_str());
    assert_eq!(value("PWD"), site.work.to_str());
    // The command line does not name DeepSpeed's file, so a line reports that it is used.
    let line = "brigade: the hosts get FROM_FILE from .deepspeed_env (DeepSpeed's)\n";
    assert_eq!(run.stderr, line);
    let here = site.launch("node1:1").env("BRIGADE_ROLE", "actor").sh("env").run();
    assert!(!here.stdout.contains("BRIGADE_ROLE"), "{}", here.stdout);
}

#[needs(Hosts)]
fn arguments_and_noisy_logins() {
    let site = site(2);
    write_script(&site.work.join("a 'program' \\ $x"), "#!/bin/sh\nprintf '%s|' \"$0\" \"$@\"\n");
    // Output of a login before that of the agent.
    fs::write(site.host(1).home().join(".ssh/rc"), "printf 'Welcome\\n\\nto node2'\n").unwrap();
    let arguments =
        ["./a 'program' \\ $x", "", "it's", "$HOME `id`", "a\nb", "!x", "--nproc", "\\"];
    let run = site.launch("node2:1").args(["--"]).args(arguments).run();
    assert_eq!(run.code, 0, "{}", run.stderr);
    let expected = "[node2:0] ./a 'program' \\ $x||it's|$HOME `id`|a\n[node2:0] b|!x|--nproc|\\|\n";
    assert_eq!(run.stdout, expected);
}

#[needs(Hosts)]
fn lines_of_several_hosts_stay_whole() {
    let site = site(3);
    let script = "i=0; while [ $i -lt 3000 ]; do i=$((i+1)); echo $i of $RANK ......................; \
                  echo $i >&2; done; head -c 700000 /dev/zero | tr '\\0' x; echo";
    let run = site.launch("node1:1,node2:2,node3:1").sh(script).run();
    assert_eq!(run.code, 0, "{}", run.stderr);
    for (host, rank) in [("node1", 0), ("node2", 1), ("node2", 2), ("node3", 3)] {
        let prefix = format!("[{host}:{rank}] ");
        let of = |text: &str| -> Vec<String> {
            text.lines().filter_map(|line| line.strip_prefix(&prefix)).map(str::to_owned).collect()
        };
        let lines = of(&run.stdout);
        let expected = (1..=3000).map(|i| format!("{i} of {rank} ......................"));
        assert!(lines[..3000].iter().cloned().eq(expected), "{host}");
        let long: usize = lines[3000..].iter().map(String::len).sum();
        assert_eq!(long, 700_000, "{host}");
        assert!(of(&run.stderr).into_iter().eq((1..=3000).map(|i| i.to_string())), "{host}");
    }
}

#[needs(Hosts)]
fn a_rank_fails_on_another_host() {
    let site = site(2);
    let script = "touch $RANK; [ $RANK = 2 ] || { sleep 1000 & wait; }; \
                  while [ $(ls | wc -l) -lt 3 ]; do sleep 0.01; done; echo broken >&2; exit 7";
    let run = site.launch("node1:2,node2:1").sh(script).run();
    assert_eq!(run.code, 7, "{}", run.stderr);
    assert!(run.stderr.contains("rank 2 on node2 (local rank 0, pid "), "{}", run.stderr);
    assert!(run.stderr.contains("failed: exit code 7"), "{}", run.stderr);
    for once in ["broken\n", "failed: exit code 7"] {
        assert_eq!(run.stderr.matches(once).count(), 1, "{once}: {}", run.stderr);
    }
}

#[needs(Hosts)]
fn a_job_starts_again_on_the_same_hosts_and_with_fewer() {
    let site = site(3);
    let script = "echo $RANK/$WORLD_SIZE $TORCHELASTIC_RESTART_COUNT; \
                  [ $TORCHELASTIC_RESTART_COUNT = 0 ] || exit 0; touch $RANK; \
                  [ $RANK = 1 ] || { sleep 1000 & wait; }; \
                  while [ $(ls | wc -l) -lt 2 ]; do sleep 0.01; done; exit 7";
    let run = site.launch("node1:1,node2:1").args(["--max-restarts", "1"]).sh(script).run();
    assert_eq!(run.code, 0, "{}", run.stderr);
    let expected = ["[node1:0] 0/2 0", "[node1:0] 0/2 1", "[node2:1] 1/2 0", "[node2:1] 1/2 1"];
    assert_eq!(run.lines(), expected, "{}", run.stderr);
    empty(&site.work);

    // The first host is lost for good; the others continue with new ranks.
    let script = "touch $RANK; [ $WORLD_SIZE = 3 ] || { echo $RANK/$WORLD_SIZE $MASTER_ADDR; exit 0; }; \
                  sleep 1000 & wait";
    let flags = ["--max-restarts", "1", "--nnodes", "2:3", "--heartbeat-timeout", "4"];
    let job = site.launch("node2:1,node1:1,node3:1").args(flags).sh(script).start();
    site.wait_for_files(3);
    site.host(1).cut();
    let start = Instant::now();
    wait_until("node2 to notice", || {
        site.host(1)
            .processes()
            .iter()
            .all(|process| process.command.first().is_none_or(|name| name.starts_with("sshd")))
    });
    site.host(1).restore();
    let run = job.finish();
    eprintln!("the job with two hosts less one is over after {} ms", start.elapsed().as_millis());
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(
        run.lines(),
        ["[node1:0] 0/2 10.213.0.1", "[node3:1] 1/2 10.213.0.1"],
        "{}",
        run.stderr
    );

    let run = site.launch("node1:1,node2:1").args(["--nnodes", "3"]).sh("true").run();
    assert_eq!(run.code, 2);
    assert!(
        run.stderr.starts_with("brigade: --nnodes 3, but the list has 2 hosts"),
        "{}",
        run.stderr
    );
}
