//! An optimizer's state under the names that `torch.optim` gives.

use super::FileTensor;
use crate::value::Value;

/// PyTorch counts parameters through the groups; Brigade names them. `None` where the tree is none of
/// Brigade's.
pub(super) fn to_torch(
    state: &Value<FileTensor>,
    left_out: &mut Vec<String>,
) -> Option<Value<FileTensor>> {
    let (mut groups, mut states, mut index) = (Vec::new(), Vec::new(), 0i64);
    for group in state.get("groups")?.as_items()? {
        let mut numbers = Vec::new();
        let of = |key: &str| group.get("numbers")?.get(key)?.as_float();
        for (key, value) in group.get("numbers")?.as_dict()? {
            let (key, value) = (key.as_str()?, value.as_float()?);
            match key {
                "beta1" | "beta2" => {}
                _ if key.starts_with("lookahead") => {
                    left_out.push(format!("{key} = {value}: torch.optim has no Lookahead"));
                }
                _ if FLAGS.contains(&key) => numbers.push((key, Value::Bool(value != 0.0))),
                _ => numbers.push((key, Value::Float(value))),
            }
        }
        if let (Some(first), Some(second)) = (of("beta1"), of("beta2")) {
            let betas = Value::Tuple(vec![Value::Float(first), Value::Float(second)]);
            numbers.push(("betas", betas));
        }
        let mut indices = Vec::new();
        for name in group.get("parameters")?.as_items()? {
            let slots = state.get("state").and_then(|all| all.get(name.as_str()?));
            let slots = slots.and_then(Value::as_dict).unwrap_or_default();
            if !slots.is_empty() {
                states.push((Value::Int(index), Value::Dict(slots.to_vec())));
            }
            indices.push(Value::Int(index));
            index += 1;
        }
        numbers.push(("params", Value::List(indices)));
        groups.push(Value::dict(numbers));
    }
    Some(Value::dict([("state", Value::Dict(states)), ("param_groups", Value::List(groups))]))
}

/// Numbers that are truth values in PyTorch.
const FLAGS: [&str; 12] = [
    "amsgrad",
    "nesterov",
    "maximize",
    "centered",
    "decoupled_weight_decay",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
    "scale_parameter",
    "relative_step",
    "warmup_init",
];
