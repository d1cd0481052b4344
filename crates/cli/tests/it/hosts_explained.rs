//! Tests of `brigade launch --hosts … --explain`: plans as golden files, without hosts. Renew them with
//! `UPDATE_GOLDEN=1 cargo nextest run -p brigade-cli hosts_explained::`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::job::BRIGADE;

/// Explains in a folder of its own, without settings and with these variables only.
fn explain(folder: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(BRIGADE);
    command.arg("launch").args(arguments).arg("--explain").args(["./train", "--epochs", "4"]);
    command.env_clear().env("HOME", folder).env("PATH", "/usr/bin:/bin").current_dir(folder);
    command.env("NCCL_DEBUG", "INFO").env("OMP_NUM_THREADS", "2").env("TOKEN", "secret");
    command.output().unwrap()
}

fn text(folder: &Path, arguments: &[&str]) -> String {
    let output = explain(folder, arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.replace(&*folder.canonicalize().unwrap().to_string_lossy(), "FOLDER")
}

fn compare(name: &str, said: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&path, said).unwrap();
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        said == expected,
        "{name} changed; if that is intended, `UPDATE_GOLDEN=1 cargo nextest run -p brigade-cli hosts_explained::` writes \
         the file anew; it is now:\n{said}"
    );
}

#[test]
fn plans() {
    let folder = tempfile::tempdir().unwrap();
    let hostfile = folder.path().join("hosts");
    fs::write(&hostfile, "node1 slots=4 # first\nada@node2 slots=4\n[fd00::3]\n[fd00::3]\n")
        .unwrap();
    let flags = [
        "--hostfile",
        "hosts",
        "--nnodes",
        "2:3",
        "--ssh-command",
        "ssh -p 2222",
        "--env-pass",
        "TOKEN",
        "--env",
        "SEED=7",
        "--sync",
        "--workdir",
        "/data",
        "--master-addr",
        "10.0.0.1",
    ];
    compare("launch-hosts.txt", &text(folder.path(), &flags));

    let json = text(folder.path(), &["--hosts", "localhost:2,node2", "--nproc", "gpu", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["hosts"][0]["ssh"], serde_json::Value::Null);
    assert_eq!(json["hosts"][1]["ssh"][0], "ssh");
    assert_eq!(json["hosts"][1]["first_rank"], 2);
    assert_eq!(json["hosts"][1]["nproc"], "gpu");
    assert_eq!(json["handed_on"], serde_json::json!(["NCCL_DEBUG", "OMP_NUM_THREADS"]));
    assert_eq!(json["command"], serde_json::json!(["./train", "--epochs", "4"]));
}

#[test]
fn slots_of_a_list() {
    let folder = tempfile::tempdir().unwrap();
    let hostfile = folder.path().join("hosts");
    fs::write(&hostfile, "worker-0 slots=4\nworker-1 slots=4\nworker-2 slots=4\n").unwrap();
    let hosts = |flags: &[&str]| {
        let json = text(folder.path(), &[&["--hostfile", "hosts", "--json"], flags].concat());
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let row = |host: &serde_json::Value| {
            format!("{} {} {}", host["host"], host["nproc"], host["devices"]).replace('"', "")
        };
        json["hosts"].as_array().unwrap().iter().map(row).collect::<Vec<_>>()
    };
    let include = ["--include", "worker-0@worker-1:0,2"];
    assert_eq!(hosts(&include), ["worker-0 4 null", "worker-1 2 [0,2]"]);
    // On the CPU only their number counts.
    let on_cpu = ["--cpu", "--include", "worker-1:0,2"];
    assert_eq!(hosts(&on_cpu), ["worker-1 2 null"]);
    let exclude = ["--deepspeed_exclusion_filter", "worker-0@worker-1:3"];
    assert_eq!(hosts(&exclude), ["worker-1 3 [0,1,2]", "worker-2 4 null"]);
}

#[test]
fn mistakes() {
    let folder = tempfile::tempdir().unwrap();
    let hostfile = folder.path().join("hosts");
    fs::write(&hostfile, "node1 slots=4\n\nnode2 slot=4\n").unwrap();
    let table: [(&[&str], &str); 11] = [
        (&["--hostfile", "hosts"], "hosts, line 3: `slot=4`: expected `slots=N`"),
        (
            &["--hostfile", "none"],
            "cannot read the hostfile none: No such file or directory (os error 2)",
        ),
        (
            &["--hosts", "a:2,b"],
            "b has no number of ranks: write b:N, or give --nproc N for all hosts",
        ),
        (
            &["--hosts", "a:0"],
            "invalid value 'a:0' for '--hosts <HOST[:N],..>': expected at least 1",
        ),
        (
            &["--hosts", "a:1,b:1", "--nnodes", "3"],
            "--nnodes 3, but the list has 2 hosts: give 2, or MIN:2 for a job that can continue",
        ),
        (
            &["--hosts", "a:1", "--env-pass", "NO_SUCH"],
            "--env-pass NO_SUCH: this environment has no such variable; set one with --env NO_SUCH=VALUE",
        ),
        (&["--hosts", "a:1", "--ssh-command", "ssh 'x"], "--ssh-command `ssh 'x`: its quotes"),
        (
            &["--hosts", "a:1,b:1", "--include", "a@c:0"],
            "--include `c:0`: expected a host of the list: a, b",
        ),
        (
            &["--hosts", "a:1", "--include", "a", "--exclude", "a"],
            "include a (flag --include) and exclude a (flag --exclude) exclude each other: one lists",
        ),
        (&["--hosts", "a:1", "--workdir", "b"], "the working folder b is not an absolute path"),
        (
            &["--hosts", "a:1", "--node-rank", "0"],
            "hosts a:1 (flag --hosts) and node-rank 0 (flag --node-rank) exclude each other",
        ),
    ];
    for (arguments, expected) in table {
        let output = explain(folder.path(), arguments);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stderr}");
        assert!(stderr.starts_with(&format!("brigade: {expected}")), "{arguments:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
}
