//! The part of a launcher's store that belongs to one attempt of a job.

use brigade_torch::Store;
use brigade_world::World;

use crate::error::Result;

/// One attempt in a store that the launcher serves (`TORCHELASTIC_USE_AGENT_STORE`).
///
/// torchrun keeps one store for all attempts of a job. Process groups of a later attempt would find the
/// addresses of ranks that have ended, and fail or hang; PyTorch 2.13 adds no prefix of its own, and its
/// ranks do. So the ranks of a later attempt use keys of their own, unless ranks of Python's have been in
/// an earlier group of this job: they are found under PyTorch's keys alone.
pub(crate) struct Attempt {
    store: Store,
    number: u32,
    world_size: usize,
}

impl Attempt {
    /// Enters the attempt of `world`, and returns the store whose keys it uses.
    ///
    /// All of its ranks come to the same store: what earlier attempts have written no longer changes.
    pub(crate) fn enter(store: Store, world: &World) -> Result<(Self, Store)> {
        let world_size = world.world_size.as_usize();
        let this = Self { store, number: world.restart_count, world_size };
        this.store.set(&this.key("begun"), "")?;
        this.store.set(&this.rank(world.rank.as_usize()), "")?;
        let (mut is_used, mut has_others) = (false, false);
        for number in 0..this.number {
            let earlier = Self { store: this.store.clone(), number, ..this };
            is_used |= this.store.contains(&[&earlier.key("begun")])?;
            has_others |= earlier.had_others()?;
        }
        let keys = match is_used && !has_others {
            true => this.store.prefix(&this.key("keys"))?,
            false => this.store.clone(),
        };
        Ok((this, keys))
    }

    /// Keeps for later attempts that the group of this one was made.
    pub(crate) fn connected(&self) -> Result<()> {
        Ok(self.store.set(&self.key("connected"), self.world_size.to_string())?)
    }

    /// Whether ranks that are not Brigade's were in the group of this attempt.
    fn had_others(&self) -> Result<bool> {
        let key = self.key("connected");
        if !self.store.contains(&[&key])? {
            return Ok(false);
        }
        // An elastic job may have had another size then.
        let size = String::from_utf8_lossy(&self.store.get(&key)?).parse().unwrap_or(0);
        for rank in 0..size {
            if !self.store.contains(&[&self.rank(rank)])? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn rank(&self, rank: usize) -> String {
        self.key(&format!("rank_{rank}"))
    }

    fn key(&self, name: &str) -> String {
        format!("brigade/attempt_{}/{name}", self.number)
    }
}

#[cfg(test)]
mod tests {
    use brigade_world::{Rank, WorldSize};

    use super::*;

    /// Enters as a rank of two, or of another number; whether the keys are the attempt's own.
    fn enter(store: &Store, attempt: u32, rank: usize, size: usize) -> (Attempt, bool) {
        let world_size = WorldSize::new(size).unwrap();
        let mut world = World::alone();
        (world.rank, world.world_size) = (Rank::new(rank, world_size).unwrap(), world_size);
        world.restart_count = attempt;
        let (this, keys) = Attempt::enter(store.clone(), &world).unwrap();
        keys.set("probe", "").unwrap();
        let has_prefix = !store.contains(&["probe"]).unwrap();
        let _ = store.delete("probe");
        (this, has_prefix)
    }

    #[test]
    fn a_first_attempt_uses_pytorchs_keys() {
        let store = Store::hash().unwrap();
        assert!(!enter(&store, 0, 0, 2).1 && !enter(&store, 0, 1, 2).1);
        // Of a launcher whose earlier attempts had a store of their own, or did not come that far.
        let store = Store::hash().unwrap();
        assert!(!enter(&store, 3, 1, 2).1);
    }

    #[test]
    fn a_later_attempt_has_keys_of_its_own() {
        let store = Store::hash().unwrap();
        let (first, _) = enter(&store, 0, 0, 2);
        enter(&store, 0, 1, 2);
        first.connected().unwrap();
        for rank in [1, 0] {
            assert!(enter(&store, 1, rank, 2).1);
        }
        // An attempt in which a rank failed before there was a group.
        let store = Store::hash().unwrap();
        enter(&store, 0, 0, 2);
        for attempt in [1, 2] {
            assert!(enter(&store, attempt, 1, 2).1 && enter(&store, attempt, 0, 2).1);
        }
    }

    #[test]
    fn ranks_of_pythons_are_met_under_pytorchs_keys() {
        let store = Store::hash().unwrap();
        // Rank 1 of the group of three is not Brigade's.
        let (first, _) = enter(&store, 0, 0, 3);
        enter(&store, 0, 2, 3);
        first.connected().unwrap();
        assert!(!enter(&store, 1, 0, 2).1 && !enter(&store, 2, 1, 2).1);
    }
}
