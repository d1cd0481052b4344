//! Plans of tensor parallelism: the weights that are divided over the ranks of a tensor group, and their styles.

use std::fmt;

use brigade_checkpoint::matches_pattern;

/// Style of tensor parallelism (Megatron-LM's): the way in which one weight is divided over the ranks of a tensor
/// group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TensorStyle {
    /// Column-parallel, by output features: each rank computes a part of the outputs from the whole input (PyTorch's
    /// `ColwiseParallel`). A bias is divided in the same way.
    Column,
    /// Row-parallel, by input features: each rank computes a summand of all outputs from its part of the input, and the
    /// ranks sum them (PyTorch's `RowwiseParallel`). Every rank has the bias, which is added once.
    Row,
    /// Vocabulary-parallel: the rows of an embedding or of a language head are divided. Their number need not be
    /// divisible by the number of ranks.
    Vocabulary,
    /// Column-parallel for fused projections: the output features of each of several blocks are divided.
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

/// Blocks of a fused projection, such as queries, keys and values in one weight. Each block is divided over the ranks,
/// so that a rank has the queries, keys and values of its heads.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Heads {
    /// Relative sizes of the blocks, in their order in the weight.
    pub(crate) blocks: Vec<u64>,
}

impl Heads {
    /// Returns `blocks` blocks of equal size: 3 for queries, keys and values with the same number of heads, 2 for the
    /// gate and up projections of a gated feed-forward layer.
    #[must_use]
    pub fn fused(blocks: usize) -> Self {
        Self { blocks: vec![1; blocks] }
    }

    /// Returns the blocks of queries, keys and values in grouped-query attention, which has fewer heads of keys and
    /// values than of queries.
    #[must_use]
    pub fn grouped(query_heads: u64, key_value_heads: u64) -> Self {
        Self { blocks: vec![query_heads, key_value_heads, key_value_heads] }
    }
}

/// Plan of tensor parallelism: patterns of parameter names, each with the style in which matching parameters are
/// divided over the ranks of a tensor group (PyTorch's `parallelize_plan`). Parameters that no pattern matches are
/// whole on every rank.
///
/// `*` in a pattern stands for any characters, dots included. If several patterns match a name, the last one counts.
/// Patterns match the names of weights, and a bias follows its weight.
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
    /// `None` if matching parameters are whole on every rank.
    style: Option<TensorStyle>,
    is_optional: bool,
}

impl TensorPlan {
    /// Creates a plan that divides nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Divides the weights of linear layers whose names match `pattern` by output features ([`TensorStyle::Column`]).
    #[must_use]
    pub fn column(self, pattern: impl Into<String>) -> Self {
        self.rule(pattern, Some(TensorStyle::Column))
    }

    /// Divides the weights of linear layers whose names match `pattern` by input features ([`TensorStyle::Row`]).
    #[must_use]
    pub fn row(self, pattern: impl Into<String>) -> Self {
        self.rule(pattern, Some(TensorStyle::Row))
    }

    /// Divides the weights of embeddings and language heads whose names match `pattern` by the vocabulary
    /// ([`TensorStyle::Vocabulary`]).
    #[must_use]
    pub fn vocabulary(self, pattern: impl Into<String>) -> Self {
        self.rule(pattern, Some(TensorStyle::Vocabulary))
    }

    /// Divides the weights of fused projections whose names match `pattern` by the output features of each block
    /// ([`TensorStyle::Heads`]).
    #[must_use]
    pub fn heads(self, pattern: impl Into<String>, heads: Heads) -> Self {
        self.rule(pattern, Some(TensorStyle::Heads(heads)))
    }

    /// Keeps parameters whose names match `pattern` whole on every rank, as an exception from an earlier pattern.
    #[must_use]
    pub fn replicated(self, pattern: impl Into<String>) -> Self {
        self.rule(pattern, None)
    }

    /// Makes the patterns so far optional, for the plan of an architecture whose options decide which layers it has.
    /// Other patterns that match nothing are an error.
    #[must_use]
    pub fn optional(mut self) -> Self {
        self.rules.iter_mut().for_each(|rule| rule.is_optional = true);
        self
    }

    /// Sets whether each rank computes a part of the sequence between divided layers, in normalisations, dropout and
    /// residual branches, so that their activations are divided too (Megatron-LM's sequence parallelism). Sequences are
    /// gathered before a divided layer, and the sums behind it are scattered, which takes as many bytes as an
    /// all-reduce of the sums. Defaults to `false`.
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

    /// Returns `true` if each rank computes a part of the sequence between divided layers.
    #[must_use]
    pub fn has_sequence_regions(&self) -> bool {
        self.has_sequence_regions
    }

    /// Returns this plan with the patterns of another plan appended.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.has_sequence_regions |= other.has_sequence_regions;
        self.rules.extend(other.rules);
        self
    }

    /// Returns the style in which the parameter of this name is divided. `None` for a parameter that is whole on every
    /// rank.
    #[must_use]
    pub fn style(&self, name: &str) -> Option<&TensorStyle> {
        let rule = self.rules.iter().rev().find(|rule| matches_pattern(&rule.pattern, name))?;
        rule.style.as_ref()
    }

    /// Returns the patterns that match none of the names, except for [optional](Self::optional) ones.
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
