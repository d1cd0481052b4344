//! Checkpoints of models of which ranks have stages: one state of those of all ranks, and each rank's of that of all.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use brigade_checkpoint::Value;
use brigade_optim::{OptimizerState, ParameterState};
use brigade_torch::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::pipeline::PipelineRanks;
use crate::registry::{Checkpointed, Kind};

/// Share of a rank in an object.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Share {
    /// The names of its tensors.
    pub(super) tensors: Vec<String>,
    /// Tree of its state, which contains the tensors' names, as JSON. `None` for a model.
    state: Option<serde_json::Value>,
}

/// Shares of the ranks of a pipeline in all objects, by the objects' names, for each rank in the pipeline's order.
#[derive(Debug, Default)]
pub(super) struct Shares {
    all: Vec<HashMap<String, Share>>,
    rank: usize,
    /// The places of the models' tensors in the order of the whole models.
    order: HashMap<String, usize>,
}

impl Share {
    pub(super) fn new(tensors: Vec<String>, state: Option<&Value<String>>) -> Self {
        Self { tensors, state: state.map(Value::to_json) }
    }

    fn tree(&self) -> Result<Option<Value<String>>> {
        let tree = self.state.as_ref().map(Value::from_json).transpose();
        tree.map_err(|error| {
            Error::invalid_argument(format!("the state of another stage: {error}"))
        })
    }
}

impl Shares {
    /// Exchanges the shares of all ranks of the pipeline. All of them take part, also those with an error.
    pub(super) fn exchange(
        pipeline: &PipelineRanks,
        own: Result<HashMap<String, Share>>,
    ) -> Result<Self> {
        let (own, failed) = match own {
            Ok(own) => (Some(own), None),
            Err(error) => (None, Some(error)),
        };
        let all: Vec<Option<HashMap<String, Share>>> = pipeline.group().all_gather_object(&own)?;
        if let Some(error) = failed {
            return Err(error);
        }
        let known = all.iter().map(|share| {
            share.clone().ok_or_else(|| {
                Error::invalid_argument("another rank of the pipeline failed to list its states")
            })
        });
        let (rank, order) = (pipeline.group().rank(), pipeline.tensor_order());
        Ok(Self { all: known.collect::<Result<_>>()?, rank, order })
    }

    /// Returns the names of an object's tensors that an earlier rank has as well, and therefore writes.
    pub(super) fn before(&self, object: &str) -> HashSet<&str> {
        let before = self.all.iter().take(self.rank).filter_map(|share| share.get(object));
        before.flat_map(|share| share.tensors.iter().map(String::as_str)).collect()
    }

    /// Returns `true` if another rank has a tensor of an object.
    pub(super) fn has(&self, object: &str, tensor: &str) -> bool {
        let mut shares = self.all.iter().filter_map(|share| share.get(object));
        shares.any(|share| share.tensors.iter().any(|known| known == tensor))
    }

    fn trees(&self, object: &str) -> Result<Vec<Value<String>>> {
        let shares = self.all.iter().filter_map(|share| share.get(object));
        let trees = shares.map(Share::tree).collect::<Result<Vec<_>>>()?;
        Ok(trees.into_iter().flatten().collect())
    }

    /// Returns an object's state, joined from all stages.
    pub(super) fn joined(&self, kind: Kind, object: &str) -> Result<Option<Value<String>>> {
        let trees = self.trees(object)?;
        if kind == Kind::Optimizer {
            return joined_optimizers(&trees, &self.order).map(Some);
        }
        Ok(trees.into_iter().reduce(joined_trees))
    }

    /// Returns this rank's part of a state of all stages. Names that belong to no rank are kept, so that they are
    /// reported.
    pub(super) fn of_rank<T: Clone>(
        &self,
        object: &Arc<dyn Checkpointed>,
        name: &str,
        state: Value<T>,
    ) -> Result<Value<T>> {
        let trees = self.trees(name)?;
        let Some(own) = trees.get(self.rank) else { return Ok(state) };
        if object.kind() != Kind::Optimizer {
            return Ok(restricted(state, own, &trees.iter().collect::<Vec<_>>()));
        }
        let names = |tree: &Value<String>| -> Result<HashSet<String>> {
            let state = OptimizerState::from_value(tree, String::clone);
            let state = state.map_err(Error::invalid_argument)?;
            Ok(state.parameters.into_iter().map(|it| it.name).collect())
        };
        let own = names(own)?;
        let all = trees.iter().map(names).collect::<Result<Vec<_>>>()?;
        let elsewhere: HashSet<String> =
            all.into_iter().flatten().filter(|name| !own.contains(name)).collect();
        // A state that is not an optimizer's is reported by the object's own check.
        let Ok(mut of_all) = OptimizerState::from_value(&state, T::clone) else {
            return Ok(state);
        };
        restrict_optimizer(&mut of_all, |name| !elsewhere.contains(name));
        Ok(of_all.to_value())
    }
}

/// Reduces an optimizer's state to the parameters that this rank has.
pub(crate) fn restrict_optimizer<T>(
    state: &mut OptimizerState<T>,
    is_own: impl Fn(&String) -> bool,
) {
    state.parameters.retain(|parameter| is_own(&parameter.name));
    state.groups.iter_mut().for_each(|group| group.parameters.retain(&is_own));
}

/// Joins the states of the optimizers of all stages: each parameter once, in the order of the whole models.
pub(crate) fn joined_optimizers<T: Clone>(
    trees: &[Value<T>],
    order: &HashMap<String, usize>,
) -> Result<Value<T>> {
    let states = trees.iter().map(|tree| OptimizerState::from_value(tree, T::clone));
    let states: Vec<OptimizerState<T>> =
        states.collect::<Result<_, String>>().map_err(Error::invalid_argument)?;
    let mut states = states.into_iter();
    let Some(mut all) = states.next() else {
        return Err(Error::invalid_argument("no rank of the pipeline has an optimizer's state"));
    };
    let place = |name: &String| order.get(name).copied().unwrap_or(usize::MAX);
    for other in states {
        if other.groups.len() != all.groups.len() {
            return Err(Error::invalid_argument(format!(
                "the optimizers of the stages have {} and {} parameter groups: build them with the same groups on every \
                 rank of the pipeline",
                all.groups.len(),
                other.groups.len()
            )));
        }
        for (group, theirs) in all.groups.iter_mut().zip(other.groups) {
            let known: HashSet<String> = group.parameters.iter().cloned().collect();
            let more = theirs.parameters.into_iter().filter(|name| !known.contains(name));
            group.parameters.extend(more);
        }
        let known: HashSet<String> = all.parameters.iter().map(|it| it.name.clone()).collect();
        all.parameters.extend(other.parameters.into_iter().filter(|it| !known.contains(&it.name)));
    }
    all.groups.iter_mut().for_each(|group| group.parameters.sort_by_key(place));
    all.parameters.sort_by_key(|parameter: &ParameterState<T>| place(&parameter.name));
    Ok(all.to_value())
}

/// Joins the entries of dictionaries; for other values, takes the first rank's.
fn joined_trees(first: Value<String>, other: Value<String>) -> Value<String> {
    match (first, other) {
        (Value::Dict(mut entries), Value::Dict(others)) => {
            for (key, value) in others {
                match entries.iter_mut().find(|(known, _)| *known == key) {
                    Some((_, known)) => {
                        let first = std::mem::replace(known, Value::None);
                        *known = joined_trees(first, value);
                    }
                    None => entries.push((key, value)),
                }
            }
            Value::Dict(entries)
        }
        (first, _) => first,
    }
}

/// Removes the entries that only other ranks have.
fn restricted<T>(state: Value<T>, own: &Value<String>, all: &[&Value<String>]) -> Value<T> {
    match (state, own) {
        (Value::Dict(entries), Value::Dict(_)) => {
            let entries = entries.into_iter().filter_map(|(key, value)| {
                let Some(name) = key.as_str() else { return Some((key, value)) };
                let below: Vec<_> = all.iter().filter_map(|tree| tree.get(name)).collect();
                match own.get(name) {
                    Some(own) => Some((key, restricted(value, own, &below))),
                    None => below.is_empty().then_some((key, value)),
                }
            });
            Value::Dict(entries.collect())
        }
        (state, _) => state,
    }
}
