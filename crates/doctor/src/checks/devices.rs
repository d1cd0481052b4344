//! GPUs and their driver: taken by it, visible to programs, new enough, and alike on all hosts.

use super::{groups, libtorch, who_has_what};
use crate::cluster::{Cluster, HostReport};
use crate::facts::{Facts, Nvidia};
use crate::finding::{Finding, Subject, Verdict};
use crate::quantity::{counted, duration};

pub(super) fn check(cluster: &Cluster) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (_, host, facts) in cluster.examined() {
        findings.extend(of_host(facts).into_iter().map(|finding| finding.on(&host.name)));
        findings.extend(too_many_ranks(host, facts).map(|finding| finding.on(&host.name)));
    }
    let hosts = cluster.examined().map(|(_, host, facts)| (host.name.as_str(), &facts.nvidia));
    let kinds = groups(hosts.clone().map(|(host, nvidia)| (host, inventory(nvidia))));
    let drivers =
        groups(hosts.filter_map(|(host, nvidia)| Some((host, nvidia.driver.as_deref()?))));
    if kinds.len() > 1 {
        findings.push(
            Finding::warning(Subject::Devices, format!("hosts differ: {}", who_has_what(&kinds)))
                .means("the slowest sets the pace, and --nproc must fit the host with the fewest")
                .remedy("give each host its number of ranks, as in --hosts node1:8,node2:4"),
        );
    }
    if drivers.len() > 1 {
        findings.push(
            Finding::note(
                Subject::Devices,
                format!("different drivers: {}", who_has_what(&drivers)),
            )
            .means("NCCL may choose different ways between the GPUs"),
        );
    }
    if findings.is_empty()
        && let Some((inventory, _)) = kinds.first()
    {
        let driver = drivers.first().map(|(version, _)| format!(", driver {version}"));
        let everywhere = match (cluster.hosts.len(), drivers.is_empty()) {
            (0 | 1, _) => "",
            (_, true) => " on any host",
            (_, false) => " on each host",
        };
        let found = format!("{inventory}{everywhere}{}", driver.unwrap_or_default());
        findings.push(Finding::ok(Subject::Devices, found));
    }
    findings
}

fn of_host(facts: &Facts) -> Vec<Finding> {
    let nvidia = &facts.nvidia;
    let cuda = libtorch::of(facts).and_then(|it| it.cuda.as_deref());
    // Programs for the CPU do not miss a GPU.
    let bad = if cuda.is_some() { Verdict::Fail } else { Verdict::Warning };
    let finding = |found: String| Finding::new(bad, Subject::Devices, found);
    let mut findings = Vec::new();
    match &nvidia.driver {
        None if nvidia.on_bus > 0 => {
            let gpus = counted(nvidia.on_bus, "GPU is", "GPUs are");
            findings.push(
                finding(format!("{gpus} in the host, but NVIDIA's driver is not loaded"))
                    .means("programs see no GPU")
                    .remedy("load it; after an update of the kernel it must be built anew")
                    .command("sudo modprobe nvidia || sudo dkms autoinstall"),
            );
        }
        None => return findings,
        Some(driver) => {
            findings.extend(device_files(nvidia).map(|(found, means)| {
                finding(found)
                    .means(means)
                    .remedy("make them; in a container, give it the GPUs (docker run --gpus all)")
                    .command("sudo nvidia-modprobe -u -c 0")
            }));
            if !nvidia.library {
                findings.push(
                    finding("the driver's library libcuda.so.1 is not installed".to_owned())
                        .means("programs see no GPU, though the driver is loaded")
                        .remedy("install the driver's packages for programs; in a container, use NVIDIA's runtime"),
                );
            }
            if let Some((cuda, needed)) = cuda.and_then(|it| Some((it, needed_driver(it)?)))
                && numbers(driver) < numbers(needed)
            {
                findings.push(
                    finding(format!(
                        "driver {driver} is too old for CUDA {cuda}, which wants {needed}"
                    ))
                    .means("CUDA does not start")
                    .remedy("install a newer driver, or a libtorch for an older CUDA"),
                );
            }
            if cuda.is_none() && !nvidia.gpus.is_empty() && libtorch::of(facts).is_some() {
                findings.push(
                    Finding::note(
                        Subject::Devices,
                        format!("{}, but libtorch is one for CPUs", inventory(nvidia)),
                    )
                    .means("programs do not use the GPUs"),
                );
            }
        }
    }
    for gpu in nvidia.gpus.iter().filter(|gpu| gpu.excluded) {
        let found =
            format!("GPU {} ({}) is excluded by the driver's settings", gpu.number, gpu.model);
        findings.push(Finding::note(Subject::Devices, found));
    }
    findings.extend(faults(facts));
    findings
}

fn too_many_ranks(host: &HostReport, facts: &Facts) -> Option<Finding> {
    let gpus = facts.nvidia.gpus.len();
    let ranks = host.ranks.filter(|ranks| gpus > 0 && *ranks > gpus)?;
    libtorch::of(facts)?.cuda.as_ref()?;
    let gpus = counted(gpus, "GPU", "GPUs");
    Some(
        Finding::warning(Subject::Devices, format!("{ranks} ranks for {gpus}"))
            .means("NCCL refuses two ranks on one GPU")
            .remedy("start as many ranks as there are GPUs")
            .command(format!("brigade launch --hosts {}:{}", host.name, facts.nvidia.gpus.len())),
    )
}

/// What of the device files is missing, and what that does.
fn device_files(nvidia: &Nvidia) -> Option<(String, &'static str)> {
    let missing: Vec<String> = nvidia
        .gpus
        .iter()
        .filter(|gpu| !gpu.excluded && !nvidia.device_files.contains(&gpu.number))
        .map(|gpu| format!("/dev/nvidia{}", gpu.number))
        .chain((!nvidia.control_file).then(|| "/dev/nvidiactl".to_owned()))
        .chain((!nvidia.memory_file).then(|| "/dev/nvidia-uvm".to_owned()))
        .collect();
    (!missing.is_empty()).then(|| {
        let verb = if missing.len() == 1 { "is" } else { "are" };
        let found = format!("the driver is loaded, but {} {verb} missing", missing.join(", "));
        (found, "CUDA reports fewer GPUs, or none")
    })
}

/// What the driver has told the kernel about broken devices.
fn faults(facts: &Facts) -> Vec<Finding> {
    let Some(last) = facts.kernel_log.xids.last() else { return Vec::new() };
    let worst = facts
        .kernel_log
        .xids
        .iter()
        .rev()
        .find(|it| SERIOUS.iter().any(|(code, _)| *code == it.code));
    let shown = worst.unwrap_or(last);
    let found = format!(
        "Xid {} {} ago: {}",
        shown.code,
        duration(shown.seconds_ago as f64),
        shown.text.split("): ").nth(1).unwrap_or(&shown.text)
    );
    let known = SERIOUS.iter().find(|(code, _)| *code == shown.code);
    vec![match known {
        Some((_, means)) => Finding::warning(Subject::Devices, found)
            .means(*means)
            .remedy("reset the GPU or restart the host; if it comes back, have the device replaced")
            .command("nvidia-smi -q -d ECC,PAGE_RETIREMENT"),
        None => Finding::note(Subject::Devices, found)
            .means("mostly a program's own fault, such as an access outside of its memory"),
    }]
}

fn inventory(nvidia: &Nvidia) -> String {
    let models = groups(nvidia.gpus.iter().map(|gpu| ("", gpu.model.as_str())));
    if models.is_empty() {
        return "no NVIDIA GPU".to_owned();
    }
    let parts: Vec<String> =
        models.iter().map(|(model, gpus)| format!("{} x {model}", gpus.len())).collect();
    parts.join(" and ")
}

/// By CUDA's major version: within one, newer programs run with an older driver.
fn needed_driver(cuda: &str) -> Option<&'static str> {
    match cuda.split('.').next()?.parse().ok()? {
        11 => Some("450.80.02"),
        12 => Some("525.60.13"),
        13 => Some("580.65.06"),
        _ => None,
    }
}

fn numbers(version: &str) -> Vec<u32> {
    version.split('.').map_while(|part| part.parse().ok()).collect()
}

/// Faults of the device itself, by NVIDIA's list.
const SERIOUS: &[(u32, &str)] = &[
    (48, "its memory has an error that cannot be corrected"),
    (63, "a part of its memory was retired or remapped"),
    (64, "a part of its memory could not be retired"),
    (74, "its NVLink fails"),
    (79, "it has fallen off the bus: overheated, badly seated, or broken"),
    (92, "its memory has many errors"),
    (94, "its memory has an error, which ended a program"),
    (95, "its memory has an error, which may have spread"),
    (119, "its own processor does not answer"),
    (120, "its own processor has failed"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::XidMessage;
    use crate::fixtures;

    /// Two hosts, each with so many GPUs and a libtorch for CUDA.
    fn cluster(gpus: [u32; 2]) -> Cluster {
        let mut cluster = fixtures::cluster(2);
        for (place, gpus) in gpus.into_iter().enumerate() {
            let facts = fixtures::facts(&mut cluster, place);
            facts.program =
                Some(fixtures::program(Some(fixtures::libtorch("2.13.0", Some("13.0")))));
            facts.nvidia = fixtures::nvidia(gpus);
        }
        cluster
    }

    fn spoiled(spoil: impl FnOnce(&mut Facts)) -> Vec<Finding> {
        let mut cluster = cluster([2, 2]);
        spoil(fixtures::facts(&mut cluster, 1));
        check(&cluster)
    }

    #[test]
    fn healthy() {
        let findings = check(&cluster([2, 2]));
        fixtures::all_is_well(&findings);
        assert_eq!(findings[0].found, "2 x NVIDIA H100 80GB HBM3 on each host, driver 580.65.06");
        assert_eq!(check(&fixtures::cluster(1))[0].found, "no NVIDIA GPU");
    }

    #[test]
    fn driver_faults() {
        for (spoil, expected) in [
            (
                (|it| it.nvidia = Nvidia { on_bus: 2, ..Nvidia::default() }) as fn(&mut Facts),
                "2 GPUs are in the host, but NVIDIA's driver is not loaded",
            ),
            (|it| it.nvidia.device_files.truncate(1), "but /dev/nvidia1 is missing"),
            (|it| it.nvidia.memory_file = false, "but /dev/nvidia-uvm is missing"),
            (|it| it.nvidia.library = false, "libcuda.so.1"),
            (
                |it| it.nvidia.driver = Some("535.104.05".to_owned()),
                "driver 535.104.05 is too old for CUDA 13.0, which wants 580.65.06",
            ),
        ] {
            let findings = spoiled(spoil);
            let fails: Vec<&Finding> =
                findings.iter().filter(|it| it.verdict == Verdict::Fail).collect();
            assert_eq!(fails.len(), 1, "{findings:?}");
            assert!(fails[0].found.contains(expected), "{findings:?}");
            assert_eq!(fails[0].hosts, ["node2"]);
            assert!(!fails[0].remedy.is_empty());
        }
    }

    #[test]
    fn without_cuda_it_is_a_warning() {
        let mut cluster = fixtures::cluster(1);
        fixtures::facts(&mut cluster, 0).nvidia.on_bus = 1;
        assert_eq!(fixtures::only(&check(&cluster)).0, Verdict::Warning);
        fixtures::facts(&mut cluster, 0).nvidia = fixtures::nvidia(1);
        let (verdict, _, found) = fixtures::only(&check(&cluster));
        assert_eq!(verdict, Verdict::Note);
        assert!(found.contains("libtorch is one for CPUs"), "{found}");
    }

    #[test]
    fn hosts_that_differ() {
        let (verdict, _, found) = fixtures::only(&check(&cluster([4, 2])));
        assert_eq!(verdict, Verdict::Warning);
        assert!(found.contains("2 x NVIDIA H100 80GB HBM3 on node2"), "{found}");
        let findings = spoiled(|it| it.nvidia.driver = Some("590.1".to_owned()));
        assert_eq!(fixtures::only(&findings).0, Verdict::Note);
    }

    #[test]
    fn more_ranks_than_gpus() {
        let mut cluster = cluster([2, 2]);
        (cluster.hosts[0].ranks, cluster.hosts[1].ranks) = (Some(2), Some(4));
        let (verdict, hosts, found) = fixtures::only(&check(&cluster));
        assert_eq!((verdict, hosts.as_str()), (Verdict::Warning, "node2"));
        assert_eq!(found, "4 ranks for 2 GPUs");
        // For the CPU they may be as many as one likes.
        for place in 0..2 {
            let program = fixtures::program(Some(fixtures::libtorch("2.13.0", None)));
            fixtures::facts(&mut cluster, place).program = Some(program);
        }
        assert!(check(&cluster).iter().all(|it| it.verdict <= Verdict::Note));
    }

    #[test]
    fn broken_devices() {
        let xid = |code, text: &str| XidMessage { code, text: text.to_owned(), seconds_ago: 600 };
        let (verdict, _, found) = fixtures::only(&spoiled(|it| {
            it.kernel_log.xids = vec![
                xid(79, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."),
                xid(13, "NVRM: Xid (PCI:0000:3b:00): 13, Graphics Exception"),
            ];
        }));
        assert_eq!(verdict, Verdict::Warning);
        assert_eq!(found, "Xid 79 10 minutes ago: 79, GPU has fallen off the bus.");
        let (verdict, ..) = fixtures::only(&spoiled(|it| {
            it.kernel_log.xids = vec![xid(13, "NVRM: Xid (PCI:0000:3b:00): 13, ...")];
        }));
        assert_eq!(verdict, Verdict::Note);
        let (verdict, ..) = fixtures::only(&spoiled(|it| it.nvidia.gpus[0].excluded = true));
        assert_eq!(verdict, Verdict::Note);
    }
}
