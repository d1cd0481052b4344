//! Conversion of foreign states into a checkpoint for a Brigade program, guided by a checkpoint that the program itself
//! has saved.
//!
//! PyTorch numbers an optimizer's parameters and Brigade names them, and a Brigade program has loaders and objects that
//! no PyTorch file contains: the checkpoint `like` supplies all of that.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::path::Path;

use brigade_rank_env::text::counted;

use super::foreign::{self, Foreign, State};
use super::weights::of_object;
use super::{FileTensor, Report, Weights, must_be_free, read, scaler, scheduler, tied};
use crate::error::Error;
use crate::file_name::FileName;
use crate::format::write_safetensors;
use crate::layout::{
    Checkpoint, ChecksumWriter, FileFacts, MANIFEST, Manifest, Object, Placement, Staging,
};
use crate::pth::{TensorData, shown};
use crate::value::Value;
use crate::wrapper_prefix::prefixes_around;
use crate::{shards, torch_optimizer};

/// Kinds of states in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum StateKind {
    /// Weights of a model.
    Model,
    /// State of an optimizer.
    Optimizer,
    /// Position of a learning rate schedule.
    Scheduler,
    /// State of a gradient scaler.
    Scaler,
    /// Position of a data loader.
    Loader,
    /// States of the random generators.
    Random,
    /// Custom objects of the program, and communication hooks.
    Custom,
    /// Files that the program has written into the checkpoint.
    Files,
}

impl StateKind {
    /// All kinds, in the order of declaration.
    pub const ALL: [Self; 8] = [
        Self::Model,
        Self::Optimizer,
        Self::Scheduler,
        Self::Scaler,
        Self::Loader,
        Self::Random,
        Self::Custom,
        Self::Files,
    ];

    /// Returns the name of the kind on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Optimizer => "optimizer",
            Self::Scheduler => "scheduler",
            Self::Scaler => "scaler",
            Self::Loader => "loader",
            Self::Random => "random",
            Self::Custom => "custom",
            Self::Files => "files",
        }
    }
}

/// Converts a PyTorch run's states into a checkpoint for the program that has saved `like`.
///
/// `from` is a folder of Accelerate's `save_state`, of Hugging Face's Trainer, of DeepSpeed or of
/// `torch.distributed.checkpoint`, or a dictionary that `torch.save` or Lightning has written. States of the kinds in
/// `keep` are taken from `like` if `from` lacks them. `to` must not exist. It appears complete, or not at all after an
/// error.
///
/// # Errors
/// Fails with [`Error::MissingStates`] if `from` lacks a state of a kind that is not in `keep`, with [`Error::Unlike`]
/// if the two do not fit together, with [`Error::Occupied`] if `to` exists, with [`Error::Io`], or with an error about
/// the files.
pub fn convert_like(
    from: &Path,
    to: &Path,
    like: &Path,
    keep: &[StateKind],
) -> Result<Report, Error> {
    must_be_free(to)?;
    if from.join(MANIFEST).is_file() {
        return Err(Error::Unsupported {
            path: from.to_owned(),
            fact: "it is a checkpoint of Brigade's already".into(),
        });
    }
    let checkpoint = Checkpoint::open(like)?;
    if let Some(fault) = checkpoint.verify().into_iter().next() {
        return Err(fault);
    }
    let foreign = foreign::read(from)?;
    let unlike = |fact: String| Error::Unlike { path: from.into(), like: like.into(), fact };
    let staging = Staging::create(to, &format!("{}-convert", std::process::id()))?;
    let mut made = Made {
        like: &checkpoint,
        folder: staging.path(),
        files: BTreeMap::new(),
        objects: Vec::new(),
        report: Report { left_out: foreign.left_out.clone(), ..Report::default() },
        steps: 0,
        keep,
        missing: BTreeMap::new(),
    };
    made.all(&foreign, &unlike)?;
    if !made.missing.is_empty() {
        let kinds = keep.iter().copied().chain(made.missing.keys().copied());
        let kinds: BTreeSet<&str> = kinds.map(StateKind::name).collect();
        return Err(Error::MissingStates {
            path: from.to_owned(),
            like: like.to_owned(),
            states: made.missing.into_values().flatten().collect::<Vec<_>>().join("; "),
            kinds: kinds.into_iter().collect::<Vec<_>>().join(","),
        });
    }
    let Made { files, objects, mut report, steps, .. } = made;
    let manifest = Manifest {
        step: steps,
        objects,
        files,
        made_by: concat!("brigade ", env!("CARGO_PKG_VERSION"), " checkpoint convert").into(),
        ..checkpoint.manifest().clone()
    };
    staging.commit(&manifest, true)?;
    report.written.push(to.to_owned());
    Ok(report)
}

struct Made<'a> {
    like: &'a Checkpoint,
    folder: &'a Path,
    files: BTreeMap<FileName, FileFacts>,
    objects: Vec<Object>,
    report: Report,
    steps: u64,
    keep: &'a [StateKind],
    /// States that `from` lacks and `keep` does not allow to take from `like`.
    missing: BTreeMap<StateKind, Vec<String>>,
}

impl Made<'_> {
    fn all(&mut self, foreign: &Foreign, unlike: &dyn Fn(String) -> Error) -> Result<(), Error> {
        let like = self.like;
        let (mut models, mut optimizers) = (foreign.models.iter(), foreign.optimizers.iter());
        let (mut schedulers, mut scaler) = (foreign.schedulers.iter(), foreign.scaler.iter());
        for object in &like.manifest().objects {
            let name = &object.name;
            match object.kind.as_str() {
                "model" => match models.next() {
                    Some(part) => {
                        let ours = of_object(like, object)?;
                        let Taken { weights, prefix, tied, others } =
                            take_own(name, &ours, &part.value)?;
                        if !prefix.is_empty() {
                            self.report.changed.push(format!(
                                "{name}: the names of {} without `{prefix}`",
                                part.name
                            ));
                        }
                        self.report.changed.extend(tied);
                        let others = others.iter().map(|other| {
                            let (from, other) = (&part.name, shown(other));
                            format!("{from}: `{other}`: its name does not begin with `{prefix}`")
                        });
                        self.report.left_out.extend(others);
                        let weights = fitting(&ours, &weights)
                            .map_err(|fact| unlike(format!("{}: {fact}", part.name)))?;
                        self.tensors(object, &weights, None)?;
                    }
                    None => self.keep(StateKind::Model, object, "there is no model for it")?,
                },
                "optimizer" => match optimizers.next() {
                    Some(State { name: from, value }) => {
                        let ours = read(like, object)?;
                        let (state, steps) = torch_optimizer::from_torch(value, &ours)
                            .map_err(|fact| unlike(format!("{from}: {fact}")))?;
                        let (state, steps) = match &foreign.steps {
                            Some(told) if steps == 0 && told.value > 0 => {
                                self.report.changed.push(format!(
                                    "{name}: {} steps, taken from {}: {from} has no count of steps",
                                    told.value, told.name
                                ));
                                (with_steps(state, told.value), told.value)
                            }
                            _ => (state, steps),
                        };
                        if steps == 0 {
                            self.report.changed.push(format!(
                                "{name}: its count of steps, which {from} does not have; it begins at 0"
                            ));
                        }
                        self.steps = self.steps.max(steps);
                        self.state(object, state)?;
                    }
                    None => {
                        let steps = read(like, object)?.get("steps").and_then(Value::as_int);
                        let steps = steps.and_then(|steps| u64::try_from(steps).ok());
                        self.steps = self.steps.max(steps.unwrap_or_default());
                        self.keep(StateKind::Optimizer, object, "there is no optimizer for it")?;
                    }
                },
                "scheduler" => match schedulers.next() {
                    Some(State { name: from, value }) => {
                        let (state, others) = scheduler::from_torch(value, &read(like, object)?)
                            .map_err(|fact| unlike(format!("{from}: {fact}")))?;
                        let (state, changed) = if self.counts_as_theirs(object)? {
                            (state, None)
                        } else {
                            scheduler::in_our_steps(state, foreign, like.manifest().step > 0)
                        };
                        self.report.changed.extend(changed.map(|fact| format!("{name}: {fact}")));
                        if !others.is_empty() {
                            self.report.left_out.push(format!(
                                "{from}: {}, which the program sets itself",
                                others.join(", ")
                            ));
                        }
                        self.state(object, state)?;
                    }
                    None => {
                        self.keep(StateKind::Scheduler, object, "there is no schedule for it")?;
                    }
                },
                "scaler" => match scaler.next() {
                    Some(State { name: from, value }) => {
                        let state = scaler::from_torch(value).ok_or_else(|| {
                            unlike(format!("{from} is not the state of a gradient scaler"))
                        })?;
                        self.state(object, state)?;
                    }
                    None => self.keep(StateKind::Scaler, object, "there is no scaler for it")?,
                },
                "rank" => self.rank(object, foreign, unlike)?,
                "run" => {
                    let position =
                        read(like, object)?.get("accumulation_position").and_then(Value::as_int);
                    if position != Some(0) {
                        return Err(unlike(
                            "the checkpoint was saved within an accumulation window: save one before \
                             the loop"
                                .into(),
                        ));
                    }
                    self.copy(object)?;
                }
                "loader" => {
                    self.keep(
                        StateKind::Loader,
                        object,
                        "the position in the data; skip_first_batches moves it",
                    )?;
                }
                _ => self.keep(StateKind::Custom, object, "an object defined by the program")?,
            }
        }
        if let Some(told) = foreign.steps.as_ref().filter(|told| told.value != self.steps) {
            self.report.left_out.push(format!(
                "{}: {} steps, where the optimizer has counted {}",
                told.name, told.value, self.steps
            ));
        }
        let left = models.map(|part| &part.name).chain(optimizers.map(|part| &part.name));
        let left =
            left.chain(schedulers.map(|part| &part.name)).chain(scaler.map(|part| &part.name));
        for name in left {
            self.report
                .left_out
                .push(format!("{name}: {} has no object for it", like.folder().display()));
        }
        let ranks = like.manifest().world_size;
        for (_, part) in foreign.random.range(ranks..) {
            self.report.left_out.push(format!(
                "{}: {} is of {}",
                part.name,
                like.folder().display(),
                counted(ranks, "rank")
            ));
        }
        // Files written by the program's hooks.
        let others = like.manifest().files.keys();
        let others: Vec<&FileName> = others
            .filter(|file| !like.manifest().objects.iter().any(|o| o.files().any(|f| f == *file)))
            .collect();
        for file in others {
            self.file(file)?;
            self.kept(StateKind::Files, format!("{file}: a file written by the program"));
        }
        Ok(())
    }

    /// Returns `true` if the program steps this schedule once per process, as Accelerate does. Only visible in a
    /// checkpoint saved after the first step.
    fn counts_as_theirs(&self, scheduler: &Object) -> Result<bool, Error> {
        let Manifest { step, world_size, .. } = *self.like.manifest();
        let position = read(self.like, scheduler)?.get("position").and_then(Value::as_int);
        let theirs = step.checked_mul(world_size as u64).map(u64::cast_signed);
        Ok(step > 0 && world_size > 1 && position == theirs)
    }

    /// Converts the random states of a rank.
    fn rank(
        &mut self,
        object: &Object,
        foreign: &Foreign,
        unlike: &dyn Fn(String) -> Error,
    ) -> Result<(), Error> {
        let rank = object.name.strip_prefix("rank_").and_then(|rank| rank.parse::<usize>().ok());
        let Some(State { name: from, value: theirs }) =
            rank.and_then(|rank| foreign.random.get(&rank))
        else {
            return self.keep(StateKind::Random, object, "there are no random states for it");
        };
        let bytes =
            |tensor: Option<&Value<FileTensor>>| -> Result<Option<Value<FileTensor>>, Error> {
                let Some(tensor) = tensor.and_then(Value::as_tensor) else { return Ok(None) };
                let bytes = tensor.read().map_err(|error| unlike(format!("{from}: {error}")))?;
                Ok(Some(Value::Bytes(bytes)))
            };
        let ours = read(self.like, object)?;
        let (mut random, mut kept) = (Vec::new(), Vec::new());
        let theirs_of = |key: &str| theirs.get(key);
        for (key, value) in ours.get("random").and_then(Value::as_dict).unwrap_or_default() {
            let taken = match key.as_str() {
                Some("cpu") => bytes(theirs_of("torch_manual_seed"))?,
                Some("cuda") => {
                    let all = theirs_of("torch_cuda_manual_seed").and_then(Value::as_items);
                    // A process drives one device: the one with its local rank, or the only visible one.
                    let own = rank.unwrap_or_default().checked_rem(all.map_or(0, <[_]>::len));
                    bytes(own.and_then(|own| all?.get(own)))?
                }
                _ => None,
            };
            if taken.is_none() {
                kept.push(key.as_str().unwrap_or("a device").to_owned());
            }
            random.push((key.clone(), taken.unwrap_or_else(|| value.clone())));
        }
        let foreign_only = theirs.as_dict().unwrap_or_default().iter();
        let foreign_only = foreign_only.filter_map(|(key, _)| key.as_str());
        let lost: Vec<&str> = foreign_only
            .filter(|key| !["torch_manual_seed", "torch_cuda_manual_seed"].contains(key))
            .collect();
        if !lost.is_empty() {
            self.report
                .left_out
                .push(format!("{from}: {}, which Brigade does not use", lost.join(", ")));
        }
        if !kept.is_empty() {
            let kept = kept.join(", ");
            self.kept(StateKind::Random, format!("{}: {from} has none for {kept}", object.name));
        }
        if ours.get("own").and_then(Value::as_dict).is_some_and(|own| !own.is_empty()) {
            self.kept(StateKind::Custom, format!("{}: its communication hook", object.name));
        }
        let Value::Dict(entries) = ours else {
            return self.keep(StateKind::Random, object, "it has no random states");
        };
        let entries = entries.into_iter().map(|(key, value)| match key.as_str() {
            Some("random") => (key, Value::Dict(random.clone())),
            _ => (key, value),
        });
        self.state(object, Value::Dict(entries.collect()))
    }

    /// Writes an object with a new state.
    fn state(&mut self, object: &Object, state: Value<FileTensor>) -> Result<(), Error> {
        let mut tensors: Weights = Vec::new();
        let tree = state.try_map(&mut |place, tensor| {
            tensors.push((place.to_owned(), tensor));
            Ok::<_, Error>(place.to_owned())
        })?;
        self.tensors(object, &tensors, Some(tree))
    }

    fn tensors(
        &mut self,
        object: &Object,
        tensors: &Weights,
        tree: Option<Value<String>>,
    ) -> Result<(), Error> {
        let mut made = Object::new(object.kind.clone(), object.name.clone());
        if let Some(tree) = tree {
            let file = made.name.json();
            let mut out = ChecksumWriter::create(self.folder.join(&file))?;
            out.put(format!("{:#}\n", tree.to_json()).as_bytes())?;
            self.files.insert(file.clone(), out.finish(true)?);
            made.state = Some(file);
        }
        if !tensors.is_empty() {
            let file = shards::file_name(&made.name, 0, 1);
            let facts = write_safetensors(&self.folder.join(&file), tensors)?;
            self.files.insert(file.clone(), facts);
            let infos = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.info()));
            let placements: &[Placement] = match object.kind.as_str() {
                "rank" => &[],
                _ => &vec![Placement::Replicate; self.like.manifest().mesh.len()],
            };
            made.add_file(&file, infos, placements);
        }
        self.objects.push(made);
        Ok(())
    }

    fn keep(&mut self, kind: StateKind, object: &Object, why: &str) -> Result<(), Error> {
        self.kept(kind, format!("{}: {why}", object.name));
        self.copy(object)
    }

    /// Reports a state taken from `like`, or records it as missing if `keep` does not allow that.
    fn kept(&mut self, kind: StateKind, line: String) {
        if self.keep.contains(&kind) {
            self.report.kept.push(line);
        } else {
            self.missing.entry(kind).or_default().push(line);
        }
    }

    fn copy(&mut self, object: &Object) -> Result<(), Error> {
        object.files().try_for_each(|file| self.file(file))?;
        self.objects.push(object.clone());
        Ok(())
    }

    fn file(&mut self, name: &FileName) -> Result<(), Error> {
        let to = self.folder.join(name);
        fs::copy(self.like.folder().join(name), &to).map_err(Error::io("write", &to))?;
        self.files.insert(name.clone(), FileFacts::of(&to, true)?);
        Ok(())
    }
}

/// Foreign weights under the names of `ours`.
struct Taken {
    weights: Weights,
    /// Prefix removed from the names.
    prefix: String,
    /// One message per tensor that has another name, too.
    tied: Vec<String>,
    /// Names that lack the prefix.
    others: Vec<String>,
}

/// Removes the prefix with which the whole model fits, or else one with which part of it fits. Removes none if the
/// names fit as they are.
fn take_own(object: &str, ours: &Weights, theirs: &Weights) -> Result<Taken, Error> {
    let own: Vec<&str> = ours.iter().map(|(name, _)| name.as_str()).collect();
    let names: Vec<&str> = theirs.iter().map(|(name, _)| name.as_str()).collect();
    let is_own: HashSet<&str> = own.iter().copied().collect();
    let mut part = None;
    for prefix in std::iter::once(String::new()).chain(prefixes_around(&names, &own)) {
        let mut rests = names.iter().filter_map(|name| name.strip_prefix(&prefix));
        if !rests.all(|rest| rest.is_empty() || is_own.contains(rest)) {
            continue;
        }
        let (mut weights, mut others) = (Vec::new(), Vec::new());
        for (name, tensor) in theirs {
            match name.strip_prefix(&prefix).filter(|rest| !rest.is_empty()) {
                Some(rest) => weights.push((rest.to_owned(), tensor.clone())),
                None => others.push(name.clone()),
            }
        }
        let tied = tied::fill(object, ours, &mut weights)?;
        let is_whole = weights.len() == ours.len();
        let taken = Taken { weights, prefix, tied, others };
        if is_whole {
            return Ok(taken);
        }
        part.get_or_insert(taken);
    }
    Ok(part.unwrap_or_else(|| Taken {
        weights: theirs.clone(),
        prefix: String::new(),
        tied: Vec::new(),
        others: Vec::new(),
    }))
}

fn with_steps(state: Value<FileTensor>, steps: u64) -> Value<FileTensor> {
    let Value::Dict(entries) = state else { return state };
    let entries = entries.into_iter().map(|(key, value)| match key.as_str() {
        Some("steps") => (key, Value::Int(steps.cast_signed())),
        _ => (key, value),
    });
    Value::Dict(entries.collect())
}

/// Returns foreign weights in the order of `ours`. Fails unless names, shapes and data types agree.
fn fitting(ours: &Weights, theirs: &Weights) -> Result<Weights, String> {
    let found = |name: &str| theirs.iter().find(|(known, _)| known == name);
    if let Some((name, _)) =
        theirs.iter().find(|(name, _)| !ours.iter().any(|(own, _)| own == name))
    {
        return Err(format!("the program's model has no `{name}`"));
    }
    let fit = ours.iter().map(|(name, tensor)| {
        let (_, value) = found(name).ok_or_else(|| format!("it lacks `{name}`"))?;
        let (own, info) = (tensor.info(), value.info());
        if own == info {
            Ok((name.clone(), value.clone()))
        } else {
            Err(format!("its `{name}` is {info}, but the program's is {own}"))
        }
    });
    fit.collect()
}
