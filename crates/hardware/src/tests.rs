//! Devices, drivers and network adapters of simulated hosts.

use std::os::unix::fs::symlink;

use super::*;

fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    write(root.path(), files);
    root
}

fn write(root: &Path, files: &[(&str, &str)]) {
    for (name, text) in files {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

/// Makes a host with four GPUs, whose minor numbers do not follow their addresses.
fn four() -> tempfile::TempDir {
    let about = |minor: usize, uuid: &str| {
        format!("Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n")
    };
    tree(&[
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  x\n",
        ),
        ("proc/driver/nvidia/gpus/0000:19:00.0/information", &about(1, "GPU-aaaa")),
        ("proc/driver/nvidia/gpus/0000:3B:00.0/information", &about(0, "GPU-abbb")),
        ("proc/driver/nvidia/gpus/0000:9b:00.0/information", &about(2, "GPU-????????")),
        ("proc/driver/nvidia/gpus/0001:00:00.0/information", ""),
        ("sys/bus/pci/devices/0000:19:00.0/numa_node", "0\n"),
        ("sys/bus/pci/devices/0000:19:00.0/vendor", "0x10de\n"),
        ("sys/bus/pci/devices/0000:19:00.0/class", "0x030200\n"),
        ("sys/bus/pci/devices/0000:3b:00.0/numa_node", "0\n"),
        ("sys/bus/pci/devices/0000:04:00.0/vendor", "0x10de\n"),
        ("sys/bus/pci/devices/0000:04:00.0/class", "0x068000\n"),
        ("sys/bus/pci/devices/0000:9b:00.0/numa_node", "1\n"),
        ("sys/bus/pci/devices/0001:00:00.0/numa_node", "-1\n"),
        ("dev/nvidia0", ""),
        ("dev/nvidia1", ""),
        ("dev/nvidia2", ""),
        ("dev/nvidia3", ""),
        ("dev/nvidiactl", ""),
        ("dev/nvidia-uvm", ""),
    ])
}

fn usable(root: &Path) -> Vec<Device> {
    find(root).1.into_iter().filter(|it| it.is_usable).collect()
}

fn uuids(gpus: &[Device]) -> Vec<Option<&str>> {
    gpus.iter().map(|gpu| gpu.uuid.as_deref()).collect()
}

#[test]
fn nvidias_driver() {
    let root = four();
    let (kind, gpus) = find(root.path());
    assert_eq!((kind.name(), kind.visibility_variable()), ("NVIDIA", "CUDA_VISIBLE_DEVICES"));
    let found: Vec<_> = gpus.iter().map(|it| (it.id.as_str(), it.numa_node)).collect();
    assert_eq!(found, [("0", Some(0)), ("1", Some(0)), ("2", Some(1)), ("3", None)]);
    assert_eq!(uuids(&gpus), [Some("GPU-aaaa"), Some("GPU-abbb"), None, None]);
    assert_eq!(gpus[1].pci.as_deref(), Some("0000:3b:00.0"));
    assert_eq!(gpus[0].model.as_deref(), Some("NVIDIA H100"));
    let driver = kind.driver(root.path(), &gpus);
    assert_eq!((driver.version.as_deref(), driver.on_bus), (Some("580.65.06"), 1));
    assert!(driver.missing_files.is_empty(), "{driver:?}");
    fs::remove_file(root.path().join("dev/nvidia-uvm")).unwrap();
    fs::remove_file(root.path().join("dev/nvidia1")).unwrap();
    assert_eq!(kind.driver(root.path(), &gpus).missing_files, ["/dev/nvidia1", "/dev/nvidia-uvm"]);
}

#[test]
fn a_container_with_some_of_the_devices() {
    let root = four();
    for gone in ["nvidia0", "nvidia3"] {
        fs::remove_file(root.path().join("dev").join(gone)).unwrap();
    }
    // A GPU of unknown minor number stays usable.
    let gpus = usable(root.path());
    assert_eq!(uuids(&gpus), [Some("GPU-aaaa"), None, None]);
    assert_eq!(gpus.iter().map(|it| it.id.as_str()).collect::<Vec<_>>(), ["0", "1", "2"]);
    let excluded = "Device Minor: 1\nGPU Excluded:\t Yes\n";
    write(root.path(), &[("proc/driver/nvidia/gpus/0000:19:00.0/information", excluded)]);
    assert_eq!(usable(root.path()).len(), 2);
    assert!(find(root.path()).1[0].is_excluded);
    // Without the driver's folder, the device files are counted.
    fs::remove_dir_all(root.path().join("proc")).unwrap();
    assert_eq!(usable(root.path()).len(), 2);
    assert_eq!(find(tree(&[]).path()), (<&dyn Vendor>::default(), vec![]));
}

#[test]
fn amds_driver() {
    let root = tree(&[
        ("sys/class/kfd/kfd/topology/nodes/0/gpu_id", "0\n"),
        ("sys/class/kfd/kfd/topology/nodes/1/gpu_id", "51245\n"),
        ("sys/class/kfd/kfd/topology/nodes/1/name", "aldebaran\n"),
        (
            "sys/class/kfd/kfd/topology/nodes/1/properties",
            "simd_count 440\nlocation_id 49408\ndomain 0\nunique_id 4660\n",
        ),
        ("sys/class/kfd/kfd/topology/nodes/2/gpu_id", "5678\n"),
        ("sys/bus/pci/devices/0000:c1:00.0/numa_node", "1\n"),
        ("sys/bus/pci/devices/0000:c1:00.0/product_name", "AMD Instinct MI210\n"),
        ("sys/bus/pci/devices/0000:c1:00.0/mem_info_vram_total", "68702699520\n"),
        ("sys/bus/pci/devices/0000:c1:00.0/vendor", "0x1002\n"),
        ("sys/bus/pci/devices/0000:c1:00.0/class", "0x038000\n"),
    ]);
    let (kind, gpus) = find(root.path());
    assert_eq!((kind.name(), kind.visibility_variable()), ("AMD", "HIP_VISIBLE_DEVICES"));
    let expected = Device {
        id: "0".to_owned(),
        uuid: Some("GPU-0000000000001234".to_owned()),
        model: Some("AMD Instinct MI210".to_owned()),
        memory_bytes: Some(68_702_699_520),
        pci: Some("0000:c1:00.0".to_owned()),
        numa_node: Some(1),
        is_usable: true,
        is_excluded: false,
    };
    assert_eq!(gpus[0], expected);
    assert_eq!((gpus[1].id.as_str(), gpus[1].numa_node), ("1", None));
    let driver = kind.driver(root.path(), &gpus);
    assert_eq!((driver.version.as_deref(), driver.on_bus), (Some("of the kernel"), 1));
    assert_eq!(driver.missing_files, ["/dev/kfd"]);
    write(root.path(), &[("dev/kfd", "")]);
    assert!(kind.driver(root.path(), &gpus).missing_files.is_empty());
}

#[test]
fn amds_faults() {
    let fault = |line: &str| fault_in(&format!("amdgpu 0000:c1:00.0: amdgpu: {line}"));
    let reset = fault("GPU reset begin!").unwrap();
    assert_eq!((reset.source, reset.pci.as_deref()), ("amdgpu", Some("0000:c1:00")));
    assert!(fault("2 uncorrectable hardware errors detected in umc block").unwrap().needs_reset);
    let newer = "{5} socket: 0, die: 0, 1 new uncorrectable hardware errors detected in umc block";
    assert!(fault(newer).unwrap().needs_reset);
    assert!(!fault("[gfxhub0] no-retry page fault (src_id:0 ring:88 vmid:4)").unwrap().needs_reset);
    for line in [
        "no uncorrectable hardware errors detected in umc block",
        "0 uncorrectable hardware errors detected in umc block",
        "SMU is initialized successfully!",
    ] {
        assert_eq!(fault(line), None, "{line}");
    }
    assert_eq!(fault_in("amdgpu: GPU reset begin!"), None);
}

/// Makes a host with four TPUs v5e, a network card and a disk of the same vendor, and this device ID of the chips.
fn four_chips(id: &str) -> tempfile::TempDir {
    let root = tree(&[
        ("sys/bus/pci/devices/0000:00:03.0/vendor", "0x1ae0\n"),
        ("sys/bus/pci/devices/0000:00:03.0/device", "0x0042\n"),
        ("sys/bus/pci/devices/0000:00:0a.0/vendor", "0x1ae0\n"),
        ("sys/bus/pci/devices/0000:00:0a.0/device", "0x001f\n"),
    ]);
    for chip in 4..8 {
        let folder = format!("sys/bus/pci/devices/0000:00:0{chip}.0");
        let write_one = |file: &str, text: &str| {
            write(root.path(), &[(&format!("{folder}/{file}"), text)]);
        };
        write_one("vendor", "0x1ae0\n");
        write_one("device", &format!("{id}\n"));
        write_one("subsystem_device", "0x004f\n");
        write_one("numa_node", if chip < 6 { "0\n" } else { "1\n" });
    }
    root
}

#[test]
fn googles_chips_by_vfio() {
    let root = four_chips("0x0063");
    // Without a driver, nothing can be opened.
    let (kind, chips) = find(root.path());
    assert_eq!((kind.name(), kind.visibility_variable()), ("Google", "TPU_VISIBLE_CHIPS"));
    assert!(kind.is_for_one_process() && chips.iter().all(|chip| !chip.is_usable));
    let driver = kind.driver(root.path(), &chips);
    assert_eq!(driver, Driver { on_bus: 4, ..Driver::default() });
    assert!(!may_have_devices_for_one_process(root.path()));

    // The groups are numbered against the addresses, and one is not in this container.
    for (chip, group) in [(4, 3), (5, 2), (6, 1), (7, 0)] {
        let device = root.path().join(format!("sys/bus/pci/devices/0000:00:0{chip}.0"));
        symlink("../../../bus/pci/drivers/vfio-pci", device.join("driver")).unwrap();
        symlink(format!("../../../kernel/iommu_groups/{group}"), device.join("iommu_group"))
            .unwrap();
    }
    write(root.path(), &[("dev/vfio/vfio", "")]);
    assert!(!may_have_devices_for_one_process(root.path()), "there is no group");
    write(root.path(), &[("dev/vfio/0", ""), ("dev/vfio/2", "")]);
    write(root.path(), &[("dev/vfio/3", "")]);
    assert!(may_have_devices_for_one_process(root.path()));
    let chips = find(root.path()).1;
    let found: Vec<_> =
        chips.iter().map(|it| (it.id.as_str(), it.pci.as_deref(), it.numa_node)).collect();
    assert_eq!(
        found,
        [
            ("0", Some("0000:00:07.0"), Some(1)),
            ("", Some("0000:00:06.0"), Some(1)),
            ("1", Some("0000:00:05.0"), Some(0)),
            ("2", Some("0000:00:04.0"), Some(0)),
        ]
    );
    assert_eq!(chips[0].model.as_deref(), Some("TPU v5e"));
    assert_eq!(chips[0].memory_bytes, Some(16 << 30));
    let driver = kind.driver(root.path(), &chips);
    assert_eq!((driver.version.as_deref(), driver.on_bus), (Some("vfio-pci"), 4));
    assert_eq!(driver.missing_files, ["/dev/vfio/1"]);
}

#[test]
fn googles_chips_by_accel_files() {
    let root = four_chips("0x0027");
    write(root.path(), &[("dev/accel0", ""), ("dev/accel1", ""), ("dev/accel3", "")]);
    assert!(may_have_devices_for_one_process(root.path()));
    let chips = find(root.path()).1;
    let ids: Vec<&str> = chips.iter().map(|chip| chip.id.as_str()).collect();
    assert_eq!(ids, ["0", "1", "2", ""]);
    assert_eq!(chips[2].pci.as_deref(), Some("0000:00:07.0"), "the file of chip 2 is missing");
    assert_eq!(
        (chips[0].model.as_deref(), chips[0].memory_bytes),
        (Some("TPU v3"), Some(32 << 30))
    );
    let driver = named("Google").unwrap().driver(root.path(), &chips);
    assert_eq!(driver.version.as_deref(), Some("of the kernel"));

    // A newer driver lists the file with the device.
    for (chip, number) in [(4, 3), (5, 1), (6, 0), (7, 2)] {
        let listed = format!("sys/bus/pci/devices/0000:00:0{chip}.0/accel/accel{number}/dev");
        write(root.path(), &[(&listed, "121:0\n")]);
    }
    let listed: Vec<_> = usable(root.path()).into_iter().filter_map(|chip| chip.pci).collect();
    assert_eq!(listed, ["0000:00:06.0", "0000:00:05.0", "0000:00:04.0"]);

    // Without the bus, the files are counted.
    let blind = tree(&[("dev/accel0", ""), ("dev/accel1", "")]);
    let ids: Vec<String> = usable(blind.path()).into_iter().map(|chip| chip.id).collect();
    assert_eq!(ids, ["0", "1"]);
}

#[test]
fn every_kind_says_all_that_others_ask() {
    for kind in VENDORS {
        assert_eq!(named(kind.name()), Some(*kind));
        assert!(is_visibility_variable(kind.visibility_variable()));
        assert!(kind.kubernetes_resource().contains('/') && !kind.default_backend().is_empty());
        assert!(kind.discover(tree(&[]).path()).is_empty());
        assert_eq!(kind.driver(tree(&[]).path(), &[]), Driver::default());
    }
    assert!(!is_visibility_variable("PATH") && named("none").is_none());
}

/// Makes a host with two GPUs at a switch each, an adapter next to each, and an onboard adapter.
fn with_nics() -> tempfile::TempDir {
    let root = four();
    let (first, second) =
        ("pci0000:17/0000:17:00.0/0000:18:00.0", "pci0000:99/0000:99:00.0/0000:9a:00.0");
    let place = |address: &str, path: &str, node: &str| {
        let folder = root.path().join("sys/devices").join(path).join(address);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("numa_node"), node).unwrap();
        let link = root.path().join("sys/bus/pci/devices").join(address);
        let _ = fs::remove_dir_all(&link);
        symlink(&folder, link).unwrap();
        folder
    };
    place("0000:19:00.0", &format!("{first}/0000:18:04.0"), "0");
    place("0000:9b:00.0", &format!("{second}/0000:9a:04.0"), "1");
    let class = |kind: &str, name: &str, device: &Path, files: &[(&str, &str)]| {
        let folder = root.path().join("sys/class").join(kind).join(name);
        fs::create_dir_all(&folder).unwrap();
        symlink(device, folder.join("device")).unwrap();
        write(&folder, files);
    };
    for (name, address, path, node, state) in [
        ("mlx5_0", "0000:1a:00.0", format!("{first}/0000:18:08.0"), "0", "4: ACTIVE\n"),
        ("mlx5_1", "0000:9c:00.0", format!("{second}/0000:9a:08.0"), "1", "4: ACTIVE\n"),
        ("mlx5_2", "0000:9d:00.0", format!("{second}/0000:9a:0c.0"), "1", "1: DOWN\n"),
    ] {
        let device = place(address, &path, node);
        class("infiniband", name, &device, &[("ports/1/state", state)]);
        class("net", &name.replace("mlx5_", "ib"), &device, &[("operstate", "down\n")]);
    }
    let board = place("0000:00:1f.6", "pci0000:00", "0");
    let below = board.join("virtio2");
    fs::create_dir_all(&below).unwrap();
    class("net", "eth0", &below, &[("operstate", "up\n")]);
    write(root.path(), &[("sys/class/net/lo/operstate", "unknown\n")]);
    root
}

#[test]
fn each_gpu_and_its_network_card() {
    let root = with_nics();
    let all = nics(root.path());
    assert_eq!(all.len(), 4, "{all:?}");
    let gpus = find(root.path()).1;
    let near = |gpu: &Device| -> Vec<(String, Distance)> {
        let seen = of_device(root.path(), gpu, &all);
        nearest(&seen).iter().map(|nic| (nic.name().to_owned(), nic.distance)).collect()
    };
    assert_eq!(near(&gpus[0]), [("mlx5_0".to_owned(), Distance::Switch)]);
    assert_eq!(near(&gpus[2]), [("mlx5_1".to_owned(), Distance::Switch)]);
    assert_eq!(near(&gpus[3]), [], "its place is not known");
    let seen = of_device(root.path(), &gpus[0], &all);
    let of = |name: &str| seen.iter().find(|nic| nic.is_called(name)).unwrap();
    assert_eq!(of("eth0").distance, Distance::Node);
    assert_eq!(of("ib1").rdma.as_deref(), Some("mlx5_1"));
    assert_eq!((of("mlx5_1").distance, of("mlx5_2").is_up), (Distance::System, false));
    // Without RDMA, the interfaces decide.
    fs::remove_dir_all(root.path().join("sys/class/infiniband")).unwrap();
    let all = nics(root.path());
    let seen = of_device(root.path(), &gpus[0], &all);
    assert_eq!(nearest(&seen).iter().map(|nic| nic.name()).collect::<Vec<_>>(), ["eth0"]);
}
