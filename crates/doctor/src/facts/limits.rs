//! Facts about the limits of a process, as `ulimit` shows them.

use serde::{Deserialize, Serialize};

use brigade_hardware::Sources;

/// Process limits that training programs reach.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Limits {
    /// Maximum number of open files and sockets.
    pub open_files: Option<Limit>,
    /// Maximum locked memory in bytes, which InfiniBand needs for registration.
    pub locked_bytes: Option<Limit>,
    /// Maximum number of processes and threads of this user.
    pub processes: Option<Limit>,
}

/// Soft and hard value of one limit. `None` means unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Limit {
    /// Current limit of the process.
    pub soft: Option<u64>,
    /// Maximum to which a process may raise the limit.
    pub hard: Option<u64>,
}

impl Limits {
    pub(super) fn gather(sources: &Sources) -> Self {
        let text = sources.read("/proc/self/limits").unwrap_or_default();
        Self {
            open_files: limit(&text, "Max open files"),
            locked_bytes: limit(&text, "Max locked memory"),
            processes: limit(&text, "Max processes"),
        }
    }
}

fn limit(text: &str, name: &str) -> Option<Limit> {
    let mut values = text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace();
    let mut value = || values.next().map(|it| it.parse().ok());
    Some(Limit { soft: value()?, hard: value()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read() {
        let text = "Limit                     Soft Limit           Hard Limit           Units     \n\
                    Max processes             95000                unlimited            processes \n\
                    Max open files            1024                 524288               files     \n";
        assert_eq!(
            limit(text, "Max open files"),
            Some(Limit { soft: Some(1024), hard: Some(524_288) })
        );
        assert_eq!(limit(text, "Max processes"), Some(Limit { soft: Some(95_000), hard: None }));
        assert_eq!(limit(text, "Max locked memory"), None);
    }
}
