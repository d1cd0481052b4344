//! Order in which parts are used.

use std::collections::HashMap;

/// The order in which parts are used, learned from their uses. It assumes that the same two parts are followed by the
/// same third one, so that a part may be used several times in a pass, such as a tied weight.
#[derive(Debug)]
pub(super) struct Order {
    parts: usize,
    /// The last two uses.
    last: (Option<usize>, Option<usize>),
    after: HashMap<(Option<usize>, usize), usize>,
}

impl Order {
    pub(super) fn new(parts: usize) -> Self {
        Self { parts, last: (None, None), after: HashMap::new() }
    }

    /// Records a use of a part.
    pub(super) fn note(&mut self, part: usize) {
        let (before, last) = self.last;
        if let Some(last) = last {
            self.after.insert((before, last), part);
        }
        self.last = (last, Some(part));
    }

    /// Returns the next different parts, at most `count`, the nearest first. Where nothing was learned, the order is
    /// that in which the parts were given.
    pub(super) fn next(&self, count: usize) -> Vec<usize> {
        let mut next: Vec<usize> = Vec::new();
        let (mut before, mut last) = self.last;
        // With parts that are used several times, a pass is longer than the number of parts.
        for _ in 0..2 * self.parts {
            if next.len() >= count {
                break;
            }
            let part = match last {
                None => 0,
                Some(last) => {
                    let learned = self.after.get(&(before, last));
                    learned.copied().unwrap_or((last + 1) % self.parts)
                }
            };
            if !next.contains(&part) {
                next.push(part);
            }
            (before, last) = (last, Some(part));
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_given_order_is_expected_before_anything_is_known() {
        let mut order = Order::new(3);
        assert_eq!(order.next(2), [0, 1]);
        order.note(1);
        assert_eq!(order.next(2), [2, 0]);
        assert_eq!(order.next(9), [2, 0, 1]);
    }

    #[test]
    fn a_part_that_is_used_twice_in_a_pass_has_two_successors() {
        // A tied weight: the embedding is used first, and the head last.
        let mut order = Order::new(3);
        for _ in 0..2 {
            for part in [0, 2, 1, 0] {
                order.note(part);
            }
        }
        // After the head, the next pass begins with the same weight, followed by the blocks in their order.
        assert_eq!(order.next(3), [0, 2, 1]);
        order.note(0);
        assert_eq!(order.next(2), [2, 1]);
        order.note(2);
        order.note(1);
        assert_eq!(order.next(2), [0, 2]);
    }
}
