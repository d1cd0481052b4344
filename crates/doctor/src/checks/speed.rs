//! Check of round-trip times and bandwidths: routes that are slower than the others, or slow in general.

use crate::cluster::{Cluster, Measured, Route};
use crate::examine::ALL_PAIRS;
use crate::finding::{Finding, Subject};
use crate::quantity::{bandwidth, counted, duration};

pub(super) fn check(cluster: &Cluster) -> Vec<Finding> {
    let measured: Vec<(&Route, &Measured)> =
        cluster.routes.iter().filter_map(|it| Some((it, it.measured.as_ref()?))).collect();
    let whole: Vec<&Measured> =
        measured.iter().map(|it| it.1).filter(|it| it.bandwidth().is_some()).collect();
    let rate = median(whole.iter().filter_map(|it| it.bandwidth()));
    let trip = median(whole.iter().map(|it| it.round_trip));
    let mut findings = Vec::new();
    for (route, measured) in &measured {
        let judged = judge(measured, rate, trip);
        let (from, to) = (&cluster.hosts[route.from].name, &cluster.hosts[route.to].name);
        findings.extend(judged.into_iter().map(|finding| finding.on(from).towards(to)));
    }
    if findings.is_empty() && !whole.is_empty() {
        let mut found = format!(
            "round trips of {}, {}",
            span(whole.iter().map(|it| it.round_trip), duration),
            span(whole.iter().filter_map(|it| it.bandwidth()), bandwidth),
        );
        if cluster.hosts.len() > ALL_PAIRS {
            found.push_str(&format!(
                ", on {} of each host to its next",
                counted(whole.len(), "way", "ways")
            ));
        }
        findings.push(Finding::ok(Subject::Speed, found));
    }
    findings
}

fn judge(measured: &Measured, rate: f64, trip: f64) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some(error) = &measured.error {
        let found = format!("the measurement broke off: {error}");
        findings.push(
            Finding::warning(Subject::Speed, found)
                .remedy("run the doctor again, and look for what ends connections"),
        );
        return findings;
    }
    let again = measured.sent_again as f64 / (measured.segments.max(1)) as f64;
    if measured.sent_again >= LOSS_COUNT && again > LOSS_SHARE && !measured.stalled {
        findings.push(
            Finding::warning(
                Subject::Speed,
                format!("{:.0} % of the packets were lost and sent again", again * 100.0),
            )
            .means("each loss holds up all ranks")
            .remedy("look at cables, switches and the errors that the interface counts")
            .command("ip -s link"),
        );
    }
    if measured.round_trip > SLOW_TRIP
        || (measured.round_trip > trip * OUTLIER && measured.round_trip > NO_MATTER)
    {
        let than = if measured.round_trip > SLOW_TRIP {
            String::new()
        } else {
            format!(", between other hosts {}", duration(trip))
        };
        findings.push(
            Finding::warning(
                Subject::Speed,
                format!("a round trip takes {}{than}", duration(measured.round_trip)),
            )
            .means("every collective waits for several of them")
            .remedy("use hosts that are near each other, or fewer steps that communicate"),
        );
    }
    if let Some(own) = measured.bandwidth()
        && (own < SLOW_RATE || own < rate / OUTLIER)
    {
        let than = if own < rate / OUTLIER {
            format!(", between other hosts {}", bandwidth(rate))
        } else {
            String::new()
        };
        findings.push(
            Finding::warning(Subject::Speed, format!("{}{than}", bandwidth(own)))
                .means(format!(
                    "the gradients of a model with 100 million parameters take {} one way",
                    duration(GRADIENT_BITS / own)
                ))
                .remedy("check that the interface runs at its full speed, and what else uses it")
                .command("ethtool INTERFACE | grep Speed"),
        );
    }
    findings
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// Formats a range as `0.05 ms to 0.09 ms`, or one value if both ends read the same.
fn span(values: impl Iterator<Item = f64> + Clone, text: impl Fn(f64) -> String) -> String {
    let least = text(values.clone().fold(f64::INFINITY, f64::min));
    let most = text(values.fold(0.0, f64::max));
    if least == most { least } else { format!("{least} to {most}") }
}

/// Factor from the median above which a value is an outlier.
const OUTLIER: f64 = 5.0;
/// Round-trip time below which no route is reported, in seconds.
const NO_MATTER: f64 = 0.001;
/// Slow round-trip time in seconds: that of a distant city.
const SLOW_TRIP: f64 = 0.010;
/// Slow bandwidth in bits per second: a tenth of the cheapest network card's.
const SLOW_RATE: f64 = 100e6;
/// Size of the example gradient in bits: 100 million 32-bit numbers.
const GRADIENT_BITS: f64 = 3.2e9;
/// Share of lost segments that is reported. A transfer of a third of a second loses some while TCP finds its speed.
const LOSS_SHARE: f64 = 0.03;
const LOSS_COUNT: u64 = 5;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::Verdict;
    use crate::fixtures;

    fn spoiled(spoil: impl Fn(&mut Measured)) -> Vec<Finding> {
        let mut cluster = fixtures::cluster(3);
        spoil(cluster.routes[2].measured.as_mut().unwrap());
        check(&cluster)
    }

    #[test]
    fn fast_ways() {
        let findings = check(&fixtures::cluster(3));
        fixtures::all_is_well(&findings);
        assert_eq!(findings[0].found, "round trips of 0.08 ms, 8.9 Gbit/s");
        assert_eq!(check(&fixtures::cluster(1)), []);
    }

    #[test]
    fn slow_ways() {
        for (spoil, expected) in [
            (
                (|it| it.seconds *= 10.0) as fn(&mut Measured),
                "895 Mbit/s, between other hosts 8.9 Gbit/s",
            ),
            (|it| it.round_trip = 0.004, "a round trip takes 4.0 ms, between other hosts 0.08 ms"),
            (|it| it.round_trip = 0.05, "a round trip takes 50 ms"),
            (|it| it.sent_again = 2400, "10 % of the packets"),
            (|it| it.error = Some("reset".to_owned()), "broke off: reset"),
        ] {
            let findings = spoiled(spoil);
            let (verdict, hosts, found) = fixtures::only(&findings);
            assert_eq!((verdict, hosts.as_str()), (Verdict::Warning, "node2"));
            assert_eq!(findings[0].towards.as_deref(), Some("node1"));
            assert!(found.contains(expected), "{found}");
        }
    }

    #[test]
    fn slow_altogether() {
        let mut cluster = fixtures::cluster(2);
        for route in &mut cluster.routes {
            route.measured.as_mut().unwrap().seconds *= 1000.0;
        }
        let findings = check(&cluster);
        assert_eq!(findings.len(), 2);
        assert!(findings[0].means.contains("6 minutes"), "{findings:?}");
    }

    #[test]
    fn what_hardly_counts() {
        fixtures::all_is_well(&spoiled(|it| it.round_trip = 0.0009));
        fixtures::all_is_well(&spoiled(|it| it.sent_again = 40));
    }
}
