//! Special cases that were split at affixes, restored from the tokens.

use super::{Symbol, Token};

/// Tree of the special cases, each as the sequence of tokens into which the affix rules alone split it.
#[derive(Debug)]
pub(super) struct Phrases {
    /// Root nodes by the symbol of the first token.
    first: Vec<Option<usize>>,
    nodes: Vec<Node>,
}

#[derive(Debug, Default)]
struct Node {
    ends: bool,
    next: Vec<(Symbol, usize)>,
}

/// Range of tokens, with an exclusive end.
type Span = (usize, usize);

impl Phrases {
    pub(super) fn new() -> Self {
        Self { first: Vec::new(), nodes: Vec::new() }
    }

    /// Adds a sequence of symbols.
    pub(super) fn insert(&mut self, symbols: &[Symbol]) {
        let Some((first, rest)) = symbols.split_first() else { return };
        let first = *first as usize;
        if self.first.len() <= first {
            self.first.resize(first + 1, None);
        }
        let mut at = *self.first[first].get_or_insert(self.nodes.len());
        for symbol in rest {
            if at == self.nodes.len() {
                self.nodes.push(Node::default());
            }
            let known = self.nodes[at].next.iter().find(|(it, _)| it == symbol);
            at = match known {
                Some((_, node)) => *node,
                None => {
                    let new = self.nodes.len();
                    self.nodes[at].next.push((*symbol, new));
                    new
                }
            };
        }
        if at == self.nodes.len() {
            self.nodes.push(Node::default());
        }
        self.nodes[at].ends = true;
    }

    /// Returns the non-overlapping sequences among the tokens, in order. Among overlapping ones spaCy prefers the
    /// longest, and among equally long ones the first. A rejected sequence blocks others, too.
    pub(super) fn find(&self, tokens: &[Token]) -> Vec<Span> {
        let mut spans = self.all(tokens);
        if spans.len() < 2 {
            return spans;
        }
        spans.sort_unstable_by_key(|(start, end)| (start.wrapping_sub(*end), *start));
        let mut seen = vec![false; tokens.len()];
        spans.retain(|(start, end)| {
            let free = !seen[*start] && !seen[*end - 1];
            seen[*start..*end].fill(true);
            free
        });
        spans.sort_unstable();
        spans
    }

    fn all(&self, tokens: &[Token]) -> Vec<Span> {
        let mut spans = Vec::new();
        for (start, token) in tokens.iter().enumerate() {
            let Some(Some(node)) = self.first.get(token.symbol as usize) else { continue };
            let mut node = &self.nodes[*node];
            let mut end = start + 1;
            loop {
                if node.ends {
                    spans.push((start, end));
                }
                let Some(token) = tokens.get(end) else { break };
                let Some((_, next)) = node.next.iter().find(|(it, _)| *it == token.symbol) else {
                    break;
                };
                node = &self.nodes[*next];
                end += 1;
            }
        }
        spans
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_come_first_and_hide_others() {
        let mut phrases = Phrases::new();
        [&[1, 2][..], &[2, 3], &[2, 3, 4], &[1], &[5, 5]]
            .into_iter()
            .for_each(|phrase| phrases.insert(phrase));
        let find = |symbols: &[Symbol]| {
            let tokens = symbols.iter().map(|symbol| Token { start: 0, end: 0, symbol: *symbol });
            phrases.find(&tokens.collect::<Vec<_>>())
        };
        assert_eq!(find(&[0, 1, 0, 1, 2]), [(1, 2), (3, 5)]);
        assert_eq!(find(&[1, 2, 3]), [(0, 2)]);
        // The first two are rejected, and block only the first token.
        assert_eq!(find(&[1, 2, 3, 4]), [(1, 4)]);
        // The second pair is rejected, and blocks the third.
        assert_eq!(find(&[5, 5, 5, 5]), [(0, 2)]);
        assert_eq!(find(&[]), []);
    }
}
