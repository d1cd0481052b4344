//! Selection of hosts and slots from a list: DeepSpeed's `--include` and `--exclude`.
//!
//! ```text
//! worker-0@worker-1:0,2     # all slots of worker-0, two of worker-1's
//! ```

use crate::{HostListError, HostSpec};

/// Selection of hosts and slots to include or exclude, in DeepSpeed's syntax.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection<'t> {
    /// Includes only these hosts and slots.
    Include(&'t str),
    /// Excludes these hosts and slots.
    Exclude(&'t str),
}

impl Selection<'_> {
    /// Returns the selected hosts, in the order of the list. Where only some slots of a host are selected, their
    /// numbers are those of the GPUs that its ranks use.
    ///
    /// ```
    /// use brigade_ssh::{HostSpec, Selection};
    /// let hosts = HostSpec::parse_list("worker-0:4,worker-1:4,worker-2:4")?;
    /// let hosts = Selection::Include("worker-0@worker-1:0,2").of(hosts)?;
    /// assert_eq!((hosts[0].slots, hosts[0].devices.as_deref()), (Some(4), None));
    /// assert_eq!((hosts[1].slots, hosts[1].devices.as_deref()), (Some(2), Some(&[0, 2][..])));
    /// assert_eq!(hosts.len(), 2);
    /// # Ok::<(), brigade_ssh::HostListError>(())
    /// ```
    ///
    /// # Errors
    /// A part of the selection is not valid, or does not fit the hosts. The error names it.
    pub fn of(self, hosts: Vec<HostSpec>) -> Result<Vec<HostSpec>, HostListError> {
        let (Self::Include(text) | Self::Exclude(text)) = self;
        let mut named: Vec<Option<Slots>> = vec![None; hosts.len()];
        for item in text.split('@').map(str::trim) {
            let (name, slots) = self.parse(item)?;
            let Some(i) = hosts.iter().position(|it| it.name == name) else {
                let known: Vec<String> = hosts.iter().map(ToString::to_string).collect();
                let expected = format!("expected a host of the list: {}", known.join(", "));
                return Err(self.wrong(item, expected));
            };
            if named[i].is_some() {
                return Err(self.wrong(item, "this host is given twice".to_owned()));
            }
            let too_large = |slot: &&usize| hosts[i].slots.is_some_and(|count| **slot >= count);
            if let Slots::Some(list) = &slots
                && let Some(slot) = list.iter().find(too_large)
            {
                let last = hosts[i].slots.unwrap_or(1).saturating_sub(1);
                let expected =
                    format!("there is no slot {slot}: the last slot of {name} is {last}");
                return Err(self.wrong(item, expected));
            }
            named[i] = Some(slots);
        }
        let mut left = Vec::new();
        for (host, named) in hosts.into_iter().zip(named) {
            left.extend(match self {
                Self::Include(_) => named.and_then(|slots| slots.with(host)),
                Self::Exclude(_) => match named {
                    None => Some(host),
                    Some(slots) => self.without(host, slots)?,
                },
            });
        }
        if left.is_empty() {
            return Err(self.wrong(text, "no host is left".to_owned()));
        }
        Ok(left)
    }

    fn without(self, host: HostSpec, slots: Slots) -> Result<Option<HostSpec>, HostListError> {
        let Slots::Some(list) = slots else { return Ok(None) };
        let Some(count) = host.slots else {
            let expected = format!(
                "the number of slots of {} is unknown: write slots=N in the list of hosts",
                host.name
            );
            return Err(self.wrong(&host.name, expected));
        };
        let left: Vec<usize> = (0..count).filter(|slot| !list.contains(slot)).collect();
        Ok(Slots::Some(left).with(host))
    }

    /// `NAME` or `NAME:SLOT,SLOT`.
    fn parse(self, item: &str) -> Result<(&str, Slots), HostListError> {
        let expected =
            "expected HOST or HOST:SLOT,SLOT, with @ in between, as in worker-0@worker-1:0,2";
        let wrong = || self.wrong(item, expected.to_owned());
        let (name, list) = match item.rsplit_once(':') {
            Some((name, list)) => (name, Some(list)),
            None => (item, None),
        };
        if name.is_empty() {
            return Err(wrong());
        }
        let Some(list) = list else { return Ok((name, Slots::All)) };
        let mut slots = Vec::new();
        for slot in list.split(',') {
            let slot: usize = slot.trim().parse().map_err(|_| wrong())?;
            if slots.contains(&slot) {
                return Err(self.wrong(item, format!("duplicate slot {slot}")));
            }
            slots.push(slot);
        }
        slots.sort_unstable();
        Ok((name, Slots::Some(slots)))
    }

    fn wrong(self, found: &str, expected: String) -> HostListError {
        let option = match self {
            Self::Include(_) => "--include",
            Self::Exclude(_) => "--exclude",
        };
        HostListError::Selection { option, found: found.to_owned(), expected }
    }
}

/// Slots of one host.
#[derive(Clone, Debug)]
enum Slots {
    All,
    Some(Vec<usize>),
}

impl Slots {
    /// The host with these slots only; `None` if there are none.
    fn with(self, host: HostSpec) -> Option<HostSpec> {
        match self {
            Self::All => Some(host),
            Self::Some(slots) if slots.is_empty() => None,
            Self::Some(slots) => {
                Some(HostSpec { slots: Some(slots.len()), devices: Some(slots), ..host })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "worker-0:4,ada@worker-1:4,worker-2:2,worker-3";

    fn select(selection: Selection<'_>) -> Result<String, String> {
        let hosts = HostSpec::parse_list(LIST).unwrap();
        let show = |host: &HostSpec| {
            let slots = host.slots.map(|it| format!(":{it}")).unwrap_or_default();
            let devices = host.devices.as_ref().map(|it| format!("{it:?}")).unwrap_or_default();
            format!("{}{slots}{devices}", host.name)
        };
        let hosts = selection.of(hosts).map_err(|error| error.to_string())?;
        Ok(hosts.iter().map(show).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn selections() {
        use Selection::{Exclude, Include};

        let table = [
            (Include("worker-2"), "worker-2:2"),
            (Include("worker-1:0,2@worker-0"), "worker-0:4 worker-1:2[0, 2]"),
            (Include("worker-1:2, 0"), "worker-1:2[0, 2]"),
            (Include("worker-3:1,5"), "worker-3:2[1, 5]"),
            (Exclude("worker-1@worker-3"), "worker-0:4 worker-2:2"),
            (Exclude("worker-1:0@worker-3"), "worker-0:4 worker-1:3[1, 2, 3] worker-2:2"),
            (Exclude("worker-2:0,1@worker-1@worker-3"), "worker-0:4"),
        ];
        for (selection, expected) in table {
            assert_eq!(select(selection).as_deref(), Ok(expected), "{selection:?}");
        }
        // There is no place for a user in DeepSpeed's syntax.
        let error = select(Include("ada@worker-1")).unwrap_err();
        assert!(error.starts_with("--include `ada`: expected a host of the list: "), "{error}");
    }

    #[test]
    fn mistakes() {
        use Selection::{Exclude, Include};

        let form =
            "expected HOST or HOST:SLOT,SLOT, with @ in between, as in worker-0@worker-1:0,2";
        let table = [
            (Include(""), format!("--include ``: {form}")),
            (Include("worker-0@"), format!("--include ``: {form}")),
            (Include("worker-0:x"), format!("--include `worker-0:x`: {form}")),
            (Include("worker-0:"), format!("--include `worker-0:`: {form}")),
            (Exclude("worker-0:-1"), format!("--exclude `worker-0:-1`: {form}")),
            (Include(":0"), format!("--include `:0`: {form}")),
            (
                Include("worker-0:4"),
                "--include `worker-0:4`: there is no slot 4: the last slot of worker-0 is 3".into(),
            ),
            (Include("worker-0:1,1"), "--include `worker-0:1,1`: duplicate slot 1".into()),
            (
                Include("worker-0@worker-0:1"),
                "--include `worker-0:1`: this host is given twice".into(),
            ),
            (
                Exclude("worker-3:0"),
                "--exclude `worker-3`: the number of slots of worker-3 is unknown: write slots=N in the list of \
                 hosts"
                    .into(),
            ),
            (
                Exclude("worker-0@worker-1@worker-2@worker-3"),
                "--exclude `worker-0@worker-1@worker-2@worker-3`: no host is left".into(),
            ),
        ];
        for (selection, expected) in table {
            assert_eq!(select(selection).unwrap_err(), expected, "{selection:?}");
        }
        let error = select(Include("worker-9")).unwrap_err();
        let known = "worker-0, ada@worker-1, worker-2, worker-3";
        assert_eq!(error, format!("--include `worker-9`: expected a host of the list: {known}"));
    }
}
