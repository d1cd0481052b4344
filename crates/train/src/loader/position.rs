//! Position of a loader in its data, counted in samples, so that another run can continue from it.

use std::sync::Arc;

use brigade_checkpoint::Value;
use brigade_sampling::Round;
use parking_lot::Mutex;

/// Position of the newest iteration.
#[derive(Debug, Clone, Default)]
pub(super) struct Position(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// Position between the first `next` of an epoch and the end of its loop.
    open: Option<Open>,
    /// Number of iterations begun, so that an older iteration that still exists is not counted.
    iterations: u64,
    /// Position from a checkpoint at which the next iteration begins.
    resumed: Option<Mark>,
    /// Number of real samples of all ranks since the beginning.
    total: u64,
}

#[derive(Debug, Clone, Copy)]
struct Open {
    iteration: u64,
    mark: Mark,
}

/// A place in an epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) epoch: u64,
    /// Number of samples at the beginning of the epoch that another number of ranks has used: the rest was divided
    /// again.
    pub(super) base: u64,
    /// Number of batches of this rank since then.
    pub(super) batches: u64,
    /// Number of real samples of all ranks in this epoch, including those before `base`.
    pub(super) samples: u64,
}

impl Mark {
    const fn start(epoch: u64) -> Self {
        Self { epoch, base: 0, batches: 0, samples: 0 }
    }
}

/// Counter of one iteration. When it is dropped the epoch is over: the loop has ended or was left.
#[derive(Debug)]
pub(super) struct Counting {
    position: Position,
    iteration: u64,
}

impl Position {
    pub(super) fn begin(&self, epoch: u64) -> Counting {
        let mut state = self.0.lock();
        state.iterations += 1;
        let iteration = state.iterations;
        let resumed = state.resumed.take().filter(|mark| mark.epoch == epoch);
        let mark = resumed.unwrap_or_else(|| Mark::start(epoch));
        state.open = Some(Open { iteration, mark });
        drop(state);
        Counting { position: self.clone(), iteration }
    }

    /// Makes the next iteration continue after the mark.
    pub(super) fn resume(&self, mark: Mark, total: u64) {
        let mut state = self.0.lock();
        state.open = None;
        state.resumed = Some(mark);
        state.total = total;
    }

    /// Returns the number of real samples of all ranks since the beginning.
    pub(super) fn total(&self) -> u64 {
        self.0.lock().total
    }

    /// Returns the state that a checkpoint stores for a loader with this seed and next epoch.
    pub(super) fn to_value<T>(&self, seed: u64, next_epoch: u64) -> Value<T> {
        let (mark, total) = self.mark(next_epoch);
        let number = |number: u64| Value::Int(number.cast_signed());
        Value::dict([
            ("seed", number(seed)),
            ("epoch", number(mark.epoch)),
            ("base", number(mark.base)),
            ("batches", number(mark.batches)),
            ("samples", number(mark.samples)),
            ("total_samples", number(total)),
        ])
    }

    /// Returns the position of the next batch.
    fn mark(&self, next_epoch: u64) -> (Mark, u64) {
        let state = self.0.lock();
        let waiting = state.resumed.filter(|mark| mark.epoch == next_epoch);
        let ended = || waiting.unwrap_or_else(|| Mark::start(next_epoch));
        (state.open.map_or_else(ended, |open| open.mark), state.total)
    }
}

impl Counting {
    /// Counts a batch that was returned to the loop. `index` includes the batches that were skipped.
    pub(super) fn count(&self, index: usize, round: &Round) {
        let samples = round.total_valid() as u64;
        self.with_mark(|mark, total| {
            let skipped = (index as u64).saturating_sub(mark.batches);
            // Only the last round of an epoch is smaller than the others.
            mark.samples += skipped * round.rows.iter().sum::<usize>() as u64 + samples;
            mark.batches = index as u64 + 1;
            *total += samples;
        });
    }

    /// Counts a batch that could not be made. The iteration continues with the next one.
    pub(super) fn count_failed(&self) {
        self.with_mark(|mark, _| mark.batches += 1);
    }

    fn with_mark(&self, change: impl FnOnce(&mut Mark, &mut u64)) {
        let mut state = self.position.0.lock();
        let State { open, total, .. } = &mut *state;
        if let Some(open) = open
            && open.iteration == self.iteration
        {
            change(&mut open.mark, total);
        }
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        let mut state = self.position.0.lock();
        if state.open.is_some_and(|open| open.iteration == self.iteration) {
            state.open = None;
        }
    }
}

/// Reads the seed, the mark and the number of all samples from a state.
pub(super) fn read<T>(state: &Value<T>) -> Result<(u64, Mark, u64), String> {
    let number = |key: &str| {
        let number = state.get(key).and_then(Value::as_int).map(i64::cast_unsigned);
        number.ok_or_else(|| format!("a loader's state needs the integer `{key}`"))
    };
    let mark = Mark {
        epoch: number("epoch")?,
        base: number("base")?,
        batches: number("batches")?,
        samples: number("samples")?,
    };
    Ok((number("seed")?, mark, number("total_samples")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(rows: &[usize], valid: &[usize]) -> Round {
        Round { rows: rows.to_vec(), valid: valid.to_vec() }
    }

    #[test]
    fn batches_count_until_the_loop_ends() {
        let position = Position::default();
        assert_eq!(position.mark(0), (Mark::default(), 0));
        let counting = position.begin(0);
        counting.count(0, &round(&[4, 4], &[4, 4]));
        counting.count(1, &round(&[4, 4], &[4, 1]));
        let expected = Mark { epoch: 0, base: 0, batches: 2, samples: 13 };
        assert_eq!(position.mark(1), (expected, 13));
        drop(counting);
        assert_eq!(position.mark(1), (Mark { epoch: 1, ..Mark::default() }, 13));
    }

    #[test]
    fn skipped_batches_are_samples_too_and_an_older_iteration_does_not_count() {
        let position = Position::default();
        let older = position.begin(0);
        let counting = position.begin(1);
        counting.count(3, &round(&[4], &[2]));
        older.count(0, &round(&[4], &[4]));
        drop(older);
        let expected = Mark { epoch: 1, base: 0, batches: 4, samples: 14 };
        assert_eq!(position.mark(2), (expected, 2));
    }
}
