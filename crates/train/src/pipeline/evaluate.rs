//! Forward passes of a pipeline without gradients, for evaluation.

use brigade_nn::StageOutput;
use brigade_sharding::pipeline::{Action, ActionKind};
use brigade_torch::{Error, ProcessGroup, Result, TensorTree, TreeSpec};
use tch::Tensor;

use super::run::Step;
use super::wire::{kind_of, number_of};

impl<M, T: TensorTree> Step<'_, M, T> {
    /// Runs all stages for all micro-batches, and returns the results of the last stage's closure on every rank.
    pub(super) fn evaluate<V: TensorTree>(
        mut self,
        mut value: impl FnMut(&T) -> Result<V>,
    ) -> Result<Vec<V::Owned>> {
        let (stages, micros) = (self.stages.stages(), self.micros.len());
        let ranks = self.stages.stage_ranks();
        let rank = self.stages.rank();
        let mut values = Vec::with_capacity(micros);
        // The order is the same on all ranks, and each pass comes after the pass that computes its input, so there is
        // no deadlock.
        for time in 0..stages + micros - 1 {
            for stage in (0..stages).filter(|stage| (stage..&(stage + micros)).contains(&&time)) {
                let micro = time - stage;
                let is_own = |stage: usize| ranks.get(stage) == Some(&rank);
                if is_own(stage) {
                    let action = Action::new(ActionKind::Forward, stage, micro);
                    let output = self.forward((stage, micro), &mut value);
                    match output.map_err(|error| self.named(action, error))?.1 {
                        StageOutput::Value(value) | StageOutput::Split { value, .. } => {
                            values.push(value);
                        }
                        StageOutput::Hidden(outputs) => {
                            self.hand_on((stage, micro), outputs, is_own(stage + 1))?;
                        }
                    }
                } else if stage + 1 < stages && is_own(stage + 1) {
                    let action = Action::new(ActionKind::ReceiveActivation, stage + 1, micro);
                    let begun =
                        self.wire.receive_activation(action, &self.forms[micro], ranks[stage]);
                    begun.map_err(|error| self.named(action, error))?;
                }
            }
        }
        let root = self.last_rank();
        let group = &self.pipeline.group;
        let shared = (0..micros).map(|micro| share(group, values.get(micro), root, self.device()));
        let shared = shared.collect::<Result<Vec<_>>>()?;
        self.wire.finish()?;
        Ok(shared)
    }
}

/// Structure, shapes and kinds of a tree, which another rank needs to receive it.
type Form = (TreeSpec, Vec<(Vec<i64>, i64)>);

/// Broadcasts the root's tree to all ranks.
fn share<V: TensorTree>(
    group: &ProcessGroup,
    own: Option<&V>,
    root: usize,
    device: tch::Device,
) -> Result<V::Owned> {
    let mut sources = Vec::new();
    if let Some(own) = own {
        own.visit(&mut |tensor| sources.push(tensor));
    }
    let forms = sources.iter().map(|it| Ok((it.size(), number_of(it.f_kind()?)?)));
    let forms = forms.collect::<Result<Vec<_>>>()?;
    let form: Option<Form> = own.map(|own| (own.spec(), forms));
    let (spec, forms): Form = group.broadcast_object(form.as_ref(), root)?;
    let mut tensors = Vec::with_capacity(forms.len());
    for (place, (shape, kind)) in forms.iter().enumerate() {
        let mut tensor = match sources.get(place) {
            Some(source) => source.f_detach()?.f_to_device(device)?.f_contiguous()?,
            None => {
                let kind = kind_of(*kind).ok_or_else(|| {
                    Error::invalid_argument("the last stage sent a tensor of an unknown type")
                })?;
                Tensor::f_empty(shape, (kind, device))?
            }
        };
        group.broadcast(&mut tensor, root)?;
        tensors.push(tensor);
    }
    V::from_spec(&spec, &mut tensors.into_iter())
}
