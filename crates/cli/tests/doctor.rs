//! `brigade doctor` on this host alone: faults made with limits, variables and files.

mod ward;

use std::process::Command;

use ward::{BRIGADE, Examined, examined, run};

/// A doctor for this host, started by a shell that has prepared something.
#[track_caller]
fn here(prepare: &str, arguments: &[&str]) -> Examined {
    let mut command = Command::new("sh");
    command.args(["-ec", &format!("{prepare}\nexec \"$@\""), "sh", BRIGADE, "doctor", "--json"]);
    command.args(arguments).env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    examined(&mut command)
}

/// The same with mounts of its own, where that is allowed.
#[track_caller]
fn here_with_mounts(prepare: &str, arguments: &[&str]) -> Option<Examined> {
    let probe = "mount -t tmpfs -o size=1m tmpfs /mnt";
    let can = Command::new("unshare").args(["--mount", "sh", "-c", probe]).output();
    if !can.is_ok_and(|it| it.status.success()) {
        eprintln!("skipped: mounting needs root and namespaces");
        return None;
    }
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-ec", &format!("{prepare}\nexec \"$@\""), "sh"]);
    command.args([BRIGADE, "doctor", "--json"]).args(arguments);
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    Some(examined(&mut command))
}

#[test]
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

#[test]
fn the_table_ends_with_a_sum() {
    let output = run(Command::new(BRIGADE).args(["doctor"]).env("LC_ALL", "C"));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("brigade doctor: "), "{text}");
    assert!(text.trim_end().lines().last().unwrap().contains("this host"), "{text}");
    assert!(!text.contains('\u{1b}'), "colours in a file: {text:?}");
    assert_eq!(output.status.code(), Some(i32::from(text.contains("FAIL"))));
}

#[test]
fn limits() {
    let examined = here("ulimit -n 100", &[]);
    examined.says("warning", "limits", "", "only 100 files");
    let examined = here("ulimit -n 40", &[]);
    examined.says("fail", "limits", "", "only 40 files");
    let examined = here("ulimit -u 900 2>/dev/null || ulimit -p 900", &[]);
    examined.says("warning", "limits", "", "only 900 processes");
}

#[test]
fn variables_of_another_job() {
    let examined = here("export RANK=3 WORLD_SIZE=8", &[]);
    let finding = examined.says("warning", "variables", "", "RANK, WORLD_SIZE");
    assert_eq!(finding["command"], "unset RANK WORLD_SIZE");
}

#[test]
fn an_interface_that_is_not_there() {
    let examined = here("export GLOO_SOCKET_IFNAME=nope7", &[]);
    examined.says("fail", "interfaces", "", "GLOO_SOCKET_IFNAME=nope7");
}

#[test]
fn disks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let on = |options: &str| {
        here_with_mounts(&format!("mount -t tmpfs -o {options} tmpfs {path}"), &["--workdir", path])
    };
    let Some(examined) = on("size=32m") else { return };
    examined.says("fail", "disk", "", "32 MiB of 32 MiB are free");
    on("size=512m").unwrap().says("warning", "disk", "", "512 MiB of 512 MiB");
    on("size=2g,nr_inodes=50").unwrap().says("fail", "disk", "", "more files (inodes)");
    on("size=2g,ro").unwrap().says("warning", "disk", "", "mounted for reading only");

    let logs = here_with_mounts(
        &format!("mount -t tmpfs -o size=2g,ro tmpfs {path}"),
        &["--log-dir", &format!("{path}/runs/1")],
    );
    logs.unwrap().says("fail", "disk", "", "the folder for logs, is mounted for reading only");
}

#[test]
fn a_working_folder_that_is_not_there() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    let missing = missing.to_str().unwrap();
    here("", &["--workdir", missing]).says("fail", "folder", "", "is not there");
    here("", &["--workdir", BRIGADE]).says("fail", "folder", "", "is a file");
}

#[test]
fn shared_memory_as_docker_gives_it() {
    let Some(examined) = here_with_mounts("mount -t tmpfs -o size=64m tmpfs /dev/shm", &[]) else {
        return;
    };
    examined.says("warning", "shared_memory", "", "only 64 MiB");
}

#[test]
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

#[test]
fn memory_that_the_group_may_use() {
    // The groups of version 1 and 2 have other files; whichever this kernel has.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().display();
    let name = format!("brigade-doctor-{}", std::process::id());
    let in_group = |kind: &str, file: &str| {
        let script = format!(
            "mount -t {kind} cgroup {path} && mkdir {path}/{name} && echo 157286400 >{path}/{name}/{file} \
             || {{ rmdir {path}/{name}; exit 99; }}"
        );
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &format!("{{ {script}; }} >&2; {MOVE}")]);
        command.args(["sh", BRIGADE, "doctor", "--json"]);
        command.env("GROUP", format!("{path}/{name}")).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        run(&mut command)
    };
    for (kind, file) in [("cgroup2", "memory.max"), ("cgroup -o memory", "memory.limit_in_bytes")] {
        let output = in_group(kind, file);
        if output.status.code() == Some(99) {
            eprintln!("skipped {kind}: {}", String::from_utf8_lossy(&output.stderr).trim());
            continue;
        }
        let json = serde_json::from_slice(&output.stdout).unwrap();
        let examined = Examined { code: output.status.code(), json };
        examined.says("fail", "memory", "", "of 150 MiB are free");
    }
}

/// Enters the group, works, leaves it and takes it away.
const MOVE: &str = r#"echo $$ >"$GROUP/cgroup.procs"; "$@"; code=$?
    echo $$ >"${GROUP%/*}/cgroup.procs"; rmdir "$GROUP"; exit $code"#;

#[test]
fn a_port_that_is_taken() {
    let listener = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let examined = here("", &["--master-port", &port]);
    examined.says("fail", "ports", "", "cannot be listened on: address already in use");
    drop(listener);
    here("", &["--master-port", &port]).is_well("ports");
}

#[test]
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
