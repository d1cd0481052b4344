//! Steps of one token that are recorded as a graph and replayed.
//!
//! The first step behind the prompt runs without a recording, so that libraries allocate what they need. The second one
//! is recorded, on a stream of its own, because the default stream cannot be recorded. Everything that changes from
//! step to step is in tensors that the recording reads: the tokens, their positions, and the place in the cache.

use brigade_torch::{Graph, Result, SideStream};
use tch::{Device, Kind, Tensor};

use super::CausalModel;
use crate::Tokens;

/// A step of text generation that is to be recorded, for [`CausalModel::begin_steps`].
#[derive(Debug)]
pub struct RecordedStep<'a> {
    position: &'a Tensor,
    /// `true` if a [`brigade_nn::Model`] has checked that its weights can be recorded.
    is_checked: bool,
}

impl<'a> RecordedStep<'a> {
    /// Returns the number of tokens before the step's token, padding included: int64 `[1]` on the device of the tokens.
    /// It grows from step to step, in the same memory.
    pub fn position(&self) -> &'a Tensor {
        self.position
    }

    /// Returns `true` if the [`brigade_nn::Model`] with the weights has checked that their memory stays as it is. A
    /// module that has weights refuses steps otherwise.
    #[must_use]
    pub fn is_checked(&self) -> bool {
        self.is_checked
    }

    /// Returns the step for the module of a model that was checked.
    pub(super) fn checked(&self) -> Self {
        Self { position: self.position, is_checked: true }
    }
}

/// The tensors of the steps of a generation, and their recording.
pub(super) struct RecordedSteps {
    /// Tokens `[batch, 1]`.
    ids: Tensor,
    /// Number of tokens before them, int64 `[1]`.
    position: Tensor,
    /// Positions `[batch, 1]` that do not count padding. `None` without padding: the positions are `position`.
    positions: Option<Tensor>,
    /// Attention mask `[batch, room]`, if a text is padded: 1 for all tokens that are still to come.
    mask: Option<Tensor>,
    /// The recording, and the logits `[batch, vocabulary]` that it writes.
    graph: Option<(Graph, Tensor)>,
    /// Number of steps that ran without a recording.
    runs: usize,
    /// Reason why steps run without a recording.
    plain: Option<String>,
}

/// Inputs of the first of the steps.
pub(super) struct FirstStep<'a> {
    /// Tokens `[batch, 1]`.
    pub(super) ids: &'a Tensor,
    /// Positions `[batch, 1]` and the attention mask `[batch, tokens so far]`, if a text is padded.
    pub(super) padded: Option<[&'a Tensor; 2]>,
    /// Number of tokens before the step's, padding included.
    pub(super) seen: i64,
    /// Number of tokens for which the state has room.
    pub(super) room: i64,
}

/// Number of steps that run before one is recorded.
const WARM_UP: usize = 1;

impl RecordedSteps {
    /// Prepares the state of a model for steps that can be recorded. Returns the reason if that is impossible.
    pub(super) fn begin<M: CausalModel>(
        model: &M,
        state: &mut M::State,
        first: &FirstStep<'_>,
    ) -> Result<std::result::Result<Self, String>> {
        let device = first.ids.device();
        if !brigade_torch::records_graphs(device) {
            return Ok(Err("the device records no graphs".to_owned()));
        }
        let position = Tensor::f_full([1], first.seen, (Kind::Int64, device))?;
        let (mut positions, mut mask) = (None, None);
        if let Some([given, so_far]) = first.padded {
            positions = Some(own_copy(given)?);
            let to_come = [so_far.size()[0], first.room - so_far.size()[1]];
            let to_come = Tensor::f_ones(to_come, (so_far.kind(), device))?;
            mask = Some(Tensor::f_cat(&[so_far, &to_come], 1)?);
        }
        let step = RecordedStep { position: &position, is_checked: false };
        if let Err(reason) = model.begin_steps(state, &step) {
            return Ok(Err(reason));
        }
        let ids = own_copy(first.ids)?;
        Ok(Ok(Self { ids, position, positions, mask, graph: None, runs: 0, plain: None }))
    }

    /// Computes the logits of the next token behind `ids`, `[batch, 1]`.
    pub(super) fn logits<M: CausalModel>(
        &mut self,
        model: &M,
        state: &mut M::State,
        ids: &Tensor,
    ) -> Result<Tensor> {
        self.ids.f_copy_(ids)?;
        if self.graph.is_none() && self.plain.is_none() && self.runs >= WARM_UP {
            match self.record(model, state) {
                Ok(recorded) => self.graph = Some(recorded),
                // Nothing was computed.
                Err(error) => self.plain = Some(error.to_string()),
            }
        }
        let logits = match &mut self.graph {
            Some((graph, logits)) => {
                graph.replay()?;
                logits.shallow_clone()
            }
            None => {
                self.runs += 1;
                self.run(model, state)?
            }
        };
        let _ = self.position.f_add_scalar_(1)?;
        if let Some(positions) = &mut self.positions {
            let _ = positions.f_add_scalar_(1)?;
        }
        Ok(logits)
    }

    /// Continues with the texts of these indices, in their order.
    pub(super) fn select_rows(&mut self, rows: &Tensor) -> Result<()> {
        let is_same_batch = rows.size() == [self.ids.size()[0]];
        if !is_same_batch {
            // The recording has another batch.
            (self.graph, self.runs) = (None, 0);
        }
        let tensors = [Some(&mut self.ids), self.positions.as_mut(), self.mask.as_mut()];
        for tensor in tensors.into_iter().flatten() {
            let selected = tensor.f_index_select(0, rows)?;
            if is_same_batch {
                tensor.f_copy_(&selected)?;
            } else {
                *tensor = selected;
            }
        }
        Ok(())
    }

    /// Returns the reason why steps run without a recording.
    pub(super) fn plain(&self) -> Option<&str> {
        self.plain.as_deref()
    }

    fn run<M: CausalModel>(&self, model: &M, state: &mut M::State) -> Result<Tensor> {
        let own;
        let positions = match &self.positions {
            Some(positions) => positions,
            None => {
                own = self.position.f_view([1, 1])?;
                &own
            }
        };
        let tokens = Tokens {
            attention_mask: self.mask.as_ref(),
            position_ids: Some(positions),
            ..Tokens::from(&self.ids)
        };
        model.next_logits(tokens, state)
    }

    fn record<M: CausalModel>(&self, model: &M, state: &mut M::State) -> Result<(Graph, Tensor)> {
        let device: Device = self.ids.device();
        let _stream = SideStream::enter(device, None)?;
        Graph::record(device, None, || self.run(model, state))
    }
}

/// Returns a copy in memory that a recording may read.
fn own_copy(tensor: &Tensor) -> Result<Tensor> {
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}
