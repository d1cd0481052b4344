//! Lists of hosts: `--hosts node1:4,node2:4`, and hostfiles as DeepSpeed and MPI have them.
//!
//! ```text
//! worker-0 slots=4               # DeepSpeed, Open MPI
//! worker-1 slots=4 max-slots=8   # Open MPI
//! worker-2:4                     # MPICH
//! ada@[fd00::7]:4                # a user and an IPv6 address
//! worker-3                       # the number of ranks as --nproc says;
//! worker-3                       # named twice: two ranks
//! ```

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use brigade_rank_env::text::escaped;

/// Host of a job, with its number of ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostSpec {
    /// User name for the login. With `None`, ssh's own settings decide.
    pub user: Option<String>,
    /// Host name, alias in ssh's settings, or address without brackets.
    pub name: String,
    /// Number of ranks (slots) on the host. With `None`, `--nproc` decides.
    pub slots: Option<usize>,
    /// Numbers of the GPUs that the host's ranks use. With `None`, `--devices` decides.
    pub devices: Option<Vec<usize>>,
}

/// Error for a list of hosts that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HostListError {
    /// The file does not exist or cannot be read.
    #[error("cannot read the hostfile {}: {reason}", escaped(path.display()))]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        reason: String,
    },
    /// An item of the list cannot be parsed.
    #[error("{}", escaped(format_args!("{place}: `{found}`: {expected}")))]
    Malformed {
        /// Place of the item in the list.
        place: Place,
        /// Text of the item.
        found: String,
        /// Description of the valid syntax.
        expected: String,
    },
    /// A selection of hosts and slots does not fit the list.
    #[error("{option} `{found}`: {expected}")]
    Selection {
        /// Name of the option.
        option: &'static str,
        /// Text of the option's value.
        found: String,
        /// Description of the valid values, or of the error.
        expected: String,
    },
    /// The list of hosts is empty.
    #[error(
        "{}: the list of hosts is empty; write one line for each host, as in `node1 slots=4`",
        escaped(origin)
    )]
    Empty {
        /// File or option that the list is from.
        origin: String,
    },
}

/// Place of an item in a list of hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// The item is in an option's value.
    Option {
        /// Number of the item, from 1.
        item: usize,
    },
    /// The item is in a file.
    File {
        /// Path of the file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
    },
}

impl HostSpec {
    /// Parses the value of `--hosts`: host names with a comma in between, each with or without `:N` ranks.
    ///
    /// ```
    /// use brigade_ssh::HostSpec;
    /// let hosts = HostSpec::parse_list("node1:4,ada@node2")?;
    /// assert_eq!((hosts[0].name.as_str(), hosts[0].slots), ("node1", Some(4)));
    /// assert_eq!(hosts[1].to_string(), "ada@node2");
    /// let error = HostSpec::parse_list("node1:4,node2:x").unwrap_err();
    /// assert_eq!(error.to_string(), "host 2 of --hosts: `node2:x`: expected a number of ranks after `:`");
    /// # Ok::<(), brigade_ssh::HostListError>(())
    /// ```
    ///
    /// # Errors
    /// An item of the list is not valid. The error names it and the expected syntax.
    pub fn parse_list(text: &str) -> Result<Vec<Self>, HostListError> {
        let mut hosts = Vec::new();
        for (i, item) in text.split(',').enumerate() {
            let host = parse_host(item.trim()).map_err(|expected| HostListError::Malformed {
                place: Place::Option { item: i + 1 },
                found: item.trim().to_owned(),
                expected,
            })?;
            add(&mut hosts, host);
        }
        Ok(hosts)
    }

    /// Reads a hostfile: one host per line, with its number of slots.
    ///
    /// # Errors
    /// The file cannot be read, or one of its lines is not valid. The error names the line and the expected syntax.
    pub fn read_file(path: &Path) -> Result<Vec<Self>, HostListError> {
        let text = fs::read(path).and_then(|bytes| {
            String::from_utf8(bytes).map_err(|_| io::Error::other("it is not text in UTF-8"))
        });
        let text = text.map_err(|error| HostListError::Unreadable {
            path: path.to_owned(),
            reason: error.to_string(),
        })?;
        Self::parse_file(&text, path)
    }

    /// Parses the text of a hostfile. The path is for error messages.
    ///
    /// # Errors
    /// Returns an error with the line that is not valid, and the expected syntax.
    pub fn parse_file(text: &str, path: &Path) -> Result<Vec<Self>, HostListError> {
        let mut hosts = Vec::new();
        for (i, line) in text.lines().enumerate() {
            let content = line.split('#').next().unwrap_or_default();
            let mut words = content.split_whitespace();
            let Some(first) = words.next() else { continue };
            let wrong = |found: &str, expected: String| HostListError::Malformed {
                place: Place::File { path: path.to_owned(), line: i + 1 },
                found: found.to_owned(),
                expected,
            };
            let mut host = parse_host(first).map_err(|expected| wrong(first, expected))?;
            let mut max = None;
            for word in words {
                let number =
                    |text: &str| parse_count(text).map_err(|expected| wrong(word, expected));
                match word.split_once('=') {
                    Some(("slots", _)) if host.slots.is_some() => {
                        let expected = "slots given twice".to_owned();
                        return Err(wrong(word, expected));
                    }
                    Some(("slots", value)) => host.slots = Some(number(value)?),
                    Some(("max-slots" | "max_slots", value)) => max = Some(number(value)?),
                    _ => return Err(wrong(word, "expected `slots=N`".to_owned())),
                }
            }
            if let (Some(max), Some(slots)) = (max, host.slots)
                && slots > max
            {
                let expected = format!("slots={slots} is more than max-slots={max}");
                return Err(wrong(content.trim(), expected));
            }
            add(&mut hosts, host);
        }
        if hosts.is_empty() {
            return Err(HostListError::Empty { origin: path.display().to_string() });
        }
        Ok(hosts)
    }

    /// Returns the host's name as an argument of ssh, with the user.
    #[must_use]
    pub fn destination(&self) -> String {
        match &self.user {
            Some(user) => format!("{user}@{}", self.name),
            None => self.name.clone(),
        }
    }
}

/// Formats the host as in a list of hosts, without the number of ranks.
impl fmt::Display for HostSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.destination())
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Option { item } => write!(f, "host {item} of --hosts"),
            Self::File { path, line } => write!(f, "{}, line {line}", path.display()),
        }
    }
}

/// A host that is named again has that many ranks more, one if no number stands, as with MPI.
fn add(hosts: &mut Vec<HostSpec>, host: HostSpec) {
    let same = |it: &&mut HostSpec| it.name == host.name && it.user == host.user;
    match hosts.iter_mut().find(same) {
        Some(known) => {
            known.slots = Some(known.slots.unwrap_or(1).saturating_add(host.slots.unwrap_or(1)));
        }
        None => hosts.push(host),
    }
}

/// Parses `[USER@]NAME[:N]`, with an IPv6 address in brackets. The error is the expected syntax.
fn parse_host(text: &str) -> Result<HostSpec, String> {
    let (user, rest) = match text.rsplit_once('@') {
        Some((user, rest)) => (Some(user), rest),
        None => (None, text),
    };
    // ssh puts it into commands of its settings (ProxyCommand, Match exec), which a shell runs.
    let in_a_user = |c: char| c.is_ascii_alphanumeric() || "._@\\-+".contains(c);
    let is_user =
        |user: &str| !user.is_empty() && !user.starts_with('-') && user.chars().all(in_a_user);
    if user.is_some_and(|user| !is_user(user)) {
        return Err("expected a user's name before `@`: letters, digits and ._@\\-+".to_owned());
    }
    let (name, count) = if let Some(rest) = rest.strip_prefix('[') {
        let (name, after) =
            rest.split_once(']').ok_or_else(|| "expected `]` after the address".to_owned())?;
        // With a zone: fe80::1%eth0.
        let (address, zone) = name.split_once('%').unwrap_or((name, "0"));
        let in_a_zone = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let is_zone = !zone.is_empty() && zone.chars().all(in_a_zone);
        if address.parse::<std::net::Ipv6Addr>().is_err() || !is_zone {
            return Err("expected an IPv6 address in the brackets".to_owned());
        }
        match after.strip_prefix(':') {
            Some(count) => (name, Some(count)),
            None if after.is_empty() => (name, None),
            None => return Err("expected `:N` or nothing after `]`".to_owned()),
        }
    } else if rest.parse::<std::net::Ipv6Addr>().is_ok() {
        return Err(format!("an IPv6 address needs brackets: `[{rest}]`"));
    } else {
        let (name, count) = match rest.split_once(':') {
            Some((name, count)) => (name, Some(count)),
            None => (rest, None),
        };
        // A name with a dash in front would be an option of ssh's.
        let plain = |c: char| c.is_alphanumeric() || matches!(c, '.' | '-' | '_');
        if name.is_empty() || name.starts_with('-') || !name.chars().all(plain) {
            return Err("expected the name of a host, as in `node1` or `node1:4`".to_owned());
        }
        (name, count)
    };
    let slots = count
        .map(|count| {
            parse_count(count).map_err(|error| match error.as_str() {
                NOT_A_COUNT => "expected a number of ranks after `:`".to_owned(),
                _ => error,
            })
        })
        .transpose()?;
    Ok(HostSpec { user: user.map(str::to_owned), name: name.to_owned(), slots, devices: None })
}

fn parse_count(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(0) => Err("expected at least 1: leave a host without ranks out of the list".to_owned()),
        Ok(count) if count <= MAX_SLOTS => Ok(count),
        Ok(_) => Err(format!("expected at most {MAX_SLOTS}")),
        Err(_) => Err(NOT_A_COUNT.to_owned()),
    }
}

const NOT_A_COUNT: &str = "expected a number, as in `slots=4`";
/// Maximum number of ranks of a host: more than a host can have processes.
const MAX_SLOTS: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    /// `user@name:slots`, blank in between.
    fn show(hosts: &[HostSpec]) -> String {
        let one = |host: &HostSpec| match host.slots {
            Some(slots) => format!("{host}:{slots}"),
            None => host.to_string(),
        };
        hosts.iter().map(one).collect::<Vec<_>>().join(" ")
    }

    fn file(text: &str) -> Result<String, String> {
        let hosts = HostSpec::parse_file(text, Path::new("hosts"));
        hosts.map(|hosts| show(&hosts)).map_err(|error| error.to_string())
    }

    #[test]
    fn hostfiles() {
        let table = [
            ("node1\n", "node1"),
            ("worker-0 slots=4\nworker-1 slots=2\n", "worker-0:4 worker-1:2"),
            ("  # comment\n\nworker-0\tslots=4 # four\r\n\r\n", "worker-0:4"),
            ("node1 slots=4 max-slots=8\nnode2 max_slots=8 slots=8", "node1:4 node2:8"),
            ("node1 max-slots=8", "node1"),
            ("node1:4\nnode2:4\n", "node1:4 node2:4"),
            ("node1\nnode1\nnode2\nnode1\n", "node1:3 node2"),
            ("node1 slots=2\nnode1 slots=3\n", "node1:5"),
            ("ada@node1:4\nnode1:4\n", "ada@node1:4 node1:4"),
            ("[fd00::7]:4\nada@[::1]\n", "fd00::7:4 ada@::1"),
            ("[fe80::1%eth0]:2", "fe80::1%eth0:2"),
            ("10.0.0.1 slots=1\nnode_3.example.org:1", "10.0.0.1:1 node_3.example.org:1"),
            ("a@b.c@node1", "a@b.c@node1"),
            (r"LAB\ada.l+x-1@node1", r"LAB\ada.l+x-1@node1"),
        ];
        for (text, expected) in table {
            assert_eq!(file(text).as_deref(), Ok(expected), "{text:?}");
        }
    }

    #[test]
    fn mistakes_in_hostfiles() {
        let table = [
            (
                "",
                "hosts: the list of hosts is empty; write one line for each host, as in `node1 slots=4`",
            ),
            (
                "# none\n",
                "hosts: the list of hosts is empty; write one line for each host, as in `node1 slots=4`",
            ),
            ("a\nb\nc slot=4\n", "hosts, line 3: `slot=4`: expected `slots=N`"),
            ("a 4", "hosts, line 1: `4`: expected `slots=N`"),
            ("a slots = 4", "hosts, line 1: `slots`: expected `slots=N`"),
            ("a slots=four", "hosts, line 1: `slots=four`: expected a number, as in `slots=4`"),
            ("a slots=-1", "hosts, line 1: `slots=-1`: expected a number, as in `slots=4`"),
            (
                "a slots=0",
                "hosts, line 1: `slots=0`: expected at least 1: leave a host without ranks out of the list",
            ),
            ("a slots=99999999", "hosts, line 1: `slots=99999999`: expected at most 1048576"),
            ("a:2 slots=2", "hosts, line 1: `slots=2`: slots given twice"),
            (
                "a slots=9 max-slots=8 # many",
                "hosts, line 1: `a slots=9 max-slots=8`: slots=9 is more than max-slots=8",
            ),
            ("a:", "hosts, line 1: `a:`: expected a number of ranks after `:`"),
            (":4", "hosts, line 1: `:4`: expected the name of a host, as in `node1` or `node1:4`"),
            (
                "-oProxyCommand=x",
                "hosts, line 1: `-oProxyCommand=x`: expected the name of a host, as in `node1` or `node1:4`",
            ),
            (
                "a,b",
                "hosts, line 1: `a,b`: expected the name of a host, as in `node1` or `node1:4`",
            ),
            (
                "@a",
                "hosts, line 1: `@a`: expected a user's name before `@`: letters, digits and ._@\\-+",
            ),
            (
                "-l@a",
                "hosts, line 1: `-l@a`: expected a user's name before `@`: letters, digits and ._@\\-+",
            ),
            (
                "a$(id)@b",
                "hosts, line 1: `a$(id)@b`: expected a user's name before `@`: letters, digits and ._@\\-+",
            ),
            (
                "a`id`@b",
                "hosts, line 1: `a`id`@b`: expected a user's name before `@`: letters, digits and ._@\\-+",
            ),
            (
                "a;id@b",
                "hosts, line 1: `a;id@b`: expected a user's name before `@`: letters, digits and ._@\\-+",
            ),
            (
                "[fe80::1%$(id)]",
                "hosts, line 1: `[fe80::1%$(id)]`: expected an IPv6 address in the brackets",
            ),
            ("[fe80::1%]", "hosts, line 1: `[fe80::1%]`: expected an IPv6 address in the brackets"),
            ("fd00::7", "hosts, line 1: `fd00::7`: an IPv6 address needs brackets: `[fd00::7]`"),
            ("[fd00::7", "hosts, line 1: `[fd00::7`: expected `]` after the address"),
            ("[node1]:4", "hosts, line 1: `[node1]:4`: expected an IPv6 address in the brackets"),
            ("[::1]4", "hosts, line 1: `[::1]4`: expected `:N` or nothing after `]`"),
        ];
        for (text, expected) in table {
            assert_eq!(file(text).unwrap_err(), expected, "{text:?}");
        }
    }

    #[test]
    fn lists() {
        let list = |text| {
            let hosts = HostSpec::parse_list(text);
            hosts.map(|hosts| show(&hosts)).map_err(|error| error.to_string())
        };
        assert_eq!(list("node1:4, node2:4").as_deref(), Ok("node1:4 node2:4"));
        assert_eq!(list("a,b,a:3").as_deref(), Ok("a:4 b"));
        assert_eq!(list("[::1]:2,localhost").as_deref(), Ok("::1:2 localhost"));
        let expected = "expected the name of a host, as in `node1` or `node1:4`";
        assert_eq!(list("a,,b").unwrap_err(), format!("host 2 of --hosts: ``: {expected}"));
        assert_eq!(list("").unwrap_err(), format!("host 1 of --hosts: ``: {expected}"));
    }

    #[test]
    fn files_that_cannot_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hosts");
        let error = HostSpec::read_file(&path).unwrap_err().to_string();
        assert!(error.ends_with("hosts: No such file or directory (os error 2)"), "{error}");
        fs::write(&path, b"node1\xff\n").unwrap();
        let error = HostSpec::read_file(&path).unwrap_err().to_string();
        assert!(error.ends_with("it is not text in UTF-8"), "{error}");
        fs::write(&path, b"node1 slots=2\n").unwrap();
        assert_eq!(show(&HostSpec::read_file(&path).unwrap()), "node1:2");
    }
}
