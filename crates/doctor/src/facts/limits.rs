//! Limits of a process, as `ulimit` shows them.

use serde::{Deserialize, Serialize};

use brigade_hardware::Sources;

/// The limits that training programs run into.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Limits {
    /// Files and sockets open at a time.
    pub open_files: Option<Limit>,
    /// Bytes of memory that may not be swapped: what InfiniBand registers.
    pub locked_bytes: Option<Limit>,
    /// Processes and threads of this user.
    pub processes: Option<Limit>,
}

/// One limit; `None` where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Limit {
    /// What holds now.
    pub soft: Option<u64>,
    /// What a process may raise it to.
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
