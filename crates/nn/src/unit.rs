//! Units: parts of a model whose parameters are whole at the same time where the model is sharded.

use std::fmt;
use std::sync::Arc;

use brigade_torch::{Result, Sharder, TensorTree};
use parking_lot::Mutex;

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
/// let parameters = model.sharding_parameters()?;
/// assert_eq!(parameters[1].name(), "block.linear.bias");
/// assert_eq!(parameters[1].unit.as_deref(), Some("block"));
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

impl Unit {
    /// Has the unit run as this unit of a sharder from now on, or without one as a plain call.
    pub(crate) fn set_place(&self, sharder: &Arc<Sharder>, index: Option<usize>) {
        *self.place.lock() = index.map(|index| Place { sharder: Arc::clone(sharder), index });
    }
}

impl fmt::Debug for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_sharded = self.place.lock().is_some();
        f.debug_struct("Unit").field("is_sharded", &is_sharded).finish()
    }
}
