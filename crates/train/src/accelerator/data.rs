//! Data: how it is shared out, where it lies, and where an epoch begins.

use super::Accelerator;
use crate::loader::PreparedLoader;
use crate::loader::source::{DataLoaderConfiguration, Loader};

impl Accelerator {
    /// How batches are shared out among the ranks, as the builder's options say: for data sets that depend on it.
    #[must_use]
    pub fn data_loader_configuration(&self) -> DataLoaderConfiguration {
        self.options.loader
    }

    /// Leaves out the first batches of a loader's next epoch, as after a restart that no checkpoint
    /// tells of. A loader that `load_state` has restored does so by itself.
    pub fn skip_first_batches<L: Loader>(&self, loader: &PreparedLoader<L>, batches: usize) {
        let loader = loader.inner();
        loader.set_skip_samples(0);
        loader.set_skip_batches(batches);
    }
}
