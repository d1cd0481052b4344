//! Which weights are divided over the ranks of a tensor group, and how.

use std::fmt;

use brigade_checkpoint::matches_pattern;

/// How one weight is divided over the ranks of a tensor group (tensor parallelism, Megatron-LM's).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TensorStyle {
    /// By output features: each rank computes a part of the outputs from the whole input (PyTorch's `ColwiseParallel`).
    /// A bias is divided alike.
    Column,
    /// By input features: each rank computes a summand of all outputs from its part of the input, and the ranks add them up
    /// (PyTorch's `RowwiseParallel`). Every rank has the bias, which is added once.
    Row,
    /// By the vocabulary: the rows of an embedding or of a language head. The ranks need not divide their number.
    Vocabulary,
    /// By output features that lie in several blocks, each of which is divided.
    Heads(Heads),
}

impl fmt::Display for TensorStyle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Column => f.write_str("column"),
            Self::Row => f.write_str("row"),
            Self::Vocabulary => f.write_str("vocabulary"),
            Self::Heads(heads) => {
                let sizes: Vec<String> = heads.blocks.iter().map(u64::to_string).collect();
                write!(f, "heads {}", sizes.join(":"))
            }
        }
    }
}

/// The blocks of a fused projection, such as queries, keys and values in one weight: each block is divided over the ranks,
/// so that a rank has the queries, keys and values of its heads.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Heads {
    /// Relative sizes, in the order in which the blocks lie.
    pub(crate) blocks: Vec<u64>,
}

impl Heads {
    /// Returns that many blocks of equal size: 3 for queries, keys and values with as many heads each, 2 for the gate and up
    /// projections of a gated perceptron.
    #[must_use]
    pub fn fused(blocks: usize) -> Self {
        Self { blocks: vec![1; blocks] }
    }

    /// Returns blocks of queries, keys and values, with fewer heads of keys and values than of queries (grouped-query
    /// attention).
    #[must_use]
    pub fn grouped(query_heads: u64, key_value_heads: u64) -> Self {
        Self { blocks: vec![query_heads, key_value_heads, key_value_heads] }
    }
}

/// Patterns of parameter names with the way in which what matches is divided over the ranks of a tensor group (PyTorch's
/// `parallelize_plan`). What no pattern matches is whole on every rank.
///
/// `*` in a pattern stands for any characters, dots included. Of several patterns that match a name the last counts. Patterns
/// name weights: a bias follows its weight.
///
/// ```
/// use brigade_sharding::{Heads, TensorPlan, TensorStyle};
///
/// let plan = TensorPlan::new()
///     .heads("*.qkv.weight", Heads::fused(3))
///     .column("*.up.weight")
///     .row("*.down.weight")
///     .vocabulary("embed.weight");
/// assert_eq!(plan.style("block.0.up.weight"), Some(&TensorStyle::Column));
/// assert_eq!(plan.style("block.0.norm.weight"), None);
/// assert_eq!(plan.unmatched(["embed.weight", "block.0.qkv.weight", "block.0.up.weight"]), ["*.down.weight"]);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TensorPlan {
    rules: Vec<Rule>,
    has_sequence_regions: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Rule {
    pattern: String,
    /// `None`: whole on every rank.
    style: Option<TensorStyle>,
    is_optional: bool,
}

impl TensorPlan {
    /// Returns a plan that divides nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Divides the weights of linear layers whose names match by output features.
    #[must_use]
    pub fn column(self, pattern: impl Into<String>) -> Self {
        self.rule(pattern, Some(TensorStyle::Column))
    }

    /// Divides the weights of linear layers whose names match by input features.
    #[must_use]
    pub fn row(self, pattern: impl Into<String>) -> Self {
        self.rule(pattern, Some(TensorStyle::Row))
    }

    /// Divides the weights of embeddings and language heads whose names match by the vocabulary.
    #[must_use]
    pub fn vocabulary(self, pattern: impl Into<String>) -> Self {
        self.rule(pattern, Some(TensorStyle::Vocabulary))
    }

    /// Divides the weights of fused projections whose names match by the output features of each block.
    #[must_use]
    pub fn heads(self, pattern: impl Into<String>, heads: Heads) -> Self {
        self.rule(pattern, Some(TensorStyle::Heads(heads)))
    }

    /// Leaves parameters whose names match whole on every rank: an exception from an earlier pattern.
    #[must_use]
    pub fn replicated(self, pattern: impl Into<String>) -> Self {
        self.rule(pattern, None)
    }

    /// Lets the patterns so far match nothing: for the plan of an architecture whose options decide which layers it has. A
    /// pattern that matches nothing is an error otherwise.
    #[must_use]
    pub fn optional(mut self) -> Self {
        self.rules.iter_mut().for_each(|rule| rule.is_optional = true);
        self
    }

    /// Has each rank compute a part of the sequence between divided layers, in normalisations, dropout and residuals, so that
    /// their activations are divided too (Megatron-LM's sequence parallelism): sequences are gathered before a divided layer,
    /// and the sums behind it are scattered, which takes as many bytes as the sums alone. Off unless set.
    ///
    /// ```
    /// use brigade_sharding::TensorPlan;
    ///
    /// let plan = TensorPlan::new().column("*.up.weight").row("*.down.weight").sequence_regions(true);
    /// assert!(plan.has_sequence_regions());
    /// ```
    #[must_use]
    pub fn sequence_regions(mut self, on: bool) -> Self {
        self.has_sequence_regions = on;
        self
    }

    /// Returns whether each rank computes a part of the sequence between divided layers.
    #[must_use]
    pub fn has_sequence_regions(&self) -> bool {
        self.has_sequence_regions
    }

    /// Returns this plan with the patterns of another behind its own.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.has_sequence_regions |= other.has_sequence_regions;
        self.rules.extend(other.rules);
        self
    }

    /// Returns how the parameter of this name is divided; `None` for one that is whole on every rank.
    #[must_use]
    pub fn style(&self, name: &str) -> Option<&TensorStyle> {
        let rule = self.rules.iter().rev().find(|rule| matches_pattern(&rule.pattern, name))?;
        rule.style.as_ref()
    }

    /// Returns the patterns that match none of the names, without those that [may](Self::optional) do so.
    pub fn unmatched<'n>(&self, names: impl IntoIterator<Item = &'n str>) -> Vec<&str> {
        let names: Vec<&str> = names.into_iter().collect();
        let has_none = |rule: &&Rule| {
            !rule.is_optional && !names.iter().any(|name| matches_pattern(&rule.pattern, name))
        };
        self.rules.iter().filter(has_none).map(|rule| rule.pattern.as_str()).collect()
    }

    fn rule(mut self, pattern: impl Into<String>, style: Option<TensorStyle>) -> Self {
        self.rules.push(Rule { pattern: pattern.into(), style, is_optional: false });
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, name, fits) in [
            ("a.weight", "a.weight", true),
            ("a.weight", "b.a.weight", false),
            ("*a.weight", "b.a.weight", true),
            ("*.a.weight", "a.weight", false),
            ("h.*.attn.*", "h.0.attn.q.weight", true),
            ("h.*.attn.*", "h.0.mlp.q.weight", false),
            ("*weight", "a.weight.weight", true),
            ("*a*a", "a", false),
            ("*a*a", "aa", true),
            ("*", "", true),
            ("", "a", false),
            ("größe.*", "größe.ß", true),
        ] {
            assert_eq!(matches_pattern(pattern, name), fits, "{pattern} {name}");
        }
    }

    #[test]
    fn later_patterns_count() {
        let plan = TensorPlan::new().column("*.weight").replicated("*.key.weight").row("b.*");
        assert_eq!(plan.style("a.query.weight"), Some(&TensorStyle::Column));
        assert_eq!(plan.style("a.key.weight"), None);
        assert_eq!(plan.style("b.key.weight"), Some(&TensorStyle::Row));
        assert_eq!(plan.unmatched(["a.key.weight"]), ["b.*"]);
        assert!(plan.clone().optional().unmatched(["x"]).is_empty());
        assert_eq!(plan.optional().and(TensorPlan::new().row("z")).unmatched(["x"]), ["z"]);
    }
}
