//! Units: parts of a model whose parameters are whole at the same time where the model is sharded.

use std::fmt;
use std::sync::Arc;

use brigade_torch::{NamedTensor, Result, Sharder, SharderOptions, ShardingGroups, TensorTree};
use parking_lot::Mutex;

use crate::Model;
use crate::model::is_under;
use crate::param_registry::{Entry, Role};

/// A part of a model, such as a transformer's block, that is gathered as a whole where the model is sharded over ranks
/// (a module of PyTorch's `fully_shard`). Made by [`crate::ParamPath::unit`] in a constructor; the forward runs in
/// [`Unit::run`], which is a plain call where nothing is sharded. Clones are the same unit.
///
/// ```
/// use brigade_nn::{Linear, Model, Module, ParamPath, Unit};
/// use brigade_torch::Result;
/// use tch::{Kind, Tensor};
///
/// struct Block { unit: Unit, linear: Linear }
///
/// impl Block {
///     fn new(path: &ParamPath<'_>) -> Self {
///         Self { unit: path.unit(), linear: Linear::new(path / "linear", 4, 4) }
///     }
/// }
///
/// impl Module<&Tensor> for Block {
///     type Output = Tensor;
///     fn forward(&self, input: &Tensor) -> Result<Tensor> {
///         self.unit.run(|| Ok(input + self.linear.forward(input)?))
///     }
/// }
///
/// let model = Model::new(|path| Block::new(&(path / "block")))?;
/// let units = model.units();
/// assert_eq!((units[0].name.as_str(), units[0].parameters.len()), ("", 0));
/// assert_eq!((units[1].name.as_str(), units[1].parameters.len()), ("block", 2));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct Unit {
    place: Arc<Mutex<Option<Place>>>,
}

/// A unit of a sharder.
#[derive(Clone)]
struct Place {
    sharder: Arc<Sharder>,
    index: usize,
}

/// The parameters of a unit, which no other unit has.
#[derive(Debug)]
pub struct UnitParameters {
    /// The dotted name of the unit's path; empty for the root, which has what no other unit has.
    pub name: String,
    /// In the order of registration.
    pub parameters: Vec<NamedTensor>,
}

/// How [`Model::shard`] splits a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelSharding {
    /// Types of whole parameters and of sums, and whether whole parameters stay between steps.
    pub sharder: SharderOptions,
    /// Gives whole parameters back after a unit's forward. Defaults to true.
    pub reshards: bool,
}

impl Default for ModelSharding {
    fn default() -> Self {
        Self { sharder: SharderOptions::default(), reshards: true }
    }
}

impl Unit {
    /// Runs the unit's part of a forward, with the unit's parameters whole.
    ///
    /// # Errors
    /// Those of `forward`; those of [`Sharder::run`] where the model is sharded.
    pub fn run<T: TensorTree>(&self, forward: impl FnOnce() -> Result<T>) -> Result<T> {
        let place = self.place.lock().clone();
        match place {
            Some(Place { sharder, index }) => sharder.run(index, forward),
            None => forward(),
        }
    }
}

impl fmt::Debug for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_sharded = self.place.lock().is_some();
        f.debug_struct("Unit").field("is_sharded", &is_sharded).finish()
    }
}

impl<M> Model<M> {
    /// Returns the units with their parameters: the root first, then the others in the order of registration. A
    /// parameter belongs to the innermost unit in which all of its names are, so that weights that two units share are
    /// their common parent's.
    #[must_use]
    pub fn units(&self) -> Vec<UnitParameters> {
        let root = ("", Vec::new());
        let named = self.units.iter().map(|(name, _)| (name.as_str(), Vec::new()));
        let mut units: Vec<(&str, Vec<NamedTensor>)> = [root].into_iter().chain(named).collect();
        for (index, entry) in self.entries.iter().enumerate() {
            if entry.role != Role::Parameter {
                continue;
            }
            let names =
                |other: &Entry| other.role == Role::SameAs(index) || std::ptr::eq(other, entry);
            let has_all = |unit: &str| {
                self.entries
                    .iter()
                    .filter(|other| names(other))
                    .all(|other| is_under(&other.name, unit))
            };
            // Prefixes of one name: the longest is the innermost.
            let innermost = (0..units.len())
                .filter(|&unit| has_all(units[unit].0))
                .max_by_key(|&unit| units[unit].0.len())
                .unwrap_or(0);
            units[innermost].1.push(NamedTensor {
                name: entry.name.clone(),
                tensor: entry.tensor.shallow_clone(),
            });
        }
        let owned =
            |(name, parameters): (&str, _)| UnitParameters { name: name.to_owned(), parameters };
        units.into_iter().map(owned).collect()
    }

    /// Splits the parameters over the ranks of a group, unit by unit, and returns the sharder and this rank's shards, for
    /// an optimizer. The model's own parameters are whole inside of their units alone from now on; its forward runs as
    /// the sharder's unit 0. All ranks have the same values before.
    ///
    /// ```
    /// # use brigade_torch::{Backend, ProcessGroup, Store};
    /// # let gloo = Backend::Gloo(Default::default());
    /// # let group = ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
    /// use brigade_nn::{Linear, Model, ModelSharding};
    /// use brigade_torch::{ShardingGroups, backward};
    /// use tch::{Kind, Tensor};
    ///
    /// let mut model = Model::new(|path| Linear::new(path, 4, 2))?;
    /// let groups = ShardingGroups { gather: group.clone(), reduce: group.clone(), replicas: None };
    /// let (sharder, shards) = model.shard(groups, ModelSharding::default())?;
    /// let input = Tensor::ones([1, 4], (Kind::Float, model.device()));
    /// let output = sharder.run(0, || model.forward(&input))?;
    /// backward(&output.sum(Kind::Float))?;
    /// assert_eq!(shards[0].tensor.grad().size(), [2, 4]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Sharder::new`] and [`Sharder::add_unit`].
    pub fn shard(
        &mut self,
        groups: ShardingGroups,
        options: ModelSharding,
    ) -> Result<(Arc<Sharder>, Vec<NamedTensor>)> {
        let mut sharder = Sharder::new(groups, options.sharder)?;
        let mut shards = Vec::new();
        for unit in self.units() {
            shards.extend(sharder.add_unit(&unit.name, options.reshards, &unit.parameters)?);
        }
        let sharder = Arc::new(sharder);
        for (index, (_, unit)) in self.units.iter().enumerate() {
            *unit.place.lock() = Some(Place { sharder: Arc::clone(&sharder), index: index + 1 });
        }
        if let Some(kind) = options.sharder.kind {
            self.kind = kind;
        }
        Ok((sharder, shards))
    }
}
