//! Control group whose memory can be reduced or limited.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// Control group for processes that are to run out of memory.
#[derive(Debug)]
pub struct MemoryGroup {
    path: PathBuf,
    parent: PathBuf,
    /// File with the limit, and its content without a limit.
    limit: (&'static str, &'static str),
}

impl MemoryGroup {
    /// Creates an empty group.
    ///
    /// # Panics
    /// Panics when this process may not create groups with a memory controller: tests that use it name
    /// `brigade_test_needs::Need::MemoryGroups`.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "makes a folder of the system's")]
    pub fn new() -> Self {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("brigade-test-hosts-{}-{number}", std::process::id());
        let make = |(root, limit): (&str, (&'static str, &'static str))| {
            let path = Path::new(root).join(&name);
            fs::create_dir(&path).ok()?;
            if path.join(limit.0).exists() {
                return Some(Self { path, parent: PathBuf::from(root), limit });
            }
            let _ = fs::remove_dir(&path);
            None
        };
        // Directly below the root, as `Need::MemoryGroups` tests it: the group of this process may have no controllers,
        // like a scope of systemd.
        let this = ROOTS.into_iter().find_map(make).expect("a control group for memory");
        if this.limit.0 == "memory.limit_in_bytes" {
            this.write("memory.oom_control", "1").expect("switch off the killer of tasks");
        }
        this
    }

    /// Moves a process into the group, with everything that it starts from then on.
    ///
    /// # Panics
    /// Panics if the process cannot be moved.
    pub fn add(&self, pid: i32) {
        self.write("cgroup.procs", &pid.to_string()).expect("move a process into a group");
    }

    /// Reduces the memory of the group's processes to this many bytes, or to what they cannot release.
    pub fn squeeze(&self, bytes: u64) {
        // A limit below what cannot be released is refused.
        for bytes in [bytes, 2 * bytes, 4 * bytes, 8 * bytes, 16 * bytes] {
            if self.write(self.limit.0, &bytes.to_string()).is_ok() {
                return;
            }
        }
    }

    /// Limits the group's processes to this many bytes, swap included: the kernel kills one that needs more.
    ///
    /// # Panics
    /// Panics if the limit cannot be set.
    pub fn cap(&self, bytes: u64) {
        let (file, _) = self.limit;
        if file == "memory.limit_in_bytes" {
            self.write("memory.oom_control", "0").expect("switch on the killer of tasks");
            self.write(file, &bytes.to_string()).expect("limit the memory of a group");
            return;
        }
        // If the kernel does not count swap, the file does not exist.
        let _ = self.write("memory.swap.max", "0");
        self.write("memory.max", &bytes.to_string()).expect("limit the memory of a group");
    }

    /// Returns a shell script that enters the group and replaces itself by the program in its arguments.
    #[must_use]
    pub fn script(&self) -> String {
        let processes = self.path.join("cgroup.procs");
        format!("echo $$ >{} && exec \"$0\" \"$@\"", processes.display())
    }

    /// Removes the limit of the group.
    pub fn release(&self) {
        let _ = self.write(self.limit.0, self.limit.1);
    }

    fn write(&self, file: &str, text: &str) -> io::Result<()> {
        fs::write(self.path.join(file), text)
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        self.release();
        let inside = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        for pid in inside.lines() {
            let _ = fs::write(self.parent.join("cgroup.procs"), pid);
        }
        // Its processes may need a moment to end.
        for _ in 0..1000 {
            match fs::remove_dir(&self.path) {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    thread::sleep(Duration::from_millis(5));
                }
                _ => return,
            }
        }
    }
}

/// Settings of version 2 and version 1: the root, the file that limits a group, and its content without a limit. In
/// version 2, a task that uses more is throttled; in version 1 it waits, because the out-of-memory killer is switched
/// off.
const ROOTS: [(&str, (&str, &str)); 2] = [
    ("/sys/fs/cgroup", ("memory.high", "max")),
    ("/sys/fs/cgroup/memory", ("memory.limit_in_bytes", "-1")),
];

static NEXT: AtomicUsize = AtomicUsize::new(0);
