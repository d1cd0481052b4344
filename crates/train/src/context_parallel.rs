//! Models of which each rank of a group computes a part of every sequence.

use brigade_nn::{ContextParallel, Model};
use brigade_sharding::{ContextMethod, Mesh};
use brigade_torch::{Error, ProcessGroup, Result};

/// The ranks that have parts of each sequence, and read the same samples.
#[derive(Debug)]
pub(crate) struct ContextRanks {
    mesh: Mesh,
    group: ProcessGroup,
    method: ContextMethod,
}

impl ContextRanks {
    pub(crate) fn new(mesh: Mesh, group: ProcessGroup, method: ContextMethod) -> Self {
        Self { mesh, group, method }
    }

    pub(crate) fn group(&self) -> &ProcessGroup {
        &self.group
    }

    pub(crate) fn method(&self) -> ContextMethod {
        self.method
    }

    /// Returns the context with which models are built.
    pub(crate) fn of_models(&self) -> ContextParallel {
        ContextParallel { group: Some(self.group.clone()), method: self.method }
    }

    /// Fails for a model that would compute whole sequences on each rank.
    pub(crate) fn check<M>(&self, model: &Model<M>) -> Result<()> {
        let ranks =
            model.context_parallel().and_then(|it| it.group.as_ref()).map_or(1, ProcessGroup::size);
        if ranks != self.group.size() {
            return Err(Error::invalid_argument(format!(
                "the ranks have parts of each sequence (mesh {}), and the model was built for {}: build it by \
                 `Accelerator::parallel().model` or `parallel().model_builder` of this Accelerator",
                self.mesh,
                if ranks == 1 { "whole sequences".to_owned() } else { format!("{ranks} parts") }
            )));
        }
        if !model.divides_sequences() && !model.parameters().is_empty() {
            return Err(Error::invalid_argument(format!(
                "the ranks have parts of each sequence (mesh {}), and no module of the model takes its part: call \
                 `ParamPath::context` in its constructor and compute with its parts, or use a transformer of \
                 brigade-models, or no ranks along cp and sp",
                self.mesh
            )));
        }
        Ok(())
    }

    /// Fails for an operation that is not supported if ranks have parts of sequences.
    pub(crate) fn refuse(&self, what: &str, instead: &str) -> Error {
        Error::invalid_argument(format!(
            "{what} does not work where ranks have parts of each sequence (mesh {}): {instead}",
            self.mesh
        ))
    }
}
