//! Memory and messages of tensor, sequence, context, expert and pipeline parallelism.

use std::io::{self, Write};

use anyhow::{Context, ensure};
use brigade_rank_env::text::counted;
use brigade_sharding::pipeline::{ActionKind, PipelineTable, Schedule, cut_evenly};
use brigade_sharding::{
    Axis, AxisMessages, ContextMethod, Mesh, Parameter, Phase, Sharding, TransformerStep, Volume,
};
use clap::Args;
use serde_json::{Value, json};

use super::memory::{Kept, Shape};
use brigade_sharding::byte_size::in_bytes;

use super::{EstimateArgs, Subject};

/// How many ranks divide what.
#[derive(Debug, Args)]
#[group(id = "divided")]
pub(super) struct Options {
    /// Ranks that divide each layer (tp)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = super::ranks, requires = "nproc")]
    tensor: usize,

    /// Give each tensor rank a part of the sequence between divided layers
    #[arg(long, requires = "tensor")]
    sequence_parallel: bool,

    /// Ranks that divide each sequence (cp, or sp)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = super::ranks, requires = "nproc")]
    context: usize,

    /// Exchange of keys: gather, ring or ulysses
    ///
    /// Attention needs the keys of tokens on other context ranks
    #[arg(long, value_name = "METHOD", default_value = "gather", requires = "context")]
    context_method: ContextMethod,

    /// Ranks over which experts are spread (ep)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = super::ranks, requires = "nproc")]
    expert: usize,

    /// Ranks of a pipeline, each with one stage or more (pp)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = super::ranks, requires = "nproc")]
    pipeline: usize,

    /// Schedule of the pipeline
    ///
    /// gpipe, 1f1b, interleaved, looped-bfs, zb-h1 or zbv
    #[arg(long, value_name = "SCHEDULE", default_value = "1f1b", requires = "pipeline")]
    schedule: Schedule,

    /// Stages of each rank of the pipeline
    ///
    /// Defaults to the smallest number that the schedule has
    #[arg(long, value_name = "N", value_parser = super::ranks, requires = "pipeline")]
    chunks: Option<usize>,
}

/// Division of a model among the ranks of a job.
pub(super) struct Division {
    mesh: Mesh,
    /// Number of samples per micro-batch.
    pub(super) samples: u64,
    step: Option<TransformerStep>,
    /// Number of micro-batches per step.
    micro_batches: u64,
    /// Order of the passes. `None` without a pipeline.
    table: Option<PipelineTable>,
    /// Range of layers of each stage.
    stages: Vec<std::ops::Range<usize>>,
}

impl Options {
    pub(super) fn divides(&self) -> bool {
        [self.tensor, self.context, self.expert, self.pipeline].iter().any(|ranks| *ranks > 1)
    }

    /// Returns the number of the ranks over which gradients are averaged that have different experts.
    pub(super) fn averaged_experts(&self) -> usize {
        self.expert / self.tensor.min(self.expert).max(1)
    }

    /// Returns the mesh of the ranks over which gradients are averaged, for a sharding strategy.
    pub(super) fn sharding_mesh(&self, sharding: &Sharding, ranks: usize) -> anyhow::Result<Mesh> {
        let of_data = sharding.mesh(ranks)?;
        let (replicate, shard) = (of_data.size(Axis::Replicate), of_data.size(Axis::Shard));
        let builder = Mesh::builder().replicate(replicate).shard(shard);
        Ok(builder.expert(self.averaged_experts()).build(ranks)?)
    }

    /// Returns the volume of a step without sharding: gradients of experts are averaged over the ranks that have the
    /// same ones.
    pub(super) fn replicated(&self, parameters: &[Parameter], ranks: usize) -> Volume {
        let elements = |experts: bool| -> u64 {
            let own = parameters.iter().filter(|it| it.trained && it.is_expert == experts);
            let sizes =
                own.map(|it| it.shape.iter().fold(1, |all: u64, size| all.saturating_mul(*size)));
            sizes.fold(0, u64::saturating_add)
        };
        let same = ranks / self.averaged_experts().max(1);
        let others = Volume::replicated(elements(false), GRADIENT_BYTES, ranks as u64);
        let mut volume = Volume::replicated(elements(true), GRADIENT_BYTES, same as u64);
        volume.reduced += others.reduced;
        volume
    }

    /// Returns the number of ranks over which gradients are averaged, out of `ranks`.
    pub(super) fn averaged(&self, ranks: usize) -> usize {
        (ranks / self.tensor.saturating_mul(self.pipeline).max(1)).max(1)
    }

    /// Returns the default number of micro-batches: four per rank of a pipeline.
    pub(super) fn usual_micro_batches(&self) -> u64 {
        if self.pipeline > 1 { Schedule::default_micro_batches(self.pipeline) as u64 } else { 1 }
    }

    /// Returns the division of a model by these options over this many ranks.
    pub(super) fn division(
        &self,
        args: &EstimateArgs,
        subject: &Subject,
        ranks: usize,
        samples: u64,
        micro_batches: u64,
    ) -> anyhow::Result<Division> {
        let inner = self.tensor.saturating_mul(self.context).saturating_mul(self.pipeline);
        let data = (ranks / inner.max(1)).max(1);
        let builder = Mesh::builder().pipeline(self.pipeline).tensor(self.tensor);
        // Experts are spread within the axes that shard.
        let builder = match self.expert {
            1 => builder.replicate(data),
            expert => builder.shard(data).expert(expert),
        };
        let builder = match self.context_method {
            ContextMethod::Ulysses => builder.sequence(self.context),
            _ => builder.context(self.context),
        };
        let mesh = builder.build(ranks)?;
        self.check_experts(subject)?;
        let chunks = match self.pipeline {
            1 => 1,
            _ => self.chunks.unwrap_or_else(|| self.schedule.least_chunks()),
        };
        let step = self.step(args, subject, samples, chunks);
        ensure!(
            step.is_some() || !self.divides(),
            "{}: the memory of divided ranks can be estimated only for transformers with a known number \
             of layers and hidden size: give a folder with config.json, or a number of parameters (7B)",
            subject.title
        );
        let layers = step.map_or(1, |step| usize::try_from(step.layers).unwrap_or(usize::MAX));
        let stages = cut_evenly(layers, self.pipeline.saturating_mul(chunks))?;
        let count = usize::try_from(micro_batches)?;
        let table = match self.pipeline {
            1 => None,
            ranks => Some(PipelineTable::new(self.schedule, ranks, count, chunks)?),
        };
        Ok(Division { mesh, samples, step, micro_batches, table, stages })
    }

    fn check_experts(&self, subject: &Subject) -> anyhow::Result<()> {
        if self.expert == 1 {
            return Ok(());
        }
        let mixture = match subject.size.shape {
            Some(Shape::Transformer { mixture, .. }) => mixture,
            _ => None,
        };
        let title = &subject.title;
        let experts = mixture.map(|mixture| mixture.experts).with_context(|| {
            format!(
                "{title}: no experts to spread over {} ranks: give a folder whose config.json has num_local_experts, or \
                 mixtral-8x7b",
                self.expert
            )
        })?;
        ensure!(
            experts.is_multiple_of(self.expert as u64),
            "{title}: {experts} experts cannot be spread over {} ranks: take a number of ranks that divides them",
            self.expert
        );
        ensure!(
            self.expert.is_multiple_of(self.tensor),
            "{} expert ranks are not whole groups of {} tensor ranks: take a multiple of {}",
            self.expert,
            self.tensor,
            self.tensor
        );
        Ok(())
    }

    fn step(
        &self,
        args: &EstimateArgs,
        subject: &Subject,
        samples: u64,
        chunks: usize,
    ) -> Option<TransformerStep> {
        let shape = subject.size.shape.as_ref()?;
        let step = shape.step(args.sharded.precision(), args.batch(samples))?;
        Some(TransformerStep {
            chunks,
            method: self.context_method,
            sequence_regions: self.sequence_parallel,
            ..step
        })
    }
}

impl Division {
    /// Returns the number of ranks over which gradients are averaged.
    pub(super) fn averaged(&self) -> usize {
        self.mesh.size(Axis::DataContext)
    }

    /// Returns the number of ranks of a pipeline.
    pub(super) fn pipeline_ranks(&self) -> usize {
        self.mesh.size(Axis::Pipeline)
    }

    /// Returns the stages of a rank of the pipeline.
    fn stages_of(&self, rank: usize) -> Vec<usize> {
        self.table.as_ref().map_or_else(|| vec![0], |table| table.stages_of(rank).collect())
    }

    /// Returns the parameters of a rank of the pipeline. Matrices are divided over tensor ranks, and experts over expert
    /// ranks; the first stage has the embedding and the last one the head, and a tied weight is on both.
    pub(super) fn parameters(&self, all: &[Parameter], rank: usize) -> Vec<Parameter> {
        let divides = [Axis::Pipeline, Axis::Tensor, Axis::Expert];
        if divides.iter().all(|axis| self.mesh.size(*axis) == 1) {
            return all.iter().map(|it| without_experts(it.clone())).collect();
        }
        let expert = self.mesh.size(Axis::Expert) as u64;
        let tensor = self.mesh.size(Axis::Tensor) as u64;
        let stages = self.stages_of(rank);
        let has_layer = |layer: usize| {
            stages.iter().any(|&stage| self.stages.get(stage).is_some_and(|it| it.contains(&layer)))
        };
        let is_first = stages.contains(&0);
        let is_last = stages.contains(&(self.stages.len() - 1));
        let (mut is_behind, mut has_head) = (false, false);
        let mut own = Vec::new();
        for parameter in all {
            let layer =
                parameter.unit.as_deref().and_then(|unit| unit.rsplit('.').next()?.parse().ok());
            is_behind |= layer.is_some();
            has_head |= is_behind && layer.is_none() && parameter.shape.len() > 1;
            let is_own = match layer {
                Some(layer) => has_layer(layer),
                None if is_behind => is_last,
                None => is_first,
            };
            // Without expert ranks each tensor rank has all experts, which are sharded as all else.
            let part = match (parameter.is_expert, expert) {
                (false, _) => divided(parameter, tensor),
                (true, 1) => without_experts(parameter.clone()),
                (true, ranks) => divided(parameter, ranks),
            };
            if is_own {
                own.push(part);
            }
        }
        // With tied weights the head has no parameters of its own.
        let vocabulary = self.step.map_or(0, |step| step.vocabulary);
        if is_last && !is_first && vocabulary > 0 && !has_head {
            let hidden = self.step.map_or(0, |step| step.hidden);
            let head =
                Parameter::new("head", &[vocabulary, hidden], brigade_checkpoint::Dtype::F32);
            own.push(divided(&head, tensor));
        }
        own
    }

    /// Returns the activations that a rank of the pipeline keeps for all its stages and micro-batches; `None` for models
    /// that are not transformers.
    pub(super) fn kept(&self, rank: usize) -> Option<Kept> {
        let step = self.step?;
        let of_stage = |stage: usize| step.activations(&self.mesh, stage);
        let activations = match &self.table {
            None => of_stage(0),
            Some(table) => most_held(table, rank, of_stage),
        };
        let stages = self.stages_of(rank).into_iter();
        let logits = stages.map(|stage| step.logits(&self.mesh, stage)).max().unwrap_or(0);
        Some(Kept { activations, logits })
    }

    /// Returns the messages that a stage sends per step along each axis. Stages of one rank send nothing to each other.
    fn messages(&self, stage: usize) -> Vec<AxisMessages> {
        let mut sent = self.step.map(|step| step.messages(&self.mesh, stage)).unwrap_or_default();
        if let Some(ranks) = self.table.as_ref().map(PipelineTable::stage_ranks) {
            let is_own =
                |other: Option<usize>| other.and_then(|other| ranks.get(other)) == ranks.get(stage);
            sent.retain(|it| match (it.axis, it.phase) {
                (Axis::Pipeline, Phase::Forward) => !is_own(stage.checked_add(1)),
                (Axis::Pipeline, Phase::Backward) => !is_own(stage.checked_sub(1)),
                _ => true,
            });
        }
        let in_step = |it: AxisMessages| AxisMessages {
            messages: it.messages.saturating_mul(self.micro_batches),
            bytes: it.bytes.saturating_mul(self.micro_batches),
            ..it
        };
        sent.into_iter().map(in_step).collect()
    }

    /// Writes lines on the mesh and on messages other than gradients and parameters.
    pub(super) fn text(&self, rank: usize, out: &mut impl Write) -> io::Result<()> {
        let own = self.stages_of(rank);
        let stages = match self.stages.len() {
            1 => String::new(),
            count => {
                let micro_batches = counted(self.micro_batches, "micro-batch");
                let numbers: Vec<String> = own.iter().map(ToString::to_string).collect();
                let (plural, numbers) = (if own.len() == 1 { "" } else { "s" }, numbers.join(", "));
                format!(", a rank of stage{plural} {numbers} of {count}, {micro_batches} in a step")
            }
        };
        writeln!(out, "mesh {}{stages}", self.mesh)?;
        let mut axes: Vec<(Axis, u64, u64)> = Vec::new();
        for sent in own.iter().flat_map(|&stage| self.messages(stage)) {
            match axes.iter_mut().find(|(axis, ..)| *axis == sent.axis) {
                Some((_, messages, bytes)) => {
                    *messages = messages.saturating_add(sent.messages);
                    *bytes = bytes.saturating_add(sent.bytes);
                }
                _ => axes.push((sent.axis, sent.messages, sent.bytes)),
            }
        }
        for (axis, messages, bytes) in axes {
            let label = format!("sent along {}", axis.name());
            writeln!(
                out,
                "{label:<16}{:>12} in {}",
                in_bytes(bytes),
                counted(messages, "message")
            )?;
        }
        Ok(())
    }

    pub(super) fn json(&self) -> Value {
        let sent = |it: &AxisMessages| {
            json!({
                "axis": it.axis.name(),
                "phase": if it.phase == Phase::Forward { "forward" } else { "backward" },
                "operation": it.operation,
                "messages": it.messages,
                "bytes": it.bytes,
            })
        };
        let stage = |stage: usize| {
            let rank = self.table.as_ref().map_or(0, |table| table.stage_ranks()[stage]);
            let of_stage = |other: usize| u64::from(other == stage);
            let held = self.table.as_ref().map_or(1, |table| most_held(table, rank, of_stage));
            json!({
                "rank": rank,
                "held": held,
                "messages": self.messages(stage).iter().map(sent).collect::<Vec<_>>(),
            })
        };
        json!({
            "mesh": self.mesh.to_string(),
            "micro_batches": self.micro_batches,
            "stages": (0..self.stages.len()).map(stage).collect::<Vec<_>>(),
        })
    }
}

/// Returns the maximum of the activations that a rank holds at a time, each weighted by its stage. An activation is held
/// from its forward pass until the gradients of the weights.
fn most_held(table: &PipelineTable, rank: usize, of_stage: impl Fn(usize) -> u64) -> u64 {
    let (mut held, mut most) = (0u64, 0);
    for action in table.actions(rank) {
        match action.kind {
            ActionKind::Forward => held = held.saturating_add(of_stage(action.stage)),
            ActionKind::Backward | ActionKind::BackwardWeight => {
                held = held.saturating_sub(of_stage(action.stage));
            }
            _ => {}
        }
        most = most.max(held);
    }
    most
}

/// Returns the parameter as one that every rank has, and no part of experts that ranks divide.
fn without_experts(parameter: Parameter) -> Parameter {
    Parameter { is_expert: false, ..parameter }
}

/// Bytes of an element of a gradient without sharding.
const GRADIENT_BYTES: u64 = 4;

/// Returns a rank's part of a matrix; vectors are whole on every rank.
fn divided(parameter: &Parameter, ranks: u64) -> Parameter {
    let mut own = parameter.clone();
    if let [rows, _, ..] = &mut own.shape[..] {
        *rows = rows.div_ceil(ranks);
    }
    own
}
