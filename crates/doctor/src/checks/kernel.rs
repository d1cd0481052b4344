//! Check of the kernel's version: some versions are known to hang.

use super::{groups, who_has_what};
use crate::cluster::Cluster;
use crate::finding::{Finding, Subject};

pub(super) fn check(cluster: &Cluster) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (_, host, facts) in cluster.examined() {
        let kernel = &facts.host.kernel;
        if release(kernel).is_some_and(|it| it < OLDEST) {
            findings.push(
                Finding::warning(Subject::Kernel, format!("Linux {kernel} is older than 5.5"))
                    .means("processes are known to hang in collectives under such a kernel")
                    .remedy("install a newer kernel")
                    .on(&host.name),
            );
        }
    }
    if !findings.is_empty() {
        return findings;
    }
    let systems = cluster.examined().map(|(_, host, facts)| {
        (host.name.as_str(), format!("Linux {}, {}", facts.host.kernel, facts.host.system))
    });
    let systems = groups(systems);
    match &systems[..] {
        [] => {}
        [(same, _)] => findings.push(Finding::ok(Subject::Kernel, same.clone())),
        _ => findings.push(Finding::note(
            Subject::Kernel,
            format!("different systems: {}", who_has_what(&systems)),
        )),
    }
    findings
}

fn release(kernel: &str) -> Option<(u32, u32)> {
    let mut numbers = kernel.split(['.', '-']);
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

const OLDEST: (u32, u32) = (5, 5);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Verdict;
    use crate::fixtures;

    #[test]
    fn kernels() {
        fixtures::all_is_well(&check(&fixtures::cluster(2)));
        let mut cluster = fixtures::cluster(2);
        fixtures::facts(&mut cluster, 1).host.kernel = "6.8.0-40-generic".to_owned();
        assert_eq!(fixtures::only(&check(&cluster)).0, Verdict::Note);
        fixtures::facts(&mut cluster, 1).host.kernel = "5.4.0-150-generic".to_owned();
        let (verdict, hosts, _) = fixtures::only(&check(&cluster));
        assert_eq!((verdict, hosts.as_str()), (Verdict::Warning, "node2"));
        fixtures::facts(&mut cluster, 1).host.kernel = "strange".to_owned();
        assert_eq!(fixtures::only(&check(&cluster)).0, Verdict::Note);
    }
}
