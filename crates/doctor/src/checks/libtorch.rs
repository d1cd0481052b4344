//! Check of libtorch: present on every host, a supported version, and the same everywhere.

use super::{groups, who_has_what};
use crate::cluster::{Cluster, HostReport};
use crate::facts::{Facts, Libtorch, ProgramState};
use crate::finding::{Finding, Subject};

pub(super) fn check(cluster: &Cluster) -> Vec<Finding> {
    let mut findings: Vec<Finding> =
        cluster.examined().filter_map(|(_, host, facts)| of_host(host, facts)).collect();
    let found: Vec<(&str, &Libtorch)> = cluster
        .examined()
        .filter_map(|(_, host, facts)| Some((host.name.as_str(), of(facts)?)))
        .collect();
    let same =
        |text: fn(&Libtorch) -> String| groups(found.iter().map(|(host, it)| (*host, text(it))));
    let releases = same(release);
    let builds = same(build);
    if releases.len() > 1 {
        findings.push(
            Finding::fail(
                Subject::Libtorch,
                format!("different versions: {}", who_has_what(&releases)),
            )
            .means("ranks of different versions may not be able to communicate")
            .remedy("install one version on all hosts, or launch with --sync"),
        );
    } else if builds.len() > 1 {
        findings.push(
            Finding::warning(
                Subject::Libtorch,
                format!("different builds: {}", who_has_what(&builds)),
            )
            .means("results differ in their last digits, and CUDA may be missing on some hosts")
            .remedy("install one build on all hosts, or launch with --sync"),
        );
    }
    findings.extend(cluster.examined().filter_map(|(_, host, facts)| of_project(host, facts)));
    if !findings.is_empty() {
        return findings;
    }
    let Some((_, first)) = found.first() else {
        let mut programs = cluster.examined().filter_map(|(_, _, facts)| facts.program.as_ref());
        if let Some(program) = programs.find(|it| it.state == ProgramState::Binary) {
            return vec![
                Finding::note(
                    Subject::Libtorch,
                    format!("{} is not linked with libtorch", program.asked.display()),
                )
                .means("if it loads one by itself, as Python does, that one is not looked at"),
            ];
        }
        if cluster.examined().all(|(_, _, facts)| facts.program.is_some()) {
            return vec![Finding::note(
                Subject::Libtorch,
                "where the program loads it from, if it does, is unknown",
            )];
        }
        return vec![
            Finding::note(
                Subject::Libtorch,
                "none in LIBTORCH, .cargo/libtorch.toml, LD_LIBRARY_PATH or the loader's cache",
            )
            .means("a program may still have a path to it built in")
            .remedy("name the program with --program, and see which one it loads"),
        ];
    };
    let place = format!("{} in {} ({})", build(first), first.folder.display(), first.found_by);
    let everywhere = if found.len() > 1 { ", the same on all hosts" } else { "" };
    vec![Finding::ok(Subject::Libtorch, format!("{place}{everywhere}"))]
}

fn of_host(host: &HostReport, facts: &Facts) -> Option<Finding> {
    if let Some(program) = facts.program.as_ref().filter(|it| it.state == ProgramState::Binary) {
        let missing: Vec<&str> =
            program.missing.iter().map(|it| it.what.as_str()).filter(|it| is_part(it)).collect();
        if !missing.is_empty() {
            return Some(
                Finding::fail(
                    Subject::Libtorch,
                    format!("{} does not find {}", program.asked.display(), missing.join(", ")),
                )
                .means("the program ends at once with exit code 127")
                .remedy("install libtorch where the program looks for it, name its folder, or launch with --sync")
                .command("export LD_LIBRARY_PATH=/path/to/libtorch/lib")
                .on(&host.name),
            );
        }
    }
    let libtorch = of(facts)?;
    let place = libtorch.folder.display();
    let (fit, words) = match libtorch.release() {
        Some(release) if release < OLDEST => (false, "older than"),
        Some(release) if release > NEWEST => (true, "newer than"),
        Some(_) => return None,
        None => {
            return Some(
                Finding::note(Subject::Libtorch, format!("the version of {place} is not known"))
                    .means("neither build-version nor version.py lies above it")
                    .remedy(format!("Brigade needs {} to {}", dotted(OLDEST), dotted(NEWEST)))
                    .on(&host.name),
            );
        }
    };
    let limit = if fit { NEWEST } else { OLDEST };
    let version = libtorch.version.as_deref().unwrap_or_default();
    let found = format!("{version} in {place} is {words} {}", dotted(limit));
    let finding = if fit {
        Finding::warning(Subject::Libtorch, found).means("Brigade was not tried with it")
    } else {
        Finding::fail(Subject::Libtorch, found)
            .means("Brigade's programs need functions that it lacks")
    };
    let wanted = format!("install one from {} to {}", dotted(OLDEST), dotted(NEWEST));
    Some(finding.remedy(wanted).command("brigade setup").on(&host.name))
}

/// Reports a project that cargo cannot build: its path of libtorch is wrong or missing.
fn of_project(host: &HostReport, facts: &Facts) -> Option<Finding> {
    // An existing program finds its own libtorch, and was built somewhere.
    let project = facts.project.as_ref().filter(|_| facts.program.is_none())?;
    let found = match (&project.file, &project.libtorch, &facts.libtorch) {
        (Some(file), Some(named), libtorch) => {
            let is_it = |it: &Libtorch| it.folder.parent() == Some(named.as_path());
            let is_overridden = |it: &Libtorch| it.found_by == "LIBTORCH";
            if libtorch.as_ref().is_some_and(|it| is_it(it) || is_overridden(it)) {
                return None;
            }
            format!("{} names {}, which has no libtorch", file.display(), named.display())
        }
        (_, _, None) if project.uses_brigade => {
            format!("{} uses Brigade, but cargo has no path of libtorch", project.root.display())
        }
        _ => return None,
    };
    Some(
        Finding::fail(Subject::Libtorch, found)
            .means("cargo cannot build the project")
            .remedy(
                "run this in the project: it finds libtorch, or fetches it once for all projects",
            )
            .command("brigade setup")
            .on(&host.name),
    )
}

/// Returns the program's libtorch, or else the one that programs without a run path find.
pub(super) fn of(facts: &Facts) -> Option<&Libtorch> {
    match &facts.program {
        Some(program) => program.libtorch.as_ref(),
        None => facts.libtorch.as_ref(),
    }
}

/// Returns `true` if a library is part of libtorch.
pub(super) fn is_part(name: &str) -> bool {
    ["libtorch", "libc10"].iter().any(|part| name.starts_with(part))
}

fn release(libtorch: &Libtorch) -> String {
    libtorch.release().map_or_else(|| "an unknown version".to_owned(), dotted)
}

fn build(libtorch: &Libtorch) -> String {
    let version = libtorch.version.as_deref().unwrap_or("an unknown version");
    // `2.13.0+cpu` already contains "cpu".
    let version = version.split('+').next().unwrap_or(version);
    match &libtorch.cuda {
        Some(cuda) => format!("{version} for CUDA {cuda}"),
        None => format!("{version} for CPUs"),
    }
}

fn dotted((major, minor): (u32, u32)) -> String {
    format!("{major}.{minor}")
}

const OLDEST: (u32, u32) = (2, 11);
const NEWEST: (u32, u32) = (2, 13);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{Missing, Project};
    use crate::finding::Verdict;
    use crate::fixtures;

    fn with(versions: &[(&str, Option<&str>)]) -> Vec<Finding> {
        let mut cluster = fixtures::cluster(versions.len());
        for (place, (version, cuda)) in versions.iter().enumerate() {
            let program = fixtures::program(Some(fixtures::libtorch(version, *cuda)));
            fixtures::facts(&mut cluster, place).program = Some(program);
        }
        check(&cluster)
    }

    #[test]
    fn versions_that_fit() {
        for version in ["2.11.0", "2.12.1+cu128", "2.13.0+cpu"] {
            fixtures::all_is_well(&with(&[(version, None), (version, None)]));
        }
        let text = with(&[("2.13.0+cu130", Some("13.0"))])[0].found.clone();
        assert_eq!(text, "2.13.0 for CUDA 13.0 in /opt/libtorch/lib (RUNPATH)");
    }

    #[test]
    fn versions_that_do_not() {
        let (verdict, _, found) = fixtures::only(&with(&[("2.10.1", None)]));
        assert_eq!(verdict, Verdict::Fail);
        assert_eq!(found, "2.10.1 in /opt/libtorch/lib is older than 2.11");
        let (verdict, _, found) = fixtures::only(&with(&[("2.14.0", None)]));
        assert_eq!(verdict, Verdict::Warning);
        assert!(found.ends_with("newer than 2.13"), "{found}");
        assert_eq!(fixtures::only(&with(&[("nightly", None)])).0, Verdict::Note);
    }

    #[test]
    fn versions_that_differ() {
        let (verdict, _, found) = fixtures::only(&with(&[("2.12.0", None), ("2.13.0", None)]));
        assert_eq!(
            (verdict, found.as_str()),
            (Verdict::Fail, "different versions: 2.12 on node1; 2.13 on node2")
        );
        let (verdict, _, found) =
            fixtures::only(&with(&[("2.13.0", None), ("2.13.0+cu130", Some("13.0"))]));
        assert_eq!(verdict, Verdict::Warning);
        assert!(found.contains("for CUDA 13.0 on node2"), "{found}");
    }

    #[test]
    fn none_at_all() {
        let mut cluster = fixtures::cluster(2);
        let program = fixtures::facts(&mut cluster, 1).program.as_mut().unwrap();
        program.libtorch = None;
        program.missing = vec![Missing {
            what: "libtorch_cpu.so".to_owned(),
            needed_by: "/srv/train".into(),
            in_library: None,
        }];
        let (verdict, hosts, found) = fixtures::only(&check(&cluster));
        assert_eq!((verdict, hosts.as_str()), (Verdict::Fail, "node2"));
        assert_eq!(found, "./train does not find libtorch_cpu.so");

        let mut cluster = fixtures::cluster(1);
        fixtures::facts(&mut cluster, 0).program = Some(fixtures::program(None));
        assert!(fixtures::only(&check(&cluster)).2.contains("not linked"));
        fixtures::facts(&mut cluster, 0).program = None;
        assert!(fixtures::only(&check(&cluster)).2.contains("none in LIBTORCH"));
    }

    #[test]
    fn projects() {
        let mut cluster = fixtures::cluster(1);
        let facts = fixtures::facts(&mut cluster, 0);
        facts.program = None;
        facts.project =
            Some(Project { root: "/app".into(), uses_brigade: true, ..Project::default() });
        let (verdict, _, found) = fixtures::only(&check(&cluster));
        assert_eq!(verdict, Verdict::Fail);
        assert_eq!(found, "/app uses Brigade, but cargo has no path of libtorch");

        let project = fixtures::facts(&mut cluster, 0).project.as_mut().unwrap();
        project.file = Some("/app/.cargo/libtorch.toml".into());
        project.libtorch = Some("/opt/libtorch".into());
        let (verdict, _, found) = fixtures::only(&check(&cluster));
        assert_eq!(verdict, Verdict::Fail);
        let expected = "/app/.cargo/libtorch.toml names /opt/libtorch, which has no libtorch";
        assert_eq!(found, expected);

        let mut libtorch = fixtures::libtorch("2.13.0", None);
        libtorch.found_by = ".cargo/libtorch.toml".to_owned();
        fixtures::facts(&mut cluster, 0).libtorch = Some(libtorch);
        fixtures::all_is_well(&check(&cluster));
        // A project that has nothing to do with it.
        fixtures::facts(&mut cluster, 0).libtorch = None;
        fixtures::facts(&mut cluster, 0).project = Some(Project::default());
        assert!(fixtures::only(&check(&cluster)).2.contains("none in LIBTORCH"));
    }
}
