//! How data are shared out.

use super::Accelerator;
use crate::loader::source::DataLoaderConfiguration;

impl Accelerator {
    /// How batches are shared out among the ranks, as the builder's options say: for data sets that depend on it.
    #[must_use]
    pub fn data_loader_configuration(&self) -> DataLoaderConfiguration {
        self.options.loader
    }
}
