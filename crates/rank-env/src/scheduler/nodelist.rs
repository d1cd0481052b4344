//! Slurm's short forms: `node[01-03,07],gpu-1` for hosts, `2(x3),1` for tasks per host.

/// Expands a compressed list of hosts, in its order.
///
/// A bracket holds numbers and ranges, with their leading zeros; a name may have several brackets, of which the last
/// one varies fastest.
///
/// # Errors
/// The text is not a valid list: brackets that do not match, a range that runs backwards, more than [`MAX_HOSTS`]
/// hosts, a name of more than [`MAX_NAME_LEN`] bytes.
///
/// ```
/// use brigade_rank_env::scheduler::expand_hosts;
/// assert_eq!(expand_hosts("node[08-10],gpu-1")?, ["node08", "node09", "node10", "gpu-1"]);
/// assert_eq!(expand_hosts("r[1-2]n[0,5]")?, ["r1n0", "r1n5", "r2n0", "r2n5"]);
/// assert!(expand_hosts("node[1-").is_err());
/// # Ok::<(), String>(())
/// ```
pub fn expand_hosts(list: &str) -> Result<Vec<String>, String> {
    let mut hosts = Vec::new();
    for name in split_outside_brackets(list)? {
        let mut variants = vec![String::new()];
        let mut rest = name;
        while let Some((before, after)) = rest.split_once('[') {
            let (inside, after) = after.split_once(']').ok_or_else(|| unmatched(name))?;
            let numbers = expand_numbers(inside)?;
            let long = |list: &[String]| list.iter().map(String::len).max().unwrap_or(0);
            if long(&variants) + before.len() + long(&numbers) > MAX_NAME_LEN {
                return Err(too_long());
            }
            if hosts.len() + variants.len().saturating_mul(numbers.len()) > MAX_HOSTS {
                return Err(format!("has more than {MAX_HOSTS} hosts"));
            }
            variants = variants
                .iter()
                .flat_map(|start| numbers.iter().map(move |n| format!("{start}{before}{n}")))
                .collect();
            rest = after;
        }
        for variant in &mut variants {
            if variant.len() + rest.len() > MAX_NAME_LEN {
                return Err(too_long());
            }
            variant.push_str(rest);
        }
        hosts.append(&mut variants);
    }
    Ok(hosts)
}

/// Expands a compressed list of task counts: the number of tasks on each host, in the order of the list of hosts.
///
/// # Errors
/// The text is not a valid list. The error describes the problem.
///
/// ```
/// use brigade_rank_env::scheduler::expand_tasks;
/// assert_eq!(expand_tasks("2(x3),1")?, [2, 2, 2, 1]);
/// # Ok::<(), String>(())
/// ```
pub fn expand_tasks(text: &str) -> Result<Vec<usize>, String> {
    let mut tasks = Vec::new();
    for part in text.trim().split(',') {
        let (count, hosts) = match part.split_once("(x") {
            Some((count, times)) => (count, times.strip_suffix(')').unwrap_or_default()),
            None => (part, "1"),
        };
        let (Ok(count), Ok(hosts)) = (count.parse::<usize>(), hosts.parse::<usize>()) else {
            return Err(format!("has a part {part:?}, which is not like 2 or 2(x3)"));
        };
        if tasks.len().saturating_add(hosts) > MAX_HOSTS {
            return Err(format!("has more than {MAX_HOSTS} hosts"));
        }
        tasks.extend(std::iter::repeat_n(count, hosts));
    }
    Ok(tasks)
}

/// Maximum number of hosts in a list. No cluster has more, and a malformed list must not fill the memory.
pub const MAX_HOSTS: usize = 1 << 17;
/// Maximum length of a host name, as in DNS.
pub const MAX_NAME_LEN: usize = 253;

fn too_long() -> String {
    format!("has a host whose name is longer than {MAX_NAME_LEN} bytes")
}

fn split_outside_brackets(list: &str) -> Result<Vec<&str>, String> {
    let mut names = Vec::new();
    let (mut start, mut inside) = (0, false);
    for (at, character) in list.char_indices() {
        match character {
            '[' | ']' if inside == (character == '[') => return Err(unmatched(list)),
            '[' => inside = true,
            ']' => inside = false,
            ',' if !inside => {
                names.push(list[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    names.push(list[start..].trim());
    if inside {
        return Err(unmatched(list));
    }
    if names.iter().any(|name| name.is_empty()) {
        return Err("has a host without a name".to_owned());
    }
    Ok(names)
}

fn unmatched(text: &str) -> String {
    format!("has a bracket without its other half in {text:?}")
}

/// `01-03,07` to 01, 02, 03, 07.
fn expand_numbers(inside: &str) -> Result<Vec<String>, String> {
    let mut numbers = Vec::new();
    for part in inside.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        let range = match (first.parse::<u64>(), last.parse::<u64>()) {
            (Ok(from), Ok(to)) if from <= to && digits(first) && digits(last) => from..=to,
            _ => return Err(format!("has a range {part:?}, which is not like 7 or 01-12")),
        };
        // Before they are written out: a few characters stand for many.
        if range.end() - range.start() >= (MAX_HOSTS - numbers.len().min(MAX_HOSTS)) as u64 {
            return Err(format!("has more than {MAX_HOSTS} hosts"));
        }
        // Leading zeros give the width of the numbers; without any, numbers are not padded.
        let width = if first.starts_with('0') { first.len() } else { 0 };
        if width > MAX_NAME_LEN {
            return Err(too_long());
        }
        numbers.extend(range.map(|number| format!("{number:0width$}")));
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts() {
        // As `scontrol show hostnames` expands them.
        let table: [(&str, &[&str]); 12] = [
            ("n1", &["n1"]),
            ("n1,n2", &["n1", "n2"]),
            ("node[1-3]", &["node1", "node2", "node3"]),
            ("node[01-03,07]", &["node01", "node02", "node03", "node07"]),
            ("node[8-11]", &["node8", "node9", "node10", "node11"]),
            ("node[098-101]", &["node098", "node099", "node100", "node101"]),
            ("node[01-03,07],gpu-1", &["node01", "node02", "node03", "node07", "gpu-1"]),
            ("gpu-1,node[2]", &["gpu-1", "node2"]),
            ("tux[1-2]-ib.example.org", &["tux1-ib.example.org", "tux2-ib.example.org"]),
            ("r[1-2]n[0,5]", &["r1n0", "r1n5", "r2n0", "r2n5"]),
            ("node[3,1-2]", &["node3", "node1", "node2"]),
            ("a[0-1]b[00-01]c", &["a0b00c", "a0b01c", "a1b00c", "a1b01c"]),
        ];
        for (list, expected) in table {
            assert_eq!(expand_hosts(list).unwrap(), expected, "{list}");
        }
    }

    #[test]
    fn broken_lists_are_refused() {
        for (list, expected) in [
            ("", "has a host without a name"),
            ("a,,b", "has a host without a name"),
            ("node[1-2", "has a bracket without its other half"),
            ("node1-2]", "has a bracket without its other half"),
            ("node[1[2]]", "has a bracket without its other half"),
            ("node[]", "has a range \"\", which"),
            ("node[3-1]", "has a range \"3-1\", which"),
            ("node[a-b]", "has a range \"a-b\", which"),
            ("node[+1-2]", "has a range \"+1-2\", which"),
            ("bgl[000x133]", "has a range \"000x133\", which"),
            ("node[0-99999999999]", "has more than"),
            ("node[0-18446744073709551615]", "has more than"),
            ("a[0-99999]b[0-99999]", "has more than"),
        ] {
            let error = expand_hosts(list).expect_err(list);
            assert!(error.starts_with(expected), "{list}: {error}");
        }
    }

    #[test]
    fn a_short_list_does_not_become_long() {
        let zeros = "0".repeat(10_000);
        for (list, expected) in [
            (format!("node[{zeros}1-{zeros}100000]"), "longer than 253 bytes"),
            (format!("{}[1-100000]", "n".repeat(10_000)), "longer than 253 bytes"),
            (format!("n[1-100000]{}", "n".repeat(10_000)), "longer than 253 bytes"),
            (format!("n[{}]", vec!["0-99999"; 1000].join(",")), "has more than 131072 hosts"),
            ("a[1-100]b[1-100]c[1-100]".to_owned(), "has more than 131072 hosts"),
        ] {
            let error = expand_hosts(&list).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        assert_eq!(expand_hosts("n[0-131071]").unwrap().len(), MAX_HOSTS);
    }

    #[test]
    fn tasks() {
        for (text, expected) in [
            ("1", &[1][..]),
            ("2,1", &[2, 1]),
            ("1(x2)", &[1, 1]),
            ("2(x3),1", &[2, 2, 2, 1]),
            ("4,2(x2),1", &[4, 2, 2, 1]),
        ] {
            assert_eq!(expand_tasks(text).unwrap(), expected, "{text}");
        }
        for text in ["", "x", "2(x)", "2(x3", "2(3)", "1(x99999999999)", "-1"] {
            assert!(expand_tasks(text).is_err(), "{text}");
        }
    }
}
