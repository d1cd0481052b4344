//! Patterns of names.

/// Returns `true` if a name matches a pattern in which `*` stands for any characters.
///
/// ```
/// use brigade_checkpoint::matches_pattern;
/// assert!(matches_pattern("layers.*.mlp.*", "layers.10.mlp.up_proj"));
/// assert!(!matches_pattern("mlp", "layers.10.mlp"));
/// ```
#[must_use]
pub fn matches_pattern(pattern: &str, name: &str) -> bool {
    // The leftmost match of each piece is enough, since each may be anywhere after the one before.
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut left) = name.strip_prefix(first) else { return false };
    let mut pieces: Vec<&str> = rest.split('*').collect();
    let last = pieces.pop().unwrap_or_default();
    for piece in pieces {
        let Some(place) = left.find(piece) else { return false };
        left = &left[place + piece.len()..];
    }
    left.ends_with(last)
}
