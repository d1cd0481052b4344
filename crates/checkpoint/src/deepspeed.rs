//! Checkpoints written by DeepSpeed's `engine.save_checkpoint` with ZeRO stages 1 to 3, in fp16 without ZeRO, and
//! universal checkpoints.

mod files;
mod flat;
mod model;
mod optimizer;
mod universal;
mod whole;
mod zero;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};

use brigade_rank_env::text::counted;

pub use files::deepspeed_folder;

use self::files::Files;
use self::flat::{Chain, Flat, Piece, joined};
use self::model::ModelStates;
use self::universal::Universal;
use self::whole::Whole;
use self::zero::Zero;
use crate::dtype::Dtype;
use crate::error::Error;
use crate::file_tensor::{FileTensor, Weights};
use crate::pth::{TensorData, shown};
use crate::value::Value;

/// Optimizer states, by parameter name and then by state name: `exp_avg`, `exp_avg_sq`, `step`.
pub type Moments = BTreeMap<String, BTreeMap<String, FileTensor>>;

/// An open folder of one step saved by DeepSpeed.
///
/// Names and places of tensors are read, but not their elements, of which a run without ZeRO has the first of each
/// parameter read. Nothing in a pickle is executed.
///
/// ```
/// use brigade_checkpoint::{DeepSpeedFolder, deepspeed_folder, pth::TensorData};
///
/// let folder = deepspeed_folder("tests/fixtures/deepspeed/3-bfloat16".as_ref())?.expect("a step");
/// let run = DeepSpeedFolder::open(&folder)?;
/// assert_eq!((run.stage(), run.ranks(), run.step()), (3, 3, Some(2)));
/// let moments = run.moments()?;
/// assert_eq!(moments["middle.weight"]["exp_avg"].info().shape, [3, 5]);
/// # Ok::<(), brigade_checkpoint::Error>(())
/// ```
#[derive(Debug)]
pub struct DeepSpeedFolder {
    folder: PathBuf,
    stage: u64,
    ranks: u64,
    step: Option<u64>,
    skipped_steps: Option<u64>,
    weights: Weights,
    /// Names of weights that are read from the model's file because the optimizer lacks them.
    untrained: Vec<String>,
    /// Tied parameters that were not saved, one message each.
    left_out: Vec<String>,
    parameters: Vec<Parameter>,
    states: States,
    scheduler: Option<Value<FileTensor>>,
}

/// Name and shape of a trained parameter.
#[derive(Debug)]
struct Parameter {
    name: String,
    shape: Vec<u64>,
    /// Index of a parameter of the saved optimizer: a group with stages 1 and 2, one of the engine's with stage 3.
    group: usize,
}

/// Source of the trained parameters and of the optimizer's states.
#[derive(Debug)]
enum States {
    Zero(Zero),
    Universal(Box<Universal>),
}

impl DeepSpeedFolder {
    /// Opens the folder of a step, see [`deepspeed_folder`].
    ///
    /// # Errors
    /// Fails with [`Error::Damaged`] for a file that is missing, truncated or inconsistent with the others, with
    /// [`Error::Unsupported`] for tensor parallelism, pipelines and experts, or with [`Error::Io`].
    pub fn open(folder: &Path) -> Result<Self, Error> {
        let files = Files::of(folder)?;
        let (states, paths, parameters, stage, ranks, model);
        let mut tied: Vec<(String, String)> = Vec::new();
        if files.is_universal {
            let universal = Universal::of(folder)?;
            // Stages 1 and 2 have a single file for the model.
            stage = universal.stage.unwrap_or_else(|| if files.whole.is_some() { 2 } else { 3 });
            paths = model_files(&files, stage, universal.partitions)?;
            model = ModelStates::open(&paths[0])?;
            let found = Universal::parameters(&model);
            parameters = found.map_err(|fault| fault.at(&paths[0]))?;
            ranks = universal.partitions.unwrap_or(paths.len() as u64);
            states = States::Universal(Box::new(universal));
        } else if let Some(whole) = Whole::open(&files)? {
            (stage, ranks, paths) = (0, 1, vec![whole.path]);
            (model, tied, parameters) = (whole.model, whole.tied, whole.parameters);
            states = States::Zero(whole.zero);
        } else {
            let all = zero::ranks(&files)?;
            (stage, ranks) = (all[0].stage, all[0].partitions);
            paths = model_files(&files, stage, Some(ranks))?;
            model = ModelStates::open(&paths[0])?;
            let found = Zero::of(all, &model);
            let (zero, found) = found.map_err(|fault| fault.at(&paths[0]))?;
            parameters = found;
            states = States::Zero(zero);
        }
        let mut weights = NamedWeights::default();
        let buffers: BTreeSet<&str> = model.buffers().into_iter().collect();
        for (name, tensor) in model.module().filter(|(name, _)| buffers.contains(name)) {
            weights.add(name, tensor.cast(Dtype::F32));
        }
        for (name, tensor) in frozen(&model, &paths)? {
            weights.add(&name, tensor);
        }
        for (index, parameter) in parameters.iter().enumerate() {
            let tensor = match &states {
                States::Zero(zero) => zero.weight(index, parameter)?,
                States::Universal(universal) => universal.weight(parameter)?,
            };
            weights.add(&parameter.name, tensor);
        }
        tied.extend(model.shared().map(|(name, other)| (name.to_owned(), other.to_owned())));
        weights.add_tied(&tied, &paths[0])?;
        // Stage 1 does not save frozen parameters separately, but the module has them. With stage 3 the module is
        // empty.
        let mut untrained = Vec::new();
        for (name, tensor) in model.module().filter(|_| stage < 3) {
            if weights.add(name, tensor) {
                untrained.push(name.to_owned());
            }
        }
        let missing = model.shared().filter(|(name, _)| !weights.places.contains_key(*name));
        let missing = missing.map(|(name, other)| {
            let (name, other) = (shown(name), shown(other));
            format!("`{name}`: it is `{other}`, which the checkpoint does not have")
        });
        let left_out = missing.collect();
        let weights = weights.all;
        if weights.is_empty() {
            let fact = "it holds no parameters".to_owned();
            return Err(Error::Damaged { path: folder.to_owned(), fact });
        }
        let (step, skipped_steps) = (model.step(), model.skipped_steps());
        let scheduler = model.scheduler();
        let folder = folder.to_owned();
        let run = Self {
            folder,
            stage,
            ranks,
            step,
            skipped_steps,
            weights,
            untrained,
            left_out,
            parameters,
            states,
            scheduler,
        };
        Ok(run)
    }

    /// Returns the path of the step's folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the ZeRO stage: 1, 2 or 3, and 0 for a run in fp16 without ZeRO.
    #[must_use]
    pub fn stage(&self) -> u64 {
        self.stage
    }

    /// Returns the number of ranks that the parameters were partitioned over.
    #[must_use]
    pub fn ranks(&self) -> u64 {
        self.ranks
    }

    /// Returns the number of steps of the engine, including those that were skipped. `None` if the files do not contain
    /// it.
    #[must_use]
    pub fn step(&self) -> Option<u64> {
        self.step
    }

    /// Returns the number of steps that the engine skipped because gradients of 16 bits had overflowed. `None` if the
    /// files do not contain it.
    #[must_use]
    pub fn skipped_steps(&self) -> Option<u64> {
        self.skipped_steps
    }

    /// Returns the full weights: trained parameters in the optimizer's 32 bits, floating-point buffers as 32-bit
    /// floats, frozen parameters and other buffers in their own type. A tied parameter is listed under all its names.
    #[must_use]
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// Returns the optimizer states of each trained parameter: for Adam `exp_avg` and `exp_avg_sq` in the shape of the
    /// parameter, and `step`. Parameters without states are left out.
    ///
    /// # Errors
    /// Fails with [`Error::Damaged`] if ranks have different states. For a universal checkpoint, also fails if its
    /// files cannot be read.
    pub fn moments(&self) -> Result<Moments, Error> {
        match &self.states {
            States::Zero(zero) => zero.moments(&self.parameters),
            States::Universal(universal) => universal.moments(&self.parameters),
        }
    }

    /// Returns the state of the whole optimizer in PyTorch's form, with parameter names.
    ///
    /// # Errors
    /// Returns the errors of [`DeepSpeedFolder::moments`], and [`Error::Unsupported`] if the parameter groups were not
    /// saved or do not match the weights.
    pub fn optimizer_state(&self) -> Result<Value<FileTensor>, Error> {
        let mut moments = self.moments()?;
        let groups = match &self.states {
            States::Zero(zero) => zero.head().groups.as_ref(),
            States::Universal(universal) => universal.groups.as_ref(),
        };
        let refuse =
            |fact: &str| Error::Unsupported { path: self.folder.clone(), fact: fact.to_owned() };
        let groups = groups.and_then(Value::as_items).ok_or_else(|| {
            refuse("its optimizer has no parameter groups in PyTorch's form; the weights can be read alone")
        })?;
        let mut by_group: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
        for parameter in &self.parameters {
            by_group.entry(parameter.group).or_default().push(&parameter.name);
        }
        let (mut states, mut made, mut number) = (Vec::new(), Vec::new(), 0i64);
        for group in groups {
            let own = group.get("params").and_then(Value::as_items).unwrap_or_default();
            let (mut numbers, mut names) = (Vec::new(), Vec::new());
            for index in own {
                let index = index.as_int().and_then(|index| usize::try_from(index).ok());
                for name in index.and_then(|index| by_group.remove(&index)).unwrap_or_default() {
                    if let Some(slots) = moments.remove(name) {
                        let slots = slots.into_iter().map(|(slot, it)| (slot, Value::Tensor(it)));
                        states.push((Value::Int(number), Value::dict(slots)));
                    }
                    numbers.push(Value::Int(number));
                    names.push(Value::Str(name.to_owned()));
                    number += 1;
                }
            }
            let kept = group.as_dict().unwrap_or_default().iter();
            let kept = kept.filter(|(key, _)| key.as_str().is_none_or(|key| !OWN.contains(&key)));
            let mut entries = kept.cloned().collect::<Vec<_>>();
            entries.push((Value::Str("params".into()), Value::List(numbers)));
            entries.push((Value::Str("param_names".into()), Value::List(names)));
            made.push(Value::Dict(entries));
        }
        if !by_group.is_empty() {
            return Err(refuse("the parameter groups of its optimizer do not have all parameters"));
        }
        Ok(Value::dict([("state", Value::Dict(states)), ("param_groups", Value::List(made))]))
    }

    /// Returns the state of the scheduler. `None` unless it is a dictionary.
    pub(crate) fn scheduler(&self) -> Option<&Value<FileTensor>> {
        self.scheduler.as_ref()
    }

    /// Returns the attributes of the loss scaler. `None` if the files do not contain it.
    pub(crate) fn scaler(&self) -> Option<&Value<FileTensor>> {
        match &self.states {
            States::Zero(zero) => zero.head().scaler.as_ref(),
            States::Universal(universal) => universal.scaler.as_ref(),
        }
    }

    /// Returns the tied parameters that were not saved, one message each.
    pub(crate) fn left_out(&self) -> &[String] {
        &self.left_out
    }

    /// Returns a line that names the weights not taken from the optimizer.
    pub(crate) fn read_beside(&self) -> Option<String> {
        let names = self.untrained.iter().take(MAX_SHOWN);
        let names: Vec<String> = names.map(|name| format!("`{}`", shown(name))).collect();
        let more = match self.untrained.len().saturating_sub(MAX_SHOWN) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        (!names.is_empty()).then(|| {
            let names = names.join(", ");
            format!("{names}{more} from the model's states, in the type that the run trained with")
        })
    }

    /// Returns one state of the optimizer, such as `exp_avg`, as tensors under the names of the parameters.
    pub(crate) fn slot(&self, slot: &str) -> Result<Weights, Error> {
        let moments = self.moments()?;
        let mut keys: BTreeSet<String> = BTreeSet::new();
        for slots in moments.values() {
            if slots.len() > keys.len() {
                keys.extend(slots.keys().cloned());
            }
        }
        let own = moments.into_iter();
        let found: Weights =
            own.filter_map(|(name, mut slots)| Some((name, slots.remove(slot)?))).collect();
        if found.is_empty() {
            let (path, key) = (self.folder.clone(), slot.to_owned());
            return Err(Error::NoSuchKey { path, key, keys: keys.into_iter().collect() });
        }
        Ok(found)
    }
}

/// Describes the checkpoint in one line.
impl fmt::Display for DeepSpeedFolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match &self.states {
            States::Zero(_) => "a checkpoint",
            States::Universal(_) => "a universal checkpoint",
        };
        let ranks = counted(self.ranks, "rank");
        write!(f, "{kind} of DeepSpeed: stage {}, {ranks}", self.stage)?;
        if let Some(step) = self.step {
            write!(f, ", step {step}")?;
        }
        write!(f, ", {}", counted(self.weights.len(), "tensor"))
    }
}

/// Weights with unique names.
#[derive(Default)]
struct NamedWeights {
    all: Weights,
    places: HashMap<String, usize>,
}

impl NamedWeights {
    /// Adds a tensor unless its name is taken. Returns `true` if it was added.
    fn add(&mut self, name: &str, tensor: FileTensor) -> bool {
        let is_new = !self.places.contains_key(name);
        if is_new {
            self.places.insert(name.to_owned(), self.all.len());
            self.all.push((name.to_owned(), tensor));
        }
        is_new
    }

    /// Adds tied parameters under their other names, where the shared tensor is known.
    fn add_tied(&mut self, tied: &[(String, String)], path: &Path) -> Result<(), Error> {
        let size = |tensor: &FileTensor| tensor.info().bytes().unwrap_or_default();
        let own = self.all.iter().map(|(_, it)| size(it)).fold(0u64, u64::saturating_add);
        let mut left = own.saturating_mul(MAX_COPIES).saturating_add(FREE_BYTES);
        for (name, other) in tied {
            let Some(&place) = self.places.get(other) else { continue };
            let tensor = self.all[place].1.clone();
            left = left.checked_sub(size(&tensor)).ok_or_else(|| Error::Unsupported {
                path: path.to_owned(),
                fact: format!("its tied parameters would take over {MAX_COPIES} times the others"),
            })?;
            self.add(name, tensor);
        }
        Ok(())
    }
}

/// Returns the files of the model's states: one with stages 1 and 2, one per rank with stage 3.
fn model_files(files: &Files, stage: u64, ranks: Option<u64>) -> Result<Vec<PathBuf>, Error> {
    if stage < 3 {
        let name = "mp_rank_00_model_states.pt";
        let path = files.whole.clone();
        let path = path.ok_or_else(|| files.missing(name, "it has the names of the parameters"))?;
        return Ok(vec![path]);
    }
    let ranks = ranks.unwrap_or(files.models.len() as u64).max(1);
    let path = |rank: u64| {
        files.models.get(&rank).cloned().ok_or_else(|| {
            let name = format!("zero_pp_rank_{rank}_mp_rank_00_model_states.pt");
            files.missing(&name, &format!("the run had {}", counted(ranks, "rank")))
        })
    };
    (0..ranks).map(path).collect()
}

/// Returns the frozen parameters: whole with stages 1 and 2, joined from the ranks' parts with stage 3. `model` is the
/// first of `paths`.
fn frozen(model: &ModelStates, paths: &[PathBuf]) -> Result<Weights, Error> {
    let shapes = model.frozen().map_err(|fault| fault.at(&paths[0]))?;
    if shapes.is_empty() {
        return Ok(Weights::new());
    }
    let fragments_of = |path: &PathBuf, model: &ModelStates| -> Result<Vec<Flat>, Error> {
        let fragment =
            |name: &str| model.fragment(name).map_err(|fault| fault.about(&shown(name)).at(path));
        shapes.iter().map(|shape| fragment(&shape.name)).collect()
    };
    let mut ranks = vec![fragments_of(&paths[0], model)?];
    for path in &paths[1..] {
        // Closed at once: there may be more ranks than the limit of open files.
        ranks.push(fragments_of(path, &ModelStates::open(path)?)?);
    }
    let mut weights = Weights::new();
    for (index, shape) in shapes.iter().enumerate() {
        let chain = Chain::of(ranks.iter().map(|fragments| fragments[index].elements));
        let damaged = |fact: String| Error::Damaged {
            path: paths[0].clone(),
            fact: format!("`{}`: {fact}", shown(&shape.name)),
        };
        let cut = chain.cut(0, shape.elements).ok_or_else(|| {
            damaged(format!("it has {} elements, the ranks have {}", shape.elements, chain.len()))
        })?;
        let piece = |(rank, first, count)| Piece { rank, vector: 0, first, count };
        let pieces: Vec<Piece> = cut.into_iter().map(piece).collect();
        let tensor = joined(&shape.shape, &pieces, |piece| Ok(&ranks[piece.rank][index]));
        weights.push((shape.name.clone(), tensor.map_err(damaged)?));
    }
    Ok(weights)
}

/// Returns the weights with 16-bit floats widened to 32 bits, as an optimizer has them.
pub(crate) fn in_32_bits(weights: &Weights) -> Weights {
    let wide = |tensor: &FileTensor| match tensor.info().dtype {
        Dtype::F16 | Dtype::BF16 => tensor.clone().cast(Dtype::F32),
        _ => tensor.clone(),
    };
    weights.iter().map(|(name, tensor)| (name.clone(), wide(tensor))).collect()
}

/// Keys of a parameter group that name its parameters.
const OWN: [&str; 2] = ["params", "param_names"];
const MAX_SHOWN: usize = 5;
/// Maximum total size of tied copies, as a multiple of the stored weights.
const MAX_COPIES: u64 = 16;
/// Bytes allowed in addition, so that small checkpoints always pass.
const FREE_BYTES: u64 = 1 << 20;
