//! Check of processors: quotas that slow threads down, and hosts under load.

use crate::cluster::Cluster;
use crate::facts::{Cpu, Facts, Vectors};
use crate::finding::{Finding, Subject};
use crate::quantity::counted;

pub(super) fn check(cluster: &Cluster) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut cores = Vec::new();
    for (_, host, facts) in cluster.examined() {
        let own = of_host(&facts.cpu).into_iter().chain(products(facts));
        findings.extend(own.map(|it| it.on(&host.name)));
        let nodes = match facts.cpu.numa_nodes {
            0 | 1 => String::new(),
            nodes => format!(" in {nodes} NUMA nodes"),
        };
        cores.push((
            host.name.as_str(),
            format!("{}{nodes}", counted(facts.cpu.usable, "core", "cores")),
        ));
    }
    let vectors =
        cluster.examined().map(|(_, host, facts)| (host.name.as_str(), facts.cpu.vectors));
    let vectors = super::groups(vectors.filter(|(_, it)| *it != Vectors::Unknown));
    if vectors.len() > 1 {
        let words: Vec<_> = vectors.iter().map(|(it, hosts)| (it.word(), hosts.clone())).collect();
        findings.push(
            Finding::note(
                Subject::Cpu,
                format!("different instructions: {}", super::who_has_what(&words)),
            )
            .means(
                "a run that is resumed on another kind of processor may differ in the last digits",
            ),
        );
    }
    if findings.is_empty() && !cores.is_empty() {
        let groups = super::groups(cores);
        let found = match &groups[..] {
            [(same, hosts)] if hosts.len() > 1 => format!("{same} on each host"),
            [(same, _)] => same.clone(),
            _ => super::who_has_what(&groups),
        };
        findings.push(Finding::ok(Subject::Cpu, found));
    }
    findings
}

fn of_host(cpu: &Cpu) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some(quota) = cpu.quota.filter(|quota| *quota < cpu.usable as f64) {
        findings.push(
            Finding::warning(
                Subject::Cpu,
                format!("its control group may use {quota:.1} of {} cores", cpu.usable),
            )
            .means("programs start a thread for each core, and all are halted when the quota is used up")
            .remedy("raise the quota (docker --cpus, a pod's limits), or use fewer threads")
            .command(format!("brigade launch --threads-per-rank {}", (quota as usize).max(1))),
        );
    }
    if cpu.usable < cpu.online {
        findings.push(
            Finding::note(
                Subject::Cpu,
                format!("{} of {} cores may be used", cpu.usable, cpu.online),
            )
            .means("a batch system or taskset limits them"),
        );
    }
    if cpu.load > cpu.online as f64 * BUSY && cpu.online > 0 {
        findings.push(
            Finding::warning(
                Subject::Cpu,
                format!(
                    "{:.0} processes are ready to run on its {}",
                    cpu.load,
                    counted(cpu.online, "core", "cores")
                ),
            )
            .means("a rank that gets no core holds up all others")
            .remedy("see which processes use it")
            .command("top -b -n 1 | head -20"),
        );
    }
    findings
}

/// Reports whether MKL's matrix products depend on the alignment of their inputs in memory.
fn products(facts: &Facts) -> Option<Finding> {
    let finding = |found| {
        Finding::warning(Subject::Cpu, found)
            .means("a run that is resumed may differ in the last digits of matrix products")
    };
    if facts.cpu.vectors == Vectors::Older {
        let found = "this processor has no AVX2, which MKL's reproducible products need";
        return Some(finding(found.to_owned()).remedy("resume runs on processors with AVX2"));
    }
    let mode = facts.variables.get("MKL_CBWR")?;
    let strict = mode.to_ascii_uppercase().ends_with(",STRICT");
    if strict || mode.eq_ignore_ascii_case("COMPATIBLE") {
        return None;
    }
    let found = format!("MKL_CBWR={mode}: products depend on where matrices lie in memory");
    Some(
        finding(found)
            .remedy("unset it: then Brigade's programs choose AUTO,STRICT, which is as fast")
            .command("unset MKL_CBWR"),
    )
}

/// Processes per core, averaged over a minute, above which a host is busy.
const BUSY: f64 = 1.5;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Verdict;
    use crate::fixtures;

    #[test]
    fn processors() {
        fixtures::all_is_well(&check(&fixtures::cluster(2)));
        for (spoil, verdict, expected) in [
            (
                (|it| it.quota = Some(2.0)) as fn(&mut Cpu),
                Verdict::Warning,
                "may use 2.0 of 8 cores",
            ),
            (|it| it.usable = 4, Verdict::Note, "4 of 8"),
            (|it| it.load = 40.0, Verdict::Warning, "40 processes"),
        ] {
            let mut cluster = fixtures::cluster(2);
            spoil(&mut fixtures::facts(&mut cluster, 1).cpu);
            let (found_verdict, hosts, found) = fixtures::only(&check(&cluster));
            assert_eq!((found_verdict, hosts.as_str()), (verdict, "node2"));
            assert!(found.contains(expected), "{found}");
        }
        for (mode, expected) in
            [("AVX2", Some("MKL_CBWR=AVX2")), ("AVX2,STRICT", None), ("compatible", None)]
        {
            let mut cluster = fixtures::cluster(1);
            let facts = fixtures::facts(&mut cluster, 0);
            facts.variables.insert("MKL_CBWR".into(), mode.into());
            match expected {
                Some(expected) => {
                    let (verdict, _, found) = fixtures::only(&check(&cluster));
                    assert_eq!(verdict, Verdict::Warning);
                    assert!(found.starts_with(expected), "{found}");
                }
                None => fixtures::all_is_well(&check(&cluster)),
            }
        }
        let mut cluster = fixtures::cluster(2);
        fixtures::facts(&mut cluster, 0).cpu.vectors = Vectors::Amx;
        fixtures::facts(&mut cluster, 1).cpu.vectors = Vectors::Avx2;
        let (verdict, _, found) = fixtures::only(&check(&cluster));
        assert_eq!(verdict, Verdict::Note);
        assert!(found.contains("AMX") && found.contains("AVX2"), "{found}");
        fixtures::facts(&mut cluster, 0).cpu.vectors = Vectors::Older;
        let found = check(&cluster);
        assert!(found.iter().any(|it| it.found.contains("no AVX2, which")), "{found:?}");
        let mut cluster = fixtures::cluster(1);
        fixtures::facts(&mut cluster, 0).cpu.quota = Some(16.0);
        fixtures::all_is_well(&check(&cluster));
    }
}
