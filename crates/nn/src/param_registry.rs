//! The parameters and buffers of one model, in the order of their registration.

use std::collections::HashSet;
use std::ptr;

use brigade_sharding::TensorPart;
use brigade_torch::{TensorId, has_memory};
use tch::{Kind, Tensor};

use crate::Training;
use crate::context_parallel::ContextParallel;
use crate::deferred::Draw;
use crate::expert_parallel::ExpertParallel;
use crate::hooks::Hooks;
use crate::layer_weights::LayerWeights;
use crate::pipeline::Row;
use crate::quantized::Quantizable;
use crate::shared_statistics::SharedStatistics;
use crate::tensor_parallel::TensorParallel;
use crate::unit::Unit;

/// Everything that constructors have registered, and the errors in it.
#[derive(Debug)]
pub(crate) struct ParamRegistry {
    pub(crate) kind: Kind,
    /// Parameters get initial values; otherwise they are 0.
    pub(crate) drawn: bool,
    /// Draws of a deferred model's values, in their order.
    pub(crate) draws: Option<Vec<Draw>>,
    pub(crate) training: Training,
    /// Training switches of layers that behave differently in training, by the layers' names.
    pub(crate) held: Vec<(String, Training)>,
    pub(crate) statistics: SharedStatistics,
    pub(crate) hooks: Hooks,
    /// Names of the layers that call hooks.
    pub(crate) layers: Vec<String>,
    /// Units of the model, by their paths.
    pub(crate) units: Vec<(String, Unit)>,
    /// Layers whose weights can be loaded for their forward alone, by their paths.
    pub(crate) layer_weights: Vec<(String, LayerWeights)>,
    /// Rows of blocks at which a pipeline can cut the model.
    pub(crate) rows: Vec<Row>,
    /// Weights of linear layers that can be quantised.
    pub(crate) quantizable: Vec<Quantizable>,
    /// Names of the batch normalisations.
    pub(crate) batch_norms: Vec<String>,
    /// Names of the layers that are normalisations.
    pub(crate) norms: HashSet<String>,
    /// Names of adopted tensors, whose layers are unknown.
    pub(crate) adopted: HashSet<String>,
    /// Ranks that divide layers.
    pub(crate) tensor: Option<TensorParallel>,
    /// Ranks that divide each sequence.
    pub(crate) context: Option<ContextParallel>,
    /// Ranks that divide the experts.
    pub(crate) experts: Option<ExpertParallel>,
    /// Names of parameters of which each rank has some experts.
    pub(crate) expert_parameters: HashSet<String>,
    /// `true` if a constructor has asked for them.
    pub(crate) divides_sequences: bool,
    pub(crate) entries: Vec<Entry>,
    pub(crate) problems: Vec<String>,
    names: HashSet<String>,
}

/// Named tensor of the model. `tensor` is the layer's own: a clone that shares its implementation.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) tensor: Tensor,
    pub(crate) role: Role,
    /// Position of the tensor in the whole parameter, if the ranks of a tensor group divide it.
    pub(crate) part: Option<TensorPart>,
}

impl Entry {
    /// Returns the shape of the whole parameter.
    pub(crate) fn whole_size(&self) -> Vec<i64> {
        match &self.part {
            Some(part) => part.shape().iter().map(|size| size.cast_signed()).collect(),
            None => self.tensor.size(),
        }
    }
}

/// Role of a named tensor in the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Parameter,
    Buffer {
        persistent: bool,
    },
    /// Further name of the parameter at this index.
    SameAs(usize),
}

/// Maximum number of names of parameters in a message.
const SHOWN_NAMES: usize = 24;

impl ParamRegistry {
    pub(crate) fn new(
        kind: Kind,
        drawn: bool,
        is_deferred: bool,
        tensor: Option<TensorParallel>,
    ) -> Self {
        Self {
            kind,
            drawn,
            draws: is_deferred.then(Vec::new),
            training: Training::new(),
            held: Vec::new(),
            statistics: SharedStatistics::default(),
            hooks: Hooks::default(),
            layers: Vec::new(),
            units: Vec::new(),
            layer_weights: Vec::new(),
            rows: Vec::new(),
            quantizable: Vec::new(),
            batch_norms: Vec::new(),
            norms: HashSet::new(),
            adopted: HashSet::new(),
            tensor,
            context: None,
            experts: None,
            expert_parameters: HashSet::new(),
            divides_sequences: false,
            entries: Vec::new(),
            problems: Vec::new(),
            names: HashSet::new(),
        }
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    pub(crate) fn add(&mut self, entry: Entry) {
        self.names.insert(entry.name.clone());
        self.entries.push(entry);
    }

    /// Returns the part of a parameter that this tensor is, or `Some(None)` if it is the whole parameter. Returns
    /// `None` if it does not belong to the model.
    pub(crate) fn part_of(&self, tensor: &Tensor) -> Option<Option<TensorPart>> {
        if !tensor.defined() {
            return None;
        }
        let id = TensorId::of(tensor);
        let entry = self.entries.iter().find(|entry| TensorId::of(&entry.tensor) == id)?;
        Some(entry.part.clone())
    }

    /// Sets the ranks that divide the experts, and records an error for a group that cannot be combined with them.
    pub(crate) fn divide_experts(&mut self, experts: Option<ExpertParallel>) {
        self.experts = experts;
        let ranks = self.experts.as_ref().map_or(1, ExpertParallel::ranks);
        let tensor = self.tensor.as_ref().map_or(1, TensorParallel::ranks);
        if ranks > 1 && !ranks.is_multiple_of(tensor) {
            self.problems.push(format!(
                "{ranks} expert ranks are not whole groups of {tensor} tensor ranks: take a multiple of {tensor}"
            ));
        }
    }

    /// Records the patterns of the tensor plan that match no parameter.
    pub(crate) fn check_plan(&mut self) {
        let Some(tensor) = &self.tensor else { return };
        let parameters =
            || self.entries.iter().filter(|entry| !matches!(entry.role, Role::Buffer { .. }));
        let unmatched = tensor.plan.unmatched(parameters().map(|entry| entry.name.as_str()));
        if unmatched.is_empty() {
            return;
        }
        let patterns: Vec<String> =
            unmatched.iter().map(|pattern| format!("`{pattern}`")).collect();
        let known: Vec<&str> =
            parameters().take(SHOWN_NAMES).map(|entry| entry.name.as_str()).collect();
        let more = if parameters().count() > known.len() { ", …" } else { "" };
        self.problems.push(format!(
            "the tensor plan's {} match no parameter; the model has {}{more}",
            patterns.join(" and "),
            known.join(", ")
        ));
    }

    /// Returns the index of the parameter that this tensor is, or with which it shares memory in the same layout, as
    /// the tied tensors of a TorchScript file do.
    pub(crate) fn find(&self, tensor: &Tensor) -> Option<usize> {
        if !tensor.defined() {
            return None;
        }
        let address =
            |tensor: &Tensor| if has_memory(tensor) { tensor.data_ptr() } else { ptr::null_mut() };
        let (id, memory) = (TensorId::of(tensor), address(tensor));
        self.entries.iter().position(|entry| {
            let other = &entry.tensor;
            let is_alike = || {
                !memory.is_null()
                    && address(other) == memory
                    && other.size() == tensor.size()
                    && other.stride() == tensor.stride()
            };
            entry.role == Role::Parameter && (TensorId::of(other) == id || is_alike())
        })
    }
}
