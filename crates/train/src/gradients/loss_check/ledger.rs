//! What is known of losses, and what is under way: no tensors, no messages.

use std::collections::VecDeque;

use crate::error::Result;

/// Backwards are numbered on each rank for itself: an optimizer remembers the number at which its gradients
/// were cleared, and everything up to there does not concern it any more.
#[derive(Debug)]
pub(super) struct Ledger<F> {
    backwards: u64,
    answers: VecDeque<Answer<F>>,
    found: Option<Found>,
}

/// A number that is on its way to this rank: the one of the backward, 0 when all losses were sound.
#[derive(Debug)]
struct Answer<F> {
    backward: u64,
    flight: F,
    /// Whether an optimizer has stepped without knowing it.
    passed: bool,
    /// That step's number, when it used the gradients.
    used: Option<u64>,
}

/// A loss that was not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Found {
    backward: u64,
    pub(super) rank: usize,
    /// The step that used its gradients all the same.
    pub(super) passed: Option<u64>,
}

impl Found {
    pub(super) fn of(rank: usize) -> Self {
        Self { backward: 0, rank, passed: None }
    }
}

impl<F> Default for Ledger<F> {
    fn default() -> Self {
        Self { backwards: 0, answers: VecDeque::new(), found: None }
    }
}

impl<F> Ledger<F> {
    /// Numbers the backward that begins.
    pub(super) fn next_backward(&mut self) -> u64 {
        self.backwards += 1;
        self.backwards
    }

    /// Backwards so far.
    pub(super) fn backwards(&self) -> u64 {
        self.backwards
    }

    /// What will say something about the backward that runs.
    pub(super) fn push(&mut self, flight: F) {
        let backward = self.backwards;
        self.answers.push_back(Answer { backward, flight, passed: false, used: None });
    }

    /// Reads every number, waiting for those that are not here yet.
    pub(super) fn read_all(&mut self, read: impl Fn(F) -> Result<i64>) -> Result<()> {
        while let Some(Answer { backward, flight, used, .. }) = self.answers.pop_front() {
            self.note(backward, used, read(flight)?);
        }
        Ok(())
    }

    /// Reads the numbers that an optimizer has stepped without: which those are does not depend on time,
    /// so all ranks read the same ones.
    pub(super) fn read_passed(&mut self, read: impl Fn(F) -> Result<i64>) -> Result<()> {
        while self.answers.front().is_some_and(|answer| answer.passed) {
            if let Some(Answer { backward, flight, used, .. }) = self.answers.pop_front() {
                self.note(backward, used, read(flight)?);
            }
        }
        Ok(())
    }

    /// A step is made without knowing what is still under way.
    pub(super) fn pass(
        &mut self,
        cleared: u64,
        step: u64,
        fetch: impl Fn(F) -> Result<F>,
    ) -> Result<()> {
        for answer in std::mem::take(&mut self.answers) {
            let used = (answer.backward > cleared).then_some(step);
            let flight = fetch(answer.flight)?;
            self.answers.push_back(Answer { flight, used, passed: true, ..answer });
        }
        Ok(())
    }

    /// A number has arrived. Of several that are not 0 the first that was used counts, else the last
    /// backward's, and for one backward the highest rank's.
    pub(super) fn note(&mut self, backward: u64, passed: Option<u64>, code: i64) {
        let Some(rank) = code.checked_sub(1).and_then(|rank| usize::try_from(rank).ok()) else {
            return;
        };
        let new = Found { backward, rank, passed };
        let keep = self.found.is_some_and(|old| match (old.passed, passed) {
            (Some(_), _) => true,
            (None, Some(_)) => false,
            (None, None) => (old.backward, old.rank) > (backward, rank),
        });
        if !keep {
            self.found = Some(new);
        }
    }

    /// What an optimizer must not step over that has cleared its gradients there. It stays until they are
    /// cleared, unless it is too late.
    pub(super) fn verdict(&mut self, cleared: u64) -> Option<Found> {
        self.take_passed().or_else(|| self.found.filter(|found| found.backward > cleared))
    }

    /// What a step has used.
    pub(super) fn take_passed(&mut self) -> Option<Found> {
        self.found.take_if(|found| found.passed.is_some())
    }

    pub(super) fn take_found(&mut self) -> Option<Found> {
        self.found.take()
    }

    pub(super) fn forget(&mut self) {
        self.answers.clear();
        self.found = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step of an optimizer that reads at once.
    fn step(ledger: &mut Ledger<i64>, cleared: u64) -> Option<usize> {
        ledger.read_all(Ok).unwrap();
        ledger.verdict(cleared).map(|found| found.rank)
    }

    /// One that reads at the next step.
    fn later(ledger: &mut Ledger<i64>, cleared: u64, step: u64) -> Option<(usize, Option<u64>)> {
        ledger.read_passed(Ok).unwrap();
        let found = ledger.verdict(cleared).map(|found| (found.rank, found.passed));
        if found.is_none() {
            ledger.pass(cleared, step, Ok).unwrap();
        }
        found
    }

    fn backward(ledger: &mut Ledger<i64>, code: i64) {
        ledger.next_backward();
        ledger.push(code);
    }

    #[test]
    fn it_stays_until_the_gradients_are_cleared() {
        let mut ledger = Ledger::default();
        backward(&mut ledger, 0);
        assert_eq!(step(&mut ledger, 0), None);
        let cleared = ledger.backwards();
        backward(&mut ledger, 2);
        backward(&mut ledger, 0);
        assert_eq!(step(&mut ledger, cleared), Some(1));
        assert_eq!(step(&mut ledger, cleared), Some(1), "the gradients are still there");
        let cleared = ledger.backwards();
        assert_eq!(step(&mut ledger, cleared), None);
        backward(&mut ledger, 0);
        assert_eq!(step(&mut ledger, cleared), None);
    }

    #[test]
    fn the_highest_rank_of_a_backward_is_named() {
        let mut ledger = Ledger::default();
        ledger.next_backward();
        for code in [2, 4, 3] {
            ledger.push(code);
        }
        assert_eq!(step(&mut ledger, 0), Some(3));
    }

    #[test]
    fn another_optimizers_zero_grad_does_not_hide_it() {
        let mut ledger = Ledger::default();
        backward(&mut ledger, 1); // the discriminator's
        let generator = ledger.backwards();
        backward(&mut ledger, 0);
        assert_eq!(step(&mut ledger, 0), Some(0));
        assert_eq!(step(&mut ledger, generator), None);
    }

    #[test]
    fn read_later_it_is_told_one_step_after_with_that_steps_number() {
        let mut ledger = Ledger::default();
        let mut told = Vec::new();
        for (number, code) in [(1, 0), (2, 3), (3, 0), (4, 0)] {
            let cleared = ledger.backwards();
            backward(&mut ledger, code);
            told.push(later(&mut ledger, cleared, number));
        }
        assert_eq!(told, [None, None, Some((2, Some(2))), None]);
    }

    #[test]
    fn read_later_a_batch_that_was_left_out_is_not_told() {
        let mut ledger = Ledger::default();
        backward(&mut ledger, 1);
        let cleared = ledger.backwards(); // no step
        backward(&mut ledger, 0);
        assert_eq!(later(&mut ledger, cleared, 1), None);
        backward(&mut ledger, 0);
        assert_eq!(later(&mut ledger, cleared, 2), None);
    }
}
