//! Prefixes that PyTorch's wrappers put before the names of a model's tensors.

use std::collections::{HashMap, HashSet};

/// Returns the prefix of DistributedDataParallel (`module.`), of `torch.compile` (`_orig_mod.`), or of both nested,
/// that all `names` have. Empty if a name lacks it, if one of the model's `own` names also begins with it, or if
/// nothing would be left of a name.
///
/// ```
/// use brigade_checkpoint::wrapper_prefix;
///
/// let none: [&str; 0] = [];
/// assert_eq!(wrapper_prefix(&["module._orig_mod.a", "module._orig_mod.b"], &none), "module._orig_mod.");
/// assert_eq!(wrapper_prefix(&["module.a", "b"], &none), "");
/// assert_eq!(wrapper_prefix(&["module.a"], &["module.a"]), "");
/// ```
pub fn wrapper_prefix(names: &[impl AsRef<str>], own: &[impl AsRef<str>]) -> String {
    let mut prefix = String::new();
    while let Some(more) = WRAPPERS.iter().find(|more| {
        let longer = |name: &str| name.strip_prefix(&prefix).is_some_and(|rest| has(rest, more));
        !names.is_empty()
            && names.iter().all(|name| longer(name.as_ref()))
            && !own.iter().any(|name| name.as_ref().starts_with(**more))
    }) {
        prefix.push_str(more);
    }
    prefix
}

/// Returns the prefixes that wrappers and outer modules may have put before a model's names: those of
/// [`wrapper_prefix`], `model.` (Lightning's modules) and `backbone.`, in any nesting up to four deep. At least one of
/// `names` has each of them.
///
/// The right one depends on the model: it is the one with which all of its tensors fit.
///
/// ```
/// use brigade_checkpoint::prefix_candidates;
///
/// let names = ["model.module.a", "model.module.b", "loss.weight"];
/// assert_eq!(prefix_candidates(&names), ["model.", "model.module."]);
/// ```
pub fn prefix_candidates(names: &[impl AsRef<str>]) -> Vec<String> {
    let mut candidates = vec![String::new()];
    let mut at = 0;
    while let Some(prefix) = candidates.get(at).cloned() {
        at += 1;
        if prefix.matches('.').count() == MAX_DEPTH {
            continue;
        }
        for more in WRAPPERS.iter().chain(&CONTAINERS) {
            let longer =
                |name: &str| name.strip_prefix(&prefix).is_some_and(|rest| has(rest, more));
            if names.iter().any(|name| longer(name.as_ref())) {
                candidates.push(format!("{prefix}{more}"));
            }
        }
    }
    candidates.split_off(1)
}

/// Returns the [`prefix_candidates`], the paths that all names begin with (`net.`), and the path that most of the
/// model's `own` names have before them (`net.` next to a loss), if it is unique. For a run whose states are taken over
/// completely: with weights alone, a match could be another module with the same names.
pub(crate) fn prefixes_around(names: &[impl AsRef<str>], own: &[impl AsRef<str>]) -> Vec<String> {
    let mut candidates = prefix_candidates(names);
    for path in common_paths(names).chain(path_before(names, own)) {
        if !candidates.iter().any(|known| known == path) {
            candidates.push(path.to_owned());
        }
    }
    candidates
}

/// Returns the paths that all names begin with, up to four deep, the shortest first.
fn common_paths(names: &[impl AsRef<str>]) -> impl Iterator<Item = &str> {
    let first = names.first().map(AsRef::as_ref).unwrap_or_default();
    let paths = first.match_indices('.').take(MAX_DEPTH).map(|(dot, _)| &first[..=dot]);
    paths.take_while(|path| names.iter().all(|name| has(name.as_ref(), path)))
}

/// Returns the path that most of the model's own names have before them. `None` for a tie.
fn path_before<'n>(names: &'n [impl AsRef<str>], own: &[impl AsRef<str>]) -> Option<&'n str> {
    let own: HashSet<&str> = own.iter().map(AsRef::as_ref).collect();
    // Bounds the work, since a long name may have many dots.
    let longest = own.iter().map(|name| name.len()).max().unwrap_or_default();
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for name in names.iter().map(AsRef::as_ref) {
        for (dot, _) in name.match_indices('.') {
            let (path, rest) = name.split_at(dot + 1);
            if rest.len() <= longest && own.contains(rest) {
                *counts.entry(path).or_default() += 1;
            }
        }
    }
    let most = counts.values().copied().max()?;
    let mut paths = counts.into_iter().filter(|(_, count)| *count == most).map(|(path, _)| path);
    paths.next().filter(|_| paths.next().is_none())
}

/// Returns `true` if `name` begins with the prefix and is longer.
fn has(name: &str, prefix: &str) -> bool {
    name.len() > prefix.len() && name.starts_with(prefix)
}

const WRAPPERS: [&str; 2] = ["module.", "_orig_mod."];
/// Names that programs give to a model inside of another module.
const CONTAINERS: [&str; 2] = ["model.", "backbone."];
const MAX_DEPTH: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_before_most_own_names_is_a_candidate() {
        let own = ["0.weight", "0.bias", "head.weight"];
        let path = |names| path_before(names, &own);
        assert_eq!(path(&["model.0.weight", "model.0.bias"]), Some("model."));
        assert_eq!(path(&["net.model.0.weight", "net.model.head.weight"]), Some("net.model."));
        let beside_others = ["a.0.weight", "a.0.bias", "b.0.weight", "loss.weight"];
        assert_eq!(path(&beside_others), Some("a."));
        assert_eq!(prefixes_around(&beside_others, &own), ["a."]);
        for none in [
            &["0.weight", "0.bias"][..],
            &["a.0.weight", "b.0.weight"],
            &["a.1.weight"],
            &["a0.weight"],
            &[],
        ] {
            assert_eq!(path(none), None, "{none:?}");
        }
    }

    #[test]
    fn a_path_that_all_names_begin_with_is_a_candidate() {
        let table = [
            (&["net.a", "net.b.c"][..], &["net."][..]),
            (&["a.b.c.d.e.f", "a.b.c.d.e.g"], &["a.", "a.b.", "a.b.c.", "a.b.c.d."]),
            (&["model.net.a", "model.net.b"], &["model.", "model.net."]),
            (&["net.a", "network.a"], &[]),
            // Nothing would be left of the first name.
            (&["net.", "net.a"], &[]),
            (&["net.a", "a"], &[]),
            (&["größe.a", "größe.b"], &["größe."]),
            (&[], &[]),
        ];
        for (names, expected) in table {
            assert_eq!(prefixes_around(names, &[""; 0]), expected, "{names:?}");
        }
        // The file has one name of a shared parameter, and two paths fit it.
        assert_eq!(prefixes_around(&["net.head.w"], &["head.w", "w"]), ["net.", "net.head."]);
    }

    #[test]
    fn a_prefix_goes_only_when_all_names_have_it_and_the_model_does_not() {
        let prefix = |names: &[&str], own: &[&str]| wrapper_prefix(names, own);
        assert_eq!(prefix(&["module.a", "module.b.c"], &["a", "b.c"]), "module.");
        assert_eq!(prefix(&["_orig_mod.module.a"], &["a"]), "_orig_mod.module.");
        assert_eq!(prefix(&["module.module.a"], &[]), "module.module.");
        assert_eq!(prefix(&["_orig_mod.module.a"], &["module.a"]), "_orig_mod.");
        for kept in [&["module.a", "a"][..], &["module."], &["modules.a"], &[]] {
            assert_eq!(prefix(kept, &[]), "", "{kept:?}");
        }
    }
}
