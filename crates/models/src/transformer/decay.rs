//! Parameters with and without weight decay.

use std::collections::HashSet;

use brigade_nn::Model;

/// Returns the names of the parameters that transformers' Trainer exempts from weight decay, in the model's order:
/// those of normalisations, and biases.
///
/// These are names that contain `bias`, `layernorm` or `rmsnorm`, or have a component `norm` or `…_norm`, as in
/// `Trainer.get_decay_parameter_names`.
///
/// ```
/// use brigade_models::{Gpt2LmHead, Gpt2Options, no_decay_parameters};
/// use brigade_nn::Model;
///
/// let options = Gpt2Options { vocab_size: 50, n_embd: 32, n_head: 4, n_layer: 1, ..Default::default() };
/// let model = Model::new(|path| Gpt2LmHead::new(path, &options))?;
/// let spared = no_decay_parameters(&model);
/// assert!(spared.contains(&"transformer.h.0.ln_1.weight".to_owned()));
/// assert!(!spared.contains(&"transformer.wte.weight".to_owned()));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[must_use]
pub fn no_decay_parameters<M>(model: &Model<M>) -> Vec<String> {
    let norms: HashSet<String> = model.norm_parameters().into_iter().collect();
    let names = model.parameters().into_iter().map(|parameter| parameter.name);
    names.filter(|name| norms.contains(name) || is_spared(&name.to_lowercase())).collect()
}

fn is_spared(name: &str) -> bool {
    ["bias", "layernorm", "rmsnorm"].iter().any(|part| name.contains(part))
        || name.split('.').any(|part| part == "norm" || part.ends_with("_norm"))
}
