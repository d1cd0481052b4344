//! Check of the variables of NCCL, PyTorch's NCCL backend and CUDA: unknown names, invalid values, deprecated names,
//! and settings that slow a job down or let it hang.

mod table;

use crate::facts::Facts;
use crate::finding::{Finding, Subject, Verdict};
use table::Values;

pub(super) fn check(facts: &Facts) -> Vec<Finding> {
    let mut findings = Vec::new();
    // Without a GPU they have no effect.
    let bad = if facts.devices.use_nccl() { Verdict::Warning } else { Verdict::Note };
    for (name, value) in &facts.variables {
        findings.extend(name_or_value(name, value, bad));
    }
    if !facts.devices.gpus.is_empty() {
        findings.extend(settings(facts));
    }
    findings
}

fn name_or_value(name: &str, value: &str, bad: Verdict) -> Option<Finding> {
    let is_nccls = PREFIXES.iter().any(|it| name.starts_with(it));
    if !is_nccls || value.is_empty() || table::OF_OTHERS.iter().any(|it| name.starts_with(it)) {
        return None;
    }
    if let Some(old) = table::OLD.iter().find(|it| it.name == name) {
        let found = format!("{name} is the old name of a setting ({})", old.since);
        return Some(match (old.is_removed, old.new) {
            (false, Some(new)) => Finding::new(bad, Subject::Variables, found)
                .means("it still counts, and may not in a later version")
                .remedy(format!("use {new}"))
                .command(format!("unset {name}")),
            (_, new) => {
                let found = format!("{name} has no effect since {}", old.since);
                let instead = new.map_or_else(|| "unset it".to_owned(), |new| format!("use {new}"));
                Finding::new(bad, Subject::Variables, found)
                    .remedy(instead)
                    .command(format!("unset {name}"))
            }
        });
    }
    let Some(values) = table::values_of(name) else {
        let found = format!("{name} is not a variable of NCCL 2.30 or PyTorch 2.13");
        let finding = match nearest(name) {
            Some(near) => Finding::new(bad, Subject::Variables, found)
                .remedy(format!("did you mean {near}?"))
                .command(renamed(name, near, value)),
            None => Finding::note(Subject::Variables, found),
        };
        return Some(finding.means("it has no effect, unless a plugin reads it"));
    };
    let expected = values.expected(value)?;
    let means = match values {
        Values::Switch => "PyTorch ends the program at the start",
        _ => "NCCL takes its default in place of it, or fails at the start",
    };
    Some(
        Finding::new(
            bad,
            Subject::Variables,
            format!("{name}={value} is not a value that it takes"),
        )
        .means(means)
        .remedy(format!("it takes {expected}"))
        .command(format!("unset {name}")),
    )
}

/// Returns the command that sets the other name, for a value that needs no quotes.
fn renamed(name: &str, near: &str, value: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "_.,:=^/-".contains(letter);
    if value.chars().all(is_plain) {
        format!("unset {name}; export {near}={value}")
    } else {
        format!("unset {name}")
    }
}

/// Returns the known name with the smallest edit distance, if that is small.
fn nearest(name: &str) -> Option<&'static str> {
    let distance = |known: &&str| strsim::damerau_levenshtein(name, known);
    let near = table::names().min_by_key(distance)?;
    (distance(&near) <= (name.len() / 6).max(2)).then_some(near)
}

/// Reports settings that are valid and have a cost.
fn settings(facts: &Facts) -> Vec<Finding> {
    let get =
        |name: &str| facts.variables.get(name).map(|it| it.trim()).filter(|it| !it.is_empty());
    let is_on =
        |name: &str| get(name).is_some_and(|it| !["0", "n", "no", "f", "false"].contains(&it));
    let is_off = |name: &str| get(name).is_some_and(|_| !is_on(name));
    let several = facts.devices.usable() > 1;
    let mut findings = Vec::new();
    let mut add = |applies: bool, verdict: Verdict, name: &str, means: &str, remedy: &str| {
        if let Some(value) = get(name).filter(|_| applies) {
            let finding = Finding::new(verdict, Subject::Variables, format!("{name}={value}"));
            findings.push(finding.means(means).remedy(remedy).command(format!("unset {name}")));
        }
    };
    let (warning, note) = (Verdict::Warning, Verdict::Note);
    add(
        is_on("CUDA_LAUNCH_BLOCKING"),
        warning,
        "CUDA_LAUNCH_BLOCKING",
        "the program waits for every kernel, so that computing and communication do not overlap",
        "unset it, unless you look for a kernel that fails",
    );
    add(
        is_on("NCCL_P2P_DISABLE") && several,
        warning,
        "NCCL_P2P_DISABLE",
        "GPUs of a host exchange data through its memory, not directly: several times slower with NVLink",
        "unset it, unless direct access hangs on this host",
    );
    add(
        is_on("NCCL_SHM_DISABLE") && several,
        warning,
        "NCCL_SHM_DISABLE",
        "GPUs of a host that cannot reach each other directly exchange data over the network",
        "unset it; if /dev/shm is too small, enlarge it",
    );
    add(
        is_on("NCCL_IB_DISABLE") && !facts.network.infiniband.is_empty(),
        warning,
        "NCCL_IB_DISABLE",
        "hosts exchange data over TCP, though this one has InfiniBand or RoCE that is active",
        "unset it",
    );
    add(
        get("NCCL_IB_TIMEOUT") == Some("0"),
        warning,
        "NCCL_IB_TIMEOUT",
        "a message over InfiniBand that is lost is waited for without end",
        "unset it; large networks may need 22",
    );
    add(
        get("NCCL_PROTO").is_some_and(|protocols| {
            !protocols.starts_with('^')
                && protocols.split(',').any(|word| word.trim().eq_ignore_ascii_case("LL128"))
        }),
        warning,
        "NCCL_PROTO",
        "LL128 is forced also where the hardware does not support it, which corrupts data",
        "leave the protocols to NCCL, or exclude some with ^",
    );
    add(
        is_off("TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        warning,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "a collective that fails or times out on another rank leaves this one waiting for ever",
        "unset it",
    );
    add(
        is_on("TORCH_NCCL_BLOCKING_WAIT"),
        note,
        "TORCH_NCCL_BLOCKING_WAIT",
        "the program waits for every collective, so that computing and communication do not overlap",
        "unset it, unless errors are to be caught where they happen",
    );
    add(
        is_on("TORCH_NCCL_DUMP_ON_TIMEOUT")
            && (is_off("TORCH_NCCL_ENABLE_MONITORING")
                || get("TORCH_NCCL_TRACE_BUFFER_SIZE") == Some("0")
                || get("TORCH_FR_BUFFER_SIZE") == Some("0")),
        warning,
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "nothing is written at a timeout: that takes monitoring and a buffer for the trace",
        "set TORCH_NCCL_ENABLE_MONITORING=1 and TORCH_NCCL_TRACE_BUFFER_SIZE=2000",
    );
    add(
        is_on("TORCH_NCCL_DESYNC_DEBUG") && is_off("TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        warning,
        "TORCH_NCCL_DESYNC_DEBUG",
        "it has no effect without the handling of errors",
        "unset TORCH_NCCL_ASYNC_ERROR_HANDLING",
    );
    add(
        get("NCCL_DEBUG").is_some_and(|level| {
            ["INFO", "TRACE"].iter().any(|word| level.eq_ignore_ascii_case(word))
        }),
        note,
        "NCCL_DEBUG",
        "every rank prints what NCCL does",
        "WARN prints errors only",
    );
    let number = |name: &str| get(name).and_then(|it| it.parse::<u32>().ok()).unwrap_or(1);
    let sockets = number("NCCL_SOCKET_NTHREADS").saturating_mul(number("NCCL_NSOCKS_PERTHREAD"));
    add(
        sockets > 64,
        warning,
        "NCCL_NSOCKS_PERTHREAD",
        "with NCCL_SOCKET_NTHREADS it makes more than 64 sockets for a connection, which NCCL does not take",
        "lower one of them: their product is at most 64",
    );
    findings
}

const PREFIXES: &[&str] = &["NCCL_", "TORCH_NCCL_", "TORCH_FR_"];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;

    fn with(gpus: u32, variables: &[(&str, &str)]) -> Vec<Finding> {
        let mut facts = fixtures::host("node1", "10.0.0.1");
        facts.devices = fixtures::devices(gpus);
        facts.variables = variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        check(&facts)
    }

    fn one(variables: &[(&str, &str)]) -> Finding {
        let mut findings = with(2, variables);
        assert_eq!(findings.len(), 1, "{findings:?}");
        findings.remove(0)
    }

    #[test]
    fn names() {
        for (name, near) in [
            ("NCCL_SOCKET_IFNAMES", "NCCL_SOCKET_IFNAME"),
            ("NCCL_SOCKET_IFANME", "NCCL_SOCKET_IFNAME"),
            ("NCCL_IB_HCAS", "NCCL_IB_HCA"),
            ("TORCH_NCCL_ASYNC_ERROR_HANDELING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ] {
            let finding = one(&[(name, "eth0")]);
            assert_eq!(finding.verdict, Verdict::Warning);
            assert_eq!(finding.remedy, format!("did you mean {near}?"));
        }
        assert_eq!(one(&[("NCCL_IB_HCAS", "a; reboot")]).command, "unset NCCL_IB_HCAS");
        let finding = one(&[("NCCL_ENTIRELY_MADE_UP_BY_NONE", "1")]);
        assert_eq!((finding.verdict, finding.remedy.as_str()), (Verdict::Note, ""));
        assert_eq!(with(0, &[("NCCL_IB_HCAS", "mlx5")])[0].verdict, Verdict::Note);
        let fine = [
            ("NCCL_VERSION", "2.27"),
            ("NCCL_SOCKET_IFNAME", "eth0"),
            ("TORCH_LOGS", "x"),
            ("NCCL_ALGO", "Ring"),
        ];
        assert_eq!(with(2, &fine), []);
    }

    #[test]
    fn old_names() {
        let finding = one(&[("NCCL_ASYNC_ERROR_HANDLING", "1")]);
        assert_eq!(finding.remedy, "use TORCH_NCCL_ASYNC_ERROR_HANDLING");
        let finding = one(&[("NCCL_TREE_THRESHOLD", "0")]);
        assert_eq!(finding.found, "NCCL_TREE_THRESHOLD has no effect since NCCL 2.5");
        for old in table::OLD {
            assert!(table::values_of(old.name).is_none(), "{}", old.name);
            assert!(old.new.is_none_or(|new| table::values_of(new).is_some()), "{}", old.name);
        }
    }

    #[test]
    fn values() {
        for (name, value, expected) in [
            ("NCCL_IB_DISABLE", "yes", "it takes 0 or 1"),
            ("NCCL_IB_RETRY_CNT", "8", "it takes a whole number from 0 to 7"),
            ("NCCL_DEBUG", "LOUD", "it takes VERSION, WARN, INFO, TRACE, ABORT"),
            ("NCCL_NTHREADS", "100", "it takes 64, 128, 256, 512"),
            ("NCCL_PROTO", "LL,Complex", "it takes a list of LL, LL128, Simple"),
            ("TORCH_NCCL_BLOCKING_WAIT", "2", "it takes 1 or 0"),
            ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "ten", "it takes a whole number from 1"),
        ] {
            let findings = with(1, &[(name, value)]);
            let found = findings.iter().find(|it| it.remedy == expected);
            assert!(found.is_some(), "{name}={value}: {findings:?}");
        }
        let fine = [
            ("NCCL_PROTO", "^LL128"),
            ("NCCL_P2P_LEVEL", "nvl"),
            ("NCCL_DEBUG", "warn"),
            ("NCCL_IB_GID_INDEX", "-1"),
            ("TORCH_NCCL_ENABLE_MONITORING", "True"),
        ];
        assert_eq!(with(2, &fine), []);
    }

    #[test]
    fn settings_with_a_price() {
        for variables in [
            &[("CUDA_LAUNCH_BLOCKING", "1")][..],
            &[("NCCL_P2P_DISABLE", "1")],
            &[("NCCL_SHM_DISABLE", "1")],
            &[("NCCL_PROTO", "LL128")],
            &[("NCCL_IB_TIMEOUT", "0")],
            &[("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")],
            &[("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"), ("TORCH_NCCL_TRACE_BUFFER_SIZE", "0")],
            &[("NCCL_SOCKET_NTHREADS", "16"), ("NCCL_NSOCKS_PERTHREAD", "8")],
        ] {
            let finding = one(variables);
            assert_eq!(finding.verdict, Verdict::Warning, "{variables:?}");
            assert!(!finding.means.is_empty() && !finding.remedy.is_empty());
            assert_eq!(with(0, variables), [], "they cost nothing without a GPU");
        }
        assert_eq!(one(&[("NCCL_DEBUG", "INFO")]).verdict, Verdict::Note);
        assert_eq!(with(1, &[("NCCL_P2P_DISABLE", "1"), ("CUDA_LAUNCH_BLOCKING", "0")]), []);
        // Only where there is something to lose.
        assert_eq!(with(2, &[("NCCL_IB_DISABLE", "1")]), []);
        let mut facts = fixtures::host("node1", "10.0.0.1");
        facts.devices = fixtures::devices(2);
        facts.network.infiniband.push("mlx5_0/1".to_owned());
        facts.variables.insert("NCCL_IB_DISABLE".to_owned(), "1".to_owned());
        assert!(check(&facts)[0].means.contains("InfiniBand"));
    }
}
