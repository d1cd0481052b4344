//! File of a rank's partition of the optimizer.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::flat::Flat;
use crate::error::Error;
use crate::fault::Fault;
use crate::file_tensor::FileTensor;
use crate::pth::{PthFile, StoredTensor};
use crate::torch_optimizer::StateTensor;
use crate::value::Value;

type Tree = Value<StoredTensor>;

/// A state of the optimizer.
#[derive(Debug, Clone)]
pub(super) enum Slot {
    /// One value per element.
    Flat(Flat),
    /// One value for all elements, such as the number of steps.
    Scalar(FileTensor),
}

/// Optimizer partition of a rank.
#[derive(Debug)]
pub(super) struct RankStates {
    pub(super) path: PathBuf,
    pub(super) stage: u64,
    /// Number of ranks that the parameters are partitioned over.
    pub(super) partitions: u64,
    /// Weights by group.
    pub(super) weights: Vec<Flat>,
    /// Padding elements after each parameter, by group.
    pub(super) paddings: Option<Vec<Vec<u64>>>,
    /// Optimizer states by group.
    pub(super) slots: Vec<BTreeMap<String, Slot>>,
    /// Parameter groups of the program's optimizer.
    pub(super) groups: Option<Value<FileTensor>>,
    /// Attributes of the loss scaler.
    pub(super) scaler: Option<Value<FileTensor>>,
}

impl RankStates {
    pub(super) fn open(path: &Path) -> Result<Self, Error> {
        let file = PthFile::open(path)?;
        let tree = file.value_with_sizes()?;
        let shared = Arc::new(Mutex::new(file));
        let read = || Self::read(path, &shared, &tree);
        read().map_err(|fault| fault.at(path))
    }

    fn read(path: &Path, file: &Arc<Mutex<PthFile>>, tree: &Tree) -> Result<Self, Fault> {
        let state = tree.get("optimizer_state_dict").filter(|it| it.as_dict().is_some());
        let state = state.ok_or_else(|| Fault::unsupported("it has no `optimizer_state_dict`"))?;
        let vectors = |key: &str| state.get(key).and_then(Value::as_items);
        let early = vectors("single_partition_of_fp32_groups").map(|vectors| (vectors, 2));
        let found = early.or_else(|| Some((vectors("fp32_flat_groups")?, 3)));
        let (vectors, known) = found.ok_or_else(|| {
            Fault::unsupported(
                "it has neither `single_partition_of_fp32_groups` nor `fp32_flat_groups`: it is not of ZeRO's stages 1 \
                 to 3",
            )
        })?;
        let stage = match state.get("zero_stage") {
            Some(Value::Int(stage)) => *stage,
            // The bfloat16 optimizer does not store its stage, which is 1.
            _ if known == 2 => 1,
            _ => known,
        };
        if !(1..=3).contains(&stage) || (stage == 3) != (known == 3) {
            return Err(Fault::unsupported(format_args!(
                "its `zero_stage` is {stage}: stages 1, 2 and 3 are read, each with its own groups"
            )));
        }
        if state.get("ds_zero_partition_groups").is_some_and(|it| !matches!(it, Value::None)) {
            return Err(Fault::unsupported(
                "its groups are spread over different ranks, as with DeepSpeed's expert parallelism, which is not read",
            ));
        }
        let partitions = match state.get("partition_count") {
            Some(Value::Int(count)) => Some(*count),
            // One count per group: groups of experts have a smaller one.
            Some(Value::List(counts) | Value::Tuple(counts)) => {
                counts.iter().filter_map(Value::as_int).max()
            }
            _ => None,
        };
        let partitions = partitions.and_then(|count| u64::try_from(count).ok());
        let partitions = partitions
            .filter(|count| *count > 0)
            .ok_or_else(|| Fault::damaged("it has no `partition_count`"))?;
        let weights = vectors
            .iter()
            .enumerate()
            .map(|(group, value)| match value {
                Value::Tensor(tensor) => Flat::of(&file.lock(), tensor),
                value => Err(Fault::damaged(format_args!(
                    "group {group} of the weights is {}, not a tensor",
                    value.describe()
                ))),
            })
            .collect::<Result<Vec<_>, _>>()?;
        let base = state.get("base_optimizer_state").or_else(|| state.get("optimizer_state_dict"));
        let slots = slots(file, base, weights.len())?;
        let stored = |tensor| Ok::<_, Fault>(FileTensor::stored(file, tensor));
        let groups = base.and_then(|base| base.get("param_groups")).cloned();
        let groups = groups.map(|it| it.try_map(&mut |_, tensor| stored(tensor))).transpose()?;
        let scaler = state.get("loss_scaler").filter(|it| it.as_dict().is_some()).cloned();
        let scaler = scaler.map(|it| it.try_map(&mut |_, tensor| stored(tensor))).transpose()?;
        let paddings = paddings(state.get("param_alignment_paddings"), weights.len())?;
        let path = path.to_owned();
        let stage = stage.unsigned_abs();
        Ok(Self { path, stage, partitions, weights, paddings, slots, groups, scaler })
    }
}

/// Weights in 32 bits of an optimizer without ZeRO.
#[derive(Debug)]
pub(super) struct Masters {
    /// Indices of each group's vectors.
    pub(super) groups: Vec<Vec<usize>>,
    /// Shapes of the vectors, if each is a parameter. Otherwise a group's vector has its parameters one after the other.
    pub(super) shapes: Option<Vec<Vec<u64>>>,
}

impl RankStates {
    /// Reads DeepSpeed's FP16_Optimizer, which has one vector for each group, or FP16_UnfusedOptimizer.
    pub(super) fn whole(
        path: &Path,
        file: &Arc<Mutex<PthFile>>,
        state: &Tree,
    ) -> Result<(Self, Masters), Fault> {
        let items = |key: &str| state.get(key).and_then(Value::as_items);
        let (mut groups, mut vectors) = (Vec::new(), Vec::new());
        let is_fused = items("fp32_groups_flat").is_some();
        let of_groups = items("fp32_groups_flat").or_else(|| items("fp32_groups"));
        for group in of_groups.ok_or_else(|| {
            Fault::unsupported(
                "its optimizer is not one of DeepSpeed's for fp16: a run without ZeRO is read in fp16; convert this file \
                 alone with the key `module`",
            )
        })? {
            let members = if is_fused { std::slice::from_ref(group) } else { group.as_items().unwrap_or_default() };
            groups.push((vectors.len()..vectors.len() + members.len()).collect());
            vectors.extend(members);
        }
        let (mut weights, mut shapes) = (Vec::new(), Vec::new());
        for (index, vector) in vectors.into_iter().enumerate() {
            let Value::Tensor(tensor) = vector else {
                let found = vector.describe();
                return Err(Fault::damaged(format_args!(
                    "weight {index} in 32 bits is {found}, not a tensor"
                )));
            };
            weights.push(Flat::of(&file.lock(), tensor)?);
            shapes.push(tensor.info().shape);
        }
        let base = state.get("optimizer_state_dict");
        let slots = slots(file, base, weights.len())?;
        let stored = |tensor| Ok::<_, Fault>(FileTensor::stored(file, tensor));
        let groups_of_base = base.and_then(|base| base.get("param_groups")).cloned();
        let groups_of_base =
            groups_of_base.map(|it| it.try_map(&mut |_, tensor| stored(tensor))).transpose()?;
        let attribute = |(ours, theirs): (&'static str, &str)| {
            let value = state.get(theirs)?.clone().try_map(&mut |_, tensor| stored(tensor));
            Some(value.map(|value| (ours, value)))
        };
        let scaler = SCALER.into_iter().filter_map(attribute).collect::<Result<Vec<_>, _>>()?;
        let states = Self {
            path: path.to_owned(),
            stage: 0,
            partitions: 1,
            weights,
            paddings: None,
            slots,
            groups: groups_of_base,
            // A run in bfloat16 has no scale.
            scaler: (!scaler.is_empty()).then(|| Value::dict(scaler)),
        };
        Ok((states, Masters { groups, shapes: (!is_fused).then_some(shapes) }))
    }
}

/// Attributes of ZeRO's loss scaler, and the same numbers in an optimizer without ZeRO.
const SCALER: [(&str, &str); 6] = [
    ("dynamic", "dynamic_loss_scale"),
    ("cur_scale", "cur_scale"),
    ("cur_iter", "cur_iter"),
    ("last_overflow_iter", "last_overflow_iter"),
    ("scale_factor", "scale_factor"),
    ("scale_window", "scale_window"),
];

/// Reads the states of each group: a dictionary by index in `state`, or a list as in elastic checkpoints.
fn slots(
    file: &Arc<Mutex<PthFile>>,
    base: Option<&Tree>,
    groups: usize,
) -> Result<Vec<BTreeMap<String, Slot>>, Fault> {
    let mut all = vec![BTreeMap::new(); groups];
    let mut add = |group: usize, state: &Tree| -> Result<(), Fault> {
        let Some(slots) = all.get_mut(group) else {
            return Err(Fault::damaged(format_args!(
                "the optimizer has a state of group {group}, the weights have {groups} groups"
            )));
        };
        for (name, value) in state.as_dict().unwrap_or_default() {
            let Some(name) = name.as_str() else { continue };
            let slot = match value {
                Value::Tensor(tensor) if tensor.size.is_empty() => {
                    // Does not keep the file open: there may be more ranks than the limit of open files.
                    Slot::Scalar(Flat::of(&file.lock(), tensor)?.shaped(Vec::new()))
                }
                Value::Tensor(tensor) => Slot::Flat(Flat::of(&file.lock(), tensor)?),
                Value::Int(number) => Slot::Scalar(FileTensor::from_scalar(*number as f64)),
                Value::Float(number) => Slot::Scalar(FileTensor::from_scalar(*number)),
                _ => continue,
            };
            slots.insert(name.to_owned(), slot);
        }
        Ok(())
    };
    let Some(base) = base else { return Ok(all) };
    if let Some(list) = base.as_items() {
        list.iter().enumerate().try_for_each(|(group, state)| add(group, state))?;
        return Ok(all);
    }
    for (group, state) in base.get("state").and_then(Value::as_dict).unwrap_or_default() {
        let group = group.as_int().and_then(|group| usize::try_from(group).ok());
        add(group.unwrap_or(usize::MAX), state)?;
    }
    // Apex's and DeepSpeed's own optimizers store the step count per group.
    let own = base.get("param_groups").and_then(Value::as_items).unwrap_or_default();
    for group in own {
        let Some(step) = group.get("step").and_then(Value::as_float) else { continue };
        for number in group.get("params").and_then(Value::as_items).unwrap_or_default() {
            let number = number.as_int().and_then(|number| usize::try_from(number).ok());
            let slots = number.and_then(|number| all.get_mut(number)).filter(|it| !it.is_empty());
            if let Some(slots) = slots {
                let step = || Slot::Scalar(FileTensor::from_scalar(step));
                slots.entry("step".to_owned()).or_insert_with(step);
            }
        }
    }
    Ok(all)
}

fn paddings(value: Option<&Tree>, groups: usize) -> Result<Option<Vec<Vec<u64>>>, Fault> {
    let Some(lists) = value.filter(|value| !matches!(value, Value::None)) else { return Ok(None) };
    let padding = |value: &Tree| u64::try_from(value.as_int()?).ok();
    let list = |value: &Tree| value.as_items()?.iter().map(padding).collect::<Option<Vec<u64>>>();
    let lists =
        lists.as_items().and_then(|lists| lists.iter().map(list).collect::<Option<Vec<_>>>());
    match lists {
        Some(lists) if lists.len() == groups => Ok(Some(lists)),
        _ => Err(Fault::damaged(
            "`param_alignment_paddings` is not a list of numbers for each group",
        )),
    }
}
