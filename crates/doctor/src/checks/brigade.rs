//! Check that every host has the same build of the brigade program.

use super::{groups, who_has_what};
use crate::cluster::Cluster;
use crate::finding::{Finding, Subject};

pub(super) fn check(cluster: &Cluster) -> Vec<Finding> {
    let builds =
        cluster.examined().map(|(_, host, facts)| (host.name.as_str(), &facts.host.brigade));
    let versions = groups(builds.clone().map(|(host, build)| (host, build.version.as_str())));
    if versions.len() > 1 {
        return vec![
            Finding::warning(
                Subject::Brigade,
                format!("different versions: {}", who_has_what(&versions)),
            )
            .means("agents of different versions may refuse to work together")
            .remedy("install the same version on all hosts"),
        ];
    }
    let Some((version, _)) = versions.first() else { return Vec::new() };
    // Builds without a build ID cannot be compared.
    let stamps = builds.filter_map(|(host, build)| Some((host, build.build_id.as_deref()?)));
    let stamps = groups(stamps.map(|(host, stamp)| (host, stamp.get(..8).unwrap_or(stamp))));
    if stamps.len() > 1 {
        let found = format!("{version}, but different builds: {}", who_has_what(&stamps));
        return vec![Finding::note(Subject::Brigade, found)];
    }
    let place = if cluster.hosts.len() > 1 { ", the same build everywhere" } else { "" };
    vec![Finding::ok(Subject::Brigade, format!("{version}{place}"))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Verdict;
    use crate::fixtures;

    #[test]
    fn versions_and_builds() {
        let mut cluster = fixtures::cluster(3);
        fixtures::all_is_well(&check(&cluster));
        fixtures::facts(&mut cluster, 2).host.brigade.build_id = Some("bbbbbbbbbbbb".to_owned());
        let (verdict, _, found) = fixtures::only(&check(&cluster));
        assert_eq!(verdict, Verdict::Note);
        assert!(found.ends_with("aa on node1, node2; bbbbbbbb on node3"), "{found}");
        fixtures::facts(&mut cluster, 1).host.brigade.version = "0.2.0".to_owned();
        let (verdict, _, found) = fixtures::only(&check(&cluster));
        assert_eq!(verdict, Verdict::Warning);
        assert!(found.contains("0.2.0 on node2"), "{found}");
    }
}
