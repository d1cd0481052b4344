//! The part of a launcher's store that belongs to one attempt of a job.

use std::thread;
use std::time::{Duration, Instant};

use brigade_rank_env::World;
use brigade_torch::{Fault, Result, Store};

use crate::error::TrainError;

/// An attempt of a job in a store that the launcher serves (`TORCHELASTIC_USE_AGENT_STORE`).
///
/// torchrun keeps one store for all attempts of a job. Process groups of a later attempt would find the addresses of
/// ranks that have ended, and fail or hang: PyTorch 2.13 has no prefix for attempts, and its own ranks do so. The ranks
/// of a first attempt use PyTorch's keys, so that Python ranks can take part; the ranks of a later attempt use separate
/// keys, unless Python ranks were in the group before.
///
/// `TORCHELASTIC_RESTART_COUNT` does not number the attempts: each host counts its own failures, and a restart because
/// a host has joined is not counted. Rank 0 numbers them in the store. Another rank uses a number only after that rank
/// 0 has answered, since the store may still contain the number of an attempt that has ended.
pub(crate) struct Attempt {
    store: Store,
    world_size: usize,
}

impl Attempt {
    /// Joins the attempt of `world`, and returns the store with the prefix of its keys. In a later attempt, rank 0 and
    /// the other ranks wait for each other, for ten minutes at most. A rank that takes the attempt for the first one
    /// never arrives: Python ranks do so, and ranks of a host whose restart count is 0 if no group was made before.
    ///
    /// # Errors
    /// Fails when a rank did not come within the time limit ([`crate::TrainError::AttemptRank`]), or the connection to
    /// the store is lost.
    pub(crate) fn enter(store: Store, world: &World, timeout: Duration) -> Result<(Self, Store)> {
        let (rank, world_size) = (world.rank.as_usize(), world.world_size.as_usize());
        let this = Self { store, world_size };
        let times = this.store.add(&entered(rank), 1)?;
        let before = this.group_before()?;
        let is_first = world.restart_count == 0
            && times == 1
            && before.is_none()
            && !this.store.contains(&[AGAIN])?;
        if is_first {
            let keys = this.store.clone();
            return Ok((this, keys));
        }
        // So that a rank of a new host recognises a later attempt.
        this.store.set(AGAIN, "")?;
        if let Some(size) = before
            && this.had_others(size)?
        {
            let keys = this.store.clone();
            return Ok((this, keys));
        }
        let limit = timeout.min(LONGEST_WAIT);
        let number = match rank {
            0 => this.begin(limit)?,
            _ => this.join(rank, limit)?,
        };
        let keys = this.store.prefix(&prefix(number))?;
        Ok((this, keys))
    }

    /// Records for later attempts that the group of this one was made.
    pub(crate) fn connected(&self) -> Result<()> {
        self.store.set(CONNECTED, self.world_size.to_string())
    }

    /// Returns the size of the last group that was made over this store.
    fn group_before(&self) -> Result<Option<usize>> {
        if !self.store.contains(&[CONNECTED])? {
            return Ok(None);
        }
        Ok(String::from_utf8_lossy(&self.store.get(CONNECTED)?).parse().ok())
    }

    /// Returns `true` if ranks of another library were in the group of that size.
    fn had_others(&self, size: usize) -> Result<bool> {
        for rank in 0..size {
            if !self.store.contains(&[&entered(rank)])? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Draws a number that no earlier attempt had, and answers each of the other ranks. Called on rank 0.
    fn begin(&self, limit: Duration) -> Result<i64> {
        let deadline = Instant::now() + limit;
        let number = self.store.add(NUMBER, 1)?;
        for rank in 1..self.world_size {
            let asked = asked(number, rank);
            self.store.wait(&[&asked], left(deadline)).map_err(|error| match error.fault() {
                Some(Fault::Timeout) => TrainError::AttemptRank { rank, limit }.into(),
                _ => error,
            })?;
            self.store.set(&answered(number, rank), self.store.get(&asked)?)?;
        }
        Ok(number)
    }

    /// Sends requests to the rank 0 of the newest number until it answers, or a newer number exists. Called on the
    /// other ranks.
    fn join(&self, rank: usize, limit: Duration) -> Result<i64> {
        let deadline = Instant::now() + limit;
        // The random number distinguishes this request from those of other processes.
        let question = rand::random::<u64>().to_string();
        let mut known = 0;
        let mut pause = SHORTEST_PAUSE;
        loop {
            let number = self.store.add(NUMBER, 0)?;
            if number > known {
                self.store.set(&asked(number, rank), &question)?;
                (known, pause) = (number, SHORTEST_PAUSE);
            }
            let answered = answered(number, rank);
            if number > 0
                && self.store.contains(&[&answered])?
                && self.store.get(&answered)? == question.as_bytes()
            {
                return Ok(number);
            }
            if Instant::now() >= deadline {
                return Err(TrainError::AttemptRank { rank: 0, limit }.into());
            }
            thread::sleep(pause);
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
    }
}

/// Returns the time left until `deadline`, rounded to whole milliseconds, which the store uses: a wait that ends before
/// its limit is not reported as a timeout.
fn left(deadline: Instant) -> Duration {
    let left = deadline.saturating_duration_since(Instant::now()).as_millis();
    Duration::from_millis(u64::try_from(left).unwrap_or(u64::MAX).max(1))
}

fn entered(rank: usize) -> String {
    format!("brigade/entered/{rank}")
}

fn prefix(number: i64) -> String {
    format!("brigade/attempt_{number}")
}

fn asked(number: i64, rank: usize) -> String {
    format!("{}/asked/{rank}", prefix(number))
}

fn answered(number: i64, rank: usize) -> String {
    format!("{}/answered/{rank}", prefix(number))
}

/// Key of the number of the newest later attempt.
const NUMBER: &str = "brigade/attempts";
/// Key that marks a later attempt.
const AGAIN: &str = "brigade/again";
/// Key of the size of the last group.
const CONNECTED: &str = "brigade/connected";
/// Maximum wait of one rank for another in a later attempt. All ranks were started together, but some may read data
/// before they build their Accelerator.
const LONGEST_WAIT: Duration = Duration::from_secs(600);
const SHORTEST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use brigade_rank_env::{Rank, WorldSize};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    /// Ranks of a job, each with the restart count of its host. `None` for a rank of another library.
    type Ranks<'a> = &'a [Option<u32>];

    /// Runs an attempt of all ranks at once, and returns the prefixes of their keys.
    fn attempt(store: &Store, ranks: Ranks<'_>, connects: bool) -> Vec<String> {
        let enter = |rank: usize, restarts: u32| {
            let world_size = WorldSize::new(ranks.len()).unwrap();
            let mut world = World::alone();
            (world.rank, world.world_size) = (Rank::new(rank, world_size).unwrap(), world_size);
            world.restart_count = restarts;
            let (this, keys) = Attempt::enter(store.clone(), &world, LIMIT).unwrap();
            (this, format!("{keys:?}"))
        };
        let entered: Vec<(Attempt, String)> = thread::scope(|scope| {
            let started: Vec<_> = ranks
                .iter()
                .enumerate()
                .filter_map(|(rank, restarts)| Some((rank, (*restarts)?)))
                .map(|(rank, restarts)| scope.spawn(move || enter(rank, restarts)))
                .collect();
            started.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        if connects {
            entered[0].0.connected().unwrap();
        }
        entered.into_iter().map(|it| it.1).collect()
    }

    /// Returns the error of a rank that waits for another one for 50 ms.
    fn refusal(store: &Store, world: &World) -> String {
        let limit = Duration::from_millis(50);
        Attempt::enter(store.clone(), world, limit).err().unwrap().to_string()
    }

    /// Returns the separate keys of attempt `number`.
    fn own(number: i64, ranks: usize) -> Vec<String> {
        vec![format!("Store(hash/brigade/attempt_{number})"); ranks]
    }

    fn pytorchs(ranks: usize) -> Vec<String> {
        vec!["Store(hash)".to_owned(); ranks]
    }

    #[test]
    fn later_attempts_have_keys_of_their_own() {
        let store = Store::hash().unwrap();
        assert_eq!(attempt(&store, &[Some(0), Some(0)], true), pytorchs(2));
        for number in 1..4 {
            let restarts = u32::try_from(number).ok();
            assert_eq!(attempt(&store, &[restarts, restarts], true), own(number, 2));
        }
    }

    #[test]
    fn hosts_count_their_own_failures() {
        let store = Store::hash().unwrap();
        assert_eq!(attempt(&store, &[Some(0), Some(0)], true), pytorchs(2));
        // Rank 1 has failed, then rank 0. A third host joins, which is not a failure, and leaves again.
        assert_eq!(attempt(&store, &[Some(0), Some(1)], true), own(1, 2));
        assert_eq!(attempt(&store, &[Some(1), Some(1)], true), own(2, 2));
        assert_eq!(attempt(&store, &[Some(1), Some(1), Some(0)], true), own(3, 3));
        assert_eq!(attempt(&store, &[Some(1), Some(1)], true), own(4, 2));
    }

    #[test]
    fn a_rank_that_has_ended_answers_none() {
        let store = Store::hash().unwrap();
        // Rank 0 drew a number, and the attempt ended before rank 1 arrived.
        let world_size = WorldSize::new(2).unwrap();
        let mut world = World::alone();
        (world.world_size, world.restart_count) = (world_size, 1);
        assert_eq!(
            refusal(&store, &world),
            "rank 1 did not come to this attempt of the job within 50ms: ranks of Python that failed \
             before their first process group cannot be restarted together with ranks of Brigade; start \
             the job again"
        );
        assert_eq!(attempt(&store, &[Some(2), Some(2)], true), own(2, 2));
        // Rank 1 waits alone, and gives up.
        world.rank = Rank::new(1, world_size).unwrap();
        let error = refusal(&store, &world);
        let expected =
            "rank 0 did not answer in this attempt of the job within 50ms: ranks of Python";
        assert!(error.starts_with(expected), "{error}");
        assert_eq!(attempt(&store, &[Some(3), Some(3)], true), own(3, 2));
    }

    /// No group was made before, and rank 1 was the first to check whether there was an attempt.
    #[test]
    fn ranks_that_disagree_about_the_attempt_do_not_wait_for_the_groups_limit() {
        let store = Store::hash().unwrap();
        assert_eq!(attempt(&store, &[None, Some(0)], false), pytorchs(1));
        let mut world = World::alone();
        (world.world_size, world.restart_count) = (WorldSize::new(2).unwrap(), 1);
        let error = refusal(&store, &world);
        assert!(error.starts_with("rank 1 did not come to this attempt of the job"), "{error}");
    }

    #[test]
    fn an_attempt_without_a_group_was_one() {
        let store = Store::hash().unwrap();
        assert_eq!(attempt(&store, &[Some(0), Some(0)], false), pytorchs(2));
        assert_eq!(attempt(&store, &[Some(1), Some(1)], false), own(1, 2));
    }

    #[test]
    fn ranks_of_pythons_are_met_under_pytorchs_keys() {
        let store = Store::hash().unwrap();
        for restarts in 0..3 {
            let ranks = [None, Some(restarts), Some(restarts)];
            assert_eq!(attempt(&store, &ranks, true), pytorchs(2));
        }
    }
}
