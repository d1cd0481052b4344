//! Faults of this host's devices, as their drivers report them in the kernel's log while ranks run.

use std::io::{ErrorKind, Read};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use brigade_hardware::{DeviceFault, Fault};
use brigade_hardware::{KMSG, KernelLog};
use brigade_rank_env::text::printable;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::placement::environment;
use crate::{Device, Devices, LaunchPlan};

/// Reader of the kernel's log for messages about the devices of the ranks.
#[derive(Debug)]
pub(super) struct DeviceFaults {
    host: String,
    log: Log,
    /// Inventory of this host, from a separate thread: a driver that hangs must not block a job.
    looking: Option<Receiver<Inventory>>,
    inventory: Inventory,
    found: Vec<ReportedFault>,
}

/// Source of the kernel's messages.
#[derive(Debug)]
enum Log {
    /// The kernel's own log, from the next message on.
    Kernel(KernelLog),
    /// The journal's copy of the log, which is queried for messages since then: this user may not read the kernel's
    /// own.
    Journal {
        since: SystemTime,
        /// Time of the last query.
        asked: Option<Instant>,
    },
}

/// The devices of this host.
#[derive(Debug, Default)]
struct Inventory {
    present: Vec<Device>,
    /// Devices of the ranks, by local rank.
    of_ranks: Vec<Device>,
}

/// A fault, reported once or more often.
#[derive(Debug)]
struct ReportedFault {
    fault: Fault,
    message: String,
    count: usize,
    /// `true` if the fault was reported before the attempt began.
    is_earlier: bool,
}

impl DeviceFaults {
    /// Starts with the log's next message. Takes no time: a thread searches for devices.
    pub(super) fn watch(plan: &LaunchPlan) -> Self {
        let root = brigade_hardware::host_root();
        let log = match KernelLog::open_at_end(&root.join(KMSG.trim_start_matches('/'))) {
            Ok(log) => Log::Kernel(log),
            Err(_) => Log::Journal { since: SystemTime::now(), asked: None },
        };
        let (user_env, wanted) = (plan.user_env.clone(), plan.options.placement.devices.clone());
        let (sender, looking) = mpsc::channel();
        let look = move || {
            let devices = Devices::read(&root, environment(&user_env));
            let of_ranks = devices.choose(wanted.as_ref()).unwrap_or_default();
            let _ = sender.send(Inventory { present: devices.present, of_ranks });
        };
        // Without a thread the names of devices are unknown, but the job starts.
        let started = std::thread::Builder::new().name("devices".to_owned()).spawn(look);
        Self {
            host: plan.host.clone(),
            log,
            looking: started.ok().map(|_| looking),
            inventory: Inventory::default(),
            found: Vec::new(),
        }
    }

    /// Handles the start of an attempt: of the earlier faults, only those that make a device unusable are kept.
    pub(super) fn begin_attempt(&mut self) {
        if let Log::Kernel(_) = self.log {
            self.read();
        }
        self.found.retain(|it| it.fault.needs_reset);
        self.found.iter_mut().for_each(|it| it.is_earlier = true);
    }

    /// Returns the reported faults of the devices of these ranks, the worst first. Takes at most [`JOURNAL_TIMEOUT`].
    pub(super) fn look(&mut self, first_rank: usize, nproc: usize) -> Vec<DeviceFault> {
        if let Some(found) = self.looking.as_ref().and_then(|it| it.recv_timeout(LOOK_TIMEOUT).ok())
        {
            (self.inventory, self.looking) = (found, None);
        }
        self.read();
        choose(&self.found, &self.inventory, first_rank, nproc, &self.host)
    }

    fn read(&mut self) {
        match &mut self.log {
            Log::Kernel(log) => {
                let found = &mut self.found;
                // Messages that were read before an error count.
                let _ = log.read(|message| add(found, message.text));
            }
            // Skipped if no device could have a fault: the journal may be large.
            Log::Journal { .. } if self.inventory.present.is_empty() => {}
            // Ranks that fail together cause only one query.
            Log::Journal { asked: Some(asked), .. } if asked.elapsed() < JOURNAL_PAUSE => {}
            Log::Journal { since, asked } => {
                let now = SystemTime::now();
                for line in journal(*since).lines().filter_map(kernel_part) {
                    add(&mut self.found, line);
                }
                (*since, *asked) = (now, Some(Instant::now()));
            }
        }
    }
}

fn add(found: &mut Vec<ReportedFault>, message: &str) {
    let Some(fault) = brigade_hardware::fault_in(message) else { return };
    let key = |it: &Fault| (it.source, it.code, it.pci.clone(), it.means.clone());
    let is_known = |it: &&mut ReportedFault| !it.is_earlier && key(&it.fault) == key(&fault);
    if let Some(known) = found.iter_mut().find(is_known) {
        known.count += 1;
    } else if found.len() < MOST_KEPT {
        found.push(ReportedFault {
            fault,
            message: printable(message),
            count: 1,
            is_earlier: false,
        });
    }
}

/// Returns the faults that concern these ranks, the worst first, a few at most. A pure function.
fn choose(
    found: &[ReportedFault],
    inventory: &Inventory,
    first_rank: usize,
    nproc: usize,
    host: &str,
) -> Vec<DeviceFault> {
    let device_of = |reported: &ReportedFault, devices: &[Device]| {
        devices
            .iter()
            .position(|device| device.pci.as_deref().is_some_and(|pci| reported.fault.is_of(pci)))
    };
    let ranks = &inventory.of_ranks[..inventory.of_ranks.len().min(nproc)];
    let is_ours = |reported: &&ReportedFault| {
        // Another job's GPU is not reported; a switch, or a device that has disappeared, is.
        device_of(reported, ranks).is_some() || device_of(reported, &inventory.present).is_none()
    };
    let ours: Vec<&ReportedFault> = found.iter().filter(is_ours).collect();
    let is_explained = |reported: &ReportedFault| {
        reported.fault.is_consequence
            && ours
                .iter()
                .any(|other| other.fault.pci == reported.fault.pci && !other.fault.is_consequence)
    };
    let mut chosen: Vec<&&ReportedFault> = ours.iter().filter(|it| !is_explained(it)).collect();
    chosen.sort_by_key(|it| (it.is_earlier, it.fault.is_consequence, !it.fault.is_serious));
    chosen.truncate(MAX_REPORTED);
    let described = |reported: &&ReportedFault| {
        let local_rank = device_of(reported, ranks);
        let address = local_rank.and_then(|at| ranks[at].pci.clone());
        let Fault { source, code, pci, means, remedy, .. } = &reported.fault;
        DeviceFault {
            host: host.to_owned(),
            device: address.or_else(|| pci.clone()).unwrap_or_default(),
            rank: local_rank.map(|local_rank| first_rank + local_rank),
            fault: code.map_or_else(|| (*source).to_owned(), |code| format!("{source} {code}")),
            count: reported.count,
            is_earlier: reported.is_earlier,
            means: means.clone(),
            remedy: remedy.clone(),
            message: reported.message.clone(),
        }
    };
    chosen.into_iter().map(described).collect()
}

/// Returns the kernel's messages in the journal since then. Empty if this user may read none, or if the journal does
/// not answer in time.
fn journal(since: SystemTime) -> String {
    let seconds = since.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut command = Command::new("journalctl");
    command.args(["--dmesg", "--boot", "--quiet", "--no-pager", "--output=short-unix"]);
    command.arg(format!("--since=@{seconds}")).stdin(Stdio::null()).stderr(Stdio::null());
    let Ok(mut child) = command.stdout(Stdio::piped()).spawn() else { return String::new() };
    let Some(mut output) = child.stdout.take() else { return String::new() };
    let end = Instant::now() + JOURNAL_TIMEOUT;
    let (mut text, mut buffer) = (Vec::new(), vec![0; 1 << 16]);
    while text.len() < MAX_JOURNAL {
        let left = end.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
        let mut fds = [PollFd::new(output.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, timeout) {
            Ok(0) => break,
            Ok(_) => {}
            Err(nix::errno::Errno::EINTR) => continue,
            Err(_) => break,
        }
        match output.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => text.extend_from_slice(&buffer[..length]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    // The agent reaps the process, like all that ranks have left; a process that still writes ends when its pipe is
    // closed.
    String::from_utf8_lossy(&text).into_owned()
}

/// Extracts the message from a line such as `1700000000.123456 node1 kernel: NVRM: ...`.
fn kernel_part(line: &str) -> Option<&str> {
    line.split_once(" kernel: ").map(|it| it.1)
}

/// Time limit for the thread that examines the devices, which has had the job's whole duration.
const LOOK_TIMEOUT: Duration = Duration::from_millis(200);
/// Time limit of a query of the journal. Less than the time limit for the details of a failure.
const JOURNAL_TIMEOUT: Duration = Duration::from_secs(1);
/// Minimum pause between two queries of the journal.
const JOURNAL_PAUSE: Duration = Duration::from_secs(2);
const MAX_JOURNAL: usize = 8 << 20;
/// Maximum number of kinds of faults: a device that has fallen off the bus reports the same fault repeatedly.
const MOST_KEPT: usize = 100;
const MAX_REPORTED: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    fn device(pci: &str) -> Device {
        Device { pci: Some(pci.to_owned()), is_usable: true, ..Device::default() }
    }

    fn described(lines: &[&str], earlier: usize) -> Vec<String> {
        let mut found = Vec::new();
        lines.iter().for_each(|line| add(&mut found, line));
        found.iter_mut().take(earlier).for_each(|it| it.is_earlier = true);
        let all = ["0000:19:00.0", "0000:3b:00.0", "0000:5d:00.0"].map(device);
        let inventory =
            Inventory { present: all.to_vec(), of_ranks: vec![all[1].clone(), all[0].clone()] };
        let faults = choose(&found, &inventory, 4, 2, "node1");
        faults.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_rank_is_named_whose_device_it_is() {
        let gone = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.";
        let shown = described(&[gone, gone], 0);
        let start = "Xid 79 (2 times) at PCI 0000:3b:00.0, the GPU of rank 4 on node1: the GPU has fallen off the bus: ";
        assert!(shown.len() == 1 && shown[0].starts_with(start), "{shown:?}");
        let shown = described(&[gone], 1);
        assert!(shown[0].contains("on node1 (before this attempt): "), "{shown:?}");
    }

    #[test]
    fn the_worst_comes_first_and_what_follows_from_it_is_left_out() {
        let shown = described(
            &[
                "NVRM: Xid (PCI:0000:19:00): 13, Graphics Exception: ESR 0x505730=0x0",
                "NVRM: Xid (PCI:0000:3b:00): 45, pid=7, name=train, Ch 00000008",
                "NVRM: Xid (PCI:0000:3b:00): 94, pid=7, name=train, Contained: SM (0x1).",
            ],
            0,
        );
        let kinds: Vec<&str> = shown.iter().map(|it| it.split(" at ").next().unwrap()).collect();
        assert_eq!(kinds, ["Xid 94", "Xid 13"]);
        assert_eq!(described(&["NVRM: Xid (PCI:0000:19:00): 45, pid=7, Ch 00000008"], 0).len(), 1);
    }

    #[test]
    fn devices_of_others_are_left_out_and_switches_are_not() {
        assert!(
            described(&["NVRM: Xid (PCI:0000:5d:00): 79, GPU has fallen off the bus."], 0)
                .is_empty()
        );
        let shown =
            described(&["nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48"], 0);
        assert!(shown[0].starts_with("SXid 20034 at PCI 0000:06:00 on node1: "), "{shown:?}");
        let many: Vec<String> =
            (0..300).map(|code| format!("NVRM: Xid (PCI:0000:3b:00): {code}, x")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!(described(&many, 0).len(), MAX_REPORTED);
    }

    #[test]
    fn lines_of_the_journal() {
        let line = "1700000000.123456 node1 kernel: NVRM: Xid (PCI:0000:3b:00): 79, x";
        assert!(brigade_hardware::fault_in(kernel_part(line).unwrap()).is_some());
        assert_eq!(kernel_part("-- No entries --"), None);
    }

    #[test]
    fn an_attempt_begins_with_what_leaves_a_device_useless() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kmsg");
        std::fs::write(&path, "").unwrap();
        let write = |line: &str| {
            use std::io::Write;
            let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
            writeln!(file, "3,1,5,-;NVRM: Xid (PCI:0000:3b:00): {line}").unwrap();
        };
        let mut faults = DeviceFaults {
            host: String::new(),
            log: Log::Kernel(KernelLog::open_at_end(&path).unwrap()),
            looking: None,
            inventory: Inventory::default(),
            found: Vec::new(),
        };
        write("13, x");
        write("79, x");
        let kinds = |faults: &mut DeviceFaults| -> Vec<(String, bool)> {
            faults.look(0, 1).into_iter().map(|it| (it.fault, it.is_earlier)).collect()
        };
        let both = [("Xid 79".to_owned(), false), ("Xid 13".to_owned(), false)];
        assert_eq!(kinds(&mut faults), both);
        write("31, x");
        faults.begin_attempt();
        assert_eq!(kinds(&mut faults), [("Xid 79".to_owned(), true)]);
    }
}
