//! State that differs between ranks: random states, hooks' states, gradients within an accumulation window.

use brigade_checkpoint::{TensorInfo, Value};
use brigade_torch::{
    DeviceExt, Error, Result, cpu_kernels, gradient, libtorch_version, rng_state, set_gradient,
    set_rng_state,
};
use tch::{Device, Tensor};

use super::inner::Inner;
use crate::loss_weight::WeightedWindow;
use crate::registry::Checkpointed;

/// An object with its name in checkpoints.
pub(super) type Named = (String, std::sync::Arc<dyn Checkpointed>);

pub(super) fn state(checkpoints: &Inner, objects: &[Named]) -> Result<Value<Tensor>> {
    let mut random = vec![("cpu".to_owned(), Value::Bytes(rng_state(Device::Cpu)?))];
    let device = checkpoints.processes.device();
    if let Some((kind, _)) = device.device_kind() {
        random.push((kind.name().to_owned(), Value::Bytes(rng_state(device)?)));
    }
    let mut gradients = Vec::new();
    if checkpoints.accumulator.position() > 0 {
        for (name, object) in objects {
            let mut of_model = Vec::new();
            for saved in object.tensors().unwrap_or_default().iter().filter(|saved| saved.trained) {
                if let Some(gradient) = gradient(&saved.tensor)? {
                    of_model.push((saved.name.clone(), Value::Tensor(gradient)));
                }
            }
            if !of_model.is_empty() {
                gradients.push((name.clone(), Value::dict(of_model)));
            }
        }
    }
    let mut own = Vec::new();
    for (name, object) in objects {
        if let Some(hook) = object.hook() {
            own.push((name.clone(), hook.state_dict()?));
        }
    }
    let window = match &*checkpoints.accumulator.weighted() {
        Some(WeightedWindow { weight, divisor }) => {
            let [weight, divisor] = [weight, divisor].map(|number| number.f_double_value(&[]));
            Value::dict([("weight", Value::Float(weight?)), ("divisor", Value::Float(divisor?))])
        }
        None => Value::None,
    };
    Ok(Value::dict([
        ("random", Value::dict(random)),
        ("gradients", Value::dict(gradients)),
        ("weighted_window", window),
        ("own", Value::dict(own)),
        ("arithmetic", Value::dict(arithmetic())),
    ]))
}

/// Returns the settings that determine the order of additions on a CPU, and with it the last bits of a step.
fn arithmetic() -> [(&'static str, Value<Tensor>); 3] {
    [
        ("threads", Value::Int(i64::from(tch::get_num_threads()))),
        ("kernels", Value::Str(cpu_kernels())),
        ("libtorch", Value::Str(libtorch_version())),
    ]
}

/// Returns the reason why a run on a CPU does not continue bit for bit from a rank's state. `None` if it does, or if
/// the state does not contain the settings.
fn other_arithmetic(state: &Value<Tensor>) -> Option<String> {
    let saved = state.get("arithmetic")?;
    let show = |value: &Value<Tensor>| match value {
        Value::Int(number) => number.to_string(),
        other => other.as_str().unwrap_or_default().to_owned(),
    };
    let differences = arithmetic().into_iter().filter_map(|(name, here)| {
        let (saved, here) = (show(saved.get(name)?), show(&here));
        (saved != here).then(|| format!("{name}: {saved} then, {here} now"))
    });
    let differences: Vec<String> = differences.collect();
    (!differences.is_empty()).then(|| {
        format!(
            "the last digits will differ from those of the run that was saved, which added in another \
             order ({})",
            differences.join("; ")
        )
    })
}

/// Returns the gradients of a checkpoint, each with its parameter.
pub(super) fn gradients<'s, T>(
    state: &'s Value<T>,
    objects: &[Named],
) -> Result<Vec<(Tensor, &'s T)>, String> {
    let mut pairs = Vec::new();
    for (model, named) in state.get("gradients").and_then(Value::as_dict).unwrap_or_default() {
        let known = objects.iter().find(|(name, _)| Some(name.as_str()) == model.as_str());
        let parameters = known.and_then(|(_, object)| object.tensors()).unwrap_or_default();
        for (name, gradient) in named.as_dict().unwrap_or_default() {
            let parameter =
                parameters.iter().find(|p| p.trained && Some(p.name.as_str()) == name.as_str());
            match (parameter, gradient.as_tensor()) {
                (Some(parameter), Some(gradient)) => {
                    pairs.push((parameter.tensor.shallow_clone(), gradient));
                }
                _ => {
                    return Err(format!(
                        "it has a gradient of `{}`, which is not trained here",
                        name.as_str().unwrap_or_default()
                    ));
                }
            }
        }
    }
    Ok(pairs)
}

/// Checks the states of communication hooks, which differ between ranks.
pub(super) fn check_hooks(state: &Value<TensorInfo>, objects: &[Named]) -> Result<(), String> {
    let own = |name: &str| state.get("own").and_then(|own| own.get(name));
    let mut known = objects.iter().filter_map(|(name, object)| own(name).map(|own| (object, own)));
    known.try_for_each(|(object, own)| {
        object.hook().map_or(Ok(()), |hook| hook.check_state_dict(own))
    })
}

/// Restores the states; returns the reason why the run does not continue bit for bit, if it does not.
pub(super) fn restore(
    checkpoints: &Inner,
    objects: &[Named],
    states: &[Value<Tensor>],
    random: bool,
) -> Result<Option<String>> {
    // Another number of ranks adds in another order anyway.
    let on_cpu = states.first().filter(|_| random && checkpoints.processes.device() == Device::Cpu);
    let difference = on_cpu.and_then(other_arithmetic);
    for (_, object) in objects {
        for saved in object.tensors().unwrap_or_default().iter().filter(|saved| saved.trained) {
            brigade_torch::clear_gradient(&saved.tensor)?;
        }
    }
    // The mean of all ranks' gradients equals the result of their reduction.
    for state in states {
        for (parameter, found) in gradients(state, objects).map_err(Error::invalid_argument)? {
            let found = found.f_to_device(parameter.device())?.f_to_kind(parameter.f_kind()?)?;
            let share = match states.len() {
                1 => found,
                states => found.f_div_scalar(states as f64)?,
            };
            let sum = match gradient(&parameter)? {
                Some(before) => before.f_add(&share)?,
                None => share,
            };
            set_gradient(&parameter, &sum)?;
        }
    }
    for (name, object) in objects {
        let Some(hook) = object.hook() else { continue };
        let own: Vec<_> = states.iter().filter_map(|state| state.get("own")?.get(name)).collect();
        let loaded = match own.as_slice() {
            [own] => hook.load_state_dict(own),
            own => hook.load_from_ranks(own),
        };
        loaded?;
    }
    // Sums of this rank for a window of weighted losses; with another number of ranks, its share of them.
    let windows = states.iter().filter_map(|state| {
        let window = state.get("weighted_window")?;
        let number = |key: &str| window.get(key).and_then(Value::as_float);
        Some((number("weight")?, number("divisor")?))
    });
    let windows: Vec<(f64, f64)> = windows.collect();
    *checkpoints.accumulator.weighted() = windows.first().map(|&(_, divisor)| {
        let weight: f64 = windows.iter().map(|(weight, _)| weight).sum();
        let weight = Tensor::from(weight / windows.len() as f64);
        WeightedWindow { weight, divisor: Tensor::from(divisor) }
    });
    let generators = states.first().and_then(|state| state.get("random")).filter(|_| random);
    let bytes = |key: &str| match generators.and_then(|all| all.get(key)) {
        Some(Value::Bytes(bytes)) => Some(bytes.as_slice()),
        _ => None,
    };
    if let Some(bytes) = bytes("cpu") {
        set_rng_state(Device::Cpu, bytes)?;
    }
    let device = checkpoints.processes.device();
    if let Some(bytes) = device.device_kind().and_then(|(kind, _)| bytes(kind.name())) {
        set_rng_state(device, bytes)?;
    }
    Ok(difference)
}
