//! Facts about the resolution of host names.

use std::net::{IpAddr, ToSocketAddrs};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use brigade_hardware::{Sources, within};

/// Host name with its addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Resolution {
    /// Host name that was resolved.
    pub name: String,
    /// Addresses, in the order in which programs try them.
    pub addresses: Vec<IpAddr>,
    /// Reason why the name has no address.
    pub error: Option<String>,
    /// First line of `/etc/hosts` that contains the name, with its line number.
    pub hosts_line: Option<String>,
}

/// Resolves a name through the operating system. A name server that does not answer counts as an error.
#[must_use]
pub fn resolve(name: &str) -> Resolution {
    let asked = (name.to_owned(), 0);
    let answer = within(TIMEOUT, move || asked.to_socket_addrs().map(Vec::from_iter));
    let (addresses, error) = match answer {
        Some(Ok(found)) => {
            let mut addresses: Vec<IpAddr> = Vec::new();
            for address in found.iter().map(std::net::SocketAddr::ip) {
                if !addresses.contains(&address) {
                    addresses.push(address);
                }
            }
            (addresses, None)
        }
        Some(Err(error)) => (Vec::new(), Some(plain(&error.to_string()))),
        None => (Vec::new(), Some(format!("no answer within {} s", TIMEOUT.as_secs()))),
    };
    Resolution { name: name.to_owned(), addresses, error, hosts_line: None }
}

/// Names that are being resolved.
pub(super) struct Pending(Vec<JoinHandle<Resolution>>);

/// Starts to resolve the names, the host's own first.
pub(super) fn start(sources: &Arc<Sources>, own: &str, others: &[String]) -> Pending {
    let mut names = vec![own.to_owned()];
    names.extend(others.iter().filter(|name| *name != own).cloned());
    names.retain(|name| !name.is_empty());
    let file = sources.read("/etc/hosts").unwrap_or_default();
    let ask = |name: String| {
        let hosts_line = line_of(&file, &name);
        std::thread::spawn(move || Resolution { hosts_line, ..resolve(&name) })
    };
    Pending(names.into_iter().map(ask).collect())
}

impl Pending {
    pub(super) fn wait(self) -> Vec<Resolution> {
        self.0.into_iter().filter_map(|thread| thread.join().ok()).collect()
    }
}

fn line_of(file: &str, name: &str) -> Option<String> {
    file.lines().enumerate().find_map(|(index, line)| {
        let text = line.split('#').next().unwrap_or_default();
        let named = text.split_whitespace().skip(1).any(|word| word.eq_ignore_ascii_case(name));
        named.then(|| format!("{}: {}", index + 1, line.trim()))
    })
}

/// Removes the text that the standard library puts around the operating system's message.
fn plain(error: &str) -> String {
    error.strip_prefix("failed to lookup address information: ").unwrap_or(error).to_owned()
}

const TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_hosts_file() {
        let file = "127.0.0.1 localhost\n# 10.0.0.9 node1\n127.0.1.1\tnode1.lan  Node1 # ours\n";
        assert_eq!(line_of(file, "node1").unwrap(), "3: 127.0.1.1\tnode1.lan  Node1 # ours");
        assert_eq!(line_of(file, "node"), None);
        assert_eq!(line_of(file, "127.0.0.1"), None);
    }

    #[test]
    fn addresses_are_names_too() {
        let found = resolve("192.0.2.7");
        assert_eq!(found.addresses, ["192.0.2.7".parse::<IpAddr>().unwrap()]);
        assert_eq!(found.error, None);
    }
}
