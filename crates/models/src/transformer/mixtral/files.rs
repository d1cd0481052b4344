//! Names of the published files, in which each expert has tensors of its own.

use std::collections::BTreeMap;

use brigade_checkpoint::{Stack, WeightsReader};
use brigade_torch::Result;
use tch::Tensor;

/// Module of the router and the experts, in files and in the model.
const IN_FILES: &str = ".block_sparse_moe.";
const IN_MODEL: &str = ".mlp.";

/// Names of an expert's gate, up and down projections.
const GATE: &str = "w1.weight";
const UP: &str = "w3.weight";
const DOWN: &str = "w2.weight";

/// Converts the names of open weights to the model's, and stacks the experts' tensors.
pub(super) fn adapt(weights: &mut WeightsReader) -> Result<()> {
    // The number of experts of each layer, by the part of the name before their numbers.
    let mut experts: BTreeMap<String, usize> = BTreeMap::new();
    for tensor in weights.tensors() {
        if let Some((before, expert)) = expert_of(tensor.name()) {
            let count = experts.entry(before.to_owned()).or_default();
            *count = (*count).max(expert + 1);
        }
    }
    let mut stacks = Vec::with_capacity(2 * experts.len());
    // An expert number larger than the number of tensors: one of them is missing, which `stack` reports.
    let most = weights.tensors().len();
    for (before, count) in experts {
        let part = |expert: usize, name: &str| format!("{before}{expert}.{name}");
        let after = before.replace(IN_FILES, IN_MODEL);
        let numbers = 0..count.min(most);
        let halves = |expert| vec![part(expert, GATE), part(expert, UP)];
        let name = format!("{after}gate_up_proj");
        stacks.push(Stack { name, elements: numbers.clone().map(halves).collect() });
        let name = format!("{after}down_proj");
        let down = |expert| vec![part(expert, DOWN)];
        stacks.push(Stack { name, elements: numbers.map(down).collect() });
    }
    weights.stack(stacks)?;
    weights.rename(|name| name.contains(IN_FILES).then(|| name.replace(IN_FILES, IN_MODEL)));
    Ok(())
}

/// Splits a name into the part before an expert's number, and the number.
fn expert_of(name: &str) -> Option<(&str, usize)> {
    let before = name.find(".experts.")? + ".experts.".len();
    let (number, rest) = name[before..].split_once('.')?;
    let is_known = [GATE, UP, DOWN].contains(&rest) && name[..before].contains(IN_FILES);
    // The largest number has no successor for a count; such a name is kept, and matches nothing.
    let number: usize = number.parse().ok().filter(|&number| is_known && number < usize::MAX)?;
    Some((&name[..before], number))
}

/// Returns the tensors of a file for a tensor of the model.
pub(super) fn saved(name: &str, tensor: &Tensor) -> Result<Vec<(String, Tensor)>> {
    let Some((before, after)) = name.rsplit_once(IN_MODEL) else {
        return Ok(vec![(name.to_owned(), tensor.shallow_clone())]);
    };
    let mut saved = Vec::new();
    let mut add = |expert: usize, name: &str, tensor: Tensor| {
        saved.push((format!("{before}{IN_FILES}experts.{expert}.{name}"), tensor));
    };
    match after {
        "experts.gate_up_proj" => {
            for (expert, both) in tensor.f_unbind(0)?.into_iter().enumerate() {
                let rows = both.size()[0] / 2;
                add(expert, GATE, both.f_narrow(0, 0, rows)?);
                add(expert, UP, both.f_narrow(0, rows, rows)?);
            }
        }
        "experts.down_proj" => {
            for (expert, down) in tensor.f_unbind(0)?.into_iter().enumerate() {
                add(expert, DOWN, down);
            }
        }
        _ => saved.push((format!("{before}{IN_FILES}{after}"), tensor.shallow_clone())),
    }
    Ok(saved)
}
