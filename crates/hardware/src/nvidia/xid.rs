//! Faults that NVIDIA's driver reports: Xids of GPUs, SXids of NVSwitches, and a few messages without a code.
//!
//! Codes, meanings and remedies follow NVIDIA's "Xid catalog" and "GPU debug guidelines", in our words.

use crate::{Fault, pci};

/// Returns the fault that a message of the kernel log reports.
pub(super) fn fault(message: &str) -> Option<Fault> {
    let (message, is_switch) = match message.strip_prefix("nvidia-nvswitch") {
        Some(rest) => (rest.split_once(": ")?.1, true),
        None => (message.strip_prefix("NVRM: ")?, false),
    };
    let name = if is_switch { "SXid (" } else { "Xid (" };
    let Some(rest) = message.strip_prefix(name) else {
        return if is_switch { None } else { without_number(message) };
    };
    // `PCI:0000:3b:00): 79, pid=1, ...`; drivers before 2015 leave out `PCI:`.
    let (address, rest) = rest.split_once("): ")?;
    let pci = pci::prefix_of(address.strip_prefix("PCI:").unwrap_or(address))?;
    let digits = rest.split(|it: char| !it.is_ascii_digit()).next()?;
    let code: u32 = digits.parse().ok()?;
    // The driver has withdrawn its request for a recovery.
    if code == 154 && rest.ends_with("to 0x0 (None)") {
        return None;
    }
    if is_switch {
        switch(code, pci, rest[digits.len()..].trim_start_matches([',', ' ']))
    } else {
        Some(gpu(code, pci))
    }
}

/// Parses messages without a code, such as `GPU 0000:91:00.0: GPU has fallen off the bus.`, which comes with an Xid 79
/// or instead of it.
fn without_number(message: &str) -> Option<Fault> {
    let rest = message.strip_prefix("GPU ")?;
    let (address, text) = rest.split_once(": ")?;
    let pci = pci::prefix_of(address)?;
    if text.starts_with("GPU has fallen off the bus") {
        return Some(gpu(79, pci));
    }
    text.starts_with("RmInitAdapter failed").then(|| Fault {
        source: "NVRM",
        code: None,
        ..fault_of(Class::Dead, pci, "the driver could not initialise it", RESTART_HOST)
    })
}

/// Parses the text of an SXid, such as `Non-fatal, Link 32 egress ...`. Lines with data and the place in the chip
/// follow and give `None`.
fn switch(code: u32, pci: String, text: &str) -> Option<Fault> {
    let is_fatal = text.starts_with("Fatal");
    if !is_fatal && !text.starts_with("Non-fatal") {
        return None;
    }
    let class = if is_fatal { Class::Dead } else { Class::Link };
    let means = if is_fatal {
        "an NVSwitch or a link at it has failed: GPUs behind it cannot reach each other"
    } else {
        "an NVSwitch has reported an error that it has corrected"
    };
    let remedy = if is_fatal { RESTART_HOST } else { WATCH };
    Some(Fault {
        source: "SXid",
        code: Some(code),
        is_serious: is_fatal,
        ..fault_of(class, pci, means, remedy)
    })
}

fn gpu(code: u32, pci: String) -> Fault {
    let known = XIDS.iter().find(|it| it.0 == code);
    let (_, class, means, remedy) = *known.unwrap_or(&UNKNOWN);
    Fault { source: "Xid", code: Some(code), ..fault_of(class, pci, means, remedy) }
}

fn fault_of(class: Class, pci: String, means: &str, remedy: &str) -> Fault {
    Fault {
        source: "",
        code: None,
        pci: Some(pci),
        is_serious: matches!(class, Class::Device | Class::Dead | Class::Link),
        is_consequence: class == Class::Consequence,
        needs_reset: class == Class::Dead,
        means: means.to_owned(),
        remedy: remedy.to_owned(),
    }
}

/// Origin of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    /// The program, in most cases.
    Program,
    /// Another fault before it, or the end of the program.
    Consequence,
    /// The device, which can continue.
    Device,
    /// The device, which is unusable until it is reset.
    Dead,
    /// A link between devices.
    Link,
    /// An origin that NVIDIA's list does not determine.
    Open,
}

const KERNEL: &str = "find the kernel with compute-sanitizer, or with CUDA_LAUNCH_BLOCKING=1; if other programs get it on this GPU alone, suspect the GPU";
const AGAIN: &str = "start the job again; if it comes back on this GPU, have it looked at";
const EARLIER: &str = "look for the fault before it";
const RESET: &str = "reset the GPU (nvidia-smi --gpu-reset) or restart the host; if it comes back, have the GPU replaced";
const RESTART_HOST: &str = "restart the host; if it comes back, check power, cooling, seating and riser of the GPU and have it replaced";
const REMAP: &str = "reset the GPU when the job is over, so that the change takes effect";
const WATCH: &str = "watch the GPU; nothing is to be done if it happens once";
const LINKS: &str = "reset the GPUs or restart the host; see `nvidia-smi nvlink -e`, and have the link looked at if it comes back";

const UNKNOWN: (u32, Class, &str, &str) = (
    0,
    Class::Open,
    "see NVIDIA's list of Xids for its meaning",
    "see docs.nvidia.com/deploy/xid-errors",
);

/// Known Xids: code, origin, meaning and remedy.
const XIDS: &[(u32, Class, &str, &str)] = &[
    (8, Class::Program, "a kernel ran longer than the driver waits", KERNEL),
    (
        13,
        Class::Program,
        "a kernel of the program failed, mostly by an access outside of its memory",
        KERNEL,
    ),
    (31, Class::Program, "the program accessed an invalid address of the GPU", KERNEL),
    (
        32,
        Class::Open,
        "commands for the GPU were damaged on their way, by the driver or the PCI bus",
        AGAIN,
    ),
    (38, Class::Open, "the GPU's firmware has failed", AGAIN),
    (43, Class::Program, "the GPU has stopped the program after a fault of the program", KERNEL),
    (44, Class::Program, "a kernel failed while the GPU switched between programs", KERNEL),
    (
        45,
        Class::Consequence,
        "the program's work was removed, after an earlier fault or because the program was ended",
        EARLIER,
    ),
    (46, Class::Dead, "the GPU does not answer", RESET),
    (
        48,
        Class::Dead,
        "the GPU's memory has an error of two bits, which cannot be corrected",
        RESET,
    ),
    (61, Class::Device, "the GPU's power management has stopped at a breakpoint", RESET),
    (62, Class::Dead, "the GPU's power management has halted", RESET),
    (
        63,
        Class::Device,
        "a damaged part of the GPU's memory will be replaced by a spare part",
        REMAP,
    ),
    (
        64,
        Class::Dead,
        "a damaged part of the GPU's memory could not be replaced by a spare part",
        RESET,
    ),
    (69, Class::Program, "the program gave the GPU a command that it does not have", KERNEL),
    (74, Class::Link, "a connection by NVLink has failed", LINKS),
    (
        79,
        Class::Dead,
        "the GPU has fallen off the bus: it lost power, overheated, is badly seated or is broken",
        RESTART_HOST,
    ),
    (92, Class::Device, "the GPU's memory has many errors of one bit, which were corrected", WATCH),
    (
        94,
        Class::Device,
        "an error in the GPU's memory has ended the program that used it, and no other",
        "start the job again, and reset the GPU when that is possible; if it comes back, have the GPU replaced",
    ),
    (95, Class::Dead, "an error in the GPU's memory may have spread to other programs", RESET),
    (109, Class::Open, "a kernel could not be stopped in time to switch between programs", AGAIN),
    (119, Class::Dead, "the GPU's system processor (GSP) does not answer", RESET),
    (120, Class::Dead, "the GPU's system processor (GSP) has failed", RESET),
    (121, Class::Link, "the connection between the GPU and its processor (C2C) had errors", RESET),
    (122, Class::Device, "the GPU's power management could not read its memory of settings", RESET),
    (
        123,
        Class::Device,
        "the GPU's power management could not write its memory of settings",
        RESET,
    ),
    (136, Class::Link, "a connection by NVLink could not be set up", LINKS),
    (
        137,
        Class::Program,
        "the program accessed an invalid address of another GPU, over NVLink",
        KERNEL,
    ),
    (140, Class::Dead, "the GPU's memory has an error that was not recovered from", RESET),
    (143, Class::Dead, "the GPU could not be initialised", RESET),
    (144, Class::Link, "a connection by NVLink has reported an error (SAW)", LINKS),
    (145, Class::Link, "a connection by NVLink has reported an error (RLW)", LINKS),
    (146, Class::Link, "a connection by NVLink has reported an error (TLW)", LINKS),
    (147, Class::Link, "a connection by NVLink has reported an error (TREX)", LINKS),
    (148, Class::Link, "a connection by NVLink has reported an error (NVLPW)", LINKS),
    (149, Class::Link, "a connection by NVLink has reported an error (NETIR)", LINKS),
    (150, Class::Link, "a connection by NVLink has reported an error (MSE)", LINKS),
    (
        154,
        Class::Device,
        "the driver requests a recovery of the GPU: the message names the action",
        "do what the message asks for: a reset of the GPU, or a restart of the host",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_driver() {
        let table: [(&str, &str, u32, &str); 8] = [
            (
                "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.",
                "Xid",
                79,
                "0000:3b:00",
            ),
            (
                "NVRM: Xid (PCI:0000:91:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
                "Xid",
                79,
                "0000:91:00",
            ),
            ("NVRM: GPU 0000:91:00.0: GPU has fallen off the bus.", "Xid", 79, "0000:91:00"),
            (
                "NVRM: Xid (0000:01:00): 31, Ch 0000000b, engmask 00000120, intr 10000000",
                "Xid",
                31,
                "0000:01:00",
            ),
            (
                "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate.",
                "Xid",
                63,
                "0000:10:1c",
            ),
            (
                "NVRM: Xid (PCI:0009:01:00): 119, pid=12, name=python3, Timeout after 6s of waiting for RPC response from GPU0 GSP!",
                "Xid",
                119,
                "0009:01:00",
            ),
            (
                "nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48 LTSSM Fault Up",
                "SXid",
                20034,
                "0000:06:00",
            ),
            (
                "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)",
                "SXid",
                12028,
                "0000:05:00",
            ),
        ];
        for (line, source, code, pci) in table {
            let found = fault(line).unwrap();
            assert_eq!(
                (found.source, found.code, found.pci.as_deref()),
                (source, Some(code), Some(pci)),
                "{line}"
            );
            assert!(!found.means.is_empty() && !found.remedy.is_empty());
        }
        assert!(
            fault("NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x26:0x56:1463)")
                .unwrap()
                .needs_reset
        );
        assert!(fault(table[6].0).unwrap().is_serious && !fault(table[7].0).unwrap().is_serious);
    }

    #[test]
    fn classes() {
        let of = |code: u32| gpu(code, "0000:3b:00".to_owned());
        for code in [13, 31, 43, 69] {
            assert!(!of(code).is_serious, "{code}");
        }
        for code in [48, 63, 64, 74, 79, 92, 94, 95, 119, 120] {
            assert!(of(code).is_serious, "{code}");
        }
        assert!(of(45).is_consequence);
        assert!(of(9999).means.contains("NVIDIA's list"));
        let mut codes: Vec<u32> = XIDS.iter().map(|it| it.0).collect();
        codes.dedup();
        assert!(codes.len() == XIDS.len() && codes.is_sorted());
        assert!(of(79).is_of("0000:3b:00.0") && of(79).is_of("0000:3b:00"));
        assert!(
            !of(79).is_of("0000:3b:00f.0") && !of(79).is_of("0000:3b:01.0") && !of(79).is_of("")
        );
    }

    #[test]
    fn lines_that_are_none() {
        for line in [
            "",
            "NVRM: ",
            "NVRM: Xid (",
            "NVRM: Xid (): ",
            "NVRM: Xid (PCI:0000:3b:00): ",
            "NVRM: Xid (PCI:0000:3b:00): x79",
            "NVRM: Xid (PCI:0000:3b:00): 99999999999999999999, GPU",
            "NVRM: Xid (PCI:../../etc): 79, GPU",
            "NVRM: Xid (PCI:\u{1b}]52;c;): 79, GPU",
            "NVRM: GPU at PCI:0000:01:00: GPU-bc0fa0b9-cac2-f507-b715-9bebdb69c71e",
            "NVRM: GPU 0000:91:00.0: GPU serial number is 1653723052734.",
            "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.65.06",
            // A process name that looks like an Xid.
            "Out of memory: Killed process 7 (NVRM: Xid (PCI:0000:3b:00): 79, x) total-vm:1kB",
            "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Data {0x10000000, 0x10000000}",
            "nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 20034, Severity 1 Engine instance 60",
            "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
            "nvidia-nvswitch0",
            "nvidia-nvswitch\u{e9}: SXid (PCI:0000:07:00.0",
        ] {
            assert_eq!(fault(line), None, "{line}");
        }
    }
}
