//! Joining of layer groups.

/// Joins the groups between the first and the last into `parts` groups, in order and of nearly equal size: for example
/// the layers of a transformer's [`param_groups`](brigade_nn::Model::param_groups) into thirds.
///
/// ```
/// use brigade_models::{Gpt2LmHead, Gpt2Options, joined_layers};
/// use brigade_nn::Model;
///
/// let options = Gpt2Options { vocab_size: 50, n_embd: 32, n_head: 4, n_layer: 7, ..Default::default() };
/// let model = Model::new(|path| Gpt2LmHead::new(path, &options))?;
/// let groups = joined_layers(model.param_groups()?, 3);
/// // The embeddings, 3, 2 and 2 blocks of 12 parameters, and the head.
/// let sizes: Vec<usize> = groups.iter().map(Vec::len).collect();
/// assert_eq!(sizes, [2, 36, 24, 24, 2]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[must_use]
pub fn joined_layers(mut groups: Vec<Vec<String>>, parts: usize) -> Vec<Vec<String>> {
    let parts = parts.max(1);
    if groups.len() <= parts + 2 {
        return groups;
    }
    let last = groups.pop();
    let mut groups = groups.into_iter();
    let first = groups.next();
    let layers = groups.len();
    let sizes = (0..parts).map(|part| layers / parts + usize::from(part < layers % parts));
    let joined: Vec<Vec<String>> =
        sizes.map(|size| groups.by_ref().take(size).flatten().collect()).collect();
    first.into_iter().chain(joined).chain(last).collect()
}
