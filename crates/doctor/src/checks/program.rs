//! Check of the job's program: it exists, can be started, finds its libraries, and is the same on every host.

use std::path::Path;

use super::{groups, who_has_what};
use crate::cluster::{Cluster, HostReport};
use crate::facts::{Missing, Program, ProgramState};
use crate::finding::{Finding, Subject};

pub(super) fn check(cluster: &Cluster) -> Vec<Finding> {
    let programs: Vec<(&HostReport, &Program)> = cluster
        .examined()
        .filter_map(|(_, host, facts)| Some((host, facts.program.as_ref()?)))
        .collect();
    let Some((_, first)) = programs.first() else { return Vec::new() };
    let is_missing = |program: &Program| program.state == ProgramState::Missing;
    if programs.iter().all(|(_, program)| is_missing(program)) {
        let place = if programs.len() > 1 { " on any of the hosts" } else { "" };
        let asked = first.asked.display();
        return vec![
            Finding::fail(Subject::Program, format!("there is no {asked}{place}"))
                .remedy("build it, or name it as it is called: a path, or a name in PATH"),
        ];
    }
    let here = programs.iter().find(|(host, program)| host.here && !is_missing(program));
    let source = here.and_then(|(_, program)| program.path.as_deref());
    let mut findings: Vec<Finding> =
        programs.iter().flat_map(|(host, program)| of_host(host, program, source)).collect();
    let machines: Vec<&str> =
        cluster.examined().map(|(_, _, facts)| facts.host.machine.as_str()).collect();
    let one_machine = machines.iter().all(|it| *it == machines[0]);
    let builds = programs.iter().filter_map(|(host, program)| {
        Some((host.name.as_str(), program.sha256.as_deref()?.get(..8)?))
    });
    let builds = groups(builds);
    // Programs for different processors cannot be the same.
    if builds.len() > 1 && one_machine {
        findings.push(
            Finding::fail(
                Subject::Program,
                format!("{} differs: {}", first.asked.display(), who_has_what(&builds)),
            )
            .means(
                "ranks of different builds may hang in a collective, or compute different things",
            )
            .remedy("copy one build to all hosts, or launch with --sync"),
        );
    }
    if findings.is_empty() {
        let found = match (&first.path, &first.state) {
            (Some(path), ProgramState::Script(interpreter)) => {
                format!(
                    "{} is a script for {interpreter}; its libraries are not looked at",
                    path.display()
                )
            }
            (Some(path), _) => format!("{} with all its libraries", path.display()),
            (None, _) => first.asked.display().to_string(),
        };
        let everywhere = if programs.len() > 1 { ", the same on all hosts" } else { "" };
        findings.push(Finding::ok(Subject::Program, format!("{found}{everywhere}")));
    }
    findings
}

/// Checks the program on one host; `source` is its path on this host.
fn of_host(host: &HostReport, program: &Program, source: Option<&Path>) -> Vec<Finding> {
    let asked = program.asked.display();
    let fail = |found: String| Finding::fail(Subject::Program, found).on(&host.name);
    let path = program.path.as_deref().unwrap_or(&program.asked).display();
    let failed = match &program.state {
        ProgramState::Binary | ProgramState::Script(_) => {
            return missing(&program.missing).into_iter().map(|it| it.on(&host.name)).collect();
        }
        ProgramState::Missing if host.here => {
            fail(format!("there is no {asked}")).remedy("build it here, too")
        }
        ProgramState::Missing => {
            let missing = fail(format!("there is no {asked}"));
            match source {
                Some(path) => missing
                    .remedy("build it, copy it there, or launch with --sync")
                    .command(format!("scp {0} {1}:{0}", path.display(), host.name)),
                None => missing.remedy("build it, or copy it there"),
            }
        }
        ProgramState::NotAFile => {
            fail(format!("{path} is not a file")).remedy("name the program itself")
        }
        ProgramState::NotExecutable => fail(format!("{path} may not be executed"))
            .remedy("allow it; a file system mounted with noexec never does")
            .command(format!("chmod +x {path}")),
        ProgramState::Silent => fail(format!("{asked} could not be read within 15 s"))
            .remedy("see whether its file server is up, or copy it to a local disk"),
        ProgramState::Unreadable(words) => {
            fail(format!("{path} cannot be read: {words}")).remedy("give this user access to it")
        }
        ProgramState::OtherMachine => fail(format!("{path} is for another kind of processor"))
            .remedy("build it there")
            .command("cargo build --release"),
        ProgramState::Strange => {
            fail(format!("{path} is neither a program of this system nor a script"))
                .remedy("see what it is; a copy may have broken off")
                .command(format!("file {path}"))
        }
    };
    vec![failed]
}

fn missing(missing: &[Missing]) -> Vec<Finding> {
    let (versions, libraries): (Vec<&Missing>, Vec<&Missing>) =
        missing.iter().partition(|it| it.in_library.is_some());
    // Without libtorch all of its libraries are missing; the check of libtorch has the better remedy.
    let libraries: Vec<&str> = libraries
        .iter()
        .map(|library| library.what.as_str())
        .filter(|name| !super::libtorch::is_part(name))
        .collect();
    let mut findings = Vec::new();
    if !libraries.is_empty() {
        findings.push(
            Finding::fail(
                Subject::Program,
                format!("libraries are not found: {}", libraries.join(", ")),
            )
            .means("the program ends at once with exit code 127")
            .remedy("install them, or name their folder in LD_LIBRARY_PATH"),
        );
    }
    if let Some(first) = versions.first() {
        let names: Vec<&str> = versions.iter().map(|it| it.what.as_str()).collect();
        let library = first.in_library.as_deref().unwrap_or(&first.needed_by);
        let found = format!("{} is too old: it has no {}", library.display(), names.join(", "));
        findings.push(
            Finding::fail(Subject::Program, found)
                .means(format!("{} was built on a newer system", first.needed_by.display()))
                .remedy("build it on the oldest of the systems"),
        );
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Verdict;
    use crate::fixtures;

    fn spoiled(spoil: impl FnOnce(&mut Program)) -> Vec<Finding> {
        let mut cluster = fixtures::cluster(3);
        spoil(fixtures::facts(&mut cluster, 1).program.as_mut().unwrap());
        check(&cluster)
    }

    #[test]
    fn programs_that_would_not_start() {
        for (state, expected) in [
            (ProgramState::Missing, "there is no ./train"),
            (ProgramState::NotAFile, "not a file"),
            (ProgramState::NotExecutable, "executed"),
            (ProgramState::Silent, "15 s"),
            (ProgramState::Unreadable("Input/output error".to_owned()), "Input/output"),
            (ProgramState::OtherMachine, "processor"),
            (ProgramState::Strange, "neither"),
        ] {
            let (verdict, hosts, found) = fixtures::only(&spoiled(|it| it.state = state));
            assert_eq!((verdict, hosts.as_str()), (Verdict::Fail, "node2"));
            assert!(found.contains(expected), "{found}");
        }
    }

    #[test]
    fn a_program_that_is_missing_is_copied_from_where_it_is() {
        let missing = |hosts: &[usize]| {
            let mut cluster = fixtures::cluster(3);
            for host in hosts {
                let facts = fixtures::facts(&mut cluster, *host);
                let program = facts.program.as_mut().unwrap();
                (program.state, program.path) = (ProgramState::Missing, None);
                program.sha256 = None;
            }
            check(&cluster)
        };
        let [found] = missing(&[1]).try_into().unwrap();
        assert_eq!(found.command, "scp /srv/train node2:/srv/train");
        // The first host is the one that the doctor runs on.
        let [found] = missing(&[0]).try_into().unwrap();
        assert_eq!((found.command.as_str(), found.remedy.as_str()), ("", "build it here, too"));
        let found = missing(&[0, 2]);
        assert!(found.iter().all(|it| it.command.is_empty()), "{found:?}");
        let [found] = missing(&[0, 1, 2]).try_into().unwrap();
        assert_eq!(found.found, "there is no ./train on any of the hosts");
        assert!(found.command.is_empty() && found.remedy.starts_with("build it, or name it"));
    }

    #[test]
    fn different_builds() {
        let findings = spoiled(|it| it.sha256 = Some("cd".repeat(32)));
        let (verdict, _, found) = fixtures::only(&findings);
        assert_eq!(verdict, Verdict::Fail);
        assert_eq!(found, "./train differs: abababab on node1, node3; cdcdcdcd on node2");

        let mut cluster = fixtures::cluster(2);
        let facts = fixtures::facts(&mut cluster, 1);
        facts.program.as_mut().unwrap().sha256 = Some("cd".repeat(32));
        facts.host.machine = "aarch64".to_owned();
        fixtures::all_is_well(&check(&cluster));
    }

    #[test]
    fn libraries() {
        let lost = |what: &str, in_library: Option<&str>| Missing {
            what: what.to_owned(),
            needed_by: "/srv/train".into(),
            in_library: in_library.map(Into::into),
        };
        let (_, _, found) = fixtures::only(&spoiled(|program| {
            program.missing = vec![lost("libfoo.so.1", None), lost("libtorch_cpu.so", None)];
        }));
        assert_eq!(found, "libraries are not found: libfoo.so.1");
        let (verdict, _, found) = fixtures::only(&spoiled(|program| {
            program.missing = vec![lost("GLIBC_2.39", Some("/lib/libc.so.6"))];
        }));
        assert_eq!(verdict, Verdict::Fail);
        assert_eq!(found, "/lib/libc.so.6 is too old: it has no GLIBC_2.39");
    }

    #[test]
    fn nothing_was_asked_or_all_is_well() {
        fixtures::all_is_well(&check(&fixtures::cluster(3)));
        let mut cluster = fixtures::cluster(1);
        fixtures::facts(&mut cluster, 0).program = None;
        assert_eq!(check(&cluster), []);
    }
}
