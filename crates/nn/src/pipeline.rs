//! Pipeline parallelism: models that are cut into stages.
//!
//! A model is cut at a sequence of blocks (`Stages`). `Model::builder().pipeline` builds a deferred model and keeps the
//! entries of this rank's stages (`model/stages.rs`), by the order of registration. Those of other stages stay without
//! memory, because layers need their tensors and loads their names; drawing their values still takes numbers from the
//! generator.
//!
//! In a stage, the sequence begins with a received activation and ends with a special error, which is not a failure;
//! the output is in the state of the sequence. So constructors and forwards do not depend on pipelines.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use brigade_sharding::pipeline::{PipelineError, cut_at, cut_by_cost, cut_evenly};
use brigade_torch::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use tch::Tensor;

/// Rule by which a sequence of blocks is cut into pipeline stages.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub enum StageCut {
    /// Even division: the numbers of blocks differ by at most one, where the first stages have more.
    #[default]
    Even,
    /// Division by cost: minimises the time of the slowest stage, for these times of the blocks, in any unit.
    Costs(Vec<f64>),
    /// Division before the blocks of these full names, such as `transformer.h.6`: the first block of each stage but the
    /// first stage.
    At(Vec<String>),
}

impl StageCut {
    /// Returns the blocks of each stage.
    fn cut(&self, blocks: &[String], stages: usize) -> Result<Vec<Range<usize>>, String> {
        let with_remedy = |error: PipelineError| match error {
            PipelineError::FewLayers { layers, .. } => {
                format!("{error}; take {layers} stages or fewer")
            }
            _ => error.to_string(),
        };
        let cut = match self {
            Self::Even => cut_evenly(blocks.len(), stages).map_err(with_remedy)?,
            Self::Costs(costs) if costs.len() != blocks.len() => {
                return Err(format!(
                    "the cut has the costs of {} blocks, and there are {}",
                    costs.len(),
                    blocks.len()
                ));
            }
            Self::Costs(costs) => cut_by_cost(costs, stages).map_err(with_remedy)?,
            Self::At(starts) => {
                let blocks: Vec<&str> = blocks.iter().map(String::as_str).collect();
                let starts: Vec<&str> = starts.iter().map(String::as_str).collect();
                cut_at(&blocks, &starts).map_err(with_remedy)?
            }
        };
        if cut.len() != stages {
            return Err(format!(
                "the cut names the first blocks of {} stages, and the pipeline has {stages}",
                cut.len()
            ));
        }
        Ok(cut)
    }
}

/// Options of pipeline parallelism: the stages, and the rank of each. Passed to
/// [`ModelBuilder::pipeline`](crate::ModelBuilder::pipeline).
#[derive(Debug, Clone)]
pub struct PipelineParallel {
    /// The rank of each stage within the pipeline:
    /// [`PipelineTable::stage_ranks`](brigade_sharding::pipeline::PipelineTable::stage_ranks).
    pub stage_ranks: Vec<usize>,
    /// Rank of this process within the pipeline.
    pub rank: usize,
    /// Rule by which the blocks are cut into stages.
    pub cut: StageCut,
}

impl PipelineParallel {
    /// Returns `true` if a stage is this rank's.
    fn has(&self, stage: usize) -> bool {
        self.stage_ranks.get(stage) == Some(&self.rank)
    }
}

/// A sequence of blocks at which a pipeline cuts a model into stages. Created by [`crate::ParamPath::stages`] in a
/// constructor. The forward runs the blocks with [`Stages::run`], which runs all of them if the model is not cut.
/// Computations of the module after the blocks belong to the last stage; those before the blocks, outside of `first`,
/// run in every stage. Clones are handles of the same sequence.
///
/// ```
/// use brigade_nn::{Embedding, Linear, Model, Module, ParamPath, Stages};
/// use brigade_torch::Result;
/// use tch::Tensor;
///
/// struct Net { embedding: Embedding, row: Stages, blocks: Vec<Linear>, head: Linear }
///
/// impl Net {
///     fn new(path: &ParamPath<'_>) -> Self {
///         Self {
///             embedding: Embedding::new(path / "embedding", 50, 8),
///             row: (path / "blocks").stages(0..4),
///             blocks: (0..4).map(|index| Linear::new(path / "blocks" / index, 8, 8)).collect(),
///             head: Linear::new(path / "head", 8, 50),
///         }
///     }
/// }
///
/// impl Module<&Tensor> for Net {
///     type Output = Tensor;
///     fn forward(&self, ids: &Tensor) -> Result<Tensor> {
///         let block = |index: usize, hidden: &Tensor| self.blocks[index].forward(hidden);
///         let hidden = self.row.run(|| self.embedding.forward(ids), block)?;
///         self.head.forward(&hidden)
///     }
/// }
///
/// let model = Model::new(Net::new)?;
/// assert_eq!(model.forward(&Tensor::from_slice(&[1i64, 2]))?.size(), [2, 50]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct Stages {
    blocks: usize,
    place: Arc<Mutex<Place>>,
}

/// Part of a row that runs.
#[derive(Default)]
enum Place {
    /// All blocks of the row.
    #[default]
    Whole,
    /// The model is cut, and no stage is running.
    Cut { own: Vec<usize>, stages: usize },
    /// A stage is running.
    Running { blocks: Range<usize>, input: Option<Vec<Tensor>>, is_last: bool, is_split: bool },
    /// A stage has run its blocks. Its outputs are stored if the layers after the blocks belong to another stage or have
    /// a graph of their own.
    Ended { output: Option<Vec<Tensor>>, behind: Option<Vec<Tensor>> },
}

impl Stages {
    pub(crate) fn new(blocks: usize) -> Self {
        Self { blocks, place: Arc::default() }
    }

    /// Runs the blocks one after the other, each with its index and the output of the preceding one. `first` computes
    /// the input of the first block, such as the embeddings of tokens.
    ///
    /// In a stage of a pipeline it runs only the stage's blocks. On all stages but the last it returns an error by
    /// which the executor detects the end of the stage; the caller must return that error.
    ///
    /// # Errors
    /// Returns the errors of `first` and `block`, and the special error at the end of a stage;
    /// [`brigade_torch::ErrorKind::InvalidArgument`] for a second call in one stage, and for a model that is cut and
    /// runs outside of a pipeline's executor.
    pub fn run(
        &self,
        first: impl FnOnce() -> Result<Tensor>,
        mut block: impl FnMut(usize, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        self.run_blocks(first, |blocks, mut hidden| {
            for index in blocks {
                hidden = block(index, &hidden)?;
            }
            Ok(hidden)
        })
    }

    /// Runs the blocks like [`Stages::run`], with a function that runs a range of blocks: all of them, or those of a
    /// stage. For modules that compute something around a range of blocks.
    ///
    /// # Errors
    /// Returns the same errors as [`Stages::run`].
    pub fn run_blocks(
        &self,
        first: impl FnOnce() -> Result<Tensor>,
        run: impl FnOnce(Range<usize>, Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let run = |blocks, [hidden]: [Tensor; 1]| Ok([run(blocks, hidden)?]);
        let [hidden] = self.run_blocks_with(|| Ok([first()?]), run)?;
        Ok(hidden)
    }

    /// Runs the blocks like [`Stages::run_blocks`], with several tensors that go from stage to stage, such as hidden
    /// states and sums over the blocks before. All of them are floating-point tensors, and each gets a gradient. Their
    /// number is the same in all calls.
    ///
    /// # Errors
    /// Returns the same errors as [`Stages::run`]; [`brigade_torch::ErrorKind::InvalidArgument`] if the preceding stage
    /// has passed on another number of tensors.
    pub fn run_blocks_with<const N: usize>(
        &self,
        first: impl FnOnce() -> Result<[Tensor; N]>,
        run: impl FnOnce(Range<usize>, [Tensor; N]) -> Result<[Tensor; N]>,
    ) -> Result<[Tensor; N]> {
        let (blocks, input, is_last, is_split) = {
            let mut place = self.place.lock();
            match &mut *place {
                Place::Whole => (0..self.blocks, None, true, false),
                Place::Running { blocks, input, is_last, is_split } => {
                    let taken = (blocks.clone(), input.take(), *is_last, *is_split);
                    *place = Place::Ended { output: None, behind: None };
                    taken
                }
                Place::Ended { .. } => {
                    return Err(Error::invalid_argument(
                        "the blocks of a pipeline's stage ran twice in one call of the closure: call the model's forward \
                         once for each micro-batch",
                    ));
                }
                Place::Cut { own, stages } => {
                    return Err(Error::invalid_argument(format!(
                        "this rank has {} of a pipeline of {stages}: run the model by `Accelerator::forward_backward` or \
                         `Accelerator::parallel().forward_stages`",
                        words(own)
                    )));
                }
            }
        };
        let inputs = match input {
            Some(inputs) => <[Tensor; N]>::try_from(inputs).map_err(|inputs| {
                Error::invalid_argument(format!(
                    "the stage before passed on {} tensors, and this one takes {N}: run the same forward in all stages",
                    inputs.len()
                ))
            })?,
            None => first()?,
        };
        let outputs = run(blocks, inputs)?;
        if is_last && !is_split {
            return Ok(outputs);
        }
        if is_last {
            let leaf = |output: &Tensor| output.f_detach()?.f_set_requires_grad(true);
            let leaves = outputs.iter().map(leaf).collect::<Result<Vec<_>, _>>()?;
            let behind = std::array::from_fn(|place| leaves[place].shallow_clone());
            *self.place.lock() =
                Place::Ended { output: Some(outputs.into()), behind: Some(leaves) };
            return Ok(behind);
        }
        *self.place.lock() = Place::Ended { output: Some(outputs.into()), behind: None };
        Err(Error::new(ErrorKind::Model, StageEnded))
    }

    /// Returns `true` if the model is cut into stages of a pipeline, so that other ranks may have other blocks.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        !matches!(*self.place.lock(), Place::Whole)
    }

    /// Returns the number of blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks
    }

    /// Returns `true` if there are no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks == 0
    }

    fn set(&self, place: Place) -> Place {
        std::mem::replace(&mut *self.place.lock(), place)
    }
}

impl fmt::Debug for Stages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stages").field("blocks", &self.blocks).finish_non_exhaustive()
    }
}

/// Formats a list of stages: `stage 1`, `stages 0 and 3`.
fn words(stages: &[usize]) -> String {
    let numbers: Vec<String> = stages.iter().map(ToString::to_string).collect();
    format!("stage{} {}", if stages.len() == 1 { "" } else { "s" }, numbers.join(" and "))
}

/// Error that ends a forward whose remainder runs on another rank.
#[derive(Debug, thiserror::Error)]
#[error(
    "the stage of a pipeline has ended here: run the model by `Accelerator::forward_backward`, and pass the error of its \
     forward on"
)]
struct StageEnded;

/// Result of the forward of one pipeline stage.
#[derive(Debug)]
pub enum StageOutput<T> {
    /// Outputs of the stage's last block, which are the inputs of the next stage: one tensor, or several with
    /// [`Stages::run_blocks_with`].
    Hidden(Vec<Tensor>),
    /// Value that the last stage's closure returned.
    Value(T),
    /// Value that the last stage's closure returned, in a graph that begins after the blocks
    /// ([`PipelineStages::run_split`]).
    Split {
        /// Value that the closure returned.
        value: T,
        /// Outputs of the last block.
        outputs: Vec<Tensor>,
        /// Leaves that the layers after the blocks get as inputs. Their gradients are those of the outputs.
        leaves: Vec<Tensor>,
    },
}

/// A parameter that several stages have, such as an embedding whose weight is tied to the head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedParameter {
    /// First of the parameter's names.
    pub name: String,
    /// Pipeline ranks that have the parameter, in the order of their stages.
    pub ranks: Vec<usize>,
}

/// Division of a model into pipeline stages, of which this rank has one or more.
#[derive(Debug)]
pub struct PipelineStages {
    pipeline: PipelineParallel,
    row: Stages,
    blocks: Vec<Range<usize>>,
    shared: Vec<SharedParameter>,
    /// First names of the parameters of each stage.
    names: Vec<Vec<String>>,
    /// All names of the whole model's state dictionary.
    pub(crate) saved: Vec<String>,
}

/// Blocks of a row, by the names that the constructor has given.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) blocks: Vec<String>,
    pub(crate) row: Stages,
}

impl PipelineStages {
    pub(crate) fn new(pipeline: PipelineParallel, rows: Vec<Row>) -> Result<(Self, Row), String> {
        let mut rows = rows.into_iter();
        let (Some(row), None) = (rows.next(), rows.next()) else {
            return Err(
                "a pipeline cuts a model at its row of blocks, and it has none, or several: a module makes one by \
                 `ParamPath::stages` and runs it by `Stages::run`"
                    .to_owned(),
            );
        };
        let stages = pipeline.stage_ranks.len();
        let blocks = pipeline.cut.cut(&row.blocks, stages)?;
        let own: Vec<usize> = (0..stages).filter(|&stage| pipeline.has(stage)).collect();
        if own.is_empty() {
            return Err(format!(
                "rank {} has no stage of the pipeline, whose stages are of the ranks {:?}",
                pipeline.rank, pipeline.stage_ranks
            ));
        }
        if own.len() < stages {
            row.row.set(Place::Cut { own, stages });
        }
        let names = vec![Vec::new(); stages];
        let of_row = row.row.clone();
        let (shared, saved) = (Vec::new(), Vec::new());
        Ok((Self { pipeline, row: of_row, blocks, shared, names, saved }, row))
    }

    /// Records a parameter and the stages that have it. Returns `true` if one of them is this rank's.
    pub(crate) fn add(&mut self, name: &str, is_parameter: bool, stages: &[usize]) -> bool {
        let has = stages.iter().any(|&stage| self.pipeline.has(stage));
        if !is_parameter {
            return has;
        }
        let mut ranks = Vec::new();
        for &stage in stages {
            self.names[stage].push(name.to_owned());
            let rank = self.pipeline.stage_ranks[stage];
            if !ranks.contains(&rank) {
                ranks.push(rank);
            }
        }
        if ranks.len() > 1 {
            self.shared.push(SharedParameter { name: name.to_owned(), ranks });
        }
        has
    }

    /// Returns the stage of a block.
    pub(crate) fn stage_of(&self, block: usize) -> usize {
        let found = self.blocks.iter().position(|blocks| blocks.contains(&block));
        found.unwrap_or_default()
    }

    /// Returns the number of stages of all ranks.
    #[must_use]
    pub fn stages(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the rank of each stage within the pipeline.
    #[must_use]
    pub fn stage_ranks(&self) -> &[usize] {
        &self.pipeline.stage_ranks
    }

    /// Returns the rank of this process within the pipeline.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.pipeline.rank
    }

    /// Returns the range of blocks of each stage, by their indices.
    #[must_use]
    pub fn blocks(&self) -> &[Range<usize>] {
        &self.blocks
    }

    /// Returns the parameters that several ranks have. The list is the same on all ranks.
    #[must_use]
    pub fn shared(&self) -> &[SharedParameter] {
        &self.shared
    }

    /// Returns the names of the parameters of a stage: for tied parameters, the first name.
    #[must_use]
    pub fn parameters_of(&self, stage: usize) -> &[String] {
        self.names.get(stage).map_or(&[], Vec::as_slice)
    }

    /// Returns the names of the whole model's state dictionary, including other ranks' stages, in order.
    #[must_use]
    pub fn saved_names(&self) -> &[String] {
        &self.saved
    }

    /// Runs a stage of this rank: calls `forward`, in which only the stage's blocks run. `input` is what the preceding
    /// stage has passed on, or `None` for the first stage.
    ///
    /// # Errors
    /// Returns the errors of `forward`; [`brigade_torch::ErrorKind::InvalidArgument`] for a stage of another rank, a
    /// missing input, an input for the first stage, and for a closure that does not run the blocks.
    pub fn run<T>(
        &self,
        stage: usize,
        input: Option<Vec<Tensor>>,
        forward: impl FnOnce() -> Result<T>,
    ) -> Result<StageOutput<T>> {
        self.run_as(stage, input, false, forward)
    }

    /// Runs a stage like [`PipelineStages::run`], but the layers after the blocks of the last stage get a graph of
    /// their own, so that their backward runs only once if the backward of the blocks runs in two parts.
    ///
    /// # Errors
    /// Returns the same errors as [`PipelineStages::run`].
    pub fn run_split<T>(
        &self,
        stage: usize,
        input: Option<Vec<Tensor>>,
        forward: impl FnOnce() -> Result<T>,
    ) -> Result<StageOutput<T>> {
        self.run_as(stage, input, true, forward)
    }

    fn run_as<T>(
        &self,
        stage: usize,
        input: Option<Vec<Tensor>>,
        is_split: bool,
        forward: impl FnOnce() -> Result<T>,
    ) -> Result<StageOutput<T>> {
        let Some(blocks) = self.blocks.get(stage).filter(|_| self.pipeline.has(stage)) else {
            return Err(Error::invalid_argument(format!(
                "stage {stage} is not of rank {} of the pipeline",
                self.pipeline.rank
            )));
        };
        if input.is_some() != (stage > 0) {
            return Err(Error::invalid_argument(format!(
                "stage {stage} takes {}",
                if stage > 0 { "the output of the stage before" } else { "no input" }
            )));
        }
        let is_last = stage + 1 == self.stages();
        let running = Place::Running { blocks: blocks.clone(), input, is_last, is_split };
        let mut guard = Guard { row: &self.row, before: Some(self.row.set(running)) };
        let result = forward();
        let after = guard.end();
        match (after, result) {
            (Place::Ended { output: Some(hidden), behind: None }, Err(_)) => {
                Ok(StageOutput::Hidden(hidden))
            }
            (_, Err(error)) => Err(error),
            (Place::Ended { output: None, .. }, Ok(value)) => Ok(StageOutput::Value(value)),
            (Place::Ended { output: Some(outputs), behind: Some(leaves) }, Ok(value)) => {
                Ok(StageOutput::Split { value, outputs, leaves })
            }
            (Place::Ended { .. }, Ok(_)) => Err(Error::invalid_argument(format!(
                "the closure went on after stage {stage} had ended: it is to return the error of the model's forward"
            ))),
            (_, Ok(_)) => Err(Error::invalid_argument(format!(
                "the closure of stage {stage} did not run the model's blocks: call the model's forward in it"
            ))),
        }
    }
}

/// Restores the state of a row when dropped, also after a panic.
struct Guard<'a> {
    row: &'a Stages,
    before: Option<Place>,
}

impl Guard<'_> {
    fn end(&mut self) -> Place {
        self.row.set(self.before.take().unwrap_or_default())
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if let Some(before) = self.before.take() {
            self.row.set(before);
        }
    }
}
