//! Inputs of a model in text generation: first the prompts, then the preceding token.

use brigade_torch::Result;
use tch::{Device, Kind, Tensor};

use super::recorded::{FirstStep, RecordedSteps};
use super::{CausalModel, GenerationOptions, refused};
use crate::{Tokens, VocabularyLogits};

/// Checked prompts.
pub(super) struct Prompt {
    /// Ids `[batch, tokens]`.
    pub(super) ids: Tensor,
    /// Attention mask `[batch, tokens]`, if there is padding.
    pub(super) mask: Option<Tensor>,
    /// Tokens of each text, without padding.
    pub(super) rows: Vec<Vec<i64>>,
    /// Maximum number of generated tokens.
    pub(super) left: i64,
}

impl Prompt {
    pub(super) fn new(
        options: &GenerationOptions,
        ids: &Tensor,
        attention_mask: Option<&Tensor>,
    ) -> Result<Self> {
        let &[batch, length] = ids.size().as_slice() else {
            return Err(refused(format!("expected ids [batch, tokens], found {:?}", ids.size())));
        };
        if batch < 1 || length < 1 {
            return Err(refused(format!(
                "there is no token to continue from: ids {:?}",
                ids.size()
            )));
        }
        let mask =
            attention_mask.map(|mask| left_padded(mask, batch, length)).transpose()?.flatten();
        let room = options.max_length.map_or(i64::MAX, |longest| (longest - length).max(0));
        let mut rows = Vec::<Vec<i64>>::try_from(ids.f_to_device(Device::Cpu)?)?;
        if let Some(mask) = &mask {
            let masks = Vec::<Vec<i64>>::try_from(mask.f_to_device(Device::Cpu)?)?;
            for (row, mask) in rows.iter_mut().zip(masks) {
                row.drain(..mask.iter().filter(|&&seen| seen == 0).count());
            }
        }
        let left = options.max_new_tokens.min(room);
        Ok(Self { ids: ids.shallow_clone(), mask, rows, left })
    }
}

/// How the steps of one token are computed.
enum Steps {
    /// One by one, for this reason.
    Plain(String),
    /// As a graph from the first step behind the prompt on.
    ToRecord,
    Recorded(Box<RecordedSteps>),
}

/// The room of a recorded step's cache is a multiple of this number of tokens, as attention's kernels need of a mask.
const MASK_ALIGNMENT: i64 = 8;

/// A function that returns `true` if any rank needs a forward.
type AnyRank<'m> = Box<dyn Fn(bool) -> Result<bool> + 'm>;

/// A model with its state, and the tokens that it has not processed yet.
pub(super) struct Reader<'m, M: CausalModel> {
    model: &'m M,
    state: M::State,
    /// Attention mask `[batch, tokens so far]`, if a text is padded.
    mask: Option<Tensor>,
    ids: Tensor,
    positions: Option<Tensor>,
    /// Number of tokens that the model has processed.
    seen: i64,
    /// Number of padding tokens in the text with the most.
    padding: i64,
    chunk: Option<i64>,
    /// Number of tokens for which the state has room.
    room: i64,
    steps: Steps,
    /// Agreement with the ranks that compute the same number of forwards.
    any_rank: Option<AnyRank<'m>>,
}

impl<'m, M: CausalModel> Reader<'m, M> {
    pub(super) fn new(model: &'m M, prompt: &Prompt, options: &GenerationOptions) -> Result<Self> {
        let tokens = prompt.ids.size()[1];
        let mut room = tokens + prompt.left;
        let mut steps = Steps::Plain("`GenerationOptions::capture` is false".to_owned());
        if options.capture {
            room = room.saturating_add(MASK_ALIGNMENT - 1) / MASK_ALIGNMENT * MASK_ALIGNMENT;
            steps = Steps::ToRecord;
        }
        Ok(Self {
            model,
            state: model.start_as(room, options.cache_kind)?,
            room,
            steps,
            positions: None,
            mask: prompt.mask.as_ref().map(Tensor::shallow_clone),
            ids: prompt.ids.shallow_clone(),
            seen: 0,
            padding: tokens - prompt.rows.iter().map(Vec::len).max().unwrap_or(0) as i64,
            chunk: options.prefill_chunk,
            any_rank: None,
        })
    }

    pub(super) fn synchronize(&mut self, any_rank: impl Fn(bool) -> Result<bool> + 'm) {
        self.any_rank = Some(Box::new(any_rank));
        // A state that was prepared for recorded steps stays so.
        if !matches!(self.steps, Steps::Recorded(_)) {
            self.steps = Steps::Plain("ranks agree on each step".to_owned());
        }
    }

    /// Returns the reason why steps are not recorded as a graph.
    pub(super) fn records(&self) -> std::result::Result<(), &str> {
        match &self.steps {
            Steps::Plain(reason) => Err(reason),
            Steps::ToRecord => Ok(()),
            Steps::Recorded(steps) => steps.plain().map_or(Ok(()), Err),
        }
    }

    pub(super) fn mask(&self) -> Option<&Tensor> {
        self.mask.as_ref()
    }

    /// Processes the pending tokens and returns the logits of the next one.
    pub(super) fn logits(&mut self) -> Result<VocabularyLogits> {
        if self.positions.is_none() {
            self.positions = self.mask.as_ref().map(positions).transpose()?;
        }
        let tokens = self.ids.size()[1];
        let length = self.seen + tokens - self.padding;
        if let Some(limit) = self.model.max_tokens().filter(|&limit| length > limit) {
            return Err(refused(format!(
                "the model has {limit} positions, found {length} tokens: take shorter texts, or a smaller max_new_tokens"
            )));
        }
        if let Some(logits) = self.recorded_logits()? {
            return Ok(logits.into());
        }
        let chunk = self.chunk.unwrap_or(tokens).min(tokens);
        let mut begin = 0;
        loop {
            let count = chunk.min(tokens - begin);
            let part = |all: &Tensor| all.f_narrow(1, begin, count);
            let (ids, positions) =
                (part(&self.ids)?, self.positions.as_ref().map(part).transpose()?);
            let mask = self.mask.as_ref();
            let mask = mask.map(|mask| mask.f_narrow(1, 0, self.seen + count)).transpose()?;
            let tokens_in = Tokens {
                attention_mask: mask.as_ref(),
                position_ids: positions.as_ref(),
                ..Tokens::from(&ids)
            };
            self.agree(true)?;
            let logits = self.model.next_vocabulary_logits(tokens_in, &mut self.state)?;
            self.seen += count;
            begin += count;
            if begin >= tokens {
                return Ok(logits);
            }
        }
    }

    /// Computes the logits behind one token by steps that can be recorded. `None` if they cannot.
    fn recorded_logits(&mut self) -> Result<Option<Tensor>> {
        if self.seen == 0 {
            return Ok(None);
        }
        if matches!(self.steps, Steps::ToRecord) {
            let padded = match (&self.positions, &self.mask) {
                // The mask has the present token, too.
                (Some(positions), Some(mask)) => Some([positions, mask]),
                _ => None,
            };
            let first = FirstStep { ids: &self.ids, padded, seen: self.seen, room: self.room };
            self.steps = match RecordedSteps::begin(self.model, &mut self.state, &first)? {
                Ok(steps) => Steps::Recorded(Box::new(steps)),
                Err(reason) => Steps::Plain(reason),
            };
        }
        if matches!(self.steps, Steps::Recorded(_)) {
            self.agree(true)?;
        }
        let Steps::Recorded(steps) = &mut self.steps else { return Ok(None) };
        let logits = steps.logits(self.model, &mut self.state, &self.ids)?;
        self.seen += 1;
        Ok(Some(logits))
    }

    /// Appends the next token of each text, `[batch, 1]`.
    pub(super) fn push(&mut self, column: Tensor) -> Result<()> {
        if let Some(mask) = &self.mask {
            let seen = column.f_ones_like()?.f_to_kind(mask.kind())?;
            self.mask = Some(Tensor::f_cat(&[mask, &seen], 1)?);
        }
        if let Some(positions) = &self.positions {
            let last = positions.f_narrow(1, positions.size()[1] - 1, 1)?;
            self.positions = Some(last.f_add_scalar(1)?);
        }
        self.ids = column;
        Ok(())
    }

    /// Continues with the texts of these indices, in their order.
    pub(super) fn select_rows(&mut self, rows: &Tensor) -> Result<()> {
        self.model.select_rows(&mut self.state, rows)?;
        for tensor in [&mut self.mask, &mut self.positions].into_iter().flatten() {
            *tensor = tensor.f_index_select(0, rows)?;
        }
        self.ids = self.ids.f_index_select(0, rows)?;
        if let Steps::Recorded(steps) = &mut self.steps {
            steps.select_rows(rows)?;
        }
        Ok(())
    }

    /// Computes forwards of one token until no rank needs one.
    pub(super) fn finish(&mut self) -> Result<()> {
        while self.agree(false)? {
            let ids = self.ids.f_narrow(0, 0, 1)?.f_narrow(1, 0, 1)?;
            let mut state = self.model.start(1);
            tch::no_grad(|| {
                self.model.next_vocabulary_logits(Tokens::from(&ids), &mut state).map(drop)
            })?;
        }
        self.any_rank = None;
        Ok(())
    }

    /// Stops the agreement with the other ranks after an error, which they detect by other means.
    pub(super) fn abandon(&mut self) {
        self.any_rank = None;
    }

    /// Returns `true` if any rank computes a forward.
    fn agree(&self, computes: bool) -> Result<bool> {
        self.any_rank.as_ref().map_or(Ok(computes), |any_rank| any_rank(computes))
    }
}

/// Returns the mask if it hides a token, after checking that the last tokens are not hidden.
fn left_padded(mask: &Tensor, batch: i64, length: i64) -> Result<Option<Tensor>> {
    if mask.size() != [batch, length] {
        return Err(refused(format!(
            "for ids [{batch}, {length}] the attention mask has the same shape, found {:?}",
            mask.size()
        )));
    }
    let seen = mask.f_ne(0)?;
    if seen.f_all()?.f_int64_value(&[])? != 0 {
        return Ok(None);
    }
    let (earlier, later) = (seen.f_narrow(1, 0, length - 1)?, seen.f_narrow(1, 1, length - 1)?);
    let grows = earlier.f_le_tensor(&later)?.f_all()?.f_int64_value(&[])? != 0;
    if !grows || seen.f_select(1, -1)?.f_all()?.f_int64_value(&[])? == 0 {
        return Err(refused(
            "texts to continue are padded on the left: the attention mask has a 0 after a 1, \
             or at the end",
        ));
    }
    Ok(Some(seen.f_to_kind(Kind::Int64)?))
}

/// Returns positions that do not count padding.
fn positions(mask: &Tensor) -> Result<Tensor> {
    Ok(mask.f_cumsum(1, Kind::Int64)?.f_sub_scalar(1)?.f_clamp_min(0)?)
}
