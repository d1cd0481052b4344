//! Units: parts of a model whose parameters are gathered together if the model is sharded.

use std::fmt;
use std::sync::Arc;

use brigade_torch::{Result, Sharder, TensorTree};
use parking_lot::Mutex;
use tch::{Device, Tensor};

use crate::placed::Placed;

/// A part of a model, such as a transformer's block, that is gathered as a whole if the model is sharded over ranks (a
/// module of PyTorch's `fully_shard`), and whose weights are loaded and unloaded together if a device map keeps them
/// elsewhere ([`crate::Model::dispatch`]). Created by [`crate::ParamPath::unit`] in a constructor. The forward runs in
/// [`Unit::run_on`] or [`Unit::run`], which only call the closure for other models. Clones are handles of the same
/// unit.
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
///         self.unit.run_on(input, |input| Ok(input + self.linear.forward(input)?))
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

#[derive(Clone)]
enum Place {
    /// Unit of a sharder.
    Sharded { sharder: Arc<Sharder>, index: usize },
    /// A unit of a model with a device map.
    Dispatched(Arc<Placed>),
}

impl Unit {
    /// Runs the unit's part of a forward, during which the unit's parameters are whole.
    ///
    /// # Errors
    /// Returns the errors of `forward`; if the model is sharded, those of [`Sharder::run`]; with a device map, those of
    /// reading weights.
    pub fn run<T: TensorTree>(&self, forward: impl FnOnce() -> Result<T>) -> Result<T> {
        let place = self.place.lock().clone();
        match place {
            Some(Place::Sharded { sharder, index }) => sharder.run(index, forward),
            Some(Place::Dispatched(placed)) => {
                let _held = placed.hold()?;
                forward()
            }
            None => forward(),
        }
    }

    /// Runs the unit's part of a forward like [`Unit::run`], after moving its input to the device on which the unit's
    /// layers compute, because a device map may put neighbouring units on different devices.
    ///
    /// # Errors
    /// Returns the errors of [`Unit::run`]; [`brigade_torch::ErrorKind::Tensor`] if the input cannot be moved.
    pub fn run_on<T: TensorTree>(
        &self,
        input: &Tensor,
        forward: impl FnOnce(&Tensor) -> Result<T>,
    ) -> Result<T> {
        match self.device().filter(|&device| device != input.device()) {
            Some(device) => {
                let input = input.f_to_device(device)?;
                self.run(|| forward(&input))
            }
            None => self.run(|| forward(input)),
        }
    }

    /// Returns the device on which the unit's layers compute, to which their inputs must be moved. `None` if the model
    /// has no device map, so that all of it is on one device.
    #[must_use]
    pub fn device(&self) -> Option<Device> {
        match self.place.lock().as_ref()? {
            Place::Sharded { .. } => None,
            Place::Dispatched(placed) => Some(placed.device),
        }
    }

    /// Returns `true` if the unit's parameters are the same tensors during and after its forward: the model is neither
    /// sharded nor has it a device map.
    #[must_use]
    pub fn keeps_parameters(&self) -> bool {
        self.place.lock().is_none()
    }

    /// Returns `true` if the unit's key-value cache is to be in the host's memory, because a device map offloads the
    /// unit's weights together with its cache
    /// ([`DeviceMap::offload_caches`](brigade_sharding::device_map::DeviceMap::offload_caches)).
    #[must_use]
    pub fn offloads_cache(&self) -> bool {
        match self.place.lock().as_ref() {
            Some(Place::Dispatched(placed)) => placed.offloads_cache,
            Some(Place::Sharded { .. }) | None => false,
        }
    }
}

impl Unit {
    /// Sets the unit's index in a sharder. Without one, [`Unit::run`] is a plain call.
    pub(crate) fn set_place(&self, sharder: &Arc<Sharder>, index: Option<usize>) {
        *self.place.lock() =
            index.map(|index| Place::Sharded { sharder: Arc::clone(sharder), index });
    }

    /// Sets the device on which the unit computes, by a device map.
    pub(crate) fn set_placed(&self, placed: Arc<Placed>) {
        *self.place.lock() = Some(Place::Dispatched(placed));
    }
}

impl fmt::Debug for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match &*self.place.lock() {
            None => "as it is",
            Some(Place::Sharded { .. }) => "sharded",
            Some(Place::Dispatched(_)) => "dispatched",
        };
        f.debug_struct("Unit").field("place", &place).finish()
    }
}
