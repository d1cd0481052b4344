//! Parameters partitioned over the ranks, in flat vectors, or whole in those of one.

use std::collections::{BTreeMap, BTreeSet};

use super::files::Files;
use super::flat::{Chain, Flat, Piece, joined};
use super::model::{ModelStates, Shape};
use super::optimizer::{RankStates, Slot};
use super::{Moments, Parameter};
use crate::error::Error;
use crate::fault::Fault;
use crate::file_tensor::FileTensor;
use crate::pth::shown;

/// Partitions of all ranks.
#[derive(Debug)]
pub(super) struct Zero {
    ranks: Vec<RankStates>,
    /// Pieces of each parameter.
    pieces: Vec<Vec<Piece>>,
}

/// Reads the optimizer files of all ranks.
pub(super) fn ranks(files: &Files) -> Result<Vec<RankStates>, Error> {
    let Some((&first, path)) = files.optimizers.first_key_value() else {
        return Err(files.missing(
            "the optimizer's states of every rank (zero_pp_rank_0_mp_rank_00_optim_states.pt, ...)",
            "the weights of a run with ZeRO are there",
        ));
    };
    let name = |rank: u64| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.replacen(&format!("zero_pp_rank_{first}_"), &format!("zero_pp_rank_{rank}_"), 1)
    };
    let head = RankStates::open(path)?;
    let (stage, partitions) = (head.stage, head.partitions);
    let why = format!("the run had {partitions} ranks");
    if let Some(rank) = (0..partitions).find(|rank| !files.optimizers.contains_key(rank)) {
        return Err(files.missing(&name(rank), &why));
    }
    if let Some((rank, path)) = files.optimizers.range(partitions..).next() {
        let fact =
            format!("it is of rank {rank}, but {why}: another run has saved into this folder");
        return Err(Error::Damaged { path: path.clone(), fact });
    }
    let mut ranks = vec![head];
    for path in files.optimizers.values().skip(1) {
        let mut rank = RankStates::open(path)?;
        let damaged = |fact: String| Error::Damaged { path: path.clone(), fact };
        if (rank.stage, rank.partitions) != (stage, partitions) {
            return Err(damaged(format!(
                "it is of stage {} with {} ranks, the first rank's of stage {stage} with {partitions}",
                rank.stage, rank.partitions
            )));
        }
        let groups = ranks[0].weights.len();
        if rank.weights.len() != groups {
            let found = rank.weights.len();
            return Err(damaged(format!("it has {found} groups, the first rank's {groups}")));
        }
        rank.groups = None;
        rank.paddings = None;
        ranks.push(rank);
    }
    Ok(ranks)
}

impl Zero {
    /// Locates the pieces of the trained parameters.
    pub(super) fn of(
        ranks: Vec<RankStates>,
        model: &ModelStates,
    ) -> Result<(Self, Vec<Parameter>), Fault> {
        let groups = model.shapes()?;
        let expected = ranks[0].weights.len();
        if groups.len() != expected {
            return Err(Fault::damaged(format_args!(
                "`param_shapes` has {} groups, the optimizer's states {expected}",
                groups.len()
            )));
        }
        let pieces = if ranks[0].stage == 3 {
            by_parameter(&ranks, &groups)?
        } else {
            by_group(&ranks, &groups)?
        };
        let mut parameters = Vec::new();
        let mut names = BTreeSet::new();
        for (group, shapes) in groups.into_iter().enumerate() {
            for Shape { name, shape, .. } in shapes {
                if !names.insert(name.clone()) {
                    let name = shown(&name);
                    return Err(Fault::damaged(format_args!("`{name}` is in two groups")));
                }
                parameters.push(Parameter { name, shape, group });
            }
        }
        Ok((Self { ranks, pieces }, parameters))
    }

    /// Locates the parameters of an optimizer that one file has whole.
    pub(super) fn of_whole(
        states: RankStates,
        found: Vec<(Shape, Piece)>,
    ) -> (Self, Vec<Parameter>) {
        let (parameters, pieces) = found
            .into_iter()
            .map(|(Shape { name, shape, .. }, piece)| {
                (Parameter { name, shape, group: piece.vector }, vec![piece])
            })
            .unzip();
        (Self { ranks: vec![states], pieces }, parameters)
    }

    pub(super) fn weight(&self, index: usize, parameter: &Parameter) -> Result<FileTensor, Error> {
        let vector = |piece: &Piece| Ok(&self.ranks[piece.rank].weights[piece.vector]);
        self.tensor(index, parameter, vector)
    }

    /// Joins the pieces of a parameter.
    fn tensor<'z>(
        &'z self,
        index: usize,
        parameter: &Parameter,
        vector: impl FnMut(&Piece) -> Result<&'z Flat, String>,
    ) -> Result<FileTensor, Error> {
        let pieces = &self.pieces[index];
        joined(&parameter.shape, pieces, vector).map_err(|fact| {
            let rank = pieces.first().map_or(0, |piece| piece.rank);
            let path = self.ranks[rank].path.clone();
            Error::Damaged { path, fact: format!("`{}`: {fact}", shown(&parameter.name)) }
        })
    }

    /// Returns the optimizer states of each parameter that has any.
    pub(super) fn moments(&self, parameters: &[Parameter]) -> Result<Moments, Error> {
        let mut moments = Moments::new();
        for (index, parameter) in parameters.iter().enumerate() {
            let Some(first) = self.pieces[index].first() else { continue };
            let slots = &self.ranks[first.rank].slots[first.vector];
            let mut own = BTreeMap::new();
            for (name, slot) in slots {
                let tensor = match slot {
                    Slot::Scalar(scalar) => scalar.clone(),
                    Slot::Flat(_) => self.tensor(index, parameter, |piece| {
                        match self.ranks[piece.rank].slots[piece.vector].get(name) {
                            Some(Slot::Flat(flat)) => Ok(flat),
                            _ => Err(format!("rank {} has no `{}` of it", piece.rank, shown(name))),
                        }
                    })?,
                };
                own.insert(name.clone(), tensor);
            }
            if !own.is_empty() {
                moments.insert(parameter.name.clone(), own);
            }
        }
        Ok(moments)
    }

    pub(super) fn head(&self) -> &RankStates {
        &self.ranks[0]
    }
}

/// Locates parameters of stages 1 and 2: the ranks' vectors of a group form one vector with the parameters one after
/// the other.
fn by_group(ranks: &[RankStates], groups: &[Vec<Shape>]) -> Result<Vec<Vec<Piece>>, Fault> {
    let mut all = Vec::new();
    for (group, shapes) in groups.iter().enumerate() {
        let chain = Chain::of(ranks.iter().map(|rank| rank.weights[group].elements));
        let paddings = ranks[0].paddings.as_ref().map(|paddings| paddings[group].as_slice());
        if paddings.is_some_and(|paddings| paddings.len() != shapes.len()) {
            return Err(Fault::damaged(format_args!(
                "`param_alignment_paddings` of group {group} is not one number for each of {} parameters",
                shapes.len()
            )));
        }
        let mut offset = 0u64;
        for (index, shape) in shapes.iter().enumerate() {
            let cut = chain.cut(offset, shape.elements).ok_or_else(|| {
                Fault::damaged(format_args!(
                    "`{}` has {} elements from {offset} on, of {} that the ranks have in group {group}",
                    shown(&shape.name),
                    shape.elements,
                    chain.len()
                ))
            })?;
            let piece = |(rank, first, count)| Piece { rank, vector: group, first, count };
            all.push(cut.into_iter().map(piece).collect());
            let padding = paddings.map_or(0, |paddings| paddings[index]);
            offset = offset.saturating_add(shape.elements).saturating_add(padding);
        }
        // DeepSpeed pads its vectors, at most to the next multiple.
        let multiple = 2 * ranks.len() as u64;
        if offset.div_ceil(multiple) != chain.len().div_ceil(multiple) {
            return Err(Fault::damaged(format_args!(
                "the parameters of group {group} have {offset} elements, the ranks {}",
                chain.len()
            )));
        }
    }
    Ok(all)
}

/// Locates parameters of stage 3: each parameter is split evenly over the ranks, with padding in the last parts.
fn by_parameter(ranks: &[RankStates], groups: &[Vec<Shape>]) -> Result<Vec<Vec<Piece>>, Fault> {
    let sizes = |rank: &RankStates| rank.weights.iter().map(|it| it.elements).collect::<Vec<_>>();
    let first = sizes(&ranks[0]);
    if let Some(other) = ranks.iter().find(|rank| sizes(rank) != first) {
        return Err(Fault::damaged(format_args!(
            "the groups of the first rank have {first:?} elements, those of {} {:?}",
            other.path.file_name().unwrap_or_default().display(),
            sizes(other)
        )));
    }
    let chain = Chain::of(first);
    let (mut all, mut offset) = (Vec::new(), 0u64);
    for shape in groups.iter().flatten() {
        let each = shape.elements.div_ceil(ranks.len() as u64);
        let mut pieces = Vec::new();
        if chain.cut(offset, each).is_none() {
            return Err(Fault::damaged(format_args!(
                "`{}` has {each} elements in each rank from {offset} on, of {}",
                shown(&shape.name),
                chain.len()
            )));
        }
        let mut left = shape.elements;
        for rank in 0..ranks.len() {
            let now = left.min(each);
            if now == 0 {
                break;
            }
            let cut = chain.cut(offset, now).unwrap_or_default().into_iter();
            pieces.extend(cut.map(|(vector, first, count)| Piece { rank, vector, first, count }));
            left -= now;
        }
        all.push(pieces);
        offset += each;
    }
    if offset != chain.len() {
        return Err(Fault::damaged(format_args!(
            "the parameters have {offset} elements in each rank, its groups {}",
            chain.len()
        )));
    }
    Ok(all)
}
