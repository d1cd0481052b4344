//! Check of hosts that could not be examined: ssh's messages, and a remedy for each kind.

use crate::cluster::{Cluster, HostReport, Lost};
use crate::finding::{Finding, Subject};
use crate::quantity::counted;

pub(super) fn check(cluster: &Cluster) -> Vec<Finding> {
    let mut findings: Vec<Finding> =
        cluster.hosts.iter().filter_map(|host| Some(lost(host, host.lost.as_ref()?))).collect();
    for host in cluster.hosts.iter().filter(|host| !host.here && host.lost.is_none()) {
        let first = host.login_banner.iter().find(|line| !line.is_empty());
        if let Some(first) = first {
            findings.push(
                Finding::note(
                    Subject::Ssh,
                    format!(
                        "its login prints {} before a command runs, first {first:?}",
                        counted(host.login_banner.len(), "line", "lines")
                    ),
                )
                .means("it would stand among the output of ranks, and breaks rsync and scp")
                .remedy("in ~/.bashrc there, print only when $- contains i")
                .on(&host.name),
            );
        }
    }
    let others = cluster.hosts.iter().filter(|host| !host.here);
    let reached = others.clone().filter(|host| host.lost.is_none()).count();
    if findings.is_empty() && reached > 0 {
        let found =
            format!("{} without a password", counted(reached, "host answers", "hosts answer"));
        findings.push(Finding::ok(Subject::Ssh, found));
    }
    findings
}

fn lost(host: &HostReport, lost: &Lost) -> Finding {
    let name = &host.name;
    let fail = |found: &str| Finding::fail(Subject::Ssh, found).on(name);
    match lost {
        Lost::NotStarted { reason } => {
            fail(reason).remedy("install an ssh client").command("sudo apt install openssh-client")
        }
        Lost::Foreign { version } => fail(&format!(
            "brigade {version} there is not compatible with the one here, {}",
            env!("CARGO_PKG_VERSION")
        ))
        .remedy("install the same version on all hosts")
        .command(format!("scp {} {name}:", this_program())),
        Lost::Silent { asked, seconds, stderr } => {
            let found = format!("no answer within {seconds} s, asked for {asked}");
            with_ssh_output(fail(&found), stderr)
                .remedy("see whether a login there hangs, too: a file server, a name server or the network may")
                .command(format!("ssh -v {name} true"))
        }
        Lost::Ended { code, stderr } if host.here => {
            let code =
                code.map_or_else(|| "a signal".to_owned(), |code| format!("exit code {code}"));
            with_ssh_output(
                fail(&format!("the examination of this host ended with {code}")),
                stderr,
            )
            .remedy("run it by hand")
            .command("brigade __doctor")
        }
        Lost::Ended { code, stderr } => {
            let all = stderr.join("\n").to_lowercase();
            let known = KNOWN.iter().find(|known| {
                known.code.is_none_or(|code_wanted| *code == Some(code_wanted))
                    && known.words.iter().any(|word| all.contains(word))
            });
            let finding = match known {
                Some(known) => fail(known.found)
                    .remedy(known.remedy)
                    .command(known.command.replace("HOST", name)),
                None => {
                    let code =
                        code.map_or_else(|| "a signal".to_owned(), |it| format!("exit code {it}"));
                    fail(&format!("the login ended with {code} before brigade answered"))
                        .remedy("look at the messages of ssh")
                        .command(format!("ssh -v {name} true"))
                }
            };
            with_ssh_output(finding, stderr)
        }
    }
}

/// Appends the last lines of ssh's output: earlier lines only report its progress.
fn with_ssh_output(finding: Finding, words: &[String]) -> Finding {
    let words: Vec<&str> = words
        .iter()
        .map(String::as_str)
        .filter(|line| !line.chars().all(|c| "@ ".contains(c)))
        .collect();
    let last = &words[words.len().saturating_sub(2)..];
    let last: Vec<&str> = last.iter().map(|it| it.trim_start_matches("ssh: ")).collect();
    if last.is_empty() { finding } else { finding.means(format!("ssh: {}", last.join(" / "))) }
}

fn this_program() -> String {
    let path = std::env::current_exe().unwrap_or_else(|_| "brigade".into());
    path.display().to_string()
}

/// Failure that ssh reports with known words.
struct Known {
    /// Exit code that is required, if any.
    code: Option<i32>,
    /// Words of which one must occur in ssh's output.
    words: &'static [&'static str],
    found: &'static str,
    remedy: &'static str,
    command: &'static str,
}

const KNOWN: &[Known] = &[
    Known {
        code: None,
        words: &["remote host identification has changed"],
        found: "its host key differs from the one that this host has stored",
        remedy: "if the host was reinstalled, remove its old key and log in once by hand; if not, \
        another machine may answer under its name",
        command: "ssh-keygen -R HOST && ssh HOST true",
    },
    Known {
        code: None,
        words: &["host key verification failed", "no matching host key"],
        found: "its host key is not stored here",
        remedy: "log in once by hand, and compare the key",
        command: "ssh HOST true",
    },
    Known {
        code: None,
        words: &["permission denied", "too many authentication failures"],
        found: "it refuses the login",
        remedy: "put your key there; a key with a passphrase must be in an ssh agent, because brigade cannot ask for it",
        command: "ssh-copy-id HOST",
    },
    Known {
        code: None,
        words: &["could not resolve hostname", "name or service not known"],
        found: "its name cannot be resolved on this host",
        remedy: "put it into /etc/hosts, or give ssh its address",
        command: "printf 'Host HOST\\n  HostName ADDRESS\\n' >> ~/.ssh/config",
    },
    Known {
        code: None,
        words: &["connection refused"],
        found: "nothing listens for ssh there",
        remedy: "start its ssh server, or name the right port in ~/.ssh/config",
        command: "sudo systemctl start ssh",
    },
    Known {
        code: None,
        words: &["no route to host", "network is unreachable"],
        found: "it cannot be reached from here",
        remedy: "see whether it is switched on and in the same network",
        command: "ping -c 3 HOST",
    },
    Known {
        code: None,
        words: &["timed out"],
        found: "it does not answer",
        remedy: "see whether it is switched on, and whether a firewall drops port 22",
        command: "ping -c 3 HOST",
    },
    Known {
        code: Some(127),
        words: &[""],
        found: "brigade is not installed on it",
        remedy: "copy it to a folder of the PATH there, or use --sync",
        command: "scp $(command -v brigade) HOST:/usr/local/bin/",
    },
    Known {
        code: Some(126),
        words: &[""],
        found: "brigade cannot be run there",
        remedy: "copy the program again, and check that it is for that kind of processor",
        command: "scp $(command -v brigade) HOST:/usr/local/bin/",
    },
    Known {
        code: Some(2),
        words: &["unrecognized subcommand", "__doctor"],
        found: "brigade there is too old to be examined",
        remedy: "install the same version on all hosts",
        command: "scp $(command -v brigade) HOST:/usr/local/bin/",
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Verdict;
    use crate::fixtures;

    #[test]
    fn each_failure_has_its_remedy() {
        for (code, words, found, command) in [
            (255, "Host key verification failed.", "not stored", "ssh node2 true"),
            (255, "node2: Permission denied (publickey).", "refuses", "ssh-copy-id node2"),
            (
                255,
                "ssh: Could not resolve hostname node2: Name or service not known",
                "name cannot be resolved",
                "HostName",
            ),
            (255, "ssh: connect to host node2 port 22: Connection refused", "listens", "start ssh"),
            (255, "ssh: connect to host node2 port 22: Connection timed out", "answer", "ping"),
            (
                255,
                "ssh: connect to host node2 port 22: No route to host",
                "cannot be reached",
                "ping",
            ),
            (127, "sh: 1: brigade: not found", "not installed", "scp"),
            (2, "error: unrecognized subcommand '__doctor'", "too old", "scp"),
            (255, "something new", "exit code 255", "ssh -v node2"),
        ] {
            let mut cluster = fixtures::cluster(2);
            cluster.hosts[1].lost =
                Some(Lost::Ended { code: Some(code), stderr: vec![words.to_owned()] });
            let findings = check(&cluster);
            let (verdict, hosts, text) = fixtures::only(&findings);
            assert_eq!((verdict, hosts.as_str()), (Verdict::Fail, "node2"));
            assert!(text.contains(found), "{words}: {text}");
            assert!(findings[0].command.contains(command), "{words}: {findings:?}");
            assert!(findings[0].means.contains(words.trim_start_matches("ssh: ")), "{findings:?}");
        }
    }

    #[test]
    fn a_changed_key_is_not_an_unknown_one() {
        let words = [
            "@@@@@@@@@@@@@@@@@@",
            "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @",
            "Host key for node2 has changed and you have requested strict checking.",
            "Host key verification failed.",
        ];
        let mut cluster = fixtures::cluster(2);
        cluster.hosts[1].lost =
            Some(Lost::Ended { code: Some(255), stderr: words.map(str::to_owned).to_vec() });
        assert!(check(&cluster)[0].command.starts_with("ssh-keygen -R node2"));
    }

    #[test]
    fn silence_and_strange_versions() {
        let mut cluster = fixtures::cluster(3);
        let asked = "its facts".to_owned();
        cluster.hosts[1].lost = Some(Lost::Silent { asked, seconds: 40, stderr: Vec::new() });
        cluster.hosts[2].lost = Some(Lost::Foreign { version: "9.9".to_owned() });
        let findings = check(&cluster);
        assert!(findings[0].found.contains("40 s"), "{findings:?}");
        assert!(findings[1].found.contains("brigade 9.9"), "{findings:?}");
    }

    #[test]
    fn logins_that_print() {
        let mut cluster = fixtures::cluster(2);
        cluster.hosts[1].login_banner = vec![String::new(), "Welcome".to_owned()];
        let (verdict, hosts, text) = fixtures::only(&check(&cluster));
        assert_eq!((verdict, hosts.as_str()), (Verdict::Note, "node2"));
        assert!(text.contains("2 lines") && text.contains("Welcome"), "{text}");
    }

    #[test]
    fn all_answer() {
        fixtures::all_is_well(&check(&fixtures::cluster(3)));
        assert_eq!(check(&fixtures::cluster(1)), []);
    }
}
