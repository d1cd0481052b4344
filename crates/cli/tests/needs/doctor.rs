//! Tests of `brigade doctor` on this host alone, with faults made by limits, variables and files.

use std::process::Command;

use brigade_test_hosts::MemoryGroup;
use brigade_test_needs::{needs, with_mounts};

use crate::doctor_cluster::{Examined, examined, run};
use crate::job::BRIGADE;

/// Runs the doctor for this host, from a shell that has prepared a fault.
#[track_caller]
fn here(prepare: &str, arguments: &[&str]) -> Examined {
    let mut command = Command::new("sh");
    command.args(["-ec", &format!("{prepare}\nexec \"$@\""), "sh", BRIGADE, "doctor", "--json"]);
    command.args(arguments).env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    examined(&mut command)
}

/// Runs the doctor for this host in a mount namespace of its own, after a shell script has prepared a fault.
#[track_caller]
fn here_with_mounts(prepare: &str, arguments: &[&str]) -> Examined {
    let mut command = with_mounts(&format!("{prepare}\nexec \"$@\""));
    command.args([BRIGADE, "doctor", "--json"]).args(arguments);
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    examined(&mut command)
}

#[needs()]
fn this_host_is_fit() {
    let examined = here("", &[]);
    examined.only_fails_in(&[]);
    for subject in ["brigade", "interfaces", "folder", "devices", "limits", "variables", "kernel"] {
        examined.is_well(subject);
    }
    let facts = &examined.json["hosts"][0]["facts"];
    assert!(facts["memory"]["total_bytes"].as_u64().unwrap() > 1 << 20);
    assert!(facts["cpu"]["usable"].as_u64().unwrap() > 0);
}

#[needs()]
fn the_table_ends_with_a_sum() {
    let output = run(Command::new(BRIGADE).args(["doctor"]).env("LC_ALL", "C"));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("brigade doctor: "), "{text}");
    assert!(text.trim_end().lines().last().unwrap().contains("this host"), "{text}");
    assert!(!text.contains('\u{1b}'), "colours in a file: {text:?}");
    assert_eq!(output.status.code(), Some(i32::from(text.contains("FAIL"))));
}

#[needs()]
fn limits() {
    let examined = here("ulimit -n 100", &[]);
    examined.says("warning", "limits", "", "only 100 files");
    let examined = here("ulimit -n 40", &[]);
    examined.says("fail", "limits", "", "only 40 files");
    let examined = here("ulimit -u 900 2>/dev/null || ulimit -p 900", &[]);
    examined.says("warning", "limits", "", "only 900 processes");
}

#[needs()]
fn variables_of_another_job() {
    let examined = here("export RANK=3 WORLD_SIZE=8", &[]);
    let finding = examined.says("warning", "variables", "", "RANK, WORLD_SIZE");
    assert_eq!(finding["command"], "unset RANK WORLD_SIZE");
}

#[needs()]
fn an_interface_that_is_not_there() {
    let examined = here("export GLOO_SOCKET_IFNAME=nope7", &[]);
    examined.says("fail", "interfaces", "", "GLOO_SOCKET_IFNAME=nope7");
}

#[needs(Mounts)]
fn disks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let on = |options: &str| {
        here_with_mounts(&format!("mount -t tmpfs -o {options} tmpfs {path}"), &["--workdir", path])
    };
    on("size=32m").says("fail", "disk", "", "32 MiB of 32 MiB are free");
    on("size=512m").says("warning", "disk", "", "512 MiB of 512 MiB");
    on("size=2g,nr_inodes=50").says("fail", "disk", "", "more files (inodes)");
    on("size=2g,ro").says("warning", "disk", "", "mounted for reading only");

    let logs = here_with_mounts(
        &format!("mount -t tmpfs -o size=2g,ro tmpfs {path}"),
        &["--log-dir", &format!("{path}/runs/1")],
    );
    logs.says("fail", "disk", "", "the folder for logs, is mounted for reading only");
}

#[needs()]
fn a_working_folder_that_is_not_there() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    let missing = missing.to_str().unwrap();
    here("", &["--workdir", missing]).says("fail", "folder", "", "does not exist");
    here("", &["--workdir", BRIGADE]).says("fail", "folder", "", "is a file");
}

#[needs(Mounts)]
fn shared_memory_as_docker_gives_it() {
    let examined = here_with_mounts("mount -t tmpfs -o size=64m tmpfs /dev/shm", &[]);
    examined.says("warning", "shared_memory", "", "only 64 MiB");
}

#[needs()]
fn programs() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    here("", &["--program", BRIGADE]).is_well("program");
    here("", &["--program", "no-such-program"]).says("fail", "program", "", "there is no");
    let plain = path("plain");
    std::fs::write(&plain, "text").unwrap();
    here("", &["--program", &plain]).says("fail", "program", "", "may not be executed");
    let script = path("script");
    std::fs::write(&script, "#!/usr/bin/env python3\n").unwrap();
    here(&format!("chmod +x {script}"), &["--program", &script]).is_well("program");
    let torn = path("torn");
    std::fs::copy(BRIGADE, &torn).unwrap();
    std::fs::OpenOptions::new().write(true).open(&torn).unwrap().set_len(100_000).unwrap();
    here("", &["--program", &torn]).says("fail", "program", "", "neither a program");
}

#[needs(MemoryGroups)]
fn memory_that_the_group_may_use() {
    let group = MemoryGroup::new();
    group.cap(150 << 20);
    let mut command = Command::new("sh");
    command.args(["-c", &group.script(), BRIGADE, "doctor", "--json"]);
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    examined(&mut command).says("fail", "memory", "", "of 150 MiB are free");
}

#[needs()]
fn a_port_that_is_taken() {
    let listener = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let examined = here("", &["--master-port", &port]);
    examined.says("fail", "ports", "", "cannot be listened on: address already in use");
    drop(listener);
    here("", &["--master-port", &port]).is_well("ports");
}

#[needs()]
fn wrong_arguments() {
    for (arguments, expected) in [
        (&["--port-range", "9-4"][..], "the smaller one first"),
        (&["--port-range", "0-9"], "two ports"),
        (&["--hosts", "a", "--hostfile", "b"], "cannot be used with"),
        (&["--hosts", ""], "host 1"),
        (&["--hostfile", "/no/such/file"], "/no/such/file"),
    ] {
        let output = run(Command::new(BRIGADE).arg("doctor").args(arguments));
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(words.contains(expected), "{arguments:?}: {words}");
    }
}
