//! Sets of processors.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::path::Path;
use std::str::FromStr;

use nix::sched::{sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use crate::ValueError;

/// Set of logical processors, by the system's numbers. Written in the kernel's list format.
///
/// ```
/// let cpus: brigade_launch::CpuSet = "0-2,8".parse()?;
/// assert_eq!(cpus.0.len(), 4);
/// assert_eq!(cpus.to_string(), "0-2,8");
/// # Ok::<(), brigade_launch::ValueError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuSet(pub BTreeSet<usize>);

impl CpuSet {
    /// Returns the processors that this thread may use. `root` is the root of the file system.
    pub(crate) fn allowed(root: &Path) -> Self {
        match sched_getaffinity(Pid::from_raw(0)) {
            Ok(mask) => {
                let all = 0..nix::sched::CpuSet::count();
                Self(all.filter(|cpu| mask.is_set(*cpu).unwrap_or(false)).collect())
            }
            // The system has more processors than the call supports.
            Err(_) => fs::read_to_string(root.join("proc/self/status"))
                .ok()
                .and_then(|status| status_list(&status)?.parse().ok())
                .unwrap_or_default(),
        }
    }

    /// Binds this thread to these processors. The binding is inherited through `exec`.
    pub(crate) fn bind(&self) -> io::Result<()> {
        let mut mask = nix::sched::CpuSet::new();
        self.0.iter().try_for_each(|cpu| mask.set(*cpu))?;
        sched_setaffinity(Pid::from_raw(0), &mask)?;
        Ok(())
    }
}

impl FromIterator<usize> for CpuSet {
    fn from_iter<T: IntoIterator<Item = usize>>(cpus: T) -> Self {
        Self(cpus.into_iter().collect())
    }
}

impl FromStr for CpuSet {
    type Err = ValueError;

    fn from_str(text: &str) -> Result<Self, ValueError> {
        let wrong = || ValueError::expected("processors, such as 0-3,8", text);
        let number = |text: &str| text.parse().ok().filter(|cpu| *cpu < MOST).ok_or_else(wrong);
        let mut cpus = BTreeSet::new();
        for part in text.trim().split(',').filter(|part| !part.is_empty()) {
            match part.split_once('-') {
                None => {
                    cpus.insert(number(part)?);
                }
                Some((first, last)) => cpus.extend(number(first)?..=number(last)?),
            }
        }
        Ok(Self(cpus))
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.0.iter().copied().peekable();
        let mut comma = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while let Some(next) = cpus.next_if_eq(&(last + 1)) {
                last = next;
            }
            write!(f, "{comma}{first}")?;
            if last > first {
                write!(f, "-{last}")?;
            }
            comma = ",";
        }
        Ok(())
    }
}

fn status_list(status: &str) -> Option<&str> {
    status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
}

/// Maximum number of a processor: above the limit of any kernel.
const MOST: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_as_the_kernel_writes_them() {
        for text in ["", "0", "0-3", "0,2,4", "0-1,3-4,10-127"] {
            assert_eq!(text.parse::<CpuSet>().unwrap().to_string(), text);
        }
        assert_eq!(" 0-1,1-2\n".parse::<CpuSet>().unwrap().to_string(), "0-2");
        assert_eq!("3-1".parse::<CpuSet>().unwrap().to_string(), "");
        for wrong in ["a", "0-", "-1", "0--1", "0-4294967296", "99999999999999999999"] {
            assert!(wrong.parse::<CpuSet>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_this_thread_may_use() {
        let allowed = CpuSet::allowed(Path::new("/"));
        let status = fs::read_to_string("/proc/thread-self/status").unwrap();
        assert_eq!(status_list(&status).unwrap().trim(), allowed.to_string());
        allowed.bind().unwrap();
        assert!(CpuSet::default().bind().is_err(), "no processor at all");
    }
}
