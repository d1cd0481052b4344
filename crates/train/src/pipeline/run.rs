//! A step of a pipeline: this rank's list of actions, one after the other.

use std::collections::HashMap;

use brigade_nn::{Model, PipelineStages, StageOutput};
use brigade_sharding::pipeline::{Action, ActionKind};
use brigade_torch::{BackwardOptions, Error, Result, TensorTree, backward_from, gradient};
use tch::{Device, Kind, Tensor};

use super::loss::{Losses, PipelineLoss, StepLoss};
use super::shared::{Kept, ShareOf, Shares, Stepped};
use super::wire::{MicroForm, Wire};
use super::{Pipeline, failure, form_of, missing};

/// Indices of a stage and of a micro-batch.
type Pass = (usize, usize);

/// A running step.
pub(super) struct Step<'a, M, T> {
    pub(super) pipeline: &'a Pipeline,
    model: &'a Model<M>,
    pub(super) stages: &'a PipelineStages,
    pub(super) micros: Vec<T>,
    pub(super) forms: Vec<MicroForm>,
    /// Number of rows of all micro-batches.
    rows: usize,
    factor: f64,
    pub(super) wire: Wire<'a>,
    /// Outputs for the next stage if it is on this rank, and gradients for the previous stage.
    outputs: HashMap<Pass, Vec<Tensor>>,
    gradients: HashMap<Pass, Vec<Tensor>>,
    held: HashMap<Pass, Held>,
    losses: Losses,
    stepped: &'a Stepped<'a>,
    /// `true` if gradients of inputs and of weights are computed in separate passes.
    splits: bool,
}

/// Values that a forward pass keeps for its backward.
struct Held {
    /// Inputs of the stage. None for the first stage.
    inputs: Vec<Tensor>,
    /// Outputs of the stage's last block, or a loss.
    outputs: Vec<Tensor>,
    /// Initial gradients: that of a loss, or the received gradients of the outputs.
    seeds: Option<Vec<Tensor>>,
    /// Layers after the last block, if their backward is separate.
    head: Option<Head>,
}

/// A loss whose graph ends at the outputs of the last block.
struct Head {
    loss: Tensor,
    seed: Tensor,
    leaves: Vec<Tensor>,
}

impl<'a, M, T: TensorTree> Step<'a, M, T> {
    pub(super) fn new(
        pipeline: &'a Pipeline,
        model: &'a Model<M>,
        stages: &'a PipelineStages,
        micros: Vec<T>,
        (rows, factor): (usize, f64),
        stepped: &'a Stepped<'a>,
    ) -> Self {
        let forms = micros.iter().map(|micro| (form_of(micro), model.kind())).collect();
        Self {
            pipeline,
            model,
            stages,
            micros,
            forms,
            rows,
            factor,
            wire: Wire::new(&pipeline.group, &pipeline.forms, model.device()),
            outputs: HashMap::new(),
            gradients: HashMap::new(),
            held: HashMap::new(),
            losses: Losses::default(),
            stepped,
            splits: false,
        }
    }

    /// Runs all actions, and returns the loss on all ranks.
    pub(super) fn run<L: PipelineLoss>(
        mut self,
        share: ShareOf<'_>,
        mut loss: impl FnMut(&T) -> Result<L>,
    ) -> Result<StepLoss> {
        let stepped = self.stepped;
        let mut kept = Kept::take(stepped, self.stages, L::IS_SUM)?;
        let pipeline = self.pipeline;
        let actions = pipeline.table.actions(pipeline.group.rank());
        self.splits = actions.iter().any(|it| it.kind == ActionKind::BackwardInput);
        for &action in actions {
            self.act(action, &mut loss).map_err(|error| self.named(action, error))?;
        }
        let rank = pipeline.group.rank();
        let failed = |what: &str, source: Error| failure(rank, what.to_owned(), source);
        let own = (self.last_rank() == rank).then(|| self.losses.total()).transpose();
        let own = own.map_err(|error| failed("the loss of the batch", error))?;
        let total = pipeline.group.broadcast_object(own.as_ref(), self.last_rank());
        let total: [f64; 3] = total.map_err(|error| failed("the loss of the batch", error))?;
        let share = share(total[1]).map_err(|error| failed("the weight of all samples", error))?;
        let shares = Shares { own: total[2] * share.own, ..share };
        if let Some(sharder) = stepped.sharder {
            let reduced = || {
                // Gradients that are not reduced yet all come from this step.
                if shares.own != 1.0 {
                    sharder.scale_unreduced(&Tensor::from(shares.own))?;
                }
                sharder.reduce_unreduced()
            };
            reduced().map_err(|error| failed("the reduction of the gradients", error))?;
        }
        let summed = kept.finish(stepped, self.stages, &mut self.wire, shares);
        summed.map_err(|error| failed("the gradients of shared parameters", error))?;
        self.wire.finish().map_err(|error| failed("the end of the step", error))?;
        Ok(total.into())
    }

    pub(super) fn last_rank(&self) -> usize {
        self.stages.stage_ranks().last().copied().unwrap_or_default()
    }

    fn act<L: PipelineLoss>(
        &mut self,
        action: Action,
        loss: &mut impl FnMut(&T) -> Result<L>,
    ) -> Result<()> {
        let stage = action.stage;
        let Some(micro) = action.micro_batch else {
            // Sharded parameters are whole from before the first action until after the last one, when gradients are
            // reduced: the factor of losses that are sums is known then.
            return Ok(());
        };
        let pass = (stage, micro);
        match action.kind {
            ActionKind::Forward => {
                let (inputs, output) = self.forward(pass, loss)?;
                let held = match output {
                    StageOutput::Hidden(outputs) => {
                        if self.is_own(stage + 1) {
                            self.outputs.insert(pass, detached(&outputs)?);
                        }
                        Held { inputs, outputs, seeds: None, head: None }
                    }
                    StageOutput::Value(loss) => {
                        let (loss, seed) = self.add_loss(loss, micro)?;
                        Held { inputs, outputs: vec![loss], seeds: Some(vec![seed]), head: None }
                    }
                    StageOutput::Split { value, outputs, leaves } => {
                        let (loss, seed) = self.add_loss(value, micro)?;
                        Held {
                            inputs,
                            outputs,
                            seeds: None,
                            head: Some(Head { loss, seed, leaves }),
                        }
                    }
                };
                self.held.insert(pass, held);
                Ok(())
            }
            ActionKind::Backward => {
                let held = self.with_seed(pass)?;
                held.backward(&[], false)?;
                self.keep_gradients(pass, &held.inputs)
            }
            ActionKind::BackwardInput => {
                let held = self.with_seed(pass)?;
                if !held.inputs.is_empty() {
                    held.backward(&held.inputs.iter().collect::<Vec<_>>(), true)?;
                }
                self.keep_gradients(pass, &held.inputs)?;
                self.held.insert(pass, held);
                Ok(())
            }
            ActionKind::BackwardWeight => {
                let held = self.held(pass)?;
                let parameters = self.model.stage_parameters(stage);
                let trained =
                    parameters.iter().map(|it| &it.tensor).filter(|it| it.requires_grad());
                let trained: Vec<&Tensor> = trained.collect();
                if trained.is_empty() { Ok(()) } else { held.backward(&trained, false) }
            }
            ActionKind::SendActivation => {
                let held = self.held.get(&pass).ok_or_else(|| missing(action))?;
                let outputs = detached(&held.outputs)?;
                let to = self.peer(action)?;
                self.wire.send_activation(stage, &self.forms[micro], &outputs, to)
            }
            ActionKind::ReceiveActivation => {
                let from = self.peer(action)?;
                self.wire.receive_activation(action, &self.forms[micro], from)
            }
            ActionKind::SendGradient => {
                let gradients = self.gradients.remove(&pass).ok_or_else(|| missing(action))?;
                let to = self.peer(action)?;
                self.wire.send_gradients(&gradients, to)
            }
            ActionKind::ReceiveGradient => {
                let held = self.held.get(&pass).ok_or_else(|| missing(action))?;
                let from = self.peer(action)?;
                self.wire.receive_gradients(action, &held.outputs, from)
            }
            ActionKind::Unshard | ActionKind::ReduceGradients | ActionKind::Reshard => Ok(()),
        }
    }

    /// Runs a stage's part of the closure. Returns the inputs as well, which get gradients.
    pub(super) fn forward<V>(
        &mut self,
        (stage, micro): Pass,
        closure: &mut impl FnMut(&T) -> Result<V>,
    ) -> Result<(Vec<Tensor>, StageOutput<V>)> {
        let inputs = match stage.checked_sub(1) {
            None => Vec::new(),
            Some(before) => {
                let action = Action::new(ActionKind::ReceiveActivation, stage, micro);
                let own = self.outputs.remove(&(before, micro));
                let received = match own {
                    Some(own) => own,
                    None => self.received(action)?,
                };
                let learns = brigade_torch::grad_enabled();
                let leaves = received.into_iter().map(|input| input.f_set_requires_grad(learns));
                leaves.collect::<Result<_, _>>()?
            }
        };
        let handed = (stage > 0).then(|| inputs.iter().map(Tensor::shallow_clone).collect());
        let micro = &self.micros[micro];
        let output = if self.splits {
            self.stages.run_split(stage, handed, || closure(micro))?
        } else {
            self.stages.run(stage, handed, || closure(micro))?
        };
        Ok((inputs, output))
    }

    /// Adds a micro-batch's loss, and returns it with its initial gradient.
    fn add_loss(&mut self, loss: impl PipelineLoss, micro: usize) -> Result<(Tensor, Tensor)> {
        let (rows, micros) = (self.micros[micro].rows()?, self.micros.len());
        let common = self.stepped.common.as_ref();
        let (mut loss, weight) = self.losses.add(loss, rows, self.rows, micros, common)?;
        if matches!(loss.f_kind()?, Kind::Half | Kind::BFloat16) {
            // A scale of fp16 may be too large for a 16-bit float.
            loss = loss.f_to_kind(Kind::Float)?;
        }
        let seed = loss.f_detach()?.f_full_like(weight * self.factor)?;
        Ok((loss, seed))
    }

    fn received(&mut self, action: Action) -> Result<Vec<Tensor>> {
        let received = self.wire.received(action).map_err(|error| self.named(action, error))?;
        received.ok_or_else(|| missing(action))
    }

    fn held(&mut self, (stage, micro): Pass) -> Result<Held> {
        let held = self.held.remove(&(stage, micro));
        held.ok_or_else(|| missing(Action::new(ActionKind::Forward, stage, micro)))
    }

    /// Returns the values that a pass has kept, with its initial gradients.
    fn with_seed(&mut self, (stage, micro): Pass) -> Result<Held> {
        let mut held = self.held((stage, micro))?;
        if let Some(head) = held.head.take() {
            if head.loss.requires_grad() {
                backward_from(&[&head.loss], &[&head.seed], &[], BackwardOptions::default())?;
            }
            held.seeds = Some(gradients_of(&head.leaves)?);
        }
        if held.seeds.is_none() {
            let own = self.gradients.remove(&(stage + 1, micro));
            let action = Action::new(ActionKind::ReceiveGradient, stage, micro);
            held.seeds = Some(match own {
                Some(own) => own,
                None => self.received(action)?,
            });
        }
        Ok(held)
    }

    /// Keeps the gradients of a stage's inputs for the previous stage.
    fn keep_gradients(&mut self, pass: Pass, inputs: &[Tensor]) -> Result<()> {
        if !inputs.is_empty() {
            self.gradients.insert(pass, gradients_of(inputs)?);
        }
        Ok(())
    }

    /// Passes a stage's outputs, without their graph, on to the next stage, on this rank or another one.
    pub(super) fn hand_on(&mut self, pass: Pass, outputs: Vec<Tensor>, is_own: bool) -> Result<()> {
        if is_own {
            self.outputs.insert(pass, outputs);
            return Ok(());
        }
        let action = Action::new(ActionKind::SendActivation, pass.0, pass.1);
        let to = self.peer(action)?;
        let sent = self.wire.send_activation(pass.0, &self.forms[pass.1], &outputs, to);
        sent.map_err(|error| self.named(action, error))
    }

    pub(super) fn device(&self) -> Device {
        self.model.device()
    }

    fn is_own(&self, stage: usize) -> bool {
        self.stages.stage_ranks().get(stage) == Some(&self.pipeline.group.rank())
    }

    fn peer(&self, action: Action) -> Result<usize> {
        self.pipeline.table.peer(action).ok_or_else(|| missing(action))
    }

    /// Returns an error with the action at which it happened.
    pub(super) fn named(&self, action: Action, source: Error) -> Error {
        let peer = self.pipeline.table.peer(action);
        let what = match (peer, action.kind) {
            (Some(peer), ActionKind::SendActivation | ActionKind::SendGradient) => {
                format!("{action}, to rank {peer}")
            }
            (Some(peer), _) => format!("{action}, from rank {peer}"),
            (None, _) => action.to_string(),
        };
        failure(self.pipeline.group.rank(), what, source)
    }
}

impl Held {
    /// Adds gradients to those of `leaves`, or of all leaves if none are given.
    fn backward(&self, leaves: &[&Tensor], retain_graph: bool) -> Result<()> {
        let seeds = self.seeds.iter().flatten();
        let (outputs, seeds): (Vec<_>, Vec<_>) =
            self.outputs.iter().zip(seeds).filter(|(output, _)| output.requires_grad()).unzip();
        if outputs.is_empty() {
            return Ok(());
        }
        let options = BackwardOptions { retain_graph, ..BackwardOptions::default() };
        backward_from(&outputs, &seeds, leaves, options)
    }
}

/// Returns tensors without their graph.
fn detached(tensors: &[Tensor]) -> Result<Vec<Tensor>> {
    Ok(tensors.iter().map(Tensor::f_detach).collect::<Result<_, _>>()?)
}

/// Returns the gradients of leaves: zeros for a leaf on which no loss depends.
fn gradients_of(leaves: &[Tensor]) -> Result<Vec<Tensor>> {
    let of = |leaf: &Tensor| match gradient(leaf)? {
        Some(gradient) => Ok(gradient),
        None => Ok(leaf.f_detach()?.f_zeros_like()?),
    };
    leaves.iter().map(of).collect()
}
