//! Tests of `brigade doctor --hosts` with faults of hosts, of their files, and of the login to them.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use brigade_test_hosts::inner_process;
use brigade_test_needs::needs;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::doctor_cluster::{Cluster, app, examined};
use crate::job::BRIGADE;

#[needs(Hosts)]
fn hosts_that_are_fit() {
    let cluster = Cluster::new(3);
    let examined = cluster.examine(&["--program", BRIGADE, "--master-port", "29500"]);
    examined.only_fails_in(&[]);
    for subject in ["ssh", "brigade", "names", "interfaces", "ports", "mtu", "folder", "program"] {
        examined.is_well(subject);
    }
    examined.says("ok", "ssh", "", "2 hosts answer");
    examined.says("ok", "ports", "", "all 6 ways are open");
    examined.says("ok", "folder", "", "the same on all hosts");
}

#[needs(Hosts)]
fn logins_that_fail() {
    let cluster = Cluster::new(5);
    let bin = PathBuf::from(BRIGADE);
    cluster.host(1).hide(bin.parent().unwrap());
    cluster.host(2).reject_port(22);
    cluster.host(3).sh("kill -STOP $(pgrep -o sshd)");
    let stranger = cluster.network.folder().join("stranger");
    // The first frame is the same in all versions: its length, then {hello: {protocol: 99, version: 9.9}}.
    let hello = r"\0\0\0\036\201\245hello\202\250protocolc\247version\2439.9";
    let script = format!("#!/bin/sh\nprintf '\\nbrigade-doctor\\n{hello}'\nexec cat\n");
    fs::write(&stranger, script).unwrap();
    cluster.host(4).sh(&format!("chmod +x {0}; mount --bind {0} {BRIGADE}", stranger.display()));

    let mut doctor = cluster.doctor_for("node1,node2,node3,node4,node5,node9");
    let examined = examined(doctor.args(["--timeout", "5"]));
    examined.says("fail", "ssh", "node2", "brigade is not installed");
    examined.says("fail", "ssh", "node3", "Connection refused");
    // Either the doctor's limit or ssh's own is reached first.
    let silent = &examined.json["hosts"][3]["lost"];
    assert!(!silent.is_null(), "{silent}");
    examined.says("fail", "ssh", "node5", "brigade 9.9");
    examined.says("fail", "ssh", "node9", "Could not resolve hostname");
    // The other hosts are examined nevertheless.
    assert!(examined.json["hosts"][0]["facts"].is_object());
    cluster.host(3).sh("kill -CONT $(pgrep -o sshd)");
    cluster.assert_empty();
}

#[needs(Hosts)]
fn keys_that_do_not_fit() {
    let mut cluster = Cluster::new(3);
    let config = fs::read_to_string(cluster.network.ssh_config()).unwrap();
    let known = cluster.network.folder().join("known_hosts");
    let lines = fs::read_to_string(&known).unwrap();
    // node2 has the key of node3 there.
    let key_of_3 = lines.lines().nth(2).unwrap().split_once(' ').unwrap().1;
    let mine = cluster.network.folder().join("my_known_hosts");
    let swapped: Vec<String> = lines
        .lines()
        .map(|line| match line.split_once(' ').unwrap() {
            (names, _) if names.starts_with("node2") => format!("{names} {key_of_3}"),
            _ => line.to_owned(),
        })
        .collect();
    fs::write(&mine, swapped.join("\n") + "\n").unwrap();
    let my_config = cluster.network.folder().join("my_config");
    let config = config.replace(known.to_str().unwrap(), mine.to_str().unwrap());
    // The login to node3 offers no key at all.
    fs::write(&my_config, format!("Host node3\n    PubkeyAuthentication no\n{config}")).unwrap();
    cluster.ssh_config = my_config;
    let examined = cluster.examine(&[]);
    let changed = examined.says("fail", "ssh", "node2", "Host key verification failed");
    assert!(changed["found"].as_str().unwrap().contains("key"), "{changed}");
    let refused = examined.says("fail", "ssh", "node3", "Permission denied");
    assert_eq!(refused["command"], "ssh-copy-id node3");
}

#[needs(Hosts)]
fn a_host_that_hangs_does_not_hang_the_doctor() {
    let cluster = Cluster::new(2);
    let sleeper = cluster.network.folder().join("sleeper");
    fs::write(&sleeper, "#!/bin/sh\necho awake\nexec cat >/dev/null\n").unwrap();
    cluster.host(1).sh(&format!("chmod +x {0}; mount --bind {0} {BRIGADE}", sleeper.display()));
    let examined = cluster.examine(&["--timeout", "1"]);
    examined.says("fail", "ssh", "node2", "no answer within 1 s");
}

#[needs(Hosts)]
fn an_interrupt_ends_everything() {
    let cluster = Cluster::new(2);
    let sleeper = cluster.network.folder().join("sleeper");
    let sign = cluster.network.folder().join("asleep");
    fs::write(&sleeper, format!("#!/bin/sh\ntouch {}\nexec cat >/dev/null\n", sign.display()))
        .unwrap();
    cluster.host(1).sh(&format!("chmod +x {0}; mount --bind {0} {BRIGADE}", sleeper.display()));
    let mut child = cluster.doctor().args(["--timeout", "1000"]).spawn().unwrap();
    while !sign.exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let doctor = inner_process(child.id().cast_signed()).unwrap();
    kill(Pid::from_raw(doctor), Signal::SIGINT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    cluster.assert_empty();
}

#[needs(Hosts)]
fn clocks() {
    let cluster = Cluster::new(3);
    let folders = fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    let mut libraries = folders.map(|it| it.path().join("faketime/libfaketime.so.1"));
    let library = libraries.find(|it| it.exists()).expect("the library of faketime");
    for (host, shift) in [(1, "-5"), (2, "+1h")] {
        cluster.host(host).set_login_variable("LD_PRELOAD", library.to_str().unwrap());
        cluster.host(host).set_login_variable("FAKETIME", shift);
        cluster.host(host).set_login_variable("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    }
    let examined = cluster.examine(&[]);
    examined.says("warning", "clock", "node2", "behind that of node1");
    examined.says("fail", "clock", "node3", "ahead of that of node1");
}

#[needs(Hosts)]
fn folders() {
    let cluster = Cluster::new(3);
    cluster.own_copy(2, &cluster.folder, "");
    cluster.examine(&[]).says("note", "folder", "", "node3 has another folder than node1");
    // The folder above it: other files of the hosts are beside it.
    let below = cluster.folder.join("below");
    fs::create_dir(&below).unwrap();
    let examined = cluster.examine(&["--workdir", below.to_str().unwrap()]);
    examined.says("fail", "folder", "node3", "does not exist");
}

#[needs(Hosts)]
fn disks_and_shared_memory() {
    let cluster = Cluster::new(2);
    cluster.host(1).mount_small(&cluster.folder, "1m");
    cluster.host(1).sh("mount -o remount,size=16m /dev/shm");
    let examined = cluster.examine(&[]);
    examined.says("fail", "disk", "node2", "1.0 MiB of 1.0 MiB are free");
    examined.says("warning", "shared_memory", "node2", "only 16 MiB");
}

#[needs(Hosts)]
fn variables_of_logins() {
    let cluster = Cluster::new(2);
    cluster.host(1).set_login_variable("MASTER_ADDR", "old");
    cluster.host(1).set_login_variable("NCCL_SOCKET_IFNAME", "ens77");
    let examined = cluster.examine(&[]);
    examined.says("warning", "variables", "node2", "MASTER_ADDR");
    examined.says("warning", "interfaces", "node2", "NCCL_SOCKET_IFNAME=ens77");
}

#[needs(Hosts)]
fn variables_that_the_launcher_hands_on() {
    let cluster = Cluster::new(2);
    let mut doctor = cluster.doctor();
    let examined = examined(doctor.env("GLOO_SOCKET_IFNAME", "ens5"));
    // On both hosts: they would run with it.
    examined.says("fail", "interfaces", "", "GLOO_SOCKET_IFNAME=ens5");
}

#[needs(Hosts)]
fn logins_that_print() {
    let cluster = Cluster::new(2);
    // sshd runs this before every command.
    let rc = cluster.host(1).home().join(".ssh/rc");
    fs::write(rc, "echo Welcome to node2\n").unwrap();
    cluster.examine(&[]).says("note", "ssh", "node2", "Welcome to node2");
}

#[needs(Hosts)]
fn builds_of_the_program() {
    let cluster = Cluster::new(3);
    let app = app(&cluster);
    let program = app.join("train");
    let program = program.to_str().unwrap();
    let examined = cluster.examine(&["--program", program]);
    examined.says("ok", "program", "", "the same on all hosts");
    examined.says("ok", "libtorch", "", "2.13.0 for CPUs");

    cluster.own_copy(1, &app, "echo more >>train");
    cluster.examine(&["--program", program]).says("fail", "program", "", "on node2");
    cluster.host(2).hide(&app);
    let examined = cluster.examine(&["--program", program]);
    examined.says("fail", "program", "node3", "there is no");
}

#[needs(Hosts)]
fn libtorch_on_each_host() {
    let cluster = Cluster::new(4);
    let app = app(&cluster);
    cluster.own_copy(1, &app, "echo 2.12.1 >libtorch/build-version");
    cluster.own_copy(2, &app, "rm libtorch/lib/libtorch_cpu.so");
    cluster.own_copy(3, &app, "rm libtorch/lib/libplain.so");
    let program = app.join("train");
    let examined = cluster.examine(&["--program", program.to_str().unwrap()]);
    examined.says("fail", "libtorch", "", "2.13 on node1, node4; 2.12 on node2");
    examined.says("fail", "libtorch", "node3", "does not find libtorch_cpu.so");
    examined.says("fail", "program", "node4", "libraries are not found: libplain.so");
}

#[needs(Hosts)]
fn libtorch_that_is_too_old_or_too_new() {
    let cluster = Cluster::new(2);
    let app = app(&cluster);
    let program = app.join("train");
    for (version, verdict, text) in
        [("2.10.2", "fail", "older than 2.11"), ("2.14.0", "warning", "newer than 2.13")]
    {
        fs::write(app.join("libtorch/build-version"), version).unwrap();
        let examined = cluster.examine(&["--program", program.to_str().unwrap()]);
        examined.says(verdict, "libtorch", "", text);
    }
}
