//! Tests of problems of hosts, which are reported before anything starts anywhere.

use std::fs;
use std::path::Path;
use std::process::Command;

use brigade_test_needs::needs;

use crate::job::BRIGADE;
use crate::site::{self, site, write_script};

#[needs(Hosts)]
fn hosts_that_cannot_take_part() {
    let site = site(3);
    let refused = |launch: site::Launch<'_>, code: i32, expected: &[&str]| {
        let run = launch.sh("touch started").run();
        assert_eq!(run.code, code, "{expected:?} {run:?}");
        let lines: Vec<&str> = run.stderr.lines().collect();
        assert_eq!(lines.len(), expected.len(), "{}", run.stderr);
        for (line, expected) in lines.iter().zip(expected) {
            let (start, end) = expected.split_once("…").unwrap_or((expected, ""));
            assert!(line.starts_with(start) && line.ends_with(end), "{}", run.stderr);
        }
        assert!(!site.work.join("started").exists());
    };
    let ssh = |host: &str, more: &str| {
        let command = site.ssh(more);
        site.launch_with(&["--hosts", host, "--nproc", "1", "--ssh-command", &command])
    };

    // All of them are named, in the order of the list.
    refused(
        site.launch("node2:1,nowhere:1,node1:1,elsewhere:1"),
        1,
        &[
            "brigade: nowhere: ssh: Could not resolve hostname nowhere: … or give it an address in ~/.ssh/config",
            "brigade: elsewhere: ssh: Could not resolve hostname elsewhere: … or give it an address in ~/.ssh/config",
        ],
    );
    let folder = site.network.folder();
    let (stranger, settings) = (folder.join("stranger"), folder.join("strangers_config"));
    let mut key = Command::new("ssh-keygen");
    key.args(["-q", "-t", "ed25519", "-N", "", "-f"]).arg(&stranger);
    assert!(key.status().unwrap().success());
    let own = fs::read_to_string(site.network.ssh_config()).unwrap();
    fs::write(&settings, own.replace("user_key", "stranger")).unwrap();
    refused(
        site.launch("node2:1").args(["--ssh-command", &format!("ssh -F {}", settings.display())]),
        1,
        &[
            "brigade: node2: root@node2: Permission denied (publickey): set up a key or an ssh agent: brigade cannot ask for a password",
        ],
    );
    refused(
        ssh("node2", "-o UserKnownHostsFile=/dev/null"),
        1,
        &[
            "brigade: node2: No ED25519 host key is known for node2…Host key verification failed: connect once by hand, `ssh node2`, and accept its key",
        ],
    );
    site.host(1).reject_port(22);
    refused(
        ssh("node2", ""),
        1,
        &[
            "brigade: node2: ssh: connect to host node2 port 22: Connection refused: is sshd running there, and on that port?",
        ],
    );
    site.host(1).clear_filters();
    site.host(1).cut();
    refused(
        ssh("node2,node3", "-o ConnectTimeout=1"),
        1,
        &["brigade: node2: ssh: connect to host node2 port 22: Connection timed out"],
    );
    site.host(1).restore();
    refused(
        ssh("node2", "-o NoSuchOption=1"),
        1,
        &["brigade: node2: command-line: line 0: Bad configuration option: nosuchoption"],
    );
    refused(
        site.launch_with(&["--hosts", "node2:1", "--ssh-command", "no-such-ssh"]),
        127,
        &["brigade: node2: program no-such-ssh not found in PATH"],
    );
}

/// A gateway does so if its sshd has too many logins in progress (`MaxStartups`).
#[needs(Hosts)]
fn hosts_that_turn_a_connection_away_are_tried_again() {
    let site = site(2);
    let through = format!("ssh -F {} -W $1:$2 node1", site.network.ssh_config().display());
    let jump = site.network.folder().join("jump");
    let tried = site.network.folder().join("tried");
    let script = format!(
        "#!/bin/sh\necho >>{0}\n[ $(wc -l <{0}) -ge 3 ] && exec {through}\n",
        tried.display()
    );
    write_script(&jump, &script);
    let command = site.ssh(&format!("-o 'ProxyCommand={} %h %p'", jump.display()));
    let run = site.launch("node2:1").args(["--ssh-command", &command]).sh("echo here").run();
    assert_eq!((run.code, run.stdout.as_str()), (0, "[node2:0] here\n"), "{}", run.stderr);
    assert_eq!(fs::read_to_string(&tried).unwrap().lines().count(), 3);

    write_script(&jump, &format!("#!/bin/sh\necho >>{}\n", tried.display()));
    let run = site.launch("node2:1").args(["--ssh-command", &command]).sh("echo here").run();
    assert_eq!(run.code, 1);
    // The message depends on how far ssh had come.
    assert!(run.stderr.starts_with("brigade: node2: "), "{}", run.stderr);
    assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
    assert_eq!(fs::read_to_string(&tried).unwrap().lines().count(), 8);
}

#[needs(Hosts)]
fn folders_and_programs_that_are_not_there() {
    let site = site(2);
    let private = site.work.join("private");
    fs::create_dir(&private).unwrap();
    write_script(&private.join("train"), "#!/bin/sh\necho here\n");
    site.host(1).hide(&private);

    let refused = |launch: site::Launch<'_>, code: i32, expected: &str| {
        let run = launch.run();
        assert_eq!(run.code, code, "{expected:?} {run:?}");
        assert_eq!(run.stderr, format!("brigade: {expected}\n"));
        assert_eq!(run.stdout, "");
    };
    refused(
        site.launch("node1:1,node2:1").args(["private/train"]),
        127,
        "node2: program private/train not found",
    );
    refused(
        site.launch("node1:1,node2:1").args(["no-such-program"]),
        127,
        "node1: program no-such-program not found in PATH\n\
         brigade: node2: program no-such-program not found in PATH",
    );
    fs::write(site.work.join("data"), "").unwrap();
    let locked = "node2: ./data is not executable: `chmod +x` it, or give its interpreter first, \
                  as in `python3 ./data`";
    refused(site.launch("node2:1").args(["./data"]), 126, locked);
    let nowhere = private.join("nowhere").display().to_string();
    refused(
        site.launch("node2:1").args(["--workdir", &nowhere, "true"]),
        1,
        &format!(
            "node2: the working folder {nowhere} does not exist: make it, or give another with \
             --workdir"
        ),
    );
    refused(
        site.launch("node2:1").args(["--workdir", "here", "true"]),
        2,
        "the working folder here is not an absolute path: give one with --workdir",
    );
    let run = site.launch("node2:1").args(["--workdir", "/", "pwd"]).run();
    assert_eq!(run.stdout, "[node2:0] /\n", "{}", run.stderr);

    // The launcher's own executable is missing there too, as is one in PATH.
    site.host(1).hide(Path::new(BRIGADE).parent().unwrap());
    refused(
        site.launch("node2:1").args(["true"]),
        127,
        &format!(
            "node2: brigade is neither at {BRIGADE} nor in PATH there: install it, or let --sync \
             copy it"
        ),
    );
}

/// Two launchers meet at an address of the network; the first one announces its loopback address.
#[needs(Hosts)]
fn an_address_that_others_cannot_reach() {
    let site = site(2);
    let start = |node: usize, more: &[&str]| {
        let node_rank = format!("--node-rank={node}");
        let flags = ["--nproc=1", "--nnodes=2", "--master-addr=node1", &node_rank];
        let launch = site.launch_on(node, &flags).args(more.iter().copied());
        launch.sh("echo started").start()
    };
    let launchers = [start(0, &["--local-addr=127.0.0.1"]), start(1, &[])];
    let runs = launchers.map(site::Running::finish);
    for run in &runs {
        assert_eq!(run.code, 1, "{}", run.stderr);
        assert!(run.stderr.contains("--local-addr"), "{}", run.stderr);
    }
    assert_eq!(runs[1].stdout, "");
}
