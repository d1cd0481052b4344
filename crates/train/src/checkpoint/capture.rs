//! Data that a rank writes: its share of everything that was prepared.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use brigade_checkpoint::layout::{Chunk, Object, TensorEntry};
use brigade_checkpoint::shards::{self, Index, IndexMetadata};
use brigade_checkpoint::{Error as FileError, FileName, Region, TensorInfo, Value};
use brigade_torch::{Error, Result, dtype_of};
use tch::Tensor;

use super::buffer_pool::BufferPool;
use super::inner::{Holders, Inner, data_ranks};
use super::ranks;
use super::stages::{Share, Shares};
use crate::pipeline::PipelineRanks;
use crate::registry::{Checkpointed, Kind};
use crate::sharding::Part;

/// A rank's files, and the objects that they hold: those of all ranks on rank 0, its own on the others.
pub(super) struct Captured {
    pub(super) files: Vec<FilePlan>,
    pub(super) objects: Vec<Object>,
    pub(super) step: u64,
    pub(super) samples: u64,
}

/// A file to write.
pub(super) struct FilePlan {
    pub(super) name: FileName,
    pub(super) contents: Contents,
}

pub(super) enum Contents {
    Text(Vec<u8>),
    Tensors(Vec<NamedTensor>),
}

/// A tensor with its place in a file.
pub(super) struct NamedTensor {
    pub(super) name: String,
    pub(super) info: TensorInfo,
    pub(super) tensor: Tensor,
    /// `true` if only rank 0's value is saved.
    main_only: bool,
    /// Rows of the tensor that this rank holds, if it is sharded over ranks.
    part: Option<Part>,
}

/// The state of an object on this rank.
struct Captive {
    name: String,
    kind: Kind,
    /// `None` for a model.
    state: Option<Value<String>>,
    tensors: Vec<NamedTensor>,
}

/// Captures the current state of all objects. The tensors share memory with the objects until [`Captured::copy`].
pub(super) fn capture(checkpoints: &Inner) -> Result<Captured> {
    let named = checkpoints.registry.named();
    let objects = named.iter().map(|(name, object)| Captive::new(checkpoints, name, object));
    let mut objects = objects.collect::<Result<Vec<_>>>();
    if let Some(pipeline) = &checkpoints.pipeline {
        objects = join_stages(pipeline, objects);
    }
    let mut captured = Captured { files: Vec::new(), objects: Vec::new(), step: 0, samples: 0 };
    for (_, object) in &named {
        let steps = object.optimizer().map_or(0, |optimizer| optimizer.steps());
        captured.step = captured.step.max(steps);
        if captured.samples == 0 {
            // The first loader is the one of the training data.
            captured.samples = object.samples().unwrap_or_default();
        }
    }
    for Captive { name, kind, state, tensors } in objects? {
        captured.add(checkpoints, kind.name(), &name, state, tensors)?;
    }
    let position = checkpoints.accumulator.position();
    let mut run = vec![("accumulation_position", Value::Int(position as i64))];
    let ranks = checkpoints.processes.num_processes();
    if checkpoints.data_ranks != data_ranks(ranks, &checkpoints.mesh().unwrap_or_default()) {
        run.push((DATA_RANKS, Value::Int(checkpoints.data_ranks as i64)));
    }
    let run = Value::dict(run);
    let (tree, tensors) = split(run, &HashMap::new())?;
    captured.add(checkpoints, "run", "run", Some(tree), tensors)?;
    captured.add_rank(checkpoints, ranks::state(checkpoints, &named)?)?;
    Ok(captured)
}

/// Key of the number of data-parallel ranks in the state of a run, if its mesh does not determine it: no axis has
/// context ranks.
pub(super) const DATA_RANKS: &str = "data_ranks";

impl Captive {
    fn new(checkpoints: &Inner, name: &str, object: &Arc<dyn Checkpointed>) -> Result<Self> {
        let parts = checkpoints.registry.parts_of(&**object);
        let (state, tensors) = match object.tensors() {
            Some(tensors) => {
                let tensors = tensors.into_iter().map(|saved| {
                    let tensor = saved.tensor.f_detach()?;
                    NamedTensor::new(saved.name, tensor, saved.buffer, &parts)
                });
                (None, tensors.collect::<Result<_>>()?)
            }
            None => {
                let (tree, tensors) = split(object.state_dict()?, &parts)?;
                (Some(tree), tensors)
            }
        };
        Ok(Self { name: name.to_owned(), kind: object.kind(), state, tensors })
    }

    fn share(&self) -> Share {
        let names = self.tensors.iter().map(|tensor| tensor.name.clone());
        Share::new(names.collect(), self.state.as_ref())
    }
}

/// Returns the objects that this rank of a pipeline writes: the states of all stages, and tensors that no earlier rank
/// has. All ranks of the pipeline take part.
fn join_stages(pipeline: &PipelineRanks, objects: Result<Vec<Captive>>) -> Result<Vec<Captive>> {
    let (objects, own) = match objects {
        Ok(objects) => {
            let own = objects.iter().map(|object| (object.name.clone(), object.share())).collect();
            (objects, Ok(own))
        }
        Err(error) => (Vec::new(), Err(error)),
    };
    let shares = Shares::exchange(pipeline, own)?;
    let joined = objects.into_iter().map(|mut object| {
        let before = shares.before(&object.name);
        object.tensors.retain(|tensor| !before.contains(tensor.name.as_str()));
        if object.state.is_some() {
            object.state = shares.joined(object.kind, &object.name)?;
        }
        Ok(object)
    });
    joined.collect()
}

/// Returns the shares of all ranks of a pipeline in these objects. All of them take part.
pub(super) fn shares_of(
    checkpoints: &Inner,
    pipeline: &PipelineRanks,
    objects: &[ranks::Named],
) -> Result<Shares> {
    let own = objects
        .iter()
        .map(|(name, object)| Ok((name.clone(), Captive::new(checkpoints, name, object)?.share())));
    Shares::exchange(pipeline, own.collect())
}

impl Captured {
    /// Copies the tensors to memory of their own, so that training can continue.
    pub(super) fn copy(&mut self, copies: &BufferPool) -> Result<()> {
        for file in &mut self.files {
            let Contents::Tensors(tensors) = &mut file.contents else { continue };
            for named in tensors {
                named.tensor = copies.copy(&named.tensor)?;
            }
        }
        // Buffers that fit no tensor belong to objects that no longer exist.
        copies.release();
        Ok(())
    }

    /// Adds the state that differs between ranks. Among ranks with the same objects, all but the first list nothing
    /// else.
    fn add_rank(&mut self, checkpoints: &Inner, state: Value<Tensor>) -> Result<()> {
        let name = format!("rank_{}", checkpoints.processes.process_index());
        if checkpoints.holders().place > 0 {
            self.objects.clear();
        }
        let (tree, tensors) = split(state, &HashMap::new())?;
        let text = json(&tree)?;
        let name = file_name(&name)?;
        let json = name.json();
        let mut object = Object::new("rank", name.clone());
        object.state = Some(json.clone());
        self.files.push(FilePlan { name: json, contents: Contents::Text(text) });
        if !tensors.is_empty() {
            let file = shards::file_name(&name, 0, 1);
            object.add_file(&file, infos(&tensors), &[]);
            self.files.push(FilePlan { name: file, contents: Contents::Tensors(tensors) });
        }
        self.objects.push(object);
        Ok(())
    }

    /// Divides an object's tensors among the ranks that have them, in the same way on each.
    fn add(
        &mut self,
        checkpoints: &Inner,
        kind: &str,
        name: &str,
        state: Option<Value<String>>,
        tensors: Vec<NamedTensor>,
    ) -> Result<()> {
        let Holders { place: rank, ranks, stage } = checkpoints.holders();
        let name = file_name(name)?;
        let mut object = Object::new(kind, name.clone());
        if let Some(tree) = state {
            let file = name.json();
            object.state = Some(file.clone());
            if checkpoints.processes.is_main_process() {
                let contents = Contents::Text(json(&tree)?);
                self.files.push(FilePlan { name: file, contents });
            }
        }
        let name = match stage {
            Some((stage, stages)) => {
                file_name(&format!("{name}-stage-{:05}-of-{stages:05}", stage + 1))?
            }
            None => name,
        };
        let (spread, mut tensors): (Vec<_>, Vec<_>) =
            tensors.into_iter().partition(|tensor| tensor.part.is_some());
        // Together, so that rank 0 has to write few files.
        tensors.sort_by_key(|tensor| !tensor.main_only);
        let sizes: Vec<u64> = tensors.iter().map(NamedTensor::bytes).collect();
        let total: u64 = sizes.iter().sum();
        let limit = match ranks {
            1 => u64::MAX,
            ranks => total.div_ceil(ranks as u64).max(LEAST_SHARD_BYTES),
        };
        let max = checkpoints.project.max_shard_bytes.min(limit);
        let parts = if tensors.is_empty() { Vec::new() } else { shards::cut(&sizes, max) };
        let mut tensors: Vec<Option<NamedTensor>> = tensors.into_iter().map(Some).collect();
        let mut index =
            Index { metadata: IndexMetadata { total_size: total }, weight_map: BTreeMap::new() };
        let mut loads = vec![0u64; ranks];
        for (number, part) in parts.iter().enumerate() {
            let file = shards::file_name(&name, number, parts.len());
            let chosen: Vec<NamedTensor> =
                part.iter().filter_map(|&place| tensors[place].take()).collect();
            for tensor in &chosen {
                index.weight_map.insert(tensor.name.clone(), file.clone());
            }
            let least = loads.iter().enumerate().min_by_key(|(_, load)| **load);
            let writer = if chosen.iter().any(|tensor| tensor.main_only) {
                0
            } else {
                least.map_or(0, |(rank, _)| rank)
            };
            loads[writer] += part.iter().map(|&place| sizes[place]).sum::<u64>();
            object.add_file(&file, infos(&chosen), &checkpoints.replicated());
            if writer == rank {
                self.files.push(FilePlan { name: file, contents: Contents::Tensors(chosen) });
            }
        }
        // Other stages' tensors would be missing in an index.
        if parts.len() > 1 && stage.is_none() {
            let file = shards::index_name(&name);
            object.tensor_files.push(file.clone());
            if rank == 0 {
                let text = index.to_json().into_bytes();
                self.files.push(FilePlan { name: file, contents: Contents::Text(text) });
            }
        }
        // If everything else is sharded, a mixture's experts are spread over other ranks.
        let first = spread.first().and_then(|tensor| tensor.part.clone());
        let alike = |part: &Part| first.as_ref().is_some_and(|first| first.is_spread_as(part));
        let (spread, experts): (Vec<_>, Vec<_>) =
            spread.into_iter().partition(|tensor| tensor.part.as_ref().is_some_and(alike));
        self.add_spread(checkpoints, &mut object, &name, &spread)?;
        let name = file_name(&format!("{name}-experts"))?;
        self.add_spread(checkpoints, &mut object, &name, &experts)?;
        self.objects.push(object);
        Ok(())
    }

    /// Adds the tensors of which each rank has a part: one file per part, written by one of the ranks that have it.
    /// Each rank can compute what every other rank writes.
    fn add_spread(
        &mut self,
        checkpoints: &Inner,
        object: &mut Object,
        stem: &FileName,
        spread: &[NamedTensor],
    ) -> Result<()> {
        let rank = checkpoints.processes.process_index();
        let Some(part) = spread.iter().find_map(|tensor| tensor.part.clone()) else {
            return Ok(());
        };
        let count = part.slots();
        let files: Vec<FileName> =
            (0..count).map(|slot| shards::rows_name(stem, slot, count)).collect();
        let mut used = vec![false; count];
        let mut own: Vec<Vec<NamedTensor>> = files.iter().map(|_| Vec::new()).collect();
        for tensor in spread {
            let Some(part) = &tensor.part else { continue };
            let mut chunks = Vec::new();
            for slot in 0..count {
                for (number, (Region { offset, shape }, place)) in
                    part.pieces_of(slot).into_iter().enumerate()
                {
                    used[slot] = true;
                    // Blocks after the first one get names that no tensor has. No block is empty.
                    let key = (number > 0).then(|| format!("{}..{number}", tensor.name));
                    let file = files[slot].clone();
                    if part.writer(slot) == Some(rank) {
                        own[slot].push(tensor.piece(key.as_ref(), &place)?);
                    }
                    chunks.push(Chunk { file, key, offset, shape });
                }
            }
            let entry = TensorEntry {
                dtype: tensor.info.dtype,
                shape: part.whole_shape().to_vec(),
                placements: checkpoints.with_stages(part.placements.clone()),
                chunks,
            };
            object.tensors.insert(tensor.name.clone(), entry);
        }
        for ((file, own), used) in files.into_iter().zip(own).zip(used) {
            if used {
                object.tensor_files.push(file.clone());
            }
            if !own.is_empty() {
                self.files.push(FilePlan { name: file, contents: Contents::Tensors(own) });
            }
        }
        Ok(())
    }
}

impl NamedTensor {
    /// Makes a captured tensor. `parts` are the parts of its object.
    fn new(
        name: String,
        tensor: Tensor,
        main_only: bool,
        parts: &HashMap<String, Part>,
    ) -> Result<Self> {
        let kind = tensor.f_kind()?;
        let dtype = dtype_of(kind).ok_or_else(|| {
            Error::invalid_argument(format!(
                "a checkpoint cannot hold `{name}`: its tensor is of {kind:?}"
            ))
        })?;
        let shape: Vec<u64> = tensor.size().iter().map(|size| size.unsigned_abs()).collect();
        let part = parts.get(&name).filter(|part| part.own_shape() == shape).cloned();
        Ok(Self { name, info: TensorInfo { dtype, shape }, tensor, main_only, part })
    }

    /// Returns one box of the tensor, under its own name if it has one.
    fn piece(&self, key: Option<&String>, place: &Region) -> Result<Self> {
        let mut tensor = self.tensor.shallow_clone();
        for (dim, (&start, &length)) in place.offset.iter().zip(&place.shape).enumerate() {
            if tensor.size()[dim] != length.cast_signed() {
                tensor = tensor.f_narrow(dim as i64, start.cast_signed(), length.cast_signed())?;
            }
        }
        Ok(Self {
            name: key.unwrap_or(&self.name).clone(),
            info: TensorInfo { dtype: self.info.dtype, shape: place.shape.clone() },
            tensor,
            main_only: false,
            part: None,
        })
    }

    fn bytes(&self) -> u64 {
        self.info.bytes().unwrap_or_default()
    }
}

fn infos(tensors: &[NamedTensor]) -> impl Iterator<Item = (&str, TensorInfo)> {
    tensors.iter().map(|named| (named.name.as_str(), named.info.clone()))
}

fn file_name(name: &str) -> Result<FileName> {
    Ok(FileName::new(name).map_err(FileError::from)?)
}

/// Splits a state into its tree, with the names of its tensors, and the tensors.
fn split(
    state: Value<Tensor>,
    parts: &HashMap<String, Part>,
) -> Result<(Value<String>, Vec<NamedTensor>)> {
    let mut tensors: Vec<NamedTensor> = Vec::new();
    let mut names = HashSet::new();
    let tree = state.try_map(&mut |place, tensor| {
        let mut name = place.to_owned();
        // Different keys may have the same text: 0 and "0".
        while !names.insert(name.clone()) {
            name.push('\'');
        }
        tensors.push(NamedTensor::new(name.clone(), tensor.f_detach()?, false, parts)?);
        Ok::<_, Error>(name)
    })?;
    Ok((tree, tensors))
}

fn json(tree: &Value<String>) -> Result<Vec<u8>> {
    let mut text = serde_json::to_vec_pretty(&tree.to_json())
        .map_err(|error| Error::invalid_argument(format!("a state cannot be written: {error}")))?;
    text.push(b'\n');
    Ok(text)
}

/// Minimum size of a shard in bytes. Below it, another file costs more than the division saves.
const LEAST_SHARD_BYTES: u64 = 4 << 20;
