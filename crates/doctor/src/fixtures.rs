//! Facts of healthy hosts, which tests then modify.

use std::net::IpAddr;

use brigade_hardware::{Device, Driver, Memory};

use crate::cluster::{
    AddressSource, Attempt, ClockReading, Cluster, HostReport, Measured, Outcome, Route,
};
use crate::facts::{
    Build, Cpu, Devices, FACTS_VERSION, Facts, Folder, FolderState, FolderUse, Gpu, Host,
    Interface, InterfaceAddress, KernelLog, Libtorch, Limit, Limits, Network, Program,
    ProgramState, Question, Resolution, Space,
};
use crate::finding::{Finding, Verdict};

pub(crate) fn interface(name: &str, address: &str) -> Interface {
    Interface {
        name: name.to_owned(),
        up: true,
        running: true,
        loopback: name == "lo",
        mtu: Some(if name == "lo" { 65536 } else { 1500 }),
        addresses: vec![InterfaceAddress {
            address: address.parse().unwrap(),
            prefix: if name == "lo" { 8 } else { 24 },
        }],
    }
}

pub(crate) fn host(name: &str, address: &str) -> Facts {
    let parsed: IpAddr = address.parse().unwrap();
    let limit = Some(Limit { soft: Some(1 << 20), hard: Some(1 << 20) });
    let folder = |used_for, path: &str, total: u64| Folder {
        used_for,
        path: path.into(),
        state: FolderState::Present(Space {
            looked_at: path.into(),
            kind: "ext4".to_owned(),
            source: "/dev/sda".to_owned(),
            total_bytes: total,
            free_bytes: total / 2,
            inodes: 1 << 20,
            free_inodes: 1 << 19,
            read_only: false,
            writable: true,
        }),
    };
    Facts {
        version: FACTS_VERSION,
        host: Host {
            name: name.to_owned(),
            kernel: "6.1.0-18-amd64".to_owned(),
            system: "Debian GNU/Linux 12 (bookworm)".to_owned(),
            machine: "x86_64".to_owned(),
            brigade: Build {
                version: "0.1.0".to_owned(),
                path: "/usr/bin/brigade".into(),
                build_id: Some("aa".to_owned()),
            },
        },
        cpu: Cpu { model: "CPU".to_owned(), online: 8, usable: 8, numa_nodes: 1, ..Cpu::default() },
        memory: Memory { total_bytes: 64 << 30, available_bytes: 60 << 30, ..Memory::default() },
        limits: Limits {
            open_files: limit,
            locked_bytes: Some(Limit { soft: None, hard: None }),
            processes: limit,
        },
        folders: vec![
            folder(FolderUse::Working, "/srv", 1 << 40),
            folder(FolderUse::Temporary, "/tmp", 1 << 40),
            folder(FolderUse::SharedMemory, "/dev/shm", 32 << 30),
        ],
        network: Network {
            interfaces: vec![interface("lo", "127.0.0.1"), interface("eth0", address)],
            any_port_range: Some((32768, 60999)),
            default_interface: Some("eth0".to_owned()),
            reached_at: Some(parsed),
            ..Network::default()
        },
        names: vec![Resolution {
            name: name.to_owned(),
            addresses: vec![parsed],
            ..Resolution::default()
        }],
        kernel_log: KernelLog { readable: true, ..KernelLog::default() },
        ..Facts::default()
    }
}

pub(crate) fn libtorch(version: &str, cuda: Option<&str>) -> Libtorch {
    Libtorch {
        folder: "/opt/libtorch/lib".into(),
        version: Some(version.to_owned()),
        cuda: cuda.map(str::to_owned),
        found_by: "RUNPATH".to_owned(),
    }
}

pub(crate) fn program(libtorch: Option<Libtorch>) -> Program {
    Program {
        asked: "./train".into(),
        path: Some("/srv/train".into()),
        state: ProgramState::Binary,
        bytes: 1 << 20,
        sha256: Some("ab".repeat(32)),
        build_id: Some("cd".to_owned()),
        missing: Vec::new(),
        libtorch,
    }
}

/// Returns a driver for CUDA 13 with this many GPUs.
pub(crate) fn devices(gpus: u32) -> Devices {
    let device = |number: u32| Device {
        id: number.to_string(),
        model: Some("NVIDIA H100 80GB HBM3".to_owned()),
        pci: Some(format!("0000:{number:02x}:00.0")),
        is_usable: true,
        ..Device::default()
    };
    Devices {
        kind: "NVIDIA".to_owned(),
        driver: Driver {
            version: Some("580.65.06".to_owned()),
            on_bus: gpus as usize,
            missing_files: Vec::new(),
        },
        library: true,
        gpus: (0..gpus).map(|number| Gpu { device: device(number), nics: Vec::new() }).collect(),
        torch_tpu: None,
    }
}

/// Returns a cluster of healthy hosts, `node1` being this one, with libtorch in their program and fast routes between
/// all of them.
pub(crate) fn cluster(count: usize) -> Cluster {
    let address = |place: usize| format!("10.0.0.{}", place + 1);
    let name = |place: usize| format!("node{}", place + 1);
    let hosts = (0..count).map(|place| {
        let mut facts = host(&name(place), &address(place));
        for other in (0..count).filter(|other| *other != place) {
            facts.names.push(Resolution {
                name: name(other),
                addresses: vec![address(other).parse().unwrap()],
                ..Resolution::default()
            });
        }
        facts.program = Some(program(Some(libtorch("2.13.0", None))));
        HostReport {
            name: name(place),
            here: place == 0,
            facts: Some(facts),
            clock: Some(ClockReading { ahead_seconds: 0.0, error_seconds: 0.0002 }),
            sees_our_file: Some(place == 0),
            ..HostReport::default()
        }
    });
    let pairs = (0..count).flat_map(|from| (0..count).map(move |to| (from, to)));
    let routes = pairs.filter(|(from, to)| from != to).map(|(from, to)| {
        let attempt = |by, port: u16| Attempt {
            by,
            address: format!("{}:{port}", address(to)).parse().unwrap(),
            outcome: Outcome::Open,
        };
        Route {
            from,
            to,
            attempts: vec![
                attempt(AddressSource::Name, 40001),
                attempt(AddressSource::Name, 40002),
            ],
            measured: Some(Measured {
                round_trip: 80e-6,
                slowest: 120e-6,
                bytes: 32 << 20,
                seconds: 0.03,
                segments: 24000,
                ..Measured::default()
            }),
        }
    });
    Cluster {
        hosts: hosts.collect(),
        routes: routes.collect(),
        question: Question { program: Some("./train".into()), ..Question::default() },
        master_port: None,
        measured: true,
    }
}

/// Returns the facts of a host, to be modified.
pub(crate) fn facts(cluster: &mut Cluster, place: usize) -> &mut Facts {
    cluster.hosts[place].facts.as_mut().unwrap()
}

/// Returns the only finding that is not OK, with its hosts separated by commas.
#[track_caller]
pub(crate) fn only(findings: &[Finding]) -> (Verdict, String, String) {
    let bad: Vec<&Finding> = findings.iter().filter(|it| it.verdict != Verdict::Ok).collect();
    assert_eq!(bad.len(), 1, "{findings:#?}");
    let finding = bad[0];
    assert!(finding.verdict < Verdict::Warning || !finding.remedy.is_empty(), "{finding:#?}");
    (finding.verdict, finding.hosts.join(","), finding.found.clone())
}

/// Asserts that the findings are a single one, which is OK.
#[track_caller]
pub(crate) fn all_is_well(findings: &[Finding]) {
    assert_eq!(findings.len(), 1, "{findings:#?}");
    assert_eq!(findings[0].verdict, Verdict::Ok, "{findings:#?}");
}
