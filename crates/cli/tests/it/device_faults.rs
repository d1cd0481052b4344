//! Tests of faults that a driver writes into the kernel's log: `brigade launch` names them with the rank whose GPU is
//! concerned. The log and the GPUs are files of a simulated host.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::job::{Job, Run};

/// Creates a host with two GPUs, a network card at the switch of the second one, and an empty log.
fn host() -> TempDir {
    let root = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    for (minor, address, bridges) in [
        (0, "0000:19:00.0", "0000:17:00.0/0000:18:00.0"),
        (1, "0000:3b:00.0", "0000:39:00.0/0000:3a:00.0"),
    ] {
        write(
            &format!("proc/driver/nvidia/gpus/{address}/information"),
            &format!("Model: NVIDIA H100\nDevice Minor: {minor}\n"),
        );
        write(&format!("dev/nvidia{minor}"), "");
        let folder = format!("sys/devices/pci0000:{}/{bridges}/{address}", &bridges[5..7]);
        write(&format!("{folder}/numa_node"), "0\n");
        fs::create_dir_all(root.path().join("sys/bus/pci/devices")).unwrap();
        symlink(root.path().join(folder), root.path().join("sys/bus/pci/devices").join(address))
            .unwrap();
    }
    let nic = "sys/devices/pci0000:39/0000:39:00.0/0000:3a:01.0/0000:3c:00.0";
    write(&format!("{nic}/numa_node"), "0\n");
    write("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n");
    symlink(root.path().join(nic), root.path().join("sys/class/infiniband/mlx5_0/device")).unwrap();
    write("dev/kmsg", "4,1,1,-;NVRM: Xid (PCI:0000:19:00): 95, pid=1, of another job, long ago\n");
    root
}

fn job(nproc: usize, root: &Path) -> Job {
    let mut job = Job::new(nproc);
    job.command
        .env("BRIGADE_HOST_ROOT", root)
        .env("LOG", root.join("dev/kmsg"))
        .env_remove("CUDA_VISIBLE_DEVICES");
    job
}

fn run(mut job: Job, flags: &[&str], script: &str) -> Run {
    job.command.args(flags);
    job.sh(script).run()
}

const REPORTED: &str =
    "3,9,5000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus.";

#[test]
fn a_failed_rank_is_reported_with_the_fault_of_its_gpu() {
    let root = host();
    let events = root.path().join("events.jsonl");
    let error_file = root.path().join("error.json");
    let mut job = job(2, root.path());
    job.command.arg("--events").arg(&events).env("TORCHELASTIC_ERROR_FILE", &error_file);
    let script = format!("test $RANK = 1 || exec sleep 60; echo '{REPORTED}' >> $LOG; exit 3");
    let run = run(job, &[], &script);
    assert_eq!(run.code, 3, "{}", run.stderr);
    let expected = "brigade: Xid 79 at PCI 0000:3b:00.0, the GPU of rank 1 on ";
    let line = run.stderr.lines().find(|line| line.starts_with(expected));
    assert!(
        line.is_some_and(
            |it| it.contains("fallen off the bus") && it.contains("; restart the host")
        ),
        "{}",
        run.stderr
    );
    assert!(run.stderr.contains("\n  NVRM: Xid (PCI:0000:3b:00): 79, pid=7"), "{}", run.stderr);
    assert!(!run.stderr.contains("Xid 95"), "what was there before the job: {}", run.stderr);

    let lines = fs::read_to_string(&events).unwrap();
    let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let cause = lines.into_iter().find(|line| line["event"] == "cause").unwrap();
    let fault = &cause["device_faults"][0];
    assert_eq!((&fault["fault"], &fault["device"]), (&"Xid 79".into(), &"0000:3b:00.0".into()));
    assert_eq!((&fault["rank"], &fault["count"]), (&1.into(), &1.into()));
    let error = fs::read_to_string(&error_file).unwrap();
    assert!(error.contains("Xid 79 at PCI 0000:3b:00.0"), "{error}");
}

#[test]
fn the_rank_is_that_of_the_devices_that_were_chosen() {
    let root = host();
    let script = format!("echo '{REPORTED}' >> $LOG; exit 3");
    let chosen = run(job(1, root.path()), &["--devices=1"], &script);
    assert!(
        chosen.stderr.contains("Xid 79 at PCI 0000:3b:00.0, the GPU of rank 0 on "),
        "{}",
        chosen.stderr
    );
    // GPU of another job.
    let other = run(job(1, root.path()), &["--devices=0"], &script);
    assert!(other.code == 3 && !other.stderr.contains("Xid"), "{}", other.stderr);
}

#[test]
fn a_restart_on_a_device_that_is_gone_says_so() {
    let root = host();
    let script =
        format!("test $TORCHELASTIC_RESTART_COUNT = 0 && echo '{REPORTED}' >> $LOG; exit 3");
    let run = run(job(2, root.path()), &["--max-restarts=1"], &script);
    assert!(
        run.stderr.contains(" (before this attempt): the GPU has fallen off"),
        "{}",
        run.stderr
    );
}

#[test]
fn without_the_log_the_journal_is_asked() {
    let root = host();
    fs::remove_file(root.path().join("dev/kmsg")).unwrap();
    let journalctl = root.path().join("bin/journalctl");
    fs::create_dir_all(journalctl.parent().unwrap()).unwrap();
    let line =
        "1700000000.123456 node1 kernel: NVRM: Xid (PCI:0000:3b:00): 94, pid=7, Contained: SM";
    fs::write(&journalctl, format!("#!/bin/sh\necho \"$@\" >> $ASKED\necho '{line}'\n")).unwrap();
    fs::set_permissions(&journalctl, fs::Permissions::from_mode(0o755)).unwrap();
    let path =
        format!("{}:{}", journalctl.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let fails = || {
        let mut job = job(2, root.path());
        job.command.env("PATH", &path).env("ASKED", root.path().join("asked"));
        run(job, &[], "exit 3")
    };
    let failed = fails();
    assert!(
        failed.stderr.contains("Xid 94 at PCI 0000:3b:00.0, the GPU of rank 1 on "),
        "{}",
        failed.stderr
    );
    let asked = fs::read_to_string(root.path().join("asked")).unwrap();
    assert!(asked.starts_with("--dmesg --boot ") && asked.contains("--since=@"), "{asked}");
    assert_eq!(asked.lines().count(), 1, "ranks that fail together ask once: {asked}");
    // A host without GPUs does not read the log.
    fs::remove_file(root.path().join("asked")).unwrap();
    fs::remove_dir_all(root.path().join("proc")).unwrap();
    (0..2).for_each(|it| fs::remove_file(root.path().join(format!("dev/nvidia{it}"))).unwrap());
    let failed = fails();
    assert!(failed.code == 3 && !root.path().join("asked").exists(), "{}", failed.stderr);
}

#[test]
fn what_would_be_started_shows_gpus_and_network_cards() {
    let root = host();
    let explained = run(job(2, root.path()), &["--explain"], "true");
    let expected = [
        "    on GPU 0 (NVIDIA H100, PCI 0000:19:00.0), near mlx5_0 (same NUMA node)\n",
        "    on GPU 1 (NVIDIA H100, PCI 0000:3b:00.0), near mlx5_0 (same PCI switch)\n",
    ];
    for line in expected {
        assert!(explained.stdout.contains(line), "{}", explained.stdout);
    }
    let json = run(job(2, root.path()), &["--explain", "--json"], "true");
    let json: Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(json["ranks"][1]["gpu"]["pci"], "0000:3b:00.0");
    assert_eq!(json["ranks"][1]["nics"][0]["distance"], "switch");
}
