//! Network of hosts with real faults, for tests of `brigade doctor`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use brigade_test_hosts::{Host, Network};
use serde_json::Value;

use crate::job::BRIGADE;

/// Hosts, and a working folder that all of them see.
pub(crate) struct Cluster {
    pub(crate) network: Network,
    pub(crate) folder: PathBuf,
    /// Configuration of ssh.
    pub(crate) ssh_config: PathBuf,
}

impl Cluster {
    pub(crate) fn new(hosts: usize) -> Self {
        let network = Network::new(hosts);
        let folder = network.folder().join("work");
        fs::create_dir(&folder).unwrap();
        let ssh_config = network.ssh_config().to_owned();
        Self { network, folder, ssh_config }
    }

    pub(crate) fn host(&self, index: usize) -> &Host {
        self.network.host(index)
    }

    /// Returns the hosts as `node1,node2,...`.
    fn list(&self) -> String {
        let names: Vec<&str> = self.network.hosts().iter().map(Host::name).collect();
        names.join(",")
    }

    /// Returns a doctor on the first host, for all hosts.
    pub(crate) fn doctor(&self) -> Command {
        let mut command = self.doctor_for(&self.list());
        command.arg("--no-speed");
        command
    }

    pub(crate) fn doctor_for(&self, hosts: &str) -> Command {
        let mut command = self.host(0).command_in(&self.folder, BRIGADE);
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("HOME", self.host(0).home());
        command.args(["doctor", "--json", "--hosts", hosts, "--ssh-command"]);
        command.arg(format!("ssh -F {}", self.ssh_config.display()));
        command
    }

    /// Examines all hosts. The doctor must leave nothing running on any of them.
    #[track_caller]
    pub(crate) fn examine(&self, arguments: &[&str]) -> Examined {
        let mut command = self.doctor();
        command.args(arguments);
        let examined = examined(&mut command);
        self.assert_empty();
        examined
    }

    /// Asserts that no process of the doctor is left on any host; a session's sshd may need a moment to end.
    #[track_caller]
    pub(crate) fn assert_empty(&self) {
        for host in self.network.hosts() {
            let mut left = host.processes();
            for _ in 0..1000 {
                if left.is_empty() {
                    break;
                }
                std::thread::sleep(std::time::Duration::from_millis(10));
                left = host.processes();
            }
            assert!(left.is_empty(), "left on {}: {left:?}", host.name());
        }
        let files: Vec<_> = fs::read_dir(&self.folder).unwrap().flatten().collect();
        let ours = files.iter().filter(|it| it.file_name().to_string_lossy().contains("doctor"));
        assert_eq!(ours.count(), 0, "{files:?}");
    }

    /// Replaces a folder on one host by a private copy under the same path, and modifies it.
    pub(crate) fn own_copy(&self, host: usize, folder: &Path, spoil: &str) {
        let folder = folder.display();
        self.host(host).sh(&format!(
            "mkdir /run/copy; cp -a {folder}/. /run/copy; cd /run/copy; {spoil}\n\
             cd /; mount --bind /run/copy {folder}"
        ));
    }
}

/// Output of the doctor.
pub(crate) struct Examined {
    pub(crate) code: Option<i32>,
    pub(crate) json: Value,
}

/// Runs a doctor with JSON output.
#[track_caller]
pub(crate) fn examined(command: &mut Command) -> Examined {
    let output = run(command);
    let json = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {output:?}"));
    Examined { code: output.status.code(), json }
}

pub(crate) fn run(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).output().unwrap()
}

impl Examined {
    fn findings(&self, subject: &str) -> Vec<&Value> {
        let all = self.json["findings"].as_array().unwrap();
        all.iter().filter(|it| it["subject"] == subject).collect()
    }

    /// Asserts that there is such a finding, with a remedy unless it is OK.
    #[track_caller]
    pub(crate) fn says(&self, verdict: &str, subject: &str, host: &str, text: &str) -> &Value {
        let findings = self.findings(subject);
        let alone = self.json["hosts"].as_array().is_some_and(|hosts| hosts.len() == 1);
        let found = findings.iter().find(|finding| {
            let found = finding["found"].as_str().unwrap_or_default();
            let means = finding["means"].as_str().unwrap_or_default();
            finding["verdict"] == verdict
                && (alone || hosts(finding) == host)
                && (found.contains(text) || means.contains(text))
        });
        let Some(found) = found else {
            panic!("no {verdict} about {subject} of {host:?} with {text:?}: {findings:#?}")
        };
        let wants_remedy = verdict == "warning" || verdict == "fail";
        assert!(!wants_remedy || found["remedy"].is_string(), "{found:#}");
        if verdict == "fail" {
            assert_eq!(self.code, Some(1), "{found:#}");
        }
        found
    }

    /// Asserts that the findings of a subject are OK.
    #[track_caller]
    pub(crate) fn is_well(&self, subject: &str) {
        let findings = self.findings(subject);
        let well = findings.iter().all(|it| it["verdict"] == "ok" || it["verdict"] == "note");
        assert!(well && !findings.is_empty(), "{subject}: {findings:#?}");
    }

    /// Asserts that nothing else would stop a job, except for the state of this machine: load, full memory.
    #[track_caller]
    pub(crate) fn only_fails_in(&self, subjects: &[&str]) {
        for finding in self.json["findings"].as_array().unwrap() {
            let subject = finding["subject"].as_str().unwrap();
            let own = ["memory", "disk"].contains(&subject) || subjects.contains(&subject);
            assert!(own || finding["verdict"] != "fail", "{finding:#}");
        }
    }
}

/// Formats the hosts of a finding: `node1,node2`, or `node1->node2`.
fn hosts(finding: &Value) -> String {
    let hosts: Vec<&str> =
        finding["hosts"].as_array().unwrap().iter().map(|it| it.as_str().unwrap()).collect();
    match finding["towards"].as_str() {
        Some(towards) => format!("{}->{towards}", hosts.join(",")),
        None => hosts.join(","),
    }
}

/// Builds a program that is linked to a library called libtorch, in a folder of the shared disk.
pub(crate) fn app(cluster: &Cluster) -> PathBuf {
    let app = cluster.network.folder().join("app");
    fs::create_dir_all(app.join("libtorch/lib")).unwrap();
    fs::write(app.join("libtorch/build-version"), "2.13.0+cpu\n").unwrap();
    let script = "echo 'int of(void) { return 0; }' >of.c
        echo 'int of(void); int plain(void); int main(void) { return of() + plain(); }' >main.c
        cc -shared -fPIC -o libtorch/lib/libtorch_cpu.so of.c
        cc -shared -fPIC -Dof=plain -o libtorch/lib/libplain.so of.c
        cc -o train main.c -Llibtorch/lib -ltorch_cpu -lplain '-Wl,--enable-new-dtags,-rpath,$ORIGIN/libtorch/lib'";
    let made = Command::new("sh").args(["-ec", script]).current_dir(&app).output().unwrap();
    // The workspace cannot be built without a C compiler.
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    app
}
