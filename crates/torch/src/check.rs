//! Debug mode: before each collective, the ranks compare their calls.
//!
//! Each rank writes a record of its call into the store and reads those of the others, so that a rank with a different
//! call is reported before the others wait for it. It costs a few round trips per operation, so use it to find a fault,
//! not for training.

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::fmt;
use std::panic::Location;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::dtype::type_name;
use crate::error::{Error, TorchError};
use crate::group::ProcessGroup;

/// A difference between the ranks' next operations, found in debug mode.
#[derive(Debug)]
#[non_exhaustive]
pub struct Desync {
    /// Name of the group.
    pub group: String,
    /// Rank that reports the difference.
    pub rank: usize,
    /// Call of each rank that made one, such as `all_reduce Sum of float32 [2, 3] at src/main.rs:10`.
    pub calls: BTreeMap<usize, String>,
    /// Ranks whose call differs from that of the majority. If there is no majority, the ranks whose call differs from
    /// that of the lowest rank.
    pub differing: Vec<usize>,
    /// Ranks that made no call within the time limit, each with its previous call, or `None` if it has made none.
    pub absent: BTreeMap<usize, Option<String>>,
    /// Time limit of the group.
    pub limit: Duration,
}

impl fmt::Display for Desync {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { group, calls, differing, absent, limit, .. } = self;
        let rest: Vec<usize> =
            calls.keys().copied().filter(|rank| !differing.contains(rank)).collect();
        let common = rest.first().and_then(|rank| calls.get(rank)).map_or("nothing", |call| call);
        write!(
            f,
            "the ranks of group {group:?} run different operations: {} in {common}",
            Ranks(&rest)
        )?;
        for rank in differing {
            write!(f, "; rank {rank} is in {}", calls.get(rank).map_or("nothing", |call| call))?;
        }
        for (rank, last) in absent {
            write!(f, "; rank {rank} reached no operation within {limit:?}")?;
            match last {
                Some(last) => write!(f, ", its last was {last}")?,
                None => write!(f, " and ran none before")?,
            }
        }
        Ok(())
    }
}

struct Ranks<'a>(&'a [usize]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [one] => write!(f, "rank {one} is"),
            many => {
                let list: Vec<String> = many.iter().map(ToString::to_string).collect();
                write!(f, "ranks {} are", list.join(", "))
            }
        }
    }
}

/// Call of one rank. `site` is separate, because the place in a file is the most helpful part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Call {
    operation: String,
    what: String,
    site: String,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, what, site } = self;
        let between = if what.is_empty() { "" } else { " " };
        write!(f, "{operation}{between}{what} at {site}")
    }
}

/// Pauses between two reads of the store. The first ones are short, because the other ranks usually arrive soon.
const PAUSES: [Duration; 3] =
    [Duration::from_micros(200), Duration::from_millis(2), Duration::from_millis(20)];

impl ProcessGroup {
    /// Returns `true` if collectives are compared between ranks before they begin ([`crate::GroupOptions::debug`]).
    #[must_use]
    pub fn is_debugged(&self) -> bool {
        self.checks
    }

    /// Returns a handle whose operations report this place in the user's program, instead of their own caller.
    #[must_use]
    pub fn at(&self, site: &'static Location<'static>) -> Self {
        let mut handle = self.clone();
        handle.site = Some(site);
        handle
    }

    /// Returns a handle whose operations are not compared: for operations that ranks start from different places.
    #[must_use]
    pub fn unchecked(&self) -> Self {
        let mut handle = self.clone();
        handle.checks = false;
        handle
    }

    /// Compares the next operation of all ranks in debug mode; otherwise does nothing. Collectives call it themselves.
    /// Use it for operations that communicate in other ways, such as a backward.
    ///
    /// # Errors
    /// [`crate::TorchError::Desync`] on every rank that made a call, with the ranks that differ or are missing;
    /// [`crate::TorchError::Store`] if the store is not available.
    #[track_caller]
    pub fn check(
        &self,
        operation: &'static str,
        what: impl FnOnce() -> String,
    ) -> Result<(), Error> {
        let here = Location::caller();
        if !self.checks || self.size() == 1 {
            return Ok(());
        }
        let site = self.site.unwrap_or(here);
        let site = format!("{}:{}:{}", site.file(), site.line(), site.column());
        self.compare(&Call { operation: operation.to_owned(), what: what(), site })
    }

    /// Compares in debug mode whether all ranks begin a backward that reduces gradients: for a forward of a
    /// [`crate::Reducer`] on this group in which gradients are reduced. Call it before `backward`. If the loss is not
    /// `sound` (infinite, or NaN), the other ranks' errors name this rank.
    ///
    /// # Errors
    /// Returns the same errors as [`ProcessGroup::check`].
    #[track_caller]
    pub fn check_backward(&self, sound: bool) -> Result<(), Error> {
        if self.inner().reduces.swap(false, Ordering::Relaxed) {
            let operation =
                if sound { "backward" } else { "backward of a loss that is not finite" };
            self.check(operation, String::new)?;
        }
        Ok(())
    }

    /// Compares in debug mode a forward whose backward will reduce gradients.
    #[track_caller]
    pub(crate) fn check_forward(&self) -> Result<(), Error> {
        self.check("forward", String::new)?;
        self.inner().reduces.store(self.checks, Ordering::Relaxed);
        Ok(())
    }

    fn compare(&self, mine: &Call) -> Result<(), Error> {
        let inner = self.inner();
        // One comparison at a time, as with the operations themselves.
        let _alone = inner.comparing.lock();
        let number = inner.compared.fetch_add(1, Ordering::Relaxed);
        let (store, rank, size) = (self.store(), self.rank(), self.size());
        let key = |rank: usize| format!("debug/{number}/{rank}");
        let bytes = rmp_serde::to_vec_named(mine).map_err(|error| TorchError::Object {
            operation: "debug",
            detail: error.to_string(),
        })?;
        store.set(&key(rank), &bytes)?;

        let begun = Instant::now();
        let limit = self.timeout();
        let mut calls = BTreeMap::from([(rank, mine.clone())]);
        let mut looks = 0;
        loop {
            for other in (0..size).filter(|other| *other != rank) {
                if !calls.contains_key(&other) && store.contains(&[&key(other)])? {
                    calls.insert(other, read(&store.get(&key(other))?)?);
                }
            }
            if calls.len() == size || begun.elapsed() >= limit {
                break;
            }
            thread::sleep(PAUSES[(looks / 20).min(PAUSES.len() - 1)]);
            looks += 1;
        }
        let mut absent = BTreeMap::new();
        for other in (0..size).filter(|other| !calls.contains_key(other)) {
            absent.insert(other, self.last_call(other)?);
        }
        let differing = odd_ones_out(&calls);
        if differing.is_empty() && absent.is_empty() {
            // All ranks have arrived at this comparison, so all have read the earlier one. The newest record is kept as
            // the last call of a rank that may be missing later.
            if number > 0 {
                store.set(&format!("debug/last/{rank}"), &bytes)?;
                store.delete(&format!("debug/{}/{rank}", number - 1))?;
            }
            return Ok(());
        }
        let desync = Desync {
            group: self.name().to_owned(),
            rank,
            calls: calls.into_iter().map(|(rank, call)| (rank, call.to_string())).collect(),
            differing,
            absent,
            limit,
        };
        Err(TorchError::Desync(Box::new(desync)).into())
    }

    fn last_call(&self, rank: usize) -> Result<Option<String>, Error> {
        let store = self.store();
        // The first record is kept under its own key.
        for key in [format!("debug/last/{rank}"), format!("debug/0/{rank}")] {
            if store.contains(&[&key])? {
                return Ok(Some(read(&store.get(&key)?)?.to_string()));
            }
        }
        Ok(None)
    }
}

/// Returns the ranks whose call differs from that of most ranks; of equal halves, from the lowest rank's.
fn odd_ones_out(calls: &BTreeMap<usize, Call>) -> Vec<usize> {
    let alike = |call: &Call| calls.values().filter(|other| *other == call).count();
    let mut common: Option<&Call> = None;
    for call in calls.values() {
        if common.is_none_or(|common| alike(call) > alike(common)) {
            common = Some(call);
        }
    }
    calls.iter().filter(|(_, call)| Some(*call) != common).map(|(rank, _)| *rank).collect()
}

fn read(bytes: &[u8]) -> Result<Call, TorchError> {
    rmp_serde::from_slice(bytes)
        .map_err(|error| TorchError::Object { operation: "debug", detail: error.to_string() })
}

/// Describes a tensor: `float32 [2, 3]`.
pub(crate) fn describe(tensor: &Tensor) -> String {
    match tensor.f_kind() {
        Ok(kind) => format!("of {} {:?}", type_name(kind), tensor.size()),
        Err(_) => "of a tensor of unknown kind".to_owned(),
    }
}

/// Describes several tensors, one after another, as [`describe`] does.
pub(crate) fn describe_all<T: Borrow<Tensor>>(tensors: &[T]) -> String {
    tensors.iter().map(|tensor| describe(tensor.borrow())).collect::<Vec<_>>().join(", ")
}

/// Describes a tensor as [`describe`] does, if ranks may have unequal numbers of rows.
pub(crate) fn describe_rows(tensor: &Tensor) -> String {
    match tensor.f_kind() {
        Ok(kind) => format!("of {} [any, {:?}]", type_name(kind), tensor.size().get(1..)),
        Err(_) => "of a tensor of unknown kind".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(names: &[&str]) -> BTreeMap<usize, Call> {
        let call = |name: &&str| Call {
            operation: (*name).to_owned(),
            what: "of float32 [2]".into(),
            site: "a.rs:1:1".into(),
        };
        names.iter().map(call).enumerate().collect()
    }

    #[test]
    fn the_minority_differs() {
        assert_eq!(odd_ones_out(&calls(&["a", "a", "a"])), [0usize; 0]);
        assert_eq!(odd_ones_out(&calls(&["a", "b", "b"])), [0]);
        assert_eq!(odd_ones_out(&calls(&["a", "b"])), [1]);
        assert_eq!(odd_ones_out(&calls(&["a", "b", "c", "b"])), [0, 2]);
    }

    #[test]
    fn the_text_names_everybody() {
        let calls = calls(&["all_reduce", "all_reduce", "broadcast"]);
        let error = Desync {
            group: "world".into(),
            rank: 0,
            differing: odd_ones_out(&calls),
            calls: calls.into_iter().map(|(rank, call)| (rank, call.to_string())).collect(),
            absent: BTreeMap::from([(3, Some("barrier at b.rs:2:2".to_owned())), (4, None)]),
            limit: Duration::from_secs(5),
        };
        assert_eq!(
            error.to_string(),
            "the ranks of group \"world\" run different operations: ranks 0, 1 are in all_reduce of \
             float32 [2] at a.rs:1:1; rank 2 is in broadcast of float32 [2] at a.rs:1:1; rank 3 reached \
             no operation within 5s, its last was barrier at b.rs:2:2; rank 4 reached no operation \
             within 5s and ran none before"
        );
    }
}
