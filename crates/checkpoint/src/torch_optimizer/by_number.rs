//! Conversion between optimizer states keyed by parameter names and by numbers.
//!
//! `get_optimizer_state_dict` and `FSDP.optim_state_dict` use the parameters' names where an optimizer's own state has
//! numbers: `{'state': {'0.weight': {'exp_avg': ...}}, 'param_groups': [{'lr': ..., 'params': ['0.weight']}]}`. When
//! flattened, each tensor and number has a key of its own, and the groups are lost: `{'state.0.weight.exp_avg': ...,
//! 'param_groups.0.weight.lr': ...}`.

use std::collections::{BTreeMap, HashMap};

use indexmap::IndexMap;

use super::{StateTensor, TorchStateError, layout, number_of, own_prefix, strings};
use crate::value::Value;

/// Converts a state keyed by names into the form with numbers and `param_names`. `None` for any other state.
pub(super) fn numbered<T: StateTensor>(
    theirs: &Value<T>,
    like: &Value<T>,
) -> Result<Option<Value<T>>, TorchStateError> {
    let Some(entries) = theirs.as_dict() else { return Ok(None) };
    let is_named = |group: &Value<T>| {
        let first = group.get("params").and_then(Value::as_items).and_then(<[_]>::first);
        first.is_some_and(|it| it.as_str().is_some())
    };
    match theirs.get("param_groups").and_then(Value::as_items) {
        Some(groups) if groups.iter().any(is_named) => Ok(Some(of_names(theirs, groups))),
        Some(_) => Ok(None),
        None if entries.iter().any(|(key, _)| is_flat(key)) => flat(entries, like).map(Some),
        None => Ok(None),
    }
}

/// Converts a state keyed by numbers into the form with the names in `ours`, whose parameters were numbered. Adds
/// missing `settings` to groups. `None` if the two do not fit.
pub(super) fn named<T: Clone>(
    theirs: Value<T>,
    ours: &Value<T>,
    settings: &[&str],
) -> Option<Value<T>> {
    let groups = ours.get("groups")?.as_items()?;
    let groups: Vec<Vec<String>> =
        groups.iter().map(|group| strings(group.get("parameters"))).collect::<Option<_>>()?;
    let names = groups.concat();
    let Value::Dict(mut entries) = theirs else { return None };
    for (key, value) in &mut entries {
        match (key.as_str(), value) {
            (Some("state"), Value::Dict(states)) => {
                for (key, _) in states {
                    let number = usize::try_from(key.as_int()?).ok()?;
                    *key = Value::Str(names.get(number)?.clone());
                }
            }
            (Some("param_groups"), Value::List(made)) => {
                for (group, names) in made.iter_mut().zip(&groups) {
                    let Value::Dict(numbers) = group else { return None };
                    let names = names.iter().cloned().map(Value::Str).collect();
                    numbers.retain(|(key, _)| key.as_str() != Some("params"));
                    for &setting in settings {
                        if numbers.iter().any(|(key, _)| key.as_str() == Some(setting)) {
                            continue;
                        }
                        let value = match setting {
                            "foreach" | "fused" => Value::None,
                            _ => Value::Bool(false),
                        };
                        numbers.push((Value::Str(setting.to_owned()), value));
                    }
                    numbers.push((Value::Str("params".into()), Value::List(names)));
                }
            }
            _ => {}
        }
    }
    Some(Value::Dict(entries))
}

fn is_flat<T>(key: &Value<T>) -> bool {
    key.as_str().is_some_and(|key| key.starts_with(GROUPS))
}

fn of_names<T: StateTensor>(theirs: &Value<T>, groups: &[Value<T>]) -> Value<T> {
    let mut numbers = HashMap::new();
    let mut made = Vec::with_capacity(groups.len());
    for group in groups {
        let names = strings(group.get("params")).unwrap_or_default();
        let entries = group.as_dict().unwrap_or_default().iter();
        let rest =
            entries.filter(|(key, _)| !matches!(key.as_str(), Some("params" | "param_names")));
        made.push(numbered_group(rest.cloned().collect(), names, &mut numbers));
    }
    // An unknown name is kept, and is an error of the next reader.
    let states = theirs.get("state").and_then(Value::as_dict).unwrap_or_default().iter();
    let states = states.map(|(key, value)| {
        let number = key.as_str().and_then(|name| numbers.get(name));
        (number.map_or_else(|| key.clone(), |number| Value::Int(*number)), value.clone())
    });
    let states = Value::Dict(states.collect());
    Value::dict([("state", states), ("param_groups", Value::List(made))])
}

/// Returns a group of named parameters, which get the next numbers.
fn numbered_group<T>(
    mut entries: Vec<(Value<T>, Value<T>)>,
    names: Vec<String>,
    numbers: &mut HashMap<String, i64>,
) -> Value<T> {
    let mut params = Vec::with_capacity(names.len());
    for name in &names {
        let number = numbers.len() as i64;
        params.push(Value::Int(number));
        numbers.insert(name.clone(), number);
    }
    let names = names.into_iter().map(Value::Str).collect();
    entries.push((Value::Str("params".into()), Value::List(params)));
    entries.push((Value::Str("param_names".into()), Value::List(names)));
    Value::Dict(entries)
}

/// Entries of one parameter in a flattened state.
struct Parameter<T> {
    numbers: Vec<(Value<T>, Value<T>)>,
    slots: Vec<(Value<T>, Value<T>)>,
}

/// Converts a flattened state into the groups of the program's optimizer.
fn flat<T: StateTensor>(
    entries: &[(Value<T>, Value<T>)],
    like: &Value<T>,
) -> Result<Value<T>, TorchStateError> {
    let mut parameters: IndexMap<String, Parameter<T>> = IndexMap::new();
    for (key, value) in entries {
        let expected = || layout("`state.NAME.SLOT` and `param_groups.NAME.KEY`", key);
        let text = key.as_str().ok_or_else(expected)?;
        let (is_number, rest) = match (text.strip_prefix(GROUPS), text.strip_prefix(STATE)) {
            (Some(rest), _) => (true, rest),
            (None, Some(rest)) => (false, rest),
            (None, None) => return Err(expected()),
        };
        let (name, last) = rest.rsplit_once('.').ok_or_else(expected)?;
        let new = || Parameter { numbers: Vec::new(), slots: Vec::new() };
        let parameter = parameters.entry(name.to_owned()).or_insert_with(new);
        let list = if is_number { &mut parameter.numbers } else { &mut parameter.slots };
        list.push((Value::Str(last.to_owned()), value.clone()));
    }
    let groups = like.get("groups").and_then(Value::as_items).unwrap_or_default();
    let groups: Vec<Vec<String>> =
        groups.iter().map(|group| strings(group.get("parameters")).unwrap_or_default()).collect();
    let names: Vec<String> = parameters.keys().cloned().collect();
    let prefix = own_prefix(&names, &groups.concat());
    let (mut numbers, mut made, mut states) = (HashMap::new(), Vec::new(), Vec::new());
    for (index, own) in groups.into_iter().enumerate() {
        let mut shared: Option<Vec<(Value<T>, Value<T>)>> = None;
        for name in &own {
            let theirs = parameters.swap_remove(&format!("{prefix}{name}"));
            let absent = || TorchStateError::Absent { group: index, name: name.clone() };
            let Parameter { numbers: keys, slots } = theirs.ok_or_else(absent)?;
            if !slots.is_empty() {
                states.push((name.clone(), Value::Dict(slots)));
            }
            let Some(first) = &shared else {
                shared = Some(keys);
                continue;
            };
            if let Some(key) = difference(first, &keys) {
                return Err(TorchStateError::Differs { group: index, name: name.clone(), key });
            }
        }
        made.push(numbered_group(shared.unwrap_or_default(), own, &mut numbers));
    }
    if let Some(name) = parameters.into_keys().next() {
        return Err(TorchStateError::Unknown { name });
    }
    let states = states.into_iter();
    let states = states.filter_map(|(name, slots)| Some((Value::Int(*numbers.get(&name)?), slots)));
    let states = Value::Dict(states.collect());
    Ok(Value::dict([("state", states), ("param_groups", Value::List(made))]))
}

/// Returns the first key whose values differ.
fn difference<T: StateTensor>(
    a: &[(Value<T>, Value<T>)],
    b: &[(Value<T>, Value<T>)],
) -> Option<String> {
    let by_key = |list: &[(Value<T>, Value<T>)]| -> BTreeMap<String, Value<T>> {
        let named = list.iter().map(|(key, value)| (key.as_str().unwrap_or_default(), value));
        named.map(|(key, value)| (key.to_owned(), value.clone())).collect()
    };
    let (a, b) = (by_key(a), by_key(b));
    let differs =
        |(key, value): &(&String, &Value<T>)| !b.get(*key).is_some_and(|other| same(value, other));
    let found = a.iter().find(differs).or_else(|| b.iter().find(|(key, _)| !a.contains_key(*key)));
    found.map(|(key, _)| key.clone())
}

fn same<T: StateTensor>(a: &Value<T>, b: &Value<T>) -> bool {
    match (number_of(a), number_of(b), a.as_items(), b.as_items()) {
        (Some(a), Some(b), ..) => a == b,
        (None, None, Some(a), Some(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b))
        }
        (None, None, None, None) => a.describe() == b.describe() && a.as_str() == b.as_str(),
        _ => false,
    }
}

const STATE: &str = "state.";
const GROUPS: &str = "param_groups.";

#[cfg(test)]
mod tests {
    use super::super::{TorchStateError, from_torch, to_torch_by_name};
    use super::*;

    #[derive(Debug, Clone, PartialEq)]
    struct Number(f64);

    impl StateTensor for Number {
        fn scalar(&self) -> Option<f64> {
            Some(self.0)
        }

        fn from_scalar(number: f64) -> Self {
            Self(number)
        }
    }

    type State = Value<Number>;

    fn strings(names: &[&str]) -> State {
        Value::List(names.iter().map(|name| Value::Str((*name).to_owned())).collect())
    }

    /// Returns a program's optimizer: weight decay for `a`, none for `b` and `c`.
    fn like() -> State {
        let group = |decay: f64, names: &[&str]| {
            let numbers = Value::dict([
                ("lr", Value::Float(0.5)),
                ("beta1", Value::Float(0.9)),
                ("beta2", Value::Float(0.99)),
                ("weight_decay", Value::Float(decay)),
            ]);
            Value::dict([("numbers", numbers), ("parameters", strings(names))])
        };
        Value::dict([
            ("steps", Value::Int(0)),
            ("groups", Value::List(vec![group(0.5, &["a"]), group(0.5, &["b", "c"])])),
            ("state", Value::Dict(Vec::new())),
        ])
    }

    fn flat_state(prefix: &str) -> Vec<(String, State)> {
        let mut entries = Vec::new();
        for (name, decay, moment) in [("c", 0.0, 3.0), ("a", 0.1, 1.0), ("b", 0.0, 2.0)] {
            let key = |kind: &str, last: &str| format!("{kind}.{prefix}{name}.{last}");
            let betas = Value::Tuple(vec![Value::Float(0.8), Value::Float(0.95)]);
            entries.push((key("state", "exp_avg"), Value::Tensor(Number(moment))));
            entries.push((key("state", "step"), Value::Tensor(Number(7.0))));
            entries.push((key("param_groups", "lr"), Value::Float(0.25)));
            entries.push((key("param_groups", "betas"), betas));
            entries.push((key("param_groups", "weight_decay"), Value::Float(decay)));
            entries.push((key("param_groups", "fused"), Value::None));
        }
        entries
    }

    fn check(state: &State) {
        let (made, steps) = from_torch(state, &like()).unwrap();
        assert_eq!(steps, 7);
        let groups = made.get("groups").and_then(Value::as_items).unwrap();
        let number = |group: &State, key: &str| group.get("numbers")?.get(key)?.as_float();
        let decays: Vec<_> = groups.iter().map(|group| number(group, "weight_decay")).collect();
        assert_eq!(decays, [Some(0.1), Some(0.0)]);
        assert_eq!(
            (number(&groups[1], "lr"), number(&groups[1], "beta1")),
            (Some(0.25), Some(0.8))
        );
        for (name, moment) in [("a", 1.0), ("b", 2.0), ("c", 3.0)] {
            let slots = made.get("state").and_then(|states| states.get(name)).unwrap();
            assert_eq!(slots.get("exp_avg"), Some(&Value::Tensor(Number(moment))), "{name}");
        }
    }

    #[test]
    fn flattened_states_come_into_the_groups_of_the_program() {
        check(&Value::dict(flat_state("")));
        check(&Value::dict(flat_state("module.")));
    }

    #[test]
    fn states_under_names_are_numbered() {
        let slots = |moment: f64| {
            Value::dict([
                ("exp_avg", Value::Tensor(Number(moment))),
                ("step", Value::Tensor(Number(7.0))),
            ])
        };
        let group = |decay: f64, names: &[&str]| {
            Value::dict([
                ("params", strings(names)),
                ("lr", Value::Float(0.25)),
                ("betas", Value::Tuple(vec![Value::Float(0.8), Value::Float(0.95)])),
                ("weight_decay", Value::Float(decay)),
            ])
        };
        let state = |states: Vec<(&str, State)>| {
            let groups = Value::List(vec![group(0.1, &["a"]), group(0.0, &["c", "b"])]);
            Value::dict([("state", Value::dict(states)), ("param_groups", groups)])
        };
        check(&state(vec![("c", slots(3.0)), ("b", slots(2.0)), ("a", slots(1.0))]));
        let error = from_torch(&state(vec![("d", slots(1.0))]), &like()).unwrap_err();
        assert!(matches!(error, TorchStateError::Layout { .. }), "{error}");
    }

    #[test]
    fn flattened_states_of_other_parameters_or_groups_are_named() {
        let refused = |entries: Vec<(String, State)>| {
            from_torch(&Value::dict(entries), &like()).unwrap_err().to_string()
        };
        let mut fewer = flat_state("");
        fewer.retain(|(key, _)| !key.contains(".b."));
        let expected = "it has no parameter `b`, which is in group 1 of the program's optimizer";
        assert_eq!(refused(fewer), expected);
        let mut more = flat_state("");
        more.push(("state.d.exp_avg".into(), Value::Tensor(Number(1.0))));
        let expected = "it has a parameter `d`, which the program's optimizer does not have";
        assert_eq!(refused(more), expected);
        let mut other = flat_state("");
        for (key, value) in &mut other {
            if key == "param_groups.b.lr" {
                *value = Value::Float(0.75);
            }
        }
        let error = refused(other);
        assert!(
            error
                .starts_with("`lr` of the parameter `c` differs from that of the other parameters"),
            "{error}"
        );
        let mut strange = flat_state("");
        strange.push(("epoch".into(), Value::Int(3)));
        assert!(refused(strange).contains("`state.NAME.SLOT`"));
    }

    /// Covers settings, and hyperparameters that PyTorch stores as tuples, strings and integers.
    #[test]
    fn names_and_settings_are_those_of_get_optimizer_state_dict() {
        let numbers = [
            ("lr", 0.5),
            ("initial_lr", 0.5),
            ("momentum", 0.9),
            ("weight_decay", 0.0),
            ("nesterov", 1.0),
            ("ns_coefficients_a", 3.0),
            ("ns_coefficients_b", -4.0),
            ("ns_coefficients_c", 2.0),
            ("ns_steps", 5.0),
            ("eps1", 1e-30),
            ("eps2", 1e-3),
            ("match_rms_adamw", 1.0),
        ];
        let group = Value::dict([
            ("numbers", Value::dict(numbers.map(|(name, number)| (name, Value::Float(number))))),
            ("parameters", strings(&["b", "a"])),
        ]);
        let slots = Value::dict([("step", Value::Tensor(Number(2.0)))]);
        let ours = Value::dict([
            ("kind", Value::Str("SGD".into())),
            ("steps", Value::Int(2)),
            ("groups", Value::List(vec![group])),
            ("state", Value::dict([("a", slots)])),
        ]);
        let theirs = to_torch_by_name(&ours, &mut Vec::new()).unwrap();
        let group = &theirs.get("param_groups").and_then(Value::as_items).unwrap()[0];
        let floats = |numbers: &[f64]| {
            Value::Tuple(numbers.iter().map(|number| Value::Float(*number)).collect())
        };
        assert_eq!(group.get("params"), Some(&strings(&["b", "a"])));
        assert_eq!(group.get("ns_coefficients"), Some(&floats(&[3.0, -4.0, 2.0])));
        assert_eq!(group.get("eps"), Some(&floats(&[1e-30, 1e-3])));
        assert_eq!(group.get("ns_steps"), Some(&Value::Int(5)));
        assert_eq!(group.get("adjust_lr_fn"), Some(&Value::Str("match_rms_adamw".into())));
        let settings = ["foreach", "differentiable", "fused", "capturable"].map(|it| group.get(it));
        let expected = [Some(&Value::None), Some(&Value::Bool(false)), Some(&Value::None), None];
        assert_eq!(settings, expected);
        assert!(theirs.get("state").and_then(|states| states.get("a")).is_some());
        let (back, steps) = from_torch(&theirs, &ours).unwrap();
        assert_eq!((back.get("groups"), steps), (ours.get("groups"), 2));
        assert_eq!(back.get("state"), ours.get("state"));
    }
}
