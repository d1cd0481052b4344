//! Generation with a model whose stages are on several ranks, each with the key-value caches of its blocks.

use std::fmt;
use std::marker::PhantomData;

use brigade_torch::{Error, Result, TensorTree, TreeSpec};
use tch::{Kind, Tensor};

use super::{CausalModel, refused};
use crate::{CacheKind, KeyValueCache, Tokens};

/// A causal model whose stages are on several ranks of a pipeline, with a key-value cache for each stage and
/// micro-batch, so that a further token costs the work of one token.
///
/// It is made from a closure that runs all micro-batches of a [`StagedTokens`] batch through the pipeline
/// (`Accelerator::parallel().forward_stages`), calls its second argument with the model for each micro-batch and each
/// stage of this rank, and returns the results of all micro-batches. All ranks of the pipeline generate the same
/// tokens. A closure that gathers the units of a sharded model (`PreparedModel::run`) makes one of that. Sampling,
/// several continuations and beam search work as with a model on one process.
///
/// ```
/// use brigade_models::{GenerationOptions, Gpt2LmHead, Gpt2Options, StagedModel};
/// use brigade_nn::Model;
/// use tch::Tensor;
///
/// let options = Gpt2Options { vocab_size: 50, n_embd: 32, n_head: 4, n_layer: 2, ..Default::default() };
/// let mut model = Model::new(|path| Gpt2LmHead::new(path, &options))?;
/// model.eval();
/// // With a pipeline: `|batch, next| accelerator.parallel().forward_stages(&model, batch, |model, micro|
/// // next(model.inner(), micro))`.
/// let stages = StagedModel::new(|batch, next| Ok(vec![next(&model, batch)?]));
/// let ids = Tensor::from_slice(&[7i64, 8]).view([1, 2]);
/// let greedy = GenerationOptions::default();
/// assert_eq!(greedy.generate(&stages, &ids, None)?, greedy.generate(&model, &ids, None)?);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub struct StagedModel<M, F> {
    forward: F,
    model: PhantomData<fn(&M)>,
}

impl<M, F> StagedModel<M, F>
where
    M: CausalModel<State = KeyValueCache>,
    F: Fn(&StagedTokens, &mut NextLogits<'_, M>) -> Result<Vec<Tensor>>,
{
    /// Creates the model from a closure.
    pub fn new(forward: F) -> Self {
        Self { forward, model: PhantomData }
    }
}

/// Function that computes the logits of a micro-batch's next tokens with a model and the caches of one stage: the
/// second argument of a [`StagedModel`]'s closure.
pub type NextLogits<'a, M> = dyn FnMut(&M, &StagedTokens) -> Result<Tensor> + 'a;

impl<M, F> CausalModel for StagedModel<M, F>
where
    M: CausalModel<State = KeyValueCache>,
    F: Fn(&StagedTokens, &mut NextLogits<'_, M>) -> Result<Vec<Tensor>>,
{
    type State = StageCaches;

    fn start(&self, tokens: i64) -> StageCaches {
        StageCaches { room: tokens, ..StageCaches::default() }
    }

    fn start_as(&self, tokens: i64, kind: CacheKind) -> Result<StageCaches> {
        Ok(StageCaches { kind, ..self.start(tokens) })
    }

    fn next_logits(&self, tokens: Tokens<'_>, caches: &mut StageCaches) -> Result<Tensor> {
        let batch = StagedTokens::new(tokens)?;
        caches.begin();
        let mut next = |model: &M, micro: &StagedTokens| {
            let cache = caches.next(micro.first_row()?, micro.ids.size()[0])?;
            model.next_logits(micro.tokens(), cache)
        };
        let logits = (self.forward)(&batch, &mut next)?;
        caches.before.clear();
        Ok(Tensor::f_cat(&logits, 0)?)
    }

    fn select_rows(&self, caches: &mut StageCaches, rows: &Tensor) -> Result<()> {
        caches.select_rows(rows)
    }
}

impl<M, F> fmt::Debug for StagedModel<M, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StagedModel").finish_non_exhaustive()
    }
}

/// Batch of tokens that a [`StagedModel`] passes to its closure. A pipeline cuts it into micro-batches.
#[derive(Debug)]
pub struct StagedTokens {
    ids: Tensor,
    mask: Option<Tensor>,
    positions: Option<Tensor>,
    /// Index of each row within the batch, by which a micro-batch finds its caches.
    rows: Tensor,
}

impl StagedTokens {
    fn new(tokens: Tokens<'_>) -> Result<Self> {
        if tokens.token_type_ids.is_some() {
            return Err(refused("stages generate texts without token types"));
        }
        let batch = tokens.ids.size().first().copied().unwrap_or(0);
        let positions = tokens.position_ids.map(|positions| match positions.size().as_slice() {
            // A pipeline cuts every tensor of a batch by its rows.
            [1, length] => positions.f_expand([batch, *length], false),
            _ => Ok(positions.shallow_clone()),
        });
        Ok(Self {
            ids: tokens.ids.shallow_clone(),
            mask: tokens.attention_mask.map(Tensor::shallow_clone),
            positions: positions.transpose()?,
            rows: Tensor::f_arange(batch, (Kind::Int64, tch::Device::Cpu))?,
        })
    }

    /// Returns the tokens as the input of a transformer.
    #[must_use]
    pub fn tokens(&self) -> Tokens<'_> {
        Tokens {
            attention_mask: self.mask.as_ref(),
            position_ids: self.positions.as_ref(),
            ..Tokens::from(&self.ids)
        }
    }

    fn first_row(&self) -> Result<i64> {
        Ok(self.rows.f_int64_value(&[0])?)
    }
}

type Parts = (Tensor, Option<Tensor>, Option<Tensor>, Tensor);

impl TensorTree for StagedTokens {
    type Owned = Self;

    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        self.ids.visit(f);
        self.mask.visit(f);
        self.positions.visit(f);
        self.rows.visit(f);
    }

    fn try_map<E>(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
        Ok(Self {
            ids: self.ids.try_map(f)?,
            mask: self.mask.try_map(f)?,
            positions: self.positions.try_map(f)?,
            rows: self.rows.try_map(f)?,
        })
    }

    fn spec(&self) -> TreeSpec {
        (&self.ids, &self.mask, &self.positions, &self.rows).spec()
    }

    fn from_spec(
        spec: &TreeSpec,
        tensors: &mut dyn Iterator<Item = Tensor>,
    ) -> Result<Self, Error> {
        let (ids, mask, positions, rows) = Parts::from_spec(spec, tensors)?;
        Ok(Self { ids, mask, positions, rows })
    }
}

/// Key-value caches of a rank's stages: one for each stage and micro-batch. State of a [`StagedModel`].
#[derive(Debug, Default)]
pub struct StageCaches {
    room: i64,
    kind: CacheKind,
    micros: Vec<MicroCaches>,
    /// Caches of all rows, one for each stage of this rank, from which micro-batches take their rows.
    before: Vec<KeyValueCache>,
}

/// Caches of a micro-batch.
#[derive(Debug)]
struct MicroCaches {
    first_row: i64,
    rows: i64,
    stages: Vec<KeyValueCache>,
    /// Number of this rank's stages that have run in the current pass.
    passed: usize,
}

impl StageCaches {
    /// Begins the pass of all micro-batches through all stages.
    fn begin(&mut self) {
        for micro in &mut self.micros {
            micro.passed = 0;
        }
    }

    /// Returns the cache of the next stage of a micro-batch.
    fn next(&mut self, first_row: i64, rows: i64) -> Result<&mut KeyValueCache> {
        let place = match self.micros.iter().position(|micro| micro.first_row == first_row) {
            Some(place) => place,
            None => {
                self.micros.push(MicroCaches { first_row, rows, stages: Vec::new(), passed: 0 });
                self.micros.len() - 1
            }
        };
        let micro = &mut self.micros[place];
        if micro.rows != rows {
            return Err(refused(format!(
                "the micro-batch from row {first_row} has {rows} rows, and had {} before: cut every batch in the same way",
                micro.rows
            )));
        }
        if micro.stages.len() <= micro.passed {
            micro.stages.push(match self.before.get(micro.passed) {
                Some(before) => before.rows(first_row, rows)?,
                None => KeyValueCache::with_room(self.room).kind(self.kind),
            });
        }
        micro.passed += 1;
        Ok(&mut micro.stages[micro.passed - 1])
    }

    /// Joins the caches of all micro-batches, in the order of their rows, and selects rows. The next pass divides them
    /// between its micro-batches, of which there may be another number.
    fn select_rows(&mut self, rows: &Tensor) -> Result<()> {
        if self.micros.is_empty() {
            // Rows are selected a second time since the last pass.
            return self.before.iter_mut().try_for_each(|joined| joined.select_rows(rows));
        }
        let mut micros = std::mem::take(&mut self.micros);
        micros.sort_by_key(|micro| micro.first_row);
        let stages = micros.first().map_or(0, |micro| micro.stages.len());
        self.before = (0..stages)
            .map(|stage| {
                let parts: Vec<_> = micros.iter().filter_map(|it| it.stages.get(stage)).collect();
                let mut joined = KeyValueCache::joined(&parts)?;
                joined.select_rows(rows)?;
                Ok(joined)
            })
            .collect::<Result<_>>()?;
        Ok(())
    }
}
