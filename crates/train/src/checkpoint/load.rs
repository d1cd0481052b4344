//! A load: everything is validated, then everything is changed.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use brigade_checkpoint::layout::{self, Checkpoint, MeshAxis, Object, StoredTensor};
use brigade_checkpoint::{Error as FileError, Region, TensorInfo, Value};
use brigade_torch::{Error, Result, TensorFile, TorchError, dtype_of, loaded_kind};
use parking_lot::Mutex;
use tch::{Device, Tensor};

use super::capture::{DATA_RANKS, shares_of};
use super::inner::{Inner, data_ranks};
use super::ranks::{self, Named};
use super::stages::Shares;
use crate::error::TrainError;
use crate::registry::{Checkpointed, Kind, ModelTensor, Worlds};
use crate::sharding::Part;
use crate::stateful::same_shape;

const SCOPE: &str = "load_state";

/// Options of a load with [`crate::Checkpoints::load_with`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct LoadOptions {
    verify: bool,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { verify: true }
    }
}

impl LoadOptions {
    /// Sets whether checksums are compared before anything is loaded. Defaults to `true`. Sizes and headers are always
    /// compared.
    pub fn verify(mut self, verify: bool) -> Self {
        self.verify = verify;
        self
    }
}

/// Description of a checkpoint that was loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded {
    /// Path of the checkpoint folder.
    pub path: PathBuf,
    /// Number of optimizer steps that the run had taken.
    pub step: u64,
    /// Number of samples that all ranks of the run together had trained on.
    pub samples: u64,
    /// World size of the run.
    pub world_size: usize,
    /// Reason why the last digits will differ from those of the saved run: a different number of threads, different CPU
    /// instructions or a different libtorch, each of which changes the order of sums. `None` if the run continues bit
    /// for bit, or if this cannot be determined: on a GPU, or with a different number of ranks.
    pub rounding_differs: Option<String>,
}

pub(super) fn load(inner: &Inner, path: Option<&Path>, options: LoadOptions) -> Result<Loaded> {
    inner.wait()?;
    let path = match path {
        Some(path) => path.to_owned(),
        None => newest(inner)?,
    };
    let objects = inner.registry.named();
    let shares = match &inner.pipeline {
        Some(pipeline) => Some(shares_of(inner, pipeline, &objects)?),
        None => None,
    };
    let ready = Ready::validate(inner, &path, options, objects, shares.as_ref());
    let (ready, crc32) = match ready {
        Ok(ready) => {
            let crc32 = ready.checkpoint.manifest().crc32.clone();
            (Some(ready), Ok(crc32))
        }
        Err(error) => (None, Err(error)),
    };
    let seen = inner.processes.agree(SCOPE, crc32)?;
    if let Some(rank) = seen.iter().position(|crc32| *crc32 != seen[0]) {
        return Err(Error::invalid_argument(format!(
            "{SCOPE}: rank {rank} sees another checkpoint under {} than rank 0; it must lie in a \
             folder that all hosts share, or be the same on all",
            path.display()
        )));
    }
    let Some(ready) = ready else {
        return Err(
            TorchError::Internal("load_state: the checkpoint was not validated".into()).into()
        );
    };
    inner.processes.agree(SCOPE, inner.load_hooks.call(&path))?;
    let manifest = ready.checkpoint.manifest();
    let mut loaded = Loaded {
        step: manifest.step,
        samples: manifest.samples,
        world_size: manifest.world_size,
        path,
        rounding_differs: None,
    };
    let restored = ready.restore(inner).map(|differs| loaded.rounding_differs = differs);
    inner.processes.agree(SCOPE, restored)?;
    Ok(loaded)
}

fn newest(checkpoints: &Inner) -> Result<PathBuf> {
    let found = if checkpoints.processes.is_main_process() {
        let folder = checkpoints.project.checkpoints();
        folder.and_then(|folder| Ok(Some(layout::latest(&folder)?)))
    } else {
        Ok(None)
    };
    let found = checkpoints.processes.agree(SCOPE, found)?.into_iter().next().flatten();
    Ok(found.ok_or_else(|| TorchError::Internal("load_state: rank 0 sent no path".into()))?)
}

/// A checkpoint that was validated for the program. Nothing has been changed yet.
struct Ready {
    checkpoint: Checkpoint,
    objects: Vec<Named>,
    worlds: Worlds,
    /// Tensors to be read directly from the files.
    tensors: Vec<(Tensor, Wanted)>,
    states: Vec<(Arc<dyn Checkpointed>, Value<Wanted>)>,
    /// State of this rank, or, with another number of ranks, the states of all ranks of the saved run.
    ranks: Vec<Value<Wanted>>,
    position: usize,
}

impl Ready {
    /// Checks the whole checkpoint and changes nothing. `shares` are the shares of a pipeline's ranks in the objects.
    fn validate(
        checkpoints: &Inner,
        path: &Path,
        options: LoadOptions,
        objects: Vec<Named>,
        shares: Option<&Shares>,
    ) -> Result<Self> {
        let checkpoint = Checkpoint::open(path)?;
        let (rank, ranks) =
            (checkpoints.processes.process_index(), checkpoints.processes.num_processes());
        if options.verify
            && let Some(fault) = checkpoint.verify_part(rank, ranks).into_iter().next()
        {
            return Err(fault.into());
        }
        let mismatch =
            |reason: String| TrainError::CheckpointMismatch { path: path.to_owned(), reason };
        for kind in [
            Kind::Model,
            Kind::Optimizer,
            Kind::Scheduler,
            Kind::Scaler,
            Kind::Loader,
            Kind::Custom,
        ] {
            let here = objects.iter().filter(|(_, object)| object.kind() == kind).count();
            let there = count_kinds(&checkpoint, kind.name());
            if here != there {
                return Err(mismatch(format!(
                    "it has {there} of kind {}, this program has prepared {here}: prepare the same \
                     objects, in the same order, before load_state",
                    kind.name()
                ))
                .into());
            }
        }

        let manifest = checkpoint.manifest();
        let find = |name: &str| {
            let found = manifest.objects.iter().find(|object| *object.name == *name);
            found.ok_or_else(|| mismatch(format!("it has no `{name}`")))
        };
        let (mut tensors, mut states) = (Vec::new(), Vec::new());
        for (name, object) in &objects {
            let saved = find(name)?;
            let about = |reason: String| mismatch(format!("{name}: {reason}"));
            let parts = checkpoints.registry.parts_of(&**object);
            match object.tensors() {
                Some(model) => {
                    let mut stored = checkpoint.stored(saved)?;
                    for parameter in model {
                        let found = stored.remove(&parameter.name);
                        let found =
                            found.ok_or_else(|| about(format!("it lacks `{}`", parameter.name)))?;
                        let part = parts.get(&parameter.name);
                        let wanted =
                            Wanted::of_parameter(&parameter, part, found).map_err(about)?;
                        tensors.push((parameter.tensor, wanted));
                    }
                    let is_elsewhere =
                        |tensor: &String| shares.is_some_and(|it| it.has(name, tensor));
                    if let Some(name) = stored.into_keys().filter(|it| !is_elsewhere(it)).min() {
                        return Err(about(format!("it has `{name}`, which the model lacks")).into());
                    }
                }
                None => {
                    let mut state = placed(&checkpoint, saved, &parts)?;
                    if let Some(shares) = shares {
                        state = shares.of_rank(object, name, state)?;
                    }
                    let infos =
                        state.clone().try_map(&mut |_, wanted| Ok::<_, Error>(wanted.info()))?;
                    object.check_state_dict(&infos).map_err(about)?;
                    states.push((Arc::clone(object), state));
                }
            }
        }
        let mesh = checkpoints.mesh();
        // The manifest's world size is an upper limit: reading ends at the first rank whose state is missing.
        let saved = manifest.world_size;
        let wanted = if saved == ranks { rank..rank + 1 } else { 0..saved };
        let sharded = mesh.is_some() || manifest.mesh.iter().any(|axis| axis.name != "data");
        let differs = sharded && mesh.as_ref().is_none_or(|mesh| *mesh != manifest.mesh);
        let mut own = Vec::new();
        for rank in wanted {
            let state = placed(&checkpoint, find(&format!("rank_{rank}"))?, &HashMap::new())?;
            let gradients = state.get("gradients").and_then(Value::as_dict);
            if differs && gradients.is_some_and(|gradients| !gradients.is_empty()) {
                return Err(mismatch(format!(
                    "it was saved within a window of accumulation on {}, whose gradients are spread over those ranks: go on \
                     with the same ranks and strategy, or load one that was saved after a step",
                    mesh_text(&manifest.mesh)
                ))
                .into());
            }
            for (parameter, wanted) in ranks::gradients(&state, &objects).map_err(mismatch)? {
                same_shape("a gradient", &parameter, &wanted.info()).map_err(mismatch)?;
            }
            let infos = state.clone().try_map(&mut |_, wanted| Ok::<_, Error>(wanted.info()))?;
            ranks::check_hooks(&infos, &objects).map_err(mismatch)?;
            own.push(state);
        }
        let run = placed(&checkpoint, find("run")?, &HashMap::new())?;
        let noted = run.get(DATA_RANKS).and_then(Value::as_int);
        let noted = noted.and_then(|ranks| usize::try_from(ranks).ok());
        let worlds = Worlds {
            saved: noted
                .filter(|ranks| (1..=manifest.world_size).contains(ranks))
                .unwrap_or_else(|| data_ranks(manifest.world_size, &manifest.mesh)),
            current: checkpoints.data_ranks,
        };
        let position = run.get("accumulation_position").and_then(Value::as_int);
        let position = position.and_then(|position| usize::try_from(position).ok());
        let position = position
            .filter(|&position| position == 0 || position < checkpoints.accumulator.steps())
            .ok_or_else(|| {
                mismatch(format!(
                    "it was saved after {position:?} batches of an accumulation window, which has {} \
                     batches here",
                    checkpoints.accumulator.steps()
                ))
            })?;
        Ok(Self { objects, worlds, tensors, states, ranks: own, position, checkpoint })
    }

    /// Restores in an order that puts the steps that can fail first: files that cannot be read, then custom objects,
    /// which are rolled back if one fails. Models and existing optimizer states come last and are read directly from
    /// the files, where only the disk can fail. Returns the reason why the run does not continue bit for bit, if there
    /// is one.
    fn restore(self, checkpoints: &Inner) -> Result<Option<String>> {
        let mut files = Files::new(&self.checkpoint);
        let mut in_place = self.tensors;
        let mut states = Vec::new();
        for (object, state) in self.states {
            let state = if object.kind() == Kind::Optimizer {
                files.read_beside(state, &object.state_dict()?, &mut in_place)?
            } else {
                files.read_all(state)?
            };
            states.push((object, state));
        }
        for (_, wanted) in &in_place {
            for (_, place) in &wanted.stored.chunks {
                files.open(&place.path)?;
            }
        }
        let ranks = self.ranks.into_iter().map(|state| files.read_all(state));
        let ranks = ranks.collect::<Result<Vec<_>>>()?;
        let (custom, others): (Vec<_>, Vec<_>) =
            states.into_iter().partition(|(object, _)| object.kind() == Kind::Custom);
        restore_custom(custom, &self.worlds, self.checkpoint.folder())?;

        let (optimizers, others): (Vec<_>, Vec<_>) =
            others.into_iter().partition(|(object, _)| object.kind() == Kind::Optimizer);
        let change = || -> Result<Option<String>> {
            let restore = |(object, state): &(Arc<dyn Checkpointed>, Value<Tensor>)| {
                object.restore(state, &self.worlds)
            };
            others.iter().try_for_each(restore)?;
            read_into(&self.checkpoint, in_place)?;
            // After `read_into`, which reads values into the states of optimizers.
            optimizers.iter().try_for_each(restore)?;
            self.objects.iter().try_for_each(|(_, object)| object.loaded())?;
            checkpoints.reset_window();
            checkpoints.accumulator.set_position(self.position);
            let same_world =
                self.checkpoint.manifest().world_size == checkpoints.processes.num_processes();
            ranks::restore(checkpoints, &self.objects, &ranks, same_world)
        };
        change().map_err(|source| interrupted(self.checkpoint.folder(), source))
    }
}

/// Loads the states of custom objects: all of them, or none.
fn restore_custom(
    objects: Vec<(Arc<dyn Checkpointed>, Value<Tensor>)>,
    worlds: &Worlds,
    path: &Path,
) -> Result<()> {
    let mut undo: Vec<(Arc<dyn Checkpointed>, Value<Tensor>)> = Vec::new();
    for (object, state) in objects {
        let before = object.state_dict();
        let restored = before.and_then(|before| {
            object.restore(&state, worlds)?;
            undo.push((object, before));
            Ok(())
        });
        // The object that failed is unchanged.
        if let Err(error) = restored {
            for (object, before) in undo.into_iter().rev() {
                object.restore(&before, worlds).map_err(|source| interrupted(path, source))?;
            }
            return Err(error);
        }
    }
    Ok(())
}

fn interrupted(path: &Path, source: Error) -> Error {
    TrainError::LoadInterrupted { path: path.to_owned(), source }.into()
}

/// A stored tensor, and the part of it that this rank needs.
#[derive(Debug, Clone)]
struct Wanted {
    stored: StoredTensor,
    /// Boxes of the stored tensor, each with its place in this rank's part.
    pieces: Vec<(Region, Region)>,
    /// Shape of this rank's part.
    shape: Vec<u64>,
}

impl Wanted {
    fn whole(stored: StoredTensor) -> Self {
        let whole = Region::whole(&stored.info.shape);
        let shape = whole.shape.clone();
        Self { pieces: vec![(whole.clone(), whole)], shape, stored }
    }

    fn part(part: &Part, stored: StoredTensor) -> Self {
        Self { pieces: part.pieces(), shape: part.own_shape(), stored }
    }

    fn of_parameter(
        parameter: &ModelTensor,
        part: Option<&Part>,
        stored: StoredTensor,
    ) -> Result<Self, String> {
        let Some(part) = part else {
            same_shape(&parameter.name, &parameter.tensor, &stored.info)?;
            return Ok(Self::whole(stored));
        };
        let dtype = parameter.tensor.f_kind().map_err(|error| error.to_string())?;
        let shape = part.whole_shape();
        if stored.info.shape != shape || dtype_of(dtype) != Some(stored.info.dtype) {
            return Err(format!(
                "`{}` is {} in the checkpoint, but {shape:?} of {dtype:?} here",
                parameter.name, stored.info
            ));
        }
        Ok(Self::part(part, stored))
    }

    /// Returns the type and shape of the requested tensor.
    fn info(&self) -> TensorInfo {
        TensorInfo { dtype: self.stored.info.dtype, shape: self.shape.clone() }
    }
}

/// Returns an object's tree with its stored tensors; those that ranks divide are replaced by this rank's parts from
/// `parts`.
fn placed(
    checkpoint: &Checkpoint,
    object: &Object,
    parts: &HashMap<String, Part>,
) -> Result<Value<Wanted>> {
    let Some(state) = checkpoint.state(object)? else { return Ok(Value::None) };
    let mut stored = checkpoint.stored(object)?;
    state.try_map(&mut |place, name| {
        let found = stored.remove(&name).ok_or_else(|| FileError::Damaged {
            path: checkpoint.folder().to_owned(),
            fact: format!("the tensor `{name}` of {} is missing", object.name),
        })?;
        let part = parts.get(place).filter(|part| part.whole_shape() == found.info.shape);
        Ok(match part {
            Some(part) => Wanted::part(part, found),
            None => Wanted::whole(found),
        })
    })
}

/// Returns the number of objects of a kind in a checkpoint, for messages.
fn count_kinds(checkpoint: &Checkpoint, kind: &str) -> usize {
    checkpoint.manifest().of_kind(kind).count()
}

/// Open files, with their sizes in the manifest.
struct Files<'c> {
    checkpoint: &'c Checkpoint,
    open: HashMap<PathBuf, TensorFile>,
}

impl<'c> Files<'c> {
    fn new(checkpoint: &'c Checkpoint) -> Self {
        Self { checkpoint, open: HashMap::new() }
    }

    /// Checks the size again, so that most changes of a file after its verification are found before the
    /// program's state is touched.
    fn open(&mut self, path: &Path) -> Result<&TensorFile> {
        let entry = match self.open.entry(path.to_owned()) {
            Entry::Occupied(known) => return Ok(known.into_mut()),
            Entry::Vacant(entry) => entry,
        };
        let file = TensorFile::open(path)?;
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if let Some(facts) = self.checkpoint.manifest().files.get(name)
            && file.bytes() < facts.bytes
        {
            return Err(TorchError::CutShort {
                path: path.to_owned(),
                expected: facts.bytes,
                found: file.bytes(),
            }
            .into());
        }
        Ok(entry.insert(file))
    }

    /// Reads numbers of an optimizer's state and tensors that the optimizer does not have yet. Tensors of `live`, its
    /// current state, are added to `in_place`, each with the values to be read into it.
    fn read_beside(
        &mut self,
        state: Value<Wanted>,
        live: &Value<Tensor>,
        in_place: &mut Vec<(Tensor, Wanted)>,
    ) -> Result<Value<Tensor>> {
        let mut known = HashMap::new();
        live.as_ref().try_map(&mut |name, tensor| {
            known.insert(name.to_owned(), tensor.f_detach()?);
            Ok::<_, Error>(())
        })?;
        state.try_map(&mut |name, wanted| {
            let fits = |tensor: &Tensor| {
                tensor.dim() > 0 && same_shape(name, tensor, &wanted.info()).is_ok()
            };
            let Some(tensor) = known.remove(name).filter(fits) else {
                return self.read_one(name, &wanted);
            };
            in_place.push((tensor.shallow_clone(), wanted));
            Ok(tensor)
        })
    }

    fn read_all(&mut self, state: Value<Wanted>) -> Result<Value<Tensor>> {
        state.try_map(&mut |name, wanted| self.read_one(name, &wanted))
    }

    fn read_one(&mut self, name: &str, wanted: &Wanted) -> Result<Tensor> {
        let info = wanted.info();
        let kind = loaded_kind(name, info.dtype).map_err(|fact| {
            let path = self.checkpoint.folder().to_owned();
            FileError::Unsupported { path, fact }
        })?;
        let mut tensor = Tensor::f_empty(signed(&info.shape), (kind, Device::Cpu))?;
        self.read_wanted(wanted, &mut tensor)?;
        Ok(tensor)
    }

    fn read_into(&mut self, tensors: Vec<(Tensor, Wanted)>) -> Result<()> {
        tensors
            .into_iter()
            .try_for_each(|(mut tensor, wanted)| self.read_wanted(&wanted, &mut tensor))
    }

    /// Reads the requested values from the chunks that contain them. Whole rows are read directly into their places.
    /// Chunks that cut other dimensions are read into memory one at a time first.
    fn read_wanted(&mut self, wanted: &Wanted, tensor: &mut Tensor) -> Result<()> {
        let stored = &wanted.stored;
        for (region, place) in &wanted.pieces {
            let mut piece = tensor.f_detach()?;
            for (dim, (&start, &length)) in place.offset.iter().zip(&place.shape).enumerate() {
                piece = piece.f_narrow(dim as i64, start.cast_signed(), length.cast_signed())?;
            }
            self.read_piece(stored, region, &mut piece)?;
        }
        Ok(())
    }

    fn read_piece(
        &mut self,
        stored: &StoredTensor,
        region: &Region,
        tensor: &mut Tensor,
    ) -> Result<()> {
        for (chunk, place) in &stored.chunks {
            let file = self.open(&place.path)?;
            if chunk == region {
                file.read_into(place.offset, tensor)?;
                continue;
            }
            let Some(common) = chunk.intersection(region) else { continue };
            let mut rows = tensor.f_detach()?;
            for dim in 0..common.shape.len() {
                let start = common.offset[dim] - region.offset[dim];
                rows = rows.f_narrow(dim as i64, start as i64, common.shape[dim] as i64)?;
            }
            let inner = |it: &Region| it.shape.get(1..).map(<[u64]>::to_vec);
            if inner(chunk) == inner(&common) {
                // Size of a row in bytes. It fits 64 bits, since the shapes of stored tensors were checked.
                let first = common.offset[0] - chunk.offset[0];
                let row = place.info.bytes().unwrap_or(0) / chunk.shape[0].max(1);
                file.read_into(place.offset + first * row, &mut rows)?;
                continue;
            }
            let mut whole = Tensor::f_empty(signed(&chunk.shape), (rows.f_kind()?, Device::Cpu))?;
            file.read_into(place.offset, &mut whole)?;
            for dim in 0..common.shape.len() {
                let start = common.offset[dim] - chunk.offset[dim];
                whole = whole.f_narrow(dim as i64, start as i64, common.shape[dim] as i64)?;
            }
            tch::no_grad(|| rows.f_detach()?.f_copy_(&whole))?;
        }
        Ok(())
    }
}

fn mesh_text(mesh: &[MeshAxis]) -> String {
    let axes: Vec<String> = mesh.iter().map(|it| format!("{} {}", it.name, it.size)).collect();
    if axes.is_empty() { "one rank".to_owned() } else { axes.join(" x ") }
}

fn signed(shape: &[u64]) -> Vec<i64> {
    shape.iter().map(|size| size.cast_signed()).collect()
}

/// Reads on two threads, about half of the bytes each: the first half of the files and the second, through separate
/// descriptors, so that the system reads ahead for both. If no thread can be started, reads on one.
fn read_into(checkpoint: &Checkpoint, mut tensors: Vec<(Tensor, Wanted)>) -> Result<()> {
    let first = |wanted: &Wanted| {
        let place = wanted.stored.chunks.iter().find(|(chunk, _)| {
            wanted.pieces.iter().any(|(region, _)| {
                chunk.intersection(region).is_some_and(|common| common.elements() > 0)
            })
        });
        place.map(|(_, place)| (place.path.clone(), place.offset))
    };
    tensors.sort_by_cached_key(|(_, wanted)| first(wanted));
    let bytes = |(_, wanted): &(Tensor, Wanted)| wanted.info().bytes().unwrap_or_default();
    let whole: u64 = tensors.iter().map(bytes).sum();
    let mut before = 0;
    let middle = tensors.iter().position(|tensor| {
        before += bytes(tensor);
        before > whole / 2
    });
    let second = tensors.split_off(middle.unwrap_or(0));
    // Work that remains if a thread could not be started.
    let second = Mutex::new(second);
    let read_second = || {
        let second = mem::take(&mut *second.lock());
        Files::new(checkpoint).read_into(second)
    };
    std::thread::scope(|scope| {
        let other = std::thread::Builder::new().spawn_scoped(scope, read_second);
        let mine = Files::new(checkpoint).read_into(tensors);
        let other = match other {
            Ok(other) => other.join().unwrap_or_else(|_| {
                Err(TorchError::Internal("the thread that read a checkpoint panicked".into())
                    .into())
            }),
            Err(_) => read_second(),
        };
        mine.and(other)
    })
}
