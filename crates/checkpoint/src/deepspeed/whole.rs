//! Optimizers in fp16 without ZeRO, which are in the file of the model's states and have no names of parameters.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

use super::Parameter;
use super::files::Files;
use super::flat::{Flat, Piece};
use super::model::{ModelStates, Shape};
use super::optimizer::{Masters, RankStates};
use super::zero::Zero;
use crate::dtype::Dtype;
use crate::error::Error;
use crate::fault::Fault;
use crate::file_tensor::FileTensor;
use crate::pth::shown;

/// An open run without ZeRO.
#[derive(Debug)]
pub(super) struct Whole {
    pub(super) path: PathBuf,
    pub(super) model: ModelStates,
    pub(super) zero: Zero,
    pub(super) parameters: Vec<Parameter>,
    /// Other names of parameters: the name, and that of the parameter.
    pub(super) tied: Vec<(String, String)>,
}

/// Trained parameters of the module, each with its place among the optimizer's weights.
#[derive(Debug, Default)]
struct Found {
    parameters: Vec<(Shape, Piece)>,
    tied: Vec<(String, String)>,
}

/// Position in the weights of one group.
#[derive(Debug)]
struct Cursor<'m> {
    vectors: &'m [usize],
    /// Elements of the first vector that belong to parameters before.
    first: u64,
}

impl Cursor<'_> {
    /// Returns the place of a parameter if it is the next of the group, going by shapes.
    fn next(&self, states: &RankStates, masters: &Masters, shape: &Shape) -> Option<Piece> {
        let &vector = self.vectors.first()?;
        let fits = match &masters.shapes {
            Some(shapes) => shapes[vector] == shape.shape,
            None => shape.elements <= states.weights[vector].elements - self.first,
        };
        fits.then_some(Piece { rank: 0, vector, first: self.first, count: shape.elements })
    }

    fn pass(&mut self, states: &RankStates, piece: &Piece) {
        self.first += piece.count;
        if self.first == states.weights[piece.vector].elements {
            self.vectors = &self.vectors[1..];
            self.first = 0;
        }
    }
}

impl Whole {
    /// Opens the file of a step without files of optimizers. `None` if it has no optimizer either.
    pub(super) fn open(files: &Files) -> Result<Option<Self>, Error> {
        let Some(path) = files.whole.clone().filter(|_| files.optimizers.is_empty()) else {
            return Ok(None);
        };
        let model = ModelStates::open(&path)?;
        let read = || -> Result<_, Fault> {
            let Some((states, masters)) = model.optimizer(&path)? else { return Ok(None) };
            let Found { parameters, tied } = Found::among(&states, &masters, &model)?;
            Ok(Some((Zero::of_whole(states, parameters), tied)))
        };
        let found = read().map_err(|fault| fault.at(&path))?;
        Ok(found.map(|((zero, parameters), tied)| Self { path, model, zero, parameters, tied }))
    }
}

impl Found {
    /// Finds the parameters that the optimizer has: in each group they are in the module's order, and rounded they are
    /// equal to the module's.
    fn among(states: &RankStates, masters: &Masters, model: &ModelStates) -> Result<Self, Fault> {
        let buffers: HashSet<&str> = model.buffers().into_iter().collect();
        let groups = masters.groups.iter();
        let mut cursors: Vec<_> = groups.map(|vectors| Cursor { vectors, first: 0 }).collect();
        let mut found = Self::default();
        let mut known: HashMap<_, &str> = HashMap::new();
        for (name, tensor) in model.stored() {
            let info = tensor.info();
            let is_float = matches!(info.dtype, Dtype::F16 | Dtype::BF16 | Dtype::F32);
            if buffers.contains(name) || !is_float {
                continue;
            }
            let place = (&tensor.storage.key, tensor.offset, &tensor.size);
            if let Some(&first) = known.get(&place) {
                found.tied.push((name.to_owned(), first.to_owned()));
                continue;
            }
            let elements = info.elements().unwrap_or_default();
            let shape = Shape { name: name.to_owned(), shape: info.shape, elements };
            let rounded = first_of(&model.flat(tensor)?, 0, elements, info.dtype)?;
            for cursor in &mut cursors {
                let Some(piece) = cursor.next(states, masters, &shape) else { continue };
                let vector = &states.weights[piece.vector];
                if first_of(vector, piece.first, elements, info.dtype)? == rounded {
                    cursor.pass(states, &piece);
                    known.insert(place, name);
                    found.parameters.push((shape, piece));
                    break;
                }
            }
        }
        let Some(group) = cursors.iter().position(|cursor| !cursor.vectors.is_empty()) else {
            return Ok(found);
        };
        let is_of_group =
            |(_, piece): &&(Shape, Piece)| masters.groups[group].contains(&piece.vector);
        let last = found.parameters.iter().rfind(is_of_group);
        let after = last.map(|(shape, _)| format!(" after `{}`", shown(&shape.name)));
        Err(Fault::unsupported(format_args!(
            "its optimizer has no names of parameters, and its weights of group {group}{} are not the next of the module \
             in its order: convert this file alone with the key `module`, for the weights in 16 bits",
            after.unwrap_or_default()
        )))
    }
}

/// Reads the first elements of a parameter that has `elements` from `first` on, as this type.
fn first_of(flat: &Flat, first: u64, elements: u64, dtype: Dtype) -> Result<Vec<u8>, Fault> {
    Ok(FileTensor::placed(flat.part(first, elements.min(COMPARED))).cast(dtype).read()?)
}

/// Number of elements of a parameter that are compared.
const COMPARED: u64 = 1024;
