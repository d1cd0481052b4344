//! Check of clock offsets: logs of several hosts are compared by time, and files by their dates.

use crate::cluster::{ClockReading, Cluster};
use crate::finding::{Finding, Subject};
use crate::quantity::duration;

pub(super) fn check(cluster: &Cluster) -> Vec<Finding> {
    let readings: Vec<(&str, ClockReading)> =
        cluster.hosts.iter().filter_map(|host| Some((host.name.as_str(), host.clock?))).collect();
    if readings.len() < 2 {
        return Vec::new();
    }
    let (reference, zero) = reference(&readings);
    let mut findings = Vec::new();
    let mut widest: f64 = 0.0;
    for (name, clock) in &readings {
        let off = clock.ahead_seconds - zero.ahead_seconds;
        let doubt = clock.error_seconds + zero.error_seconds;
        widest = widest.max(off.abs());
        // A difference within the error of the reading does not count.
        let sure = off.abs() - doubt;
        if sure <= WARN_SECONDS {
            continue;
        }
        let side = if off > 0.0 { "ahead of" } else { "behind" };
        let found = format!("its clock is {} {side} that of {reference}", duration(off.abs()));
        let finding = if sure > FAIL_SECONDS {
            Finding::fail(Subject::Clock, found)
                .means("certificates, leases and the dates of shared files go wrong")
        } else {
            Finding::warning(Subject::Clock, found)
                .means("times in the logs of different hosts cannot be compared")
        };
        findings.push(
            finding
                .remedy("let it follow a time server")
                .command("sudo timedatectl set-ntp true")
                .on(name),
        );
    }
    if findings.is_empty() {
        let doubt = readings.iter().map(|(_, it)| it.error_seconds).fold(0.0, f64::max);
        findings.push(Finding::ok(
            Subject::Clock,
            format!("within {} of each other", duration(widest + 2.0 * doubt)),
        ));
    }
    findings
}

/// Returns the reference clock: the median one if there are three or more.
fn reference<'a>(readings: &[(&'a str, ClockReading)]) -> (&'a str, ClockReading) {
    if readings.len() < 3 {
        return readings[0];
    }
    let mut sorted = readings.to_vec();
    sorted.sort_by(|a, b| a.1.ahead_seconds.total_cmp(&b.1.ahead_seconds));
    let middle = sorted[sorted.len() / 2];
    // The first host is preferred if it agrees with the median: users start jobs there.
    let near = (readings[0].1.ahead_seconds - middle.1.ahead_seconds).abs() <= WARN_SECONDS / 2.0;
    if near { readings[0] } else { middle }
}

const WARN_SECONDS: f64 = 0.5;
const FAIL_SECONDS: f64 = 30.0;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Verdict;
    use crate::fixtures;

    fn with(clocks: &[(f64, f64)]) -> Vec<Finding> {
        let mut cluster = fixtures::cluster(clocks.len());
        for (host, (ahead_seconds, error_seconds)) in cluster.hosts.iter_mut().zip(clocks) {
            let (ahead_seconds, error_seconds) = (*ahead_seconds, *error_seconds);
            host.clock = Some(ClockReading { ahead_seconds, error_seconds });
        }
        check(&cluster)
    }

    #[test]
    fn clocks_that_differ() {
        fixtures::all_is_well(&with(&[(0.0, 0.001), (0.4, 0.001)]));
        let (verdict, hosts, found) = fixtures::only(&with(&[(0.0, 0.001), (-2.0, 0.001)]));
        assert_eq!((verdict, hosts.as_str()), (Verdict::Warning, "node2"));
        assert_eq!(found, "its clock is 2.0 s behind that of node1");
        let (verdict, ..) = fixtures::only(&with(&[(0.0, 0.001), (3600.0, 0.001)]));
        assert_eq!(verdict, Verdict::Fail);
    }

    #[test]
    fn of_three_the_odd_one_is_wrong() {
        // This host's clock, too, may be the wrong one.
        let (_, hosts, found) = fixtures::only(&with(&[(0.0, 0.001), (9.0, 0.001), (9.1, 0.001)]));
        assert_eq!(hosts, "node1");
        assert!(found.contains("behind that of node2"), "{found}");
        let (_, hosts, _) = fixtures::only(&with(&[(0.0, 0.001), (0.0, 0.001), (9.0, 0.001)]));
        assert_eq!(hosts, "node3");
    }

    #[test]
    fn a_slow_line_is_no_wrong_clock() {
        fixtures::all_is_well(&with(&[(0.0, 0.0), (1.2, 0.9)]));
    }
}
