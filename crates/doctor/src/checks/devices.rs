//! Check of GPUs and their driver: in use by the driver, visible to programs, new enough, and the same on all hosts.

use super::{groups, libtorch, who_has_what};
use crate::cluster::{Cluster, HostReport};
use crate::facts::{Devices, Facts};
use crate::finding::{Finding, Subject, Verdict};
use crate::quantity::{bytes, counted, duration};

pub(super) fn check(cluster: &Cluster) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (_, host, facts) in cluster.examined() {
        findings.extend(of_host(facts).into_iter().map(|finding| finding.on(&host.name)));
        findings.extend(too_many_ranks(host, facts).map(|finding| finding.on(&host.name)));
    }
    let hosts = cluster.examined().map(|(_, host, facts)| (host.name.as_str(), &facts.devices));
    let kinds = groups(hosts.clone().map(|(host, devices)| (host, inventory(devices))));
    let drivers =
        groups(hosts.filter_map(|(host, it)| Some((host, it.driver.version.as_deref()?))));
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
        let mut sizes = cluster.examined().map(|it| it.2.devices.memory_of_each());
        let size = sizes.next().flatten().filter(|size| sizes.all(|it| it == Some(*size)));
        let size = size.map(|it| format!(" ({} each)", bytes(it))).unwrap_or_default();
        let driver = driver.unwrap_or_default();
        let found = format!("{inventory}{size}{everywhere}{driver}");
        findings.push(Finding::ok(Subject::Devices, found));
    }
    findings
}

fn of_host(facts: &Facts) -> Vec<Finding> {
    let devices = &facts.devices;
    let (kind, driver) = (devices.kind(), &devices.driver);
    let (words, word) = (kind.driver_words(), kind.device_word());
    let cuda = libtorch::of(facts).and_then(|it| it.cuda.as_deref());
    // CPU programs need no GPU.
    let bad = if cuda.is_some() { Verdict::Fail } else { Verdict::Warning };
    let finding = |found: String| Finding::new(bad, Subject::Devices, found);
    let mut findings = Vec::new();
    match &driver.version {
        None if driver.on_bus > 0 => {
            let gpus = counted(driver.on_bus, &format!("{word} is"), &format!("{word}s are"));
            findings.push(
                finding(format!("{gpus} in the host, but {} is not loaded", words.driver))
                    .means(format!("programs see no {word}"))
                    .remedy("load it; after an update of the kernel it must be rebuilt")
                    .command(words.load),
            );
        }
        None => return findings,
        Some(version) => {
            if !driver.missing_files.is_empty() {
                let verb = if driver.missing_files.len() == 1 { "is" } else { "are" };
                let missing = driver.missing_files.join(", ");
                findings.push(
                    finding(format!("the driver is loaded, but {missing} {verb} missing"))
                        .means(format!("programs see fewer {word}s, or none"))
                        .remedy(words.make_files)
                        .command(words.make_files_command),
                );
            }
            if let Some(library) = words.library.filter(|_| !devices.library) {
                findings.push(
                    finding(format!("the driver's library {library} is not installed"))
                        .means("programs see no GPU, though the driver is loaded")
                        .remedy("install the driver's packages for programs; in a container, use the runtime of the driver's maker"),
                );
            }
            if let Some((cuda, needed)) = cuda.and_then(|it| Some((it, kind.oldest_driver(it)?)))
                && numbers(version) < numbers(needed)
            {
                findings.push(
                    finding(format!(
                        "driver {version} is too old for CUDA {cuda}, which needs {needed}"
                    ))
                    .means("CUDA does not start")
                    .remedy("install a newer driver, or a libtorch for an older CUDA"),
                );
            }
            if kind.is_for_one_process() {
                findings.extend(without_torch_tpu(devices));
            } else if cuda.is_none() && !devices.gpus.is_empty() && libtorch::of(facts).is_some() {
                findings.push(
                    Finding::note(
                        Subject::Devices,
                        format!("{}, but libtorch is one for CPUs", inventory(devices)),
                    )
                    .means("programs do not use the GPUs"),
                );
            }
        }
    }
    for gpu in devices.gpus.iter().filter(|gpu| gpu.device.is_excluded) {
        let place = gpu.device.pci.as_deref().unwrap_or("an unknown place");
        let found =
            format!("the GPU at {place} ({}) is excluded by the driver's settings", gpu.model());
        findings.push(Finding::note(Subject::Devices, found));
    }
    findings.extend(faults(facts));
    findings
}

/// Reports TPUs for which the files of programs with the feature `tpu` are missing.
fn without_torch_tpu(devices: &Devices) -> Option<Finding> {
    if devices.torch_tpu.is_some() || devices.usable() == 0 {
        return None;
    }
    let found = format!("{}, but TorchTPU is not installed", inventory(devices));
    Some(
        Finding::note(Subject::Devices, found)
            .means("Brigade's programs do not use the TPUs")
            .remedy("fetch it for programs that are built with the feature tpu")
            .command("brigade setup --tpu"),
    )
}

fn too_many_ranks(host: &HostReport, facts: &Facts) -> Option<Finding> {
    let gpus = facts.devices.gpus.len();
    let ranks = host.ranks.filter(|ranks| gpus > 0 && *ranks > gpus)?;
    let kind = facts.devices.kind();
    let word = kind.device_word();
    let means = if kind.is_for_one_process() {
        "only one process can use a TPU"
    } else {
        libtorch::of(facts)?.cuda.as_ref()?;
        "NCCL refuses two ranks on one GPU"
    };
    let found = format!("{ranks} ranks for {}", counted(gpus, word, &format!("{word}s")));
    Some(
        Finding::warning(Subject::Devices, found)
            .means(means)
            .remedy(format!("start as many ranks as there are {word}s"))
            .command(format!("brigade launch --hosts {}:{gpus}", host.name)),
    )
}

/// Returns the last serious device fault in the kernel's log, or else the last fault.
fn faults(facts: &Facts) -> Option<Finding> {
    let messages = facts.kernel_log.faults.iter().rev();
    let mut found =
        messages.filter_map(|it| Some((it, brigade_hardware::fault_in(&it.text)?))).peekable();
    let last = found.peek().cloned();
    let (message, fault) = found.find(|(_, fault)| fault.is_serious).or(last)?;
    let name = match fault.code {
        Some(code) => format!("{} {code}", fault.source),
        None => fault.source.to_owned(),
    };
    let ago = duration(message.seconds_ago as f64);
    let place = fault.pci.as_deref().map(|it| format!(" at PCI {it}")).unwrap_or_default();
    let found = format!("{name}{place} {ago} ago: {}", fault.means);
    Some(if fault.is_serious {
        let inspect = facts.devices.kind().driver_words().inspect;
        Finding::warning(Subject::Devices, found)
            .means("jobs on that device fail, or will")
            .remedy(fault.remedy)
            .command(inspect)
    } else {
        Finding::note(Subject::Devices, found).means(fault.remedy)
    })
}

fn inventory(devices: &Devices) -> String {
    let models = groups(devices.gpus.iter().map(|gpu| ("", gpu.model())));
    if models.is_empty() {
        return "no GPU".to_owned();
    }
    let parts: Vec<String> =
        models.iter().map(|(model, gpus)| format!("{} x {model}", gpus.len())).collect();
    parts.join(" and ")
}

fn numbers(version: &str) -> Vec<u32> {
    version.split('.').map_while(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use brigade_hardware::Driver;

    use crate::facts::DeviceMessage;
    use crate::fixtures;

    /// Returns two hosts, each with this many GPUs and a libtorch for CUDA.
    fn cluster(gpus: [u32; 2]) -> Cluster {
        let mut cluster = fixtures::cluster(2);
        for (place, gpus) in gpus.into_iter().enumerate() {
            let facts = fixtures::facts(&mut cluster, place);
            facts.program =
                Some(fixtures::program(Some(fixtures::libtorch("2.13.0", Some("13.0")))));
            facts.devices = fixtures::devices(gpus);
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
        assert_eq!(check(&fixtures::cluster(1))[0].found, "no GPU");
        let mut sized = cluster([2, 2]);
        for (place, whole) in [(0, false), (1, true)] {
            for gpu in &mut fixtures::facts(&mut sized, place).devices.gpus {
                gpu.device.memory_bytes = Some(80 << 30);
            }
            let found = check(&sized)[0].found.clone();
            assert_eq!(found.contains("HBM3 (80 GiB each) on each host"), whole, "{found}");
        }
    }

    #[test]
    fn driver_faults() {
        for (spoil, expected) in [
            (
                (|facts| {
                    let driver = Driver { on_bus: 2, ..Driver::default() };
                    facts.devices = Devices { driver, ..Devices::default() };
                }) as fn(&mut Facts),
                "2 GPUs are in the host, but NVIDIA's driver is not loaded",
            ),
            (
                |it| it.devices.driver.missing_files = vec!["/dev/nvidia1".to_owned()],
                "but /dev/nvidia1 is missing",
            ),
            (|it| it.devices.library = false, "libcuda.so.1"),
            (
                |it| it.devices.driver.version = Some("535.104.05".to_owned()),
                "driver 535.104.05 is too old for CUDA 13.0, which needs 580.65.06",
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
    fn tpus_need_torch_tpu() {
        let mut cluster = fixtures::cluster(1);
        let devices = &mut fixtures::facts(&mut cluster, 0).devices;
        *devices = fixtures::devices(4);
        devices.kind = "Google".to_owned();
        devices.driver.version = Some("vfio-pci".to_owned());
        for gpu in &mut devices.gpus {
            gpu.device.model = Some("TPU v5e".to_owned());
        }
        let (verdict, _, found) = fixtures::only(&check(&cluster));
        assert_eq!(
            (verdict, found.as_str()),
            (Verdict::Note, "4 x TPU v5e, but TorchTPU is not installed")
        );
        fixtures::facts(&mut cluster, 0).devices.torch_tpu = Some("0.2.0".to_owned());
        assert_eq!(check(&cluster)[0].found, "4 x TPU v5e, driver vfio-pci");
        cluster.hosts[0].ranks = Some(8);
        let (verdict, _, found) = fixtures::only(&check(&cluster));
        assert_eq!((verdict, found.as_str()), (Verdict::Warning, "8 ranks for 4 TPUs"));
    }

    #[test]
    fn without_cuda_it_is_a_warning() {
        let mut cluster = fixtures::cluster(1);
        fixtures::facts(&mut cluster, 0).devices.driver.on_bus = 1;
        assert_eq!(fixtures::only(&check(&cluster)).0, Verdict::Warning);
        fixtures::facts(&mut cluster, 0).devices = fixtures::devices(1);
        let (verdict, _, found) = fixtures::only(&check(&cluster));
        assert_eq!(verdict, Verdict::Note);
        assert!(found.contains("libtorch is one for CPUs"), "{found}");
    }

    #[test]
    fn hosts_that_differ() {
        let (verdict, _, found) = fixtures::only(&check(&cluster([4, 2])));
        assert_eq!(verdict, Verdict::Warning);
        assert!(found.contains("2 x NVIDIA H100 80GB HBM3 on node2"), "{found}");
        let findings = spoiled(|it| it.devices.driver.version = Some("590.1".to_owned()));
        assert_eq!(fixtures::only(&findings).0, Verdict::Note);
    }

    #[test]
    fn more_ranks_than_gpus() {
        let mut cluster = cluster([2, 2]);
        (cluster.hosts[0].ranks, cluster.hosts[1].ranks) = (Some(2), Some(4));
        let (verdict, hosts, found) = fixtures::only(&check(&cluster));
        assert_eq!((verdict, hosts.as_str()), (Verdict::Warning, "node2"));
        assert_eq!(found, "4 ranks for 2 GPUs");
        // For the CPU any number is valid.
        for place in 0..2 {
            let program = fixtures::program(Some(fixtures::libtorch("2.13.0", None)));
            fixtures::facts(&mut cluster, place).program = Some(program);
        }
        assert!(check(&cluster).iter().all(|it| it.verdict <= Verdict::Note));
    }

    #[test]
    fn broken_devices() {
        let xid = |text: &str| DeviceMessage { text: text.to_owned(), seconds_ago: 600 };
        let findings = spoiled(|facts| {
            facts.kernel_log.faults = vec![
                xid("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."),
                xid("NVRM: Xid (PCI:0000:3b:00): 13, Graphics Exception"),
            ];
        });
        let (verdict, _, found) = fixtures::only(&findings);
        assert_eq!(verdict, Verdict::Warning);
        let start = "Xid 79 at PCI 0000:3b:00 10 minutes ago: the GPU has fallen off the bus";
        assert!(found.starts_with(start), "{found}");
        let (verdict, ..) = fixtures::only(&spoiled(|facts| {
            facts.kernel_log.faults = vec![xid("NVRM: Xid (PCI:0000:3b:00): 13, ...")];
        }));
        assert_eq!(verdict, Verdict::Note);
        let (verdict, ..) =
            fixtures::only(&spoiled(|it| it.devices.gpus[0].device.is_excluded = true));
        assert_eq!(verdict, Verdict::Note);
    }
}
