//! Whether a forward of a model can be recorded as a graph.

use brigade_torch::{DeviceExt, records_graphs};

use super::Model;

impl<M> Model<M> {
    /// Returns `Ok` if the memory and the operations of the model's forward allow a recording as a graph that is replayed
    /// ([`brigade_torch::Graph`]), otherwise the reason why they do not. An operation that waits for the device makes a
    /// recording fail nevertheless.
    ///
    /// ```
    /// use brigade_nn::{Linear, Model};
    ///
    /// let model = Model::new(|path| Linear::new(path, 4, 2))?;
    /// assert_eq!(model.records_forwards(), Err("cpu records no graphs".to_owned()));
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the reason, such as weights that are loaded for each use, parameters that are spread over ranks, and a
    /// device without graphs.
    pub fn records_forwards(&self) -> Result<(), String> {
        let reason = if self.is_deferred() {
            "the parameters have no memory yet"
        } else if self.is_sharded {
            "the parameters are spread over the ranks, and their memory moves from unit to unit"
        } else if self.tensor.is_some() || self.experts.is_some() || self.context.is_some() {
            "ranks divide layers, experts or sequences between them, and send messages within the forward"
        } else if self.stages.is_some() {
            "ranks have stages of the model, and send messages within the forward"
        } else if self.dispatched.as_ref().is_some_and(|it| !it.rings().is_empty()) {
            "a device map loads some of the weights for each use"
        } else if self.entries.iter().any(|entry| entry.tensor.device() != self.device) {
            "the weights are on several devices"
        } else if !records_graphs(self.device) {
            return Err(format!("{} records no graphs", self.device.label()));
        } else {
            return Ok(());
        };
        Err(reason.to_owned())
    }
}
